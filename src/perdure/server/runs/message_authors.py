"""Mark a run's messages that must be excluded from memory extraction.

A human message is marked for exclusion from memory extraction if the person to whom the thread
belongs did not write it. If a turn's human message is marked, no memories are extracted from that
turn. If a run does not use the memories of any user, memory extraction skips all messages that the
run adds, except human messages. For example, memory extraction skips the run's model responses.

Any user who may change a thread can write texts into its state. A node can later turn a text from
the state into a human message, even if the person did not write the text. Memory extraction must
skip a human message with a text that the person did not write. A run therefore marks the human
messages that its nodes add in these cases:

- The run does not use the person's memories.
- The sender of the run is neither the person nor a user who may act for the person.
- Such a sender has changed the thread earlier; see `ChangesByOtherUsers` and `STATE_FROM_OTHERS`.

A human message is not marked if the person sent its text in the current run's input or command.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

from langchain_core.messages import BaseMessage, HumanMessage
from langgraph.checkpoint.base import Checkpoint, CheckpointTuple
from langgraph.types import Command, Overwrite, Send

from perdure.checkpointers.address import Address
from perdure.checkpointers.labels import STATE_FROM_OTHERS, TURN_WITHOUT_MEMORY
from perdure.checkpointers.message_marking import MESSAGE_MARKER
from perdure.checkpointers.values import DeltaSnapshot
from perdure.memory.conversation import SHORTENED
from perdure.memory.thread_messages import REMEMBER, REMEMBER_TURN, SEARCHED

T = TypeVar("T")
HUMAN_ROLES: Final = ("user", "human")
"""The values of the role or type of a JSON message that identify a human message."""
MESSAGE_ROLES: Final = (
    *HUMAN_ROLES,
    "assistant",
    "ai",
    "system",
    "developer",
    "tool",
    "function",
)
"""All possible values of the role or type of a JSON message."""
# Prefix of the namespaces for internal data of perdure, such as model views.
_INTERNAL_NS_PREFIX: Final = "perdure:"


class OtherAuthorMarker:
    """Marks human messages whose author is not the user to whom the thread belongs.

    The marks are set on the messages that a run adds. Memory extraction skips marked messages.

    If `excludes_answers` is True, memory extraction also skips non-human messages that the run
    adds, such as model responses. A message that the run has loaded keeps its mark, or stays
    unmarked, unless the run changes the message's content. The mark excludes a message from memory
    extraction.

    Args:
        thread_id: The thread of the run.
        person_input: The values that the person has sent with the run.
        is_active: Whether messages are marked even if no checkpoint that the run loads has the
            label `STATE_FROM_OTHERS`.
        excludes_answers: Whether no memories are to be extracted from the other messages that the
            run adds, such as the answers of the model.
        is_turn_without_memory: Whether every checkpoint that the run stores gets the metadata key
            `TURN_WITHOUT_MEMORY`.

    Attributes:
        is_state_from_others: Whether the run has loaded a checkpoint that has the label
            `STATE_FROM_OTHERS`.
    """

    def __init__(
        self,
        thread_id: str,
        person_input: Iterable[Any],
        *,
        is_active: bool,
        excludes_answers: bool,
        is_turn_without_memory: bool = False,
    ) -> None:
        self._thread_id, self._is_always_active = thread_id, is_active
        self._excludes_answers = excludes_answers
        self._is_turn_without_memory = is_turn_without_memory
        self.is_state_from_others = False
        self._person_texts = {text.strip() for text in iter_nested_strings(list(person_input))}
        # Maps the id of each loaded human message to the message's content and a flag. The flag
        # says whether the message is marked for exclusion from memory extraction.
        self._loaded: dict[str, tuple[Any, bool]] = {}
        self._loaded_without_id: list[tuple[Any, bool]] = []
        # The `(id, text)` pairs of all loaded messages except human messages. The id is None for a
        # message without an id.
        self._loaded_answers: set[tuple[str | None, str]] = set()
        # Maps `id(message)` to the message and its marked copy. A repeated message gets the same
        # copy, so that the checkpointer recognises the message as already stored.
        self._marked_copies: dict[int, tuple[BaseMessage, BaseMessage]] = {}

    # -- the methods of a `MessageMarker`

    def record_messages_in_loaded_checkpoint(self, checkpoint: CheckpointTuple) -> None:
        """See `MessageMarker.record_messages_in_loaded_checkpoint`."""
        configurable = checkpoint.config["configurable"]
        address = Address(configurable["thread_id"], configurable.get("checkpoint_ns", ""), None)
        if not self._is_of_run(address):
            return
        metadata: Mapping[str, Any] = checkpoint.metadata
        self.is_state_from_others |= bool(metadata.get(STATE_FROM_OTHERS))
        self.record_messages_in_loaded_values(
            address, checkpoint.checkpoint["channel_values"].values()
        )
        pending_writes = checkpoint.pending_writes or ()
        self.record_messages_in_loaded_values(address, (value for _, _, value in pending_writes))

    def record_messages_in_loaded_values(self, address: Address, values: Iterable[Any]) -> None:
        """See `MessageMarker.record_messages_in_loaded_values`."""
        if not self._is_of_run(address):
            return
        for value in values:
            for message in iter_messages(value):
                if not isinstance(message, HumanMessage):
                    # The message texts of a long thread use much RAM, so keep the texts only if
                    # they are compared later.
                    if self._excludes_answers:
                        self._loaded_answers.add((message.id, str(message.content)))
                elif message.id is None:
                    self._loaded_without_id.append((message.content, _is_marked(message)))
                else:
                    self._loaded[message.id] = message.content, _is_marked(message)

    def mark_messages_in_checkpoint(self, address: Address, checkpoint: Checkpoint) -> Checkpoint:
        """See `MessageMarker.mark_messages_in_checkpoint`."""
        if not self._is_active or not self._is_of_run(address):
            return checkpoint
        values = {
            channel: value
            if channel.startswith("__")
            else self._mark_messages_in_channel_value(value)
            for channel, value in checkpoint["channel_values"].items()
        }
        return {**checkpoint, "channel_values": values}

    def build_metadata(self, address: Address) -> dict[str, Any]:
        """See `MessageMarker.build_metadata`."""
        if not self._is_of_run(address):
            return {}
        state_fields = {STATE_FROM_OTHERS: True} if self.is_state_from_others else {}
        turn_fields = {TURN_WITHOUT_MEMORY: True} if self._is_turn_without_memory else {}
        return state_fields | turn_fields

    def mark_messages_in_writes(
        self, address: Address, writes: Sequence[tuple[str, Any]]
    ) -> Sequence[tuple[str, Any]]:
        """See `MessageMarker.mark_messages_in_writes`."""
        if not self._is_active or not self._is_of_run(address):
            return writes
        return [
            (
                channel,
                value if channel.startswith("__") else self._mark_messages_in_write(channel, value),
            )
            for channel, value in writes
        ]

    def mark_messages(self, messages: Sequence[T]) -> Sequence[T]:
        """See `MessageMarker.mark_messages`."""
        return self._mark_messages_in_channel_value([*messages]) if self._is_active else messages

    @contextmanager
    def mark_messages_during_block(self) -> Iterator[None]:
        """Exclude the messages that are stored during the `with` block from memory extraction.

        The rules of `mark_messages` determine which messages are excluded from extraction.
        """
        token = MESSAGE_MARKER.set(self)
        try:
            yield
        finally:
            MESSAGE_MARKER.reset(token)

    # -- single values

    @property
    def _is_active(self) -> bool:
        """Whether messages are marked."""
        return self._is_always_active or self.is_state_from_others

    def _is_of_run(self, address: Address) -> bool:
        """Return whether a checkpoint is in the run's thread, but not in an internal namespace."""
        is_internal = address.checkpoint_ns.startswith(_INTERNAL_NS_PREFIX)
        return address.thread_id == self._thread_id and not is_internal

    def _mark_messages_in_channel_value(self, value: Any) -> Any:
        """Mark messages in a channel's value if they must be excluded from memory extraction.

        If the value contains no message that must be excluded, the value itself is returned instead
        of a copy.
        """
        if isinstance(value, BaseMessage):
            return self._mark_message(value)
        if isinstance(value, Overwrite) or type(value) is DeltaSnapshot:
            return type(value)(self._mark_messages_in_channel_value(value.value))
        if isinstance(value, list):
            marked = [
                self._mark_message(element) if isinstance(element, BaseMessage) else element
                for element in value
            ]
            is_same = all(new is old for new, old in zip(marked, value, strict=True))
            return value if is_same else marked
        return value

    def _mark_messages_in_write(self, channel: str, value: Any) -> Any:
        """Mark messages in a task's write if they must be excluded from memory extraction.

        A write can also contain messages that are not message objects yet, such as dicts, which the
        channel's reducer converts. Messages are marked before the conversion, because a
        `DeltaChannel` stores the unconverted writes. Each time a `DeltaChannel` is loaded, its
        reducer converts the stored dicts to message objects again.
        """
        value = self._mark_messages_in_channel_value(value)
        if isinstance(value, list) and not is_role_and_text(channel, value):
            marked = [self._mark_unconverted_message(channel, element) for element in value]
            is_same = all(new is old for new, old in zip(marked, value, strict=True))
            return value if is_same else marked
        return self._mark_unconverted_message(channel, value)

    def _mark_unconverted_message(self, channel: str, value: Any) -> Any:
        """Mark a raw message, such as a dict, if it must be excluded from memory extraction.

        A message in a write is raw if the channel's reducer has not yet converted the message to a
        message object.

        A string, or a pair of a role and a text, counts as a message only in the channel
        `messages`.
        """
        fields = convert_raw_message_to_fields(channel, value)
        role = get_message_role(fields)
        if role in HUMAN_ROLES and not self._is_by_person(fields.get("content")):
            marks = {REMEMBER_TURN: False}
        elif role in MESSAGE_ROLES and role not in HUMAN_ROLES and self._excludes_answers:
            marks = {REMEMBER: False, SEARCHED: True}
        else:
            return value
        return add_marks_to_message_fields(fields, marks)

    def _mark_message(self, message: BaseMessage) -> BaseMessage:
        """Return a copy of a message, marked to exclude it from memory extraction.

        If the message need not be excluded from memory extraction, or if it is already marked, the
        message itself is returned.
        """
        if isinstance(message, HumanMessage):
            if _is_marked(message) or not self._is_message_by_other_author(message):
                return message
            marks = {REMEMBER_TURN: False}
        elif self._excludes_answers and not self._was_answer_loaded_from_thread(message):
            marks = {REMEMBER: False, SEARCHED: True}
        else:
            return message
        original, copy = self._marked_copies.get(id(message), (None, message))
        if original is message and copy.content == message.content:
            return copy
        copy = message.model_copy(
            update={"response_metadata": {**message.response_metadata, **marks}}
        )
        self._marked_copies[id(message)] = message, copy
        return copy

    def _was_answer_loaded_from_thread(self, message: BaseMessage) -> bool:
        """Return whether the given non-human message was loaded from the thread."""
        if SHORTENED in message.additional_kwargs:
            return any(message.id == loaded_id for loaded_id, _ in self._loaded_answers)
        return (message.id, str(message.content)) in self._loaded_answers

    def _is_message_by_other_author(self, message: HumanMessage) -> bool:
        """Return whether a human message was written by someone other than the thread's user.

        The thread's user is the person to whom the thread belongs.

        If a loaded message's content is unchanged, return whether the message had the exclusion
        mark when it was loaded. If a node has merely shortened a loaded message, the message's
        content still counts as unchanged.
        """
        if message.id is None:
            was_loaded = (message.content, False) in self._loaded_without_id
            return not was_loaded and not self._is_by_person(message.content)
        content, was_marked = self._loaded.get(message.id, (None, False))
        if content is not None and (
            content == message.content or SHORTENED in message.additional_kwargs
        ):
            return was_marked
        return not self._is_by_person(message.content)

    def _is_by_person(self, content: Any) -> bool:
        """Return whether the run's input from the thread's user contains every text in `content`.

        The thread's user is the person to whom the thread belongs.
        """
        return all(text.strip() in self._person_texts for text in iter_nested_strings(content))


def unwrap_serialized_langchain_message(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the role and fields of a message in LangChain's serialization format.

    A value that was not serialized by LangChain is returned unchanged. LangChain stores the class
    name, such as `HumanMessage`, in the last element of `id`, and the constructor arguments in
    `kwargs`. Serialized messages can be nested.
    """
    while value.get("lc") == 1 and value.get("type") == "constructor":
        class_path, fields = value.get("id"), value.get("kwargs")
        if not (isinstance(class_path, list) and class_path and isinstance(fields, Mapping)):
            break
        role = str(class_path[-1]).removesuffix("Chunk").removesuffix("Message").lower()
        if role not in MESSAGE_ROLES:
            break
        value = {"type": role, **fields}
    return value


def _is_marked(message: BaseMessage) -> bool:
    """Return whether a message is marked to exclude its turn from memory extraction."""
    return message.response_metadata.get(REMEMBER_TURN) is False


def is_role_and_text(channel: str, value: Any) -> bool:
    """Return whether a value for the channel `messages` is a `(role, text)` pair."""
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return channel == "messages" and is_pair and value[0] in MESSAGE_ROLES


def convert_raw_message_to_fields(channel: str, value: Any) -> Any:
    """Convert a text, or a `(role, text)` pair, to the fields of a JSON message.

    A text or a `(role, text)` pair is converted only if `channel` is `messages`. Any other value is
    returned unchanged.
    """
    if is_role_and_text(channel, value):
        return {"role": value[0], "content": value[1]}
    if isinstance(value, str) and channel == "messages":
        return {"role": "user", "content": value}
    return value


def get_message_role(value: Any) -> Any:
    """Return the role of a JSON message, or None if the value is not a JSON object."""
    return value.get("role", value.get("type")) if isinstance(value, Mapping) else None


def add_marks_to_message_fields(
    fields: Mapping[str, Any], marks: Mapping[str, bool]
) -> dict[str, Any]:
    """Return a copy of a JSON message's fields, with `marks` added to the response metadata."""
    metadata = fields.get("response_metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    return {**fields, "response_metadata": {**metadata, **marks}}


def iter_messages(value: Any) -> Iterator[BaseMessage]:
    """Yield the messages in the value of a channel or in a write."""
    if isinstance(value, Overwrite) or type(value) is DeltaSnapshot:
        value = value.value
    for element in value if isinstance(value, list | tuple) else (value,):
        if isinstance(element, BaseMessage):
            yield element


class NestedMessage(NamedTuple):
    """A message in a value of the state, either a message object or a dict with a role.

    Attributes:
        message_id: The id of the message, or None.
        content: The content of the message.
        is_excluded: Whether the message is a human message whose turn is excluded from memories.
    """

    message_id: str | None
    content: Any
    is_excluded: bool


def iter_nested_messages(value: Any) -> Iterator[NestedMessage]:
    """Yield the messages in a value of the state, at any depth of lists and dicts."""
    pending = [value]
    while pending:
        current = pending.pop()
        if isinstance(current, Overwrite) or type(current) is DeltaSnapshot:
            pending.append(current.value)
        elif isinstance(current, BaseMessage):
            is_human = isinstance(current, HumanMessage)
            yield NestedMessage(current.id, current.content, is_human and _is_marked(current))
        elif isinstance(current, Mapping):
            if get_message_role(current) in MESSAGE_ROLES:
                message_id, metadata = current.get("id"), current.get("response_metadata")
                yield NestedMessage(
                    message_id if isinstance(message_id, str) else None,
                    current.get("content"),
                    isinstance(metadata, Mapping) and metadata.get(REMEMBER_TURN) is False,
                )
            pending += current.values()
        elif isinstance(current, list | tuple):
            pending += current


def iter_nested_strings(json_or_command: Any) -> Iterator[str]:
    """Yield all strings in a JSON value or a command, except the types of content blocks."""
    pending = [json_or_command]
    while pending:
        current = pending.pop()
        if isinstance(current, str):
            if current.strip():
                yield current
        elif isinstance(current, Mapping):
            pending += [element for key, element in current.items() if key != "type"]
        elif isinstance(current, list | tuple):
            pending += current
        elif isinstance(current, Command):
            pending += [current.update, current.resume, current.goto]
        elif isinstance(current, Send):
            pending.append(current.arg)
