"""Threads that are due for extraction: a query over threads and watermarks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Final, Literal

import orjson
from langchain_core.runnables import RunnableConfig

from perdure.checkpointers import ThreadHead
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.effects import run
from perdure.errors import ConfigurationError, InvalidNamespace, UnknownThread
from perdure.memory.extraction import Extraction
from perdure.memory.options import instance, seconds, whole
from perdure.memory.store_adapter import WATERMARKS, namespace_of, notes_of
from perdure.memory.watermarks import Watermark, watermarks
from perdure.stores.base import Namespace
from perdure.stores.namespaces import check_key, check_namespace

_LOG: Final = logging.getLogger("perdure.background")
State = Literal["waiting", "due", "running", "retrying", "dead", "done"]
_MARGIN: Final = timedelta(seconds=2)  # activity is noted to a tenth of a second, clocks differ
_LONGEST_PAUSE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Pace:
    """When threads are extracted, and how often a failed extraction is repeated."""

    delay_s: float | None = 30.0  # how long a thread must be quiet; None: only by cron and by hand
    max_wait_s: float = 600.0  # after so long it is extracted, also if its conversation goes on
    retries: int = 5
    backoff_s: float = 2.0  # the pause after the first failure; it doubles after each
    limit_s: float = 600.0  # an extraction that takes longer fails

    def __post_init__(self) -> None:
        if self.delay_s is not None:
            seconds("delay_s", self.delay_s)
        seconds("max_wait_s", self.max_wait_s)
        whole("retries", self.retries, 0)
        seconds("backoff_s", self.backoff_s)
        seconds("limit_s", self.limit_s, above_zero=True)


@dataclass(frozen=True, slots=True)
class ExtractionJob:
    """The extraction of one thread; `"dead"` is one given up until there is a new message."""

    thread_id: str
    namespace: Namespace  # of its memories
    state: State
    attempts: int = 0  # extractions that failed since the newest message
    error: str = ""  # of the last of them
    at: datetime | None = None  # when it is due, or was done; None: only by cron or by hand
    configurable: Mapping[str, str] = field(default_factory=dict, repr=False)  # of the run
    report: Mapping[str, Any] | None = None  # the `ExtractionReport`, if it is done

    @property
    def key(self) -> str:
        """A hash of the thread and the namespace."""
        return sha256(orjson.dumps([*self.namespace, self.thread_id])).hexdigest()[:24]

    @property
    def config(self) -> RunnableConfig:
        """Of a run on the thread."""
        return {"configurable": {**self.configurable, "thread_id": self.thread_id}}

    def __str__(self) -> str:
        names = ("added", "updated", "superseded", "deleted", "quarantined")
        counts = [f"{count} {name}" for name in names if (count := (self.report or {}).get(name))]
        attempt = f"attempt {self.attempts}" if self.attempts else ""
        head = f"{self.thread_id} in {'/'.join(self.namespace)}: {self.state}"
        return " ".join(", ".join(filter(None, [head, *counts, attempt, self.error])).split())


class DueThreads:
    """The threads with messages that an extraction has not read yet."""

    def __init__(self, extraction: Extraction, pace: Pace) -> None:
        expected = "one of perdure, which lists active threads: SQLiteCheckpointer.open(path)"
        saver = instance("the extraction's checkpointer", extraction.saver, Checkpointer, expected)
        self._saver: Checkpointer = saver
        self._extraction, self._pace = extraction, pace
        # the head of each, when it was first seen, the namespace and the config of its memories
        self._unread: dict[str, tuple[ThreadHead, datetime, Namespace, dict[str, str]]] = {}
        self._unassigned: dict[str, datetime] = {}  # when each was written to last
        self._since: datetime | None = None
        self._lock = threading.Lock()  # a worker's thread and a user's may call `jobs` at once

    def jobs(self, *, listed: bool = True) -> list[ExtractionJob]:
        """The threads with unread messages, in any state but `"done"`.

        With `listed`, those that were deleted since the last call are left out, by a query for
        each thread.
        """
        with self._lock:
            self._refresh()
            for thread_id in [*self._unread] if listed else ():
                try:
                    self._saver.checkpoints(thread_id, checkpoint_ns="", limit=1)
                except UnknownThread:
                    del self._unread[thread_id]
            adapter, name = self._extraction.adapter(), self._extraction.extractor.name
            unread = [*self._unread.items()]
            asked = [(namespace, thread_id) for thread_id, (_, _, namespace, _) in unread]
            marks, jobs = run(watermarks(adapter, asked, name)), []
            for (thread_id, place), mark in zip(unread, marks, strict=True):
                head, seen, namespace, given = place
                if mark.checkpoint_id == head.checkpoint_id:
                    del self._unread[thread_id]
                    continue
                state, at = standing(self._pace, head, mark, seen, datetime.now(UTC))
                failed = mark.failed_head == head.checkpoint_id
                failure = (mark.attempts, mark.error) if failed else (0, "")
                jobs.append(ExtractionJob(thread_id, namespace, state, *failure, at, given))
            return jobs

    def job(self, thread_id: str, config: RunnableConfig | None) -> ExtractionJob:
        """The job of one thread; None: with the config of its last run."""
        given = dict((config or {}).get("configurable", {}))
        if config is None:
            [head] = self._saver.checkpoints(thread_id, checkpoint_ns="", limit=1)
            given = dict(head.metadata)
        labels = labels_of(given, self._extraction.namespace.names)
        namespace = namespace_of(self._extraction.namespace, {"configurable": labels})
        return ExtractionJob(thread_id, namespace, "due", configurable=labels)

    def unassigned(self, quiet_s: float = 0.0) -> list[str]:
        """The ids of threads that `jobs` left out, because their heads do not say whose they are.

        Only of threads in which nothing was said for so many seconds.
        """
        quiet = datetime.now(UTC) - timedelta(seconds=quiet_s)
        with self._lock:
            return [thread_id for thread_id, at in self._unassigned.items() if at <= quiet]

    def drop(self, thread_id: str) -> None:
        """Forget a thread that was deleted."""
        with self._lock:
            self._unread.pop(thread_id, None)
            self._unassigned.pop(thread_id, None)

    def _refresh(self) -> None:
        begun, after = datetime.now(UTC), None
        while page := self._saver.heads(limit=500, after=after, active_since=self._since):
            after = page[-1].thread_id
            for head in page:
                known = self._unread.pop(head.thread_id, None)
                seen = known[1] if known else min(begun, head.updated_at)
                self._unassigned.pop(head.thread_id, None)
                if head.checkpoint_id is not None and (place := self._place(head)):
                    self._unread[head.thread_id] = head, seen, *place
        self._since = begun - _MARGIN

    def _place(self, head: ThreadHead) -> tuple[Namespace, dict[str, str]] | None:
        """The namespace of a thread's memories, and its values; None: there is no such place."""
        names = self._extraction.namespace.names
        labels = labels_of(head.metadata, names)
        if len(labels) < len(names):
            self._unassigned[head.thread_id] = head.updated_at
            return None
        try:
            namespace = namespace_of(self._extraction.namespace, {"configurable": labels})
            check_namespace(notes_of(WATERMARKS, namespace))
            check_key(head.thread_id)
        except ConfigurationError:
            return None
        except InvalidNamespace as exc:  # of one thread, which must not hold up the others
            _LOG.warning("thread %.80r cannot be extracted: %s", head.thread_id, exc)
            return None
        return namespace, labels


def labels_of(metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Whose a thread is: the values for the names of a namespace in its head's metadata.

    langgraph copies them from a run's `configurable`, perdure's nodes from its `context`. A whole
    number, as a service may have for its users, is taken as its text.
    """
    values = {name: metadata.get(name) for name in names}
    texts = {n: str(value) if type(value) is int else value for n, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def standing(
    pace: Pace, head: ThreadHead, mark: Watermark, seen: datetime, now: datetime
) -> tuple[State, datetime | None]:
    """The state of a thread with unread messages, first seen at `seen`, and when it is due."""
    if mark.failed_at is not None and mark.failed_head == head.checkpoint_id:
        if mark.final or mark.attempts > pace.retries:
            return "dead", None
        pause = min(pace.backoff_s * 2.0 ** min(mark.attempts - 1, 60), _LONGEST_PAUSE_S)
        at = mark.failed_at + timedelta(seconds=pause)
        return ("due" if at <= now else "retrying"), at
    if pace.delay_s is None:
        return "waiting", None
    quiet = head.updated_at + timedelta(seconds=pace.delay_s)
    at = min(quiet, seen + timedelta(seconds=pace.max_wait_s))
    return ("due" if at <= now else "waiting"), at
