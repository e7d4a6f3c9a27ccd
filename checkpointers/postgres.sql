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
    ttl_minutes double precision,
    ttl_since double precision NOT NULL DEFAULT 0,
    ttl_keeps_latest bigint NOT NULL DEFAULT 0,
    newest_removal bigint NOT NULL DEFAULT 0,
    PRIMARY KEY ({tenant}thread_key),
    UNIQUE ({tenant}thread_id)
) WITH (fillfactor = 70);
CREATE INDEX threads_activity ON threads ({tenant}updated_at);
CREATE INDEX threads_waiting ON threads ({tenant}updated_at) WHERE may_wait = 1;
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
CREATE TABLE runs ({tenant_column}
    thread_key bigint NOT NULL,
    seq bigint NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    owner text COLLATE "C" NOT NULL,
    graph_id text COLLATE "C" NOT NULL,
    attempt bigint NOT NULL DEFAULT 1,
    cancel_action text COLLATE "C",
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    details bytea NOT NULL,
    request bytea,
    error bytea,
    not_before double precision,
    stores_events bigint NOT NULL DEFAULT 0,
    PRIMARY KEY ({tenant}thread_key, seq)
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX runs_running ON runs ({tenant}thread_key) WHERE status = 'running';
CREATE INDEX runs_live ON runs ({tenant}thread_key, seq) WHERE status IN ('pending', 'running');
CREATE INDEX runs_delayed ON runs ({tenant}not_before) WHERE status = 'delayed';
CREATE INDEX runs_events ON runs ({tenant}updated_at) WHERE stores_events = 1;
CREATE TABLE assistants ({tenant_column}
    assistant_id text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    created_at double precision NOT NULL,
    latest_since double precision,
    content bytea NOT NULL,
    PRIMARY KEY ({tenant}assistant_id, version)
);
CREATE TABLE run_events ({tenant_column}
    thread_key bigint NOT NULL,
    seq bigint NOT NULL,
    after_event bigint NOT NULL,
    last_event bigint NOT NULL,
    body bytea,
    PRIMARY KEY ({tenant}thread_key, seq, after_event)
);
ALTER TABLE run_events SET (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);
CREATE TABLE crons ({tenant_column}
    cron_id text COLLATE "C" NOT NULL,
    thread_id text COLLATE "C",
    next_at double precision,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    content bytea NOT NULL,
    PRIMARY KEY ({tenant}cron_id)
);
CREATE INDEX crons_due ON crons ({tenant}next_at);
CREATE INDEX crons_of_thread ON crons ({tenant}thread_id);
CREATE TABLE webhooks ({tenant_column}
    run_id text COLLATE "C" NOT NULL,
    thread_id text COLLATE "C",
    next_at double precision NOT NULL,
    attempts bigint NOT NULL DEFAULT 0,
    content bytea NOT NULL,
    PRIMARY KEY ({tenant}run_id)
);
CREATE INDEX webhooks_due ON webhooks ({tenant}next_at);
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

-- newest_removals_of_threads: see sqlite.sql
SELECT thread_key, newest_removal FROM threads WHERE thread_key = ANY(translate(?, '[]', '{}')::bigint[]);

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

-- list_threads: see sqlite.sql
SELECT thread_key, thread_id, created_at, updated_at, thread_key, list_entry FROM threads t
WHERE (updated_at, thread_key) < (?1, ?2) AND updated_at >= ?5
AND substr(convert_to(thread_id, 'UTF8'), 1, length(?3::bytea)) = ?3
AND (last_seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread_key = t.thread_key))
ORDER BY t.updated_at DESC, t.thread_key DESC LIMIT ?4;

-- matches_search_key: see sqlite.sql
t.search_keys IS NULL OR (t.client_search_keys IS NULL AND t.client_metadata IS NOT NULL) OR position(?::bytea in t.search_keys) > 0 OR position(?::bytea in t.client_search_keys) > 0;

-- tagged_threads: see sqlite.sql
SELECT thread_key, thread_id, created_at, updated_at, thread_key, list_entry FROM threads t
WHERE (updated_at, thread_key) < (?1, ?2) AND updated_at >= ?5
AND substr(convert_to(thread_id, 'UTF8'), 1, length(?3::bytea)) = ?3
AND EXISTS (
    SELECT 1 FROM namespaces n JOIN tags g ON g.tag = ?6 AND g.checkpoint_key = CASE n.explicit_head
    WHEN 0 THEN (SELECT max(row_key) FROM checkpoints WHERE row_key >= n.namespace_key << 32 AND row_key < (n.namespace_key + 1) << 32)
    ELSE (n.namespace_key << 32) + n.explicit_head END
    WHERE n.thread_key = t.thread_key AND n.checkpoint_ns = ''
) ORDER BY t.updated_at DESC, t.thread_key DESC LIMIT ?4;

-- waiting_threads: see sqlite.sql
SELECT thread_key, thread_id, created_at, updated_at, thread_key, list_entry FROM threads t
WHERE (updated_at, thread_key) < (?1, ?2) AND updated_at >= ?5
AND substr(convert_to(thread_id, 'UTF8'), 1, length(?3::bytea)) = ?3 AND may_wait = 1
ORDER BY t.updated_at DESC, t.thread_key DESC LIMIT ?4;

-- end_run: see sqlite.sql
UPDATE runs SET status = ?, error = CASE WHEN cancel_action IS NULL AND stores_events >= 0 THEN ?::bytea END, request = CASE WHEN cancel_action IS NULL AND stores_events >= 0 THEN ?::bytea END, updated_at = ?, owner = ''
WHERE thread_key = ? AND seq = ? AND owner = ? AND status = 'running' AND (cancel_action IS NULL OR ?::text IN (cancel_action, 'rollback')) RETURNING 0;

-- analyze_tables: see sqlite.sql
ANALYZE threads, namespaces, logs, items, checkpoints, writes, tags, runs;

-- allow_delayed_commit: let this transaction return before it is on disk; a power cut can lose it, and no more than about the last half second
SELECT set_config('synchronous_commit', 'off', true);

-- add_events: see sqlite.sql; a transaction that deletes the run or erases its messages waits for this one, or this one sees its result
INSERT INTO run_events (thread_key, seq, after_event, last_event, body) SELECT r.thread_key, r.seq, ?1::bigint, ?2::bigint, ?3::bytea FROM runs r
WHERE r.thread_key = ?4 AND r.seq = ?5 AND r.owner = ?6 AND r.status = 'running' AND r.stores_events = 1
AND (r.cancel_action IS NULL OR ?7::text IN (r.cancel_action, 'rollback')) FOR SHARE ON CONFLICT DO NOTHING;
