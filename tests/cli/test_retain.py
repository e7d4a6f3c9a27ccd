"""`perdure retain`: what would go, and what went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.stores import SQLiteStore
from tests.cli.commands import invoke, run, run_json, split_rows
from tests.talks import talk


@pytest.fixture(autouse=True)
def threads(db: Path) -> None:
    with SQLiteCheckpointer.open(db) as saver:
        for thread_id, days in (("old-1", 40), ("old-2", 35), ("new", 0)):
            talk(saver, thread_id, days)
    with SQLiteStore.open(db) as store:
        for number in range(3):
            store.put(("notes",), "n", {"text": str(number)})


def left(db: Path) -> dict[str, int]:
    with SQLiteCheckpointer.open(db) as saver:
        return {info.thread_id: info.checkpoints for info in saver.threads()}


def counts(report: dict[str, Any]) -> dict[str, int]:
    return {each["what"]: each["count"] for each in report["removals"]}


def test_rules_are_of_the_file_and_options(db: Path) -> None:
    """Options are stronger; the dry run names what goes, and then it goes."""
    (db.parent / "perdure.toml").write_text(
        "[retention]\nidle_days = 365\nturns = true\nversions_last = 1\n"
    )
    options = ("retain", "--idle-days", "30")
    dry = run_json(*options, "--dry-run")
    shown = run(*options, "--dry-run")
    before = left(db)
    done = run_json(*options, "--yes")

    assert before == {"old-1": 4, "old-2": 4, "new": 4}
    assert dry == done
    assert counts(done) == {
        "idle threads": 2,
        "checkpoints": 2,
        "messages": 0,
        "expired items": 0,
        "old versions": 1,
    }
    assert done["removals"][0]["ids"] == ["old-1", "old-2"]
    assert done["size_bytes"] == sum(each["size_bytes"] for each in done["removals"]) > 0
    assert left(db) == {"new": 2}
    assert [row[:2] for row in split_rows(shown)][:2] == [
        ["would be removed", "count"],
        ["idle threads", "2"],
    ]
    assert "\n  old-1\n  old-2\n" in shown
    assert run(*options, "--yes").startswith("removed")


def test_it_asks_first(db: Path) -> None:
    """With what would go; without a yes all stays."""
    no = invoke("retain", "--idle-days", "30", stdin="n\n")
    assert no.exit_code == 1
    assert "to be removed: 2 idle threads; about" in no.stderr
    assert len(left(db)) == 3
    assert invoke("retain", "--idle-days", "30", stdin="y\n").exit_code == 0
    assert len(left(db)) == 1


def test_only_some_threads(db: Path) -> None:
    """Named by the beginning of an id, and no items go."""
    (db.parent / "perdure.toml").write_text("[retention]\nhistory = false\ncheckpoints_last = 9\n")
    done = run_json("retain", "old-1", "ne", "--last", "1", "--yes")
    assert counts(done) == {"checkpoints": 6, "messages": 4}
    assert left(db) == {"old-1": 1, "old-2": 4, "new": 1}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("old-1",), "no rule applies to threads"),
        (("old", "--last", "1"), "several ids of threads begin with 'old'"),
        (("nobody", "--last", "1"), "no thread 'nobody'"),
    ],
)
def test_a_wrong_use_is_named(options: tuple[str, ...], said: str, db: Path) -> None:
    result = invoke("retain", *options, "--yes")
    assert isinstance(result.exception, ConfigurationError)
    assert said in str(result.exception)
    assert len(left(db)) == 3


def test_without_rules_expired_items_go() -> None:
    result = invoke("retain")
    assert (result.exit_code, "no rules are set" in result.stderr) == (0, True)
    assert split_rows(result.stdout)[1][:2] == ["expired items", "0"]
