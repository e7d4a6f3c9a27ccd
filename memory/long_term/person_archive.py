"""Write a person's archive, which contains all of the person's data as JSON Lines.

The first line of an archive is the header. After the header, the archive contains one line for each
thread, in the format of `perdure export`. After the threads, the archive contains one line for each
version of a store item, in the format of `WholeStore.export`. The archive ends with one line for
each run and each cron. `perdure import` imports the threads and store items from an archive.
`perdure import` ignores the records of runs and crons, so it neither starts runs nor creates crons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.import_metadata import read_import_metadata, read_thread_head_or_raise
from perdure.errors import InvalidMessages, PerdureError, UnknownThread
from perdure.memory.long_term.person_namespaces import PersonNamespaces
from perdure.memory.long_term.records import AUTHOR, PREVIOUS, RESERVED_LABEL
from perdure.memory.thread_export import build_thread_export
from perdure.run_tables.person_rows import PersonRows
from perdure.run_tables.records import CronRow, RunRow
from perdure.stores.base import Namespace
from perdure.stores.whole_store import WholeStore

HEADER_KEY: Final = "perdure_archive"
"""The key in the header under which the version of the archive format is stored."""
FORMAT_VERSION: Final = 1
RUN_KEY: Final = "run"
CRON_KEY: Final = "cron"
SELF: Final = "self"
BACKEND: Final = "a backend"
OTHER: Final = "somebody else"
"""The values of `sent_by` and `made_by` in a record, which say who sent a run or created a cron."""
# The fields of a run request that are also stored in the run's thread.
_THREAD_INPUTS: Final = ("input", "command")
_SCHEDULE_FIELDS: Final = ("schedule", "timezone", "end_time", "enabled", "on_run_completed")
_ITEM_FIELDS: Final = frozenset(("namespace", "key", "value"))


def is_archive_header(value: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is the header of an archive."""
    return isinstance(value.get(HEADER_KEY), int) and isinstance(value.get("user"), str)


def is_item_version(value: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is an archive line that holds one version of a store item."""
    return value.keys() >= _ITEM_FIELDS and isinstance(value["namespace"], list)


def is_run_or_cron_record(value: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is an archive line that describes a run or a cron."""
    return len(value) == 1 and isinstance(value.get(RUN_KEY, value.get(CRON_KEY)), dict)


def iter_archive_lines(
    rows: PersonRows,
    saver: Checkpointer,
    store: WholeStore,
    thread_ids: Sequence[str],
    namespaces: PersonNamespaces,
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a person's archive.

    Args:
        rows: The rows of the person in the checkpointer's tables.
        saver: The checkpointer.
        store: The store.
        thread_ids: The ids of the person's threads.
        namespaces: The namespaces of the person.
    """
    exported_ids = {*thread_ids}
    yield {
        HEADER_KEY: FORMAT_VERSION,
        "user": rows.user,
        "exported_at": datetime.now(UTC).isoformat(),
        "threads": len(thread_ids),
        "threads_by_owner": [
            id for id in rows.list_ids_of_owned_threads_without_user_id() if id in exported_ids
        ],
        "namespaces": [[*namespace] for namespace in namespaces.own],
        "templates": [[*labels] for labels in namespaces.templates],
        # Leave the namespaces of other people out of the archive, because a person's archive must
        # not identify anyone else.
        "other_namespaces": [
            [*other] for other in namespaces.others if other not in namespaces.owned_by_others
        ],
    }
    for thread_id in thread_ids:
        for line in _iter_thread_archive_lines(saver, thread_id):
            if rows.owners_are_people and line.get("owner") != rows.user:
                # Omit the owner of a thread that another person created, because an archive must
                # not identify other people.
                line.pop("owner", None)
            yield line
    # Sort the namespaces of perdure's internal notes last. Internal notes include tombstones, which
    # are records of erased texts. Items must precede tombstones in an archive, because an import
    # refuses texts with a known tombstone.
    for namespace in sorted(namespaces.own, key=lambda own: own[0] == RESERVED_LABEL):
        yield from store.export(namespace)
    yield from _iter_item_versions_written_by_user(store, namespaces.authored_items, rows.user)
    own_threads = frozenset(thread_ids)
    for thread_id in thread_ids:
        for run in rows.list_runs(thread_id):
            yield {RUN_KEY: build_archive_record_of_run(run, rows.user)}
    for cron in rows.list_own_crons_and_crons_on_other_threads(own_threads)[0]:
        yield {CRON_KEY: build_archive_record_of_cron(cron, rows.user)}


def _iter_item_versions_written_by_user(
    store: WholeStore, authored_items: Sequence[tuple[Namespace, str]], user: str
) -> Iterator[dict[str, Any]]:
    """Yield the item versions that a person wrote outside their own namespaces.

    Each version of a memory also contains the memory's previous texts. A memory's previous texts
    are included only if the person wrote them.
    """
    keys = frozenset(authored_items)
    for namespace in dict.fromkeys(namespace for namespace, _ in authored_items):
        for line in store.export(namespace):
            item_key = tuple(line["namespace"]), line["key"]
            is_own = (line.get("provenance") or {}).get(AUTHOR) == user
            if item_key in keys and item_key[0] == namespace and is_own:
                value = dict(line["value"])
                if PREVIOUS in value:
                    previous = value[PREVIOUS]
                    value[PREVIOUS] = [text for text in previous if text.get(AUTHOR) == user]
                yield {**line, "value": value}


def _iter_thread_archive_lines(saver: Checkpointer, thread_id: str) -> Iterator[dict[str, Any]]:
    """Yield the archive line of a thread.

    Yield nothing if the thread has been deleted since the threads were listed.

    If the thread's messages cannot be exported, the archive line contains no messages, and its
    `problem` field gives the reason.
    """
    try:
        if saver.head(thread_id) is not None:
            yield build_thread_export(saver, thread_id)
    except UnknownThread:
        return
    except (InvalidMessages, PerdureError) as exc:
        newest = read_thread_head_or_raise(saver, thread_id).metadata
        description = read_import_metadata(saver, thread_id, newest)
        yield {"thread_id": thread_id, **description, "messages": [], "problem": str(exc)}


def build_archive_record_of_run(run: RunRow, user: str) -> dict[str, Any]:
    """Build the archive record of a run on a person's thread.

    The archive record contains the run's ids, timestamps, status, request and error. If someone
    other than the person requested the run, the archive record does not identify the requester. If
    the person did not send the run request themselves, the archive record contains only the fields
    `input` and `command` of the request. In this case, the record contains only the field `error`
    of the run's error object.
    """
    live, request = run.live, (run.request or {}).get("request")
    sender, error = _classify_sender(run.details, user), run.error
    metadata = run.details["metadata"]
    if sender != SELF:
        request, metadata = _select_mapping_entries(request, _THREAD_INPUTS), None
        error = _select_mapping_entries(error, ("error",))
    return {
        "run_id": live.run_id,
        "thread_id": live.thread_id,
        "graph_id": live.graph,
        "status": live.status,
        "created_at": _format_time(run.created_at),
        "updated_at": _format_time(run.updated_at),
        "sent_by": sender,
        "assistant_id": run.details.get("assistant_id"),
        "metadata": metadata,
        "request": request,
        "error": error,
    }


def build_archive_record_of_cron(cron: CronRow, user: str) -> dict[str, Any]:
    """Build the archive record of a cron, with its ids, its timestamps and its run request.

    If the cron was not created by the person whose data is archived, the archive record does not
    identify the creator of the cron. See also `build_archive_record_of_run`.
    """
    content = cron.content
    sender = _classify_sender(content, user)
    metadata, payload = content["metadata"], content["payload"]
    if sender != SELF:
        metadata, payload = (
            None,
            _select_mapping_entries(payload, (*_THREAD_INPUTS, *_SCHEDULE_FIELDS)),
        )
    return {
        "cron_id": cron.cron_id,
        "thread_id": cron.thread_id,
        "created_at": _format_time(cron.created_at),
        "updated_at": _format_time(cron.updated_at),
        "next_run_date": _format_time(cron.next_at),
        "made_by": sender,
        "graph": content.get("graph"),
        "metadata": metadata,
        "payload": payload,
    }


def _classify_sender(
    request_details: Mapping[str, Any], user: str
) -> Literal["self", "a backend", "somebody else"]:
    """Return who sent a request.

    The result is SELF if the user `user` sent the request, BACKEND if a backend sent the request on
    the user's behalf, and OTHER for any other sender.
    """
    if request_details.get("acting_for") == user:
        return BACKEND
    return (
        SELF
        if request_details.get("user") == user and not request_details.get("acting_for")
        else OTHER
    )


def _select_mapping_entries(value: Any, keys: Sequence[str]) -> dict[str, Any] | None:
    """Return a copy of a mapping that contains only the keys in `keys`.

    Return None if the value is not a mapping.
    """
    if not isinstance(value, Mapping):
        return None
    return {name: value[name] for name in keys if name in value}


def _format_time(seconds: float | None) -> str | None:
    """Format a Unix timestamp in seconds as an ISO 8601 timestamp in UTC. Return None for None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
