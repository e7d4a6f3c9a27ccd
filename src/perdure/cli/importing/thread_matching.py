"""Find the thread that matches an imported conversation without an id.

The thread id is a hash of the user and the conversation's first messages. Usually, the thread id is
a hash of the user and of only the first message of the conversation. The thread id is a hash. If a
different thread already has this thread id, a new hash is computed that also covers the next
message of the conversation. A conversation is assigned to an existing thread if it is part of the
thread or continues one of the thread's branches. Earlier versions of perdure built the thread id
from the file name and the conversation's position in the file. Threads imported by an earlier
version of perdure are recognised by their first messages, and keep their ids.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple

from langchain_core.messages import BaseMessage

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.cli.importing.conversation import Conversation, derive_id

NODE: Final = "imported"
"""The metadata of an imported checkpoint contains the id of its last message under this key."""
# The search for a conversation's thread stops if more than this many consecutive candidate ids are
# unused. A candidate id is unused if no stored thread has the id. If the search finds no matching
# thread, the conversation is stored under the first unused candidate id.
_MAX_ID_GAP: Final = 16
# Earlier versions of perdure built thread ids from a file name and an optional numeric suffix, such
# as "-3" or "-3.1".
_FORMER_ID_SUFFIX: Final = re.compile(r"(-\d+(\.\d+)*)?")


class _StoredThread(NamedTuple):
    """The ids and signatures of a stored thread's messages.

    Attributes:
        ids: The ids of all messages, including those on branches.
        branch_ends: The id of the last message of each imported branch.
        signatures: The signatures of all messages; see `_serialize_message_for_comparison`.
        end_signatures: The signatures of the last messages of imported branches.
    """

    ids: frozenset[str]
    branch_ends: frozenset[str]
    signatures: frozenset[str]
    end_signatures: frozenset[str]

    def can_be_continued_by(
        self, conversation_signatures: Sequence[str], shared_count: int
    ) -> bool:
        """Return whether the conversation could be a part or a continuation of this stored thread.

        If the conversation and the thread begin with the same messages, and the conversation has
        further messages, one of two conditions must be true: the thread contains the conversation's
        next message, or one of the thread's imported branches ends with the last shared message.

        Args:
            conversation_signatures: The signatures of the conversation's messages.
            shared_count: The number of first messages that the conversation and the thread are
                known to share.
        """
        return (
            not shared_count
            or shared_count == len(conversation_signatures)
            or conversation_signatures[shared_count] in self.signatures
            or conversation_signatures[shared_count - 1] in self.end_signatures
        )


class ThreadNames:
    """Finds or creates a thread id for each imported conversation that has no id.

    Args:
        saver: The checkpointer with the threads.
        prefix: The beginning of the id of each thread.
        user: The user of conversations that name none.
    """

    def __init__(self, saver: Checkpointer, prefix: str, user: str) -> None:
        self._saver, self._prefix, self._user = saver, prefix, user
        # Caches stored threads by candidate thread id. The value is None if there is no stored
        # thread with this id.
        self._stored_threads: dict[str, _StoredThread | None] = {}
        # Caches the results of `_find_earlier_version_thread_ids_by_signature`, keyed by file stem.
        self._former_ids_by_stem: dict[str, dict[str, list[str]]] = {}
        # Stores the ids that this import has assigned. Each element is a tuple of the file, the
        # assigned id, and a hash of all messages in the conversation's main branch.
        self._assigned: set[tuple[object, str, str]] = set()
        # Maps a tuple of a file and a hash of a conversation's messages to a number. The number
        # says how many duplicates of the conversation have been found in the file.
        self._equal_counts = Counter[tuple[object, str]]()

    def assign_thread_id(self, draft: Conversation) -> Conversation:
        """Choose a thread id for a conversation, and return the conversation with this id.

        The thread id consists of the `prefix` of this `ThreadNames`, followed by the conversation's
        id. A conversation that already has an id, or has no messages, is returned unchanged.
        """
        if draft.unnamed is None or not draft.nodes:
            return draft
        prefix_ids = self._derive_candidate_thread_id_of_each_prefix(draft)
        file, full_id = draft.unnamed.file, prefix_ids[-1]
        signatures = [
            _serialize_message_for_comparison(draft.nodes[key].message)
            for key in draft.list_message_ids_from_root(draft.leaf)
        ]
        # `unused_id` is the first candidate id that does not belong to a stored thread. `gap`
        # counts consecutive candidate ids without a stored thread, and restarts at 0 when a
        # candidate id belongs to a stored thread.
        unused_id, gap = "", 0
        conversation: Conversation | None = None
        for id, shared_count, is_former in self._iter_candidate_thread_ids(draft, prefix_ids):
            # If this thread id has already been assigned to an identical conversation in the same
            # file, do not assign it to this conversation, too.
            stored = None if (file, id, full_id) in self._assigned else self._get_stored_thread(id)
            if stored is not None and stored.can_be_continued_by(signatures, shared_count):
                conversation = draft.unnamed.build(id, not is_former)
                if _is_part_or_continuation_of_thread(conversation, stored):
                    break
            conversation = None
            gap = 0 if self._stored_threads.get(id) else gap + 1
            if not unused_id and self._get_stored_thread(id) is None:
                unused_id = id
            if unused_id and (gap > _MAX_ID_GAP or id not in prefix_ids):
                break
        conversation = conversation or draft.unnamed.build(unused_id, True)
        self._assigned.add((file, conversation.id, full_id))
        # Identical conversations in a file get ids that are derived from consecutive numbers. If
        # this conversation's id was derived from a number, increment the number for the next
        # identical conversation in this file.
        if conversation.id == derive_id(full_id, 2 + self._equal_counts[file, full_id]):
            self._equal_counts[file, full_id] += 1
        # Remove the thread from the cache, because the import is about to change the thread.
        self._stored_threads.pop(conversation.id, None)
        return conversation

    def _iter_candidate_thread_ids(
        self, draft: Conversation, prefix_ids: Sequence[str]
    ) -> Iterator[tuple[str, int, bool]]:
        """Yield candidate ids for the conversation's thread, in the order in which to try them.

        Yields:
            The candidate id without the prefix, the number of first messages that a thread with
            this id is known to share with the conversation, and a flag. The flag is True if an
            earlier version of perdure built the id.
        """
        for id in self._find_ids_of_threads_imported_by_earlier_version(draft):
            yield id, 0, True
        for shared_count, id in enumerate(prefix_ids, 1):
            yield id, shared_count, False
        equal_count = self._equal_counts[draft.unnamed.file, prefix_ids[-1]] if draft.unnamed else 0
        # If a file contains the same conversation several times, the copies are numbered so that
        # their thread ids differ.
        for number in count(2 + equal_count):
            yield derive_id(prefix_ids[-1], number), len(prefix_ids), False

    def _derive_candidate_thread_id_of_each_prefix(self, draft: Conversation) -> list[str]:
        """Return one candidate thread id for each prefix of a conversation's list of messages.

        The nth id in the list is derived from the first n messages of the conversation's main
        branch.

        The prefixes of the main branch are its first message, its first two messages, and so on, up
        to the whole branch. The id of a prefix is a hash of the user and the messages in the
        prefix.
        """
        id = str(draft.metadata.get("user_id") or draft.metadata.get("owner") or self._user)
        ids = []
        for key in draft.list_message_ids_from_root(draft.leaf):
            node = draft.nodes[key]
            id = derive_id(id, _serialize_message_for_comparison(node.message), node.created_at)
            ids.append(id)
        return ids

    def _get_stored_thread(self, id: str) -> _StoredThread | None:
        """Return the stored thread for a candidate thread id, or None if no such thread exists."""
        if id not in self._stored_threads:
            self._stored_threads[id] = self._load_stored_thread(self._prefix + id)
        return self._stored_threads[id]

    def _load_stored_thread(self, thread_id: str) -> _StoredThread | None:
        """Read a thread's messages from the database, and return their ids and signatures.

        A message's signature is the text that `_serialize_message_for_comparison` returns.

        Return None if the thread does not exist.
        """
        if self._saver.head(thread_id) is None:
            return None
        messages = [
            item.value
            for item in self._saver.history(thread_id, missing_ok=True)
            if isinstance(item.value, BaseMessage)
        ]
        imported = [
            info
            for info in self._saver.checkpoints(thread_id, checkpoint_ns="")
            if NODE in info.metadata
        ]
        parent_ids = {info.parent_id for info in imported}
        branch_ends = {
            info.metadata[NODE] for info in imported if info.checkpoint_id not in parent_ids
        }
        return _StoredThread(
            ids=frozenset(str(message.id) for message in messages),
            branch_ends=frozenset(branch_ends),
            signatures=frozenset(map(_serialize_message_for_comparison, messages)),
            end_signatures=frozenset(
                _serialize_message_for_comparison(message)
                for message in messages
                if message.id in branch_ends
            ),
        )

    def _find_ids_of_threads_imported_by_earlier_version(self, draft: Conversation) -> list[str]:
        """Return the ids of the threads that have the longest common prefix with the conversation.

        Search only threads that an earlier version of perdure imported. If none of the searched
        threads contains the conversation's first message, return an empty list.
        """
        assert draft.unnamed is not None
        stem = draft.unnamed.file_stem
        if stem not in self._former_ids_by_stem:
            self._former_ids_by_stem[stem] = self._find_earlier_version_thread_ids_by_signature(
                stem
            )
        index, candidates = self._former_ids_by_stem[stem], list[str]()
        for key in draft.list_message_ids_from_root(draft.leaf) if index else ():
            ids_with_message = index.get(
                _serialize_message_for_comparison(draft.nodes[key].message), []
            )
            narrowed = (
                [id for id in candidates if id in ids_with_message]
                if candidates
                else ids_with_message
            )
            if not narrowed:
                break
            candidates = narrowed
        return candidates

    def _find_earlier_version_thread_ids_by_signature(self, file_stem: str) -> dict[str, list[str]]:
        """Map message signatures to the ids of previously imported threads.

        Only threads that an earlier version of perdure imported from a file with the stem
        `file_stem` are included. The stem of a file is its name without the extension. The returned
        dict maps each message signature to the ids of the threads that contain the message.
        """
        index = defaultdict[str, list[str]](list)
        for head in self._saver.heads(prefix=self._prefix + file_stem, limit=sys.maxsize):
            id = head.thread_id.removeprefix(self._prefix)
            stored = (
                self._get_stored_thread(id)
                if _FORMER_ID_SUFFIX.fullmatch(id.removeprefix(file_stem))
                else None
            )
            for signature in stored.signatures if stored is not None else ():
                index[signature].append(id)
        return index


def _is_part_or_continuation_of_thread(conversation: Conversation, stored: _StoredThread) -> bool:
    """Return whether a conversation is part of a stored thread or continues one of its branches."""
    branch = conversation.list_message_ids_from_root(conversation.leaf)
    stored_count = next((n for n, key in enumerate(branch) if key not in stored.ids), len(branch))
    return stored_count == len(branch) or (
        stored_count > 0 and branch[stored_count - 1] in stored.branch_ends
    )


def _serialize_message_for_comparison(message: BaseMessage) -> str:
    """Return the role, content and tool calls of a message as JSON text.

    Each import of the same message produces an identical text, so the text can be used to recognise
    a message that was imported before.
    """
    calls = [(call["name"], call["args"]) for call in getattr(message, "tool_calls", ())]
    return json.dumps([message.type, message.content, calls], sort_keys=True, default=str)
