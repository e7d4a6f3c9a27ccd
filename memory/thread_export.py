"""Export a thread as a JSON object, with its messages in OpenAI format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_messages, convert_to_openai_messages

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.import_metadata import read_import_metadata, read_thread_head_or_raise
from perdure.checkpointers.labels import USER_LABELS
from perdure.checkpointers.thread_copy import TranscriptTree, read_transcript_tree
from perdure.errors import InvalidMessages
from perdure.memory.conversation import SHORTENED
from perdure.memory.message_forms import (
    CREATED,
    EXACT,
    MalformedPart,
    convert_object_to_message,
    get_creation_time,
    parse_timestamp,
)


def build_thread_export(saver: Checkpointer, thread_id: str) -> dict[str, Any]:
    """Build the JSON export of a thread.

    The export contains the messages up to the thread's head and those on other branches.

    Args:
        saver: The checkpointer that stores the thread.
        thread_id: The id of the thread.

    Raises:
        UnknownThread: The thread does not exist.
        InvalidMessages: The messages of the thread cannot be exported.
    """
    metadata = read_thread_head_or_raise(saver, thread_id).metadata
    transcript = saver.database.read(partial(read_transcript_tree, saver.parts.reader, thread_id))
    export = {
        "thread_id": thread_id,
        **read_import_metadata(saver, thread_id, metadata),
        **{name: metadata[name] for name in USER_LABELS if metadata.get(name)},
        "messages": [],
    }
    if transcript is not None and transcript.lineages:
        main, *others = _iter_branch_exports(transcript)
        export["messages"] = main["messages"]
        if transcript.is_lost or (transcript.values and not (main["messages"] or others)):
            fault = "has neither a stored value nor a history"
            if transcript.values:
                first = next(iter(transcript.values.values()))
                fault = f"contains items of type {type(first).__name__} instead of messages"
            raise InvalidMessages(
                f"the thread {thread_id!r} cannot be exported: its channel 'messages' {fault}; "
                "export the other threads by passing their ids"
            )
        export |= {} if transcript.is_known else {"in_state": "unknown"}
        branches = [part for part in others if part["messages"]]
        export |= {"branches": branches} if branches else {}
    return export


def _iter_branch_exports(transcript: TranscriptTree) -> Iterator[dict[str, Any]]:
    """Yield, for each branch, a dict with the keys `after` and `messages`.

    The main branch, which ends at the thread's head, is yielded first with all of its messages. For
    each later branch, `messages` contains only the messages that no earlier branch contains.
    `after` is the number of the message that precedes the first message in `messages`. `after` is 0
    if `messages` starts at the beginning of the thread. Exported messages are numbered from 1 in
    export order.

    If all messages of a side branch also belong to a longer branch, `messages` is empty for the
    side branch.
    """
    messages = {
        position: message
        for position, value in transcript.values.items()
        if (message := _convert_to_message(value))
    }
    lineages = [
        _find_log_positions_of_last_message_versions(lineage, messages)
        for lineage in transcript.lineages
    ]
    # A lineage is the sequence of the log positions of one branch's messages. All lineages together
    # form a tree of messages, whose root has the number 0. The dict `nodes` contains the numbers of
    # all nodes except the root. The key of a node is a pair of the parent node's number and the log
    # position of the node's message.
    nodes: dict[tuple[int, int], int] = {}
    inner_nodes, last_nodes = set[int](), list[int]()
    for lineage in lineages:
        node = 0
        for position in lineage:
            inner_nodes.add(node)
            node = nodes.setdefault((node, position), len(nodes) + 1)
        last_nodes.append(node)
    # Renumber the nodes in export order, so that each node has the same number as its exported
    # message. The exported field `after` refers to messages by number.
    nodes.clear()
    for lineage, last_node in zip(lineages, last_nodes, strict=True):
        node, after, added = 0, 0, list[dict[str, Any]]()
        is_exported = lineage is lineages[0] or last_node not in inner_nodes
        for position in lineage if is_exported else ():
            if (node, position) not in nodes:
                after = after if added else node
                time = transcript.times.get(position)
                added.append(_build_message_export(messages[position], time))
            node = nodes.setdefault((node, position), len(nodes) + 1)
        yield {"after": after, "messages": added}


def _find_log_positions_of_last_message_versions(
    lineage: Sequence[int], messages_by_position: Mapping[int, BaseMessage]
) -> list[int]:
    """Return the log position of the last full version of each message of a branch.

    If every version of a message has been shortened, the position of the message's first version is
    returned. The returned positions are in the order in which the messages first occur on the
    branch.
    """
    last_positions: dict[object, int] = {}
    for position in lineage:
        if message := messages_by_position.get(position):
            is_shortened = SHORTENED in message.additional_kwargs
            earlier = last_positions.get(message.id, position)
            last_positions[message.id or position] = earlier if is_shortened else position
    return list(last_positions.values())


def _convert_to_message(value: Any) -> BaseMessage | None:
    """Convert a value to a message. Return None if the value is not a message."""
    try:
        return convert_to_messages([value])[0]
    # Catch all exceptions, because langchain-core can raise errors of many types for malformed
    # messages.
    except Exception:
        return None


def _build_message_export(message: BaseMessage, time: Any) -> dict[str, Any]:
    """Convert a message to OpenAI's JSON format.

    Message fields that OpenAI's JSON format cannot represent are stored under the key `EXACT`, so
    that an import can restore them. `time` is the time at which the checkpointer stored the
    message. If the message has no creation time of its own, `time` is exported as the field `at`.
    """
    try:
        form = convert_to_openai_messages([message])[0]
        restored = convert_object_to_message(form, None)
    # OpenAI's format cannot express some messages, for example messages with malformed content
    # blocks.
    except (MalformedPart, ValueError):
        form = {"role": "assistant", "content": str(message.text)}
        restored = convert_object_to_message(form, None)
    export = {"role": form.pop("role"), **({"id": message.id} if message.id else {}), **form}
    if (own_time := get_creation_time(message)) is not None:
        export[CREATED] = own_time
        restored.response_metadata = {CREATED: own_time}
    elif (timestamp := parse_timestamp(time)) is not None:
        export["at"] = datetime.fromtimestamp(timestamp, UTC).isoformat()
    fields = message.model_dump()
    restored_fields = restored.model_dump() if restored.type == message.type else {}
    lost = {name: fields[name] for name in fields if fields[name] != restored_fields.get(name)}
    lost.pop("id", None)
    return {**export, EXACT: lost} if lost else export
