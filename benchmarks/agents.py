"""What the benchmarks run: an agent without a model, the savers under test, and tables."""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage, ToolMessage
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, StateGraph, add_messages
from langgraph.types import Send

from perdure.checkpointers import SQLiteCheckpointer

Saver = BaseCheckpointSaver[Any] | None
WORDS = ("order", "refund", "budget", "pipeline", "invoice", "renewal", "schema", "agent", "ticket")
KEEP = 20  # messages that the trimming agent keeps


# -- savers


@asynccontextmanager
async def perdure(folder: Path) -> AsyncIterator[Saver]:
    async with SQLiteCheckpointer.open(folder / "perdure.db") as saver:
        yield saver


@asynccontextmanager
async def encrypted(folder: Path) -> AsyncIterator[Saver]:
    async with SQLiteCheckpointer.open(folder / "encrypted.db", key=b"k" * 32) as saver:
        yield saver


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncIterator[Saver]:
    async with AsyncSqliteSaver.from_conn_string(str(folder / "sqlite.db")) as saver:
        yield saver


@asynccontextmanager
async def delta(folder: Path) -> AsyncIterator[Saver]:
    async with AsyncSqliteSaver.from_conn_string(str(folder / "delta.db")) as saver:
        yield saver


@asynccontextmanager
async def memory(folder: Path) -> AsyncIterator[Saver]:
    yield InMemorySaver()


@asynccontextmanager
async def loop(folder: Path) -> AsyncIterator[Saver]:
    yield None


SAVERS: dict[str, Callable[[Path], Any]] = {
    "sqlite": sqlite,
    "perdure": perdure,
    "encrypted": encrypted,
    "delta": delta,
    "memory": memory,
    "loop": loop,
}


# -- what is said


def text(rng: random.Random, length: int) -> str:
    words: list[str] = []
    size = 0
    while size < length:
        words.append(f"{rng.choice(WORDS)}{rng.randrange(10_000)}")
        size += len(words[-1]) + 1
    return " ".join(words)[:length]


def human(turn: int) -> HumanMessage:
    rng = random.Random(f"human {turn}")
    return HumanMessage(text(rng, 120), id=str(uuid.UUID(int=rng.getrandbits(128), version=4)))


def reply(turn: int, calls: int = 0) -> AIMessage:
    rng = random.Random(f"reply {turn} {calls}")
    tokens = rng.randrange(200, 6000)
    return AIMessage(
        text(rng, 600),
        id=f"run-{uuid.UUID(int=rng.getrandbits(128), version=4)}",
        tool_calls=[
            {"name": "lookup", "args": {"q": text(rng, 30)}, "id": f"call_{turn}_{i}"}
            for i in range(calls)
        ],
        response_metadata={"model_name": "none", "finish_reason": "stop", "id": f"resp_{turn}"},
        usage_metadata={
            "input_tokens": tokens,
            "output_tokens": 100,
            "total_tokens": tokens + 100,
            "input_token_details": {"cache_read": tokens // 2},
        },
    )


def result(turn: int, call: int) -> ToolMessage:
    rng = random.Random(f"result {turn} {call}")
    return ToolMessage(text(rng, 400), tool_call_id=f"call_{turn}_{call}", id=f"tool-{turn}-{call}")


def said(turns: int, agent: str = "chat") -> list[AnyMessage]:
    """What an agent and its user said in so many turns."""
    if agent == "trim":
        turns = KEEP // 2
    out: list[AnyMessage] = []
    for turn in range(turns):
        out.append(human(turn))
        if agent == "tools":
            out += [reply(turn, calls=3), *(result(turn, call) for call in range(3))]
        out.append(reply(turn))
    return out


# -- agents


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def _join(value: list[AnyMessage], updates: Sequence[list[AnyMessage]]) -> list[AnyMessage]:
    out: Any = value
    for update in updates:
        out = add_messages(out, update)
    return list(out)


class DeltaState(TypedDict):
    messages: Annotated[list[AnyMessage], DeltaChannel(_join, snapshot_frequency=100)]


def _turn(state: Any) -> int:
    return sum(isinstance(m, HumanMessage) for m in state["messages"]) - 1


def chat_agent(saver: Saver, schema: Any = State) -> Any:
    """One node that appends a reply: 3 checkpoints and 2 messages a turn."""
    graph = StateGraph(schema)
    graph.add_node("agent", lambda state: {"messages": [reply(len(state["messages"]))]})
    graph.add_edge(START, "agent")
    return graph.compile(checkpointer=saver)


def trim_agent(saver: Saver, schema: Any = State) -> Any:
    """Chat, then a node that removes all but the last 20 messages: 4 checkpoints a turn."""

    def trim(state: Any) -> dict[str, Any]:
        return {"messages": [RemoveMessage(id=m.id) for m in state["messages"][:-KEEP]]}

    graph = StateGraph(schema)
    graph.add_node("agent", lambda state: {"messages": [reply(hash(state["messages"][-1].id))]})
    graph.add_node("trim", trim)
    graph.add_edge(START, "agent")
    graph.add_edge("agent", "trim")
    return graph.compile(checkpointer=saver)


def tool_agent(saver: Saver, schema: Any = State) -> Any:
    """A reply with 3 tool calls, 3 tools in parallel, a reply: 5 checkpoints, 6 messages a turn."""

    def ask(state: Any) -> dict[str, Any]:
        return {"messages": [reply(_turn(state), calls=3)]}

    def call(state: Any) -> list[Send]:
        turn = _turn(state)
        return [Send("tool", {"turn": turn, "call": i}) for i in range(3)]

    graph = StateGraph(schema)
    graph.add_node("ask", ask)
    graph.add_node("tool", lambda given: {"messages": [result(given["turn"], given["call"])]})
    graph.add_node("answer", lambda state: {"messages": [reply(_turn(state))]})
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", call, ["tool"])
    graph.add_edge("tool", "answer")
    return graph.compile(checkpointer=saver)


AGENTS: dict[str, Callable[..., Any]] = {
    "chat": chat_agent,
    "tools": tool_agent,
    "trim": trim_agent,
}


def schema_for(name: str) -> Any:
    return DeltaState if name == "delta" else State


# -- results


def disk_bytes(folder: Path, name: str) -> int:
    """The size of a closed saver's database."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / f"{name}.db").stat().st_size
    return 0


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a Markdown table."""
    lines = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *lines]) for i in range(len(columns))]
    print(f"\n{title}\n")
    for line in [list(columns), ["-" * w for w in widths], *lines]:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |")


def ratio(value: float, base: float) -> str:
    """A figure, and how it compares to the first subject's."""
    return f"{value:.3g} ({value / base:.3g}x)" if base else f"{value:.3g}"
