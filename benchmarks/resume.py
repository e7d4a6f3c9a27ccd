"""Measure what it costs to open a database and read a thread of it in a process that has not.

    python -m benchmarks.resume                     # perdure and langgraph's AsyncSqliteSaver
    python -m benchmarks.resume --old PATH/TO/VIEW  # also an earlier build, from its build/view

For each shape of agent, every saver writes a thread. Then a process reads the thread: it opens the
database, makes the graph, and reads the state. Each reading happens in a new process, which is
forked from a process that has imported everything and has opened nothing. The savers take turns.
The table shows medians in ms of CPU time and of elapsed time, and the ratio to langgraph's saver.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.agents import SHAPES, Course
from benchmarks.common import SAVERS

PEER, OURS = "AsyncSqliteSaver", "perdure"
THREAD = "t"


async def write_thread(saver: str, shape: str, path: Path, turns: int) -> dict[str, float]:
    """Write a thread of this number of turns."""
    course = Course(saver)
    await course.open(shape, path)
    await course.turns(THREAD, range(turns))
    await course.close()
    return {}


async def read_thread(saver: str, shape: str, path: Path, turns: int) -> dict[str, float]:
    """Open the database and read the state; return the milliseconds of each step."""
    cpu, started = time.process_time(), time.perf_counter()
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(SAVERS[saver](path))
        opened_cpu = time.process_time()
        graph = SHAPES[shape](opened)
        built_cpu = time.process_time()
        state = await graph.aget_state({"configurable": {"thread_id": THREAD}})
        figures = {
            "cpu": time.process_time() - cpu,
            "elapsed": time.perf_counter() - started,
            "open": opened_cpu - cpu,
            "read": time.process_time() - built_cpu,
        }
        assert len(state.values["messages"]) >= turns or shape == "summary"
    return {name: seconds * 1e3 for name, seconds in figures.items()}


STEPS = {"write": write_thread, "read": read_thread}


def serve_requests() -> None:
    """Execute each request from stdin in a forked process, which prints its figures."""
    print("ready", flush=True)
    for line in sys.stdin:
        step, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            saver, shape, path, turns = arguments
            figures = asyncio.run(STEPS[step](saver, shape, Path(path), turns))
            print(json.dumps(figures), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


class Build:
    """A process that has imported one build of perdure, and forks a process for each request."""

    def __init__(self, view: str | None) -> None:
        paths = [*([view] if view else []), os.environ.get("PYTHONPATH", ""), os.getcwd()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.resume", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self._read_line() == "ready"

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def request(self, step: str, saver: str, shape: str, path: Path, turns: int) -> dict[str, Any]:
        """Execute a step in a new process, and return its figures."""
        assert self._process.stdin is not None
        print(json.dumps([step, saver, shape, str(path), turns]), file=self._process.stdin)
        self._process.stdin.flush()
        return dict(json.loads(self._read_line()))

    def close(self) -> None:
        """Stop the process."""
        self._process.communicate()


def measure(shape: str, builds: dict[str, Build], turns: int, readings: int, folder: Path) -> None:
    """Write a thread with each saver, read each of them several times, and print the figures."""
    savers = dict.fromkeys(builds, OURS) | {PEER: PEER}
    processes = builds | {PEER: builds[OURS]}
    figures: dict[str, list[dict[str, float]]] = {label: [] for label in savers}
    for label in savers:
        path = folder / f"{shape} {label}.db"
        processes[label].request("write", savers[label], shape, path, turns)
    labels = [*savers]
    for number in range(readings):
        for label in labels[number % len(labels) :] + labels[: number % len(labels)]:
            path = folder / f"{shape} {label}.db"
            found = processes[label].request("read", savers[label], shape, path, turns)
            figures[label].append(found)
    peer = {name: median(each[name] for each in figures[PEER]) for name in figures[PEER][0]}
    for label in labels:
        row = {name: median(each[name] for each in figures[label]) for name in peer}
        cells = [f"{name} {row[name]:6.2f} ({row[name] / peer[name]:.2f})" for name in row]
        print(f"{shape:8} {label:17}", *cells, flush=True)


def main() -> None:
    """Measure each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", help="the folder build/view of an earlier build")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--readings", type=int, default=40)
    parser.add_argument("--shapes", nargs="+", default=["chat", "files", "summary", "approve"])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_requests()
        return
    builds = {OURS: Build(None)} | ({"old": Build(arguments.old)} if arguments.old else {})
    with tempfile.TemporaryDirectory() as folder:
        for shape in arguments.shapes:
            measure(shape, builds, arguments.turns, arguments.readings, Path(folder))
    for build in builds.values():
        build.close()


if __name__ == "__main__":
    main()
