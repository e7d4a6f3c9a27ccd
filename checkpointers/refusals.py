"""Refusing values: which part of one cannot be stored, and which types may not be rebuilt."""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable
from typing import Any

from langgraph.checkpoint.serde.event_hooks import SerdeEvent, register_serde_event_listener
from langgraph.types import Send
from pydantic import BaseModel

from perdure.checkpointers.extensions import TooDeep, TypeNotAllowed
from perdure.checkpointers.objects import attributes_of, kind_of, private_of
from perdure.errors import ForbiddenType, SerializationError, Unstorable

_MAX_STEPS = 20  # of a path; each takes a trial of all parts on the way


def refusal(
    pack: Callable[[Any], object], value: Any, path: str, error: Exception
) -> SerializationError:
    """The error that names the innermost part of a value for which `pack` raises."""
    where, part, reason = _culprit(pack, value, path, error)
    if isinstance(reason, TypeNotAllowed):
        return forbidden(reason.name, where)
    if isinstance(reason, TooDeep):
        return Unstorable(
            f"{path} cannot be stored: from {where} on, {reason}. Flatten it, or store it as text"
        )
    shown = f"a {type(part).__qualname__} ({reprlib.repr(part)[:80]})"
    return Unstorable(
        f"{where} is {shown}, which cannot be stored: {reason}. Keep plain data, messages, "
        "pydantic models, dataclasses, enums or named tuples in the state"
    )


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, Send):
        return [(".arg", value.arg)]
    cls: Any = type(value)
    if kind_of(cls) not in (None, "enum"):
        parts = attributes_of(value)
        if isinstance(value, BaseModel):
            parts |= private_of(value)
        return [(f".{name}", part) for name, part in parts.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    return []


def _culprit(
    pack: Callable[[Any], object], value: Any, path: str, error: Exception, steps: int = 0
) -> tuple[str, Any, Exception]:
    """The innermost part of a value that is refused by itself."""
    for step, part in _parts(value) if steps < _MAX_STEPS else []:
        try:
            pack(part)
        except Exception as exc:
            return _culprit(pack, part, path + step, exc, steps + 1)
    return path, value, error


# -- the strict allowlist: langgraph's serializer reports a refused type only as an event

_refused = threading.local()


def _note_refusal(event: SerdeEvent) -> None:
    names = getattr(_refused, "names", None)
    if names is not None and event["kind"] in ("msgpack_blocked", "msgpack_method_blocked"):
        names.append((event["module"], event["name"]))


register_serde_event_listener(_note_refusal)


class Blocked(list[tuple[str, str]]):
    """Collects the types that the serializer refuses in this thread while it is entered."""

    def __enter__(self) -> Blocked:
        _refused.names = self
        return self

    def __exit__(self, *exc: object) -> None:
        _refused.names = None


def forbidden(name: tuple[str, str], where: str) -> ForbiddenType:
    """The error that names a refused type, and how to allow it."""
    module, cls = name
    return ForbiddenType(
        f"{where} holds a {module}.{cls}, which is not on the allowlist of types that may be "
        f"rebuilt from a database; if you trust it, open the checkpointer with "
        f"allow=[({module!r}, {cls!r})] (or allow=[{cls}])"
    )
