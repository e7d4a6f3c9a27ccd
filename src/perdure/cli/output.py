"""How results are shown: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
notes = Console(stderr=True, soft_wrap=not sys.stderr.isatty(), highlight=False)


def as_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, ensure_ascii=False, indent=2, default=str))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows under headings; numbers to the right. Plain and whole when piped."""
    rows = [list(row) for row in rows]
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for i, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], int) for row in rows)
        shown.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(str(cell)) for cell in row))
    console.print(shown)


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
            count = int(seconds // length)
            return f"{count} {unit}{'s' * (count != 1)} ago"
    return "just now"


def line(text: str, limit: int = 100) -> str:
    """Text on one line, cut if it is long."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
