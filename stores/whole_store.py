"""Define the base class of stores that own a database, with retention, export and import.

The methods in this module act on the whole database. Methods that are also available on scopes are
in `store.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, get_args

from langgraph.store.base import BaseStore, IndexConfig

from perdure.errors import ConfigurationError, PerdureError
from perdure.settings import LIST_LIMIT
from perdure.storage.database import Database, DatabaseOwner, make_async_twin
from perdure.storage.flow import NO_LIMIT, Flow, NamedSQL, Statement, fetch_rows, sum_by_month
from perdure.storage.untrusted_sqlite import IMPORT_VALUE_BYTES
from perdure.stores.base import (
    Namespace,
    NamespaceSize,
    Progress,
    QueryPlan,
    RemovableVersions,
    StoreStats,
    StoreUsage,
    TransferReport,
    VersionRetention,
)
from perdure.stores.filter_sql import JSONLocation, build_index_expression, check_index_path
from perdure.stores.import_sources import (
    iter_items_of_json_lines,
    iter_langgraph_items,
    iter_store_items,
)
from perdure.stores.item_reader import build_json_path_index_name
from perdure.stores.namespaces import decode_namespace_path, prefix_range
from perdure.stores.options import check_store_options
from perdure.stores.search.static_embedder import DIMS, StaticEmbedder
from perdure.stores.search.vectors import Model
from perdure.stores.store import Store
from perdure.stores.store_parts import StoreParts
from perdure.stores.transfer import PAGE, Source, Transfer
from perdure.stores.values import check_number

OnUnsuitable = Literal["error", "skip"]
_LOG = logging.getLogger("perdure")
# maximum number of rows per transaction when sweeping expired items or removing closed versions
_BATCH_ROWS: Final = 500
# exclusive upper bound for the number of days or versions in a retention rule
_MAX_RETENTION: Final = 1_000_000


class WholeStore(DatabaseOwner, Store):
    """A store with its database. Use the store with `with` or `async with`, or call `close`."""

    _clock: Callable[[], float] = staticmethod(time.time)  # tests replace it

    def __init__(
        self,
        sql: NamedSQL,
        values: JSONLocation,
        open_database: Callable[[Callable[[], Flow[None]]], Database],
        *,
        index: Any,
        **options: Any,
    ) -> None:
        config: Any = {"embed": StaticEmbedder(), "dims": DIMS} if index == "offline" else index
        self.index_config: IndexConfig | None = config
        parts = StoreParts.build(
            sql,
            check_store_options(index=config, **options),
            self._clock,
            open_database,
            values,
        )
        super().__init__(parts)
        self._transfer = Transfer(parts, self._missing)
        self._sweeper: ExpiredItemSweeper | None = None

    def close(self) -> None:
        """Stop the OS thread that sweeps expired items, and close the database.

        Pending writes are completed before the database is closed.
        """
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.stopped.set()
            sweeper.join()
        self.database.close()

    # -- time to live

    def count_without_ttl(self) -> int:
        """Return the number of items that never expire."""
        ((count,),) = self.database.read(lambda: fetch_rows(self._parts.sql["count_without_ttl"]))
        return int(count)

    acount_without_ttl = make_async_twin(count_without_ttl)

    def sweep_ttl(self) -> int:
        """Set the end time of each expired item's current version, and return the item count.

        Setting the end time of a version is called closing the version.

        A version is closed when it is replaced, deleted or swept. Expired items are excluded from
        all reads and searches, even before they are swept.
        """
        total = 0
        while swept := self._close_and_count_batch_of_expired_items():
            total += swept
        return total

    asweep_ttl = make_async_twin(sweep_ttl)

    def _close_and_count_batch_of_expired_items(self) -> int:
        """Close the current versions of a batch of expired items, and return how many were closed.

        Other writes to the affected namespaces, and other sweeps of these namespaces, are blocked
        until the versions have been closed.
        """
        parts, now = self._parts, self._parts.now()
        expired = self.database.read(lambda: fetch_rows(parts.sql["expired"], now, _BATCH_ROWS))
        paths = {row[4] for row in expired}
        return self.database.write(
            lambda: parts.writer.close_and_count_expired_items(now, _BATCH_ROWS, paths),
            exclusive_names=[path.hex() for path in paths],
            deletes_rows=True,
        )

    def start_ttl_sweeper(self, sweep_interval_minutes: float | None = None) -> ExpiredItemSweeper:
        """Start an OS thread that periodically sweeps expired items.

        The sweeper runs until `stop_ttl_sweeper` or `close` is called. If a sweeper is already
        running, it is returned, and its interval is not changed.

        Args:
            sweep_interval_minutes: The interval in minutes. If it is None or 0, the configured
                interval is used, or five minutes if none is configured.

        Returns:
            The thread that sweeps.

        Raises:
            ConfigurationError: The interval is not a positive number.
        """
        configured_minutes = (self.ttl_config or {}).get("sweep_interval_minutes")
        minutes: Any = sweep_interval_minutes or configured_minutes or 5
        check_number("the sweep interval", minutes, "minutes, more than zero", minimum=1e-9)
        sweeper = self._sweeper
        if sweeper is None or sweeper.stopped.is_set() or not sweeper.is_alive():
            sweeper = self._sweeper = ExpiredItemSweeper(self.sweep_ttl, minutes)
            sweeper.start()
        return sweeper

    def stop_ttl_sweeper(self, timeout: float | None = None) -> bool:
        """Stop the TTL sweeper and wait for its OS thread to end.

        Args:
            timeout: The maximum time to wait in seconds, or None to wait until the thread ends.

        Returns:
            Whether the thread has ended.
        """
        if self._sweeper is None:
            return True
        self._sweeper.stopped.set()
        self._sweeper.join(timeout)
        return not self._sweeper.is_alive()

    astop_ttl_sweeper = make_async_twin(stop_ttl_sweeper)

    # -- retention of versions

    def find_removable(
        self, rule: VersionRetention | None = None, *, prefix: Namespace = ()
    ) -> list[RemovableVersions]:
        """Return the versions that `sweep_ttl` followed by `retain` would remove.

        The returned list has one element for each key that has removable versions. Each element
        (`RemovableVersions`) describes the removable versions of one key. Nothing is written.

        Args:
            rule: The rule that says which closed versions are kept. None keeps all.
            prefix: Only items under this prefix.

        Raises:
            ConfigurationError: The rule is empty or has an invalid number; see `retain`.
        """
        now = self._parts.now()
        retention_bounds = (
            _RetentionBounds(-1, 0)
            if rule is None
            else _compute_version_retention_bounds(rule, now)
        )
        bounds = (*prefix_range(self._parts.resolve_prefix(prefix)), now, *retention_bounds)
        rows = self.database.read(lambda: fetch_rows(self._parts.sql["removable"], *bounds))
        return [
            RemovableVersions(decode_namespace_path(path), key, bool(expired), versions, size)
            for path, key, expired, versions, size in rows
        ]

    afind_removable = make_async_twin(find_removable)

    def retain(self, rule: VersionRetention, *, prefix: Namespace = ()) -> int:
        """Remove the closed versions that a rule does not keep, and return how many were removed.

        The versions are removed in batches, each in its own transaction.

        Args:
            rule: The rule that says which closed versions are kept.
            prefix: Only versions under this prefix.

        Raises:
            ConfigurationError: The rule is empty, or has a number below 0 or too large.
        """
        prefix_bounds, retention_bounds = (
            prefix_range(self._parts.resolve_prefix(prefix)),
            _compute_version_retention_bounds(rule, self._parts.now()),
        )
        drop = partial(
            self._drop_and_count_batch_of_closed_versions, prefix_bounds, retention_bounds
        )
        total = dropped = self.database.write(drop, deletes_rows=True)
        while dropped == _BATCH_ROWS:
            dropped = self.database.write(drop, deletes_rows=True)
            total += dropped
        if total:
            self.database.release_unused_disk_space()
        return total

    aretain = make_async_twin(retain)

    def _drop_and_count_batch_of_closed_versions(
        self, prefix_bounds: tuple[bytes, bytes], retention_bounds: tuple[int, int]
    ) -> Flow[int]:
        """Remove one batch of closed versions in a transaction, and return their number."""
        sql, emptied_namespaces = self._parts.sql, []
        rows = yield sql("removable_versions", *prefix_bounds, *retention_bounds, _BATCH_ROWS)
        for name in ("drop_search_index_of_version", "drop_version", "drop_index_row"):
            yield Statement(sql[name], rows, execute_many=True)
        if len(rows) < _BATCH_ROWS:  # the last batch
            emptied_namespaces = yield sql("drop_empty_namespaces", *prefix_bounds)
        if rows or emptied_namespaces:
            yield sql("drop_orphaned_search_indexes")
            yield sql("increment_setting", "erasures")
        return len(rows)

    # -- indexes on paths

    def create_index(self, path: str) -> None:
        """Create an index on a path of the value, such as "kind" or "user.age", for faster filters.

        Args:
            path: Identifiers joined by dots.

        Raises:
            ConfigurationError: The path is not valid, values are encrypted, or the database is
                Postgres.
        """
        expression = build_index_expression(check_index_path(path), "value")
        is_encrypted = self._parts.records.is_encrypted
        if is_encrypted or not self._parts.reader.values.supports_indexes:
            reason = (
                "the values in this store are encrypted"
                if is_encrypted
                else "the values in this database are stored as bytes"
            )
            raise ConfigurationError(
                f"cannot create an index on the path {path!r}, because {reason}; filters on this "
                "path also work without an index"
            )
        sql = self._parts.sql["create_path_index"]
        sql = sql.format(name=build_json_path_index_name(path), expression=expression)
        self.database.write(lambda: fetch_rows(sql))

    acreate_index = make_async_twin(create_index)

    def drop_index(self, path: str) -> None:
        """Remove the index on a path. A missing index is not an error."""
        sql = self._parts.sql["drop_path_index"].format(
            name=build_json_path_index_name(check_index_path(path))
        )
        self.database.write(lambda: fetch_rows(sql))

    adrop_index = make_async_twin(drop_index)

    def indexes(self) -> list[str]:
        """Return the JSON paths that have an index, sorted."""
        return self.database.read(self._parts.reader.read_path_indexes)

    aindexes = make_async_twin(indexes)

    def explain_query(
        self, namespace_prefix: Namespace, /, *, filter: Mapping[str, Any] | None = None
    ) -> QueryPlan:
        """Return the query plan for a search without query text.

        The query plan lists the path indexes (indexes on JSON paths) that the search uses.
        """
        selection = self._parts.build_item_selection(namespace_prefix, filter)
        return self.database.read(lambda: self._parts.reader.read_query_plan(selection))

    aexplain_query = make_async_twin(explain_query)

    # -- embeddings

    def check_embedder(self) -> None:
        """Verify that the stored vectors were computed by the store's current embedder.

        Raises:
            EmbedderMismatch: The vectors come from another embedder, so a search by vectors would
                fail.
        """
        model = self._parts.preparer.embeddings.model
        rows = self.database.read(lambda: fetch_rows(self._parts.sql["get_setting"], "model"))
        stored = Model.from_setting(rows[0][0]) if rows else None
        if stored is None or model is None:
            return
        if stored.name != model.name or model.dims not in (0, stored.dims):
            raise stored.build_mismatch_error(model)

    acheck_embedder = make_async_twin(check_embedder)

    def reembed(self, progress: Progress | None = None) -> int:
        """Recompute all vectors with the store's current embedder.

        Other processes and OS threads can read and write the store while vectors are being
        computed. Until an item has a new vector, searches find it by keywords only. If the process
        dies or an error occurs before the last item, call `reembed` again to continue.

        Args:
            progress: Called after each batch with the number of finished items and the total.

        Returns:
            The number of items that got new vectors. If the embedder is so fast that vectors are
            not stored, the number of items whose old vectors were dropped.

        Raises:
            EmbeddingFailed: The embedder fails for all items. Call the method again to continue. A
                single text that the embedder refuses is listed in `pending_embeddings()`.
            ConfigurationError: The store has no embedder.
        """
        return self._parts.runner.run(self._missing.reembed(progress))

    async def areembed(self, progress: Progress | None = None) -> int:
        """Recompute all vectors; see `reembed`."""
        return await self._parts.runner.arun(
            self._missing.reembed(progress), computes_in_thread=True
        )

    @property
    def model(self) -> Model | None:
        """The embedding model, or None if the store has no embedder.

        The model's `dims` attribute is the dimension of its embeddings, or 0 while the dimension is
        unknown.
        """
        model = self._parts.preparer.embeddings.model
        return None if model is None else replace(model)

    # -- export and import

    def export(
        self, namespace_prefix: Namespace = (), *, versions: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Yield the item versions under a prefix as JSON objects.

        The versions are ordered by namespace, key and version number. perdure's internal notes
        about memories, such as tombstones, come last. All versions of a key are read from one
        snapshot. Concurrent writes are allowed.

        Args:
            namespace_prefix: The prefix.
            versions: Whether closed versions are included.
        """
        return self._transfer.export_lines(namespace_prefix, versions=versions)

    async def aexport(
        self, namespace_prefix: Namespace = (), *, versions: bool = True
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the item versions under a prefix as JSON objects; see `export`."""
        lines = self.export(namespace_prefix, versions=versions)
        while page := await asyncio.to_thread(lambda: list(islice(lines, PAGE))):
            for line in page:
                yield line

    def import_lines(
        self,
        lines: Iterable[str],
        *,
        namespace: Namespace | None = None,
        progress: Progress | None = None,
    ) -> TransferReport:
        """Import items from lines that each contain one JSON object.

        A line can contain an object that `export` has yielded, or an arbitrary object to store as
        the value of an item.

        The import can be repeated.

        An exported version is skipped if this store already contains it or a newer version of the
        item. If a line has neither a `namespace` nor a `value` field, the whole JSON object is
        stored as the value of an item in the namespace given by the `namespace` argument. The
        item's key is the object's `key` field, or a hash of the object if it has no such field. If
        a line has a `namespace` or `value` field, it must have no fields other than those that
        `export` writes. A memory that was deleted or forgotten in this store is not imported, but
        listed in the report; see `import_from`.

        Args:
            lines: JSON, one object per line. Empty lines are skipped.
            namespace: The namespace of items that name none.
            progress: Called after each batch with the number of finished lines, and None as the
                total.

        Returns:
            The counts of the import, and the refused items.

        Raises:
            ImportFailed: A line is malformed, has an unknown field, or contradicts an item of this
                store. The lines before it are kept. The message says how many.
        """
        return self._transfer.import_items(
            iter_items_of_json_lines(lines, namespace), progress, "line"
        )

    aimport_lines = make_async_twin(import_lines)

    def import_from(
        self,
        source: str | os.PathLike[str] | BaseStore,
        *,
        on_unsuitable: OnUnsuitable = "error",
        progress: Progress | None = None,
        max_value_bytes: int = IMPORT_VALUE_BYTES,
    ) -> TransferReport:
        """Import items from a langgraph SqliteStore or PostgresStore, or from any open store.

        If the source is a perdure store, the versions, times and provenance of its items are also
        imported.

        The source is only read. The import can be interrupted and run again, because identical
        items are skipped.

        If a memory was deleted or forgotten in this store (see `perdure.memory.forget`), none of
        its versions are imported, even if it was changed in the source afterwards. The report names
        each refused memory. If this store has a tombstone for an item, the item is not imported,
        whatever the source contains. Each tombstone contains one hash, which is the hash of the
        item's last text or of one of the item's earlier texts. The tombstone of a conversation turn
        contains the hash of its source message. To restore a memory that was deleted or forgotten
        in this store, add the memory to this store again.

        Args:
            source: The path of the file, the Postgres DSN, or an open store with blocking methods.
            on_unsuitable: What to do with an item that cannot be read or stored, for example
                because its value is not JSON, or whose versions differ from those here. `"error"`
                raises an error. `"skip"` counts, logs and skips the item.
            progress: See `import_lines`.
            max_value_bytes: The maximum size of a value that is read from a file.

        Returns:
            The counts of the import, and the refused items.

        Raises:
            ConfigurationError: The file does not exist, or another argument is wrong.
            NotADatabase: The source is not langgraph's own store.
            ImportFailed: An item cannot be read or stored. The items before it are kept. The
                message says how many.
        """
        if on_unsuitable not in get_args(OnUnsuitable):
            raise ConfigurationError(
                f"the argument 'on_unsuitable' is {on_unsuitable!r}; expected one of "
                f"{get_args(OnUnsuitable)}"
            )
        lines: Source
        if isinstance(source, WholeStore):
            versions = source._transfer.iter_item_versions((), includes_closed=True)
            lines = (
                (
                    f"item {version.put.key!r} in "
                    f"{list(decode_namespace_path(version.put.path))!r}",
                    version,
                )
                for version in versions
            )
        elif isinstance(source, BaseStore):
            lines = iter_store_items(source)
        else:
            lines = iter_langgraph_items(source, max_value_bytes)
        return self._transfer.import_items(
            lines, progress, "item", skips_unsuitable=on_unsuitable == "skip"
        )

    aimport_from = make_async_twin(import_from)

    # -- statistics

    def stats(self) -> StoreStats:
        """Return counts and sizes of the store."""
        read = self.database.read
        ((namespaces, items, size, versions),) = read(lambda: fetch_rows(self._parts.sql["counts"]))
        pending, indexes = read(self._missing.count_missing), tuple(self.indexes())
        database = self.database.stats()
        return StoreStats(namespaces, items, versions, pending, size, indexes, database)

    astats = make_async_twin(stats)

    def usage(self, limit: int = LIST_LIMIT) -> StoreUsage:
        """Return the `limit` largest namespaces, and the number of items created in each month.

        For each month, the item count covers the whole store. The count is the number of current
        items that were created in the month.
        """
        sql, read = self._parts.sql, self.database.read
        largest = read(lambda: fetch_rows(sql["largest_namespaces"], limit))
        days = read(lambda: fetch_rows(sql["created_by_day"]))
        largest_namespaces = (
            NamespaceSize(decode_namespace_path(path), 1, items, size)
            for path, items, size in largest
        )
        return StoreUsage(tuple(largest_namespaces), sum_by_month(days))

    ausage = make_async_twin(usage)


class ExpiredItemSweeper(threading.Thread):
    """An OS thread that calls a function at regular intervals until it is stopped."""

    def __init__(self, sweep: Callable[[], object], minutes: float) -> None:
        super().__init__(name="perdure-sweep", daemon=True)
        self.stopped = threading.Event()
        self._sweep, self._interval_s = sweep, minutes * 60

    def run(self) -> None:
        """Call the function at regular intervals until the OS thread is stopped."""
        while not self.stopped.wait(self._interval_s):
            try:
                self._sweep()
            except PerdureError:
                _LOG.exception("expired items could not be removed; the next sweep will retry")


class _RetentionBounds(NamedTuple):
    """The two conditions under which a retention rule removes a closed version.

    A retention rule removes a closed version only if the conditions `closed_before` and
    `newer_versions` hold. `closed_before` is the upper bound for the time at which the version was
    closed. `newer_versions` is the lower bound for the number of newer closed versions. If a bound
    is `NO_LIMIT`, the condition that uses this bound is met by every closed version. A closed
    version is a version that was replaced or deleted, or that has expired.

    Attributes:
        closed_before: The time before which the version must have been closed, in microseconds.
        newer_versions: The number of newer closed versions of the key that must exist.
    """

    closed_before: int
    newer_versions: int


def _compute_version_retention_bounds(rule: VersionRetention, now: int) -> _RetentionBounds:
    """Return the bounds of a retention rule.

    Raises:
        ConfigurationError: The rule is empty, or has an invalid number.
    """
    if rule.last is None and rule.days is None:
        raise ConfigurationError("the retention rule is empty; pass last= or days=")
    for name, number in (("last", rule.last), ("days", rule.days)):
        if number is not None:
            expected = f"{'an integer' if name == 'last' else 'a number'} of 0 or more"
            check_number(
                f"retention {name}",
                number,
                expected,
                exclusive_maximum=_MAX_RETENTION,
                integer=name == "last",
            )
    closed_before = NO_LIMIT if rule.days is None else now - int(rule.days * 86_400_000_000)
    return _RetentionBounds(closed_before, NO_LIMIT if rule.last is None else rule.last)
