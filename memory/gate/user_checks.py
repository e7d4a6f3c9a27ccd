"""Checks of the user's own, sync or async, asked from either colour about many things at once."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from perdure.memory.effects import Effect

Ask = Callable[[Any], Any]


def asking(ask: Ask, things: Sequence[Any]) -> Effect:
    """A step: what a function answers for each, or the error that it raised instead.

    A function that blocks is called in a thread by who awaits; one that is async runs in an event
    loop of its own for who blocks.
    """
    return Effect(lambda: _answers(ask, things), lambda: _aanswers(ask, things))


def name_of(ask: Ask) -> str:
    """What a function is called in reasons and messages."""
    return str(getattr(ask, "__name__", type(ask).__name__))


def _answers(ask: Ask, things: Sequence[Any]) -> list[Any]:
    answers = [_answer(ask, thing) for thing in things]
    if not any(map(inspect.isawaitable, answers)):
        return answers
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_awaited(answers))
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1) as threads:  # this thread's loop is running, and may not run another
        return threads.submit(context.run, asyncio.run, _awaited(answers)).result()


async def _aanswers(ask: Ask, things: Sequence[Any]) -> list[Any]:
    if inspect.iscoroutinefunction(ask):
        return await _awaited([ask(thing) for thing in things])
    return await _awaited(
        await asyncio.to_thread(lambda: [_answer(ask, thing) for thing in things])
    )


def _answer(ask: Ask, thing: Any) -> Any:
    try:
        return ask(thing)
    except Exception as exc:
        return exc


async def _awaited(answers: Sequence[Any]) -> list[Any]:
    return [await _one(each) if inspect.isawaitable(each) else each for each in answers]


async def _one(answer: Any) -> Any:
    try:
        return await answer
    except Exception as exc:
        return exc
