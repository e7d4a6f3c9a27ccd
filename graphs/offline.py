"""Graphs that run after a conversation: one extracts its memories, one learns instructions."""

from __future__ import annotations

from typing import Annotated, Any

from langchain_core.messages import AnyMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.store.base import BaseStore
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from perdure.memory.extraction import Extraction
from perdure.memory.instructions import InstructionsVersion
from perdure.memory.options import instance
from perdure.memory.reducers import messages
from perdure.memory.update_instructions import UpdateInstructions


class ExtractionState(TypedDict, total=False):
    """A thread, and the report of its extraction."""

    thread_id: str
    report: str


class ReflectionState(TypedDict, total=False):
    """A conversation with feedback, and the instructions that were learned from it."""

    messages: Annotated[list[AnyMessage], messages]
    feedback: Any
    instructions: str
    version: int


def extraction_graph(extraction: Extraction) -> CompiledStateGraph[Any, None, Any, Any]:
    """Compile the graph that extracts the memories of a thread; twice is as once.

    Its input is `{"thread_id": …}`, its output has a `report`. The run's config fills in the
    namespace.
    """
    instance("extraction", extraction, Extraction, "Extraction(saver, store)")

    def extract(state: ExtractionState, config: RunnableConfig) -> dict[str, Any]:
        return {"report": str(extraction.extract(state["thread_id"], config))}

    async def aextract(state: ExtractionState, config: RunnableConfig) -> dict[str, Any]:
        return {"report": str(await extraction.aextract(state["thread_id"], config))}

    return _compiled(ExtractionState, "extract", RunnableLambda(extract, aextract))


def reflection_graph(
    reflection: UpdateInstructions, *, store: BaseStore | None = None
) -> CompiledStateGraph[Any, None, Any, Any]:
    """Compile the graph that learns instructions from a conversation.

    Its input is `{"messages": […], "feedback": …}`, where feedback is text, a message or JSON, or
    missing; its output has the `instructions` that hold then and their `version`. `store` has the
    instructions, if `reflection` names none.
    """
    instance("reflection", reflection, UpdateInstructions, "update_instructions(…)")

    def output(version: InstructionsVersion) -> dict[str, Any]:
        return {"instructions": version.text, "version": version.version}

    def reflect(state: ReflectionState, config: RunnableConfig) -> dict[str, Any]:
        feedback = state.get("feedback")
        return output(reflection.rewrite(state["messages"], config, feedback=feedback))

    async def areflect(state: ReflectionState, config: RunnableConfig) -> dict[str, Any]:
        feedback = state.get("feedback")
        return output(await reflection.arewrite(state["messages"], config, feedback=feedback))

    return _compiled(ReflectionState, "reflect", RunnableLambda(reflect, areflect), store)


def _compiled(
    state: Any, name: str, node: RunnableLambda[Any, Any], store: BaseStore | None = None
) -> CompiledStateGraph[Any, None, Any, Any]:
    """A graph of one node."""
    builder: StateGraph[Any, None, Any, Any] = StateGraph(state)
    builder.add_node(name, node)
    builder.add_edge(START, name)
    return builder.compile(store=store, name=name)
