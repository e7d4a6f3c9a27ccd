"""Measure the memory of `perdure serve` while clients do not read streams of large messages.

    python -m benchmarks.server_unread                              # 40 streams of each kind
    python -m benchmarks.server_unread --kinds run --streams 256
    python -m benchmarks.server_unread --old /tmp/old/build/view    # two builds in turn

Each client starts a run on a thread of its own. The run streams 30 messages of 3 MB. The kinds:

- `run`: clients ask for the stream of a run.
- `stored`: the same, and the events are stored.
- `thread`: clients ask for the event stream of a thread.
- `socket`: clients subscribe to the same events by a websocket.
- `nobody`: runs are started in the background, and nobody asks for their events.
- `join`: clients ask for the stored events of runs that have ended.
- `outputs`: a client waits for runs without a thread, one after the other, and reads their
  states of 5 MB.
- `states`: the same on a thread for each run.
- `waits`: clients wait for runs without a thread all at once, and do not read the states.

The default is 60 runs for each of the last three kinds, and 40 streams for each of the others.

`idle_mb` is the resident memory before the streams are opened, `peak_mb` the largest while they are
open, and `after_mb` that 5 s after all streams were closed and all runs have ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from websockets.sync.client import connect

STREAMS = ("run", "stored", "thread", "socket", "nobody", "join")
OUTPUTS = ("outputs", "states", "waits")
KINDS = STREAMS + OUTPUTS
MESSAGES, SIZE = 30, 3_000_000
PARTS, PART_SIZE = 50, 100_000  # messages of a state of 5 MB
BODY: dict[str, Any] = {
    "assistant_id": "large",
    "input": {"messages": [{"role": "user", "content": "Show me all of it"}]},
    "stream_mode": ["custom"],
}
STATES = BODY | {"assistant_id": "states"}


async def answer(state: MessagesState) -> dict[str, Any]:
    """Stream large messages, and return a short one for the state."""
    write = get_stream_writer()
    for number in range(MESSAGES):
        write(f"{number:06}" * (SIZE // 6))
        await asyncio.sleep(0.1)
    return {"messages": [{"role": "assistant", "content": "That was all."}]}


async def collect(state: MessagesState) -> dict[str, Any]:
    """Return a state of 5 MB."""
    texts = [f"{number:05}" * (PART_SIZE // 5) for number in range(PARTS)]
    return {"messages": [{"role": "assistant", "content": text} for text in texts]}


graph = StateGraph(MessagesState).add_node(answer).add_edge(START, "answer").compile()
states = StateGraph(MessagesState).add_node(collect).add_edge(START, "collect").compile()


@contextmanager
def serve(view: str | None) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server on a new file; yield its URL and its process."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        graphs = Path(folder) / "langgraph.json"
        graphs.write_text(
            json.dumps({"graphs": {"large": f"{__file__}:graph", "states": f"{__file__}:states"}})
        )
        options = ["--graphs", str(graphs), "--db", f"{folder}/m.db", "--port", str(port)]
        command = ["-c", "from perdure.cli import main; main()", "serve", "--user", "ann", *options]
        env = {**os.environ, **({"PYTHONPATH": view} if view else {})}
        url = f"http://127.0.0.1:{port}"
        with subprocess.Popen(
            [sys.executable, *command], env=env, stderr=subprocess.DEVNULL
        ) as process:
            try:
                for _ in range(100):
                    time.sleep(0.2)
                    try:
                        httpx.get(f"{url}/ok")
                        break
                    except httpx.TransportError:
                        assert process.poll() is None
                yield url, psutil.Process(process.pid)
            finally:
                process.terminate()


class Unread:
    """Open connections that are never read."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._opened: list[Any] = []

    def ask(self, path: str, body: Any = None) -> None:
        """Send a request."""
        content = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", self._port))
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        self._opened.append(connection)

    def subscribe(self, path: str, wanted: Any) -> None:
        """Open a websocket that subscribes to events."""
        opened = connect(
            f"ws://127.0.0.1:{self._port}{path}",
            max_queue=1,
            close_timeout=0.1,
            ping_interval=None,
            legacy=True,
        )
        opened.send(json.dumps({"id": 1, "method": "subscription.subscribe", "params": wanted}))
        self._opened.append(opened)

    def close(self) -> None:
        """Close all connections."""
        for each in self._opened:
            each.socket.close() if hasattr(each, "subprotocol") else each.close()
        self._opened.clear()


def start(kind: str, client: httpx.Client, unread: Unread, streams: int) -> None:
    """Start the streams of a kind."""
    wanted = {"channels": ["custom", "lifecycle"], "since": 0}
    for number in range(streams):
        thread = f"/threads/{kind}-{number}"
        client.post("/threads", json={"thread_id": f"{kind}-{number}"})
        match kind:
            case "run" | "stored":
                unread.ask(f"{thread}/runs/stream", BODY | {"stream_resumable": kind == "stored"})
            case "thread" | "socket":
                path = f"{thread}/stream/events"
                (unread.ask if kind == "thread" else unread.subscribe)(path, wanted)
                order = {"id": 1, "method": "run.start", "params": BODY}
                client.post(f"{thread}/commands", json=order)
            case "nobody" | "join":
                client.post(f"{thread}/runs", json=BODY)
            case "outputs":
                client.post("/runs/wait", json=STATES).raise_for_status()
            case "states":
                client.post(f"{thread}/runs/wait", json=STATES).raise_for_status()
            case "waits":
                unread.ask("/runs/wait", STATES)


def wait_until_idle(client: httpx.Client) -> None:
    """Wait until no thread has a run."""
    while client.post("/threads/count", json={"status": "busy"}).json():
        time.sleep(0.2)


def measure(kind: str, streams: int, view: str | None) -> dict[str, Any]:
    """Measure one kind of streams."""
    with serve(view) as (url, server), httpx.Client(base_url=url, timeout=600) as client:
        unread, begun = Unread(client.base_url.port or 0), time.monotonic()
        body = BODY if kind in STREAMS else STATES
        client.post("/runs/wait", json=body | {"input": {"messages": []}})  # imports modules
        time.sleep(1)
        idle = peak = server.memory_info().rss
        taken_s = server.cpu_times()
        if kind == "join":
            start(kind, client, unread, streams)
            wait_until_idle(client)
            ids = [
                client.get(f"/threads/join-{n}/runs").json()[0]["run_id"] for n in range(streams)
            ]
            for number, run in enumerate(ids):
                unread.ask(f"/threads/join-{number}/runs/{run}/stream")
            until = time.monotonic() + 5
        else:
            until = time.monotonic() + (25 if kind in (*STREAMS, "waits") else 0)
            with ThreadPoolExecutor() as threads:
                started = threads.submit(start, kind, client, unread, streams)
                while not started.done():
                    time.sleep(0.05)
                    peak = max(peak, server.memory_info().rss)
                started.result()
            until = max(until, time.monotonic() + 5)
        while time.monotonic() < until:
            time.sleep(0.05)
            peak = max(peak, server.memory_info().rss)
        unread.close()
        wait_until_idle(client)
        time.sleep(5)
        after = server.memory_info().rss
        cpu_s = sum(server.cpu_times()[:2]) - sum(taken_s[:2])
        found = {
            name: round(of / 1e6)
            for name, of in {"idle_mb": idle, "peak_mb": peak, "after_mb": after}.items()
        }
        seconds = {"cpu_s": round(cpu_s, 1), "took_s": round(time.monotonic() - begun)}
    return {"kind": kind, "streams": streams, "build": "old" if view else "new", **found, **seconds}


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--streams", type=int)
    parser.add_argument("--old", metavar="VIEW", help="a PYTHONPATH of another build")
    given = parser.parse_args()
    for kind in given.kinds:
        for view in [given.old, None] if given.old else [None]:
            streams = given.streams or (60 if kind in OUTPUTS else 40)
            print(json.dumps(measure(kind, streams, view)), flush=True)


if __name__ == "__main__":
    main()
