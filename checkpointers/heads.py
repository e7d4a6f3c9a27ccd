"""Make an older checkpoint the head of its namespace, as a rewind does.

`writer.py` chooses the head when a new checkpoint is stored.
"""

from __future__ import annotations

from typing import Final

from perdure.checkpointers.address import Address
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import (
    build_client_metadata_update,
    decrypt_client_metadata,
    encode_id_for_storage,
)
from perdure.storage.flow import Flow

# Bit mask that extracts a checkpoint's sequence number from its row key.
_SEQ_MASK: Final = 0xFFFFFFFF


def make_checkpoint_head_if_exists(reader: CheckpointReader, address: Address) -> Flow[bool]:
    """Make a checkpoint the head. Return whether the checkpoint exists.

    The new head may contain changes by users other than the person to whom the thread belongs. The
    server records whether other users have ever changed a person's thread. If the record says that
    other users have changed the thread, the function updates the record. The updated record says
    that these changes came after the person's last message.
    """
    packed_id = encode_id_for_storage(address.checkpoint_id)
    rows = yield reader.sql(
        "checkpoint_with_keys", packed_id, address.thread_id, address.checkpoint_ns
    )
    for thread_key, _, _, namespace_key, *row in rows:
        yield reader.sql("set_explicit_head", row[0] & _SEQ_MASK, namespace_key)
        yield reader.sql("mark_head_changed", thread_key)
        if not address.checkpoint_ns:
            yield from reader.update_thread_list_entry_from_head(address.thread_id, tuple(row))
    if rows and not address.checkpoint_ns:
        yield from _mark_changes_by_other_users_as_recent(reader, address.thread_id)
    return bool(rows)


def _mark_changes_by_other_users_as_recent(reader: CheckpointReader, thread_id: str) -> Flow[None]:
    """Mark other users' changes to a thread as recent, after the thread was rewound.

    The thread's client metadata contain a record of other users' changes.

    If other users have ever changed the thread, the updated record states that they did so
    after the last message from the thread's own user. After a rewind, perdure cannot determine
    whether the other users' changes came before or after the last message from the thread's own
    user. perdure therefore assumes that the changes came after this message.
    """
    for thread_key, _, _, sealed in (yield reader.sql("lock_client_metadata", thread_id)):
        client = decrypt_client_metadata(reader.seal, thread_id, sealed)
        if client is not None and client.changes_by_other_users != "none":
            client = client.treat_changes_by_other_users_as_recent()
            yield build_client_metadata_update(
                reader.sql, reader.seal, thread_key, thread_id, client
            )
