"""The installed package: one import package from several top-level folders."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import perdure
from tests.layout import LAYOUT, PACKAGES, ROOT, package_folder


def test_every_package_folder_is_declared_in_pyproject() -> None:
    """A package that `packages` does not name would be missing after an installation."""
    packages = set()
    for name, folder in LAYOUT.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            packages.add(".".join((name, *inner)))

    assert packages == set(PACKAGES)


@pytest.mark.slow
def test_wheel_contains_exactly_the_files_of_perdure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates and assets are included, and `perdure` is the only top-level name."""
    monkeypatch.undo()  # pip needs the machine's certificate authorities
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", tmp_path, str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        f"{package.replace('.', '/')}/{path.name}"
        for package in PACKAGES
        for path in package_folder(package).iterdir()
        if path.suffix in (".py", ".sql", ".typed")
    }
    for package, inner in (("stores", "weights"), ("server", "templates"), ("server", "assets")):
        files = (package_folder(f"perdure.{package}") / inner).iterdir()
        expected |= {f"perdure/{package}/{inner}/{path.name}" for path in files}

    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"perdure", f"perdure-{perdure.__version__}.dist-info"} == {
        name.split("/")[0] for name in names
    }


def test_exported_names_exist_and_are_sorted() -> None:
    """This holds for `__all__` of each public package."""
    for package in ("", ".checkpointers", ".memory", ".graphs"):
        module = __import__(f"perdure{package}", fromlist=["__all__"])

        assert sorted(module.__all__) == list(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_star_imports_work_without_extras() -> None:
    """A missing extra is named where one of its names is used."""
    extras = (
        *("bpe_openai", "cryptography", "dbos", "detect_secrets", "fastapi", "jinja2", "langchain"),
        *("mcp", "opentelemetry", "phonenumbers", "psycopg", "psycopg_pool"),
        *("python_multipart", "sqlalchemy", "uvicorn"),
    )
    packages = ("perdure", *(f"perdure.{name}" for name in ("checkpointers", "stores", "memory")))
    code = f"""
import sys
from importlib import import_module
sys.modules.update(dict.fromkeys({extras}))
for package in {(*packages, "perdure.graphs", "perdure.memory.adapters")}:
    exec(f"from {{package}} import *")
print(trim, SummaryState, SQLiteStore, SQLiteCheckpointer, chat_graph, MessageChatMemory)
for package in {packages}:
    for name in ("PostgresStore", "PostgresCheckpointer", "Background", "MemoryMiddleware"):
        try:
            getattr(import_module(package), name)
        except (AttributeError, ImportError) as exc:
            print(type(exc).__name__, exc)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert process.stderr == ""
    missing = [line for line in process.stdout.splitlines() if line.startswith("MissingDependency")]
    assert len(missing) == 6
    assert all("pip install" in line for line in missing)
