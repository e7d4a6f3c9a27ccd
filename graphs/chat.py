"""A chat that resumes by `thread_id`: with memory of its thread and, by its switches, of others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode
from langgraph.store.base import BaseStore
from langgraph.types import Command

from perdure.errors import ConfigurationError
from perdure.graphs.remembering import Schedules, remembers
from perdure.graphs.responder import QuotingResponder
from perdure.memory import ChatState, SummaryState, view
from perdure.memory.conversation import Messages
from perdure.memory.instructions import UseInstructions
from perdure.memory.nodes import SHOWN, MessagesNode
from perdure.memory.recollection.recalling import UseMemories
from perdure.memory.summary import Summarize
from perdure.memory.trim import Trim
from perdure.memory.update_instructions import UpdateInstructions


def chat_graph(
    model: BaseChatModel | None = None,
    *,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
    store: BaseStore | None = None,
    tools: Sequence[BaseTool] = (),
    window: Trim | None = None,
    summary: Summarize | None = None,
    instructions: UseInstructions | None = None,
    reflection: UpdateInstructions | None = None,
    recall: UseMemories | None = None,
    background: Schedules | None = None,
) -> CompiledStateGraph[Any, None, Any, Any]:
    """Compile a chat: a node that responds, and after it those that keep its memory in shape.

    What the model is shown beside the thread, instructions, a summary and recalled memories, is in
    no channel of the state and so in no stream; neither are removals.

    Args:
        model: Answers; None: a responder that works offline and quotes what it is shown.
        checkpointer: Makes the thread resumable.
        store: Long-term memory, where instructions and memories are kept.
        tools: What the model may call, like `manage_memory()` and `search_memory()`.
        window: What of the thread the model is shown: `trim(tokens=4_000)`. In the mode `"state"`
            the rest leaves the state too, and stays in the checkpointer's history.
        summary: Summarises what is old, after the answer: `summarize(model)`.
        instructions: What the agent has learned, as its system message: `use_instructions(…)`.
        reflection: Learns from each turn, after the answer: `update_instructions(model, …)`.
        recall: Shows the model memories that bear on what the user said: `use_memories(…)`.
        background: Has memories formed of the thread later on: `Background(…)`.

    Raises:
        ConfigurationError: One of them is something else, or the window would remove from the state
            what is not summarised yet.
    """
    _check(model, window, summary, instructions, reflection, recall, background)
    # what is recalled takes tokens, but is no message of the thread
    order: tuple[MessagesNode | None, ...] = (instructions, recall, summary, window)
    if window is not None and not window.counts_tokens:
        order = (instructions, summary, window, recall)
    parts = [part for part in order if part is not None]
    shows = view(*parts).with_tools(tools) if parts else None
    chosen: Runnable[Any, Any] = QuotingResponder()
    if model is not None:
        chosen = model.bind_tools(tools) if tools else model

    trims = window if window is not None and window.mode == "state" else None
    every = {"reflect": reflection, "summarize": summary, "trim": trims}
    after = {name: _quiet(node) for name, node in every.items() if node is not None}
    if background is not None:
        after["remember"] = remembers(background)
    steps = list(after)

    def answered(said: Messages, state: ChatState, answer: BaseMessage) -> Command[Any]:
        now = {**state, "messages": [*said, answer]}
        calls = isinstance(answer, AIMessage) and answer.tool_calls
        goto = "tools" if calls and tools else _next(steps, summary, now)
        return Command(update={"messages": [answer]}, goto=goto)

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
    builder.add_node("respond", responds, destinations=(*(["tools"] if tools else ()), *steps, END))
    builder.add_edge(START, "respond")
    if tools:
        builder.add_node("tools", ToolNode(list(tools)))
        builder.add_edge("tools", "respond")
    for number, name in enumerate(steps, 1):
        builder.add_node(name, after[name])
        rest = steps[number:]
        builder.add_conditional_edges(name, partial(_next, rest, summary), [*rest, END])
    return builder.compile(checkpointer=checkpointer, store=store, name="chat")


def _check(
    model: Any,
    window: Any,
    summary: Any,
    instructions: Any,
    reflection: Any,
    recall: Any,
    background: Any,
) -> None:
    """Refuse what stands in a wrong place, and a window that is at odds with the summary."""
    parts: list[tuple[str, Any, type, str]] = [
        ("model", model, Runnable, "a langchain chat model"),
        ("window", window, Trim, "trim(…)"),
        ("summary", summary, Summarize, "summarize(…)"),
        ("instructions", instructions, UseInstructions, "use_instructions(…)"),
        ("reflection", reflection, UpdateInstructions, "update_instructions(…)"),
        ("recall", recall, UseMemories, "use_memories(…)"),
        ("background", background, Schedules, "Background(…)"),
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
