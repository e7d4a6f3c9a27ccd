"""The person of a thread: the user whose memories its runs use, whoever sends the request.

The person is the `user_id` of the thread's head, else the `owner` that an API key gave. An owner
that a handler of an Auth file sets, such as an organisation, is no person. docs/server.md has the
rule as a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Self

from langgraph.types import Command, Send

from perdure.checkpointers.address import WITHOUT_MEMORY_KEY
from perdure.checkpointers.labels import CALLER, DEED
from perdure.checkpointers.thread_list import ListedThread
from perdure.memory.thread_messages import REMEMBER, REMEMBER_TURN, SEARCHED

CALLER_DEEDS: Final = ("answered", "said", "sent", "scheduled", "continued", "changed")
"""What a caller may do on a thread: answer a question, send a message, send a message for the
person, have a cron run, continue a run, or change the state."""
_ROLES: Final = ("user", "human", "assistant", "ai", "system", "developer", "tool", "function")


class Sender(NamedTuple):
    """The sender of a run, as its row keeps it.

    Attributes:
        caller: The user who sent the request.
        acting_for: The person for whom the caller acts, or None.
        may_act: Whether the caller may act for others.
        author: The user whose message is the input of the run, or None if it has no new message.
        deed: What the caller does; one of `CALLER_DEEDS`.
        teams: The teams of the caller, or of the person for whom the caller acts.
    """

    caller: str
    acting_for: str | None = None
    may_act: bool = False
    author: str | None = None
    deed: str = "continued"
    teams: Sequence[str] = ()

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Return the sender that the row of a run keeps. Empty values are not kept."""
        fields = {name: row[name] for name in cls._fields if name in row}
        return cls(**{"caller": row["user"], **fields})

    def build_row_fields(self) -> dict[str, Any]:
        """Return the values that the row of a run keeps."""
        fields = {name: value for name, value in self._asdict().items() if value}
        del fields["caller"]
        return {**fields, "user": self.caller}


class Person(NamedTuple):
    """The person whose memories a run uses.

    Attributes:
        user: The id of the person; `""` means nobody.
        remembers: Whether the run recalls and remembers anything of the person.
    """

    user: str
    uses_memory: bool

    def build_configurable(self) -> dict[str, Any]:
        """Return the values of the run's `configurable` that name the user."""
        if self.uses_memory:
            return {"user_id": self.user}
        return {"user_id": "", WITHOUT_MEMORY_KEY: True}

    def build_metadata(self, sender: Sender) -> dict[str, Any]:
        """Return the metadata of the run's checkpoints that says whose thread it is."""
        caller_fields = (
            {} if sender.caller == self.user else {CALLER: sender.caller, DEED: sender.deed}
        )
        return {"user_id": self.user, **caller_fields}

    def apply_to_context(self, context: Any) -> Any:
        """Return the context of a run, in which `user_id` and `owner` are the person's."""
        if not isinstance(context, Mapping):
            return context
        names = {name for name in ("user_id", "owner") if name in context}
        return {**context, **dict.fromkeys(names, self.user if self.uses_memory else "")}

    def apply_to_input(self, input: Any) -> Any:
        """Return the input of a run, whose messages are marked if nothing is remembered of them."""
        if self.uses_memory:
            return input
        if isinstance(input, Command):
            goto = [
                Send(each.node, self.apply_to_input(each.arg)) if isinstance(each, Send) else each
                for each in ([input.goto] if isinstance(input.goto, str | Send) else input.goto)
            ]
            return replace(input, update=self.apply_to_input(input.update), goto=goto)
        if isinstance(input, Mapping):
            return {name: _mark_messages(name, value) for name, value in input.items()}
        if isinstance(input, list):  # the update of a command, or messages
            return [
                (each[0], _mark_messages(each[0], each[1]))
                if isinstance(each, tuple)
                else _mark_messages("", each)
                for each in input
            ]
        return input


def find_person(thread: ListedThread, *, owners_are_people: bool) -> str | None:
    """Return the person of a thread, `""` if it belongs to nobody, or None if nothing names one.

    Args:
        thread: The thread.
        owners_are_people: Whether the `owner` of threads is the user of an API key.
    """
    user = (thread.head_metadata or {}).get("user_id")
    if user is None and owners_are_people:
        user = thread.metadata.get("owner")
    if type(user) is int:  # the users of a service may have numbers
        return str(user)
    return user if isinstance(user, str) else None


def choose_person(thread: ListedThread, sender: Sender, *, owners_are_people: bool) -> Person:
    """Choose the person whose memories a run uses, when it starts under the thread's lock.

    A thread without a checkpoint becomes that of the person for whom its first caller acts, unless
    it belongs to somebody else than the caller.
    """
    thread_person, named = (
        find_person(thread, owners_are_people=owners_are_people),
        sender.acting_for,
    )
    if (
        named is not None
        and thread.head_metadata is None
        and thread_person in (None, sender.caller)
    ):
        thread_person = named
    user = thread_person if thread_person is not None else named or sender.caller
    is_author = sender.author in (None, user)
    may_act = sender.may_act and named is None
    return Person(user, bool(user) and (is_author or may_act))


def find_owner(thread: ListedThread, sender: Sender, person: Person) -> Any:
    """Return the owner of a thread for the checkpoints of a run, or None if it has none.

    A thread without a checkpoint that the caller made becomes the person's, for whom the caller
    acts.
    """
    owner = thread.metadata.get("owner")
    is_new_thread = thread.head_metadata is None and sender.acting_for == person.user
    return person.user if is_new_thread and owner == sender.caller else owner


def _mark_messages(name: str, value: Any) -> Any:
    """Return the value of a channel, with its messages marked so that no memory is made of them.

    A human message is marked with its turn. Texts are messages in the channel `messages` only.
    """
    if isinstance(value, list):
        is_pair = name == "messages" and len(value) == 2 and value[0] in _ROLES
        if not is_pair:
            return [_mark_messages(name, each) for each in value]
        value = {"role": value[0], "content": value[1]}
    if isinstance(value, str) and name == "messages":
        value = {"role": "user", "content": value}
    if isinstance(value, Mapping):
        value = _unwrap_envelope(value)
    role = value.get("role", value.get("type")) if isinstance(value, Mapping) else None
    if role in _ROLES:
        metadata = value.get("response_metadata")
        metadata = dict(metadata) if isinstance(metadata, Mapping) else {}
        is_human = role in _ROLES[:2]
        metadata |= {REMEMBER_TURN: False} if is_human else {REMEMBER: False, SEARCHED: True}
        return {**value, "response_metadata": metadata}
    return value


def _unwrap_envelope(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a message that was serialized as LangChain serializes objects.

    Any other value is returned as it is. LangChain takes the class from the last part of the `id`,
    such as `HumanMessage`, and the fields from `kwargs`, which may be an envelope again.
    """
    while value.get("lc") == 1 and value.get("type") == "constructor":
        class_path, fields = value.get("id"), value.get("kwargs")
        if not (isinstance(class_path, list) and class_path and isinstance(fields, Mapping)):
            break
        role = str(class_path[-1]).removesuffix("Chunk").removesuffix("Message").lower()
        if role not in _ROLES:
            break
        value = {"type": role, **fields}
    return value
