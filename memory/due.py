"""Which threads are due for extraction: a query over threads and watermarks, and no queue.

A thread is due when its head is beyond the watermark of the extractor and it was quiet for the
delay, or has waited for too long. Failed attempts are counted on the watermark: the next is made
after a pause that doubles, and none after `retries` until something new is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Final, Literal

import orjson
from langchain_core.runnables import RunnableConfig

from perdure.checkpointers import ThreadHead
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory.effects import Effects, run
from perdure.memory.extraction import Extraction
from perdure.memory.options import instance, seconds, whole
from perdure.memory.store_adapter import namespace_of
from perdure.memory.watermarks import Watermark, watermarks
from perdure.stores.base import Namespace

State = Literal["waiting", "due", "running", "retrying", "dead", "done"]
STATES: Final = ("waiting", "due", "running", "retrying", "dead", "done")
_PAGE: Final = 500  # threads
_MARGIN: Final = timedelta(seconds=2)  # activity is noted to a tenth of a second, clocks differ
_LONGEST_PAUSE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Pace:
    """When threads are extracted, and how often it is tried.

    Attributes:
        delay_s: How long nothing must have been said; None: only by cron and by hand.
        max_wait_s: After how long a thread is extracted although its conversation goes on.
        retries: How often a failed extraction is repeated.
        backoff_s: The pause after the first failure; twice as long after each.
        limit_s: How long one extraction may take; then it counts as failed.

    Raises:
        ConfigurationError: A number is none that it can be.
    """

    delay_s: float | None = 30.0
    max_wait_s: float = 600.0
    retries: int = 5
    backoff_s: float = 2.0
    limit_s: float = 600.0

    def __post_init__(self) -> None:
        if self.delay_s is not None:
            seconds("delay_s", self.delay_s)
        seconds("max_wait_s", self.max_wait_s)
        whole("retries", self.retries, 0)
        seconds("backoff_s", self.backoff_s)
        seconds("limit_s", self.limit_s, above_zero=True)


@dataclass(frozen=True, slots=True)
class Job:
    """The extraction of one thread.

    Attributes:
        thread_id: The thread.
        namespace: Where its memories are kept.
        state: `"waiting"` for a pause of the conversation, `"due"`, `"retrying"` after a failure,
            `"dead"`: given up until something new is said or `retry` is called, `"done"`.
        attempts: How many extractions failed since something was said last.
        error: Why the last one failed.
        at: When it is due, or was done (UTC); None: by cron or by hand only.
        configurable: What of the run's config fills in the namespace.
        report: What came of it, if it is done; see `ExtractionReport`.
    """

    thread_id: str
    namespace: Namespace
    state: State
    attempts: int = 0
    error: str = ""
    at: datetime | None = None
    configurable: Mapping[str, str] = field(default_factory=dict, repr=False)
    report: Mapping[str, Any] | None = None

    @property
    def key(self) -> str:
        """Names the thread and the namespace."""
        return sha256(orjson.dumps([*self.namespace, self.thread_id])).hexdigest()[:24]

    @property
    def config(self) -> RunnableConfig:
        """The config of a run on the thread."""
        return {"configurable": {**self.configurable, "thread_id": self.thread_id}}

    def __str__(self) -> str:
        parts = [f"{self.thread_id} in {'/'.join(self.namespace)}: {self.state}"]
        names = ("added", "updated", "superseded", "deleted", "quarantined")
        counts = {name: (self.report or {}).get(name) for name in names}
        parts += [f"{count} {name}" for name, count in counts.items() if count]
        parts += [f"attempt {self.attempts}"] if self.attempts else []
        return " ".join(", ".join([*parts, *filter(None, [self.error])]).split())


class DueThreads:
    """The threads with something that an extraction has not read yet.

    It remembers what was settled, so that a look costs what changed since the one before.

    Args:
        extraction: Of a perdure checkpointer.
        pace: When what is due.
        defaults: What a run's `configurable` says where it says nothing: `{"user_id": "local"}`.

    Raises:
        ConfigurationError: The checkpointer cannot be asked for active threads.
    """

    def __init__(
        self, extraction: Extraction, pace: Pace, defaults: Mapping[str, str] | None = None
    ) -> None:
        self._saver: Checkpointer = instance(
            "the extraction's checkpointer",
            extraction.saver,
            Checkpointer,
            "one of perdure, which lists active threads: SQLiteCheckpointer.open(path)",
        )
        self._extraction, self._pace, self._defaults = extraction, pace, dict(defaults or {})
        self._open: dict[str, tuple[ThreadHead, datetime]] = {}  # with when it was first seen
        self._since: datetime | None = None

    def jobs(self) -> list[Job]:
        """The threads that are not settled, whatever their state."""
        self._look()
        asked = {id: self._asked(head) for id, (head, _) in self._open.items()}
        for thread_id in [id for id, found in asked.items() if found is None]:
            del self._open[thread_id]  # another extraction's
        places = {id: found for id, found in asked.items() if found is not None}
        marks = run(self._marks([(namespace, id) for id, (namespace, _) in places.items()]))
        jobs, now = [], datetime.now(UTC)
        for (thread_id, (namespace, given)), mark in zip(places.items(), marks, strict=True):
            head, seen = self._open[thread_id]
            if mark.checkpoint_id == head.checkpoint_id:
                del self._open[thread_id]
                continue
            state, at = standing(self._pace, head, mark, seen, now)
            tried = mark.failed_head == head.checkpoint_id
            told = (mark.attempts, mark.error) if tried else (0, "")
            jobs.append(Job(thread_id, namespace, state, *told, at, given))
        return jobs

    def job(self, thread_id: str, config: RunnableConfig | None) -> Job:
        """The job of one thread, asked for by hand.

        Raises:
            InvalidConfig: Neither the config nor the thread's last run fills in the namespace.
            UnknownThread: There is no such thread.
        """
        given = dict((config or {}).get("configurable", {}))
        if config is None:
            [head] = self._saver.checkpoints(thread_id, checkpoint_ns="", limit=1)
            given = dict(head.metadata)
        wanted = self._configurable({**self._defaults, **given})
        namespace = namespace_of(self._extraction.namespace, {"configurable": wanted})
        return Job(thread_id, namespace, "due", configurable=wanted)

    def _look(self) -> None:
        """Note the threads that were written to since the last look."""
        begun = datetime.now(UTC)
        for head in self._heads():
            _, seen = self._open.get(head.thread_id, (head, min(begun, head.updated_at)))
            if head.checkpoint_id is not None:
                self._open[head.thread_id] = head, seen
        self._since = begun - _MARGIN

    def _heads(self) -> Iterator[ThreadHead]:
        after: str | None = None
        while page := self._saver.heads(limit=_PAGE, after=after, active_since=self._since):
            yield from page
            after = page[-1].thread_id

    def _asked(self, head: ThreadHead) -> tuple[Namespace, dict[str, str]] | None:
        """Where a thread's memories belong, and what says so; None: not into our namespaces."""
        given = self._configurable({**self._defaults, **head.metadata})
        try:
            return namespace_of(self._extraction.namespace, {"configurable": given}), given
        except (InvalidConfig, ConfigurationError):
            return None

    def _configurable(self, given: Mapping[str, Any]) -> dict[str, str]:
        names = self._extraction.namespace.names
        return {name: given[name] for name in names if isinstance(given.get(name), str)}

    def _marks(self, places: list[tuple[Namespace, str]]) -> Effects[list[Watermark]]:
        return watermarks(self._extraction.adapter(), places, self._extraction.extractor.name)


def standing(
    pace: Pace, head: ThreadHead, mark: Watermark, seen: datetime, now: datetime
) -> tuple[State, datetime | None]:
    """How it stands with a thread that is not extracted up to its head, and when it is due.

    Args:
        pace: When what is due.
        head: Of the thread.
        mark: The watermark of the extractor.
        seen: Since when it is known that there is something to extract.
        now: The present.
    """
    if mark.failed_at is not None and mark.failed_head == head.checkpoint_id:
        if mark.attempts > pace.retries:
            return "dead", None
        pause = min(pace.backoff_s * 2.0 ** min(mark.attempts - 1, 60), _LONGEST_PAUSE_S)
        at = mark.failed_at + timedelta(seconds=pause)
        return ("due" if at <= now else "retrying"), at
    if pace.delay_s is None:
        return "waiting", None
    quiet = head.updated_at + timedelta(seconds=pace.delay_s)
    at = min(quiet, seen + timedelta(seconds=pace.max_wait_s))
    return ("due" if at <= now else "waiting"), at
