"""Summaries of older exchanges within a turn that is still running."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs import chat_graph
from perdure.memory import MemoryMiddleware, expand, summarize, trim, view
from perdure.memory.nodes import Learner, ModelInput
from perdure.memory.short_term.summary import HEADING, Summarize, SummaryState
from perdure.memory.short_term.tokens import count_tokens
from tests.memory.fake_models import (
    FakeModel,
    make_answering_model,
    make_failing_model,
    make_tool_calling_model,
)
from tests.memory.provider_rules import awaits_answer, find_refusals
from tests.memory.summaries import list_texts

THREAD: Any = {"configurable": {"thread_id": "t"}, "recursion_limit": 500}
CALLS = 24
TRIGGER = 1_200  # tokens


@tool
def look(what: str) -> str:
    """Look something up."""
    return f"found by the call: {what} " + "lorem ipsum " * 30


@tool
def ask(what: str) -> str:
    """Ask the user."""
    return str(interrupt(what)) + " lorem ipsum" * 30


def make_summarize_node(summariser: FakeModel, **options: Any) -> Summarize:
    return summarize(summariser, **{"trigger": ("tokens", TRIGGER), **options})


def make_agent(
    model: FakeModel, summariser: FakeModel, saver: Any, *parts: Any, **options: Any
) -> Any:
    """Return an agent whose turn has many calls, with a middleware that summarises."""
    middleware = [MemoryMiddleware(make_summarize_node(summariser), *parts)]
    return create_agent(model, [look, ask], middleware=middleware, checkpointer=saver, **options)


def make_chat_graph(model: FakeModel, summariser: FakeModel, saver: Any, *parts: Any) -> Any:
    """Return the ready-made graph with the same parts."""
    return chat_graph(
        model, [look, ask], memory=[make_summarize_node(summariser), *parts], checkpointer=saver
    )


def make_tool_loop_graph(model: FakeModel, summariser: FakeModel, saver: Any, *parts: Any) -> Any:
    """Return a user's own graph, with the node before its model."""
    summary = make_summarize_node(summariser)
    shown = view(summary, *(part for part in parts if not isinstance(part, Learner)))

    def call(state: Any) -> Any:
        calls = state["messages"][-1].tool_calls
        return {
            "messages": [look.invoke({**tool_call, "type": "tool_call"}) for tool_call in calls]
        }

    builder = StateGraph(SummaryState)
    builder.add_node("summarize", summary).add_node("call", call)
    builder.add_node("respond", lambda state: {"messages": [model.invoke(shown(state))]})
    builder.add_edge(START, "summarize").add_edge("summarize", "respond")
    choose_next_node = lambda state: "call" if state["messages"][-1].tool_calls else END  # noqa: E731
    builder.add_conditional_edges("respond", choose_next_node, ["call", END])
    builder.add_edge("call", "summarize")
    return builder.compile(checkpointer=saver)


def run_turn(graph: Any, text: Any, call_mode: str = "sync") -> Any:
    """Return the state after a turn."""
    input = {"messages": [HumanMessage(text)]} if isinstance(text, str) else text
    if call_mode == "sync":
        return graph.invoke(input, THREAD)
    return asyncio.run(graph.ainvoke(input, THREAD))


def list_result_call_ids(messages: Sequence[BaseMessage]) -> list[str]:
    """Return the ids of the calls whose results are among the messages, in order."""
    return [message.tool_call_id for message in messages if isinstance(message, ToolMessage)]


with_agent_and_graphs = pytest.mark.parametrize(
    "make_graph", [make_agent, make_chat_graph, make_tool_loop_graph]
)


@with_agent_and_graphs
def test_long_turn_is_summarised_while_it_runs(
    make_graph: Any, call_mode: str, file_saver: SQLiteCheckpointer
) -> None:
    """The requests stay short and valid, with the question, a summary and the newest exchanges."""
    model, summariser = make_tool_calling_model(CALLS), make_answering_model("summary")
    out = run_turn(
        make_graph(model, summariser, file_saver), "Which file has the fault?", call_mode
    )
    sizes = [count_tokens(request) for request in model.requests]
    original = [item.value for item in file_saver.history("t")]

    assert len(model.requests) == CALLS + 1
    assert max(sizes) < TRIGGER + 400
    assert len(summariser.requests) >= 3
    for request in model.requests:
        assert find_refusals(request, to_answer=True) == []
        assert [m.text for m in request if m.type == "human"] == ["Which file has the fault?"]
    for number, request in enumerate(model.requests):
        shown = list_result_call_ids(request)
        assert shown == list_result_call_ids(original)[:number][number - len(shown) :]
    assert HEADING in model.requests[-1][0].text
    assert out["messages"][-1].text == "done"
    assert out["summary"]["count"] == len(out["summarized"]) == len({*out["summarized"]})
    assert len(original) == 2 * CALLS + 2


@with_agent_and_graphs
def test_each_exchange_is_summarised_once_and_can_be_expanded(
    make_graph: Any, file_saver: SQLiteCheckpointer
) -> None:
    """The summariser gets each exchange once, with the question. `expand` returns them in order."""
    model, summariser = make_tool_calling_model(CALLS), make_answering_model("summary")
    graph = make_graph(model, summariser, file_saver)
    out = run_turn(graph, "Which file has the fault?")
    request_texts = [str(request[-1].content) for request in summariser.requests]
    original = [item.value for item in file_saver.history("t")]
    expanded = expand(file_saver, THREAD)

    assert all("user: Which file has the fault?\n" in text for text in request_texts)
    assert all("still at work" in text for text in request_texts)
    gone = {message.id for message in expanded}
    assert gone == {*out["summarized"]}
    assert [m.id for m in expanded] == [m.id for m in original if m.id in gone]
    assert list_result_call_ids(expanded) == [
        f"c{n}" for n in range(1, len(list_result_call_ids(expanded)) + 1)
    ]
    remaining_ids = list_result_call_ids(out["messages"])
    assert list_result_call_ids(expanded) + remaining_ids == list_result_call_ids(original)
    assert sum(text.count("found by the call") for text in request_texts) == len(
        list_result_call_ids(expanded)
    )


@with_agent_and_graphs
def test_rest_of_partly_summarised_turn_is_summarised_in_later_turns(
    make_graph: Any, call_mode: str, file_saver: SQLiteCheckpointer
) -> None:
    """No message is summarised twice."""
    model, summariser = make_tool_calling_model(CALLS), make_answering_model("summary")
    graph = make_graph(model, summariser, file_saver)
    for number in range(1, 4):
        out = run_turn(graph, f"question {number}", call_mode)
    original = [item.value for item in file_saver.history("t")]
    request_texts = "".join(str(request[-1].content) for request in summariser.requests)
    expanded = expand(file_saver, THREAD)

    assert len(original) == 3 * (2 * CALLS + 2)
    gone = {*out["summarized"]}
    assert out["summary"]["count"] == len(out["summarized"]) == len(gone)
    assert [m.id for m in expanded] == [m.id for m in original if m.id in gone]
    assert [m.id for m in original if m.id not in gone] == [m.id for m in out["messages"]]
    assert request_texts.count("found by the call") == len(list_result_call_ids(expanded))
    assert list_texts(out["messages"])[0] == "question 3"
    for request in model.requests:
        assert find_refusals(request, to_answer=True) == []
        assert count_tokens(request) < TRIGGER + 400


def test_turn_with_interrupts_is_summarised_like_others(file_saver: SQLiteCheckpointer) -> None:
    model, summariser = make_tool_calling_model(CALLS, "ask"), make_answering_model("summary")
    graph = make_agent(model, summariser, file_saver)
    out = run_turn(graph, "Ask me.")
    while "__interrupt__" in out:
        out = run_turn(graph, Command(resume="yes"))

    assert out["messages"][-1].text == "done"
    assert len(summariser.requests) >= 3
    assert max(map(count_tokens, model.requests)) < TRIGGER + 400


def test_only_complete_exchanges_are_summarised() -> None:
    """A call that waits, or of which a result is missing, stays."""
    message_numbers = count(1)

    def exchange(number: int, results: int = 2) -> list[AnyMessage]:
        calls = [{"name": "look", "args": {}, "id": f"{number}-{n}"} for n in (1, 2)]
        first = AIMessage("", tool_calls=calls, id=f"m{next(message_numbers)}")
        ids = [f"{number}-1", f"{number}-2"][:results]
        return [
            first,
            *(ToolMessage("x", tool_call_id=i, id=f"m{next(message_numbers)}") for i in ids),
        ]

    conversation: list[AnyMessage] = [HumanMessage("q", id="q")]
    for number in range(1, 7):
        conversation += exchange(number, results=1 if number == 2 else 2)
    conversation += exchange(7, results=0)
    summary = summarize(make_answering_model(), trigger=("messages", 8), keep=("messages", 4))
    update = summary.invoke({"messages": conversation})
    summarized_ids = {*update["summarized"]}

    for call in (m for m in conversation if isinstance(m, AIMessage)):
        ids = {tool_call["id"] for tool_call in call.tool_calls}
        results = [m for m in conversation if isinstance(m, ToolMessage) and m.tool_call_id in ids]
        members = {call.id, *(m.id for m in results)}
        assert members <= summarized_ids or not members & summarized_ids
        assert len(results) == 2 or not members & summarized_ids
    assert "q" not in summarized_ids
    assert len(summarized_ids) == 4 * 3  # of the five complete exchanges the newest stays


@pytest.mark.parametrize(
    ("keep", "expected_remaining"),
    [
        (("messages", 1), 2),  # the question and the newest exchange, whatever that takes
        (("messages", 5), 4),
        (("messages", 7), 6),
        (None, 6),  # half of the trigger
    ],
)
def test_keep_decides_how_many_newest_exchanges_stay(keep: Any, expected_remaining: int) -> None:
    """The question counts. A second run of the node changes nothing."""
    conversation: list[AnyMessage] = [HumanMessage("q", id="q")]
    for n in range(1, 12):
        call = {"name": "look", "args": {}, "id": f"c{n}"}
        conversation += [
            AIMessage("", tool_calls=[call], id=f"a{n}"),
            ToolMessage("x", tool_call_id=f"c{n}", id=f"t{n}"),
        ]
    summary = summarize(make_answering_model(), trigger=("messages", 16), keep=keep)
    update = summary.invoke({"messages": conversation})
    rest = [m for m in conversation if m.id not in {*update["summarized"]}]

    assert [m.id for m in rest] == ["q", *[m.id for m in conversation[1:]][-(len(rest) - 1) :]]
    assert len(rest) - 1 == expected_remaining
    assert summary.invoke({**update, "messages": rest}) == {}


def test_older_turns_are_summarised_before_newest_turn() -> None:
    """The newest turn stays whole if the rest is then below the trigger."""
    call = {"name": "look", "args": {}, "id": "c"}
    steps: list[AnyMessage] = [
        AIMessage("", tool_calls=[call], id="a"),
        ToolMessage("x", tool_call_id="c", id="t"),
        AIMessage("thinking", id="b"),
    ]
    conversation: list[AnyMessage] = [
        HumanMessage("q1", id="q1"), AIMessage("a1", id="a1"), HumanMessage("q2", id="q2"), *steps,
    ]  # fmt: skip
    summary = summarize(make_answering_model(), trigger=("messages", 5), keep=("messages", 1))

    assert summary.invoke({"messages": conversation})["summarized"] == ["q1", "a1"]
    again = summarize(make_answering_model(), trigger=("messages", 4), keep=("messages", 1))
    assert again.invoke({"messages": conversation})["summarized"] == ["q1", "a1", "a", "t"]


def test_message_list_is_summarised_repeatedly_within_turn() -> None:
    """The summary in the list is extended."""
    model, summariser = make_tool_calling_model(CALLS), make_answering_model("summary")
    summary, conversation = make_summarize_node(summariser), list[BaseMessage]([HumanMessage("q")])
    while True:
        conversation = summary(conversation)
        answer = model.invoke(conversation)
        conversation.append(answer)
        if not answer.tool_calls:
            break
        conversation.append(look.invoke({**answer.tool_calls[0], "type": "tool_call"}))

    assert len(summariser.requests) >= 3
    assert max(map(count_tokens, model.requests)) < TRIGGER + 400
    assert all(find_refusals(request, to_answer=True) == [] for request in model.requests)


def test_failed_summary_within_turn_removes_nothing_and_warns_once(
    file_saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    model, summariser = make_tool_calling_model(CALLS), make_failing_model()
    with caplog.at_level(logging.WARNING, "perdure"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", lambda seconds: None)
        out = run_turn(make_agent(model, summariser, file_saver), "q")

    assert len(out["messages"]) == 2 * CALLS + 2
    assert out["summarized"] == []
    assert ["no message was removed" in record.message for record in caplog.records] == [True]


class RecordingLearner(Learner):
    """A learner that records the ids of the messages that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str | None] = []

    async def learn_from_messages(self, messages: Any, state: Any, config: Any) -> object:
        self.seen += [message.id for message in messages]
        return True


@pytest.mark.parametrize("make_graph", [make_agent, make_chat_graph])
def test_learner_gets_each_message_before_its_removal(
    make_graph: Any, call_mode: str, file_saver: SQLiteCheckpointer
) -> None:
    learner = RecordingLearner()
    model, summariser = make_tool_calling_model(CALLS), make_answering_model("summary")
    run_turn(make_graph(model, summariser, file_saver, learner), "q", call_mode)
    original = [item.value.id for item in file_saver.history("t")]

    assert len(summariser.requests) >= 3
    assert {*original} <= {*learner.seen}


# -- random turns

_STEPS = st.lists(
    st.sampled_from(["exchange", "two calls", "half", "text", "blank", "orphan"]),
    min_size=1,
    max_size=14,
)


@given(
    steps=_STEPS,
    keep=st.sampled_from([("messages", 1), ("messages", 5), ("tokens", 60)]),
    trigger=st.integers(3, 12),
)
def test_summary_of_random_turn_is_valid_idempotent_and_loses_nothing(
    steps: Any, keep: Any, trigger: int
) -> None:
    """Only complete exchanges are removed."""
    conversation = _make_turn(steps)
    summary = summarize(make_answering_model("summary"), trigger=("messages", trigger), keep=keep)
    update = summary.invoke({"messages": conversation})
    summarized_ids = update.get("summarized", [])
    rest = [message for message in conversation if message.id not in summarized_ids]
    state = {**update, "messages": rest}
    before = [m.id for m in ModelInput.from_messages(conversation).to_messages()]
    after = [m.id for m in summary.select_messages(rest, state) if m.type != "system"]

    assert rest[0].id == "q"
    assert [uid for uid in before if uid not in summarized_ids] == after
    assert [
        uid for uid in before if uid in summarized_ids
    ] == summarized_ids  # a part of what the model had seen
    shown = summary.select_messages(rest, state)
    assert find_refusals(shown, to_answer=awaits_answer(conversation)) == []
    assert summary.invoke(state) == {}


def _make_turn(steps: Sequence[str]) -> list[AnyMessage]:
    """Return a question and the messages of the steps. Each message has an id of its own."""
    numbers = count(1)
    conversation: list[AnyMessage] = [HumanMessage("question", id="q")]
    for step in steps:
        n = next(numbers)
        ids = [f"c{n}", f"d{n}"] if step in ("two calls", "half") else [f"c{n}"]
        calls = [{"name": "look", "args": {}, "id": uid} for uid in ids]
        if step in ("text", "blank"):
            conversation.append(AIMessage("words" if step == "text" else "", id=f"a{n}"))
            continue
        if step != "orphan":
            conversation.append(AIMessage("", tool_calls=calls, id=f"a{n}"))
        answered = ids[:1] if step == "half" else ids
        conversation += [ToolMessage("x" * 40, tool_call_id=uid, id=f"t{uid}") for uid in answered]
    return conversation


def test_turn_is_summarised_without_checkpointer_and_with_langgraph_saver() -> None:
    model, summariser = make_tool_calling_model(CALLS), make_answering_model("summary")
    run_turn(make_agent(model, summariser, None, trim(max_tokens=3_000)), "q")
    run_turn(make_agent(model, summariser, InMemorySaver(), trim(max_tokens=3_000)), "q")

    assert max(map(count_tokens, model.requests)) < TRIGGER + 400
