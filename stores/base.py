"""Define the store's dataclasses: provenance, items, versions, reports and receipts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal

from langgraph.store.base import NOT_PROVIDED, Item, NotProvided, SearchItem

Mode = Literal["hybrid", "text", "semantic"]
Namespace = tuple[str, ...]
# Start (inclusive) and end (exclusive) of a period, both with a time zone
Period = tuple[datetime, datetime]
# Time to live in minutes. None means that the item never expires. `NOT_PROVIDED` means the store's
# default time to live.
TTL = float | None | NotProvided
# Progress callback, called with the number of finished items and the total number (None if unknown)
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of an item.

    All provenance fields are optional and can be used in search filters.
    """

    thread_id: str | None = None
    # Id of the checkpoint, in the thread `thread_id`, from which the item was created
    checkpoint_id: str | None = None
    # Ids of the messages that the item was made from
    message_ids: tuple[str, ...] = ()
    actor: str | None = None  # Name of the speaker
    # Trust class of the source: an application-defined label such as "user", "tool" or "web"
    trust: str | None = None
    position: int | None = None  # Position of the message in its thread
    at: datetime | None = None  # Time at which the message was sent, with a time zone
    # Name of the user who wrote the item, if the memories are shared by several users
    author: str | None = None


@dataclass(frozen=True, slots=True)
class PutItem:
    """A write operation of a batch.

    `PutItem` has the fields of LangGraph's `PutOp`, plus a field for each option that perdure adds
    to `put`.
    """

    namespace: Namespace
    key: str
    value: Mapping[str, Any] | None  # The JSON object, or None to delete the item
    index: Literal[False] | list[str] | None = None
    ttl: TTL = NOT_PROVIDED
    if_version: int | None = None
    provenance: Provenance | None = None


PROVENANCE = tuple(field.name for field in fields(Provenance))
"""The names of the fields of `Provenance`."""


class StoredItem(Item):
    """One version of an item.

    Args:
        value: The JSON object.
        key: The key of the item, unique in its namespace.
        namespace: The labels of the namespace.
        created_at: The time at which the item was created (UTC). If the key was deleted and put
            again, this is the time of the first put after the deletion.
        valid_from: The time at which this version was put (UTC).
        version: The number of this version. The first put of a key has 1. A deletion does not
            restart the numbers.
        valid_to: The time at which this version was replaced or deleted or expired (UTC). None
            means that this is the current version.
        expires_at: The time at which the current version will expire (UTC), or None if it never
            does.
        provenance: The origin of the item, or None if it was put without one.
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
    """An item in the result of a search.

    Args:
        item: The item.
        score: The relevance for the query, 0 to 1. Scores of different searches can be compared
            (see `min_score`). None if the search had no query.
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
            item.namespace, item.key, item.value, item.created_at, item.updated_at, score
        )
        self.version, self.provenance = item.version, item.provenance
        self.valid_from, self.valid_to = item.valid_from, item.valid_to
        self.expires_at = item.expires_at
        self.parts = parts


@dataclass(frozen=True, slots=True)
class VersionRetention:
    """A retention rule for item versions that are no longer current.

    A closed version is one that was replaced or deleted, or that has expired. A closed version is
    kept if it satisfies at least one of the two limits, `last` or `days`. A retention rule never
    deletes the current version of a key.
    """

    # Number of most recent closed versions to keep for each key
    last: int | None = None
    # Number of days to keep a closed version, counted from its replacement, deletion or expiry
    days: float | None = None


@dataclass(frozen=True, slots=True)
class RemovableVersions:
    """The versions of one key that would be removed by calling `sweep_ttl` and then `retain`."""

    namespace: Namespace
    key: str
    # Whether the current version has expired and would be closed by `sweep_ttl`
    expired: bool
    # Number of versions of the key that would be removed, including the current version if it has
    # expired
    versions: int
    # Total size in bytes of the values and provenance of the versions that would be removed
    size_bytes: int


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """The database's query plan for a search without query text."""

    # Indexed JSON paths that the search uses. If the search uses no index, it scans all items under
    # the prefix.
    indexes: tuple[str, ...]
    # Lines of the database's own query plan
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankExplanation:
    """The rank of one item in the results of a query, and an explanation of this rank."""

    reason: str
    # Rank of the item in the search results, starting at 1, or None if the search excludes the item
    rank: int | None = None
    # Components of the item's score in the search, by name. The score is the sum of its components.
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PendingEmbedding:
    """An item that was stored without embeddings because the embedder failed on its text.

    An item without embeddings can still be found by keyword search.
    """

    namespace: Namespace
    key: str
    attempts: int  # Number of failed attempts to embed the text
    error: str  # Message of the last failure


@dataclass(frozen=True, slots=True)
class Receipt:
    """The report of an erasure, which `forget` and `forget_author` return.

    After a dry run (`dry_run`), the receipt counts and lists the data that would be removed.

    The attribute `clean` is true if no byte of the removed items is left in the database file or
    its WAL. `clean` is false in three cases: the erasure was a dry run, another process is still
    reading an older snapshot, or the disk has no room for a copy of the database file. On Postgres,
    `clean` is false after every erasure that removed something, because Postgres does not overwrite
    deleted bytes.

    A `Receipt` reports which items an erasure removed, and how many messages the erasure removed.
    The receipt does not cover copies of a removed text elsewhere, such as quotations in other
    messages. Each hash in the receipt can prove that a certain text was erased, without revealing
    the text.
    """

    items: int  # Number of removed current items
    # Number of removed versions that were no longer current, including versions of items that were
    # deleted earlier
    versions: int
    # Number of messages that the erasure removed from threads. Each stored version of a message is
    # counted. Each stored object that contained an erased message is also counted. After a dry run,
    # the field instead counts the source messages of the item versions that would be removed.
    # Source messages are the messages that an item version's provenance names.
    messages: int
    keys: tuple[tuple[Namespace, str], ...]  # Namespace and key of each removed item
    # BLAKE2b-128 hash of each removed value's JSON, in hexadecimal
    hashes: tuple[str, ...]
    # Ids of the threads that are named in the provenance of the removed versions or were passed to
    # `forget`. If no checkpointer was passed, no messages were removed from these threads.
    threads: tuple[str, ...]
    at: datetime  # Time of the erasure (UTC)
    # Whether no byte of the removed items is left in the database file or its WAL
    clean: bool
    # Pending tasks that were cancelled because they depended on an erased message, for example
    # because their input quoted the message. Each string has the form `thread_id:
    # namespace|node:task_id`. The checkpoint namespace is omitted for a task of the root graph. The
    # task id is omitted for a task that stored nothing.
    cancelled: tuple[str, ...] = ()
    # Total size of the removed versions in bytes. `forget` adds up the sizes of the stored values
    # and provenance. `forget_author` adds up the sizes of the values as JSON.
    size_bytes: int = 0
    # Namespaces that were not erased although one of their labels is the forgotten person's name.
    # Set only by `perdure.memory`.
    others: tuple[Namespace, ...] = ()
    # Number of versions that were kept, but from which the author's name was removed
    handed_over: int = 0

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """The distinct namespaces of the removed items."""
        return tuple(dict.fromkeys(namespace for namespace, _ in self.keys))

    def __add__(self, other: Receipt) -> Receipt:
        """Return a receipt that combines the counts and lists of two receipts.

        The combined receipt has `clean` set to true only if `clean` is true in each receipt.
        """
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
    """The number and total bytes of the items in a namespace, or in all namespaces under a prefix.

    An expired item is included in the counts until `sweep_ttl` removes it from the current items.
    """

    namespace: Namespace
    # Number of non-empty namespaces whose items are counted: 1 for a single namespace, possibly
    # more for a prefix
    namespaces: int
    items: int
    value_bytes: int  # Total bytes of the JSON of the items


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Item statistics: the largest namespaces, and the number of items created in each month."""

    largest: tuple[NamespaceSize, ...]  # The namespaces with the most bytes
    # Number of current items by the month in which they were created, with keys such as "2026-11"
    by_month: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts and sizes of a store.

    The attribute `pending` is the number of items without embeddings from the store's current
    model. The number of pending items includes the items that `pending_embeddings()` returns, and
    the items that still have embeddings from an earlier model because `reembed()` has not processed
    them yet.
    """

    namespaces: int  # Number of namespaces with items
    items: int  # Number of current items, including expired items that have not been swept yet
    versions: int  # Number of closed versions
    pending: int
    # Total size in bytes of the current items, serialized as JSON
    value_bytes: int
    indexes: tuple[str, ...]  # Paths with an index; see `create_index`
    # Database statistics by name, such as sizes in bytes and the SQLite or Postgres version
    database: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The result of an import: counts of items and versions, and the refused items.

    Attributes:
        items: Number of imported current items.
        versions: Number of imported closed versions.
        skipped: Number of versions that were not imported because this store already contains them
            or a newer version of the item.
        unsuitable: Number of items that were skipped because of `on_unsuitable="skip"`.
        refused: Namespace and key of each refused item. An item is refused if a tombstone of this
            store says that one of its texts or its source message was deleted or forgotten.
    """

    items: int = 0
    versions: int = 0
    skipped: int = 0
    unsuitable: int = 0
    refused: tuple[tuple[Namespace, str], ...] = ()

    def __add__(self, other: TransferReport) -> TransferReport:
        """Merge two reports into one.

        In the merged report, each count is the sum of the two reports' counts, and the tuple of
        refused items is the concatenation of the two tuples.
        """
        names = (each.name for each in fields(self))
        return TransferReport(*(getattr(self, name) + getattr(other, name) for name in names))
