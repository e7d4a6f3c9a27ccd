"""The transaction of a flow that writes, and what became of one whose connection was lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Self

import psycopg
from psycopg import errors

from perdure.errors import StorageUnavailable
from perdure.storage.flow import Guarded, Last, Request, Row, Stale, Statement
from perdure.storage.postgres_connection import RUN, Server, is_lost
from perdure.storage.postgres_pipeline import Pipelined

_BEGIN: Final = Statement("BEGIN ISOLATION LEVEL READ COMMITTED")
COMMIT: Final = Statement("COMMIT")
_ROLLBACK: Final = Statement("ROLLBACK")
_STATUS: Final = f"""
SELECT CASE WHEN pg_is_in_recovery() THEN 'in progress' ELSE pg_xact_status(?::xid8) END, ({RUN})
"""
_SETTLED_S: Final = 30.0  # how long a transaction whose connection was lost may take to end


class Transaction:
    """Answers the requests of a flow in one transaction; `with` commits it.

    Args:
        server: Whose connection `conn` is.
        excluding: The statement that keeps others from writing the same, and answers the number
            of the transaction.
    """

    def __init__(
        self,
        server: Server,
        conn: Pipelined,
        excluding: Sequence[Statement],
    ) -> None:
        self._server, self._conn, self._excluding = server, conn, excluding
        self._number: str | None = None  # while it lasts

    def execute(self, request: Request) -> Any:
        """Answer a request; the last one goes with the COMMIT."""
        asked = request if isinstance(request, list) else [request]
        if isinstance(request, Guarded):
            try:
                return self._alone(asked)[0]
            except (errors.DivisionByZero, errors.UniqueViolation) as exc:
                if self._conn.brackets:
                    self._conn.ask([_ROLLBACK])
                raise Stale from exc
        if self._number is not None:
            rows = self._commit(asked) if isinstance(request, Last) else self._conn.ask(asked)
        elif isinstance(request, Last):
            rows = self._alone(asked)
        else:
            _, ((self._number, *_),), *rows = self._conn.ask([_BEGIN, *self._excluding, *asked])
        return rows if isinstance(request, list) else rows[0]

    def _alone(self, asked: Sequence[Statement]) -> list[list[Row]]:
        if self._conn.brackets:
            return self._conn.ask([_BEGIN, *self._excluding, *asked, COMMIT])[2:-1]
        return self._conn.ask([*self._excluding, *asked])[1:]  # one request is one transaction

    def _commit(self, asked: Sequence[Statement]) -> list[list[Row]]:
        assert self._number is not None
        try:
            *rows, _ = self._conn.ask([*asked, COMMIT])
        except psycopg.Error as exc:
            if not is_lost(exc) or not self._stands(self._number):
                raise
            rows = [[] for _ in asked]
        self._number = None
        return rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._number is None or self._conn.closed:
            return
        if error is None:
            self._commit([])
            return
        with suppress(psycopg.Error):  # it is lost, then
            self._conn.ask([_ROLLBACK])

    def _stands(self, number: str) -> bool:
        """Whether the transaction has been committed, its connection being lost.

        After a crash, or on a standby that took over, its number may be that of another one, so
        that only "not committed" can be believed.

        Raises:
            StorageUnavailable: Nobody can tell.
        """
        self._server.give_back(self._conn)  # there may be no other in the pool
        deadline = time.monotonic() + _SETTLED_S
        why = f"for {_SETTLED_S:.0f} s the server could not be asked whether it was made"
        while time.monotonic() < deadline:
            with suppress(StorageUnavailable, psycopg.OperationalError):
                status, run = self._status(number)
                if status == "committed" and run != self._conn.run:
                    why = "the server crashed, or another took over, so nobody knows if it was made"
                    break
                if status != "in progress":
                    return status == "committed"
            time.sleep(0.1)
        raise StorageUnavailable(
            f"{self._server.name}: the connection was lost at a commit, and {why}: read before you "
            "write it again"
        )

    def _status(self, number: str) -> tuple[str, Any]:
        """What became of a transaction, and the run of the server that says so."""
        try:
            with self._server.connection() as conn:
                ((found,),) = conn.ask([Statement(_STATUS, (number,))])
        except errors.InvalidParameterValue:  # a number still to come
            return "aborted", None
        return found
