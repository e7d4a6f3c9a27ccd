"""Running `perdure store` as it is typed, and items to run it on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

import perdure.cli  # noqa: F401 - it adds the commands
from perdure.cli.app import app

AT = "users/alice"


def attempt(*arguments: str, typed: str = "", group: str = "store") -> Result:
    return CliRunner().invoke(app, [*group.split(), *arguments], input=typed)


def run(*arguments: str, typed: str = "", group: str = "store") -> str:
    """What a command prints; it must succeed."""
    result = attempt(*arguments, typed=typed, group=group)
    assert (result.exception, result.exit_code) == (None, 0), result.output
    return result.stdout


def read(*arguments: str, group: str = "store") -> Any:
    return json.loads(run(*arguments, "--json", group=group))


def rows(table: str) -> list[list[str]]:
    """The cells of a table, its headings first."""
    return [re.split(r"  +", line.strip()) for line in table.splitlines()]


def raw(db: Path) -> bytes:
    """All bytes of a database and what is beside it."""
    return b"".join(path.read_bytes() for path in db.parent.glob(f"{db.name}*"))


def two_items() -> str:
    """Put an item of two versions, whose key is returned, and one of somebody else."""
    run("put", AT, "seat", '{"text": "prefers a window seat", "kind": "travel"}')
    run("put", AT, "seat", '{"text": "prefers an aisle seat", "kind": "travel"}')
    run("put", "users/bob", "hobby", "--text", "grows tomatoes")
    return "seat"
