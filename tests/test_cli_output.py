"""What the commands show to people: messages of every kind, trees, and errors in their words."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

import perdure.cli
from perdure.checkpointers import SQLiteCheckpointer
from perdure.cli.output import spoken
from perdure.errors import ConfigurationError, StorageError
from perdure.graphs import chat_graph
from tests.exports import conversation, imported, run, written

DATA = "data:image/png;base64," + "iVBORw0KGgo" * 500
PARTS: list[str | dict[str, Any]] = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": DATA}},
    {"type": "audio", "data": DATA},
    "Say.",
]
CALL = {"name": "look", "args": {"at": "pond", "how": {"deep": True}, "url": DATA}, "id": "1"}


def error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the program itself prints when it ends with an error."""
    monkeypatch.setattr(sys, "argv", ["perdure", *words])
    with pytest.raises(SystemExit) as ended:
        perdure.cli.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A thread with a message of many parts and one with calls."""
    calls = [CALL, {"name": "stop", "args": {}, "id": "2"}]
    said = [HumanMessage(PARTS, id="h"), AIMessage("", tool_calls=calls, id="a")]
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        graph: Any = chat_graph(checkpointer=saver)
        config = {"configurable": {"thread_id": "t"}}
        graph.update_state(config, {"messages": said}, as_node="respond")
    return tmp_path / "x.db"


def test_parts_and_calls_are_named_in_short(db: Path) -> None:
    """Text is text, the rest its kind in brackets, calls are arrows; JSON has all of it."""
    shown = run(db, "history", "t").stdout.splitlines()
    whole = json.loads(run(db, "history", "t", "--json").stdout)
    notes = run(db, "chat", "--thread", "t", "-m", "hello").stderr.splitlines()

    assert shown[0] == "● human: What is this? [image_url] [audio] Say."
    assert re.fullmatch(
        r'● ai: → look\(at=pond, how={"deep": true}, url=data.*…\) → stop\(\)', shown[1]
    )
    assert notes[1:] == shown
    assert whole[0]["content"] == PARTS
    assert whole[1]["tool_calls"][0]["args"] == CALL["args"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", "text"),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        ([1, b"x"], '[1, "[bytes]"]'),
        (("key", {"x": "ö"}), '["key", {"x": "ö"}]'),
        (AIMessage([{"type": "tool_use", "name": "f"}, "so"], tool_calls=[CALL]), None),
    ],
)
def test_no_value_is_shown_as_python(value: Any, expected: str | None) -> None:
    """Items of other channels are JSON; a call that the content repeats is said once."""
    assert spoken(value).startswith("so → look(") if expected is None else spoken(value) == expected


def test_several_beginnings_are_told_apart(tmp_path: Path) -> None:
    """Each root of a tree is a fork with what follows it beneath, the older one first."""
    shape = {"u1": None, "a1": "u1", "u2": None, "a2": "u2"}
    imported(tmp_path / "x.db", written(tmp_path / "c.json", [conversation(shape, "a2")]))
    tree = run(tmp_path / "x.db", "show", "c").stdout.splitlines()
    ids = [re.search(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}", line) for line in tree[1:]]
    found = [match[0] for match in ids if match]

    assert [line[:8] for line in tree[1:]] == ["├── fork", "│   └── ", "└── fork", "    └── "]
    assert found == sorted(found)
    assert len(found) == 4


def test_stats_speak_of_sqlite_in_words(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """People read what it means for them, programs the truth value."""
    line = next(x for x in run(db, "stats").stdout.splitlines() if x.startswith("wal_reset_bug"))
    found = json.loads(run(db, "stats", "--json").stdout)

    assert type(found["wal_reset_bug"]) is bool
    assert f"SQLite {found['sqlite_version']}" in line
    assert not re.search("True|False", line)


# -- files that cannot be written


@pytest.fixture
def unwritable(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be written, whoever runs the test."""
    opened = SQLiteCheckpointer.open.__func__  # type: ignore[attr-defined]

    def refuses(cls: Any, path: Any, /, **options: Any) -> Any:
        if not options.get("read_only"):
            raise StorageError(f"the folder of {path!r} cannot be written")
        return opened(cls, path, **options)

    monkeypatch.setattr(SQLiteCheckpointer, "open", classmethod(refuses))


READING = ["threads", "history t", "show t", "stats", "export t"]


@pytest.mark.usefixtures("unwritable")
@pytest.mark.parametrize("command", READING)
def test_looking_needs_no_writing(command: str, db: Path) -> None:
    """A file that cannot be written is read as it is; what changes it says why it cannot."""
    assert run(db, *command.split()).exception is None
    assert "cannot be written" in str(run(db, "delete", "t", "--yes").exception)


def heeding_permissions() -> list[str]:
    """What goes before a command so that permissions bind it, whoever runs the tests."""
    if os.geteuid() != 0:
        return []
    found = shutil.which("setpriv")
    assert found is not None, "as root this test needs setpriv, of util-linux"
    return [found, "--bounding-set=-dac_override,-dac_read_search"]


@pytest.mark.skipif(sys.platform == "win32", reason="folders have other permissions there")
def test_a_folder_without_permission_is_read(db: Path) -> None:
    """The same with a folder and a file that really refuse."""
    db.chmod(0o400)
    db.parent.chmod(0o500)
    script = (
        "import sys; from pathlib import Path; from tests.exports import run\n"
        "for command in sys.argv[2:]:\n"
        "    assert run(Path(sys.argv[1]), *command.split()).exception is None, command\n"
        "print(run(Path(sys.argv[1]), 'delete', 't', '--yes').exception)"
    )
    command = [*heeding_permissions(), sys.executable, "-c", script, str(db), *READING]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        db.parent.chmod(0o700)

    assert ended.returncode == 0, ended.stderr
    assert "cannot be written" in ended.stdout


# -- errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("show nope", "'perdure threads' lists them"),
        ("threads --limit 0", "--limit is 0; expected"),
        ("prune t --last -1", "--last is -1; expected"),
        ("chat -t t --keep-last 0 -m x", "--keep-last is 0; expected"),
        ("fork t t", "copy to another id"),
        ("history t --channel x", "--channel takes one of 'messages'"),
    ],
)
def test_errors_speak_of_commands(
    words: str,
    said: str,
    db: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the library calls an argument is an option here, and a call a command."""
    found = error(monkeypatch, capsys, *words.split(), "--db", str(db))

    assert said in found
    assert not re.search(r"\w\(\)|\w=|\bb'", found.replace(str(db), ""))


def test_files_that_are_none_are_named_without_bytes(
    db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither their first bytes nor Python's names for settings are shown."""
    (db.parent / "x.txt").write_text("it's a diary\n" * 99)
    diary = error(monkeypatch, capsys, "threads", "--db", str(db.parent / "x.txt"))
    monkeypatch.setenv("PERDURE_KEY", "ab" * 32)
    plain = error(monkeypatch, capsys, "threads", "--db", str(db))
    run(db.parent / "sealed.db", "chat", "-t", "t", "-m", "hi")
    monkeypatch.delenv("PERDURE_KEY")
    sealed = error(monkeypatch, capsys, "threads", "--db", str(db.parent / "sealed.db"))

    assert diary.endswith("is not an SQLite database: expected a file that perdure made\n")
    assert "unset PERDURE_KEY" in plain
    assert sealed.endswith("is encrypted; set PERDURE_KEY\n")


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_message_is_refused(text: str, tmp_path: Path) -> None:
    """Nothing is said, asked or stored."""
    result = run(tmp_path / "x.db", "chat", "--thread", "t", "--message", text)

    assert isinstance(result.exception, ConfigurationError)
    assert "--message is empty" in str(result.exception)
    assert not (tmp_path / "x.db").exists()


def test_the_responder_counts_what_the_model_sees(tmp_path: Path) -> None:
    """The number in its answer is the one in the line above it, with its own answers."""
    db = tmp_path / "x.db"
    found = [run(db, "chat", "-t", "t", "-m", text) for text in ("zebra", "yak", "xerus")]
    seen = [re.search(r"the model sees (\d+)", result.stderr) for result in found]
    counted = [re.search(r"shows me (\d+) earlier", result.stdout) for result in found]

    assert [match and match[1] for match in seen] == [None, "2", "4"]
    assert [match and match[1] for match in counted] == ["0", "2", "4"]
