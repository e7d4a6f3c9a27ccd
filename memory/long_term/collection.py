"""Store, search and erase the memories in a namespace, and manage quarantined candidates.

A `Collection` stores, searches and erases the memories of one namespace. The functions `remember`,
`memories` and `forget` perform a single operation without a `Collection` object. `Quarantine` lists
the candidates that the gate has quarantined.

When single memories are erased, their tombstones are written first. If an erasure is interrupted
after writing tombstones, the memories remain stored, and you can retry the erasure. If the store
has no space for tombstones, memories are erased first and tombstones are written afterwards. No
tombstones are written if a whole namespace is erased.

perdure can delete items from a third-party store, but cannot overwrite their bytes. The deleted
bytes may therefore remain in the store's files. If items are erased from a third-party store, the
receipt has `clean=False`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore
from pydantic import BaseModel

from perdure.effects import build_async_function, build_blocking_function
from perdure.errors import ConfigurationError, LimitExceeded, UnknownMemory
from perdure.memory.long_term.gate import (
    Gate,
    add_message_ids_of_replaced_tombstones,
    build_tombstone,
    build_tombstones,
)
from perdure.memory.long_term.memory_changes import (
    NO_TOMBSTONE_REASON,
    MemoryInput,
    MemoryWriter,
    build_unknown_memory_error,
    check_memory_schema,
    fill_provenance_defaults,
)
from perdure.memory.long_term.person_namespaces import check_templates, forget_person
from perdure.memory.long_term.records import (
    FACT,
    NOTE_KINDS,
    QUARANTINE,
    RESERVED_LABEL,
    Memory,
    Outcome,
    Role,
    StoreAdapter,
    build_memory_value_with_previous_texts,
    build_namespace_of_notes_about_memories,
    build_put,
    build_removal,
    fill_namespace,
    get_adapter,
)
from perdure.memory.long_term.repeated_questions import rank_answers_first_and_count_answers
from perdure.memory.namespace_templates import Template
from perdure.memory.options import check_datetime, check_instance, check_text, check_whole_number
from perdure.memory.run_config import Versioned, read_run_user
from perdure.settings import LIST_LIMIT, SEARCH_LIMIT
from perdure.stores.base import Namespace, Provenance, PutItem, Receipt
from perdure.stores.namespaces import check_item_key
from perdure.stores.search.text_equivalence import hash_normal_form

Memories = list[Memory]
_USER_NAMESPACE: Final = ("memories", "{user_id}")
_ANSWERS_FIRST_PAGE_SIZE: Final = 128
"""Minimum number of memories in the first read of a search that ranks answers first.

The number is large, because many results may be earlier messages that ask the same question.
"""
_PAGE_SIZE: Final = 32
"""Minimum number of memories in the first read of other searches.

The results of a read include memories in nested namespaces, which are left out of the search
result. A search therefore reads more memories than its limit.
"""
_UNCHANGED_GATE: Final = Gate()
"""The gate of `remember`. No caller can change this gate, because `remember` does not return it."""
_LOG = logging.getLogger("perdure")


class Collection:
    """Provides access to the memories of one or more kinds in a namespace of a store.

    Methods that begin with `a` are async. The gate judges each memory before it is written, and the
    `Outcome` reports the decision. After a memory is changed, its earlier texts remain stored until
    a method whose name begins with `forget` erases them. Several arguments have the same meaning in
    all methods.

    `memory` is a string, a dict with `text` and other fields, or an instance of the schema.

    `provenance` describes where the memory comes from. `provenance.trust` is a label for the kind
    of source: `"user"`, `"assistant"`, `"tool"`, or a label that you define. If `provenance` is
    None, the memory is attributed to the current run's user.

    `config` is the config of the run. Inside a graph node, the default is the config of the current
    run.

    `if_version` is the version that the stored memory must have; otherwise, the method raises
    `VersionConflict`.

    `as_of` is a time in the past. Methods that take `as_of` return the memories as of that time.
    `as_of` requires a store that keeps versions.

    Args:
        store: Any langgraph store. Perdure's stores keep versions. None means, within a graph, the
            store with which the graph was compiled.
        namespace: Labels of the namespace, see `Template`. With the label `"{user_id}"`, each user
            has a collection of their own. With `("teams", "{team}")`, the members of a team share a
            collection, and each memory has its author.
        schema: A pydantic model with a field `text: str`. The other fields of the model are stored
            with the text.
        gate: The gate, or None for `Gate()`.
        kind: The kind of the memories that are added.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        namespace: tuple[str, ...] = _USER_NAMESPACE,
        *,
        schema: type[BaseModel] | None = None,
        gate: Gate | None = None,
        kind: str = FACT,
    ) -> None:
        if schema is not None:
            check_memory_schema(schema)
        self.store: BaseStore | None = None if store is None else StoreAdapter(store).store
        self.namespace, self.schema = Template(namespace, shared=True), schema
        self.gate = Gate() if gate is None else check_instance("gate", gate, Gate, "a Gate")
        self.kind = check_text("kind", kind, "a word, like 'fact'")

    async def _insert(
        self,
        memory: MemoryInput,
        *,
        key: str | None = None,
        provenance: Provenance | None = None,
        config: RunnableConfig | None = None,
    ) -> Outcome:
        """Add a memory, unless an equivalent memory is already stored.

        Args:
            memory: The text, or the text and fields.
            key: The key of the memory, or None for a generated key.
            provenance: See `Collection`.
            config: See `Collection`.

        Raises:
            ConfigurationError: Another memory has the key.
        """
        return await self.build_writer(config).insert(
            memory, fill_provenance_defaults(config, provenance), key
        )

    async def _update(
        self,
        key: str,
        memory: MemoryInput,
        *,
        if_version: int | None = None,
        provenance: Provenance | None = None,
        config: RunnableConfig | None = None,
    ) -> Outcome:
        """Correct a memory that is wrong or badly worded.

        Args:
            key: The key of the memory.
            memory: The new text, or text and fields. Fields that are missing keep their values.
            if_version: See `Collection`.
            provenance: See `Collection`.
            config: See `Collection`.

        Raises:
            UnknownMemory: The namespace has no memory with the key.
            VersionConflict: The memory is not at `if_version`.
        """
        source = fill_provenance_defaults(config, provenance)
        return await self.build_writer(config).replace(
            key, memory, source, "updated", if_version=if_version
        )

    async def _supersede(
        self,
        key: str,
        memory: MemoryInput,
        *,
        at: datetime | None = None,
        if_version: int | None = None,
        provenance: Provenance | None = None,
        config: RunnableConfig | None = None,
    ) -> Outcome:
        """Replace a memory whose text is no longer true.

        The memory's previous text may have been extracted from stored turns. A turn is a memory
        that contains the text of one message. The transaction that replaces the previous text also
        stores an end date in these turns.

        Args:
            key: The key of the memory.
            memory: The new text, or text and fields. Fields that are missing keep their values.
            at: When the previous text ceased to be true, with a time zone. None means the time at
                which the new text was stated (`provenance.at`), or now if that time is unknown or
                not later than the time of the previous text.
            if_version: See `Collection`.
            provenance: See `Collection`.
            config: See `Collection`.

        Raises:
            UnknownMemory: The namespace has no memory with the key.
            VersionConflict: The memory is not at `if_version`.
        """
        until, source = (
            at and check_datetime("at", at),
            fill_provenance_defaults(config, provenance),
        )
        return await self.build_writer(config).replace(
            key, memory, source, "superseded", until, if_version
        )

    async def _delete(self, key: str, *, config: RunnableConfig | None = None) -> Outcome:
        """Delete a memory.

        A deleted memory is no longer found by searches, and it is not extracted again. A store that
        keeps versions also keeps the past versions of a deleted memory.

        Raises:
            UnknownMemory: The namespace has no memory with the key.
        """
        return await self.build_writer(config).delete(key)

    async def _forget(self, key: str, *, config: RunnableConfig | None = None) -> Receipt:
        """Erase a stored or deleted memory with all its versions and its quarantine entries.

        The conversation from which the memory was extracted is left unchanged. A tombstone prevents
        the memory from being extracted from the conversation again.

        Raises:
            UnknownMemory: The namespace neither has nor had a memory with the key.
        """
        return await forget_memory(*self._get_adapter_and_namespace(config), check_item_key(key))

    async def _forget_matching(
        self,
        *,
        query: str | None = None,
        thread_id: str | None = None,
        dry_run: bool = False,
        config: RunnableConfig | None = None,
    ) -> Receipt:
        """Erase the memories and quarantine entries that match a query, a thread or both.

        Memories and quarantine entries in nested namespaces, which extend the collection's
        namespace with further labels, are erased as well. A memory matches if at least one of its
        versions contains every word of `query` and comes from the thread `thread_id`. This method
        is supported only by perdure's own stores.

        Args:
            query: Words of the memories, or None for any text.
            thread_id: The thread of the memories, or None for any thread.
            dry_run: Whether to return the receipt without erasing.
            config: See `Collection`.

        Raises:
            ConfigurationError: Neither a query nor a thread is given, or the store is not a store
                of perdure.
        """
        adapter, namespace = self._get_adapter_and_namespace(config)
        return await forget_matching_memories(
            adapter, namespace, query=query, thread_id=thread_id, dry_run=dry_run
        )

    async def _forget_all(self, *, config: RunnableConfig | None = None) -> Receipt:
        """Erase the memories of a namespace, its quarantined candidates and its internal records.

        Perdure's internal records state which messages have already been extracted. Because
        perdure's internal records are erased as well, the next extraction reads each thread from
        the start. If the threads still exist, the next extraction can store the erased memories
        again. To prevent this, delete the threads with `store.forget(threads=…, checkpointer=…)`
        before you erase the memories. Nested namespaces, which extend the given namespace with
        further labels, are not erased.
        """
        return await forget_namespace(*self._get_adapter_and_namespace(config))

    async def _get(
        self, key: str, *, as_of: datetime | None = None, config: RunnableConfig | None = None
    ) -> Memory | None:
        """Return the memory under a key, or None if there is none.

        Args:
            key: The key of the memory.
            as_of: A time in the past, in a store with versions.
            config: See `Collection`.
        """
        adapter, namespace = self._get_adapter_and_namespace(config)
        memory = await adapter.get(namespace, check_item_key(key), as_of)
        if memory is not None and as_of is None:
            await adapter.refresh_time_to_live([memory])
        return memory

    async def _search(
        self,
        query: str,
        *,
        limit: int = SEARCH_LIMIT,
        filter: Mapping[str, Any] | None = None,
        as_of: datetime | None = None,
        config: RunnableConfig | None = None,
    ) -> Memories:
        """Return the memories that match a query, best match first.

        Args:
            query: The query.
            limit: The maximum number of memories.
            filter: A filter of values, see `Store.search`.
            as_of: A time in the past, in a store with versions.
            config: See `Collection`.
        """
        return await self.search_namespace(
            {"query": query, "filter": filter, "as_of": as_of}, limit, config=config
        )

    async def _list(
        self,
        *,
        kind: str | None = None,
        limit: int = LIST_LIMIT,
        offset: int = 0,
        as_of: datetime | None = None,
        config: RunnableConfig | None = None,
    ) -> Memories:
        """Return the memories in the order in which the store lists them.

        Perdure's stores list the oldest first.

        Args:
            kind: Return only memories of the given kind, or all memories if `kind` is None.
            limit: The maximum number of memories.
            offset: How many memories are skipped.
            as_of: A time in the past, in a store with versions.
            config: See `Collection`.
        """
        return await self.search_namespace(
            {"filter": None if kind is None else {"kind": kind}, "as_of": as_of},
            limit,
            offset,
            config,
        )

    async def _history(self, key: str, *, config: RunnableConfig | None = None) -> Memories:
        """Return all versions of a memory, oldest first. The memory may have been deleted."""
        adapter, namespace = self._get_adapter_and_namespace(config)
        return await adapter.list_versions(namespace, check_item_key(key))

    def build_writer(
        self, config: RunnableConfig | None, *, by_model: bool = False
    ) -> MemoryWriter:
        """Build a writer for the namespace that is selected by the run's config."""
        adapter, namespace = self._get_adapter_and_namespace(config)
        author = read_run_user(config) if self.namespace.is_team else None
        return MemoryWriter(adapter, namespace, self.gate, self.schema, self.kind, by_model, author)

    async def search_namespace(
        self,
        options: Mapping[str, Any],
        limit: int,
        offset: int = 0,
        config: RunnableConfig | None = None,
        *,
        answers_first: bool = False,
    ) -> Memories:
        """Search or list the memories of the namespace.

        Memories in nested namespaces are left out of the search result. Return no memories if the
        run's config disables memory, or if the namespace is for teams and the run has no team.

        Args:
            options: Options of `StoreAdapter.search`.
            limit: The maximum number of memories.
            offset: How many memories are skipped.
            config: See `Collection`.
            answers_first: Whether turns that only ask the question of the query come last.
        """
        end = check_whole_number("limit", limit, 1) + check_whole_number("offset", offset, 0)
        if self.namespace.is_memory_disabled_for_run(config) or not self.namespace.fill_for_teams(
            config
        ):
            return []
        adapter, namespace = self._get_adapter_and_namespace(config)
        memories: Memories = []
        read_count, page_size = (
            0,
            max(end, _ANSWERS_FIRST_PAGE_SIZE if answers_first else _PAGE_SIZE),
        )
        while len(memories) < end:
            page = await adapter.search(namespace, limit=page_size, offset=read_count, **options)
            memories += [memory for memory in page if memory.namespace == namespace]
            if len(page) < page_size:
                break
            read_count, page_size = read_count + page_size, 2 * page_size
        if answers_first:
            ordered, _ = rank_answers_first_and_count_answers(
                [*enumerate(memories, 1)], options["query"]
            )
            memories = [memory for _, memory in ordered]
        memories = memories[offset:end]
        if options.get("as_of") is None:
            await adapter.refresh_time_to_live(memories)
        return memories

    def _get_adapter_and_namespace(
        self, config: RunnableConfig | None
    ) -> tuple[StoreAdapter, Namespace]:
        """Return the store adapter, and the namespace that is selected by the run's config."""
        return get_adapter(self.store, self.namespace), fill_namespace(self.namespace, config)

    insert, ainsert = build_blocking_function(_insert), build_async_function(_insert)
    update, aupdate = build_blocking_function(_update), build_async_function(_update)
    supersede, asupersede = build_blocking_function(_supersede), build_async_function(_supersede)
    delete, adelete = build_blocking_function(_delete), build_async_function(_delete)
    forget, aforget = build_blocking_function(_forget), build_async_function(_forget)
    forget_matching = build_blocking_function(_forget_matching)
    aforget_matching = build_async_function(_forget_matching)
    forget_all = build_blocking_function(_forget_all)
    aforget_all = build_async_function(_forget_all)
    get, aget = build_blocking_function(_get), build_async_function(_get)
    search, asearch = build_blocking_function(_search), build_async_function(_search)
    list, alist = build_blocking_function(_list), build_async_function(_list)
    history, ahistory = build_blocking_function(_history), build_async_function(_history)


async def _remember(
    memory: MemoryInput,
    *,
    key: str | None = None,
    kind: str = FACT,
    provenance: Provenance | None = None,
    store: BaseStore | None = None,
    namespace: tuple[str, ...] = _USER_NAMESPACE,
    config: RunnableConfig | None = None,
) -> Outcome:
    """Store a memory, unless an equivalent memory is already stored.

    If `key` already belongs to a different memory, the new memory supersedes it.

    Args:
        memory: The text, or the text and fields.
        key: The key of the memory, or None for a generated key.
        kind: The kind of the memory.
        provenance: See `Collection`.
        store: See `Collection`.
        namespace: See `Collection`.
        config: See `Collection`.
    """
    writer = Collection(store, namespace, gate=_UNCHANGED_GATE, kind=kind).build_writer(config)
    return await writer.insert(
        memory, fill_provenance_defaults(config, provenance), key, "superseded"
    )


async def _forget(
    key: str | None = None,
    *,
    everything: bool = False,
    store: BaseStore | None = None,
    namespace: tuple[str, ...] = _USER_NAMESPACE,
    namespaces: Sequence[Sequence[str]] = (),
    conversations: Iterable[str] = (),
    dry_run: bool = False,
    hand_over: bool = False,
    config: RunnableConfig | None = None,
) -> Receipt:
    """Erase a memory, or everything that the store holds about the user of a run.

    With `everything=True`, the user's memories, profile, instructions and examples are erased,
    along with their quarantine entries and internal records. With `everything=True`, the namespaces
    that hold the user's conversations (first label `chat_memory`) are erased as well. Perdure keeps
    a record of the namespace templates that have been used with a store. If a recorded namespace
    template contains the label `"{user_id}"`, the user's namespaces that match the template are
    erased as well. The receipt's `others` field lists the namespaces that have the user's name as a
    label but were not erased. Before you call `forget` to erase a user's memories, delete the
    user's threads. If the user's threads are not deleted, memories are extracted from them again.

    Args:
        key: The memory to erase, or None with `everything=True`.
        everything: Whether to erase everything about the user.
        store: See `Collection`.
        namespace: See `Collection`. With `everything=True` and another namespace than the default,
            only this namespace is erased, and the options below cannot be used.
        namespaces: Further templates with the label `"{user_id}"`, such as `("notes",
            "{user_id}")`.
        conversations: Ids of the user's conversations in `chat_memory`. The conversation whose id
            is the user's name, and the threads from which memories of the user were extracted, are
            always included.
        dry_run: Whether to return the receipt without erasing; only with `everything=True`.
        hand_over: Whether the memories that the user wrote for teams are kept without the name of
            the user. If False, these memories are erased. Only with `everything=True`.
        config: See `Collection`.

    Raises:
        ConfigurationError: The options contradict each other. Nothing is erased.
        UnknownMemory: The namespace neither has nor had a memory with the key.
    """
    expected = type(None) if everything else (str, int)
    check_instance("key", key, expected, "a memory's key, or None with everything=True")
    collection = Collection(store, namespace)
    if key is not None:
        if namespaces or conversations or dry_run or hand_over:
            raise ConfigurationError(
                "the options namespaces, conversations, dry_run and hand_over require "
                "everything=True; remove them, or pass everything=True and no key"
            )
        return await collection._forget(key, config=config)
    if collection.namespace.labels != _USER_NAMESPACE:
        if namespaces or conversations or dry_run or hand_over:
            raise ConfigurationError(
                f"namespace={collection.namespace.labels!r} cannot be combined with namespaces=, "
                "conversations=, dry_run= or hand_over=. To forget everything about the user, "
                "remove namespace=. To forget this namespace, remove the other arguments"
            )
        return await collection._forget_all(config=config)
    adapter, (_, user) = collection._get_adapter_and_namespace(config)
    return await forget_person(
        adapter,
        user,
        templates=check_templates(namespaces),
        conversations=conversations,
        dry_run=dry_run,
        hand_over=hand_over,
    )


async def _memories(
    *,
    kind: str | None = None,
    limit: int = LIST_LIMIT,
    offset: int = 0,
    as_of: datetime | None = None,
    store: BaseStore | None = None,
    namespace: tuple[str, ...] = _USER_NAMESPACE,
    config: RunnableConfig | None = None,
) -> Memories:
    """Return the memories of a namespace, like `Collection.list`."""
    return await Collection(store, namespace)._list(
        kind=kind, limit=limit, offset=offset, as_of=as_of, config=config
    )


remember, aremember = build_blocking_function(_remember), build_async_function(_remember)
forget, aforget = build_blocking_function(_forget), build_async_function(_forget)
memories, amemories = build_blocking_function(_memories), build_async_function(_memories)


async def forget_memory(adapter: StoreAdapter, namespace: Namespace, key: str) -> Receipt:
    """Erase a memory, and all quarantine entries that have its key or one of its texts.

    Args:
        adapter: The adapter of the store that contains the item.
        namespace: The namespace of the memory.
        key: The key of the memory.

    Raises:
        UnknownMemory: The namespace neither has nor had a memory with the key.
    """
    versions = await adapter.list_versions(namespace, key)
    if not versions:
        raise build_unknown_memory_error(namespace, key)
    tombstones = _build_distinct_tombstones(versions)
    were_tombstones_written = await _write_tombstones_if_store_has_room(adapter, tombstones)
    receipt = await erase_items(adapter, namespace, key)
    texts = {version.text for version in versions}
    texts.update(previous.text for version in versions for previous in version.previous)
    receipt += await _erase_quarantine_entries(
        adapter, build_namespace_of_notes_about_memories(QUARANTINE, namespace), key, texts
    )
    if not were_tombstones_written and not (
        await _write_tombstones_if_store_has_room(adapter, tombstones)
    ):
        _LOG.warning("the memory %r in %r was erased, but %s", key, namespace, NO_TOMBSTONE_REASON)
    return receipt


async def forget_namespace(adapter: StoreAdapter, namespace: Namespace) -> Receipt:
    """Erase perdure's internal records about a namespace's memories, and then the memories.

    Nested namespaces, which extend the given namespace with further labels, are not erased.
    """
    receipt = _build_empty_receipt(clean=True)
    for namespace_to_erase in (
        *(build_namespace_of_notes_about_memories(kind, namespace) for kind in NOTE_KINDS),
        namespace,
    ):
        receipt += await _erase_namespace(adapter, namespace_to_erase)
    return receipt


async def forget_matching_memories(
    adapter: StoreAdapter,
    namespace: Namespace,
    *,
    thread_id: str | None = None,
    query: str | None = None,
    dry_run: bool = False,
) -> Receipt:
    """Erase the memories and quarantine entries that match a query, a thread or both.

    A memory matches if at least one of its versions comes from the thread `thread_id` and contains
    every word of `query`. If `dry_run` is True, nothing is erased, and the receipt lists the
    memories that match.

    Args:
        adapter: The store, which must be a store of perdure.
        namespace: The prefix of the namespaces.
        thread_id: The thread, or None for any thread.
        query: The words, or None for any text.
        dry_run: Whether to return the receipt without erasing.

    Raises:
        ConfigurationError: Neither a thread nor a query is given, or the store is not a store of
            perdure.
    """
    # Raise an error if neither a thread nor a query is given, because every memory would match.
    check_text("thread_id or query", query if thread_id is None else thread_id)
    check_instance(
        "store",
        adapter.store,
        Versioned,
        "a perdure store, because other stores cannot erase by query",
    )
    source = None if thread_id is None else {"thread_id": thread_id}
    conditions: dict[str, Any] = {"query": query, "provenance": source}
    namespaces = (namespace, build_namespace_of_notes_about_memories(QUARANTINE, namespace))
    preview = _build_empty_receipt(clean=False)
    for searched_namespace in namespaces:
        preview += await adapter.call("forget", searched_namespace, **conditions, dry_run=True)
    if dry_run:
        return preview
    versions: list[Memory] = []
    for namespace, key in preview.keys:
        if namespace[0] != RESERVED_LABEL:  # Quarantine entries get no tombstones.
            versions += await adapter.list_versions(namespace, key)
    await adapter.write(
        await add_message_ids_of_replaced_tombstones(adapter, _build_distinct_tombstones(versions))
    )
    receipt = _build_empty_receipt(clean=True)
    for searched_namespace in namespaces:
        receipt += await adapter.call("forget", searched_namespace, **conditions)
    return receipt


async def erase_items(adapter: StoreAdapter, namespace: Namespace, *keys: str) -> Receipt:
    """Erase items with all their versions.

    If the store keeps no versions, the items are deleted, but their bytes are not overwritten. The
    bytes may therefore remain in the store's files.
    """
    if not adapter.versioned:
        await adapter.write([build_removal(namespace, key) for key in keys])
        deleted_keys = tuple((namespace, key) for key in keys)
        return replace(_build_empty_receipt(clean=False), items=len(keys), keys=deleted_keys)
    receipt = _build_empty_receipt(clean=True)
    for key in keys:
        receipt += await adapter.call("forget", namespace, key=key)
    return receipt


async def _erase_namespace(adapter: StoreAdapter, namespace: Namespace) -> Receipt:
    """Erase all items of a namespace.

    Nested namespaces, which extend the given namespace with further labels, are not erased.
    """
    if not adapter.versioned:
        memories = await adapter.list_memories(namespace)
        return await erase_items(adapter, namespace, *(memory.key for memory in memories))
    preview: Receipt = await adapter.call("forget", namespace, dry_run=True)
    keys = [key for item_namespace, key in preview.keys if item_namespace == namespace]
    if keys and len(keys) == len(preview.keys):
        receipt: Receipt = await adapter.call("forget", namespace)
        return receipt
    # Erase the items one by one by key, because erasing by namespace prefix would also erase the
    # items in nested namespaces.
    return await erase_items(adapter, namespace, *keys)


async def _erase_quarantine_entries(
    adapter: StoreAdapter, namespace: Namespace, key: str, texts: set[str]
) -> Receipt:
    """Erase the quarantine entries that match a memory's key or one of its texts."""
    if adapter.versioned:
        matching = {"$or": [{"key": key}, {"text": {"$in": sorted(texts)}}]}
        preview: Receipt = await adapter.call("forget", namespace, filter=matching, dry_run=True)
        keys = [entry for item_namespace, entry in preview.keys if item_namespace == namespace]
    else:
        entries = await adapter.list_memories(namespace)
        keys = [e.key for e in entries if e.value.get("key") == key or e.text in texts]
    return await erase_items(adapter, namespace, *keys)


def _build_distinct_tombstones(versions: Iterable[Memory]) -> list[PutItem]:
    """Build tombstones for memory versions, skipping duplicates."""
    puts = [put for version in versions for put in build_tombstones(version, "forgotten")]
    return list({(put.namespace, put.key): put for put in puts}.values())


async def _write_tombstones_if_store_has_room(
    adapter: StoreAdapter, tombstones: list[PutItem]
) -> bool:
    """Write tombstones and return True, or return False if the store's limits would be exceeded.

    Tombstones are records of removed texts. The store rejects tombstones that would exceed the
    store's limit on items or bytes.
    """
    try:
        await adapter.write(await add_message_ids_of_replaced_tombstones(adapter, tombstones))
    except LimitExceeded:
        return False
    return True


def _build_empty_receipt(*, clean: bool) -> Receipt:
    """Build a receipt stating that nothing was erased."""
    return Receipt(0, 0, 0, (), (), (), datetime.now(UTC), clean)


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """A quarantined candidate memory that awaits a person's decision.

    Attributes:
        key: The key of the entry.
        shown: The text with secrets and contacts redacted.
        reason: Why the candidate is in quarantine.
        check: The check of the gate that decided.
        kind: The kind of the memory.
        role: The role of the speaker whose words the text is based on.
        at: When the candidate was quarantined (UTC).
        memory_key: The key that the memory would have.
        provenance: Where the text comes from.
        text: The original text, which may contain secrets.
        fields: The original fields, which may contain secrets.
    """

    key: str
    shown: str
    reason: str
    check: str
    kind: str
    role: Role
    at: datetime
    memory_key: str
    provenance: Provenance | None
    text: str = field(repr=False)
    fields: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.key}: {self.shown} ({self.reason})"

    def to_redacted_dict(self) -> dict[str, Any]:
        """Return the entry's attributes as a dict, omitting any that may contain secrets.

        The attributes `text` and `fields` are omitted, because they may contain secrets.
        """
        return {
            name: value for name, value in asdict(self).items() if name not in ("text", "fields")
        }


# Alias for use in the class `Quarantine`, whose method `list` shadows the built-in `list`.
Entries = list[QuarantineEntry]


class Quarantine:
    """The quarantine of a namespace.

    The quarantine lists candidate memories that await a person's decision. Methods that begin with
    `a` are async. The quarantine entries contain the original texts, including any secrets. In an
    encrypted store, the quarantine entries are encrypted as well. `Collection.forget_all` erases
    the quarantine entries, but `store.forget(namespace)` does not.

    Args:
        store: See `Collection`.
        namespace: The namespace of the memories, see `Collection`.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        namespace: tuple[str, ...] = ("memories", "{user_id}"),
    ) -> None:
        self.store: BaseStore | None = None if store is None else StoreAdapter(store).store
        self.namespace = Template(namespace, shared=True)

    async def _list(self, config: RunnableConfig | None = None) -> Entries:
        """Return the entries, oldest first."""
        adapter, _, entries_namespace = self._get_adapter_memory_and_quarantine_namespaces(config)
        memories = await adapter.list_memories(entries_namespace)
        return sorted(map(_build_quarantine_entry, memories), key=lambda entry: entry.at)

    async def _release(self, key: str, config: RunnableConfig | None = None) -> Outcome:
        """Store a quarantine entry as a memory, and remove it from quarantine.

        The gate does not check a quarantine entry again when the entry is released. If a memory is
        already stored under the quarantine entry's `memory_key`, that memory is updated.

        Raises:
            UnknownMemory: The quarantine has no entry with the key.
            VersionConflict: The entry or the memory was changed while the entry was released.
                Nothing was written.
        """
        adapter, namespace, entries_namespace = self._get_adapter_memory_and_quarantine_namespaces(
            config
        )
        stored = await _get_stored_quarantine_entry(adapter, entries_namespace, key)
        entry = _build_quarantine_entry(stored)
        value: dict[str, Any] = {**entry.fields, "text": entry.text, "kind": entry.kind}
        existing = await adapter.get(namespace, entry.memory_key)
        if existing is not None:
            value = build_memory_value_with_previous_texts(existing, value, "updated")
        put = build_put(namespace, entry.memory_key, value, provenance=entry.provenance)
        put = replace(put, if_version=0 if existing is None else existing.version)
        await adapter.write([put, build_removal(entries_namespace, key, stored.version)])
        # Erase the quarantine entry together with its past versions. A plain deletion would keep
        # the past versions, and these contain the original text.
        await erase_items(adapter, entries_namespace, key)
        return Outcome("added" if existing is None else "updated", entry.memory_key)

    async def _discard(self, key: str, config: RunnableConfig | None = None) -> Outcome:
        """Erase a quarantine entry.

        A tombstone, which is a hash of the quarantine entry's text, is stored, so that the text is
        not extracted again.

        Raises:
            UnknownMemory: The quarantine has no entry with the key.
        """
        adapter, namespace, entries_namespace = self._get_adapter_memory_and_quarantine_namespaces(
            config
        )
        stored = await _get_stored_quarantine_entry(adapter, entries_namespace, key)
        ids = stored.provenance.message_ids if stored.provenance else ()
        tombstone = build_tombstone(namespace, hash_normal_form(stored.text), "forgotten", ids)
        await adapter.write(await add_message_ids_of_replaced_tombstones(adapter, [tombstone]))
        await erase_items(adapter, entries_namespace, key)
        return Outcome("deleted", key)

    list, alist = build_blocking_function(_list), build_async_function(_list)
    release, arelease = build_blocking_function(_release), build_async_function(_release)
    discard, adiscard = build_blocking_function(_discard), build_async_function(_discard)

    def _get_adapter_memory_and_quarantine_namespaces(
        self, config: RunnableConfig | None
    ) -> tuple[StoreAdapter, Namespace, Namespace]:
        """Return the store's adapter, the memories' namespace, and the quarantine's namespace."""
        namespace = fill_namespace(self.namespace, config)
        return (
            get_adapter(self.store),
            namespace,
            build_namespace_of_notes_about_memories(QUARANTINE, namespace),
        )


async def _get_stored_quarantine_entry(
    adapter: StoreAdapter, namespace: Namespace, key: str
) -> Memory:
    """Return the store item that holds a quarantine entry.

    Raises:
        UnknownMemory: The quarantine has no entry with the key.
    """
    memory = await adapter.get(namespace, key)
    if memory is None:
        raise UnknownMemory(
            f"there is no entry {key!r:.80} in {namespace!r}; Quarantine.list() returns all entries"
        )
    return memory


def _build_quarantine_entry(memory: Memory) -> QuarantineEntry:
    """Build a quarantine entry from its stored item."""
    value = memory.value
    return QuarantineEntry(
        key=memory.key,
        at=datetime.fromisoformat(value["at"]),
        memory_key=value["key"],
        provenance=memory.provenance,
        text=memory.text,
        **{name: value[name] for name in ("shown", "reason", "check", "kind", "role", "fields")},
    )
