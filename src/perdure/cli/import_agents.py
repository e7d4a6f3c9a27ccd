"""Read Claude Code and Codex sessions, which are stored as JSON Lines files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from langchain_core.messages import BaseMessage

from perdure.cli.conversation import (
    Conversation,
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

_CLAUDE_MESSAGE_TYPES: Final = ("user", "assistant")
_CLAUDE_TITLE_FIELDS: Final = ("customTitle", "aiTitle", "title")
_CODEX_LINE_TYPES: Final = (
    "session_meta",
    "response_item",
    "event_msg",
    "turn_context",
    "compacted",
)
_CODEX_ITEM_TYPES: Final = (
    *("message", "reasoning", "function_call", "function_call_output", "local_shell_call"),
    *("custom_tool_call", "custom_tool_call_output", "web_search_call", "ghost_snapshot"),
)
_PROGRAM_TEXT: Final = re.compile(
    r"\s*(<(command-|local-command|system-reminder|environment_context|user_instructions|"
    r"user_shell_command|turn_aborted|permissions)|Caveat: The messages below|# AGENTS\.md )"
)
"""Matches the beginning of a text that the user did not write, although Claude Code or Codex stored
it as a message of the user."""
_SYSTEM_REMINDER: Final = re.compile(r"<system-reminder>.*?</system-reminder>\s*", re.DOTALL)
# Names of the tool call arguments that can serve as a short description of the call. If a call has
# several of them, the first one in this order is used.
_SUBJECT_ARGUMENTS: Final = (
    "command",
    "cmd",
    "file_path",
    "path",
    "pattern",
    "query",
    "url",
    "description",
)
# Names of the tool call arguments that are imported in full
_TEXT_ARGUMENTS: Final = ("content", "new_string", "new_str", "prompt", "plan", "input", "patch")


class SessionsReader:
    """Collects the Claude Code and Codex sessions of one file.

    Args:
        file: The path of the file.
    """

    def __init__(self, file: str) -> None:
        self._stem = Path(file).stem
        self._sessions: dict[str, _Session] = {}
        # The Codex session that is being read. It is kept here because the lines of a Codex file do
        # not contain a session id.
        self._codex: _Session | None = None
        # Maps each message id to the title of the session that contains the message.
        self._summaries: dict[str, str] = {}

    def try_to_add_session_line(self, line: Mapping[str, Any]) -> bool:
        """Add a line that belongs to a session. Return False for any other line."""
        kind = line.get("type")
        if kind in _CODEX_LINE_TYPES and isinstance(line.get("payload"), dict):
            self._add_codex_line(str(kind), line["payload"], line.get("timestamp"))
        # In Codex's older format, an item's fields are at the top level of the line instead of in a
        # nested `payload`.
        elif _is_old_codex_header(line) or (self._codex is not None and "sessionId" not in line):
            is_item = kind in _CODEX_ITEM_TYPES or "record_type" in line
            if not (is_item or _is_old_codex_header(line)):
                return False
            kind = "response_item" if kind in _CODEX_ITEM_TYPES else "session_meta"
            self._add_codex_line(kind, line, line.get("timestamp"))
        elif _is_claude_line(line):
            self._add_claude_line(line)
        else:
            return False
        return True

    def build_conversations(self) -> list[Conversation]:
        """Build the conversations from all sessions."""
        for session in self._sessions.values():
            titles = [text for key, text in self._summaries.items() if key in session.parents]
            session.title = session.title or (titles[-1] if titles else "")
        non_empty_sessions = (
            session
            for session in self._sessions.values()
            if session.parents or session.source_count
        )
        return [session.build_conversation() for session in non_empty_sessions]

    def _get_or_create_session(self, raw_id: object) -> _Session:
        """Return the session with the id `raw_id`, or with the file's name if there is no id."""
        session_id = raw_id if isinstance(raw_id, str) and raw_id else self._stem
        return self._sessions.setdefault(session_id, _Session(session_id))

    def _add_claude_line(self, line: Mapping[str, Any]) -> None:
        """Add a line of a Claude Code file to the session that the line belongs to."""
        kind, message = get_by_path(line, str, "type"), get_by_path(line, dict, "message")
        # The session whose title a summary line contains is not necessarily the session to which
        # the file's other lines belong.
        if kind == "summary":
            self._summaries[get_by_path(line, str, "leafUuid")] = get_by_path(line, str, "summary")
            return
        session = self._get_or_create_session(line.get("sessionId"))
        if kind not in _CLAUDE_MESSAGE_TYPES or not message:
            if kind.endswith("title"):
                titles = (get_by_path(line, str, name) for name in _CLAUDE_TITLE_FIELDS)
                session.title = next(filter(None, titles), session.title)
            # A line without a message can be the parent of a line with a message.
            if get_by_path(line, str, "uuid"):
                session.parents[replace_surrogates(line["uuid"])] = _get_parent_id(line)
            return
        key = get_by_path(line, str, "uuid") or derive_id(session.id, len(session.parents))
        session.source_count += 1
        session.parents[key] = _get_parent_id(line)
        session.model = get_by_path(message, str, "model") or session.model
        created_at = parse_timestamp(line.get("timestamp"))
        if line.get("isSidechain") is True:
            session.count_left_out("sidechain")
            del session.parents[key]
        elif line.get("isMeta") is True or line.get("isCompactSummary") is True:
            session.count_left_out("meta" if line.get("isMeta") is True else "summary")
        else:
            session.last = key
            session.messages[key] = _convert_claude_code_message(
                session, key, kind, message, created_at
            )

    def _add_codex_line(self, kind: str, payload: Mapping[str, Any], time: Any) -> None:
        """Add a line of a Codex file, given its type, its content and its timestamp."""
        if kind == "session_meta":
            if self._codex is None or get_by_path(payload, str, "id"):
                self._codex = self._get_or_create_session(payload.get("id"))
            return
        session = self._codex = self._codex or self._get_or_create_session(None)
        if kind == "turn_context":
            session.model = get_by_path(payload, str, "model") or session.model
        # Import only lines of the type `response_item`, because the other types of lines repeat the
        # same content.
        if kind != "response_item":
            return
        session.source_count += 1
        created_at, item = parse_timestamp(time), get_by_path(payload, str, "type")
        key = derive_id(session.id, len(session.parents), item, payload.get("content"))
        text, is_document = _convert_codex_item_to_text_and_detect_document(session, item, payload)
        if not text.strip():
            return
        role = get_by_path(payload, str, "role") if item == "message" else "assistant"
        session.parents[key], session.last = session.last, key
        is_tool = item != "message"
        session.messages[key] = [
            build_imported_message(
                role,
                text,
                key,
                is_from_tool=is_tool,
                is_document=is_document,
                create_time=created_at,
            )
        ]


class _Session:
    """The data read so far for one session.

    Attributes:
        id: The id of the session.
        title: The title of the session, or "".
        model: The model of the session, or "".
        parents: For each line of the session that belongs to the tree, the id of its parent.
        messages: The messages of each line. Some lines have none.
        last: The id of the last line with messages.
        source_count: See `Conversation.source_count`.
        problems: For each malformed part that was skipped, the reason and the id of its line.
    """

    def __init__(self, id: str) -> None:
        self.id, self.title, self.model = id, "", ""
        self.parents: dict[str, str | None] = {}
        self.messages: dict[str, list[BaseMessage]] = {}
        self.last: str | None = None
        self.source_count = 0
        self._left_out: list[str] = []
        self.problems: list[tuple[str, str]] = []

    def count_left_out(self, kind: str) -> None:
        """Count a skipped part; see `Conversation.left_out`."""
        self._left_out.append(kind)

    def build_conversation(self) -> Conversation:
        """Build the conversation. A message without a parent in the file becomes a root message."""
        metadata = {"title": self.title, "model": self.model}
        conversation = build_conversation_without_messages(
            self.id, metadata, {name: name for name in metadata}
        )
        conversation.source_count = self.source_count
        conversation.left_out.update(self._left_out)
        for reason, key in self.problems:
            conversation.add_problem(reason, key)
        parents = {key: above if above in self.parents else None
                   for key, above in self.parents.items()}  # fmt: skip
        conversation.add_message_tree(parents, self.messages, self.last or "")
        return conversation


def _is_claude_line(line: Mapping[str, Any]) -> bool:
    """Return whether a line belongs to a Claude Code session."""
    if "sessionId" in line and "type" in line:
        return True
    is_message = line.get("type") in _CLAUDE_MESSAGE_TYPES and isinstance(line.get("message"), dict)
    return is_message or (line.get("type") == "summary" and "leafUuid" in line)


def _is_old_codex_header(line: Mapping[str, Any]) -> bool:
    """Return whether a line starts a Codex session in the format used before September 2025."""
    return {"id", "timestamp", "instructions"} <= line.keys() and "role" not in line


def _get_parent_id(line: Mapping[str, Any]) -> str | None:
    """Return the id of a Claude Code line's parent line, or None if the line has no parent."""
    parent_id = line.get("parentUuid") or line.get("logicalParentUuid")
    return replace_surrogates(parent_id) if isinstance(parent_id, str) else None


def _convert_claude_code_message(
    session: _Session,
    message_id: str,
    role: str,
    message: Mapping[str, Any],
    created_at: float | None,
) -> list[BaseMessage]:
    """Convert a line of a Claude Code file to at most two messages.

    The first message has the text. The second message has the tool calls and the names of files.
    """
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts, calls, is_document = list[str](), list[str](), False
    for block in get_by_path({"c": blocks}, list, "c"):
        kind, text = get_by_path(block, str, "type"), get_by_path(block, str, "text")
        if kind == "text":
            text = _SYSTEM_REMINDER.sub("", text)
            if role == "user" and _PROGRAM_TEXT.match(text):
                session.count_left_out("command")
            elif text.strip():
                texts.append(text)
        elif kind == "tool_use":
            call, has_document = _format_tool_call_and_detect_document(
                get_by_path(block, str, "name"), get_by_path(block, dict, "input")
            )
            calls.append(call)
            is_document = is_document or has_document
        elif kind in ("image", "document"):
            calls.append(format_placeholder(kind, get_by_path(block, str, "title")))
        elif kind in ("thinking", "redacted_thinking", "tool_result"):
            session.count_left_out(kind)
        else:
            session.problems.append((f"unknown content {shorten_line(kind, 40)!r}", message_id))
    metadata: dict[str, Any] = {
        "create_time": created_at,
        "model_name": get_by_path(message, str, "model"),
    }
    messages = (
        [build_imported_message(role, "\n\n".join(texts), message_id, **metadata)] if texts else []
    )
    if calls:
        id = f"{message_id}/1" if texts else message_id
        text = "\n\n".join(calls)
        messages.append(
            build_imported_message(
                role, text, id, is_from_tool=True, is_document=is_document, **metadata
            )
        )
    return messages


def _convert_codex_item_to_text_and_detect_document(
    session: _Session, item_type: str, payload: Mapping[str, Any]
) -> tuple[str, bool]:  # fmt: skip
    """Convert a Codex session item to text.

    Return the text and a flag that is True if the text includes a shell command or a document that
    was passed as a tool call argument.
    """
    if item_type == "message" and payload.get("role") in ("user", "assistant"):
        parts = get_by_path(payload, list, "content")
        texts = [get_by_path(part, str, "text") for part in parts]
        texts = [text for text in texts if text.strip()]
        own_texts = [text for text in texts if not _PROGRAM_TEXT.match(text)]
        for _ in range(len(texts) - len(own_texts)):
            session.count_left_out("context")
        pictures = [p for p in parts if get_by_path(p, str, "type") == "input_image"]
        return "\n\n".join([*(format_placeholder("image") for _ in pictures), *own_texts]), False
    if item_type in ("function_call", "custom_tool_call", "local_shell_call"):
        name = get_by_path(payload, str, "name") or "shell"
        arguments = payload.get("arguments") or payload.get("input") or payload.get("action")
        return _format_tool_call_and_detect_document(name, _parse_tool_arguments(arguments))
    session.count_left_out(
        item_type if item_type != "message" else get_by_path(payload, str, "role") or item_type
    )
    return "", False


def _parse_tool_arguments(arguments: Any) -> Mapping[str, Any]:
    """Convert tool call arguments to a dict.

    The arguments can be a dict, JSON text or plain text. Plain text is stored under the key
    "input".
    """
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = arguments
        return value if isinstance(value, dict) else {"input": arguments}
    return arguments if isinstance(arguments, dict) else {}


def _format_tool_call_and_detect_document(
    tool_name: str, arguments: Mapping[str, Any]
) -> tuple[str, bool]:
    """Return a tool call's text and whether the text includes a shell command or a document.

    Documents are the arguments whose names are in `_TEXT_ARGUMENTS`.
    """
    subjects = ((field, arguments[field]) for field in _SUBJECT_ARGUMENTS if arguments.get(field))
    field, subject = next(subjects, ("", ""))
    subject = " ".join(map(str, subject)) if isinstance(subject, list) else str(subject)
    texts = [get_by_path(arguments, str, name) for name in _TEXT_ARGUMENTS]
    texts = [text for text in texts if text.strip()]
    is_code = field in ("command", "cmd") and len(subject) > 0
    body = [format_code_block(subject, "bash")] if is_code else []
    heading = format_placeholder(
        tool_name or "tool", get_by_path(arguments, str, "description") if is_code else subject
    )
    return "\n".join([heading, *body, *texts]), bool(body or texts)
