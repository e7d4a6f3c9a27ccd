"""What a `Background` works with, opened when it is first needed: DBOS takes a second to import."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote
from uuid import uuid4

from perdure.errors import ConfigurationError
from perdure.memory.background.jobs import Job, Pace
from perdure.memory.background.presence import FilePresence, Presence, SessionPresence
from perdure.memory.extraction import Extraction

if TYPE_CHECKING:
    from perdure.memory.background.dispatching import Dispatcher
    from perdure.memory.background.ledger import Ledger

_POLL_S: Final = 0.25  # how often a worker asks for attempts: a hundredth of a core
_OUTCOME_S: Final = 1.0  # what DBOS may take to write down how the last attempts have ended
_POSTGRES: Final = ("postgresql://", "postgres://")
_BESIDE: Final = ".jobs"
_PATH: Final = "/:\\"  # what of a path is not quoted in a URL


@dataclass(frozen=True, slots=True)
class Place:
    """Where attempts are kept.

    Attributes:
        file: A file of SQLite; None: a temporary one, unless there is a URL.
        url: Of a Postgres database.
    """

    file: str | None = None
    url: str | None = None

    @classmethod
    def of(cls, database: Any, store: Any) -> Place:
        """The place that was asked for, or the one beside a store.

        Raises:
            ConfigurationError: It is neither a file nor a Postgres database.
        """
        if database is None:
            beside = getattr(getattr(store, "database", None), "path", None)
            if not isinstance(beside, str) or beside == ":memory:":
                return cls()
            database = beside + _BESIDE
        text = os.fsdecode(database) if isinstance(database, str | os.PathLike) else ""
        if text.startswith(_POSTGRES):
            return cls(url="postgresql://" + text.split("://", 1)[1])
        if (
            not text or "://" in text or "?" in text
        ):  # the last is no part of a file's name in a URL
            raise ConfigurationError(
                f"database is {database!r:.80}; expected a file, or 'postgresql://user@host/name'"
            )
        return cls(file=os.path.abspath(text))


class Desk:
    """The jobs' database, and who decides from it what is to be done.

    Args:
        extraction: Has the notes on waiting threads.
        place: Where attempts are kept.
        name: The application.
        pace: When what is due.

    Raises:
        StorageUnavailable: The jobs' database cannot be reached.
    """

    def __init__(self, extraction: Extraction, place: Place, name: str, pace: Pace) -> None:
        from perdure.memory.background.dispatching import Dispatcher
        from perdure.memory.background.ledger import Ledger

        self.extraction, self.name, self.pace = extraction, name, pace
        self._stack = ExitStack()
        try:
            self.url, self.presence = self._settled(place)
            self.ledger: Ledger = Ledger(self.url, name)
            self._stack.callback(self.ledger.close)
        except BaseException:
            self._stack.close()
            raise
        self.dispatcher: Dispatcher = Dispatcher(extraction, self.ledger, self.presence, pace)

    def close(self) -> None:
        """Let go of the database."""
        self._stack.close()

    def _settled(self, place: Place) -> tuple[str, Presence]:
        if place.url is not None:
            return place.url, SessionPresence(place.url)
        file = place.file
        if file is None:
            folder = tempfile.mkdtemp(prefix="perdure-")
            self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
            file = os.path.join(folder, "jobs")
        return f"sqlite:///{quote(file, safe=_PATH)}", FilePresence(file)


class Shift:
    """A worker at work: it looks for what is due, and forms.

    Args:
        desk: Its desk.
        workers: How many threads it forms at the same time.
        told: Is given each job when an attempt has ended.

    Raises:
        ConfigurationError: This process runs DBOS already; nothing was written then.
    """

    def __init__(self, desk: Desk, workers: int, told: Callable[[Job], None] | None) -> None:
        from perdure.memory.background.attempting import Attempts
        from perdure.memory.background.runtime import Runtime

        self._desk, self._workers, self._worker = desk, workers, uuid4().hex
        self._attempts = Attempts(desk.extraction, desk.pace, told)
        self._runtime = Runtime(desk.url, desk.name, self._worker, workers)
        self._timeout_s = 0.0
        self._stack = ExitStack()
        self._stack.callback(desk.presence.leave)
        self._stack.callback(self._runtime.close)

    def begin(self, cron: str | None, timezone: str | None) -> None:
        """Begin to work.

        Args:
            cron: When all that waits is formed; None: as was said before.
            timezone: Of `cron`.

        Raises:
            ConfigurationError: `cron` is malformed.
            StorageUnavailable: The jobs' database cannot be reached.
        """
        from perdure.memory.background.dispatching import Timer
        from perdure.memory.background.runtime import Works

        desk, pace = self._desk, self._desk.pace
        if cron is not None:
            desk.ledger.every(cron, timezone)
        desk.ledger.limit(self._workers, _POLL_S)
        desk.presence.enter(self._worker)
        self._runtime.launch(Works(self._attempts.attempt, self._form_all))
        tick_s = min(pace.backoff_s, pace.delay_s or pace.backoff_s) / 4
        timer = Timer(desk.dispatcher, desk.presence, self._worker, tick_s)
        self._stack.callback(self._finish)
        self._stack.callback(timer.close)

    def end(self, timeout_s: float) -> None:
        """Finish what is being formed, but do not wait for ever, and leave nothing behind."""
        self._timeout_s = timeout_s
        self._stack.close()

    def _finish(self) -> None:
        self._attempts.close(self._timeout_s)
        end = time.monotonic() + _OUTCOME_S
        while self._desk.ledger.held_by(self._worker) and time.monotonic() < end:
            time.sleep(_OUTCOME_S / 50)

    def _form_all(self) -> int:
        return len(self._desk.dispatcher.all(dead=True))
