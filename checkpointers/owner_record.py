"""The record that a database was served with an Auth file, whose handlers set owners of threads.

Such an owner may be an organisation. Without the record, the `owner` of a thread is taken for a
person, as on a server with API keys. The record is a row of the table `settings`.
"""

from __future__ import annotations

from typing import Final

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.storage.flow import Flow, Statement, fetch_rows

_FIND: Final = "SELECT value FROM settings WHERE name = 'owners'"
_ADD: Final = "INSERT INTO settings (name, value) VALUES ('owners', ?) ON CONFLICT DO NOTHING"
_ORGANISATIONS: Final = b"organisations"


def has_organisations(saver: Checkpointer) -> bool:
    """Return whether the `owner` of a thread in this database may be an organisation."""
    return saver.database.read(read_record)


def record_organisations(saver: Checkpointer) -> None:
    """Record that the `owner` of a thread in this database may be an organisation, for good."""
    if not has_organisations(saver):  # most servers start with a database that has the record
        saver.database.write(add_record)


def read_record() -> Flow[bool]:
    """Read whether the record exists."""
    return bool((yield from fetch_rows(_FIND)))


def add_record() -> Flow[None]:
    """Add the record, unless another process has added it."""
    yield Statement(_ADD, (_ORGANISATIONS,))
