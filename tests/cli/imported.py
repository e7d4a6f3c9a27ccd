"""Functions for the tests of imports: conversations, and the contents of a database."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perdure.checkpointers import SQLiteCheckpointer
from perdure.cli.app import open_database
from perdure.cli.importing import chatgpt
from perdure.cli.importing.conversation import MessageNode
from perdure.cli.importing.import_writer import ImportWriter
from perdure.cli.importing.report import ConversationsReport
from perdure.stores import SQLiteStore
from tests.cli.commands import invoke, run_json
from tests.cli.exports import (
    START,
    ChatGPTConversation,
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


def build_two_turns(id: str = "trip", at: float = START) -> ChatGPTConversation:
    """Build a conversation of two turns."""
    talk = ChatGPTConversation(id, at)
    talk.add_turn("I am allergic to nuts", "I will keep that in mind")
    talk.add_turn("I live in Ghent", "A fine city that is")
    return talk


def read_thread_texts(thread: str, db: Path | str = "x.db") -> list[str]:
    """Return the type and text of each message of a thread, without those of branches."""
    with SQLiteCheckpointer.open(db) as saver:
        items = [item.value for item in saver.history(thread) if not item.branch]
        return [f"{item.type}: {item.text}" for item in items]


def read_current_messages(thread: str, db: str = "x.db") -> list[tuple[str, str]]:
    """Return the type and text of each message in the current state of a thread."""
    with SQLiteCheckpointer.open(db) as saver:
        stored = saver.get_tuple({"configurable": {"thread_id": thread}})
    assert stored is not None
    return [(m.type, m.text) for m in stored.checkpoint["channel_values"]["messages"]]


def read_all_thread_texts() -> list[list[str]]:
    """Return the texts of each thread, sorted by their first text."""
    with SQLiteCheckpointer.open("x.db") as saver:
        names = [head.thread_id for head in saver.heads(limit=1000)]
    return sorted(read_thread_texts(name) for name in names)


def read_thread_id(number: int = 0) -> str:
    """Return the id of the thread that was written first, or of the thread `number` later."""
    with SQLiteCheckpointer.open("x.db") as saver:
        return [head.thread_id for head in saver.heads(limit=1000)][-1 - number]


def read_memory_texts(user: str = "me") -> list[str]:
    """Return the sorted texts of a user's memories."""
    with SQLiteStore.open("x.db") as store:
        return sorted(item.value["text"] for item in store.search(("memories", user), limit=1000))


def import_and_count(*arguments: Path | str) -> tuple[int, int, int]:
    """Import files; return the numbers of conversations, new messages, unchanged conversations."""
    report = run_json("import", *map(str, arguments), "--no-memories")
    return report["conversations"], report["messages"], report["unchanged"]


def import_and_read_problems(*arguments: Path | str) -> list[tuple[str, str | None]]:
    """Import files, and return the reason and the message id of each skipped part."""
    skipped = run_json("import", *map(str, arguments))["skipped"]
    return [(entry["reason"], entry["message"]) for entry in skipped]


def search_thread_texts(text: str) -> list[str]:
    """Return the first line of each message that the thread search finds."""
    hits = json.loads(invoke("threads", "--search", text, "--json").stdout)
    return [hit["text"].partition("\n")[0] for hit in hits]


def import_as_earlier_version(file: Path, reader: Any = chatgpt.build_chatgpt_conversation) -> None:
    """Import a file like the previous version, which left out documents and reports."""
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
        ).store_conversations_as_threads("", [shorter])


def build_training_line(*texts: str, **fields: Any) -> dict[str, Any]:
    """Build a line of a training file."""
    roles = "user", "assistant"
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": messages, **fields}
