"""`perdure import` and `export`: conversations from and to files."""

from __future__ import annotations

import json as jsonlib
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.app import DB, AsJson, app, open_saver
from perdure.cli.output import as_json, console, notes

if TYPE_CHECKING:
    from perdure.checkpointers import SQLiteCheckpointer
    from perdure.cli.transcripts import Conversation

_NODE = "imported"  # metadata by which a checkpoint is found again: the id of its message


@dataclass(slots=True)
class Report:
    """What an import did."""

    conversations: int = 0
    messages: int = 0
    unchanged: int = 0


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="conversations.json of ChatGPT, or JSONL.")],
    prefix: Annotated[str, typer.Option(help="Put before each thread id.")] = "",
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Import conversations, each as a thread, regenerated answers as forks.

    What was imported before is left as it is, so an import may be repeated or resumed.
    """
    from perdure.cli.transcripts import read
    from perdure.errors import ImportFailed

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


def _said(report: Report) -> str:
    return (
        f"{report.conversations} conversations ({report.messages} new messages, "
        f"{report.unchanged} conversations already there)"
    )


def _progress(file: Path) -> Any:
    """A progress bar on a terminal; yields what counts a conversation."""
    if not sys.stderr.isatty():
        return nullcontext(lambda: None)
    from contextlib import contextmanager

    from rich.progress import Progress

    @contextmanager
    def bar() -> Any:
        with Progress(console=notes, transient=True) as progress:
            task = progress.add_task(f"importing {file.name}", total=None)
            yield lambda: progress.advance(task)

    return bar()


def _store(
    saver: SQLiteCheckpointer, prefix: str, conversation: Conversation, report: Report
) -> None:
    from perdure.graphs import chat_graph

    graph = chat_graph(checkpointer=saver)
    thread_id = prefix + conversation.id
    found = _imported(saver, thread_id)
    untouched = found.pop("", None) is None
    new = [node for node in conversation.nodes if node.id not in found]
    for node in new:
        config: Any = {
            "configurable": {"thread_id": thread_id},
            "metadata": {_NODE: node.id},
        }
        if node.parent is not None:
            config["configurable"]["checkpoint_id"] = found[node.parent]
        elif found:
            config["configurable"]["checkpoint_id"] = _root(saver, thread_id)
        at = graph.update_state(config, {"messages": [node.message]}, as_node="respond")
        found[node.id] = at["configurable"]["checkpoint_id"]
    if new and untouched and conversation.leaf is not None:
        saver.rewind(thread_id, found[conversation.leaf])
    report.conversations += 1
    report.messages += len(new)
    report.unchanged += not new


def _imported(saver: SQLiteCheckpointer, thread_id: str) -> dict[str, str]:
    """The checkpoint of each imported message; under "" the head, if someone talked on since."""
    from perdure.errors import UnknownThread

    try:
        checkpoints = saver.checkpoints(thread_id, checkpoint_ns="")
    except UnknownThread:
        return {}
    found = {
        info.metadata[_NODE]: info.checkpoint_id for info in checkpoints if _NODE in info.metadata
    }
    if checkpoints and any(info.is_head and _NODE not in info.metadata for info in checkpoints):
        found[""] = checkpoints[0].checkpoint_id
    return found


def _root(saver: SQLiteCheckpointer, thread_id: str) -> str:
    return saver.checkpoints(thread_id, checkpoint_ns="")[-1].checkpoint_id


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
    with open_saver(db) as saver:
        target = output.open("w", encoding="utf-8") if output else nullcontext(sys.stdout)
        with target as file:
            for thread_id in thread or _all(saver):
                print(jsonlib.dumps(_exported(saver, thread_id), ensure_ascii=False), file=file)


def _all(saver: SQLiteCheckpointer) -> Any:
    last = None
    while page := saver.threads(limit=200, after=last):
        yield from (info.thread_id for info in page)
        last = page[-1].thread_id


def _exported(saver: SQLiteCheckpointer, thread_id: str) -> dict[str, Any]:
    from langchain_core.messages import convert_to_openai_messages

    said = [item.value for item in saver.history(thread_id)]
    return {
        "thread_id": thread_id,
        "messages": convert_to_openai_messages(said, include_id=True),
    }
