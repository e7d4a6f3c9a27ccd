"""The documentation page of the command line and --help describe all commands and options."""

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


def flatten_commands(commands: dict[str, Any], group: str = "") -> dict[str, Any]:
    """Return the commands by their whole name, including those of groups."""
    flattened: dict[str, Any] = {}
    for name, command in commands.items():
        inner = getattr(command, "commands", None)
        flattened |= (
            {group + name: command} if inner is None else flatten_commands(inner, f"{group}{name} ")
        )
    return flattened


# typer brings its own copy of click, whose types it does not export
COMMANDS: dict[str, Any] = flatten_commands(get_command(app).commands)  # type: ignore[attr-defined]


def find_options(text: str) -> list[tuple[str, str]]:
    """Return the options that the page lists, as they are typed, with their descriptions."""
    return re.findall(r"^- `(-.+?)`: (.+)$", text, re.M)


COMMON = find_options(PAGE.split("## `perdure", 1)[0])


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def test_docs_page_has_section_for_every_command() -> None:
    """The page describes no command that does not exist."""
    assert sorted(SECTIONS) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_docs_section_describes_every_option_like_help(name: str) -> None:
    """The page and --help have the same text for each option, on one line."""
    arguments, section = SECTIONS[name]
    help_options = re.findall(r"^  (-.+?)  +(\S.*)$", run(*name.split(), "--help"), re.M)
    shown = [(option, " ".join(meaning.split())) for option, meaning in help_options]
    declared = [p for p in COMMANDS[name].params if p.param_type_name == "option"]
    parameters = [p.metavar for p in COMMANDS[name].params if p.param_type_name == "argument"]

    assert [option_line for option_line in shown if option_line not in COMMON] == find_options(
        section
    )
    assert len(shown) == len(declared) + 1  # --help itself
    assert parameters == arguments


@pytest.mark.parametrize("name", COMMANDS)
def test_docs_page_has_example_of_every_command(name: str) -> None:
    """The page shows each command as it is typed; tests/perdure/test_docs.py runs it."""
    assert re.search(rf"^\$ perdure {name}\b", PAGE, re.M)


@pytest.mark.parametrize("name", ["", "memories", "store", *COMMANDS])
def test_help_has_whole_sentences_in_80_columns(name: str) -> None:
    """No line is wider than 80 columns, and no Python type is named."""
    usage, shown = run(*name.split(), "-h").split("\n", 1)
    descriptions = re.findall(r"^  \S.*?  +(\S.*)$", shown, re.M)

    assert not re.search(r"<\w|\[\[|\{\w|None", usage + shown)
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert not re.search(r"(\.\.|…)$", shown, re.M)
    assert descriptions
    assert all(
        re.match(r"[A-Za-z].*[^.][.\]]$", description)
        for description in descriptions
        if "to copy it" not in description
    )
