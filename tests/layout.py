"""The layout of the repository, as pyproject.toml describes it to setuptools."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
_SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "setuptools"
]
LAYOUT: dict[str, str] = _SETUPTOOLS["package-dir"]
PACKAGES: list[str] = _SETUPTOOLS["packages"]


def package_folder(package: str) -> Path:
    """Return the folder of a package's files."""
    root = max((name for name in LAYOUT if f"{package}.".startswith(f"{name}.")), key=len)
    return ROOT / LAYOUT[root] / package[len(root) + 1 :].replace(".", "/")


def list_modules() -> list[str]:
    """Return the dotted names of all modules."""
    return sorted(
        package if path.stem == "__init__" else f"{package}.{path.stem}"
        for package in PACKAGES
        for path in package_folder(package).glob("*.py")
    )
