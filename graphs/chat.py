"""A chat with short-term memory: it resumes by `thread_id`, and fits the model's window."""

from __future__ import annotations

from functools import partial
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.store.base import BaseStore
from langgraph.types import Command

from perdure.errors import ConfigurationError
from perdure.graphs.responder import QuotingResponder
from perdure.memory import ChatState, SummaryState, view
from perdure.memory.conversation import Messages
from perdure.memory.nodes import SHOWN
from perdure.memory.summary_node import Summarize
from perdure.memory.trim import Trim
from perdure.memory.update_instructions import UpdateInstructions
from perdure.memory.use_instructions import UseInstructions


def chat_graph(
    model: BaseChatModel | None = None,
    *,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
    store: BaseStore | None = None,
    window: Trim | None = None,
    summary: Summarize | None = None,
    instructions: UseInstructions | None = None,
    reflection: UpdateInstructions | None = None,
) -> CompiledStateGraph[Any, None, Any, Any]:
    """Compile a chat: a node that responds, and after it those that keep the thread in shape.

    What the model is shown beside the thread, instructions and a summary, is in no channel of the
    state and so in no stream; neither are removals.

    Args:
        model: Answers; None: a responder that works offline and quotes the thread.
        checkpointer: Makes the thread resumable.
        store: Long-term memory, where instructions are kept.
        window: What of the thread the model is shown: `trim(tokens=4_000)`. In the mode `"state"`
            the rest leaves the state too, and stays in the checkpointer's history.
        summary: Summarises what is old, after the answer: `summarize(model)`.
        instructions: What the agent has learned, as its system message: `use_instructions(…)`.
        reflection: Learns from each turn, after the answer: `update_instructions(model, …)`.

    Raises:
        ConfigurationError: One of them is something else, or the window would remove from the state
            what is not summarised yet.
    """
    _check(model, window, summary, instructions, reflection)
    chosen = QuotingResponder() if model is None else model
    parts = [part for part in (instructions, summary, window) if part is not None]
    shows = view(*parts) if parts else None

    trims = window if window is not None and window.mode == "state" else None
    every = {"reflect": reflection, "summarize": summary, "trim": trims}
    after: dict[str, Any] = {name: node for name, node in every.items() if node is not None}
    steps = list(after)

    def answered(said: Messages, state: ChatState, answer: BaseMessage) -> Command[Any]:
        now = {**state, "messages": [*said, answer]}
        return Command(update={"messages": [answer]}, goto=_next(steps, summary, now))

    def respond(state: ChatState, config: RunnableConfig) -> Command[Any]:
        said = state["messages"]
        shown = list(said) if shows is None else shows(state, config)
        return answered(said, state, chosen.invoke(shown, config))

    async def arespond(state: ChatState, config: RunnableConfig) -> Command[Any]:
        said = state["messages"]
        shown = list(said) if shows is None else await shows.acall(state, config)
        return answered(said, state, await chosen.ainvoke(shown, config))

    builder: StateGraph[Any, None, Any, Any] = StateGraph(SummaryState if summary else ChatState)
    responds = RunnableLambda(respond, arespond)
    builder.add_node("respond", responds, destinations=(*steps, END))
    builder.add_edge(START, "respond")
    for number, name in enumerate(steps, 1):
        builder.add_node(name, _quiet(after[name]))
        rest = steps[number:]
        builder.add_conditional_edges(name, partial(_next, rest, summary), [*rest, END])
    return builder.compile(checkpointer=checkpointer, store=store, name="chat")


def _check(model: Any, window: Any, summary: Any, instructions: Any, reflection: Any) -> None:
    """Refuse what stands in a wrong place, and a window that is at odds with the summary."""
    parts: list[tuple[str, Any, type, str]] = [
        ("model", model, Runnable, "a langchain chat model"),
        ("window", window, Trim, "trim(…)"),
        ("summary", summary, Summarize, "summarize(…)"),
        ("instructions", instructions, UseInstructions, "use_instructions(…)"),
        ("reflection", reflection, UpdateInstructions, "update_instructions(…)"),
    ]
    for name, given, kind, expected in parts:
        if given is not None and not isinstance(given, kind):
            raise ConfigurationError(f"{name} is {given!r:.80}; expected {expected}, or None")
    if window is not None and summary is not None and window.mode == "state":
        raise ConfigurationError(
            "window is in the mode 'state' and there is a summary: the window would remove from "
            "the state what summary has not read yet; expected the window in the mode 'view', "
            "since the summary shortens the state"
        )


def _quiet(node: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """A node whose update reaches the state and no `stream_mode="messages"`.

    langgraph streams the messages in an update that is a dict, be it a removal, or a summary that
    only the model is to see; an update by pairs it leaves alone.
    """

    def pairs(update: dict[str, Any]) -> Command[Any]:
        return Command(update=[(key, value) for key, value in update.items() if key != SHOWN])

    def run(state: Any, config: RunnableConfig) -> Command[Any]:
        return pairs(node.invoke(state, config))

    async def arun(state: Any, config: RunnableConfig) -> Command[Any]:
        return pairs(await node.ainvoke(state, config))

    return RunnableLambda(run, arun)


def _next(steps: list[str], summary: Summarize | None, state: Any) -> str:
    """Which step comes next: one in which nothing is due would cost a checkpoint."""
    due = (step for step in steps if step != "summarize" or (summary and summary.is_due(state)))
    return next(due, END)


graph = chat_graph()
"""For loaders that read `langgraph.json`; they bring their own checkpointer."""
