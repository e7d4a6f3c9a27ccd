"""Represent exported conversations as message trees, with helper functions for all importers."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

# Other modules of the import command import these names from this module. The form `name as name`
# marks them as re-exported.
from perdure.memory.message_forms import MalformedPart as MalformedPart
from perdure.memory.message_forms import derive_id as derive_id
from perdure.memory.message_forms import get_by_path as get_by_path
from perdure.memory.message_forms import get_creation_time as get_creation_time
from perdure.memory.message_forms import parse_timestamp as parse_timestamp
from perdure.memory.message_forms import replace_surrogates as replace_surrogates
from perdure.memory.message_forms import shorten_line as shorten_line
from perdure.memory.thread_messages import REMEMBER, SEARCHED

_SPACES_AND_COMMAS: Final = re.compile(r"[\s,]*")

# Maximum length of a conversation id, in bytes. All known exports have shorter ids, and the store
# accepts keys of this length.
_MAX_ID_BYTES: Final = 500


class Problem(NamedTuple):
    """A problem in an export, which caused the import to skip or change a part of the export.

    Attributes:
        reason: What is wrong with the part.
        conversation: The id of the conversation, or the position in the file.
        message: The id of the message.
    """

    reason: str
    conversation: str | None = None
    message: str | None = None


class MessageNode(NamedTuple):
    """A message of a conversation's tree.

    Attributes:
        parent: The key of the previous message in `Conversation.nodes`, or None for a first
            message.
        message: The message.
        created_at: The time of the message in seconds since 1970, or None.
    """

    parent: str | None
    message: BaseMessage
    created_at: float | None


class SavedText(NamedTuple):
    """An exported text that does not belong to a conversation, such as a memory or a document.

    Attributes:
        project: The project that the document belongs to, or None for a memory.
        key: The key under which the text is put into the store.
        text: The text.
        metadata: The other fields of a document's store item.
    """

    project: str | None
    key: str
    text: str
    metadata: Mapping[str, str] = {}


class UnnamedSource(NamedTuple):
    """The source file of an imported conversation that has no id of its own.

    Attributes:
        file: An object that identifies the file within one import.
        file_stem: The file name without extension. Earlier versions of perdure made thread ids from
            this name.
        build: Builds the conversation with a given id. The second argument says whether the ids
            that are derived for messages without an id depend also on the times of the messages. In
            earlier versions of perdure, they did not.
    """

    file: object
    file_stem: str
    build: Callable[[str, bool], Conversation]


@dataclass(slots=True)
class Conversation:
    """A conversation as a tree of messages.

    Attributes:
        id: The id of the conversation, from which the thread id is made.
        metadata: The known values of the fields in
            `perdure.checkpointers.import_metadata.IMPORTED_KEYS` and, for JSON files, in
            `perdure.checkpointers.labels.USER_LABELS`. Times are in seconds since 1970 (UTC).
        nodes: The messages by key. The key is the id of the message, or a derived id if the id is
            already in use (see `add_message`). Parents come before their children, and the main
            branch last.
        leaf: The key of the message at the end of the main branch.
        left_out: The number of skipped messages and parts by kind, such as thinking.
        problems: The malformed parts of the conversation that were skipped or imported differently.
        unnamed: The source of the conversation if the source contains no id for it. `id` is then
            provisional. Otherwise None.
        former_texts: The texts that an earlier version of perdure imported for messages of which it
            skipped a part. The text is "" if the version skipped the whole message. The keys are
            message ids.
        is_archived: Whether the conversation is part of a person's archive, which contains the
            person's memories, too.
        source_count: The number of messages in the export, including skipped ones.
    """

    id: str
    metadata: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, MessageNode] = field(default_factory=dict)
    leaf: str | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    unnamed: UnnamedSource | None = None
    former_texts: dict[str, str] = field(default_factory=dict)
    is_archived: bool = False
    source_count: int = 0

    @property
    def last_message_time(self) -> float:
        """Return the time of the last message of the export; see `find_message_creation_time`."""
        return self.find_message_creation_time(next(reversed(self.nodes), None))

    def find_message_creation_time(self, key: str | None) -> float:
        """Return a message's timestamp in seconds since the Unix epoch.

        If the message has no timestamp, return the timestamp of its nearest ancestor that has one.
        If neither the message nor any ancestor has a timestamp, return the time at which the
        conversation was last updated or, if that is unknown, the time at which the conversation was
        created. If the times of the message, of its ancestors and of the conversation are all
        unknown, return infinity.
        """
        while key is not None:
            key, _, created_at = self.nodes[key]
            if created_at is not None:
                return created_at
        return float(self.metadata.get("update_time", self.metadata.get("create_time", math.inf)))

    def list_message_ids_from_root(self, key: str | None) -> list[str]:
        """Return the keys of a message and all its ancestors, oldest first."""
        keys = []
        while key is not None:
            keys.append(key)
            key = self.nodes[key].parent
        return keys[::-1]

    def add_problem(self, reason: str, message: str | None = None) -> None:
        """Add a problem to the list of problems."""
        self.problems.append(Problem(reason, self.id, message))

    def add_message(
        self,
        message: BaseMessage,
        parent: str | None,
        created_at: float | None = None,
        *,
        is_variant: bool = False,
    ) -> str:
        """Add a message after its parent.

        If the conversation already contains a different message with the same id, the new message
        is skipped, and a problem is added to `problems`. With `is_variant`, a new message
        whose id is already in use is not skipped, but added under a new id that is derived from the
        message.

        Args:
            message: The message.
            parent: The key of the parent, or None for a first message.
            created_at: The time of the message in seconds since 1970, or None for the time that the
                message itself contains.
            is_variant: Whether the message may be another version of a message with the same id.

        Returns:
            The key of the message in `nodes`. It is the id of the message, or a derived id for a
            variant.
        """
        key = str(message.id)
        if created_at is None:
            created_at = get_creation_time(message)
        existing_node = self.nodes.get(key)
        if is_variant and existing_node is not None and existing_node[:2] != (parent, message):
            # The id is already in use. Derive a new id from a hash of the whole message, because
            # two messages with the same id can differ in any field.
            key = derive_id(key, parent, repr(message))
        node = self.nodes.setdefault(key, MessageNode(parent, message, created_at))
        if node.message is not message and node.message != message:
            self.add_problem("has the id of another message", key)
        return key

    def add_message_tree(
        self,
        parents: dict[str, str | None],
        messages: Mapping[str, list[BaseMessage]],
        leaf_id: str,
    ) -> None:
        """Add the messages of an exported tree, in which a single node can hold several messages.

        If the parent of a node is missing, or if a node is its own ancestor, the node becomes a
        root node.

        Args:
            parents: For each node of the tree, the id of its parent, or None for a root node. In
                this dict, parents that are missing or form a cycle are replaced with None.
            messages: For each node, its messages in order. A node can have none.
            leaf_id: The id of the node at which the main branch ends. If there is no such node, the
                main branch ends at the last node.
        """
        # `last_messages` maps the id of each node in the exported tree to the id of the node's last
        # message. A node without messages is mapped to the last message of its nearest ancestor
        # that has messages.
        last_messages: dict[str | None, str | None] = {}

        def list_new_ancestors(key: str | None) -> list[str]:
            """Return the ids of a node and its ancestors, skipping nodes that were already added.

            The ids are sorted from the oldest ancestor to the node itself. If the parent of the
            oldest ancestor is missing, or if the chain of parents forms a cycle, the oldest
            ancestor becomes a root node. If the parents form a cycle, or if the parent of a node
            with messages is missing, a problem is added to `problems`.
            """
            parts: dict[str, None] = {}
            while key is not None and key not in last_messages:
                parts[key] = None
                parent = parents[key]
                if parent in parts or parent not in parents:
                    if parent in parts:
                        self.add_problem(
                            "is its own ancestor, so it was imported as a first message", key
                        )
                    elif parent is not None and key in messages:
                        self.add_problem(
                            "its parent is missing, so it was imported as a first message", key
                        )
                    parents[key] = parent = None
                key = parent
            return list(reversed(parts))

        leaf = leaf_id if leaf_id in parents else next(reversed(parents), None)
        main = dict.fromkeys(list_new_ancestors(leaf))
        # Add the nodes of the main branch last, so that they are the last ones in
        # `Conversation.nodes`.
        for end in [*(key for key in parents if key not in main), leaf]:
            for key in list_new_ancestors(end):
                last = last_messages.get(parents[key])
                for message in messages.get(key, ()):
                    last = self.add_message(message, last)
                last_messages[key] = last
        self.leaf = last_messages.get(leaf)

    def convert_and_add_messages(
        self,
        exported_messages: Iterable[tuple[str, Any, Any]],
        convert_message: Callable[[str, Any, Conversation], list[BaseMessage]],
        leaf_id: str,
        *,
        root_id: str | None = None,
    ) -> None:
        """Convert the messages of an export, and add them as `add_message_tree` does.

        Messages that cannot be converted are skipped, and are listed in `problems`.

        Args:
            exported_messages: For each exported message, its id, the id of its parent, and the JSON
                value of the message. A message whose parent id is not text becomes a first message.
            convert_message: Converts the JSON value of a message. It is called with the id, the
                JSON value and this conversation. It raises MalformedPart if the value is malformed.
            leaf_id: See `add_message_tree`.
            root_id: The parent id that the first messages have in the export, if they have one.
        """
        parents: dict[str, str | None] = {}
        messages: dict[str, list[BaseMessage]] = {}
        for key, parent_id, exported in exported_messages:
            self.source_count += 1
            has_parent = isinstance(parent_id, str) and parent_id != root_id
            parents[key] = replace_surrogates(parent_id) if has_parent else None
            try:
                messages[key] = convert_message(key, exported, self)
            except MalformedPart as exc:
                self.add_problem(str(exc), key)
        self.add_message_tree(parents, messages, leaf_id)


def build_conversation_without_messages(
    export_id: object,
    export: Mapping[str, Any],
    export_field_by_own_field: Mapping[str, str],
    *fallback_id_sources: object,
) -> Conversation:
    """Build a conversation without messages.

    Args:
        export_id: The id of the conversation in the export. If it is not a non-empty string, an id
            is derived from `fallback_id_sources`.
        export: The JSON object of the conversation.
        export_field_by_own_field: Maps the name of each field to read, as in
            `Conversation.metadata`, to the name of the field in the export.
        fallback_id_sources: Values from which an id is derived.
    """
    metadata: dict[str, Any] = {}
    for own_name, export_name in export_field_by_own_field.items():
        time, text = (
            parse_timestamp(export.get(export_name)),
            get_by_path(export, str, export_name),
        )
        value = time if own_name.endswith("_time") else text if text.strip() else None
        if value is not None:
            metadata[own_name] = value
    id = (
        export_id
        if isinstance(export_id, str) and export_id
        else derive_id("conversation", *fallback_id_sources)
    )
    if len(id.encode("utf-8", "replace")) > _MAX_ID_BYTES:
        id = derive_id("conversation", id)
    return Conversation(replace_surrogates(id), metadata)


def build_imported_message(
    role: str,
    text: str,
    message_id: str,
    *,
    is_from_tool: bool = False,
    is_document: bool = False,
    **metadata_fields: Any,
) -> BaseMessage:
    """Build a user, assistant or system message with its id and metadata.

    Args:
        role: "user", "assistant" or "system".
        text: The text of the message.
        message_id: The id of the message.
        is_from_tool: Whether the text was written by a tool. Such a message does not become a
            memory.
        is_document: Whether the text is a document. A document does not become a memory, but the
            search of threads finds it.
        metadata_fields: The metadata of the message. Empty values are left out.
    """
    message_classes: dict[str, type[BaseMessage]] = {"user": HumanMessage, "assistant": AIMessage}
    metadata = {name: value for name, value in metadata_fields.items() if value not in (None, "")}
    if is_from_tool or is_document:
        metadata[REMEMBER] = False
    if is_document:
        metadata[SEARCHED] = True
    return message_classes.get(role, SystemMessage)(
        content=replace_surrogates(text),
        id=replace_surrogates(message_id),
        response_metadata=metadata,
    )


# -- text in place of files, calls and code


def format_placeholder(noun: object, description: object = "") -> str:
    """Return placeholder text for a file, an image or a tool call, such as "[file: dates.pdf]"."""
    text = shorten_line(description)
    return f"[{shorten_line(noun, 40)}: {text}]" if text else f"[{shorten_line(noun, 40)}]"


def format_code_block(code: str, language: str = "") -> str:
    """Format code as a fenced Markdown code block."""
    fence = "```"
    while fence in code:
        fence += "`"
    return f"{fence}{language}\n{code.strip(chr(10))}\n{fence}"


# -- JSON values in a file


def parse_json_or_none(text: str) -> Any:
    """Parse a JSON text. Return None if the text is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def iter_json_values_with_positions(text: str) -> Iterator[tuple[int, Any]]:
    """Yield the values in a JSON array or in a sequence of JSON values such as JSON Lines.

    Yields:
        The number of the value and the value. The number is the position in the array, or the line
        in the file, counted from 1. Instead of a value that cannot be parsed, a `MalformedPart` is
        yielded. In an array, nothing is read after such a value. Otherwise, the next line is read.
    """
    decoder = json.JSONDecoder()
    position = _skip_spaces_and_commas(text, 0)
    is_array = text.startswith("[", position)
    position += is_array
    number, counted_position = 0 if is_array else 1, 0
    value: Any = None
    while (position := _skip_spaces_and_commas(text, position)) < len(text):
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


def _skip_spaces_and_commas(text: str, position: int) -> int:
    """Return the position of the next character that is neither white space nor a comma."""
    match = _SPACES_AND_COMMAS.match(text, position)
    return match.end() if match else position
