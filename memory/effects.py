"""Drivers of work that waits for stores and models: one that blocks, and one that awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Effect(NamedTuple):
    """Something to wait for, in both colours."""

    blocking: Callable[[], Any]
    awaiting: Callable[[], Awaitable[Any]]


Effects = Generator[Effect, Any, T]


def run(steps: Effects[T]) -> T:
    """Take all steps in the calling thread; whatever ends that, what they hold is let go."""
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
    """Take all steps from a coroutine; whatever ends that, what they hold is let go."""
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
    """The same steps; who awaits them has what is computed between them computed in a thread.

    So that steps with much to compute, which would hold up an event loop, do not. What is waited
    for is waited for on the loop, as always.
    """
    advance: Callable[[], Any] = partial(steps.send, None)
    while True:
        effect, result = yield _advancing(advance)
        if effect is None:
            return result  # type: ignore[no-any-return]
        try:
            answer = yield effect
        except Exception as exc:
            advance = partial(steps.throw, exc)
        else:
            advance = partial(steps.send, answer)


def _advancing(advance: Callable[[], Any]) -> Effect:
    """The effect that goes on to the next one, and gives it; at the end None, and the result."""

    def advanced() -> tuple[Effect | None, Any]:
        try:
            return advance(), None
        except StopIteration as stop:  # which no future takes
            return None, stop.value

    return Effect(advanced, lambda: asyncio.to_thread(advanced))
