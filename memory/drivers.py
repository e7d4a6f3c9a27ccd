"""Drivers of work that waits for stores and models: one that blocks, and one that awaits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Step(NamedTuple):
    """Something to wait for, in both colours."""

    blocking: Callable[[], Any]
    awaiting: Callable[[], Awaitable[Any]]


Steps = Generator[Step, Any, T]


def run(steps: Steps[T]) -> T:
    """Take all steps in the calling thread."""
    try:
        step = next(steps)
        while True:
            try:
                answer = step.blocking()
            except Exception as exc:
                step = steps.throw(exc)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def arun(steps: Steps[T]) -> T:
    """Take all steps from a coroutine."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await step.awaiting()
            except Exception as exc:
                step = steps.throw(exc)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
