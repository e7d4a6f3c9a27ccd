"""Run random rounds of faults: two servers are killed while clients and programs change threads.

    python -m benchmarks.server_faults --random 100 --seed 1
    python -m benchmarks.server_faults --random 100 --seed 1 --on postgres
    python -m benchmarks.server_faults --random 1 --seed 17     # replay the round with this seed

A round takes some seconds. Two servers share a new database. On each thread, a client starts runs
with all multitask strategies, some of them delayed, and cancels, rolls back, erases, deletes,
copies and updates at random. Other programs open the same database, run turns, update the state and
rewind threads. Meanwhile, servers are killed (SIGKILL) and restarted; after a server has died and
before another server takes over its runs, programs change threads. On some threads, a graph asks
questions by interrupts, and all answers are identical.

At the end `random_faults_model` compares the database with the requests, and counts problems:

- `lost`: an accepted input is in no state, and its run has not ended for a documented reason;
- `twice`: an input or an answer was applied more than once;
- `back`: what was deleted, erased, rolled back or refused is in a row, or is streamed by a server.

A seed determines the actions but not their timing, so a round may have to be replayed several times
before it fails again.
"""

from __future__ import annotations

import json
import random
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psycopg
from benchmarks import random_faults_servers
from benchmarks.random_faults_client import ACTS, Client, stored_ids
from benchmarks.random_faults_model import (
    Checkpoint,
    Conversation,
    Found,
    Problem,
    Row,
    check_conversation,
    count_outcomes,
)
from benchmarks.random_faults_servers import PATIENCE_S, Servers, wait_for

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.settings import is_dsn

TALKS, ASKS = 6, 2
"""Threads of a round: with the graph `talk`, and with the graph `ask`."""
LIVE = ("pending", "running")


def make_conversations() -> list[Conversation]:
    """Return the threads of a round."""
    talks = [Conversation(f"t{number}") for number in range(TALKS)]
    return [*talks, *(Conversation(f"q{number}", "ask") for number in range(ASKS))]


def run_round(
    db: str,
    folder: Path,
    seed: int,
    conversations: Sequence[Conversation],
    outcomes: Counter[str],
) -> list[Problem]:
    """Run random actions on new threads for several seconds, and return the problems.

    Args:
        db: A new database.
        folder: The folder for files of the servers.
        seed: Determines the actions.
        conversations: The threads, which record the actions.
        outcomes: Is increased by the counts of what happened.
    """
    rng = random.Random(seed)
    names = {"talk": "talking", "ask": "asking"}
    paths = {
        name: f"{random_faults_servers.__file__}:{variable}" for name, variable in names.items()
    }
    (folder / "langgraph.json").write_text(json.dumps({"graphs": paths}))
    with ExitStack() as stack:
        servers = Servers(db, folder)
        stack.callback(servers.stop)
        saver = stack.enter_context(open_checkpointer(db))
        # Create the tables before two servers start.
        saver.stats()
        pool = stack.enter_context(ThreadPoolExecutor(32))
        [*pool.map(servers.start, (0, 1))]
        clients = [
            Client(talk, servers, saver, random.Random(rng.getrandbits(64)))
            for talk in conversations
        ]
        for client in clients:
            if client.talk.graph == "ask":
                client.begin_asking()
        driven = [pool.submit(client.drive) for client in clients]
        kill_servers(servers, [each for each in clients if each.talk.graph == "talk"], rng, pool)
        for each in driven:
            each.result()
        problems = [*wait_for_runs(servers, conversations)]
        if problems:
            return problems
        look = partial(read_outcome, servers=servers, saver=saver, stored=read_rows(db))
        for talk, found in zip(conversations, pool.map(look, conversations), strict=True):
            problems += check_conversation(talk, found)
            outcomes += count_outcomes(talk, found)
            changed = [copy for copy, ids in talk.copies.items() if ids != stored_ids(saver, copy)]
            problems += [Problem("lost", copy, "the copy has changed") for copy in changed]
        return problems


def kill_servers(
    servers: Servers, clients: list[Client], rng: random.Random, pool: ThreadPoolExecutor
) -> None:
    """Kill servers at random moments, let programs write then, and start the servers again."""
    kills = rng.choice((2, 3))
    for number in range(kills):
        share = (number + rng.random()) / kills * ACTS * len(clients)
        wait_for(lambda share=share: sum(each.done for each in clients) >= share)  # type: ignore[misc]
        time.sleep(rng.uniform(0, 0.3))
        killed = rng.choice(((0,), (1,), (0, 1)))
        writers = [
            partial(
                rng.choice(
                    (Client.update, Client.update_as_program, Client.run_turn, Client.rewind)
                ),
                client,
            )
            for client in rng.sample(clients, rng.choice((0, 1, 2)))
        ]
        down_s = rng.choice((0, 0, 0.4))
        for client in clients:
            client.note(f"kill {killed}")
        for number in killed:
            servers.kill(number)
        written = [pool.submit(write) for write in writers]
        time.sleep(down_s)
        [*pool.map(servers.start, killed)]
        for each in written:
            each.result()


def wait_for_runs(servers: Servers, talks: Sequence[Conversation]) -> Iterator[Problem]:
    """Wait until all runs have ended, and yield a problem for each thread whose runs do not end."""
    for talk in talks:
        live: list[Any] = []

        def is_idle(talk: Conversation = talk, live: list[Any] = live) -> bool:
            live[:] = [run for run in list_runs(servers, talk) if run["status"] in LIVE]
            return not live

        try:
            wait_for(is_idle)
        except TimeoutError:
            yield Problem("lost", talk.thread_id, f"runs do not end: {live}")


def list_runs(servers: Servers, talk: Conversation) -> list[dict[str, Any]]:
    """Return a thread's runs as the API lists them, newest first."""
    url = f"{servers.urls[0]}/threads/{talk.thread_id}/runs"
    reply = servers.http.get(url, params={"limit": 1000})
    return reply.json() if reply.is_success else []


def read_outcome(talk: Conversation, servers: Servers, saver: Checkpointer, stored: bytes) -> Found:
    """Read a thread's final data from the API of both servers and from the database."""
    http, rows = servers.http, []
    urls = [f"{url}/threads/{talk.thread_id}" for url in servers.urls]
    for run in list_runs(servers, talk):
        has_error = run["status"] in ("error", "interrupted")
        joined = http.get(f"{urls[0]}/runs/{run['run_id']}/join").json() if has_error else None
        error = joined.get("__error__", {}).get("error") if isinstance(joined, dict) else None
        token = run["metadata"].get("token", "")
        rows.append(Row(run["run_id"], token, run["status"], error))
    streamed = [http.get(f"{url}/state").text for url in urls]
    streamed += [read_stream(http, f"{url}/stream") for url in urls]
    listed = {row.run_id for row in rows}
    sent_ids = {sent.run_id for sent in (*talk.inputs, *talk.deleted) if sent.run_id}
    is_erased = any(sent.is_erased for sent in talk.inputs)
    for url in urls:
        for run_id in sent_ids - listed | (listed if is_erased else set()):
            streamed += [http.get(f"{url}/runs/{run_id}/{way}").text for way in ("stream", "join")]
    reply = http.get(f"{urls[0]}/state")
    state = reply.json() if reply.is_success else {}
    values = state.get("values") or {}
    questions = [each["value"] for each in state.get("interrupts") or ()]
    checkpoints = [
        Checkpoint(
            each.metadata.get("run_id"),
            each.metadata.get("source") == "input",
            each.checkpoint["channel_values"].get("heard", []),
            repr(each),
        )
        for each in saver.list({"configurable": {"thread_id": talk.thread_id}})
    ]
    heard, said = values.get("heard", []), values.get("said", [])
    question = questions[0] if questions else None
    return Found(rows, heard, said, question, checkpoints, streamed, stored, servers.kills)


def read_stream(http: httpx.Client, url: str) -> str:
    """Return all events of a thread. The stream never ends, so reading stops at a pause."""
    text = list[str]()
    timeout = httpx.Timeout(PATIENCE_S, read=1)
    with (
        suppress(httpx.ReadTimeout),
        http.stream("GET", url, headers={"last-event-id": "0"}, timeout=timeout) as reply,
    ):
        for part in reply.iter_text():
            text.append(part)
    return "".join(text)


def read_rows(db: str) -> bytes:
    """Return the content of all tables of a database."""
    if not is_dsn(db):
        with closing(sqlite3.connect(db)) as conn:
            tables = conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            return _join(conn.execute(f'SELECT * FROM "{name}"') for (name,) in tables.fetchall())
    with psycopg.connect(db) as pg:
        listed = pg.execute(
            "SELECT quote_ident(schemaname) || '.' || quote_ident(tablename) FROM pg_tables "
            "WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
        ).fetchall()
        return _join(pg.execute(f"SELECT * FROM {name}") for (name,) in listed)


def _join(tables: Iterable[Any]) -> bytes:
    parts = (value for rows in tables for row in rows for value in row)
    return b"\n".join(value if isinstance(value, bytes) else str(value).encode() for value in parts)


def run_rounds(place: str, rounds: int, seed: int) -> bool:
    """Run rounds with consecutive seeds and print the problems. Return whether there were none."""
    counts, failed, began = dict.fromkeys(("lost", "twice", "back"), 0), [], time.monotonic()
    outcomes = Counter[str]()
    with ExitStack() as stack:
        cluster_dsn = None
        if place == "postgres":
            from benchmarks.postgres_faults import cluster

            cluster_dsn = stack.enter_context(cluster()).dsn
        for number in range(seed, seed + rounds):
            with ExitStack() as one:
                folder = Path(one.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
                db = str(folder / "m.db")
                if cluster_dsn:
                    from benchmarks.server_faults import database

                    db = one.enter_context(database(cluster_dsn))
                talks = make_conversations()
                try:
                    problems = run_round(db, folder, number, talks, outcomes)
                except Exception:  # such as a server that does not start
                    traceback.print_exc(file=sys.stdout)
                    problems = [Problem("lost", "", "the round did not come to its end")]
            for problem in problems:
                counts[problem.kind] += 1
                print(f"seed {number}: {problem.kind}: {problem.thread_id}: {problem.text}")
            for talk in talks:
                if talk.thread_id in {problem.thread_id for problem in problems}:
                    print(f"seed {number}: {talk.thread_id}:", *talk.journal, sep="\n    ")
            failed += [number] if problems else []
            progress = f"{number - seed + 1} of {rounds} rounds, {len(failed)} failed"
            print(progress, file=sys.stderr, flush=True)
            sys.stdout.flush()
    report = {"on": place, "rounds": rounds, **counts, "failed": failed, **outcomes}
    print(json.dumps({**report, "s": round(time.monotonic() - began)}), flush=True)
    return not failed
