"""Define the data types of long-term memory, and an adapter for langgraph stores.

The adapter reads and writes memories in any langgraph store.

Stores that are not perdure's own cannot store an item's provenance (its origin), so for them the
adapter adds the provenance to the item's value as a field. Stores from other libraries keep no
version history and do not support conditional writes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore, GetOp, Item, PutOp
from pydantic import TypeAdapter

from perdure.effects import Effect, Operation, call_method
from perdure.errors import InvalidNamespace
from perdure.memory.long_term.recorded_templates import record_templates
from perdure.memory.namespace_templates import TEAMS, Template
from perdure.memory.options import check_instance
from perdure.memory.run_config import Versioned, require_store_of_running_graph
from perdure.settings import MIN_SCORE
from perdure.stores import tombstones
from perdure.stores.base import Namespace, Provenance, PutItem
from perdure.stores.search.text_equivalence import hash_normal_form
from perdure.stores.values import to_prompt_json

FACT: Final = "fact"
TURN: Final = tombstones.TURN
EPISODE: Final = "episode"
_FIELDS_NOT_RENDERED: Final = ("text", "kind", "formerly", "until")
"""Fields of an episode that `render_memory_line` does not copy into the JSON field `memory`.

The function copies all other fields that are not None into `memory`. If there are none, `memory` is
the episode's text. The end of the episode's validity is rendered in the JSON field `until`, and a
superseded text in the JSON field `before`.
"""
EVENT_KINDS: Final = (TURN, EPISODE)
"""Kinds of memories that record events. Two events with equal texts are stored as two memories."""
Role = Literal["user", "assistant", "tool", "system"]
Action = Literal["keep", "quarantine", "refuse"]
OutcomeChange = Literal[
    "added", "updated", "superseded", "deleted", "unchanged", "quarantined", "refused"
]
RESERVED_LABEL: Final = tombstones.ROOT
"""The first label of the namespaces in which perdure keeps its own notes about memories."""
QUARANTINE: Final = tombstones.QUARANTINE
TOMBSTONES: Final = tombstones.TOMBSTONES
CHANGE_COUNTERS: Final = tombstones.CHANGED
WATERMARKS: Final = tombstones.WATERMARKS
NOTE_KINDS: Final = tombstones.KINDS
"""The second labels of the namespaces in which perdure keeps notes about memories.

The notes are of the kinds quarantine, tombstones, change counters and watermarks.
"""
INSTRUCTIONS: Final = tombstones.INSTRUCTIONS
PREVIOUS: Final = tombstones.PREVIOUS
AUTHOR: Final = tombstones.AUTHOR
WITHOUT_AUTHOR: Final = tombstones.UNNAMED
SOURCE: Final = tombstones.SOURCE
HASHED_ID_PREFIX: Final = "unnamed-"
"""The prefix of the id that perdure gives to a message without an id.

The id consists of this prefix and a hash.
"""
# Maximum number of previous texts kept in a memory. The oldest texts are dropped.
_MAX_PREVIOUS_TEXTS: Final = 10
# Maximum number of items returned by one call of the store's `search`.
_PAGE_SIZE: Final = 1_000
_COMMON_SEARCH_OPTIONS: Final = ("query", "filter", "limit", "offset")
"""Options that the `search` of every langgraph store has."""


@dataclass(frozen=True, slots=True)
class Previous:
    """A previous text of a memory.

    Attributes:
        text: The text.
        until: When a superseded text ceased to be true, or when an updated text was replaced (UTC).
        change: `"superseded"` if the text was true until then, or `"updated"` if it was wrong or
            badly worded.
        message_ids: The ids of the messages from which the text was made, or `()` if unknown.
    """

    text: str
    until: datetime
    change: str
    message_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory that was read from a store.

    Attributes:
        namespace: The namespace of the item in the store.
        key: The key of the item.
        text: The text of the memory.
        kind: `"fact"`, `"turn"`, `"episode"`, `"instructions"`, a kind that the application
            defines, or `""` if the item has no kind.
        value: The whole JSON document: `text`, `kind` and all other fields.
        provenance: The origin of the memory, or None if it is unknown.
        version: The version number, which starts at 1, or None if the store keeps no versions.
        valid_from: When this version was stored (UTC).
        valid_to: When this version was replaced or deleted, or expired (UTC). None for the present
            version.
        previous: The previous texts of the memory, newest first.
        score: The score of the memory for a query, or None if it was not found by a query.
        parts: The parts whose sum is the score, by name. None unless the memory was found by a
            search with `explain=True`.
    """

    namespace: Namespace
    key: str
    text: str
    kind: str
    value: Mapping[str, Any] = field(repr=False)
    provenance: Provenance | None = None
    version: int | None = None
    valid_from: datetime | None = None
    valid_to: datetime | None = None
    previous: tuple[Previous, ...] = ()
    score: float | None = None
    parts: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate text, which is stored as a memory only if the gate (the write filter) keeps it.

    Attributes:
        text: The text.
        kind: The kind of the memory.
        fields: Further fields of its value.
        provenance: The origin of the text.
        role: The role of the speaker whose words the text is based on.
        explicit: Whether a model or an application requested this memory explicitly, with a tool or
            in code.
        by_model: Whether a model requested this memory with a tool.
    """

    text: str
    kind: str = FACT
    fields: Mapping[str, Any] = field(default_factory=dict)
    provenance: Provenance | None = None
    role: Role = "user"
    explicit: bool = False
    by_model: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's decision on a candidate: keep it, quarantine it, or refuse it.

    Attributes:
        action: The decision.
        reason: The reason for the decision or for a change of the text, or "" if the candidate is
            kept without changes.
        check: The name of the check that decided.
        text: The text to store instead of the candidate's text, or None to store the candidate's
            text.
        same_as: If the candidate is refused because it repeats a fact, the key of the memory that
            states the fact. The memory is either stored already, or would be stored from an earlier
            candidate. Otherwise None.
        fields: The fields to store instead of the candidate's fields, or None to store the
            candidate's fields.
    """

    action: Action
    reason: str = ""
    check: str = ""
    text: str | None = None
    same_as: str | None = None
    fields: Mapping[str, Any] | None = None


KEEP: Final = Verdict("keep")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a request to change memories.

    Attributes:
        change: What was done. `"unchanged"` means that the memory existed already.
        key: The key of the memory, or of the entry in quarantine.
        reason: Why the request was refused, quarantined or changed, or "".
        check: The name of the gate's check that decided, or "".
    """

    change: OutcomeChange
    key: str | None = None
    reason: str = ""
    check: str = ""

    def __str__(self) -> str:
        about = f" {self.key}" if self.key else ""
        return f"{self.change}{about}" + (f": {self.reason}" if self.reason else "")


def render_memory_line(memory: Any, *, date: str | None = None) -> str:
    """Render a memory, item, text or JSON object as a single line of JSON for use in a prompt.

    Args:
        memory: A `Memory`, a langgraph `Item`, or a JSON value. For a memory or item, the line also
            contains the speaker, the date and the thread, if they are known.
        date: For a `Memory`, the date to show instead of the day on which the memory was stated.
    """
    if isinstance(memory, Item):
        value = memory.value
        body = value["text"] if set(value) == {"text"} else value
        team = _get_team(memory.namespace)
        return _render_memory_json(
            body, getattr(memory, "provenance", None), memory.created_at, team=team
        )
    if not isinstance(memory, Memory):
        return to_prompt_json(memory)
    earlier_texts = [
        {"memory": previous.text, "until": _format_day(previous.until)}
        for previous in memory.previous[:1]
        # Show a memory's previous text only if its `change` field is "superseded", which means that
        # a new fact replaced the previous text. Omit the previous text if its `change` field is
        # "updated", which means that the previous text was only corrected.
        if previous.change == "superseded"
    ]
    source, until = memory.provenance, find_end_of_validity(memory)
    text_or_fields: Any = memory.text
    if memory.kind == EPISODE:
        filled_fields = {
            key: part
            for key, part in memory.value.items()
            if key not in _FIELDS_NOT_RENDERED and part is not None
        }
        text_or_fields = filled_fields or memory.text
    team = _get_team(memory.namespace)
    return _render_memory_json(
        text_or_fields, source, memory.valid_from, until, earlier_texts, date, team
    )


def format_memory_dates(memories: Sequence[Memory]) -> list[str | None]:
    """Return each memory's date, followed by the time of day if several memories share the date.

    The time of day is precise to the minute, or to the second or millisecond where necessary to
    tell memories apart. A date that is followed by the time of day is converted to UTC together
    with the time. A date alone is in the time zone of the memory's own timestamp. If a memory's
    time is unknown, the list contains None instead of the memory's date.
    """
    moments = [
        (memory.provenance and memory.provenance.at) or memory.valid_from for memory in memories
    ]
    dates = [_format_day(moment) for moment in moments]
    for timespec in ("minutes", "seconds", "milliseconds"):
        counts = Counter(dates)
        dates = [
            _format_utc(moment, timespec) if moment and counts[date] > 1 else date
            for moment, date in zip(moments, dates, strict=True)
        ]
    return dates


def find_end_of_validity(memory: Memory) -> datetime | None:
    """Return the time in a memory's `until` field, at which the memory stops being true.

    Return None if the field is missing or is not a valid time.
    """
    until = memory.value.get("until")
    try:
        return datetime.fromisoformat(until) if isinstance(until, str) else None
    except ValueError:
        return None


def _render_memory_json(
    text_or_fields: Any,
    provenance: Any,
    default_time: Any,
    true_until: datetime | None = None,
    earlier_texts: Sequence[Any] = (),
    date: str | None = None,
    team: str | None = None,
) -> str:
    """Render a memory as a single line of JSON that includes the memory's provenance.

    Args:
        text_or_fields: The text or the fields of the memory.
        provenance: Its provenance, or None.
        default_time: The time to show if the provenance has none.
        true_until: When the memory ceased to be true.
        earlier_texts: Superseded texts of the memory, each with its end date.
        date: The date to show instead of the day on which the memory was stated.
        team: The team that the memory belongs to.
    """
    actor, author = getattr(provenance, "actor", None), getattr(provenance, "author", None)
    trust, said_at = (
        getattr(provenance, "trust", None),
        getattr(provenance, "at", None) or default_time,
    )
    # In a memory that is shared by a team, the words "the user" would be misread as the current
    # user.
    if team is not None and trust == "user":
        actor = author or "a member of the team"
    # Omit the "said_by" field if the memory's text already begins with the speaker's name, as the
    # text of a turn does.
    names_speaker = isinstance(text_or_fields, str) and text_or_fields.startswith(f"{actor}:")
    details: Mapping[str, Any] = {
        "said_by": None if names_speaker else actor,
        "trust": None if trust == actor else trust,
        "on": date or _format_day(said_at),
        "until": _format_day(true_until),
        "thread": getattr(provenance, "thread_id", None),
        "before": earlier_texts,
        "team": team,
        "noted_for": None if author == actor else author,
    }
    return to_prompt_json(
        {"memory": text_or_fields, **{name: part for name, part in details.items() if part}}
    )


def _get_team(namespace: Sequence[str]) -> str | None:
    """Return the team that a namespace belongs to, or None if it does not belong to a team."""
    return namespace[1] if tuple(namespace[:1]) == (TEAMS,) and len(namespace) > 1 else None


def _format_utc(when: datetime, timespec: str) -> str:
    """Convert a datetime to UTC and format it in ISO 8601, for example `2026-01-31T09:30Z`."""
    return when.astimezone(UTC).replace(tzinfo=None).isoformat(timespec=timespec) + "Z"


def _format_day(when: datetime | None) -> str | None:
    """Format the date of a datetime in ISO 8601, for example `2026-01-31`."""
    return None if when is None else when.date().isoformat()


_PROVENANCE_ADAPTER: Final = TypeAdapter(Provenance)
_PREVIOUS_TEXTS_ADAPTER: Final = TypeAdapter(tuple[Previous, ...])


class StoreAdapter:
    """Reads and writes memories in any langgraph store.

    Both blocking and async callers can run the async methods; see `perdure.effects`.

    Reading an item from a perdure store through a `StoreAdapter` does not restart the item's time
    to live (TTL), because many reads only compare memories, or fetch more memories than are
    eventually passed to the model. To restart the TTL of the memories that are passed to the model,
    call `refresh_time_to_live`.

    Args:
        store: The store.
        templates: Templates of the namespaces that are used. `write` records in the store those
            templates that need a record; see `perdure.memory.long_term.recorded_templates`.

    Attributes:
        store: The store.
        call: A function that takes the name of a store method and the method's arguments, and
            returns an `Effect`. When the effect is awaited, it calls the method.
        versioned: Whether the store keeps versions.
    """

    def __init__(self, store: Any, *templates: Template) -> None:
        expected = "a BaseStore, like perdure.stores.SQLiteStore.open(path)"
        self.store: Any = check_instance("store", store, BaseStore, expected)
        self._templates = tuple(filter(attrgetter("needs_record"), templates))
        self.call: Callable[..., Effect[Any]] = partial(call_method, self.store)
        # Only perdure's stores keep versions. `versioned` is therefore False for all other stores.
        self.versioned = isinstance(store, Versioned)
        # The (namespace, key) pair of each item that has a TTL and was read through this adapter.
        self._expiring = set[tuple[Namespace, str]]()

    async def get(
        self, namespace: Namespace, key: str, as_of: datetime | None = None
    ) -> Memory | None:
        """Return the memory under a key, or None if there is none.

        Args:
            namespace: The namespace of the memory.
            key: Its key.
            as_of: A time in the past, to return the version that was current then. Only perdure's
                stores support it.
        """
        item = await self.call("get", namespace, key, **self._build_read_options(as_of))
        return None if item is None else self._convert_read_item(item)

    def get_min_score_or_default(self, min_score: float | None) -> float:
        """Return `min_score`, or the default minimum score if `min_score` is None.

        For a perdure store, the default minimum score is `MIN_SCORE`, which is chosen for perdure's
        own scores. For a store from another library, the default minimum score is 0, which admits
        all results, because `MIN_SCORE` has no meaning for the store's scores. Such a store returns
        cosine similarities as scores, or no scores at all.
        """
        default = MIN_SCORE if self.versioned else 0.0
        return default if min_score is None else min_score

    async def search(
        self,
        prefix: Namespace,
        *,
        as_of: datetime | None = None,
        min_score: float = 0.0,
        **search_options: Any,
    ) -> list[Memory]:
        """Return the memories that are under a prefix and have a score of at least `min_score`.

        The result includes the memories in all namespaces that begin with the prefix. Memories that
        have no score are returned regardless of `min_score`.

        Args:
            prefix: The prefix of the namespaces.
            as_of: A time in the past, to search the versions that were current then. Only perdure's
                stores support it.
            min_score: The minimum score, or 0 for all memories.
            search_options: Options of `Store.search`. Options that the store does not have are left
                out.
        """
        options = search_options | self._build_read_options(as_of)
        if min_score:
            options["min_score"] = min_score
        if not self.versioned:
            options = {n: v for n, v in options.items() if n in _COMMON_SEARCH_OPTIONS}
        memories = list(map(self._convert_read_item, await self.call("search", prefix, **options)))
        if not min_score:
            return memories
        return [memory for memory in memories if not is_below_min_score(memory, min_score)]

    async def refresh_time_to_live(self, memories: Iterable[Memory]) -> None:
        """Refresh the TTL of memories, unless the store is configured not to refresh TTLs on read.

        Memories that were not read through this adapter are skipped, and so are memories without a
        TTL. Do not pass past versions of memories: a version is identified only by its namespace
        and key, so the TTL of the current version would be refreshed.
        """
        if not self._expiring:
            return
        item_keys = dict.fromkeys((memory.namespace, memory.key) for memory in memories)
        ops = [GetOp(*item_key) for item_key in item_keys if item_key in self._expiring]
        if ops:
            await self.call("batch", ops)

    async def list_memories(self, namespace: Namespace, **search_options: Any) -> list[Memory]:
        """Return all memories in a namespace, excluding memories in its child namespaces.

        `search_options` are passed to the store's `search` method.
        """
        memories: list[Memory] = []
        while True:
            page = await self.search(
                namespace, limit=_PAGE_SIZE, offset=len(memories), **search_options
            )
            memories += page
            if len(page) < _PAGE_SIZE:
                return [memory for memory in memories if memory.namespace == namespace]

    async def list_versions(self, namespace: Namespace, key: str) -> list[Memory]:
        """Return all versions of a memory, oldest first.

        If the store does not keep versions, only the current version is returned.
        """
        if not self.versioned:
            present = await self.get(namespace, key)
            return [] if present is None else [present]
        items = await self.call("history", namespace, key)
        return [convert_item_to_memory(item) for item in items]

    async def write(self, puts: Sequence[PutItem]) -> None:
        """Write the puts. A store that keeps versions writes all puts in one transaction.

        Raises:
            VersionConflict: An item is no longer at the version that a put expects.
        """
        if puts:
            if self._templates:
                await record_templates(self.store, self._templates)
            await self.call(
                "batch", list(puts) if self.versioned else [_convert_to_plain_put(p) for p in puts]
            )

    async def list_namespaces_with_label(self, label: str) -> list[Namespace]:
        """Return the namespaces that contain the given label.

        For a perdure store, namespaces that contain only deleted items are included.
        """
        if self.versioned:
            return await self.call("find_namespaces", label)  # type: ignore[no-any-return]
        namespaces = await self.call("list_namespaces", limit=sys.maxsize)
        return [tuple(namespace) for namespace in namespaces if label in namespace]

    async def list_namespaces_under(self, prefix: Namespace) -> list[Namespace]:
        """Return the namespaces under a prefix.

        For a perdure store, namespaces that contain only deleted items are included.
        """
        namespaces = await self.list_namespaces_with_label(prefix[0])
        return [namespace for namespace in namespaces if namespace[: len(prefix)] == prefix]

    async def list_items_under(self, prefix: Namespace) -> list[Item]:
        """Return the current items in every namespace that starts with a prefix."""
        items: list[Item] = []
        while True:
            page = await self.call(
                "search",
                prefix,
                limit=_PAGE_SIZE,
                offset=len(items),
                **self._build_read_options(),
            )
            items += page
            if len(page) < _PAGE_SIZE:
                return items

    def _convert_read_item(self, item: Item) -> Memory:
        """Convert an item to a memory, and record the item's key if the item has a TTL.

        Only items with a recorded key are refreshed by `refresh_time_to_live`.
        """
        memory = convert_item_to_memory(item)
        if getattr(item, "expires_at", None) is not None:
            self._expiring.add((memory.namespace, memory.key))
        return memory

    def _build_read_options(self, as_of: datetime | None = None) -> dict[str, Any]:
        """Return the options with which the adapter reads from the store.

        For a perdure store, the options prevent reads from refreshing TTLs.

        If `as_of` is given, the options select the versions that were current at that time.
        """
        if as_of is None:
            return {"refresh_ttl": False} if self.versioned else {}
        check_instance(
            "store",
            self.store,
            Versioned,
            "a perdure store for as_of=, because other stores keep no versions",
        )
        return {"refresh_ttl": False, "as_of": as_of}


def is_below_min_score(memory: Memory, min_score: float) -> bool:
    """Return whether a memory's score is below `min_score`.

    A memory that has no score passes the `min_score` filter. If `min_score` is 0, no memory is
    below the minimum.
    """
    return bool(min_score) and memory.score is not None and memory.score < min_score


class ChangePlan(NamedTuple):
    """A planned change: the put operations to perform, and the outcomes to report afterwards.

    `outcomes` contains one outcome for each requested change of a memory, including requests that
    need no put.
    """

    puts: Sequence[PutItem] = ()
    outcomes: Sequence[Outcome] = ()


class ItemHandle(NamedTuple):
    """A handle for reading and changing a store item, such as a profile.

    Attributes:
        adapter: The adapter of the store that contains the item.
        namespace: The namespace of the item.
        key: The key of the item.
        provenance: The provenance of the next change.
        user_texts: If a model makes the change, the texts of the users' messages on which the
            change is based. None if a person or an application makes the change directly.
    """

    adapter: StoreAdapter
    namespace: Namespace
    key: str
    provenance: Provenance | None = None
    user_texts: Sequence[str] | None = None

    def read(self, as_of: datetime | None = None) -> Operation[Memory | None]:
        """Return the current item or, with `as_of`, a past version.

        Return None if the item does not exist or, with `as_of`, did not exist at that time.
        """
        return self.adapter.get(self.namespace, self.key, as_of)

    def list_versions(self) -> Operation[list[Memory]]:
        """Return all versions of the item, oldest first."""
        return self.adapter.list_versions(self.namespace, self.key)

    def build_put(
        self, value: Mapping[str, Any], searched_field: str, if_version: int | None
    ) -> PutItem:
        """Build a put that is applied only if the item's stored version is `if_version`.

        In a store that keeps no versions, the put is applied whatever the item's version is. The
        written item does not expire.

        Args:
            value: The new value.
            searched_field: The field of the value that searches use.
            if_version: The expected version, 0 if the item must not exist, or None for any version.
        """
        version = if_version if self.adapter.versioned else None
        # Set `ttl` to None to override the store's default TTL, because an item such as a profile
        # must never expire.
        options: Any = {"ttl": None, "if_version": version, "provenance": self.provenance}
        return PutItem(self.namespace, self.key, value, [searched_field], **options)


def get_adapter(store: BaseStore | None, *templates: Template) -> StoreAdapter:
    """Return an adapter for a store. If `store` is None, the running graph's store is used."""
    return StoreAdapter(
        require_store_of_running_graph("the memories") if store is None else store, *templates
    )


def fill_namespace(template: Template, config: RunnableConfig | None) -> Namespace:
    """Fill in a namespace template's placeholders for a run.

    The function raises `InvalidNamespace` if the first label of the filled namespace is reserved;
    see `check_namespace_is_not_reserved`.
    """
    return check_namespace_is_not_reserved(template, template.fill(config))


def fill_namespaces(template: Template, config: RunnableConfig | None) -> list[Namespace]:
    """Fill in a template for a run. A team template yields one namespace per team."""
    return [
        check_namespace_is_not_reserved(template, namespace)
        for namespace in template.fill_for_teams(config)
    ]


def check_namespace_is_not_reserved(template: Template, namespace: Namespace) -> Namespace:
    """Check that the first label of a namespace is not reserved, and return the namespace.

    Raises:
        InvalidNamespace: The first label is reserved for perdure's own notes, or it is reserved for
            teams and the template is not for teams.
    """
    if namespace[0] == TEAMS and not template.is_team:
        raise InvalidNamespace(
            f"the namespace {namespace!r} begins with {TEAMS!r}, which is reserved for team "
            f"memories; set {template.labels[0]!r} to another value in the run's context or config"
        )
    if namespace[0] == RESERVED_LABEL:
        raise InvalidNamespace(
            f"the namespace {namespace!r} begins with {RESERVED_LABEL!r}, which is reserved for "
            "perdure's own records; expected another first label, like 'memories'"
        )
    return namespace


def build_namespace_of_notes_about_memories(
    note_kind: str, memories_namespace: Namespace
) -> Namespace:
    """Return the namespace in which internal notes about memories are stored.

    Internal notes are, for example, tombstones and quarantine entries. Each kind of note has its
    own namespace.

    Args:
        note_kind: The kind, one of `NOTE_KINDS`.
        memories_namespace: The namespace of the memories.
    """
    return (RESERVED_LABEL, note_kind, *memories_namespace)


def build_put(
    namespace: Namespace,
    key: str,
    value: Mapping[str, Any],
    *,
    provenance: Provenance | None = None,
    if_version: int | None = None,
    is_searched: bool = True,
) -> PutItem:
    """Build the put of a memory.

    Args:
        namespace: The namespace of the memory.
        key: Its key.
        value: Its value.
        provenance: Its provenance.
        if_version: The version that the stored memory must have, 0 if there must be none, or None
            for any version.
        is_searched: Whether searches find the memory.
    """
    index: Any = ["text"] if is_searched else False
    return PutItem(namespace, key, value, index, if_version=if_version, provenance=provenance)


def build_unsearched_permanent_note_put(
    namespace: Namespace, key: str, value: Mapping[str, Any], *, if_version: int | None = None
) -> PutItem:
    """Build the put operation that stores one of perdure's internal notes.

    A note is an item that perdure writes for internal use, such as a watermark. A note never
    expires. Notes are not indexed for search, so searches do not find them.

    Args:
        namespace: The namespace of the note.
        key: Its key.
        value: Its value.
        if_version: The version that the stored note must have, 0 if there must be none, or None for
            any version.
    """
    return PutItem(namespace, key, value, index=False, ttl=None, if_version=if_version)


def build_removal(namespace: Namespace, key: str, if_version: int | None = None) -> PutItem:
    """Build the put that deletes a memory.

    In a store that keeps versions, the memory's past versions are retained.
    """
    return PutItem(namespace, key, None, if_version=if_version)


def build_memory_value_with_previous_texts(
    previous: Memory,
    next_value: Mapping[str, Any],
    change: str,
    previous_text_ended_at: datetime | None = None,
) -> dict[str, Any]:
    """Build the value for a new version of a memory, including its previous texts.

    If the text does not change, nothing is added to the list of previous texts.

    Args:
        previous: The stored version, which the new version will replace.
        next_value: The value of the next version.
        change: `"updated"` or `"superseded"`.
        previous_text_ended_at: When the previous text ceased to be true or was replaced. None means
            now.
    """
    previous_texts = list(previous.value.get(PREVIOUS, ()))
    if next_value["text"] != previous.text:
        ended_at = (previous_text_ended_at or datetime.now(UTC)).isoformat()
        entry: dict[str, Any] = {"text": previous.text, "digest": hash_normal_form(previous.text)}
        entry |= {"until": ended_at, "change": change}
        if previous.provenance is not None and previous.provenance.message_ids:
            entry["message_ids"] = list(previous.provenance.message_ids)
        if previous.provenance is not None and previous.provenance.author is not None:
            entry[AUTHOR] = previous.provenance.author
        previous_texts = [entry, *previous_texts][:_MAX_PREVIOUS_TEXTS]
    return {**next_value, PREVIOUS: previous_texts} if previous_texts else dict(next_value)


def build_filter_for_memories_with_previous_text(text: str) -> dict[str, Any]:
    """Return a search filter that matches memories with `text` as one of their previous texts.

    Two texts match if they have the same normal form.
    """
    # The search is ten times as fast if the `$exists` condition comes before the `digest`
    # condition.
    return {PREVIOUS: {"$exists": True}, f"{PREVIOUS}[*].digest": hash_normal_form(text)}


def convert_item_to_memory(item: Item) -> Memory:
    """Convert an item from any store to a memory."""
    value = dict(item.value)
    provenance: Provenance | None = getattr(item, "provenance", None)
    if provenance is None and (stored := value.pop(SOURCE, None)):
        provenance = _PROVENANCE_ADAPTER.validate_python(stored)
    text, kind, previous = value.get("text"), value.get("kind", ""), value.get(PREVIOUS)
    if not isinstance(text, str):
        text = tombstones.extract_item_text(value)
        kind = "instructions" if isinstance(value.get(INSTRUCTIONS), str) else kind
    return Memory(
        tuple(item.namespace),
        item.key,
        text,
        str(kind),
        value,
        provenance,
        version=getattr(item, "version", None),
        valid_from=getattr(item, "valid_from", item.updated_at),
        valid_to=getattr(item, "valid_to", None),
        previous=_PREVIOUS_TEXTS_ADAPTER.validate_python(previous) if previous else (),
        score=getattr(item, "score", None),
        parts=getattr(item, "parts", None),
    )


def _convert_to_plain_put(put: PutItem) -> PutOp:
    """Convert a put to langgraph's `PutOp`, storing the provenance in a field of the value.

    The conversion drops `if_version` and `ttl`.
    """
    value = None if put.value is None else dict(put.value)
    if value is not None and put.provenance is not None:
        value[SOURCE] = _PROVENANCE_ADAPTER.dump_python(
            put.provenance, mode="json", exclude_defaults=True
        )
    return PutOp(put.namespace, put.key, value, put.index)
