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
    """Answers the newest message by quoting earlier ones that share words with it."""

    @property
    def _llm_type(self) -> str:
        return "perdure-quoting-responder"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        # what is quoted is known already
        message = AIMessage(_answer(messages) + NOTICE, response_metadata={REMEMBER: False})
        return ChatResult(generations=[ChatGeneration(message=message)])


def _answer(messages: list[BaseMessage]) -> str:
    question = next((m for m in reversed(messages) if isinstance(m, HumanMessage)), None)
    if question is None:
        return "I was shown no question. "
    thread = [m for m in messages if m is not question and not isinstance(m, SystemMessage)]
    words, lines = _words(question.text), []
    if here := _from_thread(words, thread):
        lines += ["From this thread I remember:", *here]
    if earlier := _from_memory(words, messages):
        lines += ["From earlier I remember:", *earlier]
    if lines:
        return "\n".join([*lines, ""])
    if not thread:
        return "This thread shows me no earlier message. "
    shown = f"This thread shows me {len(thread)} earlier message{'s' * (len(thread) != 1)}"
    return f"{shown}, and none of them speaks of that. "


def _from_thread(words: set[str], thread: list[BaseMessage]) -> list[str]:
    shared = [len(words & _words(m.text)) * (NOTICE not in m.text) for m in thread]
    best = sorted(zip(shared, range(len(thread)), strict=True))[-_QUOTES:]
    quoted = [thread[i] for i in sorted(i for score, i in best if score)]
    speakers = ["you" if isinstance(m, HumanMessage) else "I" for m in quoted]
    return [f"- {who} said: “{_short(m.text)}”" for who, m in zip(speakers, quoted, strict=True)]


def _from_memory(words: set[str], messages: list[BaseMessage]) -> list[str]:
    quotes = []
    shown = "\n".join(message.text for message in messages if isinstance(message, SystemMessage))
    for line in "\n".join(_SECTION.findall(shown)).splitlines():
        memory: Any = None
        with suppress(ValueError):  # the heading of the section
            memory = json.loads(line)
        text = str(memory.get("memory", "")) if isinstance(memory, dict) else ""
        if words & _words(text):
            thread = f"thread {memory['thread']}" if memory.get("thread") else ""
            place = ", ".join(filter(None, [thread, memory.get("on")]))
            quotes.append(f"- {place}: “{_short(text)}”")
    return quotes[:_QUOTES]


def _words(text: str) -> set[str]:
    return {word for word in _WORD.findall(text.casefold()) if word not in STOP_WORDS}


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:199] + "…"
