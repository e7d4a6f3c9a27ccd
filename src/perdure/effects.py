"""Effects: what waits for databases and models, written once, run by blocking or by awaiting.

An operation is a coroutine that awaits nothing but effects. `run` drives it without an event loop,
each effect by its blocking call; `arun` drives it in one. `blocking` and `awaiting` make the two
public methods of an operation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial, wraps
from inspect import CORO_CREATED, getcoroutinestate, signature
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from perdure.storage import flow

T = TypeVar("T")
P = ParamSpec("P")
Operation = Coroutine["Effect[Any]", Any, T]
Hop = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Makes a call in another thread."""


class Effect(Generic[T]):
    """Something to wait for, within an operation.

    Args:
        blocking: Does it, and blocks.
        awaiting: Does it without blocking an event loop.
    """

    __slots__ = ("awaiting", "blocking")

    def __init__(self, blocking: Callable[[], T], awaiting: Callable[[], Awaitable[T]]) -> None:
        self.blocking, self.awaiting = blocking, awaiting

    def __await__(self) -> Generator[Effect[T], Any, T]:
        answer: T = yield self  # to what drives the operation
        return answer


class _End(NamedTuple):
    """The end of an operation."""

    result: Any


def run(operation: Operation[T]) -> T:
    """Run an operation in the calling thread; every error is raised within it."""
    return flow.run_flow(operation, lambda effect: effect.blocking())


async def arun(operation: Operation[T], hop: Hop | None = None) -> T:
    """Run an operation from a coroutine; see `run`.

    Args:
        operation: What to run.
        hop: Makes what it computes between effects in another thread; None: it is computed here.
    """
    go_on: Callable[[], Any] = partial(operation.send, None)
    while True:
        if hop is None:
            step = _step(go_on)
        else:
            try:
                step = await hop(partial(_step, go_on))
            except BaseException:  # it is cancelled
                if getcoroutinestate(operation) == CORO_CREATED:
                    operation.close()
                raise
        if isinstance(step, _End):
            return step.result  # type: ignore[no-any-return]
        try:
            answer = await step.awaiting()
        except Exception as exc:
            go_on = partial(operation.throw, exc)
        except BaseException as exc:  # it is cancelled
            go_on, hop = partial(operation.throw, exc), None
        else:
            go_on = partial(operation.send, answer)


def _step(go_on: Callable[[], Any]) -> Effect[Any] | _End:
    """The next effect of an operation, or its end."""
    try:
        return go_on()  # type: ignore[no-any-return]
    except StopIteration as stop:  # which no future takes
        return _End(stop.value)


def run_in_thread(operation: Operation[T]) -> Effect[T]:
    """The whole of an operation; when awaited, what it computes is computed in a thread."""
    return Effect(lambda: run(operation), lambda: arun(operation, asyncio.to_thread))


def call_method(of: Any, method: str, *args: Any, **options: Any) -> Effect[Any]:
    """The effect of a method that blocks; when awaited, of its twin, whose name begins with `a`."""
    return Effect(
        lambda: getattr(of, method)(*args, **options),
        lambda: getattr(of, f"a{method}")(*args, **options),
    )


def run_computation(call: Callable[[], T]) -> Effect[T]:
    """The effect of a computation; when awaited, it is made in a thread."""
    return Effect(call, lambda: asyncio.to_thread(call))


def blocking(operation: Callable[P, Operation[T]]) -> Callable[P, T]:
    """The public function that blocks: `get` of the operation `_get`, with its signature."""

    @wraps(operation)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(operation(*args, **kwargs))

    del call.__wrapped__  # a coroutine function, which libraries would take `call` for
    call.__signature__ = signature(operation)  # type: ignore[attr-defined]
    return _named(call, operation.__name__.lstrip("_"))


def awaiting(operation: Callable[P, Operation[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The public coroutine function: `aget` of the operation `_get`."""

    @wraps(operation)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return await arun(operation(*args, **kwargs))

    name = operation.__name__.lstrip("_")
    call.__doc__ = f"See `{name}`."
    return _named(call, f"a{name}")


def _named(call: Callable[P, T], name: str) -> Callable[P, T]:
    call.__qualname__ = call.__qualname__.replace(call.__name__, name)
    call.__name__ = name
    return call
