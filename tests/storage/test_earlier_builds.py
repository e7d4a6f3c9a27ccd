"""Databases of builds from before the first release are refused, and are not changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.postgres import PostgresCheckpointer
from perdure.errors import SchemaMismatch
from perdure.storage.database import Schema
from perdure.stores import SQLiteStore
from perdure.stores.postgres import PostgresStore
from tests import earlier_build, postgres_server

REMEDY = (
    r"was written by a build of perdure from before the first release"
    r".*: perdure export --all --db FILE > threads\.jsonl.*: perdure import threads\.jsonl"
)


@pytest.mark.parametrize(
    "options", [{}, {"read_only": True}, {"untrusted": True}], ids=["write", "read", "import"]
)
@pytest.mark.parametrize("component", [SQLiteCheckpointer, SQLiteStore])
def test_file_of_earlier_build_is_refused(
    component: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "earlier.db"
    before = earlier_build.write_file(path)

    with pytest.raises(SchemaMismatch, match=REMEDY):
        component.open(path, **options)

    assert path.read_bytes() == before


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("component", [PostgresCheckpointer, PostgresStore])
def test_postgres_schema_of_earlier_build_is_refused(
    component: Any, read_only: bool, tmp_path: Path
) -> None:
    schema = postgres_server.schema_name(tmp_path)
    earlier_build.create_schema(schema)
    before = earlier_build.read_schema(schema)

    with pytest.raises(SchemaMismatch, match=REMEDY):
        component.open(postgres_server.dsn(), schema=schema, read_only=read_only)

    assert earlier_build.read_schema(schema) == before


def test_script_hash_depends_on_columns_and_not_on_line_breaks() -> None:
    schema = Schema("notes", "CREATE TABLE notes (id INTEGER, text TEXT)")
    wrapped = Schema("notes", "CREATE TABLE notes (id INTEGER,\n    text TEXT)\n")
    renamed = Schema("notes", "CREATE TABLE notes (id INTEGER, body TEXT)")

    assert wrapped.script_hash == schema.script_hash
    assert renamed.script_hash != schema.script_hash
