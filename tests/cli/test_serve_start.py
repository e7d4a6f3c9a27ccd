"""`perdure serve` prints what it serves when it starts, and refuses invalid graphs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from tests import postgres_server
from tests.cli.commands import run_and_read_error
from tests.cli.test_serve import start_server
from tests.server.http.test_keys import ANN, render_key_entry

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


def write_langgraph_json(folder: Path, **graphs: str) -> str:
    """Write a langgraph.json that names objects of a module, and return its path."""
    (folder / "start_graphs.py").write_text(GRAPHS)
    file = folder / "langgraph.json"
    file.write_text(json.dumps({"graphs": graphs}))
    return str(file)


def test_serve_prints_database_user_and_built_in_graphs(db: Path, tmp_path: Path) -> None:
    with start_server("--user", "zoe", db=db) as (_, output, _):
        lines = output.splitlines()

    assert f"database: {db}" in lines
    assert "user: zoe" in lines
    assert "graphs: chat, agent (built-in)" in lines


@pytest.mark.slow
def test_serve_prints_files_of_its_graphs_and_keys(db: Path, tmp_path: Path) -> None:
    """Graphs are printed with their names, and paths are absolute."""
    graphs = ("compiled", "made", "opened")
    file = write_langgraph_json(tmp_path, **{name: f"./start_graphs.py:{name}" for name in graphs})
    keys = tmp_path / "keys.toml"
    keys.write_text(render_key_entry(ANN, "ann"))
    relative = Path(os.path.relpath(db))
    with start_server("--graphs", file, "--keys", str(keys), db=relative) as (_, output, _):
        lines = output.splitlines()

    assert f"database: {db}" in lines
    assert f"users: from {keys}" in lines
    assert f"graphs: compiled, made, opened from {file}" in lines


@pytest.mark.slow
def test_serve_hides_password_of_postgres() -> None:
    """Of a DSN, the user, the host and the database are printed."""
    dsn = make_conninfo(postgres_server.dsn(), password="hunter2")
    with start_server(db=Path(dsn)) as (_, output, _):
        [line] = re.findall(r"^database: .*$", output, re.M)

    assert line.startswith("database: postgresql://")
    assert "hunter2" not in output


@pytest.mark.parametrize(
    ("graph", "expected_message"),
    [
        ("./start_graphs.py:number", "'a', './start_graphs.py:number' of {file}, is 5; expected a"),
        ("./start_graphs.py:text", "is 'compiled'; expected a StateGraph, a compiled graph, or a"),
        ("./start_graphs.py:State", ".State'>; expected a StateGraph"),
        ("./start_graphs.py:none", "cannot be imported: './start_graphs.py' has no 'none'"),
        (
            "./start_graphs.py",
            "cannot be imported: it does not name an object in a module; expected",
        ),
        ("./missing.py:graph", "cannot be imported: the file '{folder}/missing.py' does not exist"),
        ("no_such_package:graph", "cannot be imported: ModuleNotFoundError: No module named"),
    ],
    ids=lambda value: value if value.startswith((".", "no_")) else "",
)
def test_serve_refuses_object_that_is_not_a_graph(
    graph: str, expected_message: str, db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the graph, the file that names it, and what is wrong."""
    file = write_langgraph_json(tmp_path, a=graph)
    message = run_and_read_error("serve", "--port", "0", "--graphs", file, capsys=capsys)

    assert message.startswith("the graph 'a'"), message
    assert expected_message.format(file=repr(file), folder=tmp_path) in message
    assert repr(file) in message


def test_serve_names_the_file_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """The error says which option names the file, and mentions no other option."""
    assert run_and_read_error("serve", "--port", "0", "--graphs", "none.json", capsys=capsys) == (
        "the file 'none.json' does not exist; expected a langgraph.json with "
        '"graphs": {"name": "./file.py:graph"}\n'
    )
    message = run_and_read_error("serve", "--port", "0", "--auth", "none.py:auth", capsys=capsys)
    assert message == (
        "the file of authentication handlers is 'none.py:auth', which cannot be imported: the file "
        f"'{os.path.realpath('none.py')}' does not exist; expected './file.py:name' or "
        "'package.module:name'\n"
    )
