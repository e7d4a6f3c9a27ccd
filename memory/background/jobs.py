"""Jobs of background extraction: a thread that waits, what was tried about it, and what comes next.

Whatever is to be done follows from the note on a waiting thread and from the attempts to form it,
and from nothing else: any process that knows both decides the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Final, Literal, NamedTuple

import orjson

from perdure.memory.forming.waiting import Waiting
from perdure.stores.base import Namespace

State = Literal["waiting", "due", "running", "retrying", "dead", "done"]
STATES: Final = ("waiting", "due", "running", "retrying", "dead", "done")
Status = Literal["queued", "running", "failed", "lost", "done"]
LOST: Final = "the worker that formed it ended before it was done"
_LONGEST_BACKOFF_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Job:
    """Forming memories of one thread: the newest that there is to say about it.

    Attributes:
        thread_id: The thread.
        namespace: Where its memories are kept.
        state: "waiting" for a pause in the conversation, "due", "running", "retrying": it failed
            and will be tried again, "dead": it is not tried any more, "done".
        attempts: How often it was begun since something was said on the thread last.
        error: Why the last attempt failed.
        since: Since when the thread waits (UTC).
        due_at: When it will be formed (UTC); None: that is past, or nobody has said when.
        report: What came of it; see `ExtractionReport`.
    """

    thread_id: str
    namespace: Namespace
    state: State
    attempts: int
    error: str | None
    since: datetime
    due_at: datetime | None = None
    report: Mapping[str, Any] | None = None

    @property
    def key(self) -> str:
        """What names the thread and the namespace, in the names of attempts."""
        return key_of(self.namespace, self.thread_id)

    def __str__(self) -> str:
        place = "/".join(self.namespace)
        parts = [f"{self.thread_id} in {place}: {self.state}"]
        if self.report is not None:
            changes = ("added", "updated", "superseded", "deleted", "quarantined")
            counts = {name: self.report.get(name) for name in changes}
            parts += [f"{count} {name}" for name, count in counts.items() if count]
        if self.attempts > 1 or self.error is not None:
            parts.append(f"attempt {self.attempts}")
        if self.error is not None:
            parts.append(self.error)
        return " ".join(", ".join(parts).split())


class AttemptId(NamedTuple):
    """What the id of an attempt says."""

    key: str
    stamp: str
    number: int
    nonce: str

    def __str__(self) -> str:
        return "-".join([self.key, self.stamp, str(self.number), self.nonce])

    @classmethod
    def read(cls, text: str) -> AttemptId:
        """The parts of an id."""
        key, stamp, number, nonce = text.split("-")
        return cls(key, stamp, int(number), nonce)


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to form a thread.

    Attributes:
        id: Its id.
        status: How far it is; "lost": its worker is gone.
        created: When it was put into the queue, in seconds of the jobs' database.
        executor: The worker that has it, or had it.
        error: Why it failed.
        final: Whether trying again cannot help.
        begun: Whether it was begun; else it is no attempt that counts.
        ended: When it ended (UTC).
        of: The thread, if it was asked for.
        report: What came of it.
    """

    id: AttemptId
    status: Status
    created: float = 0.0
    executor: str | None = None
    error: str | None = None
    final: bool = False
    begun: bool = True
    ended: datetime | None = None
    of: Waiting | None = None
    report: Mapping[str, Any] | None = None

    @property
    def is_live(self) -> bool:
        """Whether it is still to be done, or is being done."""
        return self.status in ("queued", "running")

    @property
    def order(self) -> tuple[float, str]:
        """What attempts are sorted by."""
        return self.created, self.id.nonce


@dataclass(frozen=True, slots=True)
class Pace:
    """When threads are formed, and how often it is tried.

    Attributes:
        delay_s: How long nothing must have been said; None: it is not done unasked.
        max_wait_s: How long a thread waits at most, whatever is said.
        retries: How often a failed attempt is repeated.
        backoff_s: How long after the first failure; doubled with each.
    """

    delay_s: float | None
    max_wait_s: float
    retries: int
    backoff_s: float

    def backoff_after(self, attempts: int) -> float:
        """How many seconds after so many failures it is tried again."""
        return min(self.backoff_s * 2.0 ** min(attempts - 1, 60), _LONGEST_BACKOFF_S)


@dataclass(frozen=True, slots=True)
class Standing:
    """How it stands with a waiting thread.

    Attributes:
        state: See `Job`.
        attempts: How often it was begun.
        due_at: When the next attempt is due; None: not unasked.
        last: The attempt that the state follows from.
    """

    state: State
    attempts: int = 0
    due_at: datetime | None = None
    last: Attempt | None = None

    @property
    def error(self) -> str | None:
        """Why it failed."""
        return None if self.last is None else self.last.error

    def is_due(self, now: datetime) -> bool:
        """Whether an attempt is to be made now."""
        idle = self.last is None or not self.last.is_live
        return idle and self.due_at is not None and self.due_at <= now


def key_of(namespace: Namespace, thread_id: str) -> str:
    """A short name of a thread and a namespace."""
    return sha256(orjson.dumps([*namespace, thread_id])).hexdigest()[:24]


def stamp_of(note: Waiting) -> str:
    """A name of what a note says: another as soon as something more is said on the thread."""
    return f"{int(note.at.timestamp() * 1e6):x}"


def standing(note: Waiting, attempts: Iterable[Attempt], pace: Pace) -> Standing:
    """How it stands with a waiting thread.

    Args:
        note: The note on it.
        attempts: Those to form it that are not done.
        pace: What decides.
    """
    attempts = sorted(attempts, key=lambda each: each.order)
    live = next((each for each in reversed(attempts) if each.is_live), None)
    if live is not None:
        state: State = "due" if live.status == "queued" else "running"
        return Standing(state, live.id.number, last=live)
    stamp = stamp_of(note)  # failures before something more was said do not count
    last = next((each for each in reversed(attempts) if each.id.stamp == stamp), None)
    if last is None:
        return Standing("waiting", 0, _quiet_at(note, pace))
    number = last.id.number - (not last.begun)
    if last.final or number > pace.retries:
        return Standing("dead", number, last=last)
    if last.status == "lost" or not last.begun:
        return Standing("due", number, note.at, last)
    wait = timedelta(seconds=pace.backoff_after(number))
    return Standing("retrying", number, (last.ended or datetime.now(UTC)) + wait, last)


def job_of(note: Waiting, stands: Standing, now: datetime) -> Job:
    """The job of a waiting thread."""
    state = "due" if stands.state == "waiting" and stands.is_due(now) else stands.state
    due_at = stands.due_at if state in ("waiting", "retrying") else None
    return Job(
        note.thread_id, note.namespace, state, stands.attempts, stands.error, note.since, due_at
    )


def done_job(attempt: Attempt, of: Waiting) -> Job:
    """The job of an attempt that is done."""
    number, report = attempt.id.number, attempt.report
    return Job(of.thread_id, of.namespace, "done", number, None, of.since, None, report)


def by_key(attempts: Iterable[Attempt]) -> dict[str, list[Attempt]]:
    """Attempts by the thread and namespace that they are about."""
    found: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        found.setdefault(attempt.id.key, []).append(attempt)
    return found


def newest(attempts: Sequence[Attempt]) -> Attempt:
    """The newest of some attempts."""
    return max(attempts, key=lambda each: each.order)


def _quiet_at(note: Waiting, pace: Pace) -> datetime | None:
    """When a thread will have been quiet for long enough, or will have waited for too long."""
    if pace.delay_s is None:
        return None
    quiet = note.at + timedelta(seconds=pace.delay_s)
    return min(quiet, note.since + timedelta(seconds=pace.max_wait_s))
