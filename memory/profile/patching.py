"""Patches of a JSON document (RFC 6902): their form, and what becomes of a document by one.

https://www.rfc-editor.org/rfc/rfc6902. The library jsonpatch changes the copy; before each
operation it is looked at here whether it can be applied, since a model that is to mend its patch
has to be told what is there instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jsonpatch

from perdure.errors import InvalidPatch
from perdure.memory.profile.documents import (
    Document,
    Edit,
    check_size,
    escaped,
    index_of,
    plain,
    same,
    shown,
    tokens_of,
    value_at,
)

OPERATIONS: Final = ("add", "remove", "replace", "move", "copy", "test")
REASON_CHARS: Final = 300
"""How much of a reason is kept."""

_WITH_VALUE: Final = {"add", "replace", "test"}
_WITH_FROM: Final = {"move", "copy"}


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a patch.

    Attributes:
        number: Its place in the patch, from 1.
        op: One of `OPERATIONS`.
        path: Where, as a JSON pointer.
        origin: Where from, of a move or copy.
        value: What is added or tested.
        reason: Why, if that was said.
    """

    number: int
    op: str
    path: str
    origin: str = ""
    value: Any = None
    reason: str = ""

    @property
    def edit(self) -> Edit:
        """What it does."""
        return Edit(self.op, self.path, self.reason)

    @property
    def sections(self) -> set[str]:
        """The fields of the document that it reads or changes; `""` stands for all of it."""
        pointers = [self.path, self.origin] if self.op in _WITH_FROM else [self.path]
        return {(tokens_of(pointer) or [""])[0] for pointer in pointers}


def operations_of(patch: Any, most: int) -> tuple[Operation, ...]:
    """The operations of a patch, as JSON and apart from what was given.

    Args:
        patch: A list of mappings; members that RFC 6902 does not know are passed over, but for
            `"reason"`.
        most: How many there may be.

    Raises:
        InvalidPatch: It is something else.
    """
    if not isinstance(patch, list | tuple):
        raise InvalidPatch(
            f"the patch is {patch!r:.80}, a {type(patch).__name__}; expected a list of operations, "
            'like [{"op": "replace", "path": "/home/city", "value": "Ghent"}]'
        )
    if len(patch) > most:
        raise InvalidPatch(f"the patch has {len(patch)} operations; at most {most} are allowed")
    return tuple(_operation(number, each) for number, each in enumerate(patch, 1))


def is_as_seen(
    operations: Sequence[Operation], seen: Mapping[str, Any], now: Mapping[str, Any]
) -> bool:
    """Whether all that operations read or change is still as it was when they were made."""
    names = {name for each in operations for name in each.sections}
    if "" in names:
        return same(dict(seen), dict(now))
    return all((name in seen) == (name in now) for name in names) and same(
        {name: seen[name] for name in names if name in seen},
        {name: now[name] for name in names if name in now},
    )


def _operation(number: int, given: Any) -> Operation:
    if not isinstance(given, Mapping):
        raise InvalidPatch(
            f"operation {number} is {given!r:.80}; expected an object with 'op' and 'path'"
        )
    op = given.get("op")
    if not isinstance(op, str) or op not in OPERATIONS:
        listed = ", ".join(map(repr, OPERATIONS))
        raise InvalidPatch(f"operation {number} has the op {op!r:.80}; expected one of {listed}")
    needed = ["path", *(["from"] if op in _WITH_FROM else ())]
    for member in needed:
        if not isinstance(given.get(member), str):
            raise InvalidPatch(
                f"operation {number}, {op}, has the {member!r} {given.get(member)!r:.80}; expected "
                "a JSON pointer, like '/home/city'"
            )
        try:
            tokens_of(given[member])
        except InvalidPatch as exc:
            raise InvalidPatch(f"operation {number}, {op}: {exc}") from exc
    if op in _WITH_VALUE and "value" not in given:
        raise InvalidPatch(f"operation {number}, {op} {given['path']!r:.200}, has no 'value'")
    reason = given.get("reason")
    return Operation(
        number,
        op,
        given["path"],
        given["from"] if op in _WITH_FROM else "",
        plain(given["value"], f"the value of operation {number}") if op in _WITH_VALUE else None,
        reason[:REASON_CHARS] if isinstance(reason, str) else "",
    )


def patched(
    document: Document, operations: Sequence[Operation], *, max_bytes: int, keep_fields: bool
) -> Document:
    """What a document becomes by a patch; it stays as it is itself.

    Args:
        document: The former one.
        operations: Applied in order, all of them.
        max_bytes: Of the JSON of the new one.
        keep_fields: Whether to refuse an object in the place of one with more fields: what is not
            named in it would be lost, which the model that wrote the patch has seldom meant.

    Raises:
        InvalidPatch: An operation cannot be applied, a test fails, or it becomes too large.
    """
    changed: Document = plain(document, "the document")
    for operation in operations:
        try:
            for step in _elementary(operation, changed):
                former = _target(changed, step)
                if keep_fields:
                    _check_kept(step, former)
                _apply(changed, step)
            if operation.op == "copy":  # some of these in a row would double it each time
                check_size(changed, max_bytes)
        except (InvalidPatch, jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as exc:
            told = f"operation {operation.number}, {operation.op} {operation.path!r:.200}"
            raise InvalidPatch(f"{told}: {exc}") from exc
    check_size(changed, max_bytes)
    return changed


def _elementary(operation: Operation, document: Document) -> Iterator[Operation]:
    """The operation; of a move or copy, what it is made of."""
    if operation.op not in _WITH_FROM:
        yield operation
        return
    value = plain(value_at(document, operation.origin), "what is there")
    if operation.op == "move":
        if operation.path == operation.origin:
            return
        if f"{operation.path}/".startswith(f"{operation.origin}/"):
            raise InvalidPatch(f"{operation.origin!r:.200} cannot be moved into itself")
        yield Operation(operation.number, "remove", operation.origin)
    yield Operation(operation.number, "add", operation.path, value=value)


def _target(document: Document, step: Operation) -> Any:
    """What is replaced or removed; None: nothing is.

    Raises:
        InvalidPatch: The step cannot be applied.
    """
    if step.op == "test":
        found = value_at(document, step.path)
        if not same(found, step.value):
            raise InvalidPatch(f"it is {shown(found)}, not {shown(step.value)}")
        return None
    if not step.path:
        raise InvalidPatch("this is the path of the whole profile; name the fields that change")
    if step.op != "add":
        return value_at(document, step.path)
    parent, _, _ = step.path.rpartition("/")
    within, token = value_at(document, parent), tokens_of(step.path)[-1]
    if isinstance(within, list):
        if token != "-" and index_of(token, parent) > len(within):
            raise InvalidPatch(f"{parent!r} has {len(within)} elements")
        return None
    if not isinstance(within, dict):
        raise InvalidPatch(f"{parent!r} is {shown(within)}, which has no fields")
    return within.get(token)


def _apply(document: Document, step: Operation) -> None:
    operation = {"op": step.op, "path": step.path, "value": step.value}
    jsonpatch.JsonPatch([operation]).apply(document, in_place=True)


def _check_kept(step: Operation, former: Any) -> None:
    if step.op not in ("add", "replace"):
        return
    if not isinstance(former, dict) or not isinstance(step.value, dict):
        return
    lost = list(_dropped(former, step.value, step.path))
    if lost:
        raise InvalidPatch(
            f"the new object lacks {', '.join(map(repr, lost[:5]))}, which would be lost; change "
            "only the fields that change, or remove each by its own path"
        )


def _dropped(former: Document, value: Document, path: str) -> Iterator[str]:
    """The paths of what an object holds, and the one in its place does not."""
    for name, part in former.items():
        at = f"{path}/{escaped(name)}"
        if name not in value:
            if part not in (None, "", [], {}):
                yield at
        elif isinstance(part, dict) and isinstance(value[name], dict):
            yield from _dropped(part, value[name], at)
