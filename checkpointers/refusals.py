"""Refusing values: which part of one cannot be stored, and which types may not be rebuilt."""

from __future__ import annotations

import threading
from typing import Any

from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.event_hooks import SerdeEvent, register_serde_event_listener

from perdure.errors import ForbiddenType, Unstorable


def unstorable(serde: SerializerProtocol, value: Any, path: str, error: Exception) -> Unstorable:
    """The error that names the innermost part of a value that the serializer refuses."""
    where, part, reason = _culprit(serde, value, path, error)
    return Unstorable(
        f"{where} is {_shown(part)}, which cannot be stored: {reason}. "
        "Keep plain data, messages, pydantic models or dataclasses in the state"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return f"a {type(value).__qualname__} ({text if len(text) <= 80 else text[:77] + '...'})"


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    return [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]


def _culprit(
    serde: SerializerProtocol, value: Any, path: str, error: Exception, depth: int = 0
) -> tuple[str, Any, Exception]:
    """The innermost part of a value that the serializer refuses by itself."""
    for step, part in _parts(value) if depth < 20 else []:
        try:
            serde.dumps_typed(part)
        except Exception as exc:
            return _culprit(serde, part, path + step, exc, depth + 1)
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
