"""Random programs leave the same thread in perdure's database and in langgraph's memory saver."""

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
from tests.contracts.programs import Action, Replay, Turn, Update, World, action_lists

EXAMPLES = settings().max_examples  # of the hypothesis profile; the profile "deep" has thousands

KEEPER_TURN = Turn(["keeper"], has_message_id=True, blocking=True, durability="sync")


@contextmanager
def open_worlds(backend: str) -> Iterator[tuple[World, World]]:
    """Yield the graph on a database of perdure and on langgraph's `InMemorySaver`."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        place = places(Path(folder))[backend]()
        ours = World(lambda: reopen(), place.saver(synchronous="normal"), runner)

        def reopen() -> SQLiteCheckpointer:
            ours.saver.close()
            return place.saver(synchronous="normal")

        memory = InMemorySaver()
        try:
            yield ours, World(lambda: memory, memory, runner)
        finally:
            ours.saver.close()


def compare_worlds(program: list[Action], number: int, backend: str = "file") -> None:
    """Perform the actions in both worlds. Compare the result and the thread after each action."""
    with open_worlds(backend) as (ours, theirs):
        for action in program:
            expected, actual = theirs.perform(action), ours.perform(action)

            assert expected == actual, f"what came of {action}"
            assert theirs.read_thread() == ours.read_thread(), f"the thread after {action}"
        listed = theirs.list_checkpoints(number)
        for name, actual in ours.list_checkpoints(number).items():
            assert listed.get(name) == actual, f"listing {name}"


ASKS = Turn(["ask", "remove"], has_message_id=False, blocking=False, durability="sync")


@settings(max_examples=2 * EXAMPLES)
@example([Turn([], False, False, "sync"), ASKS, Update("edit", "mended", False)], 0)
@given(action_lists(subgraphs=False), st.integers(0, 9))
def test_random_program_has_same_results_as_langgraph_memory_saver(
    program: list[Action], number: int
) -> None:
    """Runs, interrupts, edits, forks and replays give the same values, tasks and history."""
    compare_worlds(program, number)


@settings(max_examples=EXAMPLES)
# the example replays from an earlier state of a subgraph
@example([KEEPER_TURN, KEEPER_TURN, Replay(True, "sync", 3)], 0)
@given(action_lists(subgraphs=True), st.integers(0, 9))
def test_random_program_with_subgraphs_has_same_results_as_langgraph_memory_saver(
    program: list[Action], number: int
) -> None:
    """Subgraphs keep their state for a run or for the thread."""
    compare_worlds(program, number)


@settings(max_examples=EXAMPLES // 6)
@given(action_lists(subgraphs=True), st.integers(0, 9))
def test_random_program_in_postgres_has_same_results_as_langgraph_memory_saver(
    program: list[Action], number: int
) -> None:
    compare_worlds(program, number, "postgres")
