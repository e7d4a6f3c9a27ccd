"""Determine the person to whom a thread belongs and whose memories the thread's runs use.

The user who sends a request is not necessarily the person to whom the thread belongs. The `user_id`
in the metadata of the thread's head identifies the person to whom the thread belongs. If the
metadata of a thread's head checkpoint has no `user_id` and the server uses API keys, the thread's
`owner` identifies the person. If the server uses an Auth file or has no authentication, the `owner`
of a thread does not identify a person. With an Auth file, the `owner` of a thread can be an
organisation. Without authentication, the `owner` of a thread can be any text. A table in
docs/server.md lists the rules that determine the person to whom a thread belongs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from perdure.memory.thread_messages import REMEMBER, REMEMBER_TURN, SEARCHED
from perdure.run_tables.thread_list import ListedThread
from perdure.server.graphs import default_assistant_id
from perdure.server.runs.message_authors import (
    HUMAN_ROLES,
    MESSAGE_ROLES,
    OtherAuthorMarker,
    add_marks_to_message_fields,
    convert_raw_message_to_fields,
    get_message_role,
    is_role_and_text,
    unwrap_serialized_langchain_message,
)

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

        Fields of the sender that are empty are omitted. The field `caller` is stored under the key
        `user`.
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
            the thread belongs to nobody. It is also True if the caller may act for others and names
            no person, unless the caller only repeats the message of a third user. Otherwise, it is
            True if the run has no author other than the person, and the caller is
            the person or acts for the person.
    """

    user: str
    uses_memory: bool
    is_sender_trusted: bool

    def build_configurable_entries_for_user(self) -> dict[str, Any]:
        """Return the entries of the run's `configurable` that identify the user.

        If the run uses no memory, `user_id` is empty and `WITHOUT_MEMORY_KEY` is set.
        """
        if self.uses_memory:
            return {"user_id": self.user}
        return {"user_id": "", WITHOUT_MEMORY_KEY: True}

    def build_checkpoint_metadata(self, sender: Sender) -> dict[str, Any]:
        """Return the metadata to store with the run's checkpoints.

        The checkpoint metadata contains the id of the person to whom the thread belongs. If a
        different user started the run, the metadata also contains that user's id and a word, such
        as `sent`, that describes the user's action. If `is_sender_trusted` is False, the checkpoint
        metadata also contains the key `STATE_FROM_OTHERS`.
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

        If the run uses memory, `user_id` and `owner` are set to the person's id, and otherwise to
        `""`. `user_id` and `owner` are replaced only if the context contains them.
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
            # An input that is a list contains messages. A `Command`'s `update` that is a list
            # contains `(channel, value)` tuples.
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
        was_changed_by_other_users: bool,
        is_turn_without_memory: bool = False,
    ) -> OtherAuthorMarker:
        """Build an `OtherAuthorMarker` for the messages that a run or a state update stores.

        Args:
            sender: The sender of the run or the update.
            thread_id: The thread of the run.
            input_values: The values that were sent with the run, such as its input.
            was_changed_by_other_users: Whether other users have changed the thread's state earlier.
            is_turn_without_memory: Whether every checkpoint that the run stores gets the metadata
                key `TURN_WITHOUT_MEMORY`, even if langgraph does not store the run's metadata.
        """
        is_input_of_person = self.uses_memory and (
            self.is_sender_trusted or sender.author == self.user
        )
        return OtherAuthorMarker(
            thread_id,
            input_values if is_input_of_person else (),
            is_active=not self.uses_memory
            or not self.is_sender_trusted
            or was_changed_by_other_users,
            excludes_answers=bool(self.user) and not self.uses_memory,
            is_turn_without_memory=is_turn_without_memory,
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
    names_older_checkpoint: bool = False,
    continues_changes_by_other_users: bool = False,
) -> Person:
    """Return the person to whom a run's thread belongs, and whether the run uses their memories.

    Call this function only while holding the thread's lock, because a thread's first run determines
    to whom the thread belongs. If the caller starts a thread's first run on behalf of another
    person, the thread is assigned to that person. If the thread already belongs to a user other
    than the caller, the thread is not reassigned.

    Args:
        thread: The thread of the run.
        sender: The sender of the run.
        owners_are_people: Whether the `owner` of threads is the user of an API key.
        names_older_checkpoint: Whether the request names a checkpoint other than the head. Another
            user could otherwise choose a state in which the person's memories reach this user.
        continues_changes_by_other_users: Whether the run continues another user's change; see
            `does_run_continue_changes_by_other_users`.
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
    # If the sender repeats a message whose author is neither the sender nor the thread's user,
    # ignore the sender's permission to act for others. The author of the message may lack this
    # permission.
    may_act = (
        sender.may_act
        and represented_person is None
        and sender.author in (None, user, sender.caller)
    )
    is_sender_trusted = not user or may_act or (is_sent_as_person and is_author)
    return Person(
        user,
        uses_memory=bool(user)
        and (is_author or may_act)
        and (is_sender_trusted or not names_older_checkpoint)
        and not continues_changes_by_other_users,
        is_sender_trusted=is_sender_trusted,
    )


def choose_graph_and_assistant_metadata(
    thread: ListedThread, person: Person, graph_id: str, assistant_id: str
) -> dict[str, str]:
    """Return the `graph_id` and the `assistant_id` to store in a thread's metadata.

    If the person sends a message or answers a question on perdure's web pages, a run is started.
    The run uses the assistant that the thread's metadata names. An untrusted sender (see
    `Person.is_sender_trusted`) must not be able to change which assistant the thread's metadata
    names. The person's later runs take their config from the assistant in the thread's metadata.
    These runs also use the person's memories. If an untrusted sender starts a run with the graph
    that the thread's metadata already names, the assistant in the metadata is not changed. If the
    thread's metadata names no assistant, or if an untrusted sender requests another graph, the
    graph's default assistant is stored in the metadata.

    Args:
        thread: The thread.
        person: The result of `choose_person_of_run` for the sender.
        graph_id: The graph that the sender requests.
        assistant_id: The assistant that the sender requests.
    """
    if not person.is_sender_trusted:
        is_same_graph = thread.metadata.get("graph_id") == graph_id
        stored_id = thread.metadata.get("assistant_id") if is_same_graph else None
        assistant_id = stored_id if isinstance(stored_id, str) else default_assistant_id(graph_id)
    return {"graph_id": graph_id, "assistant_id": assistant_id}


def choose_checkpoint_owner(thread: ListedThread, sender: Sender, person: Person) -> Any:
    """Return the owner to store with a run's checkpoints, or None if the thread has no owner.

    If a thread's owner starts the thread's first run on behalf of another person, that person
    becomes the owner.
    """
    owner = thread.metadata.get("owner")
    is_handed_over = thread.head_metadata is None and sender.acting_for == person.user
    return person.user if is_handed_over and owner == sender.caller else owner


def _mark_messages_as_excluded_from_extraction(channel_name: str, value: Any) -> Any:
    """Mark the messages in a channel's value so that no memories are extracted from them.

    A message is marked for exclusion from memory extraction by setting a field in its metadata. If
    a human message is marked for exclusion, memory extraction skips the whole turn that the message
    begins. A plain string is treated as a message only in the `messages` channel.

    Args:
        channel_name: The channel, or `""` if it is not known.
        value: The value for the channel: a message, a list of messages, or any other value.
    """
    if isinstance(value, list) and not is_role_and_text(channel_name, value):
        return [
            _mark_messages_as_excluded_from_extraction(channel_name, element) for element in value
        ]
    fields = convert_raw_message_to_fields(channel_name, value)
    if isinstance(fields, Mapping):
        fields = unwrap_serialized_langchain_message(fields)
    role = get_message_role(fields)
    if role not in MESSAGE_ROLES:
        return fields
    is_human = role in HUMAN_ROLES
    return add_marks_to_message_fields(
        fields, {REMEMBER_TURN: False} if is_human else {REMEMBER: False, SEARCHED: True}
    )
