"""The repository's layout, as pyproject.toml tells it to setuptools."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
_SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "setuptools"
]
LAYOUT: dict[str, str] = _SETUPTOOLS["package-dir"]
PACKAGES: list[str] = _SETUPTOOLS["packages"]


def folder_of(package: str) -> Path:
    """Where a package's files lie."""
    root = max((name for name in LAYOUT if f"{package}.".startswith(f"{name}.")), key=len)
    return ROOT / LAYOUT[root] / package[len(root) + 1 :].replace(".", "/")


def modules() -> list[str]:
    """Every module by its dotted name."""
    return sorted(
        package if path.stem == "__init__" else f"{package}.{path.stem}"
        for package in PACKAGES
        for path in folder_of(package).glob("*.py")
    )
