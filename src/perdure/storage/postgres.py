"""`PostgresDatabase`: a `Database` in a schema of a Postgres database.

A flow yields requests, which consist of SQL statements. The statements of each request are sent in
libpq's pipeline mode. If the flow marks a request as its last request, the COMMIT is sent in the
same pipeline (https://www.postgresql.org/docs/current/libpq-pipeline-mode.html). A connection
pooler may run each transaction on a different connection. Transactions that run through a
connection pooler do not rely on session settings. Each transaction through a pooler sets its own
search path and tenant.

A writing transaction takes advisory locks on the names that were passed to `Database.write`. If two
transactions lock the same name, the second one waits until the first one ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain
from threading import Event, Lock
from typing import Any, Final, NamedTuple, Self, TypeVar

from perdure import settings
from perdure.errors import (
    ConfigurationError,
    MissingDependency,
    StorageError,
    StorageUnavailable,
)
from perdure.storage.database import (
    GROUP_WAIT_S,
    DatabaseOwner,
    QueueLocation,
    Schema,
)
from perdure.storage.flow import (
    CombinedRequest,
    Flow,
    GuardedRequest,
    GuardFailed,
    Job,
    NamedSQL,
    OwnWrites,
    Statement,
    WriteCounts,
    fetch_rows,
    load_sql,
    resolve_futures_in_their_threads,
    run_flow,
)
from perdure.storage.locks import Locks, NamedLock, Queues, Ticket
from perdure.storage.shared_resources import LazyDatabase

try:
    import psycopg
    from psycopg import errors
    from psycopg_pool import ConnectionPool

    from perdure.storage.postgres_connection import (
        AdvisoryLocks,
        Connections,
        OwnPool,
        Server,
        UserPool,
        build_lock_needs_direct_dsn_message,
        compute_lock_key,
        describe_pool,
    )
    from perdure.storage.postgres_dsn import (
        Dsn,
        FixedDsn,
        build_dsn_source,
        build_pool_dsn_source,
        format_uri,
    )
    from perdure.storage.postgres_errors import (
        convert_psycopg_errors,
        is_connection_lost,
        translate_error,
    )
    from perdure.storage.postgres_requests import PipelineConnection
    from perdure.storage.postgres_schema import (
        create_tables,
        list_table_names,
        validate_optional_tenant_name,
    )
    from perdure.storage.postgres_transaction import BEGIN, Transaction
except ImportError as exc:
    raise MissingDependency(
        'Postgres databases require psycopg and psycopg_pool; run pip install "perdure[postgres]"'
    ) from exc

T = TypeVar("T")
# A call to a Postgres function such as `set_config`: the SQL expression with one placeholder, and
# the value for the placeholder
_FunctionCall = tuple[str, Any]
_log = logging.getLogger("perdure")
# Maximum number of names that a transaction locks individually. If there are more names, it locks
# the whole component, because the server's lock table is small.
_MAX_LOCK_NAMES: Final = 64
# Maximum number of attempts for a transaction that loses its connection or conflicts with another
# transaction
_MAX_ATTEMPTS: Final = 10
_CONFLICT_ERRORS: Final = (errors.SerializationFailure, errors.DeadlockDetected)
_REQUEST_SCRUB_SQL: Final = (
    "INSERT INTO settings (name, value) VALUES ('scrub', ?) "
    "ON CONFLICT ({}name) DO UPDATE SET value = excluded.value"
)
_BEGIN_SNAPSHOT: Final = Statement("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
# A table is vacuumed once its deleted rows reach this number plus 2 % of its live rows.
_MIN_DEAD_ROWS: Final = 1_000
_TABLES_TO_VACUUM_SQL: Final = """
SELECT relname::text FROM pg_stat_user_tables WHERE schemaname = ?1 AND relname = ANY(?2)
AND n_dead_tup >= ?3::bigint * (1 + n_live_tup / 50000)
"""
_SIZES_SQL: Final = """
SELECT current_setting('server_version'), coalesce(sum(pg_total_relation_size(c.oid)), 0)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = ? AND c.relkind = 'r'
"""


class _WriteGroup(NamedTuple):
    """A group of writes that lock the same names and are committed in one transaction.

    Attributes:
        jobs: The writes, in the order of their submission.
        ticket: The place of the group in the queues of its exclusive names.
        closed: An event that is set once no more writes may join. None if no write may ever join.
    """

    jobs: list[Job[Any]]
    ticket: Ticket
    closed: Event | None = None


class PostgresDatabase(LazyDatabase[Server]):
    """A `Database` for one component, stored in a schema of a Postgres database.

    Args:
        dsn: A libpq connection string or URI; a function that returns such a string and is called
            for each new connection; or a `psycopg_pool.ConnectionPool` that the caller owns.
        tables: The tables of the component.
        begin: A function that builds the flow that runs whenever the component opens the database.
        schema: The Postgres schema that contains the tables. It is created if it does not exist.
        tenant: The tenant whose rows are visible, or None for tables without tenants.
        pooled: Whether the DSN leads to a pooler that gives each transaction another connection,
            such as PgBouncer with `pool_mode = transaction`. With True, no statement is prepared.
        direct: The DSN of the server itself for locks, or a function that returns this DSN. None
            means `dsn`, unless `dsn` leads to a pooler. If `dsn` is a pool of the caller, None
            means a connection that is made from the parameters of that pool.
        read_only: Whether nothing may be created or written.
        pool_size: The maximum number of connections of this process. It has no effect on a pool of
            the caller, which has its own size.
        timeout_s: The seconds to wait for a connection, and for a lock of another transaction.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    _resource_class = Server

    def __init__(
        self,
        dsn: Dsn,
        tables: Schema,
        *,
        begin: Callable[[], Flow[object]] | None = None,
        schema: str = "perdure",
        tenant: str | None = None,
        pooled: bool = False,
        direct: str | Callable[[], str] | None = None,
        read_only: bool = False,
        pool_size: int = 10,
        timeout_s: float = settings.TIMEOUT_S,
    ) -> None:
        self._pool = dsn if isinstance(dsn, ConnectionPool) else None
        self._source = (
            build_dsn_source(dsn) if self._pool is None else build_pool_dsn_source(self._pool)
        )
        name = schema if isinstance(schema, str) else ""
        if not re.fullmatch(r"(?!pg_)[a-z_][a-z0-9_]{0,40}", name):
            raise ConfigurationError(
                f"the argument 'schema' is {schema!r}; expected 1 to 41 characters (a-z, 0-9, _) "
                "that do not start with a digit or 'pg_'"
            )
        if type(pool_size) is not int or pool_size < 1:
            raise ConfigurationError(
                f"the argument 'pool_size' is {pool_size!r}; expected an integer of 1 or more"
            )
        if not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise ConfigurationError(
                f"the argument 'timeout_s' is {timeout_s!r}; expected a number of seconds "
                "greater than 0"
            )
        # `_schema` is the name of the Postgres schema, and `_component_schema` the component's
        # table definitions.
        self._component_schema, self._begin, self._schema = tables, begin, schema
        self._read_only = read_only
        self._lock_timeout = str(max(1, min(int(timeout_s * 1000), 2**31 - 1)))
        self._is_pooled, self._pool_size, self._timeout_s = pooled, pool_size, timeout_s
        self._tenant = validate_optional_tenant_name(tenant)
        self._lock_namespace = (schema,) if tenant is None else (schema, tenant)
        self._tables = ["schemas", "settings", *list_table_names(tables.script)]
        super().__init__()
        self._locks = Locks(self._build_advisory_locks(direct))
        # Execute writes in submission order, so that a cancelled run's write cannot be executed
        # after a write of the next run.
        self._queues, self._submit_lock = Queues(), Lock()
        # Open write groups, which new writes can join, keyed by the name on which each group takes
        # an exclusive lock.
        self._open_groups: dict[str, _WriteGroup] = {}

    def _build_advisory_locks(self, direct_dsn: object) -> AdvisoryLocks | None:
        """Build the advisory locks, or return None if every known DSN connects through a pooler."""
        self._can_lock = direct_dsn is not None or not self._is_pooled
        if not self._can_lock:
            return None
        source = self._source if direct_dsn is None else build_dsn_source(direct_dsn, "direct")
        return AdvisoryLocks(
            source,
            *self._lock_namespace,
            is_direct=direct_dsn is not None,
            timeout_s=self._timeout_s,
        )

    @property
    def path(self) -> str:
        """See `Database.path`.

        If the user passed a connection pool, the path is the pool's name.
        """
        return self._source.name if self._pool is None else describe_pool(self._pool)

    @property
    def location_key(self) -> Hashable:
        """See `Database.location_key`."""
        return (*self._source.locate_database(self._timeout_s), self._schema, self._tenant)

    @property
    def job_queue_location(self) -> QueueLocation:
        """See `Database.job_queue_location`.

        Each tenant has its own job queue. Without tenants, the schema has a single job queue.
        """
        tenant_suffix = (
            f"_{compute_lock_key(*self._lock_namespace) & 0xFFFFFFFFFFFFFFFF:016x}"
            if self._tenant is not None
            else ""
        )
        # Include the DSN in the queue location only if it is a fixed string, because a DSN returned
        # by a user-supplied function may contain a short-lived password.
        url = format_uri(self._source.resolve_dsn(0)) if isinstance(self._source, FixedDsn) else ""
        return QueueLocation(url, f"{self._schema}_jobs{tenant_suffix}")

    @property
    def tenant(self) -> str | None:
        """See `Database.tenant`."""
        return self._tenant

    @property
    def read_only(self) -> bool:
        """See `Database.read_only`."""
        return self._read_only

    # -- connecting and closing

    def _open_file_or_server(self) -> Server:
        """See `LazyDatabase._open_file_or_server`."""
        # Several databases in this process share their connections if they use the same schema and
        # the same pool or DSN source.
        key = self._pool or self._source.key, self._schema, self._is_pooled
        server = self._share_or_create_resource(key, self._start_server)
        try:
            with convert_psycopg_errors(server.name), server.connection() as conn:
                create_tables(
                    conn,
                    server.name,
                    self._component_schema,
                    self._schema,
                    self._tenant,
                    self._read_only,
                )
            if self._begin is not None:
                transaction_start = (
                    ([_BEGIN_SNAPSHOT],)
                    if self._read_only
                    else ([BEGIN], self._build_transaction_start_and_lock_calls(None))
                )
                self._run_transaction(server, self._begin, *transaction_start)
        except BaseException:
            server.decrement_user_count_and_shut_down_if_unused()
            raise
        return server

    def load_sql(self, package: str) -> NamedSQL:
        """See `Database.load_sql`."""
        return load_sql(
            package, "sqlite.sql", "postgres.sql", with_tenants=self._tenant is not None
        )

    def create_tables(self, schema: Schema) -> None:
        """See `Database.create_tables`."""
        server = self._connect_once()
        with convert_psycopg_errors(server.name), server.connection() as conn:
            create_tables(conn, server.name, schema, self._schema, self._tenant, self._read_only)
        self._add_known_component(schema)

    def _add_known_component(self, schema: Schema) -> None:
        """See `LazyDatabase._add_known_component`."""
        if schema.component not in self._known_components:
            # Add the component's tables to `_tables`, the list of tables that are vacuumed.
            self._tables = [*self._tables, *list_table_names(schema.script)]
        super()._add_known_component(schema)

    def _start_server(self) -> Server:
        """Create a connection pool, or use the one that the user passed."""
        connections: Connections
        if self._pool is not None:
            connections = UserPool(self._pool, self._timeout_s)
        else:
            connections = OwnPool(
                self._source,
                self._schema,
                pooled=self._is_pooled,
                size=self._pool_size,
                timeout_s=self._timeout_s,
            )
        return Server(connections)

    def close(self) -> None:
        """See `Database.close`."""
        self._locks.close()
        super().close()

    # -- writing

    def write(
        self,
        make_flow: Callable[[], Flow[T]],
        on_commit: Callable[[T], None] | None = None,
        on_rollback: Callable[[], None] | None = None,
        exclusive_names: Sequence[str] | None = None,
        own_writes: OwnWrites | None = None,
        may_wait: bool = False,
        urgent: bool = False,
        deletes_rows: bool = False,
    ) -> T:
        """See `Database.write`.

        On Postgres, the arguments `own_writes`, `may_wait`, `urgent` and `deletes_rows` have no
        effect.
        """
        server, job = (
            self._connect_for_writing(),
            Job(Future(), make_flow, on_commit, on_rollback),
        )
        with self._submit_lock:
            group = self._add_write_group_for_job(job, exclusive_names)
        self._commit_write_group(server, group, exclusive_names)
        return job.future.result()

    def awrite(
        self,
        make_flow: Callable[[], Flow[T]],
        on_commit: Callable[[T], None] | None = None,
        on_rollback: Callable[[], None] | None = None,
        exclusive_names: Sequence[str] | None = None,
        own_writes: OwnWrites | None = None,
        may_wait: bool = False,
        urgent: bool = False,
        deletes_rows: bool = False,
    ) -> Awaitable[T]:
        """See `Database.awrite`.

        On Postgres, the arguments `own_writes`, `urgent` and `deletes_rows` have no effect.
        """
        if self._resource is None:
            # Check in the calling OS thread that the run still holds its locks. The run's locks are
            # recorded in a context variable, which is empty in the pool thread that executes the
            # write.
            self._locks.check_still_held()
            work = partial(self.write, make_flow, on_commit, on_rollback, exclusive_names)
            return self._call_after_connecting(lambda server: server.run_in_thread(work))
        server, future = self._connect_for_writing(), asyncio.get_running_loop().create_future()
        job = Job(future, make_flow, on_commit, on_rollback)
        name = (
            exclusive_names[0] if exclusive_names is not None and len(exclusive_names) == 1 else ""
        )
        # A write that joins a group needs no OS thread, so waiting writes cannot exhaust the thread
        # pool.
        with self._submit_lock:
            group = self._open_groups.get(name)
            if group is not None:
                group.jobs.append(job)
                if not may_wait:
                    # Accept no more writes into this group. The OS thread that commits the group
                    # then does not wait for further writes.
                    self._stop_adding_to_write_group(name)
                return job.future  # type: ignore[return-value]
            group = self._add_write_group_for_job(
                job, exclusive_names, may_wait=may_wait and bool(name)
            )
            try:
                server.threads.submit_without_result(
                    partial(self._commit_write_group, server, group, exclusive_names)
                )
            except BaseException:
                self._stop_adding_to_write_group(name)
                group.ticket.leave()
                raise
        return job.future  # type: ignore[return-value]

    def _add_write_group_for_job(
        self, job: Job[Any], exclusive_names: Sequence[str] | None, *, may_wait: bool = False
    ) -> _WriteGroup:
        """Create a group of writes for one job.

        A write group is a list of writes that are committed in one transaction. The new write group
        is appended to the queue for each name in `exclusive_names`, so that write groups with a
        common name run one after another. Earlier write groups that lock a name in
        `exclusive_names` are closed, so that no later write can join them and be committed before
        `job`.
        """
        for name in exclusive_names or ():
            self._stop_adding_to_write_group(name)
        group = _WriteGroup(
            [job],
            self._queues.append_ticket_to_queues(*exclusive_names or ()),
            Event() if may_wait else None,
        )
        if may_wait and exclusive_names:
            self._open_groups[exclusive_names[0]] = group
        return group

    def _stop_adding_to_write_group(self, exclusive_name: str) -> None:
        """Close the open write group for the exclusive lock `exclusive_name`, if the group exists.

        The writes of a write group are committed in one transaction.

        A closed group accepts no more writes.
        """
        group = self._open_groups.pop(exclusive_name, None)
        if group is not None and group.closed is not None:
            group.closed.set()

    def _commit_write_group(
        self, server: Server, group: _WriteGroup, exclusive_names: Sequence[str] | None
    ) -> None:
        """Wait until a write group is first in every queue it has joined, then commit its jobs.

        If the write group is still open, wait up to `GROUP_WAIT_S` seconds for other writes to join
        it.
        """
        if group.closed is not None and not group.closed.wait(GROUP_WAIT_S) and exclusive_names:
            with self._submit_lock:
                if self._open_groups.get(exclusive_names[0]) is group:
                    del self._open_groups[exclusive_names[0]]
        jobs = [job for job in group.jobs if job.start_unless_cancelled()]
        if not jobs:
            group.ticket.leave()
            return
        try:
            with group.ticket:
                self._commit_jobs(server, jobs, exclusive_names)
        except BaseException as exc:
            for job in jobs:
                job.finish_with_error(exc)
        resolve_futures_in_their_threads(jobs)

    def _commit_jobs(
        self, server: Server, jobs: list[Job[Any]], exclusive_names: Sequence[str] | None
    ) -> None:
        """Run jobs in one transaction.

        If the shared transaction fails, run each job in its own transaction, unless the server is
        unavailable.
        """
        try:
            make_flow = partial(_combine_flows, jobs) if len(jobs) > 1 else jobs[0].make_flow
            result = self._run_transaction(
                server,
                make_flow,
                [BEGIN],
                self._build_transaction_start_and_lock_calls(exclusive_names),
            )
        except BaseException as exc:
            is_final = len(jobs) == 1 or isinstance(exc, StorageUnavailable)
            for job in jobs:
                job.finish_with_error(exc) if is_final else self._commit_jobs(
                    server, [job], exclusive_names
                )
        else:
            for job, job.result in zip(jobs, result if len(jobs) > 1 else [result], strict=True):
                job.call_commit_callback()

    def count_writes_except_own(self, own_writes: OwnWrites) -> WriteCounts | None:
        """Return None, because writes in Postgres cannot be counted without I/O."""
        return None

    async def wait_and_count_writes_except_own(self, own_writes: OwnWrites) -> WriteCounts | None:
        """Return None, because writes in Postgres cannot be counted without a query."""
        return None

    def write_later(self, make_flow: Callable[[], Flow[object]]) -> None:
        """See `Database.write_later`.

        The write runs in another OS thread, because the calling OS thread may be in the middle of a
        read.
        """
        with suppress(StorageError):
            server = self._connect_for_writing()
            group = self._add_write_group_for_job(Job(Future(), make_flow), None)
            server.threads.submit_without_result(
                partial(self._commit_write_group, server, group, None)
            )

    def _connect_for_writing(self) -> Server:
        """Open the database for writing, and return its `Server`.

        Raises:
            StorageError: The database is read-only, or a lock of the calling run was lost.
        """
        if self._read_only:
            raise StorageError(f"{self.path} was opened read-only; open it without read_only")
        self._locks.check_still_held()
        return self._connect_once()

    def _run_transaction(
        self,
        server: Server,
        make_flow: Callable[[], Flow[T]],
        begin: Sequence[Statement],
        calls: Sequence[_FunctionCall] = (),
    ) -> T:
        """Run a flow in a transaction.

        If the connection is lost or the transaction conflicts with another one, the flow is rebuilt
        and rerun.

        Args:
            server: The server.
            make_flow: A function that builds the flow.
            begin: The statements that begin the transaction.
            calls: Function calls that are made first, as SQL with one parameter each.
        """
        for attempt in range(_MAX_ATTEMPTS):
            try:
                with (
                    server.connection() as conn,
                    Transaction(
                        server, conn, begin, self._build_function_call_statements(conn, *calls)
                    ) as transaction,
                ):
                    return run_flow(make_flow(), transaction.execute)
            except psycopg.Error as exc:
                if not (is_connection_lost(exc) or isinstance(exc, _CONFLICT_ERRORS)):
                    raise translate_error(exc, server.name) from exc
                error = exc
            time.sleep(random.uniform(0, min(1.0, 0.01 * 2**attempt)))
        raise translate_error(error, server.name) from error

    def _build_transaction_start_and_lock_calls(
        self, names: Sequence[str] | None
    ) -> list[_FunctionCall]:
        """Build the calls of SQL functions that are executed at the start of a write transaction.

        Args:
            names: The exclusive names; see `Database.write`.

        Returns:
            The call that returns the number of the transaction and limits the wait for locks, then
            the calls that take the advisory locks.
        """
        namespace = *self._lock_namespace, self._component_schema.component
        transaction_call = "pg_current_xact_id()::text, set_config('lock_timeout', ?, true)"
        calls: list[_FunctionCall] = [(transaction_call, self._lock_timeout)]
        if names is None or len(names) > _MAX_LOCK_NAMES:
            return [*calls, ("pg_advisory_xact_lock(?)", compute_lock_key(*namespace))]
        calls.append(("pg_advisory_xact_lock_shared(?)", compute_lock_key(*namespace)))
        # Sort the keys, so that concurrent transactions acquire the locks in the same order and
        # cannot deadlock.
        keys = sorted(compute_lock_key(*namespace, name) for name in names)
        if len(keys) == 1:
            return [*calls, ("pg_advisory_xact_lock(?)", keys[0])]
        lock_many = "(SELECT count(pg_advisory_xact_lock(key)) FROM unnest(?::bigint[]) AS key)"
        return [*calls, (lock_many, keys)]

    def _build_function_call_statements(
        self, conn: PipelineConnection, *calls: _FunctionCall
    ) -> list[Statement]:
        """Build one SELECT statement that calls SQL functions and sets transaction settings.

        The SELECT statement calls the functions in `calls`. The same statement sets the search
        path, and the tenant if the database has one.

        The SELECT sets the search path only if the connection does not keep session settings
        between transactions. The result is a list with at most one statement. The returned list of
        statements is empty if `calls` contains no function calls and the transaction needs no
        settings.
        """
        if not conn.keeps_session:
            calls += (("set_config('search_path', ?, true)", self._schema),)
        if self._tenant is not None:
            calls += (("set_config('perdure.tenant', ?, true)", self._tenant),)
        if not calls:
            return []
        texts, params = zip(*calls, strict=True)
        return [Statement(f"SELECT {', '.join(texts)}", params)]

    # -- reading

    def read(self, make_flow: Callable[[], Flow[T]], *, snapshot: bool = True) -> T:
        """See `Database.read`."""
        return self._run_transaction(
            self._connect_once(), make_flow, [_BEGIN_SNAPSHOT] if snapshot else []
        )

    async def aread(self, make_flow: Callable[[], Flow[T]], *, snapshot: bool = True) -> T:
        """See `Database.aread`."""
        return await self.run_in_thread(lambda: self.read(make_flow, snapshot=snapshot))

    # -- locking

    def lock(self, name: str, *, timeout_s: float | None = None) -> NamedLock:
        """See `Database.lock`. The lock is a Postgres advisory lock on a dedicated connection.

        Raises:
            ConfigurationError: The only DSN leads to a pooler.
        """
        if not self._can_lock:
            raise ConfigurationError(build_lock_needs_direct_dsn_message(self.path))
        return NamedLock(lambda: self._locks, self.aconnect, name, timeout_s)

    # -- maintenance

    def request_scrub_of_deleted_rows(self) -> Flow[None]:
        """See `Database.request_scrub_of_deleted_rows`."""
        tenant_column = "" if self._tenant is None else "tenant, "
        yield Statement(_REQUEST_SCRUB_SQL.format(tenant_column), (secrets.token_bytes(8),))

    def scrub_deleted_rows(self) -> bool:
        """See `Database.scrub_deleted_rows`.

        If a scrub was requested, vacuum all tables. A scrub is a request to overwrite deleted
        bytes. If a scrub was requested, return False to report that deleted bytes may remain in the
        database files. Postgres does not overwrite deleted bytes.
        """
        scrub_request = self.read(
            lambda: fetch_rows("SELECT value FROM settings WHERE name = 'scrub'")
        )
        if scrub_request:
            self._vacuum_tables(0)
            drop = "DELETE FROM settings WHERE name = 'scrub' AND value = ?"
            self.write(lambda: fetch_rows(drop, *scrub_request[0]))
        return not scrub_request

    def release_unused_disk_space(self) -> None:
        """See `Database.release_unused_disk_space`. Tables with many deleted rows are vacuumed."""
        self._vacuum_tables(_MIN_DEAD_ROWS)

    def _vacuum_tables(self, min_dead_rows: int) -> None:
        """Vacuum the tables that have, by Postgres's estimate, at least `min_dead_rows` dead rows.

        For a table with 50,000 or more live rows, the minimum is multiplied by a factor that grows
        with the number of live rows.

        A table that another process has locked, for example to vacuum it, is skipped.
        """
        tables = partial(
            fetch_rows, _TABLES_TO_VACUUM_SQL, self._schema, self._tables, min_dead_rows
        )
        server, tables_to_vacuum = self._connect_for_writing(), self.read(tables)
        with convert_psycopg_errors(server.name), server.connection() as conn:
            for (table,) in tables_to_vacuum:
                conn.send_request(
                    [Statement(f"VACUUM (SKIP_LOCKED) {self._schema}.{table}")], prepare=False
                )

    def stats(self) -> dict[str, Any]:
        """See `Database.stats`. `size_bytes` includes the schema's tables and their indexes."""
        ((version, size),) = self.read(lambda: fetch_rows(_SIZES_SQL, self._schema))
        return {"path": self.path, "postgres_version": version, "size_bytes": int(size)}


class PostgresOwner(DatabaseOwner):
    """The base class of checkpointers and stores in Postgres."""

    @classmethod
    def open(cls, db: Dsn | os.PathLike[str] = settings.CHOSEN, **options: Any) -> Self:
        """Open a database immediately, or on first use if an event loop is running.

        Args:
            db: A DSN, a function that returns a DSN, or a pool, as in the argument `dsn` of the
                class. It may also be passed as `dsn=`. Without it, the database and the key of the
                settings are used; `perdure config` shows them.
            **options: The other arguments of the class.

        Raises:
            ConfigurationError: An argument is wrong, or the server refuses the login.
            SchemaMismatch: The database was written by a newer perdure, or by one from before the
                first release.
            WrongKey: The key is wrong or missing, or the database was made without a key.
            StorageUnavailable: The server cannot be reached, the function returns no DSN, or the
                pool gives no connection.
            StorageError: The database cannot be opened.
        """
        dsn: Any = options.pop("dsn") if db is settings.CHOSEN and "dsn" in options else db
        return super().open(dsn, **options)


def _combine_flows(jobs: Sequence[Job[Any]]) -> Flow[list[Any]]:
    """Combine the flows of several jobs into a single flow.

    The flow of each job must yield exactly one request, which is a `GuardedRequest`.

    Returns:
        The results of the jobs, in their order.

    Raises:
        GuardFailed: A flow does not consist of one guarded request, or a guard failed.
    """
    flows = [job.make_flow() for job in jobs]
    requests: list[Any] = [next(flow) for flow in flows]
    if not all(isinstance(request, GuardedRequest) for request in requests):
        raise GuardFailed
    rows, results = iter((yield CombinedRequest(chain(*requests)))), list[Any]()
    for flow, request in zip(flows, requests, strict=True):
        request_rows = [next(rows) for _ in request]
        try:
            flow.send(request_rows[0])
        except StopIteration as stop:
            results.append(stop.value)
    return results
