"""Provide a node in which a model updates the user's profile after a conversation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from perdure.effects import build_async_function, build_blocking_function
from perdure.errors import InvalidPatch, ModelFailed, VersionConflict
from perdure.memory.conversation import Messages
from perdure.memory.loaded_thread import (
    LoadedThread,
    find_run_thread,
    has_erased_message,
    remove_erased_messages,
)
from perdure.memory.long_term.extractors import Batch, Proposal, Scope, Usage
from perdure.memory.long_term.gate import Gate
from perdure.memory.long_term.memory_changes import (
    plan_and_write_with_retries,
    plan_proposed_changes,
)
from perdure.memory.long_term.model_extractor import CONFLICT_CHECK, PROMPT, ModelExtractor
from perdure.memory.long_term.profile import Profile
from perdure.memory.long_term.records import ChangePlan, Outcome
from perdure.memory.nodes import Learner, check_messages
from perdure.memory.options import check_choice
from perdure.memory.run_config import read_thread_and_checkpoint_id_of_run
from perdure.memory.short_term.summary import ON_FAILURE
from perdure.memory.thread_messages import (
    build_history_from_state,
    mark_messages_not_written_by_person_of_run,
)

# Maximum number of attempts to update the profile. An attempt fails if another run changes the same
# fields at the same time, or if messages of the conversation are erased at the same time.
_MAX_ATTEMPTS: Final = 11
_LOG: Final = logging.getLogger("perdure")


class ProfileUpdate(NamedTuple):
    """The result of an update.

    Attributes:
        outcomes: The outcome for each profile that the model changed.
        usage: The calls and tokens of the model.
        fault: The reason why the update failed, or "".
    """

    outcomes: tuple[Outcome, ...] = ()
    usage: Usage = Usage()
    fault: str = ""


class UpdateProfile(Learner):
    """A node that lets a model update a profile after a conversation.

    The model is asked for a patch that updates the profile. If another run has concurrently changed
    other fields of the profile, the patch is applied to the updated profile. If another run has
    changed a field that the patch also changes, the model is asked for a new patch.

    Args:
        model: A chat model, its name, or `ModelCall(model, timeout_s=…)`.
        profile: The profile, or several profiles of one user in one store.
        prompt: The task for the model, see `ModelExtractor`.
        strict: Whether the provider is asked to enforce the schema, see `ModelExtractor`.
        on_failure: The action if the model gives no usable patch. `"keep"` keeps the profile and
            logs a warning, and `"raise"` raises the error.
        messages_key: The name of the channel with the messages.
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

    async def _update_profile_from_messages(
        self, messages: Messages, config: RunnableConfig | None = None
    ) -> ProfileUpdate:
        """Update the profile from the messages of a conversation.

        If the messages do not fit into a single model call, only the newest ones are used. If
        memory is disabled for the run, the profile is not changed.

        Args:
            messages: The messages.
            config: The config of the run.

        Raises:
            ModelFailed: The model gave no usable patch, and `on_failure` is `"raise"`.
            VersionConflict: Other runs changed the profile during all attempts, and `on_failure`
                is `"raise"`.
        """
        messages = mark_messages_not_written_by_person_of_run(
            check_messages(messages, "the messages")
        )
        if self._extractor.profiles[0].namespace.is_memory_disabled_for_run(config):
            return ProfileUpdate()
        handle = self._extractor.profiles[0].get_item_handle(config)
        thread_id, checkpoint_id = read_thread_and_checkpoint_id_of_run(config)
        history = build_history_from_state(thread_id or "", checkpoint_id, messages).messages
        newest = history[
            len(history)
            - self._extractor.count_leading_messages_that_fit_in_one_call(history[::-1]) :
        ]
        batch = Batch(thread_id or "", checkpoint_id, newest)
        try:
            return await self._ask_model_for_patch_and_write_profile(
                batch, Scope(handle.adapter, handle.namespace, config)
            )
        except (ModelFailed, VersionConflict) as exc:
            if not self._keeps:
                raise
            _LOG.warning("the profile was not updated: %s", exc)
            return ProfileUpdate(fault=str(exc))

    learn, alearn = (
        build_blocking_function(_update_profile_from_messages),
        build_async_function(_update_profile_from_messages),
    )

    async def learn_from_messages(
        self, messages: Messages, state: Any, config: RunnableConfig | None
    ) -> ProfileUpdate:
        """Update the profile from the messages of a run."""
        return await self._update_profile_from_messages(messages, config)

    async def _ask_model_for_patch_and_write_profile(
        self, batch: Batch, scope: Scope
    ) -> ProfileUpdate:
        """Ask the model for a patch of the profile, apply the patch, and write the profile.

        The model is asked for a new patch if another run has changed a profile field that the first
        patch also changes, or if a message was erased after the model had been asked. If a message
        was erased, the next request to the model contains only the remaining messages.
        """
        usage, gate = Usage(), self._extractor.profiles[0].gate
        loaded = find_run_thread(scope.config)
        for _ in range(_MAX_ATTEMPTS):
            proposal = await self._extractor.propose_changes(batch, scope)
            usage += proposal.usage
            plan_update = partial(_plan_profile_update, proposal, gate, scope, batch, loaded)
            plan = await plan_and_write_with_retries(scope.adapter, plan_update)
            if not plan.puts and await has_erased_message(loaded, _list_messages(batch)):
                present = {*map(id, await remove_erased_messages(loaded, _list_messages(batch)))}
                messages = [part for part in batch.messages if id(part.message) in present]
                batch = replace(batch, messages=messages)
                if not messages:
                    return ProfileUpdate((), usage)
            elif not _has_conflict(plan):
                return ProfileUpdate(tuple(plan.outcomes), usage)
        raise VersionConflict(
            f"the profile was not updated. {_MAX_ATTEMPTS} attempts failed, because another run "
            "changed the profile or messages were erased at the same time. Try again later"
        )


def _list_messages(batch: Batch) -> list[BaseMessage]:
    return [part.message for part in batch.messages]


async def _plan_profile_update(
    proposal: Proposal, gate: Gate, scope: Scope, batch: Batch, loaded: LoadedThread | None
) -> ChangePlan:
    """Build a write plan that applies all profile patches proposed by a model.

    Nothing is written if another run has concurrently changed a profile field that a patch changes.
    Nothing is written if a message in the batch was erased after the model's response.

    Raises:
        ModelFailed: A patch cannot be applied.
    """
    plan = await plan_proposed_changes(proposal, gate, scope)
    # If another run has changed a profile field that the model's patch also changes, write nothing.
    # The caller then asks the model for a new patch, based on the current profile.
    if await has_erased_message(loaded, _list_messages(batch)) or _has_conflict(plan):
        return plan._replace(puts=())
    if refused := [outcome for outcome in plan.outcomes if outcome.change == "refused"]:
        raise ModelFailed(
            "none of the model's patches could be applied (number of model calls: "
            f"{proposal.usage.calls}); see the __cause__ of this error"
        ) from InvalidPatch(refused[0].reason)
    return plan


def _has_conflict(plan: ChangePlan) -> bool:
    """Return whether another run has changed a field that the plan also changes."""
    return any(outcome.check == CONFLICT_CHECK for outcome in plan.outcomes)


update_profile = UpdateProfile
