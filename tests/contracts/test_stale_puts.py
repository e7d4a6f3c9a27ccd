"""What is erased or deleted while a run is under way is not stored again by that run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.channels import DeltaChannel
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Send, interrupt

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.address import REMOVALS_KEY
from perdure.checkpointers.removal_records import RECORD_RETENTION_DAYS
from perdure.errors import ThreadDeleted
from perdure.storage.flow import fetch_rows
from tests.backends import Place
from tests.contracts.erased import SECRET, Saver, read_raw_bytes, render_thread
from tests.contracts.puts import checkpoint_id_of, put
from tests.contracts.under_way import (
    CONFIG,
    DURABILITIES,
    Gate,
    build_graph,
    make_invocation,
    read_message_ids,
    run_until_gate,
    start_thread,
    thread_config,
)

QUESTION = {"messages": [HumanMessage("a question", id="q")]}
DELETIONS: dict[str, Callable[[Saver], object]] = {
    "delete_thread": lambda saver: saver.delete_thread("t"),
    "prune": lambda saver: saver.prune(["t"], strategy="delete"),
    "erase": lambda saver: saver.erase("t"),
}
through_both_doors = pytest.mark.parametrize("door", ["sync", "async"])
at_any_time = pytest.mark.parametrize("durability", DURABILITIES)


def is_stored(saver: Saver) -> bool:
    """Whether the erased text is in any row, or in the bytes of a file."""
    return SECRET.encode() in read_raw_bytes(saver)


# -- messages


@through_both_doors
@at_any_time
def test_an_erased_message_is_left_out(saver: Saver, door: str, durability: str) -> None:
    """A run stores all but the erased message, in its state, its history and its bytes."""
    start_thread(saver)
    gate = Gate()
    with run_until_gate(
        gate, make_invocation(build_graph(saver, gate), door, durability, QUESTION)
    ) as run:
        saver.erase("t", ["m0"])

    assert run.error is None
    assert read_message_ids(saver) == ["m1", "q", "one", "two"]
    assert [item.value.id for item in saver.history("t")] == ["m1", "q", "one", "two"]
    assert SECRET not in render_thread(saver)
    assert not is_stored(saver)


@at_any_time
def test_an_erased_message_is_left_out_by_another_process(place: Place, durability: str) -> None:
    """The run of one checkpointer leaves out what another one on the database has erased."""
    gate = Gate()
    with place.saver() as one, place.saver() as other:
        start_thread(one)
        with run_until_gate(
            gate, make_invocation(build_graph(one, gate), "sync", durability, QUESTION)
        ) as run:
            other.erase("t", ["m0"])

        assert run.error is None
        assert read_message_ids(other) == ["m1", "q", "one", "two"]
        assert not is_stored(one)


@at_any_time
def test_the_message_of_the_run_itself_is_left_out(saver: Saver, durability: str) -> None:
    """The input of the run that is under way is erased, also if it is not stored yet."""
    gate = Gate()
    input = {"messages": [HumanMessage(SECRET, id="m0")]}
    with run_until_gate(gate, make_invocation(build_graph(saver, gate), "sync", durability, input)):
        saver.erase("t", ["m0"])

    assert read_message_ids(saver) == ["one", "two"]
    assert not is_stored(saver)


def test_each_of_several_erasures_counts(saver: Saver) -> None:
    """A run that began between two erasures leaves out what the second one erased."""
    start_thread(saver)
    saver.erase("t", ["m1"])
    gate = Gate()
    with run_until_gate(gate, make_invocation(build_graph(saver, gate), "sync", "sync", QUESTION)):
        saver.erase("t", ["m0"])

    assert read_message_ids(saver) == ["q", "one", "two"]


@at_any_time
def test_a_later_run_may_say_the_same(saver: Saver, durability: str) -> None:
    """A run that began after an erasure is stored whole, with the same ids and words."""
    start_thread(saver)
    saver.erase("t", ["m0"])
    again = {"messages": [HumanMessage(SECRET, id="m0")]}
    make_invocation(build_graph(saver), "sync", durability, again)()

    assert read_message_ids(saver) == ["m1", "m0", "one", "two"]


def test_an_update_after_an_erasure_is_stored_whole(saver: Saver) -> None:
    """`update_state` reads the state first, and so knows of the erasure."""
    start_thread(saver)
    saver.erase("t", ["m0"])
    message = HumanMessage(SECRET, id="m0")
    build_graph(saver).update_state(CONFIG, {"messages": [message]}, as_node="second")

    assert read_message_ids(saver) == ["m1", "m0"]


def test_an_update_that_began_before_is_filtered(saver: Saver) -> None:
    """What was read before an erasure, and is put after it, lacks the erased message."""
    start_thread(saver)
    before = saver.get_tuple(CONFIG)
    assert before is not None
    saver.erase("t", ["m0"])
    stored = put(saver, before.checkpoint["channel_values"], before.config)

    assert read_message_ids(saver) == ["m1"]
    assert checkpoint_id_of(stored) == checkpoint_id_of(saver.get_tuple(CONFIG).config)  # type: ignore[union-attr]
    assert not is_stored(saver)


@pytest.mark.parametrize("number", range(3))
def test_other_removals_leave_a_run_alone(saver: Saver, number: int) -> None:
    """A run goes on whole through a prune, a retention rule and a rewind."""
    start_thread(saver)
    head = checkpoint_id_of(saver.get_tuple(CONFIG).config)  # type: ignore[union-attr]
    removals: list[Callable[[], object]] = [
        lambda: saver.prune(["t"]),
        lambda: saver.retain(Retention(last=1)),
        lambda: saver.rewind("t", head),
    ]
    gate = Gate()
    with run_until_gate(
        gate, make_invocation(build_graph(saver, gate), "sync", "sync", QUESTION)
    ) as run:
        removals[number]()

    assert run.error is None
    assert [item.value.id for item in saver.history("t")] == ["m0", "m1", "q", "one", "two"]
    assert REMOVALS_KEY not in saver.get_tuple(CONFIG).config["configurable"]  # type: ignore[union-attr]


def test_the_number_of_erasures_is_no_metadata(saver: Saver) -> None:
    """Neither the metadata of a checkpoint nor that of a thread shows what a run has loaded."""
    start_thread(saver)
    saver.erase("t", ["m0"])
    build_graph(saver).invoke(QUESTION, CONFIG)

    assert REMOVALS_KEY not in str([info.metadata for info in saver.checkpoints("t")])
    assert REMOVALS_KEY not in str(saver.heads()[0].metadata)


# -- what quotes a message


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    notes: str
    draft: list[Any]


@at_any_time
def test_quotations_are_left_out(saver: Saver, durability: str) -> None:
    """A text, a dict and a `Send` that quote the message go with it; the rest of them stays."""
    gate = Gate()

    def first(_: State) -> Any:
        gate.wait()
        draft = [{"role": "user", "content": SECRET, "id": "m0"}, {"kept": "yes"}]
        return {"notes": SECRET, "draft": draft, "messages": [AIMessage("one", id="one")]}

    def fan(_: State) -> list[Send]:
        return [Send("worker", {"text": f"about {SECRET}"}), Send("worker", {"text": "fine"})]

    builder: Any = StateGraph(State)
    builder.add_node("first", first)
    builder.add_node("worker", lambda task: {"messages": [AIMessage(task["text"][:5])]})
    builder.add_edge(START, "first")
    builder.add_conditional_edges("first", fan, ["worker"])
    graph = builder.compile(checkpointer=saver)
    start_thread(saver)
    with run_until_gate(gate, make_invocation(graph, "sync", durability, QUESTION)) as run:
        saver.erase("t", ["m0"])

    values = graph.get_state(CONFIG).values
    assert run.error is None
    assert (values["notes"], values["draft"]) == ("", [{"kept": "yes"}])
    assert [message.text for message in values["messages"]][2:] == ["one", "about", "fine"]
    assert not is_stored(saver)


def fails(_: State) -> Any:
    raise ValueError(f"cannot read {SECRET}")


def asks(_: State) -> Any:
    return interrupt(f"is it true that {SECRET}?")


@pytest.mark.parametrize("node", [fails, asks])
def test_questions_and_errors_that_quote_are_left_out(
    saver: Saver, node: Callable[[State], Any]
) -> None:
    """A question that quotes the message is not asked, and an error that quotes it is empty."""
    gate = Gate()

    def first(state: State) -> Any:
        gate.wait()
        return node(state)

    builder: Any = StateGraph(State)
    builder.add_node("first", first)
    builder.add_edge(START, "first")
    graph = builder.compile(checkpointer=saver)
    start_thread(saver)
    with run_until_gate(gate, make_invocation(graph, "sync", "sync", QUESTION)):
        saver.erase("t", ["m0"])

    assert graph.get_state(CONFIG).interrupts == ()
    assert not is_stored(saver)


def test_a_call_of_an_erased_message_is_not_made_again(saver: Saver) -> None:
    """The checkpoint after an erased call starts no tool node when the thread goes on."""
    gate, ran = Gate(), list[str]()
    call: Any = {"name": "pay", "args": {"sum": 1}, "id": "call-1", "type": "tool_call"}

    def model(_: MessagesState) -> Any:
        gate.wait()
        return {"messages": [AIMessage(SECRET, id="m9", tool_calls=[call])]}

    def pay(_: MessagesState) -> Any:
        ran.append("pay")
        return {"messages": []}

    builder: Any = StateGraph(MessagesState)
    builder.add_node("model", model)
    builder.add_node("tools", pay)
    builder.add_edge(START, "model").add_edge("model", "tools")
    graph = builder.compile(checkpointer=saver, interrupt_before=["tools"])
    start_thread(saver)
    with run_until_gate(gate, make_invocation(graph, "sync", "sync", QUESTION)):
        saver.erase("t", ["m9"])
    graph.invoke(None, CONFIG)

    assert ran == []
    assert read_message_ids(saver) == ["m0", "m1", "q"]


@through_both_doors
@at_any_time
@pytest.mark.parametrize("every", [1, 50])
def test_a_delta_channel_lacks_the_message(
    saver: Saver, door: str, durability: str, every: int
) -> None:
    """Neither the writes of a run nor a snapshot have it."""

    def apply(state: Any, writes: Any) -> Any:
        for write in writes:
            state = add_messages(state or [], write)
        return state

    channel: Any = DeltaChannel(apply, snapshot_frequency=every)
    Delta = TypedDict("Delta", {"messages": Annotated[list[AnyMessage], channel]})  # noqa: UP013
    gate = Gate()

    def first(_: Any) -> Any:
        gate.wait()
        return {"messages": [AIMessage("answer one", id="one")]}

    builder: Any = StateGraph(Delta)
    builder.add_node("first", first)
    builder.add_node("second", lambda _: {"messages": [AIMessage("two", id="two")]})
    builder.add_edge(START, "first").add_edge("first", "second")
    graph = builder.compile(checkpointer=saver)
    begun = [HumanMessage(SECRET, id="m0"), AIMessage("noted", id="m1")]
    graph.update_state(CONFIG, {"messages": begun}, as_node="second")
    with run_until_gate(gate, make_invocation(graph, door, durability, QUESTION)) as run:
        saver.erase("t", ["m0"])

    assert run.error is None
    messages = graph.get_state(CONFIG).values["messages"]
    assert [message.id for message in messages] == ["m1", "q", "one", "two"]
    assert not is_stored(saver)


# -- subgraphs


class Shared(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def nested(saver: Saver, gate: Gate, checkpointer: Any) -> Any:
    """A graph whose second node is a subgraph that has the messages of its parent."""
    inner: Any = StateGraph(Shared)
    inner.add_node("inner", lambda _: {"messages": [AIMessage("inner", id="inner")]})
    inner.add_edge(START, "inner")

    def first(_: Shared) -> Any:
        gate.wait()
        return {"messages": [AIMessage("answer one", id="one")]}

    outer: Any = StateGraph(Shared)
    outer.add_node("first", first)
    outer.add_node("second", inner.compile(checkpointer=checkpointer))
    outer.add_edge(START, "first").add_edge("first", "second")
    return outer.compile(checkpointer=saver)


@through_both_doors
@at_any_time
@pytest.mark.parametrize("checkpointer", [None, True])
def test_a_subgraph_leaves_an_erased_message_out(
    saver: Saver, door: str, durability: str, checkpointer: bool | None
) -> None:
    """A subgraph that begins after an erasure still has the state of its run, and stores less."""
    start_thread(saver)
    gate = Gate()
    gate.opened.set()
    graph = nested(saver, gate, checkpointer)
    make_invocation(graph, door, durability, QUESTION)()
    gate.reached.clear()
    gate.opened.clear()
    more = {"messages": [HumanMessage("more", id="q2")]}
    with run_until_gate(gate, make_invocation(graph, door, durability, more)) as run:
        saver.erase("t", ["m0"])

    assert run.error is None
    assert read_message_ids(saver) == ["m1", "q", "one", "inner", "q2"]
    assert not is_stored(saver)


@at_any_time
@pytest.mark.parametrize("checkpointer", [None, True])
def test_a_subgraph_of_a_later_run_is_stored_whole(
    saver: Saver, durability: str, checkpointer: bool | None
) -> None:
    """A subgraph knows that its run began after the erasure, in a new namespace too."""
    start_thread(saver)
    saver.erase("t", ["m0"])
    gate = Gate()
    gate.opened.set()
    again = {"messages": [HumanMessage(SECRET, id="m0")]}
    make_invocation(nested(saver, gate, checkpointer), "sync", durability, again)()

    subgraphs = [ns for ns in saver.thread("t").namespaces if ns]
    assert (subgraphs == []) is (durability == "exit" and checkpointer is None)
    for ns in subgraphs:
        assert SECRET in [item.value.text for item in saver.history("t", checkpoint_ns=ns)]


# -- threads


@through_both_doors
@at_any_time
@pytest.mark.parametrize("name", DELETIONS)
def test_a_run_of_a_deleted_thread_is_refused(
    saver: Saver, door: str, durability: str, name: str
) -> None:
    """Nothing of the run is stored, and the run ends with an error of its own."""
    start_thread(saver)
    gate = Gate()
    with run_until_gate(
        gate, make_invocation(build_graph(saver, gate), door, durability, QUESTION)
    ) as run:
        DELETIONS[name](saver)

    assert isinstance(run.error, ThreadDeleted)
    assert saver.threads() == []
    assert not is_stored(saver)


@at_any_time
@pytest.mark.parametrize("checkpointer", [None, True])
def test_a_subgraph_of_a_deleted_thread_is_refused(
    saver: Saver, durability: str, checkpointer: bool | None
) -> None:
    """A subgraph that begins after the deletion stores nothing in a namespace of its own."""
    start_thread(saver)
    gate = Gate()
    graph = nested(saver, gate, checkpointer)
    with run_until_gate(gate, make_invocation(graph, "sync", durability, QUESTION)) as run:
        saver.delete_thread("t")

    assert isinstance(run.error, ThreadDeleted)
    assert saver.threads() == []
    assert not is_stored(saver)


@at_any_time
def test_a_new_conversation_under_the_id_stays_whole(saver: Saver, durability: str) -> None:
    """A new conversation with the old ids and texts is stored while the old run is refused."""
    start_thread(saver)
    gate, open_gate = Gate(), Gate()
    open_gate.opened.set()
    again = {"messages": [HumanMessage(SECRET, id="m0")]}
    with run_until_gate(
        gate, make_invocation(build_graph(saver, gate), "sync", durability, QUESTION)
    ) as run:
        saver.delete_thread("t")
        nested(saver, open_gate, None).invoke(again, CONFIG, durability=durability)
        read_message_ids(saver)

    assert isinstance(run.error, ThreadDeleted)
    assert read_message_ids(saver) == ["m0", "one", "inner"]
    build_graph(saver).invoke(QUESTION, CONFIG)
    assert read_message_ids(saver) == ["m0", "one", "inner", "q", "two"]


def test_a_put_of_another_process_is_refused(place: Place) -> None:
    """What a checkpointer keeps of a thread does not hide that another one has deleted it."""
    gate = Gate()
    with place.saver() as one, place.saver() as other:
        start_thread(one)
        with run_until_gate(
            gate, make_invocation(build_graph(one, gate), "sync", "sync", QUESTION)
        ) as run:
            other.delete_thread("t")

        assert isinstance(run.error, ThreadDeleted)
        assert other.threads() == []


def test_a_put_without_its_parent_is_allowed(saver: Saver) -> None:
    """A parent that was never there does not matter, also under an id that was deleted."""
    put(saver, {"messages": []}, thread_config("t"))
    saver.delete_thread("t")
    config: Any = {"configurable": {**CONFIG["configurable"], "checkpoint_ns": ""}}
    put(saver, {"n": 1}, {"configurable": {**config["configurable"], "checkpoint_id": "never"}})
    put(saver, {"n": 2}, config)

    assert len(saver.checkpoints("t")) == 2


def test_records_name_neither_threads_nor_texts(tmp_path: Any) -> None:
    """A file without encryption has no id of a deleted thread, nor of what was in it."""
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        start_thread(saver, thread="the-thread-of-ann")
        saver.erase("the-thread-of-ann", ["m0"])
        head = checkpoint_id_of(saver.get_tuple(thread_config("the-thread-of-ann")).config)  # type: ignore[union-attr]
        saver.erase("the-thread-of-ann")

        assert b"the-thread-of-ann" not in read_raw_bytes(saver)
        assert bytes.fromhex(head.replace("-", "")) not in read_raw_bytes(saver)
        assert head.encode() not in read_raw_bytes(saver)


def test_a_resumed_thread_goes_on_after_an_erasure(saver: Saver) -> None:
    """A thread that waits for an answer is no run under way: its next run knows of the erasure."""
    builder: Any = StateGraph(MessagesState)
    builder.add_node("ask", lambda _: {"messages": [AIMessage(interrupt("go on?"), id="a")]})
    builder.add_edge(START, "ask")
    graph = builder.compile(checkpointer=saver)
    start_thread(saver)
    graph.invoke(QUESTION, CONFIG)
    saver.erase("t", ["m0"])
    graph.invoke(Command(resume="yes"), CONFIG)

    assert read_message_ids(saver) == ["m1", "q", "a"]


def test_records_are_dropped_after_a_time(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next erasure or deletion after `RECORD_RETENTION_DAYS` drops those of all threads."""

    def numbers() -> list[int]:
        rows = saver.database.read(
            lambda: fetch_rows("SELECT number FROM removals ORDER BY number")
        )
        return [number for (number,) in rows]

    start_thread(saver)
    saver.erase("t", ["m0"])
    saver.erase("t", ["m1"])
    now = time.time()
    before = numbers()
    monkeypatch.setattr(time, "time", lambda: now + (RECORD_RETENTION_DAYS + 1) * 86400)
    start_thread(saver, thread="other")
    saver.erase("other", ["m0"])

    assert (before, numbers()) == ([1, 2], [1])
    assert saver.removals("t") == 2


def test_what_was_removed_since_is_told(saver: Saver) -> None:
    """By the number before the messages were read; all of them, if the thread was deleted."""
    start_thread(saver)
    since = saver.removals("t")
    messages = [item.value for item in saver.history("t")]
    saver.erase("t", ["m0"])
    erased = saver.removed("t", messages, since=since)
    later = saver.removed("t", messages, since=saver.removals("t"))
    saver.delete_thread("t")

    assert (since, erased, later) == (0, [True, False], [False, False])
    assert asyncio.run(saver.aremoved("t", messages, since=1)) == [True, True]
    assert asyncio.run(saver.aremovals("t")) == 2
    assert saver.removals("another") == 0
