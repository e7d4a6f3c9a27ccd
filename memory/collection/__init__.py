"""Facts and episodes: small memories that are added, changed and forgotten, also by tools."""
