"""`perdure store`: the output and the effect of its commands."""

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
from perdure.stores.search.static_embedder import StaticEmbedder
from tests.cli import commands
from tests.cli.commands import invoke, run_and_read_error, split_rows
from tests.cli.talk import say_on_thread
from tests.store_backends import WordEmbedder, open_store

AT = "users/alice"


def run_store(*arguments: str, stdin: str = "") -> str:
    """Run a command of `perdure store` that must succeed, and return its stdout."""
    return commands.run("store", *arguments, stdin=stdin)


def run_store_json(*arguments: str) -> Any:
    """Run a command of `perdure store` with `--json`, and return the parsed output."""
    return commands.run_json("store", *arguments)


def invoke_store(command: str) -> Any:
    """Run a command of `perdure store`, and return its result."""
    return invoke("store", *command.split())


def read_database_bytes(db: Path) -> bytes:
    """Return the bytes of a database and of the files next to it."""
    return b"".join(path.read_bytes() for path in db.parent.glob(f"{db.name}*"))


@pytest.fixture
def seat_key() -> str:
    """Store an item in two versions next to an item of another user, and return its key."""
    run_store("put", AT, "seat", '{"text": "prefers a window seat", "kind": "travel"}')
    run_store("put", AT, "seat", '{"text": "prefers an aisle seat", "kind": "travel"}')
    run_store("put", "users/bob", "hobby", "--text", "grows tomatoes")
    return "seat"


# -- items


def test_get_prints_value_on_stdout_and_version_on_stderr(seat_key: str) -> None:
    """With --json, stdout has the value and all other fields."""
    result, item = invoke_store(f"get {AT} se"), run_store_json("get", AT, seat_key)

    assert json.loads(result.stdout) == item["value"]
    assert item["value"] == {"text": "prefers an aisle seat", "kind": "travel"}
    assert result.stderr == "version 2, stored just now\n"
    assert (item["namespace"], item["key"], item["version"]) == (["users", "alice"], seat_key, 2)
    assert (item["valid_to"], item["expires_at"], item["provenance"]) == (None, None, None)


def test_put_takes_value_from_argument_stdin_or_text_option() -> None:
    outputs = [
        run_store("put", "a", "1", '{"text": "tea"}'),
        run_store("put", "a", "2", "-", stdin='{"text": "tea"}'),
        run_store("put", "a", "3", "--text", "tea"),
    ]

    assert outputs == [f"'{key}' in a is at version 1\n" for key in (1, 2, 3)]
    assert [item["value"] for item in run_store_json("search", "a")] == [{"text": "tea"}] * 3
    assert run_store_json("put", "a", "4", "{}")["value"] == {}


def test_prefix_of_key_is_resolved_within_its_namespace(seat_key: str) -> None:
    """An ambiguous prefix is refused, and keys of lower namespaces do not count."""
    run_store("put", AT, "seats", "{}")
    run_store("put", f"{AT}/x", "other", "{}")

    assert run_store_json("get", AT, "seat")["key"] == "seat"
    assert "the key prefix 'se' is ambiguous: it matches seat, seats" in str(
        invoke_store(f"get {AT} se").exception
    )
    assert "there is no key 'oth'" in str(invoke_store(f"get {AT} oth").exception)
    assert run_store("delete", "users/bob", "ho") == "'hobby' in users/bob is deleted\n"
    assert [item["version"] for item in run_store_json("history", "users/bob", "hobby")] == [1]


def test_times_of_history_are_accepted_by_as_of(seat_key: str) -> None:
    """At the time of a version, `get` and `search` return this version."""
    versions = run_store_json("history", AT, "sea")
    table = split_rows(run_store("history", AT, seat_key))
    first, second = (item["valid_from"] for item in versions)
    run_store("delete", AT, seat_key)

    assert table[0] == ["version", "from", "to", "value"]
    assert [row[0] for row in table[1:]] == ["1", "2"]
    assert table[1][1:3] == [table[1][1], table[2][1]]
    assert run_store_json("get", AT, seat_key, "--as-of", table[1][1])["version"] == 1
    assert run_store_json("get", AT, seat_key, "--as-of", second)["version"] == 2
    assert [item["version"] for item in run_store_json("search", AT, "--as-of", first)] == [1]
    assert run_store_json("namespaces") == [["users", "bob"]]
    assert invoke_store(f"get {AT} {seat_key}").exit_code == 1
    assert run_store_json("history", AT, seat_key)[1]["valid_to"] is not None


def test_get_prints_when_item_expires() -> None:
    run_store("put", "a", "short", "{}", "--ttl", "5")
    expires = re.search("expires (.*Z)", invoke_store("get a short").stderr)

    assert expires is not None
    assert datetime.fromisoformat(expires[1]) > datetime.now(UTC)


def test_search_prints_scores_only_with_a_query(seat_key: str) -> None:
    """With a query, the best item comes first."""
    items = run_store_json("search", "/", "windows and aisles")
    table = split_rows(run_store("search", "/", "windows and aisles", "--limit", "1"))
    nothing = invoke_store("search users/nobody")

    assert items[0]["key"] == seat_key
    assert items[0]["score"] > 0
    assert "text" in items[0]["parts"]
    assert table[0] == ["score", "namespace", "key", "value"]
    assert table[1][1:3] == [AT, seat_key]
    assert split_rows(run_store("search", AT)) == [
        ["namespace", "key", "value"],
        [AT, seat_key, '{"text": "prefers an aisle seat", "kind": "travel"}'],
    ]
    assert split_rows(run_store("search", "users/bob"))[1] == [
        "users/bob",
        "hobby",
        "grows tomatoes",
    ]
    assert run_store_json("search", "/", "--limit", "1") == run_store_json("search", "users/alice")
    assert run_store_json("search", "/", "aisle", "--mode", "text")[0]["key"] == seat_key
    assert run_store_json("search", "users/nobody", "aisle") == []
    assert (nothing.stdout, nothing.exit_code) == ("", 0)
    assert nothing.stderr.startswith(
        "no item under users/nobody matches; 'perdure store namespaces'"
    )


# -- namespaces


@given(st.lists(st.text(min_size=1).filter(lambda label: "\0" not in label)))
def test_formatted_namespace_is_parsed_to_the_same_labels(labels: list[str]) -> None:
    """The labels may have any text."""
    assert parse_namespace(format_namespace(tuple(labels))) == tuple(labels)


def test_slash_in_label_is_escaped() -> None:
    run_store("put", r"a\/b/c", "k", "{}")

    assert run_store_json("namespaces") == [["a/b", "c"]]
    assert split_rows(run_store("namespaces")) == [["namespace"], [r"a\/b/c"]]
    assert run_store_json("search", r"a\/b")[0]["namespace"] == ["a/b", "c"]
    assert run_store_json("search", "a") == []


def test_namespaces_are_filtered_by_pattern_and_limit(seat_key: str) -> None:
    run_store("put", "users/bob/notes", "k", "{}")

    assert run_store_json("namespaces", "*/bob") == [["users", "bob"], ["users", "bob", "notes"]]
    assert run_store_json("namespaces", "--limit", "1") == [["users", "alice"]]


# -- forgetting


@pytest.fixture
def message_id(db: Path) -> str:
    """Store an item that rests on a message of the thread trip, and return the message's id."""
    say_on_thread("trip", "I cannot eat peanuts")
    stored_id = str(commands.run_json("history", "trip")[0]["id"])
    provenance = Provenance(thread_id="trip", message_ids=(stored_id,))
    with SQLiteStore.open(db) as file:
        file.put(("users", "alice"), "food", {"text": "no peanuts"}, provenance=provenance)
    run_store("put", AT, "seat", "--text", "aisle")
    return stored_id


def test_forget_prints_counts_and_asks_for_confirmation(message_id: str, db: Path) -> None:
    """Without a yes nothing is erased; a dry run does not ask."""
    dry_run = run_store("forget", AT, "--query", "peanuts", "--dry-run")
    declined = invoke("store", "forget", AT, "--query", "peanuts", stdin="n\n")

    assert dry_run == "would forget 1 item, 0 old versions and 1 message of 1 thread\n"
    assert declined.exit_code == 1
    assert "Forget 1 item, 0 old versions and 1 message of 1 thread permanently?" in declined.stderr
    assert {item["key"] for item in run_store_json("search", AT)} == {"food", "seat"}
    assert b"peanuts" in read_database_bytes(db)


def test_forget_erases_message_on_which_item_rests(message_id: str, db: Path) -> None:
    """The item, its words and the message are removed from the file, and the output says so."""
    lines = run_store("forget", AT, "--query", "peanuts", stdin="y\n").splitlines()

    assert lines[-2:] == [
        "forgot 1 item, 0 old versions and 1 message of 1 thread",
        "the deleted bytes have been removed from the file",
    ]
    assert [item["key"] for item in run_store_json("search", AT)] == ["seat"]
    assert [item["type"] for item in commands.run_json("history", "trip")] == ["ai"]
    assert b"peanut" not in read_database_bytes(db)


def test_forget_selects_items_by_query_filter_or_namespace(message_id: str) -> None:
    """With --json, the whole receipt is printed."""
    by_query = run_store_json("forget", "--query", "no peanuts", "--dry-run")
    by_filter = run_store_json("forget", "--filter", '{"kind": "nothing"}')
    by_namespace = run_store_json("forget", "/", "--yes")

    assert (by_query["keys"], by_query["dry_run"]) == ([[["users", "alice"], "food"]], True)
    assert by_filter["items"] == 0
    assert (by_namespace["items"], by_namespace["threads"], by_namespace["clean"]) == (
        2,
        ["trip"],
        True,
    )
    assert all(re.fullmatch("[0-9a-f]{32}", text_hash) for text_hash in by_namespace["hashes"])
    assert run_store_json("namespaces") == []


# -- vectors


def put_items_with_another_embedder(db: Path, count: int = 1) -> Any:
    words: Any = WordEmbedder()
    with SQLiteStore.open(db, index={"embed": words, "dims": words.dims}) as file:
        for n in range(count):
            file.put(("a",), f"k{n}", {"text": f"a red car {n}"})
        words.failing = count == 1
        if words.failing:
            file.put(("a",), "l", {"text": "a blue car"})


def test_reembed_replaces_vectors_of_another_model(db: Path) -> None:
    """Before that, text search works, and a vector search fails with the remedy."""
    put_items_with_another_embedder(db)
    refused = invoke_store("search a automobile")

    assert isinstance(refused.exception, EmbedderMismatch)
    assert "search with mode='text'" in str(refused.exception)
    assert len(run_store_json("search", "a", "car", "--mode", "text")) == 2
    assert run_store("reembed") == "2 items got new vectors\n"
    assert run_store_json("reembed") == {"items": 0}
    assert len(run_store_json("search", "a", "automobile", "--mode", "semantic")) == 2


def test_interrupted_reembed_is_completed_by_next_run(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C exits with 130; missing vectors are counted, and computed by the next run."""
    put_items_with_another_embedder(db, 300)
    monkeypatch.setattr(StaticEmbedder, "quick", False)  # else there is nothing to cut off
    reembed = SQLiteStore.reembed

    def interrupt(store: SQLiteStore, progress: Any) -> int:
        def advance(done: int, of: int | None) -> None:
            progress(done, of)
            raise KeyboardInterrupt

        return reembed(store, advance)

    with monkeypatch.context() as patched:
        patched.setattr(SQLiteStore, "reembed", interrupt)
        ended = invoke_store("reembed")

    assert ended.exit_code == 130
    assert commands.run_json("stats")["missing_vectors"] == 44
    assert run_store("reembed") == "44 items got new vectors\n"
    assert commands.run_json("stats")["missing_vectors"] == 0


# -- the file


def test_commands_that_read_work_on_read_only_file(
    seat_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be written is read as it is."""
    opened = SQLiteStore.open.__func__  # type: ignore[attr-defined]

    def open_read_only(cls: Any, path: Any, /, **options: Any) -> Any:
        if not options.get("read_only"):
            raise StorageError(f"the folder of {path!r} cannot be written")
        return opened(cls, path, **options)

    monkeypatch.setattr(SQLiteStore, "open", classmethod(open_read_only))
    commands = f"get {AT} seat|history {AT} seat|search / aisle|namespaces"

    assert {invoke_store(words).exit_code for words in commands.split("|")} == {0}
    assert invoke("stats").exit_code == 0
    assert isinstance(invoke_store("put a k {}").exception, StorageError)


def test_file_with_threads_only_has_an_empty_store(db: Path) -> None:
    """Reading items of a file that only a chat has used is not an error."""
    with SQLiteCheckpointer.open(db):
        pass

    assert run_store_json("search", "/") == run_store_json("namespaces") == []


def test_key_of_environment_encrypts_items(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another PERDURE_KEY is refused."""
    monkeypatch.setenv("PERDURE_KEY", "ab" * 32)
    run_store("put", "a", "k", "--text", "a secret lagoon")
    items = run_store_json("search", "a", "lagoon")
    monkeypatch.setenv("PERDURE_KEY", "cd" * 32)
    exception = invoke_store("search a lagoon").exception

    assert [item["key"] for item in items] == ["k"]
    assert isinstance(exception, WrongKey)
    assert b"lagoon" not in read_database_bytes(db)


def test_expired_items_are_not_shown(db: Path) -> None:
    """Expired items are counted until they are removed."""
    with open_store(db, clock=lambda: 1_000.0) as file:
        file.put(("a",), "k", {"x": 1}, ttl=1)
        file.put(("a",), "l", {"x": 1})

    assert [item["key"] for item in run_store_json("search", "a")] == ["l"]
    assert commands.run_json("stats")["items"] == 2


def test_slow_search_prints_a_status_on_terminal(
    seat_key: str, terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that is fast prints no status."""
    quick = terminal("store", "search", "/", "aisle")
    monkeypatch.setattr(output, "_STATUS_DELAY_S", 0.0)
    search = SQLiteStore.search

    def search_slowly(*args: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return search(*args, **options)

    monkeypatch.setattr(SQLiteStore, "search", search_slowly)
    slow = terminal("store", "search", "/", "aisle")

    assert quick in slow
    assert "reading" not in quick
    assert "reading the search index" in slow


def test_status_prints_file_name_without_markup(terminal: Any) -> None:
    """A name that looks like rich's markup is printed unchanged."""
    assert "[/b].jsonl" in terminal("import", "[/b].jsonl")


# -- errors


INVALID_COMMANDS = {
    "no": "get users/alice no|there is no key 'no'; run 'perdure store search users",
    "never": "history users/alice no|there is no key 'no'",
    "gone": "delete users/alice no|there is no key 'no'",
    "slash": "put /users/x k {}|the namespace '/users/x' begins or ends with a slash",
    "none": "put a k|pass the value in exactly one way",
    "both": "put a k {} --text x|pass the value in exactly one way",
    "list": "put a k [1]|the value is '[1]'; expected a JSON object",
    "json": "put a k {x}|the value is '{x}', which is not valid JSON",
    "NaN": 'put a k {"x":NaN}|$.x is nan, which JSON cannot represent',
    "reserved": "put langgraph k {}|which is reserved for langgraph",
    "label": "put a//b k {}|has the label ''",
    "root": "put / k {}|the namespace is empty; pass at least one label, like 'memories'",
    "ttl": "put a k {} --ttl 0|--ttl is 0.0; expected a number of minutes greater than 0",
    "as-of": "get a k --as-of noon|Invalid value for '--as-of': 'noon' is not a time",
    "mode": "search a x --mode fuzzy|Invalid value for '--mode'",
    "limit": "search a --limit -1|Invalid value for '--limit'",
    "depth": "namespaces --limit 0|Invalid value for '--limit'",
    "filter": "search a --filter {|--filter is '{', which is not valid JSON",
    "operator": 'search a --filter {"x":{"$y":1}}|unknown operator \'$y\'',
    "operand": 'forget --filter {"x":{"$in":1}}|expected a list',
    "regex": 'search a --filter {"x":{"$regex":1}}|\'$regex\'; expected one of $eq, $ne, $gt',
    "what": "forget|to select the items to erase",
    "db": "search / --db no.db|there is no database 'no.db' yet",
}


@pytest.mark.parametrize("name", INVALID_COMMANDS)
def test_invalid_store_command_is_a_one_line_error(
    name: str, seat_key: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error uses the terms of the command line, and nothing is changed."""
    before = run_store_json("search", "/", "--limit", "99")
    words, expected_message = INVALID_COMMANDS[name].split("|")
    message = run_and_read_error("store", *words.split(" "), capsys=capfd)

    assert expected_message in message
    assert not re.search(r"\w\(\)|\b[a-z_]+=", message)
    assert run_store_json("search", "/", "--limit", "99") == before
    assert not (tmp_path / "no.db").exists()
