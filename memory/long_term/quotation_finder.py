"""Find passages in other people's threads that quote a person's texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.labels import CALLER, CALLER_ACTION
from perdure.checkpointers.reports import HistoryItem
from perdure.errors import PerdureError
from perdure.memory.conversation import get_role
from perdure.run_tables.records import CronRow
from perdure.stores.base import Namespace
from perdure.stores.whole_store import WholeStore

# Minimum length, in characters, of a text that counts as a quotation. Shorter texts are ignored,
# because different people might write the same short text by chance.
_MIN_LENGTH: Final = 16
_MESSAGE_ACTIONS: Final = ("said", "scheduled")
"""Values of the checkpoint metadata `CALLER_ACTION` for callers that sent a message.

A checkpoint whose metadata has one of these values and also names a caller contains a message that
another user sent.
"""


class QuotationFinder:
    """Finds texts that quote a person.

    A text counts as quoting a person if it contains any of that person's texts. A person's texts
    are ignored if they are shorter than 16 characters.

    Args:
        texts: The texts that the person wrote.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        # The person's texts, indexed by their first 16 characters. Each value is the set of
        # complete texts that begin with the key.
        self._texts: dict[str, set[str]] = defaultdict(set)
        for text in texts:
            stripped = text.strip()
            if len(stripped) >= _MIN_LENGTH:
                self._texts[stripped[:_MIN_LENGTH]].add(stripped)

    def __bool__(self) -> bool:
        return bool(self._texts)

    def is_quoted_in(self, text: str) -> bool:
        """Return whether `text` contains any of the texts that the person wrote.

        Only texts of at least 16 characters are compared.
        """
        return any(
            text.startswith(candidate, start)
            for start in range(len(text) - _MIN_LENGTH + 1)
            for candidate in self._texts.get(text[start : start + _MIN_LENGTH], ())
        )


def find_ids_of_quoting_threads_for_each_finder(
    saver: Checkpointer, thread_ids: Iterable[str], finders: Sequence[QuotationFinder]
) -> list[tuple[str, ...]]:
    """Find the threads that quote a person, separately for each `QuotationFinder`.

    Each `QuotationFinder` contains the texts of one person.

    Args:
        saver: The checkpointer.
        thread_ids: The threads to read.
        finders: The finders.

    Returns:
        For each finder, the ids of the threads that quote its person, in the order of `thread_ids`.
    """
    thread_ids_by_finder = [list[str]() for _ in finders]
    for thread_id in thread_ids if any(finders) else ():
        texts = [message.text for message in iter_messages(saver, thread_id)]
        for finder, ids in zip(finders, thread_ids_by_finder, strict=True):
            if finder and any(map(finder.is_quoted_in, texts)):
                ids.append(thread_id)
    return [tuple(ids) for ids in thread_ids_by_finder]


def iter_messages(saver: Checkpointer, thread_id: str) -> Iterator[BaseMessage]:
    """Yield the messages of all branches of a thread. Stop if the thread cannot be read."""
    for item in _iter_history_items_with_messages(saver, thread_id):
        yield item.value


def _iter_history_items_with_messages(saver: Checkpointer, thread_id: str) -> Iterator[HistoryItem]:
    """Yield the items in a thread's history that contain messages."""
    with suppress(PerdureError):
        for item in saver.history(thread_id, missing_ok=True):
            if isinstance(item.value, BaseMessage):
                yield item


class HumanTexts(NamedTuple):
    """The texts of human messages in a person's threads.

    Attributes:
        own: Texts from the person, or from a backend on behalf of the person.
        foreign: Texts that other users, or crons of other users, sent to these threads. Texts that
            are also in `own` are left out.
    """

    own: frozenset[str]
    foreign: frozenset[str]


def read_human_texts_by_sender(saver: Checkpointer, thread_ids: Iterable[str]) -> HumanTexts:
    """Read the human messages in a person's threads, and separate them by sender.

    The person's own texts are returned in `HumanTexts.own`, and other users' texts in
    `HumanTexts.foreign`.
    """
    own, foreign = set[str](), set[str]()
    for thread_id in thread_ids:
        times = _read_times_of_checkpoints_with_other_users_messages(saver, thread_id)
        for item in _iter_history_items_with_messages(saver, thread_id):
            if get_role(item.value) == "human":
                # `stored_at` is the timestamp of the checkpoint that first stored the message.
                texts = foreign if item.stored_at in times else own
                texts.add(item.value.text.strip())
    return HumanTexts(frozenset(own), frozenset(foreign - own))


def _read_times_of_checkpoints_with_other_users_messages(
    saver: Checkpointer, thread_id: str
) -> set[datetime]:
    """Return the timestamps of checkpoints that add a message from a user other than the owner."""
    # `checkpoints` raises an error if the thread has no checkpoints or was deleted concurrently.
    with suppress(PerdureError):
        return {
            datetime.fromisoformat(checkpoint.ts)
            for checkpoint in saver.checkpoints(thread_id)
            if checkpoint.metadata.get(CALLER_ACTION) in _MESSAGE_ACTIONS
            and CALLER in checkpoint.metadata
        }
    return set()


def iter_cron_texts(crons: Iterable[CronRow]) -> Iterator[str]:
    """Yield all strings in the inputs and commands that crons send to their threads."""
    for cron in crons:
        payload = cron.content.get("payload") or {}
        for name in ("input", "command"):
            yield from _iter_strings_in_json_value(payload.get(name))


def _iter_strings_in_json_value(value: Any) -> Iterator[str]:
    """Yield the texts within a JSON value."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _iter_strings_in_json_value(part)


def iter_item_texts(store: WholeStore, namespaces: Iterable[Namespace]) -> Iterator[str]:
    """Yield the texts of every item version in the given namespaces."""
    for namespace in namespaces:
        for line in store.export(namespace):
            text: Any = line["value"].get("text")
            if isinstance(text, str):
                yield text
