"""Record the turns in which an operation such as a summary failed, to delay the next attempt."""

from __future__ import annotations

import time
from typing import Any, Final

from perdure.memory.conversation import Messages, get_role
from perdure.memory.run_config import get_runtime_of_running_graph

# Maximum number of keys under which a `FailedTurns` object records failures. When the number is
# exceeded, the oldest keys are removed. A key identifies a run, or a user's question in a thread.
_MAX_FAILURES: Final = 2_048
# Number of seconds for which later runs of the same turn skip an operation after the operation has
# failed. The run in which the operation failed never retries the operation.
_RETRY_S: Final = 600.0


class FailedTurns:
    """Keeps track of the turns in which an operation has failed.

    A turn consists of a graph run and any later runs that resume it. A run counts as resuming a
    turn if an earlier run had the same thread id and the same latest human message. The object
    records failures only in this process's memory, so other processes do not skip an operation that
    failed in this process.
    """

    def __init__(self) -> None:
        # Maps each key to the time of the latest failure of the operation. A key identifies a turn:
        # it is either a run or a pair (thread id, human message id). Entries are in insertion
        # order.
        self._failed_at: dict[Any, float] = {}

    def record_failure_in_current_turn(self, state_messages: Messages) -> None:
        """Record that the operation failed in the current turn, to prevent an early retry.

        The current run never retries the operation. When a later run resumes the turn, that run
        retries the operation only if `_RETRY_S` seconds have passed since the failure.

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
        return run in self._failed_at or any(
            self._failed_at.get(question, since) > since for question in questions
        )


def _build_keys_that_identify_current_turn(state_messages: Messages) -> tuple[Any, ...]:
    """Return the keys that identify the current turn in a `FailedTurns` object.

    The returned tuple consists of LangGraph's control object for the current run, and the pair
    (thread id, id of the latest human message). Return only the run's key if the thread or the
    message has no id. If no graph is running, the returned tuple is empty.
    """
    runtime = get_runtime_of_running_graph()
    info, run = getattr(runtime, "execution_info", None), getattr(runtime, "control", None)
    if info is None or run is None:
        return ()
    question = next((m.id for m in reversed(state_messages) if get_role(m) == "human"), None)
    return (run,) if None in (info.thread_id, question) else (run, (info.thread_id, question))
