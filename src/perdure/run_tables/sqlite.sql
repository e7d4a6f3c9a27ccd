-- Statements of the server's tables, for SQLite. postgres.sql replaces some of them.
--
-- assistants.latest_since   set only for the version that is in use
-- runs.stores_events     1 if the events of the run are stored, 0 if not, -1 if messages were erased while it ran

-- schema: create the tables of the server
CREATE TABLE runs (
    thread_key INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    status TEXT NOT NULL,
    owner TEXT NOT NULL,
    graph_id TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 1,
    cancel_action TEXT,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    details BLOB NOT NULL,
    request BLOB,
    error BLOB,
    not_before REAL,
    stores_events INTEGER NOT NULL DEFAULT 0,
    UNIQUE (thread_key, seq)
) STRICT;
CREATE UNIQUE INDEX runs_running ON runs (thread_key) WHERE status = 'running';
CREATE INDEX runs_live ON runs (thread_key, seq) WHERE status IN ('pending', 'running');
CREATE INDEX runs_delayed ON runs (not_before) WHERE status = 'delayed';
CREATE INDEX runs_events ON runs (updated_at) WHERE stores_events = 1;
CREATE TABLE assistants (
    assistant_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at REAL NOT NULL,
    latest_since REAL,
    content BLOB NOT NULL,
    PRIMARY KEY (assistant_id, version)
) STRICT;
CREATE TABLE run_events (
    thread_key INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    after_event INTEGER NOT NULL,
    last_event INTEGER NOT NULL,
    body BLOB,
    PRIMARY KEY (thread_key, seq, after_event)
) STRICT;
CREATE TABLE crons (
    cron_id TEXT NOT NULL PRIMARY KEY,
    thread_id TEXT,
    next_at REAL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    content BLOB NOT NULL
) STRICT;
CREATE INDEX crons_due ON crons (next_at);
CREATE INDEX crons_of_thread ON crons (thread_id);
CREATE TABLE webhooks (
    run_id TEXT NOT NULL PRIMARY KEY,
    thread_id TEXT,
    next_at REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    content BLOB NOT NULL
) STRICT;
CREATE INDEX webhooks_due ON webhooks (next_at);

-- has_unfinished_run: the condition that a run of the thread is delayed, pending or running
EXISTS (SELECT 1 FROM runs r WHERE r.thread_key = t.thread_key AND r.status IN ('delayed', 'pending', 'running'));

-- expired_threads: expired threads without an unfinished run, with ttl_keeps_latest; all of them, or only the thread ?2; the caller replaces {has_unfinished_run}
SELECT t.thread_id, t.ttl_keeps_latest FROM threads t WHERE t.ttl_minutes IS NOT NULL AND t.updated_at + 60 * t.ttl_minutes <= ?1
AND t.ttl_since + 60 * t.ttl_minutes <= ?1 AND (t.ttl_keeps_latest < 2 OR t.updated_at > t.ttl_since) AND (t.thread_id = ?2 OR ?2 = '')
AND NOT {has_unfinished_run} LIMIT ?3;

-- is_busy: the condition that a run of the thread is pending or running, so that the status of the thread is busy; delayed runs do not count
EXISTS (SELECT 1 FROM runs r WHERE r.thread_key = t.thread_key AND r.status IN ('pending', 'running'));

-- listed_threads: threads as the server lists them; the caller replaces {is_busy}, and appends conditions, an order and a page
SELECT t.thread_key, t.thread_id, t.created_at, t.updated_at, t.thread_key, t.list_entry, t.may_wait, t.last_seq, t.status, t.client_metadata,
{is_busy}, t.ttl_minutes, t.ttl_since, t.ttl_keeps_latest, t.newest_removal
FROM threads t WHERE 1 = 1;

-- accept_run: insert a run. It starts at once if no run of the thread is unfinished. Otherwise it is pending, or is not inserted if ?8 is 1. A delayed run belongs to no process
INSERT INTO runs (thread_key, seq, run_id, status, owner, graph_id, created_at, updated_at, details, request, not_before, stores_events)
SELECT t.thread_key, t.seq, CAST(?1 AS text),
CASE WHEN CAST(?9 AS double precision) IS NOT NULL THEN 'delayed' WHEN t.live = 0 THEN 'running' ELSE 'pending' END,
CAST(?2 AS text), CAST(?3 AS text), ?4, ?4, ?5, ?6, CAST(?9 AS double precision), ?10
FROM (
    SELECT thread_key, (SELECT coalesce(max(u.last), 0) + 1 FROM (SELECT max(r.seq) AS last FROM runs r WHERE r.thread_key = threads.thread_key UNION ALL SELECT max(e.seq) FROM run_events e WHERE e.thread_key = threads.thread_key) u) AS seq,
    (SELECT count(*) FROM runs r WHERE r.thread_key = threads.thread_key AND r.status IN ('pending', 'running')) AS live
    FROM threads WHERE thread_id = ?7
) t WHERE t.live = 0 OR ?8 = 0 RETURNING thread_key, seq, status;

-- end_run: store how a run ended, if this process still owns it and knows how it was cancelled; the error and the request are not stored if the run was stopped or messages were erased from its thread
UPDATE runs SET status = ?, error = CASE WHEN cancel_action IS NULL AND stores_events >= 0 THEN ? END, request = CASE WHEN cancel_action IS NULL AND stores_events >= 0 THEN ? END, updated_at = ?, owner = ''
WHERE thread_key = ? AND seq = ? AND owner = ? AND status = 'running' AND (cancel_action IS NULL OR CAST(? AS text) IN (cancel_action, 'rollback')) RETURNING 0;

-- set_run_details: replace the details of a run that this process executes
UPDATE runs SET details = ? WHERE thread_key = ? AND seq = ? AND owner = ? AND status = 'running';

-- drop_run: delete a run that was rolled back, unless another process has taken it over
DELETE FROM runs WHERE thread_key = ? AND seq = ? AND owner = ? AND status = 'running' RETURNING 0;

-- drop_ended_run: delete a run that has ended
DELETE FROM runs WHERE thread_key = (SELECT thread_key FROM threads WHERE thread_id = ?) AND run_id = ? AND status NOT IN ('delayed', 'pending', 'running');

-- is_thread_in_use: a row for each delayed, pending or running run of a thread, and for each cron of the thread that is due again
SELECT 1 FROM runs WHERE thread_key = (SELECT thread_key FROM threads WHERE thread_id = ?1) AND status IN ('delayed', 'pending', 'running')
UNION ALL SELECT 1 FROM crons WHERE thread_id = ?1 AND next_at IS NOT NULL;

-- add_webhook: insert the webhook of a run that this process ends and of which it knows how it was cancelled, with the content ?5 if messages were erased during the run
INSERT INTO webhooks (run_id, thread_id, next_at, content) SELECT CAST(?1 AS text), CAST(?2 AS text), CAST(?3 AS double precision),
CASE WHEN r.stores_events >= 0 THEN ?4 ELSE ?5 END FROM runs r WHERE r.thread_key = ?6 AND r.seq = ?7 AND r.owner = ?8 AND r.status = 'running'
AND (r.cancel_action IS NULL OR CAST(?9 AS text) IN (r.cancel_action, 'rollback')) ON CONFLICT DO NOTHING;

-- due_webhooks: the webhooks that are due
SELECT run_id FROM webhooks WHERE next_at <= ? ORDER BY next_at LIMIT ?;

-- due_webhook: one webhook, if it is due
SELECT content, attempts FROM webhooks WHERE run_id = ? AND next_at <= ?;

-- claim_webhook: claim a webhook for one attempt and set the time of the next attempt, unless another process has claimed it
UPDATE webhooks SET attempts = attempts + 1, next_at = ? WHERE run_id = ? AND attempts = ? RETURNING 0;

-- set_status: store how the last run of the server on a thread ended
UPDATE threads SET status = ? WHERE thread_key = ?;

-- set_ttl: store after how many minutes without activity, counted from ?2 at the earliest, a thread expires; ttl_keeps_latest is 0 to delete the thread, 1 to keep its latest state, 2 if only that state is left
UPDATE threads SET ttl_minutes = ?, ttl_since = ?, ttl_keeps_latest = ? WHERE thread_id = ?;

-- webhooks_of_thread: the webhooks of a thread
SELECT run_id, content FROM webhooks WHERE thread_id = ?;

-- runs_of_threads_without_checkpoint: the stored runs, without their requests, of all threads that have no checkpoint in the root namespace, so that no metadata names the user of the thread; the checkpoints of such a thread may have been deleted by a rollback
SELECT t.thread_id, r.thread_key, r.seq, r.run_id, r.status, r.owner, r.graph_id, r.attempt, r.cancel_action, r.created_at, r.updated_at, r.details, r.error, NULL, r.not_before
FROM threads t JOIN runs r ON r.thread_key = t.thread_key
WHERE NOT EXISTS (SELECT 1 FROM namespaces n JOIN checkpoints c ON c.namespace_key = n.namespace_key WHERE n.thread_key = t.thread_key AND n.checkpoint_ns = '');

-- webhooks_without_thread: the webhooks of runs that were executed without a stored thread
SELECT run_id, content FROM webhooks WHERE thread_id IS NULL;

-- drop_webhook: delete one webhook
DELETE FROM webhooks WHERE run_id = ?;

-- drop_webhooks: delete the webhooks of a thread
DELETE FROM webhooks WHERE thread_id = ?;

-- add_cron: insert a cron, unless its thread does not exist any more
INSERT INTO crons (cron_id, thread_id, next_at, created_at, updated_at, content)
SELECT CAST(?1 AS text), CAST(?2 AS text), CAST(?3 AS double precision), ?4, ?4, ?5
WHERE CAST(?2 AS text) IS NULL OR EXISTS (SELECT 1 FROM threads WHERE thread_id = ?2) RETURNING 0;

-- set_cron: replace the content of a cron, and the time at which it is due if ?3 is 1
UPDATE crons SET content = ?1, updated_at = ?2, next_at = CASE WHEN ?3 = 1 THEN CAST(?4 AS double precision) ELSE next_at END WHERE cron_id = ?5 RETURNING next_at;

-- advance_cron: set the next time at which a cron is due, unless another process has started its run
UPDATE crons SET next_at = ? WHERE cron_id = ? AND next_at = ? RETURNING 0;

-- reset_cron: set the time at which a cron is due, unless the cron was changed or started since it was read
UPDATE crons SET next_at = CAST(?1 AS double precision) WHERE cron_id = ?2 AND updated_at = ?3
AND (next_at = ?4 OR (next_at IS NULL AND CAST(?4 AS double precision) IS NULL)) RETURNING 0;

-- crons_not_due_before: crons that are due after a time, or never
SELECT cron_id, thread_id, next_at, created_at, updated_at, content FROM crons WHERE next_at > ? OR next_at IS NULL;

-- one_cron: one cron, by its id
SELECT cron_id, thread_id, next_at, created_at, updated_at, content FROM crons WHERE cron_id = ?;

-- all_crons: all crons
SELECT cron_id, thread_id, next_at, created_at, updated_at, content FROM crons;

-- crons_of_thread: the crons of a thread
SELECT cron_id, thread_id, next_at, created_at, updated_at, content FROM crons WHERE thread_id = ?;

-- due_crons: the crons that are due
SELECT cron_id FROM crons WHERE next_at <= ? ORDER BY next_at;

-- drop_cron: delete one cron
DELETE FROM crons WHERE cron_id = ? RETURNING 0;

-- drop_crons: delete the crons of a thread
DELETE FROM crons WHERE thread_id = ? RETURNING 0;

-- run_status: the status of a run
SELECT status FROM runs WHERE thread_key = ? AND run_id = ?;

-- start_delayed_run: move a delayed run that is due to the end of its thread's queue; the run starts at once if no other run of the thread is unfinished
UPDATE runs SET owner = ?1, updated_at = ?2, seq = (SELECT coalesce(max(u.last), 0) + 1 FROM (SELECT max(r.seq) AS last FROM runs r WHERE r.thread_key = ?3 UNION ALL SELECT max(e.seq) FROM run_events e WHERE e.thread_key = ?3) u), status = CASE WHEN EXISTS (
    SELECT 1 FROM runs e WHERE e.thread_key = ?3 AND e.status IN ('pending', 'running')
) THEN 'pending' ELSE 'running' END WHERE thread_key = ?3 AND run_id = ?4 AND status = 'delayed';

-- claim_runs: start the pending runs of this process whose threads have no earlier unfinished run
UPDATE runs SET status = 'running', updated_at = ?1 WHERE owner = ?2 AND status = 'pending' AND NOT EXISTS (
    SELECT 1 FROM runs e WHERE e.thread_key = runs.thread_key AND e.status IN ('pending', 'running') AND e.seq < runs.seq
);

-- claim_next_run: start the next pending run of one thread
UPDATE runs SET status = 'running', updated_at = ?1 WHERE thread_key = ?3 AND owner = ?2 AND status = 'pending' AND NOT EXISTS (
    SELECT 1 FROM runs e WHERE e.thread_key = ?3 AND e.status IN ('pending', 'running') AND e.seq < runs.seq
) RETURNING run_id;

-- adopt_run: take over a run of a process that is gone. If the run was executing, that counts as an attempt. claim_runs follows in the same transaction, so nobody sees the run as pending
UPDATE runs SET owner = ?, attempt = attempt + CASE WHEN status = 'running' AND owner <> '' THEN 1 ELSE 0 END, status = 'pending'
WHERE thread_key = ? AND seq = ? AND owner = ? AND status IN ('pending', 'running');

-- release_runs: give up the unfinished runs of a process that shuts down, for another process to take over
UPDATE runs SET owner = '' WHERE owner = ? AND status IN ('pending', 'running');

-- cancel_runs: cancel one run of a thread or all of them, delayed runs only if ?3 is 1. Runs that have not started end as interrupted. Running ones get the action, and rollback takes precedence over interrupt
UPDATE runs SET cancel_action = CASE CAST(?4 AS text) WHEN 'rollback' THEN 'rollback' ELSE coalesce(cancel_action, ?4) END, updated_at = ?5, request = CASE status WHEN 'running' THEN request END,
status = CASE status WHEN 'running' THEN status ELSE 'interrupted' END
WHERE thread_key = (SELECT thread_key FROM threads WHERE thread_id = ?1) AND (?2 = '' OR run_id = ?2)
AND (status IN ('pending', 'running') OR (status = 'delayed' AND ?3 = 1)) RETURNING run_id;

-- keep_waiting_seq: store the highest number of the runs that drop_waiting deletes as an empty batch of events, so that no later run of the thread gets a number that was used
INSERT INTO run_events (thread_key, seq, after_event, last_event) SELECT thread_key, max(seq), 0, 0 FROM runs
WHERE thread_key = (SELECT thread_key FROM threads WHERE thread_id = ?1) AND (?2 = '' OR run_id = ?2)
AND (status = 'pending' OR (status = 'delayed' AND ?3 = 1)) GROUP BY thread_key ON CONFLICT DO NOTHING;

-- drop_waiting: delete one run of a thread or all of them, if they have not started; delayed runs only if ?3 is 1
DELETE FROM runs WHERE thread_key = (SELECT thread_key FROM threads WHERE thread_id = ?1) AND (?2 = '' OR run_id = ?2)
AND (status = 'pending' OR (status = 'delayed' AND ?3 = 1)) RETURNING run_id;

-- runs_since: the runs of a thread after a number, in order, with their statuses
SELECT r.seq, r.run_id, r.status FROM threads t JOIN runs r ON r.thread_key = t.thread_key AND r.seq > ?
WHERE t.thread_id = ? AND r.status <> 'delayed' ORDER BY r.seq;

-- live_runs: the running and pending runs of all threads, and the delayed runs that are due
SELECT t.thread_id, r.thread_key, r.seq, r.run_id, r.status, r.owner, r.graph_id, r.attempt, r.cancel_action FROM (
    SELECT * FROM runs WHERE status IN ('pending', 'running')
    UNION ALL SELECT * FROM runs WHERE status = 'delayed' AND not_before <= ?
) r JOIN threads t ON t.thread_key = r.thread_key ORDER BY r.thread_key, r.seq;

-- live_runs_of_thread: the running and pending runs of one thread
SELECT r.run_id FROM runs r WHERE r.thread_key = (SELECT thread_key FROM threads WHERE thread_id = ?) AND r.status IN ('pending', 'running') ORDER BY r.seq;

-- runs_of_thread: the stored runs of a thread, newest first; all of them, or only the run ?2
SELECT t.thread_id, r.thread_key, r.seq, r.run_id, r.status, r.owner, r.graph_id, r.attempt, r.cancel_action, r.created_at, r.updated_at, r.details, r.error, r.request, r.not_before
FROM threads t JOIN runs r ON r.thread_key = t.thread_key WHERE t.thread_id = ?1 AND (?2 = '' OR r.run_id = ?2) ORDER BY r.seq DESC;

-- newest_runs: runs of all threads, each with a flag that says whether it is the last of its thread; the caller appends conditions, an order and a page
SELECT t.thread_id, r.thread_key, r.seq, r.run_id, r.status, r.owner, r.graph_id, r.attempt, r.cancel_action, r.created_at, r.updated_at, r.details, r.error, NULL, r.not_before,
NOT EXISTS (SELECT 1 FROM runs l WHERE l.thread_key = r.thread_key AND l.seq > r.seq) FROM threads t JOIN runs r ON r.thread_key = t.thread_key WHERE 1 = 1;

-- rewrite_run: replace the details, error and request of a run after an erasure, and cancel it if it is unfinished
UPDATE runs SET details = ?1, error = ?2, request = CASE status WHEN 'running' THEN coalesce(?3, request) END,
cancel_action = CASE WHEN status IN ('delayed', 'pending', 'running') THEN coalesce(cancel_action, 'interrupt') ELSE cancel_action END,
status = CASE WHEN status IN ('delayed', 'pending') THEN 'interrupted' ELSE status END WHERE thread_key = ?4 AND seq = ?5;

-- move_runs: assign the runs of a thread to the thread's new key
UPDATE runs SET thread_key = ? WHERE thread_key = ?;

-- drop_runs: delete the runs of a thread
DELETE FROM runs WHERE thread_key = ? RETURNING 0;

-- drop_old_runs: delete the ended runs of a thread up to a number
DELETE FROM runs WHERE thread_key = ? AND seq <= ? AND status NOT IN ('delayed', 'pending', 'running');

-- add_version: insert a version of an assistant, which is not yet the latest
INSERT INTO assistants (assistant_id, version, created_at, content) VALUES (?, ?, ?, ?);

-- set_latest: choose the version of an assistant that is in use from now on
UPDATE assistants SET latest_since = CASE version WHEN ?1 THEN CAST(?2 AS double precision) END WHERE assistant_id = ?3;

-- latest_version: the version of an assistant that is in use, with the time of the first version and the highest version number
SELECT a.assistant_id, a.version, f.created_at, a.latest_since, a.content, (SELECT max(m.version) FROM assistants m WHERE m.assistant_id = ?1)
FROM assistants a JOIN assistants f ON f.assistant_id = a.assistant_id AND f.version = 1 WHERE a.assistant_id = ?1 AND a.latest_since IS NOT NULL;

-- latest_versions: the version of every assistant that is in use, newest assistant first
SELECT a.assistant_id, a.version, f.created_at, a.latest_since, a.content
FROM assistants a JOIN assistants f ON f.assistant_id = a.assistant_id AND f.version = 1 WHERE a.latest_since IS NOT NULL ORDER BY f.created_at DESC, a.assistant_id;

-- versions_of: all versions of one assistant, newest first
SELECT assistant_id, version, created_at, latest_since, content FROM assistants WHERE assistant_id = ? ORDER BY version DESC;

-- drop_assistant: delete an assistant with all its versions
DELETE FROM assistants WHERE assistant_id = ?;

-- allow_delayed_commit: let this transaction return before it is on disk; SQLite's writers share a commit, so nothing is done here
SELECT 1;

-- add_events: store a batch of the events of a run that this process executes; nothing is stored after an erasure, or if the run was cancelled and ?7 is neither that cancellation nor rollback
INSERT INTO run_events (thread_key, seq, after_event, last_event, body) SELECT r.thread_key, r.seq, ?1, ?2, ?3 FROM runs r
WHERE r.thread_key = ?4 AND r.seq = ?5 AND r.owner = ?6 AND r.status = 'running' AND r.stores_events = 1
AND (r.cancel_action IS NULL OR CAST(?7 AS text) IN (r.cancel_action, 'rollback')) ON CONFLICT DO NOTHING;

-- restart_events: insert an empty batch when a run starts again, so that its new events get higher numbers than all events it has emitted before, stored or not
INSERT INTO run_events (thread_key, seq, after_event, last_event)
SELECT r.thread_key, r.seq, l.last, ((l.last >> CAST(?4 AS integer)) + 1) << CAST(?4 AS integer) FROM (
    SELECT thread_key, seq, (SELECT coalesce(max(e.last_event), ?3) FROM run_events e WHERE e.thread_key = runs.thread_key AND e.seq = runs.seq) AS last
    FROM runs WHERE thread_key = ?1 AND seq = ?2
) AS l JOIN runs r ON r.thread_key = l.thread_key AND r.seq = l.seq WHERE r.owner = ?5 AND r.status = 'running' RETURNING after_event, last_event;

-- events_after: the events of some runs of a thread after a number, in order. The thread is given by its key, which a later thread with the same id does not get. Returns at most ?5 rows and ?6 bytes, but at least one row
SELECT t.thread_id, r.run_id, e.after_event, e.last_event, e.body FROM (
    SELECT n.*, sum(n.size) OVER (ORDER BY n.seq, n.after_event) - n.size AS bytes_before FROM (
        SELECT thread_key, seq, after_event, coalesce(length(body), 0) AS size FROM run_events
        WHERE thread_key = ?1 AND seq >= ?2 AND seq <= ?3 AND last_event > ?4 ORDER BY seq, after_event LIMIT ?5
    ) AS n
) AS p JOIN run_events e ON e.thread_key = p.thread_key AND e.seq = p.seq AND e.after_event = p.after_event
JOIN threads t ON t.thread_key = e.thread_key JOIN runs r ON r.thread_key = e.thread_key AND r.seq = e.seq
WHERE p.bytes_before < ?6 ORDER BY e.seq, e.after_event;

-- newest_event: the number of the newest stored event, and the status of its run
SELECT e.seq, e.last_event, r.status FROM run_events e JOIN runs r ON r.thread_key = e.thread_key AND r.seq = e.seq
WHERE e.thread_key = ?1 AND e.seq >= ?2 AND e.seq <= ?3 AND e.last_event > ?4 ORDER BY e.seq DESC, e.after_event DESC LIMIT 1;

-- drop_events: delete the events of some runs of a thread up to a number
DELETE FROM run_events WHERE thread_key = ? AND seq >= ? AND seq <= ? AND last_event <= ? RETURNING 0;

-- drop_events_of_missing_run: delete the events of a run that does not exist any more
DELETE FROM run_events WHERE thread_key = ?1 AND seq = ?2 AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.thread_key = ?1 AND r.seq = ?2);

-- keep_run_seq: insert an empty batch of events, so that no other run of the thread gets this number
INSERT INTO run_events (thread_key, seq, after_event, last_event) SELECT t.thread_key, CAST(?2 AS bigint), 0, 0 FROM threads t
WHERE t.thread_key = ?1 AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.thread_key = ?1 AND r.seq = ?2) ON CONFLICT DO NOTHING;

-- stop_storing_events: store no more events of some runs of a thread
UPDATE runs SET stores_events = 0 WHERE thread_key = ? AND seq >= ? AND seq <= ? AND stores_events = 1;

-- mark_erased: mark the runs that are in progress at an erasure, so that their events, error and request are not stored
UPDATE runs SET stores_events = -1 WHERE thread_key = ? AND status = 'running';

-- aged_events: runs with stored events that ended before a time
SELECT thread_key, seq FROM runs WHERE stores_events = 1 AND updated_at < ? AND status NOT IN ('delayed', 'pending', 'running') ORDER BY updated_at LIMIT ?;

-- move_events: assign the events of a thread's runs to the thread's new key
UPDATE run_events SET thread_key = ? WHERE thread_key = ?;

-- analyze_tables: update the planner's statistics after a copy; SQLite plans these queries without statistics
SELECT 1;

-- mark_latest_kept: note that only the latest state of an expired thread is left
UPDATE threads SET ttl_since = ?, ttl_keeps_latest = 2 WHERE thread_id = ?;

-- newest_removals_of_threads: the numbers of the newest removal records of some threads, by the threads' keys
SELECT thread_key, newest_removal FROM threads WHERE thread_key IN (SELECT value FROM json_each(?) AS asked);

-- keys_of_threads_of_user: the keys of threads whose head has the index tag ?1 for its user_id or ?2 for its owner, or whose client metadata has the tag ?3 or ?4; at most ?5 keys by each tag
SELECT thread_key FROM (SELECT thread_key FROM threads WHERE user_tag = ?1 LIMIT ?5) a
UNION ALL SELECT thread_key FROM (SELECT thread_key FROM threads WHERE owner_tag = ?2 LIMIT ?5) b
UNION ALL SELECT thread_key FROM (SELECT thread_key FROM threads WHERE client_user_tag = ?3 LIMIT ?5) c
UNION ALL SELECT thread_key FROM (SELECT thread_key FROM threads WHERE client_owner_tag = ?4 LIMIT ?5) d;

-- keys_of_busy_threads: the keys of threads that are busy because of their status, or because of a pending or running run; at most ?1 keys for each reason
SELECT thread_key FROM (SELECT thread_key FROM threads WHERE status = 'busy' AND status IN ('busy', 'error') LIMIT ?1) a
UNION ALL SELECT thread_key FROM (SELECT DISTINCT thread_key FROM runs WHERE status IN ('pending', 'running') LIMIT ?1) b;

-- has_key_in_list: the condition that the key of a thread is in a JSON list
t.thread_key IN (SELECT value FROM json_each(?) AS asked);

-- count_listed_threads: the number of threads that the server lists; the caller appends conditions
SELECT count(*) FROM threads t WHERE 1 = 1;

-- matches_search_key: the condition that a thread may match a search key, which is bound twice; also true if the thread's row has no search keys
t.search_keys IS NULL OR (t.client_search_keys IS NULL AND t.client_metadata IS NOT NULL) OR instr(t.search_keys, ?) > 0 OR instr(t.client_search_keys, ?) > 0;

-- is_unindexed: the condition that the transcript index has not read all messages of a thread
t.last_seq > 0 AND NOT EXISTS (SELECT 1 FROM transcript_progress s WHERE s.thread_key = t.thread_key AND s.version_token = t.version_token);

-- reset_transcript_progress: have the transcript index read a thread again, because the thread's user may have changed
UPDATE transcript_progress SET version_token = -1 WHERE thread_key = ?;

-- count_without_ttl: the number of threads that have no time to live
SELECT count(*) FROM threads t WHERE ttl_minutes IS NULL AND (last_seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread_key = t.thread_key));
