-- Statements of the server's tables that differ on Postgres.

-- schema: see sqlite.sql
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

-- end_run: see sqlite.sql
UPDATE runs SET status = ?, error = CASE WHEN cancel_action IS NULL AND stores_events >= 0 THEN ?::bytea END, request = CASE WHEN cancel_action IS NULL AND stores_events >= 0 THEN ?::bytea END, updated_at = ?, owner = ''
WHERE thread_key = ? AND seq = ? AND owner = ? AND status = 'running' AND (cancel_action IS NULL OR ?::text IN (cancel_action, 'rollback')) RETURNING 0;

-- analyze_tables: see sqlite.sql
ANALYZE runs;

-- allow_delayed_commit: let this transaction return before it is on disk; a power cut can lose it, and no more than about the last half second
SELECT set_config('synchronous_commit', 'off', true);

-- add_events: see sqlite.sql; a transaction that deletes the run or erases its messages waits for this one, or this one sees its result
INSERT INTO run_events (thread_key, seq, after_event, last_event, body) SELECT r.thread_key, r.seq, ?1::bigint, ?2::bigint, ?3::bytea FROM runs r
WHERE r.thread_key = ?4 AND r.seq = ?5 AND r.owner = ?6 AND r.status = 'running' AND r.stores_events = 1
AND (r.cancel_action IS NULL OR ?7::text IN (r.cancel_action, 'rollback')) FOR SHARE ON CONFLICT DO NOTHING;

-- newest_removals_of_threads: see sqlite.sql
SELECT thread_key, newest_removal FROM threads WHERE thread_key = ANY(translate(?, '[]', '{}')::bigint[]);

-- has_key_in_list: see sqlite.sql
t.thread_key = ANY(translate(?, '[]', '{}')::bigint[]);

-- matches_search_key: see sqlite.sql
t.search_keys IS NULL OR (t.client_search_keys IS NULL AND t.client_metadata IS NOT NULL) OR position(?::bytea in t.search_keys) > 0 OR position(?::bytea in t.client_search_keys) > 0;
