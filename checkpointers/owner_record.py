"""Store and read a mark which says that a server with an Auth file has used this database.

The handlers of an Auth file set the owners of threads. The owner that a handler sets for a thread
may be an organisation. If a database does not have the mark of an Auth file, the `owner` of each
thread is assumed to be a person, as on a server with API keys. The mark, which says that a server
with an Auth file has used the database, is a row of the table `settings`.
"""

from __future__ import annotations

from typing import Final

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.storage.flow import Flow, Statement, fetch_rows

_FIND: Final = "SELECT value FROM settings WHERE name = 'owners'"
_ADD: Final = "INSERT INTO settings (name, value) VALUES ('owners', ?) ON CONFLICT DO NOTHING"
_ORGANISATIONS: Final = b"organisations"


def may_owners_be_organisations(saver: Checkpointer) -> bool:
    """Return whether the `owner` of a thread in this database may be an organisation."""
    return saver.database.read(read_organisations_mark)


def record_organisation_owners(saver: Checkpointer) -> None:
    """Record permanently that the `owner` of a thread in this database may be an organisation."""
    # Check whether the database already has the mark, to avoid a write. Most servers start with a
    # database that has the mark.
    if not may_owners_be_organisations(saver):
        saver.database.write(add_organisations_mark)


def read_organisations_mark() -> Flow[bool]:
    """Return whether the database has a mark which says that thread owners may be organisations."""
    return bool((yield from fetch_rows(_FIND)))


def add_organisations_mark() -> Flow[None]:
    """Add a mark which says that thread owners may be organisations, unless the mark exists."""
    yield Statement(_ADD, (_ORGANISATIONS,))
