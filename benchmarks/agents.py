"""Define agents of langchain's `create_agent` with a model that needs no network, for benchmarks.

The agents are not adapted to any saver: the user's message is a dict without an id, the model's
message has the id that langchain assigns, and parallel tools finish in any order.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from benchmarks.common import SAVERS, Saver, text
from langchain.agents import AgentState, create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolCall
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.address import Address
from perdure.checkpointers.manifest import compute_max_log_range_count, count_positions

FILES = 40
ENTRIES = 12


class ScriptedModel(BaseChatModel):
    """Calls the tool `calls` times after a user's message, or answers with 600 characters."""

    calls: int = 0

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> ScriptedModel:
        return self

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any
    ) -> ChatResult:
        seed, calls = f"{self.calls} {len(messages)} {messages[-1].text}", 0
        if messages[-1].type == "human":
            calls = self.calls
        message = AIMessage(
            "" if calls else text(seed, 600),
            tool_calls=[_call(f"{seed} {i}") for i in range(calls)],
            usage_metadata={"input_tokens": 950, "output_tokens": 150, "total_tokens": 1100},
            response_metadata={
                "finish_reason": "tool_calls" if calls else "stop",
                "model_name": "scripted-1",
                "model_provider": "none",
                "system_fingerprint": None,
                "logprobs": None,
            },
        )
        return ChatResult(generations=[ChatGeneration(message=message)])


def _call(seed: str) -> ToolCall:
    number = random.Random(seed).getrandbits(96)
    return ToolCall(name="look_up", args={"query": text(seed, 40)}, id=f"call_{number:024x}")


@tool
async def look_up(query: str) -> str:
    """Look something up."""
    await asyncio.sleep(random.Random(query).random() * 0.004)
    return text(query, 400)


@tool("look_up")
def ask_first(query: str) -> str:
    """Look something up after a person has agreed."""
    return f"{interrupt(query)}: {text(query, 400)}"


# -- shapes: each makes a graph


def chat(saver: Saver) -> Any:
    return create_agent(ScriptedModel(), [], checkpointer=saver)


def tools(saver: Saver) -> Any:
    return create_agent(ScriptedModel(calls=3), [look_up], checkpointer=saver)


def summary(saver: Saver) -> Any:
    shorter = SummarizationMiddleware(
        ScriptedModel(), trigger=("messages", 60), keep=("messages", 20)
    )
    model = ScriptedModel(calls=3)
    return create_agent(model, [look_up], middleware=[shorter], checkpointer=saver)


def approve(saver: Saver) -> Any:
    return create_agent(ScriptedModel(calls=1), [ask_first], checkpointer=saver)


def team(saver: Saver) -> Any:
    searcher = create_agent(ScriptedModel(calls=2), [look_up], checkpointer=True)
    graph = StateGraph(MessagesState)
    graph.add_node("searcher", searcher)
    graph.add_node("writer", create_agent(ScriptedModel(), [], checkpointer=True))
    graph.add_edge(START, "searcher").add_edge("searcher", "writer")
    return graph.compile(checkpointer=saver)


class FilesState(AgentState[Any]):
    files: Annotated[dict[str, str], lambda old, new: {**old, **new}]
    todos: list[dict[str, str]]


def files(saver: Saver) -> Any:
    def work(state: FilesState) -> dict[str, Any]:
        turn = len(state["messages"]) // 2
        name = f"/notes/{turn % FILES}.md"
        grown = state.get("files", {}).get(name, "")[-1500:] + text(turn, 500)
        todos = [
            {"content": text(i, 60), "status": "done" if i < turn % ENTRIES else "open"}
            for i in range(ENTRIES)
        ]
        return {"files": {name: grown}, "todos": todos}

    graph = StateGraph(FilesState)
    graph.add_node("agent", create_agent(ScriptedModel(), [], state_schema=FilesState))
    graph.add_node("work", work)
    graph.add_edge(START, "agent").add_edge("agent", "work")
    return graph.compile(checkpointer=saver)


SHAPES: dict[str, Callable[[Saver], Any]] = {
    "chat": chat,
    "tools": tools,
    "stream": tools,
    "summary": summary,
    "approve": approve,
    "team": team,
    "files": files,
}


# -- turns


@dataclass
class Course:
    """Runs one kind of agent with one saver in a worker process.

    Call `open`, run turns, and call `close`; then another saver or agent may be opened.
    """

    name: str

    async def open(self, shape: str, path: Path) -> None:
        self.shape = shape
        self._stack = AsyncExitStack()
        self.saver = await self._stack.enter_async_context(SAVERS[self.name](path))
        self.graph = SHAPES[shape](self.saver)

    async def close(self) -> None:
        await self._stack.aclose()

    async def turn(self, thread: str, number: int) -> list[BaseMessage]:
        """Run one more turn, and return the messages of the resulting state."""
        config: Any = {"configurable": {"thread_id": thread}}
        asked = {"messages": [{"role": "user", "content": text(f"{thread} {number}", 120)}]}
        if self.shape == "stream":
            modes = ["messages", "updates", "values"]
            async for _, part in self.graph.astream(asked, config, stream_mode=modes):
                state = part
        else:
            state = await self.graph.ainvoke(asked, config)
        if self.shape == "approve":
            state = await self.graph.ainvoke(Command(resume="agreed"), config)
        return list(state["messages"])

    async def turns(self, thread: str, numbers: range) -> tuple[list[float], float]:
        """Run turns; return the seconds of each turn and the CPU seconds of the whole process."""
        took, cpu = [], time.process_time()
        for number in numbers:
            started = time.perf_counter()
            self.said = await self.turn(thread, number)
            took.append(time.perf_counter() - started)
        return took, time.process_time() - cpu

    async def crowd(self, threads: range, turns: int, at_once: int) -> tuple[float, float]:
        """Run short conversations concurrently; return the elapsed seconds and the CPU seconds."""
        waiting = [f"t{i}" for i in threads]

        async def serve() -> None:
            while waiting:
                thread = waiting.pop()
                for number in range(turns):
                    await self.turn(thread, number)

        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(serve() for _ in range(at_once)))
        return time.perf_counter() - started, time.process_time() - cpu

    async def returned(self) -> list[dict[str, Any]]:
        """Return the messages that the last turn returned."""
        return [message.model_dump() for message in self.said]

    async def resume(
        self, shape: str, path: Path, thread: str
    ) -> tuple[float, list[dict[str, Any]]]:
        """Open a file and read a thread's state; return the seconds this took and the messages.

        Raises:
            AssertionError: A stored manifest of perdure's has too many ranges.
        """
        started = time.perf_counter()
        await self.open(shape, path)
        state = await self.graph.aget_state({"configurable": {"thread_id": thread}})
        took = time.perf_counter() - started
        if isinstance(self.saver, SQLiteCheckpointer):
            check_manifests(self.saver, thread)
        await self.close()
        return took, [message.model_dump() for message in state.values["messages"]]


def check_manifests(saver: SQLiteCheckpointer, thread: str) -> None:
    """Check that no value or transcript of a thread has more log ranges than allowed.

    Raises:
        AssertionError: One has more.
    """
    for info in saver.checkpoints(thread):
        at = Address(thread, info.checkpoint_ns, info.checkpoint_id)
        found = saver.database.read(partial(saver._reader.find_checkpoint, at))
        assert found is not None
        for manifests in (found.snapshot.ranges, found.snapshot.transcript):
            for channel, (_, ranges) in manifests.items():
                assert len(ranges) <= compute_max_log_range_count(count_positions(ranges)), (
                    at,
                    channel,
                    len(ranges),
                )
