"""Mark a run's messages that must be excluded from memory extraction.

A human message is marked if the person to whom the thread belongs did not write it. No memories are
extracted from a turn whose human message is marked. If the thread belongs to a person whose
memories the run does not use, the other messages that the run adds, such as model responses, are
marked as well.

Any user who may change a thread can write texts into its state. A node can later make a human
message from such a text. The message would then look like a message of the person. A run therefore
marks the human messages that its nodes add in these cases:

- The run does not use the person's memories.
- The sender of the run is neither the person nor a user who may act for the person.
- Such a sender has written to the thread's state earlier; see `STATE_FROM_OTHERS`.

A human message is not marked if the person sent its text in the current run's input or command.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from langchain_core.messages import BaseMessage, HumanMessage
from langgraph.checkpoint.base import Checkpoint, CheckpointTuple
from langgraph.types import Command, Overwrite, Send

from perdure.checkpointers.address import Address
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.labels import STATE_FROM_OTHERS, TURN_WITHOUT_MEMORY
from perdure.checkpointers.message_marking import MESSAGE_MARKER
from perdure.checkpointers.status import ASIDE_SUFFIX
from perdure.checkpointers.values import DeltaSnapshot
from perdure.errors import ConfigurationError
from perdure.memory.conversation import SHORTENED
from perdure.memory.thread_messages import REMEMBER, REMEMBER_TURN, SEARCHED

T = TypeVar("T")
# Channels and task path of the writes that `mark_checkpoint_as_changed_by_other_users` stores.
# langgraph ignores the writes, because no task has their ids.
_STATE_FROM_OTHERS_CHANNEL: Final = "__state_from_others"
_TURN_WITHOUT_MEMORY_CHANNEL: Final = "__turn_without_memory"
_LABEL_PATH: Final = f"state from others{ASIDE_SUFFIX}"
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
    """Marks the human messages that a run adds, unless the person wrote them.

    If `excludes_answers` is True, the other messages that the run adds, such as model responses,
    are marked as well. A message that the run loaded from the thread keeps its marked or unmarked
    state, unless the run changes the message's content.

    Args:
        thread_id: The thread of the run.
        person_input: The values that the person has sent with the run.
        is_active: Whether messages are marked even if nobody else has written to the state earlier.
        continues_turn: Whether the run or the state update continues the last turn of the thread.
        start_checkpoint_id: The checkpoint of the root namespace from which the run or the update
            starts, or None for the first one that it loads.
        refuses_turn_without_memory: Whether to raise an error if the run continues a turn that must
            use nobody's memories.
        excludes_answers: Whether no memories are to be extracted from the other messages that the
            run adds, such as the answers of the model.
    """

    def __init__(
        self,
        thread_id: str,
        person_input: Iterable[Any],
        *,
        is_active: bool,
        continues_turn: bool,
        start_checkpoint_id: str | None,
        refuses_turn_without_memory: bool,
        excludes_answers: bool,
    ) -> None:
        self._thread_id, self._is_always_active = thread_id, is_active
        self._continues_turn, self._start_checkpoint_id = continues_turn, start_checkpoint_id
        self._refuses_turn_without_memory = refuses_turn_without_memory
        self._excludes_answers = excludes_answers
        self._has_loaded_start = False
        self._is_state_from_others = self._is_turn_without_memory = False
        self._person_texts = {text.strip() for text in _iter_nested_strings(list(person_input))}
        # Maps the id of each loaded human message to its content and whether the message is marked.
        self._loaded: dict[str, tuple[Any, bool]] = {}
        self._loaded_without_id: list[tuple[Any, bool]] = []
        # The `(id, text)` pairs of all loaded messages that are not human messages. The id is None
        # if the message has none.
        self._loaded_answers: set[tuple[str | None, str]] = set()
        # For each message object, the object and its marked copy, by `id()`. Reusing the copies
        # lets the checkpointer recognise messages that it has stored already.
        self._marked_copies: dict[int, tuple[BaseMessage, BaseMessage]] = {}

    # -- the methods of a `MessageMarker`

    def record_messages_in_loaded_checkpoint(self, checkpoint: CheckpointTuple) -> None:
        """See `MessageMarker.record_messages_in_loaded_checkpoint`.

        Raises:
            ConfigurationError: The run uses the person's memories, but it continues a turn that
                must use nobody's memories.
        """
        configurable = checkpoint.config["configurable"]
        address = Address(configurable["thread_id"], configurable.get("checkpoint_ns", ""), None)
        if not self._is_of_run(address):
            return
        metadata: Mapping[str, Any] = checkpoint.metadata
        pending_writes = checkpoint.pending_writes or ()
        self._is_state_from_others |= bool(metadata.get(STATE_FROM_OTHERS)) or any(
            channel == _STATE_FROM_OTHERS_CHANNEL for _, channel, _ in pending_writes
        )
        # A run can also load checkpoints other than the one from which it continues, such as the
        # thread's head.
        is_start = (
            not self._has_loaded_start
            and not address.checkpoint_ns
            and self._start_checkpoint_id in (None, configurable["checkpoint_id"])
        )
        if self._continues_turn and is_start and _is_turn_without_memory(checkpoint):
            self._is_turn_without_memory = True
            if self._refuses_turn_without_memory:
                raise ConfigurationError(
                    f"the run on thread {self._thread_id!r} cannot use memories, because another "
                    "user has changed the thread's state since the last message; send a new "
                    "message to start a turn that uses memories"
                )
        self._has_loaded_start |= is_start
        self.record_messages_in_loaded_values(
            address, checkpoint.checkpoint["channel_values"].values()
        )
        self.record_messages_in_loaded_values(address, (value for _, _, value in pending_writes))

    def record_messages_in_loaded_values(self, address: Address, values: Iterable[Any]) -> None:
        """See `MessageMarker.record_messages_in_loaded_values`."""
        if not self._is_of_run(address):
            return
        for value in values:
            for message in _iter_messages(value):
                if not isinstance(message, HumanMessage):
                    # Most runs do not need the texts, and long threads have many of them.
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
        labels = {
            STATE_FROM_OTHERS: self._is_state_from_others,
            TURN_WITHOUT_MEMORY: self._is_turn_without_memory,
        }
        return {name: True for name, is_set in labels.items() if is_set}

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
        """Mark the messages that are stored until the `with` block ends."""
        token = MESSAGE_MARKER.set(self)
        try:
            yield
        finally:
            MESSAGE_MARKER.reset(token)

    # -- single values

    @property
    def _is_active(self) -> bool:
        """Whether messages are marked."""
        return self._is_always_active or self._is_state_from_others

    def _is_of_run(self, address: Address) -> bool:
        """Return whether a checkpoint belongs to the run's thread, and not to internal data."""
        is_internal = address.checkpoint_ns.startswith(_INTERNAL_NS_PREFIX)
        return address.thread_id == self._thread_id and not is_internal

    def _mark_messages_in_channel_value(self, value: Any) -> Any:
        """Mark the messages in the value of a channel.

        A message or list in which nothing has to be marked is returned as it is, not as a copy.
        """
        if isinstance(value, BaseMessage):
            return self._mark_message(value)
        if isinstance(value, Overwrite):
            return Overwrite(self._mark_messages_in_channel_value(value.value))
        if type(value) is DeltaSnapshot:
            return DeltaSnapshot(self._mark_messages_in_channel_value(value.value))
        if isinstance(value, list):
            marked = [
                self._mark_message(element) if isinstance(element, BaseMessage) else element
                for element in value
            ]
            is_same = all(new is old for new, old in zip(marked, value, strict=True))
            return value if is_same else marked
        return value

    def _mark_messages_in_write(self, channel: str, value: Any) -> Any:
        """Mark the messages in a task's write to a channel.

        A write can also contain messages that are not message objects yet, such as dicts, which the
        channel's reducer converts. These unconverted messages are marked as well, because a
        `DeltaChannel` stores the writes and passes them to its reducer again whenever the channel's
        value is loaded.
        """
        value = self._mark_messages_in_channel_value(value)
        if isinstance(value, list) and not _is_role_and_text(channel, value):
            marked = [self._mark_raw_message(channel, element) for element in value]
            is_same = all(new is old for new, old in zip(marked, value, strict=True))
            return value if is_same else marked
        return self._mark_raw_message(channel, value)

    def _mark_raw_message(self, channel: str, value: Any) -> Any:
        """Mark a message that is not a message object yet, such as a dict with a role.

        A string, or a pair of a role and a text, counts as a message only in the channel
        `messages`.
        """
        fields = value
        if _is_role_and_text(channel, value):
            fields = {"role": value[0], "content": value[1]}
        elif isinstance(value, str) and channel == "messages":
            fields = {"role": "user", "content": value}
        role = fields.get("role", fields.get("type")) if isinstance(fields, Mapping) else None
        if role in HUMAN_ROLES and not self._is_by_person(fields.get("content")):
            marks = {REMEMBER_TURN: False}
        elif role in MESSAGE_ROLES and role not in HUMAN_ROLES and self._excludes_answers:
            marks = {REMEMBER: False, SEARCHED: True}
        else:
            return value
        metadata = fields.get("response_metadata")
        metadata = dict(metadata) if isinstance(metadata, Mapping) else {}
        return {**fields, "response_metadata": {**metadata, **marks}}

    def _mark_message(self, message: BaseMessage) -> BaseMessage:
        """Return a marked copy of a message, or the message itself if it must not be marked."""
        if isinstance(message, HumanMessage):
            if _is_marked(message) or not self._is_message_by_other_author(message):
                return message
            marks = {REMEMBER_TURN: False}
        elif self._excludes_answers and not self._is_loaded_answer(message):
            marks = {REMEMBER: False, SEARCHED: True}
        else:
            return message
        original, copy = self._marked_copies.get(id(message), (None, message))
        if original is message and copy.content == message.content:
            return copy
        metadata = {**message.response_metadata, **marks}
        copy = message.model_copy(update={"response_metadata": metadata})
        self._marked_copies[id(message)] = message, copy
        return copy

    def _is_loaded_answer(self, message: BaseMessage) -> bool:
        """Return whether a message other than a human message was loaded from the thread."""
        if SHORTENED in message.additional_kwargs:
            return any(message.id == loaded_id for loaded_id, _ in self._loaded_answers)
        return (message.id, str(message.content)) in self._loaded_answers

    def _is_message_by_other_author(self, message: HumanMessage) -> bool:
        """Return whether the person did not write a message.

        If the message was loaded from the thread and its content is unchanged, the result depends
        only on whether the loaded message was marked. The content also counts as unchanged if a
        node has only shortened the message.
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
        """Return whether the person has sent all texts of a message with the current run."""
        return all(text.strip() in self._person_texts for text in _iter_nested_strings(content))


async def mark_checkpoint_as_changed_by_other_users(
    saver: Checkpointer,
    thread_id: str,
    checkpoint_id: str | None = None,
    *,
    is_turn_without_memory: bool,
) -> None:
    """Record at a checkpoint that another user has changed the state of a person's thread.

    If a run or a state update by such a user stores checkpoints, their metadata already contains
    this record. Call this function if the user's change might not store a checkpoint, for example
    because a run only adds pending writes. Also call this function if a later run could continue
    from a checkpoint other than those that the user's change stored.

    Args:
        saver: The checkpointer.
        thread_id: The thread.
        checkpoint_id: A checkpoint in the root namespace, or None for the head of the thread.
        is_turn_without_memory: Whether the run's pending writes must not be continued by a run that
            uses the person's memories; see `TURN_WITHOUT_MEMORY`.
    """
    if (checkpoint := await _load_checkpoint(saver, thread_id, "", checkpoint_id)) is None:
        return
    labels = [(_STATE_FROM_OTHERS_CHANNEL, STATE_FROM_OTHERS)]
    if is_turn_without_memory:
        labels.append((_TURN_WITHOUT_MEMORY_CHANNEL, TURN_WITHOUT_MEMORY))
    for channel, task_id in labels:
        await saver.aput_writes(checkpoint.config, [(channel, True)], task_id, _LABEL_PATH)


async def load_metadata_of_continued_checkpoints(
    saver: Checkpointer, thread_id: str, checkpoint_ids_by_namespace: Mapping[str, str]
) -> list[Mapping[str, Any]]:
    """Return the metadata of the checkpoints from which a run continues.

    If another user has only added pending writes to a checkpoint, the returned metadata contains
    `TURN_WITHOUT_MEMORY`, as after a state update of that user.

    Args:
        saver: The checkpointer.
        thread_id: The thread of the run.
        checkpoint_ids_by_namespace: The checkpoint that the run names in each checkpoint namespace.
            The head is used if no checkpoint of the namespace `""` is named.
    """
    loaded: list[Mapping[str, Any]] = []
    for checkpoint_ns, checkpoint_id in {"": None, **checkpoint_ids_by_namespace}.items():
        checkpoint = await _load_checkpoint(saver, thread_id, checkpoint_ns, checkpoint_id)
        if checkpoint is None:
            continue
        metadata: dict[str, Any] = {**checkpoint.metadata}
        if _is_turn_without_memory(checkpoint):
            metadata[TURN_WITHOUT_MEMORY] = True
        loaded.append(metadata)
    return loaded


async def _load_checkpoint(
    saver: Checkpointer, thread_id: str, checkpoint_ns: str, checkpoint_id: str | None
) -> CheckpointTuple | None:
    """Return a checkpoint, or the head of its namespace if `checkpoint_id` is None.

    Return None if there is no such checkpoint.
    """
    position = {"thread_id": thread_id, "checkpoint_ns": checkpoint_ns}
    if checkpoint_id is not None:
        position["checkpoint_id"] = checkpoint_id
    return await saver.aget_tuple({"configurable": position})


def _is_turn_without_memory(checkpoint: CheckpointTuple) -> bool:
    """Return whether runs that continue from a checkpoint must not use any memories."""
    metadata: Mapping[str, Any] = checkpoint.metadata
    return bool(metadata.get(TURN_WITHOUT_MEMORY)) or any(
        channel == _TURN_WITHOUT_MEMORY_CHANNEL for _, channel, _ in checkpoint.pending_writes or ()
    )


def _is_marked(message: BaseMessage) -> bool:
    """Return whether a message is marked, so that its turn is not remembered."""
    return message.response_metadata.get(REMEMBER_TURN) is False


def _is_role_and_text(channel: str, value: Any) -> bool:
    """Return whether a value for the channel `messages` is a `(role, text)` pair."""
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return channel == "messages" and is_pair and value[0] in MESSAGE_ROLES


def _iter_messages(value: Any) -> Iterator[BaseMessage]:
    """Yield the messages in the value of a channel or in a write."""
    if isinstance(value, Overwrite) or type(value) is DeltaSnapshot:
        value = value.value
    for element in value if isinstance(value, list | tuple) else (value,):
        if isinstance(element, BaseMessage):
            yield element


def _iter_nested_strings(json_or_command: Any) -> Iterator[str]:
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
