"""The words of users in a conversation: whether what a model makes of it rests on them.

A model that proposes a change is not asked for proof. What stands in a user's own words is known to
be theirs; of the rest only whose words it may rest on is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from langchain_core.messages import BaseMessage, ChatMessage

from perdure.memory.conversation import role
from perdure.memory.records import Role

_WORD: Final = re.compile(r"[^\W_]+")
_NUMBER: Final = re.compile(r"\d(?:[ ./()\u00a0-]{0,3}\d){6,}")
"""One that may be written with other gaps, like that of a telephone."""
_ROLES: Final[dict[str, Role]] = {"human": "user", "ai": "assistant", "system": "system"}


class UsersWords:
    """What users said.

    Args:
        texts: Of their messages.
        actor: Who they are: the name of the last one.
    """

    def __init__(self, texts: Iterable[str], actor: str = "user") -> None:
        said = list(texts)
        self.actor = actor
        self._words = "\n".join(map(_words, said))
        self._numbers = [_digits(each) for text in said for each in _NUMBER.findall(text)]

    def have(self, text: str) -> bool:
        """Whether a text stands in them, however it is spaced, punctuated and capitalised.

        >>> UsersWords(["Write to Ann@example.com!"]).have("ann@example.com")
        True
        """
        if not _WORD.search(text):
            return False
        if _words(text) in self._words:
            return True
        digits = "" if any(map(str.isalpha, text)) else _digits(text)
        return len(digits) > 6 and any(digits in each for each in self._numbers)


@dataclass(frozen=True, slots=True)
class Speakers:
    """Who speaks in a conversation.

    Attributes:
        users: The words of users.
        trust: The role of the least trustworthy: a tool, an assistant, a user.
        actor: The name of the last who has that role, or the role.
    """

    users: UsersWords
    trust: Role
    actor: str


def speakers(messages: Sequence[BaseMessage]) -> Speakers:
    """Who speaks in messages; a system message is nobody's."""
    spoken = [(_role(each), each) for each in messages if each.type != "remove"]
    names: dict[Role, str] = {who: each.name or who for who, each in spoken}
    least: Sequence[Role] = ("tool", "assistant", "user")
    trust: Role = next((who for who in least if who in names), least[-1])
    users = (str(each.text) for who, each in spoken if who == "user")
    return Speakers(UsersWords(users, names.get("user", "user")), trust, names.get(trust, trust))


def _role(message: BaseMessage) -> Role:
    if isinstance(message, ChatMessage):  # a role that nobody knows is not trusted as a user's
        return "user" if message.role in ("user", "human") else "assistant"
    return _ROLES.get(role(message), "tool")


def _words(text: str) -> str:
    return f" {' '.join(_WORD.findall(text.casefold()))} "


def _digits(text: str) -> str:
    return "".join(filter(str.isdigit, text))
