"""Perform the actions of clients and programs in random rounds of faults."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
from benchmarks.random_faults_model import QUESTIONS, Conversation, Input
from benchmarks.random_faults_servers import PATIENCE_S, Servers, talking

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import PerdureError

ACTS = 16
"""How many things a client does to a thread in a round."""
STRATEGIES = {"enqueue": 5, "interrupt": 2, "rollback": 2, "reject": 2}
"""The strategies of runs, and how often each is chosen."""
ACTIONS = ("interrupt", "rollback")
PAUSES_S = (0, 0, 0.02, 0.3, 0.7)
"""How long steps of graphs take: long enough that most kills hit a run, and some no time at all."""


class Client:
    """Runs random actions on one thread, both through the API and as another program.

    Args:
        talk: The thread, and the record of what is done to it.
        servers: The servers.
        saver: The database, as a program opens it.
        rng: Determines the actions.

    Attributes:
        done: The number of actions so far.
    """

    def __init__(
        self, talk: Conversation, servers: Servers, saver: Checkpointer, rng: random.Random
    ) -> None:
        self.talk, self._servers, self._saver, self._rng = talk, servers, saver, rng
        self._path, self._begun = f"/threads/{talk.thread_id}", time.monotonic()
        self._http = servers.http
        self._count = self.done = 0

    def call(
        self, method: str, path: str, body: Any = None, **params: Any
    ) -> httpx.Response | None:
        """Send a request to one of the servers. Return None if no answer came."""
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
        pauses = [self._rng.choice(PAUSES_S) for _ in range(QUESTIONS)]
        return {
            "messages": [message],
            "heard": [sent.token],
            "token": sent.token,
            "pauses_s": pauses,
        }

    def drive(self) -> None:
        """Run random actions, or answer all questions of the graph."""
        is_talk = self.talk.graph == "talk"
        for _ in range(ACTS if is_talk else QUESTIONS):
            if is_talk:
                self.act()
            else:
                self.answer()
            self.done += 1
            time.sleep(self._rng.choice((0, 0, 0.05, 0.3) if is_talk else (0.1, 0.4, 0.8)))

    def act(self) -> None:
        """Run one random action."""
        acts = {
            self.send: 50,
            self.cancel: 9,
            self.erase: 6,
            self.delete: 4,
            self.update: 6,
            self.run_turn: 5,
            self.rewind: 3,
            self.copy: 3,
            self.drop_run: 3,
        }
        [chosen] = self._rng.choices([*acts], [*acts.values()])
        chosen()

    def send(self) -> None:
        """Start a run."""
        sent = self._new_input("run")
        [sent.strategy] = self._rng.choices([*STRATEGIES], [*STRATEGIES.values()])
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
        """Start a run, read part of its stream, and disconnect."""
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
        sent, action = sent or self._choose_run(), action or self._rng.choice(ACTIONS)
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
        """Send requests to delete the thread until a server confirms that it is deleted."""
        with self.talk.lock:
            for _ in range(5):
                reply = self.call("DELETE", self._path)
                self.note("delete", reply)
                if reply is not None and reply.status_code in (204, 404):
                    self.talk.delete()
                    return
            raise TimeoutError(f"thread {self.talk.thread_id} cannot be deleted")

    def drop_run(self) -> None:
        """Delete a successful run but keep its checkpoints."""
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
        """Update the state through the API, which rejects updates while a run is in progress."""
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
        """Run a turn in a program that holds the thread's lock."""
        self._write("turn", lambda sent: asyncio.run(self._ainvoke(sent)))

    def update_as_program(self) -> None:
        """Update the state in a program that holds the thread's lock."""
        graph = self._graph()
        self._write(
            "update",
            lambda sent: graph.update_state(self._config, self._values(sent), as_node="answer"),
        )

    def rewind(self) -> None:
        """Rewind the thread to an earlier checkpoint, in a program that holds the thread's lock."""
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
            if self._saver.head(self.talk.thread_id) is None:  # it would create the thread
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
        """Start the run that asks the questions."""
        sent = self._new_input("run")
        body = {"assistant_id": "ask", "input": self._values(sent), "if_not_exists": "create"}
        reply = self.call("POST", f"{self._path}/runs", body)
        assert reply is not None, "no server is killed yet"
        reply.raise_for_status()

    def answer(self) -> None:
        """Answer the next question with `yes`, and sometimes cancel the run of the answer."""
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
