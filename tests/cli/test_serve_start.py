"""`perdure serve` says at its start what it serves, and refuses graphs that are none."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from tests import postgres_server
from tests.cli.commands import run_and_read_error
from tests.cli.test_serve import served
from tests.server.test_keys import ANN, entry

GRAPHS = """
from contextlib import asynccontextmanager

from perdure.graphs import chat_graph

compiled = chat_graph()
number = 5
text = "compiled"


class State:
    pass


def made(config):
    return chat_graph()


@asynccontextmanager
async def opened(config):
    yield chat_graph()
"""


def langgraph_json(folder: Path, **graphs: str) -> str:
    """A langgraph.json that names objects of a module."""
    (folder / "start_graphs.py").write_text(GRAPHS)
    file = folder / "langgraph.json"
    file.write_text(json.dumps({"graphs": graphs}))
    return str(file)


def test_it_says_what_it_serves(db: Path, tmp_path: Path) -> None:
    """The database, the user and perdure's own graphs."""
    with served("--user", "zoe", db=db) as (_, said, _):
        lines = said.splitlines()

    assert f"database: {db}" in lines
    assert "user: zoe" in lines
    assert "graphs: chat, agent (built-in)" in lines


def test_it_says_whose_graphs_and_keys_it_has(db: Path, tmp_path: Path) -> None:
    """Graphs of a file by their names, and with keys the file of the users; a path is absolute."""
    graphs = ("compiled", "made", "opened")
    file = langgraph_json(tmp_path, **{name: f"./start_graphs.py:{name}" for name in graphs})
    keys = tmp_path / "keys.toml"
    keys.write_text(entry(ANN, "ann"))
    relative = Path(os.path.relpath(db))
    with served("--graphs", file, "--keys", str(keys), db=relative) as (_, said, _):
        lines = said.splitlines()

    assert f"database: {db}" in lines
    assert f"users: from {keys}" in lines
    assert f"graphs: compiled, made, opened from {file}" in lines


def test_it_says_no_password_of_postgres() -> None:
    """Of a DSN it shows the user, the host and the database."""
    dsn = make_conninfo(postgres_server.dsn(), password="hunter2")
    with served(db=Path(dsn)) as (_, said, _):
        [line] = re.findall(r"^database: .*$", said, re.M)

    assert line.startswith("database: postgresql://")
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        ("./start_graphs.py:number", "'a', './start_graphs.py:number' of {file}, is 5; expected a"),
        ("./start_graphs.py:text", "is 'compiled'; expected a StateGraph, a compiled graph, or a"),
        ("./start_graphs.py:State", ".State'>; expected a StateGraph"),
        ("./start_graphs.py:none", "cannot be imported: './start_graphs.py' has no 'none'"),
        (
            "./start_graphs.py",
            "cannot be imported: it does not name an object of a module; expected",
        ),
        ("./missing.py:graph", "cannot be imported: there is no file '{folder}/missing.py'"),
        ("no_such_package:graph", "cannot be imported: ModuleNotFoundError: No module named"),
    ],
    ids=lambda value: value if value.startswith((".", "no_")) else "",
)
def test_a_graph_that_is_none_is_refused(
    graph: str, said: str, db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the graph, the file that names it, and what is wrong."""
    file = langgraph_json(tmp_path, a=graph)
    wrong = run_and_read_error("serve", "--port", "0", "--graphs", file, capsys=capsys)

    assert wrong.startswith("the graph 'a'"), wrong
    assert said.format(file=repr(file), folder=tmp_path) in wrong
    assert repr(file) in wrong


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Each option says which file is not there, and nothing about another option."""
    assert run_and_read_error("serve", "--port", "0", "--graphs", "none.json", capsys=capsys) == (
        "'none.json' cannot be read: there is no such file; expected a langgraph.json with "
        '"graphs": {"name": "./file.py:graph"}\n'
    )
    said = run_and_read_error("serve", "--port", "0", "--auth", "none.py:auth", capsys=capsys)
    assert said == (
        "the file of authentication handlers is 'none.py:auth', which cannot be imported: there is "
        f"no file '{os.path.realpath('none.py')}'; expected './file.py:name' or "
        "'package.module:name'\n"
    )
