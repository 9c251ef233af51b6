"""Register the chosen variant with its evidence, and check what a folder or a registry holds."""
