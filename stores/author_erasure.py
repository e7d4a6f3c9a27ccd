"""Erase one author's texts from namespaces that several people share.

Item versions that the author wrote are deleted. Versions that another person wrote, and whose
values still contain earlier texts by the author, are rewritten without these texts. With
`hand_over`, all texts are kept, and only the author's name and the links to the author's threads
are removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure.settings import check_user
from perdure.storage.flow import Flow, Row, Statement
from perdure.stores.base import Namespace, Receipt
from perdure.stores.namespaces import decode_namespace_path, prefix_range
from perdure.stores.parts import StoreParts
from perdure.stores.reading import (
    build_provenance_associated_data,
    build_value_associated_data,
    from_microseconds,
)
from perdure.stores.tombstones import AUTHOR, PREVIOUS, UNNAMED
from perdure.stores.values import encode_value_as_json


@dataclass(slots=True)
class _AuthoredRows:
    """The database rows that contain an author's texts and name.

    The rows are returned by the statement `all_versions`. Their columns are, in order: the id, the
    path of the namespace, the key, the version, the times `created_at`, `valid_from`, `valid_to`
    (None for a current version) and `expires_at`, the encoded value and the encoded provenance.

    Attributes:
        by_author: Rows of the versions that the author wrote.
        by_others: Rows of versions by other users that contain earlier texts of the author.
    """

    by_author: list[Row] = field(default_factory=list)
    by_others: list[Row] = field(default_factory=list)


def forget_author(
    parts: StoreParts, prefix: Namespace, author: str, *, hand_over: bool, dry_run: bool
) -> Receipt:
    """Erase the texts of an author, or only the author's name; see `Store.forget_author`."""
    check_user("author", author, "give the name of the author")
    path = parts.resolve_prefix(prefix)
    if dry_run:
        found_rows = parts.database.read(lambda: _find_rows_of_author(parts, path, author))
        return _build_author_erasure_receipt(
            parts, found_rows, hand_over=hand_over, is_scrubbed=False
        )
    found_rows = parts.database.write(
        lambda: _erase_author(parts, path, author, hand_over=hand_over), deletes_rows=True
    )
    parts.database.read(parts.indexes.remove_erased_items_from_cached_indexes)
    clean = parts.database.scrub_deleted_rows()
    return _build_author_erasure_receipt(parts, found_rows, hand_over=hand_over, is_scrubbed=clean)


def _find_rows_of_author(parts: StoreParts, path: bytes, author: str) -> Flow[_AuthoredRows]:
    """Find the versions under a prefix that the author wrote or that contain the author's texts."""
    found_rows = _AuthoredRows()
    for row in (yield parts.sql("all_versions", *prefix_range(path))):
        if parts.records.decode_provenance(row[9], *row[1:4]).get(AUTHOR) == author:
            found_rows.by_author.append(row)
        elif any(
            _is_by(entry, author) for entry in _earlier_texts(parts.records.decode_row_value(row))
        ):
            found_rows.by_others.append(row)
    return found_rows


def _earlier_texts(value: Mapping[str, Any]) -> list[Any]:
    """Return the records of a memory's earlier texts, which the memory's value contains."""
    entries = value.get(PREVIOUS)
    return entries if isinstance(entries, list) else []


def _is_by(entry: Any, author: str) -> bool:
    """Return whether the record of an earlier text says that `author` wrote the text."""
    return isinstance(entry, Mapping) and entry.get(AUTHOR) == author


def _erase_author(
    parts: StoreParts, path: bytes, author: str, *, hand_over: bool
) -> Flow[_AuthoredRows]:
    """Erase an author's texts, or with `hand_over` only the author's name, in one transaction."""
    sql = parts.sql
    found_rows = yield from _find_rows_of_author(parts, path, author)
    changed_rows = [*found_rows.by_author, *found_rows.by_others]
    if not changed_rows:
        return found_rows
    paths = [(path_of_row,) for path_of_row in {row[1] for row in changed_rows}]
    for statement in ("drop_search_index", "count_namespace_change"):
        yield Statement(sql[statement], paths, execute_many=True)
    rows_to_rewrite = changed_rows if hand_over else found_rows.by_others
    for row in rows_to_rewrite:
        yield from _remove_author_from_version(parts, row, author, hand_over=hand_over)
    if not hand_over:
        current_ids = [(row[0],) for row in found_rows.by_author if row[6] is None]
        yield Statement(sql["shrink_namespace"], current_ids, execute_many=True)
        ids = [(row[0],) for row in found_rows.by_author]
        for statement in ("drop_item", "drop_version", "drop_index_row", "drop_pending"):
            yield sql.build_batch_statement(statement, ids)
    yield sql("drop_empty_namespaces", *prefix_range(path))
    yield sql("drop_orphaned_search_indexes")
    yield from parts.writer.clear_embedding_errors()
    yield sql("increment_setting", "erasures")
    yield from parts.database.request_scrub_of_deleted_rows()
    return found_rows


def _remove_author_from_version(
    parts: StoreParts, row: Row, author: str, *, hand_over: bool
) -> Flow[None]:
    """Rewrite a version without the author's earlier texts and without the author's name.

    If `hand_over` is true, the author's earlier texts are kept, and only the author's name is
    removed from them. Message ids are removed together with the name, because they identify
    messages of the author's threads.
    """
    records, row_key = parts.records, tuple(row[1:4])
    provenance = records.decode_provenance(row[9], *row[1:4])
    if provenance.get(AUTHOR) == author:
        provenance = {name: part for name, part in provenance.items() if name in UNNAMED}
    value, old_text = records.decode_row_value(row), records.decode_row_text(row)
    if PREVIOUS in value:
        value[PREVIOUS] = [
            {name: part for name, part in entry.items() if name not in (AUTHOR, "message_ids")}
            if _is_by(entry, author)
            else entry
            for entry in _earlier_texts(value)
            if hand_over or not _is_by(entry, author)
        ]
        if not value[PREVIOUS]:
            del value[PREVIOUS]
    text = encode_value_as_json(value)
    encoded_provenance = None
    if provenance:
        encoded_provenance = records.encode_text(
            json.dumps(provenance, ensure_ascii=False), build_provenance_associated_data(*row_key)
        )
    encoded, size = (
        records.encode_text(text, build_value_associated_data(*row_key)),
        len(text.encode()),
    )
    if row[6] is None:
        yield parts.sql("rewrite_item", encoded, encoded_provenance, size, row[0])
        yield parts.sql("add_bytes", size - len(old_text.encode()), row[1])
    else:
        yield parts.sql("rewrite_version", encoded, encoded_provenance, row[0])


def _build_author_erasure_receipt(
    parts: StoreParts, found_rows: _AuthoredRows, *, hand_over: bool, is_scrubbed: bool
) -> Receipt:
    """Build the `Receipt` for erasing an author's texts, or only the author's name."""
    rows = [] if hand_over else found_rows.by_author
    closed_count = sum(row[6] is not None for row in rows)
    keys = sorted({(row[1], row[2]) for row in rows})
    texts = [parts.records.decode_row_text(row).encode() for row in rows]
    return Receipt(
        items=len(rows) - closed_count,
        versions=closed_count,
        messages=0,
        keys=tuple((decode_namespace_path(path[len(parts.root) :]), key) for path, key in keys),
        hashes=tuple(sorted({hashlib.blake2b(text, digest_size=16).hexdigest() for text in texts})),
        threads=(),
        at=from_microseconds(parts.now()),
        clean=is_scrubbed,
        size_bytes=sum(map(len, texts)),
        handed_over=len(found_rows.by_author) if hand_over else 0,
    )
