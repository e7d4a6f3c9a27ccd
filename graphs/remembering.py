"""The node that has memories formed of its thread, and the graph that forms them."""

from __future__ import annotations

import logging
from typing import Any, Protocol, runtime_checkable

from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from perdure.errors import InvalidConfig, StorageError
from perdure.memory.extraction import Extraction

_LOG = logging.getLogger("perdure")


@runtime_checkable
class Schedules(Protocol):
    """What forms memories of a thread later on, as `Background` does."""

    def schedule(self, thread_id: str, config: RunnableConfig | None = None) -> Any:
        """Have a thread formed."""

    async def aschedule(self, thread_id: str, config: RunnableConfig | None = None) -> Any:
        """See `schedule`."""


class Notes:
    """Notes durably which threads wait; whoever forms what waits does so when it sees fit.

    Args:
        extraction: Whose notes they are.
    """

    def __init__(self, extraction: Extraction) -> None:
        self.schedule, self.aschedule = extraction.note, extraction.anote


def remembers(background: Schedules) -> Runnable[Any, Any]:
    """A node that schedules the thread of its run, and changes nothing in the state.

    A store that refuses costs the user no answer: the log has the error, and the next turn of the
    thread schedules all of it.
    """

    def remember(state: Any, config: RunnableConfig) -> dict[str, Any]:
        try:
            background.schedule(_thread(config), config)
        except StorageError as exc:
            _put_off(config, exc)
        return {}

    async def aremember(state: Any, config: RunnableConfig) -> dict[str, Any]:
        try:
            await background.aschedule(_thread(config), config)
        except StorageError as exc:
            _put_off(config, exc)
        return {}

    return RunnableLambda(remember, aremember)


class FormingState(TypedDict, total=False):
    """What is formed, and what came of it."""

    thread_id: str
    report: str


def extraction_graph(extraction: Extraction) -> CompiledStateGraph[Any, None, Any, Any]:
    """Compile the graph that forms memories of a thread: the other half of a chat that schedules.

    Its input is `{"thread_id": …}`, its output has a `report`. The run's config fills the
    extraction's namespace. To run it twice changes nothing.

    Args:
        extraction: Forms them.
    """

    def form(state: FormingState, config: RunnableConfig) -> dict[str, Any]:
        return {"report": str(extraction.extract(state["thread_id"], config))}

    async def aform(state: FormingState, config: RunnableConfig) -> dict[str, Any]:
        return {"report": str(await extraction.aextract(state["thread_id"], config))}

    builder: StateGraph[Any, None, Any, Any] = StateGraph(FormingState)
    builder.add_node("form", RunnableLambda(form, aform))
    builder.add_edge(START, "form")
    return builder.compile(name="extraction")


def _put_off(config: RunnableConfig, exc: StorageError) -> None:
    _LOG.error("no memories will be formed of %r until its next turn: %s", _thread(config), exc)


def _thread(config: RunnableConfig) -> str:
    thread = config.get("configurable", {}).get("thread_id")
    if not thread:
        raise InvalidConfig(
            "the run has no thread_id, so nothing can be formed of it; pass "
            'config={"configurable": {"thread_id": "…"}}'
        )
    return str(thread)
