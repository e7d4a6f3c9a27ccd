"""Erasure of items with all versions, words and vectors, and of the messages they rest on."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from perdure.errors import ConfigurationError
from perdure.storage.database import scrub_wanted
from perdure.storage.flow import Flow, Row, Statement
from perdure.stores.base import PROVENANCE, Namespace, Receipt
from perdure.stores.filters import Filter, parse
from perdure.stores.namespaces import check_key, labels, span
from perdure.stores.parts import Parts
from perdure.stores.reading import moment
from perdure.stores.text import query_tokens, tokens
from perdure.stores.values import WHOLE, texts


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


@dataclass(slots=True)
class _Gone:
    """The number of erased messages, the cancelled tasks, and whether no bytes are left."""

    messages: int = 0
    cancelled: tuple[str, ...] = ()
    clean: bool = True

    def erase(
        self, checkpointer: ErasesMessages | None, said: Mapping[str, set[str] | None]
    ) -> None:
        """Take messages out of threads, and count them."""
        if checkpointer is None:
            return
        for thread_id, ids in sorted(said.items()):
            erased = checkpointer.erase(thread_id, ids)
            self.messages += erased.items
            self.cancelled += tuple(f"{thread_id}: {task}" for task in erased.cancelled)
            self.clean = self.clean and erased.scrubbed


@dataclass(slots=True)
class _Doomed:
    """All versions of the keys that are to go."""

    root: int = 0  # bytes of a path that are not shown
    present: list[Row] = field(default_factory=list)
    closed: list[Row] = field(default_factory=list)
    hashes: set[str] = field(default_factory=set)
    # by thread, what they rest on
    messages: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def keys(self) -> tuple[tuple[Namespace, str], ...]:
        """The keys, in order."""
        found = {(row[1], row[2]) for row in (*self.present, *self.closed)}
        return tuple((labels(path[self.root :]), key) for path, key in sorted(found))

    @property
    def size_bytes(self) -> int:
        """Bytes of values and provenance."""
        rows = (*self.present, *self.closed)
        return sum(
            len(str(part).encode() if isinstance(part, str) else part)
            for row in rows
            for part in row[8:10]
            if part is not None
        )


class Eraser:
    """Erases items of a store."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def forget(
        self,
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
        parts = self._parts
        if parts.root and checkpointer is not None:
            raise ConfigurationError(
                "a scoped store cannot erase threads, for its items may name any: call forget() of "
                "the whole store, with the prefix"
            )
        choice = _Choice(
            parts.path(() if prefix is None else prefix),
            None if key is None else check_key(key),
            parse(filter) if filter else None,
            parse(provenance, PROVENANCE) if provenance else None,
            _words(query),
        )
        doomed = _Doomed() if nothing else parts.database.read(self._doomed(choice))
        if dry_run:
            messages = sum(len(ids) for ids in doomed.messages.values())
            return self._receipt(doomed, threads, _Gone(messages, clean=False))
        # messages first: what is left of an item names what is left to do
        said = {**doomed.messages, **dict.fromkeys(threads)}
        gone = _Gone()
        gone.erase(checkpointer, said)
        if not nothing:
            doomed = parts.database.write(lambda: self._erase(choice))
            late = {t: ids - (said.get(t) or set()) for t, ids in doomed.messages.items()}
            gone.erase(checkpointer, {t: ids for t, ids in late.items() if ids})
            # words and vectors leave this process now, others when they next search
            parts.database.read(parts.searcher.indexes.purge())
            gone.clean = parts.database.scrub() and gone.clean
        return self._receipt(doomed, threads, gone)

    def _receipt(self, doomed: _Doomed, threads: Collection[str], gone: _Gone) -> Receipt:
        return Receipt(
            items=len(doomed.present),
            versions=len(doomed.closed),
            messages=gone.messages,
            keys=doomed.keys,
            hashes=tuple(sorted(doomed.hashes)),
            threads=tuple(sorted({*doomed.messages, *threads})),
            at=moment(self._parts.now()),
            clean=gone.clean,
            cancelled=gone.cancelled,
            size_bytes=doomed.size_bytes,
        )

    def _doomed(self, choice: _Choice) -> Flow[_Doomed]:
        records = self._parts.records
        if choice.key is None:
            rows = yield self._parts.sql("every_version", *span(choice.prefix))
        else:
            rows = yield self._parts.sql("history", choice.prefix, choice.key)
        values = {row[0]: records.value(row) for row in rows}
        fields = {row[0]: records.provenance(row[9], *row[1:4]) for row in rows}
        chosen = {(row[1], row[2]) for row in rows if choice.meets(values[row[0]], fields[row[0]])}
        doomed = _Doomed(len(self._parts.root))
        for row in rows:
            if (row[1], row[2]) in chosen:
                (doomed.present if row[6] is None else doomed.closed).append(row)
                doomed.hashes.add(_digest(records.text_of(row)))
                said = fields[row[0]]
                if "thread_id" in said and "message_ids" in said:
                    doomed.messages[said["thread_id"]].update(said["message_ids"])
        return doomed

    def _erase(self, choice: _Choice) -> Flow[_Doomed]:
        doomed = yield from self._doomed(choice)
        every = (*doomed.present, *doomed.closed)
        ids = [(row[0],) for row in every]
        paths = [(path,) for path in {row[1] for row in every}]
        for statement in ("drop_index_at", "raise_changes_at"):
            yield Statement(self._parts.sql[statement], paths, many=True)
        for row in doomed.present:
            yield self._parts.sql("shrink_namespace", row[0])
        for statement in ("drop_item", "drop_version", "drop_index", "drop_pending"):
            yield Statement(self._parts.sql[statement], ids, many=True)
        emptied = yield self._parts.sql("drop_empty_namespaces", *span(choice.prefix))
        if not ids and not emptied:
            return doomed
        yield self._parts.sql("drop_index_left")
        yield from self._parts.writer.hush()
        yield self._parts.sql("bump_setting", "erasures")
        yield from scrub_wanted()
        return doomed


@dataclass(frozen=True, slots=True)
class _Choice:
    """The criteria of `forget`."""

    prefix: bytes
    key: str | None
    filter: Filter | None
    provenance: Filter | None
    words: frozenset[str]

    def meets(self, value: Mapping[str, Any], provenance: Mapping[str, Any]) -> bool:
        if self.filter is not None and not self.filter.matches(value):
            return False
        if self.provenance is not None and not self.provenance.matches(provenance):
            return False
        return not self.words or self.words <= set(tokens("\n".join(texts(value, [WHOLE]))))


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
    words = frozenset(query_tokens(query))
    if not words:
        raise ConfigurationError(f"query is {query!r}, which has no words to look for")
    return words


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
