"""What providers refuse, by their documents; written apart from perdure's own reading of them.

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


def refusals(messages: Sequence[BaseMessage], *, to_answer: bool = True) -> list[str]:
    """Why a provider would refuse these messages; nothing if it takes them.

    Args:
        messages: What it is sent. Without a user's message the first may be an answer.
        to_answer: Whether a model is asked, so that the last is a question or results of tools.
    """
    talk = list(messages)
    if talk and isinstance(talk[0], SystemMessage):
        talk = talk[1:]
    found = [f"a system message at {i}" for i, m in enumerate(talk) if isinstance(m, SystemMessage)]
    if talk and not isinstance(talk[0], HumanMessage) and any(map(is_question, talk)):
        found.append(f"the first is a {talk[0].type} message")
    if talk and to_answer and not isinstance(talk[-1], HumanMessage | ToolMessage):
        found.append(f"the last is a {talk[-1].type} message")
    found += _unpaired(talk) + _unpaired_searches(talk)
    newest = max((i for i, m in enumerate(talk) if is_question(m)), default=-1)
    for i, message in enumerate(talk):
        is_result = isinstance(message, ToolMessage | FunctionMessage)
        if i != newest and not is_result and not _calls(message) and _blank(message):
            found.append(f"nothing is said at {i}")
    return found


def awaits_answer(messages: Sequence[BaseMessage]) -> bool:
    """Whether a conversation ends with what a model is to answer, so what it is sent must too."""
    last = next((m for m in reversed(messages) if not isinstance(m, SystemMessage)), None)
    if isinstance(last, ToolMessage):
        return not refusals(messages, to_answer=False)
    return last is not None and is_question(last)


def _unpaired(talk: list[BaseMessage]) -> list[str]:
    found = []
    open_calls: list[str | None] = []
    for i, message in enumerate(talk):
        results = _results(message)
        for uid in results:
            if uid in open_calls:
                open_calls.remove(uid)
            else:
                found.append(f"the result {uid} at {i} has no call")
        if results:
            continue
        if open_calls:
            found.append(f"calls before {i} have no result: {open_calls}")
        open_calls = _calls(message)
        if None in open_calls or "" in open_calls:
            found.append(f"a call at {i} has no id")
        ids = [uid for uid in open_calls if uid is not None]
        if len(ids) > len(set(ids)):
            found.append(f"two calls at {i} have one id")
    if open_calls:
        found.append(f"calls at the end have no result: {open_calls}")
    return found


def _unpaired_searches(talk: list[BaseMessage]) -> list[str]:
    found = []
    searches: list[Any] = []
    for i, message in enumerate(talk):
        blocks = _blocks(message)
        searches += [b["id"] for b in blocks if b.get("type") == "server_tool_use"]
        for uid in [b["tool_use_id"] for b in blocks if b.get("type") == "web_search_tool_result"]:
            if uid in searches:
                searches.remove(uid)
            else:
                found.append(f"the result {uid} of a search at {i} has no call")
        is_last = i == len(talk) - 1
        if searches and not is_last and not isinstance(talk[i + 1], AIMessage):
            found.append(f"a search at {i} has no result: {searches}")
            searches = []
    return found


def _calls(message: BaseMessage) -> list[str | None]:
    if not isinstance(message, AIMessage):
        return []
    calls = [c["id"] for c in message.tool_calls] + [c["id"] for c in message.invalid_tool_calls]
    blocks = _blocks(message)
    calls += [b[_OPENAI_CALLS[b["type"]]] for b in blocks if b.get("type") in _OPENAI_CALLS]
    function = message.additional_kwargs.get("function_call")
    return [*calls, f"function {function['name']}"] if function and not calls else calls


def _results(message: BaseMessage) -> list[str]:
    if isinstance(message, FunctionMessage):
        return [f"function {message.name}"]
    if isinstance(message, ToolMessage):
        return [message.tool_call_id]
    if not isinstance(message, HumanMessage):
        return []
    blocks = [b for b in _blocks(message) if b.get("type") == "mcp_approval_response"]
    return [block["approval_request_id"] for block in blocks]


def _blocks(message: BaseMessage) -> list[dict[str, Any]]:
    """Return the content blocks as langchain-openai sends them."""
    content = [] if isinstance(message.content, str) else message.content
    blocks: list[Any] = [b if isinstance(b, dict) else {"type": "text", "text": b} for b in content]
    blocks += message.additional_kwargs.get("tool_outputs") or []
    return [b["value"] if b.get("type") == "non_standard" else b for b in blocks]


def _blank(message: BaseMessage) -> bool:
    kwargs = message.additional_kwargs
    if isinstance(message.content, str) and message.content.strip():
        return False
    if kwargs.get("audio") or kwargs.get("refusal"):
        return False
    told = [b for b in _blocks(message) if b.get("type") not in _THOUGHTS]
    return all(b.get("type") == "text" and not b["text"].strip() for b in told)
