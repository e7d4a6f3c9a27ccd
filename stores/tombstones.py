"""Find tombstones, so that an import does not restore memories that were deleted or forgotten.

A tombstone is a record of a memory that was deleted or forgotten in this store. `perdure.memory`
writes the tombstone when it deletes or forgets the memory. A tombstone is an item under
`("perdure", "buried", *namespace)`, where `namespace` is the namespace of the memory. The key of a
tombstone is a hash of one of the memory's texts, or a hash of the thread id and the message id of a
message from which the memory was created.

An import rejects an item version if a tombstone exists for one of its texts. An import also rejects
a version of a `turn` memory if a tombstone exists for one of the source messages in the version's
provenance.

The constants at the top of this module are the namespaces and field names of `perdure.memory` that
the stores depend on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, pairwise
from typing import Any, Final

from perdure.storage.flow import Flow, NamedSQL
from perdure.stores.namespaces import decode_namespace_path, encode_namespace_path
from perdure.stores.search.text_equivalence import hash_normal_form
from perdure.stores.values import decode_json_object, to_prompt_json

ROOT: Final = "perdure"
"""First label of the namespaces in which `perdure.memory` keeps notes about memories."""
QUARANTINE: Final = "quarantine"
"""Second label of the notes about memories that wait for a person's decision."""
TOMBSTONES: Final = "buried"
"""Second label of the notes about deleted and forgotten memories."""
CHANGED: Final = "changed"
"""Second label of the notes about memories that were changed by hand."""
WATERMARKS: Final = "formed"
"""Second label of the notes that say how far extractors have read threads."""
KINDS: Final = (QUARANTINE, TOMBSTONES, CHANGED, WATERMARKS)
"""Second labels of all namespaces of notes, one for each kind of note."""
TEMPLATES: Final = "templates"
"""Second label of the namespace that records which namespace templates perdure has used."""
TURN: Final = "turn"
"""Value of the field `kind` of a memory that is one message of a thread."""
INSTRUCTIONS: Final = "instructions"
"""Field of a value that contains the text of instructions, as in LangGraph's own examples."""
PREVIOUS: Final = "formerly"
"""Field of a value that contains the earlier texts of a memory."""
AUTHOR: Final = "author"
"""Field of provenance, and of the record of an earlier text, that names the user who wrote the
text, if several users share the memories."""
UNNAMED: Final = ("trust", "at")
"""Fields of provenance that are kept when an author's name is removed from a version. All other
fields may name the author or a thread of the author."""
SOURCE: Final = "provenance"
"""Field of a value that contains the provenance, if the store is not perdure's own."""


def is_namespace_of_internal_notes(namespace: Sequence[str]) -> bool:
    """Return whether a namespace is reserved for perdure's internal records, such as tombstones.

    A scope adds a prefix to each namespace. The argument `namespace` must not contain this prefix.
    The first two labels identify a namespace of internal notes.
    """
    root, kind = (*namespace[:2], "", "")[:2]
    return root == ROOT and kind in (*KINDS, TEMPLATES)


def list_paths_of_internal_notes(root_path: bytes) -> list[bytes]:
    """Return the path prefixes of all namespaces that are reserved for internal records.

    Args:
        root_path: The path of the scope.
    """
    return [root_path + encode_namespace_path((ROOT, kind)) for kind in (*KINDS, TEMPLATES)]


def extract_item_text(value: Mapping[str, Any]) -> str:
    """Return the text of a memory or of instructions, or the value of any other item as JSON."""
    for name in ("text", INSTRUCTIONS):
        if isinstance(text := value.get(name), str):
            return text
    return to_prompt_json(value)


def hash_thread_and_message_id(thread_id: str | None, message_id: str) -> str:
    """Return the key of the tombstone for memories that were created from a message."""
    name = f"{thread_id or ''}\0{message_id}".encode("utf-8", "surrogatepass")
    return f"source:{blake2b(name, digest_size=16).hexdigest()}"


def compute_matching_tombstone_keys(
    value: Mapping[str, Any], provenance: Mapping[str, Any] | None
) -> set[str]:
    """Return the keys of all tombstones that would prevent the import of a value.

    If `provenance` is None or empty, the provenance is taken from the value's field `SOURCE`.
    """
    value = {**value}
    stored = value.pop(SOURCE, None)
    source = provenance or (stored if isinstance(stored, Mapping) else {})
    keys = {hash_normal_form(extract_item_text(value))}
    previous = value.get(PREVIOUS)
    for entry in previous if isinstance(previous, list) else ():
        if isinstance(entry, Mapping) and isinstance(text := entry.get("text"), str):
            keys.add(hash_normal_form(text))
    if value.get("kind") == TURN:
        ids = source.get("message_ids")
        for message_id in ids if isinstance(ids, list | tuple) else ():
            keys.add(hash_thread_and_message_id(source.get("thread_id"), str(message_id)))
    return keys


def is_note_path(path: bytes, kinds: Collection[str] = KINDS) -> bool:
    """Return whether the namespace at a path stores internal notes of one of the given kinds.

    The path is absolute. If a store is limited to a namespace prefix (a scope), the paths of its
    namespaces begin with this prefix.
    """
    return _find_index_of_internal_root_label(decode_namespace_path(path), kinds) is not None


def _find_index_of_internal_root_label(
    labels: Sequence[str], note_kinds: Collection[str]
) -> int | None:
    """Find the label `ROOT` in a namespace of internal notes, and return its index.

    Return None if the namespace does not contain internal notes of one of the kinds in
    `note_kinds`.

    In a scoped store, every namespace begins with the labels of the scope's prefix. In such a
    namespace, the index of the label `ROOT` is greater than 0.
    """
    pairs = enumerate(pairwise(labels))
    return next(
        (index for index, (root, kind) in pairs if root == ROOT and kind in note_kinds), None
    )


def list_tombstone_paths_of_all_possible_scopes(path: bytes) -> list[bytes]:
    """Return the paths of all namespaces that may contain tombstones for a namespace's items.

    A scope is a store that is limited to a namespace prefix. A scope stores its tombstones under
    its own namespace prefix. The database does not record which namespace prefixes are used by
    scopes, so any prefix of the namespace may belong to a scope. The list therefore contains one
    tombstone path for each prefix. When a person accepts a quarantined item, the item is moved to
    another namespace. For a quarantine namespace, the returned list contains only one path. This
    path is the tombstone path of the namespace that receives the quarantined items when a person
    accepts them. Internal notes are items that perdure stores for its own use. Quarantined items,
    which wait for a person's approval, are stored as internal notes. Quarantined items can have
    tombstones. perdure writes no tombstones (records of deletions) for its other internal notes,
    such as notes about manual changes. The returned list is empty for three kinds of namespaces:
    tombstones, notes about manual changes, and the read positions of extractors.
    """
    names = decode_namespace_path(path)
    root_index = _find_index_of_internal_root_label(names, KINDS)
    if root_index is None:
        splits = [(names[:i], names[i:]) for i in range(len(names))]
    elif names[root_index + 1] == QUARANTINE:
        splits = [(names[:root_index], names[root_index + 2 :])]
    else:
        splits = []
    return [encode_namespace_path((*scope, ROOT, TOMBSTONES, *rest)) for scope, rest in splits]


@dataclass(frozen=True, slots=True)
class ItemContent:
    """The fields of an item version that are compared with tombstones."""

    path: bytes
    text: str  # the value as JSON
    provenance: Mapping[str, Any] | None

    def compute_matching_tombstone_keys(self) -> set[str]:
        """Return the keys of all tombstones that would prevent the import of this item version."""
        value = decode_json_object(self.text)
        return (
            compute_matching_tombstone_keys(value, self.provenance)
            if isinstance(value, Mapping)
            else set()
        )


def find_matching_tombstone_keys(
    sql: NamedSQL,
    contents: Sequence[ItemContent],
    now: int,
    imported: Collection[tuple[bytes, str]],
) -> Flow[list[set[str]]]:
    """Return, for each of `contents`, the set of keys of the tombstones that match it.

    Args:
        sql: The statements of the store.
        contents: The item versions.
        now: The current time, in microseconds since 1970.
        imported: Namespace path and key of the tombstones that the same import has written. They
            are ignored, because the source contained both the tombstones and the items.
    """
    note_paths = yield from _find_tombstone_paths(sql, {content.path for content in contents})
    candidates = [
        (number, note_path, key)
        for number, content in enumerate(contents)
        if note_paths[content.path]
        for key in sorted(content.compute_matching_tombstone_keys())
        for note_path in note_paths[content.path]
    ]
    pairs = dict.fromkeys(candidate[1:] for candidate in candidates)
    parameters = [(*pair, now) for pair in pairs if pair not in imported]
    rows = (yield sql.build_statements("get", parameters)) if parameters else []
    existing = {(row[1], row[2]) for row in chain.from_iterable(rows)}
    matching_keys: list[set[str]] = [set() for _ in contents]
    for number, note_path, key in candidates:
        if (note_path, key) in existing:
            matching_keys[number].add(key)
    return matching_keys


def _find_tombstone_paths(
    sql: NamedSQL, namespace_paths: Iterable[bytes]
) -> Flow[dict[bytes, list[bytes]]]:
    """Return, for each namespace, the paths of the namespaces that may hold tombstones for it.

    Tombstone namespaces that contain no tombstones are omitted.
    """
    paths_of_namespaces = {
        path: list_tombstone_paths_of_all_possible_scopes(path) for path in namespace_paths
    }
    possible_paths = dict.fromkeys(chain.from_iterable(paths_of_namespaces.values()))
    parameters = [(note_path,) for note_path in possible_paths]
    rows = (yield sql.build_statements("nonempty_namespace", parameters)) if parameters else []
    nonempty_paths = {path for (path,) in chain.from_iterable(rows)}
    return {
        path: [note_path for note_path in note_paths if note_path in nonempty_paths]
        for path, note_paths in paths_of_namespaces.items()
    }
