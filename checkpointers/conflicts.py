"""Which checkpoint a run set out from, so that two runs on one thread do not overwrite each other.

A run begins by reading a checkpoint and ends by putting others upon it. Reading and putting happen
in one context (langgraph hands it on to its tasks), so a context variable carries what was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.runtime import Runtime

_origins: ContextVar[Mapping[tuple[str, str], Origin]] = ContextVar("perdure_origins")
_LIMIT = 64  # threads a context is remembered to have read


class Origin(NamedTuple):
    """What was read: a checkpoint, and whether the caller named it (time travel)."""

    checkpoint_id: str | None
    deliberate: bool


def runtime_of(config: RunnableConfig) -> Runtime[Any] | None:
    """The run a config belongs to, if a graph is running."""
    values = config.get("configurable", {}).values()
    return next((value for value in values if isinstance(value, Runtime)), None)


def set_out(thread_id: str, ns: str, origin: Origin) -> None:
    """Note what this context read."""
    known = dict(_origins.get({}))
    known.pop((thread_id, ns), None)
    if len(known) >= _LIMIT:
        del known[next(iter(known))]
    _origins.set({**known, (thread_id, ns): origin})


def origin_of(
    config: RunnableConfig, metadata: Mapping[str, Any], thread_id: str, ns: str
) -> Origin | None:
    """What a put rests on, if it comes from a run or a state update; None: nothing to compare."""
    if metadata.get("source") != "update" and runtime_of(config) is None:
        return None
    return _origins.get({}).get((thread_id, ns))
