"""Rows of items and the way back: times, provenance, and what each sealed part is bound to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.errors import ConfigurationError, CorruptRecord
from perdure.storage.encryption import Clear, Place, Seal
from perdure.storage.flow import Row
from perdure.stores.base import PROVENANCE, Provenance, StoredItem
from perdure.stores.namespaces import labels
from perdure.stores.values import decode

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def micros(when: datetime) -> int:
    """A moment in microseconds since 1970."""
    if not isinstance(when, datetime) or when.tzinfo is None:
        raise ConfigurationError(
            f"the time is {when!r}; expected a datetime with a time zone, like datetime.now(UTC)"
        )
    return (when - _EPOCH) // _MICROSECOND


def moment(at: int) -> datetime:
    """The moment that many microseconds after 1970 (UTC)."""
    return _EPOCH + timedelta(microseconds=at)


def provenance_fields(provenance: Provenance) -> dict[str, Any]:
    """Provenance as JSON, without what was not said: what is stored, and what filters see."""
    if not isinstance(provenance, Provenance):
        raise ConfigurationError(
            f"provenance is {provenance!r}; expected Provenance(thread_id=…, actor=…)"
        )
    found = {name: getattr(provenance, name) for name in PROVENANCE}
    messages, position, at = provenance.message_ids, provenance.position, provenance.at
    if not isinstance(messages, tuple | list):
        raise ConfigurationError(f"provenance message_ids is {messages!r}; expected a tuple")
    if position is not None and (type(position) is not int or abs(position) > 1 << 62):
        raise ConfigurationError(f"provenance position is {position!r}; expected a whole number")
    for name in ("thread_id", "checkpoint_id", "actor", "trust", "message_ids"):
        for text in messages if name == "message_ids" else (found[name],):
            if text is not None and (not isinstance(text, str) or _SURROGATE.search(text)):
                raise ConfigurationError(f"provenance {name} has {text!r}; expected Unicode text")
    found["message_ids"] = list(messages) or None
    if at is not None:
        found["at"] = moment(micros(at)).isoformat()
    return {name: value for name, value in found.items() if value is not None}


def provenance_of(fields: Mapping[str, Any]) -> Provenance:
    """Provenance from its JSON."""
    found = {name: fields[name] for name in PROVENANCE if name in fields}
    if "at" in found:
        found["at"] = datetime.fromisoformat(found["at"])
    found["message_ids"] = tuple(found.get("message_ids", ()))
    return Provenance(**found)


@dataclass(slots=True)
class Records:
    """Seals what goes into rows, and makes items of them."""

    seal: Seal
    root: int = 0  # bytes of a path that are not shown

    @property
    def sealed(self) -> bool:
        """Whether rows are encrypted."""
        return not isinstance(self.seal, Clear)

    # -- parts of a row

    def shut(self, text: str, place: Place) -> str | bytes:
        """Text as it is stored."""
        return self.seal.seal(text.encode(), place) if self.sealed else text

    def text(self, stored: str | bytes, place: Place) -> str:
        """Text from how it is stored, unless it was damaged, or moved from another row."""
        if isinstance(stored, bytes) and self.sealed:
            return self.seal.open(stored, place).decode()
        if isinstance(stored, str) and not self.sealed:
            return stored
        raise CorruptRecord(f"the row {place!r} holds a {type(stored).__name__}: it was damaged")

    def shut_vectors(self, vectors: bytes | None, row: int) -> bytes | None:
        """Vectors, one after another, as they are stored."""
        if vectors is None or not self.sealed:
            return vectors
        return self.seal.seal(vectors, ("vectors", row))

    def vectors(self, stored: bytes, row: int) -> bytes:
        """Vectors as bytes, from how they are stored."""
        return self.seal.open(stored, ("vectors", row)) if self.sealed else stored

    # -- whole rows

    def text_of(self, row: Row) -> str:
        """The JSON in a row of an item."""
        return self.text(row[8], value_place(row[1], row[2], row[3]))

    def value(self, row: Row) -> dict[str, Any]:
        """The value in a row of an item."""
        try:
            return decode(self.text_of(row))
        except ValueError as exc:
            raise CorruptRecord(
                f"the item {row[2]!r} of {labels(row[1])!r} cannot be read back ({exc}): "
                "its row is damaged"
            ) from exc

    def provenance(self, stored: Any, path: bytes, key: str, version: int) -> dict[str, Any]:
        """The provenance fields in a row; empty if there are none."""
        if stored is None:
            return {}
        return decode(self.text(stored, provenance_place(path, key, version)))

    def item(self, row: Row, value: dict[str, Any] | None = None) -> StoredItem:
        """The item in a row."""
        _, path, key, version, created, valid_from, valid_to, expires, _, provenance = row[:10]
        fields = self.provenance(provenance, path, key, version)
        return StoredItem(
            value=self.value(row) if value is None else value,
            key=key,
            namespace=labels(path[self.root :]),
            created_at=moment(created),
            valid_from=moment(valid_from),
            version=version,
            valid_to=None if valid_to is None else moment(valid_to),
            expires_at=None if expires is None else moment(expires),
            provenance=provenance_of(fields) if fields else None,
        )


def value_place(path: bytes, key: str, version: int) -> Place:
    """The data that binds a value to its row."""
    return ("value", path.decode(), key, version)


def provenance_place(path: bytes, key: str, version: int) -> Place:
    """The data that binds provenance to its row."""
    return ("provenance", path.decode(), key, version)


def pack_fields(fields: list[str] | None) -> str | None:
    """The paths whose text an item is searched by, when they are not the store's."""
    return None if fields is None else json.dumps(fields)
