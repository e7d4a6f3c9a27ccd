-- The tables of the stores. Times and durations are in microseconds; times count from 1970 (UTC).
--
-- store_items               the present version of each key
-- store_versions            the closed versions; a version keeps its `id` when it is closed
-- store_search_data         the data of a present or closed version that a search cannot compute from its value
-- store_search_indexes      the encoded search index of each namespace (namespace_index.py)
-- store_pending_embeddings  the present versions whose embedding failed, with the error
--
-- The values of `id` and `closing_number` only grow. So all changes after a moment are a range of each.
--
-- store_namespaces.change_count         incremented by each change that affects searches
-- first_id                              the id of the item's first version, by which lists are ordered; NULL if this version is the first
-- searchable                            whether searches with a query find the version
-- store_versions.closing_number         the number of the closing; closings are counted in the whole store
-- store_search_indexes.newest_id        the newest version that the index covers
-- store_search_indexes.newest_closing_number  the newest closing that the index covers

-- schema: the tables
CREATE TABLE store_settings (name TEXT PRIMARY KEY, value ANY NOT NULL)
    STRICT, WITHOUT ROWID;
CREATE TABLE store_namespaces (
    namespace_key INTEGER PRIMARY KEY,
    path BLOB NOT NULL UNIQUE,
    item_count INTEGER NOT NULL DEFAULT 0,
    byte_count INTEGER NOT NULL DEFAULT 0,
    change_count INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE store_items (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace_key INTEGER NOT NULL,
    key TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    valid_from INTEGER NOT NULL,
    expires_at INTEGER,
    first_id INTEGER,
    ttl INTEGER,
    size INTEGER NOT NULL,
    searchable INTEGER NOT NULL,
    value ANY NOT NULL,
    provenance ANY,
    UNIQUE (namespace_key, key)
) STRICT;
CREATE INDEX store_items_namespace ON store_items (namespace_key);
CREATE INDEX store_items_first_id ON store_items (namespace_key, first_id) WHERE first_id IS NOT NULL;
CREATE INDEX store_items_expiry ON store_items (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE store_versions (
    closing_number INTEGER PRIMARY KEY AUTOINCREMENT,
    id INTEGER NOT NULL UNIQUE,
    namespace_key INTEGER NOT NULL,
    key TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    valid_from INTEGER NOT NULL,
    valid_to INTEGER NOT NULL,
    first_id INTEGER,
    searchable INTEGER NOT NULL,
    value ANY NOT NULL,
    provenance ANY
) STRICT;
CREATE INDEX store_versions_key ON store_versions (namespace_key, key, version);
CREATE INDEX store_versions_validity ON store_versions (namespace_key, valid_to, valid_from);
CREATE TABLE store_search_data (
    id INTEGER PRIMARY KEY,
    vectors BLOB,
    model_number INTEGER,
    fields TEXT
) STRICT;
CREATE TABLE store_pending_embeddings (
    id INTEGER PRIMARY KEY,
    attempts INTEGER NOT NULL,
    error ANY NOT NULL
) STRICT;
CREATE TABLE store_search_indexes (
    namespace_key INTEGER PRIMARY KEY,
    newest_id INTEGER NOT NULL,
    newest_closing_number INTEGER NOT NULL,
    body BLOB NOT NULL
) STRICT;

-- create_path_index: create an index on a path of the value
CREATE INDEX IF NOT EXISTS "{name}" ON store_items (namespace_key, {expression});

-- drop_path_index: drop the index on a path of the value
DROP INDEX IF EXISTS "{name}";
