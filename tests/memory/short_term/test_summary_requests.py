"""The trigger of `summarize` counts the whole request: tools, system prompt and reported usage."""

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
from perdure.memory.short_term.request_size import RequestParts, measure_request
from perdure.memory.short_term.summary import Summarize
from perdure.memory.short_term.summary_state import Summary

COUNTER = token_counter("approximate")
WINDOW = 4_000
ABOUT = "It finds what is asked for, wherever it may be. " * 120
LOOK = StructuredTool.from_function(lambda what: what, name="look", description=ABOUT)
PROMPT = "You look things up. " * 150


def make_summarize_node(trigger: Any = ("tokens", 2_800), **options: Any) -> Summarize:
    model = FakeListChatModel(responses=["the summary"], profile={"max_input_tokens": WINDOW})
    return summarize(model, trigger=trigger, **options)


def make_turns(count: int, words: int = 25) -> list[BaseMessage]:
    """Return `count` turns of a question and an answer, and one more question."""
    messages: list[BaseMessage] = []
    for n in range(count):
        messages += [
            HumanMessage("word " * words, id=f"q{n}"),
            AIMessage("word " * words, id=f"a{n}"),
        ]
    return [*messages, HumanMessage("and?", id=f"q{count}")]


def make_answer_with_usage(n: int, tokens: int, **options: Any) -> AIMessage:
    usage: Any = {"input_tokens": tokens - 5, "output_tokens": 5, "total_tokens": tokens}
    return AIMessage("yes", id=f"a{n}", usage_metadata=usage, **options)


def make_state(*answers: AIMessage) -> dict[str, Any]:
    """Return a state with a question before each of these answers, and one more question."""
    messages: list[BaseMessage] = []
    for n, message in enumerate(answers):
        messages += [HumanMessage("why?", id=f"q{n}"), message]
    return {"messages": [*messages, HumanMessage("and?", id="q")], "summarized": []}


def apply_update(state: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    """Return the state after the update of a summary."""
    gone = {m.id for m in update.get("messages", [])}
    remaining = [m for m in state["messages"] if m.id not in gone]
    return {**state, **update, "messages": remaining}


# -- tools, prompts and system messages


def test_trigger_counts_tools_and_system_prompt() -> None:
    """`with_tools` passes them to a node of a plain graph."""
    tools, prompt = COUNTER.count_tools([LOOK]), COUNTER.count_message_tokens(SystemMessage(PROMPT))
    state = {"messages": make_turns(10)}
    size = sum(map(COUNTER.count_message_tokens, state["messages"]))

    for with_parts, size_of_parts in (
        (make_summarize_node(("tokens", size + tools)).with_tools([LOOK]), tools),
        (make_summarize_node(("tokens", size + prompt)).with_tools([], PROMPT), prompt),
        (
            make_summarize_node(("tokens", size + prompt)).with_tools([], SystemMessage(PROMPT)),
            prompt,
        ),
        (
            make_summarize_node(("tokens", size + tools + prompt)).with_tools([LOOK], PROMPT),
            tools + prompt,
        ),
    ):
        assert with_parts.is_due(state)
        assert not make_summarize_node(("tokens", size + size_of_parts)).is_due(state)
        assert not with_parts.is_due({"messages": state["messages"][1:]})


def test_trigger_counts_system_messages_and_summary_of_state() -> None:
    messages = make_turns(10)
    size = sum(map(COUNTER.count_message_tokens, messages))
    system = SystemMessage(PROMPT, id="s")
    summary = {"text": "word " * 300, "last": None, "count": 3}

    assert make_summarize_node(("tokens", size + 500)).is_due({"messages": [system, *messages]})
    assert not make_summarize_node(("tokens", size + 300)).is_due({"messages": messages})
    assert make_summarize_node(("tokens", size + 300)).is_due(
        {"messages": messages, "summary": summary}
    )


def test_kept_messages_leave_room_for_tools() -> None:
    """By default, half of what the trigger leaves for messages is kept.

    More than all of it is never kept.
    """
    state = {"messages": make_turns(40)}
    tools = COUNTER.count_tools([LOOK])

    for options, most in (({}, (2_800 - tools) / 2), ({"keep": ("tokens", 2_700)}, 2_800 - tools)):
        update = make_summarize_node(**options).with_tools([LOOK]).invoke(state)
        remaining = apply_update({**state, "summarized": []}, update)["messages"]
        tokens = sum(map(COUNTER.count_message_tokens, remaining))
        assert most - 80 < tokens <= most + 1


def test_len_as_counter_counts_messages_only() -> None:
    three = make_summarize_node(("tokens", 3), token_counter=len).with_tools([LOOK], PROMPT)

    assert not three.is_due(make_state())
    assert not three.is_due({"messages": make_turns(0)})
    assert three.is_due(make_state(make_answer_with_usage(0, 9_999)))
    assert not make_summarize_node(("tokens", 4), token_counter=len).is_due(
        make_state(make_answer_with_usage(0, 9_999))
    )


def test_large_tools_do_not_cause_summary_in_each_turn() -> None:
    """A summary does not make the tools smaller.

    The messages may always take a quarter of the trigger.
    """
    summary = make_summarize_node(("tokens", 1_000)).with_tools([LOOK])
    state: dict[str, Any] = {"messages": make_turns(1), "summarized": []}
    asked_at = []
    for n in range(1, 31):
        state["messages"] = [*state["messages"], AIMessage("word " * 20, id=f"b{n}")]
        state["messages"] = [*state["messages"], HumanMessage("word " * 20, id=f"c{n}")]
        update = summary.invoke(state)
        asked_at += [n] if update else []
        state = apply_update(state, update)

    assert 2 <= len(asked_at) <= 10
    assert sum(map(COUNTER.count_message_tokens, state["messages"])) < 500


# -- usage reported by the last answer


def test_trigger_uses_usage_of_last_answer() -> None:
    """The size is its input and output plus the later messages.

    A larger estimate takes precedence.
    """
    later = COUNTER.count_message_tokens(HumanMessage("and?"))

    assert make_summarize_node().is_due(
        make_state(make_answer_with_usage(0, 100), make_answer_with_usage(1, 2_800 - later))
    )
    assert not make_summarize_node().is_due(
        make_state(make_answer_with_usage(0, 100), make_answer_with_usage(1, 2_799 - later))
    )
    assert not make_summarize_node().is_due(
        make_state(make_answer_with_usage(0, 9_000), make_answer_with_usage(1, 100))
    )
    assert make_summarize_node(("tokens", 300)).is_due(
        {"messages": [*make_turns(10), make_answer_with_usage(11, 10)]}
    )


def test_answer_without_usage_falls_back_to_previous_usage() -> None:
    """The later messages are estimated."""
    since = COUNTER.count_message_tokens(AIMessage("yes")) + COUNTER.count_message_tokens(
        HumanMessage("why?")
    )
    later = since + COUNTER.count_message_tokens(HumanMessage("and?"))
    silent = AIMessage("yes", id="a1")
    zero = make_answer_with_usage(1, 5)
    zero.usage_metadata = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}

    for last in (silent, zero):
        assert make_summarize_node().is_due(
            make_state(make_answer_with_usage(0, 2_800 - later), last)
        )
        assert not make_summarize_node().is_due(
            make_state(make_answer_with_usage(0, 2_799 - later), last)
        )


@pytest.mark.parametrize("tokens", [10**9, 10**15])
def test_impossibly_large_usage_is_ignored(tokens: int) -> None:
    assert not make_summarize_node().is_due(make_state(make_answer_with_usage(0, tokens)))


def test_usage_from_before_summary_of_state_is_ignored() -> None:
    """The next answer reports the new size."""
    summary = make_summarize_node(keep=("messages", 3))
    state = make_state(*(make_answer_with_usage(n, 700 * (n + 1)) for n in range(4)))
    state = apply_update(state, summary.invoke(state))
    again = {
        **state,
        "messages": [*state["messages"], make_answer_with_usage(5, 400), HumanMessage("?", id="x")],
    }
    large = {
        **state,
        "messages": [
            *state["messages"],
            make_answer_with_usage(5, 2_900),
            HumanMessage("?", id="x"),
        ],
    }

    assert [m.id for m in state["messages"]] == ["q3", "a3", "q"]
    assert state["messages"][1].usage_metadata["total_tokens"] == 2_800
    assert summary.invoke(state) == {}
    assert not summary.is_due(again)
    assert not summary.is_due(large)  # the rest of the request is as large: it would not help
    grown = [make_answer_with_usage(6, 3_700), HumanMessage("?", id="y")]
    assert summary.is_due({**large, "messages": [*large["messages"], *grown]})


@pytest.mark.parametrize("ids", [True, False])
def test_usage_from_before_summary_of_list_is_ignored(ids: bool) -> None:
    """A list that contains the summary is not summarised again."""
    summary = make_summarize_node(keep=("messages", 3))
    messages = make_state(*(make_answer_with_usage(n, 700 * (n + 1)) for n in range(4)))["messages"]
    input = messages if ids else [message.model_copy(update={"id": None}) for message in messages]
    shown = summary(input)

    assert shown[0].text.endswith("the summary")
    assert [m.text for m in shown[1:]] == ["why?", "yes", "and?"]
    assert summary(shown) == shown


def test_chosen_counter_ignores_usage_of_other_models() -> None:
    """By default, the counter belongs to the model that summarises."""
    theirs = make_state(
        make_answer_with_usage(0, 2_900, response_metadata={"model_name": "claude-x"})
    )
    chosen = COUNTER.with_calibration_for_model("gpt-x")

    assert make_summarize_node().is_due(theirs)
    assert make_summarize_node(token_counter="gpt-4o").is_due(
        make_state(
            make_answer_with_usage(0, 2_900, response_metadata={"model_name": "gpt-4o-2024-08-06"})
        )
    )
    assert not make_summarize_node(token_counter="gpt-4o").is_due(theirs)
    assert not make_summarize_node(token_counter=chosen).is_due(theirs)


def test_usage_of_other_agent_is_ignored() -> None:
    """Agents that share a thread send different requests. Their answers have their names."""
    state = make_state(
        make_answer_with_usage(0, 100, name="ann"), make_answer_with_usage(1, 2_900, name="bob")
    )

    assert make_summarize_node().for_agent("bob").is_due(state)
    assert not make_summarize_node().for_agent("ann").is_due(state)
    assert not make_summarize_node().for_agent(None).is_due(state)


# -- agents and graphs


class ReportingModel(BaseChatModel):
    """A model whose answers report usage like a provider, and that records its largest request."""

    usage_factor: float = 1.0
    reports_usage: bool = True
    largest_request: list[int] = Field(default_factory=lambda: [0])

    @property
    def _llm_type(self) -> str:
        return "reporting"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self.bind(tools=tools)

    def _generate(self, messages: Any, *args: Any, **options: Any) -> ChatResult:
        tools = COUNTER.count_tools(options.get("tools") or [])
        tokens = int(self.usage_factor * (tools + sum(map(COUNTER.count_message_tokens, messages))))
        self.largest_request[0] = max(self.largest_request[0], tokens)
        messages = AIMessage("word " * 60)
        if self.reports_usage:
            more = int(self.usage_factor * COUNTER.count_message_tokens(messages))
            messages.usage_metadata = {
                "input_tokens": tokens, "output_tokens": more, "total_tokens": tokens + more,
            }  # fmt: skip
        return ChatResult(generations=[ChatGeneration(message=messages)])


@pytest.mark.parametrize("call_mode", ["sync", "async"])
@pytest.mark.parametrize("times", [0.0, 1.0, 1.6])
def test_agent_requests_stay_within_window(call_mode: str, times: float) -> None:
    """The provider may count like the estimate, more than the estimate, or report nothing (0)."""
    model = ReportingModel(usage_factor=times or 1.0, reports_usage=times > 0, largest_request=[0])
    agent: Any = create_agent(
        model,
        [LOOK],
        system_prompt="You look things up. " * 50,
        middleware=[MemoryMiddleware(make_summarize_node(("fraction", 0.7)))],
        checkpointer=InMemorySaver(),
    )
    config: Any = {"configurable": {"thread_id": "t"}}

    async def chat() -> Any:
        for _ in range(40):
            messages = {"messages": [HumanMessage("tell me more about it " * 4)]}
            out = (
                await agent.ainvoke(messages, config)
                if call_mode == "async"
                else agent.invoke(messages, config)
            )
        return out

    assert asyncio.run(chat())["summary"]["text"] == "the summary"
    assert 2_000 < model.largest_request[0] <= WINDOW


@pytest.mark.parametrize("call_mode", ["sync", "async"])
@pytest.mark.parametrize("reports", [True, False])
def test_requests_of_agent_rebuilt_each_turn_stay_within_window(
    call_mode: str, reports: bool
) -> None:
    """Such an agent knows its tools only from its first model call."""
    saver, largest = InMemorySaver(), 0
    config: Any = {"configurable": {"thread_id": "t"}}
    for n in range(25):
        model = ReportingModel(reports_usage=reports, largest_request=[0])
        agent: Any = create_agent(
            model,
            [LOOK],
            system_prompt="You look things up. " * 50,
            middleware=[MemoryMiddleware(make_summarize_node(("fraction", 0.7)))],
            checkpointer=saver,
        )
        messages = {"messages": [HumanMessage("tell me more about it " * 4, id=f"q{n}")]}
        if call_mode == "async":
            out = asyncio.run(agent.ainvoke(messages, config))
        else:
            out = agent.invoke(messages, config)
        assert out["messages"][-1].text.startswith("word")
        assert out["messages"][-2].id == f"q{n}"
        largest = max(largest, model.largest_request[0])

    assert out["summary"]["text"] == "the summary"
    assert out["summary"]["count"] + len(out["messages"]) == 50
    assert 2_000 < largest <= WINDOW


def test_agents_sharing_middleware_count_only_their_own_tools() -> None:
    memory = MemoryMiddleware(make_summarize_node(("tokens", 1_500)))
    quiet: dict[str, Any] = {"reports_usage": False, "largest_request": [0]}
    options: dict[str, Any] = {"middleware": [memory], "checkpointer": InMemorySaver()}
    agents: Any = [
        create_agent(ReportingModel(**quiet), tools, name=name, **options)
        for name, tools in (("plain", []), ("looks", [LOOK]))
    ]
    counts = []
    for agent in agents:
        config: Any = {"configurable": {"thread_id": agent.name}}
        for _ in range(8):
            out = agent.invoke({"messages": [HumanMessage("word " * 60)]}, config)
        counts.append("summary" in out)

    assert counts == [False, True]


def test_with_tools_keeps_plain_graph_within_window(tmp_path: Any) -> None:
    """Both the node that summarises and the view before the model are given the tools."""
    model = ReportingModel(reports_usage=False, largest_request=[0])
    summary = make_summarize_node(("fraction", 0.7)).with_tools([LOOK], PROMPT)
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
    assert 2_000 < model.largest_request[0] <= WINDOW


def test_growth_since_summary_is_measured_from_first_answer() -> None:
    """Requests grew from 1,000 to 1,700 tokens after the answer at position 0."""
    messages = [
        make_answer_with_usage(0, 1_000),
        HumanMessage("why?", id="q1"),
        make_answer_with_usage(1, 1_700),
    ]
    summary = Summary(text="They spoke of trains.", last=None, count=2)

    size = measure_request(messages, COUNTER, RequestParts(), summary)

    assert size.recent == 700
