"""Long-term memory: what is kept of conversations in a store, and how it is found again."""
