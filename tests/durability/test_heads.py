"""Which checkpoint a thread goes on from: the later beginning has the head (design §1.5)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from tests.backends import Place
from tests.contracts.puts import checkpoint_id_of, config_at, put

THREAD: Any = {"configurable": {"thread_id": "t"}}
Step = Callable[[Any], Awaitable[Any]]


def built(saver: SQLiteCheckpointer) -> Any:
    """Three steps; each answers the last human message."""

    def answer(state: MessagesState) -> dict[str, Any]:
        asked = [m.text for m in state["messages"] if m.type == "human"][-1]
        return {"messages": [("ai", f"answer to {asked}")]}

    builder = StateGraph(MessagesState)
    for before, step in ((START, "a"), ("a", "b"), ("b", "c")):
        builder.add_node(step, answer).add_edge(before, step)
    return builder.compile(checkpointer=saver)


def says(text: str) -> Any:
    return {"messages": [("human", text)]}


def texts(graph: Any) -> list[str]:
    return [m.text for m in graph.get_state(THREAD).values["messages"]]


def elsewhere(work: Any, *args: Any, **named: Any) -> Any:
    """Work done in a thread and context of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *args, **named).result()


async def in_threads(stream: Any) -> Any:
    """Each step in a thread, with a copy of the context, as web frameworks do."""
    return await asyncio.to_thread(next, stream, None)


async def in_tasks(stream: Any) -> Any:
    """Each step in a task of its own, as `asyncio.wait_for` of Python 3.11 does."""
    return await asyncio.create_task(anext(stream, None))


WON = ["two", *["answer to two"] * 3]


@pytest.mark.parametrize("step", [in_threads, in_tasks])
def test_a_stream_driven_from_many_contexts(step: Step, place: Place) -> None:
    """Whoever calls for its next step, a run that lost the head does not take it back."""

    async def scenario(graph: Any) -> None:
        stream = graph.stream if step is in_threads else graph.astream
        first = stream(says("one"), THREAD, durability="sync")
        await step(first)
        await step(first)
        await asyncio.create_task(graph.ainvoke(says("two"), THREAD))
        while await step(first):
            pass

    with place.saver() as saver:
        graph = built(saver)
        asyncio.run(scenario(graph))

        assert texts(graph) == ["one", *["answer to one"] * 2, *WON]
        assert on_branches(saver) == ["answer to one"]


def on_branches(saver: SQLiteCheckpointer) -> list[str]:
    return [item.value.text for item in saver.history("t") if item.branch]


def look_at_history(graph: Any) -> None:
    list(graph.get_state_history(THREAD))


def look_at_many(graph: Any) -> None:
    for number in range(100):
        graph.get_state({"configurable": {"thread_id": str(number)}})


def look_at_the_past(graph: Any) -> None:
    for found in list(graph.get_state_history(THREAD)):
        graph.get_state(found.config)


LOOKS = [look_at_history, look_at_many, look_at_the_past]


@pytest.mark.parametrize("look", LOOKS)
def test_a_caller_that_looks_around(look: Callable[[Any], None], place: Place) -> None:
    """What the loop over a stream reads, each checkpoint by its id too, gives its run no head."""
    with place.saver() as saver:
        graph = built(saver)
        graph.invoke(says("zero"), THREAD)
        stream = graph.stream(says("one"), THREAD, durability="sync")
        next(stream)
        look(graph)
        elsewhere(graph.invoke, says("two"), THREAD)
        list(stream)

        assert texts(graph)[-4:] == WON
        assert on_branches(saver) == ["answer to one"] * 2


@pytest.mark.parametrize("look", LOOKS)
def test_a_node_that_looks_around(look: Callable[[Any], None], place: Place) -> None:
    """The same for what a node reads, with the config of the run it is part of."""

    def nosy(state: MessagesState) -> dict[str, Any]:
        look(graph)
        elsewhere(other.invoke, says("two"), THREAD)
        return {"messages": [("ai", "lost")]}

    with place.saver() as saver:
        builder = StateGraph(MessagesState).add_node("nosy", nosy).add_edge(START, "nosy")
        graph: Any = builder.compile(checkpointer=saver)
        other = built(saver)
        other.invoke(says("zero"), THREAD)
        graph.invoke(says("one"), THREAD, durability="sync")

        assert texts(other)[-4:] == WON
        assert on_branches(saver) == ["lost"]


# -- the rule, put by put: a run of two steps is at its first when another turn begins


def step(
    saver: SQLiteCheckpointer,
    uid: str,
    parent: RunnableConfig | None,
    number: int,
    source: str = "loop",
) -> RunnableConfig:
    return put(saver, {}, parent, uid=uid, metadata={"source": source, "step": number})


def head(saver: SQLiteCheckpointer) -> str:
    found = saver.get_tuple(config_at())
    assert found is not None
    return checkpoint_id_of(found.config)


@pytest.fixture
def overtaken(saver: SQLiteCheckpointer) -> RunnableConfig:
    """The checkpoint a run is at, after a later turn began; ids do not grow with time."""
    first = step(saver, "z", None, -1, "input")
    run = step(saver, "y", first, 0)
    later = step(saver, "c", run, 1, "input")
    step(saver, "b", later, 2)
    return run


def test_a_run_that_goes_on_is_a_branch(
    saver: SQLiteCheckpointer, overtaken: RunnableConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """None of its later checkpoints takes the head, and it is logged once for the thread."""
    with caplog.at_level("WARNING", "perdure"):
        on = step(saver, "x", overtaken, 1)
        step(saver, "w", on, 2)
        again = step(saver, "v", step(saver, "u", config_at(uid="b"), 3, "input"), 4)
        step(saver, "t", step(saver, "s", again, 5, "input"), 6)
        step(saver, "r", again, 5)
    branches = [c.checkpoint_id for c in saver.checkpoints("t") if c.is_branch]

    assert head(saver) == "t"
    assert branches == ["r", "w", "x"]
    assert [record.message for record in caplog.records] == [
        "thread 't': two runs overlapped, as checkpoint x shows; one of them is now a "
        "branch, which the next turn does not see. To run one turn after the other, hold "
        "saver.lock(thread_id). This is logged once per thread"
    ]


def test_a_turn_that_takes_the_head_from_another_is_logged(
    saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """The other turn ended after the first had read the thread; forks are on purpose."""
    with caplog.at_level("WARNING", "perdure"):
        first = step(saver, "z", None, -1, "input")
        step(saver, "y", first, 0)
        saver.get_tuple(first)
        step(saver, "x", first, 0, "fork")
        on_purpose = len(caplog.records)
        step(saver, "w", first, 0, "input")

    assert head(saver) == "w"
    assert (on_purpose, len(caplog.records)) == (0, 1)
    assert "thread 't': two runs overlapped" in caplog.text


@pytest.mark.parametrize(
    ("source", "number"), [("input", 1), ("update", 1), ("fork", 1), ("loop", 3)]
)
def test_what_begins_has_the_head(
    saver: SQLiteCheckpointer, overtaken: RunnableConfig, source: str, number: int
) -> None:
    """An input, an update and a fork; and a run stored at its end, which skips steps."""
    on = step(saver, "a", overtaken, number, source)
    begun = head(saver)
    step(saver, "0", on, number + 1)

    assert begun == "a"
    assert head(saver) == "0"
    assert not [c for c in saver.checkpoints("t") if c.checkpoint_id in "a0" and c.is_branch]


def test_going_on_from_what_was_read_by_its_id(
    saver: SQLiteCheckpointer, overtaken: RunnableConfig
) -> None:
    """It is on purpose, once: who puts upon it again without reading it is a branch."""
    saver.get_tuple(overtaken)
    step(saver, "a", overtaken, 1)
    on_purpose = head(saver)
    step(saver, "x", overtaken, 1)

    assert on_purpose == "a"
    assert head(saver) == "a"


def test_a_head_read_by_its_id_tells_nothing(saver: SQLiteCheckpointer) -> None:
    """A look at what was the head then does not help a run that was overtaken since."""
    run = step(saver, "y", None, -1, "input")
    saver.get_tuple(run)
    step(saver, "c", run, 0, "input")
    step(saver, "x", run, 0)

    assert head(saver) == "c"


@pytest.mark.parametrize("order", ["xy", "yx"])
def test_of_one_beginning_the_younger_id_has_the_head(
    saver: SQLiteCheckpointer, order: str
) -> None:
    """Two that go on with the same run end alike, whichever is put first."""
    run = step(saver, "b", None, -1, "input")
    for uid in order:
        step(saver, uid, run, 0)

    assert head(saver) == "y"


def test_the_rule_is_in_the_database(place: Place) -> None:
    """A saver that saw nothing of it decides the same."""
    run = config_at(uid="y")
    with place.saver() as saver:
        step(saver, "y", None, 0, "input")
        step(saver, "c", run, 1, "input")
    with place.saver() as saver:
        step(saver, "x", run, 1)
        overtaken = head(saver)
    with place.saver() as saver:
        saver.get_tuple(run)
        step(saver, "a", run, 1)

        assert (overtaken, head(saver)) == ("c", "a")


def test_namespaces_have_heads_of_their_own(saver: SQLiteCheckpointer) -> None:
    """A turn that begins in one does not overtake a run in the other."""
    known = {"source": "input", "step": 0}
    below = put(saver, {}, None, ns="sub", uid="z", metadata=known)
    put(saver, {}, None, uid="y", metadata=known)
    put(saver, {}, below, ns="sub", uid="a", metadata={"step": 1})

    assert {c.checkpoint_id for c in saver.checkpoints("t") if c.is_head} == {"y", "a"}
