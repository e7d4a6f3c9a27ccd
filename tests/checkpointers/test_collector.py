"""The pause of the garbage collector is over when it is over, and the application's word counts."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from perdure.checkpointers.collector import collector_paused

SET = (701, 11, 12)


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*SET)
    yield
    gc.set_threshold(*before)
    gc.enable()


def test_nothing_is_collected_within_a_pause() -> None:
    """Within it, however deep, there is no collection; after it all is as it was."""
    with collector_paused():
        with collector_paused():
            pass
        paused = gc.get_threshold()[0]

    assert paused == 0
    assert gc.get_threshold() == SET


@pytest.mark.parametrize("say", [gc.disable, gc.enable])
def test_the_application_may_switch_it_within_a_pause(say: object) -> None:
    """What another thread says meanwhile holds after the pause."""
    assert callable(say)
    with collector_paused():
        say()
        expected = gc.isenabled()

    assert gc.isenabled() is expected


def test_thresholds_set_within_a_pause_stay() -> None:
    """They are the application's, not those from before."""
    with collector_paused():
        gc.set_threshold(500, 5, 5)

    assert gc.get_threshold() == (500, 5, 5)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_child_forked_within_a_pause_collects() -> None:
    """The thread that paused it is not in the child; there the pause is over, and may come anew."""
    paused, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            paused.set()
            go_on.wait(30)

    thread = threading.Thread(target=pause)
    thread.start()
    paused.wait(30)
    child = os.fork()
    if child == 0:
        first = gc.get_threshold()
        with collector_paused():
            second = gc.get_threshold()[0]
        os._exit(0 if (first, second, gc.get_threshold()) == (SET, 0, SET) else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    go_on.set()
    thread.join()

    assert status == 0
    assert gc.get_threshold() == SET
