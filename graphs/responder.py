"""A chat model for when none is configured: it quotes the messages that it is shown."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, Final

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from perdure.memory.thread_messages import REMEMBER
from perdure.stores.text import STOP_WORDS

NOTICE: Final = "(No model is configured; set PERDURE_MODEL for real answers.)"
_WORD: Final = re.compile(r"\w+")
_SECTION: Final = re.compile(r"<memories>\n(.*?)\n</memories>", re.DOTALL)
_QUOTES = 2


class QuotingResponder(BaseChatModel):
    """Answers the newest message by quoting the earlier ones that share most words with it.

    Deterministic, offline, and plain about being no model.
    """

    @property
    def _llm_type(self) -> str:
        return "perdure-quoting-responder"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        # what is quoted is known already
        message = AIMessage(_answer(messages), response_metadata={REMEMBER: False})
        return ChatResult(generations=[ChatGeneration(message=message)])


def _answer(messages: list[BaseMessage]) -> str:
    question = next((m for m in reversed(messages) if isinstance(m, HumanMessage)), None)
    if question is None:
        return f"I was shown no question. {NOTICE}"
    system = [m for m in messages if isinstance(m, SystemMessage)]
    thread = [m for m in messages if m not in system]
    parts = [
        ("From this thread I remember:", _from_thread(question, thread)),
        ("From earlier I remember:", _from_memory(question, system)),
    ]
    lines = [line for head, quotes in parts if quotes for line in (head, *quotes)]
    if lines:
        return "\n".join([*lines, NOTICE])
    count = len(thread) - 1  # all that it is shown, its own answers too
    shown = f"This thread shows me {count} earlier message{'s' * (count != 1)}"
    return f"{shown}, and none of them speaks of that. {NOTICE}"


def _from_thread(question: HumanMessage, thread: list[BaseMessage]) -> list[str]:
    """Quotes of the thread's messages that share most words with the question."""
    earlier = [m for m in thread if m is not question and m.text.strip() and NOTICE not in m.text]
    wanted = _words(question.text)
    scored = [(len(wanted & _words(m.text)), i, m) for i, m in enumerate(earlier)]
    best = sorted((s for s in scored if s[0]), key=lambda s: (-s[0], -s[1]))[:_QUOTES]
    return [
        f"- {'you' if isinstance(m, HumanMessage) else 'I'} said: “{_short(m.text)}”"
        for _, _, m in sorted(best, key=lambda s: s[1])
    ]


def _from_memory(question: HumanMessage, system: list[SystemMessage]) -> list[str]:
    """Quotes of the first recalled memories that share a word with the question."""
    wanted, quotes = _words(question.text), []
    sections = (part for message in system for part in _SECTION.findall(message.text))
    for line in (line for part in sections for line in part.splitlines()):
        memory: Any = None
        with suppress(ValueError):  # the heading of the section
            memory = json.loads(line)
        text = str(memory.get("memory", "")) if isinstance(memory, dict) else ""
        if wanted & _words(text):
            thread = f"thread {memory['thread']}" if memory.get("thread") else ""
            place = ", ".join(filter(None, [thread, memory.get("on")]))
            quotes.append(f"- {place}: “{_short(text)}”")
    return quotes[:_QUOTES]


def _words(text: str) -> set[str]:
    return {word for word in _WORD.findall(text.casefold()) if word not in STOP_WORDS}


def _short(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
