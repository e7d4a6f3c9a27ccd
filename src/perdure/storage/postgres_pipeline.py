"""Requests by libpq's pipeline mode, without a cursor for each statement.

A cursor of psycopg costs several times what its statement does (docs/decisions/0018), so that
statements go to libpq itself (`psycopg.pq`); psycopg adapts the values.
https://www.postgresql.org/docs/current/libpq-pipeline-mode.html
"""

from __future__ import annotations

import select
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, Final

import psycopg
from psycopg import errors, pq
from psycopg.adapt import PyFormat, Transformer
from psycopg.types.numeric import Int8BinaryDumper, NumericBinaryLoader
from psycopg.types.string import BytesBinaryDumper

from perdure.storage.flow import AnyText, Row, Statement

_PREPARED: Final = 256  # statements of a connection; the server keeps a plan of each
_BINARY: Final = pq.Format.BINARY

_Kind = tuple[bytes, tuple[int, ...]]  # SQL, and the types of its parameters
_Run = tuple[_Kind, Sequence[Any], Sequence[pq.Format]]


@lru_cache(4096)
def numbered(sql: str) -> bytes:
    """SQL as Postgres takes it: `?2` is `$2`, and a bare `?` has the number of its place.

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


class Pipelined(psycopg.Connection[Row]):
    """A connection that takes many statements at a time.

    Attributes:
        run: Which run of the server it leads to.
        stays: Whether its session stays with us, so that it knows our schema, and prepares
            statements; psycopg itself prepares none, as it would also deallocate ours.
        brackets: Whether a request needs BEGIN and COMMIT to be a transaction as ours are.
        given_back: Whether it is closed, and the pool knows.
    """

    run: Any = None
    stays = True
    brackets = False
    given_back = False

    def __init__(self, pgconn: pq.abc.PGconn, *args: Any) -> None:
        super().__init__(pgconn, *args)
        # one type for all whole numbers: a statement is prepared once, not for each width
        self.adapters.register_dumper(int, Int8BinaryDumper)
        self.adapters.register_dumper(AnyText, _AnyText)
        self.adapters.register_loader("numeric", _Whole)
        self._values = Transformer.from_context(self)
        self._names: dict[_Kind, bytes] = {}  # of prepared statements
        self._numbers = count()

    def ask(self, statements: Sequence[Statement]) -> list[list[Row]]:
        """Run statements up to the first that fails: one transaction, unless they begin one.

        Returns the rows of each, of the last time that it is run.

        Raises:
            psycopg.Error: A statement failed, or the connection is lost.
        """
        runs = [
            (at, self._dumped(numbered(sql), row))
            for at, (sql, params, many) in enumerate(statements)
            for row in (params if many else (params,))
        ]
        try:
            self.pgconn.enter_pipeline_mode()
            due = [each for at, run in runs for each in self._send(at, *run)]
            self.pgconn.pipeline_sync()
            results = self._results()
            self.pgconn.exit_pipeline_mode()
        except BaseException:
            if not self.broken:
                self.close()  # nobody knows what it is about
            raise
        out: list[list[Row]] = [[] for _ in statements]
        failed = None
        for place, result in zip(due, results, strict=True):
            if result.status == pq.ExecStatus.TUPLES_OK:
                self._values.set_pgresult(result, format=_BINARY)
                out[place] = self._values.load_rows(0, result.ntuples, tuple)  # type: ignore[index]
            elif result.status != pq.ExecStatus.COMMAND_OK:
                failed = failed or result
                if not isinstance(place, int):
                    del self._names[place]
        if failed is not None:
            raise errors.error_from_result(failed, self.info.encoding)
        return out

    def _dumped(self, sql: bytes, row: Sequence[Any]) -> _Run:
        if not row:
            return (sql, ()), (), ()
        values = self._values
        params = values.dump_sequence(row, [PyFormat.AUTO] * len(row))
        return (sql, values.types or ()), params, values.formats or ()

    def _send(
        self, at: int, kind: _Kind, params: Sequence[Any], formats: Sequence[pq.Format]
    ) -> Iterator[int | _Kind]:
        """Send one statement. Of each result that is due, yields whose it is: a prepared one's."""
        pgconn = self.pgconn
        name = self._names.get(kind)
        if name is None and self.stays and len(self._names) < _PREPARED:
            name = self._names[kind] = b"perdure_%d" % next(self._numbers)
            pgconn.send_prepare(name, *kind)
            yield kind
        if name is None:
            pgconn.send_query_params(kind[0], params, kind[1], formats, _BINARY)
        else:
            pgconn.send_query_prepared(name, params, formats, _BINARY)
        yield at

    def _results(self) -> list[pq.abc.PGresult]:
        """The results up to the end of a request."""
        pgconn, found = self.pgconn, list[pq.abc.PGresult]()
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
                    return found
                else:
                    found.append(result)


if sys.platform == "win32":

    def _wait(socket: int, *, writing: bool) -> None:
        select.select([socket], [socket] if writing else [], [])

else:

    def _wait(socket: int, *, writing: bool) -> None:
        poll = select.poll()  # select() takes no numbers above 1,023
        poll.register(socket, select.POLLIN | select.POLLOUT if writing else select.POLLIN)
        poll.poll()
