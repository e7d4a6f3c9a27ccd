"""Database files, and the files next to them, cannot be read by other users."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from langgraph.checkpoint.base import empty_checkpoint

from perdure.checkpointers import SQLiteCheckpointer
from perdure.stores import SQLiteStore

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permissions")
CONFIG = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Let new files be readable by everybody, as on most machines."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def list_modes(folder: Path) -> dict[str, int]:
    """Return the permissions of each file in a folder."""
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


def write_thread_and_item(path: Path) -> dict[str, int]:
    """Use a checkpointer and a store, and return the permissions of all files while it is open."""
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path) as store:
        saver.put(CONFIG, empty_checkpoint(), {"source": "loop", "step": 1}, {})  # type: ignore[arg-type]
        store.put(("notes",), "a", {"text": "likes tea"})
        with saver.lock("t"):
            return list_modes(path.parent)


def test_only_the_owner_can_read_a_new_database(tmp_path: Path) -> None:
    modes = write_thread_and_item(tmp_path / "x.db")

    assert {"x.db", "x.db-wal", "x.db-shm", "x.db.lock", "x.db.locks"} <= modes.keys()
    assert set(modes.values()) == {0o600}


def test_files_next_to_a_database_have_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.touch()
    path.chmod(0o660)

    modes = write_thread_and_item(path)

    assert modes == dict.fromkeys(modes, 0o660)


def test_permissions_of_an_existing_database_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    write_thread_and_item(path)
    path.chmod(0o640)

    write_thread_and_item(path)

    assert list_modes(tmp_path)["x.db"] == 0o640
