"""`perdure retain`: the removals that it announces, and those that it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.stores import SQLiteStore
from tests.cli.commands import invoke, run, run_json, split_rows
from tests.talks import store_conversation


@pytest.fixture(autouse=True)
def stored_threads(db: Path) -> None:
    with SQLiteCheckpointer.open(db) as saver:
        for thread_id, days in (("old-1", 40), ("old-2", 35), ("new", 0)):
            store_conversation(saver, thread_id, days)
    with SQLiteStore.open(db) as store:
        for number in range(3):
            store.put(("notes",), "n", {"text": str(number)})


def count_checkpoints_by_thread(db: Path) -> dict[str, int]:
    with SQLiteCheckpointer.open(db) as saver:
        return {info.thread_id: info.checkpoints for info in saver.threads()}


def count_removals(report: dict[str, Any]) -> dict[str, int]:
    return {removal["what"]: removal["count"] for removal in report["removals"]}


def test_retain_applies_rules_of_settings_file_and_options(db: Path) -> None:
    """Options take precedence; the dry run announces exactly what is then removed."""
    (db.parent / "perdure.toml").write_text(
        "[retention]\nidle_days = 365\nturns = true\nversions_last = 1\n"
    )
    options = ("retain", "--idle-days", "30")
    dry_run = run_json(*options, "--dry-run")
    output = run(*options, "--dry-run")
    before = count_checkpoints_by_thread(db)
    report = run_json(*options, "--yes")

    assert before == {"old-1": 4, "old-2": 4, "new": 4}
    assert dry_run == report
    assert count_removals(report) == {
        "idle threads": 2,
        "checkpoints": 2,
        "messages": 0,
        "expired items": 0,
        "old versions": 1,
    }
    assert report["removals"][0]["ids"] == ["old-1", "old-2"]
    assert report["size_bytes"] == sum(removal["size_bytes"] for removal in report["removals"]) > 0
    assert count_checkpoints_by_thread(db) == {"new": 2}
    assert [row[:2] for row in split_rows(output)][:2] == [
        ["would be removed", "count"],
        ["idle threads", "2"],
    ]
    assert "\n  old-1\n  old-2\n" in output
    assert run(*options, "--yes").startswith("removed")


def test_retain_asks_for_confirmation(db: Path) -> None:
    """The question lists the removals; without a yes nothing is removed."""
    declined = invoke("retain", "--idle-days", "30", stdin="n\n")
    assert declined.exit_code == 1
    assert "to be removed: 2 idle threads; about" in declined.stderr
    assert len(count_checkpoints_by_thread(db)) == 3
    assert invoke("retain", "--idle-days", "30", stdin="y\n").exit_code == 0
    assert len(count_checkpoints_by_thread(db)) == 1


def test_retain_of_named_threads_keeps_others_and_items(db: Path) -> None:
    """A thread is named by a prefix of its id."""
    (db.parent / "perdure.toml").write_text("[retention]\nhistory = false\ncheckpoints_last = 9\n")
    report = run_json("retain", "old-1", "ne", "--last", "1", "--yes")
    assert count_removals(report) == {"checkpoints": 6, "messages": 4}
    assert count_checkpoints_by_thread(db) == {"old-1": 1, "old-2": 4, "new": 1}


@pytest.mark.parametrize(
    ("options", "expected_message"),
    [
        (("old-1",), "no retention rule for threads is set"),
        (("old", "--last", "1"), "the thread prefix 'old' is ambiguous"),
        (("nobody", "--last", "1"), "no thread 'nobody'"),
    ],
)
def test_invalid_retain_is_refused_and_removes_nothing(
    options: tuple[str, ...], expected_message: str, db: Path
) -> None:
    result = invoke("retain", *options, "--yes")
    assert isinstance(result.exception, ConfigurationError)
    assert expected_message in str(result.exception)
    assert len(count_checkpoints_by_thread(db)) == 3


def test_retain_without_rules_removes_only_expired_items() -> None:
    result = invoke("retain")
    assert (result.exit_code, "no rules are set" in result.stderr) == (0, True)
    assert split_rows(result.stdout)[1][:2] == ["expired items", "0"]
