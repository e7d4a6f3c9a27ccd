"""Conversations of Claude's export: messages of blocks, with what was attached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Final

from langchain_core.messages import BaseMessage

from perdure.cli.conversation import (
    Conversation,
    Odd,
    described,
    fenced,
    find,
    label,
    seconds,
    short,
    spoken,
    whole,
)

_NAMES: Final = {
    **{"title": "name", "model": "model"},
    **{"create_time": "created_at", "update_time": "updated_at"},
}
_ROLES: Final = {"human": "user", "user": "user", "assistant": "assistant"}
_SILENT: Final = ("thinking", "redacted_thinking", "tool_result", "token_budget", "flag")
_ROOT: Final = "00000000-0000-4000-8000-000000000000"  # the parent of a first message


def read(conversation: Mapping[str, Any]) -> Conversation:
    """A conversation; what is not as expected in it is left out and noted."""
    messages = conversation["chat_messages"]
    talk = described(conversation.get("uuid"), conversation, _NAMES, str(messages)[:10_000])
    if not isinstance(messages, list):
        talk.problem("'chat_messages' is no list")
    by_key: dict[str, list[BaseMessage]] = {}
    parents: dict[str, str | None] = {}
    last: str | None = None
    for number, message in enumerate(find(messages, list)):
        key = find(message, str, "uuid") or f"{talk.id}-{number}"
        above = find(message, dict).get("parent_message_uuid", last)
        talk.seen += 1
        parents[key] = whole(above) if isinstance(above, str) and above != _ROOT else None
        try:
            by_key[key] = _messages(key, message, talk)
        except Odd as exc:
            talk.problem(str(exc), key)
        last = key
    talk.fill(parents, by_key, find(conversation, str, "current_leaf_message_uuid"))
    return talk


def _messages(key: str, message: Any, talk: Conversation) -> list[BaseMessage]:
    """What a message says: its text, and apart from it what tools and files say."""
    if not isinstance(message, dict):
        raise Odd("the message is no object")
    role = _ROLES.get(find(message, str, "sender"))
    if role is None:
        raise Odd(f"unknown sender {short(message.get('sender'), 40)!r}")
    texts = [*_attached(message), *_blocks(message, key, talk)]
    runs = [(tool, [text for _, text in run]) for tool, run in groupby(texts, lambda pair: pair[0])]
    ids = [f"{key}/{number}" for number in range(1, len(runs))] + [key]
    at = seconds(message.get("created_at"))
    return [
        spoken(role, "\n\n".join(run), id, tool=tool, create_time=at)
        for (tool, run), id in zip(runs, ids, strict=False)
    ]


def _attached(message: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """What came with a message: pasted text is the user's own, files are not."""
    for file in (*find(message, list, "attachments"), *find(message, list, "files")):
        name, text = find(file, str, "file_name"), find(file, str, "extracted_content")
        if name:
            yield True, label("file", name) + (f"\n{fenced(text)}" if text.strip() else "")
        elif text.strip():
            yield False, text


def _blocks(message: Mapping[str, Any], key: str, talk: Conversation) -> Iterator[tuple[bool, str]]:
    """The texts of a message, each with whether it is a tool's."""
    for block in find(message, list, "content") or [message.get("text")]:
        block = block if isinstance(block, dict) else {"type": "text", "text": block}
        kind, text = block.get("type"), block.get("text")
        if kind == "tool_use":
            yield True, _call(find(block, str, "name") or "tool", find(block, dict, "input"))
        elif kind in _SILENT:
            talk.left_out[str(kind)] += 1
        elif kind != "text" or not isinstance(text, str):
            what = "no content" if kind == "text" else f"unknown content {short(kind, 40)!r}"
            talk.problem(what, key)
        elif text.strip():
            yield False, text


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    if name == "artifacts":
        name = "artifact" if arguments.get("command") in (None, "create") else "artifact changed"
    request = next(
        (arguments[n] for n in ("title", "query", "url", "id", "path") if n in arguments), ""
    )
    return label(name, request)
