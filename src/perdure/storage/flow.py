"""Define flows: generators that yield SQL statements and receive the resulting rows.

A flow does not depend on the database driver, so one implementation works with all drivers,
blocking and asynchronous. The design is based on httpx's `Auth.auth_flow` and psycopg's generators.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from datetime import date, timedelta
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")
# A LIMIT so large that it has no effect
NO_LIMIT = 1 << 62
_UUID_BYTES = 16  # Length of a UUID in bytes
_EPOCH = date(1970, 1, 1)
Row = tuple[Any, ...]


class TextOrBytes(str):
    """A string for a column that holds text in some rows and bytes in others.

    In Postgres, a column that stores both text and bytes has the type `bytea`. Use
    `decode_text_or_bytes` to decode the stored values.
    """

    __slots__ = ()

    def to_column_bytes(self) -> bytes:
        """Encode the text for a `bytea` column.

        The encoded text consists of a NUL byte and the text in UTF-8. If these bytes are as long as
        a UUID, the byte 0xFF is appended, so that they cannot be mistaken for a UUID.
        """
        data = b"\0" + self.encode()
        return data + b"\xff" if len(data) == _UUID_BYTES else data


def decode_text_or_bytes(stored: Any) -> Any:
    """Decode a stored value from a column that contains text or bytes."""
    if type(stored) is bytes and stored[:1] == b"\0" and len(stored) != _UUID_BYTES:
        return stored[1:].removesuffix(b"\xff").decode()
    return stored


class Statement(NamedTuple):
    """One SQL statement with its parameters.

    Attributes:
        sql: The SQL, with placeholders in the form of SQLite.
        params: The parameters, or with `execute_many` a sequence of rows of parameters.
        execute_many: Whether to execute the statement once for each row of parameters. The
            statement then returns no rows.
    """

    sql: str
    params: Sequence[Any] = ()
    execute_many: bool = False


class LastRequest(list[Statement]):
    """The last request of a transaction. Once it has been executed, the transaction is committed.

    If the flow yields further requests, they run in a new transaction or snapshot. On Postgres, a
    statement of the last request also sees rows that other transactions committed before that
    statement started.
    """


class GuardedRequest(list[Statement]):
    """A list of SQL statements that begins with a guard statement and is a whole transaction.

    The guard statement checks that no concurrent transaction has changed the data on which the
    request is based. The guard statement succeeds if it returns or changes at least one row. If the
    guard statement succeeds, the transaction is committed, and the flow receives the guard
    statement's rows. If the guard statement fails, nothing is written, and `GuardFailed` is raised
    in the flow that yielded the request.

    On Postgres, all statements of a request are sent at once, before the guard statement's result
    is known. Therefore, a guard statement on Postgres must report a failed check by raising an SQL
    error, such as a division by zero or a duplicate key.
    """


class CombinedRequest(GuardedRequest):
    """Several guarded requests, combined so that they are executed in a single transaction.

    The flow receives one list of rows for each statement.
    """


class GuardFailed(Exception):
    """Raised if the guard statement of a `GuardedRequest` fails; nothing was written.

    A flow may catch this error, read the database again and yield a new request.
    """


Request = Statement | list[Statement]
"""A value that a flow yields. For one statement the flow receives a list of rows. For a list of
statements, which are executed in order, the flow receives a list of such lists."""

Flow = Generator[Request, Any, T]
# A flow, or an operation (see `perdure.effects`), which yields effects instead of requests.
Steps = Generator[R, Any, T] | Coroutine[R, Any, T]


def run_flow(flow: Steps[R, T], execute: Callable[[R], Any]) -> T:
    """Run a flow to completion and return its result.

    Args:
        flow: The flow, or an operation.
        execute: A function that executes a request and returns its rows. Errors that it raises are
            raised in the flow, at the `yield` of the request.
    """
    send_rows = flow.send
    try:
        request = send_rows(None)
        while True:
            try:
                rows = execute(request)
            except BaseException as exc:
                request = flow.throw(exc)
            else:
                request = send_rows(rows)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def arun_flow(flow: Steps[R, T], execute: Callable[[R], Awaitable[Any]]) -> T:
    """Run a flow as `run_flow` does, but execute each request with an asynchronous function."""
    try:
        request = flow.send(None)
        while True:
            try:
                rows = await execute(request)
            except BaseException as exc:
                request = flow.throw(exc)
            else:
                request = flow.send(rows)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def fetch_rows(sql: str, *params: Any) -> Flow[list[Row]]:
    """Execute one SQL statement as a flow, and return the statement's rows."""
    return (yield Statement(sql, params))  # type: ignore[no-any-return]


def sum_by_month(counts_by_day: Sequence[Row]) -> dict[str, int]:
    """Sum up counts by month.

    Args:
        counts_by_day: Rows `(day, count)`, where `day` is the number of days since 1970-01-01.

    Returns:
        The sum of the counts for each month, by names like `"1970-01"`.

    >>> sum_by_month([(0, 2), (30, 1), (31, 5)])
    {'1970-01': 3, '1970-02': 5}
    """
    months: dict[str, int] = {}
    for day, count in counts_by_day:
        month = f"{_EPOCH + timedelta(days=day):%Y-%m}"
        months[month] = months.get(month, 0) + count
    return months


# -- statements by name, from `.sql` files. A line `-- name: description` precedes each statement.

_STATEMENT_HEADING = re.compile(r"^-- (\w+):[^\n]*\n", re.MULTILINE)


class NamedSQL(dict[str, str]):
    """The SQL statements of a component, by name."""

    def __call__(self, name: str, *params: Any) -> Statement:
        """Return the SQL statement stored under `name`, with the parameters `params`."""
        return Statement(self[name], params)

    def build_statements(self, name: str, rows: Sequence[Row]) -> list[Statement]:
        """Return statements that execute the SQL named `name` once for each row of parameters.

        If there are several rows and a statement `<name>_all` exists, only that statement is
        returned, because it processes all rows at once. Its parameters are arrays, one for each
        column, which contain that column's values from all rows.
        """
        if len(rows) > 1 and f"{name}_all" in self:
            return [self(f"{name}_all", *map(list, zip(*rows, strict=True)))]
        return [self(name, *row) for row in rows]

    def build_batch_statement(self, name: str, rows: Sequence[Row]) -> Statement:
        """Return a single `Statement` that executes the SQL named `name` for all parameter rows.

        The returned statement returns no rows.
        """
        if len(rows) > 1 and f"{name}_all" in self:
            return self.build_statements(name, rows)[0]
        return Statement(self[name], rows, execute_many=True)


def load_sql(package: str, *filenames: str, with_tenants: bool = False) -> NamedSQL:
    """Load the named statements from a package's `.sql` files.

    Args:
        package: The name of the package.
        *filenames: The files. A statement in a later file replaces the one of the same name.
        with_tenants: Whether tenants share the tables. If they do, the placeholder `{tenant}`,
            which precedes the columns of keys, becomes the column `tenant`; otherwise, it is
            removed.
    """
    statements = NamedSQL()
    for filename in filenames:
        text = files(package).joinpath(filename).read_text(encoding="utf-8")
        _, *parts = _STATEMENT_HEADING.split(
            text.replace("{tenant}", "tenant, " if with_tenants else "")
        )
        bodies = (body.strip().rstrip(";") for body in parts[1::2])
        statements.update(zip(parts[::2], bodies, strict=True))
    return statements
