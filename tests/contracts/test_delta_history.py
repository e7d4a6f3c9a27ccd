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
from perdure.checkpointers.titles import read_existing_head
from perdure.errors import UnknownThread
from perdure.storage.flow import fetch_rows
from tests.backends import Place
from tests.contracts.erased import SECRET, both_doors, everything, raw
from tests.contracts.puts import at, uid_of

Durability = Literal["sync", "async", "exit"]
Node = Callable[[Any], Any]


def by_id(state: list[AnyMessage] | None, updates: Sequence[Any]) -> list[AnyMessage]:
    """A reducer of messages that gives ids to those without one, at each replay."""
    for update in updates:
        state = add_messages(state or [], update)  # type: ignore[assignment, arg-type]
    return state or []


def builder_of(
    channel: str = "messages", *, reduce: Any = by_id, kind: Any = list, every: int = 100
) -> Any:
    """A graph without nodes, whose state is a channel with a snapshot every so many updates."""
    delta: Any = DeltaChannel(reduce, snapshot_frequency=every)
    make: Any = TypedDict
    return StateGraph(make("State", {channel: Annotated[kind, delta]}))


def graph_of(saver: Any, node: Node, *, every: int = 100) -> Any:
    """A graph of one node with a channel of messages."""
    builder = builder_of(every=every)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    return builder.compile(checkpointer=saver)


def answering(state: Any) -> Any:
    """A node that answers the newest message."""
    return {"messages": [AIMessage(f"To {state['messages'][-1].text}")]}


def texts_of(items: Sequence[Any]) -> list[str]:
    return [item.value.text for item in items]


def texts_in(graph: Any, config: Any = None) -> list[str]:
    """The texts of the messages in the state."""
    return [message.text for message in graph.get_state(config or at()).values["messages"]]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("every", [1, 2, 100])
def test_every_message_once_in_order(
    saver: SQLiteCheckpointer, every: int, durability: Durability
) -> None:
    """History, title and counts are those of the state, whatever is a snapshot."""
    graph = graph_of(saver, answering, every=every)
    for word in ("one", "two", "three"):
        graph.invoke({"messages": [HumanMessage(word)]}, at(), durability=durability)
    items = saver.history("t")

    expected = ["one", "To one", "two", "To two", "three", "To three"]
    assert expected == texts_in(graph) == texts_of(items)
    assert all(item.seen for item in items)
    assert read_existing_head(saver, "t").title == "one"
    [info] = saver.threads()
    assert 6 == info.messages == saver.checkpoints("t")[0].counts["messages"]
    assert info.items >= 6


@pytest.mark.parametrize("every", [1, 2, 100])
def test_removed_and_replaced_messages_stay_in_the_history(
    saver: SQLiteCheckpointer, every: int
) -> None:
    """`seen` follows ids, `RemoveMessage`, `REMOVE_ALL_MESSAGES` and `Overwrite`."""
    steps = iter(
        [
            [AIMessage("first", id="a")],
            [RemoveMessage(id="a"), AIMessage("second", id="b")],
            [AIMessage("second, again", id="b")],
            [RemoveMessage(id=REMOVE_ALL_MESSAGES), AIMessage("third", id="c")],
            Overwrite([AIMessage("fourth", id="d")]),
        ]
    )
    graph = graph_of(saver, lambda state: {"messages": next(steps)}, every=every)
    seen, said = [], []
    for number in range(5):
        graph.invoke({"messages": [HumanMessage(f"{number}", id=f"h{number}")]}, at())
        items = saver.history("t")
        seen.append([item.value.text for item in items if item.seen])
        said.append(len(items))
        assert sorted(seen[-1]) == sorted(texts_in(graph))

    assert seen[:2] == [["0", "first"], ["0", "1", "second"]]
    assert seen[3] == ["third"]
    assert seen[4] == ["fourth"]
    assert said == [2, 4, 6, 8, 10]
    assert saver.checkpoints("t")[0].counts["messages"] == 1


def test_forms_of_messages(saver: SQLiteCheckpointer) -> None:
    """One message, a list, a dict, a pair and a text are messages, said as often as they were."""
    forms: list[Any] = [
        HumanMessage("an object"),
        [HumanMessage("in a list")],
        {"role": "user", "content": "a dict"},
        [{"role": "user", "content": "a dict in a list"}],
        [("human", "a pair")],
        "a text",
    ]
    graph = graph_of(saver, answering)
    for form in forms:
        graph.invoke({"messages": form}, at())
    items = saver.history("t")

    assert texts_in(graph) == texts_of(items)
    assert len(items) == 12
    assert all(item.seen for item in items)


def plain(state: list[AnyMessage] | None, updates: Sequence[Any]) -> list[Any]:
    """A reducer that appends whatever is written."""
    return [*(state or []), *(one for update in updates for one in update)]


@pytest.mark.parametrize("every", [1, 100])
def test_a_message_without_an_id_is_said_twice(saver: SQLiteCheckpointer, every: int) -> None:
    """Of two equal messages without ids both are in the history, also after a snapshot."""
    forms = {"messages": [("human", "Yes")]}
    graph = graph_of(saver, lambda state: {"messages": [AIMessage("And?")]}, every=100)
    graph.invoke(forms, at())
    graph.invoke(forms, at())

    assert texts_of(saver.history("t")) == ["Yes", "And?", "Yes", "And?"]
    snapshotting = graph_of(saver, lambda state: {"messages": [AIMessage("And?")]}, every=1)
    snapshotting.invoke({"messages": [HumanMessage("No")]}, at())
    items = saver.history("t")
    assert texts_of(items) == ["Yes", "And?", "Yes", "And?", "No", "And?"]
    assert all(item.seen for item in items)


def test_parallel_tasks_are_in_the_order_of_the_state(saver: SQLiteCheckpointer) -> None:
    """The writes of a superstep's tasks are in the order in which langgraph applies them."""
    builder = builder_of()
    for name in "dbca":
        builder.add_node(name, lambda state, name=name: {"messages": [AIMessage(name)]})
        builder.add_edge(START, name)
    builder.add_node("send", lambda state: {"messages": [AIMessage(f"sent {state['n']}")]})
    builder.add_conditional_edges("a", lambda state: [Send("send", {"n": n}) for n in range(12)])
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"messages": [HumanMessage("go")]}, at())

    assert texts_in(graph) == texts_of(saver.history("t"))
    assert len(saver.history("t")) == 17


def test_forks_and_branches(saver: SQLiteCheckpointer) -> None:
    """A fork has what led to it; what only its sibling said is marked."""
    graph = graph_of(saver, answering)
    graph.invoke({"messages": [HumanMessage("one")]}, at())
    old = graph.get_state(at()).config
    graph.invoke({"messages": [HumanMessage("left")]}, at())
    graph.invoke({"messages": [HumanMessage("right")]}, old)
    items = saver.history("t")
    trunk = [item for item in items if not item.branch]

    assert ["one", "To one", "right", "To right"] == texts_in(graph) == texts_of(trunk)
    assert [item.value.text for item in items if item.branch] == ["left", "To left"]
    assert not any(item.seen for item in items if item.branch)
    up_to = saver.history("t", checkpoint_id=uid_of(old))
    assert texts_of(up_to) == ["one", "To one"]
    saver.rewind("t", uid_of(old))
    assert texts_of([i for i in saver.history("t") if not i.branch]) == ["one", "To one"]


def test_updates_interrupts_and_failures(saver: SQLiteCheckpointer) -> None:
    """An update, a resumed run and a task that failed first leave each message once."""
    fails = iter([True, False, False])

    def node(state: Any) -> Any:
        answer = interrupt("sure?")
        if next(fails):
            raise ValueError("failed")
        return {"messages": [AIMessage(f"{answer} to {state['messages'][-1].text}")]}

    builder = builder_of()
    builder.add_node("node", node)
    builder.add_node("other", lambda state: {"messages": [AIMessage("beside")]})
    builder.add_edge(START, "node")
    builder.add_edge(START, "other")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"messages": [HumanMessage("go")]}, at())
    with pytest.raises(ValueError, match="failed"):
        graph.invoke(Command(resume="yes"), at())
    graph.invoke(Command(resume="yes", update={"messages": [HumanMessage("now")]}), at())
    graph.update_state(at(), {"messages": [AIMessage("by hand")]}, as_node="node")

    assert texts_in(graph) == texts_of(saver.history("t"))
    assert {"go", "beside", "by hand"} < {*texts_in(graph)}


def test_subgraphs_have_a_history_of_their_own(saver: SQLiteCheckpointer) -> None:
    """The namespace of a subgraph has its messages, and the root has all of them once."""
    inner, outer = builder_of(), builder_of()
    inner.add_node("inner", answering)
    inner.add_edge(START, "inner")
    outer.add_node("sub", inner.compile(checkpointer=True))
    outer.add_edge(START, "sub")
    graph = outer.compile(checkpointer=saver)
    for word in ("one", "two"):
        graph.invoke({"messages": [HumanMessage(word)]}, at())

    assert ["one", "To one", "two", "To two"] == texts_in(graph) == texts_of(saver.history("t"))
    [ns] = [ns for ns in saver.thread("t").namespaces if ns]
    assert texts_of(saver.history("t", checkpoint_ns=ns)) == ["one", "To one", "two", "To two"]


@pytest.mark.parametrize("every", [2, 100])
def test_the_history_outlives_prunes_and_copies(saver: SQLiteCheckpointer, every: int) -> None:
    """Prune, retain and copy leave the history and what is seen of it."""
    graph = graph_of(saver, answering, every=every)
    for word in ("one", "two"):
        graph.invoke({"messages": [HumanMessage(word)]}, at())
    graph.update_state(at(), {"messages": [RemoveMessage(texts_id(graph, 0))]}, as_node="node")
    before = [(item.value, item.seen) for item in saver.history("t")]
    end = uid_of(graph.get_state(at()).config)
    saver.copy_thread("t", "whole")
    saver.copy_thread("t", "part", checkpoint_id=end)
    saver.prune(["t"])
    saver.retain(Retention(turns=True), thread_ids=["whole"])

    for thread in ("t", "whole", "part"):
        assert before == [(item.value, item.seen) for item in saver.history(thread)]
        assert saver.thread(thread).messages == 4
        graph.invoke({"messages": [HumanMessage("more")]}, at(thread))
        assert texts_of(saver.history(thread))[4:] == ["more", "To more"]


def texts_id(graph: Any, number: int) -> str:
    """The id of a message in the state."""
    return str(graph.get_state(at()).values["messages"][number].id)


def test_retention_without_history_leaves_what_the_state_has(saver: SQLiteCheckpointer) -> None:
    """The history keeps exactly the items that a kept checkpoint contains."""
    graph = graph_of(saver, answering)
    for word in ("one", "two"):
        graph.invoke({"messages": [HumanMessage(word)]}, at())
    graph.update_state(at(), {"messages": [RemoveMessage(texts_id(graph, 0))]}, as_node="node")
    saver.retain(Retention(last=1, history=False), thread_ids=["t"])

    assert ["To one", "two", "To two"] == texts_in(graph) == texts_of(saver.history("t"))


@pytest.mark.parametrize("every", [1, 3, 5, 100])
@pytest.mark.parametrize("durability", ["sync", "exit"])
def test_retention_without_history_leaves_what_is_replayed(
    saver: SQLiteCheckpointer, every: int, durability: Durability
) -> None:
    """Of values that only a reducer knows, the history keeps what came since the snapshot."""
    numbers = iter(range(9))
    builder = builder_of("words", reduce=plain, every=every)
    builder.add_node("node", lambda state: {"words": [f"w{next(numbers)}"]})
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    for word in ("one", "two", "three"):
        graph.invoke({"words": [word]}, at(), durability=durability)
    graph.update_state(at(), {"words": Overwrite(["new"])}, as_node="node")
    graph.invoke({"words": ["last"]}, at(), durability=durability)
    words = [item.value for item in saver.history("t", channel="words")]
    for _ in range(2):
        saver.retain(Retention(last=1, history=False), thread_ids=["t"])
        left = [item.value for item in saver.history("t", channel="words")]

        assert words[len(words) - len(left) :] == left
        assert left[-3:] == graph.get_state(at()).values["words"] == ["new", "last", "w3"]
        assert left == words[-3:] or every > 1
    graph.invoke({"words": ["more"]}, at(), durability=durability)
    assert [*left, "more", "w4"] == [i.value for i in saver.history("t", channel="words")]


@both_doors
@pytest.mark.parametrize("every", [1, 2, 100])
def test_erasure_reaches_log_and_transcript(
    saver: SQLiteCheckpointer, erase: Any, every: int
) -> None:
    """An erased message is in no history, no title and no byte of the file."""
    graph = graph_of(saver, lambda state: {"messages": [AIMessage("so")]}, every=every)
    for uid, text in (("a", SECRET), ("b", "stays")):
        graph.invoke({"messages": [HumanMessage(text, id=uid)]}, at())
    graph.update_state(at(), {"messages": [RemoveMessage(id="a")]}, as_node="node")
    assert read_existing_head(saver, "t").title == SECRET
    erase(saver, "t", ["a"])

    assert ["so", "stays", "so"] == texts_of(saver.history("t")) == texts_in(graph)
    assert read_existing_head(saver, "t").title == "stays"
    assert SECRET not in everything(saver)
    assert SECRET.encode() not in raw(saver)
    graph.invoke({"messages": [HumanMessage("more", id="c")]}, at())
    assert texts_of(saver.history("t")) == ["so", "stays", "so", "more", "so"]


def test_a_text_without_an_id_is_erased_with_its_twin(saver: SQLiteCheckpointer) -> None:
    """A message that got its id from the reducer goes from what was written without one."""
    graph = graph_of(saver, lambda state: {"messages": [AIMessage("so")]}, every=3)
    graph.invoke({"messages": [("human", SECRET)]}, at())
    graph.invoke({"messages": [HumanMessage("stays", id="b")]}, at())
    uid = texts_id(graph, 0)
    saver.erase("t", [uid])

    assert texts_of(saver.history("t")) == ["so", "stays", "so"]
    assert SECRET not in everything(saver)
    assert SECRET.encode() not in raw(saver)


@pytest.mark.parametrize("every", [1, 3, 100])
def test_other_reducers(saver: SQLiteCheckpointer, every: int) -> None:
    """Of what is no message `seen` is unknown, unless the checkpoint has a snapshot."""
    words = iter("bcdef")

    def last_two(state: Any, updates: Sequence[Any]) -> list[Any]:
        return plain(state, updates)[-2:]

    builder = builder_of("words", reduce=last_two, every=every)
    builder.add_node("node", lambda state: {"words": [next(words)]})
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"words": ["a"]}, at())
    graph.invoke({"words": ["z"]}, at())
    items = saver.history("t", channel="words")

    assert [item.value for item in items] == ["a", "b", "z", "c"]
    assert graph.get_state(at()).values["words"] == ["z", "c"]
    known = "words" in saver.checkpoints("t")[0].counts
    assert [i.seen for i in items] == [None] * 4 or known
    assert [i.seen for i in items] == [False, False, True, True] or not known
    assert known == (every == 1)


def united(state: Any, updates: Sequence[Any]) -> set[Any]:
    return {*(state or ()), *(one for update in updates for one in update)}


def added_up(state: Any, updates: Sequence[Any]) -> list[int]:
    sums = [state or [0, 0], *updates]
    return [sum(column) for column in zip(*sums, strict=True)]


def appended(state: str | None, updates: Sequence[str]) -> str:
    return (state or "") + "".join(updates)


@pytest.mark.parametrize("every", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("kind", "reduce", "writes"),
    [
        (set, united, [{1}, {2, "a" * 300}, {3}, {4}]),
        (list, added_up, [[1, 2], [3, 4], [5, 6], [7, 8]]),
        (str, appended, ["one", "t" * 200, "three", "four"]),
    ],
)
def test_values_without_parts(
    saver: SQLiteCheckpointer, every: int, kind: Any, reduce: Any, writes: list[Any]
) -> None:
    """Written values are in the history, whichever checkpoints have a snapshot."""
    builder = builder_of("total", reduce=reduce, kind=kind, every=every)
    steps = iter(writes[1::2])
    builder.add_node("node", lambda state: {"total": next(steps)})
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    for write in writes[::2]:
        graph.invoke({"total": write}, at())
    saver.copy_thread("t", "copy")
    saver.prune(["copy"])

    assert reduce(None, writes) == graph.get_state(at()).values["total"]
    for thread in ("t", "copy"):
        items = saver.history(thread, channel="total")
        assert writes == [item.value for item in items]
        assert not any(item.seen for item in items)


@pytest.mark.parametrize("every", [1, 2, 3, 100])
@pytest.mark.parametrize("how", ["input", "replay", "update"])
@pytest.mark.parametrize(
    ("kind", "reduce", "write"),
    [(set, united, lambda n: {n}), (list, added_up, lambda n: [n, 1]), (str, appended, str)],
)
def test_a_fork_has_no_writes_of_the_child_that_it_leaves(
    saver: SQLiteCheckpointer, every: int, how: str, kind: Any, reduce: Any, write: Any
) -> None:
    """The writes of the other child stand in the history as a branch."""
    numbers = iter(range(100, 110))
    builder = builder_of("total", reduce=reduce, kind=kind, every=every)
    builder.add_node("node", lambda state: {"total": write(next(numbers))})
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    for number in (1, 2):
        graph.invoke({"total": write(number)}, at())
    before = next(each for each in graph.get_state_history(at()) if each.next)
    if how == "update":
        graph.update_state(before.config, {"total": write(50)}, as_node="node")
        added = [50]
    elif how == "replay":
        graph.invoke(None, before.config)
        added = [102]
    else:
        graph.invoke({"total": write(60)}, before.config)
        added = [60, 102]
    items = saver.history("t", channel="total")
    state = reduce(None, [write(number) for number in (1, 100, 2, *added)])

    assert state == graph.get_state(at()).values["total"]
    assert [write(101)] == [item.value for item in items if item.branch]
    known = added if how != "update" else []  # langgraph stores the value, not the update
    assert [write(n) for n in (1, 100, 2, *known)] == [i.value for i in items if not i.branch]


def test_files_of_a_dict(saver: SQLiteCheckpointer) -> None:
    """The history of a dict has each pair that was written; the file has its content once."""

    def merged(state: Any, updates: Sequence[Any]) -> dict[str, Any]:
        return dict(operator.or_(state or {}, {k: v for u in updates for k, v in u.items()}))

    builder = builder_of("files", reduce=merged, kind=dict)
    builder.add_node("node", lambda state: {"files": {"/b": {"content": [SECRET]}}})
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"files": {"/a": {"content": ["x"]}}}, at())
    items = saver.history("t", channel="files")

    expected = [("/a", {"content": ["x"]}), ("/b", {"content": [SECRET]})]
    assert expected == [item.value for item in items]
    assert dict(expected) == graph.get_state(at()).values["files"]
    stored: list[bytes] = []
    for table in ("items", "writes", "checkpoints"):
        rows = saver.database.read(partial(fetch_rows, f"SELECT body FROM {table}"))
        stored += [bytes(body) for (body,) in rows]
    assert sum(SECRET.encode() in body for body in stored) <= 1  # 0 if it is encrypted


def test_differences_of_steps(saver: SQLiteCheckpointer) -> None:
    """The change of a step has the messages that it added and removed."""
    graph = graph_of(saver, answering)
    graph.invoke({"messages": [HumanMessage("one", id="a")]}, at())
    graph.update_state(at(), {"messages": [RemoveMessage(id="a")]}, as_node="node")
    infos = saver.checkpoints("t")
    pairs = [(info.parent_id, info.checkpoint_id) for info in infos]
    changes = [each.channels.get("messages") for each in saver.differences("t", pairs)]
    added = [[m.text for m in change.added.values()] if change else [] for change in changes]
    removed = [[m.text for m in change.removed.values()] if change else [] for change in changes]

    assert added == [[], ["To one"], ["one"], []]
    assert removed == [["one"], [], [], []]


def test_differences_from_a_later_checkpoint(saver: SQLiteCheckpointer) -> None:
    """Compared with a checkpoint before the first write, all that was written is removed."""
    builder = builder_of("words", reduce=plain)
    builder.add_node("node", lambda state: {"words": ["b"]})
    builder.add_edge(START, "node")
    builder.compile(checkpointer=saver).invoke({"words": ["a"]}, at())
    newest, *_, oldest = [info.checkpoint_id for info in saver.checkpoints("t")]
    back, forth = saver.differences("t", [(newest, oldest), (oldest, newest)])

    assert [*back.channels["words"].removed.values()] == ["a", "b"]
    assert [*forth.channels["words"].added.values()] == ["a", "b"]
    assert (back.channels["words"].added_count, forth.channels["words"].removed_count) == (0, 0)


def test_writes_of_another_process(place: Place) -> None:
    """A put that was planned without what another process wrote at its parent has it too."""

    def node(name: str) -> Node:
        def run(state: Any) -> Any:
            if name in failing:
                raise ValueError(name)
            return {"messages": [AIMessage(name)]}

        return run

    failing = {"a", "b"}
    with place.saver() as one, place.saver() as other:
        graphs = []
        for each in (one, other):
            builder = builder_of()
            for name in "ab":
                builder.add_node(name, node(name))
                builder.add_edge(START, name)
            graphs.append(builder.compile(checkpointer=each))
        with pytest.raises(ValueError, match=r"^[ab]\n"):
            graphs[0].invoke({"messages": [HumanMessage("go")]}, at())
        failing.remove("a")
        with pytest.raises(ValueError, match=r"^b\n"):
            graphs[1].invoke(None, at())
        failing.clear()
        state = graphs[0].invoke(None, at())

        assert [message.text for message in state["messages"]] == ["go", "a", "b"]
        assert ["go", "a", "b"] == texts_of(one.history("t")) == texts_of(other.history("t"))


def test_import_of_langgraphs_file(saver: SQLiteCheckpointer, tmp_path: Any) -> None:
    """An imported thread has the history that it would have had here."""
    path = str(tmp_path / "langgraph.db")
    with SqliteSaver.from_conn_string(path) as theirs:
        graph = graph_of(theirs, answering, every=3)
        for word in ("one", "two", "three"):
            graph.invoke({"messages": [HumanMessage(word)]}, at())
        expected = texts_in(graph)
    saver.import_from(path)

    assert expected == texts_of(saver.history("t"))
    assert saver.thread("t").messages == 6
    graph = graph_of(saver, answering, every=3)
    graph.invoke({"messages": [HumanMessage("more")]}, at())
    assert [*expected, "more", "To more"] == texts_of(saver.history("t"))


def test_values_without_the_graph(saver: SQLiteCheckpointer) -> None:
    """Messages are known without the graph; other values only as snapshots."""
    builder = builder_of()
    builder.add_node("node", answering)
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"messages": [HumanMessage("one", id="a")]}, at())
    expected = graph.get_state(at()).values

    assert expected == saver.delta_values("t") == asyncio.run(saver.adelta_values("t"))
    for every, known in ((100, None), (1, ["a", "b"])):
        words = builder_of("words", reduce=plain, every=every)
        words.add_node("node", lambda state: {"words": ["b"]})
        words.add_edge(START, "node")
        words.compile(checkpointer=saver).invoke({"words": ["a"]}, at(f"{every}"))
        assert {"words": known} == saver.delta_values(f"{every}")
    with pytest.raises(UnknownThread):
        saver.delta_values("none")


@pytest.mark.parametrize("every", [3, 100])
def test_retention_without_history_of_unknown_values(saver: SQLiteCheckpointer, every: int) -> None:
    """Of a value that is not known, what its snapshot and the later writes hold is left."""
    numbers = iter(range(100))
    builder = builder_of("words", reduce=plain, every=every)
    builder.add_node("node", lambda state: {"words": [f"b{next(numbers)}"]})
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=saver)
    for word in "xyz":
        graph.invoke({"words": [word]}, at())
    expected = graph.get_state(at()).values["words"]
    saver.retain(Retention(last=1, history=False), thread_ids=["t"])
    items = saver.history("t", channel="words")

    assert expected == graph.get_state(at()).values["words"]
    assert expected == [item.value for item in items]
