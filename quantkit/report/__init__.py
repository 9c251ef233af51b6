"""What a run shows: a table, HTML with plots, Markdown, JUnit; all from its stored records."""
