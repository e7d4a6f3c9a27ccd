"""Ranking of turns that repeat the question of a query instead of answering it.

A question shares all its words with a query that asks the same, so a search ranks it above the
statement that answers. This module judges each turn by the words that it shares with the query and
by the words that remain. A remaining word tells something if it is rare in its language, a name or
a number. Each turn has one of four roles:

    ANSWERS   it has a telling word, or shares too little with the query to repeat it
    SAYS      it shares the query's words, and the remaining ones are ordinary: "My father built it"
    REPEATS   hardly anything remains: "Tell me who built it"; or it is such a reply to a question
    ASKS      it is a question, and nothing in it tells: "Do you remember who built it?"

`rank_answers_first` moves questions to the end. A turn that repeats comes after all turns of a
better role that have words of the query. A turn that says comes after the first one that answers.
The order stays as it is if no turn with words of the query answers or says, so that a reply without
such words still follows its question, and for keywords that nobody asked about.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from perdure.memory.records import TURN, Memory
from perdure.memory.sameness import same
from perdure.stores.text import (
    ENGLISH,
    OTHER,
    asks,
    commonness,
    language,
    query_words,
    stop_words,
    tokens,
    words_of,
)

ANSWERS, SAYS, REPEATS, ASKS = range(4)
_MAX_LENGTH: Final = 400  # characters; a longer turn says something
_RARE: Final = 9.0  # nats that a rare word tells, in any case of letters
_NAME: Final = 6.0  # nats that a word with a capital tells, unless it begins a sentence
_ORDINARY: Final = 5.3  # nats; a word that tells less, like "name" or "tell", says nothing
_MUCH: Final = 15.0  # nats of all remaining words; a turn with more tells or asks something else
_UNLISTED: Final = 13.0  # nats that a word tells which no list has
_FOREIGN: Final = (
    7.0  # nats of such a word if the query is not English; those lists lack many forms
)
_SHARE: Final = 0.25  # share of the query's nats that a turn has if it repeats the query
# share of a turn's nats of the query that another must have to rank before it
_BEFORE: Final = {SAYS: 0.4, REPEATS: 0.25}
_SENTENCES: Final = re.compile(r"(?<=[.!?;:\u2026\u061f])\s+|(?<=[\u3002\uff01\uff1f])|\n+")
_CLAUSES: Final = re.compile(r"[,\uff0c\u3001\u060c]\s*|\s[\u2013\u2014-]\s")
_CAPITALIZED: Final = re.compile(r"(?<=[^\s.!?\"'(\u201c] )[^\W\d_]\w*")


class _Reading(NamedTuple):
    """A turn as it relates to the query."""

    role: int
    shared: float  # nats of the query's words that the turn has


def rank_answers_first(
    ranking: Sequence[tuple[int, Memory]], query: str
) -> tuple[list[tuple[int, Memory]], int]:
    """Return a ranking with turns that repeat the query behind those that answer it.

    Args:
        ranking: Ranks and memories, best first.
        query: The text that the memories were searched with.

    Returns:
        The memories in their new order, with ascending ranks, and how many of them answer.
    """
    reader = _Reader(query)
    readings = [reader.read(memory) for _, memory in ranking]
    asked: set[tuple[str | None, int | None]] = {
        (memory.provenance.thread_id, memory.provenance.position)
        for (_, memory), reading in zip(ranking, readings, strict=True)
        if reading.role != ANSWERS and memory.provenance and memory.provenance.thread_id
    }
    readings = [
        reader.read(memory, is_reply=_follows(memory, asked)) if asked else reading
        for (_, memory), reading in zip(ranking, readings, strict=True)
    ]
    answering = sum(reading.role == ANSWERS for reading in readings)
    least = _SHARE * reader.told
    is_answered = any(reading.role <= SAYS and reading.shared >= least for reading in readings)
    is_asked = asks(query) or any(reading.role == ASKS for reading in readings)
    if answering == len(readings) or not (is_answered and is_asked):
        return list(ranking), answering
    order = sorted(range(len(readings)), key=lambda number: _sort_key(number, readings, reader))
    ranks = sorted(rank for rank, _ in ranking)
    moved = [(rank, ranking[number][1]) for rank, number in zip(ranks, order, strict=True)]
    return moved, answering


def _sort_key(
    number: int, readings: Sequence[_Reading], reader: _Reader
) -> tuple[bool, int, bool, int]:
    """Return the place of a memory: of its own, or behind the first that answers better."""
    role, shared = readings[number]
    if role == ASKS:
        return True, number, False, number
    if role == ANSWERS:
        return False, number, False, number
    least = max(shared * _BEFORE[role], _SHARE * reader.told)
    better = [
        other
        for other in range(number + 1, len(readings))
        if readings[other].role < role and readings[other].shared >= least
    ]
    if not better:
        return False, number, False, number
    return False, better[0] if role == SAYS else better[-1], True, number


def _follows(memory: Memory, asked: set[tuple[str | None, int | None]]) -> bool:
    """Return whether a memory is the message after one of `asked` in its thread."""
    source = memory.provenance
    if source is None or source.position is None:
        return False
    return (source.thread_id, source.position - 1) in asked


class _Reader:
    """Reads turns with the words of one query in mind."""

    def __init__(self, query: str) -> None:
        self._query = query
        words = query_words(query)
        self._words = {*words, *words.values()}
        self._every = set(words_of(query))
        self._languages = dict.fromkeys((language(query), ENGLISH))
        is_foreign = language(query) not in (ENGLISH, OTHER)
        self._unlisted = _FOREIGN if is_foreign else _UNLISTED
        self.told = sum(map(self._tells, words))

    def read(self, memory: Memory, *, is_reply: bool = False) -> _Reading:
        """Return the role of a memory; `is_reply` if it follows a turn that does not answer."""
        text = _spoken(memory)
        if memory.kind != TURN or not self._words or len(text) > _MAX_LENGTH:
            return _Reading(ANSWERS, self._shared(text))
        shared = self._shared(text)
        sentences = [sentence for sentence in _SENTENCES.split(text) if sentence.strip()]
        is_question = any(map(asks, sentences))
        repeats = shared >= _SHARE * self.told or (is_question and shared > 0)
        if not (repeats or is_reply) or self._tells_more(text):
            return _Reading(ANSWERS, shared)
        if repeats and any(map(self._says, _statements(sentences))):
            # an answer in ordinary words; one that has all words of the query only repeats it
            if is_question:
                return _Reading(ANSWERS, shared)
            is_copy = len(self._every) > 1 and self._every <= set(words_of(text))
            return _Reading(REPEATS if is_copy else SAYS, shared)
        return _Reading(ASKS if is_question and repeats else REPEATS, shared)

    def _shared(self, text: str) -> float:
        """Return the nats of the query's words that a text has."""
        found = {*tokens(text[:_MAX_LENGTH])}
        words = query_words(self._query)
        return sum(self._tells(word) for word, stem in words.items() if found & {word, stem})

    def _rest(self, text: str) -> list[str]:
        """Return the words of a text that are neither the query's nor stop words."""
        stops = frozenset[str]().union(*map(stop_words, self._languages))
        words = {word: stem for word, stem in query_words(text).items() if word not in stops}
        return [word for word, stem in words.items() if not self._words & {word, stem}]

    def _tells(self, word: str) -> float:
        """Return what a word tells: -ln of the share of messages that have it, in nats."""
        common = max(commonness(word, name) for name in self._languages)
        return -math.log(common) if common else self._unlisted

    def _tells_more(self, text: str) -> bool:
        rest = self._rest(text)
        if sum(map(self._tells, rest)) >= _MUCH:
            return True
        capitalized = {token for word in _CAPITALIZED.findall(text) for token in _named(word)}
        return any(
            self._tells(word) >= (_NAME if word in capitalized else _RARE)
            or any(map(str.isdigit, word))
            for word in rest
        )

    def _says(self, part: str) -> bool:
        """Return whether a clause adds a word to words of the query."""
        if not self._shared(part):
            return False
        return any(self._tells(word) >= _ORDINARY for word in self._rest(part))


def _named(word: str) -> list[str]:
    return tokens(word) if word[0].isupper() else []


def _statements(sentences: Sequence[str]) -> list[str]:
    """Return the sentences that are no questions, and what precedes a comma in a question."""
    parts = list[str]()
    for sentence in sentences:
        parts += _CLAUSES.split(sentence)[:-1] if asks(sentence) else [sentence]
    return parts


def _spoken(memory: Memory) -> str:
    """Return the text of a turn without the name of its speaker."""
    actor = memory.provenance.actor if memory.provenance else None
    return memory.text.removeprefix(f"{actor}: ") if actor else memory.text


def is_the_query(memory: Memory, query: str) -> bool:
    """Return whether a memory is a turn with the same text as the query."""
    return memory.kind == TURN and same(memory.text, query)
