"""The trigger of `summarize` counts the whole request: tools, system prompt, reported usage."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from pydantic import Field

from perdure import SQLiteCheckpointer
from perdure.memory import SummaryState, summarize, token_counter, trim, view
from perdure.memory.middleware import MemoryMiddleware
from perdure.memory.request_size import RequestParts, measure_request
from perdure.memory.summary import Summarize
from perdure.memory.summary_state import Summary

COUNTER = token_counter("approximate")
WINDOW = 4_000
ABOUT = "It finds what is asked for, wherever it may be. " * 120
LOOK = StructuredTool.from_function(lambda what: what, name="look", description=ABOUT)
PROMPT = "You look things up. " * 150


def node(trigger: Any = ("tokens", 2_800), **options: Any) -> Summarize:
    model = FakeListChatModel(responses=["the summary"], profile={"max_input_tokens": WINDOW})
    return summarize(model, trigger=trigger, **options)


def talk(count: int, words: int = 25) -> list[BaseMessage]:
    """Turns of a question and an answer, and a question."""
    said: list[BaseMessage] = []
    for n in range(count):
        said += [HumanMessage("word " * words, id=f"q{n}"), AIMessage("word " * words, id=f"a{n}")]
    return [*said, HumanMessage("and?", id=f"q{count}")]


def answer(n: int, tokens: int, **options: Any) -> AIMessage:
    usage: Any = {"input_tokens": tokens - 5, "output_tokens": 5, "total_tokens": tokens}
    return AIMessage("yes", id=f"a{n}", usage_metadata=usage, **options)


def asked(*answers: AIMessage) -> dict[str, Any]:
    """A state with a question before each of these answers, and one more."""
    said: list[BaseMessage] = []
    for n, message in enumerate(answers):
        said += [HumanMessage("why?", id=f"q{n}"), message]
    return {"messages": [*said, HumanMessage("and?", id="q")], "summarized": []}


def after(state: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    """A state after the update of a summary."""
    gone = {m.id for m in update.get("messages", [])}
    left = [m for m in state["messages"] if m.id not in gone]
    return {**state, **update, "messages": left}


# -- what is known of the request


def test_tools_and_system_prompt_count() -> None:
    """A node of a plain graph is told of them; they take their part of the trigger."""
    tools, prompt = COUNTER.count_tools([LOOK]), COUNTER.count_message(SystemMessage(PROMPT))
    state = {"messages": talk(10)}
    size = sum(map(COUNTER.count_message, state["messages"]))

    for told, other in (
        (node(("tokens", size + tools)).with_tools([LOOK]), tools),
        (node(("tokens", size + prompt)).with_tools([], PROMPT), prompt),
        (node(("tokens", size + prompt)).with_tools([], SystemMessage(PROMPT)), prompt),
        (node(("tokens", size + tools + prompt)).with_tools([LOOK], PROMPT), tools + prompt),
    ):
        assert told.is_due(state)
        assert not node(("tokens", size + other)).is_due(state)
        assert not told.is_due({"messages": state["messages"][1:]})


def test_system_messages_and_the_summary_of_the_state_count() -> None:
    """They are sent with each request."""
    said = talk(10)
    size = sum(map(COUNTER.count_message, said))
    system = SystemMessage(PROMPT, id="s")
    summary = {"text": "word " * 300, "last": None, "count": 3}

    assert node(("tokens", size + 500)).is_due({"messages": [system, *said]})
    assert not node(("tokens", size + 300)).is_due({"messages": said})
    assert node(("tokens", size + 300)).is_due({"messages": said, "summary": summary})


def test_what_stays_leaves_room_for_the_rest_of_the_request() -> None:
    """By default half of what the trigger leaves for messages; never more than all of it."""
    state = {"messages": talk(40)}
    tools = COUNTER.count_tools([LOOK])

    for options, most in (({}, (2_800 - tools) / 2), ({"keep": ("tokens", 2_700)}, 2_800 - tools)):
        update = node(**options).with_tools([LOOK]).invoke(state)
        left = after({**state, "summarized": []}, update)["messages"]
        tokens = sum(map(COUNTER.count_message, left))
        assert most - 80 < tokens <= most + 1


def test_a_counter_of_messages_counts_no_tools() -> None:
    """`len` counts messages, whatever they or their request take."""
    three = node(("tokens", 3), token_counter=len).with_tools([LOOK], PROMPT)

    assert not three.is_due(asked())
    assert not three.is_due({"messages": talk(0)})
    assert three.is_due(asked(answer(0, 9_999)))
    assert not node(("tokens", 4), token_counter=len).is_due(asked(answer(0, 9_999)))


def test_tools_that_take_most_of_the_trigger_do_not_ask_for_a_summary_each_time() -> None:
    """A summary would not make them smaller; the messages may always take a quarter."""
    summary = node(("tokens", 1_000)).with_tools([LOOK])
    state: dict[str, Any] = {"messages": talk(1), "summarized": []}
    asked_at = []
    for n in range(1, 31):
        state["messages"] = [*state["messages"], AIMessage("word " * 20, id=f"b{n}")]
        state["messages"] = [*state["messages"], HumanMessage("word " * 20, id=f"c{n}")]
        update = summary.invoke(state)
        asked_at += [n] if update else []
        state = after(state, update)

    assert 2 <= len(asked_at) <= 10
    assert sum(map(COUNTER.count_message, state["messages"])) < 500


# -- what the last answer reported


def test_the_last_answer_reports_the_size_of_the_request() -> None:
    """Input and output, and what was said since; the estimate counts where it is more."""
    later = COUNTER.count_message(HumanMessage("and?"))

    assert node().is_due(asked(answer(0, 100), answer(1, 2_800 - later)))
    assert not node().is_due(asked(answer(0, 100), answer(1, 2_799 - later)))
    assert not node().is_due(asked(answer(0, 9_000), answer(1, 100)))
    assert node(("tokens", 300)).is_due({"messages": [*talk(10), answer(11, 10)]})


def test_an_answer_without_usage_leaves_the_one_before() -> None:
    """A stream may not report it; the messages since are estimated."""
    since = COUNTER.count_message(AIMessage("yes")) + COUNTER.count_message(HumanMessage("why?"))
    later = since + COUNTER.count_message(HumanMessage("and?"))
    silent = AIMessage("yes", id="a1")
    zero = answer(1, 5)
    zero.usage_metadata = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}

    for last in (silent, zero):
        assert node().is_due(asked(answer(0, 2_800 - later), last))
        assert not node().is_due(asked(answer(0, 2_799 - later), last))


@pytest.mark.parametrize("tokens", [10**9, 10**15])
def test_an_impossible_report_is_ignored(tokens: int) -> None:
    """No model takes as much."""
    assert not node().is_due(asked(answer(0, tokens)))


def test_a_report_from_before_the_summary_is_of_another_request() -> None:
    """The next answer reports the size again."""
    summary = node(keep=("messages", 3))
    state = asked(*(answer(n, 700 * (n + 1)) for n in range(4)))
    state = after(state, summary.invoke(state))
    again = {**state, "messages": [*state["messages"], answer(5, 400), HumanMessage("?", id="x")]}
    large = {**state, "messages": [*state["messages"], answer(5, 2_900), HumanMessage("?", id="x")]}

    assert [m.id for m in state["messages"]] == ["q3", "a3", "q"]
    assert state["messages"][1].usage_metadata["total_tokens"] == 2_800
    assert summary.invoke(state) == {}
    assert not summary.is_due(again)
    assert not summary.is_due(large)  # the rest of the request is as large: it would not help
    grown = [answer(6, 3_700), HumanMessage("?", id="y")]
    assert summary.is_due({**large, "messages": [*large["messages"], *grown]})


@pytest.mark.parametrize("ids", [True, False])
def test_a_report_from_before_the_summary_of_a_list(ids: bool) -> None:
    """A list that has the summary is not summarised once more."""
    summary = node(keep=("messages", 3))
    said = asked(*(answer(n, 700 * (n + 1)) for n in range(4)))["messages"]
    given = said if ids else [message.model_copy(update={"id": None}) for message in said]
    shown = summary(given)

    assert shown[0].text.endswith("the summary")
    assert [m.text for m in shown[1:]] == ["why?", "yes", "and?"]
    assert summary(shown) == shown


def test_only_the_usage_of_the_counters_model_counts() -> None:
    """Where a counter was chosen; by default the counter is of the model that summarises."""
    theirs = asked(answer(0, 2_900, response_metadata={"model_name": "claude-x"}))
    chosen = COUNTER.for_model("gpt-x")

    assert node().is_due(theirs)
    assert node(token_counter="gpt-4o").is_due(
        asked(answer(0, 2_900, response_metadata={"model_name": "gpt-4o-2024-08-06"}))
    )
    assert not node(token_counter="gpt-4o").is_due(theirs)
    assert not node(token_counter=chosen).is_due(theirs)


def test_usage_of_another_agent_is_of_another_request() -> None:
    """Agents that share a thread have requests of their own, and their names in their answers."""
    state = asked(answer(0, 100, name="ann"), answer(1, 2_900, name="bob"))

    assert node().for_agent("bob").is_due(state)
    assert not node().for_agent("ann").is_due(state)
    assert not node().for_agent(None).is_due(state)


# -- agents and graphs


class Reporting(BaseChatModel):
    """A model whose answers report what a provider would, and that notes the largest request."""

    times: float = 1.0
    reports: bool = True
    largest: list[int] = Field(default_factory=lambda: [0])

    @property
    def _llm_type(self) -> str:
        return "reporting"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self.bind(tools=tools)

    def _generate(self, messages: Any, *args: Any, **options: Any) -> ChatResult:
        tools = COUNTER.count_tools(options.get("tools") or [])
        tokens = int(self.times * (tools + sum(map(COUNTER.count_message, messages))))
        self.largest[0] = max(self.largest[0], tokens)
        said = AIMessage("word " * 60)
        if self.reports:
            more = int(self.times * COUNTER.count_message(said))
            said.usage_metadata = {
                "input_tokens": tokens, "output_tokens": more, "total_tokens": tokens + more,
            }  # fmt: skip
        return ChatResult(generations=[ChatGeneration(message=said)])


@pytest.mark.parametrize("call_mode", ["sync", "async"])
@pytest.mark.parametrize("times", [0.0, 1.0, 1.6])
def test_no_request_of_an_agent_passes_the_window(call_mode: str, times: float) -> None:
    """Whether the provider counts as the estimate does, otherwise, or reports nothing (0)."""
    model = Reporting(times=times or 1.0, reports=times > 0, largest=[0])
    agent: Any = create_agent(
        model,
        [LOOK],
        system_prompt="You look things up. " * 50,
        middleware=[MemoryMiddleware(node(("fraction", 0.7)))],
        checkpointer=InMemorySaver(),
    )
    config: Any = {"configurable": {"thread_id": "t"}}

    async def chat() -> Any:
        for _ in range(40):
            said = {"messages": [HumanMessage("tell me more about it " * 4)]}
            out = (
                await agent.ainvoke(said, config)
                if call_mode == "async"
                else agent.invoke(said, config)
            )
        return out

    assert asyncio.run(chat())["summary"]["text"] == "the summary"
    assert 2_000 < model.largest[0] <= WINDOW


@pytest.mark.parametrize("call_mode", ["sync", "async"])
@pytest.mark.parametrize("reports", [True, False])
def test_no_request_of_a_new_agent_passes_the_window(call_mode: str, reports: bool) -> None:
    """An agent that is made for each turn knows its tools only when its model is called first."""
    saver, largest = InMemorySaver(), 0
    config: Any = {"configurable": {"thread_id": "t"}}
    for n in range(25):
        model = Reporting(reports=reports, largest=[0])
        agent: Any = create_agent(
            model,
            [LOOK],
            system_prompt="You look things up. " * 50,
            middleware=[MemoryMiddleware(node(("fraction", 0.7)))],
            checkpointer=saver,
        )
        said = {"messages": [HumanMessage("tell me more about it " * 4, id=f"q{n}")]}
        if call_mode == "async":
            out = asyncio.run(agent.ainvoke(said, config))
        else:
            out = agent.invoke(said, config)
        assert out["messages"][-1].text.startswith("word")
        assert out["messages"][-2].id == f"q{n}"
        largest = max(largest, model.largest[0])

    assert out["summary"]["text"] == "the summary"
    assert out["summary"]["count"] + len(out["messages"]) == 50
    assert 2_000 < largest <= WINDOW


def test_agents_that_share_a_middleware_count_their_own_tools() -> None:
    """The trigger of one knows nothing of the tools of the other."""
    memory = MemoryMiddleware(node(("tokens", 1_500)))
    quiet: dict[str, Any] = {"reports": False, "largest": [0]}
    options: dict[str, Any] = {"middleware": [memory], "checkpointer": InMemorySaver()}
    agents: Any = [
        create_agent(Reporting(**quiet), tools, name=name, **options)
        for name, tools in (("plain", []), ("looks", [LOOK]))
    ]
    counts = []
    for agent in agents:
        config: Any = {"configurable": {"thread_id": agent.name}}
        for _ in range(8):
            out = agent.invoke({"messages": [HumanMessage("word " * 60)]}, config)
        counts.append("summary" in out)

    assert counts == [False, True]


def test_a_plain_graph_tells_its_tools(tmp_path: Any) -> None:
    """`with_tools` of the node that summarises, and of the view before the model."""
    model = Reporting(reports=False, largest=[0])
    summary = node(("fraction", 0.7)).with_tools([LOOK], PROMPT)
    shown = view(summary, trim(max_tokens=WINDOW).with_tools([LOOK], PROMPT))
    bound = model.bind_tools([LOOK])

    def reply(state: SummaryState) -> Any:
        return {"messages": [bound.invoke([SystemMessage(PROMPT), *shown(state)])]}

    builder = StateGraph(SummaryState).add_node("summarize", summary).add_node("reply", reply)
    builder.add_edge(START, "summarize").add_edge("summarize", "reply")
    with SQLiteCheckpointer.open(tmp_path / "a.db") as saver:
        graph = builder.compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}}
        for _ in range(20):
            state = graph.invoke({"messages": [HumanMessage("word " * 60)]}, config)

    assert state["summary"]["text"] == "the summary"
    assert 2_000 < model.largest[0] <= WINDOW


def test_growth_since_a_summary_is_measured_from_the_first_answer_of_a_list() -> None:
    """Requests grew from 1,000 to 1,700 tokens after the answer at position 0."""
    messages = [answer(0, 1_000), HumanMessage("why?", id="q1"), answer(1, 1_700)]
    summary = Summary(text="They spoke of trains.", last=None, count=2)

    size = measure_request(messages, COUNTER, RequestParts(), summary)

    assert size.recent == 700
