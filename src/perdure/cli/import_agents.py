"""Read the sessions of the coding agents Claude Code and Codex, each a JSON Lines file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from langchain_core.messages import BaseMessage

from perdure.cli.conversation import (
    Conversation,
    derive_id,
    described,
    fenced,
    get_by_path,
    label,
    parse_timestamp,
    replace_surrogates,
    shorten_line,
    spoken,
)

_CLAUDE: Final = ("user", "assistant")
_TITLES: Final = ("customTitle", "aiTitle", "title")
_CODEX: Final = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
_CODEX_ITEMS: Final = (
    *("message", "reasoning", "function_call", "function_call_output", "local_shell_call"),
    *("custom_tool_call", "custom_tool_call_output", "web_search_call", "ghost_snapshot"),
)
_MACHINE: Final = re.compile(
    r"\s*(<(command-|local-command|system-reminder|environment_context|user_instructions|"
    r"user_shell_command|turn_aborted|permissions)|Caveat: The messages below|# AGENTS\.md )"
)
"""Texts that the programs store as messages of the user."""
_TAGGED: Final = re.compile(r"<system-reminder>.*?</system-reminder>\s*", re.DOTALL)
_ASKED: Final = ("command", "cmd", "file_path", "path", "pattern", "query", "url", "description")
_WRITTEN: Final = ("content", "new_string", "new_str", "prompt", "plan", "input", "patch")


class Sessions:
    """The sessions of one file.

    Args:
        file: The path of the file.
    """

    def __init__(self, file: str) -> None:
        self._stem = Path(file).stem
        self._sessions: dict[str, _Session] = {}
        self._codex: _Session | None = None  # lines of Codex do not name their session
        self._summaries: dict[str, str] = {}  # titles of sessions, by a message that is in them

    def takes(self, line: Mapping[str, Any]) -> bool:
        """Add a line if it belongs to a session. Return whether it does."""
        kind = line.get("type")
        if kind in _CODEX and isinstance(line.get("payload"), dict):
            self._add_codex(str(kind), line["payload"], line.get("timestamp"))
        elif _is_codex_beginning(line) or (self._codex is not None and "sessionId" not in line):
            is_item = kind in _CODEX_ITEMS or "record_type" in line
            if not (is_item or _is_codex_beginning(line)):
                return False
            kind = "response_item" if kind in _CODEX_ITEMS else "session_meta"
            self._add_codex(kind, line, line.get("timestamp"))
        elif _is_claude(line):
            self._add_claude(line)
        else:
            return False
        return True

    def talks(self) -> list[Conversation]:
        """The conversations of all sessions."""
        for session in self._sessions.values():
            titles = [text for key, text in self._summaries.items() if key in session.parents]
            session.title = session.title or (titles[-1] if titles else "")
        read = (each for each in self._sessions.values() if each.parents or each.seen)
        return [session.finish() for session in read]

    def _session(self, name: object) -> _Session:
        known = name if isinstance(name, str) and name else self._stem
        return self._sessions.setdefault(known, _Session(known))

    def _add_claude(self, line: Mapping[str, Any]) -> None:
        kind, message = get_by_path(line, str, "type"), get_by_path(line, dict, "message")
        if kind == "summary":  # the summary may be of another session
            self._summaries[get_by_path(line, str, "leafUuid")] = get_by_path(line, str, "summary")
            return
        session = self._session(line.get("sessionId"))
        if kind not in _CLAUDE or not message:
            if kind.endswith("title"):
                titles = (get_by_path(line, str, name) for name in _TITLES)
                session.title = next(filter(None, titles), session.title)
            if get_by_path(line, str, "uuid"):
                session.parents[replace_surrogates(line["uuid"])] = _parent_of(line)
            return
        key = get_by_path(line, str, "uuid") or derive_id(session.id, len(session.parents))
        session.seen += 1
        session.parents[key] = _parent_of(line)
        session.model = get_by_path(message, str, "model") or session.model
        at = parse_timestamp(line.get("timestamp"))
        if line.get("isSidechain") is True:
            session.left_out("sidechain")
            del session.parents[key]
        elif line.get("isMeta") is True or line.get("isCompactSummary") is True:
            session.left_out("meta" if line.get("isMeta") is True else "summary")
        else:
            session.last = key
            session.messages[key] = _read_claude(session, key, kind, message, at)

    def _add_codex(self, kind: str, payload: Mapping[str, Any], time: Any) -> None:
        if kind == "session_meta":
            if self._codex is None or get_by_path(payload, str, "id"):
                self._codex = self._session(payload.get("id"))
            return
        session = self._codex = self._codex or self._session(None)
        if kind == "turn_context":
            session.model = get_by_path(payload, str, "model") or session.model
        if kind != "response_item":  # events repeat the content of items
            return
        session.seen += 1
        at, item = parse_timestamp(time), get_by_path(payload, str, "type")
        key = derive_id(session.id, len(session.parents), item, payload.get("content"))
        text, is_document = _read_codex(session, item, payload)
        if not text.strip():
            return
        role = get_by_path(payload, str, "role") if item == "message" else "assistant"
        session.parents[key], session.last = session.last, key
        tool = item != "message"
        session.messages[key] = [
            spoken(role, text, key, tool=tool, document=is_document, create_time=at)
        ]


class _Session:
    """A session that is being read; see `Conversation`."""

    def __init__(self, id: str) -> None:
        self.id, self.title, self.model = id, "", ""
        self.parents: dict[str, str | None] = {}
        self.messages: dict[str, list[BaseMessage]] = {}
        self.last: str | None = None
        self.seen = 0
        self._left_out: list[str] = []
        self.problems: list[tuple[str, str]] = []

    def left_out(self, kind: str) -> None:
        self._left_out.append(kind)

    def finish(self) -> Conversation:
        about = {"title": self.title, "model": self.model}
        talk = described(self.id, about, {name: name for name in about})
        talk.seen = self.seen
        talk.left_out.update(self._left_out)
        for reason, key in self.problems:
            talk.problem(reason, key)
        parents = {key: above if above in self.parents else None
                   for key, above in self.parents.items()}  # fmt: skip
        talk.fill(parents, self.messages, self.last or "")
        return talk


def _is_claude(line: Mapping[str, Any]) -> bool:
    """Return whether a line is one of a session of Claude Code."""
    if "sessionId" in line and "type" in line:
        return True
    is_message = line.get("type") in _CLAUDE and isinstance(line.get("message"), dict)
    return is_message or (line.get("type") == "summary" and "leafUuid" in line)


def _is_codex_beginning(line: Mapping[str, Any]) -> bool:
    """Return whether a line is the first one of a session of Codex before September 2025."""
    return {"id", "timestamp", "instructions"} <= line.keys() and "role" not in line


def _parent_of(line: Mapping[str, Any]) -> str | None:
    above = line.get("parentUuid") or line.get("logicalParentUuid")
    return replace_surrogates(above) if isinstance(above, str) else None


def _read_claude(
    session: _Session, key: str, role: str, message: Mapping[str, Any], at: float | None
) -> list[BaseMessage]:
    """Return a line of Claude Code as messages: one for its text, others for calls of tools."""
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts, calls, is_document = list[str](), list[str](), False
    for block in get_by_path({"c": blocks}, list, "c"):
        kind, text = get_by_path(block, str, "type"), get_by_path(block, str, "text")
        if kind == "text":
            text = _TAGGED.sub("", text)
            if role == "user" and _MACHINE.match(text):
                session.left_out("command")
            elif text.strip():
                texts.append(text)
        elif kind == "tool_use":
            call, has_text = _show_call(
                get_by_path(block, str, "name"), get_by_path(block, dict, "input")
            )
            calls.append(call)
            is_document = is_document or has_text
        elif kind in ("image", "document"):
            calls.append(label(kind, get_by_path(block, str, "title")))
        elif kind in ("thinking", "redacted_thinking", "tool_result"):
            session.left_out(kind)
        else:
            session.problems.append((f"unknown content {shorten_line(kind, 40)!r}", key))
    about: dict[str, Any] = {"create_time": at, "model_name": get_by_path(message, str, "model")}
    said = [spoken(role, "\n\n".join(texts), key, **about)] if texts else []
    if calls:
        id = f"{key}/1" if texts else key
        text = "\n\n".join(calls)
        said.append(spoken(role, text, id, tool=True, document=is_document, **about))
    return said


def _read_codex(
    session: _Session, item: str, payload: Mapping[str, Any]
) -> tuple[str, bool]:  # fmt: skip
    """Return the text of an item of Codex, and whether it is a document that a tool was given."""
    if item == "message" and payload.get("role") in ("user", "assistant"):
        parts = get_by_path(payload, list, "content")
        texts = [get_by_path(part, str, "text") for part in parts]
        texts = [text for text in texts if text.strip()]
        kept = [text for text in texts if not _MACHINE.match(text)]
        for _ in range(len(texts) - len(kept)):
            session.left_out("context")
        pictures = [p for p in parts if get_by_path(p, str, "type") == "input_image"]
        return "\n\n".join([*(label("image") for _ in pictures), *kept]), False
    if item in ("function_call", "custom_tool_call", "local_shell_call"):
        name = get_by_path(payload, str, "name") or "shell"
        given = payload.get("arguments") or payload.get("input") or payload.get("action")
        return _show_call(name, _arguments(given))
    session.left_out(item if item != "message" else get_by_path(payload, str, "role") or item)
    return "", False


def _arguments(given: Any) -> Mapping[str, Any]:
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            value = given
        return value if isinstance(value, dict) else {"input": given}
    return given if isinstance(given, dict) else {}


def _show_call(name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """Return a call of a tool as text, and whether its arguments contain a document."""
    subjects = ((field, arguments[field]) for field in _ASKED if arguments.get(field))
    field, subject = next(subjects, ("", ""))
    subject = " ".join(map(str, subject)) if isinstance(subject, list) else str(subject)
    texts = [get_by_path(arguments, str, name) for name in _WRITTEN]
    texts = [text for text in texts if text.strip()]
    is_code = field in ("command", "cmd") and len(subject) > 0
    body = [fenced(subject, "bash")] if is_code else []
    head = label(name or "tool", get_by_path(arguments, str, "description") if is_code else subject)
    return "\n".join([head, *body, *texts]), bool(body or texts)
