"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import certifi
import pytest
import typer.main
import typer.testing
from hypothesis import HealthCheck, settings

from perdure.checkpointers import SQLiteCheckpointer
from tests import postgres_server, programs
from tests.backends import BACKENDS, SLOW, Place, places
from tests.chosen_tests import choose_tests, has_more_rounds
from tests.rounds import rounds, run_all_rounds

# Files of tests lie in memory where there is room (a container may have 64 MB): half of the time
# went into waiting for the disk. Processes are killed, never the machine, so no test gets weaker.
MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
    tempfile.tempdir = os.environ["TMPDIR"] = str(MEMORY)

# All modules of tests and what they import stay until the end: a collection of the garbage need
# not go over them again and again.
gc.disable()

# typer makes all commands anew at each call, which took nine tenths of the time of a command
typer.main.get_command = cache(typer.main.get_command)
typer.testing._get_command = typer.main.get_command  # type: ignore[attr-defined]
SKIPPED = "perdure/skipped"  # in pytest's cache: tests that waited for a program to be installed


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that run slow tests and all rounds of repeated tests."""
    group = parser.getgroup("perdure")
    group.addoption(
        "--all",
        action="store_true",
        help="slow tests too, all rounds, and all combinations of parameters",
    )
    group.addoption(
        "--rest",
        action="store_true",
        help="what a run without --all left out: slow tests, all rounds of what repeats, further "
        "combinations of parameters, and what was skipped for a missing program",
    )


@pytest.hookimpl(tryfirst=True)  # --hypothesis-profile goes before
def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of rounds before a test module is imported."""
    if config.option.all or config.option.rest:
        run_all_rounds()
    settings.register_profile(
        "default",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=rounds(60),
    )
    settings.register_profile("deep", deadline=None, max_examples=2000)
    settings.load_profile("default")


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """Return twice the number of cores, because tests wait for a third of their time."""
    return 2 * (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the servers that they need, and deselect those that the options exclude."""
    for item in items:
        if "postgres" in item.nodeid or "pgbouncer" in item.nodeid:
            item.add_marker("postgres")
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
            item.add_marker("slow")
    if config.option.all or any("::" in arg for arg in config.args):
        return
    chosen_ids = {*map(id, choose_tests(items))}
    if config.option.rest:
        cache = getattr(config, "cache", None)  # there is none with -p no:cacheprovider
        skipped = set(cache.get(SKIPPED, [])) if cache else set()
        chosen = [
            item
            for item in items
            if id(item) not in chosen_ids or has_more_rounds(item) or item.nodeid in skipped
        ]
    else:
        chosen = [item for item in items if id(item) in chosen_ids]
    config.hook.pytest_deselected(items=[*({*items} - {*chosen})])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Exclude all objects that exist now from garbage collections."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse the Postgres server to tests without its marker."""
    postgres_server.allow_use(item.get_closest_marker("postgres") is not None)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after all other summaries
def pytest_terminal_summary(
    terminalreporter: Any, config: pytest.Config
) -> Generator[None, None, None]:
    """Print which tests were skipped for a missing program, and store their ids for `--rest`."""
    yield
    stats: dict[str, list[Any]] = terminalreporter.stats
    skipped = programs.find_tests_without_program(stats.get("skipped", []))
    for line in programs.summarize_missing_programs(skipped):
        terminalreporter.write_line(line, yellow=True)
    if cache := getattr(config, "cache", None):
        ran = {getattr(report, "nodeid", "") for reports in stats.values() for report in reports}
        before = {*cache.get(SKIPPED, [])}
        cache.set(SKIPPED, sorted((before - ran) | {*skipped}))


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one certificate authority.

    HTTP clients read all authorities, which takes long.
    """
    first, end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERT")
    path = tmp_path_factory.mktemp("authority") / "one.pem"
    path.write_text(f"{first}{end}IFICATE-----\n", encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, authority: Path) -> None:
    """Keep the developer's own settings out of the tests."""
    for name in [name for name in os.environ if name.startswith("PERDURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))


BACKEND_PARAMS = [
    pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in sorted(BACKENDS)
]


@pytest.fixture(params=BACKEND_PARAMS)
def saver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SQLiteCheckpointer]:
    """A checkpointer on each backend."""
    with BACKENDS[request.param](tmp_path) as opened:
        yield opened


@pytest.fixture(params=["file", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """The location of a database that other processes may open too."""
    return places(tmp_path)[request.param]()


@pytest.fixture
def file_saver(tmp_path: Path) -> Iterator[SQLiteCheckpointer]:
    """A checkpointer on a plain file."""
    with SQLiteCheckpointer.open(tmp_path / "plain.db") as opened:
        yield opened
