"""What was said on a thread: its messages, each once, with ids, places and times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final

from langchain_core.messages import BaseMessage, ChatMessage, SystemMessage

from perdure.memory import conversation
from perdure.memory.options import is_number
from perdure.memory.records import Role
from perdure.memory.shortening import SHORTENED

_ROLES: Final[Mapping[str, Role]] = {
    **{"human": "user", "user": "user", "ai": "assistant", "assistant": "assistant"},
    **{"tool": "tool", "function": "tool", "system": "system", "developer": "system"},
}

REMEMBER: Final = "remember"
"""In a message's `response_metadata`, with the value False: no memory is formed of it."""


@dataclass(frozen=True, slots=True)
class ThreadMessage:
    """A message of a thread.

    Attributes:
        message: It.
        id: Its id; of one without, made of what it says.
        position: Its place in the order of the thread; None: the checkpointer counts none.
        at: When it was said (UTC); None: not known.
        removed: Whether the state has it no more: it was trimmed, summarised, or deleted.
    """

    message: BaseMessage
    id: str
    position: int | None = None
    at: datetime | None = None
    removed: bool = False

    @property
    def text(self) -> str:
        """What it says; what no store can hold, half a character, is a question mark in it.

        Of a message that is off the record, nothing.
        """
        off_record = self.message.response_metadata.get(REMEMBER) is False
        return "" if off_record else storable(str(self.message.text))

    @property
    def role(self) -> Role:
        """Whose words they are; a role that nobody knows is not trusted as a user's."""
        message = self.message
        if isinstance(message, ChatMessage):
            return _ROLES.get(message.role, "assistant")
        return _ROLES.get(conversation.role(message), "assistant")

    @property
    def actor(self) -> str:
        """Who says it: its name, else its role."""
        return self.message.name or self.role

    @property
    def digest(self) -> str:
        """What tells it from a later wording of the same message."""
        return blake2b(_identity(self.message), digest_size=4).hexdigest()

    @property
    def shortened(self) -> bool:
        """Whether a node cut it to save room, so that it was said at greater length."""
        return SHORTENED in self.message.additional_kwargs


@dataclass(frozen=True, slots=True)
class ThreadHistory:
    """What was said on a thread, in order.

    Attributes:
        thread_id: The thread.
        checkpoint_id: The checkpoint it is read at.
        messages: Each once, as last worded.
    """

    thread_id: str
    checkpoint_id: str | None
    messages: Sequence[ThreadMessage]

    def present(self) -> ThreadHistory:
        """The same without what the state has no more."""
        return replace(self, messages=[each for each in self.messages if not each.removed])

    @property
    def shown(self) -> tuple[str, ...]:
        """The texts of its system messages, which who answers has been shown."""
        systems = (s for s in self.messages if isinstance(s.message, SystemMessage) and s.text)
        return tuple(dict.fromkeys(each.text for each in systems))


def latest(wordings: Iterable[tuple[ThreadMessage, bool]]) -> list[ThreadMessage]:
    """Each message once, where it was first said, as it is worded now.

    Args:
        wordings: All of them in order, each with whether it is the one that the state has. Of a
            message whose wording there is a shortened one, or that is gone, it is the last.
    """
    found: dict[str, ThreadMessage] = {}
    settled: set[str] = set()
    present: set[str] = set()
    for each, seen in wordings:
        first = found.get(each.id)
        if first is None:
            found[each.id] = each
        elif not each.shortened and each.id not in settled:
            found[each.id] = replace(each, position=first.position)
        if seen:
            present.add(each.id)
            if not each.shortened:
                settled.add(each.id)
    return [each if id in present else replace(each, removed=True) for id, each in found.items()]


def with_ids(messages: Sequence[BaseMessage]) -> Iterator[tuple[BaseMessage, str]]:
    """Messages with their ids; those without get one of what they say, and how often before."""
    times: Counter[bytes] = Counter()
    for message in messages:
        if message.id:
            yield message, message.id
            continue
        identity = _identity(message)
        times[identity] += 1
        made = blake2b(identity + str(times[identity]).encode(), digest_size=10)
        yield message, f"unnamed-{made.hexdigest()}"


def _identity(message: BaseMessage) -> bytes:
    parts = (message.type, message.name or "", str(message.text))
    return "\0".join(parts).encode("utf-8", "surrogatepass")


def storable(text: str) -> str:
    """A text without white space around it, half characters in it as question marks."""
    return text.strip().encode("utf-8", "replace").decode()


def time_of(value: Any) -> datetime | None:
    """A moment (UTC) given in seconds since 1970 or in ISO 8601; None: it is neither.

    >>> time_of(0).isoformat(), time_of("2024-05-01T10:00:00+02:00").isoformat()
    ('1970-01-01T00:00:00+00:00', '2024-05-01T08:00:00+00:00')
    """
    try:
        if is_number(value):
            return datetime.fromtimestamp(value, UTC)
        found = datetime.fromisoformat(value) if isinstance(value, str) else value
        if not isinstance(found, datetime):
            return None
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None
