"""A profile as items of a store: one that holds all of it, or a head and an item a section.

The head of a profile in sections holds their names and what changed last. It is written with every
change, under the condition that nobody else has written meanwhile, so changes of different sections
are in one order, and what they become together is what the schema has accepted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from perdure.errors import (
    ConfigurationError,
    InvalidNamespace,
    InvalidPatch,
    VersionConflict,
)
from perdure.memory.effects import Effect, Effects, arun, run
from perdure.memory.profile.documents import Document, Edit, same
from perdure.memory.profile.users_words import UsersWords
from perdure.memory.records import Memory
from perdure.memory.store_adapter import StoreAdapter, put_of, removal_of
from perdure.stores.base import Namespace, Provenance, PutItem
from perdure.stores.namespaces import check_key

KIND: Final = "profile"
DOCUMENT: Final = "document"
SECTIONS: Final = "sections"
NUMBER: Final = "number"
"""The field of a head that counts changes, for stores without versions."""

_PAGE: Final = 1_000
_WRITING: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class ProfilePlace:
    """Where the profile of a run is, and who is writing.

    Attributes:
        adapter: Of the store.
        namespace: Of the profile, filled in.
        key: Of its item, filled in; its sections are in `(*namespace, key)`.
        provenance: What a change is noted with.
        users: What users said, where a model makes the change of it; None: it is made by hand.
    """

    adapter: StoreAdapter
    namespace: Namespace
    key: str
    provenance: Provenance | None = None
    users: UsersWords | None = None

    @property
    def inner(self) -> Namespace:
        """The namespace of the sections."""
        return (*self.namespace, self.key)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a store holds of a profile.

    Attributes:
        head: The item of the profile; None: there is none.
        parts: The items of its sections, by name.
        document: All of it; None: nothing is kept.
    """

    head: Memory | None
    parts: Mapping[str, Memory]
    document: Document | None


def kept(place: ProfilePlace, as_of: datetime | None = None) -> Effects[Kept]:
    """Read a profile.

    Raises:
        ConfigurationError: The item is something else, or the store has no past.
    """
    # the head first: if another run writes before the sections are read, its version tells
    head = yield from place.adapter.got(place.namespace, place.key, as_of)
    if head is None:
        return Kept(None, {}, None)
    if not in_sections(head):
        return Kept(head, {}, held(head))
    parts = yield from _parts(place, as_of)
    # one that the head does not name is of a profile that was deleted without its sections
    document = {name: held(parts[name]) for name in head.value[SECTIONS] if name in parts}
    return Kept(head, parts, document)


def in_sections(head: Memory) -> bool:
    """Whether a profile is in sections.

    Raises:
        ConfigurationError: It is no profile.
    """
    split = SECTIONS in head.value
    _check(head, SECTIONS if split else DOCUMENT)
    return split


def held(item: Memory) -> Any:
    """What an item holds of a profile.

    Raises:
        ConfigurationError: It is something else.
    """
    _check(item, DOCUMENT)
    return deepcopy(item.value[DOCUMENT])  # some stores give what they keep


def _check(item: Memory, needed: str) -> None:
    if item.kind != KIND or needed not in item.value:
        raise ConfigurationError(
            f"the item {item.key!r} in {item.namespace!r} is no profile: it has {list(item.value)};"
            " name another key or namespace for the profile"
        )


def _parts(place: ProfilePlace, as_of: datetime | None) -> Effects[dict[str, Memory]]:
    parts: dict[str, Memory] = {}
    offset = 0
    while True:
        page = yield from place.adapter.found(place.inner, limit=_PAGE, offset=offset, as_of=as_of)
        parts |= {item.key: item for item in page if item.namespace == place.inner}
        offset += _PAGE
        if len(page) < _PAGE:
            return parts


def puts_of(
    place: ProfilePlace,
    former: Kept,
    document: Document,
    *,
    change: str,
    edits: Sequence[Edit],
    sections: bool,
) -> list[PutItem]:
    """The operations that put a document in the place of what is kept, all of them or none.

    Raises:
        InvalidPatch: A section has a name that cannot be a key.
    """
    note = {
        "change": change,
        "edits": [edit.noted() for edit in edits],
        NUMBER: _number(former.head) + 1,
    }
    version = former.head.version if former.head else 0 if place.adapter.versioned else None
    if not sections:
        value = {"text": text_of(document), "kind": KIND, DOCUMENT: document, **note}
        removed = [_removal(place, part) for part in former.parts.values()]
        return [_put(place, place.namespace, place.key, value, version), *removed]
    head = {"text": f"sections: {', '.join(document)}", "kind": KIND, SECTIONS: list(document)}
    return [
        _put(place, place.namespace, place.key, {**head, **note}, version, searched=False),
        *_section_puts(place, former.parts, document),
    ]


def written(place: ProfilePlace, former: Kept, puts: Sequence[PutItem]) -> Effects[None]:
    """Write a change of what was kept.

    Raises:
        VersionConflict: Something else is kept by now. Of a store without versions, that is sure
            to be noticed if it was written by a thread of this process, or a task of its loop that
            the store does not keep waiting; then nothing else is there to tell.
    """
    if place.adapter.versioned or not puts:
        return (yield from place.adapter.written(puts))

    def comparing() -> Effects[None]:
        head = yield from place.adapter.got(place.namespace, place.key)
        if _number(head) != _number(former.head):
            raise VersionConflict(
                f"the profile {place.key!r} in {place.namespace!r} was changed meanwhile: apply "
                "your change to what it is now"
            )
        yield from place.adapter.written(puts)

    def blocking() -> None:
        with _WRITING:
            run(comparing())

    yield Effect(blocking, lambda: arun(comparing()))


def _number(head: Memory | None) -> int:
    return 0 if head is None else int(head.value.get(NUMBER, 0))


def _section_puts(
    place: ProfilePlace, former: Mapping[str, Memory], document: Document
) -> Iterator[PutItem]:
    for name, value in document.items():
        try:
            check_key(name)
        except InvalidNamespace as exc:
            raise InvalidPatch(f"the field {name!r:.80} cannot be a section: {exc}") from exc
        part = former.get(name)
        if part is None or not same(held(part), value):
            told = {"text": text_of({name: value}), "kind": KIND, DOCUMENT: value}
            # what the head does not name may be there: the head's version is enough
            yield _put(place, place.inner, name, told, part.version if part else None)
    for name, part in former.items():
        if name not in document:
            yield _removal(place, part)


def _put(
    place: ProfilePlace,
    namespace: Namespace,
    key: str,
    value: Document,
    if_version: int | None,
    *,
    searched: bool = True,
) -> PutItem:
    put = put_of(
        namespace,
        key,
        value,
        provenance=place.provenance,
        if_version=if_version,
        searched=searched,
    )
    return replace(put, ttl=None)  # it does not expire, whatever the store's default


def _removal(place: ProfilePlace, part: Memory) -> PutItem:
    return removal_of(part.namespace, part.key, part.version)


def text_of(document: Any) -> str:
    r"""A document in words, a line a field, to be searched.

    >>> text_of({"home": {"city": "Ghent", "zip": None}, "likes": ["tea", "figs"]})
    'home city: Ghent\nlikes: tea, figs'
    """
    return "\n".join(_lines(document, ""))


def _lines(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _lines(part, f"{name} {key}".strip().replace("_", " "))
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        for part in value:
            yield from _lines(part, name)
    else:
        told = ", ".join(map(_word, value)) if isinstance(value, list) else _word(value)
        if told:
            yield f"{name}: {told}"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
