"""Forming long-term memory from threads: at once, or in the background."""
