"""How results are shown: tables for people, JSON for programs."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
_CALLS = ("tool_use", "tool_call", "function_call")
notes = Console(stderr=True, soft_wrap=not sys.stderr.isatty(), highlight=False)


def as_json(value: Any) -> None:
    """Print a value as JSON; moments in ISO 8601, bytes in base64."""
    print(json.dumps(value, ensure_ascii=False, indent=2, default=_json))


def json_line(value: Any) -> None:
    """Print a value as JSON on one line, whole, whichever thread prints beside."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=_json) + "\n")
    sys.stdout.flush()


def _json(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, datetime) else str(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows under headings, if there are any; numbers to the right. Whole when piped."""
    rows = [list(row) for row in rows]
    whole = not console.is_terminal
    shown = Table(box=None, header_style="bold", pad_edge=False, show_header=any(columns))
    for i, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], int) for row in rows)
        justify: Literal["left", "right"] = "right" if numeric else "left"
        shown.add_column(name, justify=justify, overflow="fold", no_wrap=whole)
    for row in rows:
        shown.add_row(*(Text(str(cell)) for cell in row))
    if not whole:
        console.print(shown)
        return
    width = console.measure(shown, options=console.options.update(max_width=1_000_000)).maximum
    Console(width=width, highlight=False).print(shown)


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "thread"), counted(2, "thread")
    ('1 thread', '2 threads')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def size(count: int) -> str:
    """Bytes for people.

    >>> size(1536)
    '1.5 kB'
    """
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GB"


def ago(moment: datetime) -> str:
    """How long ago, for people."""
    seconds = max(0.0, (datetime.now(UTC) - moment).total_seconds())
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{counted(int(seconds // length), unit)} ago"
    return "just now"


def line(text: str, limit: int = 100) -> str:
    """Text on one line, cut if it is long."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def spoken(value: Any) -> str:
    """What a message, or another item of a channel, says to people: no data, and no Python.

    >>> spoken(["look", {"type": "image_url", "image_url": {"url": "data:..."}}])
    'look [image_url]'
    """
    if not hasattr(value, "content"):
        return _content(value)
    calls = [*getattr(value, "tool_calls", ()), *getattr(value, "invalid_tool_calls", ())]
    content = value.content
    if calls and isinstance(content, list):  # some models say their calls in the content as well
        content = [p for p in content if not isinstance(p, dict) or p.get("type") not in _CALLS]
    return " ".join(filter(None, [_content(content), *map(_call, calls)]))


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, str) or _kind(part) for part in value):
        return " ".join(
            part
            if isinstance(part, str)
            else part["text"]
            if isinstance(part.get("text"), str)
            else f"[{_kind(part)}]"
            for part in value
        )
    return json.dumps(value, ensure_ascii=False, default=lambda part: f"[{type(part).__name__}]")


def _kind(part: Any) -> str:
    return str(part.get("type") or "") if isinstance(part, dict) else ""


def _call(call: Any) -> str:
    arguments = call.get("args")
    if isinstance(arguments, dict):
        arguments = ", ".join(f"{name}={_content(value)}" for name, value in arguments.items())
    return f"→ {call.get('name')}({line(str(arguments or ''), 60)})"
