"""A model of what a store should contain: plain lists of versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TICK = 1_000_000  # microseconds per second


@dataclass
class Version:
    """One version of an item in the model. Times are in microseconds."""

    number: int
    value: dict[str, Any]
    created: int
    since: int
    until: int | None = None
    ttl: int | None = None
    expires: int | None = None
    actor: str | None = None
    index: bool = True

    def is_alive(self, now: int) -> bool:
        return self.until is None and (self.expires is None or self.expires > now)

    def is_valid_at(self, when: int) -> bool:
        """Return whether a read as of `when` returns this version."""
        end = self.expires if self.until is None else self.until
        return self.since <= when and (end is None or end > when)

    def describe(self) -> Any:
        return self.number, self.value, self.created, self.since, self.actor


@dataclass
class Key:
    """The versions of one key, oldest first."""

    versions: list[Version] = field(default_factory=list)

    @property
    def present(self) -> Version | None:
        last = self.versions[-1] if self.versions else None
        return last if last is not None and last.until is None else None

    def put(self, version: Version | None, now: int) -> None:
        """Close the present version, and append `version` unless it is None."""
        present, created, since, number = self.present, now, now, 0
        if present is not None:
            alive, number = present.is_alive(now), present.number
            since = max(now, present.since + 1)
            assert alive or present.expires is not None
            present.until = since if alive else max(present.expires or 0, present.since + 1)
            since = max(since, present.until)
            created = present.created if alive else since
        elif self.versions:
            number = self.versions[-1].number
            created = since = max(now, self.versions[-1].until or 0)
        if version is not None:
            version.number, version.created, version.since = number + 1, created, since
            version.expires = None if version.ttl is None else since + version.ttl
            self.versions.append(version)
