"""Forgetting a person: the queue of the background extraction keeps no text about them."""

from __future__ import annotations

from pathlib import Path

from perdure import people
from tests.memory.background_runs import BackgroundRuns, wait_until
from tests.stores.erasing import read_all_bytes

TEXT = "zqquinceqz is her sister's name"


def test_queue_file_has_no_text_of_a_forgotten_person(tmp_path: Path) -> None:
    """One extraction succeeded, and one failed with an error that quotes the text."""
    runs = BackgroundRuns(tmp_path)
    try:
        runs.extractor.failures["fails"] = [ValueError(TEXT)] * 9
        for thread in ("done", "fails"):
            runs.send_message(thread, TEXT)
        with runs.make_background(retries=1) as background:
            wait_until(lambda: runs.read_memory_texts("done"))
            dead = wait_until(lambda: [job for job in background.jobs() if job.state == "dead"])
        bytes_before = read_all_bytes(tmp_path)
        people.forget("ann", runs.saver, runs.store)
        bytes_after = read_all_bytes(tmp_path)
    finally:
        runs.close()

    assert [job.thread_id for job in dead] == ["fails"]
    assert b"zqquinceqz" in bytes_before
    assert b"zqquinceqz" not in bytes_after
    assert [path.name for path in tmp_path.iterdir() if "jobs" in path.name]
