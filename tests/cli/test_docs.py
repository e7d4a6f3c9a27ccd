"""The page of the command line and --help say everything that the commands can be told."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.main import get_command

from perdure.cli.app import app
from tests.cli.commands import run
from tests.layout import ROOT

PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
HEADING = r"^## `perdure ([a-z -]*[a-z])([^`\n]*)`\n"
SECTIONS = {
    found[1]: (found[2].split(), found[3])
    for found in re.finditer(rf"{HEADING}(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}
WIDTH = 80


def flat(commands: dict[str, Any], group: str = "") -> dict[str, Any]:
    """Commands by their whole name, those of groups too."""
    found: dict[str, Any] = {}
    for name, command in commands.items():
        inner = getattr(command, "commands", None)
        found |= {group + name: command} if inner is None else flat(inner, f"{group}{name} ")
    return found


# typer brings its own copy of click, whose types it does not export
COMMANDS: dict[str, Any] = flat(get_command(app).commands)  # type: ignore[attr-defined]


def options(text: str) -> list[tuple[str, str]]:
    """The options that the page lists, as they are typed, and what they are for."""
    return re.findall(r"^- `(-.+?)`: (.+)$", text, re.M)


COMMON = options(PAGE.split("## `perdure", 1)[0])


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def test_every_command_has_a_section() -> None:
    """The page describes each command, and none that is not there."""
    assert sorted(SECTIONS) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_its_section(name: str) -> None:
    """The page and --help tell the same of each option, on one line."""
    arguments, section = SECTIONS[name]
    found = re.findall(r"^  (-.+?)  +(\S.*)$", run(*name.split(), "--help"), re.M)
    shown = [(option, " ".join(meaning.split())) for option, meaning in found]
    declared = [p for p in COMMANDS[name].params if p.param_type_name == "option"]
    taken = [p.metavar for p in COMMANDS[name].params if p.param_type_name == "argument"]

    assert [each for each in shown if each not in COMMON] == options(section)
    assert len(shown) == len(declared) + 1  # --help itself
    assert taken == arguments


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example(name: str) -> None:
    """The page shows each command as it is typed; tests/perdure/test_docs.py runs it."""
    assert re.search(rf"^\$ perdure {name}\b", PAGE, re.M)


@pytest.mark.parametrize("name", ["", "memories", "store", *COMMANDS])
def test_help_is_short_and_plain(name: str) -> None:
    """Each line fits into 80 columns and is a whole sentence; no type of Python is named."""
    usage, shown = run(*name.split(), "-h").split("\n", 1)
    said = re.findall(r"^  \S.*?  +(\S.*)$", shown, re.M)

    assert not re.search(r"<\w|\[\[|\{\w|None", usage + shown)
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert not re.search(r"(\.\.|…)$", shown, re.M)
    assert said
    assert all(re.match(r"[A-Za-z].*[^.][.\]]$", each) for each in said if "to copy it" not in each)
