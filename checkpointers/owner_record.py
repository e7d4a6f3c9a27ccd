"""Record whether a server with an Auth file has used this database.

If a server is configured with an Auth file, the auth handlers in this file set the owner of each
thread. An owner can then be an organisation instead of a person. A row in the `settings` table
records that a server with an Auth file has used the database. Only the existence of the `settings`
row matters. The value of the row has no meaning. If the `settings` row is missing, each thread's
`owner` is assumed to be a person. A server can use API keys instead of an Auth file. Such a server
treats every thread owner as a person, never as an organisation. If a database is copied or merged
into another one, the `settings` row is also written to the target. An export of threads leaves out
the `settings` row about the Auth file. The `settings` row records the fact that organisations may
own threads, and nothing else. The importing database does not need the `settings` row, because an
imported thread normally belongs to a user and not to an organisation.
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
    """Mark a database permanently as one whose threads may be owned by organisations."""
    # Check whether the `settings` row exists before writing, because it usually exists when a
    # server starts.
    if not may_owners_be_organisations(database):
        database.write(add_organisations_mark)


def read_organisations_mark() -> Flow[bool]:
    """Return whether the database records that organisations can own threads."""
    return bool((yield from fetch_rows(_FIND)))


def add_organisations_mark() -> Flow[None]:
    """Insert the marker row into the `settings` table, unless the row exists already.

    The marker row says that organisations can own threads in this database.
    """
    yield Statement(_ADD, (_ORGANISATIONS,))
