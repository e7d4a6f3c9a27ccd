"""The requests that providers refuse, by their documentation; independent of perdure's own code.

OpenAI (https://platform.openai.com/docs/guides/function-calling): a message with role `tool` must
respond to a preceding message with `tool_calls`; such a message must be followed by tool messages
responding to each `tool_call_id`. The Responses API says the same of the items that are calls, and
refuses an item of reasoning without the item that followed it.
Anthropic (https://docs.anthropic.com/en/api/messages): the first message is a user's; a `tool_use`
is answered by a `tool_result` in the next message; text is not blank; the result of a server tool
follows its `server_tool_use`. Its langchain client takes system messages only in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from tests.memory.conversations import is_question

# items that are sent as they are, with the key of the id that their output names
_OPENAI_CALLS = {"computer_call": "call_id", "mcp_approval_request": "id"}
_THOUGHTS = ("reasoning", "thinking")


def find_refusals(messages: Sequence[BaseMessage], *, to_answer: bool = True) -> list[str]:
    """Return the reasons for which a provider would refuse these messages, or an empty list.

    With `to_answer`, a model is to answer them, so the last must be a question or a tool result.
    """
    conversation = list(messages)
    if conversation and isinstance(conversation[0], SystemMessage):
        conversation = conversation[1:]
    problems = [
        f"a system message at {i}"
        for i, m in enumerate(conversation)
        if isinstance(m, SystemMessage)
    ]
    if (
        conversation
        and not isinstance(conversation[0], HumanMessage)
        and any(map(is_question, conversation))
    ):
        problems.append(f"the first is a {conversation[0].type} message")
    if conversation and to_answer and not isinstance(conversation[-1], HumanMessage | ToolMessage):
        problems.append(f"the last is a {conversation[-1].type} message")
    problems += _find_unpaired_calls(conversation) + _find_unpaired_searches(conversation)
    newest = max((i for i, m in enumerate(conversation) if is_question(m)), default=-1)
    for i, message in enumerate(conversation):
        is_result = isinstance(message, ToolMessage | FunctionMessage)
        if i != newest and not is_result and not _list_call_ids(message) and _is_blank(message):
            problems.append(f"nothing is said at {i}")
    return problems


def awaits_answer(messages: Sequence[BaseMessage]) -> bool:
    """Return whether a conversation ends with a message that a model has to answer."""
    last = next((m for m in reversed(messages) if not isinstance(m, SystemMessage)), None)
    if isinstance(last, ToolMessage):
        return not find_refusals(messages, to_answer=False)
    return last is not None and is_question(last)


def _find_unpaired_calls(talk: list[BaseMessage]) -> list[str]:
    problems = []
    open_calls: list[str | None] = []
    for i, message in enumerate(talk):
        results = _list_result_ids(message)
        for uid in results:
            if uid in open_calls:
                open_calls.remove(uid)
            else:
                problems.append(f"the result {uid} at {i} has no call")
        if results:
            continue
        if open_calls:
            problems.append(f"calls before {i} have no result: {open_calls}")
        open_calls = _list_call_ids(message)
        if None in open_calls or "" in open_calls:
            problems.append(f"a call at {i} has no id")
        ids = [uid for uid in open_calls if uid is not None]
        if len(ids) > len(set(ids)):
            problems.append(f"two calls at {i} have one id")
    if open_calls:
        problems.append(f"calls at the end have no result: {open_calls}")
    return problems


def _find_unpaired_searches(talk: list[BaseMessage]) -> list[str]:
    problems = []
    searches: list[Any] = []
    for i, message in enumerate(talk):
        blocks = _list_sent_blocks(message)
        searches += [b["id"] for b in blocks if b.get("type") == "server_tool_use"]
        for uid in [b["tool_use_id"] for b in blocks if b.get("type") == "web_search_tool_result"]:
            if uid in searches:
                searches.remove(uid)
            else:
                problems.append(f"the result {uid} of a search at {i} has no call")
        is_last = i == len(talk) - 1
        if searches and not is_last and not isinstance(talk[i + 1], AIMessage):
            problems.append(f"a search at {i} has no result: {searches}")
            searches = []
    return problems


def _list_call_ids(message: BaseMessage) -> list[str | None]:
    if not isinstance(message, AIMessage):
        return []
    calls = [c["id"] for c in message.tool_calls] + [c["id"] for c in message.invalid_tool_calls]
    blocks = _list_sent_blocks(message)
    calls += [b[_OPENAI_CALLS[b["type"]]] for b in blocks if b.get("type") in _OPENAI_CALLS]
    function = message.additional_kwargs.get("function_call")
    return [*calls, f"function {function['name']}"] if function and not calls else calls


def _list_result_ids(message: BaseMessage) -> list[str]:
    if isinstance(message, FunctionMessage):
        return [f"function {message.name}"]
    if isinstance(message, ToolMessage):
        return [message.tool_call_id]
    if not isinstance(message, HumanMessage):
        return []
    blocks = [b for b in _list_sent_blocks(message) if b.get("type") == "mcp_approval_response"]
    return [block["approval_request_id"] for block in blocks]


def _list_sent_blocks(message: BaseMessage) -> list[dict[str, Any]]:
    """Return the content blocks as langchain-openai sends them."""
    content = [] if isinstance(message.content, str) else message.content
    blocks: list[Any] = [b if isinstance(b, dict) else {"type": "text", "text": b} for b in content]
    blocks += message.additional_kwargs.get("tool_outputs") or []
    return [b["value"] if b.get("type") == "non_standard" else b for b in blocks]


def _is_blank(message: BaseMessage) -> bool:
    kwargs = message.additional_kwargs
    if isinstance(message.content, str) and message.content.strip():
        return False
    if kwargs.get("audio") or kwargs.get("refusal"):
        return False
    visible_blocks = [b for b in _list_sent_blocks(message) if b.get("type") not in _THOUGHTS]
    return all(b.get("type") == "text" and not b["text"].strip() for b in visible_blocks)
