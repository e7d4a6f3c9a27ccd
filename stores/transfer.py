"""Items as JSON Lines, out and in: a version a line, oldest first, nothing lost."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any

from langgraph.store.base import BaseStore

from perdure.errors import ImportFailed, PerdureError
from perdure.storage.flow import Flow, Row, Statement
from perdure.stores.base import Namespace, Progress, TransferReport
from perdure.stores.doors import Doors
from perdure.stores.namespaces import labels, span
from perdure.stores.preparing import Request
from perdure.stores.reading import ended
from perdure.stores.records import micros, moment, provenance_of
from perdure.stores.restoring import Restored, restore
from perdure.stores.sources import of_langgraph_file, of_store
from perdure.stores.steps import Steps, Write
from perdure.stores.values import decode

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
        key made of its content.

        Args:
            lines: JSON, an object a line; empty lines are passed over.
            namespace: Where items go that do not name their own.
            progress: Called after each batch with how many lines are done, and None: nobody knows
                how many will come.

        Raises:
            ImportFailed: A line is malformed, or contradicts what is here. The lines before
                it are kept.
        """
        return self._take(_parsed(lines, namespace), progress)

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
        progress: Progress | None = None,
    ) -> TransferReport:
        """Take over the items of a file that langgraph's SqliteStore wrote, or of any store.

        Of a store of perdure's come the versions, times and provenance too.

        The source is only read. It may be cut off and called again: an item that is here already,
        equal, is passed over.

        Args:
            source: The path of the file, or an open store with blocking methods.
            progress: See `import_lines`.

        Raises:
            ConfigurationError: There is no such file.
            NotADatabase: It is not of langgraph's SqliteStore.
            ImportFailed: An item cannot be read or stored. Those before it are kept.
        """
        if isinstance(source, Transfer):
            return self._take(_exported(source), progress)
        if isinstance(source, BaseStore):
            return self._take(of_store(source), progress)
        return self._take(of_langgraph_file(source), progress)

    async def aimport_from(
        self,
        source: str | os.PathLike[str] | BaseStore,
        *,
        progress: Progress | None = None,
    ) -> TransferReport:
        """See `import_from`."""
        return await asyncio.to_thread(lambda: self.import_from(source, progress=progress))

    def _take(
        self, given: Iterable[tuple[str, Mapping[str, Any]]], progress: Progress | None = None
    ) -> TransferReport:
        report, done = TransferReport(), 0
        found = iter(given)
        failed: ImportFailed | None = None
        while failed is None:
            batch, failed = self._batch_of(found)
            if batch:
                report += self._driver.run(self._restore(batch))
                done += len(batch)
                if progress is not None:
                    progress(done, None)
            elif failed is None:
                return report
        raise failed

    def _batch_of(
        self, found: Iterator[tuple[str, Mapping[str, Any]]]
    ) -> tuple[list[tuple[Restored, list[str]]], ImportFailed | None]:
        """What comes next, up to a line that is wrong, and the error for that."""
        batch: list[tuple[Restored, list[str]]] = []
        try:
            for where, line in islice(found, _PAGE):
                batch.append(self._restored(where, line))
        except ImportFailed as exc:
            return batch, exc
        return batch, None

    def _restore(self, given: list[tuple[Restored, list[str]]]) -> Steps[TransferReport]:
        puts, model = yield from self._preparer.embedded([(one.put, p) for one, p in given])
        ready = [one.holding(put) for (one, _), put in zip(given, puts, strict=True)]
        report: TransferReport = yield Write(restore(self._writer, ready, self._now(), model))
        return report

    def _restored(self, where: str, line: Mapping[str, Any]) -> tuple[Restored, list[str]]:
        try:
            said = line.get("provenance")
            if said and not isinstance(said.get("message_ids", []), list):
                raise ValueError("message_ids of its provenance is no list")
            put, pieces = self._preparer.put(
                Request(
                    line["namespace"],
                    line["key"],
                    line["value"] if line["value"] is not None else _NOTHING,
                    line.get("index"),
                    line.get("ttl"),
                    provenance=provenance_of(said) if said else None,
                    limits=self._limits,
                )
            )
            times = {name: _time(line, name) for name in _TIMES}
            return Restored(put, _version(line), *times.values()), pieces
        except PerdureError as exc:
            raise ImportFailed(f"{where}: {exc}") from exc
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as exc:
            raise ImportFailed(f"{where}: {exc}; expected what export() writes") from exc


_NOTHING: Any = ()  # no mapping: the check of values says so
_TIMES = ("created_at", "valid_from", "valid_to", "expires_at")


def _time(line: Mapping[str, Any], name: str) -> int | None:
    return micros(datetime.fromisoformat(line[name])) if name in line else None


def _version(line: Mapping[str, Any]) -> int | None:
    version = line.get("version")
    if version is not None and (type(version) is not int or not 0 < version < _MOST):
        raise ValueError(f"version is {version!r}; expected 1 or more")
    return version


def _exported(source: Transfer) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for line in source.export():
        yield f"{line['key']!r} in {line['namespace']!r}", line


def _parsed(
    lines: Iterable[str], namespace: Namespace | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, text in enumerate(lines, 1):
        where = f"line {number}"
        if not isinstance(text, str):
            raise ImportFailed(f"{where}: a {type(text).__name__}; expected text")
        if not text.strip():
            continue
        try:
            line = decode(text)
        except (ValueError, RecursionError) as exc:
            raise ImportFailed(f"{where}: no JSON ({exc}); expected an object a line") from exc
        if not isinstance(line, dict):
            raise ImportFailed(
                f"{where}: {str(line)[:60]!r} is no object; expected an object a line"
            )
        yield where, _addressed(where, line, namespace)


def _addressed(where: str, line: dict[str, Any], namespace: Namespace | None) -> Mapping[str, Any]:
    if "value" not in line and "namespace" not in line:
        line = {"value": line, "key": line.get("key")}
    if "namespace" not in line:
        if namespace is None:
            raise ImportFailed(f"{where}: it names no namespace, and none was given")
        line["namespace"] = namespace
    if line.get("key") is None:
        text = json.dumps(line.get("value"), sort_keys=True)
        line["key"] = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return line
