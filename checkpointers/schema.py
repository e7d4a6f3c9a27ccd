"""The tables of the checkpointers, as numbered steps; a step that has shipped is never edited.

Keys of `checkpoints` and `items` are composed: `namespace << 32 | seq` and `log << 32 | position`.
So a thread's rows lie together, and a range of them is a range of keys.
"""

from __future__ import annotations

from perdure.storage.database import Migration

SQLITE = Migration(
    "checkpointers",
    (
        """
        CREATE TABLE threads (
            thread INTEGER PRIMARY KEY AUTOINCREMENT,
            thread_id TEXT NOT NULL UNIQUE,
            seq INTEGER NOT NULL DEFAULT 0,
            swept INTEGER NOT NULL DEFAULT 0,
            checkpoints INTEGER NOT NULL DEFAULT 0,
            items INTEGER NOT NULL DEFAULT 0,
            bytes INTEGER NOT NULL DEFAULT 0,
            created_at REAL NOT NULL,
            updated_at REAL NOT NULL
        ) STRICT;
        CREATE INDEX threads_activity ON threads (updated_at);
        CREATE TABLE lines (
            line INTEGER PRIMARY KEY AUTOINCREMENT,
            thread INTEGER NOT NULL,
            ns TEXT NOT NULL,
            pinned INTEGER NOT NULL DEFAULT 0,
            UNIQUE (thread, ns)
        ) STRICT;
        CREATE TABLE lanes (
            lane INTEGER PRIMARY KEY AUTOINCREMENT,
            thread INTEGER NOT NULL,
            name TEXT NOT NULL,
            next INTEGER NOT NULL DEFAULT 0,
            UNIQUE (thread, name)
        ) STRICT;
        CREATE TABLE log (
            id INTEGER PRIMARY KEY,
            h INTEGER NOT NULL,
            body BLOB NOT NULL
        ) STRICT;
        CREATE INDEX log_h ON log (h);
        CREATE TABLE checkpoints (
            id INTEGER PRIMARY KEY,
            line INTEGER NOT NULL,
            uid ANY NOT NULL,
            parent ANY,
            put_at REAL NOT NULL,
            body BLOB NOT NULL,
            UNIQUE (line, uid)
        ) STRICT;
        CREATE TABLE writes (
            line INTEGER NOT NULL,
            uid ANY NOT NULL,
            task ANY NOT NULL,
            path TEXT NOT NULL,
            body BLOB NOT NULL,
            PRIMARY KEY (line, uid, task)
        ) STRICT, WITHOUT ROWID;
        CREATE TABLE tags (
            tag INTEGER NOT NULL,
            checkpoint INTEGER NOT NULL,
            PRIMARY KEY (tag, checkpoint)
        ) STRICT, WITHOUT ROWID
        """,
        """
        ALTER TABLE lines RENAME TO namespaces;
        ALTER TABLE namespaces RENAME COLUMN line TO namespace;
        ALTER TABLE lanes RENAME TO logs;
        ALTER TABLE logs RENAME COLUMN lane TO log;
        ALTER TABLE logs DROP COLUMN next;
        ALTER TABLE log RENAME TO items;
        ALTER TABLE checkpoints RENAME COLUMN line TO namespace;
        ALTER TABLE checkpoints ADD COLUMN began INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE writes RENAME COLUMN line TO namespace;
        ALTER TABLE threads RENAME COLUMN swept TO generation;
        ALTER TABLE threads DROP COLUMN checkpoints;
        ALTER TABLE threads DROP COLUMN items;
        ALTER TABLE threads DROP COLUMN bytes
        """,
    ),
)
