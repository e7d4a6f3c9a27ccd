"""Any course of a graph leaves the same thread in perdure's file as in langgraph's memory."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st
from langgraph.checkpoint.memory import InMemorySaver

from perdure.checkpointers import SQLiteCheckpointer
from tests.backends import places
from tests.contracts.programs import Action, Replay, Turn, World, actions

EXAMPLES = settings().max_examples  # of the profile: `--hypothesis-profile deep` does thousands

KEEPS = Turn(["keeper"], named=True, blocking=True, durability="sync")


@contextmanager
def worlds(backend: str) -> Iterator[tuple[World, World]]:
    """The graph on a database of perdure's, and on langgraph's saver for memory."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        place = places(Path(folder))[backend]()
        ours = World(lambda: reopened(), place.saver(synchronous="normal"), runner)

        def reopened() -> SQLiteCheckpointer:
            ours.saver.close()
            return place.saver(synchronous="normal")

        memory = InMemorySaver()
        try:
            yield ours, World(lambda: memory, memory, runner)
        finally:
            ours.saver.close()


def compare(course: list[Action], number: int, backend: str = "file") -> None:
    """Take a course in both worlds; after each action they look the same."""
    with worlds(backend) as (ours, theirs):
        for action in course:
            expected, actual = theirs.act(action), ours.act(action)

            assert expected == actual, f"what came of {action}"
            assert theirs.thread() == ours.thread(), f"the thread after {action}"
        listed = theirs.listings(number)
        for name, actual in ours.listings(number).items():
            assert listed.get(name) == actual, f"listing {name}"


@settings(max_examples=2 * EXAMPLES)
@given(actions(subgraphs=False), st.integers(0, 9))
def test_any_course(course: list[Action], number: int) -> None:
    """Turns, interrupts, failures, edits, forks, replays: same values, tasks and history."""
    compare(course, number)


@settings(max_examples=EXAMPLES)
@example([KEEPS, KEEPS, Replay(True, "sync", 3)], 0)  # a subgraph's state of an earlier moment
@given(actions(subgraphs=True), st.integers(0, 9))
def test_any_course_with_subgraphs(course: list[Action], number: int) -> None:
    """The same with subgraphs, which keep their state for a run or for the thread."""
    compare(course, number)


@settings(max_examples=EXAMPLES // 6)
@given(actions(subgraphs=True), st.integers(0, 9))
def test_any_course_in_postgres(course: list[Action], number: int) -> None:
    """The same in Postgres."""
    compare(course, number, "postgres")
