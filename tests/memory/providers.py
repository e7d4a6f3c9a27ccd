"""What providers refuse, by their documents; written apart from perdure's own reading of them.

OpenAI (https://platform.openai.com/docs/guides/function-calling): a message with role `tool` must
respond to a preceding message with `tool_calls`; such a message must be followed by tool messages
responding to each `tool_call_id`.
Anthropic (https://docs.anthropic.com/en/api/messages): the first message is a user's; a `tool_use`
is answered by a `tool_result` in the next message; text is not blank. Its langchain client takes
system messages only in front.
"""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage


def refusals(messages: Sequence[BaseMessage], *, to_answer: bool = True) -> list[str]:
    """Why a provider would refuse these messages; nothing if it takes them.

    Args:
        messages: What it is sent.
        to_answer: Whether a model is asked, so that the last is a question or results of tools.
    """
    talk = list(messages)
    if talk and isinstance(talk[0], SystemMessage):
        talk = talk[1:]
    found = [f"a system message at {i}" for i, m in enumerate(talk) if isinstance(m, SystemMessage)]
    if talk and not isinstance(talk[0], HumanMessage):
        found.append(f"the first is a {talk[0].type} message")
    if talk and to_answer and not isinstance(talk[-1], HumanMessage | ToolMessage):
        found.append(f"the last is a {talk[-1].type} message")
    found += _unpaired(talk)
    newest = max((i for i, m in enumerate(talk) if isinstance(m, HumanMessage)), default=-1)
    for i, message in enumerate(talk):
        blank_is_fine = i == newest or isinstance(message, ToolMessage) or _calls(message)
        if not blank_is_fine and _blank(message):
            found.append(f"nothing is said at {i}")
    return found


def awaits_answer(messages: Sequence[BaseMessage]) -> bool:
    """Whether a conversation ends with what a model is to answer, so what it is sent must too."""
    last = next((m for m in reversed(messages) if not isinstance(m, SystemMessage)), None)
    if isinstance(last, ToolMessage):
        return not refusals(messages, to_answer=False)
    return isinstance(last, HumanMessage)


def _unpaired(talk: list[BaseMessage]) -> list[str]:
    found = []
    open_calls: list[str | None] = []
    for i, message in enumerate(talk):
        if isinstance(message, ToolMessage):
            if message.tool_call_id in open_calls:
                open_calls.remove(message.tool_call_id)
            else:
                found.append(f"the result at {i} has no call")
            continue
        if open_calls:
            found.append(f"calls before {i} have no result: {open_calls}")
        open_calls = _calls(message)
        if None in open_calls or "" in open_calls:
            found.append(f"a call at {i} has no id")
    if open_calls:
        found.append(f"calls at the end have no result: {open_calls}")
    return found


def _calls(message: BaseMessage) -> list[str | None]:
    if not isinstance(message, AIMessage):
        return []
    return [c["id"] for c in message.tool_calls] + [c["id"] for c in message.invalid_tool_calls]


def _blank(message: BaseMessage) -> bool:
    if isinstance(message.content, str):
        return not message.content.strip()
    blocks = [b if isinstance(b, dict) else {"type": "text", "text": b} for b in message.content]
    return all(b["type"] == "text" and not b["text"].strip() for b in blocks)
