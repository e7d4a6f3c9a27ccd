"""Public methods of stores and of scopes, which are stores limited to a namespace prefix.

Read methods block, and their async variants run them in the thread pool for reads. `asearch` first
awaits the vector of the query, if the embedding model may run outside this process. Each write
method is implemented as a single coroutine, which both the blocking and the async variant of the
method run (see `perdure.effects`). Methods that act on all namespaces of a database are in
`perdure.stores.whole_store`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from langgraph.store.base import (
    NOT_PROVIDED,
    BaseStore,
    GetOp,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchOp,
)

from perdure.errors import ConfigurationError, InvalidNamespace
from perdure.settings import LIST_LIMIT, SEARCH_LIMIT
from perdure.storage.database import make_async_twin
from perdure.storage.flow import fetch_rows
from perdure.stores.author_erasure import forget_author
from perdure.stores.base import (
    TTL,
    FoundItem,
    Mode,
    Namespace,
    NamespaceSize,
    PendingEmbedding,
    Period,
    Provenance,
    PutItem,
    RankExplanation,
    Receipt,
    StoredItem,
)
from perdure.stores.erasure import ErasesMessages, forget
from perdure.stores.item_reader import to_microseconds
from perdure.stores.item_writer import IndexOption, are_small_enough_to_check_in_event_loop
from perdure.stores.namespaces import (
    check_item_key,
    check_match_condition,
    check_namespace_prefix_and_build_path,
    decode_namespace_path,
    prefix_range,
)
from perdure.stores.search.embeddings_backfill import MissingEmbeddings
from perdure.stores.search.ranking import Weights
from perdure.stores.search.searching import (
    Searcher,
    SearchQuery,
    build_query,
    check_limit_and_offset,
)
from perdure.stores.store_parts import StoreParts
from perdure.stores.values import check_number


class Store(BaseStore):
    """A LangGraph store that keeps old versions of items and has built-in search."""

    supports_ttl = True

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._missing = MissingEmbeddings(parts)
        self._searcher = Searcher(parts)
        self.database = parts.database
        self.ttl_config = parts.ttl

    # -- many operations

    @property
    def parts(self) -> StoreParts:
        """The store's internal components, for use by other packages of perdure."""
        return self._parts

    def batch(self, ops: Iterable[Op | PutItem]) -> list[Result]:
        """Run several operations as one. If one is wrong, nothing is written.

        Reads see the state before the batch. If the batch contains several puts of one key, only
        the last one is written. A `PutItem` supports all options of `put`, whereas langgraph's
        `PutOp` supports neither provenance nor conditions. A read with `refresh_ttl=True`
        (langgraph's default) restarts the TTLs of the items that it returns, unless the store was
        opened with `ttl={"refresh_on_read": False}`.

        Args:
            ops: The operations.

        Returns:
            The result of each operation, in order; None for a put.

        Raises:
            PerdureError: See `put`, `get`, `search` and `list_namespaces`.
        """
        return self._parts.runner.run(self._run_operations(list(ops)))

    async def abatch(self, ops: Iterable[Op | PutItem]) -> list[Result]:
        """Run several operations as one batch; see `batch`."""
        return await self._parts.runner.arun(self._run_operations(list(ops)))

    async def _run_operations(self, ops: Sequence[Op | PutItem]) -> list[Result]:
        """Run the operations of one batch, and return their results."""
        writes = [op for op in ops if isinstance(op, PutOp | PutItem)]
        prepare = partial(self._parts.preparer.prepare_puts, writes)
        # Large values are validated and encoded in another OS thread.
        is_small = are_small_enough_to_check_in_event_loop([op.value for op in writes])
        puts = prepare() if is_small else await self._parts.runner.build_read_effect(prepare)
        results: list[Result] = [None] * len(ops)
        if len(writes) < len(ops):
            queries = [await self._embed_query_of_search_op(op) for op in ops]
            results = await self._parts.runner.build_read_effect(
                lambda: list(map(self._run_read_operation, ops, queries))
            )
        if puts:
            model = await self._missing.embed_puts_and_get_model(puts)
            await self._parts.runner.write_puts(puts, self._parts.now(), model)
            if model is not None and self._missing.may_retry:
                await self._missing.embed_pending_items_after_put(len(puts))
        return results

    async def _embed_query_of_search_op(self, op: Op | PutItem) -> SearchQuery | None:
        """Embed a search query, unless the model is known to run in this process.

        An embedding model can also run outside this process.

        For example, the model may run in a model server.

        Return the query with its vector. Return None if the operation is not a search, or if the
        embedding model runs in this process. If the model runs in this process, the query is
        embedded later, as a step of the search.
        """
        if not isinstance(op, SearchOp) or not self._searcher.awaits_vectors:
            return None
        selection = self._parts.build_item_selection(op.namespace_prefix)
        return await self._searcher.add_query_vector(build_query(op.query), selection)

    def _run_read_operation(self, op: Op | PutItem, query: SearchQuery | None) -> Any:
        """Run the read of one operation. A put gives None."""
        if isinstance(op, PutOp | PutItem):
            return None
        if isinstance(op, ListNamespacesOp):
            return self._list_namespaces(op, None)
        if not isinstance(op, GetOp | SearchOp):
            raise ConfigurationError(
                f"the operation is {op!r}; expected GetOp, PutOp, PutItem, SearchOp or "
                "ListNamespacesOp"
            )
        # With LangGraph's default, `refresh_ttl=True`, the store's configuration decides whether a
        # read restarts TTLs. With `refresh_ttl=False`, a read never restarts TTLs.
        refresh_ttl = None if op.refresh_ttl else False
        if isinstance(op, GetOp):
            return self.get(op.namespace, op.key, refresh_ttl=refresh_ttl)
        selection = self._parts.build_item_selection(op.namespace_prefix, op.filter)
        query = query or build_query(op.query)
        return self._searcher.search(selection, query, op.limit, op.offset, refresh_ttl)

    # -- writing

    def put(
        self,
        namespace: Namespace,
        key: str,
        value: Mapping[str, Any] | None,
        index: IndexOption = None,
        *,
        ttl: TTL = NOT_PROVIDED,
        if_version: int | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        """Store an item. The replaced version stays readable through `history` and `as_of`.

        Args:
            namespace: One or more labels, each a non-empty text.
            key: The key, unique in the namespace.
            value: A JSON object. None deletes the item, as in langgraph's stores.
            index: The paths whose text is searched. None means those of the store, and False means
                that the item is not searched.
            ttl: The minutes after which the item expires, counted from the last put or read (see
                `refresh_ttl` of `get`). With None, the item never expires. Without the argument,
                the `default_ttl` of the store applies.
            if_version: Write only if the key is at this version. 0 means only if the key does not
                exist.
            provenance: The origin of the item.

        Raises:
            InvalidNamespace: The namespace or key cannot be stored.
            InvalidValue: The value is not a JSON object, or is too large.
            VersionConflict: The key is at another version.
            EmbedderMismatch: The store's vectors come from another model.
            StorageError: The database refuses the write. An embedder that fails raises no error.
                The item is then found by text and listed in `pending_embeddings()`.
        """
        item = PutItem(namespace, key, value, index, ttl, if_version, provenance)
        self._parts.runner.run(self._run_operations([item]))

    async def aput(
        self,
        namespace: Namespace,
        key: str,
        value: Mapping[str, Any] | None,
        index: IndexOption = None,
        *,
        ttl: TTL = NOT_PROVIDED,
        if_version: int | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        """Store an item; see `put`."""
        item = PutItem(namespace, key, value, index, ttl, if_version, provenance)
        await self._parts.runner.arun(self._run_operations([item]))

    def delete(self, namespace: Namespace, key: str, *, if_version: int | None = None) -> None:
        """Delete an item.

        The versions of a deleted item stay readable through `history` and `as_of`. A missing key is
        not an error.

        Args:
            namespace: The namespace of the item.
            key: The key.
            if_version: Delete only if the key is at this version.

        Raises:
            VersionConflict: The key is at another version than `if_version`.
        """
        deletion = PutItem(namespace, key, None, if_version=if_version)
        self._parts.runner.run(self._run_operations([deletion]))

    async def adelete(
        self, namespace: Namespace, key: str, *, if_version: int | None = None
    ) -> None:
        """Delete an item; see `delete`."""
        deletion = PutItem(namespace, key, None, if_version=if_version)
        await self._parts.runner.arun(self._run_operations([deletion]))

    # -- reading

    def get(
        self,
        namespace: Namespace,
        key: str,
        *,
        refresh_ttl: bool | None = None,
        as_of: datetime | None = None,
    ) -> StoredItem | None:
        """Return an item, or None if it does not exist or has expired.

        Args:
            namespace: The namespace of the item.
            key: The key.
            refresh_ttl: Whether to restart the item's time to live. With None, `refresh_on_read` of
                the store's `ttl` decides, which is on by default.
            as_of: A moment of the past to read, or None for the present.
        """
        parts = self._parts
        path, text = parts.resolve_prefix(namespace), check_item_key(key)
        moment = None if as_of is None else to_microseconds(as_of)
        row = self.database.read(
            lambda: parts.reader.read_row(path, text, parts.now(), moment), snapshot=False
        )
        if row is None:
            return None
        item = parts.reader.records.decode_item(row)
        if moment is None:
            parts.restart_ttls_of_read_items([item], refresh_ttl)
        return item

    async def aget(
        self,
        namespace: Namespace,
        key: str,
        *,
        refresh_ttl: bool | None = None,
        as_of: datetime | None = None,
    ) -> StoredItem | None:
        """Return an item or None; see `get`."""
        return await self._parts.runner.run_in_read_pool(
            lambda: self.get(namespace, key, refresh_ttl=refresh_ttl, as_of=as_of)
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
        during: Period | None = None,
        min_score: float | None = None,
        newest_first: bool = False,
    ) -> list[FoundItem]:
        """Return items under a prefix that match the filters.

        With a query, return the best results.

        Without a query, items are ordered by namespace and then by creation time. Within a
        namespace, storing an item does not move other items to a different page of results. A new
        item comes last in its namespace, and replacing an item's value does not change its
        position. Deleting an item moves each later item up one position. To page through an
        unchanging snapshot, pass the same `as_of` for every page.

        Args:
            namespace_prefix: The first labels of the namespaces. `()` selects all items.
            query: Plain text without a query syntax. Blank text counts as no query.
            filter: A filter on the value. `docs/store.md` lists the operators.
            limit: The maximum number of items.
            offset: The number of items to skip.
            refresh_ttl: Whether to restart the time to live of the items. None means as for `get`.
            mode: "hybrid" searches by words and vectors, "text" by words, "semantic" by vectors.
            provenance: A filter on the provenance.
            as_of: A moment of the past to search, or None for the present.
            context: Whether neighbours in the thread, the thread as a whole, recency and `during`
                count. They need provenance.
            explain: Whether each result has the parts of its score.
            weights: The weight of each part of a score, such as `Weights(recency=0.2)`. None means
                the defaults.
            during: The start and end of the period that the query is about, such as last week.
                Items from it score higher (`Weights.date`). Other items are still found.
            min_score: The lowest score to return. It means the same in every search by words, no
                matter how many items are searched. If no item is related to the query, the best one
                has a score of about 0.5 by chance. A higher score is evidence that the item is
                related to the query. `recall` uses 0.59. With `mode="semantic"`, the score is the
                nearness of the vectors, from 0 to 1.
            newest_first: Without a query, whether the newest items of a namespace come first.

        Returns:
            The items, best first with a query.

        Raises:
            InvalidFilter: A filter has an unknown operator or a wrong operand, or names a field
                that provenance does not have.
            EmbeddingFailed: The query could not be embedded, with `mode="semantic"`. A hybrid
                search then uses words alone and logs a warning.
            EmbedderMismatch: The store's vectors come from another model.
            ConfigurationError: Another argument is wrong.
        """
        selection = self._parts.build_item_selection(
            namespace_prefix, filter, provenance, as_of, newest_first
        )
        search_query = build_query(query, mode, context, explain, weights, during, min_score)
        return self._searcher.search(selection, search_query, limit, offset, refresh_ttl)

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
        during: Period | None = None,
        min_score: float | None = None,
        newest_first: bool = False,
    ) -> list[FoundItem]:
        """Return items under a prefix; see `search`."""
        selection = self._parts.build_item_selection(
            namespace_prefix, filter, provenance, as_of, newest_first
        )
        search_query = build_query(query, mode, context, explain, weights, during, min_score)
        search_query = await self._searcher.add_query_vector(search_query, selection)
        return await self._parts.runner.run_in_read_pool(
            partial(self._searcher.search, selection, search_query, limit, offset, refresh_ttl)
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
        """Return the namespaces that contain items, sorted.

        perdure's internal namespaces are omitted if no prefix is given or if the prefix begins with
        `"*"`. `prefix=("perdure",)` lists them.

        Args:
            prefix: The labels that the namespaces begin with. `"*"` matches any one label.
            suffix: The labels that the namespaces end with. `"*"` matches any one label.
            max_depth: Cut the namespaces to this number of labels, without duplicates.
            limit: The maximum number of namespaces.
            offset: The number of namespaces to skip.
            as_of: A moment of the past to read, or None for the present.
        """
        all_conditions = (
            MatchCondition("prefix", prefix or ()),
            MatchCondition("suffix", suffix or ()),
        )
        conditions = tuple(condition for condition in all_conditions if condition.path)
        return self._list_namespaces(ListNamespacesOp(conditions, max_depth, limit, offset), as_of)

    def find_namespaces(self, label: str) -> list[Namespace]:
        """Return all namespaces that contain the given label at any position, sorted.

        The returned list includes perdure's internal namespaces, and namespaces whose items have
        all been deleted.
        """
        parts, label_path = self._parts, check_namespace_prefix_and_build_path((label,))
        statement, bounds = parts.sql["all_paths"], prefix_range(parts.root)
        paths = [row[0] for row in self.database.read(lambda: fetch_rows(statement, *bounds))]
        namespaces = (
            decode_namespace_path(path[len(parts.root) :]) for path in paths if label_path in path
        )
        return [namespace for namespace in namespaces if label in namespace]

    afind_namespaces = make_async_twin(find_namespaces)

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
        """Return namespaces that contain items; see `list_namespaces`."""
        return await self._parts.runner.run_in_read_pool(
            lambda: self.list_namespaces(
                prefix=prefix,
                suffix=suffix,
                max_depth=max_depth,
                limit=limit,
                offset=offset,
                as_of=as_of,
            )
        )

    def _list_namespaces(self, op: ListNamespacesOp, as_of: datetime | None) -> list[Namespace]:
        """Return the namespaces that match a `list_namespaces` operation."""
        conditions, depth, parts = tuple(op.match_conditions or ()), op.max_depth, self._parts
        for condition in conditions:
            check_match_condition(condition)
        if depth is not None:
            check_number("max_depth", depth, "1 or more, or None", minimum=1, integer=True)
        page = check_limit_and_offset(op.limit, op.offset)
        moment = None if as_of is None else to_microseconds(as_of)
        hides_notes = not any(
            match.match_type == "prefix" and match.path[:1] not in ((), ("*",))
            for match in conditions
        )
        arguments = parts.root, conditions, depth, *page, parts.now(), moment, hides_notes
        return self.database.read(lambda: parts.reader.read_namespaces(*arguments))

    # -- versions

    def history(self, namespace: Namespace, key: str) -> list[StoredItem]:
        """Return every version of a key, oldest first, each with its validity period."""
        parts = self._parts
        arguments = parts.resolve_prefix(namespace), check_item_key(key), parts.now()
        return self.database.read(lambda: parts.reader.read_history(*arguments), snapshot=False)

    async def ahistory(self, namespace: Namespace, key: str) -> list[StoredItem]:
        """Return every version of a key; see `history`."""
        return await self._parts.runner.run_in_read_pool(lambda: self.history(namespace, key))

    # -- explaining ranks

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
        during: Period | None = None,
    ) -> RankExplanation:
        """Return an item's rank in the results for a query, and the reason for that rank.

        The arguments after `key`, except `prefix`, have the same meaning as in `search`. If
        `prefix` is None, the search covers the namespace of the item.

        Raises:
            ConfigurationError: There is no query, or an argument is wrong; see `search`.
        """
        searched_prefix = namespace if prefix is None else prefix
        selection = self._parts.build_item_selection(searched_prefix, filter, provenance, as_of)
        search_query = build_query(query, mode, context, True, during=during)
        return self._searcher.explain_rank_of_item(
            selection, search_query, self._parts.resolve_prefix(namespace), check_item_key(key)
        )

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
        during: Period | None = None,
    ) -> RankExplanation:
        """Return an item's rank for a query and the reason for that rank; see `why_not`."""
        searched_prefix = namespace if prefix is None else prefix
        selection = self._parts.build_item_selection(searched_prefix, filter, provenance, as_of)
        search_query = build_query(query, mode, context, True, during=during)
        path, text = self._parts.resolve_prefix(namespace), check_item_key(key)
        search_query = await self._searcher.add_query_vector(search_query, selection)
        return await self._parts.runner.run_in_read_pool(
            partial(self._searcher.explain_rank_of_item, selection, search_query, path, text)
        )

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
        """Erase items and all their versions, and remove their data from the file.

        A key is erased with all its versions if the current version or any past version of the key
        meets all criteria. On SQLite, the file is rewritten with VACUUM to remove the erased bytes,
        and other writers wait until the rewrite is complete. If the process dies during the
        erasure, call `forget` again to complete it.

        Args:
            prefix: Only items under this prefix. `()`, or None with another criterion, means all
                items.
            key: Only the item with this key in exactly the namespace `prefix`.
            filter: A filter on the value.
            provenance: A filter on the provenance.
            query: Words that the text of a value must all contain, in any inflected form.
            dry_run: Whether to count only. Messages of `threads` are not counted.
            checkpointer: A checkpointer, which also erases the messages that the provenance of the
                items names (`thread_id` and `message_ids`).
            threads: Ids of threads to delete completely, such as all threads of a user.

        Returns:
            A receipt with the counts and hashes of the erased items.

        Raises:
            InvalidFilter: A filter has an unknown operator or a wrong operand, or names a field
                that provenance does not have.
            InvalidNamespace: The prefix or the key is not valid.
            ConfigurationError: There is no criterion, the query has no words, a key has no
                namespace, `threads` has no checkpointer, or a scoped store has a checkpointer.
        """
        return forget(
            self._parts, prefix, key, filter, provenance, query, dry_run, checkpointer, threads
        )

    aforget = make_async_twin(forget)

    def forget_author(
        self, prefix: Namespace, author: str, *, hand_over: bool = False, dry_run: bool = False
    ) -> Receipt:
        """Erase one author's texts under a namespace prefix that several people share.

        The author of a version is the field `author` of its provenance. Versions by other authors
        are kept. If such a version contains a list of earlier texts, the texts of `author` are
        removed from the list. If the process dies during the erasure, call `forget_author` again to
        complete it.

        Args:
            prefix: The prefix of the shared namespaces, such as `("teams",)`.
            author: The user id of the author.
            hand_over: Whether to keep the versions without the name of the author. The receipt
                counts them as `handed_over`.
            dry_run: Whether to count only.

        Returns:
            A receipt with the counts and hashes of the erased versions.

        Raises:
            ConfigurationError: The author is blank.
        """
        return forget_author(self._parts, prefix, author, hand_over=hand_over, dry_run=dry_run)

    aforget_author = make_async_twin(forget_author)

    # -- sizes

    def namespace_sizes(self, prefixes: Sequence[Namespace]) -> list[NamespaceSize]:
        """Return the number and total bytes of the items under each prefix, in the given order."""
        paths = [self._parts.resolve_prefix(prefix) for prefix in prefixes]
        rows = self.database.read(lambda: self._parts.reader.read_namespace_sizes(paths))
        return [NamespaceSize(tuple(p), *row) for p, row in zip(prefixes, rows, strict=True)]

    anamespace_sizes = make_async_twin(namespace_sizes)

    # -- missing vectors

    def pending_embeddings(self, namespace_prefix: Namespace = ()) -> list[PendingEmbedding]:
        """Return the items that have no vectors because the embedder failed.

        Items without vectors are still found by keyword search.
        """
        return self.database.read(
            lambda: self._missing.read_pending(self._parts.resolve_prefix(namespace_prefix))
        )

    apending_embeddings = make_async_twin(pending_embeddings)

    def embed_pending(self, namespace_prefix: Namespace = ()) -> int:
        """Compute missing vectors, and return how many items were embedded.

        If the embedder raises an error for an item's text, that item stays without vectors, but the
        vectors of all other items are still computed.

        Raises:
            EmbeddingFailed: The embedder fails for all items.
        """
        return self._parts.runner.run(
            self._missing.embed_missing(self._parts.resolve_prefix(namespace_prefix))
        )

    async def aembed_pending(self, namespace_prefix: Namespace = ()) -> int:
        """Compute missing vectors; see `embed_pending`."""
        return await self._parts.runner.arun(
            self._missing.embed_missing(self._parts.resolve_prefix(namespace_prefix)),
            computes_in_thread=True,
        )

    # -- other stores with the same database

    def without_refresh(self) -> Store:
        """Return a store that uses the same database but does not restart TTLs on reads."""
        ttl: Any = {**(self._parts.ttl or {}), "refresh_on_read": False}
        return Store(replace(self._parts, ttl=ttl))

    def scoped(
        self, prefix: Namespace, *, max_items: int | None = None, max_bytes: int | None = None
    ) -> ScopedStore:
        """Return a store limited to a prefix.

        The scoped store cannot access anything outside the prefix.

        The methods of the scoped store take and return namespaces without the prefix. The scoped
        store shares the database of this store and need not be closed. If a scope is created from
        another scope, the limits of both scopes apply.

        Args:
            prefix: The labels of the prefix, at least one.
            max_items: The maximum number of items under the prefix, or None.
            max_bytes: The maximum total size of these items' JSON in bytes, or None.

        Raises:
            InvalidNamespace: The prefix is not valid, or is empty.
            ConfigurationError: A limit is not an integer.
        """
        path = self._parts.resolve_prefix(prefix)
        if not path:
            raise InvalidNamespace("the prefix is empty; pass at least one label")
        return ScopedStore(self._parts.build_parts_limited_to_prefix(path, max_items, max_bytes))


class ScopedStore(Store):
    """A store limited to the namespaces under a prefix.

    In a scoped store, the empty namespace `()` refers to the prefix itself.
    """
