"""`status` returns without the graph what langgraph's `get_state` returns with the graph."""

from __future__ import annotations

import operator
from datetime import UTC, datetime
from typing import Annotated, Any, TypedDict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from langgraph.channels import EphemeralValue, LastValue
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.pregel import NodeBuilder, Pregel
from langgraph.types import Command, Send, interrupt

from perdure.checkpointers import SQLiteCheckpointer, ThreadStatus
from perdure.errors import UnknownCheckpoint, UnknownThread
from tests.contracts.programs import THREAD, Action, Resume, Turn, action_lists
from tests.contracts.puts import config_at, put
from tests.contracts.test_differential import EXAMPLES, open_worlds

INTERRUPTED_TURN = Turn(
    ["send", "ask", "child"], has_message_id=True, blocking=True, durability="sync"
)


def assert_same_status(status: ThreadStatus, state: Any) -> None:
    """Assert that a status equals langgraph's state. A task that stored nothing has no id here."""
    stored = {task.id for task in status.tasks}
    expected = [
        (
            graph_task.id if graph_task.id in stored else None,
            graph_task.name,
            graph_task.path,
            graph_task.interrupts,
        )
        for graph_task in state.tasks
    ]
    actual = [
        (task.id, task.node, task.path, () if task.done else task.interrupts)
        for task in status.tasks
    ]
    expected_state = "waiting" if state.interrupts else "unfinished" if state.tasks else "idle"

    assert (sorted(expected, key=repr), expected_state) == (sorted(actual, key=repr), status.state)
    assert sorted(state.next) == sorted(status.next)
    assert sorted(state.interrupts, key=repr) == sorted(status.interrupts, key=repr)


@settings(max_examples=EXAMPLES)
@example([INTERRUPTED_TURN, Resume("yes", True, "sync")])
@given(st.booleans().flatmap(lambda subgraphs: action_lists(subgraphs=subgraphs)))
def test_status_equals_state_of_the_graph_after_random_actions(actions: list[Action]) -> None:
    """`next`, tasks and interrupts are equal after sends, failures, edits, forks and replays."""
    with open_worlds("file") as (world, _):
        for action in actions:
            world.perform(action)
            state = world.graph.get_state(THREAD)
            if state.created_at:
                assert_same_status(world.saver.status("t"), state)

                assert [head.status for head in world.saver.heads()] == [world.saver.status("t")]
                assert bool(state.interrupts) == bool(world.saver.heads(waiting=True))
            world.read_thread()


# -- graphs that the random actions do not contain


class _State(TypedDict, total=False):
    log: Annotated[list[str], operator.add]


def _make_asking_node(node: str) -> Any:
    return lambda state: {"log": [f"{node} {interrupt(f'{node}?')}"]}


def build_joining_graph(saver: Any) -> Any:
    """Build a graph with parallel nodes, `Send`s, a node that waits for two, and a deferred one."""
    builder: Any = StateGraph(_State)
    builder.add_node("split", lambda state: Command(goto=[Send("worker", n) for n in range(3)]))
    builder.add_node("worker", lambda n: {"log": [f"{n} {interrupt(n)}" if n else "0"]})
    builder.add_node("left, right", _make_asking_node("left, right"))
    builder.add_node("plain", lambda state: {"log": ["plain"]})
    builder.add_node("joins", _make_asking_node("joins"))
    builder.add_node("last", _make_asking_node("last"), defer=True)
    for node in ("split", "left, right", "plain"):
        builder.add_edge(START, node)
    builder.add_edge(["left, right", "plain"], "joins")
    builder.add_edge(["worker", "joins"], "last")
    builder.add_edge("plain", "last")
    return builder.compile(checkpointer=saver)


def build_functional_graph(saver: Any) -> Any:
    """Build a graph of the functional API whose tasks interrupt."""

    @task
    def ask(n: int) -> str:
        return str(interrupt(n))

    @entrypoint(checkpointer=saver)
    def main(input: dict[str, Any]) -> list[str]:
        return [ask(n).result() for n in range(2)]

    return main


def build_pregel_graph(saver: Any) -> Any:
    """Build a `Pregel` whose nodes are triggered by channels with any name."""
    one = NodeBuilder().subscribe_only("given").do(lambda _: interrupt("one")).write_to("middle")
    two = NodeBuilder().subscribe_only("middle").do(lambda _: interrupt("two")).write_to("out")
    channels: Any = {"given": EphemeralValue(dict), "middle": LastValue(str), "out": LastValue(str)}
    return Pregel(
        nodes={"one": one, "two": two},
        channels=channels,
        input_channels="given",
        output_channels="out",
        checkpointer=saver,
    )


@pytest.mark.parametrize(
    "build_graph", [build_joining_graph, build_functional_graph, build_pregel_graph]
)
def test_status_equals_state_for_graphs_of_every_kind(
    build_graph: Any, saver: SQLiteCheckpointer
) -> None:
    """This holds after each answer, and after an input in place of the answers."""
    graph = build_graph(saver)
    for _ in range(2):
        graph.invoke({"log": ["begins"]}, config_at())
        answers = 0
        while waiting := graph.get_state(config_at()).interrupts:
            assert_same_status(saver.status("t"), graph.get_state(config_at()))
            assert [head.thread_id for head in saver.heads(waiting=True)] == ["t"]
            graph.invoke(Command(resume={waiting[0].id: f"answer {answers}"}), config_at())
            answers += 1

        assert answers >= 2
        assert saver.status("t") == ThreadStatus()
        assert saver.heads(waiting=True) == []


def test_repr_of_status_contains_its_state(saver: SQLiteCheckpointer) -> None:
    """One thread is idle, and one waits."""
    put(saver, {"n": 1}, thread="idle")
    build_joining_graph(saver).invoke({"log": ["begins"]}, config_at())

    assert str(saver.status("idle")) == "ThreadStatus(state='idle', tasks=())"
    assert repr(saver.status("t")).startswith("ThreadStatus(state='waiting', tasks=(ThreadTask(")


def test_heads_with_waiting_lists_only_waiting_threads(saver: SQLiteCheckpointer) -> None:
    """The list has pages, and can be combined with the other conditions."""
    graph = build_joining_graph(saver)
    for n in range(6):
        graph.invoke({"log": []}, {**config_at(f"t{n}"), "metadata": {"even": n % 2 == 0}})
    graph.update_state(config_at("t2"), {"log": ["a person"]}, as_node="last")
    page = saver.heads(waiting=True, limit=2)
    rest = saver.heads(waiting=True, after=page[-1].thread_id)

    assert [[head.thread_id for head in part] for part in (page, rest)] == [
        ["t5", "t4"],
        ["t3", "t1", "t0"],
    ]
    assert [head.thread_id for head in saver.heads(waiting=True, filter={"even": True})] == [
        "t4",
        "t0",
    ]
    assert saver.heads(waiting=True, active_since=datetime.now(UTC)) == []


def test_status_of_older_checkpoint_describes_that_checkpoint(saver: SQLiteCheckpointer) -> None:
    """Errors name a thread or a checkpoint that does not exist."""
    graph = build_joining_graph(saver)
    graph.invoke({"log": ["begins"]}, config_at())
    [_, first] = saver.checkpoints("t")
    status = saver.status("t", checkpoint_id=first.checkpoint_id)

    assert (status.state, status.next, [thread_task.done for thread_task in status.tasks]) == (
        "unfinished",
        (),
        [True],
    )
    with pytest.raises(UnknownThread, match="there is no thread 'other'"):
        saver.status("other")
    with pytest.raises(UnknownCheckpoint, match="no checkpoint 'gone'"):
        saver.status("t", checkpoint_id="gone")


def test_status_of_writes_without_task_paths_is_waiting(saver: SQLiteCheckpointer) -> None:
    """An interrupt of an unknown task counts. If only one task is possible, it is identified."""
    writes = [("__interrupt__", [{"value": "Sure?"}])]
    checkpoint: Any = {
        "v": 4,
        "ts": datetime.now(UTC).isoformat(),
        "channel_values": {"branch:to:a": None},
        "channel_versions": {"branch:to:a": 2, "branch:to:b": 2},
        "versions_seen": {"a": {"branch:to:a": 1}},
    }
    for thread, values in (("one", {"branch:to:a"}), ("two", {"branch:to:a", "branch:to:b"})):
        thread_checkpoint: Any = {
            **checkpoint,
            "id": thread,
            "channel_values": dict.fromkeys(values),
        }
        config = saver.put(config_at(thread), thread_checkpoint, {"source": "loop"}, {})
        saver.put_writes(config, writes, f"task of {thread}")

    alone, several = saver.status("one"), saver.status("two")
    assert (alone.next, alone.interrupts) == (("a",), ({"value": "Sure?"},))
    assert (sorted(several.next), several.state) == (["", "a", "b"], "waiting")


def test_heads_lists_thread_with_unusual_channels_and_versions(saver: SQLiteCheckpointer) -> None:
    """The names of the channels and the mixed types of versions do not occur in langgraph."""
    values = {"join:a+b:c": 1, "branch:to:d": [1, 2, 3], "__pregel_tasks": "x", "e": 1}
    checkpoint: Any = {
        "v": 4,
        "id": "one",
        "ts": datetime.now(UTC).isoformat(),
        "channel_values": values,
        "channel_versions": {**dict.fromkeys(values, 2), "e": "2"},
        "versions_seen": {"e": {"e": 1}},
    }
    saver.put(config_at(), checkpoint, {"source": "loop"}, {})

    assert [head.status.next for head in saver.heads()] == [("d",)]
