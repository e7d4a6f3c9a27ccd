"""Export item versions as JSON objects, and import items from an export or from another store."""

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
from perdure.storage.flow import Flow, Row, Statement, fetch_rows
from perdure.stores.base import Namespace, Progress, TransferReport
from perdure.stores.import_sources import TIMES
from perdure.stores.item_reader import (
    from_microseconds,
    provenance_from_json,
    set_end_time_of_expired_version,
    to_microseconds,
)
from perdure.stores.item_writer import ItemWriter, NewVersion, Put, WriteTotals
from perdure.stores.namespaces import decode_namespace_path, prefix_range
from perdure.stores.search.embeddings_backfill import MissingEmbeddings
from perdure.stores.search.vectors import Model
from perdure.stores.store_parts import StoreParts
from perdure.stores.tombstones import (
    TOMBSTONES,
    ItemContent,
    find_matching_tombstone_keys,
    is_note_path,
)
from perdure.stores.values import check_value_size, decode_json_object

# maximum number of item keys that an export reads in one batch; also the maximum number of lines
# that an import reads in one batch
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
    # time at which the version was replaced or deleted, or expired; None if it is current
    valid_to: int | None = None
    expires_at: int | None = None

    @property
    def row_key(self) -> _RowKey:
        """The path of the namespace, and the key."""
        return self.put.path, self.put.key

    @property
    def content(self) -> ItemContent:
        """The fields of the version that are compared with tombstones."""
        return ItemContent(self.put.path, self.put.text or "", self.put.provenance)


Source = Generator[tuple[str, Mapping[str, Any] | ItemVersion | ImportFailed], None, None]
"""Yields pairs: the name of an item for error messages, and the item or the error of reading it.

The item is a JSON object in the format that `export` writes, or an `ItemVersion`.
"""


@dataclass(slots=True)
class _ImportState:
    """The state of an import.

    An import is written in batches, which share an `_ImportState` object. An `_ImportState` object
    records the keys that later batches must skip. It also records the tombstones that the import
    itself has written, because later batches must not apply these tombstones to imported items.
    """

    # Keys for which the source and this store have different content under the same version number.
    # If this field is None, the import raises an error for the first such key.
    differing: set[_RowKey] | None
    # keys that were not imported because a tombstone in this store matches them
    refused: set[_RowKey] = field(default_factory=set)
    # keys of the tombstones written by this import
    imported_tombstones: set[_RowKey] = field(default_factory=set)


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

        If `includes_closed` is true, also yield the closed versions. All versions of a key are read
        from one snapshot.

        perdure's internal notes about memories, such as tombstones, come after all other items. A
        tombstone that was imported first could prevent the import of an item that was deleted and
        then stored again. The paths in the yielded versions do not contain the prefix of this
        scope.
        """
        database, sql = self._parts.database, self._parts.sql["all_paths"]
        bounds = prefix_range(self._parts.resolve_prefix(namespace_prefix))
        paths = [row[0] for row in database.read(lambda: fetch_rows(sql, *bounds))]
        for path in sorted(paths, key=is_note_path):
            after_key: str | None = ""
            while after_key is not None:
                rows, after_key = database.read(
                    partial(self._read_versions_page_and_last_key, path, after_key, includes_closed)
                )
                yield from map(self._build_item_version, rows)

    def _read_versions_page_and_last_key(
        self, path: bytes, after_key: str, includes_closed: bool
    ) -> Flow[tuple[list[Row], str | None]]:
        """Return one page of item versions whose keys follow `after_key`, and the page's last key.

        If no key follows `after_key`, the returned last key is None.
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
                "value": decode_json_object(put.text or ""),
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
        """Import items from a source, in batches.

        Args:
            lines: The source.
            progress: Called after each batch, or None.
            item_noun: The word for an item in error messages, such as "line".
            skips_unsuitable: Whether unsuitable items are skipped. Otherwise they raise an error.

        Raises:
            ImportFailed: An item cannot be imported. The message says how many items were imported.
        """
        report, line_count = TransferReport(), 0
        state = _ImportState(set() if skips_unsuitable else None)
        try:
            with closing(lines):
                while True:
                    batch, unsuitable, error = self._read_batch_with_skip_count_and_error(
                        lines, skips_unsuitable
                    )
                    report += run_operation(self._write_batch(batch, state))
                    report += TransferReport(unsuitable=unsuitable)
                    line_count += len(batch) + unsuitable
                    if progress is not None and (batch or unsuitable):
                        progress(line_count, None)
                    if error is not None:
                        raise error
                    if not batch and not unsuitable:
                        return report
        # The source contains an invalid item, or the source and this store have different content
        # for the same version of an item.
        except ImportFailed as exc:
            if not line_count:
                raise
            count_text = (
                f"The {item_noun} before this {item_noun} was"
                if line_count == 1
                else f"The {line_count} {item_noun}s before this {item_noun} were"
            )
            raise ImportFailed(f"{exc}. {count_text} imported") from exc

    def _read_batch_with_skip_count_and_error(
        self, lines: Source, skips_unsuitable: bool
    ) -> tuple[list[ItemVersion], int, ImportFailed | None]:
        """Read the next items of a source.

        Returns:
            The items, the number of skipped items, and the error of an invalid item or None.
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
        report, refused, imported_tombstones = await self._parts.runner.run_write_flow(
            write_versions
        )
        state.refused |= refused
        state.imported_tombstones |= imported_tombstones
        return report

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


# Placeholder for a null value in an imported line. `prepare_put` would treat None as a request to
# delete the item, but it rejects this placeholder, because a value must be a mapping.
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
        raise ValueError(f"the version is {version!r}; expected an integer of 1 or more")
    return version


def _write_imported_versions(
    writer: ItemWriter,
    items: Sequence[ItemVersion],
    now: int,
    model: Model | None,
    state: _ImportState,
) -> Flow[tuple[TransferReport, set[_RowKey], set[_RowKey]]]:
    """Write a batch of imported item versions in one transaction.

    Items for which this store has a tombstone are not imported.

    Returns:
        The report of the batch, the keys that a tombstone of this store matches, and the keys of
        all tombstones that the import has written so far.
    """
    report, imported_tombstones = TransferReport(), {*state.imported_tombstones}
    totals = WriteTotals(None if model is None else (yield from writer.register_model(model)))
    refused = yield from _find_keys_refused_by_tombstones(writer, items, now, state)
    for item in items:
        is_refused = item.row_key in refused
        report += yield from _write_imported_version(
            writer, item, now, totals, state.differing, imported_tombstones, is_refused=is_refused
        )
    yield from writer.write_totals_and_check_scope_limits([item.put for item in items], totals, now)
    refused_names = (
        (decode_namespace_path(path), key) for path, key in sorted(refused - state.refused)
    )
    report += TransferReport(refused=tuple(refused_names))
    return report, refused, imported_tombstones


def _write_imported_version(
    writer: ItemWriter,
    item: ItemVersion,
    now: int,
    totals: WriteTotals,
    differing: set[_RowKey] | None,
    imported_tombstones: set[_RowKey],
    *,
    is_refused: bool,
) -> Flow[TransferReport]:
    """Write an imported item version, unless this store has the same or a newer version.

    The returned report counts the imported version as written, skipped or unsuitable.

    Args:
        writer: The writer of the store.
        item: The imported version.
        now: The current time in microseconds.
        totals: The totals of the transaction, which are updated.
        differing: See `_ImportState`. Versions of these keys are skipped. If the version has the
            same number as a version in this store but different content, its key is added.
        imported_tombstones: The keys of the tombstones that the import has written. If the version
            is a tombstone, its key is added.
        is_refused: Whether a tombstone of this store matches the key. In this case, only a version
            that this store already contains is reported.

    Raises:
        ImportFailed: The content differs, and `differing` is None.
    """
    row_key = item.row_key
    if differing is not None and row_key in differing:
        return TransferReport(unsuitable=1)
    rows = yield writer.sql("history", *row_key)
    newest = rows[-1] if rows else None
    same_version_row = next((row for row in rows if row[3] == item.version), None)
    if item.version is None and newest is not None and newest[6] is None:
        same_version_row = newest
    has_same_content = same_version_row is not None and _has_same_content(
        writer, same_version_row, item.put
    )
    if is_refused and not has_same_content:
        return TransferReport()
    is_tombstone = is_note_path(row_key[0], (TOMBSTONES,))
    # Do not overwrite a tombstone that already exists in this store, because the tombstone records
    # when the item was forgotten in this store.
    is_own_tombstone = is_tombstone and bool(rows) and row_key not in imported_tombstones
    is_same_number = item.version is not None and same_version_row is not None
    if is_same_number and not has_same_content and not is_tombstone:
        return _report_different_content(item, differing)
    if (
        is_own_tombstone
        or has_same_content
        or (newest is not None and (item.version or _MAX_VERSION) <= newest[3])
    ):
        is_current = newest is not None and newest[6:8] == (None, None)
        is_newest = is_same_number and same_version_row is newest and not is_own_tombstone
        if is_newest and is_current and item.valid_to is not None:
            # The imported version has an end time in the source, but it is still the current
            # version in this store. Set the end time of this store's version to the end time from
            # the source. If the version in this store has an expiry time, the version is left
            # unchanged.
            current_row = yield from writer.read_current_version_row(item.put)
            yield _build_close_version_statements(writer, current_row, item.valid_to, totals)
        return TransferReport(skipped=1)
    yield from _insert_imported_version(writer, item, now, totals)
    if is_tombstone:
        imported_tombstones.add(row_key)
    is_closed = item.valid_to is not None
    return TransferReport(items=int(not is_closed), versions=int(is_closed))


def _report_different_content(item: ItemVersion, differing: set[_RowKey] | None) -> TransferReport:
    """Report that an imported version already exists in this store with different content.

    Add the key to `differing`, so that later versions of the key are skipped, or raise
    `ImportFailed` if `differing` is None.
    """
    error = ImportFailed(
        f"version {item.version} of {item.put.key!r} in {decode_namespace_path(item.put.path)!r} "
        "already exists in this store with different content; import into a new store, or "
        "forget the item in this store first"
    )
    if differing is None:
        raise error
    differing.add(item.row_key)
    _LOG.warning("skipped this version and all later versions of the item: %s", error)
    return TransferReport(unsuitable=1)


def _find_keys_refused_by_tombstones(
    writer: ItemWriter, items: Sequence[ItemVersion], now: int, state: _ImportState
) -> Flow[set[_RowKey]]:
    """Return the keys of a batch for which this store has a tombstone.

    If a tombstone matches any version of a key, no version of that key is imported. In two cases,
    an item is imported although this store has a matching tombstone. If the current version in this
    store contains the erased text, the tombstone is ignored, because the text was stored again
    after the erasure. If this store already contains an identical version, with the same version
    number and content, the tombstone for this version is also ignored.
    """
    keys_of_items = yield from find_matching_tombstone_keys(
        writer.sql, [item.content for item in items], now, state.imported_tombstones
    )
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
    """Return the path, text and provenance of a row, for comparison with tombstones."""
    provenance = writer.records.decode_provenance(row[9], *row[1:4])
    return ItemContent(row[1], writer.records.decode_row_text(row), provenance)


def _insert_imported_version(
    writer: ItemWriter, item: ItemVersion, now: int, totals: WriteTotals
) -> Flow[None]:
    """Add an imported version of an item.

    If the key has a current version, that version is closed first. If the imported version is
    already closed in its source, it is first inserted as the current version and then closed.
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
    new_version = NewVersion(
        put, namespace_key, version_number, created_at, valid_from_time, expires, first_id
    )
    [(new_id,)] = yield writer.sql("allocate_ids", "[0]")
    yield (yield from writer.build_insert_version_statements([new_version], [new_id], totals))
    if item.valid_to is not None:
        yield _build_close_version_statements(
            writer, (yield from writer.read_current_version_row(put)), item.valid_to, totals
        )


def _build_close_version_statements(
    writer: ItemWriter, current_row: Row, valid_to: int, totals: WriteTotals
) -> list[Statement]:
    """Build the SQL statements that end the validity of an item's current version.

    The statements set the version's end time, so that the version is no longer current.

    `current_row` is the row of the current version, as returned by `read_current_version_row`.
    """
    namespace_key, row, _, _, valid_from, _, size, *_ = current_row
    totals.add_namespace_growth(namespace_key, -1, -size)
    return writer.build_close_version_statements([(max(valid_to, valid_from + 1), row)])


def _has_same_content(writer: ItemWriter, row: Row, put: Put) -> bool:
    """Return whether a row already has the value and the provenance that a put would write."""
    fields = writer.records.decode_provenance(row[9], *row[1:4])
    return writer.records.decode_row_text(row) == put.text and fields == (put.provenance or {})
