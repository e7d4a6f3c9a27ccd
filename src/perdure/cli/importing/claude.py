"""Read conversations, memories and projects from a Claude export."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from pathlib import PurePosixPath as Path
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage

from perdure.cli.importing.conversation import (
    Conversation,
    MalformedPart,
    SavedText,
    build_conversation_without_messages,
    build_imported_message,
    derive_id,
    format_code_block,
    format_placeholder,
    get_by_path,
    parse_timestamp,
    replace_surrogates,
    shorten_line,
)

# Maps each field name in `IMPORTED_KEYS` to the field's name in a Claude export.
_FIELD_NAMES: Final = {
    **{"title": "name", "model": "model"},
    **{"create_time": "created_at", "update_time": "updated_at"},
}
_ROLES: Final = {"human": "user", "user": "user", "assistant": "assistant"}
# Types of content blocks that the import counts but does not store.
_HIDDEN_BLOCKS: Final = ("thinking", "redacted_thinking", "tool_result", "token_budget", "flag")
_TEXT_BLOCKS: Final = ("text", "voice_note")
_FILE_BLOCKS: Final = ("image", "document")
_SUBJECT_ARGUMENTS: Final = (
    # Earlier versions of perdure read a tool call's subject only from the arguments "title",
    # "query", "url", "id" and "path".
    *("title", "query", "url", "id", "path"),
    *("filename", "file_path", "file_name", "name", "description"),
)
"""The arguments of a tool call that describe its subject in a few words."""
# Names of tool call arguments to skip, because they duplicate another argument or are meaningless
# to a human reader.
_IGNORED_ARGUMENTS: Final = (
    *("type", "language", "id", "version_uuid", "source", "old_str", "view_range", "md_citations"),
    *("description", "max_results", "n", "sort_order"),
)
# Matches the names of the files in which Claude stores pasted text
_PASTED_FILE_NAME: Final = re.compile(r"pasted?([ _-][\w ().-]*|\(?\d+\)?)?(\.txt)?", re.IGNORECASE)
_HEADING: Final = re.compile(r"#+ [^\n]*|\*\*[^\n]*\*\*")
# Parent id of a conversation's first message in a Claude export.
_ROOT_ID: Final = "00000000-0000-4000-8000-000000000000"


def is_claude_conversation(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a conversation of a Claude export."""
    return "chat_messages" in value


def build_claude_conversation(export: Mapping[str, Any]) -> Conversation:
    """Build a `Conversation` from a conversation in a Claude export.

    Malformed messages are skipped, and are listed in the new conversation's `problems`.
    """
    messages = export["chat_messages"]
    conversation = build_conversation_without_messages(
        export.get("uuid"), export, _FIELD_NAMES, str(messages)[:10_000]
    )
    if not isinstance(messages, list):
        conversation.add_problem("'chat_messages' is not a list")
    exported_messages: list[tuple[str, Any, Any]] = []
    last: str | None = None
    for number, message in enumerate(get_by_path(messages, list)):
        parent_id = get_by_path(message, dict).get("parent_message_uuid", last)
        last = get_by_path(message, str, "uuid") or f"{conversation.id}-{number}"
        exported_messages.append((last, parent_id, message))
    conversation.convert_and_add_messages(
        exported_messages,
        _convert_claude_chat_message,
        get_by_path(export, str, "current_leaf_message_uuid"),
        root_id=_ROOT_ID,
    )
    return conversation


def _convert_claude_chat_message(
    message_id: str, message: Any, conversation: Conversation
) -> list[BaseMessage]:
    """Convert a message of a Claude export to a list of LangChain messages.

    Merge adjacent pieces of the same kind, such as text or tool calls, into one message.
    """
    if not isinstance(message, dict):
        raise MalformedPart("the message is not a JSON object")
    role = _ROLES.get(get_by_path(message, str, "sender"))
    if role is None:
        raise MalformedPart(f"unknown sender {shorten_line(message.get('sender'), 40)!r}")
    pieces = [
        *_iter_attachment_pieces(message),
        *_iter_content_block_pieces(message, message_id, conversation),
    ]
    groups = [[*group] for _, group in groupby(pieces, lambda piece: piece.kind)]
    ids = [f"{message_id}/{number}" for number in range(1, len(groups))] + [message_id]
    created_at = parse_timestamp(message.get("created_at"))
    messages = []
    for group, id in zip(groups, ids, strict=False):
        text = "\n\n".join(piece.text for piece in group)
        former = "\n\n".join(piece.former for piece in group)
        is_document = group[0].kind == _TOOL_OR_FILE and any(piece.is_document for piece in group)
        messages.append(
            build_imported_message(
                role,
                text,
                id,
                is_from_tool=group[0].kind == _TOOL_OR_FILE,
                is_document=is_document,
                create_time=created_at,
            )
        )
        if former != text or is_document:
            conversation.former_texts[replace_surrogates(id)] = replace_surrogates(former)
    return messages


class _MessagePiece(NamedTuple):
    """A part of the content of a message.

    Attributes:
        kind: The kind of the piece, which says who wrote it. Adjacent pieces with the same kind
            become one message.
        text: The text of the piece that perdure imports.
        former: The text that an earlier version of perdure imported for the piece.
        is_document: Whether the piece has the text of a file or of an argument of a tool call.
    """

    kind: str
    text: str
    former: str
    is_document: bool = False


# Value of `_MessagePiece.kind` for text that the user or Claude wrote.
_AUTHOR_TEXT: Final = "own"
# Value of `_MessagePiece.kind` for text that the user pasted, which Claude stores as a file.
_PASTED_TEXT: Final = "pasted"
# Value of `_MessagePiece.kind` for a file or a tool call.
_TOOL_OR_FILE: Final = "tool"


def _iter_attachment_pieces(message: Mapping[str, Any]) -> Iterator[_MessagePiece]:
    """Yield the attachments of a message.

    Attached text that the user pasted is treated as if the user had written it in the message.
    """
    files = [get_by_path(message, list, name) for name in ("attachments", "files", "files_v2")]
    names = set[str]()
    for file in chain.from_iterable(files):
        name, text = (
            get_by_path(file, str, "file_name"),
            get_by_path(file, str, "extracted_content"),
        )
        file_text = format_placeholder("file", name) + (
            f"\n{format_code_block(text)}" if text.strip() else ""
        )
        if name and text.strip() and _PASTED_FILE_NAME.fullmatch(name):
            yield _MessagePiece(_PASTED_TEXT, text, file_text)
        elif name and (text.strip() or name not in names):
            yield _MessagePiece(_TOOL_OR_FILE, file_text, file_text, bool(text.strip()))
        elif text.strip():
            yield _MessagePiece(_AUTHOR_TEXT, text, text)
        names.add(name)


def _iter_content_block_pieces(
    message: Mapping[str, Any], message_id: str, conversation: Conversation
) -> Iterator[_MessagePiece]:
    """Yield a `_MessagePiece` for each content block to import."""
    for block in get_by_path(message, list, "content") or [message.get("text")]:
        block = block if isinstance(block, dict) else {"type": "text", "text": block}
        kind, text = block.get("type"), block.get("text")
        if kind == "tool_use":
            # If Claude's answer was cut off inside a tool call, the call's arguments are a string
            # instead of an object.
            arguments = block.get("input")
            arguments = (
                {"input": arguments}
                if isinstance(arguments, str)
                else get_by_path(block, dict, "input")
            )
            yield _render_tool_call_as_message_piece(
                get_by_path(block, str, "name") or "tool", arguments, conversation
            )
        elif kind in _HIDDEN_BLOCKS:
            conversation.left_out[str(kind)] += 1
        elif kind in _FILE_BLOCKS:
            source = get_by_path(block, dict, "source")
            name = get_by_path(block, str, "title") or get_by_path(block, str, "file_name")
            content = get_by_path(source, str, "data") if source.get("type") == "text" else ""
            file_text = format_placeholder(kind, name) + (
                f"\n{format_code_block(content)}" if content.strip() else ""
            )
            yield _MessagePiece(_TOOL_OR_FILE, file_text, "", bool(content.strip()))
        elif kind not in _TEXT_BLOCKS or not isinstance(text, str):
            problem = (
                "no content" if kind == "text" else f"unknown content {shorten_line(kind, 40)!r}"
            )
            conversation.add_problem(problem, message_id)
        elif text.strip():
            yield _MessagePiece(_AUTHOR_TEXT, text, text)


def _render_tool_call_as_message_piece(
    tool_name: str, arguments: Mapping[str, Any], conversation: Conversation
) -> _MessagePiece:
    """Render a tool call as a piece of message text that contains its name and text arguments.

    The tool's name is followed by the call's subject, which is its main argument, and then by the
    other text arguments.

    The tool call's subject is the first argument listed in `_SUBJECT_ARGUMENTS` that is not empty.
    Arguments that are lists or objects are omitted and counted in the conversation's `left_out`. An
    exception is the tool call's subject (its main argument, such as a title or a file path), which
    is kept even if it is a list or an object.
    """
    if tool_name == "artifacts":
        noun = "artifact" if arguments.get("command") in (None, "create") else "artifact changed"
    else:
        noun = tool_name
    subject_text = next((arguments[n] for n in _SUBJECT_ARGUMENTS if arguments.get(n)), "")
    former = format_placeholder(
        noun, next((arguments[n] for n in _SUBJECT_ARGUMENTS[:5] if n in arguments), "")
    )
    other_arguments = {
        field: value
        for field, value in arguments.items()
        if value != subject_text
        and field not in _IGNORED_ARGUMENTS
        and (field, tool_name) != ("command", "artifacts")
    }
    texts = [
        _format_tool_argument_as_markdown(field, value, arguments)
        for field, value in other_arguments.items()
        if isinstance(value, str) and value.strip()
    ]
    skipped_count = sum(
        isinstance(value, list | dict) and bool(value) for value in other_arguments.values()
    )
    if skipped_count:
        conversation.left_out[f"arguments of {tool_name}"] += skipped_count
    return _MessagePiece(
        _TOOL_OR_FILE,
        "\n".join([format_placeholder(noun, subject_text), *texts]),
        former,
        bool(texts),
    )


def _format_tool_argument_as_markdown(
    argument_name: str, argument_text: str, all_arguments: Mapping[str, Any]
) -> str:
    """Render an argument of a tool call as text. Code is rendered as a fenced block."""
    language = get_by_path(all_arguments, str, "language")
    kind = get_by_path(all_arguments, str, "type")
    if argument_name in ("code", "command"):
        return format_code_block(
            argument_text, language or ("bash" if argument_name == "command" else "javascript")
        )
    if language or (kind and kind not in ("text/markdown", "text/plain")):
        return format_code_block(argument_text, language)
    names = (
        get_by_path(all_arguments, str, name)
        for name in ("path", "file_path", "filename", "file_name")
    )
    extension = Path(next(filter(None, names), "")).suffix[1:]
    return (
        argument_text
        if extension in ("", "md", "txt")
        else format_code_block(argument_text, shorten_line(extension, 10))
    )


# -- other contents of an export


def build_claude_design_conversation(chat: Mapping[str, Any]) -> Conversation:
    """Build a conversation from a Claude Design chat.

    In a Claude Design chat, the content of each message is nested in another object.
    """
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
    return build_claude_conversation(
        {
            **chat,
            "name": get_by_path(chat, str, "project", "name") or get_by_path(chat, str, "title"),
            "chat_messages": messages,
        }
    )


def is_claude_design_chat(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a Claude Design chat."""
    return "uuid" in value and any(
        get_by_path(get_by_path(message, dict), dict, "content")
        for message in get_by_path(value, list, "messages")
    )


def iter_claude_memories(memories_export: Mapping[str, Any]) -> Iterator[SavedText]:
    """Yield Claude's memories of the user and of the user's projects, one per paragraph.

    If there is a heading above a paragraph, the memory's text starts with this heading, followed by
    the paragraph.
    """
    texts = [
        get_by_path(memories_export, str, "conversations_memory"),
        *get_by_path(memories_export, dict, "project_memories").values(),
        *(
            get_by_path(file, str, "content")
            for file in get_by_path(memories_export, list, "memory_files")
        ),
    ]
    for text in texts:
        heading = ""
        for paragraph in re.split(r"\n\s*\n", text if isinstance(text, str) else ""):
            paragraph = replace_surrogates(paragraph.strip())
            if _HEADING.fullmatch(paragraph):
                heading = paragraph.strip("#* ")
            elif paragraph:
                memory = f"{heading}: {paragraph}" if heading else paragraph
                yield SavedText(None, f"claude-{derive_id(memory)}", memory)


def iter_project_documents(project_export: Mapping[str, Any]) -> Iterator[SavedText]:
    """Yield the instructions, the description and each document of a project as separate texts."""
    project = get_by_path(project_export, str, "uuid") or derive_id(
        "project", project_export.get("name")
    )
    fields = {"project": get_by_path(project_export, str, "name")}
    for field in ("description", "prompt_template"):
        if (text := get_by_path(project_export, str, field)).strip():
            title = "instructions" if field == "prompt_template" else field
            yield SavedText(project, title, text, {**fields, "title": title})
    for document in get_by_path(project_export, list, "docs"):
        title, text = get_by_path(document, str, "filename"), get_by_path(document, str, "content")
        if text.strip():
            key = get_by_path(document, str, "uuid") or derive_id(title)
            yield SavedText(project, key, text, {**fields, "title": title})


def is_memories(value: Mapping[str, Any]) -> bool:
    """Return whether an object contains Claude's memories of the user."""
    return bool(value.keys() & {"conversations_memory", "project_memories"})


def is_project(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a Claude project with its documents."""
    return isinstance(value.get("docs"), list) and {"uuid", "name"} <= value.keys()


def list_zip_files_in_download_links(export_object: Mapping[str, Any]) -> list[str]:
    """Return the names of the ZIP files in an export's list of download links.

    Return [] if the object is not a list of download links.
    """
    links = [
        file
        for file in get_by_path(export_object, list, "data_files")
        if get_by_path(file, str, "export_url")
    ]
    return [
        get_by_path(file, str, "filename") or get_by_path(file, str, "category") for file in links
    ]
