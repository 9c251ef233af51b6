"""Checkpoints on disk: where they come from, what their headers say, reading and writing them whole."""
