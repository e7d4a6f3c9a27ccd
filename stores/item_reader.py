"""Encode and decode item rows, and read items and namespaces from the database."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import Any

from langgraph.store.base import MatchCondition

from perdure.errors import ConfigurationError, CorruptRecord
from perdure.storage.encryption import AssociatedData, ChecksumSeal, Seal
from perdure.storage.flow import (
    NO_LIMIT,
    Flow,
    NamedSQL,
    Row,
    Statement,
    TextOrBytes,
    decode_text_or_bytes,
)
from perdure.stores.base import PROVENANCE, Namespace, Provenance, QueryPlan, StoredItem
from perdure.stores.filter_sql import Condition, JSONLocation, build_filter_condition
from perdure.stores.filters import Filter
from perdure.stores.namespaces import (
    decode_namespace_path,
    encode_namespace_path,
    find_literal_prefix,
    is_literal_prefix,
    matches_conditions,
    prefix_range,
    split_range_around_prefixes,
)
from perdure.stores.tombstones import (
    is_namespace_of_internal_notes,
    list_paths_of_internal_notes,
)
from perdure.stores.values import decode_json_object

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# page size, in rows, for reading namespaces or closed versions
_PAGE_ROWS = 256
# number of keys that one statement looks up when many values are read
_KEYS_PER_STATEMENT = 250
# An index on a JSON path is used only if it finds fewer than this number of matching rows. With
# more rows, scanning all rows in sort order is faster.
_MAX_INDEX_ROWS = 2_000
_INDEX_PREFIX = "store_path:"  # prefix of the names of path indexes


# -- rows


def to_microseconds(moment: datetime) -> int:
    """Convert a datetime to a Unix timestamp in microseconds.

    Raises:
        ConfigurationError: The value is not a datetime with a time zone.
    """
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise ConfigurationError(
            f"the time is {moment!r}; expected a datetime with a time zone, like datetime.now(UTC)"
        )
    return (moment - _EPOCH) // _MICROSECOND


def from_microseconds(microseconds: int) -> datetime:
    """Convert a Unix timestamp in microseconds to a UTC datetime."""
    return _EPOCH + timedelta(microseconds=microseconds)


def provenance_to_json(provenance: Provenance) -> dict[str, Any]:
    """Validate provenance, and return it as a JSON object without empty fields.

    This object is stored with the item. Provenance filters match against it.

    Raises:
        ConfigurationError: A field has a wrong type.
    """
    if not isinstance(provenance, Provenance):
        raise ConfigurationError(
            f"the argument 'provenance' is {provenance!r}; expected an instance of Provenance, "
            "like Provenance(thread_id=…, actor=…)"
        )
    fields = {name: getattr(provenance, name) for name in PROVENANCE}
    message_ids, position, sent_at = provenance.message_ids, provenance.position, provenance.at
    if not isinstance(message_ids, tuple | list):
        raise ConfigurationError(
            f"provenance.message_ids is {message_ids!r}; expected a tuple of message ids"
        )
    if position is not None and (type(position) is not int or abs(position) > 1 << 62):
        raise ConfigurationError(
            f"provenance.position is {position!r}; expected an integer, or None"
        )
    for name in ("thread_id", "checkpoint_id", "actor", "trust", "author", "message_ids"):
        for text in message_ids if name == "message_ids" else (fields[name],):
            if text is not None and (not isinstance(text, str) or _SURROGATE.search(text)):
                label = "an element of " if name == "message_ids" else ""
                raise ConfigurationError(
                    f"{label}the provenance field {name!r} is {text!r}; expected valid Unicode text"
                )
    fields["message_ids"] = list(message_ids) or None
    if sent_at is not None:
        fields["at"] = from_microseconds(to_microseconds(sent_at)).isoformat()
    return {name: value for name, value in fields.items() if value is not None}


def provenance_from_json(fields: Mapping[str, Any]) -> Provenance:
    """Convert a JSON object, as built by `provenance_to_json`, to provenance.

    Unknown fields are ignored.
    """
    values: dict[str, Any] = {name: fields[name] for name in PROVENANCE if name in fields}
    if "at" in values:
        values["at"] = datetime.fromisoformat(values["at"])
    values["message_ids"] = tuple(values.get("message_ids", ()))
    return Provenance(**values)


@dataclass(slots=True)
class RecordCodec:
    """Encodes and encrypts fields of item rows, and decodes rows to items."""

    seal: Seal
    # Length of the scope's namespace prefix in bytes. This prefix is removed from the namespaces of
    # decoded items.
    root: int = 0
    is_encrypted: bool = field(init=False)  # whether rows are encrypted

    def __post_init__(self) -> None:
        self.is_encrypted = not isinstance(self.seal, ChecksumSeal)

    # -- parts of a row

    def encode_text(self, text: str, associated_data: AssociatedData) -> str | bytes:
        """Encode a text for storage, encrypting it if the store has a key.

        `associated_data` identifies the row that contains the text.
        """
        return (
            self.seal.seal(text.encode(), associated_data)
            if self.is_encrypted
            else TextOrBytes(text)
        )

    def decode_text(self, stored: str | bytes, associated_data: AssociatedData) -> str:
        """Return a stored text, decrypted if the store has a key.

        Raises:
            CorruptRecord: The stored value is neither text nor an encoded text, or an encrypted
                text is damaged or belongs to another row.
        """
        if isinstance(stored, bytes):
            if self.is_encrypted:
                return self.seal.unseal(stored, associated_data).decode()
            stored = decode_text_or_bytes(stored)
        if isinstance(stored, str) and not self.is_encrypted:
            return stored
        raise CorruptRecord(
            f"the row {associated_data!r} is damaged: its value has the unexpected type "
            f"{type(stored).__name__}; restore the database from a backup"
        )

    def encode_value_and_provenance(
        self,
        text: str,
        provenance: Mapping[str, Any] | None,
        row_key: tuple[bytes, str, int],
    ) -> tuple[str | bytes, str | bytes | None]:
        """Encode a version's value and provenance for storage.

        If the store has an encryption key, the encryption uses the column name and the row key as
        associated data. Decryption therefore fails if a ciphertext was moved to another row or
        column.

        Args:
            text: The value as JSON text.
            provenance: The provenance as a JSON object. None or an empty object is stored as NULL.
            row_key: The path of the namespace, the key and the version number.

        Returns:
            The encoded value, and the encoded provenance or None.
        """
        path, key, version = row_key
        encoded_value = self.encode_text(text, ("value", path.decode(), key, version))
        if not provenance:
            return encoded_value, None
        provenance_text = json.dumps(provenance, ensure_ascii=False)
        return encoded_value, self.encode_text(
            provenance_text, ("provenance", path.decode(), key, version)
        )

    def encode_row_vectors(self, vectors: bytes | None, row_id: int) -> bytes | None:
        """Encode a row's concatenated vectors for storage, with encryption if there is a key."""
        if vectors is None or not self.is_encrypted:
            return vectors
        return self.seal.seal(vectors, ("vectors", row_id))

    def decode_row_vectors(self, stored: bytes, row_id: int) -> bytes:
        """Return stored vectors as bytes."""
        return self.seal.unseal(stored, ("vectors", row_id)) if self.is_encrypted else stored

    # -- whole rows

    def decode_row_text(self, row: Row) -> str:
        """Return the value in a row as JSON text."""
        return self.decode_text(row[8], ("value", row[1].decode(), row[2], row[3]))

    def decode_row_value(self, row: Row) -> dict[str, Any]:
        """Return the value in a row."""
        return self._decode_json_column("value", "item", row[8], *row[1:4])

    def decode_provenance(self, stored: Any, path: bytes, key: str, version: int) -> dict[str, Any]:
        """Return the provenance fields of a row, or an empty dict if it has none."""
        if stored is None:
            return {}
        label = "provenance of the item"
        return self._decode_json_column("provenance", label, stored, path, key, version)

    def _decode_json_column(
        self, column: str, label: str, stored: Any, path: bytes, key: str, version: int
    ) -> dict[str, Any]:
        """Return the JSON object in a column of a row. `label` names it in the error message."""
        try:
            return decode_json_object(
                self.decode_text(stored, (column, path.decode(), key, version))
            )
        except ValueError as exc:
            raise CorruptRecord(
                f"the {label} {key!r} in {decode_namespace_path(path)!r} cannot be read, "
                f"because its row is damaged ({exc}); restore the database from a backup"
            ) from exc

    def decode_item(self, row: Row, value: dict[str, Any] | None = None) -> StoredItem:
        """Return the item of a row.

        A caller that has already decoded the row's value passes it as `value`.
        """
        _, path, key, version, created, valid_from, valid_to, expires, stored, provenance = row[:10]
        fields = (
            {} if provenance is None else self.decode_provenance(provenance, path, key, version)
        )
        if value is None:
            value = self._decode_json_column("value", "item", stored, path, key, version)
        return StoredItem(
            value=value,
            key=key,
            namespace=decode_namespace_path(path[self.root :]),
            created_at=from_microseconds(created),
            valid_from=from_microseconds(valid_from),
            version=version,
            valid_to=None if valid_to is None else from_microseconds(valid_to),
            expires_at=None if expires is None else from_microseconds(expires),
            provenance=provenance_from_json(fields) if fields else None,
        )


# -- reading them


@dataclass(frozen=True, slots=True)
class Selection:
    """The criteria that select items for a read, a search or an erasure."""

    prefix: bytes  # path of the namespace prefix
    # Current time in microseconds. Items that have expired by this time are excluded, unless
    # `as_of` is given.
    now: int
    filter: Filter | None = None  # filter on values
    provenance: Filter | None = None  # filter on provenance
    # Point in time, in microseconds, at which the selected versions were current. None selects the
    # versions that are current now.
    as_of: int | None = None
    newest_first: bool = False  # order within a namespace

    @property
    def sql_order(self) -> str:
        """The SQL sort direction: `DESC` for newest first, otherwise empty."""
        return "DESC" if self.newest_first else ""


@dataclass(slots=True)
class ItemReader:
    """The flows that read items."""

    sql: NamedSQL
    records: RecordCodec
    # location of an item's JSON value in a table row, used to build the SQL conditions of filters
    values: JSONLocation

    # -- one key

    def read_row(self, path: bytes, key: str, now: int, as_of: int | None) -> Flow[Row | None]:
        """Return the row of a key's version at a given time, or None if the key did not exist then.

        If `as_of` is None, return the version that is current at `now`. If `as_of` is a time in the
        past, return the version that was current at that time.
        """
        name, moment = ("get", now) if as_of is None else ("get_as_of", as_of)
        rows = yield self.sql(name, path, key, moment)
        return rows[0] if rows else None

    def read_value_texts(
        self, paths_and_keys: Sequence[tuple[bytes, str]], now: int
    ) -> Flow[dict[tuple[bytes, str], str]]:
        """Return the values of many present items as JSON text, by namespace path and key.

        Keys without a present item are left out of the result.

        Raises:
            CorruptRecord: The row of an item is damaged.
        """
        requested = ", ".join(["(?, ?)"] * _KEYS_PER_STATEMENT)
        sql = self.sql["present_values"].format(requested=requested)
        decode_text, texts = self.records.decode_text, dict[tuple[bytes, str], str]()
        for start in range(0, len(paths_and_keys), _KEYS_PER_STATEMENT):
            params: list[Any] = [
                *chain.from_iterable(paths_and_keys[start : start + _KEYS_PER_STATEMENT])
            ]
            # Every statement has the same number of parameters, so that it is prepared only once.
            # Unused parameters are NULL, which matches no path.
            params += [None] * (2 * _KEYS_PER_STATEMENT - len(params))
            for path, key, version, value in (yield Statement(sql, (*params, now))):
                row_data = ("value", path.decode(), key, version)
                texts[path, key] = decode_text(value, row_data)
        return texts

    def read_history(self, path: bytes, key: str, now: int) -> Flow[list[StoredItem]]:
        """Return every version of a key, oldest first."""
        rows = yield self.sql("history", path, key)
        return [self.records.decode_item(set_end_time_of_expired_version(row, now)) for row in rows]

    # -- many keys

    def read_page(
        self, selection: Selection, limit: int, offset: int
    ) -> Flow[list[tuple[Row, StoredItem]]]:
        """Return one page of the items that match a selection, each with its database row.

        The items are ordered by namespace, then by creation time.
        """
        if selection.as_of is None:
            sql, params = yield from self._build_item_page_sql_and_params(selection)
        else:
            sql, params = self.sql["page_as_of"].format(order=selection.sql_order), ()
        bounds = (
            *prefix_range(selection.prefix),
            selection.now if selection.as_of is None else selection.as_of,
        )
        has_no_filter = selection.filter is None and selection.provenance is None
        skipped = offset if has_no_filter else 0
        needed_count = offset + limit - skipped
        limit_rows = needed_count
        # The SQL condition may also select rows that do not match the filter. If too few of the
        # selected rows match, run the query again with a higher LIMIT.
        while True:
            rows = yield Statement(sql, (*bounds, limit_rows, skipped, *params))
            matching = (self.decode_item_if_matching(row, selection) for row in rows)
            chosen = list(islice((match for match in matching if match is not None), needed_count))
            if len(chosen) == needed_count or len(rows) < limit_rows:
                return chosen[offset - skipped :]
            limit_rows *= 8

    def decode_item_if_matching(
        self, row: Row, selection: Selection
    ) -> tuple[Row, StoredItem] | None:
        """Return a row and its item, or None if the item does not match the selection's filters."""
        value = None
        if selection.filter is not None:
            value = self.records.decode_row_value(row)
            if not selection.filter.matches(value):
                return None
        if selection.provenance is not None:
            _, path, key, version = row[:4]
            fields = self.records.decode_provenance(row[9], path, key, version)
            if not selection.provenance.matches(fields):
                return None
        return row, self.records.decode_item(row, value)

    def read_matching_ids(self, selection: Selection) -> Flow[list[int]]:
        """Return the version ids of all items that match a selection."""
        if (
            selection.filter is None
            or selection.provenance is not None
            or self.records.is_encrypted
        ):
            return [row[0] for row, _ in (yield from self.read_page(selection, NO_LIMIT, 0))]
        condition, index_hint = yield from self._choose_sql_condition_and_index_hint(selection)
        rows = yield self._build_select_current_items_statement(
            selection, condition, index_hint, "i.id, i.value", NO_LIMIT
        )
        matches = selection.filter.matches
        return [
            row for row, value in rows if matches(decode_json_object(decode_text_or_bytes(value)))
        ]

    def read_closed_versions(self, selection: Selection) -> Flow[list[Row]]:
        """Return the closed versions that a search with `as_of` must include in its ranking.

        The returned closed versions are those that match the filters, were current at
        `selection.as_of`, and have been closed since then.

        Returns:
            The namespace path and the id of each version.
        """
        closed: list[Row] = yield self.sql(
            "closed_as_of", *prefix_range(selection.prefix), selection.as_of
        )
        if selection.filter is None and selection.provenance is None:
            return closed
        chosen = list[Row]()
        for start in range(0, len(closed), _PAGE_ROWS):
            rows = yield self.sql(
                "versions_by_ids",
                json.dumps([number for _, number in closed[start : start + _PAGE_ROWS]]),
            )
            chosen += [
                (row[1], row[0]) for row in rows if self.decode_item_if_matching(row, selection)
            ]
        return chosen

    # -- conditions and indexes

    def read_path_indexes(self) -> Flow[list[str]]:
        """Return the indexed JSON paths in sorted order."""
        rows = yield self.sql("path_indexes")
        return sorted(name.removeprefix(_INDEX_PREFIX).replace("^", "") for (name,) in rows)

    def _choose_sql_condition_and_index_hint(
        self, selection: Selection
    ) -> Flow[tuple[Condition, str]]:
        """Return a selection's filter as an SQL condition, with the matching `INDEXED BY` clause.

        If no database index is selective enough to make the query faster than a full scan, the
        `INDEXED BY` clause is empty.
        """
        if selection.filter is None or self.records.is_encrypted:
            return Condition("TRUE"), ""
        indexed_paths = (
            (yield from self.read_path_indexes()) if self.values.supports_indexes else []
        )
        condition = build_filter_condition(selection.filter, self.values, indexed_paths)
        for path in condition.paths:
            index_hint = f'INDEXED BY "{build_json_path_index_name(path)}"'
            rows = yield self._build_select_current_items_statement(
                selection, condition, index_hint, "1", _MAX_INDEX_ROWS
            )
            if len(rows) < _MAX_INDEX_ROWS:
                return condition, index_hint
        return condition, ""

    def _build_select_current_items_statement(
        self, selection: Selection, condition: Condition, index_hint: str, columns: str, limit: int
    ) -> Statement:
        """Build the statement that selects the current items that satisfy an SQL condition."""
        sql = self.sql["matching"].format(
            columns=columns,
            condition=condition.build_sql_with_numbered_parameters(5),
            indexed=index_hint,
        )
        return Statement(
            sql, (*prefix_range(selection.prefix), selection.now, limit, *condition.params)
        )

    def _build_item_page_sql_and_params(
        self, selection: Selection
    ) -> Flow[tuple[str, tuple[Any, ...]]]:
        """Return the SQL that reads one page of current items, and the parameters of its filter."""
        condition, index_hint = yield from self._choose_sql_condition_and_index_hint(selection)
        sql = self.sql["page"].format(
            condition=condition.build_sql_with_numbered_parameters(6),
            indexed=index_hint,
            order=selection.sql_order,
        )
        return sql, condition.params

    def read_query_plan(self, selection: Selection) -> Flow[QueryPlan]:
        """Return the database's query plan for a search without query text.

        The query plan describes the SQL statement that reads the first 10 items of the search
        result.
        """
        sql, params = yield from self._build_item_page_sql_and_params(selection)
        plan_rows = yield Statement(
            self.sql["explain"].format(query=sql),
            (*prefix_range(selection.prefix), selection.now, 10, 0, *params),
        )
        steps = tuple(row[-1] for row in plan_rows)
        used_paths = tuple(
            path
            for path in (yield from self.read_path_indexes())
            if any(f"{build_json_path_index_name(path)} " in step for step in steps)
        )
        return QueryPlan(used_paths, steps)

    # -- namespaces

    def read_namespaces(
        self,
        root: bytes,
        conditions: Sequence[MatchCondition],
        max_depth: int | None,
        limit: int,
        offset: int,
        now: int,
        as_of: int | None,
        hides_notes: bool = False,
    ) -> Flow[list[Namespace]]:
        """Return the distinct namespaces that are under a root path and contain items, sorted.

        Args:
            root: The path of the scope.
            conditions: Conditions that the namespaces must meet.
            max_depth: The maximum number of labels, to which longer namespaces are truncated.
            limit: The maximum number of namespaces.
            offset: The number of namespaces to skip.
            now: The current time in microseconds.
            as_of: A past time in microseconds, or None for the current time.
            hides_notes: Whether namespaces with notes about memories are left out.
        """
        low, high = prefix_range(root + find_literal_prefix(conditions))
        if max_depth is None and all(map(is_literal_prefix, conditions)) and len(conditions) <= 1:
            ranges = [(low, high)]
            if hides_notes:
                ranges = split_range_around_prefixes(low, high, list_paths_of_internal_notes(root))
            paths = yield from self._read_page_of_paths(ranges, limit, offset, now, as_of)
            return [decode_namespace_path(path[len(root) :]) for path in paths]
        namespaces: list[Namespace] = []
        # namespace paths that begin with this prefix are skipped, because they were already
        # handled; empty if no paths are to be skipped
        handled_prefix = b""
        while len(namespaces) < offset + limit:
            rows = yield self.sql("nonempty_paths", low, high, now, as_of, _PAGE_ROWS, 0)
            for (path,) in rows:
                if handled_prefix and path.startswith(handled_prefix):
                    continue
                namespace = decode_namespace_path(path[len(root) :])
                if hides_notes and is_namespace_of_internal_notes(namespace):
                    handled_prefix = root + encode_namespace_path(namespace[:2])
                    continue
                if not matches_conditions(conditions, namespace):
                    continue
                if max_depth is not None and len(namespace) >= max_depth:
                    namespace = namespace[:max_depth]
                    handled_prefix = root + encode_namespace_path(namespace)
                namespaces.append(namespace)
            if len(rows) < _PAGE_ROWS:
                break
            last = rows[-1][0]
            low = (
                prefix_range(handled_prefix)[1]
                if handled_prefix and last.startswith(handled_prefix)
                else last + b"\0"
            )
        return namespaces[offset : offset + limit]

    def _read_page_of_paths(
        self,
        ranges: Iterable[tuple[bytes, bytes]],
        limit: int,
        offset: int,
        now: int,
        as_of: int | None,
    ) -> Flow[list[bytes]]:
        """Return one page of the paths of non-empty namespaces within the given ranges.

        SQL skips the paths before the page.

        Args:
            ranges: The start and the exclusive end of each range, sorted.
            limit: The maximum number of paths.
            offset: The number of paths to skip.
            now: The current time in microseconds.
            as_of: A past time in microseconds, or None for the current time.
        """
        paths: list[bytes] = []
        for start, stop in ranges:
            if len(paths) >= limit:
                break
            arguments = start, stop, now, as_of
            rows = yield self.sql("nonempty_paths", *arguments, limit - len(paths), offset)
            paths += [path for (path,) in rows]
            if rows:
                offset = 0
            elif offset:
                [(count,)] = yield self.sql("count_nonempty_paths", *arguments)
                offset -= count
        return paths

    def read_namespace_sizes(self, paths: Sequence[bytes]) -> Flow[list[Row]]:
        """Count the non-empty namespaces, the items and the bytes under each path."""
        sizes: list[Row] = []
        for path in paths:
            sizes += yield self.sql("size_under", *prefix_range(path))
        return sizes


def build_json_path_index_name(json_path: str) -> str:
    """Return the name of the index on a path.

    Capital letters are escaped, because identifiers in SQLite are case-insensitive.

    >>> build_json_path_index_name("user.firstName")
    'store_path:user.first^Name'
    """
    return _INDEX_PREFIX + re.sub("([A-Z])", r"^\1", json_path)


def set_end_time_of_expired_version(version_row: Row, now: int) -> Row:
    """Return a version's row, with the end time set to the expiry time if the version has expired.

    Until an expired version is swept, its row in the database has no end time.
    """
    is_alive = version_row[7] is None or version_row[7] > now
    return version_row if is_alive else (*version_row[:6], version_row[7], *version_row[7:])
