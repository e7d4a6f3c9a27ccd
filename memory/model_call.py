"""Asking a chat model from within a node: calls as steps, with a time limit, and what went wrong.

Each call has the limit whether or not the model's client has one.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.constants import TAG_NOSTREAM

from perdure.memory.effects import Effect

Request = Sequence[BaseMessage]
AT_ONCE: Final = 4
"""How many requests of one step are under way at the same time, if it is awaited."""

_REASONS: Final = ("finish_reason", "stop_reason", "stopReason", "done_reason")
_CUT_OFF: Final = {"length", "max_tokens", "model_length", "max_output_tokens"}
_WITHHELD: Final = {
    *("content_filter", "content_filtered", "safety", "refusal", "recitation"),
    *("prohibited_content", "blocklist", "guardrail_intervened"),
}
_REFUSED: Final = {400, 401, 403, 404, 405, 422}  # HTTP: asking again gets the same answer


@dataclass(frozen=True, slots=True)
class ModelCall:
    """Asks a model.

    Args:
        model: Answers.
        timeout_s: Seconds a call may take; None: as long as it takes. A blocking call that takes
            longer is left behind in its thread.
        config: Of the run.
    """

    model: Runnable[Any, Any]
    timeout_s: float | None
    config: RunnableConfig | None = None

    def asking(self, requests: Sequence[Request]) -> Effect:
        """A step: the answer to each request, or the error instead of it."""
        return Effect(
            lambda: [self._answer(request) for request in requests],
            lambda: self._answers(requests),
        )

    async def _answers(self, requests: Sequence[Request]) -> list[Any]:
        slots = asyncio.Semaphore(AT_ONCE)
        return await asyncio.gather(*(self._aanswer(request, slots) for request in requests))

    def _answer(self, request: Request) -> Any:
        """The answer, or the error, of a call in a thread of its own, which can be left behind."""
        box: list[Any] = []

        def call() -> None:
            try:
                box.append(self._quiet().invoke(list(request), self.config))
            except BaseException as exc:
                box.append(exc)

        context = contextvars.copy_context()
        # a daemon: a call that never ends must not keep the process from ending
        thread = threading.Thread(target=context.run, args=(call,), daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        answer = box[0] if box else self._too_late()
        if isinstance(answer, BaseException) and not isinstance(answer, Exception):
            raise answer
        return answer

    async def _aanswer(self, request: Request, slots: asyncio.Semaphore) -> Any:
        async with slots:
            limit = asyncio.timeout(self.timeout_s)
            try:
                async with limit:
                    return await self._quiet().ainvoke(list(request), self.config)
            except Exception as exc:
                return self._too_late() if limit.expired() else exc

    def _quiet(self) -> Runnable[Any, Any]:
        # what it says is not said to the user: `stream_mode="messages"` passes it over
        return self.model.with_config(tags=[TAG_NOSTREAM])

    def _too_late(self) -> TimeoutError:
        return TimeoutError(f"no answer within {self.timeout_s} s")


def waiting(seconds: float) -> Effect:
    """A step: time passes."""
    return Effect(lambda: time.sleep(seconds), lambda: asyncio.sleep(seconds))


def text_of(answer: Any) -> str:
    """What an answer says."""
    return (answer if isinstance(answer, str) else str(answer.text)).strip()


def fault_of(answer: Any) -> str | None:
    """What is wrong with an answer from which text is wanted; None: nothing."""
    if isinstance(answer, TimeoutError):
        return f"there was {answer}" if str(answer) else "the call timed out"
    if isinstance(answer, Exception):
        return f"the call raised {type(answer).__name__}: {answer!s:.300}"
    if not isinstance(answer, str | BaseMessage):
        return f"the model returned a {type(answer).__name__}, which is no message"
    if is_cut_off(answer):
        return "the answer was cut off at the model's limit for output tokens"
    if is_withheld(answer):
        return f"the answer was withheld ({_ending(answer)})"
    if text_of(answer):
        return None
    calls = isinstance(answer, AIMessage) and (answer.tool_calls or answer.invalid_tool_calls)
    return "the model called tools and said nothing" if calls else "the answer was empty"


def is_cut_off(answer: Any) -> bool:
    """Whether a message ends where the model was stopped, and not where it was done."""
    return _ending(answer) in _CUT_OFF


def is_withheld(answer: Any) -> bool:
    """Whether a provider's filter ended a message, or the model refused."""
    return _ending(answer) in _WITHHELD


def _ending(answer: Any) -> str:
    """Why a message ended, in lower case; providers tell it under different names."""
    metadata = getattr(answer, "response_metadata", None) or {}
    details = metadata.get("incomplete_details") or {}
    told = (*(metadata.get(key) for key in _REASONS), details.get("reason"))
    return next((str(reason).lower() for reason in told if reason), "")


def is_too_long(answer: Any) -> bool:
    """Whether a call failed because the request is longer than the model's window."""
    if not isinstance(answer, Exception):
        return False
    if isinstance(answer, ContextOverflowError) or getattr(answer, "status_code", None) == 413:
        return True
    if getattr(answer, "code", None) == "context_length_exceeded":
        return True
    return getattr(answer, "status_code", None) == 400 and "context length" in str(answer).lower()


def is_final(answer: Any) -> bool:
    """Whether a call failed in a way that asking again cannot mend."""
    return isinstance(answer, Exception) and getattr(answer, "status_code", None) in _REFUSED
