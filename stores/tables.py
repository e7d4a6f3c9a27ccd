"""The tables of a store, as they are copied into another database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from perdure.storage.database import statements
from perdure.storage.encryption import Place
from perdure.storage.flow import Flow, Row, Statement
from perdure.storage.table_copy import Table, Tables
from perdure.stores.namespaces import labels
from perdure.stores.reading import Records, provenance_place, value_place
from perdure.stores.whole_store import WholeStore

_PATH: Final = "LEFT JOIN store_namespaces n ON n.ns = "
_OF_VERSION: Final = (
    "LEFT JOIN store_items i ON i.id = r.id LEFT JOIN store_versions v ON v.id = r.id "
    f"{_PATH}coalesce(i.ns, v.ns)"
)
_COMMON: Final = "id, ns, key, version, created_at, valid_from"


@dataclass
class StoreTables(Tables):
    """Items with their versions and vectors; compact indexes are made anew by searches."""

    records: Records
    noun = "namespace"
    tables = (
        Table("store_namespaces", "ns, path, items, bytes, changes", "r.path", key="ns"),
        Table(
            "store_items",
            f"{_COMMON}, expires_at, made, ttl, size, searched, value, provenance",
            "n.path",
            f"{_PATH}r.ns",
        ),
        Table(
            "store_versions",
            f"seq, {_COMMON}, valid_to, made, searched, value, provenance",
            "n.path",
            f"{_PATH}r.ns",
            "seq",
        ),
        Table("store_index", "id, vectors, model, fields", "n.path", _OF_VERSION),
        Table("store_pending", "id, attempts, error", "n.path", _OF_VERSION),
    )

    @classmethod
    def of(cls, store: WholeStore) -> StoreTables:
        """Those of a store."""
        parts = store._parts
        return cls(store.database, parts.sql, parts.records)

    def opened(self, table: str, row: Row) -> Row:
        """See `Tables.opened`."""
        text = self.records.text
        if table in ("store_items", "store_versions"):
            *columns, searched, value, provenance = row
            of_value, of_provenance = _places(table, row)
            value = text(value, of_value)
            provenance = None if provenance is None else text(provenance, of_provenance)
            return *columns, None if searched is None else bool(searched), value, provenance
        if table == "store_index":
            path, key, vectors, *rest = row
            return path, key, vectors and self.records.vectors(vectors, key), *rest
        if table == "store_pending":
            *columns, error = row
            return *columns, text(error, ("pending", row[1]))
        return row

    def writes(self, table: Table, rows: Sequence[Row]) -> list[Statement]:
        """See `Tables.writes`."""
        return table.insert([self._sealed(table.name, row) for row in rows])

    def _sealed(self, table: str, row: Row) -> Row:
        shut = self.records.shut
        if table in ("store_items", "store_versions"):
            _, *columns, value, provenance = row
            of_value, of_provenance = _places(table, row)
            said = None if provenance is None else shut(provenance, of_provenance)
            return *columns, shut(value, of_value), said
        if table == "store_index":
            _, key, vectors, *rest = row
            return key, self.records.shut_vectors(vectors, key), *rest
        if table == "store_pending":
            _, key, attempts, error = row
            return key, attempts, shut(error, ("pending", key))
        return row[1:]

    def shown(self, owner: Any) -> str:
        """See `Tables.shown`."""
        return repr(labels(owner))

    def settings(self) -> Flow[list[Row]]:
        """The model of the vectors, counters, and which fields are searched."""
        return (yield self.sql("settings"))  # type: ignore[no-any-return]

    def finish(self, settings: list[Row]) -> Flow[None]:
        """See `Tables.finish`. How words are kept is the target's to say."""
        for name, value in settings:
            if name == "words":
                ((kept,),) = yield self.sql("get_setting", name)
                value = json.dumps(json.loads(kept) | {"fields": json.loads(value)["fields"]})
            if name != "words of items":  # of the first version
                yield self.sql("set_setting", name, str(value))
        yield statements(self.sql["copied"])

    def with_nul(self) -> Flow[list[Row]]:
        """See `Tables.with_nul`."""
        return [(labels(path),) for (path,) in (yield self.sql("with_nul"))]


def _places(table: str, row: Row) -> tuple[Place, Place]:
    path, key, version = (row[0], *row[3 + (table == "store_versions") :][:2])
    return value_place(path, key, version), provenance_place(path, key, version)
