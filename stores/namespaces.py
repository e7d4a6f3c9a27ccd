"""Validate namespaces and keys, and encode namespaces as byte-string paths.

A path is the concatenation of a namespace's labels in UTF-8, each terminated by a NUL byte. No
label contains a NUL byte. Paths sort in the same order as the tuples of labels that they encode.
All paths under a prefix are adjacent in sort order, so a range condition can select them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from langgraph.store.base import MatchCondition

from perdure.errors import CorruptRecord, InvalidNamespace

# first label of the namespaces that langgraph reserves for itself; users cannot put items into
# these namespaces
RESERVED = "langgraph"
# maximum size in bytes of a key, and of an encoded path
MAX_KEY = 4096
_RESERVED_PATH = f"{RESERVED}\0".encode()
# Lower and upper bound of a key range that contains every encoded namespace path. The upper bound
# is the byte 0xff, which never occurs in UTF-8 text.
EVERY_PATH = (b"", b"\xff")


def check_namespace_and_build_path(namespace: Any, root_path: bytes = b"") -> bytes:
    """Validate a namespace for new items, and return its path.

    Args:
        namespace: The labels, as a sequence of strings.
        root_path: The path of the scope that the namespace belongs to.

    Raises:
        InvalidNamespace: The namespace is empty, reserved, too long or otherwise invalid.
    """
    path = root_path + check_namespace_prefix_and_build_path(namespace)
    if not path:
        raise InvalidNamespace("the namespace is empty; pass at least one label, like 'memories'")
    if len(path) > MAX_KEY:
        raise InvalidNamespace(
            f"the namespace is {len(path)} bytes long; at most {MAX_KEY} bytes are allowed, so "
            "shorten it"
        )
    if path.startswith(_RESERVED_PATH):
        raise InvalidNamespace(
            f"the namespace {tuple(namespace)!r} begins with {RESERVED!r}, which is reserved for "
            "langgraph; use another first label"
        )
    return path


def check_namespace_prefix_and_build_path(prefix: Any) -> bytes:
    """Validate a namespace prefix and return its path. The empty prefix means all namespaces.

    Raises:
        InvalidNamespace: The prefix is not a sequence of non-empty strings, or is too long.
    """
    if isinstance(prefix, str | bytes) or not isinstance(prefix, Sequence):
        raise InvalidNamespace(
            f"the namespace is {prefix!r}; expected a tuple of strings, like ('memories', 'alice')"
        )
    text = ""
    for label in prefix:
        if not isinstance(label, str) or not label or "\0" in label:
            raise InvalidNamespace(
                f"the namespace {tuple(prefix)!r} has the label {label!r}; "
                "expected non-empty text without NUL characters"
            )
        text += f"{label}\0"
    return _encode_as_utf8_and_check_length("namespace", tuple(prefix), text)


def check_item_key(key: Any) -> str:
    """Validate an item's key, and return it as a string.

    Integers and UUIDs are converted to strings, as in langgraph.

    Raises:
        InvalidNamespace: The key is of another type, is empty, too long or not Unicode text, or
            contains a NUL character.
    """
    if type(key) is str and 0 < len(key) <= MAX_KEY and key.isascii() and "\0" not in key:
        return key
    if isinstance(key, bool) or not isinstance(key, str | int | UUID):
        raise InvalidNamespace(f"the key is {key!r}; expected a string, an integer or a UUID")
    text = str.__str__(key) if isinstance(key, str) else str(key)
    if not text or "\0" in text:
        raise InvalidNamespace(
            f"the key is {text!r}; expected non-empty text without NUL characters"
        )
    _encode_as_utf8_and_check_length("key", text, text)
    return text


def _encode_as_utf8_and_check_length(value_kind: str, value: object, text: str) -> bytes:
    """Encode text as UTF-8, and check that it is not too long.

    Args:
        value_kind: The kind of value in error messages, "namespace" or "key".
        value: The value in error messages.
        text: The text to encode.
    """
    try:
        path = text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidNamespace(
            f"the {value_kind} {value!r} is not valid Unicode ({exc.reason}); remove the lone "
            "surrogate"
        ) from exc
    if len(path) > MAX_KEY:
        raise InvalidNamespace(
            f"the {value_kind} {str(value)[:60]!r}… is {len(path)} bytes long; at most {MAX_KEY} "
            "bytes are allowed, so shorten it"
        )
    return path


def decode_namespace_path(path: bytes) -> tuple[str, ...]:
    r"""Decode a path into the labels of its namespace.

    >>> decode_namespace_path(b"users\0alice\0")
    ('users', 'alice')
    """
    try:
        return tuple(path.decode().split("\0")[:-1])
    except UnicodeDecodeError as exc:
        raise CorruptRecord(
            f"the database is damaged: the stored namespace path {path[:80]!r} is not valid UTF-8 "
            f"({exc}); restore the database from a backup"
        ) from exc


def encode_namespace_path(namespace: Iterable[str]) -> bytes:
    r"""Encode a validated namespace as a path.

    >>> encode_namespace_path(("users", "alice"))
    b'users\x00alice\x00'
    """
    return "".join(f"{label}\0" for label in namespace).encode()


def prefix_range(prefix: bytes) -> tuple[bytes, bytes]:
    r"""Return the start and the exclusive end of the range of paths that begin with `prefix`.

    >>> prefix_range(b"users\0")
    (b'users\x00', b'users\x01')
    """
    return (prefix, prefix[:-1] + b"\1") if prefix else EVERY_PATH


def split_range_around_prefixes(
    start: bytes, stop: bytes, prefixes: Iterable[bytes]
) -> list[tuple[bytes, bytes]]:
    r"""Split a range of paths into the ranges between the paths that begin with some prefixes.

    >>> split_range_around_prefixes(*EVERY_PATH, [b"b\0"])
    [(b'', b'b\x00'), (b'b\x01', b'\xff')]
    """
    ranges = []
    for excluded_start, excluded_stop in sorted(map(prefix_range, prefixes)):
        if start < excluded_stop and excluded_start < stop:
            ranges.append((start, max(start, excluded_start)))
            start = min(stop, excluded_stop)
    return [*ranges, (start, stop)]


def matches_conditions(conditions: Iterable[MatchCondition], namespace: Sequence[str]) -> bool:
    """Return whether a namespace meets every condition of a `list_namespaces` call.

    In a `list_namespaces` condition, `"*"` matches any single label.
    """
    return all(_matches_condition(condition, namespace) for condition in conditions)


def _matches_condition(condition: MatchCondition, namespace: Sequence[str]) -> bool:
    """Return whether a namespace starts or ends with the labels in `condition.path`."""
    pattern: Sequence[str] = condition.path
    if condition.match_type == "suffix":
        pattern, namespace = pattern[::-1], namespace[::-1]
    pairs = zip(pattern, namespace, strict=False)
    return len(pattern) <= len(namespace) and all(
        label_pattern in ("*", label) for label_pattern, label in pairs
    )


def check_match_condition(condition: MatchCondition) -> None:
    """Validate one match condition of `list_namespaces`.

    Raises:
        InvalidNamespace: The match type is unknown, or the path is not valid.
    """
    if condition.match_type not in ("prefix", "suffix"):
        raise InvalidNamespace(
            f"the match_type of a condition is {condition.match_type!r}; expected 'prefix' or "
            "'suffix'"
        )
    check_namespace_prefix_and_build_path(condition.path)


def is_literal_prefix(condition: MatchCondition) -> bool:
    """Return whether a condition gives the first labels of namespaces, without a `"*"`."""
    return condition.match_type == "prefix" and "*" not in condition.path


def find_literal_prefix(conditions: Iterable[MatchCondition]) -> bytes:
    """Return the longest path prefix that every namespace must have to match the conditions."""
    longest = b""
    for condition in conditions:
        if condition.match_type == "prefix":
            path = tuple(condition.path)
            literal = path[: path.index("*")] if "*" in path else path
            longest = max(longest, check_namespace_prefix_and_build_path(literal), key=len)
    return longest
