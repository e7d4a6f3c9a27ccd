"""What all pages share: routes and templates, messages and other values as text to be shown."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Form
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from markupsafe import Markup, escape
from pydantic import Field
from rich.filesize import decimal
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from perdure.checkpointers import StateDifference
from perdure.checkpointers.values import DetachedFields
from perdure.errors import ConfigurationError
from perdure.memory.quotation import render_block_name
from perdure.memory.thread_messages import parse_time
from perdure.server.access import Action, action
from perdure.server.reply import JSONReply, encode_json, format_as_text, truncate_text, wants_json

LONG: Final = 4_000  # characters of a text that a page shows; a link leads to the whole
SHORT: Final = 160  # of a value in a list of changes
_CALLS: Final = frozenset({"tool_use", "tool_call", "function_call", "server_tool_call"})
_ID: Final = re.compile(
    r"(?:\w+-{1,2})?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?:-\d+)?|[0-9a-f]{32}"
    r"|(?:call|chatcmpl|msg|resp|run|toolu)[_-][\w-]{12,}"
)
"""An id that a program made, of a message, a tool call or a run."""
_DATA: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.-]+)*;base64,[A-Za-z0-9+/=]{64,}")


def type_name(value: Any) -> str:
    """Return the name of a value's class, also if the value is the fields of an unknown class."""
    if isinstance(value, DetachedFields):
        _, (_, name), _ = value.origin
        return name
    return type(value).__name__


def shown(value: Any, long: int = LONG) -> dict[str, Any]:
    """A message, or another element of a channel: what it is, its blocks and its tool calls."""
    message = value if isinstance(value, BaseMessage) else None
    known = message.response_metadata if message else {}
    calls = [*value.tool_calls, *value.invalid_tool_calls] if isinstance(value, AIMessage) else []
    row: dict[str, Any] = {
        "type": message.type if message else type_name(value),
        "id": message and message.id,
        "name": message and message.name,
        "at": parse_time(known.get("create_time")),
        "model": known.get("model_name") or known.get("model"),
        "failed": isinstance(value, ToolMessage) and value.status == "error",
        "blocks": [
            {"kind": kind, "text": text}
            for kind, text in (_blocks(message) if message else [("text", format_as_text(value))])
        ],
        "calls": [
            {n: call[n] for n in ("id", "name")} | {"text": format_as_text(call["args"])}
            for call in calls
        ],
        "more": 0,
    }
    for part in (*row["blocks"], *row["calls"]):
        part["text"], more = truncate_text(part["text"], long)
        row["more"] += more
    return row


def short(value: Any) -> str:
    """The beginning of a value, in one line."""
    text = value.text if isinstance(value, BaseMessage) else format_as_text(value)
    if isinstance(value, AIMessage) and not text:
        text = ", ".join(f"{call['name']}(…)" for call in value.tool_calls)
    return truncate_text(" ".join(text[: 4 * SHORT].split()), SHORT)[0]


def are_ids(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the lines of a value are ids alone, which pages fold."""
    return bool(lines) and all(_ID.fullmatch(line["text"]) for line in lines)


def _blocks(message: BaseMessage) -> Iterator[tuple[str, str]]:
    content = message.content
    for block in [content] if isinstance(content, str) else content:
        if isinstance(block, str) or not isinstance(block, Mapping):
            yield "text", _DATA.sub(r"[\1]", format_as_text(block))
            continue
        kind = str(block.get("type") or "")
        if kind in _CALLS and isinstance(message, AIMessage) and message.tool_calls:
            continue
        text = block.get("text") or block.get("reasoning") or block.get("thinking")
        if not isinstance(text, str) or not kind:
            yield (
                "other",
                render_block_name(block) if kind else _DATA.sub(r"[\1]", format_as_text(block)),
            )
        else:
            yield "text" if kind == "text" else "reasoning", text


def changes(change: StateDifference) -> list[dict[str, Any]]:
    """The elements added and removed, by channel; langgraph's triggers of nodes are left out."""
    out = []
    for channel, each in change.channels.items():
        if channel.startswith(("branch:to:", "__")):
            continue
        removed, lines = dict(each.removed), []
        for value in each.added.values():
            # what it replaces: an element of the same id, or the value of a channel stored whole
            replaced = [at for at, old in removed.items() if each.whole or _same(old, value)][:1]
            lines += [("-", removed.pop(at)) for at in replaced] + [("+", value)]
        lines += [("-", value) for value in removed.values()]
        out.append(
            {
                "channel": channel,
                "added": each.added_count,
                "removed": each.removed_count,
                "whole": each.whole,
                "lines": [{"sign": sign, **line_of(value)} for sign, value in lines],
                "left": each.added_count + each.removed_count - len(lines),
            }
        )
    return out


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, BaseMessage) and isinstance(new, BaseMessage):
        return old.id is not None and old.id == new.id
    return _is_pair(old) and _is_pair(new) and bool(old[0] == new[0])


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def line_of(element: Any) -> dict[str, Any]:
    """An element of a channel in one line; one of a dict is its name and value."""
    named = _is_pair(element) and isinstance(element[0], str)
    text = f"{element[0]}: {short(element[1])}" if named else short(element)
    return {"type": getattr(element, "type", None), "text": text}


# -- pages

_HERE: Final = Path(__file__).parent
ASSETS: Final = _HERE / "assets"
Number = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A number of a query or a form: a database has no larger ones."""
Text = Annotated[str, Form()]
Values = dict[str, Any]
Made = Callable[..., Awaitable[Response]]
_STEPS: Final = ((60, "s"), (60, "min"), (24, "h"), (365, "d"))


def visible(text: Any, isolated: bool = True) -> Markup:
    """Text to show: escaped, in a `<bdi>`, with control and bidi characters by their numbers.

    What is written from right to left does not move what stands beside it. A character that moves
    or hides others is shown as `<U+202E>`, marked up as `<i class="ctl">` (Unicode Technical
    Report 36, on spoofing by such characters). A part of a text is not isolated from the others.
    """
    shown = _SUSPECT.sub(_visible, str(escape(text)))
    return Markup(f"<bdi>{shown}</bdi>" if isolated else shown)


def _visible(found: re.Match[str]) -> str:
    hidden = unicodedata.category(found[0]) in _HIDDEN or found[0] in _FILLERS
    return f'<i class="ctl">U+{ord(found[0]):04X}</i>' if hidden else found[0]


_JOINS: Final = "\n\t\u200c\u200d"
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_FILLERS: Final = "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"
_SUSPECT: Final = re.compile(
    r"[^\n\t -~\xa0-\xac\xae-\u02ff\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3]"
)
"""Characters that may be hidden ones; those in common use that are not are left out for speed."""


def plain(text: str) -> str:
    """Text to be edited, without what `visible` shows by its number, but joiners of letters."""
    return "".join(c for c in text if c in _JOINS or unicodedata.category(c) not in _HIDDEN)


def ago(at: datetime) -> str:
    """How long ago a moment was, in its largest unit: `"5 min"`."""
    left = max((datetime.now(UTC) - at).total_seconds(), 0)
    for most, unit in _STEPS:
        if left < most:
            return f"{int(left)} {unit}"
        left /= most
    return f"{int(left)} y"


def as_json_text(value: Any) -> str:
    """A value as indented JSON, to be shown."""
    return json.dumps(json.loads(encode_json(value)), indent=2, ensure_ascii=False)


def moment(text: str, days: int = 0) -> datetime | None:
    """A moment or a day as a form has it, or days later, in UTC if it does not say; None: now."""
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text) + timedelta(days)
    except (ValueError, OverflowError) as exc:
        raise ConfigurationError(
            f"the moment is {text!r:.80}; expected one like 2026-01-31 or 2026-01-31T12:00"
        ) from exc
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def query(path: str, /, **values: Any) -> str:
    """A link with a query; a value that is a list is repeated, an empty one is left out."""
    given = {name: value for name, value in values.items() if value not in (None, "")}
    return f"{path}?{urlencode(given, doseq=True, errors='surrogatepass')}"


def go_to(path: str, /, **values: Any) -> Response:
    """Lead a browser to a page, after a form was sent."""
    return RedirectResponse(query(path, **values) if values else path, 303)


_TEMPLATES: Final = Environment(
    loader=FileSystemLoader(_HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"visible": visible, "plain": plain, "short": short}
_TEMPLATES.filters |= {"ago": ago, "size": decimal, "as_json": as_json_text}
_TEMPLATES.tests["ids"] = are_ids
_TEMPLATES.globals |= {"query": query}
_TEMPLATES.globals["show"] = _TEMPLATES.get_template("macros.html").module
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",  # with no-referrer, forms are sent with the Origin null
}


def page(request: Request, template: str, status: int = 200, /, **values: Any) -> Response:
    """A page, or its JSON twin, the values themselves: at `.json`, or if the client accepts JSON.

    Within a page, `{{ text | visible }}` shows stored text.
    """
    if wants_json(request):
        return JSONReply(values, status)
    made = _TEMPLATES.get_template(template).render(request=request, **values)
    return HTMLResponse(made, status, headers=HEADERS)


def error_page(
    request: Request, status: int, sentence: str, headers: Mapping[str, str] | None = None
) -> Response:
    """A page that says what went wrong."""
    made = page(request, "error.html", status, code=status, detail=sentence)
    made.headers.update(headers or {})
    return made


class Pages(APIRouter):
    """Routes of pages, each with its JSON twin at `.json`; see `page`."""

    def __init__(self) -> None:
        super().__init__(include_in_schema=False)

    def page(self, path: str, of: Action) -> Callable[[Made], Made]:
        """Add a page, and what it is allowed by."""

        def added(make: Made) -> Made:
            for each in (path, f"{path}.json"):
                self.get(each)(action(of)(make))
            return make

        return added
