"""Define how `perdure copy` copies the tables of a checkpointer and of perdure's server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from perdure.checkpointers import owner_record
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import (
    ClientMetadata,
    build_checkpoint_associated_data,
    build_client_search_keys,
    build_item_associated_data,
    build_thread_search_keys,
    compute_item_hash,
    compute_metadata_index_tags,
    compute_user_tags,
)
from perdure.checkpointers.removal_records import build_removal_record_associated_data
from perdure.checkpointers.values import unpack
from perdure.cli.copied_tables import Table, Tables
from perdure.run_tables.assistants import build_assistant_associated_data
from perdure.run_tables.component import (
    create_server_tables,
    has_server_tables,
    load_server_sql,
)
from perdure.storage.flow import NO_LIMIT, Flow, Row, Statement, fetch_rows

# `_MAX_TEXT` sorts after every text value that occurs in a primary key.
_MAX_TEXT: Final = "\U0010ffff"

# Values of `Table.owner` and `Table.joins` for tables whose rows belong to threads, namespaces or
# logs
_OF_THREAD: Final = "t.thread_id", "LEFT JOIN threads t ON t.thread_key = r.thread_key"


_OF_NAMESPACE: Final = (
    "t.thread_id, n.checkpoint_ns",
    "LEFT JOIN namespaces n ON n.namespace_key = r.namespace_key "
    "LEFT JOIN threads t ON t.thread_key = n.thread_key",
)


_OF_LOG: Final = (
    "t.thread_id, l.channel",
    "LEFT JOIN logs l ON l.log_key = r.row_key >> 32 "
    "LEFT JOIN threads t ON t.thread_key = l.thread_key",
)


_TAGS: Final = Table("tags", "tag, checkpoint_key", "")


# Tables of the server that are copied if the source database contains them. The tables of run
# events and webhooks are not copied.
_SERVER_TABLES: Final = (
    Table(
        "runs",
        "thread_key, seq, run_id, status, owner, graph_id, attempt, cancel_action, created_at, "
        "updated_at, not_before, details, error, request",
        *_OF_THREAD,
        key="thread_key, seq",
        max_key_part=NO_LIMIT,
        name_columns="graph_id",
        large_columns="details, error, request",
        associated_data=lambda row: [
            (name, row[0], row[3]) for name in ("about", "error", "request")
        ],
    ),
    Table(
        "assistants",
        "version, assistant_id, created_at, latest_since, content",
        "'assistant ' || r.assistant_id",
        key="version, assistant_id",
        large_columns="content",
        associated_data=lambda row: [build_assistant_associated_data(row[2], row[1])],
        max_key_part=_MAX_TEXT,
    ),
    Table(
        "crons",
        "created_at, cron_id, thread_id, next_at, updated_at, content",
        "'cron ' || r.cron_id",
        key="created_at, cron_id",
        large_columns="content",
        associated_data=lambda row: [("cron", row[2])],
        max_key_part=_MAX_TEXT,
    ),
)


@dataclass
class ThreadTables(Tables):
    """The tables of a checkpointer, and those of the server if the database has them.

    A thread's search keys and the index tags of its user depend on the encryption key of the
    database. When a thread is copied, they are recomputed with the encryption key of the target
    database.
    """

    reader: CheckpointReader
    has_server_tables: bool
    noun = "thread"
    component_tables = (
        Table(
            "threads",
            "thread_key, thread_id, last_seq, generation, created_at, updated_at, may_wait, "
            "status, ttl_minutes, ttl_since, ttl_keeps_latest, newest_removal, search_keys, "
            "client_search_keys, user_tag, owner_tag, client_user_tag, client_owner_tag, "
            "client_metadata, list_entry",
            "r.thread_id",
            key="thread_key",
            name_columns="thread_id",
            large_columns="client_metadata, list_entry",
            associated_data=lambda row: [("client", row[0]), ("title", row[0])],
        ),
        Table(
            "namespaces",
            "namespace_key, thread_key, checkpoint_ns, explicit_head",
            *_OF_THREAD,
            key="namespace_key",
            name_columns="checkpoint_ns",
        ),
        Table(
            "logs",
            "log_key, thread_key, channel",
            *_OF_THREAD,
            key="log_key",
            name_columns="channel",
        ),
        Table(
            "items",
            "row_key, content_hash, stored_at, body",
            *_OF_LOG,
            key="row_key",
            large_columns="body",
            # A content hash of 0 marks an alias, which is a row that refers to another item. Any
            # other content hash depends on the database's encryption key, and can differ between
            # the source and the target. Therefore, compare only whether both hashes are 0 or both
            # are different from 0.
            flag_positions=[3],
            associated_data=lambda row: [
                build_item_associated_data(row[0], row[1], row[2] & 0xFFFFFFFF)
            ],
        ),
        Table(
            "checkpoints",
            "row_key, namespace_key, checkpoint_id, parent_id, run_start, put_at, body",
            *_OF_NAMESPACE,
            key="row_key",
            indexed_columns="checkpoint_id",
            large_columns="body",
            id_positions=[4, 5],
            associated_data=lambda row: [
                build_checkpoint_associated_data(row[0], row[1], (row[2], *row[4:8]))
            ],
        ),
        Table(
            "writes",
            "namespace_key, checkpoint_id, task_id, task_path, body",
            *_OF_NAMESPACE,
            key="namespace_key, checkpoint_id, task_id",
            name_columns="task_path",
            indexed_columns="checkpoint_id, task_id",
            large_columns="body",
            id_positions=[3, 4],
            associated_data=lambda row: [("writes", *row[:2], *row[3:6])],
        ),
        Table(
            "removals",
            "removed_at, thread_hash, number, body",
            "'a removal record'",
            key="removed_at, thread_hash",
            large_columns="body",
            associated_data=lambda row: [build_removal_record_associated_data(row[2], row[3])],
        ),
    )

    @classmethod
    def from_checkpointer(cls, saver: Checkpointer) -> ThreadTables:
        """Return the tables of a checkpointer, and those of the server if the database has them.

        Raises:
            SchemaMismatch: This version of perdure does not know all tables of the database.
        """
        reader, database = saver.parts.reader, saver.database
        database.read(saver.parts.maintenance.extensions.load)
        has_tables = database.read(lambda: has_server_tables(database))
        seal = reader.seal
        return cls(database, reader.sql, seal.unseal, seal.seal, reader, has_tables)

    @property
    def tables(self) -> Sequence[Table]:
        """See `Tables.tables`."""
        return (*super().tables, *(_SERVER_TABLES if self.has_server_tables else ()))

    def decrypt_row(self, table: Table, row: Row) -> Row:
        """Decrypt a row, and set its search keys and the index tags of its user to None.

        The search keys and the tags must not be compared between the source and the target,
        because they depend on the encryption key, which can be different in the target.
        """
        columns = super().decrypt_row(table, row)
        if table.name == "threads":
            return (*columns[:-8], *(None,) * 6, *columns[-2:])
        return columns

    def encrypt_row(self, table: Table, row: Row) -> Row:
        """Recompute a thread's search keys and tags or an item's content hash, and encrypt it."""
        if table.name == "threads":
            # In the column for the search keys, an empty byte string means that the thread has no
            # checkpoints.
            seal, search_keys = self.reader.seal, None if row[3] else b""
            text, _, encoded = (None,) * 3 if row[-1] is None else unpack(row[-1])
            metadata = {} if encoded is None else self.reader.codec.decode(encoded)
            if text is not None and encoded is not None:
                search_keys = build_thread_search_keys(seal, row[0], text, metadata)
            client = None if row[-2] is None else ClientMetadata(*json.loads(row[-2]))
            client_search_keys = client and build_client_search_keys(seal, row[0], client)
            tags = (
                *compute_user_tags(seal, metadata),
                *compute_user_tags(seal, client.metadata if client else {}),
            )
            row = (*row[:-8], search_keys, client_search_keys, *tags, *row[-2:])
        if table.name == "items":
            new_hash = compute_item_hash(self.reader.seal, row[2] >> 32, row[-1]) if row[3] else 0
            row = (*row[:3], new_hash, *row[4:])
        return super().encrypt_row(table, row)

    def read_settings(self) -> Flow[list[Row]]:
        """Return a checkpointer's settings as a single row with two values.

        The first value in the returned row is the secret key with which thread ids are hashed
        before they are stored in removal records. The second value in the returned row is True if
        the database is marked as one in which organisations can own threads.
        """
        yield from self.reader.removals.load_hash_key(read_only=True)
        return [(self.reader.removals.key, (yield from owner_record.read_organisations_mark()))]

    def store_settings_after_copy(self, settings: list[Row]) -> Flow[None]:
        """See `Tables.store_settings_after_copy`."""
        yield from super().store_settings_after_copy(settings)
        if self.has_server_tables:
            yield load_server_sql(self.database)("analyze_tables")
        if settings[0][0] is not None:
            yield from self.reader.removals.replace_key(settings[0][0])
        if settings[0][1]:
            yield from owner_record.add_organisations_mark()

    def read_removals(self) -> set[Row]:
        """Return the columns `thread_hash` and `number` of all rows in the table `removals`."""
        sql = "SELECT thread_hash, number FROM removals"
        return {*self.database.read(lambda: fetch_rows(sql), snapshot=False)}

    def build_inserts(self, table: Table, rows: Sequence[Row]) -> list[Statement]:
        """Encrypt rows, and return the SQL statements that insert the rows.

        For the table `checkpoints`, also return the statements that insert the index tags of the
        checkpoint metadata. Checkpoints can be found by these tags.
        """
        statements = super().build_inserts(table, rows)
        if table.name == "checkpoints":
            statements += _TAGS.build_inserts(
                [
                    (tag, row[2])
                    for row in rows
                    for tag in compute_metadata_index_tags(
                        self.reader.seal, self.reader.codec.decode(unpack(row[-1])[0][1])
                    )
                ]
            )
        return statements


def build_thread_table_pair(
    source: Checkpointer, target: Checkpointer
) -> tuple[ThreadTables, ThreadTables]:
    """Return the `ThreadTables` of the source checkpointer and the target checkpointer.

    Threads are copied from the source checkpointer to the target checkpointer.

    If the source has the server's tables, they are created in the target.

    Raises:
        SchemaMismatch: This version of perdure does not know all tables of a database.
    """
    source_tables = ThreadTables.from_checkpointer(source)
    if source_tables.has_server_tables:
        create_server_tables(target)
    return source_tables, ThreadTables.from_checkpointer(target)
