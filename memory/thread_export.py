"""Export of a thread as an object of JSON, with messages in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_messages, convert_to_openai_messages

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.labels import USER_LABELS
from perdure.checkpointers.thread_copy import TranscriptTree, read_transcript_tree
from perdure.checkpointers.titles import about, existing_head
from perdure.errors import InvalidMessages
from perdure.memory.conversation import SHORTENED
from perdure.memory.message_forms import (
    CREATED,
    EXACT,
    MalformedPart,
    get_creation_time,
    parse_timestamp,
    read_message,
)


def build_thread_export(saver: Checkpointer, thread_id: str) -> dict[str, Any]:
    """Build the exported object of a thread, with the messages up to its head and on branches.

    Raises:
        InvalidMessages: The messages of the thread cannot be exported.
    """
    newest = existing_head(saver, thread_id).metadata
    said = saver.database.read(partial(read_transcript_tree, saver._reader, thread_id))
    whose = {name: newest[name] for name in USER_LABELS if newest.get(name)}
    line = {"thread_id": thread_id, **about(saver, thread_id, newest), **whose, "messages": []}
    if said is not None and said.lineages:
        main, *others = _split_branches(said)
        line["messages"] = main["messages"]
        if said.is_lost or (said.values and not (main["messages"] or others)):
            why = "has neither a stored value nor a history"
            if said.values:
                first = next(iter(said.values.values()))
                why = f"contains items of type {type(first).__name__} instead of messages"
            raise InvalidMessages(
                f"the thread {thread_id!r} cannot be exported: its channel 'messages' {why}; "
                "export the other threads by passing their ids"
            )
        line |= {} if said.is_known else {"in_state": "unknown"}
        branches = [part for part in others if part["messages"]]
        line |= {"branches": branches} if branches else {}
    return line


def _split_branches(said: TranscriptTree) -> Iterator[dict[str, Any]]:
    """Yield the messages that each branch adds, with the number of messages before them.

    The main branch comes first. A branch from which another branch continues adds nothing.
    """
    messages = {
        at: message for at, value in said.values.items() if (message := _convert_to_message(value))
    }
    ways = [_find_last_versions(way, messages) for way in said.lineages]
    inner, ends = set[int](), list[int]()
    numbers: dict[
        tuple[int, int], int
    ] = {}  # of each message, by the number before it and its position
    for way in ways:
        above = 0
        for at in way:
            inner.add(above)
            above = numbers.setdefault((above, at), len(numbers) + 1)
        ends.append(above)
    numbers.clear()
    for way, end in zip(ways, ends, strict=True):
        above, after, added = 0, 0, list[dict[str, Any]]()
        for at in way if way is ways[0] or end not in inner else ():
            if (above, at) not in numbers:
                after = after if added else above
                added.append(_build_message_export(messages[at], said.times.get(at)))
            above = numbers.setdefault((above, at), len(numbers) + 1)
        yield {"after": after, "messages": added}


def _find_last_versions(way: Sequence[int], messages: Mapping[int, BaseMessage]) -> list[int]:
    """Return the position of the last complete version of each message, in order of occurrence."""
    last: dict[object, int] = {}
    for at in way:
        if message := messages.get(at):
            shortened = SHORTENED in message.additional_kwargs
            last[message.id or at] = last.get(message.id, at) if shortened else at
    return list(last.values())


def _convert_to_message(value: Any) -> BaseMessage | None:
    """Return the value as a message, or None if it is not a message."""
    try:
        return convert_to_messages([value])[0]
    except Exception:  # langchain-core raises many kinds, see `read_message`
        return None


def _build_message_export(message: BaseMessage, at: Any) -> dict[str, Any]:
    """Build a message in OpenAI's form, with the fields that this form does not express."""
    try:
        form = convert_to_openai_messages([message])[0]
        read = read_message(form, None)
    except (MalformedPart, ValueError):  # OpenAI has no form for it
        form = {"role": "assistant", "content": str(message.text)}
        read = read_message(form, None)
    written = {"role": form.pop("role"), **({"id": message.id} if message.id else {}), **form}
    if (own_time := get_creation_time(message)) is not None:
        written[CREATED] = own_time
        read.response_metadata = {CREATED: own_time}
    elif (moment := parse_timestamp(at)) is not None:
        written["at"] = datetime.fromtimestamp(moment, UTC).isoformat()
    fields, plain = message.model_dump(), read.model_dump() if read.type == message.type else {}
    differing = {name: fields[name] for name in fields if fields[name] != plain.get(name)}
    differing.pop("id", None)
    return {**written, EXACT: differing} if differing else written
