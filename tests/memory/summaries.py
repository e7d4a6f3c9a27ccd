"""Summarization nodes, conversations for them, and a graph that contains one."""

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

from perdure.memory.model_call import ModelCall
from perdure.memory.nodes import ModelInput
from perdure.memory.short_term.summary import (
    Summarize,
    Summary,
    SummaryState,
    add_summary_to_system_message,
    separate_summary_from_messages,
    summarize,
)
from perdure.memory.short_term.tokens import token_counter
from tests.memory.scripted_models import (
    ScriptedServer,
    make_client,
)

COUNTER = token_counter("approximate")
THREAD: Any = {"configurable": {"thread_id": "t"}}


def make_summarize_node(server: ScriptedServer, **options: Any) -> Summarize:
    """Return a node that summarizes all but the newest turn.

    Some options belong to the model call.
    """
    call_options = {name: options.pop(name) for name in ("timeout_s", "retries") if name in options}
    window = options.pop("window", None)
    model = make_client(server, **({"profile": {"max_input_tokens": window}} if window else {}))
    node_options = {"trigger": ("messages", 5), "keep": ("messages", 1), **options}
    return summarize(ModelCall(model, backoff_s=0.0, **call_options), **node_options)


def make_turns(count: int, start: int = 1) -> list[AnyMessage]:
    """Return turns of two messages, `q1 a1 q2 a2 …`. The last question has no answer."""
    messages: list[AnyMessage] = []
    for n in range(start, start + count):
        messages += [HumanMessage(f"q{n}", id=f"q{n}"), AIMessage(f"a{n}", id=f"a{n}")]
    return messages[:-1]


def build_chat_graph(
    server: ScriptedServer, summary: Summarize, state: Any = SummaryState, **options: Any
) -> Any:
    """Return the graph START -> summarize -> respond -> END, as a user would write it."""
    model = make_client(server)

    def respond(state: Any) -> Any:
        return {"messages": [model.invoke(summary.select_messages(state["messages"], state))]}

    async def arespond(state: Any) -> Any:
        return {
            "messages": [await model.ainvoke(summary.select_messages(state["messages"], state))]
        }

    builder = StateGraph(state)
    builder.add_node("summarize", summary)
    builder.add_node("respond", RunnableLambda(respond, arespond))
    builder.add_edge(START, "summarize")
    builder.add_edge("summarize", "respond")
    builder.add_edge("respond", END)
    return builder.compile(**options)


def present_messages(messages: Any, summary: Summary | None) -> list[Any]:
    """Return the messages as the model gets them with a summary."""
    return add_summary_to_system_message(
        ModelInput.from_messages(separate_summary_from_messages(messages)[1]), summary
    ).to_messages()


def without_digests(summary: Any) -> dict[str, Any]:
    """Return a summary without the hashes by which its messages are recognised."""
    return {name: value for name, value in summary.items() if name != "digests"}


def build_user_input(text: str) -> Any:
    return {"messages": [HumanMessage(text)]}


def list_texts(messages: Any) -> list[str]:
    return [message.text for message in messages]


def invoke_sync(summary: Summarize, state: Any) -> Any:
    return summary.invoke(state)


def invoke_async(summary: Summarize, state: Any) -> Any:
    return asyncio.run(summary.ainvoke(state))
