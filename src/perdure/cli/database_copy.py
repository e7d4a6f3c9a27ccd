"""Copy the tables of threads and items into another database, then compare the two databases.

A copied row keeps its primary key. Rows are copied in primary key order, so that an interrupted
copy can continue at the highest primary key in the target. Each row is decrypted with the
source's encryption key and encrypted with the target's encryption key.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final

from perdure.cli.copied_tables import MAX_NAME_BYTES, Page, Table, Tables
from perdure.errors import ConfigurationError, ImportFailed, StorageError
from perdure.storage.flow import Flow, Statement, fetch_rows

# Maximum number of differing threads or namespaces listed in an error message.
_MAX_LISTED_OWNERS: Final = 20
_SELECT_COPY_MARK: Final = "SELECT value FROM settings WHERE name = 'copy'"
_INSERT_COPY_MARK: Final = "INSERT INTO settings (name, value) VALUES ('copy', ?)"
_DELETE_COPY_MARK: Final = "DELETE FROM settings WHERE name = 'copy'"


@dataclass
class DatabaseCopy:
    """Copies the tables of a checkpointer and of a store from a source to a target database.

    The checkpointer's tables are read in one database snapshot, and the store's tables in another.

    Attributes:
        table_pairs: For each component, the tables of the source and of the target.
        progress: Called with the number of rows that were copied since its last call.
        before_completion: Called when both databases are equal, before the copy counts as complete.
        row_counts: The number of compared rows by table.
    """

    table_pairs: Sequence[tuple[Tables, Tables]]
    progress: Callable[[int], object] = lambda count: None
    before_completion: Callable[[], object] = lambda: None
    row_counts: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        """Copy the rows that are missing from the target, then compare all rows.

        Raises:
            ConfigurationError: The source is itself an incomplete copy, or the target is neither
                empty nor an incomplete copy of the source.
            ImportFailed: The target cannot store some names, the databases differ afterwards, or
                data was erased from the source during the copy.
            CorruptRecord: A row of the source is damaged.
        """
        self._mark_target_as_incomplete_copy()
        differing = []
        for source, target in self.table_pairs:
            owners = source.database.read(
                partial(self._copy_rows_and_find_owners_of_differing_rows, source, target)
            )
            differing += [f"{source.noun} {name}" for name in owners]
        if differing:
            more = (
                f" and {len(differing) - _MAX_LISTED_OWNERS} more"
                if len(differing) > _MAX_LISTED_OWNERS
                else ""
            )
            raise ImportFailed(
                f"the copy {self._marked_database.path} differs from {self._source_path} in "
                f"{', '.join(differing[:_MAX_LISTED_OWNERS])}{more}. A database was changed during "
                "the copy, or a row is damaged. Stop all writers, and copy again into an empty "
                "database"
            )
        self._check_nothing_was_erased_during_copy()
        self.before_completion()
        self._marked_database.write(lambda: fetch_rows(_DELETE_COPY_MARK))

    def __post_init__(self) -> None:
        self._source_path = self.table_pairs[0][0].database.path
        # The target database is marked as an incomplete copy until the copy is complete.
        self._marked_database = self.table_pairs[0][1].database

    def _mark_target_as_incomplete_copy(self) -> None:
        """Check the target database, and mark it as an incomplete copy of the source database.

        Raises:
            ConfigurationError: See `run`.
            ImportFailed: See `_check_target_can_store_names`.
        """
        if self.table_pairs[0][0].database.read(lambda: fetch_rows(_SELECT_COPY_MARK)):
            raise ConfigurationError(
                f"{self._source_path} is an incomplete copy of another database; to complete it, "
                "run the same copy command again"
            )
        copy_mark = self._marked_database.read(lambda: fetch_rows(_SELECT_COPY_MARK))
        if copy_mark and copy_mark[0][0] != self._source_path.encode():
            raise ConfigurationError(
                f"the target {self._marked_database.path} contains an incomplete copy of another "
                f"database, {copy_mark[0][0].decode()}; complete that copy, or use an empty target"
            )
        for source, target in self.table_pairs:
            for table in () if copy_mark else target.tables:
                if target.database.read(partial(fetch_rows, f"SELECT 1 FROM {table.name} LIMIT 1")):
                    raise ConfigurationError(
                        f"{target.database.path} is not empty: the table {table.name} has rows; "
                        "copy into a new database"
                    )
            self._check_target_can_store_names(source, target)
        if not copy_mark:
            self._marked_database.write(
                lambda: fetch_rows(_INSERT_COPY_MARK, self._source_path.encode())
            )

    def _check_nothing_was_erased_during_copy(self) -> None:
        """Raise ImportFailed if anything was erased from the source while it was being copied."""
        for source, target in self.table_pairs:
            if source.read_removals() - target.read_removals():
                raise ImportFailed(
                    f"data was erased from {self._source_path} during the copy, and the copy "
                    f"{self._marked_database.path} might still contain this data; delete "
                    f"{self._marked_database.path}, and copy again into an empty database"
                )

    def _check_target_can_store_names(self, source: Tables, target: Tables) -> None:
        """Raise ImportFailed if the source contains names that the target database cannot store.

        A Postgres database cannot store a name that contains a NUL character, or an indexed name
        that exceeds the size limit for index entries.
        """
        owners: list[str] = []
        # Only a Postgres database rejects a NUL character.
        try:
            target.database.read(lambda: fetch_rows("SELECT CAST(? AS text)", "\0"), snapshot=False)
        except StorageError:
            with suppress(StorageError):
                owners = source.database.read(
                    source.find_owners_of_names_postgres_rejects, snapshot=False
                )
        if owners:
            raise ImportFailed(
                f"nothing was copied, because {target.database.path} cannot store names with NUL "
                f"characters or more than {MAX_NAME_BYTES:,} bytes; in {self._source_path}, "
                f"delete or rename these {source.noun}s: "
                f"{', '.join(f'{name:.200}' for name in owners)}"
            )

    def _copy_rows_and_find_owners_of_differing_rows(
        self, source: Tables, target: Tables
    ) -> Flow[list[str]]:
        """Copy all tables of the checkpointer or the store, then compare the source and the target.

        Returns:
            The threads or namespaces that have different rows in the source and in the target.
        """
        for table in source.tables:
            number = table.key.split(", ")[0]
            last_number = partial(
                fetch_rows, f"SELECT coalesce(max({number}), 0) FROM {table.name}"
            )
            page = Page([], table.key_before(target.database.read(last_number)[0][0]))
            while (page := (yield from source.read_page(table, page.last_key))).rows:
                target.database.write(partial(_execute, target.build_inserts(table, page.rows)))
                self.progress(len(page.rows))
        settings = yield from source.read_settings()
        target.database.write(partial(target.store_settings_after_copy, settings))
        differing = set[str]()
        for table in source.tables:
            differing |= yield from self._find_owners_of_differing_rows(source, target, table)
        return sorted(differing)

    def _find_owners_of_differing_rows(
        self, source: Tables, target: Tables, table: Table
    ) -> Flow[set[str]]:
        """Return the threads or namespaces whose rows differ between the source and the target.

        The order of the rows is ignored, because the source and the target can return the same rows
        in different orders.
        """
        source_page = target_page = Page([], table.key_before(0))
        unmatched: dict[bytes, Any] = {}
        # If the database connection is lost, this generator is run again from the beginning. So set
        # the number of compared rows to 0 here, so that no row is counted twice.
        self.row_counts[table.name] = 0
        while True:
            source_page = yield from source.read_page(table, source_page.last_key)
            target_page = target.database.read(
                partial(target.read_page, table, target_page.last_key)
            )
            if not source_page.rows and not target_page.rows:
                return {source.format_owner(owner) for owner in unmatched.values()}
            self.row_counts[table.name] += len(source_page.rows)
            for row in chain(source_page.rows, target_page.rows):
                data = repr(row).encode(errors="surrogatepass")
                digest = hashlib.blake2b(data, digest_size=16).digest()
                if unmatched.pop(digest, None) is None:
                    unmatched[digest] = row[0]


def _execute(statements: list[Statement]) -> Flow[None]:
    """Execute statements in one transaction."""
    yield statements
