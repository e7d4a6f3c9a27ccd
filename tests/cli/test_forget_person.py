"""`perdure forget --user` asks for the name, and says what is erased and what is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.checkpointers.owner_record import record_that_owners_may_be_organisations
from perdure.checkpointers.records import ClientMetadata
from perdure.memory import Collection
from perdure.run_tables.thread_list import ThreadList
from tests.cli.commands import invoke, run, run_json
from tests.contracts.puts import put
from tests.people import empty_database, open_people, store_all_kinds


@pytest.fixture(params=["file", "postgres"])
def two_people_db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield a database with all kinds of rows of two people."""
    with empty_database(request.param, tmp_path) as db:
        with open_people(db) as both:
            store_all_kinds(both, "ann", "anns")
            store_all_kinds(both, "bob", "bobs")
            both.store.put(("cities", "ann"), "home", {"text": "Ghent"})
        yield db


def read_thread_users(db: str) -> set[str]:
    """Return the users of all threads."""
    return {thread["user"] for thread in run_json("threads", "--db", db)}


def test_forget_requires_typed_name_of_person(two_people_db: str) -> None:
    """Another text erases nothing; the name erases everything of the person."""
    wrong = invoke("forget", "--user", "ann", "--db", two_people_db, stdin="Ann\n")
    before = read_thread_users(two_people_db)
    right = invoke("forget", "--user", "ann", "--db", two_people_db, stdin="ann\n")
    again = invoke("forget", "--user", "ann", "--yes", "--db", two_people_db)

    assert (wrong.exit_code, before) == (1, {"ann", "bob"})
    assert "nothing was erased" in wrong.stderr
    assert "erase 2 threads: anns, anns-2" in wrong.stderr
    assert "keep 1 namespaces: cities/ann" in wrong.stderr
    assert (right.exit_code, read_thread_users(two_people_db)) == (0, {"bob"})
    assert "forgot 'ann'" in right.stdout
    assert (again.exit_code, again.stdout) == (1, "")
    assert "nobody of this name" in again.stderr


def test_dry_run_of_forget_reports_and_changes_nothing(two_people_db: str) -> None:
    output = run("forget", "--user", "ann", "--dry-run", "--db", two_people_db)
    planned = run_json("forget", "--user", "ann", "--dry-run", "--db", two_people_db)
    users_after_dry_run = read_thread_users(two_people_db)
    report = run_json("forget", "--user", "ann", "--yes", "--db", two_people_db)

    assert "would forget 'ann'" in output
    assert users_after_dry_run == {"ann", "bob"}
    assert planned["erased"] == report["erased"]
    assert (planned["dry_run"], report["dry_run"]) == (True, False)
    assert report["scrubbed"] == (not two_people_db.startswith("postgres"))


def test_forget_counts_and_keeps_api_keys_and_audit_records(
    two_people_db: str, tmp_path: Path
) -> None:
    """Keys of another tenant are not counted. An unreadable file is reported before the erasure."""
    keys, audit = tmp_path / "keys.toml", tmp_path / "audit.jsonl"
    digest = hashlib.sha256(b"key").hexdigest()
    keys.write_text(
        "".join(
            f'[[keys]]\nuser = "{user}"\nsha256 = "{digest}"\n{tenant}\n'
            for user, tenant in (("ann", ""), ("bob", ""), ("ann", 'tenant = "acme"'))
        )
    )
    records: list[dict[str, str | None]] = [{"user": user} for user in ("ann", "ann", "bob")]
    records += [{"user": "desk", "acting_for": user} for user in ("ann", "bob", None)]
    audit.write_text('{"user"\n' + "".join(json.dumps(record) + "\n" for record in records))
    files = ("--keys", str(keys), "--audit", str(audit))
    missing = invoke("forget", "--user", "ann", "--yes", "--db", two_people_db, "--keys", "no.toml")
    report = run_json("forget", "--user", "ann", "--yes", "--db", two_people_db, *files)
    kept = {part["what"]: part["count"] for part in report["kept"]}

    assert missing.exit_code != 0
    assert kept == {"namespaces": 1, "API keys": 1, "audit records": 3}
    assert len(audit.read_text().splitlines()) == 7


def test_forget_without_user_is_refused(two_people_db: str) -> None:
    """A blank name, as of a variable that is not set, is the name of nobody."""
    for options in (("--user", ""), ("--user", " "), ()):
        assert invoke("forget", *options, "--yes", "--db", two_people_db).exit_code != 0
        assert read_thread_users(two_people_db) == {"ann", "bob"}


def test_forget_erases_or_hands_over_items_of_teams(two_people_db: str) -> None:
    """With `--hand-over`, an item stays without the name of its author."""
    with open_people(two_people_db) as both:
        for user in ("ann", "bob"):
            config: Any = {"configurable": {"user_id": user, "team": "red"}}
            Collection(both.store, ("teams", "{team}")).insert(f"a kettle of {user}", config=config)

    planned = run_json("forget", "--user", "ann", "--hand-over", "--dry-run", "--db", two_people_db)
    run_json("forget", "--user", "ann", "--hand-over", "--yes", "--db", two_people_db)
    run_json("forget", "--user", "bob", "--yes", "--db", two_people_db)

    kept = {part["what"]: part["count"] for part in planned["kept"]}
    assert kept["items of teams without the name"] == 1
    with open_people(two_people_db) as both:
        [item] = both.store.search(("teams",))
    assert item.value["text"] == "a kettle of ann"
    assert item.provenance is not None
    assert item.provenance.author is None


def add_threads_with_owner_only(db: str) -> None:
    """Add two threads without a user: one with a message, and one that a client only named."""
    with open_people(db) as both:
        put(both.saver, {"messages": ["a"]}, thread="acme-1", metadata={"owner": "ann"})
        ThreadList(both.saver).create_thread_if_absent("acme-2", ClientMetadata({"owner": "ann"}))


def test_forget_names_threads_that_belong_to_person_only_by_owner(two_people_db: str) -> None:
    """With `--owners organisations`, these threads count as an organisation's."""
    add_threads_with_owner_only(two_people_db)
    question = invoke("forget", "--user", "ann", "--db", two_people_db, stdin="no\n")
    dry_run = invoke("forget", "--user", "ann", "--dry-run", "--db", two_people_db)
    planned = run_json("forget", "--user", "ann", "--dry-run", "--db", two_people_db)
    others = ("--owners", "organisations")
    kept = run_json("forget", "--user", "ann", "--dry-run", "--db", two_people_db, *others)
    exported = invoke("export", "--user", "ann", "--db", two_people_db)
    left_out = invoke("export", "--user", "ann", "--db", two_people_db, *others)
    refused = invoke("export", "anns", "--db", two_people_db, *others)

    expected_message = (
        "2 threads without a user belong to 'ann' only by their owner: acme-1, acme-2;"
    )
    assert all(expected_message in result.stderr for result in (question, dry_run, exported))
    assert planned["by_owner"] == ["acme-1", "acme-2"]
    assert planned["erased"][0]["ids"] == ["acme-1", "acme-2", "anns", "anns-2"]
    assert (kept["by_owner"], kept["erased"][0]["ids"]) == ([], ["anns", "anns-2"])
    assert {"what": "threads of this owner", "count": 2, "ids": ["acme-1", "acme-2"]} in kept[
        "kept"
    ]
    assert "acme-1" in exported.stdout
    assert "acme-1" not in left_out.stdout
    assert refused.exit_code != 0
    assert "can only be used with --user" in str(refused.exception)


def test_owners_are_organisations_if_database_had_an_auth_file(
    two_people_db: str, tmp_path: Path
) -> None:
    """This also applies to a copy; `--owners people` makes an owner a person."""
    add_threads_with_owner_only(two_people_db)
    with open_people(two_people_db) as both:
        record_that_owners_may_be_organisations(both.saver.database)
        record_that_owners_may_be_organisations(both.saver.database)
    copy = str(tmp_path / "copy.db")
    run("copy", "--from", two_people_db, "--to", copy)
    with open_people(copy) as both:
        put(both.saver, {"messages": ["a"]}, thread="acme-3", metadata={"owner": "acme"})
    planned = [
        run_json("forget", "--user", "ann", "--dry-run", "--db", db, *options)["by_owner"]
        for db in (two_people_db, copy)
        for options in ((), ("--owners", "people"))
    ]
    unknown = invoke("forget", "--user", "acme", "--yes", "--db", copy)
    run_json("forget", "--user", "ann", "--yes", "--db", copy)
    with open_people(copy) as both:
        remaining = [head.thread_id for head in both.saver.heads() if head.owner != "bob"]

    assert planned == [[], ["acme-1", "acme-2"]] * 2
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert "the owner of 'acme-3' has this name" in unknown.stderr
    assert "pass --owners people" in unknown.stderr
    assert sorted(remaining) == ["acme-1", "acme-3"]
