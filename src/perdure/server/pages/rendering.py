"""Render HTML pages, and provide the routes and text formatting that all pages share."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Form
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
from perdure.server.http.access import Action, set_required_action
from perdure.server.http.reply import (
    JSONReply,
    encode_json,
    format_as_text,
    truncate_and_count_omitted,
    wants_json,
)
from perdure.server.pages.navigation import load_navigation

# Maximum number of characters shown for a text on a page. A longer text has a link to the full
# text.
MAX_TEXT_CHARS: Final = 4_000
# Maximum number of characters shown for a value on one line of a page.
MAX_LINE_CHARS: Final = 160
_TOOL_CALL_BLOCK_TYPES: Final = frozenset(
    {"tool_use", "tool_call", "function_call", "server_tool_call"}
)
_GENERATED_ID: Final = re.compile(
    r"(?:\w+-{1,2})?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?:-\d+)?|[0-9a-f]{32}"
    r"|(?:call|chatcmpl|msg|resp|run|toolu)[_-][\w-]{12,}"
)
"""The regular expression matches generated ids of messages, tool calls and runs.

These ids are UUIDs, or ids in the forms that model providers use.
"""
_DATA_URL: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.-]+)*;base64,[A-Za-z0-9+/=]{64,}")


def type_name(value: Any) -> str:
    """Return the name of a value's class.

    If the value was stored with a class that this process cannot import, return the name of that
    class.
    """
    if isinstance(value, DetachedFields):
        return value.origin.class_name[1]
    return type(value).__name__


def build_message_row(value: Any, max_chars: int = MAX_TEXT_CHARS) -> dict[str, Any]:
    """Build the template data for a message, or for any other element of a channel's value.

    Args:
        value: A message, or any other stored element.
        max_chars: The number of characters after which each text is cut.

    Returns:
        The type, id, name, time, model, content blocks and tool calls. `failed` is True for a
            `ToolMessage` with an error. `more` is the number of characters that were cut off.
    """
    message = value if isinstance(value, BaseMessage) else None
    response_metadata = message.response_metadata if message else {}
    tool_calls = (
        [*value.tool_calls, *value.invalid_tool_calls] if isinstance(value, AIMessage) else []
    )
    row: dict[str, Any] = {
        "type": message.type if message else type_name(value),
        "id": message and message.id,
        "name": message and message.name,
        "at": parse_time(response_metadata.get("create_time")),
        "model": response_metadata.get("model_name") or response_metadata.get("model"),
        "failed": isinstance(value, ToolMessage) and value.status == "error",
        "blocks": [
            {"kind": kind, "text": text}
            for kind, text in (
                _iter_block_kinds_and_texts(message)
                if message
                else [("text", format_as_text(value))]
            )
        ],
        "calls": [
            {name: call[name] for name in ("id", "name")} | {"text": format_as_text(call["args"])}
            for call in tool_calls
        ],
        "more": 0,
    }
    for part in (*row["blocks"], *row["calls"]):
        part["text"], cut_chars = truncate_and_count_omitted(part["text"], max_chars)
        row["more"] += cut_chars
    return row


def format_one_line(value: Any) -> str:
    """Return a value's text on one line, truncated to `MAX_LINE_CHARS` characters.

    For an AI message without text, the names of the message's tool calls are returned in place of a
    text.
    """
    text = value.text if isinstance(value, BaseMessage) else format_as_text(value)
    if isinstance(value, AIMessage) and not text:
        text = ", ".join(f"{call['name']}(…)" for call in value.tool_calls)
    return truncate_and_count_omitted(" ".join(text[: 4 * MAX_LINE_CHARS].split()), MAX_LINE_CHARS)[
        0
    ]


def are_all_lines_generated_ids(displayed_lines: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether every displayed list element is a generated id, such as a UUID.

    Pages collapse lists of generated ids.
    """
    return bool(displayed_lines) and all(
        _GENERATED_ID.fullmatch(line["text"]) for line in displayed_lines
    )


def _iter_block_kinds_and_texts(message: BaseMessage) -> Iterator[tuple[str, str]]:
    """Yield each content block's kind ("text", "reasoning" or "other") and text.

    Tool call blocks in the content are skipped if the message also lists its tool calls in the
    attribute `tool_calls`. A base64 data URL in a text is replaced by its media type, such as
    `[image/png]`.
    """
    content = message.content
    for block in [content] if isinstance(content, str) else content:
        if isinstance(block, str) or not isinstance(block, Mapping):
            yield "text", _DATA_URL.sub(r"[\1]", format_as_text(block))
            continue
        kind = str(block.get("type") or "")
        if kind in _TOOL_CALL_BLOCK_TYPES and isinstance(message, AIMessage) and message.tool_calls:
            continue
        text = block.get("text") or block.get("reasoning") or block.get("thinking")
        if not isinstance(text, str) or not kind:
            yield (
                "other",
                render_block_name(block) if kind else _DATA_URL.sub(r"[\1]", format_as_text(block)),
            )
        else:
            yield "text" if kind == "text" else "reasoning", text


def build_change_rows(difference: StateDifference) -> list[dict[str, Any]]:
    """Build the template data for the changes between two checkpoints, grouped by channel.

    The returned list does not include the internal channels that langgraph uses to trigger nodes.

    Args:
        difference: The difference between two checkpoints.

    Returns:
        For each channel, its name, the number of added and removed elements, and one line for each
            loaded element. `left` is the number of elements without a line.
    """
    rows = []
    for channel, channel_change in difference.channels.items():
        if channel.startswith(("branch:to:", "__")):
            continue
        removed, lines = dict(channel_change.removed), []
        for value in channel_change.added.values():
            # Find the removed element that the added element `value` replaces. Both elements have
            # the same message id or the same dict key. If the channel's whole value was replaced,
            # `value` replaces the only removed element, which is the channel's old value.
            replaced = [
                position
                for position, old in removed.items()
                if channel_change.whole or _has_same_message_id_or_dict_key(old, value)
            ][:1]
            lines += [("-", removed.pop(position)) for position in replaced] + [("+", value)]
        lines += [("-", value) for value in removed.values()]
        rows.append(
            {
                "channel": channel,
                "added": channel_change.added_count,
                "removed": channel_change.removed_count,
                "whole": channel_change.whole,
                "lines": [
                    {"sign": sign, **build_type_and_text_of_channel_element(value)}
                    for sign, value in lines
                ],
                "left": channel_change.added_count + channel_change.removed_count - len(lines),
            }
        )
    return rows


def _has_same_message_id_or_dict_key(old: Any, new: Any) -> bool:
    """Return whether two channel elements share a message id or, for dict entries, a key."""
    if isinstance(old, BaseMessage) and isinstance(new, BaseMessage):
        return old.id is not None and old.id == new.id
    return _is_pair(old) and _is_pair(new) and bool(old[0] == new[0])


def _is_pair(value: Any) -> bool:
    """Return whether the value is a list or tuple of two elements, such as a (key, value) pair."""
    return isinstance(value, list | tuple) and len(value) == 2


def build_type_and_text_of_channel_element(element: Any) -> dict[str, Any]:
    """Build the template data for an element of a channel's value: its type and one-line text.

    A dict entry is shown as `key: value`.
    """
    is_named_pair = _is_pair(element) and isinstance(element[0], str)
    text = (
        f"{element[0]}: {format_one_line(element[1])}"
        if is_named_pair
        else format_one_line(element)
    )
    return {"type": getattr(element, "type", None), "text": text}


# -- templates and routes

_SERVER_FOLDER: Final = Path(__file__).parent.parent
ASSETS: Final = _SERVER_FOLDER / "assets"
NonNegativeNumber = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A number in a query string or an HTML form.

The number is limited because databases store integers as signed 64-bit numbers.
"""
FormText = Annotated[str, Form()]
PageValues = dict[str, Any]
PageEndpoint = Callable[..., Awaitable[Response]]
# Time units as `(count, symbol)` pairs, smallest unit first. `count` is the number of units in the
# next larger unit, such as 60 seconds in a minute. The last pair says that 365 days make up a year.
_TIME_UNITS: Final = ((60, "s"), (60, "min"), (24, "h"), (365, "d"))


def render_text_with_hidden_characters_shown(text: Any, adds_bdi: bool = True) -> Markup:
    """Escape text for HTML, wrap it in `<bdi>`, and show hidden characters as code points.

    The `<bdi>` element isolates right-to-left text, so that it does not reorder the surrounding
    text. A character that moves or hides other characters is shown as its code point, such as
    `<i class="ctl">U+202E</i>`. Unicode Technical Report 36 describes how invisible and
    bidirectional characters can be used for spoofing.

    Args:
        text: The value to show; it is converted to a string.
        adds_bdi: Whether to add the `<bdi>`. Use False for one part of a longer text.
    """
    html = _POSSIBLY_HIDDEN.sub(_show_code_point_if_hidden, str(escape(text)))
    return Markup(f"<bdi>{html}</bdi>" if adds_bdi else html)


def _show_code_point_if_hidden(match: re.Match[str]) -> str:
    """Return an invisible character's code point as HTML, or any other character unchanged."""
    is_hidden = (
        unicodedata.category(match[0]) in _HIDDEN_CATEGORIES or match[0] in _INVISIBLE_FILLERS
    )
    return f'<i class="ctl">U+{ord(match[0]):04X}</i>' if is_hidden else match[0]


_EDITABLE_CONTROLS: Final = "\n\t\u200c\u200d"
_HIDDEN_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_INVISIBLE_FILLERS: Final = "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"
_POSSIBLY_HIDDEN: Final = re.compile(
    r"[^\n\t -~\xa0-\xac\xae-\u02ff\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3]"
)
"""The regular expression matches all characters that may be invisible.

Common visible characters are excluded, so that their Unicode categories need not be looked up.
"""


def remove_hidden_characters(text: str) -> str:
    """Remove the characters in `_HIDDEN_CATEGORIES` from a text that a user is about to edit.

    Line breaks, tabs, zero-width joiners and zero-width non-joiners are kept, because people type
    them.
    """
    return "".join(
        character
        for character in text
        if character in _EDITABLE_CONTROLS
        or unicodedata.category(character) not in _HIDDEN_CATEGORIES
    )


def format_elapsed_time(start: datetime) -> str:
    """Return the time since `start` in its largest whole unit, such as `"5 min"`."""
    amount = max((datetime.now(UTC) - start).total_seconds(), 0)
    for unit_size, unit in _TIME_UNITS:
        if amount < unit_size:
            return f"{int(amount)} {unit}"
        amount /= unit_size
    return f"{int(amount)} y"


def format_as_json(value: Any) -> str:
    """Return a value as indented JSON."""
    return json.dumps(json.loads(encode_json(value)), indent=2, ensure_ascii=False)


def parse_form_datetime(text: str, days_to_add: int = 0) -> datetime | None:
    """Parse a date or timestamp that was entered in a form.

    Args:
        text: An ISO 8601 date or time. A text without a time zone is in UTC.
        days_to_add: A number of days to add.

    Returns:
        The moment with its time zone, or None if the text is empty.

    Raises:
        ConfigurationError: The text is not an ISO 8601 date or time.
    """
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text) + timedelta(days_to_add)
    except (ValueError, OverflowError) as exc:
        raise ConfigurationError(
            f"{text!r:.80} is not a date or time; enter one such as 2026-01-31 or 2026-01-31T12:00"
        ) from exc
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def build_link(path: str, /, **values: Any) -> str:
    """Return a path with a query string.

    The query string does not contain parameters whose value is None or an empty string. A list is
    encoded as a repeated query parameter, one for each element.
    """
    parameters = {name: value for name, value in values.items() if value not in (None, "")}
    return f"{path}?{urlencode(parameters, doseq=True, errors='surrogatepass')}"


def redirect_to(path: str, /, **values: Any) -> Response:
    """Return a redirect as the response to an HTML form."""
    return RedirectResponse(build_link(path, **values) if values else path, 303)


_TEMPLATES: Final = Environment(
    loader=FileSystemLoader(_SERVER_FOLDER / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "visible": render_text_with_hidden_characters_shown,
    "plain": remove_hidden_characters,
    "one_line": format_one_line,
    "ago": format_elapsed_time,
    "size": decimal,
    "as_json": format_as_json,
}
_TEMPLATES.tests["generated_ids"] = are_all_lines_generated_ids
_TEMPLATES.globals |= {"build_link": build_link}
_TEMPLATES.globals["show"] = _TEMPLATES.get_template("macros.html").module
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    # With the referrer policy `no-referrer`, browsers would send `Origin: null` when a form is
    # submitted, and the server would reject the request.
    "Referrer-Policy": "same-origin",
}


def render_page(request: Request, template: str, status: int = 200, /, **values: Any) -> Response:
    """Render a page as HTML, or return its values as JSON.

    The response is JSON if the path ends with `.json` or if the client accepts JSON. Templates
    apply the `visible` filter to stored text, as in `{{ text | visible }}`.

    Args:
        request: The request, which selects HTML or JSON.
        template: The file name of the template.
        status: The HTTP status of the reply.
        **values: The template's variables, which are also the fields of the JSON.
    """
    if wants_json(request):
        return JSONReply(values, status)
    return HTMLResponse(
        _TEMPLATES.get_template(template).render(request=request, **values), status, headers=HEADERS
    )


def render_error_page(
    request: Request, status: int, detail: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Render a page that shows an error message."""
    response = render_page(request, "error.html", status, code=status, detail=detail)
    response.headers.update(headers or {})
    return response


class Pages(APIRouter):
    """A router for pages. To get a page's data as JSON, append `.json` to the page's path."""

    def __init__(self) -> None:
        super().__init__(
            include_in_schema=False,
            default_response_class=JSONReply,
            dependencies=[Depends(load_navigation)],
        )

    def add_page_and_json_routes(
        self, path: str, required_action: Action
    ) -> Callable[[PageEndpoint], PageEndpoint]:
        """Return a decorator that adds two routes to an endpoint: one for HTML and one for JSON.

        Args:
            path: The path of the page.
            required_action: The action for which a request requires permission.
        """

        def add_routes(endpoint: PageEndpoint) -> PageEndpoint:
            for route_path in (path, f"{path}.json"):
                self.get(route_path)(set_required_action(required_action)(endpoint))
            return endpoint

        return add_routes
