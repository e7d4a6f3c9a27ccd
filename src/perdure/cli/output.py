"""Print the results of commands as text, tables or JSON, and the progress of long commands.

All printed text is escaped by `escape_control_characters` or `print_json`, so that stored text
cannot control the terminal.
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

# Matches control characters (C0 except newline and tab, DEL, C1) and invisible characters: format
# characters (category Cf), line and paragraph separators, fillers, and lone surrogates.
_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2"
    "\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_EMOJI: Final = "[\u2190-\u2bff\U0001f000-\U0001faff]"
_JOINER: Final = re.compile(f"(?<=[\ufe0f{_EMOJI[1:]})\u200d(?={_EMOJI})")
# Delay, in seconds, before a status line is shown for a running command.
_STATUS_DELAY_S: Final = 0.5
# Minimum width, in terminal columns, of each cell that is neither an id nor a number. If unwrapped
# ids would leave less space for these cells, the ids are wrapped.
_MIN_CELL_WIDTH: Final = 16
# Line width for piped output, in columns. It is so large that lines are never wrapped.
_UNLIMITED_WIDTH: Final = 1 << 31
_NUMBER: Final = re.compile(r"[\d,.]+( bytes?| [kMG]B)?")
_IDEOGRAPH: Final = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
_WORD: Final = re.compile(rf"[^\S\n]*(?:\n|[{_IDEOGRAPH}]|[^\s{_IDEOGRAPH}]+)")
_COMPLETE_WORD_END: Final = re.compile(rf"[\n{_IDEOGRAPH}]\Z")


def escape_control_characters(text: str) -> str:
    r"""Replace control characters and invisible characters in a text with escape sequences.

    The escaped text cannot control a terminal or change the direction of text. Newlines, tabs and
    the zero-width joiners within emoji are not escaped.

    >>> escape_control_characters("red \x1b[31m"), escape_control_characters("a\u202eb")
    ('red \\x1b[31m', 'a\\u202eb')
    >>> escape_control_characters("one\r\ntwo")
    'one\ntwo'
    """
    if text.isascii() and text.isprintable():
        return text
    parts = _JOINER.split(text.replace("\r\n", "\n"))
    return "\u200d".join(_HIDDEN.sub(_build_backslash_escape, part) for part in parts)


def _build_backslash_escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# -- for programs


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value as JSON, with times in ISO 8601 format and bytes in base64.

    Args:
        value: The value. Data classes are printed as objects.
        indent: The number of spaces for each level. If it is None, the JSON is printed on one line.
    """
    # An encoding other than UTF-8, such as cp1252 on Windows, lacks most characters.
    is_ascii = not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent, default=_make_json_serializable)
    # Escape the same characters as `escape_control_characters`, but as JSON escape sequences.
    sys.stdout.write(_HIDDEN.sub(lambda match: json.dumps(match[0])[1:-1], text) + "\n")
    sys.stdout.flush()


def _make_json_serializable(value: Any) -> Any:
    """Convert a value that `json.dumps` cannot serialize to one that it can."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.isoformat() if isinstance(value, datetime) else str(value)


# -- for people


@cache
def get_console(*, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr that respects `NO_COLOR` and `TERM`."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _UNLIMITED_WIDTH
    return console


def print_text(
    text: str = "", style: str = "", wraps: bool = True, *, end: str = "\n", stderr: bool = False
) -> None:
    """Print a text.

    Args:
        text: The text. If it is empty, only a line break is printed.
        style: A style of rich, or "" for none.
        wraps: Whether lines are broken between words at the width of the terminal.
        end: The text that is printed after `text`.
        stderr: Whether to print to stderr instead of stdout.
    """
    from rich.text import Text

    # Do not pass `stderr=False`, because `get_console` would then create and cache a second console
    # for stdout.
    terminal = get_console(stderr=True) if stderr else get_console()
    if terminal.is_terminal:
        terminal.print(Text(escape_control_characters(text), style), soft_wrap=not wraps, end=end)
    else:
        print(escape_control_characters(text), file=terminal.file, flush=True, end=end)


def print_note(text: str, style: str = "") -> None:
    """Print a note to stderr, so that stdout contains only the results of commands."""
    print_text(text, style, stderr=True)


def print_note_line(text: str, style: str = "") -> None:
    """Print a message to stderr on one line, truncated to the terminal width."""
    terminal = get_console(stderr=True)
    print_note(format_as_single_line(text, terminal.width if terminal.is_terminal else None), style)


def print_arriving_text_and_check_if_any(parts: Iterable[str], style: str = "") -> bool:
    """Print a streamed text as it arrives, followed by a newline.

    On a terminal, each word is printed only when it is complete, so that it is never split across
    two lines.

    Returns:
        Whether there was any text.
    """
    terminal, has_text = get_console(), False
    words = _wrap_arriving_text(parts, terminal.width) if terminal.is_terminal else parts
    try:
        for text in filter(None, words):
            has_text = True
            print_text(text, style, wraps=False, end="")
    finally:
        if has_text:
            print_text()
    return has_text


def _wrap_arriving_text(text_chunks: Iterable[str], width: int) -> Iterator[str]:
    """Yield the words of a text, and insert line breaks so that lines fit the given width.

    Each yielded string is a word with its leading white space. If a word would make its line longer
    than `width`, the white space before the word is replaced by a line break. Code blocks and
    tables in Markdown text are not wrapped.
    """
    from rich.cells import cell_len

    column, fence, is_fixed = 0, "", False
    for word in map(escape_control_characters, _iter_words_and_line_breaks(text_chunks)):
        if not column:
            fence, is_fixed = update_code_fence_and_detect_code_line(word, fence)
        if column and not is_fixed and word.strip() and column + cell_len(word) > width:
            word, column = "\n" + word.lstrip(), 0
        column = 0 if word.endswith("\n") else column + cell_len(word.lstrip("\n"))
        yield word


def _iter_words_and_line_breaks(text_chunks: Iterable[str]) -> Iterator[str]:
    """Yield the words and line breaks of a text that arrives in chunks.

    Each word is yielded as soon as it is complete.
    """
    rest = ""
    for part in text_chunks:
        rest += part
        end = 0
        for match in _WORD.finditer(rest):
            if match.end() < len(rest) or _COMPLETE_WORD_END.search(rest):
                end = match.end()
                yield match[0]
        rest = rest[end:]
    yield rest


def update_code_fence_and_detect_code_line(line: str, open_fence: str) -> tuple[str, bool]:
    """Track fenced code blocks while reading Markdown line by line.

    Args:
        line: The next line, or its first word.
        open_fence: The fence that is open before the line, such as three backticks, or "".

    Returns:
        The fence that is open after the line, or "", and a flag. The flag says whether the line
        must not be wrapped, because the line is code or part of a table.
    """
    opening = re.match(r" {0,3}(`{3,}|~{3,})", line)
    if opening and (not open_fence or opening[1].startswith(open_fence)):
        open_fence = "" if open_fence else opening[1]
    return open_fence, bool(open_fence or opening) or line.startswith(("    ", "\t", "|"))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], ids: Collection[str] = ()
) -> None:
    """Print rows as a table. Piped output has one line per row, and its cells are never truncated.

    Args:
        columns: The headings. If all are empty, no headings are printed.
        rows: The cells of each row. Columns of numbers are aligned to the right.
        ids: The headings of columns whose cells are never truncated. The cells of these columns are
            wrapped only if they would leave too little space for the other columns.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    terminal, cells = (
        get_console(),
        [[format_as_single_line(str(cell), None) for cell in row] for row in rows],
    )
    full_columns = list(zip(columns, *cells, strict=True))
    numbers = [bool(cells) and all(map(_NUMBER.fullmatch, column)) for _, *column in full_columns]
    widths = [max(map(cell_len, column)) for column in full_columns]
    is_fixed = [name in ids or number for name, number in zip(columns, numbers, strict=True)]
    needed_width = sum(
        2 + (width if fixed else min(width, _MIN_CELL_WIDTH))
        for width, fixed in zip(widths, is_fixed, strict=True)
    )
    grid = Table(box=None, header_style="bold", pad_edge=False, show_header=any(columns))
    for name, number, fixed in zip(columns, numbers, is_fixed, strict=True):
        fits = number or (fixed and needed_width <= terminal.width)
        grid.add_column(name, justify="right" if number else "left", no_wrap=fits, overflow="fold")
    for row in cells:
        grid.add_row(
            *(
                Text(cell) if name in ids else Text(cell, no_wrap=True, overflow="ellipsis")
                for name, cell in zip(columns, row, strict=True)
            )
        )
    terminal.print(grid)


def print_json_or_table(
    json_value: Any,
    json: bool,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    ids: Collection[str] = (),
    empty_note: str = "",
) -> None:
    """Print a list as JSON, or as a table.

    Args:
        json_value: The list, as JSON prints it.
        json: Whether to print JSON.
        columns: The headings of the table.
        rows: The cells of the table.
        ids: The headings of columns that are never truncated; see `print_table`.
        empty_note: The message that is printed to stderr instead of an empty table.
    """
    if json:
        print_json(json_value)
    elif json_value or not empty_note:
        print_table(columns, rows, ids)
    else:
        print_note(empty_note)


def print_json_or_sentence(json_value: Any, json: bool, sentence: str) -> None:
    """Print a command's result, as JSON or as a sentence."""
    if json:
        print_json(json_value)
    else:
        print_text(sentence)


class OutputLine(NamedTuple):
    """A styled line of output, such as a line of a thread's history.

    Attributes:
        text: The text of the line.
        style: A style of rich, or "" for none.
        wraps: Whether the line is broken between words at the width of the terminal, as prose is.
            Code and tables are not broken, so that a copy of them has no additional line breaks.
    """

    text: str
    style: str = ""
    wraps: bool = True


def print_unwrapped_tree(tree: Tree) -> None:
    """Print a tree. The lines of a tree are never wrapped, even if they are long."""
    from rich.segment import Segments

    terminal = get_console()
    lines = terminal.render_lines(
        tree, terminal.options.update(width=_UNLIMITED_WIDTH), pad=False, new_lines=True
    )
    terminal.print(Segments(part for line in lines for part in line), end="", soft_wrap=True)


@contextmanager
def page_output(*, pager: bool = True) -> Iterator[None]:
    """Collect the output of the `with` block, and show it in a pager if it is long.

    The pager is used if the output has more lines than the terminal.

    Args:
        pager: Whether a pager may be used.
    """
    terminal = get_console()
    if not terminal.is_terminal:
        yield
        return
    with terminal.capture() as captured:
        yield
    text = captured.get()
    height = sum(1 + len(line) // terminal.width for line in text.splitlines())
    if pager and height > terminal.height and sys.stdin.isatty() and _is_pager_available():
        import pydoc

        # Give the pager `less` the same options as git does. The options "FRX" make `less` keep
        # colours, and exit at once if the text fits on the screen.
        os.environ.setdefault("LESS", "FRX")
        pydoc.pager(text)
    else:
        terminal.file.write(text)
        terminal.file.flush()


def _is_pager_available() -> bool:
    """Return whether a pager can be used.

    A pager is unavailable only if `MANPAGER` or `PAGER` names a program that does not exist.
    """
    setting = os.environ.get("MANPAGER") or os.environ.get("PAGER") or ""
    command = [word for word in setting.split() if "=" not in word]
    return not command or shutil.which(os.path.expanduser(command[0])) is not None


def print_whether_deleted_bytes_remain(is_scrubbed: bool) -> None:
    """Print whether deleted values have been physically removed from the database file."""
    if is_scrubbed:
        print_text("the deleted bytes have been removed from the file")
    else:
        print_note(
            "deleted bytes remain in the file until other processes that read the file have ended "
            "and the disk has room for a copy of the file; in Postgres they remain until their "
            "pages are rewritten"
        )


def format_as_single_line(text: str, max_length: int | None = 100) -> str:
    """Collapse text into a single line, truncated to at most `max_length` characters.

    Line breaks become spaces, and control characters are escaped.
    """
    flat_text = " ".join(escape_control_characters(text).split())
    if max_length is None or len(flat_text) <= max_length:
        return flat_text
    return flat_text[: max_length - 1] + "…"


def print_warning_about_threads_matched_by_owner(user: str, thread_ids: Sequence[str]) -> None:
    """Warn about threads that have no `user_id` and were matched to a person by `owner`."""
    if thread_ids:
        verb = "belongs" if len(thread_ids) == 1 else "belong"
        print_note(
            f"{format_count(len(thread_ids), 'thread')} without a user {verb} to {user!r} only "
            f"by their owner: {join_first(thread_ids, 3)}; if {user!r} is an organisation, pass "
            "--owners organisations",
            "yellow",
        )


def join_first(texts: Sequence[str], limit: int) -> str:
    """Join the first `limit` texts with commas, followed by an ellipsis if there are more.

    >>> join_first(["a", "b", "c"], 2)
    'a, b, …'
    """
    return ", ".join(texts[:limit]) + (", …" if len(texts) > limit else "")


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun.

    >>> format_count(1, "thread"), format_count(2000, "thread")
    ('1 thread', '2,000 threads')
    >>> format_count(2, "memory", "memories")
    '2 memories'
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_size(byte_count: int) -> str:
    """Return a number of bytes with a unit.

    >>> format_size(1536)
    '1.5 kB'
    """
    from rich.filesize import decimal

    return decimal(byte_count)


def format_age(time: datetime) -> str:
    """Format a time as its age, such as "2 hours ago", or as a date if it is over 30 days ago."""
    seconds = max(0.0, (datetime.now(UTC) - time).total_seconds())
    if seconds > 30 * 86400:
        return time.astimezone(UTC).date().isoformat()
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{format_count(int(seconds // length), unit)} ago"
    return "just now"


def format_date(time: datetime | None) -> str:
    """Return the UTC date of a datetime, or "" for None."""
    return "" if time is None else time.astimezone(UTC).date().isoformat()


def format_time(time: datetime | None, *, exact: bool = False) -> str:
    """Format a time in UTC, in a form that `--as-of` accepts, such as `2026-01-31 08:30Z`.

    Args:
        time: The time. If it is None, "" is returned.
        exact: Whether to include seconds and microseconds.
    """
    if time is None:
        return ""
    time = time.astimezone(UTC)
    return time.isoformat().replace("+00:00", "Z") if exact else f"{time:%Y-%m-%d %H:%MZ}"


# -- progress of long commands, on stderr


@contextmanager
def progress_bar(activity: str, noun: str) -> Iterator[Callable[[float | None, int], None]]:
    """Show a progress bar on a terminal.

    Args:
        activity: The text before the bar, such as "importing".
        noun: The singular noun of the things that are counted, such as "message".

    Yields:
        A function that updates the bar. The first argument is the completed share, between 0 and 1,
        or None if the total is unknown. The second argument is the count so far.
    """
    if not get_console(stderr=True).is_terminal:
        yield lambda share, count: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[reached]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=get_console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape_control_characters(activity), total=None, reached="")

        def update(share: float | None, count: int) -> None:
            percent = "" if share is None else f"{share:>4.0%}, "
            reached, total = f"{percent}{count:,} {noun}s", None if share is None else 1.0
            progress.update(task, total=total, completed=share, reached=reached)

        yield update


@contextmanager
def show_status(activity: str) -> Iterator[None]:
    """Show a status line on a terminal if the `with` block runs for more than 0.5 seconds."""
    if not get_console(stderr=True).is_terminal:
        yield
        return
    from rich.text import Text

    # Pass a `Text` and not a str, because rich would parse markup in a str.
    status = get_console(stderr=True).status(Text(escape_control_characters(activity)))
    timer = Timer(_STATUS_DELAY_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # Wait until the timer's OS thread has ended. Without waiting, the timer could start the
        # status line after `status.stop()`.
        timer.join()
        status.stop()


@contextmanager
def print_progress_on_interrupt(describe_progress: Callable[[], str]) -> Iterator[None]:
    """If Ctrl-C interrupts the `with` block, print what the command has done so far.

    Args:
        describe_progress: Returns the progress, such as "12 messages imported".
    """
    try:
        yield
    except KeyboardInterrupt:
        print_note(f"interrupted: {describe_progress()}; run the command again to continue")
        raise
