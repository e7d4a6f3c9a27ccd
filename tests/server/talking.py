"""Graphs whose nodes go on when a test says so, and clients of the server that runs them."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Annotated, Any, TypedDict

from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import interrupt


class State(TypedDict):
    """A conversation, and the texts that the graph has received."""

    messages: Annotated[list[AnyMessage], add_messages]
    heard: Annotated[list[str], operator.add]


class Gate:
    """A place where a node waits: the node sets `reached` and waits until `open` is set."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    async def pass_through(self) -> None:
        """Set `reached`, then wait until `open` is set."""
        self.reached.set()
        while not self.open.is_set():  # noqa: ASYNC110 - a test opens it, in another thread
            await asyncio.sleep(0.005)


def build_talk_graph(gate: Gate) -> StateGraph[State]:
    """Build a graph that records the last message, then waits at the gate and answers."""

    def hear(state: State) -> dict[str, Any]:
        return {"heard": [state["messages"][-1].text]}

    async def answer(state: State) -> dict[str, Any]:
        get_stream_writer()({"thinking": True})
        await gate.pass_through()
        return {"messages": [AIMessage(f"heard {len(state['heard'])}")]}

    graph = StateGraph(State).add_node(hear).add_node(answer)
    return graph.add_edge(START, "hear").add_edge("hear", "answer")


def build_uncancellable_graph(
    first_gate: Gate, second_gate: Gate, cancelled: threading.Event
) -> StateGraph[State]:
    """Build a graph that goes on after a cancellation until its gate is open.

    The first run waits at `first_gate`, later runs at `second_gate`. A cancellation sets
    `cancelled`.
    """

    async def go(state: State) -> dict[str, Any]:
        gate = second_gate if first_gate.reached.is_set() else first_gate
        gate.reached.set()
        while not gate.open.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                cancelled.set()
        return {"heard": ["went on"]}

    return StateGraph(State).add_node(go).add_edge(START, "go")


def build_asking_graph() -> StateGraph[State]:
    """Build a graph that interrupts with a question and records the answer."""

    def hear(state: State) -> dict[str, Any]:
        return {"heard": [interrupt("Are you sure?")]}

    return StateGraph(State).add_node(hear).add_edge(START, "hear")


def build_graph_asking_twice() -> StateGraph[State]:
    """Build a graph with two parallel nodes; each interrupts with a question."""

    def build_asking_node(name: str) -> Any:
        return lambda state: {"heard": [f"{name}: {interrupt(f'{name}, are you sure?')!r}"]}

    graph = (
        StateGraph(State)
        .add_node("ann", build_asking_node("Ann"))
        .add_node("bob", build_asking_node("Bob"))
    )
    return graph.add_edge(START, "ann").add_edge(START, "bob")


class ToolBindingModel(GenericFakeChatModel):
    """A scripted model that accepts `bind_tools`."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def build_reviewed_agent(*calls: tuple[str, dict[str, Any]], mode: Any = "batched") -> Any:
    """Build an agent whose tool calls a person reviews.

    Calls of `drop` may only be approved or rejected.
    """

    @tool
    def send(to: str, text: str) -> str:
        """Send a letter."""
        return f"sent {text} to {to}"

    @tool
    def drop(path: str) -> str:
        """Delete a file."""
        return f"dropped {path}"

    tool_calls: list[Any] = [
        {"name": name, "args": args, "id": f"c{n}"} for n, (name, args) in enumerate(calls)
    ]
    replies = iter([AIMessage("Let me see.", tool_calls=tool_calls), AIMessage("It is done.")])
    rules: Any = {"send": True, "drop": {"allowed_decisions": ["approve", "reject"]}}
    review = HumanInTheLoopMiddleware(rules, interrupt_mode=mode)
    return create_agent(
        ToolBindingModel(messages=replies, disable_streaming=True),
        [send, drop],
        middleware=[review],
    )


def build_failing_graph() -> StateGraph[State]:
    """Build a graph that records the last message and then fails."""

    def hear(state: State) -> dict[str, Any]:
        return {"heard": [state["messages"][-1].text]}

    def stumble(state: State) -> dict[str, Any]:
        raise ZeroDivisionError("one by none")

    graph = StateGraph(State).add_node(hear).add_node(stumble)
    return graph.add_edge(START, "hear").add_edge("hear", "stumble")


def build_model_graph() -> StateGraph[MessagesState]:
    """Build a graph whose subgraph calls a model that streams its answer."""

    async def speak(state: MessagesState) -> dict[str, Any]:
        model = GenericFakeChatModel(messages=iter([AIMessage("three short words")]))
        return {"messages": [await model.ainvoke(state["messages"])]}

    inner = StateGraph(MessagesState).add_node(speak).add_edge(START, "speak").compile()
    return StateGraph(MessagesState).add_node("inner", inner).add_edge(START, "inner")


class HaltingModel(GenericFakeChatModel):
    """A model that streams half of its answer, and the other half once its gate is open."""

    gate: Any

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        yield ChatGenerationChunk(message=AIMessageChunk(content="One \u202ehalf"))
        await self.gate.pass_through()
        yield ChatGenerationChunk(message=AIMessageChunk(content=" and the other <b>half</b>"))


def build_halting_graph(gate: Gate) -> StateGraph[MessagesState]:
    """Build a graph whose model streams half of its answer and then waits at the gate."""

    async def speak(state: MessagesState) -> dict[str, Any]:
        model = HaltingModel(messages=iter(()), gate=gate)
        return {"messages": [await model.ainvoke(state["messages"])]}

    return StateGraph(MessagesState).add_node(speak).add_edge(START, "speak")


def build_graph_failing_once() -> StateGraph[State]:
    """Build a graph that fails in its first run and answers in the second."""
    attempts = iter((False, True))

    def stumble(state: State) -> dict[str, Any]:
        if not next(attempts):
            raise ZeroDivisionError("one <b>by</b> none")
        return {"messages": [AIMessage("now it worked")]}

    return StateGraph(State).add_node(stumble).add_edge(START, "stumble")


def build_late_graph_factory() -> Callable[[RunnableConfig], StateGraph[State]]:
    """Return a graph factory that raises ConnectionError for every other run."""
    attempts = count()

    def hear(state: State) -> dict[str, Any]:
        return {"heard": [state["messages"][-1].text]}

    def make(config: RunnableConfig) -> StateGraph[State]:
        if "run_id" in config["configurable"] and next(attempts) % 2 == 0:
            raise ConnectionError("not yet")
        return StateGraph(State).add_node(hear).add_edge(START, "hear")

    return make


def build_identity_graph() -> StateGraph[State]:
    """Build a graph that records the user, the thread and the colour of its config."""

    def tell(state: State, config: RunnableConfig) -> dict[str, Any]:
        configurable = config["configurable"]
        return {
            "heard": [
                configurable["user_id"],
                configurable["thread_id"],
                str(configurable.get("colour")),
            ]
        }

    return StateGraph(State).add_node(tell).add_edge(START, "tell")


def build_input(text: str) -> dict[str, Any]:
    """Return a graph input with one user message."""
    return {"messages": [{"role": "user", "content": text}]}
