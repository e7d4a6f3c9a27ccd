"""Record the turns in which an operation failed, so that it is not retried in the same turn."""

from __future__ import annotations

import time
from typing import Any, Final

from perdure.memory.conversation import Messages, role

# Maximum number of keys in a `FailedTurns`; the oldest are dropped when it is exceeded. A key
# identifies a run or a question in a thread.
_MAX_FAILURES: Final = 2_048
# Number of seconds until an operation that failed in a turn is tried again. A run that resumes the
# turn sooner skips the operation.
_RETRY_S: Final = 600.0


class FailedTurns:
    """Records the turns in which an operation has failed in this process.

    A turn is a run of a graph together with the runs that resume it. A run resumes a turn if it has
    the same thread and the same newest human message as an earlier run. The failed turns are
    recorded only in memory, so another process tries the operation again.
    """

    def __init__(self) -> None:
        # Maps each failed run, or each pair (thread id, human message id), to the time of its
        # latest failure. New entries are appended at the end.
        self._failed_at: dict[Any, float] = {}

    def record_failure(self, messages: Messages) -> None:
        """Record that an operation failed in the current turn.

        `messages` are the messages in the graph's state.
        """
        for key in _build_keys_of_current_run_and_question_if_known(messages):
            self._failed_at[key] = time.monotonic()
        for key in list(self._failed_at)[:-_MAX_FAILURES]:
            self._failed_at.pop(key, None)

    def has_failed(self, messages: Messages) -> bool:
        """Return whether an operation failed in the current turn.

        `messages` are the messages in the graph's state.
        """
        if not self._failed_at:  # return early in the usual case, in which no operation has failed
            return False
        run, *questions = _build_keys_of_current_run_and_question_if_known(messages) or (None,)
        since = time.monotonic() - _RETRY_S
        times = (self._failed_at.get(question, since) for question in questions)
        return run in self._failed_at or any(failed_at > since for failed_at in times)


def _build_keys_of_current_run_and_question_if_known(messages: Messages) -> tuple[Any, ...]:
    """Return the keys under which a failure in the current turn is recorded.

    The first key in the tuple identifies the run. The second key is a pair of the thread id and the
    id of the newest human message. If one of these ids is unknown, only the first key is returned.
    Outside a running graph, an empty tuple is returned.
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
