"""`Transaction`: answers the requests of a flow in one transaction of Postgres."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Self

import psycopg
from psycopg import errors

from perdure.errors import StorageUnavailable
from perdure.storage.flow import Combined, Guarded, Last, Request, Row, Stale, Statement
from perdure.storage.postgres_connection import Server
from perdure.storage.postgres_errors import is_lost
from perdure.storage.postgres_requests import Requests

BEGIN: Final = Statement("BEGIN ISOLATION LEVEL READ COMMITTED")
_COMMIT: Final = Statement("COMMIT")
_ROLLBACK: Final = Statement("ROLLBACK")
_STATUS: Final = """
SELECT CASE WHEN pg_is_in_recovery() THEN 'in progress' ELSE pg_xact_status(?::xid8) END
"""
_SETTLED_S: Final = 30.0  # how long a transaction whose connection was lost may take to end


class Transaction:
    """Answers the requests of a flow in one transaction, which `with` ends.

    Args:
        server: Whose connection `conn` is.
        begin: How it begins; nothing: each request sees a state of its own.
        calls: The SELECT of what it calls first; one that writes is told its own number.
    """

    def __init__(
        self,
        server: Server,
        conn: Requests,
        begin: Sequence[Statement],
        calls: Sequence[Statement],
    ) -> None:
        self._server, self._conn = server, conn
        self._begin = [*begin, *conn.settings] if begin else []
        self._calls = calls if begin else [*conn.settings, *calls]
        self._writes = BEGIN in begin
        self._open = False
        self._number: str | None = None  # while one that writes is open

    def execute(self, request: Request) -> Any:
        """Answer a request; the last one goes with the COMMIT."""
        statements = request if isinstance(request, list) else [request]
        try:
            rows = self._ask(statements, last=isinstance(request, Last | Guarded))
        except (errors.DivisionByZero, errors.UniqueViolation) as exc:
            if not isinstance(request, Guarded):
                raise
            if self._conn.brackets:
                self._conn.ask([_ROLLBACK])
            raise Stale from exc
        of_first = isinstance(request, Guarded) and not isinstance(request, Combined)
        return rows if isinstance(request, list) and not of_first else rows[0]

    def _ask(self, statements: Sequence[Statement], *, last: bool) -> list[list[Row]]:
        single = last and not self._conn.brackets  # a request is a transaction
        begin = () if single else self._begin
        first = [] if self._open else [*begin, *self._calls]
        end = [_COMMIT] if last and (begin or self._open) else []
        try:
            rows = self._conn.ask([*first, *statements, *end])
        except psycopg.Error as exc:
            if self._number is None or not last or not is_lost(exc) or not self._stands():
                raise
            rows = [[] for _ in statements]
        self._open = not last and (self._open or bool(begin))
        if self._writes and first:
            self._number = rows[len(begin)][0][0] if self._open else None
        elif last:
            self._number = None
        return rows[len(first) : len(first) + len(statements)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self._open or self._conn.closed:
            return
        if error is None:
            self._ask([], last=True)
            return
        with suppress(psycopg.Error):  # it is lost, then
            self._conn.ask([_ROLLBACK])

    def _stands(self) -> bool:
        """Whether it has been committed, its connection being lost.

        After a crash, or on a standby that took over, its number may be that of another one, so
        that only "not committed" can be believed.

        Raises:
            StorageUnavailable: Nobody can tell.
        """
        deadline = time.monotonic() + _SETTLED_S
        why = f"for {_SETTLED_S:.0f} s the server could not be asked whether it was made"
        while time.monotonic() < deadline:
            with (
                suppress(StorageUnavailable, psycopg.OperationalError),
                self._server.lend_replacement(self._conn, _SETTLED_S) as conn,
            ):
                status = self._status(conn)
                if status == "committed" and conn.run != self._conn.run:
                    why = "the server crashed, or another took over, so nobody knows if it was made"
                    break
                if status != "in progress":
                    return status == "committed"
            time.sleep(0.1)
        raise StorageUnavailable(
            f"{self._server.name}: the connection was lost at a commit, and {why}: read before you "
            "write it again"
        )

    def _status(self, conn: Requests) -> str:
        try:
            return str(conn.ask([Statement(_STATUS, (self._number,))])[0][0][0])
        except errors.InvalidParameterValue:  # a number still to come
            return "aborted"
