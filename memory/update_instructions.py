"""Updating instructions: a model rewrites them in the light of a conversation, or they stay.

The technique is reflection, or meta-prompting, as LangGraph's concepts of memory describe it
(https://docs.langchain.com/oss/python/concepts/memory). What comes back is checked before it is
written: instructions that were lost, cut off or bloated would spoil every later conversation.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from langchain_core.runnables import Runnable, RunnableConfig

from perdure.errors import ConfigurationError, ModelFailed, VersionConflict
from perdure.memory.conversation import Messages
from perdure.memory.effects import Effects, arun, run
from perdure.memory.instructions import (
    Instructions,
    InstructionsVersion,
    check_instructions,
)
from perdure.memory.learner import Learner
from perdure.memory.model_call import ModelCall
from perdure.memory.nodes import channel, checked
from perdure.memory.options import choice as check_choice
from perdure.memory.options import is_number
from perdure.memory.reflecting import PROMPT, Bounds, Reflection
from perdure.memory.run_config import Place

OnFailure = Literal["raise", "keep"]
_LOG = logging.getLogger("perdure")
_ON_FAILURE: Final = ("raise", "keep")


def update_instructions(
    model: Runnable[Any, Any],
    instructions: Instructions,
    *,
    prompt: str | None = None,
    feedback_key: str = "feedback",
    min_chars: int = 10,
    max_chars: int = 20_000,
    min_share: float = 0.4,
    max_growth: float = 2.0,
    max_transcript_chars: int = 200_000,
    timeout_s: float | None = 60.0,
    retries: int = 2,
    backoff_s: float = 0.5,
    conflicts: int = 10,
    on_failure: OnFailure = "raise",
    messages_key: str = "messages",
) -> UpdateInstructions:
    """A node that learns: the model rewrites the instructions after a conversation.

    What it writes is a new version, with the thread and checkpoint of the run and a diff; one that
    is equal to what holds is not written. If another run wrote meanwhile, the model is asked again
    with the newer text, so nothing that was learned is lost. The state stays as it is.

    Args:
        model: Rewrites them; what it says is not streamed to the user.
        instructions: Where they are.
        prompt: What the model is told to do, in place of `reflecting.PROMPT`. The form in which it
            is to answer is always added.
        feedback_key: The channel of the state that may hold feedback on the conversation.
        min_chars: Characters that instructions have at least.
        max_chars: Characters that they have at most.
        min_share: What share of the former length is at least left; less has lost most of them.
        max_growth: How many times as long as the former they may become; former instructions that
            are shorter than 1,000 characters count as 1,000.
        max_transcript_chars: Characters of the conversation that the model is shown, the newest.
        timeout_s: Seconds that a call of the model may take; None: as long as it takes.
        retries: How often a call that fails is made again.
        backoff_s: Seconds to wait before the first of these; they double.
        conflicts: How often the model is asked anew because another run wrote meanwhile.
        on_failure: If there is no usable answer: `"raise"`, or `"keep"` what holds and log a
            warning, for an agent whose answer should not fail with its reflection.
        messages_key: The channel of the messages.

    Raises:
        ConfigurationError: An argument is wrong.
    """
    if not isinstance(model, Runnable):
        raise ConfigurationError(f"the model is {model!r:.80}; expected a langchain chat model")
    if timeout_s is not None and not (is_number(timeout_s) and timeout_s > 0):
        raise ConfigurationError(f"timeout_s is {timeout_s!r}; expected seconds above 0, or None")
    if isinstance(conflicts, bool) or not isinstance(conflicts, int) or conflicts < 0:
        raise ConfigurationError(f"conflicts is {conflicts!r}; expected a whole number from 0 on")
    check_choice("on_failure", on_failure, _ON_FAILURE)
    for name, key in (("feedback_key", feedback_key), ("messages_key", messages_key)):
        if not isinstance(key, str) or not key:
            raise ConfigurationError(f"{name} is {key!r}; expected a channel's name")
    return UpdateInstructions(
        check_instructions(instructions),
        ModelCall(model, timeout_s),
        Reflection(
            prompt=PROMPT if prompt is None else prompt,
            bounds=Bounds(min_chars, max_chars, min_share, max_growth),
            max_chars=max_transcript_chars,
            retries=retries,
            backoff_s=backoff_s,
        ),
        feedback_key=feedback_key,
        conflicts=conflicts,
        on_failure=on_failure,
        messages_key=messages_key,
    )


class UpdateInstructions(Learner):
    """See `update_instructions`, which makes it."""

    def __init__(
        self,
        instructions: Instructions,
        asker: ModelCall,
        reflection: Reflection,
        *,
        feedback_key: str,
        conflicts: int,
        on_failure: OnFailure,
        messages_key: str,
    ) -> None:
        super().__init__(messages_key)
        self.instructions, self.feedback_key = instructions, feedback_key
        self._asker, self._reflection = asker, reflection
        self._conflicts, self._on_failure = conflicts, on_failure

    def rewrite(
        self, messages: Messages, config: RunnableConfig | None = None, *, feedback: Any = None
    ) -> InstructionsVersion:
        """Learn from messages. Returns what holds then.

        Raises:
            InstructionsRefused: The model's text is not usable; the former instructions stand.
            ModelFailed: The model did not answer; the former instructions stand.
            VersionConflict: Others wrote, again and again, while the model was asked.
            ConfigurationError: See `Instructions.current`.
            StorageError: The store refuses.
        """
        return run(self._learning(self._task(messages, feedback, config)))

    async def arewrite(
        self, messages: Messages, config: RunnableConfig | None = None, *, feedback: Any = None
    ) -> InstructionsVersion:
        """See `rewrite`."""
        return await arun(self._learning(self._task(messages, feedback, config)))

    def learning(
        self, messages: Messages, state: Any, config: RunnableConfig | None
    ) -> Effects[InstructionsVersion]:
        """See `rewrite`; the state has the feedback."""
        feedback = None if state is None else channel(state, self.feedback_key)
        return self._learning(self._task(messages, feedback, config))

    def _task(self, messages: Messages, feedback: Any, config: RunnableConfig | None) -> _Task:
        messages = checked(messages, "the messages")
        asker = replace(self._asker, config=config)
        return _Task(self.instructions.place(config), asker, messages, feedback)

    def _learning(self, task: _Task) -> Effects[InstructionsVersion]:
        try:
            return (yield from self._rewritten(task))
        except (ModelFailed, VersionConflict) as exc:
            if self._on_failure == "raise":
                raise
            _LOG.warning("the instructions stay as they are: %s", exc)
        return (yield from self.instructions.reading(task.place))

    def _rewritten(self, task: _Task) -> Effects[InstructionsVersion]:
        tries = self._conflicts
        while True:
            former = yield from self.instructions.reading(task.place)
            text = yield from self._reflection.rewriting(
                task.asker, former.text, task.messages, task.feedback
            )
            if text == former.text:
                return former
            try:
                return (yield from self.instructions.writing(task.place, former, text, "update"))
            except VersionConflict:
                if tries == 0:
                    raise
                tries -= 1


@dataclass(frozen=True, slots=True)
class _Task:
    place: Place
    asker: ModelCall
    messages: Messages
    feedback: Any
