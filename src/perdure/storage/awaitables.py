"""Results of blocking methods that may also be awaited, as langgraph's async classes are used.

langgraph has a class for blocking and one for async use; perdure's classes are both. A method that
one of langgraph's blocks in and the other awaits returns one of these: unlike a coroutine, it warns
of nothing when nobody awaits it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_event_loop() -> bool:
    """Whether the calling thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def awaited(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The method that is awaited, and does in a thread what a blocking one does."""

    @wraps(method)
    async def twin(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        blocking: Callable[P, T] = getattr(self, method.__name__)  # a subclass may have another
        return await asyncio.to_thread(blocking, *args, **kwargs)

    twin.__name__, twin.__doc__ = f"a{method.__name__}", f"See `{method.__name__}`."
    return twin  # type: ignore[return-value] # `wraps` names the argument `self`


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
