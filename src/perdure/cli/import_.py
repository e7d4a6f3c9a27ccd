"""`perdure import`: conversations from exports and other files."""

from __future__ import annotations

import io
import json as jsonlib
import re
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Annotated, Any, Final

import typer

from perdure.cli.app import DB, AsJson, Database, User, app, opened
from perdure.cli.conversation import Conversation, Odd, Problem, dict_of, list_of, store
from perdure.cli.import_jsonl import Lines
from perdure.cli.output import as_json, counted, note, say
from perdure.cli.progress import at_work, progress_bar, resumable
from perdure.errors import (
    ConfigurationError,
    ImportFailed,
    InvalidMessages,
    InvalidNamespace,
    SerializationError,
)

_SQLITE: Final = b"SQLite format 3\0"  # https://sqlite.org/fileformat.html
_LARGEST: Final = 2 << 30  # bytes that a file of a ZIP may unpack to
_CONVERSATIONS: Final = re.compile(r"(^|/)conversations[^/]*\.jsonl?$", re.IGNORECASE)
_JSON: Final = re.compile(r"\.jsonl?$", re.IGNORECASE)
_JUNK: Final = re.compile(r"(^|/)(__MACOSX/|\._)")
_DEPTH: Final = 8  # of a shared link's page, which holds the conversation somewhere within


@app.command("import")
def import_(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="ZIP, folder, JSON, JSONL or SQLite; - is stdin."),
    ],
    prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Put this before each thread id.")
    ] = "",
    no_memories: Annotated[bool, typer.Option("--no-memories", help="Make no memories.")] = False,
    later: Annotated[
        bool, typer.Option("--later", help="Leave the memories to 'perdure worker'.")
    ] = False,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Import conversations as threads, with memories.

    Takes the exports of ChatGPT and Claude (ZIP, folder or conversations.json), the JSON of a
    shared link, JSONL of messages, and databases of langgraph-checkpoint-sqlite. Regenerated
    answers become forks. What was imported before stays as it is, so an import can be repeated.
    """
    report = Report()
    read: list[Conversation] = []
    databases: list[Path] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(files):
            with at_work(f"reading {path}"), _opened(path) as source:
                if source is None or not _begins(source, _SQLITE):
                    read += _read(path, source, report)
                elif path.is_file():
                    databases.append(path)
                else:  # a pipe
                    databases.append(Path(folder) / str(number))
                    databases[-1].write_bytes(source.read())
        if databases and prefix:
            raise ConfigurationError("a database keeps its own thread ids; leave out --prefix")
        read.sort(key=lambda talk: talk.at([node.message for node in talk.nodes]))
        kept = resumable(lambda: f"{report}; that is kept")
        with opened(db, user, create=True, hasty=True) as file, kept:
            importing = _Importing(file, report, wanted=not no_memories, later=later)
            for path in databases:
                importing.take_over(path)
            importing.store(prefix, read)
            if report.memories:
                with at_work("indexing memories …"):
                    file.index()
    if json:
        told = {each.name: getattr(report, each.name) for each in fields(report)}
        as_json({**told, "skipped": [asdict(each) for each in report.skipped]})
    else:
        say(str(report))
        report.print_notes()


@dataclass(slots=True)
class Report:
    """What an import did: each message counts if it is new, each conversation if it has one."""

    conversations: int = 0
    messages: int = 0
    unchanged: int = 0
    empty: int = 0
    checkpoints: int = 0  # of databases
    memories: int | None = None  # None: none are wanted, or a worker adds them
    quarantined: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # messages of conversations with news
    skipped: list[Problem] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [counted(self.messages, "new message")] if self.messages else []
        parts += [counted(self.checkpoints, "new checkpoint")] if self.checkpoints else []
        parts += [f"{self.unchanged:,} unchanged"] if self.unchanged else []
        parts += [f"{self.empty:,} more without messages"] if self.empty else []
        if self.memories is not None:
            parts.append(counted(self.memories, "memory", "memories"))
        parts += [f"{self.quarantined:,} in quarantine"] if self.quarantined else []
        return f"{counted(self.conversations, 'conversation')}: {', '.join(parts) or 'no messages'}"

    def print_notes(self) -> None:
        """Say on stderr what is not there, by kind."""
        problems = Counter(each.reason for each in self.skipped)
        for what, kinds in (("left out", self.left_out), ("not as expected", problems)):
            if kinds:
                named = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(20))
                note(f"{what}: {named}{', …' if len(kinds) > 20 else ''}")
        if problems:
            note("--json lists where")
        if self.quarantined:
            note("'perdure memories quarantine' lists what waits to be reviewed")


# -- reading


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | None]:
    """A file that can be read again and again; None: it is a folder."""
    try:
        if path == Path("-"):
            yield io.BytesIO(sys.stdin.buffer.read())
        elif path.is_dir():
            yield None
        else:
            with path.open("rb") as file:
                yield file if path.is_file() else io.BytesIO(file.read())
    except OSError as exc:
        raise ImportFailed(f"{str(path)!r} cannot be read: {exc.strerror}") from exc


def _begins(source: IO[bytes], mark: bytes) -> bool:
    found = source.read(len(mark))
    source.seek(0)
    return found == mark


def _read(path: Path, source: IO[bytes] | None, report: Report) -> list[Conversation]:
    """The conversations of a file or folder; an error if it holds nothing of a known kind."""
    called = "stdin" if path == Path("-") else str(path)
    found: list[Conversation] = []
    known = False
    try:
        for name, data in _files(path, called, source):
            lines = Lines(Path(name).stem)
            for number, value in _values(data.decode(jsonlib.detect_encoding(data))):
                try:
                    found += _conversations(number, value, lines)
                    known = True
                except Odd as exc:
                    report.skipped.append(Problem(str(exc), f"{name}, {number}"))
            found += lines.together()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as exc:
        raise ImportFailed(f"{called!r} cannot be unpacked: {exc}") from exc
    except UnicodeDecodeError as exc:
        raise ImportFailed(f"{called!r} is not UTF-8 text: byte {exc.start}") from exc
    if not known:
        raise ImportFailed(
            f"{called!r} holds no conversations; expected an export of ChatGPT or Claude (ZIP, "
            "folder, conversations.json), a shared link's JSON, JSONL of messages, or a database "
            "of langgraph"
        )
    return found


def _files(path: Path, called: str, source: IO[bytes] | None) -> Iterator[tuple[str, bytes]]:
    """The names and bytes of the files that may hold conversations, one after the other."""
    if source is None:
        names = sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())
        for name in _wanted(names):
            yield name, (path / name).read_bytes()
    elif _begins(source, b"PK"):
        with zipfile.ZipFile(source) as archive:
            for name in _wanted(sorted(archive.namelist())):
                with archive.open(name) as member:
                    data = member.read(_LARGEST + 1)
                if len(data) > _LARGEST:
                    raise zipfile.BadZipFile(f"{name!r} has more than 2 GB; unpack it yourself")
                yield name, data
    else:
        yield called, source.read()


def _wanted(names: list[str]) -> list[str]:
    """The files named as ChatGPT and Claude name them; else all that may be JSON."""
    names = [name for name in names if not _JUNK.search(name)]
    found = [name for name in names if _CONVERSATIONS.search(name)]
    return found or [name for name in names if _JSON.search(name)]


def _conversations(
    number: int, value: Any, lines: Lines, depth: int = _DEPTH
) -> list[Conversation]:
    """The conversations in a value; a message of one goes to the lines."""
    from perdure.cli import import_chatgpt, import_claude

    if isinstance(value, Odd):
        raise value
    readers: dict[str, Callable[[Any], Conversation]] = {
        "mapping": import_chatgpt.read,
        "linear_conversation": import_chatgpt.read,
        "chat_messages": import_claude.read,
        "messages": lambda found: lines.conversation(number, found),
    }
    keys = dict_of(value).keys()
    for key, read in readers.items():
        if key in keys:
            return [read(value)]
    if "role" in keys and depth == _DEPTH:
        lines.message(value)
        return []
    parts = [*dict_of(value).values(), *list_of(value)] if depth else []
    found = []
    for part in parts:
        if isinstance(part, dict | list):
            found += _conversations(number, part, lines, depth - 1)
    if not found and depth == _DEPTH:
        raise Odd("no conversation")
    return found


def _values(text: str) -> Iterator[tuple[int, Any]]:
    """The values of a JSON array, or those that stand one after the other, each with its number.

    The number is the place in the array, or the line. What cannot be read comes as an `Odd`.
    """
    decoder, space = jsonlib.JSONDecoder(), re.compile(r"[\s,]*")
    at = space.match(text).end()  # type: ignore[union-attr]
    array = text.startswith("[", at)
    at += array
    number, counted_to = 0 if array else 1, 0
    value: Any = None
    while (at := space.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        if array and text[at] == "]":
            return
        number += 1 if array else text.count("\n", counted_to, at)
        counted_to = at
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as exc:
            why = "nested too deeply" if isinstance(exc, RecursionError) else "not JSON"
            value = Odd("not JSON: the rest" if array and why == "not JSON" else why)
            at = len(text) if array else (text.find("\n", at) + 1 or len(text))
        yield number, value
    if array and not isinstance(value, Odd):
        yield number + 1, Odd("the file ends within its array")


# -- storing


class _Importing:
    """Stores what was read, and makes memories of it, with a report."""

    def __init__(self, file: Database, report: Report, *, wanted: bool, later: bool) -> None:
        self._file, self._report = file, report
        self._user = file.user if wanted else ""
        self._extraction = file.extraction() if wanted and not later else None
        report.memories = None if self._extraction is None else 0

    def store(self, prefix: str, talks: list[Conversation]) -> None:
        report, done = self._report, 0
        total = sum(len(talk.nodes) for talk in talks)
        with progress_bar("importing", "message") as show:
            for talk in talks:
                report.skipped += talk.problems
                report.empty += not talk.nodes
                if not talk.nodes:
                    continue

                def advance(count: int, begun: int = done) -> None:
                    show((begun + count) / total, begun + count)

                talk.about["user_id"] = self._user
                try:
                    new = store(self._file.saver, prefix + talk.id, talk, advance)
                except SerializationError as exc:  # a field of a message that no file can hold
                    report.skipped.append(Problem(f"cannot be stored: {exc}", talk.id))
                    continue
                self._remember(prefix + talk.id)
                report.conversations += 1
                report.messages += new
                report.unchanged += not new
                report.left_out += talk.left_out if new else Counter()
                done += len(talk.nodes)
                show(done / total, done)

    def take_over(self, path: Path) -> None:
        """Import a database of langgraph."""
        from contextlib import closing

        from perdure.storage.flow import rows_of
        from perdure.storage.sqlite import SQLiteDatabase

        with at_work(f"importing {path}"):
            done = self._file.saver.import_from(path)
        self._report.conversations += done.threads
        self._report.checkpoints += done.checkpoints
        with closing(SQLiteDatabase(path, None, read_only=True)) as source:
            rows = source.read(rows_of("SELECT DISTINCT thread_id FROM checkpoints"))
        with progress_bar("making memories", "thread") as show:
            for number, (thread_id,) in enumerate(rows, 1):
                self._remember(thread_id)
                show(number / done.threads, number)

    def _remember(self, thread_id: str) -> None:
        """Extract memories of a thread; what was read before is not read again."""
        if self._extraction is None:
            return
        try:
            done = self._extraction.extract(thread_id, self._file.config)
        except (InvalidMessages, InvalidNamespace) as exc:
            # a program's own, with something else in that channel; an id that no memory can name
            self._report.skipped.append(Problem(f"no memories: {exc}", thread_id))
            return
        self._report.memories = (self._report.memories or 0) + done.added
        self._report.quarantined += done.quarantined
