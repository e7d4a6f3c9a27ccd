-- The tables of the stores.
--
-- `store_items` contains the present version of each key, and `store_versions` the closed versions. A
-- version keeps its `id` when it is closed. The values of `id` and `seq` only grow, so everything that
-- changed after a moment is a range of each. `store_index` contains the search data of a present or
-- closed version that a search cannot compute. `store_indexes` contains the encoded search index of a
-- namespace (`index.py`). It covers the items up to the id `newest`, without those that were closed up
-- to the `seq` `closed`. `store_namespaces.changes` is incremented by each change that affects
-- searches. `searched` says whether searches with a query find the version. `made` is the id of the
-- first version of the item, if that is another version. Lists are ordered by it. Times are
-- microseconds since 1970 (UTC).

-- schema: the tables
CREATE TABLE store_settings (name TEXT PRIMARY KEY, value ANY NOT NULL)
    STRICT, WITHOUT ROWID;
CREATE TABLE store_namespaces (
    ns INTEGER PRIMARY KEY,
    path BLOB NOT NULL UNIQUE,
    items INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0,
    changes INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE store_items (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    ns INTEGER NOT NULL,
    key TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    valid_from INTEGER NOT NULL,
    expires_at INTEGER,
    made INTEGER,
    ttl INTEGER,
    size INTEGER NOT NULL,
    searched INTEGER NOT NULL,
    value ANY NOT NULL,
    provenance ANY,
    UNIQUE (ns, key)
) STRICT;
CREATE INDEX store_items_ns ON store_items (ns);
CREATE INDEX store_items_made ON store_items (ns, made) WHERE made IS NOT NULL;
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
    made INTEGER,
    searched INTEGER NOT NULL,
    value ANY NOT NULL,
    provenance ANY
) STRICT;
CREATE INDEX store_versions_key ON store_versions (ns, key, version);
CREATE INDEX store_versions_span ON store_versions (ns, valid_to, valid_from);
CREATE TABLE store_index (
    id INTEGER PRIMARY KEY,
    vectors BLOB,
    model INTEGER,
    fields TEXT
) STRICT;
CREATE TABLE store_pending (
    id INTEGER PRIMARY KEY,
    attempts INTEGER NOT NULL,
    error ANY NOT NULL
) STRICT;
CREATE TABLE store_indexes (
    ns INTEGER PRIMARY KEY,
    newest INTEGER NOT NULL,
    closed INTEGER NOT NULL,
    body BLOB NOT NULL
) STRICT;

-- create_path_index: create an index on a path of the value
CREATE INDEX IF NOT EXISTS "{name}" ON store_items (ns, {expression});

-- drop_path_index: drop the index on a path of the value
DROP INDEX IF EXISTS "{name}";
