"""What a model's answer changes beside memories: the profile, and the agent's instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from perdure.errors import ConfigurationError, InvalidPatch, InvalidValue
from perdure.memory.effects import Effects
from perdure.memory.forming.answers import Answer, Suggestion
from perdure.memory.forming.prompting import Shown
from perdure.memory.forming.sorting import numbered, refused
from perdure.memory.gate import Gate
from perdure.memory.instructions import TEXT, Instructions, noted
from perdure.memory.profile.profile import Profile
from perdure.memory.profile.proposing import patch_of
from perdure.memory.profile.users_words import UsersWords
from perdure.memory.proposals import Batch, Plan, Planned, Scope
from perdure.memory.records import Candidate, Outcome, Verdict
from perdure.memory.store_adapter import StoreAdapter
from perdure.memory.thread_messages import ThreadMessage, storable
from perdure.stores.base import PutItem

_MOST: Final = 20_000  # characters of instructions, as `update_instructions` has it
_LONGEST: Final = 400  # of one that is added
_KIND: Final = "instructions"


def check_same_store(store: Any, adapter: StoreAdapter, what: str) -> None:
    """Refuse what cannot be written as one with the memories.

    Raises:
        ConfigurationError: It is in another store.
    """
    if store is not adapter.store:
        raise ConfigurationError(
            f"{what} are in {store!r:.80}, the memories in {adapter.store!r:.80}; expected the "
            "same store, since both are written as one"
        )


def learned(
    answer: Answer,
    batch: Batch,
    around: Scope,
    shown: Shown,
    *,
    profile: Profile[Any] | None,
    learn: Instructions | None,
) -> list[Plan]:
    """Plans for what an answer changes beside memories."""
    plans: list[Plan] = []
    if profile is not None and answer.profile:
        # not the gate of the memories: a profile has its own, whoever changes it
        plans.append(lambda _: _of_profile(profile, answer, batch, around, shown))
    if learn is not None and answer.instructions:
        plans.append(lambda gate: _of_instructions(learn, answer, batch, around, gate))
    return plans


def _of_profile(
    profile: Profile[Any],
    answer: Answer,
    batch: Batch,
    around: Scope,
    shown: Shown,
) -> Effects[Planned]:
    """A patch of the profile: all of it, or none."""
    users: list[ThreadMessage] = []
    for operation in answer.profile:
        named = _by_users(operation.messages, batch)
        if not named:
            return Planned(outcomes=[refused("changes the profile, and no user said so")])
        users += [each for each in named if each not in users]
    words = UsersWords((each.text for each in users), batch.source(users).actor or "user")
    place = profile.place(around.config, batch.source(users), users=words)
    seen = None if shown.profile is None else shown.profile.document
    try:
        plan = yield from profile.planning(place, patch_of(answer.profile), seen=seen)
    except (InvalidPatch, InvalidValue) as exc:
        return Planned(outcomes=[Outcome("refused", place.key, f"{exc!s:.300}", "profile")])
    return Planned(plan.puts, [Outcome("updated" if plan.puts else "unchanged", place.key)])


def _of_instructions(
    learn: Instructions, answer: Answer, batch: Batch, around: Scope, gate: Gate
) -> Effects[Planned]:
    place = learn.place(around.config)
    check_same_store(place.store, around.adapter, "the instructions")
    former = yield from learn.reading(place)
    wishes, outcomes = _wishes(answer.instructions, batch)
    wishes = [each for each in wishes if _plain(each.text) not in _plain(former.text)]
    verdicts = yield from gate.judge(wishes, around.adapter, around.namespace)
    kept: list[Candidate] = []
    text = former.text.rstrip()
    for wish, verdict in zip(wishes, verdicts, strict=True):
        said = verdict.text or wish.text
        if not _passes(verdict):
            outcomes.append(Outcome("refused", None, verdict.reason, verdict.check))
        elif len(text) + len(said) > _MOST:
            outcomes.append(refused("would make the instructions too long"))
        else:
            text += f"\n- {said}"
            kept.append(wish)
    if not kept:
        return Planned(outcomes=outcomes)
    value = noted(former.text, text, "update")
    source = kept[-1].provenance
    options: dict[str, Any] = {"ttl": None, "if_version": former.version, "provenance": source}
    put = PutItem(place.namespace, place.key, value, [TEXT], **options)
    return Planned([put], [*outcomes, *(Outcome("updated", place.key) for _ in kept)])


def _wishes(
    suggestions: Sequence[Suggestion], batch: Batch
) -> tuple[list[Candidate], list[Outcome]]:
    """What users wish, a line each, every wish once; and what is none of theirs."""
    wishes: dict[str, Candidate] = {}
    outcomes: list[Outcome] = []
    for suggestion in suggestions:
        text = " ".join(storable(suggestion.text).split())
        users = _by_users(suggestion.messages, batch)
        if not users:
            outcomes.append(refused("adds an instruction that no user asked for"))
        elif not text or len(text) > _LONGEST:
            outcomes.append(refused(f"adds an instruction of {len(text)} characters"))
        else:
            wishes.setdefault(_plain(text), _wish(text, batch, users))
    return list(wishes.values()), outcomes


def _wish(text: str, batch: Batch, users: Sequence[ThreadMessage]) -> Candidate:
    # that it is a lasting wish, the model says; the gate looks for secrets in it
    return replace(batch.candidate(users, text, _KIND), explicit=True)


def _by_users(numbers: Sequence[int], batch: Batch) -> list[ThreadMessage]:
    """The messages of users among those with these numbers."""
    return [each for each in numbered(numbers, batch) if each.role == "user"]


def _passes(verdict: Verdict) -> bool:
    # a memory may say the same: that is no reason for it not to be here
    return verdict.action == "keep" or verdict.same_as is not None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".!")
