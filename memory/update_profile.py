"""Updating a profile: a node that has a model patch it after a conversation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from langchain_core.runnables import RunnableConfig

from perdure.errors import InvalidPatch, ModelFailed, VersionConflict
from perdure.memory.conversation import Messages
from perdure.memory.effects import Effects, awaiting, blocking
from perdure.memory.model_answer import CHANGED
from perdure.memory.model_call import times
from perdure.memory.model_extractor import PROMPT, ModelExtractor
from perdure.memory.nodes import Learner, checked
from perdure.memory.options import choice
from perdure.memory.profile import Profile
from perdure.memory.proposals import Batch, Scope, Usage
from perdure.memory.records import Outcome
from perdure.memory.run_config import source
from perdure.memory.summary import ON_FAILURE
from perdure.memory.thread_messages import history_of_state
from perdure.memory.update_instructions import TRIES
from perdure.stores.base import PutItem

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
        on_failure: If there is no usable patch: `"keep"` the profile and log a warning, or
            `"raise"`.
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
        self._keeps = choice("on_failure", on_failure, ON_FAILURE) == "keep"

    def _learn(
        self, messages: Messages, config: RunnableConfig | None = None
    ) -> Effects[ProfileUpdate]:
        """Update the profile from messages."""
        messages = checked(messages, "the messages")
        place = self._extractor.profiles[0].place(config)
        thread_id, checkpoint_id = source(config)
        given = history_of_state(thread_id or "", checkpoint_id, messages).messages
        newest = given[len(given) - self._extractor.taking(given[::-1]) :]
        batch = Batch(thread_id or "", checkpoint_id, newest)
        try:
            return (yield from self._written(batch, Scope(place.adapter, place.namespace, config)))
        except (ModelFailed, VersionConflict) as exc:
            if not self._keeps:
                raise
            _LOG.warning("the profile stays as it is: %s", exc)
            return ProfileUpdate(fault=str(exc))

    learn = blocking(_learn)
    alearn = awaiting(_learn)

    def learning(
        self, messages: Messages, state: Any, config: RunnableConfig | None
    ) -> Effects[ProfileUpdate]:
        """See `learn`."""
        return self._learn(messages, config)

    def _written(self, batch: Batch, scope: Scope) -> Effects[ProfileUpdate]:
        usage, proposal = Usage(), None
        for _ in range(TRIES):
            if proposal is None:
                proposal = yield from self._extractor.proposing(batch, scope)
                usage += proposal.usage
            puts: list[PutItem] = []
            outcomes: list[Outcome] = []
            for plan in proposal.plans:
                planned = yield from plan(self._extractor.profiles[0].gate)
                puts += planned.puts
                outcomes += planned.outcomes
            refused = [each for each in outcomes if each.change == "refused"]
            if any(each.check == CHANGED for each in refused):
                proposal = None  # the model has to see the profile as it is now
            elif refused:
                asked = f"asked {times(proposal.usage.calls)} (this error's cause says why)"
                fault = f"the model gave no patch that can be applied, {asked}"
                raise ModelFailed(fault) from InvalidPatch(refused[0].reason)
            else:
                with suppress(VersionConflict):
                    yield from scope.adapter.written(puts)
                    return ProfileUpdate(tuple(outcomes), usage)
        raise VersionConflict("other runs changed the profile, again and again")


update_profile = UpdateProfile
"""Makes the node: `update_profile(model, profile)`."""
