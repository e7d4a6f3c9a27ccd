"""Export as JSON Lines, a version a line, oldest first; import of them, and of other stores."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, cast

from langgraph.store.base import BaseStore, SearchItem, SearchOp

from perdure.effects import run
from perdure.errors import (
    ConfigurationError,
    ImportFailed,
    NotADatabase,
    PerdureError,
    StorageError,
)
from perdure.settings import is_dsn
from perdure.storage.flow import Flow, Row, Statement, rows_of
from perdure.storage.sqlite import SQLiteDatabase
from perdure.stores.base import PROVENANCE, Namespace, Progress, TransferReport
from perdure.stores.missing import MissingEmbeddings
from perdure.stores.namespaces import labels, span
from perdure.stores.parts import Parts
from perdure.stores.puts import Changes, ItemWriter, New, Put, Times
from perdure.stores.reading import ended, micros, moment, provenance_of
from perdure.stores.values import check_size, decode, meant
from perdure.stores.vectors import Model

PAGE = 500  # keys, lines, items or namespaces read, or lines written, at a time
_LOG = logging.getLogger("perdure")
_MINUTE = 60_000_000
_MOST = 1 << 60  # versions: SQLite counts in 64 bits
_TIMES: Final = ("created_at", "valid_from", "valid_to", "expires_at")
_FIELDS: Final = ("namespace", "key", "value", "version", *_TIMES, "ttl", "index", "provenance")


class ItemVersion(NamedTuple):
    """A version of an item; times in microseconds."""

    put: Put
    version: int | None = None  # None: it is put as the newest, unless that is equal
    created: int | None = None  # when the key was first put
    since: int | None = None
    until: int | None = None  # None: it is the present one
    expires: int | None = None


Line = tuple[str, Mapping[str, Any] | ItemVersion | ImportFailed]
"""What an item is called in messages, and the item; or why it cannot be read."""
Lines = Generator[Line, None, None]


class Transfer:
    """Brings items of a store out and in."""

    def __init__(self, parts: Parts, missing: MissingEmbeddings) -> None:
        self._parts = parts
        self._missing = missing

    # -- out

    def versions(self, namespace_prefix: Namespace, *, closed: bool) -> Iterator[ItemVersion]:
        """Every item under a prefix, also closed versions; each key is as it was at one moment.

        The path of a namespace is without what it is under in this store.
        """
        database = self._parts.database
        for path in database.read(lambda: self._every_path(self._parts.path(namespace_prefix))):
            last: str | None = ""
            while last is not None:
                rows, last = database.read(partial(self._key_page, path, last, closed))
                yield from map(self._version, rows)

    def _every_path(self, prefix: bytes) -> Flow[list[bytes]]:
        return [row[0] for row in (yield self._parts.sql("every_path", *span(prefix)))]

    def _key_page(self, path: bytes, last: str, closed: bool) -> Flow[tuple[list[Row], str | None]]:
        """The versions of some keys after one, and the last of those keys; None: there are none."""
        out: list[Row] = []
        key = None
        for (key,) in (yield self._parts.sql("key_page", path, last, PAGE)):
            for row in (yield self._parts.sql("history", path, key)):
                row = ended(row, self._parts.now())
                if closed or row[6] is None:
                    out.append(row)
        return out, key

    def _version(self, row: Row) -> ItemVersion:
        _, path, key, version, created, since, until, expires, _, provenance, *rest = row
        ttl, searched, fields = rest
        records = self._parts.records
        records.value(row)  # else it is damaged
        put = Put(
            path[len(self._parts.root) :],
            key,
            records.text_of(row),
            ttl=ttl if until is None else None,
            provenance=records.provenance(provenance, path, key, version) or None,
            searched=bool(searched),
            fields=None if fields is None else json.loads(fields),
        )
        return ItemVersion(put, version, created, since, until, None if until else expires)

    def export(self, namespace_prefix: Namespace, *, versions: bool) -> Iterator[dict[str, Any]]:
        """The same, each as a JSON object."""
        for put, version, created, since, until, expires in self.versions(
            namespace_prefix, closed=versions
        ):
            times = zip(_TIMES, (created, since, until, expires), strict=True)
            line: dict[str, Any] = {
                "namespace": list(labels(put.path)),
                "key": put.key,
                "value": decode(put.text or ""),
                "version": version,
                **{name: moment(at).isoformat() for name, at in times if at is not None},
            }
            if put.ttl is not None:
                line["ttl"] = put.ttl / _MINUTE
            if not put.searched or put.fields is not None:
                line["index"] = put.searched and put.fields
            if put.provenance:
                line["provenance"] = put.provenance
            yield line

    # -- in

    def take(
        self, lines: Lines, progress: Progress | None, noun: str, *, skips: bool = False
    ) -> TransferReport:
        """Take in what a source gives, in batches."""
        report, done = TransferReport(), 0
        failed: ImportFailed | None = None
        others = set[tuple[bytes, str]]() if skips else None
        with closing(lines):
            while failed is None:
                batch, unsuitable, failed = self._batch_of(lines, skips)
                if not batch and not unsuitable and failed is None:
                    return report
                try:
                    report += run(self._restore(batch, others))
                except ImportFailed as exc:  # it contradicts what is here
                    failed = exc
                    break
                report += TransferReport(unsuitable=unsuitable)
                done += len(batch) + unsuitable
                if progress is not None and (batch or unsuitable):
                    progress(done, None)
        if not done:
            raise failed
        are = f"{noun} before that is" if done == 1 else f"{noun}s before that are"
        raise ImportFailed(f"{failed}. {done} {are} kept") from failed

    def _batch_of(
        self, lines: Lines, skips: bool
    ) -> tuple[list[ItemVersion], int, ImportFailed | None]:
        """The next items, the number of skipped ones, and the error of a wrong one."""
        batch: list[ItemVersion] = []
        unsuitable = 0
        try:
            for where, line in islice(lines, PAGE):
                try:
                    batch.append(self._restored(where, line))
                except ImportFailed as exc:
                    if not skips:
                        raise
                    unsuitable += 1
                    _LOG.warning("passed over: %s", exc)
        except ImportFailed as exc:
            return batch, unsuitable, exc
        return batch, unsuitable, None

    async def _restore(
        self, versions: list[ItemVersion], others: set[tuple[bytes, str]] | None
    ) -> TransferReport:
        if not versions:
            return TransferReport()
        model = await self._missing.make([version.put for version in versions])
        make = partial(_restore, self._parts.writer, versions, self._parts.now(), model, others)
        return await self._parts.runner.write(make)

    def _restored(
        self, where: str, line: Mapping[str, Any] | ItemVersion | ImportFailed
    ) -> ItemVersion:
        if isinstance(line, ImportFailed):  # its source could not read it
            raise line
        preparer = self._parts.preparer
        try:
            if isinstance(line, ItemVersion):
                put = line.put
                path, _ = preparer.place(labels(put.path), put.key)
                check_size(len((put.text or "").encode()), preparer.max_bytes)
                return line._replace(put=preparer.ready(replace(put, path=path)))
            provenance = line.get("provenance")
            if provenance and not isinstance(provenance.get("message_ids", []), list):
                raise ValueError("message_ids of its provenance is no list")
            put = preparer.put(
                preparer.place(line["namespace"], line["key"]),
                line["value"] if line["value"] is not None else _NOTHING,
                line.get("index"),
                line.get("ttl"),
                provenance=provenance_of(provenance) if provenance else None,
            )
            return ItemVersion(put, _version(line), *(_time(line, name) for name in _TIMES))
        except PerdureError as exc:
            raise ImportFailed(f"{where}: {exc}") from exc
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as exc:
            raise ImportFailed(f"{where}: {exc}; expected what an export writes") from exc


_NOTHING: Any = ()  # no mapping: the check of values says so


def _time(line: Mapping[str, Any], name: str) -> int | None:
    return micros(datetime.fromisoformat(line[name])) if name in line else None


def _version(line: Mapping[str, Any]) -> int | None:
    version = line.get("version")
    if version is not None and (type(version) is not int or not 0 < version < _MOST):
        raise ValueError(f"version is {version!r}; expected 1 or more")
    return version


def _restore(
    writer: ItemWriter,
    items: Sequence[ItemVersion],
    now: int,
    model: Model | None,
    others: set[tuple[bytes, str]] | None,
) -> Flow[TransferReport]:
    """Put versions back, all or none.

    Those of keys that hold something else here are passed over and added to `others`; None: an
    error.
    """
    report = TransferReport()
    changes = Changes(None if model is None else (yield from writer.enrol(model)))
    for item in items:
        at = item.put.path, item.put.key
        if others is not None and at in others:
            report += TransferReport(unsuitable=1)
            continue
        rows = yield writer.sql("history", *at)
        newest = rows[-1] if rows else None
        same = next((row for row in rows if row[3] == item.version), None)
        if item.version is None and newest is not None and newest[6] is None:
            same = newest
        is_same = same is not None and _same(writer, same, item.put)
        if item.version is not None and same is not None and not is_same:
            refusal = ImportFailed(
                f"version {item.version} of {item.put.key!r} in {labels(item.put.path)!r} is here "
                "already and holds something else: import into a new file, or forget it here first"
            )
            if others is None:
                raise refusal
            others.add(at)
            _LOG.warning("passed over, with what follows: %s", refusal)
            report += TransferReport(unsuitable=1)
        elif is_same or (newest is not None and (item.version or _MOST) <= newest[3]):
            present = newest if item.version is not None and same is newest else None
            if present and present[6:8] == (None, None) and item.until is not None:
                # what may expire lives as long as it does here
                yield _ended(writer, (yield from writer.locate(item.put)), item.until, changes)
            report += TransferReport(skipped=1)
        else:
            yield from _add(writer, item, now, changes)
            closed = item.until is not None
            report += TransferReport(items=int(not closed), versions=int(closed))
    yield from writer.finish([item.put for item in items], changes, now)
    return report


def _add(writer: ItemWriter, item: ItemVersion, now: int, changes: Changes) -> Flow[None]:
    there = yield from writer.locate(item.put)
    ns, row, version, created, valid_from, _, _, closed, _, made = there
    since = now if item.since is None else item.since
    if row is not None:
        since = max(since, valid_from + 1)
        yield _ended(writer, there, since, changes)
    number = item.version or (version or closed or 0) + 1
    first = item.created if item.created is not None else created if row is not None else since
    put = item.put if item.until is None else replace(item.put, missing=None)
    expires = item.expires
    if expires is None and item.put.ttl is not None and item.until is None:
        expires = max(since, now) + item.put.ttl
    times = Times(first, since, expires, made)
    [(added,)] = yield writer.new_ids(1)
    yield (yield from writer.add([New(put, ns, number, times)], [added], changes))
    if item.until is not None:
        yield _ended(writer, (yield from writer.locate(put)), item.until, changes)


def _ended(writer: ItemWriter, there: Row, until: int, changes: Changes) -> list[Statement]:
    """The statements that close the present version of a key; see `ItemWriter.locate`."""
    ns, row, _, _, valid_from, _, size, *_ = there
    changes.grow(ns, -1, -size)
    return writer.close([(max(until, valid_from + 1), row)])


def _same(writer: ItemWriter, here: Row, put: Put) -> bool:
    fields = writer.records.provenance(here[9], *here[1:4])
    return writer.records.text_of(here) == put.text and fields == (put.provenance or {})


# -- sources of imports


def of_text(lines: Iterable[str], namespace: Namespace | None) -> Lines:
    """Each line that is not empty, as what it is called in messages and what it says."""
    for number, text in enumerate(lines, 1):
        where = f"line {number}"
        if not isinstance(text, str):
            raise ImportFailed(f"{where}: a {type(text).__name__}; expected text")
        if not text.strip():
            continue
        try:
            line = decode(text)
        except (ValueError, RecursionError) as exc:
            raise ImportFailed(f"{where}: no JSON ({exc}); expected an object a line") from exc
        if not isinstance(line, dict):
            raise ImportFailed(
                f"{where}: {str(line)[:60]!r} is no object; expected an object a line"
            )
        yield where, _addressed(where, line, namespace)


def _addressed(where: str, line: dict[str, Any], namespace: Namespace | None) -> Mapping[str, Any]:
    """The same with a namespace and a key."""
    if "value" not in line and "namespace" not in line:
        line = {"value": line, "key": line.get("key")}
    _check_fields(where, line)
    if "namespace" not in line:
        if namespace is None:
            raise ImportFailed(f"{where}: it names no namespace, and none was given")
        line["namespace"] = namespace
    if line.get("key") is None:
        text = json.dumps(line["value"], sort_keys=True)
        line["key"] = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return line


def _check_fields(where: str, line: dict[str, Any]) -> None:
    """Refuse what would be lost: a field that nothing reads, a key that becomes another."""
    provenance = line.get("provenance")
    within = provenance if isinstance(provenance, dict) else {}
    for holder, names, fields in (("", line, _FIELDS), (" of its provenance", within, PROVENANCE)):
        for name in names:
            if name not in fields:
                raise ImportFailed(
                    f"{where}: unknown field {name[:60]!r}{holder}; {meant(name, fields)}"
                )
    if "value" not in line:
        raise ImportFailed(f"{where}: it has no 'value'; expected a JSON object there")
    if not isinstance(line.get("key"), str | None):
        raise ImportFailed(f"{where}: its key is {line['key']!r}; expected text, in quotes")


def of_store(store: BaseStore) -> Lines:
    """The present items of a store, namespace by namespace; its pages may be shorter than asked."""
    offset = 0
    while page := store.list_namespaces(limit=PAGE, offset=offset):
        for namespace in page:
            yield from _of_namespace(store, tuple(namespace))
        offset += len(page)


def _of_namespace(store: BaseStore, namespace: tuple[str, ...]) -> Lines:
    # as an operation, for the method refuses labels that the store may well hold
    op = SearchOp(namespace, limit=PAGE, refresh_ttl=False)
    while page := cast(list[SearchItem], store.batch([op])[0]):
        for item in page:
            if tuple(item.namespace) == namespace:  # the others come with their own
                times = item.created_at, item.updated_at
                yield (
                    f"{item.key!r} in {namespace!r}",
                    _line(namespace, item.key, item.value, *times),
                )
        op = op._replace(offset=op.offset + len(page))


def of_langgraph(path: str | os.PathLike[str]) -> Lines:
    """The items of a file, or a Postgres DSN, that langgraph's own store wrote; it is only read."""
    if isinstance(path, str) and is_dsn(path):
        from perdure.storage.foreign_postgres import ForeignPostgres

        with closing(ForeignPostgres(path)) as tables:
            if tables.lacks("store"):
                raise NotADatabase(f"{tables.path} has no table of langgraph's PostgresStore")
            sql = _THEIRS_IN_POSTGRES.format(_lives(tables.columns("store")))
            yield from _of_pages(tables.path, partial(tables.rows, sql))
        return
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(f"{path!r} cannot be imported; expected a path or a store")
    if not os.path.isfile(path):
        raise ConfigurationError(f"there is no file {os.fspath(path)!r} to import")
    with closing(SQLiteDatabase(path, None, read_only=True)) as file:
        columns = {row[0] for row in file.read(lambda: rows_of(_COLUMNS))}
        if not {"prefix", "key", "value"} <= columns:
            ours = "SELECT 1 FROM sqlite_master WHERE name = 'store_items'"
            if file.read(lambda: rows_of(ours)):
                raise NotADatabase(
                    f"{file.path!r} is a file of perdure's own: export its items to "
                    "JSON Lines and import those, or open it and give the open store"
                )
            raise NotADatabase(f"{file.path!r} has no table of langgraph's SqliteStore")
        sql = _THEIRS.format(_lives(columns))
        try:
            yield from _of_pages(file.path, lambda *last: file.read(partial(rows_of, sql, *last)))
        except StorageError as exc:
            raise ImportFailed(f"an item cannot be read: {exc}") from exc


def _of_pages(path: str, page: Callable[..., list[Row]]) -> Lines:
    last: Row = ("", "")
    while rows := page(*last, PAGE):
        last = rows[-1][:2]
        yield from (_of_row(path, row) for row in rows)


def _lives(columns: set[str]) -> str:
    """What to read of an item's life: tables of older versions have no such columns."""
    timed = {"expires_at", "ttl_minutes"} <= columns
    return "expires_at, ttl_minutes" if timed else "NULL, NULL"


_COLUMNS: Final = "SELECT name FROM pragma_table_info('store')"
_THEIRS: Final = """
SELECT prefix, key, CAST(value AS BLOB), created_at, updated_at, {} FROM store
WHERE (prefix, key) > (?, ?) ORDER BY prefix, key LIMIT ?
"""
_THEIRS_IN_POSTGRES: Final = """
SELECT prefix, key, value::text, created_at, updated_at, {} FROM store
WHERE (prefix, key) > (%s, %s) ORDER BY prefix, key LIMIT %s
"""


def _of_row(path: str, row: tuple[Any, ...]) -> Line:
    prefix, key, value, created, updated, expires, ttl = row
    where = f"{path!r}, {key!r} in {prefix!r}"
    try:
        namespace = tuple(prefix.split("."))
        line = _line(namespace, key, json.loads(value), _moment(created), _moment(updated))
        if expires is not None:
            line["expires_at"] = _moment(expires).isoformat()
        if ttl is not None:
            line["ttl"] = ttl
    except (ValueError, TypeError) as exc:
        return where, ImportFailed(f"{where}: {exc}")
    return where, line


def _moment(stored: str | datetime) -> datetime:
    """SQLite's own timestamps are UTC and do not say so."""
    stored = datetime.fromisoformat(stored) if isinstance(stored, str) else stored
    return stored if stored.tzinfo is not None else stored.replace(tzinfo=UTC)


def _line(
    namespace: tuple[str, ...],
    key: str,
    value: Mapping[str, Any],
    created: datetime,
    updated: datetime,
) -> dict[str, Any]:
    return {
        "namespace": list(namespace),
        "key": key,
        "value": value,
        "created_at": created.astimezone(UTC).isoformat(),
        "valid_from": updated.astimezone(UTC).isoformat(),
    }
