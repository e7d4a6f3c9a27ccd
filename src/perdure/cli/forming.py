"""Forming memories of threads from commands: without a model, so that it costs nothing but time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.app import open_saver
from perdure.cli.longterm import Mind, opened_mind
from perdure.cli.output import notes
from perdure.errors import InvalidMessages, UnknownThread

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from perdure.checkpointers import SQLiteCheckpointer
    from perdure.memory.extraction import Extraction
    from perdure.memory.extraction_report import ExtractionReport
    from perdure.memory.forming.waiting import Waiting

Later = Annotated[
    bool, typer.Option("--later", help="Leave the memories to 'perdure worker' to form.")
]


def form_waiting(mind: Mind) -> int:
    """Form memories of the user's threads that wait for it. Returns how many are new."""
    return sum(report.added for note in waiting(mind) if (report := _formed(mind, note)))


def waiting(mind: Mind) -> list[Waiting]:
    """The user's threads that wait, the longest wait first."""
    found = mind.extraction().pending(mind.namespace)
    return [note for note in found if note.namespace == mind.namespace]


def _formed(mind: Mind, note: Waiting) -> ExtractionReport | None:
    """Form memories of a thread that waits; None: there is nothing to form them of."""
    try:
        return mind.extraction().extract(note.thread_id, mind.config)
    except UnknownThread:  # it was deleted while it waited
        put_down(mind, note)
    except InvalidMessages:  # a program's own; a worker tells of it
        pass
    return None


def put_down(mind: Mind, note: Waiting) -> None:
    """Take back the note on a thread of which there is nothing to form."""
    from perdure.errors import VersionConflict
    from perdure.memory.effects import run
    from perdure.memory.forming.waiting import place_of
    from perdure.memory.store_adapter import adapter_of, removal_of

    removal = removal_of(place_of(note.namespace), note.thread_id, note.version)
    try:
        run(adapter_of(mind.store).written([removal]))
    except VersionConflict:  # it was begun again
        return


class Import:
    """An import at work: where threads go, and what becomes of their memories.

    Args:
        db: The command's own argument.
        user: The same.
        wanted: Whether there are to be memories.
        later: Whether they are left for a worker.

    Attributes:
        memories: How many were formed.
        quarantined: How many more wait to be reviewed.
    """

    def __init__(self, db: str | None, user: str | None, *, wanted: bool, later: bool) -> None:
        self._db, self._user, self._wanted, self._later = db, user, wanted, later
        self._forms: tuple[Extraction, RunnableConfig] | None = None
        self.memories = self.quarantined = 0

    @contextmanager
    def opened(self) -> Iterator[SQLiteCheckpointer]:
        """Where threads go."""
        if not self._wanted:
            with open_saver(self._db) as saver:
                yield saver
            return
        with opened_mind(self._db, self._user, create=True) as mind:
            self._forms = mind.extraction(), mind.config
            yield mind.saver

    def remember(self, thread_id: str) -> None:
        """Form memories of a thread that is there now; what was formed before is not again."""
        if self._forms is None:
            return
        extraction, config = self._forms
        if self._later:
            extraction.note(thread_id, config)
            return
        try:
            report = extraction.extract(thread_id, config)
        except InvalidMessages as exc:  # a program's own, with something else in that channel
            notes.print(f"no memories of thread {thread_id!r}: {exc}", markup=False)
            return
        self.memories += report.added
        self.quarantined += report.quarantined

    def __str__(self) -> str:
        if not self._wanted:
            return ""
        if self._later:
            return ", their memories wait for 'perdure worker'"
        formed = f"{self.memories} {'memory' if self.memories == 1 else 'memories'} formed"
        return f", {formed}" + (f", {self.quarantined} in quarantine" if self.quarantined else "")
