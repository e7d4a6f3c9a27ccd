"""The tables of a store, as they are copied into another database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from perdure.storage.database import statements
from perdure.storage.flow import Flow, Row, Statement
from perdure.storage.table_copy import Table, Tables
from perdure.stores.namespaces import labels
from perdure.stores.reading import Records
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
        Table(
            "store_namespaces", "ns, path, items, bytes, changes", "r.path", key="ns", keyed="path"
        ),
        Table(
            "store_items",
            f"{_COMMON}, expires_at, made, ttl, size, searched, value, provenance",
            "n.path",
            f"{_PATH}r.ns",
            names="key",
            large="value, provenance",
            place=lambda row: (row[0].decode(), *row[3:5]),
        ),
        Table(
            "store_versions",
            f"seq, {_COMMON}, valid_to, made, searched, value, provenance",
            "n.path",
            f"{_PATH}r.ns",
            key="seq",
            names="key",
            large="value, provenance",
            place=lambda row: (row[0].decode(), *row[4:6]),
        ),
        Table(
            "store_index",
            "id, model, fields, vectors",
            "n.path",
            _OF_VERSION,
            large="fields, vectors",
            place=lambda row: ("vectors", row[1]),
        ),
        Table(
            "store_pending",
            "id, attempts, error",
            "n.path",
            _OF_VERSION,
            large="error",
            place=lambda row: ("pending", row[1]),
        ),
    )

    @classmethod
    def of(cls, store: WholeStore) -> StoreTables:
        """Those of a store."""
        parts = store._parts
        return cls(store.database, parts.sql, parts.records)

    def opened(self, table: Table, row: Row) -> Row:
        """See `Tables.opened`."""
        if table.place is None:
            return row
        *columns, sealed = row
        place = table.place(row)
        if table.name == "store_index":
            return *columns, sealed and self.records.vectors(sealed, row[1])
        text = self.records.text
        if table.name == "store_pending":
            return *columns, text(sealed, place)
        *columns, searched, value = columns
        said = None if sealed is None else text(sealed, ("provenance", *place))
        return *columns, bool(searched), text(value, ("value", *place)), said

    def writes(self, table: Table, rows: Sequence[Row]) -> list[Statement]:
        """See `Tables.writes`."""
        return table.insert([self._sealed(table, row) for row in rows])

    def _sealed(self, table: Table, row: Row) -> Row:
        if table.place is None:
            return row[1:]
        _, *columns, opened = row
        place = table.place(row)
        if table.name == "store_index":
            return *columns, self.records.shut_vectors(opened, row[1])
        shut = self.records.shut
        if table.name == "store_pending":
            return *columns, shut(opened, place)
        *columns, value = columns
        said = None if opened is None else shut(opened, ("provenance", *place))
        return *columns, shut(value, ("value", *place)), said

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
            yield self.sql("set_setting", name, str(value))
        yield statements(self.sql["copied"])
