"""Define flows (generators that yield SQL statements), promises, and queued writes.

A flow is a generator that yields SQL statements and receives the resulting rows. A flow does not
depend on the database driver, so one implementation works with all drivers, blocking and
asynchronous. The design of flows is based on httpx's `Auth.auth_flow` and psycopg's generators.

An OS thread or a coroutine waits for the future of a `Promise`. The OS thread that executes the
work stores the outcome in the `Promise`, and resolves the future. A `Job` is the `Promise` of a
write that waits in the queue of a database.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import cache
from importlib.resources import files
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")
R = TypeVar("R")
# A LIMIT so large that it has no effect
NO_LIMIT = 1 << 62
_UUID_BYTES = 16  # Length of a UUID in bytes
_EPOCH = date(1970, 1, 1)
Row = tuple[Any, ...]
_log = logging.getLogger("perdure")


class TextOrBytes(str):
    """A string to be stored in a column that holds text in some rows and bytes in others.

    In Postgres, a column that stores both text and bytes has the type `bytea`. Use
    `decode_text_or_bytes` to decode the stored values.
    """

    __slots__ = ()

    def to_column_bytes(self) -> bytes:
        """Encode the text for a `bytea` column.

        The encoded text consists of a NUL byte and the text in UTF-8. If the encoded text is as
        long as a UUID, the byte 0xFF is appended, so that the text cannot be mistaken for a UUID
        when it is decoded.
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
    """The final SQL statements of a transaction, which are executed just before the commit.

    The transaction is committed after the statements of a `LastRequest`.

    If a flow yields requests after a `LastRequest`, they run in a new transaction or snapshot. On
    Postgres, a statement in a `LastRequest` also sees rows that other transactions committed before
    the statement started.
    """


class GuardedRequest(list[Statement]):
    """SQL statements of one transaction, of which the first is called the guard statement.

    The guard statement checks that no concurrent transaction has changed the data that the request
    depends on. The check succeeds if the guard statement returns or changes at least one row. If
    the guard statement succeeds, the remaining statements are executed, and the transaction is
    committed. The flow, which is the generator that yielded the request, receives the rows that the
    guard statement returned. If the guard statement fails, the request writes nothing.
    `GuardFailed` is then raised inside the flow, which is the generator that yielded the request.

    On Postgres, all statements of a request are sent at once, before the guard statement's result
    is known. On Postgres, a failing guard must raise an SQL error, such as a division by zero or a
    duplicate key. After an SQL error, the Postgres server skips the remaining statements of the
    request.
    """


class CombinedRequest(GuardedRequest):
    """Several guarded requests, combined so that they are executed in a single transaction.

    A flow is a generator that yields requests. If a flow yields a combined request, the flow
    receives a list of rows for each statement in the request.
    """


class GuardFailed(Exception):
    """Raised if the guard statement of a `GuardedRequest` fails; nothing was written.

    A flow may catch `GuardFailed`, read the database again and yield a new request.
    """


Request = Statement | list[Statement]
"""A value that a flow yields. For one statement the flow receives a list of rows. For a list of
statements, which are executed in order, the flow receives a list of such lists."""

Flow = Generator[Request, Any, T]
# A flow or an operation. A flow yields database requests, and an operation yields effects (see
# `perdure.effects`).
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


def get_result_if_no_request_is_needed(flow: Flow[T]) -> T | None:
    """Run a flow that may find all its data in a cache, and return its result.

    If the flow yields a request, close the flow and return None.
    """
    try:
        flow.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    flow.close()
    return None


def is_in_event_loop() -> bool:
    """Return whether an event loop is running in the calling thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def fetch_rows(sql: str, *params: Any) -> Flow[list[Row]]:
    """Return a flow that executes one SQL statement and returns its rows."""
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


# -- the results of work that another OS thread executes


@dataclass(slots=True, eq=False)
class Promise(Generic[T]):
    """The outcome of a task that runs in another thread, and a future for the waiting caller.

    The OS thread that executes the task sets the attribute `result` or `error` of the promise, then
    calls `resolve_futures_in_their_threads`.

    Attributes:
        future: The future that the waiting side uses. If a coroutine waits, the future is one that
            the event loop of the coroutine has created.
        result: The result of the task. It is not set before the task has succeeded.
        error: The error that the task raised, or None.
    """

    future: Future[T] | asyncio.Future[T]
    result: T = field(init=False)
    error: BaseException | None = field(default=None, init=False)

    def start_unless_cancelled(self) -> bool:
        """Return whether the task must be executed, that is, whether its future was not cancelled.

        If an OS thread, not a coroutine, waits for the result, the task's future cannot be
        cancelled after `start_unless_cancelled` has returned True.
        """
        if isinstance(self.future, Future):
            return self.future.set_running_or_notify_cancel()
        return not self.future.cancelled()


def resolve_futures_in_their_threads(promises: Sequence[Promise[Any]]) -> None:
    """Resolve each promise's future with the task's result or error.

    A promise holds the outcome of a task, and the future on which the caller waits for this
    outcome.

    If a coroutine waits for a future, the future is resolved in the OS thread of the coroutine's
    event loop. Each event loop is woken only once. If an OS thread, not a coroutine, waits for a
    future, the future is resolved directly in the OS thread that calls this function.
    """
    by_loop: dict[asyncio.AbstractEventLoop | None, list[Promise[Any]]] = {}
    for promise in promises:
        future = promise.future
        loop = None if isinstance(future, Future) else future.get_loop()
        by_loop.setdefault(loop, []).append(promise)
    for loop, loop_promises in by_loop.items():
        if loop is None:
            resolve_futures_in_this_thread(loop_promises)
        else:
            # `call_soon_threadsafe` raises RuntimeError if the event loop is closed. Ignore the
            # error, because no coroutine of that loop waits for the results any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(resolve_futures_in_this_thread, loop_promises)


def resolve_futures_in_this_thread(promises: Sequence[Promise[Any]]) -> None:
    """Set the results of futures.

    An asyncio future must be resolved in the thread of its event loop.
    """
    for promise in promises:
        if promise.future.done():
            # Skip a future that was cancelled while its task was running.
            continue
        if isinstance(promise.error, StopIteration):  # A future does not accept StopIteration.
            error = RuntimeError("a call raised StopIteration")
            error.__cause__ = promise.error
            promise.future.set_exception(error)
        elif promise.error is not None:
            promise.future.set_exception(promise.error)
        else:
            promise.future.set_result(promise.result)


# A pair of counts that shows whether others have written since a cache was filled. The first
# element is the number of changes that other connections made to the file. The second element is
# the number of commits by the component in this process, excluding commits by the owner of the
# cache.
WriteCounts: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class OwnWrites:
    """Counts the writes that the owner of a cache has committed.

    The owner's writes are subtracted from the count of all writes to get the number of writes by
    others.

    Attributes:
        commit_count: The number of transactions that the owner of the cache has committed.
        write_counts_except_own: The counts of writes by others after the last transaction of the
            owner; see `Database.count_writes_except_own`.
    """

    commit_count: int = 0
    write_counts_except_own: WriteCounts | None = None


@dataclass(slots=True, eq=False)
class Job(Promise[T]):
    """A queued write that has not been committed yet, with the arguments of `Database.write`."""

    make_flow: Callable[[], Flow[T]]
    on_commit: Callable[[T], None] | None = None
    on_rollback: Callable[[], None] | None = None
    component: str = ""
    own_writes: OwnWrites | None = None
    may_wait: bool = False
    deletes_rows: bool = False

    def call_commit_callback(self) -> None:
        """Call `on_commit` with the result, after the transaction has been committed."""
        try:
            if self.on_commit is not None:
                self.on_commit(self.result)
        except Exception:
            _log.exception(
                "on_commit() failed after the write was committed; calling on_rollback()"
            )
            self._call_rollback_callback()

    def finish_with_error(self, error: BaseException) -> None:
        """Store the error of a failed write in the job's attribute `error`, and call `on_rollback`.

        A job fails if its flow raises an error, or if committing its transaction fails.
        """
        self.error = error
        self._call_rollback_callback()

    def _call_rollback_callback(self) -> None:
        try:
            if self.on_rollback is not None:
                self.on_rollback()
        except Exception:
            _log.exception("on_rollback() failed")


# -- statements by name, from `.sql` files. A line `-- name: description` precedes each statement.

_STATEMENT_HEADING = re.compile(r"^-- (\w+):[^\n]*\n", re.MULTILINE)


class NamedSQL(dict[str, str]):
    """The SQL statements of a component, by name."""

    def __call__(self, name: str, *params: Any) -> Statement:
        """Return the SQL statement stored under `name`, with the parameters `params`."""
        return Statement(self[name], params)

    def build_statements(self, name: str, rows: Sequence[Row]) -> list[Statement]:
        """Build the statements that execute the SQL stored under `name` for every parameter row.

        If there are several rows of parameters and the component defines a statement `<name>_all`,
        return only that statement. The statement `<name>_all` processes all rows of parameters at
        once. The statement `<name>_all` has one parameter for each column. Each such parameter is
        an array that contains the column's value from every parameter row.
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


@cache
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
