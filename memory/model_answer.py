"""What a model answers when it extracts memories, and the proposal that is made of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator

from perdure.errors import InvalidPatch, VersionConflict
from perdure.memory.effects import Effects
from perdure.memory.gate import Gate
from perdure.memory.instructions import TEXT, Instructions, noted
from perdure.memory.profile import Profile, ProfileState
from perdure.memory.profile_patch import Document
from perdure.memory.profile_rules import Origin
from perdure.memory.proposals import (
    Addition,
    Alteration,
    Batch,
    Plan,
    Planned,
    Proposal,
    Revision,
    Scope,
)
from perdure.memory.records import EPISODE, FACT, Candidate, Memory, Outcome
from perdure.memory.thread_messages import ThreadMessage, storable
from perdure.stores.base import PutItem

CHECK: Final = "model"
"""The check of an outcome where what the model asked for makes no sense."""
CHANGED: Final = "changed"
"""The check of an outcome where another run changed the same fields of a profile."""
_MOST: Final = 200  # entries of a list: more is a model that has lost its way
_INSTRUCTIONS_CHARS: Final = 20_000
_WISH_CHARS: Final = 400
_CHANGES: Final[Mapping[str, Alteration]] = {
    "update": "updated",
    "supersede": "superseded",
    "delete": "deleted",
}


def _strict(schema: Document) -> None:
    """Strict decoding wants every field required, no defaults and no other fields."""
    properties = schema.get("properties", {})
    schema.update(required=list(properties), additionalProperties=False)
    for each in properties.values():
        each.pop("default", None)


class _Part(BaseModel):
    # lenient where it is read: not every model decodes strictly
    model_config = ConfigDict(json_schema_extra=_strict)


class FactChange(_Part):
    """One change to the memories."""

    action: Literal["insert", "update", "supersede", "delete"] = Field(
        description="insert a new memory; update one that was wrong or badly put; supersede one "
        "that was true and is no longer; delete one that is no longer to be kept"
    )
    memory: str | None = Field(
        None, description="the memory to update, supersede or delete, by its name, like m3"
    )
    text: str | None = Field(
        None, description="what the memory is to say: one fact, which can be understood alone"
    )
    about: str | None = Field(None, description="whom or what it is about, in a word or two")
    when: str | None = Field(None, description="when it happened or since when it holds, as a date")
    messages: list[int] = Field([], description="the numbers of the messages that say so")


class ProfileChange(_Part):
    """An operation of a JSON Patch (RFC 6902) of the profile."""

    profile: str = Field("", description="the name of the profile")
    op: Literal["add", "replace", "remove", "move", "copy", "test"]
    path: str = Field(
        description='a JSON pointer: "/home/city"; "/likes/0" is the first of a list, "/likes/-" '
        'adds at its end; within a name "~1" stands for "/" and "~0" for "~"'
    )
    origin: str | None = Field(None, alias="from", description="where a move or copy takes it from")
    value: str | None = Field(
        None,
        description='the value as JSON text: "\\"Ghent\\"", "3", "[\\"tea\\"]", "null"; null for '
        "an operation without one",
    )
    reason: str = Field("", description="what the user says, in a few words")
    messages: list[int] = Field(
        [], description="the numbers of the messages in which the user says so"
    )

    @field_validator("value", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return value if value is None or isinstance(value, str) else json.dumps(value)

    def operation(self) -> Document:
        """The operation by the RFC; a path lacks no slash then, and text is JSON."""
        paths = {"path": self.path, "from": self.origin}
        out: Document = {"op": self.op, "reason": self.reason}
        for name, path in paths.items():
            if path is not None:
                out[name] = path if path[:1] in ("", "/") else f"/{path}"
        if self.value is not None:
            try:
                out["value"] = json.loads(self.value)
            except (ValueError, RecursionError):
                out["value"] = self.value  # text without quotes of its own
        return out


class EpisodeFound(_Part):
    """Something the assistant was asked to do, and how that went."""

    input: str = Field(description="what was asked, so that it can be understood alone")
    outcome: str = Field(description="what was done, and how that turned out")
    why: str = Field(description="why it turned out so, and what to do the next time")
    messages: list[int] = Field([], description="the numbers of its messages")


class Wish(_Part):
    """A lasting wish of the user on how the assistant should behave."""

    text: str = Field(description="the wish, as one instruction to the assistant")
    messages: list[int] = Field(
        [], description="the numbers of the messages in which the user says so"
    )


class Answer(_Part):
    """What of the conversation is to be kept."""

    facts: list[FactChange] = []
    profile: list[ProfileChange] = []
    episodes: list[EpisodeFound] = []
    instructions: list[Wish] = []


def answer_form(parts: Iterable[str]) -> type[BaseModel]:
    """The schema of an answer that has these parts."""
    fields: dict[str, Any] = {
        name: (info.annotation, info) for name, info in Answer.model_fields.items() if name in parts
    }
    return create_model("Memories", __base__=_Part, __doc__=Answer.__doc__, **fields)


def answer_of(parsed: BaseModel) -> Answer:
    """The answer in such a form.

    Raises:
        InvalidPatch: A list in it is too long to be meant.
    """
    if not parsed.model_fields_set:
        raise InvalidPatch(f"the answer has none of {', '.join(type(parsed).model_fields)}")
    parts = {name: getattr(parsed, name) for name in type(parsed).model_fields}
    for name, entries in parts.items():
        if len(entries) > _MOST:
            raise InvalidPatch(f"{name} has {len(entries)} entries; at most {_MOST} are allowed")
    return Answer(**parts)


@dataclass(frozen=True, slots=True)
class KnownProfile:
    """A profile as a model is shown it.

    Attributes:
        name: What the model calls it.
        profile: The profile.
        state: What is stored of it.
    """

    name: str
    profile: Profile[Any]
    state: ProfileState[Any]


# -- facts and episodes


def memories_of(answer: Answer, batch: Batch, shown: Mapping[str, Memory]) -> Proposal:
    """What an answer proposes of facts and episodes.

    Args:
        answer: The model's.
        batch: The messages, which it names by their numbers from 1.
        shown: The memories that it may change, by the names it was shown.
    """
    additions: dict[str, Addition] = {}
    revisions: dict[str, Revision] = {}
    outcomes: list[Outcome] = []
    for each in [*answer.facts, *answer.episodes]:
        found = _fact(each, batch, shown) if isinstance(each, FactChange) else _episode(each, batch)
        if isinstance(found, Outcome):
            outcomes.append(found)
        elif isinstance(found, Addition):
            additions[found.key] = found
        elif found.key in revisions:
            outcomes.append(_refused("changes a memory that was changed already", found.key))
        else:
            revisions[found.key] = found
    return Proposal(list(additions.values()), list(revisions.values()), outcomes=outcomes)


def _fact(
    fact: FactChange, batch: Batch, shown: Mapping[str, Memory]
) -> Addition | Revision | Outcome:
    messages, text = _numbered(fact.messages, batch), storable(fact.text or "")
    if not messages:
        return _refused("names no message that it rests on")
    if not text and fact.action != "delete":
        return _refused(f"is to {fact.action} a memory and has no text")
    named = {"about": storable(fact.about or ""), "when": storable(fact.when or "")}
    fields = {name: part for name, part in named.items() if part}
    candidate = batch.candidate(messages, text, FACT, **fields)
    if fact.action == "insert":
        return Addition(_key(candidate), candidate)
    memory = shown.get(fact.memory or "")
    if memory is None:
        return _refused(f"names the memory {fact.memory!r:.40}, which it was not shown")
    return Revision(memory.key, _CHANGES[fact.action], candidate)


def _episode(episode: EpisodeFound, batch: Batch) -> Addition | Outcome:
    messages = _numbered(episode.messages, batch)
    texts = {name: storable(getattr(episode, name)) for name in ("input", "outcome", "why")}
    if not messages:
        return _refused("names no message that it rests on")
    if not texts["input"] or not texts["outcome"]:
        return _refused("is an episode without its beginning or its end")
    candidate = batch.candidate(messages, texts["input"], EPISODE, **texts)
    return Addition(_key(candidate), candidate)


def _key(candidate: Candidate) -> str:
    """The same for the same words on the same messages, so that they are one memory."""
    source = candidate.provenance
    assert source is not None  # what rests on messages has one
    parts: Sequence[str] = (source.thread_id or "", *source.message_ids, candidate.text)
    digest = blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=10)
    return f"{candidate.kind}-{digest.hexdigest()}"


def _numbered(numbers: Iterable[int], batch: Batch) -> list[ThreadMessage]:
    wanted = set(numbers)
    return [each for number, each in enumerate(batch.messages, 1) if number in wanted]


def _by_users(numbers: Iterable[int], batch: Batch) -> list[ThreadMessage]:
    return [each for each in _numbered(numbers, batch) if each.role == "user"]


def _refused(reason: str, key: str | None = None) -> Outcome:
    return Outcome("refused", key, f"the operation {reason}", CHECK)


# -- profiles


def patched_profile(
    known: KnownProfile, changes: Sequence[ProfileChange], batch: Batch, scope: Scope
) -> Effects[Planned]:
    """What is written of a patch, all of it or nothing.

    Raises:
        InvalidPatch: It cannot be applied, the schema or the gate refuses it, or an operation rests
            on no message of a user.
        VersionConflict: See `Profile.planning`.
    """
    messages: list[ThreadMessage] = []
    for number, each in enumerate(changes, 1):
        users = _by_users(each.messages, batch)
        if not users:
            raise InvalidPatch(
                f"operation {number}, {each.op} {each.path!r:.200}, names no message of a user "
                "that says so; leave out what only the assistant or a tool says"
            )
        messages += [one for one in users if one not in messages]
    told = tuple(each.text for each in messages)
    place = known.profile.place(scope.config, Origin(batch.source(messages), told))
    operations = [each.operation() for each in changes]
    puts = yield from known.profile.planning(place, operations, known.state.document)
    return Planned(puts, [Outcome("updated" if puts else "unchanged", place.key)])


def profile_plan(
    known: KnownProfile,
    changes: Sequence[ProfileChange],
    batch: Batch,
    scope: Scope,
) -> Plan:
    """The plan of a patch; one that is not possible becomes a refusal."""

    def plan(_: Gate) -> Effects[Planned]:  # a profile has its own, whoever changes it
        try:
            return (yield from patched_profile(known, changes, batch, scope))
        except (InvalidPatch, VersionConflict) as exc:
            check = "profile" if isinstance(exc, InvalidPatch) else CHANGED
            return Planned(outcomes=[Outcome("refused", known.name, f"{exc!s:.300}", check)])

    return plan


# -- instructions


def instructions_plan(
    instructions: Instructions, wishes: Sequence[Wish], batch: Batch, scope: Scope
) -> Plan:
    """The plan that adds wishes of users to instructions, a line each."""

    def plan(gate: Gate) -> Effects[Planned]:
        place = instructions.place(scope.config)
        previous = yield from instructions.reading(place)
        wanted, outcomes = _wished(wishes, batch)
        wanted = [each for each in wanted if _plain(each.text) not in _plain(previous.text)]
        verdicts = yield from gate.judge(wanted, scope.adapter, scope.namespace)
        kept: list[Candidate] = []
        text = previous.text.rstrip()
        for wish, verdict in zip(wanted, verdicts, strict=True):
            line = verdict.text or wish.text
            # that a memory says the same is no reason against an instruction
            if verdict.action != "keep" and verdict.same_as is None:
                outcomes.append(Outcome("refused", None, verdict.reason, verdict.check))
            elif len(text) + len(line) > _INSTRUCTIONS_CHARS:
                outcomes.append(_refused("would make the instructions too long"))
            else:
                text += f"\n- {line}"
                kept.append(wish)
                outcomes.append(Outcome("updated", place.key))
        if not kept:
            return Planned(outcomes=outcomes)
        put = PutItem(
            place.namespace,
            place.key,
            noted(previous.text, text, "update"),
            [TEXT],
            ttl=None,
            if_version=previous.version,
            provenance=kept[-1].provenance,
        )
        return Planned([put], outcomes)

    return plan


def _wished(wishes: Sequence[Wish], batch: Batch) -> tuple[list[Candidate], list[Outcome]]:
    """The wishes of users, each once; and the outcomes of the others."""
    found: dict[str, Candidate] = {}
    outcomes: list[Outcome] = []
    for wish in wishes:
        text = " ".join(storable(wish.text).split())
        users = _by_users(wish.messages, batch)
        if not users:
            outcomes.append(_refused("adds an instruction that no user asked for"))
        elif not text or len(text) > _WISH_CHARS:
            outcomes.append(_refused(f"adds an instruction of {len(text)} characters"))
        else:
            candidate = replace(batch.candidate(users, text, "instructions"), explicit=True)
            found.setdefault(_plain(text), candidate)
    return list(found.values()), outcomes


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".!")
