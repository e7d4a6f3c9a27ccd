"""Record turns in which an operation failed, so that it is not retried later in the same turn."""

from __future__ import annotations

import time
from typing import Any, Final

from perdure.memory.conversation import Messages, get_role

# Maximum number of keys in a `FailedTurns`; when it is exceeded, the oldest keys are dropped. A key
# identifies either a run or a question in a thread.
_MAX_FAILURES: Final = 2_048
# Number of seconds after a failure during which runs that resume the turn skip the operation. The
# run in which the operation failed always skips it.
_RETRY_S: Final = 600.0


class FailedTurns:
    """Keeps track of the turns in which an operation has failed.

    A turn consists of a graph run and any later runs that resume it. A run is treated as resuming a
    turn if an earlier run had the same thread and the same latest human message. Failures are
    recorded only in this process's memory, so other processes do not skip the operation.
    """

    def __init__(self) -> None:
        # Maps each key to the time of the latest failure. A key is either a run or a pair (thread
        # id, human message id). Entries are in insertion order.
        self._failed_at: dict[Any, float] = {}

    def record_failure_in_current_turn(self, state_messages: Messages) -> None:
        """Record that an operation failed in the current turn.

        `state_messages` are the messages in the graph's state.
        """
        for key in _build_keys_that_identify_current_turn(state_messages):
            self._failed_at[key] = time.monotonic()
        for key in list(self._failed_at)[:-_MAX_FAILURES]:
            self._failed_at.pop(key, None)

    def has_current_turn_failed(self, state_messages: Messages) -> bool:
        """Return whether an operation failed in the current turn and must not be retried yet.

        `state_messages` are the messages in the graph's state.
        """
        # Return early in the common case that no operation has failed.
        if not self._failed_at:
            return False
        run, *questions = _build_keys_that_identify_current_turn(state_messages) or (None,)
        since = time.monotonic() - _RETRY_S
        times = (self._failed_at.get(question, since) for question in questions)
        return run in self._failed_at or any(failed_at > since for failed_at in times)


def _build_keys_that_identify_current_turn(state_messages: Messages) -> tuple[Any, ...]:
    """Return the keys under which a failure in the current turn is recorded.

    The first key in the returned tuple identifies the run. The second key is the pair (thread id,
    id of the latest human message). The second key is omitted if the thread or the message has no
    id. If no graph is running, the tuple is empty.
    """
    from langgraph.runtime import get_runtime

    try:
        runtime: Any = get_runtime()
    except (RuntimeError, KeyError):  # no graph is running
        return ()
    info, run = getattr(runtime, "execution_info", None), getattr(runtime, "control", None)
    if info is None or run is None:
        return ()
    questions = (message.id for message in reversed(state_messages) if get_role(message) == "human")
    question = next(questions, None)
    return (run,) if None in (info.thread_id, question) else (run, (info.thread_id, question))
