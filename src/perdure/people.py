"""People: everything that belongs to a person is exported, or forgotten, in one call.

A person is the user whose memories, messages and profile a thread belongs to. `export` yields an
archive that `perdure import` reads. `plan` reports what `forget` would erase and writes nothing.
`forget` may be cut off at any moment and called again: what is left is found again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.person_rows import PersonRows
from perdure.effects import run
from perdure.errors import UnknownPerson
from perdure.memory.options import text
from perdure.memory.person_archive import iter_archive
from perdure.memory.person_namespaces import (
    PersonNamespaces,
    check_templates,
    find_person_namespaces,
)
from perdure.memory.records import StoreAdapter
from perdure.stores.whole_store import WholeStore

__all__ = ["aexport", "export"]

_LINES: Final = 100  # lines of an archive that are read at once for a coroutine


def export(
    user: str,
    saver: Checkpointer,
    store: WholeStore,
    *,
    namespaces: Sequence[Sequence[str]] = (),
    owners_are_people: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield the archive of a person, an object for each line of JSON.

    It has the threads with all branches, the items with all versions (memories, profile,
    instructions, examples, chat memory and notes), and the runs and crons as a record; see
    docs/people.md. Others may write meanwhile: each thread and each key is as it was at one moment.

    Args:
        user: The name of the person.
        saver: The threads.
        store: The items.
        namespaces: Further templates with the label `"{user_id}"`, as in `("notes", "{user_id}")`.
        owners_are_people: Whether the `owner` of a thread without a user is a person. It is not if
            a handler of an Auth file sets it.

    Raises:
        UnknownPerson: Nothing belongs to a person of this name.
    """
    rows = _rows_of(user, saver, owners_are_people)
    threads, found = _find(rows, store, namespaces)
    return iter_archive(rows, saver, store, threads, found)


async def aexport(*args: Any, **options: Any) -> AsyncIterator[dict[str, Any]]:
    """See `export`."""
    lines = await asyncio.to_thread(export, *args, **options)
    while page := await asyncio.to_thread(lambda: list(islice(lines, _LINES))):
        for line in page:
            yield line


def _rows_of(user: str, saver: Checkpointer, owners_are_people: bool) -> PersonRows:
    text("user", user, "the name of a person, not blank")
    return PersonRows(saver, user, owners_are_people=owners_are_people)


def _find(
    rows: PersonRows, store: WholeStore, namespaces: Sequence[Sequence[str]]
) -> tuple[list[str], PersonNamespaces]:
    """Find the threads and namespaces of a person.

    Raises:
        UnknownPerson: There are none, and no crons either.
    """
    threads, templates = rows.threads(), check_templates(namespaces)
    found: PersonNamespaces = run(
        find_person_namespaces(StoreAdapter(store), rows.user, templates, threads)
    )
    if not (threads or found.own or rows.crons(frozenset())[0]):
        raise unknown(rows.user)
    return threads, found


def unknown(user: str) -> UnknownPerson:
    """Build the error for a name that nothing belongs to."""
    return UnknownPerson(
        f"nobody of this name: no thread, item or cron belongs to {user!r}; names are compared "
        "exactly, 'perdure threads' shows whose threads there are"
    )
