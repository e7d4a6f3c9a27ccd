"""Expanding a summary: the originals, from the history of real threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph, add_messages

from perdure.checkpointers import SQLiteCheckpointer
from perdure.effects import run
from perdure.errors import ConfigurationError, InvalidConfig, UnknownCheckpoint, UnknownThread
from perdure.memory.conversation import SHORTENED
from perdure.memory.summary import SummaryState, summarize
from perdure.memory.thread_messages import read_history
from perdure.memory.tool_outputs import aexpand, expand
from perdure.memory.trim import trim
from tests.memory.scripted import ScriptedServer, make_client, make_numbered_script

THREAD: Any = {"configurable": {"thread_id": "t"}}
Expand = Callable[..., list[BaseMessage]]


def awaited(*args: Any, **kwargs: Any) -> list[BaseMessage]:
    return asyncio.run(aexpand(*args, **kwargs))


both = pytest.mark.parametrize("expanded", [expand, awaited])


def talk_on(
    server: ScriptedServer, saver: Any, turns: int, state: Any = SummaryState, **options: Any
) -> Any:
    """A thread of so many turns, of which the last stays."""
    model = make_client(server)
    node = summarize(model, trigger=("messages", 3), keep=("messages", 1), **options)

    def respond(state: Any) -> Any:
        return {"messages": [AIMessage(f"a{state['messages'][-1].text[1:]}")]}

    builder = StateGraph(state)
    builder.add_node("summarize", node)
    builder.add_node("respond", respond)
    builder.add_edge(START, "summarize")
    builder.add_edge("summarize", "respond")
    builder.add_edge("respond", END)
    graph = builder.compile(checkpointer=saver)
    for n in range(1, turns + 1):
        graph.invoke({"messages": [HumanMessage(f"q{n}")]}, THREAD)
    return graph


def texts(messages: list[BaseMessage]) -> list[str]:
    return [message.text for message in messages]


@both
def test_the_originals_come_back_in_order(expanded: Expand, file_saver: SQLiteCheckpointer) -> None:
    """Everything a summary of summaries stands for, and nothing else."""
    with ScriptedServer(make_numbered_script()) as server:
        talk_on(server, file_saver, 4)

    assert texts(expanded(file_saver, THREAD)) == ["q1", "a1", "q2", "a2", "q3", "a3"]


@both
def test_an_older_checkpoint(expanded: Expand, file_saver: SQLiteCheckpointer) -> None:
    """What a summary stood for then; at the very first there is none."""
    with ScriptedServer(make_numbered_script()) as server:
        graph = talk_on(server, file_saver, 4)
    states = list(graph.get_state_history(THREAD))
    older = next(s for s in states if (s.values.get("summary") or {}).get("count") == 4)

    assert texts(expanded(file_saver, older.config)) == ["q1", "a1", "q2", "a2"]
    assert expanded(file_saver, states[-1].config) == []


@both
def test_of_a_changed_message_the_last_form_that_was_not_shortened(
    expanded: Expand, file_saver: SQLiteCheckpointer
) -> None:
    """Of a result too: what a human corrected in it stays corrected."""
    long = "a long result, " * 200
    call = {"name": "look", "args": {}, "id": "c"}
    talk: list[AnyMessage] = [
        HumanMessage("wrong", id="q1"),
        AIMessage("", tool_calls=[call], id="a1"),
        ToolMessage(f"false: {long}", tool_call_id="c", id="t1"),
        AIMessage("a1", id="b1"),
        HumanMessage("q2", id="q2"),
    ]
    with ScriptedServer(make_numbered_script()) as server:
        graph = talk_on(server, file_saver, 0)
        graph.update_state(THREAD, {"messages": talk}, as_node="respond")
        corrected = ToolMessage(f"true: {long}", tool_call_id="c", id="t1")
        changed = [HumanMessage("right", id="q1"), corrected]
        graph.update_state(THREAD, {"messages": changed}, as_node="respond")
        cut = {"content": "[The result of look]", "additional_kwargs": {SHORTENED: "cleared"}}
        cleared = corrected.model_copy(update=cut)
        graph.update_state(THREAD, {"messages": [cleared]}, as_node="respond")
        graph.invoke({"messages": []}, THREAD)

    assert texts(expanded(file_saver, THREAD)) == ["right", "", f"true: {long}", "a1"]


@both
def test_of_a_message_that_trim_shortened_the_original(
    expanded: Expand, file_saver: SQLiteCheckpointer
) -> None:
    """The state has the short form, the history both."""
    long = "a long question, " * 400
    with ScriptedServer(make_numbered_script()) as server:
        graph = talk_on(server, file_saver, 0)
        asked = {"messages": [HumanMessage(long, id="q1")]}
        graph.update_state(THREAD, asked, as_node="respond")
        cuts = trim(max_tokens=200, allow_partial=True)
        graph.update_state(THREAD, cuts.invoke(graph.get_state(THREAD).values), as_node="respond")
        cut = graph.get_state(THREAD).values["messages"][0].text
        more = [AIMessage("a1", id="a1"), HumanMessage("q2", id="q2")]
        graph.update_state(THREAD, {"messages": more}, as_node="respond")
        graph.invoke({"messages": []}, THREAD)

    assert "characters left out" in cut
    assert texts(expanded(file_saver, THREAD)) == [long, "a1"]


@both
def test_what_was_erased_is_left_out(expanded: Expand, file_saver: SQLiteCheckpointer) -> None:
    """An erasure is not undone."""
    with ScriptedServer(make_numbered_script()) as server:
        graph = talk_on(server, file_saver, 3)
    first = graph.get_state(THREAD).values["summarized"][0]
    file_saver.erase("t", message_ids=[first])

    assert texts(expanded(file_saver, THREAD)) == ["a1", "q2", "a2"]


@both
def test_what_cannot_be_expanded(expanded: Expand, file_saver: SQLiteCheckpointer) -> None:
    """A saver without history, no thread, no checkpoint, no thread named."""
    with ScriptedServer(make_numbered_script()) as server:
        talk_on(server, file_saver, 1)
    unknown: Any = {"configurable": {"thread_id": "t", "checkpoint_id": "0" * 32}}

    assert expanded(file_saver, THREAD) == []
    with pytest.raises(ConfigurationError, match="expected a perdure checkpointer"):
        expanded(InMemorySaver(), THREAD)
    with pytest.raises(UnknownThread, match="'other'"):
        expanded(file_saver, {"configurable": {"thread_id": "other"}})
    with pytest.raises(UnknownCheckpoint):
        expanded(file_saver, unknown)
    with pytest.raises(InvalidConfig):
        expanded(file_saver, {"configurable": {}})


def replaying(state: list[AnyMessage] | None, updates: Sequence[Any]) -> list[AnyMessage]:
    for update in updates:
        state = add_messages(state or [], update)  # type: ignore[assignment, arg-type]
    return state or []


class DeltaState(SummaryState):
    """A state whose messages langgraph replays from writes, as deep agents declare it."""

    messages: Annotated[list[AnyMessage], DeltaChannel(replaying)]


@both
def test_messages_of_a_delta_channel(expanded: Expand, file_saver: SQLiteCheckpointer) -> None:
    """The originals come back, and an extraction reads all messages with their times."""
    with ScriptedServer(make_numbered_script()) as server:
        graph = talk_on(server, file_saver, 4, state=DeltaState)
        state = graph.get_state(THREAD).values
        found = expanded(file_saver, THREAD)
        history = run(read_history(file_saver, "t"))

    said = ["q1", "a1", "q2", "a2", "q3", "a3", "q4", "a4"]
    assert texts(found) + texts(state["messages"]) == said
    assert [message.text for message in history.messages] == said
    assert all(message.at is not None for message in history.messages)
