"""Which run of a graph a call of the checkpointer belongs to, and what that run set out from.

langgraph gives each run a `Runtime` with a stream writer of its own, a function made for it, and
puts it into every config of the run, whichever thread, task or context drives it. So that function
is the run. Neither contexts nor tasks are: a stream may be driven from a new one at each step.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Final
from weakref import WeakKeyDictionary

from langchain_core.runnables import RunnableConfig
from langgraph.runtime import Runtime

from perdure.checkpointers.base import Address

HEAD: Final = object()  # what a run set out from that was not told where to begin


class Run:
    """One run of a graph, for as long as its stream writer lives.

    Attributes:
        began: By thread and namespace: `HEAD`, or the id of the checkpoint it was told to start
            from (None: from nothing). The first read decides: it is the graph's own, and a node
            may look at whatever it likes later.
    """

    __slots__ = ("began",)

    def __init__(self) -> None:
        self.began: dict[tuple[str, str], object] = {}

    def begins(self, at: Address, *, as_head: bool) -> None:
        """Note a read of the checkpoint at an address, if it is the first there."""
        self.began.setdefault(at[:2], HEAD if as_head else at.checkpoint_id)


_runs: WeakKeyDictionary[Callable[..., Any], Run] = WeakKeyDictionary()


def runtime_of(config: RunnableConfig) -> Runtime[Any] | None:
    """The runtime in a config, if a graph is running."""
    values = config.get("configurable", {}).values()
    return next((value for value in values if isinstance(value, Runtime)), None)


def run_of(runtime: Runtime[Any] | None) -> Run | None:
    """The run that has a runtime; None if its stream writer is one that all runs share."""
    writer = runtime.stream_writer if runtime is not None else None
    if not isinstance(writer, FunctionType) or "<locals>" not in writer.__qualname__:
        return None
    return _runs.get(writer) or _runs.setdefault(writer, Run())
