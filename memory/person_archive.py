"""The archive of a person: lines of JSON with everything that belongs to them.

The first line is the header. Then come a line for each thread, in the form of `perdure export`; a
line for each version of each item, in the form of `WholeStore.export`; and the runs and crons as a
record. `perdure import` reads the threads and items back, and never runs or schedules the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.person_rows import PersonRows
from perdure.checkpointers.records import CronRow, RunRow
from perdure.checkpointers.titles import about, existing_head
from perdure.errors import InvalidMessages, PerdureError, UnknownThread
from perdure.memory.person_namespaces import PersonNamespaces
from perdure.memory.records import AUTHOR, PREVIOUS, RESERVED
from perdure.memory.thread_export import build_thread_export
from perdure.stores.base import Namespace
from perdure.stores.whole_store import WholeStore

HEADER: Final = "perdure_archive"
"""The key of the header; its value is the version of the format."""
VERSION: Final = 1
RUN: Final = "run"
CRON: Final = "cron"
_ITEM: Final = frozenset(("namespace", "key", "value"))


def is_header(value: Mapping[str, Any]) -> bool:
    """Return whether an object is the header of an archive."""
    return isinstance(value.get(HEADER), int) and isinstance(value.get("user"), str)


def is_item(value: Mapping[str, Any]) -> bool:
    """Return whether an object of an archive is a version of an item."""
    return value.keys() >= _ITEM and isinstance(value["namespace"], list)


def is_record(value: Mapping[str, Any]) -> bool:
    """Return whether an object of an archive records a run or a cron."""
    return len(value) == 1 and isinstance(value.get(RUN, value.get(CRON)), dict)


def iter_archive(
    rows: PersonRows,
    saver: Checkpointer,
    store: WholeStore,
    threads: Sequence[str],
    found: PersonNamespaces,
) -> Iterator[dict[str, Any]]:
    """Yield the lines of the archive of a person."""
    yield {
        HEADER: VERSION,
        "user": rows.user,
        "exported_at": datetime.now(UTC).isoformat(),
        "threads": len(threads),
        "namespaces": [[*namespace] for namespace in found.own],
        "other_namespaces": [[*namespace] for namespace in found.others],
    }
    for thread_id in threads:
        yield from _iter_thread(saver, thread_id)
    for namespace in _notes_last(found.own):
        yield from store.export(namespace)
    yield from _iter_written(store, found.written, rows.user)
    own = frozenset(threads)
    for thread_id in threads:
        for run in rows.runs(thread_id):
            yield {RUN: build_run_record(run)}
    for cron in rows.crons(own)[0]:
        yield {CRON: build_cron_record(cron)}


def _iter_written(
    store: WholeStore, written: Sequence[tuple[Namespace, str]], user: str
) -> Iterator[dict[str, Any]]:
    """Yield the versions that a person wrote into the memories of teams.

    Earlier texts of other authors, which a version keeps, are left out.
    """
    keys = frozenset(written)
    for namespace in dict.fromkeys(namespace for namespace, _ in written):
        for line in store.export(namespace):
            place = tuple(line["namespace"]), line["key"]
            is_own = (line.get("provenance") or {}).get(AUTHOR) == user
            if place in keys and place[0] == namespace and is_own:
                value = dict(line["value"])
                if PREVIOUS in value:
                    previous = value[PREVIOUS]
                    value[PREVIOUS] = [each for each in previous if each.get(AUTHOR) == user]
                yield {**line, "value": value}


def _iter_thread(saver: Checkpointer, thread_id: str) -> Iterator[dict[str, Any]]:
    """Yield the line of a thread, unless it was deleted meanwhile.

    A thread whose messages cannot be exported has none in its line, and says why.
    """
    try:
        if saver.head(thread_id) is not None:
            yield build_thread_export(saver, thread_id)
    except UnknownThread:
        return
    except (InvalidMessages, PerdureError) as exc:
        newest = existing_head(saver, thread_id).metadata
        named = about(saver, thread_id, newest)
        yield {"thread_id": thread_id, **named, "messages": [], "problem": str(exc)}


def _notes_last(namespaces: Sequence[Namespace]) -> list[Namespace]:
    """Return namespaces with those of perdure's notes after all others.

    An import would refuse an item if it read the tombstone of an earlier text first.
    """
    return sorted(namespaces, key=lambda namespace: namespace[0] == RESERVED)


def build_run_record(run: RunRow) -> dict[str, Any]:
    """Build the record of a run: its ids, times and status, what it was asked, and its error."""
    live = run.live
    return {
        "run_id": live.run_id,
        "thread_id": live.thread_id,
        "graph_id": live.graph,
        "status": live.status,
        "created_at": _format_time(run.created_at),
        "updated_at": _format_time(run.updated_at),
        "user": run.about.get("user"),
        "assistant_id": run.about.get("assistant_id"),
        "metadata": run.about.get("metadata"),
        "request": (run.request or {}).get("request"),
        "error": run.error,
    }


def build_cron_record(cron: CronRow) -> dict[str, Any]:
    """Build the record of a cron: its ids, times and owner, and what its runs are asked."""
    names = ("user", "acting_for", "graph", "metadata", "payload")
    return {
        "cron_id": cron.cron_id,
        "thread_id": cron.thread_id,
        "created_at": _format_time(cron.created_at),
        "updated_at": _format_time(cron.updated_at),
        "next_run_date": _format_time(cron.next_at),
        **{name: cron.content.get(name) for name in names},
    }


def _format_time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()
