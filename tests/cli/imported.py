"""What tests of imports share: conversations, and what a database has after an import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perdure.checkpointers import SQLiteCheckpointer
from perdure.cli import import_chatgpt
from perdure.cli.app import open_database
from perdure.cli.conversation import MessageNode
from perdure.cli.import_report import ConversationsReport
from perdure.cli.import_thread import ImportWriter
from perdure.stores import SQLiteStore
from tests.cli.commands import attempt, read
from tests.cli.exports import (
    START,
    Talk,
)

CALL = {"type": "function", "id": "call-1", "function": {"name": "depth", "arguments": '{"m": 1}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.invalid/pond.png"}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You look things up."},
    {"role": "user", "content": "How deep is the pond?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2 m", "tool_call_id": "call-1"},
    {"role": "assistant", "content": "Two metres."},
    {"role": "user", "content": [{"type": "text", "text": "This pond?"}, IMAGE]},
]
USER = {"role": "user", "content": "hello"}


def simple(id: str = "trip", at: float = START) -> Talk:
    """Two turns."""
    talk = Talk(id, at)
    talk.ask("I am allergic to nuts", "I will keep that in mind")
    talk.ask("I live in Ghent", "A fine city that is")
    return talk


def said(thread: str, db: Path | str = "x.db") -> list[str]:
    with SQLiteCheckpointer.open(db) as saver:
        items = [item.value for item in saver.history(thread) if not item.branch]
        return [f"{item.type}: {item.text}" for item in items]


def state(thread: str, db: str = "x.db") -> list[tuple[str, str]]:
    """The messages that the thread has now, in their last version."""
    with SQLiteCheckpointer.open(db) as saver:
        stored = saver.get_tuple({"configurable": {"thread_id": thread}})
    assert stored is not None
    return [(m.type, m.text) for m in stored.checkpoint["channel_values"]["messages"]]


def threads() -> list[list[str]]:
    """What was said on each thread, in the order of what was said first."""
    with SQLiteCheckpointer.open("x.db") as saver:
        names = [head.thread_id for head in saver.heads(limit=1000)]
    return sorted(said(name) for name in names)


def only_thread(number: int = 0) -> str:
    """The id of the thread that was written first, or of a later one."""
    with SQLiteCheckpointer.open("x.db") as saver:
        return [head.thread_id for head in saver.heads(limit=1000)][-1 - number]


def memories(user: str = "me") -> list[str]:
    with SQLiteStore.open("x.db") as store:
        return sorted(item.value["text"] for item in store.search(("memories", user), limit=1000))


def done(*arguments: Path | str) -> tuple[int, int, int]:
    """The conversations, new messages and unchanged conversations of an import."""
    report = read("import", *map(str, arguments), "--no-memories")
    return report["conversations"], report["messages"], report["unchanged"]


def problems(*arguments: Path | str) -> list[tuple[str, str | None]]:
    found = read("import", *map(str, arguments))["skipped"]
    return [(each["reason"], each["message"]) for each in found]


def found(text: str) -> list[str]:
    """The beginnings of the messages that the search of threads finds."""
    hits = json.loads(attempt("threads", "--search", text, "--json").stdout)
    return [hit["text"].partition("\n")[0] for hit in hits]


def former_import(file: Path, reader: Any = import_chatgpt.build_chatgpt_conversation) -> None:
    """Import a file as the version before did, which left out documents and reports."""
    shorter = reader(json.loads(file.read_text())[0])
    for key, text in shorter.former_texts.items():
        parent, message, at = shorter.nodes[key]
        if text:
            about = {**message.response_metadata}
            about.pop("searched", None)
            fields = {"content": text, "response_metadata": {**about, "remember": False}}
            short = message.model_copy(update=fields)
            shorter.nodes[key] = MessageNode(parent, short, at)
        else:
            del shorter.nodes[key]
            for other, node in shorter.nodes.items():
                if node.parent == key:
                    shorter.nodes[other] = node._replace(parent=parent)
    shorter.former_texts = {}
    with open_database("x.db", None, create=True) as database:
        ImportWriter(
            database, ConversationsReport(), with_memories=True, later=False
        ).store_conversations("", [shorter])


def turns(*texts: str, **about: Any) -> dict[str, Any]:
    """A line of a training file."""
    roles = "user", "assistant"
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": messages, **about}
