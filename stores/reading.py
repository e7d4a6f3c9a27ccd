"""Rows of items and how they are read: get, list, and search without a query."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
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
from perdure.stores.filter_sql import Condition, JSONPlace, condition_of
from perdure.stores.filters import Filter
from perdure.stores.namespaces import (
    decode_path,
    encode_path,
    literal_prefix,
    matches_conditions,
    prefix_range,
)
from perdure.stores.tombstones import is_note_namespace
from perdure.stores.values import decode_value

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_PAGE = 256  # namespaces, or closed versions, read at a time
_SELECTIVE = 2_000  # an index that finds more rows than this loses to reading in order
_INDEX = "store_path:"  # what names of path indexes begin with


# -- rows


def micros(when: datetime) -> int:
    """A moment in microseconds since 1970."""
    if not isinstance(when, datetime) or when.tzinfo is None:
        raise ConfigurationError(
            f"the time is {when!r}; expected a datetime with a time zone, like datetime.now(UTC)"
        )
    return (when - _EPOCH) // _MICROSECOND


def moment(at: int) -> datetime:
    """The moment that many microseconds after 1970 (UTC)."""
    return _EPOCH + timedelta(microseconds=at)


def provenance_fields(provenance: Provenance) -> dict[str, Any]:
    """Provenance as JSON, without what was not said: what is stored, and what filters see."""
    if not isinstance(provenance, Provenance):
        raise ConfigurationError(
            f"provenance is {provenance!r}; expected Provenance(thread_id=…, actor=…)"
        )
    fields = {name: getattr(provenance, name) for name in PROVENANCE}
    messages, position, at = provenance.message_ids, provenance.position, provenance.at
    if not isinstance(messages, tuple | list):
        raise ConfigurationError(f"provenance message_ids is {messages!r}; expected a tuple")
    if position is not None and (type(position) is not int or abs(position) > 1 << 62):
        raise ConfigurationError(f"provenance position is {position!r}; expected a whole number")
    for name in ("thread_id", "checkpoint_id", "actor", "trust", "author", "message_ids"):
        for text in messages if name == "message_ids" else (fields[name],):
            if text is not None and (not isinstance(text, str) or _SURROGATE.search(text)):
                raise ConfigurationError(f"provenance {name} has {text!r}; expected Unicode text")
    fields["message_ids"] = list(messages) or None
    if at is not None:
        fields["at"] = moment(micros(at)).isoformat()
    return {name: value for name, value in fields.items() if value is not None}


def provenance_of(fields: Mapping[str, Any]) -> Provenance:
    """Provenance from its JSON."""
    values: dict[str, Any] = {name: fields[name] for name in PROVENANCE if name in fields}
    if "at" in values:
        values["at"] = datetime.fromisoformat(values["at"])
    values["message_ids"] = tuple(values.get("message_ids", ()))
    return Provenance(**values)


@dataclass(slots=True)
class Records:
    """Seals what goes into rows, and makes items of them."""

    seal: Seal
    root: int = 0  # bytes of a path that are not shown

    @property
    def sealed(self) -> bool:
        """Whether rows are encrypted."""
        return not isinstance(self.seal, ChecksumSeal)

    # -- parts of a row

    def shut(self, text: str, place: AssociatedData) -> str | bytes:
        """Text as it is stored."""
        return self.seal.seal(text.encode(), place) if self.sealed else TextOrBytes(text)

    def text(self, stored: str | bytes, place: AssociatedData) -> str:
        """Text from how it is stored, unless it was damaged, or moved from another row."""
        if isinstance(stored, bytes) and self.sealed:
            return self.seal.unseal(stored, place).decode()
        stored = stored if self.sealed else decode_text_or_bytes(stored)
        if isinstance(stored, str) and not self.sealed:
            return stored
        raise CorruptRecord(f"the row {place!r} holds a {type(stored).__name__}: it was damaged")

    def shut_vectors(self, vectors: bytes | None, row: int) -> bytes | None:
        """Vectors, one after another, as they are stored."""
        if vectors is None or not self.sealed:
            return vectors
        return self.seal.seal(vectors, ("vectors", row))

    def vectors(self, stored: bytes, row: int) -> bytes:
        """Vectors as bytes, from how they are stored."""
        return self.seal.unseal(stored, ("vectors", row)) if self.sealed else stored

    # -- whole rows

    def text_of(self, row: Row) -> str:
        """The JSON in a row of an item."""
        return self.text(row[8], value_place(row[1], row[2], row[3]))

    def value(self, row: Row) -> dict[str, Any]:
        """The value in a row of an item."""
        try:
            return decode_value(self.text_of(row))
        except ValueError as exc:
            raise CorruptRecord(
                f"the item {row[2]!r} of {decode_path(row[1])!r} cannot be read back ({exc}): "
                "its row is damaged"
            ) from exc

    def provenance(self, stored: Any, path: bytes, key: str, version: int) -> dict[str, Any]:
        """The provenance fields in a row; empty if there are none."""
        if stored is None:
            return {}
        try:
            return decode_value(self.text(stored, provenance_place(path, key, version)))
        except ValueError as exc:
            raise CorruptRecord(
                f"the provenance of the item {key!r} of {decode_path(path)!r} cannot be read back "
                f"({exc}): its row is damaged"
            ) from exc

    def item(self, row: Row, value: dict[str, Any] | None = None) -> StoredItem:
        """The item in a row."""
        _, path, key, version, created, valid_from, valid_to, expires, _, provenance = row[:10]
        fields = self.provenance(provenance, path, key, version)
        return StoredItem(
            value=self.value(row) if value is None else value,
            key=key,
            namespace=decode_path(path[self.root :]),
            created_at=moment(created),
            valid_from=moment(valid_from),
            version=version,
            valid_to=None if valid_to is None else moment(valid_to),
            expires_at=None if expires is None else moment(expires),
            provenance=provenance_of(fields) if fields else None,
        )


def value_place(path: bytes, key: str, version: int) -> AssociatedData:
    """The data that binds a value to its row."""
    return ("value", path.decode(), key, version)


def provenance_place(path: bytes, key: str, version: int) -> AssociatedData:
    """The data that binds provenance to its row."""
    return ("provenance", path.decode(), key, version)


# -- reading them


@dataclass(frozen=True, slots=True)
class Selection:
    """The items that a search selects."""

    prefix: bytes  # a path
    now: int  # they must be alive then
    filter: Filter | None = None
    provenance: Filter | None = None
    as_of: int | None = None  # look at that moment of the past instead
    newest_first: bool = False  # within a namespace

    @property
    def order(self) -> str:
        """Of creation, in SQL."""
        return "DESC" if self.newest_first else ""


@dataclass(slots=True)
class ItemReader:
    """The flows that read."""

    sql: NamedSQL
    records: Records
    values: JSONPlace  # for conditions on their JSON

    # -- one key

    def get(self, path: bytes, key: str, now: int, as_of: int | None) -> Flow[Row | None]:
        """The row of a key, at present or at a moment."""
        name, when = ("get", now) if as_of is None else ("get_as_of", as_of)
        rows = yield self.sql(name, path, key, when)
        return rows[0] if rows else None

    def history(self, path: bytes, key: str, now: int) -> Flow[list[StoredItem]]:
        """Every version of a key, oldest first."""
        rows = yield self.sql("history", path, key)
        return [self.records.item(ended(row, now)) for row in rows]

    # -- many

    def search(
        self, selection: Selection, limit: int, offset: int
    ) -> Flow[list[tuple[Row, StoredItem]]]:
        """A page of the items under a prefix: by namespace, in each in the order of creation."""
        if selection.as_of is None:
            sql, params = yield from self._under(selection)
        else:
            sql, params = self.sql["under_as_of"].format(order=selection.order), ()
        bound = (
            *prefix_range(selection.prefix),
            selection.now if selection.as_of is None else selection.as_of,
        )
        unchecked = selection.filter is None and selection.provenance is None
        skipped = offset if unchecked else 0
        reach = offset + limit - skipped
        most = reach
        while True:
            rows = yield Statement(sql, (*bound, most, skipped, *params))
            checked = (self.checked(row, selection) for row in rows)
            chosen = list(islice((hit for hit in checked if hit is not None), reach))
            if len(chosen) == reach or len(rows) < most:
                return chosen[offset - skipped :]
            most *= 8

    def checked(self, row: Row, selection: Selection) -> tuple[Row, StoredItem] | None:
        """The row's item, if it is what is wanted."""
        value = None
        if selection.filter is not None:
            value = self.records.value(row)
            if not selection.filter.matches(value):
                return None
        if selection.provenance is not None:
            _, path, key, version = row[:4]
            fields = self.records.provenance(row[9], path, key, version)
            if not selection.provenance.matches(fields):
                return None
        return row, self.records.item(row, value)

    def ids(self, selection: Selection) -> Flow[list[int]]:
        """The ids of all present items that meet the filters."""
        if selection.filter is None or selection.provenance is not None or self.records.sealed:
            return [row[0] for row, _ in (yield from self.search(selection, NO_LIMIT, 0))]
        condition, indexed = yield from self._condition(selection)
        rows = yield self._matching(selection, condition, indexed, "i.id, i.value", NO_LIMIT)
        matches = selection.filter.matches
        return [row for row, value in rows if matches(decode_value(decode_text_or_bytes(value)))]

    def closed(self, selection: Selection) -> Flow[list[Row]]:
        """The path and id of each version wanted that was closed after the moment looked at."""
        closed: list[Row] = yield self.sql(
            "closed_as_of", *prefix_range(selection.prefix), selection.as_of
        )
        if selection.filter is None and selection.provenance is None:
            return closed
        chosen = list[Row]()
        for begin in range(0, len(closed), _PAGE):
            some = json.dumps([number for _, number in closed[begin : begin + _PAGE]])
            rows = yield self.sql("versions_by_ids", some)
            chosen += [(row[1], row[0]) for row in rows if self.checked(row, selection)]
        return chosen

    # -- conditions and indexes

    def indexes(self) -> Flow[list[str]]:
        """The paths that have an index."""
        rows = yield self.sql("path_indexes")
        return sorted(name.removeprefix(_INDEX).replace("^", "") for (name,) in rows)

    def _condition(self, selection: Selection) -> Flow[tuple[Condition, str]]:
        """The part of a filter that SQL can decide, and the index to use."""
        if selection.filter is None or self.records.sealed:
            return Condition("TRUE"), ""
        indexed = (yield from self.indexes()) if self.values.takes_indexes else []
        condition = condition_of(selection.filter, self.values, indexed)
        for path in condition.paths:
            by_index = f'INDEXED BY "{index_name(path)}"'
            rows = yield self._matching(selection, condition, by_index, "1", _SELECTIVE)
            if len(rows) < _SELECTIVE:
                return condition, by_index
        return condition, ""

    def _matching(
        self, selection: Selection, condition: Condition, indexed: str, columns: str, limit: int
    ) -> Statement:
        sql = self.sql["matching"].format(
            columns=columns, condition=condition.numbered(5), indexed=indexed
        )
        return Statement(
            sql, (*prefix_range(selection.prefix), selection.now, limit, *condition.params)
        )

    def _under(self, selection: Selection) -> Flow[tuple[str, tuple[Any, ...]]]:
        """The statement of a search at present, and the parameters of its condition."""
        condition, indexed = yield from self._condition(selection)
        sql = self.sql["under"].format(
            condition=condition.numbered(6), indexed=indexed, order=selection.order
        )
        return sql, condition.params

    def explain(self, selection: Selection) -> Flow[QueryPlan]:
        """The plan of a search without a query."""
        sql, params = yield from self._under(selection)
        bound = (*prefix_range(selection.prefix), selection.now, 10, 0, *params)
        account = yield Statement(self.sql["explain"].format(query=sql), bound)
        steps = tuple(row[-1] for row in account)
        used = tuple(
            path
            for path in (yield from self.indexes())
            if any(f"{index_name(path)} " in step for step in steps)
        )
        return QueryPlan(used, steps)

    # -- namespaces

    def namespaces(
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
        """Return namespaces under a root that are not empty, in order, cut to a depth, each once.

        With `hides_notes`, namespaces of notes on memories are left out.
        """
        low, high = prefix_range(root + literal_prefix(conditions))
        out: list[Namespace] = []
        done = b""  # all that begins with it is answered
        while len(out) < offset + limit:
            rows = yield self.sql("paths", low, high, now, as_of, _PAGE)
            for (path,) in rows:
                if done and path.startswith(done):
                    continue
                namespace = decode_path(path[len(root) :])
                if hides_notes and is_note_namespace(namespace):
                    done = root + encode_path(namespace[:2])
                    continue
                if not matches_conditions(conditions, namespace):
                    continue
                if max_depth is not None and len(namespace) >= max_depth:
                    namespace = namespace[:max_depth]
                    done = root + encode_path(namespace)
                out.append(namespace)
            if len(rows) < _PAGE:
                break
            last = rows[-1][0]
            low = prefix_range(done)[1] if done and last.startswith(done) else last + b"\0"
        return out[offset : offset + limit]

    def sizes(self, paths: Sequence[bytes]) -> Flow[list[Row]]:
        """What is under each path: namespaces, items, bytes."""
        out: list[Row] = []
        for path in paths:
            out += yield self.sql("size_under", *prefix_range(path))
        return out


def index_name(path: str) -> str:
    """The name of the index on a path; SQLite takes names that differ in case for the same.

    >>> index_name("user.firstName")
    'store_path:user.first^Name'
    """
    return _INDEX + re.sub("([A-Z])", r"^\1", path)


def ended(row: Row, now: int) -> Row:
    """A row whose version ended by expiring, if it has, though nobody swept it yet."""
    is_alive = row[7] is None or row[7] > now
    return row if is_alive else (*row[:6], row[7], *row[7:])
