-- same_hashes: candidates for being items that are stored already
SELECT id, body FROM items WHERE h = ANY (ARRAY(SELECT value::bigint FROM json_array_elements_text(?::json)));

-- astray: Postgres checks its indexes itself (`amcheck`, data checksums)
SELECT '' WHERE false AND (?1::text, ?2::text, ?3::bytea) IS NULL;

-- writes_of: what the tasks of a checkpoint wrote
SELECT NULL, NULL, uid, task, path, body FROM writes WHERE namespace = ?1 AND uid = ?2;

-- tags_beside: see `astray`
SELECT '' WHERE false AND (?1::bigint, ?2::bigint, ?3::bigint) IS NULL;

-- indexed_checkpoints: how many a namespace has within a range of keys
SELECT count(*) FROM checkpoints WHERE namespace = ? AND id >= ? AND id < ?;

-- list_threads: a page, newest activity first
SELECT thread, thread_id, created_at, updated_at, thread FROM threads
WHERE (updated_at, thread) < (?1, ?2) AND updated_at >= ?5
AND substr(convert_to(thread_id, 'UTF8'), 1, length(?3::bytea)) = ?3
ORDER BY threads.updated_at DESC, threads.thread DESC LIMIT ?4;
