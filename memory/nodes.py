"""Base classes for memory nodes, and `view`, which applies several nodes in sequence.

A memory node can be used as a node of a graph, as a step of a chain, or as a function that takes a
list of messages.
"""

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

from perdure.effects import build_async_function, build_blocking_function, call_method
from perdure.errors import ConfigurationError, InvalidMessages
from perdure.memory.conversation import Messages, Turn
from perdure.memory.options import check_instance, check_text
from perdure.memory.short_term.message_updates import merge_duplicate_messages
from perdure.memory.short_term.system_messages import find_system_messages, join_system_messages
from perdure.memory.tool_call_matching import Purpose, iter_turns

MODEL_INPUT_KEY: Final = "llm_input_messages"
"""The key in an update for the messages that are sent to the model.

The nodes that leave the messages in the state unchanged use it. LangGraph's prebuilt agent sends
the messages under this key to the model.
"""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The messages of one model request, grouped into turns for processing by a view's nodes.

    Attributes:
        system: The system message, in which all system messages are joined, or None.
        turns: An iterator over the turns, newest first. The iterator can be consumed only once.
        system_parts: The system messages that are joined in `system`, if there are several.
    """

    system: BaseMessage | None
    turns: Iterator[Turn]
    system_parts: Messages = ()

    @classmethod
    def from_messages(cls, messages: Messages, *, purpose: Purpose = "request") -> Self:
        """Group messages into turns, and convert them to a form that model providers accept.

        For `purpose`, see `Purpose`. Messages with the same id are merged.
        """
        messages = merge_duplicate_messages(messages)
        systems = find_system_messages(messages)
        return cls(
            join_system_messages(systems),
            iter_turns(messages, purpose=purpose),
            systems if len(systems) > 1 else (),
        )

    def to_messages(self) -> list[BaseMessage]:
        """Return the system message, followed by all turns' messages in chronological order."""
        units = (unit for turn in reversed([*self.turns]) for unit in turn.units)
        return [*filter(None, [self.system]), *chain.from_iterable(units)]


class Node(Runnable[Any, Any]):
    """The base class of all nodes.

    The constructor raises a ConfigurationError for an unexpected argument.
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the constructor's arguments.

        The error for a wrong argument lists the accepted arguments.
        """
        # `copy` calls `__new__` without arguments, so a call without arguments must not raise an
        # error.
        if args or options:
            expected = signature(cls)
            try:
                expected.bind(*args, **options)
            except TypeError as exc:
                name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
                arguments = [
                    *(f"{value!r:.30}" for value in args),
                    *(f"{key}={value!r:.30}" for key, value in options.items()),
                ]
                accepted = [
                    f"{parameter.name}={parameter.default!r:.30}"
                    if parameter.default is not parameter.empty
                    else parameter.name
                    for parameter in expected.parameters.values()
                ]
                raise ConfigurationError(
                    f"the call {name}({', '.join(arguments)}) is not valid: {exc}; expected "
                    f"the arguments {', '.join(accepted)}"
                ) from None
        return super().__new__(cls)

    def __init__(self, messages_key: str = "messages") -> None:
        self.messages_key = check_text("messages_key", messages_key, "the name of a channel")


class MessagesNode(Node):
    """A node that selects or changes the messages that are sent to a model.

    In a graph, `node.invoke(state)` returns a state update. The update returned by `trim`,
    `clear_tool_outputs` or `summarize` changes the messages in the state. Nodes other than `trim`,
    `clear_tool_outputs` and `summarize` leave the messages in the state unchanged. The state update
    of a node such as `view` contains the messages to send to the model, under the key
    `MODEL_INPUT_KEY`. A node that is called directly, as in `node(state)` or `node(messages)`,
    returns the messages for the model. In a chain such as `node | model`, the node passes the
    selected messages to the model.
    """

    @abstractmethod
    def transform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """Return the model input, with its messages selected or modified by the node."""

    async def atransform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """Return the result of `transform_input`.

        Nodes that do I/O override `atransform_input`.
        """
        return self.transform_input(model_input, state, config)

    def with_tools(
        self, tools: Sequence[Any], system_prompt: SystemMessage | str | None = None
    ) -> Self:
        """Return this node, or a copy adapted to model requests with `tools` and `system_prompt`.

        If the node does not depend on the tools and the system prompt, return the node itself. A
        node with a token budget deducts the tokens used by `tools` and `system_prompt` from the
        budget. `system_prompt` is sent with the request in addition to the messages.
        """
        return self

    def with_calibration_for_model(self, model: str | None) -> Self:
        """Return the node, or a copy whose token estimates are calibrated for `model`.

        The returned copy's token estimates are calibrated only with the token usage that `model`
        has reported. If the node's `token_counter` was created for a specific model, no copy is
        needed, so the node itself is returned.
        """
        return self

    def adapt_to_following_view_parts(self, following_parts: Sequence[MessagesNode]) -> Self:
        """Return this node, or a copy that is adapted to the nodes that follow it in a `View`.

        A view applies its nodes in order. Override this method in a node that must know which
        messages will remain after the later nodes have been applied.
        """
        return self

    async def _transform_messages_of_input_for_model(
        self, input: Any, config: RunnableConfig | None = None
    ) -> list[BaseMessage]:
        """Return the messages for the model.

        `input` is a state, a prompt or a list of messages.
        """
        input = input.to_messages() if isinstance(input, PromptValue) else input
        messages = read_messages(input, self.messages_key)
        if is_message_list(input):
            return await self._transform_plain_message_list_for_model(messages, config)
        return await self._transform_messages_of_state_for_model(messages, input, config)

    async def _invoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> Any:
        """Return a state update or, if the input is a message list, the messages for the model."""
        input = input.to_messages() if isinstance(input, PromptValue) else input
        if is_message_list(input):
            return await self._transform_messages_of_input_for_model(input, config)
        return await self._build_state_update(input, config)

    async def _transform_messages_of_state_for_model(
        self, messages: Messages, state: Any = None, config: RunnableConfig | None = None
    ) -> list[BaseMessage]:
        """Return the messages for the model, in an order that model providers accept.

        `state` is the graph state that contains the messages, or None if the messages were passed
        as a plain list.
        """
        model_input: ModelInput = await call_method(
            self, "transform_input", ModelInput.from_messages(messages), state, config
        )
        return model_input.to_messages()

    async def _transform_plain_message_list_for_model(
        self, messages: Messages, config: RunnableConfig | None
    ) -> list[BaseMessage]:
        """Select the messages for the model from a plain list of messages instead of a state."""
        return await self._transform_messages_of_state_for_model(messages, None, config)

    async def _build_state_update(
        self, state: Any, config: RunnableConfig | None
    ) -> dict[str, Any]:
        """Build a state update that contains the model's input under `MODEL_INPUT_KEY`."""
        messages = read_messages(state, self.messages_key)
        return {
            MODEL_INPUT_KEY: await self._transform_messages_of_state_for_model(
                messages, state, config
            )
        }

    __call__ = build_blocking_function(_transform_messages_of_input_for_model)
    acall = build_async_function(_transform_messages_of_input_for_model)
    invoke, ainvoke = build_blocking_function(_invoke), build_async_function(_invoke)  # type: ignore[arg-type]
    select_messages = build_blocking_function(_transform_messages_of_state_for_model)
    aselect_messages = build_async_function(_transform_messages_of_state_for_model)


class Learner(Node):
    """A node that learns from the messages of a conversation, such as `update_instructions(…)`.

    A learner does not change the graph's state. A learner stores its results outside the state, for
    example in a LangGraph store.
    """

    @abstractmethod
    async def learn_from_messages(
        self, messages: Messages, state: Any, config: RunnableConfig | None
    ) -> object:
        """Learn from messages.

        `state` is the graph state that contains the messages, or None if the messages were passed
        as a plain list.
        """

    async def _learn_and_return_messages(
        self, input: Any, config: RunnableConfig | None = None
    ) -> list[BaseMessage]:
        """Pass the messages in a state or list to `learn_from_messages`.

        Return the messages unchanged.
        """
        messages = read_messages(input, self.messages_key)
        await self.learn_from_messages(messages, None if is_message_list(input) else input, config)
        return list(messages)

    async def _invoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> Any:
        """Pass the input's messages to `learn_from_messages`.

        The node does not change the input. If the input is a graph state, the node returns an empty
        state update. If the input is a list of messages, the node returns the messages unchanged.
        """
        messages = await self._learn_and_return_messages(input, config)
        return messages if is_message_list(input) else {}

    __call__, acall = (
        build_blocking_function(_learn_and_return_messages),
        build_async_function(_learn_and_return_messages),
    )
    invoke, ainvoke = build_blocking_function(_invoke), build_async_function(_invoke)  # type: ignore[arg-type]


class View(MessagesNode):
    """A node that applies several other nodes in sequence to the messages for the model.

    `view(summary, use_memories(), trim(max_tokens=4_000))` sends the summary, the messages that
    follow it, and the memories that are relevant to the newest message, trimmed to a total of 4,000
    tokens. The node that trims comes last. A view prepares the messages for the model, and does not
    change the graph's state. The nodes in a view never call a model.
    """

    def __init__(self, *parts: MessagesNode) -> None:
        for part in parts or (None,):
            check_instance(
                "an argument of view()", part, MessagesNode, "a node such as trim(max_tokens=4_000)"
            )
        keys = sorted({part.messages_key for part in parts})
        if len(keys) > 1:
            raise ConfigurationError(
                f"the nodes passed to view() have different values for messages_key: {keys}; "
                "create all of them with the same messages_key="
            )
        super().__init__(keys[0])
        nested = (part.parts if isinstance(part, View) else [part] for part in parts)
        flat = list(chain.from_iterable(nested))
        self.parts: list[MessagesNode] = [
            part.adapt_to_following_view_parts(flat[number:]) for number, part in enumerate(flat, 1)
        ]

    def with_tools(
        self, tools: Sequence[Any], system_prompt: SystemMessage | str | None = None
    ) -> Self:
        """Return a copy of the view whose token counts include `tools` and `system_prompt`."""
        arguments = (tools,) if system_prompt is None else (tools, system_prompt)
        return type(self)(*(part.with_tools(*arguments) for part in self.parts))

    def with_calibration_for_model(self, model: str | None) -> Self:
        """Return a copy of the view whose token estimates are calibrated for `model`."""
        return type(self)(*(part.with_calibration_for_model(model) for part in self.parts))

    async def _transform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """Apply the view's nodes to the model input, in order, and return the result."""
        for part in self.parts:
            model_input = await call_method(part, "transform_input", model_input, state, config)
        return model_input

    transform_input = build_blocking_function(_transform_input)  # type: ignore[arg-type]
    atransform_input = build_async_function(_transform_input)  # type: ignore[arg-type]


view = View


def append_text_to_content(content: Any, text: str) -> Any:
    """Return the content of a message with `text` appended to it."""
    # Add a content block and leave the existing blocks unchanged, so that the provider's prompt
    # cache stays valid.
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n\n{text}" if content else text


def read_messages(input: Any, messages_key: str) -> Messages:
    """Return the messages in `input`.

    `input` is a list of messages, or a state that has the messages in the channel `messages_key`.

    Raises:
        InvalidMessages: The state has no channel `messages_key`, or a value is not a message.
    """
    if is_message_list(input):
        return convert_values_to_messages(input, "the messages")
    messages = read_channel(input, messages_key)
    if messages is None:
        raise InvalidMessages(
            f"the state has no channel {messages_key!r}; set messages_key= to the name of the "
            "channel with the messages"
        )
    return check_messages(messages, f"the channel {messages_key!r}")


def is_message_list(value: Any) -> bool:
    """Return whether an input is a list of messages. An input of another type is a state."""
    return isinstance(value, list | tuple)


def read_channel(state: Any, channel: str) -> Any:
    """Return the value of a channel in a state, or None if the state has no such channel.

    The state can be a dict, a dataclass or a pydantic model.
    """
    return state.get(channel) if isinstance(state, Mapping) else getattr(state, channel, None)


def convert_values_to_messages(values: Any, value_description: str) -> Messages:
    """Return the values as messages.

    Dicts and (role, text) pairs are converted to messages. Error messages begin with the text
    `value_description`, which tells the user which values are invalid.

    Raises:
        InvalidMessages: A value is not a message and cannot be converted to a message.
    """
    has_forms = is_message_list(values) and any(isinstance(value, dict | tuple) for value in values)
    if has_forms and not any(isinstance(value, str) for value in values):
        with suppress(ValueError, TypeError, KeyError, NotImplementedError):
            values = convert_to_messages(values)
    return check_messages(values, value_description)


def check_messages(messages: Any, value_description: str) -> Messages:
    """Check that a value is a list of messages, and return it unchanged.

    Error messages begin with the text `value_description`, which tells the user which value is
    invalid.

    Raises:
        InvalidMessages: The value is not a list, or an element is not a message.
    """
    if not is_message_list(messages):
        raise InvalidMessages(
            f"{value_description}: expected a list of langchain messages, got a "
            f"{type(messages).__name__} ({messages!r:.80})"
        )
    kinds = {kind for kind in set(map(type, messages)) if not issubclass(kind, BaseMessage)}
    for number, message in enumerate(messages) if kinds else ():
        if type(message) in kinds:
            raise InvalidMessages(
                f"{value_description}: expected langchain messages, but the element at index "
                f"{number} is a {type(message).__name__} ({message!r:.80}); convert the elements "
                "with langchain_core.messages.convert_to_messages"
            )
    return messages  # type: ignore[no-any-return]
