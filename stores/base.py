"""The data of a store: provenance, items with their versions, reports."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, fields
from datetime import datetime
from typing import Any, Literal

from langgraph.store.base import NOT_PROVIDED, Item, NotProvided, SearchItem

Mode = Literal["hybrid", "text", "semantic"]
Namespace = tuple[str, ...]
Span = tuple[datetime, datetime]  # from a moment on, up to another; with time zones
TTL = float | None | NotProvided  # minutes; None: for ever
Progress = Callable[[int, int | None], None]  # how many are done, of how many if that is known


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where an item comes from. All fields are optional; filters may use them.

    Attributes:
        thread_id: The thread that it comes from.
        checkpoint_id: The checkpoint of that thread.
        message_ids: The messages that it rests on.
        actor: The speaker.
        trust: A class of your own, say `"user"`, `"tool"` or `"web"`.
        position: Its place in the order of the thread.
        at: When it was said; with a time zone.
    """

    thread_id: str | None = None
    checkpoint_id: str | None = None
    message_ids: tuple[str, ...] = ()
    actor: str | None = None
    trust: str | None = None
    position: int | None = None
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class PutItem:
    """An operation of a batch: langgraph's `PutOp` with all that `put` takes.

    A batch is written as one: all of its items are stored, or none.
    """

    namespace: Namespace
    key: str
    value: Mapping[str, Any] | None  # None: the item is deleted
    index: Literal[False] | list[str] | None = None
    ttl: TTL = NOT_PROVIDED
    if_version: int | None = None
    provenance: Provenance | None = None


PROVENANCE = tuple(each.name for each in fields(Provenance))
"""The fields of provenance."""


class StoredItem(Item):
    """An item, with its place among the versions of its key.

    Args:
        version: Counts the puts of this key, from 1.
        valid_from: The time at which this version was put (UTC).
        valid_to: When it was replaced, deleted or expired; None: it is the present one.
        expires_at: When it will expire; None: never.
        provenance: Where it comes from, if that was said.
    """

    __slots__ = ("expires_at", "provenance", "valid_from", "valid_to", "version")

    def __init__(
        self,
        *,
        value: dict[str, Any],
        key: str,
        namespace: Namespace,
        created_at: datetime,
        valid_from: datetime,
        version: int,
        valid_to: datetime | None = None,
        expires_at: datetime | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        super().__init__(
            value=value,
            key=key,
            namespace=namespace,
            created_at=created_at,
            updated_at=valid_from,
        )
        self.version = version
        self.valid_from, self.valid_to = valid_from, valid_to
        self.expires_at = expires_at
        self.provenance = provenance


class FoundItem(SearchItem):
    """An item that a search found.

    Args:
        item: The item.
        score: How well it answers the query, from 0 to about 1, the same in every search (see
            `min_score`); None: there was no query.
        parts: With `explain=True`, the parts whose sum is the score, by name.
    """

    __slots__ = ("expires_at", "parts", "provenance", "valid_from", "valid_to", "version")

    def __init__(
        self,
        item: StoredItem,
        score: float | None = None,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            namespace=item.namespace,
            key=item.key,
            value=item.value,
            created_at=item.created_at,
            updated_at=item.updated_at,
            score=score,
        )
        self.version, self.provenance = item.version, item.provenance
        self.valid_from, self.valid_to = item.valid_from, item.valid_to
        self.expires_at = item.expires_at
        self.parts = parts


@dataclass(frozen=True, slots=True)
class VersionRetention:
    """Which closed versions to keep; the present version of a key always stays.

    A version stays if any rule given keeps it.

    Attributes:
        last: How many of the newest closed versions of each key stay.
        days: Closed versions that were valid within so many days stay.
    """

    last: int | None = None
    days: float | None = None


@dataclass(frozen=True, slots=True)
class Removable:
    """What of a key `sweep_ttl` and then `retain` would remove.

    Attributes:
        namespace: Of the key.
        key: The key.
        expired: Whether its present item is expired, and would become a closed version.
        versions: How many closed versions would go, that of an expired item among them.
        size_bytes: Bytes of their values and provenance.
    """

    namespace: Namespace
    key: str
    expired: bool
    versions: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """How the database would answer a search."""

    indexes: tuple[str, ...]  # of paths; empty: it reads every item under the prefix
    steps: tuple[str, ...]  # SQLite's own account, a line each


@dataclass(frozen=True, slots=True)
class WhyNot:
    """The place of an item in the answers to a query.

    Attributes:
        reason: In words.
        rank: Its place, from 1; None: it is not among the answers at all.
        parts: The parts whose sum is its score, by name.
    """

    reason: str
    rank: int | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pending:
    """An item whose vectors are missing; search by words finds it."""

    namespace: Namespace
    key: str
    attempts: int
    error: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of `forget`; with `dry_run`, what it would remove.

    Attributes:
        items: Present items.
        versions: Closed versions of them and of deleted items.
        messages: Messages of threads, by provenance, and their copies in checkpoints.
        keys: `(namespace, key)` of each item.
        hashes: BLAKE2b-128 of each removed value's JSON, in hexadecimal. It can prove that a text
            was among them, and does not reveal it.
        threads: The threads that messages were removed from.
        at: When (UTC).
        clean: Whether the bytes of the file and its WAL hold none of it; False while another
            process still reads an older snapshot, or for a dry run. Quotations elsewhere, such as
            answers in threads, are not covered.
        cancelled: Tasks that quoted a removed message and had not run: `thread_id: node:task_id`.
        size_bytes: Bytes of the values and provenance of the items and versions.
    """

    items: int
    versions: int
    messages: int
    keys: tuple[tuple[Namespace, str], ...]
    hashes: tuple[str, ...]
    threads: tuple[str, ...]
    at: datetime
    clean: bool
    cancelled: tuple[str, ...] = ()
    size_bytes: int = 0

    def __add__(self, other: Receipt) -> Receipt:
        """The sum of two receipts; clean if both are."""
        return Receipt(
            items=self.items + other.items,
            versions=self.versions + other.versions,
            messages=self.messages + other.messages,
            keys=(*self.keys, *other.keys),
            hashes=tuple(sorted({*self.hashes, *other.hashes})),
            threads=tuple(dict.fromkeys((*self.threads, *other.threads))),
            at=max(self.at, other.at),
            clean=self.clean and other.clean,
            cancelled=(*self.cancelled, *other.cancelled),
            size_bytes=self.size_bytes + other.size_bytes,
        )


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts and sizes of a store.

    Attributes:
        namespaces: How many namespaces hold something.
        items: Present items, including expired ones that were not yet swept.
        versions: Closed versions.
        pending: Items without vectors of the file's model: those of `pending_embeddings()`, and
            those of another model, to which `reembed()` has not come.
        value_bytes: JSON of the present items.
        indexes: Paths with an index.
        database: Sizes of the file and SQLite's version.
    """

    namespaces: int
    items: int
    versions: int
    pending: int
    value_bytes: int
    indexes: tuple[str, ...]
    database: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The counts of an import.

    Attributes:
        items: Present items.
        versions: Closed versions.
        skipped: Versions that exist already, or that are older than the existing one.
        unsuitable: Items that cannot be stored here, and were passed over for
            `on_unsuitable="skip"`.
    """

    items: int = 0
    versions: int = 0
    skipped: int = 0
    unsuitable: int = 0

    def __add__(self, other: TransferReport) -> TransferReport:
        return TransferReport(*map(operator.add, astuple(self), astuple(other)))
