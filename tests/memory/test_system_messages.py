"""System messages add up: the request's own comes first, and none is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langgraph.graph import add_messages
from langgraph.store.memory import InMemoryStore

from perdure import SQLiteCheckpointer
from perdure.errors import BudgetExceeded
from perdure.memory import (
    assemble,
    clear_tool_outputs,
    summarize,
    trim,
    use_memories,
    view,
)
from perdure.memory.middleware import MemoryMiddleware
from perdure.memory.nodes import MessagesNode
from perdure.memory.summary import HEADING
from tests.memory.conversations import Talk, comparison_keys, conversations
from tests.memory.scripted import make_client
from tests.openai_server import OpenAIServer

PROMPT, CONTEXT = "You are the clerk. Never tell prices.", "The user looks at /orders."
BOTH = f"{PROMPT}\n\n{CONTEXT}"
PARTS: dict[str, MessagesNode] = {
    "trim": trim(4_000),
    "clearing": clear_tool_outputs(),
    "view": view(clear_tool_outputs(), trim(4_000)),
    "memories": view(use_memories(InMemoryStore(), namespace=("m",))),
    "context": assemble(4_000),
}
every_part = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)


def sums_up(_: Any) -> AIMessage:
    return AIMessage("They spoke of trains.")


def talk_with(*system: BaseMessage) -> list[BaseMessage]:
    """Return a talk with the first system message in front, and the others within it."""
    return [*system[:1], HumanMessage("hi"), AIMessage("hello"), *system[1:], HumanMessage("well")]


@every_part
@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_the_prompt_of_an_agent_is_not_replaced(
    part: MessagesNode, call_mode: str, tmp_path: Path
) -> None:
    """A client puts a system message into the thread; the model gets both, in each turn."""
    with OpenAIServer(["a0", "a1"]) as server, SQLiteCheckpointer.open(tmp_path / "a") as saver:
        agent: Any = create_agent(
            make_client(server),
            system_prompt=PROMPT,
            middleware=[MemoryMiddleware(part)],
            checkpointer=saver,
        )
        thread = {"configurable": {"thread_id": "t"}}
        for new in ([SystemMessage(CONTEXT), HumanMessage("what?")], [HumanMessage("and?")]):
            if call_mode == "sync":
                out = agent.invoke({"messages": new}, thread)
            else:
                out = asyncio.run(agent.ainvoke({"messages": new}, thread))

    assert server.shown(0) == [("system", BOTH), ("user", "what?")]
    assert server.shown(1)[0] == ("system", BOTH)
    assert [m.type for m in out["messages"]] == ["system", "human", "ai", "human", "ai"]


@every_part
def test_the_system_messages_of_a_list_are_joined_in_their_order(part: MessagesNode) -> None:
    """Blank ones do not count, and what is shown is the same when it is shown again."""
    shown = part(talk_with(SystemMessage(PROMPT), SystemMessage(" "), SystemMessage(CONTEXT)))

    assert [m.text for m in shown] == [BOTH, "hi", "hello", "well"]
    assert comparison_keys(part(shown)) == comparison_keys(shown)


@every_part
def test_equal_system_messages_are_shown_once(part: MessagesNode) -> None:
    """A node has put the agent's prompt into the thread, too, perhaps as blocks."""
    blocks = SystemMessage([{"type": "text", "text": PROMPT}])
    system = SystemMessage(PROMPT), SystemMessage(CONTEXT), SystemMessage(PROMPT), blocks

    assert part(talk_with(*system))[0].text == BOTH


def test_content_blocks_stay_as_they_are() -> None:
    """The provider's cache marks keep their places."""
    cached = [{"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral"}}]
    plain = {"type": "text", "text": CONTEXT}
    first = SystemMessage(list(cached), id="s")
    shown = trim(4_000)(talk_with(first, SystemMessage(CONTEXT)))

    assert shown[0].content == [*cached, plain]
    assert shown[0].id == "s"
    assert first.content == cached
    assert trim(4_000)(talk_with(first))[0] is first
    assert assemble(4_000)(talk_with(first, SystemMessage(CONTEXT)))[0].text == BOTH


def test_a_summary_stays_apart_from_what_is_joined_to_it() -> None:
    """A later summary replaces the former one, and no system message."""
    summary = view(summarize(RunnableLambda(sums_up)))
    stored = [{"text": text, "last": None, "count": 1} for text in ("Of planes.", "Of ships.")]
    first = summary.invoke({"messages": talk_with(SystemMessage(PROMPT)), "summary": stored[0]})
    talk = [*first["llm_input_messages"], SystemMessage(CONTEXT), HumanMessage("so?")]
    joined, again = trim(4_000)(talk), summary.invoke({"messages": talk, "summary": stored[1]})

    assert joined[0].text == f"{PROMPT}\n\n{HEADING}:\n\nOf planes.\n\n{CONTEXT}"
    assert again["llm_input_messages"][0].text == f"{BOTH}\n\n{HEADING}:\n\nOf ships."


def test_a_summary_without_instructions_is_joined() -> None:
    """As above, where the summary is all that the first message has."""
    summary = view(summarize(RunnableLambda(sums_up)))
    state = {"messages": talk_with(), "summary": "Of planes."}
    talk = [*summary.invoke(state)["llm_input_messages"], SystemMessage(CONTEXT)]
    shown = summary.invoke({"messages": talk, "summary": "Of ships."})["llm_input_messages"]

    assert shown[0].text == f"{CONTEXT}\n\n{HEADING}:\n\nOf ships."


def test_memories_follow_all_system_messages() -> None:
    """In one section."""
    store = InMemoryStore()
    store.put(("m",), "k", {"text": "Ann likes tea."})
    part = view(use_memories(store, namespace=("m",), min_score=0))
    talk = talk_with(SystemMessage(PROMPT), SystemMessage(CONTEXT))
    text = part([*talk[:-1], HumanMessage("Which tea does Ann like?")])[0].text

    assert text.startswith(f"{BOTH}\n\n<memories>\n")
    assert text.count("<memories>") == 1


@pytest.mark.parametrize("node", [trim(14), assemble(14)], ids=["trim", "assemble"])
def test_over_budget_each_system_message_is_named(node: MessagesNode) -> None:
    """With its beginning and its tokens, so that the long one is found."""
    with pytest.raises(BudgetExceeded) as caught:
        node(talk_with(SystemMessage(PROMPT), SystemMessage(CONTEXT)))

    assert f'system message "{PROMPT}" 14' in str(caught.value)
    assert f'system message "{CONTEXT}" 7' in str(caught.value)


# -- in a state


@given(conversations(), st.integers(1, 8))
def test_trim_leaves_the_system_messages_of_a_state(talk: Talk, budget: int) -> None:
    """Whatever else is removed, unless they are not to be shown at all."""
    for include in (True, False):
        node = trim(budget, token_counter=len, include_system=include)
        try:
            update = node.invoke({"messages": talk})
        except BudgetExceeded:
            continue
        left: Any = add_messages(list[Any](talk), update.get("messages", []))
        system = [m for m in talk if isinstance(m, SystemMessage)]
        assert [m for m in left if isinstance(m, SystemMessage)] == (system if include else [])


def test_nothing_is_removed_that_fits() -> None:
    """Two system messages are joined in the request, and count as one message."""
    system = [SystemMessage(PROMPT, id="p"), SystemMessage(CONTEXT, id="c")]
    talk = [*system[:1], HumanMessage("hi", id="h"), *system[1:], HumanMessage("well", id="w")]

    assert trim(4_000).invoke({"messages": talk}) == {}
    assert trim(3, token_counter=len).invoke({"messages": talk}) == {}
    [removal] = trim(2, token_counter=len).invoke({"messages": talk})["messages"]
    assert removal.id == "h"
