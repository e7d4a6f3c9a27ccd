"""The thread switch interval is short while a write must not wait, and as before afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from perdure.storage.switching import use_short_switch_interval


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_the_former_interval_is_restored_after_the_last_block() -> None:
    """Blocks may overlap."""
    sys.setswitchinterval(0.02)
    first, second = use_short_switch_interval(), use_short_switch_interval()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    during = sys.getswitchinterval()
    second.__exit__(None, None, None)

    assert during == pytest.approx(0.0001, rel=0.01)
    assert sys.getswitchinterval() == pytest.approx(0.02)


def test_an_interval_that_was_set_meanwhile_stays() -> None:
    with use_short_switch_interval():
        sys.setswitchinterval(0.03)

    assert sys.getswitchinterval() == pytest.approx(0.03)


def test_a_shorter_interval_stays() -> None:
    sys.setswitchinterval(0.00005)
    with use_short_switch_interval():
        during = sys.getswitchinterval()

    assert during == sys.getswitchinterval() == pytest.approx(0.00005)
