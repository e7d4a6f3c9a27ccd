"""What is to be done about a waiting thread, by its note and the attempts; and who is alive."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import ConfigurationError
from perdure.memory.background.desk import Place
from perdure.memory.background.jobs import (
    Attempt,
    AttemptId,
    Pace,
    Status,
    job_of,
    key_of,
    stamp_of,
    standing,
)
from perdure.memory.background.presence import FilePresence
from perdure.memory.forming.waiting import Waiting
from perdure.stores import SQLiteStore

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
PACE = Pace(delay_s=30, max_wait_s=600, retries=2, backoff_s=2)


def after(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def note(since: float = 0, at: float = 0) -> Waiting:
    return Waiting(("memories", "ann"), "t", {"user_id": "ann"}, after(since), after(at))


def attempt(
    of: Waiting,
    number: int,
    status: Status,
    ended: float = 0,
    final: bool = False,
    begun: bool = True,
) -> Attempt:
    id = AttemptId(key_of(of.namespace, of.thread_id), stamp_of(of), number, f"{number:x}")
    return Attempt(id, status, 0, None, "it failed", final, begun, after(ended))


def test_each_message_begins_the_delay_anew() -> None:
    """It is due when nothing was said for a while, and after `max_wait_s` whatever was said."""
    assert after(30) == standing(note(), [], PACE).due_at
    assert after(130) == standing(note(at=100), [], PACE).due_at
    assert after(600) == standing(note(at=599), [], PACE).due_at
    assert None is standing(note(), [], Pace(None, 600, 2, 2)).due_at


@given(
    pauses=st.lists(st.integers(0, 100), max_size=30),
    delay_s=st.integers(0, 100),
    max_wait_s=st.integers(0, 1000),
)
def test_the_wait_is_bounded(pauses: list[int], delay_s: int, max_wait_s: int) -> None:
    """Whatever is said when: it is due at the nearer of two bounds, and never before the first."""
    last = sum(pauses)
    due_at = standing(note(at=last), [], Pace(delay_s, max_wait_s, 0, 0)).due_at

    assert min(after(max_wait_s), after(last + delay_s)) == due_at


def test_failures_are_repeated_ever_later_and_then_no_more() -> None:
    """The pause doubles; the last attempt is followed by none, a final error by none at all."""
    waiting = note()
    first = attempt(waiting, 1, "failed", ended=40)
    second = attempt(waiting, 2, "failed", ended=50)
    third = attempt(waiting, 3, "failed", ended=60)

    assert ("retrying", after(42)) == told([first], waiting)
    assert ("retrying", after(54)) == told([second, first], waiting)
    assert told([first, third, second], waiting) == ("dead", None)
    assert told([attempt(waiting, 1, "failed", final=True)], waiting) == ("dead", None)
    assert ("waiting", after(100)) == told([first, third, second], note(at=70))


def test_a_lost_attempt_is_repeated_at_once_but_not_for_ever() -> None:
    """A thread that kills each worker is given up; one that was not begun counts for nothing."""
    waiting = note()

    assert ("due", after(0)) == told([attempt(waiting, 1, "lost")], waiting)
    assert told([attempt(waiting, 3, "lost")], waiting) == ("dead", None)
    unbegun = standing(waiting, [attempt(waiting, 3, "failed", begun=False)], PACE)
    assert (unbegun.state, unbegun.attempts) == ("due", 2)


def test_what_is_under_way_is_not_begun_twice() -> None:
    """While an attempt is in the queue, or made, no other is due, whatever was said meanwhile."""
    old, new = note(), note(at=50)

    for live, state in (
        (attempt(old, 1, "queued"), "due"),
        (attempt(old, 1, "running"), "running"),
    ):
        stands = standing(new, [live], PACE)
        assert (state, False) == (stands.state, stands.is_due(after(9999)))
        assert state == job_of(new, stands, after(9999)).state


def told(attempts: list[Attempt], waiting: Waiting) -> tuple[str, datetime | None]:
    stands = standing(waiting, attempts, PACE)
    return stands.state, stands.due_at


def test_the_id_of_an_attempt_reads_back() -> None:
    """What it is about is in its name."""
    id = attempt(note(), 7, "done").id

    assert id == AttemptId.read(str(id))
    assert key_of(("a", "b"), "c") != key_of(("a",), "b")


def test_presence_ends_with_the_process_that_has_it(tmp_path: Path) -> None:
    """One is alive from `enter` to `leave`; a file that nobody has locked is that of a dead one."""
    path = str(tmp_path / "jobs")
    here, there = FilePresence(path), FilePresence(path)
    (tmp_path / "jobs.gone.lock").touch()
    here.enter("here")
    here.enter("here")

    assert [each.is_alive("here") for each in (here, there)] == [True, True]
    assert [there.is_alive(name) for name in ("gone", "")] == [False, False]
    assert [file.name for file in tmp_path.iterdir()] == ["jobs.here.lock"]

    here.leave()

    assert not there.is_alive("here")
    assert list(tmp_path.iterdir()) == []


def test_where_jobs_are_kept(tmp_path: Path) -> None:
    """Beside the store, or where it was said; not somewhere else."""
    with SQLiteStore.open(tmp_path / "memory.db") as store:
        assert f"{tmp_path}/memory.db.jobs" == Place.of(None, store).file
    with SQLiteStore.open(":memory:") as store:
        assert Place() == Place.of(None, store)
    assert Place(url="postgresql://me@host/db") == Place.of("postgres://me@host/db", None)
    with pytest.raises(ConfigurationError, match="expected a file, or 'postgresql"):
        Place.of("redis://host", None)
