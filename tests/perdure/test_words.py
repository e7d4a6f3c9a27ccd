"""Names and docstrings that a program can recognise as unclear; CONTRIBUTING.md has the rules.

ruff checks that docstrings begin with an imperative verb (D401) and how names are spelt (N).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.layout import PACKAGES, ROOT, package_folder

EXCEPTIONS = Path(__file__).parent.parent / "data" / "vague_names.txt"
MAX_ONE_WORD_SHARE = 0.35  # of all functions; methods such as get, put and search need one word
MIN_DOCUMENTED_SHARE = 0.7  # of all functions
VAGUE_FUNCTIONS = frozenset(
    {
        "shown",
        "told",
        "found",
        "given",
        "made",
        "held",
        "kept",
        "opened",
        "of",
        "at",
        "by",
        "asked",
        "said",
        "taken",
        "known",
        "wanted",
        "begun",
        "ended",
        "left",
        "listed",
        "named",
        "joined",
        "judged",
        "described",
        "checked",
        "done",
        "retell",
        "beside",
        "through",
        "within",
        "without",
    }
)
VAGUE_VARIABLES = VAGUE_FUNCTIONS | {"each", "least", "most", "many"}
ODD_OPENING = re.compile(
    r"(What|Whether|Those|Whose|Whom|Who|The same|It|That|As|Where|How|Likewise|None)\b"
)
UNCOUNTED_DECORATOR = re.compile(
    r"property|setter|overload|command|callback|\.(get|post|put|patch|delete|websocket)\("
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parse_modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each module of perdure by its path in the repository."""
    trees = {}
    for package in PACKAGES:
        for path in package_folder(package).glob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def iter_functions() -> Iterator[tuple[str, Function]]:
    """Yield path and node of each function, except properties, endpoints and dunder methods."""
    for path, tree in parse_modules().items():
        for node in ast.walk(tree):
            if isinstance(node, Function) and not node.name.startswith("__"):
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                if not UNCOUNTED_DECORATOR.search(decorators):
                    yield path, node


def iter_variables() -> Iterator[tuple[str, str]]:
    """Yield path and name of each variable and parameter."""
    for path, tree in parse_modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield path, node.id
            elif isinstance(node, ast.arg):
                yield path, node.arg


def find_vague_names() -> set[str]:
    """Return a line `path: name` for each vague name of a function, variable or parameter."""
    functions = {
        f"{path}: {node.name}()"
        for path, node in iter_functions()
        if node.name.strip("_") in VAGUE_FUNCTIONS
    }
    variables = {f"{path}: {name}" for path, name in iter_variables() if name in VAGUE_VARIABLES}
    return functions | variables


def test_vague_names_are_only_those_of_the_list() -> None:
    """A new vague name is refused, and a name that was renamed must leave the list."""
    assert find_vague_names() == set(EXCEPTIONS.read_text(encoding="utf-8").splitlines())


def test_docstrings_of_functions_do_not_open_oddly() -> None:
    """No docstring begins with a word such as "What" or "Whether" in place of a verb."""
    odd = [
        f"{path}:{node.lineno}"
        for path, node in iter_functions()
        if ODD_OPENING.match(ast.get_docstring(node) or "")
    ]
    assert odd == []


def test_most_names_of_functions_have_more_than_one_word() -> None:
    """A name of one word needs a well-known contract or a class with one evident task."""
    names = [node.name.strip("_") for _, node in iter_functions()]
    assert sum("_" not in name for name in names) <= MAX_ONE_WORD_SHARE * len(names)


def test_most_functions_have_a_docstring() -> None:
    """The share of functions with a docstring does not fall."""
    documented = [ast.get_docstring(node) is not None for _, node in iter_functions()]
    assert sum(documented) >= MIN_DOCUMENTED_SHARE * len(documented)


@pytest.mark.parametrize("opening", ["Whether a run waits.", "What is told.", "It is asked."])
def test_check_of_openings_finds_odd_openings(opening: str) -> None:
    """The pattern of odd openings matches the openings that it is meant for."""
    assert ODD_OPENING.match(opening)
