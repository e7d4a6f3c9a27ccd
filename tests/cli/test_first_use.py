"""Faults that newcomers met: damaged files, long ids, missing pagers, outputs that are full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure.cli import main
from perdure.cli.history import render_message_or_channel_item_lines
from tests.cli.commands import invoke, join_first_cells, run, run_and_read_error
from tests.cli.exports import build_zip
from tests.cli.talk import say_on_thread

TALK = [{"role": "user", "content": f"I like figs {n} " * 9} for n in range(40)]


def damage_zip(data: bytes) -> bytes:
    """Return the bytes of a ZIP with its first member damaged."""
    return data[:60] + b"\xff" * 20 + data[80:]


@pytest.mark.parametrize(
    ("data", "expected_error"),
    [
        (damage_zip(build_zip({"chat.json": TALK})), " cannot be unpacked: 'chat.json': "),
        (
            build_zip({"a.json": '[{"title": '}),
            ", because it is not valid JSON: 'a.json', line 1, column 12; ",
        ),
        (
            build_zip({"a.json": b'"caf\xe9"'}),
            " is not UTF-8 text: 'a.json', invalid byte at offset 4",
        ),
    ],
)
def test_import_of_damaged_file_is_a_one_line_error(
    data: bytes, expected_error: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error names the file, and in a ZIP also the damaged member."""
    (tmp_path / "a.zip").write_bytes(data)

    assert f"'a.zip'{expected_error}" in run_and_read_error("import", "a.zip", capsys=capfd)


def test_list_says_if_there_are_more_entries_than_its_limit() -> None:
    """A list with exactly as many entries as its limit prints no note."""
    say_on_thread("one", "hello")
    say_on_thread("two", "hello")
    run("memories", "add", "I like figs", "My name is Ann", "I live in Ghent")
    shown = invoke("threads", "--limit", "1").stderr, invoke("threads", "--limit", "2").stderr

    assert shown == ("there are more than 1 threads; pass --limit N to list more\n", "")
    assert (
        invoke("memories", "list", "--limit", "1").stderr
        == "2 more memories; pass --limit N to list more\n"
    )


@pytest.mark.parametrize(
    ("words", "expected_error"),
    [
        (["history", ""], "the id is empty; run 'perdure threads' to list the ids\n"),
        (["delete", "", "--yes"], "the id is empty; run 'perdure threads' to list the ids\n"),
        (["threads", "--limit", "9" * 20], "less than or equal to 2147483647\n"),
    ],
)
def test_invalid_value_is_a_one_line_error(
    words: list[str], expected_error: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """An empty id and a limit that is too large are named."""
    say_on_thread("one", "hello")

    assert run_and_read_error(*words, capsys=capfd).endswith(expected_error)


def test_history_splits_lines_at_windows_line_ends() -> None:
    """A carriage return without a newline is a control character."""
    value = HumanMessage(["one\r\ntwo", {"type": "text", "text": "x\r\ny\rz"}])

    assert [line.text for line in render_message_or_channel_item_lines(value)] == [
        "one",
        "two",
        "x",
        "y\rz",
    ]


def test_history_is_printed_if_pager_is_missing(
    terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is that of --no-pager."""
    monkeypatch.setenv("PAGER", "/no/such/pager -R")
    say_on_thread("one", "\n".join(map(str, range(50))))

    assert "\n49\n" in terminal("history", "one")


def test_chat_with_file_that_is_not_sqlite_is_a_one_line_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is no other note, such as one about memories."""
    (tmp_path / "x.db").write_text("no database" * 9)

    assert "is not an SQLite database" in run_and_read_error(
        "chat", "-t", "x", "-m", "hi", capsys=capfd
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of Linux")
def test_full_or_closed_stdout_is_a_one_line_error() -> None:
    """The exit code is 2, and the error says what is wrong with the output."""
    say_on_thread("one", "hello")
    command = f"{sys.executable} -c 'from perdure.cli import main; main()' threads"
    for redirection, expected_error in (
        (">/dev/full", "No space left"),
        (">&-", "stdout is closed"),
    ):
        process = subprocess.run(command + redirection, shell=True, capture_output=True, text=True)

        assert (process.returncode, process.stderr.count("\n")) == (2, 1)
        assert expected_error in process.stderr


def test_confirmation_goes_to_stderr_and_ctrl_c_exits_with_130(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With --json, only JSON is printed to stdout."""
    say_on_thread("one", "hello")
    code = "import sys; from perdure.cli import main; main()"
    command = [sys.executable, "-c", code, "delete", "one", "--json"]

    def interrupt(_: str) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("typer._click.termui.visible_prompt_func", interrupt)
        patched.setattr("sys.argv", ["perdure", "delete", "one"])
        with pytest.raises(SystemExit) as exit_info:
            main()
    process = subprocess.run(command, input="y\n", capture_output=True, text=True)

    assert exit_info.value.code == 130
    assert process.stdout.startswith("{")
    assert json.loads(process.stdout)["threads"] == ["one"]


def test_long_id_is_folded_over_lines_of_its_row(terminal: Any) -> None:
    """The id is complete over the lines of its row, which leave room for the title."""
    say_on_thread("one", "hello")
    long = "x" * 60
    say_on_thread(long, "hi")
    shown = terminal("threads", "--ids")

    assert join_first_cells(shown) == ["id", long, "one"]
    assert [line.split()[1:3] for line in shown.splitlines() if "h" in line] == [
        ["hi", "2"],
        ["hello", "2"],
    ]


def test_memory_search_names_thread_of_each_hit() -> None:
    """The thread is named by a prefix that no other id has."""
    say_on_thread("garden-1", "I have figs in the garden", user_id="me")
    say_on_thread("garden-2", "I have plums", user_id="me")
    run("worker", "--once", "--json")
    hits = run("memories", "search", "figs")

    assert hits.split("\n")[0].split() == ["day", "kind", "thread", "text"]
    assert "  garden-1  " in hits


def test_worker_with_nothing_to_do_prints_empty_json_list() -> None:
    run("memories", "add", "I like figs")

    assert json.loads(run("worker", "--once", "--json")) == []


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_in_an_encoding_with_few_characters_is_complete(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows, redirected output has the encoding cp1252."""
    said = "figs \u2192 \u6f22 caf\u00e9 \U0001f600"
    say_on_thread("one", said)
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    code = "from perdure.cli import main; main()"
    command = [sys.executable, "-c", code, "history", "one", *options]

    process = subprocess.run(command, capture_output=True)

    assert (process.returncode, process.stderr) == (0, b"")
    output = process.stdout.decode("cp1252")
    if options:
        assert said in json.dumps(json.loads(output), ensure_ascii=False)
    else:
        assert "figs \\u2192 \\u6f22 caf\u00e9 \\U0001f600" in output
