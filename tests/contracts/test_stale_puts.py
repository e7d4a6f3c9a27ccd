"""An active run does not store again what was erased or deleted since it started."""

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
with_sync_and_async = pytest.mark.parametrize("mode", ["sync", "async"])
with_all_durabilities = pytest.mark.parametrize("durability", DURABILITIES)


def is_secret_stored(saver: Saver) -> bool:
    """Return whether the erased text is in any row, or in the bytes of a file."""
    return SECRET.encode() in read_raw_bytes(saver)


# -- messages


@with_sync_and_async
@with_all_durabilities
def test_active_run_does_not_store_the_erased_message(
    saver: Saver, mode: str, durability: str
) -> None:
    """The run stores everything except the erased message."""
    start_thread(saver)
    gate = Gate()
    with run_until_gate(
        gate, make_invocation(build_graph(saver, gate), mode, durability, QUESTION)
    ) as run:
        saver.erase("t", ["m0"])

    assert run.error is None
    assert read_message_ids(saver) == ["m1", "q", "one", "two"]
    assert [item.value.id for item in saver.history("t")] == ["m1", "q", "one", "two"]
    assert SECRET not in render_thread(saver)
    assert not is_secret_stored(saver)


@with_all_durabilities
def test_run_does_not_store_message_erased_by_another_process(
    place: Place, durability: str
) -> None:
    """Another checkpointer on the same database erases the message."""
    gate = Gate()
    with place.saver() as one, place.saver() as other:
        start_thread(one)
        with run_until_gate(
            gate, make_invocation(build_graph(one, gate), "sync", durability, QUESTION)
        ) as run:
            other.erase("t", ["m0"])

        assert run.error is None
        assert read_message_ids(other) == ["m1", "q", "one", "two"]
        assert not is_secret_stored(one)


@with_all_durabilities
def test_run_does_not_store_its_own_erased_input(saver: Saver, durability: str) -> None:
    """The input of the active run is erased, possibly before it is stored."""
    gate = Gate()
    input = {"messages": [HumanMessage(SECRET, id="m0")]}
    with run_until_gate(gate, make_invocation(build_graph(saver, gate), "sync", durability, input)):
        saver.erase("t", ["m0"])

    assert read_message_ids(saver) == ["one", "two"]
    assert not is_secret_stored(saver)


def test_run_between_two_erasures_omits_message_of_the_second(saver: Saver) -> None:
    """The run started after the first erasure and before the second one."""
    start_thread(saver)
    saver.erase("t", ["m1"])
    gate = Gate()
    with run_until_gate(gate, make_invocation(build_graph(saver, gate), "sync", "sync", QUESTION)):
        saver.erase("t", ["m0"])

    assert read_message_ids(saver) == ["q", "one", "two"]


@with_all_durabilities
def test_run_after_an_erasure_may_store_the_same_message(saver: Saver, durability: str) -> None:
    """The message has the id and the text of the erased one."""
    start_thread(saver)
    saver.erase("t", ["m0"])
    again = {"messages": [HumanMessage(SECRET, id="m0")]}
    make_invocation(build_graph(saver), "sync", durability, again)()

    assert read_message_ids(saver) == ["m1", "m0", "one", "two"]


def test_update_after_an_erasure_may_store_the_same_message(saver: Saver) -> None:
    """`update_state` reads the state first, so it knows about the erasure."""
    start_thread(saver)
    saver.erase("t", ["m0"])
    message = HumanMessage(SECRET, id="m0")
    build_graph(saver).update_state(CONFIG, {"messages": [message]}, as_node="second")

    assert read_message_ids(saver) == ["m1", "m0"]


def test_put_based_on_state_before_an_erasure_omits_the_message(saver: Saver) -> None:
    """The state was read before the erasure, and is put after it."""
    start_thread(saver)
    before = saver.get_tuple(CONFIG)
    assert before is not None
    saver.erase("t", ["m0"])
    stored = put(saver, before.checkpoint["channel_values"], before.config)

    assert read_message_ids(saver) == ["m1"]
    assert checkpoint_id_of(stored) == checkpoint_id_of(saver.get_tuple(CONFIG).config)  # type: ignore[union-attr]
    assert not is_secret_stored(saver)


@pytest.mark.parametrize("number", range(3))
def test_prune_retention_and_rewind_remove_nothing_from_an_active_run(
    saver: Saver, number: int
) -> None:
    """Only erasures and deletions remove messages from an active run."""
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


def test_number_of_erasures_is_not_in_metadata(saver: Saver) -> None:
    """Neither checkpoints nor threads show the internal count of removals."""
    start_thread(saver)
    saver.erase("t", ["m0"])
    build_graph(saver).invoke(QUESTION, CONFIG)

    assert REMOVALS_KEY not in str([info.metadata for info in saver.checkpoints("t")])
    assert REMOVALS_KEY not in str(saver.heads()[0].metadata)


# -- values that quote a message


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    notes: str
    draft: list[Any]


@with_all_durabilities
def test_active_run_does_not_store_quotations_of_the_erased_message(
    saver: Saver, durability: str
) -> None:
    """A text, a dict and a `Send` that quote the message are removed. The other values stay."""
    gate = Gate()

    def wait_and_quote(_: State) -> Any:
        gate.wait()
        draft = [{"role": "user", "content": SECRET, "id": "m0"}, {"kept": "yes"}]
        return {"notes": SECRET, "draft": draft, "messages": [AIMessage("one", id="one")]}

    def send_to_workers(_: State) -> list[Send]:
        return [Send("worker", {"text": f"about {SECRET}"}), Send("worker", {"text": "fine"})]

    builder: Any = StateGraph(State)
    builder.add_node("first", wait_and_quote)
    builder.add_node("worker", lambda task: {"messages": [AIMessage(task["text"][:5])]})
    builder.add_edge(START, "first")
    builder.add_conditional_edges("first", send_to_workers, ["worker"])
    graph = builder.compile(checkpointer=saver)
    start_thread(saver)
    with run_until_gate(gate, make_invocation(graph, "sync", durability, QUESTION)) as run:
        saver.erase("t", ["m0"])

    values = graph.get_state(CONFIG).values
    assert run.error is None
    assert (values["notes"], values["draft"]) == ("", [{"kept": "yes"}])
    assert [message.text for message in values["messages"]][2:] == ["one", "about", "fine"]
    assert not is_secret_stored(saver)


def fail_quoting_secret(_: State) -> Any:
    raise ValueError(f"cannot read {SECRET}")


def ask_quoting_secret(_: State) -> Any:
    return interrupt(f"is it true that {SECRET}?")


@pytest.mark.parametrize("node", [fail_quoting_secret, ask_quoting_secret])
def test_active_run_does_not_store_interrupts_and_errors_that_quote_erased_text(
    saver: Saver, node: Callable[[State], Any]
) -> None:
    """An interrupt that quotes the message is not stored, and an error that quotes it is empty."""
    gate = Gate()

    def wait_and_call(state: State) -> Any:
        gate.wait()
        return node(state)

    builder: Any = StateGraph(State)
    builder.add_node("first", wait_and_call)
    builder.add_edge(START, "first")
    graph = builder.compile(checkpointer=saver)
    start_thread(saver)
    with run_until_gate(gate, make_invocation(graph, "sync", "sync", QUESTION)):
        saver.erase("t", ["m0"])

    assert graph.get_state(CONFIG).interrupts == ()
    assert not is_secret_stored(saver)


def test_tool_call_of_an_erased_message_is_not_executed(saver: Saver) -> None:
    """The tool node does not run when the thread continues."""
    gate, executed_tools = Gate(), list[str]()
    call: Any = {"name": "pay", "args": {"sum": 1}, "id": "call-1", "type": "tool_call"}

    def model(_: MessagesState) -> Any:
        gate.wait()
        return {"messages": [AIMessage(SECRET, id="m9", tool_calls=[call])]}

    def pay(_: MessagesState) -> Any:
        executed_tools.append("pay")
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

    assert executed_tools == []
    assert read_message_ids(saver) == ["m0", "m1", "q"]


@with_sync_and_async
@with_all_durabilities
@pytest.mark.parametrize("every", [1, 50])
def test_delta_channel_does_not_store_the_erased_message(
    saver: Saver, mode: str, durability: str, every: int
) -> None:
    """Neither the writes of a run nor a snapshot contain the message."""

    def apply(state: Any, writes: Any) -> Any:
        for write in writes:
            state = add_messages(state or [], write)
        return state

    channel: Any = DeltaChannel(apply, snapshot_frequency=every)
    Delta = TypedDict("Delta", {"messages": Annotated[list[AnyMessage], channel]})  # noqa: UP013
    gate = Gate()

    def wait_and_answer(_: Any) -> Any:
        gate.wait()
        return {"messages": [AIMessage("answer one", id="one")]}

    builder: Any = StateGraph(Delta)
    builder.add_node("first", wait_and_answer)
    builder.add_node("second", lambda _: {"messages": [AIMessage("two", id="two")]})
    builder.add_edge(START, "first").add_edge("first", "second")
    graph = builder.compile(checkpointer=saver)
    messages_before = [HumanMessage(SECRET, id="m0"), AIMessage("noted", id="m1")]
    graph.update_state(CONFIG, {"messages": messages_before}, as_node="second")
    with run_until_gate(gate, make_invocation(graph, mode, durability, QUESTION)) as run:
        saver.erase("t", ["m0"])

    assert run.error is None
    messages = graph.get_state(CONFIG).values["messages"]
    assert [message.id for message in messages] == ["m1", "q", "one", "two"]
    assert not is_secret_stored(saver)


# -- subgraphs


class Shared(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def build_nested_graph(saver: Saver, gate: Gate, checkpointer: Any) -> Any:
    """Build a graph whose second node is a subgraph that shares the channel `messages`."""
    inner: Any = StateGraph(Shared)
    inner.add_node("inner", lambda _: {"messages": [AIMessage("inner", id="inner")]})
    inner.add_edge(START, "inner")

    def wait_and_answer(_: Shared) -> Any:
        gate.wait()
        return {"messages": [AIMessage("answer one", id="one")]}

    outer: Any = StateGraph(Shared)
    outer.add_node("first", wait_and_answer)
    outer.add_node("second", inner.compile(checkpointer=checkpointer))
    outer.add_edge(START, "first").add_edge("first", "second")
    return outer.compile(checkpointer=saver)


@with_sync_and_async
@with_all_durabilities
@pytest.mark.parametrize("checkpointer", [None, True])
def test_subgraph_does_not_store_the_erased_message(
    saver: Saver, mode: str, durability: str, checkpointer: bool | None
) -> None:
    """A subgraph that starts after the erasure still has the state of its run in memory."""
    start_thread(saver)
    gate = Gate()
    gate.opened.set()
    graph = build_nested_graph(saver, gate, checkpointer)
    make_invocation(graph, mode, durability, QUESTION)()
    gate.reached.clear()
    gate.opened.clear()
    more = {"messages": [HumanMessage("more", id="q2")]}
    with run_until_gate(gate, make_invocation(graph, mode, durability, more)) as run:
        saver.erase("t", ["m0"])

    assert run.error is None
    assert read_message_ids(saver) == ["m1", "q", "one", "inner", "q2"]
    assert not is_secret_stored(saver)


@with_all_durabilities
@pytest.mark.parametrize("checkpointer", [None, True])
def test_subgraph_of_a_later_run_may_store_the_same_message(
    saver: Saver, durability: str, checkpointer: bool | None
) -> None:
    """A subgraph knows that its run started after the erasure, also in a new namespace."""
    start_thread(saver)
    saver.erase("t", ["m0"])
    gate = Gate()
    gate.opened.set()
    again = {"messages": [HumanMessage(SECRET, id="m0")]}
    make_invocation(build_nested_graph(saver, gate, checkpointer), "sync", durability, again)()

    subgraphs = [ns for ns in saver.thread("t").namespaces if ns]
    assert (subgraphs == []) is (durability == "exit" and checkpointer is None)
    for ns in subgraphs:
        assert SECRET in [item.value.text for item in saver.history("t", checkpoint_ns=ns)]


# -- threads


@with_sync_and_async
@with_all_durabilities
@pytest.mark.parametrize("name", DELETIONS)
def test_put_of_a_run_fails_after_its_thread_was_deleted(
    saver: Saver, mode: str, durability: str, name: str
) -> None:
    """Nothing of the run is stored, and the run ends with `ThreadDeleted`."""
    start_thread(saver)
    gate = Gate()
    with run_until_gate(
        gate, make_invocation(build_graph(saver, gate), mode, durability, QUESTION)
    ) as run:
        DELETIONS[name](saver)

    assert isinstance(run.error, ThreadDeleted)
    assert saver.threads() == []
    assert not is_secret_stored(saver)


@with_all_durabilities
@pytest.mark.parametrize("checkpointer", [None, True])
def test_put_of_a_subgraph_fails_after_its_thread_was_deleted(
    saver: Saver, durability: str, checkpointer: bool | None
) -> None:
    """A subgraph that starts after the deletion stores nothing in its own namespace."""
    start_thread(saver)
    gate = Gate()
    graph = build_nested_graph(saver, gate, checkpointer)
    with run_until_gate(gate, make_invocation(graph, "sync", durability, QUESTION)) as run:
        saver.delete_thread("t")

    assert isinstance(run.error, ThreadDeleted)
    assert saver.threads() == []
    assert not is_secret_stored(saver)


@with_all_durabilities
def test_new_thread_with_a_deleted_id_is_not_changed_by_the_old_run(
    saver: Saver, durability: str
) -> None:
    """A new thread with the old ids and texts is stored, while the old run fails."""
    start_thread(saver)
    gate, open_gate = Gate(), Gate()
    open_gate.opened.set()
    again = {"messages": [HumanMessage(SECRET, id="m0")]}
    with run_until_gate(
        gate, make_invocation(build_graph(saver, gate), "sync", durability, QUESTION)
    ) as run:
        saver.delete_thread("t")
        build_nested_graph(saver, open_gate, None).invoke(again, CONFIG, durability=durability)
        read_message_ids(saver)

    assert isinstance(run.error, ThreadDeleted)
    assert read_message_ids(saver) == ["m0", "one", "inner"]
    build_graph(saver).invoke(QUESTION, CONFIG)
    assert read_message_ids(saver) == ["m0", "one", "inner", "q", "two"]


def test_put_fails_after_another_process_deleted_the_thread(place: Place) -> None:
    """The cache of a checkpointer does not hide the deletion by another one."""
    gate = Gate()
    with place.saver() as one, place.saver() as other:
        start_thread(one)
        with run_until_gate(
            gate, make_invocation(build_graph(one, gate), "sync", "sync", QUESTION)
        ) as run:
            other.delete_thread("t")

        assert isinstance(run.error, ThreadDeleted)
        assert other.threads() == []


def test_put_whose_parent_does_not_exist_is_allowed(saver: Saver) -> None:
    """The thread id may have belonged to a deleted thread."""
    put(saver, {"messages": []}, thread_config("t"))
    saver.delete_thread("t")
    config: Any = {"configurable": {**CONFIG["configurable"], "checkpoint_ns": ""}}
    put(saver, {"n": 1}, {"configurable": {**config["configurable"], "checkpoint_id": "never"}})
    put(saver, {"n": 2}, config)

    assert len(saver.checkpoints("t")) == 2


def test_removal_records_contain_no_ids_or_texts(tmp_path: Any) -> None:
    """An unencrypted file contains no id of a deleted thread and no ids of its checkpoints."""
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        start_thread(saver, thread="the-thread-of-ann")
        saver.erase("the-thread-of-ann", ["m0"])
        head = checkpoint_id_of(saver.get_tuple(thread_config("the-thread-of-ann")).config)  # type: ignore[union-attr]
        saver.erase("the-thread-of-ann")

        assert b"the-thread-of-ann" not in read_raw_bytes(saver)
        assert bytes.fromhex(head.replace("-", "")) not in read_raw_bytes(saver)
        assert head.encode() not in read_raw_bytes(saver)


def test_answer_after_an_erasure_continues_the_waiting_thread(saver: Saver) -> None:
    """A thread that waits for an answer has no active run. Its next run knows about the erasure."""
    builder: Any = StateGraph(MessagesState)
    builder.add_node("ask", lambda _: {"messages": [AIMessage(interrupt("go on?"), id="a")]})
    builder.add_edge(START, "ask")
    graph = builder.compile(checkpointer=saver)
    start_thread(saver)
    graph.invoke(QUESTION, CONFIG)
    saver.erase("t", ["m0"])
    graph.invoke(Command(resume="yes"), CONFIG)

    assert read_message_ids(saver) == ["m1", "q", "a"]


def test_removal_records_are_dropped_after_retention_period(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next erasure after `RECORD_RETENTION_DAYS` drops the old records of all threads."""

    def read_record_numbers() -> list[int]:
        rows = saver.database.read(
            lambda: fetch_rows("SELECT number FROM removals ORDER BY number")
        )
        return [number for (number,) in rows]

    start_thread(saver)
    saver.erase("t", ["m0"])
    saver.erase("t", ["m1"])
    now = time.time()
    numbers_before = read_record_numbers()
    monkeypatch.setattr(time, "time", lambda: now + (RECORD_RETENTION_DAYS + 1) * 86400)
    start_thread(saver, thread="other")
    saver.erase("other", ["m0"])

    assert (numbers_before, read_record_numbers()) == ([1, 2], [1])
    assert saver.removals("t") == 2


def test_removed_tells_which_messages_were_erased_since(saver: Saver) -> None:
    """`since` is the number of removals at which the messages were read. After a deletion of the
    thread, all messages count as removed.
    """
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
