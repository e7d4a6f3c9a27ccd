"""Results of blocking methods that may also be awaited, as langgraph's async classes are used.

langgraph has a class for blocking and one for async use; perdure's classes are both. A method that
one of langgraph's blocks in and the other awaits returns one of these: unlike a coroutine, it warns
of nothing when nobody awaits it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def in_event_loop() -> bool:
    """Whether the calling thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class OnAwait(Generic[T]):
    """Runs a coroutine function each time it is awaited, and never otherwise."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._run = run

    def __await__(self) -> Generator[Any, Any, T]:
        return self._run().__await__()


class AwaitableInt(int):
    """A whole number; awaited, it is returned at once."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, int]:
        return int(self)
        yield
