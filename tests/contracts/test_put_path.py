"""Few calls lead from `put` to its SQL (docs/decisions/0022)."""

from __future__ import annotations

from pathlib import Path

from benchmarks.put_path import PLAN, traced, way


def test_put_enters_few_functions_and_modules(tmp_path: Path) -> None:
    functions = way(traced(tmp_path))

    assert functions[0][1].endswith(".put")
    assert PLAN in functions
    assert functions[-1] == (
        "storage.sqlite_connection",
        "_execute_statements_if_guard_succeeds",
    )  # which calls `execute`
    assert len(functions) <= 12
    assert len({module for module, _ in functions}) <= 7
