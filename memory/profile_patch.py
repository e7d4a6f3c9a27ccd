"""JSON Patch (RFC 6902) and JSON Merge Patch (RFC 7386) of documents.

The library jsonpatch applies the operations. An error says what the document has in the place of
one that cannot be applied, because a model has to mend its patch by that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jsonpatch
from jsonpatch import JsonPointer, JsonPointerException

from perdure.errors import InvalidPatch, InvalidValue
from perdure.memory.quoting import quoted
from perdure.stores.values import decode, encode

Document = dict[str, Any]
MAX_BYTES: Final = 100_000
"""How many bytes the JSON of a profile may take."""
MAX_OPERATIONS: Final = 100
"""How many operations a patch may have."""
_OPS: Final = ("add", "remove", "replace", "move", "copy", "test")
_REASON_CHARS: Final = 300
_SHOWN: Final = 80  # characters of a value in a message
_NOTHING: Final = object()


def operations_of(patch: Any) -> list[Document]:
    """The operations of a patch, checked and copied; members that RFC 6902 has not are left out.

    A `"reason"` is kept.

    Raises:
        InvalidPatch: It is no patch.
    """
    if not isinstance(patch, list | tuple):
        raise InvalidPatch(
            f"the patch is {patch!r:.80}, a {type(patch).__name__}; expected a list of operations, "
            'like [{"op": "replace", "path": "/home/city", "value": "Ghent"}]'
        )
    if len(patch) > MAX_OPERATIONS:
        raise InvalidPatch(
            f"the patch has {len(patch)} operations; at most {MAX_OPERATIONS} are allowed"
        )
    return [_operation(number, each) for number, each in enumerate(patch, 1)]


def _operation(number: int, given: Any) -> Document:
    if not isinstance(given, Mapping):
        raise InvalidPatch(
            f"operation {number} is {given!r:.80}; expected an object with 'op' and 'path'"
        )
    op = given.get("op")
    if op not in _OPS:
        raise InvalidPatch(
            f"operation {number} has the op {op!r:.80}; expected one of {', '.join(map(repr, _OPS))}"
        )
    out = {"op": op}
    for member in ("path", "from") if op in ("move", "copy") else ("path",):
        out[member] = given.get(member)
        try:
            tokens_of(out[member])
        except InvalidPatch as exc:
            raise InvalidPatch(f"operation {number}, {op}, has a wrong {member!r}: {exc}") from exc
    if op in ("add", "replace", "test"):
        if "value" not in given:
            raise InvalidPatch(f"operation {number}, {op} {out['path']!r:.200}, has no 'value'")
        out["value"] = plain(given["value"], f"the value of operation {number}")
    if isinstance(given.get("reason"), str) and given["reason"]:
        out["reason"] = given["reason"][:_REASON_CHARS]
    return out


def patched(
    document: Document, operations: Sequence[Document], *, by_model: bool = False
) -> Document:
    """The document that a patch makes of another, which stays as it is.

    Args:
        document: The previous document.
        operations: As of `operations_of`; all are applied, in order.
        by_model: Whether a model wrote the patch. Then missing parents are made, a replacement of
            nothing is an addition, and an object with fewer fields than the one in its place is
            refused: the model has seldom meant to remove them.

    Raises:
        InvalidPatch: An operation cannot be applied, or the document becomes too large.
    """
    out: Document = plain(document, "the profile")
    for number, operation in enumerate(operations, 1):
        try:
            if not operation["path"] and operation["op"] != "test":
                raise InvalidPatch(
                    "this is the path of the whole profile; name the fields that change"
                )
            steps = _completed(out, operation) if by_model else [operation]
            for step in steps:
                jsonpatch.JsonPatch([step]).apply(out, in_place=True)
            check_size(out)  # at once: some copies in a row would double it each time
        except (InvalidPatch, jsonpatch.JsonPatchException, JsonPointerException) as exc:
            why = "there is no such place" if isinstance(exc, JsonPointerException) else str(exc)
            what = f"operation {number}, {operation['op']} {operation['path']!r:.200}"
            raise InvalidPatch(f"{what}: {why:.200}{_present(out, operation)}") from exc
    return out


def _completed(document: Document, operation: Document) -> Iterator[Document]:
    """A model's operation after those that make its place; each has to be applied at once."""
    op, tokens = operation["op"], tokens_of(operation["path"])
    if op in ("remove", "test"):
        yield operation
        return
    at, within = "", document
    for token, following in zip(tokens, tokens[1:], strict=False):
        at += f"/{escaped(token)}"
        if isinstance(within, dict) and within.get(token) is None:
            yield {"op": "add", "path": at, "value": [] if following in ("-", "0") else {}}
        within = JsonPointer(at).resolve(document)
    origin = operation.get("from")
    value = operation.get("value") if origin is None else JsonPointer(origin).resolve(document)
    if isinstance(within, dict) or op == "replace":
        previous = JsonPointer(operation["path"]).resolve(document, None)
        lost = list(_lost(previous, value, operation["path"]))
        if lost:
            raise InvalidPatch(
                f"the new object lacks {', '.join(map(repr, lost[:5]))}, which would be lost; "
                "change only the fields that change, or remove each by its own path"
            )
    is_new = op == "replace" and isinstance(within, dict) and tokens[-1] not in within
    yield {**operation, "op": "add"} if is_new else operation


def _lost(previous: Any, value: Any, path: str) -> Iterator[str]:
    """The paths of what an object holds, and the one in its place does not."""
    if not isinstance(previous, dict) or not isinstance(value, dict):
        return
    for name, part in previous.items():
        at = f"{path}/{escaped(name)}"
        if name in value:
            yield from _lost(part, value[name], at)
        elif part not in (None, "", [], {}):
            yield at


def _present(document: Any, operation: Document) -> str:
    """What a document has at the places of an operation that cannot be applied."""
    told = ""
    for path in (operation[member] for member in ("from", "path") if member in operation):
        at, within = "", document
        for token in tokens_of(path):
            there = JsonPointer(f"/{escaped(token)}").resolve(within, _NOTHING)
            if there is _NOTHING or (token == "-" and isinstance(within, list)):
                names = isinstance(within, dict) and ", ".join(map(repr, list(within)[:20]))
                has = f"has {names}" if names else f"is {quoted(within)[:_SHOWN]}"
                return f"{told}; {repr(at) if at else 'the profile'} {has}"
            at, within = f"{at}/{escaped(token)}", there
        told += f"; {path!r:.200} is {quoted(within)[:_SHOWN]}"
    return told


def is_as_seen(operations: Sequence[Document], seen: Document, now: Document) -> bool:
    """Whether all fields that a patch reads or changes are as they were when it was made."""
    paths = [each[member] for each in operations for member in ("path", "from") if member in each]
    names = {(tokens_of(path) or [""])[0] for path in paths}
    if "" in names:
        return same(seen, now)
    return all(
        (name in seen) == (name in now) and same(seen.get(name), now.get(name)) for name in names
    )


def merged(document: Document, partial: Any) -> Document:
    """The document that a merge makes of another: named fields change, a null removes one.

    >>> merged({"name": "Ann", "home": {"city": "Ghent"}}, {"home": {"zip": "9000"}})
    {'name': 'Ann', 'home': {'city': 'Ghent', 'zip': '9000'}}

    Raises:
        InvalidPatch: `partial` is no JSON object.
    """
    if not isinstance(partial, Mapping):
        raise InvalidPatch(
            f"the merge is {partial!r:.80}, a {type(partial).__name__}; expected a dict of the "
            "fields that change"
        )
    return _merged(document, plain(dict(partial), "the merge"))  # type: ignore[no-any-return]


def _merged(target: Any, partial: Any) -> Any:
    if not isinstance(partial, dict):
        return partial
    out = dict(target) if isinstance(target, dict) else {}
    for name, value in partial.items():
        if value is None:
            out.pop(name, None)
        else:
            out[name] = _merged(out.get(name), value)
    return out


def differences(previous: Any, new: Any, path: str = "") -> Iterator[dict[str, str]]:
    """What differs in two documents, as operations without their values; a list is one value."""
    if not (isinstance(previous, dict) and isinstance(new, dict)):
        if not same(previous, new):
            yield {"op": "replace", "path": path}
        return
    for name in {**previous, **new}:
        at = f"{path}/{escaped(name)}"
        if name in previous and name in new:
            yield from differences(previous[name], new[name], at)
        else:
            yield {"op": "add" if name in new else "remove", "path": at}


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1 is 1.0, and neither is true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def plain(value: Any, what: str) -> Any:
    """A copy of a JSON value.

    Raises:
        InvalidPatch: It is none, or one that no store takes.
    """
    return decode(_encoded(value, what))["document"]


def check_size(document: Document) -> None:
    """Refuse a document that is too large, or too deep for a store.

    Raises:
        InvalidPatch: It is.
    """
    size = len(_encoded(document, "the profile").encode()) - len('{"document":}')
    if size > MAX_BYTES:
        raise InvalidPatch(
            f"the profile would take {size:,} bytes as JSON; at most {MAX_BYTES:,} are allowed"
        )


def _encoded(value: Any, what: str) -> str:
    try:
        return encode({"document": value})
    except InvalidValue as exc:
        raise InvalidPatch(f"{what} is no JSON that a store takes: {exc}") from exc


def tokens_of(pointer: Any) -> list[str]:
    """The names and indices in a JSON pointer (RFC 6901).

    >>> tokens_of("/home/a~1b/0")
    ['home', 'a/b', '0']

    Raises:
        InvalidPatch: It is no JSON pointer.
    """
    try:
        return list(JsonPointer(pointer).parts)
    except (JsonPointerException, TypeError) as exc:
        raise InvalidPatch(
            f"{pointer!r:.200} is no JSON pointer; expected one like '/home/city', in whose names "
            f"'~' is written '~0' and '/' '~1' ({exc!s:.80})"
        ) from exc


def escaped(name: str) -> str:
    """A name as it is written in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
