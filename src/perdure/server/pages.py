"""What all pages share: their routes and templates, and stored text shown as text."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Form
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from pydantic import Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from perdure.errors import ConfigurationError
from perdure.server.access import Action, action
from perdure.server.messages import are_ids, short
from perdure.server.reply import JSON, encoded, wants_json

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


def size(count: float) -> str:
    """A number of bytes in its unit: `"1.5 MB"`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.{int(unit != 'bytes')}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def as_json_text(value: Any) -> str:
    """A value as indented JSON, to be shown."""
    return json.dumps(json.loads(encoded(value)), indent=2, ensure_ascii=False)


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
_TEMPLATES.tests["ids"] = are_ids
_TEMPLATES.filters |= {"ago": ago, "size": size, "as_json": as_json_text}
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
        return JSON(values, status)
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
