"""Items as JSON Lines, out and in: a version a line, oldest first, nothing lost."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import closing
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, Literal, get_args

from langgraph.store.base import BaseStore

from perdure.errors import ConfigurationError, ImportFailed, PerdureError
from perdure.storage.flow import Flow, Row, Statement
from perdure.stores.base import Namespace, Progress, TransferReport
from perdure.stores.doors import Doors
from perdure.stores.lines import TIMES, parsed
from perdure.stores.namespaces import labels, span
from perdure.stores.reading import ended
from perdure.stores.records import micros, moment, provenance_of
from perdure.stores.restoring import Restored, restore
from perdure.stores.sources import Lines, of_langgraph_file, of_store
from perdure.stores.steps import Steps, Write

OnUnsuitable = Literal["error", "skip"]
_LOG = logging.getLogger("perdure")
_PAGE = 500  # keys read, or lines written, at a time
_MINUTE = 60_000_000
_MOST = 1 << 60  # versions: SQLite counts in 64 bits


class Transfer(Doors):
    """The part of a store that brings items out and in."""

    # -- out

    def export(
        self, namespace_prefix: Namespace = (), *, versions: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Every item under a prefix, a JSON object each, in order of namespace, key and version.

        Others may write meanwhile: each key is as it was at one moment.

        Args:
            namespace_prefix: Where.
            versions: Whether closed versions come too.
        """
        prefix = self._path(namespace_prefix)
        for path in self.database.read(self._every_path(prefix)):
            last: str | None = ""
            while last is not None:
                rows, last = self.database.read(self._key_page(path, last, versions))
                yield from map(self._line, rows)

    async def aexport(
        self, namespace_prefix: Namespace = (), *, versions: bool = True
    ) -> AsyncIterator[dict[str, Any]]:
        """See `export`."""
        lines = self.export(namespace_prefix, versions=versions)
        while page := await asyncio.to_thread(lambda: list(islice(lines, _PAGE))):
            for line in page:
                yield line

    def _every_path(self, prefix: bytes) -> Flow[list[bytes]]:
        return [row[0] for row in (yield Statement(self._sql["every_path"], span(prefix)))]

    def _key_page(
        self, path: bytes, last: str, versions: bool
    ) -> Flow[tuple[list[Row], str | None]]:
        """The versions of some keys after one, and the last of those keys; None: there are none."""
        out: list[Row] = []
        key = None
        for (key,) in (yield Statement(self._sql["key_page"], (path, last, _PAGE))):
            for row in (yield Statement(self._sql["key_versions"], (path, key))):
                row = ended(row, self._now())
                if versions or row[6] is None:
                    out.append(row)
        return out, key

    def _line(self, row: Row) -> dict[str, Any]:
        _, path, key, version, created, since, until, expires, _, provenance, *rest = row
        ttl, indexed, fields = rest
        line: dict[str, Any] = {
            "namespace": list(labels(path[len(self._root) :])),
            "key": key,
            "value": self._records.value(row),
            "version": version,
            "created_at": moment(created).isoformat(),
            "valid_from": moment(since).isoformat(),
        }
        if until is not None:
            line["valid_to"] = moment(until).isoformat()
        if expires is not None and until is None:
            line["expires_at"] = moment(expires).isoformat()
        if ttl is not None and until is None:
            line["ttl"] = ttl / _MINUTE
        if not indexed:
            line["index"] = False
        elif fields is not None:
            line["index"] = json.loads(fields)
        said = self._records.provenance(provenance, path, key, version)
        if said:
            line["provenance"] = said
        return line

    # -- in

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
        return self._take(parsed(lines, namespace), progress, "line")

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
        if isinstance(source, Transfer):
            found = _exported(source)
        elif isinstance(source, BaseStore):
            found = of_store(source)
        else:
            found = of_langgraph_file(source)
        return self._take(found, progress, "item", skips=on_unsuitable == "skip")

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

    def _take(
        self, found: Lines, progress: Progress | None, noun: str, *, skips: bool = False
    ) -> TransferReport:
        report, done = TransferReport(), 0
        failed: ImportFailed | None = None
        with closing(found):
            while failed is None:
                batch, unsuitable, failed = self._batch_of(found, skips)
                try:
                    if batch:
                        report += self._driver.run(self._restore(batch))
                except ImportFailed as exc:  # it contradicts what is here
                    failed = exc
                    break
                report += TransferReport(unsuitable=unsuitable)
                done += len(batch) + unsuitable
                if batch or unsuitable:
                    if progress is not None:
                        progress(done, None)
                elif failed is None:
                    return report
        if not done:
            raise failed
        are = f"{noun} before that is" if done == 1 else f"{noun}s before that are"
        raise ImportFailed(f"{failed}. {done} {are} kept") from failed

    def _batch_of(
        self, found: Lines, skips: bool
    ) -> tuple[list[Restored], int, ImportFailed | None]:
        """What comes next, how many were passed over, and the error of one that is wrong."""
        batch: list[Restored] = []
        unsuitable = 0
        try:
            for where, line in islice(found, _PAGE):
                try:
                    batch.append(self._restored(where, line))
                except ImportFailed as exc:
                    if not skips:
                        raise
                    unsuitable += 1
                    _LOG.warning("passed over: %s", exc)
        except ImportFailed as exc:
            return batch, unsuitable, exc
        return batch, unsuitable, None

    def _restore(self, given: list[Restored]) -> Steps[TransferReport]:
        model = yield from self._preparer.embedded([one.put for one in given])
        report: TransferReport = yield Write(
            partial(restore, self._writer, given, self._now(), model)
        )
        return report

    def _restored(self, where: str, line: Mapping[str, Any] | ImportFailed) -> Restored:
        if isinstance(line, ImportFailed):  # its source could not read it
            raise line
        try:
            said = line.get("provenance")
            if said and not isinstance(said.get("message_ids", []), list):
                raise ValueError("message_ids of its provenance is no list")
            put = self._preparer.put(
                self._preparer.place(line["namespace"], line["key"]),
                line["value"] if line["value"] is not None else _NOTHING,
                line.get("index"),
                line.get("ttl"),
                provenance=provenance_of(said) if said else None,
            )
            times = {name: _time(line, name) for name in TIMES}
            return Restored(put, _version(line), *times.values())
        except PerdureError as exc:
            raise ImportFailed(f"{where}: {exc}") from exc
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as exc:
            raise ImportFailed(f"{where}: {exc}; expected what export() writes") from exc


_NOTHING: Any = ()  # no mapping: the check of values says so


def _time(line: Mapping[str, Any], name: str) -> int | None:
    return micros(datetime.fromisoformat(line[name])) if name in line else None


def _version(line: Mapping[str, Any]) -> int | None:
    version = line.get("version")
    if version is not None and (type(version) is not int or not 0 < version < _MOST):
        raise ValueError(f"version is {version!r}; expected 1 or more")
    return version


def _exported(source: Transfer) -> Lines:
    for line in source.export():
        yield f"{line['key']!r} in {line['namespace']!r}", line
