"""What learns from messages keeps nothing of a message that is erased before it has written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import START, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic import ConfigDict

from perdure.checkpointers import SQLiteCheckpointer
from perdure.memory import (
    ChatState,
    Collection,
    Extraction,
    Instructions,
    Profile,
    SummaryState,
    manage_memory,
    record_views,
    remember_turns,
    summarize,
    update_instructions,
    views,
)
from perdure.memory.extractors import Batch, Proposal, Scope, TurnExtractor
from perdure.stores import SQLiteStore
from tests.contracts.erased import SECRET, read_raw_bytes
from tests.contracts.under_way import DURABILITIES, Gate, make_invocation, run_until_gate
from tests.memory.test_update_profile import Person, node_of, operation, patch
from tests.openai_server import OpenAIServer

ANN: Any = {"configurable": {"thread_id": "t", "user_id": "ann"}}
OLD = [HumanMessage(SECRET, id="m0"), AIMessage("noted", id="m1")]
QUESTION = {"messages": [HumanMessage("a question about ships", id="q")]}
both_doors = pytest.mark.parametrize("door", ["sync", "async"])
removed = pytest.mark.parametrize(
    "remove",
    [lambda saver: saver.erase("t", ["m0"]), lambda saver: saver.delete_thread("t")],
    ids=["erase", "delete"],
)


class Echo(BaseChatModel):
    """A model that repeats what it is shown, once the gate is open."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    gate: Any = None
    form: str = "{}"
    calls: int = 0

    @property
    def _llm_type(self) -> str:
        return "echo"

    def _generate(self, messages: list[BaseMessage], *args: Any, **options: Any) -> ChatResult:
        self.calls += 1
        if self.gate is not None:
            self.gate.wait()
        said = self.form.format(" ".join(message.text for message in messages[1:]))
        return ChatResult(generations=[ChatGeneration(message=AIMessage(said))])


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[SQLiteCheckpointer]:
    with SQLiteCheckpointer.open(tmp_path / "x.db") as opened:
        yield opened


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    with SQLiteStore.open(tmp_path / "x.db", index=None) as opened:
        yield opened


def graph_of(saver: Any, *nodes: Any, state: Any = ChatState, **options: Any) -> Any:
    builder: Any = StateGraph(state)
    before = START
    for number, node in enumerate(nodes):
        builder.add_node(str(number), node)
        builder.add_edge(before, str(number))
        before = str(number)
    return builder.compile(checkpointer=saver, **options)


def said_before(saver: Any, state: Any = ChatState) -> None:
    """Begin the thread with the message that is to be erased."""
    graph = graph_of(saver, lambda _: {}, state=state)
    graph.update_state(ANN, {"messages": OLD}, as_node="0")


def answering(gate: Gate) -> Callable[[Any], Any]:
    def answer(_: Any) -> Any:
        gate.wait()
        return {"messages": [AIMessage("ships are large", id="a")]}

    return answer


def texts_in(store: SQLiteStore) -> str:
    return str([item.value for item in store.search(("memories", "ann"), limit=100)])


@removed
@both_doors
@pytest.mark.parametrize("durability", DURABILITIES)
def test_turns_that_are_remembered_lack_it(
    saver: SQLiteCheckpointer, store: SQLiteStore, door: str, durability: str, remove: Any
) -> None:
    """Memories of the run's other messages are made, unless the thread was deleted."""
    said_before(saver)
    gate = Gate()
    graph = graph_of(saver, answering(gate), remember_turns(store))
    with run_until_gate(gate, make_invocation(graph, door, durability, QUESTION, ANN)) as run:
        remove(saver)

    assert SECRET.encode() not in read_raw_bytes(saver)
    assert ("ships are large" in texts_in(store)) is (run.error is None)


def test_a_later_run_remembers_the_same_words(
    saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """A run that began after the erasure may say them again."""
    said_before(saver)
    saver.erase("t", ["m0"])
    graph_of(saver, remember_turns(store)).invoke({"messages": OLD[:1]}, ANN)

    assert SECRET in texts_in(store)


def calling_the_tool(gate: Gate, **arguments: Any) -> Callable[[Any], Any]:
    call = {"name": "manage_memory", "args": arguments, "id": "c", "type": "tool_call"}

    def answer(_: Any) -> Any:
        gate.wait()
        return {"messages": [AIMessage("", tool_calls=[call], id="a")]}

    return answer


@removed
@both_doors
@pytest.mark.parametrize("action", ["create", "update", "supersede"])
def test_a_tool_keeps_no_words_of_it(
    saver: SQLiteCheckpointer, store: SQLiteStore, door: str, action: str, remove: Any
) -> None:
    """A model that has read the message before its erasure cannot store it as a memory."""
    said_before(saver)
    Collection(store, ("memories", "{user_id}")).insert("Ann sails", key="k", config=ANN)
    gate = Gate()
    call = calling_the_tool(gate, action=action, id="k", text=f"The user said: {SECRET}")
    graph = graph_of(saver, call, ToolNode([manage_memory(store=store)]))
    with run_until_gate(gate, make_invocation(graph, door, "sync", QUESTION, ANN)):
        remove(saver)

    assert texts_in(store) == str([{"text": "Ann sails", "kind": "fact"}])


@removed
def test_a_tool_keeps_other_words(
    saver: SQLiteCheckpointer, store: SQLiteStore, remove: Any
) -> None:
    """Unless the whole thread was deleted, a memory of the other messages is stored."""
    said_before(saver)
    gate = Gate()
    call = calling_the_tool(gate, action="create", text="The user asks a question about ships")
    graph = graph_of(saver, call, ToolNode([manage_memory(store=store)]))
    with run_until_gate(gate, make_invocation(graph, "sync", "sync", QUESTION, ANN)) as run:
        remove(saver)

    assert ("ships" in texts_in(store)) is (run.error is None)


class Slow(TurnExtractor):
    """Waits at the gate before it proposes anything."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    async def propose_changes(self, batch: Batch, scope: Scope) -> Proposal:
        proposal = await super().propose_changes(batch, scope)
        self.gate.wait()
        return proposal


@pytest.mark.parametrize("door", ["extract", "aextract"])
def test_an_extraction_reads_the_thread_again(
    saver: SQLiteCheckpointer, store: SQLiteStore, door: str
) -> None:
    """Candidates that rest on an erased message are dropped; the others are made anew."""
    said_before(saver)
    gate = Gate()
    extraction = Extraction(saver, store, Slow(gate))
    method = getattr(extraction, door)

    def call() -> Any:
        made = method("t", ANN)
        return asyncio.run(made) if door == "aextract" else made

    with run_until_gate(gate, call) as run:
        saver.erase("t", ["m0"])

    assert run.error is None
    assert SECRET.encode() not in read_raw_bytes(saver)
    assert "noted" in texts_in(store)


def test_a_summary_of_it_is_dropped(saver: SQLiteCheckpointer) -> None:
    """The summary is not written, and the next turn makes one of the messages that are left."""
    said_before(saver, SummaryState)
    gate = Gate()
    model = Echo(gate=gate)
    node = summarize(model, trigger=("messages", 3), keep=("messages", 1))
    graph = graph_of(saver, node, state=SummaryState)
    with run_until_gate(gate, make_invocation(graph, "sync", "sync", QUESTION, ANN)) as run:
        saver.erase("t", ["m0"])

    assert run.error is None
    assert not graph.get_state(ANN).values.get("summary")
    assert SECRET.encode() not in read_raw_bytes(saver)
    graph.invoke({"messages": [AIMessage("ships", id="a"), HumanMessage("more", id="b")]}, ANN)
    assert "noted" in graph.get_state(ANN).values["summary"]["text"]


def test_a_rewrite_of_instructions_is_dropped(
    saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """They stay as they were."""
    said_before(saver)
    gate = Gate()
    model = Echo(gate=gate, form="<instructions>{}</instructions>")
    instructions = Instructions(store, default="Be kind, " * 40)
    graph = graph_of(saver, update_instructions(model, instructions))
    with run_until_gate(gate, make_invocation(graph, "sync", "sync", QUESTION, ANN)) as run:
        saver.erase("t", ["m0"])

    assert run.error is None
    assert model.calls == 1
    assert SECRET.encode() not in read_raw_bytes(saver)


def test_a_patch_of_a_profile_is_made_anew(saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
    """The model is asked again, about the messages that are left."""
    said_before(saver)
    gate = Gate()

    def answer(body: dict[str, Any]) -> Any:
        shown = str(body["messages"])
        gate.wait()
        about, number = (SECRET, 1) if SECRET in shown else ("ships", 2)  # of the user's message
        return patch(operation("replace", "/name", about, messages=[number]))

    with OpenAIServer(answer) as server:
        profile = Profile(Person, store, namespace=("profiles", "{user_id}"))
        graph = graph_of(saver, node_of(server, profile))
        with run_until_gate(gate, make_invocation(graph, "sync", "sync", QUESTION, ANN)) as run:
            saver.erase("t", ["m0"])

    assert run.error is None
    assert SECRET.encode() not in read_raw_bytes(saver)
    assert profile.get(ANN).name == "ships"


def test_views_of_the_run_are_not_recorded_any_more(saver: SQLiteCheckpointer) -> None:
    """A view that shows the erased message is not stored; those of later runs are."""
    said_before(saver)
    gate, model = Gate(), Echo()

    def answer(state: ChatState) -> Any:
        gate.wait()
        return {"messages": [model.invoke(state["messages"][-1:] + state["messages"][:1])]}

    graph = graph_of(saver, answer).with_config(callbacks=[record_views(saver)])
    with run_until_gate(gate, make_invocation(graph, "sync", "sync", QUESTION, ANN)):
        saver.erase("t", ["m0"])

    assert views(saver, "t") == []
    graph.invoke({"messages": [HumanMessage("again", id="q2")]}, ANN)
    assert len(views(saver, "t")) == 1
