"""No package uses a private member of another package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.layout import ROOT

PACKAGES = {
    **{name: ROOT / name for name in ("checkpointers", "stores", "memory", "graphs")},
    **{
        name: ROOT / "src" / "perdure" / name for name in ("storage", "run_tables", "server", "cli")
    },
}
# The methods of named tuples are public although their names begin with an underscore.
PUBLIC_NAMES = {"_replace", "_asdict", "_fields", "_field_defaults", "_make"}
# Members of other libraries that have no public name: of `enum`, and of the `Auth` class of
# langgraph_sdk, whose handlers only langgraph's own server reads.
FOREIGN_NAMES = {"_value_", "_member_type_", "_authenticate_handler", "_global_handlers"}


def parse_modules(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder.glob("**/*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def list_imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the dotted names that an import statement imports."""
    prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return [f"{prefix}{alias.name}" for alias in node.names]


def list_defined_names(folder: Path) -> set[str]:
    """Return the names of all functions, classes, attributes and variables of a package."""
    names = set[str]()
    for _, module in parse_modules(folder):
        for node in ast.walk(module):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    names.add(node.name)
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_package_uses_no_private_members_of_other_packages(package: str) -> None:
    """Code of another package would break when the package changes its own details."""
    allowed = list_defined_names(PACKAGES[package]) | PUBLIC_NAMES | FOREIGN_NAMES
    uses = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}"
        for path, module in parse_modules(PACKAGES[package])
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in allowed
    ]

    assert uses == []


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_no_private_names_of_langgraph_or_langchain(package: str) -> None:
    """Their private modules, functions and classes change between minor versions."""
    imports = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        for path, module in parse_modules(PACKAGES[package])
        for node in ast.walk(module)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in list_imported_names(node)
        if name.startswith(("langgraph", "langchain", "deepagents"))
        and any(map(is_private, name.split(".")))
    ]

    assert imports == []


def test_private_attributes_of_auth_files_are_read_in_one_place_only() -> None:
    """langgraph_sdk has no public way to read the handlers of an `Auth`.

    Its source code says that servers read these attributes, and that a change of their names is a
    breaking change.
    """
    readers = {
        path.relative_to(ROOT).as_posix()
        for folder in PACKAGES.values()
        for path, module in parse_modules(folder)
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and node.attr in ("_authenticate_handler", "_global_handlers")
    }

    assert readers == {"src/perdure/server/http/auth_file.py"}


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_no_private_names(package: str) -> None:
    imports = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {alias.name}"
        for path, module in parse_modules(PACKAGES[package])
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("perdure.")
        for alias in node.names
        if is_private(alias.name)
    ]

    assert imports == []
