"""Dispatching: now and then, what is due is put into the queue, and what dead workers had again.

The notes on waiting threads say what is to be done; the queue only says who does it when. So a
queue that was lost, a worker that was killed and a clock that jumped all mend themselves here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from math import inf
from typing import Final

from perdure.errors import PerdureError
from perdure.memory.background.attempting import logger, tell
from perdure.memory.background.jobs import (
    LOST,
    Attempt,
    Job,
    Pace,
    Standing,
    State,
    by_key,
    done_job,
    job_of,
    key_of,
    newest,
    stamp_of,
    standing,
)
from perdure.memory.background.ledger import Ledger
from perdure.memory.background.presence import Presence
from perdure.memory.extraction import Extraction
from perdure.memory.forming.waiting import Waiting
from perdure.memory.store_adapter import namespace_of

_AHEAD: Final = 100
"""Attempts in the queue at most: what waits in the store costs nothing, and can be taken back."""
_TICK_S: Final = 1.0
_SHORTEST_TICK_S: Final = 0.05
_LOAD: Final = 20  # a tick without effect is at least so many times what it takes
_TIDY_S: Final = 30.0
_FORGET_S: Final = 600.0
_DONE: Final = 1000  # jobs that are done, of those that are listed


class Dispatcher:
    """Decides from the notes and the attempts what is to be done.

    Args:
        extraction: Has the notes.
        ledger: Has the attempts.
        presence: Tells which workers are alive.
        pace: When what is due.
    """

    def __init__(
        self, extraction: Extraction, ledger: Ledger, presence: Presence, pace: Pace
    ) -> None:
        self._formation, self._ledger = extraction, ledger
        self._presence, self._pace = presence, pace

    # -- what there is

    def notes(self) -> list[Waiting]:
        """The threads that wait for this extraction: in the store there may be another's."""
        return [note for note in self._formation.pending() if self._is_ours(note)]

    def jobs(self) -> list[Job]:
        """One job for each thread that waits, and for each that was formed lately."""
        attempts = self._marked(self._ledger.unfinished())
        # the note goes when a thread is formed, so an attempt without one was lost after that
        lost = [each for each in attempts if each.status == "lost" and each.begun]
        ended = by_key([*self._ledger.done(_DONE), *lost])
        found, now = [], datetime.now(UTC)
        for note, stands in self._standings(self.notes(), attempts):
            found.append(job_of(note, stands, now))
            ended.pop(key_of(note.namespace, note.thread_id), None)
        last = [newest(each) for each in ended.values()]
        return [*found, *(done_job(each, each.of) for each in last if each.of is not None)]

    def live(self) -> set[str]:
        """The keys of what is in the queue, or is formed."""
        attempts = self._marked(self._ledger.unfinished())
        return {each.id.key for each in attempts if each.is_live}

    # -- what is done

    def due(self) -> int:
        """Put what is due into the queue, and what dead workers had. Returns how much it was."""
        notes = self.notes()
        if not notes:
            return 0
        attempts = self._released(self._ledger.unfinished())
        now = datetime.now(UTC)
        due = [each for each in self._standings(notes, attempts) if each[1].is_due(now)]
        if due:  # read again: what was formed meanwhile is not left over
            still = set(map(_name, self.notes()))
            room = max(0, _AHEAD - sum(each.is_live for each in attempts))
            due = [each for each in due if _name(each[0]) in still][:room]
        for note, stands in due:
            self._ledger.put(note, stands.attempts + 1)
        return len(due)

    def all(self, *, dead: bool) -> list[Waiting]:
        """Put all that waits into the queue, due or not.

        Args:
            dead: Also what was given up.

        Returns:
            What waits.
        """
        attempts = self._released(self._ledger.unfinished())
        notes = self.notes()
        for note, stands in self._standings(notes, attempts):
            if stands.last is not None and stands.last.is_live:
                continue
            if stands.state != "dead":
                self._ledger.put(note, stands.attempts + 1)
            elif dead:
                self._ledger.put(note, 1)
        return notes

    def tidy(self) -> None:
        """Free what dead workers had, whether or not a thread waits for it."""
        self._released(self._ledger.unfinished())
        sweeps = self._ledger.lost_sweeps()
        lost = [id for id, worker in sweeps if not self._presence.is_alive(worker)]
        if lost:
            self._ledger.repeat(lost)

    def forget(self) -> None:
        """Forget what ended long ago; but not why a thread that waits was given up."""
        self._formation.tidy()
        standings = self._standings(self.notes(), self._ledger.unfinished())
        self._ledger.forget([stands.last for _, stands in standings if stands.last is not None])

    def _is_ours(self, note: Waiting) -> bool:
        with suppress(PerdureError):  # the config lacks what our template asks for
            configurable = {**note.configurable, "thread_id": note.thread_id}
            filled = namespace_of(self._formation.namespace, {"configurable": configurable})
            return filled == note.namespace
        return False

    def _standings(
        self, notes: Iterable[Waiting], attempts: Iterable[Attempt]
    ) -> list[tuple[Waiting, Standing]]:
        known = by_key(attempts)
        return [
            (
                note,
                standing(note, known.get(key_of(note.namespace, note.thread_id), ()), self._pace),
            )
            for note in notes
        ]

    def _marked(self, attempts: list[Attempt]) -> list[Attempt]:
        """The attempts; those whose workers are gone as lost."""
        workers = {each.executor or "" for each in attempts if each.status == "running"}
        gone = {worker for worker in workers if not self._presence.is_alive(worker)}
        return [
            replace(each, status="lost", error=LOST, ended=datetime.now(UTC))
            if each.status == "running" and (each.executor or "") in gone
            else each
            for each in attempts
        ]

    def _released(self, attempts: list[Attempt]) -> list[Attempt]:
        """See `_marked`; they are ended in the ledger, so that the threads can be tried again."""
        marked = self._marked(attempts)
        lost = [new for new, old in zip(marked, attempts, strict=True) if new is not old]
        self._ledger.lose(lost)
        for each in lost:
            if each.of is not None:
                state: State = "dead" if each.id.number > self._pace.retries else "due"
                place, since = each.of.namespace, each.of.since
                tell(Job(each.of.thread_id, place, state, each.id.number, LOST, since))
        return marked


def _name(note: Waiting) -> tuple[str, str]:
    return key_of(note.namespace, note.thread_id), stamp_of(note)


class Timer:
    """The thread that has things done now and then.

    Args:
        dispatcher: Does them.
        presence: That of this process.
        worker: Its name.
        tick_s: How often.
    """

    def __init__(
        self, dispatcher: Dispatcher, presence: Presence, worker: str, tick_s: float
    ) -> None:
        self._dispatcher, self._presence, self._worker = dispatcher, presence, worker
        self._tick_s = min(_TICK_S, max(_SHORTEST_TICK_S, tick_s))
        self._tidied = self._forgotten = -inf
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="perdure-forming", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._tick_s
        while not self._stop.wait(pause_s):
            began, put = time.monotonic(), 0
            try:
                put = self._turn(began)
            except Exception as exc:
                # the notes are still there: the next turn sees to them
                logger.error("background extraction is held up: %s: %s", type(exc).__name__, exc)
            took_s = time.monotonic() - began
            pause_s = self._tick_s if put else max(self._tick_s, _LOAD * took_s)

    def _turn(self, now: float) -> int:
        self._presence.enter(self._worker)
        if now - self._tidied >= _TIDY_S:
            self._dispatcher.tidy()
            self._tidied = now
        if now - self._forgotten >= _FORGET_S:
            self._dispatcher.forget()
            self._forgotten = now
        return self._dispatcher.due()
