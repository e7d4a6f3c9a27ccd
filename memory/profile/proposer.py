"""Has a model propose a patch of a profile: for all of it, or for the fields it asks to see."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig

from perdure.memory.effects import Effects
from perdure.memory.model_call import ModelCall
from perdure.memory.profile.changes import Plan, Standing
from perdure.memory.profile.items import ProfilePlace
from perdure.memory.profile.patching import Operation, operations_of
from perdure.memory.profile.profile import Profile
from perdure.memory.profile.proposing import (
    check_chosen,
    check_shown,
    fields_request,
    patch_of,
    patch_request,
    told,
)
from perdure.memory.profile.schema import M
from perdure.memory.structured import Insisting, Refused, Requesting, Tally
from perdure.memory.transcript import newest


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is learned from, in which run.

    Attributes:
        place: Of the profile.
        units: The messages as text; none: there is nothing to learn from.
        config: Of the run.
        tally: Counts what the model is asked.
    """

    place: ProfilePlace
    units: Sequence[str]
    config: RunnableConfig | None
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True)
class Proposal(Generic[M]):
    """A patch that was proposed, and can be applied.

    Attributes:
        operations: Of it; empty: there is nothing to change.
        plan: What it comes to; None: there is nothing to change.
    """

    operations: tuple[Operation, ...] = ()
    plan: Plan[M] | None = None


@dataclass(frozen=True, slots=True)
class Proposer(Generic[M]):
    """Asks for patches.

    Args:
        profile: Where it is.
        patching: A model whose answers are `ProfilePatch`es, or `LooseProfilePatch`es.
        choosing: A model whose answers are `ProfileFields`.
        prompt: What the model is told to do.
        insisting: How often it is asked again.
        timeout_s: Seconds a call may take; None: as long as it takes.
        large_chars: From how many characters on a profile is shown in sections.
        max_chars: Of the conversation that are shown, the newest.
    """

    profile: Profile[M]
    patching: Runnable[Any, Any]
    choosing: Runnable[Any, Any]
    prompt: str
    insisting: Insisting
    timeout_s: float | None
    large_chars: int
    max_chars: int

    def proposed(self, said: Conversation, standing: Standing[M]) -> Effects[Proposal[M]]:
        """A patch of the profile as it stands.

        Raises:
            ModelFailed: The model gave none that can be applied.
        """
        names = None
        size = len(json.dumps(standing.document, ensure_ascii=False))
        if size > self.large_chars:
            names = yield from self._chosen(said, standing)
            if not names:
                return Proposal()
        shape = self.profile.shape
        shown = told(shape, standing.document, names=names, fault=standing.fault)

        def request(room: int, refused: Refused | None) -> list[BaseMessage]:
            return patch_request(self.prompt, shown, newest(said.units, room), refused)

        def taken(answer: Any) -> Effects[Proposal[M]]:
            patch = patch_of(answer.operations)
            operations = operations_of(patch, self.profile.max_operations)
            if not operations:
                return Proposal()
            if names is not None:
                check_shown(operations, names)
            plan = yield from self.profile.planned(said.place, standing, operations)
            return Proposal(operations, plan)

        proposal: Proposal[M] = yield from self._asked(self.patching, said, request, taken)
        return proposal

    def _chosen(self, said: Conversation, standing: Standing[M]) -> Effects[list[str]]:
        outline = self.profile.shape.outline(standing.document)

        def request(room: int, refused: Refused | None) -> list[BaseMessage]:
            return fields_request(outline, newest(said.units, room), refused)

        def taken(answer: Any) -> list[str]:
            return check_chosen(answer.fields, outline)

        names: list[str] = yield from self._asked(self.choosing, said, request, taken)
        return names

    def _asked(
        self,
        model: Runnable[Any, Any],
        said: Conversation,
        request: Requesting,
        taken: Callable[[Any], Any],
    ) -> Effects[Any]:
        asker = ModelCall(model, self.timeout_s, said.config)
        room = min(self.max_chars, sum(len(unit) + 1 for unit in said.units))
        return self.insisting.asked(asker, request, taken, room=room, tally=said.tally)
