"""The command line: what every command shows and changes, and which database it opens."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import perdure.cli
from perdure.checkpointers import SQLiteCheckpointer
from perdure.cli.app import app
from perdure.errors import (
    ConfigurationError,
    InvalidConfig,
    PerdureError,
    UnknownCheckpoint,
    UnknownThread,
    WrongKey,
)

KEY = "ab" * 32


@pytest.fixture
def db(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The database that commands work on."""
    path = tmp_path / "x.db"
    monkeypatch.setenv("PERDURE_DB", str(path))
    return path


@pytest.fixture
def trip(db: Path) -> str:
    """A thread of two turns."""
    for said in ("I pack a red tent", "What do I pack?"):
        run("chat", "--thread", "trip", "--message", said)
    return "trip"


def attempt(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, arguments, input=typed)


def run(*arguments: str, typed: str = "") -> str:
    """What a command prints; it must succeed."""
    result = attempt(*arguments, typed=typed)
    assert (result.exception, result.exit_code) == (None, 0), result.output
    return result.stdout


def read(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def said(thread: str = "trip") -> list[str]:
    return [item["content"] for item in read("history", thread) if not item["branch"]]


def ids(thread: str = "trip") -> list[str]:
    """The checkpoints, the first put first."""
    return [info["checkpoint_id"] for info in reversed(read("show", thread))]


# -- looking


def test_threads_are_listed_latest_first(db: Path, trip: str) -> None:
    """The list has limit, pages and prefixes, and says the same in both forms."""
    run("chat", "--thread", "other", "--message", "hello")
    found = read("threads")
    table = run("threads").splitlines()

    assert [info["thread_id"] for info in found] == ["other", trip]
    assert [(info["items"], info["checkpoints"]) for info in found] == [(2, 4), (4, 8)]
    assert re.split(r"  +", table[0].strip()) == [
        *("thread", "items", "checkpoints", "size", "last activity"),
    ]
    assert [line.split()[:3] for line in table[1:]] == [["other", "2", "4"], ["trip", "4", "8"]]
    assert read("threads", "--limit", "1") == found[:1]
    assert read("threads", "--after", "other") == read("threads", "--prefix", "tr") == found[1:]


def test_a_piped_table_is_whole(db: Path) -> None:
    """A long id or path is one word on one line for whatever reads the pipe."""
    run("chat", "--thread", "long-" * 40, "--message", "hello")

    assert run("threads").splitlines()[1].split()[0] == "long-" * 40
    assert str(db) in run("stats")


@pytest.mark.parametrize("thread", ["[red]x", "[/b]", "a b", "*", "größe", "--x"])
def test_ids_are_shown_as_they_are(thread: str, db: Path) -> None:
    """No character of an id means anything to the terminal."""
    run("chat", f"--thread={thread}", "--message", "hello")

    assert run("show", "--", thread).splitlines()[0].strip() == thread
    assert run("threads").splitlines()[1].startswith(thread)
    assert run("history", "--", thread).startswith("● human: hello")


def test_history_marks_what_the_model_sees(db: Path) -> None:
    """With a short window the first turn is only history, for people and for programs."""
    for text in ("one", "two"):
        run("chat", "--thread", "trip", "--keep-last", "2", "--message", text)
    found = read("history", "trip")
    shown = run("history", "trip").splitlines()

    assert [(item["type"], item["seen"]) for item in found] == [
        *(("human", False), ("ai", False), ("human", True), ("ai", True)),
    ]
    assert [item["position"] for item in found] == [0, 1, 2, 3]
    assert [line[:4] for line in shown] == ["○ hu", "○ ai", "● hu", "● ai"]
    assert shown[2] == "● human: two"


def test_history_of_a_checkpoint_and_of_a_channel(trip: str) -> None:
    """A checkpoint may be named by its beginning; of an unknown channel the others are named."""
    first = ids()[1]
    unknown = attempt("history", trip, "--channel", "nothing")

    assert read("history", trip, "--checkpoint", first) == read("history", trip)[:1]
    assert run("history", trip, "--checkpoint", first[:18]) == "● human: I pack a red tent\n"
    assert read("history", trip, "--checkpoint", ids()[0]) == []
    assert isinstance(unknown.exception, ConfigurationError)
    assert re.search("no channel 'nothing' .* one of 'messages'$", str(unknown.exception))


def test_show_draws_forks_as_branches(trip: str) -> None:
    """After a rewind the old end is one branch and the new one another, with the head marked."""
    run("rewind", trip, "--to", ids()[3])
    run("chat", "--thread", trip, "--message", "Something else?")
    lines = run("show", trip).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("└── "))

    assert lines[0] == trip
    assert [line[:4] for line in lines[1:at]] == ["├── "] * 3
    assert ids()[3].startswith(lines[at].split()[1])
    assert [line[:8] for line in lines[at + 1 :]] == [
        *("    ├── ", *["    │   "] * 3, "    └── ", *["        "] * 3),
    ]
    assert [i for i, line in enumerate(lines) if "← head" in line] == [len(lines) - 1]
    assert lines[-1].endswith("4 messages ← head")


def test_show_leaves_out_the_middle_of_a_long_run(trip: str) -> None:
    """Without --all a long run is cut to its ends, and says by how much."""
    run("chat", "--thread", trip, "--message", "More?")
    short, whole = run("show", trip).splitlines(), run("show", trip, "--all").splitlines()

    assert [*whole[:4], "├── … 6 more (--all shows them)", *whole[10:]] == short
    assert [line.split()[1] for line in whole[1:]] == [name[:18] for name in ids()]


def test_show_for_programs_is_what_python_gives(db: Path, trip: str) -> None:
    """The tree as JSON has every field of checkpoints()."""
    with SQLiteCheckpointer.open(db) as saver:
        expected = [
            (i.checkpoint_id, i.parent_id, i.is_head, dict(i.counts), dict(i.metadata), i.ts)
            for i in saver.checkpoints(trip)
        ]
    names = ("checkpoint_id", "parent_id", "is_head", "counts", "metadata", "ts")

    assert [tuple(info[name] for name in names) for info in read("show", trip)] == expected


def test_stats_count_what_is_there(db: Path, trip: str) -> None:
    """Both forms name the file and count the same."""
    found = read("stats")

    assert (found["path"], found["threads"], found["checkpoints"]) == (str(db), 1, 8)
    assert found["items"] == 4
    names = [line.split()[0] for line in run("stats").splitlines() if line[:1] > " "]
    assert names == list(found)


# -- changing threads


def test_fork_copies_a_thread_or_its_beginning(trip: str) -> None:
    """The copy goes its own way; a taken id is refused."""
    run("fork", trip, "copy")
    run("fork", trip, "start", "--at", ids()[3][:18])
    run("chat", "--thread", "copy", "--message", "hello")

    assert said("copy")[:4] == said()
    assert len(said("copy")) == 6
    assert said("start") == said()[:2]
    assert isinstance(attempt("fork", trip, "copy").exception, InvalidConfig)


def test_rewind_moves_the_head_and_deletes_nothing(trip: str) -> None:
    """The thread is what it was then, its checkpoints are all there; a vague id is refused."""
    before, talk = ids(), said()
    run("rewind", trip, "--to", before[3])
    vague, wrong = (attempt("rewind", trip, "--to", name) for name in ("1", "zzz"))

    assert said() == talk[:2]
    assert ids() == before
    assert isinstance(vague.exception, UnknownCheckpoint)
    assert "8 checkpoints" in str(vague.exception)
    assert isinstance(wrong.exception, UnknownCheckpoint)
    assert "'zzz'" in str(wrong.exception)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ((), [7]),
        (("--last", "2"), [6, 7]),
        (("--turns",), [3, 7]),
        (("--days", "1"), [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_prune_keeps_what_a_rule_keeps(rule: tuple[str, ...], kept: list[int], trip: str) -> None:
    """The checkpoints go, what was said stays, and the report counts them."""
    before, talk = ids(), said()
    report = read("prune", trip, *rule)

    assert [before[i] for i in kept] == ids()
    assert talk == said()
    assert report == {"checkpoints": 8 - len(kept), "items": 0, "threads": int(len(kept) < 8)}


def test_prune_asks_before_it_takes_all_threads_or_history(db: Path) -> None:
    """Without threads it asks; --drop-history forgets what the model no longer sees."""
    for text in ("one", "two"):
        run("chat", "--thread", "trip", "--keep-last", "2", "--message", text)
    talk = said()
    refused = attempt("prune", typed="n\n")
    untouched = len(ids())
    printed = run("prune", "--drop-history", "--yes")

    assert (refused.exit_code, untouched) == (1, 9)
    # two messages; the updates that removed them from the state are in rows of their own
    assert printed == "deleted 8 checkpoints and 2 items of 1 thread\n"
    assert said() == talk[2:]


def test_delete_asks_and_takes_all_or_nothing(trip: str) -> None:
    """A no and an unknown thread leave everything; a yes, typed or given, deletes."""
    run("fork", trip, "copy")
    refused = attempt("delete", trip, typed="n\n")
    unknown = attempt("delete", trip, "nope", "--yes")
    there = [info["thread_id"] for info in read("threads", "--prefix", trip)]
    run("delete", trip, typed="y\n")
    run("delete", "copy", "--yes")

    assert refused.exit_code == 1
    assert isinstance(unknown.exception, UnknownThread)
    assert there == [trip]
    assert read("threads") == []


def test_export_writes_a_conversation_a_line(trip: str, tmp_path: Path) -> None:
    """Named threads or all, to the terminal or a file; neither or both is a wrong use."""
    run("fork", trip, "copy")
    run("export", "--all", "--output", str(tmp_path / "all.jsonl"))
    found = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]

    assert sorted(talk["thread_id"] for talk in found) == ["copy", trip]
    assert [m["content"] for m in found[0]["messages"]] == said()
    assert [m["role"] for m in found[0]["messages"]] == ["user", "assistant"] * 2
    assert json.loads(run("export", trip))["messages"] == found[0]["messages"]
    assert [attempt("export", *bad).exit_code for bad in ((), (trip, "--all"))] == [2, 2]


def test_an_export_that_fails_leaves_the_file(trip: str, tmp_path: Path) -> None:
    """An unknown thread does not cost the export of yesterday, and a missing folder is named."""
    file = tmp_path / "kept.jsonl"
    run("export", trip, "--output", str(file))
    before = file.read_bytes()
    unknown = attempt("export", "nope", "--output", str(file))
    missing = attempt("export", trip, "--output", str(tmp_path / "gone" / "x.jsonl"))

    assert isinstance(unknown.exception, UnknownThread)
    assert before == file.read_bytes()
    assert isinstance(missing.exception, PerdureError)


# -- which database, and errors


def test_the_nearest_setting_names_the_database(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """--db goes before PERDURE_DB, that before the settings file, and that before the folder."""
    config = tmp_path / "config" / "perdure" / "config.toml"

    one = tmp_path / "one.jsonl"
    one.write_text('{"role": "user", "content": "hello"}', encoding="utf-8")

    def used(*option: str) -> str:
        run("import", str(one), *option)
        return Path(read("stats", *option)["path"]).relative_to(tmp_path).as_posix()

    found = [used()]
    config.parent.mkdir(parents=True)
    config.write_text(f"db = '{tmp_path / 'file.db'}'\n", encoding="utf-8")
    found.append(used())
    monkeypatch.setenv("PERDURE_DB", str(tmp_path / "environment.db"))
    found.append(used())
    found.append(used("--db", str(tmp_path / "argument.db")))

    assert found == ["data/perdure/perdure.db", "file.db", "environment.db", "argument.db"]


@pytest.mark.parametrize(
    "command",
    [
        *("history nope", "show nope", "fork nope x", "rewind nope --to 1", "prune nope"),
        *("delete nope --yes", "export nope", "threads --after nope"),
    ],
)
def test_an_unknown_thread_is_one_line_and_exit_code_2(
    command: str, trip: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that names a thread says which one is not there."""
    monkeypatch.setattr(sys, "argv", ["perdure", *command.split()])
    with pytest.raises(SystemExit) as ended:
        perdure.cli.main()
    out, err = capsys.readouterr()

    assert (ended.value.code, out) == (2, "")
    assert re.fullmatch(r"perdure: .*'nope'.*\n", err)


def test_a_database_may_be_encrypted(
    db: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PERDURE_KEY encrypts what is said; another key, or none, changes nothing."""
    monkeypatch.setenv("PERDURE_KEY", KEY)
    run("chat", "--thread", "trip", "--message", "a secret lagoon")
    talk = said()
    wrong = []
    for key in (KEY.replace("a", "c"), ""):
        monkeypatch.setenv("PERDURE_KEY", key)
        wrong.append(attempt("chat", "--thread", "trip", "--message", "hello").exception)
    monkeypatch.setenv("PERDURE_KEY", KEY)

    assert [type(exc) for exc in wrong] == [WrongKey, WrongKey]
    assert all(str(db) in str(exc) for exc in wrong)
    assert said() == talk == ["a secret lagoon", talk[1]]
    assert not [f for f in tmp_path.glob("x.db*") if b"lagoon" in f.read_bytes()]
