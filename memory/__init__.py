"""Short-term memory: what to show the model, what to keep in the state."""

from perdure.memory.reducers import ChatState, Keep, keepable, message_reducer, messages

__all__ = ["ChatState", "Keep", "keepable", "message_reducer", "messages"]
