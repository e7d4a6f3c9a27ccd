"""`perdure forget --user`: it asks for the name, and says what goes and what stays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.memory import Collection
from tests.cli.commands import attempt, read, run
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
