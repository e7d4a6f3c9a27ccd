"""The public methods of a store, or of the part of it under a prefix.

The public methods are here, blocking and awaited; each hands its work to a part. What concerns a
whole file is in `perdure.stores.whole_store`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from langgraph.store.base import (
    NOT_PROVIDED,
    BaseStore,
    Op,
    Result,
)

from perdure.errors import InvalidNamespace
from perdure.settings import LIST_LIMIT, SEARCH_LIMIT
from perdure.storage.database import awaited
from perdure.stores.base import (
    TTL,
    FoundItem,
    Mode,
    Namespace,
    NamespaceSize,
    Pending,
    Provenance,
    PutItem,
    Receipt,
    Span,
    StoredItem,
    WhyNot,
)
from perdure.stores.erasure import ErasesMessages, forget
from perdure.stores.items import Items, query_of
from perdure.stores.missing import MissingEmbeddings
from perdure.stores.parts import Parts
from perdure.stores.puts import Index, is_brief
from perdure.stores.ranking import Weights

_FEW = 16  # operations that are checked in the event loop


class Store(BaseStore):
    """A langgraph store with versions, and with search that needs no service."""

    supports_ttl = True

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._missing = MissingEmbeddings(parts)
        self._items = Items(parts, self._missing)
        self.database = parts.database
        self.ttl_config = parts.ttl

    # -- langgraph's own methods

    def batch(self, ops: Iterable[Op | PutItem]) -> list[Result]:
        """Run operations as one; if one is wrong, none is written.

        Reads see the state before the batch; of several puts of one key the last counts. A
        `PutItem` has all options of `put`; langgraph's `PutOp` has no provenance and conditions. A
        read refreshes times to live if its `refresh_ttl` is true, langgraph's default, and the
        store is configured so.

        Raises:
            PerdureError: See `put`, `get`, `search` and `list_namespaces`.
        """
        return self._parts.runner.run(self._items.batch(list(ops)))

    async def abatch(self, ops: Iterable[Op | PutItem]) -> list[Result]:
        """See `batch`."""
        ops = list(ops)
        values = {number: getattr(op, "value", None) for number, op in enumerate(ops)}
        brief = len(ops) <= _FEW and is_brief(values)
        return await self._parts.runner.arun(self._items.batch(ops), brief=brief)

    def put(
        self,
        namespace: Namespace,
        key: str,
        value: Mapping[str, Any],
        index: Index = None,
        *,
        ttl: TTL = NOT_PROVIDED,
        if_version: int | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        """Store an item; the replaced version stays readable through `history` and `as_of`.

        Args:
            namespace: One or more labels, each a non-empty text.
            key: Unique within the namespace.
            value: A JSON object.
            index: Paths whose text is searched; None: the store's; False: it is not searched.
            ttl: Minutes after which it expires, counted from the last put, or the last read that
                refreshes it.
            if_version: Write only if the key is at this version; 0: only if it does not exist.
            provenance: Where it comes from.

        Raises:
            InvalidNamespace: The namespace or key cannot be stored.
            InvalidValue: The value is no JSON object, or is too large.
            VersionConflict: The key is at another version.
            EmbedderMismatch: The store's vectors come from another model.
            StorageError: The database refuses. An embedder that fails is no error: the item is
                found by text, and listed in `pending_embeddings()`.
        """
        self._parts.runner.run(
            self._items.put(namespace, key, value, index, ttl, if_version, provenance)
        )

    async def aput(
        self,
        namespace: Namespace,
        key: str,
        value: Mapping[str, Any],
        index: Index = None,
        *,
        ttl: TTL = NOT_PROVIDED,
        if_version: int | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        """See `put`."""
        await self._parts.runner.arun(
            self._items.put(namespace, key, value, index, ttl, if_version, provenance),
            brief=is_brief(value),
        )

    def delete(self, namespace: Namespace, key: str, *, if_version: int | None = None) -> None:
        """Close the present version of a key; a missing key is no error.

        Raises:
            VersionConflict: The key is at another version than `if_version`.
        """
        self._parts.runner.run(self._items.delete(namespace, key, if_version))

    async def adelete(
        self, namespace: Namespace, key: str, *, if_version: int | None = None
    ) -> None:
        """See `delete`."""
        await self._parts.runner.arun(self._items.delete(namespace, key, if_version), brief=True)

    def get(
        self,
        namespace: Namespace,
        key: str,
        *,
        refresh_ttl: bool | None = None,
        as_of: datetime | None = None,
    ) -> StoredItem | None:
        """An item; None if there is none, or it has expired.

        Args:
            namespace: Where.
            key: Which.
            refresh_ttl: Whether an expiring item's time starts again; None: as configured.
            as_of: Read the state at that moment.
        """
        return self._parts.runner.run(self._items.get(namespace, key, refresh_ttl, as_of))

    async def aget(
        self,
        namespace: Namespace,
        key: str,
        *,
        refresh_ttl: bool | None = None,
        as_of: datetime | None = None,
    ) -> StoredItem | None:
        """See `get`."""
        return await self._parts.runner.arun(
            self._items.get(namespace, key, refresh_ttl, as_of), brief=True
        )

    def search(  # type: ignore[override]
        self,
        namespace_prefix: Namespace,
        /,
        *,
        query: str | None = None,
        filter: Mapping[str, Any] | None = None,
        limit: int = SEARCH_LIMIT,
        offset: int = 0,
        refresh_ttl: bool | None = None,
        mode: Mode = "hybrid",
        provenance: Mapping[str, Any] | None = None,
        as_of: datetime | None = None,
        context: bool = True,
        explain: bool = False,
        weights: Weights | None = None,
        during: Span | None = None,
        min_score: float | None = None,
        newest_first: bool = False,
    ) -> list[FoundItem]:
        """Items under a prefix that match the filters; with a query, the best answers.

        Without a query they are ordered by namespace, and then by creation. Puts do not change
        pages that were read: a new item comes last, and a new version stays in its place. A delete
        moves the items after it; give every page the same `as_of` for a list that does not change.

        Args:
            namespace_prefix: The first labels of their namespaces; `()`: all items.
            query: Plain text, without a syntax.
            filter: A filter on the value; see `docs/store.md` for the operators.
            limit: How many at most.
            offset: How many of the first to skip.
            refresh_ttl: Whether the time of expiring items starts again; None: as configured.
            mode: By words and vectors, or by one of them.
            provenance: A filter on the provenance.
            as_of: Look at that moment instead, as it was then.
            context: Whether neighbours in the thread, speakers and `during` count; they need
                provenance.
            explain: Whether each result has the parts of its score.
            weights: How much each part counts, such as `Weights(recency=0.2)`; None: the defaults.
            during: The period, start and end, that the query is about, such as last week. Items
                from it score higher (`Weights.date`); others are still found.
            min_score: The lowest score to return, the same in every search: 1 for an item with all
                words of the query or its very vector; 0.3 leaves out most unrelated items.
            newest_first: Without a query, whether what was created last in a namespace comes first.

        Raises:
            InvalidFilter: A filter has an unknown operator or a wrong operand, or names a field
                that no provenance has.
            EmbeddingFailed: The query could not be embedded, with `mode="semantic"`; a hybrid
                search then goes by words alone, and logs a warning.
            EmbedderMismatch: The store's vectors come from another model.
            ConfigurationError: Another argument is wrong.
        """
        wanted = self._parts.wanted(namespace_prefix, filter, provenance, as_of, newest_first)
        asked = query_of(query, mode, context, explain, weights, during, min_score)
        return self._parts.runner.run(self._items.search(wanted, asked, limit, offset, refresh_ttl))

    async def asearch(  # type: ignore[override]
        self,
        namespace_prefix: Namespace,
        /,
        *,
        query: str | None = None,
        filter: Mapping[str, Any] | None = None,
        limit: int = SEARCH_LIMIT,
        offset: int = 0,
        refresh_ttl: bool | None = None,
        mode: Mode = "hybrid",
        provenance: Mapping[str, Any] | None = None,
        as_of: datetime | None = None,
        context: bool = True,
        explain: bool = False,
        weights: Weights | None = None,
        during: Span | None = None,
        min_score: float | None = None,
        newest_first: bool = False,
    ) -> list[FoundItem]:
        """See `search`."""
        wanted = self._parts.wanted(namespace_prefix, filter, provenance, as_of, newest_first)
        asked = query_of(query, mode, context, explain, weights, during, min_score)
        return await self._parts.runner.arun(
            self._items.search(wanted, asked, limit, offset, refresh_ttl), brief=not query
        )

    def list_namespaces(
        self,
        *,
        prefix: Namespace | None = None,
        suffix: Namespace | None = None,
        max_depth: int | None = None,
        limit: int = LIST_LIMIT,
        offset: int = 0,
        as_of: datetime | None = None,
    ) -> list[Namespace]:
        """Namespaces that hold something, in order.

        Args:
            prefix: Labels they begin with; `"*"` stands for any one label.
            suffix: Labels they end with; `"*"` stands for any one label.
            max_depth: Cut them to so many labels, each result once.
            limit: How many at most.
            offset: How many to leave out.
            as_of: Look at that moment instead, as it was then.
        """
        return self._parts.runner.run(
            self._items.list_namespaces(prefix, suffix, max_depth, limit, offset, as_of)
        )

    async def alist_namespaces(
        self,
        *,
        prefix: Namespace | None = None,
        suffix: Namespace | None = None,
        max_depth: int | None = None,
        limit: int = LIST_LIMIT,
        offset: int = 0,
        as_of: datetime | None = None,
    ) -> list[Namespace]:
        """See `list_namespaces`."""
        return await self._parts.runner.arun(
            self._items.list_namespaces(prefix, suffix, max_depth, limit, offset, as_of), brief=True
        )

    # -- versions

    def history(self, namespace: Namespace, key: str) -> list[StoredItem]:
        """Every version of a key, oldest first, with the time each was valid."""
        return self._parts.runner.run(self._items.history(namespace, key))

    async def ahistory(self, namespace: Namespace, key: str) -> list[StoredItem]:
        """See `history`."""
        return await self._parts.runner.arun(self._items.history(namespace, key))

    # -- why

    def why_not(
        self,
        namespace: Namespace,
        key: str,
        *,
        query: str,
        prefix: Namespace | None = None,
        filter: Mapping[str, Any] | None = None,
        mode: Mode = "hybrid",
        provenance: Mapping[str, Any] | None = None,
        as_of: datetime | None = None,
        context: bool = True,
        during: Span | None = None,
    ) -> WhyNot:
        """The place of an item in the answers to a query under a prefix, and the reason.

        The arguments from `query` on are those of `search`; without a prefix, that is the item's
        namespace.

        Raises:
            ConfigurationError: There is no query; see also `search`.
        """
        within = namespace if prefix is None else prefix
        wanted = self._parts.wanted(within, filter, provenance, as_of)
        asked = query_of(query, mode, context, True, during=during)
        return self._parts.runner.run(self._items.why_not(namespace, key, wanted, asked))

    async def awhy_not(
        self,
        namespace: Namespace,
        key: str,
        *,
        query: str,
        prefix: Namespace | None = None,
        filter: Mapping[str, Any] | None = None,
        mode: Mode = "hybrid",
        provenance: Mapping[str, Any] | None = None,
        as_of: datetime | None = None,
        context: bool = True,
        during: Span | None = None,
    ) -> WhyNot:
        """See `why_not`."""
        within = namespace if prefix is None else prefix
        wanted = self._parts.wanted(within, filter, provenance, as_of)
        asked = query_of(query, mode, context, True, during=during)
        return await self._parts.runner.arun(self._items.why_not(namespace, key, wanted, asked))

    # -- erasing

    def forget(
        self,
        prefix: Namespace | None = None,
        *,
        key: str | None = None,
        filter: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        query: str | None = None,
        dry_run: bool = False,
        checkpointer: ErasesMessages | None = None,
        threads: Collection[str] = (),
    ) -> Receipt:
        """Erase items with all their versions, also from the bytes of the file.

        A key is erased with all its versions if one of them, present or closed, meets all criteria.
        Other writers wait while the file is rewritten. It may be cut off and called again.

        Args:
            prefix: Only items under it; `()`, or None with another criterion: all.
            key: Only the item of this key that is in the namespace `prefix` itself.
            filter: What a value must meet.
            provenance: What its provenance must meet.
            query: Words that a value's text must all contain, in any form; no ranking.
            dry_run: Only count; messages of `threads` are not counted.
            checkpointer: Also erases the messages that provenance names (`thread_id` and
                `message_ids`) from their threads.
            threads: Threads to delete as a whole, such as all threads of a user.

        Raises:
            InvalidFilter: A filter has an unknown operator or a wrong operand, or names a field
                that no provenance has.
            InvalidNamespace: The prefix or the key is not valid.
            ConfigurationError: There is no criterion, a query has no words, a key is given without
                a namespace, `threads` without a checkpointer, or a checkpointer to a scoped store.
        """
        return forget(
            self._parts, prefix, key, filter, provenance, query, dry_run, checkpointer, threads
        )

    aforget = awaited(forget)

    # -- sizes

    def namespace_sizes(self, prefixes: Sequence[Namespace]) -> list[NamespaceSize]:
        """What is under each of these prefixes; see `list_namespaces` for a page of them."""
        paths = [self._parts.path(prefix) for prefix in prefixes]
        rows = self.database.read(lambda: self._parts.reader.sizes(paths))
        return [NamespaceSize(tuple(p), *row) for p, row in zip(prefixes, rows, strict=True)]

    anamespace_sizes = awaited(namespace_sizes)

    # -- vectors that are missing

    def pending_embeddings(self, namespace_prefix: Namespace = ()) -> list[Pending]:
        """Items whose vectors could not be made yet; text search finds them."""
        return self.database.read(lambda: self._missing.pending(self._parts.path(namespace_prefix)))

    apending_embeddings = awaited(pending_embeddings)

    def embed_pending(self, namespace_prefix: Namespace = ()) -> int:
        """Make missing vectors; returns how many items got vectors.

        An item whose text the embedder refuses stays pending; the others get their vectors.

        Raises:
            EmbeddingFailed: The embedder fails for all.
        """
        return self._parts.runner.run(self._missing.embed_all(self._parts.path(namespace_prefix)))

    async def aembed_pending(self, namespace_prefix: Namespace = ()) -> int:
        """See `embed_pending`."""
        return await self._parts.runner.arun(
            self._missing.embed_all(self._parts.path(namespace_prefix))
        )

    # -- a part of it

    def scoped(
        self, prefix: Namespace, *, max_items: int | None = None, max_bytes: int | None = None
    ) -> ScopedStore:
        """A store limited to a prefix: it cannot read or name anything outside.

        Namespaces given to it, and those it returns, leave the prefix out. It shares this store's
        database and need not be closed. Of a scoped store, the limits of both hold.

        Args:
            prefix: One label at least.
            max_items: How many items may be under it.
            max_bytes: How much JSON they may have together.

        Raises:
            InvalidNamespace: The prefix is none, or empty.
            ConfigurationError: A limit is no whole number.
        """
        path = self._parts.path(prefix)
        if not path:
            raise InvalidNamespace("the prefix is empty; give at least one label")
        return ScopedStore(self._parts.under(path, max_items, max_bytes))


class ScopedStore(Store):
    """A store limited to the namespaces under a prefix; `()` is the prefix itself."""
