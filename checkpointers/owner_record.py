"""Record whether a server with an Auth file has used this database.

On a server with an Auth file, the file's handlers set the owners of threads, and an owner can be an
organisation. A row in the `settings` table records that a server with an Auth file has used the
database. The existence of the row is the record; its value has no meaning. If this row does not
exist, the `owner` of each thread is assumed to be a person, as on a server with API keys. The row
is also written to a copy of the database, and to a database into which it is merged. An export of
threads does not contain the row, because an import normally assigns each thread to a user.
"""

from __future__ import annotations

from typing import Final

from perdure.storage.database import Database
from perdure.storage.flow import Flow, Statement, fetch_rows

_FIND: Final = "SELECT value FROM settings WHERE name = 'owners'"
_ADD: Final = "INSERT INTO settings (name, value) VALUES ('owners', ?) ON CONFLICT DO NOTHING"
_ORGANISATIONS: Final = b"organisations"


def may_owners_be_organisations(database: Database) -> bool:
    """Return whether organisations can own threads in a database."""
    return database.read(read_organisations_mark)


def record_that_owners_may_be_organisations(database: Database) -> None:
    """Record permanently that organisations can own threads in a database."""
    # Read before writing. When a server starts, the mark is usually already set, so no write is
    # needed.
    if not may_owners_be_organisations(database):
        database.write(add_organisations_mark)


def read_organisations_mark() -> Flow[bool]:
    """Return whether the database is marked as one in which organisations can own threads."""
    return bool((yield from fetch_rows(_FIND)))


def add_organisations_mark() -> Flow[None]:
    """Record that organisations can own threads, unless this is already recorded."""
    yield Statement(_ADD, (_ORGANISATIONS,))
