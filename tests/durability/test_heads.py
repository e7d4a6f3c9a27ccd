"""Which checkpoint a thread continues from: the run that began later has the head."""

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
StepFunction = Callable[[Any], Awaitable[Any]]


def build_graph(saver: SQLiteCheckpointer) -> Any:
    """Build a graph of three steps. Each step answers the last human message."""

    def answer(state: MessagesState) -> dict[str, Any]:
        question = [m.text for m in state["messages"] if m.type == "human"][-1]
        return {"messages": [("ai", f"answer to {question}")]}

    builder = StateGraph(MessagesState)
    for before, name in ((START, "a"), ("a", "b"), ("b", "c")):
        builder.add_node(name, answer).add_edge(before, name)
    return builder.compile(checkpointer=saver)


def human_input(text: str) -> Any:
    return {"messages": [("human", text)]}


def read_texts(graph: Any) -> list[str]:
    return [m.text for m in graph.get_state(THREAD).values["messages"]]


def run_in_thread(work: Any, *args: Any, **named: Any) -> Any:
    """Run work in a thread and a context of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *args, **named).result()


async def step_in_thread(stream: Any) -> Any:
    """Run a step of a stream in a thread, with a copy of the context, as web frameworks do."""
    return await asyncio.to_thread(next, stream, None)


async def step_in_task(stream: Any) -> Any:
    """Run a step of a stream in its own task, as `asyncio.wait_for` of Python 3.11 does."""
    return await asyncio.create_task(anext(stream, None))


TEXTS_OF_SECOND_RUN = ["two", *["answer to two"] * 3]


@pytest.mark.parametrize("run_step", [step_in_thread, step_in_task])
def test_run_that_lost_the_head_never_takes_it_back(run_step: StepFunction, place: Place) -> None:
    """Each step of the stream is called in another thread or task."""

    async def scenario(graph: Any) -> None:
        stream = graph.stream if run_step is step_in_thread else graph.astream
        first = stream(human_input("one"), THREAD, durability="sync")
        await run_step(first)
        await run_step(first)
        await asyncio.create_task(graph.ainvoke(human_input("two"), THREAD))
        while await run_step(first):
            pass

    with place.saver() as saver:
        graph = build_graph(saver)
        asyncio.run(scenario(graph))

        assert read_texts(graph) == ["one", *["answer to one"] * 2, *TEXTS_OF_SECOND_RUN]
        assert read_branch_texts(saver) == ["answer to one"]


def read_branch_texts(saver: SQLiteCheckpointer) -> list[str]:
    return [item.value.text for item in saver.history("t") if item.branch]


def read_history(graph: Any) -> None:
    list(graph.get_state_history(THREAD))


def read_many_threads(graph: Any) -> None:
    for number in range(100):
        graph.get_state({"configurable": {"thread_id": str(number)}})


def read_each_checkpoint(graph: Any) -> None:
    for snapshot in list(graph.get_state_history(THREAD)):
        graph.get_state(snapshot.config)


READS = [read_history, read_many_threads, read_each_checkpoint]


@pytest.mark.parametrize("read", READS)
def test_reads_between_stream_steps_do_not_give_the_run_the_head(
    read: Callable[[Any], None], place: Place
) -> None:
    """The loop over the stream may even read each checkpoint by its id."""
    with place.saver() as saver:
        graph = build_graph(saver)
        graph.invoke(human_input("zero"), THREAD)
        stream = graph.stream(human_input("one"), THREAD, durability="sync")
        next(stream)
        read(graph)
        run_in_thread(graph.invoke, human_input("two"), THREAD)
        list(stream)

        assert read_texts(graph)[-4:] == TEXTS_OF_SECOND_RUN
        assert read_branch_texts(saver) == ["answer to one"] * 2


@pytest.mark.parametrize("read", READS)
def test_reads_within_a_node_do_not_give_its_run_the_head(
    read: Callable[[Any], None], place: Place
) -> None:
    """The node reads with the config of the run that it is part of."""

    def read_and_run_other(state: MessagesState) -> dict[str, Any]:
        read(graph)
        run_in_thread(other_graph.invoke, human_input("two"), THREAD)
        return {"messages": [("ai", "lost")]}

    with place.saver() as saver:
        builder = (
            StateGraph(MessagesState).add_node("nosy", read_and_run_other).add_edge(START, "nosy")
        )
        graph: Any = builder.compile(checkpointer=saver)
        other_graph = build_graph(saver)
        other_graph.invoke(human_input("zero"), THREAD)
        graph.invoke(human_input("one"), THREAD, durability="sync")

        assert read_texts(other_graph)[-4:] == TEXTS_OF_SECOND_RUN
        assert read_branch_texts(saver) == ["lost"]


# -- the rule for single puts: a run of two steps is at its first step when another turn begins


def put_step(
    saver: SQLiteCheckpointer,
    uid: str,
    parent: RunnableConfig | None,
    number: int,
    source: str = "loop",
) -> RunnableConfig:
    return put(saver, {}, parent, uid=uid, metadata={"source": source, "step": number})


def read_head_id(saver: SQLiteCheckpointer) -> str:
    stored = saver.get_tuple(config_at())
    assert stored is not None
    return checkpoint_id_of(stored.config)


@pytest.fixture
def overtaken_run(saver: SQLiteCheckpointer) -> RunnableConfig:
    """Return the checkpoint of a run after a later turn began. Ids do not grow with time."""
    first = put_step(saver, "z", None, -1, "input")
    config = put_step(saver, "y", first, 0)
    later = put_step(saver, "c", config, 1, "input")
    put_step(saver, "b", later, 2)
    return config


def test_overtaken_run_becomes_a_branch_and_is_logged_once(
    saver: SQLiteCheckpointer, overtaken_run: RunnableConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """None of its later checkpoints takes the head."""
    with caplog.at_level("WARNING", "perdure"):
        on = put_step(saver, "x", overtaken_run, 1)
        put_step(saver, "w", on, 2)
        again = put_step(saver, "v", put_step(saver, "u", config_at(uid="b"), 3, "input"), 4)
        put_step(saver, "t", put_step(saver, "s", again, 5, "input"), 6)
        put_step(saver, "r", again, 5)
    branches = [c.checkpoint_id for c in saver.checkpoints("t") if c.is_branch]

    assert read_head_id(saver) == "t"
    assert branches == ["r", "w", "x"]
    assert [record.message for record in caplog.records] == [
        "thread 't': two runs overlapped, as checkpoint x shows; one of them is now a "
        "branch, which the next turn does not see. To run one turn after the other, hold "
        "saver.lock(thread_id). This is logged once per thread"
    ]


def test_turn_that_takes_the_head_from_a_parallel_turn_is_logged(
    saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """The other turn ended after the first had read the thread. Forks are not logged."""
    with caplog.at_level("WARNING", "perdure"):
        first = put_step(saver, "z", None, -1, "input")
        put_step(saver, "y", first, 0)
        saver.get_tuple(first)
        put_step(saver, "x", first, 0, "fork")
        on_purpose = len(caplog.records)
        put_step(saver, "w", first, 0, "input")

    assert read_head_id(saver) == "w"
    assert (on_purpose, len(caplog.records)) == (0, 1)
    assert "thread 't': two runs overlapped" in caplog.text


@pytest.mark.parametrize(
    ("source", "number"), [("input", 1), ("update", 1), ("fork", 1), ("loop", 3)]
)
def test_input_update_fork_or_skipped_step_takes_the_head(
    saver: SQLiteCheckpointer, overtaken_run: RunnableConfig, source: str, number: int
) -> None:
    """A run that is stored only at its end skips steps."""
    on = put_step(saver, "a", overtaken_run, number, source)
    begun = read_head_id(saver)
    put_step(saver, "0", on, number + 1)

    assert begun == "a"
    assert read_head_id(saver) == "0"
    assert not [c for c in saver.checkpoints("t") if c.checkpoint_id in "a0" and c.is_branch]


def test_first_put_on_checkpoint_read_by_id_takes_the_head(
    saver: SQLiteCheckpointer, overtaken_run: RunnableConfig
) -> None:
    """A second put on it without another read becomes a branch."""
    saver.get_tuple(overtaken_run)
    put_step(saver, "a", overtaken_run, 1)
    on_purpose = read_head_id(saver)
    put_step(saver, "x", overtaken_run, 1)

    assert on_purpose == "a"
    assert read_head_id(saver) == "a"


def test_reading_the_head_by_id_does_not_help_a_run_overtaken_later(
    saver: SQLiteCheckpointer,
) -> None:
    run = put_step(saver, "y", None, -1, "input")
    saver.get_tuple(run)
    put_step(saver, "c", run, 0, "input")
    put_step(saver, "x", run, 0)

    assert read_head_id(saver) == "c"


@pytest.mark.parametrize("order", ["xy", "yx"])
def test_of_two_continuations_the_later_id_has_the_head(
    saver: SQLiteCheckpointer, order: str
) -> None:
    """The result does not depend on the order of the puts."""
    run = put_step(saver, "b", None, -1, "input")
    for uid in order:
        put_step(saver, uid, run, 0)

    assert read_head_id(saver) == "y"


def test_other_saver_chooses_the_same_head(place: Place) -> None:
    """A saver that was opened later decides by the data in the database."""
    run = config_at(uid="y")
    with place.saver() as saver:
        put_step(saver, "y", None, 0, "input")
        put_step(saver, "c", run, 1, "input")
    with place.saver() as saver:
        put_step(saver, "x", run, 1)
        head_before = read_head_id(saver)
    with place.saver() as saver:
        saver.get_tuple(run)
        put_step(saver, "a", run, 1)

        assert (head_before, read_head_id(saver)) == ("c", "a")


def test_each_namespace_has_its_own_head(saver: SQLiteCheckpointer) -> None:
    """A turn that begins in one namespace does not overtake a run in another."""
    metadata = {"source": "input", "step": 0}
    below = put(saver, {}, None, ns="sub", uid="z", metadata=metadata)
    put(saver, {}, None, uid="y", metadata=metadata)
    put(saver, {}, below, ns="sub", uid="a", metadata={"step": 1})

    assert {c.checkpoint_id for c in saver.checkpoints("t") if c.is_head} == {"y", "a"}
