"""A collection: memories under a namespace of a store, each with its past.

`remember`, `memories` and `forget` are the same for a single call.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore
from pydantic import BaseModel

from perdure.memory.changes import Changes, Given, check_schema, provenance_of
from perdure.memory.effects import Effects, awaiting, blocking
from perdure.memory.erasure import forgotten, forgotten_all
from perdure.memory.gate.gate import Gate
from perdure.memory.options import instance, moment, text, whole
from perdure.memory.records import FACT, Memory, Outcome
from perdure.memory.store_adapter import StoreAdapter, adapter_of, namespace_of
from perdure.memory.templates import Template
from perdure.stores.base import Namespace, Provenance, Receipt
from perdure.stores.namespaces import check_key

Memories = list[Memory]
_USERS: Final = ("memories", "{user_id}")
_PAGE: Final = 32  # memories read at least, where some may be of a namespace further down


class Collection:
    """Memories of one kind or several under a namespace of a store.

    Methods that begin with `a` are async. `config` is the run's; None: within a node, the config of
    its run. What is written passes the gate first: see the `Outcome`. Only `forget` and
    `forget_all` destroy earlier texts.

    Args:
        store: Any; perdure's keep versions and tell changes apart that come at the same time. None:
            within a graph, the store it was compiled with.
        namespace: Labels; see `Template`. With `"{user_id}"` in it, each user has their own.
        schema: A pydantic model with a field `text: str`; its other fields are kept as well.
        gate: Decides what is kept.
        kind: The kind of new memories.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        namespace: tuple[str, ...] = _USERS,
        *,
        schema: type[BaseModel] | None = None,
        gate: Gate | None = None,
        kind: str = FACT,
    ) -> None:
        if schema is not None:
            check_schema(schema)
        self.store: BaseStore | None = None if store is None else StoreAdapter(store).store
        self.namespace, self.schema = Template(namespace), schema
        self.gate = Gate() if gate is None else instance("gate", gate, Gate, "a Gate")
        self.kind = text("kind", kind, "a word, like 'fact'")

    def changes(self, config: RunnableConfig | None, *, by_model: bool = False) -> Changes:
        """The changes that a run may make, as effects.

        Raises:
            InvalidConfig: The config does not fill the namespace.
            ConfigurationError: There is no store.
        """
        place = self._place(config)
        return Changes(*place, self.gate, self.schema, self.kind, by_model)

    # -- writing

    def _insert(
        self,
        memory: Given,
        *,
        key: str | None = None,
        provenance: Provenance | None = None,
        config: RunnableConfig | None = None,
    ) -> Effects[Outcome]:
        """Add a memory, unless it is there already.

        Args:
            memory: Its text, a dict with `text` and other fields, or an instance of the schema.
            key: Its key; None: a new one.
            provenance: Where it comes from; its `trust` says whose words it rests on: `"user"`,
                `"assistant"`, `"tool"` or a class of your own. None: the user's, in this run.
            config: Of the run.

        Returns:
            `"added"` with the key, `"unchanged"` with the key of the memory that says the same, or
            what the gate did.

        Raises:
            InvalidValue: It has no text, or does not fit the schema.
            InvalidConfig: The config does not fill the namespace.
            ConfigurationError: There is no store, or the key is another memory's.
            VersionConflict: Other processes changed memories here, again and again.
            StorageError: The store fails.
        """
        changes = self.changes(config)
        wanted = None if key is None else check_key(key)
        return (yield from changes.insert(memory, provenance_of(config, provenance), wanted))

    def _update(
        self,
        key: str,
        memory: Given,
        *,
        provenance: Provenance | None = None,
        config: RunnableConfig | None = None,
    ) -> Effects[Outcome]:
        """Correct a memory: its text was wrong, or badly put.

        Args:
            key: Its key.
            memory: Its new text, or the fields to change; the others stay.
            provenance: Where the new text comes from; see `insert`.
            config: Of the run.

        Returns:
            `"updated"`, `"unchanged"` if it or another says so already, or what the gate did.

        Raises:
            UnknownMemory: There is none with that key.
            InvalidValue: See `insert`, also for its other errors.
        """
        changes, source = self.changes(config), provenance_of(config, provenance)
        return (yield from changes.replace(check_key(key), memory, source, "updated"))

    def _supersede(
        self,
        key: str,
        memory: Given,
        *,
        at: datetime | None = None,
        provenance: Provenance | None = None,
        config: RunnableConfig | None = None,
    ) -> Effects[Outcome]:
        """Replace what was true until now by what is true now.

        The turns on which the previous text rests are marked as past in the same transaction.

        Args:
            key: Its key.
            memory: What is true now; see `update`.
            at: Until when the previous text was true, with a time zone; None: until now.
            provenance: Where the new text comes from; see `insert`.
            config: Of the run.

        Returns:
            `"superseded"`, or see `update`, also for its errors.
        """
        until = None if at is None else moment("at", at)
        changes, source = self.changes(config), provenance_of(config, provenance)
        return (yield from changes.replace(check_key(key), memory, source, "superseded", until))

    def _delete(self, key: str, *, config: RunnableConfig | None = None) -> Effects[Outcome]:
        """Close a memory: it is not found and not extracted any more; its past stays.

        Raises:
            UnknownMemory: There is none with that key, or none any more.
            VersionConflict: See `insert`.
        """
        return (yield from self.changes(config).delete(check_key(key)))

    def _forget(self, key: str, *, config: RunnableConfig | None = None) -> Effects[Receipt]:
        """Erase a memory, present or deleted, with all its versions, from the file too.

        Entries in quarantine for it, or with its text, are erased as well; the conversation it
        comes from stays, see `Store.forget`. A hash notes that it is not to be extracted again. A
        store that is not perdure's just deletes it, and the receipt is not `clean`.

        Raises:
            UnknownMemory: There is and was none with that key.
        """
        adapter, namespace = self._place(config)
        return (yield from forgotten(adapter, namespace, check_key(key)))

    def _forget_all(self, *, config: RunnableConfig | None = None) -> Effects[Receipt]:
        """Erase all memories of the namespace, for example of a user who leaves, and all notes.

        The notes are the quarantine, how far threads are extracted, and the hashes of what was
        deleted: a thread that is extracted after that is extracted as a new one, so delete the
        threads first: `store.forget(threads=…, checkpointer=…)`. Namespaces below this one stay, as
        do a profile and examples, which have their own.

        Raises:
            InvalidConfig: The config does not fill the namespace.
            ConfigurationError: There is no store.
        """
        return (yield from forgotten_all(*self._place(config)))

    # -- reading

    def _get(
        self, key: str, *, as_of: datetime | None = None, config: RunnableConfig | None = None
    ) -> Effects[Memory | None]:
        """A memory, now or at a moment of the past; None: there is none.

        Raises:
            InvalidConfig: The config does not fill the namespace.
            ConfigurationError: There is no store, or it keeps no past.
        """
        adapter, namespace = self._place(config)
        return (yield from adapter.got(namespace, check_key(key), as_of))

    def _search(
        self,
        query: str,
        *,
        limit: int = 10,
        filter: Mapping[str, Any] | None = None,
        as_of: datetime | None = None,
        explain: bool = False,
        config: RunnableConfig | None = None,
    ) -> Effects[Memories]:
        """The memories that answer a query, best first.

        Args:
            query: Words of the user.
            limit: How many at most.
            filter: What their values must meet; see `Store.search`.
            as_of: At that moment of the past.
            explain: Whether to give the parts of each score; see `Memory.parts`.
            config: Of the run.

        Raises:
            ConfigurationError: See `get`.
            InvalidFilter: The store does not take the filter.
        """
        asked = {"query": query, "filter": filter, "as_of": as_of, "explain": explain}
        return self.found(asked, limit, config=config)

    def _list(
        self,
        *,
        kind: str | None = None,
        limit: int = 100,
        offset: int = 0,
        as_of: datetime | None = None,
        config: RunnableConfig | None = None,
    ) -> Effects[Memories]:
        """The memories, in the store's order; perdure's: oldest first.

        Args:
            kind: Only those of this kind.
            limit: How many at most.
            offset: How many to leave out.
            as_of: At that moment of the past.
            config: Of the run.

        Raises:
            ConfigurationError: See `get`.
        """
        chosen = {} if kind is None else {"filter": {"kind": kind}}
        return self.found({**chosen, "as_of": as_of}, limit, offset, config)

    def _history(self, key: str, *, config: RunnableConfig | None = None) -> Effects[Memories]:
        """All versions of a memory, oldest first, also of one that is deleted.

        A store without versions has the present one; its earlier texts are in `previous`.
        """
        adapter, namespace = self._place(config)
        return (yield from adapter.versions(namespace, check_key(key)))

    def _place(self, config: RunnableConfig | None) -> tuple[StoreAdapter, Namespace]:
        return adapter_of(self.store), namespace_of(self.namespace, config)

    def found(
        self,
        asked: Mapping[str, Any],
        limit: int,
        offset: int = 0,
        config: RunnableConfig | None = None,
    ) -> Effects[Memories]:
        """Memories of the namespace itself, as an effect; stores search those below as well.

        Args:
            asked: See `StoreAdapter.found`.
            limit: How many at most.
            offset: How many to leave out.
            config: Of the run.
        """
        whole("limit", limit, 1)
        whole("offset", offset, 0)
        adapter, namespace = self._place(config)
        if adapter.versioned and asked.get("query") is None:  # the outermost namespace is first
            page = yield from adapter.found(namespace, limit=limit, offset=offset, **asked)
            return [memory for memory in page if memory.namespace == namespace]
        found: Memories = []
        seen, size = 0, max(offset + limit, _PAGE)
        while len(found) < offset + limit:
            page = yield from adapter.found(namespace, limit=size, offset=seen, **asked)
            found += [memory for memory in page if memory.namespace == namespace]
            if len(page) < size:
                break
            seen, size = seen + size, 2 * size
        return found[offset : offset + limit]

    insert, ainsert = blocking(_insert), awaiting(_insert)
    update, aupdate = blocking(_update), awaiting(_update)
    supersede, asupersede = blocking(_supersede), awaiting(_supersede)
    delete, adelete = blocking(_delete), awaiting(_delete)
    forget, aforget = blocking(_forget), awaiting(_forget)
    forget_all, aforget_all = blocking(_forget_all), awaiting(_forget_all)
    get, aget = blocking(_get), awaiting(_get)
    search, asearch = blocking(_search), awaiting(_search)
    list, alist = blocking(_list), awaiting(_list)
    history, ahistory = blocking(_history), awaiting(_history)


def _remember(
    memory: Given,
    *,
    key: str | None = None,
    kind: str = FACT,
    provenance: Provenance | None = None,
    store: BaseStore | None = None,
    namespace: tuple[str, ...] = _USERS,
    config: RunnableConfig | None = None,
) -> Effects[Outcome]:
    """Keep a memory, unless it is known already.

    Args:
        memory: Its text, or a dict with `text` and other fields.
        key: Its key. The memory that has it is superseded. None: a new one.
        kind: Its kind.
        provenance: Where it comes from; see `Collection.insert`, as for the errors.
        store: Any; None: within a graph, the store it was compiled with.
        namespace: Labels; see `Template`.
        config: Of the run; None: within a node, the config of its run.
    """
    changes = Collection(store, namespace, kind=kind).changes(config)
    source = provenance_of(config, provenance)
    if key is None:
        return (yield from changes.insert(memory, source))
    return (yield from changes.put(memory, source, check_key(key), "superseded"))


def _forget(
    key: str | None = None,
    *,
    everything: bool = False,
    store: BaseStore | None = None,
    namespace: tuple[str, ...] = _USERS,
    config: RunnableConfig | None = None,
) -> Effects[Receipt]:
    """Erase a memory with all its versions, or everything in the namespace.

    Args:
        key: Of the memory; see `Collection.forget`.
        everything: Instead of a key: all memories and notes; see `Collection.forget_all`.
        store: Any; None: within a graph, the store it was compiled with.
        namespace: Labels; see `Template`.
        config: Of the run; None: within a node, the config of its run.

    Raises:
        UnknownMemory: There is and was none with that key.
        ConfigurationError: Neither key nor everything is given, or both.
    """
    collection = Collection(store, namespace)
    expected = type(None) if everything else (str, int)
    instance("key", key, expected, "a memory's key, or None with everything=True")
    if key is None:
        return collection._forget_all(config=config)
    return collection._forget(key, config=config)


def _memories(
    *,
    kind: str | None = None,
    limit: int = 100,
    offset: int = 0,
    as_of: datetime | None = None,
    store: BaseStore | None = None,
    namespace: tuple[str, ...] = _USERS,
    config: RunnableConfig | None = None,
) -> Effects[Memories]:
    """List the memories of a namespace; see `Collection.list`."""
    collection = Collection(store, namespace)
    return collection._list(kind=kind, limit=limit, offset=offset, as_of=as_of, config=config)


remember, aremember = blocking(_remember), awaiting(_remember)
forget, aforget = blocking(_forget), awaiting(_forget)
memories, amemories = blocking(_memories), awaiting(_memories)
