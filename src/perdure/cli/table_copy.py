"""Copy the tables of threads and items into another database, then compare the two databases.

A copied row keeps its primary key. Rows are copied in primary key order, so that an interrupted
copy can continue at the highest primary key in the target. Each row is decrypted with the
source's encryption key and encrypted with the target's encryption key.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any, ClassVar, Final, NamedTuple

from perdure.checkpointers import owner_record
from perdure.checkpointers.assistants import build_assistant_associated_data
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import (
    ClientMetadata,
    build_checkpoint_associated_data,
    build_client_search_keys,
    build_item_associated_data,
    build_thread_search_keys,
    compute_item_hash,
    compute_metadata_index_tags,
    decode_stored_id,
    encode_id_for_storage,
)
from perdure.checkpointers.removal_records import build_removal_record_associated_data
from perdure.checkpointers.values import unpack
from perdure.errors import ConfigurationError, CorruptRecord, ImportFailed, StorageError
from perdure.storage.database import Database, split_script
from perdure.storage.encryption import AssociatedData
from perdure.storage.flow import NO_LIMIT, Flow, NamedSQL, Row, Statement, fetch_rows
from perdure.stores.namespaces import decode_namespace_path
from perdure.stores.whole_store import WholeStore

# Maximum total size, in bytes, of the rows read per page. A larger row is read on its own.
_PAGE_BYTES: Final = 4 << 20
_PAGE_ROWS: Final = 1000  # Maximum number of rows read per page.
# Number of rows per INSERT statement.
_ROWS_PER_INSERT: Final = 64
_MAX_ID: Final = b"\xff" * 17  # This value sorts after every packed id.
# `_MAX_TEXT` sorts after every text value that occurs in a primary key.
_MAX_TEXT: Final = "\U0010ffff"
# Maximum size, in bytes, of an indexed text. Postgres limits an index entry to a third of a page.
_MAX_NAME_BYTES: Final = 2600
# Maximum number of differing threads or namespaces listed in an error message.
_MAX_LISTED_OWNERS: Final = 20
_SELECT_COPY_MARK: Final = "SELECT value FROM settings WHERE name = 'copy'"
_INSERT_COPY_MARK: Final = "INSERT INTO settings (name, value) VALUES ('copy', ?)"
_DELETE_COPY_MARK: Final = "DELETE FROM settings WHERE name = 'copy'"


class Table(NamedTuple):
    """A table to copy, and the names of the columns to copy.

    Attributes:
        name: The name of the table.
        columns: The copied columns, separated by ", ".
        owner: SQL expressions that name the owner of a row `r`, such as the id of its thread.
        joins: The joins that these expressions need.
        key: The columns of the primary key.
        name_columns: Columns of text that users choose.
        indexed_columns: Other columns that have an index.
        large_columns: Columns without a limit of length.
        id_positions: The positions of ids in a row that begins with its owner. Such ids are stored
            as packed bytes; see `encode_id_for_storage`.
        flag_positions: The positions, in such a row, of values that are compared as booleans.
        associated_data: Returns the associated data of the encrypted columns, which are the last
            columns of the row.
        max_key_part: A value that sorts after all values of the second and later key columns.
    """

    name: str
    columns: str
    owner: str
    joins: str = ""
    key: str = "id"
    name_columns: str = ""
    indexed_columns: str = ""
    large_columns: str = ""
    id_positions: Sequence[int] = ()
    flag_positions: Sequence[int] = ()
    associated_data: Callable[[Sequence[Any]], Sequence[AssociatedData]] = lambda row: ()
    max_key_part: Any = _MAX_ID

    def read_page(self, after: Sequence[Any]) -> Flow[list[Row]]:
        """Read one page of the rows after a key.

        Each returned row begins with the values that identify its owner (a thread or a namespace),
        followed by the values of the copied columns.
        """
        marks = ", ".join("?" for _ in after)
        rest = f"FROM {self.name} WHERE ({self.key}) > ({marks}) ORDER BY {self.key} LIMIT ?"
        columns = _split_columns(self.name_columns, self.indexed_columns, self.large_columns)
        sizes = " + ".join(f"coalesce(length({column}), 0)" for column in columns)
        rows = yield Statement(f"SELECT {sizes} {rest}", (*after, _PAGE_ROWS))
        total = accumulate(size for (size,) in rows)
        limit = max(1, sum(size <= _PAGE_BYTES for size in total))
        sql = (
            f"SELECT {self.owner}, {_qualify_columns(self.columns)} "
            f"FROM (SELECT * {rest}) AS r {self.joins} "
            f"ORDER BY {_qualify_columns(self.key)}"
        )
        return (yield Statement(sql, (*after, limit)))  # type: ignore[no-any-return]

    def build_inserts(self, rows: Sequence[Row]) -> list[Statement]:
        """Build `INSERT` statements that skip rows whose key already exists."""
        marks = f"({', '.join('?' for _ in self.columns.split(', '))})"
        statements, start = [], 0
        for width in (_ROWS_PER_INSERT, 1):
            stop = len(rows) - len(rows) % width
            sql = (
                f"INSERT INTO {self.name} ({self.columns}) VALUES {', '.join([marks] * width)} "
                "ON CONFLICT DO NOTHING"
            )
            parameters = [
                [*chain(*rows[position : position + width])]
                for position in range(start, stop, width)
            ]
            if parameters:
                statements.append(Statement(sql, parameters, execute_many=True))
            start = stop
        return statements

    def key_before(self, number: int) -> list[Any]:
        """Return a key that sorts just before all keys whose first part is `number`."""
        return [number - 1, *(self.max_key_part for _ in self.key.split(", ")[1:])]


def _split_columns(*columns: str) -> list[str]:
    """Split comma-separated lists of column names."""
    return [name for names in columns for name in names.split(", ") if name]


def _qualify_columns(columns: str) -> str:
    """Prefix each column name in a comma-separated list with the table alias `r`."""
    return ", ".join(f"r.{column}" for column in columns.split(", "))


@dataclass
class Tables:
    """The tables of the checkpointer or the store, in either the source or the target database.

    The tables are copied in the order of the `tables` attribute.

    Attributes:
        database: The database.
        sql: The statements of the component.
        decrypt: Returns the content of an encrypted value.
        encrypt: Returns the encrypted value for a content.
        tables: The tables.
        noun: The noun for the owner of a row in messages, such as `thread`.
    """

    database: Database
    sql: NamedSQL
    decrypt: Callable[[Any, AssociatedData], Any]
    encrypt: Callable[[Any, AssociatedData], Any]
    tables: ClassVar[Sequence[Table]]
    noun: ClassVar[str]

    def decrypt_row(self, table: Table, row: Row) -> Row:
        """Decrypt a row.

        Decrypted rows with the same content are equal, even if they come from different databases.

        Raises:
            CorruptRecord: The row is damaged.
        """
        values = [*row]
        for position in table.id_positions:
            values[position] = decode_stored_id(values[position])
        for position in table.flag_positions:
            values[position] = bool(values[position])
        for position, associated_data in enumerate(reversed(table.associated_data(values)), 1):
            values[-position] = (
                None
                if values[-position] is None
                else self.decrypt(values[-position], associated_data)
            )
        return tuple(values)

    def encrypt_row(self, table: Table, row: Row) -> Row:
        """Encrypt a row's content, and return the column values to store in this database."""
        values = [*row]
        for position, associated_data in enumerate(reversed(table.associated_data(row)), 1):
            values[-position] = (
                None
                if values[-position] is None
                else self.encrypt(values[-position], associated_data)
            )
        for position in table.id_positions:
            values[position] = encode_id_for_storage(values[position])
        return tuple(values[len(row) - len(table.columns.split(", ")) :])

    def build_inserts(self, table: Table, rows: Sequence[Row]) -> list[Statement]:
        """Encrypt rows, and return the statements that insert them."""
        return table.build_inserts([self.encrypt_row(table, row) for row in rows])

    def format_owner(self, owner: Any) -> str:
        """Format the thread id or namespace that a row belongs to, for error messages."""
        return repr(owner)

    def read_settings(self) -> Flow[list[Row]]:
        """Read the settings of the checkpointer or store, which are copied after all tables."""
        return []
        # This statement is unreachable. It makes the method a generator function, because a `Flow`
        # is a generator.
        yield

    def store_settings_after_copy(self, settings: list[Row]) -> Flow[None]:
        """Store the source database's settings in this target after all rows have been copied.

        Also make sure that rows inserted later get higher keys than the copied rows.
        """
        yield [self.sql("raise_keys_after_copy"), self.sql("analyze_tables")]

    def find_owners_of_names_postgres_rejects(self) -> Flow[list[str]]:
        """Return the threads or namespaces whose rows contain names that Postgres cannot store.

        Postgres cannot store names that contain NUL characters or are too long.

        Raises:
            StorageError: The database does not have the tables, or it is a Postgres database, which
                has no SQL function `instr`. The names in a Postgres database need no check.
        """
        owners = []
        for table in self.tables:
            sql = f"SELECT {table.owner} FROM {table.name} AS r {table.joins} WHERE"
            for name in _split_columns(table.name_columns):
                with_nul = Statement(f"{sql} instr(r.{name}, ?) > 0", ("\0",))
                owners += [self.format_owner(row[0]) for row in (yield with_nul)]
            for name in _split_columns(table.name_columns, table.indexed_columns):
                too_long = Statement(
                    f"{sql} length(CAST(r.{name} AS blob)) > ?", (_MAX_NAME_BYTES,)
                )
                owners += [self.format_owner(row[0]) for row in (yield too_long)]
        return sorted({*owners})


# Values of `Table.owner` and `Table.joins` for tables whose rows belong to threads, namespaces or
# logs
_OF_THREAD: Final = "t.thread_id", "LEFT JOIN threads t ON t.thread_key = r.thread_key"
_OF_NAMESPACE: Final = (
    "t.thread_id, n.checkpoint_ns",
    "LEFT JOIN namespaces n ON n.namespace_key = r.namespace_key "
    "LEFT JOIN threads t ON t.thread_key = n.thread_key",
)
_OF_LOG: Final = (
    "t.thread_id, l.channel",
    "LEFT JOIN logs l ON l.log_key = r.row_key >> 32 "
    "LEFT JOIN threads t ON t.thread_key = l.thread_key",
)
_TAGS: Final = Table("tags", "tag, checkpoint_key", "")


@dataclass
class ThreadTables(Tables):
    """The tables of a checkpointer.

    The threads' search keys depend on the encryption key, so they are recomputed for the target.
    """

    reader: CheckpointReader
    noun = "thread"
    tables = (
        Table(
            "threads",
            "thread_key, thread_id, last_seq, generation, created_at, updated_at, may_wait, "
            "status, ttl_minutes, ttl_since, ttl_keeps_latest, newest_removal, search_keys, "
            "client_search_keys, client_metadata, list_entry",
            "r.thread_id",
            key="thread_key",
            name_columns="thread_id",
            large_columns="client_metadata, list_entry",
            associated_data=lambda row: [("client", row[0]), ("title", row[0])],
        ),
        Table(
            "namespaces",
            "namespace_key, thread_key, checkpoint_ns, explicit_head",
            *_OF_THREAD,
            key="namespace_key",
            name_columns="checkpoint_ns",
        ),
        Table(
            "logs",
            "log_key, thread_key, channel",
            *_OF_THREAD,
            key="log_key",
            name_columns="channel",
        ),
        Table(
            "items",
            "row_key, content_hash, stored_at, body",
            *_OF_LOG,
            key="row_key",
            large_columns="body",
            # Content hashes depend on the encryption key, so compare only whether the hash is zero.
            # An alias (a row that refers to another item) has a hash of 0.
            flag_positions=[3],
            associated_data=lambda row: [
                build_item_associated_data(row[0], row[1], row[2] & 0xFFFFFFFF)
            ],
        ),
        Table(
            "checkpoints",
            "row_key, namespace_key, checkpoint_id, parent_id, run_start, put_at, body",
            *_OF_NAMESPACE,
            key="row_key",
            indexed_columns="checkpoint_id",
            large_columns="body",
            id_positions=[4, 5],
            associated_data=lambda row: [
                build_checkpoint_associated_data(row[0], row[1], (row[2], *row[4:8]))
            ],
        ),
        Table(
            "writes",
            "namespace_key, checkpoint_id, task_id, task_path, body",
            *_OF_NAMESPACE,
            key="namespace_key, checkpoint_id, task_id",
            name_columns="task_path",
            indexed_columns="checkpoint_id, task_id",
            large_columns="body",
            id_positions=[3, 4],
            associated_data=lambda row: [("writes", *row[:2], *row[3:6])],
        ),
        Table(
            "removals",
            "removed_at, thread_hash, number, body",
            "'a removal record'",
            key="removed_at, thread_hash",
            large_columns="body",
            associated_data=lambda row: [build_removal_record_associated_data(row[2], row[3])],
        ),
        Table(
            "runs",
            "thread_key, seq, run_id, status, owner, graph_id, attempt, cancel_action, created_at, "
            "updated_at, not_before, details, error, request",
            *_OF_THREAD,
            key="thread_key, seq",
            max_key_part=NO_LIMIT,
            name_columns="graph_id",
            large_columns="details, error, request",
            associated_data=lambda row: [
                (name, row[0], row[3]) for name in ("about", "error", "request")
            ],
        ),
        Table(
            "assistants",
            "version, assistant_id, created_at, latest_since, content",
            "'assistant ' || r.assistant_id",
            key="version, assistant_id",
            large_columns="content",
            associated_data=lambda row: [build_assistant_associated_data(row[2], row[1])],
            max_key_part=_MAX_TEXT,
        ),
        Table(
            "crons",
            "created_at, cron_id, thread_id, next_at, updated_at, content",
            "'cron ' || r.cron_id",
            key="created_at, cron_id",
            large_columns="content",
            associated_data=lambda row: [("cron", row[2])],
            max_key_part=_MAX_TEXT,
        ),
    )

    @classmethod
    def from_checkpointer(cls, saver: Checkpointer) -> ThreadTables:
        """Return the tables of a checkpointer."""
        reader = saver._reader
        return cls(saver.database, reader.sql, reader.seal.unseal, reader.seal.seal, reader)

    def decrypt_row(self, table: Table, row: Row) -> Row:
        """Decrypt a row, and set its search keys to None.

        Search keys are not compared, because they depend on the encryption key, which can differ
        between the source and the target.
        """
        columns = super().decrypt_row(table, row)
        if table.name == "threads":
            # Replace the search keys with None.
            return (*columns[:-4], None, None, *columns[-2:])
        return columns

    def encrypt_row(self, table: Table, row: Row) -> Row:
        """Recompute a thread's search keys or an item's content hash, and encrypt the row."""
        if table.name == "threads":
            # The search keys of a thread without checkpoints are empty.
            search_keys = None if row[3] else b""
            text, _, metadata = (None,) * 3 if row[-1] is None else unpack(row[-1])
            if text is not None and metadata is not None:
                metadata = self.reader.codec.decode(metadata)
                search_keys = build_thread_search_keys(self.reader.seal, row[0], text, metadata)
            client = None if row[-2] is None else ClientMetadata(*json.loads(row[-2]))
            client_search_keys = client and build_client_search_keys(
                self.reader.seal, row[0], client
            )
            row = (*row[:-4], search_keys, client_search_keys, *row[-2:])
        if table.name == "items":
            new_hash = compute_item_hash(self.reader.seal, row[2] >> 32, row[-1]) if row[3] else 0
            row = (*row[:3], new_hash, *row[4:])
        return super().encrypt_row(table, row)

    def read_settings(self) -> Flow[list[Row]]:
        """Return a checkpointer's settings as a single row with two values.

        The first value is the secret key that is used to hash the thread ids in removal records.
        The second value is True if the database is marked as one in which organisations can own
        threads.
        """
        yield from self.reader.removals.load_hash_key(read_only=True)
        return [(self.reader.removals.key, (yield from owner_record.read_organisations_mark()))]

    def store_settings_after_copy(self, settings: list[Row]) -> Flow[None]:
        """See `Tables.store_settings_after_copy`."""
        yield from super().store_settings_after_copy(settings)
        if settings[0][0] is not None:
            yield from self.reader.removals.replace_key(settings[0][0])
        if settings[0][1]:
            yield from owner_record.add_organisations_mark()

    def read_removals(self) -> set[Row]:
        """Return the columns `thread_hash` and `number` of each removal record."""
        sql = "SELECT thread_hash, number FROM removals"
        return {*self.database.read(lambda: fetch_rows(sql), snapshot=False)}

    def build_inserts(self, table: Table, rows: Sequence[Row]) -> list[Statement]:
        """Encrypt rows, and return the statements that insert them and the checkpoint tags."""
        statements = super().build_inserts(table, rows)
        if table.name == "checkpoints":
            statements += _TAGS.build_inserts(
                [(tag, row[2]) for row in rows for tag in self._build_tags(row[-1])]
            )
        return statements

    def _build_tags(self, body: bytes) -> list[int]:
        """Compute the target's metadata index tags for a checkpoint from its decrypted body."""
        return compute_metadata_index_tags(
            self.reader.seal, self.reader.codec.decode(unpack(body)[0][1])
        )


_OF_PATH: Final = "n.path", "LEFT JOIN store_namespaces n ON n.namespace_key = r.namespace_key"
_OF_VERSION: Final = (
    "n.path",
    "LEFT JOIN store_items i ON i.id = r.id LEFT JOIN store_versions v ON v.id = r.id "
    "LEFT JOIN store_namespaces n ON n.namespace_key = coalesce(i.namespace_key, v.namespace_key)",
)
_COMMON: Final = "id, namespace_key, key, version, created_at, valid_from"


def _item_associated_data(path: bytes, key: str, version: int) -> list[AssociatedData]:
    """Return the encryption's associated data for the `value` and `provenance` of a store item."""
    return [(name, path.decode(), key, version) for name in ("value", "provenance")]


@dataclass
class StoreTables(Tables):
    """The tables of a store.

    The compact search indexes are not copied, because the first search in the target rebuilds them.
    """

    noun = "namespace"
    tables = (
        Table(
            "store_namespaces",
            "namespace_key, path, item_count, byte_count, change_count",
            "r.path",
            key="namespace_key",
            indexed_columns="path",
        ),
        Table(
            "store_items",
            f"{_COMMON}, expires_at, first_id, ttl, size, searchable, value, provenance",
            *_OF_PATH,
            name_columns="key",
            large_columns="value, provenance",
            flag_positions=[-3],
            associated_data=lambda row: _item_associated_data(row[0], *row[3:5]),
        ),
        Table(
            "store_versions",
            f"closing_number, {_COMMON}, valid_to, first_id, searchable, value, provenance",
            *_OF_PATH,
            key="closing_number",
            name_columns="key",
            large_columns="value, provenance",
            flag_positions=[-3],
            associated_data=lambda row: _item_associated_data(row[0], *row[4:6]),
        ),
        Table(
            "store_search_data",
            "id, model_number, fields, vectors",
            *_OF_VERSION,
            large_columns="fields, vectors",
            associated_data=lambda row: [("vectors", row[1])],
        ),
        Table(
            "store_pending_embeddings",
            "id, attempts, error",
            *_OF_VERSION,
            large_columns="error",
            associated_data=lambda row: [("pending", row[1])],
        ),
    )

    @classmethod
    def from_store(cls, store: WholeStore) -> StoreTables:
        """Return the tables of a store."""
        records = store._parts.records

        def decrypt(stored: Any, associated_data: Any) -> Any:
            if associated_data[0] == "vectors":
                return records.decode_row_vectors(stored, associated_data[1])
            return records.decode_text(stored, associated_data)

        def encrypt(value: Any, associated_data: Any) -> Any:
            if associated_data[0] == "vectors":
                return records.encode_row_vectors(value, associated_data[1])
            return records.encode_text(value, associated_data)

        return cls(store.database, store._parts.sql, decrypt, encrypt)

    def format_owner(self, owner: Any) -> str:
        """Format the namespace that a row belongs to, for error messages."""
        return repr(decode_namespace_path(owner))

    def read_settings(self) -> Flow[list[Row]]:
        """Read the store's settings.

        The settings are the embedding model, the searched fields, and the counters of erasures and
        of vectors that were added later.
        """
        return (yield self.sql("settings"))  # type: ignore[no-any-return]

    def store_settings_after_copy(self, settings: list[Row]) -> Flow[None]:
        """See `Tables.store_settings_after_copy`.

        The target keeps its own settings for keyword search, except the list of searched fields,
        which is copied.
        """
        for name, value in settings:
            if name == "words":
                ((own_setting,),) = yield self.sql("get_setting", name)
                value = json.dumps(
                    json.loads(own_setting) | {"fields": json.loads(value)["fields"]}
                )
            yield self.sql("set_setting", name, str(value))
        yield split_script(self.sql["raise_keys_after_copy"])


@dataclass
class _TablePages:
    """Reads a table page by page.

    Attributes:
        tables: The database and its decryption.
        table: The table.
        last_key: The key of the last row that was read.
    """

    tables: Tables
    table: Table
    last_key: Sequence[Any]

    def read_next_page(self) -> Flow[list[Row]]:
        """Read and decrypt the next page of rows.

        Return an empty list if the table has no more rows.
        """
        rows = yield from self.table.read_page(self.last_key)
        if not rows:
            return []
        columns = self.table.columns.split(", ")
        first = len(rows[0]) - len(columns)
        self.last_key = [
            rows[-1][first + columns.index(column)] for column in self.table.key.split(", ")
        ]
        if any(None in row[:first] for row in rows):
            raise CorruptRecord(
                f"the database {self.tables.database.path} is damaged: the table {self.table.name} "
                f"contains an orphaned row, at or before the key {self.last_key!r}; restore the "
                "database from a backup"
            )
        return [self.tables.decrypt_row(self.table, row) for row in rows]


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
                f"{', '.join(differing[:_MAX_LISTED_OWNERS])}{more}; one of the "
                "databases was changed during the copy, or a row is damaged; stop all writers, and "
                "copy into an empty database"
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
                f"{self._source_path} is itself an incomplete copy of another database; complete "
                "that copy first, by repeating the command that started it"
            )
        copy_mark = self._marked_database.read(lambda: fetch_rows(_SELECT_COPY_MARK))
        if copy_mark and copy_mark[0][0] != self._source_path.encode():
            raise ConfigurationError(
                f"the target {self._marked_database.path} contains an incomplete copy of another "
                f"database, {copy_mark[0][0].decode()}; pass an empty target, or complete that "
                "copy first"
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
            if not isinstance(source, ThreadTables) or not isinstance(target, ThreadTables):
                continue
            if source.read_removals() - target.read_removals():
                raise ImportFailed(
                    f"data was erased from {self._source_path} during the copy, and the copy "
                    f"{self._marked_database.path} may still contain this data; delete "
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
                f"nothing was copied, because {target.database.path} cannot store text that "
                f"contains NUL characters, or ids, keys and names longer than {_MAX_NAME_BYTES:,} "
                f"bytes; in {self._source_path}, delete or rename each {source.noun} listed here: "
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
            pages = _TablePages(
                source, table, table.key_before(target.database.read(last_number)[0][0])
            )
            while rows := (yield from pages.read_next_page()):
                target.database.write(partial(_execute, target.build_inserts(table, rows)))
                self.progress(len(rows))
        settings = yield from source.read_settings()
        target.database.write(partial(target.store_settings_after_copy, settings))
        differing = set[str]()
        for table in source.tables:
            differing |= yield from self._find_owners_of_differing_rows(source, target, table)
        return sorted(differing)

    def _find_owners_of_differing_rows(
        self, source: Tables, target: Tables, table: Table
    ) -> Flow[set[str]]:
        """Return the threads or namespaces with rows that exist in only one of the two databases.

        The source and the target can return rows in different orders.
        """
        source_pages = _TablePages(source, table, table.key_before(0))
        target_pages = _TablePages(target, table, table.key_before(0))
        unmatched: dict[bytes, Any] = {}
        # Reset the counter, because this generator is restarted if the database connection is lost,
        # and must not count the same rows twice.
        self.row_counts[table.name] = 0
        while True:
            source_rows = yield from source_pages.read_next_page()
            target_rows = target.database.read(target_pages.read_next_page)
            if not source_rows and not target_rows:
                return {source.format_owner(owner) for owner in unmatched.values()}
            self.row_counts[table.name] += len(source_rows)
            for row in chain(source_rows, target_rows):
                data = repr(row).encode(errors="surrogatepass")
                digest = hashlib.blake2b(data, digest_size=16).digest()
                if unmatched.pop(digest, None) is None:
                    unmatched[digest] = row[0]


def _execute(statements: list[Statement]) -> Flow[None]:
    """Execute statements in one transaction."""
    yield statements
