"""Updating a profile: a model proposes a patch after a conversation, checked before it is written.

A patch that cannot be applied, or leaves what the schema refuses, goes back to the model with the
reason. The technique is that of LangGraph's concepts of memory, "manage individual profiles"
(https://docs.langchain.com/oss/python/concepts/memory).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Literal

from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import Runnable, RunnableConfig

from perdure.errors import ConfigurationError, InvalidPatch, ModelFailed, VersionConflict
from perdure.memory.conversation import Messages
from perdure.memory.effects import Effects, arun, run
from perdure.memory.learner import Learner
from perdure.memory.nodes import checked
from perdure.memory.options import choice, seconds, whole
from perdure.memory.profile.changes import Plan, Standing
from perdure.memory.profile.documents import Edit
from perdure.memory.profile.items import ProfilePlace, written
from perdure.memory.profile.patching import is_as_seen
from perdure.memory.profile.profile import Profile
from perdure.memory.profile.proposer import Conversation, Proposal, Proposer
from perdure.memory.profile.proposing import PROMPT, LooseProfilePatch, ProfileFields, ProfilePatch
from perdure.memory.profile.schema import M
from perdure.memory.profile.users_words import speakers
from perdure.memory.run_config import source
from perdure.memory.structured import Insisting, structured
from perdure.memory.transcript import units_of
from perdure.stores.base import Provenance

OnFailure = Literal["raise", "keep"]
Method = Literal["function_calling", "json_schema"]
_LOG: Final = logging.getLogger("perdure")


def update_profile(
    model: Runnable[Any, Any],
    profile: Profile[M],
    *,
    prompt: str | None = None,
    strict: bool = True,
    method: Method = "function_calling",
    large_chars: int = 8_000,
    max_transcript_chars: int = 200_000,
    timeout_s: float | None = 60.0,
    retries: int = 2,
    backoff_s: float = 0.5,
    conflicts: int = 10,
    on_failure: OnFailure = "raise",
    messages_key: str = "messages",
) -> UpdateProfile[M]:
    """A node that learns: after a conversation the model brings the profile up to date.

    It proposes a JSON Patch with a reason for each operation. What the patch does not name stays as
    it is; an object in the place of one with more fields is refused. Of a large profile the model
    is shown an outline first, and then only the fields that it asks for. If another run wrote
    meanwhile, the patch is applied to what holds by then, or, where it concerns what that run
    changed, the model is asked again. The state stays as it is.

    What the profile's gate does not let pass is a fault like others, which the model mends by
    leaving it out. A change is noted as the user's if all that it sets stands in what users said;
    otherwise `trust` is the role of the least trustworthy who speaks in the conversation.

    Args:
        model: Proposes; what it says is not streamed to the user.
        profile: Where the profile is.
        prompt: What the model is told to do, in place of `proposing.PROMPT`. What the answer must
            be like is always added.
        strict: Whether to ask for decoding that can give nothing but such an answer, if the model's
            class knows of that. An endpoint that refuses such requests needs `False`.
        method: Of the model's `with_structured_output`; `"json_schema"` is strict.
        large_chars: Characters of a profile's JSON from which on it is shown in sections.
        max_transcript_chars: Characters of the conversation that the model is shown, the newest.
        timeout_s: Seconds that a call of the model may take; None: as long as it takes.
        retries: How often a call is made again that failed, or whose answer was refused.
        backoff_s: Seconds to wait before the first call that is made again because it failed; they
            double.
        conflicts: How often a patch is made or applied anew because another run wrote meanwhile.
        on_failure: If there is no usable answer: `"raise"`, or `"keep"` the profile and log a
            warning, for an agent whose answer should not fail with its memory.
        messages_key: The channel of the messages.

    Raises:
        ConfigurationError: An argument is wrong.
    """
    if not isinstance(profile, Profile):
        raise ConfigurationError(f"the profile is {profile!r:.80}; expected Profile(schema, store)")
    if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
        raise ConfigurationError(f"prompt is {prompt!r:.80}; expected text, or None")
    if not isinstance(messages_key, str) or not messages_key:
        raise ConfigurationError(f"messages_key is {messages_key!r}; expected a channel's name")
    if timeout_s is not None:
        seconds("timeout_s", timeout_s, above_zero=True)
    choice("on_failure", on_failure, ("raise", "keep"))
    choice("method", method, ("function_calling", "json_schema"))
    if method == "json_schema" and not strict:
        raise ConfigurationError(
            'method="json_schema" always asks for strict decoding; expected strict=True, or '
            'method="function_calling"'
        )
    patches = ProfilePatch if strict else LooseProfilePatch
    return UpdateProfile(
        profile,
        Proposer(
            profile,
            structured(model, patches, method=method, strict=strict),
            structured(model, ProfileFields, method=method, strict=strict),
            PROMPT if prompt is None else prompt,
            Insisting(whole("retries", retries, 0), seconds("backoff_s", backoff_s)),
            timeout_s,
            whole("large_chars", large_chars, 0),
            whole("max_transcript_chars", max_transcript_chars, 1),
        ),
        conflicts=whole("conflicts", conflicts, 0),
        on_failure=on_failure,
        messages_key=messages_key,
    )


@dataclass(frozen=True, slots=True)
class ProfileUpdate(Generic[M]):
    """What came of learning.

    Attributes:
        profile: What is known then; None: not yet, or no more, what the schema asks for.
        edits: What changed, with reasons; empty: nothing.
        asks: How often the model was asked.
        tokens: What its answers say that they took, all together; None: they say nothing.
        fault: With `on_failure="keep"`, why nothing was learned; "" if that did not fail.
    """

    profile: M | None
    edits: tuple[Edit, ...] = ()
    asks: int = 0
    tokens: UsageMetadata | None = None
    fault: str = ""


class UpdateProfile(Learner, Generic[M]):
    """See `update_profile`, which makes it."""

    def __init__(
        self,
        profile: Profile[M],
        proposer: Proposer[M],
        *,
        conflicts: int,
        on_failure: OnFailure,
        messages_key: str,
    ) -> None:
        super().__init__(messages_key)
        self.profile, self._proposer = profile, proposer
        self._conflicts, self._on_failure = conflicts, on_failure

    def learn(self, messages: Messages, config: RunnableConfig | None = None) -> ProfileUpdate[M]:
        """Learn from messages.

        Raises:
            ModelFailed: The model gave no patch that can be applied; the profile is as it was.
            VersionConflict: Others wrote, again and again, while the model was asked.
            ConfigurationError: There is no store, or the config does not fill the templates.
            StorageError: The store refuses.
        """
        return run(self._learning(self._conversation(messages, config)))

    async def alearn(
        self, messages: Messages, config: RunnableConfig | None = None
    ) -> ProfileUpdate[M]:
        """See `learn`."""
        return await arun(self._learning(self._conversation(messages, config)))

    def learning(
        self, messages: Messages, state: Any, config: RunnableConfig | None
    ) -> Effects[ProfileUpdate[M]]:
        """See `learn`."""
        return self._learning(self._conversation(messages, config))

    def _conversation(self, messages: Messages, config: RunnableConfig | None) -> Conversation:
        units = units_of(checked(messages, "the messages"))
        who = speakers(messages)
        noted = Provenance(*source(config), actor=who.actor, trust=who.trust)
        place = self.profile.place(config, noted, users=who.users)
        return Conversation(place, list(map("\n".join, units)), config)

    def _learning(self, said: Conversation) -> Effects[ProfileUpdate[M]]:
        fault = ""
        try:
            if said.units and (plan := (yield from self._written(said))) is not None:
                return ProfileUpdate(plan.profile, plan.edits, said.tally.asks, said.tally.tokens)
        except (ModelFailed, VersionConflict) as exc:
            if self._on_failure == "raise":
                raise
            _LOG.warning("the profile stays as it is: %s", exc)
            fault = str(exc)
        standing = yield from self.profile.reading(said.place)
        return ProfileUpdate(standing.profile, (), said.tally.asks, said.tally.tokens, fault)

    def _written(self, said: Conversation) -> Effects[Plan[M] | None]:
        """The change, once it is written; None: there is none to make."""
        tries = self._conflicts
        standing = yield from self.profile.reading(said.place)
        proposal = yield from self._proposer.proposed(said, standing)
        while proposal.plan is not None:
            try:
                yield from written(said.place, standing.kept, proposal.plan.puts)
            except VersionConflict:
                if tries == 0:
                    raise
                tries -= 1
                seen, standing = standing, (yield from self.profile.reading(said.place))
                proposal = (yield from self._applied(said.place, proposal, seen, standing)) or (
                    yield from self._proposer.proposed(said, standing)
                )
            else:
                return proposal.plan
        return None

    def _applied(
        self,
        place: ProfilePlace,
        proposal: Proposal[M],
        seen: Standing[M],
        now: Standing[M],
    ) -> Effects[Proposal[M] | None]:
        """The same patch of what holds now; None: the model has to see it first."""
        if not is_as_seen(proposal.operations, seen.document, now.document):
            return None
        try:
            plan = yield from self.profile.planned(place, now, proposal.operations)
        except InvalidPatch:  # the schema does not accept both changes together
            return None
        return replace(proposal, plan=plan)
