"""Define which tables and columns of a store `perdure copy` copies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from perdure.cli.copied_tables import Table, Tables
from perdure.storage.database import split_script
from perdure.storage.encryption import AssociatedData
from perdure.storage.flow import Flow, Row
from perdure.stores.namespaces import decode_namespace_path
from perdure.stores.whole_store import WholeStore

_OF_PATH: Final = "n.path", "LEFT JOIN store_namespaces n ON n.namespace_key = r.namespace_key"


_OF_VERSION: Final = (
    "n.path",
    "LEFT JOIN store_items i ON i.id = r.id LEFT JOIN store_versions v ON v.id = r.id "
    "LEFT JOIN store_namespaces n ON n.namespace_key = coalesce(i.namespace_key, v.namespace_key)",
)


_COMMON: Final = "id, namespace_key, key, version, created_at, valid_from"


def _item_associated_data(path: bytes, key: str, version: int) -> list[AssociatedData]:
    """Return the associated data for encrypting the `value` and `provenance` of a store item."""
    return [(name, path.decode(), key, version) for name in ("value", "provenance")]


@dataclass
class StoreTables(Tables):
    """The tables of a store.

    The compact search indexes are not copied, because the first search in the target rebuilds them.
    """

    noun = "namespace"
    component_tables = (
        Table(
            "store_namespaces",
            "namespace_key, path, item_count, byte_count, change_count",
            "r.path",
            key="namespace_key",
            indexed_columns="path",
        ),
        Table(
            "store_items",
            f"{_COMMON}, expires_at, first_id, ttl, size, searchable, value, provenance",
            *_OF_PATH,
            name_columns="key",
            large_columns="value, provenance",
            flag_positions=[-3],
            associated_data=lambda row: _item_associated_data(row[0], *row[3:5]),
        ),
        Table(
            "store_versions",
            f"closing_number, {_COMMON}, valid_to, first_id, searchable, value, provenance",
            *_OF_PATH,
            key="closing_number",
            name_columns="key",
            large_columns="value, provenance",
            flag_positions=[-3],
            associated_data=lambda row: _item_associated_data(row[0], *row[4:6]),
        ),
        Table(
            "store_search_data",
            "id, model_number, fields, vectors",
            *_OF_VERSION,
            large_columns="fields, vectors",
            associated_data=lambda row: [("vectors", row[1])],
        ),
        Table(
            "store_pending_embeddings",
            "id, attempts, error",
            *_OF_VERSION,
            large_columns="error",
            associated_data=lambda row: [("pending", row[1])],
        ),
    )

    @classmethod
    def from_store(cls, store: WholeStore) -> StoreTables:
        """Return the tables of a store."""
        records = store.parts.records

        def decrypt(stored: Any, associated_data: Any) -> Any:
            if associated_data[0] == "vectors":
                return records.decode_row_vectors(stored, associated_data[1])
            return records.decode_text(stored, associated_data)

        def encrypt(value: Any, associated_data: Any) -> Any:
            if associated_data[0] == "vectors":
                return records.encode_row_vectors(value, associated_data[1])
            return records.encode_text(value, associated_data)

        return cls(store.database, store.parts.sql, decrypt, encrypt)

    def format_owner(self, owner: Any) -> str:
        """Format the namespace that a row belongs to, for error messages."""
        return repr(decode_namespace_path(owner))

    def read_settings(self) -> Flow[list[Row]]:
        """Read the store's settings.

        A store's settings are its embedding model, its searched fields, a counter of erasures, and
        a counter that is incremented when vectors are added to existing items.
        """
        return (yield self.sql("settings"))  # type: ignore[no-any-return]

    def store_settings_after_copy(self, settings: list[Row]) -> Flow[None]:
        """See `Tables.store_settings_after_copy`.

        The target keeps its own settings for keyword search, except the list of searched fields,
        which is copied.
        """
        for name, value in settings:
            if name == "words":
                ((own_setting,),) = yield self.sql("get_setting", name)
                value = json.dumps(
                    json.loads(own_setting) | {"fields": json.loads(value)["fields"]}
                )
            yield self.sql("set_setting", name, str(value))
        yield split_script(self.sql["raise_keys_after_copy"])
