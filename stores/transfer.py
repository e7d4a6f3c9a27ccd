"""Export versions of items as JSON Lines, oldest first; import these lines and other stores."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

from perdure.effects import run
from perdure.errors import ImportFailed, PerdureError
from perdure.storage.flow import Flow, Row, Statement
from perdure.stores.base import Namespace, Progress, TransferReport
from perdure.stores.import_sources import TIMES
from perdure.stores.missing import MissingEmbeddings
from perdure.stores.namespaces import decode_path, prefix_range
from perdure.stores.parts import StoreParts
from perdure.stores.puts import Changes, ItemWriter, New, Put, Times
from perdure.stores.reading import ended, micros, moment, provenance_of
from perdure.stores.tombstones import TOMBSTONES, ItemContent, TombstoneReader, is_note_path
from perdure.stores.values import check_size, decode_value
from perdure.stores.vectors import Model

PAGE = 500  # keys read, or lines written, at a time
_LOG = logging.getLogger("perdure")
_MINUTE = 60_000_000
_VALUE: Final = 8  # index of the value in a row of `history`
_PAGE_BYTES: Final = 16 << 20  # bytes of values that are held at once; a single value may be larger
_MOST = 1 << 60  # versions: SQLite counts in 64 bits
_Place = tuple[bytes, str]  # the path of a namespace, and a key


class ItemVersion(NamedTuple):
    """A version of an item; times in microseconds."""

    put: Put
    version: int | None = None  # None: it is put as the newest, unless that is equal
    created: int | None = None  # when the key was first put
    since: int | None = None
    until: int | None = None  # None: it is the present one
    expires: int | None = None

    @property
    def place(self) -> _Place:
        """The path of its namespace, and its key."""
        return self.put.path, self.put.key

    @property
    def content(self) -> ItemContent:
        """The content that is compared with tombstones."""
        return ItemContent(self.put.path, self.put.text or "", self.put.provenance)


Source = Generator[tuple[str, Mapping[str, Any] | ItemVersion | ImportFailed], None, None]
"""Yields the name of an item in messages, and the item or the error that occurred."""


@dataclass(slots=True)
class _Passed:
    """The keys of an import whose later versions are treated like the earlier ones."""

    others: set[_Place] | None  # they differ here; None if that is an error
    refused: set[_Place] = field(default_factory=set)  # keys with a tombstone here
    arrived: set[_Place] = field(default_factory=set)  # tombstones that the import has brought


class _Restored(NamedTuple):
    """The result of a batch."""

    report: TransferReport
    refused: set[_Place]
    arrived: set[_Place]


class Transfer:
    """Brings items of a store out and in."""

    def __init__(self, parts: StoreParts, missing: MissingEmbeddings) -> None:
        self._parts = parts
        self._missing = missing

    # -- out

    def versions(self, namespace_prefix: Namespace, *, closed: bool) -> Iterator[ItemVersion]:
        """Yield every version of every item under a prefix; each key is as it was at one moment.

        Notes come after all other items. If both an item and its tombstone are present, the item
        was put again, so an import must read the item before the tombstone. Paths of namespaces do
        not include the prefix of this store.
        """
        database = self._parts.database
        paths = database.read(
            lambda: self._every_path(self._parts.resolve_prefix(namespace_prefix))
        )
        for path in sorted(paths, key=is_note_path):
            last: str | None = ""
            while last is not None:
                rows, last = database.read(partial(self._key_page, path, last, closed))
                yield from map(self._version, rows)

    def _every_path(self, prefix: bytes) -> Flow[list[bytes]]:
        return [row[0] for row in (yield self._parts.sql("every_path", *prefix_range(prefix)))]

    def _key_page(self, path: bytes, last: str, closed: bool) -> Flow[tuple[list[Row], str | None]]:
        """The versions of some keys after one, and the last of those keys; None: there are none."""
        out: list[Row] = []
        key, size = None, 0
        for (key,) in (yield self._parts.sql("key_page", path, last, PAGE)):
            for row in (yield self._parts.sql("history", path, key)):
                row = ended(row, self._parts.now())
                if closed or row[6] is None:
                    out.append(row)
                    size += len(row[_VALUE]) if isinstance(row[_VALUE], str | bytes) else 0
            if size > _PAGE_BYTES:
                break
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
            times = zip(TIMES, (created, since, until, expires), strict=True)
            line: dict[str, Any] = {
                "namespace": list(decode_path(put.path)),
                "key": put.key,
                "value": decode_value(put.text or ""),
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
        self, lines: Source, progress: Progress | None, noun: str, *, skips: bool = False
    ) -> TransferReport:
        """Take in what a source gives, in batches."""
        report, done = TransferReport(), 0
        failed: ImportFailed | None = None
        passed = _Passed(set() if skips else None)
        with closing(lines):
            while failed is None:
                batch, unsuitable, failed = self._batch_of(lines, skips)
                if not batch and not unsuitable and failed is None:
                    return report
                try:
                    report += run(self._restore(batch, passed))
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
        self, lines: Source, skips: bool
    ) -> tuple[list[ItemVersion], int, ImportFailed | None]:
        """The next items, the number of skipped ones, and the error of a wrong one."""
        batch: list[ItemVersion] = []
        unsuitable = size = 0
        try:
            for where, line in islice(lines, PAGE):
                try:
                    batch.append(self._restored(where, line))
                    size += len(batch[-1].put.text or "")
                    if size > _PAGE_BYTES:
                        break
                except ImportFailed as exc:
                    if not skips:
                        raise
                    unsuitable += 1
                    _LOG.warning("passed over: %s", exc)
        except ImportFailed as exc:
            return batch, unsuitable, exc
        return batch, unsuitable, None

    async def _restore(self, versions: list[ItemVersion], passed: _Passed) -> TransferReport:
        if not versions:
            return TransferReport()
        model = await self._missing.make([version.put for version in versions])
        make = partial(_restore, self._parts.writer, versions, self._parts.now(), model, passed)
        restored = await self._parts.runner.write(make)
        passed.refused |= restored.refused
        passed.arrived |= restored.arrived
        return restored.report

    def _restored(
        self, where: str, line: Mapping[str, Any] | ItemVersion | ImportFailed
    ) -> ItemVersion:
        if isinstance(line, ImportFailed):  # its source could not read it
            raise line
        preparer = self._parts.preparer
        try:
            if isinstance(line, ItemVersion):
                put = line.put
                path, _ = preparer.place(decode_path(put.path), put.key)
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
            return ItemVersion(put, _version(line), *(_time(line, name) for name in TIMES))
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
    passed: _Passed,
) -> Flow[_Restored]:
    """Restore versions, all or none.

    Items with a tombstone here are skipped. So are items that differ from those with the same key
    here. Their keys are added to `passed.others`; if that is None, an error is raised.
    """
    report, arrived = TransferReport(), set[_Place]()
    changes = Changes(None if model is None else (yield from writer.enrol(model)))
    refused = yield from _find_refused(writer, items, now, passed)
    for item in items:
        at = item.place
        if passed.others is not None and at in passed.others:
            report += TransferReport(unsuitable=1)
            continue
        rows = yield writer.sql("history", *at)
        newest = rows[-1] if rows else None
        same = next((row for row in rows if row[3] == item.version), None)
        if item.version is None and newest is not None and newest[6] is None:
            same = newest
        is_same = same is not None and _same(writer, same, item.put)
        is_tombstone = is_note_path(at[0], (TOMBSTONES,))
        # a tombstone of this database has the time of the forgetting here, which no file may change
        is_own = is_tombstone and bool(rows) and at not in arrived | passed.arrived
        if not is_same and at in refused:
            continue
        if item.version is not None and same is not None and not is_same and not is_tombstone:
            refusal = ImportFailed(
                f"version {item.version} of {item.put.key!r} in {decode_path(item.put.path)!r} is "
                "already here with other content; import into a new file, or forget it here first"
            )
            if passed.others is None:
                raise refusal
            passed.others.add(at)
            _LOG.warning("passed over, with what follows: %s", refusal)
            report += TransferReport(unsuitable=1)
        elif is_own or is_same or (newest is not None and (item.version or _MOST) <= newest[3]):
            is_present = item.version is not None and same is newest and not is_own
            present = newest if is_present else None
            if present and present[6:8] == (None, None) and item.until is not None:
                # what may expire lives as long as it does here
                yield _ended(writer, (yield from writer.locate(item.put)), item.until, changes)
            report += TransferReport(skipped=1)
        else:
            yield from _add(writer, item, now, changes)
            closed = item.until is not None
            report += TransferReport(items=int(not closed), versions=int(closed))
            if is_tombstone:
                arrived.add(at)
    yield from writer.finish([item.put for item in items], changes, now)
    names = ((decode_path(path), key) for path, key in sorted(refused - passed.refused))
    return _Restored(report + TransferReport(refused=tuple(names)), refused, arrived)


def _find_refused(
    writer: ItemWriter, items: Sequence[ItemVersion], now: int, passed: _Passed
) -> Flow[set[_Place]]:
    """Return the keys of a batch that have a version with a tombstone here.

    A tombstone is ignored if the present version here has the same text, because the item was put
    again.
    """
    reader = TombstoneReader(writer.sql, now, passed.arrived)
    found = yield from reader.find([item.content for item in items])
    refused = passed.refused.intersection(item.place for item in items)
    for item, keys in zip(items, found, strict=True):
        if not keys or item.place in refused:
            continue
        rows = yield writer.sql("history", *item.place)
        newest = ended(rows[-1], now) if rows else None
        if newest is not None and newest[6] is None:
            keys = keys - _content_of(writer, newest).keys()
        if keys and not any(
            row[3] == item.version and _same(writer, row, item.put) for row in rows
        ):
            refused.add(item.place)
    return refused


def _content_of(writer: ItemWriter, row: Row) -> ItemContent:
    provenance = writer.records.provenance(row[9], *row[1:4])
    return ItemContent(row[1], writer.records.text_of(row), provenance)


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
