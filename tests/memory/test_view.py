"""Views of several short-term memory nodes: each combination shows a valid sequence."""

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
from tests.memory.provider_rules import awaits_answer, find_refusals

BUDGET = 250


def count_tokens_of_list(messages: list[BaseMessage]) -> int:
    return total_cost(messages, lambda message: 3 + len(str(message.content)) // 2)


def answer_with_summary(_: Any) -> AIMessage:
    return AIMessage("They spoke of trains.")


def _make_instructions_node() -> MessagesNode:
    store = SQLiteStore.open(":memory:", index=None)
    return use_instructions(Instructions(store, default="Be kind."))


def _make_learning_node() -> Any:
    return update_instructions(RunnableLambda(answer_with_summary), Instructions())


MAKERS: dict[str, Callable[[], MessagesNode]] = {
    "instructions": _make_instructions_node,
    "summary": lambda: summarize(
        RunnableLambda(answer_with_summary), trigger=("messages", 4), keep=("messages", 1)
    ),
    "summary for a human": lambda: summarize(
        RunnableLambda(answer_with_summary), trigger=("messages", 2), keep=("messages", 3)
    ),
    "clearing": lambda: clear_tool_outputs(keep=1, min_tokens=50),
    "messages": lambda: trim(max_tokens=9, token_counter=len),
    "tokens": lambda: trim(max_tokens=BUDGET, token_counter=count_tokens_of_list),
    "first": lambda: trim(
        max_tokens=BUDGET, token_counter=count_tokens_of_list, strategy="first", allow_partial=True
    ),
}
NODES = {name: make() for name, make in MAKERS.items()}
RANDOM_SUMMARIES = st.one_of(
    st.none(), st.just({"text": "Of planes.", "last": "m1", "count": 2}), st.just("Of ships.")
)


@given(
    conversations(),
    st.lists(st.sampled_from(list(NODES)), min_size=1, max_size=4),
    RANDOM_SUMMARIES,
)
def test_random_combination_of_nodes_shows_valid_sequence(
    conversation: Talk, names: list[str], summary: Any
) -> None:
    """Sync and async agree, the newest question is shown, and the budget of the last node holds."""
    memory_view = view(*(NODES[name] for name in names))
    state = {"messages": conversation, "summary": summary, "summarized": []}
    try:
        update = memory_view.invoke(state)
    except BudgetExceeded:
        with pytest.raises(BudgetExceeded):
            asyncio.run(memory_view.ainvoke(state))
        return
    shown = update[MODEL_INPUT_KEY]
    assert list(update) == [MODEL_INPUT_KEY]
    assert comparison_keys(
        asyncio.run(memory_view.ainvoke(state))[MODEL_INPUT_KEY]
    ) == comparison_keys(shown)
    assert find_refusals(shown, to_answer=awaits_answer(conversation)) == []
    question = find_newest_question(conversation)
    assert question is None or question.id in [message.id for message in shown]
    if names[-1] in ("tokens", "first"):
        assert count_tokens_of_list(shown) <= BUDGET
    assert comparison_keys(memory_view.invoke(state)[MODEL_INPUT_KEY]) == comparison_keys(shown)


def test_view_applies_nodes_in_order() -> None:
    """The summary follows the instructions in one system message. The rest is trimmed."""
    conversation: Talk = [SystemMessage("Old.")]
    for n in range(6):
        conversation += [HumanMessage(f"q{n}", id=f"q{n}"), AIMessage(f"a{n}", id=f"a{n}")]
    conversation.append(HumanMessage("now", id="now"))
    state = {"messages": conversation, "summary": {"text": "Of planes.", "last": "a2", "count": 6}}
    memory_view = view(
        NODES["instructions"], NODES["summary"], trim(max_tokens=6, token_counter=len)
    )
    shown = memory_view.invoke(state)[MODEL_INPUT_KEY]
    assert shown[0].text.startswith("Be kind.\n\nSummary")
    assert shown[0].text.endswith("Of planes.")
    assert [message.text for message in shown[1:]] == ["q4", "a4", "q5", "a5", "now"]


@pytest.mark.parametrize(
    ("parts", "expected_message"),
    [
        ((), r"an argument of view\(\) is None"),
        ((print,), r"an argument of view\(\) is <built-in function print>"),
        ((_make_learning_node(),), r"an argument of view\(\) is"),
        (
            (
                trim(max_tokens=1, token_counter=len),
                trim(max_tokens=1, token_counter=len, messages_key="talk"),
            ),
            r"\['messages', 'talk'\]",
        ),
    ],
)
def test_invalid_parts_of_view_are_refused(parts: Any, expected_message: str) -> None:
    with pytest.raises(ConfigurationError, match=expected_message):
        view(*parts)


def test_max_tokens_may_be_first_positional_argument() -> None:
    for node in (trim(3), trim(3).with_tools([]), copy.deepcopy(trim(3))):
        assert trim(max_tokens=3).size == node.size
    assert assemble(3).max_tokens == assemble(max_tokens=3).with_tools([]).max_tokens == 3


@pytest.mark.parametrize(
    ("node", "arguments", "options", "expected_message"),
    [
        (summarize, ["m"], {"max_tokens": 9}, r"max_tokens=9\) is .* trigger=\('messages', 40\)"),
        (trim, [9, "last"], {}, r"trim\(9, 'last'\) is .*: too many positional .* strategy='last'"),
        (trim, [], {"strategy": "last"}, "missing a required argument: 'max_tokens'"),
        (
            assemble,
            [9],
            {"memory": "tea"},
            r"'memory'; expected the arguments max_tokens, .* memories=\(\)",
        ),
        (clear_tool_outputs, [], {"last": 3}, r"clear_tool_outputs\(last=3\) is .* keep=3"),
        (use_memories, [], {"top_k": 5}, "'top_k'; expected the arguments store=None, .* limit=20"),
        (
            update_instructions,
            ["m"],
            {},
            "missing .* 'instructions'; expected .* model, instructions",
        ),
        (
            remember_turns,
            [],
            {"user": "ann"},
            "'user'; expected the arguments store=None, namespace=",
        ),
        (view, [trim(9)], {"max_tokens": 3}, "'max_tokens'; expected the arguments parts"),
    ],
)
def test_unknown_arguments_are_refused_with_list_of_known_ones(
    node: Any, arguments: list[Any], options: dict[str, Any], expected_message: str
) -> None:
    with pytest.raises(ConfigurationError, match=expected_message):
        node(*arguments, **options)


# -- views in a graph


class StateWithoutChannel(TypedDict):
    """A state without a channel for what is shown."""

    messages: Annotated[list[AnyMessage], add_messages]


def _make_graph(state: Any, part: MessagesNode, model: Any, **compiled: Any) -> Any:
    builder = StateGraph(state).add_node("shows", part).add_node("model", model)
    builder.add_edge(START, "shows").add_edge("shows", "model")
    return builder.compile(**compiled)


def _answer_with_message_count(state: Any) -> dict[str, Any]:
    shown = state.get(MODEL_INPUT_KEY, state["messages"])
    return {"messages": [AIMessage(f"I see {len(shown)}")]}


@pytest.mark.parametrize("state", [ChatState, SummaryState])
def test_view_result_reaches_model_and_no_checkpoint(state: Any) -> None:
    """The exported states have the channel."""
    saver = InMemorySaver()
    memory_view = view(trim(max_tokens=1, token_counter=len))
    graph = _make_graph(state, memory_view, _answer_with_message_count, checkpointer=saver)
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


def test_view_result_is_dropped_by_state_without_channel() -> None:
    """A call of the view within the model's node needs no channel."""
    memory_view = view(trim(max_tokens=1, token_counter=len))

    def model(state: Any) -> dict[str, Any]:
        return {"messages": [("ai", f"{MODEL_INPUT_KEY in state} {len(memory_view(state))}")]}

    conversation = {"messages": [("human", "q0"), ("ai", "a0"), ("human", "q1")]}
    assert (
        _make_graph(StateWithoutChannel, memory_view, model)
        .invoke(conversation)["messages"][-1]
        .text
        == "False 1"
    )


def test_view_called_within_node_streams_only_answer() -> None:
    """langgraph streams the result of a view that is a node of its own."""
    memory_view = view(NODES["instructions"], trim(max_tokens=2, token_counter=len))

    def model(state: Any) -> dict[str, Any]:
        return {"messages": [AIMessage(f"I see {len(memory_view(state))}")]}

    builder = StateGraph(ChatState).add_node("model", model).add_edge(START, "model")
    alone: Any = builder.compile()
    conversation: Any = {"messages": [HumanMessage("hello", id="h")]}

    def stream_texts(graph: Any) -> list[str]:
        return [m.text for m, _ in graph.stream(conversation, stream_mode="messages")]

    assert stream_texts(alone) == ["I see 2"]
    assert stream_texts(_make_graph(ChatState, memory_view, _answer_with_message_count)) == [
        "Be kind.",
        "I see 2",
    ]


def test_chat_state_has_output_json_schema() -> None:
    """The rule also holds for Python 3.11, where pydantic accepts no `TypedDict` of `typing`."""
    builder = (
        StateGraph(ChatState).add_node("model", _answer_with_message_count).add_edge(START, "model")
    )
    assert "messages" in builder.compile().get_output_jsonschema()["properties"]
