"""`perdure import` and `export`: conversations from and to files."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from perdure.cli.app import DB, AsJson, app, open_saver
from perdure.cli.output import as_json, console, counted, notes

if TYPE_CHECKING:
    from perdure.checkpointers import SQLiteCheckpointer
    from perdure.cli.transcripts import Conversation, Node

_NODE = "imported"  # metadata by which a checkpoint is found again: the id of its message


@dataclass(slots=True)
class Report:
    """What an import did."""

    conversations: int = 0
    messages: int = 0
    unchanged: int = 0


@app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(help="conversations.json of ChatGPT, JSONL, or langgraph's SQLite.")
    ],
    prefix: Annotated[str, typer.Option(help="Put before each thread id.")] = "",
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Import conversations, each as a thread, regenerated answers as forks.

    A database of langgraph-checkpoint-sqlite is taken over as it is, with all its checkpoints.
    What was imported before is left as it is, so an import may be repeated or resumed.
    """
    from perdure.cli.transcripts import read
    from perdure.errors import ImportFailed

    if _is_sqlite(file):
        if prefix:
            raise typer.BadParameter("a database is taken over under its own thread ids")
        _take_over(file, db, json)
        return
    report = Report()
    try:
        with open_saver(db) as saver, _progress(file) as count:
            for conversation in read(file):
                _store(saver, prefix, conversation, report)
                count()
    except ImportFailed as exc:
        raise ImportFailed(f"{exc}. {_said(report)} before that are kept") from exc
    if json:
        as_json({name: getattr(report, name) for name in Report.__slots__})
    else:
        console.print(_said(report), markup=False)


def _is_sqlite(file: Path) -> bool:
    """Whether a file is a database (https://sqlite.org/fileformat.html#magic_header_string)."""
    try:
        with file.open("rb") as opened:
            return opened.read(16) == b"SQLite format 3\0"
    except OSError:
        return False  # reading it as a conversation says what is wrong


def _take_over(file: Path, db: str | None, json: bool) -> None:
    with open_saver(db) as saver:
        done = saver.import_from(file)
    if json:
        as_json(asdict(done))
    else:
        console.print(
            f"{counted(done.threads, 'thread')} ({counted(done.checkpoints, 'new checkpoint')}, "
            f"{done.skipped} already there)"
        )


def _said(report: Report) -> str:
    return (
        f"{counted(report.conversations, 'conversation')} "
        f"({counted(report.messages, 'new message')}, "
        f"{counted(report.unchanged, 'conversation')} already there)"
    )


def _progress(file: Path) -> Any:
    """A progress bar on a terminal; yields what counts a conversation."""
    if not sys.stderr.isatty():
        return nullcontext(lambda: None)
    from rich.progress import Progress

    @contextmanager
    def bar() -> Any:
        with Progress(console=notes, transient=True) as progress:
            task = progress.add_task(f"importing {file.name}", total=None)
            yield lambda: progress.advance(task)

    return bar()


@dataclass(slots=True)
class _Known:
    """What is there already of a conversation: the checkpoint of each message, and the head."""

    at: dict[str, str]
    head: str | None = None
    talked_on: bool = False  # someone went on from what was imported
    pruned: bool = False
    said: set[str] = field(default_factory=set)  # messages whose own checkpoint is gone

    def lacks(self, node: Node) -> bool:
        """Whether a message is new, and what it follows is there to put it upon."""
        if node.id in self.at or node.id in self.said:
            return False
        return not self.pruned if node.parent is None else node.parent in self.at


def _store(
    saver: SQLiteCheckpointer, prefix: str, conversation: Conversation, report: Report
) -> None:
    from perdure.graphs import chat_graph

    graph = chat_graph(checkpointer=saver)
    thread_id = prefix + conversation.id
    known = _known(saver, thread_id)
    new = 0
    for node in conversation.nodes:
        if not known.lacks(node):
            continue
        if node.parent is None and known.at:
            known.at[node.id] = _second_root(saver, thread_id, next(iter(known.at.values())), node)
        else:
            config = _config(thread_id, known.at.get(node.parent or ""))
            config["metadata"] = {_NODE: node.id}
            done = graph.update_state(config, {"messages": [node.message]}, as_node="respond")
            known.at[node.id] = done["configurable"]["checkpoint_id"]
        new += 1
    head = known.head if known.talked_on else known.at.get(conversation.leaf or "", known.head)
    if new and head is not None:
        saver.rewind(thread_id, head)
    report.conversations += 1
    report.messages += new
    report.unchanged += not new


def _config(thread_id: str, checkpoint_id: str | None) -> Any:
    at = {"checkpoint_id": checkpoint_id} if checkpoint_id else {}
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": "", **at}}


def _known(saver: SQLiteCheckpointer, thread_id: str) -> _Known:
    from perdure.errors import UnknownThread

    try:
        checkpoints = saver.checkpoints(thread_id, checkpoint_ns="")
    except UnknownThread:
        return _Known({})
    at = {i.metadata[_NODE]: i.checkpoint_id for i in checkpoints[::-1] if _NODE in i.metadata}
    head = next((info for info in checkpoints if info.is_head), None)
    found = _Known(
        at,
        head.checkpoint_id if head else None,
        talked_on=head is not None and _NODE not in head.metadata,
        pruned=all(info.parent_id is not None for info in checkpoints),
    )
    parents = {info.parent_id for info in checkpoints}
    for info in checkpoints:
        if info.checkpoint_id not in parents:
            said = saver.history(thread_id, checkpoint_id=info.checkpoint_id)
            found.said |= {item.value.id for item in said}
    return found


def _second_root(saver: SQLiteCheckpointer, thread_id: str, first: str, node: Node) -> str:
    """A conversation may begin more than once: put a beginning beside the first one."""
    from langgraph.checkpoint.base import copy_checkpoint
    from langgraph.checkpoint.base.id import uuid6

    beside = saver.get_tuple(_config(thread_id, first))
    assert beside is not None
    checkpoint = copy_checkpoint(beside.checkpoint)
    checkpoint["id"] = str(uuid6(clock_seq=-2))
    checkpoint["channel_values"]["messages"] = [node.message]
    versions = {"messages": checkpoint["channel_versions"]["messages"]}
    metadata: Any = {**beside.metadata, _NODE: node.id}
    return str(
        saver.put(_config(thread_id, None), checkpoint, metadata, versions)["configurable"][
            "checkpoint_id"
        ]
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
    with open_saver(db, create=False) as saver:
        for thread_id in thread or ():
            saver.thread(thread_id)
        with _written(output) if output else nullcontext(sys.stdout) as file:
            for thread_id in thread or _all(saver):
                print(jsonlib.dumps(_exported(saver, thread_id), ensure_ascii=False), file=file)


@contextmanager
def _written(path: Path) -> Iterator[TextIO]:
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

    said = [item.value for item in saver.history(thread_id)]
    return {
        "thread_id": thread_id,
        "messages": convert_to_openai_messages(said, include_id=True),
    }
