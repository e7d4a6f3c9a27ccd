"""The named SQL statements: each is asked for somewhere, and each that is asked for is there."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from perdure.storage.flow import load_sql


def _statements(package: str) -> list[str]:
    scripts = Path(str(files(package).joinpath(""))).glob("*.sql")
    return [name for script in scripts for name in load_sql(package, script.name)]


@pytest.mark.parametrize("package", ["perdure.stores", "perdure.checkpointers"])
def test_every_statement_is_used(package: str) -> None:
    """A statement whose name stands nowhere in its package's code is a dead one.

    `NamedSQL.each` finds the statement for many rows by the name of that for one. Those of a copy
    are asked for by `perdure copy`.
    """
    folder, copy = Path(str(files(package).joinpath(""))), files("perdure.cli")
    paths = [*folder.glob("*.py"), Path(str(copy.joinpath("table_copy.py")))]
    code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    named = set(re.findall(r"""["'](\w+)["']""", code))

    stored = {name.removesuffix("_all") for name in _statements(package)}

    assert sorted(stored - named) == []


@pytest.mark.parametrize("package", ["perdure.stores", "perdure.checkpointers"])
def test_every_statement_used_is_there(package: str) -> None:
    """A name that the code looks up stands in the file."""
    folder = Path(str(files(package).joinpath("")))
    code = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    wanted = set(re.findall(r"""\bsql[\[(]["'](\w+)["']""", code))

    assert wanted
    assert sorted(wanted - set(_statements(package))) == []
