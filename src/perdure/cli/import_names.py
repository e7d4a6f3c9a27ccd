"""Which thread an imported conversation is that has no id of its own.

Its id is made of its user and of its messages, from the first one up to the first at which it
differs from the conversations that have threads already. A conversation that equals one of those,
or continues it, is the same thread. Former versions made the id of the name of the file and of the
place in it; their threads are found by what was said first, and go on under their ids.
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
from perdure.cli.conversation import Conversation, made_up_id

NODE: Final = "imported"
"""The metadata key of an imported checkpoint for the id of the message with which it ends."""
_GAP: Final = (
    16  # ids in a row without a thread, as of deleted ones, after which none is looked for
)
_PLACE: Final = re.compile(r"(-\d+(\.\d+)*)?")  # what follows the name of the file in a former id


class _StoredThread(NamedTuple):
    """What is known of a thread in the database.

    Attributes:
        ids: The ids of its messages, also of those on branches.
        ends: The last message of each imported branch.
        signatures: What its messages say; see `_signature`.
        last: What the last messages of imported branches say.
    """

    ids: frozenset[str]
    ends: frozenset[str]
    signatures: frozenset[str]
    last: frozenset[str]

    def may_continue(self, said: Sequence[str], shared: int) -> bool:
        """Return whether a conversation with this beginning may be the one of the thread.

        It is not if the thread has other messages after those that it shares.
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
        self._equal = Counter[tuple[object, str]]()  # numbers that equal conversations have taken

    def name(self, draft: Conversation) -> Conversation:
        """Return the conversation with the id of its thread, of which the prefix is no part."""
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
        is_numbered = talk.id == made_up_id(whole, number)
        self._taken.add((file, talk.id, whole))
        if is_numbered:
            self._equal[file, whole] += 1
        self._stored.pop(talk.id, None)  # it is written to
        return talk

    def _candidates(
        self, draft: Conversation, prefixes: Sequence[str]
    ) -> Iterator[tuple[str, int, bool]]:
        """Yield ids that the thread may have.

        Each comes with how many messages the thread is known to share with the conversation, and
        whether a former version made the id.
        """
        for id in self._find_former(draft):
            yield id, 0, True
        for shared, id in enumerate(prefixes, 1):
            yield id, shared, False
        taken = self._equal[draft.unnamed.file, prefixes[-1]] if draft.unnamed else 0
        for number in count(2 + taken):  # of equal conversations of one file
            yield made_up_id(prefixes[-1], number), len(prefixes), False

    def _prefix_ids(self, draft: Conversation) -> list[str]:
        """Return an id for each beginning of the conversation, the shortest first."""
        id = str(draft.about.get("user_id") or draft.about.get("owner") or self._user)
        ids = []
        for key in draft.way(draft.leaf):
            node = draft.nodes[key]
            id = made_up_id(id, _signature(node.message), node.at)
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
        """Return the ids of threads of former versions that begin with what this one says."""
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
        """Return the ids of former threads of a file by what their messages say."""
        index = defaultdict[str, list[str]](list)
        for head in self._saver.heads(prefix=self._prefix + stem, limit=sys.maxsize):
            id = head.thread_id.removeprefix(self._prefix)
            stored = self._read(id) if _PLACE.fullmatch(id.removeprefix(stem)) else None
            for signature in stored.signatures if stored is not None else ():
                index[signature].append(id)
        return index


def _is_same(talk: Conversation, stored: _StoredThread) -> bool:
    """Return whether a conversation equals that of a thread, continues it, or is its beginning."""
    way = talk.way(talk.leaf)
    known = next((n for n, key in enumerate(way) if key not in stored.ids), len(way))
    return known == len(way) or (known > 0 and way[known - 1] in stored.ends)


def _signature(message: BaseMessage) -> str:
    """Return what a message says, and calls, as text that is the same in each import."""
    calls = [(call["name"], call["args"]) for call in getattr(message, "tool_calls", ())]
    parts: list[Any] = [message.type, message.content, calls]
    return json.dumps(parts, sort_keys=True, default=str)
