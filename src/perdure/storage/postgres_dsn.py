"""Postgres DSNs, and sources that provide a DSN for each new connection.

A source is a fixed DSN, a user-supplied function that returns a DSN (for rotating passwords), or
the connection parameters of a `psycopg_pool` pool that the user owns. No message contains a
password. If the user-supplied function that returns the DSN raises an error, only the error's class
is reported, because the error's text may contain a password.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from perdure.errors import ConfigurationError, StorageUnavailable
from perdure.storage.host_names import ascii_host
from perdure.storage.thread_pools import ThreadPool

Dsn = str | Callable[[], str] | ConnectionPool[Any]
"""The type of the argument `dsn`: a DSN, a function that returns a DSN, or a pool of the user."""

# Host, port and name of a database
DatabaseAddress = tuple[str, str, str]

_PORT: Final = "5432"  # The default port of Postgres
# Default parameters that are added to a DSN. The keepalive parameters make perdure detect an
# unreachable host within a minute.
_DEFAULTS: Final[dict[str, Any]] = {
    "application_name": "perdure",
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
# Parameters of `psycopg.Connection.connect` that cannot be part of a DSN
_NOT_IN_A_DSN: Final = frozenset(
    {"autocommit", "prepare_threshold", "context", "row_factory", "cursor_factory"}
)
# Maximum number of concurrent calls of one DSN function. The number is limited because each call
# that hangs keeps an OS thread occupied.
_MAX_CALLS: Final = 4
# Polling interval in seconds. While a caller waits for a function to return a DSN, the caller
# checks at this interval whether the `DsnSource` was closed
_POLL_S: Final = 0.1


# -- DSNs


def normalize_dsn(dsn: object) -> str:
    """Return a DSN in which missing parameters are set to perdure's defaults.

    The client encoding is always set to UTF-8, and host names are converted to ASCII.

    Raises:
        ConfigurationError: The text is not a DSN of Postgres. The message shows the text only if it
            looks like the name of a file.
    """
    if not isinstance(dsn, str) or not dsn:
        kind = "empty" if dsn == "" else f"of type {type(dsn).__name__}"
        raise ConfigurationError(
            f"the DSN is {kind}; expected a string such as postgresql://user@host/database, a "
            "function that returns such a string, or a psycopg_pool.ConnectionPool"
        )
    if "=" not in dsn and "://" not in dsn:
        raise ConfigurationError(
            f"{dsn!r:.80} is not a DSN; for a file use SQLiteCheckpointer or SQLiteStore"
        )
    with suppress(psycopg.ProgrammingError, ValueError):
        parts = conninfo_to_dict(dsn)
        # If a password contains an unescaped `@`, libpq takes the rest of the password as part of
        # the host or of the database name.
        has_unescaped_at = any("@" in str(parts.get(name, "")) for name in ("host", "dbname"))
        # A DSN with a NUL character is rejected, because libpq would ignore the rest of the DSN
        # after the NUL character.
        if not has_unescaped_at and "\0" not in dsn:
            overrides = {
                "client_encoding": "UTF8",
                **_build_dsn_parameter_with_ascii_hosts(parts.get("host")),
            }
            return make_conninfo(dsn, **{**_DEFAULTS, **parts, **overrides})
    # The error message does not contain the DSN, because the DSN may contain a password.
    raise ConfigurationError(
        "the DSN is not a Postgres DSN; expected postgresql://user:password@host/database; in the "
        "password, write %40 for @, %2F for / and %25 for %"
    )


def _build_dsn_parameter_with_ascii_hosts(hosts: Any) -> dict[str, str]:
    """Return the DSN parameter `host`, with all host names converted to ASCII.

    If all host names in the DSN are already ASCII, return an empty dict. perdure converts non-ASCII
    host names itself, because psycopg would convert them with IDNA 2003, which can yield a
    different domain. If the DSN has no parameter `host`, psycopg connects to the hosts in the
    environment variable `PGHOST`. In this case, the host names in `PGHOST` are converted to ASCII.
    Host names are separated by commas.
    """
    hosts = str(hosts or os.environ.get("PGHOST", ""))
    if hosts.isascii():
        return {}
    names = (name if name.startswith("/") else ascii_host(name) for name in hosts.split(","))
    return {"host": ",".join(names)}


def redact_dsn(dsn: str) -> str:
    """Return a DSN as a URI that has the user, host, port and database, but no password."""
    parts = conninfo_to_dict(dsn)
    user, host, port = parts.get("user"), parts.get("host", ""), parts.get("port")
    login = f"{user}@" if user else ""
    port_suffix = f":{port}" if port else ""
    return f"postgresql://{login}{host}{port_suffix}/{parts.get('dbname', '')}"


def parse_address(dsn: str) -> DatabaseAddress:
    """Return the host, port and database of a DSN."""
    parts = conninfo_to_dict(dsn)
    host, port = parts.get("host") or parts.get("hostaddr") or "", parts.get("port") or _PORT
    return str(host), str(port), str(parts.get("dbname") or parts.get("user") or "")


def format_uri(dsn: str) -> str:
    """Convert a DSN in any format to a URI with all its parameters."""
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    user, password, name = (
        quote(parts.pop(k, ""), safe="") for k in ("user", "password", "dbname")
    )
    login = f"{user}:{password}@" if password else f"{user}@" if user else ""
    return f"postgresql://{login}/{name}?{urlencode(parts)}"


# -- sources


class DsnSource(Protocol):
    """An object that provides the DSN for each new connection.

    Attributes:
        name: The name of the database, without a password, for error messages.
        key: A key of the source. Sources with equal keys share their connections within a process.
        is_fixed: Whether the DSN is always the same.
    """

    name: str
    key: Hashable
    is_fixed: bool

    def resolve_dsn(self, within_s: float) -> str:
        """Return the DSN for a new connection.

        Raises:
            StorageUnavailable: No DSN is available within `within_s` seconds.
        """

    def locate_database(self, within_s: float) -> DatabaseAddress:
        """Return the host, port and database of the most recently provided DSN.

        Raises:
            StorageUnavailable: No DSN was resolved before, and none is available within `within_s`
                seconds.
        """

    def raise_if_last_dsn_call_failed_or_hangs(self, timeout_s: float) -> None:
        """Raise `StorageUnavailable` if no DSN can be obtained at present.

        The error is raised if the most recently finished attempt to get a DSN failed. The error is
        also raised if an attempt is still in progress and hangs.

        An attempt to get a DSN is considered to hang if it has not finished after `timeout_s`
        seconds.
        """

    def close(self) -> None:
        """Make all pending attempts to get a DSN fail with `StorageUnavailable`."""


class FixedDsn(DsnSource):
    """A DSN that never changes."""

    is_fixed = True

    def __init__(self, dsn: object) -> None:
        self.key = self._dsn = normalize_dsn(dsn)
        self.name, self._address = redact_dsn(self._dsn), parse_address(self._dsn)

    def resolve_dsn(self, within_s: float) -> str:
        """See `DsnSource.resolve_dsn`."""
        return self._dsn

    def locate_database(self, within_s: float) -> DatabaseAddress:
        """See `DsnSource.locate_database`."""
        return self._address

    def raise_if_last_dsn_call_failed_or_hangs(self, timeout_s: float) -> None:
        """Do nothing, because getting a fixed DSN cannot fail or hang."""

    def close(self) -> None:
        """Do nothing, because getting a fixed DSN never blocks, so there is nothing to stop."""


class DsnFunction(DsnSource):
    """A function, supplied by the user, that returns the DSN for a new connection.

    The function is called in a separate OS thread, so that the caller is not blocked forever if the
    function never returns.

    Args:
        function: The function, which takes no arguments.
        label: The name of the function in error messages. The repr of the function is not used,
            because it may contain a password.
        key: See `DsnSource`.
        advice: The end of error messages, which says what to do if the function returns no DSN.

    Raises:
        ConfigurationError: The function is asynchronous, or needs arguments.
    """

    is_fixed = False

    def __init__(
        self, function: Callable[[], object], label: str, key: Hashable, advice: str
    ) -> None:
        _check_is_sync_and_takes_no_arguments(function, label)
        self._function, self._label, self.key, self._advice = function, label, key, advice
        self.name = f"the database of {label}"
        self._threads = ThreadPool(_MAX_CALLS, "perdure-dsn", is_permanent=False)
        self._guard = threading.Lock()  # This lock protects `_pending`.
        # Start times of the DSN function calls that have not returned yet
        self._pending: dict[object, float] = {}
        # Reason why the most recent call of the DSN function failed, or an empty string if the call
        # succeeded
        self._problem = ""
        # Host, port and database of the DSN that the user's function returned most recently
        self._address: DatabaseAddress | None = None
        self._closed = False

    def resolve_dsn(self, within_s: float) -> str:
        """See `DsnSource.resolve_dsn`."""
        call, began = object(), time.monotonic()
        with self._guard:
            self._pending[call] = began
        try:
            dsn, problem = self._fetch_dsn_and_error_text(began + within_s)
        finally:
            with self._guard:
                del self._pending[call]
        self._problem = problem
        if problem:
            raise self._build_error(problem)
        self.name, self._address = redact_dsn(dsn), parse_address(dsn)
        return dsn

    def locate_database(self, within_s: float) -> DatabaseAddress:
        """See `DsnSource.locate_database`."""
        return self._address or parse_address(self.resolve_dsn(within_s))

    def _fetch_dsn_and_error_text(self, deadline: float) -> tuple[str, str]:
        """Call the user's DSN function, and return `(normalized DSN, "")` if the DSN is valid.

        If the function returns no valid DSN, return the pair `("", problem)`, where `problem` is a
        description for an error message.
        """
        future = self._threads.submit(self._get_function_result_and_error_text, is_async=False)
        while True:
            left_s = deadline - time.monotonic()
            try:
                result, problem = future.result(max(0.0, min(_POLL_S, left_s)))
                break
            except TimeoutError:
                if self._closed:
                    future.cancel()
                    return "", "was called for a database that has been closed since"
                if left_s <= 0:
                    future.cancel()
                    return "", "did not return in time"
        if problem:
            return "", problem
        try:
            return normalize_dsn(result), ""
        except ConfigurationError:
            return "", f"returned {_describe_non_dsn_result(result)}"

    def _get_function_result_and_error_text(self) -> tuple[object, str]:
        """Call the user's DSN function, and return `(result, "")` if it raises no error.

        If the user's DSN function raises an error, return the pair `(None, description of the
        error)`.
        """
        try:
            return self._function(), ""
        # Catch BaseException and not only Exception, because an uncaught SystemExit would end the
        # OS thread of the pool.
        except BaseException as exc:
            return None, f"raised {type(exc).__name__}, whose text may contain a password"

    def raise_if_last_dsn_call_failed_or_hangs(self, timeout_s: float) -> None:
        """See `DsnSource.raise_if_last_dsn_call_failed_or_hangs`."""
        now = time.monotonic()
        with self._guard:
            hangs = any(now - began > timeout_s for began in self._pending.values())
        if hangs or self._problem:
            raise self._build_error(self._problem or "has not returned yet")

    def _build_error(self, problem: str) -> StorageUnavailable:
        return StorageUnavailable(f"{self._label} {problem}; {self._advice}")

    def close(self) -> None:
        """See `DsnSource.close`."""
        self._closed = True


def _check_is_sync_and_takes_no_arguments(function: Callable[[], object], label: str) -> None:
    """Raise ConfigurationError if a function is asynchronous or requires arguments."""
    call = getattr(function, "__call__", None)  # noqa: B004 - the method of a callable object
    if any(inspect.iscoroutinefunction(candidate) for candidate in (function, call)):
        raise ConfigurationError(
            f"{label} is an async function; expected a synchronous function that returns the DSN. "
            "The function can block, because perdure calls it in a separate thread"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some functions that are written in C have no signature.
        return
    try:
        signature.bind()
    except TypeError as exc:
        raise ConfigurationError(
            f"{label} needs arguments ({exc}); expected a function without arguments that returns "
            "the DSN; bind the arguments with functools.partial"
        ) from None


def _describe_non_dsn_result(result: object) -> str:
    """Describe an invalid return value of a DSN function, for an error message.

    The description does not contain the value, because the value may contain a password.

    If the function returned a coroutine, close the coroutine, because it is never awaited.
    """
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            # Close the coroutine, because otherwise Python would warn that it was never awaited.
            result.close()
        return "an awaitable, as an asynchronous function does"
    if isinstance(result, str):
        return "text that is not a DSN" if result else "an empty text"
    return f"a value of type {type(result).__name__}"


def _build_label(function: object, argument: str) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"the function {name}() that is passed as {argument}="


def _build_dsn_function_key(function: object) -> Hashable:
    """Return a hashable key for a function that returns a DSN. Equal functions have equal keys.

    Each access to a bound method creates a new object. Two method objects have equal keys if they
    bind the same function to the same instance.
    """
    try:
        hash(function)
    except TypeError:
        return _Identity(function)
    return function


class _Identity:
    """A hashable wrapper for an unhashable object, compared by the object's identity."""

    def __init__(self, instance: object) -> None:
        # Keep a reference to the object, so that its `id()` cannot be reused for another object.
        self._instance = instance

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._instance is other._instance

    def __hash__(self) -> int:
        return id(self._instance)


def build_dsn_source(dsn: object, argument: str = "dsn") -> DsnSource:
    """Build the `DsnSource` for a DSN, or for a function that returns a DSN.

    Args:
        dsn: The value that the user passed.
        argument: The name of the parameter, for messages.

    Raises:
        ConfigurationError: The value is neither a DSN nor such a function.
    """
    if isinstance(dsn, AsyncConnectionPool):
        raise ConfigurationError(
            f"the argument {argument!r} is an AsyncConnectionPool, which is tied to one event "
            "loop; pass a psycopg_pool.ConnectionPool. perdure runs its queries in threads"
        )
    if isinstance(dsn, ConnectionPool):
        raise ConfigurationError(
            f"the argument {argument!r} is a connection pool; expected a DSN or a function that "
            "returns a DSN, because locks need a connection outside the pool"
        )
    if callable(dsn):
        return DsnFunction(
            dsn,
            _build_label(dsn, argument),
            _build_dsn_function_key(dsn),
            "the function must return a DSN like postgresql://user:password@host/database",
        )
    return FixedDsn(dsn)


def build_pool_dsn_source(pool: ConnectionPool[Any]) -> DsnSource:
    """Build a `DsnSource` from the connection parameters of the user's pool."""

    def build_dsn() -> str:
        conninfo, kwargs = pool.conninfo, pool.kwargs
        text = conninfo() if callable(conninfo) else conninfo
        options: dict[str, Any] = dict(kwargs() if callable(kwargs) else kwargs or {})
        parameters = {name: options[name] for name in options.keys() - _NOT_IN_A_DSN}
        # libpq accepts an empty DSN and uses its default connection parameters. `normalize_dsn`
        # rejects an empty string, so return the equivalent DSN `dbname=` instead.
        return make_conninfo(text, **parameters) or "dbname="

    label = f"the conninfo of the pool {pool.name!r}"
    advice = "pass the DSN of the connection for locks as 'direct'"
    return DsnFunction(build_dsn, label, _Identity(pool), advice)
