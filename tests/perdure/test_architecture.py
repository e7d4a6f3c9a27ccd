"""docs/architecture.md lists the functions that a put, a search, a turn and a run call.

`python docs/architecture.py` writes the lists.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from benchmarks import put_path, search_path, turn_path

from tests.layout import ROOT

Functions = list[tuple[str, str]]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def read_listed_functions(command: str) -> Functions:
    """Return the functions in the block below the sentence that names a script."""
    block = re.search(rf"`python -m benchmarks\.{command}`[^#]*?\n\n((?:    .+\n)+)", PAGE)
    assert block is not None
    return [(module, name) for module, name in map(str.split, block[1].splitlines())]


def test_architecture_page_lists_functions_of_a_put(tmp_path: Path) -> None:
    """The page lists the functions that `python -m benchmarks.put_path` prints."""
    assert read_listed_functions("put_path") == put_path.way(put_path.traced(tmp_path))


def test_architecture_page_lists_functions_of_a_search(tmp_path: Path) -> None:
    """The page lists the functions that `python -m benchmarks.search_path` prints."""
    assert read_listed_functions("search_path") == list(search_path.traced(tmp_path).way)


@pytest.mark.parametrize("command", ["turn_path", "turn_path --run"])
def test_architecture_page_lists_functions_of_a_turn_and_a_run(
    command: str, tmp_path: Path
) -> None:
    """Each listed function is called; others may be called too, since tasks alternate."""
    path = turn_path.of_a_run if command.endswith("--run") else turn_path.of_a_turn
    called = asyncio.run(path(tmp_path)).doors

    assert [function for function in read_listed_functions(command) if function not in called] == []
