"""From what a caller wants to put, to what is written: checked, encoded, analysed, embedded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from perdure.errors import ConfigurationError, EmbeddingFailed
from perdure.stores.base import Namespace, Provenance
from perdure.stores.chunking import chunks
from perdure.stores.models import Model
from perdure.stores.namespaces import check_key, check_namespace
from perdure.stores.records import provenance_fields
from perdure.stores.steps import EmbedAll, Steps
from perdure.stores.text import ANALYZER, asks, tokens
from perdure.stores.values import decode, encode, texts
from perdure.stores.vectors import stored
from perdure.stores.writing import Limit, Put

Index = Literal[False] | list[str] | None
_BRIEF = 20_000  # characters and parts: 0.2 ms
_NESTED = 100  # what a list or dict counts, which also bounds how deep one looks
_MINUTE = 60_000_000  # microseconds
_LONGEST = 1 << 56  # microseconds: 2,283 years, so that what expires then is still a date


@dataclass(slots=True, eq=False)
class Request:
    """A put or, with a value of None, a delete, as a caller gives it."""

    namespace: Namespace
    key: str
    value: Mapping[str, Any] | None
    index: Index = None
    ttl: float | None = None
    if_version: int | None = None
    provenance: Provenance | None = None
    limits: tuple[Limit, ...] = ()


@dataclass(slots=True)
class Preparer:
    """Checks requests and computes what they need.

    Args:
        fields: Paths whose text is searched, unless a put names others.
        max_bytes: Of a value's JSON.
        model: What embeds; None: nothing does.
        masked: Turns tokens into keyed hashes, if the index is to hold those.
        root: The path that namespaces are under.
    """

    fields: Sequence[str]
    max_bytes: int
    model: Model | None
    masked: Callable[[str], str] | None = None
    root: bytes = b""

    def put(self, request: Request) -> tuple[Put, list[str]]:
        """What to write, and the pieces of text whose vectors are lacking.

        Raises:
            InvalidNamespace: The namespace or key cannot be stored.
            InvalidValue: The value is no JSON object.
            ConfigurationError: The time to live, version or index is none.
        """
        path, key = check_namespace(request.namespace, self.root), check_key(request.key)
        if_version = _checked_version(request.if_version)
        if request.value is None:
            return Put(path, key, None, if_version=if_version, limits=request.limits), []
        searched = request.index is not False and request.index != []
        put = Put(
            path,
            key,
            encode(request.value, self.max_bytes),
            ttl=_checked_ttl(request.ttl),
            if_version=if_version,
            provenance=provenance_fields(request.provenance) if request.provenance else None,
            searched=searched,
            fields=_checked_fields(request.index) or None,
            limits=request.limits,
        )
        if self.model is None or not searched:
            return put, []
        return put, self.pieces(texts(decode(put.text or ""), put.fields or self.fields))

    def analysed(self, value: Mapping[str, Any], fields: str | None) -> tuple[list[str], bool]:
        """The words of a value, none if it has no text, and whether it ends as a question does."""
        found = texts(value, self.fields_of(fields))
        if not found:
            return [], False
        words = tokens("\n".join(found))
        if self.masked is not None:
            words = [self.masked(word) for word in words]
        return words, asks(found[-1])

    def made(self) -> list[Any]:
        """How words are made: those that are made in another way cannot be compared."""
        return [ANALYZER, list(self.fields), self.masked is not None]

    def fields_of(self, packed: str | None) -> Sequence[str]:
        """The paths that an item is searched by."""
        return self.fields if packed is None else json.loads(packed)

    def pieces(self, found: Sequence[str]) -> list[str]:
        """The pieces of texts that are embedded, each by itself."""
        return [] if self.model is None else [piece for text in found for piece in chunks(text)]

    def embedded(self, puts: Sequence[tuple[Put, list[str]]]) -> Steps[tuple[list[Put], Any]]:
        """The puts with their vectors, and the model of these.

        If the embedder fails, the puts are marked as lacking them.
        """
        every = [piece for _, pieces in puts for piece in pieces]
        plain = [put for put, _ in puts]
        if not every or self.model is None:
            return plain, None
        try:
            vectors = yield EmbedAll(every)
        except EmbeddingFailed as exc:
            return [replace(put, lacking=str(exc)) if pieces else put for put, pieces in puts], None
        model = self.model.of(vectors.shape[1])
        ends = np.cumsum([len(pieces) for _, pieces in puts])
        out = [
            replace(put, vectors=stored(vectors[end - len(pieces) : end], model.kind))
            if pieces
            else put
            for (put, pieces), end in zip(puts, ends, strict=True)
        ]
        return out, model


def is_brief(value: Any) -> bool:
    """Whether a value is so small that checking and encoding it holds no event loop up."""
    return isinstance(value, Mapping) and _budget_left(value, _BRIEF) >= 0


def _budget_left(value: Any, budget: int) -> int:
    """What is left of a number of characters and parts; negative: the value is larger."""
    if isinstance(value, str):
        return budget - len(value)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return budget - 1
    budget -= _NESTED
    for part in value:
        if budget < 0:
            break
        budget = _budget_left(part, budget)
    return budget


def _checked_ttl(minutes: float | None) -> int | None:
    if minutes is None:
        return None
    if isinstance(minutes, bool) or not isinstance(minutes, int | float):
        raise ConfigurationError(f"ttl is {minutes!r}; expected minutes as a number, or None")
    if not 0 < minutes < math.inf:
        raise ConfigurationError(f"ttl is {minutes!r} minutes; expected more than zero, or None")
    return int(max(1, min(minutes * _MINUTE, _LONGEST)))


def _checked_version(version: int | None) -> int | None:
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise ConfigurationError(
            f"if_version is {version!r}; expected a whole number (0: not there)"
        )
    if version is not None and version < 0:
        raise ConfigurationError(f"if_version is {version}; expected 0 (not there) or more")
    return version


def _checked_fields(index: Index) -> list[str]:
    if index is None or index is False:
        return []
    listed = isinstance(index, list | tuple)
    if not listed or not all(isinstance(path, str) and path for path in index):
        raise ConfigurationError(
            f"index is {index!r}; expected False, None or a list of paths like ['text', 'tags[*]']"
        )
    return list(index)
