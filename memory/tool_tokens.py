"""What the schemas of tools cost: OpenAI's published formula, carried on into nested schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from langchain_core.utils.function_calling import convert_to_openai_tool

from perdure.errors import ConfigurationError

_END, _PROPERTIES, _PROPERTY = 12, 3, 3
_ENUM, _ENUM_ITEM = -3, 3
_CHOICES: Final = ("anyOf", "oneOf", "allOf")


def tool_tokens(tools: Sequence[Any], text: Callable[[str], int], start: int) -> int:
    """Tokens of the schemas of tools.

    A tool that the provider runs itself (`{"type": "web_search"}`) counts as the text of its JSON.

    Args:
        tools: In any form that `bind_tools` takes.
        text: Counts a text.
        start: Tokens that a function begins with: 7 since gpt-4o, 10 before.

    Raises:
        ConfigurationError: One of them is no tool.

    Source: https://cookbook.openai.com/examples/how_to_count_tokens_with_tiktoken (part 7)
    """
    total = _END if tools else 0
    for schema in schemas(tools):
        function = schema.get("function")
        if isinstance(function, Mapping):
            line = f"{function.get('name', '')}:{_sentence(function)}"
            total += start + text(line) + _properties(function.get("parameters"), text)
        else:
            total += text(json.dumps(schema, default=str))
    return total


def schemas(tools: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The schemas of tools in OpenAI's form, or in their own if only the provider knows it.

    Raises:
        ConfigurationError: One of them is no tool.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ConfigurationError(f"the tools are {tools!r:.80}; expected a list of tools")
    return [_schema(tool) for tool in tools]


def _schema(tool: Any) -> Mapping[str, Any]:
    if isinstance(tool, Mapping) and "function" in tool:
        return tool
    try:
        return convert_to_openai_tool(tool)
    except Exception as exc:
        if isinstance(tool, Mapping) and "type" in tool:
            return tool
        raise ConfigurationError(
            f"{tool!r:.80} is no tool ({exc}); expected what a model's bind_tools takes"
        ) from exc


def _properties(schema: Any, text: Callable[[str], int]) -> int:
    """Tokens of the properties of an object, of those within them, and of its definitions."""
    if not isinstance(schema, Mapping):
        return 0
    properties = schema.get("properties") or {}
    total = _PROPERTIES if properties else 0
    for name, value in properties.items():
        if not isinstance(value, Mapping):  # `true`, which allows anything
            total += _PROPERTY + text(name)
            continue
        total += _PROPERTY + text(f"{name}:{_type(value)}:{_sentence(value)}") + _enum(value, text)
        total += _properties(value, text)
    return total + sum(_properties(part, text) for part in _parts(schema))


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    yield schema.get("items")
    for key in _CHOICES:
        yield from schema.get(key) or ()
    yield from (schema.get("$defs") or {}).values()


def _enum(schema: Mapping[str, Any], text: Callable[[str], int]) -> int:
    items = schema.get("enum")
    return _ENUM + sum(_ENUM_ITEM + text(str(item)) for item in items) if items else 0


def _type(schema: Mapping[str, Any]) -> str:
    if "type" in schema:
        return str(schema["type"])
    choices = (choice for key in _CHOICES for choice in schema.get(key) or ())
    return "|".join(_type(choice) for choice in choices if isinstance(choice, Mapping))


def _sentence(schema: Mapping[str, Any]) -> str:
    return str(schema.get("description") or "").removesuffix(".")
