"""Count tokens with functions that the application supplies.

A token counter can be any function that LangChain's `trim_messages` accepts as `token_counter`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from math import inf
from numbers import Integral, Real
from typing import Any, Final, TypeVar

from langchain_core.messages import AnyMessage, BaseMessage, HumanMessage

from perdure.errors import BudgetExceeded, ConfigurationError

T = TypeVar("T")

_METHOD: Final = "get_num_tokens_from_messages"
# Names of a chat model's token-counting methods. In LangChain's implementation, each method calls
# the next method in this tuple.
_METHODS: Final = (_METHOD, "get_num_tokens", "get_token_ids")
# maximum number of steps in the binary search for the largest selection of messages that fits a
# token budget
_SEARCH_STEPS: Final = 20
# Two sample messages, used to measure how many tokens a counting function adds to every request.
_PROBES: Final = (
    "What is the weather like in the city?",
    "When does the next train leave from it?",
)


class CountingFunction:
    """An application-supplied token counter for whole requests or for single messages.

    Some token-counting functions add a fixed number of tokens to the count of every request, for
    example for tool schemas. The number of tokens that the counting function adds to every request
    is measured once, when this number is first needed.

    Args:
        function: A function that counts the tokens of a list of messages. If its first parameter is
            annotated as a single message, the function counts the tokens of one message.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if _is_async_callable(function):
            raise ConfigurationError(
                f"the argument 'token_counter' is {function!r:.80}, which is an async function; "
                "expected a synchronous function that returns the number of tokens"
            )
        self._function = function
        # True if the token count of a request is the sum of the counts of its messages.
        self.is_additive = _takes_one_message(function)
        # The per-request overhead, in tokens, or None if it has not been measured yet.
        self._request_overhead: float | None = 0 if self.is_additive else None

    @property
    def request_overhead_tokens(self) -> float:
        """The number of tokens that the counting function adds to each request's count."""
        if self._request_overhead is None:
            self._request_overhead = self._measure_request_overhead_tokens()
        return self._request_overhead

    def count_message_tokens(self, message: BaseMessage) -> float:
        """Return the number of tokens that a message adds to a request."""
        if self.is_additive:
            return _check_and_convert_token_count(self._function(message))
        return max(0, self.count_request_tokens([message]) - self.request_overhead_tokens)

    def count_request_tokens(self, messages: Sequence[BaseMessage]) -> float:
        """Return the token count of a request that consists of `messages`.

        The returned token count includes the fixed number of tokens that the counting function adds
        to every request.
        """
        if self.is_additive:
            return sum(map(self.count_message_tokens, messages))
        return _check_and_convert_token_count(self._function(list(messages)))

    def _measure_request_overhead_tokens(self) -> float:
        """Measure how many tokens the counting function adds to every request.

        The per-request overhead is the token count of an empty message list. If the counting
        function raises an error or returns 0 for an empty list, the overhead is derived from the
        token counts of three requests: two with one sample message each, and one with both sample
        messages. If counting the tokens of a sample request fails, the overhead is assumed to be 0.
        """
        empty = self._count_request_tokens_or_none([])
        if empty:
            return empty
        first, second = map(HumanMessage, _PROBES)
        counts = [
            self._count_request_tokens_or_none(request)
            for request in ([first], [second], [first, second])
        ]
        if None in counts:
            return 0
        one, other, both = counts
        return max(0, one + other - both)  # type: ignore[operator]

    def _count_request_tokens_or_none(self, messages: Sequence[BaseMessage]) -> float | None:
        """Return the token count of a request, or None if counting it raises an error."""
        try:
            return self.count_request_tokens(messages)
        except Exception:
            return None


def find_largest_message_selection_within_budget(
    select_with_unused_tokens: Callable[[float], T],
    count_excess_tokens: Callable[[T], float],
    request_overhead_tokens: float,
    max_tokens: float,
) -> T:
    """Find the largest selection of messages that fits within a token budget, using binary search.

    A binary search is needed for token counters that can count only whole requests, because the
    counts of individual messages do not add up to the count of a request.

    Args:
        select_with_unused_tokens: The function that returns a selection which leaves the given
            number of tokens unused, or raises BudgetExceeded. It estimates the tokens of a
            selection as the overhead plus the counts of its messages. The estimate can be too high.
            If not even the required messages fit, negative numbers are therefore tried, down to
            `-request_overhead_tokens`.
        count_excess_tokens: The function that returns by how many tokens a selection is too large.
        request_overhead_tokens: The number of tokens that are added to each request.
        max_tokens: The budget in tokens.

    Raises:
        BudgetExceeded: No selection fits.
    """
    largest: list[T] = []
    refused: BudgetExceeded | None = None
    low, reserve, high = -request_overhead_tokens, 0.0, max_tokens
    for _ in range(_SEARCH_STEPS):
        try:
            selection = select_with_unused_tokens(reserve)
        except BudgetExceeded as exc:
            refused, high = exc, reserve
        else:
            if count_excess_tokens(selection) > 0:
                low = reserve
            elif reserve == 0:
                return selection
            else:
                largest, high = [selection], reserve
        reserve = (low + high) / 2
    if largest:
        return largest[0]
    raise refused or BudgetExceeded(
        f"the required messages have more than max_tokens={max_tokens} tokens, as counted by "
        "token_counter=; raise max_tokens, or bind fewer tools"
    )


def find_token_counting_method(model: Any) -> Callable[..., Any] | None:
    """Return the model's own method for counting message tokens, or None if it has none.

    Return None if a LangChain package defines the model's token-counting method, because
    LangChain's methods download a tokenizer or send each message to the provider. A method defined
    by LangChain is used only if the application has set the model's attribute
    `custom_get_token_ids`. If `custom_get_token_ids` is set, LangChain's default token-counting
    method calls this function, and does not download a tokenizer.
    """
    if getattr(model, "custom_get_token_ids", None) is not None:
        return getattr(model, _METHOD, None)
    for name in _METHODS:
        defined = (kind for kind in type(model).__mro__ if name in vars(kind))
        module = getattr(next(defined, None), "__module__", "langchain")
        if not module.partition(".")[0].startswith("langchain"):
            return getattr(model, _METHOD, None)
    return None


def _takes_one_message(function: Callable[..., Any]) -> bool:
    """Return whether a function's first parameter is annotated as a single message."""
    try:
        parameters = inspect.signature(function).parameters.values()
    # The signature of a function implemented in C may not be available.
    except (TypeError, ValueError):
        return False
    annotation = next((parameter.annotation for parameter in parameters), None)
    if isinstance(annotation, str):
        return annotation.strip("'\" ").rpartition(".")[2] in ("BaseMessage", "AnyMessage")
    is_message = isinstance(annotation, type) and issubclass(annotation, BaseMessage)
    return is_message or annotation is AnyMessage


def _is_async_callable(function: Any) -> bool:
    """Return whether a function or a callable object is async."""
    while isinstance(function, partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004 - the method of a callable object
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _check_and_convert_token_count(value: Any) -> float:
    """Return a token count as an int or a float. NumPy numbers are converted.

    Raises:
        ConfigurationError: The value is not a finite number, or is negative.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and 0 <= value < inf:
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Coroutine):
        value.close()
    raise ConfigurationError(
        f"the token counter returned {value!r:.80}; expected a number of tokens that is 0 or more"
    )
