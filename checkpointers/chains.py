"""When a run is over: langchain's callbacks tell, however it ends.

langgraph starts and ends each run through langchain's callback managers, and calls `on_chain_end`
or `on_chain_error` once the run has put its last checkpoint: also when it was cancelled, was left
by its iterator being closed, or raised an exception that somebody keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, Final
from uuid import UUID
from weakref import WeakValueDictionary

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook


class Chain:
    """One run of a Runnable: of a graph, or of something in a graph.

    Attributes:
        parent: What it runs inside of.
        over: Whether it has ended.
    """

    __slots__ = ("__weakref__", "_listeners", "over", "parent")

    def __init__(self, parent: Chain | None) -> None:
        self.parent = parent
        self.over = False
        self._listeners: list[Callable[[], None]] = []

    def within(self, other: Chain) -> bool:
        """Whether it is the other, or runs inside of it."""
        chain: Chain | None = self
        while chain is not None and chain is not other:
            chain = chain.parent
        return chain is not None

    def when_over(self, tell: Callable[[], None]) -> None:
        """Have a function called when it ends."""
        self._listeners.append(tell)

    def end(self) -> None:
        """It is over."""
        self.over = True
        while self._listeners:
            self._listeners.pop()()


_live: WeakValueDictionary[UUID, Chain] = WeakValueDictionary()
_current: ContextVar[Chain | None] = ContextVar("perdure_chain", default=None)


class _Watch(BaseCallbackHandler):
    run_inline = True  # in the context of the run, where a saver is called next

    # only chains are looked at; what is not ignored is told, at a cost
    ignore_llm = ignore_chat_model = ignore_retriever = True
    ignore_agent = ignore_retry = ignore_custom_event = True

    def on_chain_start(
        self,
        serialized: dict[str, Any],
        inputs: dict[str, Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        parent = _live.get(parent_run_id) if parent_run_id is not None else None
        _live[run_id] = chain = Chain(parent)
        _current.set(chain)

    def on_chain_end(self, outputs: dict[str, Any], *, run_id: UUID, **kwargs: Any) -> None:
        self._over(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._over(run_id)

    def _over(self, run_id: UUID) -> None:
        chain = _live.pop(run_id, None)
        if chain is not None:
            chain.end()


_WATCH: Final = _Watch()
_watch: ContextVar[Any] = ContextVar("perdure_watch", default=_WATCH)


@cache
def watch() -> None:
    """From now on, look at every chain of this process that begins; langchain has no way back."""
    register_configure_hook(_watch, inheritable=True)


def current() -> Chain | None:
    """The chain that began last in this context, if `watch` was called before and it goes on."""
    chain = _current.get()
    return None if chain is None or chain.over else chain
