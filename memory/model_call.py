"""Calls of a chat model, by name or object: a time limit, retries, answers by a schema."""

from __future__ import annotations

import asyncio
import contextvars
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langgraph.constants import TAG_NOSTREAM
from langgraph.errors import GraphBubbleUp
from pydantic import BaseModel, ValidationError

from perdure.effects import Effect, Operation
from perdure.errors import ConfigurationError, InvalidPatch, MissingDependency, ModelFailed
from perdure.memory.options import check_instance, check_seconds, check_text, check_whole_number
from perdure.memory.quotation import middle_out
from perdure.memory.thread_messages import storable
from perdure.storage.threads import ThreadPool, awaited_for, waited_for

T = TypeVar("T")
Request = Sequence[BaseMessage]
_FAULTS: Final = 5  # of an answer that are named
_LEAST: Final = 1_000  # characters of a conversation that is halved because it was too long
_QUOTED: Final = 4_000  # characters of an answer that the model is shown again
_REASONS: Final = ("finish_reason", "stop_reason", "stopReason", "done_reason")
_CUT_OFF: Final = {"length", "max_tokens", "model_length", "max_output_tokens"}
_WITHHELD: Final = {
    *("content_filter", "content_filtered", "safety", "refusal", "recitation"),
    *("prohibited_content", "blocklist", "guardrail_intervened"),
}
_REFUSED: Final = {400, 401, 403, 404, 405, 422}  # HTTP: asking again gets the same answer


def chat_model(model: Any) -> Runnable[Any, Any]:
    """A chat model: an object as it is, or that of a name such as `"openai:gpt-5-mini"`.

    OpenAI's go to `ChatOpenAI`, others to langchain's `init_chat_model`. If something is missing
    that may be there later, such as the key, the model is made when called.
    """
    if not isinstance(model, str):
        expected = 'a langchain chat model, or a name such as "openai:gpt-5-mini"'
        return check_instance("model", model, Runnable, expected)  # type: ignore[no-any-return]
    try:
        check_text("model, without its provider,", model.rpartition(":")[2])
        return _made(model)  # type: ignore[no-any-return]
    except (ConfigurationError, MissingDependency):
        raise
    except Exception:  # every provider has its own error for a key that is missing
        return NamedModel(model)


class NamedModel(RunnableLambda[Any, Any]):
    """A chat model that is made, and prepared, at its first call; `chat_model` makes it."""

    def __init__(self, given: str, prepare: Callable[[Any], Any] = lambda model: model) -> None:
        # if a function returns a runnable, langchain calls that
        super().__init__(self._resolved, name=given)
        self.given, self._prepare, self._model = given, prepare, None

    @property
    def model_name(self) -> str:
        """The name without its provider."""
        return self.given.partition(":")[2] or self.given

    def prepared(self, prepare: Callable[[Any], Any]) -> NamedModel:
        """The same, with something done before the first call: `lambda model: model.bind(…)`."""
        return NamedModel(self.given, lambda model: prepare(self._prepare(model)))

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> NamedModel:
        """See `BaseChatModel.bind_tools`."""
        return self.prepared(lambda model: model.bind_tools(tools, **kwargs))

    def _resolved(self, request: Any) -> Any:
        if self._model is None:
            try:
                self._model = self._prepare(_made(self.given))
            except Exception as exc:
                fault = f"the model {self.given!r} cannot be made: {exc!s:.300}"
                raise ConfigurationError(fault) from exc
        return self._model


def _made(name: str) -> Any:
    """The model of a name; ConfigurationError if no model can have it."""
    provider, _, model = name.partition(":")
    try:
        if provider == "openai":
            from langchain_openai import ChatOpenAI  # takes a second: only if a model is named

            return ChatOpenAI(model=model)
        from langchain.chat_models import init_chat_model

        return init_chat_model(name)
    except ImportError as exc:
        raise MissingDependency(
            f"model is {name!r:.80}, for which a package is missing ({exc}); in a checkout, pip "
            'install ".[agents]" and the package of the provider, or pass a chat model, or a name '
            '"openai:…"'
        ) from exc
    except ValueError as exc:
        if type(exc) is not ValueError:  # pydantic's: a key is missing
            raise
        raise ConfigurationError(
            f'model is {name!r:.80}; expected "provider:model", such as "openai:gpt-5-mini" '
            f"({str(exc).splitlines()[0]})"
        ) from exc


def with_tools(model: Any, tools: Sequence[Any]) -> Runnable[Any, Any]:
    """A model with tools to call; ConfigurationError if its class cannot call any."""
    try:
        return model.bind_tools(tools)  # type: ignore[no-any-return]
    except (AttributeError, NotImplementedError) as exc:
        raise _unable(model, "cannot call tools: it has no bind_tools", exc) from exc


def structured(model: Any, schema: type[BaseModel], *, strict: bool) -> Runnable[Any, Any]:
    """A model, or that of a name, whose answers are of a schema; strictly if it can decode so."""
    model = chat_model(model)
    if isinstance(model, NamedModel):
        return model.prepared(lambda made: structured(made, schema, strict=strict))
    cause: Exception | None = None
    method = {"method": "function_calling"}
    tried: list[dict[str, Any]] = [{**method, "strict": strict}, method, {}]
    for options in tried:
        try:
            return model.with_structured_output(schema, include_raw=True, **options)  # type: ignore[no-any-return]
        except (AttributeError, TypeError, ValueError, NotImplementedError) as exc:
            cause = exc  # an integration refuses what it does not know in one of these ways
    fault = "gives no structured answers: it has no with_structured_output"
    raise _unable(model, fault, cause) from cause


def _unable(model: Any, fault: str, cause: Exception | None) -> ConfigurationError:
    return ConfigurationError(
        f"the model is a {type(model).__name__}, which {fault} that works ({cause!r:.200}); "
        "expected a langchain chat model that calls tools, like ChatOpenAI"
    )


class InvalidAnswer(InvalidPatch):
    """An answer of another form than was asked for; `outline` has no word of the model's."""

    def __init__(self, fault: str, outline: str | None = None) -> None:
        super().__init__(fault)
        self.outline = fault if outline is None else outline


class RefusedAnswer(NamedTuple):
    """An answer that cannot be used, and what is wrong with it."""

    answer: Any
    fault: str


Requesting = Callable[[int, RefusedAnswer | None], Request]
"""Makes a request: for so many characters of a conversation, after an answer that was refused."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A model and how it is called: `ModelCall("openai:gpt-5-mini", timeout_s=20)`.

    Args:
        model: A chat model, what answers like one, or a name; see `chat_model`.
        timeout_s: Seconds a call may take; None: as long as it takes. A blocking call that takes
            longer goes on in its thread, and its answer is ignored.
        retries: How often a call is made again that failed, or whose answer cannot be used.
        backoff_s: Seconds before a failed call is made again; they double.
    """

    model: Any
    timeout_s: float | None = 60.0
    config: RunnableConfig | None = None
    retries: int = 2
    backoff_s: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", chat_model(self.model))
        if self.timeout_s is not None:
            check_seconds("timeout_s", self.timeout_s, above_zero=True)
        check_whole_number("retries", self.retries, 0)
        check_seconds("backoff_s", self.backoff_s)

    def asking(self, request: Request) -> Effect[Any]:
        """An effect: the answer to a request, or the error instead of it."""
        return Effect(lambda: self._answer(request), lambda: self._aanswer(request))

    async def usable(
        self, request: Requesting, taken: Callable[[Any], T | Operation[T]], *, room: int = 0
    ) -> T:
        """The result that `taken` makes of the first answer for which it raises no `InvalidPatch`.

        `room` characters of the conversation are shown; half of them if the model takes less. If
        no answer can be used, that is a `ModelFailed`, whose cause is the last error.
        """
        failures, refused = 0, None
        while True:
            answer = await self.asking(request(room, refused))
            if is_too_long(answer) and room // 2 >= _LEAST:
                room //= 2
                continue
            failures += 1
            try:
                result = taken(answer)
                return (await result) if isinstance(result, Coroutine) else result
            except InvalidPatch as exc:
                if is_final(answer) or is_too_long(answer) or failures > self.retries:
                    raise ModelFailed(
                        f"the model gave no answer that can be used: asked {times(failures)}, and "
                        f"in the end: {_outline(answer, exc)}; nothing was written"
                    ) from (answer if isinstance(answer, Exception) else exc)
                if isinstance(answer, Exception) and not isinstance(answer, ValueError):
                    pause = self.backoff_s * 2 ** (failures - 1)
                    await Effect(partial(time.sleep, pause), partial(asyncio.sleep, pause))
                else:  # some clients raise what pydantic says of an answer
                    refused = RefusedAnswer(answer, str(exc))

    def _answer(self, request: Request) -> Any:
        """The answer, or the error, of a call in a thread of its own, so that it can time out."""
        threads = ThreadPool(1, "perdure-model", lasting=False)
        run = contextvars.copy_context().run
        call = partial(run, self._quiet().invoke, list(request), self.config)
        try:
            return waited_for(threads.submit(call, awaited=False), self.timeout_s)
        except GraphBubbleUp:
            raise  # a signal, such as an interrupt, and no failure of the model
        except Exception as exc:
            return exc

    async def _aanswer(self, request: Request) -> Any:
        call = self._quiet().ainvoke(list(request), self.config)
        try:
            return await awaited_for(call, self.timeout_s)
        except GraphBubbleUp:
            raise
        except Exception as exc:
            return exc

    def _quiet(self) -> Runnable[Any, Any]:
        # the answer is not the user's: `stream_mode="messages"` leaves it out
        return self.model.with_config(tags=[TAG_NOSTREAM])  # type: ignore[no-any-return]


def model_call(model: Any) -> ModelCall:
    """A `ModelCall` as it is; anything else as the model of one."""
    return model if isinstance(model, ModelCall) else ModelCall(model)


def text_of(answer: Any) -> str:
    """The text of an answer, as it can be stored and sent on."""
    return storable(answer if isinstance(answer, str) else str(answer.text))


def the_model(error: Exception) -> str:
    """The model whose call failed, with its address, as far as the error of its client says."""
    request: Any = getattr(error, "request", None)
    try:
        url, name = request.url, json.loads(request.content).get("model")
        address = f"{url.scheme}://{url.netloc.decode()}{url.path}"  # no password, no query
    except Exception:  # no request of httpx, or one whose body is no JSON
        return "the model"
    return f"the model {name!r} at {address}" if name else f"the model at {address}"


def fault_of(answer: Any) -> str | None:
    """What is wrong with an answer from which text is wanted; None: nothing."""
    if isinstance(answer, TimeoutError):
        return f"there was {answer}" if str(answer) else "the call timed out"
    if isinstance(answer, Exception):
        return f"the call of {the_model(answer)} raised {type(answer).__name__}: {answer!s:.300}"
    if not isinstance(answer, str | BaseMessage):
        return f"the model returned a {type(answer).__name__}, which is no message"
    fault = _early_end(answer)
    return fault or (None if text_of(answer) else "the answer has no text")


def _early_end(answer: Any) -> str | None:
    metadata = getattr(answer, "response_metadata", None) or {}
    details = metadata.get("incomplete_details") or {}
    reasons = (*(metadata.get(key) for key in _REASONS), details.get("reason"))
    ending = next((str(reason).lower() for reason in reasons if reason), "")
    if ending in _CUT_OFF:
        return "the answer was cut off at the model's limit for output tokens"
    return f"the answer was withheld ({ending})" if ending in _WITHHELD else None


def is_too_long(answer: Any) -> bool:
    """Whether a call failed because the request is longer than the model's window."""
    if not isinstance(answer, Exception):
        return False
    status = getattr(answer, "status_code", None)
    return (
        isinstance(answer, ContextOverflowError)
        or status == 413
        or getattr(answer, "code", None) == "context_length_exceeded"
        or (status == 400 and "context length" in str(answer).lower())
    )


def is_final(answer: Any) -> bool:
    """Whether a call failed in a way that calling again cannot mend."""
    refused = getattr(answer, "status_code", None) in _REFUSED
    return isinstance(answer, ConfigurationError) or (isinstance(answer, Exception) and refused)


def times(count: int) -> str:
    """How often, in words."""
    return "once" if count == 1 else f"{count} times"


def parsed(answer: Any) -> Any:
    """The answer of a `structured` model; InvalidPatch, which may quote it, if it is none."""
    if not isinstance(answer, dict):
        raise InvalidPatch(fault_of(answer) or "the answer was text, which no schema has")
    raw, error = answer.get("raw"), answer.get("parsing_error")
    if fault := _early_end(raw):
        raise InvalidAnswer(fault)
    if error is not None:
        form, outline = (
            "the answer is not as the schema asks for",
            "the answer calls a tool that there is not",
        )
        if isinstance(error, ValidationError):
            outline = f"{form}: {faults_of(error)}"
        raise InvalidAnswer(f"{form}: {error!s:.1000}", outline)
    if answer.get("parsed") is None:
        for call in getattr(raw, "invalid_tool_calls", ()):
            fault = f"the arguments {call['args']!r:.200} are no JSON"
            raise InvalidAnswer(fault, "the answer is no JSON")
        fault = "the answer has no arguments of the tool that was to be called"
        raise InvalidAnswer(fault, "the answer calls no tool, which it was asked for")
    return answer["parsed"]


def faults_of(exc: ValidationError) -> str:
    """What is wrong, by field, without the values: one may be a megabyte, or a secret."""
    errors = exc.errors(include_url=False, include_context=False, include_input=False)[:_FAULTS]
    places = (".".join(str(part)[:60] for part in error["loc"]) for error in errors)
    faults = (error["msg"][:200] for error in errors)
    return "; ".join(f"{place}: {fault}" for place, fault in zip(places, faults, strict=True))


def quoted_answer(answer: Any) -> str:
    """The text of an answer, to be shown to the model again."""
    raw = answer.get("raw") if isinstance(answer, dict) else answer
    parts = [str(raw.text)] if isinstance(raw, BaseMessage) else []
    if isinstance(raw, AIMessage):
        parts += [json.dumps(call["args"], ensure_ascii=False) for call in raw.tool_calls]
        parts += [call["args"] or "" for call in raw.invalid_tool_calls]
    return middle_out(storable("\n".join(filter(None, parts))), _QUOTED)


def _outline(answer: Any, fault: InvalidPatch) -> str:
    """What is wrong with an answer, in none of its words: they may be a secret, and are logged."""
    if not isinstance(answer, dict):
        return fault_of(answer) or str(fault)
    cannot = "the answer asks for what cannot be done (this error's cause says what)"
    return fault.outline if isinstance(fault, InvalidAnswer) else cannot
