"""The doors of a store: langgraph's, with what perdure adds, each in two colours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from langgraph.store.base import (
    NOT_PROVIDED,
    ListNamespacesOp,
    MatchCondition,
    Op,
    Result,
)

from perdure.errors import ConfigurationError, InvalidValue
from perdure.stores.base import (
    TTL,
    FoundItem,
    Mode,
    Namespace,
    Provenance,
    PutItem,
    Span,
    StoredItem,
    WhyNot,
)
from perdure.stores.forgetting import Forgetting
from perdure.stores.namespaces import check_key
from perdure.stores.preparing import Index, Request, is_brief
from perdure.stores.reading import Wanted
from perdure.stores.searching import Query
from perdure.stores.steps import Read, Steps
from perdure.stores.weighting import Weights


class Doors(Forgetting):
    """What can be asked of a store, or of the part of it that is under a prefix."""

    # -- langgraph's own doors

    def batch(self, ops: Iterable[Op | PutItem]) -> list[Result]:
        """Run operations as one; if one is wrong, none is written.

        Reads answer what was there before the batch; of several puts of one key the last counts.
        A `PutItem` is a put with all that `put` takes, langgraph's `PutOp` one without provenance
        and conditions. A read refreshes times to live if its `refresh_ttl` is true, which is
        langgraph's default, and the configuration says so.

        Raises:
            PerdureError: See `put`, `get`, `search` and `list_namespaces`.
        """
        return self._driver.run(self._batch(ops))

    async def abatch(self, ops: Iterable[Op | PutItem]) -> list[Result]:
        """See `batch`."""
        return await self._driver.arun(self._batch(ops))

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
        """Store an item; the version it replaces stays readable through `history` and `as_of`.

        Args:
            namespace: Labels, outermost first; any non-empty text.
            key: Unique within the namespace.
            value: A JSON object.
            index: Paths whose text is searched; None: the store's; False: it is not searched.
            ttl: Minutes after which it expires, counted from the last put, or the last read that
                refreshes it.
            if_version: Only if the key is at this version; 0: only if it is not there.
            provenance: Where it comes from.

        Raises:
            InvalidNamespace: The namespace or key cannot be stored.
            InvalidValue: The value is no JSON object, or is too large.
            VersionConflict: The key is at another version.
            EmbedderMismatch: The store's vectors come from another model.
            StorageError: The database refuses. An embedder that fails is no error: the item is
                found by text, and listed in `pending_embeddings()`.
        """
        self._driver.run(
            self._put(self._request(namespace, key, value, index, ttl, if_version, provenance))
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
        request = self._request(namespace, key, value, index, ttl, if_version, provenance)
        await self._driver.arun(self._put(request), brief=is_brief(value))

    def delete(self, namespace: Namespace, key: str, *, if_version: int | None = None) -> None:
        """Close the present version of a key; one that is not there is no error.

        Raises:
            VersionConflict: The key is at another version than `if_version`.
        """
        self._driver.run(self._put(self._limited(namespace, key, None, if_version=if_version)))

    async def adelete(
        self, namespace: Namespace, key: str, *, if_version: int | None = None
    ) -> None:
        """See `delete`."""
        request = self._limited(namespace, key, None, if_version=if_version)
        await self._driver.arun(self._put(request), brief=True)

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
            refresh_ttl: Whether an item that expires lives on; None: as configured.
            as_of: Look at that moment instead, as it was then.
        """
        return self._driver.run(
            self._get(namespace, key, refresh=self._refreshes(refresh_ttl), as_of=as_of)
        )

    async def aget(
        self,
        namespace: Namespace,
        key: str,
        *,
        refresh_ttl: bool | None = None,
        as_of: datetime | None = None,
    ) -> StoredItem | None:
        """See `get`."""
        refresh = self._refreshes(refresh_ttl)
        steps = self._get(namespace, key, refresh=refresh, as_of=as_of)
        return await self._driver.arun(steps, brief=True)

    def search(  # type: ignore[override]
        self,
        namespace_prefix: Namespace,
        /,
        *,
        query: str | None = None,
        filter: Mapping[str, Any] | None = None,
        limit: int = 10,
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
    ) -> list[FoundItem]:
        """Items under a prefix that meet the filters; with a query, those that answer it best.

        Without a query they come namespace by namespace, the last put first in each.

        Args:
            namespace_prefix: The labels that their namespaces begin with; `()`: everything.
            query: Words of the user; their syntax means nothing.
            filter: What the value must meet; see `docs/store.md` for the operators.
            limit: How many at most.
            offset: How many of the best to leave out.
            refresh_ttl: Whether items that expire live on; None: as configured.
            mode: By words and vectors, or only one of them.
            provenance: What the provenance must meet, in the form of a filter.
            as_of: Look at that moment instead, as it was then.
            context: Whether an item's neighbours in its thread lend it their score, and a date
                that the query names counts; without provenance there is none.
            explain: Whether each result tells the parts of its score.
            weights: How much each part counts, say `Weights(recency=0.2)`; None: as measured best.
            during: A span of time that the query means, from its start up to its end, say what
                "last week" is today: what was said then counts as what was said at a date that
                the query names.
            min_score: Least score of what is returned, the same in every search: 1 has all words
                of the query, weighed by how rare they are, or its very vector; 0.3 keeps out most
                of what has nothing to do with it.

        Raises:
            InvalidFilter: A filter has an unknown operator or a wrong operand, or names a field
                that no provenance has.
            EmbeddingFailed: The query could not be embedded, with `mode="semantic"`; a hybrid
                search then goes by words alone, and logs a warning.
            EmbedderMismatch: The store's vectors come from another model.
            ConfigurationError: Another argument is wrong.
        """
        wanted = self._wanted(namespace_prefix, filter, provenance, as_of)
        asked = self._query(query, mode, context, explain, weights, during, min_score)
        page = self._page(limit, offset)
        return self._driver.run(
            self._search(wanted, asked, *page, refresh=self._refreshes(refresh_ttl))
        )

    async def asearch(  # type: ignore[override]
        self,
        namespace_prefix: Namespace,
        /,
        *,
        query: str | None = None,
        filter: Mapping[str, Any] | None = None,
        limit: int = 10,
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
    ) -> list[FoundItem]:
        """See `search`."""
        wanted = self._wanted(namespace_prefix, filter, provenance, as_of)
        asked = self._query(query, mode, context, explain, weights, during, min_score)
        page = self._page(limit, offset)
        steps = self._search(wanted, asked, *page, refresh=self._refreshes(refresh_ttl))
        return await self._driver.arun(steps, brief=asked is None)

    def list_namespaces(
        self,
        *,
        prefix: Namespace | None = None,
        suffix: Namespace | None = None,
        max_depth: int | None = None,
        limit: int = 100,
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
        op = _listing(prefix, suffix, max_depth, limit, offset)
        return self._driver.run(self._list(op, as_of))

    async def alist_namespaces(
        self,
        *,
        prefix: Namespace | None = None,
        suffix: Namespace | None = None,
        max_depth: int | None = None,
        limit: int = 100,
        offset: int = 0,
        as_of: datetime | None = None,
    ) -> list[Namespace]:
        """See `list_namespaces`."""
        op = _listing(prefix, suffix, max_depth, limit, offset)
        return await self._driver.arun(self._list(op, as_of), brief=True)

    # -- versions

    def history(self, namespace: Namespace, key: str) -> list[StoredItem]:
        """Every version of a key, oldest first, with the time each was valid."""
        return self._driver.run(self._history(namespace, key))

    async def ahistory(self, namespace: Namespace, key: str) -> list[StoredItem]:
        """See `history`."""
        return await self._driver.arun(self._history(namespace, key))

    def _history(self, namespace: Namespace, key: str) -> Steps[list[StoredItem]]:
        path, text = self._path(namespace), check_key(key)
        versions: list[StoredItem] = yield Read(self._reader.history(path, text, self._now()))
        return versions

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
        """Where an item stands in the answers to a query under a prefix, and why.

        Args:
            namespace: The item's namespace.
            key: Its key.
            query: As given to `search`.
            prefix: As given to `search`; None: the item's namespace.
            filter: As given to `search`.
            mode: As given to `search`.
            provenance: As given to `search`.
            as_of: As given to `search`.
            context: As given to `search`.
            during: As given to `search`.

        Raises:
            ConfigurationError: There is no query; see also `search`.
        """
        wanted = self._wanted(namespace if prefix is None else prefix, filter, provenance, as_of)
        asked = self._query(query, mode, context, True, during=during)
        return self._driver.run(self._why(namespace, key, wanted, asked))

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
        wanted = self._wanted(namespace if prefix is None else prefix, filter, provenance, as_of)
        asked = self._query(query, mode, context, True, during=during)
        return await self._driver.arun(self._why(namespace, key, wanted, asked))

    def _why(
        self, namespace: Namespace, key: str, wanted: Wanted, asked: Query | None
    ) -> Steps[WhyNot]:
        path, text = self._path(namespace), check_key(key)
        if asked is None:
            raise ConfigurationError("why_not needs a query")
        if not path.startswith(wanted.prefix):
            return WhyNot("it is not under the prefix")
        row = yield Read(self._reader.get(path, text, wanted.now, wanted.as_of))
        return (yield from self._searcher.why_not(wanted, asked, row))

    # -- arguments

    def _request(
        self,
        namespace: Namespace,
        key: str,
        value: Mapping[str, Any],
        index: Index,
        ttl: TTL,
        if_version: int | None,
        provenance: Provenance | None,
    ) -> Request:
        if value is None:  # in langgraph's own form of a put that is a delete; here it is a slip
            raise InvalidValue("the value is None; expected a dict: to remove an item, delete it")
        return self._limited(namespace, key, value, index, ttl, if_version, provenance)


def _listing(
    prefix: Namespace | None,
    suffix: Namespace | None,
    max_depth: int | None,
    limit: int,
    offset: int,
) -> ListNamespacesOp:
    conditions = []
    if prefix:
        conditions.append(MatchCondition("prefix", prefix))
    if suffix:
        conditions.append(MatchCondition("suffix", suffix))
    return ListNamespacesOp(tuple(conditions), max_depth, limit, offset)
