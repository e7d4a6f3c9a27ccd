"""`perdure import` and `export`: conversations from exports and other files, and as JSONL."""

from __future__ import annotations

import json as jsonlib
import re
import signal
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from perdure.cli.app import (
    DbOption,
    JsonOption,
    OwnersOption,
    ThreadsArgument,
    UserOption,
    app,
    open_database,
    resolve_thread_id,
)
from perdure.cli.output import (
    as_json,
    at_work,
    note,
    progress_bar,
    resumable,
    say_done,
    size,
    warn_of_owners,
)
from perdure.errors import ConfigurationError, ImportFailed
from perdure.settings import check_user, is_dsn

if TYPE_CHECKING:
    from perdure.cli.conversation import Conversation, MalformedPart, SavedText
    from perdure.cli.import_agents import SessionsReader
    from perdure.cli.import_archive import ArchiveLines
    from perdure.cli.import_lines import JsonLinesReader
    from perdure.cli.import_report import ConversationsReport

_SQLITE: Final = b"SQLite format 3\0"  # https://sqlite.org/fileformat.html
_CHUNK: Final = 1 << 20  # bytes that are read from a pipe at once
_SMALL: Final = 64 << 20  # bytes that a file of a ZIP may unpack to however well it is packed
_RATIO: Final = 50  # text of an export is packed to a tenth or so, spaces to a thousandth
_CONVERSATIONS: Final = re.compile(r"(^|/)conversations[^/]*\.jsonl?$", re.IGNORECASE)
_OTHERS: Final = re.compile(  # other files of Claude's export
    r"(^|/)((memories|projects)(/[^/]+)?|(design_chats|conversations)/[^/]+)\.json$", re.IGNORECASE
)
_ZIP: Final = re.compile(r"-\d+( \(\d+\))?\.zip$", re.IGNORECASE)  # parts of Claude's export
_JSON: Final = re.compile(r"\.jsonl?$", re.IGNORECASE)
_LINKS: Final = "is a list of links to the files of an export"
_UNKNOWN: Final = "no conversation"
_JUNK: Final = re.compile(r"(^|/)(__MACOSX/|\._)")
_DEPTH: Final = 8  # of a shared link's page, which holds the conversation somewhere within


@app.command("import")
def import_(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="ZIP, folder, JSON, JSONL or SQLite; - is stdin; or a Postgres DSN.",
        ),
    ],
    prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Put this before each thread id.")
    ] = "",
    no_memories: Annotated[bool, typer.Option("--no-memories", help="Make no memories.")] = False,
    later: Annotated[
        bool, typer.Option("--later", help="Leave the memories to 'perdure worker'.")
    ] = False,
    renamed: Annotated[
        list[str] | None,
        typer.Option("--as", metavar="ID=NEW", help="A new id for a thread of a perdure database."),
    ] = None,
    max_value_mb: Annotated[
        int,
        typer.Option(
            "--max-value-mb",
            min=1,
            max=2047,
            metavar="N",
            help="Refuse larger values.",
        ),
    ] = 256,
    user: UserOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Import conversations as threads, with memories.

    Takes the exports of ChatGPT and Claude (ZIP, folder or conversations.json), of Open WebUI and
    LibreChat, sessions of Claude Code and Codex, the JSON of a shared link, JSONL of messages,
    databases of langgraph's own savers, and files of perdure, which are merged with their items.
    Regenerated answers become forks. What was imported before stays as it is, so an import can be
    repeated. Exit code 1 if no message was read.
    """
    from perdure.cli.import_report import ConversationsReport
    from perdure.cli.import_thread import Importing
    from perdure.cli.sources import open_import

    names = _names(renamed or [])
    report = ConversationsReport()
    reading = _Reading(report)
    databases = [name for name in files if is_dsn(name)]
    with ended_by_signals(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for number, path in enumerate(Path(name) for name in files if not is_dsn(name)):
            copied = Path(folder) / str(number)
            with at_work(f"reading {path}"), _open_seekable(path, copied) as source:
                if source is None or not _begins(source, _SQLITE):
                    reading.read(path, source)
                else:
                    databases.append(str(copied if copied.exists() else path))
        if databases and prefix:
            raise ConfigurationError("a database keeps its own thread ids; leave out --prefix")
        read = reading.finish()
        read.sort(key=lambda talk: talk.find_creation_time(next(reversed(talk.nodes), None)))
        # databases are checked before anything is written
        with at_work("checking databases") if databases else nullcontext():
            sources = [stack.enter_context(open_import(db, max_value_mb << 20)) for db in databases]
        kept = resumable(lambda: f"{report}; that is kept")
        with open_database(db, user, create=True, relaxed_durability=True) as file, kept:
            importing = Importing(file, report, wanted=not no_memories, later=later)
            for database in sources:
                importing.take_over(database, names)
            importing.store(prefix, read)
            importing.store_texts(reading.texts)
            importing.store_archives(reading.archives())
            if report.memories:
                with at_work("indexing memories …"):
                    file.index_memories(report.by_user)
    skipped = [problem._asdict() for problem in report.skipped]
    refused = [{"namespace": namespace, "key": key} for namespace, key in report.refused]
    say_done({**vars(report), "skipped": skipped, "refused": refused}, json, str(report))
    if not json:
        report.print_notes()
    if report.is_empty:
        raise typer.Exit(1)


@app.command()
def export(
    thread: ThreadsArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Export all threads.")] = False,
    user: Annotated[
        str | None,
        typer.Option(
            "--user", metavar="NAME", help="Export everything that belongs to this person."
        ),
    ] = None,
    owners: OwnersOption = None,
    db: DbOption = None,
) -> None:
    """Write threads as JSONL, a line each, with their branches.

    With --user it is the archive of a person: threads, memories with versions, profile,
    instructions, examples, and runs and crons as a record. 'perdure import' reads it. Exit code 1
    if there is nobody of this name.
    """
    from perdure.memory.thread_export import build_thread_export

    if [bool(thread), every, user is not None].count(True) != 1:
        raise ConfigurationError("name threads, or give --all or --user")
    if user is not None:
        _export_person(check_user("--user", user, "give the name of the person"), owners, db)
        return
    if owners is not None:
        raise ConfigurationError(f"--owners {owners} applies only to --user; remove it")
    with open_database(db, allow_read_only=True) as file:
        ids = [resolve_thread_id(file, name) for name in thread or ()]
        # all there are now: paging would miss those that are written to meanwhile
        ids = ids or [head.thread_id for head in file.saver.heads(limit=sys.maxsize)]
        with progress_bar("exporting", "thread") as show:
            for number, name in enumerate(ids, 1):
                as_json(build_thread_export(file.saver, name), indent=None)
                show(number / len(ids), number)


def _export_person(user: str, owners: str | None, db: str | None) -> None:
    """Write the archive of a person, or end with exit code 1 if nothing belongs to the name."""
    from perdure.errors import UnknownPerson
    from perdure.people import export as export_person

    with open_database(db, allow_read_only=True) as file:
        try:
            by_owner = None if owners is None else owners == "people"
            lines = export_person(user, file.saver, file.store, owners_are_people=by_owner)
        except UnknownPerson as exc:
            note(f"perdure: {exc}")
            raise typer.Exit(1) from exc
        with progress_bar("exporting", "line") as show:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    warn_of_owners(user, line["threads_by_owner"])
                as_json(line, indent=None)
                show(None, number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, so that it removes temporary files."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(number) is signal.SIG_DFL:  # under nohup SIGHUP is ignored
                before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _names(renamed: list[str]) -> dict[str, str]:
    names = dict[str, str]()
    for option in renamed:
        old, _, new = option.partition("=")
        if not old or not new:
            raise ConfigurationError(f"--as is {option!r}; expected ID=NEW")
        names[old] = new
    return names


@contextmanager
def _open_seekable(path: Path, copied: Path) -> Iterator[IO[bytes] | None]:
    """Open a file for reading more than once. Yield None if the path is a folder.

    The content of a pipe is copied to the path `copied` first.
    """
    try:
        is_stdin = path == Path("-")
        if path.is_dir() and not is_stdin:
            yield None
        elif path.is_file() and not is_stdin:
            with path.open("rb") as file:
                yield file
        else:
            with copied.open("w+b") as file:
                _read_pipe(path, file)
                yield file
    except OSError as exc:
        raise ImportFailed(f"{str(path)!r} cannot be read: {exc.strerror}") from exc


def _read_pipe(path: Path, into: IO[bytes]) -> None:
    if path == Path("-"):
        _copy_chunks(sys.stdin.buffer, into)
    elif path.is_char_device() or path.is_block_device():
        raise ImportFailed(f"{str(path)!r} is a device; expected a file, a pipe or a folder")
    else:
        with path.open("rb") as pipe:
            _copy_chunks(pipe, into)
    into.seek(0)


def _copy_chunks(source: Any, into: IO[bytes]) -> None:
    """Copy a stream in chunks, so that a signal is handled between two of them."""
    while chunk := source.read1(_CHUNK):
        into.write(chunk)


def _begins(source: IO[bytes], mark: bytes) -> bool:
    first = source.read(len(mark))
    source.seek(0)
    return first == mark


class _Reading:
    """The content of the files of one import.

    Attributes:
        talks: Conversations that are one object in their file.
        texts: Memories and documents.
        batches: Requests of OpenAI batches, and their answers, which may be in another file.
    """

    def __init__(self, report: ConversationsReport) -> None:
        from perdure.cli.import_openai import Batches

        self._report = report
        self.talks: list[Conversation] = []
        self.texts: list[SavedText] = []
        self.batches = Batches()
        self._files: list[_Found] = []

    def finish(self) -> list[Conversation]:
        """Return the conversations of all files."""
        self._report.skipped += self.batches.add_answers()
        for found in self._files:
            talks = [*found.lines.build_conversations(), *found.sessions.build_conversations()]
            for talk in talks if found.archive.is_archive else ():
                talk.is_archived = True
            self.talks += talks
            self._report.records += found.archive.records
            if found.archive.left_out:
                self._report.left_out["item of another person"] += found.archive.left_out
        return self.talks

    def archives(self) -> Iterator[ArchiveLines]:
        """Yield the archives of persons among the files."""
        yield from (found.archive for found in self._files if found.archive.is_archive)

    def read(self, path: Path, source: IO[bytes] | None) -> None:
        """Read a file or a folder. Raise an error if it contains nothing that can be imported."""
        called = "stdin" if path == Path("-") else str(path)
        is_any, why, where = False, "", ""
        try:
            for name, data in _files(path, called, source, self._report):
                where = "" if name == called else f"{name!r}, "
                text = data.decode(jsonlib.detect_encoding(data))
                is_found, problem = self._read_text(name, called, text, where)
                is_any, why = is_any or is_found, why or problem
        except zipfile.BadZipFile as exc:
            raise ImportFailed(f"{called!r} cannot be unpacked: {exc}") from exc
        except UnicodeDecodeError as exc:
            raise ImportFailed(f"{called!r} is not UTF-8 text: {where}byte {exc.start}") from exc
        if not is_any:
            raise ImportFailed(
                f"{called!r} {why or 'holds no conversations'}; expected an export of ChatGPT or "
                "Claude (ZIP, folder, conversations.json), of Open WebUI or LibreChat, a session "
                "of Claude Code or Codex, a shared link's JSON, JSONL of messages, or a database "
                "of langgraph or of perdure"
            )

    def _read_text(self, name: str, called: str, text: str, where: str) -> tuple[bool, str]:
        """Read the text of a file. Return whether it has a conversation, and the reason if not."""
        from perdure.cli.conversation import MalformedPart, Problem, iter_json_values
        from perdure.cli.import_agents import SessionsReader
        from perdure.cli.import_archive import ArchiveLines
        from perdure.cli.import_lines import JsonLinesReader

        file, is_any, why = name if name == called else f"{called}/{name}", False, ""
        found = _Found(file, JsonLinesReader(file), SessionsReader(file), self, ArchiveLines())
        self._files.append(found)
        for number, value in iter_json_values(text):
            try:
                if isinstance(value, MalformedPart):
                    raise value
                if not _collect(str(number), value, found):
                    raise _explain_unknown(value)
                is_any = True
            except MalformedPart as exc:
                why = why or _explain_failure(exc, where)
                self._report.skipped.append(Problem(str(exc), f"{name}, {number}"))
        return is_any, why


def _explain_failure(problem: MalformedPart, where: str) -> str:
    """Return why a file with this problem contains no conversations, or "" if that is unknown."""
    wrong = problem.__cause__
    if isinstance(wrong, jsonlib.JSONDecodeError):
        return f"is not valid JSON: {where}line {wrong.lineno}, column {wrong.colno}"
    if str(problem) == _UNKNOWN:
        return ""
    why = str(problem)
    return why if why.startswith(_LINKS) else f"holds no conversations: {where}{why}"


def _explain_unknown(value: Any) -> MalformedPart:
    """Return the error for a value that holds no conversation."""
    from perdure.cli.conversation import MalformedPart
    from perdure.cli.import_claude import files_of_manifest

    zips = files_of_manifest(value) if isinstance(value, dict) else []
    if zips:
        return MalformedPart(
            f"{_LINKS}: download {', '.join(zips)} from them, and import these files"
        )
    return MalformedPart(_UNKNOWN)


def _files(
    path: Path, called: str, source: IO[bytes] | None, report: ConversationsReport
) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the files that may hold conversations, one after the other."""
    if source is None:
        names = sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if entry.is_file())
        for name in _select_names(names, report):
            yield name, (path / name).read_bytes()
        for name in filter(_ZIP.search, names):
            with (path / name).open("rb") as file:
                yield from _files(path / name, name, file, report)
    elif _begins(source, b"PK"):
        with zipfile.ZipFile(source) as archive:
            for name in _select_names(sorted(archive.namelist()), report):
                info = archive.getinfo(name)
                if info.file_size > max(_SMALL, _RATIO * info.compress_size):  # never more is read
                    raise zipfile.BadZipFile(
                        f"{name!r} has {size(info.file_size)} in {size(info.compress_size)}, which "
                        f"is over {size(_SMALL)} and {_RATIO} times as much; if that is meant, "
                        "unpack the file and import the folder"
                    )
                try:
                    data = archive.read(info)
                except Exception as exc:  # each way of packing raises its own
                    why = "it is encrypted" if info.flag_bits & 1 else exc
                    raise zipfile.BadZipFile(f"{name!r}: {why}") from exc
                yield name, data
    else:
        yield called, source.read()


def _select_names(names: list[str], report: ConversationsReport) -> list[str]:
    """Return the files whose names ChatGPT and Claude use, or all JSON files if there are none.

    The report names the other JSON files. For those in the folder `frames` it names only the
    folder.
    """
    names = [name for name in names if not _JUNK.search(name) and not name.endswith("/")]
    conversations = [name for name in names if _CONVERSATIONS.search(name)]
    others = [name for name in names if _OTHERS.search(name)]
    wanted = [*conversations, *others] or [name for name in names if _JSON.search(name)]
    for name in {*names}.difference(wanted):
        folder = name.rpartition("/")[0]
        if _JSON.search(name):
            report.not_read[f"{folder}/…" if folder.startswith("frames") else name] += 1
    return wanted


class _Found(NamedTuple):
    """The parts of a file: lines, sessions, and objects that are whole conversations."""

    file: str
    lines: JsonLinesReader
    sessions: SessionsReader
    reading: _Reading
    archive: ArchiveLines


def _collect(number: str, value: Any, found: _Found, depth: int = _DEPTH) -> bool:
    """Find the conversations in a value, at some depth too. Return whether there are any."""
    from perdure.cli.import_lines import has_messages
    from perdure.cli.import_openai import convert_training_example, is_batch_line
    from perdure.memory.message_forms import is_message

    is_object = isinstance(value, dict)
    if is_object and depth == _DEPTH and found.archive.add_line(value):
        pass
    elif is_object and (read := _reader_of(value)) is not None:
        found.reading.talks.append(read(value))
    elif is_object and (read_texts := _text_reader_of(value)) is not None:
        found.reading.texts.extend(read_texts(value))
    elif is_object and depth == _DEPTH and found.sessions.add_line(value):
        pass
    elif is_object and is_batch_line(value):
        found.reading.batches.add_line(found.file, number, value, found.lines.add_conversation)
    elif is_object and (example := convert_training_example(value)) is not None:
        found.lines.add_conversation(number, example)
    elif is_object and has_messages(value):
        found.lines.add_conversation(number, value)
    elif depth == _DEPTH and is_message(value):
        found.lines.add_message(value)
    else:
        parts = value.values() if is_object else value if isinstance(value, list) else ()
        within = enumerate(parts, 1) if depth else ()
        kinds = [_collect(f"{number}.{n}", part, found, depth - 1) for n, part in within]
        return any(kinds)
    return True


def _reader_of(value: dict[str, Any]) -> Callable[[Any], Conversation] | None:
    """Return the function that reads an object as one conversation, if there is one."""
    from perdure.cli import import_chatgpt, import_claude, import_webui

    if value.keys() & {"mapping", "linear_conversation"}:
        return import_chatgpt.read
    if "chat_messages" in value:
        return import_claude.read
    if import_claude.is_design(value):
        return import_claude.read_design
    if import_webui.is_open_webui(value):
        return import_webui.build_open_webui_conversation
    return import_webui.build_librechat_conversation if import_webui.is_librechat(value) else None


def _text_reader_of(value: dict[str, Any]) -> Callable[[Any], Iterable[SavedText]] | None:
    """Return the function that reads an object as memories or documents, if there is one."""
    from perdure.cli import import_claude

    if import_claude.is_memories(value):
        return import_claude.read_memories
    return import_claude.read_project if import_claude.is_project(value) else None
