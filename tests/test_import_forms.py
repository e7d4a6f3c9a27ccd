"""What an import takes besides plain messages: titles, times, functions, pipes, one object."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from perdure.checkpointers import SQLiteCheckpointer
from perdure.cli.app import app
from perdure.errors import ImportFailed
from perdure.graphs import chat_graph
from tests.exports import CONVERSATIONS, EXPORT, conversation, imported, lines, run, written

BREAD = CONVERSATIONS[2]["conversation_id"]
USER = {"role": "user", "content": "hello"}


def values(db: Path, thread: str) -> list[Any]:
    with SQLiteCheckpointer.open(db) as saver:
        return [item.value for item in saver.history(thread) if not item.branch]


def titles(db: Path) -> dict[str, str | None]:
    found = json.loads(run(db, "threads", "--json").stdout)
    return {info["thread_id"]: info["title"] for info in found}


# -- titles and times


def test_titles_and_times_are_kept(tmp_path: Path) -> None:
    """Lists, trees and histories name the conversation; each message has its time."""
    db = tmp_path / "x.db"
    imported(db, EXPORT)
    listed = run(db, "threads").stdout.splitlines()
    tree = json.loads(run(db, "show", BREAD, "--json").stdout)

    assert sorted(map(str, titles(db).values())) == sorted(c["title"] for c in CONVERSATIONS)
    assert re.split(r"  +", listed[0])[:2] == ["thread", "title"]
    assert run(db, "show", BREAD).stdout.splitlines()[0] == f"{BREAD}  {CONVERSATIONS[2]['title']}"
    assert run(db, "history", BREAD).stdout.splitlines()[0] == CONVERSATIONS[2]["title"]
    assert [tree[0]["metadata"][name] for name in ("create_time", "update_time")] == [
        CONVERSATIONS[2][name] for name in ("create_time", "update_time")
    ]
    for message in values(db, BREAD):
        expected = CONVERSATIONS[2]["mapping"][message.id]["message"]["create_time"]
        assert expected == message.response_metadata["create_time"]


def test_a_title_stays_when_the_thread_goes_on(tmp_path: Path) -> None:
    """A chat, a program of one's own, a prune and a copy leave it where it can be found."""
    db = tmp_path / "x.db"
    imported(db, EXPORT)
    expected = titles(db)
    run(db, "chat", "--thread", BREAD, "-m", "And salt?")
    talked = titles(db)
    run(db, "prune", "--yes")
    pruned = titles(db)
    with SQLiteCheckpointer.open(db) as saver:
        graph: Any = chat_graph(checkpointer=saver)
        graph.invoke({"messages": [("user", "hi")]}, {"configurable": {"thread_id": BREAD}})
    run(db, "fork", BREAD, "copy")

    assert expected == talked == pruned
    assert titles(db) == {**expected, "copy": expected[BREAD]}


def test_an_export_carries_title_and_times(tmp_path: Path) -> None:
    """What `export` writes, `import` reads again, with all that is known of it."""
    db, other, file = tmp_path / "1.db", tmp_path / "2.db", tmp_path / "all.jsonl"
    imported(db, EXPORT)
    run(db, "export", "--all", "--output", str(file))
    imported(other, file)

    assert titles(db) == titles(other)
    assert values(db, BREAD) == values(other, BREAD)
    assert json.loads(file.read_text().splitlines()[0])["create_time"] > 1e9


@pytest.mark.parametrize("title", [None, "", "  ", 5, ["x"], "\ud800", "[b]x[/b]"])
def test_any_title_is_shown_or_left_out(title: Any, tmp_path: Path) -> None:
    """What is no text is no title, and no title means anything to the terminal."""
    db = tmp_path / "x.db"
    talk = {**conversation({"u": None}, "u"), "title": title, "create_time": "soon"}
    (tmp_path / "c.json").write_text(json.dumps([talk]), encoding="utf-8")
    expected = {"\ud800": "?", "[b]x[/b]": "[b]x[/b]"}.get(title) if type(title) is str else None
    imported(db, tmp_path / "c.json")

    assert titles(db) == {"c": expected}
    assert (expected or "human") in run(db, "history", "c").stdout.splitlines()[0]


# -- what is left out


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    """Kinds without text and hidden messages are counted by kind, empty places are not."""
    talk = conversation({"u": None, "a": "u", "b": "a", "c": "b", "d": "c", "e": "d"}, "e")
    for key in ("a", "b"):
        talk["mapping"][key]["message"]["content"] = {"content_type": "thoughts", "thoughts": []}
    talk["mapping"]["c"]["message"]["metadata"] = {"is_visually_hidden_from_conversation": True}
    talk["mapping"]["d"]["message"]["content"] = {"content_type": "text", "parts": [""]}
    file = written(tmp_path / "c.json", [talk])
    first = run(tmp_path / "x.db", "import", str(file))
    again = run(tmp_path / "x.db", "import", str(file))
    other = json.loads(run(tmp_path / "y.db", "import", str(file), "--json").stdout)

    assert first.stdout == (
        "1 conversation (2 new messages, 0 conversations already there), 2 memories formed\n"
    )
    assert first.stderr == (
        "3 messages hidden or not text were left out: "
        "thoughts \N{MULTIPLICATION SIGN}2, hidden \N{MULTIPLICATION SIGN}1\n"
    )
    assert again.stderr == ""
    assert other["left_out"] == {"thoughts": 2, "hidden": 1}


def test_conversations_without_messages_are_told_apart(tmp_path: Path) -> None:
    """They are no threads, and so not there already."""
    talks: list[dict[str, Any]] = [
        {"thread_id": "a", "messages": []},
        {"thread_id": "b", "messages": [USER]},
    ]
    file = lines(tmp_path / "c.jsonl", talks)
    done = run(tmp_path / "x.db", "import", str(file), "--no-memories")

    assert done.stdout == (
        "1 conversation (1 new message, 0 conversations already there, 1 more without messages)\n"
    )
    assert titles(tmp_path / "x.db") == {"b": None}


# -- a thread on several lines


def test_a_thread_may_go_on_on_a_later_line(tmp_path: Path) -> None:
    """The longer one is the thread; the same again is no fault."""
    db = tmp_path / "x.db"
    talk = [{"role": "user", "content": str(n)} for n in range(4)]
    found = [{"thread_id": "t", "messages": talk[:count]} for count in (2, 2, 4)]

    assert imported(db, lines(tmp_path / "c.jsonl", found)) == (3, 4, 1)
    assert [message.text for message in values(db, "t")] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        ({"messages": [USER]}, {"messages": [{**USER, "content": "other"}]}, "line 2.*line 1 "),
        ({"messages": [USER, USER]}, {"messages": [USER]}, "line 2.*line 1 "),
        ({"messages": [USER]}, USER, "line 2.*line 1 "),
        (USER, {"messages": [USER]}, "line 2.*line 1 "),
        ({**USER, "id": "x"}, {**USER, "id": "x", "content": "other"}, "line 2.*'x'.*message 1"),
    ],
)
def test_two_threads_by_one_name_are_refused(
    first: dict[str, Any], second: dict[str, Any], where: str, tmp_path: Path
) -> None:
    """Neither can be meant to be mixed with the other: both places are named."""
    file = lines(tmp_path / "c.jsonl", [{"thread_id": "t", **talk} for talk in (first, second)])
    result = run(tmp_path / "x.db", "import", str(file))

    assert isinstance(result.exception, ImportFailed)
    assert re.search(where, str(result.exception))


# -- functions


def test_functions_of_old_are_tools(tmp_path: Path) -> None:
    """An answer belongs to the newest call of its function that has none yet."""
    call = {"name": "depth", "arguments": '{"m": 1}'}
    talk: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "depth", "content": "2 m"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "depth", "content": "3 m"},
    ]
    db = tmp_path / "x.db"
    imported(db, lines(tmp_path / "t.jsonl", talk))
    found = values(db, "t")

    assert [m.type for m in found] == ["human", "ai", "tool", "ai", "tool"]
    assert [m.tool_calls[0]["args"] for m in found[1::2]] == [{"m": 1}] * 2
    assert [m.tool_call_id for m in found[2::2]] == [m.tool_calls[0]["id"] for m in found[1::2]]
    assert found[2].tool_call_id != found[4].tool_call_id


# -- where it comes from


@pytest.mark.parametrize("indent", [None, 1])
def test_one_conversation_of_chatgpt_needs_no_list(indent: int | None, tmp_path: Path) -> None:
    """A file of one conversation, on one line or many, is taken as it is."""
    text = json.dumps(CONVERSATIONS[0], indent=indent)
    (tmp_path / "c.json").write_text(text, encoding="utf-8")
    whole = written(tmp_path / "whole.json", CONVERSATIONS[:1])

    assert imported(tmp_path / "x.db", tmp_path / "c.json") == imported(tmp_path / "y.db", whole)


@pytest.mark.parametrize("text", [EXPORT.read_text(encoding="utf-8"), json.dumps(USER)])
def test_stdin_is_a_file(text: str, tmp_path: Path) -> None:
    """- reads what is piped in; a thread without an id is called stdin."""
    found = ["import", "-", "--db", str(tmp_path / "x.db"), "--json"]
    result = CliRunner().invoke(app, found, input=text)
    wrong = CliRunner().invoke(app, ["import", "-", "--db", str(tmp_path / "y.db")], input="hello")

    assert result.exception is None
    assert json.loads(result.stdout)["messages"] == (18 if len(text) > 100 else 1)
    assert len(text) > 100 or list(titles(tmp_path / "x.db")) == ["stdin"]
    assert str(wrong.exception).startswith("'stdin' begins with 'h'")


@pytest.mark.skipif(sys.platform == "win32", reason="has no named pipes")
def test_a_pipe_is_a_file(tmp_path: Path) -> None:
    """A named pipe is read once, whatever is in it: conversations, or a whole database."""
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    writing = threading.Thread(target=pipe.write_bytes, args=(EXPORT.read_bytes(),))
    writing.start()
    done = imported(tmp_path / "x.db", pipe)
    writing.join()
    command = "import sys; from perdure.cli import main; sys.argv[0] = 'perdure'; main()"
    read = subprocess.run(
        [sys.executable, "-c", command, "import", "/dev/stdin", "--db", str(tmp_path / "y.db")],
        input=EXPORT.read_bytes(),
        capture_output=True,
        check=True,
    )

    assert done == (3, 18, 0)
    assert read.stdout.decode().startswith("3 conversations (18 new messages")
