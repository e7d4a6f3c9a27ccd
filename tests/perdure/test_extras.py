"""The installed wheel with each extra by itself, in a virtual environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.perdure.test_packaging import PROJECT, build_sdist_and_wheel

# A program that works without any extra, and then uses a feature of each extra. It prints for each
# extra "works", or the error.
PROGRAM = """
import json, logging, sys
from pathlib import Path
from langgraph.checkpoint.base import empty_checkpoint
import perdure
from perdure import SQLiteCheckpointer, SQLiteStore
from perdure.errors import MissingDependency

config = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
with SQLiteCheckpointer.open("m.db") as saver, SQLiteStore.open("m.db") as store:
    saver.put(config, empty_checkpoint(), {}, {})
    assert saver.get_tuple(config) is not None
    store.put(("notes",), "1", {"text": "The canoe is called Nutshell"})
    assert [item.key for item in store.search(("notes",), query="name of a canoe")] == ["1"]

class Warnings(logging.Handler):
    def emit(self, record):
        raise MissingDependency(record.getMessage())

def use_agents():
    from perdure.memory import MemoryMiddleware

def use_background():
    from perdure.memory import Background

def use_encryption():
    SQLiteCheckpointer.open("sealed.db", key=b"k" * 32).close()

def use_postgres():
    from perdure import PostgresCheckpointer

def use_privacy():
    from perdure.memory.long_term.detectors import phone_numbers
    phone_numbers("US")

def use_server():
    from perdure.cli.app import explain_missing_server_packages
    with explain_missing_server_packages("the server"):
        import perdure.server.http.app

def use_tokens():
    from perdure.memory.short_term.tokens import token_counter
    logging.getLogger("perdure").addHandler(Warnings())
    token_counter("gpt-5").count_text("Hello")

def use_watch():
    from perdure.cli.app import explain_missing_server_packages
    with explain_missing_server_packages("the server"):
        from perdure.server.telemetry import Telemetry
    Telemetry.from_environment(metrics=True)

outcomes = {}
for name, use in [*globals().items()]:
    if name.startswith("use_"):
        try:
            use()
            outcomes[name[4:]] = "works"
        except MissingDependency as exc:
            outcomes[name[4:]] = str(exc)
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist_and_wheel(tmp_path_factory.mktemp("distributions"))[1]


def run(*command: Any, folder: Path) -> str:
    process = subprocess.run(
        [*map(str, command)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "extras",
    ["", *sorted(PROJECT["optional-dependencies"]), "server,watch"],
    ids=lambda extras: extras or "none",
)
def test_wheel_works_with_each_extra_alone(
    extras: str, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feature whose extra is missing names the pip command. Everything else works."""
    monkeypatch.undo()  # pip needs the machine's certificate authorities
    monkeypatch.delenv("PYTHONPATH", raising=False)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", folder=tmp_path)
    folder = "Scripts" if sys.platform == "win32" else "bin"
    python = tmp_path / "venv" / folder / "python"
    requirement = f"{wheel}[{extras}]" if extras else str(wheel)
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", requirement, folder=tmp_path)
    outcomes = json.loads(run(python, "-W", "error", "-c", PROGRAM, folder=tmp_path))
    installed = {*filter(None, extras.split(","))}
    # The package `mcp` requires `cryptography`, which is all that the extra `encryption` installs.
    installed |= {"encryption"} if "server" in installed else set()
    missing = {extra: text for extra, text in outcomes.items() if text != "works"}

    assert set(outcomes) == set(PROJECT["optional-dependencies"])
    assert set(outcomes) - set(missing) == installed
    for extra, text in missing.items():
        needed = "server" if extra == "watch" and "server" not in installed else extra
        assert f"perdure[{needed}]" in text
        assert "pip install" in text
        assert "\n" not in text
