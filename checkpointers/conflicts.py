"""Whether a put must find its parent at the head of the thread, so that no run overwrites another.

A run sets out from the head and puts its checkpoints upon it; when another run moved the head
meanwhile, they conflict. A run that was told to start from an older checkpoint does not. Reading
and putting happen in one context (langgraph hands it on to its tasks), so a context variable
carries how each checkpoint was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.runtime import Runtime

from perdure.checkpointers.base import Address

_read: ContextVar[Mapping[Address, bool]] = ContextVar("perdure_read")
_LIMIT = 64  # checkpoints a context is remembered to have read


def runtime_of(config: RunnableConfig) -> Runtime[Any] | None:
    """The run a config belongs to, if a graph is running."""
    values = config.get("configurable", {}).values()
    return next((value for value in values if isinstance(value, Runtime)), None)


def note_read(at: Address, *, as_head: bool) -> None:
    """Note that this context read a checkpoint: as the head, or because it was named."""
    known = dict(_read.get({}))
    known.pop(at, None)
    if len(known) >= _LIMIT:
        del known[next(iter(known))]
    _read.set({**known, at: as_head})


def contests(config: RunnableConfig, metadata: Mapping[str, Any], parent: Address) -> bool:
    """Whether a put upon `parent` conflicts with any that moved the head on from there."""
    if metadata.get("source") != "update" and runtime_of(config) is None:
        return False
    known = _read.get({})
    if parent in known:
        return known[parent]
    # one that this run itself has put, if it read anything of the thread
    return any(at[:2] == parent[:2] for at in known)
