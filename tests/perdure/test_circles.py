"""Cycles of imports, including those for type checkers and those within functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from glob import glob
from pathlib import Path

import perdure

ROOT = Path(perdure.__file__).parent


@cache
def find_module_files() -> dict[str, Path]:
    """Return the file of each module of the package."""
    files = {}
    for path in glob("**/*.py", root_dir=ROOT, recursive=True):  # follows links, as of a checkout
        name = ".".join(["perdure", *Path(path).with_suffix("").parts])
        files[name.removesuffix(".__init__")] = ROOT / path
    return files


def iter_imports(module: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import in a module."""
    for node in ast.walk(ast.parse(find_module_files()[module].read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def find_exporting_modules(package: str) -> dict[str, str]:
    """Return for each name of a package the module from which it is imported."""
    return {name: module for module, name in iter_imports(package)}


def resolve_import(module: str, name: str) -> str | None:
    """Return the module that an import reaches, or None if it is outside of the package."""
    if f"{module}.{name}" in find_module_files():
        return f"{module}.{name}"
    if (
        module in find_module_files()
        and find_module_files()[module].name == "__init__.py"
        and name in find_exporting_modules(module)
    ):
        return resolve_import(find_exporting_modules(module)[name], name)
    return module if module in find_module_files() else None


def find_reachable_modules(module: str, imported_modules: dict[str, set[str]]) -> set[str]:
    """Return the modules that a module imports directly or through others."""
    reached, pending = set[str](), [module]
    while pending:
        new = imported_modules.get(pending.pop(), set()) - reached
        reached |= new
        pending += new
    return reached


def test_modules_have_no_import_cycles() -> None:
    """Modules of a cycle would be one module in several files."""
    imported_modules = dict[str, set[str]]()
    for module, path in find_module_files().items():
        if path.name != "__init__.py":  # a package imports the public names of its modules
            sources = {resolve_import(*pair) for pair in iter_imports(module)} - {None, module}
            imported_modules[module] = {source for source in sources if source is not None}
    reached = {
        module: find_reachable_modules(module, imported_modules) for module in imported_modules
    }

    cycles = {
        frozenset(other for other in reached[module] if module in reached.get(other, ()))
        for module in imported_modules
    }
    assert cycles == {frozenset()}
