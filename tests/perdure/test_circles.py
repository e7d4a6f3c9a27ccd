"""Modules that import one another, also where a checker of types or a call alone does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from glob import glob
from pathlib import Path

import perdure

ROOT = Path(perdure.__file__).parent


@cache
def files() -> dict[str, Path]:
    """The modules of the package."""
    out = {}
    for path in glob("**/*.py", root_dir=ROOT, recursive=True):  # follows links, as of a checkout
        name = ".".join(["perdure", *Path(path).with_suffix("").parts])
        out[name.removesuffix(".__init__")] = ROOT / path
    return out


def imports(module: str) -> Iterator[tuple[str, str]]:
    """The names that a module imports from others of the package, and from which."""
    for node in ast.walk(ast.parse(files()[module].read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def exports(package: str) -> dict[str, str]:
    """The modules from which a package has its names."""
    return {name: module for module, name in imports(package)}


def source(module: str, name: str) -> str | None:
    """The module that an import reaches; None: none of the package."""
    if f"{module}.{name}" in files():
        return f"{module}.{name}"
    if module in files() and files()[module].name == "__init__.py" and name in exports(module):
        return source(exports(module)[name], name)
    return module if module in files() else None


def beyond(module: str, direct: dict[str, set[str]]) -> set[str]:
    """The modules that a module reaches, through others too."""
    reached, left = set[str](), [module]
    while left:
        new = direct.get(left.pop(), set()) - reached
        reached |= new
        left += new
    return reached


def test_no_modules_import_one_another() -> None:
    """A circle makes two modules one that is read in two files."""
    direct = dict[str, set[str]]()
    for module, path in files().items():
        if path.name != "__init__.py":  # a package names what its modules have
            sources = {source(*each) for each in imports(module)} - {None, module}
            direct[module] = {each for each in sources if each is not None}
    reached = {module: beyond(module, direct) for module in direct}

    circles = {
        frozenset(other for other in reached[module] if module in reached.get(other, ()))
        for module in direct
    }
    assert circles == {frozenset()}
