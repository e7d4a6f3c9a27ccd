"""Copies of the tables of threads and items into another database: resumable, and compared.

Rows keep their keys and are copied in the order of these, so the rows that a target has say where a
copy goes on. Each row is opened with the key of the source, and sealed with that of the target.
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
from perdure.checkpointers.assistants import assistant_associated_data
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import (
    ClientMetadata,
    build_client_search_keys,
    build_search_keys,
    checkpoint_associated_data,
    content_hash,
    item_associated_data,
    metadata_tags,
    pack_id,
    unpack_id,
)
from perdure.checkpointers.removal_records import record_associated_data
from perdure.checkpointers.values import unpack
from perdure.errors import ConfigurationError, CorruptRecord, ImportFailed, StorageError
from perdure.storage.database import Database, split_script
from perdure.storage.encryption import AssociatedData
from perdure.storage.flow import NO_LIMIT, Flow, NamedSQL, Row, Statement, fetch_rows
from perdure.stores.namespaces import decode_path
from perdure.stores.whole_store import WholeStore

_PAGE_BYTES: Final = 4 << 20  # of a page of rows, or one row that is larger
_PAGE_ROWS: Final = 1000
_AT_ONCE: Final = 64  # rows of one statement
_TOP: Final = b"\xff" * 17  # comes after every id
_TOP_TEXT: Final = "\U0010ffff"
_NAME_BYTES: Final = 2600  # an index of Postgres takes a third of a page
_NAMED: Final = 20  # of what differs
_BEGUN: Final = "SELECT value FROM settings WHERE name = 'copy'"
_BEGIN: Final = "INSERT INTO settings (name, value) VALUES ('copy', ?)"
_DONE: Final = "DELETE FROM settings WHERE name = 'copy'"


class Table(NamedTuple):
    """A table, by the columns that are copied.

    `owner` are expressions that name the owner of a row `r`, and `joins` what they take. `names`
    are columns of text that users choose, `keyed` others of which there is an index, `large` those
    of any length. Of a row with its owner, `ids` are the places of ids, `flags` of what is true or
    false, and `sealed` what binds the last columns to it. `top` comes after what follows the first
    column in a key.
    """

    name: str
    columns: str
    owner: str
    joins: str = ""
    key: str = "id"
    names: str = ""
    keyed: str = ""
    large: str = ""
    ids: Sequence[int] = ()
    flags: Sequence[int] = ()
    sealed: Callable[[Sequence[Any]], Sequence[AssociatedData]] = lambda row: ()
    top: Any = _TOP

    def page(self, after: Sequence[Any]) -> Flow[list[Row]]:
        """The next rows after a key, as many as may be held: first the owner, then the columns."""
        marks = ", ".join("?" for _ in after)
        rest = f"FROM {self.name} WHERE ({self.key}) > ({marks}) ORDER BY {self.key} LIMIT ?"
        columns = _each(self.names, self.keyed, self.large)
        sizes = " + ".join(f"coalesce(length({column}), 0)" for column in columns)
        rows = yield Statement(f"SELECT {sizes} {rest}", (*after, _PAGE_ROWS))
        total = accumulate(size for (size,) in rows)
        limit = max(1, sum(size <= _PAGE_BYTES for size in total))
        sql = (
            f"SELECT {self.owner}, {_of(self.columns)} FROM (SELECT * {rest}) AS r {self.joins} "
            f"ORDER BY {_of(self.key)}"
        )
        return (yield Statement(sql, (*after, limit)))  # type: ignore[no-any-return]

    def insert(self, rows: Sequence[Row]) -> list[Statement]:
        """The statements that add rows of the columns, unless their key is there already."""
        marks = f"({', '.join('?' for _ in self.columns.split(', '))})"
        made, start = [], 0
        for width in (_AT_ONCE, 1):
            stop = len(rows) - len(rows) % width
            sql = (
                f"INSERT INTO {self.name} ({self.columns}) VALUES {', '.join([marks] * width)} "
                "ON CONFLICT DO NOTHING"
            )
            flat = [[*chain(*rows[at : at + width])] for at in range(start, stop, width)]
            if flat:
                made.append(Statement(sql, flat, execute_many=True))
            start = stop
        return made

    def first_key(self, last: int) -> list[Any]:
        """What comes before all keys that begin with a number."""
        return [last - 1, *(self.top for _ in self.key.split(", ")[1:])]


def _each(*columns: str) -> list[str]:
    return [column for some in columns for column in some.split(", ") if column]


def _of(columns: str) -> str:
    return ", ".join(f"r.{column}" for column in columns.split(", "))


@dataclass
class Tables:
    """One end of a copy: the tables of a component, in the order in which they are copied.

    `open` opens what a column holds, and `shut` is how it is stored.
    """

    database: Database
    sql: NamedSQL
    open: Callable[[Any, AssociatedData], Any]
    shut: Callable[[Any, AssociatedData], Any]
    tables: ClassVar[Sequence[Table]]
    noun: ClassVar[str]  # of an owner

    def opened(self, table: Table, row: Row) -> Row:
        """A row, owner first, as it is in all databases; CorruptRecord: it was damaged."""
        out = [*row]
        for at in table.ids:
            out[at] = unpack_id(out[at])
        for at in table.flags:
            out[at] = bool(out[at])
        for at, place in enumerate(reversed(table.sealed(out)), 1):
            out[-at] = None if out[-at] is None else self.open(out[-at], place)
        return tuple(out)

    def sealed(self, table: Table, row: Row) -> Row:
        """The columns of a row that was opened elsewhere, as they are stored here."""
        out = [*row]
        for at, place in enumerate(reversed(table.sealed(row)), 1):
            out[-at] = None if out[-at] is None else self.shut(out[-at], place)
        for at in table.ids:
            out[at] = pack_id(out[at])
        return tuple(out[len(row) - len(table.columns.split(", ")) :])

    def writes(self, table: Table, rows: Sequence[Row]) -> list[Statement]:
        """The statements that add rows which were opened elsewhere."""
        return table.insert([self.sealed(table, row) for row in rows])

    def shown(self, owner: Any) -> str:
        """An owner by its name."""
        return repr(owner)

    def settings(self) -> Flow[list[Row]]:
        """What is recorded beside the tables."""
        return []
        yield

    def finish(self, settings: list[Row]) -> Flow[None]:
        """What comes after all rows, with the settings of the source."""
        yield [self.sql("raise_keys_after_copy"), self.sql("analyze_tables")]

    def unfit(self) -> Flow[list[str]]:
        """The owners of names with NUL, or too long; StorageError: the database has none."""
        owners = []
        for table in self.tables:
            sql = f"SELECT {table.owner} FROM {table.name} AS r {table.joins} WHERE"
            for name in _each(table.names):
                named = Statement(f"{sql} instr(r.{name}, ?) > 0", ("\0",))
                owners += [self.shown(row[0]) for row in (yield named)]
            for name in _each(table.names, table.keyed):
                long = Statement(f"{sql} length(CAST(r.{name} AS blob)) > ?", (_NAME_BYTES,))
                owners += [self.shown(row[0]) for row in (yield long)]
        return sorted({*owners})


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
    """Threads with their logs, checkpoints and pending writes; what finds them is made anew."""

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
            names="thread_id",
            large="client_metadata, list_entry",
            sealed=lambda row: [("client", row[0]), ("title", row[0])],
        ),
        Table(
            "namespaces",
            "namespace_key, thread_key, checkpoint_ns, explicit_head",
            *_OF_THREAD,
            key="namespace_key",
            names="checkpoint_ns",
        ),
        Table("logs", "log_key, thread_key, channel", *_OF_THREAD, key="log_key", names="channel"),
        Table(
            "items",
            "row_key, content_hash, stored_at, body",
            *_OF_LOG,
            key="row_key",
            large="body",
            flags=[3],  # the hash depends on the key; aliases have none
            sealed=lambda row: [item_associated_data(row[0], row[1], row[2] & 0xFFFFFFFF)],
        ),
        Table(
            "checkpoints",
            "row_key, namespace_key, checkpoint_id, parent_id, run_start, put_at, body",
            *_OF_NAMESPACE,
            key="row_key",
            keyed="checkpoint_id",
            large="body",
            ids=[4, 5],
            sealed=lambda row: [checkpoint_associated_data(row[0], row[1], (row[2], *row[4:8]))],
        ),
        Table(
            "writes",
            "namespace_key, checkpoint_id, task_id, task_path, body",
            *_OF_NAMESPACE,
            key="namespace_key, checkpoint_id, task_id",
            names="task_path",
            keyed="checkpoint_id, task_id",
            large="body",
            ids=[3, 4],
            sealed=lambda row: [("writes", *row[:2], *row[3:6])],
        ),
        Table(
            "removals",
            "removed_at, thread_hash, number, body",
            "'a removal record'",
            key="removed_at, thread_hash",
            large="body",
            sealed=lambda row: [record_associated_data(row[2], row[3])],
        ),
        Table(
            "runs",
            "thread_key, seq, run_id, status, owner, graph_id, attempt, cancel_action, created_at, "
            "updated_at, not_before, details, error, request",
            *_OF_THREAD,
            key="thread_key, seq",
            top=NO_LIMIT,
            names="graph_id",
            large="details, error, request",
            sealed=lambda row: [(name, row[0], row[3]) for name in ("about", "error", "request")],
        ),
        Table(
            "assistants",
            "version, assistant_id, created_at, latest_since, content",
            "'assistant ' || r.assistant_id",
            key="version, assistant_id",
            large="content",
            sealed=lambda row: [assistant_associated_data(row[2], row[1])],
            top=_TOP_TEXT,
        ),
        Table(
            "crons",
            "created_at, cron_id, thread_id, next_at, updated_at, content",
            "'cron ' || r.cron_id",
            key="created_at, cron_id",
            large="content",
            sealed=lambda row: [("cron", row[2])],
            top=_TOP_TEXT,
        ),
    )

    @classmethod
    def of(cls, saver: Checkpointer) -> ThreadTables:
        """Those of a checkpointer."""
        reader = saver._reader
        return cls(saver.database, reader.sql, reader.seal.unseal, reader.seal.seal, reader)

    def opened(self, table: Table, row: Row) -> Row:
        """See `Tables.opened`."""
        columns = super().opened(table, row)
        if table.name == "threads":  # what finds one depends on the key
            return (*columns[:-4], None, None, *columns[-2:])
        return columns

    def sealed(self, table: Table, row: Row) -> Row:
        """See `Tables.sealed`."""
        if table.name == "threads":
            found = None if row[3] else b""  # none that began tells nothing
            text, _, told = (None,) * 3 if row[-1] is None else unpack(row[-1])
            if text is not None and told is not None:
                told = self.reader.codec.decode(told)
                found = build_search_keys(self.reader.seal, row[0], text, told)
            client = None if row[-2] is None else ClientMetadata(*json.loads(row[-2]))
            by_client = client and build_client_search_keys(self.reader.seal, row[0], client)
            row = (*row[:-4], found, by_client, *row[-2:])
        if table.name == "items":
            h = content_hash(self.reader.seal, row[2] >> 32, row[-1]) if row[3] else 0
            row = (*row[:3], h, *row[4:])
        return super().sealed(table, row)

    def settings(self) -> Flow[list[Row]]:
        """Return a settings row: the key of the hashes in removal records, and the owner record."""
        yield from self.reader.removals.load_key(read_only=True)
        return [(self.reader.removals.key, (yield from owner_record.read_record()))]

    def finish(self, settings: list[Row]) -> Flow[None]:
        """See `Tables.finish`."""
        yield from super().finish(settings)
        if settings[0][0] is not None:
            yield from self.reader.removals.replace_key(settings[0][0])
        if settings[0][1]:
            yield from owner_record.add_record()

    def removals(self) -> set[Row]:
        """Return the thread hash and the number of each removal record."""
        sql = "SELECT thread_hash, number FROM removals"
        return {*self.database.read(lambda: fetch_rows(sql), snapshot=False)}

    def writes(self, table: Table, rows: Sequence[Row]) -> list[Statement]:
        """See `Tables.writes`."""
        made = super().writes(table, rows)
        if table.name == "checkpoints":
            made += _TAGS.insert([(tag, row[2]) for row in rows for tag in self._tags(row[-1])])
        return made

    def _tags(self, body: bytes) -> list[int]:
        return metadata_tags(self.reader.seal, self.reader.codec.decode(unpack(body)[0][1]))


_OF_PATH: Final = "n.path", "LEFT JOIN store_namespaces n ON n.ns = r.ns"
_OF_VERSION: Final = (
    "n.path",
    "LEFT JOIN store_items i ON i.id = r.id LEFT JOIN store_versions v ON v.id = r.id "
    "LEFT JOIN store_namespaces n ON n.ns = coalesce(i.ns, v.ns)",
)
_COMMON: Final = "id, ns, key, version, created_at, valid_from"


def _of_item(path: bytes, key: str, version: int) -> list[AssociatedData]:
    return [(name, path.decode(), key, version) for name in ("value", "provenance")]


@dataclass
class StoreTables(Tables):
    """Items with their versions and vectors; compact indexes are made anew by searches."""

    noun = "namespace"
    tables = (
        Table(
            "store_namespaces", "ns, path, items, bytes, changes", "r.path", key="ns", keyed="path"
        ),
        Table(
            "store_items",
            f"{_COMMON}, expires_at, made, ttl, size, searched, value, provenance",
            *_OF_PATH,
            names="key",
            large="value, provenance",
            flags=[-3],
            sealed=lambda row: _of_item(row[0], *row[3:5]),
        ),
        Table(
            "store_versions",
            f"seq, {_COMMON}, valid_to, made, searched, value, provenance",
            *_OF_PATH,
            key="seq",
            names="key",
            large="value, provenance",
            flags=[-3],
            sealed=lambda row: _of_item(row[0], *row[4:6]),
        ),
        Table(
            "store_index",
            "id, model, fields, vectors",
            *_OF_VERSION,
            large="fields, vectors",
            sealed=lambda row: [("vectors", row[1])],
        ),
        Table(
            "store_pending",
            "id, attempts, error",
            *_OF_VERSION,
            large="error",
            sealed=lambda row: [("pending", row[1])],
        ),
    )

    @classmethod
    def of(cls, store: WholeStore) -> StoreTables:
        """Those of a store."""
        records = store._parts.records

        def opened(stored: Any, place: Any) -> Any:
            if place[0] == "vectors":
                return records.decode_vectors(stored, place[1])
            return records.decode_text(stored, place)

        def shut(value: Any, place: Any) -> Any:
            if place[0] == "vectors":
                return records.encode_vectors(value, place[1])
            return records.encode_text(value, place)

        return cls(store.database, store._parts.sql, opened, shut)

    def shown(self, owner: Any) -> str:
        """See `Tables.shown`."""
        return repr(decode_path(owner))

    def settings(self) -> Flow[list[Row]]:
        """The model of the vectors, counters, and which fields are searched."""
        return (yield self.sql("settings"))  # type: ignore[no-any-return]

    def finish(self, settings: list[Row]) -> Flow[None]:
        """See `Tables.finish`. How words are kept is the target's to say."""
        for name, value in settings:
            if name == "words":
                ((kept,),) = yield self.sql("get_setting", name)
                value = json.dumps(json.loads(kept) | {"fields": json.loads(value)["fields"]})
            yield self.sql("set_setting", name, str(value))
        yield split_script(self.sql["raise_keys_after_copy"])


@dataclass
class _Pages:
    """Reads a table page by page."""

    end: Tables
    table: Table
    after: Sequence[Any]

    def next(self) -> Flow[list[Row]]:
        """The next rows, opened; none at the end."""
        rows = yield from self.table.page(self.after)
        if not rows:
            return []
        columns = self.table.columns.split(", ")
        first = len(rows[0]) - len(columns)
        self.after = [
            rows[-1][first + columns.index(column)] for column in self.table.key.split(", ")
        ]
        if any(None in row[:first] for row in rows):
            raise CorruptRecord(
                f"{self.end.database.path}: a row of {self.table.name} up to {self.after!r} has no "
                "owner: the database is damaged; restore it from a backup"
            )
        return [self.end.opened(self.table, row) for row in rows]


@dataclass
class Copy:
    """Copies the tables of some components, each from its source to its target.

    Each component is read in one snapshot. `progress` is called with how many rows were copied,
    `last` when both are the same, before the copy counts as complete.
    """

    ends: Sequence[tuple[Tables, Tables]]
    progress: Callable[[int], object] = lambda count: None
    last: Callable[[], object] = lambda: None
    rows: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        """Copy what is not in the target yet, and compare all of it; `rows` says how many of each.

        Raises:
            ConfigurationError: The target holds something else.
            ImportFailed: It cannot hold some names, or it is not the same in the end.
            CorruptRecord: A row was damaged.
        """
        self._begin()
        differing = []
        for source, target in self.ends:
            owners = source.database.read(partial(self._copied, source, target))
            differing += [f"{source.noun} {name}" for name in owners]
        if differing:
            more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
            raise ImportFailed(
                f"{self._home.path} is not the same as {self._path}: "
                f"{', '.join(differing[:_NAMED])}{more}; one of both was written to "
                "meanwhile, or a row is damaged: stop the writers, and copy into an empty database"
            )
        self._check_not_erased()
        self.last()
        self._home.write(lambda: fetch_rows(_DONE))

    def __post_init__(self) -> None:
        self._path = self.ends[0][0].database.path
        self._home = self.ends[0][1].database  # where it is recorded that a copy is not complete

    def _begin(self) -> None:
        if self.ends[0][0].database.read(lambda: fetch_rows(_BEGUN)):
            raise ConfigurationError(
                f"{self._path} is a copy that was not completed; copy to it again first"
            )
        begun = self._home.read(lambda: fetch_rows(_BEGUN))
        if begun and begun[0][0] != self._path.encode():
            raise ConfigurationError(
                f"{self._home.path} holds a part of {begun[0][0].decode()}, not of {self._path}: "
                "copy that to its end, or give an empty database"
            )
        for source, target in self.ends:
            for table in () if begun else target.tables:
                if target.database.read(partial(fetch_rows, f"SELECT 1 FROM {table.name} LIMIT 1")):
                    raise ConfigurationError(
                        f"{target.database.path} is not empty: it has rows in {table.name}; "
                        "copy into a new database"
                    )
            self._check_names(source, target)
        if not begun:
            self._home.write(lambda: fetch_rows(_BEGIN, self._path.encode()))

    def _check_not_erased(self) -> None:
        """Raise ImportFailed if something was erased from the source during the copy."""
        for source, target in self.ends:
            if not isinstance(source, ThreadTables) or not isinstance(target, ThreadTables):
                continue
            if source.removals() - target.removals():
                raise ImportFailed(
                    f"something was erased from {self._path} while it was copied, and "
                    f"{self._home.path} may still contain it; delete {self._home.path}, and copy "
                    "again into an empty database"
                )

    def _check_names(self, source: Tables, target: Tables) -> None:
        owners: list[str] = []
        try:
            target.database.read(lambda: fetch_rows("SELECT CAST(? AS text)", "\0"), snapshot=False)
        except StorageError:
            with suppress(StorageError):
                owners = source.database.read(source.unfit, snapshot=False)
        if owners:
            raise ImportFailed(
                f"{target.database.path} takes no text with NUL, and no ids, keys and names of "
                f"more than {_NAME_BYTES:,} bytes; nothing was copied. Delete or rename these "
                f"{source.noun}s of {self._path}: {', '.join(f'{name:.200}' for name in owners)}"
            )

    def _copied(self, source: Tables, target: Tables) -> Flow[list[str]]:
        """Copy and compare. Returns the names of those that differ."""
        for table in source.tables:
            number = table.key.split(", ")[0]
            last = partial(fetch_rows, f"SELECT coalesce(max({number}), 0) FROM {table.name}")
            pages = _Pages(source, table, table.first_key(target.database.read(last)[0][0]))
            while rows := (yield from pages.next()):
                target.database.write(partial(_written, target.writes(table, rows)))
                self.progress(len(rows))
        settings = yield from source.settings()
        target.database.write(partial(target.finish, settings))
        differing = set[str]()
        for table in source.tables:
            differing |= yield from self._compared(source, target, table)
        return sorted(differing)

    def _compared(self, source: Tables, target: Tables, table: Table) -> Flow[set[str]]:
        """The owners of rows that are not in both; the order of pages may not be the same."""
        ours = _Pages(source, table, table.first_key(0))
        theirs = _Pages(target, table, table.first_key(0))
        alone: dict[bytes, Any] = {}
        self.rows[table.name] = 0  # a read whose connection was lost is done anew
        while True:
            here = yield from ours.next()
            there = target.database.read(theirs.next)
            if not here and not there:
                return {source.shown(owner) for owner in alone.values()}
            self.rows[table.name] += len(here)
            for row in chain(here, there):
                data = repr(row).encode(errors="surrogatepass")
                digest = hashlib.blake2b(data, digest_size=16).digest()
                if alone.pop(digest, None) is None:
                    alone[digest] = row[0]


def _written(made: list[Statement]) -> Flow[None]:
    yield made
