"""Random programs of runs, edits and abandoned or cancelled runs leave the thread consistent.

The progress of an abandoned run depends on timing, so there is no other checkpointer to compare
with. test_differential.py has programs in which every run ends. An abandoned run with durability
`exit` writes for the first time when its generator is closed, and nothing in that write shows that
the run is older than one which began meanwhile. test_left_runs.py has the cases that can be told
apart.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage

from perdure.checkpointers import SQLiteCheckpointer
from tests.backends import Place, places
from tests.contracts.programs import ROOT, THREAD, Durability, Reopen, build_graph


@dataclass(frozen=True)
class CompleteRun:
    """A run that ends, or an edit by a person."""

    durability: Durability
    is_edit: bool


@dataclass(frozen=True)
class AbandonedRun:
    """A stream that is closed after some parts, or a task that is cancelled after some steps."""

    durability: Durability
    step_count: int
    is_cancelled: bool
    todo: list[str]


_durabilities = st.sampled_from(["sync", "async", "exit"])
_todo = st.sampled_from([[], ["send"], ["keeper"]])
_complete_runs = st.builds(CompleteRun, _durabilities, st.booleans())
_abandoned_runs = st.builds(
    AbandonedRun, st.sampled_from(["sync", "async"]), st.integers(0, 30), st.booleans(), _todo
)
programs = st.lists(
    st.one_of(_complete_runs, _abandoned_runs, _abandoned_runs, st.just(Reopen())),
    min_size=2,
    max_size=10,
)


def make_input(text: str, todo: list[str]) -> Any:
    return {"todo": todo, "messages": [HumanMessage(text)], "log": [text]}


async def abandon_run(graph: Any, action: AbandonedRun) -> None:
    """Start a run, and abandon it."""
    input: Any = make_input("left", action.todo)
    if action.is_cancelled:
        run = graph.ainvoke(input, THREAD, durability=action.durability)
        task = asyncio.create_task(run)
        for _ in range(action.step_count):
            await asyncio.sleep(0)
        task.cancel()
        return
    parts = action.step_count % 5
    async for _ in graph.astream(input, THREAD, durability=action.durability):
        if not parts:
            break
        parts -= 1


async def complete_run(graph: Any, action: CompleteRun, text: str) -> list[str]:
    """Make a run or an edit, and return the texts of people in the state after it."""
    if action.is_edit:
        await graph.aupdate_state(THREAD, make_input(text, []), "finish")
    else:
        await graph.ainvoke(make_input(text, []), THREAD, durability=action.durability)
    state = await graph.aget_state(THREAD)
    return [m.text for m in state.values["messages"] if m.type == "human" and m.text != "left"]


async def run_program(place: Place, program: list[Any]) -> SQLiteCheckpointer:
    """Perform the actions.

    Check after each complete run that all texts are in the state, in order.
    """
    saver, texts = place.saver(synchronous="normal"), []
    for number, action in enumerate(program):
        match action:
            case Reopen():
                await asyncio.sleep(0.005)  # an abandoned run may still write
                saver.close()
                saver = place.saver(synchronous="normal")
            case AbandonedRun():
                await abandon_run(build_graph(saver), action)
            case CompleteRun():
                texts.append(f"turn {number}")

                assert texts == await complete_run(build_graph(saver), action, texts[-1])
    texts.append("the last turn")

    assert texts == await complete_run(
        build_graph(saver), CompleteRun("async", is_edit=False), texts[-1]
    )
    return saver


def check_tree(saver: SQLiteCheckpointer) -> None:
    """Check that each namespace has one head, and that each parent was put before its children."""
    infos = saver.checkpoints("t")
    orders = {(info.checkpoint_ns, info.checkpoint_id): info.order for info in infos}
    for info in infos:
        parent = info.parent_id

        assert parent is None or orders[info.checkpoint_ns, parent] < info.order
    heads = [info.checkpoint_ns for info in infos if info.is_head]

    assert sorted(heads) == sorted({info.checkpoint_ns for info in infos})
    first = next(saver.list(ROOT, limit=1))

    assert first == saver.get_tuple(ROOT)


def check_program(program: list[Any], backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with asyncio.Runner() as runner:
            saver = runner.run(run_program(places(Path(folder))[backend](), program))
        check_tree(saver)
        saver.close()


@given(programs)
def test_completed_runs_stay_in_state_in_spite_of_abandoned_runs(program: list[Any]) -> None:
    """Edits by a person stay in the state too."""
    check_program(program, "file")


@settings(max_examples=settings().max_examples // 4)
@given(programs)
def test_completed_runs_stay_in_state_in_spite_of_abandoned_runs_in_postgres(
    program: list[Any],
) -> None:
    check_program(program, "postgres")
