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
    """A conversation, and what was heard in it."""

    messages: Annotated[list[AnyMessage], add_messages]
    heard: Annotated[list[str], operator.add]


class Gate:
    """Where a node waits; `reached` when it does, until `open` is set."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    async def pass_through(self) -> None:
        """Wait until it is open."""
        self.reached.set()
        while not self.open.is_set():  # noqa: ASYNC110 - a test opens it, in another thread
            await asyncio.sleep(0.005)


def talk(gate: Gate) -> StateGraph[State]:
    """Hears the last message in one step, and answers in the next, behind a gate."""

    def hear(state: State) -> dict[str, Any]:
        return {"heard": [state["messages"][-1].text]}

    async def answer(state: State) -> dict[str, Any]:
        get_stream_writer()({"thinking": True})
        await gate.pass_through()
        return {"messages": [AIMessage(f"heard {len(state['heard'])}")]}

    made = StateGraph(State).add_node(hear).add_node(answer)
    return made.add_edge(START, "hear").add_edge("hear", "answer")


def stubborn(first: Gate, second: Gate, told: threading.Event) -> StateGraph[State]:
    """Cancelled, it goes on until its gate is open, as one that tidies up does; `told` is set."""

    async def go(state: State) -> dict[str, Any]:
        gate = second if first.reached.is_set() else first
        gate.reached.set()
        while not gate.open.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                told.set()
        return {"heard": ["went on"]}

    return StateGraph(State).add_node(go).add_edge(START, "go")


def ask() -> StateGraph[State]:
    """Asks somebody, and hears the answer."""

    def hear(state: State) -> dict[str, Any]:
        return {"heard": [interrupt("Are you sure?")]}

    return StateGraph(State).add_node(hear).add_edge(START, "hear")


def ask_twice() -> StateGraph[State]:
    """Asks two people at once, in a node each."""

    def ask_of(name: str) -> Any:
        return lambda state: {"heard": [f"{name}: {interrupt(f'{name}, are you sure?')!r}"]}

    made = StateGraph(State).add_node("ann", ask_of("Ann")).add_node("bob", ask_of("Bob"))
    return made.add_edge(START, "ann").add_edge(START, "bob")


class Calling(GenericFakeChatModel):
    """A scripted model that tools may be bound to."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def reviewed(*calls: tuple[str, dict[str, Any]], mode: Any = "batched") -> Any:
    """An agent whose calls of tools a person reviews: of `drop` only whether it may be."""

    @tool
    def send(to: str, text: str) -> str:
        """Send a letter."""
        return f"sent {text} to {to}"

    @tool
    def drop(path: str) -> str:
        """Delete a file."""
        return f"dropped {path}"

    made: list[Any] = [
        {"name": name, "args": args, "id": f"c{n}"} for n, (name, args) in enumerate(calls)
    ]
    said = iter([AIMessage("Let me see.", tool_calls=made), AIMessage("It is done.")])
    rules: Any = {"send": True, "drop": {"allowed_decisions": ["approve", "reject"]}}
    review = HumanInTheLoopMiddleware(rules, interrupt_mode=mode)
    return create_agent(
        Calling(messages=said, disable_streaming=True), [send, drop], middleware=[review]
    )


def fail() -> StateGraph[State]:
    """Hears, then fails."""

    def hear(state: State) -> dict[str, Any]:
        return {"heard": [state["messages"][-1].text]}

    def stumble(state: State) -> dict[str, Any]:
        raise ZeroDivisionError("one by none")

    made = StateGraph(State).add_node(hear).add_node(stumble)
    return made.add_edge(START, "hear").add_edge("hear", "stumble")


def model() -> StateGraph[MessagesState]:
    """A model that streams its answer, in a graph within a graph."""

    async def speak(state: MessagesState) -> dict[str, Any]:
        said = GenericFakeChatModel(messages=iter([AIMessage("three short words")]))
        return {"messages": [await said.ainvoke(state["messages"])]}

    inner = StateGraph(MessagesState).add_node(speak).add_edge(START, "speak").compile()
    return StateGraph(MessagesState).add_node("inner", inner).add_edge(START, "inner")


class Halting(GenericFakeChatModel):
    """A model that streams the first half of its answer, and the other once its gate is open."""

    gate: Any

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        yield ChatGenerationChunk(message=AIMessageChunk(content="One \u202ehalf"))
        await self.gate.pass_through()
        yield ChatGenerationChunk(message=AIMessageChunk(content=" and the other <b>half</b>"))


def halting(gate: Gate) -> StateGraph[MessagesState]:
    """A model that streams its answer, and stops in the middle of it."""

    async def speak(state: MessagesState) -> dict[str, Any]:
        said = Halting(messages=iter(()), gate=gate)
        return {"messages": [await said.ainvoke(state["messages"])]}

    return StateGraph(MessagesState).add_node(speak).add_edge(START, "speak")


def failing_once() -> StateGraph[State]:
    """Fails at its first attempt, and answers at the next."""
    attempts = iter((False, True))

    def stumble(state: State) -> dict[str, Any]:
        if not next(attempts):
            raise ZeroDivisionError("one <b>by</b> none")
        return {"messages": [AIMessage("now it worked")]}

    return StateGraph(State).add_node(stumble).add_edge(START, "stumble")


def late() -> Callable[[RunnableConfig], StateGraph[State]]:
    """Cannot be made for each other run, as its tools are not there yet."""
    attempts = count()

    def hear(state: State) -> dict[str, Any]:
        return {"heard": [state["messages"][-1].text]}

    def make(config: RunnableConfig) -> StateGraph[State]:
        if "run_id" in config["configurable"] and next(attempts) % 2 == 0:
            raise ConnectionError("not yet")
        return StateGraph(State).add_node(hear).add_edge(START, "hear")

    return make


def who() -> StateGraph[State]:
    """Tells what the config says of the user and the run."""

    def tell(state: State, config: RunnableConfig) -> dict[str, Any]:
        given = config["configurable"]
        return {"heard": [given["user_id"], given["thread_id"], str(given.get("colour"))]}

    return StateGraph(State).add_node(tell).add_edge(START, "tell")


def says(text: str) -> dict[str, Any]:
    """An input."""
    return {"messages": [{"role": "user", "content": text}]}
