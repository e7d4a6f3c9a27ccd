"""`perdure import` restores no memory that was forgotten here, and counts such memories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs import chat_graph
from perdure.memory import Extraction
from perdure.stores import SQLiteStore
from tests.cli.commands import invoke, run, run_json
from tests.cli.exports import (
    START,
    ChatGPTConversation,
    build_claude_files,
    build_zip,
    write_json,
    write_jsonl,
)
from tests.cli.imported import build_two_turns, read_memory_texts, read_thread_id
from tests.cli.memory import list_memory_keys

NUTS = "user: I am allergic to nuts"
FUTURE = START + 1e9


def forget_memory(text: str) -> None:
    """Forget the memory with a text."""
    run("memories", "forget", list_memory_keys()[text], "--yes")


@pytest.fixture
def forgotten_export(tmp_path: Path) -> str:
    """Import an export, forget one of its memories, and return the file."""
    file = str(write_json(tmp_path / "c.json", [build_two_turns().json]))
    run("import", file)
    forget_memory(NUTS)
    return file


@pytest.mark.parametrize("at", [START, FUTURE], ids=["same times", "later times"])
def test_import_does_not_restore_forgotten_memory(
    forgotten_export: str, at: float, tmp_path: Path
) -> None:
    """The text comes in the same export, under another prefix, or in another conversation."""
    same = run_json("import", forgotten_export)
    copied = run_json("import", forgotten_export, "--prefix", "copy/")
    talk = ChatGPTConversation("other", at)
    talk.add_turn("I am allergic to nuts", "So you are", n=7)
    other = invoke("import", str(write_json(tmp_path / "other.json", [talk.json])))
    line = [{"role": "user", "content": "I am allergic to nuts", "timestamp": at}]
    listed = run_json("import", str(write_jsonl(tmp_path / "l.jsonl", [{"messages": line}])))

    assert [report["forgotten"] for report in (same, copied, listed)] == [0, 1, 1]
    assert "1 memory forgotten earlier and not stored again" in other.stdout
    assert "not remembered again" in other.stderr
    assert NUTS not in read_memory_texts()


def test_forgotten_text_is_remembered_if_a_later_run_repeats_it(forgotten_export: str) -> None:
    """The message of the run is new, and the imported message stays forgotten."""
    with SQLiteCheckpointer.open("x.db") as saver, SQLiteStore.open("x.db") as store:
        config: Any = {"configurable": {"thread_id": "trip", "user_id": "me"}}
        graph = chat_graph(checkpointer=saver)
        graph.invoke({"messages": [HumanMessage("And you?")]}, config)
        report = Extraction(saver, store).extract("trip", config, anew=True)
        assert (report.forgotten, read_memory_texts().count(NUTS)) == (1, 0)

        graph.invoke({"messages": [HumanMessage("I am allergic to nuts")]}, config)
        Extraction(saver, store).extract("trip", config)

    assert read_memory_texts().count(NUTS) == 1


def test_imported_fact_stays_forgotten_after_repeated_import(tmp_path: Path) -> None:
    """The assistant's own memories are imported as facts, once."""
    (tmp_path / "e.zip").write_bytes(build_zip(build_claude_files()))
    run("import", "e.zip")
    forget_memory("Personal: She lives in Ghent.")
    again = run_json("import", "e.zip")

    assert (again["memories"], again["forgotten"]) == (0, 1)
    assert "Personal: She lives in Ghent." not in read_memory_texts()
    assert read_thread_id()
