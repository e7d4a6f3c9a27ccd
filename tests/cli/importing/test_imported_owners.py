"""Imports carry the record that owners may be organisations, so an organisation is no person."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure.checkpointers.owner_record import (
    may_owners_be_organisations,
    record_that_owners_may_be_organisations,
)
from tests.cli.commands import invoke, run, run_json
from tests.contracts.puts import put
from tests.people import empty_database, open_people

MESSAGES = {"messages": [HumanMessage("We meet at ten.", id="h")]}


@pytest.fixture
def source(tmp_path: Path) -> str:
    """The database of a server with an Auth file: Ann's thread, and one of her organisation."""
    db = str(tmp_path / "source.db")
    with open_people(db) as opened:
        record_that_owners_may_be_organisations(opened.saver.database)
        put(opened.saver, MESSAGES, thread="minutes", metadata={"owner": "acme"})
        put(opened.saver, MESSAGES, thread="anns", metadata={"owner": "acme", "user_id": "ann"})
    return db


@pytest.fixture(params=["file", "postgres"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of a server with API keys: a thread of Bob, who is named only as its owner."""
    with empty_database(request.param, tmp_path) as db:
        with open_people(db) as opened:
            put(opened.saver, MESSAGES, thread="bobs", metadata={"owner": "bob"})
        yield db


def merge_file(source: str, target: str, _: Path) -> Any:
    return invoke("import", source, "--db", target, "--no-memories")


def merge_by_library(source: str, target: str, _: Path) -> None:
    with open_people(source) as opened, open_people(target) as other:
        other.saver.import_from(opened.saver)


def import_exported_threads(source: str, target: str, folder: Path) -> None:
    exported = folder / "threads.jsonl"
    exported.write_text(run("export", "--all", "--db", source))
    run("import", str(exported), "--db", target)


def list_thread_ids(db: str, *options: str) -> set[str]:
    """Return the ids of the listed threads. The exit code is 1 if there are none."""
    listed = invoke("threads", *options, "--json", "--db", db)
    return {thread["thread_id"] for thread in json.loads(listed.stdout or "[]")}


ImportMethod = Callable[[str, str, Path], Any]


@pytest.mark.parametrize("import_", [merge_file, merge_by_library, import_exported_threads])
def test_organisation_is_no_person_after_import(
    source: str, target: str, tmp_path: Path, import_: ImportMethod
) -> None:
    """The commands find no person of the organisation's name, and erase none of its threads."""
    result = import_(source, target, tmp_path)
    listed = list_thread_ids(target, "--user", "acme")
    exported = invoke("export", "--user", "acme", "--db", target)
    forgotten = invoke("forget", "--user", "acme", "--yes", "--db", target)

    assert listed == set()
    assert (exported.exit_code, exported.stdout) == (1, "")
    assert (forgotten.exit_code, forgotten.stdout) == (1, "")
    assert list_thread_ids(target, "--user", "ann") == {"anns"}
    assert list_thread_ids(target) == {"minutes", "anns", "bobs"}
    if result is not None:
        assert "may be organisations" in result.stderr


def test_threads_of_target_with_owner_only_are_listed_after_import(
    source: str, target: str, tmp_path: Path
) -> None:
    """The record of the source counts for the whole target, unless `--owners` overrides it."""
    before = run_json("forget", "--user", "bob", "--dry-run", "--db", target)
    merge_file(source, target, tmp_path)
    again = merge_file(source, target, tmp_path)
    after = invoke("forget", "--user", "bob", "--dry-run", "--db", target)
    overridden = run_json(
        "forget", "--user", "bob", "--dry-run", "--db", target, "--owners", "people"
    )

    assert before["by_owner"] == overridden["by_owner"] == ["bobs"]
    assert "the owner of 'bobs' has this name" in after.stderr
    assert "may be organisations" not in again.stderr


def test_archive_of_person_has_no_threads_of_organisation(
    source: str, target: str, tmp_path: Path
) -> None:
    """The threads of the archive have a user, so the target needs no record."""
    archive = tmp_path / "ann.jsonl"
    archive.write_text(run("export", "--user", "ann", "--db", source))
    run("import", str(archive), "--db", target)
    with open_people(target) as opened:
        is_recorded = may_owners_be_organisations(opened.saver.database)

    assert not is_recorded
    assert list_thread_ids(target, "--user", "acme") == set()
    assert list_thread_ids(target, "--user", "ann") == {"anns"}


def test_import_without_record_leaves_owners_people(target: str, tmp_path: Path) -> None:
    """The source is a database of a server with API keys."""
    source = str(tmp_path / "keys.db")
    with open_people(source) as opened:
        put(opened.saver, MESSAGES, thread="anns", metadata={"owner": "ann"})
    merged = merge_file(source, target, tmp_path)
    with open_people(target) as opened:
        is_recorded = may_owners_be_organisations(opened.saver.database)

    assert (merged.exit_code, "may be organisations" in merged.stderr) == (0, False)
    assert not is_recorded
    assert list_thread_ids(target, "--user", "ann") == {"anns"}
