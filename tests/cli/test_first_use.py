"""What a newcomer met: damaged files, long ids, missing pagers, outputs that cannot be written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure.cli import main
from perdure.cli.history import render_item_lines
from tests.cli.commands import attempt, error, folded, run
from tests.cli.exports import zipped
from tests.cli.talk import say

TALK = [{"role": "user", "content": f"I like figs {n} " * 9} for n in range(40)]


def damaged(data: bytes) -> bytes:
    """A ZIP whose first file has other bytes."""
    return data[:60] + b"\xff" * 20 + data[80:]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (damaged(zipped({"chat.json": TALK})), "cannot be unpacked: 'chat.json': "),
        (zipped({"a.json": '[{"title": '}), "is not valid JSON: 'a.json', line 1, column 12; "),
        (zipped({"a.json": b'"caf\xe9"'}), "is not UTF-8 text: 'a.json', byte 4"),
    ],
)
def test_a_damaged_export_is_a_line(
    data: bytes, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file is named, and in a ZIP what is damaged in it."""
    (tmp_path / "a.zip").write_bytes(data)

    assert f"'a.zip' {why}" in error("import", "a.zip", into=capfd)


def test_what_is_not_listed_is_told() -> None:
    """As many as the limit are all there are."""
    say("one", "hello")
    say("two", "hello")
    run("memories", "add", "I like figs", "My name is Ann", "I live in Ghent")
    shown = attempt("threads", "--limit", "1").stderr, attempt("threads", "--limit", "2").stderr

    assert shown == ("there are more than 1 threads; --limit N lists more\n", "")
    assert (
        attempt("memories", "list", "--limit", "1").stderr
        == "2 more memories; --limit N lists more\n"
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["history", ""], "the id is empty; 'perdure threads' lists ids\n"),
        (["delete", "", "--yes"], "the id is empty; 'perdure threads' lists ids\n"),
        (["threads", "--limit", "9" * 20], "less than or equal to 2147483647\n"),
    ],
)
def test_a_value_that_cannot_be_is_named(
    words: list[str], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one line."""
    say("one", "hello")

    assert error(*words, into=capfd).endswith(why)


def test_lines_may_end_as_windows_ends_them() -> None:
    """A carriage return alone is a control."""
    value = HumanMessage(["one\r\ntwo", {"type": "text", "text": "x\r\ny\rz"}])

    assert [line.text for line in render_item_lines(value)] == ["one", "two", "x", "y\rz"]


def test_without_its_pager_a_text_is_shown(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with --no-pager."""
    monkeypatch.setenv("PAGER", "/no/such/pager -R")
    say("one", "\n".join(map(str, range(50))))

    assert "\n49\n" in terminal("history", "one")


def test_a_file_that_cannot_be_opened_is_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No note speaks of memories."""
    (tmp_path / "x.db").write_text("no database" * 9)

    assert "is not an SQLite database" in error("chat", "-t", "x", "-m", "hi", into=capfd)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of Linux")
def test_an_output_that_is_full_is_a_line() -> None:
    """So it is if it is closed."""
    say("one", "hello")
    command = f"{sys.executable} -c 'from perdure.cli import main; main()' threads"
    for into, why in ((">/dev/full", "No space left"), (">&-", "stdout is closed")):
        ran = subprocess.run(command + into, shell=True, capture_output=True, text=True)

        assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
        assert why in ran.stderr


def test_a_question_goes_to_stderr_and_ctrl_c_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON stays JSON; the exit code of Ctrl-C is 130."""
    say("one", "hello")
    code = "import sys; from perdure.cli import main; main()"
    command = [sys.executable, "-c", code, "delete", "one", "--json"]

    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("typer._click.termui.visible_prompt_func", interrupted)
        patched.setattr("sys.argv", ["perdure", "delete", "one"])
        with pytest.raises(SystemExit) as ended:
            main()
    ran = subprocess.run(command, input="y\n", capture_output=True, text=True)

    assert ended.value.code == 130
    assert ran.stdout.startswith("{")
    assert json.loads(ran.stdout)["threads"] == ["one"]


def test_a_long_id_is_folded(terminal: Any) -> None:
    """It is whole over the lines of its row, which leave room for the title."""
    say("one", "hello")
    long = "x" * 60
    say(long, "hi")
    shown = terminal("threads", "--ids")

    assert folded(shown) == ["id", long, "one"]
    assert [line.split()[1:3] for line in shown.splitlines() if "h" in line] == [
        ["hi", "2"],
        ["hello", "2"],
    ]


def test_a_hit_names_its_thread() -> None:
    """By what no other id begins with."""
    say("garden-1", "I have figs in the garden", user_id="me")
    say("garden-2", "I have plums", user_id="me")
    run("worker", "--once", "--json")
    hits = run("memories", "search", "figs")

    assert hits.split("\n")[0].split() == ["day", "kind", "thread", "text"]
    assert "  garden-1  " in hits


def test_a_worker_with_nothing_to_do_prints_json() -> None:
    """An empty list."""
    run("memories", "add", "I like figs")

    assert json.loads(run("worker", "--once", "--json")) == []
