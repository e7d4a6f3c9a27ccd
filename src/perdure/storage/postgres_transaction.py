"""Run a flow's requests in one Postgres transaction.

A flow is a generator that yields SQL statements and receives their rows; see
`perdure.storage.flow`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Self

import psycopg
from psycopg import errors

from perdure.errors import StorageUnavailable
from perdure.storage.flow import (
    CombinedRequest,
    GuardedRequest,
    GuardFailed,
    LastRequest,
    Request,
    Row,
    Statement,
)
from perdure.storage.postgres_connection import Server
from perdure.storage.postgres_errors import is_connection_lost
from perdure.storage.postgres_requests import PipelineConnection

BEGIN: Final = Statement("BEGIN ISOLATION LEVEL READ COMMITTED")
_COMMIT: Final = Statement("COMMIT")
_ROLLBACK: Final = Statement("ROLLBACK")
_STATUS: Final = """
SELECT CASE WHEN pg_is_in_recovery() THEN 'in progress' ELSE pg_xact_status(?::xid8) END
"""
# Maximum number of seconds to wait for the outcome of a transaction whose connection was lost
# during the commit
_SETTLED_S: Final = 30.0


class Transaction:
    """A context manager that executes a flow's requests in one Postgres transaction.

    At the end of the `with` block, a transaction that is still open is committed, or rolled back if
    there was an error.

    Args:
        server: The server to which the connection leads.
        conn: The connection.
        begin: The statements that begin the transaction. If empty, each request is its own
            transaction and sees its own snapshot.
        calls: The SELECT statements to run before the first request. In a transaction that writes,
            the first of these statements returns the transaction ID.
    """

    def __init__(
        self,
        server: Server,
        conn: PipelineConnection,
        begin: Sequence[Statement],
        calls: Sequence[Statement],
    ) -> None:
        self._server, self._conn = server, conn
        self._begin = [*begin, *conn.settings] if begin else []
        self._function_calls = calls if begin else [*conn.settings, *calls]
        self._writes = BEGIN in begin
        self._is_open = False
        # The Postgres transaction ID of the open transaction, or None if no transaction is open or
        # the open transaction is read-only.
        self._transaction_number: str | None = None

    def execute(self, request: Request) -> Any:
        """Execute a request and return its rows.

        A `LastRequest` or a `GuardedRequest` is executed and committed in a single round trip to
        the server. If the last request of a transaction is neither a `LastRequest` nor a
        `GuardedRequest`, COMMIT is sent separately at the end of the `with` block.
        """
        statements = request if isinstance(request, list) else [request]
        try:
            rows = self._send_statements(
                statements, is_last=isinstance(request, LastRequest | GuardedRequest)
            )
        # If the guard statement of a `GuardedRequest` fails, the server reports either a division
        # by zero or a unique violation.
        except (errors.DivisionByZero, errors.UniqueViolation) as exc:
            if not isinstance(request, GuardedRequest):
                raise
            if self._conn.needs_transaction:
                self._conn.send_request([_ROLLBACK])
            raise GuardFailed from exc
        returns_guard_rows = isinstance(request, GuardedRequest) and not isinstance(
            request, CombinedRequest
        )
        return rows if isinstance(request, list) and not returns_guard_rows else rows[0]

    def _send_statements(
        self, statements: Sequence[Statement], *, is_last: bool
    ) -> list[list[Row]]:
        """Send one request of a transaction.

        The first request of the transaction begins with BEGIN, and the last request of the
        transaction ends with COMMIT.
        """
        # A request that forms a whole transaction needs no BEGIN and COMMIT, because Postgres
        # executes the statements of one pipeline in an implicit transaction.
        single = is_last and not self._conn.needs_transaction
        begin = () if single else self._begin
        opening_statements = [] if self._is_open else [*begin, *self._function_calls]
        closing_statements = [_COMMIT] if is_last and (begin or self._is_open) else []
        try:
            rows = self._conn.send_request([*opening_statements, *statements, *closing_statements])
        except psycopg.Error as exc:
            if (
                self._transaction_number is None
                or not is_last
                or not is_connection_lost(exc)
                or not self._was_committed()
            ):
                raise
            # The connection was lost before the server's response arrived, but the transaction was
            # committed. The rows that the last request returned are lost, so return no rows.
            rows = [[] for _ in statements]
        self._is_open = not is_last and (self._is_open or bool(begin))
        if self._writes and opening_statements:
            self._transaction_number = rows[len(begin)][0][0] if self._is_open else None
        elif is_last:
            self._transaction_number = None
        return rows[len(opening_statements) : len(opening_statements) + len(statements)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self._is_open or self._conn.closed:
            return
        if error is None:
            self._send_statements([], is_last=True)
            return
        # If the connection is lost, the server rolls the transaction back.
        with suppress(psycopg.Error):
            self._conn.send_request([_ROLLBACK])

    def _was_committed(self) -> bool:
        """Ask the server, over another connection, whether the transaction was committed.

        After a server crash or a failover to a standby, the server may reuse the ID of the lost
        transaction. After a crash or failover, the status "committed" may belong to another
        transaction with the same ID. Only the status "aborted" is reliable after a crash or
        failover.

        Raises:
            StorageUnavailable: It cannot be determined whether the transaction was committed.
        """
        deadline = time.monotonic() + _SETTLED_S
        reason = f"for {_SETTLED_S:.0f} s the server did not answer whether it succeeded"
        while time.monotonic() < deadline:
            with (
                suppress(StorageUnavailable, psycopg.OperationalError),
                self._server.lend_replacement_connection(self._conn, _SETTLED_S) as conn,
            ):
                status = self._read_transaction_status(conn)
                if status == "committed" and conn.server_run != self._conn.server_run:
                    reason = (
                        "the server crashed, or a standby took its place, so the result is unknown"
                    )
                    break
                if status != "in progress":
                    return status == "committed"
            time.sleep(0.1)
        raise StorageUnavailable(
            f"the connection to {self._server.name} was lost during a commit, and {reason}. Check "
            "whether the write succeeded before you retry it"
        )

    def _read_transaction_status(self, conn: PipelineConnection) -> str:
        """Ask the server for the status of the transaction, for example `"committed"`."""
        try:
            return str(
                conn.send_request([Statement(_STATUS, (self._transaction_number,))])[0][0][0]
            )
        except errors.InvalidParameterValue:
            # The server reports that this transaction ID is higher than any ID that it has
            # assigned. The server must have lost the transaction in a crash or a failover, so the
            # transaction was not committed.
            return "aborted"
