"""Trimming: always a sequence that providers take, within its budget, with the newest question."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langgraph.graph import START, StateGraph, add_messages

from perdure import SQLiteCheckpointer
from perdure.errors import BudgetExceeded, ConfigurationError, InvalidMessages
from perdure.memory import ChatState, trim
from perdure.memory.nodes import SHOWN
from tests.memory.conversations import Talk, conversations, keys, newest_human, total
from tests.memory.providers import refusals


def cost(message: BaseMessage) -> int:
    """A token for two characters, and three for the message."""
    return 3 + len(str(message.content)) // 2


def count(messages: list[BaseMessage]) -> int:
    return total(messages, cost)


options = st.one_of(
    st.fixed_dictionaries({"tokens": st.integers(1, 400)}),
    st.fixed_dictionaries({"messages": st.integers(1, 12)}),
    st.fixed_dictionaries({"turns": st.integers(1, 4)}),
    st.fixed_dictionaries({"fraction": st.sampled_from([0.1, 0.5, 1.0]), "model": st.just(300)}),
    st.fixed_dictionaries(
        {
            "tokens": st.integers(20, 400),
            "strategy": st.sampled_from(["last", "first"]),
            "truncate": st.booleans(),
        }
    ),
    st.fixed_dictionaries({"messages": st.integers(1, 12), "strategy": st.just("first")}),
)


def limit_of(given: dict[str, Any]) -> float:
    if "fraction" in given:
        return float(int(given["fraction"] * 300))
    return float(given.get("tokens", given.get("messages", float("inf"))))


def size(given: dict[str, Any], messages: list[BaseMessage]) -> int:
    return len(messages) if "messages" in given else count(messages)


def least(given: dict[str, Any], whole: list[BaseMessage]) -> float:
    """What of a valid conversation cannot be left out.

    The system message, the question, and the last AI message with what follows it.
    """
    if given.get("truncate"):
        return float("inf")  # what can be shortened is another test's
    question = newest_human(whole)
    first = [m for m in whole if isinstance(m, SystemMessage) and m.text.strip()][-1:]
    if question is None:
        return size(given, [*first])
    after = whole[whole.index(question) + 1 :]
    calls = [i for i, message in enumerate(after) if isinstance(message, AIMessage)]
    return size(given, [*first, question, *(after[calls[-1] :] if calls else [])])


# -- invariants


@given(conversations(), options)
def test_a_view_is_valid_within_its_budget_and_keeps_the_question(
    talk: Talk, given: dict[str, Any]
) -> None:
    """Or it is the documented error, which says what takes how much."""
    node = trim(counter=count, **given)
    try:
        shown = node(talk)
    except BudgetExceeded:
        assert least(given, trim(turns=99)(talk)) > limit_of(given)
        return
    assert refusals(shown) == []
    assert size(given, shown) <= limit_of(given)
    question = newest_human(talk)
    if question is not None:
        assert question.id in [message.id for message in shown]
        if not given.get("truncate"):
            assert question in shown
    assert keys(node(shown)) == keys(shown)


@given(conversations(), options)
def test_a_state_is_left_valid_and_a_second_time_as_it_is(
    talk: Talk, given: dict[str, Any]
) -> None:
    """What is removed is removed by id; a call that waits for its results at the end stays."""
    node = trim(counter=count, mode="state", **given)
    try:
        update = node.invoke({"messages": talk})
    except BudgetExceeded:
        whole = trim(turns=99, mode="state").invoke({"messages": talk}).get("messages", [])
        before = cast("Any", add_messages(list[Any](talk), whole))
        assert least(given, before) > limit_of(given)
        return
    left: Any = add_messages(list[Any](talk), update.get("messages", []))
    if newest_human(talk) is None:
        assert update == {}
        return
    assert refusals(settled(system_first(left)), to_answer=False) == []
    assert size(given, left) <= limit_of(given)
    assert newest_human(talk).id in [message.id for message in left]  # type: ignore[union-attr]
    assert node.invoke({"messages": left}) == {}


def system_first(messages: list[BaseMessage]) -> list[BaseMessage]:
    """In the order in which they are shown; the order of a state cannot be changed by id."""
    return sorted(messages, key=lambda message: not isinstance(message, SystemMessage))


def settled(messages: list[BaseMessage]) -> list[BaseMessage]:
    """Without a call at the end whose results are still to come."""
    end = len(messages)
    while end and isinstance(messages[end - 1], ToolMessage):
        end -= 1
    last = messages[end - 1] if end else None
    if isinstance(last, AIMessage):
        calls = {call["id"] for call in (*last.tool_calls, *last.invalid_tool_calls)}
        if calls - {m.tool_call_id for m in messages[end:] if isinstance(m, ToolMessage)}:
            return messages[: end - 1]
    return messages


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
        ({"messages": 99}, "s0 h1 a2 h3 a4 c5 r6 q7 a8 h9 c10 r11 q12 c13 r14 q15"),
        ({"messages": 13}, "s0 h9 c10 r11 q12 c13 r14 q15"),
        ({"messages": 14}, "s0 h3 a4 c5 r6 q7 a8 h9 c10 r11 q12 c13 r14 q15"),
        ({"messages": 7}, "s0 h9 c13 r14 q15"),
        ({"messages": 5}, "s0 h9 c13 r14 q15"),
        ({"turns": 1}, "s0 h9 c10 r11 q12 c13 r14 q15"),
        ({"turns": 2}, "s0 h3 a4 c5 r6 q7 a8 h9 c10 r11 q12 c13 r14 q15"),
        ({"messages": 10, "strategy": "first"}, "s0 h1 a2 h9 c13 r14 q15"),
        ({"messages": 13, "strategy": "first"}, "s0 h1 a2 h3 a4 c5 r6 q7 a8 h9 c13 r14 q15"),
        ({"messages": 7, "strategy": "first"}, "s0 h1 a2 h9 c13 r14 q15"),
    ],
)
def test_what_stays(options: dict[str, Any], left: str) -> None:
    """Whole turns; of a turn that is too long the question, and the newest exchanges."""
    assert ids(trim(**options)(LONG)) == left


def test_a_later_system_message_replaces_the_former_and_comes_first() -> None:
    """LangChain4j's rules; one in the middle of an exchange does not part it."""
    talk = talk_of(*"shacrq")
    talk.insert(4, SystemMessage("new", id="new"))
    assert ids(trim(max_messages=10)(talk)) == "new h1 a2 c3 r4 q5"


def test_a_state_keeps_its_order_and_what_is_added_at_the_same_time(tmp_path: Path) -> None:
    """A system message in the middle stays there; a parallel node's answer is not lost."""
    builder = StateGraph(ChatState)
    builder.add_node("trim", trim(max_messages=20, mode="state"))
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
    update = trim(turns=1, mode="state").invoke({"messages": talk})
    meanwhile = add_messages(talk, [HumanMessage("new", id="new")])  # type: ignore[arg-type]
    assert ids(add_messages(meanwhile, update["messages"])) == "h4 a5 new"  # type: ignore[arg-type]


def test_a_call_that_waits_stays_in_the_state_and_is_not_shown() -> None:
    """A run is interrupted before its tools, say to ask a human."""
    talk = talk_of(*"hahc")
    assert trim(turns=1, mode="state").invoke({"messages": talk})["messages"][0].id == "h0"
    left = add_messages(talk, trim(turns=1, mode="state").invoke({"messages": talk})["messages"])  # type: ignore[arg-type]
    assert ids(left) == "h2 c3"  # type: ignore[arg-type]
    assert ids(trim(turns=1)(talk)) == "h2"


@pytest.mark.parametrize("blocks", [False, True])
def test_truncate_shortens_a_question_that_is_too_long(blocks: bool) -> None:
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
    with pytest.raises(BudgetExceeded, match=r"human message 1\d\d\d.*truncate=True"):
        trim(max_tokens=300, counter=count)(talk)
    shown = trim(max_tokens=300, counter=count, truncate=True)(talk)
    assert count(shown) <= 300
    assert shown[1].id == "h"
    assert shown[1].text.startswith("What is this?")
    assert shown[1].text.endswith("Please explain.")
    assert "characters left out" in shown[1].text
    assert talk[1].text == text
    update = trim(max_tokens=300, counter=count, truncate=True, mode="state").invoke(
        {"messages": talk}
    )
    assert [m.text for m in update["messages"]] == [shown[1].text]


def test_truncate_shortens_the_results_the_model_goes_on_from() -> None:
    """The question is short, what the tool found is not."""
    talk = talk_of(*"hcrq")
    talk[2].content = "found " * 1_000
    shown = trim(max_tokens=200, counter=count, truncate=True)(talk)
    assert ids(shown) == "h0 c1 r2 q3"
    assert count(shown) <= 200


def test_truncate_shortens_parallel_results_alike() -> None:
    """Each of ten keeps its share; what is short stays as it is."""
    uids = [f"c{n}" for n in range(10)]
    calls = [{"name": "read", "args": {}, "id": uid} for uid in uids]
    results = [ToolMessage("word " * 1_000, tool_call_id=uid, id=uid) for uid in uids[1:]]
    short = ToolMessage("short", tool_call_id="c0", id="c0")
    talk: Talk = [HumanMessage("Compare"), AIMessage("", tool_calls=calls), short, *results]
    shown = trim(max_tokens=2_000, counter=count, truncate=True)(talk)
    lengths = [len(message.text) for message in shown[3:]]
    assert 1_800 <= count(shown) <= 2_000
    assert shown[:3] == talk[:3]
    assert max(lengths) - min(lengths) <= 20


def test_truncate_cannot_shorten_what_is_no_text() -> None:
    """A picture is whole or not there."""
    question: Any = [{"type": "image_url", "image_url": {"url": "data:" + "x" * 900}}]
    with pytest.raises(BudgetExceeded, match="may not be left out"):
        trim(max_tokens=100, counter=count, truncate=True)([HumanMessage(question)])


def test_a_list_without_a_question() -> None:
    """Nothing to answer: only the system message is shown, and the state is left as it is."""
    talk = talk_of(*"sa")
    assert ids(trim(max_tokens=100)(talk)) == "s0"
    assert trim(max_tokens=100, mode="state").invoke({"messages": talk}) == {}
    assert trim(max_tokens=100)([]) == []


def test_the_same_in_both_colours_in_a_chain_and_as_a_node() -> None:
    """One object for all."""
    node = trim(max_messages=5)
    shown = node(LONG)
    assert node.invoke(LONG) == shown
    assert asyncio.run(node.ainvoke(LONG)) == shown
    assert (node | (lambda messages: messages)).invoke(LONG) == shown
    assert (ChatPromptTemplate.from_messages(LONG) | node).invoke({})[0].text == "s0"
    assert node.invoke({"messages": LONG}) == {SHOWN: shown}
    assert asyncio.run(node.ainvoke({"messages": LONG})) == {SHOWN: shown}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "given: none"),
        ({"tokens": 5, "turns": 2}, "given: tokens=5, turns=2"),
        ({"tokens": 0}, "tokens is 0"),
        ({"messages": True}, "messages is True"),
        ({"turns": 1.5}, "turns is 1.5"),
        ({"fraction": 1.5, "model": 100}, "fraction is 1.5"),
        ({"fraction": 0.5}, "pass model="),
        ({"turns": 2, "truncate": True}, "truncate=True"),
        ({"turns": 2, "strategy": "first"}, "strategy='first'"),
        ({"tokens": 5, "strategy": "middle"}, "strategy is 'middle'"),
        ({"tokens": 5, "mode": "both"}, "mode is 'both'"),
        ({"tokens": 5, "messages_key": ""}, "messages_key is ''"),
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
        ({"messages": [HumanMessage("a"), ("user", "b")]}, "number 1 is ('user', 'b'), a tuple"),
    ],
)
def test_what_are_no_messages_is_refused(state: Any, said: str) -> None:
    """By name and place."""
    with pytest.raises(InvalidMessages) as caught:
        trim(max_tokens=50).invoke(state)
    assert said in str(caught.value)


def test_tools_that_leave_no_room_are_refused() -> None:
    """Their schemas are part of the request."""
    tool = {"name": "look", "description": "x " * 500, "parameters": {"type": "object"}}
    with pytest.raises(BudgetExceeded, match="1 tools"):
        trim(max_tokens=100, tools=[tool])
