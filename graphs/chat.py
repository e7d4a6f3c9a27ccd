"""Build a chat graph that can continue stored threads, and an agent that also has memory tools."""

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

from perdure.effects import Effect, build_async_function, build_blocking_function, call_method
from perdure.graphs.responder import QuotingResponder
from perdure.memory.context import UseMemories, use_memories
from perdure.memory.long_term.extraction import remember_turns
from perdure.memory.long_term.gate import Gate
from perdure.memory.long_term.instructions import UseInstructions
from perdure.memory.long_term.recall import NAMESPACE
from perdure.memory.long_term.tools import manage_memory, search_memory
from perdure.memory.model_call import bind_tools, load_chat_model
from perdure.memory.nodes import Learner, MessagesNode, view
from perdure.memory.options import check_instance
from perdure.memory.short_term.reducers import ChatState
from perdure.memory.short_term.summary import Summarize, SummaryState

Part = MessagesNode | Learner
# Node names of memory components, by class name. For a class that is not listed, the node name is
# the class name in lower case.
_NODE_NAMES: Final = {
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
    """Compile a chat graph whose `respond` node is followed by nodes that update the memory.

    Example: `chat_graph("openai:gpt-5-mini", memory=[use_memories(), trim(max_tokens=4_000),
    remember_turns()], checkpointer=saver, store=store)`

    A stream of messages contains only the answers, and no instructions, summaries, memories or
    removals.

    Args:
        model: A chat model or its name. None means a responder that quotes earlier messages.
        tools: The tools that the model may call.
        memory: The parts of the memory. Parts that select the messages for the model are applied in
            the given order; put the part that trims last among them. Learners, such as
            `remember_turns()`, run after the answer. After the learners, `summarize(…)` changes the
            state. If a summary is due within a turn, the learners and `summarize(…)` also run
            between two model calls.
        checkpointer: The checkpointer that stores the thread.
        store: The store that keeps memories and instructions.
    """
    for part in check_instance("memory", memory, (list, tuple), "a list of parts"):
        check_instance(
            "a part of the memory",
            part,
            (MessagesNode, Learner),
            "parts like use_memories(), trim(max_tokens=4_000) or remember_turns()",
        )
    selecting_parts = [part for part in memory if isinstance(part, MessagesNode)]
    select_messages = view(*selecting_parts).with_tools(tools) if selecting_parts else None
    learners: list[Part] = [part for part in memory if isinstance(part, Learner)]
    summaries = [
        part
        for part in (select_messages.parts if select_messages else ())
        if isinstance(part, Summarize)
    ]
    nodes = _assign_node_names([*learners, *summaries])
    chat_model_runnable: Runnable[Any, Any] = QuotingResponder()
    if model is not None:
        resolved_model = load_chat_model(model)
        chat_model_runnable = bind_tools(resolved_model, tools) if tools else resolved_model
    # names of the nodes that update the memory, in the order in which they run
    steps = list(nodes)

    async def respond(state: ChatState, config: RunnableConfig) -> Command[Any]:
        """Call the model and choose the next node."""
        messages: list[Any] = state["messages"]
        if select_messages is not None:
            messages = await Effect(
                lambda: select_messages(state, config), lambda: select_messages.acall(state, config)
            )
        answer = await call_method(chat_model_runnable, "invoke", list(messages), config)
        updated_state = {**state, "messages": [*state["messages"], answer]}
        has_tool_calls = isinstance(answer, AIMessage) and answer.tool_calls
        if has_tool_calls and tools:
            goto = "tools"
        else:
            goto = _choose_next_due_step(steps, nodes, updated_state)
            for summary in summaries:
                summary.schedule_background_summary(updated_state)
        return Command(update={"messages": [answer]}, goto=goto)

    builder: StateGraph[Any, None, Any, Any] = StateGraph(SummaryState if summaries else ChatState)
    respond_node = RunnableLambda(build_blocking_function(respond), build_async_function(respond))
    builder.add_node(
        "respond", respond_node, destinations=(*(["tools"] if tools else ()), *steps, END)
    )
    builder.add_edge(START, "respond")
    if tools:
        builder.add_node("tools", ToolNode(list(tools)))
        if summaries:
            builder.add_conditional_edges(
                "tools", partial(_choose_step_after_tools, steps, nodes), [*steps, "respond"]
            )
        else:
            builder.add_edge("tools", "respond")
    # If a summary is due after tools have run, the graph first runs the nodes in `steps`, which
    # update the memory, and then calls the model again.
    may_return = bool(tools and summaries)
    end_nodes = ["respond", END] if may_return else [END]
    for number, (name, part) in enumerate(nodes.items(), 1):
        builder.add_node(name, _disable_message_streaming(part))
        later_steps = steps[number:]
        builder.add_conditional_edges(
            name,
            partial(_choose_next_due_step, later_steps, nodes, may_return_to_respond=may_return),
            [*later_steps, *end_nodes],
        )
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
    """Compile a chat graph with the tools `manage_memory` and `search_memory`.

    The agent recalls memories that are relevant to the user's message. At the end of a run, the
    agent stores the turns of the run as memories. The user is passed with each run as
    `context={"user_id": …}` or as `user_id` in `configurable`.

    Args:
        model: See `chat_graph`.
        tools: Further tools that the model may call.
        memory: See `chat_graph`. A part `use_memories(…)` in `memory` replaces the agent's own
            `use_memories`.
        namespace: The namespace template of the memories; see `Template`.
        gate: The admission check for new memories.
        checkpointer: See `chat_graph`.
        store: See `chat_graph`.
    """
    # Instructions replace the system message, so the node that adds them must run first.
    first_parts: list[Part] = [part for part in memory if isinstance(part, UseInstructions)]
    other_parts = [part for part in memory if not isinstance(part, UseInstructions)]
    if not any(isinstance(part, UseMemories) for part in other_parts):
        first_parts.append(use_memories(namespace=namespace))
    return chat_graph(
        model,
        [manage_memory(namespace, gate=gate), search_memory(namespace), *tools],
        memory=[*first_parts, *other_parts, remember_turns(namespace=namespace, gate=gate)],
        checkpointer=checkpointer,
        store=store,
    )


def _assign_node_names(parts: Sequence[Part]) -> dict[str, Part]:
    """Assign a unique node name to each memory component of a chat graph.

    Return the components by node name.
    """
    parts_by_name: dict[str, Part] = {}
    for part in parts:
        name = _NODE_NAMES.get(type(part).__name__, type(part).__name__.lower())
        parts_by_name[f"{name}-{len(parts_by_name) + 1}" if name in parts_by_name else name] = part
    return parts_by_name


def _disable_message_streaming(part: Part) -> Runnable[Any, Any]:
    """Wrap a part of a chat graph so that the messages it writes are not streamed.

    The node returns its update as a list of pairs instead of a dict. LangGraph's
    `stream_mode="messages"` does not find messages in such pairs, and therefore does not stream the
    messages.
    """

    async def updating(state: Any, config: RunnableConfig) -> Command[Any]:
        update = await call_method(part, "invoke", state, config)
        return Command(update=list(update.items()))

    return RunnableLambda(build_blocking_function(updating), build_async_function(updating))


def _choose_next_due_step(
    steps: Sequence[str], nodes: dict[str, Part], state: Any, *, may_return_to_respond: bool = False
) -> str:
    """Return the name of the next node.

    The next node is the first node in `steps` that is not skipped. A summary node is skipped if no
    summary is due, because every node that runs adds a checkpoint. If `steps` is empty or all nodes
    in `steps` are skipped, the next node is END. With `may_return_to_respond=True`, the next node
    is `respond` instead of END if the model has not yet responded to the latest tool results.
    """
    due_steps = (
        step
        for step in steps
        if not isinstance(part := nodes[step], Summarize) or part.is_due(state)
    )
    is_unanswered = may_return_to_respond and isinstance(
        next(reversed(state["messages"]), None), ToolMessage
    )
    return next(due_steps, "respond" if is_unanswered else END)


def _choose_step_after_tools(steps: Sequence[str], nodes: dict[str, Part], state: Any) -> str:
    """Return the name of the node that runs after the node `tools`.

    If a summary is due, the next node is the first node in `steps` that is not skipped. The nodes
    in `steps` update the memory. If no summary is due, the next node is `respond`.
    """
    is_due = any(part.is_due(state) for part in nodes.values() if isinstance(part, Summarize))
    return _choose_next_due_step(steps, nodes, state) if is_due else "respond"


# Servers that load the graphs in `langgraph.json` import `graph`, and attach their own
# checkpointer.
graph = chat_graph()
