"""Functions of the user that count the tokens of messages, as langchain's `trim_messages` takes."""

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
_METHODS: Final = (_METHOD, "get_num_tokens", "get_token_ids")
_SEARCH_STEPS: Final = 20  # halvings of a budget, until a selection of messages is found
_PROBES: Final = (
    "What is the weather like in the city?",
    "When does the next train leave from it?",
)


class CountingFunction:
    """A function that returns the tokens of a request with a list of messages.

    A function may count a part that every request has, such as the schemas of its tools. That fixed
    part is measured once, when something is counted for the first time.

    Args:
        function: Takes a list of messages, or one message if its first parameter is annotated so.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if _is_async(function):
            raise ConfigurationError(
                f"token_counter is {function!r:.80}, which is async; expected a function that "
                "returns the number of tokens"
            )
        self._function = function
        self.is_additive = _takes_one_message(function)
        self._fixed: float | None = 0 if self.is_additive else None

    @property
    def fixed_part(self) -> float:
        """Tokens that the function counts for every request, whatever its messages are."""
        if self._fixed is None:
            self._fixed = self._measure_fixed_part()
        return self._fixed

    def count_message(self, message: BaseMessage) -> float:
        """Return the tokens that a message adds to a request."""
        if self.is_additive:
            return _to_number(self._function(message))
        return max(0, self.count_request([message]) - self.fixed_part)

    def count_request(self, messages: Sequence[BaseMessage]) -> float:
        """Return the tokens of a request with these messages, with the fixed part."""
        if self.is_additive:
            return sum(map(self.count_message, messages))
        return _to_number(self._function(list(messages)))

    def _measure_fixed_part(self) -> float:
        """Return what an empty request takes, or what two requests have in common.

        A function may refuse an empty list, or count its fixed part only if there are messages.
        """
        empty = self._try([])
        if empty:
            return empty
        first, second = map(HumanMessage, _PROBES)
        counts = self._try([first]), self._try([second]), self._try([first, second])
        if None in counts:
            return 0
        one, other, both = counts
        return max(0, one + other - both)  # type: ignore[operator]

    def _try(self, messages: list[BaseMessage]) -> float | None:
        try:
            return self.count_request(messages)
        except Exception:
            return None


def find_largest(
    pack: Callable[[float], T], excess: Callable[[T], float], fixed_part: float, size: float
) -> T:
    """Return the largest selection of messages that fits by a function that counts whole requests.

    The messages of a selection may take more or less together than each of them by itself.

    Args:
        pack: Returns a selection that leaves so many tokens free, or raises BudgetExceeded.
        excess: Returns by how many tokens a selection is too large.
        fixed_part: Tokens that are counted for each request.
        size: The budget.
    """
    found: list[T] = []
    refused: BudgetExceeded | None = None
    low, reserve, high = -fixed_part, 0.0, size
    for _ in range(_SEARCH_STEPS):
        try:
            made = pack(reserve)
        except BudgetExceeded as exc:
            refused, high = exc, reserve
        else:
            if excess(made) > 0:
                low = reserve
            elif reserve == 0:
                return made
            else:
                found, high = [made], reserve
        reserve = (low + high) / 2
    if found:
        return found[0]
    raise refused or BudgetExceeded(
        f"the messages that may not be left out take more than max_tokens, which is {size}, by the "
        "token_counter: allow more, or bind fewer tools"
    )


def find_counting_method(model: Any) -> Callable[..., Any] | None:
    """Return the method of a model that counts messages as the user has defined it, or None.

    The methods of langchain's own classes are not returned. They would download a tokenizer, or ask
    the provider about each message.
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
    """Return whether the first parameter of a function is annotated as a message."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function in C
        return False
    annotation = next((parameter.annotation for parameter in parameters), None)
    if isinstance(annotation, str):
        name = annotation.strip("'\" ").rpartition(".")[2]
        return name in ("BaseMessage", "AnyMessage")
    is_message = isinstance(annotation, type) and issubclass(annotation, BaseMessage)
    return is_message or annotation is AnyMessage


def _is_async(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004 - of an object that is called
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _to_number(value: Any) -> float:
    """Return a count as a number of Python; numbers of numpy are accepted."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and 0 <= value < inf:
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Coroutine):
        value.close()
    raise ConfigurationError(
        f"what the token counter returned is {value!r:.80}; expected a number of tokens, 0 or more"
    )
