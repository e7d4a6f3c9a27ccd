"""Trimming: the result is valid for providers, fits the budget, and has the newest question."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph, add_messages

from perdure import SQLiteCheckpointer
from perdure.errors import BudgetExceeded, ConfigurationError, InvalidMessages
from perdure.memory import ChatState, trim, view
from perdure.memory.conversation import SHORTENED
from perdure.memory.nodes import MODEL_INPUT_KEY
from perdure.memory.short_term.tokens import count_tokens
from tests.memory.conversations import (
    Talk,
    comparison_keys,
    conversations,
    find_newest_question,
    total_cost,
)
from tests.memory.provider_rules import awaits_answer, find_refusals


def count_message_tokens(message: BaseMessage) -> int:
    """Count a token for two characters, and three for the message."""
    return 3 + len(str(message.content)) // 2


def count_list_tokens(messages: list[BaseMessage]) -> int:
    return total_cost(messages, count_message_tokens)


RANDOM_OPTIONS = st.one_of(
    st.fixed_dictionaries({"max_tokens": st.integers(1, 400)}),
    st.fixed_dictionaries({"max_tokens": st.integers(1, 12), "token_counter": st.just(len)}),
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(20, 400),
            "strategy": st.sampled_from(["last", "first"]),
            "allow_partial": st.booleans(),
        }
    ),
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 12),
            "token_counter": st.just(len),
            "strategy": st.just("first"),
        }
    ),
)
QUESTION_TYPES = ("human", "tool")


def count_with_options(options: dict[str, Any], messages: list[BaseMessage]) -> int:
    return int(options.get("token_counter", count_list_tokens)(messages))


def minimum_size(options: dict[str, Any], whole: list[BaseMessage]) -> float:
    """Return the size of the part of a valid conversation that cannot be left out.

    This part is the system message, the question, and the last AI message with what follows it. If
    the last AI message contains the result of a web search, the AI message that called the search
    belongs to the part, too.
    """
    if options.get("allow_partial"):
        return float("inf")  # another test covers shortened messages
    question = find_newest_question(whole)
    first, talked = whole[:1], whole[1:]
    if not first or not isinstance(first[0], SystemMessage):
        first, talked = [], whole
    after = talked if question is None else talked[talked.index(question) + 1 :]
    calls = [i for i, m in enumerate(after) if isinstance(m, AIMessage | ChatMessage)]
    last = calls[-1] if calls else 0
    if calls and (searches := list_search_ids(after[last], "tool_use_id")):
        last = next(i for i in calls if searches & list_search_ids(after[i], "id"))
    begin = after[:1] if question is None and last > 0 else []
    begin += [] if question is None else [question]
    return count_with_options(options, [*first, *begin, *(after[last:] if calls else [])])


def list_search_ids(message: BaseMessage, key: Literal["id", "tool_use_id"]) -> set[str]:
    """Return the ids of the web searches that a message calls, or whose results it contains.

    The key of the id is "id" in a call, and "tool_use_id" in a result.
    """
    blocks = message.content if isinstance(message.content, list) else []
    types = {"id": "server_tool_use", "tool_use_id": "web_search_tool_result"}
    return {b[key] for b in blocks if isinstance(b, dict) and b.get("type") == types[key]}


def remove_omitted_steps_line(message: BaseMessage) -> BaseMessage:
    """Return a message without the line that says how many steps after it are left out."""
    kwargs = dict(message.additional_kwargs)
    if not kwargs.pop("perdure_left_out", None):
        return message
    content: Any = message.content
    if isinstance(content, str):
        content = re.sub(
            r"(\n\n)?\[\d+ earlier steps? of your work .*carried out\.\]$", "", content
        )
    else:
        content = content[:-1]
    return message.model_copy(update={"content": content, "additional_kwargs": kwargs})


# -- invariants


@given(conversations(), RANDOM_OPTIONS, st.booleans())
def test_trimmed_random_list_is_valid_within_budget_and_keeps_newest(
    conversation: Talk, options: dict[str, Any], to_answer: bool
) -> None:
    """It contains the newest question and the last message, or the documented error is raised."""
    ends: Any = {"end_on": QUESTION_TYPES} if to_answer else {}
    node = trim(**{"token_counter": count_list_tokens, **options, **ends})
    whole = trim(max_tokens=99, token_counter=len, **ends)(conversation)
    try:
        shown = node(conversation)
    except BudgetExceeded:
        assert minimum_size(options, whole) > options["max_tokens"]
        return
    assert find_refusals(shown, to_answer=to_answer or awaits_answer(conversation)) == []
    assert count_with_options(options, shown) <= options["max_tokens"]
    question = find_newest_question(conversation)
    if question is not None:
        assert question.id in [message.id for message in shown]
        assert shown[-1].id == whole[-1].id
        if not options.get("allow_partial"):
            assert question in map(remove_omitted_steps_line, shown)
    assert comparison_keys(node(shown)) == comparison_keys(shown)


@given(conversations(), RANDOM_OPTIONS)
def test_trimmed_random_state_is_valid_and_trimming_is_idempotent(
    conversation: Talk, options: dict[str, Any]
) -> None:
    """Messages are removed by id. A call at the end that waits for its results stays."""
    node = trim(**{"token_counter": count_list_tokens, **options})
    try:
        update = node.invoke({"messages": conversation})
    except BudgetExceeded:
        whole = (
            trim(max_tokens=99, token_counter=len)
            .invoke({"messages": conversation})
            .get("messages", [])
        )
        before = cast("Any", add_messages(list[Any](conversation), whole))
        assert minimum_size(options, join_system_messages(before)) > options["max_tokens"]
        return
    remaining: Any = add_messages(list[Any](conversation), update.get("messages", []))
    changed = [m for m in remaining if not any(m is each for each in conversation)]
    assert all(SHORTENED in message.additional_kwargs for message in changed)
    assert find_refusals(make_full_request(remaining), to_answer=awaits_answer(remaining)) == []
    assert select_system_messages(remaining) == select_system_messages(conversation)
    assert count_with_options(options, join_system_messages(remaining)) <= options["max_tokens"]
    question = find_newest_question(conversation)
    assert question is None or question.id in [message.id for message in remaining]
    assert node.invoke({"messages": remaining}) == {}


def select_system_messages(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    return [message for message in messages if isinstance(message, SystemMessage)]


def join_system_messages(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return the messages in the order in which they are shown, with all system messages as one."""
    unique_texts = dict.fromkeys(
        m.text.strip() for m in select_system_messages(messages) if m.text.strip()
    )
    texts = [
        next(m.text for m in select_system_messages(messages) if m.text.strip() == text)
        for text in unique_texts
    ]
    first: list[BaseMessage] = [SystemMessage("\n\n".join(texts))] if texts else []
    return first + [message for message in messages if not isinstance(message, SystemMessage)]


def make_full_request(conversation: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return the request for all messages of a list."""
    return trim(max_tokens=10**6, token_counter=len)([*conversation])


@given(conversations())
def test_large_budget_removes_no_text_from_random_conversation(conversation: Talk) -> None:
    """A view shows each text too, except that of a waiting call at the end."""
    update = trim(max_tokens=10**6).invoke({"messages": conversation})
    removed = {message.id for message in update.get("messages", [])}
    shown = "\n".join(message.text for message in make_full_request(conversation))
    for place, message in enumerate(conversation):
        if isinstance(message, ToolMessage | FunctionMessage) or not message.text.strip():
            continue
        assert message.id not in removed
        rest = {type(later) for later in conversation[place + 1 :]}
        waits = isinstance(message, AIMessage) and rest <= {SystemMessage, ToolMessage}
        assert waits or message.text.strip() in shown


# -- examples


def make_conversation(*kinds: str) -> Talk:
    """Return a conversation by letters.

    `h` is a human message, `a` an AI message, `s` a system message, `c` a call of two tools, and
    `r` and `q` are its results.
    """
    messages: Talk = []
    for number, kind in enumerate(kinds):
        uid = f"{kind}{number}"
        if kind == "h":
            messages.append(HumanMessage(uid, id=uid))
        elif kind == "a":
            messages.append(AIMessage(uid, id=uid))
        elif kind == "s":
            messages.append(SystemMessage(uid, id=uid))
        elif kind == "c":
            calls = [{"name": "look", "args": {}, "id": f"{x}{number}"} for x in "rq"]
            messages.append(AIMessage("", id=uid, tool_calls=calls))
        else:
            call = next(m for m in reversed(messages) if m.id and m.id[0] == "c")
            messages.append(ToolMessage(uid, id=uid, tool_call_id=f"{kind}{(call.id or '')[1:]}"))
    return messages


def join_ids(messages: list[BaseMessage]) -> str:
    return " ".join(message.id or "?" for message in messages)


LONG_CONVERSATION = make_conversation(*"shahacrqahcrqcrq")


@pytest.mark.parametrize(
    ("options", "expected_ids"),
    [
        (
            {"max_tokens": 99, "token_counter": len},
            "s0 h1 a2 h3 a4 c5 r6 q7 a8 h9 c10 r11 q12 c13 r14 q15",
        ),
        ({"max_tokens": 13, "token_counter": len}, "s0 h9 c10 r11 q12 c13 r14 q15"),
        (
            {"max_tokens": 14, "token_counter": len},
            "s0 h3 a4 c5 r6 q7 a8 h9 c10 r11 q12 c13 r14 q15",
        ),
        ({"max_tokens": 7, "token_counter": len}, "s0 h9 c13 r14 q15"),
        ({"max_tokens": 5, "token_counter": len}, "s0 h9 c13 r14 q15"),
        ({"max_tokens": 10, "token_counter": len, "strategy": "first"}, "s0 h1 a2 h9 c13 r14 q15"),
        (
            {"max_tokens": 13, "token_counter": len, "strategy": "first"},
            "s0 h1 a2 h3 a4 c5 r6 q7 a8 h9 c13 r14 q15",
        ),
        ({"max_tokens": 7, "token_counter": len, "strategy": "first"}, "s0 h1 a2 h9 c13 r14 q15"),
    ],
)
def test_trim_keeps_whole_turns_and_newest_exchanges_of_long_turn(
    options: dict[str, Any], expected_ids: str
) -> None:
    assert join_ids(trim(**options)(LONG_CONVERSATION)) == expected_ids


@pytest.mark.parametrize(
    ("options", "expected_ids"),
    [
        ({"max_tokens": 15}, "s0 a2 h3 a4 c5 r6 q7 a8 h9 c10 r11 q12 c13 r14 q15"),
        ({"max_tokens": 12}, "s0 c5 r6 q7 a8 h9 c10 r11 q12 c13 r14 q15"),
        ({"max_tokens": 11}, "s0 a8 h9 c10 r11 q12 c13 r14 q15"),
        ({"max_tokens": 7}, "s0 h9 c13 r14 q15"),
        ({"max_tokens": 15, "include_system": False}, "h1 a2 h3 a4 c5 r6 q7 a8 h9 c10 r11 q12"),
        ({"max_tokens": 13, "strategy": "first"}, "s0 h1 a2 h3 a4 c5 r6 q7 a8 h9 c13 r14 q15"),
    ],
)
def test_start_on_none_may_cut_beginning_of_turn(
    options: dict[str, Any], expected_ids: str
) -> None:
    """A call and its results stay together."""
    shown = join_ids(trim(**options, token_counter=len, start_on=None)(LONG_CONVERSATION))
    assert shown.startswith(expected_ids)
    assert len(shown.split()) <= options["max_tokens"]


@given(conversations(), st.integers(1, 12), st.booleans(), st.booleans())
def test_start_on_none_keeps_at_least_whole_turns(
    conversation: Talk, size: int, include_system: bool, state: bool
) -> None:
    """The result ends like the window of whole turns. After a question it is valid."""
    words: Any = {"max_tokens": size, "token_counter": len, "include_system": include_system}
    nodes = trim(**words), trim(**words, start_on=None)
    try:
        whole, parts = (
            trim_state(node, conversation) if state else node(conversation) for node in nodes
        )
    except BudgetExceeded:
        return
    system = [m for m in parts if isinstance(m, SystemMessage)]
    talked, begun = ([m.id for m in ms if m.type != "system"] for ms in (whole, parts))
    assert (
        include_system or not system or find_newest_question(conversation) is None
    )  # that state stays
    assert begun[len(begun) - len(talked) :] == talked
    if not state:
        assert len(parts) <= size
        first = HumanMessage("before", id="before")
        request = [*system, first, *parts[len(system) :]]
        assert find_refusals(request, to_answer=awaits_answer(conversation)) == []


def trim_state(node: Any, conversation: Talk) -> Any:
    return add_messages(
        list[Any](conversation), node.invoke({"messages": conversation}).get("messages", [])
    )


def test_len_as_token_counter_counts_messages_only() -> None:
    tool = {"name": "look", "description": "x " * 500, "parameters": {"type": "object"}}
    node = trim(max_tokens=5, token_counter=len).with_tools([tool])
    assert join_ids(node(LONG_CONVERSATION)) == "s0 h9 c13 r14 q15"
    assert count_tokens(LONG_CONVERSATION, len, [tool]) == len(LONG_CONVERSATION)
    with pytest.raises(
        BudgetExceeded, match=r"take 5 tokens, but max_tokens is 4 \(system message 1, human"
    ):
        trim(max_tokens=4, token_counter=len, allow_partial=True)(LONG_CONVERSATION)


def test_system_messages_are_joined_in_front_and_part_no_exchange() -> None:
    conversation = make_conversation(*"shacrq")
    conversation.insert(4, SystemMessage("new", id="new"))
    shown = trim(max_tokens=10, token_counter=len)(conversation)
    assert join_ids(shown) == "s0 h1 a2 c3 r4 q5"
    assert shown[0].text == "s0\n\nnew"
    assert trim(max_tokens=10, token_counter=len).invoke({"messages": conversation}) == {}


def test_trimmed_state_keeps_order_and_message_of_parallel_node(tmp_path: Path) -> None:
    builder = StateGraph(ChatState)
    builder.add_node("trim", trim(max_tokens=20, token_counter=len))
    builder.add_node("answer", lambda state: {"messages": [AIMessage("yes", id="new")]})
    builder.add_edge(START, "trim").add_edge(START, "answer")
    with SQLiteCheckpointer.open(tmp_path / "a.db") as saver:
        graph = builder.compile(checkpointer=saver)
        thread: Any = {"configurable": {"thread_id": "t"}}
        out = graph.invoke({"messages": make_conversation(*"hasha")}, thread)
        history_ids = [item.value.id for item in saver.history("t")]
    assert join_ids(out["messages"]) == "h0 a1 s2 h3 a4 new"
    assert history_ids == ["h0", "a1", "s2", "h3", "a4", "new"]


def test_removals_do_not_affect_message_added_meanwhile() -> None:
    """Messages are removed by id."""
    conversation = make_conversation(*"hahaha")
    update = trim(max_tokens=2, token_counter=len).invoke({"messages": conversation})
    meanwhile = add_messages(conversation, [HumanMessage("new", id="new")])  # type: ignore[arg-type]
    assert join_ids(add_messages(meanwhile, update["messages"])) == "h4 a5 new"  # type: ignore[arg-type]


def test_waiting_tool_call_stays_in_state_and_is_not_shown() -> None:
    """A run may be interrupted before its tools, for example to ask a person."""
    conversation = make_conversation(*"hahc")
    assert (
        trim(max_tokens=2, token_counter=len).invoke({"messages": conversation})["messages"][0].id
        == "h0"
    )
    update = trim(max_tokens=2, token_counter=len).invoke({"messages": conversation})
    assert join_ids(add_messages(conversation, update["messages"])) == "h2 c3"  # type: ignore[arg-type]
    assert join_ids(trim(max_tokens=2, token_counter=len)(conversation)) == "h2"


@pytest.mark.parametrize("blocks", [False, True])
def test_allow_partial_shortens_middle_of_long_question(blocks: bool) -> None:
    """A marker says how much was left out. The message keeps its id."""
    text = "What is this? " + "x" * 2_000 + " Please explain."
    content: Any = [
        {"type": "text", "text": text},
        {"type": "image_url", "image_url": {"url": "u"}},
    ]
    conversation: Talk = [
        SystemMessage("Be brief", id="s"),
        HumanMessage(content if blocks else text, id="h"),
    ]
    with pytest.raises(BudgetExceeded, match=r"human message 1\d\d\d.*allow_partial=True"):
        trim(max_tokens=300, token_counter=count_list_tokens)(conversation)
    shown = trim(max_tokens=300, token_counter=count_list_tokens, allow_partial=True)(conversation)
    assert count_list_tokens(shown) <= 300
    assert shown[1].id == "h"
    assert shown[1].text.startswith("What is this?")
    assert shown[1].text.endswith("Please explain.")
    assert "characters left out" in shown[1].text
    assert conversation[1].text == text
    update = trim(max_tokens=300, token_counter=count_list_tokens, allow_partial=True).invoke(
        {"messages": conversation}
    )
    assert [m.text for m in update["messages"]] == [shown[1].text]


def test_allow_partial_shortens_long_tool_result() -> None:
    conversation = make_conversation(*"hcrq")
    conversation[2].content = "found " * 1_000
    shown = trim(max_tokens=200, token_counter=count_list_tokens, allow_partial=True)(conversation)
    assert join_ids(shown) == "h0 c1 r2 q3"
    assert count_list_tokens(shown) <= 200


def test_allow_partial_shortens_parallel_results_equally() -> None:
    """A short result stays unchanged."""
    uids = [f"c{n}" for n in range(10)]
    calls = [{"name": "read", "args": {}, "id": uid} for uid in uids]
    results = [ToolMessage("word " * 1_000, tool_call_id=uid, id=uid) for uid in uids[1:]]
    short = ToolMessage("short", tool_call_id="c0", id="c0")
    conversation: Talk = [HumanMessage("Compare"), AIMessage("", tool_calls=calls), short, *results]
    shown = trim(max_tokens=2_000, token_counter=count_list_tokens, allow_partial=True)(
        conversation
    )
    lengths = [len(message.text) for message in shown[3:]]
    assert 1_800 <= count_list_tokens(shown) <= 2_000
    assert shown[:3] == conversation[:3]
    assert max(lengths) - min(lengths) <= 20


def test_allow_partial_cannot_shorten_images() -> None:
    question: Any = [{"type": "image_url", "image_url": {"url": "data:" + "x" * 900}}]
    with pytest.raises(BudgetExceeded, match="send smaller files") as caught:
        trim(max_tokens=100, token_counter=count_list_tokens, allow_partial=True)(
            [HumanMessage(question)]
        )
    assert "allow_partial" not in str(caught.value)  # the option is already set


def test_list_without_question_is_trimmed_as_one_turn() -> None:
    """If it does not fit, a line replaces exchanges of its middle."""
    conversation = make_conversation(*"sa")
    assert join_ids(trim(max_tokens=100)(conversation)) == "s0 a1"
    long = make_conversation(*"sacrqcrqcrq")
    assert join_ids(trim(max_tokens=8, token_counter=len)(long)) == "s0 ? a1 c8 r9 q10"
    assert join_ids(trim(max_tokens=9, token_counter=len)(long)) == "s0 ? a1 c5 r6 q7 c8 r9 q10"
    assert join_ids(trim(max_tokens=6, token_counter=len)(long[:1] + long[2:])) == "s0 ? c8 r9 q10"
    assert trim(max_tokens=100).invoke({"messages": conversation}) == {}
    assert trim(max_tokens=100)([]) == []


def test_trim_gives_same_result_sync_async_in_chain_and_as_node() -> None:
    node = trim(max_tokens=5, token_counter=len)
    shown = node(LONG_CONVERSATION)
    assert node.invoke(LONG_CONVERSATION) == shown
    assert asyncio.run(node.ainvoke(LONG_CONVERSATION)) == shown
    assert (node | (lambda messages: messages)).invoke(LONG_CONVERSATION) == shown
    assert (ChatPromptTemplate.from_messages(LONG_CONVERSATION) | node).invoke({})[0].text == "s0"
    assert node({"messages": LONG_CONVERSATION}) == view(node)(LONG_CONVERSATION) == shown
    assert view(node).invoke({"messages": LONG_CONVERSATION}) == {MODEL_INPUT_KEY: shown}
    removed = node.invoke({"messages": LONG_CONVERSATION})
    assert asyncio.run(node.ainvoke({"messages": LONG_CONVERSATION})) == removed
    remaining = add_messages(list[Any](LONG_CONVERSATION), removed["messages"])
    assert remaining == [remove_omitted_steps_line(message) for message in shown]


@pytest.mark.parametrize(
    ("options", "expected_message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"max_tokens": 0.5}, "the model is None"),
        ({"max_tokens": 0.5, "token_counter": len}, "expected a chat model, or the name"),
        ({"max_tokens": 5, "strategy": "middle"}, "strategy is 'middle'"),
        ({"max_tokens": 5, "start_on": "ai"}, "'start_on' is 'ai'; expected one of 'human', None"),
        ({"max_tokens": 5, "end_on": "system"}, "'end_on' is 'system'"),
        ({"max_tokens": 5, "messages_key": ""}, "messages_key is ''"),
    ],
)
def test_invalid_options_are_refused_by_name(
    options: dict[str, Any], expected_message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        trim(**options)
    assert expected_message in str(caught.value)


@pytest.mark.parametrize(
    ("state", "expected_message"),
    [
        ({}, "no channel 'messages'"),
        ({"messages": "hello"}, "got a str ('hello')"),
        (
            {"messages": [HumanMessage("a"), ("user", "b")]},
            "the element at index 1 is a tuple (('user', 'b'))",
        ),
    ],
)
def test_invalid_messages_are_refused_by_index(state: Any, expected_message: str) -> None:
    with pytest.raises(InvalidMessages) as caught:
        trim(max_tokens=50).invoke(state)
    assert expected_message in str(caught.value)


def test_tools_that_exceed_budget_are_refused() -> None:
    """Their schemas are part of the request.

    They are bound to the model or passed to `with_tools`.
    """
    tool = {"name": "look", "description": "x " * 500, "parameters": {"type": "object"}}
    with pytest.raises(BudgetExceeded, match="with its tools"):
        trim(max_tokens=100).with_tools([tool])(make_conversation("h"))
    bound = ChatOpenAI(model="gpt-4o", api_key=lambda: "none").bind_tools([tool])
    with pytest.raises(BudgetExceeded, match="with its tools"):
        trim(max_tokens=100, token_counter=bound)(make_conversation("h"))


def test_fractional_max_tokens_is_share_of_model_window() -> None:
    model = ChatOpenAI(model="a", api_key=lambda: "none", profile={"max_input_tokens": 440})
    conversation = make_conversation(*"hahah")
    assert join_ids(trim(max_tokens=0.05, token_counter=model)(conversation)) == "h2 a3 h4"
    assert join_ids(trim(max_tokens=1.0, token_counter=model)(conversation)) == "h0 a1 h2 a3 h4"


# -- comparison with langchain's trim_messages


@pytest.mark.parametrize(
    ("options", "expected_ids"),
    [
        ({"max_tokens": 10, "token_counter": len}, "h0 a1 h2 a3"),
        ({"max_tokens": 3, "token_counter": len}, "h2 a3"),
        ({"max_tokens": 3, "token_counter": len, "strategy": "first"}, "h2 a3"),
        ({"max_tokens": 3, "token_counter": len, "end_on": ("human", "tool")}, "h0 a1 h2"),
        ({"max_tokens": 3, "token_counter": len, "end_on": "human"}, "h0 a1 h2"),
        ({"max_tokens": 3, "token_counter": len, "end_on": "ai"}, "h2 a3"),
    ],
)
def test_newest_answer_stays_unless_end_on_excludes_it(
    options: dict[str, Any], expected_ids: str
) -> None:
    """In LangChain's `chat_history` the list ends with an answer, which `{input}` follows."""
    conversation = make_conversation(*"haha")
    assert join_ids(trim(**options)(conversation)) == expected_ids
    prompt = ChatPromptTemplate([("placeholder", "{chat_history}"), ("human", "{input}")])
    filled = prompt.invoke(
        {"chat_history": trim(max_tokens=10, token_counter=len)(conversation), "input": "and?"}
    )
    assert [m.type for m in filled.to_messages()] == ["human", "ai", "human", "ai", "human"]


def test_too_long_answer_is_refused_or_shortened() -> None:
    conversation = [HumanMessage("Tell me.", id="h"), AIMessage("long " * 200, id="a")]
    with pytest.raises(BudgetExceeded, match="ai message"):
        trim(max_tokens=100, token_counter=count_list_tokens)(conversation)
    shown = trim(max_tokens=100, token_counter=count_list_tokens, allow_partial=True)(conversation)
    assert join_ids(shown) == "h a"
    assert count_list_tokens(shown) <= 100


@pytest.mark.parametrize(
    ("ends", "expected_ids"), [("ai", "h2 a3"), ("tool", ""), ("human", "h2 a3 h4")]
)
def test_end_on_may_hide_newest_question_but_keeps_it_in_state(
    ends: Any, expected_ids: str
) -> None:
    node = trim(max_tokens=3, token_counter=len, end_on=ends)
    conversation = make_conversation(*"hahah")
    remaining: Any = add_messages(
        list[Any](conversation), node.invoke({"messages": conversation})["messages"]
    )
    assert join_ids(node(conversation)) == expected_ids
    assert join_ids(remaining) == "h2 a3 h4"


@given(st.lists(st.sampled_from(["h", "ha", "hcrq", "hcrqa", "hcrqcrqa"]), min_size=1), st.data())
def test_same_options_give_same_result_as_trim_messages(
    turns: list[str], data: st.DataObject
) -> None:
    """The rule holds if the result of langchain is a valid sequence with a question."""
    conversation = make_conversation(*data.draw(st.sampled_from(["", "s"])), *"".join(turns))
    ends: Any = data.draw(st.sampled_from([None, QUESTION_TYPES, "human", "ai"]))
    first = isinstance(conversation[0], SystemMessage)
    budget = data.draw(st.integers(1, count_list_tokens([*conversation]) + 10))
    words: Any = {"max_tokens": budget, "token_counter": count_list_tokens, "end_on": ends}
    theirs = trim_messages(
        conversation, **words, strategy="last", start_on="human", include_system=True
    )
    if len(theirs) > first and not find_refusals(theirs, to_answer=False):
        assert join_ids(trim(**words)(conversation)) == join_ids(theirs)


def test_example_of_langgraph_concept_page_matches_trim_messages() -> None:
    """The page is "Knowing when to remove messages".

    `start_on` and `include_system` always have these values.
    """
    conversation = [
        SystemMessage("You answer briefly."),
        HumanMessage("Hello, who are you?"),
        AIMessage("An assistant that plans journeys by train and by ship."),
        HumanMessage("When is the first train?"),
        AIMessage("At 06:02."),
        HumanMessage("And the next?"),
        AIMessage("At 06:32."),
    ]
    model = ChatOpenAI(model="gpt-4", api_key=lambda: "none")
    words: Any = {"max_tokens": 45, "strategy": "last", "end_on": ["human", "tool"]}
    shown = trim(**words, token_counter=model)(conversation)
    assert [m.text for m in shown] == [conversation[0].text, *(m.text for m in conversation[3:6])]
    assert shown == trim_messages(
        conversation,
        **words,
        token_counter=partial(count_tokens, counter="gpt-4"),
        start_on="human",
        include_system=True,
    )


def test_example_of_langchain_chatbot_page_shows_two_newest_messages() -> None:
    history: list[BaseMessage] = [
        HumanMessage("Hey there! I'm Nemo."),
        AIMessage("Hello!"),
        HumanMessage("How are you today?"),
        AIMessage("Fine thanks!"),
    ]
    prompt = ChatPromptTemplate(
        [
            ("system", "You are a helpful assistant."),
            ("placeholder", "{chat_history}"),
            ("human", "{input}"),
        ]
    )
    window = (lambda given: given["chat_history"]) | trim(max_tokens=2, token_counter=len)
    chain = RunnablePassthrough.assign(chat_history=window) | prompt
    for question in ("Where does P. Sherman live?", "What is my name?"):
        shown = chain.invoke({"chat_history": history, "input": question}).to_messages()
        assert shown[1:] == [*history[-2:], HumanMessage(question)]
        history += [HumanMessage(question), AIMessage("42 Wallaby Way, Sydney.")]
