"""`perdure store import` and `export`: items in files, and words that are wrong."""

from __future__ import annotations

import io
import json
import re
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import perdure.cli
from perdure.cli import progress
from perdure.stores import SQLiteStore
from tests.exports import lines
from tests.store_commands import AT, attempt, read, run, two_items

VALUE = {"text": "likes tea"}
NONE = {"items": 0, "versions": 0, "skipped": 0, "unsuitable": 0}
MEMORY = {"namespace": ["users", "alice"], "key": "tea", "value": VALUE}


@pytest.fixture
def db(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The database that commands work on."""
    path = tmp_path / "x.db"
    monkeypatch.setenv("PERDURE_DB", str(path))
    return path


@pytest.fixture
def seat(db: Path) -> str:
    """The key of an item of two versions, beside one of somebody else."""
    return two_items()


# -- out and in


@pytest.fixture
def other(tmp_path: Path) -> tuple[str, str]:
    """The option that names another database."""
    return "--db", str(tmp_path / "other.db")


def test_a_store_survives_its_export(seat: str, tmp_path: Path, other: tuple[str, str]) -> None:
    """Versions, times and provenance come back equal, once."""
    run("put", AT, "food", "{}", "--thread", "trip", "--position", "2", "--ttl", "99")
    run("delete", "users/bob", "hobby")
    file = str(tmp_path / "items.jsonl")
    run("export", "--out", file)
    first = read("import", file, *other)
    again = run("import", file, *other)

    assert first == {**NONE, "items": 2, "versions": 2}
    assert again == "0 items and 0 former versions imported, 4 already there\n"
    assert run("export", *other) == run("export") == Path(file).read_text(encoding="utf-8")
    assert read("history", AT, seat, *other) == read("history", AT, seat)


def test_an_export_is_of_a_prefix_and_perhaps_of_today(seat: str) -> None:
    """Previous versions may stay out, and stdout may be named."""
    found = [json.loads(line) for line in run("export", AT).splitlines()]
    today = [json.loads(line) for line in run("export", "--no-versions", "-o", "-").splitlines()]

    assert [(line["key"], line["version"]) for line in found] == [(seat, 1), (seat, 2)]
    assert [(line["key"], line["version"]) for line in today] == [(seat, 2), ("hobby", 1)]


def test_values_by_themselves(db: Path, tmp_path: Path) -> None:
    """Objects of any kind go where --namespace says, each once, from stdin too."""
    file = lines(tmp_path / "x.jsonl", [{"key": "one", **VALUE}, VALUE])
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes() + b"\r\n")
    text = file.read_text(encoding="utf-8")
    first = read("import", str(file), "--namespace", "notes")
    again = run("import", "-", "--namespace", "notes", typed=text)

    assert first == {**NONE, "items": 2}
    assert again == "0 items and 0 former versions imported, 2 already there\n"
    assert "one" in [item["key"] for item in read("search", "notes", "tea")]


def test_an_import_ends_at_a_bad_line_and_is_resumed(
    db: Path,
    tmp_path: Path,
) -> None:
    """What stood before the line is kept; once it is mended the rest follows."""
    items = [{**MEMORY, "key": f"k{number}"} for number in range(700)]
    file = lines(tmp_path / "x.jsonl", items)
    good = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join([*good[:600], "{oh", *good[600:]]), encoding="utf-8")
    said = str(attempt("import", str(file)).exception)
    kept = read("stats")["items"]
    file.write_text("\n".join(good), encoding="utf-8")

    assert re.search(r"x\.jsonl', line 601: no JSON .*\. 600 lines before that are kept$", said)
    assert kept == 600
    assert read("import", str(file)) == {**NONE, "items": 100, "skipped": 600}


def test_an_import_that_is_cut_off_says_what_is_kept(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends it with 130 and a line on how much is there; a second run goes on."""
    file = lines(tmp_path / "x.jsonl", [{**MEMORY, "key": f"k{n}"} for n in range(700)])

    take = SQLiteStore.import_lines
    with monkeypatch.context() as patched:

        def cut(store: SQLiteStore, given: Any, *, progress: Any, **options: Any) -> Any:
            def advance(done: int, of: int | None) -> None:
                progress(done, of)
                raise KeyboardInterrupt

            return take(store, given, progress=advance, **options)

        patched.setattr(SQLiteStore, "import_lines", cut)
        ended = attempt("import", str(file))

    assert ended.exit_code == 130
    assert ended.stderr == "cut off: 500 lines are kept; run it again to go on\n"
    assert read("import", str(file)) == {**NONE, "items": 200, "skipped": 500}


def test_nothing_to_export_makes_no_file(seat: str, tmp_path: Path) -> None:
    """It is said, and a file of that name stays as it is."""
    ended = attempt("export", "users/nobody", "-o", str(tmp_path / "none.jsonl"))

    assert (ended.exit_code, ended.stdout) == (0, "")
    assert ended.stderr.startswith("nothing is under users/nobody; ")
    assert ended.stderr.endswith("; nothing was written\n")
    assert not (tmp_path / "none.jsonl").exists()


def test_a_file_of_langgraphs_store_is_taken_over(db: Path, tmp_path: Path) -> None:
    """It is known by how it begins."""
    with sqlite3.connect(tmp_path / "theirs.db") as theirs:
        theirs.execute("CREATE TABLE store (prefix, key, value, created_at, updated_at)")
        row = ("users.alice", "tea", json.dumps(VALUE), "2026-01-01", "2026-01-02")
        theirs.execute("INSERT INTO store VALUES (?, ?, ?, ?, ?)", row)
        bad = ("users.alice", "z", "[1]", "2026-01-01", "2026-01-02")
        theirs.execute("INSERT INTO store VALUES (?, ?, ?, ?, ?)", bad)
    theirs.close()
    ended = str(attempt("import", str(tmp_path / "theirs.db")).exception)
    run("delete", AT, "tea")
    over = run("import", str(tmp_path / "theirs.db"), "--skip-unsuitable", "--db", f"{db}2")

    assert re.search(
        r"'z' in 'users\.alice'.* the value is a list.*1 item before that is kept$", ended
    )
    assert over == "1 item and 0 former versions imported, 0 already there, 1 passed over\n"
    with sqlite3.connect(tmp_path / "theirs.db") as theirs:
        theirs.execute("DELETE FROM store WHERE key = 'z'")
    theirs.close()

    assert read("import", str(tmp_path / "theirs.db")) == {**NONE, "items": 1}
    assert read("get", AT, "tea")["value"] == VALUE
    assert read("get", AT, "tea")["created_at"] == "2026-01-01T00:00:00+00:00"


def test_a_bar_is_drawn_on_a_terminal(
    db: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It names the file, its share and the lines; nothing of it reaches stdout."""
    drawn = io.StringIO()
    monkeypatch.setattr(progress, "notes", Console(file=drawn, force_terminal=True, width=120))
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    file = lines(tmp_path / "x.jsonl", [{**MEMORY, "key": f"k{n}"} for n in range(1_200)])
    shown = run("import", str(file))

    assert shown == "1200 items and 0 former versions imported, 0 already there\n"
    assert "importing x.jsonl" in drawn.getvalue()
    assert re.search(r"100%.*1,200 lines", drawn.getvalue())


def test_a_search_that_takes_long_shows_that_it_is_at_work(
    seat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, on stderr, once it has taken a while; what is quick says nothing."""
    drawn = io.StringIO()
    monkeypatch.setattr(progress, "notes", Console(file=drawn, force_terminal=True, width=120))
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    quick = run("search", "/", "aisle")
    said = drawn.getvalue()
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    find = SQLiteStore.search

    def late(*args: Any, **options: Any) -> Any:
        for _ in range(1000):
            if drawn.getvalue():
                return find(*args, **options)
            time.sleep(0.01)
        raise AssertionError("nothing was shown")

    monkeypatch.setattr(SQLiteStore, "search", late)

    assert (said, run("search", "/", "aisle")) == ("", quick)
    assert "reading the search index" in drawn.getvalue()


# -- errors


BAD = {
    "no": "get users/alice no|there is no 'no' in 'users/alice'",
    "never": "history users/alice no|there never was a 'no'",
    "gone": "delete users/alice no|there is no 'no'",
    "version": "delete users/alice seat --if-version 7|is at version 2, --if-version is 7",
    "slash": "put /users/x k {}|the namespace '/users/x' begins or ends with a slash",
    "none": "put a k|give the value as JSON",
    "both": "put a k {} --text x|give the value as JSON",
    "list": "put a k [1]|the value is '[1]'; expected a JSON object",
    "json": "put a k {x}|the value is '{x}', which is no JSON",
    "NaN": 'put a k {"x":NaN}|$.x is nan, which JSON cannot say',
    "file": "put a k @nowhere.json|'nowhere.json' cannot be read",
    "reserved": "put langgraph k {}|which langgraph keeps for itself",
    "label": "put a//b k {}|has the label ''",
    "root": "put / k {}|the namespace is empty; give at least one label, like memories",
    "array": 'put ["a", k {}|is no JSON list',
    "number": 'put ["a",1] k {}|has the label 1',
    "ttl": "put a k {} --ttl 0|--ttl is 0.0 minutes; expected more than zero",
    "said": "put a k {} --said-at noon|--said-at is 'noon'; expected a moment",
    "as-of": "get a k --as-of noon|--as-of is 'noon'; expected a moment",
    "mode": "search a x --mode fuzzy|--mode is 'fuzzy'",
    "limit": "search a --limit -1|--limit is -1",
    "offset": "namespaces --offset -1|--offset is -1",
    "depth": "namespaces --max-depth 0|--max-depth is 0; expected 1 or more",
    "filter": "search a --filter {|--filter is '{', which is no JSON",
    "operator": 'search a --filter {"x":{"$y":1}}|unknown operator \'$y\'',
    "operand": 'forget --filter {"x":{"$in":1}}|expected a list',
    "regex": 'search a --filter {"x":{"$regex":1}}|\'$regex\'; there are $eq, $ne, $gt',
    "actor": "search a --provenance {\"actr\":1}|unknown field 'actr'; did you mean 'actor'?",
    "keep": 'forget --provenance {"thread":{"$ne":"x"}}|did you mean \'thread_id\'?',
    "whence": "search a --provenance 3|--provenance is '3'; expected a JSON object",
    "what": "forget|nothing says what to forget",
    "thread": "forget --thread no|there is no thread 'no'; 'perdure threads' lists them",
    "rule": "retain|no rule is given; give --last or --days",
    "negative": "retain --last -1 --yes|--last is -1",
    "path": "index a;b|cannot index the path 'a;b'",
    "no index": "index kind --drop|there is no index on 'kind'; 'perdure store index' lists them",
    "drop": "index --drop|--drop needs the path",
    "out": "export --out no/where|cannot be written",
    "missing": "import no.jsonl|'no.jsonl' cannot be read",
    "folder": "import .|'.' cannot be read",
    "db": "search / --db no.db|there is no database 'no.db' yet; 'perdure store put' begins one",
}


def error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the program itself prints when it ends with an error: one line."""
    monkeypatch.setattr(sys, "argv", ["perdure", "store", *words])
    with pytest.raises(SystemExit) as ended:
        perdure.cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert re.fullmatch(r"perdure: .*\n", said)
    return said


@pytest.mark.parametrize("name", BAD)
def test_bad_words_end_with_a_line(
    name: str,
    seat: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It says what was expected in the words of the command line, and nothing is changed."""
    monkeypatch.chdir(tmp_path)
    before = run("export")
    words, said = BAD[name].split("|")
    found = error(monkeypatch, capsys, *words.split(" "))

    assert said in found
    assert not re.search(r"\w\(\)|\b[a-z_]+=", found)
    assert run("export") == before
    assert not (tmp_path / "no.db").exists()


LINES: dict[str, tuple[bytes, str]] = {
    "array": (b"[1]", "begins with '['; expected JSON Lines"),
    "nowhere": (b'{"x": 1}', "line 1: it names no namespace; give --namespace"),
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
    name: str,
    db: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Name, line and fault, on one line; what is no such file at all begins no database."""
    content, said = LINES[name]
    (db.parent / "bad.jsonl").write_bytes(content)
    into = ["--namespace", "a"] if b"\n" in content else []
    found = error(monkeypatch, capsys, "import", str(db.parent / "bad.jsonl"), *into)

    assert "bad.jsonl'" in found
    assert said in found
    assert not re.search(r"\w\(\)", found)
    assert db.exists() == (name != "array")


def test_other_models_and_databases_are_told(
    db: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file of vectors of another model says what the command line can do."""
    index: Any = {"embed": lambda texts: [[1.0, 0.0] for _ in texts], "dims": 2}
    with SQLiteStore.open(db, index=index) as store:
        store.put(("a",), "k", {"text": "tea"})
    model = error(monkeypatch, capsys, "search", "a", "tea")
    database = error(monkeypatch, capsys, "import", str(db))
    named = error(monkeypatch, capsys, "import", str(db), "--namespace", "a")
    (db.parent / "x.jsonl").write_text("{}", encoding="utf-8")
    skipping = error(monkeypatch, capsys, "import", f"{db.parent}/x.jsonl", "--skip-unsuitable")

    assert "search with --mode text, or let 'perdure store reembed' make all" in model
    assert "bring its items over with 'perdure store export' and 'perdure store import'" in database
    assert "--namespace is for JSON Lines" in named
    assert "--skip-unsuitable is for a database" in skipping
