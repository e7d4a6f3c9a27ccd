"""Erasure during a run: nodes that learn from messages store nothing of the erased message."""

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
from perdure.memory.long_term.extractors import Batch, Proposal, Scope, TurnExtractor
from perdure.stores import SQLiteStore
from tests.contracts.erased import SECRET, read_raw_bytes
from tests.contracts.under_way import DURABILITIES, Gate, make_invocation, run_until_gate
from tests.memory.long_term.test_update_profile import (
    Person,
    make_node,
    make_operation,
    make_patch_answer,
)
from tests.openai_server import OpenAIServer

ANN: Any = {"configurable": {"thread_id": "t", "user_id": "ann"}}
OLD = [HumanMessage(SECRET, id="m0"), AIMessage("noted", id="m1")]
QUESTION = {"messages": [HumanMessage("a question about ships", id="q")]}
in_both_forms = pytest.mark.parametrize("call_form", ["sync", "async"])
with_each_removal = pytest.mark.parametrize(
    "remove",
    [lambda saver: saver.erase("t", ["m0"]), lambda saver: saver.delete_thread("t")],
    ids=["erase", "delete"],
)


class EchoModel(BaseChatModel):
    """A model that repeats its request once the gate is open."""

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
        reply = self.form.format(" ".join(message.text for message in messages[1:]))
        return ChatResult(generations=[ChatGeneration(message=AIMessage(reply))])


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[SQLiteCheckpointer]:
    with SQLiteCheckpointer.open(tmp_path / "x.db") as opened:
        yield opened


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    with SQLiteStore.open(tmp_path / "x.db", index=None) as opened:
        yield opened


def build_graph(saver: Any, *nodes: Any, state: Any = ChatState, **options: Any) -> Any:
    builder: Any = StateGraph(state)
    previous = START
    for number, node in enumerate(nodes):
        builder.add_node(str(number), node)
        builder.add_edge(previous, str(number))
        previous = str(number)
    return builder.compile(checkpointer=saver, **options)


def start_thread(saver: Any, state: Any = ChatState) -> None:
    """Start the thread with the message that will be erased."""
    graph = build_graph(saver, lambda _: {}, state=state)
    graph.update_state(ANN, {"messages": OLD}, as_node="0")


def make_waiting_node(gate: Gate) -> Callable[[Any], Any]:
    def answer(_: Any) -> Any:
        gate.wait()
        return {"messages": [AIMessage("ships are large", id="a")]}

    return answer


def read_memory_values(store: SQLiteStore) -> str:
    return str([item.value for item in store.search(("memories", "ann"), limit=100)])


@with_each_removal
@in_both_forms
@pytest.mark.parametrize("durability", DURABILITIES)
def test_remember_turns_stores_nothing_of_an_erased_message(
    saver: SQLiteCheckpointer, store: SQLiteStore, call_form: str, durability: str, remove: Any
) -> None:
    """The other messages of the run are stored, unless the thread was deleted."""
    start_thread(saver)
    gate = Gate()
    graph = build_graph(saver, make_waiting_node(gate), remember_turns(store))
    with run_until_gate(gate, make_invocation(graph, call_form, durability, QUESTION, ANN)) as run:
        remove(saver)

    assert SECRET.encode() not in read_raw_bytes(saver)
    assert ("ships are large" in read_memory_values(store)) is (run.error is None)


def test_run_after_the_erasure_can_store_the_same_words_again(
    saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    start_thread(saver)
    saver.erase("t", ["m0"])
    build_graph(saver, remember_turns(store)).invoke({"messages": OLD[:1]}, ANN)

    assert SECRET in read_memory_values(store)


def make_tool_calling_node(gate: Gate, **arguments: Any) -> Callable[[Any], Any]:
    call = {"name": "manage_memory", "args": arguments, "id": "c", "type": "tool_call"}

    def answer(_: Any) -> Any:
        gate.wait()
        return {"messages": [AIMessage("", tool_calls=[call], id="a")]}

    return answer


@with_each_removal
@in_both_forms
@pytest.mark.parametrize("action", ["create", "update", "supersede"])
def test_tool_call_cannot_store_words_of_an_erased_message(
    saver: SQLiteCheckpointer, store: SQLiteStore, call_form: str, action: str, remove: Any
) -> None:
    """The model has read the message before its erasure."""
    start_thread(saver)
    Collection(store, ("memories", "{user_id}")).insert("Ann sails", key="k", config=ANN)
    gate = Gate()
    call = make_tool_calling_node(gate, action=action, id="k", text=f"The user said: {SECRET}")
    graph = build_graph(saver, call, ToolNode([manage_memory(store=store)]))
    with run_until_gate(gate, make_invocation(graph, call_form, "sync", QUESTION, ANN)):
        remove(saver)

    assert read_memory_values(store) == str([{"text": "Ann sails", "kind": "fact"}])


@with_each_removal
def test_tool_call_can_store_other_words_unless_the_thread_was_deleted(
    saver: SQLiteCheckpointer, store: SQLiteStore, remove: Any
) -> None:
    start_thread(saver)
    gate = Gate()
    call = make_tool_calling_node(
        gate, action="create", text="The user asks a question about ships"
    )
    graph = build_graph(saver, call, ToolNode([manage_memory(store=store)]))
    with run_until_gate(gate, make_invocation(graph, "sync", "sync", QUESTION, ANN)) as run:
        remove(saver)

    assert ("ships" in read_memory_values(store)) is (run.error is None)


class WaitingExtractor(TurnExtractor):
    """An extractor that waits at the gate before it proposes anything."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    async def propose_changes(self, batch: Batch, scope: Scope) -> Proposal:
        proposal = await super().propose_changes(batch, scope)
        self.gate.wait()
        return proposal


@pytest.mark.parametrize("call_form", ["extract", "aextract"])
def test_extraction_drops_candidates_of_an_erased_message(
    saver: SQLiteCheckpointer, store: SQLiteStore, call_form: str
) -> None:
    """The thread is read again, and the other candidates are stored."""
    start_thread(saver)
    gate = Gate()
    extraction = Extraction(saver, store, WaitingExtractor(gate))
    method = getattr(extraction, call_form)

    def call() -> Any:
        result = method("t", ANN)
        return asyncio.run(result) if call_form == "aextract" else result

    with run_until_gate(gate, call) as run:
        saver.erase("t", ["m0"])

    assert run.error is None
    assert SECRET.encode() not in read_raw_bytes(saver)
    assert "noted" in read_memory_values(store)


def test_summary_of_an_erased_message_is_dropped(saver: SQLiteCheckpointer) -> None:
    """The next turn writes one of the messages that are left."""
    start_thread(saver, SummaryState)
    gate = Gate()
    model = EchoModel(gate=gate)
    node = summarize(model, trigger=("messages", 3), keep=("messages", 1))
    graph = build_graph(saver, node, state=SummaryState)
    with run_until_gate(gate, make_invocation(graph, "sync", "sync", QUESTION, ANN)) as run:
        saver.erase("t", ["m0"])

    assert run.error is None
    assert not graph.get_state(ANN).values.get("summary")
    assert SECRET.encode() not in read_raw_bytes(saver)
    graph.invoke({"messages": [AIMessage("ships", id="a"), HumanMessage("more", id="b")]}, ANN)
    assert "noted" in graph.get_state(ANN).values["summary"]["text"]


def test_rewrite_of_instructions_from_an_erased_message_is_dropped(
    saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """The instructions stay unchanged."""
    start_thread(saver)
    gate = Gate()
    model = EchoModel(gate=gate, form="<instructions>{}</instructions>")
    instructions = Instructions(store, default="Be kind, " * 40)
    graph = build_graph(saver, update_instructions(model, instructions))
    with run_until_gate(gate, make_invocation(graph, "sync", "sync", QUESTION, ANN)) as run:
        saver.erase("t", ["m0"])

    assert run.error is None
    assert model.calls == 1
    assert SECRET.encode() not in read_raw_bytes(saver)


def test_profile_patch_is_requested_again_after_an_erasure(
    saver: SQLiteCheckpointer, store: SQLiteStore
) -> None:
    """The second request contains only the messages that are left."""
    start_thread(saver)
    gate = Gate()

    def answer(body: dict[str, Any]) -> Any:
        request = str(body["messages"])
        gate.wait()
        # the name, and the number of the user's message
        name, number = (SECRET, 1) if SECRET in request else ("ships", 2)
        return make_patch_answer(make_operation("replace", "/name", name, messages=[number]))

    with OpenAIServer(answer) as server:
        profile = Profile(Person, store, namespace=("profiles", "{user_id}"))
        graph = build_graph(saver, make_node(server, profile))
        with run_until_gate(gate, make_invocation(graph, "sync", "sync", QUESTION, ANN)) as run:
            saver.erase("t", ["m0"])

    assert run.error is None
    assert SECRET.encode() not in read_raw_bytes(saver)
    assert profile.get(ANN).name == "ships"


def test_view_with_an_erased_message_is_not_recorded(saver: SQLiteCheckpointer) -> None:
    """Views of later runs are recorded."""
    start_thread(saver)
    gate, model = Gate(), EchoModel()

    def answer(state: ChatState) -> Any:
        gate.wait()
        return {"messages": [model.invoke(state["messages"][-1:] + state["messages"][:1])]}

    graph = build_graph(saver, answer).with_config(callbacks=[record_views(saver)])
    with run_until_gate(gate, make_invocation(graph, "sync", "sync", QUESTION, ANN)):
        saver.erase("t", ["m0"])

    assert views(saver, "t") == []
    graph.invoke({"messages": [HumanMessage("again", id="q2")]}, ANN)
    assert len(views(saver, "t")) == 1
