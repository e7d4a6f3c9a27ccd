"""Store imported conversations as threads.

While a thread is short, a checkpoint is stored after every turn. As the thread grows, checkpoints
become less frequent, because storing them takes a large part of the import's time. If a checkpoint
were stored after every turn, importing a thread with 4,800 messages would take eight times as long.
For each conversation, the import selects certain messages, and stores a checkpoint after each
selected message. Which messages get a checkpoint depends only on the conversation's message tree. A
repeated import chooses the same messages as the interrupted import, and stores only the missing
checkpoints.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.base import Checkpoint, CheckpointTuple, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.import_metadata import TITLED
from perdure.checkpointers.labels import STATE_FROM_OTHERS
from perdure.checkpointers.put import TIMES_KEY, TITLE_CANDIDATES
from perdure.checkpointers.values import Continuation
from perdure.cli.importing.conversation import Conversation, get_creation_time
from perdure.cli.importing.thread_matching import NODE
from perdure.errors import UnknownThread
from perdure.memory.thread_messages import REMEMBER, REMEMBER_TURN, SEARCHED

# Limits how often an import stores a checkpoint at the end of a turn. With the value 32, the import
# stores this checkpoint only if the messages added since the previous checkpoint make up at least
# 1/32 of the branch's messages up to this point.
_CHECKPOINTS_PER_LENGTH: Final = 32


class _NewCheckpoint(NamedTuple):
    """A checkpoint stored by this import.

    The import caches each checkpoint that it has stored, so that the checkpoint need not be read
    from the database again.

    Attributes:
        end: The id of the last message of the checkpoint.
        length: The number of messages in the checkpoint.
        stored: The checkpoint without its messages.
    """

    end: str
    length: int
    stored: CheckpointTuple


class ThreadImport:
    """Stores one conversation in one thread.

    `_checkpoint_of_message` maps the id of each stored message to the id of the checkpoint that
    ends with this message. If no checkpoint ends with the message, its id is mapped to the oldest
    checkpoint that contains it. A message id is mapped to None if no new branch can start at the
    message. This happens if no checkpoint ends with the message, and the oldest checkpoint that
    contains the message has a parent that was deleted.

    Attributes:
        updated: The number of messages that this import completed.
        outdated: The number of incomplete messages that could not be completed, because the thread
            has changed since the earlier import.
    """

    def __init__(self, saver: Checkpointer, thread_id: str, conversation: Conversation) -> None:
        self._saver, self._conversation = saver, conversation
        self._thread = {"thread_id": thread_id, "checkpoint_ns": ""}
        try:
            self._checkpoints = saver.checkpoints(thread_id, checkpoint_ns="")
        except UnknownThread:
            self._checkpoints = []
        self._checkpoint_of_message: dict[str, str | None] = {}
        ids = {None, *(info.checkpoint_id for info in self._checkpoints)}
        for info in reversed(self._checkpoints):
            if NODE in info.metadata:
                ancestors_checkpoint_id = info.checkpoint_id if info.parent_id in ids else None
                self._record_checkpoint_of_message_and_ancestors(
                    info.metadata[NODE], info.checkpoint_id, ancestors_checkpoint_id
                )
        self._new_checkpoints: dict[str, _NewCheckpoint] = {}
        self.updated = self.outdated = 0
        # The id of the most recently stored checkpoint.
        self._last_stored_id: str | None = None

    def store_new_messages(self, advance: Callable[[int], None] = lambda count: None) -> int:
        """Store the messages that the thread does not contain yet.

        Args:
            advance: Called with the number of messages that have been processed.

        Returns:
            The number of new messages.
        """
        # The conversation's first message can be added only to an empty thread, or to a thread that
        # still contains its first checkpoint.
        can_start_at_root = not self._checkpoints or any(
            info.parent_id is None for info in self._checkpoints
        )
        checkpoint_ends, new = _choose_message_ids_to_checkpoint_after(self._conversation), 0
        for position, key in enumerate(self._conversation.nodes):
            if key not in checkpoint_ends:
                continue
            keys, parent = self._find_unstored_message_ids_and_parent_id(key)
            new_keys = [name for name in keys if name not in self._former_versions]
            if new_keys and (
                can_start_at_root if parent is None else self._checkpoint_of_message[parent]
            ):
                self._put_checkpoint(parent, keys)
                new += len(new_keys)
                advance(position)
        self._move_head_to_end_of_main_branch(bool(new))
        if self._checkpoints:
            self._replace_partly_imported_messages()
        return new

    def _replace_partly_imported_messages(self) -> None:
        """Repair messages that an earlier version of perdure skipped or stored only partially.

        A message that an earlier version of perdure skipped during an import is added to the
        imported thread. A message that an earlier version of perdure stored only partially is
        replaced with the complete message.

        The completed messages are stored in a new checkpoint after the head, so that the thread
        gets no new branch. An earlier version of perdure may have stored only part of a message.
        The complete message replaces the partial message only if the head checkpoint still contains
        the partial message. If an earlier version of perdure skipped a message, this method adds
        the message to the thread only if the head checkpoint contains the message's parent. The
        parent is the previous message in the conversation tree. The added message is inserted
        directly after its parent.
        """
        incomplete_texts = {
            key: text
            for key, text in self._conversation.former_texts.items()
            if key in self._checkpoint_of_message
            and _get_text_and_is_document(self._conversation.nodes[key].message)
            not in self._former_versions.get(key, ())
        }
        head = self._saver.get_tuple({"configurable": self._thread}) if incomplete_texts else None
        if head is None:
            return
        messages = list(head.checkpoint["channel_values"].get("messages", []))
        for key, text in incomplete_texts.items():
            node = self._conversation.nodes[key]
            ids = [getattr(message, "id", None) for message in messages]
            if text and key in ids and messages[ids.index(key)].text == text:
                messages[ids.index(key)] = node.message
                self.updated += 1
            elif not text and node.parent in ids and key not in self._former_versions:
                messages.insert(ids.index(node.parent) + 1, node.message)
                self.updated += 1
            else:
                self.outdated += 1
        if self.updated:
            self._put_child_checkpoint_with_messages(head, messages)

    def _put_child_checkpoint_with_messages(
        self, head: CheckpointTuple, messages: list[BaseMessage]
    ) -> None:
        """Store a checkpoint that contains the given messages as a child of the thread's head."""
        step = head.metadata.get("step", 0) + 1
        version = self._saver.get_next_version(
            head.checkpoint["channel_versions"].get("messages"), None
        )
        new: Checkpoint = {
            **head.checkpoint,
            "id": str(uuid6(clock_seq=step)),
            "channel_values": {**head.checkpoint["channel_values"], "messages": messages},
            "channel_versions": {**head.checkpoint["channel_versions"], "messages": version},
        }
        metadata: Any = {**head.metadata, "source": "update", "step": step}
        metadata.pop(TIMES_KEY, None)
        self._saver.put(head.config, new, metadata, {"messages": version})

    @cached_property
    def _former_versions(self) -> Mapping[str, set[tuple[str, bool]]]:
        """The texts of each message that the thread contained before this import, by message id.

        Each text is paired with a flag that is True if the text comes from a message version that
        contained a document; see `_get_text_and_is_document`. The thread's whole history is read to
        find the text of every earlier version of a message. Reading only the last message of each
        checkpoint is not enough, because one checkpoint can add several imported messages.
        """
        versions = defaultdict[str, set[tuple[str, bool]]](set)
        thread_id = self._thread["thread_id"]
        for item in self._saver.history(thread_id, missing_ok=True) if self._checkpoints else ():
            if isinstance(item.value, BaseMessage):
                versions[str(item.value.id)].add(_get_text_and_is_document(item.value))
        return versions

    def _find_unstored_message_ids_and_parent_id(
        self, last_message_id: str
    ) -> tuple[list[str], str | None]:
        """Return the ids of the unstored messages on the path from the root to a message.

        The path starts at the root of the conversation and ends with the message `last_message_id`.

        Returns:
            The ids of the unstored messages, oldest first, and the id of the stored message that
            the oldest unstored message follows. If no message on the path is stored, the id of the
            stored message is None.
        """
        keys: list[str] = []
        ancestor: str | None = last_message_id
        while ancestor is not None and ancestor not in self._checkpoint_of_message:
            keys.append(ancestor)
            ancestor = self._conversation.nodes[ancestor].parent
        return keys[::-1], ancestor

    def _record_checkpoint_of_message_and_ancestors(
        self, message_id: str, checkpoint_id: str, ancestors_checkpoint_id: str | None
    ) -> None:
        """Record the checkpoint whose last message is the given message.

        Ancestors of the message are mapped to `ancestors_checkpoint_id`, up to the first ancestor
        that already has a checkpoint.
        """
        self._checkpoint_of_message[message_id] = checkpoint_id
        node = self._conversation.nodes.get(message_id)
        while (
            node is not None
            and node.parent is not None
            and node.parent not in self._checkpoint_of_message
        ):
            self._checkpoint_of_message[node.parent] = ancestors_checkpoint_id
            node = self._conversation.nodes[node.parent]

    def _put_checkpoint(self, parent_message_id: str | None, message_ids: list[str]) -> None:
        """Store a checkpoint in which new messages follow the given parent message.

        The new checkpoint contains the messages up to the parent message, followed by the new
        messages. The method stores nothing if there are no new messages and the parent message is
        already the last message of a stored checkpoint.

        Args:
            parent_message_id: The id of the stored message that the new messages follow, or None.
            message_ids: The ids of the new messages.
        """
        batch = [self._conversation.nodes[key] for key in message_ids]
        base, messages, is_cut = None, list[BaseMessage](), False
        new_checkpoint = (
            None
            if parent_message_id is None
            else self._new_checkpoints.get(str(self._checkpoint_of_message[parent_message_id]))
        )
        # A checkpoint that this import has stored can be continued without being read from the
        # database. However, a thread with fewer than `TITLE_CANDIDATES` messages may not have a
        # title yet. Because `put` cannot derive the title from a `Continuation`, pass all messages
        # of such a thread to `put`.
        continued = (
            new_checkpoint
            if new_checkpoint
            and new_checkpoint.end == parent_message_id
            and new_checkpoint.length >= TITLE_CANDIDATES
            else None
        )
        if continued is not None:
            base, kept_count = continued.stored, continued.length
        else:
            base = (
                None
                if parent_message_id is None
                else self._read_checkpoint(str(self._checkpoint_of_message[parent_message_id]))
            )
            messages = base.checkpoint["channel_values"].get("messages", []) if base else []
            last = (
                None
                if parent_message_id is None
                else self._conversation.nodes[parent_message_id].message.id
            )
            positions = (n for n in range(len(messages), 0, -1) if messages[n - 1].id == last)
            kept_count = next(positions, len(messages))
            # The checkpoint of the parent message may contain later messages that are not part of
            # the imported branch.
            is_cut = kept_count < len(messages)
        if not batch and not is_cut:
            return
        checkpoint = base.checkpoint if base else empty_checkpoint()
        parent_config = None if base is None else base.parent_config if is_cut else base.config
        parent_config = parent_config or {"configurable": self._thread}
        step = base.metadata.get("step", 0) + (not is_cut) if base else 0
        version = self._saver.get_next_version(checkpoint["channel_versions"].get("messages"), None)
        added = [node.message for node in batch]
        channel = messages[:kept_count] + added if continued is None else Continuation(added)
        end = message_ids[-1] if message_ids else str(parent_message_id)
        created_at = self._conversation.find_message_creation_time(end)
        moment = (
            datetime.now(UTC) if created_at == math.inf else datetime.fromtimestamp(created_at, UTC)
        )
        new: Checkpoint = {
            **checkpoint,
            "id": str(uuid6(clock_seq=step)),
            "ts": moment.isoformat(),
            "channel_values": {"messages": channel},
            "channel_versions": {**checkpoint["channel_versions"], "messages": version},
        }
        metadata: Any = {
            "source": "update",
            "step": step,
            "parents": {},
            **self._conversation.metadata,
            NODE: end,
            **({TITLED: True} if "title" in self._conversation.metadata else {}),
        }
        times = [None if get_creation_time(node.message) else node.created_at for node in batch]
        metadata |= {TIMES_KEY: times} if any(times) else {}
        marks = [message.response_metadata for message in added]
        if any(False in (mark.get(REMEMBER_TURN), mark.get(REMEMBER)) for mark in marks):
            # At least one added message is marked as excluded from memory extraction. The server
            # from which the thread was exported may have marked the message because another user
            # wrote it. The export does not say why the message is marked, so assume that another
            # user wrote it.
            metadata[STATE_FROM_OTHERS] = True
        config = self._saver.put(parent_config, new, metadata, {"messages": version})
        self._last_stored_id, new["channel_values"] = new["id"], {}
        stored = CheckpointTuple(config, new, metadata, parent_config)
        self._new_checkpoints[new["id"]] = _NewCheckpoint(end, kept_count + len(batch), stored)
        self._record_checkpoint_of_message_and_ancestors(end, new["id"], new["id"])

    def _read_checkpoint(self, checkpoint_id: str) -> CheckpointTuple:
        """Read a checkpoint of the thread from the database."""
        stored = self._saver.get_tuple(
            {"configurable": {**self._thread, "checkpoint_id": checkpoint_id}}
        )
        assert stored is not None
        return stored

    def _move_head_to_end_of_main_branch(self, has_new_messages: bool) -> None:
        """Move the head to the end of the main branch, unless a run has continued the thread.

        Each checkpoint that is stored becomes the thread's head. The head is moved to the end of
        the main branch after all checkpoints have been stored. The thread's head may need to be
        moved even if this import stored nothing, because an earlier import may have been killed
        before it could move the head. An earlier import was probably killed if three conditions
        hold: the thread's head is its newest checkpoint, an import stored this checkpoint, and the
        checkpoint does not end with the main branch's last message.

        If a run stored a checkpoint in the thread before this import, the import does not move the
        head to the end of the main branch. Instead, the import restores the head that the thread
        had before the import. If an import was killed and one of its checkpoints is still the head,
        the head is moved to the newest checkpoint that was not written by an import.
        """
        leaf = self._conversation.leaf
        head = next((info for info in self._checkpoints if info.is_head), None)
        newest_not_imported = next(
            (info for info in self._checkpoints if NODE not in info.metadata), None
        )
        end_of_head = (
            head.metadata.get(NODE) if head is not None and head is self._checkpoints[0] else None
        )
        target = (
            newest_not_imported
            if newest_not_imported is not None and end_of_head is not None
            else head
        )
        target_id = target.checkpoint_id if target is not None else None
        is_head_outdated = has_new_messages or (
            end_of_head in self._conversation.nodes and end_of_head != leaf
        )
        if (
            newest_not_imported is None
            and is_head_outdated
            and leaf is not None
            and self._checkpoint_of_message.get(leaf)
        ):
            self._put_checkpoint(leaf, [])
            target_id = self._checkpoint_of_message[leaf]
        current_id = self._last_stored_id or (head and head.checkpoint_id)
        if target_id is not None and target_id != current_id:
            self._saver.rewind(self._thread["thread_id"], target_id)


def _get_text_and_is_document(message: BaseMessage) -> tuple[str, bool]:
    """Return a message's text and a flag that is True if the message is a document.

    Messages that contain documents can be found by search, but no memories are extracted from
    them.
    """
    return message.text, message.response_metadata.get(SEARCHED) is True


def _choose_message_ids_to_checkpoint_after(conversation: Conversation) -> set[str]:
    """Return the ids of the messages after which to store a checkpoint.

    A checkpoint is stored after each message that is a leaf or a branching point of the message
    tree. At the end of a turn, a checkpoint is stored if enough messages follow the last
    checkpoint.
    """
    followers: dict[str | None, list[str]] = defaultdict(list)
    for node in conversation.nodes.values():
        followers[node.parent].append(node.message.type)
    # `depths` maps each message id to two counts: the number of messages on the path from the root
    # to this message, and the number of messages on that path since the last checkpoint.
    depths: dict[str | None, tuple[int, int]] = {None: (0, 0)}
    ends = set()
    for key, node in conversation.nodes.items():
        depth, since = (count + 1 for count in depths[node.parent])
        follower_types = followers[key]
        is_due = since >= depth // _CHECKPOINTS_PER_LENGTH and follower_types == ["human"]
        if is_due or len(follower_types) != 1 or key == conversation.leaf:
            ends.add(key)
            since = 0
        depths[key] = depth, since
    return ends
