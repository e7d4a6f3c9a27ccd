"""What is installed: one import package, laid out over the top-level folders."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import perdure
from tests.layout import LAYOUT, PACKAGES, ROOT, folder_of


def test_every_folder_is_declared() -> None:
    """A folder with modules that is not in `packages` would be missing after an installation."""
    found = set()
    for name, folder in LAYOUT.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((name, *inner)))

    assert found == set(PACKAGES)


def test_the_wheel_holds_perdure_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the package reads, templates and assets too; no top-level name but `perdure`."""
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
        for path in folder_of(package).iterdir()
        if path.suffix in (".py", ".sql", ".typed")
    }
    for package, inner in (("stores", "weights"), ("server", "templates"), ("server", "assets")):
        files = (folder_of(f"perdure.{package}") / inner).iterdir()
        expected |= {f"perdure/{package}/{inner}/{path.name}" for path in files}

    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"perdure", f"perdure-{perdure.__version__}.dist-info"} == {
        name.split("/")[0] for name in names
    }


def test_public_names() -> None:
    """What a package exports is there, and sorted."""
    for package in ("", ".checkpointers", ".memory", ".graphs"):
        module = __import__(f"perdure{package}", fromlist=["__all__"])

        assert sorted(module.__all__) == list(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_star_imports_need_no_extra() -> None:
    """`import *` takes what can be imported; a missing extra is named where it is used."""
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stderr == ""
    missing = [line for line in done.stdout.splitlines() if line.startswith("MissingDependency")]
    assert len(missing) == 6
    assert all("pip install" in line for line in missing)
