"""JSON Patch (RFC 6902) and JSON Merge Patch (RFC 7386) of documents.

What is no patch, cannot be applied or is no JSON that a store takes raises `InvalidPatch`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jsonpatch
from jsonpatch import JsonPatchConflict, JsonPatchException, JsonPointer, JsonPointerException

from perdure.errors import InvalidPatch, InvalidValue
from perdure.stores.values import decode, encode

Document = dict[str, Any]
MAX_BYTES: Final = 100_000  # of the JSON of a profile
MAX_OPERATIONS: Final = 100  # of a patch
_VALUE: Final = dict.fromkeys(("add", "replace", "test"), "value")
_NEEDED: Final = {**_VALUE, "move": "from", "copy": "from"}
_NOTHING: Final = object()


def operations_of(patch: Any) -> list[Document]:
    """A copy of the operations of a patch."""
    if not isinstance(patch, list | tuple) or len(patch) > MAX_OPERATIONS:
        raise InvalidPatch(
            f"the patch is a {type(patch).__name__}; expected a list of at most {MAX_OPERATIONS} "
            'operations, like [{"op": "replace", "path": "/home/city", "value": "Ghent"}]'
        )
    operations: list[Document] = plain(list(patch), "the patch")
    for number, each in enumerate(operations, 1):
        try:
            [op] = jsonpatch.JsonPatch([each])
            for needed in ("path", _NEEDED.get(op["op"], "path")):
                if needed not in each:
                    raise InvalidPatch(f"it has no {needed!r}")
            paths = [JsonPointer(each[name]) for name in ("path", "from") if name in each]
        except (InvalidPatch, JsonPatchException, JsonPointerException, TypeError) as exc:
            raise InvalidPatch(f"operation {number} is none of a JSON Patch: {exc}") from exc
        if not paths[0].parts and each["op"] != "test":
            raise InvalidPatch(f"operation {number} has the path of all; name what changes in it")
    return operations


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
    """
    out: Document = plain(document, "the profile")
    for number, operation in enumerate(operations, 1):
        try:
            for step in _completed(out, operation) if by_model else [operation]:
                jsonpatch.JsonPatch([step]).apply(out, in_place=True)
            plain(out, "the profile")  # at once: some copies in a row would double it each time
        except (InvalidPatch, JsonPatchException, JsonPointerException) as exc:
            paths = [operation[name] for name in ("from", "path") if name in operation]
            # what the library says of tests and pointers quotes the document
            told = (
                str(exc) if isinstance(exc, InvalidPatch | JsonPatchConflict) else "it does not fit"
            )
            why = "; ".join([told, *(_place(out, path) for path in paths)])
            what = f"operation {number}, {operation['op']} {operation['path']!r:.200}"
            raise InvalidPatch(f"{what}: {why}") from exc
    return out


def _place(document: Any, path: str) -> str:
    """What is on the way to a place, without the values."""
    at, within = "", document
    for token in JsonPointer(path).parts:
        found = JsonPointer(f"/{escaped(token)}").resolve(within, _NOTHING)
        if found is _NOTHING or not isinstance(found, dict | list):
            break
        at, within = f"{at}/{escaped(token)}", found
    names = ", ".join(map(repr, list(within)[:20])) if isinstance(within, dict) else ""
    where = repr(at) if at else "the profile"
    return f"{where:.200} has {names or f'{len(within)} elements'}"


def _completed(document: Document, operation: Document) -> Iterator[Document]:
    """A model's operation after those that make its place; each has to be applied at once."""
    op, path = operation["op"], operation["path"]
    if op in ("remove", "test"):
        yield operation
        return
    at, within, tokens = "", document, JsonPointer(path).parts
    for token, following in itertools.pairwise(tokens):
        at = f"{at}/{escaped(token)}"
        if isinstance(within, dict) and within.get(token) is None:
            yield {"op": "add", "path": at, "value": [] if following in ("-", "0") else {}}
        within = JsonPointer(at).resolve(document)
    origin = operation.get("from")
    value = operation.get("value") if origin is None else JsonPointer(origin).resolve(document)
    if isinstance(within, dict) or op == "replace":
        gone = missing(JsonPointer(path).resolve(document, None), value, path)
        lost = [at for at, part in gone if part not in (None, "", [], {})]
        if lost and isinstance(value, dict):
            raise InvalidPatch(
                f"the new object lacks {', '.join(map(repr, lost[:5]))}, which would be lost; "
                "change only the fields that change, or remove each by its own path"
            )
    is_new = op == "replace" and isinstance(within, dict) and tokens[-1] not in within
    yield {**operation, "op": "add"} if is_new else operation


def missing(previous: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The paths and values of what a document has and the new one lacks; lists as far as alike."""
    if isinstance(previous, dict) and isinstance(new, dict):
        for name, part in previous.items():
            at = f"{path}/{escaped(name)}"
            yield from missing(part, new[name], at) if name in new else [(at, part)]
    elif isinstance(previous, list) and isinstance(new, list) and len(previous) == len(new):
        for number, part in enumerate(previous):
            yield from missing(part, new[number], f"{path}/{number}")


def is_as_seen(operations: Sequence[Document], seen: Document, now: Document) -> bool:
    """Whether all fields that a patch reads or changes are as they were when it was made."""
    paths = [each[member] for each in operations for member in ("path", "from") if member in each]
    if "" in paths:
        return same(seen, now)
    names = {JsonPointer(path).parts[0] for path in paths}
    return same(*({name: each[name] for name in names & each.keys()} for each in (seen, now)))


def merged(document: Document, partial: Any) -> Document:
    """The document that a merge makes of another: named fields change, a null removes one.

    >>> merged({"name": "Ann", "home": {"city": "Ghent"}}, {"home": {"zip": "9000"}})
    {'name': 'Ann', 'home': {'city': 'Ghent', 'zip': '9000'}}
    """
    if not isinstance(partial, Mapping):
        raise InvalidPatch(f"the merge is {partial!r:.80}; expected a dict of fields that change")
    return _merged(document, plain(dict(partial), "the merge"))  # type: ignore[no-any-return]


def _merged(target: Any, partial: Any) -> Any:
    if not isinstance(partial, dict):
        return partial
    out = dict(target) if isinstance(target, dict) else {}
    for name, value in partial.items():
        out[name] = _merged(out.get(name), value)
    return {name: value for name, value in out.items() if partial.get(name, "") is not None}


def differences(previous: Any, new: Any, path: str = "") -> Iterator[dict[str, str]]:
    """What differs in two documents, as operations without values; a list is one value."""
    if not (isinstance(previous, dict) and isinstance(new, dict)):
        yield from [] if same(previous, new) else [{"op": "replace", "path": path}]
        return
    for name in {**previous, **new}:
        at = f"{path}/{escaped(name)}"
        if name in previous and name in new:
            yield from differences(previous[name], new[name], at)
        else:
            yield {"op": "add" if name in new else "remove", "path": at}


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are written alike: true is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def plain(value: Any, what: str) -> Any:
    """A copy of a JSON value."""
    try:
        text = encode({"document": value})
    except InvalidValue as exc:
        raise InvalidPatch(f"{what} is no JSON that a store takes: {exc}") from exc
    size = len(text.encode()) - len('{"document":}')
    if size > MAX_BYTES:
        raise InvalidPatch(f"{what} takes {size:,} bytes; at most {MAX_BYTES:,} are allowed")
    return decode(text)["document"]


def escaped(name: str) -> str:
    """A name as it is written in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
