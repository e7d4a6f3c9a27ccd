-- Statements for Postgres that differ from sqlite.sql. A list of numbers is bound as JSON. With braces for its brackets, Postgres reads it as an array.
-- Tables that tenants share have a column `tenant` (`storage/postgres_schema.py`), which is the first column of every key.

-- schema: see sqlite.sql
CREATE TABLE keys ({tenant_column}name text, last_key bigint NOT NULL, PRIMARY KEY ({tenant}name));
CREATE TABLE threads ({tenant_column}
    thread_key bigint,
    thread_id text COLLATE "C" NOT NULL,
    last_seq bigint NOT NULL DEFAULT 0,
    generation bigint NOT NULL DEFAULT 0,
    version_token bigint NOT NULL DEFAULT 0,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    may_wait bigint NOT NULL DEFAULT 0,
    status text NOT NULL DEFAULT 'idle',
    list_entry bytea,
    search_keys bytea,
    client_metadata bytea,
    client_search_keys bytea,
    user_tag bigint,
    owner_tag bigint,
    client_user_tag bigint,
    client_owner_tag bigint,
    ttl_minutes double precision,
    ttl_since double precision NOT NULL DEFAULT 0,
    ttl_keeps_latest bigint NOT NULL DEFAULT 0,
    newest_removal bigint NOT NULL DEFAULT 0,
    PRIMARY KEY ({tenant}thread_key),
    UNIQUE ({tenant}thread_id)
) WITH (fillfactor = 70);
CREATE INDEX threads_activity ON threads ({tenant}updated_at);
CREATE INDEX threads_waiting ON threads ({tenant}updated_at) WHERE may_wait = 1;
CREATE INDEX threads_user ON threads ({tenant}user_tag, updated_at) WHERE user_tag IS NOT NULL;
CREATE INDEX threads_owner ON threads ({tenant}owner_tag, updated_at) WHERE owner_tag IS NOT NULL;
CREATE INDEX threads_client_user ON threads ({tenant}client_user_tag) WHERE client_user_tag IS NOT NULL;
CREATE INDEX threads_client_owner ON threads ({tenant}client_owner_tag) WHERE client_owner_tag IS NOT NULL;
CREATE INDEX threads_status ON threads ({tenant}status, updated_at) WHERE status IN ('busy', 'error');
CREATE INDEX threads_expiry ON threads ({tenant}(updated_at + 60 * ttl_minutes)) WHERE ttl_minutes IS NOT NULL;
CREATE TABLE namespaces ({tenant_column}
    namespace_key bigint,
    thread_key bigint NOT NULL,
    checkpoint_ns text COLLATE "C" NOT NULL,
    explicit_head bigint NOT NULL DEFAULT 0,
    UNIQUE ({tenant}thread_key, checkpoint_ns),
    PRIMARY KEY ({tenant}namespace_key)
);
CREATE TABLE logs ({tenant_column}
    log_key bigint,
    thread_key bigint NOT NULL,
    channel text COLLATE "C" NOT NULL,
    UNIQUE ({tenant}thread_key, channel),
    PRIMARY KEY ({tenant}log_key)
);
CREATE TABLE items ({tenant_column}row_key bigint, content_hash bigint NOT NULL, stored_at double precision NOT NULL, body bytea NOT NULL, PRIMARY KEY ({tenant}row_key));
CREATE INDEX items_content_hash ON items ({tenant}content_hash);
CREATE TABLE checkpoints ({tenant_column}
    row_key bigint,
    namespace_key bigint NOT NULL,
    checkpoint_id bytea NOT NULL,
    parent_id bytea,
    run_start bigint NOT NULL,
    put_at double precision NOT NULL,
    body bytea NOT NULL,
    UNIQUE ({tenant}namespace_key, checkpoint_id),
    PRIMARY KEY ({tenant}row_key)
);
CREATE TABLE writes ({tenant_column}
    namespace_key bigint NOT NULL,
    checkpoint_id bytea NOT NULL,
    task_id bytea NOT NULL,
    task_path text COLLATE "C" NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY ({tenant}namespace_key, checkpoint_id, task_id)
);
CREATE TABLE tags ({tenant_column}
    tag bigint NOT NULL,
    checkpoint_key bigint NOT NULL,
    PRIMARY KEY ({tenant}tag, checkpoint_key)
);
CREATE TABLE transcript_progress ({tenant_column}
    thread_key bigint,
    version_token bigint NOT NULL,
    position bigint NOT NULL,
    namespace_path bytea NOT NULL,
    PRIMARY KEY ({tenant}thread_key)
);
CREATE TABLE removals ({tenant_column}
    thread_hash bytea NOT NULL,
    number bigint NOT NULL,
    removed_at double precision NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY ({tenant}thread_hash, number)
);
CREATE INDEX removals_age ON removals ({tenant}removed_at);
ALTER TABLE threads SET (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE items SET (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE checkpoints SET (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE writes SET (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE tags SET (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);

-- advance_thread: see sqlite.sql; an unchanged thread is checked by a division, because the error rolls back the whole request
WITH advanced AS (UPDATE threads SET last_seq = ?1, version_token = ?2,
    may_wait = CASE WHEN ?7 = 0 THEN EXISTS (SELECT 1 FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?6)::int ELSE may_wait END WHERE thread_key = ?3 AND version_token = ?4
    AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE namespace_key = ?5 AND checkpoint_id = ?6) RETURNING 1)
SELECT 1 / count(*), EXISTS (SELECT 1 FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?6) FROM advanced;

-- advance_active_thread: see sqlite.sql and `advance_thread`
WITH advanced AS (UPDATE threads SET last_seq = ?1, version_token = ?2, updated_at = greatest(updated_at, ?8),
    may_wait = CASE WHEN ?7 = 0 THEN EXISTS (SELECT 1 FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?6)::int ELSE may_wait END WHERE thread_key = ?3 AND version_token = ?4
    AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE namespace_key = ?5 AND checkpoint_id = ?6) RETURNING 1)
SELECT 1 / count(*), EXISTS (SELECT 1 FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?6) FROM advanced;

-- advance_replayed_thread: see sqlite.sql and `advance_thread`
WITH advanced AS (UPDATE threads SET last_seq = ?1, version_token = ?2, updated_at = greatest(updated_at, ?8),
    may_wait = CASE WHEN ?7 = 0 THEN EXISTS (SELECT 1 FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?6)::int ELSE may_wait END WHERE thread_key = ?3 AND version_token = ?4
    AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE namespace_key = ?5 AND checkpoint_id = ?6)
    AND (SELECT coalesce(sum(1 + length(body)), 0) FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?9) = ?10 RETURNING 1)
SELECT 1 / count(*), EXISTS (SELECT 1 FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?6) FROM advanced;

-- advance_into_namespace: see sqlite.sql and `advance_thread`
WITH advanced AS (UPDATE threads SET last_seq = ?1, version_token = ?2, updated_at = greatest(updated_at, ?6) WHERE thread_key = ?3 AND version_token = ?4
    AND NOT EXISTS (SELECT 1 FROM namespaces n WHERE n.thread_key = ?3 AND n.checkpoint_ns = ?5) RETURNING 1)
SELECT 1 / count(*), false FROM advanced;

-- new_thread: see sqlite.sql and `advance_thread`
WITH made AS (
    INSERT INTO threads (thread_key, thread_id, last_seq, version_token, created_at, updated_at, newest_removal)
    SELECT ?1::bigint, ?2::text, ?3::bigint, ?4::bigint, ?5::double precision, ?6::double precision, ?7::bigint
    WHERE NOT EXISTS (SELECT 1 FROM removals r WHERE r.thread_hash = ?8::bytea AND r.number > ?7)
    ON CONFLICT DO NOTHING RETURNING 1
)
SELECT 1 / count(*), false FROM made;

-- new_writes: see sqlite.sql and `advance_thread`
WITH added AS (
    INSERT INTO writes (namespace_key, checkpoint_id, task_id, task_path, body) SELECT ?1::bigint, ?2::bytea, ?3::bytea, ?4::text, ?5::bytea
    WHERE EXISTS (SELECT 1 FROM threads WHERE thread_key = ?6 AND generation = ?7)
    AND EXISTS (SELECT 1 FROM namespaces WHERE namespace_key = ?1 AND thread_key = ?6)
    AND (?8 = 0 OR EXISTS (SELECT 1 FROM checkpoints WHERE row_key = ?8 AND checkpoint_id = ?9)) RETURNING 1
)
SELECT 1 / count(*), false FROM added;

-- new_writes_at_head: see sqlite.sql and `advance_thread`
WITH added AS (
    INSERT INTO writes (namespace_key, checkpoint_id, task_id, task_path, body) SELECT ?1::bigint, ?2::bytea, ?3::bytea, ?4::text, ?5::bytea
    WHERE EXISTS (SELECT 1 FROM threads WHERE thread_key = ?6 AND generation = ?7)
    AND EXISTS (SELECT 1 FROM namespaces n WHERE n.namespace_key = ?1 AND n.thread_key = ?6 AND ?10::bigint = CASE n.explicit_head
    WHEN 0 THEN (SELECT max(row_key) FROM checkpoints WHERE row_key >= ?1::bigint << 32 AND row_key < (?1::bigint + 1) << 32) ELSE (?1::bigint << 32) + n.explicit_head END)
    AND (?8 = 0 OR EXISTS (SELECT 1 FROM checkpoints WHERE row_key = ?8 AND checkpoint_id = ?9)) RETURNING 1
)
SELECT 1 / count(*), false FROM added;

-- damaged_index_entries: empty, because Postgres checks its indexes itself (`amcheck`, data checksums)

-- head_with_keys: see sqlite.sql; a subquery computes the key of the head, because row-level security would keep the calculation from the indexes
SELECT s.thread_key, s.generation, s.newest_removal, s.namespace_key, c.row_key, c.checkpoint_id, c.parent_id, c.run_start, c.put_at, c.body
FROM (
    SELECT t.thread_key, t.generation, t.newest_removal, n.namespace_key, CASE n.explicit_head
    WHEN 0 THEN (SELECT max(row_key) FROM checkpoints WHERE row_key >= n.namespace_key << 32 AND row_key < (n.namespace_key + 1) << 32)
    ELSE (n.namespace_key << 32) + n.explicit_head END AS head
    FROM threads t JOIN namespaces n ON n.thread_key = t.thread_key WHERE t.thread_id = ? AND n.checkpoint_ns = ? LIMIT 1
) s JOIN checkpoints c ON c.row_key = s.head;

-- checkpoint_writes: the pending writes of a checkpoint
SELECT NULL, NULL, checkpoint_id, task_id, task_path, body FROM writes WHERE namespace_key = ?1 AND checkpoint_id = ?2;

-- neighbouring_tags: see `damaged_index_entries`

-- items_with_hashes: see sqlite.sql
SELECT row_key, body FROM items WHERE content_hash = ANY(translate(?, '[]', '{}')::bigint[]);

-- root_heads: see sqlite.sql and `head_with_keys`
SELECT s.thread_key, c.row_key, c.checkpoint_id, c.parent_id, c.run_start, c.put_at, c.body FROM (
    SELECT n.thread_key, CASE n.explicit_head
    WHEN 0 THEN (SELECT max(row_key) FROM checkpoints WHERE row_key >= n.namespace_key << 32 AND row_key < (n.namespace_key + 1) << 32)
    ELSE (n.namespace_key << 32) + n.explicit_head END AS head
    FROM namespaces n WHERE n.checkpoint_ns = '' AND n.thread_key = ANY(translate(?1, '[]', '{}')::bigint[])
) s JOIN checkpoints c ON c.row_key = s.head;

-- root_writes: see sqlite.sql and `head_with_keys`
SELECT s.thread_key, w.checkpoint_id, w.task_id, w.task_path, w.body FROM (
    SELECT n.thread_key, CASE n.explicit_head
    WHEN 0 THEN (SELECT max(row_key) FROM checkpoints WHERE row_key >= n.namespace_key << 32 AND row_key < (n.namespace_key + 1) << 32)
    ELSE (n.namespace_key << 32) + n.explicit_head END AS head
    FROM namespaces n WHERE n.checkpoint_ns = '' AND n.thread_key = ANY(translate(?1, '[]', '{}')::bigint[])
) s JOIN checkpoints c ON c.row_key = s.head JOIN writes w ON w.namespace_key = c.namespace_key AND w.checkpoint_id = c.checkpoint_id ORDER BY w.task_path, w.task_id;

-- count_threads_by_day: see sqlite.sql
SELECT CAST(floor(created_at / 86400) AS bigint), count(*) FROM threads t
WHERE last_seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread_key = t.thread_key) GROUP BY 1 ORDER BY 1;

-- lock_client_metadata: see sqlite.sql; other transactions that change the row wait until this one ends
SELECT thread_key, status, last_seq, client_metadata FROM threads WHERE thread_id = ? FOR UPDATE;

-- count_transcript_erasure: see sqlite.sql
INSERT INTO transcript_settings (name, value) VALUES ('erasures', '1')
ON CONFLICT ({tenant}name) DO UPDATE SET value = (transcript_settings.value::bigint + 1)::text;

-- has_key: see sqlite.sql
t.thread_key = ANY(translate(?6, '[]', '{}')::bigint[]);

-- list_threads: see sqlite.sql
SELECT thread_key, thread_id, created_at, updated_at, thread_key, list_entry FROM threads t
WHERE ({activity}, thread_key) < (?1, ?2) AND {activity} >= ?5
AND substr(convert_to(thread_id, 'UTF8'), 1, length(?3::bytea)) = ?3
AND {condition} ORDER BY {activity} DESC, t.thread_key DESC LIMIT ?4;

-- analyze_tables: see sqlite.sql
ANALYZE threads, namespaces, logs, items, checkpoints, writes, tags;
