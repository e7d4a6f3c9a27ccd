"""Rank turns that answer a query's question ahead of turns that only repeat the question.

A query can repeat a question that was stored as a turn. A search ranks the stored question above
its answer, because the question matches the query's words. This module corrects the ranking. Each
turn is classified as an answer, a statement or a question. The classification compares the words of
the turn with the words of the query. A word that occurs in a turn but not in the query is
informative if it is a name, a number, or a rare word. Among the words that a turn adds to the words
of the query, a single common word does not count as informative. If a turn contains many ordinary
words that are not in the query, however, these words together count as informative. Each turn gets
one of four roles:

    ANSWERS   an informative word remains, or the turn has too few words of the query to repeat it
    SAYS      only ordinary words remain, in a statement such as "My father built it"
    REPEATS   hardly any word remains, as in "Tell me who built it" or the reply "I do not know"
    ASKS      it is a question without information, such as "Do you remember who built it?"

`rank_answers_first_and_count_answers` moves turns with the role ASKS to the end of the ranking. A
turn with the role REPEATS is ranked below all turns with the roles ANSWERS and SAYS. A turn with
the role SAYS is ranked below the next turn with the role ANSWERS. A turn that shares too few words
with the query does not lower the rank of other turns.

If all turns that resemble the query only repeat it or are questions, the search's ranking stays
unchanged. The message that answers a question may share no words with the question. If neither the
query nor any turn is a question, the search's ranking stays unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from perdure.memory.long_term.records import TURN, Memory
from perdure.stores.search.text import (
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
from perdure.stores.search.text_equivalence import is_same_normalized_text

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
# Minimum total information content, in nats, of the words in a turn that are missing from the
# query. Words in the turn that also occur in the query are not counted. A turn that reaches this
# minimum counts as informative.
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
# A turn A that answers the query less well than another turn B is moved behind B only if B contains
# enough words of the query. The information content of the query words in B, divided by that of the
# query words in A, must be at least this ratio. The ratio depends on the role of A.
_MIN_SHARED_RATIO: Final = {SAYS: 0.4, REPEATS: 0.25}
# A semicolon or a colon ends a sentence.
_SENTENCE_BREAK: Final = re.compile(r"(?<=[.!?;:\u2026\u061f])\s+|(?<=[\u3002\uff01\uff1f])|\n+")
_CLAUSE_BREAK: Final = re.compile(r"[,\uff0c\u3001\u060c]\s*|\s[\u2013\u2014-]\s")
# Matches a word that does not begin a sentence. If the word is capitalized, it may be a name.
_WORD_WITHIN_SENTENCE: Final = re.compile(r"(?<=[^\s.!?\"'(\u201c] )[^\W\d_]\w*")


class _TurnRole(NamedTuple):
    """Describes how a turn relates to a query, for example that the turn answers the query.

    The turns in a search result are reranked by their roles, so that turns that answer the query
    come first.
    """

    role: int
    # Total information content, in nats, of the words that the turn shares with the query.
    shared_nats: float


def rank_answers_first_and_count_answers(
    ranking: Sequence[tuple[int, Memory]], query: str
) -> tuple[list[tuple[int, Memory]], int]:
    """Rank memories that answer a query before memories that only repeat the query.

    For example, a memory repeats the query if it stores an earlier message with the same question.

    Args:
        ranking: Ranks and memories, best first.
        query: The text that the memories were searched with.

    Returns:
        The ranks in ascending order, each with a memory in the new order of the memories, and the
        number of memories with the role ANSWERS.
    """
    if all(memory.kind != TURN for _, memory in ranking):
        return list(ranking), len(ranking)
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
        range(len(roles)),
        key=lambda number: _build_sort_key_of_ranked_memory(number, roles, classifier),
    )
    ranks = sorted(rank for rank, _ in ranking)
    return [
        (rank, ranking[number][1]) for rank, number in zip(ranks, order, strict=True)
    ], answering


def _build_sort_key_of_ranked_memory(
    position: int, roles: Sequence[_TurnRole], classifier: _TurnRoleClassifier
) -> tuple[bool, int, bool, int]:
    """Return the sort key of the memory at index `position` in the ranking.

    Sorting by these keys moves memories with the role ASKS to the end. A memory with the role SAYS
    or REPEATS can be moved behind a lower-ranked memory whose role is better. The roles, from best
    to worst, are ANSWERS, SAYS, REPEATS and ASKS. Memories that are not moved keep their order.

    Returns:
        Whether the memory has the role ASKS, the position of the memory after which this memory is
        moved (or its own position), whether the memory is moved, and its own position.
    """
    role, shared = roles[position]
    better: list[int] = []
    if role in _MIN_SHARED_RATIO:
        minimum = max(shared * _MIN_SHARED_RATIO[role], _MIN_QUERY_SHARE * classifier.query_nats)
        better = [
            other
            for other in range(position + 1, len(roles))
            if roles[other].role < role and roles[other].shared_nats >= minimum
        ]
    target = (better[0] if role == SAYS else better[-1]) if better else position
    return role == ASKS, target, bool(better), position


def _follows_unanswered_message(
    memory: Memory, unanswered_positions: set[tuple[str | None, int | None]]
) -> bool:
    """Return whether a memory's source message directly follows an unanswered question.

    If a message repeats words of the query and contains no answer to the query, the message is
    treated as an unanswered question. `unanswered_positions` contains a (thread id, position in the
    thread) tuple for each unanswered message.
    """
    source = memory.provenance
    if source is None or source.position is None:
        return False
    return (source.thread_id, source.position - 1) in unanswered_positions


class _TurnRoleClassifier:
    """Assigns roles to turns for one query."""

    def __init__(self, query: str) -> None:
        # the stem of each word of the query, without stop words
        self._stems = extract_query_words_with_stems(query)
        self._words_and_stems = {*self._stems, *self._stems.values()}
        self._all_words = set(split_words(query))
        language = detect_language(query)
        self._languages = dict.fromkeys((language, ENGLISH))
        is_foreign = language not in (ENGLISH, NON_LATIN)
        self._unlisted = _UNLISTED_FOREIGN_NATS if is_foreign else _UNLISTED_NATS
        # the information content of each word of the query, in nats
        self._nats = {word: self._compute_information_of_word_in_nats(word) for word in self._stems}
        self.query_nats = sum(self._nats.values())

    def classify_memory_as_question_or_answer(
        self, memory: Memory, *, follows_question: bool = False
    ) -> _TurnRole:
        """Return the role of a memory.

        Pass `follows_question=True` if the memory's source message comes directly after an
        unanswered message. An unanswered message is a message that repeats words of the query and
        does not answer the query. A reply to a question does not count as an answer if it adds no
        information, as in "I do not know".
        """
        text = _remove_speaker(memory)
        shared = self._sum_nats_of_words_shared_with_query(text)
        if memory.kind != TURN or not self._stems or len(text) > _MAX_CHARS:
            return _TurnRole(ANSWERS, shared)
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
            # The turn repeats words of the query, and one of its clauses adds information to them.
            # If the turn also contains a question, its role is ANSWERS. If the turn contains no
            # question, its role is REPEATS if the query has several words and the turn contains all
            # of them. Otherwise, its role is SAYS.
            if is_question:
                return _TurnRole(ANSWERS, shared)
            is_copy = len(self._all_words) > 1 and self._all_words <= set(split_words(text))
            return _TurnRole(REPEATS if is_copy else SAYS, shared)
        return _TurnRole(ASKS if is_question and repeats else REPEATS, shared)

    def _sum_nats_of_words_shared_with_query(self, text: str) -> float:
        """Return the total information content, in nats, of the query words in a text."""
        text_words = {*tokenize(text[:_MAX_CHARS])}
        return sum(
            nats for word, nats in self._nats.items() if text_words & {word, self._stems[word]}
        )

    def _list_words_not_in_query(self, text: str) -> list[str]:
        """Return the words of a text, excluding stop words and words of the query."""
        stops = frozenset[str]().union(*map(stop_words, self._languages))
        return [
            word
            for word, stem in extract_query_words_with_stems(text).items()
            if word not in stops and not self._words_and_stems & {word, stem}
        ]

    def _compute_information_of_word_in_nats(self, word: str) -> float:
        """Return a word's information content, in nats.

        The information content of a word is `-ln(p)`, where p is the fraction of messages that
        contain the word.
        """
        share = max(estimate_share_of_messages_with_word(word, name) for name in self._languages)
        return -math.log(share) if share else self._unlisted

    def _has_informative_words_beyond_query(self, text: str) -> bool:
        """Return whether a text has informative words, such as names, that the query lacks."""
        rest = self._list_words_not_in_query(text)
        if sum(map(self._compute_information_of_word_in_nats, rest)) >= _MIN_INFORMATIVE_NATS:
            return True
        capitalized = {
            token
            for word in _WORD_WITHIN_SENTENCE.findall(text)
            if word[0].isupper()
            for token in tokenize(word)
        }
        return any(
            self._compute_information_of_word_in_nats(word)
            >= (_MIN_NAME_NATS if word in capitalized else _MIN_RARE_NATS)
            or any(map(str.isdigit, word))
            for word in rest
        )

    def _shares_query_word_and_adds_informative_word(self, clause: str) -> bool:
        """Return whether a clause shares a word with the query and also contains informative words.

        A clause adds information if it contains an informative word, which is a word that is not in
        the query and is not too common.

        Words that occur in the query do not count as informative, because they add no information
        to the query.
        """
        if not self._sum_nats_of_words_shared_with_query(clause):
            return False
        return any(
            self._compute_information_of_word_in_nats(word) >= _MIN_WORD_NATS
            for word in self._list_words_not_in_query(clause)
        )


def _list_statements_without_questions(sentences: Sequence[str]) -> list[str]:
    """Return the sentences and clauses in `sentences` that are not questions.

    If a sentence ends with a question, only the last clause is treated as the question. If a
    sentence ends with a question, all clauses before the last clause are returned as statements.
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
