"""Profiles: one document of what is known of somebody, under a schema, changed field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Generic

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import ConfigurationError, InvalidPatch
from perdure.memory.effects import Effects, arun, run
from perdure.memory.gate import Gate
from perdure.memory.options import whole
from perdure.memory.profile.changes import Changes, Plan, Standing, profile_of
from perdure.memory.profile.documents import Document
from perdure.memory.profile.items import ProfilePlace
from perdure.memory.profile.past import ProfileVersion, forgetting, versions
from perdure.memory.profile.patching import Operation, is_as_seen, operations_of
from perdure.memory.profile.schema import M, Section, Shape
from perdure.memory.profile.users_words import UsersWords
from perdure.memory.run_config import source
from perdure.memory.store_adapter import StoreAdapter, adapter_of, namespace_of
from perdure.memory.templates import Template
from perdure.stores.base import Provenance, Receipt


class Profile(Generic[M]):
    """A profile in a store: a document that a pydantic model describes.

    A change is worked out on a copy, and written only if the schema accepts all of it: strictly,
    without unknown fields. What it does not name stays as it is. Two that come at the same time
    both hold. A store without versions has no past, and may lose one of two changes that come from
    several processes.

    The item's value is the `document`, a `text` of its fields in words, which is searched, and the
    last change. Methods that begin with `a` are the async forms. `config` is that of the run;
    None: within a node, the run it belongs to.

    Args:
        schema: What a profile is.
        store: Any; None: within a graph, the store it was compiled with.
        namespace: Labels; see `Template`.
        key: The item's key, a template as well.
        sections: Whether each field of the schema is an item of its own, in `(*namespace, key)`,
            so that a change of a large profile writes and shows no more than what it concerns.
            It may be changed at any time: the next change writes the profile in that form.
        default: What holds as long as nothing is stored; None: the schema's own defaults.
        max_bytes: Of the document's JSON.
        max_operations: Of a patch.
        gate: Judges the texts and numbers that a change sets, names of fields and reasons too: what
            it would refuse or put into quarantine makes the change an `InvalidPatch`, and what it
            blots out is kept so. Of its rules those for secrets, cards and contacts apply, and your
            own checks; None: `Gate()`. Contacts that are to be blotted out are kept where somebody
            writes them by hand, or a user told them.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        schema: type[M],
        store: BaseStore | None = None,
        namespace: tuple[str, ...] = ("profiles", "{user_id}"),
        key: str = "profile",
        *,
        sections: bool = False,
        default: M | None = None,
        max_bytes: int = 100_000,
        max_operations: int = 100,
        gate: Gate | None = None,
    ) -> None:
        if gate is not None and not isinstance(gate, Gate):
            raise ConfigurationError(f"gate is {gate!r:.80}; expected Gate(…), or None")
        self.shape = Shape(schema, default)
        self.adapter = None if store is None else StoreAdapter(store)
        self.namespace, self.key = Template(namespace), Template((key,))
        self.max_operations = whole("max_operations", max_operations, 1)
        whole("max_bytes", max_bytes, 1)
        self.changes = Changes(
            self.shape, sections=bool(sections), max_bytes=max_bytes, gate=gate or Gate()
        )

    def current(self, config: RunnableConfig | None = None, *, as_of: datetime | None = None) -> M:
        """What is known now, or was at a moment; as long as that is nothing, the defaults.

        Raises:
            ConfigurationError: What is stored is not as the schema asks for, which may have been
                changed since; or the schema has no defaults; or the config does not fill the
                templates, or the store has no past to look at.
        """
        return run(self._current(self.place(config), as_of))

    async def acurrent(
        self, config: RunnableConfig | None = None, *, as_of: datetime | None = None
    ) -> M:
        """See `current`."""
        return await arun(self._current(self.place(config), as_of))

    def raw(
        self, config: RunnableConfig | None = None, *, as_of: datetime | None = None
    ) -> Document:
        """The document as it is stored, whether or not the schema accepts it; `{}`: none is.

        Raises:
            ConfigurationError: What is stored there is no profile; or the config does not fill the
                templates, there is no store, or it has no past to look at.
        """
        return run(self._raw(self.place(config), as_of))

    async def araw(
        self, config: RunnableConfig | None = None, *, as_of: datetime | None = None
    ) -> Document:
        """See `raw`."""
        return await arun(self._raw(self.place(config), as_of))

    def history(self, config: RunnableConfig | None = None) -> list[ProfileVersion]:
        """All versions, oldest first, with what changed in each and the threads that caused it.

        Raises:
            ConfigurationError: What is stored there is no profile; or the config does not fill the
                templates, or there is no store.
        """
        return run(versions(self.place(config)))

    async def ahistory(self, config: RunnableConfig | None = None) -> list[ProfileVersion]:
        """See `history`."""
        return await arun(versions(self.place(config)))

    def outline(self, config: RunnableConfig | None = None) -> list[Section]:
        """The fields of the profile and how large they are, without what they hold.

        Raises:
            ConfigurationError: What is stored there is no profile; or the config does not fill the
                templates, or there is no store.
        """
        return run(self._outline(self.place(config)))

    async def aoutline(self, config: RunnableConfig | None = None) -> list[Section]:
        """See `outline`."""
        return await arun(self._outline(self.place(config)))

    # -- writing

    def patch(self, operations: Any, config: RunnableConfig | None = None) -> M:
        """Apply a JSON Patch (RFC 6902) to what is stored, defaults included.

        Args:
            operations: Like `[{"op": "add", "path": "/likes/-", "value": "tea"}]`; a `"reason"`
                in one is noted with the change.
            config: Of the run.

        Returns:
            What is known then.

        Raises:
            InvalidPatch: It is no patch, or names a place that is not there, or the gate refuses
                what it sets, or the schema what it would leave. Nothing is written.
            ConfigurationError: What is stored there is no profile; or the config does not fill the
                templates, or there is no store.
        """
        wanted = operations_of(operations, self.max_operations)
        change = self.changes.patch(wanted, keep_fields=False)
        return run(self.changes.changing(self.place(config), change))

    async def apatch(self, operations: Any, config: RunnableConfig | None = None) -> M:
        """See `patch`."""
        wanted = operations_of(operations, self.max_operations)
        change = self.changes.patch(wanted, keep_fields=False)
        return await arun(self.changes.changing(self.place(config), change))

    def merge(self, partial: Mapping[str, Any], config: RunnableConfig | None = None) -> M:
        """Change the fields that are named, and theirs within them (RFC 7386).

        A null takes a field back to its default; a list replaces a list.

        Returns:
            What is known then.

        Raises:
            InvalidPatch: See `patch`.
            ConfigurationError: See `patch`.
        """
        change = self.changes.merge(partial)
        return run(self.changes.changing(self.place(config), change))

    async def amerge(self, partial: Mapping[str, Any], config: RunnableConfig | None = None) -> M:
        """See `merge`.

        Raises:
            InvalidPatch: See `patch`.
            ConfigurationError: See `patch`.
        """
        change = self.changes.merge(partial)
        return await arun(self.changes.changing(self.place(config), change))

    def set(self, document: M | Mapping[str, Any], config: RunnableConfig | None = None) -> M:
        """Write a whole document in the place of whatever there is.

        Raises:
            InvalidPatch: The gate or the schema refuses it. Nothing is written.
            ConfigurationError: See `patch`.
        """
        change = self.changes.set(document)
        return run(self.changes.changing(self.place(config), change))

    async def aset(
        self, document: M | Mapping[str, Any], config: RunnableConfig | None = None
    ) -> M:
        """See `set`.

        Raises:
            InvalidPatch: See `set`.
            ConfigurationError: See `patch`.
        """
        change = self.changes.set(document)
        return await arun(self.changes.changing(self.place(config), change))

    def forget(self, config: RunnableConfig | None = None) -> Receipt | None:
        """Erase the profile with its past; None: the store has none and the item is deleted.

        Raises:
            ConfigurationError: What is stored there is no profile; or the config does not fill the
                templates, or there is no store.
        """
        return run(forgetting(self.place(config)))

    async def aforget(self, config: RunnableConfig | None = None) -> Receipt | None:
        """See `forget`."""
        return await arun(forgetting(self.place(config)))

    # -- steps, for what writes a profile together with other things

    def place(
        self,
        config: RunnableConfig | None = None,
        provenance: Provenance | None = None,
        *,
        users: UsersWords | None = None,
    ) -> ProfilePlace:
        """Where the profile of a run is.

        Args:
            config: Of the run.
            provenance: What a change is noted with; None: the run's thread and checkpoint, and that
                a user makes it, by hand.
            users: What users said, where a model makes the change of it. What it sets is then noted
                as theirs if all of that stands in their words, else as `provenance` says.

        Raises:
            ConfigurationError: There is no store, or no such place.
        """
        adapter = self.adapter or adapter_of(None)
        namespace, [key] = namespace_of(self.namespace, config), self.key.filled(config)
        thread, checkpoint = source(config)
        if provenance is None:
            provenance = Provenance(thread, checkpoint, actor="user", trust="user")
        return ProfilePlace(adapter, namespace, key, provenance, users)

    def reading(self, place: ProfilePlace) -> Effects[Standing[M]]:
        """Read the profile as it stands: `document` is what a model is to be shown of it."""
        return self.changes.reading(place)

    def planned(
        self,
        place: ProfilePlace,
        standing: Standing[M],
        operations: Sequence[Operation],
        *,
        keep_fields: bool = True,
    ) -> Effects[Plan[M]]:
        """Work out a patch of the profile as it stands; see `planning`."""
        change = self.changes.patch(operations, keep_fields=keep_fields)
        return self.changes.planned(place, standing, change)

    def planning(
        self,
        place: ProfilePlace,
        operations: Any,
        *,
        seen: Mapping[str, Any] | None = None,
        keep_fields: bool = True,
    ) -> Effects[Plan[M]]:
        """Work out a patch without writing it, so that it can be written with other things.

        Write `plan.puts`, with whatever else, by `place.adapter.written`; after a
        `VersionConflict`, plan anew.

        Args:
            place: See `place`.
            operations: As for `patch`.
            seen: The document that they were made for; None: whatever holds.
            keep_fields: Whether an object in the place of another has to have all its fields: a
                model that writes a patch forgets what it does not name.

        Raises:
            InvalidPatch: See `patch`; also, a field that they concern is not as it was seen.
        """
        wanted = operations_of(operations, self.max_operations)
        standing = yield from self.reading(place)
        if seen is not None and not is_as_seen(wanted, seen, standing.document):
            raise InvalidPatch(
                "another run has changed what this patch concerns since it was made: make it anew "
                "for the profile as it is now"
            )
        return (yield from self.planned(place, standing, wanted, keep_fields=keep_fields))

    def _current(self, place: ProfilePlace, as_of: datetime | None) -> Effects[M]:
        standing = yield from self.changes.reading(place, as_of)
        return profile_of(standing, place)

    def _raw(self, place: ProfilePlace, as_of: datetime | None) -> Effects[Document]:
        standing = yield from self.changes.reading(place, as_of)
        return standing.kept.document or {}

    def _outline(self, place: ProfilePlace) -> Effects[list[Section]]:
        standing = yield from self.changes.reading(place)
        return self.shape.outline(standing.document)
