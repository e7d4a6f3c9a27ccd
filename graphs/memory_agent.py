"""An agent that remembers on the hot path: it keeps, corrects and looks up memories by tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph.state import CompiledStateGraph
from langgraph.store.base import BaseStore

from perdure.graphs.chat import Part, chat_graph
from perdure.memory.extraction import remember_turns
from perdure.memory.gate import Gate
from perdure.memory.instructions import UseInstructions
from perdure.memory.recall import NAMESPACE
from perdure.memory.tools import manage_memory, search_memory
from perdure.memory.use_memories import UseMemories, use_memories


def memory_agent(
    model: BaseChatModel | str | None = None,
    tools: Sequence[BaseTool] = (),
    *,
    memory: Sequence[Part] = (),
    namespace: tuple[str, ...] = NAMESPACE,
    gate: Gate | None = None,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
    store: BaseStore | None = None,
) -> CompiledStateGraph[Any, None, Any, Any]:
    """Compile the agent: a chat with the tools `manage_memory` and `search_memory`.

    It recalls by itself what answers the user's message, and remembers the turns of a run at its
    end. The run's config says whose memories: `{"configurable": {"thread_id": …, "user_id": …}}`.

    `memory` and the other options are those of `chat_graph`; `use_memories(…)` among the parts
    replaces the agent's own. The memories are kept in `namespace`, see `Template`, as far as the
    gate admits them.
    """
    # they replace the system message, so they come first
    first: list[Part] = [part for part in memory if isinstance(part, UseInstructions)]
    rest = [part for part in memory if not isinstance(part, UseInstructions)]
    if not any(isinstance(part, UseMemories) for part in rest):
        first.append(use_memories(namespace=namespace))
    return chat_graph(
        model,
        [manage_memory(namespace, gate=gate), search_memory(namespace), *tools],
        memory=[*first, *rest, remember_turns(namespace=namespace, gate=gate)],
        checkpointer=checkpointer,
        store=store,
    )
