"""What a run knows: its store, its thread and checkpoint, the place of its instructions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.config import get_store
from langgraph.runtime import get_runtime

from perdure.errors import ConfigurationError
from perdure.memory.options import instance

if TYPE_CHECKING:
    from perdure.stores.base import Provenance, StoredItem


@runtime_checkable
class Versioned(Protocol):
    """A store that keeps versions and swaps by comparing them, as perdure's do."""

    def history(self, namespace: tuple[str, ...], key: str) -> list[StoredItem]:
        """Every version of a key."""

    async def ahistory(self, namespace: tuple[str, ...], key: str) -> list[StoredItem]:
        """See `history`."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of the instructions of a run, in a store with versions, and the run's thread."""

    store: Any
    namespace: tuple[str, ...]
    key: str
    thread_id: str | None
    checkpoint_id: str | None


def versioned(store: Any) -> Any:
    """A store, if it keeps versions."""
    expected = "a store that keeps versions, like perdure.stores.SQLiteStore.open(path)"
    return instance("the store of instructions", store, Versioned, expected)


def store_of_graph(what: str) -> Any:
    """The store that the graph in which this runs was compiled with; `what` needs one."""
    try:
        store: Any = get_store()
    except (RuntimeError, KeyError):  # not within a graph
        store = None
    if store is None:
        raise ConfigurationError(
            f"{what} have no store: pass store=, or compile the graph with one"
        )
    return store


def source(config: RunnableConfig | None) -> tuple[str | None, str | None]:
    """The thread of a run and, within a node, the checkpoint from which the (sub)graph goes on."""
    given = ensure_config(config)["configurable"]
    thread = given.get("thread_id")
    if thread is None:
        return None, None
    try:
        runtime: Any = get_runtime()
    except (RuntimeError, KeyError):  # not within a run
        runtime = None
    running = getattr(runtime, "execution_info", None)  # None: a chain's run, not a graph's
    if running is not None and running.thread_id == thread:
        return str(thread), running.checkpoint_id
    return str(thread), given.get("checkpoint_id")


def provenance(place: Place) -> Provenance | None:
    """What a store is to note of who writes; None: there is no thread."""
    # here: it loads all of the store, which `trim` does not need
    from perdure.stores.base import Provenance

    if place.thread_id is None:
        return None
    return Provenance(thread_id=place.thread_id, checkpoint_id=place.checkpoint_id)
