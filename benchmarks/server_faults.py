"""Check that runs of `perdure serve` survive faults: each run exists, once, with a true status.

    python -m benchmarks.server_faults                          # all faults, on a file
    python -m benchmarks.server_faults --on postgres --rounds 10
    python -m benchmarks.server_faults kill sessions --on postgres --threads 5
    python -m benchmarks.server_faults --random 100 --seed 1    # see random_faults

On each thread a run is under way and another is enqueued when the fault comes, and the time of a
cron comes on some threads of their own. All runs have a webhook, which is told of their ends:

- `kill`: the server is killed (SIGKILL) and started again; `kill-other`: another one is there;
- `stop`, `stop-other`: the same by SIGTERM, after which runs have 0.3 seconds;
- `sessions`: 40 % of the sessions of the database are terminated, with two servers;
- `postmaster`: Postgres is killed and started again; its server has a folder of its own.

`takeover_ms` is the time until no live run belongs to a dead process. It is measured from the
restart of the server or of Postgres, or from the fault if another server is running. `crons` counts
the crons that did not run exactly once when they were due; `untold` counts runs whose webhook was
not called with their final status, and calls with another status.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import operator
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, TypedDict

import httpx
import psycopg
from langgraph.config import get_stream_writer
from langgraph.graph import START, StateGraph
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from perdure.checkpointers import open_checkpointer
from perdure.run_tables.crons import CronTable
from perdure.run_tables.runs import RunTable

PATIENCE_S = 120.0
SHARE = 4  # one cron to so many threads
FAULTS = ("kill", "kill-other", "stop", "stop-other", "sessions", "postmaster")


class State(TypedDict, total=False):
    """The graph's state: the inputs and the answers, in order."""

    heard: Annotated[list[str], operator.add]
    said: Annotated[list[str], operator.add]
    pause_s: float
    counts_to: int


async def think(state: State) -> dict[str, Any]:
    """Stream the requested count of numbers, if any, and then pause."""
    for number in range(state.get("counts_to", 0)):
        get_stream_writer()(number)
        await asyncio.sleep(0.05)
    await asyncio.sleep(state.get("pause_s") or random.uniform(0.05, 0.4))
    return {}


async def answer(state: State) -> dict[str, Any]:
    """Answer the latest input."""
    await asyncio.sleep(random.uniform(0, 0.2))
    return {"said": [f"to {state['heard'][-1]}"]}


graph = (
    StateGraph(State)
    .add_node(think)
    .add_node(answer)
    .add_edge(START, "think")
    .add_edge("think", "answer")
    .compile()
)


def until(truth: Callable[[], Any], pause_s: float = 0.01) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not truth():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come true")
        time.sleep(pause_s)


class Listener(ThreadingHTTPServer):
    """Receives webhook calls about the ends of runs, and records the run id and status of each."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        told: list[tuple[str, str]] = []
        self.told = told

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                run = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                told.append((run["run_id"], run["status"]))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def listening() -> Iterator[Listener]:
    """Run a server that receives webhook calls about the ends of runs."""
    with Listener() as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield listener
        finally:
            listener.shutdown()
            thread.join()


@contextmanager
def served(
    db: str, folder: Path, grace_s: float = 0.3, webhook_host: str = "http://127.0.0.1"
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start `perdure serve` in a process of its own, and return it with its address."""
    file = folder / "langgraph.json"
    file.write_text(json.dumps({"graphs": {"slow": f"{__file__}:graph"}}))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    options = ["--port", str(port), "--db", db, "--graphs", str(file), "--grace", str(grace_s)]
    options += ["--webhook-host", webhook_host]
    env = {**os.environ, "PERDURE_WEBHOOK_SECRET": "a long random text"}
    command = [sys.executable, "-c", "from perdure.cli import main; main()", "serve", *options]
    with (folder / f"{port}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (folder / f"{port}.log").read_text()
        try:
            return httpx.get(f"{url}/ok").is_success
        except httpx.TransportError:
            return False

    try:
        until(answers)
        yield process, url
    finally:
        process.kill()
        process.wait()


def ask(url: str, threads: int, webhook: str | None = None) -> dict[str, list[str]]:
    """Start two runs on each thread, the second of which waits for the first; return their ids."""
    made: dict[str, list[str]] = {}
    with httpx.Client(base_url=url, timeout=60) as client:
        for text in ("one", "two"):
            for number in range(threads):
                body = {
                    "assistant_id": "slow",
                    "input": {"heard": [text]},
                    "if_not_exists": "create",
                    "webhook": webhook,
                }
                reply = client.post(f"/threads/t{number}/runs", json=body)
                assert reply.status_code == 200, reply.text
                made.setdefault(f"t{number}", []).append(reply.json()["run_id"])
    return made


def schedule(url: str, crons: int, webhook: str) -> list[str]:
    """Create a cron on each of several threads, and return the threads; see `come`."""
    threads = [f"c{number}" for number in range(crons)]
    with httpx.Client(base_url=url, timeout=60) as client:
        for thread in threads:
            body = {
                "assistant_id": "slow",
                "input": {"heard": ["cron"]},
                "schedule": "@yearly",
                "webhook": webhook,
            }
            client.post("/threads", json={"thread_id": thread}).raise_for_status()
            client.post(f"/threads/{thread}/runs/crons", json=body).raise_for_status()
    return threads


def come(db: str) -> None:
    """Set the next run time of each cron to within half a second."""

    async def advance() -> None:
        async with open_checkpointer(db) as saver:
            table = CronTable(saver)
            for cron in await table.list_crons():
                await table.advance_next_time(cron, time.time() + random.uniform(-0.2, 0.3))

    asyncio.run(advance())


def ends(client: httpx.Client, thread: str, count: int) -> dict[str, str]:
    """Wait until all runs of a thread have ended, and return how they ended."""
    known: dict[str, str] = {}

    def ended() -> bool:
        reply = client.get(f"/threads/{thread}/runs")
        if reply.is_success:
            known.clear()
            known.update((run["run_id"], run["status"]) for run in reply.json())
        return len(known) >= count and not {"pending", "running"} & {*known.values()}

    until(ended, 0.05)
    return known


def checked(url: str, made: dict[str, list[str]]) -> dict[str, int]:
    """Wait until all runs have ended, and count the errors."""
    wrong = {"lost": 0, "twice": 0, "order": 0, "status": 0}
    with httpx.Client(base_url=url, timeout=60) as client:
        for thread, ids in made.items():
            known = ends(client, thread, 0)
            values = client.get(f"/threads/{thread}/state").json()["values"]
            heard, said = values.get("heard", []), values.get("said", [])
            wrong["lost"] += sum(run_id not in known for run_id in ids)
            wrong["lost"] += len({"one", "two"} - {*heard}) + len({"to one", "to two"} - {*said})
            wrong["twice"] += len(heard) - len({*heard}) + len(said) - len({*said})
            wrong["order"] += heard != sorted(heard) or said != sorted(said)
            wrong["status"] += sum(known.get(run_id) != "success" for run_id in ids)
            wrong["status"] += client.get(f"/threads/{thread}").json()["status"] != "idle"
    return wrong


def checked_later(
    url: str, made: dict[str, list[str]], threads: list[str], listener: Listener
) -> dict[str, int]:
    """Wait for the crons' runs and for the webhook calls, and count the errors."""
    ids, crons = [run_id for run_ids in made.values() for run_id in run_ids], 0
    with httpx.Client(base_url=url, timeout=60) as client:
        for thread in threads:
            known = ends(client, thread, 1)
            ids += known
            values = client.get(f"/threads/{thread}/state").json()["values"]
            crons += values != {"heard": ["cron"], "said": ["to cron"]} or len(known) != 1
            crons += [*known.values()] != ["success"]

    def untold() -> set[tuple[str, str]]:
        return {(run_id, "success") for run_id in ids} ^ {*listener.told}

    with suppress(TimeoutError):
        until(lambda: not untold(), 0.05)
    return {"crons": crons, "untold": len(untold())}


def owners(db: str) -> set[str]:
    """Return the processes that execute the current runs."""

    async def read() -> set[str]:
        async with open_checkpointer(db) as saver:
            return {run.owner for run in await RunTable(saver).list_live_runs()}

    return asyncio.run(read())


def taken_over_ms(db: str, gone: set[str], since: float) -> float:
    """Wait until no live run belongs to a dead process; return the milliseconds since `since`."""
    until(lambda: not owners(db) & gone, 0.005)
    return (time.monotonic() - since) * 1e3


def survive(fault: str, db: str, folder: Path, threads: int, kill: Any = None) -> dict[str, Any]:
    """Inject a fault, and count the errors after it; `kill` kills and restarts the database."""
    with ExitStack() as stack:
        listener = stack.enter_context(listening())
        serving = partial(served, db, folder, webhook_host=listener.url)
        process, url = stack.enter_context(serving())
        others = fault.endswith("other") or fault == "sessions"
        if others:
            _, other = stack.enter_context(serving())
        later = schedule(url, max(1, threads // SHARE), listener.url)
        made = ask(url, threads, listener.url)
        gone = owners(db)
        come(db)
        time.sleep(random.uniform(0, 0.3))
        begun = time.monotonic()
        match fault.split("-")[0]:
            case "kill" | "stop":
                process.send_signal(signal.SIGKILL if "kill" in fault else signal.SIGTERM)
                process.wait(30)
                begun = time.monotonic()
                if not others:
                    _, other = stack.enter_context(serving())
                    begun = time.monotonic()
            case "sessions":
                terminate(db, 0.4)
                gone = set()
            case "postmaster":
                kill()
                begun = time.monotonic()
                # The server counted as dead itself, and now has a new owner name.
                other = url
        took = taken_over_ms(db, gone, begun)
        wrong = checked(other, made) | checked_later(other, made, later, listener)
        return {"takeover_ms": round(took), **wrong}


def terminate(db: str, share: float) -> None:
    """Terminate some of the sessions of a database."""
    with psycopg.connect(db, autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() AND random() < %s",
            (share,),
        )


def database_uri(dsn: str, name: str) -> str:
    """Return the URI of a database on a server."""
    made = conninfo_to_dict(make_conninfo(dsn, dbname=name))
    return f"postgresql:///?{httpx.QueryParams({n: str(v) for n, v in made.items()})}"


@contextmanager
def database(dsn: str) -> Iterator[str]:
    """Create a database on a server, and yield its URI."""
    name = f"faults_{uuid.uuid4().hex}"
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
    try:
        yield database_uri(dsn, name)
    finally:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def measured(fault: str, place: str, threads: int) -> dict[str, Any]:
    """Run one round of a fault, on a file or on Postgres."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name, ExitStack() as stack:
        folder = Path(name)
        if place == "file":
            return survive(fault, str(folder / "m.db"), folder, threads)
        from benchmarks.postgres_faults import cluster

        of = stack.enter_context(cluster())

        def again() -> None:
            of.kill()
            of.start()

        db = stack.enter_context(database(of.dsn))
        return survive(fault, db, folder, threads, again)


def main() -> None:
    """Inject the faults given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("faults", nargs="*", choices=[*FAULTS, []], default=[])
    parser.add_argument("--on", choices=("file", "postgres"), default="file")
    parser.add_argument("--threads", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--random", type=int, metavar="ROUNDS", help="rounds of random faults")
    parser.add_argument("--seed", type=int, default=1, help="of the first random round")
    given = parser.parse_args()
    if given.random:
        from benchmarks.random_faults import run_rounds

        sys.exit(not run_rounds(given.on, given.random, given.seed))
    for fault in given.faults or FAULTS[: 4 if given.on == "file" else 6]:
        rounds = [measured(fault, given.on, given.threads) for _ in range(given.rounds)]
        took = [each.pop("takeover_ms") for each in rounds]
        wrong = {name: sum(each[name] for each in rounds) for name in rounds[0]}
        made = {"fault": fault, "on": given.on, "rounds": given.rounds, "runs": 2 * given.threads}
        times = {"takeover_ms": round(statistics.median(took)), "most": max(took)}
        print(json.dumps({**made, **wrong, **times}), flush=True)


if __name__ == "__main__":
    main()
