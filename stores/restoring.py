"""Putting items back as they were, with their versions and times; what is here already stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeGuard

from perdure.errors import ImportFailed
from perdure.storage.flow import Flow, Row, Statement
from perdure.stores.base import TransferReport
from perdure.stores.models import Model
from perdure.stores.namespaces import labels
from perdure.stores.writing import Changes, New, Put, Times, Writer


@dataclass(frozen=True, slots=True)
class Restored:
    """A version to put back; times in microseconds.

    Attributes:
        put: What it holds.
        version: Its number; None: it is put as the newest, unless that is equal.
        created: When the key was first put.
        since: When it was put.
        until: When it was closed; None: it is the present one.
        expires: When it will expire.
    """

    put: Put
    version: int | None = None
    created: int | None = None
    since: int | None = None
    until: int | None = None
    expires: int | None = None

    def holding(self, put: Put) -> Self:
        """The same, with its vectors."""
        return replace(self, put=put)


def restore(
    writer: Writer, given: Sequence[Restored], now: int, model: Model | None
) -> Flow[TransferReport]:
    """Put versions back, all or none.

    Raises:
        ImportFailed: A version of that number is here and holds something else.
    """
    report = TransferReport()
    changes = yield from writer.begin([one.put for one in given], model)
    for one in given:
        rows = yield Statement(writer.sql["history"], (one.put.path, one.put.key))
        known = {row[3]: row for row in rows}
        newest = max(known, default=0)
        last = known.get(newest)
        if one.version is None and _is_present(last) and _same(writer, last, one.put):
            report += TransferReport(skipped=1)
            continue
        if one.version is not None and one.version <= newest:
            yield from _check_same(writer, known.get(one.version), one)
            report += TransferReport(skipped=1)
            continue
        yield from _add(writer, one, now, changes)
        closed = one.until is not None
        report += TransferReport(items=int(not closed), versions=int(closed))
    yield from writer.finish([one.put for one in given], changes, now)
    return report


def _add(writer: Writer, one: Restored, now: int, changes: Changes) -> Flow[None]:
    [there] = yield from writer.locate([one.put])
    ns, row, version, created, valid_from, _, size, closed, _, made = there
    since = now if one.since is None else one.since
    if row is not None:
        since = max(since, valid_from + 1)
        yield from writer.close([(since, row)])
        changes.grown.append((-1, -size, ns))
    number = one.version or (version or closed or 0) + 1
    first = one.created if one.created is not None else created if row is not None else since
    put = one.put if one.until is None else replace(one.put, lacking=None)
    expires = one.expires
    if expires is None and one.put.ttl is not None and one.until is None:
        expires = max(since, now) + one.put.ttl
    times = Times(first, since, expires, made)
    [added] = yield from writer.add([New(put, ns, number, times)], changes)
    if one.until is not None:
        [(ns, _, _, _, _, _, size, *_)] = yield from writer.locate([put])
        yield from writer.close([(max(one.until, since + 1), added)])
        changes.grown.append((-1, -size, ns))


def _is_present(row: Row | None) -> TypeGuard[Row]:
    return row is not None and row[6] is None


def _check_same(writer: Writer, here: Row | None, one: Restored) -> Flow[None]:
    if here is not None and not _same(writer, here, one.put):
        raise ImportFailed(
            f"version {one.version} of {one.put.key!r} in {labels(one.put.path)!r} is here already "
            "and holds something else: import into a new file, or forget it here first"
        )
    yield from ()


def _same(writer: Writer, here: Row, put: Put) -> bool:
    fields = writer.records.provenance(here[9], *here[1:4])
    return writer.records.text_of(here) == put.text and fields == (put.provenance or {})
