"""Profiles: a document of what is known of somebody, under a schema, changed field by field."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import Any, Final, Generic, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore
from pydantic import RootModel

from perdure.errors import ConfigurationError, InvalidPatch, VersionConflict
from perdure.memory.effects import Effect, Effects, arun, awaiting, blocking, run
from perdure.memory.gate import Gate
from perdure.memory.options import instance
from perdure.memory.profile_patch import (
    Document,
    differences,
    is_as_seen,
    merged,
    operations_of,
    patched,
    plain,
    same,
)
from perdure.memory.profile_rules import (
    KIND,
    M,
    Origin,
    default_of,
    dumped,
    leaves_of,
    replaced,
    screened,
    text_of,
    validated,
)
from perdure.memory.records import Memory
from perdure.memory.run_config import source
from perdure.memory.store_adapter import (
    StoreAdapter,
    adapter_of,
    namespace_of,
    put_of,
    removal_of,
)
from perdure.memory.templates import Template
from perdure.stores.base import Namespace, Provenance, PutItem, Receipt

_DOCUMENT: Final = "document"
_SECTIONS: Final = "sections"  # the first version could keep each field as an item of its own
_NUMBER: Final = "number"  # counts changes, for stores without versions
_EDITS: Final = 100  # that are noted of one change
_WRITING: Final = threading.Lock()


class ProfilePlace(NamedTuple):
    """Where a profile is, and where a change of it comes from."""

    adapter: StoreAdapter
    namespace: Namespace
    key: str
    origin: Origin = Origin()


@dataclass(frozen=True, slots=True)
class ProfileState(Generic[M]):
    """A profile as it is stored.

    Attributes:
        items: Its item; of one that the first version kept in sections, theirs after it.
        document: What a change starts from: what is stored, else the defaults.
        profile: The same by the schema; None: the schema does not accept it.
        fault: Why not; "" if it does.
    """

    items: tuple[Memory, ...]
    document: Document
    profile: M | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class ProfileVersion:
    """What a profile was, or is.

    Attributes:
        document: The profile.
        version: Counts from 1; None: the store keeps no versions.
        change: `"patch"`, `"merge"` or `"set"`.
        edits: What that changed, each with `op` and `path`.
        valid_from: Since when (UTC).
        valid_to: Until when; None: it is the present one.
        provenance: The thread and checkpoint of its run, if known, and whose words it rests on.
    """

    document: Document = field(repr=False)
    version: int | None
    change: str
    edits: tuple[Mapping[str, str], ...]
    valid_from: datetime | None
    valid_to: datetime | None
    provenance: Provenance | None


class Profile(Generic[M]):
    """A profile in a store, of each user if the namespace says so.

    A change is checked as a whole, by the schema and the gate, before it is written. What it does
    not name stays as it is; of two changes at the same time both hold. A large profile is better
    split: several profiles under one namespace, each with its schema and key. Methods that begin
    with `a` are the async forms. `config` is that of the run; None: within a node, its run's.

    Args:
        schema: A pydantic model.
        store: Any; None: within a graph, the store it was compiled with. One without versions keeps
            no past, and may lose one of two changes that come from several processes.
        namespace: Labels; see `Template`.
        key: The item's key, a template as well.
        gate: Its detectors and checks judge each value that a change sets; None: `Gate()`. What it
            would refuse or put into quarantine makes the change an `InvalidPatch`. Addresses and
            telephone numbers are kept if they are written by hand, or a user told them.

    Raises:
        ConfigurationError: An argument is wrong; or later: there is no store, it keeps no past, or
            what is stored there is no profile.
        InvalidConfig: The config of a call does not fill the templates.
        InvalidPatch: A change cannot be applied, or the schema or the gate refuses what it sets;
            nothing is written.
    """

    def __init__(
        self,
        schema: type[M],
        store: BaseStore | None = None,
        namespace: tuple[str, ...] = ("profiles", "{user_id}"),
        key: str = "profile",
        *,
        gate: Gate | None = None,
    ) -> None:
        try:
            self.json_schema: Document = schema.model_json_schema()
            if not isinstance(schema, type) or issubclass(schema, RootModel):
                raise TypeError("it has no fields")
        except Exception as exc:  # it is no model, or has a field that JSON cannot say
            expected = "a pydantic model of fields, with a JSON schema"
            raise ConfigurationError(f"the schema is {schema!r:.80}; expected {expected}") from exc
        self.schema, self.adapter = schema, None if store is None else StoreAdapter(store)
        self.namespace, self.key = Template(namespace), Template((key,))
        self.gate: Gate = instance("gate", gate or Gate(), Gate, "Gate(…), or None")

    def _get(
        self, config: RunnableConfig | None = None, *, as_of: datetime | None = None
    ) -> Effects[M]:
        """The profile now, or at a moment; the defaults if nothing is stored."""
        place = self.place(config)
        state = yield from self.reading(place, as_of)
        if state.profile is not None:
            return state.profile
        why = "does not fit the schema any more" if state.items else "is not there yet"
        raise ConfigurationError(
            f"the profile {place.key!r} in {place.namespace!r} {why}: {state.fault}; history() "
            "shows what is stored, and patch() or set() mends it"
        )

    def _history(self, config: RunnableConfig | None = None) -> Effects[list[ProfileVersion]]:
        """All versions, oldest first, with what changed in each."""
        place = self.place(config)
        versions = []
        for head in (yield from place.adapter.versions(place.namespace, place.key)):
            document = _document((yield from _items(place, head, head.valid_from)))
            change, edits = str(head.value.get("change", "")), tuple(head.value.get("edits", ()))
            times = head.valid_from, head.valid_to
            version = ProfileVersion(document, head.version, change, edits, *times, head.provenance)
            versions.append(version)
        return versions

    def _patch(self, operations: Any, config: RunnableConfig | None = None) -> Effects[M]:
        """Apply a JSON Patch (RFC 6902), and return the profile.

        Args:
            operations: Like `[{"op": "add", "path": "/likes/-", "value": "tea"}]`.
            config: Of the run.
        """
        wanted = operations_of(operations)
        return (yield from self._change("patch", lambda old: patched(old, wanted), config))

    def _merge(
        self, partial: Mapping[str, Any], config: RunnableConfig | None = None
    ) -> Effects[M]:
        """Change the named fields, and those named within them (RFC 7386); return the profile.

        A null takes a field back to its default; a list replaces a list.
        """
        merged({}, partial)  # what is no object is refused before anything is read
        return (yield from self._change("merge", lambda old: merged(old, partial), config))

    def _set(
        self, document: M | Mapping[str, Any], config: RunnableConfig | None = None
    ) -> Effects[M]:
        """Write a whole profile, or its document, in the place of any other; return it."""
        given = dumped(document) if isinstance(document, self.schema) else document
        if not isinstance(given, Mapping):
            raise InvalidPatch(
                f"the document is {document!r:.80}, a {type(document).__name__}; expected a "
                f"{self.schema.__name__} or a dict of its fields"
            )
        whole: Document = plain(dict(given), "the document")
        return (yield from self._change("set", lambda _: whole, config))

    def _forget(self, config: RunnableConfig | None = None) -> Effects[Receipt | None]:
        """Erase the profile with its past; None: the store has no past, and the item is deleted."""
        return (yield from forgetting(self.place(config)))

    get = blocking(_get)
    aget = awaiting(_get)
    history = blocking(_history)
    ahistory = awaiting(_history)
    patch = blocking(_patch)
    apatch = awaiting(_patch)
    merge = blocking(_merge)
    amerge = awaiting(_merge)
    set = blocking(_set)
    aset = awaiting(_set)
    forget = blocking(_forget)
    aforget = awaiting(_forget)

    # -- for what writes a profile together with other things

    def place(
        self, config: RunnableConfig | None = None, origin: Origin | None = None
    ) -> ProfilePlace:
        """Where the profile of a run is; a change without an origin is a user's, by hand."""
        namespace, [key] = namespace_of(self.namespace, config), self.key.filled(config)
        if origin is None:
            origin = Origin(Provenance(*source(config), actor="user", trust="user"))
        return ProfilePlace(self.adapter or adapter_of(None), namespace, key, origin)

    def reading(
        self, place: ProfilePlace, as_of: datetime | None = None
    ) -> Effects[ProfileState[M]]:
        """Read the profile, or what is stored instead of one."""
        head = yield from place.adapter.got(place.namespace, place.key, as_of)
        if head is None:
            profile = default_of(self.schema)
            fault = "" if profile else f"{self.schema.__name__} has fields that must be given"
            blank = dumped(profile or self.schema.model_construct())
            return ProfileState((), blank, profile, fault)
        items = yield from _items(place, head, as_of)
        document = _document(items)
        try:
            profile = validated(self.schema, document)
        except InvalidPatch as exc:
            return ProfileState(items, document, None, str(exc))
        return ProfileState(items, dumped(profile), profile)

    def planning(
        self, place: ProfilePlace, operations: Sequence[Document], seen: Document
    ) -> Effects[list[PutItem]]:
        """The puts of a model's patch; `written` writes them.

        Args:
            place: See `place`.
            operations: As for `patch`.
            seen: The document that they were made for.

        Raises:
            InvalidPatch: See `Profile`.
            VersionConflict: A field that they concern is not as the model saw it.
        """
        wanted = operations_of(operations)
        state = yield from self.reading(place)
        if not is_as_seen(wanted, seen, state.document):
            raise VersionConflict(
                f"the profile {place.key!r} was changed where this patch changes it; make it anew"
            )
        puts, _ = yield from self._planned(
            place, state, "patch", lambda old: patched(old, wanted, by_model=True)
        )
        return puts

    def _change(
        self,
        name: str,
        change: Callable[[Document], Document],
        config: RunnableConfig | None,
    ) -> Effects[M]:
        place = self.place(config)
        while True:  # a try that fails is one in which another change succeeded
            state = yield from self.reading(place)
            puts, profile = yield from self._planned(place, state, name, change)
            try:
                yield from written(place.adapter, puts)
            except VersionConflict:
                continue
            return profile

    def _planned(
        self,
        place: ProfilePlace,
        state: ProfileState[M],
        name: str,
        change: Callable[[Document], Document],
    ) -> Effects[tuple[list[PutItem], M]]:
        """The puts of a change, and the profile after it."""
        try:
            new = change(state.document)
        except InvalidPatch as exc:  # it quotes names that the gate has not seen
            raise InvalidPatch(self.gate.sensitive.redacted(str(exc))) from None
        # what is there already, elsewhere in a list perhaps, does not stand in the way of others
        known = {(leaf.label, repr(leaf.value)) for leaf in leaves_of(state.document)}
        leaves = [each for each in leaves_of(new) if (each.label, repr(each.value)) not in known]
        values = yield from screened(self.gate, leaves, place.origin)
        new = replaced(new, leaves, values)
        profile = validated(self.schema, new)
        document: Document = plain(dumped(profile), "the profile")
        if same(document, state.document) and (state.items or name != "set"):
            return [], profile
        edits = list(islice(differences(state.document, document), _EDITS))
        head = state.items[0] if state.items else None
        value = {"text": text_of(document), "kind": KIND, _DOCUMENT: document, "change": name}
        put = put_of(
            place.namespace,
            place.key,
            {**value, "edits": edits, _NUMBER: _number(head) + 1},
            provenance=place.origin.provenance,
            if_version=(head.version if head else 0) if place.adapter.versioned else None,
        )
        sections = [removal_of(each.namespace, each.key, each.version) for each in state.items[1:]]
        # it does not expire, whatever the store's default
        return [replace(put, ttl=None), *sections], profile


def written(adapter: StoreAdapter, puts: Sequence[PutItem]) -> Effects[None]:
    """Write changes of profiles, all or none.

    Raises:
        VersionConflict: Another change was written since they were planned. In a store without
            versions only changes within this process are noticed.
    """
    if adapter.versioned:
        return (yield from adapter.written(puts))

    def comparing() -> Effects[None]:
        for put in puts:
            head = yield from adapter.got(put.namespace, put.key)
            if put.value is not None and put.value[_NUMBER] != _number(head) + 1:
                raise VersionConflict(f"the profile {put.key!r} was changed meanwhile")
        yield from adapter.written(puts)

    def locked() -> None:
        with _WRITING:
            run(comparing())

    yield Effect(locked, lambda: arun(comparing()))


def forgetting(place: ProfilePlace) -> Effects[Receipt | None]:
    """Erase a profile with its past; in a store without one, delete it.

    Raises:
        ConfigurationError: The item is no profile.
    """
    adapter, store, key = place.adapter, place.adapter.store, place.key
    heads = yield from adapter.versions(place.namespace, key)
    split = [head for head in heads if _is_split(head)]
    if not adapter.versioned:
        for head in heads:
            items = yield from _items(place, head, None)
            yield from adapter.written([removal_of(each.namespace, each.key) for each in items])
        return None
    inner = (*place.namespace, key)
    within: Receipt | None = None
    if split:  # before the head, which tells of them
        within = yield Effect(lambda: store.forget(inner), lambda: store.aforget(inner))
    receipt: Receipt = yield Effect(
        lambda: store.forget(place.namespace, key=key),
        lambda: store.aforget(place.namespace, key=key),
    )
    return receipt if within is None else within + receipt


def _is_split(head: Memory) -> bool:
    """Whether an item is the head of a profile in sections, which names them."""
    split = _SECTIONS in head.value
    if head.kind != KIND or not (split or _DOCUMENT in head.value):
        raise ConfigurationError(
            f"the item {head.key!r} in {head.namespace!r} is no profile: it has {list(head.value)};"
            " name another key or namespace for the profile"
        )
    return split


def _items(
    place: ProfilePlace, head: Memory, as_of: datetime | None
) -> Effects[tuple[Memory, ...]]:
    """The item of a profile, and the sections that it names."""
    if not _is_split(head):
        return (head,)
    inner, moment = (*place.namespace, place.key), as_of if place.adapter.versioned else None
    found = yield from place.adapter.every(inner, as_of=moment)
    sections = {each.key: each for each in found if each.namespace == inner}
    return (head, *(sections[name] for name in head.value[_SECTIONS] if name in sections))


def _document(items: Sequence[Memory]) -> Document:
    head, *sections = items
    stored = head.value.get(_DOCUMENT) or {each.key: each.value[_DOCUMENT] for each in sections}
    return deepcopy(stored)  # some stores give what they keep


def _number(head: Memory | None) -> int:
    return 0 if head is None else int(head.value.get(_NUMBER, 0))
