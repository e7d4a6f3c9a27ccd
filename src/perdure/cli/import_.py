"""`perdure import`: conversations from exports and other files."""

from __future__ import annotations

import io
import json as jsonlib
import re
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import DB, AsJson, Database, User, app, opened
from perdure.cli.conversation import Conversation, Odd, Problem, store
from perdure.cli.import_jsonl import Lines
from perdure.cli.output import as_json, counted, note, say
from perdure.cli.progress import at_work, progress_bar, resumable
from perdure.errors import ConfigurationError, ImportFailed, InvalidMessages, InvalidNamespace

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from perdure.memory.extraction import Extraction

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
    prefix: Annotated[str, typer.Option(help="Put before each thread id.")] = "",
    no_memories: Annotated[
        bool, typer.Option("--no-memories", help="Make no memories of them.")
    ] = False,
    later: Annotated[
        bool, typer.Option("--later", help="Leave the memories to 'perdure worker'.")
    ] = False,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Import conversations as threads, and make memories of them.

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
            memories = _Memories(file, report, wanted=not no_memories, later=later)
            for path in databases:
                _take_over(file, path, memories, report)
            _store(file, prefix, read, memories, report)
    if json:
        told = {each.name: getattr(report, each.name) for each in fields(report)}
        as_json({**told, "skipped": [asdict(each) for each in report.skipped]})
    else:
        say(str(report))
        report.print_notes()


@dataclass(slots=True)
class Report:
    """What an import did.

    Attributes:
        conversations: Those that say something.
        messages: New messages.
        unchanged: Conversations of which nothing was new.
        empty: Conversations without a message.
        checkpoints: New ones, of databases.
        memories: How many were added; None: none are wanted, or a worker adds them.
        quarantined: How many more wait to be reviewed.
        left_out: Messages that tell a reader nothing, by kind, of conversations with news.
        skipped: What was not as expected.
    """

    conversations: int = 0
    messages: int = 0
    unchanged: int = 0
    empty: int = 0
    checkpoints: int = 0
    memories: int | None = None
    quarantined: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    skipped: list[Problem] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [counted(self.messages, "new message")] if self.messages else []
        parts += [counted(self.checkpoints, "new checkpoint")] if self.checkpoints else []
        parts += [f"{self.unchanged:,} unchanged"] if self.unchanged else []
        parts += [f"{self.empty:,} without messages"] if self.empty else []
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


# -- reading


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | None]:
    """A file that can be read again and again; None: it is a folder.

    Raises:
        ImportFailed: It cannot be read.
    """
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
    """The conversations of a file or folder.

    Raises:
        ImportFailed: It holds none of a known kind.
    """
    called = "stdin" if path == Path("-") else str(path)
    found: list[Conversation] = []
    known = False
    try:
        for name, text in _texts(path, called, source):
            reading = _Reading(name, report)
            found += reading.conversations(text)
            known |= reading.known
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


def _texts(path: Path, called: str, source: IO[bytes] | None) -> Iterator[tuple[str, str]]:
    """The names and texts of the files that may hold conversations, one after the other."""
    if source is None:
        names = sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())
        for name in _wanted(names):
            yield name, _decoded((path / name).read_bytes())
    elif _begins(source, b"PK"):
        with zipfile.ZipFile(source) as archive:
            for name in _wanted(sorted(archive.namelist())):
                with archive.open(name) as member:
                    text = member.read(_LARGEST + 1)
                if len(text) > _LARGEST:
                    raise zipfile.BadZipFile(f"{name!r} has more than 2 GB; unpack it yourself")
                yield name, _decoded(text)
    else:
        yield called, _decoded(source.read())


def _wanted(names: list[str]) -> list[str]:
    """The files named as ChatGPT and Claude name them; else all that may be JSON."""
    names = [name for name in names if not _JUNK.search(name)]
    found = [name for name in names if _CONVERSATIONS.search(name)]
    return found or [name for name in names if _JSON.search(name)]


def _decoded(data: bytes) -> str:
    return data.decode(jsonlib.detect_encoding(data))


class _Reading:
    """Reads the JSON values of a text, whatever kinds of conversations they are.

    Attributes:
        known: Whether any value was of a known kind.
    """

    def __init__(self, name: str, report: Report) -> None:
        self._name, self._report = name, report
        self._lines = Lines(Path(name).stem)
        self.known = False

    def conversations(self, text: str) -> list[Conversation]:
        """All of them, those that need other messages last."""
        found = []
        for number, value in _values(text):
            try:
                if isinstance(value, Odd):
                    raise value
                talks = self._within(number, value, _DEPTH)
                if not talks:
                    raise Odd("no conversation")
                found += [talk for talk in talks if talk is not None]
            except Odd as exc:
                self._report.skipped.append(Problem(str(exc), f"{self._name}, {number}"))
        return found + self._lines.together()

    def _within(self, number: int, value: Any, depth: int) -> list[Conversation | None]:
        """The conversations in a value; None for a message of one."""
        from perdure.cli import import_chatgpt, import_claude

        keys = value.keys() if isinstance(value, dict) else set[str]()
        found: list[Conversation | None] = [None]
        if keys & {"mapping", "linear_conversation"}:
            found = [import_chatgpt.read(value)]
        elif "chat_messages" in keys:
            found = [import_claude.read(value)]
        elif "messages" in keys:
            found = [self._lines.conversation(number, value)]
        elif "role" in keys and depth == _DEPTH:
            self._lines.message(value)
        else:
            parts = value.values() if keys else value if isinstance(value, list) else ()
            nested = [part for part in parts if depth and isinstance(part, dict | list)]
            return [talk for part in nested for talk in self._within(number, part, depth - 1)]
        self.known = True
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
            deep = isinstance(exc, RecursionError)
            value = Odd(
                "nested too deeply" if deep else "not JSON: the rest" if array else "not JSON"
            )
            at = len(text) if array else (text.find("\n", at) + 1 or len(text))
        yield number, value
    if array and not isinstance(value, Odd):
        yield number + 1, Odd("the file ends within its array")


# -- storing


class _Memories:
    """What becomes of the memories of an import."""

    def __init__(self, file: Database, report: Report, *, wanted: bool, later: bool) -> None:
        self._report = report
        self.about = {"user_id": file.user if wanted else ""}
        self._made: tuple[Extraction, RunnableConfig] | None = None
        if wanted and not later:
            self._made = file.extraction(), file.config
            report.memories = 0

    def make(self, thread_id: str) -> None:
        """Extract memories of a thread; what was read before is not read again."""
        if self._made is None:
            return
        extraction, config = self._made
        try:
            done = extraction.extract(thread_id, config)
        except (InvalidMessages, InvalidNamespace) as exc:
            # a program's own, with something else in that channel; an id that no memory can name
            self._report.skipped.append(Problem(f"no memories: {exc}", thread_id))
            return
        self._report.memories = (self._report.memories or 0) + done.added
        self._report.quarantined += done.quarantined


def _store(
    file: Database, prefix: str, talks: list[Conversation], memories: _Memories, report: Report
) -> None:
    total = sum(len(talk.nodes) for talk in talks)
    done = 0
    with progress_bar("importing", "message") as show:
        for talk in talks:
            report.skipped += talk.problems
            report.empty += not talk.nodes
            if not talk.nodes:
                continue
            thread_id, begun = prefix + talk.id, done
            talk.about |= memories.about

            def advance(count: int, begun: int = begun) -> None:
                show((begun + count) / total, begun + count)

            new = store(file.saver, thread_id, talk, advance)
            memories.make(thread_id)
            report.conversations += 1
            report.messages += new
            report.unchanged += not new
            if new:
                report.left_out += talk.left_out
            done += len(talk.nodes)
            show(done / total, done)


def _take_over(file: Database, path: Path, memories: _Memories, report: Report) -> None:
    from contextlib import closing

    from perdure.storage.flow import rows_of
    from perdure.storage.sqlite import SQLiteDatabase

    with at_work(f"importing {path}"):
        done = file.saver.import_from(path)
    report.conversations += done.threads
    report.checkpoints += done.checkpoints
    with closing(SQLiteDatabase(path, None, read_only=True)) as source:
        rows = source.read(rows_of("SELECT DISTINCT thread_id FROM checkpoints"))
    with progress_bar("making memories", "thread") as show:
        for number, (thread_id,) in enumerate(rows, 1):
            memories.make(thread_id)
            show(number / done.threads, number)
