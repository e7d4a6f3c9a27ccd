"""A whole store, with the file it is in: looking after it, bringing items out and in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, get_args

from langgraph.store.base import BaseStore

from perdure.errors import ConfigurationError
from perdure.storage.database import AwaitableInt, DatabaseOwner
from perdure.stores.base import (
    Namespace,
    Progress,
    QueryPlan,
    StoreStats,
    TransferReport,
    VersionRetention,
)
from perdure.stores.expiry import Sweeper, SweeperEnd
from perdure.stores.maintenance import Maintenance
from perdure.stores.models import Model
from perdure.stores.parts import Parts
from perdure.stores.sources import Lines, of_langgraph_file, of_store, of_text
from perdure.stores.store import Store
from perdure.stores.transfer import PAGE, Transfer

OnUnsuitable = Literal["error", "skip"]


class WholeStore(DatabaseOwner, Store):
    """A store with its database; it is for `with` or `async with`, or to be closed by hand.

    Args:
        parts: What it is made of.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._maintenance = Maintenance(parts)
        self._transfer = Transfer(parts, self._missing)
        self._sweeper: Sweeper | None = None
        self._closed = False

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
        return AwaitableInt(self._maintenance.sweep())

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
        return self._maintenance.retain(rule, prefix)

    async def aretain(self, rule: VersionRetention, *, prefix: Namespace = ()) -> int:
        """See `retain`."""
        return await asyncio.to_thread(self._maintenance.retain, rule, prefix)

    # -- indexes on paths

    def create_index(self, path: str) -> None:
        """Make searches that filter by a path of the value fast, like `"kind"` or `"user.age"`.

        Raises:
            ConfigurationError: The path is no names joined by dots, or values are encrypted.
        """
        self._maintenance.create_index(path)

    async def acreate_index(self, path: str) -> None:
        """See `create_index`."""
        await asyncio.to_thread(self.create_index, path)

    def drop_index(self, path: str) -> None:
        """Remove an index; one that is not there is no error."""
        self._maintenance.drop_index(path)

    async def adrop_index(self, path: str) -> None:
        """See `drop_index`."""
        await asyncio.to_thread(self.drop_index, path)

    def indexes(self) -> list[str]:
        """The paths that have an index."""
        return self._maintenance.indexes()

    async def aindexes(self) -> list[str]:
        """See `indexes`."""
        return await asyncio.to_thread(self.indexes)

    def explain_query(
        self, namespace_prefix: Namespace, /, *, filter: Mapping[str, Any] | None = None
    ) -> QueryPlan:
        """How a search would be answered: which path indexes it uses."""
        return self._maintenance.explain(namespace_prefix, filter)

    async def aexplain_query(
        self, namespace_prefix: Namespace, /, *, filter: Mapping[str, Any] | None = None
    ) -> QueryPlan:
        """See `explain_query`."""
        return await asyncio.to_thread(self._maintenance.explain, namespace_prefix, filter)

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
        return self._run(self._missing.reembed(progress))

    async def areembed(self, progress: Progress | None = None) -> int:
        """See `reembed`."""
        return await self._arun(self._missing.reembed(progress))

    @property
    def model(self) -> Model | None:
        """What this store embeds with; `dims` is 0 until it is known."""
        model = self._parts.preparer.embeddings.model
        return None if model is None else replace(model)

    # -- out and in

    def export(
        self, namespace_prefix: Namespace = (), *, versions: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Every item under a prefix, a JSON object each, in order of namespace, key and version.

        Others may write meanwhile: each key is as it was at one moment.

        Args:
            namespace_prefix: Where.
            versions: Whether closed versions come too.
        """
        return self._transfer.export(namespace_prefix, versions=versions)

    async def aexport(
        self, namespace_prefix: Namespace = (), *, versions: bool = True
    ) -> AsyncIterator[dict[str, Any]]:
        """See `export`."""
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
        """Take in what `export` gave, or JSON objects of one's own; it may be repeated.

        An exported version that is here already, equal, is passed over, and so is one that is
        older than what is here of its key. A line without `namespace`
        and `value` is a value by itself: it goes into `namespace`, under its `key` field or else a
        key made of its content. Any other line has nothing but what `export` writes.

        Args:
            lines: JSON, an object a line; empty lines are passed over.
            namespace: Where items go that do not name their own.
            progress: Called after each batch with how many lines are done, and None: nobody knows
                how many will come.

        Raises:
            ImportFailed: A line is malformed, has a field that no item has, or contradicts what
                is here. The lines before it are kept; the message says how many.
        """
        return self._transfer.take(of_text(lines, namespace), progress, "line")

    async def aimport_lines(
        self,
        lines: Iterable[str],
        *,
        namespace: Namespace | None = None,
        progress: Progress | None = None,
    ) -> TransferReport:
        """See `import_lines`; `lines` are read in a thread."""
        return await asyncio.to_thread(
            lambda: self.import_lines(lines, namespace=namespace, progress=progress)
        )

    def import_from(
        self,
        source: str | os.PathLike[str] | BaseStore,
        *,
        on_unsuitable: OnUnsuitable = "error",
        progress: Progress | None = None,
    ) -> TransferReport:
        """Take over the items of a file that langgraph's SqliteStore wrote, or of any store.

        Of a store of perdure's come the versions, times and provenance too.

        The source is only read. It may be cut off and called again: an item that is here already,
        equal, is passed over.

        Args:
            source: The path of the file, or an open store with blocking methods.
            on_unsuitable: What becomes of an item that cannot be read or stored, say because its
                value is no JSON: `"error"`, or `"skip"`: it is counted, named in the log, and
                passed over.
            progress: See `import_lines`.

        Raises:
            ConfigurationError: There is no such file, or another argument is wrong.
            NotADatabase: It is not of langgraph's SqliteStore.
            ImportFailed: An item cannot be read or stored. Those before it are kept; the message
                says how many.
        """
        if on_unsuitable not in get_args(OnUnsuitable):
            raise ConfigurationError(
                f"on_unsuitable is {on_unsuitable!r}; expected one of {get_args(OnUnsuitable)}"
            )
        found: Lines
        if isinstance(source, WholeStore):
            found = _exported(source)
        elif isinstance(source, BaseStore):
            found = of_store(source)
        else:
            found = of_langgraph_file(source)
        return self._transfer.take(found, progress, "item", skips=on_unsuitable == "skip")

    async def aimport_from(
        self,
        source: str | os.PathLike[str] | BaseStore,
        *,
        on_unsuitable: OnUnsuitable = "error",
        progress: Progress | None = None,
    ) -> TransferReport:
        """See `import_from`."""
        return await asyncio.to_thread(
            lambda: self.import_from(source, on_unsuitable=on_unsuitable, progress=progress)
        )

    # -- looking

    def stats(self) -> StoreStats:
        """Counts and sizes."""
        return self._maintenance.stats(self._missing.count())

    async def astats(self) -> StoreStats:
        """See `stats`."""
        return await asyncio.to_thread(self.stats)


def _exported(source: WholeStore) -> Lines:
    for line in source.export():
        yield f"{line['key']!r} in {line['namespace']!r}", line
