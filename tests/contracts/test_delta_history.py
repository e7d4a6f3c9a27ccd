"""The history of a `DeltaChannel`, whose value langgraph replays from the writes of tasks."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.types import Command, Overwrite, Send, interrupt
from typing_extensions import TypedDict

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.import_metadata import read_thread_head_or_raise
from perdure.errors import UnknownThread
from perdure.storage.flow import fetch_rows
from tests.backends import Place
from tests.contracts.erased import SECRET, both_erase_methods, read_raw_bytes, render_thread
from tests.contracts.puts import checkpoint_id_of, config_at

Durability = Literal["sync", "async", "exit"]
Node = Callable[[Any], Any]


def merge_by_id(state: list[AnyMessage] | None, updates: Sequence[Any]) -> list[AnyMessage]:
    """Merge messages by id, as a reducer. At each replay, messages without an id get a new id."""
    for update in updates:
        state = add_messages(state or [], update)  # type: ignore[assignment, arg-type]
    return state or []


def make_builder(
    channel: str = "messages",
    *,
    reduce: Any = merge_by_id,
    kind: Any = list,
    snapshot_frequency: int = 100,
) -> Any:
    """Return a graph builder without nodes, whose state is one channel.

    Every `snapshot_frequency` updates, the channel has a snapshot.
    """
    delta: Any = DeltaChannel(reduce, snapshot_frequency=snapshot_frequency)
    make_state_class: Any = TypedDict
    return StateGraph(make_state_class("State", {channel: Annotated[kind, delta]}))


def compile_graph(saver: Any, node: Node, *, snapshot_frequency: int = 100) -> Any:
    """Compile a graph of one node with a channel of messages."""
    builder = make_builder(snapshot_frequency=snapshot_frequency)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    return builder.compile(checkpointer=saver)


def answer_newest_message(state: Any) -> Any:
    """Return an answer to the newest message, as a node."""
    return {"messages": [AIMessage(f"To {state['messages'][-1].text}")]}


def list_texts(items: Sequence[Any]) -> list[str]:
    return [item.value.text for item in items]


def read_state_texts(graph: Any, config: Any = None) -> list[str]:
    """Return the texts of the messages in the state."""
    return [message.text for message in graph.get_state(config or config_at()).values["messages"]]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("snapshot_frequency", [1, 2, 100])
def test_history_has_every_message_once_in_order(
    saver: SQLiteCheckpointer, snapshot_frequency: int, durability: Durability
) -> None:
    """History, title and counts agree with the state at any frequency of snapshots."""
    graph = compile_graph(saver, answer_newest_message, snapshot_frequency=snapshot_frequency)
    for word in ("one", "two", "three"):
        graph.invoke({"messages": [HumanMessage(word)]}, config_at(), durability=durability)
    items = saver.history("t")

    expected = ["one", "To one", "two", "To two", "three", "To three"]
    assert expected == read_state_texts(graph) == list_texts(items)
    assert all(item.seen for item in items)
    assert read_thread_head_or_raise(saver, "t").title == "one"
    [info] = saver.threads()
    assert 6 == info.messages == saver.checkpoints("t")[0].counts["messages"]
    assert info.items >= 6


@pytest.mark.parametrize("snapshot_frequency", [1, 2, 100])
def test_removed_and_replaced_messages_stay_in_history(
    saver: SQLiteCheckpointer, snapshot_frequency: int
) -> None:
    """`seen` respects ids, `RemoveMessage`, `REMOVE_ALL_MESSAGES` and `Overwrite`."""
    steps = iter(
        [
            [AIMessage("first", id="a")],
            [RemoveMessage(id="a"), AIMessage("second", id="b")],
            [AIMessage("second, again", id="b")],
            [RemoveMessage(id=REMOVE_ALL_MESSAGES), AIMessage("third", id="c")],
            Overwrite([AIMessage("fourth", id="d")]),
        ]
    )
    graph = compile_graph(
        saver, lambda state: {"messages": next(steps)}, snapshot_frequency=snapshot_frequency
    )
    seen_texts, history_lengths = [], []
    for number in range(5):
        graph.invoke({"messages": [HumanMessage(f"{number}", id=f"h{number}")]}, config_at())
        items = saver.history("t")
        seen_texts.append([item.value.text for item in items if item.seen])
        history_lengths.append(len(items))
        assert sorted(seen_texts[-1]) == sorted(read_state_texts(graph))

    assert seen_texts[:2] == [["0", "first"], ["0", "1", "second"]]
    assert seen_texts[3] == ["third"]
    assert seen_texts[4] == ["fourth"]
    assert history_lengths == [2, 4, 6, 8, 10]
    assert saver.checkpoints("t")[0].counts["messages"] == 1


def test_history_has_messages_written_in_any_form(saver: SQLiteCheckpointer) -> None:
    """A message, a list, a dict, a pair and a text are each stored as one message."""
    forms: list[Any] = [
        HumanMessage("an object"),
        [HumanMessage("in a list")],
        {"role": "user", "content": "a dict"},
        [{"role": "user", "content": "a dict in a list"}],
        [("human", "a pair")],
        "a text",
    ]
    graph = compile_graph(saver, answer_newest_message)
    for form in forms:
        graph.invoke({"messages": form}, config_at())
    items = saver.history("t")

    assert read_state_texts(graph) == list_texts(items)
    assert len(items) == 12
    assert all(item.seen for item in items)


def append_parts(state: list[AnyMessage] | None, updates: Sequence[Any]) -> list[Any]:
    """Append all parts of the updates to the state, as a reducer."""
    return [*(state or []), *(part for update in updates for part in update)]


@pytest.mark.parametrize("snapshot_frequency", [1, 100])
def test_equal_messages_without_ids_are_both_in_history(
    saver: SQLiteCheckpointer, snapshot_frequency: int
) -> None:
    """Two equal messages without ids are two items, also after a snapshot."""
    input = {"messages": [("human", "Yes")]}
    graph = compile_graph(
        saver, lambda state: {"messages": [AIMessage("And?")]}, snapshot_frequency=100
    )
    graph.invoke(input, config_at())
    graph.invoke(input, config_at())

    assert list_texts(saver.history("t")) == ["Yes", "And?", "Yes", "And?"]
    graph_with_snapshots = compile_graph(
        saver, lambda state: {"messages": [AIMessage("And?")]}, snapshot_frequency=1
    )
    graph_with_snapshots.invoke({"messages": [HumanMessage("No")]}, config_at())
    items = saver.history("t")
    assert list_texts(items) == ["Yes", "And?", "Yes", "And?", "No", "And?"]
    assert all(item.seen for item in items)


def test_history_has_writes_of_parallel_tasks_in_order_of_state(saver: SQLiteCheckpointer) -> None:
    """The writes of a superstep are in the order in which langgraph applies them."""
    builder = make_builder()
    for name in "dbca":
        builder.add_node(name, lambda state, name=name: {"messages": [AIMessage(name)]})
        builder.add_edge(START, name)
    builder.add_node("send", lambda state: {"messages": [AIMessage(f"sent {state['n']}")]})
    builder.add_conditional_edges("a", lambda state: [Send("send", {"n": n}) for n in range(12)])
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"messages": [HumanMessage("go")]}, config_at())

    assert read_state_texts(graph) == list_texts(saver.history("t"))
    assert len(saver.history("t")) == 17


def test_fork_has_history_of_its_ancestors_and_marks_branch(saver: SQLiteCheckpointer) -> None:
    """Messages that only the sibling of the fork has are marked as a branch."""
    graph = compile_graph(saver, answer_newest_message)
    graph.invoke({"messages": [HumanMessage("one")]}, config_at())
    old_config = graph.get_state(config_at()).config
    graph.invoke({"messages": [HumanMessage("left")]}, config_at())
    graph.invoke({"messages": [HumanMessage("right")]}, old_config)
    items = saver.history("t")
    items_of_head = [item for item in items if not item.branch]

    assert (
        ["one", "To one", "right", "To right"]
        == read_state_texts(graph)
        == list_texts(items_of_head)
    )
    assert [item.value.text for item in items if item.branch] == ["left", "To left"]
    assert not any(item.seen for item in items if item.branch)
    items_up_to_old = saver.history("t", checkpoint_id=checkpoint_id_of(old_config))
    assert list_texts(items_up_to_old) == ["one", "To one"]
    saver.rewind("t", checkpoint_id_of(old_config))
    assert list_texts([i for i in saver.history("t") if not i.branch]) == ["one", "To one"]


def test_updates_interrupts_and_failed_tasks_leave_each_message_once(
    saver: SQLiteCheckpointer,
) -> None:
    """The history has each message once after an update, a resumed run and a failed task."""
    failures = iter([True, False, False])

    def node(state: Any) -> Any:
        answer = interrupt("sure?")
        if next(failures):
            raise ValueError("failed")
        return {"messages": [AIMessage(f"{answer} to {state['messages'][-1].text}")]}

    builder = make_builder()
    builder.add_node("node", node)
    builder.add_node("other", lambda state: {"messages": [AIMessage("beside")]})
    builder.add_edge(START, "node")
    builder.add_edge(START, "other")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"messages": [HumanMessage("go")]}, config_at())
    with pytest.raises(ValueError, match="failed"):
        graph.invoke(Command(resume="yes"), config_at())
    graph.invoke(Command(resume="yes", update={"messages": [HumanMessage("now")]}), config_at())
    graph.update_state(config_at(), {"messages": [AIMessage("by hand")]}, as_node="node")

    assert read_state_texts(graph) == list_texts(saver.history("t"))
    assert {"go", "beside", "by hand"} < {*read_state_texts(graph)}


def test_subgraph_has_its_own_history(saver: SQLiteCheckpointer) -> None:
    """The namespace of a subgraph has its messages, and the root has all of them once."""
    inner, outer = make_builder(), make_builder()
    inner.add_node("inner", answer_newest_message)
    inner.add_edge(START, "inner")
    outer.add_node("sub", inner.compile(checkpointer=True))
    outer.add_edge(START, "sub")
    graph = outer.compile(checkpointer=saver)
    for word in ("one", "two"):
        graph.invoke({"messages": [HumanMessage(word)]}, config_at())

    assert (
        ["one", "To one", "two", "To two"]
        == read_state_texts(graph)
        == list_texts(saver.history("t"))
    )
    [ns] = [ns for ns in saver.thread("t").namespaces if ns]
    assert list_texts(saver.history("t", checkpoint_ns=ns)) == ["one", "To one", "two", "To two"]


@pytest.mark.parametrize("snapshot_frequency", [2, 100])
def test_history_survives_prunes_and_copies(
    saver: SQLiteCheckpointer, snapshot_frequency: int
) -> None:
    """Prune, retain and copy change neither the history nor `seen`."""
    graph = compile_graph(saver, answer_newest_message, snapshot_frequency=snapshot_frequency)
    for word in ("one", "two"):
        graph.invoke({"messages": [HumanMessage(word)]}, config_at())
    graph.update_state(
        config_at(), {"messages": [RemoveMessage(read_message_id(graph, 0))]}, as_node="node"
    )
    before = [(item.value, item.seen) for item in saver.history("t")]
    head_id = checkpoint_id_of(graph.get_state(config_at()).config)
    saver.copy_thread("t", "whole")
    saver.copy_thread("t", "part", checkpoint_id=head_id)
    saver.prune(["t"])
    saver.retain(Retention(turns=True), thread_ids=["whole"])

    for thread in ("t", "whole", "part"):
        assert before == [(item.value, item.seen) for item in saver.history(thread)]
        assert saver.thread(thread).messages == 4
        graph.invoke({"messages": [HumanMessage("more")]}, config_at(thread))
        assert list_texts(saver.history(thread))[4:] == ["more", "To more"]


def read_message_id(graph: Any, index: int) -> str:
    """Return the id of the message with this index in the state."""
    return str(graph.get_state(config_at()).values["messages"][index].id)


def test_retain_without_history_keeps_only_items_of_kept_checkpoints(
    saver: SQLiteCheckpointer,
) -> None:
    graph = compile_graph(saver, answer_newest_message)
    for word in ("one", "two"):
        graph.invoke({"messages": [HumanMessage(word)]}, config_at())
    graph.update_state(
        config_at(), {"messages": [RemoveMessage(read_message_id(graph, 0))]}, as_node="node"
    )
    saver.retain(Retention(last=1, history=False), thread_ids=["t"])

    assert ["To one", "two", "To two"] == read_state_texts(graph) == list_texts(saver.history("t"))


@pytest.mark.parametrize("snapshot_frequency", [1, 3, 5, 100])
@pytest.mark.parametrize("durability", ["sync", "exit"])
def test_retain_without_history_keeps_items_written_since_snapshot(
    saver: SQLiteCheckpointer, snapshot_frequency: int, durability: Durability
) -> None:
    """The values of the channel can be rebuilt only by the graph's reducer."""
    numbers = iter(range(9))
    builder = make_builder("words", reduce=append_parts, snapshot_frequency=snapshot_frequency)
    builder.add_node("node", lambda state: {"words": [f"w{next(numbers)}"]})
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    for word in ("one", "two", "three"):
        graph.invoke({"words": [word]}, config_at(), durability=durability)
    graph.update_state(config_at(), {"words": Overwrite(["new"])}, as_node="node")
    graph.invoke({"words": ["last"]}, config_at(), durability=durability)
    words = [item.value for item in saver.history("t", channel="words")]
    for _ in range(2):
        saver.retain(Retention(last=1, history=False), thread_ids=["t"])
        remaining = [item.value for item in saver.history("t", channel="words")]

        assert words[len(words) - len(remaining) :] == remaining
        assert (
            remaining[-3:] == graph.get_state(config_at()).values["words"] == ["new", "last", "w3"]
        )
        assert remaining == words[-3:] or snapshot_frequency > 1
    graph.invoke({"words": ["more"]}, config_at(), durability=durability)
    assert [*remaining, "more", "w4"] == [i.value for i in saver.history("t", channel="words")]


@both_erase_methods
@pytest.mark.parametrize("snapshot_frequency", [1, 2, 100])
def test_erase_removes_message_from_history_title_and_file(
    saver: SQLiteCheckpointer, erase: Any, snapshot_frequency: int
) -> None:
    """No byte of the file contains the erased message."""
    graph = compile_graph(
        saver, lambda state: {"messages": [AIMessage("so")]}, snapshot_frequency=snapshot_frequency
    )
    for uid, text in (("a", SECRET), ("b", "stays")):
        graph.invoke({"messages": [HumanMessage(text, id=uid)]}, config_at())
    graph.update_state(config_at(), {"messages": [RemoveMessage(id="a")]}, as_node="node")
    assert read_thread_head_or_raise(saver, "t").title == SECRET
    erase(saver, "t", ["a"])

    assert ["so", "stays", "so"] == list_texts(saver.history("t")) == read_state_texts(graph)
    assert read_thread_head_or_raise(saver, "t").title == "stays"
    assert SECRET not in render_thread(saver)
    assert SECRET.encode() not in read_raw_bytes(saver)
    graph.invoke({"messages": [HumanMessage("more", id="c")]}, config_at())
    assert list_texts(saver.history("t")) == ["so", "stays", "so", "more", "so"]


def test_erase_removes_text_that_was_written_without_id(saver: SQLiteCheckpointer) -> None:
    """A message that got its id from the reducer is also erased from the write that has no id."""
    graph = compile_graph(
        saver, lambda state: {"messages": [AIMessage("so")]}, snapshot_frequency=3
    )
    graph.invoke({"messages": [("human", SECRET)]}, config_at())
    graph.invoke({"messages": [HumanMessage("stays", id="b")]}, config_at())
    uid = read_message_id(graph, 0)
    saver.erase("t", [uid])

    assert list_texts(saver.history("t")) == ["so", "stays", "so"]
    assert SECRET not in render_thread(saver)
    assert SECRET.encode() not in read_raw_bytes(saver)


@pytest.mark.parametrize("snapshot_frequency", [1, 3, 100])
def test_seen_is_unknown_without_snapshot_if_values_are_not_messages(
    saver: SQLiteCheckpointer, snapshot_frequency: int
) -> None:
    """For values that are not messages, `seen` is None unless the checkpoint has a snapshot."""
    words = iter("bcdef")

    def last_two(state: Any, updates: Sequence[Any]) -> list[Any]:
        return append_parts(state, updates)[-2:]

    builder = make_builder("words", reduce=last_two, snapshot_frequency=snapshot_frequency)
    builder.add_node("node", lambda state: {"words": [next(words)]})
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"words": ["a"]}, config_at())
    graph.invoke({"words": ["z"]}, config_at())
    items = saver.history("t", channel="words")

    assert [item.value for item in items] == ["a", "b", "z", "c"]
    assert graph.get_state(config_at()).values["words"] == ["z", "c"]
    has_snapshot = "words" in saver.checkpoints("t")[0].counts
    assert [i.seen for i in items] == [None] * 4 or has_snapshot
    assert [i.seen for i in items] == [False, False, True, True] or not has_snapshot
    assert has_snapshot == (snapshot_frequency == 1)


def unite_sets(state: Any, updates: Sequence[Any]) -> set[Any]:
    return {*(state or ()), *(element for update in updates for element in update)}


def add_columns(state: Any, updates: Sequence[Any]) -> list[int]:
    sums = [state or [0, 0], *updates]
    return [sum(column) for column in zip(*sums, strict=True)]


def append_text(state: str | None, updates: Sequence[str]) -> str:
    return (state or "") + "".join(updates)


@pytest.mark.parametrize("snapshot_frequency", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("kind", "reduce", "writes"),
    [
        (set, unite_sets, [{1}, {2, "a" * 300}, {3}, {4}]),
        (list, add_columns, [[1, 2], [3, 4], [5, 6], [7, 8]]),
        (str, append_text, ["one", "t" * 200, "three", "four"]),
    ],
)
def test_history_has_written_values_that_have_no_parts(
    saver: SQLiteCheckpointer, snapshot_frequency: int, kind: Any, reduce: Any, writes: list[Any]
) -> None:
    """Each write is one item of the history at any frequency of snapshots."""
    builder = make_builder("total", reduce=reduce, kind=kind, snapshot_frequency=snapshot_frequency)
    steps = iter(writes[1::2])
    builder.add_node("node", lambda state: {"total": next(steps)})
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    for write in writes[::2]:
        graph.invoke({"total": write}, config_at())
    saver.copy_thread("t", "copy")
    saver.prune(["copy"])

    assert reduce(None, writes) == graph.get_state(config_at()).values["total"]
    for thread in ("t", "copy"):
        items = saver.history(thread, channel="total")
        assert writes == [item.value for item in items]
        assert not any(item.seen for item in items)


@pytest.mark.parametrize("snapshot_frequency", [1, 2, 3, 100])
@pytest.mark.parametrize("fork_by", ["input", "replay", "update"])
@pytest.mark.parametrize(
    ("kind", "reduce", "write"),
    [
        (set, unite_sets, lambda n: {n}),
        (list, add_columns, lambda n: [n, 1]),
        (str, append_text, str),
    ],
)
def test_fork_has_no_writes_of_sibling_that_it_leaves(
    saver: SQLiteCheckpointer,
    snapshot_frequency: int,
    fork_by: str,
    kind: Any,
    reduce: Any,
    write: Any,
) -> None:
    """The history has the writes of the sibling as a branch."""
    numbers = iter(range(100, 110))
    builder = make_builder("total", reduce=reduce, kind=kind, snapshot_frequency=snapshot_frequency)
    builder.add_node("node", lambda state: {"total": write(next(numbers))})
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    for number in (1, 2):
        graph.invoke({"total": write(number)}, config_at())
    before = next(snapshot for snapshot in graph.get_state_history(config_at()) if snapshot.next)
    if fork_by == "update":
        graph.update_state(before.config, {"total": write(50)}, as_node="node")
        added_numbers = [50]
    elif fork_by == "replay":
        graph.invoke(None, before.config)
        added_numbers = [102]
    else:
        graph.invoke({"total": write(60)}, before.config)
        added_numbers = [60, 102]
    items = saver.history("t", channel="total")
    state = reduce(None, [write(number) for number in (1, 100, 2, *added_numbers)])

    assert state == graph.get_state(config_at()).values["total"]
    assert [write(101)] == [item.value for item in items if item.branch]
    # langgraph stores the value of an update, not the update
    numbers_in_history = added_numbers if fork_by != "update" else []
    assert [write(n) for n in (1, 100, 2, *numbers_in_history)] == [
        i.value for i in items if not i.branch
    ]


def test_history_of_dict_has_each_pair_and_file_stores_content_once(
    saver: SQLiteCheckpointer,
) -> None:
    """The history has every pair that was written.

    The database stores the content of a pair once.
    """

    def merge_pairs(state: Any, updates: Sequence[Any]) -> dict[str, Any]:
        return dict(operator.or_(state or {}, {k: v for u in updates for k, v in u.items()}))

    builder = make_builder("files", reduce=merge_pairs, kind=dict)
    builder.add_node("node", lambda state: {"files": {"/b": {"content": [SECRET]}}})
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"files": {"/a": {"content": ["x"]}}}, config_at())
    items = saver.history("t", channel="files")

    expected = [("/a", {"content": ["x"]}), ("/b", {"content": [SECRET]})]
    assert expected == [item.value for item in items]
    assert dict(expected) == graph.get_state(config_at()).values["files"]
    stored: list[bytes] = []
    for table in ("items", "writes", "checkpoints"):
        rows = saver.database.read(partial(fetch_rows, f"SELECT body FROM {table}"))
        stored += [bytes(body) for (body,) in rows]
    assert sum(SECRET.encode() in body for body in stored) <= 1  # 0 if it is encrypted


def test_differences_list_messages_that_step_added_and_removed(saver: SQLiteCheckpointer) -> None:
    graph = compile_graph(saver, answer_newest_message)
    graph.invoke({"messages": [HumanMessage("one", id="a")]}, config_at())
    graph.update_state(config_at(), {"messages": [RemoveMessage(id="a")]}, as_node="node")
    infos = saver.checkpoints("t")
    pairs = [(info.parent_id, info.checkpoint_id) for info in infos]
    changes = [difference.channels.get("messages") for difference in saver.differences("t", pairs)]
    added = [[m.text for m in change.added.values()] if change else [] for change in changes]
    removed = [[m.text for m in change.removed.values()] if change else [] for change in changes]

    assert added == [[], ["To one"], ["one"], []]
    assert removed == [["one"], [], [], []]


def test_differences_to_earlier_checkpoint_remove_later_writes(saver: SQLiteCheckpointer) -> None:
    """Compared with a checkpoint before the first write, every written value is removed."""
    builder = make_builder("words", reduce=append_parts)
    builder.add_node("node", lambda state: {"words": ["b"]})
    builder.add_edge(START, "node")
    builder.compile(checkpointer=saver).invoke({"words": ["a"]}, config_at())
    newest, *_, oldest = [info.checkpoint_id for info in saver.checkpoints("t")]
    back, forth = saver.differences("t", [(newest, oldest), (oldest, newest)])

    assert [*back.channels["words"].removed.values()] == ["a", "b"]
    assert [*forth.channels["words"].added.values()] == ["a", "b"]
    assert (back.channels["words"].added_count, forth.channels["words"].removed_count) == (0, 0)


def test_put_includes_writes_of_another_process(place: Place) -> None:
    """A put that was planned without the writes of another process at its parent includes them."""

    def make_node(name: str) -> Node:
        def run(state: Any) -> Any:
            if name in failing:
                raise ValueError(name)
            return {"messages": [AIMessage(name)]}

        return run

    failing = {"a", "b"}
    with place.saver() as one, place.saver() as other:
        graphs = []
        for saver in (one, other):
            builder = make_builder()
            for name in "ab":
                builder.add_node(name, make_node(name))
                builder.add_edge(START, name)
            graphs.append(builder.compile(checkpointer=saver))
        with pytest.raises(ValueError, match=r"^[ab]\n"):
            graphs[0].invoke({"messages": [HumanMessage("go")]}, config_at())
        failing.remove("a")
        with pytest.raises(ValueError, match=r"^b\n"):
            graphs[1].invoke(None, config_at())
        failing.clear()
        state = graphs[0].invoke(None, config_at())

        assert [message.text for message in state["messages"]] == ["go", "a", "b"]
        assert ["go", "a", "b"] == list_texts(one.history("t")) == list_texts(other.history("t"))


def test_import_from_langgraph_file_keeps_history(saver: SQLiteCheckpointer, tmp_path: Any) -> None:
    """The history equals that of a thread which was written by perdure."""
    path = str(tmp_path / "langgraph.db")
    with SqliteSaver.from_conn_string(path) as langgraph_saver:
        graph = compile_graph(langgraph_saver, answer_newest_message, snapshot_frequency=3)
        for word in ("one", "two", "three"):
            graph.invoke({"messages": [HumanMessage(word)]}, config_at())
        expected = read_state_texts(graph)
    saver.import_from(path)

    assert expected == list_texts(saver.history("t"))
    assert saver.thread("t").messages == 6
    graph = compile_graph(saver, answer_newest_message, snapshot_frequency=3)
    graph.invoke({"messages": [HumanMessage("more")]}, config_at())
    assert [*expected, "more", "To more"] == list_texts(saver.history("t"))


def test_delta_values_reads_messages_and_snapshots_without_graph(saver: SQLiteCheckpointer) -> None:
    """Without the graph, messages are read from writes, and other values only from snapshots."""
    builder = make_builder()
    builder.add_node("node", answer_newest_message)
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"messages": [HumanMessage("one", id="a")]}, config_at())
    expected = graph.get_state(config_at()).values

    assert expected == saver.delta_values("t") == asyncio.run(saver.adelta_values("t"))
    for snapshot_frequency, expected_words in ((100, None), (1, ["a", "b"])):
        words_builder = make_builder(
            "words", reduce=append_parts, snapshot_frequency=snapshot_frequency
        )
        words_builder.add_node("node", lambda state: {"words": ["b"]})
        words_builder.add_edge(START, "node")
        words_builder.compile(checkpointer=saver).invoke(
            {"words": ["a"]}, config_at(f"{snapshot_frequency}")
        )
        assert {"words": expected_words} == saver.delta_values(f"{snapshot_frequency}")
    with pytest.raises(UnknownThread):
        saver.delta_values("none")


@pytest.mark.parametrize("snapshot_frequency", [3, 100])
def test_retain_without_history_keeps_exactly_items_of_rebuilt_value(
    saver: SQLiteCheckpointer, snapshot_frequency: int
) -> None:
    """The value of the channel is known only to the reducer of the graph."""
    numbers = iter(range(100))
    builder = make_builder("words", reduce=append_parts, snapshot_frequency=snapshot_frequency)
    builder.add_node("node", lambda state: {"words": [f"b{next(numbers)}"]})
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    for word in "xyz":
        graph.invoke({"words": [word]}, config_at())
    expected = graph.get_state(config_at()).values["words"]
    saver.retain(Retention(last=1, history=False), thread_ids=["t"])
    items = saver.history("t", channel="words")

    assert expected == graph.get_state(config_at()).values["words"]
    assert expected == [item.value for item in items]
