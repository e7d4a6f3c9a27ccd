"""The queue of write jobs: order, waiting, and waits that end in time."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from perdure.storage.flow import Job
from perdure.storage.job_queue import JobQueue
from tests.rounds import rounds


def make_job() -> Job[Any]:
    return Job(Future(), lambda: iter(()))  # type: ignore[arg-type, return-value]


@pytest.fixture
def frequent_switches() -> Any:
    """Make threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_jobs_are_returned_in_the_order_in_which_they_were_added() -> None:
    queue, jobs = JobQueue(), [make_job() for _ in range(3)]

    for job in [*jobs, None]:
        queue.put(job)

    assert [queue.get() for _ in range(4)] == [*jobs, None]
    assert queue.is_empty()


def test_wait_ends_without_job_when_time_is_over() -> None:
    queue = JobQueue()
    queue.put(make_job())
    queue.get()

    assert not queue.wait_for_job(0.01)
    assert not queue.wait_for_job(0.0)
    assert not queue.wait_for_job(-1.0)


def test_wait_ends_when_a_job_is_added() -> None:
    queue = JobQueue()
    timer = threading.Timer(0.02, queue.put, [make_job()])
    timer.start()

    assert queue.wait_for_job(60.0)
    assert queue.get() is not None
    timer.join()


@pytest.mark.repeats
def test_waits_of_a_few_microseconds_always_end() -> None:
    """`queue.SimpleQueue` fails this test on CPython 3.11 and 3.12.

    It waits without limit if its timeout ends before it begins to wait.
    """
    queue, wait_count = JobQueue(), rounds(40_000)

    def wait_often() -> None:
        for number in range(wait_count):
            queue.put(None)
            queue.get()
            queue.wait_for_job(1e-6 * (number % 8))

    thread = threading.Thread(target=wait_often, daemon=True)
    thread.start()
    thread.join(120)

    assert not thread.is_alive(), "a wait did not end"


@pytest.mark.repeats
@pytest.mark.usefixtures("frequent_switches")
def test_no_job_of_several_threads_is_lost_or_left_waiting() -> None:
    queue, job_count, thread_count = JobQueue(), rounds(20_000), 4
    answers = [threading.Semaphore(0) for _ in range(thread_count)]
    queue_of_answers: dict[Any, threading.Semaphore] = {}
    received: list[Any] = []

    def add_jobs(number: int) -> None:
        for _ in range(job_count):
            job = make_job()
            queue_of_answers[job] = answers[number]
            queue.put(job)
            answers[number].acquire()

    def take_jobs() -> None:
        while (job := queue.get()) is not None:
            received.append(job)
            queue_of_answers.pop(job).release()
            queue.wait_for_job(2e-6)

    taker = threading.Thread(target=take_jobs, daemon=True)
    adders = [
        threading.Thread(target=add_jobs, args=(n,), daemon=True) for n in range(thread_count)
    ]
    for thread in [taker, *adders]:
        thread.start()
    for thread in adders:
        thread.join(120)
        assert not thread.is_alive(), "a job was left waiting"
    queue.put(None)
    taker.join(120)

    assert not taker.is_alive()
    assert len(received) == len({id(job) for job in received}) == job_count * thread_count
