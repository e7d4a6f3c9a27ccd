"""The code path of a search is short: few calls lead from it to its SQL."""

from __future__ import annotations

from pathlib import Path

from benchmarks.search_path import traced


def test_search_reaches_sql_in_few_calls_and_modules(tmp_path: Path) -> None:
    passed = list(traced(tmp_path).way)

    assert passed[0] == ("stores.store", "Store.asearch")
    assert ("stores.search.searching", "Searcher._find_best_items") in passed
    assert len(passed) <= 14
    assert len({module for module, _ in passed}) <= 9
