"""The data of a store: provenance, items with their versions, reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal

from langgraph.store.base import NOT_PROVIDED, Item, NotProvided, SearchItem

Mode = Literal["hybrid", "text", "semantic"]
Namespace = tuple[str, ...]
Period = tuple[datetime, datetime]  # from a moment on, up to another; with time zones
TTL = float | None | NotProvided  # minutes; None: for ever
Progress = Callable[[int, int | None], None]  # how many are done, of how many if that is known


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where an item comes from. All fields are optional; filters may use them."""

    thread_id: str | None = None
    checkpoint_id: str | None = None  # a checkpoint of that thread
    message_ids: tuple[str, ...] = ()  # the messages that it rests on
    actor: str | None = None  # the speaker
    trust: str | None = None  # a class of your own, say `"user"`, `"tool"` or `"web"`
    position: int | None = None  # its place in the order of the thread
    at: datetime | None = None  # when it was said; with a time zone
    author: str | None = None  # the user who wrote it, in the memory of a team or a conversation


@dataclass(frozen=True, slots=True)
class PutItem:
    """An operation of a batch: langgraph's `PutOp` with all that `put` takes."""

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
            value=value, key=key, namespace=namespace, created_at=created_at, updated_at=valid_from
        )
        self.version, self.provenance = version, provenance
        self.valid_from, self.valid_to = valid_from, valid_to
        self.expires_at = expires_at


class FoundItem(SearchItem):
    """An item that a search found.

    Args:
        item: The item.
        score: How well it answers the query, 0 to 1, the same in every search (see
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
        identity = item.namespace, item.key, item.value
        super().__init__(*identity, item.created_at, item.updated_at, score)
        self.version, self.provenance = item.version, item.provenance
        self.valid_from, self.valid_to = item.valid_from, item.valid_to
        self.expires_at = item.expires_at
        self.parts = parts


@dataclass(frozen=True, slots=True)
class VersionRetention:
    """Which closed versions to keep: those that either rule keeps.

    The present version of a key always stays.
    """

    last: int | None = None  # the newest so many closed versions of each key stay
    days: float | None = None  # those that were valid within so many days stay


@dataclass(frozen=True, slots=True)
class RemovableVersions:
    """What of a key `sweep_ttl` and then `retain` would remove."""

    namespace: Namespace
    key: str
    expired: bool  # whether the item is, and would become a closed version
    versions: int  # closed versions that would go, that of an expired item among them
    size_bytes: int  # bytes of their values and provenance


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """How the database would answer a search."""

    indexes: tuple[str, ...]  # of paths; empty: it reads every item under the prefix
    steps: tuple[str, ...]  # the database's own account, a line each


@dataclass(frozen=True, slots=True)
class RankExplanation:
    """The place of an item in the answers to a query."""

    reason: str
    rank: int | None = None  # its place, from 1; None: it is not among the answers at all
    parts: Mapping[str, float] = field(default_factory=dict)  # what its score is the sum of


@dataclass(frozen=True, slots=True)
class PendingEmbedding:
    """An item whose vectors are missing; search by words finds it."""

    namespace: Namespace
    key: str
    attempts: int
    error: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of `forget`; with `dry_run`, what it would remove.

    It is `clean` if the bytes of the file and its WAL hold none of it: not for a dry run, and not
    while another process reads an older snapshot, or the disk has no room for a copy of the file.
    Quotations elsewhere, such as answers in threads, are not covered. A hash can prove that a text
    was erased, and does not reveal it.
    """

    items: int  # present items
    versions: int  # closed versions, of them and of deleted items
    messages: int  # messages of threads, by provenance, and their copies in checkpoints
    keys: tuple[tuple[Namespace, str], ...]  # namespace and key of each item
    hashes: tuple[str, ...]  # BLAKE2b-128 of each removed value's JSON, in hexadecimal
    threads: tuple[str, ...]  # the threads that messages were removed from
    at: datetime  # when (UTC)
    clean: bool
    cancelled: tuple[str, ...] = ()  # tasks that quoted a message: `thread_id: node:task_id`
    size_bytes: int = 0  # bytes of the values and provenance of the items and versions
    others: tuple[Namespace, ...] = ()  # namespaces that have a person's name, and were kept
    handed_over: int = 0  # items and versions that were kept without the name of their author

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """The namespaces of the items, each once."""
        return tuple(dict.fromkeys(namespace for namespace, _ in self.keys))

    def __add__(self, other: Receipt) -> Receipt:
        """The sum of two receipts; clean if both are."""
        return Receipt(
            self.items + other.items,
            self.versions + other.versions,
            self.messages + other.messages,
            (*self.keys, *other.keys),
            tuple(sorted({*self.hashes, *other.hashes})),
            tuple(dict.fromkeys((*self.threads, *other.threads))),
            max(self.at, other.at),
            self.clean and other.clean,
            (*self.cancelled, *other.cancelled),
            self.size_bytes + other.size_bytes,
            tuple(dict.fromkeys((*self.others, *other.others))),
            self.handed_over + other.handed_over,
        )


@dataclass(frozen=True, slots=True)
class NamespaceSize:
    """What is in a namespace, or under a prefix; expired items count until they are swept."""

    namespace: Namespace
    namespaces: int  # that hold something: 1, or those under the prefix
    items: int
    value_bytes: int  # JSON of the items


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """The largest namespaces, and in which months items were made."""

    largest: tuple[NamespaceSize, ...]  # the namespaces with the most bytes
    by_month: Mapping[str, int]  # how many of the present items were made in each: `"2026-11"`


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts and sizes of a store.

    `pending` counts the items without vectors of the file's model: those of `pending_embeddings()`,
    and those of another model, to which `reembed()` has not come.
    """

    namespaces: int  # namespaces that hold something
    items: int  # present items, including expired ones that were not yet swept
    versions: int  # closed versions
    pending: int
    value_bytes: int  # JSON of the present items
    indexes: tuple[str, ...]  # paths that have one
    database: Mapping[str, Any] = field(repr=False)  # sizes of the file, the driver's version


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The counts of an import, and the names of the items that it refused.

    Attributes:
        items: Present items.
        versions: Closed versions.
        skipped: Versions that exist already, or are older than the existing one.
        unsuitable: Items passed over for `on_unsuitable="skip"`.
        refused: Namespace and key of each item that was refused, because a tombstone here says that
            one of its texts was deleted or forgotten.
    """

    items: int = 0
    versions: int = 0
    skipped: int = 0
    unsuitable: int = 0
    refused: tuple[tuple[Namespace, str], ...] = ()

    def __add__(self, other: TransferReport) -> TransferReport:
        """Return the sums of the counts, with the refused items of both."""
        names = (each.name for each in fields(self))
        return TransferReport(*(getattr(self, name) + getattr(other, name) for name in names))
