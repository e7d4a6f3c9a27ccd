-- get_setting: return the value of a setting
SELECT value FROM store_settings WHERE name = ?;

-- set_setting: add or replace a setting
INSERT INTO store_settings (name, value) VALUES (?, ?)
ON CONFLICT ({tenant}name) DO UPDATE SET value = excluded.value;

-- increment_setting: increment a counter that is stored as a setting
INSERT INTO store_settings (name, value) VALUES (?, 1)
ON CONFLICT ({tenant}name) DO UPDATE SET value = store_settings.value + 1;

-- add_namespace: add a namespace; its counter of changes is higher than that of a former namespace with this path
INSERT INTO store_namespaces (path, change_count)
VALUES (?, coalesce((SELECT CAST(value AS bigint) FROM store_settings WHERE name = 'erasures'), 0) << 32) RETURNING path, namespace_key;

-- grow_namespace: add to the item and byte counts of a namespace, and count the change
UPDATE store_namespaces SET item_count = item_count + ?, byte_count = byte_count + ?, change_count = change_count + 1 WHERE namespace_key = ?;

-- drop_empty_namespaces: delete the namespaces of a range that contain no version, not even a closed one
DELETE FROM store_namespaces WHERE path >= ? AND path < ?
AND NOT EXISTS (SELECT 1 FROM store_items i WHERE i.namespace_key = store_namespaces.namespace_key)
AND NOT EXISTS (SELECT 1 FROM store_versions v WHERE v.namespace_key = store_namespaces.namespace_key)
RETURNING 1;

-- scope_size: return the items and bytes under a prefix, including expired items
SELECT coalesce(sum(item_count), 0), coalesce(sum(byte_count), 0) FROM store_namespaces
WHERE path >= ? AND path < ?;

-- expired_scope_size: return the items and bytes under a prefix that have expired and were not swept
SELECT count(*), coalesce(sum(i.size), 0) FROM store_namespaces n
CROSS JOIN store_items i
WHERE i.namespace_key = n.namespace_key AND n.path >= ? AND n.path < ? AND i.expires_at <= ?;

-- get: return one present item
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance
FROM store_namespaces n CROSS JOIN store_items i
WHERE i.namespace_key = n.namespace_key AND n.path = ? AND i.key = ? AND (i.expires_at IS NULL OR i.expires_at > ?);

-- present_values: return the values of some present items; the caller replaces {requested} by one (?, ?) for each path and key
WITH requested (path, key) AS (VALUES {requested})
SELECT n.path, i.key, i.version, i.value FROM requested r CROSS JOIN store_namespaces n CROSS JOIN store_items i
WHERE n.path = r.path AND i.namespace_key = n.namespace_key AND i.key = r.key AND (i.expires_at IS NULL OR i.expires_at > ?);

-- get_as_of: return the version of a key that was valid at a moment
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance
FROM store_namespaces n CROSS JOIN store_items i
WHERE i.namespace_key = n.namespace_key AND n.path = ?1 AND i.key = ?2 AND i.valid_from <= ?3
AND (i.expires_at IS NULL OR i.expires_at > ?3)
UNION ALL
SELECT v.id, n.path, v.key, v.version, v.created_at, v.valid_from, v.valid_to, NULL, v.value, v.provenance
FROM store_namespaces n CROSS JOIN store_versions v
WHERE v.namespace_key = n.namespace_key AND n.path = ?1 AND v.key = ?2 AND v.valid_from <= ?3 AND v.valid_to > ?3;

-- find_present: return the version that a put or delete replaces, or else the last closed version of the key; always one row
SELECT n.namespace_key, i.id, i.version, i.created_at, i.valid_from, i.expires_at, i.size,
       v.version, v.valid_to, coalesce(i.first_id, i.id)
FROM (SELECT 1) AS single_row LEFT JOIN store_namespaces n ON n.path = ?1
LEFT JOIN store_items i ON i.namespace_key = n.namespace_key AND i.key = ?2
LEFT JOIN store_versions v ON i.id IS NULL AND v.namespace_key = n.namespace_key AND v.key = ?2
ORDER BY v.version DESC LIMIT 1;

-- close_version: copy a present version that is about to be replaced to the closed versions
INSERT INTO store_versions
    (id, namespace_key, key, version, created_at, valid_from, valid_to, first_id, searchable, value, provenance)
SELECT id, namespace_key, key, version, created_at, valid_from, ?, first_id, searchable, value, provenance
FROM store_items WHERE id = ?;

-- drop_item: delete a present version
DELETE FROM store_items WHERE id = ?;

-- allocate_ids: return as many ids as a list has elements; no item ever had them
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'store_items'), 0) + requested.key + 1
FROM json_each(?) AS requested;

-- add_item: add a present version
INSERT INTO store_items
    (id, namespace_key, key, version, created_at, valid_from, expires_at, first_id, ttl, size, searchable, value, provenance)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- add_index_row: add the search data of a version
INSERT INTO store_search_data (id, vectors, model_number, fields) VALUES (?, ?, ?, ?);

-- set_vectors: set the vectors of a version if it is still present
INSERT INTO store_search_data (id, vectors, model_number) SELECT id, ?2, ?3 FROM store_items WHERE id = ?1
ON CONFLICT ({tenant}id) DO UPDATE SET vectors = excluded.vectors, model_number = excluded.model_number;

-- drop_vectors: delete some vectors of other models
UPDATE store_search_data SET vectors = NULL, model_number = NULL
WHERE id IN (SELECT id FROM store_search_data WHERE model_number <> ? LIMIT ?) RETURNING 1;

-- count_item_change: count a change in the namespace of an item
UPDATE store_namespaces SET change_count = change_count + 1
WHERE namespace_key = (SELECT i.namespace_key FROM store_items i WHERE i.id = ?);

-- count_namespace_change: count a change in the namespace with a path
UPDATE store_namespaces SET change_count = change_count + 1 WHERE path = ?;

-- add_pending: record that a present version has no vectors, and why
INSERT INTO store_pending_embeddings (id, attempts, error) SELECT id, 1, ?2 FROM store_items WHERE id = ?1
ON CONFLICT ({tenant}id) DO UPDATE SET attempts = store_pending_embeddings.attempts + 1, error = excluded.error;

-- set_pending_error: replace a recorded error, which may quote an erased text
UPDATE store_pending_embeddings SET error = ? WHERE id = ?;

-- pending_ids: return the ids of all versions without vectors
SELECT id FROM store_pending_embeddings;

-- drop_all_pending: delete all records of missing vectors
DELETE FROM store_pending_embeddings RETURNING 1;

-- drop_pending: delete the record that a version has no vectors
DELETE FROM store_pending_embeddings WHERE id = ?;

-- pending: return versions without vectors whose id is above a number
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance,
       x.fields, p.attempts, p.error
FROM store_pending_embeddings p JOIN store_items i ON i.id = p.id JOIN store_search_data x ON x.id = p.id
JOIN store_namespaces n ON n.namespace_key = i.namespace_key
WHERE p.id > ? AND n.path >= ? AND n.path < ? AND p.attempts <= ? ORDER BY p.id LIMIT ?;

-- items_to_embed: return present items without vectors of a model, with the text to embed, whose id is above a number
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance,
       x.fields
FROM store_items i JOIN store_namespaces n ON n.namespace_key = i.namespace_key LEFT JOIN store_search_data x ON x.id = i.id
WHERE i.id > ? AND i.searchable AND (x.model_number IS NULL OR x.model_number <> ?) ORDER BY i.id LIMIT ?;

-- count_items_to_embed: count the present items without vectors of a model
SELECT count(*) FROM store_items i LEFT JOIN store_search_data x ON x.id = i.id
WHERE i.searchable AND (x.model_number IS NULL OR x.model_number <> ?);

-- removable_versions: return closed versions under a prefix that a retention rule does not keep
SELECT v.id FROM store_namespaces n CROSS JOIN store_versions v
WHERE v.namespace_key = n.namespace_key AND n.path >= ?1 AND n.path < ?2 AND v.valid_to < ?3
AND (?4 >= 4611686018427387904 OR (SELECT count(*) FROM store_versions w
     WHERE w.namespace_key = v.namespace_key AND w.key = v.key AND w.version > v.version) >= ?4)
LIMIT ?5;

-- removable: return for each key whether it has expired, and which closed versions a rule does not keep after the sweep
WITH closed (namespace_key, key, version, valid_to, size, expired) AS (
    SELECT v.namespace_key, v.key, v.version, v.valid_to,
           length(CAST(v.value AS BLOB)) + coalesce(length(CAST(v.provenance AS BLOB)), 0), 0
    FROM store_namespaces n CROSS JOIN store_versions v WHERE v.namespace_key = n.namespace_key AND n.path >= ?1 AND n.path < ?2
    UNION ALL
    SELECT i.namespace_key, i.key, i.version, i.expires_at,
           length(CAST(i.value AS BLOB)) + coalesce(length(CAST(i.provenance AS BLOB)), 0), 1
    FROM store_namespaces n CROSS JOIN store_items i
    WHERE i.namespace_key = n.namespace_key AND n.path >= ?1 AND n.path < ?2 AND i.expires_at <= ?3
), ranked AS (
    SELECT *, row_number() OVER (PARTITION BY namespace_key, key ORDER BY version DESC) - 1 AS newer_count FROM closed
), rated AS (
    SELECT namespace_key, key, size, expired, valid_to < ?4 AND (?5 >= 4611686018427387904 OR newer_count >= ?5) AS is_removable FROM ranked
)
SELECT n.path, r.key, max(r.expired), sum(r.is_removable), sum(r.is_removable * r.size)
FROM rated r JOIN store_namespaces n ON n.namespace_key = r.namespace_key WHERE r.is_removable OR r.expired
GROUP BY r.namespace_key, r.key ORDER BY n.path, r.key;

-- drop_version: delete a closed version
DELETE FROM store_versions WHERE id = ?;

-- drop_index_row: delete the search data of a version
DELETE FROM store_search_data WHERE id = ?;

-- rewrite_item: replace the content of a present version without a new version
UPDATE store_items SET value = ?, provenance = ?, size = ? WHERE id = ?;

-- rewrite_version: replace the content of a closed version
UPDATE store_versions SET value = ?, provenance = ? WHERE id = ?;

-- add_bytes: add to the byte count of a namespace
UPDATE store_namespaces SET byte_count = byte_count + ? WHERE path = ?;

-- all_versions: return present and closed versions under a prefix
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance
FROM store_namespaces n CROSS JOIN store_items i
WHERE i.namespace_key = n.namespace_key AND n.path >= ?1 AND n.path < ?2
UNION ALL
SELECT v.id, n.path, v.key, v.version, v.created_at, v.valid_from, v.valid_to, NULL, v.value, v.provenance
FROM store_namespaces n CROSS JOIN store_versions v
WHERE v.namespace_key = n.namespace_key AND n.path >= ?1 AND n.path < ?2
ORDER BY 2, 3, 4;

-- shrink_namespace: subtract an item that is about to be deleted from the counts of its namespace
UPDATE store_namespaces SET item_count = item_count - 1, byte_count = byte_count - i.size, change_count = change_count + 1
FROM store_items i WHERE i.id = ? AND store_namespaces.namespace_key = i.namespace_key;

-- all_paths: return the paths of namespaces under a prefix, also of those with closed versions only
SELECT path FROM store_namespaces WHERE path >= ? AND path < ? ORDER BY path;

-- nonempty_namespace: return the path of a namespace if it has present items
SELECT path FROM store_namespaces WHERE path = ? AND item_count > 0;

-- key_page: return keys of a namespace after a key
SELECT i.key FROM store_namespaces n CROSS JOIN store_items i
WHERE i.namespace_key = n.namespace_key AND n.path = ?1 AND i.key > ?2
UNION
SELECT v.key FROM store_namespaces n CROSS JOIN store_versions v
WHERE v.namespace_key = n.namespace_key AND n.path = ?1 AND v.key > ?2
ORDER BY 1 LIMIT ?3;

-- history: return every version of a key with its time to live and search data, oldest first
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance,
       i.ttl, i.searchable, x.fields
FROM store_namespaces n CROSS JOIN store_items i LEFT JOIN store_search_data x ON x.id = i.id
WHERE i.namespace_key = n.namespace_key AND n.path = ?1 AND i.key = ?2
UNION ALL
SELECT v.id, n.path, v.key, v.version, v.created_at, v.valid_from, v.valid_to, NULL, v.value, v.provenance,
       NULL, v.searchable, x.fields
FROM store_namespaces n CROSS JOIN store_versions v LEFT JOIN store_search_data x ON x.id = v.id
WHERE v.namespace_key = n.namespace_key AND n.path = ?1 AND v.key = ?2
ORDER BY 4;

-- restart_ttl: restart the time to live of an item
UPDATE store_items SET expires_at = ?1 + ttl WHERE ttl IS NOT NULL AND expires_at > ?1
AND namespace_key = (SELECT n.namespace_key FROM store_namespaces n WHERE n.path = ?2) AND key = ?3;

-- expired: return expired items
SELECT i.id, i.namespace_key, i.size, i.expires_at, n.path FROM store_items i CROSS JOIN store_namespaces n
WHERE n.namespace_key = i.namespace_key AND i.expires_at IS NOT NULL AND i.expires_at <= ? ORDER BY i.expires_at LIMIT ?;

-- page: return present items under a prefix, within a namespace in the order of creation or DESC; SQLite merges two lists
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance,
       i.id
FROM store_namespaces n CROSS JOIN store_items i {indexed}
WHERE i.namespace_key = n.namespace_key AND n.path >= ?1 AND n.path < ?2 AND i.first_id IS NULL AND (i.expires_at IS NULL OR i.expires_at > ?3)
AND ({condition})
UNION ALL
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance,
       i.first_id
FROM store_namespaces n CROSS JOIN store_items i {indexed}
WHERE i.namespace_key = n.namespace_key AND n.path >= ?1 AND n.path < ?2 AND i.first_id IS NOT NULL AND (i.expires_at IS NULL OR i.expires_at > ?3)
AND ({condition})
ORDER BY 2, 11 {order} LIMIT ?4 OFFSET ?5;

-- page_as_of: return the items under a prefix as they were at a moment
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance,
       coalesce(i.first_id, i.id)
FROM store_namespaces n CROSS JOIN store_items i
WHERE i.namespace_key = n.namespace_key AND n.path >= ?1 AND n.path < ?2 AND i.valid_from <= ?3
AND (i.expires_at IS NULL OR i.expires_at > ?3)
UNION ALL
SELECT v.id, n.path, v.key, v.version, v.created_at, v.valid_from, v.valid_to, NULL, v.value, v.provenance,
       coalesce(v.first_id, v.id)
FROM store_namespaces n CROSS JOIN store_versions v
WHERE v.namespace_key = n.namespace_key AND n.path >= ?1 AND n.path < ?2 AND v.valid_from <= ?3 AND v.valid_to > ?3
ORDER BY 2, 11 {order} LIMIT ?4 OFFSET ?5;

-- closed_as_of: return versions under a prefix that were valid at a moment and were closed later
SELECT n.path, v.id FROM store_namespaces n CROSS JOIN store_versions v
WHERE v.namespace_key = n.namespace_key AND n.path >= ?1 AND n.path < ?2 AND v.valid_from <= ?3 AND v.valid_to > ?3;

-- versions_by_ids: return the versions with some ids, present or closed
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance
FROM json_each(?1) AS requested CROSS JOIN store_items i ON i.id = requested.value
JOIN store_namespaces n ON n.namespace_key = i.namespace_key
UNION ALL
SELECT v.id, n.path, v.key, v.version, v.created_at, v.valid_from, v.valid_to, NULL, v.value, v.provenance
FROM json_each(?1) AS requested CROSS JOIN store_versions v ON v.id = requested.value
JOIN store_namespaces n ON n.namespace_key = v.namespace_key;

-- items_by_ids: return the present items with some ids
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at, i.value, i.provenance
FROM json_each(?) AS requested CROSS JOIN store_items i ON i.id = requested.value
JOIN store_namespaces n ON n.namespace_key = i.namespace_key
WHERE i.expires_at IS NULL OR i.expires_at > ?;

-- matching: return present items under a prefix that may meet a condition
SELECT {columns} FROM store_namespaces n CROSS JOIN store_items i {indexed}
WHERE i.namespace_key = n.namespace_key AND n.path >= ?1 AND n.path < ?2 AND (i.expires_at IS NULL OR i.expires_at > ?3) AND ({condition})
LIMIT ?4;

-- explain: return the query plan of a statement, one line in each row
EXPLAIN QUERY PLAN {query};

-- nonempty_paths: return a page of the paths of namespaces that have present items, or had items at a moment
SELECT n.path FROM store_namespaces n WHERE n.path >= ?1 AND n.path < ?2
AND (EXISTS (SELECT 1 FROM store_items i WHERE i.namespace_key = n.namespace_key AND (CAST(?4 AS bigint) IS NULL OR i.valid_from <= ?4)
             AND (i.expires_at IS NULL OR i.expires_at > coalesce(?4, CAST(?3 AS bigint))))
     OR ?4 IS NOT NULL AND EXISTS (SELECT 1 FROM store_versions v WHERE v.namespace_key = n.namespace_key
                                   AND v.valid_from <= ?4 AND v.valid_to > ?4))
ORDER BY n.path LIMIT ?5 OFFSET ?6;

-- count_nonempty_paths: return the number of paths that nonempty_paths returns on all its pages
SELECT count(*) FROM store_namespaces n WHERE n.path >= ?1 AND n.path < ?2
AND (EXISTS (SELECT 1 FROM store_items i WHERE i.namespace_key = n.namespace_key AND (CAST(?4 AS bigint) IS NULL OR i.valid_from <= ?4)
             AND (i.expires_at IS NULL OR i.expires_at > coalesce(?4, CAST(?3 AS bigint))))
     OR ?4 IS NOT NULL AND EXISTS (SELECT 1 FROM store_versions v WHERE v.namespace_key = n.namespace_key
                                   AND v.valid_from <= ?4 AND v.valid_to > ?4));

-- path_indexes: return the names of the indexes on JSON paths
SELECT name FROM sqlite_master WHERE type = 'index' AND name LIKE 'store\_path:%' ESCAPE '\';

-- store_state: return the counters of erasures and of vectors added later, the newest closing, and the model
SELECT coalesce((SELECT value FROM store_settings WHERE name = 'erasures'), 0),
       coalesce((SELECT value FROM store_settings WHERE name = 'embedded'), 0),
       coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'store_versions'), 0),
       (SELECT value FROM store_settings WHERE name = 'model');

-- namespaces_under: return the namespaces under a prefix that have items, with their counters of changes
SELECT namespace_key, path, change_count, item_count FROM store_namespaces
WHERE path >= ? AND path < ? AND item_count > 0 ORDER BY path;

-- get_search_index: return the stored search index of a namespace
SELECT body FROM store_search_indexes WHERE namespace_key = ?;

-- save_search_index: store the search index of a namespace, unless something was erased since it was built
INSERT INTO store_search_indexes (newest_id, newest_closing_number, body, namespace_key)
SELECT ?, ?, ?, n.namespace_key FROM store_namespaces n WHERE n.namespace_key = ? AND n.path = ?
AND coalesce((SELECT CAST(value AS bigint) FROM store_settings WHERE name = 'erasures'), 0) = ?
ON CONFLICT ({tenant}namespace_key) DO UPDATE SET newest_id = excluded.newest_id,
    newest_closing_number = excluded.newest_closing_number, body = excluded.body;

-- drop_search_indexes: delete all stored search indexes
DELETE FROM store_search_indexes;

-- drop_search_index: delete the stored search index of a namespace in which something is erased
DELETE FROM store_search_indexes WHERE namespace_key = (SELECT n.namespace_key FROM store_namespaces n WHERE n.path = ?);

-- drop_search_index_of_version: delete the stored search index that contains the words of a closed version, which is about to be deleted
DELETE FROM store_search_indexes WHERE namespace_key = (SELECT v.namespace_key FROM store_versions v WHERE v.id = ?1)
AND newest_id >= ?1 AND newest_closing_number < (SELECT v.closing_number FROM store_versions v WHERE v.id = ?1);

-- drop_orphaned_search_indexes: delete the stored search indexes of namespaces that no longer exist
DELETE FROM store_search_indexes WHERE namespace_key NOT IN (SELECT namespace_key FROM store_namespaces);

-- search_data_since: return the search data of the present items of a namespace whose id is above a number
SELECT i.id, n.path, i.key, i.version, i.created_at, i.valid_from, NULL, i.expires_at,
       CASE WHEN i.searchable THEN i.value END, i.provenance,
       CASE x.model_number WHEN ?1 THEN x.vectors END, x.fields
FROM store_namespaces n CROSS JOIN store_items i LEFT JOIN store_search_data x ON x.id = i.id
WHERE i.namespace_key = n.namespace_key AND n.namespace_key = ?2 AND i.id > ?3 ORDER BY i.id LIMIT ?4;

-- search_data_by_ids: return the search data, except values, of the versions with some ids
SELECT requested.value, CASE x.model_number WHEN ?1 THEN x.vectors END, x.fields
FROM json_each(?2) AS requested LEFT JOIN store_search_data x ON x.id = requested.value
WHERE (SELECT i.searchable FROM store_items i WHERE i.id = requested.value)
OR (SELECT v.searchable FROM store_versions v WHERE v.id = requested.value);

-- expiries: return when the items with some ids expire
SELECT i.id, i.expires_at FROM json_each(?) AS requested CROSS JOIN store_items i ON i.id = requested.value
WHERE i.expires_at IS NOT NULL;

-- closed_since: return the versions of a namespace that were closed after a closing; with the sign +, SQLite does not read the whole namespace
SELECT id FROM store_versions WHERE closing_number > ? AND +namespace_key = ?;

-- present_ids: return the ids of all present items of a namespace
SELECT id FROM store_items WHERE namespace_key = ?;

-- count_without_ttl: count the items that never expire
SELECT count(*) FROM store_items WHERE expires_at IS NULL;

-- counts: return the numbers of namespaces, items, bytes and closed versions
SELECT (SELECT count(*) FROM store_namespaces WHERE item_count > 0),
       (SELECT coalesce(sum(item_count), 0) FROM store_namespaces),
       (SELECT coalesce(sum(byte_count), 0) FROM store_namespaces),
       (SELECT count(*) FROM store_versions);

-- size_under: return the numbers of non-empty namespaces, items and bytes under a prefix
SELECT count(*), CAST(coalesce(sum(item_count), 0) AS bigint), CAST(coalesce(sum(byte_count), 0) AS bigint)
FROM store_namespaces WHERE path >= ? AND path < ? AND item_count > 0;

-- largest_namespaces: return the namespaces with the most bytes
SELECT path, item_count, byte_count FROM store_namespaces WHERE item_count > 0 ORDER BY byte_count DESC, path LIMIT ?;

-- created_by_day: return the number of present items created on each day since 1970
SELECT created_at / 86400000000, count(*) FROM store_items GROUP BY 1 ORDER BY 1;

-- count_pending: count the versions without vectors because the embedder failed
SELECT count(*) FROM store_pending_embeddings;

-- count_missing_vectors: count the items without vectors of a model
SELECT count(*) FROM store_items i LEFT JOIN store_search_data x ON x.id = i.id LEFT JOIN store_pending_embeddings p ON p.id = i.id
WHERE (i.searchable AND x.id IS NULL) OR x.model_number <> ? OR p.id IS NOT NULL;

-- settings: return all settings of the store
SELECT name, value FROM store_settings ORDER BY name;

-- raise_keys_after_copy: after rows were copied with their keys, and settings as text, give new rows higher keys
DELETE FROM sqlite_sequence WHERE name = 'store_items';
INSERT INTO sqlite_sequence (name, seq) SELECT 'store_items', max(
    (SELECT coalesce(max(id), 0) FROM store_items), (SELECT coalesce(max(id), 0) FROM store_versions));
UPDATE store_settings SET value = CAST(value AS INTEGER) WHERE name IN ('erasures', 'embedded');
