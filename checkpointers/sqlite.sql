-- Keys of `checkpoints` and `items` are composed: `namespace << 32 | seq` and `log << 32 | position`,
-- so a thread's rows lie together, and a range of them is a range of keys.

-- schema: the tables; `keys` has the last key of a thread, namespace or log that was given out; `waiting` is 1 if a head may wait for an answer; of an assistant the latest version is the one with `since`; `removals` of a thread is the number of its newest row in the table `removals`, whose `thread` is a keyed hash of the thread's id
CREATE TABLE keys (name TEXT PRIMARY KEY, last INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE threads (
    thread INTEGER PRIMARY KEY,
    thread_id TEXT NOT NULL UNIQUE,
    seq INTEGER NOT NULL DEFAULT 0,
    generation INTEGER NOT NULL DEFAULT 0,
    stamp INTEGER NOT NULL DEFAULT 0,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    waiting INTEGER NOT NULL DEFAULT 0,
    status TEXT NOT NULL DEFAULT 'idle',
    title BLOB,
    found BLOB,
    client BLOB,
    client_found BLOB,
    ttl REAL,
    ttl_since REAL NOT NULL DEFAULT 0,
    ttl_keeps INTEGER NOT NULL DEFAULT 0,
    removals INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX threads_activity ON threads (updated_at);
CREATE INDEX threads_waiting ON threads (updated_at) WHERE waiting = 1;
CREATE INDEX threads_expiry ON threads (updated_at + 60 * ttl) WHERE ttl IS NOT NULL;
CREATE TABLE namespaces (
    namespace INTEGER PRIMARY KEY,
    thread INTEGER NOT NULL,
    ns TEXT NOT NULL,
    pinned INTEGER NOT NULL DEFAULT 0,
    UNIQUE (thread, ns)
) STRICT;
CREATE TABLE logs (
    log INTEGER PRIMARY KEY,
    thread INTEGER NOT NULL,
    name TEXT NOT NULL,
    UNIQUE (thread, name)
) STRICT;
CREATE TABLE items (
    id INTEGER PRIMARY KEY,
    h INTEGER NOT NULL,
    stored_at REAL NOT NULL,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX items_h ON items (h);
CREATE TABLE checkpoints (
    id INTEGER PRIMARY KEY,
    namespace INTEGER NOT NULL,
    uid ANY NOT NULL,
    parent ANY,
    began INTEGER NOT NULL,
    put_at REAL NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (namespace, uid)
) STRICT;
CREATE TABLE writes (
    namespace INTEGER NOT NULL,
    uid ANY NOT NULL,
    task ANY NOT NULL,
    path TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (namespace, uid, task)
) STRICT, WITHOUT ROWID;
CREATE TABLE tags (
    tag INTEGER NOT NULL,
    checkpoint INTEGER NOT NULL,
    PRIMARY KEY (tag, checkpoint)
) STRICT, WITHOUT ROWID;
CREATE TABLE said (
    thread INTEGER PRIMARY KEY,
    stamp INTEGER NOT NULL,
    position INTEGER NOT NULL,
    path BLOB NOT NULL
) STRICT;
CREATE TABLE removals (
    thread BLOB NOT NULL,
    number INTEGER NOT NULL,
    removed_at REAL NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (thread, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX removals_age ON removals (removed_at);
CREATE TABLE runs (
    thread INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    status TEXT NOT NULL,
    owner TEXT NOT NULL,
    graph TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 1,
    cancel TEXT,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    about BLOB NOT NULL,
    request BLOB,
    error BLOB,
    not_before REAL,
    events INTEGER NOT NULL DEFAULT 0,
    UNIQUE (thread, seq)
) STRICT;
CREATE UNIQUE INDEX runs_running ON runs (thread) WHERE status = 'running';
CREATE INDEX runs_live ON runs (thread, seq) WHERE status IN ('pending', 'running');
CREATE INDEX runs_delayed ON runs (not_before) WHERE status = 'delayed';
CREATE INDEX runs_events ON runs (updated_at) WHERE events = 1;
CREATE TABLE assistants (
    assistant_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at REAL NOT NULL,
    since REAL,
    content BLOB NOT NULL,
    PRIMARY KEY (assistant_id, version)
) STRICT;
CREATE TABLE run_events (
    thread INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    since INTEGER NOT NULL,
    until INTEGER NOT NULL,
    body BLOB,
    PRIMARY KEY (thread, seq, since)
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

-- find_thread: the key of a thread, its counter of puts, its generation, which changes with each deletion, and the number of its newest removal record
SELECT thread, seq, generation, removals FROM threads WHERE thread_id = ?;

-- state: a thread, one of its namespaces and its head, and where a checkpoint stands, before a write
SELECT s.*, (SELECT c.id FROM checkpoints c WHERE c.uid = ?1 AND c.namespace = s.namespace)
FROM (
    SELECT t.thread, t.seq, t.generation, t.stamp, t.updated_at, n.namespace, n.pinned, CASE n.pinned
    WHEN 0 THEN (SELECT max(id) FROM checkpoints WHERE id >= n.namespace << 32 AND id < (n.namespace + 1) << 32)
    ELSE (n.namespace << 32) + n.pinned END AS head, t.title, t.removals
    FROM threads t LEFT JOIN namespaces n ON n.thread = t.thread AND n.ns = ?2 WHERE t.thread_id = ?3 LIMIT 1
) s;

-- more_keys: keys that nothing has, by the last of so many; rows have higher ones if a commit of the counter was lost
INSERT INTO keys (name, last) SELECT '', max(last) + ?1 FROM (
    SELECT 0 AS last UNION ALL SELECT max(thread) FROM threads
    UNION ALL SELECT max(namespace) FROM namespaces UNION ALL SELECT max(log) FROM logs
) AS used WHERE true
ON CONFLICT ({tenant}name) DO UPDATE
SET last = CASE WHEN excluded.last > keys.last + ?1 THEN excluded.last ELSE keys.last + ?1 END RETURNING last;

-- new_thread: insert a thread, unless it exists or its id has a newer removal record than ?7; a new thread has no pending writes
INSERT INTO threads (thread, thread_id, seq, stamp, created_at, updated_at, removals) SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7
WHERE NOT EXISTS (SELECT 1 FROM removals r WHERE r.thread = ?8 AND r.number > ?7) RETURNING 0;

-- advance: the place, in put order, of the thread's newest checkpoint, if nobody changed the thread, or put it before; whether tasks wrote at it, who may ask
UPDATE threads SET seq = ?1, stamp = ?2, waiting = CASE WHEN ?7 = 0 THEN EXISTS (SELECT 1 FROM writes WHERE namespace = ?5 AND uid = ?6) ELSE waiting END
WHERE thread = ?3 AND stamp = ?4
AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE namespace = ?5 AND uid = ?6)
RETURNING EXISTS (SELECT 1 FROM writes WHERE namespace = ?5 AND uid = ?6);

-- advance_now: the same, and when it was written to; apart, so that its index is not written each time
UPDATE threads SET seq = ?1, stamp = ?2, waiting = CASE WHEN ?7 = 0 THEN EXISTS (SELECT 1 FROM writes WHERE namespace = ?5 AND uid = ?6) ELSE waiting END,
updated_at = max(updated_at, ?8) WHERE thread = ?3 AND stamp = ?4
AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE namespace = ?5 AND uid = ?6)
RETURNING EXISTS (SELECT 1 FROM writes WHERE namespace = ?5 AND uid = ?6);

-- advance_replayed: the same, if the number of rows and bytes that the tasks of the parent ?9 wrote is still ?10, as it was read
UPDATE threads SET seq = ?1, stamp = ?2, waiting = CASE WHEN ?7 = 0 THEN EXISTS (SELECT 1 FROM writes WHERE namespace = ?5 AND uid = ?6) ELSE waiting END,
updated_at = max(updated_at, ?8) WHERE thread = ?3 AND stamp = ?4
AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE namespace = ?5 AND uid = ?6)
AND (SELECT coalesce(sum(1 + length(body)), 0) FROM writes WHERE namespace = ?5 AND uid = ?9) = ?10
RETURNING EXISTS (SELECT 1 FROM writes WHERE namespace = ?5 AND uid = ?6);

-- advance_into: the same, with a namespace that is made
UPDATE threads SET seq = ?1, stamp = ?2, updated_at = max(updated_at, ?6) WHERE thread = ?3 AND stamp = ?4
AND NOT EXISTS (SELECT 1 FROM namespaces n WHERE n.thread = ?3 AND n.ns = ?5) RETURNING 0;

-- changed: tell every process that the head is another
UPDATE threads SET stamp = stamp + 1, waiting = 1 WHERE thread = ?;

-- waits: a task asked something
UPDATE threads SET waiting = 1 WHERE thread = ? AND waiting = 0;

-- set_title: what lists tell of a thread, and what finds it by that
UPDATE threads SET title = ?, found = ? WHERE thread = ?;

-- client_of: what the server keeps of a thread, and whether it may wait for an answer
SELECT status, seq, client, waiting FROM threads WHERE thread_id = ?;

-- hold_client: what the server keeps of a thread, as it is read to be changed
SELECT thread, status, seq, client FROM threads WHERE thread_id = ?;

-- set_client: that, and what finds the thread by it
UPDATE threads SET client = ?, client_found = ? WHERE thread = ?;

-- set_status: how the last run of the server ended
UPDATE threads SET status = ? WHERE thread = ?;

-- ttl_of: the time to live of a thread that has one, as `set_ttl` stores it
SELECT ttl, ttl_since, ttl_keeps FROM threads WHERE thread_id = ? AND ttl IS NOT NULL;

-- set_ttl: how many minutes without activity, from a moment on, end a thread; 1 and 2: its newest state stays, and has stayed
UPDATE threads SET ttl = ?, ttl_since = ?, ttl_keeps = ? WHERE thread_id = ?;

-- has_kept: nothing but its newest state is left
UPDATE threads SET ttl_since = ?, ttl_keeps = 2 WHERE thread_id = ?;

-- expired: some threads whose minutes are over, or one of them, and no run of which is under way or waits; what of them stays
SELECT t.thread_id, t.ttl_keeps FROM threads t WHERE t.ttl IS NOT NULL AND t.updated_at + 60 * t.ttl <= ?1
AND t.ttl_since + 60 * t.ttl <= ?1 AND (t.ttl_keeps < 2 OR t.updated_at > t.ttl_since) AND (t.thread_id = ?2 OR ?2 = '')
AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.thread = t.thread AND r.status IN ('delayed', 'pending', 'running')) LIMIT ?3;

-- touch: when a thread was last written to; apart, so that its index is not written each time
UPDATE threads SET updated_at = ?1 WHERE thread = ?2 AND updated_at < ?1;

-- new_namespace: the first checkpoint of a namespace
INSERT INTO namespaces (namespace, thread, ns) VALUES (?, ?, ?);

-- pin: the checkpoint from which the next run starts; 0: the newest
UPDATE namespaces SET pinned = ? WHERE namespace = ?;

-- thread_namespaces: all namespaces of a thread, each with its head's place
SELECT n.namespace, n.ns, coalesce(CASE n.pinned WHEN 0 THEN (SELECT max(id) FROM checkpoints WHERE id >= n.namespace << 32 AND id < (n.namespace + 1) << 32)
ELSE (n.namespace << 32) + n.pinned END, 0) & 4294967295
FROM namespaces n WHERE n.thread = ? ORDER BY n.namespace;

-- log_of: the log of a channel, for a namespace of its thread
SELECT l.log FROM logs l JOIN namespaces n ON n.thread = l.thread WHERE n.namespace = ? AND l.name = ?;

-- log_name: which channel a log belongs to
SELECT name FROM logs WHERE log = ?;

-- new_log: the first item of a channel
INSERT INTO logs (log, thread, name) VALUES (?, ?, ?);

-- thread_logs: all logs of a thread, each with the keys of its last item and of its last alias
SELECT log, name,
(SELECT max(id) FROM items WHERE id >= log << 32 AND id < (log << 32) + 2147483648),
(SELECT max(id) FROM items WHERE id >= (log << 32) + 2147483648 AND id < (log + 1) << 32)
FROM logs WHERE thread = ? ORDER BY log;

-- same_hashes: candidates for being items that are stored already
SELECT id, body FROM items WHERE h IN (SELECT value FROM json_each(?) AS asked);

-- add_item: insert an item, with its position and the time of the checkpoint that added it
INSERT INTO items (id, h, stored_at, body) VALUES (?, ?, ?, ?);

-- item_times: the time of first storage of each item in a range of a log
SELECT id, stored_at FROM items WHERE id >= ? AND id < ?;

-- items_between: a range of a log
SELECT id, body FROM items WHERE id >= ? AND id < ? ORDER BY id;

-- items_page: the first items of a range of a log, which may have gaps
SELECT id, body FROM items WHERE id >= ? AND id < ? ORDER BY id LIMIT ?;

-- count_items: how many there are in a range of a log, and their bytes
SELECT count(*), coalesce(sum(length(body)), 0) FROM items WHERE id >= ? AND id < ?;

-- drop_items: items nothing refers to
DELETE FROM items WHERE id >= ? AND id < ?;

-- find_checkpoint: one checkpoint by its id
SELECT id, uid, parent, began, put_at, body FROM checkpoints WHERE namespace = ? AND uid = ?;

-- uid_at: the id of a checkpoint
SELECT uid FROM checkpoints WHERE id = ?;

-- checkpoint_at: one checkpoint by its place
SELECT id, uid, parent, began, put_at, body FROM checkpoints WHERE id = ?;

-- head_of: the checkpoint a run starts from, and the keys that lead to it
SELECT t.thread, t.generation, t.removals, n.namespace, c.id, c.uid, c.parent, c.began, c.put_at, c.body
FROM threads t JOIN namespaces n ON n.thread = t.thread JOIN checkpoints c
ON c.id = CASE n.pinned WHEN 0 THEN (SELECT max(id) FROM checkpoints WHERE id >= n.namespace << 32 AND id < (n.namespace + 1) << 32)
ELSE (n.namespace << 32) + n.pinned END
WHERE t.thread_id = ? AND n.ns = ?;

-- checkpoint_of: one checkpoint by its id, and the keys that lead to it
SELECT t.thread, t.generation, t.removals, n.namespace, c.id, c.uid, c.parent, c.began, c.put_at, c.body
FROM threads t JOIN namespaces n ON n.thread = t.thread JOIN checkpoints c ON c.namespace = n.namespace AND c.uid = ?
WHERE t.thread_id = ? AND n.ns = ?;

-- checkpoint_by_key: one checkpoint by its key, and the keys that lead to it
SELECT t.thread, t.generation, t.removals, n.namespace, c.id, c.uid, c.parent, c.began, c.put_at, c.body
FROM (SELECT id, id >> 32 AS namespace, uid, parent, began, put_at, body FROM checkpoints WHERE id = ?2 LIMIT 1) c
LEFT JOIN namespaces n ON n.namespace = c.namespace LEFT JOIN threads t ON t.thread = n.thread AND t.thread_id = ?1;

-- astray: where an index has an entry, beside the place of one that was not found, that its row does not have
WITH found (thread, namespace) AS (
    SELECT t.thread, n.namespace FROM threads t LEFT JOIN namespaces n ON n.thread = t.thread AND n.ns = ?2 WHERE t.thread_id = ?1
), beside_thread AS (
    SELECT * FROM (SELECT thread, thread_id FROM threads WHERE thread_id < ?1 ORDER BY thread_id DESC LIMIT 1)
    UNION ALL SELECT * FROM (SELECT thread, thread_id FROM threads WHERE thread_id > ?1 ORDER BY thread_id LIMIT 1)
), beside_namespace AS (
    SELECT * FROM (SELECT namespace, thread, ns FROM namespaces WHERE (thread, ns) < ((SELECT thread FROM found), ?2) ORDER BY thread DESC, ns DESC LIMIT 1)
    UNION ALL SELECT * FROM (SELECT namespace, thread, ns FROM namespaces WHERE (thread, ns) > ((SELECT thread FROM found), ?2) ORDER BY thread, ns LIMIT 1)
), beside_checkpoint AS (
    SELECT * FROM (SELECT id, namespace, uid FROM checkpoints WHERE (namespace, uid) < ((SELECT namespace FROM found), ?3) ORDER BY namespace DESC, uid DESC LIMIT 1)
    UNION ALL SELECT * FROM (SELECT id, namespace, uid FROM checkpoints WHERE (namespace, uid) > ((SELECT namespace FROM found), ?3) ORDER BY namespace, uid LIMIT 1)
)
SELECT 'thread ' || i.thread FROM beside_thread i LEFT JOIN threads r ON r.thread = i.thread WHERE r.thread_id IS NOT i.thread_id
UNION ALL SELECT 'namespace ' || i.namespace FROM beside_namespace i LEFT JOIN namespaces r ON r.namespace = i.namespace
WHERE (r.thread, r.ns) IS NOT (i.thread, i.ns)
UNION ALL SELECT 'checkpoint ' || i.id FROM beside_checkpoint i LEFT JOIN checkpoints r ON r.id = i.id
WHERE (r.namespace, r.uid) IS NOT (i.namespace, i.uid)
UNION ALL SELECT 'the head of namespace ' || n.namespace FROM found f JOIN namespaces n ON n.namespace = f.namespace
WHERE CASE n.pinned WHEN 0 THEN ?3 IS NULL AND EXISTS (SELECT 1 FROM checkpoints c WHERE c.namespace = n.namespace)
ELSE NOT EXISTS (SELECT 1 FROM checkpoints c WHERE c.id = (n.namespace << 32) + n.pinned) END;

-- add_checkpoint: a checkpoint at its place
INSERT INTO checkpoints (id, namespace, uid, parent, began, put_at, body) VALUES (?, ?, ?, ?, ?, ?, ?);

-- replace_checkpoint: the same checkpoint, put once more
UPDATE checkpoints SET parent = ?, put_at = ?, body = ? WHERE id = ?;

-- checkpoints_page: a page of a namespace, newest first
SELECT id, uid, parent, began, put_at, body FROM checkpoints WHERE id >= ? AND id < ? ORDER BY id DESC LIMIT ?;

-- rewrite_checkpoint: a checkpoint whose references changed
UPDATE checkpoints SET body = ? WHERE id = ?;

-- checkpoint_keys: the places of a namespace's checkpoints, newest first
SELECT id, uid, parent FROM checkpoints WHERE id >= ? AND id < ? ORDER BY id DESC;

-- indexed_checkpoints: how many of a namespace its index of ids has within a range of keys
SELECT count(*) FROM checkpoints WHERE namespace = ? AND id >= ? AND id < ?;

-- drop_checkpoint: one checkpoint
DELETE FROM checkpoints WHERE id = ?;

-- find_writes: what a task wrote already
SELECT path, body FROM writes WHERE namespace = ? AND uid = ? AND task = ?;

-- new_writes: what a task wrote, which has written nothing yet, if its namespace is there and nothing of the thread was removed or lost
INSERT INTO writes (namespace, uid, task, path, body) SELECT ?1, ?2, ?3, ?4, ?5
WHERE EXISTS (SELECT 1 FROM threads WHERE thread = ?6 AND generation = ?7)
AND EXISTS (SELECT 1 FROM namespaces WHERE namespace = ?1 AND thread = ?6)
AND (?8 = 0 OR EXISTS (SELECT 1 FROM checkpoints WHERE id = ?8 AND uid = ?9));

-- new_writes_at_head: the same, of a task that stops, if its checkpoint is the head
INSERT INTO writes (namespace, uid, task, path, body) SELECT ?1, ?2, ?3, ?4, ?5
WHERE EXISTS (SELECT 1 FROM threads WHERE thread = ?6 AND generation = ?7)
AND EXISTS (SELECT 1 FROM namespaces n WHERE n.namespace = ?1 AND n.thread = ?6 AND ?10 = CASE n.pinned
WHEN 0 THEN (SELECT max(id) FROM checkpoints WHERE id >= ?1 << 32 AND id < (?1 + 1) << 32) ELSE (?1 << 32) + n.pinned END)
AND (?8 = 0 OR EXISTS (SELECT 1 FROM checkpoints WHERE id = ?8 AND uid = ?9));

-- put_writes: what a task wrote
INSERT INTO writes (namespace, uid, task, path, body) VALUES (?, ?, ?, ?, ?)
ON CONFLICT ({tenant}namespace, uid, task) DO UPDATE SET path = excluded.path, body = excluded.body;

-- refer_writes: what a task wrote, as references to items, unless it has written more since
UPDATE writes SET body = ? WHERE namespace = ? AND uid = ? AND task = ? AND body = ?;

-- writes_of: what the tasks of a checkpoint wrote, and with its owner what stands before and after it
SELECT NULL, NULL, uid, task, path, body FROM writes WHERE namespace = ?1 AND uid = ?2
UNION ALL SELECT coalesce(t.thread_id, ''), n.ns, w.uid, w.task, w.path, w.body FROM (
    SELECT * FROM (SELECT * FROM writes WHERE (namespace, uid) < (?1, ?2) ORDER BY namespace DESC, uid DESC, task DESC LIMIT 1)
    UNION ALL SELECT * FROM (SELECT * FROM writes WHERE (namespace, uid) > (?1, ?2) ORDER BY namespace, uid, task LIMIT 1)
) w LEFT JOIN namespaces n ON n.namespace = w.namespace LEFT JOIN threads t ON t.thread = n.thread;

-- namespace_writes: the pending writes of a namespace
SELECT uid, task, path, body FROM writes WHERE namespace = ?;

-- size_of_writes: bytes of the pending writes of a checkpoint
SELECT coalesce(sum(length(body)), 0) FROM writes WHERE namespace = ? AND uid = ?;

-- drop_writes: the pending writes of a checkpoint
DELETE FROM writes WHERE namespace = ? AND uid = ?;

-- drop_task_writes: the pending writes of one task of a checkpoint
DELETE FROM writes WHERE namespace = ? AND uid = ? AND task = ?;

-- add_tag: make a checkpoint findable by one of its metadata values
INSERT INTO tags (tag, checkpoint) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- drop_tag: its opposite
DELETE FROM tags WHERE tag = ? AND checkpoint = ?;

-- drop_tags: all of a checkpoint whose metadata cannot be read
DELETE FROM tags WHERE checkpoint = ?;

-- tagged: a page of the checkpoints with a metadata value, and whose they are
SELECT t.thread_id, n.ns, g.checkpoint, c.uid, c.parent, c.began, c.put_at, c.body FROM (
    SELECT checkpoint, checkpoint >> 32 AS namespace FROM tags WHERE tag = ? AND checkpoint > ? ORDER BY checkpoint LIMIT ?
) g LEFT JOIN checkpoints c ON c.id = g.checkpoint LEFT JOIN namespaces n ON n.namespace = g.namespace LEFT JOIN threads t ON t.thread = n.thread
ORDER BY g.checkpoint;

-- tagged_page: a page of those of one namespace, newest first
SELECT g.checkpoint, c.uid, c.parent, c.began, c.put_at, c.body FROM tags g LEFT JOIN checkpoints c ON c.id = g.checkpoint
WHERE g.tag = ? AND g.checkpoint >= ? AND g.checkpoint < ? ORDER BY g.checkpoint DESC LIMIT ?;

-- tags_beside: the entries before and after those of a metadata value within a range of checkpoints
SELECT EXISTS (SELECT 1 FROM tags o WHERE o.tag = ?1 AND o.checkpoint = g.checkpoint), t.thread_id, n.ns, g.checkpoint, c.uid, c.parent, c.began, c.put_at, c.body FROM (
    SELECT * FROM (SELECT tag, checkpoint FROM tags WHERE (tag, checkpoint) < (?1, ?2) ORDER BY tag DESC, checkpoint DESC LIMIT 1)
    UNION ALL SELECT * FROM (SELECT tag, checkpoint FROM tags WHERE (tag, checkpoint) >= (?1, ?3) ORDER BY tag, checkpoint LIMIT 1)
) g LEFT JOIN checkpoints c ON c.id = g.checkpoint LEFT JOIN namespaces n ON n.namespace = g.checkpoint >> 32 LEFT JOIN threads t ON t.thread = n.thread;

-- removed: tell every process that rows of the thread are gone
UPDATE threads SET generation = generation + 1, stamp = stamp + 1, waiting = 1 WHERE thread = ?;

-- note_removal: store the number of the newest removal record, and invalidate the caches of all processes
UPDATE threads SET removals = ?, generation = generation + 1, stamp = stamp + 1, waiting = 1 WHERE thread = ?;

-- removal_key: the key of the hashes in removal records
SELECT value FROM settings WHERE name = 'removals';

-- add_removal_key: insert that key, unless it exists
INSERT INTO settings (name, value) VALUES ('removals', ?) ON CONFLICT DO NOTHING;

-- set_removal_key: replace that key by the key of the database whose removal records were copied
UPDATE settings SET value = ? WHERE name = 'removals';

-- add_removal: insert a record of an erasure from a thread, or of the deletion of a thread
INSERT INTO removals (thread, number, removed_at, body) VALUES (?, ?, ?, ?);

-- set_removal: replace the content of a removal record
UPDATE removals SET body = ? WHERE thread = ? AND number = ?;

-- last_removal: the number of the newest removal record of a thread
SELECT max(number) FROM removals WHERE thread = ?;

-- removals_of: the numbers of removals from some threads, by their keys
SELECT thread, removals FROM threads WHERE thread IN (SELECT value FROM json_each(?) AS asked);

-- removals_since: the removal records of a thread with a higher number
SELECT number, body FROM removals WHERE thread = ? AND number > ? ORDER BY number;

-- drop_removals: delete the removal records that are older than a time
DELETE FROM removals WHERE removed_at < ?;

-- drop_namespace_checkpoints: a whole namespace
DELETE FROM checkpoints WHERE id >= ? AND id < ?;

-- drop_namespace_writes: a whole namespace's pending writes
DELETE FROM writes WHERE namespace = ?;

-- drop_namespaces: the namespaces of a thread
DELETE FROM namespaces WHERE thread = ?;

-- drop_logs: the logs of a thread
DELETE FROM logs WHERE thread = ?;

-- drop_thread: the thread itself
DELETE FROM threads WHERE thread = ?;

-- list_threads: a page of threads that began, newest activity first
SELECT thread, thread_id, created_at, updated_at, (SELECT i.thread FROM threads i WHERE i.thread_id = t.thread_id), title FROM threads t
WHERE (updated_at, thread) < (?1, ?2) AND updated_at >= ?5 AND substr(CAST(thread_id AS BLOB), 1, length(?3)) = ?3
AND (seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread = t.thread))
ORDER BY updated_at DESC, thread DESC LIMIT ?4;

-- listed: all threads as a server lists them; conditions, an order and a page follow
SELECT t.thread, t.thread_id, t.created_at, t.updated_at, t.thread, t.title, t.waiting, t.seq, t.status, t.client,
EXISTS (SELECT 1 FROM runs r WHERE r.thread = t.thread AND r.status IN ('pending', 'running')), t.ttl, t.ttl_since, t.ttl_keeps, t.removals
FROM threads t WHERE 1 = 1;

-- count_listed: how many; conditions follow
SELECT count(*) FROM threads t WHERE 1 = 1;

-- is_found: the condition that bytes, given twice, are among those that find a thread, or that only its head tells, or what a client gave
t.found IS NULL OR (t.client_found IS NULL AND t.client IS NOT NULL) OR instr(t.found, ?) > 0 OR instr(t.client_found, ?) > 0;

-- is_unread: the condition that the search of what was said has not read all of a thread
t.seq > 0 AND NOT EXISTS (SELECT 1 FROM said s WHERE s.thread = t.thread AND s.stamp = t.stamp);

-- said_of: how far that search has read a thread, and where it keeps the messages
SELECT t.thread, t.stamp, t.generation, s.position, s.path FROM threads t LEFT JOIN said s ON s.thread = t.thread WHERE t.thread_id = ?;

-- set_said: how far it has read a thread
INSERT INTO said (thread, stamp, position, path) VALUES (?, ?, ?, ?)
ON CONFLICT ({tenant}thread) DO UPDATE SET stamp = excluded.stamp, position = excluded.position, path = excluded.path;

-- unread: have it read a thread again, as it may be another's
UPDATE said SET stamp = -1 WHERE thread = ?;

-- some_said: some of the threads of which it has read something
SELECT thread FROM said LIMIT ?;

-- drop_said: it has read nothing of a thread
DELETE FROM said WHERE thread = ? RETURNING path;

-- drop_said_items: what it keeps of a thread; the tables are those of stores, and are there if it has read something
DELETE FROM said_items WHERE ns = (SELECT ns FROM said_namespaces WHERE path = ?) AND key >= ? AND key < ? RETURNING size;

-- shrink_said: count the messages and bytes that are gone, and that the namespace has changed
UPDATE said_namespaces SET items = items - ?, bytes = bytes - ?, changes = changes + 1 WHERE path = ?;

-- drop_said_index: the compact form of its index, which has words of what is gone
DELETE FROM said_indexes WHERE ns = (SELECT ns FROM said_namespaces WHERE path = ?);

-- drop_said_namespace: a namespace in which nothing is left
DELETE FROM said_namespaces WHERE path = ? AND items = 0;

-- said_erased: tell every process that words are gone
INSERT INTO said_settings (name, value) VALUES ('erasures', 1)
ON CONFLICT ({tenant}name) DO UPDATE SET value = said_settings.value + 1;

-- tagged_threads: those of them whose head has a metadata value
SELECT thread, thread_id, created_at, updated_at, (SELECT i.thread FROM threads i WHERE i.thread_id = t.thread_id), title FROM threads t
WHERE (updated_at, thread) < (?1, ?2) AND updated_at >= ?5 AND substr(CAST(thread_id AS BLOB), 1, length(?3)) = ?3
AND EXISTS (
    SELECT 1 FROM namespaces n JOIN tags g ON g.tag = ?6 AND g.checkpoint = CASE n.pinned
    WHEN 0 THEN (SELECT max(id) FROM checkpoints WHERE id >= n.namespace << 32 AND id < (n.namespace + 1) << 32)
    ELSE (n.namespace << 32) + n.pinned END
    WHERE n.thread = t.thread AND n.ns = ''
) ORDER BY updated_at DESC, thread DESC LIMIT ?4;

-- waiting_threads: those of them that may wait for an answer
SELECT thread, thread_id, created_at, updated_at, (SELECT i.thread FROM threads i WHERE i.thread_id = t.thread_id), title FROM threads t
WHERE (updated_at, thread) < (?1, ?2) AND updated_at >= ?5 AND substr(CAST(thread_id AS BLOB), 1, length(?3)) = ?3 AND waiting = 1
ORDER BY updated_at DESC, thread DESC LIMIT ?4;

-- one_thread: the same, for one
SELECT thread, thread_id, created_at, updated_at, (SELECT i.thread FROM threads i WHERE i.thread_id = t.thread_id), title FROM threads t WHERE thread_id = ?
AND (seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread = t.thread));

-- root_heads: the heads of some threads
SELECT n.thread, c.id, c.uid, c.parent, c.began, c.put_at, c.body FROM namespaces n JOIN checkpoints c ON c.id = CASE n.pinned
WHEN 0 THEN (SELECT max(id) FROM checkpoints WHERE id >= n.namespace << 32 AND id < (n.namespace + 1) << 32)
ELSE (n.namespace << 32) + n.pinned END
WHERE n.ns = '' AND n.thread IN (SELECT value FROM json_each(?1) AS asked);

-- root_writes: what their tasks wrote
SELECT n.thread, w.uid, w.task, w.path, w.body FROM namespaces n JOIN checkpoints c ON c.id = CASE n.pinned
WHEN 0 THEN (SELECT max(id) FROM checkpoints WHERE id >= n.namespace << 32 AND id < (n.namespace + 1) << 32)
ELSE (n.namespace << 32) + n.pinned END JOIN writes w ON w.namespace = n.namespace AND w.uid = c.uid
WHERE n.ns = '' AND n.thread IN (SELECT value FROM json_each(?1) AS asked) ORDER BY w.path, w.task;

-- ids_beside: the id before one in order, and the one after it
SELECT (SELECT max(thread_id) FROM threads WHERE thread_id < ?1), (SELECT min(thread_id) FROM threads WHERE thread_id > ?1);

-- sizes: how many checkpoints and items a thread has, aliases apart, and the bytes of all and of its writes
SELECT c.many, i.many, c.bytes + i.bytes + w.bytes FROM (
    SELECT count(*) AS many, coalesce(sum(length(c.body)), 0) AS bytes FROM (SELECT DISTINCT namespace << 32 AS low, (namespace + 1) << 32 AS high FROM namespaces WHERE thread = ?1) n
    JOIN checkpoints c ON c.id >= n.low AND c.id < n.high
) c, (
    SELECT count(i.id) FILTER (WHERE i.id & 2147483648 = 0) AS many, coalesce(sum(length(i.body)), 0) AS bytes FROM (SELECT DISTINCT log << 32 AS low, (log + 1) << 32 AS high FROM logs WHERE thread = ?1) l
    JOIN items i ON i.id >= l.low AND i.id < l.high
) i, (
    SELECT coalesce(sum(length(w.body)), 0) AS bytes FROM namespaces n
    JOIN writes w ON w.namespace = n.namespace WHERE n.thread = ?1
) w;

-- largest_threads: those with the most bytes of checkpoints, items and writes, as list_threads has them
SELECT t.thread, t.thread_id, t.created_at, t.updated_at, t.thread, t.title FROM threads t JOIN (
    SELECT thread, sum(bytes) AS bytes FROM (
        SELECT n.thread, sum(length(c.body)) AS bytes FROM checkpoints c JOIN namespaces n ON n.namespace = c.id >> 32 GROUP BY 1
        UNION ALL SELECT l.thread, sum(length(i.body)) FROM items i JOIN logs l ON l.log = i.id >> 32 GROUP BY 1
        UNION ALL SELECT n.thread, sum(length(w.body)) FROM writes w JOIN namespaces n ON n.namespace = w.namespace GROUP BY 1
    ) parts GROUP BY thread
) s ON s.thread = t.thread ORDER BY s.bytes DESC, t.thread DESC LIMIT ?;

-- begun_by_day: how many threads were begun on each day since 1970
SELECT CAST(created_at / 86400 AS bigint), count(*) FROM threads t
WHERE seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread = t.thread) GROUP BY 1 ORDER BY 1;

-- thread_ids: every thread, in the order they came
SELECT thread, thread_id, (SELECT i.thread FROM threads i WHERE i.thread_id = t.thread_id) FROM threads t WHERE t.thread > ? ORDER BY t.thread LIMIT ?;

-- count_without_ttl: the number of threads that have no time to live
SELECT count(*) FROM threads t WHERE ttl IS NULL AND (seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread = t.thread));

-- totals: over the whole database, and the bytes of checkpoints, items and writes
SELECT (SELECT count(*) FROM threads t WHERE seq > 0 OR EXISTS (SELECT 1 FROM namespaces n WHERE n.thread = t.thread)), (SELECT count(*) FROM checkpoints), (SELECT count(*) FROM items WHERE h <> 0),
    (SELECT coalesce(sum(length(body)), 0) FROM checkpoints) + (SELECT coalesce(sum(length(body)), 0) FROM items)
    + (SELECT coalesce(sum(length(body)), 0) FROM writes);

-- copied: rows were added with their keys; those of new rows come after them
INSERT INTO keys (name, last) SELECT '', max(last) FROM (
    SELECT 0 AS last UNION ALL SELECT max(thread) FROM threads
    UNION ALL SELECT max(namespace) FROM namespaces UNION ALL SELECT max(log) FROM logs
) AS used WHERE true
ON CONFLICT ({tenant}name) DO UPDATE SET last = CASE WHEN excluded.last > keys.last THEN excluded.last ELSE keys.last END;

-- analyzed: SQLite plans these queries without statistics
SELECT 1;

-- accept_run: it runs at once if no run of the thread is live, and waits otherwise, or is none if it may not wait; a delayed one is nobody's
INSERT INTO runs (thread, seq, run_id, status, owner, graph, created_at, updated_at, about, request, not_before, events)
SELECT t.thread, t.seq, CAST(?1 AS text),
CASE WHEN CAST(?9 AS double precision) IS NOT NULL THEN 'delayed' WHEN t.live = 0 THEN 'running' ELSE 'pending' END,
CAST(?2 AS text), CAST(?3 AS text), ?4, ?4, ?5, ?6, CAST(?9 AS double precision), ?10
FROM (
    SELECT thread, (SELECT coalesce(max(u.last), 0) + 1 FROM (SELECT max(r.seq) AS last FROM runs r WHERE r.thread = threads.thread UNION ALL SELECT max(e.seq) FROM run_events e WHERE e.thread = threads.thread) u) AS seq,
    (SELECT count(*) FROM runs r WHERE r.thread = threads.thread AND r.status IN ('pending', 'running')) AS live
    FROM threads WHERE thread_id = ?7
) t WHERE t.live = 0 OR ?8 = 0 RETURNING thread, seq, status;

-- end_run: store how a run ended, if this process still owns it and knows how it was cancelled; the error and the request are not stored if the run was stopped or messages were erased from its thread
UPDATE runs SET status = ?, error = CASE WHEN cancel IS NULL AND events >= 0 THEN ? END, request = CASE WHEN cancel IS NULL AND events >= 0 THEN ? END, updated_at = ?, owner = ''
WHERE thread = ? AND seq = ? AND owner = ? AND status = 'running' AND (cancel IS NULL OR CAST(? AS text) IN (cancel, 'rollback')) RETURNING 0;

-- set_about: what is told of a run that this process runs
UPDATE runs SET about = ? WHERE thread = ? AND seq = ? AND owner = ? AND status = 'running';

-- drop_run: one that was rolled back, unless it is another process' now
DELETE FROM runs WHERE thread = ? AND seq = ? AND owner = ? AND status = 'running' RETURNING 0;

-- drop_ended: one that has ended
DELETE FROM runs WHERE thread = (SELECT thread FROM threads WHERE thread_id = ?) AND run_id = ? AND status NOT IN ('delayed', 'pending', 'running');

-- awaited: whether a run or a cron of a thread is to run yet
SELECT 1 FROM runs WHERE thread = (SELECT thread FROM threads WHERE thread_id = ?1) AND status IN ('delayed', 'pending', 'running')
UNION ALL SELECT 1 FROM crons WHERE thread_id = ?1 AND next_at IS NOT NULL;

-- add_webhook: insert the webhook of a run that this process ends and of which it knows how it was cancelled, with the content ?5 if messages were erased during the run
INSERT INTO webhooks (run_id, thread_id, next_at, content) SELECT CAST(?1 AS text), CAST(?2 AS text), CAST(?3 AS double precision),
CASE WHEN r.events >= 0 THEN ?4 ELSE ?5 END FROM runs r WHERE r.thread = ?6 AND r.seq = ?7 AND r.owner = ?8 AND r.status = 'running'
AND (r.cancel IS NULL OR CAST(?9 AS text) IN (r.cancel, 'rollback')) ON CONFLICT DO NOTHING;

-- due_webhooks: those whose time has come
SELECT run_id FROM webhooks WHERE next_at <= ? ORDER BY next_at LIMIT ?;

-- due_webhook: one whose time has come
SELECT content, attempts FROM webhooks WHERE run_id = ? AND next_at <= ?;

-- take_webhook: it is tried now, and is due again later, unless another process tries it
UPDATE webhooks SET attempts = attempts + 1, next_at = ? WHERE run_id = ? AND attempts = ? RETURNING 0;

-- webhooks_of: those of a thread
SELECT run_id, content FROM webhooks WHERE thread_id = ?;

-- unbegun_threads: threads with runs and no checkpoint, whose metadata would say whose they are
SELECT t.thread_id FROM threads t WHERE t.seq = 0 AND EXISTS (SELECT 1 FROM runs r WHERE r.thread = t.thread);

-- loose_webhooks: those of runs whose thread is not kept
SELECT run_id, content FROM webhooks WHERE thread_id IS NULL;

-- drop_webhook: one
DELETE FROM webhooks WHERE run_id = ?;

-- drop_webhooks: those of a thread
DELETE FROM webhooks WHERE thread_id = ?;

-- add_cron: unless its thread is no more
INSERT INTO crons (cron_id, thread_id, next_at, created_at, updated_at, content)
SELECT CAST(?1 AS text), CAST(?2 AS text), CAST(?3 AS double precision), ?4, ?4, ?5
WHERE CAST(?2 AS text) IS NULL OR EXISTS (SELECT 1 FROM threads WHERE thread_id = ?2) RETURNING 0;

-- set_cron: what it runs now, and perhaps when
UPDATE crons SET content = ?1, updated_at = ?2, next_at = CASE WHEN ?3 = 1 THEN CAST(?4 AS double precision) ELSE next_at END WHERE cron_id = ?5 RETURNING next_at;

-- advance_cron: it is due at another time, unless another process has begun its run
UPDATE crons SET next_at = ? WHERE cron_id = ? AND next_at = ? RETURNING 0;

-- reset_cron: set the time at which a cron is due, unless the cron was changed or begun since it was read
UPDATE crons SET next_at = CAST(?1 AS double precision) WHERE cron_id = ?2 AND updated_at = ?3
AND (next_at = ?4 OR (next_at IS NULL AND CAST(?4 AS double precision) IS NULL)) RETURNING 0;

-- crons_not_due_before: crons that are due after a time, or never
SELECT cron_id, thread_id, next_at, created_at, updated_at, content FROM crons WHERE next_at > ? OR next_at IS NULL;

-- one_cron: by its id
SELECT cron_id, thread_id, next_at, created_at, updated_at, content FROM crons WHERE cron_id = ?;

-- all_crons: all of them
SELECT cron_id, thread_id, next_at, created_at, updated_at, content FROM crons;

-- crons_of: those of a thread
SELECT cron_id, thread_id, next_at, created_at, updated_at, content FROM crons WHERE thread_id = ?;

-- due_crons: those whose time has come
SELECT cron_id FROM crons WHERE next_at <= ? ORDER BY next_at;

-- drop_cron: one
DELETE FROM crons WHERE cron_id = ? RETURNING 0;

-- drop_crons: those of a thread
DELETE FROM crons WHERE thread_id = ? RETURNING 0;

-- status_of: how a run stands
SELECT status FROM runs WHERE thread = ? AND run_id = ?;

-- begin_due: a delayed run whose time has come is the last of its thread now, and runs at once if no other is live
UPDATE runs SET owner = ?1, updated_at = ?2, seq = (SELECT coalesce(max(u.last), 0) + 1 FROM (SELECT max(r.seq) AS last FROM runs r WHERE r.thread = ?3 UNION ALL SELECT max(e.seq) FROM run_events e WHERE e.thread = ?3) u), status = CASE WHEN EXISTS (
    SELECT 1 FROM runs e WHERE e.thread = ?3 AND e.status IN ('pending', 'running')
) THEN 'pending' ELSE 'running' END WHERE thread = ?3 AND run_id = ?4 AND status = 'delayed';

-- claim_runs: this process runs what waits of its own, where no earlier run of the thread is live
UPDATE runs SET status = 'running', updated_at = ?1 WHERE owner = ?2 AND status = 'pending' AND NOT EXISTS (
    SELECT 1 FROM runs e WHERE e.thread = runs.thread AND e.status IN ('pending', 'running') AND e.seq < runs.seq
);

-- claim_next: the same, of one thread
UPDATE runs SET status = 'running', updated_at = ?1 WHERE thread = ?3 AND owner = ?2 AND status = 'pending' AND NOT EXISTS (
    SELECT 1 FROM runs e WHERE e.thread = ?3 AND e.status IN ('pending', 'running') AND e.seq < runs.seq
) RETURNING run_id;

-- adopt_run: the run of a process that is gone; its death counts as an attempt. `claim_runs` follows: one that began is not seen waiting
UPDATE runs SET owner = ?, attempt = attempt + CASE WHEN status = 'running' AND owner <> '' THEN 1 ELSE 0 END, status = 'pending'
WHERE thread = ? AND seq = ? AND owner = ? AND status IN ('pending', 'running');

-- hand_over: the runs of a process that ends are the next one's
UPDATE runs SET owner = '' WHERE owner = ? AND status IN ('pending', 'running');

-- cancel_runs: one of a thread, or all, perhaps but those that are delayed; what waits has ended, what runs is told; a rollback counts more than an interrupt
UPDATE runs SET cancel = CASE CAST(?4 AS text) WHEN 'rollback' THEN 'rollback' ELSE coalesce(cancel, ?4) END, updated_at = ?5, request = CASE status WHEN 'running' THEN request END,
status = CASE status WHEN 'running' THEN status ELSE 'interrupted' END
WHERE thread = (SELECT thread FROM threads WHERE thread_id = ?1) AND (?2 = '' OR run_id = ?2)
AND (status IN ('pending', 'running') OR (status = 'delayed' AND ?3 = 1)) RETURNING run_id;

-- keep_waiting_seq: store the highest number of the runs that `drop_waiting` deletes as an empty batch of events, so that no later run of the thread gets a number that was used
INSERT INTO run_events (thread, seq, since, until) SELECT thread, max(seq), 0, 0 FROM runs
WHERE thread = (SELECT thread FROM threads WHERE thread_id = ?1) AND (?2 = '' OR run_id = ?2)
AND (status = 'pending' OR (status = 'delayed' AND ?3 = 1)) GROUP BY thread ON CONFLICT DO NOTHING;

-- drop_waiting: those of them that did not begin
DELETE FROM runs WHERE thread = (SELECT thread FROM threads WHERE thread_id = ?1) AND (?2 = '' OR run_id = ?2)
AND (status = 'pending' OR (status = 'delayed' AND ?3 = 1)) RETURNING run_id;

-- runs_since: those of a thread after one, in order, and how each stands
SELECT r.seq, r.run_id, r.status FROM threads t JOIN runs r ON r.thread = t.thread AND r.seq > ?
WHERE t.thread_id = ? AND r.status <> 'delayed' ORDER BY r.seq;

-- live_runs: what is under way or waits, of all threads, with the delayed ones whose time has come
SELECT t.thread_id, r.thread, r.seq, r.run_id, r.status, r.owner, r.graph, r.attempt, r.cancel FROM (
    SELECT * FROM runs WHERE status IN ('pending', 'running')
    UNION ALL SELECT * FROM runs WHERE status = 'delayed' AND not_before <= ?
) r JOIN threads t ON t.thread = r.thread ORDER BY r.thread, r.seq;

-- live_of: of one thread
SELECT r.run_id FROM runs r WHERE r.thread = (SELECT thread FROM threads WHERE thread_id = ?) AND r.status IN ('pending', 'running') ORDER BY r.seq;

-- runs_of: all that are known of a thread, newest first
SELECT t.thread_id, r.thread, r.seq, r.run_id, r.status, r.owner, r.graph, r.attempt, r.cancel, r.created_at, r.updated_at, r.about, r.error, r.request, r.not_before
FROM threads t JOIN runs r ON r.thread = t.thread WHERE t.thread_id = ?1 AND (?2 = '' OR r.run_id = ?2) ORDER BY r.seq DESC;

-- newest_runs: those of all threads, and whether each is the last of its thread; conditions, an order and a page follow
SELECT t.thread_id, r.thread, r.seq, r.run_id, r.status, r.owner, r.graph, r.attempt, r.cancel, r.created_at, r.updated_at, r.about, r.error, NULL, r.not_before,
NOT EXISTS (SELECT 1 FROM runs l WHERE l.thread = r.thread AND l.seq > r.seq) FROM threads t JOIN runs r ON r.thread = t.thread WHERE 1 = 1;

-- rewrite_run: what is left of what a run was asked; it is not to go on with less
UPDATE runs SET about = ?1, error = ?2, request = CASE status WHEN 'running' THEN coalesce(?3, request) END,
cancel = CASE WHEN status IN ('delayed', 'pending', 'running') THEN coalesce(cancel, 'interrupt') ELSE cancel END,
status = CASE WHEN status IN ('delayed', 'pending') THEN 'interrupted' ELSE status END WHERE thread = ?4 AND seq = ?5;

-- move_runs: the thread has another key
UPDATE runs SET thread = ? WHERE thread = ?;

-- drop_runs: those of a thread
DELETE FROM runs WHERE thread = ? RETURNING 0;

-- drop_old_runs: those that ended long ago
DELETE FROM runs WHERE thread = ? AND seq <= ? AND status NOT IN ('delayed', 'pending', 'running');

-- add_version: a version of an assistant, which is not the latest yet
INSERT INTO assistants (assistant_id, version, created_at, content) VALUES (?, ?, ?, ?);

-- set_latest: which version counts from now on
UPDATE assistants SET since = CASE version WHEN ?1 THEN CAST(?2 AS double precision) END WHERE assistant_id = ?3;

-- latest_version: of an assistant, with the time of the first, and the last number that was given
SELECT a.assistant_id, a.version, f.created_at, a.since, a.content, (SELECT max(m.version) FROM assistants m WHERE m.assistant_id = ?1)
FROM assistants a JOIN assistants f ON f.assistant_id = a.assistant_id AND f.version = 1 WHERE a.assistant_id = ?1 AND a.since IS NOT NULL;

-- latest_versions: of all assistants, the newest assistant first
SELECT a.assistant_id, a.version, f.created_at, a.since, a.content
FROM assistants a JOIN assistants f ON f.assistant_id = a.assistant_id AND f.version = 1 WHERE a.since IS NOT NULL ORDER BY f.created_at DESC, a.assistant_id;

-- versions_of: of one assistant, newest first
SELECT assistant_id, version, created_at, since, content FROM assistants WHERE assistant_id = ? ORDER BY version DESC;

-- drop_assistant: with all its versions
DELETE FROM assistants WHERE assistant_id = ?;

-- relaxed: this transaction need not wait for the disk; SQLite's writers share a commit
SELECT 1;

-- add_events: store a batch of the events of a run that this process executes; nothing is stored after an erasure, or if the run was cancelled and ?7 is neither that cancellation nor rollback
INSERT INTO run_events (thread, seq, since, until, body) SELECT r.thread, r.seq, ?1, ?2, ?3 FROM runs r
WHERE r.thread = ?4 AND r.seq = ?5 AND r.owner = ?6 AND r.status = 'running' AND r.events = 1
AND (r.cancel IS NULL OR CAST(?7 AS text) IN (r.cancel, 'rollback')) ON CONFLICT DO NOTHING;

-- begin_events: the run begins anew; its events have higher numbers than those that were told before, stored or not
INSERT INTO run_events (thread, seq, since, until)
SELECT r.thread, r.seq, l.last, ((l.last >> CAST(?4 AS integer)) + 1) << CAST(?4 AS integer) FROM (
    SELECT thread, seq, (SELECT coalesce(max(e.until), ?3) FROM run_events e WHERE e.thread = runs.thread AND e.seq = runs.seq) AS last
    FROM runs WHERE thread = ?1 AND seq = ?2
) AS l JOIN runs r ON r.thread = l.thread AND r.seq = l.seq WHERE r.owner = ?5 AND r.status = 'running' RETURNING since, until;

-- events_after: what some runs of a thread told after an event, in order; by its key, which no other thread of its id gets
-- as many rows and as many bytes as are given, but at least one row
SELECT t.thread_id, r.run_id, e.since, e.until, e.body FROM (
    SELECT n.*, sum(n.size) OVER (ORDER BY n.seq, n.since) - n.size AS bytes_before FROM (
        SELECT thread, seq, since, coalesce(length(body), 0) AS size FROM run_events
        WHERE thread = ?1 AND seq >= ?2 AND seq <= ?3 AND until > ?4 ORDER BY seq, since LIMIT ?5
    ) AS n
) AS p JOIN run_events e ON e.thread = p.thread AND e.seq = p.seq AND e.since = p.since
JOIN threads t ON t.thread = e.thread JOIN runs r ON r.thread = e.thread AND r.seq = e.seq
WHERE p.bytes_before < ?6 ORDER BY e.seq, e.since;

-- newest_event: the last of them, and how its run stands
SELECT e.seq, e.until, r.status FROM run_events e JOIN runs r ON r.thread = e.thread AND r.seq = e.seq
WHERE e.thread = ?1 AND e.seq >= ?2 AND e.seq <= ?3 AND e.until > ?4 ORDER BY e.seq DESC, e.since DESC LIMIT 1;

-- drop_events: those up to an event, of some runs of a thread
DELETE FROM run_events WHERE thread = ? AND seq >= ? AND seq <= ? AND until <= ? RETURNING 0;

-- drop_left: the events of a run that is no more
DELETE FROM run_events WHERE thread = ?1 AND seq = ?2 AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.thread = ?1 AND r.seq = ?2);

-- keep_seq: no other run takes its number, by which events of a thread are told apart
INSERT INTO run_events (thread, seq, since, until) SELECT t.thread, CAST(?2 AS bigint), 0, 0 FROM threads t
WHERE t.thread = ?1 AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.thread = ?1 AND r.seq = ?2) ON CONFLICT DO NOTHING;

-- without_events: what some runs of a thread tell is stored no more
UPDATE runs SET events = 0 WHERE thread = ? AND seq >= ? AND seq <= ? AND events = 1;

-- mark_erased: mark the runs that are in progress at an erasure, so that their events, error and request are not stored
UPDATE runs SET events = -1 WHERE thread = ? AND status = 'running';

-- aged_events: runs that ended long ago, whose events are stored
SELECT thread, seq FROM runs WHERE events = 1 AND updated_at < ? AND status NOT IN ('delayed', 'pending', 'running') ORDER BY updated_at LIMIT ?;

-- move_events: the thread has another key
UPDATE run_events SET thread = ? WHERE thread = ?;
