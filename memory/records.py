"""Records of long-term memory: memories, candidates, verdicts, outcomes, in any langgraph store.

A store other than perdure's keeps provenance in a field of the value, has no past versions, and
writes without conditions.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore, GetOp, Item, PutOp
from pydantic import TypeAdapter

from perdure.effects import Effect, Operation, call_method
from perdure.errors import InvalidNamespace
from perdure.memory.options import check_instance
from perdure.memory.recorded_templates import record_templates
from perdure.memory.run_config import TEAMS, Template, Versioned, get_graph_store
from perdure.settings import MIN_SCORE
from perdure.stores import tombstones
from perdure.stores.base import Namespace, Provenance, PutItem
from perdure.stores.normal_form import hash_normal_form
from perdure.stores.values import to_prompt_json

FACT: Final = "fact"
TURN: Final = tombstones.TURN
EPISODE: Final = "episode"
_FIELDS_SHOWN_ELSEWHERE: Final = (
    "text",
    "kind",
    "formerly",
    "until",
)  # fields of a value that are shown elsewhere
EVENT_KINDS: Final = (TURN, EPISODE)
"""Kinds that record what happened: the same text again is another event."""
Role = Literal["user", "assistant", "tool", "system"]
Action = Literal["keep", "quarantine", "refuse"]
Change = Literal["added", "updated", "superseded", "deleted", "unchanged", "quarantined", "refused"]
RESERVED_LABEL: Final = tombstones.ROOT
"""The first label of perdure's own notes, which are kept beside the memories."""
QUARANTINE: Final = tombstones.QUARANTINE
TOMBSTONES: Final = tombstones.TOMBSTONES
CHANGE_COUNTERS: Final = tombstones.CHANGED
WATERMARKS: Final = tombstones.WATERMARKS
NOTE_KINDS: Final = tombstones.KINDS
"""The second labels: quarantine, tombstones, the counter of changes, watermarks."""
INSTRUCTIONS: Final = tombstones.INSTRUCTIONS
PREVIOUS: Final = tombstones.PREVIOUS
AUTHOR: Final = tombstones.AUTHOR
WITHOUT_AUTHOR: Final = tombstones.UNNAMED
SOURCE: Final = tombstones.SOURCE
HASHED_ID_PREFIX: Final = "unnamed-"
"""The beginning of the id that a message without one is given: a hash of its text."""
_MAX_PREVIOUS_TEXTS: Final = 10  # earlier texts that a memory keeps
_PAGE_SIZE: Final = 1_000  # memories read at once
_COMMON_SEARCH_OPTIONS: Final = (
    "query",
    "filter",
    "limit",
    "offset",
)  # options of any store's search


@dataclass(frozen=True, slots=True)
class Previous:
    """An earlier text of a memory, which it had until `until` (UTC).

    `change` is `"superseded"`, it was true, or `"updated"`, it was wrong or badly put;
    `message_ids` are the messages that it rested on, if known.
    """

    text: str
    until: datetime
    change: str
    message_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory as it is kept in a store.

    Attributes:
        kind: `"fact"`, `"turn"`, `"episode"`, or a kind of your own.
        value: The whole document: `text`, `kind` and all other fields.
        version: Counts its changes, from 1; None: the store keeps no versions.
        valid_from, valid_to: When it has this text (UTC); `valid_to` is None while it is present.
        previous: Its earlier texts, newest first.
        score, parts: How well it answers a query, and the parts whose sum that is, by name.
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
    """A text that may become a memory, if the gate lets it pass."""

    text: str
    kind: str = FACT
    fields: Mapping[str, Any] = field(default_factory=dict)
    provenance: Provenance | None = None
    role: Role = "user"  # whose words it rests on
    explicit: bool = False  # whether somebody asked for it, by a tool or by hand
    by_model: bool = False  # whether a model asked for it, by a tool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's decision on a candidate: keep it, put it into quarantine, or refuse it."""

    action: Action
    reason: str = ""  # "": it is kept as it is
    check: str = ""  # the one that decided
    text: str | None = None  # to keep instead of the candidate's
    same_as: str | None = None  # the key of the memory that says the same
    fields: Mapping[str, Any] | None = None  # to keep instead of the candidate's


KEEP: Final = Verdict("keep")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a change to memories; `"unchanged"`: the memory was there already.

    `key` is that of the memory, or of the entry in quarantine. `reason` says why it was not done as
    asked, and `check` which check of the gate decided.
    """

    change: Change
    key: str | None = None
    reason: str = ""
    check: str = ""

    def __str__(self) -> str:
        about = f" {self.key}" if self.key else ""
        return f"{self.change}{about}" + (f": {self.reason}" if self.reason else "")


def render_memory_line(memory: Any, *, date: str | None = None) -> str:
    """Return a memory, item, text or JSON object as one line, with speaker, date and thread.

    `date` is shown in place of the day of a memory.
    """
    if isinstance(memory, Item):
        value = memory.value
        body = value["text"] if set(value) == {"text"} else value
        team = _get_team(memory.namespace)
        return _render_line(body, getattr(memory, "provenance", None), memory.created_at, team=team)
    if not isinstance(memory, Memory):
        return to_prompt_json(memory)
    earlier_texts = [
        {"memory": previous.text, "until": _format_day(previous.until)}
        for previous in memory.previous[:1]
        if previous.change == "superseded"  # an updated text was not true
    ]
    source, until = memory.provenance, find_end_of_validity(memory)
    fields = {key: part for key, part in memory.value.items() if key not in _FIELDS_SHOWN_ELSEWHERE}
    filled_fields = {key: part for key, part in fields.items() if part is not None}
    body = filled_fields or memory.text if memory.kind == EPISODE else memory.text
    team = _get_team(memory.namespace)
    return _render_line(body, source, memory.valid_from, until, earlier_texts, date, team)


def format_dates(memories: Sequence[Memory]) -> list[str | None]:
    """Return the date of each memory: its day, or a time (UTC) if others have the same day.

    The time has minutes, and seconds or milliseconds if memories would have the same time.
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
    """When a memory ceased to be true, as its field `until` says; None: it is present."""
    until = memory.value.get("until")
    try:
        return datetime.fromisoformat(until) if isinstance(until, str) else None
    except ValueError:
        return None


def _render_line(
    body: Any,
    provenance: Any,
    default_time: Any,
    until: datetime | None = None,
    earlier_texts: Sequence[Any] = (),
    date: str | None = None,
    team: str | None = None,
) -> str:
    actor, author = getattr(provenance, "actor", None), getattr(provenance, "author", None)
    trust, said_at = (
        getattr(provenance, "trust", None),
        getattr(provenance, "at", None) or default_time,
    )
    if team is not None and trust == "user":  # "the user" would be whoever asks
        actor = author or "a member of the team"
    names_speaker = isinstance(body, str) and body.startswith(
        f"{actor}:"
    )  # as in the text of a turn
    details: Mapping[str, Any] = {
        "said_by": None if names_speaker else actor,
        "trust": None if trust == actor else trust,
        "on": date or _format_day(said_at),
        "until": _format_day(until),
        "thread": getattr(provenance, "thread_id", None),
        "before": earlier_texts,
        "team": team,
        "noted_for": None if author == actor else author,
    }
    return to_prompt_json(
        {"memory": body, **{name: part for name, part in details.items() if part}}
    )


def _get_team(namespace: Sequence[str]) -> str | None:
    """Return the team to whose memory a namespace belongs, or None."""
    return namespace[1] if tuple(namespace[:1]) == (TEAMS,) and len(namespace) > 1 else None


def _format_utc(when: datetime, timespec: str) -> str:
    """Return a moment in ISO 8601, for example `2026-01-31T09:30Z`."""
    return when.astimezone(UTC).replace(tzinfo=None).isoformat(timespec=timespec) + "Z"


def _format_day(when: datetime | None) -> str | None:
    return None if when is None else when.date().isoformat()


_PROVENANCE_ADAPTER: Final = TypeAdapter(Provenance)
_PREVIOUS_TEXTS_ADAPTER: Final = TypeAdapter(tuple[Previous, ...])


class StoreAdapter:
    """Any langgraph store, for memories. Its methods are effects.

    Its reads of a perdure store do not refresh times to live, because many of them only compare
    memories or find more than is shown. `keep_alive` refreshes the memories that are shown.

    Args:
        store: The store.
        templates: Templates of the namespaces that are used; see `record_templates`.
    """

    def __init__(self, store: Any, *templates: Template) -> None:
        expected = "a BaseStore, like perdure.stores.SQLiteStore.open(path)"
        self.store: Any = check_instance("store", store, BaseStore, expected)
        self._templates = templates
        self.versioned = isinstance(store, Versioned)
        self._expiring = set[tuple[Namespace, str]]()  # items with a time to live that were read

    def call(self, method: str, *args: Any, **options: Any) -> Effect[Any]:
        """The effect of a method of the store."""
        return call_method(self.store, method, *args, **options)

    async def get(
        self, namespace: Namespace, key: str, as_of: datetime | None = None
    ) -> Memory | None:
        """A memory, if there is one."""
        item = await self.call(
            "get", namespace, key, **self._no_refresh_options(), **self._as_of_options(as_of)
        )
        if item is None:
            return None
        self._note_expiring([item])
        return memory_from_item(item)

    def resolve_min_score(self, min_score: float | None) -> float:
        """The lowest score of an answer, 0 for any; None: the default.

        A store that is not perdure's has no default: its scores are cosines, or none.
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
        """Memories under a prefix, not below the floor; `asked` are options of `Store.search`."""
        search_options |= {"min_score": min_score} if min_score else {}
        options = {
            n: v for n, v in search_options.items() if self.versioned or n in _COMMON_SEARCH_OPTIONS
        }
        options |= self._no_refresh_options() | self._as_of_options(as_of)
        items = await self.call("search", prefix, **options)
        self._note_expiring(items)
        return [
            memory
            for memory in map(memory_from_item, items)
            if not is_below_min_score(memory, min_score)
        ]

    async def keep_alive(self, memories: Iterable[Memory]) -> None:
        """Restart the time to live of memories, unless the store is configured otherwise.

        The memories must be present versions that this adapter has read.
        """
        item_keys = dict.fromkeys((memory.namespace, memory.key) for memory in memories)
        ops = [GetOp(*item_key) for item_key in item_keys if item_key in self._expiring]
        if ops:
            await self.call("batch", ops)

    async def list_memories(self, namespace: Namespace, **search_options: Any) -> list[Memory]:
        """All memories of a namespace, without those below it; see `found`."""
        memories: list[Memory] = []
        while True:
            page = await self.search(
                namespace, limit=_PAGE_SIZE, offset=len(memories), **search_options
            )
            memories += page
            if len(page) < _PAGE_SIZE:
                return [memory for memory in memories if memory.namespace == namespace]

    async def list_versions(self, namespace: Namespace, key: str) -> list[Memory]:
        """All versions of a memory, oldest first; of a store without any, the present one."""
        if not self.versioned:
            present = await self.get(namespace, key)
            return [] if present is None else [present]
        items = await self.call("history", namespace, key)
        return [memory_from_item(item) for item in items]

    async def write(self, puts: Sequence[PutItem]) -> None:
        """Write all of it or, in a store with versions, nothing: then a `VersionConflict`."""
        if puts:
            await self.record_templates()
            await self.call(
                "batch", list(puts) if self.versioned else [_to_plain_put(p) for p in puts]
            )

    async def record_templates(self) -> None:
        """Record the templates of this adapter in the store, at their first use there."""
        if self._templates:
            await record_templates(self.store, self._templates)

    async def namespaces_with(self, label: str) -> list[Namespace]:
        """Return the namespaces that have a label, including those with only closed versions."""
        if self.versioned:
            return await self.call("find_namespaces", label)  # type: ignore[no-any-return]
        namespaces = await self.call("list_namespaces", limit=sys.maxsize)
        return [tuple(namespace) for namespace in namespaces if label in namespace]

    async def namespaces_under(self, prefix: Namespace) -> list[Namespace]:
        """Return the namespaces under a prefix, including those with only closed versions."""
        namespaces = await self.namespaces_with(prefix[0])
        return [namespace for namespace in namespaces if namespace[: len(prefix)] == prefix]

    async def items_under(self, prefix: Namespace) -> list[Item]:
        """Return the present items under a prefix."""
        items: list[Item] = []
        while True:
            page = await self.call(
                "search", prefix, limit=_PAGE_SIZE, offset=len(items), **self._no_refresh_options()
            )
            items += page
            if len(page) < _PAGE_SIZE:
                return items

    def _no_refresh_options(self) -> dict[str, Any]:
        return {"refresh_ttl": False} if self.versioned else {}

    def _note_expiring(self, items: Iterable[Item]) -> None:
        self._expiring.update(
            (tuple(item.namespace), item.key)
            for item in items
            if getattr(item, "expires_at", None) is not None
        )

    def _as_of_options(self, as_of: datetime | None) -> dict[str, Any]:
        if as_of is None:
            return {}
        check_instance(
            "store", self.store, Versioned, "perdure's for as_of=; another keeps no past"
        )
        return {"as_of": as_of}


def is_below_min_score(memory: Memory, min_score: float) -> bool:
    """Whether a memory scores less than a floor, 0 for none; one without a score does not."""
    return bool(min_score) and memory.score is not None and memory.score < min_score


class ChangePlan(NamedTuple):
    """Puts, and the outcome of each part of what was proposed once they are written."""

    puts: Sequence[PutItem] = ()
    outcomes: Sequence[Outcome] = ()


class ItemHandle(NamedTuple):
    """The place of an item, and where a change to it comes from."""

    adapter: StoreAdapter
    namespace: Namespace
    key: str
    provenance: Provenance | None = None
    user_texts: Sequence[str] | None = (
        None  # the users' texts a change rests on; None: it is by hand
    )

    def read(self, as_of: datetime | None = None) -> Operation[Memory | None]:
        """The item, now or at a moment, if there is one."""
        return self.adapter.get(self.namespace, self.key, as_of)

    def list_versions(self) -> Operation[list[Memory]]:
        """All versions of the item, oldest first."""
        return self.adapter.list_versions(self.namespace, self.key)

    def build_put(
        self, value: Mapping[str, Any], searched_field: str, if_version: int | None
    ) -> PutItem:
        """The operation that writes it, to be found by one field, if it is at this version."""
        version = if_version if self.adapter.versioned else None
        # it does not expire, whatever the store's default
        options: Any = {"ttl": None, "if_version": version, "provenance": self.provenance}
        return PutItem(self.namespace, self.key, value, [searched_field], **options)


def get_adapter(store: BaseStore | None, *templates: Template) -> StoreAdapter:
    """The adapter of a store; None: within a graph, of the store it was compiled with."""
    return StoreAdapter(get_graph_store("the memories") if store is None else store, *templates)


def fill_namespace(template: Template, config: RunnableConfig | None) -> Namespace:
    """The namespace of a run's memories; see `check_filled`."""
    return check_filled_namespace(template, template.fill(config))


def fill_namespaces(template: Template, config: RunnableConfig | None) -> list[Namespace]:
    """Return the namespaces of a run's memories: of a team's template, one for each team."""
    return [
        check_filled_namespace(template, namespace) for namespace in template.fill_for_teams(config)
    ]


def check_filled_namespace(template: Template, namespace: Namespace) -> Namespace:
    """Check the first label of a namespace that a template was filled in to be, and return it.

    Raises:
        InvalidNamespace: It is that of perdure's own notes, or that of teams, which the template
            does not name.
    """
    if namespace[0] == TEAMS and not template.is_team:
        raise InvalidNamespace(
            f"the namespace {namespace!r} begins with {TEAMS!r}, where teams keep their memories; "
            f"expected another value for the first label of {template.labels!r}"
        )
    if namespace[0] == RESERVED_LABEL:
        raise InvalidNamespace(
            f"the namespace {namespace!r} begins with {RESERVED_LABEL!r}, where perdure keeps its "
            "own notes; expected another first label, like 'memories'"
        )
    return namespace


def build_notes_namespace(kind: str, namespace: Namespace) -> Namespace:
    """The namespace of the notes of one kind, see `NOTES`, on the memories of a namespace."""
    return (RESERVED_LABEL, kind, *namespace)


def build_put(
    namespace: Namespace,
    key: str,
    value: Mapping[str, Any],
    *,
    provenance: Provenance | None = None,
    if_version: int | None = None,
    is_searched: bool = True,
) -> PutItem:
    """The put of a memory, or with `searched=False` one that no query finds."""
    index: Any = ["text"] if is_searched else False
    return PutItem(namespace, key, value, index, if_version=if_version, provenance=provenance)


def build_note_put(
    namespace: Namespace, key: str, value: Mapping[str, Any], *, if_version: int | None = None
) -> PutItem:
    """The operation that writes a note of perdure's own: not searched, and without expiry."""
    put = build_put(namespace, key, value, if_version=if_version, is_searched=False)
    return replace(put, ttl=None)


def build_removal(namespace: Namespace, key: str, if_version: int | None = None) -> PutItem:
    """The operation that deletes a memory; a store with versions keeps its past."""
    return PutItem(namespace, key, None, if_version=if_version)


def build_next_value(
    previous: Memory, value: Mapping[str, Any], change: str, until: datetime | None = None
) -> dict[str, Any]:
    """The value of a memory's next version, which lists the previous text if that differs."""
    previous_texts = list(previous.value.get(PREVIOUS, ()))
    if value["text"] != previous.text:
        ended_at = (until or datetime.now(UTC)).isoformat()
        entry: dict[str, Any] = {"text": previous.text, "digest": hash_normal_form(previous.text)}
        entry |= {"until": ended_at, "change": change}
        if previous.provenance is not None and previous.provenance.message_ids:
            entry["message_ids"] = list(previous.provenance.message_ids)
        if previous.provenance is not None and previous.provenance.author is not None:
            entry[AUTHOR] = previous.provenance.author
        previous_texts = [entry, *previous_texts][:_MAX_PREVIOUS_TEXTS]
    return {**value, PREVIOUS: previous_texts} if previous_texts else dict(value)


def build_previous_text_filter(text: str) -> dict[str, Any]:
    """The filter for memories of which a previous text is the same as this one."""
    # whether the field exists is asked first: that takes a tenth of the time
    return {PREVIOUS: {"$exists": True}, f"{PREVIOUS}[*].digest": hash_normal_form(text)}


def memory_from_item(item: Item) -> Memory:
    """The memory in an item of any store."""
    value = dict(item.value)
    provenance: Provenance | None = getattr(item, "provenance", None)
    if provenance is None and (stored := value.pop(SOURCE, None)):
        provenance = _PROVENANCE_ADAPTER.validate_python(stored)
    kind = value.get("kind", "")
    if not isinstance(value.get("text"), str) and isinstance(value.get(INSTRUCTIONS), str):
        kind = "instructions"
    optional_fields = ("version", "valid_to", "score", "parts")
    return Memory(
        tuple(item.namespace),
        item.key,
        tombstones.extract_text(value),
        str(kind),
        value,
        provenance,
        valid_from=getattr(item, "valid_from", item.updated_at),
        previous=_PREVIOUS_TEXTS_ADAPTER.validate_python(value.get(PREVIOUS) or ()),
        **{name: getattr(item, name, None) for name in optional_fields},
    )


def _to_plain_put(put: PutItem) -> PutOp:
    value = None if put.value is None else dict(put.value)
    if value is not None and put.provenance is not None:
        value[SOURCE] = _PROVENANCE_ADAPTER.dump_python(
            put.provenance, mode="json", exclude_defaults=True
        )
    return PutOp(put.namespace, put.key, value, put.index)
