"""A put can be read: few calls lead from it to its SQL (docs/decisions/0022)."""

from __future__ import annotations

from pathlib import Path

from benchmarks.put_path import PLAN, traced, way


def test_the_way_of_a_put_is_short(tmp_path: Path) -> None:
    passed = way(traced(tmp_path))

    assert passed[0][1].endswith(".put")
    assert PLAN in passed
    assert passed[-1] == ("storage.sqlite_connection", "_execute_guarded")  # which calls `execute`
    assert len(passed) <= 12
    assert len({module for module, _ in passed}) <= 7
