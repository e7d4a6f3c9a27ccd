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


@pytest.mark.parametrize(
    "package", ["perdure.stores", "perdure.checkpointers", "perdure.run_tables"]
)
def test_every_named_statement_is_used(package: str) -> None:
    """A statement whose name does not occur in its package's code is dead.

    `NamedSQL.each` derives the name of the statement for many rows from the name of the one for one
    row. `perdure copy` uses the statements of copies.
    """
    folder, cli_package = Path(str(files(package).joinpath(""))), files("perdure.cli")
    copy_modules = Path(str(cli_package.joinpath(""))).glob("copied_*_tables.py")
    paths = [*folder.rglob("*.py"), *copy_modules]
    code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    names_in_code = set(re.findall(r"""["'](\w+)["']""", code))

    names_in_scripts = {name.removesuffix("_all") for name in _list_statement_names(package)}

    assert sorted(names_in_scripts - names_in_code) == []


@pytest.mark.parametrize(
    "package", ["perdure.stores", "perdure.checkpointers", "perdure.run_tables"]
)
def test_every_statement_that_code_uses_exists(package: str) -> None:
    """Every name that the code looks up is in a script."""
    folder = Path(str(files(package).joinpath("")))
    code = "\n".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    names_in_code = set(re.findall(r"""\b_?sql[\[(]["'](\w+)["']""", code))

    names_in_scripts = {*_list_statement_names(package)}
    if package == "perdure.run_tables":  # It also uses the statements of the checkpointer.
        names_in_scripts |= {*_list_statement_names("perdure.checkpointers")}

    assert names_in_code
    assert sorted(names_in_code - names_in_scripts) == []
