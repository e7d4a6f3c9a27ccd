"""Which counter counts tokens, how many there are, and how many a model takes.

`token_counter` makes a counter of whatever names one, `count_tokens` counts a request with it;
`context_window` makes a number of whatever has a window.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableBinding

from perdure.errors import ConfigurationError, InvalidMessages, UnknownModel
from perdure.memory.estimated_tokens import EstimatedCounter
from perdure.memory.message_tokens import Memo
from perdure.memory.nodes import checked
from perdure.memory.openai_tokens import base_model, encoding_name, openai_counter
from perdure.memory.options import whole
from perdure.memory.tokens import TokenCounter
from perdure.memory.tool_tokens import schemas

Countable = (
    str
    | BaseChatModel
    | Runnable[Any, BaseMessage]
    | Callable[[list[BaseMessage]], int]
    | TokenCounter
)
"""What `token_counter` makes a counter of; the runnable is a chat model with something bound."""

_DATE = re.compile(r"-\d{4}-\d{2}-\d{2}$")
_PLAIN: Final = frozenset({HumanMessage, SystemMessage})
_FORMS: Final = (
    "'estimate', the name of an OpenAI model, a chat model, a callable that takes a list of "
    "messages and returns their tokens, or a TokenCounter"
)


def token_counter(of: Countable | None) -> TokenCounter:
    """The counter for a model, or of one's own.

    Args:
        of: None or `"estimate"`: an estimate that what providers report corrects, good for any
            model. The name of an OpenAI model: its encoding. A chat model, also one with tools
            bound: by its name, an estimate if that is none of OpenAI's. A callable as langchain's
            `trim_messages` takes: asked about one message at a time. A counter: itself.

    Raises:
        UnknownModel: No encoding is known for a model of that name.
        ConfigurationError: It is none of these.
    """
    of = _unbound(of)
    if of is None or of == "estimate":
        return EstimatedCounter()
    if isinstance(of, str):
        return _named(of)
    if isinstance(of, BaseChatModel):
        name = model_name(of)
        return (openai_counter(name) if name else None) or EstimatedCounter()
    if isinstance(of, type):
        raise ConfigurationError(f"token_counter of the class {of.__name__}; expected an object")
    if isinstance(of, TokenCounter):
        return of
    if callable(of):
        return CallableCounter(of)
    raise ConfigurationError(
        f"token_counter of {of!r:.80}, a {type(of).__name__}; expected {_FORMS}"
    )


def count_tokens(
    messages: Sequence[BaseMessage],
    counter: Countable | None = None,
    tools: Sequence[Any] = (),
) -> int:
    """Tokens of a request: its messages, the schemas of its tools, and what goes around them.

    >>> count_tokens([HumanMessage("What is the capital of France?")], "gpt-4o")
    14

    Args:
        messages: What the model is shown.
        counter: See `token_counter`; to count again and again pass a counter, which remembers.
        tools: In any form that `bind_tools` takes; those that a model is bound to are not counted.

    Raises:
        InvalidMessages: They are not messages.
        UnknownModel: No encoding is known for a model of that name.
        ConfigurationError: The counter is none, or a tool is none.
    """
    said = checked(messages, "the messages")
    fitted = token_counter(counter).fitted(said)
    return fitted.request + sum(map(fitted.message, said)) + fitted.tools(tools)


def context_window(of: int | str | BaseChatModel | Runnable[Any, BaseMessage]) -> int:
    """How many tokens a model takes.

    A chat model is asked for its `profile`; a name is looked up among those of langchain-openai,
    without a request.

    Args:
        of: A number of tokens, a chat model, also with tools bound, or the name of an OpenAI model.

    Raises:
        UnknownModel: The model does not say, or the name is not known.
        ConfigurationError: The number is not positive, or it is none of these.
    """
    of = _unbound(of)
    if isinstance(of, int) and not isinstance(of, bool):
        return whole("the context window", of, 1)
    if isinstance(of, BaseChatModel):
        return _profiled(of) or _window_of_name(model_name(of) or type(of).__name__)
    if isinstance(of, str):
        return _window_of_name(of)
    raise ConfigurationError(
        f"the context window of {of!r:.80}, a {type(of).__name__}; expected a number of tokens, a "
        "chat model or the name of an OpenAI model"
    )


def model_name(model: BaseChatModel) -> str | None:
    """The name under which a chat model asks its provider, if it has one."""
    for attribute in ("model_name", "model"):
        name = getattr(model, attribute, None)
        if isinstance(name, str) and name:
            return name
    return None


def _unbound(of: Any) -> Any:
    """A model without the tools, the options or the config that were bound to it."""
    while isinstance(of, RunnableBinding):
        of = of.bound
    return of


class CallableCounter:
    """A counter that asks a callable, about one message at a time, and remembers the answers.

    A text, or the schemas of tools, are shown to it as a human message.

    Args:
        count: Takes a list of messages, or, if its parameter says so, one message.
    """

    request = 0

    def __init__(self, count: Callable[[Any], int]) -> None:
        self.count = count
        self._takes_one = _takes_one(count)
        self._memo: Memo[BaseMessage] = Memo(self._asked)

    def text(self, text: str) -> int:
        """Tokens of a human message with this text."""
        return self.message(HumanMessage(text))

    def message(self, message: BaseMessage) -> int:
        """Tokens of a message.

        Raises:
            InvalidMessages: It is no message.
            ConfigurationError: The callable does not return a number.
        """
        if not isinstance(message, BaseMessage):
            raise InvalidMessages(
                f"{message!r:.80} is a {type(message).__name__}; expected a langchain message"
            )
        return self._memo(message, _told(message))

    def tools(self, tools: Sequence[Any]) -> int:
        """Tokens of a human message with the JSON of the schemas."""
        return self.text(json.dumps(schemas(tools), default=str)) if tools else 0

    def fitted(self, messages: Sequence[BaseMessage]) -> CallableCounter:
        """Itself: whoever gave the callable knows best."""
        return self

    def _asked(self, message: BaseMessage) -> int:
        tokens = self.count(message if self._takes_one else [message])
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
            raise ConfigurationError(
                f"the token counter {self.count!r:.80} returned {tokens!r:.40} for a message; "
                "expected a whole number, not negative"
            )
        return tokens


def _told(message: BaseMessage) -> Hashable:
    """All that a callable could count of a message; the usual ones quickly."""
    content = message.content
    if type(message) in _PLAIN and type(content) is str and not message.additional_kwargs:
        return type(message), content, message.name, message.id
    return type(message), repr(message.__dict__), repr(message.model_extra)


def _named(name: str) -> TokenCounter:
    counter = openai_counter(name)
    if counter is None:
        raise UnknownModel(
            f"no encoding is known for the model {name!r}; pass 'estimate', a callable that counts "
            "the tokens of a list of messages, or a TokenCounter"
        )
    return counter


def _takes_one(count: Callable[[Any], int]) -> bool:
    """Whether a callable's parameter is annotated as a message, as `trim_messages` tells it."""
    try:
        first = next(iter(inspect.signature(count).parameters.values()), None)
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return first is not None and first.annotation in (BaseMessage, "BaseMessage")


def _profiled(model: BaseChatModel) -> int | None:
    tokens = (model.profile or {}).get("max_input_tokens")
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def _window_of_name(name: str) -> int:
    base = base_model(name)
    if encoding_name(base) is not None:
        from langchain_openai import ChatOpenAI  # takes a second: only for whoever names a model

        for model in (base, _DATE.sub("", base)):
            tokens = _profiled(ChatOpenAI(model=model, api_key=lambda: "none"))
            if tokens is not None:
                return tokens
    raise UnknownModel(
        f"how many tokens the model {name!r} takes is not known; pass the number, or a chat model "
        "with a profile: profile={'max_input_tokens': ...}"
    )
