-- Statements of the checkpointer, for SQLite. postgres.sql replaces some of them.
--
-- The keys of `checkpoints` and `items` have two parts: `namespace_key << 32 | seq` and `log_key << 32 | position`.
-- So the rows of a thread are adjacent, and a range of sequence numbers or positions is a range of keys.
--
-- keys.last_key          the last key of a thread, namespace or log that was reserved
-- threads.version_token  a number for compare-and-set, which changes with each checkpoint, move of the head and removal, but not with most pending writes
-- threads.may_wait       1 if a head of the thread may wait for an answer
-- threads.newest_removal the number of the thread's newest row in `removals`, or 0
-- removals.thread_hash   a keyed hash of the id of the thread
-- namespaces.explicit_head  the sequence number of the head if the head is not the newest checkpoint, otherwise 0
-- checkpoints.run_start  the sequence number of the checkpoint that started the run of this one

-- schema: create the tables of the checkpointer
CREATE TABLE keys (name TEXT PRIMARY KEY, last_key INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE threads (
    thread_key INTEGER PRIMARY KEY,
    thread_id TEXT NOT NULL UNIQUE,
    last_seq INTEGER NOT NULL DEFAULT 0,
    generation INTEGER NOT NULL DEFAULT 0,
    version_token INTEGER NOT NULL DEFAULT 0,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    may_wait INTEGER NOT NULL DEFAULT 0,
    status TEXT NOT NULL DEFAULT 'idle',
    list_entry BLOB,
    search_keys BLOB,
    client_metadata BLOB,
    client_search_keys BLOB,
    user_tag INTEGER,
    owner_tag INTEGER,
    client_user_tag INTEGER,
    client_owner_tag INTEGER,
    ttl_minutes REAL,
    ttl_since REAL NOT NULL DEFAULT 0,
    ttl_keeps_latest INTEGER NOT NULL DEFAULT 0,
    newest_removal INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX threads_activity ON threads (updated_at);
CREATE INDEX threads_waiting ON threads (updated_at) WHERE may_wait = 1;
CREATE INDEX threads_user ON threads (user_tag, updated_at) WHERE user_tag IS NOT NULL;
CREATE INDEX threads_owner ON threads (owner_tag, updated_at) WHERE owner_tag IS NOT NULL;
CREATE INDEX threads_client_user ON threads (client_user_tag) WHERE client_user_tag IS NOT NULL;
CREATE INDEX threads_client_owner ON threads (client_owner_tag) WHERE client_owner_tag IS NOT NULL;
CREATE INDEX threads_status ON threads (status, updated_at) WHERE status IN ('busy', 'error');
CREATE INDEX threads_expiry ON threads (updated_at + 60 * ttl_minutes) WHERE ttl_minutes IS NOT NULL;
CREATE TABLE namespaces (
    namespace_key INTEGER PRIMARY KEY,
    thread_key INTEGER NOT NULL,
    checkpoint_ns TEXT NOT NULL,
    explicit_head INTEGER NOT NULL DEFAULT 0,
    UNIQUE (thread_key, checkpoint_ns)
) STRICT;
CREATE TABLE logs (
    log_key INTEGER PRIMARY KEY,
    thread_key INTEGER NOT NULL,
    channel TEXT NOT NULL,
    UNIQUE (thread_key, channel)
) STRICT;
CREATE TABLE items (
    row_key INTEGER PRIMARY KEY,
    content_hash INTEGER NOT NULL,
    stored_at REAL NOT NULL,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX items_content_hash ON items (content_hash);
CREATE TABLE checkpoints (
    row_key INTEGER PRIMARY KEY,
    namespace_key INTEGER NOT NULL,
    checkpoint_id ANY NOT NULL,
    parent_id ANY,
    run_start INTEGER NOT NULL,
    put_at REAL NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (namespace_key, checkpoint_id)
) STRICT;
CREATE TABLE writes (
    namespace_key INTEGER NOT NULL,
    checkpoint_id ANY NOT NULL,
    task_id ANY NOT NULL,
    task_path TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (namespace_key, checkpoint_id, task_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE tags (
    tag INTEGER NOT NULL,
    checkpoint_key INTEGER NOT NULL,
    PRIMARY KEY (tag, checkpoint_key)
) STRICT, WITHOUT ROWID;
CREATE TABLE transcript_progress (
    thread_key INTEGER PRIMARY KEY,
    version_token INTEGER NOT NULL,
    position INTEGER NOT NULL,
    namespace_path BLOB NOT NULL
) STRICT;
CREATE TABLE removals (
    thread_hash BLOB NOT NULL,
    number INTEGER NOT NULL,
    removed_at REAL NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (thread_hash, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX removals_age ON removals (removed_at);

-- find_thread: a thread's key, its highest sequence number, its generation (which each deletion raises), and the number of its newest removal record
SELECT thread_key, last_seq, generation, newest_removal FROM threads WHERE thread_id = ?;

-- read_write_state: a thread, one of its namespaces, the key of its head, and the key of the checkpoint ?1 if it exists; read before a write
SELECT s.*, (SELECT c.row_key FROM checkpoints c WHERE c.checkpoint_id = ?1 AND c.namespace_key = s.namespace_key)
FROM (
    SELECT t.thread_key, t.last_seq, t.generation, t.version_token, t.updated_at, n.namespace_key, n.explicit_head, CASE n.explicit_head
    WHEN 0 THEN (SELECT max(row_key) FROM checkpoints WHERE row_key >= n.namespace_key << 32 AND row_key < (n.namespace_key + 1) << 32)
    ELSE (n.namespace_key << 32) + n.explicit_head END AS head, t.list_entry, t.newest_removal
    FROM threads t LEFT JOIN namespaces n ON n.thread_key = t.thread_key AND n.checkpoint_ns = ?2 WHERE t.thread_id = ?3 LIMIT 1
) s;

-- allocate_keys: reserve ?1 keys that no row has, and return the last of them; existing rows may have higher keys than the counter if a commit of the counter was lost; SQLite reads only the last row of a table if max is a subquery of its own, and otherwise all rows
INSERT INTO keys (name, last_key) SELECT '', max(last_key) + ?1 FROM (
    SELECT 0 AS last_key UNION ALL SELECT (SELECT max(thread_key) FROM threads)
    UNION ALL SELECT (SELECT max(namespace_key) FROM namespaces) UNION ALL SELECT (SELECT max(log_key) FROM logs)
) AS used WHERE true
ON CONFLICT ({tenant}name) DO UPDATE
SET last_key = CASE WHEN excluded.last_key > keys.last_key + ?1 THEN excluded.last_key ELSE keys.last_key + ?1 END RETURNING last_key;

-- new_thread: insert a thread, unless it exists or its id has a newer removal record than ?7; a new thread has no pending writes
INSERT INTO threads (thread_key, thread_id, last_seq, version_token, created_at, updated_at, newest_removal) SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7
WHERE NOT EXISTS (SELECT 1 FROM removals r WHERE r.thread_hash = ?8 AND r.number > ?7) RETURNING 0;

-- advance_thread: set the thread's last sequence number and version token, if the token is unchanged and the checkpoint ?6 is not stored; return whether the checkpoint has pending writes, which may contain an interrupt
UPDATE threads SET last_seq = ?1, version_token = ?2, may_wait = CASE WHEN ?7 = 0 THEN EXISTS (SELECT 1 FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?6) ELSE may_wait END
WHERE thread_key = ?3 AND version_token = ?4
AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE namespace_key = ?5 AND checkpoint_id = ?6)
RETURNING EXISTS (SELECT 1 FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?6);

-- advance_active_thread: advance_thread, with the time of the last activity; separate, so that most puts do not write the index of this time
UPDATE threads SET last_seq = ?1, version_token = ?2, may_wait = CASE WHEN ?7 = 0 THEN EXISTS (SELECT 1 FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?6) ELSE may_wait END,
updated_at = max(updated_at, ?8) WHERE thread_key = ?3 AND version_token = ?4
AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE namespace_key = ?5 AND checkpoint_id = ?6)
RETURNING EXISTS (SELECT 1 FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?6);

-- advance_replayed_thread: advance_active_thread, if the pending writes of the parent ?9 still have ?10 rows and bytes in total, as when they were read
UPDATE threads SET last_seq = ?1, version_token = ?2, may_wait = CASE WHEN ?7 = 0 THEN EXISTS (SELECT 1 FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?6) ELSE may_wait END,
updated_at = max(updated_at, ?8) WHERE thread_key = ?3 AND version_token = ?4
AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE namespace_key = ?5 AND checkpoint_id = ?6)
AND (SELECT coalesce(sum(1 + length(body)), 0) FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?9) = ?10
RETURNING EXISTS (SELECT 1 FROM writes WHERE namespace_key = ?5 AND checkpoint_id = ?6);

-- advance_into_namespace: set the thread's last sequence number, version token and activity, if the token is unchanged and the namespace ?5 does not exist
UPDATE threads SET last_seq = ?1, version_token = ?2, updated_at = max(updated_at, ?6) WHERE thread_key = ?3 AND version_token = ?4
AND NOT EXISTS (SELECT 1 FROM namespaces n WHERE n.thread_key = ?3 AND n.checkpoint_ns = ?5) RETURNING 0;

-- mark_head_changed: change the version token, so that every process reads the head of the thread again
UPDATE threads SET version_token = version_token + 1, may_wait = 1 WHERE thread_key = ?;

-- mark_may_wait: note that a task of the thread has asked a question
UPDATE threads SET may_wait = 1 WHERE thread_key = ? AND may_wait = 0;

-- set_list_entry: store a thread's title and metadata as lists show them, the keys by which searches find the thread, and the index tags of user_id and owner
UPDATE threads SET list_entry = ?, search_keys = ?, user_tag = ?, owner_tag = ? WHERE thread_key = ?;

-- set_list_entry_without_user: like set_list_entry, without changing the index tags of the user; used if the metadata of the head is unknown or the thread has no head
UPDATE threads SET list_entry = ?, search_keys = ? WHERE thread_key = ?;

-- find_client_metadata: the status, last sequence number and client metadata of a thread, and whether it may wait for an answer
SELECT status, last_seq, client_metadata, may_wait FROM threads WHERE thread_id = ?;

-- lock_client_metadata: the client metadata of a thread that this transaction will change
SELECT thread_key, status, last_seq, client_metadata FROM threads WHERE thread_id = ?;

-- set_client_metadata: store the client metadata of a thread, the keys by which searches find it, and the index tags of the user_id and owner in the metadata
UPDATE threads SET client_metadata = ?, client_search_keys = ?, client_user_tag = ?, client_owner_tag = ? WHERE thread_key = ?;

-- find_ttl: the time to live of a thread, with the columns that set_columns_of_copied_thread stores; no row if the thread has none
SELECT ttl_minutes, ttl_since, ttl_keeps_latest FROM threads WHERE thread_id = ? AND ttl_minutes IS NOT NULL;

-- set_columns_of_copied_thread: store the columns that a new copy of a thread inherits from its original, except for the list entry; see mark_may_wait; ttl_keeps_latest is 0 to delete an expired thread, 1 to keep its latest state, 2 if only that state is left
UPDATE threads SET status = ?, may_wait = ?, ttl_minutes = ?, ttl_since = ?, ttl_keeps_latest = ? WHERE thread_key = ?;

-- touch_thread: set the time of the last activity; separate, so that most puts do not write the index of this time
UPDATE threads SET updated_at = ?1 WHERE thread_key = ?2 AND updated_at < ?1;

-- new_namespace: insert a namespace for its first checkpoint
INSERT INTO namespaces (namespace_key, thread_key, checkpoint_ns) VALUES (?, ?, ?);

-- set_explicit_head: set the sequence number of the checkpoint from which the next run starts; 0 means the newest checkpoint
UPDATE namespaces SET explicit_head = ? WHERE namespace_key = ?;

-- thread_namespaces: all namespaces of a thread, with the sequence number of each head
SELECT n.namespace_key, n.checkpoint_ns, coalesce(CASE n.explicit_head WHEN 0 THEN (SELECT max(row_key) FROM checkpoints WHERE row_key >= n.namespace_key << 32 AND row_key < (n.namespace_key + 1) << 32)
ELSE (n.namespace_key << 32) + n.explicit_head END, 0) & 4294967295
FROM namespaces n WHERE n.thread_key = ? ORDER BY n.namespace_key;

-- find_log: the log of a channel in the thread of a namespace
SELECT l.log_key FROM logs l JOIN namespaces n ON n.thread_key = l.thread_key WHERE n.namespace_key = ? AND l.channel = ?;

-- find_log_channel: the channel to which a log belongs
SELECT channel FROM logs WHERE log_key = ?;

-- new_log: insert a log for the first item of a channel
INSERT INTO logs (log_key, thread_key, channel) VALUES (?, ?, ?);

-- thread_logs: all logs of a thread, each with the keys of its last item and its last alias
SELECT log_key, channel,
(SELECT max(row_key) FROM items WHERE row_key >= log_key << 32 AND row_key < (log_key << 32) + 2147483648),
(SELECT max(row_key) FROM items WHERE row_key >= (log_key << 32) + 2147483648 AND row_key < (log_key + 1) << 32)
FROM logs WHERE thread_key = ? ORDER BY log_key;

-- items_with_hashes: items whose content has one of these hashes, which may be equal to new items
SELECT row_key, body FROM items WHERE content_hash IN (SELECT value FROM json_each(?) AS asked);

-- add_item: insert an item, with its position and the time of the checkpoint that added it
INSERT INTO items (row_key, content_hash, stored_at, body) VALUES (?, ?, ?, ?);

-- item_times: the time at which each item in a range of a log was first stored
SELECT row_key, stored_at FROM items WHERE row_key >= ? AND row_key < ?;

-- items_between: all items in a range of a log
SELECT row_key, body FROM items WHERE row_key >= ? AND row_key < ? ORDER BY row_key;

-- items_page: the first items in a range of a log, which may have gaps
SELECT row_key, body FROM items WHERE row_key >= ? AND row_key < ? ORDER BY row_key LIMIT ?;

-- count_items: the number of items in a range of a log, and their bytes
SELECT count(*), coalesce(sum(length(body)), 0) FROM items WHERE row_key >= ? AND row_key < ?;

-- drop_items: delete items to which nothing refers
DELETE FROM items WHERE row_key >= ? AND row_key < ?;

-- find_checkpoint: one checkpoint of a namespace, by its id
SELECT row_key, checkpoint_id, parent_id, run_start, put_at, body FROM checkpoints WHERE namespace_key = ? AND checkpoint_id = ?;

-- find_checkpoint_id: the id of a checkpoint, by its row key
SELECT checkpoint_id FROM checkpoints WHERE row_key = ?;

-- checkpoint_row: one checkpoint, by its row key
SELECT row_key, checkpoint_id, parent_id, run_start, put_at, body FROM checkpoints WHERE row_key = ?;

-- head_with_keys: the head of a namespace, with the keys of its thread and namespace
SELECT t.thread_key, t.generation, t.newest_removal, n.namespace_key, c.row_key, c.checkpoint_id, c.parent_id, c.run_start, c.put_at, c.body
FROM threads t JOIN namespaces n ON n.thread_key = t.thread_key JOIN checkpoints c
ON c.row_key = CASE n.explicit_head WHEN 0 THEN (SELECT max(row_key) FROM checkpoints WHERE row_key >= n.namespace_key << 32 AND row_key < (n.namespace_key + 1) << 32)
ELSE (n.namespace_key << 32) + n.explicit_head END
WHERE t.thread_id = ? AND n.checkpoint_ns = ?;

-- checkpoint_with_keys: one checkpoint, by its id, with the keys of its thread and namespace
SELECT t.thread_key, t.generation, t.newest_removal, n.namespace_key, c.row_key, c.checkpoint_id, c.parent_id, c.run_start, c.put_at, c.body
FROM threads t JOIN namespaces n ON n.thread_key = t.thread_key JOIN checkpoints c ON c.namespace_key = n.namespace_key AND c.checkpoint_id = ?
WHERE t.thread_id = ? AND n.checkpoint_ns = ?;

-- checkpoint_row_with_keys: one checkpoint, by its row key, with the keys of its thread and namespace
SELECT t.thread_key, t.generation, t.newest_removal, n.namespace_key, c.row_key, c.checkpoint_id, c.parent_id, c.run_start, c.put_at, c.body
FROM (SELECT row_key, row_key >> 32 AS namespace_key, checkpoint_id, parent_id, run_start, put_at, body FROM checkpoints WHERE row_key = ?2 LIMIT 1) c
LEFT JOIN namespaces n ON n.namespace_key = c.namespace_key LEFT JOIN threads t ON t.thread_key = n.thread_key AND t.thread_id = ?1;

-- damaged_index_entries: index entries next to a missing thread, namespace or checkpoint that differ from their rows; they show that an index is damaged
WITH found (thread_key, namespace_key) AS (
    SELECT t.thread_key, n.namespace_key FROM threads t LEFT JOIN namespaces n ON n.thread_key = t.thread_key AND n.checkpoint_ns = ?2 WHERE t.thread_id = ?1
), beside_thread AS (
    SELECT * FROM (SELECT thread_key, thread_id FROM threads WHERE thread_id < ?1 ORDER BY thread_id DESC LIMIT 1)
    UNION ALL SELECT * FROM (SELECT thread_key, thread_id FROM threads WHERE thread_id > ?1 ORDER BY thread_id LIMIT 1)
), beside_namespace AS (
    SELECT * FROM (SELECT namespace_key, thread_key, checkpoint_ns FROM namespaces WHERE (thread_key, checkpoint_ns) < ((SELECT thread_key FROM found), ?2) ORDER BY thread_key DESC, checkpoint_ns DESC LIMIT 1)
    UNION ALL SELECT * FROM (SELECT namespace_key, thread_key, checkpoint_ns FROM namespaces WHERE (thread_key, checkpoint_ns) > ((SELECT thread_key FROM found), ?2) ORDER BY thread_key, checkpoint_ns LIMIT 1)
), beside_checkpoint AS (
    SELECT * FROM (SELECT row_key, namespace_key, checkpoint_id FROM checkpoints WHERE (namespace_key, checkpoint_id) < ((SELECT namespace_key FROM found), ?3) ORDER BY namespace_key DESC, checkpoint_id DESC LIMIT 1)
    UNION ALL SELECT * FROM (SELECT row_key, namespace_key, checkpoint_id FROM checkpoints WHERE (namespace_key, checkpoint_id) > ((SELECT namespace_key FROM found), ?3) ORDER BY namespace_key, checkpoint_id LIMIT 1)
)
SELECT 'the row with thread_key = ' || i.thread_key || ' in the table ''threads''' FROM beside_thread i LEFT JOIN threads r ON r.thread_key = i.thread_key WHERE r.thread_id IS NOT i.thread_id
UNION ALL SELECT 'the row with namespace_key = ' || i.namespace_key || ' in the table ''namespaces''' FROM beside_namespace i LEFT JOIN namespaces r ON r.namespace_key = i.namespace_key
WHERE (r.thread_key, r.checkpoint_ns) IS NOT (i.thread_key, i.checkpoint_ns)
UNION ALL SELECT 'the row with row_key = ' || i.row_key || ' in the table ''checkpoints''' FROM beside_checkpoint i LEFT JOIN checkpoints r ON r.row_key = i.row_key
WHERE (r.namespace_key, r.checkpoint_id) IS NOT (i.namespace_key, i.checkpoint_id)
UNION ALL SELECT 'the newest checkpoint with namespace_key = ' || n.namespace_key FROM found f JOIN namespaces n ON n.namespace_key = f.namespace_key
WHERE CASE n.explicit_head WHEN 0 THEN ?3 IS NULL AND EXISTS (SELECT 1 FROM checkpoints c WHERE c.namespace_key = n.namespace_key)
ELSE NOT EXISTS (SELECT 1 FROM checkpoints c WHERE c.row_key = (n.namespace_key << 32) + n.explicit_head) END;

-- add_checkpoint: insert a checkpoint
INSERT INTO checkpoints (row_key, namespace_key, checkpoint_id, parent_id, run_start, put_at, body) VALUES (?, ?, ?, ?, ?, ?, ?);

-- replace_checkpoint: replace the content of a checkpoint that is put again
UPDATE checkpoints SET parent_id = ?, put_at = ?, body = ? WHERE row_key = ?;

-- checkpoints_page: one page of a namespace's checkpoints, newest first
SELECT row_key, checkpoint_id, parent_id, run_start, put_at, body FROM checkpoints WHERE row_key >= ? AND row_key < ? ORDER BY row_key DESC LIMIT ?;

-- rewrite_checkpoint: replace the body of a checkpoint whose references changed
UPDATE checkpoints SET body = ? WHERE row_key = ?;

-- checkpoint_keys: the row keys and ids of a namespace's checkpoints, newest first
SELECT row_key, checkpoint_id, parent_id FROM checkpoints WHERE row_key >= ? AND row_key < ? ORDER BY row_key DESC;

-- indexed_checkpoints: the number of checkpoints that the index of ids has in a range of keys of a namespace
SELECT count(*) FROM checkpoints WHERE namespace_key = ? AND row_key >= ? AND row_key < ?;

-- drop_checkpoint: delete one checkpoint
DELETE FROM checkpoints WHERE row_key = ?;

-- find_writes: the pending writes that a task has stored
SELECT task_path, body FROM writes WHERE namespace_key = ? AND checkpoint_id = ? AND task_id = ?;

-- new_writes: insert the pending writes of a task that has stored none, if its namespace exists and nothing was removed from the thread or lost by the database
INSERT INTO writes (namespace_key, checkpoint_id, task_id, task_path, body) SELECT ?1, ?2, ?3, ?4, ?5
WHERE EXISTS (SELECT 1 FROM threads WHERE thread_key = ?6 AND generation = ?7)
AND EXISTS (SELECT 1 FROM namespaces WHERE namespace_key = ?1 AND thread_key = ?6)
AND (?8 = 0 OR EXISTS (SELECT 1 FROM checkpoints WHERE row_key = ?8 AND checkpoint_id = ?9));

-- new_writes_at_head: new_writes for a task that was interrupted or has failed, if its checkpoint is the head
INSERT INTO writes (namespace_key, checkpoint_id, task_id, task_path, body) SELECT ?1, ?2, ?3, ?4, ?5
WHERE EXISTS (SELECT 1 FROM threads WHERE thread_key = ?6 AND generation = ?7)
AND EXISTS (SELECT 1 FROM namespaces n WHERE n.namespace_key = ?1 AND n.thread_key = ?6 AND ?10 = CASE n.explicit_head
WHEN 0 THEN (SELECT max(row_key) FROM checkpoints WHERE row_key >= ?1 << 32 AND row_key < (?1 + 1) << 32) ELSE (?1 << 32) + n.explicit_head END)
AND (?8 = 0 OR EXISTS (SELECT 1 FROM checkpoints WHERE row_key = ?8 AND checkpoint_id = ?9));

-- put_writes: insert or replace the pending writes of a task
INSERT INTO writes (namespace_key, checkpoint_id, task_id, task_path, body) VALUES (?, ?, ?, ?, ?)
ON CONFLICT ({tenant}namespace_key, checkpoint_id, task_id) DO UPDATE SET task_path = excluded.task_path, body = excluded.body;

-- replace_unchanged_writes: replace the pending writes of a task by references to items, unless the task has written more in the meantime
UPDATE writes SET body = ? WHERE namespace_key = ? AND checkpoint_id = ? AND task_id = ? AND body = ?;

-- checkpoint_writes: the pending writes of a checkpoint; also the rows before and after them in the index, with their thread and namespace, to detect a damaged index
SELECT NULL, NULL, checkpoint_id, task_id, task_path, body FROM writes WHERE namespace_key = ?1 AND checkpoint_id = ?2
UNION ALL SELECT coalesce(t.thread_id, ''), n.checkpoint_ns, w.checkpoint_id, w.task_id, w.task_path, w.body FROM (
    SELECT * FROM (SELECT * FROM writes WHERE (namespace_key, checkpoint_id) < (?1, ?2) ORDER BY namespace_key DESC, checkpoint_id DESC, task_id DESC LIMIT 1)
    UNION ALL SELECT * FROM (SELECT * FROM writes WHERE (namespace_key, checkpoint_id) > (?1, ?2) ORDER BY namespace_key, checkpoint_id, task_id LIMIT 1)
) w LEFT JOIN namespaces n ON n.namespace_key = w.namespace_key LEFT JOIN threads t ON t.thread_key = n.thread_key;

-- namespace_writes: the pending writes of a namespace
SELECT checkpoint_id, task_id, task_path, body FROM writes WHERE namespace_key = ?;

-- size_of_writes: the bytes of the pending writes of a checkpoint
SELECT coalesce(sum(length(body)), 0) FROM writes WHERE namespace_key = ? AND checkpoint_id = ?;

-- drop_writes: delete the pending writes of a checkpoint
DELETE FROM writes WHERE namespace_key = ? AND checkpoint_id = ?;

-- drop_task_writes: delete the pending writes of one task of a checkpoint
DELETE FROM writes WHERE namespace_key = ? AND checkpoint_id = ? AND task_id = ?;

-- add_tag: index a checkpoint by one of its metadata values
INSERT INTO tags (tag, checkpoint_key) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- drop_tag: remove one metadata value of a checkpoint from the index
DELETE FROM tags WHERE tag = ? AND checkpoint_key = ?;

-- drop_tags: remove a checkpoint whose metadata cannot be read from the index of metadata values
DELETE FROM tags WHERE checkpoint_key = ?;

-- tagged_checkpoints: one page of the checkpoints with a metadata value, with their threads and namespaces
SELECT t.thread_id, n.checkpoint_ns, g.checkpoint_key, c.checkpoint_id, c.parent_id, c.run_start, c.put_at, c.body FROM (
    SELECT checkpoint_key, checkpoint_key >> 32 AS namespace_key FROM tags WHERE tag = ? AND checkpoint_key > ? ORDER BY checkpoint_key LIMIT ?
) g LEFT JOIN checkpoints c ON c.row_key = g.checkpoint_key LEFT JOIN namespaces n ON n.namespace_key = g.namespace_key LEFT JOIN threads t ON t.thread_key = n.thread_key
ORDER BY g.checkpoint_key;

-- tagged_checkpoints_page: one page of a namespace's checkpoints with a metadata value, newest first
SELECT g.checkpoint_key, c.checkpoint_id, c.parent_id, c.run_start, c.put_at, c.body FROM tags g LEFT JOIN checkpoints c ON c.row_key = g.checkpoint_key
WHERE g.tag = ? AND g.checkpoint_key >= ? AND g.checkpoint_key < ? ORDER BY g.checkpoint_key DESC LIMIT ?;

-- neighbouring_tags: the index entries before and after those of a metadata value in a range of checkpoints
SELECT EXISTS (SELECT 1 FROM tags o WHERE o.tag = ?1 AND o.checkpoint_key = g.checkpoint_key), t.thread_id, n.checkpoint_ns, g.checkpoint_key, c.checkpoint_id, c.parent_id, c.run_start, c.put_at, c.body FROM (
    SELECT * FROM (SELECT tag, checkpoint_key FROM tags WHERE (tag, checkpoint_key) < (?1, ?2) ORDER BY tag DESC, checkpoint_key DESC LIMIT 1)
    UNION ALL SELECT * FROM (SELECT tag, checkpoint_key FROM tags WHERE (tag, checkpoint_key) >= (?1, ?3) ORDER BY tag, checkpoint_key LIMIT 1)
) g LEFT JOIN checkpoints c ON c.row_key = g.checkpoint_key LEFT JOIN namespaces n ON n.namespace_key = g.checkpoint_key >> 32 LEFT JOIN threads t ON t.thread_key = n.thread_key;

-- mark_rows_removed: raise the generation and change the version token, so that every process drops its cache of the thread
UPDATE threads SET generation = generation + 1, version_token = version_token + 1, may_wait = 1 WHERE thread_key = ?;

-- note_removal: store the number of the newest removal record, and invalidate the caches of all processes
UPDATE threads SET newest_removal = ?, generation = generation + 1, version_token = version_token + 1, may_wait = 1 WHERE thread_key = ?;

-- removal_key: the key of the hashes in removal records
SELECT value FROM settings WHERE name = 'removals';

-- add_removal_key: insert the key of the hashes in removal records, unless it exists
INSERT INTO settings (name, value) VALUES ('removals', ?) ON CONFLICT DO NOTHING;

-- set_removal_key: replace the key of the hashes by the key of the database whose removal records were copied
UPDATE settings SET value = ? WHERE name = 'removals';

-- add_removal: insert a record of an erasure from a thread, or of the deletion of a thread
INSERT INTO removals (thread_hash, number, removed_at, body) VALUES (?, ?, ?, ?);

-- set_removal: replace the content of a removal record
UPDATE removals SET body = ? WHERE thread_hash = ? AND number = ?;

-- last_removal: the number of the newest removal record of a thread id
SELECT max(number) FROM removals WHERE thread_hash = ?;

-- removals_since: the removal records of a thread with a higher number
SELECT number, body FROM removals WHERE thread_hash = ? AND number > ? ORDER BY number;

-- drop_removals: delete the removal records that are older than a time
DELETE FROM removals WHERE removed_at < ?;

-- drop_namespace_checkpoints: delete all checkpoints of a namespace
DELETE FROM checkpoints WHERE row_key >= ? AND row_key < ?;

-- drop_namespace_writes: delete all pending writes of a namespace
DELETE FROM writes WHERE namespace_key = ?;

-- drop_namespaces: delete the namespaces of a thread
DELETE FROM namespaces WHERE thread_key = ?;

-- drop_logs: delete the logs of a thread
DELETE FROM logs WHERE thread_key = ?;

-- drop_thread: delete the row of a thread
DELETE FROM threads WHERE thread_key = ?;

-- list_threads: one page of the threads that fulfil a condition, latest activity first; the caller replaces {condition}, and {activity} with t.updated_at or with an expression that has the same value but is not indexed
SELECT thread_key, thread_id, created_at, updated_at, (SELECT i.thread_key FROM threads i WHERE i.thread_id = t.thread_id), list_entry FROM threads t
WHERE ({activity}, thread_key) < (?1, ?2) AND {activity} >= ?5 AND substr(CAST(thread_id AS BLOB), 1, length(?3)) = ?3
AND {condition} ORDER BY {activity} DESC, t.thread_key DESC LIMIT ?4;

-- is_started: the condition that a checkpoint or a pending write was stored in a thread
(last_seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread_key = t.thread_key));

-- may_wait: the condition that a thread may wait for an answer
t.may_wait = 1;

-- has_user_tag: the condition that the user_id in the metadata of a thread's head has the index tag ?6
t.user_tag = ?6;

-- has_owner_tag: the condition that the owner in the metadata of a thread's head has the index tag ?6
t.owner_tag = ?6;

-- has_key: the condition that the key of a thread is in the JSON list ?6
t.thread_key IN (SELECT value FROM json_each(?6) AS asked);

-- keys_of_tagged_threads: the thread of each checkpoint with the index tag ?1, at most ?2 checkpoints
SELECT (SELECT n.thread_key FROM namespaces n WHERE n.namespace_key = g.checkpoint_key >> 32) FROM tags g WHERE g.tag = ?1 LIMIT ?2;

-- keys_of_threads_in_id_range: the keys of at most ?3 threads whose ids are at least ?1 and less than ?2
SELECT thread_key FROM threads WHERE thread_id >= ?1 AND thread_id < ?2 LIMIT ?3;

-- has_tag: the condition that the metadata of a thread's head has the value ?6
EXISTS (
    SELECT 1 FROM namespaces n JOIN tags g ON g.tag = ?6 AND g.checkpoint_key = CASE n.explicit_head
    WHEN 0 THEN (SELECT max(row_key) FROM checkpoints WHERE row_key >= n.namespace_key << 32 AND row_key < (n.namespace_key + 1) << 32)
    ELSE (n.namespace_key << 32) + n.explicit_head END
    WHERE n.thread_key = t.thread_key AND n.checkpoint_ns = ''
);

-- transcript_progress_of: the progress of the transcript index in a thread, and the store namespace that holds the thread's messages
SELECT t.thread_key, t.version_token, t.generation, s.position, s.namespace_path FROM threads t LEFT JOIN transcript_progress s ON s.thread_key = t.thread_key WHERE t.thread_id = ?;

-- set_transcript_progress: store the progress of the transcript index in a thread
INSERT INTO transcript_progress (thread_key, version_token, position, namespace_path) VALUES (?, ?, ?, ?)
ON CONFLICT ({tenant}thread_key) DO UPDATE SET version_token = excluded.version_token, position = excluded.position, namespace_path = excluded.namespace_path;

-- some_indexed_threads: some of the threads that the transcript index has read
SELECT thread_key FROM transcript_progress LIMIT ?;

-- drop_transcript_progress: delete the progress of the transcript index in a thread
DELETE FROM transcript_progress WHERE thread_key = ? RETURNING namespace_path;

-- drop_transcript_items: delete the indexed messages of a thread; these tables have the form of a store's tables and exist if anything was indexed
DELETE FROM transcript_items
WHERE namespace_key = (SELECT namespace_key FROM transcript_namespaces WHERE path = ?) AND key >= ? AND key < ? RETURNING size;

-- reduce_transcript_counts: subtract the deleted messages and bytes from the counts of a namespace, and count the change
UPDATE transcript_namespaces
SET item_count = item_count - ?, byte_count = byte_count - ?, change_count = change_count + 1 WHERE path = ?;

-- drop_transcript_index: delete the compact search index of a namespace, because it contains words of deleted messages
DELETE FROM transcript_search_indexes
WHERE namespace_key = (SELECT namespace_key FROM transcript_namespaces WHERE path = ?);

-- drop_transcript_namespace: delete a namespace that has no indexed messages left
DELETE FROM transcript_namespaces WHERE path = ? AND item_count = 0;

-- count_transcript_erasure: count an erasure, so that every process drops its search index of the transcripts
INSERT INTO transcript_settings (name, value) VALUES ('erasures', 1)
ON CONFLICT ({tenant}name) DO UPDATE SET value = transcript_settings.value + 1;

-- one_thread: one thread, with the columns of list_threads
SELECT thread_key, thread_id, created_at, updated_at, (SELECT i.thread_key FROM threads i WHERE i.thread_id = t.thread_id), list_entry FROM threads t WHERE thread_id = ?
AND (last_seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread_key = t.thread_key));

-- head_ids: one page of threads, latest activity first, with the ids of the heads of their root namespaces
SELECT s.thread_key, s.thread_id, s.updated_at, c.checkpoint_id, s.list_entry FROM (
    SELECT t.thread_key, t.thread_id, t.updated_at, t.list_entry, (SELECT CASE n.explicit_head
    WHEN 0 THEN (SELECT max(row_key) FROM checkpoints WHERE row_key >= n.namespace_key << 32 AND row_key < (n.namespace_key + 1) << 32)
    ELSE (n.namespace_key << 32) + n.explicit_head END FROM namespaces n WHERE n.thread_key = t.thread_key AND n.checkpoint_ns = '') AS head
    FROM threads t WHERE (t.updated_at, t.thread_key) < (?1, ?2) AND t.updated_at >= ?3
    ORDER BY t.updated_at DESC, t.thread_key DESC LIMIT ?4
) s LEFT JOIN checkpoints c ON c.row_key = s.head ORDER BY s.updated_at DESC, s.thread_key DESC;

-- root_heads: the heads of the root namespaces of some threads
SELECT n.thread_key, c.row_key, c.checkpoint_id, c.parent_id, c.run_start, c.put_at, c.body FROM namespaces n JOIN checkpoints c ON c.row_key = CASE n.explicit_head
WHEN 0 THEN (SELECT max(row_key) FROM checkpoints WHERE row_key >= n.namespace_key << 32 AND row_key < (n.namespace_key + 1) << 32)
ELSE (n.namespace_key << 32) + n.explicit_head END
WHERE n.checkpoint_ns = '' AND n.thread_key IN (SELECT value FROM json_each(?1) AS asked);

-- root_writes: the pending writes at the heads of some threads
SELECT n.thread_key, w.checkpoint_id, w.task_id, w.task_path, w.body FROM namespaces n JOIN checkpoints c ON c.row_key = CASE n.explicit_head
WHEN 0 THEN (SELECT max(row_key) FROM checkpoints WHERE row_key >= n.namespace_key << 32 AND row_key < (n.namespace_key + 1) << 32)
ELSE (n.namespace_key << 32) + n.explicit_head END JOIN writes w ON w.namespace_key = n.namespace_key AND w.checkpoint_id = c.checkpoint_id
WHERE n.checkpoint_ns = '' AND n.thread_key IN (SELECT value FROM json_each(?1) AS asked) ORDER BY w.task_path, w.task_id;

-- neighbouring_thread_ids: the thread ids before and after one in order
SELECT (SELECT max(thread_id) FROM threads WHERE thread_id < ?1), (SELECT min(thread_id) FROM threads WHERE thread_id > ?1);

-- thread_sizes: the number of checkpoints and of items (without aliases) of a thread, and the bytes of its checkpoints, items and pending writes
SELECT c.row_count, i.row_count, c.bytes + i.bytes + w.bytes FROM (
    SELECT count(*) AS row_count, coalesce(sum(length(c.body)), 0) AS bytes FROM (SELECT DISTINCT namespace_key << 32 AS low, (namespace_key + 1) << 32 AS high FROM namespaces WHERE thread_key = ?1) n
    JOIN checkpoints c ON c.row_key >= n.low AND c.row_key < n.high
) c, (
    SELECT count(i.row_key) FILTER (WHERE i.row_key & 2147483648 = 0) AS row_count, coalesce(sum(length(i.body)), 0) AS bytes FROM (SELECT DISTINCT log_key << 32 AS low, (log_key + 1) << 32 AS high FROM logs WHERE thread_key = ?1) l
    JOIN items i ON i.row_key >= l.low AND i.row_key < l.high
) i, (
    SELECT coalesce(sum(length(w.body)), 0) AS bytes FROM namespaces n
    JOIN writes w ON w.namespace_key = n.namespace_key WHERE n.thread_key = ?1
) w;

-- largest_threads: the threads with the most bytes of checkpoints, items and pending writes, with the columns of list_threads
SELECT t.thread_key, t.thread_id, t.created_at, t.updated_at, t.thread_key, t.list_entry FROM threads t JOIN (
    SELECT thread_key, sum(bytes) AS bytes FROM (
        SELECT n.thread_key, length(c.body) AS bytes FROM checkpoints c JOIN namespaces n ON n.namespace_key = c.row_key >> 32
        UNION ALL SELECT l.thread_key, length(i.body) FROM items i JOIN logs l ON l.log_key = i.row_key >> 32
        UNION ALL SELECT n.thread_key, length(w.body) FROM writes w JOIN namespaces n ON n.namespace_key = w.namespace_key
    ) parts GROUP BY thread_key
) s ON s.thread_key = t.thread_key ORDER BY s.bytes DESC, t.thread_key DESC LIMIT ?;

-- count_threads_by_day: the number of threads that were created on each day, in days since 1970
SELECT CAST(created_at / 86400 AS bigint), count(*) FROM threads t
WHERE last_seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread_key = t.thread_key) GROUP BY 1 ORDER BY 1;

-- thread_ids: one page of all threads, in the order of their creation
SELECT thread_key, thread_id, (SELECT i.thread_key FROM threads i WHERE i.thread_id = t.thread_id) FROM threads t WHERE t.thread_key > ? ORDER BY t.thread_key LIMIT ?;

-- totals: the number of threads, checkpoints and items in the database, and the bytes of checkpoints, items and pending writes
SELECT (SELECT count(*) FROM threads t WHERE last_seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread_key = t.thread_key)),
c.row_count, i.row_count, c.bytes + i.bytes + w.bytes
FROM (SELECT count(*) AS row_count, coalesce(sum(length(body)), 0) AS bytes FROM checkpoints) c,
(SELECT count(*) FILTER (WHERE content_hash <> 0) AS row_count, coalesce(sum(length(body)), 0) AS bytes FROM items) i,
(SELECT coalesce(sum(length(body)), 0) AS bytes FROM writes) w;

-- raise_keys_after_copy: raise the key counter above the keys of the rows that were copied
INSERT INTO keys (name, last_key) SELECT '', max(last_key) FROM (
    SELECT 0 AS last_key UNION ALL SELECT (SELECT max(thread_key) FROM threads)
    UNION ALL SELECT (SELECT max(namespace_key) FROM namespaces) UNION ALL SELECT (SELECT max(log_key) FROM logs)
) AS used WHERE true
ON CONFLICT ({tenant}name) DO UPDATE SET last_key = CASE WHEN excluded.last_key > keys.last_key THEN excluded.last_key ELSE keys.last_key END;

-- analyze_tables: update the planner's statistics after a copy; SQLite plans these queries without statistics
SELECT 1;
