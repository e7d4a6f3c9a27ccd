"""Structured answers of a model: asked for by a schema, and again with what was wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.runnables import Runnable
from pydantic import BaseModel

from perdure.errors import ConfigurationError, InvalidPatch, ModelFailed
from perdure.memory.effects import Effects
from perdure.memory.model_call import (
    ModelCall,
    NamedModel,
    chat_model,
    fault_of,
    is_cut_off,
    is_final,
    is_too_long,
    is_withheld,
    times,
)
from perdure.memory.shortening import middle_out

T = TypeVar("T")
_LEAST: Final = 1_000  # characters of a transcript that is halved because it was too long
_QUOTED: Final = 4_000  # characters of an answer that the model is shown again


@dataclass(frozen=True, slots=True)
class Refused:
    """The text of an answer that cannot be used, and what is wrong with it."""

    said: str
    fault: str


@dataclass(slots=True)
class Tally:
    """How often a model was called, and the tokens that its answers report, if they do."""

    asks: int = 0
    tokens: UsageMetadata | None = None

    def add(self, answer: Any) -> None:
        """Count an answer."""
        self.asks += 1
        raw = answer.get("raw") if isinstance(answer, dict) else None
        if isinstance(raw, AIMessage) and raw.usage_metadata:
            self.tokens = add_usage(self.tokens, raw.usage_metadata)


Requesting = Callable[[int, Refused | None], list[BaseMessage]]
"""Makes a request: for so many characters of a conversation, after an answer that was refused."""


@dataclass(frozen=True, slots=True)
class Insisting:
    """Calls a model until an answer can be used, or the retries are used up.

    Args:
        retries: How often a call is made again that failed, or whose answer was refused.
        backoff_s: Seconds before the first call that is made again because it failed; they double.
    """

    retries: int = 2
    backoff_s: float = 0.5

    def asked(
        self,
        call: ModelCall,
        request: Requesting,
        taken: Callable[[Any], T | Effects[T]],
        *,
        room: int,
        tally: Tally,
        parsed: Callable[[Any], Any] | None = None,
    ) -> Effects[T]:
        """What `taken` makes of the first answer that can be used.

        Args:
            call: Calls a `structured` model.
            request: Makes the request.
            taken: Makes the result of an answer, or effects that give it; raises `InvalidPatch`.
            room: Characters of the conversation to be shown; halved if the model takes less.
            tally: Counts the calls.
            parsed: Takes an answer apart, or raises `InvalidPatch`; None: by its schema.

        Raises:
            ModelFailed: No answer can be used.
        """
        call = replace(call, retries=self.retries, backoff_s=self.backoff_s)
        failures, refused = 0, None
        while True:
            [answer] = yield call.asking([request(room, refused)])
            tally.add(answer)
            if is_too_long(answer) and room // 2 >= _LEAST:
                room //= 2
                continue
            failures += 1
            try:
                found = taken((parsed or _parsed)(answer))
                return (yield from found) if isinstance(found, Generator) else found
            except InvalidPatch as exc:
                if is_final(answer) or failures > self.retries:
                    cause = answer if isinstance(answer, Exception) else exc
                    raise ModelFailed(
                        f"the model gave no answer that can be used: asked {times(failures)}, and "
                        f"in the end: {_outline(answer)}; nothing was written"
                    ) from cause
                if isinstance(answer, Exception) and not isinstance(answer, ValueError):
                    yield call.waiting(failures)
                else:  # some clients raise what pydantic says of an answer
                    refused = Refused(_quoted(answer), str(exc))


def structured(
    model: Any, schema: type[BaseModel], *, method: str, strict: bool
) -> Runnable[Any, Any]:
    """A model, or that of a name, whose answers are of a schema; strictly if it can decode so.

    Raises:
        ConfigurationError: The model gives no structured answers; see also `chat_model`.
    """
    model = chat_model(model)
    if isinstance(model, NamedModel):
        return model.prepared(lambda made: structured(made, schema, method=method, strict=strict))
    # an integration refuses what it does not know in one of these ways
    cause: Exception | None = None
    tried: list[dict[str, Any]] = [{"method": method, "strict": strict}, {"method": method}, {}]
    for options in tried:
        try:
            return model.with_structured_output(schema, include_raw=True, **options)  # type: ignore[no-any-return]
        except (AttributeError, TypeError, ValueError, NotImplementedError) as exc:
            cause = exc
    raise ConfigurationError(
        f"the model is {model!r:.80}, which gives no structured answers ({cause!s:.200}); expected "
        "a langchain chat model that calls tools"
    ) from cause


def _parsed(answer: Any) -> Any:
    """The answer as an instance of its schema; InvalidPatch if it is none."""
    if not isinstance(answer, dict):
        raise InvalidPatch(fault_of(answer) or "the answer was text, which no schema has")
    raw, error = answer.get("raw"), answer.get("parsing_error")
    if is_cut_off(raw) or is_withheld(raw):
        raise InvalidPatch(fault_of(raw) or "")
    if error is not None:
        raise InvalidPatch(f"the answer is not as the schema asks for: {error!s:.1000}")
    if answer.get("parsed") is None:
        for call in getattr(raw, "invalid_tool_calls", ()):
            raise InvalidPatch(f"the arguments {call['args']!r:.200} are no JSON")
        raise InvalidPatch("the answer has no arguments of the tool that was to be called")
    return answer["parsed"]


def _outline(answer: Any) -> str:
    """What is wrong with an answer, in none of its words: they may be a secret, and are logged."""
    raw = answer.get("raw") if isinstance(answer, dict) else answer
    if not isinstance(answer, dict) or is_cut_off(raw) or is_withheld(raw):
        return fault_of(raw) or "it was text"
    if answer.get("parsing_error") is not None or answer.get("parsed") is None:
        return "the answer is not as the schema asks for (this error's cause says where)"
    return "the answer asks for what cannot be done (this error's cause says what)"


def _quoted(answer: Any) -> str:
    """The text of an answer, to be shown to the model again."""
    raw = answer.get("raw") if isinstance(answer, dict) else answer
    parts = [str(raw.text)] if isinstance(raw, BaseMessage) else []
    if isinstance(raw, AIMessage):
        parts += [json.dumps(call["args"], ensure_ascii=False) for call in raw.tool_calls]
        parts += [call["args"] or "" for call in raw.invalid_tool_calls]
    return middle_out("\n".join(filter(None, parts)), _QUOTED)
