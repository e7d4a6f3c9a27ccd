"""Conversations to import, as trees of messages, and functions that all readers of exports use."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from perdure.memory.message_forms import MalformedPart as MalformedPart
from perdure.memory.message_forms import derive_id as derive_id
from perdure.memory.message_forms import get_by_path as get_by_path
from perdure.memory.message_forms import get_creation_time as get_creation_time
from perdure.memory.message_forms import parse_timestamp as parse_timestamp
from perdure.memory.message_forms import replace_surrogates as replace_surrogates
from perdure.memory.message_forms import shorten_line as shorten_line
from perdure.memory.thread_messages import REMEMBER, SEARCHED

_SPACES_AND_COMMAS: Final = re.compile(r"[\s,]*")

_MAX_ID_BYTES: Final = (
    500  # bytes; no export has longer ones, and a key of a memory has room for it
)


class Problem(NamedTuple):
    """What was not as expected, and where."""

    reason: str
    conversation: str | None = None
    message: str | None = None


class MessageNode(NamedTuple):
    """A message, the id of the one that it follows, and when it was said: s since 1970."""

    parent: str | None
    message: BaseMessage
    created_at: float | None


class SavedText(NamedTuple):
    """A text of an export that is not part of a conversation.

    Attributes:
        project: The project that the document belongs to, or None for a memory.
        key: The key of the memory, or of the item.
        text: The text.
        about: Other fields of the item.
    """

    project: str | None
    key: str
    text: str
    metadata: Mapping[str, str] = {}


class UnnamedSource(NamedTuple):
    """The source of a conversation that has no id.

    Attributes:
        file: An object that stands for one reading of the file, which may be read twice.
        stem: The name of the file, from which former versions made the id of the thread.
        build: Builds the conversation with a given id. The second argument says whether the ids of
            messages also depend on their times; in former versions they did not.
    """

    file: object
    file_stem: str
    build: Callable[[str, bool], Conversation]


@dataclass(slots=True)
class Conversation:
    """A conversation as a tree of messages."""

    id: str  # of its thread
    metadata: dict[str, Any] = field(
        default_factory=dict
    )  # see `ABOUT`; times in s since 1970 (UTC)
    nodes: dict[str, MessageNode] = field(
        default_factory=dict
    )  # by id, parents first, main branch last
    leaf: str | None = None  # the message where the main branch ends
    left_out: Counter[str] = field(default_factory=Counter)  # messages that tell a reader nothing
    problems: list[Problem] = field(default_factory=list)
    unnamed: UnnamedSource | None = None  # set if the id is provisional
    former_texts: dict[str, str] = field(default_factory=dict)
    """The text of a message that a former version imported, by id, if it left out a part or all."""
    is_archived: bool = False  # it is in the archive of a person, with the memories made of it
    source_count: int = 0  # messages in the source, including those that are left out

    def find_creation_time(self, key: str | None) -> float:
        """The time of a message or of one before it, else of the conversation, else infinity."""
        while key is not None:
            key, _, created_at = self.nodes[key]
            if created_at is not None:
                return created_at
        return float(self.metadata.get("update_time", self.metadata.get("create_time", math.inf)))

    def list_branch(self, key: str | None) -> list[str]:
        """The messages up to one, the oldest first."""
        keys = []
        while key is not None:
            keys.append(key)
            key = self.nodes[key].parent
        return keys[::-1]

    def add_problem(self, reason: str, message: str | None = None) -> None:
        """Note a problem."""
        self.problems.append(Problem(reason, self.id, message))

    def add_message(
        self,
        message: BaseMessage,
        parent: str | None,
        created_at: float | None = None,
        *,
        variant: bool = False,
    ) -> str:
        """Add a message after another; returns its key: its id, but of a `variant` of one."""
        key = str(message.id)
        at = get_creation_time(message) if created_at is None else created_at
        existing_node = self.nodes.get(key)
        if variant and existing_node is not None and existing_node[:2] != (parent, message):
            key = derive_id(key, parent, repr(message))  # variants may differ in any field
        node = self.nodes.setdefault(key, MessageNode(parent, message, at))
        if node.message is not message and node.message != message:
            self.add_problem("the id of another message", key)
        return key

    def add_tree(
        self,
        parents: dict[str, str | None],
        messages: Mapping[str, list[BaseMessage]],
        leaf_id: str,
    ) -> None:
        """Add what the parts of a tree say, in order.

        The main branch ends with the one shown, or if that is none of them with the last.
        """
        last_messages: dict[
            str | None, str | None
        ] = {}  # the last message of each part or of its ancestors

        def list_new_ancestors(key: str | None) -> list[str]:
            """A part and its ancestors up to one that is done, the oldest first."""
            parts: dict[str, None] = {}
            while key is not None and key not in last_messages:
                parts[key] = None
                parent = parents[key]
                if parent in parts or parent not in parents:
                    if parent in parts:
                        self.add_problem("its own ancestor, read as a beginning", key)
                    elif parent is not None and key in messages:
                        self.add_problem("parent missing, read as a beginning", key)
                    parents[key] = parent = None
                key = parent
            return list(reversed(parts))

        leaf = leaf_id if leaf_id in parents else next(reversed(parents), None)
        main = dict.fromkeys(list_new_ancestors(leaf))
        for end in [*(key for key in parents if key not in main), leaf]:
            for key in list_new_ancestors(end):
                last = last_messages.get(parents[key])
                for message in messages.get(key, ()):
                    last = self.add_message(message, last)
                last_messages[key] = last
        self.leaf = last_messages.get(leaf)


def build_conversation(
    name: object, export: Mapping[str, Any], field_names: Mapping[str, str], *id_sources: object
) -> Conversation:
    """A conversation without its messages, of its JSON.

    `names` has its keys by what they are called in `ABOUT`; an id that is none is made up.
    """
    metadata: dict[str, Any] = {}
    for own_name, export_name in field_names.items():
        time, text = (
            parse_timestamp(export.get(export_name)),
            get_by_path(export, str, export_name),
        )
        value = time if own_name.endswith("_time") else text if text.strip() else None
        if value is not None:
            metadata[own_name] = value
    id = name if isinstance(name, str) and name else derive_id("conversation", *id_sources)
    if len(id.encode("utf-8", "replace")) > _MAX_ID_BYTES:
        id = derive_id("conversation", id)
    return Conversation(replace_surrogates(id), metadata)


def build_message(
    role: str, text: str, key: str, *, tool: bool = False, document: bool = False, **about: Any
) -> BaseMessage:
    """Build a message of the user, assistant or system, with its id and metadata.

    Output of a program (`tool`) does not become a memory. Neither does a `document`, but the search
    of threads finds it.
    """
    message_classes: dict[str, type[BaseMessage]] = {"user": HumanMessage, "assistant": AIMessage}
    metadata = {name: value for name, value in about.items() if value not in (None, "")}
    if tool or document:
        metadata[REMEMBER] = False
    if document:
        metadata[SEARCHED] = True
    return message_classes.get(role, SystemMessage)(
        content=replace_surrogates(text), id=replace_surrogates(key), response_metadata=metadata
    )


# -- what stands in a text for something else


def format_placeholder(noun: object, description: object = "") -> str:
    """What stands for a file, a picture or a call: "[file: dates.pdf]"."""
    text = shorten_line(description)
    return f"[{shorten_line(noun, 40)}: {text}]" if text else f"[{shorten_line(noun, 40)}]"


def format_code_block(code: str, language: str = "") -> str:
    """Code with its lines, as Markdown."""
    fence = "```"
    while fence in code:
        fence += "`"
    return f"{fence}{language}\n{code.strip(chr(10))}\n{fence}"


# -- values in a file


def iter_json_values(text: str) -> Iterator[tuple[int, Any]]:
    """The values of a JSON array, or those that stand one after the other, each with its number.

    The number is the place in the array, or the line. What cannot be read is a `MalformedPart`.
    """
    decoder = json.JSONDecoder()
    position = _skip_spaces(text, 0)
    is_array = text.startswith("[", position)
    position += is_array
    number, counted_position = 0 if is_array else 1, 0
    value: Any = None
    while (position := _skip_spaces(text, position)) < len(text):
        if is_array and text[position] == "]":
            return
        number += 1 if is_array else text.count("\n", counted_position, position)
        counted_position = position
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as exc:
            reason = "nested too deeply" if isinstance(exc, RecursionError) else "not JSON"
            value = MalformedPart(
                "not JSON: the rest" if is_array and reason == "not JSON" else reason
            )
            value.__cause__ = exc
            position = len(text) if is_array else (text.find("\n", position) + 1 or len(text))
        yield number, value
    if is_array and not isinstance(value, MalformedPart):
        yield number + 1, MalformedPart("the file ends within its array")


def _skip_spaces(text: str, position: int) -> int:
    match = _SPACES_AND_COMMAS.match(text, position)
    return match.end() if match else position
