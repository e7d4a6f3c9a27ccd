"""Trimming: always a sequence that providers take, within its budget, with the newest question."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

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
from perdure.memory.tokens import count_tokens
from tests.memory.conversations import (
    Talk,
    comparison_keys,
    conversations,
    find_newest_question,
    total_cost,
)
from tests.memory.providers import awaits_answer, find_refusals


def cost(message: BaseMessage) -> int:
    """A token for two characters, and three for the message."""
    return 3 + len(str(message.content)) // 2


def count(messages: list[BaseMessage]) -> int:
    return total_cost(messages, cost)


options = st.one_of(
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
QUESTION = ("human", "tool")


def size(given: dict[str, Any], messages: list[BaseMessage]) -> int:
    return int(given.get("token_counter", count)(messages))


def least(given: dict[str, Any], whole: list[BaseMessage]) -> float:
    """What of a valid conversation cannot be left out.

    The system message, the question, and the last AI message with what follows it.
    """
    if given.get("allow_partial"):
        return float("inf")  # what can be shortened is another test's
    question = find_newest_question(whole)
    first, talked = whole[:1], whole[1:]
    if not first or not isinstance(first[0], SystemMessage):
        first, talked = [], whole
    after = talked if question is None else talked[talked.index(question) + 1 :]
    calls = [i for i, m in enumerate(after) if isinstance(m, AIMessage | ChatMessage)]
    begin = after[:1] if question is None and calls and calls[-1] > 0 else []
    begin += [] if question is None else [question]
    return size(given, [*first, *begin, *(after[calls[-1] :] if calls else [])])


def without_line(message: BaseMessage) -> BaseMessage:
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


@given(conversations(), options, st.booleans())
def test_a_view_is_valid_within_its_budget_and_keeps_the_newest(
    talk: Talk, given: dict[str, Any], to_answer: bool
) -> None:
    """The newest question, and the last of what follows it; or it is the documented error."""
    ends: Any = {"end_on": QUESTION} if to_answer else {}
    node = trim(**{"token_counter": count, **given, **ends})
    whole = trim(max_tokens=99, token_counter=len, **ends)(talk)
    try:
        shown = node(talk)
    except BudgetExceeded:
        assert least(given, whole) > given["max_tokens"]
        return
    assert find_refusals(shown, to_answer=to_answer or awaits_answer(talk)) == []
    assert size(given, shown) <= given["max_tokens"]
    question = find_newest_question(talk)
    if question is not None:
        assert question.id in [message.id for message in shown]
        assert shown[-1].id == whole[-1].id
        if not given.get("allow_partial"):
            assert question in map(without_line, shown)
    assert comparison_keys(node(shown)) == comparison_keys(shown)


@given(conversations(), options)
def test_a_state_is_left_valid_and_a_second_time_as_it_is(
    talk: Talk, given: dict[str, Any]
) -> None:
    """What is removed is removed by id; a call that waits for its results at the end stays."""
    node = trim(**{"token_counter": count, **given})
    try:
        update = node.invoke({"messages": talk})
    except BudgetExceeded:
        whole = (
            trim(max_tokens=99, token_counter=len).invoke({"messages": talk}).get("messages", [])
        )
        before = cast("Any", add_messages(list[Any](talk), whole))
        assert least(given, one_system(before)) > given["max_tokens"]
        return
    left: Any = add_messages(list[Any](talk), update.get("messages", []))
    changed = [m for m in left if not any(m is each for each in talk)]
    assert all(SHORTENED in message.additional_kwargs for message in changed)
    assert find_refusals(everything(left), to_answer=awaits_answer(left)) == []
    assert systems(left) == systems(talk)
    assert size(given, one_system(left)) <= given["max_tokens"]
    question = find_newest_question(talk)
    assert question is None or question.id in [message.id for message in left]
    assert node.invoke({"messages": left}) == {}


def systems(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    return [message for message in messages if isinstance(message, SystemMessage)]


def one_system(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The messages in the order in which they are shown, all system messages as one."""
    told = dict.fromkeys(m.text.strip() for m in systems(messages) if m.text.strip())
    texts = [next(m.text for m in systems(messages) if m.text.strip() == text) for text in told]
    first: list[BaseMessage] = [SystemMessage("\n\n".join(texts))] if texts else []
    return first + [message for message in messages if not isinstance(message, SystemMessage)]


def everything(talk: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return the request for all messages of a list."""
    return trim(max_tokens=10**6, token_counter=len)([*talk])


@given(conversations())
def test_what_fits_is_neither_removed_nor_lost(talk: Talk) -> None:
    """A state keeps each text, and a view shows it, except that of a call at the end."""
    update = trim(max_tokens=10**6).invoke({"messages": talk})
    removed = {message.id for message in update.get("messages", [])}
    shown = "\n".join(message.text for message in everything(talk))
    for place, message in enumerate(talk):
        if isinstance(message, ToolMessage | FunctionMessage) or not message.text.strip():
            continue
        assert message.id not in removed
        rest = {type(later) for later in talk[place + 1 :]}
        waits = isinstance(message, AIMessage) and rest <= {SystemMessage, ToolMessage}
        assert waits or message.text.strip() in shown


# -- by example


def talk_of(*kinds: str) -> Talk:
    """`h` human, `a` AI, `s` system, `c` a call of two tools, `r` and `q` its results."""
    made: Talk = []
    for number, kind in enumerate(kinds):
        uid = f"{kind}{number}"
        if kind == "h":
            made.append(HumanMessage(uid, id=uid))
        elif kind == "a":
            made.append(AIMessage(uid, id=uid))
        elif kind == "s":
            made.append(SystemMessage(uid, id=uid))
        elif kind == "c":
            calls = [{"name": "look", "args": {}, "id": f"{x}{number}"} for x in "rq"]
            made.append(AIMessage("", id=uid, tool_calls=calls))
        else:
            call = next(m for m in reversed(made) if m.id and m.id[0] == "c")
            made.append(ToolMessage(uid, id=uid, tool_call_id=f"{kind}{(call.id or '')[1:]}"))
    return made


def ids(messages: list[BaseMessage]) -> str:
    return " ".join(message.id or "?" for message in messages)


LONG = talk_of(*"shahacrqahcrqcrq")


@pytest.mark.parametrize(
    ("options", "left"),
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
def test_what_stays(options: dict[str, Any], left: str) -> None:
    """Whole turns; of a turn that is too long the question, and the newest exchanges."""
    assert ids(trim(**options)(LONG)) == left


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"max_tokens": 15}, "s0 a2 h3 a4 c5 r6 q7 a8 h9 c10 r11 q12 c13 r14 q15"),
        ({"max_tokens": 12}, "s0 c5 r6 q7 a8 h9 c10 r11 q12 c13 r14 q15"),
        ({"max_tokens": 11}, "s0 a8 h9 c10 r11 q12 c13 r14 q15"),
        ({"max_tokens": 7}, "s0 h9 c13 r14 q15"),
        ({"max_tokens": 15, "include_system": False}, "h1 a2 h3 a4 c5 r6 q7 a8 h9 c10 r11 q12"),
        ({"max_tokens": 13, "strategy": "first"}, "s0 h1 a2 h3 a4 c5 r6 q7 a8 h9 c13 r14 q15"),
    ],
)
def test_a_turn_may_lose_its_beginning(options: dict[str, Any], left: str) -> None:
    """With `start_on=None`: a call and its results stay together."""
    shown = ids(trim(**options, token_counter=len, start_on=None)(LONG))
    assert shown.startswith(left)
    assert len(shown.split()) <= options["max_tokens"]


@given(conversations(), st.integers(1, 12), st.booleans(), st.booleans())
def test_a_window_that_begins_anywhere_is_no_shorter(
    talk: Talk, size: int, include_system: bool, state: bool
) -> None:
    """It ends with what a window of whole turns has, and after a question it is valid."""
    words: Any = {"max_tokens": size, "token_counter": len, "include_system": include_system}
    nodes = trim(**words), trim(**words, start_on=None)
    try:
        whole, parts = (left_by(node, talk) if state else node(talk) for node in nodes)
    except BudgetExceeded:
        return
    system = [m for m in parts if isinstance(m, SystemMessage)]
    talked, begun = ([m.id for m in ms if m.type != "system"] for ms in (whole, parts))
    assert include_system or not system or find_newest_question(talk) is None  # that state stays
    assert begun[len(begun) - len(talked) :] == talked
    if not state:
        assert len(parts) <= size
        first = HumanMessage("before", id="before")
        asked = [*system, first, *parts[len(system) :]]
        assert find_refusals(asked, to_answer=awaits_answer(talk)) == []


def left_by(node: Any, talk: Talk) -> Any:
    return add_messages(list[Any](talk), node.invoke({"messages": talk}).get("messages", []))


def test_len_counts_messages_and_no_tools() -> None:
    """As in langchain."""
    tool = {"name": "look", "description": "x " * 500, "parameters": {"type": "object"}}
    node = trim(max_tokens=5, token_counter=len).with_tools([tool])
    assert ids(node(LONG)) == "s0 h9 c13 r14 q15"
    assert count_tokens(LONG, len, [tool]) == len(LONG)
    with pytest.raises(
        BudgetExceeded, match=r"take 5 tokens, but max_tokens is 4 \(system message 1, human"
    ):
        trim(max_tokens=4, token_counter=len, allow_partial=True)(LONG)


def test_system_messages_are_joined_in_front() -> None:
    """Each counts; one in the middle of an exchange does not part it."""
    talk = talk_of(*"shacrq")
    talk.insert(4, SystemMessage("new", id="new"))
    shown = trim(max_tokens=10, token_counter=len)(talk)
    assert ids(shown) == "s0 h1 a2 c3 r4 q5"
    assert shown[0].text == "s0\n\nnew"
    assert trim(max_tokens=10, token_counter=len).invoke({"messages": talk}) == {}


def test_a_state_keeps_its_order_and_what_is_added_at_the_same_time(tmp_path: Path) -> None:
    """A system message in the middle stays there; a parallel node's answer is not lost."""
    builder = StateGraph(ChatState)
    builder.add_node("trim", trim(max_tokens=20, token_counter=len))
    builder.add_node("answer", lambda state: {"messages": [AIMessage("yes", id="new")]})
    builder.add_edge(START, "trim").add_edge(START, "answer")
    with SQLiteCheckpointer.open(tmp_path / "a.db") as saver:
        graph = builder.compile(checkpointer=saver)
        thread: Any = {"configurable": {"thread_id": "t"}}
        out = graph.invoke({"messages": talk_of(*"hasha")}, thread)
        said = [item.value.id for item in saver.history("t")]
    assert ids(out["messages"]) == "h0 a1 s2 h3 a4 new"
    assert said == ["h0", "a1", "s2", "h3", "a4", "new"]


def test_what_another_node_adds_meanwhile_stays() -> None:
    """Removals are by id."""
    talk = talk_of(*"hahaha")
    update = trim(max_tokens=2, token_counter=len).invoke({"messages": talk})
    meanwhile = add_messages(talk, [HumanMessage("new", id="new")])  # type: ignore[arg-type]
    assert ids(add_messages(meanwhile, update["messages"])) == "h4 a5 new"  # type: ignore[arg-type]


def test_a_call_that_waits_stays_in_the_state_and_is_not_shown() -> None:
    """A run is interrupted before its tools, say to ask a human."""
    talk = talk_of(*"hahc")
    assert (
        trim(max_tokens=2, token_counter=len).invoke({"messages": talk})["messages"][0].id == "h0"
    )
    update = trim(max_tokens=2, token_counter=len).invoke({"messages": talk})
    assert ids(add_messages(talk, update["messages"])) == "h2 c3"  # type: ignore[arg-type]
    assert ids(trim(max_tokens=2, token_counter=len)(talk)) == "h2"


@pytest.mark.parametrize("blocks", [False, True])
def test_partial_shortens_a_question_that_is_too_long(blocks: bool) -> None:
    """Its middle goes; the marker says how much; the message keeps its id."""
    text = "What is this? " + "x" * 2_000 + " Please explain."
    content: Any = [
        {"type": "text", "text": text},
        {"type": "image_url", "image_url": {"url": "u"}},
    ]
    talk: Talk = [
        SystemMessage("Be brief", id="s"),
        HumanMessage(content if blocks else text, id="h"),
    ]
    with pytest.raises(BudgetExceeded, match=r"human message 1\d\d\d.*allow_partial=True"):
        trim(max_tokens=300, token_counter=count)(talk)
    shown = trim(max_tokens=300, token_counter=count, allow_partial=True)(talk)
    assert count(shown) <= 300
    assert shown[1].id == "h"
    assert shown[1].text.startswith("What is this?")
    assert shown[1].text.endswith("Please explain.")
    assert "characters left out" in shown[1].text
    assert talk[1].text == text
    update = trim(max_tokens=300, token_counter=count, allow_partial=True).invoke(
        {"messages": talk}
    )
    assert [m.text for m in update["messages"]] == [shown[1].text]


def test_partial_shortens_the_results_the_model_goes_on_from() -> None:
    """The question is short, what the tool found is not."""
    talk = talk_of(*"hcrq")
    talk[2].content = "found " * 1_000
    shown = trim(max_tokens=200, token_counter=count, allow_partial=True)(talk)
    assert ids(shown) == "h0 c1 r2 q3"
    assert count(shown) <= 200


def test_partial_shortens_parallel_results_alike() -> None:
    """Each of ten keeps its share; what is short stays as it is."""
    uids = [f"c{n}" for n in range(10)]
    calls = [{"name": "read", "args": {}, "id": uid} for uid in uids]
    results = [ToolMessage("word " * 1_000, tool_call_id=uid, id=uid) for uid in uids[1:]]
    short = ToolMessage("short", tool_call_id="c0", id="c0")
    talk: Talk = [HumanMessage("Compare"), AIMessage("", tool_calls=calls), short, *results]
    shown = trim(max_tokens=2_000, token_counter=count, allow_partial=True)(talk)
    lengths = [len(message.text) for message in shown[3:]]
    assert 1_800 <= count(shown) <= 2_000
    assert shown[:3] == talk[:3]
    assert max(lengths) - min(lengths) <= 20


def test_partial_cannot_shorten_what_is_no_text() -> None:
    """A picture is whole or not there."""
    question: Any = [{"type": "image_url", "image_url": {"url": "data:" + "x" * 900}}]
    with pytest.raises(BudgetExceeded, match="send smaller files") as caught:
        trim(max_tokens=100, token_counter=count, allow_partial=True)([HumanMessage(question)])
    assert "allow_partial" not in str(caught.value)  # it is set already


def test_a_list_without_a_question() -> None:
    """Such a list is one turn. If it does not fit, a line replaces exchanges of its middle."""
    talk = talk_of(*"sa")
    assert ids(trim(max_tokens=100)(talk)) == "s0 a1"
    long = talk_of(*"sacrqcrqcrq")
    assert ids(trim(max_tokens=8, token_counter=len)(long)) == "s0 ? a1 c8 r9 q10"
    assert ids(trim(max_tokens=9, token_counter=len)(long)) == "s0 ? a1 c5 r6 q7 c8 r9 q10"
    assert ids(trim(max_tokens=6, token_counter=len)(long[:1] + long[2:])) == "s0 ? c8 r9 q10"
    assert trim(max_tokens=100).invoke({"messages": talk}) == {}
    assert trim(max_tokens=100)([]) == []


def test_the_same_in_both_colours_in_a_chain_and_as_a_node() -> None:
    """One object for all."""
    node = trim(max_tokens=5, token_counter=len)
    shown = node(LONG)
    assert node.invoke(LONG) == shown
    assert asyncio.run(node.ainvoke(LONG)) == shown
    assert (node | (lambda messages: messages)).invoke(LONG) == shown
    assert (ChatPromptTemplate.from_messages(LONG) | node).invoke({})[0].text == "s0"
    assert node({"messages": LONG}) == view(node)(LONG) == shown
    assert view(node).invoke({"messages": LONG}) == {MODEL_INPUT_KEY: shown}
    removed = node.invoke({"messages": LONG})
    assert asyncio.run(node.ainvoke({"messages": LONG})) == removed
    left = add_messages(list[Any](LONG), removed["messages"])
    assert left == [without_line(message) for message in shown]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"max_tokens": 0.5}, "the model is None"),
        ({"max_tokens": 0.5, "token_counter": len}, "expected a chat model, or the name"),
        ({"max_tokens": 5, "strategy": "middle"}, "strategy is 'middle'"),
        ({"max_tokens": 5, "start_on": "ai"}, "start_on is 'ai'; expected one of 'human', None"),
        ({"max_tokens": 5, "end_on": "system"}, "end_on is 'system'"),
        ({"max_tokens": 5, "messages_key": ""}, "messages_key is ''"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], said: str) -> None:
    """Before anything runs."""
    with pytest.raises(ConfigurationError) as caught:
        trim(**options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "no channel 'messages'"),
        ({"messages": "hello"}, "is a str"),
        (
            {"messages": [HumanMessage("a"), ("user", "b")]},
            "the message at index 1 is ('user', 'b'), a tuple",
        ),
    ],
)
def test_what_are_no_messages_is_refused(state: Any, said: str) -> None:
    """By name and place."""
    with pytest.raises(InvalidMessages) as caught:
        trim(max_tokens=50).invoke(state)
    assert said in str(caught.value)


def test_tools_that_leave_no_room_are_refused() -> None:
    """Their schemas are part of the request, bound to the model or named by who makes it."""
    tool = {"name": "look", "description": "x " * 500, "parameters": {"type": "object"}}
    with pytest.raises(BudgetExceeded, match="with its tools"):
        trim(max_tokens=100).with_tools([tool])(talk_of("h"))
    bound = ChatOpenAI(model="gpt-4o", api_key=lambda: "none").bind_tools([tool])
    with pytest.raises(BudgetExceeded, match="with its tools"):
        trim(max_tokens=100, token_counter=bound)(talk_of("h"))


def test_a_share_of_the_window_of_a_model() -> None:
    """By its profile."""
    model = ChatOpenAI(model="a", api_key=lambda: "none", profile={"max_input_tokens": 440})
    talk = talk_of(*"hahah")
    assert ids(trim(max_tokens=0.05, token_counter=model)(talk)) == "h2 a3 h4"
    assert ids(trim(max_tokens=1.0, token_counter=model)(talk)) == "h0 a1 h2 a3 h4"


# -- as langchain's trim_messages


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"max_tokens": 10, "token_counter": len}, "h0 a1 h2 a3"),
        ({"max_tokens": 3, "token_counter": len}, "h2 a3"),
        ({"max_tokens": 3, "token_counter": len, "strategy": "first"}, "h2 a3"),
        ({"max_tokens": 3, "token_counter": len, "end_on": ("human", "tool")}, "h0 a1 h2"),
        ({"max_tokens": 3, "token_counter": len, "end_on": "human"}, "h0 a1 h2"),
        ({"max_tokens": 3, "token_counter": len, "end_on": "ai"}, "h2 a3"),
    ],
)
def test_the_newest_answer_stays_unless_end_on_says_otherwise(
    options: dict[str, Any], left: str
) -> None:
    """In LangChain's `chat_history` the list ends with an answer; `{input}` follows it."""
    talk = talk_of(*"haha")
    assert ids(trim(**options)(talk)) == left
    prompt = ChatPromptTemplate([("placeholder", "{chat_history}"), ("human", "{input}")])
    filled = prompt.invoke(
        {"chat_history": trim(max_tokens=10, token_counter=len)(talk), "input": "and?"}
    )
    assert [m.type for m in filled.to_messages()] == ["human", "ai", "human", "ai", "human"]


def test_an_answer_that_is_too_long_is_not_dropped_silently() -> None:
    """An error, or its middle."""
    talk = [HumanMessage("Tell me.", id="h"), AIMessage("long " * 200, id="a")]
    with pytest.raises(BudgetExceeded, match="ai message"):
        trim(max_tokens=100, token_counter=count)(talk)
    shown = trim(max_tokens=100, token_counter=count, allow_partial=True)(talk)
    assert ids(shown) == "h a"
    assert count(shown) <= 100


@pytest.mark.parametrize(("ends", "last"), [("ai", "h2 a3"), ("tool", ""), ("human", "h2 a3 h4")])
def test_end_on_may_leave_out_the_newest_question(ends: Any, last: str) -> None:
    """It is not removed from a state."""
    node = trim(max_tokens=3, token_counter=len, end_on=ends)
    talk = talk_of(*"hahah")
    left: Any = add_messages(list[Any](talk), node.invoke({"messages": talk})["messages"])
    assert ids(node(talk)) == last
    assert ids(left) == "h2 a3 h4"


@given(st.lists(st.sampled_from(["h", "ha", "hcrq", "hcrqa", "hcrqcrqa"]), min_size=1), st.data())
def test_the_same_words_give_what_langchain_gives(turns: list[str], data: st.DataObject) -> None:
    """Where that is a valid sequence with a question in it."""
    talk = talk_of(*data.draw(st.sampled_from(["", "s"])), *"".join(turns))
    ends: Any = data.draw(st.sampled_from([None, QUESTION, "human", "ai"]))
    first = isinstance(talk[0], SystemMessage)
    budget = data.draw(st.integers(1, count([*talk]) + 10))
    words: Any = {"max_tokens": budget, "token_counter": count, "end_on": ends}
    theirs = trim_messages(talk, **words, strategy="last", start_on="human", include_system=True)
    if len(theirs) > first and not find_refusals(theirs, to_answer=False):
        assert ids(trim(**words)(talk)) == ids(theirs)


def test_the_example_of_the_concept_page() -> None:
    """docs: "Knowing when to remove messages"; `start_on`, `include_system` are always so."""
    talk = [
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
    shown = trim(**words, token_counter=model)(talk)
    assert [m.text for m in shown] == [talk[0].text, *(m.text for m in talk[3:6])]
    assert shown == trim_messages(
        talk,
        **words,
        token_counter=partial(count_tokens, counter="gpt-4"),
        start_on="human",
        include_system=True,
    )


def test_the_example_of_the_chatbot_page() -> None:
    """LangChain's memory management: only the two newest messages reach the model."""
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
