"""Summaries that a subgraph shares with its parent and its siblings."""

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
from perdure.memory.short_term.reducers import append_new
from perdure.memory.short_term.summary import Summarize, SummaryState
from perdure.memory.short_term.summary_state import merge_summaries
from tests.memory.fake_models import FakeModel, make_answering_model
from tests.memory.summaries import list_texts, make_turns

THREAD: Any = {"configurable": {"thread_id": "t"}}
TURNS = 6


def make_summarize_node(summariser: FakeModel) -> Summarize:
    """Return a node that summarises all but the newest turn, from four messages on."""
    return summarize(summariser, trigger=("messages", 4), keep=("messages", 1))


def make_agent(summariser: FakeModel, **options: Any) -> Any:
    """Return an agent that answers, and summarises in a middleware."""
    middleware = [MemoryMiddleware(make_summarize_node(summariser))]
    return create_agent(make_answering_model(), middleware=middleware, **options)


def make_plain_graph(summariser: FakeModel, **options: Any) -> Any:
    """Return a graph that answers, with a node that summarises afterwards."""
    builder = StateGraph(SummaryState)
    builder.add_node("reply", lambda state: {"messages": [AIMessage("answer")]})
    builder.add_node("summarize", make_summarize_node(summariser))
    builder.add_edge(START, "reply").add_edge("reply", "summarize")
    return builder.compile(**options)


def make_node_calling_agent(summariser: FakeModel, **options: Any) -> Any:
    """Return a function that calls an agent, in a thread of its own, with the parent's state."""
    called = make_agent(summariser)

    def call(state: Any, config: RunnableConfig) -> Any:
        return called.invoke(state, {"configurable": {"thread_id": "another"}})

    return call


def make_parent_graph(*subgraphs: Any, saver: Any = None, state: Any = SummaryState) -> Any:
    """Return a graph that calls one subgraph after the other."""
    builder = StateGraph(state)
    names = [f"subgraph{number}" for number in range(len(subgraphs))]
    for name, before, subgraph in zip(names, [START, *names], subgraphs, strict=False):
        builder.add_node(name, subgraph)
        builder.add_edge(before, name)
    return builder.compile(checkpointer=saver)


def run_turns(graph: Any, call_mode: str, count: int = TURNS) -> Any:
    """Return the state after so many turns."""

    async def run_async() -> Any:
        for number in range(1, count + 1):
            out = await graph.ainvoke({"messages": [HumanMessage(f"question {number}")]}, THREAD)
        return out

    if call_mode == "async":
        return asyncio.run(run_async())
    for number in range(1, count + 1):
        out = graph.invoke({"messages": [HumanMessage(f"question {number}")]}, THREAD)
    return out


def count_summarised_questions(summariser: FakeModel) -> list[int]:
    """Return how often each question was shown to the summariser, apart from summaries."""
    request_texts = [str(request[-1].content) for request in summariser.requests]
    return [
        sum(f"user: question {n}\n" in text for text in request_texts) for n in range(1, TURNS + 1)
    ]


@pytest.mark.parametrize(
    ("make_subgraph", "options"),
    [
        (make_agent, {}),
        (make_agent, {"checkpointer": True}),
        (make_agent, {"checkpointer": False}),
        (make_plain_graph, {}),
        (make_plain_graph, {"checkpointer": True}),
        (make_node_calling_agent, {}),
    ],
)
def test_each_message_is_summarised_once_across_parent_and_subgraph(
    make_subgraph: Any, options: Any, file_saver: SQLiteCheckpointer, call_mode: str
) -> None:
    """The parent keeps all messages, and each id of a summarised message once."""
    summariser = make_answering_model("summary")
    out = run_turns(
        make_parent_graph(make_subgraph(summariser, **options), saver=file_saver), call_mode
    )
    messages, summarized = out["messages"], out["summarized"]

    assert len(messages) == 2 * TURNS
    assert summarized == [message.id for message in messages[: len(summarized)]]
    assert len(summarized) >= 2 * TURNS - 4
    assert out["summary"]["count"] == len(summarized)
    assert max(count_summarised_questions(summariser)) == 1
    assert list_texts(expand(file_saver, THREAD)) == list_texts(messages[: len(summarized)])


@pytest.mark.parametrize("options", [{}, {"checkpointer": True}])
def test_sibling_agents_summarise_each_message_once(
    options: Any, file_saver: SQLiteCheckpointer, call_mode: str
) -> None:
    """The two agents run one after the other."""
    summariser = make_answering_model("summary")
    pair = [make_agent(summariser, name=name, **options) for name in ("first", "second")]
    out = run_turns(make_parent_graph(*pair, saver=file_saver), call_mode)

    assert len(out["messages"]) == 3 * TURNS
    assert len(out["summarized"]) == len({*out["summarized"]}) == out["summary"]["count"]
    assert max(count_summarised_questions(summariser)) == 1


def test_parallel_siblings_merge_their_summaries(
    file_saver: SQLiteCheckpointer, call_mode: str
) -> None:
    """Both may extend the summary in one step. No message is lost."""
    summariser = make_answering_model("summary")
    builder = StateGraph(SummaryState)
    for name in ("first", "second"):
        builder.add_node(name, make_agent(summariser, name=name))
        builder.add_edge(START, name)
    out = run_turns(builder.compile(checkpointer=file_saver), call_mode)

    assert len(out["messages"]) == 3 * TURNS
    assert len(out["summarized"]) == len({*out["summarized"]}) == out["summary"]["count"]
    assert max(count_summarised_questions(summariser)) <= 2  # by each of the two


@pytest.mark.parametrize("form", ["summarize", "view", "assemble"])
def test_parent_hides_messages_summarised_in_subgraph(
    form: str, file_saver: SQLiteCheckpointer
) -> None:
    """All messages are still in the state of the parent.

    The summary replaces the old ones in the request.
    """
    summariser = make_answering_model("summary")
    state = run_turns(make_parent_graph(make_agent(summariser), saver=file_saver), "sync", 4)
    summary = make_summarize_node(summariser)
    parts = {"summarize": summary, "view": view(summary), "assemble": assemble(1_000)}
    before = len(summariser.requests)
    shown = parts[form](state)

    hidden = len(state["summarized"])
    assert 0 < hidden < len(state["messages"])
    assert list_texts(shown[1:]) == list_texts(state["messages"][hidden:])
    assert state["summary"]["text"] in shown[0].text
    assert len(summariser.requests) == before


def test_summary_in_parent_removes_messages_summarised_in_subgraph(
    file_saver: SQLiteCheckpointer,
) -> None:
    summariser = make_answering_model("summary")
    graph = make_parent_graph(
        make_agent(summariser), make_summarize_node(summariser), saver=file_saver
    )
    out = run_turns(graph, "sync", 4)

    assert list_texts(out["messages"]) == ["question 4", "answer 4"]
    assert out["summary"]["count"] == len(out["summarized"]) == 6
    assert max(count_summarised_questions(summariser)) == 1


def test_edited_summarised_message_is_shown_and_summarised_once(
    file_saver: SQLiteCheckpointer,
) -> None:
    summariser = make_answering_model("summary")
    graph = make_parent_graph(make_agent(summariser), saver=file_saver)
    first = run_turns(graph, "sync", 3)["messages"][0]
    edited = HumanMessage("question 1, corrected", id=first.id)
    graph.update_state(THREAD, {"messages": [edited]}, as_node="subgraph0")
    shown = make_summarize_node(summariser)(graph.get_state(THREAD).values)
    out = run_turns(graph, "sync", 3)

    assert list_texts(shown)[1] == "question 1, corrected"
    request_texts = [str(request[-1].content) for request in summariser.requests]
    assert sum("question 1, corrected" in text for text in request_texts) == 1
    assert out["summary"]["count"] == len(out["summarized"]) == len({*out["summarized"]})


def test_messages_sent_again_with_same_ids_are_not_summarised_twice(
    file_saver: SQLiteCheckpointer,
) -> None:
    summariser = make_answering_model("summary")
    graph, sent = make_plain_graph(summariser, checkpointer=file_saver), list[AnyMessage]()
    for number in range(1, TURNS + 1):
        sent.append(HumanMessage(f"question {number}", id=f"q{number}"))
        out = graph.invoke({"messages": sent}, THREAD)
        sent.append(out["messages"][-1])

    assert max(count_summarised_questions(summariser)) == 1
    assert out["summary"]["count"] == len(out["summarized"]) == len({*out["summarized"]})


def test_cleared_summary_hides_no_messages() -> None:
    """The ids of summarised messages may still be in the state."""
    summary = make_summarize_node(make_answering_model("summary"))
    state = {
        "messages": make_turns(4),
        "summary": None,
        "summarized": [m.id for m in make_turns(4)],
    }

    assert list_texts(summary(state)) == list_texts(make_turns(4))
    assert summary.invoke(state)["summary"]["count"] == 6


def test_fork_and_replay_summarise_each_message_once(file_saver: SQLiteCheckpointer) -> None:
    summariser = make_answering_model("summary")
    graph = make_parent_graph(make_agent(summariser), saver=file_saver)
    run_turns(graph, "sync", 3)
    middle = graph.get_state(THREAD).config
    first = run_turns(graph, "sync", 2)
    forked = graph.invoke({"messages": [HumanMessage("another")]}, middle)
    replayed = graph.invoke(None, middle)

    for out in (first, forked, replayed):
        ids = [message.id for message in out["messages"]]
        assert out["summarized"] == ids[: len(out["summarized"])]
        assert out["summary"]["count"] == len(out["summarized"])


class StateWithAddReducer(TypedDict, total=False):
    """A user's state whose reducer of ids is `operator.add`."""

    messages: Annotated[list[AnyMessage], add_messages]
    summary: dict[str, Any]
    summarized: Annotated[list[str], operator.add]


def test_state_with_add_reducer_works_and_warns_in_subgraph(
    file_saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """In one graph the ids are stored once. If a subgraph repeats them, one warning is logged."""
    summariser = make_answering_model("summary")
    builder = StateGraph(StateWithAddReducer)
    builder.add_node("reply", lambda state: {"messages": [AIMessage("answer")]})
    builder.add_node("summarize", make_summarize_node(summariser))
    builder.add_edge(START, "reply").add_edge("reply", "summarize")
    out = run_turns(builder.compile(checkpointer=file_saver), "sync")
    assert len(out["summarized"]) == len({*out["summarized"]}) == out["summary"]["count"]
    assert max(count_summarised_questions(summariser)) == 1

    nested_summariser = make_answering_model("summary")
    graph = make_parent_graph(
        builder.compile(), make_agent(nested_summariser), state=StateWithAddReducer
    )
    with caplog.at_level(logging.WARNING, "perdure"):
        state: Any = {}
        for number in range(1, 5):
            messages = [*state.get("messages", []), HumanMessage(f"question {number}")]
            state = graph.invoke({**state, "messages": messages})
    assert max(count_summarised_questions(nested_summariser)) <= 1
    assert state["summary"]["count"] == len({*state["summarized"]})
    warnings = [record.message for record in caplog.records if "operator.add" in record.message]
    assert len(warnings) == 1
    assert "append_new" in warnings[0]


# -- reducers


def test_append_new_appends_unknown_ids_in_order() -> None:
    """Duplicates in the existing list are removed, and invalid values are refused."""
    assert append_new(["a", "b"], ["b", "c", "a", "d"]) == ["a", "b", "c", "d"]
    assert append_new(None, ["b", "a", "b"]) == ["b", "a"]
    assert append_new(["a", "b", "a"], []) == ["a", "b"]
    assert append_new(["a"], None) == ["a"]
    for wrong in ("abc", b"abc", 7):
        with pytest.raises(InvalidUpdate, match="expected a list of ids"):
            append_new(["a"], wrong)
        with pytest.raises(InvalidUpdate, match="expected a list of ids"):
            append_new(wrong, ["a"])
    with pytest.raises(InvalidUpdate, match="unhashable"):
        append_new(["a"], [["b"]])


def test_merge_keeps_extended_summary_and_joins_rivals() -> None:
    """A summary that covers more messages replaces the other one, in either order."""

    def make_summary(text: str, *digests: str) -> dict[str, Any]:
        return {"text": text, "last": digests[-1], "count": len(digests), "digests": [*digests]}

    old, new, rival = (
        make_summary("old", "a"),
        make_summary("new", "a", "b"),
        make_summary("rival", "a", "c"),
    )

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
