"""Conversations of Claude's export: messages of blocks, with what was attached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from perdure.cli.conversation import Conversation, Odd, described, fenced, seconds, short, spoken

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

_NAMES: Final = {
    **{"title": "name", "model": "model"},
    **{"create_time": "created_at", "update_time": "updated_at"},
}
_ROLES: Final = {"human": "user", "user": "user", "assistant": "assistant"}
_SILENT: Final = ("thinking", "redacted_thinking", "tool_result", "token_budget", "flag")
_ROOT: Final = "00000000-0000-4000-8000-000000000000"  # the parent of a first message


def read(found: Mapping[str, Any]) -> Conversation:
    """A conversation; what is not as expected in it is left out and noted."""
    messages = found["chat_messages"]
    talk = described(found.get("uuid"), found, _NAMES, str(messages)[:10_000])
    if not isinstance(messages, list):
        talk.problem("'chat_messages' is no list")
        return talk
    said: dict[str, list[BaseMessage]] = {}
    parents: dict[str, str | None] = {}
    last: str | None = None
    for number, message in enumerate(messages):
        given = message.get("uuid") if isinstance(message, dict) else None
        key = given if isinstance(given, str) and given else f"{talk.id}-{number}"
        above = message.get("parent_message_uuid", last) if isinstance(message, dict) else last
        parents[key] = above if isinstance(above, str) and above != _ROOT else None
        try:
            said[key] = _messages(key, message, talk)
        except Odd as exc:
            talk.problem(str(exc), key)
        last = key
    shown = found.get("current_leaf_message_uuid")
    talk.fill(parents, said, shown if isinstance(shown, str) and shown in parents else last)
    return talk


def _messages(key: str, found: Any, talk: Conversation) -> list[BaseMessage]:
    """What a message says: its text, and apart from it what tools and files say."""
    if not isinstance(found, dict):
        raise Odd("the message is no object")
    role = _ROLES.get(str(found.get("sender")))
    if role is None:
        raise Odd(f"unknown sender {short(str(found.get('sender')), 40)!r}")
    runs: list[tuple[bool, list[str]]] = []
    for tool, text in [*_attached(found), *_blocks(found, talk)]:
        if runs and runs[-1][0] == tool:
            runs[-1][1].append(text)
        else:
            runs.append((tool, [text]))
    ids = [f"{key}/{number}" for number in range(1, len(runs))] + [key]
    at = seconds(found.get("created_at"))
    return [
        spoken(role, "\n\n".join(texts), id, tool=tool, create_time=at)
        for (tool, texts), id in zip(runs, ids, strict=False)
    ]


def _blocks(found: Mapping[str, Any], talk: Conversation) -> Iterator[tuple[bool, str]]:
    """The texts of a message, each with whether it is a tool's."""
    blocks = found.get("content")
    blocks = blocks if isinstance(blocks, list) and blocks else [found.get("text")]
    for block in blocks:
        block = block if isinstance(block, dict) else {"type": "text", "text": block}
        kind, text = block.get("type"), block.get("text")
        if kind == "tool_use":
            yield True, _call(block)
        elif kind in _SILENT:
            talk.left_out[str(kind)] += 1
        elif kind != "text" or not isinstance(text, str):
            what = "no content" if kind == "text" else f"unknown content {short(str(kind), 40)!r}"
            talk.problem(what, str(found.get("uuid")))
        elif text.strip():
            yield False, text


def _call(block: Mapping[str, Any]) -> str:
    given, name = block.get("input"), short(str(block.get("name") or "tool"), 40)
    given = given if isinstance(given, dict) else {}
    if name == "artifacts":
        name = "artifact" if given.get("command") in (None, "create") else "artifact changed"
    asked = next((given[n] for n in ("title", "query", "url", "id", "path") if n in given), "")
    return f"[{name}: {short(str(asked))}]" if asked else f"[{name}]"


def _attached(found: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """What came with a message: pasted text is the user's own, files are not."""
    for kind in ("attachments", "files"):
        files = found.get(kind)
        for file in files if isinstance(files, list) else ():
            file = file if isinstance(file, dict) else {}
            name, text = file.get("file_name"), file.get("extracted_content")
            text = text if isinstance(text, str) else ""
            if isinstance(name, str) and name:
                body = f"\n{fenced(text)}" if text.strip() else ""
                yield True, f"[file: {short(name)}]{body}"
            elif text.strip():
                yield False, text
