"""Nodes of short-term memory: one object for a graph, for a chain and for plain lists."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from typing import Any, Final, Self

from langchain_core.messages import BaseMessage, SystemMessage, convert_to_messages
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig

from perdure.effects import awaiting, blocking, calling
from perdure.errors import ConfigurationError, InvalidMessages
from perdure.memory.conversation import Messages, Turn
from perdure.memory.exchanges import Purpose, iter_turns
from perdure.memory.message_updates import merge_duplicates
from perdure.memory.options import check_instance, check_text
from perdure.memory.system_messages import find_system_messages, join_system_messages

MODEL_INPUT_KEY: Final = "llm_input_messages"
"""The key of what the model is shown, when that is not what the state keeps."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The messages that a model will be shown.

    Attributes:
        system: The system message, in which all system messages are joined, or None.
        turns: An iterator over the turns, newest first, that can be consumed once.
        system_parts: The system messages that are joined in `system`, if there are several.
    """

    system: BaseMessage | None
    turns: Iterator[Turn]
    system_parts: Messages = ()

    @classmethod
    def from_messages(cls, messages: Messages, *, purpose: Purpose = "request") -> Self:
        """Return the messages in a form that a provider accepts, see `Purpose`.

        Messages with the same id are merged.
        """
        messages = merge_duplicates(messages)
        systems = find_system_messages(messages)
        turns = iter_turns(messages, purpose=purpose)
        return cls(join_system_messages(systems), turns, systems if len(systems) > 1 else ())

    def to_messages(self) -> list[BaseMessage]:
        """Return the system message and the messages of all turns, in their order."""
        units = (unit for turn in reversed([*self.turns]) for unit in turn.units)
        return [*filter(None, [self.system]), *chain.from_iterable(units)]


class Node(Runnable[Any, Any]):
    """The base of nodes. An argument that a node does not have is a ConfigurationError."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Name the arguments that there are, if these do not fit."""
        if args or options:  # a copy is made without
            expected = signature(cls)
            try:
                expected.bind(*args, **options)
            except TypeError as exc:
                name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
                arguments = [f"{value!r:.30}" for value in args]
                arguments += [f"{key}={value!r:.30}" for key, value in options.items()]
                takes = [
                    f"{parameter.name}={parameter.default!r:.30}"
                    if parameter.default is not parameter.empty
                    else parameter.name
                    for parameter in expected.parameters.values()
                ]
                raise ConfigurationError(
                    f"{name}({', '.join(arguments)}): {exc}; it takes {', '.join(takes)}"
                ) from None
        return super().__new__(cls)

    def __init__(self, messages_key: str = "messages") -> None:
        self.messages_key = check_text("messages_key", messages_key, "a channel's name")


class MessagesNode(Node):
    """A node over the messages of a state.

    In a graph, `node.invoke(state)` gives an update, which changes the state if the node is `trim`,
    `clear_tool_outputs` or `summarize`, and else is what the model is shown. `node(state)` and
    `node(messages)` give the messages to show the model, also in a chain, `node | model`.
    """

    @abstractmethod
    def transform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """What this part makes of what is shown."""

    async def atransform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """See `through`; a part that waits for something overrides it."""
        return self.transform_input(model_input, state, config)

    def with_tools(
        self, tools: Sequence[Any], system_prompt: SystemMessage | str | None = None
    ) -> Self:
        """Return this node, or a copy of it, for requests with these tools.

        The budget of the node then includes the tools and `system_prompt`, which is a system prompt
        that is sent with the request and is not among the messages.
        """
        return self

    def for_model(self, model: str | None) -> Self:
        """Return this node, or a copy of it, for requests to this model.

        Estimates of tokens are then scaled only by the usage that this model reported. A node whose
        `token_counter` is for a model is returned unchanged.
        """
        return self

    def with_following_parts(self, parts: Sequence[MessagesNode]) -> Self:
        """The same before these parts of a view, if it has to know what they leave."""
        return self

    async def _call(self, given: Any, config: RunnableConfig | None = None) -> list[BaseMessage]:
        """The messages to show the model, of a state or of a list of messages."""
        given = given.to_messages() if isinstance(given, PromptValue) else given
        messages = read_messages(given, self.messages_key)
        if is_message_list(given):
            return await self._call_with_messages(messages, config)
        return await self._select_messages(messages, given, config)

    async def _invoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> Any:
        """The update for a state; for messages or a prompt, messages."""
        given = input.to_messages() if isinstance(input, PromptValue) else input
        if is_message_list(given):
            return await self._call(given, config)
        return await self._build_update(given, config)

    async def _select_messages(
        self, messages: Messages, state: Any = None, config: RunnableConfig | None = None
    ) -> list[BaseMessage]:
        """The messages to show the model: a valid sequence."""
        model_input: ModelInput = await calling(
            self, "transform_input", ModelInput.from_messages(messages), state, config
        )
        return model_input.to_messages()

    async def _call_with_messages(
        self, messages: Messages, config: RunnableConfig | None
    ) -> list[BaseMessage]:
        return await self._select_messages(messages, None, config)

    async def _build_update(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        messages = read_messages(state, self.messages_key)
        return {MODEL_INPUT_KEY: (await self._select_messages(messages, state, config))}

    __call__, acall = blocking(_call), awaiting(_call)
    invoke, ainvoke = blocking(_invoke), awaiting(_invoke)  # type: ignore[arg-type]
    select_messages, aselect_messages = blocking(_select_messages), awaiting(_select_messages)


class Learner(Node):
    """A node that learns, like `update_instructions(…)`: it changes nothing in the state."""

    @abstractmethod
    async def learn_from_messages(
        self, messages: Messages, state: Any, config: RunnableConfig | None
    ) -> object:
        """Learn from messages; `state` is the one that has them, None if they came alone."""

    async def _call(self, given: Any, config: RunnableConfig | None = None) -> list[BaseMessage]:
        """The messages of a state, or of a list, as they are, after learning from them."""
        messages = read_messages(given, self.messages_key)
        await self.learn_from_messages(messages, None if is_message_list(given) else given, config)
        return list(messages)

    async def _invoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> Any:
        """The update for a state, which changes nothing in it; or for messages, the messages."""
        messages = await self._call(input, config)
        return messages if is_message_list(input) else {}

    __call__, acall = blocking(_call), awaiting(_call)
    invoke, ainvoke = blocking(_invoke), awaiting(_invoke)  # type: ignore[arg-type]


class View(MessagesNode):
    """A node that shows the model what each part in turn leaves; the state stays as it is.

    `view(summary, use_memories(), trim(max_tokens=4_000))` shows the summary, the messages that are
    left and the memories that answer the newest, cut to 4,000 tokens. The part that cuts comes
    last. No part asks a model.
    """

    def __init__(self, *parts: MessagesNode) -> None:
        for part in parts or (None,):
            check_instance(
                "a part of the view", part, MessagesNode, "parts like trim(max_tokens=4_000)"
            )
        keys = sorted({part.messages_key for part in parts})
        if len(keys) > 1:
            raise ConfigurationError(
                f"the parts of the view read the channels {keys}; expected one"
            )
        super().__init__(keys[0])
        each = (part.parts if isinstance(part, View) else [part] for part in parts)
        every = list(chain.from_iterable(each))
        self.parts: list[MessagesNode] = [
            part.with_following_parts(every[number:]) for number, part in enumerate(every, 1)
        ]

    def with_tools(
        self, tools: Sequence[Any], system_prompt: SystemMessage | str | None = None
    ) -> Self:
        """Return a copy of this view for requests with these tools and this system prompt."""
        more = () if system_prompt is None else (system_prompt,)
        return type(self)(*(part.with_tools(tools, *more) for part in self.parts))

    def for_model(self, model: str | None) -> Self:
        """Return a copy of this view for requests to this model."""
        return type(self)(*(part.for_model(model) for part in self.parts))

    async def _transform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """What the parts leave, one after the other."""
        for part in self.parts:
            model_input = await calling(part, "transform_input", model_input, state, config)
        return model_input

    transform_input, atransform_input = blocking(_transform_input), awaiting(_transform_input)  # type: ignore[arg-type]


view = View


def append_text(content: Any, text: str) -> Any:
    """The content of a message with a text after it."""
    if isinstance(content, list):  # its blocks stay, so that a provider's cache of them holds
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n\n{text}" if content else text


def read_messages(given: Any, key: str) -> Messages:
    """The messages of a list, or of a state's channel; InvalidMessages if they are none."""
    if is_message_list(given):
        return to_messages(given, "the messages")
    messages = read_channel(given, key)
    if messages is None:
        raise InvalidMessages(
            f"the state has no channel {key!r}; expected one of messages (`messages_key=` names it)"
        )
    return check_messages(messages, f"the channel {key!r}")


def is_message_list(value: Any) -> bool:
    """Whether a value is a list, and not a state."""
    return isinstance(value, list | tuple)


def read_channel(state: Any, name: str) -> Any:
    """A channel of a state, which is a dict, a dataclass or a model; None if it is not there."""
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


def to_messages(values: Any, what: str) -> Messages:
    """Return the values as messages. Dicts and pairs of a role and a text are converted.

    Raises:
        InvalidMessages: A value is not a message and cannot be converted to one.
    """
    has_forms = is_message_list(values) and any(isinstance(value, dict | tuple) for value in values)
    if has_forms and not any(isinstance(value, str) for value in values):
        with suppress(ValueError, TypeError, KeyError, NotImplementedError):
            values = convert_to_messages(values)
    return check_messages(values, what)


def check_messages(messages: Any, what: str) -> Messages:
    """The messages; InvalidMessages if they are something else."""
    if not is_message_list(messages):
        raise InvalidMessages(
            f"{what}: {messages!r:.80} is a {type(messages).__name__}; expected a list of "
            "langchain messages"
        )
    kinds = {kind for kind in set(map(type, messages)) if not issubclass(kind, BaseMessage)}
    for number, message in enumerate(messages) if kinds else ():
        if type(message) in kinds:
            raise InvalidMessages(
                f"{what}: number {number} is {message!r:.80}, a {type(message).__name__}; expected "
                "langchain messages: convert with langchain_core.messages.convert_to_messages"
            )
    return messages  # type: ignore[no-any-return]
