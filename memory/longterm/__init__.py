"""The ground of long-term memory: memories in a store, and when two say the same."""
