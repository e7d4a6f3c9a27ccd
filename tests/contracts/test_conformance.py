"""langgraph's published conformance tests pass on every backend, blocking and async."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from langgraph.checkpoint.conformance import checkpointer_test, validate

from perdure.checkpointers import SQLiteCheckpointer
from tests.backends import BACKENDS, KEY, BlockingCheckpointer


@pytest.mark.parametrize("backend", [*sorted(BACKENDS), "blocking", "blocking-sealed"])
def test_every_capability_passes_langgraph_conformance_tests(backend: str, tmp_path: Path) -> None:
    """No capability is skipped, and no test of a capability fails."""
    opened = 0

    @checkpointer_test(name=backend)
    async def open_saver() -> AsyncIterator[SQLiteCheckpointer]:
        nonlocal opened
        folder = tmp_path / str(opened)
        folder.mkdir()
        opened += 1
        if backend.startswith("blocking"):
            key = KEY if backend.endswith("sealed") else None
            saver: SQLiteCheckpointer = BlockingCheckpointer.open(folder / "x.db", key=key)
        else:
            saver = BACKENDS[backend](folder)
        async with saver:
            yield saver

    report = asyncio.run(validate(open_saver))

    assert {name: [] for name in report.results} == {
        name: result.failures for name, result in report.results.items()
    }
    assert all(result.passed and not result.tests_skipped for result in report.results.values())
    assert len(report.results) == 8
