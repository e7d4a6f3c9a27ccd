"""`perdure store`: what its commands show and change, for people and for programs."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.checkpointers import SQLiteCheckpointer
from perdure.cli import output
from perdure.cli.store import format_namespace, parse_namespace
from perdure.errors import EmbedderMismatch, StorageError, WrongKey
from perdure.stores import Provenance, SQLiteStore
from perdure.stores.offline import StaticEmbedder
from tests.cli import commands
from tests.cli.commands import invoke, run_and_read_error, split_rows
from tests.cli.talk import say_on_thread
from tests.store_backends import Words, open_store

AT = "users/alice"


def run(*arguments: str, stdin: str = "") -> str:
    return commands.run("store", *arguments, stdin=stdin)


def read(*arguments: str) -> Any:
    return commands.read("store", *arguments)


def store(words: str) -> Any:
    """What comes of a command, whatever that is."""
    return invoke("store", *words.split())


def raw(db: Path) -> bytes:
    """All bytes of a database and what is beside it."""
    return b"".join(path.read_bytes() for path in db.parent.glob(f"{db.name}*"))


@pytest.fixture
def seat() -> str:
    """The key of an item of two versions, beside one of somebody else."""
    run("put", AT, "seat", '{"text": "prefers a window seat", "kind": "travel"}')
    run("put", AT, "seat", '{"text": "prefers an aisle seat", "kind": "travel"}')
    run("put", "users/bob", "hobby", "--text", "grows tomatoes")
    return "seat"


# -- items


def test_an_item_comes_back(seat: str) -> None:
    """People get the value on stdout and the rest as a note, programs all of it."""
    found, whole = store(f"get {AT} se"), read("get", AT, seat)

    assert json.loads(found.stdout) == whole["value"]
    assert whole["value"] == {"text": "prefers an aisle seat", "kind": "travel"}
    assert found.stderr == "version 2, stored just now\n"
    assert (whole["namespace"], whole["key"], whole["version"]) == (["users", "alice"], seat, 2)
    assert (whole["valid_to"], whole["expires_at"], whole["provenance"]) == (None, None, None)


def test_a_value_has_several_forms() -> None:
    """An argument, stdin and --text say the same."""
    said = [
        run("put", "a", "1", '{"text": "tea"}'),
        run("put", "a", "2", "-", stdin='{"text": "tea"}'),
        run("put", "a", "3", "--text", "tea"),
    ]

    assert said == [f"'{key}' in a is at version 1\n" for key in (1, 2, 3)]
    assert [item["value"] for item in read("search", "a")] == [{"text": "tea"}] * 3
    assert read("put", "a", "4", "{}")["value"] == {}


def test_keys_are_known_by_their_beginning(seat: str) -> None:
    """Within the namespace; several are named, and one below is another's."""
    run("put", AT, "seats", "{}")
    run("put", f"{AT}/x", "other", "{}")

    assert read("get", AT, "seat")["key"] == "seat"
    assert "several ids of keys begin with 'se' (seat, seats)" in str(
        store(f"get {AT} se").exception
    )
    assert "there is no key 'oth'" in str(store(f"get {AT} oth").exception)
    assert run("delete", "users/bob", "ho") == "'hobby' in users/bob is deleted\n"
    assert [item["version"] for item in read("history", "users/bob", "hobby")] == [1]


def test_history_says_when(seat: str) -> None:
    """Each version has its times, and at the moment it was put it is what is there."""
    found = read("history", AT, "sea")
    table = split_rows(run("history", AT, seat))
    first, second = (item["valid_from"] for item in found)
    run("delete", AT, seat)

    assert table[0] == ["version", "from", "to", "value"]
    assert [row[0] for row in table[1:]] == ["1", "2"]
    assert table[1][1:3] == [table[1][1], table[2][1]]
    assert read("get", AT, seat, "--as-of", table[1][1])["version"] == 1
    assert read("get", AT, seat, "--as-of", second)["version"] == 2
    assert [item["version"] for item in read("search", AT, "--as-of", first)] == [1]
    assert read("namespaces") == [["users", "bob"]]
    assert store(f"get {AT} {seat}").exit_code == 1
    assert read("history", AT, seat)[1]["valid_to"] is not None


def test_life_is_told() -> None:
    """When an item expires is shown."""
    run("put", "a", "short", "{}", "--ttl", "5")
    expires = re.search("expires (.*Z)", store("get a short").stderr)

    assert expires is not None
    assert datetime.fromisoformat(expires[1]) > datetime.now(UTC)


def test_search_finds(seat: str) -> None:
    """With a query the best comes first with its score; without, there is none."""
    found = read("search", "/", "windows and aisles")
    table = split_rows(run("search", "/", "windows and aisles", "--limit", "1"))
    nothing = store("search users/nobody")

    assert found[0]["key"] == seat
    assert found[0]["score"] > 0
    assert "text" in found[0]["parts"]
    assert table[0] == ["score", "namespace", "key", "value"]
    assert table[1][1:3] == [AT, seat]
    assert split_rows(run("search", AT)) == [
        ["namespace", "key", "value"],
        [AT, seat, '{"text": "prefers an aisle seat", "kind": "travel"}'],
    ]
    assert split_rows(run("search", "users/bob"))[1] == ["users/bob", "hobby", "grows tomatoes"]
    assert read("search", "/", "--limit", "1") == read("search", "users/alice")
    assert read("search", "/", "aisle", "--mode", "text")[0]["key"] == seat
    assert read("search", "users/nobody", "aisle") == []
    assert (nothing.stdout, nothing.exit_code) == ("", 0)
    assert nothing.stderr.startswith(
        "no item under users/nobody matches; 'perdure store namespaces'"
    )


# -- namespaces


@given(st.lists(st.text(min_size=1).filter(lambda label: "\0" not in label)))
def test_a_namespace_is_read_as_it_is_shown(labels: list[str]) -> None:
    """Whatever the labels hold, the shown form names the same namespace."""
    assert parse_namespace(format_namespace(tuple(labels))) == tuple(labels)


def test_labels_may_hold_a_slash() -> None:
    """Escaped."""
    run("put", r"a\/b/c", "k", "{}")

    assert read("namespaces") == [["a/b", "c"]]
    assert split_rows(run("namespaces")) == [["namespace"], [r"a\/b/c"]]
    assert read("search", r"a\/b")[0]["namespace"] == ["a/b", "c"]
    assert read("search", "a") == []


def test_namespaces_are_matched(seat: str) -> None:
    """By prefix and depth, a page at a time."""
    run("put", "users/bob/notes", "k", "{}")

    assert read("namespaces", "*/bob") == [["users", "bob"], ["users", "bob", "notes"]]
    assert read("namespaces", "--limit", "1") == [["users", "alice"]]


# -- forgetting


@pytest.fixture
def told(db: Path) -> str:
    """The id of a message that an item rests on, in the thread trip of the same file."""
    say_on_thread("trip", "I cannot eat peanuts")
    message = str(commands.read("history", "trip")[0]["id"])
    whence = Provenance(thread_id="trip", message_ids=(message,))
    with SQLiteStore.open(db) as file:
        file.put(("users", "alice"), "food", {"text": "no peanuts"}, provenance=whence)
    run("put", AT, "seat", "--text", "aisle")
    return message


def test_forget_counts_and_asks_first(told: str, db: Path) -> None:
    """Without a yes nothing is gone; a dry run does not even ask."""
    dry = run("forget", AT, "--query", "peanuts", "--dry-run")
    no = invoke("store", "forget", AT, "--query", "peanuts", stdin="n\n")

    assert dry == "would forget 1 item, 0 old versions and 1 message of 1 thread\n"
    assert no.exit_code == 1
    assert "Forget 1 item, 0 old versions and 1 message of 1 thread permanently?" in no.stderr
    assert {item["key"] for item in read("search", AT)} == {"food", "seat"}
    assert b"peanuts" in raw(db)


def test_forget_takes_messages_too(told: str, db: Path) -> None:
    """The item, its words and the message it came from leave the file, and it is said so."""
    done = run("forget", AT, "--query", "peanuts", stdin="y\n").splitlines()

    assert done[-2:] == [
        "forgot 1 item, 0 old versions and 1 message of 1 thread",
        "the deleted bytes have been removed from the file",
    ]
    assert [item["key"] for item in read("search", AT)] == ["seat"]
    assert [item["type"] for item in commands.read("history", "trip")] == ["ai"]
    assert b"peanut" not in raw(db)


def test_forget_by_what_is_given(told: str) -> None:
    """By filter, by words or all; the receipt is whole as JSON."""
    found = read("forget", "--query", "no peanuts", "--dry-run")
    none = read("forget", "--filter", '{"kind": "nothing"}')
    gone = read("forget", "/", "--yes")

    assert (found["keys"], found["dry_run"]) == ([[["users", "alice"], "food"]], True)
    assert none["items"] == 0
    assert (gone["items"], gone["threads"], gone["clean"]) == (2, ["trip"], True)
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in gone["hashes"])
    assert read("namespaces") == []


# -- vectors


def words_of_another_model(db: Path, count: int = 1) -> Any:
    words: Any = Words()
    with SQLiteStore.open(db, index={"embed": words, "dims": words.dims}) as file:
        for n in range(count):
            file.put(("a",), f"k{n}", {"text": f"a red car {n}"})
        words.failing = count == 1
        if words.failing:
            file.put(("a",), "l", {"text": "a blue car"})


def test_vectors_of_another_model(db: Path) -> None:
    """Text search goes on, what needs vectors says what to do, and reembed does it."""
    words_of_another_model(db)
    refused = store("search a automobile")

    assert isinstance(refused.exception, EmbedderMismatch)
    assert "search by text" in str(refused.exception)
    assert len(read("search", "a", "car", "--mode", "text")) == 2
    assert run("reembed") == "2 items got new vectors\n"
    assert read("reembed") == {"items": 0}
    assert len(read("search", "a", "automobile", "--mode", "semantic")) == 2


def test_a_reembedding_that_is_cut_off_goes_on(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends it with 130; what is left is counted, and made by the next run."""
    words_of_another_model(db, 300)
    monkeypatch.setattr(StaticEmbedder, "quick", False)  # else there is nothing to cut off
    whole = SQLiteStore.reembed

    def cut(store: SQLiteStore, progress: Any) -> int:
        def advance(done: int, of: int | None) -> None:
            progress(done, of)
            raise KeyboardInterrupt

        return whole(store, advance)

    with monkeypatch.context() as patched:
        patched.setattr(SQLiteStore, "reembed", cut)
        ended = store("reembed")

    assert ended.exit_code == 130
    assert commands.read("stats")["missing_vectors"] == 44
    assert run("reembed") == "44 items got new vectors\n"
    assert commands.read("stats")["missing_vectors"] == 0


# -- the file


def test_looking_needs_no_writing(seat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be written is read as it is."""
    opened = SQLiteStore.open.__func__  # type: ignore[attr-defined]

    def refuses(cls: Any, path: Any, /, **options: Any) -> Any:
        if not options.get("read_only"):
            raise StorageError(f"the folder of {path!r} cannot be written")
        return opened(cls, path, **options)

    monkeypatch.setattr(SQLiteStore, "open", classmethod(refuses))
    looking = f"get {AT} seat|history {AT} seat|search / aisle|namespaces"

    assert {store(words).exit_code for words in looking.split("|")} == {0}
    assert invoke("stats").exit_code == 0
    assert isinstance(store("put a k {}").exception, StorageError)


def test_a_file_of_threads_alone_has_an_empty_store(db: Path) -> None:
    """Looking at items where only a chat was is no error."""
    with SQLiteCheckpointer.open(db):
        pass

    assert read("search", "/") == read("namespaces") == []


def test_a_store_may_be_encrypted(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PERDURE_KEY encrypts items, and another key opens nothing."""
    monkeypatch.setenv("PERDURE_KEY", "ab" * 32)
    run("put", "a", "k", "--text", "a secret lagoon")
    found = read("search", "a", "lagoon")
    monkeypatch.setenv("PERDURE_KEY", "cd" * 32)
    wrong = store("search a lagoon").exception

    assert [item["key"] for item in found] == ["k"]
    assert isinstance(wrong, WrongKey)
    assert b"lagoon" not in raw(db)


def test_expired_items_are_not_shown(db: Path) -> None:
    """They count until they are swept."""
    with open_store(db, clock=lambda: 1_000.0) as file:
        file.put(("a",), "k", {"x": 1}, ttl=1)
        file.put(("a",), "l", {"x": 1})

    assert [item["key"] for item in read("search", "a")] == ["l"]
    assert commands.read("stats")["items"] == 2


def test_a_search_that_takes_long_shows_that_it_is_at_work(
    seat: str, terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, once it has taken a while; what is quick says nothing."""
    quick = terminal("store", "search", "/", "aisle")
    monkeypatch.setattr(output, "_STATUS_DELAY_S", 0.0)
    find = SQLiteStore.search

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return find(*args, **options)

    monkeypatch.setattr(SQLiteStore, "search", late)
    slow = terminal("store", "search", "/", "aisle")

    assert quick in slow
    assert "reading" not in quick
    assert "reading the search index" in slow


def test_what_is_at_work_is_named_as_it_is(terminal: Any) -> None:
    """A name that looks like rich's markup is none."""
    assert "[/b].jsonl" in terminal("import", "[/b].jsonl")


# -- errors


BAD = {
    "no": "get users/alice no|there is no key 'no'; 'perdure store search users",
    "never": "history users/alice no|there is no key 'no'",
    "gone": "delete users/alice no|there is no key 'no'",
    "slash": "put /users/x k {}|the namespace '/users/x' begins or ends with a slash",
    "none": "put a k|pass the value either as JSON",
    "both": "put a k {} --text x|pass the value either as JSON",
    "list": "put a k [1]|the value is '[1]'; expected a JSON object",
    "json": "put a k {x}|the value is '{x}', which is not JSON",
    "NaN": 'put a k {"x":NaN}|$.x is nan, which JSON cannot represent',
    "reserved": "put langgraph k {}|which is reserved for langgraph",
    "label": "put a//b k {}|has the label ''",
    "root": "put / k {}|the namespace is empty; give at least one label, like memories",
    "ttl": "put a k {} --ttl 0|--ttl is 0.0 minutes; expected more than zero",
    "as-of": "get a k --as-of noon|Invalid value for '--as-of': 'noon' is not a time",
    "mode": "search a x --mode fuzzy|Invalid value for '--mode'",
    "limit": "search a --limit -1|Invalid value for '--limit'",
    "depth": "namespaces --limit 0|Invalid value for '--limit'",
    "filter": "search a --filter {|--filter is '{', which is not JSON",
    "operator": 'search a --filter {"x":{"$y":1}}|unknown operator \'$y\'',
    "operand": 'forget --filter {"x":{"$in":1}}|expected a list',
    "regex": 'search a --filter {"x":{"$regex":1}}|\'$regex\'; there are $eq, $ne, $gt',
    "what": "forget|nothing selects the items to erase",
    "db": "search / --db no.db|there is no database 'no.db' yet",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_words_end_with_a_line(
    name: str, seat: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It says what was expected in the words of the command line, and nothing is changed."""
    before = read("search", "/", "--limit", "99")
    words, said = BAD[name].split("|")
    found = run_and_read_error("store", *words.split(" "), capsys=capfd)

    assert said in found
    assert not re.search(r"\w\(\)|\b[a-z_]+=", found)
    assert read("search", "/", "--limit", "99") == before
    assert not (tmp_path / "no.db").exists()
