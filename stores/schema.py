"""The tables of the stores, as numbered steps; a step that has shipped is never edited.

`store_items` holds the present version of each key, `store_versions` the closed ones. A version
keeps its `id` when it is closed; ids and `seq` only grow, so what changed since one looked is a
range of each. `made` is the id that an item had first, where that is another: items are listed in
the order of these. `store_index` holds what search needs of a version, whether present or closed.
Times are microseconds since 1970 (UTC).
"""

from __future__ import annotations

from perdure.storage.migrations import Migration

SQLITE = Migration(
    "stores",
    (
        """
        CREATE TABLE store_settings (name TEXT PRIMARY KEY, value ANY NOT NULL)
            STRICT, WITHOUT ROWID;
        CREATE TABLE store_namespaces (
            ns INTEGER PRIMARY KEY,
            path BLOB NOT NULL UNIQUE,
            items INTEGER NOT NULL DEFAULT 0,
            bytes INTEGER NOT NULL DEFAULT 0
        ) STRICT;
        CREATE TABLE store_items (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            ns INTEGER NOT NULL,
            key TEXT NOT NULL,
            version INTEGER NOT NULL,
            created_at INTEGER NOT NULL,
            valid_from INTEGER NOT NULL,
            expires_at INTEGER,
            ttl INTEGER,
            size INTEGER NOT NULL,
            value ANY NOT NULL,
            provenance ANY,
            UNIQUE (ns, key)
        ) STRICT;
        CREATE INDEX store_items_ns ON store_items (ns);
        CREATE INDEX store_items_expiry ON store_items (expires_at) WHERE expires_at IS NOT NULL;
        CREATE TABLE store_versions (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id INTEGER NOT NULL UNIQUE,
            ns INTEGER NOT NULL,
            key TEXT NOT NULL,
            version INTEGER NOT NULL,
            created_at INTEGER NOT NULL,
            valid_from INTEGER NOT NULL,
            valid_to INTEGER NOT NULL,
            value ANY NOT NULL,
            provenance ANY
        ) STRICT;
        CREATE INDEX store_versions_key ON store_versions (ns, key, version);
        CREATE INDEX store_versions_end ON store_versions (valid_to);
        CREATE TABLE store_index (
            id INTEGER PRIMARY KEY,
            tokens ANY,
            vectors BLOB,
            model INTEGER,
            fields TEXT
        ) STRICT;
        CREATE TABLE store_pending (
            id INTEGER PRIMARY KEY,
            attempts INTEGER NOT NULL,
            error ANY NOT NULL
        ) STRICT
        """,
        """
        ALTER TABLE store_items ADD COLUMN made INTEGER;
        ALTER TABLE store_versions ADD COLUMN made INTEGER;
        CREATE INDEX store_items_made ON store_items (ns, made) WHERE made IS NOT NULL
        """,
    ),
)
