"""The number of rounds of repeated tests, such as kills, races and random examples.

`make test` runs a quarter of the rounds, and `--all` and `--rest` run all of them. A test that uses
`rounds` has the marker `repeats`, so that `--rest` runs it again. Tests of Hypothesis need no
marker.
"""

from __future__ import annotations

_SHARE = 4
_all = False


def run_all_rounds() -> None:
    """Make `rounds` return full numbers. Call this before test modules are imported."""
    global _all
    _all = True


def rounds(full: int) -> int:
    """Return how many of `full` rounds this test run does, at least one."""
    return full if _all else max(1, full // _SHARE)
