"""Call chat models with timeouts and retries, and parse their answers."""

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
from perdure.memory.quotation import cut_middle
from perdure.memory.thread_messages import make_storable
from perdure.storage.thread_pools import ThreadPool, await_outcome, wait_for_outcome

T = TypeVar("T")
RequestMessages = Sequence[BaseMessage]
# maximum number of validation errors to list in the description of an invalid answer
_MAX_FAULTS: Final = 5
# Minimum length, in characters, of a shortened conversation. A conversation that exceeds the
# model's context window is never shortened below this length.
_MIN_CONVERSATION_CHARS: Final = 1_000
# maximum number of characters that a retry request quotes from the rejected answer
_MAX_QUOTED_CHARS: Final = 4_000
# response metadata keys under which providers report why the model stopped
_REASON_KEYS: Final = ("finish_reason", "stop_reason", "stopReason", "done_reason")
# Stop reasons that providers report, in lower case. A reason in `_CUT_OFF` means that the answer
# was cut off at a token limit. A reason in `_WITHHELD` means that the provider withheld the
# answer, for example because of a content filter.
_CUT_OFF: Final = {"length", "max_tokens", "model_length", "max_output_tokens"}
_WITHHELD: Final = {
    *("content_filter", "content_filtered", "safety", "refusal", "recitation"),
    *("prohibited_content", "blocklist", "guardrail_intervened"),
}
# HTTP status codes of errors that are not worth retrying
_PERMANENT_STATUSES: Final = {400, 401, 403, 404, 405, 422}


def load_chat_model(model: Any) -> Runnable[Any, Any]:
    """Return the chat model for a model name such as `"openai:gpt-5-mini"`.

    An OpenAI model is a `ChatOpenAI`. Models from other providers are created with langchain's
    `init_chat_model`. If the model cannot be created yet, for example because no API key is set, it
    is created when it is first called. A model object is returned unchanged.

    Raises:
        ConfigurationError: The text cannot be the name of a model, or the value is not a model.
        MissingDependency: The package of the provider is not installed.
    """
    if not isinstance(model, str):
        return check_instance(  # type: ignore[no-any-return]
            "model",
            model,
            Runnable,
            'a langchain chat model, or a name such as "openai:gpt-5-mini"',
        )
    try:
        check_text("model, without its provider,", model.rpartition(":")[2])
        return _create_chat_model_by_name(model)  # type: ignore[no-any-return]
    except (ConfigurationError, MissingDependency):
        raise
    except Exception:  # Each provider raises a different error if the API key is missing.
        return NamedModel(model)


class NamedModel(RunnableLambda[Any, Any]):
    """A chat model that is created lazily, on its first call.

    Args:
        full_name: The name of the model, with its provider.
        prepare: A function that receives the created model and returns the model to call, for
            example the same model with tools bound to it.
    """

    def __init__(self, full_name: str, prepare: Callable[[Any], Any] = lambda model: model) -> None:
        # If the function of a `RunnableLambda` returns a runnable, LangChain invokes that runnable,
        # so `_get_or_create_model` only has to return the model.
        super().__init__(self._get_or_create_model, name=full_name)
        self.full_name, self._prepare, self._model = full_name, prepare, None

    @property
    def model_name(self) -> str:
        """The model's name without the provider prefix."""
        return self.full_name.partition(":")[2] or self.full_name

    def copy_with_added_model_preparation(self, prepare_model: Callable[[Any], Any]) -> NamedModel:
        """Return a copy of this object that also applies `prepare_model` to the created chat model.

        If several functions have been added, they are applied to the model in the order in which
        they were added.
        """
        return NamedModel(self.full_name, lambda model: prepare_model(self._prepare(model)))

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> NamedModel:
        """See `BaseChatModel.bind_tools`."""
        return self.copy_with_added_model_preparation(
            lambda model: model.bind_tools(tools, **kwargs)
        )

    def _get_or_create_model(self, request: Any) -> Any:
        """Return the prepared model. The first call creates the model."""
        if self._model is None:
            try:
                self._model = self._prepare(_create_chat_model_by_name(self.full_name))
            except Exception as exc:
                fault = f"the model {self.full_name!r} cannot be created: {exc!s:.300}"
                raise ConfigurationError(fault) from exc
        return self._model


def _create_chat_model_by_name(full_name: str) -> Any:
    """Create the chat model for a name such as `"openai:gpt-5-mini"`.

    Raises:
        ConfigurationError: The text cannot be the name of a model.
        MissingDependency: The package of the provider is not installed.
    """
    provider, _, model = full_name.partition(":")
    try:
        if provider == "openai":
            # Import langchain_openai here instead of at the top of the module, because the import
            # takes a second.
            from langchain_openai import ChatOpenAI

            return ChatOpenAI(model=model)
        from langchain.chat_models import init_chat_model

        return init_chat_model(full_name)
    except ImportError as exc:
        raise MissingDependency(
            f"the model {full_name!r:.80} needs a package that is not installed ({exc}). "
            "Run `pip install 'perdure[agents]'`, and install the provider's "
            'package. Or pass another model, such as "openai:gpt-5-mini"'
        ) from exc
    except ValueError as exc:
        # If the API key is missing, pydantic raises a subclass of ValueError.
        if type(exc) is not ValueError:
            raise
        raise ConfigurationError(
            f"the argument 'model' is {full_name!r:.80}; expected a string of the form "
            f'"provider:model", such as "openai:gpt-5-mini" ({str(exc).splitlines()[0]})'
        ) from exc


def bind_tools(model: Any, tools: Sequence[Any]) -> Runnable[Any, Any]:
    """Return a model that can call the tools.

    Raises:
        ConfigurationError: The model does not support tools.
    """
    try:
        return model.bind_tools(tools)  # type: ignore[no-any-return]
    except (AttributeError, NotImplementedError) as exc:
        raise _build_missing_feature_error(
            model, "cannot call tools, because it has no working method bind_tools", exc
        ) from exc


def bind_output_schema(model: Any, schema: type[BaseModel], *, strict: bool) -> Runnable[Any, Any]:
    """Return a model that produces structured output with the fields of a schema.

    The output of the returned model is a dict; pass it to `extract_structured_answer`.

    Args:
        model: A chat model, or its name.
        schema: The schema.
        strict: Whether the provider is asked to enforce the schema, if the provider supports strict
            schemas.

    Raises:
        ConfigurationError: The model does not support structured answers.
    """
    model = load_chat_model(model)
    if isinstance(model, NamedModel):
        return model.copy_with_added_model_preparation(
            lambda loaded: bind_output_schema(loaded, schema, strict=strict)
        )
    cause: Exception | None = None
    method = {"method": "function_calling"}
    attempts: list[dict[str, Any]] = [{**method, "strict": strict}, method, {}]
    for options in attempts:
        try:
            return model.with_structured_output(schema, include_raw=True, **options)  # type: ignore[no-any-return]
        except (AttributeError, TypeError, ValueError, NotImplementedError) as exc:
            # Try the next options if the model's `with_structured_output` does not support the
            # current ones.
            cause = exc
    raise _build_missing_feature_error(
        model,
        "cannot return structured answers, because it has no working method with_structured_output",
        cause,
    ) from cause


def _build_missing_feature_error(
    model: Any, missing_feature: str, cause: Exception | None
) -> ConfigurationError:
    """Return the error to raise if a model lacks a feature.

    `missing_feature` says what the model cannot do, and why. The error message is "the model is a
    FakeModel, which" followed by `missing_feature`.
    """
    return ConfigurationError(
        f"the model is a {type(model).__name__}, which {missing_feature} ({cause!r:.200}); "
        "expected a langchain chat model that calls tools, like ChatOpenAI"
    )


class InvalidAnswer(InvalidPatch):
    """Raised if a model's answer does not have the requested format.

    Attributes:
        outline: A description of the fault that quotes nothing from the answer, for the log.
    """

    def __init__(self, fault: str, outline: str | None = None) -> None:
        super().__init__(fault)
        self.outline = fault if outline is None else outline


class RefusedAnswer(NamedTuple):
    """An unusable answer from a model, with a description of what is wrong with it."""

    answer: Any
    fault: str


RequestBuilder = Callable[[int, RefusedAnswer | None], RequestMessages]
"""A function that builds a request.

The arguments of the function are the maximum number of characters of the conversation in the
request, and the last answer if it was refused.
"""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A chat model, with the timeout and retry settings for its calls.

    For example, `ModelCall("openai:gpt-5-mini", retries=0)` calls the model without retries.

    Args:
        model: A chat model, a runnable that answers like a chat model, or the name of a model, such
            as `"openai:gpt-5-mini"`.
        timeout_s: The time limit of a call, in seconds, or None for no limit. A blocking call that
            takes longer continues in its OS thread, and its answer is ignored.
        config: The config of the calls.
        retries: The maximum number of further calls after a call that failed, or whose answer
            cannot be used.
        backoff_s: The pause before the first retry of a failed call, in seconds. It doubles with
            each further retry.
    """

    model: Any
    timeout_s: float | None = 60.0
    config: RunnableConfig | None = None
    retries: int = 2
    backoff_s: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", load_chat_model(self.model))
        if self.timeout_s is not None:
            check_seconds("timeout_s", self.timeout_s, above_zero=True)
        check_whole_number("retries", self.retries, 0)
        check_seconds("backoff_s", self.backoff_s)

    def request_answer(self, request: RequestMessages) -> Effect[Any]:
        """Return an effect that calls the model.

        When the effect is run, it calls the model and returns the answer, or the exception that
        the call raised.
        """
        return Effect(lambda: self._call_blocking(request), lambda: self._call_async(request))

    async def request_usable_answer(
        self,
        build_request: RequestBuilder,
        read_answer: Callable[[Any], T | Operation[T]],
        *,
        max_chars: int = 0,
    ) -> T:
        """Call the model until its answer is usable, and return the result of `read_answer`.

        Args:
            build_request: Builds the request of each call.
            read_answer: Returns the result of an answer, or raises `InvalidPatch` if the answer
                cannot be used.
            max_chars: The maximum number of characters of the conversation in the request. The
                number is halved each time that the request exceeds the model's context window.

        Raises:
            ModelFailed: No answer can be used. The cause is the last error.
        """
        failures, refused = 0, None
        while True:
            answer = await self.request_answer(build_request(max_chars, refused))
            if is_context_overflow_error(answer) and max_chars // 2 >= _MIN_CONVERSATION_CHARS:
                max_chars //= 2
                continue
            failures += 1
            try:
                result = read_answer(answer)
                return (await result) if isinstance(result, Coroutine) else result
            except InvalidPatch as exc:
                is_last = is_permanent_failure(answer) or is_context_overflow_error(answer)
                if is_last or failures > self.retries:
                    fault = _describe_unusable_answer_for_log(answer, exc)
                    raise ModelFailed(
                        f"the model gave no usable answer (number of model calls: {failures}); the "
                        f"last error: {fault}; nothing was written"
                    ) from (answer if isinstance(answer, Exception) else exc)
                if isinstance(answer, Exception) and not isinstance(answer, ValueError):
                    pause = self.backoff_s * 2 ** (failures - 1)
                    await Effect(partial(time.sleep, pause), partial(asyncio.sleep, pause))
                else:
                    # Some clients raise a ValueError if the model's answer fails pydantic
                    # validation.
                    refused = RefusedAnswer(answer, str(exc))

    def _call_blocking(self, request: RequestMessages) -> Any:
        """Return the model's answer, or the exception that the call raised.

        The model is called in a separate OS thread, so that the caller can stop waiting at the time
        limit.
        """
        threads = ThreadPool(1, "perdure-model", is_permanent=False)
        call = partial(
            contextvars.copy_context().run,
            self._hide_from_stream().invoke,
            list(request),
            self.config,
        )
        try:
            return wait_for_outcome(threads.submit(call, is_async=False), self.timeout_s)
        except GraphBubbleUp:
            # GraphBubbleUp is a LangGraph control-flow signal, such as an interrupt, and not a
            # model failure.
            raise
        except Exception as exc:
            return exc

    async def _call_async(self, request: RequestMessages) -> Any:
        """Return the model's answer, or the exception that the call raised."""
        call = self._hide_from_stream().ainvoke(list(request), self.config)
        try:
            return await await_outcome(call, self.timeout_s)
        except GraphBubbleUp:
            raise
        except Exception as exc:
            return exc

    def _hide_from_stream(self) -> Runnable[Any, Any]:
        """Return a copy of the model, tagged to exclude its output from message streaming."""
        # perdure sends this request to the model for its own purposes, for example to write a
        # summary. The model's answer to such a request is not meant for the user, so
        # `stream_mode="messages"` must not emit the answer.
        return self.model.with_config(tags=[TAG_NOSTREAM])  # type: ignore[no-any-return]


def make_model_call(model: Any) -> ModelCall:
    """Wrap a model in a `ModelCall` with default settings. A `ModelCall` is returned unchanged."""
    return model if isinstance(model, ModelCall) else ModelCall(model)


def read_answer_text(answer: Any) -> str:
    """Return the text of a model's answer, without characters that cannot be stored."""
    return make_storable(answer if isinstance(answer, str) else str(answer.text))


def describe_name_and_url_of_failed_model(error: Exception) -> str:
    """Describe the model whose call failed.

    If `error` contains the HTTP request to the model, the description contains the model's name and
    the request's URL.
    """
    request: Any = getattr(error, "request", None)
    try:
        url, name = request.url, json.loads(request.content).get("model")
        # Remove the password and query string from the model's URL, because they may be secret.
        address = f"{url.scheme}://{url.netloc.decode()}{url.path}"
    # The model's name is unknown if the error contains no httpx request, or if the request body is
    # not JSON.
    except Exception:
        return "the model"
    return f"the model {name!r} at {address}" if name else f"the model at {address}"


def find_reason_for_unusable_answer(answer: Any) -> str | None:
    """Return the reason why a model's answer has no usable text, or None if its text is usable."""
    if isinstance(answer, TimeoutError):
        return f"there was {answer}" if str(answer) else "the call timed out"
    if isinstance(answer, Exception):
        model, error = describe_name_and_url_of_failed_model(answer), type(answer).__name__
        return f"the call of {model} raised {error}: {answer!s:.300}"
    if not isinstance(answer, str | BaseMessage):
        return f"the model returned a {type(answer).__name__}; expected a message"
    return _describe_incomplete_answer(answer) or (
        None if read_answer_text(answer) else "the answer has no text"
    )


def _describe_incomplete_answer(answer: Any) -> str | None:
    """Return why a model's answer is incomplete, or None if it is complete.

    An answer is incomplete if it was cut off at a token limit, or if the provider withheld it, for
    example because of a content filter.
    """
    metadata = getattr(answer, "response_metadata", None) or {}
    details = metadata.get("incomplete_details") or {}
    reasons = (*(metadata.get(key) for key in _REASON_KEYS), details.get("reason"))
    ending = next((str(reason).lower() for reason in reasons if reason), "")
    if ending in _CUT_OFF:
        return "the answer was cut off at the model's limit for output tokens"
    return f"the provider withheld the answer ({ending})" if ending in _WITHHELD else None


def is_context_overflow_error(answer_or_error: Any) -> bool:
    """Return whether a call failed because the request exceeds the model's context window."""
    if not isinstance(answer_or_error, Exception):
        return False
    status = getattr(answer_or_error, "status_code", None)
    return (
        isinstance(answer_or_error, ContextOverflowError)
        or status == 413
        or getattr(answer_or_error, "code", None) == "context_length_exceeded"
        or (status == 400 and "context length" in str(answer_or_error).lower())
    )


def is_permanent_failure(answer: Any) -> bool:
    """Return whether a call failed with an error that a retry cannot resolve."""
    is_refused = getattr(answer, "status_code", None) in _PERMANENT_STATUSES
    return isinstance(answer, ConfigurationError) or (isinstance(answer, Exception) and is_refused)


def extract_structured_answer(model_output: Any) -> Any:
    """Extract the structured answer from the output of a model to which an output schema is bound.

    `model_output` is the output of a model returned by `bind_output_schema`.

    Raises:
        InvalidPatch: The answer does not fit the schema. The message may quote the answer.
    """
    if not isinstance(model_output, dict):
        raise InvalidPatch(
            find_reason_for_unusable_answer(model_output)
            or "the answer is text; expected the fields of the schema"
        )
    raw, error = model_output.get("raw"), model_output.get("parsing_error")
    if fault := _describe_incomplete_answer(raw):
        raise InvalidAnswer(fault)
    if error is not None:
        fault, outline = "the answer does not fit the schema", "the answer calls an unknown tool"
        if isinstance(error, ValidationError):
            outline = f"{fault}: {describe_validation_errors(error)}"
        raise InvalidAnswer(f"{fault}: {error!s:.1000}", outline)
    if model_output.get("parsed") is None:
        for call in getattr(raw, "invalid_tool_calls", ()):
            fault = f"the arguments {call['args']!r:.200} are not valid JSON"
            raise InvalidAnswer(fault, "the model's answer is not valid JSON")
        raise InvalidAnswer("the model's answer does not call the required tool")
    return model_output["parsed"]


def describe_validation_errors(exc: ValidationError) -> str:
    """Describe the first few validation errors as `field: error`, separated by semicolons.

    The description does not contain the values of fields, because they may be very long or contain
    secrets.
    """
    errors = exc.errors(include_url=False, include_context=False, include_input=False)[:_MAX_FAULTS]
    paths = (".".join(str(part)[:60] for part in error["loc"]) for error in errors)
    faults = (error["msg"][:200] for error in errors)
    return "; ".join(f"{path}: {fault}" for path, fault in zip(paths, faults, strict=True))


def quote_refused_model_answer(answer: Any) -> str:
    """Return the text and tool call arguments of a model answer that perdure has rejected.

    The returned text is quoted in the request that asks the model for a better answer, and is
    shortened to `_MAX_QUOTED_CHARS` characters.
    """
    raw = answer.get("raw") if isinstance(answer, dict) else answer
    parts = [str(raw.text)] if isinstance(raw, BaseMessage) else []
    if isinstance(raw, AIMessage):
        parts += [json.dumps(call["args"], ensure_ascii=False) for call in raw.tool_calls]
        parts += [call["args"] or "" for call in raw.invalid_tool_calls]
    return cut_middle(make_storable("\n".join(filter(None, parts))), _MAX_QUOTED_CHARS)


def _describe_unusable_answer_for_log(answer: Any, fault: InvalidPatch) -> str:
    """Describe why a model's answer cannot be used. A structured answer is not quoted.

    A structured answer is a dict. The returned description is logged, so it must not quote a
    structured answer, which may contain secrets.
    """
    if not isinstance(answer, dict):
        return find_reason_for_unusable_answer(answer) or str(fault)
    invalid = "the answer asks for an invalid change (see the __cause__ of this error)"
    return fault.outline if isinstance(fault, InvalidAnswer) else invalid
