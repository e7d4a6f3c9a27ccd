"""Turns streamed by `perdure serve` to many clients at once, by HTTP.

    python -m benchmarks.server_streams                   # 20, then 200 clients
    python -m benchmarks.server_streams --streams 200 --seconds 60

The server is `perdure serve` on the first core, in a process of its own; its clients are on the
second core. Each client streams turns on a thread of its own, one after the other; the first ones
begin spread over the time of a turn. The model takes a fixed time, in parts. What a turn takes
beyond that is the server's own time: its checkpoints, its events, and the time that it waits for
the CPU. `cpu_ms` is the server's CPU for a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langgraph.graph import START, MessagesState, StateGraph


class Paced(BaseChatModel):
    """Says 20 words, and takes a fixed time for it."""

    seconds: float
    words: int = 20

    @property
    def _llm_type(self) -> str:
        return "paced"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        raise NotImplementedError

    async def _agenerate(self, *args: Any, **kwargs: Any) -> ChatResult:
        await asyncio.sleep(self.seconds)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("word " * self.words))])

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        begun = time.monotonic()
        for number in range(1, self.words + 1):
            await asyncio.sleep(begun + self.seconds * number / self.words - time.monotonic())
            yield ChatGenerationChunk(message=AIMessageChunk("word "))


async def answer(state: MessagesState) -> dict[str, Any]:
    """Answer with such a model."""
    model = Paced(seconds=float(os.environ["MODEL_S"]))
    return {"messages": [await model.ainvoke(state["messages"])]}


graph = StateGraph(MessagesState).add_node(answer).add_edge(START, "answer").compile()


async def talk(
    client: httpx.AsyncClient, thread: str, until: float, model_s: float, own: list[float]
) -> None:
    """Turns on a thread, one after the other."""
    body = {
        "assistant_id": "chat",
        "input": {"messages": [{"role": "user", "content": "What did I say about figs?"}]},
        "stream_mode": ["values", "messages-tuple"],
        "if_not_exists": "create",
    }
    while time.monotonic() < until:
        begun, events = time.monotonic(), bytearray()
        path = f"/threads/{thread}/runs/stream"
        async with client.stream("POST", path, json=body) as response:
            async for part in response.aiter_raw():
                events += part
        assert b"event: values" in events, events
        assert b"event: error" not in events, events
        own.append(time.monotonic() - begun - model_s)


async def measure(url: str, streams: int, seconds: float, model_s: float) -> list[float]:
    """The server's own times of turns."""
    own: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        # the first imports modules: who waits for that would begin together in each turn after it
        await talk(client, "first", time.monotonic() + 1, model_s, [])
        until = time.monotonic() + seconds + model_s

        async def late(number: int) -> None:
            await asyncio.sleep(model_s * number / streams)
            await talk(client, f"{streams}-{number}", until, model_s, own)

        await asyncio.gather(*(late(number) for number in range(streams)))
    return own[streams:]  # the first turn of each thread makes it


def run(streams: int, seconds: float, model_s: float, port: int) -> float:
    """Measure one number of streams; returns the 95th percentile."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        served = Path(folder) / "langgraph.json"
        named = {"graphs": {"chat": f"{__file__}:graph"}, "env": {"MODEL_S": str(model_s)}}
        served.write_text(json.dumps(named))
        given = ["--db", str(Path(folder) / "m.db"), "--user", "ann", "--port", str(port)]
        serve = ["-c", "from perdure.cli import main; main()", "serve", "--graphs", str(served)]
        command = [sys.executable, *serve, *given]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                while True:
                    time.sleep(0.2)
                    try:
                        httpx.get(f"{url}/ok")
                        break
                    except httpx.TransportError:
                        assert process.poll() is None
                seen = psutil.Process(process.pid)
                cores = sorted(os.sched_getaffinity(0))
                for thread in seen.threads():
                    os.sched_setaffinity(thread.id, cores[:1])
                os.sched_setaffinity(0, cores[1:] or cores)
                before = seen.cpu_times()
                own = asyncio.run(measure(url, streams, seconds, model_s))
                after = seen.cpu_times()
                memory = seen.memory_info().rss / 1e6
            finally:
                process.terminate()
    cpu = after.user + after.system - before.user - before.system
    cuts = statistics.quantiles(own, n=20)
    made = {
        "streams": streams,
        "turns": len(own),
        "p50_ms": round(statistics.median(own) * 1e3, 1),
        "p95_ms": round(cuts[18] * 1e3, 1),
        "cpu_ms": round(cpu * 1e3 / (len(own) + streams), 1),
        "rss_mb": round(memory),
    }
    print(json.dumps(made), flush=True)
    return cuts[18]


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="*", default=[20, 200])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--model-s", type=float, default=10)
    parser.add_argument("--port", type=int, default=8765)
    given = parser.parse_args()
    p95 = [run(each, given.seconds, given.model_s, given.port) for each in given.streams]
    if len(p95) == 2:
        print(
            f"p95 of {given.streams[1]} is {p95[1] / p95[0]:.1f} times that of {given.streams[0]}"
        )


if __name__ == "__main__":
    main()
