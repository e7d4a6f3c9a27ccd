"""`perdure import` and `export`: conversations from and to files."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from perdure.cli.app import DB, AsJson, app, open_saver
from perdure.cli.forming import Import, Later
from perdure.cli.longterm import User
from perdure.cli.output import as_json, console, counted, notes
from perdure.cli.progress import progress_bar
from perdure.cli.titles import about_thread

if TYPE_CHECKING:
    from perdure.checkpointers import SQLiteCheckpointer
    from perdure.cli.transcripts import Conversation


@dataclass(slots=True)
class Report:
    """What an import did.

    Attributes:
        conversations: Those in the file that say something.
        messages: New messages.
        unchanged: Conversations of which nothing was new.
        empty: Conversations without a message.
        left_out: Messages that are hidden or not text, by kind, of conversations with news.
    """

    conversations: int = 0
    messages: int = 0
    unchanged: int = 0
    empty: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    def add(self, talk: Conversation, new: int) -> None:
        """Count a conversation of which so many messages are new."""
        self.conversations += bool(talk.nodes)
        self.empty += not talk.nodes
        self.messages += new
        self.unchanged += bool(talk.nodes) and not new
        if new:
            for kind, count in talk.left_out.items():
                self.left_out[kind] = self.left_out.get(kind, 0) + count


@app.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help="conversations.json of ChatGPT, JSONL, or langgraph's SQLite; - is stdin."
        ),
    ],
    prefix: Annotated[str, typer.Option(help="Put before each thread id.")] = "",
    no_memories: Annotated[
        bool, typer.Option("--no-memories", help="Form no memories of them.")
    ] = False,
    later: Later = False,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Import conversations, each as a thread, regenerated answers as forks, and form memories.

    A database of langgraph-checkpoint-sqlite is taken over as it is, with all its checkpoints.
    What was imported before is left as it is, so an import may be repeated or resumed.
    """
    from perdure.cli.transcripts import at_hand
    from perdure.errors import ImportFailed

    into = Import(db, user, wanted=not no_memories, later=later)
    with at_hand(file) as (called, path):
        if is_sqlite(path):
            if prefix:
                raise typer.BadParameter("a database is taken over under its own thread ids")
            _take_over(path, into, json)
            return
        report = Report()
        try:
            _import(path, called, prefix, into, report)
        except ImportFailed as exc:
            if report.conversations:
                raise ImportFailed(f"{exc}. {_said(report)}{into} before that are kept") from exc
            raise
    if json:
        as_json({**asdict(report), "memories": into.memories, "quarantined": into.quarantined})
    else:
        console.print(f"{_said(report)}{into}", markup=False)
        _print_left_out(report.left_out)


def _import(path: Path, called: Path, prefix: str, into: Import, report: Report) -> None:
    from perdure.cli.storing import store
    from perdure.cli.transcripts import read

    found = read(path, called)
    first = next(found, None)  # before there is a database: a file that is none begins none
    with into.opened() as saver, progress_bar(f"importing {called.name}", "message") as show:
        begun = 0.0
        for talk in chain([first] if first else [], found):

            def advance(done: int, talk: Conversation = talk, begun: float = begun) -> None:
                part = done / len(talk.nodes)
                show(begun + part * (talk.until - begun), report.messages + done)

            talk = replace(talk, about={**talk.about, **into.about})
            new = store(saver, prefix + talk.id, talk, advance) if talk.nodes else 0
            if talk.nodes:
                into.remember(prefix + talk.id)
            report.add(talk, new)
            begun = talk.until
            show(begun, report.messages)


def _print_left_out(left_out: dict[str, int]) -> None:
    if left_out:
        times = "\N{MULTIPLICATION SIGN}"
        kinds = ", ".join(f"{kind} {times}{count}" for kind, count in left_out.items())
        total = sum(left_out.values())
        notes.print(
            f"{counted(total, 'message')} hidden or not text "
            f"{'was' if total == 1 else 'were'} left out: {kinds}",
            markup=False,
        )


def is_sqlite(file: Path) -> bool:
    """Whether a file is a database (https://sqlite.org/fileformat.html#magic_header_string)."""
    try:
        with file.open("rb") as opened:
            return opened.read(16) == b"SQLite format 3\0"
    except OSError:
        return False  # reading it as a conversation says what is wrong


def _take_over(file: Path, into: Import, json: bool) -> None:
    from perdure.storage.flow import rows_of
    from perdure.storage.sqlite import SQLiteDatabase

    with into.opened() as saver:
        done = saver.import_from(file)
        with closing(SQLiteDatabase(file, None, read_only=True)) as source:
            rows = source.read(rows_of("SELECT DISTINCT thread_id FROM checkpoints"))
        with progress_bar("forming memories", "thread") as show:
            for number, (thread_id,) in enumerate(rows, 1):
                into.remember(thread_id)
                show(number / done.threads, number)
    if json:
        as_json({**asdict(done), "memories": into.memories, "quarantined": into.quarantined})
    else:
        console.print(
            f"{counted(done.threads, 'thread')} ({counted(done.checkpoints, 'new checkpoint')}, "
            f"{done.skipped} already there){into}"
        )


def _said(report: Report) -> str:
    empty = f", {report.empty} more without messages" if report.empty else ""
    return (
        f"{counted(report.conversations, 'conversation')} "
        f"({counted(report.messages, 'new message')}, "
        f"{counted(report.unchanged, 'conversation')} already there{empty})"
    )


@app.command()
def export(
    thread: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Threads.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All threads.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file.")] = None,
    db: DB = None,
) -> None:
    """Write what was said on threads as JSONL, one conversation a line, as `import` reads it."""
    if bool(thread) == every:
        raise typer.BadParameter("name threads, or give --all")
    with open_saver(db, create=False, reads=True) as saver:
        for thread_id in thread or ():
            saver.thread(thread_id)
        with replacing(output) if output else nullcontext(sys.stdout) as file:
            for thread_id in thread or _all(saver):
                print(jsonlib.dumps(_exported(saver, thread_id), ensure_ascii=False), file=file)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A file that takes its place only when it is complete."""
    from perdure.errors import ConfigurationError

    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        partial.replace(path)
    except OSError as exc:
        raise ConfigurationError(f"{str(path)!r} cannot be written: {exc.strerror}") from exc
    finally:
        partial.unlink(missing_ok=True)


def _all(saver: SQLiteCheckpointer) -> list[str]:
    """Every thread there is now; paging would miss those that are written to meanwhile."""
    return [info.thread_id for info in saver.threads(limit=sys.maxsize)]


def _exported(saver: SQLiteCheckpointer, thread_id: str) -> dict[str, Any]:
    from langchain_core.messages import convert_to_openai_messages

    said = [item.value for item in saver.history(thread_id) if not item.branch]
    messages: Any = convert_to_openai_messages(said, include_id=True)
    for message, value in zip(messages, said, strict=True):
        if "create_time" in value.response_metadata:
            message["create_time"] = value.response_metadata["create_time"]
    return {"thread_id": thread_id, **about_thread(saver, thread_id), "messages": messages}
