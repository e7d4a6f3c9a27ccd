"""Short-term memory: reducers, trimming, summaries and token counts for a conversation."""
