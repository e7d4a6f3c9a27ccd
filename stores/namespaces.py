"""Namespaces: checks, and an encoding in which a prefix is a range.

A path is its labels in UTF-8, each followed by a NUL byte. No label holds one, so paths sort as
tuples of labels do, and everything under a prefix lies between two byte strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from langgraph.store.base import MatchCondition

from perdure.errors import CorruptRecord, InvalidNamespace

RESERVED = "langgraph"  # langgraph keeps its own documents under this root
MAX_KEY = 4096  # bytes of a key or of a whole path
_RESERVED_PATH = f"{RESERVED}\0".encode()
EVERY_PATH = (b"", b"\xff")  # UTF-8 has no byte 0xff


def check_namespace(namespace: Any, root: bytes = b"") -> bytes:
    """The path of a namespace under a root that items may be put in."""
    path = root + check_prefix(namespace)
    if not path:
        raise InvalidNamespace("the namespace is empty; give at least one label, like memories")
    if len(path) > MAX_KEY:
        raise InvalidNamespace(f"the namespace takes {len(path)} bytes; at most {MAX_KEY} may be")
    if path.startswith(_RESERVED_PATH):
        raise InvalidNamespace(
            f"the namespace {tuple(namespace)!r} begins with {RESERVED!r}, which langgraph keeps "
            "for itself; begin with another label"
        )
    return path


def check_prefix(prefix: Any) -> bytes:
    """The path of a prefix; the empty one stands for everything."""
    if isinstance(prefix, str | bytes) or not isinstance(prefix, Sequence):
        raise InvalidNamespace(
            f"the namespace is {prefix!r}; expected a tuple of strings, like ('memories', 'alice')"
        )
    for label in prefix:
        if not isinstance(label, str) or not label or "\0" in label:
            raise InvalidNamespace(
                f"the namespace {tuple(prefix)!r} has the label {label!r}; "
                "expected non-empty text without NUL characters"
            )
    return _encode_text("namespace", tuple(prefix), "".join(f"{label}\0" for label in prefix))


def check_key(key: Any) -> str:
    """A key that items may have. Integers and UUIDs are taken as their text, as langgraph does."""
    if type(key) is str and 0 < len(key) <= MAX_KEY and key.isascii() and "\0" not in key:
        return key
    if isinstance(key, bool) or not isinstance(key, str | int | UUID):
        raise InvalidNamespace(f"the key is {key!r}; expected text")
    text = str.__str__(key) if isinstance(key, str) else str(key)
    if not text or "\0" in text:
        raise InvalidNamespace(f"the key is {text!r}; expected non-empty text without NUL")
    _encode_text("key", text, text)
    return text


def _encode_text(kind: str, value: object, text: str) -> bytes:
    try:
        path = text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidNamespace(
            f"the {kind} {value!r} is no Unicode text ({exc.reason}); remove the lone surrogate"
        ) from exc
    if len(path) > MAX_KEY:
        raise InvalidNamespace(
            f"the {kind} {str(value)[:60]!r}… takes {len(path)} bytes; at most {MAX_KEY} may be"
        )
    return path


def decode_path(path: bytes) -> tuple[str, ...]:
    r"""The namespace of a path.

    >>> decode_path(b"users\0alice\0")
    ('users', 'alice')
    """
    try:
        return tuple(path.decode().split("\0")[:-1])
    except UnicodeDecodeError as exc:
        raise CorruptRecord(f"the path {path[:80]!r} of a namespace is damaged: {exc}") from exc


def encode_path(namespace: Iterable[str]) -> bytes:
    r"""The path of a namespace that was checked.

    >>> encode_path(("users", "alice"))
    b'users\x00alice\x00'
    """
    return "".join(f"{label}\0" for label in namespace).encode()


def prefix_range(prefix: bytes) -> tuple[bytes, bytes]:
    r"""The half-open range of paths under a prefix.

    >>> prefix_range(b"users\0")
    (b'users\x00', b'users\x01')
    """
    return (prefix, prefix[:-1] + b"\1") if prefix else EVERY_PATH


def matches_conditions(conditions: Iterable[MatchCondition], namespace: Sequence[str]) -> bool:
    """Whether a namespace meets all conditions; `"*"` in a condition matches any one label."""
    return all(_matches_condition(condition, namespace) for condition in conditions)


def _matches_condition(condition: MatchCondition, namespace: Sequence[str]) -> bool:
    pattern: Sequence[str] = condition.path
    if condition.match_type == "suffix":
        pattern, namespace = pattern[::-1], namespace[::-1]
    pairs = zip(pattern, namespace, strict=False)
    return len(pattern) <= len(namespace) and all(want in ("*", label) for want, label in pairs)


def check_condition(condition: MatchCondition) -> None:
    """Check a condition of `list_namespaces`."""
    if condition.match_type not in ("prefix", "suffix"):
        raise InvalidNamespace(
            f"match_type is {condition.match_type!r}; expected 'prefix' or 'suffix'"
        )
    check_prefix(condition.path)


def literal_prefix(conditions: Iterable[MatchCondition]) -> bytes:
    """The path that every namespace meeting the conditions begins with."""
    longest = b""
    for condition in conditions:
        if condition.match_type == "prefix":
            path = tuple(condition.path)
            literal = path[: path.index("*")] if "*" in path else path
            longest = max(longest, check_prefix(literal), key=len)
    return longest
