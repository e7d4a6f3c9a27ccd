"""Functions that run commands as a user types them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from perdure.cli import main
from perdure.cli.app import app


def invoke(*arguments: str, stdin: str = "") -> Result:
    """Run a command and return its result, whether it succeeds or fails."""
    return CliRunner().invoke(app, arguments, input=stdin)


def run(*arguments: str, stdin: str = "") -> str:
    """Run a command that must succeed, and return its stdout."""
    result = invoke(*arguments, stdin=stdin)
    assert (result.exception, result.exit_code) == (None, 0), result.output
    return result.stdout


def run_json(*arguments: str) -> Any:
    """Run a command with `--json`, and return the parsed output."""
    return json.loads(run(*arguments, "--json"))


def split_rows(table: str) -> list[list[str]]:
    """Return the cells of each line of a table, the headings first."""
    return [re.split(r"  +", line.strip()) for line in table.splitlines()]


def join_first_cells(table: str) -> list[str]:
    """Return the first cell of each row, joined over its lines; the heading comes first."""
    cells: list[str] = []
    for line in table.splitlines():
        cell, *others = re.split(r"  +", line.rstrip())
        if others:
            cells.append(cell)
        else:
            cells[-1] += cell
    return cells


def run_and_read_error(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must exit with 2, and return its message on stderr after the usage."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["perdure", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
    out, err = capsys.readouterr()
    usage, _, message = err.rpartition("perdure: ")
    assert (exit_info.value.code, out, usage.count("\n")) == (2, "", len(usage.splitlines()))
    assert message.count("\n") == 1
    return message
