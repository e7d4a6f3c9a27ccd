"""System messages are joined: the request's own comes first, and none is lost."""

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
from perdure.memory.short_term.summary import HEADING
from tests.memory.conversations import Talk, comparison_keys, conversations
from tests.memory.scripted_models import make_client
from tests.openai_server import OpenAIServer

PROMPT, CONTEXT = "You are the clerk. Never tell prices.", "The user looks at /orders."
BOTH = f"{PROMPT}\n\n{CONTEXT}"
NODES: dict[str, MessagesNode] = {
    "trim": trim(4_000),
    "clearing": clear_tool_outputs(),
    "view": view(clear_tool_outputs(), trim(4_000)),
    "memories": view(use_memories(InMemoryStore(), namespace=("m",))),
    "context": assemble(4_000),
}
with_every_node = pytest.mark.parametrize("memory_node", NODES.values(), ids=NODES)


def answer_with_summary(_: Any) -> AIMessage:
    return AIMessage("They spoke of trains.")


def make_conversation(*system: BaseMessage) -> list[BaseMessage]:
    """Return a conversation with the first system message in front, and the others within it."""
    return [*system[:1], HumanMessage("hi"), AIMessage("hello"), *system[1:], HumanMessage("well")]


@with_every_node
@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_agent_prompt_is_joined_with_system_message_of_thread(
    memory_node: MessagesNode, call_mode: str, tmp_path: Path
) -> None:
    """The model gets both in each turn."""
    with OpenAIServer(["a0", "a1"]) as server, SQLiteCheckpointer.open(tmp_path / "a") as saver:
        agent: Any = create_agent(
            make_client(server),
            system_prompt=PROMPT,
            middleware=[MemoryMiddleware(memory_node)],
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


@with_every_node
def test_system_messages_of_list_are_joined_in_order(memory_node: MessagesNode) -> None:
    """Blank ones are left out. Applying the node to its own result changes nothing."""
    shown = memory_node(
        make_conversation(SystemMessage(PROMPT), SystemMessage(" "), SystemMessage(CONTEXT))
    )

    assert [m.text for m in shown] == [BOTH, "hi", "hello", "well"]
    assert comparison_keys(memory_node(shown)) == comparison_keys(shown)


@with_every_node
def test_equal_system_messages_are_joined_once(memory_node: MessagesNode) -> None:
    """A node may have added the agent's prompt to the thread, perhaps as content blocks."""
    blocks = SystemMessage([{"type": "text", "text": PROMPT}])
    system = SystemMessage(PROMPT), SystemMessage(CONTEXT), SystemMessage(PROMPT), blocks

    assert memory_node(make_conversation(*system))[0].text == BOTH


def test_content_blocks_with_cache_marks_are_unchanged() -> None:
    cached = [{"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral"}}]
    plain = {"type": "text", "text": CONTEXT}
    first = SystemMessage(list(cached), id="s")
    shown = trim(4_000)(make_conversation(first, SystemMessage(CONTEXT)))

    assert shown[0].content == [*cached, plain]
    assert shown[0].id == "s"
    assert first.content == cached
    assert trim(4_000)(make_conversation(first))[0] is first
    assert assemble(4_000)(make_conversation(first, SystemMessage(CONTEXT)))[0].text == BOTH


def test_later_summary_replaces_only_previous_summary() -> None:
    """No system message is replaced."""
    summary = view(summarize(RunnableLambda(answer_with_summary)))
    stored = [{"text": text, "last": None, "count": 1} for text in ("Of planes.", "Of ships.")]
    first = summary.invoke(
        {"messages": make_conversation(SystemMessage(PROMPT)), "summary": stored[0]}
    )
    conversation = [*first["llm_input_messages"], SystemMessage(CONTEXT), HumanMessage("so?")]
    joined, again = (
        trim(4_000)(conversation),
        summary.invoke({"messages": conversation, "summary": stored[1]}),
    )

    assert joined[0].text == f"{PROMPT}\n\n{HEADING}:\n\nOf planes.\n\n{CONTEXT}"
    assert again["llm_input_messages"][0].text == f"{BOTH}\n\n{HEADING}:\n\nOf ships."


def test_summary_without_instructions_is_joined_and_replaced() -> None:
    """The summary is the whole text of the first message."""
    summary = view(summarize(RunnableLambda(answer_with_summary)))
    state = {"messages": make_conversation(), "summary": "Of planes."}
    conversation = [*summary.invoke(state)["llm_input_messages"], SystemMessage(CONTEXT)]
    shown = summary.invoke({"messages": conversation, "summary": "Of ships."})["llm_input_messages"]

    assert shown[0].text == f"{CONTEXT}\n\n{HEADING}:\n\nOf ships."


def test_memories_follow_all_system_messages_in_one_section() -> None:
    store = InMemoryStore()
    store.put(("m",), "k", {"text": "Ann likes tea."})
    part = view(use_memories(store, namespace=("m",), min_score=0))
    conversation = make_conversation(SystemMessage(PROMPT), SystemMessage(CONTEXT))
    text = part([*conversation[:-1], HumanMessage("Which tea does Ann like?")])[0].text

    assert text.startswith(f"{BOTH}\n\n<memories>\n")
    assert text.count("<memories>") == 1


@pytest.mark.parametrize("node", [trim(14), assemble(14)], ids=["trim", "assemble"])
def test_budget_error_names_each_system_message_and_its_tokens(node: MessagesNode) -> None:
    with pytest.raises(BudgetExceeded) as caught:
        node(make_conversation(SystemMessage(PROMPT), SystemMessage(CONTEXT)))

    assert f'system message "{PROMPT}" 14' in str(caught.value)
    assert f'system message "{CONTEXT}" 7' in str(caught.value)


# -- system messages of a state


@given(conversations(), st.integers(1, 8))
def test_trim_removes_system_messages_only_if_excluded(conversation: Talk, budget: int) -> None:
    for include in (True, False):
        node = trim(budget, token_counter=len, include_system=include)
        try:
            update = node.invoke({"messages": conversation})
        except BudgetExceeded:
            continue
        left: Any = add_messages(list[Any](conversation), update.get("messages", []))
        system = [m for m in conversation if isinstance(m, SystemMessage)]
        assert [m for m in left if isinstance(m, SystemMessage)] == (system if include else [])


def test_joined_system_messages_count_as_one_for_trim() -> None:
    system = [SystemMessage(PROMPT, id="p"), SystemMessage(CONTEXT, id="c")]
    conversation = [
        *system[:1],
        HumanMessage("hi", id="h"),
        *system[1:],
        HumanMessage("well", id="w"),
    ]

    assert trim(4_000).invoke({"messages": conversation}) == {}
    assert trim(3, token_counter=len).invoke({"messages": conversation}) == {}
    [removal] = trim(2, token_counter=len).invoke({"messages": conversation})["messages"]
    assert removal.id == "h"
