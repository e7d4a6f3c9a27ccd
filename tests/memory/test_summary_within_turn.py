"""Summaries of the older exchanges of a turn that is still under way."""

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
from perdure.memory.summary import HEADING, Summarize, SummaryState
from perdure.memory.tokens import count_tokens
from tests.memory.fake_models import (
    FakeModel,
    make_answering_model,
    make_failing_model,
    make_tool_calling_model,
)
from tests.memory.providers import awaits_answer, find_refusals
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


def summary_by(scribe: FakeModel, **options: Any) -> Summarize:
    return summarize(scribe, **{"trigger": ("tokens", TRIGGER), **options})


def agent_of(model: FakeModel, scribe: FakeModel, saver: Any, *parts: Any, **options: Any) -> Any:
    """Return an agent whose turn has many calls, with a middleware that summarises."""
    middleware = [MemoryMiddleware(summary_by(scribe), *parts)]
    return create_agent(model, [look, ask], middleware=middleware, checkpointer=saver, **options)


def chat_of(model: FakeModel, scribe: FakeModel, saver: Any, *parts: Any) -> Any:
    """Return the ready-made graph with the same parts."""
    return chat_graph(model, [look, ask], memory=[summary_by(scribe), *parts], checkpointer=saver)


def loop_of(model: FakeModel, scribe: FakeModel, saver: Any, *parts: Any) -> Any:
    """Return a graph of a user's own, with the node before its model."""
    summary = summary_by(scribe)
    shown = view(summary, *(part for part in parts if not isinstance(part, Learner)))

    def call(state: Any) -> Any:
        calls = state["messages"][-1].tool_calls
        return {"messages": [look.invoke({**each, "type": "tool_call"}) for each in calls]}

    builder = StateGraph(SummaryState)
    builder.add_node("summarize", summary).add_node("call", call)
    builder.add_node("respond", lambda state: {"messages": [model.invoke(shown(state))]})
    builder.add_edge(START, "summarize").add_edge("summarize", "respond")
    goes = lambda state: "call" if state["messages"][-1].tool_calls else END  # noqa: E731
    builder.add_conditional_edges("respond", goes, ["call", END])
    builder.add_edge("call", "summarize")
    return builder.compile(checkpointer=saver)


def said_to(graph: Any, text: Any, call_mode: str = "sync") -> Any:
    """Return the state after a turn."""
    asked = {"messages": [HumanMessage(text)]} if isinstance(text, str) else text
    if call_mode == "sync":
        return graph.invoke(asked, THREAD)
    return asyncio.run(graph.ainvoke(asked, THREAD))


def exchanges_in(messages: Sequence[BaseMessage]) -> list[str]:
    """Return the ids of the calls whose results are among messages, in their order."""
    return [message.tool_call_id for message in messages if isinstance(message, ToolMessage)]


everywhere = pytest.mark.parametrize("make", [agent_of, chat_of, loop_of])


@everywhere
def test_a_long_turn_is_summarised_while_it_goes_on(
    make: Any, call_mode: str, file_saver: SQLiteCheckpointer
) -> None:
    """The requests stay short and valid, with the question, a summary and the newest exchanges."""
    model, scribe = make_tool_calling_model(CALLS), make_answering_model("summary")
    out = said_to(make(model, scribe, file_saver), "Which file has the fault?", call_mode)
    sizes = [count_tokens(request) for request in model.requests]
    original = [item.value for item in file_saver.history("t")]

    assert len(model.requests) == CALLS + 1
    assert max(sizes) < TRIGGER + 400
    assert len(scribe.requests) >= 3
    for request in model.requests:
        assert find_refusals(request, to_answer=True) == []
        assert [m.text for m in request if m.type == "human"] == ["Which file has the fault?"]
    for number, request in enumerate(model.requests):
        shown = exchanges_in(request)
        assert shown == exchanges_in(original)[:number][number - len(shown) :]
    assert HEADING in model.requests[-1][0].text
    assert out["messages"][-1].text == "done"
    assert out["summary"]["count"] == len(out["summarized"]) == len({*out["summarized"]})
    assert len(original) == 2 * CALLS + 2


@everywhere
def test_the_exchanges_are_told_and_come_back(make: Any, file_saver: SQLiteCheckpointer) -> None:
    """The summariser is told of each once, with the question; `expand` has them in order."""
    model, scribe = make_tool_calling_model(CALLS), make_answering_model("summary")
    graph = make(model, scribe, file_saver)
    out = said_to(graph, "Which file has the fault?")
    told = [str(request[-1].content) for request in scribe.requests]
    original = [item.value for item in file_saver.history("t")]
    expanded = expand(file_saver, THREAD)

    assert all("user: Which file has the fault?\n" in text for text in told)
    assert all("still at work" in text for text in told)
    gone = {message.id for message in expanded}
    assert gone == {*out["summarized"]}
    assert [m.id for m in expanded] == [m.id for m in original if m.id in gone]
    assert exchanges_in(expanded) == [f"c{n}" for n in range(1, len(exchanges_in(expanded)) + 1)]
    left = exchanges_in(out["messages"])
    assert exchanges_in(expanded) + left == exchanges_in(original)
    assert sum(text.count("found by the call") for text in told) == len(exchanges_in(expanded))


@everywhere
def test_later_turns_go_on_from_a_turn_that_was_summarised_in_part(
    make: Any, call_mode: str, file_saver: SQLiteCheckpointer
) -> None:
    """What is left of it is summarised as a turn when its time comes; nothing is told twice."""
    model, scribe = make_tool_calling_model(CALLS), make_answering_model("summary")
    graph = make(model, scribe, file_saver)
    for number in range(1, 4):
        out = said_to(graph, f"question {number}", call_mode)
    original = [item.value for item in file_saver.history("t")]
    told = "".join(str(request[-1].content) for request in scribe.requests)
    expanded = expand(file_saver, THREAD)

    assert len(original) == 3 * (2 * CALLS + 2)
    gone = {*out["summarized"]}
    assert out["summary"]["count"] == len(out["summarized"]) == len(gone)
    assert [m.id for m in expanded] == [m.id for m in original if m.id in gone]
    assert [m.id for m in original if m.id not in gone] == [m.id for m in out["messages"]]
    assert told.count("found by the call") == len(exchanges_in(expanded))
    assert list_texts(out["messages"])[0] == "question 3"
    for request in model.requests:
        assert find_refusals(request, to_answer=True) == []
        assert count_tokens(request) < TRIGGER + 400


def test_an_interrupt_within_the_turn_changes_nothing(file_saver: SQLiteCheckpointer) -> None:
    """A turn that waits for a person at each call is summarised like any other."""
    model, scribe = make_tool_calling_model(CALLS, "ask"), make_answering_model("summary")
    graph = agent_of(model, scribe, file_saver)
    out = said_to(graph, "Ask me.")
    while "__interrupt__" in out:
        out = said_to(graph, Command(resume="yes"))

    assert out["messages"][-1].text == "done"
    assert len(scribe.requests) >= 3
    assert max(map(count_tokens, model.requests)) < TRIGGER + 400


def test_a_call_that_waits_is_not_summarised() -> None:
    """Neither is one of which a result is missing: only complete exchanges are."""
    made = count(1)

    def exchange(number: int, results: int = 2) -> list[AnyMessage]:
        calls = [{"name": "look", "args": {}, "id": f"{number}-{n}"} for n in (1, 2)]
        first = AIMessage("", tool_calls=calls, id=f"m{next(made)}")
        ids = [f"{number}-1", f"{number}-2"][:results]
        return [first, *(ToolMessage("x", tool_call_id=i, id=f"m{next(made)}") for i in ids)]

    talk: list[AnyMessage] = [HumanMessage("q", id="q")]
    for number in range(1, 7):
        talk += exchange(number, results=1 if number == 2 else 2)
    talk += exchange(7, results=0)
    summary = summarize(make_answering_model(), trigger=("messages", 8), keep=("messages", 4))
    update = summary.invoke({"messages": talk})
    named = {*update["summarized"]}

    for call in (m for m in talk if isinstance(m, AIMessage)):
        ids = {each["id"] for each in call.tool_calls}
        results = [m for m in talk if isinstance(m, ToolMessage) and m.tool_call_id in ids]
        members = {call.id, *(m.id for m in results)}
        assert members <= named or not members & named
        assert len(results) == 2 or not members & named
    assert "q" not in named
    assert len(named) == 4 * 3  # of the five complete exchanges the newest stays


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (("messages", 1), 2),  # the question and the newest exchange, whatever that takes
        (("messages", 5), 4),
        (("messages", 7), 6),
        (None, 6),  # half of the trigger
    ],
)
def test_the_newest_exchanges_stay_as_far_as_keep_goes(keep: Any, left: int) -> None:
    """The question counts. The node changes nothing more when it runs again."""
    talk: list[AnyMessage] = [HumanMessage("q", id="q")]
    for n in range(1, 12):
        call = {"name": "look", "args": {}, "id": f"c{n}"}
        talk += [
            AIMessage("", tool_calls=[call], id=f"a{n}"),
            ToolMessage("x", tool_call_id=f"c{n}", id=f"t{n}"),
        ]
    summary = summarize(make_answering_model(), trigger=("messages", 16), keep=keep)
    update = summary.invoke({"messages": talk})
    rest = [m for m in talk if m.id not in {*update["summarized"]}]

    assert [m.id for m in rest] == ["q", *[m.id for m in talk[1:]][-(len(rest) - 1) :]]
    assert len(rest) - 1 == left
    assert summary.invoke({**update, "messages": rest}) == {}


def test_older_turns_go_first() -> None:
    """If what is left is below the trigger without them, the newest turn stays whole."""
    call = {"name": "look", "args": {}, "id": "c"}
    steps: list[AnyMessage] = [
        AIMessage("", tool_calls=[call], id="a"),
        ToolMessage("x", tool_call_id="c", id="t"),
        AIMessage("thinking", id="b"),
    ]
    talk: list[AnyMessage] = [
        HumanMessage("q1", id="q1"), AIMessage("a1", id="a1"), HumanMessage("q2", id="q2"), *steps,
    ]  # fmt: skip
    summary = summarize(make_answering_model(), trigger=("messages", 5), keep=("messages", 1))

    assert summary.invoke({"messages": talk})["summarized"] == ["q1", "a1"]
    again = summarize(make_answering_model(), trigger=("messages", 4), keep=("messages", 1))
    assert again.invoke({"messages": talk})["summarized"] == ["q1", "a1", "a", "t"]


def test_a_list_is_summarised_within_a_turn_too() -> None:
    """And again when it has grown; the summary in the list is extended."""
    model, scribe = make_tool_calling_model(CALLS), make_answering_model("summary")
    summary, talk = summary_by(scribe), list[BaseMessage]([HumanMessage("q")])
    while True:
        talk = summary(talk)
        answer = model.invoke(talk)
        talk.append(answer)
        if not answer.tool_calls:
            break
        talk.append(look.invoke({**answer.tool_calls[0], "type": "tool_call"}))

    assert len(scribe.requests) >= 3
    assert max(map(count_tokens, model.requests)) < TRIGGER + 400
    assert all(find_refusals(request, to_answer=True) == [] for request in model.requests)


def test_a_failure_within_a_turn_removes_nothing(
    file_saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """The turn ends as without a summary, and one warning is logged."""
    model, scribe = make_tool_calling_model(CALLS), make_failing_model()
    with caplog.at_level(logging.WARNING, "perdure"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", lambda seconds: None)
        out = said_to(agent_of(model, scribe, file_saver), "q")

    assert len(out["messages"]) == 2 * CALLS + 2
    assert out["summarized"] == []
    assert ["nothing was removed" in record.message for record in caplog.records] == [True]


class Noting(Learner):
    """A learner that notes the ids of the messages that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str | None] = []

    async def learn_from_messages(self, messages: Any, state: Any, config: Any) -> object:
        self.seen += [message.id for message in messages]
        return True


@pytest.mark.parametrize("make", [agent_of, chat_of])
def test_learners_see_each_message_before_it_is_removed(
    make: Any, call_mode: str, file_saver: SQLiteCheckpointer
) -> None:
    """Of whatever kind they are."""
    noting = Noting()
    model, scribe = make_tool_calling_model(CALLS), make_answering_model("summary")
    said_to(make(model, scribe, file_saver, noting), "q", call_mode)
    original = [item.value.id for item in file_saver.history("t")]

    assert len(scribe.requests) >= 3
    assert {*original} <= {*noting.seen}


# -- over random turns

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
def test_invariants_of_a_turn(steps: Any, keep: Any, trigger: int) -> None:
    """Nothing is lost, the rest is valid, only complete exchanges go, and once is enough."""
    talk = _turn_of(steps)
    summary = summarize(make_answering_model("summary"), trigger=("messages", trigger), keep=keep)
    update = summary.invoke({"messages": talk})
    named = update.get("summarized", [])
    rest = [message for message in talk if message.id not in named]
    state = {**update, "messages": rest}
    before = [m.id for m in ModelInput.from_messages(talk).to_messages()]
    after = [m.id for m in summary.select_messages(rest, state) if m.type != "system"]

    assert rest[0].id == "q"
    assert [uid for uid in before if uid not in named] == after
    assert [uid for uid in before if uid in named] == named  # a part of what the model had seen
    shown = summary.select_messages(rest, state)
    assert find_refusals(shown, to_answer=awaits_answer(talk)) == []
    assert summary.invoke(state) == {}


def _turn_of(steps: Sequence[str]) -> list[AnyMessage]:
    """Return a question and what follows it; each message has an id of its own."""
    numbers = count(1)
    talk: list[AnyMessage] = [HumanMessage("question", id="q")]
    for step in steps:
        n = next(numbers)
        ids = [f"c{n}", f"d{n}"] if step in ("two calls", "half") else [f"c{n}"]
        calls = [{"name": "look", "args": {}, "id": uid} for uid in ids]
        if step in ("text", "blank"):
            talk.append(AIMessage("words" if step == "text" else "", id=f"a{n}"))
            continue
        if step != "orphan":
            talk.append(AIMessage("", tool_calls=calls, id=f"a{n}"))
        answered = ids[:1] if step == "half" else ids
        talk += [ToolMessage("x" * 40, tool_call_id=uid, id=f"t{uid}") for uid in answered]
    return talk


def test_a_run_without_a_saver_is_summarised_too() -> None:
    """Nothing of it needs a thread."""
    model, scribe = make_tool_calling_model(CALLS), make_answering_model("summary")
    said_to(agent_of(model, scribe, None, trim(max_tokens=3_000)), "q")
    said_to(agent_of(model, scribe, InMemorySaver(), trim(max_tokens=3_000)), "q")

    assert max(map(count_tokens, model.requests)) < TRIGGER + 400
