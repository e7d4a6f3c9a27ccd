"""Rank turns that answer a query's question ahead of turns that only repeat the question.

If a query repeats a question that was stored as a turn, the query and the stored question contain
the same words. A search therefore ranks the stored question above the statement that answers it.
This module corrects the ranking. It classifies each turn by the words that the turn shares with the
query, and by the turn's remaining words. A word of the turn that is not in the query is informative
if it is a name, a number, or a rare word. If many ordinary words remain, they also count as
informative. Each turn gets one of four roles:

    ANSWERS   an informative word remains, or the turn has too few words of the query to repeat it
    SAYS      only ordinary words remain, in a statement such as "My father built it"
    REPEATS   hardly any word remains, as in "Tell me who built it" or the reply "I do not know"
    ASKS      it is a question without information, such as "Do you remember who built it?"

`rank_answers_first_and_count_answers` moves turns with the role ASKS to the end of the ranking. A
turn with the role REPEATS is moved behind the last turn with the role ANSWERS or SAYS. A turn with
the role SAYS is moved behind the next turn with the role ANSWERS. Only a better turn that shares
enough words with the query can cause another turn to be moved behind it.

The ranking is left unchanged if no turn with the role ANSWERS or SAYS shares enough words with the
query. If all turns that share words with the query merely repeat the question, the answer may be a
reply that shares no words with the query. The original ranking already places such a reply after
the question that it answers. The ranking is also left unchanged if neither the query nor any turn
is a question, as in a keyword search.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from perdure.memory.records import TURN, Memory
from perdure.memory.sameness import is_same_normalized_text
from perdure.stores.text import (
    ENGLISH,
    NON_LATIN,
    detect_language,
    ends_with_question,
    estimate_share_of_messages_with_word,
    extract_query_words_with_stems,
    split_words,
    stop_words,
    tokenize,
)

ANSWERS, SAYS, REPEATS, ASKS = range(4)
# Maximum length, in characters, of turns that are classified by their words. Longer turns are
# always classified as ANSWERS.
_MAX_CHARS: Final = 400
# Minimum information content, in nats, for a word to count as rare.
_MIN_RARE_NATS: Final = 9.0
# Minimum information content, in nats, for a capitalized word to count as a name.
_MIN_NAME_NATS: Final = 6.0
# Minimum information content, in nats, for a word to count as adding information to a question.
# Words such as "name" are below this threshold, because they are too common.
_MIN_WORD_NATS: Final = 5.3
# Minimum total information content, in nats, of the words in a turn that are not in the query. A
# turn that reaches this threshold counts as informative.
_MIN_INFORMATIVE_NATS: Final = 15.0
# Information content, in nats, that is assumed for words missing from the word-frequency lists.
_UNLISTED_NATS: Final = 13.0
# Information content, in nats, that is assumed for words missing from the word-frequency lists if
# the query is in a Latin-script language other than English. The value is lower than
# `_UNLISTED_NATS` because the frequency lists of other languages lack many word forms.
_UNLISTED_FOREIGN_NATS: Final = 7.0
# Minimum fraction of a query's total information content that a turn must contain to count as
# repeating the query. The fraction is the information content of the query words that occur in the
# turn, divided by the information content of all query words.
_MIN_QUERY_SHARE: Final = 0.25
# For each role, the minimum ratio for moving a turn A with that role behind a better turn B. The
# ratio is the information content of the query words in B, divided by the information content of
# the query words in A.
_MIN_SHARED_RATIO: Final = {SAYS: 0.4, REPEATS: 0.25}
# Semicolons and colons count as the end of a sentence, too.
_SENTENCE_BREAK: Final = re.compile(r"(?<=[.!?;:\u2026\u061f])\s+|(?<=[\u3002\uff01\uff1f])|\n+")
_CLAUSE_BREAK: Final = re.compile(r"[,\uff0c\u3001\u060c]\s*|\s[\u2013\u2014-]\s")
# Matches a word that is not the first of a sentence. If it is capitalized, it may be a name.
_WORD_WITHIN_SENTENCE: Final = re.compile(r"(?<=[^\s.!?\"'(\u201c] )[^\W\d_]\w*")


class _TurnRole(NamedTuple):
    """The role of a turn with respect to a query, used to rerank the turns."""

    role: int
    # Total information content, in nats, of the words that the turn shares with the query.
    shared_nats: float


def rank_answers_first_and_count_answers(
    ranking: Sequence[tuple[int, Memory]], query: str
) -> tuple[list[tuple[int, Memory]], int]:
    """Rerank memories so that turns that answer the query come before turns that only repeat it.

    Args:
        ranking: Ranks and memories, best first.
        query: The text that the memories were searched with.

    Returns:
        The ranks in ascending order, each with a memory in the new order of the memories, and the
        number of memories with the role ANSWERS.
    """
    classifier = _TurnRoleClassifier(query)
    roles = [classifier.classify_memory_as_question_or_answer(memory) for _, memory in ranking]
    unanswered: set[tuple[str | None, int | None]] = {
        (memory.provenance.thread_id, memory.provenance.position)
        for (_, memory), turn in zip(ranking, roles, strict=True)
        if turn.role != ANSWERS and memory.provenance and memory.provenance.thread_id
    }
    roles = [
        classifier.classify_memory_as_question_or_answer(
            memory, follows_question=_follows_unanswered_message(memory, unanswered)
        )
        if unanswered
        else turn
        for (_, memory), turn in zip(ranking, roles, strict=True)
    ]
    answering = sum(turn.role == ANSWERS for turn in roles)
    minimum = _MIN_QUERY_SHARE * classifier.query_nats
    is_answered = any(turn.role <= SAYS and turn.shared_nats >= minimum for turn in roles)
    is_asked = ends_with_question(query) or any(turn.role == ASKS for turn in roles)
    if answering == len(roles) or not (is_answered and is_asked):
        return list(ranking), answering
    order = sorted(
        range(len(roles)), key=lambda number: _build_memory_sort_key(number, roles, classifier)
    )
    ranks = sorted(rank for rank, _ in ranking)
    moved = [(rank, ranking[number][1]) for rank, number in zip(ranks, order, strict=True)]
    return moved, answering


class _SortKey(NamedTuple):
    """The key by which a memory is sorted.

    Attributes:
        only_asks: Whether the memory has the role ASKS. Such memories come last.
        target: The position of the memory after which this memory is moved, or its own position.
        is_moved: Whether the memory is moved.
        position: The position of the memory in the original ranking.
    """

    only_asks: bool
    target: int
    is_moved: bool
    position: int


def _build_memory_sort_key(
    position: int, roles: Sequence[_TurnRole], classifier: _TurnRoleClassifier
) -> _SortKey:
    """Return the sort key of the memory at index `position` in the ranking.

    When the ranking is sorted by these keys, each memory keeps its position, moves behind a memory
    with a better role, or moves to the end.
    """
    role, shared = roles[position]
    if role == ASKS:
        return _SortKey(only_asks=True, target=position, is_moved=False, position=position)
    if role == ANSWERS:
        return _SortKey(only_asks=False, target=position, is_moved=False, position=position)
    minimum = max(shared * _MIN_SHARED_RATIO[role], _MIN_QUERY_SHARE * classifier.query_nats)
    better = [
        other
        for other in range(position + 1, len(roles))
        if roles[other].role < role and roles[other].shared_nats >= minimum
    ]
    if not better:
        return _SortKey(only_asks=False, target=position, is_moved=False, position=position)
    target = better[0] if role == SAYS else better[-1]
    return _SortKey(only_asks=False, target=target, is_moved=True, position=position)


def _follows_unanswered_message(
    memory: Memory, unanswered_positions: set[tuple[str | None, int | None]]
) -> bool:
    """Return whether a memory's source message comes directly after an unanswered message.

    A message counts as unanswered if its turn repeats words of the query without answering the
    query. `unanswered_positions` contains a (thread id, position in the thread) tuple for each
    unanswered message.
    """
    source = memory.provenance
    if source is None or source.position is None:
        return False
    return (source.thread_id, source.position - 1) in unanswered_positions


class _TurnRoleClassifier:
    """Assigns roles to turns for one query."""

    def __init__(self, query: str) -> None:
        self._query = query
        words = extract_query_words_with_stems(query)
        # The words of the query and their stems, without stop words.
        self._words = {*words, *words.values()}
        self._all_words = set(split_words(query))
        self._languages = dict.fromkeys((detect_language(query), ENGLISH))
        is_foreign = detect_language(query) not in (ENGLISH, NON_LATIN)
        self._unlisted = _UNLISTED_FOREIGN_NATS if is_foreign else _UNLISTED_NATS
        self.query_nats = sum(map(self._compute_information_of_word_in_nats, words))

    def classify_memory_as_question_or_answer(
        self, memory: Memory, *, follows_question: bool = False
    ) -> _TurnRole:
        """Return the role of a memory.

        Pass `follows_question=True` if the memory's message directly follows a message that repeats
        the query or asks the same question. A reply to such a message does not count as an answer
        if it adds no information, as in "I do not know".
        """
        text = _remove_speaker(memory)
        if memory.kind != TURN or not self._words or len(text) > _MAX_CHARS:
            return _TurnRole(ANSWERS, self._sum_nats_of_words_shared_with_query(text))
        shared = self._sum_nats_of_words_shared_with_query(text)
        sentences = [sentence for sentence in _SENTENCE_BREAK.split(text) if sentence.strip()]
        is_question = any(map(ends_with_question, sentences))
        repeats = shared >= _MIN_QUERY_SHARE * self.query_nats or (is_question and shared > 0)
        if not (repeats or follows_question) or self._has_informative_words_beyond_query(text):
            return _TurnRole(ANSWERS, shared)
        if repeats and any(
            map(
                self._shares_query_word_and_adds_informative_word,
                _list_statements_without_questions(sentences),
            )
        ):
            # A turn that contains both a question and an informative clause counts as an answer. A
            # turn without a question gets the role REPEATS if it contains every word of the query,
            # and the role SAYS otherwise. If the query has only one word, the role is always SAYS.
            if is_question:
                return _TurnRole(ANSWERS, shared)
            is_copy = len(self._all_words) > 1 and self._all_words <= set(split_words(text))
            return _TurnRole(REPEATS if is_copy else SAYS, shared)
        return _TurnRole(ASKS if is_question and repeats else REPEATS, shared)

    def _sum_nats_of_words_shared_with_query(self, text: str) -> float:
        """Return the total information content, in nats, of the query words in a text."""
        text_words = {*tokenize(text[:_MAX_CHARS])}
        words = extract_query_words_with_stems(self._query)
        return sum(
            self._compute_information_of_word_in_nats(word)
            for word, stem in words.items()
            if text_words & {word, stem}
        )

    def _list_words_not_in_query(self, text: str) -> list[str]:
        """Return the words of a text, excluding stop words and words of the query."""
        stops = frozenset[str]().union(*map(stop_words, self._languages))
        words = {
            word: stem
            for word, stem in extract_query_words_with_stems(text).items()
            if word not in stops
        }
        return [word for word, stem in words.items() if not self._words & {word, stem}]

    def _compute_information_of_word_in_nats(self, word: str) -> float:
        """Return a word's information content, in nats.

        The information content of a word is `-ln(p)`, where p is the fraction of messages that
        contain the word.
        """
        share = max(estimate_share_of_messages_with_word(word, name) for name in self._languages)
        return -math.log(share) if share else self._unlisted

    def _has_informative_words_beyond_query(self, text: str) -> bool:
        """Return whether a text contains informative words that are not in the query."""
        rest = self._list_words_not_in_query(text)
        if sum(map(self._compute_information_of_word_in_nats, rest)) >= _MIN_INFORMATIVE_NATS:
            return True
        capitalized = {
            token
            for word in _WORD_WITHIN_SENTENCE.findall(text)
            for token in _tokenize_if_capitalized(word)
        }
        return any(
            self._compute_information_of_word_in_nats(word)
            >= (_MIN_NAME_NATS if word in capitalized else _MIN_RARE_NATS)
            or any(map(str.isdigit, word))
            for word in rest
        )

    def _shares_query_word_and_adds_informative_word(self, clause: str) -> bool:
        """Return whether a clause shares a word with the query and adds an informative word.

        Words that occur in the query do not count as informative.
        """
        if not self._sum_nats_of_words_shared_with_query(clause):
            return False
        return any(
            self._compute_information_of_word_in_nats(word) >= _MIN_WORD_NATS
            for word in self._list_words_not_in_query(clause)
        )


def _tokenize_if_capitalized(word: str) -> list[str]:
    """Return the tokens of a capitalized word, or an empty list for any other word."""
    return tokenize(word) if word[0].isupper() else []


def _list_statements_without_questions(sentences: Sequence[str]) -> list[str]:
    """Return all statements, including clauses that precede a question in the same sentence.

    If a question has several clauses, every clause except the last counts as a statement.
    """
    parts = list[str]()
    for sentence in sentences:
        parts += _CLAUSE_BREAK.split(sentence)[:-1] if ends_with_question(sentence) else [sentence]
    return parts


def _remove_speaker(memory: Memory) -> str:
    """Return a turn's text without the speaker's name."""
    actor = memory.provenance.actor if memory.provenance else None
    return memory.text.removeprefix(f"{actor}: ") if actor else memory.text


def is_same_as_query(memory: Memory, query: str) -> bool:
    """Return whether a memory is a turn (its `kind` is "turn") with the same text as the query."""
    return memory.kind == TURN and is_same_normalized_text(memory.text, query)
