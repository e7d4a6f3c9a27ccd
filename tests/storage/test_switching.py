"""The thread switch interval is short while a write must not wait, and is restored afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from perdure.storage.switch_interval import use_short_switch_interval


@pytest.fixture(autouse=True)
def _restore_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_switch_interval_is_restored_after_the_last_block() -> None:
    """The two blocks overlap."""
    sys.setswitchinterval(0.02)
    first, second = use_short_switch_interval(), use_short_switch_interval()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    during = sys.getswitchinterval()
    second.__exit__(None, None, None)

    assert during == pytest.approx(0.0001, rel=0.01)
    assert sys.getswitchinterval() == pytest.approx(0.02)


def test_switch_interval_set_within_the_block_is_kept() -> None:
    with use_short_switch_interval():
        sys.setswitchinterval(0.03)

    assert sys.getswitchinterval() == pytest.approx(0.03)


def test_shorter_switch_interval_is_kept() -> None:
    sys.setswitchinterval(0.00005)
    with use_short_switch_interval():
        during = sys.getswitchinterval()

    assert during == sys.getswitchinterval() == pytest.approx(0.00005)
