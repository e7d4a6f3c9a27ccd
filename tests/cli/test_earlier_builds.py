"""Commands on a file of a build from before the first release refuse it, and do not change it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.stores import SQLiteStore
from tests import earlier_build
from tests.cli.commands import run_and_read_error

COMMANDS = [
    "import FILE",
    "copy --from FILE --to new.db",
    "copy --from own.db --to FILE",
    "worker --once --db FILE",
    "export --all --db FILE",
    "stats --db FILE",
    "retain --idle-days 1 --yes --db FILE",
]


@pytest.fixture
def current_db(tmp_path: Path) -> Path:
    """Return a database of this build."""
    path = tmp_path / "own.db"
    with SQLiteCheckpointer.open(path), SQLiteStore.open(path):
        return path


def check_refusal(command: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a command refuses a file with the remedy, and leaves its bytes unchanged."""
    before = path.read_bytes()

    message = run_and_read_error(*command.replace("FILE", path.name).split(), capsys=capsys)

    assert "was written by a build of perdure from before the first release" in message
    assert "perdure export --all --db FILE > threads.jsonl" in message
    assert path.read_bytes() == before
    assert not path.with_name("new.db").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_file_without_script_hashes_is_refused(
    command: str, current_db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "earlier.db"
    earlier_build.write_file(path)

    check_refusal(command, path, capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_file_with_other_script_hashes_is_refused(
    command: str, current_db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables have other names, so only the table `schemas` tells who wrote the file."""
    path = tmp_path / "earlier.db"
    path.write_bytes(current_db.read_bytes())
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("UPDATE schemas SET script_hash = 'another'")
        conn.execute("ALTER TABLE namespaces RENAME TO other_namespaces")
        conn.execute("ALTER TABLE store_items RENAME TO other_items")

    check_refusal(command, path, capsys)
