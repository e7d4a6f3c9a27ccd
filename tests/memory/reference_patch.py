"""An independent implementation of the operations add, replace and remove of RFC 6902."""

from __future__ import annotations

import copy
from typing import Any


class NotApplicable(Exception):
    """The patch cannot be applied."""


def apply_reference_patch(document: Any, operations: list[dict[str, Any]]) -> Any:
    """Return the patched document. Operations on the whole document are not applicable."""
    patched = copy.deepcopy(document)
    for operation in operations:
        *parents, last = _parse_pointer(operation["path"])
        container = patched
        for name in parents:
            container = _get_child(container, name)
        _apply_operation(container, last, operation["op"], copy.deepcopy(operation.get("value")))
    return patched


def _parse_pointer(pointer: str) -> list[str]:
    if not pointer:
        raise NotApplicable
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")][1:]


def _get_child(container: Any, name: str) -> Any:
    match container:
        case dict() if name in container:
            return container[name]
        case list() if name in _valid_indices(len(container)):
            return container[int(name)]
    raise NotApplicable


def _apply_operation(container: Any, name: str, op: str, value: Any) -> None:
    match container, op:
        case dict(), "add":
            container[name] = value
        case dict(), "replace" if name in container:
            container[name] = value
        case dict(), "remove" if name in container:
            del container[name]
        case list(), "add" if name == "-":
            container.append(value)
        case list(), "add" if name in _valid_indices(len(container) + 1):
            container.insert(int(name), value)
        case list(), "replace" if name in _valid_indices(len(container)):
            container[int(name)] = value
        case list(), "remove" if name in _valid_indices(len(container)):
            del container[int(name)]
        case _:
            raise NotApplicable


def _valid_indices(count: int) -> set[str]:
    return {str(number) for number in range(count)}
