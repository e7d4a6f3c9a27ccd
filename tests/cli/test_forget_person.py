"""`perdure forget --user`: it asks for the name, and says what goes and what stays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.checkpointers.owner_record import record_organisation_owners
from perdure.checkpointers.records import ClientMetadata
from perdure.checkpointers.thread_list import ThreadList
from perdure.memory import Collection
from tests.cli.commands import attempt, read, run
from tests.contracts.puts import put
from tests.people import empty_database, fill, opened


@pytest.fixture(params=["file", "postgres"])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database with everything of two people."""
    with empty_database(request.param, tmp_path) as db:
        with opened(db) as both:
            fill(both, "ann", "anns")
            fill(both, "bob", "bobs")
            both.store.put(("cities", "ann"), "home", {"text": "Ghent"})
        yield db


def names(db: str) -> set[str]:
    """Return whose threads there are."""
    return {thread["user"] for thread in read("threads", "--db", db)}


def test_the_name_must_be_typed(filled: str) -> None:
    """Another text erases nothing; the name erases all of the person."""
    wrong = attempt("forget", "--user", "ann", "--db", filled, typed="Ann\n")
    before = names(filled)
    right = attempt("forget", "--user", "ann", "--db", filled, typed="ann\n")
    again = attempt("forget", "--user", "ann", "--yes", "--db", filled)

    assert (wrong.exit_code, before) == (1, {"ann", "bob"})
    assert "nothing was erased" in wrong.stderr
    assert "erase 2 threads: anns, anns-2" in wrong.stderr
    assert "keep 1 namespaces: cities/ann" in wrong.stderr
    assert (right.exit_code, names(filled)) == (0, {"bob"})
    assert "forgot 'ann'" in right.stdout
    assert (again.exit_code, again.stdout) == (1, "")
    assert "nobody of this name" in again.stderr


def test_a_dry_run_changes_nothing(filled: str) -> None:
    shown = run("forget", "--user", "ann", "--dry-run", "--db", filled)
    planned = read("forget", "--user", "ann", "--dry-run", "--db", filled)
    still = names(filled)
    done = read("forget", "--user", "ann", "--yes", "--db", filled)

    assert "would forget 'ann'" in shown
    assert still == {"ann", "bob"}
    assert planned["erased"] == done["erased"]
    assert (planned["dry_run"], done["dry_run"]) == (True, False)
    assert done["scrubbed"] == (not filled.startswith("postgres"))


def test_keys_and_audit_records_are_listed(filled: str, tmp_path: Path) -> None:
    """They are counted and kept; files that cannot be read are named before anything is erased."""
    keys, audit = tmp_path / "keys.toml", tmp_path / "audit.jsonl"
    digest = hashlib.sha256(b"key").hexdigest()
    keys.write_text(
        "".join(f'[[keys]]\nuser = "{user}"\nsha256 = "{digest}"\n' for user in ("ann", "bob"))
    )
    records: list[dict[str, str | None]] = [{"user": user} for user in ("ann", "ann", "bob")]
    records += [{"user": "desk", "acting_for": user} for user in ("ann", "bob", None)]
    audit.write_text("".join(json.dumps(record) + "\n" for record in records))
    files = ("--keys", str(keys), "--audit", str(audit))
    missing = attempt("forget", "--user", "ann", "--yes", "--db", filled, "--keys", "no.toml")
    done = read("forget", "--user", "ann", "--yes", "--db", filled, *files)
    kept = {part["what"]: part["count"] for part in done["kept"]}

    assert missing.exit_code != 0
    assert kept == {"namespaces": 1, "API keys": 1, "audit records": 3}
    assert len(audit.read_text().splitlines()) == 6


def test_a_name_is_needed(filled: str) -> None:
    """An empty name, as of a variable that is not set, is nobody's."""
    for options in (("--user", ""), ("--user", " "), ()):
        assert attempt("forget", *options, "--yes", "--db", filled).exit_code != 0
        assert names(filled) == {"ann", "bob"}


def test_what_was_written_for_a_team_is_erased_or_handed_over(filled: str) -> None:
    """With `--hand-over` it stays without the name."""
    with opened(filled) as both:
        for user in ("ann", "bob"):
            config: Any = {"configurable": {"user_id": user, "team": "red"}}
            Collection(both.store, ("teams", "{team}")).insert(f"a kettle of {user}", config=config)

    planned = read("forget", "--user", "ann", "--hand-over", "--dry-run", "--db", filled)
    read("forget", "--user", "ann", "--hand-over", "--yes", "--db", filled)
    read("forget", "--user", "bob", "--yes", "--db", filled)

    kept = {part["what"]: part["count"] for part in planned["kept"]}
    assert kept["items of teams without the name"] == 1
    with opened(filled) as both:
        [item] = both.store.search(("teams",))
    assert item.value["text"] == "a kettle of ann"
    assert item.provenance is not None
    assert item.provenance.author is None


def own_threads(db: str) -> None:
    """Add two threads without a user: one with a message, and one that a client only named."""
    with opened(db) as both:
        put(both.saver, {"messages": ["a"]}, thread="acme-1", metadata={"owner": "ann"})
        ThreadList(both.saver).create("acme-2", ClientMetadata({"owner": "ann"}))


def test_threads_that_only_have_the_owner_are_named_before_the_question(filled: str) -> None:
    """They count as the person's, or with `--owners organisations` as an organisation's."""
    own_threads(filled)
    asked = attempt("forget", "--user", "ann", "--db", filled, typed="no\n")
    shown = attempt("forget", "--user", "ann", "--dry-run", "--db", filled)
    planned = read("forget", "--user", "ann", "--dry-run", "--db", filled)
    others = ("--owners", "organisations")
    kept = read("forget", "--user", "ann", "--dry-run", "--db", filled, *others)
    exported = attempt("export", "--user", "ann", "--db", filled)
    left_out = attempt("export", "--user", "ann", "--db", filled, *others)
    refused = attempt("export", "anns", "--db", filled, *others)

    said = "2 threads without a user belong to 'ann' only by their owner: acme-1, acme-2;"
    assert all(said in each.stderr for each in (asked, shown, exported))
    assert planned["by_owner"] == ["acme-1", "acme-2"]
    assert planned["erased"][0]["ids"] == ["acme-1", "acme-2", "anns", "anns-2"]
    assert (kept["by_owner"], kept["erased"][0]["ids"]) == ([], ["anns", "anns-2"])
    assert {"what": "threads of this owner", "count": 2, "ids": ["acme-1", "acme-2"]} in kept[
        "kept"
    ]
    assert "acme-1" in exported.stdout
    assert "acme-1" not in left_out.stdout
    assert refused.exit_code != 0
    assert "applies only to --user" in str(refused.exception)


def test_a_database_that_was_served_with_an_auth_file(filled: str, tmp_path: Path) -> None:
    """By default, an owner is an organisation there, also in a copy; `--owners people` differs."""
    own_threads(filled)
    with opened(filled) as both:
        record_organisation_owners(both.saver)
        record_organisation_owners(both.saver)
    copy = str(tmp_path / "copy.db")
    run("copy", "--from", filled, "--to", copy)
    with opened(copy) as both:
        put(both.saver, {"messages": ["a"]}, thread="acme-3", metadata={"owner": "acme"})
    planned = [
        read("forget", "--user", "ann", "--dry-run", "--db", db, *more)["by_owner"]
        for db in (filled, copy)
        for more in ((), ("--owners", "people"))
    ]
    unknown = attempt("forget", "--user", "acme", "--yes", "--db", copy)
    read("forget", "--user", "ann", "--yes", "--db", copy)
    with opened(copy) as both:
        left = [each.thread_id for each in both.saver.heads() if each.owner != "bob"]

    assert planned == [[], ["acme-1", "acme-2"]] * 2
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert "the owner of 'acme-3' has this name" in unknown.stderr
    assert "pass --owners people" in unknown.stderr
    assert sorted(left) == ["acme-1", "acme-3"]
