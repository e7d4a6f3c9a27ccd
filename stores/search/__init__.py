"""Search in a store: text analysis, embeddings, indexes and ranking."""
