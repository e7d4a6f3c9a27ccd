"""Search with a query: the pipeline from the query text to ranked items."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Any, Final

import numpy as np

from perdure.effects import Effect, run_operation
from perdure.errors import ConfigurationError, EmbeddingFailed
from perdure.storage.flow import Flow, fetch_rows
from perdure.stores.base import FoundItem, Mode, Period, RankExplanation
from perdure.stores.index import Ints
from perdure.stores.indexes import (
    MIN_NAME_SHARE,
    USER_WORD,
    CandidatePool,
    QueryTerms,
    SnapshotOutdated,
)
from perdure.stores.namespaces import prefix_range
from perdure.stores.parts import StoreParts
from perdure.stores.ranking import RankedRows, Term, Weights, is_word_in_nearly_all_rows, rank_rows
from perdure.stores.reading import Selection, to_microseconds
from perdure.stores.text import (
    STOP_WORDS,
    detect_language,
    estimate_share_of_messages_with_word,
    extract_query_words_with_stems,
    find_synonyms,
    split_words,
    tokenize,
)
from perdure.stores.values import check_number
from perdure.stores.vectors import Floats

_LOG = logging.getLogger("perdure")
MODES: Final = ("hybrid", "text", "semantic")
# Maximum limit and offset of a page. Larger values are reduced to this maximum, because SQLite
# integers have 64 bits.
_MAX_PAGE_ROWS: Final = 1 << 60
_MAX_FLOAT: Final = sys.float_info.max
# maximum number of characters of a query that are used; the rest is ignored
_MAX_QUERY_LENGTH: Final = 20_000
# maximum number of distinct query words that are used; further words are ignored
_MAX_QUERY_WORDS: Final = 512
# maximum number of rows read by one statement
_ROWS_PER_STATEMENT: Final = 256
# for each query word, its stem, and its synonyms with their similarities
_QueryWords = dict[str, tuple[str, list[tuple[str, float]]]]
# maximum fraction of messages in which a name may occur; a more frequent word is not treated as a
# name
_MAX_NAME_FREQUENCY: Final = 0.003
# pronouns that, in a query, may refer to the person whom the searched rows are about
_PERSONAL_PRONOUNS: Final = frozenset(
    (
        *("i", "me", "my", "mine", "myself", "you", "your", "yours"),
        *("he", "him", "his", "she", "her", "hers"),
    )
)
# Maximum number of speakers. Rows with more speakers are assumed not to be from a conversation, so
# the search does not check whether the query mentions a speaker by name.
_MAX_NAMED_ACTORS: Final = 1_000
# Speaker names that are roles rather than names of people. The word "user" in a query, for example,
# seldom refers to the speaker whose name is "user".
_ROLE_NAMES: Final = frozenset(
    {"user", "assistant", "human", "ai", "bot", "agent", "system", "tool", "model", "function"}
)


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """A query with its options."""

    text: str
    mode: Mode = "hybrid"
    # whether a row's score also depends on its neighbours, its thread, its recency and `during`
    context: bool = True
    # whether each result includes a breakdown of its score
    explain: bool = False
    weights: Weights = field(default_factory=Weights)
    # The period that the query asks about: its start (inclusive) and end (exclusive) as Unix
    # timestamps in seconds. Rows with messages from this period score higher.
    during: tuple[float, float] | None = None
    min_score: float | None = None  # lowest score of a result
    # the query's vector; if it is None although `is_embedded` is true, the search uses keywords
    # only
    vector: Floats | None = None
    is_embedded: bool = False


def build_query(
    text: Any,
    mode: Any = "hybrid",
    context: bool = True,
    explain: bool = False,
    weights: Weights | None = None,
    during: Period | None = None,
    min_score: float | None = None,
) -> SearchQuery | None:
    """Validate search arguments, and return the query, or None if its text is empty or blank.

    Raises:
        ConfigurationError: An argument is wrong.
    """
    if mode not in MODES:
        raise ConfigurationError(f"the argument 'mode' is {mode!r}; expected one of {MODES}")
    span = None if during is None else _check_period_and_convert_to_seconds(during)
    if min_score is not None:
        check_number(
            "min_score",
            min_score,
            "a number, or None",
            minimum=-_MAX_FLOAT,
            exclusive_maximum=_MAX_FLOAT,
        )
    if text is None:
        return None
    if not isinstance(text, str):
        raise ConfigurationError(f"the argument 'query' is {text!r}; expected text")
    if not text.strip():
        return None
    words = text.encode("utf-8", "replace").decode()
    return SearchQuery(words, mode, context, explain, weights or Weights(), span, min_score)


def _check_period_and_convert_to_seconds(during: Any) -> tuple[float, float]:
    """Validate a time range, and return its start and end as Unix timestamps in seconds."""
    if not isinstance(during, tuple | list) or len(during) != 2:
        raise ConfigurationError(
            f"the argument 'during' is {during!r:.80}; expected two datetimes, the start and the "
            "end of the period"
        )
    start, end = map(to_microseconds, during)
    if start >= end:
        raise ConfigurationError(
            f"the argument 'during' ends at {during[1]}, which is not after its start, "
            f"{during[0]}; pass the earlier datetime first"
        )
    return start / 1e6, end / 1e6


def check_limit_and_offset(limit: Any, offset: Any) -> tuple[int, int]:
    """Validate the limit and offset of a search, and return them."""
    for name, number in (("limit", limit), ("offset", offset)):
        check_number(name, number, "an integer, zero or more", integer=True)
    return min(limit, _MAX_PAGE_ROWS), min(offset, _MAX_PAGE_ROWS)


class Searcher:
    """Runs the searches of a store."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._indexes, self._embeddings = parts.indexes, parts.preparer.embeddings
        # keyed hash function for words, or None if words are not hashed
        self._mask = parts.preparer.mask_word

    def search(
        self,
        selection: Selection,
        query: SearchQuery | None,
        limit: int,
        offset: int,
        refresh_ttl: bool | None,
    ) -> list[FoundItem]:
        """Return the best results for a query.

        If `query` is None, return one page of the selected items.

        Results with equal scores are ordered by age, newest first.

        Args:
            selection: The items to search.
            query: The query, or None.
            limit: The maximum number of items.
            offset: The number of items to skip.
            refresh_ttl: Whether to restart the time to live of the items; None means the default.
        """
        parts, page = self._parts, check_limit_and_offset(limit, offset)
        # A page of items is normally read by one SQL statement, so no snapshot is needed. If the
        # filter could use a database index, additional statements choose the index, and all
        # statements must read the same snapshot.
        if query is None:
            by_index = selection.filter is not None and parts.reader.values.supports_indexes
            pairs = parts.database.read(
                lambda: parts.reader.read_page(selection, *page), snapshot=by_index
            )
            items = [FoundItem(item) for _, item in pairs]
        else:
            query = self._add_query_vector_blocking(query, selection)
            words, terms = self._build_query_words_and_terms(query)
            # Each iteration reads from a new snapshot.
            while True:
                with suppress(SnapshotOutdated):
                    items = parts.database.read(
                        lambda: self._find_best_items(selection, query, words, terms, *page)
                    )
                    break
        if selection.as_of is None:
            parts.restart_ttls_of_read_items(items, refresh_ttl)
        return items

    def explain_rank_of_item(
        self, selection: Selection, query: SearchQuery | None, path: bytes, key: str
    ) -> RankExplanation:
        """Return an explanation of an item's rank for a query."""
        if query is None:
            raise ConfigurationError("why_not needs a query; pass text that is not blank as query=")
        read, reader = self._parts.database.read, self._parts.reader
        if not path.startswith(selection.prefix):
            return RankExplanation("the item is not under the prefix")
        row = read(
            lambda: reader.read_row(path, key, selection.now, selection.as_of), snapshot=False
        )
        if row is None:
            return RankExplanation("no such item exists")
        if reader.decode_item_if_matching(row, selection) is None:
            return RankExplanation("the filter excludes the item")
        query = self._add_query_vector_blocking(query, selection)
        words, terms = self._build_query_words_and_terms(query)
        while True:
            with suppress(SnapshotOutdated):
                pool = read(lambda: self._indexes.load_candidate_pool(selection, terms))
                break
        ranked = self._rank_candidates(pool, query, words)
        row_index = np.flatnonzero(pool.ids == row[0])
        if not len(row_index):
            return RankExplanation("the item was put with index=False, or has no text to search")
        if ranked is None:
            return RankExplanation(
                "no item has a word of the query, and the item has no vector to compare"
            )
        better_count = int((ranked.row_sort_keys > ranked.row_sort_keys[row_index[0]]).sum())
        reason = f"{better_count} of {len(pool)} items score higher"
        return RankExplanation(
            reason, better_count + 1, ranked.get_score_parts_of_row(row_index[0])
        )

    def _find_best_items(
        self,
        selection: Selection,
        query: SearchQuery,
        words: _QueryWords,
        terms: QueryTerms,
        limit: int,
        offset: int,
    ) -> Flow[list[FoundItem]]:
        """Return the items of the best rows. All are read in the same snapshot."""
        pool = yield from self._indexes.load_candidate_pool(selection, terms)
        ranked = self._rank_candidates(pool, query, words)
        if ranked is None:
            return []
        if pool.cosines is not None and selection.as_of is None:
            self._warn_about_missing_vectors(pool.cosines)
        min_score = -math.inf if query.min_score is None else query.min_score
        has_vector_scores = "vector" in ranked.parts

        def is_result(row_index: int) -> bool:
            """Return whether the score of a row is high enough for it to be a search result."""
            score = ranked.scores[row_index]
            return bool(score >= min_score and (score > 0 or has_vector_scores))

        best = takewhile(
            is_result,
            _iter_rows_by_score(ranked.row_sort_keys, pool.ids, offset + limit),
        )
        row_indexes = islice(best, offset, offset + limit)
        results: list[FoundItem] = []
        while batch := list(islice(row_indexes, _ROWS_PER_STATEMENT)):
            ids = pool.ids[batch].tolist()
            if selection.as_of is None:
                rows = yield self._parts.sql("items_by_ids", json.dumps(ids), selection.now)
            else:
                rows = yield self._parts.sql("versions_by_ids", json.dumps(ids))
            items = {row[0]: self._parts.reader.records.decode_item(row) for row in rows}
            for row_index, number in zip(batch, ids, strict=True):
                parts = ranked.get_score_parts_of_row(row_index) if query.explain else None
                results.append(FoundItem(items[number], float(ranked.scores[row_index]), parts))
        return results

    # -- words and scores

    def _build_query_words_and_terms(self, query: SearchQuery) -> tuple[_QueryWords, QueryTerms]:
        """Return the words of a query with their synonyms, and the terms to look up in the indexes.

        The first element of the result maps each word to its stem and its synonyms.
        """
        model, vector = self._embeddings.model, query.vector
        by_words = query.mode != "semantic"
        # Synonyms are looked up only if the search also compares vectors, and not if the index
        # contains keyed hashes instead of words.
        uses_synonyms = by_words and vector is not None and self._mask is None
        query_words = islice(
            extract_query_words_with_stems(query.text[:_MAX_QUERY_LENGTH]).items(), _MAX_QUERY_WORDS
        )
        words: _QueryWords = {
            word: (stem, find_synonyms(word) if uses_synonyms else []) for word, stem in query_words
        }
        return words, QueryTerms(
            {
                self._mask_word(word): [self._mask_word(stem), *(other for other, _ in synonyms)]
                for word, (stem, synonyms) in words.items()
                if by_words
            },
            vector,
            None if vector is None or model is None else model.with_dims(len(vector)),
            corrects_words=self._mask is None,
            is_personal=by_words and self._mask is None,
        )

    def _rank_candidates(
        self, pool: CandidatePool, query: SearchQuery, words: _QueryWords
    ) -> RankedRows | None:
        """Score the rows of a pool.

        Return None if no row contains a query word and no row has a vector that can be compared
        with the query.
        """
        if not len(pool):
            return None
        cosines = pool.cosines
        actors, names = _find_mentioned_actor_codes_and_name_words(pool, words)
        subjects = set[str]() if self._mask else _find_words_naming_main_person(pool) - names
        terms, language = [], detect_language(query.text[:_MAX_QUERY_LENGTH])
        for word, (stem, all_synonyms) in words.items() if query.mode != "semantic" else ():
            others = [] if word in names else all_synonyms
            synonyms = [(pool.terms[other][0], n) for other, n in others if other in pool.terms]
            hits = pool.find_word_hits(self._mask_word(word), self._mask_word(stem))
            frequency, is_subject = (
                estimate_share_of_messages_with_word(stem, language),
                not subjects.isdisjoint({word, stem}),
            )
            terms.append(Term(*hits, synonyms, frequency, word in names, is_subject))
        has_known_word = any(len(term.rows) or term.synonyms for term in terms)
        if cosines is None and not has_known_word:
            return None
        candidates = pool.candidates
        row_contexts, is_in_period = None, None
        if query.context:
            row_contexts = candidates.row_contexts
            if query.during is not None:
                sent_at = candidates.rows["at"]
                is_in_period = (sent_at >= query.during[0]) & (sent_at < query.during[1])
        is_by_named_actor = np.isin(candidates.rows["actor"], actors) if actors else None
        is_vector_only = not terms or (not has_known_word and len(pool) == 1)
        if (
            cosines is not None
            and is_vector_only
            and row_contexts is None
            and is_by_named_actor is None
            and is_in_period is None
        ):
            # If only vectors contribute to the scores, rank the rows by cosine similarity.
            return RankedRows.from_cosines(cosines)
        mentions_subject = any(
            term.names_subject for term in terms
        ) or not _PERSONAL_PRONOUNS.isdisjoint(split_words(query.text[:_MAX_QUERY_LENGTH]))
        ranked = rank_rows(
            candidates.lengths,
            is_personal=bool(subjects) and mentions_subject,
            terms=terms,
            cosines=cosines,
            row_contexts=row_contexts,
            actor=is_by_named_actor,
            date=is_in_period,
            weights=query.weights,
            calibration=pool.separation.vector_weight_calibration,
        ).with_scores_comparable_between_searches()
        if cosines is not None and not terms:
            ranked = ranked.with_rows_lacking_vectors_last(cosines)
        return ranked

    def _mask_word(self, word: str) -> str:
        """Return the hash of a word if the store indexes hashed words, or else the word itself."""
        return word if self._mask is None else str(self._mask(word))

    def _warn_about_missing_vectors(self, cosines: Floats) -> None:
        """Log a warning if items lack vectors, because search results do not reveal this.

        The warning is logged only once per store.
        """
        missing_count = 0 if self._indexes.warned_lacking else int(np.isnan(cosines).sum())
        if missing_count:
            self._indexes.warned_lacking = True
            _LOG.warning(
                "%d of %d items can be found only by their words, because they have no vectors "
                "from the store's embedding model. Either the embedder failed, or a reembed() "
                "was interrupted. Unless reembed() is running now, call reembed() or run "
                "'perdure store reembed'",
                missing_count,
                len(cosines),
            )

    # -- the vector of a query

    @property
    def awaits_vectors(self) -> bool:
        """Whether query vectors are computed by a model that may run outside this process."""
        return self._embeddings.model is not None and not self._embeddings.in_process

    async def add_query_vector(
        self, query: SearchQuery | None, selection: Selection
    ) -> SearchQuery | None:
        """Compute the vector of a query if the model may run outside this process.

        Return a copy of the query that contains the vector. If no vector could be computed, the
        vector in the copy is None, and the search uses keywords only.

        The model is awaited in the caller's event loop, so that no thread of the reading pool is
        blocked.
        """
        if query is None or not self.awaits_vectors:
            return query
        vector = await self._parts.runner.arun(self._embed_query(query, selection))
        return replace(query, vector=vector, is_embedded=True)

    def _add_query_vector_blocking(self, query: SearchQuery, selection: Selection) -> SearchQuery:
        """Return the query with its vector.

        If the query's vector has not been computed yet, it is computed in the caller's OS thread.
        """
        if query.is_embedded:
            return query
        # Open the database before embedding the query, because the database records which model
        # computed its vectors.
        self._parts.database.connect()
        return replace(
            query, vector=run_operation(self._embed_query(query, selection)), is_embedded=True
        )

    async def _embed_query(self, query: SearchQuery, selection: Selection) -> Floats | None:
        """Return the vector of a query, or None if the search uses keywords only.

        The package's embedder returns a zero vector for a query that is not in English or whose
        words it does not know. In this case, a hybrid search uses keywords only, because a zero
        vector is not similar to any vector.
        """
        if query.mode == "text":
            return None
        embedder, runner = self._embeddings.embedder, self._parts.runner
        if embedder is None:
            if query.mode == "semantic":
                raise ConfigurationError(
                    "mode='semantic' needs an embedder; open the store with index=, or use "
                    "mode='text'"
                )
            return None
        text = query.text[:_MAX_QUERY_LENGTH]
        try:
            if self._embeddings.in_process:
                vector = embedder.embed_query(text)
                return vector if query.mode == "semantic" or vector.any() else None
            # If no namespace has items to search, the model is not called, because a call may cost
            # money.
            if selection.as_of is None:
                sql, bounds = self._parts.sql["namespaces_under"], prefix_range(selection.prefix)
                if not await runner.run_read_flow(lambda: fetch_rows(sql, *bounds)):
                    return None
            return await Effect(
                lambda: embedder.embed_query(text), lambda: embedder.aembed_query(text)
            )
        except EmbeddingFailed as exc:
            if query.mode == "semantic":
                raise
            _LOG.warning("the search uses only words, because the query has no vector: %s", exc)
            return None


def _find_mentioned_actor_codes_and_name_words(
    pool: CandidatePool, words: Collection[str]
) -> tuple[list[int], set[str]]:
    """Return the speakers whom the query mentions, as indexes, and all words in their names.

    Each speaker is returned as an index into `pool.actors`. Speakers whose name is only a role,
    such as "user", are never returned. If there are more than `_MAX_NAMED_ACTORS` speakers, none
    are returned.
    """
    actor = pool.candidates.rows["actor"]
    codes = np.flatnonzero(np.bincount(actor[actor >= 0])).tolist()
    query_words, actors, names = set(words), list[int](), set[str]()
    for code in codes if len(codes) <= _MAX_NAMED_ACTORS else ():
        name = pool.actors[code]
        name_words = () if name.casefold() in _ROLE_NAMES else set(tokenize(name)) - STOP_WORDS
        if not query_words.isdisjoint(name_words):
            actors.append(code)
            names.update(name_words)
    return actors, names


def _find_words_naming_main_person(pool: CandidatePool) -> set[str]:
    """Return the words that refer to the one person that nearly all memories are about.

    A model that extracts memories may refer to the same person both by name and as the user, as in
    "Ann likes figs" and "The user likes figs". The result is empty if there is no such person. It
    is also empty for messages from a conversation with an assistant, because such messages are not
    all about one person.
    """
    row_count, user_hits = len(pool), pool.terms.get(USER_WORD)
    actor = pool.candidates.rows["actor"]
    speakers = {pool.actors[code].casefold() for code in np.unique(actor[actor >= 0]).tolist()}
    if not speakers.isdisjoint(_ROLE_NAMES - {"user", "human"}):
        return set()
    user_rows = np.empty(0, np.int64) if user_hits is None else user_hits[0]
    if is_word_in_nearly_all_rows(len(user_rows), row_count):
        return {USER_WORD}
    subjects = set[str]()
    for word, (rows, _) in pool.terms.items():
        if (
            len(rows) < MIN_NAME_SHARE * row_count
            or word == USER_WORD
            or estimate_share_of_messages_with_word(word) > _MAX_NAME_FREQUENCY
        ):
            continue
        if is_word_in_nearly_all_rows(len(np.union1d(rows, user_rows)), row_count):
            subjects |= {word, USER_WORD}
    return subjects


def _iter_rows_by_score(scores: Floats, ids: Ints, count: int) -> Iterator[int]:
    """Yield all row indexes in descending order of score; ties are sorted by id, highest first.

    To save time, only the best `count` rows and any rows tied with the last of them are sorted at
    first. The remaining rows are sorted only if the caller continues iterating after these rows.
    """
    groups = [np.arange(len(scores))]
    if 0 < count < len(scores):
        threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
        groups = [np.flatnonzero(scores >= threshold), np.flatnonzero(scores < threshold)]
    for rows in groups:
        yield from rows[np.lexsort((-ids[rows], -scores[rows]))].tolist()
