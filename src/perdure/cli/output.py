"""How results are shown, text and tables for people, JSON for programs; how far a command is.

No stored text reaches a terminal as a control: all output passes `safe` or `as_json`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from functools import cache
from threading import Timer
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.tree import Tree

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
_PATIENCE_S: Final = 0.5  # what is done by then needs no word of progress
_ROOM: Final = 16  # columns of a terminal that ids leave to each other cell
_PIPE: Final = 1 << 31  # columns of what is no terminal: nothing is cut, no line is broken
_NUMBER: Final = re.compile(r"[\d,.]+( bytes?| [kMG]B)?")
_IDEOGRAPH: Final = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
_WORD: Final = re.compile(rf"[^\S\n]*(?:\n|[{_IDEOGRAPH}]|[^\s{_IDEOGRAPH}]+)")
_WHOLE: Final = re.compile(rf"[\n{_IDEOGRAPH}]\Z")


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


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# -- for programs


def as_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value as JSON: moments in ISO 8601, bytes in base64; with indent None on one line."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=_json)
    # what `safe` would escape, as JSON escapes it
    sys.stdout.write(_HIDDEN.sub(lambda match: json.dumps(match[0])[1:-1], text) + "\n")
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

    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = _PIPE
    return made


def say(text: str = "", style: str = "", wraps: bool = True, *, stderr: bool = False) -> None:
    """Print text, broken between words where a terminal ends if it `wraps`."""
    from rich.text import Text

    to = console(stderr=True) if stderr else console()  # which are cached by their arguments
    if to.is_terminal:
        to.print(Text(safe(text), style), soft_wrap=not wraps)
    else:
        print(safe(text), file=to.file, flush=True)


def note(text: str, style: str = "") -> None:
    """Print to stderr what is no result."""
    say(text, style, stderr=True)


def note_line(text: str, style: str = "") -> None:
    """Print a text to stderr on one line, cut where the terminal ends."""
    to = console(stderr=True)
    note(line(text, to.width if to.is_terminal else None), style)


def speak(parts: Iterable[str], style: str = "") -> bool:
    """Print a text while its parts come, and end its line; tells whether there was any text.

    On a terminal each word is printed once it is whole, so that none is broken where a line ends.
    """
    to, spoken = console(), False
    try:
        for text in filter(None, _wrapped(parts, to.width) if to.is_terminal else map(safe, parts)):
            spoken = True
            if to.is_terminal:
                from rich.text import Text

                to.print(Text(text, style), end="", soft_wrap=True)
            else:
                sys.stdout.write(text)
                sys.stdout.flush()
    finally:
        if spoken:
            say()
    return spoken


def _wrapped(parts: Iterable[str], width: int) -> Iterator[str]:
    """Words with the white space before them; where a line is full, with its end instead."""
    from rich.cells import cell_len

    column, fence, fixed = 0, "", False
    for word in map(safe, _words(parts)):
        if not column:
            fence, fixed = fixed_line(word, fence)
        if column and not fixed and word.strip() and column + cell_len(word) > width:
            word, column = "\n" + word.lstrip(), 0
        column = 0 if word.endswith("\n") else column + cell_len(word.lstrip("\n"))
        yield word


def _words(parts: Iterable[str]) -> Iterator[str]:
    """The words of a text that comes in parts, each once it is whole, and the ends of its lines."""
    rest = ""
    for part in parts:
        rest += part
        end = 0
        for match in _WORD.finditer(rest):
            if match.end() < len(rest) or _WHOLE.search(rest):
                end = match.end()
                yield match[0]
        rest = rest[end:]
    yield rest


def fixed_line(line: str, fence: str) -> tuple[str, bool]:
    """Read a line of Markdown, or its first word, after what may have opened a fence.

    Returns:
        The fence that is open after it, or "", and whether it is code or of a table: no prose.
    """
    opening = re.match(r" {0,3}(`{3,}|~{3,})", line)
    if opening and (not fence or opening[1].startswith(fence)):
        fence = "" if fence else opening[1]
    return fence, bool(fence or opening) or line.startswith(("    ", "\t", "|"))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], ids: Collection[str] = ()) -> None:
    """Print rows under headings; when piped, a line each, and nothing is cut.

    Args:
        columns: The headings; all empty: none are shown.
        rows: The cells; columns of numbers are aligned to the right.
        ids: The columns that are never cut. They are broken only where a terminal has too little
            room for the others.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    to, cells = console(), [[line(str(cell), None) for cell in row] for row in rows]
    whole = list(zip(columns, *cells, strict=True))
    numbers = [bool(cells) and all(map(_NUMBER.fullmatch, column)) for _, *column in whole]
    widths = [max(map(cell_len, column)) for column in whole]
    is_fixed = [name in ids or number for name, number in zip(columns, numbers, strict=True)]
    needed = sum(
        2 + (width if fixed else min(width, _ROOM))
        for width, fixed in zip(widths, is_fixed, strict=True)
    )
    shown = Table(box=None, header_style="bold", pad_edge=False, show_header=any(columns))
    for name, number, fixed in zip(columns, numbers, is_fixed, strict=True):
        fits = number or (fixed and needed <= to.width)
        shown.add_column(name, justify="right" if number else "left", no_wrap=fits, overflow="fold")
    for row in cells:
        shown.add_row(
            *(
                Text(cell) if name in ids else Text(cell, no_wrap=True, overflow="ellipsis")
                for name, cell in zip(columns, row, strict=True)
            )
        )
    to.print(shown)


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


def say_done(value: Any, json: bool, sentence: str) -> None:
    """Print what a command did: as JSON, or as a sentence."""
    if json:
        as_json(value)
    else:
        say(sentence)


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


def draw(tree: Tree) -> None:
    """Print a tree; its lines are as long as they are, however deep it is."""
    from rich.segment import Segments

    to = console()
    lines = to.render_lines(tree, to.options.update(width=_PIPE), pad=False, new_lines=True)
    to.print(Segments(part for line in lines for part in line), end="", soft_wrap=True)


@contextmanager
def paged(*, pager: bool = True) -> Iterator[None]:
    """Show what is printed meanwhile, on a terminal that is too short for it in a pager."""
    to = console()
    if not to.is_terminal:
        yield
        return
    with to.capture() as captured:
        yield
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
            "bytes of it stay until another process that reads the file ends, until the disk has "
            "room for a copy of the file, or in Postgres until their pages are written anew"
        )


def line(text: str, limit: int | None = 100) -> str:
    """Text on one line, safe, cut if it is longer than `limit`."""
    flat = " ".join(safe(text).split())
    return flat if limit is None or len(flat) <= limit else flat[: limit - 1] + "…"


def warn_of_owners(user: str, thread_ids: Sequence[str]) -> None:
    """Print how many threads count as a person's only because their `owner` has the name."""
    if thread_ids:
        which = ", ".join(thread_ids[:3]) + (", …" if len(thread_ids) > 3 else "")
        verb = "belongs" if len(thread_ids) == 1 else "belong"
        note(
            f"{counted(len(thread_ids), 'thread')} without a user {verb} to {user!r} only by their "
            f"owner: {which}; if {user!r} is an organisation, pass --owners organisations",
            "yellow",
        )


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


def moment(at: datetime | None, *, exact: bool = False) -> str:
    """A moment in UTC as `--as-of` takes it, to the minute: `2026-01-31 08:30Z`."""
    if at is None:
        return ""
    at = at.astimezone(UTC)
    return at.isoformat().replace("+00:00", "Z") if exact else f"{at:%Y-%m-%d %H:%MZ}"


# -- what a long command shows on stderr


@contextmanager
def progress_bar(doing: str, noun: str) -> Iterator[Callable[[float | None, int], None]]:
    """A bar on a terminal.

    Args:
        doing: What is being done.
        noun: What is counted.

    Yields:
        What moves it to a share of the whole (None: not known), and says a count.
    """
    if not console(stderr=True).is_terminal:
        yield lambda share, count: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[reached]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(safe(doing), total=None, reached="")

        def show(share: float | None, count: int) -> None:
            percent = "" if share is None else f"{share:>4.0%}, "
            reached, total = f"{percent}{count:,} {noun}s", None if share is None else 1.0
            progress.update(task, total=total, completed=share, reached=reached)

        yield show


@contextmanager
def at_work(doing: str) -> Iterator[None]:
    """Show on a terminal what is being done, if it is not done at once."""
    if not console(stderr=True).is_terminal:
        yield
        return
    from rich.text import Text

    status = console(stderr=True).status(Text(safe(doing)))  # of a str it would read markup
    late = Timer(_PATIENCE_S, status.start)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
        late.join()  # it may be starting just now
        status.stop()


@contextmanager
def resumable(kept: Callable[[], str]) -> Iterator[None]:
    """Say, when Ctrl-C ends a command, what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"cut off: {kept()}; run it again to go on")
        raise
