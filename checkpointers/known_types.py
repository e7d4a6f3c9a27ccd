"""List the classes that can always be deserialised, even if they are not on an allowlist."""

from __future__ import annotations

from typing import Final

Name = tuple[str, str]
"""The name of a class: its module and its qualified name."""

# Classes that langgraph's serializer can deserialise in strict mode, plus some pydantic classes.
# Each key is a module name. The value contains the names of classes of this module, separated by
# spaces. The name `re.compile` is listed because langgraph stores a pattern as a call of this
# function.
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
