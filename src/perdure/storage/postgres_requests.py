"""Requests to a Postgres server: the statements that libpq's pipeline mode sends at once.

A cursor of psycopg costs several times what its statement does (docs/decisions/0018), so statements
go to libpq itself (`psycopg.pq`); psycopg adapts the values.
https://www.postgresql.org/docs/current/libpq-pipeline-mode.html
"""

from __future__ import annotations

import select
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, Final

import psycopg
from psycopg import abc, errors, pq
from psycopg.adapt import AdaptersMap, PyFormat, Transformer
from psycopg.types.array import ListBinaryDumper
from psycopg.types.numeric import Int8BinaryDumper, NumericBinaryLoader
from psycopg.types.string import BytesBinaryDumper

from perdure.storage.flow import AnyText, Row, Statement

_MAX_PREPARED: Final = 256  # statements of a connection; the server keeps a plan of each
_BINARY: Final = pq.Format.BINARY

_Kind = tuple[bytes, tuple[int, ...]]  # SQL, and the types of its parameters
_Run = tuple[_Kind, Sequence[Any], Sequence[pq.Format]]


@lru_cache(4096)
def numbered(sql: str) -> bytes:
    """Return SQL as Postgres takes it: `?2` becomes `$2`, a bare `?` the number of its place.

    SQLite takes `$2` only by name, so that one form for both does not exist; no literal of the
    statements has a question mark.
    """
    head, *rest = sql.split("?")
    parts = (part if part[:1].isdigit() else f"{at}{part}" for at, part in enumerate(rest, 1))
    return "$".join((head, *parts)).encode()


class _Whole(NumericBinaryLoader):
    """Sums of whole numbers, which Postgres makes of type numeric."""

    def load(self, data: Any) -> Any:
        return int(super().load(data))


class _AnyText(BytesBinaryDumper):
    """Text in a column of text or bytes."""

    def dump(self, obj: Any) -> Any:
        return super().dump(obj.as_bytes())


def _register(adapters: AdaptersMap) -> AdaptersMap:
    """Register the adapters that perdure's statements need, and return the map."""
    # one type for all whole numbers: a statement is prepared once, not for each width
    adapters.register_dumper(int, Int8BinaryDumper)
    adapters.register_dumper(AnyText, _AnyText)
    adapters.register_dumper(list, ListBinaryDumper)  # as text, ints are of any width
    adapters.register_loader("numeric", _Whole)
    return adapters


class Requests(ABC):
    """Send requests over a connection of libpq. `Pipelined` and `Borrowed` have the connection.

    Attributes:
        pgconn: The connection of libpq.
        run: Which run of the server the connection leads to.
        stays: Whether the session stays with this client. Then its search path is perdure's, and
            statements are prepared. psycopg itself prepares none, as it would also deallocate
            those of perdure.
        brackets: Whether a request needs BEGIN and COMMIT to be a READ COMMITTED transaction.
        settings: Statements that each transaction has to begin with.
    """

    pgconn: pq.abc.PGconn
    run: Any = None
    stays = True
    brackets = False
    settings: Sequence[Statement] = ()
    values: abc.Transformer

    def _begin_requests(self, values: abc.Transformer) -> None:
        """Set the state that requests of one connection share."""
        self.values = values
        self._names: dict[_Kind, bytes] = {}  # of prepared statements
        self._numbers = count()

    @property
    def closed(self) -> bool:
        """Whether the connection is closed or lost."""
        return self.pgconn.status == pq.ConnStatus.BAD

    @abstractmethod
    def discard_connection(self) -> None:
        """Close the connection, because its state is unknown."""

    def ask(self, statements: Sequence[Statement], *, prepare: bool = True) -> list[list[Row]]:
        """Run statements up to the first that fails: one transaction, unless they begin one.

        Args:
            statements: What is sent at once.
            prepare: Whether the statements are worth preparing, because they come again.

        Returns:
            The rows of each statement; for `many`, those of its last run.

        Raises:
            psycopg.Error: A statement failed, or the connection is lost.
        """
        runs = [
            (at, self._dumped(numbered(sql), row))
            for at, (sql, params, many) in enumerate(statements)
            for row in (params if many else (params,))
        ]
        limit = _MAX_PREPARED if prepare and self.stays else 0
        try:
            self.pgconn.enter_pipeline_mode()
            due = [result for at, run in runs for result in self._send(limit, at, *run)]
            self.pgconn.pipeline_sync()
            results = self._results()
            self.pgconn.exit_pipeline_mode()
        except BaseException:
            if not self.closed:
                self.discard_connection()
            raise
        out: list[list[Row]] = [[] for _ in statements]
        failed = None
        for place, result in zip(due, results, strict=True):
            if result.status == pq.ExecStatus.TUPLES_OK:
                self.values.set_pgresult(result, format=_BINARY)
                out[place] = self.values.load_rows(0, result.ntuples, tuple)  # type: ignore[index]
            elif result.status != pq.ExecStatus.COMMAND_OK:
                failed = failed or result
                if not isinstance(place, int):
                    del self._names[place]
        if failed is not None:
            raise errors.error_from_result(failed, self.values.encoding)
        return out

    def _dumped(self, sql: bytes, row: Sequence[Any]) -> _Run:
        if not row:
            return (sql, ()), (), ()
        values = self.values
        params = values.dump_sequence(row, [PyFormat.AUTO] * len(row))
        return (sql, values.types or ()), params, values.formats or ()

    def _send(
        self, limit: int, at: int, kind: _Kind, params: Sequence[Any], formats: Sequence[pq.Format]
    ) -> Iterator[int | _Kind]:
        """Send one statement, prepared if fewer than `limit` are prepared.

        Yields whose result is due: the number of a statement, or what is prepared.
        """
        pgconn = self.pgconn
        name = self._names.get(kind)
        if name is None and len(self._names) < limit:
            name = self._names[kind] = b"perdure_%d" % next(self._numbers)
            pgconn.send_prepare(name, *kind)
            yield kind
        if name is None:
            pgconn.send_query_params(kind[0], params, kind[1], formats, _BINARY)
        else:
            pgconn.send_query_prepared(name, params, formats, _BINARY)
        yield at

    def _results(self) -> list[pq.abc.PGresult]:
        """Return the results up to the end of a request."""
        pgconn, results = self.pgconn, list[pq.abc.PGresult]()
        unsent = pgconn.flush()
        while True:
            _wait(pgconn.socket, writing=bool(unsent))
            pgconn.consume_input()
            unsent = unsent and pgconn.flush()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    if pgconn.status == pq.ConnStatus.BAD:
                        raise psycopg.OperationalError(pgconn.get_error_message())
                elif result.status == pq.ExecStatus.PIPELINE_SYNC:
                    return results
                else:
                    results.append(result)


if sys.platform == "win32":

    def _wait(socket: int, *, writing: bool) -> None:
        select.select([socket], [socket] if writing else [], [])

else:

    def _wait(socket: int, *, writing: bool) -> None:
        poll = select.poll()  # select() takes no numbers above 1,023
        poll.register(socket, select.POLLIN | select.POLLOUT if writing else select.POLLIN)
        poll.poll()


class Pipelined(Requests, psycopg.Connection[Row]):
    """A connection of perdure's own."""

    def __init__(self, pgconn: pq.abc.PGconn, *args: Any) -> None:
        psycopg.Connection.__init__(self, pgconn, *args)
        _register(self.adapters)
        self._begin_requests(Transformer.from_context(self))

    def discard_connection(self) -> None:
        """See `Requests.discard_connection`."""
        self.close()


_ADAPTERS: Final = _register(AdaptersMap(psycopg.adapters))
_ROLLBACK: Final = Statement("ROLLBACK")
# each session of a user's pool may have others, and has to keep them
_BORROWED_SETTINGS: Final = Statement(
    "SELECT set_config('client_encoding', 'UTF8', true), set_config('DateStyle', 'ISO', true), "
    "set_config('TimeZone', 'UTC', true), set_config('standard_conforming_strings', 'on', true), "
    "set_config('row_security', 'on', true)"
)


def build_transformer() -> abc.Transformer:
    """Return a transformer for `Borrowed`; its encoding is UTF-8, whatever the session has."""
    return Transformer(_ADAPTERS)


class Borrowed(Requests):
    """A connection that a pool of the user has lent, and that goes back as it came.

    The object of psycopg is neither changed nor used. Statements go to its connection of libpq,
    each in a transaction to which all settings are local, and none is prepared.

    Args:
        conn: The connection, in no transaction or in one that is rolled back.
        values: Adapts values; see `build_transformer`.
    """

    stays = False
    brackets = True
    settings = (_BORROWED_SETTINGS,)

    def __init__(self, conn: psycopg.Connection[Any], values: abc.Transformer) -> None:
        self.conn: psycopg.Connection[Any] | None = conn  # None: it went back
        self.pgconn = conn.pgconn
        self._begin_requests(values)

    def discard_connection(self) -> None:
        """See `Requests.discard_connection`."""
        self.pgconn.finish()  # a pool with `close_returns` takes `close` of psycopg as a return

    def end_transaction(self) -> None:
        """Leave the connection in no transaction; it is closed if it cannot be rolled back."""
        if self.closed or self._is_idle():
            return
        try:
            self.ask([_ROLLBACK])
        except psycopg.Error:
            self.discard_connection()
        if not self.closed and not self._is_idle():
            self.discard_connection()

    def _is_idle(self) -> bool:
        status = self.pgconn.transaction_status
        is_off = self.pgconn.pipeline_status == pq.PipelineStatus.OFF
        return is_off and status == pq.TransactionStatus.IDLE
