"""Encrypt and decrypt the rows of the server's runs, run events, crons and webhooks.

A row's ids are the associated data of its encryption or checksum; see
`perdure.checkpointers.records`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from perdure.checkpointers.records import decrypt_and_unpack
from perdure.checkpointers.values import pack
from perdure.errors import CorruptRecord
from perdure.storage.encryption import AssociatedData, Seal
from perdure.storage.flow import Row

T = TypeVar("T")


def decrypt_undamaged_rows(
    decrypt_row: Callable[[Seal, Row], T], seal: Seal, rows: Iterable[Row]
) -> list[T]:
    """Decrypt rows. Rows that are damaged or were tampered with are left out."""
    decrypted = list[T]()
    for row in rows:
        with suppress(CorruptRecord):
            decrypted.append(decrypt_row(seal, row))
    return decrypted


# -- runs


class LiveRun(NamedTuple):
    """The unencrypted data of a stored run: its ids, its owner and its state.

    A list of live runs contains one `LiveRun` per run. A `RunRow` always contains a `LiveRun`, even
    if the run has already ended.

    Attributes:
        thread_id: The thread.
        thread_key, seq: The key of its row. Runs of a thread are executed in the order of `seq`.
        run_id: The id of the run.
        status: The status of the run.
        owner: The process that executes it or will execute it, or `""` for no process.
        graph: The id of its graph.
        attempt: The number of the attempt, starting at 1. It increases by 1 each time a process
            dies while executing the run.
        cancel_action: `"interrupt"` or `"rollback"` if the run is to be stopped, otherwise None.
    """

    thread_id: str
    thread_key: int
    seq: int
    run_id: str
    status: str
    owner: str
    graph: str
    attempt: int
    cancel_action: str | None


class RunRow(NamedTuple):
    """A server run, decrypted from its database row.

    Attributes:
        live: Its ids, owner and status.
        created_at, updated_at: When it was created and when it was last changed, in seconds since
            1970.
        details: Its assistant, metadata, sender and other properties that do not change.
        error: The error with which it failed, or None.
        request: The request that it executes. None if it has ended and cannot be started again.
        not_before: The time before which it may not start, in seconds since 1970, or None.
    """

    live: LiveRun
    created_at: float
    updated_at: float
    details: Any
    error: Any = None
    request: Any = None
    not_before: float | None = None


def decrypt_run(seal: Seal, row: Row) -> RunRow:
    """Return a run from its row.

    Raises:
        CorruptRecord: The row is damaged or was tampered with.
    """
    live, (created_at, updated_at, *sealed, not_before) = LiveRun(*row[:9]), row[9:]
    details, error, request = [
        None if data is None else json.loads(seal.unseal(data, associated_data))
        for data, associated_data in zip(sealed, _build_run_associated_data(live), strict=True)
    ]
    return RunRow(live, created_at, updated_at, details, error, request, not_before)


def encrypt_run_details_error_and_request(
    seal: Seal, run: LiveRun, details_error_and_request: Sequence[Any]
) -> list[bytes | None]:
    """Encrypt a run's details, error and request, and return the results in this order."""
    return [
        None if part is None else seal.seal(json.dumps(part, default=str).encode(), associated_data)
        for part, associated_data in zip(
            details_error_and_request, _build_run_associated_data(run), strict=True
        )
    ]


def encrypt_events(
    seal: Seal, run: LiveRun, after_event: int, events: Sequence[tuple[Any, bytes]]
) -> bytes:
    """Encrypt a batch of a run's events, beginning after event number `after_event`."""
    return seal.seal(pack([*events]), ("events", run.thread_id, run.run_id, after_event))


def decrypt_batch_of_events(
    seal: Seal, thread_id: str, run_id: str, after_event: int, body: bytes | None
) -> list[tuple[Any, bytes]]:
    """Decrypt a batch of events, and return the kind and the encoded bytes of each event.

    Raises:
        CorruptRecord: The row is damaged or was tampered with.
    """
    associated_data = "events", thread_id, run_id, after_event
    return (
        []
        if body is None
        else [(event, data) for event, data in decrypt_and_unpack(seal, body, associated_data)]
    )


def _build_run_associated_data(live: LiveRun) -> list[AssociatedData]:
    return [(name, live.thread_id, live.run_id) for name in ("about", "error", "request")]


# -- crons


class CronRow(NamedTuple):
    """A cron, which starts runs on a schedule.

    Attributes:
        cron_id: The id of the cron.
        thread_id: The thread of its runs. None means a new thread for each run.
        next_at: The time at which it is due next, in seconds since 1970; None means never.
        created_at, updated_at: When it was created and when it was last changed, in seconds since
            1970.
        content: The schedule and the request from the client, and the user of the cron.
    """

    cron_id: str
    thread_id: str | None
    next_at: float | None
    created_at: float
    updated_at: float
    content: Any


class DueCron(NamedTuple):
    """A cron that is due now, and the time of the run after that, if there is one."""

    cron: CronRow
    next_at: float | None


def decrypt_cron(seal: Seal, row: Row) -> CronRow:
    """Decrypt a cron from its row.

    Raises:
        CorruptRecord: The row is damaged or was tampered with.
    """
    return CronRow(*row)._replace(content=json.loads(seal.unseal(row[5], ("cron", row[0]))))


def encrypt_cron(seal: Seal, cron: CronRow) -> bytes:
    """Encrypt the content of a cron."""
    return seal.seal(json.dumps(cron.content, default=str).encode(), ("cron", cron.cron_id))


# -- webhooks


def decrypt_webhook(seal: Seal, row: Row) -> tuple[str, Any]:
    """Decrypt a webhook's content, and return the webhook's run id and the content.

    The two columns of `row` are the id of the run that the webhook belongs to, and the encrypted
    content of the webhook.

    Raises:
        CorruptRecord: The row is damaged or was tampered with.
    """
    run_id, content = row
    return run_id, json.loads(seal.unseal(content, ("webhook", run_id)))
