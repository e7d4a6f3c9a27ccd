"""Measure turns that `perdure serve` streams to many clients at once over HTTP.

    python -m benchmarks.server_streams                   # 20, then 200 clients
    python -m benchmarks.server_streams --streams 200 --seconds 60
    python -m benchmarks.server_streams --rounds 3 --old /tmp/old/build/view   # two builds in turn
    python -m benchmarks.server_streams --slots 60 --old /tmp/old/build/view --streams 10
    python -m benchmarks.server_streams --streams 64 --model-s 0 --workers 2 --on postgres
    python -m benchmarks.server_streams --resumable       # their events are stored

The server is `perdure serve` on the first core, in a process of its own, or with `--workers` in
several on all cores; its clients are on the second core. Each client streams turns one after the
other on its own thread. The clients' first turns start at different times, spread over the duration
of a turn. The model takes a fixed time, in parts. The rest of a turn's duration is the server's own
time: its checkpoints, its events, and the time that it waits for the CPU. `cpu_ms` is the server's
CPU time per turn, excluding Postgres.

With `--slots`, the servers of both builds run at the same time, and short slots of turns alternate
between them. The speed of a shared machine changes from minute to minute. The two slots of a pair
are only about a second apart, so changes in the machine's speed hardly affect the ratio within a
pair.
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
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langgraph.graph import START, MessagesState, StateGraph


class Paced(BaseChatModel):
    """Returns 20 words, and takes a fixed time to do so."""

    seconds: float
    words: int = 20

    @property
    def _llm_type(self) -> str:
        return "paced"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        time.sleep(self.seconds)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("word " * self.words))])

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        begun = time.monotonic()
        for number in range(1, self.words + 1):
            await asyncio.sleep(begun + self.seconds * number / self.words - time.monotonic())
            yield ChatGenerationChunk(message=AIMessageChunk("word "))


async def answer(state: MessagesState) -> dict[str, Any]:
    """Answer with a `Paced` model."""
    model = Paced(seconds=float(os.environ["MODEL_S"]))
    return {"messages": [await model.ainvoke(state["messages"])]}


graph = StateGraph(MessagesState).add_node(answer).add_edge(START, "answer").compile()


async def talk(
    client: httpx.AsyncClient,
    thread: str,
    until: float,
    model_s: float,
    own: list[float],
    resumable: bool,
) -> None:
    """Run turns on a thread, one after the other."""
    body = {
        "assistant_id": "chat",
        "input": {"messages": [{"role": "user", "content": "What did I say about figs?"}]},
        "stream_mode": ["values", "messages-tuple"],
        "if_not_exists": "create",
        "stream_resumable": resumable,
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


async def measure(
    url: str, streams: int, seconds: float, model_s: float, *, resumable: bool = False
) -> list[float]:
    """Return the server's own time for each turn."""
    own: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        # The first turn imports modules. Clients that waited for it would start all later turns at
        # the same time.
        await talk(client, "first", time.monotonic() + 1, model_s, [], resumable)
        until = time.monotonic() + seconds + model_s

        async def late(number: int) -> None:
            await asyncio.sleep(model_s * number / streams)
            await talk(client, f"{streams}-{number}", until, model_s, own, resumable)

        await asyncio.gather(*(late(number) for number in range(streams)))
    return own[streams:]  # the first turn of each thread makes it


@contextmanager
def postgres() -> Iterator[str]:
    """Start a Postgres server with an empty database, and yield the DSN."""
    from benchmarks.postgres_faults import cluster
    from benchmarks.server_faults import database

    with cluster() as server, database(server.dsn) as dsn:
        yield dsn


@contextmanager
def served(
    model_s: float, view: str | None = None, *, on: str = "file", workers: int = 1, port: int = 8765
) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server with its own database, and yield its URL and process.

    The server runs the build in the folder `view`, or the current build if it is None.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        named = {"graphs": {"chat": f"{__file__}:graph"}, "env": {"MODEL_S": str(model_s)}}
        graphs = Path(folder) / "langgraph.json"
        graphs.write_text(json.dumps(named))
        db = str(Path(folder) / "m.db") if on == "file" else stack.enter_context(postgres())
        several = ["--workers", str(workers)] if workers > 1 else []
        given = ["--graphs", str(graphs), "--db", db, "--user", "ann", "--port", str(port)]
        serve = ["-c", "from perdure.cli import main; main()", "serve", *given, *several]
        env = {**os.environ, **({"PYTHONPATH": view} if view else {})}
        url = f"http://127.0.0.1:{port}"
        with subprocess.Popen([sys.executable, *serve], env=env, stderr=subprocess.DEVNULL) as made:
            try:
                while True:
                    time.sleep(0.2)
                    try:
                        httpx.get(f"{url}/ok")
                        break
                    except httpx.TransportError:
                        assert made.poll() is None
                process = psutil.Process(made.pid)
                cores = sorted(os.sched_getaffinity(0))
                if workers == 1:
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, cores[:1])
                yield url, process
            finally:
                made.terminate()


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds used by a server and its workers."""
    every = [process, *process.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in every)


def run(
    streams: int,
    seconds: float,
    model_s: float,
    view: str | None = None,
    *,
    resumable: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Measure one build with one number of streams."""
    with served(model_s, view, **options) as (url, process):
        every = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(every)[1:] or every)
        before, clients, begun = cpu_s(process), time.process_time(), time.monotonic()
        own = asyncio.run(measure(url, streams, seconds, model_s, resumable=resumable))
        took_s, cpu, turns = time.monotonic() - begun, cpu_s(process) - before, len(own) + streams
        clients = time.process_time() - clients
        memory = process.memory_info().rss / 1e6
        os.sched_setaffinity(0, every)
    cuts = statistics.quantiles(own, n=20)
    return {
        "streams": streams,
        "build": "old" if view else "new",
        "turns": turns,
        "a_second": round(turns / took_s, 1),
        "p50_ms": round(statistics.median(own) * 1e3, 1),
        "p95_ms": round(cuts[18] * 1e3, 1),
        "cpu_ms": round(cpu * 1e3 / turns, 2),
        "clients_cpu_ms": round(clients * 1e3 / turns, 2),
        "rss_mb": round(memory),
    }


async def _run_slot(
    client: httpx.AsyncClient, process: psutil.Process, streams: int, model_s: float
) -> tuple[float, float, float]:
    """Stream one turn on each of several threads at once.

    Returns:
        The CPU time of the server per turn in seconds, and the medians of the seconds until the
        first event and until the end of a turn, both without the time of the model.
    """
    first_event_s, turn_s = list[float](), list[float]()

    async def stream_turn(number: int) -> None:
        await asyncio.sleep(model_s * number / streams)
        body = {
            "assistant_id": "chat",
            "input": {"messages": [{"role": "user", "content": "What did I say about figs?"}]},
            "stream_mode": ["values", "messages-tuple"],
            "if_not_exists": "create",
        }
        begun, events = time.monotonic(), bytearray()
        async with client.stream("POST", f"/threads/{number}/runs/stream", json=body) as response:
            async for part in response.aiter_raw():
                if not events:
                    first_event_s.append(time.monotonic() - begun)
                events += part
        assert b"event: values" in events, events
        assert b"event: error" not in events, events
        turn_s.append(time.monotonic() - begun - model_s)

    before = cpu_s(process)
    await asyncio.gather(*(stream_turn(number) for number in range(streams)))
    await asyncio.sleep(0.05)  # The server finishes its last writes.
    cpu_per_turn_s = (cpu_s(process) - before) / streams
    return cpu_per_turn_s, statistics.median(first_event_s), statistics.median(turn_s)


async def _alternate_slots(
    servers: list[tuple[str, psutil.Process]], streams: int, model_s: float, slots: int
) -> None:
    """Alternate slots of turns between the servers of two builds, and print the ratios."""
    names = ("cpu", "first_event", "turn")
    ratios: dict[str, list[float]] = {name: [] for name in names}
    old_figures: dict[str, list[float]] = {name: [] for name in names}
    async with (
        httpx.AsyncClient(base_url=servers[0][0], timeout=600) as old,
        httpx.AsyncClient(base_url=servers[1][0], timeout=600) as new,
    ):
        pairs = [(old, servers[0][1]), (new, servers[1][1])]
        # The first three pairs are not counted, because they import modules and fill caches.
        for number in range(-3, slots):
            order = [0, 1] if number % 2 == 0 else [1, 0]
            measured = {n: await _run_slot(*pairs[n], streams, model_s) for n in order}
            for name, old_figure, new_figure in zip(names, measured[0], measured[1], strict=True):
                if number >= 0:
                    ratios[name].append(new_figure / old_figure)
                    old_figures[name].append(old_figure)
    for name in names:
        low, middle, high = statistics.quantiles(ratios[name], n=4)
        result = {
            "figure": name,
            "pairs": slots,
            "old_ms": round(statistics.median(old_figures[name]) * 1e3, 2),
            "ratio_p25": round(low, 3),
            "ratio_p50": round(middle, 3),
            "ratio_p75": round(high, 3),
        }
        print(json.dumps(result), flush=True)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="*", default=[20, 200])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--model-s", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--old", metavar="VIEW", help="a PYTHONPATH of another build")
    parser.add_argument("--on", choices=("file", "postgres"), default="file")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--resumable", action="store_true", help="their events are stored")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--slots", type=int, help="alternate this many pairs of slots; with --old")
    given = parser.parse_args()
    if given.slots:
        streams, model_s = given.streams[0], given.model_s
        with (
            served(model_s, given.old, on=given.on, port=given.port) as old,
            served(model_s, on=given.on, port=given.port + 1) as new,
        ):
            every = os.sched_getaffinity(0)
            os.sched_setaffinity(0, sorted(every)[1:] or every)
            asyncio.run(_alternate_slots([old, new], streams, model_s, given.slots))
        return
    options = {"on": given.on, "workers": given.workers, "port": given.port}
    options["resumable"] = given.resumable
    builds = [given.old, None] if given.old else [None]
    for number, streams in enumerate(given.streams * given.rounds):
        # Reverse the order of the builds in every other round, so that neither is always second.
        for view in builds if number % 2 == 0 else builds[::-1]:
            print(
                json.dumps(run(streams, given.seconds, given.model_s, view, **options)), flush=True
            )


if __name__ == "__main__":
    main()
