"""Forming long-term memories of threads: of turns, and with a model of facts."""
