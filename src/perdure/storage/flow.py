"""Storage logic without a driver: a flow yields statements and is sent their rows.

The pattern is httpx's `Auth.auth_flow` and psycopg's generators: one implementation, any driver.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from datetime import date, timedelta
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")
NO_LIMIT = 1 << 62  # a limit of rows that limits nothing
_UUID = 16  # bytes
_EPOCH = date(1970, 1, 1)
Row = tuple[Any, ...]


class TextOrBytes(str):
    """Text for a column that holds bytes too, which Postgres has as bytes: see `stored_text`."""

    __slots__ = ()

    def to_column_bytes(self) -> bytes:
        """NUL, the text in UTF-8, and 0xFF if it would be as long as a UUID otherwise."""
        data = b"\0" + self.encode()
        return data + b"\xff" if len(data) == _UUID else data


def decode_text_or_bytes(stored: Any) -> Any:
    """What a column of text or bytes holds, whichever database it comes from."""
    if type(stored) is bytes and stored[:1] == b"\0" and len(stored) != _UUID:
        return stored[1:].removesuffix(b"\xff").decode()
    return stored


class Statement(NamedTuple):
    """One SQL statement. With `many`, `params` is a sequence of parameter rows; no rows result."""

    sql: str
    params: Sequence[Any] = ()
    execute_many: bool = False


class LastRequest(list[Statement]):
    """The last request of a flow; one that goes on is in another transaction, or snapshot.

    On Postgres each of its statements sees what was committed when it is run.
    """


class GuardedRequest(list[Statement]):
    """A whole transaction, if the first statement has a row; it rests on what is no more, else.

    That row is sent. In Postgres the statement raises an error itself, as the request is sent
    whole.
    """


class CombinedRequest(GuardedRequest):
    """Several `Guarded` requests as one transaction; it is sent the rows of all statements."""


class GuardFailed(Exception):
    """The first statement of a `Guarded` request has no row; a flow may go on otherwise."""


Request = Statement | list[Statement]
"""What a flow yields. For a list, executed in order in one go, it is sent a list of row lists."""

Flow = Generator[Request, Any, T]
Steps = Generator[R, Any, T] | Coroutine[R, Any, T]


def run_flow(flow: Steps[R, T], execute: Callable[[R], Any]) -> T:
    """Drive a flow to its end: errors of `execute` are thrown into it, its result is returned."""
    send = flow.send
    try:
        request = send(None)
        while True:
            try:
                rows = execute(request)
            except BaseException as exc:
                request = flow.throw(exc)
            else:
                request = send(rows)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def arun_flow(flow: Steps[R, T], execute: Callable[[R], Awaitable[Any]]) -> T:
    """See `run`."""
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
    """The flow of a single statement."""
    return (yield Statement(sql, params))  # type: ignore[no-any-return]


def sum_by_month(days: Sequence[Row]) -> dict[str, int]:
    """Counts by month, of counts by days since 1970.

    >>> by_month([(0, 2), (30, 1), (31, 5)])
    {'1970-01': 3, '1970-02': 5}
    """
    months: dict[str, int] = {}
    for day, count in days:
        month = f"{_EPOCH + timedelta(days=day):%Y-%m}"
        months[month] = months.get(month, 0) + count
    return months


# -- statements by name, from `.sql` files: a `-- name: what it is for` heading, then the statement

_HEADING = re.compile(r"^-- (\w+):[^\n]*\n", re.MULTILINE)


class NamedSQL(dict[str, str]):
    """SQL by name."""

    def __call__(self, name: str, *params: Any) -> Statement:
        """The statement of a name, with its parameters."""
        return Statement(self[name], params)

    def statements_for_rows(self, name: str, rows: Sequence[Row]) -> list[Statement]:
        """The statement of a name for each row of parameters.

        For more than one it is a single `<name>_all`, if there is that, with columns as arrays.
        """
        if len(rows) > 1 and f"{name}_all" in self:
            return [self(f"{name}_all", *map(list, zip(*rows, strict=True)))]
        return [self(name, *row) for row in rows]

    def batch_statement(self, name: str, rows: Sequence[Row]) -> Statement:
        """See `each`; no rows result."""
        if len(rows) > 1 and f"{name}_all" in self:
            return self.statements_for_rows(name, rows)[0]
        return Statement(self[name], rows, execute_many=True)


def load_sql(package: str, *filenames: str, tenants: bool = False) -> NamedSQL:
    """Read the named statements of packaged `.sql` files; a later file replaces statements.

    `{tenant}` stands before the columns of a key: of tables that tenants share, it is one too.
    """
    named = NamedSQL()
    for filename in filenames:
        text = files(package).joinpath(filename).read_text(encoding="utf-8")
        _, *parts = _HEADING.split(text.replace("{tenant}", "tenant, " if tenants else ""))
        bodies = (body.strip().rstrip(";") for body in parts[1::2])
        named.update(zip(parts[::2], bodies, strict=True))
    return named
