"""Erase one author's texts from namespaces that several people share.

Item versions that the author wrote are deleted. An item version can also contain a list of the
texts that the item had in earlier versions. If someone else wrote the item version, the version is
kept. In this case, only the erased author's texts are removed from the version's list of earlier
texts. With `hand_over`, all texts are kept, and only the author's name and the links to the
author's threads are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure.settings import check_user
from perdure.storage.flow import Flow, Row, Statement
from perdure.stores.base import Namespace, Receipt
from perdure.stores.erasure import build_receipt, erase_rows, hash_erased_text
from perdure.stores.namespaces import prefix_range
from perdure.stores.store_parts import StoreParts
from perdure.stores.tombstones import AUTHOR, PREVIOUS, UNNAMED
from perdure.stores.values import encode_value_as_json


@dataclass(slots=True)
class _AuthoredRows:
    """The database rows that contain an author's texts or name.

    Each row is a result row of the SQL statement `all_versions`. The columns of each row are, in
    order: the id, the path of the namespace, the key, the version, the times `created_at`,
    `valid_from`, `valid_to` (None for a current version) and `expires_at`, the encoded value and
    the encoded provenance.

    Attributes:
        by_author: Rows of the versions that the author wrote.
        by_other_users: Rows of versions by other users that contain earlier texts of the author.
    """

    by_author: list[Row] = field(default_factory=list)
    by_other_users: list[Row] = field(default_factory=list)


def forget_author(
    parts: StoreParts, prefix: Namespace, author: str, *, hand_over: bool, dry_run: bool
) -> Receipt:
    """Erase the texts of an author, or only the author's name; see `Store.forget_author`."""
    check_user("the argument 'author'", author, "pass the author's user name")
    path = parts.resolve_prefix(prefix)
    if dry_run:
        found_rows = parts.database.read(
            lambda: _find_rows_with_texts_of_author(parts, path, author)
        )
        return _build_author_erasure_receipt(
            parts, found_rows, hand_over=hand_over, is_scrubbed=False
        )
    found_rows = parts.database.write(
        lambda: _erase_texts_or_name_of_author(parts, path, author, hand_over=hand_over),
        deletes_rows=True,
    )
    parts.database.read(parts.indexes.remove_erased_items_from_cached_indexes)
    clean = parts.database.scrub_deleted_rows()
    return _build_author_erasure_receipt(parts, found_rows, hand_over=hand_over, is_scrubbed=clean)


def _find_rows_with_texts_of_author(
    parts: StoreParts, path: bytes, author: str
) -> Flow[_AuthoredRows]:
    """Find the item versions that contain a text by the given author.

    The result has two groups. The first group contains the versions that the author wrote. The
    second group contains versions that other users wrote, but that contain a text by the author in
    their list of earlier texts.

    Only namespaces under the prefix `path` are searched.
    """
    found_rows = _AuthoredRows()
    for row in (yield parts.sql("all_versions", *prefix_range(path))):
        if parts.records.decode_provenance(row[9], *row[1:4]).get(AUTHOR) == author:
            found_rows.by_author.append(row)
        elif any(
            _is_by(entry, author) for entry in _earlier_texts(parts.records.decode_row_value(row))
        ):
            found_rows.by_other_users.append(row)
    return found_rows


def _earlier_texts(value: Mapping[str, Any]) -> list[Any]:
    """Return the earlier texts of a memory that are stored in the memory's value."""
    entries = value.get(PREVIOUS)
    return entries if isinstance(entries, list) else []


def _is_by(entry: Any, author: str) -> bool:
    """Return whether `author` is recorded as the author of an earlier text."""
    return isinstance(entry, Mapping) and entry.get(AUTHOR) == author


def _erase_texts_or_name_of_author(
    parts: StoreParts, path: bytes, author: str, *, hand_over: bool
) -> Flow[_AuthoredRows]:
    """Erase an author's texts, or only the author's name if `hand_over` is true.

    All changes are made in one transaction.
    """
    found_rows = yield from _find_rows_with_texts_of_author(parts, path, author)
    deleted_rows, rewritten_rows = found_rows.by_author, found_rows.by_other_users
    if hand_over:
        deleted_rows, rewritten_rows = [], [*deleted_rows, *rewritten_rows]
    rewrites = [
        (row, _build_rewrite_statements(parts, row, author, hand_over=hand_over))
        for row in rewritten_rows
    ]
    if deleted_rows or rewrites:
        yield from erase_rows(parts, path, deleted_rows, rewrites)
    return found_rows


def _build_rewrite_statements(
    parts: StoreParts, row: Row, author: str, *, hand_over: bool
) -> list[Statement]:
    """Build the SQL statements that erase an author's name and texts from an item version.

    An item version's value can contain a list of the texts that the item had in earlier versions.
    The statements remove the texts that the author wrote from the list of earlier texts.

    If `hand_over` is true, the author's earlier texts are kept without the author's name and
    message ids. Message ids are removed because they identify messages in the author's threads.
    """
    records = parts.records
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
    size = len(text.encode())
    encoded_value, encoded_provenance = records.encode_value_and_provenance(
        text, provenance, row[1:4]
    )
    if row[6] is not None:
        return [parts.sql("rewrite_version", encoded_value, encoded_provenance, row[0])]
    return [
        parts.sql("rewrite_item", encoded_value, encoded_provenance, size, row[0]),
        parts.sql("add_bytes", size - len(old_text.encode()), row[1]),
    ]


def _build_author_erasure_receipt(
    parts: StoreParts, found_rows: _AuthoredRows, *, hand_over: bool, is_scrubbed: bool
) -> Receipt:
    """Build the `Receipt` for an erasure of either an author's texts or only the author's name."""
    rows = [] if hand_over else found_rows.by_author
    texts = [parts.records.decode_row_text(row) for row in rows]
    return build_receipt(
        parts,
        rows,
        {hash_erased_text(text) for text in texts},
        messages=0,
        threads=(),
        clean=is_scrubbed,
        size_bytes=sum(len(text.encode()) for text in texts),
        handed_over=len(found_rows.by_author) if hand_over else 0,
    )
