"""Read the conversations, trees of messages, in exports of Open WebUI and LibreChat."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from langchain_core.messages import BaseMessage

from perdure.cli.conversation import (
    Conversation,
    Odd,
    described,
    find,
    label,
    seconds,
    short,
    spoken,
    whole,
)

_ROLES: Final = ("user", "assistant", "system")
_DETAILS: Final = re.compile(r'<details type="(\w+)"[^>]*>.*?</details>\s*', re.DOTALL)
"""Thoughts and code of a model, which Open WebUI stores within the text of the answer."""
_ROOT: Final = "00000000-0000-0000-0000-000000000000"  # LibreChat: parent of a first message
_TIMES: Final = {"create_time": "createdAt", "update_time": "updatedAt"}


def is_open_webui(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a chat of Open WebUI, with or without its outer object."""
    return "history" in find(value, dict, "chat") or "messages" in find(value, dict, "history")


def read_open_webui(export: Mapping[str, Any]) -> Conversation:
    """Return a chat of Open WebUI with its branches."""
    chat = find(export, dict, "chat") or export
    history = find(chat, dict, "history")
    tree = find(history, dict, "messages")
    about = {**chat, **{k: v for k, v in export.items() if k not in ("chat", "history")}}
    about["created_at"] = about.get("created_at") or about.get("timestamp")
    models = [model for model in find(chat, list, "models") if isinstance(model, str)]
    about["model"] = models[0] if models else None
    names = {"title": "title", "model": "model"}
    names |= {"create_time": "created_at", "update_time": "updated_at"}
    talk = described(export.get("id") or chat.get("id"), about, names, sorted(tree))
    if not isinstance(history.get("messages"), dict):
        talk.problem("'history.messages' is not an object")
    parents: dict[str, str | None] = {}
    messages: dict[str, list[BaseMessage]] = {}
    for key, message in tree.items():
        key, talk.seen = whole(key), talk.seen + 1
        parents[key] = find(message, str, "parentId") or None
        try:
            messages[key] = _read_open_webui_message(key, message, talk)
        except Odd as exc:
            talk.problem(str(exc), key)
    talk.fill(parents, messages, find(history, str, "currentId"))
    return talk


def _read_open_webui_message(key: str, message: Any, talk: Conversation) -> list[BaseMessage]:
    role = _role_of(find(message, dict).get("role") if isinstance(message, dict) else None)
    text = message.get("content")
    if not isinstance(text, str):
        raise Odd("no content" if text is None else "content is not text")
    for kind in _DETAILS.findall(text):
        talk.left_out[kind] += 1
    names = [find(file, str, "name") or find(file, str, "file", "filename")
             for file in find(message, list, "files")]  # fmt: skip
    error = message.get("error")
    why = find(error, str, "content") if isinstance(error, dict) else ""
    lines = [*(label("file", name) for name in names if name), _DETAILS.sub("", text).strip()]
    lines += [label("error", why)] if why else []
    shown = "\n".join(line for line in lines if line)
    about: dict[str, Any] = {"create_time": seconds(message.get("timestamp"))}
    about |= {"model_name": find(message, str, "model")} if role == "assistant" else {}
    return [spoken(role, shown, key, **about)] if shown else []


def is_librechat(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a conversation of LibreChat, with its messages."""
    messages = find(value, list, "messages")
    return "conversationId" in value and any("messageId" in find(m, dict) for m in messages)


def read_librechat(export: Mapping[str, Any]) -> Conversation:
    """Return a conversation of LibreChat with its branches, whose messages may be nested."""
    flat = [*_flatten(export["messages"], None)]
    names = {"title": "title", "model": "model"} | _TIMES
    about = {**export, **find(export, dict, "options")} if "title" not in export else export
    talk = described(export.get("conversationId"), about, names, str(flat)[:10_000])
    parents: dict[str, str | None] = {}
    messages: dict[str, list[BaseMessage]] = {}
    for number, (message, above) in enumerate(flat):
        talk.seen += 1
        key = find(message, str, "messageId") or f"{talk.id}-{number}"
        given = find(message, dict).get("parentMessageId", above)
        parents[key] = whole(given) if isinstance(given, str) and given != _ROOT else None
        try:
            messages[key] = _read_librechat_message(key, message, talk)
        except Odd as exc:
            talk.problem(str(exc), key)
    times = {key: seconds(find(message, dict).get("createdAt")) or 0.0
             for key, (message, _) in zip(parents, flat, strict=False)}  # fmt: skip
    newest = max(times, key=lambda key: times[key], default="") if any(times.values()) else ""
    talk.fill(parents, messages, newest)
    return talk


def _flatten(messages: Any, above: str | None) -> Iterator[tuple[Any, str | None]]:
    """Yield messages and those nested in them, each with the id of the message that it follows."""
    waiting = [(message, above) for message in reversed(find({"m": messages}, list, "m"))]
    while waiting:
        message, above = waiting.pop()
        yield message, above
        key = find(message, str, "messageId")
        children = find(message, list, "children")
        waiting += [(child, key) for child in reversed(children)]


def _read_librechat_message(key: str, message: Any, talk: Conversation) -> list[BaseMessage]:
    if not isinstance(message, dict):
        raise Odd("the message is not an object")
    is_user = message.get("isCreatedByUser")
    role = "user" if is_user is True or message.get("sender") == "User" else "assistant"
    if not isinstance(is_user, bool) and not isinstance(message.get("sender"), str):
        raise Odd("no sender")
    lines = [label("file", find(f, str, "filename")) for f in find(message, list, "files")]
    parts = find(message, list, "content") or [{"type": "text", "text": message.get("text")}]
    for part in parts:
        kind, text = find(part, str, "type"), find(part, dict).get("text")
        text = find(text, str, "value") if isinstance(text, dict) else text
        if kind == "text" and isinstance(text, str):
            lines.append(text)
        elif kind in ("think", "tool_call", "agent_update"):
            talk.left_out[kind] += 1
        elif kind in ("image_file", "image_url", "error"):
            lines.append(label(kind.partition("_")[0], find(part, str, "error")))
        else:
            what = "no content" if kind == "text" else f"unknown content {short(kind, 40)!r}"
            talk.problem(what, key)
    shown = "\n".join(line for line in lines if line.strip())
    about: dict[str, Any] = {"create_time": seconds(message.get("createdAt"))}
    about |= {"model_name": find(message, str, "model")} if role == "assistant" else {}
    return [spoken(role, shown, key, **about)] if shown else []


def _role_of(role: Any) -> str:
    if role not in _ROLES:
        raise Odd(f"unknown role {short(str(role), 40)!r}")
    return str(role)
