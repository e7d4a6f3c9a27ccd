"""Conversations of Claude's export: messages of blocks, with what was attached."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from pathlib import PurePosixPath as Path
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage

from perdure.cli.conversation import (
    Conversation,
    MalformedPart,
    SavedText,
    build_conversation,
    build_message,
    derive_id,
    format_code_block,
    format_placeholder,
    get_by_path,
    parse_timestamp,
    replace_surrogates,
    shorten_line,
)

_NAMES: Final = {
    **{"title": "name", "model": "model"},
    **{"create_time": "created_at", "update_time": "updated_at"},
}
_ROLES: Final = {"human": "user", "user": "user", "assistant": "assistant"}
_SILENT: Final = ("thinking", "redacted_thinking", "tool_result", "token_budget", "flag")
_SPOKEN: Final = ("text", "voice_note")
_FILES: Final = ("image", "document")
_SUBJECTS: Final = (
    *("title", "query", "url", "id", "path"),  # and those that former versions did not know
    *("filename", "file_path", "file_name", "name", "description"),
)
"""The arguments of a tool that say in a few words what it is about."""
_PLAIN: Final = (  # arguments that say nothing to a reader, or repeat another
    *("type", "language", "id", "version_uuid", "source", "old_str", "view_range", "md_citations"),
    *("description", "max_results", "n", "sort_order"),
)
_PASTE: Final = re.compile(r"pasted?([ _-][\w ().-]*|\(?\d+\)?)?(\.txt)?", re.IGNORECASE)
_HEADING: Final = re.compile(r"#+ [^\n]*|\*\*[^\n]*\*\*")
_ROOT: Final = "00000000-0000-4000-8000-000000000000"  # the parent of a first message


def read(conversation: Mapping[str, Any]) -> Conversation:
    """A conversation; what is not as expected in it is left out and noted."""
    messages = conversation["chat_messages"]
    talk = build_conversation(
        conversation.get("uuid"), conversation, _NAMES, str(messages)[:10_000]
    )
    if not isinstance(messages, list):
        talk.add_problem("'chat_messages' is not a list")
    by_key: dict[str, list[BaseMessage]] = {}
    parents: dict[str, str | None] = {}
    last: str | None = None
    for number, message in enumerate(get_by_path(messages, list)):
        key = get_by_path(message, str, "uuid") or f"{talk.id}-{number}"
        above = get_by_path(message, dict).get("parent_message_uuid", last)
        talk.source_count += 1
        parents[key] = (
            replace_surrogates(above) if isinstance(above, str) and above != _ROOT else None
        )
        try:
            by_key[key] = _messages(key, message, talk)
        except MalformedPart as exc:
            talk.add_problem(str(exc), key)
        last = key
    talk.add_tree(parents, by_key, get_by_path(conversation, str, "current_leaf_message_uuid"))
    return talk


def _messages(key: str, message: Any, talk: Conversation) -> list[BaseMessage]:
    """What a message says: its text, and apart from it what tools and files say."""
    if not isinstance(message, dict):
        raise MalformedPart("the message is not an object")
    role = _ROLES.get(get_by_path(message, str, "sender"))
    if role is None:
        raise MalformedPart(f"unknown sender {shorten_line(message.get('sender'), 40)!r}")
    pieces = [*_attached(message), *_blocks(message, key, talk)]
    runs = [[*run] for _, run in groupby(pieces, lambda piece: piece.kind)]
    ids = [f"{key}/{number}" for number in range(1, len(runs))] + [key]
    at = parse_timestamp(message.get("created_at"))
    said = []
    for run, id in zip(runs, ids, strict=False):
        text = "\n\n".join(piece.text for piece in run)
        former = "\n\n".join(piece.former for piece in run)
        is_document = run[0].kind == _TOOL and any(piece.is_document for piece in run)
        is_tool = run[0].kind == _TOOL
        said.append(
            build_message(role, text, id, tool=is_tool, document=is_document, create_time=at)
        )
        if former != text or is_document:
            talk.former_texts[replace_surrogates(id)] = replace_surrogates(former)
    return said


class _Piece(NamedTuple):
    """A part of the content of a message.

    Attributes:
        kind: Who wrote it. Adjacent pieces of one kind become one message.
        text: The text that is shown.
        former: The text that a former version imported.
        is_document: Whether it contains the text of a file or of an argument of a tool.
    """

    kind: str
    text: str
    former: str
    is_document: bool = False


_OWN: Final = "own"  # text of the user or Claude
_PASTED: Final = "pasted"  # text that the user pasted, which Claude stores as a file
_TOOL: Final = "tool"  # a file or a call of a tool


def _attached(message: Mapping[str, Any]) -> Iterator[_Piece]:
    """What came with a message: pasted text is the user's own, files are not."""
    files = [get_by_path(message, list, name) for name in ("attachments", "files", "files_v2")]
    names = set[str]()
    for file in chain.from_iterable(files):
        name, text = (
            get_by_path(file, str, "file_name"),
            get_by_path(file, str, "extracted_content"),
        )
        shown = format_placeholder("file", name) + (
            f"\n{format_code_block(text)}" if text.strip() else ""
        )
        if name and text.strip() and _PASTE.fullmatch(name):
            yield _Piece(_PASTED, text, shown)
        elif name and (text.strip() or name not in names):
            yield _Piece(_TOOL, shown, shown, bool(text.strip()))
        elif text.strip():
            yield _Piece(_OWN, text, text)
        names.add(name)


def _blocks(message: Mapping[str, Any], key: str, talk: Conversation) -> Iterator[_Piece]:
    """Yield the content blocks of a message as pieces."""
    for block in get_by_path(message, list, "content") or [message.get("text")]:
        block = block if isinstance(block, dict) else {"type": "text", "text": block}
        kind, text = block.get("type"), block.get("text")
        if kind == "tool_use":
            given = block.get("input")  # a text if the answer was cut off within it
            given = (
                {"input": given} if isinstance(given, str) else get_by_path(block, dict, "input")
            )
            yield _call(get_by_path(block, str, "name") or "tool", given, talk)
        elif kind in _SILENT:
            talk.left_out[str(kind)] += 1
        elif kind in _FILES:
            source = get_by_path(block, dict, "source")
            name = get_by_path(block, str, "title") or get_by_path(block, str, "file_name")
            content = get_by_path(source, str, "data") if source.get("type") == "text" else ""
            shown = format_placeholder(kind, name) + (
                f"\n{format_code_block(content)}" if content.strip() else ""
            )
            yield _Piece(_TOOL, shown, "", bool(content.strip()))
        elif kind not in _SPOKEN or not isinstance(text, str):
            what = "no content" if kind == "text" else f"unknown content {shorten_line(kind, 40)!r}"
            talk.add_problem(what, key)
        elif text.strip():
            yield _Piece(_OWN, text, text)


def _call(name: str, arguments: Mapping[str, Any], talk: Conversation) -> _Piece:
    """Build the piece for a call of a tool: its name, its subject and its texts."""
    if name == "artifacts":
        noun = "artifact" if arguments.get("command") in (None, "create") else "artifact changed"
    else:
        noun = name
    subjects = (arguments[n] for n in _SUBJECTS if n in arguments)
    about = next((subject for subject in subjects if subject), "")
    former = format_placeholder(
        noun, next((arguments[n] for n in _SUBJECTS[:5] if n in arguments), "")
    )
    texts, rest = list[str](), 0
    for field, value in arguments.items():
        if value == about or field in _PLAIN or not isinstance(value, str | list | dict):
            continue
        if field == "command" and name == "artifacts":
            continue
        if isinstance(value, str):
            texts += [_format_argument(field, value, arguments)] if value.strip() else []
        elif value:
            rest += 1
    if rest:
        talk.left_out[f"arguments of {name}"] += rest
    return _Piece(_TOOL, "\n".join([format_placeholder(noun, about), *texts]), former, bool(texts))


def _format_argument(field: str, text: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of an argument of a tool; code is put in a fenced block."""
    language = get_by_path(arguments, str, "language")
    kind = get_by_path(arguments, str, "type")
    if field in ("code", "command"):
        return format_code_block(text, language or ("bash" if field == "command" else "javascript"))
    if language or (kind and kind not in ("text/markdown", "text/plain")):
        return format_code_block(text, language)
    names = (
        get_by_path(arguments, str, name) for name in ("path", "file_path", "filename", "file_name")
    )
    ending = Path(next(filter(None, names), "")).suffix[1:]
    return (
        text if ending in ("", "md", "txt") else format_code_block(text, shorten_line(ending, 10))
    )


# -- what else an export has


def read_design(chat: Mapping[str, Any]) -> Conversation:
    """Return a chat of Claude Design, whose messages have text and blocks in an inner object."""
    messages = []
    for message in get_by_path(chat, list, "messages"):
        content = get_by_path(message, dict, "content")
        role = get_by_path(content, str, "role") or get_by_path(message, str, "role")
        texts: list[dict[str, Any]] = [
            {"type": "text", "text": get_by_path(content, str, "content")}
        ]
        calls = [
            get_by_path(block, dict, "toolCall")
            for block in get_by_path(content, list, "contentBlocks")
        ]
        texts += [
            {"type": "tool_use", **call, "input": call.get("input")} for call in calls if call
        ]
        files = [
            {"file_name": get_by_path(f, str, "name")}
            for f in get_by_path(content, list, "attachments")
        ]
        messages.append(
            {
                **{
                    "uuid": get_by_path(message, str, "uuid"),
                    "created_at": get_by_path(message, str, "created_at"),
                },
                **{"sender": role, "content": texts, "files": files},
            }
        )
    name = get_by_path(chat, str, "project", "name") or get_by_path(chat, str, "title")
    return read({**chat, "name": name, "chat_messages": messages})


def is_design(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a chat of Claude Design."""
    messages = get_by_path(value, list, "messages")
    return "uuid" in value and any(
        get_by_path(get_by_path(m, dict), dict, "content") for m in messages
    )


def read_memories(value: Mapping[str, Any]) -> Iterator[SavedText]:
    """Yield the memories that Claude has of the user, one for each paragraph, with its heading."""
    projects = get_by_path(value, dict, "project_memories")
    texts = [get_by_path(value, str, "conversations_memory"), *projects.values()]
    texts += [
        get_by_path(file, str, "content") for file in get_by_path(value, list, "memory_files")
    ]
    for text in texts:
        heading = ""
        for paragraph in re.split(r"\n\s*\n", text if isinstance(text, str) else ""):
            paragraph = replace_surrogates(paragraph.strip())
            if _HEADING.fullmatch(paragraph):
                heading = paragraph.strip("#* ")
            elif paragraph:
                said = f"{heading}: {paragraph}" if heading else paragraph
                yield SavedText(None, f"claude-{derive_id(said)}", said)


def read_project(value: Mapping[str, Any]) -> Iterator[SavedText]:
    """Yield the documents of a project, and its instructions, as items of its namespace."""
    project = get_by_path(value, str, "uuid") or derive_id("project", value.get("name"))
    about = {"project": get_by_path(value, str, "name")}
    for field in ("description", "prompt_template"):
        if (text := get_by_path(value, str, field)).strip():
            title = "instructions" if field == "prompt_template" else field
            yield SavedText(project, title, text, {**about, "title": title})
    for document in get_by_path(value, list, "docs"):
        title, text = get_by_path(document, str, "filename"), get_by_path(document, str, "content")
        if text.strip():
            key = get_by_path(document, str, "uuid") or derive_id(title)
            yield SavedText(project, key, text, {**about, "title": title})


def is_memories(value: Mapping[str, Any]) -> bool:
    """Return whether an object contains the memories that Claude has of the user."""
    return bool(value.keys() & {"conversations_memory", "project_memories"})


def is_project(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a project of Claude, with its documents."""
    return isinstance(value.get("docs"), list) and {"uuid", "name"} <= value.keys()


def files_of_manifest(value: Mapping[str, Any]) -> list[str]:
    """Return the names of the ZIPs of an export if an object is its list of links, else none."""
    files = get_by_path(value, list, "data_files")
    links = [file for file in files if get_by_path(file, str, "export_url")]
    return [
        get_by_path(file, str, "filename") or get_by_path(file, str, "category") for file in links
    ]
