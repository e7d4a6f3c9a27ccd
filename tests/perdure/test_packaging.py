"""The installed package: one import package from several top-level folders."""

from __future__ import annotations

import ast
import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.layout import LAYOUT, PACKAGES, ROOT, package_folder


def test_every_package_folder_is_declared_in_pyproject() -> None:
    """A package that `packages` does not name would be missing after an installation."""
    packages = set()
    for name, folder in LAYOUT.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            packages.add(".".join((name, *inner)))

    assert packages == set(PACKAGES)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = PROJECT["version"]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the source distribution and the wheel."""
    return build_sdist_and_wheel(tmp_path_factory.mktemp("distributions"))


def build_sdist_and_wheel(folder: Path) -> tuple[Path, Path]:
    """Build the source distribution, and the wheel from the unpacked source distribution."""
    sdist = build_sdist(folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    wheel = build_distribution("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)
    return sdist, wheel


def build_sdist(folder: Path) -> Path:
    """Build the source distribution in a copy of the files that git tracks."""
    source = folder / "source"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    return build_distribution("sdist", source, folder)


def build_distribution(kind: str, source: Path, folder: Path) -> Path:
    """Build a wheel or an sdist of a folder, with the setuptools that is installed."""
    code = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(folder)!r}))"
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return folder / process.stdout.splitlines()[-1]


def read_metadata(wheel: Path) -> Message:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.mark.slow
def test_wheel_contains_exactly_the_files_of_perdure(distributions: tuple[Path, Path]) -> None:
    """Templates and assets are included, and `perdure` is the only top-level name.

    The wheel is built from the source distribution, which is therefore complete.
    """
    names = zipfile.ZipFile(distributions[1]).namelist()
    expected = {"perdure/graphs/langgraph.json"} | {
        f"perdure/{package.removeprefix('perdure').lstrip('.').replace('.', '/')}/{path.name}"
        for package in PACKAGES
        for path in package_folder(package).iterdir()
        if path.suffix in (".py", ".sql", ".typed")
    }
    expected = {name.replace("//", "/") for name in expected}
    for package, inner in (("stores", "weights"), ("server", "templates"), ("server", "assets")):
        files = (package_folder(f"perdure.{package}") / inner).iterdir()
        expected |= {
            f"perdure/{package}/{inner}/{path.name}"
            for path in files
            if not path.name.startswith(("LICENSE", "NOTICE"))
        }

    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"perdure", f"perdure-{VERSION}.dist-info"} == {name.split("/")[0] for name in names}


@pytest.mark.slow
def test_wheel_has_the_text_of_each_licence(distributions: tuple[Path, Path]) -> None:
    """The licence expression names the licences of the bundled data and scripts, too."""
    metadata = read_metadata(distributions[1])
    texts = "\n".join(
        zipfile.Path(distributions[1], f"perdure-{VERSION}.dist-info/licenses/{name}").read_text(
            encoding="utf-8"
        )
        for name in metadata.get_all("License-File", [])
    )
    titles = {
        "MIT": "MIT License",
        "Apache-2.0": "Apache License",
        "BSD-3-Clause": "Neither the name of the Snowball project",
        "CC-BY-SA-4.0": "Attribution-ShareAlike 4.0 International",
        "0BSD": "Zero-Clause BSD",
    }

    assert set(str(metadata["License-Expression"]).split(" AND ")) == set(titles)
    assert [title for title in titles.values() if title not in texts] == []


@pytest.mark.slow
def test_description_has_no_relative_links(distributions: tuple[Path, Path]) -> None:
    """A package index has only the description, not the files of the repository."""
    description = str(read_metadata(distributions[1]).get_payload())
    targets = re.findall(r"\]\(([^)\s]+)\)", description)
    anchors = {
        "#" + re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in description.splitlines()
        if line.startswith("#")
    }

    assert [t for t in targets if not t.startswith(("https://", "#"))] == []
    assert {t for t in targets if t.startswith("#")} <= anchors


@pytest.mark.slow
def test_source_distribution_has_the_same_bytes_each_time(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """Times and permissions of the files do not matter."""
    again = build_sdist(tmp_path)

    assert again.read_bytes() == distributions[0].read_bytes()


@pytest.mark.slow
def test_source_distribution_contains_only_what_a_build_needs(
    distributions: tuple[Path, Path],
) -> None:
    with tarfile.open(distributions[0]) as archive:
        names = {member.name.split("/")[1] for member in archive if member.isfile()}

    assert names == {
        *("CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "SECURITY.md"),
        *("checkpointers", "graphs", "memory", "perdure.egg-info", "pyproject.toml", "setup.cfg"),
        *("setup.py", "src", "stores"),
    }


@pytest.mark.parametrize(
    ("source_url", "expected"),
    [
        ("https://x.test/p/blob/main", "[a](https://x.test/p/blob/main/docs/a.md#b) [c](#c) !"),
        (None, "a [c](#c) !"),
    ],
)
def test_links_of_the_readme_become_absolute(source_url: str | None, expected: str) -> None:
    """Without the URL of a repository, the text of the link remains."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8").split("\nsetup(")[0]
    namespace: dict[str, Any] = {"__file__": str(ROOT / "setup.py")}
    exec(compile(setup, "setup.py", "exec"), namespace)

    assert namespace["make_links_absolute"]("[a](docs/a.md#b) [c](#c) !", source_url) == expected


def test_imported_packages_are_declared() -> None:
    """A package that only another package requires could disappear with a new version."""
    requirements = [
        *PROJECT["dependencies"],
        *chain.from_iterable(PROJECT["optional-dependencies"].values()),
    ]
    declared = {re.split(r"[^\w.-]", text)[0].lower().replace("_", "-") for text in requirements}
    # These packages are parts of a declared package, or are imported only if they are installed.
    declared |= {"anyio", "langgraph-checkpoint-postgres", "markupsafe", "openai"}
    declared |= {"pydantic-core", "sqlalchemy", "starlette", "tiktoken"}
    distribution_names = packages_distributions()
    imported = {
        name.split(".")[0]
        for package in PACKAGES
        for path in package_folder(package).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    undeclared = {
        name
        for name in imported - sys.stdlib_module_names - {"perdure"}
        if not {d.lower().replace("_", "-") for d in distribution_names.get(name, ())} & declared
    }

    assert undeclared == set()


@pytest.mark.parametrize(
    ("statement", "unneeded"),
    [
        ("import perdure", {"langgraph", "langchain_core", "pydantic", "numpy", "sqlite3"}),
        (
            "from perdure import SQLiteCheckpointer",
            {"Stemmer", "jsonpatch", "numpy", "openai", "platformdirs", "rich", "typer"},
        ),
        ("from perdure import SQLiteStore", {"jsonpatch", "openai", "platformdirs", "rich"}),
        ("from perdure.memory import trim", {"Stemmer", "openai", "platformdirs", "typer"}),
    ],
)
def test_imports_load_only_the_packages_that_they_need(statement: str, unneeded: set[str]) -> None:
    """An import of perdure does not make an application slow to start."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()

    assert unneeded & set(loaded) == set()


def test_checkpointer_needs_no_packages_that_the_saver_of_langgraph_does_not_need() -> None:
    """The import of the checkpointer therefore takes about as long as that of langgraph's saver."""

    def list_foreign_packages(statement: str) -> set[str]:
        code = f"{statement}\nimport sys\nprint(*sys.modules)"
        process = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        )
        packages = {name.split(".")[0] for name in process.stdout.split()}
        return packages - sys.stdlib_module_names - {"perdure"}

    own = list_foreign_packages("from perdure import SQLiteCheckpointer")
    theirs = list_foreign_packages("from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver")

    assert own - theirs == set()


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
