-- find_thread: its key and the counter that tells whether anything was deleted from it
SELECT thread, seq, swept FROM threads WHERE thread_id = ?;

-- state: a thread and one of its namespaces, as they are before a write
SELECT t.thread, t.seq, t.swept, t.updated_at, l.line, l.pinned,
CASE l.pinned WHEN 0 THEN coalesce((SELECT max(id) FROM checkpoints WHERE id >= l.line << 32 AND id < (l.line + 1) << 32) & 0xFFFFFFFF, 0) ELSE l.pinned END
FROM threads t LEFT JOIN lines l ON l.thread = t.thread AND l.ns = ? WHERE t.thread_id = ?;

-- new_thread: a thread nobody has written to yet
INSERT INTO threads (thread_id, created_at, updated_at) VALUES (?, ?, ?) RETURNING thread;

-- grow: what a write added to the thread
UPDATE threads SET seq = ?, checkpoints = checkpoints + ?, items = items + ?, bytes = bytes + ?
WHERE thread = ?;

-- touch: when a thread was last written to; apart, so that its index is not written each time
UPDATE threads SET updated_at = ? WHERE thread = ?;

-- new_line: the first checkpoint of a namespace
INSERT INTO lines (thread, ns) VALUES (?, ?) RETURNING line;

-- pin: the checkpoint from which the next run starts; 0: the newest
UPDATE lines SET pinned = ? WHERE line = ?;

-- thread_lines: all namespaces of a thread
SELECT l.line, l.ns, CASE l.pinned WHEN 0 THEN coalesce((SELECT max(id) FROM checkpoints WHERE id >= l.line << 32 AND id < (l.line + 1) << 32) & 0xFFFFFFFF, 0) ELSE l.pinned END
FROM lines l WHERE l.thread = ? ORDER BY l.line;

-- find_lane: the log of one channel
SELECT lane FROM lanes WHERE thread = ? AND name = ?;

-- lane_name: which channel a log belongs to
SELECT name FROM lanes WHERE lane = ?;

-- new_lane: the first item of a channel
INSERT INTO lanes (thread, name) VALUES (?, ?) RETURNING lane;

-- take_positions: reserve places at the end of a log; a place is never given twice
UPDATE lanes SET next = next + ? WHERE lane = ? RETURNING next;

-- thread_lanes: all logs of a thread
SELECT lane, name, next FROM lanes WHERE thread = ? ORDER BY lane;

-- same_hash: candidates for being the items already
SELECT id, h, body FROM log WHERE h = ?;

-- same_hashes: the same for many at once
SELECT id, h, body FROM log WHERE h IN (SELECT value FROM json_each(?));

-- add_item: one item, at its place
INSERT INTO log (id, h, body) VALUES (?, ?, ?);

-- items_between: a range of a log
SELECT id, body FROM log WHERE id >= ? AND id < ? ORDER BY id;

-- block_at: one item, and whose it is
SELECT t.thread_id, l.name, i.body
FROM log i JOIN lanes l ON l.lane = i.id >> 32 JOIN threads t ON t.thread = l.thread WHERE i.id = ?;

-- count_between: how many items of a range are there
SELECT count(*) FROM log WHERE id >= ? AND id < ?;

-- item_keys: the items of a log, without their bodies
SELECT id, length(body) FROM log WHERE id >= ? AND id < ?;

-- drop_items: items nothing refers to
DELETE FROM log WHERE id >= ? AND id < ?;

-- find_checkpoint: one checkpoint by its id
SELECT id, uid, parent, body FROM checkpoints WHERE line = ? AND uid = ?;

-- checkpoint_at: one checkpoint by its place
SELECT id, uid, parent, body FROM checkpoints WHERE id = ?;

-- head_of: the checkpoint a run starts from, and the keys that lead to it
SELECT t.thread, t.swept, l.line, c.id, c.uid, c.parent, c.body
FROM threads t JOIN lines l ON l.thread = t.thread JOIN checkpoints c
ON c.id = CASE l.pinned WHEN 0 THEN (SELECT max(id) FROM checkpoints WHERE id >= l.line << 32 AND id < (l.line + 1) << 32)
ELSE (l.line << 32) + l.pinned END
WHERE t.thread_id = ? AND l.ns = ?;

-- checkpoint_of: one checkpoint by its id, and the keys that lead to it
SELECT t.thread, t.swept, l.line, c.id, c.uid, c.parent, c.body
FROM threads t JOIN lines l ON l.thread = t.thread JOIN checkpoints c ON c.line = l.line AND c.uid = ?
WHERE t.thread_id = ? AND l.ns = ?;

-- add_checkpoint: a checkpoint at its place
INSERT INTO checkpoints (id, line, uid, parent, put_at, body) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (line, uid) DO NOTHING RETURNING id;

-- replace_checkpoint: the same checkpoint, put once more
UPDATE checkpoints SET parent = ?, put_at = ?, body = ? WHERE id = ?;

-- line_checkpoints: a page of a line, newest first
SELECT id, uid, parent, body FROM checkpoints WHERE id >= ? AND id < ? ORDER BY id DESC LIMIT ?;

-- line_bodies: all of a line, newest first
SELECT id, uid, parent, body FROM checkpoints WHERE id >= ? AND id < ? ORDER BY id DESC;

-- rewrite_checkpoint: a checkpoint that forgets what was said before
UPDATE checkpoints SET body = ? WHERE id = ?;

-- set_counts: what a copied thread holds
UPDATE threads SET seq = ?, checkpoints = ?, items = ?, bytes = ? WHERE thread = ?;

-- line_page: a page of a line's places, newest first
SELECT id, uid FROM checkpoints WHERE id >= ? AND id < ? ORDER BY id DESC LIMIT ?;

-- line_keys: the places of a line's checkpoints, newest first
SELECT id, uid, parent, put_at FROM checkpoints WHERE id >= ? AND id < ? ORDER BY id DESC;

-- drop_checkpoint: one checkpoint
DELETE FROM checkpoints WHERE id = ?;

-- find_writes: what a task wrote already
SELECT path, body FROM writes WHERE line = ? AND uid = ? AND task = ?;

-- add_writes: what a task wrote, if it is the first of it
INSERT INTO writes (line, uid, task, path, body) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (line, uid, task) DO NOTHING RETURNING 1;

-- put_writes: what a task wrote
INSERT INTO writes (line, uid, task, path, body) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (line, uid, task) DO UPDATE SET path = excluded.path, body = excluded.body;

-- writes_of: what the tasks of a checkpoint wrote
SELECT task, path, body FROM writes WHERE line = ? AND uid = ?;

-- line_writes: the pending writes of a line
SELECT uid, task, path, body FROM writes WHERE line = ?;

-- drop_writes: the pending writes of a checkpoint
DELETE FROM writes WHERE line = ? AND uid = ?;

-- add_tag: make a checkpoint findable by one of its metadata values
INSERT OR IGNORE INTO tags (tag, checkpoint) VALUES (?, ?);

-- drop_tag: its opposite
DELETE FROM tags WHERE tag = ? AND checkpoint = ?;

-- tagged: checkpoints with a metadata value, newest first within a line
SELECT checkpoint FROM tags WHERE tag = ? ORDER BY checkpoint DESC;

-- tagged_in: the same within one line, below a place
SELECT checkpoint FROM tags WHERE tag = ? AND checkpoint >= ? AND checkpoint < ? ORDER BY checkpoint DESC;

-- thread_of_line: who a line belongs to
SELECT t.thread_id, l.ns, t.thread, t.swept FROM lines l JOIN threads t ON t.thread = l.thread WHERE l.line = ?;

-- swept: tell every process that items of the thread are gone
UPDATE threads SET swept = swept + 1, checkpoints = checkpoints - ?, items = items - ?, bytes = bytes - ?
WHERE thread = ?;

-- drop_line_checkpoints: a whole line
DELETE FROM checkpoints WHERE id >= ? AND id < ?;

-- drop_line_writes: a whole line's pending writes
DELETE FROM writes WHERE line = ?;

-- drop_lines: the lines of a thread
DELETE FROM lines WHERE thread = ?;

-- drop_lanes: the logs of a thread
DELETE FROM lanes WHERE thread = ?;

-- drop_thread: the thread itself
DELETE FROM threads WHERE thread = ?;

-- list_threads: a page, newest activity first
SELECT thread, thread_id, checkpoints, items, bytes, created_at, updated_at FROM threads
WHERE (updated_at, thread) < (?, ?) AND substr(thread_id, 1, length(?)) = ?
ORDER BY updated_at DESC, thread DESC LIMIT ?;

-- one_thread: the same, for one
SELECT thread, thread_id, checkpoints, items, bytes, created_at, updated_at FROM threads WHERE thread_id = ?;

-- thread_ids: every thread, in the order they came
SELECT thread, thread_id FROM threads WHERE thread > ? ORDER BY thread LIMIT ?;

-- totals: over the whole database
SELECT count(*), coalesce(sum(checkpoints), 0), coalesce(sum(items), 0), coalesce(sum(bytes), 0) FROM threads;
