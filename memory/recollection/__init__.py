"""UseMemories what is remembered, and checking that it is recalled."""
