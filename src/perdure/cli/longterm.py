"""Long-term memory as commands open it: whose it is, where it is kept, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import open_saver, opened, settings_for
from perdure.cli.output import console, line

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from perdure.checkpointers import SQLiteCheckpointer
    from perdure.memory.extraction import Extraction
    from perdure.memory.proposals import Extractor
    from perdure.memory.records import Memory
    from perdure.stores import SQLiteStore

User = Annotated[
    str | None, typer.Option("--user", help="Whose memories; else PERDURE_USER, else me.")
]
MEMORIES: Final = ("memories", "{user_id}")
EXAMPLES: Final = ("examples", "{user_id}")
INSTRUCTIONS: Final = ("instructions",)


@dataclass(frozen=True, slots=True)
class Mind:
    """The memories of a user, in the file of the threads.

    Attributes:
        user: Whose.
        saver: The threads.
        store: The memories.
    """

    user: str
    saver: SQLiteCheckpointer
    store: SQLiteStore

    @property
    def config(self) -> RunnableConfig:
        """What fills in the namespaces."""
        return {"configurable": {"user_id": self.user}}

    @property
    def namespace(self) -> tuple[str, str]:
        """Where the facts and turns are."""
        return ("memories", self.user)

    @property
    def others(self) -> tuple[tuple[str, str], ...]:
        """Where the profile and the examples are."""
        return (("profiles", self.user), ("examples", self.user))

    def extraction(self, extractor: Extractor | None = None) -> Extraction:
        """The extraction of the threads; without an extractor, of turns."""
        from perdure.memory.extraction import Extraction

        return Extraction(self.saver, self.store, extractor, namespace=MEMORIES)


@contextmanager
def opened_mind(
    db: str | None, user: str | None, *, create: bool = False, reads: bool = False
) -> Iterator[Mind]:
    """The memories that a command works on.

    Args:
        db: The command's own argument.
        user: The same.
        create: Whether the command has something to begin a database with.
        reads: Whether it only reads, so that a file which cannot be written will do.

    Raises:
        ConfigurationError: The database is not there, and is not to be begun.
    """
    from perdure.stores import SQLiteStore

    whose = settings_for(db, user).user
    begin = "perdure remember' or 'perdure import"
    with (
        opened(SQLiteStore, db, create=create, reads=reads, begin=begin) as store,
        open_saver(db, create=create, reads=reads) as saver,
    ):
        yield Mind(whose, saver, store)


# -- how memories are shown


def whole(memory: Memory) -> dict[str, Any]:
    """A memory for programs."""
    found = asdict(memory)
    return {name: part for name, part in found.items() if name not in ("score", "parts")}


def text_of(memory: Memory) -> str:
    """What a memory says, on one line; of a turn without its speaker, who stands beside it."""
    spoken = f"{actor_of(memory)}: "
    text = memory.text.removeprefix(spoken) if memory.kind == "turn" else memory.text
    return line(text, 100 if console.is_terminal else 10_000)


def actor_of(memory: Memory) -> str:
    """Who said it, as far as is known."""
    return (memory.provenance.actor if memory.provenance else None) or ""


def thread_of(memory: Memory) -> str:
    """The thread that it comes from, as far as is known."""
    return (memory.provenance.thread_id if memory.provenance else None) or ""


def day_of(memory: Memory) -> str:
    """The day (UTC) on which it was said; if nobody knows, since when it is kept."""
    return day(memory.provenance.at if memory.provenance else None) or day(memory.valid_from)


def day(moment: datetime | None) -> str:
    """The day of a moment, in UTC."""
    from datetime import UTC

    return "" if moment is None else moment.astimezone(UTC).date().isoformat()
