"""Random rounds of faults: two servers, kills, and all that clients and programs do to threads.

    python -m benchmarks.server_faults --random 100 --seed 1
    python -m benchmarks.server_faults --random 100 --seed 1 --on postgres
    python -m benchmarks.server_faults --random 1 --seed 17     # replay the round with this seed

A round takes some seconds. Two servers share a new database. On each thread a client begins runs
with all strategies, some of them delayed, and cancels, rolls back, erases, deletes, copies and
updates at random. Programs open the same database and run turns, update the state and rewind.
Meanwhile servers are killed (SIGKILL) and started again; between the death of a server and the
takeover programs change threads. On some threads a graph asks questions, and all answers are equal.

At the end `random_faults_model` compares what is there with what was asked:

- `lost`: an accepted input is in no state, and its run has not ended for a documented reason;
- `twice`: an input or an answer was applied more than once;
- `back`: what was deleted, erased, rolled back or refused is in a row, or is streamed by a server.

A seed fixes what is done, and not the times that it takes, so a round may have to be replayed
several times.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import random
import socket
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, TypedDict

import httpx
import psycopg
from benchmarks.random_faults_model import (
    QUESTIONS,
    Checkpoint,
    Conversation,
    Found,
    Input,
    Problem,
    Row,
    check_conversation,
    count_outcomes,
)
from langchain_core.messages import AnyMessage
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import interrupt

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import PerdureError
from perdure.settings import is_dsn

ROUND_S = 3.0
"""How long clients send requests in a round."""
TALKS, ASKS = 5, 2
"""Threads of a round: with the graph `talk`, and with the graph `ask`."""
PATIENCE_S = 60.0
LIVE = ("pending", "running")
STRATEGIES = ("enqueue", "interrupt", "rollback", "reject")
SERVERS = get_context("forkserver")
SERVERS.set_forkserver_preload(["perdure.cli.serve", "perdure.server.app", __name__])


class Talk(TypedDict, total=False):
    """What was heard and said, in order, and how long each step takes."""

    messages: Annotated[list[AnyMessage], add_messages]
    heard: Annotated[list[str], operator.add]
    said: Annotated[list[str], operator.add]
    token: str
    pauses_s: list[float]


async def _pause(state: Talk, number: int) -> None:
    await asyncio.sleep((state.get("pauses_s") or [0.0] * 5)[number])


async def hear(state: Talk) -> dict[str, Any]:
    """Hear what was sent."""
    await _pause(state, 0)
    return {}


async def think(state: Talk) -> dict[str, Any]:
    """Take some time."""
    await _pause(state, 1)
    return {}


async def answer(state: Talk) -> dict[str, Any]:
    """Answer what was heard last."""
    await _pause(state, 2)
    return {"said": [f"to {state['token']}"]}


async def ask(state: Talk) -> dict[str, Any]:
    """Ask several questions, one after the other."""
    answers = []
    for number in range(QUESTIONS):
        answers.append(interrupt(number))
        await _pause(state, number)
    return {"heard": answers}


talking = StateGraph(Talk).add_sequence([hear, think, answer]).add_edge(START, "hear").compile()
asking = StateGraph(Talk).add_sequence([hear, ask, think]).add_edge(START, "hear").compile()


# -- servers


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
    """Two servers on one database, which can be killed.

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
    """Wait until something holds.

    Raises:
        TimeoutError: It does not hold after `PATIENCE_S`.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not truth():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come true")
        time.sleep(pause_s)


# -- what is done


class Client:
    """Does random things to one thread, by the API and as a program.

    Args:
        talk: The thread, and the record of what is done to it.
        servers: The servers.
        saver: The database, as a program opens it.
        rng: Decides what is done.
    """

    def __init__(
        self, talk: Conversation, servers: Servers, saver: Checkpointer, rng: random.Random
    ) -> None:
        self.talk, self._servers, self._saver, self._rng = talk, servers, saver, rng
        self._path, self._begun = f"/threads/{talk.thread_id}", time.monotonic()
        self._http = servers.http
        self._count = 0

    def call(
        self, method: str, path: str, body: Any = None, **params: Any
    ) -> httpx.Response | None:
        """Send a request to one of the servers; None means that the answer did not come."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            url = self._rng.choice([*filter(None, self._servers.urls)] or [None])
            if url is None:
                time.sleep(0.02)
                continue
            try:
                return self._http.request(method, f"{url}{path}", json=body, params=params)
            except httpx.ConnectError:
                time.sleep(0.01)
            except httpx.TransportError:
                return None
        raise TimeoutError("no server answers")

    def note(self, text: str, reply: httpx.Response | None = None) -> None:
        """Write a line of the journal."""
        status = "" if reply is None else f" {reply.status_code}"
        if reply is not None and reply.status_code >= 400:
            status += f" {reply.text[:160]}"
        self.talk.journal.append(f"{time.monotonic() - self._begun:6.3f} {text}{status}")

    def _new_input(self, how: Any) -> Input:
        self._count += 1
        token = f"{self.talk.thread_id}{how[0]}{self._count}"
        secret = f"the safe {token} opens at {self._rng.getrandbits(64):016x}"
        return Input(token, secret, how, time.monotonic())

    def _values(self, sent: Input) -> dict[str, Any]:
        message = {"type": "human", "content": sent.secret, "id": f"id-{sent.token}"}
        pauses = [self._rng.choice((0, 0, 0.02, 0.2, 0.5)) for _ in range(QUESTIONS)]
        return {
            "messages": [message],
            "heard": [sent.token],
            "token": sent.token,
            "pauses_s": pauses,
        }

    def drive(self, until: float) -> None:
        """Do random things until a time, or until all questions are answered."""
        pauses_s = (0, 0, 0.05, 0.3) if self.talk.graph == "talk" else (0.1, 0.4, 0.8)
        while time.monotonic() < until and len(self.talk.answers) < QUESTIONS:
            if self.talk.graph == "talk":
                self.act()
            else:
                self.answer()
            time.sleep(self._rng.choice(pauses_s))

    def act(self) -> None:
        """Do one random thing."""
        acts = {
            self.send: 50,
            self.cancel: 14,
            self.erase: 8,
            self.delete: 5,
            self.update: 6,
            self.run_turn: 5,
            self.rewind: 3,
            self.copy: 3,
            self.drop_run: 3,
        }
        [chosen] = self._rng.choices([*acts], [*acts.values()])
        chosen()

    def send(self) -> None:
        """Begin a run."""
        sent = self._new_input("run")
        sent.strategy = self._rng.choice(STRATEGIES)
        sent.is_delayed = sent.strategy != "reject" and self._rng.random() < 0.15
        body: dict[str, Any] = {
            "assistant_id": self.talk.graph,
            "input": self._values(sent),
            "if_not_exists": "create",
            "multitask_strategy": sent.strategy,
            "metadata": {"token": sent.token},
            "stream_mode": ["values", "updates"],
        }
        if sent.is_delayed:
            body["after_seconds"] = self._rng.uniform(0.1, 1.5)
        self.talk.inputs.append(sent)
        if not sent.is_delayed and self._rng.random() < 0.3:
            self._begin_stream(sent, body)
            return
        reply = self.call("POST", f"{self._path}/runs", body)
        self._note_accepted(sent, reply)
        self.note(f"run {sent.token} {sent.strategy} delayed={sent.is_delayed}", reply)

    def _note_accepted(self, sent: Input, reply: httpx.Response | None) -> None:
        sent.answered = time.monotonic()
        if reply is None or reply.status_code >= 500:
            return
        sent.is_accepted = reply.is_success
        if reply.is_success:
            sent.run_id = reply.headers["content-location"].rpartition("/")[2]

    def _begin_stream(self, sent: Input, body: dict[str, Any]) -> None:
        """Begin a run, read a part of its stream, and leave it."""
        url = next(filter(None, self._servers.urls), None)
        until = time.monotonic() + self._rng.uniform(0, 0.4)
        try:
            path = f"{url or 'http://127.0.0.1:9'}{self._path}/runs/stream"
            with self._http.stream("POST", path, json=body) as reply:
                if reply.is_error:
                    reply.read()
                self._note_accepted(sent, reply)
                self.note(f"stream {sent.token} {sent.strategy}", reply)
                for _ in reply.iter_raw() if reply.is_success else ():
                    if time.monotonic() > until:
                        break
        except httpx.ConnectError:
            sent.is_accepted = False
        except httpx.TransportError:
            self.note(f"stream {sent.token}: the server died")
        sent.answered = min(sent.answered, time.monotonic())

    def _choose_run(self) -> Input | None:
        runs = [sent for sent in self.talk.inputs if sent.run_id]
        return self._rng.choice(runs[-3:]) if runs else None

    def cancel(self, sent: Input | None = None, action: str | None = None) -> None:
        """Cancel one of the last runs."""
        sent, action = sent or self._choose_run(), action or self._rng.choice(STRATEGIES[1:3])
        if sent is None:
            return
        waits = self._rng.random() < 0.3
        path, at = f"{self._path}/runs/{sent.run_id}/cancel", len(sent.cancels)
        sent.cancels.append((action, None))
        reply = self.call("POST", path, action=action, wait=waits)
        if reply is not None and reply.status_code < 500:
            sent.cancels[at] = action, reply.is_success
        self.note(f"cancel {sent.token} {action} wait={waits}", reply)

    def erase(self) -> None:
        """Erase a message that is in the newest state."""
        with self.talk.lock:
            head = self._saver.get_tuple({"configurable": {"thread_id": self.talk.thread_id}})
            messages = head.checkpoint["channel_values"].get("messages", []) if head else []
            ids = {message.id for message in messages}
            stored = [sent for sent in self.talk.inputs if f"id-{sent.token}" in ids]
            if not stored:
                return
            sent = self._rng.choice(stored)
            report = self._saver.erase(self.talk.thread_id, [f"id-{sent.token}"])
            sent.is_erased = True
            self.note(f"erase {sent.token}: {report.checkpoints} checkpoints")

    def delete(self) -> None:
        """Delete the thread, until a server says that it is gone."""
        with self.talk.lock:
            for _ in range(5):
                reply = self.call("DELETE", self._path)
                self.note("delete", reply)
                if reply is not None and reply.status_code in (204, 404):
                    self.talk.delete()
                    return
            raise TimeoutError(f"thread {self.talk.thread_id} cannot be deleted")

    def drop_run(self) -> None:
        """Delete a run that has succeeded; what it stored stays."""
        sent = self._choose_run()
        if sent is None:
            return
        path = f"{self._path}/runs/{sent.run_id}"
        run = self.call("GET", path)
        if run is None or run.is_error or run.json()["status"] != "success":
            return
        reply = self.call("DELETE", path)
        sent.is_dropped = reply is None or reply.is_success
        self.note(f"drop {sent.token}", reply)

    def copy(self) -> None:
        """Copy the thread."""
        reply = self.call("POST", f"{self._path}/copy")
        self.note("copy", reply)
        if reply is None or reply.is_success:
            for sent in self.talk.inputs:
                sent.is_copied = True
        if reply is not None and reply.is_success:
            copy = reply.json()["thread_id"]
            self.talk.copies[copy] = stored_ids(self._saver, copy)

    # -- as a program

    def update(self) -> None:
        """Update the state by the API, which refuses it while a run is live."""
        sent = self._new_input("update")
        with self.talk.lock:
            self.talk.inputs.append(sent)
            body = {"values": self._values(sent), "as_node": "answer"}
            reply = self.call("POST", f"{self._path}/state", body)
            sent.answered = time.monotonic()
            if reply is not None and reply.status_code < 500:
                sent.is_accepted = reply.is_success
            self.note(f"update {sent.token}", reply)

    def run_turn(self) -> None:
        """Run a turn as a program that takes the lock of the thread."""
        self._write("turn", lambda sent: asyncio.run(self._ainvoke(sent)))

    def update_as_program(self) -> None:
        """Update the state as a program that takes the lock of the thread."""
        graph = self._graph()
        self._write(
            "update",
            lambda sent: graph.update_state(self._config, self._values(sent), as_node="answer"),
        )

    def rewind(self) -> None:
        """Go back to an earlier checkpoint of the thread, as a program that takes its lock."""
        began = time.monotonic()
        with self.talk.lock, suppress(PerdureError), self._locked():
            found = self._saver.checkpoints(self.talk.thread_id)
            if found:
                checkpoint = self._rng.choice(found[:12])
                self._saver.rewind(self.talk.thread_id, checkpoint.checkpoint_id)
                self.talk.rewinds.append((began, time.monotonic()))
                self.talk.writes.append((began, time.monotonic()))
                self.note(f"rewind to {checkpoint.checkpoint_id}")

    def _write(self, how: str, write: Callable[[Input], Any]) -> None:
        sent = self._new_input(how)
        with self.talk.lock, suppress(PerdureError), self._locked():
            if self._saver.head(self.talk.thread_id) is None:  # a new thread would be its own
                return
            self.talk.inputs.append(sent)
            self.note(f"program {how} {sent.token}")
            write(sent)
            sent.is_accepted, sent.answered = True, time.monotonic()
            self.talk.writes.append((sent.began, sent.answered))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._saver.lock(self.talk.thread_id, timeout_s=0):
            yield

    @property
    def _config(self) -> Any:
        return {"configurable": {"thread_id": self.talk.thread_id}}

    def _graph(self) -> Any:
        made = talking.copy()
        made.checkpointer = self._saver
        return made

    async def _ainvoke(self, sent: Input) -> None:
        values = {**self._values(sent), "pauses_s": [0.0, 0.02, 0.0, 0.0, 0.0]}
        await self._graph().ainvoke(values, self._config)

    # -- questions

    def begin_asking(self) -> None:
        """Begin the run that asks the questions."""
        sent = self._new_input("run")
        body = {"assistant_id": "ask", "input": self._values(sent), "if_not_exists": "create"}
        reply = self.call("POST", f"{self._path}/runs", body)
        assert reply is not None, "no server is killed yet"
        reply.raise_for_status()

    def answer(self) -> None:
        """Answer the next question, and perhaps cancel that; all answers are equal."""
        self._count += 1
        sent = Input(f"{self.talk.thread_id}a{self._count}", "", "run", time.monotonic())
        self.talk.answers.append(sent)
        body = {
            "assistant_id": "ask",
            "command": {"resume": "yes"},
            "metadata": {"token": sent.token},
        }
        reply = self.call("POST", f"{self._path}/runs", body)
        self._note_accepted(sent, reply)
        self.note(f"answer {sent.token}", reply)
        if sent.run_id and self._rng.random() < 0.2:
            time.sleep(self._rng.uniform(0, 0.1))
            self.cancel(sent)


def stored_ids(saver: Checkpointer, thread_id: str) -> set[str]:
    """Return the ids of all checkpoints of a thread."""
    stored = saver.list({"configurable": {"thread_id": thread_id}})
    return {each.checkpoint["id"] for each in stored}


# -- a round


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
    """Do random things to new threads for some seconds, and return what is wrong then.

    Args:
        db: A new database.
        folder: Where the servers have their files.
        seed: Decides what is done.
        conversations: The threads, which keep what was done.
        outcomes: Counts what happened.
    """
    rng = random.Random(seed)
    names = {"talk": "talking", "ask": "asking"}
    paths = {name: f"{__file__}:{variable}" for name, variable in names.items()}
    (folder / "langgraph.json").write_text(json.dumps({"graphs": paths}))
    with ExitStack() as stack:
        servers = Servers(db, folder)
        stack.callback(servers.stop)
        saver = stack.enter_context(open_checkpointer(db))
        saver.stats()  # its tables are there before two servers look for them
        pool = stack.enter_context(ThreadPoolExecutor(32))
        [*pool.map(servers.start, (0, 1))]
        clients = [
            Client(talk, servers, saver, random.Random(rng.getrandbits(64)))
            for talk in conversations
        ]
        for client in clients:
            if client.talk.graph == "ask":
                client.begin_asking()
        until = time.monotonic() + ROUND_S
        driven = [pool.submit(client.drive, until) for client in clients]
        harm(servers, [each for each in clients if each.talk.graph == "talk"], rng, pool)
        for each in driven:
            each.result()
        problems = [*settled(servers, conversations)]
        if problems:
            return problems
        look = partial(find, servers=servers, saver=saver, stored=read_rows(db))
        for talk, found in zip(conversations, pool.map(look, conversations), strict=True):
            problems += check_conversation(talk, found)
            outcomes += count_outcomes(talk, found)
            changed = [copy for copy, ids in talk.copies.items() if ids != stored_ids(saver, copy)]
            problems += [Problem("lost", copy, "the copy has changed") for copy in changed]
        return problems


def harm(
    servers: Servers, clients: list[Client], rng: random.Random, pool: ThreadPoolExecutor
) -> None:
    """Kill servers at random moments, let programs write then, and start the servers again."""
    for _ in range(rng.choice((1, 1, 2))):
        time.sleep(rng.uniform(0.2, 1.2))
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
        down_s = rng.choice((0, 0.3, 1.0))
        for client in clients:
            client.note(f"kill {killed}")
        for number in killed:
            servers.kill(number)
        written = [pool.submit(write) for write in writers]
        time.sleep(down_s)
        [*pool.map(servers.start, killed)]
        for each in written:
            each.result()


def settled(servers: Servers, talks: Sequence[Conversation]) -> Iterator[Problem]:
    """Wait until all runs have ended, and yield a problem for each thread where one does not."""
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
    """Return the runs of a thread as the API lists them, newest first."""
    url = f"{servers.urls[0]}/threads/{talk.thread_id}/runs"
    reply = servers.http.get(url, params={"limit": 1000})
    return reply.json() if reply.is_success else []


def find(talk: Conversation, servers: Servers, saver: Checkpointer, stored: bytes) -> Found:
    """Read what became of a thread, from the API of both servers and from the database."""
    http, rows = servers.http, []
    urls = [f"{url}/threads/{talk.thread_id}" for url in servers.urls]
    for run in list_runs(servers, talk):
        joined = http.get(f"{urls[0]}/runs/{run['run_id']}/join").json()
        error = joined.get("__error__", {}).get("error") if isinstance(joined, dict) else None
        token = run["metadata"].get("token", "")
        rows.append(Row(run["run_id"], token, run["status"], error))
    streamed = [http.get(f"{url}/state").text for url in urls]
    streamed += [read_stream(http, f"{url}/stream") for url in urls]
    ids = {sent.run_id for sent in (*talk.inputs, *talk.deleted) if sent.run_id}
    for url in urls:
        for run_id in ids | {row.run_id for row in rows}:
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
    """Return all events of a thread. The stream does not end, so a pause ends the reading."""
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
    """Run rounds with consecutive seeds, print what is wrong, and return whether nothing is."""
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
            sys.stdout.flush()
            failed += [number] if problems else []
    report = {"on": place, "rounds": rounds, **counts, "failed": failed, **outcomes}
    print(json.dumps({**report, "s": round(time.monotonic() - began)}), flush=True)
    return not failed
