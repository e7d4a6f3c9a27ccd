"""Summaries that subgraphs, their parents and their siblings share."""

from __future__ import annotations

import asyncio
import logging
import operator
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from typing_extensions import TypedDict

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import InvalidUpdate
from perdure.memory import MemoryMiddleware, assemble, expand, summarize, view
from perdure.memory.reducers import append_new
from perdure.memory.summary import Summarize, SummaryState
from perdure.memory.summary_state import merge_summaries
from tests.memory.fake_models import FakeModel, make_answering_model
from tests.memory.summaries import list_texts, make_turns

THREAD: Any = {"configurable": {"thread_id": "t"}}
TURNS = 6


def summary_of_four(scribe: FakeModel) -> Summarize:
    """Return a node that summarises all but the newest turn, from four messages on."""
    return summarize(scribe, trigger=("messages", 4), keep=("messages", 1))


def agent(scribe: FakeModel, **options: Any) -> Any:
    """Return an agent that answers, and summarises in a middleware."""
    middleware = [MemoryMiddleware(summary_of_four(scribe))]
    return create_agent(make_answering_model(), middleware=middleware, **options)


def plain(scribe: FakeModel, **options: Any) -> Any:
    """Return a graph that answers, with a node that summarises afterwards."""
    builder = StateGraph(SummaryState)
    builder.add_node("reply", lambda state: {"messages": [AIMessage("answer")]})
    builder.add_node("summarize", summary_of_four(scribe))
    builder.add_edge(START, "reply").add_edge("reply", "summarize")
    return builder.compile(**options)


def called_in_a_node(scribe: FakeModel, **options: Any) -> Any:
    """Return a function that calls an agent of its own thread with the parent's state."""
    called = agent(scribe)

    def call(state: Any, config: RunnableConfig) -> Any:
        return called.invoke(state, {"configurable": {"thread_id": "another"}})

    return call


def parent_of(*subgraphs: Any, saver: Any = None, state: Any = SummaryState) -> Any:
    """Return a graph that calls one subgraph after the other."""
    builder = StateGraph(state)
    names = [f"subgraph{number}" for number in range(len(subgraphs))]
    for name, before, subgraph in zip(names, [START, *names], subgraphs, strict=False):
        builder.add_node(name, subgraph)
        builder.add_edge(before, name)
    return builder.compile(checkpointer=saver)


def run(graph: Any, call_mode: str, count: int = TURNS) -> Any:
    """Return the state after so many turns."""

    async def awaited() -> Any:
        for number in range(1, count + 1):
            out = await graph.ainvoke({"messages": [HumanMessage(f"question {number}")]}, THREAD)
        return out

    if call_mode == "async":
        return asyncio.run(awaited())
    for number in range(1, count + 1):
        out = graph.invoke({"messages": [HumanMessage(f"question {number}")]}, THREAD)
    return out


def asked_about(scribe: FakeModel) -> list[int]:
    """Return how often each question was shown to the summariser, apart from summaries."""
    asked = [str(request[-1].content) for request in scribe.requests]
    return [sum(f"user: question {n}\n" in text for text in asked) for n in range(1, TURNS + 1)]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (agent, {}),
        (agent, {"checkpointer": True}),
        (agent, {"checkpointer": False}),
        (plain, {}),
        (plain, {"checkpointer": True}),
        (called_in_a_node, {}),
    ],
)
def test_each_message_is_summarised_once_whoever_shares_the_summary(
    make: Any, options: Any, file_saver: SQLiteCheckpointer, call_mode: str
) -> None:
    """The parent keeps all messages, and the ids of those in the summary once each."""
    scribe = make_answering_model("summary")
    out = run(parent_of(make(scribe, **options), saver=file_saver), call_mode)
    messages, summarized = out["messages"], out["summarized"]

    assert len(messages) == 2 * TURNS
    assert summarized == [message.id for message in messages[: len(summarized)]]
    assert len(summarized) >= 2 * TURNS - 4
    assert out["summary"]["count"] == len(summarized)
    assert max(asked_about(scribe)) == 1
    assert list_texts(expand(file_saver, THREAD)) == list_texts(messages[: len(summarized)])


@pytest.mark.parametrize("options", [{}, {"checkpointer": True}])
def test_siblings_share_a_summary(
    options: Any, file_saver: SQLiteCheckpointer, call_mode: str
) -> None:
    """Two agents, one after the other, summarise each message once between them."""
    scribe = make_answering_model("summary")
    pair = [agent(scribe, name=name, **options) for name in ("first", "second")]
    out = run(parent_of(*pair, saver=file_saver), call_mode)

    assert len(out["messages"]) == 3 * TURNS
    assert len(out["summarized"]) == len({*out["summarized"]}) == out["summary"]["count"]
    assert max(asked_about(scribe)) == 1


def test_parallel_siblings_share_a_summary(file_saver: SQLiteCheckpointer, call_mode: str) -> None:
    """Both may extend the summary in one step; no text of either is lost."""
    scribe = make_answering_model("summary")
    builder = StateGraph(SummaryState)
    for name in ("first", "second"):
        builder.add_node(name, agent(scribe, name=name))
        builder.add_edge(START, name)
    out = run(builder.compile(checkpointer=file_saver), call_mode)

    assert len(out["messages"]) == 3 * TURNS
    assert len(out["summarized"]) == len({*out["summarized"]}) == out["summary"]["count"]
    assert max(asked_about(scribe)) <= 2  # by each of the two


@pytest.mark.parametrize("form", ["summarize", "view", "assemble"])
def test_a_parent_shows_no_message_of_the_summary(
    form: str, file_saver: SQLiteCheckpointer
) -> None:
    """In the parent all messages are still in the state; the summary stands for the old ones."""
    scribe = make_answering_model("summary")
    state = run(parent_of(agent(scribe), saver=file_saver), "sync", 4)
    summary = summary_of_four(scribe)
    parts = {"summarize": summary, "view": view(summary), "assemble": assemble(1_000)}
    before = len(scribe.requests)
    shown = parts[form](state)

    hidden = len(state["summarized"])
    assert 0 < hidden < len(state["messages"])
    assert list_texts(shown[1:]) == list_texts(state["messages"][hidden:])
    assert state["summary"]["text"] in shown[0].text
    assert len(scribe.requests) == before


def test_a_summary_in_the_parent_removes_what_a_subgraph_summarised(
    file_saver: SQLiteCheckpointer,
) -> None:
    """Once the parent summarises, its own state has neither the new nor the earlier messages."""
    scribe = make_answering_model("summary")
    graph = parent_of(agent(scribe), summary_of_four(scribe), saver=file_saver)
    out = run(graph, "sync", 4)

    assert list_texts(out["messages"]) == ["question 4", "answer 4"]
    assert out["summary"]["count"] == len(out["summarized"]) == 6
    assert max(asked_about(scribe)) == 1


def test_an_edit_of_a_summarised_message_is_shown_and_summarised(
    file_saver: SQLiteCheckpointer,
) -> None:
    """Its new content is in no summary. It is one message all the same."""
    scribe = make_answering_model("summary")
    graph = parent_of(agent(scribe), saver=file_saver)
    first = run(graph, "sync", 3)["messages"][0]
    edited = HumanMessage("question 1, corrected", id=first.id)
    graph.update_state(THREAD, {"messages": [edited]}, as_node="subgraph0")
    shown = summary_of_four(scribe)(graph.get_state(THREAD).values)
    out = run(graph, "sync", 3)

    assert list_texts(shown)[1] == "question 1, corrected"
    told = [str(request[-1].content) for request in scribe.requests]
    assert sum("question 1, corrected" in text for text in told) == 1
    assert out["summary"]["count"] == len(out["summarized"]) == len({*out["summarized"]})


def test_a_client_that_sends_the_whole_conversation_again_changes_nothing(
    file_saver: SQLiteCheckpointer,
) -> None:
    """Messages that come back with their ids are not summarised a second time."""
    scribe = make_answering_model("summary")
    graph, sent = plain(scribe, checkpointer=file_saver), list[AnyMessage]()
    for number in range(1, TURNS + 1):
        sent.append(HumanMessage(f"question {number}", id=f"q{number}"))
        out = graph.invoke({"messages": sent}, THREAD)
        sent.append(out["messages"][-1])

    assert max(asked_about(scribe)) == 1
    assert out["summary"]["count"] == len(out["summarized"]) == len({*out["summarized"]})


def test_without_a_summary_nothing_is_hidden() -> None:
    """A summary that was cleared stands for nothing, whatever ids are left in the state."""
    summary = summary_of_four(make_answering_model("summary"))
    state = {
        "messages": make_turns(4),
        "summary": None,
        "summarized": [m.id for m in make_turns(4)],
    }

    assert list_texts(summary(state)) == list_texts(make_turns(4))
    assert summary.invoke(state)["summary"]["count"] == 6


def test_a_fork_and_a_replay_summarise_as_the_first_time(file_saver: SQLiteCheckpointer) -> None:
    """From an earlier checkpoint the same messages are summarised, once each."""
    scribe = make_answering_model("summary")
    graph = parent_of(agent(scribe), saver=file_saver)
    run(graph, "sync", 3)
    middle = graph.get_state(THREAD).config
    first = run(graph, "sync", 2)
    forked = graph.invoke({"messages": [HumanMessage("another")]}, middle)
    replayed = graph.invoke(None, middle)

    for out in (first, forked, replayed):
        ids = [message.id for message in out["messages"]]
        assert out["summarized"] == ids[: len(out["summarized"])]
        assert out["summary"]["count"] == len(out["summarized"])


class Adding(TypedDict, total=False):
    """A state of a user's own, whose reducer of ids is `operator.add`."""

    messages: Annotated[list[AnyMessage], add_messages]
    summary: dict[str, Any]
    summarized: Annotated[list[str], operator.add]


def test_a_state_that_adds_ids_still_works(
    file_saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """In a graph the ids are named once; where a subgraph repeats them the log says why, once."""
    scribe = make_answering_model("summary")
    builder = StateGraph(Adding)
    builder.add_node("reply", lambda state: {"messages": [AIMessage("answer")]})
    builder.add_node("summarize", summary_of_four(scribe))
    builder.add_edge(START, "reply").add_edge("reply", "summarize")
    out = run(builder.compile(checkpointer=file_saver), "sync")
    assert len(out["summarized"]) == len({*out["summarized"]}) == out["summary"]["count"]
    assert max(asked_about(scribe)) == 1

    nested = make_answering_model("summary")
    graph = parent_of(builder.compile(), agent(nested), state=Adding)
    with caplog.at_level(logging.WARNING, "perdure"):
        state: Any = {}
        for number in range(1, 5):
            said = [*state.get("messages", []), HumanMessage(f"question {number}")]
            state = graph.invoke({**state, "messages": said})
    assert max(asked_about(nested)) <= 1
    assert state["summary"]["count"] == len({*state["summarized"]})
    warnings = [record.message for record in caplog.records if "operator.add" in record.message]
    assert len(warnings) == 1
    assert "append_new" in warnings[0]


# -- reducers


def test_new_ids_are_appended_in_order() -> None:
    """Also to nothing, and to a list that has an id twice."""
    assert append_new(["a", "b"], ["b", "c", "a", "d"]) == ["a", "b", "c", "d"]
    assert append_new(None, ["b", "a", "b"]) == ["b", "a"]
    assert append_new(["a", "b", "a"], []) == ["a", "b"]
    assert append_new(["a"], None) == ["a"]
    for wrong in ("abc", b"abc", 7):
        with pytest.raises(InvalidUpdate, match="expected a list of ids"):
            append_new(["a"], wrong)
        with pytest.raises(InvalidUpdate, match="expected a list of ids"):
            append_new(wrong, ["a"])
    with pytest.raises(InvalidUpdate, match="not hashable"):
        append_new(["a"], [["b"]])


def test_of_two_summaries_the_later_counts_and_none_is_lost() -> None:
    """By what they stand for: an extension replaces, also in the other order; rivals are joined."""

    def summary(text: str, *digests: str) -> dict[str, Any]:
        return {"text": text, "last": digests[-1], "count": len(digests), "digests": [*digests]}

    old, new, rival = summary("old", "a"), summary("new", "a", "b"), summary("rival", "a", "c")

    assert merge_summaries(old, new) == new
    assert merge_summaries(new, old) == new
    assert merge_summaries(new, None) is None
    assert merge_summaries(None, new) == new
    assert merge_summaries(new, "by hand") == "by hand"
    by_hand = {"text": "by hand", "last": None, "count": 0}
    assert merge_summaries(new, by_hand) == by_hand
    assert merge_summaries(new, rival) == {
        "text": "new\n\nrival",
        "last": "c",
        "count": 3,
        "digests": ["a", "b", "c"],
    }
