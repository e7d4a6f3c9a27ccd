"""`perdure store import` and `export`: items in files, what is wrong with them, and progress."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.cli import progress
from perdure.stores import SQLiteStore
from tests.cli.commands import attempt, error
from tests.cli.test_store import AT, read, run, seat

__all__ = ["seat"]
VALUE = {"text": "likes tea"}
NONE = {"items": 0, "versions": 0, "skipped": 0, "unsuitable": 0}
MEMORY = {"namespace": ["users", "alice"], "key": "tea", "value": VALUE}


def lines(path: Path, values: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


def memories(path: Path, count: int) -> str:
    return lines(path, [{**MEMORY, "key": f"k{number}"} for number in range(count)])


# -- out and in


def test_a_store_survives_its_export(seat: str, tmp_path: Path) -> None:
    """Versions, times and provenance come back equal, once."""
    other = "--db", str(tmp_path / "other.db")
    run("put", AT, "food", "{}", "--thread", "trip", "--actor", "\x1b\u202e", "--ttl", "99")
    run("delete", "users/bob", "hobby")
    file = str(tmp_path / "items.jsonl")
    run("export", "--output", file)
    first, again = read("import", file, *other), run("import", file, *other)

    assert first == {**NONE, "items": 2, "versions": 2}
    assert again == "0 items and 0 old versions imported, 4 already there\n"
    assert run("export", *other) == run("export") == Path(file).read_text(encoding="utf-8")
    assert read("history", AT, seat, *other) == read("history", AT, seat)


def test_an_export_is_of_a_prefix_and_perhaps_of_today(seat: str, tmp_path: Path) -> None:
    """Old versions may stay out, and stdout may be named; of nothing no file is made."""
    found = [json.loads(line) for line in run("export", AT).splitlines()]
    today = [json.loads(line) for line in run("export", "--no-versions", "-o", "-").splitlines()]
    nothing = attempt("store", "export", "users/nobody", "-o", str(tmp_path / "none.jsonl"))

    assert [(line["key"], line["version"]) for line in found] == [(seat, 1), (seat, 2)]
    assert [(line["key"], line["version"]) for line in today] == [(seat, 2), ("hobby", 1)]
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert nothing.stderr.startswith("nothing is under users/nobody, and nothing was written; ")
    assert not (tmp_path / "none.jsonl").exists()


def test_values_by_themselves(tmp_path: Path) -> None:
    """Objects of any kind go where --namespace says, each once, from stdin too."""
    file = Path(lines(tmp_path / "x.jsonl", [{"key": "one", **VALUE}, VALUE]))
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes() + b"\r\n")
    first = read("import", str(file), "--namespace", "notes")
    typed = file.read_text(encoding="utf-8")
    again = run("import", "-", "--namespace", "notes", typed=typed)

    assert first == {**NONE, "items": 2}
    assert again == "0 items and 0 old versions imported, 2 already there\n"
    assert "one" in [item["key"] for item in read("search", "notes", "tea")]


def test_an_import_ends_at_a_bad_line_and_is_resumed(tmp_path: Path) -> None:
    """What stood before the line is kept; once it is mended the rest follows."""
    file = Path(memories(tmp_path / "x.jsonl", 700))
    good = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join([*good[:600], "{oh", *good[600:]]), encoding="utf-8")
    said = str(attempt("store", "import", str(file)).exception)
    kept = len(read("search", "/", "--limit", "1000"))
    file.write_text("\n".join(good), encoding="utf-8")

    assert re.search(r"x\.jsonl': line 601: no JSON .*\. 600 lines before that are kept$", said)
    assert kept == 600
    assert read("import", str(file)) == {**NONE, "items": 100, "skipped": 600}


def test_an_import_that_is_cut_off_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends it with 130 and a line on how much is there; a second run goes on."""
    file = memories(tmp_path / "x.jsonl", 700)
    take = SQLiteStore.import_lines
    with monkeypatch.context() as patched:

        def cut(store: SQLiteStore, given: Any, *, progress: Any, **options: Any) -> Any:
            def advance(done: int, of: int | None) -> None:
                progress(done, of)
                raise KeyboardInterrupt

            return take(store, given, progress=advance, **options)

        patched.setattr(SQLiteStore, "import_lines", cut)
        ended = attempt("store", "import", file)

    assert ended.exit_code == 130
    assert ended.stderr == "cut off: 500 lines are kept; run it again to go on\n"
    assert read("import", file) == {**NONE, "items": 200, "skipped": 500}


def test_a_file_of_langgraphs_store_is_taken_over(db: Path, tmp_path: Path) -> None:
    """It is known by how it begins."""
    theirs = str(tmp_path / "theirs.db")
    with sqlite3.connect(theirs) as file:
        file.execute("CREATE TABLE store (prefix, key, value, created_at, updated_at)")
        for key, value in (("tea", json.dumps(VALUE)), ("z", "[1]")):
            row = ("users.alice", key, value, "2026-01-01", "2026-01-02")
            file.execute("INSERT INTO store VALUES (?, ?, ?, ?, ?)", row)
    file.close()
    ended = str(attempt("store", "import", theirs).exception)
    over = run("import", theirs, "--skip-unsuitable", "--db", f"{db}2")
    item = read("get", AT, "tea", "--db", f"{db}2")

    assert re.search(
        r"'z' in 'users\.alice'.* the value is a list.*1 item before that is kept", ended
    )
    assert over == "1 item and 0 old versions imported, 0 already there, 1 passed over\n"
    assert (item["value"], item["created_at"]) == (VALUE, "2026-01-01T00:00:00+00:00")


# -- progress


def test_a_bar_is_drawn_on_a_terminal(terminal: Any, tmp_path: Path) -> None:
    """It names the file and counts the lines."""
    shown = terminal("store", "import", memories(tmp_path / "x.jsonl", 1_200))

    assert shown.endswith("1,200 items and 0 old versions imported, 0 already there\n")
    assert "importing x.jsonl" in shown
    assert "1,200 lines" in shown


def test_a_search_that_takes_long_shows_that_it_is_at_work(
    seat: str, terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, once it has taken a while; what is quick says nothing."""
    quick = terminal("store", "search", "/", "aisle")
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    find = SQLiteStore.search

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return find(*args, **options)

    monkeypatch.setattr(SQLiteStore, "search", late)
    slow = terminal("store", "search", "/", "aisle")

    assert quick in slow
    assert "reading" not in quick
    assert "reading the search index" in slow


# -- errors


LINES: dict[str, tuple[bytes, str]] = {
    "array": (b"[1]", "it begins with '['; expected JSON Lines"),
    "nowhere": (b'{"x": 1}', "line 1: it names no namespace"),
    "field": (b'{"namespace": ["a"], "vale": {}}', "line 1: unknown field 'vale'; did you mean"),
    "number": (b'{"namespace": ["a"], "key": 7, "value": {}}', "line 1: its key is 7; expected"),
    "list": (b'{"namespace": ["a"], "value": [1]}', "line 1: the value is a list"),
    "reserved": (b'{"namespace": ["langgraph"], "value": {}}', "line 1: the namespace ('langg"),
    "text": (b'{"namespace": "a", "value": {}}', "line 1: the namespace is 'a'"),
    "time": (b'{"namespace": ["a"], "value": {}, "valid_from": "x"}', "line 1: Invalid isoformat"),
    "second": (b"{}\n[1]", "line 2: '[1]' is no object"),
    "utf-8": (b'{}\n{"x": "\xff"}', "line 2: no UTF-8 text, byte 8 of it is 0xff. 1 line before"),
    "cut": (b'{}\n\n{"x":', "line 3: no JSON"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_bad_file_is_told_by_its_line(
    name: str, db: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Name, line and fault, on one line; what is no such file at all begins no database."""
    content, said = LINES[name]
    Path("bad.jsonl").write_bytes(content)
    into = ["--namespace", "a"] if b"\n" in content else []
    found = error("store", "import", "bad.jsonl", *into, into=capfd)

    assert f"'bad.jsonl': {said}" in found
    assert not re.search(r"\w\(\)", found)
    assert db.exists() == (name != "array")


def test_other_databases_are_told(
    db: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file of perdure's own is no export, and options that do not fit are refused."""
    run("put", "a", "k", "{}")
    file = lines(tmp_path / "x.jsonl", [])

    assert "export its items to JSON Lines" in error("store", "import", str(db), into=capfd)
    assert "--namespace is for JSON Lines" in error(
        "store", "import", str(db), "--namespace", "a", into=capfd
    )
    assert "--skip-unsuitable is for a database" in error(
        "store", "import", file, "--skip-unsuitable", into=capfd
    )
