"""What every node of short-term memory is: one object for a graph, for a chain and for plain lists.

Called with messages it returns messages; as a node of a graph it is given the state and returns an
update. langgraph's `pre_model_hook` contract names the two keys: `messages`, which the reducer
merges into the state, and `llm_input_messages`, which only the model is shown.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Self

from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig

from perdure.errors import ConfigurationError, InvalidMessages
from perdure.memory.conversation import Messages
from perdure.memory.shown import Shown

Mode = Literal["view", "state"]
MODES: Final = ("view", "state")
SHOWN: Final = "llm_input_messages"
"""The key of what the model is shown, when that is not what the state keeps."""


class MessagesNode(Runnable[Any, Any]):
    """A node over the messages of a state.

    `add_node("name", node)` takes it as it is: `node.invoke(state)` gives an update. `node(state)`
    gives the messages to show the model, `node(messages)` too, and so it does in a chain,
    `node | model`.

    Args:
        messages_key: The channel of the messages.
    """

    def __init__(self, messages_key: str = "messages") -> None:
        if not isinstance(messages_key, str) or not messages_key:
            raise ConfigurationError(f"messages_key is {messages_key!r}; expected a channel's name")
        self.messages_key = messages_key

    def __call__(self, said: Any, config: RunnableConfig | None = None) -> list[BaseMessage]:
        """What the model is to be shown of a state; or what is made of messages alone.

        Args:
            said: The state, as a node is given it, or a list of messages.
            config: Of the run; within a graph it is known without.

        Raises:
            InvalidMessages: They are not messages.
        """
        if is_messages(said):
            return self.applied(checked(said, "the messages"), config)
        return self.shown(self.messages_in(said), said, config)

    async def acall(self, said: Any, config: RunnableConfig | None = None) -> list[BaseMessage]:
        """See `__call__`."""
        if is_messages(said):
            return await self.aapplied(checked(said, "the messages"), config)
        return await self.ashown(self.messages_in(said), said, config)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """The update for a state; or messages for messages."""
        if isinstance(input, PromptValue):
            input = input.to_messages()
        if is_messages(input):
            return self(input, config)
        return self.update(input, config)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """See `invoke`."""
        if isinstance(input, PromptValue):
            input = input.to_messages()
        if is_messages(input):
            return await self.acall(input, config)
        return await self.aupdate(input, config)

    def applied(
        self, messages: Messages, config: RunnableConfig | None = None
    ) -> list[BaseMessage]:
        """What is left of messages that have no state, or made of them."""
        return self.shown(messages, None, config)

    async def aapplied(
        self, messages: Messages, config: RunnableConfig | None = None
    ) -> list[BaseMessage]:
        """See `applied`."""
        return await self.ashown(messages, None, config)

    def update(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        """What changes in a state; of a view, only what the model is shown."""
        return {SHOWN: self.shown(self.messages_in(state), state, config)}

    async def aupdate(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        """See `update`."""
        return {SHOWN: await self.ashown(self.messages_in(state), state, config)}

    # -- what the model is shown

    def shown(
        self, messages: Messages, state: Any = None, config: RunnableConfig | None = None
    ) -> list[BaseMessage]:
        """What the model is to be shown of messages: always a valid sequence.

        Args:
            messages: Those of the state, or what other parts left of them.
            state: The other channels.
            config: Of the run.
        """
        return self.through(Shown.of(messages), state, config).messages()

    async def ashown(
        self, messages: Messages, state: Any = None, config: RunnableConfig | None = None
    ) -> list[BaseMessage]:
        """See `shown`."""
        return (await self.athrough(Shown.of(messages), state, config)).messages()

    @abstractmethod
    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """What this part makes of what is shown."""

    async def athrough(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """See `through`; a part that has to wait for something overrides it."""
        return self.through(shown, state, config)

    def with_tools(self, tools: Sequence[Any]) -> Self:
        """The same for a request with these tools, which take part of a budget if it has one."""
        return self

    # -- the state

    def messages_in(self, state: Any) -> Messages:
        """The messages of a state.

        Raises:
            InvalidMessages: Its channel is missing, or holds something else.
        """
        found = channel(state, self.messages_key)
        if found is None:
            raise InvalidMessages(
                f"the state has no channel {self.messages_key!r}; expected one of messages "
                "(`messages_key=` names it)"
            )
        return checked(found, f"the channel {self.messages_key!r}")

    def id_of(self, message: BaseMessage) -> str:
        """The id of a message of the state, by which it is removed or replaced.

        Raises:
            InvalidMessages: It has none.
        """
        if message.id is None:
            raise InvalidMessages(
                f"the channel {self.messages_key!r} has a {message.type} message without an id, "
                f"{message.content!r:.60}; give it a reducer that assigns them: "
                "perdure.memory.messages, or add_messages"
            )
        return message.id


def is_messages(value: Any) -> bool:
    """Whether a value is a list, as messages are, and not a state."""
    return isinstance(value, list | tuple)


def channel(state: Any, name: str) -> Any:
    """A channel of a state, which is a dict, a dataclass or a model; None if it is not there."""
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


def checked(messages: Any, what: str) -> Messages:
    """Messages, if they are.

    Raises:
        InvalidMessages: They are not.
    """
    if not is_messages(messages):
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
