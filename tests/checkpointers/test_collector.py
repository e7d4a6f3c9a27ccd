"""The pause of the garbage collector ends correctly, and changes by the application are kept."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from perdure.checkpointers.collector import collector_paused

THRESHOLDS = (701, 11, 12)


@pytest.fixture(autouse=True)
def _set_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    yield
    gc.set_threshold(*before)
    gc.enable()


def test_nested_pause_disables_collection_until_it_ends() -> None:
    """After the outer pause, the thresholds are as before."""
    with collector_paused():
        with collector_paused():
            pass
        paused = gc.get_threshold()[0]

    assert paused == 0
    assert gc.get_threshold() == THRESHOLDS


@pytest.mark.parametrize("switch_collector", [gc.disable, gc.enable])
def test_application_can_enable_or_disable_collector_during_pause(switch_collector: object) -> None:
    """The setting stays after the pause."""
    assert callable(switch_collector)
    with collector_paused():
        switch_collector()
        expected = gc.isenabled()

    assert gc.isenabled() is expected


def test_thresholds_set_during_pause_stay_after_it() -> None:
    with collector_paused():
        gc.set_threshold(500, 5, 5)

    assert gc.get_threshold() == (500, 5, 5)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_child_forked_during_pause_collects_garbage() -> None:
    """The thread that started the pause is not in the child.

    The child can start a pause of its own.
    """
    paused, may_continue = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            paused.set()
            may_continue.wait(30)

    thread = threading.Thread(target=pause)
    thread.start()
    paused.wait(30)
    child = os.fork()
    if child == 0:
        thresholds_in_child = gc.get_threshold()
        with collector_paused():
            threshold_in_pause = gc.get_threshold()[0]
        os._exit(
            0
            if (thresholds_in_child, threshold_in_pause, gc.get_threshold())
            == (THRESHOLDS, 0, THRESHOLDS)
            else 1
        )
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    may_continue.set()
    thread.join()

    assert status == 0
    assert gc.get_threshold() == THRESHOLDS
