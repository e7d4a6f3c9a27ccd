"""Read and rewrite tool calls and tool results, in all forms that providers and langchain use.

A message can store a tool call as an entry of `tool_calls` or `invalid_tool_calls`, as a content
block, as an entry of `additional_kwargs["tool_outputs"]` (an older format), or in
`additional_kwargs["function_call"]`. The result of a tool call can be a `ToolMessage`, a
`FunctionMessage`, or a content block of a later message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, FunctionMessage, ToolMessage

NO_RESULT: Final = "no result is stored: it is not known whether this call took effect"
"""The content of the message that a request contains in place of a missing result."""
REQUEST_ONLY: Final = "perdure_stated"
"""Key in the additional_kwargs of a message that perdure adds to a request and never stores.

The key is not sent to providers.
"""

CALL_BLOCKS: Final = frozenset({"tool_use", "tool_call", "function_call", "custom_tool_call"})
"""Types of content blocks with a call that is usually also an entry of `tool_calls`.

In some messages, the content block is the only place that contains the call.
"""

_RESULT_CALL_ID_KEYS: Final[Mapping[str, str]] = {
    "tool_result": "tool_use_id",
    "server_tool_result": "tool_call_id",
    "function_call_output": "call_id",
    "custom_tool_call_output": "call_id",
    "computer_call_output": "call_id",
    "apply_patch_call_output": "call_id",
    "local_shell_call_output": "call_id",
    "shell_call_output": "call_id",
    "tool_search_output": "call_id",
    "mcp_approval_response": "approval_request_id",
}
"""The key of the call's id, by the type of the content block.

The blocks contain the results of calls.
"""

# Suffix of the type of content blocks that hold the result of an Anthropic server tool, as in
# `web_search_tool_result`.
_ANTHROPIC_RESULT: Final = "_tool_result"

CallKind = Literal["tool", "custom", "function", "unparsed", "client", "server"]
"""The kind of a tool call. The kind says how the call is answered.

- `"tool"` calls are answered by a ToolMessage.
- `"custom"` calls are answered by a ToolMessage with a block of type `custom_tool_call_output`.
- `"function"` calls are answered by a FunctionMessage.
- `"client"` calls are answered by data that only the application has, such as a screenshot.
- `"server"` calls are answered by the provider.
- `"unparsed"` calls were never run, because their arguments could not be parsed.
"""

_CALL_ID_KEYS_AND_KINDS: Final[Mapping[str, tuple[str, CallKind]]] = {
    "tool_use": ("id", "tool"),
    "tool_call": ("id", "tool"),
    "function_call": ("call_id", "tool"),
    "custom_tool_call": ("call_id", "custom"),
    "computer_call": ("call_id", "client"),
    "apply_patch_call": ("call_id", "client"),
    "local_shell_call": ("call_id", "client"),
    "shell_call": ("call_id", "client"),
    "mcp_approval_request": ("id", "client"),
    "server_tool_use": ("id", "server"),
    "mcp_tool_use": ("id", "server"),
    "server_tool_call": ("id", "server"),
    "tool_search_call": ("call_id", "server"),
}
"""The key of the call's id, and the kind of the call, by the type of the content block."""
ANSWERED_BY_MESSAGE: Final = frozenset({"tool", "custom", "function"})
"""Kinds of tool calls for which a message can say that the result is missing."""


class Call(NamedTuple):
    """A tool call in an AI message.

    Attributes:
        id: The id by which a result refers to the call; None or `""` if the call has no id.
        name: The name of the tool, or `""`.
        kind: How the call is answered.
        place: The position of the call in `tool_calls`, or in `invalid_tool_calls` if its kind is
            `"unparsed"`; None if the call is in neither list.
        block: The content block of a call that is in neither list, else None. A call from
            `additional_kwargs["function_call"]` has neither a place nor a block.
    """

    id: str | None
    name: str
    kind: CallKind
    place: int | None = None
    block: Mapping[str, Any] | None = None


def find_tool_calls(message: AIMessage) -> list[Call]:
    """Return the tool calls in a message, in the order in which providers receive them."""
    tool_calls, unparsed, kwargs = (
        message.tool_calls,
        message.invalid_tool_calls,
        message.additional_kwargs,
    )
    if not (tool_calls or unparsed or kwargs) and isinstance(message.content, str):
        # Most messages have no tool calls.
        return []
    blocks = list(iter_content_blocks(message))
    custom = {block.get("call_id") for block in blocks if block.get("type") == "custom_tool_call"}
    calls = [
        Call(call["id"], call["name"], "custom" if call["id"] in custom else "tool", index)
        for index, call in enumerate(tool_calls)
    ]
    calls += [
        Call(entry["id"], entry["name"] or "", "unparsed", index)
        for index, entry in enumerate(unparsed)
    ]
    listed_ids = {call.id for call in calls}
    for block in blocks:
        call = _read_call_from_block(block)
        # If the message has entries in `tool_calls` or `invalid_tool_calls`, skip content blocks
        # that have no call id, because they probably duplicate these entries.
        if call is not None and call.id not in listed_ids and (call.id or not listed_ids):
            calls.append(call)
    function = kwargs.get("function_call")
    if not calls and isinstance(function, Mapping):
        name = str(function.get("name") or "")
        calls.append(Call(_build_function_call_id(name), name, "function"))
    return calls


def list_call_ids(message: AIMessage) -> list[str | None]:
    """Return the ids of all tool calls in a message, including calls that could not be parsed."""
    return [call.id for call in find_tool_calls(message)]


def list_call_ids_of_results(message: BaseMessage) -> list[str]:
    """Return the ids of the tool calls whose results a message contains."""
    if isinstance(message, ToolMessage):
        return [message.tool_call_id]
    if isinstance(message, FunctionMessage):
        return [_build_function_call_id(message.name)]
    if isinstance(message.content, str) and not message.additional_kwargs:
        return []
    return [
        call_id
        for block in iter_content_blocks(message)
        if (call_id := _find_call_id_of_result(block)) is not None
    ]


def is_tool_result_not_allowed_as_plain_text(message: BaseMessage) -> bool:
    """Return whether a message is a tool result that OpenAI does not accept as plain text.

    For some tools, OpenAI requires the result to be a content block of a specific type. For
    example, the result of a computer tool call must be an image.
    """
    if not isinstance(message, ToolMessage):
        return False
    if message.additional_kwargs.get("type") == "computer_call_output":
        return True
    return any(block.get("type") in _RESULT_CALL_ID_KEYS for block in iter_content_blocks(message))


def iter_content_blocks(message: BaseMessage) -> Iterator[Mapping[str, Any]]:
    """Yield a message's content blocks, then the blocks in `additional_kwargs["tool_outputs"]`."""
    content = message.content
    for block in () if isinstance(content, str) else content:
        if isinstance(block, dict):
            yield unwrap_non_standard_block(block)
    # langchain-openai used the field `tool_outputs` before version 1.0.
    older = message.additional_kwargs.get("tool_outputs")
    for block in older if isinstance(older, list) else ():
        if isinstance(block, dict):
            yield block


def unwrap_non_standard_block(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the provider-specific content block that a langchain `non_standard` block wraps.

    If the block is not of the type `non_standard`, it is returned unchanged.
    """
    value = block.get("value") if block.get("type") == "non_standard" else None
    return value if isinstance(value, dict) else block


def rewrite_tool_calls(
    message: AIMessage,
    calls: Sequence[Call],
    *,
    removed_positions: Collection[int] = (),
    new_ids: Mapping[int, str] | None = None,
    stray_result_call_ids: Collection[str] = (),
) -> AIMessage:
    """Return a copy of an AI message with its tool calls in a form that providers accept.

    If the tool calls and tool results in the message need no change, the original message object is
    returned instead of a copy. If a tool call occurs only in a content block, it is added to
    `tool_calls`, so that every provider's client library can send it in the format that the
    provider expects.

    Args:
        message: The AI message.
        calls: The calls of the message, from `find_tool_calls`.
        removed_positions: The positions in `calls` of the tool calls to remove. Each removed call
            that may have run is replaced by a sentence.
        new_ids: New ids of calls, by the position of the call in `calls`.
        stray_result_call_ids: The call ids of result blocks to remove from the content, because
            their calls are not in the same turn.
    """
    new_ids = new_ids or {}
    # The new tool call entries, keyed by whether the call is invalid: `entries[False]` becomes
    # `tool_calls`, and `entries[True]` becomes `invalid_tool_calls`.
    entries: dict[bool, list[Any]] = {False: [], True: []}
    for position, call in enumerate(calls):
        entry = (
            None
            if position in removed_positions
            else _get_or_build_tool_calls_list_entry(message, call)
        )
        if entry is not None:
            entry = {**entry, "id": new_ids[position]} if position in new_ids else entry
            entries[call.kind == "unparsed"].append(entry)
    if not (removed_positions or new_ids or stray_result_call_ids) and len(entries[False]) == len(
        message.tool_calls
    ):
        return message
    is_removed = _build_predicate_for_removed_content_blocks(
        calls, removed_positions, new_ids, stray_result_call_ids
    )
    sentences = [
        f"[A call of {calls[position].name or 'a tool'} is left out; {NO_RESULT}.]"
        for position in sorted(removed_positions)
        if calls[position].kind in ("client", "server")
    ]
    content: Any = message.content
    if not isinstance(content, str):
        content = [block for block in content if not is_removed(block)]
        content += [{"type": "text", "text": text} for text in sentences]
    elif sentences:
        content = "\n\n".join([*filter(str.strip, [content]), *sentences])
    kwargs = dict(message.additional_kwargs)
    # Remove the key `tool_calls` from `additional_kwargs`. langchain-openai sends the tool calls
    # under this key if the message's attribute `tool_calls` is empty.
    kwargs.pop("tool_calls", None)
    if isinstance(older := kwargs.get("tool_outputs"), list):
        kwargs["tool_outputs"] = [block for block in older if not is_removed(block)]
        if removed_positions:
            kwargs.pop("reasoning", None)
    changes = {"content": content, "additional_kwargs": kwargs}
    changes |= {"tool_calls": entries[False], "invalid_tool_calls": entries[True]}
    return message.model_copy(update=changes)


def _build_predicate_for_removed_content_blocks(
    calls: Sequence[Call],
    removed_positions: Collection[int],
    new_ids: Mapping[int, str],
    stray_result_call_ids: Collection[str],
) -> Callable[[Any], bool]:
    """Build a predicate that selects the content blocks that `rewrite_tool_calls` must remove."""
    removed_blocks = {id(calls[n].block) for n in removed_positions if calls[n].block is not None}
    # Also remove the content block of a tool call that gets a new id, because the provider's client
    # library builds a new block from `tool_calls`.
    ids = {calls[n].id for n in (*removed_positions, *new_ids)}

    def is_removed(block: Any) -> bool:
        """Return whether `rewrite_tool_calls` must remove the given content block."""
        if not isinstance(block, dict):
            return False
        inner = unwrap_non_standard_block(block)
        if id(inner) in removed_blocks or _find_call_id_of_result(inner) in stray_result_call_ids:
            return True
        call = _read_call_from_block(inner)
        if call is not None and call.kind in ("tool", "custom") and call.id in ids:
            return True
        # OpenAI rejects a reasoning block if the tool call that originally followed it is missing.
        return bool(removed_positions) and inner.get("type") == "reasoning"

    return is_removed


def build_missing_result_message(call: Call, call_id: str) -> BaseMessage:
    """Build a placeholder message that states that the result of a tool call is not stored.

    `call_id` is the id of the tool call whose result is missing.
    """
    mark = {REQUEST_ONLY: True}
    if call.kind == "function":
        return FunctionMessage(name=call.name, content=NO_RESULT, additional_kwargs=mark)
    content: Any = NO_RESULT
    # OpenAI accepts the result of a custom tool call only as a block of type
    # `custom_tool_call_output`.
    if call.kind == "custom":
        content = [{"type": "custom_tool_call_output", "output": NO_RESULT}]
    call_fields: dict[str, Any] = {"tool_call_id": call_id, "name": call.name or None}
    return ToolMessage(content, **call_fields, status="error", additional_kwargs=mark)


def build_call_id(message: BaseMessage, call: Call, position: int) -> str:
    """Build an id for a tool call whose id is missing or not unique within its message.

    The same tool call always gets the same id. The returned id has at most 40 characters, which is
    the maximum length that OpenAI accepts.
    """
    source = f"{message.id} {call.id} {position}"
    return f"call_{blake2b(source.encode(errors='replace'), digest_size=12).hexdigest()}"


def remove_stray_result_blocks(
    message: BaseMessage, stray_result_call_ids: Collection[str]
) -> BaseMessage:
    """Return a copy of a message without the results of calls in `stray_result_call_ids`.

    A result is stray if its call is not in the same turn.
    """
    content = [
        block
        for block in message.content
        if not isinstance(block, dict)
        or _find_call_id_of_result(unwrap_non_standard_block(block)) not in stray_result_call_ids
    ]
    return message.model_copy(update={"content": content})


def _get_or_build_tool_calls_list_entry(message: AIMessage, call: Call) -> Any:
    """Build the `tool_calls` or `invalid_tool_calls` entry for a tool call.

    Return None if the tool call must not be in `tool_calls` or `invalid_tool_calls`, for example
    because the model provider executes the tool itself.
    """
    if call.block is None and call.place is not None:
        entries: Sequence[Any] = (
            message.invalid_tool_calls if call.kind == "unparsed" else message.tool_calls
        )
        return entries[call.place]
    if call.block is None or call.kind not in ("tool", "custom"):
        return None
    return {
        "name": call.name,
        "args": read_call_arguments(call.block),
        "id": call.id,
        "type": "tool_call",
    }


def _read_call_from_block(block: Mapping[str, Any]) -> Call | None:
    """Return the tool call that a content block represents, or None for any other block."""
    block_type = str(block.get("type"))
    if block_type not in _CALL_ID_KEYS_AND_KINDS:
        return None
    key, kind = _CALL_ID_KEYS_AND_KINDS[block_type]
    # OpenAI's client libraries store the call id under the key `call_id` or `id`, depending on the
    # library's version.
    call_id = block.get(key) or block.get("id")
    name = str(block.get("name") or ("" if block_type in CALL_BLOCKS else block_type))
    return Call(call_id if isinstance(call_id, str) else None, name, kind, block=block)


def _find_call_id_of_result(block: Mapping[str, Any]) -> str | None:
    """Return the id of the call that a tool result block belongs to, or None for other blocks."""
    kind = block.get("type")
    if not isinstance(kind, str):
        return None
    key = _RESULT_CALL_ID_KEYS.get(kind)
    if key is None and kind.endswith(_ANTHROPIC_RESULT):
        key = "tool_use_id"
    call_id = None if key is None else block.get(key)
    return call_id if isinstance(call_id, str) else None


def _build_function_call_id(name: str | None) -> str:
    """Build an id for a legacy OpenAI function call, whose result contains only a function name."""
    return f"function {name or ''}"


def read_call_arguments(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a tool call content block, or `{}` if they are not valid."""
    if block.get("type") == "custom_tool_call":
        # langchain-openai uses the key `__arg1` for the input of a custom tool.
        return {"__arg1": block.get("input")}
    arguments: Any = next(
        (block[key] for key in ("args", "input", "arguments", "action") if block.get(key)), {}
    )
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return dict(arguments) if isinstance(arguments, Mapping) else {}
