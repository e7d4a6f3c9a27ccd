"""Erasure of items with all versions, words and vectors, and of the messages they rest on."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from perdure.errors import ConfigurationError
from perdure.storage.flow import Flow, Row, Statement
from perdure.stores.base import PROVENANCE, Namespace, Receipt
from perdure.stores.filters import parse
from perdure.stores.namespaces import check_key, decode_path, prefix_range
from perdure.stores.parts import StoreParts
from perdure.stores.reading import Selection, moment
from perdure.stores.text import tokenize, tokenize_query
from perdure.stores.values import WHOLE, extract_texts


class _Erased(Protocol):
    @property
    def items(self) -> int: ...

    @property
    def scrubbed(self) -> bool: ...

    @property
    def cancelled(self) -> tuple[str, ...]: ...


class ErasesMessages(Protocol):
    """The methods of a checkpointer that `forget` needs."""

    def erase(self, thread_id: str, message_ids: Collection[str] | None = None) -> _Erased:
        """Take messages out of a thread for good; None: the whole thread."""


class _Choice(NamedTuple):
    """The criteria of `forget`."""

    selection: Selection
    key: str | None
    words: frozenset[str]


@dataclass(slots=True)
class _Doomed:
    """All versions of the keys that are to go, and by thread the messages that they rest on."""

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
    """See `Store.forget`."""
    nothing = _names_nothing(prefix, key, filter=filter, provenance=provenance, query=query)
    if nothing and not threads:
        raise ConfigurationError(
            "forget() was not told what; give a prefix (() for everything), filter=, "
            "provenance=, query= or threads="
        )
    if threads and checkpointer is None:
        raise ConfigurationError("forget(threads=...) needs checkpointer=")
    if parts.root and checkpointer is not None:
        raise ConfigurationError(
            "a scoped store cannot erase threads, for its items may name any: call forget() of "
            "the whole store, with the prefix"
        )
    choice = _Choice(
        Selection(
            parts.resolve_prefix(() if prefix is None else prefix),
            parts.now(),
            parse(filter)
            if filter
            else None,  # not `StoreParts.build_selection`, which keeps what it parsed
            parse(provenance, PROVENANCE) if provenance else None,
        ),
        None if key is None else check_key(key),
        _words(query),
    )
    doomed = _Doomed() if nothing else parts.database.read(lambda: _doomed(parts, choice))
    if dry_run:
        messages = sum(map(len, doomed.messages.values()))
        return _receipt(parts, doomed, threads, messages, clean=False)
    # messages first: what is left of an item names what is left to do
    first = {**doomed.messages, **dict.fromkeys(threads)}
    erased = _erase_messages(checkpointer, first)
    clean = True
    if not nothing:
        doomed = parts.database.write(lambda: _erase(parts, choice), deletes_rows=True)
        late = {t: ids - (first.get(t) or set()) for t, ids in doomed.messages.items()}
        erased += _erase_messages(checkpointer, {t: ids for t, ids in late.items() if ids})
        # words and vectors leave this process now, others when they next search
        parts.database.read(parts.indexes.purge)
        clean = parts.database.scrub()
    return _receipt(
        parts,
        doomed,
        threads,
        sum(each.items for _, each in erased),
        clean=clean and all(each.scrubbed for _, each in erased),
        cancelled=tuple(f"{thread}: {task}" for thread, each in erased for task in each.cancelled),
    )


def _erase_messages(
    checkpointer: ErasesMessages | None, messages: Mapping[str, set[str] | None]
) -> list[tuple[str, _Erased]]:
    if checkpointer is None:
        return []
    return [(thread, checkpointer.erase(thread, ids)) for thread, ids in sorted(messages.items())]


def _receipt(
    parts: StoreParts,
    doomed: _Doomed,
    threads: Collection[str],
    messages: int,
    *,
    clean: bool,
    cancelled: tuple[str, ...] = (),
) -> Receipt:
    closed = sum(row[6] is not None for row in doomed.rows)
    keys = sorted({(row[1], row[2]) for row in doomed.rows})
    stored = (part for row in doomed.rows for part in row[8:10] if part is not None)
    return Receipt(
        items=len(doomed.rows) - closed,
        versions=closed,
        messages=messages,
        keys=tuple((decode_path(path[len(parts.root) :]), key) for path, key in keys),
        hashes=tuple(sorted(doomed.hashes)),
        threads=tuple(sorted({*doomed.messages, *threads})),
        at=moment(parts.now()),
        clean=clean,
        cancelled=cancelled,
        size_bytes=sum(len(part.encode() if isinstance(part, str) else part) for part in stored),
    )


def _doomed(parts: StoreParts, choice: _Choice) -> Flow[_Doomed]:
    prefix, records = choice.selection.prefix, parts.records
    if choice.key is None:
        rows = yield parts.sql("every_version", *prefix_range(prefix))
    else:
        rows = yield parts.sql("history", prefix, choice.key)
    checked = (parts.reader.checked(row, choice.selection) for row in rows)
    chosen = {
        (row[1], row[2])
        for row, item in filter(None, checked)
        if choice.words <= set(tokenize("\n".join(extract_texts(item.value, [WHOLE]))))
    }
    doomed = _Doomed([row for row in rows if (row[1], row[2]) in chosen])
    for row in doomed.rows:
        text = records.text_of(row)
        doomed.hashes.add(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
        source = records.provenance(row[9], *row[1:4])
        if "thread_id" in source and "message_ids" in source:
            doomed.messages[source["thread_id"]].update(source["message_ids"])
    return doomed


def _erase(parts: StoreParts, choice: _Choice) -> Flow[_Doomed]:
    sql = parts.sql
    doomed = yield from _doomed(parts, choice)
    ids = [(row[0],) for row in doomed.rows]
    paths = [(path,) for path in {row[1] for row in doomed.rows}]
    for statement in ("drop_index_at", "raise_changes_at"):
        yield Statement(sql[statement], paths, execute_many=True)
    present = [(row[0],) for row in doomed.rows if row[6] is None]
    yield Statement(sql["shrink_namespace"], present, execute_many=True)
    for statement in ("drop_item", "drop_version", "drop_index", "drop_pending"):
        yield sql.build_batch(statement, ids)
    emptied = yield sql("drop_empty_namespaces", *prefix_range(choice.selection.prefix))
    if ids or emptied:
        yield sql("drop_index_left")
        yield from parts.writer.hush()
        yield sql("bump_setting", "erasures")
        yield from parts.database.request_scrub()
    return doomed


def _names_nothing(
    prefix: Namespace | None, key: str | None, **conditions: Mapping[str, Any] | str | None
) -> bool:
    """Whether nothing says which items are meant.

    Raises:
        ConfigurationError: A condition is empty, which would be all, or a key has no namespace.
    """
    for name, condition in conditions.items():
        if condition is not None and not condition:
            raise ConfigurationError(f"{name} is {condition!r}, which would forget all")
    if key is not None and prefix is None:
        raise ConfigurationError(
            f"key is {key!r:.80}, and no namespace is given; give the one that it is in as prefix"
        )
    return prefix is None and all(condition is None for condition in conditions.values())


def _words(query: str | None) -> frozenset[str]:
    """The words that a text must hold; none if there is no query."""
    if not query:
        return frozenset()
    if not isinstance(query, str):
        raise ConfigurationError(f"query is {query!r}; expected text")
    words = frozenset(tokenize_query(query))
    if not words:
        raise ConfigurationError(f"query is {query!r}, which has no words to look for")
    return words
