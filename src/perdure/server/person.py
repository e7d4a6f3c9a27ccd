"""Determine the person to whom a thread belongs and whose memories the thread's runs use.

The user who sends a request is not necessarily the person to whom the thread belongs. The `user_id`
in the metadata of the thread's head identifies the person to whom the thread belongs. If the head's
metadata has no `user_id` and the server uses API keys, the thread's `owner` identifies the person.
If the server uses an Auth file, the `owner` of a thread can be an organisation. If the server has
no authentication, the `owner` can be any text. Servers of these two kinds therefore do not use the
`owner` to identify the person. A table in docs/server.md lists the rules that determine the person
to whom a thread belongs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Self

from langgraph.types import Command, Send

from perdure.checkpointers.address import WITHOUT_MEMORY_KEY
from perdure.checkpointers.labels import (
    CALLER,
    CALLER_ACTION,
    STATE_FROM_OTHERS,
    TURN_WITHOUT_MEMORY,
)
from perdure.checkpointers.thread_list import ListedThread
from perdure.memory.thread_messages import REMEMBER, REMEMBER_TURN, SEARCHED
from perdure.server.message_authors import HUMAN_ROLES, MESSAGE_ROLES, OtherAuthorMarker

CALLER_DEEDS: Final = ("answered", "said", "sent", "scheduled", "continued", "changed")
"""The values of `Sender.deed`, which name the operation of a caller on a thread.

The operations are, in this order: answer a question, send a message, send a message for the person,
start a run by a cron, continue a run, change the state.
"""


class Sender(NamedTuple):
    """The user who starts a run, and the person on whose behalf the user acts.

    The `Sender` of a run is stored in the run's database row.

    Attributes:
        caller: The user who sent the request.
        acting_for: The person for whom the caller acts, or None.
        may_act: Whether the caller may act for others.
        author: The user who wrote the message in the run's input, or who edited a tool call in an
            answer. None if the run has neither.
        deed: The operation of the caller; one of `CALLER_DEEDS`.
        teams: The teams of the caller, or of the person for whom the caller acts.
    """

    caller: str
    acting_for: str | None = None
    may_act: bool = False
    author: str | None = None
    deed: str = "continued"
    teams: Sequence[str] = ()

    @classmethod
    def from_row(cls, details: Mapping[str, Any]) -> Self:
        """Build a sender from the `details` in a run's database row.

        Missing fields have their defaults.
        """
        fields = {name: details[name] for name in cls._fields if name in details}
        return cls(**{"caller": details["user"], **fields})

    def build_run_row_fields(self) -> dict[str, Any]:
        """Return the sender's fields in the format of `RunRow.details`, for storage.

        Empty fields are omitted, and the `caller` field is stored under the key `user`.
        """
        fields = {name: value for name, value in self._asdict().items() if value}
        del fields["caller"]
        return {**fields, "user": self.caller}


class Person(NamedTuple):
    """The person to whom a run's thread belongs, and whether the run uses the person's memories.

    Attributes:
        user: The id of the person, or `""` if the thread belongs to nobody.
        uses_memory: Whether the run reads and writes memories of the person.
        is_sender_trusted: Whether the changes of the run count as changes of the person. True if
            the thread belongs to nobody, or if the caller may act for others and names no person.
            Otherwise, it is True if the run has no author other than the person, and the caller is
            the person or acts for the person.
    """

    user: str
    uses_memory: bool
    is_sender_trusted: bool

    def build_user_configurable(self) -> dict[str, Any]:
        """Return the entries of the run's `configurable` that identify the user.

        If the run uses no memory, `user_id` is empty and `WITHOUT_MEMORY_KEY` is set.
        """
        if self.uses_memory:
            return {"user_id": self.user}
        return {"user_id": "", WITHOUT_MEMORY_KEY: True}

    def build_checkpoint_metadata(self, sender: Sender) -> dict[str, Any]:
        """Return the metadata to store with the run's checkpoints.

        The metadata identifies the person to whom the thread belongs. If a different user started
        the run, the metadata also contains that user's id and action, such as `sent`. If
        `is_sender_trusted` is False, the metadata also contains the key `STATE_FROM_OTHERS`. If the
        thread belongs to a person whose memories the run does not use, the metadata also contains
        `TURN_WITHOUT_MEMORY`.
        """
        caller_fields = (
            {}
            if sender.caller == self.user
            else {CALLER: sender.caller, CALLER_ACTION: sender.deed}
        )
        state_fields = {} if self.is_sender_trusted else {STATE_FROM_OTHERS: True}
        turn_fields = {TURN_WITHOUT_MEMORY: True} if self.user and not self.uses_memory else {}
        return {"user_id": self.user, **caller_fields, **state_fields, **turn_fields}

    def replace_user_in_context(self, context: Any) -> Any:
        """Return a copy of a run's context with `user_id` and `owner` replaced.

        In the copy, `user_id` and `owner` are set to the person's id, or to `""` if the run does
        not use memory. Keys that are missing from the context are not added.
        """
        if not isinstance(context, Mapping):
            return context
        names = {name for name in ("user_id", "owner") if name in context}
        return {**context, **dict.fromkeys(names, self.user if self.uses_memory else "")}

    def exclude_input_from_extraction_if_memory_is_off(self, input: Any) -> Any:
        """Return the input of a run.

        If the run does not use memory, the returned messages are marked in their metadata so that
        no memories are extracted from them; see `_mark_messages_as_excluded_from_extraction`.
        """
        if self.uses_memory:
            return input
        if isinstance(input, Command):
            goto = [
                Send(target.node, self.exclude_input_from_extraction_if_memory_is_off(target.arg))
                if isinstance(target, Send)
                else target
                for target in ([input.goto] if isinstance(input.goto, str | Send) else input.goto)
            ]
            return replace(
                input,
                update=self.exclude_input_from_extraction_if_memory_is_off(input.update),
                goto=goto,
            )
        if isinstance(input, Mapping):
            return {
                name: _mark_messages_as_excluded_from_extraction(name, value)
                for name, value in input.items()
            }
        if isinstance(input, list):
            # The list contains messages or, if it is the update of a `Command`, `(channel, value)`
            # tuples.
            return [
                (element[0], _mark_messages_as_excluded_from_extraction(element[0], element[1]))
                if isinstance(element, tuple)
                else _mark_messages_as_excluded_from_extraction("", element)
                for element in input
            ]
        return input

    def build_other_author_marker(
        self,
        sender: Sender,
        thread_id: str,
        input_values: Sequence[Any],
        *,
        continues_turn: bool,
        start_checkpoint_id: str | None,
        is_state_update: bool = False,
    ) -> OtherAuthorMarker:
        """Build the object that marks the messages stored by a run or a state update.

        Args:
            sender: The sender of the run.
            thread_id: The thread of the run.
            input_values: The values that were sent with the run, such as its input.
            continues_turn: Whether the run or the update continues the last turn of the thread.
            start_checkpoint_id: The named checkpoint of the root namespace, or None.
            is_state_update: Whether the marker is for a state update and not for a run.
        """
        is_input_of_person = self.uses_memory and (
            self.is_sender_trusted or sender.author == self.user
        )
        return OtherAuthorMarker(
            thread_id,
            input_values if is_input_of_person else (),
            is_active=not self.uses_memory or not self.is_sender_trusted,
            continues_turn=continues_turn,
            start_checkpoint_id=start_checkpoint_id,
            refuses_turn_without_memory=continues_turn and self.uses_memory and not is_state_update,
            excludes_answers=bool(self.user) and not self.uses_memory,
        )


def find_person_of_thread(thread: ListedThread, *, owners_are_people: bool) -> str | None:
    """Return the id of the person to whom a thread belongs.

    Args:
        thread: The thread.
        owners_are_people: Whether the `owner` of threads is the user of an API key.

    Returns:
        The id, `""` if the thread belongs to nobody, or None if the thread does not identify a
        person.
    """
    user = (thread.head_metadata or {}).get("user_id")
    if user is None and owners_are_people:
        user = thread.metadata.get("owner")
    if type(user) is int:  # Some services use integers as user ids.
        return str(user)
    return user if isinstance(user, str) else None


def choose_person_of_run(
    thread: ListedThread,
    sender: Sender,
    *,
    owners_are_people: bool,
    continued_metadata: Iterable[Mapping[str, Any]] = (),
    names_older_checkpoint: bool = False,
) -> Person:
    """Return the person to whom a run's thread belongs, and whether the run uses their memories.

    Call this function only while holding the thread's lock, because a thread's first run determines
    to whom the thread belongs. If the caller starts a thread's first run on behalf of another
    person, the thread is assigned to that person. A thread that already belongs to a user other
    than the caller is not reassigned.

    A turn that began without the person's memories continues without them, whoever continues it.
    Otherwise, another user could send a message, which is processed without the person's memories,
    and then make the graph use these memories by continuing the turn.

    Args:
        thread: The thread of the run.
        sender: The sender of the run.
        owners_are_people: Whether the `owner` of threads is the user of an API key.
        continued_metadata: The metadata of the checkpoints from which the run continues. Empty if
            the run begins a new turn.
        names_older_checkpoint: Whether the request names a checkpoint other than the head. Another
            user could otherwise choose a state in which the person's memories reach this user.
    """
    thread_person = find_person_of_thread(thread, owners_are_people=owners_are_people)
    represented_person = sender.acting_for
    if (
        represented_person is not None
        and thread.head_metadata is None
        and thread_person in (None, sender.caller)
    ):
        thread_person = represented_person
    user = thread_person if thread_person is not None else represented_person or sender.caller
    is_author = sender.author in (None, user)
    is_sent_as_person = (represented_person or sender.caller) == user
    may_act = sender.may_act and represented_person is None
    is_sender_trusted = not user or may_act or (is_sent_as_person and is_author)
    continues_without_memory = any(
        metadata.get(TURN_WITHOUT_MEMORY) for metadata in continued_metadata
    )
    return Person(
        user,
        uses_memory=bool(user)
        and (is_author or may_act)
        and (is_sender_trusted or not names_older_checkpoint)
        and not continues_without_memory,
        is_sender_trusted=is_sender_trusted,
    )


def choose_checkpoint_owner(thread: ListedThread, sender: Sender, person: Person) -> Any:
    """Return the owner to store with a run's checkpoints, or None if the thread has no owner.

    If the owner of a thread starts its first run on behalf of another person, that person becomes
    the owner.
    """
    owner = thread.metadata.get("owner")
    is_handed_over = thread.head_metadata is None and sender.acting_for == person.user
    return person.user if is_handed_over and owner == sender.caller else owner


def _mark_messages_as_excluded_from_extraction(channel_name: str, value: Any) -> Any:
    """Mark the messages in a channel's value so that no memories are extracted from them.

    A message is marked by setting a field in its metadata. Marking a human message excludes its
    entire turn from memory extraction. A plain string is treated as a message only in the
    `messages` channel.

    Args:
        channel_name: The channel, or `""` if it is not known.
        value: The value for the channel: a message, a list of messages, or any other value.
    """
    if isinstance(value, list):
        is_pair = channel_name == "messages" and len(value) == 2 and value[0] in MESSAGE_ROLES
        if not is_pair:
            return [
                _mark_messages_as_excluded_from_extraction(channel_name, element)
                for element in value
            ]
        value = {"role": value[0], "content": value[1]}
    if isinstance(value, str) and channel_name == "messages":
        value = {"role": "user", "content": value}
    if isinstance(value, Mapping):
        value = _unwrap_serialized_langchain_message(value)
    role = value.get("role", value.get("type")) if isinstance(value, Mapping) else None
    if role in MESSAGE_ROLES:
        metadata = value.get("response_metadata")
        metadata = dict(metadata) if isinstance(metadata, Mapping) else {}
        is_human = role in HUMAN_ROLES
        metadata |= {REMEMBER_TURN: False} if is_human else {REMEMBER: False, SEARCHED: True}
        return {**value, "response_metadata": metadata}
    return value


def _unwrap_serialized_langchain_message(value: Mapping[str, Any]) -> Mapping[str, Any]:
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
