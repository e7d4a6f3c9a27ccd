"""A node that summarises, conversations for it, and a graph that has it."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    HumanMessage,
)
from langchain_core.runnables import RunnableLambda
from langgraph.graph import END, START, StateGraph

from perdure.memory.summarize import SummaryState, summarize
from perdure.memory.summary_node import Summarize
from perdure.memory.tokens import token_counter
from tests.memory.scripted import (
    ScriptedServer,
    client,
)

COUNTER = token_counter("approximate")
THREAD: Any = {"configurable": {"thread_id": "t"}}


def node(server: ScriptedServer, **options: Any) -> Summarize:
    given = {"when": {"messages": 5}, "keep_turns": 1, "backoff_s": 0.0, **options}
    return summarize(client(server), **given)


def turns(count: int, start: int = 1) -> list[AnyMessage]:
    """Turns of two messages, `q1 a1 q2 a2 …`, of which the last awaits its answer."""
    talk: list[AnyMessage] = []
    for n in range(start, start + count):
        talk += [HumanMessage(f"q{n}", id=f"q{n}"), AIMessage(f"a{n}", id=f"a{n}")]
    return talk[:-1]


def chat(
    server: ScriptedServer, summary: Summarize, state: Any = SummaryState, **options: Any
) -> Any:
    """START -> summarise -> respond -> END, as a user would write it."""
    model = client(server)

    def respond(state: Any) -> Any:
        return {"messages": [model.invoke(summary.shown(state["messages"], state))]}

    async def arespond(state: Any) -> Any:
        return {"messages": [await model.ainvoke(summary.shown(state["messages"], state))]}

    builder = StateGraph(state)
    builder.add_node("summarize", summary)
    builder.add_node("respond", RunnableLambda(respond, arespond))
    builder.add_edge(START, "summarize")
    builder.add_edge("summarize", "respond")
    builder.add_edge("respond", END)
    return builder.compile(**options)


def says(text: str) -> Any:
    return {"messages": [HumanMessage(text)]}


def texts(messages: Any) -> list[str]:
    return [message.text for message in messages]


def invoked(summary: Summarize, state: Any) -> Any:
    return summary.invoke(state)


def awaited(summary: Summarize, state: Any) -> Any:
    return asyncio.run(summary.ainvoke(state))
