"""Extracting memories of threads from commands: without a model, so that it costs only time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.app import open_saver, settings_for
from perdure.cli.longterm import Mind, opened_mind
from perdure.cli.output import notes
from perdure.errors import InvalidMessages, UnknownThread

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from perdure.checkpointers import SQLiteCheckpointer
    from perdure.memory.extraction import Extraction

Later = Annotated[
    bool, typer.Option("--later", help="Leave the memories to 'perdure worker' to extract.")
]


def form_waiting(mind: Mind) -> int:
    """Extract the turns of the user's threads that are due. Returns how many are new."""
    from perdure.memory.due import DueThreads, Pace

    extraction, added = mind.extraction(), 0
    for job in DueThreads(extraction, Pace(), {"user_id": mind.user}).jobs():
        if job.namespace == mind.namespace:
            with suppress(UnknownThread, InvalidMessages):  # deleted meanwhile; a program's own
                added += extraction.extract(job.thread_id, mind.config).added
    return added


class Import:
    """An import: where threads go, and what becomes of their memories.

    Args:
        db: The command's own argument.
        user: The same.
        wanted: Whether there are to be memories.
        later: Whether they are left for a worker.

    Attributes:
        about: What the threads' metadata says of it: whose memories a worker extracts.
        memories: How many were added.
        quarantined: How many more wait to be reviewed.
    """

    def __init__(self, db: str | None, user: str | None, *, wanted: bool, later: bool) -> None:
        self._db, self._user, self._wanted, self._later = db, user, wanted, later
        self.about = {"user_id": settings_for(db, user).user if wanted else ""}
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
        """Extract memories of a thread; what was read before is not read again."""
        if self._forms is None:
            return
        extraction, config = self._forms
        if self._later:  # it is due, for whoever looks
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
