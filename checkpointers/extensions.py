"""Update the tables of components, such as the server, when a thread is erased or deleted.

A component such as the server has tables of its own in the database of a checkpointer. If a thread
is erased, deleted or merged, the component's rows for the thread must be changed, too. Even a
process that does not use the server must update the server's rows, for example when the process
deletes a thread. Each component has a module with a `ThreadExtension`, which the checkpointer calls
in its transactions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from perdure.checkpointers.reader import CheckpointReader
from perdure.errors import SchemaMismatch
from perdure.storage.database import Database, Schema
from perdure.storage.flow import Flow, Statement, load_sql

if TYPE_CHECKING:
    from perdure.checkpointers.message_remover import Remover

# Maps the name of each component that stores rows for threads to its package. Component names are
# the names in the table `schemas`. Only packages in this dict are imported, whatever names a
# database contains.
_PACKAGES: Final = {"server": "perdure.run_tables"}
# The components that have no `ThreadExtension`. `ThreadExtensions.load` skips these components.
_OTHER_COMPONENTS: Final = frozenset({"checkpointers", "stores"})
_SELECT_COMPONENTS_SQL: Final = "SELECT component FROM schemas ORDER BY component"


def list_sqlite_scripts_of_extensions() -> list[str]:
    """Return the SQLite scripts that create the tables of perdure's components.

    The list contains one script for each component that has a `ThreadExtension`, such as the
    server.
    """
    return [load_sql(package, "sqlite.sql")["schema"] for package in _PACKAGES.values()]


class ExtensionCounts(NamedTuple):
    """The numbers of rows that an erasure or deletion changed in tables of other components.

    Attributes:
        runs: The number of runs that were changed or deleted.
        events: The number of deleted batches of run events.
        crons: The number of deleted crons.
    """

    runs: int = 0
    events: int = 0
    crons: int = 0

    def add(self, other: ExtensionCounts) -> ExtensionCounts:
        """Return the sums of the counts."""
        return ExtensionCounts(*(a + b for a, b in zip(self, other, strict=True)))


class ThreadExtension(Protocol):
    """Updates a component's rows about a thread when the thread is erased, deleted or merged.

    A component, such as the server, has tables of its own in the checkpointer's database.

    Each method returns a flow that runs in the transaction of the checkpointer.

    Attributes:
        schema: The tables of the component.
    """

    schema: Schema

    def delete_rows_of_thread(self, thread_id: str, thread_key: int) -> Flow[ExtensionCounts]:
        """Delete the component's rows for a thread that is being deleted."""

    def begin_erasure(self, thread_id: str, thread_key: int) -> Flow[ExtensionCounts]:
        """Delete the run events of a thread, and stop runs in progress from storing more events.

        When messages are erased, this method is called before `erase_messages`. All events of the
        thread are deleted, even events that do not contain an erased message.
        """

    def erase_messages(
        self, thread_id: str, remover: Remover, *, finds_only: bool
    ) -> Flow[ExtensionCounts]:
        """Remove erased messages, and texts that quote them, from the rows of a thread.

        Args:
            thread_id: The thread.
            remover: Removes the messages from a value.
            finds_only: Whether only to show the values to the remover, and to write nothing.
        """

    def move_rows_to_thread(self, old_thread_key: int, new_thread_key: int) -> Flow[None]:
        """Assign the component's rows for a replaced thread to the thread that replaces it.

        In these rows, `new_thread_key` replaces `old_thread_key`.
        """

    def is_thread_in_use(self, thread_id: str) -> Flow[bool]:
        """Return whether the component still needs a conversation thread for future work.

        For example, the server still needs the thread of an unfinished run. Such a thread is not
        deleted as idle.

        The server still needs a thread in two cases: the thread has an unfinished run, or the
        thread has a cron that will run again.
        """

    def list_ids_of_live_runs(self, thread_id: str) -> Flow[set[str]]:
        """Return the ids of the runs of a thread that are running or will run soon."""


class ThreadExtensions:
    """Calls the `ThreadExtension` methods of all components that store rows about threads.

    perdure calls a component, such as the server, through the component's `ThreadExtension`.

    The components are determined in each transaction, because another process may create the tables
    of a component at any time.

    Args:
        reader: Reads the checkpoints of the database.
        database: The database.
    """

    def __init__(self, reader: CheckpointReader, database: Database) -> None:
        self._reader, self._database = reader, database

    def load(self) -> Flow[list[ThreadExtension]]:
        """Return the `ThreadExtension` of each component that has tables in the database.

        The components in `_OTHER_COMPONENTS` have no `ThreadExtension`.

        Raises:
            SchemaMismatch: This version of perdure does not know a component, or supports only
                another version of its tables.
        """
        extensions = list[ThreadExtension]()
        for (component,) in (yield Statement(_SELECT_COMPONENTS_SQL)):
            if component in _OTHER_COMPONENTS:
                continue
            if component not in _PACKAGES:
                raise SchemaMismatch(
                    f"the database {self._database.path!r} has tables of the component "
                    f"{component!r}, which this version of perdure does not know; upgrade perdure"
                )
            module = importlib.import_module(f"{_PACKAGES[component]}.extension")
            extension: ThreadExtension = module.build_extension(self._reader, self._database)
            # `has_tables` raises SchemaMismatch if perdure does not support the schema version of
            # the component's tables.
            yield from self._database.has_tables(extension.schema)
            extensions.append(extension)
        return extensions

    def delete_rows_of_thread(self, thread_id: str, thread_key: int) -> Flow[ExtensionCounts]:
        """See `ThreadExtension.delete_rows_of_thread`."""
        counts = ExtensionCounts()
        for extension in (yield from self.load()):
            counts = counts.add((yield from extension.delete_rows_of_thread(thread_id, thread_key)))
        return counts

    def move_rows_to_thread(self, old_thread_key: int, new_thread_key: int) -> Flow[None]:
        """See `ThreadExtension.move_rows_to_thread`."""
        for extension in (yield from self.load()):
            yield from extension.move_rows_to_thread(old_thread_key, new_thread_key)

    def is_thread_in_use(self, thread_id: str) -> Flow[bool]:
        """See `ThreadExtension.is_thread_in_use`."""
        for extension in (yield from self.load()):
            if (yield from extension.is_thread_in_use(thread_id)):
                return True
        return False

    def list_ids_of_live_runs(self, thread_id: str) -> Flow[set[str]]:
        """See `ThreadExtension.list_ids_of_live_runs`."""
        run_ids = set[str]()
        for extension in (yield from self.load()):
            run_ids |= yield from extension.list_ids_of_live_runs(thread_id)
        return run_ids
