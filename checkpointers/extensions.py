"""The msgpack extension types of values that are not plain data, and which are rebuilt.

The format is langgraph's (`langgraph.checkpoint.serde.jsonplus`): an extension holds `[module,
name, payload, ...]`. Names are qualified, models are stored by attribute, not by `model_dump()`,
and a tuple, a bytearray or a key of a dict within a plain data class stays what it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

Name = tuple[str, str]  # of a class: its module and qualified name

# langgraph's extension codes
SINGLE, POSITIONAL, KEYWORDS, METHOD, MODEL_V1, MODEL, ARRAY, SNAPSHOT = range(8)
# ours: an array that is to be a tuple, and the pairs of a dict with keys that msgpack has not
TUPLE, PAIRS = 64, 65

# the types that langgraph's serializer rebuilds in strict mode, by calling them, and pydantic's own
_KNOWN_NAMES: Final = {
    "datetime": "datetime date time timedelta timezone",
    "uuid": "UUID",
    "decimal": "Decimal",
    "builtins": "set frozenset bytearray",
    "collections": "deque",
    "ipaddress": "IPv4Address IPv4Interface IPv4Network IPv6Address IPv6Interface IPv6Network",
    "pathlib": "Path PosixPath WindowsPath",
    "pathlib._local": "Path PosixPath WindowsPath",
    "zoneinfo": "ZoneInfo",
    "re": "compile Pattern",
    "pydantic.types": "SecretStr SecretBytes",
    "pydantic.networks": "AnyUrl AnyHttpUrl HttpUrl FileUrl",
    "langchain_core.messages.base": "BaseMessage BaseMessageChunk",
    "langchain_core.messages.human": "HumanMessage HumanMessageChunk",
    "langchain_core.messages.ai": "AIMessage AIMessageChunk",
    "langchain_core.messages.system": "SystemMessage SystemMessageChunk",
    "langchain_core.messages.chat": "ChatMessage ChatMessageChunk",
    "langchain_core.messages.tool": "ToolMessage ToolMessageChunk",
    "langchain_core.messages.function": "FunctionMessage FunctionMessageChunk",
    "langchain_core.messages.modifier": "RemoveMessage",
    "langchain_core.documents.base": "Document",
    "langgraph.types": "Send TimeoutPolicy Interrupt Command StateSnapshot PregelTask Overwrite",
    "langgraph.store.base": "Item GetOp",
}
KNOWN: Final = frozenset(
    (module, name) for module, names in _KNOWN_NAMES.items() for name in names.split()
)
SEND: Final = ("langgraph.types", "Send")

# langgraph's serializer, for values that hold no others
STRICT_SERDE: Final = JsonPlusSerializer(allowed_msgpack_modules=None)


class TypeNotAllowed(TypeError):
    """A class that may not be rebuilt under the allowlist in force; `name` is its name."""

    def __init__(self, name: Name) -> None:
        super().__init__(f"{name[0]}.{name[1]} is not on the allowlist")
        self.name = name


class TooDeep(TypeError):
    """Values are nested deeper than can be stored."""


class DetachedFields(dict[str, Any]):
    """The fields of an object whose class this process has not got.

    Stored again, it is an object of that class, with the fields it has by then.

    Attributes:
        origin: The extension code, the module, the name and what follows the payload.
        whole: Whether the dict is the payload; else the payload is its `value`.
    """

    __slots__ = ("origin", "whole")

    origin: tuple[int, str, str, list[Any]]
    whole: bool

    # by identity, so that one that stood in a set or was a key stands there again
    __hash__ = object.__hash__  # type: ignore[assignment]


class Allowlist:
    """Which classes may be rebuilt, as a langgraph serializer says.

    With the name `LOADED` among its `allowed_msgpack_modules`, or with `True` in their place,
    these are the plain data classes that the process has imported, and all classes named. Without
    they are those named: the strict rule.

    Args:
        serde: The serializer. Names that `with_msgpack_allowlist` has added count.
    """

    LOADED: Final = ("perdure", "any plain data class that is loaded")

    def __init__(self, serde: JsonPlusSerializer) -> None:
        everything = _names(serde, ("", ""))
        self.strict = not everything and not _names(serde, self.LOADED)
        self.names: Callable[[str, str], bool] = functools.lru_cache(maxsize=1024)(
            lambda module, name: not everything and _names(serde, (module, name))
        )


def _names(serde: JsonPlusSerializer, name: Name) -> bool:
    """Whether an allowlist has a name: adding it then changes nothing."""
    return serde.with_msgpack_allowlist([name]) is serde


def allowlist_of(serde: SerializerProtocol) -> Allowlist | None:
    """The allowlist of langgraph's own serializer; None for any other serializer."""
    return Allowlist(serde) if type(serde) is JsonPlusSerializer else None
