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
from perdure.memory.short_term.tokens import TokenCounter
from tests.memory.conversations import Talk, comparison_keys, conversations
from tests.openai_server import Answer, OpenAIServer

THREAD: Any = {"configurable": {"thread_id": "t"}}


@tool
def look(what: str) -> str:
    """Look something up."""
    return f"{what} is found"


def make_client(server: OpenAIServer) -> ChatOpenAI:
    return ChatOpenAI(model="scripted", base_url=server.base_url, api_key="any")  # type: ignore[arg-type]


def build_user_input(text: str) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


def test_trim_middleware_cuts_the_request_and_not_the_state(tmp_path: Path) -> None:
    """The agent's own system prompt stays first."""
    with (
        OpenAIServer(["a0", "a1", "a2"]) as server,
        SQLiteCheckpointer.open(tmp_path / "a") as saver,
    ):
        agent: Any = create_agent(
            make_client(server),
            [look],
            system_prompt="Be kind.",
            middleware=[MemoryMiddleware(trim(max_tokens=4, token_counter=len))],
            checkpointer=saver,
        )
        for n in range(3):
            output = agent.invoke(build_user_input(f"q{n}"), THREAD)
    assert server.shown() == [
        ("system", "Be kind."), ("user", "q1"), ("assistant", "a1"), ("user", "q2"),
    ]  # fmt: skip
    assert [m.text for m in output["messages"]] == ["q0", "a0", "q1", "a1", "q2", "a2"]


@pytest.mark.parametrize("form", ["nodes", "view", "view in a view"])
@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_summary_middleware_shortens_the_state_and_shows_the_summary(
    tmp_path: Path, call_mode: str, form: str
) -> None:
    """The history keeps the summarized messages. A view that contains the node summarizes too."""
    replies = ["a0", "a1", "Two questions were asked.", "a2"]
    with OpenAIServer(replies) as server, SQLiteCheckpointer.open(tmp_path / "a") as saver:
        model = make_client(server)
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
                output = agent.invoke(build_user_input(f"q{n}"), THREAD)
            else:
                output = asyncio.run(agent.ainvoke(build_user_input(f"q{n}"), THREAD))
        history = [item.value.text for item in saver.history("t")]
    assert output["summary"]["text"] == "Two questions were asked."
    assert [m.text for m in output["messages"]] == ["q2", "a2"]
    assert history == ["q0", "a0", "q1", "a1", "q2", "a2"]
    [(role, system), question] = server.shown()
    assert role == "system"
    assert system.endswith("Two questions were asked.")
    assert question == ("user", "q2")


def summarize_trains(_: Any) -> AIMessage:
    return AIMessage("They spoke of trains.")


@given(conversations())
def test_middleware_changes_the_state_only_by_a_summary(talk: Talk) -> None:
    summary = summarize(
        RunnableLambda(summarize_trains), trigger=("messages", 4), keep=("messages", 1)
    )
    view_nodes = clear_tool_outputs(keep=0, min_tokens=50), trim(max_tokens=3, token_counter=len)
    middleware = MemoryMiddleware(view_nodes[0], summary, view_nodes[1])
    expected = run_in_graph(summary, talk)
    result = run_in_graph(lambda state: middleware.before_model(state, None), talk)
    unchanged = MemoryMiddleware(*view_nodes)

    assert comparison_keys(result["messages"]) == comparison_keys(expected["messages"])
    assert result.get("summary") == expected.get("summary")
    assert unchanged.before_model({"messages": talk}, None) is None


def run_in_graph(step: Any, talk: Talk) -> Any:
    """Return the state after a graph step with the real reducers, on copies of the messages."""
    builder = StateGraph(MemoryState).add_node("step", step).add_edge(START, "step")
    messages = [message.model_copy(deep=True) for message in talk]
    return builder.compile().invoke({"messages": messages})


# -- tools


def make_large_tool(name: str) -> StructuredTool:
    """Return a tool whose schema has about 300 tokens."""
    description = "It finds what is asked for, wherever it may be. " * 25
    return StructuredTool.from_function(lambda what: what, name=name, description=description)


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_trim_middleware_counts_the_tools_of_the_agent(call_mode: str) -> None:
    """With fewer tools in a request, more messages are shown."""
    tools = [make_large_tool(f"look{n}") for n in range(4)]
    counter = token_counter(None)
    talk = [HumanMessage(f"Question {n}: " + "which train? " * 10) for n in range(90)]

    def count_request(tools: list[Any], budget: int) -> tuple[int, int]:
        with OpenAIServer(["done"]) as server:
            memory = MemoryMiddleware(trim(max_tokens=budget, token_counter=counter))
            agent: Any = create_agent(make_client(server), tools, middleware=[memory])
            input: Any = {"messages": talk}
            if call_mode == "sync":
                agent.invoke(input)
            else:
                asyncio.run(agent.ainvoke(input))
            body = server.requests[-1]
        messages = convert_to_messages(body["messages"])
        schemas = counter.count_tools(body.get("tools", []))
        return len(messages), counter.request_overhead + schemas + sum(
            map(counter.count_message_tokens, messages)
        )

    assert counter.count_tools(tools) > 1_000
    for agent_tools in (tools, tools[:1], []):
        count, tokens = count_request(agent_tools, 1_800)
        assert 1_700 < tokens <= 1_800
        assert count < len(talk)
    with pytest.raises(BudgetExceeded, match=r"max_tokens is 500 .*with its tools"):
        count_request(tools, 500)


def test_tools_are_counted_once_for_all_requests_with_them() -> None:
    """Other tools are counted when they appear."""
    counter = RecordingCounter()
    memory = MemoryMiddleware(trim(max_tokens=4_000, token_counter=counter))
    first_tool, second_tool = make_large_tool("one"), make_large_tool("other")
    with OpenAIServer(["a0", "a1", "a2"]) as server:
        agent: Any = create_agent(
            make_client(server), [first_tool, second_tool], middleware=[memory]
        )
        for n in range(2):
            agent.invoke(build_user_input(f"q{n}"))
        create_agent(make_client(server), [second_tool], middleware=[memory]).invoke(
            build_user_input("q2")
        )
    assert counter.counted == [["one", "other"], ["other"]]


class RecordingCounter(TokenCounter):
    """A token counter that records the tools that it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[list[str]] = []

    def count_tools(self, tools: Any) -> int:
        if tools:
            self.counted.append([tool.name for tool in tools])
        return super().count_tools(tools)

    def scale_to_reported_usage(self, messages: Any) -> Any:
        return self


# -- instructions


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_instructions_are_updated_after_the_run_from_answer_and_feedback(call_mode: str) -> None:
    """The next run does not have the feedback."""
    rule = "<instructions>Be kind. Give times in 24 hours.</instructions>"
    prompts: list[str] = []

    def replies(body: dict[str, Any]) -> str:
        prompt = str(body["messages"][-1]["content"])
        if "<conversation>" in prompt:
            prompts.append(prompt)
            return rule
        return "At 14:05."

    with SQLiteStore.open(":memory:", index=None) as store, OpenAIServer(replies) as server:
        instructions = Instructions(store, default="Be kind.")
        learner = update_instructions(make_client(server), instructions)
        agent: Any = create_agent(
            make_client(server), [look], middleware=[MemoryMiddleware(learner)]
        )
        for extra_input in ({"feedback": "no am and pm"}, {}):
            input: Any = {**build_user_input("When?"), **extra_input}
            output = (
                agent.invoke(input) if call_mode == "sync" else asyncio.run(agent.ainvoke(input))
            )
        current_text = instructions.current().text

    assert current_text == "Be kind. Give times in 24 hours."
    assert [m.text for m in output["messages"]] == ["When?", "At 14:05."]
    assert "At 14:05." in prompts[0]
    assert ["no am and pm" in prompt for prompt in prompts] == [True, False]


@pytest.mark.parametrize("call_mode", ["sync", "async"])
@pytest.mark.parametrize("part", [trim(4_000), clear_tool_outputs()], ids=["trim", "clearing"])
@pytest.mark.parametrize("start", [[], [SystemMessage("7 o'clock")], [AIMessage("Reminder")]])
def test_scheduled_agent_without_a_question_sees_its_tool_results(
    start: Any, part: Any, call_mode: str
) -> None:
    """A user can ask it about its work afterwards."""

    def replies(body: dict[str, Any]) -> Any:
        if any(message["role"] == "tool" for message in body["messages"]):
            return "Two new mails."
        function = {"name": "look", "arguments": '{"what": "mail"}'}
        call = {"id": "c1", "type": "function", "function": function}
        return Answer({"content": None, "tool_calls": [call]}, "tool_calls")

    with OpenAIServer(replies) as server:
        agent: Any = create_agent(
            make_client(server),
            [look],
            system_prompt="Check the mail.",
            middleware=[MemoryMiddleware(part)],
            checkpointer=InMemorySaver(),
        )
        for new in (start, [HumanMessage("How many?")]):
            arguments = {"messages": new}, {**THREAD, "recursion_limit": 9}
            if call_mode == "sync":
                agent.invoke(*arguments)
            else:
                asyncio.run(agent.ainvoke(*arguments))

    assert len(server.requests) == 3
    assert ("tool", "mail is found") in server.shown(1)
    assert ("tool", "mail is found") in server.shown(2)


def test_middleware_without_parts_names_expected_parts() -> None:
    with pytest.raises(ConfigurationError) as caught:
        MemoryMiddleware()

    assert "MemoryMiddleware() needs at least one part, such as trim(" in str(caught.value)


def test_middleware_refuses_values_that_are_no_nodes() -> None:
    with pytest.raises(ConfigurationError, match="needs at least one part, such as"):
        MemoryMiddleware()
    with pytest.raises(ConfigurationError, match="expected parts such as"):
        MemoryMiddleware(print)  # type: ignore[arg-type]


def test_turns_are_not_removed_before_a_failing_store_has_them(tmp_path: Path) -> None:
    """The store fails at the end of a run and at the start of the next."""
    with SQLiteStore.open(tmp_path / "m.db") as store, OpenAIServer(["yes"] * 4) as server:
        summary = summarize(
            RunnableLambda(summarize_trains), trigger=("messages", 2), keep=("messages", 1)
        )
        middleware = MemoryMiddleware(remember_turns(store), summary)
        agent = create_agent(
            make_client(server),
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
        stored_texts = {item.value["text"] for item in store.search(("memories", "ann"), limit=20)}

    assert {"user: I like tea.", "user: I like figs.", "user: I like pears."} <= stored_texts
