-- get_setting: a setting of the store
SELECT value FROM store_settings WHERE name = ?;

-- set_setting: a setting of the store
INSERT INTO store_settings (name, value) VALUES (?, ?)
ON CONFLICT ({tenant}name) DO UPDATE SET value = excluded.value;

-- bump_setting: count something up
INSERT INTO store_settings (name, value) VALUES (?, 1)
ON CONFLICT ({tenant}name) DO UPDATE SET value = store_settings.value + 1;

-- add_namespace: a new namespace; its counter is higher than that of one that was there and dropped
INSERT INTO store_namespaces (path, changes)
VALUES (?, coalesce((SELECT CAST(value AS bigint) FROM store_settings WHERE name = 'erasures'), 0) << 32) RETURNING path, ns;

-- grow_namespace: count its items and bytes, and that it has changed
UPDATE store_namespaces SET items = items + ?, bytes = bytes + ?, changes = changes + 1 WHERE ns = ?;

-- drop_empty_namespaces: those of a range in which nothing is left, not even a closed version
DELETE FROM store_namespaces WHERE path >= ? AND path < ?
AND NOT EXISTS (SELECT 1 FROM store_items i WHERE i.ns = store_namespaces.ns)
AND NOT EXISTS (SELECT 1 FROM store_versions v WHERE v.ns = store_namespaces.ns)
RETURNING 1;

-- held: items and bytes under a prefix, expired ones included
SELECT coalesce(sum(items), 0), coalesce(sum(bytes), 0) FROM store_namespaces
WHERE path >= ? AND path < ?;

-- held_expired: items and bytes under a prefix that have expired and were not swept
SELECT count(*), coalesce(sum(i.size), 0) FROM store_namespaces n
CROSS JOIN store_items i
WHERE i.ns = n.ns AND n.path >= ? AND n.path < ? AND i.expires_at <= ?;

-- get: one present item
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance
FROM store_namespaces n CROSS JOIN store_items i
WHERE i.ns = n.ns AND n.path = ? AND i.key = ? AND (i.expires_at IS NULL OR i.expires_at > ?);

-- get_as_of: the version of a key that was valid at a moment
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance
FROM store_namespaces n CROSS JOIN store_items i
WHERE i.ns = n.ns AND n.path = ?1 AND i.key = ?2 AND i.valid_from <= ?3
AND (i.expires_at IS NULL OR i.expires_at > ?3)
UNION ALL
SELECT v.id, n.path, v.key, v.version, v.created_at, v.valid_from, v.valid_to, NULL, v.value, v.provenance
FROM store_namespaces n CROSS JOIN store_versions v
WHERE v.ns = n.ns AND n.path = ?1 AND v.key = ?2 AND v.valid_from <= ?3 AND v.valid_to > ?3;

-- locate: what a put or a delete replaces, or else the last closed version of its key; a row in any case
SELECT n.ns, i.id, i.version, i.created_at, i.valid_from, i.expires_at, i.size,
       v.version, v.valid_to, coalesce(i.made, i.id)
FROM (SELECT 1) AS one LEFT JOIN store_namespaces n ON n.path = ?1
LEFT JOIN store_items i ON i.ns = n.ns AND i.key = ?2
LEFT JOIN store_versions v ON i.id IS NULL AND v.ns = n.ns AND v.key = ?2
ORDER BY v.version DESC LIMIT 1;

-- close: keep a version that is about to be replaced
INSERT INTO store_versions
    (id, ns, key, version, created_at, valid_from, valid_to, made, searched, value, provenance)
SELECT id, ns, key, version, created_at, valid_from, ?, made, searched, value, provenance
FROM store_items WHERE id = ?;

-- drop_item: take a version from among the present
DELETE FROM store_items WHERE id = ?;

-- new_ids: ids that no item ever had, as many as a list has
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'store_items'), 0) + asked.key + 1
FROM json_each(?) AS asked;

-- add_item: a new present version
INSERT INTO store_items
    (id, ns, key, version, created_at, valid_from, expires_at, made, ttl, size, searched, value, provenance)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- add_index: what search needs of a version
INSERT INTO store_index (id, vectors, model, fields) VALUES (?, ?, ?, ?);

-- set_vectors: the vectors of a present version; it may have gone while they were made
INSERT INTO store_index (id, vectors, model) SELECT id, ?2, ?3 FROM store_items WHERE id = ?1
ON CONFLICT ({tenant}id) DO UPDATE SET vectors = excluded.vectors, model = excluded.model;

-- drop_vectors: some vectors of other models
UPDATE store_index SET vectors = NULL, model = NULL
WHERE id IN (SELECT id FROM store_index WHERE model <> ? LIMIT ?) RETURNING 1;

-- raise_changes: the namespace of an item has changed
UPDATE store_namespaces SET changes = changes + 1
WHERE ns = (SELECT i.ns FROM store_items i WHERE i.id = ?);

-- raise_changes_at: a namespace has changed
UPDATE store_namespaces SET changes = changes + 1 WHERE path = ?;

-- add_pending: a present version that waits for its vectors
INSERT INTO store_pending (id, attempts, error) SELECT id, 1, ?2 FROM store_items WHERE id = ?1
ON CONFLICT ({tenant}id) DO UPDATE SET attempts = store_pending.attempts + 1, error = excluded.error;

-- hush_pending: an error may quote what was erased
UPDATE store_pending SET error = ? WHERE id = ?;

-- pending_ids: all that wait
SELECT id FROM store_pending;

-- drop_all_pending: none waits any longer
DELETE FROM store_pending RETURNING 1;

-- drop_pending: it waits no longer
DELETE FROM store_pending WHERE id = ?;

-- pending: versions that wait for their vectors, from one on
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance,
       x.fields, p.attempts, p.error
FROM store_pending p JOIN store_items i ON i.id = p.id JOIN store_index x ON x.id = p.id
JOIN store_namespaces n ON n.ns = i.ns
WHERE p.id > ? AND n.path >= ? AND n.path < ? AND p.attempts <= ? ORDER BY p.id LIMIT ?;

-- to_embed: present items from one on that have no vectors of a model, with what these are made of
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance,
       x.fields
FROM store_items i JOIN store_namespaces n ON n.ns = i.ns LEFT JOIN store_index x ON x.id = i.id
WHERE i.id > ? AND i.searched AND (x.model IS NULL OR x.model <> ?) ORDER BY i.id LIMIT ?;

-- to_embed_count: how many those are
SELECT count(*) FROM store_items i LEFT JOIN store_index x ON x.id = i.id
WHERE i.searched AND (x.model IS NULL OR x.model <> ?);

-- old_versions: closed versions under a prefix that a rule does not keep
SELECT v.id FROM store_namespaces n CROSS JOIN store_versions v
WHERE v.ns = n.ns AND n.path >= ?1 AND n.path < ?2 AND v.valid_to < ?3
AND (?4 >= 4611686018427387904 OR (SELECT count(*) FROM store_versions w
     WHERE w.ns = v.ns AND w.key = v.key AND w.version > v.version) >= ?4)
LIMIT ?5;

-- removable: what of each key is expired, and which closed versions a rule does not keep once those are closed
WITH closed (ns, key, version, valid_to, size, expired) AS (
    SELECT v.ns, v.key, v.version, v.valid_to,
           length(CAST(v.value AS BLOB)) + coalesce(length(CAST(v.provenance AS BLOB)), 0), 0
    FROM store_namespaces n CROSS JOIN store_versions v WHERE v.ns = n.ns AND n.path >= ?1 AND n.path < ?2
    UNION ALL
    SELECT i.ns, i.key, i.version, i.expires_at,
           length(CAST(i.value AS BLOB)) + coalesce(length(CAST(i.provenance AS BLOB)), 0), 1
    FROM store_namespaces n CROSS JOIN store_items i
    WHERE i.ns = n.ns AND n.path >= ?1 AND n.path < ?2 AND i.expires_at <= ?3
), ranked AS (
    SELECT *, row_number() OVER (PARTITION BY ns, key ORDER BY version DESC) - 1 AS newer FROM closed
), judged AS (
    SELECT ns, key, size, expired, valid_to < ?4 AND (?5 >= 4611686018427387904 OR newer >= ?5) AS goes FROM ranked
)
SELECT n.path, j.key, max(j.expired), sum(j.goes), sum(j.goes * j.size)
FROM judged j JOIN store_namespaces n ON n.ns = j.ns WHERE j.goes OR j.expired
GROUP BY j.ns, j.key ORDER BY n.path, j.key;

-- drop_version: forget a closed version
DELETE FROM store_versions WHERE id = ?;

-- drop_index: forget what search needed of a version
DELETE FROM store_index WHERE id = ?;

-- rewrite_item: change what a present version holds, without another version
UPDATE store_items SET value = ?, provenance = ?, size = ? WHERE id = ?;

-- rewrite_version: change what a closed version holds
UPDATE store_versions SET value = ?, provenance = ? WHERE id = ?;

-- add_bytes: the items of a namespace have become larger or smaller
UPDATE store_namespaces SET bytes = bytes + ? WHERE path = ?;

-- every_version: present and closed versions under a prefix
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance
FROM store_namespaces n CROSS JOIN store_items i
WHERE i.ns = n.ns AND n.path >= ?1 AND n.path < ?2
UNION ALL
SELECT v.id, n.path, v.key, v.version, v.created_at, v.valid_from, v.valid_to, NULL, v.value, v.provenance
FROM store_namespaces n CROSS JOIN store_versions v
WHERE v.ns = n.ns AND n.path >= ?1 AND n.path < ?2
ORDER BY 2, 3, 4;

-- shrink_namespace: an item is about to go
UPDATE store_namespaces SET items = items - 1, bytes = bytes - i.size, changes = changes + 1
FROM store_items i WHERE i.id = ? AND store_namespaces.ns = i.ns;

-- every_path: namespaces under a prefix, also those of which only closed versions are left
SELECT path FROM store_namespaces WHERE path >= ? AND path < ? ORDER BY path;

-- filled_namespace: a namespace, if something is present in it
SELECT path FROM store_namespaces WHERE path = ? AND items > 0;

-- key_page: keys of a namespace, from one on
SELECT i.key FROM store_namespaces n CROSS JOIN store_items i
WHERE i.ns = n.ns AND n.path = ?1 AND i.key > ?2
UNION
SELECT v.key FROM store_namespaces n CROSS JOIN store_versions v
WHERE v.ns = n.ns AND n.path = ?1 AND v.key > ?2
ORDER BY 1 LIMIT ?3;

-- history: every version of a key with how it lives and is searched, oldest first
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance,
       i.ttl, i.searched, x.fields
FROM store_namespaces n CROSS JOIN store_items i LEFT JOIN store_index x ON x.id = i.id
WHERE i.ns = n.ns AND n.path = ?1 AND i.key = ?2
UNION ALL
SELECT v.id, n.path, v.key, v.version, v.created_at, v.valid_from, v.valid_to, NULL, v.value, v.provenance,
       NULL, v.searched, x.fields
FROM store_namespaces n CROSS JOIN store_versions v LEFT JOIN store_index x ON x.id = v.id
WHERE v.ns = n.ns AND n.path = ?1 AND v.key = ?2
ORDER BY 4;

-- touch: let an item live on for its time from now
UPDATE store_items SET expires_at = ?1 + ttl WHERE ttl IS NOT NULL AND expires_at > ?1
AND ns = (SELECT n.ns FROM store_namespaces n WHERE n.path = ?2) AND key = ?3;

-- expired: items whose time is over
SELECT i.id, i.ns, i.size, i.expires_at, n.path FROM store_items i CROSS JOIN store_namespaces n
WHERE n.ns = i.ns AND i.expires_at IS NOT NULL AND i.expires_at <= ? ORDER BY i.expires_at LIMIT ?;

-- under: present items under a prefix; within a namespace in the order in which they were made, or DESC: SQLite merges two lists
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance,
       i.id
FROM store_namespaces n CROSS JOIN store_items i {indexed}
WHERE i.ns = n.ns AND n.path >= ?1 AND n.path < ?2 AND i.made IS NULL AND (i.expires_at IS NULL OR i.expires_at > ?3)
AND ({condition})
UNION ALL
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance,
       i.made
FROM store_namespaces n CROSS JOIN store_items i {indexed}
WHERE i.ns = n.ns AND n.path >= ?1 AND n.path < ?2 AND i.made IS NOT NULL AND (i.expires_at IS NULL OR i.expires_at > ?3)
AND ({condition})
ORDER BY 2, 11 {order} LIMIT ?4 OFFSET ?5;

-- under_as_of: items under a prefix as they were at a moment
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance,
       coalesce(i.made, i.id)
FROM store_namespaces n CROSS JOIN store_items i
WHERE i.ns = n.ns AND n.path >= ?1 AND n.path < ?2 AND i.valid_from <= ?3
AND (i.expires_at IS NULL OR i.expires_at > ?3)
UNION ALL
SELECT v.id, n.path, v.key, v.version, v.created_at, v.valid_from, v.valid_to, NULL, v.value, v.provenance,
       coalesce(v.made, v.id)
FROM store_namespaces n CROSS JOIN store_versions v
WHERE v.ns = n.ns AND n.path >= ?1 AND n.path < ?2 AND v.valid_from <= ?3 AND v.valid_to > ?3
ORDER BY 2, 11 {order} LIMIT ?4 OFFSET ?5;

-- closed_as_of: versions under a prefix that were valid at a moment and closed after it
SELECT n.path, v.id FROM store_namespaces n CROSS JOIN store_versions v
WHERE v.ns = n.ns AND n.path >= ?1 AND n.path < ?2 AND v.valid_from <= ?3 AND v.valid_to > ?3;

-- versions_by_ids: versions of a list of ids, present or closed
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance
FROM json_each(?1) AS asked CROSS JOIN store_items i ON i.id = asked.value
JOIN store_namespaces n ON n.ns = i.ns
UNION ALL
SELECT v.id, n.path, v.key, v.version, v.created_at, v.valid_from, v.valid_to, NULL, v.value, v.provenance
FROM json_each(?1) AS asked CROSS JOIN store_versions v ON v.id = asked.value
JOIN store_namespaces n ON n.ns = v.ns;

-- by_ids: present items of a list of ids
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance
FROM json_each(?) AS asked CROSS JOIN store_items i ON i.id = asked.value
JOIN store_namespaces n ON n.ns = i.ns
WHERE i.expires_at IS NULL OR i.expires_at > ?;

-- matching: which present items under a prefix may meet a condition
SELECT {columns} FROM store_namespaces n CROSS JOIN store_items i {indexed}
WHERE i.ns = n.ns AND n.path >= ?1 AND n.path < ?2 AND (i.expires_at IS NULL OR i.expires_at > ?3) AND ({condition})
LIMIT ?4;

-- explain: how a statement would be answered, a line of SQLite's own account a row
EXPLAIN QUERY PLAN {query};

-- paths: namespaces in which something is present, or was at a moment
SELECT n.path FROM store_namespaces n WHERE n.path >= ?1 AND n.path < ?2
AND (EXISTS (SELECT 1 FROM store_items i WHERE i.ns = n.ns AND (CAST(?4 AS bigint) IS NULL OR i.valid_from <= ?4)
             AND (i.expires_at IS NULL OR i.expires_at > coalesce(?4, CAST(?3 AS bigint))))
     OR ?4 IS NOT NULL AND EXISTS (SELECT 1 FROM store_versions v WHERE v.ns = n.ns
                                   AND v.valid_from <= ?4 AND v.valid_to > ?4))
ORDER BY n.path LIMIT ?5;

-- path_indexes: names of the indexes on JSON paths
SELECT name FROM sqlite_master WHERE type = 'index' AND name LIKE 'store\_path:%' ESCAPE '\';

-- marks: how often something was erased or got its vectors later, the newest closing, the model
SELECT coalesce((SELECT value FROM store_settings WHERE name = 'erasures'), 0),
       coalesce((SELECT value FROM store_settings WHERE name = 'embedded'), 0),
       coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'store_versions'), 0),
       (SELECT value FROM store_settings WHERE name = 'model');

-- namespaces_under: those under a prefix in which something is present, and how often they have changed
SELECT ns, path, changes, items FROM store_namespaces
WHERE path >= ? AND path < ? AND items > 0 ORDER BY path;

-- get_index: the compact form of a namespace's index
SELECT body FROM store_indexes WHERE ns = ?;

-- keep_index: the compact form of a namespace's index, unless something was erased since it was made
INSERT INTO store_indexes (newest, closed, body, ns)
SELECT ?, ?, ?, n.ns FROM store_namespaces n WHERE n.ns = ? AND n.path = ?
AND coalesce((SELECT CAST(value AS bigint) FROM store_settings WHERE name = 'erasures'), 0) = ?
ON CONFLICT ({tenant}ns) DO UPDATE SET newest = excluded.newest, closed = excluded.closed, body = excluded.body;

-- drop_indexes: all compact forms
DELETE FROM store_indexes;

-- drop_index_at: the compact form of a namespace, in which something is erased
DELETE FROM store_indexes WHERE ns = (SELECT n.ns FROM store_namespaces n WHERE n.path = ?);

-- drop_index_with: the compact form that holds the words of a closed version, which is about to go
DELETE FROM store_indexes WHERE ns = (SELECT v.ns FROM store_versions v WHERE v.id = ?1)
AND newest >= ?1 AND closed < (SELECT v.seq FROM store_versions v WHERE v.id = ?1);

-- drop_index_left: the compact forms of namespaces that are gone
DELETE FROM store_indexes WHERE ns NOT IN (SELECT ns FROM store_namespaces);

-- index_since: what search needs of the present items of a namespace that are newer than one
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at,
       CASE WHEN i.searched THEN i.value END, i.provenance,
       CASE x.model WHEN ?1 THEN x.vectors END, x.fields
FROM store_namespaces n CROSS JOIN store_items i LEFT JOIN store_index x ON x.id = i.id
WHERE i.ns = n.ns AND n.ns = ?2 AND i.id > ?3 ORDER BY i.id LIMIT ?4;

-- index_of: what search needs of the versions of a list of ids, but for their values
SELECT asked.value, CASE x.model WHEN ?1 THEN x.vectors END, x.fields
FROM json_each(?2) AS asked LEFT JOIN store_index x ON x.id = asked.value
WHERE (SELECT i.searched FROM store_items i WHERE i.id = asked.value)
OR (SELECT v.searched FROM store_versions v WHERE v.id = asked.value);

-- expiries: when items of a list of ids expire
SELECT i.id, i.expires_at FROM json_each(?) AS asked CROSS JOIN store_items i ON i.id = asked.value
WHERE i.expires_at IS NOT NULL;

-- closed_since: which versions of a namespace were closed after one closing; with a sign, for else SQLite reads all of the namespace
SELECT id FROM store_versions WHERE seq > ? AND +ns = ?;

-- present_ids: the ids of all present items of a namespace
SELECT id FROM store_items WHERE ns = ?;

-- count_without_ttl: the number of items that never expire
SELECT count(*) FROM store_items WHERE expires_at IS NULL;

-- counts: namespaces, items, their bytes, versions
SELECT (SELECT count(*) FROM store_namespaces WHERE items > 0),
       (SELECT coalesce(sum(items), 0) FROM store_namespaces),
       (SELECT coalesce(sum(bytes), 0) FROM store_namespaces),
       (SELECT count(*) FROM store_versions);

-- size_under: namespaces under a prefix that hold something, items, their bytes
SELECT count(*), CAST(coalesce(sum(items), 0) AS bigint), CAST(coalesce(sum(bytes), 0) AS bigint)
FROM store_namespaces WHERE path >= ? AND path < ? AND items > 0;

-- largest_namespaces: those with the most bytes
SELECT path, items, bytes FROM store_namespaces WHERE items > 0 ORDER BY bytes DESC, path LIMIT ?;

-- made_by_day: how many present items were made on each day since 1970
SELECT created_at / 86400000000, count(*) FROM store_items GROUP BY 1 ORDER BY 1;

-- pending_count: how many wait for their vectors
SELECT count(*) FROM store_pending;

-- missing_count: how many wait for their vectors, or have those of another model
SELECT count(*) FROM store_items i LEFT JOIN store_index x ON x.id = i.id LEFT JOIN store_pending p ON p.id = i.id
WHERE (i.searched AND x.id IS NULL) OR x.model <> ? OR p.id IS NOT NULL;

-- settings: all settings of the store
SELECT name, value FROM store_settings ORDER BY name;

-- raise_keys_after_copy: rows were added with their keys, settings as text; new rows have other keys
DELETE FROM sqlite_sequence WHERE name = 'store_items';
INSERT INTO sqlite_sequence (name, seq) SELECT 'store_items', max(
    (SELECT coalesce(max(id), 0) FROM store_items), (SELECT coalesce(max(id), 0) FROM store_versions));
UPDATE store_settings SET value = CAST(value AS INTEGER) WHERE name IN ('erasures', 'embedded');
