"""Failures that are not repeated within a turn: a model that is down is asked once a turn."""

from __future__ import annotations

import time
from typing import Any, Final

from perdure.memory.conversation import Messages, role

_MAX_FAILURES: Final = (
    2_048  # runs and questions that are remembered; the oldest are forgotten first
)
_RESUMED_S: Final = 600.0  # seconds after which a resumed turn may try again


class FailedTurns:
    """The turns of this process in which an attempt failed.

    A turn is a run of a graph, with the runs that resume it: those of the same thread whose newest
    human message is the same. Nothing of this is stored, so another process tries once more.
    """

    def __init__(self) -> None:
        self._failed_at: dict[Any, float] = {}  # by run or question, the latest last

    def note_failure(self, messages: Messages) -> None:
        """Note that an attempt failed in the turn that is running; `messages` are its state's."""
        for key in _turn_keys(messages):
            self._failed_at[key] = time.monotonic()
        for key in list(self._failed_at)[:-_MAX_FAILURES]:
            self._failed_at.pop(key, None)

    def has_failed(self, messages: Messages) -> bool:
        """Return whether an attempt failed in the turn that is running."""
        if not self._failed_at:  # the usual case
            return False
        run, *questions = _turn_keys(messages) or (None,)
        since = time.monotonic() - _RESUMED_S
        times = (self._failed_at.get(question, since) for question in questions)
        return run in self._failed_at or any(failed_at > since for failed_at in times)


def _turn_keys(messages: Messages) -> tuple[Any, ...]:
    """Return what identifies the running turn: its run, and its thread with the newest question.

    The second is missing without a thread or a question. Outside of a run the result is empty.
    """
    from langgraph.runtime import get_runtime

    try:
        runtime: Any = get_runtime()
    except (RuntimeError, KeyError):  # not within a run
        return ()
    info, run = getattr(runtime, "execution_info", None), getattr(runtime, "control", None)
    if info is None or run is None:
        return ()
    questions = (message.id for message in reversed(messages) if role(message) == "human")
    question = next(questions, None)
    return (run,) if None in (info.thread_id, question) else (run, (info.thread_id, question))
