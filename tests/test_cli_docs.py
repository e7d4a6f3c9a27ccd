"""The page of the command line says everything that the commands can be told."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import perdure.cli  # noqa: F401 - it adds the commands
from perdure.cli.app import app

PAGE = (Path(__file__).parent.parent / "docs" / "cli.md").read_text(encoding="utf-8")
SECTIONS = dict(
    re.findall(r"^## `perdure ([a-z -]*[a-z]).*?`\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
)


def flat(commands: dict[str, Any], group: str = "") -> dict[str, Any]:
    """Commands by their whole name, those of groups too."""
    found: dict[str, Any] = {}
    for name, command in commands.items():
        inner = getattr(command, "commands", None)
        found |= {group + name: command} if inner is None else flat(inner, f"{group}{name} ")
    return found


MOVING = (  # what is another each time: a moment, a key, a hash, a size, the library, a folder
    r"\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)",
    r"\d{4}-\d\d-\d\d(?= fact|:)|just now|\d \w+ ago",
    r"\b[2-9a-hjkmnp-z]{9}\b",
    r"\b[0-9a-f]{32}\b",
    r"[\d.]+ [kM]B$",
    r"(?<=sqlite_version ).*",
    r"(?<=wal_reset_bug ).*",
    r"\S*memory\.db",
)


# typer brings its own copy of click, whose types it does not export
COMMANDS: dict[str, Any] = flat(get_command(app).commands)  # type: ignore[attr-defined]


def parameters(name: str) -> list[Any]:
    return [p for p in COMMANDS[name].params if p.name != "help"]


def test_every_command_has_a_section() -> None:
    """No command is left out, and the page describes none that is not there."""
    assert sorted(COMMANDS) == sorted(SECTIONS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_is_in_its_section(name: str) -> None:
    """Each option is in the command's own table, each argument in its heading, and no other."""
    options = {o for p in parameters(name) if p.param_type_name == "option" for o in p.opts}
    rows = re.findall(r"^\| (`-.+?) \|", SECTIONS[name], re.M)
    written = {o for row in rows for o in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", row)}
    heading = re.search(rf"^## `perdure {name}(.*)`$", PAGE, re.M)
    arguments = [
        p.metavar or p.name.upper() for p in parameters(name) if p.param_type_name == "argument"
    ]

    assert options == written
    assert heading is not None
    assert arguments == heading[1].split()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_an_example(name: str) -> None:
    """A section shows the command as it is typed and what it prints."""
    examples = re.findall(r"^```console\n(.*?)^```", SECTIONS[name], re.M | re.S)

    assert any(re.search(rf"^\$ .*perdure {name}\b.*\n[^$]", example, re.M) for example in examples)


def typed(line: str) -> str:
    """What a line of an example prints when it is typed: a command, or `echo … | command`."""
    *said, command = line.rsplit(" | ", 1) if line.startswith("echo ") else [line]
    given = shlex.split(said[0])[1] if said else "y"
    result = CliRunner().invoke(app, shlex.split(command)[1:], input=f"{given}\n")
    assert result.exit_code == 0 or result.output.startswith("quarantined "), result.output
    return result.output


def settled(text: str) -> list[str]:
    """Its lines, without what is another each time and with one space for many."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [re.sub("|".join(MOVING), "…", line) for line in lines]


@pytest.mark.parametrize("part", ["Memories", "Items across threads"])
def test_examples_in_order(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed one after another in a fresh file, the commands of a part print what the page says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERDURE_DB", "memory.db")
    (page,) = re.findall(rf"^## {part}\n(.*?)(?=^## [^`]|\Z)", PAGE, re.M | re.S)
    blocks = re.findall(r"^```console\n(.*?)^```", page, re.M | re.S)
    examples = re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", "".join(blocks), re.M)
    assert len(examples) > 15
    for line, shown in examples:
        if line != "perdure store pending":  # it shows what only an embedder that fails leaves
            assert (line, settled(shown)) == (line, settled(typed(line)))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_option_has_help(name: str) -> None:
    """--help says in a sentence what the command does and what each of its options does."""
    shown = CliRunner().invoke(app, [*name.split(), "--help"])

    assert shown.exit_code == 0
    assert re.fullmatch(r"[A-Z].*[.]", COMMANDS[name].help.split("\n\n")[0], re.S)
    for parameter in parameters(name):
        assert re.fullmatch(r"[A-Za-z].*[.]", parameter.help or ""), parameter.name
        assert all(option in shown.output for option in parameter.opts if option[0] == "-")
