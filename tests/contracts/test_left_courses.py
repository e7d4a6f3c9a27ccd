"""Any course of turns, edits and runs that are left or cancelled: what must hold of the thread.

How far a left run came is a matter of timing, so there is nothing to compare with; see
test_differential.py for courses in which every run comes to its end. A left run of durability
`exit` writes for the first time when its generator is closed, and nothing in that write tells
that it is older than a turn which began meanwhile; test_left_runs.py has those that can be told.
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
class Answered:
    """A turn that comes to its end, or a person's edit."""

    durability: Durability
    edit: bool


@dataclass(frozen=True)
class Left:
    """A stream that is left after some parts, or a task that is cancelled after some rounds."""

    durability: Durability
    after: int
    cancel: bool
    todo: list[str]


_durabilities = st.sampled_from(["sync", "async", "exit"])
_todo = st.sampled_from([[], ["send"], ["keeper"]])
_answered = st.builds(Answered, _durabilities, st.booleans())
_left = st.builds(
    Left, st.sampled_from(["sync", "async"]), st.integers(0, 30), st.booleans(), _todo
)
courses = st.lists(st.one_of(_answered, _left, _left, st.just(Reopen())), min_size=2, max_size=10)


def says(text: str, todo: list[str]) -> Any:
    return {"todo": todo, "messages": [HumanMessage(text)], "log": [text]}


async def left(graph: Any, action: Left) -> None:
    """Begin a run, and go away."""
    given: Any = says("left", action.todo)
    if action.cancel:
        run = graph.ainvoke(given, THREAD, durability=action.durability)
        task = asyncio.create_task(run)
        for _ in range(action.after):
            await asyncio.sleep(0)
        task.cancel()
        return
    parts = action.after % 5
    async for _ in graph.astream(given, THREAD, durability=action.durability):
        if not parts:
            break
        parts -= 1


async def answered(graph: Any, action: Answered, text: str) -> list[str]:
    """Take a turn or make an edit; what people said according to the state after it."""
    if action.edit:
        await graph.aupdate_state(THREAD, says(text, []), "finish")
    else:
        await graph.ainvoke(says(text, []), THREAD, durability=action.durability)
    state = await graph.aget_state(THREAD)
    return [m.text for m in state.values["messages"] if m.type == "human" and m.text != "left"]


async def taken(place: Place, course: list[Any]) -> SQLiteCheckpointer:
    """Take the course; each turn that was answered stays, in its place."""
    saver, turns = place.saver(synchronous="normal"), []
    for number, action in enumerate(course):
        match action:
            case Reopen():
                await asyncio.sleep(0.005)  # a run that was left may still write
                saver.close()
                saver = place.saver(synchronous="normal")
            case Left():
                await left(build_graph(saver), action)
            case Answered():
                turns.append(f"turn {number}")

                assert turns == await answered(build_graph(saver), action, turns[-1])
    turns.append("the last turn")

    assert turns == await answered(build_graph(saver), Answered("async", edit=False), turns[-1])
    return saver


def check_tree(saver: SQLiteCheckpointer) -> None:
    """Each namespace has one head, and each checkpoint a parent that was put before it, or none."""
    infos = saver.checkpoints("t")
    orders = {(info.checkpoint_ns, info.checkpoint_id): info.order for info in infos}
    for info in infos:
        parent = info.parent_id

        assert parent is None or orders[info.checkpoint_ns, parent] < info.order
    heads = [info.checkpoint_ns for info in infos if info.is_head]

    assert sorted(heads) == sorted({info.checkpoint_ns for info in infos})
    first = next(saver.list(ROOT, limit=1))

    assert first == saver.get_tuple(ROOT)


def check(course: list[Any], backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with asyncio.Runner() as runner:
            saver = runner.run(taken(places(Path(folder))[backend](), course))
        check_tree(saver)
        saver.close()


@given(courses)
def test_any_course_with_left_runs(course: list[Any]) -> None:
    """An answered turn and a person's edit stay in the state, whatever was left around them."""
    check(course, "file")


@settings(max_examples=settings().max_examples // 4)
@given(courses)
def test_any_course_with_left_runs_in_postgres(course: list[Any]) -> None:
    """The same in Postgres."""
    check(course, "postgres")
