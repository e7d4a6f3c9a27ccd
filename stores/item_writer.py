"""Validate and encode puts and deletes, and write them to the database.

A put keeps the key's previous version, and records the time at which that version was replaced.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

from langgraph.store.base import NotProvided, PutOp

from perdure.errors import ConfigurationError, LimitExceeded, VersionConflict
from perdure.storage.flow import Flow, LastRequest, NamedSQL, Row, Statement
from perdure.stores.base import Provenance, PutItem
from perdure.stores.item_reader import RecordCodec, provenance_to_json
from perdure.stores.namespaces import (
    check_item_key,
    check_namespace_and_build_path,
    decode_namespace_path,
    prefix_range,
)
from perdure.stores.search.embedders import StoreEmbedder
from perdure.stores.search.text import ANALYZER, ends_with_question, tokenize
from perdure.stores.search.vectors import Model, encode_vectors_by_item
from perdure.stores.values import (
    check_number,
    decode_json_object,
    encode_value_as_json,
    extract_texts,
)

IndexOption = Literal[False] | list[str] | None
# maximum number of values that are validated on the event loop; larger batches are validated in
# another OS thread
_MAX_BRIEF_VALUES = 16
# Values are validated on the event loop only if their total cost is at most this number, so that
# validation blocks the event loop for at most 0.2 ms. The cost of a text is its number of
# characters; for the cost of containers, see `_CONTAINER_COST`
_BRIEF_COST = 20_000
# base cost of validating a list or dict; each element adds 1 to this cost
_CONTAINER_COST = 100
_CONTAINERS = (dict, list, tuple)
_MINUTE = 60_000_000  # microseconds in a minute
# minimum TTL in minutes: the smallest positive float
_MIN_TTL = 5e-324
# maximum TTL in microseconds (2,283 years), so that the expiry time is a valid datetime
_MAX_TTL = 1 << 56


@dataclass(frozen=True, slots=True)
class Limit:
    """The limits of the scope under a prefix."""

    prefix: bytes  # path of the scope
    items: int | None  # maximum number of items, or None
    bytes: int | None  # maximum total size of the items' JSON in bytes, or None


@dataclass(slots=True, eq=False)
class Put:
    """A validated put or delete, with all data that can be computed without the database."""

    path: bytes  # path of the namespace
    key: str
    text: str | None  # the value as JSON; None for a delete
    # TTL in microseconds after the last put or read; None means that the item never expires
    ttl: int | None = None
    # Version number that the key's current version must have for the put to succeed. 0 means that
    # the key must not exist.
    if_version: int | None = None
    provenance: Mapping[str, Any] | None = None
    # True if searches with query text can find the item
    is_searched: bool = True
    # whether the vectors computed from the text are stored
    stores_vectors: bool = False
    chunks: Sequence[str] = ()  # the chunks of text to embed
    # encoded vectors of the text, or None if they have not been computed
    vectors: bytes | None = None
    # error message if embedding failed
    embedding_error: str | None = None
    # JSON paths that select the searchable text in the item's value. None stands for the store's
    # default paths.
    fields: list[str] | None = None
    # limits on the number and total size of the items in a scope, which the put must not exceed
    limits: Sequence[Limit] = ()

    @property
    def is_unconditional(self) -> bool:
        """True if the put is unconditional, that is, if it has neither `if_version` nor `limits`.

        An unconditional put can fail only because of a database error.
        """
        return self.if_version is None and not self.limits


@dataclass(slots=True)
class PutPreparer:
    """Validates puts, and precomputes everything that does not depend on the database."""

    fields: list[str]  # default paths whose text is searched
    max_bytes: int  # maximum size of a value's JSON in bytes
    embeddings: StoreEmbedder
    # keyed hash function for words, or None if words are not hashed
    mask_word: Callable[[str], str] | None = None
    root: bytes = b""  # path of the scope
    limits: tuple[Limit, ...] = ()  # limits of scopes that no put may exceed
    # The TTL options of the store. `default_ttl` is the TTL, in minutes, of items that are stored
    # without a TTL of their own.
    ttl_config: Mapping[str, Any] = field(default_factory=dict)

    def prepare_puts(self, ops: Iterable[PutOp | PutItem]) -> list[Put]:
        """Validate and encode puts and deletes.

        If several puts or deletes have the same key, only the last of them is applied.
        """
        last_op = {self.check_row_key(op.namespace, op.key): op for op in ops}
        puts: list[Put] = []
        for row_key, op in last_op.items():
            ttl = op.ttl
            if isinstance(ttl, NotProvided):
                ttl = self.ttl_config.get("default_ttl")
            # langgraph's `PutOp` has no field for an expected version (for optimistic locking) and
            # no field for the provenance.
            options = (op.if_version, op.provenance) if isinstance(op, PutItem) else ()
            puts.append(self.prepare_put(row_key, op.value, op.index, ttl, *options))
        return puts

    def check_row_key(self, namespace: Any, key: Any) -> tuple[bytes, str]:
        """Validate a namespace and a key. Return the namespace's path and the key string."""
        return check_namespace_and_build_path(namespace, self.root), check_item_key(key)

    def prepare_put(
        self,
        row_key: tuple[bytes, str],
        value: Mapping[str, Any] | None,
        index: IndexOption = None,
        ttl: float | None = None,
        if_version: int | None = None,
        provenance: Provenance | None = None,
    ) -> Put:
        """Validate and encode a put (or a delete, if the value is None).

        Args:
            row_key: The path and the key, from `check_row_key`.
            value: The value, or None for a delete.
            index: The paths whose text is searched. None means the store's default paths. False
                means that no text is searched.
            ttl: The TTL in minutes, or None if the item never expires.
            if_version: The required current version, or None. 0 means that the key must not exist.
            provenance: The origin of the item.

        Raises:
            ConfigurationError: An option is wrong.
            InvalidValue: The value cannot be stored.
        """
        path, key = row_key
        if if_version is not None:
            expected = "an integer of 0 or more, where 0 means that the item must not exist"
            check_number("if_version", if_version, expected, integer=True)
        if value is None:
            return Put(path, key, None, if_version=if_version, limits=self.limits)
        put = Put(
            path,
            key,
            encode_value_as_json(value, self.max_bytes),
            ttl=None if ttl is None else _convert_ttl(ttl),
            if_version=if_version,
            provenance=provenance_to_json(provenance) if provenance else None,
        )
        if index is not None:
            put.fields = _check_index_fields(index) or None
            put.is_searched = put.fields is not None
        return self.add_scope_limits_and_text_chunks_to_put(put)

    def add_scope_limits_and_text_chunks_to_put(self, put: Put) -> Put:
        """Attach the item limits to a put, and split the put's text into chunks for embedding.

        Item limits restrict the number and the total size of stored items.

        The limits apply to the items under a scope's prefix. Only text that is searched by vector
        similarity is split.
        """
        put.limits, put.stores_vectors = self.limits, self.embeddings.stores_vectors
        if put.is_searched and put.stores_vectors:
            put.chunks = self.embeddings.split_texts(
                extract_texts(decode_json_object(put.text or ""), put.fields or self.fields)
            )
        return put

    def tokenize_value_and_detect_question(
        self, value: Mapping[str, Any], fields: str | None
    ) -> tuple[list[str], bool]:
        """Return the tokens of a value's text, and whether the text ends with a question.

        If the store hashes words, the tokens are keyed hashes.

        Args:
            value: The value.
            fields: The JSON list of the item's searched paths, or None for the store's default
                paths.
        """
        texts = extract_texts(value, self.parse_fields(fields))
        if not texts:
            return [], False
        words = tokenize("\n".join(texts))
        if self.mask_word is not None:
            words = [self.mask_word(word) for word in words]
        return words, ends_with_question(texts[-1])

    def build_index_computation_fingerprint(self, file_model: Model | None) -> list[Any]:
        """Return a description of how the words and vectors in an index are computed.

        An index stored in the database can be used only if the description that was stored with the
        index equals the description that this method returns now.
        """
        number = (
            file_model.number
            if file_model is not None
            and self.embeddings.should_compute_vectors_in_searches(file_model)
            else 0
        )
        return [ANALYZER, list(self.fields), self.mask_word is not None, number]

    def parse_fields(self, stored: str | None) -> Sequence[str]:
        """Parse a stored JSON list of searched paths; None means the default paths."""
        return self.fields if stored is None else json.loads(stored)

    def compute_missing_vectors_if_possible(
        self,
        values_and_field_lists: Sequence[tuple[Mapping[str, Any], str | None]],
        file_model: Model | None,
    ) -> list[bytes | None]:
        """Compute the embeddings of values that have no stored vectors.

        Args:
            values_and_field_lists: Each value, and the stored list of its searched paths.
            file_model: The embedding model recorded in the database.

        Returns:
            The encoded vectors of each value, or None for a value without text. If searches do not
            compute vectors, every element of the list is None.
        """
        embeddings = self.embeddings
        if (
            embeddings.embed_quickly is None
            or file_model is None
            or not embeddings.should_compute_vectors_in_searches(file_model)
        ):
            return [None] * len(values_and_field_lists)
        groups = [
            embeddings.split_texts(extract_texts(value, self.parse_fields(fields)))
            for value, fields in values_and_field_lists
        ]
        vectors = embeddings.embed_quickly(list(chain.from_iterable(groups)))
        return encode_vectors_by_item(vectors, groups, file_model)


def are_small_enough_to_check_in_event_loop(values: Sequence[Any]) -> bool:
    """Return whether the values are few and small enough to be validated on the event loop."""
    remaining, parts = _BRIEF_COST, list(values)
    # The value of a delete is None.
    if len(parts) > _MAX_BRIEF_VALUES or not {dict, type(None)}.issuperset(map(type, parts)):
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
    """Validate a TTL in minutes, and convert it to microseconds."""
    check_number("ttl", minutes, "minutes, more than zero, or None", minimum=_MIN_TTL)
    return int(max(1, min(minutes * _MINUTE, _MAX_TTL)))


def _check_index_fields(index: Literal[False] | list[str]) -> list[str]:
    """Validate the `index` argument of a put, and return it as a list of paths.

    False gives an empty list.
    """
    if index is False:
        return []
    is_list = isinstance(index, list | tuple)
    if not is_list or not all(isinstance(path, str) and path for path in index):
        raise ConfigurationError(
            f"the argument 'index' is {index!r}; expected False, None or a list of paths like "
            "['text', 'tags[*]']"
        )
    return list(index)


# -- writing puts


class NewVersion(NamedTuple):
    """A version to add. All times are Unix timestamps in microseconds."""

    put: Put
    namespace_key: int | None  # primary key of the namespace, or None if it does not exist yet
    version: int
    created_at: int  # time at which the item was created
    valid_from: int  # time at which the version was put
    expires_at: int | None
    # Id of the oldest version of the same item, or None if this version is the oldest. Lists of
    # items are ordered by this id, that is, in the order in which the items were first stored.
    first_id: int | None = None


@dataclass(slots=True)
class WriteTotals:
    """Rows and totals that are collected from all puts of a transaction.

    A `WriteTotals` object counts, for example, the items that one transaction adds to each
    namespace.

    `ItemWriter.write_totals_and_check_scope_limits` writes the collected rows and totals at the end
    of the transaction.
    """

    model: int | None = None  # number of the embedding model
    # (put, version id) tuples for the new versions that need a row in the table
    # `store_search_data`.
    index_rows: list[tuple[Put, int]] = field(default_factory=list)
    # net growth of each namespace, in items and in bytes, keyed by the namespace's primary key
    items_by_namespace: Counter[int] = field(default_factory=Counter)
    bytes_by_namespace: Counter[int] = field(default_factory=Counter)
    # total net growth of all namespaces, in items and in bytes; only unexpired items are counted
    item_growth: int = 0
    byte_growth: int = 0

    def add_namespace_growth(self, namespace_key: int, added_items: int, added_bytes: int) -> None:
        """Increase the recorded growth of a namespace by `added_items` and `added_bytes`.

        Negative numbers mean removals.
        """
        self.items_by_namespace[namespace_key] += added_items
        self.bytes_by_namespace[namespace_key] += added_bytes
        self.item_growth += added_items
        self.byte_growth += added_bytes


@dataclass(slots=True)
class ItemWriter:
    """The flows that write items."""

    sql: NamedSQL
    records: RecordCodec

    def write_puts(self, puts: Sequence[Put], now: int, model: Model | None = None) -> Flow[None]:
        """Write puts and deletes of different keys in one transaction.

        One round trip to the database reads the current versions of all keys, and another one
        writes all changes. Further round trips are needed to create namespaces, record a new
        embedding model and check limits. On Postgres, a single statement is executed if `puts`
        contains only deletes that have no required version and no limits. Unconditional deletes are
        idempotent, so they can be retried if the connection is lost during the commit.

        Args:
            puts: The puts and deletes.
            now: The current time in microseconds.
            model: The embedding model to record in the database, or None if there are no vectors.
        """
        if "delete_items" in self.sql and all(
            put.text is None and put.is_unconditional for put in puts
        ):
            keys = [(put.path, put.key) for put in puts]
            yield LastRequest([self.sql("delete_items", *map(list, zip(*keys, strict=True)), now)])
            return
        totals = WriteTotals()
        statements = yield from self._plan_puts(puts, now, totals, model)
        yield from self.write_totals_and_check_scope_limits(puts, totals, now, statements)

    def write_totals_and_check_scope_limits(
        self,
        puts: Sequence[Put],
        totals: WriteTotals,
        now: int,
        statements: Sequence[Statement] = (),
    ) -> Flow[None]:
        """Write the data collected from a transaction's puts, and check the scopes' limits.

        The collected data consists of embedding errors, new rows for the table `store_search_data`,
        and the number of items and bytes that were added to each namespace. `statements` are
        executed before this data is written.
        """
        statements_at_end, rows = [*statements], []
        for put, row in totals.index_rows:
            vectors = self.records.encode_row_vectors(put.vectors, row)
            fields = None if put.fields is None else json.dumps(put.fields)
            rows.append((row, vectors, None if vectors is None else totals.model, fields))
            if put.embedding_error is not None:
                statements_at_end.append(self._build_pending_statement(row, put.embedding_error))
        if rows:
            statements_at_end.append(self.sql.build_batch_statement("add_index_row", rows))
        if totals.items_by_namespace:
            growth = [
                (items, totals.bytes_by_namespace[namespace_key], namespace_key)
                for namespace_key, items in totals.items_by_namespace.items()
            ]
            statements_at_end.append(self.sql.build_batch_statement("grow_namespace", growth))
        limits = dict.fromkeys(limit for put in puts for limit in put.limits)
        if not limits:
            if statements_at_end:
                yield LastRequest(statements_at_end)
            return
        yield statements_at_end
        for limit in limits:
            # Check a limit only if the quantity that it limits (items or bytes) has grown. Deletes,
            # and puts that make an item smaller, are allowed even in a scope that exceeds its
            # limit.
            grown_limit = Limit(
                limit.prefix,
                limit.items if totals.item_growth > 0 else None,
                limit.bytes if totals.byte_growth > 0 else None,
            )
            yield from self._check_scope_limit(grown_limit, now)

    def _plan_puts(
        self, puts: Sequence[Put], now: int, totals: WriteTotals, model: Model | None
    ) -> Flow[list[Statement]]:
        """Read each key's current version, and build the SQL statements that execute the puts."""
        count = sum(put.text is not None for put in puts)
        ids, *located = yield [
            self.sql("allocate_ids", json.dumps([*range(count)])),
            *self.sql.build_statements("find_present", [(put.path, put.key) for put in puts]),
            *([] if model is None else [self.sql("get_setting", "model")]),
        ]
        if model is not None:
            totals.model = yield from self._record_model_and_get_its_number(model, located.pop())
        closings: list[tuple[int, int]] = []
        additions: list[NewVersion] = []
        for put, current_row in zip(puts, chain.from_iterable(located), strict=True):
            (
                namespace_key,
                row,
                version,
                created,
                valid_from,
                expires,
                size,
                last_version,
                last_closed_at,
                first_id,
            ) = current_row
            is_alive = row is not None and (expires is None or expires > now)
            present_version = version if is_alive else 0
            if put.if_version is not None and put.if_version != present_version:
                raise self._build_version_conflict(put, present_version)
            since = now
            if row is not None:
                # the clock may have stepped back
                end = max(now if is_alive else expires, valid_from + 1)
                closings.append((end, row))
                totals.add_namespace_growth(namespace_key, -1, -size)
                if not is_alive:  # Limits do not count expired items.
                    totals.item_growth += 1
                    totals.byte_growth += size
                since = max(now, end)
            elif last_closed_at is not None:
                since = max(now, last_closed_at)
            if put.text is not None:
                number = (version or last_version or 0) + 1
                expires = None if put.ttl is None else since + put.ttl
                times = (created, since, expires, first_id) if is_alive else (since, since, expires)
                additions.append(NewVersion(put, namespace_key, number, *times))
        rows = yield from self.build_insert_version_statements(
            additions, [row for (row,) in ids], totals
        )
        return [*self.build_close_version_statements(closings), *rows]

    def read_current_version_row(self, put: Put) -> Flow[Row]:
        """Return the row of a key's current version.

        The returned row has the columns of the SQL statement `find_present`. If the key has no
        current version, the columns of the current version are None. The returned row contains the
        number and end time of the key's latest closed version only if the key has no current
        version.
        """
        return (yield self.sql("find_present", put.path, put.key))[0]  # type: ignore[no-any-return]

    def build_close_version_statements(
        self, end_times_and_ids: Sequence[tuple[int, int]]
    ) -> list[Statement]:
        """Build the statements that close current versions by setting their end times.

        An item version stays current until it is replaced or deleted, or until it expires. The time
        of this event is the version's end time. `end_times_and_ids` contains (end time, version id)
        tuples.
        """
        if not end_times_and_ids:
            return []
        rows = [(row,) for _, row in end_times_and_ids]
        return [
            self.sql.build_batch_statement("close_version", end_times_and_ids),
            self.sql.build_batch_statement("drop_item", rows),
            self.sql.build_batch_statement("drop_pending", rows),
        ]

    def build_insert_version_statements(
        self, versions: Sequence[NewVersion], version_ids: Sequence[int], totals: WriteTotals
    ) -> Flow[list[Statement]]:
        """Build the SQL statements that insert new versions of items.

        Before the new version of a key is inserted, the key's current version must be closed in the
        same transaction, with `build_close_version_statements`.

        Args:
            versions: The versions.
            version_ids: The id of each version.
            totals: The totals of the transaction, which are updated.
        """
        new_paths = dict.fromkeys(
            put.path for put, namespace_key, *_ in versions if namespace_key is None
        )
        namespace_keys: dict[bytes, int] = {}
        if new_paths:
            created = yield self.sql.build_statements(
                "add_namespace", [(path,) for path in new_paths]
            )
            namespace_keys = dict(chain.from_iterable(created))
        rows = []
        for row, (put, namespace_key, version, *times) in zip(version_ids, versions, strict=True):
            namespace_key = namespace_keys[put.path] if namespace_key is None else namespace_key
            assert put.text is not None
            size = len(put.text.encode())
            encoded = self.records.encode_value_and_provenance(
                put.text, put.provenance, (put.path, put.key, version)
            )
            rows.append(
                (
                    row,
                    namespace_key,
                    put.key,
                    version,
                    *times,
                    put.ttl,
                    size,
                    put.is_searched,
                    *encoded,
                )
            )
            # Add an index row for the search data that cannot be computed from the item's value.
            # This search data consists of stored vectors, and of search paths that differ from the
            # store's default paths.
            if put.is_searched and (put.stores_vectors or put.fields is not None):
                totals.index_rows.append((put, row))
            totals.add_namespace_growth(namespace_key, 1, size)
        return [self.sql.build_batch_statement("add_item", rows)] if rows else []

    def _build_version_conflict(self, put: Put, version: int) -> VersionConflict:
        """Build the error for a put whose `if_version` differs from the item's current version.

        `version` is the current version number, or 0 if the item does not exist.
        """
        namespace = decode_namespace_path(put.path[self.records.root :])
        if not version:
            return VersionConflict(
                f"the item {put.key!r} in {namespace!r} does not exist, but if_version is "
                f"{put.if_version}; to create the item, pass if_version=0"
            )
        return VersionConflict(
            f"the item {put.key!r} in {namespace!r} is at version {version}, but if_version is "
            f"{put.if_version}; read the item again, apply your change to its current value, "
            "and write the result"
        )

    def _check_scope_limit(self, limit: Limit, now: int) -> Flow[None]:
        """Raise `LimitExceeded` if a scope has more items or bytes than allowed."""
        items, size = (yield self.sql("scope_size", *prefix_range(limit.prefix)))[0]
        if _is_within_scope_limit(limit, items, size):
            return
        expired_items, expired_bytes = (
            yield self.sql("expired_scope_size", *prefix_range(limit.prefix), now)
        )[0]
        if _is_within_scope_limit(limit, items - expired_items, size - expired_bytes):
            return
        # The limit belongs to an enclosing scope, so the error message must not disclose that
        # scope's size.
        if len(limit.prefix) < self.records.root:
            raise LimitExceeded(
                "this write would exceed the maximum size of the parent scope; delete items from "
                "the parent scope first"
            )
        limits = ((limit.items, "items"), (limit.bytes, "bytes"))
        allowed = " and ".join(f"{number} {unit}" for number, unit in limits if number is not None)
        raise LimitExceeded(
            f"after this write, the scope would contain {items - expired_items} items and "
            f"{size - expired_bytes} bytes, but at most {allowed} are allowed; delete items first"
        )

    # -- vectors

    def register_model(self, model: Model, *, replace: bool = False) -> Flow[int]:
        """Record an embedding model if it is not recorded yet, and return the model's integer id.

        Rows with vectors refer to the model by this id.

        Args:
            model: The model.
            replace: Whether the model may replace another one.

        Raises:
            EmbedderMismatch: The store's vectors come from another model.
        """
        rows = yield self.sql("get_setting", "model")
        return (yield from self._record_model_and_get_its_number(model, rows, replace=replace))

    def _record_model_and_get_its_number(
        self, model: Model, setting_rows: list[Row], *, replace: bool = False
    ) -> Flow[int]:
        """Record an embedding model unless it is already recorded, and return the model's number.

        `setting_rows` is the result of the query for the embedding model that is recorded in the
        database.
        """
        stored_model = Model.from_setting(setting_rows[0][0]) if setting_rows else None
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
        """Store newly computed vectors of item versions that are already in the database.

        Args:
            vectors_of_rows: The id of each version, and its encoded vectors, or None if it has no
                text to embed.
            model: The model of the vectors.
        """
        number = None
        if any(vectors is not None for _, vectors in vectors_of_rows):
            number = yield from self.register_model(model)
        for row, vectors in vectors_of_rows:
            encoded = self.records.encode_row_vectors(vectors, row)
            model_number = None if encoded is None else number
            yield self.sql("set_vectors", row, encoded, model_number)
            yield self.sql("drop_pending", row)
        yield Statement(
            self.sql["count_item_change"], [(row,) for row, _ in vectors_of_rows], execute_many=True
        )
        yield self.sql("increment_setting", "embedded")

    def record_failure(self, row: int, error: str) -> Flow[None]:
        """Count a failed attempt to embed a version, and record its error message."""
        yield self._build_pending_statement(row, error)

    def _build_pending_statement(self, row: int, error: str) -> Statement:
        """Build the SQL statement that stores why embedding a version failed."""
        return self.sql("add_pending", row, self.records.encode_text(error, ("pending", row)))

    def clear_embedding_errors(self) -> Flow[None]:
        """Clear recorded embedding errors, because they may quote erased texts."""
        rows = yield self.sql("pending_ids")
        parameters = [(self.records.encode_text("", ("pending", row)), row) for (row,) in rows]
        yield Statement(self.sql["set_pending_error"], parameters, execute_many=True)

    # -- time to live

    def restart_ttls(
        self, keys: Sequence[tuple[bytes, str]], clock: Callable[[], int]
    ) -> Flow[None]:
        """Restart the TTL of items from the current time."""
        # The current time is read inside the transaction, because the transaction may have to wait
        # before it starts, and items may expire during that time.
        now = clock()
        yield Statement(self.sql["restart_ttl"], [(now, *key) for key in keys], execute_many=True)

    def close_and_count_expired_items(
        self, now: int, limit: int, namespace_paths: Container[bytes]
    ) -> Flow[int]:
        """Close the current versions of up to `limit` expired items, and return the number closed.

        An expired item is given an end time and counted only if its namespace is in
        `namespace_paths`. To close an item means to set the end time of its current version. Items
        in all other namespaces remain unchanged.
        """
        rows = [row for row in (yield self.sql("expired", now, limit)) if row[4] in namespace_paths]
        if rows:
            growth = [(-1, -size, namespace_key) for _, namespace_key, size, _, _ in rows]
            yield LastRequest(
                [
                    *self.build_close_version_statements(
                        [(expires, row) for row, _, _, expires, _ in rows]
                    ),
                    self.sql.build_batch_statement("grow_namespace", growth),
                ]
            )
        return len(rows)


def _is_within_scope_limit(limit: Limit, item_count: int, byte_count: int) -> bool:
    """Return whether an item count and a size in bytes are within a scope's limits."""
    return (limit.items is None or item_count <= limit.items) and (
        limit.bytes is None or byte_count <= limit.bytes
    )
