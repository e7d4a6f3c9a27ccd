"""Read the conversations, trees of messages, in exports of Open WebUI and LibreChat."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from langchain_core.messages import BaseMessage

from perdure.cli.conversation import (
    Conversation,
    MalformedPart,
    described,
    get_by_path,
    label,
    parse_timestamp,
    replace_surrogates,
    shorten_line,
    spoken,
)

_ROLES: Final = ("user", "assistant", "system")
_DETAILS: Final = re.compile(r'<details type="(\w+)"[^>]*>.*?</details>\s*', re.DOTALL)
"""Thoughts and code of a model, which Open WebUI stores within the text of the answer."""
_ROOT: Final = "00000000-0000-0000-0000-000000000000"  # LibreChat: parent of a first message
_TIMES: Final = {"create_time": "createdAt", "update_time": "updatedAt"}


def is_open_webui(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a chat of Open WebUI, with or without its outer object."""
    return "history" in get_by_path(value, dict, "chat") or "messages" in get_by_path(
        value, dict, "history"
    )


def read_open_webui(export: Mapping[str, Any]) -> Conversation:
    """Return a chat of Open WebUI with its branches."""
    chat = get_by_path(export, dict, "chat") or export
    history = get_by_path(chat, dict, "history")
    tree = get_by_path(history, dict, "messages")
    about = {**chat, **{k: v for k, v in export.items() if k not in ("chat", "history")}}
    about["created_at"] = about.get("created_at") or about.get("timestamp")
    models = [model for model in get_by_path(chat, list, "models") if isinstance(model, str)]
    about["model"] = models[0] if models else None
    names = {"title": "title", "model": "model"}
    names |= {"create_time": "created_at", "update_time": "updated_at"}
    talk = described(export.get("id") or chat.get("id"), about, names, sorted(tree))
    if not isinstance(history.get("messages"), dict):
        talk.problem("'history.messages' is not an object")
    parents: dict[str, str | None] = {}
    messages: dict[str, list[BaseMessage]] = {}
    for key, message in tree.items():
        key, talk.seen = replace_surrogates(key), talk.seen + 1
        parents[key] = get_by_path(message, str, "parentId") or None
        try:
            messages[key] = _read_open_webui_message(key, message, talk)
        except MalformedPart as exc:
            talk.problem(str(exc), key)
    talk.fill(parents, messages, get_by_path(history, str, "currentId"))
    return talk


def _read_open_webui_message(key: str, message: Any, talk: Conversation) -> list[BaseMessage]:
    role = _role_of(get_by_path(message, dict).get("role") if isinstance(message, dict) else None)
    text = message.get("content")
    if not isinstance(text, str):
        raise MalformedPart("no content" if text is None else "content is not text")
    for kind in _DETAILS.findall(text):
        talk.left_out[kind] += 1
    names = [get_by_path(file, str, "name") or get_by_path(file, str, "file", "filename")
             for file in get_by_path(message, list, "files")]  # fmt: skip
    error = message.get("error")
    why = get_by_path(error, str, "content") if isinstance(error, dict) else ""
    lines = [*(label("file", name) for name in names if name), _DETAILS.sub("", text).strip()]
    lines += [label("error", why)] if why else []
    shown = "\n".join(line for line in lines if line)
    about: dict[str, Any] = {"create_time": parse_timestamp(message.get("timestamp"))}
    about |= {"model_name": get_by_path(message, str, "model")} if role == "assistant" else {}
    return [spoken(role, shown, key, **about)] if shown else []


def is_librechat(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a conversation of LibreChat, with its messages."""
    messages = get_by_path(value, list, "messages")
    return "conversationId" in value and any("messageId" in get_by_path(m, dict) for m in messages)


def read_librechat(export: Mapping[str, Any]) -> Conversation:
    """Return a conversation of LibreChat with its branches, whose messages may be nested."""
    flat = [*_flatten(export["messages"], None)]
    names = {"title": "title", "model": "model"} | _TIMES
    about = {**export, **get_by_path(export, dict, "options")} if "title" not in export else export
    talk = described(export.get("conversationId"), about, names, str(flat)[:10_000])
    parents: dict[str, str | None] = {}
    messages: dict[str, list[BaseMessage]] = {}
    for number, (message, above) in enumerate(flat):
        talk.seen += 1
        key = get_by_path(message, str, "messageId") or f"{talk.id}-{number}"
        given = get_by_path(message, dict).get("parentMessageId", above)
        parents[key] = (
            replace_surrogates(given) if isinstance(given, str) and given != _ROOT else None
        )
        try:
            messages[key] = _read_librechat_message(key, message, talk)
        except MalformedPart as exc:
            talk.problem(str(exc), key)
    times = {key: parse_timestamp(get_by_path(message, dict).get("createdAt")) or 0.0
             for key, (message, _) in zip(parents, flat, strict=False)}  # fmt: skip
    newest = max(times, key=lambda key: times[key], default="") if any(times.values()) else ""
    talk.fill(parents, messages, newest)
    return talk


def _flatten(messages: Any, above: str | None) -> Iterator[tuple[Any, str | None]]:
    """Yield messages and those nested in them, each with the id of the message that it follows."""
    waiting = [(message, above) for message in reversed(get_by_path({"m": messages}, list, "m"))]
    while waiting:
        message, above = waiting.pop()
        yield message, above
        key = get_by_path(message, str, "messageId")
        children = get_by_path(message, list, "children")
        waiting += [(child, key) for child in reversed(children)]


def _read_librechat_message(key: str, message: Any, talk: Conversation) -> list[BaseMessage]:
    if not isinstance(message, dict):
        raise MalformedPart("the message is not an object")
    is_user = message.get("isCreatedByUser")
    role = "user" if is_user is True or message.get("sender") == "User" else "assistant"
    if not isinstance(is_user, bool) and not isinstance(message.get("sender"), str):
        raise MalformedPart("no sender")
    lines = [
        label("file", get_by_path(f, str, "filename")) for f in get_by_path(message, list, "files")
    ]
    parts = get_by_path(message, list, "content") or [{"type": "text", "text": message.get("text")}]
    for part in parts:
        kind, text = get_by_path(part, str, "type"), get_by_path(part, dict).get("text")
        text = get_by_path(text, str, "value") if isinstance(text, dict) else text
        if kind == "text" and isinstance(text, str):
            lines.append(text)
        elif kind in ("think", "tool_call", "agent_update"):
            talk.left_out[kind] += 1
        elif kind in ("image_file", "image_url", "error"):
            lines.append(label(kind.partition("_")[0], get_by_path(part, str, "error")))
        else:
            what = "no content" if kind == "text" else f"unknown content {shorten_line(kind, 40)!r}"
            talk.problem(what, key)
    shown = "\n".join(line for line in lines if line.strip())
    about: dict[str, Any] = {"create_time": parse_timestamp(message.get("createdAt"))}
    about |= {"model_name": get_by_path(message, str, "model")} if role == "assistant" else {}
    return [spoken(role, shown, key, **about)] if shown else []


def _role_of(role: Any) -> str:
    if role not in _ROLES:
        raise MalformedPart(f"unknown role {shorten_line(str(role), 40)!r}")
    return str(role)
