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

from perdure.memory.model_call import ModelCall
from perdure.memory.nodes import ModelInput
from perdure.memory.summary import (
    Summarize,
    Summary,
    SummaryState,
    add_summary,
    remove_summary,
    summarize,
)
from perdure.memory.tokens import token_counter
from tests.memory.scripted import (
    ScriptedServer,
    client,
)

COUNTER = token_counter("approximate")
THREAD: Any = {"configurable": {"thread_id": "t"}}


def node(server: ScriptedServer, **options: Any) -> Summarize:
    """A node that summarises all but the newest turn; some options are those of the call."""
    called = {name: options.pop(name) for name in ("timeout_s", "retries") if name in options}
    window = options.pop("window", None)
    model = client(server, **({"profile": {"max_input_tokens": window}} if window else {}))
    given = {"trigger": ("messages", 5), "keep": ("messages", 1), **options}
    return summarize(ModelCall(model, backoff_s=0.0, **called), **given)


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


def presented(messages: Any, summary: Summary | None) -> list[Any]:
    """Messages as the model is shown them with a summary."""
    return add_summary(ModelInput.from_messages(remove_summary(messages)[1]), summary).to_messages()


def without_digests(summary: Any) -> dict[str, Any]:
    """Return a summary without the hashes by which its messages are recognised."""
    return {name: value for name, value in summary.items() if name != "digests"}


def says(text: str) -> Any:
    return {"messages": [HumanMessage(text)]}


def texts(messages: Any) -> list[str]:
    return [message.text for message in messages]


def invoked(summary: Summarize, state: Any) -> Any:
    return summary.invoke(state)


def awaited(summary: Summarize, state: Any) -> Any:
    return asyncio.run(summary.ainvoke(state))
