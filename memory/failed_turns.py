"""Remember the turns in which an attempt failed, so that it is not repeated within the turn."""

from __future__ import annotations

import time
from typing import Any, Final

from perdure.memory.conversation import Messages, role

_MAX_FAILURES: Final = 2_048  # runs and questions that are remembered; the oldest are dropped
_RETRY_S: Final = 600.0  # seconds after a failure in which a resumed turn makes no new attempt


class FailedTurns:
    """The turns of this process in which an attempt failed.

    A turn is a run of a graph together with the runs that resume it. A run resumes a turn if it has
    the same thread and the same newest human message. Failures are not stored, so another process
    makes a new attempt.
    """

    def __init__(self) -> None:
        # time of each failure by run, or by thread and question; the latest is last
        self._failed_at: dict[Any, float] = {}

    def note_failure(self, messages: Messages) -> None:
        """Record a failed attempt in the current turn; `messages` is the turn's message list."""
        for key in _build_turn_keys(messages):
            self._failed_at[key] = time.monotonic()
        for key in list(self._failed_at)[:-_MAX_FAILURES]:
            self._failed_at.pop(key, None)

    def has_failed(self, messages: Messages) -> bool:
        """Return whether an attempt failed in the current turn, whose state has these messages."""
        if not self._failed_at:  # no attempt has failed, which is the usual case
            return False
        run, *questions = _build_turn_keys(messages) or (None,)
        since = time.monotonic() - _RETRY_S
        times = (self._failed_at.get(question, since) for question in questions)
        return run in self._failed_at or any(failed_at > since for failed_at in times)


def _build_turn_keys(messages: Messages) -> tuple[Any, ...]:
    """Return keys for the current turn.

    The first key is the run. The second key is the thread id with the id of the newest human
    message; it is missing if either is unknown. Outside of a run there are no keys.
    """
    from langgraph.runtime import get_runtime

    try:
        runtime: Any = get_runtime()
    except (RuntimeError, KeyError):  # no graph is running
        return ()
    info, run = getattr(runtime, "execution_info", None), getattr(runtime, "control", None)
    if info is None or run is None:
        return ()
    questions = (message.id for message in reversed(messages) if role(message) == "human")
    question = next(questions, None)
    return (run,) if None in (info.thread_id, question) else (run, (info.thread_id, question))
