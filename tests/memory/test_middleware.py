"""The nodes as a middleware of langchain's agents, in a real agent with tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.messages.utils import convert_to_messages
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import StructuredTool, tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph

from perdure import SQLiteCheckpointer, SQLiteStore
from perdure.errors import BudgetExceeded, ConfigurationError
from perdure.memory import (
    Instructions,
    clear_tool_outputs,
    remember_turns,
    summarize,
    token_counter,
    trim,
    update_instructions,
    view,
)
from perdure.memory.middleware import MemoryMiddleware, MemoryState
from perdure.memory.nodes import MessagesNode
from perdure.memory.tokens import TokenCounter
from tests.memory.conversations import Talk, comparison_keys, conversations
from tests.openai_server import Answer, OpenAIServer

THREAD: Any = {"configurable": {"thread_id": "t"}}


@tool
def look(what: str) -> str:
    """Look something up."""
    return f"{what} is found"


def client(server: OpenAIServer) -> ChatOpenAI:
    return ChatOpenAI(model="scripted", base_url=server.base_url, api_key="any")  # type: ignore[arg-type]


def says(text: str) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


def test_a_view_cuts_what_the_model_is_shown_and_leaves_the_state(tmp_path: Path) -> None:
    """The agent's own system prompt stays first."""
    with (
        OpenAIServer(["a0", "a1", "a2"]) as server,
        SQLiteCheckpointer.open(tmp_path / "a") as saver,
    ):
        agent: Any = create_agent(
            client(server),
            [look],
            system_prompt="Be kind.",
            middleware=[MemoryMiddleware(trim(max_tokens=4, token_counter=len))],
            checkpointer=saver,
        )
        for n in range(3):
            out = agent.invoke(says(f"q{n}"), THREAD)
    assert server.shown() == [
        ("system", "Be kind."), ("user", "q1"), ("assistant", "a1"), ("user", "q2"),
    ]  # fmt: skip
    assert [m.text for m in out["messages"]] == ["q0", "a0", "q1", "a1", "q2", "a2"]


@pytest.mark.parametrize("form", ["nodes", "view", "view in a view"])
@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_a_summary_shortens_the_state_and_is_shown(
    tmp_path: Path, call_mode: str, form: str
) -> None:
    """The summariser is asked before the model; history keeps what it stands for.

    A view stands for its parts: it summarises too.
    """
    replies = ["a0", "a1", "Two questions were asked.", "a2"]
    with OpenAIServer(replies) as server, SQLiteCheckpointer.open(tmp_path / "a") as saver:
        model = client(server)
        nodes: list[MessagesNode] = [
            summarize(model, trigger=("messages", 5), keep=("messages", 1)),
            trim(max_tokens=9, token_counter=len),
        ]
        if form != "nodes":
            nodes = [view(*nodes)] if form == "view" else [view(view(nodes[0]), nodes[1])]
        agent: Any = create_agent(
            model, [look], middleware=[MemoryMiddleware(*nodes)], checkpointer=saver
        )
        for n in range(3):
            if call_mode == "sync":
                out = agent.invoke(says(f"q{n}"), THREAD)
            else:
                out = asyncio.run(agent.ainvoke(says(f"q{n}"), THREAD))
        said = [item.value.text for item in saver.history("t")]
    assert out["summary"]["text"] == "Two questions were asked."
    assert [m.text for m in out["messages"]] == ["q2", "a2"]
    assert said == ["q0", "a0", "q1", "a1", "q2", "a2"]
    [(role, system), question] = server.shown()
    assert role == "system"
    assert system.endswith("Two questions were asked.")
    assert question == ("user", "q2")


def sums_up(_: Any) -> AIMessage:
    return AIMessage("They spoke of trains.")


@given(conversations())
def test_only_a_summary_changes_the_thread(talk: Talk) -> None:
    """As a node of its own would; what only shows leaves the state as it is."""
    summary = summarize(RunnableLambda(sums_up), trigger=("messages", 4), keep=("messages", 1))
    shows = clear_tool_outputs(keep=0, min_tokens=50), trim(max_tokens=3, token_counter=len)
    middleware = MemoryMiddleware(shows[0], summary, shows[1])
    expected = through_a_graph(summary, talk)
    left = through_a_graph(lambda state: middleware.before_model(state, None), talk)
    unchanged = MemoryMiddleware(*shows)

    assert comparison_keys(left["messages"]) == comparison_keys(expected["messages"])
    assert left.get("summary") == expected.get("summary")
    assert unchanged.before_model({"messages": talk}, None) is None


def through_a_graph(step: Any, talk: Talk) -> Any:
    """What a state is after a step of a graph with the real reducers; its messages are copies."""
    builder = StateGraph(MemoryState).add_node("step", step).add_edge(START, "step")
    given = [message.model_copy(deep=True) for message in talk]
    return builder.compile().invoke({"messages": given})


# -- tools


def fat(name: str) -> StructuredTool:
    """A tool whose schema takes some 300 tokens."""
    about = "It finds what is asked for, wherever it may be. " * 25
    return StructuredTool.from_function(lambda what: what, name=name, description=about)


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_the_budget_holds_with_the_agents_tools(call_mode: str) -> None:
    """`trim` was not told of them; with fewer tools in a request, more messages are shown."""
    tools = [fat(f"look{n}") for n in range(4)]
    counter = token_counter(None)
    talk = [HumanMessage(f"Question {n}: " + "which train? " * 10) for n in range(90)]

    def sent(tools: list[Any], budget: int) -> tuple[int, int]:
        with OpenAIServer(["done"]) as server:
            memory = MemoryMiddleware(trim(max_tokens=budget, token_counter=counter))
            agent: Any = create_agent(client(server), tools, middleware=[memory])
            given: Any = {"messages": talk}
            if call_mode == "sync":
                agent.invoke(given)
            else:
                asyncio.run(agent.ainvoke(given))
            body = server.requests[-1]
        messages = convert_to_messages(body["messages"])
        schemas = counter.count_tools(body.get("tools", []))
        return len(messages), counter.request_overhead + schemas + sum(
            map(counter.count_message, messages)
        )

    assert counter.count_tools(tools) > 1_000
    for some in (tools, tools[:1], []):
        count, tokens = sent(some, 1_800)
        assert 1_700 < tokens <= 1_800
        assert count < len(talk)
    with pytest.raises(BudgetExceeded, match=r"max_tokens is 500 .*with its tools"):
        sent(tools, 500)


def test_tools_are_counted_once_for_all_calls_with_the_same() -> None:
    """A turn must not cost the schemas of all tools again; other tools are counted anew."""
    counter = Counting()
    memory = MemoryMiddleware(trim(max_tokens=4_000, token_counter=counter))
    one, other = fat("one"), fat("other")
    with OpenAIServer(["a0", "a1", "a2"]) as server:
        agent: Any = create_agent(client(server), [one, other], middleware=[memory])
        for n in range(2):
            agent.invoke(says(f"q{n}"))
        create_agent(client(server), [other], middleware=[memory]).invoke(says("q2"))
    assert counter.counted == [["one", "other"], ["other"]]


class Counting(TokenCounter):
    """A counter that notes for which tools it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[list[str]] = []

    def count_tools(self, tools: Any) -> int:
        if tools:
            self.counted.append([each.name for each in tools])
        return super().count_tools(tools)

    def scale_to_usage(self, messages: Any) -> Any:
        return self


# -- instructions


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_reflection_runs_when_the_agent_is_done(call_mode: str) -> None:
    """It learns from the answer and from feedback on this run, which the next run has not."""
    rule = "<instructions>Be kind. Give times in 24 hours.</instructions>"
    asked: list[str] = []

    def replies(body: dict[str, Any]) -> str:
        told = str(body["messages"][-1]["content"])
        if "<conversation>" in told:
            asked.append(told)
            return rule
        return "At 14:05."

    with SQLiteStore.open(":memory:", index=None) as store, OpenAIServer(replies) as server:
        instructions = Instructions(store, default="Be kind.")
        learns = update_instructions(client(server), instructions)
        agent: Any = create_agent(client(server), [look], middleware=[MemoryMiddleware(learns)])
        for more in ({"feedback": "no am and pm"}, {}):
            given: Any = {**says("When?"), **more}
            out = agent.invoke(given) if call_mode == "sync" else asyncio.run(agent.ainvoke(given))
        learned = instructions.current().text

    assert learned == "Be kind. Give times in 24 hours."
    assert [m.text for m in out["messages"]] == ["When?", "At 14:05."]
    assert "At 14:05." in asked[0]
    assert ["no am and pm" in told for told in asked] == [True, False]


@pytest.mark.parametrize("call_mode", ["sync", "async"])
@pytest.mark.parametrize("part", [trim(4_000), clear_tool_outputs()], ids=["trim", "clearing"])
@pytest.mark.parametrize("start", [[], [SystemMessage("7 o'clock")], [AIMessage("Reminder")]])
def test_an_agent_that_nobody_asked_sees_its_calls(start: Any, part: Any, call_mode: str) -> None:
    """A scheduled agent ends, and a user can ask it about its work afterwards."""

    def replies(body: dict[str, Any]) -> Any:
        if any(message["role"] == "tool" for message in body["messages"]):
            return "Two new mails."
        function = {"name": "look", "arguments": '{"what": "mail"}'}
        call = {"id": "c1", "type": "function", "function": function}
        return Answer({"content": None, "tool_calls": [call]}, "tool_calls")

    with OpenAIServer(replies) as server:
        agent: Any = create_agent(
            client(server),
            [look],
            system_prompt="Check the mail.",
            middleware=[MemoryMiddleware(part)],
            checkpointer=InMemorySaver(),
        )
        for new in (start, [HumanMessage("How many?")]):
            given = {"messages": new}, {**THREAD, "recursion_limit": 9}
            if call_mode == "sync":
                agent.invoke(*given)
            else:
                asyncio.run(agent.ainvoke(*given))

    assert len(server.requests) == 3
    assert ("tool", "mail is found") in server.shown(1)
    assert ("tool", "mail is found") in server.shown(2)


def test_a_memory_without_parts_says_what_to_pass() -> None:
    """A part that was forgotten is no None that somebody passed."""
    with pytest.raises(ConfigurationError) as caught:
        MemoryMiddleware()

    assert "MemoryMiddleware() has no parts; expected parts such as trim(" in str(caught.value)


def test_what_is_no_node_is_refused() -> None:
    """Before there is an agent."""
    for nodes in ((), (print,)):
        with pytest.raises(ConfigurationError, match="expected parts such as"):
            MemoryMiddleware(*nodes)


def test_nothing_is_removed_before_it_is_remembered(tmp_path: Path) -> None:
    """A store that fails at the end of a run, and at the next one's beginning, loses no turn."""
    with SQLiteStore.open(tmp_path / "m.db") as store, OpenAIServer(["yes"] * 4) as server:
        summary = summarize(RunnableLambda(sums_up), trigger=("messages", 2), keep=("messages", 1))
        middleware = MemoryMiddleware(remember_turns(store), summary)
        agent = create_agent(
            client(server),
            middleware=[middleware],
            checkpointer=InMemorySaver(),
        )
        config: Any = {"configurable": {"thread_id": "t", "user_id": "ann"}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "abatch", None)
            patch.setattr(store, "batch", None)
            agent.invoke({"messages": [HumanMessage("I like tea.")]}, config)
            agent.invoke({"messages": [HumanMessage("I like figs.")]}, config)
        agent.invoke({"messages": [HumanMessage("I like pears.")]}, config)
        found = {item.value["text"] for item in store.search(("memories", "ann"), limit=20)}

    assert {"user: I like tea.", "user: I like figs.", "user: I like pears."} <= found
