"""A chat that resumes by `thread_id`, and an agent that remembers by tools as well."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode
from langgraph.store.base import BaseStore
from langgraph.types import Command

from perdure.effects import Effect, awaiting, blocking, call_method
from perdure.graphs.responder import QuotingResponder
from perdure.memory.context import UseMemories, use_memories
from perdure.memory.extraction import remember_turns
from perdure.memory.gate import Gate
from perdure.memory.instructions import UseInstructions
from perdure.memory.model_call import bind_tools, load_chat_model
from perdure.memory.nodes import Learner, MessagesNode, view
from perdure.memory.options import check_instance
from perdure.memory.recall import NAMESPACE
from perdure.memory.reducers import ChatState
from perdure.memory.summary import Summarize, SummaryState
from perdure.memory.tools import manage_memory, search_memory

Part = MessagesNode | Learner
_NAMES: Final = {
    "RememberTurns": "remember",
    "UpdateInstructions": "reflect",
    "UpdateProfile": "update_profile",
}


def chat_graph(
    model: BaseChatModel | str | None = None,
    tools: Sequence[BaseTool] = (),
    *,
    memory: Sequence[Part] = (),
    checkpointer: BaseCheckpointSaver[Any] | None = None,
    store: BaseStore | None = None,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Compile a chat graph with the node `respond`, followed by nodes that update the memory.

    `chat_graph("openai:gpt-5-mini", memory=[use_memories(), summarize("openai:gpt-5-mini"),
    trim(max_tokens=4_000), remember_turns()], checkpointer=saver, store=store)`

    A stream of messages has the answers only: no instructions, summaries, memories or removals.

    Args:
        model: A chat model or its name; None: a responder that quotes what it is shown.
        tools: The tools that the model may call.
        memory: The parts that select what the model is shown, in order, with the part that cuts
            last. Learners, such as `remember_turns()`, run after the answer. Then `summarize(…)`
            changes the state. If a summary is due within a turn, the learners and `summarize(…)`
            also run between two calls of the model.
        checkpointer: The checkpointer that stores the thread.
        store: The store that keeps memories and instructions.
    """
    for part in check_instance("memory", memory, (list, tuple), "a list of parts"):
        expected = "parts like use_memories(), trim(max_tokens=4_000) or remember_turns()"
        check_instance("a part of the memory", part, (MessagesNode, Learner), expected)
    shown = [part for part in memory if isinstance(part, MessagesNode)]
    shows = view(*shown).with_tools(tools) if shown else None
    learners: list[Part] = [part for part in memory if isinstance(part, Learner)]
    summaries = [part for part in (shows.parts if shows else ()) if isinstance(part, Summarize)]
    after = _named([*learners, *summaries])
    chosen: Runnable[Any, Any] = QuotingResponder()
    if model is not None:
        resolved = load_chat_model(model)
        chosen = bind_tools(resolved, tools) if tools else resolved
    steps = list(after)

    async def respond(state: ChatState, config: RunnableConfig) -> Command[Any]:
        messages: list[Any] = state["messages"]
        if shows is not None:
            messages = await Effect(
                lambda: shows(state, config), lambda: shows.acall(state, config)
            )
        answer = await call_method(chosen, "invoke", list(messages), config)
        now = {**state, "messages": [*state["messages"], answer]}
        calls = isinstance(answer, AIMessage) and answer.tool_calls
        if calls and tools:
            goto = "tools"
        else:
            goto = _choose_next_step(steps, after, now)
            for summary in summaries:
                summary.schedule(now)
        return Command(update={"messages": [answer]}, goto=goto)

    builder: StateGraph[Any, None, Any, Any] = StateGraph(SummaryState if summaries else ChatState)
    responds = RunnableLambda(blocking(respond), awaiting(respond))
    builder.add_node("respond", responds, destinations=(*(["tools"] if tools else ()), *steps, END))
    builder.add_edge(START, "respond")
    if tools:
        builder.add_node("tools", ToolNode(list(tools)))
        if summaries:
            after_tools = partial(_choose_step_after_tools, steps, after)
            builder.add_conditional_edges("tools", after_tools, [*steps, "respond"])
        else:
            builder.add_edge("tools", "respond")
    may_return = bool(tools and summaries)
    ends = ["respond", END] if may_return else [END]
    for number, (name, part) in enumerate(after.items(), 1):
        builder.add_node(name, _quiet(part))
        rest = steps[number:]
        choose_step = partial(_choose_next_step, rest, after, may_return=may_return)
        builder.add_conditional_edges(name, choose_step, [*rest, *ends])
    return builder.compile(checkpointer=checkpointer, store=store, name="chat")


def memory_agent(
    model: BaseChatModel | str | None = None,
    tools: Sequence[BaseTool] = (),
    *,
    memory: Sequence[Part] = (),
    namespace: tuple[str, ...] = NAMESPACE,
    gate: Gate | None = None,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
    store: BaseStore | None = None,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Compile a chat with the tools `manage_memory` and `search_memory`.

    It recalls by itself what answers the user's message, and remembers the turns of a run at its
    end. The run says whose memories: `context={"user_id": …}`, or `user_id` in its `configurable`.
    `use_memories(…)` among the parts of `memory` replaces the agent's own; `namespace` says where
    memories are kept, see `Template`. The other options are those of `chat_graph`.
    """
    # they replace the system message, so they come first
    first: list[Part] = [part for part in memory if isinstance(part, UseInstructions)]
    rest = [part for part in memory if not isinstance(part, UseInstructions)]
    if not any(isinstance(part, UseMemories) for part in rest):
        first.append(use_memories(namespace=namespace))
    return chat_graph(
        model,
        [manage_memory(namespace, gate=gate), search_memory(namespace), *tools],
        memory=[*first, *rest, remember_turns(namespace=namespace, gate=gate)],
        checkpointer=checkpointer,
        store=store,
    )


def _named(parts: Sequence[Part]) -> dict[str, Part]:
    named: dict[str, Part] = {}
    for part in parts:
        name = _NAMES.get(type(part).__name__, type(part).__name__.lower())
        named[f"{name}-{len(named) + 1}" if name in named else name] = part
    return named


def _quiet(part: Part) -> Runnable[Any, Any]:
    """A node whose update is pairs: `stream_mode="messages"` has those of a dict, removals too."""

    async def updating(state: Any, config: RunnableConfig) -> Command[Any]:
        update = await call_method(part, "invoke", state, config)
        return Command(update=list(update.items()))

    return RunnableLambda(blocking(updating), awaiting(updating))


def _choose_next_step(
    steps: Sequence[str], after: dict[str, Part], state: Any, *, may_return: bool = False
) -> str:
    """Return the name of the next node.

    The next node is the first of `steps` that is not a summary or is a summary that is due. A
    summary that is not due is skipped, because each node costs a checkpoint. If no step is left,
    the next node is END. With `may_return`, the next node is `respond` if no step is left and the
    model has not answered the last tool results.
    """
    due = (n for n in steps if not isinstance(p := after[n], Summarize) or p.is_due(state))
    is_unanswered = may_return and isinstance(next(reversed(state["messages"]), None), ToolMessage)
    return next(due, "respond" if is_unanswered else END)


def _choose_step_after_tools(steps: Sequence[str], after: dict[str, Part], state: Any) -> str:
    """Return the name of the node after the tools, which is `respond` if no summary is due."""
    summaries = (part for part in after.values() if isinstance(part, Summarize))
    is_due = any(summary.is_due(state) for summary in summaries)
    return _choose_next_step(steps, after, state) if is_due else "respond"


graph = chat_graph()  # for loaders that read `langgraph.json`; they bring their own checkpointer
