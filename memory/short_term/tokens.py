"""Count the tokens of texts, messages, requests and tools, and look up context window sizes.

OpenAI's encodings are provided by the packages of the `tokens` extra. For models from other
providers, token counts are estimated (see `token_estimates`). The estimated token counts are scaled
up if the provider reports higher token counts in the `usage_metadata` of its responses.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache
from importlib import import_module
from math import ceil
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from perdure.errors import UnknownModel
from perdure.memory.conversation import CALL_BLOCKS, REASONING_BLOCKS, get_role, has_block_of_type
from perdure.memory.options import check_instance
from perdure.memory.short_term.counting_functions import (
    CountingFunction,
    find_token_counting_method,
)
from perdure.memory.short_term.token_estimates import (
    count_block_tokens,
    count_voice_tokens,
    estimate_text_tokens,
)
from perdure.memory.usage import is_same_model, read_model_name, read_reported_output_tokens

# Import these modules only for type checking. Importing them at runtime would take a second, and
# they are not needed to estimate the tokens of a text.
if TYPE_CHECKING:
    from langchain_core.messages import MessageLikeRepresentation
    from langchain_core.runnables import Runnable

# Numbers of tokens that OpenAI adds per message, name, tool call, tool result and request. Source:
# https://cookbook.openai.com/examples/how_to_count_tokens_with_tiktoken
_FRAME, _NAME, _CALL, _RESULT, _REPLY = 4, 1, 3, 3, 3
# Minimum size of a model response, in estimated tokens. The usage reported for shorter responses is
# not used to scale the estimates.
_MIN_MEASURED: Final = 50
# Maximum factor by which estimates are scaled up if a provider reports more tokens than estimated.
_MAX_SCALE: Final = 4.0
# The encoder is created once, because creating an encoder for each call takes three times as long.
_JSON = json.JSONEncoder(ensure_ascii=False, default=str)


class TokenCounter:
    """Counts the tokens of texts, messages, tools and requests.

    A message's token count includes the fixed overhead that OpenAI adds to each message.

    Args:
        encoding: The name of an OpenAI encoding. If the encoding is not installed, tokens are
            estimated.
        function: A function of the user that counts the tokens of messages. If a function is given,
            neither an encoding nor an estimate is used.
        tools: The tools that every request contains.
        scale: The factor by which estimates are multiplied.
        model: The name of the model whose reported usage scales the estimates, or None if the model
            is unknown.
    """

    def __init__(
        self,
        encoding: str | None = None,
        function: Callable[..., Any] | None = None,
        tools: Sequence[Any] = (),
        scale: float = 1.0,
        model: str | None = None,
    ) -> None:
        self._count_encoded = None if encoding is None else _load_token_counting_function(encoding)
        self.encoding = encoding if self._count_encoded else None
        # If the custom counting function is `len`, the counter counts messages rather than tokens.
        self.counts_messages = function is len
        is_custom = function is not None and function is not len
        self._function = CountingFunction(function) if is_custom else None  # type: ignore[arg-type]
        self._tools, self.scale, self.model = tools, scale, model
        self.bound_tool_tokens = self.count_tools(tools)

    @property
    def request_overhead(self) -> int:
        """The fixed number of tokens that every request has in addition to its messages."""
        return ceil(self.count_request_tokens_excluding_messages(0))

    def count_request_tokens_excluding_messages(self, tool_tokens: float) -> float:
        """Return the number of tokens in a request that do not belong to messages.

        `tool_tokens` is the token count of the request's tools, excluding tools that are bound to
        the model. A custom counting function may add a fixed overhead to every request, and this
        overhead is assumed to include the tools. If a custom counting function is used, return the
        larger of two numbers: `tool_tokens`, and the fixed number of tokens that the function adds
        to each request.
        """
        if self._function is not None:
            return max(self._function.request_overhead_tokens, tool_tokens)
        return (0 if self.counts_messages else _REPLY) + self.bound_tool_tokens + tool_tokens

    @property
    def request_overhead_tokens(self) -> float:
        """The fixed number of tokens that a custom counting function adds to each request.

        If no custom counting function is used, the overhead is 0.
        """
        return 0 if self._function is None else self._function.request_overhead_tokens

    @property
    def is_additive(self) -> bool:
        """Whether a list's token count is the sum of the token counts of its messages."""
        return self._function is None or self._function.is_additive

    @property
    def message_counter(self) -> Callable[[BaseMessage], float]:
        """The function that counts the tokens of a single message.

        The result may be a fraction.
        """
        return (
            self.count_message_tokens
            if self._function is None
            else self._function.count_message_tokens
        )

    def with_calibration_for_model(self, model: str | None) -> TokenCounter:
        """Return a copy of this token counter for the model named `model`.

        The copy scales its token estimates to the token usage that the model reports in its
        responses.

        The returned counter ignores the token usage in responses of models other than `model`.
        """
        counter = copy(self)
        counter.model = model
        return counter

    def count_text(self, text: str) -> int:
        """Return the number of tokens of a text.

        If the text contains the name of a special token of the encoding, the name is counted as
        plain text.
        """
        if self._count_encoded is not None:
            return self._count_encoded(text)
        if self._function is not None:
            return self.count_message_tokens(HumanMessage(text))
        return estimate_text_tokens(text, self.scale)

    def count_message_tokens(self, message: BaseMessage) -> int:
        """Return the number of tokens of a message, including its name, content and tool calls."""
        kind = get_role(message)
        if kind == "other":
            from perdure.memory.nodes import check_messages

            [message] = check_messages([message], "the messages")
        if self.counts_messages:
            return 1
        if self._function is not None:
            return ceil(self._function.count_message_tokens(message))
        content = message.content
        total = _FRAME + (
            self.count_text(content) if type(content) is str else self._count_block_tokens(content)
        )
        if message.name:
            total += _NAME + self.count_text(message.name)
        if kind == "ai":
            audio = message.additional_kwargs.get("audio")
            if isinstance(audio, Mapping):
                total += count_voice_tokens(audio, self.count_text)
            return total + self._count_tool_call_tokens(message)
        return total + _RESULT if kind == "tool" else total

    def count_tools(self, tools: Sequence[Any]) -> int:
        """Return the number of tokens of the tools' schemas. `bind_tools` must accept the tools."""
        if self.counts_messages:
            return 0
        return sum(self.count_text(_JSON.encode(_build_tool_schema(tool))) for tool in tools)

    def count_request_tokens(self, messages: Sequence[BaseMessage], tool_tokens: int = 0) -> float:
        """Return the number of tokens of a request with the given messages.

        `tool_tokens` is the token count of the request's tools, excluding tools that are bound to
        the model. A custom counting function may add a fixed overhead to every request, and this
        overhead is assumed to include the tools. If `tool_tokens` is larger than the counting
        function's overhead, the difference is added to the returned count.
        """
        if self._function is None:
            return self.count_request_tokens_excluding_messages(tool_tokens) + sum(
                map(self.count_message_tokens, messages)
            )
        counted = self._function.count_request_tokens(messages)
        return counted + (max(0, tool_tokens - self.request_overhead_tokens) if tool_tokens else 0)

    def count_system_prompt(self, system_prompt: BaseMessage | str | None) -> int:
        """Return the number of tokens of a system prompt.

        If `system_prompt` is None, or if the counter counts messages instead of tokens, return 0.
        """
        if system_prompt is None or self.counts_messages:
            return 0
        if isinstance(system_prompt, str):
            system_prompt = SystemMessage(system_prompt)
        return self.count_message_tokens(system_prompt)

    def scale_to_reported_usage(self, messages: Sequence[BaseMessage]) -> TokenCounter:
        """Return a copy of the counter with estimates scaled to the usage reported in `messages`.

        Only the responses of one model are used to compute the scale factor: the counter's `model`
        or, if that is None, the model that produced the latest response. For each response of the
        selected model, the reported token count is divided by the estimated token count. The scale
        factor is the largest ratio of reported to estimated tokens, limited to values between 1 and
        `_MAX_SCALE`. Removing responses from `messages` cannot increase the scale factor, because
        the scale factor is a maximum over the responses.
        """
        if self._count_encoded is not None or self._function is not None or self.counts_messages:
            return self
        answers = [m for m in messages if get_role(m) == "ai" and read_reported_output_tokens(m)]
        if not answers and self.scale == 1.0:
            return self
        model = self.model or next(filter(None, map(read_model_name, reversed(answers))), None)
        unscaled = TokenCounter()
        of_model = (m for m in answers if is_same_model(read_model_name(m), model))
        scale = min(
            _MAX_SCALE,
            max(map(unscaled._compute_reported_to_estimated_ratio, of_model), default=1.0),
        )
        if scale == self.scale:
            return self
        return TokenCounter(tools=self._tools, scale=scale, model=self.model)

    def _compute_reported_to_estimated_ratio(self, message: BaseMessage) -> float:
        """Return a model response's reported token count divided by its estimated token count.

        The returned ratio is at least 1, because token estimates are never scaled down. The
        returned ratio is 1 for a response that is estimated at fewer than `_MIN_MEASURED` tokens.
        For a response with reasoning, the returned ratio is 1, because the reported token count
        excludes the reasoning.
        """
        if has_block_of_type(message, REASONING_BLOCKS):
            return 1.0
        estimated = self.count_message_tokens(message) - _FRAME
        return (
            max(1.0, read_reported_output_tokens(message) / estimated)
            if estimated >= _MIN_MEASURED
            else 1.0
        )

    def _count_tool_call_tokens(self, message: Any) -> int:
        """Return the number of tokens of the tool calls in a message."""
        total = 0
        for call in (*message.tool_calls, *message.invalid_tool_calls):
            args = call["args"] if isinstance(call["args"], str) else _JSON.encode(call["args"])
            total += _CALL + self.count_text(call["name"] or "") + self.count_text(args)
        return total

    def _count_block_tokens(self, blocks: Sequence[Any]) -> int:
        """Return the number of tokens in content blocks.

        Blocks that are tool calls are not counted, because `_count_tool_call_tokens` counts them.
        """
        total = 0
        for block in blocks:
            if isinstance(block, str):
                total += self.count_text(block)
            elif str(block.get("type")) not in CALL_BLOCKS:
                total += count_block_tokens(block, self.count_text)
        return total


Countable: TypeAlias = "str | Runnable[Any, Any] | Callable[..., float] | TokenCounter"


def token_counter(model: Countable | None = None) -> TokenCounter:
    """Return a token counter for a model, or one that uses a custom counting function.

    Args:
        model: The model or function. With None or `"approximate"`, tokens are estimated. The name
            of an OpenAI model selects its encoding. For a chat model, the encoding is selected by
            the model's name, or tokens are estimated if the name is not OpenAI's; the tools bound
            to the model are counted too. If a model class of the user counts messages itself, its
            method is called. A function is called as langchain's `trim_messages` calls it: with one
            message if its parameter is annotated as a message, otherwise with a list of messages.
            The tokens that a function adds to every request, such as those of tools, are measured
            once. `len` counts messages and no tools. A `TokenCounter` is returned unchanged.

    Raises:
        UnknownModel: `model` is text, but not the name of an OpenAI model.
        ConfigurationError: `model` is of another type.
    """
    model, tools = _unwrap_model_and_bound_tools(model)
    if model is None or model == "approximate":
        return TokenCounter()
    if isinstance(model, str):
        encoding = _find_encoding_name(model)
        if encoding is None:
            raise UnknownModel(
                f"no token encoding is known for the model {model!r}; pass 'approximate', a chat "
                "model, or a function that counts the tokens of a list of messages"
            )
        return TokenCounter(encoding, model=model)
    if isinstance(model, TokenCounter):
        return model
    from langchain_core.language_models import BaseLanguageModel

    if isinstance(model, BaseLanguageModel):
        name, method = get_model_name(model), find_token_counting_method(model)
        if method is not None:
            return TokenCounter(function=method, model=name)
        return TokenCounter(_find_encoding_name(_describe_model(model)), tools=tools, model=name)
    function: Any = getattr(model, "get_num_tokens_from_messages", model)
    check_instance(
        "token_counter",
        function,
        Callable,  # type: ignore[arg-type]
        "'approximate', a model, its name, a callable over messages, or a TokenCounter",
    )
    return TokenCounter(function=function)


def count_tokens(
    messages: Sequence[MessageLikeRepresentation],
    counter: Countable | None = None,
    tools: Sequence[Any] = (),
) -> int:
    """Return the number of tokens of a request: its messages and the schemas of its tools.

    >>> count_tokens([HumanMessage("What is the capital of France?")], "gpt-4o")
    14
    """
    from perdure.memory.nodes import convert_values_to_messages

    converted = convert_values_to_messages(messages, "the messages")
    fitted = token_counter(counter).scale_to_reported_usage(converted)
    return ceil(fitted.count_request_tokens(converted, fitted.count_tools(tools)))


def context_window(model: str | Runnable[Any, Any]) -> int:
    """Return the maximum number of input tokens of a model.

    Args:
        model: A chat model whose `profile` has the number, or the name of an OpenAI model.

    Raises:
        UnknownModel: The number is not known for this model.
    """
    from langchain_core.language_models import BaseChatModel

    unwrapped: Any = _unwrap_model_and_bound_tools(model)[0]
    check_instance(
        "the model",
        unwrapped,
        (str, BaseChatModel),
        "a chat model, or the name of an OpenAI model whose context window is known",
    )
    chat_model = unwrapped
    if isinstance(unwrapped, str) and _find_encoding_name(unwrapped) is not None:
        # Import `langchain_openai` only when it is needed, because the import takes a second.
        from langchain_openai import ChatOpenAI

        chat_model = ChatOpenAI(model=_PROVIDER.sub("", unwrapped), api_key=lambda: "none")
    tokens = (getattr(chat_model, "profile", None) or {}).get("max_input_tokens")
    if not isinstance(tokens, int) or tokens < 1:
        raise UnknownModel(
            f"the context window of the model {_describe_model(unwrapped)!r} is not known; pass a "
            "number of tokens, or a chat model with profile={'max_input_tokens': ...}"
        )
    return tokens


def _build_tool_schema(tool: Any) -> Any:
    """Return a tool's JSON schema. A tool in a provider-specific format is returned unchanged."""
    from langchain_core.utils.function_calling import convert_to_openai_tool

    try:
        return convert_to_openai_tool(tool)
    except Exception:
        return check_instance(
            "tools", tool, Mapping, "a tool that a chat model's bind_tools method accepts"
        )


_PROVIDER: Final = re.compile(r"^(openai|azure_openai|azure)[:/]")
# Names of the encodings of OpenAI's chat models.
_ENCODINGS: Final = ("o200k_base", "cl100k_base")
# Maximum number of characters to pass to bpe-openai in one call, because it raises an error for
# inputs of a million characters.
_MAX_CHUNK_CHARS: Final = 50_000
# Maximum number of cached token counts. When the cache is full, it is cleared.
_MAX_CACHED_COUNTS: Final = 1 << 16


def _unwrap_model_and_bound_tools(model: Any) -> tuple[Any, Sequence[Any]]:
    """Extract a chat model from the wrappers that LangChain methods such as `bind_tools` add.

    Return the model and the bound tools.
    """
    tools: Sequence[Any] = ()
    if model is None or isinstance(model, str | TokenCounter):
        return model, tools
    from langchain_core.runnables import RunnableBinding

    while isinstance(model, RunnableBinding):
        model, tools = model.bound, tools or model.kwargs.get("tools") or ()
    return model, tools


def get_model_name(model: Any) -> str | None:
    """Return the model name from the attributes of a chat model, or None if it has no name."""
    names = (getattr(model, attribute, None) for attribute in ("model_name", "model", "model_id"))
    return next((name for name in names if isinstance(name, str) and name), None)


def _describe_model(model: Any) -> str:
    """Return a model's name, or its class name if the model has no name."""
    return model if isinstance(model, str) else get_model_name(model) or type(model).__name__


def _find_encoding_name(model: str) -> str | None:
    """Return the name of an OpenAI chat model's encoding, or None for any other model."""
    # Import tiktoken here, because only counters that are created from a model name need it.
    from tiktoken import encoding_name_for_model

    try:
        # The encoding `o200k_harmony` differs from `o200k_base` only in its special tokens.
        name = encoding_name_for_model(_PROVIDER.sub("", model)).replace("harmony", "base")
    except KeyError:
        return None
    return name if name in _ENCODINGS else None


@cache
def _load_token_counting_function(encoding_name: str) -> Callable[[str], int] | None:
    """Return a function that counts the tokens of a text using an OpenAI encoding.

    Return None if `bpe_openai`, the package that contains the encodings, is not installed. The
    returned function caches its results.
    """
    # Ignore the deprecation warning that bpe-openai triggers when it reads its files.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            # Use bpe-openai, because it ships with the encodings, whereas tiktoken downloads them.
            bpe: Any = import_module("bpe_openai")
        except ImportError:
            logging.getLogger("perdure").warning(
                "tokens are estimated, because the encoding %s is not installed; run "
                "`pip install 'perdure[tokens]'`, or pass token_counter('approximate') to "
                "estimate them without this warning",
                encoding_name,
            )
            return None
        encode = bpe.get_encoding(encoding_name).encode_ordinary
    # Cached token counts, keyed by the hash of the text so that the texts are not kept in memory.
    counts: dict[int, int] = {}

    def count_text(text: str) -> int:
        """Return the number of tokens of a text."""
        key = hash(text)
        if key not in counts:
            if len(counts) >= _MAX_CACHED_COUNTS:
                counts.clear()
            counts[key] = sum(
                len(encode(text[start : start + _MAX_CHUNK_CHARS]))
                for start in range(0, len(text), _MAX_CHUNK_CHARS)
            )
        return counts[key]

    return count_text
