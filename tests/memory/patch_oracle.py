"""An implementation of RFC 6902 that shares nothing with perdure's: add, replace and remove."""

from __future__ import annotations

import copy
from typing import Any


class NotApplicable(Exception):
    """The patch cannot be applied."""


def oracle(document: Any, operations: list[dict[str, Any]]) -> Any:
    """What becomes of a document; operations on the whole of it are not applicable."""
    out = copy.deepcopy(document)
    for operation in operations:
        *parents, last = _path(operation["path"])
        container = out
        for name in parents:
            container = _child(container, name)
        _change(container, last, operation["op"], copy.deepcopy(operation.get("value")))
    return out


def _path(pointer: str) -> list[str]:
    if not pointer:
        raise NotApplicable
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")][1:]


def _child(container: Any, name: str) -> Any:
    match container:
        case dict() if name in container:
            return container[name]
        case list() if name in _indices(len(container)):
            return container[int(name)]
    raise NotApplicable


def _change(container: Any, name: str, op: str, value: Any) -> None:
    match container, op:
        case dict(), "add":
            container[name] = value
        case dict(), "replace" if name in container:
            container[name] = value
        case dict(), "remove" if name in container:
            del container[name]
        case list(), "add" if name == "-":
            container.append(value)
        case list(), "add" if name in _indices(len(container) + 1):
            container.insert(int(name), value)
        case list(), "replace" if name in _indices(len(container)):
            container[int(name)] = value
        case list(), "remove" if name in _indices(len(container)):
            del container[int(name)]
        case _:
            raise NotApplicable


def _indices(count: int) -> set[str]:
    return {str(number) for number in range(count)}
