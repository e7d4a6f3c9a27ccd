"""A failing summariser is asked once a turn, however many model calls the turn has."""

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
from perdure.memory.model_call import ModelCall
from perdure.memory.short_term import failed_turns as failed_turns_module
from perdure.memory.short_term.summary import Summarize, SummaryState
from tests.memory.fake_models import FakeModel, make_failing_model, make_tool_calling_model
from tests.memory.summaries import make_turns

CALLS = 5  # tool calls in each turn
ATTEMPTS = 2  # requests per attempt to summarise: the first and one retry


@tool
def look(what: str) -> str:
    """Look something up."""
    return f"{what} is found"


@tool
def ask(what: str) -> str:
    """Ask the user."""
    return str(interrupt(what))


def make_summarize_node(summariser: FakeModel, **options: Any) -> Summarize:
    """Return a node whose model is asked twice in an attempt."""
    call = ModelCall(summariser, retries=ATTEMPTS - 1, backoff_s=0.0)
    return summarize(call, trigger=("messages", 4), keep=("messages", 1), **options)


def make_agent(summariser: FakeModel, saver: Any, tool_to_call: Any = look) -> Any:
    """Return an agent that calls a tool in a loop, with a middleware that summarises."""
    middleware = [MemoryMiddleware(make_summarize_node(summariser))]
    model = make_tool_calling_model(CALLS, tool_to_call.name)
    return create_agent(model, [tool_to_call], middleware=middleware, checkpointer=saver)


def make_tool_loop_graph(summariser: FakeModel, saver: Any, tool_to_call: Any = look) -> Any:
    """Return a graph that calls a tool in a loop, with a node that summarises in each round."""
    model = make_tool_calling_model(CALLS, tool_to_call.name)

    def respond(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def call(state: Any) -> Any:
        calls = state["messages"][-1].tool_calls
        return {
            "messages": [
                tool_to_call.invoke({**tool_call, "type": "tool_call"}) for tool_call in calls
            ]
        }

    builder = StateGraph(SummaryState)
    builder.add_node("summarize", make_summarize_node(summariser)).add_node("respond", respond)
    builder.add_node("call", call)
    builder.add_edge(START, "summarize").add_edge("summarize", "respond")
    choose_next_node = lambda state: "call" if state["messages"][-1].tool_calls else END  # noqa: E731
    builder.add_conditional_edges("respond", choose_next_node, ["call", END])
    builder.add_edge("call", "summarize")
    return builder.compile(checkpointer=saver)


def make_config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}, "recursion_limit": 100}


def run_turn(graph: Any, input: Any, thread: str, call_mode: str = "sync") -> Any:
    """Return the state after a run."""
    if call_mode == "sync":
        return graph.invoke(input, make_config(thread))
    return asyncio.run(graph.ainvoke(input, make_config(thread)))


MakeGraph = Callable[..., Any]
with_agent_and_graph = pytest.mark.parametrize("make_graph", [make_agent, make_tool_loop_graph])


@with_agent_and_graph
@pytest.mark.parametrize("question_ids", ["id", "no id"])
def test_failing_summariser_is_asked_once_per_turn(
    make_graph: MakeGraph, question_ids: str, call_mode: str, file_saver: SQLiteCheckpointer
) -> None:
    """Its retries belong to the same attempt.

    The next turn tries again, and the state has no trace of the failure.
    """
    summariser = make_failing_model()
    graph = make_graph(summariser, file_saver)
    before: list[AnyMessage] = make_turns(3)
    for number in range(1, 4):
        uid = f"new{number}" if question_ids == "id" else None
        out = run_turn(graph, {"messages": [*before, HumanMessage("go", id=uid)]}, "t", call_mode)
        before = []
        assert len(summariser.requests) == number * ATTEMPTS

    assert out["messages"][-1].text == "done"
    assert {*out} <= {"messages", "summary", "summarized"}
    assert not out.get("summary")
    stored = file_saver.get_tuple(make_config("t"))
    assert stored is not None
    assert "failed" not in str(sorted(stored.checkpoint["channel_values"]))


@with_agent_and_graph
def test_recovered_summariser_summarises_all_messages_in_next_turn(make_graph: MakeGraph) -> None:
    down = {"is": True}

    def reply(messages: Any) -> str:
        if down["is"]:
            raise ConnectionError("down")
        return "the summary"

    summariser = FakeModel(reply=reply)
    graph = make_graph(summariser, InMemorySaver())
    run_turn(graph, {"messages": [*make_turns(3), HumanMessage("go")]}, "t")
    down["is"] = False
    out = run_turn(graph, {"messages": [HumanMessage("go on")]}, "t")

    assert out["summary"]["text"] == "the summary"
    assert "q1" in str(summariser.requests[ATTEMPTS][-1].content)


@with_agent_and_graph
def test_resumed_turn_does_not_ask_failed_summariser_again(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each resume is another run of the same turn. After ten minutes, the turn may try again."""
    summariser = make_failing_model()
    graph = make_graph(summariser, InMemorySaver(), ask)
    run_turn(graph, {"messages": [*make_turns(3), HumanMessage("go")]}, "t")
    for _ in range(CALLS - 1):
        run_turn(graph, Command(resume="yes"), "t")
    assert len(summariser.requests) == ATTEMPTS

    monkeypatch.setattr(failed_turns_module, "_RETRY_S", 0.0)
    out = run_turn(graph, Command(resume="yes"), "t")
    assert out["messages"][-1].text == "done"
    assert len(summariser.requests) == 2 * ATTEMPTS


@with_agent_and_graph
def test_failed_summaries_are_counted_per_thread(make_graph: MakeGraph) -> None:
    """Ten threads run at the same time, and their questions have the same ids."""
    summariser = make_failing_model()
    graph = make_graph(summariser, InMemorySaver())

    async def run_all() -> None:
        input = {"messages": [*make_turns(3), HumanMessage("go", id="go")]}
        await asyncio.gather(*(graph.ainvoke(input, make_config(str(n))) for n in range(10)))

    asyncio.run(run_all())
    assert len(summariser.requests) == 10 * ATTEMPTS


@with_agent_and_graph
def test_run_without_thread_or_question_counts_as_one_turn(make_graph: MakeGraph) -> None:
    summariser = make_failing_model()
    input = {"messages": [*make_turns(3), HumanMessage("go", id="go")]}
    for number in range(1, 3):
        make_graph(summariser, None).invoke(input, {"recursion_limit": 100})
        assert len(summariser.requests) == number * ATTEMPTS

    graph = make_graph(make_failing_model(), None)
    no_question: list[AnyMessage] = [AIMessage(f"note {n}", id=f"n{n}") for n in range(6)]
    for _ in range(2):
        graph.invoke({"messages": no_question}, {"recursion_limit": 100})


def test_resume_after_raised_failure_tries_again(
    file_saver: SQLiteCheckpointer,
) -> None:
    """With `on_failure="raise"` the run ends, so a resume is a wish for another attempt."""
    summariser = make_failing_model()
    builder = StateGraph(SummaryState)
    builder.add_node("summarize", make_summarize_node(summariser, on_failure="raise"))
    builder.add_edge(START, "summarize")
    graph = builder.compile(checkpointer=file_saver)
    for input in ({"messages": make_turns(3)}, None):
        with pytest.raises(SummaryFailed):
            run_turn(graph, input, "t")

    assert len(summariser.requests) == 2 * ATTEMPTS


def test_message_list_in_node_asks_failed_summariser_once_per_turn() -> None:
    """Outside a run there is no turn, so each call asks."""
    summariser = make_failing_model()
    summary = make_summarize_node(summariser)

    def respond(state: Any) -> Any:
        summary(state["messages"])
        return {"messages": [AIMessage("a")]}

    builder = StateGraph(SummaryState).add_node("respond", respond).add_edge(START, "respond")
    choose_next_node = lambda state: END if len(state["messages"]) > 12 else "respond"  # noqa: E731
    builder.add_conditional_edges("respond", choose_next_node, ["respond", END])
    graph = builder.compile()
    graph.invoke({"messages": make_turns(3)})
    assert len(summariser.requests) == ATTEMPTS

    for _ in range(2):  # outside of a run there is no turn
        summary(make_turns(3))
    assert len(summariser.requests) == 3 * ATTEMPTS


def test_failing_store_of_learner_is_asked_once_per_turn() -> None:
    """No message is removed before it is remembered, so the summary waits for the next turn."""

    class Down(InMemoryStore):
        calls = 0

        def batch(self, ops: Any) -> Any:
            Down.calls += 1
            raise ConnectionError("the store is down")

    summariser = make_failing_model()
    middleware = MemoryMiddleware(
        remember_turns(Down(), namespace=("m",)), make_summarize_node(summariser)
    )
    agent: Any = create_agent(make_tool_calling_model(CALLS), [look], middleware=[middleware])
    input: Any = {"messages": [*make_turns(3), HumanMessage("go")]}
    agent.invoke(input, make_config("t"))

    assert Down.calls == 2  # before the summary, and at the end of the run
    assert summariser.requests == []
