"""Conversations of ChatGPT: of an export, each a tree of messages, or of a shared link."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perdure.cli.conversation import (
    Conversation,
    Odd,
    described,
    dict_of,
    fenced,
    list_of,
    seconds,
    short,
    spoken,
    text_of,
)

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
    name = text_of(found.get("conversation_id")) or found.get("id")
    talk = described(name, found, _NAMES, sorted(parts))
    if not parts and found.get("mapping") != {}:
        talk.problem("'mapping' is missing or no object")
    said: dict[str, list[BaseMessage]] = {}
    for key, (_, message) in parts.items():
        try:
            made = None if message is None else _message(key, message, talk)  # None: the root
        except Odd as exc:
            talk.problem(str(exc), key)
            continue
        if made is not None:
            said[key] = [made]
    parents = {key: parent for key, (parent, _) in parts.items()}
    shown = found.get("current_node")
    if not isinstance(shown, str) or shown not in parents:
        leaves = parents.keys() - parents.values()
        ends = [key for key in parents if key in leaves]
        times = {key: said[key][0].response_metadata.get("create_time", 0) for key in said}
        shown = max(ends, key=lambda key: times.get(key, 0), default=None)
    talk.fill(parents, said, shown)
    return talk


def _parts_of(found: Mapping[str, Any]) -> dict[str, tuple[str | None, Any]]:
    """The parts of the tree: each with the one that it follows, and its message."""
    parts: dict[str, tuple[str | None, Any]] = {}
    for key, node in dict_of(found.get("mapping")).items():
        node = node if isinstance(node, dict) else {"message": node}
        parent = node.get("parent")
        parts[key] = parent if isinstance(parent, str) else None, node.get("message")
    last = None
    for number, node in enumerate(() if parts else list_of(found.get("linear_conversation"))):
        node = node if isinstance(node, dict) else {"message": node}
        key = text_of(node.get("id")) or f"message-{number}"
        parts[key] = last, node.get("message")
        last = key
    return parts


class _Part(NamedTuple):
    """What a message of ChatGPT's consists of, as far as it is what it should be."""

    role: str
    tool: str  # the author's name, or whom the message is for
    kind: str
    content: Mapping[str, Any]
    meta: Mapping[str, Any]

    def text(self, *names: str) -> str:
        """The first text there is in the content by one of these names."""
        found = (text_of(self.content.get(name)) for name in names)
        return next((each for each in found if each.strip()), "")

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
    by_tool = part.role == "tool" or part.kind in _TOOL
    if not (silent or by_tool or part.tool or part.kind in _SPOKEN):
        raise Odd(f"unknown content {short(part.kind, 40)!r}")
    show = _result if by_tool else _call if part.tool else _said
    text = "" if silent else show(part)
    if not text.strip():
        if part.kind not in _SPOKEN or part.plain.strip():
            kind = part.kind if part.kind in _SILENT else "hidden" if silent else part.tool
            talk.left_out[kind or part.kind] += 1
        return None
    made = spoken(
        "assistant" if part.role == "tool" else part.role,
        _without_markup(text, part.meta),
        key,
        tool=by_tool or bool(part.tool),
        create_time=seconds(found.get("create_time")),
        model_name=text_of(part.meta.get("model_slug")),
    )
    if part.tool.startswith("canmore.") and part.role != "tool":
        made.additional_kwargs["canvas"] = part.plain  # not shown, not remembered, and not lost
    return made


def _checked(found: Any) -> _Part:
    if not isinstance(found, dict):
        raise Odd("the message is no object")
    author, content = dict_of(found.get("author")), found.get("content")
    role, to = author.get("role"), text_of(found.get("recipient"))
    if role not in ("user", "assistant", "system", "tool"):
        raise Odd(f"unknown role {short(role, 40)!r}")
    if not isinstance(content, dict):
        raise Odd("no content")
    called = to if role == "assistant" and to != "all" else ""
    tool = text_of(author.get("name")) or "tool" if role == "tool" else called
    kind = content.get("content_type")
    kind = kind if isinstance(kind, str) else "text"
    return _Part(role, tool, kind, content, dict_of(found.get("metadata")))


# -- what is shown of it


def _said(part: _Part) -> str:
    """What a user or the model said, below the files that came with it."""
    if part.kind == "code":
        language, code = part.text("language"), part.plain
        return fenced(code, "" if language == "unknown" else language) if code.strip() else ""
    files = [dict_of(file) for file in list_of(part.meta.get("attachments"))]
    names = (  # pictures are among its parts too
        text_of(file.get("name"))
        for file in files
        if not str(file.get("mime_type", "")).startswith("image/")
    )
    lines = [*(f"[file: {short(name)}]" for name in names if name), *map(_shown, part.parts)]
    return "\n".join(line for line in lines if line)


def _shown(part: Any) -> str:
    if not isinstance(part, dict):
        return text_of(part)
    kind = str(part.get("content_type", "attachment"))
    if kind == "image_asset_pointer":
        prompt = text_of(dict_of(dict_of(part.get("metadata")).get("dalle")).get("prompt"))
        return f"[image: {short(prompt)}]" if prompt else "[image]"
    if _SOUND.search(kind):  # what was said in it is another part
        return ""
    return text_of(part.get("text")) or f"[{short(kind, 40)}]"


def _result(part: _Part) -> str:
    """What one of ChatGPT's own tools said, as far as it tells a reader something."""
    if part.kind == "execution_output":
        return f"[{part.tool}]\n{fenced(part.plain)}" if part.plain.strip() else ""
    if part.kind == "tether_quote":
        named = filter(None, (part.text("title", "domain"), part.text("url")))
        return f"[quote: {short(', '.join(named))}]"
    if part.kind == "system_error":
        return f"[error: {short(part.text('text', 'name'))}]"
    return "\n".join(_shown(each) for each in part.parts if isinstance(each, dict))


def _call(part: _Part) -> str:
    """What was asked of a tool, on a line; code with its lines."""
    asked, given = part.plain, dict_of(_json(part.plain))
    if part.tool.startswith("canmore."):
        name = text_of(given.get("name"))
        what = "canvas" if "create" in part.tool else "canvas changed"
        return f"[{what}: {short(name)}]" if name else f"[{what}]"
    if part.tool == "python":
        return f"[python]\n{fenced(asked, 'python')}" if asked.strip() else ""
    first = list_of(given.get("search_query"))[:1]  # what was looked for, of several things
    given = first[0] if first and isinstance(first[0], dict) else given
    for name in ("prompt", "q", "query", "queries"):
        value = given.get(name)
        asked = ", ".join(map(str, list_of(value))) or text_of(value) or asked
    if asked.lstrip()[:1] in "{[":  # nothing to read, or arguments that only the tool understands
        return ""
    noun = "memory" if part.tool == "bio" else part.tool
    noun = "image" if noun.startswith("dalle") or "prompt" in given else noun
    return f"[{short(noun, 40)}: {short(asked)}]"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# -- citations and other markup


def _without_markup(text: str, meta: Mapping[str, Any]) -> str:
    """Text with the titles and addresses of its sources in the place of glyphs for them."""
    for source in map(dict_of, list_of(meta.get("content_references"))):
        matched = text_of(source.get("matched_text"))
        if "\ue200" in matched or "【" in matched:
            text = text.replace(matched, _source(source))
    text = _MARKUP.sub(lambda found: _marked(found[1] or ""), text)
    cited: dict[str, dict[str, Any]] = {}
    for each in map(dict_of, list_of(meta.get("citations"))):
        of = dict_of(each.get("metadata"))
        cited[str(dict_of(of.get("extra")).get("cited_message_idx"))] = of
    return _BRACKET.sub(lambda found: _named(cited.get(found[1], {})), text)


def _source(source: Mapping[str, Any]) -> str:
    items = [item for item in list_of(source.get("items")) if isinstance(item, dict)]
    alt = text_of(source.get("alt"))
    known = _named(items[0] if items else source)
    return known or ("" if "\ue200" in alt or alt.startswith("![") else alt)


def _named(source: Mapping[str, Any]) -> str:
    known = ", ".join(filter(None, (text_of(source.get("title")), text_of(source.get("url")))))
    return f" ({known})" if known else ""


def _marked(inner: str) -> str:
    """What markup says by itself: the name of a thing, a link's title and address."""
    kind, *rest = inner.split("\ue202")
    if kind == "url":
        return f" {' '.join(rest)}"
    found = list_of(_json(rest[0])) if kind == "entity" and rest else []
    name = text_of(found[1]) if len(found) > 1 else ""
    return f" {name}" if name else ""
