"""The past of a profile: its versions, put together again from those of its sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from perdure.memory.effects import Effect, Effects
from perdure.memory.profile.documents import Document, Edit
from perdure.memory.profile.items import SECTIONS, ProfilePlace, held, in_sections, kept
from perdure.memory.records import Memory
from perdure.memory.store_adapter import removal_of
from perdure.stores.base import Provenance, Receipt


@dataclass(frozen=True, slots=True)
class ProfileVersion:
    """What a profile was, or is.

    Attributes:
        document: The profile.
        version: Counts from 1; None: the store keeps no versions.
        change: What made it: `"patch"`, `"merge"` or `"set"`.
        edits: What that did, with reasons where they were given.
        valid_from: Since when (UTC).
        valid_to: Until when; None: it is the present one.
        provenance: The thread and checkpoint of the run that made it, if that is known, and on
            whose words.
    """

    document: Document = field(repr=False)
    version: int | None
    change: str
    edits: tuple[Edit, ...]
    valid_from: datetime | None
    valid_to: datetime | None
    provenance: Provenance | None


def versions(place: ProfilePlace) -> Effects[list[ProfileVersion]]:
    """All versions of a profile, oldest first."""
    heads = yield from place.adapter.versions(place.namespace, place.key)
    parts: dict[str, list[Memory]] = {}
    for name in _sections(heads):
        parts[name] = yield from place.adapter.versions(place.inner, name)
    return [_version(head, parts) for head in heads]


def forgetting(place: ProfilePlace) -> Effects[Receipt | None]:
    """Erase a profile with its past; of a store without one, delete it."""
    store = place.adapter.store
    if not place.adapter.versioned:
        found = yield from kept(place)
        items = [*found.parts.values(), *([found.head] if found.head else ())]
        yield from place.adapter.written([removal_of(each.namespace, each.key) for each in items])
        return None
    heads = yield from place.adapter.versions(place.namespace, place.key)
    within: Receipt | None = None
    if _sections(heads):  # before the head, without which nobody would know of them
        within = yield Effect(lambda: store.forget(place.inner), lambda: store.aforget(place.inner))
    receipt: Receipt = yield Effect(
        lambda: store.forget(place.namespace, key=place.key),
        lambda: store.aforget(place.namespace, key=place.key),
    )
    return receipt if within is None else within + receipt


def _sections(heads: Sequence[Memory]) -> list[str]:
    """The names of all sections that there ever were."""
    split = [head for head in heads if in_sections(head)]
    return list(dict.fromkeys(name for head in split for name in head.value[SECTIONS]))


def _version(head: Memory, parts: Mapping[str, Sequence[Memory]]) -> ProfileVersion:
    if in_sections(head):
        found = ((name, _at(parts[name], head.valid_from)) for name in head.value[SECTIONS])
        document: Any = {name: held(part) for name, part in found if part is not None}
    else:
        document = held(head)
    return ProfileVersion(
        document,
        head.version,
        str(head.value.get("change", "")),
        tuple(Edit(**each) for each in head.value.get("edits", ())),
        head.valid_from,
        head.valid_to,
        head.provenance,
    )


def _at(items: Sequence[Memory], moment: datetime | None) -> Memory | None:
    """The version that was valid at a moment; of a store without a past, the one there is."""
    for item in items:
        if moment is None or item.version is None or item.valid_from is None:
            return item
        if item.valid_from <= moment and (item.valid_to is None or moment < item.valid_to):
            return item
    return None
