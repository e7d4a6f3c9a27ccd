"""Conversations of ChatGPT: of an export, each a tree of messages, or of a shared link."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from perdure.cli.conversation import Conversation, Odd, described, fenced, seconds, short, spoken

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

_NAMES: Final = {
    **{name: name for name in ("title", "create_time", "update_time", "gizmo_id")},
    "model": "default_model_slug",
}
_SPOKEN: Final = ("text", "multimodal_text", "code")
_TOOL: Final = ("execution_output", "tether_quote", "system_error", "citable_code_output")
# what ChatGPT keeps for itself: reasoning, custom instructions, pages that it read
_SILENT: Final = (
    *("thoughts", "reasoning_recap", "user_editable_context", "model_editable_context"),
    *("tether_browsing_display", "tether_browsing_code", "sonic_webpage", "computer_output"),
    *("computer_initialize_state", "app_pairing_content", "super_widget"),
)
_SOUND: Final = re.compile(r"(audio|video).*_asset_pointer$")
# markup between private characters, and 【12†source】 of older models
_MARKUP: Final = re.compile("[ \t]?\ue200([^\ue200\ue201]*)\ue201|[\ue200-\ue2ff]")
_BRACKET: Final = re.compile("[ \t]?【(\\d+)(?::\\d+)?†[^】]*】")


def read(found: Mapping[str, Any]) -> Conversation:
    """A conversation; what is not as expected in it is left out and noted."""
    parts = _parts_of(found)
    name = found.get("conversation_id") or found.get("id")
    talk = described(name, found, _NAMES, sorted(parts))
    if not parts and found.get("mapping") != {}:
        talk.problem("'mapping' is missing or no object")
    said: dict[str, list[BaseMessage]] = {}
    times: dict[str, float] = {}
    for key, (_, message) in parts.items():
        if message is None:  # ChatGPT's own root
            continue
        try:
            made = _message(key, message, talk)
        except Odd as exc:
            talk.problem(str(exc), key)
            continue
        if made is not None:
            said[key] = [made]
            times[key] = made.response_metadata.get("create_time", 0.0)
    parents = {key: parent for key, (parent, _) in parts.items()}
    shown = found.get("current_node")
    if not isinstance(shown, str) or shown not in parents:
        inner = set(parents.values())
        leaves = [key for key in parents if key not in inner]
        shown = max(leaves, key=lambda key: times.get(key, 0.0), default=None)
    talk.fill(parents, said, shown)
    return talk


def _parts_of(found: Mapping[str, Any]) -> dict[str, tuple[str | None, Any]]:
    """The parts of the tree: each with the one that it follows, and its message."""
    mapping, line = found.get("mapping"), found.get("linear_conversation")
    parts: dict[str, tuple[str | None, Any]] = {}
    if isinstance(mapping, dict) and mapping:
        for key, node in mapping.items():
            node = node if isinstance(node, dict) else {"message": node}
            parent = node.get("parent")
            parts[key] = (parent if isinstance(parent, str) else None), node.get("message")
    elif isinstance(line, list):
        last = None
        for number, node in enumerate(line):
            node = node if isinstance(node, dict) else {"message": node}
            key = node["id"] if isinstance(node.get("id"), str) else f"message-{number}"
            parts[key] = last, node.get("message")
            last = key
    return parts


@dataclass(frozen=True, slots=True)
class _Part:
    """What a message of ChatGPT's consists of, as far as it is what it should be."""

    role: str
    tool: str  # the author's name, or whom the message is for
    kind: str
    content: Mapping[str, Any]
    meta: Mapping[str, Any]

    def text(self, *names: str) -> str:
        """The first text there is in the content by one of these names."""
        found = (self.content.get(name) for name in names)
        return next((each for each in found if isinstance(each, str) and each.strip()), "")

    @property
    def parts(self) -> list[Any]:
        """Its parts: texts, pictures, sound."""
        parts = self.content.get("parts")
        if parts is None:
            return [self.text("text", "result", "content")]
        if not isinstance(parts, list):
            raise Odd("'parts' is no list")
        return parts

    @property
    def plain(self) -> str:
        """All its text."""
        return "\n".join(part for part in self.parts if isinstance(part, str) and part)


def _message(key: str, found: Any, talk: Conversation) -> BaseMessage | None:
    """A message; None for what tells a reader nothing, which is counted."""
    part = _checked(found)
    hidden = part.meta.get("is_visually_hidden_from_conversation") is True
    silent = hidden or part.kind in _SILENT or found.get("channel") == "analysis"
    if part.role == "tool" or part.kind in _TOOL:
        text = "" if silent else _result(part)
    elif part.tool:
        text = "" if silent else _call(part)
    elif not silent and part.kind not in _SPOKEN:
        raise Odd(f"unknown content {short(part.kind, 40)!r}")
    else:
        text = "" if silent else _said(part)
    if not text.strip():
        if part.kind not in _SPOKEN or part.plain.strip():
            kind = part.kind if part.kind in _SILENT else "hidden" if silent else part.tool
            talk.left_out[kind or part.kind] += 1
        return None
    made = spoken(
        "assistant" if part.role == "tool" else part.role,
        _without_markup(text, part.meta),
        key,
        tool=part.role == "tool" or bool(part.tool) or part.kind in _TOOL,
        create_time=seconds(found.get("create_time")),
        model_name=_text(part.meta.get("model_slug")),
    )
    if part.tool.startswith("canmore.") and part.role != "tool":
        made.additional_kwargs["canvas"] = part.plain  # not shown, not remembered, and not lost
    return made


def _checked(found: Any) -> _Part:
    if not isinstance(found, dict):
        raise Odd("the message is no object")
    author, content, meta = (found.get(name) for name in ("author", "content", "metadata"))
    author = author if isinstance(author, dict) else {}
    role = author.get("role")
    if role not in ("user", "assistant", "system", "tool"):
        raise Odd(f"unknown role {short(str(role), 40)!r}")
    if not isinstance(content, dict):
        raise Odd("no content")
    kind, name, to = content.get("content_type"), author.get("name"), found.get("recipient")
    tool = to if role == "assistant" and to != "all" else name if role == "tool" else ""
    kind = kind if isinstance(kind, str) else "text"
    meta = meta if isinstance(meta, dict) else {}
    return _Part(role, _text(tool) or ("tool" if role == "tool" else ""), kind, content, meta)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


# -- what is shown of it


def _said(part: _Part) -> str:
    """What a user or the model said."""
    if part.kind == "code":
        language = part.text("language")
        code = part.plain
        return fenced(code, "" if language == "unknown" else language) if code.strip() else ""
    lines = [*_attached(part), *map(_shown, part.parts)]
    return "\n".join(line for line in lines if line)


def _attached(part: _Part) -> Iterator[str]:
    """The files that came with a message; pictures are among its parts too."""
    files = part.meta.get("attachments")
    for file in files if isinstance(files, list) else ():
        name = _text(file.get("name")) if isinstance(file, dict) else None
        if name and not str(file.get("mime_type", "")).startswith("image/"):
            yield f"[file: {short(name)}]"


def _shown(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    kind = str(part.get("content_type", "attachment"))
    if kind == "image_asset_pointer":
        of = part.get("metadata")
        made = of.get("dalle") if isinstance(of, dict) else None
        prompt = _text(made.get("prompt")) if isinstance(made, dict) else None
        return f"[image: {short(prompt)}]" if prompt else "[image]"
    if _SOUND.search(kind):  # what was said in it is another part
        return ""
    return _text(part.get("text")) or f"[{short(kind, 40)}]"


def _result(part: _Part) -> str:
    """What one of ChatGPT's own tools said, as far as it tells a reader something."""
    if part.kind == "execution_output":
        text = part.plain
        return f"[{part.tool}]\n{fenced(text)}" if text.strip() else ""
    if part.kind == "tether_quote":
        named = filter(None, (part.text("title", "domain"), part.text("url")))
        return f"[quote: {short(', '.join(named))}]"
    if part.kind == "system_error":
        return f"[error: {short(part.text('text', 'name'))}]"
    return "\n".join(_shown(each) for each in part.parts if isinstance(each, dict))


def _call(part: _Part) -> str:
    """What was asked of a tool, on a line; code with its lines."""
    asked = part.plain
    given = _json(asked)
    if part.tool.startswith("canmore."):
        name = _text(given.get("name"))
        what = "canvas" if "create" in part.tool else "canvas changed"
        return f"[{what}: {short(name)}]" if name else f"[{what}]"
    if part.tool == "python":
        return f"[python]\n{fenced(asked, 'python')}" if asked.strip() else ""
    for name in ("prompt", "q", "query", "queries"):
        value = given.get(name)
        asked = _text(", ".join(map(str, value)) if isinstance(value, list) else value) or asked
    if asked.lstrip()[:1] in "{[":  # nothing to read, or arguments that only the tool understands
        return ""
    noun = "memory" if part.tool == "bio" else part.tool
    noun = "image" if noun.startswith("dalle") or "prompt" in given else noun
    return f"[{short(noun, 40)}: {short(asked)}]"


def _json(text: str) -> dict[str, Any]:
    """The arguments of a call; of a search, the first thing that was looked for."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    found = found if isinstance(found, dict) else {}
    first = found.get("search_query")
    first = first[0] if isinstance(first, list) and first else None
    return first if isinstance(first, dict) else found


# -- citations and other markup


def _without_markup(text: str, meta: Mapping[str, Any]) -> str:
    """Text with the titles and addresses of its sources in the place of glyphs for them."""
    if "\ue200" in text or "【" in text:
        for source in _dicts(meta.get("content_references")):
            matched = _text(source.get("matched_text"))
            if matched and matched.strip() and ("\ue200" in matched or "【" in matched):
                text = text.replace(matched, _source(source))
    text = _MARKUP.sub(lambda found: _marked(found[1] or ""), text)
    cited = {
        str(extra.get("cited_message_idx")): of
        for of in (each.get("metadata") for each in _dicts(meta.get("citations")))
        if isinstance(of, dict) and isinstance(extra := of.get("extra"), dict)
    }
    return _BRACKET.sub(lambda found: _named(cited.get(found[1], {})), text)


def _source(source: Mapping[str, Any]) -> str:
    items = _dicts(source.get("items"))
    found = _named(items[0]) if items else _named(source)
    alt = _text(source.get("alt")) or ""
    return found or ("" if "\ue200" in alt or alt.startswith("![") else alt)


def _named(source: Mapping[str, Any]) -> str:
    parts = (_text(source.get("title")), _text(source.get("url")))
    known = ", ".join(part for part in parts if part)
    return f" ({known})" if known else ""


def _marked(inner: str) -> str:
    """What markup says by itself: the name of a thing, a link's title and address."""
    kind, *rest = inner.split("\ue202")
    if kind == "url":
        return f" {' '.join(rest)}"
    try:
        found = json.loads(rest[0]) if kind == "entity" and rest else []
    except (ValueError, RecursionError):
        found = []
    name = _text(found[1]) if isinstance(found, list) and len(found) > 1 else None
    return f" {name}" if name else ""


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
