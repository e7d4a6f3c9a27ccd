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
from perdure.stores.reading import RecordCodec, provenance_place, provenance_to_json, value_place
from perdure.stores.text import ANALYZER, ends_with_question, tokenize
from perdure.stores.values import check_number, decode_value, encode_value, extract_texts
from perdure.stores.vectors import Model

IndexOption = Literal[False] | list[str] | None
_MAX_BRIEF_VALUES = 16  # values that are checked in the event loop
_BRIEF_COST = 20_000  # characters and parts: 0.2 ms
_CONTAINER_COST = 100  # what a list or dict counts, beside one for each part
_CONTAINERS = (dict, list, tuple)
_MINUTE = 60_000_000  # microseconds
_MIN_TTL = 5e-324  # the number after zero
_MAX_TTL = 1 << 56  # microseconds: 2,283 years, so that what expires then is still a date


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
    embedding_error: str | None = None  # why its vectors are still to be made
    fields: list[str] | None = None  # paths it is searched by, if not the store's
    limits: Sequence[Limit] = ()  # what must hold afterwards

    @property
    def is_unconditional(self) -> bool:
        """Whether only the database itself can refuse it."""
        return self.if_version is None and not self.limits

    @property
    def has_index_row(self) -> bool:
        """Whether it has a row in `store_index`."""
        return self.searched and (self.stored or self.fields is not None)


@dataclass(slots=True)
class PutPreparer:
    """Checks what is to be put, and computes what needs no database."""

    fields: list[str]  # paths whose text is searched, unless a put names others
    max_bytes: int
    embeddings: StoreEmbedder
    mask_word: Callable[[str], str] | None = None  # of tokens, if the index has keyed hashes
    root: bytes = b""  # the path that namespaces are under
    limits: tuple[Limit, ...] = ()  # what must hold after a put

    def check_row_key(self, namespace: Any, key: Any) -> tuple[bytes, str]:
        """The path and key at which an item may be put."""
        return check_namespace(namespace, self.root), check_key(key)

    def prepare_put(
        self,
        row_key: tuple[bytes, str],
        value: Mapping[str, Any] | None,
        index: IndexOption = None,
        ttl: float | None = None,
        if_version: int | None = None,
        provenance: Provenance | None = None,
    ) -> Put:
        """A put or, with a value of None, a delete."""
        path, key = row_key
        if if_version is not None:
            expected = "a whole number, 0 (not there) or more"
            check_number("if_version", if_version, expected, integer=True)
        if value is None:
            return Put(path, key, None, if_version=if_version, limits=self.limits)
        put = Put(
            path,
            key,
            encode_value(value, self.max_bytes),
            ttl=None if ttl is None else _convert_ttl(ttl),
            if_version=if_version,
            provenance=provenance_to_json(provenance) if provenance else None,
        )
        if index is not None:
            put.fields = _check_fields(index) or None
            put.searched = put.fields is not None
        return self.complete_put(put)

    def complete_put(self, put: Put) -> Put:
        """A put whose value is encoded, with what its vectors are to be made of."""
        put.limits, put.stored = self.limits, self.embeddings.stores_vectors
        if put.searched and put.stored:
            put.pieces = self.embeddings.split_texts(
                extract_texts(decode_value(put.text or ""), put.fields or self.fields)
            )
        return put

    def analyse_words(self, value: Mapping[str, Any], fields: str | None) -> tuple[list[str], bool]:
        """The words of a value, none if it has no text, and whether it ends as a question does."""
        texts = extract_texts(value, self.parse_fields(fields))
        if not texts:
            return [], False
        words = tokenize("\n".join(texts))
        if self.mask_word is not None:
            words = [self.mask_word(word) for word in words]
        return words, ends_with_question(texts[-1])

    def describe_index_form(self, file_model: Model | None) -> list[Any]:
        """How words and vectors are made in a file of a model; others cannot be compared."""
        number = (
            file_model.number
            if file_model is not None and self.embeddings.derives_vectors(file_model)
            else 0
        )
        return [ANALYZER, list(self.fields), self.mask_word is not None, number]

    def parse_fields(self, stored: str | None) -> Sequence[str]:
        """The paths that an item is searched by."""
        return self.fields if stored is None else json.loads(stored)

    def derive_vectors(
        self, rows: Sequence[tuple[Mapping[str, Any], str | None]], file_model: Model | None
    ) -> list[bytes | None]:
        """The vectors of values that have none stored, each with the paths it is searched by."""
        texts = [extract_texts(value, self.parse_fields(fields)) for value, fields in rows]
        return self.embeddings.derive_vectors(texts, file_model)


def are_brief(values: Sequence[Any]) -> bool:
    """Whether values are so few and small that checking them holds no event loop up."""
    remaining = _BRIEF_COST
    parts = [value for value in values if value is not None]  # of deletes
    if len(values) > _MAX_BRIEF_VALUES or not {dict}.issuperset(map(type, parts)):
        return False
    while parts and remaining >= 0:
        part = parts.pop()
        if isinstance(part, str):
            remaining -= len(part)
        elif isinstance(part, _CONTAINERS):
            remaining -= _CONTAINER_COST + len(part)
            if remaining >= 0:
                parts += part.values() if isinstance(part, dict) else part
    return remaining >= 0


def _convert_ttl(minutes: float) -> int:
    """A time to live in microseconds."""
    check_number("ttl", minutes, "minutes, more than zero, or None", minimum=_MIN_TTL)
    return int(max(1, min(minutes * _MINUTE, _MAX_TTL)))


def _check_fields(index: Literal[False] | list[str]) -> list[str]:
    if index is False:
        return []
    is_list = isinstance(index, list | tuple)
    if not is_list or not all(isinstance(path, str) and path for path in index):
        raise ConfigurationError(
            f"index is {index!r}; expected False, None or a list of paths like ['text', 'tags[*]']"
        )
    return list(index)


# -- writing them


class VersionTimes(NamedTuple):
    """When a key was first put, when this version was, and when it will expire; microseconds.

    `made` is the row of its first version, if that is another: what it is listed by.
    """

    created: int
    since: int
    expires: int | None
    first_id: int | None = None


class NewVersion(NamedTuple):
    """A version to add: what it holds, its namespace (None: not there yet), number and times."""

    put: Put
    namespace_id: int | None
    version: int
    times: VersionTimes


@dataclass(slots=True)
class WriteTotals:
    """The statements for all puts together, at the end."""

    model: int | None = None  # number of what the vectors come from
    # what has a row in `store_index`, and which
    indexed: list[tuple[Put, int]] = field(default_factory=list)
    items: Counter[int] = field(default_factory=Counter)  # by how much each namespace grew
    bytes: Counter[int] = field(default_factory=Counter)
    item_growth: int = 0  # by how much what limits count did
    byte_growth: int = 0

    def add_growth(self, namespace_id: int, items: int, size: int) -> None:
        """Count what was added to a namespace, or taken from it."""
        self.items[namespace_id] += items
        self.bytes[namespace_id] += size
        self.item_growth += items
        self.byte_growth += size


@dataclass(slots=True)
class ItemWriter:
    """The flows that write."""

    sql: NamedSQL
    records: RecordCodec

    def write_puts(self, puts: Sequence[Put], now: int, model: Model | None = None) -> Flow[None]:
        """Apply puts and deletes of different keys, all or none.

        What is there is asked in one request, and all is written in another. Postgres deletes by
        one statement, which may be run again if nobody knows whether it was committed.
        """
        if "delete" in self.sql and all(put.text is None and put.is_unconditional for put in puts):
            keys = [(put.path, put.key) for put in puts]
            yield LastRequest([self.sql("delete", *map(list, zip(*keys, strict=True)), now)])
            return
        changes = WriteTotals()
        statements = yield from self._plan_puts(puts, now, changes, model)
        yield from self.finish_writes(puts, changes, now, statements)

    def finish_writes(
        self,
        puts: Sequence[Put],
        changes: WriteTotals,
        now: int,
        statements: Sequence[Statement] = (),
    ) -> Flow[None]:
        """Write what is written for all puts together, and check that the limits hold."""
        statements_at_end = [*statements, *self._build_shared_statements(changes)]
        # who holds too much may still delete, and put less
        limits = dict.fromkeys(limit for put in puts for limit in put.limits)
        if not limits:
            if statements_at_end:
                yield LastRequest(statements_at_end)
            return
        yield statements_at_end
        for limit in limits:
            grown_limit = Limit(
                limit.prefix,
                limit.items if changes.item_growth > 0 else None,
                limit.bytes if changes.byte_growth > 0 else None,
            )
            yield from self._check_limit(grown_limit, now)

    def _build_shared_statements(self, changes: WriteTotals) -> list[Statement]:
        statements, rows = [], []
        for put, row in changes.indexed:
            vectors = self.records.encode_vectors(put.vectors, row)
            fields = None if put.fields is None else json.dumps(put.fields)
            rows.append((row, vectors, None if vectors is None else changes.model, fields))
            if put.embedding_error is not None:
                statements.append(self._build_pending(row, put.embedding_error))
        if rows:
            statements.append(self.sql.build_batch("add_index", rows))
        if changes.items:
            growth = [
                (items, changes.bytes[namespace_id], namespace_id)
                for namespace_id, items in changes.items.items()
            ]
            statements.append(self.sql.build_batch("grow_namespace", growth))
        return statements

    def _plan_puts(
        self, puts: Sequence[Put], now: int, changes: WriteTotals, model: Model | None
    ) -> Flow[list[Statement]]:
        """The statements that put or delete different keys."""
        count = sum(put.text is not None for put in puts)
        ids, *located = yield [
            self.new_ids(count),
            *self.sql.build_statements("locate", [(put.path, put.key) for put in puts]),
            *([] if model is None else [self.sql("get_setting", "model")]),
        ]
        if model is not None:
            changes.model = yield from self._register_in(model, located.pop())
        closings: list[tuple[int, int]] = []
        additions: list[NewVersion] = []
        for put, present in zip(puts, chain.from_iterable(located), strict=True):
            (
                namespace_id,
                row,
                version,
                created,
                valid_from,
                expires,
                size,
                last_version,
                last_closed_at,
                first_id,
            ) = present
            is_alive = row is not None and (expires is None or expires > now)
            self._check_version(put, version if is_alive else 0)
            since = now
            if row is not None:
                end = max(now if is_alive else expires, valid_from + 1)  # clocks step back
                closings.append((end, row))
                changes.add_growth(namespace_id, -1, -size)
                if not is_alive:  # limits counted it no more
                    changes.item_growth += 1
                    changes.byte_growth += size
                since = max(now, end)
            elif last_closed_at is not None:
                since = max(now, last_closed_at)
            if put.text is not None:
                number = (version or last_version or 0) + 1
                expires = None if put.ttl is None else since + put.ttl
                times = VersionTimes(since, since, expires)
                if is_alive:
                    times = VersionTimes(created, since, expires, first_id)
                additions.append(NewVersion(put, namespace_id, number, times))
        rows = yield from self.build_additions(additions, [row for (row,) in ids], changes)
        return [*self.build_closings(closings), *rows]

    def read_present(self, put: Put) -> Flow[Row]:
        """The present version of a key, as the columns of `locate`; all None if there is none."""
        return (yield self.sql("locate", put.path, put.key))[0]  # type: ignore[no-any-return]

    def build_closings(self, closings: Sequence[tuple[int, int]]) -> list[Statement]:
        """Make present versions closed ones, each given as its end and its row."""
        if not closings:
            return []
        rows = [(row,) for _, row in closings]
        return [
            self.sql.build_batch("close", closings),
            self.sql.build_batch("drop_item", rows),
            self.sql.build_batch("drop_pending", rows),
        ]

    def build_additions(
        self, additions: Sequence[NewVersion], ids: Sequence[int], changes: WriteTotals
    ) -> Flow[list[Statement]]:
        """The statements that add present versions, each under its id, of keys that have none."""
        new_paths = dict.fromkeys(
            put.path for put, namespace_id, *_ in additions if namespace_id is None
        )
        namespace_ids: dict[bytes, int] = {}
        if new_paths:
            created = yield self.sql.build_statements("add_namespace", [(path,) for path in new_paths])
            namespace_ids = dict(chain.from_iterable(created))
        rows = []
        for row, (put, namespace_id, version, times) in zip(ids, additions, strict=True):
            namespace_id = namespace_ids[put.path] if namespace_id is None else namespace_id
            size, *encoded = self._encode_version(put, version)
            rows.append(
                (row, namespace_id, put.key, version, *times, put.ttl, size, put.searched, *encoded)
            )
            if put.has_index_row:
                changes.indexed.append((put, row))
            changes.add_growth(namespace_id, 1, size)
        return [self.sql.build_batch("add_item", rows)] if rows else []

    def new_ids(self, count: int) -> Statement:
        """Asks for ids that no version ever had, in a namespace in growing order."""
        return self.sql("new_ids", json.dumps([*range(count)]))

    def _encode_version(
        self, put: Put, version: int
    ) -> tuple[int, str | bytes, str | bytes | None]:
        """The bytes of a value, and the value and the provenance as they are stored."""
        text = put.text
        assert text is not None
        provenance = None
        if put.provenance:
            provenance = self.records.encode_text(
                json.dumps(put.provenance, ensure_ascii=False),
                provenance_place(put.path, put.key, version),
            )
        size = len(text) if text.isascii() else len(text.encode())
        return (
            size,
            self.records.encode_text(text, value_place(put.path, put.key, version)),
            provenance,
        )

    def _check_version(self, put: Put, version: int) -> None:
        if put.if_version is not None and put.if_version != version:
            state = f"at version {version}" if version else "not there"
            raise VersionConflict(
                f"{put.key!r} in {decode_path(put.path[self.records.root :])!r} is {state}, not at "
                f"{put.if_version}: "
                "get it again, apply your change to what it holds now, and put that"
            )

    def _check_limit(self, limit: Limit, now: int) -> Flow[None]:
        items, size = (yield self.sql("held", *prefix_range(limit.prefix)))[0]
        if _is_within_limit(limit, items, size):
            return
        expired_items, expired_bytes = (
            yield self.sql("held_expired", *prefix_range(limit.prefix), now)
        )[0]
        if _is_within_limit(limit, items - expired_items, size - expired_bytes):
            return
        if len(limit.prefix) < self.records.root:  # what others hold there is not told
            raise LimitExceeded(
                "a scope that this one is within would hold more than it may: delete items there"
            )
        item_limit, byte_limit = (
            "any number of" if limit_value is None else limit_value
            for limit_value in (limit.items, limit.bytes)
        )
        raise LimitExceeded(
            f"the scope would contain {items - expired_items} items and "
            f"{size - expired_bytes} bytes; at most {item_limit} items and {byte_limit} bytes "
            "are allowed: delete items first"
        )

    # -- vectors

    def register_model(self, model: Model, *, replace: bool = False) -> Flow[int]:
        """The number of the model that the store's vectors come from."""
        rows = yield self.sql("get_setting", "model")
        return (yield from self._register_in(model, rows, replace=replace))

    def _register_in(self, model: Model, rows: list[Row], *, replace: bool = False) -> Flow[int]:
        stored_model = Model.from_setting(rows[0][0]) if rows else None
        if stored_model == model:
            return stored_model.number
        if stored_model is not None and not replace:
            raise stored_model.build_mismatch_error(model)
        number = 1 if stored_model is None else stored_model.number + 1
        new_model = Model(model.name, model.dims, model.kind, number)
        yield self.sql("set_setting", "model", new_model.to_setting())
        return new_model.number

    def store_vectors(
        self, vectors_of_rows: Sequence[tuple[int, bytes | None]], model: Model
    ) -> Flow[None]:
        """Add the vectors of versions that lacked them."""
        number = None
        if any(vectors is not None for _, vectors in vectors_of_rows):
            number = yield from self.register_model(model)
        for row, vectors in vectors_of_rows:
            encoded = self.records.encode_vectors(vectors, row)
            row_number = None if encoded is None else number
            yield self.sql("set_vectors", row, encoded, row_number)
            yield self.sql("drop_pending", row)
        yield Statement(
            self.sql["raise_changes"], [(row,) for row, _ in vectors_of_rows], execute_many=True
        )
        yield self.sql("bump_setting", "embedded")

    def record_failure(self, row: int, error: str) -> Flow[None]:
        """Note that the vectors of a version could not be made once more."""
        yield self._build_pending(row, error)

    def _build_pending(self, row: int, error: str) -> Statement:
        return self.sql("add_pending", row, self.records.encode_text(error, ("pending", row)))

    def clear_errors(self) -> Flow[None]:
        """Forget why vectors are missing: an error may quote other texts."""
        rows = yield self.sql("pending_ids")
        parameters = [(self.records.encode_text("", ("pending", row)), row) for (row,) in rows]
        yield Statement(self.sql["hush_pending"], parameters, execute_many=True)

    # -- time

    def restart_ttls(
        self, keys: Sequence[tuple[bytes, str]], clock: Callable[[], int]
    ) -> Flow[None]:
        """Let items live on for their time from now."""
        now = clock()  # in the transaction: one may have waited for it past an item's time
        yield Statement(self.sql["touch"], [(now, *key) for key in keys], execute_many=True)

    def close_expired(self, now: int, limit: int, paths: Container[bytes]) -> Flow[int]:
        """Close some items in namespaces whose time is over. Returns how many."""
        rows = [row for row in (yield self.sql("expired", now, limit)) if row[4] in paths]
        if rows:
            growth = [(-1, -size, namespace_id) for _, namespace_id, size, _, _ in rows]
            yield LastRequest(
                [
                    *self.build_closings([(expires, row) for row, _, _, expires, _ in rows]),
                    self.sql.build_batch("grow_namespace", growth),
                ]
            )
        return len(rows)


def _is_within_limit(limit: Limit, items: int, size: int) -> bool:
    return (limit.items is None or items <= limit.items) and (
        limit.bytes is None or size <= limit.bytes
    )
