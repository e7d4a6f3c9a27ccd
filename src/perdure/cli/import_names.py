"""Find the thread that matches an imported conversation without an id.

The thread id is a hash of the user and the conversation's first messages. Usually, the hash covers
only the first message of the conversation. If a different thread already has the resulting id,
further messages are added to the hash, one at a time. A conversation is assigned to an existing
thread if it is part of the thread or continues one of the thread's branches. Earlier versions of
perdure built the thread id from the file name and the conversation's position in the file. Threads
imported by an earlier version of perdure are recognised by their first messages, and keep their
ids.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.cli.conversation import Conversation, derive_id

NODE: Final = "imported"
"""The metadata of an imported checkpoint contains the id of its last message under this key."""
# Maximum number of consecutive candidate thread ids for which no thread is stored. When it is
# exceeded, the search for a conversation's thread ends.
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
        """Return whether the conversation could belong to this stored thread.

        If a conversation and a thread start with the same messages, the conversation can belong to
        the thread only if the conversation's next message is in the thread or follows the end of
        one of the thread's branches.

        Args:
            conversation_signatures: The signatures of the conversation's messages.
            shared_count: The number of first messages that the conversation and the thread are
                known to share.
        """
        if not shared_count or shared_count == len(conversation_signatures):
            return True
        return (
            conversation_signatures[shared_count] in self.signatures
            or conversation_signatures[shared_count - 1] in self.end_signatures
        )


class _CandidateId(NamedTuple):
    """A candidate id for the thread of an imported conversation.

    Attributes:
        id: The id, without the prefix.
        shared_count: The number of first messages that a thread with this id is known to share with
            the conversation.
        is_of_earlier_version: Whether an earlier version of perdure built the id.
    """

    id: str
    shared_count: int
    is_of_earlier_version: bool = False


class ThreadNames:
    """Finds or creates a thread id for each imported conversation that has no id.

    Args:
        saver: The checkpointer with the threads.
        prefix: The beginning of the id of each thread.
        user: The user of conversations that name none.
    """

    def __init__(self, saver: Checkpointer, prefix: str, user: str) -> None:
        self._saver, self._prefix, self._user = saver, prefix, user
        # Caches the stored thread of each candidate id, or None if no thread has this id.
        self._stored_threads: dict[str, _StoredThread | None] = {}
        # Caches the results of `_map_message_signatures_to_former_thread_ids`, keyed by file stem.
        self._former_ids_by_stem: dict[str, dict[str, list[str]]] = {}
        # The ids that this import has assigned. Each element consists of the file, the assigned id,
        # and a hash of all of the conversation's messages.
        self._assigned: set[tuple[object, str, str]] = set()
        # Number of duplicates of each conversation found so far in a file. The key consists of the
        # file and a hash of all of the conversation's messages.
        self._equal_counts = Counter[tuple[object, str]]()

    def assign_thread_id(self, draft: Conversation) -> Conversation:
        """Assign a conversation to a thread, and return the conversation with the resulting id.

        The thread id consists of the `prefix` of this `ThreadNames`, followed by the conversation's
        id. A conversation that already has an id, or has no messages, is returned unchanged.
        """
        if draft.unnamed is None or not draft.nodes:
            return draft
        prefix_ids = self._derive_id_of_each_message_prefix(draft)
        file, full_id = draft.unnamed.file, prefix_ids[-1]
        signatures = [
            _serialize_message_for_comparison(draft.nodes[key].message)
            for key in draft.list_message_ids_from_root(draft.leaf)
        ]
        # `unused_id` is the first candidate id that no thread uses. `gap` is the number of
        # consecutive candidate ids, up to the current one, that no thread uses.
        unused_id, gap = "", 0
        conversation: Conversation | None = None
        for id, shared_count, is_former in self._iter_candidate_thread_ids(draft, prefix_ids):
            # If this id has already been assigned to an identical conversation in the same file, do
            # not assign it again.
            stored = None if (file, id, full_id) in self._assigned else self._get_stored_thread(id)
            if stored is not None and stored.can_be_continued_by(signatures, shared_count):
                conversation = draft.unnamed.build(id, not is_former)
                if _belongs_to_thread(conversation, stored):
                    break
            conversation = None
            gap = 0 if self._stored_threads.get(id) else gap + 1
            if not unused_id and self._get_stored_thread(id) is None:
                unused_id = id
            if unused_id and (gap > _MAX_ID_GAP or id not in prefix_ids):
                break
        conversation = conversation or draft.unnamed.build(unused_id, True)
        number = 2 + self._equal_counts[file, full_id]
        is_numbered = conversation.id == derive_id(full_id, number)
        self._assigned.add((file, conversation.id, full_id))
        # If the conversation was assigned the next numbered id, increment the count, so that the
        # next identical conversation in this file gets a higher number.
        if is_numbered:
            self._equal_counts[file, full_id] += 1
        # Remove the thread from the cache, because the import is about to change the thread.
        self._stored_threads.pop(conversation.id, None)
        return conversation

    def _iter_candidate_thread_ids(
        self, draft: Conversation, prefix_ids: Sequence[str]
    ) -> Iterator[_CandidateId]:
        """Yield candidate ids for the conversation's thread, in the order in which to try them."""
        for id in self._find_ids_of_threads_imported_by_earlier_version(draft):
            yield _CandidateId(id, 0, is_of_earlier_version=True)
        for shared_count, id in enumerate(prefix_ids, 1):
            yield _CandidateId(id, shared_count)
        equal_count = self._equal_counts[draft.unnamed.file, prefix_ids[-1]] if draft.unnamed else 0
        # If a file contains the same conversation several times, the copies are numbered so that
        # their thread ids differ.
        for number in count(2 + equal_count):
            yield _CandidateId(derive_id(prefix_ids[-1], number), len(prefix_ids))

    def _derive_id_of_each_message_prefix(self, draft: Conversation) -> list[str]:
        """Return a candidate thread id for each prefix of the main branch, shortest prefix first.

        Each id is a hash of the user and of the messages in the prefix.
        """
        id = str(draft.metadata.get("user_id") or draft.metadata.get("owner") or self._user)
        ids = []
        for key in draft.list_message_ids_from_root(draft.leaf):
            node = draft.nodes[key]
            id = derive_id(id, _serialize_message_for_comparison(node.message), node.created_at)
            ids.append(id)
        return ids

    def _get_stored_thread(self, id: str) -> _StoredThread | None:
        """Return the stored thread with a candidate id, or None if there is none."""
        if id not in self._stored_threads:
            self._stored_threads[id] = self._load_stored_thread(self._prefix + id)
        return self._stored_threads[id]

    def _load_stored_thread(self, thread_id: str) -> _StoredThread | None:
        """Read the ids and signatures of a thread's messages from the database.

        Return None if the thread does not exist.
        """
        if self._saver.head(thread_id) is None:
            return None
        items = self._saver.history(thread_id, missing_ok=True)
        messages = [item.value for item in items if isinstance(item.value, BaseMessage)]
        checkpoints = self._saver.checkpoints(thread_id, checkpoint_ns="")
        imported = [info for info in checkpoints if NODE in info.metadata]
        parent_ids = {info.parent_id for info in imported}
        branch_ends = {
            info.metadata[NODE] for info in imported if info.checkpoint_id not in parent_ids
        }
        ids = frozenset(str(message.id) for message in messages)
        end_signatures = frozenset(
            _serialize_message_for_comparison(message)
            for message in messages
            if message.id in branch_ends
        )
        signatures = frozenset(map(_serialize_message_for_comparison, messages))
        return _StoredThread(ids, frozenset(branch_ends), signatures, end_signatures)

    def _find_ids_of_threads_imported_by_earlier_version(self, draft: Conversation) -> list[str]:
        """Return the ids of threads that share the longest message prefix with the conversation.

        Search only threads that an earlier version of perdure imported. If no thread contains the
        first message, return an empty list.
        """
        assert draft.unnamed is not None
        stem = draft.unnamed.file_stem
        if stem not in self._former_ids_by_stem:
            self._former_ids_by_stem[stem] = self._map_message_signatures_to_former_thread_ids(stem)
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

    def _map_message_signatures_to_former_thread_ids(self, file_stem: str) -> dict[str, list[str]]:
        """Map message signatures to the ids of previously imported threads.

        The dict covers the threads that an earlier version of perdure imported from a file whose
        stem (the name without the extension) is `file_stem`. Each thread is indexed by the
        signatures of all of its messages.
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


def _belongs_to_thread(conversation: Conversation, stored: _StoredThread) -> bool:
    """Return whether a conversation is part of a stored thread or continues one of its branches."""
    branch = conversation.list_message_ids_from_root(conversation.leaf)
    stored_count = next((n for n, key in enumerate(branch) if key not in stored.ids), len(branch))
    return stored_count == len(branch) or (
        stored_count > 0 and branch[stored_count - 1] in stored.branch_ends
    )


def _serialize_message_for_comparison(message: BaseMessage) -> str:
    """Return the role, content and tool calls of a message as JSON text.

    The text is identical each time the same message is imported.
    """
    calls = [(call["name"], call["args"]) for call in getattr(message, "tool_calls", ())]
    parts: list[Any] = [message.type, message.content, calls]
    return json.dumps(parts, sort_keys=True, default=str)
