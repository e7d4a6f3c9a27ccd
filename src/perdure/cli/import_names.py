"""Find the thread of an imported conversation that has no id.

Its id is a hash of the user and of the first messages, up to the first message that no existing
thread has at this place. A conversation that equals an existing thread, or continues it, belongs to
that thread. Former versions made the id of the name of the file and the position in it. Their
threads are found by their first messages, and keep their ids.
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
"""The metadata key of an imported checkpoint for the id of the message with which it ends."""
_GAP: Final = (
    16  # the search ends after so many successive ids without a thread; threads may be deleted
)
_PLACE: Final = re.compile(r"(-\d+(\.\d+)*)?")  # follows the name of the file in a former id


class _StoredThread(NamedTuple):
    """The messages of a thread in the database.

    Attributes:
        ids: The ids of all messages, including those on branches.
        ends: The last message of each imported branch.
        signatures: The signatures of all messages; see `_signature`.
        last: The signatures of the last messages of imported branches.
    """

    ids: frozenset[str]
    ends: frozenset[str]
    signatures: frozenset[str]
    last: frozenset[str]

    def may_continue(self, said: Sequence[str], shared: int) -> bool:
        """Return whether a conversation may belong to the thread, judged by its signatures `said`.

        It does not if the thread has other messages after the `shared` ones.
        """
        if not shared or shared == len(said):
            return True
        return said[shared] in self.signatures or said[shared - 1] in self.last


class ThreadNames:
    """Finds the threads of conversations without ids.

    Args:
        saver: The checkpointer with the threads.
        prefix: The beginning of the id of each thread.
        user: The user of conversations that name none.
    """

    def __init__(self, saver: Checkpointer, prefix: str, user: str) -> None:
        self._saver, self._prefix, self._user = saver, prefix, user
        self._stored: dict[str, _StoredThread | None] = {}
        self._former: dict[str, dict[str, list[str]]] = {}
        self._taken: set[tuple[object, str, str]] = set()
        self._equal = Counter[tuple[object, str]]()  # how many equal conversations a file had

    def name(self, draft: Conversation) -> Conversation:
        """Return the conversation with the id of its thread, without the prefix."""
        if draft.unnamed is None or not draft.nodes:
            return draft
        prefixes = self._prefix_ids(draft)
        file, whole = draft.unnamed.file, prefixes[-1]
        said = [_signature(draft.nodes[key].message) for key in draft.way(draft.leaf)]
        fresh, gap = "", 0
        talk: Conversation | None = None
        for id, count_same, is_former in self._candidates(draft, prefixes):
            stored = None if (file, id, whole) in self._taken else self._read(id)
            if stored is not None and stored.may_continue(said, count_same):
                talk = draft.unnamed.build(id, not is_former)
                if _is_same(talk, stored):
                    break
            talk, gap = None, 0 if self._stored.get(id) else gap + 1
            if not fresh and self._read(id) is None:
                fresh = id
            if fresh and (gap > _GAP or id not in prefixes):
                break
        talk = talk or draft.unnamed.build(fresh, True)
        number = 2 + self._equal[file, whole]
        is_numbered = talk.id == derive_id(whole, number)
        self._taken.add((file, talk.id, whole))
        if is_numbered:
            self._equal[file, whole] += 1
        self._stored.pop(talk.id, None)  # the import will write to it
        return talk

    def _candidates(
        self, draft: Conversation, prefixes: Sequence[str]
    ) -> Iterator[tuple[str, int, bool]]:
        """Yield the ids that the thread may have.

        Each comes with the number of messages that the thread surely shares with the conversation,
        and with a flag that says whether a former version made the id.
        """
        for id in self._find_former(draft):
            yield id, 0, True
        for shared, id in enumerate(prefixes, 1):
            yield id, shared, False
        taken = self._equal[draft.unnamed.file, prefixes[-1]] if draft.unnamed else 0
        for number in count(2 + taken):  # for equal conversations in one file
            yield derive_id(prefixes[-1], number), len(prefixes), False

    def _prefix_ids(self, draft: Conversation) -> list[str]:
        """Return an id for each beginning of the conversation, the shortest first."""
        id = str(draft.about.get("user_id") or draft.about.get("owner") or self._user)
        ids = []
        for key in draft.way(draft.leaf):
            node = draft.nodes[key]
            id = derive_id(id, _signature(node.message), node.at)
            ids.append(id)
        return ids

    def _read(self, id: str) -> _StoredThread | None:
        if id not in self._stored:
            self._stored[id] = self._load(self._prefix + id)
        return self._stored[id]

    def _load(self, thread_id: str) -> _StoredThread | None:
        if self._saver.head(thread_id) is None:
            return None
        items = self._saver.history(thread_id, missing_ok=True)
        messages = [item.value for item in items if isinstance(item.value, BaseMessage)]
        found = self._saver.checkpoints(thread_id, checkpoint_ns="")
        imported = [info for info in found if NODE in info.metadata]
        inner = {info.parent_id for info in imported}
        ends = {info.metadata[NODE] for info in imported if info.checkpoint_id not in inner}
        ids = frozenset(str(message.id) for message in messages)
        last = frozenset(_signature(message) for message in messages if message.id in ends)
        said = frozenset(map(_signature, messages))
        return _StoredThread(ids, frozenset(ends), said, last)

    def _find_former(self, draft: Conversation) -> list[str]:
        """Return the ids of threads of former versions that begin with the same messages."""
        assert draft.unnamed is not None
        stem = draft.unnamed.stem
        if stem not in self._former:
            self._former[stem] = self._index_former(stem)
        index, found = self._former[stem], list[str]()
        for key in draft.way(draft.leaf) if index else ():
            also = index.get(_signature(draft.nodes[key].message), [])
            narrowed = [id for id in found if id in also] if found else also
            if not narrowed:
                break
            found = narrowed
        return found

    def _index_former(self, stem: str) -> dict[str, list[str]]:
        """Index the threads that former versions made of a file: their ids by signature."""
        index = defaultdict[str, list[str]](list)
        for head in self._saver.heads(prefix=self._prefix + stem, limit=sys.maxsize):
            id = head.thread_id.removeprefix(self._prefix)
            stored = self._read(id) if _PLACE.fullmatch(id.removeprefix(stem)) else None
            for signature in stored.signatures if stored is not None else ():
                index[signature].append(id)
        return index


def _is_same(talk: Conversation, stored: _StoredThread) -> bool:
    """Return whether a conversation equals a stored thread, continues it, or is its beginning."""
    way = talk.way(talk.leaf)
    known = next((n for n, key in enumerate(way) if key not in stored.ids), len(way))
    return known == len(way) or (known > 0 and way[known - 1] in stored.ends)


def _signature(message: BaseMessage) -> str:
    """Return the role, content and tool calls of a message as text, equal in each import."""
    calls = [(call["name"], call["args"]) for call in getattr(message, "tool_calls", ())]
    parts: list[Any] = [message.type, message.content, calls]
    return json.dumps(parts, sort_keys=True, default=str)
