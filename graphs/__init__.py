"""Prebuilt agent graphs whose parts can also be used separately."""

from perdure.graphs.chat import chat_graph, memory_agent
from perdure.graphs.responder import QuotingResponder

__all__ = ["QuotingResponder", "chat_graph", "memory_agent"]
