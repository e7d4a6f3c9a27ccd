"""A whole store: what can be asked of it, and looking after it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from perdure.errors import ConfigurationError
from perdure.storage.database import AwaitableInt, DatabaseOwner
from perdure.storage.flow import Flow, Row, Statement, rows_of
from perdure.stores.base import Namespace, Progress, QueryPlan, StoreStats, VersionRetention
from perdure.stores.filter_paths import index_expression, index_path
from perdure.stores.models import Model
from perdure.stores.namespaces import check_prefix, span
from perdure.stores.pending import BATCH
from perdure.stores.reading import index_name
from perdure.stores.scoped import ScopedStore, limits_of
from perdure.stores.steps import EmbedAll, Read, Steps, Write
from perdure.stores.sweeper import Sweeper, SweeperEnd
from perdure.stores.transfer import Transfer

_SWEEP = 500  # items closed, or versions dropped, in one transaction
_FAR = 1_000_000  # days or versions: enough to keep all


class Store(DatabaseOwner, Transfer):
    """A langgraph store whose items keep their versions, and whose search needs no service."""

    _sweeper: Sweeper | None = None

    # -- closing

    _closed = False

    def close(self) -> None:
        """Stop the sweeper, and close the database once everything handed to it is written."""
        if not self._closed:
            self._closed = True
            if self._sweeper is not None:
                self._sweeper.stop()
                self._sweeper.join()
            self.database.close()

    # -- time to live

    def sweep_ttl(self) -> AwaitableInt:
        """Close the items whose time is over; they were invisible already.

        It blocks; in an event loop, `asweep_ttl` does not.

        Returns:
            How many. It may be awaited too, as with langgraph's async store.
        """
        total = 0
        while found := self.database.write(lambda: self._writer.sweep(self._now(), _SWEEP)):
            total += found
        return AwaitableInt(total)

    async def asweep_ttl(self) -> int:
        """See `sweep_ttl`."""
        return await asyncio.to_thread(self.sweep_ttl)

    def start_ttl_sweeper(self, sweep_interval_minutes: float | None = None) -> Sweeper:
        """Sweep now and then in a thread, until `stop_ttl_sweeper` or `close`.

        Args:
            sweep_interval_minutes: How often; None: as configured, else every five minutes.

        Returns:
            The thread. It may be awaited too, as with langgraph's async store.
        """
        configured = (self.ttl_config or {}).get("sweep_interval_minutes")
        sweeper = Sweeper(self.sweep_ttl, sweep_interval_minutes or configured or 5)
        if self._sweeper is None or not self._sweeper.is_alive():
            self._sweeper = sweeper
            sweeper.start()
        return self._sweeper

    def stop_ttl_sweeper(self, timeout: float | None = None) -> SweeperEnd:
        """Stop sweeping, and wait for the thread: for `timeout` seconds, or as long as it takes.

        Returns:
            True if the thread has ended. In an event loop only `await` waits for it.
        """
        if self._sweeper is not None:
            self._sweeper.stop()
        return SweeperEnd(self._sweeper, timeout)

    # -- old versions

    def retain(self, rule: VersionRetention, *, prefix: Namespace = ()) -> int:
        """Drop closed versions that a rule does not keep, in batches; returns how many.

        Raises:
            ConfigurationError: The rule keeps nothing in particular, or has a negative number.
        """
        if rule.last is None and rule.days is None:
            raise ConfigurationError("the retention rule is empty; give last= or days=")
        for name, number, kind in (("last", rule.last, int), ("days", rule.days, int | float)):
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, kind) or not 0 <= number < _FAR:
                raise ConfigurationError(
                    f"retention {name}={number!r}; expected a number, zero or more"
                )
        wanted = self._wanted(prefix)
        since = None if rule.days is None else self._now() - int(rule.days * 86_400_000_000)
        total = 0
        while found := self.database.write(
            lambda: self._drop_versions(wanted.prefix, rule.last, since)
        ):
            total += found
        if total:
            self.database.write(
                lambda: rows_of(self._sql["drop_empty_namespaces"], *span(wanted.prefix))
            )
            self.database.shrink()
        return total

    async def aretain(self, rule: VersionRetention, *, prefix: Namespace = ()) -> int:
        """See `retain`."""
        return await asyncio.to_thread(lambda: self.retain(rule, prefix=prefix))

    def _drop_versions(self, prefix: bytes, last: int | None, since: int | None) -> Flow[int]:
        far = 1 << 62  # as the statement knows it
        bound = (*span(prefix), far if since is None else since, far if last is None else last)
        rows = yield Statement(self._sql["old_versions"], (*bound, _SWEEP))
        yield Statement(self._sql["drop_version"], rows, many=True)
        yield Statement(self._sql["drop_index"], rows, many=True)
        return len(rows)

    # -- indexes on paths

    def create_index(self, path: str) -> None:
        """Make searches that filter by a path of the value fast, like `"kind"` or `"user.age"`.

        Raises:
            ConfigurationError: The path is no names joined by dots, or values are encrypted.
        """
        checked = index_path(path)
        if self._records.sealed:
            raise ConfigurationError(
                "values in this store are encrypted, so a path cannot have an index"
            )
        on = index_expression(checked, "value")
        sql = f'CREATE INDEX IF NOT EXISTS "{index_name(checked)}" ON store_items (ns, {on})'
        self.database.write(lambda: rows_of(sql))

    async def acreate_index(self, path: str) -> None:
        """See `create_index`."""
        await asyncio.to_thread(self.create_index, path)

    async def adrop_index(self, path: str) -> None:
        """See `drop_index`."""
        await asyncio.to_thread(self.drop_index, path)

    async def aindexes(self) -> list[str]:
        """See `indexes`."""
        return await asyncio.to_thread(self.indexes)

    async def aexplain_query(
        self, namespace_prefix: Namespace, /, *, filter: Mapping[str, Any] | None = None
    ) -> QueryPlan:
        """See `explain_query`."""
        return await asyncio.to_thread(lambda: self.explain_query(namespace_prefix, filter=filter))

    def drop_index(self, path: str) -> None:
        """Remove an index; one that is not there is no error."""
        sql = f'DROP INDEX IF EXISTS "{index_name(index_path(path))}"'
        self.database.write(lambda: rows_of(sql))

    def indexes(self) -> list[str]:
        """The paths that have an index."""
        return self.database.read(self._reader.indexes())

    def explain_query(
        self, namespace_prefix: Namespace, /, *, filter: Mapping[str, Any] | None = None
    ) -> QueryPlan:
        """How a search would be answered: which path indexes it uses."""
        return self.database.read(self._reader.explain(self._wanted(namespace_prefix, filter)))

    # -- vectors of another model

    def reembed(self, progress: Progress | None = None) -> int:
        """Make all vectors anew with the store's present embedder.

        Others may read and write meanwhile; an item is found by text until its turn has come. It
        may be cut off and called again: what is done stays done.

        Args:
            progress: Called after each batch with how many are done, and of how many.

        Returns:
            How many items got new vectors.

        Raises:
            EmbeddingFailed: The embedder fails for all; call again to go on. A text that it refuses
                by itself is left in `pending_embeddings()`.
            ConfigurationError: The store has no embedder.
        """
        return self._driver.run(self._reembed(progress))

    async def areembed(self, progress: Progress | None = None) -> int:
        """See `reembed`."""
        return await self._driver.arun(self._reembed(progress))

    def _reembed(self, progress: Progress | None) -> Steps[int]:
        model = self._preparer.model
        if model is None:
            raise ConfigurationError("the store has no embedder; open it with index=")
        probe = yield EmbedAll(["perdure"])
        number = yield Write(partial(self._writer.enrol, model.of(probe.shape[1]), replace=True))
        of = (yield Read(self._lacking_count(number)))[0][0]
        done = since = 0
        while rows := (yield Read(self._to_embed(since, number))):
            since = rows[-1][0]
            done += yield from self._give_each(rows)
            if progress is not None:
                progress(done, of)
        return done

    def _lacking_count(self, number: int) -> Flow[list[Row]]:
        return (yield from rows_of(self._sql["to_embed_count"], number))

    def _to_embed(self, since: int, number: int) -> Flow[list[Row]]:
        return (yield from rows_of(self._sql["to_embed"], since, number, BATCH))

    # -- a part of it

    def scoped(
        self, prefix: Namespace, *, max_items: int | None = None, max_bytes: int | None = None
    ) -> ScopedStore:
        """What is under a prefix, as a store that cannot see or name anything outside.

        Namespaces given to it, and those it returns, leave the prefix out. It shares this store's
        database and need not be closed.

        Args:
            prefix: One label at least.
            max_items: How many items may be under it.
            max_bytes: How much JSON they may have together.

        Raises:
            InvalidNamespace: The prefix is none, or empty.
            ConfigurationError: A limit is no whole number.
        """
        path = check_prefix(prefix)
        return ScopedStore(self._parts, path, limits_of(path, max_items, max_bytes))

    # -- looking

    def stats(self) -> StoreStats:
        """Counts and sizes."""
        counts = self.database.read(_row(self._sql["counts"]))
        namespaces, items, size, versions = counts
        return StoreStats(
            namespaces,
            items,
            versions,
            self.database.read(self._lacking_vectors()),
            size,
            tuple(self.indexes()),
            self.database.stats(),
        )

    async def astats(self) -> StoreStats:
        """See `stats`."""
        return await asyncio.to_thread(self.stats)

    @property
    def model(self) -> Model | None:
        """What this store embeds with; `dims` is 0 until it is known."""
        return None if self._preparer.model is None else replace(self._preparer.model)


def _row(sql: str) -> Flow[Row]:
    return (yield from rows_of(sql))[0]
