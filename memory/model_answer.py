"""The answer of a model that extracts memories, and the proposal that is made of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from perdure.errors import InvalidPatch, VersionConflict
from perdure.memory.effects import Effects
from perdure.memory.gate import Gate
from perdure.memory.instructions import LONGEST, Instructions, replacing
from perdure.memory.model_call import InvalidAnswer
from perdure.memory.profile import ProfileState
from perdure.memory.profile_patch import Document
from perdure.memory.proposals import Addition, Batch, Plan, Planned, Proposal, Revision, Scope
from perdure.memory.records import EPISODE, FACT, Candidate, Memory, Outcome
from perdure.memory.sameness import normal
from perdure.memory.store_adapter import INSTRUCTIONS
from perdure.memory.thread_messages import ThreadMessage, storable

CHANGED: Final = "changed"  # the check of an outcome: another run changed the same fields
_MOST: Final = 200  # entries of a list: more is a model that repeats itself
_WISH_CHARS: Final = 400


def _strict(schema: Document) -> None:
    properties = schema.get("properties", {})
    schema.update(required=list(properties), additionalProperties=False)
    for each in properties.values():
        each.pop("default", None)


class _Part(BaseModel):
    # parsed leniently: not every model decodes strictly
    model_config = ConfigDict(json_schema_extra=_strict)


class FactChange(_Part):
    """One change to the memories."""

    action: Literal["insert", "update", "supersede", "delete"] = Field(
        description="insert a new memory; update one that was wrong or badly put; supersede one "
        "that was true and is no longer; delete one that is no longer to be kept"
    )
    memory: str | None = Field(None, description="the name of the memory that changes, like m3")
    text: str | None = Field(None, description="one fact, which can be understood alone")
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
    messages: list[int] = Field([], description="the numbers of the user's messages that say so")

    def operation(self) -> Document:
        """The operation by the RFC; a value that is no JSON is text."""
        out: Document = {"op": self.op, "path": self.path}
        if self.origin is not None:
            out["from"] = self.origin
        if self.value is not None:
            try:
                text = json.dumps(json.loads(self.value), ensure_ascii=False)
                out["value"] = json.loads(storable(text))  # what was escaped may not be storable
            except (ValueError, RecursionError):  # models leave out the quotes
                out["value"] = storable(self.value)
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
    messages: list[int] = Field([], description="the numbers of the user's messages that say so")


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
    """The answer in such a form; an `InvalidAnswer` if it has no part, or one is too long."""
    parts = {name: getattr(parsed, name) for name in type(parsed).model_fields}
    if not parsed.model_fields_set:
        raise InvalidAnswer(f"the answer has none of {', '.join(parts)}")
    for name, entries in parts.items():
        if len(entries) > _MOST:
            raise InvalidAnswer(f"{name} has {len(entries)} entries; at most {_MOST} are allowed")
    return Answer(**parts)


def memories_of(answer: Answer, batch: Batch, shown: Mapping[str, Memory]) -> Proposal:
    """The proposed facts and episodes; only the memories that were shown can be changed."""
    additions: dict[str, Addition] = {}
    revisions: dict[str, Revision] = {}
    outcomes: list[Outcome] = []
    changes: list[FactChange | EpisodeFound] = [*answer.facts, *answer.episodes]
    for each in changes:
        try:
            found = _proposed(each, batch, shown)
        except InvalidPatch as exc:
            outcomes.append(_refused(str(exc)))
            continue
        if isinstance(found, Addition):
            additions[found.key] = found
        elif found.key in revisions:
            outcomes.append(_refused("changes a memory that was changed already", found.key))
        else:
            revisions[found.key] = found
    return Proposal(list(additions.values()), list(revisions.values()), outcomes=outcomes)


def _proposed(
    change: FactChange | EpisodeFound, batch: Batch, shown: Mapping[str, Memory]
) -> Addition | Revision:
    messages = _numbered(change.messages, batch)
    if not messages:
        raise InvalidPatch("names no message that it rests on")
    if isinstance(change, EpisodeFound):
        texts = {name: storable(getattr(change, name)) for name in ("input", "outcome", "why")}
        if not texts["input"] or not texts["outcome"]:
            raise InvalidPatch("is an episode without its beginning or its end")
        return _addition(batch.candidate(messages, texts["input"], EPISODE, **texts))
    text = storable(change.text or "")
    if not text and change.action != "delete":
        raise InvalidPatch(f"is to {change.action} a memory and has no text")
    fields = {name: storable(getattr(change, name) or "") for name in ("about", "when")}
    given = {name: part for name, part in fields.items() if part}
    candidate = batch.candidate(messages, text, FACT, **given)
    if change.action == "insert":
        return _addition(candidate)
    memory = shown.get(change.memory or "")
    if memory is None:
        raise InvalidPatch(f"names the memory {change.memory!r:.40}, which it was not shown")
    kind: Any = f"{change.action}d"
    return Revision(memory.key, kind, candidate)


def _addition(candidate: Candidate) -> Addition:
    source = candidate.provenance
    assert source is not None  # `Batch.candidate` gives one
    parts = "\0".join((source.thread_id or "", *source.message_ids, candidate.text))
    digest = blake2b(parts.encode("utf-8", "surrogatepass"), digest_size=10)
    return Addition(f"{candidate.kind}-{digest.hexdigest()}", candidate)


def _numbered(numbers: Iterable[int], batch: Batch, role: str = "") -> list[ThreadMessage]:
    """The messages with these numbers, of a role if one is given."""
    wanted = {*numbers}
    named = [each for number, each in enumerate(batch.messages, 1) if number in wanted]
    return [each for each in named if role in ("", each.role)]


def _refused(reason: str, key: str | None = None) -> Outcome:
    return Outcome("refused", key, f"the operation {reason}", "model")


def patched_profile(
    known: ProfileState[Any], changes: Sequence[ProfileChange], batch: Batch, scope: Scope
) -> Effects[Planned]:
    """The puts of a patch; InvalidPatch if an operation names no message of a user."""
    messages: dict[str, ThreadMessage] = {}
    for number, each in enumerate(changes, 1):
        users = {one.id: one for one in _numbered(each.messages, batch, "user")}
        messages |= users
        what = f"operation {number}, {each.op} {each.path!r:.200},"
        if each.profile not in ("", known.name):
            raise InvalidPatch(f"{what} names the profile {each.profile!r:.80}, which is not there")
        if not users:
            raise InvalidPatch(
                f"{what} names no message of a user that says so; leave out what only the "
                "assistant or a tool says"
            )
    told = list(messages.values())
    place = known.owner.place(scope.config)
    place = place._replace(provenance=batch.source(told), told=[each.text for each in told])
    operations = [each.operation() for each in changes]
    puts = yield from known.owner.planning(place, operations, known.document)
    return Planned(puts, [Outcome("updated" if puts else "unchanged", place.key)])


def profile_plan(
    known: ProfileState[Any], changes: Sequence[ProfileChange], batch: Batch, scope: Scope
) -> Plan:
    """The plan of a patch; an invalid patch becomes a refusal."""

    def plan(_: Gate) -> Effects[Planned]:  # a profile has its own gate
        try:
            return (yield from patched_profile(known, changes, batch, scope))
        except (InvalidPatch, VersionConflict) as exc:
            check = "profile" if isinstance(exc, InvalidPatch) else CHANGED
            return Planned(outcomes=[Outcome("refused", known.name, f"{exc!s:.300}", check)])

    return plan


def instructions_plan(
    instructions: Instructions, wishes: Sequence[Wish], batch: Batch, scope: Scope
) -> Plan:
    """The plan that adds wishes of users to instructions, one line each."""
    wanted: list[Candidate] = []
    refused: list[Outcome] = []
    for wish in wishes:
        line = " ".join(storable(wish.text).split())
        users = _numbered(wish.messages, batch, "user")
        if not users:
            refused.append(_refused("adds an instruction that no user asked for"))
        elif not 0 < len(line) <= _WISH_CHARS:
            refused.append(_refused(f"adds an instruction of {len(line)} characters"))
        else:
            # the model judged that it is a lasting wish; the gate looks for secrets in it
            wanted.append(replace(batch.candidate(users, line, INSTRUCTIONS), explicit=True))

    def plan(gate: Gate) -> Effects[Planned]:
        place = instructions.place(scope.config)
        previous = yield from instructions.reading(place)
        verdicts = yield from gate.judge(wanted, scope.adapter, scope.namespace)
        text, source, outcomes = previous.text.rstrip(), None, [*refused]
        for wish, verdict in zip(wanted, verdicts, strict=True):
            line = verdict.text or wish.text
            if normal(line) in normal(text):
                continue
            # an instruction may repeat a memory
            if verdict.action != "keep" and verdict.same_as is None:
                outcomes.append(Outcome("refused", None, verdict.reason, verdict.check))
            elif len(text) + len(line) > LONGEST:
                outcomes.append(_refused("would make the instructions too long"))
            else:
                text, source = f"{text}\n- {line}", wish.provenance
                outcomes.append(Outcome("updated", place.key))
        put = replacing(place._replace(provenance=source), previous, text, "update")
        return Planned([put] if source else [], outcomes)

    return plan
