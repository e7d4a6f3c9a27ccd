"""A summariser that is down: it is asked once a turn, however many model calls the turn has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command, interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import SummaryFailed
from perdure.memory import MemoryMiddleware, remember_turns, summarize
from perdure.memory import failed_turns as failed_turns_module
from perdure.memory.model_call import ModelCall
from perdure.memory.summary import Summarize, SummaryState
from tests.memory.fake_models import FakeModel, make_failing_model, make_tool_calling_model
from tests.memory.summaries import make_turns

CALLS = 5  # of a tool, in each turn
ATTEMPTS = 2  # the first and one retry


@tool
def look(what: str) -> str:
    """Look something up."""
    return f"{what} is found"


@tool
def ask(what: str) -> str:
    """Ask the user."""
    return str(interrupt(what))


def summary_by(scribe: FakeModel, **options: Any) -> Summarize:
    """Return a node whose model is asked twice in an attempt."""
    call = ModelCall(scribe, retries=ATTEMPTS - 1, backoff_s=0.0)
    return summarize(call, trigger=("messages", 4), keep=("messages", 1), **options)


def agent_of(scribe: FakeModel, saver: Any, called: Any = look) -> Any:
    """Return an agent that calls a tool in a loop, with a middleware that summarises."""
    middleware = [MemoryMiddleware(summary_by(scribe))]
    model = make_tool_calling_model(CALLS, called.name)
    return create_agent(model, [called], middleware=middleware, checkpointer=saver)


def loop_of(scribe: FakeModel, saver: Any, called: Any = look) -> Any:
    """Return a graph that calls a tool in a loop, with a node that summarises in each round."""
    model = make_tool_calling_model(CALLS, called.name)

    def respond(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def call(state: Any) -> Any:
        calls = state["messages"][-1].tool_calls
        return {"messages": [called.invoke({**each, "type": "tool_call"}) for each in calls]}

    builder = StateGraph(SummaryState)
    builder.add_node("summarize", summary_by(scribe)).add_node("respond", respond)
    builder.add_node("call", call)
    builder.add_edge(START, "summarize").add_edge("summarize", "respond")
    goes = lambda state: "call" if state["messages"][-1].tool_calls else END  # noqa: E731
    builder.add_conditional_edges("respond", goes, ["call", END])
    builder.add_edge("call", "summarize")
    return builder.compile(checkpointer=saver)


def config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}, "recursion_limit": 100}


def says(graph: Any, given: Any, thread: str, call_mode: str = "sync") -> Any:
    """Return the state after a run."""
    if call_mode == "sync":
        return graph.invoke(given, config(thread))
    return asyncio.run(graph.ainvoke(given, config(thread)))


Make = Callable[..., Any]
both = pytest.mark.parametrize("make", [agent_of, loop_of])


@both
@pytest.mark.parametrize("asks_by", ["id", "no id"])
def test_a_summariser_that_is_down_is_asked_once_a_turn(
    make: Make, asks_by: str, call_mode: str, file_saver: SQLiteCheckpointer
) -> None:
    """With its retries. The next turn tries again, and the state has no trace of it."""
    scribe = make_failing_model()
    graph = make(scribe, file_saver)
    before: list[AnyMessage] = make_turns(3)
    for number in range(1, 4):
        uid = f"new{number}" if asks_by == "id" else None
        out = says(graph, {"messages": [*before, HumanMessage("go", id=uid)]}, "t", call_mode)
        before = []
        assert len(scribe.requests) == number * ATTEMPTS

    assert out["messages"][-1].text == "done"
    assert {*out} <= {"messages", "summary", "summarized"}
    assert not out.get("summary")
    stored = file_saver.get_tuple(config("t"))
    assert stored is not None
    assert "failed" not in str(sorted(stored.checkpoint["channel_values"]))


@both
def test_a_summariser_that_works_again_is_asked_in_the_next_turn(make: Make) -> None:
    """And then summarises all that was left."""
    down = {"is": True}

    def reply(messages: Any) -> str:
        if down["is"]:
            raise ConnectionError("down")
        return "the summary"

    scribe = FakeModel(reply=reply)
    graph = make(scribe, InMemorySaver())
    says(graph, {"messages": [*make_turns(3), HumanMessage("go")]}, "t")
    down["is"] = False
    out = says(graph, {"messages": [HumanMessage("go on")]}, "t")

    assert out["summary"]["text"] == "the summary"
    assert "q1" in str(scribe.requests[ATTEMPTS][-1].content)


@both
def test_a_resumed_turn_does_not_ask_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each resume is another run, and the same turn. After ten minutes it may try again."""
    scribe = make_failing_model()
    graph = make(scribe, InMemorySaver(), ask)
    says(graph, {"messages": [*make_turns(3), HumanMessage("go")]}, "t")
    for _ in range(CALLS - 1):
        says(graph, Command(resume="yes"), "t")
    assert len(scribe.requests) == ATTEMPTS

    monkeypatch.setattr(failed_turns_module, "_RETRY_S", 0.0)
    out = says(graph, Command(resume="yes"), "t")
    assert out["messages"][-1].text == "done"
    assert len(scribe.requests) == 2 * ATTEMPTS


@both
def test_threads_do_not_influence_one_another(make: Make) -> None:
    """The turns of ten threads at once, whose questions have the same ids, ask once each."""
    scribe = make_failing_model()
    graph = make(scribe, InMemorySaver())

    async def run_all() -> None:
        given = {"messages": [*make_turns(3), HumanMessage("go", id="go")]}
        await asyncio.gather(*(graph.ainvoke(given, config(str(n))) for n in range(10)))

    asyncio.run(run_all())
    assert len(scribe.requests) == 10 * ATTEMPTS


@both
def test_without_a_thread_or_a_question_a_run_is_a_turn(make: Make) -> None:
    """Runs without a checkpointer, and runs that begin without a human message, ask once each."""
    scribe = make_failing_model()
    given = {"messages": [*make_turns(3), HumanMessage("go", id="go")]}
    for number in range(1, 3):
        make(scribe, None).invoke(given, {"recursion_limit": 100})
        assert len(scribe.requests) == number * ATTEMPTS

    graph = make(make_failing_model(), None)
    no_question: list[AnyMessage] = [AIMessage(f"note {n}", id=f"n{n}") for n in range(6)]
    for _ in range(2):
        graph.invoke({"messages": no_question}, {"recursion_limit": 100})


def test_a_failure_that_is_raised_is_tried_again_by_a_resume(
    file_saver: SQLiteCheckpointer,
) -> None:
    """With `on_failure="raise"` the run ends, so whoever resumes it wants another attempt."""
    scribe = make_failing_model()
    builder = StateGraph(SummaryState)
    builder.add_node("summarize", summary_by(scribe, on_failure="raise"))
    builder.add_edge(START, "summarize")
    graph = builder.compile(checkpointer=file_saver)
    for given in ({"messages": make_turns(3)}, None):
        with pytest.raises(SummaryFailed):
            says(graph, given, "t")

    assert len(scribe.requests) == 2 * ATTEMPTS


def test_a_list_in_a_node_is_summarised_by_the_same_rule() -> None:
    """A node that shows `summary(messages)` to a model, in a loop, asks once a turn."""
    scribe = make_failing_model()
    summary = summary_by(scribe)

    def respond(state: Any) -> Any:
        summary(state["messages"])
        return {"messages": [AIMessage("a")]}

    builder = StateGraph(SummaryState).add_node("respond", respond).add_edge(START, "respond")
    goes = lambda state: END if len(state["messages"]) > 12 else "respond"  # noqa: E731
    builder.add_conditional_edges("respond", goes, ["respond", END])
    graph = builder.compile()
    graph.invoke({"messages": make_turns(3)})
    assert len(scribe.requests) == ATTEMPTS

    for _ in range(2):  # outside of a run there is no turn
        summary(make_turns(3))
    assert len(scribe.requests) == 3 * ATTEMPTS


def test_a_store_that_is_down_is_asked_once_a_turn() -> None:
    """Nothing is removed before it is remembered, so the summary waits for the next turn too."""

    class Down(InMemoryStore):
        calls = 0

        def batch(self, ops: Any) -> Any:
            Down.calls += 1
            raise ConnectionError("the store is down")

    scribe = make_failing_model()
    middleware = MemoryMiddleware(remember_turns(Down(), namespace=("m",)), summary_by(scribe))
    agent: Any = create_agent(make_tool_calling_model(CALLS), [look], middleware=[middleware])
    given: Any = {"messages": [*make_turns(3), HumanMessage("go")]}
    agent.invoke(given, config("t"))

    assert Down.calls == 2  # before the summary, and at the end of the run
    assert scribe.requests == []
