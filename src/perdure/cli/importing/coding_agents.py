"""Read Claude Code and Codex sessions, which are stored as JSON Lines files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from langchain_core.messages import BaseMessage

from perdure.cli.importing.conversation import (
    Conversation,
    build_conversation_without_messages,
    build_imported_message,
    derive_id,
    format_code_block,
    format_placeholder,
    get_by_path,
    parse_json_or_none,
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
# Names of the tool call arguments whose values are imported without being shortened.
_TEXT_ARGUMENTS: Final = ("content", "new_string", "new_str", "prompt", "plan", "input", "patch")


class SessionsReader:
    """Collects the Claude Code and Codex sessions that one file contains.

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
        elif _is_line_of_claude_code_session(line):
            self._add_claude_code_line(line)
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
            if session.parents or session.conversation.source_count
        )
        return [session.finish_conversation() for session in non_empty_sessions]

    def _get_or_create_session(self, raw_id: object) -> _Session:
        """Return the session with the id `raw_id`, and create the session if it does not exist.

        If `raw_id` is not a nonempty string, the file's name without its extension is used as the
        session id.
        """
        session_id = raw_id if isinstance(raw_id, str) and raw_id else self._stem
        return self._sessions.setdefault(session_id, _Session(session_id))

    def _add_claude_code_line(self, line: Mapping[str, Any]) -> None:
        """Add one line of a Claude Code transcript to the session with the line's session id."""
        kind, message = get_by_path(line, str, "type"), get_by_path(line, dict, "message")
        # A `summary` line contains the title of a session. This session can differ from the session
        # to which the other lines of the file belong.
        if kind == "summary":
            self._summaries[get_by_path(line, str, "leafUuid")] = get_by_path(line, str, "summary")
            return
        session = self._get_or_create_session(line.get("sessionId"))
        if kind not in _CLAUDE_MESSAGE_TYPES or not message:
            if kind.endswith("title"):
                titles = (get_by_path(line, str, name) for name in _CLAUDE_TITLE_FIELDS)
                session.title = next(filter(None, titles), session.title)
            # Record the line's parent even if the line contains no message, because another line
            # with a message can refer to this line as its parent.
            if get_by_path(line, str, "uuid"):
                session.parents[replace_surrogates(line["uuid"])] = _get_parent_id(line)
            return
        key = get_by_path(line, str, "uuid") or derive_id(session.id, len(session.parents))
        session.conversation.source_count += 1
        session.parents[key] = _get_parent_id(line)
        session.model = get_by_path(message, str, "model") or session.model
        created_at = parse_timestamp(line.get("timestamp"))
        if line.get("isSidechain") is True:
            session.conversation.left_out["sidechain"] += 1
            del session.parents[key]
        elif line.get("isMeta") is True or line.get("isCompactSummary") is True:
            session.conversation.left_out["meta" if line.get("isMeta") is True else "summary"] += 1
        else:
            session.last = key
            session.messages[key] = _convert_claude_code_message(
                session.conversation, key, kind, message, created_at
            )

    def _add_codex_line(self, kind: str, payload: Mapping[str, Any], time: Any) -> None:
        """Add one line of a Codex transcript file to the current coding session.

        The argument `kind` is the line's type, `payload` is the line's content, and `time` is the
        line's timestamp.
        """
        if kind == "session_meta":
            if self._codex is None or get_by_path(payload, str, "id"):
                self._codex = self._get_or_create_session(payload.get("id"))
            return
        session = self._codex = self._codex or self._get_or_create_session(None)
        if kind == "turn_context":
            session.model = get_by_path(payload, str, "model") or session.model
        # Do not import messages from lines of types other than `response_item`, because these lines
        # repeat the content of `response_item` lines.
        if kind != "response_item":
            return
        session.conversation.source_count += 1
        created_at, item = parse_timestamp(time), get_by_path(payload, str, "type")
        key = derive_id(session.id, len(session.parents), item, payload.get("content"))
        text, is_document = _convert_codex_item_to_text_and_detect_document(
            session.conversation, item, payload
        )
        if not text.strip():
            return
        role = get_by_path(payload, str, "role") if item == "message" else "assistant"
        session.parents[key], session.last = session.last, key
        session.messages[key] = [
            build_imported_message(
                role,
                text,
                key,
                is_from_tool=item != "message",
                is_document=is_document,
                create_time=created_at,
            )
        ]


class _Session:
    """The data read so far for one session.

    Attributes:
        id: The id of the session.
        conversation: The conversation of the session. Messages and metadata are added to it by
            `finish_conversation`.
        title: The title of the session, or "".
        model: The model of the session, or "".
        parents: For each line of the session that belongs to the tree, the id of its parent.
        messages: The messages of each line. Some lines have none.
        last: The id of the last line with messages.
    """

    def __init__(self, id: str) -> None:
        self.id, self.title, self.model = id, "", ""
        self.conversation = build_conversation_without_messages(id, {}, {})
        self.parents: dict[str, str | None] = {}
        self.messages: dict[str, list[BaseMessage]] = {}
        self.last: str | None = None

    def finish_conversation(self) -> Conversation:
        """Add the messages and the metadata to the conversation, and return the conversation.

        A message without a parent in the file becomes a root message.
        """
        metadata = {"title": self.title, "model": self.model}
        self.conversation.metadata = {name: text for name, text in metadata.items() if text.strip()}
        parents = {key: above if above in self.parents else None
                   for key, above in self.parents.items()}  # fmt: skip
        self.conversation.add_message_tree(parents, self.messages, self.last or "")
        return self.conversation


def _is_line_of_claude_code_session(line: Mapping[str, Any]) -> bool:
    """Return whether a line belongs to a Claude Code session."""
    if "sessionId" in line and "type" in line:
        return True
    is_message = line.get("type") in _CLAUDE_MESSAGE_TYPES and isinstance(line.get("message"), dict)
    return is_message or (line.get("type") == "summary" and "leafUuid" in line)


def _is_old_codex_header(line: Mapping[str, Any]) -> bool:
    """Return whether a line starts a Codex session in the format used before September 2025."""
    return {"id", "timestamp", "instructions"} <= line.keys() and "role" not in line


def _get_parent_id(line: Mapping[str, Any]) -> str | None:
    """Return the parent id in a line of a Claude Code transcript, or None if there is none."""
    parent_id = line.get("parentUuid") or line.get("logicalParentUuid")
    return replace_surrogates(parent_id) if isinstance(parent_id, str) else None


def _convert_claude_code_message(
    conversation: Conversation,
    message_id: str,
    role: str,
    message: Mapping[str, Any],
    created_at: float | None,
) -> list[BaseMessage]:
    """Convert a line of a Claude Code file to at most two messages.

    The text of the line becomes one message, and the line's tool calls and file names become a
    second message.
    """
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts, calls, is_document = list[str](), list[str](), False
    for block in get_by_path({"c": blocks}, list, "c"):
        kind, text = get_by_path(block, str, "type"), get_by_path(block, str, "text")
        if kind == "text":
            text = _SYSTEM_REMINDER.sub("", text)
            if role == "user" and _PROGRAM_TEXT.match(text):
                conversation.left_out["command"] += 1
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
            conversation.left_out[kind] += 1
        else:
            conversation.add_problem(f"unknown content {shorten_line(kind, 40)!r}", message_id)
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
    conversation: Conversation, item_type: str, payload: Mapping[str, Any]
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
        conversation.left_out += Counter({"context": len(texts) - len(own_texts)})
        pictures = [p for p in parts if get_by_path(p, str, "type") == "input_image"]
        return "\n\n".join([*(format_placeholder("image") for _ in pictures), *own_texts]), False
    if item_type in ("function_call", "custom_tool_call", "local_shell_call"):
        name = get_by_path(payload, str, "name") or "shell"
        arguments = payload.get("arguments") or payload.get("input") or payload.get("action")
        return _format_tool_call_and_detect_document(name, _parse_tool_arguments(arguments))
    role = get_by_path(payload, str, "role") if item_type == "message" else ""
    conversation.left_out[role or item_type] += 1
    return "", False


def _parse_tool_arguments(arguments: Any) -> Mapping[str, Any]:
    """Convert tool call arguments to a dict.

    The arguments can be a dict, JSON text or plain text. If the arguments are plain text, the
    returned dict contains the text under the key "input".
    """
    if isinstance(arguments, str):
        value = parse_json_or_none(arguments)
        return value if isinstance(value, dict) else {"input": arguments}
    return arguments if isinstance(arguments, dict) else {}


def _format_tool_call_and_detect_document(
    tool_name: str, arguments: Mapping[str, Any]
) -> tuple[str, bool]:
    """Return a tool call's text, and whether the text includes a shell command or a document.

    An argument counts as a document if its name is in `_TEXT_ARGUMENTS`.
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
