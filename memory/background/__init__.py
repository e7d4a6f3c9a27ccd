"""Forming memories in the background: durable, debounced, observable."""
