-- What differs from sqlite.sql. A list of numbers is JSON, which Postgres takes as an array once its brackets are braces.
-- Tables that tenants share have a column `tenant` (`storage/postgres_schema.py`), which leads all keys.

-- schema: the tables
CREATE TABLE keys ({tenant_column}name text, last bigint NOT NULL, PRIMARY KEY ({tenant}name));
CREATE TABLE threads ({tenant_column}
    thread bigint,
    thread_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL DEFAULT 0,
    generation bigint NOT NULL DEFAULT 0,
    stamp bigint NOT NULL DEFAULT 0,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    waiting bigint NOT NULL DEFAULT 0,
    status text NOT NULL DEFAULT 'idle',
    title bytea,
    found bytea,
    client bytea,
    client_found bytea,
    ttl double precision,
    ttl_since double precision NOT NULL DEFAULT 0,
    ttl_keeps bigint NOT NULL DEFAULT 0,
    removals bigint NOT NULL DEFAULT 0,
    PRIMARY KEY ({tenant}thread),
    UNIQUE ({tenant}thread_id)
) WITH (fillfactor = 70);
CREATE INDEX threads_activity ON threads ({tenant}updated_at);
CREATE INDEX threads_waiting ON threads ({tenant}updated_at) WHERE waiting = 1;
CREATE INDEX threads_expiry ON threads ({tenant}(updated_at + 60 * ttl)) WHERE ttl IS NOT NULL;
CREATE TABLE namespaces ({tenant_column}
    namespace bigint,
    thread bigint NOT NULL,
    ns text COLLATE "C" NOT NULL,
    pinned bigint NOT NULL DEFAULT 0,
    UNIQUE ({tenant}thread, ns),
    PRIMARY KEY ({tenant}namespace)
);
CREATE TABLE logs ({tenant_column}
    log bigint,
    thread bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    UNIQUE ({tenant}thread, name),
    PRIMARY KEY ({tenant}log)
);
CREATE TABLE items ({tenant_column}id bigint, h bigint NOT NULL, stored_at double precision NOT NULL, body bytea NOT NULL, PRIMARY KEY ({tenant}id));
CREATE INDEX items_h ON items ({tenant}h);
CREATE TABLE checkpoints ({tenant_column}
    id bigint,
    namespace bigint NOT NULL,
    uid bytea NOT NULL,
    parent bytea,
    began bigint NOT NULL,
    put_at double precision NOT NULL,
    body bytea NOT NULL,
    UNIQUE ({tenant}namespace, uid),
    PRIMARY KEY ({tenant}id)
);
CREATE TABLE writes ({tenant_column}
    namespace bigint NOT NULL,
    uid bytea NOT NULL,
    task bytea NOT NULL,
    path text COLLATE "C" NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY ({tenant}namespace, uid, task)
);
CREATE TABLE tags ({tenant_column}
    tag bigint NOT NULL,
    checkpoint bigint NOT NULL,
    PRIMARY KEY ({tenant}tag, checkpoint)
);
CREATE TABLE said ({tenant_column}
    thread bigint,
    stamp bigint NOT NULL,
    position bigint NOT NULL,
    path bytea NOT NULL,
    PRIMARY KEY ({tenant}thread)
);
CREATE TABLE removals ({tenant_column}
    thread bytea NOT NULL,
    number bigint NOT NULL,
    removed_at double precision NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY ({tenant}thread, number)
);
CREATE INDEX removals_age ON removals ({tenant}removed_at);
CREATE TABLE runs ({tenant_column}
    thread bigint NOT NULL,
    seq bigint NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    owner text COLLATE "C" NOT NULL,
    graph text COLLATE "C" NOT NULL,
    attempt bigint NOT NULL DEFAULT 1,
    cancel text COLLATE "C",
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    about bytea NOT NULL,
    request bytea,
    error bytea,
    not_before double precision,
    events bigint NOT NULL DEFAULT 0,
    PRIMARY KEY ({tenant}thread, seq)
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX runs_running ON runs ({tenant}thread) WHERE status = 'running';
CREATE INDEX runs_live ON runs ({tenant}thread, seq) WHERE status IN ('pending', 'running');
CREATE INDEX runs_delayed ON runs ({tenant}not_before) WHERE status = 'delayed';
CREATE INDEX runs_events ON runs ({tenant}updated_at) WHERE events = 1;
CREATE TABLE assistants ({tenant_column}
    assistant_id text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    created_at double precision NOT NULL,
    since double precision,
    content bytea NOT NULL,
    PRIMARY KEY ({tenant}assistant_id, version)
);
CREATE TABLE run_events ({tenant_column}
    thread bigint NOT NULL,
    seq bigint NOT NULL,
    since bigint NOT NULL,
    until bigint NOT NULL,
    body bytea,
    PRIMARY KEY ({tenant}thread, seq, since)
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

-- advance: see sqlite.sql; a division tells whether nobody changed the thread, as an error undoes the whole request
WITH advanced AS (UPDATE threads SET seq = ?1, stamp = ?2,
    waiting = CASE WHEN ?7 = 0 THEN EXISTS (SELECT 1 FROM writes WHERE namespace = ?5 AND uid = ?6)::int ELSE waiting END WHERE thread = ?3 AND stamp = ?4
    AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE namespace = ?5 AND uid = ?6) RETURNING 1)
SELECT 1 / count(*), EXISTS (SELECT 1 FROM writes WHERE namespace = ?5 AND uid = ?6) FROM advanced;

-- advance_now: the same, and when it was written to
WITH advanced AS (UPDATE threads SET seq = ?1, stamp = ?2, updated_at = greatest(updated_at, ?8),
    waiting = CASE WHEN ?7 = 0 THEN EXISTS (SELECT 1 FROM writes WHERE namespace = ?5 AND uid = ?6)::int ELSE waiting END WHERE thread = ?3 AND stamp = ?4
    AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE namespace = ?5 AND uid = ?6) RETURNING 1)
SELECT 1 / count(*), EXISTS (SELECT 1 FROM writes WHERE namespace = ?5 AND uid = ?6) FROM advanced;

-- advance_replayed: see sqlite.sql and `advance`
WITH advanced AS (UPDATE threads SET seq = ?1, stamp = ?2, updated_at = greatest(updated_at, ?8),
    waiting = CASE WHEN ?7 = 0 THEN EXISTS (SELECT 1 FROM writes WHERE namespace = ?5 AND uid = ?6)::int ELSE waiting END WHERE thread = ?3 AND stamp = ?4
    AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE namespace = ?5 AND uid = ?6)
    AND (SELECT coalesce(sum(1 + length(body)), 0) FROM writes WHERE namespace = ?5 AND uid = ?9) = ?10 RETURNING 1)
SELECT 1 / count(*), EXISTS (SELECT 1 FROM writes WHERE namespace = ?5 AND uid = ?6) FROM advanced;

-- advance_into: see sqlite.sql and `advance`
WITH advanced AS (UPDATE threads SET seq = ?1, stamp = ?2, updated_at = greatest(updated_at, ?6) WHERE thread = ?3 AND stamp = ?4
    AND NOT EXISTS (SELECT 1 FROM namespaces n WHERE n.thread = ?3 AND n.ns = ?5) RETURNING 1)
SELECT 1 / count(*), false FROM advanced;

-- new_thread: see `advance`
WITH made AS (
    INSERT INTO threads (thread, thread_id, seq, stamp, created_at, updated_at, removals)
    SELECT ?1::bigint, ?2::text, ?3::bigint, ?4::bigint, ?5::double precision, ?6::double precision, ?7::bigint
    WHERE NOT EXISTS (SELECT 1 FROM removals r WHERE r.thread = ?8::bytea AND r.number > ?7)
    ON CONFLICT DO NOTHING RETURNING 1
)
SELECT 1 / count(*), false FROM made;

-- new_writes: see sqlite.sql and `advance`
WITH added AS (
    INSERT INTO writes (namespace, uid, task, path, body) SELECT ?1::bigint, ?2::bytea, ?3::bytea, ?4::text, ?5::bytea
    WHERE EXISTS (SELECT 1 FROM threads WHERE thread = ?6 AND generation = ?7)
    AND EXISTS (SELECT 1 FROM namespaces WHERE namespace = ?1 AND thread = ?6)
    AND (?8 = 0 OR EXISTS (SELECT 1 FROM checkpoints WHERE id = ?8 AND uid = ?9)) RETURNING 1
)
SELECT 1 / count(*), false FROM added;

-- new_writes_at_head: see sqlite.sql and `advance`
WITH added AS (
    INSERT INTO writes (namespace, uid, task, path, body) SELECT ?1::bigint, ?2::bytea, ?3::bytea, ?4::text, ?5::bytea
    WHERE EXISTS (SELECT 1 FROM threads WHERE thread = ?6 AND generation = ?7)
    AND EXISTS (SELECT 1 FROM namespaces n WHERE n.namespace = ?1 AND n.thread = ?6 AND ?10::bigint = CASE n.pinned
    WHEN 0 THEN (SELECT max(id) FROM checkpoints WHERE id >= ?1::bigint << 32 AND id < (?1::bigint + 1) << 32) ELSE (?1::bigint << 32) + n.pinned END)
    AND (?8 = 0 OR EXISTS (SELECT 1 FROM checkpoints WHERE id = ?8 AND uid = ?9)) RETURNING 1
)
SELECT 1 / count(*), false FROM added;

-- astray: not asked, as Postgres checks its indexes itself (`amcheck`, data checksums)

-- head_of: the checkpoint a run starts from; apart, as row-level security keeps a calculation from the indexes
SELECT s.thread, s.generation, s.removals, s.namespace, c.id, c.uid, c.parent, c.began, c.put_at, c.body
FROM (
    SELECT t.thread, t.generation, t.removals, n.namespace, CASE n.pinned
    WHEN 0 THEN (SELECT max(id) FROM checkpoints WHERE id >= n.namespace << 32 AND id < (n.namespace + 1) << 32)
    ELSE (n.namespace << 32) + n.pinned END AS head
    FROM threads t JOIN namespaces n ON n.thread = t.thread WHERE t.thread_id = ? AND n.ns = ? LIMIT 1
) s JOIN checkpoints c ON c.id = s.head;

-- writes_of: what the tasks of a checkpoint wrote
SELECT NULL, NULL, uid, task, path, body FROM writes WHERE namespace = ?1 AND uid = ?2;

-- tags_beside: see `astray`

-- same_hashes: candidates for being items that are stored already
SELECT id, body FROM items WHERE h = ANY(translate(?, '[]', '{}')::bigint[]);

-- removals_of: the numbers of removals from some threads, by their keys
SELECT thread, removals FROM threads WHERE thread = ANY(translate(?, '[]', '{}')::bigint[]);

-- root_heads: the heads of some threads; apart, see `head_of`
SELECT s.thread, c.id, c.uid, c.parent, c.began, c.put_at, c.body FROM (
    SELECT n.thread, CASE n.pinned
    WHEN 0 THEN (SELECT max(id) FROM checkpoints WHERE id >= n.namespace << 32 AND id < (n.namespace + 1) << 32)
    ELSE (n.namespace << 32) + n.pinned END AS head
    FROM namespaces n WHERE n.ns = '' AND n.thread = ANY(translate(?1, '[]', '{}')::bigint[])
) s JOIN checkpoints c ON c.id = s.head;

-- root_writes: what their tasks wrote
SELECT s.thread, w.uid, w.task, w.path, w.body FROM (
    SELECT n.thread, CASE n.pinned
    WHEN 0 THEN (SELECT max(id) FROM checkpoints WHERE id >= n.namespace << 32 AND id < (n.namespace + 1) << 32)
    ELSE (n.namespace << 32) + n.pinned END AS head
    FROM namespaces n WHERE n.ns = '' AND n.thread = ANY(translate(?1, '[]', '{}')::bigint[])
) s JOIN checkpoints c ON c.id = s.head JOIN writes w ON w.namespace = c.namespace AND w.uid = c.uid ORDER BY w.path, w.task;

-- begun_by_day: how many threads were begun on each day since 1970
SELECT CAST(floor(created_at / 86400) AS bigint), count(*) FROM threads t
WHERE seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread = t.thread) GROUP BY 1 ORDER BY 1;

-- hold_client: see sqlite.sql; others wait until the transaction ends
SELECT thread, status, seq, client FROM threads WHERE thread_id = ? FOR UPDATE;

-- said_erased: see sqlite.sql
INSERT INTO said_settings (name, value) VALUES ('erasures', '1')
ON CONFLICT ({tenant}name) DO UPDATE SET value = (said_settings.value::bigint + 1)::text;

-- list_threads: a page, newest activity first
SELECT thread, thread_id, created_at, updated_at, thread, title FROM threads t
WHERE (updated_at, thread) < (?1, ?2) AND updated_at >= ?5
AND substr(convert_to(thread_id, 'UTF8'), 1, length(?3::bytea)) = ?3
AND (seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread = t.thread))
ORDER BY t.updated_at DESC, t.thread DESC LIMIT ?4;

-- is_found: see sqlite.sql
t.found IS NULL OR (t.client_found IS NULL AND t.client IS NOT NULL) OR position(?::bytea in t.found) > 0 OR position(?::bytea in t.client_found) > 0;

-- tagged_threads: those of them whose head has a metadata value
SELECT thread, thread_id, created_at, updated_at, thread, title FROM threads t
WHERE (updated_at, thread) < (?1, ?2) AND updated_at >= ?5
AND substr(convert_to(thread_id, 'UTF8'), 1, length(?3::bytea)) = ?3
AND EXISTS (
    SELECT 1 FROM namespaces n JOIN tags g ON g.tag = ?6 AND g.checkpoint = CASE n.pinned
    WHEN 0 THEN (SELECT max(id) FROM checkpoints WHERE id >= n.namespace << 32 AND id < (n.namespace + 1) << 32)
    ELSE (n.namespace << 32) + n.pinned END
    WHERE n.thread = t.thread AND n.ns = ''
) ORDER BY t.updated_at DESC, t.thread DESC LIMIT ?4;

-- waiting_threads: those of them that may wait for an answer
SELECT thread, thread_id, created_at, updated_at, thread, title FROM threads t
WHERE (updated_at, thread) < (?1, ?2) AND updated_at >= ?5
AND substr(convert_to(thread_id, 'UTF8'), 1, length(?3::bytea)) = ?3 AND waiting = 1
ORDER BY t.updated_at DESC, t.thread DESC LIMIT ?4;

-- end_run: see sqlite.sql
UPDATE runs SET status = ?, error = CASE WHEN cancel IS NULL AND events >= 0 THEN ?::bytea END, request = CASE WHEN cancel IS NULL AND events >= 0 THEN ?::bytea END, updated_at = ?, owner = ''
WHERE thread = ? AND seq = ? AND owner = ? AND status = 'running' AND (cancel IS NULL OR ?::text IN (cancel, 'rollback')) RETURNING 0;

-- analyzed: the planner is told what a copy has added
ANALYZE threads, namespaces, logs, items, checkpoints, writes, tags, runs;

-- relaxed: what a power cut may take, with at most the newest half second of it
SELECT set_config('synchronous_commit', 'off', true);

-- add_events: see sqlite.sql; who deletes the run, or erases what it told, waits until this is committed, or this sees it
INSERT INTO run_events (thread, seq, since, until, body) SELECT r.thread, r.seq, ?1::bigint, ?2::bigint, ?3::bytea FROM runs r
WHERE r.thread = ?4 AND r.seq = ?5 AND r.owner = ?6 AND r.status = 'running' AND r.events = 1
AND (r.cancel IS NULL OR ?7::text IN (r.cancel, 'rollback')) FOR SHARE ON CONFLICT DO NOTHING;
