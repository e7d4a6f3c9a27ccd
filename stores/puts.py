"""Puts and deletes before they are written: checked, encoded, and read for search."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from perdure.errors import ConfigurationError
from perdure.stores.base import Provenance
from perdure.stores.embedders import StoreEmbedder
from perdure.stores.namespaces import check_key, check_namespace
from perdure.stores.reading import provenance_fields
from perdure.stores.text import ANALYZER, asks, tokens
from perdure.stores.values import check_number, decode, encode, texts
from perdure.stores.vectors import Model

Index = Literal[False] | list[str] | None
_FEW = 16  # values that are checked in the event loop
_BRIEF = 20_000  # characters and parts: 0.2 ms
_NESTED = 100  # what a list or dict counts, beside one for each part
_NESTING = (dict, list, tuple)
_MINUTE = 60_000_000  # microseconds
_LEAST = 5e-324  # the number after zero
_LONGEST = 1 << 56  # microseconds: 2,283 years, so that what expires then is still a date


@dataclass(frozen=True, slots=True)
class Limit:
    """The limits of a prefix."""

    prefix: bytes
    items: int | None
    bytes: int | None


@dataclass(slots=True, eq=False)
class Put:
    """A checked put or delete, with everything computed that needs no database.

    A searched version has a row in `store_index` only for what a search could not find out without
    it: stored vectors, or paths of its own.
    """

    path: bytes  # of the namespace
    key: str
    text: str | None  # JSON; None: delete
    ttl: int | None = None  # microseconds it lives after the last put or read; None: for ever
    if_version: int | None = None  # the key must be at it (0: not there)
    provenance: Mapping[str, Any] | None = None
    searched: bool = True  # whether search finds it
    stored: bool = False  # whether its vectors are stored, if it has any text
    pieces: Sequence[str] = ()  # what its vectors are to be made of
    vectors: bytes | None = None  # one after another; None: none, or not yet
    missing: str | None = None  # why its vectors are still to be made
    fields: list[str] | None = None  # paths it is searched by, if not the store's
    limits: Sequence[Limit] = ()  # what must hold afterwards

    @property
    def unconditional(self) -> bool:
        """Whether only the database itself can refuse it."""
        return self.if_version is None and not self.limits

    @property
    def indexed(self) -> bool:
        """Whether it has a row in `store_index`."""
        return self.searched and (self.stored or self.fields is not None)


@dataclass(slots=True)
class Preparer:
    """Checks what is to be put, and computes what needs no database."""

    fields: list[str]  # paths whose text is searched, unless a put names others
    max_bytes: int
    embeddings: StoreEmbedder
    masked: Callable[[str], str] | None = None  # of tokens, if the index has keyed hashes
    root: bytes = b""  # the path that namespaces are under
    limits: tuple[Limit, ...] = ()  # what must hold after a put

    def place(self, namespace: Any, key: Any) -> tuple[bytes, str]:
        """The path and key at which an item may be put."""
        return check_namespace(namespace, self.root), check_key(key)

    def put(
        self,
        place: tuple[bytes, str],
        value: Mapping[str, Any] | None,
        index: Index = None,
        ttl: float | None = None,
        if_version: int | None = None,
        provenance: Provenance | None = None,
    ) -> Put:
        """A put or, with a value of None, a delete."""
        path, key = place
        if if_version is not None:
            expected = "a whole number, 0 (not there) or more"
            check_number("if_version", if_version, expected, whole=True)
        if value is None:
            return Put(path, key, None, if_version=if_version, limits=self.limits)
        put = Put(
            path,
            key,
            encode(value, self.max_bytes),
            ttl=None if ttl is None else _checked_ttl(ttl),
            if_version=if_version,
            provenance=provenance_fields(provenance) if provenance else None,
        )
        if index is not None:
            put.fields = _checked_fields(index) or None
            put.searched = put.fields is not None
        return self.ready(put)

    def ready(self, put: Put) -> Put:
        """A put whose value is encoded, with what its vectors are to be made of."""
        put.limits, put.stored = self.limits, self.embeddings.stores
        if put.searched and put.stored:
            put.pieces = self.embeddings.pieces(
                texts(decode(put.text or ""), put.fields or self.fields)
            )
        return put

    def analysed(self, value: Mapping[str, Any], fields: str | None) -> tuple[list[str], bool]:
        """The words of a value, none if it has no text, and whether it ends as a question does."""
        found = texts(value, self.fields_of(fields))
        if not found:
            return [], False
        words = tokens("\n".join(found))
        if self.masked is not None:
            words = [self.masked(word) for word in words]
        return words, asks(found[-1])

    def made(self, file: Model | None) -> list[Any]:
        """How words and vectors are made in a file of a model; others cannot be compared."""
        number = file.number if file is not None and self.embeddings.derives(file) else 0
        return [ANALYZER, list(self.fields), self.masked is not None, number]

    def fields_of(self, packed: str | None) -> Sequence[str]:
        """The paths that an item is searched by."""
        return self.fields if packed is None else json.loads(packed)

    def derived(
        self, rows: Sequence[tuple[Mapping[str, Any], str | None]], file: Model | None
    ) -> list[bytes | None]:
        """The vectors of values that have none stored, each with the paths it is searched by."""
        found = [texts(value, self.fields_of(fields)) for value, fields in rows]
        return self.embeddings.derive(found, file)


def are_brief(values: Sequence[Any]) -> bool:
    """Whether values are so few and small that checking them holds no event loop up."""
    budget = _BRIEF
    parts = [value for value in values if value is not None]  # of deletes
    if len(values) > _FEW or not all(isinstance(value, dict) for value in parts):
        return False
    while parts and budget >= 0:
        part = parts.pop()
        if isinstance(part, str):
            budget -= len(part)
        elif isinstance(part, _NESTING):
            budget -= _NESTED + len(part)
            if budget >= 0:
                parts += part.values() if isinstance(part, dict) else part
    return budget >= 0


def _checked_ttl(minutes: float) -> int:
    """A time to live in microseconds."""
    check_number("ttl", minutes, "minutes, more than zero, or None", least=_LEAST)
    return int(max(1, min(minutes * _MINUTE, _LONGEST)))


def _checked_fields(index: Literal[False] | list[str]) -> list[str]:
    if index is False:
        return []
    listed = isinstance(index, list | tuple)
    if not listed or not all(isinstance(path, str) and path for path in index):
        raise ConfigurationError(
            f"index is {index!r}; expected False, None or a list of paths like ['text', 'tags[*]']"
        )
    return list(index)
