"""How results are shown: text and tables for people, JSON for programs.

No stored text reaches a terminal as a control: all output passes `safe` or `as_json`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

# C0 but newline and tab, DEL and C1, then what Unicode gives no shape: format characters (Cf),
# line and paragraph separators, fillers, and halves of surrogate pairs
_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2"
    "\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_EMOJI: Final = "[\u2190-\u2bff\U0001f000-\U0001faff]"
_JOINER: Final = re.compile(f"(?<=[\ufe0f{_EMOJI[1:]})\u200d(?={_EMOJI})")
_OTHER: Final = 12  # columns that a cell keeps beside an id that fills the line


def safe(text: str) -> str:
    r"""Text in which nothing controls a terminal, is invisible, or turns the direction of writing.

    Newlines and tabs stay, and so does the joiner within an emoji.

    >>> safe("red \x1b[31m"), safe("a\u202eb"), safe("one\r\ntwo")
    ('red \\x1b[31m', 'a\\u202eb', 'one\ntwo')
    """
    if text.isascii() and text.isprintable():
        return text
    parts = _JOINER.split(text.replace("\r\n", "\n"))
    return "\u200d".join(_HIDDEN.sub(_escaped, part) for part in parts)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# -- for programs


def as_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value as JSON: moments in ISO 8601, bytes in base64; with indent None on one line."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=_json)
    # what `safe` would escape, as JSON escapes it
    sys.stdout.write(_HIDDEN.sub(lambda found: json.dumps(found[0])[1:-1], text) + "\n")
    sys.stdout.flush()


def _json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.isoformat() if isinstance(value, datetime) else str(value)


# -- for people


@cache
def console(*, stderr: bool = False) -> Console:
    """The terminal, or what stands in its place; `NO_COLOR` and `TERM` are heeded."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False)


def say(text: str = "", style: str | None = None, *, stderr: bool = False) -> None:
    """Print text; when piped, its lines are as long as they are."""
    to = console(stderr=stderr)
    to.print(safe(text), style=style, soft_wrap=not to.is_terminal)


def note(text: str, style: str | None = None) -> None:
    """Print to stderr what is no result."""
    say(text, style, stderr=True)


def note_line(text: str, style: str | None = None) -> None:
    """Print a text to stderr on one line, cut where the terminal ends."""
    to = console(stderr=True)
    note(line(text, to.width if to.is_terminal else None), style)


def speak(text: str, style: str | None = None) -> None:
    """Print a part of a text that comes in parts, at once."""
    to = console()
    if to.is_terminal:
        from rich.text import Text

        to.print(Text(safe(text), style or ""), end="", soft_wrap=True)
    else:
        sys.stdout.write(safe(text))
        sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], ids: Collection[str] = ()) -> None:
    """Print rows under headings, a line each; when piped, nothing is cut.

    Args:
        columns: The headings; all empty: none are shown.
        rows: The cells; columns of numbers are aligned to the right.
        ids: The columns that are never cut nor wrapped, so that they can be copied. If the first
            is one, and fills half of the terminal, it stands on a line above the rest of its row.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.segment import Segment, Segments
    from rich.table import Table
    from rich.text import Text

    cells = [[line(str(cell), None) for cell in row] for row in rows]
    whole = not console().is_terminal
    above = {}
    for number, row in enumerate(cells):
        if not whole and columns[0] in ids and 2 * cell_len(row[0]) > console().width:
            above[number], row[0] = row[0], ""
    shown = Table(box=None, header_style="bold", pad_edge=False, show_header=any(columns))
    needed = 2 * len(columns)
    for i, name in enumerate(columns):
        numeric = bool(cells) and all(
            re.fullmatch(r"[\d,.]+( bytes?| [kMG]B)?", row[i]) for row in cells
        )
        fixed = whole or numeric or name in ids
        needed += max(map(cell_len, [name, *(row[i] for row in cells)])) if fixed else _OTHER
        shown.add_column(name, justify="right" if numeric else "left", no_wrap=fixed)
    for row in cells:
        shown.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in row))
    width = needed if whole else max(needed, console().width)
    to = Console(width=width, highlight=False)
    for number, parts in enumerate(to.render_lines(shown), start=-shown.show_header):
        if number in above:
            to.print(Text(above[number]), soft_wrap=True)
        to.print(Segments([*parts, Segment.line()]), end="")


def show(
    value: Any,
    json: bool,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    ids: Collection[str] = (),
    nothing: str = "",
) -> None:
    """Print a value as JSON, or as a table; `nothing` is noted in place of one without rows."""
    if json:
        as_json(value)
    elif value or not nothing:
        table(columns, rows, ids)
    else:
        note(nothing)


class Line(NamedTuple):
    """A line of something long to read.

    Attributes:
        text: What it says.
        style: Of rich; empty: none.
        wraps: Whether it is broken between words where the terminal ends, as prose is. Code and
            tables are not: what is copied has no line breaks that were not there.
    """

    text: str
    style: str = ""
    wraps: bool = True


def paged(lines: Iterable[Line], *, pager: bool = True) -> None:
    """Print lines; on a terminal that is too short for them, in a pager."""
    to = console()
    if not to.is_terminal:
        for each in lines:
            sys.stdout.write(safe(each.text) + "\n")
        return
    from rich.text import Text

    with to.capture() as captured:
        for each in lines:
            to.print(Text(safe(each.text), each.style), soft_wrap=not each.wraps)
    shown = captured.get()
    height = sum(1 + len(each) // to.width for each in shown.splitlines())
    if pager and height > to.height and sys.stdin.isatty() and _pages():
        import pydoc

        os.environ.setdefault("LESS", "FRX")  # as git does: colours pass, a short text needs no q
        pydoc.pager(shown)
    else:
        to.file.write(shown)
        to.file.flush()


def _pages() -> bool:
    """Whether the pager that the user named, if any, is there."""
    named = os.environ.get("MANPAGER") or os.environ.get("PAGER") or ""
    command = [word for word in named.split() if "=" not in word]
    return not command or shutil.which(os.path.expanduser(command[0])) is not None


def say_clean(clean: bool) -> None:
    """Say whether the bytes of what was deleted are gone from the file."""
    if clean:
        say("its bytes are gone from the file")
    else:
        note(
            "bytes of it stay until another process that reads the file ends, or in Postgres until "
            "their pages are written anew"
        )


def line(text: str, limit: int | None = 100) -> str:
    """Text on one line, safe, cut if it is longer than `limit`."""
    flat = " ".join(safe(text).split())
    return flat if limit is None or len(flat) <= limit else flat[: limit - 1] + "…"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun.

    >>> counted(1, "thread"), counted(2000, "thread"), counted(2, "memory", "memories")
    ('1 thread', '2,000 threads', '2 memories')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def size(count: int) -> str:
    """Bytes for people.

    >>> size(1536)
    '1.5 kB'
    """
    from rich.filesize import decimal

    return decimal(count)


def ago(moment: datetime) -> str:
    """How long ago, for people; a date if it is more than a month."""
    seconds = max(0.0, (datetime.now(UTC) - moment).total_seconds())
    if seconds > 30 * 86400:
        return moment.astimezone(UTC).date().isoformat()
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{counted(int(seconds // length), unit)} ago"
    return "just now"


def day(moment: datetime | None) -> str:
    """The day of a moment, in UTC."""
    return "" if moment is None else moment.astimezone(UTC).date().isoformat()


def moment(at: datetime | None) -> str:
    """A moment in ISO 8601, in UTC."""
    return "" if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")
