"""What all pages share: templates, and stored text shown as text."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from perdure.server.reply import JSON, encoded
from perdure.settings import Rules

_HERE: Final = Path(__file__).parent
ASSETS: Final = _HERE / "assets"
_BRIEF: Final = 300  # characters
_STEPS: Final = ((60, "s"), (60, "min"), (24, "h"), (365, "d"))


def visible(text: Any) -> Markup:
    """Text to show: escaped, with control and bidi characters by their numbers.

    A character that moves or hides others is shown as `<U+202E>`, marked up as `<i class="ctl">`
    (Unicode Technical Report 36, on spoofing by such characters).
    """
    return Markup(_SUSPECT.sub(_visible, str(escape(text))))


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


def query(path: str, /, **values: Any) -> str:
    """A link with a query; a value that is a list is repeated, and one that is None left out."""
    given = {name: value for name, value in values.items() if value is not None}
    return f"{path}?{urlencode(given, doseq=True, errors='surrogatepass')}"


async def form(request: Request) -> dict[str, str]:
    """The fields of a form, the last of each name."""
    body = (await request.body()).decode(errors="replace")
    return dict(parse_qsl(body, keep_blank_values=True))


def ago(moment: datetime | str | None) -> str:
    """How long ago a moment was, in its largest unit: `"5 min"`."""
    if moment is None:
        return ""
    at = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    left = (datetime.now(UTC) - at).total_seconds()
    for size, unit in _STEPS:
        if left < size:
            return f"{max(int(left), 0)} {unit}"
        left /= size
    return f"{int(left)} y"


def size(count: float) -> str:
    """A number of bytes in its unit: `"1.5 MB"`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def plain(text: str) -> str:
    """Text to be edited, without what `visible` shows by its number, but joiners of letters."""
    return "".join(c for c in text if c in _JOINS or unicodedata.category(c) not in _HIDDEN)


def brief(value: Any) -> str:
    """The beginning of a value, as JSON on a line."""
    text = encoded(value).decode()
    return text if len(text) <= _BRIEF else f"{text[:_BRIEF]}…"


def rules_given(rules: Rules) -> dict[str, Any]:
    """The rules of retention that are not as if they were not given."""
    given = asdict(rules)
    return {name: value for name, value in given.items() if value != getattr(Rules(), name)}


def as_json_text(value: Any) -> str:
    """A value as indented JSON, to be shown."""
    return json.dumps(json.loads(encoded(value)), indent=2, ensure_ascii=False)


_TEMPLATES: Final = Environment(
    loader=FileSystemLoader(_HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"visible": visible, "ago": ago, "size": size, "as_json": as_json_text}
_TEMPLATES.filters |= {"plain": plain, "brief": brief, "rules_given": rules_given}
_TEMPLATES.globals |= {"query": query}


def page(request: Request, template: str, /, **values: Any) -> Response:
    """A page, or its JSON twin, the values themselves: at `.json`, or if the client accepts JSON.

    Within a page, `{{ text | visible }}` shows stored text.
    """
    accepts = request.headers.get("accept", "")
    if request.url.path.endswith(".json") or accepts.startswith("application/json"):
        return JSON(values)
    made = _TEMPLATES.get_template(template).render(request=request, **values)
    return HTMLResponse(made, headers=HEADERS)


def error_page(
    request: Request, status: int, sentence: str, headers: Mapping[str, str] | None = None
) -> Response:
    """A page that says what went wrong."""
    values = {"request": request, "status": status, "sentence": sentence}
    made = _TEMPLATES.get_template("error.html").render(**values)
    return HTMLResponse(made, status, headers={**HEADERS, **(headers or {})})


HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
