"""Effects: work that waits for stores and models, written once, run by blocking or by awaiting.

A generator yields each `Effect` and is sent its outcome. `blocking` and `awaiting` make the two
public methods of one such generator function.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Effect(NamedTuple):
    """Something to wait for, by blocking or by awaiting."""

    blocking: Callable[[], Any]
    awaiting: Callable[[], Awaitable[Any]]


Effects = Generator[Effect, Any, T]


def run(steps: Effects[T]) -> T:
    """Take all steps in the calling thread; whatever ends that, their resources are released."""
    try:
        effect = next(steps)
        while True:
            try:
                answer = effect.blocking()
            except Exception as exc:
                effect = steps.throw(exc)
            else:
                effect = steps.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        steps.close()


async def arun(steps: Effects[T]) -> T:
    """Take all steps from a coroutine; see `run`."""
    try:
        effect = next(steps)
        while True:
            try:
                answer = await effect.awaiting()
            except Exception as exc:
                effect = steps.throw(exc)
            else:
                effect = steps.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        steps.close()


def in_thread(steps: Effects[T]) -> Effects[T]:
    """The same steps; when awaited, what they compute between effects is computed in a thread.

    So steps with much to compute do not block an event loop. Effects are awaited on the loop.
    """
    advance: Callable[[], Any] = partial(steps.send, None)
    while True:
        effect, result = yield _advance(advance)
        if effect is None:
            return result  # type: ignore[no-any-return]
        try:
            answer = yield effect
        except Exception as exc:
            advance = partial(steps.throw, exc)
        else:
            advance = partial(steps.send, answer)


def _advance(advance: Callable[[], Any]) -> Effect:
    """The effect that computes the next effect; at the end None, and the result."""

    def advanced() -> tuple[Effect | None, Any]:
        try:
            return advance(), None
        except StopIteration as stop:  # which no future takes
            return None, stop.value

    return computed(advanced)


def computed(call: Callable[[], Any]) -> Effect:
    """The effect of a computation; when awaited, it is made in a thread."""
    return Effect(call, lambda: asyncio.to_thread(call))


def blocking(make: Callable[P, Effects[T]]) -> Callable[P, T]:
    """Make the public function that blocks: `get` of `_get`, with its signature and docstring."""

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(make(*args, **kwargs))

    _publish(call, make, "")
    return call


def awaiting(make: Callable[P, Effects[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make the public coroutine function: `aget` of `_get`."""

    @wraps(make)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return await arun(make(*args, **kwargs))

    _publish(call, make, "a")
    return call


def _publish(call: Any, make: Callable[..., Any], prefix: str) -> None:
    """Give a function its public name, and as its return type what the caller gets."""
    name = make.__name__.lstrip("_")
    call.__name__ = prefix + name
    call.__qualname__ = make.__qualname__.replace(make.__name__, call.__name__)
    if prefix:
        call.__doc__ = f"See `{name}`."
    signature = inspect.signature(make)
    returned = str(signature.return_annotation).removeprefix("Effects[").removesuffix("]")
    call.__signature__ = signature.replace(return_annotation=returned)
    call.__annotations__ = {**make.__annotations__, "return": returned}
