"""A chat model that works offline and answers by quoting earlier messages and memories."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, Final

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from perdure.memory.message_forms import shorten_line
from perdure.memory.thread_messages import REMEMBER
from perdure.stores.search.text import STOP_WORDS

NOTICE: Final = "(No model is configured; set PERDURE_MODEL for real answers.)"
_WORD_PATTERN: Final = re.compile(r"\w+")
_MEMORIES_PATTERN: Final = re.compile(r"<memories>\n(.*?)\n</memories>", re.DOTALL)
# Maximum number of thread messages quoted in an answer. An answer also quotes at most this many
# memories.
_MAX_QUOTES = 2


class QuotingResponder(BaseChatModel):
    """A chat model that answers by quoting earlier messages that share words with the question."""

    @property
    def _llm_type(self) -> str:
        return "perdure-quoting-responder"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        # The responder's answer must not be stored as a memory, because it repeats existing
        # memories.
        message = AIMessage(
            _build_answer_from_quotations(messages) + NOTICE, response_metadata={REMEMBER: False}
        )
        return ChatResult(generations=[ChatGeneration(message=message)])


def _build_answer_from_quotations(messages: list[BaseMessage]) -> str:
    """Build an answer from messages and memories that share words with the latest human message."""
    question = next((m for m in reversed(messages) if isinstance(m, HumanMessage)), None)
    if question is None:
        return "I was shown no question. "
    thread = [m for m in messages if m is not question and not isinstance(m, SystemMessage)]
    words, lines = _extract_words(question.text), []
    if thread_quotes := _quote_messages_sharing_words(words, thread):
        lines += ["From this thread I remember:", *thread_quotes]
    if memory_quotes := _quote_memories_sharing_words(words, messages):
        lines += ["From earlier I remember:", *memory_quotes]
    if lines:
        return "\n".join([*lines, ""])
    if not thread:
        return "This thread shows me no earlier message. "
    summary = f"This thread shows me {len(thread)} earlier message{'s' * (len(thread) != 1)}"
    return f"{summary}, and none of them speaks of that. "


def _quote_messages_sharing_words(
    question_words: set[str], thread_messages: list[BaseMessage]
) -> list[str]:
    """Quote the thread messages that share the most words with the question.

    Messages that contain `NOTICE` are not quoted, because they are earlier answers of this model.
    """
    shared_counts = [
        len(question_words & _extract_words(m.text)) * (NOTICE not in m.text)
        for m in thread_messages
    ]
    best_matches = sorted(zip(shared_counts, range(len(thread_messages)), strict=True))[
        -_MAX_QUOTES:
    ]
    quoted_messages = [thread_messages[i] for i in sorted(i for score, i in best_matches if score)]
    speakers = ["you" if isinstance(m, HumanMessage) else "I" for m in quoted_messages]
    return [
        f"- {speaker} said: “{shorten_line(m.text)}”"
        for speaker, m in zip(speakers, quoted_messages, strict=True)
    ]


def _quote_memories_sharing_words(
    question_words: set[str], messages: list[BaseMessage]
) -> list[str]:
    """Quote the recalled memories that share at least one word with the question."""
    quotes = []
    system_text = "\n".join(
        message.text for message in messages if isinstance(message, SystemMessage)
    )
    for line in "\n".join(_MEMORIES_PATTERN.findall(system_text)).splitlines():
        memory: Any = None
        with suppress(ValueError):  # the line is the heading of the section
            memory = json.loads(line)
        text = str(memory.get("memory", "")) if isinstance(memory, dict) else ""
        if question_words & _extract_words(text):
            thread = f"thread {memory['thread']}" if memory.get("thread") else ""
            origin = ", ".join(filter(None, [thread, memory.get("on")]))
            quotes.append(f"- {origin}: “{shorten_line(text)}”")
    return quotes[:_MAX_QUOTES]


def _extract_words(text: str) -> set[str]:
    return {word for word in _WORD_PATTERN.findall(text.casefold()) if word not in STOP_WORDS}
