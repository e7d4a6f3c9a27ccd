"""Erasure of what one author wrote among items that several people share, version by version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure.settings import check_user
from perdure.storage.flow import Flow, Row, Statement
from perdure.stores.base import Namespace, Receipt
from perdure.stores.namespaces import decode_path, prefix_range
from perdure.stores.parts import StoreParts
from perdure.stores.reading import moment, provenance_place, value_place
from perdure.stores.tombstones import AUTHOR, PREVIOUS, UNNAMED
from perdure.stores.values import encode_value


@dataclass(slots=True)
class _Written:
    """What an author wrote: versions, and versions of others that keep one of the texts."""

    own: list[Row] = field(default_factory=list)
    quoting: list[Row] = field(default_factory=list)


def forget_author(
    parts: StoreParts, prefix: Namespace, author: str, *, hand_over: bool, dry_run: bool
) -> Receipt:
    """See `Store.forget_author`."""
    check_user("author", author, "give the name of the author")
    path = parts.resolve_prefix(prefix)
    if dry_run:
        written = parts.database.read(lambda: _find(parts, path, author))
        return _build_receipt(parts, written, hand_over=hand_over, clean=False)
    written = parts.database.write(
        lambda: _apply(parts, path, author, hand_over=hand_over), deletes_rows=True
    )
    parts.database.read(parts.indexes.purge)
    clean = parts.database.scrub()
    return _build_receipt(parts, written, hand_over=hand_over, clean=clean)


def _find(parts: StoreParts, path: bytes, author: str) -> Flow[_Written]:
    written = _Written()
    for row in (yield parts.sql("every_version", *prefix_range(path))):
        if parts.records.provenance(row[9], *row[1:4]).get(AUTHOR) == author:
            written.own.append(row)
        elif any(_is_by(entry, author) for entry in _previous(parts.records.value(row))):
            written.quoting.append(row)
    return written


def _previous(value: Mapping[str, Any]) -> list[Any]:
    """Return the earlier texts that a value keeps."""
    kept = value.get(PREVIOUS)
    return kept if isinstance(kept, list) else []


def _is_by(entry: Any, author: str) -> bool:
    return isinstance(entry, Mapping) and entry.get(AUTHOR) == author


def _apply(parts: StoreParts, path: bytes, author: str, *, hand_over: bool) -> Flow[_Written]:
    """Remove the versions of an author, or the name in them, in one transaction."""
    sql = parts.sql
    written = yield from _find(parts, path, author)
    changed = [*written.own, *written.quoting]
    if not changed:
        return written
    paths = [(each,) for each in {row[1] for row in changed}]
    for statement in ("drop_index_at", "raise_changes_at"):
        yield Statement(sql[statement], paths, execute_many=True)
    rewritten = changed if hand_over else written.quoting
    for row in rewritten:
        yield from _rewrite(parts, row, author, hand_over=hand_over)
    if not hand_over:
        present = [(row[0],) for row in written.own if row[6] is None]
        yield Statement(sql["shrink_namespace"], present, execute_many=True)
        ids = [(row[0],) for row in written.own]
        for statement in ("drop_item", "drop_version", "drop_index", "drop_pending"):
            yield sql.build_batch(statement, ids)
    yield sql("drop_empty_namespaces", *prefix_range(path))
    yield sql("drop_index_left")
    yield from parts.writer.hush()
    yield sql("bump_setting", "erasures")
    yield from parts.database.request_scrub()
    return written


def _rewrite(parts: StoreParts, row: Row, author: str, *, hand_over: bool) -> Flow[None]:
    """Store a version without what an author wrote into it, or without the author's name."""
    records, place = parts.records, tuple(row[1:4])
    source = records.provenance(row[9], *row[1:4])
    if source.get(AUTHOR) == author:
        source = {name: part for name, part in source.items() if name in UNNAMED}
    value, before = records.value(row), records.text_of(row)
    if PREVIOUS in value:
        value[PREVIOUS] = [
            {name: part for name, part in entry.items() if name not in (AUTHOR, "message_ids")}
            if _is_by(entry, author)
            else entry
            for entry in _previous(value)
            if hand_over or not _is_by(entry, author)
        ]
        if not value[PREVIOUS]:
            del value[PREVIOUS]
    text = encode_value(value)
    stored = None
    if source:
        stored = records.shut(json.dumps(source, ensure_ascii=False), provenance_place(*place))
    shut, size = records.shut(text, value_place(*place)), len(text.encode())
    if row[6] is None:
        yield parts.sql("rewrite_item", shut, stored, size, row[0])
        yield parts.sql("add_bytes", size - len(before.encode()), row[1])
    else:
        yield parts.sql("rewrite_version", shut, stored, row[0])


def _build_receipt(
    parts: StoreParts, written: _Written, *, hand_over: bool, clean: bool
) -> Receipt:
    rows = [] if hand_over else written.own
    closed = sum(row[6] is not None for row in rows)
    keys = sorted({(row[1], row[2]) for row in rows})
    texts = [parts.records.text_of(row).encode() for row in rows]
    return Receipt(
        items=len(rows) - closed,
        versions=closed,
        messages=0,
        keys=tuple((decode_path(path[len(parts.root) :]), key) for path, key in keys),
        hashes=tuple(sorted({hashlib.blake2b(each, digest_size=16).hexdigest() for each in texts})),
        threads=(),
        at=moment(parts.now()),
        clean=clean,
        size_bytes=sum(map(len, texts)),
        handed_over=len(written.own) if hand_over else 0,
    )
