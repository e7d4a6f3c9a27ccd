"""Profiles: a document about a user, under a schema, changed field by field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final, Generic

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore
from pydantic import RootModel, ValidationError

from perdure.errors import ConfigurationError, InvalidPatch, VersionConflict
from perdure.memory import profile_patch
from perdure.memory.detectors import emails, phones, spans_of
from perdure.memory.effects import Effects, awaiting, blocking
from perdure.memory.gate import Gate
from perdure.memory.options import instance
from perdure.memory.profile_patch import Document, Leaf, M, dumped, leaves_of, plain, validated
from perdure.memory.records import Candidate, Memory, Verdict
from perdure.memory.run_config import source
from perdure.memory.store_adapter import Place, StoreAdapter, adapter_of, namespace_of, removal_of
from perdure.memory.templates import Template
from perdure.stores.base import Provenance, PutItem, Receipt

Change = Callable[[Document], Document]
_KIND: Final = "profile"
_DOCUMENT: Final = "document"


@dataclass(frozen=True, slots=True)
class ProfileState(Generic[M]):
    """A profile as it is stored."""

    owner: Profile[M]
    name: str  # the key of its item
    item: Memory | None
    document: Document  # the stored one, else the defaults
    profile: M | None  # None: the schema does not accept it
    fault: str = ""  # why not


@dataclass(frozen=True, slots=True)
class ProfileVersion:
    """A version of a profile, and the change (patch, set) that made it."""

    document: Document = field(repr=False)
    version: int | None  # None: the store keeps no versions
    change: str
    valid_from: datetime | None
    valid_to: datetime | None  # None: it is the present one
    provenance: Provenance | None


class Profile(Generic[M]):
    """A profile in a store, of each user if the namespace says so.

    The schema and the gate check each change; one that they refuse, or that cannot be applied, is
    an `InvalidPatch`, and nothing is written. Of two changes at the same time both hold, except in
    a store without versions.

    Args:
        store: None: within a graph, the graph's store.
        namespace: Labels; see `Template`.
        key: The item's key, a template as well.
        gate: Judges each value that a change sets; None: `Gate()`. E-mail addresses and telephone
            numbers are kept if they are written by hand or in a user's message.
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
        except Exception as exc:  # it is no model, or has a field that JSON cannot express
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
        if state.profile is None:
            raise ConfigurationError(
                f"the profile {place.key!r} in {place.namespace!r} is not there yet, or does "
                f"not fit the schema: {state.fault}; history() shows what is stored, patch() or "
                "set() repairs it"
            )
        return state.profile

    def _history(self, config: RunnableConfig | None = None) -> Effects[list[ProfileVersion]]:
        """All versions, oldest first."""
        place = self.place(config)
        versions = []
        for head in (yield from place.adapter.versions(place.namespace, place.key)):
            change, times = str(head.value.get("change", "")), (head.valid_from, head.valid_to)
            made = head.version, change, *times, head.provenance
            versions.append(ProfileVersion(_document(head), *made))
        return versions

    def _patch(self, operations: Any, config: RunnableConfig | None = None) -> Effects[M]:
        """Apply a JSON Patch (RFC 6902), and return the profile."""
        change = partial(profile_patch.patched, operations=profile_patch.operations_of(operations))
        return self._change("patch", change, config)

    def _set(
        self, document: M | Mapping[str, Any], config: RunnableConfig | None = None
    ) -> Effects[M]:
        """Write a whole profile, or its document, and return it."""
        given = dumped(document) if isinstance(document, self.schema) else document
        if not isinstance(given, Mapping):
            raise InvalidPatch(
                f"the document is {document!r:.80}, a {type(document).__name__}; expected a "
                f"{self.schema.__name__} or a dict of its fields"
            )
        whole: Document = plain(dict(given), "the document")
        return self._change("set", lambda _: whole, config)

    def _forget(self, config: RunnableConfig | None = None) -> Effects[Receipt | None]:
        """Erase the profile with its past; None: the store keeps no past, and deleted the item."""
        place = self.place(config)
        for head in (yield from place.adapter.versions(place.namespace, place.key)):
            _document(head)  # another item is not erased
        if place.adapter.versioned:
            receipt: Receipt = yield place.adapter.call("forget", place.namespace, key=place.key)
            return receipt
        yield from place.adapter.written([removal_of(place.namespace, place.key)])
        return None

    get, aget = blocking(_get), awaiting(_get)
    history, ahistory = blocking(_history), awaiting(_history)
    patch, apatch = blocking(_patch), awaiting(_patch)
    set, aset = blocking(_set), awaiting(_set)
    forget, aforget = blocking(_forget), awaiting(_forget)

    def place(self, config: RunnableConfig | None = None) -> Place:
        """The place of the profile of a run; a change there is a user's, by hand."""
        namespace, [key] = namespace_of(self.namespace, config), self.key.filled(config)
        user = Provenance(*source(config), actor="user", trust="user")
        return Place(self.adapter or adapter_of(None), namespace, key, user)

    def reading(self, place: Place, as_of: datetime | None = None) -> Effects[ProfileState[M]]:
        """Read the profile; what is stored may not fit the schema."""
        head = yield from place.adapter.got(place.namespace, place.key, as_of)
        document = _document(head) if head else dumped(self.schema.model_construct())
        try:
            profile = validated(self.schema, document) if head else self.schema()
        except (InvalidPatch, ValidationError) as exc:
            fault = str(exc) if head else f"{self.schema.__name__} has fields that must be given"
            return ProfileState(self, place.key, head, document, None, fault)
        return ProfileState(self, place.key, head, dumped(profile), profile)

    def planning(
        self, place: Place, operations: Sequence[Document], seen: Document
    ) -> Effects[list[PutItem]]:
        """The puts of a model's patch; VersionConflict if a field of it changed since `seen`."""
        wanted = profile_patch.operations_of(operations)
        state = yield from self.reading(place)
        if not profile_patch.is_as_seen(wanted, seen, state.document):
            raise VersionConflict(
                f"the profile {place.key!r} was changed where this patch changes it; make it anew"
            )
        apply = partial(profile_patch.patched, operations=wanted, by_model=True)
        return (yield from self._planned(place, state, "patch", apply))[0]

    def _change(self, name: str, change: Change, config: RunnableConfig | None) -> Effects[M]:
        place = self.place(config)
        while True:  # a try fails only if another change succeeded
            state = yield from self.reading(place)
            puts, profile = yield from self._planned(place, state, name, change)
            with suppress(VersionConflict):
                yield from place.adapter.written(puts)
                return profile

    def _planned(
        self, place: Place, state: ProfileState[M], name: str, change: Change
    ) -> Effects[tuple[list[PutItem], M]]:
        try:
            new = change(state.document)
        except InvalidPatch as exc:  # it quotes names that the gate has not seen
            raise InvalidPatch(self.gate.sensitive.redacted(str(exc))) from None
        # values that are there already are not judged again, also if they moved within a list
        known = {(leaf.label, repr(leaf.value)) for leaf in leaves_of(state.document)}
        leaves = [each for each in leaves_of(new) if (each.label, repr(each.value)) not in known]
        values = yield from _screened(self.gate, leaves, place)
        profile = validated(self.schema, profile_patch.replaced(new, leaves, values))
        document: Document = plain(dumped(profile), "the profile")
        if profile_patch.same(document, state.document) and (state.item or name != "set"):
            return [], profile
        value = {"text": profile_patch.text_of(document), "kind": _KIND, _DOCUMENT: document}
        version = (state.item and state.item.version) or 0
        put = PutItem(
            place.namespace,
            place.key,
            {**value, "change": name},
            ["text"],
            ttl=None,  # it does not expire, whatever the store's default
            if_version=version if place.adapter.versioned else None,
            provenance=place.provenance,
        )
        return [put], profile


def _document(item: Memory) -> Document:
    if item.kind != _KIND or _DOCUMENT not in item.value:
        raise ConfigurationError(
            f"the item {item.key!r} in {item.namespace!r} is no profile: it has {list(item.value)};"
            " name another key or namespace for the profile"
        )
    # langgraph's in-memory store returns the stored object itself
    return deepcopy(item.value[_DOCUMENT])


def _screened(gate: Gate, leaves: Sequence[Leaf], place: Place) -> Effects[list[Any]]:
    candidates = [_candidate(each, place) for each in leaves]
    verdicts = [gate.sensitive.judged(each) for each in candidates]
    asked = [i for i, leaf in enumerate(leaves) if leaf.text]
    answers = yield from gate.examine([candidates[i] for i in asked], [verdicts[i] for i in asked])
    for i, answer in zip(asked, answers, strict=True):
        verdicts[i] = answer
    return [_kept(*each, gate) for each in zip(leaves, verdicts, strict=True)]


def _kept(leaf: Leaf, verdict: Verdict, gate: Gate) -> Any:
    if verdict.action == "keep":
        if verdict.text is None:
            return leaf.value
        if isinstance(leaf.value, str) and verdict.text.startswith(leaf.label):
            return verdict.text.removeprefix(leaf.label)
    path = ""
    if verdict.check != "detectors":  # one that raised would do so again
        redacted = gate.sensitive.redacted
        names = [redacted(str(part)) for part in leaf.path]  # a name may be the secret
        label = f"{' '.join(names).replace('_', ' ')}: "  # or be one by the name before it
        path = "".join(f"/{name}" for name in names) if redacted(label) == label else ""
    raise InvalidPatch(
        f"{path or 'the change'!r:.200} cannot be kept: {verdict.reason}; leave it out "
        f"(the gate's {verdict.check})"
    )


def _candidate(leaf: Leaf, place: Place) -> Candidate:
    # an address or number is kept if it is written by hand, or in a user's message
    text, explicit = leaf.label + leaf.text, place.told is None
    if place.told is not None:
        messages = [_letters(each) for each in place.told]
        contacts = (_letters(text[a:b]) for _, a, b in spans_of(text, (emails, phones)))
        explicit = all(any(each in one for one in messages) for each in contacts)
    return Candidate(text, _KIND, {}, place.provenance, "user", explicit)


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))
