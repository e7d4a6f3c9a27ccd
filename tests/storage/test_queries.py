"""The named SQL statements: the code uses each of them, and each one that the code uses exists."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from perdure.storage.flow import load_sql


def _list_statement_names(package: str) -> list[str]:
    scripts = Path(str(files(package).joinpath(""))).glob("*.sql")
    return [name for script in scripts for name in load_sql(package, script.name)]


@pytest.mark.parametrize("package", ["perdure.stores", "perdure.checkpointers"])
def test_every_named_statement_is_used(package: str) -> None:
    """A statement whose name does not occur in its package's code is dead.

    `NamedSQL.each` derives the name of the statement for many rows from the name of the one for one
    row. `perdure copy` uses the statements of copies.
    """
    folder, cli_package = Path(str(files(package).joinpath(""))), files("perdure.cli")
    paths = [*folder.glob("*.py"), Path(str(cli_package.joinpath("table_copy.py")))]
    code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    names_in_code = set(re.findall(r"""["'](\w+)["']""", code))

    names_in_scripts = {name.removesuffix("_all") for name in _list_statement_names(package)}

    assert sorted(names_in_scripts - names_in_code) == []


@pytest.mark.parametrize("package", ["perdure.stores", "perdure.checkpointers"])
def test_every_statement_that_code_uses_exists(package: str) -> None:
    """Every name that the code looks up is in a script."""
    folder = Path(str(files(package).joinpath("")))
    code = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    names_in_code = set(re.findall(r"""\bsql[\[(]["'](\w+)["']""", code))

    assert names_in_code
    assert sorted(names_in_code - set(_list_statement_names(package))) == []
