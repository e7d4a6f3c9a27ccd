"""Long-term memories, profiles and instructions, which are kept in a LangGraph store.

This package extracts memories from conversations, checks whether each memory may be stored, and
finds the stored memories that are relevant to a question.
"""
