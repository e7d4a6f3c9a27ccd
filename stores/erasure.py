"""Erase items, including all their versions, indexed words and embeddings.

If a checkpointer is passed, the messages from which the items were created are erased from its
threads too.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from perdure.errors import ConfigurationError
from perdure.storage.flow import Flow, Row, Statement
from perdure.stores.base import PROVENANCE, Namespace, Receipt
from perdure.stores.filters import parse_filter
from perdure.stores.item_reader import Selection, from_microseconds
from perdure.stores.namespaces import check_item_key, decode_namespace_path, prefix_range
from perdure.stores.search.text import tokenize, tokenize_query
from perdure.stores.store_parts import StoreParts
from perdure.stores.values import WHOLE, extract_texts


class ErasedMessages(Protocol):
    """The interface of the report that a checkpointer returns after erasing messages."""

    @property
    def items(self) -> int:
        """The number of erased messages, counting each stored copy of a message."""

    @property
    def scrubbed(self) -> bool:
        """True if no byte of the erased messages remains in the database file."""

    @property
    def cancelled(self) -> tuple[str, ...]:
        """The tasks that were cancelled because they contained text from an erased message."""


class ErasesMessages(Protocol):
    """The interface of a checkpointer from which `Store.forget` can erase messages."""

    def erase(self, thread_id: str, message_ids: Collection[str] | None = None) -> ErasedMessages:
        """Erase messages from a thread permanently. `message_ids=None` erases the whole thread."""


class _Criteria(NamedTuple):
    """The criteria that select the items to erase.

    Attributes:
        selection: The prefix and the filters.
        key: The key of the item, whose namespace is then the prefix. None selects all keys.
        words: The words that the text of a value must all contain.
    """

    selection: Selection
    key: str | None
    words: frozenset[str]


@dataclass(slots=True)
class _RowsToErase:
    """The database rows to erase, with their hashes and the ids of their source messages.

    Attributes:
        rows: All versions of the selected keys, from the statement `all_versions` or `history`.
        hashes: The BLAKE2b-128 hashes of the versions' JSON, in hexadecimal.
        messages: The ids of the messages from which the versions were created, by thread id.
    """

    rows: list[Row] = field(default_factory=list)
    hashes: set[str] = field(default_factory=set)
    messages: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def forget(
    parts: StoreParts,
    prefix: Namespace | None,
    key: str | None,
    filter: Mapping[str, Any] | None,
    provenance: Mapping[str, Any] | None,
    query: str | None,
    dry_run: bool,
    checkpointer: ErasesMessages | None,
    threads: Collection[str],
) -> Receipt:
    """Erase items; see `Store.forget`."""
    has_no_criterion = _check_criteria_and_return_if_all_unset(
        prefix, key, filter=filter, provenance=provenance, query=query
    )
    if has_no_criterion and not threads:
        raise ConfigurationError(
            "forget() was called without a criterion; pass prefix=, filter=, provenance=, query= "
            "or threads=. To forget all items, pass prefix=()"
        )
    if threads and checkpointer is None:
        raise ConfigurationError("forget(threads=...) needs a checkpointer; pass checkpointer=")
    if parts.root and checkpointer is not None:
        raise ConfigurationError(
            "forget() with checkpointer= is not allowed on a scoped store; call forget() on the "
            "unscoped store, and set prefix= to the scope's prefix"
        )
    criteria = _Criteria(
        Selection(
            parts.resolve_prefix(() if prefix is None else prefix),
            parts.now(),
            # Do not call `StoreParts.build_item_selection` here, because it caches the filter. The
            # filter may contain the text to be erased, which must not stay in this process's
            # memory.
            parse_filter(filter) if filter else None,
            parse_filter(provenance, PROVENANCE) if provenance else None,
        ),
        None if key is None else check_item_key(key),
        _parse_query_words(query),
    )
    found_rows = (
        _RowsToErase()
        if has_no_criterion
        else parts.database.read(lambda: _find_rows_to_erase(parts, criteria))
    )
    if dry_run:
        return _build_erasure_receipt(
            parts,
            found_rows,
            threads,
            sum(map(len, found_rows.messages.values())),
            is_scrubbed=False,
        )
    # Erase messages before the store items that were derived from them. If the process dies between
    # the two steps, the items still contain the ids of the messages, so the erasure can be
    # repeated.
    messages_before = {**found_rows.messages, **dict.fromkeys(threads)}
    reports = _erase_messages_by_thread(checkpointer, messages_before)
    clean = True
    if not has_no_criterion:
        found_rows = parts.database.write(
            lambda: _erase_and_return_matching_rows(parts, criteria), deletes_rows=True
        )
        # Item versions may have been written after the first read of the items and before the
        # erasure. Erase the source messages of these versions too.
        messages_after = {
            thread_id: ids - (messages_before.get(thread_id) or set())
            for thread_id, ids in found_rows.messages.items()
        }
        reports += _erase_messages_by_thread(
            checkpointer, {thread_id: ids for thread_id, ids in messages_after.items() if ids}
        )
        # Remove the erased words and vectors from the cached indexes of this process immediately.
        # Other processes remove them at their next search.
        parts.database.read(parts.indexes.remove_erased_items_from_cached_indexes)
        clean = parts.database.scrub_deleted_rows()
    return _build_erasure_receipt(
        parts,
        found_rows,
        threads,
        sum(report.items for _, report in reports),
        is_scrubbed=clean and all(report.scrubbed for _, report in reports),
        cancelled=tuple(
            f"{thread}: {task}" for thread, report in reports for task in report.cancelled
        ),
    )


def _erase_messages_by_thread(
    checkpointer: ErasesMessages | None, message_ids_by_thread: Mapping[str, set[str] | None]
) -> list[tuple[str, ErasedMessages]]:
    """Erase messages from each thread, in order of thread id, and return the reports.

    If the message ids of a thread are None, the whole thread is erased.
    """
    if checkpointer is None:
        return []
    return [
        (thread_id, checkpointer.erase(thread_id, ids))
        for thread_id, ids in sorted(message_ids_by_thread.items())
    ]


def _build_erasure_receipt(
    parts: StoreParts,
    erased: _RowsToErase,
    thread_ids: Collection[str],
    erased_message_count: int,
    *,
    is_scrubbed: bool,
    cancelled: tuple[str, ...] = (),
) -> Receipt:
    """Build the receipt that reports an erasure of rows and messages."""
    parts_of_rows = (part for row in erased.rows for part in row[8:10] if part is not None)
    return build_receipt(
        parts,
        erased.rows,
        erased.hashes,
        messages=erased_message_count,
        threads=tuple(sorted({*erased.messages, *thread_ids})),
        clean=is_scrubbed,
        cancelled=cancelled,
        size_bytes=sum(
            len(part.encode() if isinstance(part, str) else part) for part in parts_of_rows
        ),
    )


def build_receipt(
    parts: StoreParts, rows: Sequence[Row], hashes: Collection[str], **details: Any
) -> Receipt:
    """Build the receipt that reports the erasure of item versions.

    Args:
        parts: The components of the store.
        rows: The erased versions, from the statement `all_versions` or `history`.
        hashes: The hashes of the versions' values.
        **details: Further fields of the receipt.
    """
    closed_count = sum(row[6] is not None for row in rows)
    keys = sorted({(row[1], row[2]) for row in rows})
    return Receipt(
        items=len(rows) - closed_count,
        versions=closed_count,
        keys=tuple((decode_namespace_path(path[len(parts.root) :]), key) for path, key in keys),
        hashes=tuple(sorted(hashes)),
        at=from_microseconds(parts.now()),
        **details,
    )


def _find_rows_to_erase(parts: StoreParts, criteria: _Criteria) -> Flow[_RowsToErase]:
    """Find the keys that match the criteria.

    Return all versions of each key, and the ids of the messages from which the versions were
    created.

    A key is selected for erasure if at least one of its versions meets all criteria.
    """
    prefix, records = criteria.selection.prefix, parts.records
    if criteria.key is None:
        rows = yield parts.sql("all_versions", *prefix_range(prefix))
    else:
        rows = yield parts.sql("history", prefix, criteria.key)
    matching = (parts.reader.decode_item_if_matching(row, criteria.selection) for row in rows)
    chosen = {
        (row[1], row[2])
        for row, item in filter(None, matching)
        if criteria.words <= set(tokenize("\n".join(extract_texts(item.value, [WHOLE]))))
    }
    result = _RowsToErase([row for row in rows if (row[1], row[2]) in chosen])
    for row in result.rows:
        text = records.decode_row_text(row)
        result.hashes.add(hash_erased_text(text))
        source = records.decode_provenance(row[9], *row[1:4])
        if "thread_id" in source and "message_ids" in source:
            result.messages[source["thread_id"]].update(source["message_ids"])
    return result


def _erase_and_return_matching_rows(parts: StoreParts, criteria: _Criteria) -> Flow[_RowsToErase]:
    """Erase all versions of the keys that match the criteria, in one transaction."""
    found_rows = yield from _find_rows_to_erase(parts, criteria)
    yield from erase_rows(parts, criteria.selection.prefix, found_rows.rows)
    return found_rows


def hash_erased_text(text: str) -> str:
    """Return the BLAKE2b-128 hash of a version's JSON, in hexadecimal."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def erase_rows(
    parts: StoreParts,
    prefix: bytes,
    rows: Sequence[Row],
    rewrites: Sequence[tuple[Row, list[Statement]]] = (),
) -> Flow[None]:
    """Delete item versions with their search data, and request a scrub of the deleted bytes.

    The stored search indexes of all affected namespaces are dropped, and their change counters are
    incremented. If no version is affected and no namespace is deleted, no scrub is requested.

    Args:
        parts: The components of the store.
        prefix: The path under which namespaces without versions are deleted.
        rows: The versions to delete, from the statement `all_versions` or `history`.
        rewrites: Further versions, each with the statements that remove texts from it.
    """
    sql = parts.sql
    affected_rows = [*rows, *(row for row, _ in rewrites)]
    paths = [(path,) for path in {row[1] for row in affected_rows}]
    for statement in ("drop_search_index", "count_namespace_change"):
        yield Statement(sql[statement], paths, execute_many=True)
    for _, statements in rewrites:
        yield statements
    current_ids = [(row[0],) for row in rows if row[6] is None]
    yield Statement(sql["shrink_namespace"], current_ids, execute_many=True)
    ids = [(row[0],) for row in rows]
    for statement in ("drop_item", "drop_version", "drop_index_row", "drop_pending"):
        yield sql.build_batch_statement(statement, ids)
    emptied_namespaces = yield sql("drop_empty_namespaces", *prefix_range(prefix))
    if paths or emptied_namespaces:
        yield sql("drop_orphaned_search_indexes")
        yield from parts.writer.clear_embedding_errors()
        yield sql("increment_setting", "erasures")
        yield from parts.database.request_scrub_of_deleted_rows()


def _check_criteria_and_return_if_all_unset(
    prefix: Namespace | None, key: str | None, **conditions: Mapping[str, Any] | str | None
) -> bool:
    """Validate the criteria passed to `forget`, and return whether all of them are unset.

    Raises:
        ConfigurationError: A criterion is empty, which would select everything, or a key is given
            without its namespace.
    """
    for name, condition in conditions.items():
        if condition is not None and not condition:
            raise ConfigurationError(
                f"the argument {name!r} is {condition!r}, which is empty and would match all "
                "items; pass a non-empty value, or omit the argument"
            )
    if key is not None and prefix is None:
        raise ConfigurationError(
            f"the argument 'key' is {key!r:.80}, but 'prefix' was not passed; pass the namespace "
            "of the item as prefix="
        )
    return prefix is None and all(condition is None for condition in conditions.values())


def _parse_query_words(query: str | None) -> frozenset[str]:
    """Return the words of a query.

    An item is erased only if the text of one of its versions contains all words of the query. The
    set is empty if there is no query.

    Raises:
        ConfigurationError: The query is not text, or has no words.
    """
    if not query:
        return frozenset()
    if not isinstance(query, str):
        raise ConfigurationError(f"the argument 'query' is {query!r}; expected a string")
    words = frozenset(tokenize_query(query))
    if not words:
        raise ConfigurationError(
            f"the argument 'query' is {query!r}, which contains no words; expected at least one "
            "word"
        )
    return words
