"""Forming with a model: facts, a profile, episodes and instructions, in one call for each batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable

from perdure.errors import ConfigurationError
from perdure.memory.effects import Effects
from perdure.memory.forming.answers import Answer, answer_of, form
from perdure.memory.forming.learning import check_same_store, learned
from perdure.memory.forming.prompting import PROMPT, Shown, ShownProfile, named, request, size
from perdure.memory.forming.sorting import sorted_out
from perdure.memory.instructions import Instructions, check_instructions
from perdure.memory.model_call import ModelCall
from perdure.memory.options import is_number, seconds, whole
from perdure.memory.profile.profile import Profile
from perdure.memory.proposals import Batch, Proposal, Scope, Usage
from perdure.memory.records import FACT, Memory
from perdure.memory.structured import Insisting, Refused, Tally, structured
from perdure.memory.thread_messages import ThreadMessage
from perdure.memory.turns import TurnExtractor

_QUERIES: Final = 6  # of the newest messages of users, by which near memories are found
_QUERY_CHARS: Final = 500


class ModelExtractor:
    """Has a model propose what to keep.

    It sees the messages as quoted data, with the memories that are near to them, and can name only
    those: by short names that stand for ids of this one namespace.

    Args:
        model: A langchain chat model that gives structured output.
        instructions: What the model is told to do, in place of `prompting.PROMPT`.
        profile: A profile that it is to keep up to date; in the same store.
        episodes: Whether it is asked for episodes: tasks with their outcomes, to learn from.
        learn: Instructions to which lasting wishes of users are added; in the same store.
        turns: Whether memories of turns are made as well, or what makes them.
        near: How many memories it is shown at most.
        max_chars: Characters of the conversation in one call. A longer message loses its middle.
        retries: How often a call that fails, or whose answer is not usable, is made again.
        backoff_s: Seconds before a call that failed is made again; they double.
        timeout_s: Seconds that a call may take; None: as long as it takes.
        method: How structured output is asked for, as `with_structured_output` takes it.

    Raises:
        ConfigurationError: An argument is wrong, or the model gives no structured output.
    """

    name = "model"

    def __init__(
        self,
        model: Runnable[Any, Any],
        *,
        instructions: str | None = None,
        profile: Profile[Any] | None = None,
        episodes: bool = True,
        learn: Instructions | None = None,
        turns: TurnExtractor | bool = True,
        near: int = 20,
        max_chars: int = 24_000,
        retries: int = 2,
        backoff_s: float = 0.5,
        timeout_s: float | None = 60.0,
        method: str = "function_calling",
    ) -> None:
        if profile is not None and not isinstance(profile, Profile):
            raise ConfigurationError(f"profile is {profile!r:.80}; expected a Profile, or None")
        if timeout_s is not None and not (is_number(timeout_s) and timeout_s > 0):
            raise ConfigurationError(
                f"timeout_s is {timeout_s!r}; expected seconds above 0, or None"
            )
        if not isinstance(turns, bool | TurnExtractor):
            raise ConfigurationError(f"turns is {turns!r:.80}; expected TurnExtractor(…) or a bool")
        prompt = PROMPT if instructions is None else instructions
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigurationError(f"instructions is {prompt!r:.80}; expected text")
        self.prompt, self.episodes, self.profile = prompt, bool(episodes), profile
        self.learn = None if learn is None else check_instructions(learn)
        self.turns = TurnExtractor() if turns is True else turns or None
        self.near, self.max_chars = whole("near", near, 0), whole("max_chars", max_chars, 1)
        self._insisting = Insisting(whole("retries", retries, 0), seconds("backoff_s", backoff_s))
        answers = form(
            profile=profile is not None, episodes=self.episodes, instructions=learn is not None
        )
        self._asker = ModelCall(structured(model, answers, method=method, strict=False), timeout_s)

    def taking(self, messages: Sequence[ThreadMessage]) -> int:
        """As many as fit into one call, and one at least."""
        room = self.max_chars
        for count, spoken in enumerate(messages):
            room -= size(spoken)
            if room < 0:
                return max(1, count)
        return len(messages)

    def key(self, thread_id: str, spoken: ThreadMessage) -> str | None:
        """The key of the message's turn, if turns are kept."""
        return self.turns.key(thread_id, spoken) if self.turns is not None else None

    def proposing(self, batch: Batch, around: Scope) -> Effects[Proposal]:
        """Ask the model, once if its answer is usable.

        Raises:
            ModelFailed: It gave no usable answer; nothing is proposed.
            ConfigurationError: The profile or the instructions are in another store.
        """
        turns = Proposal()
        if self.turns is not None:
            turns = yield from self.turns.proposing(batch, around)
        if not any(each.text and each.role != "system" for each in batch.messages):
            return turns
        shown = yield from self._shown(batch, around)
        tally = Tally()
        answer = yield from self._asked(batch, shown, around, tally)
        found = sorted_out(answer, batch, shown.memories)
        plans = learned(answer, batch, around, shown, profile=self.profile, learn=self.learn)
        return replace(
            found,
            additions=(*turns.additions, *found.additions),
            revisions=(*turns.revisions, *found.revisions),
            outcomes=(*turns.outcomes, *found.outcomes),
            plans=plans,
            usage=_usage(tally),
        )

    # -- what it is shown

    def _shown(self, batch: Batch, around: Scope) -> Effects[Shown]:
        near = yield from self._near(batch, around)
        profile = instructions = None
        if self.profile is not None:
            place = self.profile.place(around.config)
            check_same_store(place.adapter.store, around.adapter, "the profile")
            standing = yield from self.profile.reading(place)
            profile = ShownProfile(self.profile.shape, standing.document, standing.fault)
        if self.learn is not None:
            learnt = self.learn.place(around.config)
            check_same_store(learnt.store, around.adapter, "the instructions")
            instructions = (yield from self.learn.reading(learnt)).text
        return Shown(named(near), profile, instructions)

    def _near(self, batch: Batch, around: Scope) -> Effects[list[Memory]]:
        """Facts that are near to what users said, each query's best first."""
        said = [each.text[:_QUERY_CHARS] for each in batch.messages if each.role == "user"]
        ranked: list[list[Memory]] = []
        for query in dict.fromkeys(filter(None, said[: -_QUERIES - 1 : -1])) if self.near else ():
            found = yield from around.adapter.found(
                around.namespace, query=query, filter={"kind": FACT}, limit=self.near
            )
            ranked.append([each for each in found if each.namespace == around.namespace])
        return list(_in_turn(ranked))[: self.near]

    def _asked(self, batch: Batch, shown: Shown, around: Scope, tally: Tally) -> Effects[Answer]:
        def requested(room: int, refused: Refused | None) -> list[BaseMessage]:
            return request(self.prompt, batch, shown, self.episodes, room, refused)

        asker = replace(self._asker, config=around.config)
        return (
            yield from self._insisting.asked(
                asker, requested, answer_of, room=self.max_chars, tally=tally
            )
        )


def _usage(tally: Tally) -> Usage:
    counts = tally.tokens
    if counts is None:
        return Usage(tally.asks)
    return Usage(tally.asks, counts["input_tokens"], counts["output_tokens"])


def _in_turn(ranked: Sequence[Sequence[Memory]]) -> Iterator[Memory]:
    """The first of each ranking, the second of each, and so on, each memory once."""
    seen = set()
    for place in range(max(map(len, ranked), default=0)):
        for memories in ranked:
            if place < len(memories) and memories[place].key not in seen:
                seen.add(memories[place].key)
                yield memories[place]
