"""Documents of profiles: schema, JSON Patch (RFC 6902), JSON Merge Patch (RFC 7386), values.

What is wrong, or does not fit the document or its schema, raises `InvalidPatch`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import jsonpatch
from jsonpatch import (
    InvalidJsonPatch,
    JsonPatchConflict,
    JsonPatchException,
    JsonPointer,
    JsonPointerException,
)
from pydantic import BaseModel, ValidationError

from perdure.errors import InvalidPatch, InvalidValue
from perdure.memory.quotation import quoted
from perdure.stores.values import decode, encode

M = TypeVar("M", bound=BaseModel)
Document = dict[str, Any]
MAX_BYTES: Final = 100_000  # of the JSON of a profile
MAX_OPERATIONS: Final = 100  # of a patch
_DEEPEST: Final = 200  # parts of a path; a schema allows fewer


def operations_of(patch: Any) -> list[Document]:
    """A copy of the operations of a patch, checked."""
    if not isinstance(patch, list | tuple) or len(patch) > MAX_OPERATIONS:
        raise InvalidPatch(
            f"the patch is a {type(patch).__name__}; expected a list of at most {MAX_OPERATIONS} "
            'operations, like [{"op": "replace", "path": "/home/city", "value": "Ghent"}]'
        )
    operations: list[Document] = plain(list(patch), "the patch")
    for number, each in enumerate(operations, 1):
        try:
            jsonpatch.JsonPatch([each])
            paths = [JsonPointer(each[name]) for name in ("path", "from") if name in each]
            if max(len(path.parts) for path in paths) > _DEEPEST:
                raise InvalidPatch(f"its path has more than {_DEEPEST} parts")
        except (InvalidPatch, JsonPatchException, JsonPointerException, TypeError) as exc:
            raise InvalidPatch(f"operation {number} is none of a JSON Patch: {exc}") from exc
        if not paths[0].parts and each["op"] != "test":
            raise InvalidPatch(f"operation {number} has the path of all; name what changes in it")
    return operations


def patched(
    document: Document, operations: Sequence[Document], *, by_model: bool = False
) -> Document:
    """The document after a patch; the given one stays as it is.

    With `by_model`, an object that lacks fields of the one that it replaces is refused: a model
    seldom means to remove them.
    """
    out: Document = plain(document, "the profile")
    for number, operation in enumerate(operations, 1):
        before = out
        try:
            # checked after each: several copies may double the size each time
            out = plain(jsonpatch.JsonPatch([operation]).apply(before), "the profile")
            if by_model and operation["op"] != "remove":
                _check_kept(before, out, operation.get("from"))
        except (InvalidPatch, JsonPatchException, JsonPointerException) as exc:
            # the library's other messages quote the document
            quotable = isinstance(exc, InvalidPatch | InvalidJsonPatch | JsonPatchConflict)
            fault = str(exc) if quotable else "it does not fit the document"
            what = f"operation {number}, {operation['op']} {operation['path']!r:.200}"
            raise InvalidPatch(f"{what}: {fault}") from exc
    return out


def _check_kept(before: Document, after: Document, moved: str | None) -> None:
    lacking = (at for at, part in missing(before, after) if part not in (None, "", [], {}))
    if lost := [repr(at) for at in lacking if at != moved]:
        raise InvalidPatch(
            f"the new object lacks {', '.join(lost[:5])}, which would be lost; change only the "
            "fields that change, or remove each by its own path"
        )


def missing(previous: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The paths and values that a new document lacks; lists are compared if they are as long."""
    if isinstance(previous, dict) and isinstance(new, dict):
        for name, part in previous.items():
            at = f"{path}/{escaped(name)}"
            yield from missing(part, new[name], at) if name in new else [(at, part)]
    elif isinstance(previous, list) and isinstance(new, list) and len(previous) == len(new):
        for number, part in enumerate(previous):
            yield from missing(part, new[number], f"{path}/{number}")


def is_as_seen(operations: Sequence[Document], seen: Document, now: Document) -> bool:
    """Whether all fields that a patch concerns are as they were when it was made."""
    paths = [each[member] for each in operations for member in ("path", "from") if member in each]
    if "" in paths:
        return same(seen, now)
    names = {JsonPointer(path).parts[0] for path in paths}
    return same(*({name: each[name] for name in names & each.keys()} for each in (seen, now)))


def merged(document: Document, partial: Any) -> Document:
    """The document after a merge: named fields change, a null removes a field."""
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


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
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


class Leaf(NamedTuple):
    """A value of a document that contains no other, with the names and indices that lead to it."""

    path: tuple[str | int, ...]
    value: Any

    @property
    def label(self) -> str:
        """The names before the value: `4711` is no secret by itself, and `pin: 4711` is one."""
        names = (part for part in self.path if isinstance(part, str))
        return f"{' '.join(names).replace('_', ' ')}: "

    @property
    def text(self) -> str:
        """The value as text."""
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        return "" if self.value in (None, [], {}) else str(self.value)


def leaves_of(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[Leaf]:
    """The leaves of a document, empty lists and objects among them."""
    if isinstance(value, dict | list) and value:
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves_of(part, (*path, name))
    else:
        yield Leaf(path, value)


def replaced(document: Document, leaves: Sequence[Leaf], values: Sequence[Any]) -> Document:
    """A copy of a document with other values in some leaves."""
    out: Document = plain(document, "the profile")
    for leaf, value in zip(leaves, values, strict=True):
        within: Any = out
        for part in leaf.path[:-1]:
            within = within[part]
        if leaf.path:
            within[leaf.path[-1]] = value
    return out


def text_of(document: Document) -> str:
    """A document as text for search, a line a field: `likes: tea, figs`."""
    lines: dict[str, list[str]] = {}
    for leaf in leaves_of(document):
        if leaf.text:
            lines.setdefault(leaf.label, []).append(leaf.text)
    return "\n".join(label + ", ".join(texts) for label, texts in lines.items())


# -- the schema


def dumped(profile: BaseModel) -> Document:
    """The document of a profile."""
    return profile.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)


def validated(schema: type[M], document: Document) -> M:
    """The profile of a document: strictly, no text for a number and no unknown field."""
    try:
        profile = schema.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as exc:
        faults = [_fault(each) for each in exc.errors(include_url=False, include_context=False)]
    except Exception as exc:  # whatever a validator of the user's raises
        fault = f"a validator of {schema.__name__} raised {type(exc).__name__}: {exc!s:.300}"
        raise InvalidPatch(fault) from exc
    else:
        unknown = missing(document, dumped(profile))
        faults = [f"{path!r:.200} is an unknown field" for path, _ in unknown]
        if not faults:
            return profile
    raise InvalidPatch(f"not as {schema.__name__} asks for: {'; '.join(faults)[:800]}")


def _fault(fault: Any) -> str:
    path = "".join(f"/{escaped(str(part))}" for part in fault["loc"]) or "the profile"
    given = "" if fault["type"] == "missing" else f" (it is {quoted(fault['input'])[:80]})"
    return f"{path!r}: {fault['msg']}{given}"
