"""Remember the turns in which an attempt failed, to avoid a second attempt in the same turn."""

from __future__ import annotations

import time
from typing import Any, Final

from perdure.memory.conversation import Messages, role

# maximum number of keys (runs or questions) that are remembered; the oldest are dropped
_MAX_FAILURES: Final = 2_048
_RETRY_S: Final = 600.0  # seconds after a failure during which a resumed turn makes no new attempt


class FailedTurns:
    """Records the turns in which an attempt failed, within this process.

    A turn is a run of a graph together with the runs that resume it. A run resumes a turn if it has
    the same thread and the same newest human message. Failures are not stored, so another process
    makes a new attempt.
    """

    def __init__(self) -> None:
        # time of each failure, by run and by thread and question, with the latest failure last
        self._failed_at: dict[Any, float] = {}

    def record_failure(self, messages: Messages) -> None:
        """Record that an attempt failed in the current turn, whose state has these messages."""
        for key in _build_turn_keys(messages):
            self._failed_at[key] = time.monotonic()
        for key in list(self._failed_at)[:-_MAX_FAILURES]:
            self._failed_at.pop(key, None)

    def has_failed(self, messages: Messages) -> bool:
        """Return whether an attempt failed in the current turn, whose state has these messages."""
        if not self._failed_at:  # This is the usual case: no attempt has failed.
            return False
        run, *questions = _build_turn_keys(messages) or (None,)
        since = time.monotonic() - _RETRY_S
        times = (self._failed_at.get(question, since) for question in questions)
        return run in self._failed_at or any(failed_at > since for failed_at in times)


def _build_turn_keys(messages: Messages) -> tuple[Any, ...]:
    """Return keys for the current turn.

    The first key is the run. The second key consists of the thread id and the id of the newest
    human message, and is left out if one of them is unknown. If no graph is running, there are no
    keys.
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
