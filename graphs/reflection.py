"""A graph that learns instructions from a conversation which is over."""

from __future__ import annotations

from typing import Annotated, Any

from langchain_core.messages import AnyMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.store.base import BaseStore
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from perdure.errors import ConfigurationError
from perdure.memory import messages
from perdure.memory.instructions import InstructionsVersion
from perdure.memory.update_instructions import UpdateInstructions


class ReflectionState(TypedDict, total=False):
    """What there is to learn from, and what holds then."""

    messages: Annotated[list[AnyMessage], messages]
    feedback: Any
    instructions: str
    version: int


def reflection_graph(
    reflection: UpdateInstructions, *, store: BaseStore | None = None
) -> CompiledStateGraph[Any, None, Any, Any]:
    """Compile the graph. `chat_graph(…, reflection=…)` learns after each turn; this one when asked.

    Its input is `{"messages": […], "feedback": …}`, feedback being text, a message or JSON, or
    missing; its output has the `instructions` that hold then and their `version`.

    Args:
        reflection: Learns: `update_instructions(model, …)`.
        store: Where the instructions are, if they name none.

    Raises:
        ConfigurationError: The reflection is something else.
    """
    if not isinstance(reflection, UpdateInstructions):
        raise ConfigurationError(
            f"reflection is {reflection!r:.80}; expected update_instructions(…)"
        )

    def told(version: InstructionsVersion) -> dict[str, Any]:
        return {"instructions": version.text, "version": version.version}

    def reflect(state: ReflectionState, config: RunnableConfig) -> dict[str, Any]:
        said, feedback = state["messages"], state.get("feedback")
        return told(reflection.rewrite(said, config, feedback=feedback))

    async def areflect(state: ReflectionState, config: RunnableConfig) -> dict[str, Any]:
        said, feedback = state["messages"], state.get("feedback")
        return told(await reflection.arewrite(said, config, feedback=feedback))

    builder: StateGraph[Any, None, Any, Any] = StateGraph(ReflectionState)
    builder.add_node("reflect", RunnableLambda(reflect, areflect))
    builder.add_edge(START, "reflect")
    return builder.compile(store=store, name="reflection")
