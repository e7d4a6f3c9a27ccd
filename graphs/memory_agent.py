"""An agent that remembers on the hot path: it keeps, corrects and looks up memories by tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool
from langgraph.graph.state import CompiledStateGraph

from perdure.graphs.chat import chat_graph
from perdure.memory.collection.tools import manage_memory, search_memory
from perdure.memory.gate import Gate
from perdure.memory.recollection.recalling import use_memories

MEMORIES: Final = ("memories", "{user_id}")


def memory_agent(
    model: BaseChatModel | None = None,
    tools: Sequence[BaseTool] = (),
    *,
    namespace: tuple[str, ...] = MEMORIES,
    gate: Gate | None = None,
    **switches: Any,
) -> CompiledStateGraph[Any, None, Any, Any]:
    """Compile the agent: a chat with `manage_memory` and `search_memory` that recalls by itself.

    What the user said is searched for before the model is asked, so that it knows what bears on it
    without a call; the tools are for what it wants to keep, to correct, or to know besides. The
    run's config says whose memories: `{"configurable": {"thread_id": …, "user_id": …}}`.

    Args:
        model: Answers, and calls tools; None: a responder that works offline and calls none.
        tools: More of them.
        namespace: Where the memories are kept; see `Template`.
        gate: Decides on what is kept.
        switches: Of `chat_graph`: `checkpointer`, `store`, `window`, `instructions`, …

    Raises:
        ConfigurationError: See `chat_graph`.
    """
    switches.setdefault("recall", use_memories(namespaces=[namespace]))
    own = [manage_memory(namespace, gate=gate), search_memory(namespace)]
    return chat_graph(model, tools=[*own, *tools], **switches)
