"""`perdure import` forms memories of what it imports, once, whatever cuts it off."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ImportFailed
from tests.exports import CONVERSATIONS, EXPORT, lines
from tests.memory_commands import attempt, read, run, talks, texts
from tests.openai_server import PATIENCE
from tests.test_cli_chat import environment

MAIN = [sys.executable, "-c", "from perdure.cli import main; main()"]
SAID = ["I am allergic to nuts", "I will keep that in mind"]


@pytest.fixture(autouse=True)
def db(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The database that commands work on."""
    path = tmp_path / "x.db"
    monkeypatch.setenv("PERDURE_DB", str(path))
    return path


def test_an_export_becomes_memories() -> None:
    """Each message of the branch that was shown is one, with its speaker, thread and time."""
    printed = attempt("import", str(EXPORT)).stdout
    again = run("import", str(EXPORT))
    found = read("memories", "--limit", "100")
    (flour,) = [each for each in found if "Wholemeal" in each["text"]]

    assert printed == (
        "3 conversations (18 new messages, 0 conversations already there), 14 memories formed\n"
    )
    assert again == (
        "3 conversations (0 new messages, 3 conversations already there), 0 memories formed\n"
    )
    assert len(found) == 14
    assert flour["provenance"]["thread_id"] == CONVERSATIONS[2]["conversation_id"]
    assert flour["provenance"]["actor"] == "assistant"
    assert flour["provenance"]["at"].startswith("2025-06-15T")


def test_a_growing_export_forms_what_is_new(tmp_path: Path) -> None:
    """The second import adds the memory of the message that was added."""
    run("import", talks(tmp_path, trip=SAID))
    report = read("import", talks(tmp_path, trip=[*SAID, "I like figs"]))

    assert (report["messages"], report["memories"]) == (1, 1)
    assert sorted(texts()) == [
        "assistant: I will keep that in mind",
        "user: I am allergic to nuts",
        "user: I like figs",
    ]


def test_without_memories_and_then_with_them(tmp_path: Path) -> None:
    """--no-memories leaves them out; the same import without it forms them."""
    file = talks(tmp_path, trip=SAID)
    without = run("import", file, "--no-memories")
    before = texts()
    after = run("import", file)

    assert without == "1 conversation (2 new messages, 0 conversations already there)\n"
    assert before == []
    assert after.endswith("(0 new messages, 1 conversation already there), 2 memories formed\n")


def test_memories_go_to_the_user_and_the_thread_that_are_named(tmp_path: Path) -> None:
    """--user says whose they are, and --prefix is part of the thread."""
    run("import", talks(tmp_path, trip=SAID), "--user", "ann", "--prefix", "old/")
    (first, *_) = read("memories", "--user", "ann")

    assert texts() == []
    assert first["namespace"] == ["memories", "ann"]
    assert first["provenance"]["thread_id"] == "old/trip"


def test_what_is_left_for_a_worker_waits(tmp_path: Path) -> None:
    """--later notes each thread, and the report says so."""
    printed = run("import", talks(tmp_path, trip=SAID, home=["I live in Ghent"]), "--later")

    assert printed.endswith("already there), their memories wait for 'perdure worker'\n")
    assert texts() == []
    assert [job["state"] for job in read("jobs")] == ["waiting", "waiting"]


def test_a_fault_keeps_the_memories_before_it(tmp_path: Path) -> None:
    """Conversations before a malformed one are formed, and counted in the error."""
    file = Path(talks(tmp_path, trip=SAID, home=["I live in Ghent"]))
    file.write_text(file.read_text(encoding="utf-8") + "{\n", encoding="utf-8")
    failed = attempt("import", str(file))

    assert isinstance(failed.exception, ImportFailed)
    assert str(failed.exception).endswith("already there), 3 memories formed before that are kept")
    assert len(texts()) == 3


def test_an_import_that_was_killed_forms_the_rest(db: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle, and the same import again: a memory for each message, and one."""
    said = {f"t{t}": [f"On day {t} I ate {n} plums" for n in range(2, 12)] for t in range(24)}
    file = talks(tmp_path, **said)
    killed = subprocess.Popen(
        [*MAIN, "import", file], env=environment(db), stdout=subprocess.DEVNULL
    )
    end = time.monotonic() + PATIENCE
    while not _threads(db) and killed.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    cut_off = _threads(db)
    run("import", file)

    assert 0 < cut_off < 24
    assert sorted(texts("--limit", "1000")) == sorted(
        f"{('user', 'assistant')[n % 2]}: {text}"
        for talk in said.values()
        for n, text in enumerate(talk)
    )


def _threads(db: Path) -> int:
    if not db.exists():
        return 0
    with SQLiteCheckpointer.open(db) as saver:
        return len(saver.threads(limit=100))


class Own(TypedDict, total=False):
    """A state whose messages are what a program makes of them."""

    messages: list[Any]


def test_a_database_that_is_taken_over_becomes_memories(tmp_path: Path) -> None:
    """So do the threads of langgraph's own saver; what holds no messages is named, and kept."""
    old = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(old)) as saver:
        for name, said in (("trip", HumanMessage(SAID[0])), ("own", ["user", SAID[0]])):
            builder: Any = StateGraph(Own)
            builder.add_node("say", lambda state: state)
            builder.add_edge(START, "say")
            graph = builder.compile(checkpointer=saver)
            graph.invoke({"messages": [said]}, {"configurable": {"thread_id": name}})
    result = attempt("import", str(old))
    again = read("import", str(old))

    assert result.stdout.endswith("already there), 1 memory formed\n")
    assert result.stderr.startswith("no memories of thread 'own': the channel 'messages'")
    assert again["memories"] == 0
    assert texts() == [f"user: {SAID[0]}"]
    assert len(read("threads")) == 2


def test_a_long_conversation_is_formed_whole(tmp_path: Path) -> None:
    """More messages than go into one transaction become as many memories, in order."""
    said = [f"Number {n} is one that I like" for n in range(120)]
    file = lines(
        tmp_path / "long.jsonl",
        [{"thread_id": "t", "role": "user", "content": text} for text in said],
    )
    run("import", str(file))

    assert [f"user: {text}" for text in said[::-1]] == texts("--limit", "200")
