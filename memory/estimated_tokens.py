"""Tokens of a text without a tokenizer: words, numbers and signs, each with its weight.

The weights were fitted to o200k_base (`python benchmarks/counting.py --fit` prints fit and error)
and then raised a little, more where the fit had few examples: an estimate that is too high costs
some room, one that is too low costs a refused request. What a provider reported raises it further.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from operator import mul
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage

from perdure.memory.conversation import role
from perdure.memory.image_tokens import Size, any_image_tokens
from perdure.memory.message_tokens import MESSAGE, CountsByText, Memo

WEIGHTS: Final = {
    "words": 1.05,
    "words within words, as in camelCase": 1.1,
    "eight letters more": 0.7,
    "three capitals": 0.75,
    "numbers": 0.95,
    "four digits more": 1.3,
    "runs of signs": 0.75,
    "four signs more": 0.3,
    "ends of lines": 1.25,
    "indents": 0.65,
    "accented letters": 0.4,
    "letters of other alphabets": 0.45,
    "ideographs, syllables, kana": 0.9,
    "other characters": 1.3,
    "characters beyond the basic plane": 2.5,
}
"""Tokens of one of each, in the order of `classes`."""

_PLAIN: Final = tuple(WEIGHTS.values())[:10]
_ALL: Final = tuple(WEIGHTS.values())
_MOST, _MEASURABLE = 4.0, 50
_REASONING: Final = frozenset({"reasoning", "thinking", "reasoning_content", "redacted_thinking"})


def _table(sign: Callable[[str], str]) -> bytes:
    return "".join(sign(chr(code)) if code < 128 else " " for code in range(256)).encode()


_LETTERS = _table(lambda c: "a" if c.islower() else "A" if c.isupper() else " ")
_DIGITS = _table(lambda c: "0" if c.isdigit() else " ")
_SIGNS = _table(lambda c: " " if c.isalnum() or c.isspace() else "!")
_LINES = _table(lambda c: "n" if c in "\r\n" else " ")

_ACCENTED = re.compile("[\u00c0-\u024f\u1e00-\u1eff]")
_ALPHABETS = re.compile("[\u0370-\u0eff\u10a0-\u10ff]+")
_WIDE = re.compile("[\u1100-\u11ff\u2e80-\ufaff\uff00-\uffef]+")
_ASTRAL = re.compile("[\U00010000-\U0010ffff]")
_OTHER = re.compile(r"[^\x00-\x7f]")


def estimate(text: str) -> int:
    """Tokens of a text, about; 10 µs for 500 characters.

    >>> estimate("The quick brown fox jumps over the lazy dog.")  # 10 in o200k_base
    11
    """
    tokens: float = sum(map(mul, classes(text), _PLAIN if text.isascii() else _ALL))
    return math.ceil(tokens)


def classes(text: str) -> list[int]:
    """How many there are of each class in `WEIGHTS`; only of the first ten in ASCII."""
    if text.isascii():
        return _in_ascii(text.encode())
    plain, accented = _ACCENTED.subn("a", text)
    beyond = [accented]
    for runs in (_ALPHABETS, _WIDE):
        rest = runs.sub(" ", plain)
        beyond.append(sum(map(len, runs.findall(plain))))
        plain = rest
    astral = len(_ASTRAL.findall(plain))
    beyond += [len(_OTHER.findall(plain)) - astral, astral]
    return _in_ascii(plain.encode("ascii", "ignore")) + beyond


def _in_ascii(text: bytes) -> list[int]:
    """The first ten classes, by what `bytes` counts fast."""
    letters, digits = text.translate(_LETTERS), text.translate(_DIGITS)
    signs, lines = text.translate(_SIGNS), text.translate(_LINES)
    return [
        len(letters.split()),
        letters.count(b"aA"),
        letters.count(b"a" * 8),
        letters.count(b"AAA"),
        len(digits.split()),
        digits.count(b"0000"),
        len(signs.split()),
        signs.count(b"!!!!"),
        len(lines.split()),
        text.count(b"\n ") + text.count(b" " * 16),
    ]


class EstimatedCounter(CountsByText):
    """Estimates tokens, for a model whose tokenizer is not known.

    Args:
        scale: What an estimate of a text is multiplied by.
        memo: What has been counted is remembered in; None: a new one.
    """

    def __init__(self, scale: float = 1.0, memo: Memo[str] | None = None) -> None:
        self.scale = scale
        self._memo = Memo(estimate) if memo is None else memo

    def text(self, text: str) -> int:
        """Tokens of a text by itself."""
        count = self._memo(text, text)
        return count if self.scale == 1.0 else math.ceil(count * self.scale)

    def image(self, size: Size | None, low: bool) -> int:
        """The more of what OpenAI and Anthropic count."""
        return any_image_tokens(size, low)

    def fitted(self, messages: Sequence[BaseMessage]) -> EstimatedCounter:
        """The counter at the scale that the answers in a conversation call for, 1 to 4.

        The scale is the largest ratio, among answers of 50 tokens or more, of the output tokens
        in `usage_metadata` to the estimate. It is the largest, not the mean or the latest, so that
        leaving messages out never makes the rest count more: what once fits a budget fits still.
        Thoughts count on neither side; an answer of which they cannot be told apart is no measure.
        """
        bare = self if self.scale == 1.0 else EstimatedCounter(memo=self._memo)
        scale = max(1.0, min(_MOST, max(bare._ratios(messages), default=1.0)))
        return self if scale == self.scale else EstimatedCounter(scale, self._memo)

    def _ratios(self, messages: Sequence[BaseMessage]) -> Iterator[float]:
        for message in messages:
            reported = _reported(message)
            if reported is None:
                continue
            estimated = self.message(message) - MESSAGE - self._thoughts(message)
            if estimated >= _MEASURABLE:
                yield reported / estimated

    def _thoughts(self, message: BaseMessage) -> int:
        return sum(self._block(block) for block in _thoughts(message))


def _reported(message: BaseMessage) -> int | None:
    """Output tokens besides thoughts; None if they are not known."""
    if role(message) != "ai":
        return None
    assert isinstance(message, AIMessage)
    usage = message.usage_metadata
    if not usage:
        return None
    thought = (usage.get("output_token_details") or {}).get("reasoning")
    if thought is None and any(_thoughts(message)):
        return None
    return usage["output_tokens"] - (thought or 0)


def _thoughts(message: BaseMessage) -> Iterator[Any]:
    """The blocks of content that are thoughts."""
    if not isinstance(message.content, str):
        for block in message.content:
            if isinstance(block, dict) and block.get("type") in _REASONING:
                yield block
