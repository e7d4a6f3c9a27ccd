"""Export item versions as JSON objects, and import such objects or the items of another store."""

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

from perdure.effects import run_operation
from perdure.errors import ImportFailed, PerdureError
from perdure.storage.flow import Flow, Row, Statement
from perdure.stores.base import Namespace, Progress, TransferReport
from perdure.stores.import_sources import TIMES
from perdure.stores.missing import MissingEmbeddings
from perdure.stores.namespaces import decode_namespace_path, prefix_range
from perdure.stores.parts import StoreParts
from perdure.stores.puts import ItemWriter, NewVersion, Put, VersionTimes, WriteTotals
from perdure.stores.reading import (
    from_microseconds,
    provenance_from_json,
    set_end_time_of_expired_version,
    to_microseconds,
)
from perdure.stores.tombstones import TOMBSTONES, ItemContent, TombstoneReader, is_note_path
from perdure.stores.values import check_value_size, decode_json_value
from perdure.stores.vectors import Model

# maximum number of keys in a batch of an export, and of lines in a batch of an import
PAGE = 500
_LOG = logging.getLogger("perdure")
_MINUTE = 60_000_000  # microseconds in a minute
# column index of the value in a row returned by the `history` statement
_VALUE_COLUMN: Final = 8
# page size threshold in bytes; a page ends as soon as the total size of its values exceeds this
# threshold
_PAGE_BYTES: Final = 16 << 20
# exclusive maximum of a version number, since SQLite integers have 64 bits
_MAX_VERSION = 1 << 60
_RowKey = tuple[bytes, str]  # path of a namespace, and a key


class ItemVersion(NamedTuple):
    """A version of an item. Times are in microseconds since 1970."""

    put: Put
    # The version number. If it is None, the item is imported as the latest version, unless the
    # latest version already has the same content.
    version: int | None = None
    created_at: int | None = None  # time at which the item was created
    valid_from: int | None = None  # time of the put of this version
    # time at which the version was replaced, was deleted or expired; None if the version is current
    valid_to: int | None = None
    expires_at: int | None = None

    @property
    def row_key(self) -> _RowKey:
        """The path of the namespace, and the key."""
        return self.put.path, self.put.key

    @property
    def content(self) -> ItemContent:
        """The parts of the version's content from which the keys of its tombstones are computed."""
        return ItemContent(self.put.path, self.put.text or "", self.put.provenance)


Source = Generator[tuple[str, Mapping[str, Any] | ItemVersion | ImportFailed], None, None]
"""Yields pairs: the name of an item for error messages, and the item or the error of reading it.

The item is a JSON object in the format that `export` writes, or an `ItemVersion`.
"""


@dataclass(slots=True)
class _ImportState:
    """The state of an import.

    An import is written in batches. The state tells later batches which keys they must not import,
    and which tombstones they must ignore.
    """

    # Keys for which the source and this store have different content under the same version number.
    # If this field is None, the import raises an error for the first such key.
    differing: set[_RowKey] | None
    # keys that were not imported because a tombstone in this store matches them
    refused: set[_RowKey] = field(default_factory=set)
    # keys of the tombstones written by this import
    imported_tombstones: set[_RowKey] = field(default_factory=set)


class _BatchResult(NamedTuple):
    """The result of importing one batch.

    The caller adds the keys in `refused` and `imported_tombstones` to the `_ImportState`.
    """

    report: TransferReport
    refused: set[_RowKey]
    imported_tombstones: set[_RowKey]


class Transfer:
    """Exports and imports the items of a store."""

    def __init__(self, parts: StoreParts, missing: MissingEmbeddings) -> None:
        self._parts = parts
        self._missing = missing

    # -- export

    def iter_item_versions(
        self, namespace_prefix: Namespace, *, includes_closed: bool
    ) -> Iterator[ItemVersion]:
        """Yield the current version of every item under a prefix.

        With `includes_closed`, yield the closed versions too. All versions of a key are read from
        one snapshot.

        perdure's internal notes about memories come after all other items. An item that exists
        together with its tombstone was stored again after it had been deleted or forgotten, so an
        import must read the item before the tombstone. The paths in the yielded versions do not
        contain the prefix of this scope.
        """
        database = self._parts.database
        paths = database.read(
            lambda: self._read_paths(self._parts.resolve_prefix(namespace_prefix))
        )
        for path in sorted(paths, key=is_note_path):
            after_key: str | None = ""
            while after_key is not None:
                rows, after_key = database.read(
                    partial(self._read_versions_page_and_last_key, path, after_key, includes_closed)
                )
                yield from map(self._build_item_version, rows)

    def _read_paths(self, prefix: bytes) -> Flow[list[bytes]]:
        """Return the paths of all namespaces under a prefix."""
        return [row[0] for row in (yield self._parts.sql("all_paths", *prefix_range(prefix)))]

    def _read_versions_page_and_last_key(
        self, path: bytes, after_key: str, includes_closed: bool
    ) -> Flow[tuple[list[Row], str | None]]:
        """Return one page of versions of the keys after `after_key`, and the last key of the page.

        The last key is None if there are no keys after `after_key`.
        """
        versions: list[Row] = []
        key, size = None, 0
        for (key,) in (yield self._parts.sql("key_page", path, after_key, PAGE)):
            for row in (yield self._parts.sql("history", path, key)):
                row = set_end_time_of_expired_version(row, self._parts.now())
                if includes_closed or row[6] is None:
                    versions.append(row)
                    size += (
                        len(row[_VALUE_COLUMN])
                        if isinstance(row[_VALUE_COLUMN], str | bytes)
                        else 0
                    )
            if size > _PAGE_BYTES:
                break
        return versions, key

    def _build_item_version(self, row: Row) -> ItemVersion:
        """Build an item version from a row returned by the `history` statement."""
        _, path, key, version, created, since, until, expires, _, provenance, *rest = row
        ttl, searched, fields = rest
        records = self._parts.records
        records.decode_row_value(row)  # raises an error if the row is damaged
        put = Put(
            path[len(self._parts.root) :],
            key,
            records.decode_row_text(row),
            ttl=ttl if until is None else None,
            provenance=records.decode_provenance(provenance, path, key, version) or None,
            is_searched=bool(searched),
            fields=None if fields is None else json.loads(fields),
        )
        return ItemVersion(put, version, created, since, until, None if until else expires)

    def export_lines(
        self, namespace_prefix: Namespace, *, versions: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the item versions under a prefix as JSON objects; see `iter_item_versions`."""
        for put, version, created, since, until, expires in self.iter_item_versions(
            namespace_prefix, includes_closed=versions
        ):
            times = zip(TIMES, (created, since, until, expires), strict=True)
            line: dict[str, Any] = {
                "namespace": list(decode_namespace_path(put.path)),
                "key": put.key,
                "value": decode_json_value(put.text or ""),
                "version": version,
                **{
                    name: from_microseconds(microseconds).isoformat()
                    for name, microseconds in times
                    if microseconds is not None
                },
            }
            if put.ttl is not None:
                line["ttl"] = put.ttl / _MINUTE
            if not put.is_searched or put.fields is not None:
                line["index"] = put.is_searched and put.fields
            if put.provenance:
                line["provenance"] = put.provenance
            yield line

    # -- import

    def import_items(
        self,
        lines: Source,
        progress: Progress | None,
        item_noun: str,
        *,
        skips_unsuitable: bool = False,
    ) -> TransferReport:
        """Import the items of a source, in batches.

        Args:
            lines: The source.
            progress: Called after each batch, or None.
            item_noun: The word for an item in error messages, such as "line".
            skips_unsuitable: Whether unsuitable items are skipped. Otherwise they raise an error.

        Raises:
            ImportFailed: An item cannot be imported. The message says how many items were imported.
        """
        report, line_count = TransferReport(), 0
        error: ImportFailed | None = None
        state = _ImportState(set() if skips_unsuitable else None)
        with closing(lines):
            while error is None:
                batch, unsuitable, error = self._read_batch_with_skip_count_and_error(
                    lines, skips_unsuitable
                )
                if not batch and not unsuitable and error is None:
                    return report
                try:
                    report += run_operation(self._write_batch(batch, state))
                # The source and this store have different content under the same version number.
                except ImportFailed as exc:
                    error = exc
                    break
                report += TransferReport(unsuitable=unsuitable)
                line_count += len(batch) + unsuitable
                if progress is not None and (batch or unsuitable):
                    progress(line_count, None)
        if not line_count:
            raise error
        count_text = (
            f"The {item_noun} before this {item_noun} was"
            if line_count == 1
            else f"The {line_count} {item_noun}s before this {item_noun} were"
        )
        raise ImportFailed(f"{error}. {count_text} imported") from error

    def _read_batch_with_skip_count_and_error(
        self, lines: Source, skips_unsuitable: bool
    ) -> tuple[list[ItemVersion], int, ImportFailed | None]:
        """Read the next items of a source.

        Returns:
            The items, the number of skipped items, and the error of a wrong item or None.
        """
        batch: list[ItemVersion] = []
        unsuitable = total_size = 0
        try:
            for item_name, line in islice(lines, PAGE):
                try:
                    batch.append(self._parse_line(item_name, line))
                    total_size += len(batch[-1].put.text or "")
                    if total_size > _PAGE_BYTES:
                        break
                except ImportFailed as exc:
                    if not skips_unsuitable:
                        raise
                    unsuitable += 1
                    _LOG.warning("skipped: %s", exc)
        except ImportFailed as exc:
            return batch, unsuitable, exc
        return batch, unsuitable, None

    async def _write_batch(
        self, versions: list[ItemVersion], state: _ImportState
    ) -> TransferReport:
        """Write one batch of item versions, and update the state of the import."""
        if not versions:
            return TransferReport()
        model = await self._missing.embed_puts_and_get_model([version.put for version in versions])
        write_versions = partial(
            _write_imported_versions, self._parts.writer, versions, self._parts.now(), model, state
        )
        result = await self._parts.runner.run_write_flow(write_versions)
        state.refused |= result.refused
        state.imported_tombstones |= result.imported_tombstones
        return result.report

    def _parse_line(
        self, item_name: str, line: Mapping[str, Any] | ItemVersion | ImportFailed
    ) -> ItemVersion:
        """Validate an item from an import source, and convert it to an `ItemVersion`."""
        if isinstance(line, ImportFailed):  # The source could not read the item.
            raise line
        preparer = self._parts.preparer
        try:
            if isinstance(line, ItemVersion):
                put = line.put
                path, _ = preparer.check_row_key(decode_namespace_path(put.path), put.key)
                check_value_size(len((put.text or "").encode()), preparer.max_bytes)
                return line._replace(
                    put=preparer.add_scope_limits_and_text_chunks_to_put(replace(put, path=path))
                )
            provenance = line.get("provenance")
            if provenance and not isinstance(provenance.get("message_ids", []), list):
                raise ValueError("the field message_ids of the provenance is not a list")
            put = preparer.prepare_put(
                preparer.check_row_key(line["namespace"], line["key"]),
                line["value"] if line["value"] is not None else _INVALID_VALUE,
                line.get("index"),
                line.get("ttl"),
                provenance=provenance_from_json(provenance) if provenance else None,
            )
            return ItemVersion(
                put, _parse_version_number(line), *(_parse_time(line, name) for name in TIMES)
            )
        except PerdureError as exc:
            raise ImportFailed(f"{item_name}: {exc}") from exc
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as exc:
            raise ImportFailed(
                f"{item_name}: the item cannot be read ({exc}); expected the format that export() "
                "writes"
            ) from exc


# Replaces a null value in an imported line. `prepare_put` would treat None as a request to delete
# the item, but rejects this placeholder, because it is not a mapping.
_INVALID_VALUE: Any = ()


def _parse_time(line: Mapping[str, Any], name: str) -> int | None:
    """Return a time field of an imported line in microseconds, or None if the field is missing."""
    return to_microseconds(datetime.fromisoformat(line[name])) if name in line else None


def _parse_version_number(line: Mapping[str, Any]) -> int | None:
    """Return the version number of an imported line, or None if the line has no version number.

    An invalid version number raises an error.
    """
    version = line.get("version")
    if version is not None and (type(version) is not int or not 0 < version < _MAX_VERSION):
        raise ValueError(f"the version is {version!r}; expected an integer, 1 or more")
    return version


def _write_imported_versions(
    writer: ItemWriter,
    items: Sequence[ItemVersion],
    now: int,
    model: Model | None,
    state: _ImportState,
) -> Flow[_BatchResult]:
    """Write a batch of versions in one transaction.

    Versions that this store already contains, or that are older than its newest version of the key,
    are skipped. Items for which this store has a tombstone are not imported. If an imported version
    has the same number as a version in this store but different content, that version and all later
    versions of its key are skipped, and the key is added to `state.differing`. If `state.differing`
    is None, an error is raised for such a version instead.
    """
    report, imported_tombstones = TransferReport(), set[_RowKey]()
    totals = WriteTotals(None if model is None else (yield from writer.register_model(model)))
    refused = yield from _find_keys_refused_by_tombstones(writer, items, now, state)
    for item in items:
        row_key = item.row_key
        if state.differing is not None and row_key in state.differing:
            report += TransferReport(unsuitable=1)
            continue
        rows = yield writer.sql("history", *row_key)
        newest = rows[-1] if rows else None
        same_version_row = next((row for row in rows if row[3] == item.version), None)
        if item.version is None and newest is not None and newest[6] is None:
            same_version_row = newest
        has_same_content = same_version_row is not None and _has_same_content(
            writer, same_version_row, item.put
        )
        is_tombstone = is_note_path(row_key[0], (TOMBSTONES,))
        # Do not overwrite an existing tombstone, because it records when the item was forgotten in
        # this database.
        is_own = (
            is_tombstone
            and bool(rows)
            and row_key not in imported_tombstones | state.imported_tombstones
        )
        if not has_same_content and row_key in refused:
            continue
        if (
            item.version is not None
            and same_version_row is not None
            and not has_same_content
            and not is_tombstone
        ):
            namespace = decode_namespace_path(item.put.path)
            refusal = ImportFailed(
                f"version {item.version} of {item.put.key!r} in {namespace!r} "
                "already exists in this store with different content; import into a new store, or "
                "forget the item in this store first"
            )
            if state.differing is None:
                raise refusal
            state.differing.add(row_key)
            _LOG.warning("skipped this version and all later versions of the item: %s", refusal)
            report += TransferReport(unsuitable=1)
        elif (
            is_own
            or has_same_content
            or (newest is not None and (item.version or _MAX_VERSION) <= newest[3])
        ):
            is_newest = item.version is not None and same_version_row is newest and not is_own
            current_row = newest if is_newest else None
            if current_row and current_row[6:8] == (None, None) and item.valid_to is not None:
                # Close the current version as of the end time of the imported version. A current
                # version with an expiry time stays unchanged.
                yield _build_close_version_statements(
                    writer,
                    (yield from writer.read_current_version_row(item.put)),
                    item.valid_to,
                    totals,
                )
            report += TransferReport(skipped=1)
        else:
            yield from _insert_imported_version(writer, item, now, totals)
            closed = item.valid_to is not None
            report += TransferReport(items=int(not closed), versions=int(closed))
            if is_tombstone:
                imported_tombstones.add(row_key)
    yield from writer.write_totals_and_check_scope_limits([item.put for item in items], totals, now)
    refused_names = (
        (decode_namespace_path(path), key) for path, key in sorted(refused - state.refused)
    )
    return _BatchResult(
        report + TransferReport(refused=tuple(refused_names)), refused, imported_tombstones
    )


def _find_keys_refused_by_tombstones(
    writer: ItemWriter, items: Sequence[ItemVersion], now: int, state: _ImportState
) -> Flow[set[_RowKey]]:
    """Return the keys of a batch for which this store has a tombstone.

    If a tombstone matches any version of a key, no version of that key is imported. There are two
    exceptions. A tombstone is ignored if the current version in this store contains the erased
    text, because the text was then stored again after the erasure. A tombstone is also ignored for
    any imported version that this store already contains.
    """
    reader = TombstoneReader(writer.sql, now, state.imported_tombstones)
    keys_of_items = yield from reader.find_matching_tombstone_keys([item.content for item in items])
    refused = state.refused.intersection(item.row_key for item in items)
    for item, keys in zip(items, keys_of_items, strict=True):
        if not keys or item.row_key in refused:
            continue
        rows = yield writer.sql("history", *item.row_key)
        newest = set_end_time_of_expired_version(rows[-1], now) if rows else None
        if newest is not None and newest[6] is None:
            keys = keys - _read_content(writer, newest).compute_matching_tombstone_keys()
        if keys and not any(
            row[3] == item.version and _has_same_content(writer, row, item.put) for row in rows
        ):
            refused.add(item.row_key)
    return refused


def _read_content(writer: ItemWriter, row: Row) -> ItemContent:
    """Return the content of a row, for comparison with tombstones."""
    provenance = writer.records.decode_provenance(row[9], *row[1:4])
    return ItemContent(row[1], writer.records.decode_row_text(row), provenance)


def _insert_imported_version(
    writer: ItemWriter, item: ItemVersion, now: int, totals: WriteTotals
) -> Flow[None]:
    """Add an imported version of an item.

    If the key has a current version, that version is closed first. A version that was closed in its
    source is closed after it has been inserted.
    """
    current_row = yield from writer.read_current_version_row(item.put)
    namespace_key, row, version, created, valid_from, _, _, last_version, _, first_id = current_row
    valid_from_time = now if item.valid_from is None else item.valid_from
    if row is not None:
        valid_from_time = max(valid_from_time, valid_from + 1)
        yield _build_close_version_statements(writer, current_row, valid_from_time, totals)
    version_number = item.version or (version or last_version or 0) + 1
    created_at = (
        item.created_at
        if item.created_at is not None
        else created
        if row is not None
        else valid_from_time
    )
    put = item.put if item.valid_to is None else replace(item.put, embedding_error=None)
    expires = item.expires_at
    if expires is None and item.put.ttl is not None and item.valid_to is None:
        expires = max(valid_from_time, now) + item.put.ttl
    times = VersionTimes(created_at, valid_from_time, expires, first_id)
    [(new_id,)] = yield writer.build_id_statement(1)
    yield (
        yield from writer.build_insert_version_statements(
            [NewVersion(put, namespace_key, version_number, times)], [new_id], totals
        )
    )
    if item.valid_to is not None:
        yield _build_close_version_statements(
            writer, (yield from writer.read_current_version_row(put)), item.valid_to, totals
        )


def _build_close_version_statements(
    writer: ItemWriter, current_row: Row, valid_to: int, totals: WriteTotals
) -> list[Statement]:
    """Build the SQL statements that close a current version.

    `current_row` is the row of the current version, as returned by `read_current_version_row`.
    """
    namespace_key, row, _, _, valid_from, _, size, *_ = current_row
    totals.add_namespace_growth(namespace_key, -1, -size)
    return writer.build_close_version_statements([(max(valid_to, valid_from + 1), row)])


def _has_same_content(writer: ItemWriter, row: Row, put: Put) -> bool:
    """Return whether a row already has the value and the provenance that a put would write."""
    fields = writer.records.decode_provenance(row[9], *row[1:4])
    return writer.records.decode_row_text(row) == put.text and fields == (put.provenance or {})
