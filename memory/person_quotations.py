"""Quotations of a person's texts in other people's threads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from langchain_core.messages import BaseMessage

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import PerdureError
from perdure.memory.conversation import role
from perdure.stores.base import Namespace
from perdure.stores.whole_store import WholeStore

_LENGTH: Final = 16  # characters: a shorter text may be the same by chance


class QuotationFinder:
    """Finds texts that contain one of a person's texts of 16 characters or more."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts: dict[str, set[str]] = defaultdict(set)  # by their beginning
        for text in texts:
            stripped = text.strip()
            if len(stripped) >= _LENGTH:
                self._texts[stripped[:_LENGTH]].add(stripped)

    def __bool__(self) -> bool:
        return bool(self._texts)

    def is_quoted_in(self, text: str) -> bool:
        """Return whether a text contains one of the person's texts."""
        for start in range(len(text) - _LENGTH + 1):
            known = self._texts.get(text[start : start + _LENGTH])
            if known and any(text.startswith(each, start) for each in known):
                return True
        return False

    def find_threads(self, saver: Checkpointer, thread_ids: Iterable[str]) -> list[str]:
        """Return the ids of the threads in whose messages one of the texts is quoted."""
        if not self:
            return []
        return [
            thread_id
            for thread_id in thread_ids
            if any(self.is_quoted_in(message.text) for message in iter_messages(saver, thread_id))
        ]


def iter_messages(saver: Checkpointer, thread_id: str) -> Iterator[BaseMessage]:
    """Yield the messages of a thread, also those of branches, as far as they can be read."""
    with suppress(PerdureError):
        for item in saver.history(thread_id, missing_ok=True):
            if isinstance(item.value, BaseMessage):
                yield item.value


def iter_said_texts(saver: Checkpointer, thread_ids: Iterable[str]) -> Iterator[str]:
    """Yield what the users of threads said."""
    for thread_id in thread_ids:
        for message in iter_messages(saver, thread_id):
            if role(message) == "human":
                yield message.text


def iter_item_texts(store: WholeStore, namespaces: Iterable[Namespace]) -> Iterator[str]:
    """Yield the texts of all versions of the items in namespaces."""
    for namespace in namespaces:
        for line in store.export(namespace):
            text: Any = line["value"].get("text")
            if isinstance(text, str):
                yield text
