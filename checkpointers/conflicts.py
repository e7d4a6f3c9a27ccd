"""Whether a put must find its parent at the head of the thread, so that no run overwrites another.

A run sets out from the head and puts its checkpoints upon it; when another run moved the head
meanwhile, they conflict. A run that was told to start from an older checkpoint does not, until it
has put the first of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.base import Address, address
from perdure.checkpointers.runs import HEAD, run_of, runtime_of

# what this context read last, and whether as the head: `update_state` reads and puts in one go
_last: ContextVar[tuple[Address, bool] | None] = ContextVar("perdure_read", default=None)


def note_read(config: RunnableConfig, at: Address, *, as_head: bool) -> None:
    """Note that a checkpoint was read: as the head, or because it was named.

    Args:
        config: With which it was asked for.
        at: The checkpoint; without an id, there was none.
        as_head: Whether the config named none.
    """
    _last.set((at, as_head))
    run = run_of(runtime_of(config))
    if run is not None:
        run.begins(at, as_head=as_head)


def note_listed(config: RunnableConfig | None, found: RunnableConfig | None) -> None:
    """Note that a listing gave a checkpoint, or no more: a subgraph that replays starts from it."""
    run = run_of(runtime_of(config)) if config else None
    if run is not None and config is not None and "thread_id" in config["configurable"]:
        at = address(found) if found else address(config)._replace(checkpoint_id=None)
        run.begins(at, as_head=False)


def contests(config: RunnableConfig, metadata: Mapping[str, Any], parent: Address) -> bool:
    """Whether a put upon `parent` conflicts with any that moved the head on from there."""
    if metadata.get("source") == "update":
        return _last.get() == (parent, True)
    runtime = runtime_of(config)
    if runtime is None:
        return False
    run = run_of(runtime)
    return run is None or run.began.get(parent[:2], HEAD) != parent.checkpoint_id
