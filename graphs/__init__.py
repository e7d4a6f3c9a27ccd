"""Composed agent graphs, ready to run or to take apart."""

from perdure.graphs.chat import chat_graph, memory_agent
from perdure.graphs.responder import QuotingResponder

__all__ = ["QuotingResponder", "chat_graph", "memory_agent"]
