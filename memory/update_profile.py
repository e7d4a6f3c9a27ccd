"""Updating a profile: a node that has a model patch it after a conversation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from perdure.effects import awaiting, blocking
from perdure.errors import InvalidPatch, ModelFailed, VersionConflict
from perdure.memory.changes import plan_and_write, plan_proposal
from perdure.memory.conversation import Messages
from perdure.memory.extractors import Batch, Proposal, Scope, Usage
from perdure.memory.gate import Gate
from perdure.memory.loaded_thread import (
    LoadedThread,
    find_run_thread,
    is_any_erased,
    remove_erased,
)
from perdure.memory.model_call import format_count
from perdure.memory.model_extractor import CONFLICT_CHECK, PROMPT, ModelExtractor
from perdure.memory.nodes import Learner, check_messages
from perdure.memory.options import check_choice
from perdure.memory.profile import Profile
from perdure.memory.records import ChangePlan, Outcome
from perdure.memory.run_config import read_run_source
from perdure.memory.summary import ON_FAILURE
from perdure.memory.thread_messages import build_history_from_state

_TRIES: Final = 11  # times that the model is asked while other runs write
_LOG: Final = logging.getLogger("perdure")


class ProfileUpdate(NamedTuple):
    """The result of an update."""

    outcomes: tuple[Outcome, ...] = ()  # of each profile that the model changed
    usage: Usage = Usage()
    fault: str = ""  # why the update failed, if it did


class UpdateProfile(Learner):
    """A node that has a model patch a profile after a conversation.

    The model is asked as by `ModelExtractor`, for the profile alone. If another run changed the
    profile meanwhile, the patch is applied to the changed profile, or made anew if both concern
    the same fields.

    Args:
        model: A chat model, its name, or `ModelCall(model, timeout_s=…)`.
        profile: The profile, or several of one user in one store.
        prompt, strict: As of `ModelExtractor`.
        on_failure: Without a usable patch, `"keep"` the profile and log a warning, or `"raise"`.
    """

    def __init__(
        self,
        model: Any,
        profile: Profile[Any] | Sequence[Profile[Any]],
        *,
        prompt: str = PROMPT,
        strict: bool = True,
        on_failure: str = "keep",
        messages_key: str = "messages",
    ) -> None:
        super().__init__(messages_key)
        self._extractor = ModelExtractor(
            model, prompt=prompt, kinds=(), profile=profile, turns=False, strict=strict
        )
        self._keeps = check_choice("on_failure", on_failure, ON_FAILURE) == "keep"

    async def _learn(
        self, messages: Messages, config: RunnableConfig | None = None
    ) -> ProfileUpdate:
        """Update the profile from messages."""
        messages = check_messages(messages, "the messages")
        if self._extractor.profiles[0].namespace.lacks_memory(config):
            return ProfileUpdate()
        place = self._extractor.profiles[0].get_handle(config)
        thread_id, checkpoint_id = read_run_source(config)
        history = build_history_from_state(thread_id or "", checkpoint_id, messages).messages
        newest = history[len(history) - self._extractor.count_batch_messages(history[::-1]) :]
        batch = Batch(thread_id or "", checkpoint_id, newest)
        try:
            return await self._written(batch, Scope(place.adapter, place.namespace, config))
        except (ModelFailed, VersionConflict) as exc:
            if not self._keeps:
                raise
            _LOG.warning("the profile stays as it is: %s", exc)
            return ProfileUpdate(fault=str(exc))

    learn, alearn = blocking(_learn), awaiting(_learn)

    async def learn_from_messages(
        self, messages: Messages, state: Any, config: RunnableConfig | None
    ) -> ProfileUpdate:
        """See `learn`."""
        return await self._learn(messages, config)

    async def _written(self, batch: Batch, scope: Scope) -> ProfileUpdate:
        usage, gate = Usage(), self._extractor.profiles[0].gate
        loaded = find_run_thread(scope.config)
        for _ in range(_TRIES):
            proposal = await self._extractor.propose_changes(batch, scope)
            usage += proposal.usage
            apply = partial(_applied, proposal, gate, scope, batch, loaded)
            made = await plan_and_write(scope.adapter, apply)
            if not made.puts and await is_any_erased(loaded, _messages_in(batch)):
                present = {*map(id, await remove_erased(loaded, _messages_in(batch)))}
                messages = [each for each in batch.messages if id(each.message) in present]
                batch = replace(batch, messages=messages)
                if not messages:
                    return ProfileUpdate((), usage)
            elif not _is_overtaken(made):
                return ProfileUpdate(tuple(made.outcomes), usage)
        raise VersionConflict("other runs changed the profile, again and again")


def _messages_in(batch: Batch) -> list[BaseMessage]:
    return [each.message for each in batch.messages]


async def _applied(
    proposal: Proposal, gate: Gate, scope: Scope, batch: Batch, loaded: LoadedThread | None
) -> ChangePlan:
    """Return the planned changes of all patches.

    Nothing is to be written if the profile was changed by another run meanwhile, or if one of the
    batch's messages was erased meanwhile.
    """
    made = await plan_proposal(proposal, gate, scope)
    if await is_any_erased(loaded, _messages_in(batch)):
        return made._replace(puts=())
    if _is_overtaken(made):  # the model has to see the profile as it is now
        return made._replace(puts=())
    if refused := [outcome for outcome in made.outcomes if outcome.change == "refused"]:
        times_asked = f"asked {format_count(proposal.usage.calls)} (this error's cause says why)"
        fault = f"the model gave no patch that can be applied, {times_asked}"
        raise ModelFailed(fault) from InvalidPatch(refused[0].reason)
    return made


def _is_overtaken(made: ChangePlan) -> bool:
    return any(outcome.check == CONFLICT_CHECK for outcome in made.outcomes)


update_profile = UpdateProfile
