"""Send several statements per request to a Postgres server, using libpq's pipeline mode.

Executing a statement through a psycopg cursor takes several times as long as the statement itself
(docs/decisions/0018). For speed, perdure sends statements through libpq directly (`psycopg.pq`),
and uses psycopg only to convert parameters and results. The PostgreSQL documentation describes the
pipeline mode: https://www.postgresql.org/docs/current/libpq-pipeline-mode.html
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

from perdure.storage.flow import Row, Statement, TextOrBytes

# Maximum number of prepared statements per connection. Further statements are executed without
# being prepared.
_MAX_PREPARED: Final = 256
_BINARY: Final = pq.Format.BINARY

# Key that identifies a prepared statement: its SQL text and the type OIDs of its parameters
_StatementKey = tuple[bytes, tuple[int, ...]]
# A statement that is ready to be sent: its key, its encoded parameters, and the formats of the
# parameters (text or binary)
_BoundStatement = tuple[_StatementKey, Sequence[Any], Sequence[pq.Format]]


@lru_cache(4096)
def convert_placeholders_to_postgres(sql: str) -> bytes:
    """Convert SQLite placeholders to Postgres: `?2` to `$2`, and the nth bare `?` to `$n`.

    There is no placeholder syntax that both SQLite and Postgres accept, because SQLite treats `$2`
    as a named parameter. No string literal in perdure's SQL statements contains a question mark.
    """
    first_part, *other_parts = sql.split("?")
    parts = (
        part if part[:1].isdigit() else f"{number}{part}"
        for number, part in enumerate(other_parts, 1)
    )
    return "$".join((first_part, *parts)).encode()


class _IntegerLoader(NumericBinaryLoader):
    """Loads numeric values as int, because Postgres returns sums of integers as numeric."""

    def load(self, data: Any) -> Any:
        return int(super().load(data))


class _TextOrBytesDumper(BytesBinaryDumper):
    """Dumps a `TextOrBytes` object as the bytes that `to_column_bytes` returns."""

    def dump(self, obj: Any) -> Any:
        return super().dump(obj.to_column_bytes())


def _register_type_adapters(adapters: AdaptersMap) -> AdaptersMap:
    """Register perdure's type adapters in psycopg's adapters map, and return the map."""
    # All integers are sent as the same Postgres type, so that a statement is prepared once rather
    # than once for each integer width.
    adapters.register_dumper(int, Int8BinaryDumper)
    adapters.register_dumper(TextOrBytes, _TextOrBytesDumper)
    # Send lists in binary format, because in text format psycopg would choose the array's integer
    # type according to the values in the list.
    adapters.register_dumper(list, ListBinaryDumper)
    adapters.register_loader("numeric", _IntegerLoader)
    return adapters


class PipelineConnection(ABC):
    """A libpq connection that sends several statements in one request, in pipeline mode.

    The subclasses provide the connection.

    Attributes:
        pgconn: The connection of libpq.
        server_run: A value that differs after a crash of the server; the result of the query
            `SERVER_RUN_SQL`.
        keeps_session: Whether the server session belongs to this client until it disconnects. If
            so, perdure sets its search path and prepares statements. psycopg must not prepare
            statements, because it would also deallocate those of perdure.
        needs_transaction: Whether a request must be enclosed in BEGIN and COMMIT, because it is not
            a READ COMMITTED transaction otherwise.
        settings: The statements with which each transaction must begin.
        transformer: The psycopg transformer that adapts parameters and results.
    """

    pgconn: pq.abc.PGconn
    server_run: Any = None
    keeps_session = True
    needs_transaction = False
    settings: Sequence[Statement] = ()
    transformer: abc.Transformer

    def _set_transformer_and_clear_statement_names(self, transformer: abc.Transformer) -> None:
        """Set the psycopg transformer that converts values for this connection.

        Clear the cached names of prepared statements.
        """
        self.transformer = transformer
        self._names: dict[_StatementKey, bytes] = {}  # Names of the prepared statements
        self._numbers = count()

    @property
    def closed(self) -> bool:
        """Whether the connection is closed or lost."""
        return self.pgconn.status == pq.ConnStatus.BAD

    @abstractmethod
    def discard_connection(self) -> None:
        """Close a connection whose state is unknown, so that it is not used again."""

    def send_request(
        self, statements: Sequence[Statement], *, prepare: bool = True
    ) -> list[list[Row]]:
        """Execute statements until one of them fails, and return the rows of each statement.

        If the statements do not include BEGIN, they are executed in an implicit transaction.

        Args:
            statements: The statements, which are sent in one request.
            prepare: Whether to prepare the statements, because they will be sent again.

        Returns:
            The rows of each statement. For a statement with `execute_many`, the rows of its last
            execution.

        Raises:
            psycopg.Error: A statement failed, or the connection is lost.
        """
        executions = [
            (index, self._bind_parameters(convert_placeholders_to_postgres(sql), row))
            for index, (sql, params, execute_many) in enumerate(statements)
            for row in (params if execute_many else (params,))
        ]
        limit = _MAX_PREPARED if prepare and self.keeps_session else 0
        try:
            self.pgconn.enter_pipeline_mode()
            result_keys = [
                key
                for index, bound_statement in executions
                for key in self._send_statement_and_iter_result_ids(limit, index, *bound_statement)
            ]
            self.pgconn.pipeline_sync()
            results = self._read_results()
            self.pgconn.exit_pipeline_mode()
        except BaseException:
            if not self.closed:
                self.discard_connection()
            raise
        rows_by_statement: list[list[Row]] = [[] for _ in statements]
        failed = None
        for result_key, result in zip(result_keys, results, strict=True):
            if result.status == pq.ExecStatus.TUPLES_OK:
                self.transformer.set_pgresult(result, format=_BINARY)
                rows = self.transformer.load_rows(0, result.ntuples, tuple)
                rows_by_statement[result_key] = rows  # type: ignore[index]
            elif result.status != pq.ExecStatus.COMMAND_OK:
                failed = failed or result
                if not isinstance(result_key, int):
                    # The statement was not prepared.
                    del self._names[result_key]
        if failed is not None:
            raise errors.error_from_result(failed, self.transformer.encoding)
        return rows_by_statement

    def _bind_parameters(self, sql: bytes, row: Sequence[Any]) -> _BoundStatement:
        """Encode a statement's parameters as text or bytes for libpq."""
        if not row:
            return (sql, ()), (), ()
        transformer = self.transformer
        params = transformer.dump_sequence(row, [PyFormat.AUTO] * len(row))
        return (sql, transformer.types or ()), params, transformer.formats or ()

    def _send_statement_and_iter_result_ids(
        self,
        max_prepared: int,
        statement_number: int,
        key: _StatementKey,
        params: Sequence[Any],
        formats: Sequence[pq.Format],
    ) -> Iterator[int | _StatementKey]:
        """Send one statement.

        If the connection has fewer than `max_prepared` prepared statements, the statement is
        prepared before it is executed.

        Yields one element for each result that the server will return. If the statement is prepared
        first, the first element is its key. The last element is always `statement_number`.
        """
        pgconn = self.pgconn
        name = self._names.get(key)
        if name is None and len(self._names) < max_prepared:
            name = self._names[key] = b"perdure_%d" % next(self._numbers)
            pgconn.send_prepare(name, *key)
            yield key
        if name is None:
            pgconn.send_query_params(key[0], params, key[1], formats, _BINARY)
        else:
            pgconn.send_query_prepared(name, params, formats, _BINARY)
        yield statement_number

    def _read_results(self) -> list[pq.abc.PGresult]:
        """Read the results of a request until the server's response is complete."""
        pgconn, results = self.pgconn, list[pq.abc.PGresult]()
        unsent = pgconn.flush()
        while True:
            _wait_for_socket(pgconn.socket, writing=bool(unsent))
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

    def _wait_for_socket(socket: int, *, writing: bool) -> None:
        select.select([socket], [socket] if writing else [], [])

else:

    def _wait_for_socket(socket: int, *, writing: bool) -> None:
        poll = select.poll()  # Unlike select(), poll() accepts file descriptors above 1,023.
        poll.register(socket, select.POLLIN | select.POLLOUT if writing else select.POLLIN)
        poll.poll()


class OwnConnection(PipelineConnection, psycopg.Connection[Row]):
    """A connection that perdure opened itself."""

    def __init__(self, pgconn: pq.abc.PGconn, *args: Any) -> None:
        psycopg.Connection.__init__(self, pgconn, *args)
        _register_type_adapters(self.adapters)
        self._set_transformer_and_clear_statement_names(Transformer.from_context(self))

    def discard_connection(self) -> None:
        """See `PipelineConnection.discard_connection`."""
        self.close()


_ADAPTERS: Final = _register_type_adapters(AdaptersMap(psycopg.adapters))
_ROLLBACK: Final = Statement("ROLLBACK")
# The settings that perdure needs are set only for the current transaction, because a connection
# from the user's pool must keep its own session settings.
_BORROWED_SETTINGS: Final = Statement(
    "SELECT set_config('client_encoding', 'UTF8', true), set_config('DateStyle', 'ISO', true), "
    "set_config('TimeZone', 'UTC', true), set_config('standard_conforming_strings', 'on', true), "
    "set_config('row_security', 'on', true)"
)


def build_transformer() -> abc.Transformer:
    """Build a psycopg transformer that uses UTF-8, whatever the session's client encoding."""
    return Transformer(_ADAPTERS)


class BorrowedConnection(PipelineConnection):
    """A connection from a pool that the user owns.

    perdure changes neither the session settings of a borrowed connection nor psycopg's connection
    object. Statements are sent directly over the libpq connection that the psycopg connection
    wraps. The settings that perdure needs are set only for the current transaction. No statement is
    prepared.

    Args:
        conn: The connection. The caller must roll back an open transaction with `end_transaction`
            before the first request.
        transformer: The transformer of the values; see `build_transformer`.
    """

    keeps_session = False
    needs_transaction = True
    settings = (_BORROWED_SETTINGS,)

    def __init__(self, conn: psycopg.Connection[Any], transformer: abc.Transformer) -> None:
        self.conn: psycopg.Connection[Any] | None = conn  # None after its return
        self.pgconn = conn.pgconn
        self._set_transformer_and_clear_statement_names(transformer)

    def discard_connection(self) -> None:
        """See `PipelineConnection.discard_connection`."""
        # Do not call `close()`. If the pool was created with `close_returns=True`, `close()` would
        # return the connection to the pool instead of closing it.
        self.pgconn.finish()

    def end_transaction(self) -> None:
        """Roll back the transaction, if any, or close the connection if the rollback fails."""
        if self.closed or self._is_idle():
            return
        try:
            self.send_request([_ROLLBACK])
        except psycopg.Error:
            self.discard_connection()
        if not self.closed and not self._is_idle():
            self.discard_connection()

    def _is_idle(self) -> bool:
        """Return True if no transaction is open on the connection and pipeline mode is off."""
        status = self.pgconn.transaction_status
        is_off = self.pgconn.pipeline_status == pq.PipelineStatus.OFF
        return is_off and status == pq.TransactionStatus.IDLE
