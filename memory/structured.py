"""Structured answers of a model: asked for by a schema, and again with what was wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.runnables import Runnable
from pydantic import BaseModel

from perdure.errors import ConfigurationError, InvalidPatch, ModelFailed
from perdure.memory.effects import Effects
from perdure.memory.model_call import (
    ModelCall,
    fault_of,
    is_cut_off,
    is_final,
    is_too_long,
    is_withheld,
    waiting,
)
from perdure.memory.shortening import middle_out

T = TypeVar("T")
_LEAST: Final = 1_000  # characters of a transcript that is halved because it was too long
_QUOTED: Final = 4_000  # characters of an answer that the model is shown again


@dataclass(frozen=True, slots=True)
class Refused:
    """An answer that cannot be used.

    Attributes:
        said: The answer.
        fault: What is wrong with it.
    """

    said: str
    fault: str


@dataclass(slots=True)
class Tally:
    """What asking took.

    Attributes:
        asks: How often the model was asked.
        tokens: What its answers say that they took, all together; None: they say nothing.
    """

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
    """Asks until there is an answer that can be used, but not for ever.

    Args:
        retries: How often a call is made again that failed, or whose answer was refused.
        backoff_s: Seconds before the first that is made again because it failed; they double.
    """

    retries: int
    backoff_s: float

    def asked(
        self,
        asker: ModelCall,
        request: Requesting,
        taken: Callable[[Any], T | Effects[T]],
        *,
        room: int,
        tally: Tally,
    ) -> Effects[T]:
        """What is made of the answer.

        Args:
            asker: Asks a `structured` model.
            request: Makes the request.
            taken: Makes what is wanted of an answer, in steps if it has to wait for something, or
                raises `InvalidPatch`.
            room: Characters of the conversation to be shown; fewer if they are too many for the
                model.
            tally: Counts.

        Raises:
            ModelFailed: There is no answer that can be used.
        """
        failures, refused = 0, None
        while True:
            [answer] = yield asker.asking([request(room, refused)])
            tally.add(answer)
            if is_too_long(answer) and room // 2 >= _LEAST:
                room //= 2
                continue
            failures += 1
            try:
                found = taken(_parsed(answer))
                return (yield from found) if isinstance(found, Generator) else found
            except InvalidPatch as exc:
                if is_final(answer) or failures > self.retries:
                    cause = answer if isinstance(answer, Exception) else exc
                    raise _failed(failures, _outline(answer)) from cause
                if isinstance(answer, Exception) and not isinstance(answer, ValueError):
                    yield waiting(self.backoff_s * 2 ** (failures - 1))
                else:  # some clients raise what pydantic says of an answer
                    refused = Refused(_said(answer), str(exc))


def structured(
    model: Any, schema: type[BaseModel], *, method: str, strict: bool
) -> Runnable[Any, Any]:
    """A model whose answers are of a schema, strictly if it can be told to decode so.

    Args:
        model: A chat model.
        schema: Of its answers.
        method: Of `with_structured_output`.
        strict: Whether to ask for decoding that can give nothing else.

    Raises:
        ConfigurationError: The model gives no structured answers.
    """
    # what an integration does not know of, it refuses in one of these ways
    cause: Exception | None = None
    tried: list[dict[str, Any]] = [{"method": method, "strict": strict}, {"method": method}, {}]
    for options in tried:
        try:
            out: Runnable[Any, Any] = model.with_structured_output(
                schema, include_raw=True, **options
            )
        except (AttributeError, TypeError, ValueError, NotImplementedError) as exc:
            cause = exc
        else:
            return out
    raise ConfigurationError(
        f"the model is {model!r:.80}, which gives no structured answers ({cause!s:.200}); expected "
        "a langchain chat model that calls tools"
    ) from cause


def _parsed(answer: Any) -> Any:
    """The answer as its schema has it.

    Raises:
        InvalidPatch: There is none.
    """
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
    """What is wrong with an answer, in none of its words: they may be a secret, and errors go far.

    The model is told in detail, and so is who looks at the error's cause.
    """
    if not isinstance(answer, dict) or is_cut_off(answer.get("raw")):
        return fault_of(answer.get("raw") if isinstance(answer, dict) else answer) or "it was text"
    if is_withheld(answer.get("raw")):
        return fault_of(answer["raw"]) or "it was withheld"
    if answer.get("parsing_error") is not None or answer.get("parsed") is None:
        return "the answer is not as the schema asks for (this error's cause says where)"
    return "the answer asks for what cannot be done (this error's cause says what)"


def _said(answer: Any) -> str:
    """What an answer said, for the model to see again."""
    raw = answer.get("raw") if isinstance(answer, dict) else answer
    parts = [str(raw.text)] if isinstance(raw, BaseMessage) else []
    if isinstance(raw, AIMessage):
        parts += [json.dumps(call["args"], ensure_ascii=False) for call in raw.tool_calls]
        parts += [call["args"] or "" for call in raw.invalid_tool_calls]
    return middle_out("\n".join(filter(None, parts)), _QUOTED)


def _failed(asks: int, fault: str) -> ModelFailed:
    times = "once" if asks == 1 else f"{asks} times"
    return ModelFailed(
        f"the model gave no answer that can be used: asked {times}, and in the end: {fault}; "
        "nothing was written"
    )
