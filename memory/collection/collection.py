"""A collection: small self-contained facts under a namespace, each with its past."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import get_args

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore
from pydantic import BaseModel

from perdure.errors import ConfigurationError
from perdure.memory.collection.changing import Changing, Replacement, Telling
from perdure.memory.collection.forgetting import emptying, forgetting
from perdure.memory.collection.shaping import Given, MemoryShape
from perdure.memory.effects import Effects, arun, run
from perdure.memory.gate import Gate
from perdure.memory.listing import Readable
from perdure.memory.options import choice
from perdure.memory.records import FACT, Outcome, Role
from perdure.memory.run_config import source
from perdure.stores.base import Provenance, Receipt
from perdure.stores.namespaces import check_key


class Collection(Readable):
    """Memories of one kind or several, a fact each, under a namespace of a store.

    Methods that begin with `a` are the async forms. `config` is that of the run; None: within a
    node, the run it belongs to. What is written passes a gate first: see the `Outcome`. Nothing but
    `forget` destroys what a memory said before.

    Args:
        store: Any; on perdure's, versions are kept and changes that come together are told apart.
            None: within a graph, the store it was compiled with.
        namespace: Labels; see `Template`. With `"{user_id}"` in it, each user has their own.
        schema: What a memory has beside its text: a pydantic model with a field `text: str`. Its
            fields are kept in the value.
        gate: What decides on what is kept.
        kind: The kind of what is inserted.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        namespace: tuple[str, ...] = ("memories", "{user_id}"),
        *,
        schema: type[BaseModel] | None = None,
        gate: Gate | None = None,
        kind: str = FACT,
    ) -> None:
        if gate is not None and not isinstance(gate, Gate):
            raise ConfigurationError(f"gate is {gate!r:.80}; expected a Gate")
        if not isinstance(kind, str) or not kind:
            raise ConfigurationError(f"kind is {kind!r:.80}; expected a word, like 'fact'")
        super().__init__(store, namespace)
        self.shape, self.gate, self.kind = MemoryShape(schema), gate or Gate(), kind

    # -- writing

    def insert(
        self,
        memory: Given,
        *,
        config: RunnableConfig | None = None,
        provenance: Provenance | None = None,
        role: Role = "user",
        key: str | None = None,
    ) -> Outcome:
        """Add a memory, unless it is there already.

        Args:
            memory: Its text, a dict with `text` and other fields, or an instance of the schema.
            config: Of the run.
            provenance: Where it comes from; None: the run's thread, and now.
            role: Whose words it rests on.
            key: Its id; None: a new one.

        Returns:
            `"added"` with its key, `"unchanged"` with the key of the one that says the same, or
            what the gate made of it.

        Raises:
            InvalidValue: It has no text, or is not what the schema asks for.
            InvalidConfig: The config does not fill the namespace.
            ConfigurationError: There is no store, or the key is another memory's.
            VersionConflict: Other processes changed memories here, again and again.
            StorageError: The store refuses.
        """
        return run(self._inserting(memory, config, provenance, role, key))

    async def ainsert(
        self,
        memory: Given,
        *,
        config: RunnableConfig | None = None,
        provenance: Provenance | None = None,
        role: Role = "user",
        key: str | None = None,
    ) -> Outcome:
        """See `insert`."""
        return await arun(self._inserting(memory, config, provenance, role, key))

    def update(
        self,
        key: str,
        memory: Given,
        *,
        config: RunnableConfig | None = None,
        provenance: Provenance | None = None,
        role: Role = "user",
    ) -> Outcome:
        """Put a memory right, or better: what it said was wrong, or badly put.

        Args:
            key: Its id.
            memory: Its new text, or the fields to change; the others stay.
            config: Of the run.
            provenance: Where the new text comes from; None: the run's thread, and now.
            role: Whose words that rests on.

        Returns:
            `"updated"`, `"unchanged"` if it or another says so already, or what the gate made of
            it.

        Raises:
            UnknownMemory: There is none by that id.
            VersionConflict: See `insert`.
            InvalidValue: See `insert`; as its other errors.
        """
        return run(self._replacing("updated", key, memory, config, provenance, role))

    async def aupdate(
        self,
        key: str,
        memory: Given,
        *,
        config: RunnableConfig | None = None,
        provenance: Provenance | None = None,
        role: Role = "user",
    ) -> Outcome:
        """See `update`."""
        return await arun(self._replacing("updated", key, memory, config, provenance, role))

    def supersede(
        self,
        key: str,
        memory: Given,
        *,
        at: datetime | None = None,
        config: RunnableConfig | None = None,
        provenance: Provenance | None = None,
        role: Role = "user",
    ) -> Outcome:
        """Say what is true now, in place of what was true until now.

        Args:
            key: As for `update`; so are the others.
            memory: What is true now.
            at: Until when the former was true, with a time zone; None: until now.
            config: Of the run.
            provenance: Where the new text comes from.
            role: Whose words that rests on.

        Returns:
            `"superseded"`, or see `update`; as its errors.
        """
        return run(self._replacing("superseded", key, memory, config, provenance, role, at))

    async def asupersede(
        self,
        key: str,
        memory: Given,
        *,
        at: datetime | None = None,
        config: RunnableConfig | None = None,
        provenance: Provenance | None = None,
        role: Role = "user",
    ) -> Outcome:
        """See `supersede`."""
        return await arun(self._replacing("superseded", key, memory, config, provenance, role, at))

    def delete(self, key: str, *, config: RunnableConfig | None = None) -> Outcome:
        """Close a memory, so that it is no longer found and not formed again; its past stays.

        Raises:
            UnknownMemory: There is none by that id, or none any more.
            VersionConflict: See `insert`.
            ConfigurationError: See `insert`.
        """
        return run(self.changing(config).deleting(check_key(key)))

    async def adelete(self, key: str, *, config: RunnableConfig | None = None) -> Outcome:
        """See `delete`."""
        return await arun(self.changing(config).deleting(check_key(key)))

    def forget(self, key: str, *, config: RunnableConfig | None = None) -> Receipt:
        """Erase a memory, present or deleted, with all that it ever said.

        What waits in quarantine for it, or in its words, goes as well; the conversation it came
        from stays, see `Store.forget`. That it is not to be formed again is noted as a hash. In a
        store that is not perdure's, it is deleted as that store does it, and the receipt is not
        `clean`.

        Raises:
            UnknownMemory: There is and was none by that id.
            ConfigurationError: See `insert`.
        """
        return run(forgetting(*self._place(config), check_key(key)))

    async def aforget(self, key: str, *, config: RunnableConfig | None = None) -> Receipt:
        """See `forget`."""
        return await arun(forgetting(*self._place(config), check_key(key)))

    def forget_all(self, *, config: RunnableConfig | None = None) -> Receipt:
        """Erase all memories of the namespace, say of a user who leaves, and all notes on them.

        With them goes what is in quarantine, what notes that threads are or wait to be formed, and
        the hashes by which what was deleted is known. So nothing is left, and nothing is held back:
        what is formed of a thread after that is formed as of a new one. Delete the threads as well,
        and before: `store.forget(threads=…, checkpointer=…)` does. To call `store.forget` with the
        namespace leaves the notes, and in quarantine maybe a secret. What is in namespaces below
        this one stays, as do a profile and examples, which have their own.

        In a store that is not perdure's, all is deleted as that store does it, and the receipt is
        not `clean`.

        Raises:
            InvalidConfig: The config does not fill the namespace.
            ConfigurationError: There is no store.
        """
        return run(emptying(*self._place(config)))

    async def aforget_all(self, *, config: RunnableConfig | None = None) -> Receipt:
        """See `forget_all`."""
        return await arun(emptying(*self._place(config)))

    # -- steps

    def _inserting(
        self,
        memory: Given,
        config: RunnableConfig | None,
        provenance: Provenance | None,
        role: Role,
        key: str | None,
    ) -> Effects[Outcome]:
        telling = telling_of(memory, config, provenance, role)
        wanted = None if key is None else check_key(key)
        return self.changing(config).inserting(telling, wanted)

    def _replacing(
        self,
        change: Replacement,
        key: str,
        memory: Given,
        config: RunnableConfig | None,
        provenance: Provenance | None,
        role: Role,
        at: datetime | None = None,
    ) -> Effects[Outcome]:
        if at is not None and (not isinstance(at, datetime) or at.tzinfo is None):
            raise ConfigurationError(
                f"at is {at!r:.80}; expected a datetime with a time zone, or None: now"
            )
        telling = telling_of(memory, config, provenance, role)
        return self.changing(config).replacing(check_key(key), telling, change, at)

    def changing(self, config: RunnableConfig | None) -> Changing:
        """The changes that can be made in the namespace of a run, as steps.

        Raises:
            InvalidConfig: The config does not fill the namespace.
            ConfigurationError: There is no store.
        """
        return Changing(*self._place(config), self.gate, self.shape, self.kind)


def telling_of(
    memory: Given,
    config: RunnableConfig | None,
    provenance: Provenance | None = None,
    role: Role = "user",
) -> Telling:
    """What is given, with where it comes from: if nobody says, the run, now."""
    choice("role", role, get_args(Role))
    if provenance is None:
        thread_id, checkpoint_id = source(config)
        provenance = Provenance(thread_id, checkpoint_id, actor=role, at=datetime.now(UTC))
    if provenance.trust is None:
        provenance = replace(provenance, trust=role)
    return Telling(memory, provenance, role)
