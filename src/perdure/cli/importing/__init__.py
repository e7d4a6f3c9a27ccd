"""Read the exports of other programs, and import the exported conversations as threads."""
