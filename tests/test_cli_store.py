"""`perdure store`: what its commands show and change, for people and for programs."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.checkpointers import SQLiteCheckpointer
from perdure.cli.store import namespace, shown
from perdure.errors import EmbedderMismatch, PerdureError, StorageError, WrongKey
from perdure.stores import SQLiteStore
from perdure.stores.offline import StaticEmbedder
from tests.store_backends import Words, open_store
from tests.store_commands import AT, attempt, raw, read, rows, run, two_items


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


# -- items


def test_an_item_comes_back(seat: str) -> None:
    """People get the value on stdout and the rest as a note, programs all of it."""
    found = attempt("get", AT, seat)
    whole = read("get", AT, seat)

    assert json.loads(found.stdout) == whole["value"]
    assert whole["value"] == {"text": "prefers an aisle seat", "kind": "travel"}
    assert found.stderr == "version 2, put just now\n"
    assert (whole["namespace"], whole["key"], whole["version"]) == (["users", "alice"], seat, 2)
    assert (whole["valid_to"], whole["expires_at"], whole["provenance"]) == (None, None, None)


def test_a_value_has_several_forms(db: Path, tmp_path: Path) -> None:
    """An argument, a file, stdin and --text say the same."""
    (tmp_path / "value.json").write_text('{"text": "tea"}', encoding="utf-8-sig")
    said = [
        run("put", "a", "1", '{"text": "tea"}'),
        run("put", "a", "2", f"@{tmp_path / 'value.json'}"),
        run("put", "a", "3", "-", typed='{"text": "tea"}'),
        run("put", "a", "4", "--text", "tea"),
    ]

    assert said == [f"'{key}' of a is at version 1\n" for key in (1, 2, 3, 4)]
    assert [item["value"] for item in read("search", "a")] == [{"text": "tea"}] * 4


def test_history_says_when(seat: str) -> None:
    """Each version has its times, and at the moment it was put it is what is there."""
    found = read("history", AT, seat)
    table = rows(run("history", AT, seat))
    first, second = (item["valid_from"] for item in found)
    run("delete", AT, seat, "--if-version", "2")

    assert table[0] == ["version", "from", "to", "value"]
    assert [row[0] for row in table[1:]] == ["1", "2"]
    assert table[1][1:3] == [table[1][1], table[2][1]]
    assert read("get", AT, seat, "--as-of", table[1][1])["version"] == 1
    assert read("get", AT, seat, "--as-of", second)["version"] == 2
    assert [item["version"] for item in read("search", AT, "--as-of", first)] == [1]
    assert read("namespaces") == [["users", "bob"]]
    assert attempt("get", AT, seat).exit_code == 1
    assert read("history", AT, seat)[1]["valid_to"] is not None


def test_provenance_and_life_are_told(db: Path) -> None:
    """What put is told of where an item comes from is stored, shown and searched by."""
    words = "--thread trip --checkpoint c --message m1 --message m2 --actor ann --trust user"
    run("put", "a", "k", "{}", *words.split(), "--position", "3", "--said-at", "2026-01-31T09:30Z")
    run("put", "a", "short", "{}", "--ttl", "5")
    whence = read("get", "a", "k")["provenance"]
    note = attempt("get", "a", "short").stderr

    assert whence == {
        **{"thread_id": "trip", "checkpoint_id": "c", "message_ids": ["m1", "m2"]},
        **{"actor": "ann", "trust": "user", "position": 3, "at": "2026-01-31T09:30:00+00:00"},
    }
    assert attempt("get", "a", "k").stderr.endswith(", said by ann, from thread 'trip'\n")
    found = read("search", "/", "--provenance", '{"actor": "ann"}')
    assert [item["key"] for item in found] == ["k"]
    expires = re.search("expires (.*Z)", note)
    assert expires is not None
    assert datetime.fromisoformat(expires[1]) > datetime.now(UTC)


def test_search_finds(seat: str) -> None:
    """With a query the best comes first with its score; without, there is none."""
    found = read("search", "/", "windows and aisles")
    table = rows(run("search", "/", "windows and aisles", "--limit", "1"))

    assert found[0]["key"] == seat
    assert found[0]["score"] > 0
    assert found[0]["parts"] is None
    assert table[0] == ["score", "namespace", "key", "value"]
    assert table[1][1:3] == [AT, seat]
    assert rows(run("search", AT)) == [
        ["namespace", "key", "value"],
        [AT, seat, '{"text": "prefers an aisle seat", "kind": "travel"}'],
    ]
    assert rows(run("search", "users/bob"))[1] == ["users/bob", "hobby", "grows tomatoes"]
    assert read("search", "/", "--limit", "1", "--offset", "1") == read("search", "users/bob")
    assert read("search", "/", "aisle", "--mode", "text", "--no-context")[0]["key"] == seat
    assert read("search", "users/nobody", "aisle") == []
    nobody, nothing = attempt("search", "users/nobody"), attempt("search", AT, "--offset", "9")
    assert (nobody.stdout, nothing.stdout) == ("", "")
    assert re.fullmatch(r"nothing is under users/nobody; .*\n", nobody.stderr)
    assert nothing.stderr == f"nothing under {AT} meets all that was asked\n"


def test_search_explains(seat: str) -> None:
    """The parts of a score, and whether the filter has an index."""
    words = ("search", "/", "aisle", "--filter", '{"kind": "travel"}', "--explain")
    before = attempt(*words)
    made = run("index", "kind"), run("index"), read("index")
    after = attempt(*words)

    assert made == ("path\nkind\n", "path\nkind\n", ["kind"])
    assert (before.stderr, after.stderr) == ("index used: none\n", "index used: kind\n")
    assert rows(after.stdout)[0] == ["score", "namespace", "key", "value", "parts"]
    assert "text" in read(*words)[0]["parts"]
    assert read("index", "kind", "--drop") == []


def test_why_not_tells(seat: str) -> None:
    """Where an item stands in its namespace or a prefix, and by which parts; or what bars it."""
    words = ("why-not", "users/bob", "hobby", "a window seat")
    alone, under = rows(run(*words)), rows(run(*words, "--prefix", "users", "--mode", "text"))
    whole = read(*words, "--prefix", "/")
    first = read("history", AT, seat)[0]["valid_from"]

    def reason(*options: str, of: tuple[str, ...] = words) -> str:
        return str(read(*of, *options)["reason"])

    assert alone[:2] == [["0 of 1 items score higher"], ["part", "score"]]
    assert under[:3] == [["1 of 2 items score higher"], ["part", "score"], ["text", "0.000"]]
    assert (whole["rank"], "text" in whole["parts"]) == (2, True)
    assert "filter" in reason("--filter", '{"kind": "travel"}')
    assert "filter" in reason("--provenance", '{"actor": "ann"}')
    assert reason("--as-of", first) == "there is no such item"
    assert reason("--no-context", "--prefix", AT) == "it is not under the prefix"
    assert reason("--as-of", first, of=("why-not", AT, seat, "window")).startswith("0 of 1")


# -- namespaces


@given(st.lists(st.text(min_size=1).filter(lambda label: "\0" not in label)))
def test_a_namespace_is_read_as_it_is_shown(labels: list[str]) -> None:
    """Whatever the labels hold, the shown form names the same namespace."""
    assert namespace(shown(tuple(labels))) == tuple(labels)


@pytest.mark.parametrize("ns", [r"a\/b/c", '["a/b","c"]', '["a/b", "c"]'])
def test_labels_may_hold_a_slash(ns: str, db: Path) -> None:
    """Escaped, or in a JSON list."""
    run("put", ns, "k", "{}")

    assert read("namespaces") == [["a/b", "c"]]
    assert rows(run("namespaces")) == [["namespace"], [r"a\/b/c"]]
    assert read("search", r"a\/b")[0]["namespace"] == ["a/b", "c"]
    assert read("search", "a") == []


def test_namespaces_are_matched(seat: str) -> None:
    """By prefix, suffix and depth, a page at a time."""
    run("put", "users/bob/notes", "k", "{}")

    assert read("namespaces", "--prefix", "*/bob") == [["users", "bob"], ["users", "bob", "notes"]]
    assert read("namespaces", "--suffix", "notes") == [["users", "bob", "notes"]]
    assert read("namespaces", "--max-depth", "1") == [["users"]]
    assert read("namespaces", "--limit", "1", "--offset", "1") == [["users", "bob"]]


# -- forgetting


@pytest.fixture
def told(db: Path) -> str:
    """The id of a message that an item rests on, in the thread trip of the same file."""
    run("-t", "trip", "-m", "I cannot eat peanuts", "--no-memory", group="chat")
    message = str(read("trip", group="history")[0]["id"])
    run("put", AT, "food", "--text", "no peanuts", "--thread", "trip", "--message", message)
    run("put", AT, "seat", "--text", "aisle")
    return message


def test_forget_counts_and_asks_first(told: str, db: Path) -> None:
    """Without a yes nothing is gone; a dry run does not even ask."""
    dry = run("forget", AT, "--query", "peanuts", "--dry-run")
    no = attempt("forget", AT, "--query", "peanuts", typed="n\n")

    assert dry == "would forget 1 item, 0 former versions and 1 message of 1 thread\n"
    assert no.exit_code == 1
    assert no.stderr.startswith("found 1 item, 0 former versions and 1 message of 1 thread\n")
    assert {item["key"] for item in read("search", AT)} == {"food", "seat"}
    assert b"peanuts" in raw(db)


def test_forget_takes_messages_too(told: str, db: Path) -> None:
    """The item, its words and the message it came from leave the file, and the receipt says so."""
    _, done, *receipt = rows(run("forget", AT, "--query", "peanuts", typed="y\n"))

    assert done == ["forgot 1 item, 0 former versions and 1 message of 1 thread"]
    assert [row[0] for row in receipt] == ["at", "threads", "hashes", "bytes gone from the file"]
    assert re.fullmatch("1: [0-9a-f]{32}", receipt[2][1])
    assert receipt[3][1] == "yes"
    assert [item["key"] for item in read("search", AT)] == ["seat"]
    assert [item["type"] for item in read("trip", group="history")] == ["ai"]
    assert b"peanut" not in raw(db)


def test_forget_by_what_is_given(told: str, db: Path) -> None:
    """By filter, by provenance and with whole threads; the receipt is whole as JSON."""
    found = read("forget", "--provenance", '{"thread_id": "trip"}', "--dry-run")
    none = read("forget", "--filter", '{"kind": "nothing"}')
    gone = read("forget", "/", "--thread", "trip", "--yes")

    assert (found["keys"], found["dry_run"]) == ([[["users", "alice"], "food"]], True)
    assert (none["items"], none["clean"]) == (0, True)
    assert (gone["items"], gone["threads"], gone["clean"]) == (2, ["trip"], True)
    assert read("namespaces") == read(group="threads") == []


def test_the_receipt_of_much_is_short(db: Path) -> None:
    """It counts the hashes and shows the first three; JSON has all."""
    for n in range(5):
        run("put", "a", f"k{n}", "--text", f"tea {n}")
    hashes = read("forget", "a", "--dry-run")["hashes"]
    shown = dict(row for row in rows(run("forget", "a", "--yes")) if len(row) == 2)

    assert len(hashes) == 5
    assert shown["hashes"] == f"5: {', '.join(hashes[:3])}, … (--json has all)"


def test_former_versions_are_dropped(seat: str) -> None:
    """By a rule, after a question, and what is there stays."""
    assert attempt("retain", "--last", "0", typed="n\n").exit_code == 1
    assert run("retain", AT, "--last", "0", typed="y\n").endswith("dropped 1 former version\n")
    assert read("retain", "--days", "0", "--yes") == {"versions": 0}
    assert [item["version"] for item in read("history", AT, seat)] == [2]


# -- looking after it


def test_stats_and_sweep(db: Path) -> None:
    """Counts for people and programs; what has expired is closed."""
    with open_store(db, clock=lambda: 1_000.0) as store:
        store.put(("a",), "k", {"x": 1}, ttl=1)
        store.put(("a",), "l", {"x": 1})

    assert read("stats")["items"] == 2
    assert run("sweep") == "closed 1 expired item\n"
    assert read("sweep") == {"items": 0}
    assert (read("stats")["items"], read("stats")["versions"]) == (1, 1)
    assert ["value_bytes", "7 B"] in rows(run("stats"))
    assert ["path", str(db)] in rows(run("stats"))


def test_vectors_of_another_model(db: Path) -> None:
    """Text search goes on, what needs vectors says what to do, and reembed does it."""
    words: Any = Words()
    with SQLiteStore.open(db, index={"embed": words, "dims": words.dims}) as store:
        store.put(("a",), "k", {"text": "a red car"})
        words.failing = True
        store.put(("a",), "l", {"text": "a blue car"})
    waiting = read("pending")
    refused = attempt("search", "a", "automobile")

    assert [(item["key"], item["attempts"]) for item in waiting] == [("l", 1)]
    assert rows(run("pending", "a"))[1][:3] == ["a", "l", "1"]
    assert isinstance(refused.exception, EmbedderMismatch)
    assert len(read("search", "a", "car", "--mode", "text")) == 2
    assert run("reembed") == "2 items got new vectors\n"
    assert read("reembed", "--pending") == {"items": 0}
    assert read("pending") == []
    assert len(read("search", "a", "automobile", "--mode", "semantic")) == 2


def test_a_reembedding_that_is_cut_off_is_seen(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C says what is done; what is left is counted, and named where items wait."""
    words: Any = Words()
    with SQLiteStore.open(db, index={"embed": words, "dims": words.dims}) as store:
        for n in range(300):
            store.put(("a",), f"k{n}", {"text": f"car {n}"})
    monkeypatch.setattr(StaticEmbedder, "quick", False)  # else there is nothing to cut off
    whole = SQLiteStore.reembed

    def cut(store: SQLiteStore, progress: Any) -> int:
        def advance(done: int, of: int | None) -> None:
            progress(done, of)
            raise KeyboardInterrupt

        return whole(store, advance)

    with monkeypatch.context() as patched:
        patched.setattr(SQLiteStore, "reembed", cut)
        ended = attempt("reembed")

    assert ended.exit_code == 130
    assert ended.stderr == "cut off: 256 items got new vectors; run it again to go on\n"
    assert read("stats")["pending"] == 44
    assert attempt("pending").stderr.startswith("44 items more of the file have vectors of another")
    assert run("reembed") == "44 items got new vectors\n"
    assert (read("stats")["pending"], attempt("pending").stderr) == (0, "")


def test_looking_needs_no_writing(seat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be written is read as it is."""
    opened = SQLiteStore.open.__func__  # type: ignore[attr-defined]

    def refuses(cls: Any, path: Any, /, **options: Any) -> Any:
        if not options.get("read_only"):
            raise StorageError(f"the folder of {path!r} cannot be written")
        return opened(cls, path, **options)

    monkeypatch.setattr(SQLiteStore, "open", classmethod(refuses))
    looking = (
        f"get {AT} seat|history {AT} seat|search / aisle|namespaces|export|index|stats|pending"
    )

    assert {attempt(*words.split()).exit_code for words in looking.split("|")} == {0}
    assert isinstance(attempt("put", "a", "k", "{}").exception, StorageError)


def test_a_file_of_threads_alone_has_an_empty_store(db: Path) -> None:
    """Looking at items where only a chat was is no error."""
    with SQLiteCheckpointer.open(db):
        pass

    assert read("search", "/") == read("namespaces") == read("pending") == []


def test_a_store_may_be_encrypted(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PERDURE_KEY encrypts items, and another key opens nothing."""
    monkeypatch.setenv("PERDURE_KEY", "ab" * 32)
    run("put", "a", "k", "--text", "a secret lagoon")
    found = read("search", "a", "lagoon")
    monkeypatch.setenv("PERDURE_KEY", "cd" * 32)
    wrong: PerdureError | None = attempt("search", "a", "lagoon").exception  # type: ignore[assignment]

    assert [item["key"] for item in found] == ["k"]
    assert isinstance(wrong, WrongKey)
    assert b"lagoon" not in raw(db)
