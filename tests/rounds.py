"""How often what repeats is done: kills, races, the examples of properties.

`make test` does a quarter; `--all` and `--rest` do all. A test that uses `rounds` is marked
`repeats`, so that `--rest` runs it again; tests of Hypothesis need no mark.
"""

from __future__ import annotations

_SHARE = 4
_all = False


def do_all() -> None:
    """Do every round; called before the modules of tests are imported."""
    global _all
    _all = True


def rounds(full: int) -> int:
    """How many of so many rounds this run does, one at least."""
    return full if _all else max(1, full // _SHARE)
