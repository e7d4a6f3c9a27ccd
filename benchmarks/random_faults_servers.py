"""Define the servers for random rounds of faults, and the graphs that they run."""

from __future__ import annotations

import asyncio
import operator
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, TypedDict

import httpx
from benchmarks.random_faults_model import QUESTIONS
from langchain_core.messages import AnyMessage
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import interrupt

PATIENCE_S = 60.0
SERVERS = get_context("forkserver")
SERVERS.set_forkserver_preload(["perdure.cli.serve", "perdure.server.http.app", __name__])


class Talk(TypedDict, total=False):
    """The graph's state: inputs and answers in order, and the duration of each step."""

    messages: Annotated[list[AnyMessage], add_messages]
    heard: Annotated[list[str], operator.add]
    said: Annotated[list[str], operator.add]
    token: str
    pauses_s: list[float]


async def _pause(state: Talk, number: int) -> None:
    await asyncio.sleep((state.get("pauses_s") or [0.0] * 5)[number])


async def hear(state: Talk) -> dict[str, Any]:
    """Receive the input."""
    await _pause(state, 0)
    return {}


async def think(state: Talk) -> dict[str, Any]:
    """Pause for a while."""
    await _pause(state, 1)
    return {}


async def answer(state: Talk) -> dict[str, Any]:
    """Answer the latest input."""
    await _pause(state, 2)
    return {"said": [f"to {state['token']}"]}


async def ask(state: Talk) -> dict[str, Any]:
    """Ask several questions one after the other, with an interrupt for each."""
    answers = []
    for number in range(QUESTIONS):
        answers.append(interrupt(number))
        await _pause(state, number)
    return {"heard": answers}


talking = StateGraph(Talk).add_sequence([hear, think, answer]).add_edge(START, "hear").compile()
asking = StateGraph(Talk).add_sequence([hear, ask, think]).add_edge(START, "hear").compile()


def serve(db: str, folder: str, port: int) -> None:
    """Run `perdure serve` in this process."""
    from perdure.cli import main

    log = os.open(f"{folder}/{port}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    graphs = f"{folder}/langgraph.json"
    sys.argv = ["perdure", "serve", "--port", str(port), "--db", db, "--graphs", graphs]
    main()


class Servers:
    """Two servers that share a database and can be killed.

    Attributes:
        urls: The address of each server; None means that it does not run.
        kills: When a server was killed, by `time.monotonic()`.
    """

    def __init__(self, db: str, folder: Path) -> None:
        self._db, self._folder = db, folder
        self._processes: list[Any] = [None, None]
        self.urls: list[str | None] = [None, None]
        self.kills = list[float]()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.Client(timeout=PATIENCE_S, limits=limits)

    def start(self, number: int) -> None:
        """Start a server, and wait until it answers."""
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
        process = SERVERS.Process(target=serve, args=(self._db, str(self._folder), port))
        process.start()
        self._processes[number], url = process, f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert process.is_alive(), (self._folder / f"{port}.log").read_text()
            try:
                return self.http.get(f"{url}/ok", timeout=2).is_success
            except httpx.TransportError:
                return False

        wait_for(answers)
        self.urls[number] = url

    def kill(self, number: int) -> None:
        """Kill a server."""
        self.urls[number] = None
        self.kills.append(time.monotonic())
        self._processes[number].kill()
        self._processes[number].join()

    def stop(self) -> None:
        """Kill all servers at the end of a round."""
        for process in filter(None, self._processes):
            process.kill()
            process.join()
        self.http.close()


def wait_for(truth: Callable[[], Any], pause_s: float = 0.02) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: The condition is not true after `PATIENCE_S`.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not truth():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not become true")
        time.sleep(pause_s)
