"""Expanding a summary: the original messages are read from the history of real threads."""

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
from perdure.effects import run_operation
from perdure.errors import ConfigurationError, InvalidConfig, UnknownCheckpoint, UnknownThread
from perdure.memory.conversation import SHORTENED
from perdure.memory.short_term.summary import SummaryState, summarize
from perdure.memory.short_term.tool_outputs import aexpand, expand
from perdure.memory.short_term.trim import trim
from perdure.memory.thread_messages import read_history
from tests.memory.scripted_models import ScriptedServer, make_client, make_numbered_script

THREAD: Any = {"configurable": {"thread_id": "t"}}
Expand = Callable[..., list[BaseMessage]]


def expand_async(*args: Any, **kwargs: Any) -> list[BaseMessage]:
    return asyncio.run(aexpand(*args, **kwargs))


for_both_forms = pytest.mark.parametrize("expand_summary", [expand, expand_async])


def run_turns(
    server: ScriptedServer, saver: Any, turns: int, state: Any = SummaryState, **options: Any
) -> Any:
    """Return the graph of a thread with so many turns. The last turn is not summarized."""
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


def list_texts(messages: list[BaseMessage]) -> list[str]:
    return [message.text for message in messages]


@for_both_forms
def test_expand_returns_all_summarized_messages_in_order(
    expand_summary: Expand, file_saver: SQLiteCheckpointer
) -> None:
    """A summary of summaries is expanded to the original messages."""
    with ScriptedServer(make_numbered_script()) as server:
        run_turns(server, file_saver, 4)

    assert list_texts(expand_summary(file_saver, THREAD)) == ["q1", "a1", "q2", "a2", "q3", "a3"]


@for_both_forms
def test_expand_of_an_older_checkpoint_uses_its_summary(
    expand_summary: Expand, file_saver: SQLiteCheckpointer
) -> None:
    """Without a summary, as at the first checkpoint, the result is empty."""
    with ScriptedServer(make_numbered_script()) as server:
        graph = run_turns(server, file_saver, 4)
    states = list(graph.get_state_history(THREAD))
    older = next(s for s in states if (s.values.get("summary") or {}).get("count") == 4)

    assert list_texts(expand_summary(file_saver, older.config)) == ["q1", "a1", "q2", "a2"]
    assert expand_summary(file_saver, states[-1].config) == []


@for_both_forms
def test_expand_returns_the_last_unshortened_version_of_a_changed_message(
    expand_summary: Expand, file_saver: SQLiteCheckpointer
) -> None:
    """A person's correction of a tool result is kept."""
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
        graph = run_turns(server, file_saver, 0)
        graph.update_state(THREAD, {"messages": talk}, as_node="respond")
        corrected = ToolMessage(f"true: {long}", tool_call_id="c", id="t1")
        changed = [HumanMessage("right", id="q1"), corrected]
        graph.update_state(THREAD, {"messages": changed}, as_node="respond")
        clearing = {"content": "[The result of look]", "additional_kwargs": {SHORTENED: "cleared"}}
        cleared = corrected.model_copy(update=clearing)
        graph.update_state(THREAD, {"messages": [cleared]}, as_node="respond")
        graph.invoke({"messages": []}, THREAD)

    assert list_texts(expand_summary(file_saver, THREAD)) == ["right", "", f"true: {long}", "a1"]


@for_both_forms
def test_expand_returns_the_original_of_a_message_shortened_by_trim(
    expand_summary: Expand, file_saver: SQLiteCheckpointer
) -> None:
    """The state has the short version, the history has both."""
    long = "a long question, " * 400
    with ScriptedServer(make_numbered_script()) as server:
        graph = run_turns(server, file_saver, 0)
        update = {"messages": [HumanMessage(long, id="q1")]}
        graph.update_state(THREAD, update, as_node="respond")
        trimming = trim(max_tokens=200, allow_partial=True)
        graph.update_state(
            THREAD, trimming.invoke(graph.get_state(THREAD).values), as_node="respond"
        )
        short_text = graph.get_state(THREAD).values["messages"][0].text
        more = [AIMessage("a1", id="a1"), HumanMessage("q2", id="q2")]
        graph.update_state(THREAD, {"messages": more}, as_node="respond")
        graph.invoke({"messages": []}, THREAD)

    assert "characters left out" in short_text
    assert list_texts(expand_summary(file_saver, THREAD)) == [long, "a1"]


@for_both_forms
def test_expand_leaves_out_erased_messages(
    expand_summary: Expand, file_saver: SQLiteCheckpointer
) -> None:
    with ScriptedServer(make_numbered_script()) as server:
        graph = run_turns(server, file_saver, 3)
    first = graph.get_state(THREAD).values["summarized"][0]
    file_saver.erase("t", message_ids=[first])

    assert list_texts(expand_summary(file_saver, THREAD)) == ["a1", "q2", "a2"]


@for_both_forms
def test_expand_refuses_unknown_threads_checkpoints_and_other_savers(
    expand_summary: Expand, file_saver: SQLiteCheckpointer
) -> None:
    with ScriptedServer(make_numbered_script()) as server:
        run_turns(server, file_saver, 1)
    unknown: Any = {"configurable": {"thread_id": "t", "checkpoint_id": "0" * 32}}

    assert expand_summary(file_saver, THREAD) == []
    with pytest.raises(ConfigurationError, match="expected a perdure checkpointer"):
        expand_summary(InMemorySaver(), THREAD)
    with pytest.raises(UnknownThread, match="'other'"):
        expand_summary(file_saver, {"configurable": {"thread_id": "other"}})
    with pytest.raises(UnknownCheckpoint):
        expand_summary(file_saver, unknown)
    with pytest.raises(InvalidConfig):
        expand_summary(file_saver, {"configurable": {}})


def apply_all_updates(state: list[AnyMessage] | None, updates: Sequence[Any]) -> list[AnyMessage]:
    for update in updates:
        state = add_messages(state or [], update)  # type: ignore[assignment, arg-type]
    return state or []


class DeltaState(SummaryState):
    """A state whose messages langgraph rebuilds from writes, as deep agents declare it."""

    messages: Annotated[list[AnyMessage], DeltaChannel(apply_all_updates)]


@for_both_forms
def test_expand_returns_messages_of_a_delta_channel(
    expand_summary: Expand, file_saver: SQLiteCheckpointer
) -> None:
    """An extraction reads all these messages with their times."""
    with ScriptedServer(make_numbered_script()) as server:
        graph = run_turns(server, file_saver, 4, state=DeltaState)
        state = graph.get_state(THREAD).values
        expanded_messages = expand_summary(file_saver, THREAD)
        history = run_operation(read_history(file_saver, "t"))

    all_texts = ["q1", "a1", "q2", "a2", "q3", "a3", "q4", "a4"]
    assert list_texts(expanded_messages) + list_texts(state["messages"]) == all_texts
    assert [message.text for message in history.messages] == all_texts
    assert all(message.at is not None for message in history.messages)
