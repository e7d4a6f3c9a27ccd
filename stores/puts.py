"""Puts and deletes: checked, encoded, read for search, and the flows that write them.

A put keeps the version that it replaces.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

from perdure.errors import ConfigurationError, LimitExceeded, VersionConflict
from perdure.storage.flow import Flow, LastRequest, NamedSQL, Row, Statement
from perdure.stores.base import Provenance
from perdure.stores.embedders import StoreEmbedder
from perdure.stores.namespaces import check_key, check_namespace, decode_path, prefix_range
from perdure.stores.reading import Records, provenance_fields, provenance_place, value_place
from perdure.stores.text import ANALYZER, ends_with_question, tokenize
from perdure.stores.values import check_number, decode_value, encode_value, extract_texts
from perdure.stores.vectors import Model

Index = Literal[False] | list[str] | None
_FEW = 16  # values that are checked in the event loop
_BRIEF = 20_000  # characters and parts: 0.2 ms
_NESTED = 100  # what a list or dict counts, beside one for each part
_NESTING = (dict, list, tuple)
_MINUTE = 60_000_000  # microseconds
_LEAST = 5e-324  # the number after zero
_LONGEST = 1 << 56  # microseconds: 2,283 years, so that what expires then is still a date


@dataclass(frozen=True, slots=True)
class Limit:
    """The limits of a prefix."""

    prefix: bytes
    items: int | None
    bytes: int | None


@dataclass(slots=True, eq=False)
class Put:
    """A checked put or delete, with everything computed that needs no database.

    A searched version has a row in `store_index` only for what a search could not find out without
    it: stored vectors, or paths of its own.
    """

    path: bytes  # of the namespace
    key: str
    text: str | None  # JSON; None: delete
    ttl: int | None = None  # microseconds it lives after the last put or read; None: for ever
    if_version: int | None = None  # the key must be at it (0: not there)
    provenance: Mapping[str, Any] | None = None
    searched: bool = True  # whether search finds it
    stored: bool = False  # whether its vectors are stored, if it has any text
    pieces: Sequence[str] = ()  # what its vectors are to be made of
    vectors: bytes | None = None  # one after another; None: none, or not yet
    missing: str | None = None  # why its vectors are still to be made
    fields: list[str] | None = None  # paths it is searched by, if not the store's
    limits: Sequence[Limit] = ()  # what must hold afterwards

    @property
    def unconditional(self) -> bool:
        """Whether only the database itself can refuse it."""
        return self.if_version is None and not self.limits

    @property
    def indexed(self) -> bool:
        """Whether it has a row in `store_index`."""
        return self.searched and (self.stored or self.fields is not None)


@dataclass(slots=True)
class Preparer:
    """Checks what is to be put, and computes what needs no database."""

    fields: list[str]  # paths whose text is searched, unless a put names others
    max_bytes: int
    embeddings: StoreEmbedder
    masked: Callable[[str], str] | None = None  # of tokens, if the index has keyed hashes
    root: bytes = b""  # the path that namespaces are under
    limits: tuple[Limit, ...] = ()  # what must hold after a put

    def place(self, namespace: Any, key: Any) -> tuple[bytes, str]:
        """The path and key at which an item may be put."""
        return check_namespace(namespace, self.root), check_key(key)

    def put(
        self,
        place: tuple[bytes, str],
        value: Mapping[str, Any] | None,
        index: Index = None,
        ttl: float | None = None,
        if_version: int | None = None,
        provenance: Provenance | None = None,
    ) -> Put:
        """A put or, with a value of None, a delete."""
        path, key = place
        if if_version is not None:
            expected = "a whole number, 0 (not there) or more"
            check_number("if_version", if_version, expected, whole=True)
        if value is None:
            return Put(path, key, None, if_version=if_version, limits=self.limits)
        put = Put(
            path,
            key,
            encode_value(value, self.max_bytes),
            ttl=None if ttl is None else _checked_ttl(ttl),
            if_version=if_version,
            provenance=provenance_fields(provenance) if provenance else None,
        )
        if index is not None:
            put.fields = _checked_fields(index) or None
            put.searched = put.fields is not None
        return self.ready(put)

    def ready(self, put: Put) -> Put:
        """A put whose value is encoded, with what its vectors are to be made of."""
        put.limits, put.stored = self.limits, self.embeddings.stores
        if put.searched and put.stored:
            put.pieces = self.embeddings.pieces(
                extract_texts(decode_value(put.text or ""), put.fields or self.fields)
            )
        return put

    def analysed(self, value: Mapping[str, Any], fields: str | None) -> tuple[list[str], bool]:
        """The words of a value, none if it has no text, and whether it ends as a question does."""
        searched = extract_texts(value, self.fields_of(fields))
        if not searched:
            return [], False
        words = tokenize("\n".join(searched))
        if self.masked is not None:
            words = [self.masked(word) for word in words]
        return words, ends_with_question(searched[-1])

    def made(self, file: Model | None) -> list[Any]:
        """How words and vectors are made in a file of a model; others cannot be compared."""
        number = file.number if file is not None and self.embeddings.derives(file) else 0
        return [ANALYZER, list(self.fields), self.masked is not None, number]

    def fields_of(self, packed: str | None) -> Sequence[str]:
        """The paths that an item is searched by."""
        return self.fields if packed is None else json.loads(packed)

    def derived(
        self, rows: Sequence[tuple[Mapping[str, Any], str | None]], file: Model | None
    ) -> list[bytes | None]:
        """The vectors of values that have none stored, each with the paths it is searched by."""
        searched = [extract_texts(value, self.fields_of(fields)) for value, fields in rows]
        return self.embeddings.derive(searched, file)


def are_brief(values: Sequence[Any]) -> bool:
    """Whether values are so few and small that checking them holds no event loop up."""
    budget = _BRIEF
    parts = [value for value in values if value is not None]  # of deletes
    if len(values) > _FEW or not {dict}.issuperset(map(type, parts)):
        return False
    while parts and budget >= 0:
        part = parts.pop()
        if isinstance(part, str):
            budget -= len(part)
        elif isinstance(part, _NESTING):
            budget -= _NESTED + len(part)
            if budget >= 0:
                parts += part.values() if isinstance(part, dict) else part
    return budget >= 0


def _checked_ttl(minutes: float) -> int:
    """A time to live in microseconds."""
    check_number("ttl", minutes, "minutes, more than zero, or None", least=_LEAST)
    return int(max(1, min(minutes * _MINUTE, _LONGEST)))


def _checked_fields(index: Literal[False] | list[str]) -> list[str]:
    if index is False:
        return []
    listed = isinstance(index, list | tuple)
    if not listed or not all(isinstance(path, str) and path for path in index):
        raise ConfigurationError(
            f"index is {index!r}; expected False, None or a list of paths like ['text', 'tags[*]']"
        )
    return list(index)


# -- writing them


class Times(NamedTuple):
    """When a key was first put, when this version was, and when it will expire; microseconds.

    `made` is the row of its first version, if that is another: what it is listed by.
    """

    created: int
    since: int
    expires: int | None
    made: int | None = None


class New(NamedTuple):
    """A version to add: what it holds, its namespace (None: not there yet), number and times."""

    put: Put
    ns: int | None
    version: int
    times: Times


@dataclass(slots=True)
class Changes:
    """The statements for all puts together, at the end."""

    model: int | None = None  # number of what the vectors come from
    # what has a row in `store_index`, and which
    indexed: list[tuple[Put, int]] = field(default_factory=list)
    items: Counter[int] = field(default_factory=Counter)  # by how much each namespace grew
    bytes: Counter[int] = field(default_factory=Counter)
    more: int = 0  # by how much what limits count did
    larger: int = 0

    def grow(self, ns: int, items: int, size: int) -> None:
        """Count what was added to a namespace, or taken from it."""
        self.items[ns] += items
        self.bytes[ns] += size
        self.more += items
        self.larger += size


@dataclass(slots=True)
class ItemWriter:
    """The flows that write."""

    sql: NamedSQL
    records: Records

    def write(self, puts: Sequence[Put], now: int, model: Model | None = None) -> Flow[None]:
        """Apply puts and deletes of different keys, all or none.

        What is there is asked in one request, and all is written in another. Postgres deletes by
        one statement, which may be run again if nobody knows whether it was committed.
        """
        if "delete" in self.sql and all(put.text is None and put.unconditional for put in puts):
            keys = [(put.path, put.key) for put in puts]
            yield LastRequest([self.sql("delete", *map(list, zip(*keys, strict=True)), now)])
            return
        changes = Changes()
        statements = yield from self._apply(puts, now, changes, model)
        yield from self.finish(puts, changes, now, statements)

    def finish(
        self, puts: Sequence[Put], changes: Changes, now: int, statements: Sequence[Statement] = ()
    ) -> Flow[None]:
        """Write what is written for all puts together, and check that the limits hold."""
        last = [*statements, *self._shared(changes)]
        # who holds too much may still delete, and put less
        limits = dict.fromkeys(limit for put in puts for limit in put.limits)
        if not limits:
            if last:
                yield LastRequest(last)
            return
        yield last
        for limit in limits:
            counted = Limit(
                limit.prefix,
                limit.items if changes.more > 0 else None,
                limit.bytes if changes.larger > 0 else None,
            )
            yield from self._check_limit(counted, now)

    def _shared(self, changes: Changes) -> list[Statement]:
        out, rows = [], []
        for put, row in changes.indexed:
            vectors = self.records.shut_vectors(put.vectors, row)
            fields = None if put.fields is None else json.dumps(put.fields)
            rows.append((row, vectors, None if vectors is None else changes.model, fields))
            if put.missing is not None:
                out.append(self._pending(row, put.missing))
        if rows:
            out.append(self.sql.build_batch("add_index", rows))
        if changes.items:
            grown = [(items, changes.bytes[ns], ns) for ns, items in changes.items.items()]
            out.append(self.sql.build_batch("grow_namespace", grown))
        return out

    def _apply(
        self, puts: Sequence[Put], now: int, changes: Changes, model: Model | None
    ) -> Flow[list[Statement]]:
        """The statements that put or delete different keys."""
        count = sum(put.text is not None for put in puts)
        ids, *located = yield [
            self.new_ids(count),
            *self.sql.build_statements("locate", [(put.path, put.key) for put in puts]),
            *([] if model is None else [self.sql("get_setting", "model")]),
        ]
        if model is not None:
            changes.model = yield from self._enrolled(model, located.pop())
        closed: list[tuple[int, int]] = []
        added: list[New] = []
        for put, there in zip(puts, chain.from_iterable(located), strict=True):
            ns, row, version, created, valid_from, expires, size, last, ended, made = there
            alive = row is not None and (expires is None or expires > now)
            self._check_version(put, version if alive else 0)
            since = now
            if row is not None:
                end = max(now if alive else expires, valid_from + 1)  # clocks step back
                closed.append((end, row))
                changes.grow(ns, -1, -size)
                if not alive:  # limits counted it no more
                    changes.more += 1
                    changes.larger += size
                since = max(now, end)
            elif ended is not None:
                since = max(now, ended)
            if put.text is not None:
                number = (version or last or 0) + 1
                expires = None if put.ttl is None else since + put.ttl
                times = Times(since, since, expires)
                if alive:
                    times = Times(created, since, expires, made)
                added.append(New(put, ns, number, times))
        rows = yield from self.add(added, [row for (row,) in ids], changes)
        return [*self.close(closed), *rows]

    def locate(self, put: Put) -> Flow[Row]:
        """The present version of a key, as the columns of `locate`; all None if there is none."""
        return (yield self.sql("locate", put.path, put.key))[0]  # type: ignore[no-any-return]

    def close(self, ends: Sequence[tuple[int, int]]) -> list[Statement]:
        """Make present versions closed ones, each given as its end and its row."""
        if not ends:
            return []
        rows = [(row,) for _, row in ends]
        return [
            self.sql.build_batch("close", ends),
            self.sql.build_batch("drop_item", rows),
            self.sql.build_batch("drop_pending", rows),
        ]

    def add(
        self, added: Sequence[New], ids: Sequence[int], changes: Changes
    ) -> Flow[list[Statement]]:
        """The statements that add present versions, each under its id, of keys that have none."""
        lacking = dict.fromkeys(put.path for put, ns, *_ in added if ns is None)
        numbers: dict[bytes, int] = {}
        if lacking:
            made = yield self.sql.build_statements("add_namespace", [(path,) for path in lacking])
            numbers = dict(chain.from_iterable(made))
        rows = []
        for row, (put, ns, version, times) in zip(ids, added, strict=True):
            ns = numbers[put.path] if ns is None else ns
            size, *shut = self._stored(put, version)
            rows.append((row, ns, put.key, version, *times, put.ttl, size, put.searched, *shut))
            if put.indexed:
                changes.indexed.append((put, row))
            changes.grow(ns, 1, size)
        return [self.sql.build_batch("add_item", rows)] if rows else []

    def new_ids(self, count: int) -> Statement:
        """Asks for ids that no version ever had, in a namespace in growing order."""
        return self.sql("new_ids", json.dumps([*range(count)]))

    def _stored(self, put: Put, version: int) -> tuple[int, str | bytes, str | bytes | None]:
        """The bytes of a value, and the value and the provenance as they are stored."""
        text = put.text
        assert text is not None
        provenance = None
        if put.provenance:
            provenance = self.records.shut(
                json.dumps(put.provenance, ensure_ascii=False),
                provenance_place(put.path, put.key, version),
            )
        size = len(text) if text.isascii() else len(text.encode())
        return size, self.records.shut(text, value_place(put.path, put.key, version)), provenance

    def _check_version(self, put: Put, version: int) -> None:
        if put.if_version is not None and put.if_version != version:
            at = f"at version {version}" if version else "not there"
            raise VersionConflict(
                f"{put.key!r} in {decode_path(put.path[self.records.root :])!r} is {at}, not at "
                f"{put.if_version}: "
                "get it again, apply your change to what it holds now, and put that"
            )

    def _check_limit(self, limit: Limit, now: int) -> Flow[None]:
        items, size = (yield self.sql("held", *prefix_range(limit.prefix)))[0]
        if _within(limit, items, size):
            return
        gone, freed = (yield self.sql("held_expired", *prefix_range(limit.prefix), now))[0]
        if _within(limit, items - gone, size - freed):
            return
        if len(limit.prefix) < self.records.root:  # what others hold there is not told
            raise LimitExceeded(
                "a scope that this one is within would hold more than it may: delete items there"
            )
        most_items, most_bytes = (
            "any number of" if most is None else most for most in (limit.items, limit.bytes)
        )
        raise LimitExceeded(
            f"the scope would hold {items - gone} items and {size - freed} bytes; it may hold "
            f"{most_items} items and {most_bytes} bytes: delete items first"
        )

    # -- vectors

    def enrol(self, model: Model, *, replace: bool = False) -> Flow[int]:
        """The number of the model that the store's vectors come from."""
        known = yield self.sql("get_setting", "model")
        return (yield from self._enrolled(model, known, replace=replace))

    def _enrolled(self, model: Model, rows: list[Row], *, replace: bool = False) -> Flow[int]:
        recorded = Model.from_setting(rows[0][0]) if rows else None
        if recorded == model:
            return recorded.number
        if recorded is not None and not replace:
            raise recorded.build_mismatch_error(model)
        number = 1 if recorded is None else recorded.number + 1
        new = Model(model.name, model.dims, model.kind, number)
        yield self.sql("set_setting", "model", new.to_setting())
        return new.number

    def give_vectors(self, given: Sequence[tuple[int, bytes | None]], model: Model) -> Flow[None]:
        """Add the vectors of versions that lacked them."""
        number = None
        if any(vectors is not None for _, vectors in given):
            number = yield from self.enrol(model)
        for row, vectors in given:
            shut = self.records.shut_vectors(vectors, row)
            of = None if shut is None else number
            yield self.sql("set_vectors", row, shut, of)
            yield self.sql("drop_pending", row)
        yield Statement(self.sql["raise_changes"], [(row,) for row, _ in given], execute_many=True)
        yield self.sql("bump_setting", "embedded")

    def still_missing(self, row: int, error: str) -> Flow[None]:
        """Note that the vectors of a version could not be made once more."""
        yield self._pending(row, error)

    def _pending(self, row: int, error: str) -> Statement:
        return self.sql("add_pending", row, self.records.shut(error, ("pending", row)))

    def hush(self) -> Flow[None]:
        """Forget why vectors are missing: an error may quote other texts."""
        rows = yield self.sql("pending_ids")
        hushed = [(self.records.shut("", ("pending", row)), row) for (row,) in rows]
        yield Statement(self.sql["hush_pending"], hushed, execute_many=True)

    # -- time

    def touch(self, keys: Sequence[tuple[bytes, str]], clock: Callable[[], int]) -> Flow[None]:
        """Let items live on for their time from now."""
        now = clock()  # in the transaction: one may have waited for it past an item's time
        yield Statement(self.sql["touch"], [(now, *key) for key in keys], execute_many=True)

    def sweep(self, now: int, limit: int, paths: Container[bytes]) -> Flow[int]:
        """Close some items in namespaces whose time is over. Returns how many."""
        rows = [row for row in (yield self.sql("expired", now, limit)) if row[4] in paths]
        if rows:
            grown = [(-1, -size, ns) for _, ns, size, _, _ in rows]
            yield LastRequest(
                [
                    *self.close([(expires, row) for row, _, _, expires, _ in rows]),
                    self.sql.build_batch("grow_namespace", grown),
                ]
            )
        return len(rows)


def _within(limit: Limit, items: int, size: int) -> bool:
    return (limit.items is None or items <= limit.items) and (
        limit.bytes is None or size <= limit.bytes
    )
