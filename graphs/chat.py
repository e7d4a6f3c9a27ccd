"""A chat with thread-scoped memory: the smallest graph that resumes by `thread_id`."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from perdure.errors import ConfigurationError
from perdure.graphs.responder import QuotingResponder
from perdure.memory import ChatState, Keep


def chat_graph(
    model: BaseChatModel | None = None,
    *,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
    keep_last: int | None = None,
) -> CompiledStateGraph[ChatState, None, ChatState, ChatState]:
    """Compile a chat: a node that responds and, if asked for, one that keeps the state short.

    Args:
        model: Answers; None: a responder that works offline and quotes the thread.
        checkpointer: Makes the thread resumable.
        keep_last: About how many messages stay in the state; the window begins with a human
            message, and what leaves it stays in the checkpointer's history. None: all stay.

    Raises:
        ConfigurationError: `keep_last` is not positive.
    """
    if keep_last is not None and keep_last < 1:
        raise ConfigurationError(f"keep_last is {keep_last!r}; expected at least 1")
    chosen = model or QuotingResponder()

    def respond(state: ChatState, config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [chosen.invoke(state["messages"], config)]}

    async def arespond(state: ChatState, config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [await chosen.ainvoke(state["messages"], config)]}

    builder = StateGraph(ChatState)
    builder.add_node("respond", RunnableLambda(respond, arespond))
    builder.add_edge(START, "respond")
    if keep_last is None:
        builder.add_edge("respond", END)
    else:
        window = keep_last

        def trim(state: ChatState) -> dict[str, Any]:
            start = window_start(state["messages"], window)
            return {"messages": Keep(start=start, on_split="widen")} if start else {}

        builder.add_node("trim", trim)
        builder.add_edge("respond", "trim")
        builder.add_edge("trim", END)
    return builder.compile(checkpointer=checkpointer, name="chat")


def window_start(messages: list[BaseMessage] | Any, keep_last: int) -> int:
    """Where a window of about `keep_last` messages begins: at a human message, the newest included.

    The first human message among the last `keep_last`; if there is none, the newest one before.
    """
    humans = [i for i, message in enumerate(messages) if isinstance(message, HumanMessage)]
    inside = [i for i in humans if i >= len(messages) - keep_last]
    return inside[0] if inside else humans[-1] if humans else 0


graph = chat_graph()
"""For loaders that read `langgraph.json`; they bring their own checkpointer."""
