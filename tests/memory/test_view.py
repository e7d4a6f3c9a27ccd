"""Parts of short-term memory upon each other: every composition shows a valid sequence."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
)
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph, add_messages

from perdure import SQLiteStore
from perdure.errors import BudgetExceeded, ConfigurationError
from perdure.memory import (
    ChatState,
    Instructions,
    SummaryState,
    assemble,
    clear_tool_outputs,
    remember_turns,
    summarize,
    trim,
    update_instructions,
    use_instructions,
    use_memories,
    view,
)
from perdure.memory.nodes import MODEL_INPUT_KEY, MessagesNode
from tests.memory.conversations import (
    Talk,
    comparison_keys,
    conversations,
    find_newest_question,
    total_cost,
)
from tests.memory.providers import awaits_answer, find_refusals

BUDGET = 250


def count(messages: list[BaseMessage]) -> int:
    return total_cost(messages, lambda message: 3 + len(str(message.content)) // 2)


def sums_up(_: Any) -> AIMessage:
    return AIMessage("They spoke of trains.")


def _instructed() -> MessagesNode:
    store = SQLiteStore.open(":memory:", index=None)
    return use_instructions(Instructions(store, default="Be kind."))


def _learns() -> Any:
    return update_instructions(RunnableLambda(sums_up), Instructions())


MAKERS: dict[str, Callable[[], MessagesNode]] = {
    "instructions": _instructed,
    "summary": lambda: summarize(
        RunnableLambda(sums_up), trigger=("messages", 4), keep=("messages", 1)
    ),
    "summary for a human": lambda: summarize(
        RunnableLambda(sums_up), trigger=("messages", 2), keep=("messages", 3)
    ),
    "clearing": lambda: clear_tool_outputs(keep=1, min_tokens=50),
    "messages": lambda: trim(max_tokens=9, token_counter=len),
    "tokens": lambda: trim(max_tokens=BUDGET, token_counter=count),
    "first": lambda: trim(
        max_tokens=BUDGET, token_counter=count, strategy="first", allow_partial=True
    ),
}
NODES = {name: make() for name, make in MAKERS.items()}
summaries = st.one_of(
    st.none(), st.just({"text": "Of planes.", "last": "m1", "count": 2}), st.just("Of ships.")
)


@given(conversations(), st.lists(st.sampled_from(list(NODES)), min_size=1, max_size=4), summaries)
def test_every_composition_shows_a_valid_sequence(
    talk: Talk, names: list[str], summary: Any
) -> None:
    """Sync and async alike; the question is in it; what cuts last keeps its budget."""
    shows = view(*(NODES[name] for name in names))
    state = {"messages": talk, "summary": summary, "summarized": []}
    try:
        update = shows.invoke(state)
    except BudgetExceeded:
        with pytest.raises(BudgetExceeded):
            asyncio.run(shows.ainvoke(state))
        return
    shown = update[MODEL_INPUT_KEY]
    assert list(update) == [MODEL_INPUT_KEY]
    assert comparison_keys(asyncio.run(shows.ainvoke(state))[MODEL_INPUT_KEY]) == comparison_keys(
        shown
    )
    assert find_refusals(shown, to_answer=awaits_answer(talk)) == []
    question = find_newest_question(talk)
    assert question is None or question.id in [message.id for message in shown]
    if names[-1] in ("tokens", "first"):
        assert count(shown) <= BUDGET
    assert comparison_keys(shows.invoke(state)[MODEL_INPUT_KEY]) == comparison_keys(shown)


def test_the_parts_of_a_view_in_order() -> None:
    """The summary after the instructions, in one system message; the rest cut to what fits."""
    talk: Talk = [SystemMessage("Old.")]
    for n in range(6):
        talk += [HumanMessage(f"q{n}", id=f"q{n}"), AIMessage(f"a{n}", id=f"a{n}")]
    talk.append(HumanMessage("now", id="now"))
    state = {"messages": talk, "summary": {"text": "Of planes.", "last": "a2", "count": 6}}
    shows = view(NODES["instructions"], NODES["summary"], trim(max_tokens=6, token_counter=len))
    shown = shows.invoke(state)[MODEL_INPUT_KEY]
    assert shown[0].text.startswith("Be kind.\n\nSummary")
    assert shown[0].text.endswith("Of planes.")
    assert [message.text for message in shown[1:]] == ["q4", "a4", "q5", "a5", "now"]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((), "a part of the view is None"),
        ((print,), "a part of the view is <built-in function print>"),
        ((_learns(),), "a part of the view is"),
        (
            (
                trim(max_tokens=1, token_counter=len),
                trim(max_tokens=1, token_counter=len, messages_key="talk"),
            ),
            r"\['messages', 'talk'\]",
        ),
    ],
)
def test_wrong_parts_are_refused(parts: Any, said: str) -> None:
    """Before anything runs."""
    with pytest.raises(ConfigurationError, match=said):
        view(*parts)


def test_the_budget_may_be_the_first_argument() -> None:
    """`trim(3)` and `assemble(3)` are what they say, also with the tools of a request."""
    for node in (trim(3), trim(3).with_tools([]), copy.deepcopy(trim(3))):
        assert trim(max_tokens=3).size == node.size
    assert assemble(3).max_tokens == assemble(max_tokens=3).with_tools([]).max_tokens == 3


@pytest.mark.parametrize(
    ("node", "given", "options", "said"),
    [
        (summarize, ["m"], {"max_tokens": 9}, r"max_tokens=9\): .* trigger=\('messages', 40\)"),
        (trim, [9, "last"], {}, r"trim\(9, 'last'\): too many positional .* strategy='last'"),
        (trim, [], {"strategy": "last"}, "missing a required argument: 'max_tokens'"),
        (assemble, [9], {"memory": "tea"}, r"'memory'; expected max_tokens, .* memories=\(\)"),
        (clear_tool_outputs, [], {"last": 3}, r"clear_tool_outputs\(last=3\): .* keep=3"),
        (use_memories, [], {"top_k": 5}, "'top_k'; expected store=None, .* limit=20"),
        (update_instructions, ["m"], {}, "missing .* 'instructions'; expected model, instructions"),
        (remember_turns, [], {"user": "ann"}, "'user'; expected store=None, namespace="),
        (view, [trim(9)], {"max_tokens": 3}, "'max_tokens'; expected parts"),
    ],
)
def test_arguments_that_a_node_does_not_have(
    node: Any, given: list[Any], options: dict[str, Any], said: str
) -> None:
    """The error has the arguments that were given, and those that there are."""
    with pytest.raises(ConfigurationError, match=said):
        node(*given, **options)


# -- in a graph


class Bare(TypedDict):
    """A state without a channel for what is shown."""

    messages: Annotated[list[AnyMessage], add_messages]


def _graph(state: Any, part: MessagesNode, model: Any, **compiled: Any) -> Any:
    builder = StateGraph(state).add_node("shows", part).add_node("model", model)
    builder.add_edge(START, "shows").add_edge("shows", "model")
    return builder.compile(**compiled)


def _echo(state: Any) -> dict[str, Any]:
    shown = state.get(MODEL_INPUT_KEY, state["messages"])
    return {"messages": [AIMessage(f"I see {len(shown)}")]}


@pytest.mark.parametrize("state", [ChatState, SummaryState])
def test_what_a_node_shows_reaches_the_model_and_no_checkpoint(state: Any) -> None:
    """The exported states have the channel; a thread's checkpoints hold only what was said."""
    saver = InMemorySaver()
    shows = view(trim(max_tokens=1, token_counter=len))
    graph = _graph(state, shows, _echo, checkpointer=saver)
    thread: Any = {"configurable": {"thread_id": "t"}}
    for text in ("one", "two"):
        out = graph.invoke({"messages": [("human", text)]}, thread)
    assert [m.text for m in out["messages"]] == ["one", "I see 1", "two", "I see 1"]
    assert [m.text for m in out[MODEL_INPUT_KEY]] == ["two"]
    for saved in saver.list(thread):
        assert MODEL_INPUT_KEY not in saved.checkpoint["channel_values"]
        assert MODEL_INPUT_KEY not in saved.checkpoint[
            "channel_versions"
        ] or MODEL_INPUT_KEY not in str(saved.pending_writes)
    assert MODEL_INPUT_KEY not in graph.get_state(thread).values


def test_without_the_channel_langgraph_drops_what_a_node_shows() -> None:
    """As docs/memory.md says; `shown(state)` in the model's node needs no channel."""
    shows = view(trim(max_tokens=1, token_counter=len))

    def model(state: Any) -> dict[str, Any]:
        return {"messages": [("ai", f"{MODEL_INPUT_KEY in state} {len(shows(state))}")]}

    talk = {"messages": [("human", "q0"), ("ai", "a0"), ("human", "q1")]}
    assert _graph(Bare, shows, model).invoke(talk)["messages"][-1].text == "False 1"


def test_a_node_that_calls_the_view_streams_only_the_answer() -> None:
    """A view that is a node of its own is streamed with what it makes, as langgraph does it."""
    shows = view(NODES["instructions"], trim(max_tokens=2, token_counter=len))

    def model(state: Any) -> dict[str, Any]:
        return {"messages": [AIMessage(f"I see {len(shows(state))}")]}

    builder = StateGraph(ChatState).add_node("model", model).add_edge(START, "model")
    alone: Any = builder.compile()
    talk: Any = {"messages": [HumanMessage("hello", id="h")]}

    def streamed(graph: Any) -> list[str]:
        return [m.text for m, _ in graph.stream(talk, stream_mode="messages")]

    assert streamed(alone) == ["I see 2"]
    assert streamed(_graph(ChatState, shows, _echo)) == ["Be kind.", "I see 2"]


def test_servers_are_told_the_schema_of_a_chat() -> None:
    """On Python 3.11 too, where pydantic takes no TypedDict of typing's."""
    builder = StateGraph(ChatState).add_node("model", _echo).add_edge(START, "model")
    assert "messages" in builder.compile().get_output_jsonschema()["properties"]
