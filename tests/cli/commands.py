"""Running commands as they are typed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from perdure.cli import main
from perdure.cli.app import app


def attempt(*arguments: str, typed: str = "") -> Result:
    """What comes of a command, whatever that is."""
    return CliRunner().invoke(app, arguments, input=typed)


def run(*arguments: str, typed: str = "") -> str:
    """What a command prints; it must succeed."""
    result = attempt(*arguments, typed=typed)
    assert (result.exception, result.exit_code) == (None, 0), result.output
    return result.stdout


def read(*arguments: str) -> Any:
    """What a command prints as JSON."""
    return json.loads(run(*arguments, "--json"))


def rows(table: str) -> list[list[str]]:
    """The cells of a table, its headings first."""
    return [re.split(r"  +", line.strip()) for line in table.splitlines()]


def folded(table: str) -> list[str]:
    """The first cells of a table on a terminal, headings first: each whole, over several lines."""
    cells: list[str] = []
    for line in table.splitlines():
        cell, *others = re.split(r"  +", line.rstrip())
        if others:
            cells.append(cell)
        else:
            cells[-1] += cell
    return cells


def error(*arguments: str, into: pytest.CaptureFixture[str]) -> str:
    """What the program itself says on stderr when it ends with an error, after how to call it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["perdure", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    out, err = into.readouterr()
    usage, _, said = err.rpartition("perdure: ")
    assert (ended.value.code, out, usage.count("\n")) == (2, "", len(usage.splitlines()))
    assert said.count("\n") == 1
    return said
