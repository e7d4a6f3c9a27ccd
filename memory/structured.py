"""Structured answers of a model, asked for by a schema."""

from __future__ import annotations

import json
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable
from pydantic import BaseModel

from perdure.errors import ConfigurationError, InvalidPatch
from perdure.memory.model_call import NamedModel, chat_model, fault_of, is_cut_off, is_withheld
from perdure.memory.quotation import middle_out

_QUOTED: Final = 4_000  # characters of an answer that the model is shown again


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


def parsed(answer: Any) -> Any:
    """The answer of a `structured` model as an instance of its schema; InvalidPatch if it is none.

    The text of the error may have parts of the answer.
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


def quoted_answer(answer: Any) -> str:
    """The text of an answer, to be shown to the model again."""
    raw = answer.get("raw") if isinstance(answer, dict) else answer
    parts = [str(raw.text)] if isinstance(raw, BaseMessage) else []
    if isinstance(raw, AIMessage):
        parts += [json.dumps(call["args"], ensure_ascii=False) for call in raw.tool_calls]
        parts += [call["args"] or "" for call in raw.invalid_tool_calls]
    return middle_out("\n".join(filter(None, parts)), _QUOTED)
