"""Let `Database` objects with the same path share an open file or a set of server connections.

Opening the first `Database` object for a path opens the file or the server connections. When the
last `Database` object for a path is closed, the shared SQLite file or the shared Postgres
connections are closed as well. When the process exits, all files and connections that are still
open are closed. A forked process cannot use the files and connections that it inherited from its
parent.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final, Generic, TypeVar
from weakref import WeakSet

from perdure.errors import StorageUnavailable
from perdure.storage.database import SELECT_COMPONENT_SQL, Schema
from perdure.storage.flow import Flow, Statement
from perdure.storage.thread_pools import ThreadPool

T = TypeVar("T")
S = TypeVar("S", bound="SharedResource")


class SharedResource(ABC):
    """A resource that databases in this process share: an open file or a set of server connections.

    Args:
        name: The name of the database in error messages.
        threads: The threads that run blocking work for coroutines.

    Attributes:
        user_count: The number of databases that use the resource.
        refusal: The reason why work is refused, such as "is closed". Empty while work is accepted.
        write_lock: A lock that is held during a transaction, to delay a fork of the process.
        was_idle: Whether no connection was in use when this process was forked. The value is read
            only in a forked process, for inherited resources.
        submit_lock: A lock that is held while work is submitted. A `SQLiteFile` also holds it while
            it sets `refusal`, so that no work is submitted after that.
        class_lock: A lock that is held while a resource of the class is opened, joined or left.
            Each class has its own, so that a server that does not answer blocks no file.
    """

    class_lock: ClassVar[threading.RLock]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.class_lock = threading.RLock()
        _class_locks.append(cls.class_lock)

    def __init__(self, name: str, threads: ThreadPool) -> None:
        self.name, self.threads = name, threads
        self.user_count = 1
        self.refusal = ""
        self.write_lock, self.submit_lock = threading.Lock(), threading.Lock()
        self.was_idle = True

    def pause_for_fork(self) -> None:
        """Wait until the current transaction has ended, and block further transactions.

        After this method returns, no transaction can begin until `resume_after_fork` is called. A
        `SQLiteFile` also waits until active reads have ended, and blocks new reads.
        """
        self.write_lock.acquire()

    def resume_after_fork(self) -> None:
        """Allow transactions again after a fork, in the parent process and in the child process."""
        self.write_lock.release()

    def check_usable(self) -> None:
        """Raise `StorageUnavailable` if the resource was closed or was inherited across a fork."""
        if self.refusal:
            raise StorageUnavailable(f"the database {self.name} {self.refusal}")

    def run_in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        """See `Database.run_in_thread`."""
        # Call `check_usable` before acquiring the lock. A forked process may have inherited the
        # lock in its locked state, and would wait for it forever.
        self.check_usable()
        with self.submit_lock:
            self.check_usable()
            return self.threads.submit(work, is_async=True)  # type: ignore[no-any-return]

    def decrement_user_count_and_shut_down_if_unused(self) -> None:
        """Decrement `user_count`, and shut down the resource if no database uses it any more."""
        with self.class_lock:
            self.user_count -= 1
            if self.user_count or self.refusal:
                return
            for key in [
                key for key, resource in list(_resources_by_key.items()) if resource is self
            ]:
                del _resources_by_key[key]
        self.shut_down()

    @abstractmethod
    def shut_down(self) -> None:
        """Finish all submitted work, then close all connections. A second call does nothing."""


# The open resources (files and server connections), by key. All databases with the same key share
# one resource.
_resources_by_key: Final[dict[Any, Any]] = {}
_all_resources: Final[WeakSet[SharedResource]] = WeakSet()
_class_locks: Final = list[threading.RLock]()  # see `SharedResource.class_lock`
inherited_resources: Final = list[SharedResource]()
"""The files and servers that the parent process had open when this process was forked."""


class LazyDatabase(ABC, Generic[S]):
    """Base class of databases that open a shared resource on first use."""

    _resource_class: type[S]
    _resource: S | None = None
    _closed = False

    def __init__(self) -> None:
        # Names of additional components whose tables are known to exist. Additional components
        # share the database with the component that opened it.
        self._known_components = set[str]()

    @property
    @abstractmethod
    def path(self) -> str:
        """See `Database.path`."""

    @property
    def _error_name(self) -> str:
        return self.path

    @abstractmethod
    def _open_file_or_server(self) -> S:
        """Open the resource or reuse an open one, and prepare the component's tables."""

    def _share_or_create_resource(self, key: Any, create: Callable[[], S]) -> S:
        """Return the open resource with the given key, or create it.

        Args:
            key: The key of the resource, or None for a resource that is never shared.
            create: A function that opens the resource.
        """
        resource: S | None = None if key is None else _resources_by_key.get(key)
        if resource is not None and not resource.refusal:
            resource.user_count += 1
            return resource
        resource = create()
        _all_resources.add(resource)
        if key is not None:
            _resources_by_key[key] = resource
        return resource

    def connect(self) -> None:
        """See `Database.connect`."""
        self._connect_once()

    async def aconnect(self) -> None:
        """See `Database.aconnect`."""
        if self._resource is None:
            await asyncio.to_thread(self.connect)

    def _connect_once(self) -> S:
        """Return the shared resource, opening it on the first call.

        Raises:
            StorageUnavailable: The database is closed, or the process was forked.
        """
        resource = self._resource
        if resource is None:
            with self._resource_class.class_lock:
                resource = self._resource
                if resource is None:
                    self._check_not_closed()
                    resource = self._resource = self._open_file_or_server()
        resource.check_usable()
        return resource

    def _check_not_closed(self) -> None:
        if self._closed:
            raise StorageUnavailable(f"the database {self._error_name} is closed")

    def has_tables(self, schema: Schema) -> Flow[bool]:
        """See `Database.has_tables`."""
        # Once a component's tables are known to exist, do not check again, because tables are never
        # dropped.
        if schema.component not in self._known_components:
            rows = yield Statement(SELECT_COMPONENT_SQL, (schema.component,))
            if not schema.has_tables_of_this_version(rows, self.path):
                return False
            self._add_known_component(schema)
        return True

    def _add_known_component(self, schema: Schema) -> None:
        """Record that the database has the tables of a further component."""
        self._known_components.add(schema.component)

    def run_in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        """See `Database.run_in_thread`."""
        if self._resource is None:
            return self._call_after_connecting(lambda shared: shared.run_in_thread(work))
        return self._resource.run_in_thread(work)

    def _call_after_connecting(self, call: Callable[[S], Awaitable[T]]) -> Awaitable[T]:
        """Return an awaitable that opens the database, then calls `call` and awaits the result."""

        async def after_connecting() -> T:
            await self.aconnect()
            return await call(self._connect_once())

        self._check_not_closed()
        return asyncio.ensure_future(after_connecting())

    def close(self) -> None:
        """See `Database.close`.

        The shared resource is shut down when the last database that uses it is closed.
        """
        with self._resource_class.class_lock:
            self._closed = True
            resource, self._resource = self._resource, None
        if resource is not None:
            resource.decrement_user_count_and_shut_down_if_unused()


@atexit.register
def _shut_down_all() -> None:
    """Shut down all resources when the process exits."""
    for resource in list(_all_resources):
        resource.shut_down()


def _pause_transactions_before_fork() -> None:
    """Wait for transactions and reads to end, and block new ones until the fork is over."""
    for lock in _class_locks:
        lock.acquire()
    for resource in _all_resources:
        resource.pause_for_fork()


def _resume_transactions_in_parent_after_fork() -> None:
    """Allow transactions and reads again in the parent process after a fork."""
    for resource in _all_resources:
        resource.resume_after_fork()
    for lock in _class_locks:
        lock.release()


def _refuse_inherited_resources_in_child_process() -> None:
    """In a forked process, mark all inherited resources as closed and release their locks."""
    inherited_resources.extend(_all_resources)
    for resource in _all_resources:
        resource.resume_after_fork()
        resource.refusal = "is closed in this forked process; open it again in this process"
    _all_resources.clear()
    _resources_by_key.clear()
    for lock in _class_locks:
        lock.release()


if hasattr(os, "register_at_fork"):  # Windows has no fork.
    os.register_at_fork(
        before=_pause_transactions_before_fork,
        after_in_parent=_resume_transactions_in_parent_after_fork,
        after_in_child=_refuse_inherited_resources_in_child_process,
    )
