"""Search with a query, from the query text to ranked items, or list items without a query."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np

from perdure.effects import Effect, run_operation
from perdure.errors import ConfigurationError, EmbeddingFailed
from perdure.storage.flow import Flow, fetch_rows
from perdure.stores.base import FoundItem, Mode, Period, RankExplanation
from perdure.stores.item_reader import Selection, to_microseconds
from perdure.stores.namespaces import prefix_range
from perdure.stores.search.index_cache import (
    MIN_NAME_SHARE,
    USER_WORD,
    CandidatePool,
    QueryTerms,
    SnapshotOutdated,
)
from perdure.stores.search.namespace_index import Ints
from perdure.stores.search.ranking import (
    RankedRows,
    Term,
    Weights,
    is_word_in_nearly_all_rows,
    rank_rows,
)
from perdure.stores.search.text import (
    STOP_WORDS,
    detect_language,
    estimate_share_of_messages_with_word,
    extract_query_words_with_stems,
    find_synonyms,
    split_words,
    tokenize,
)
from perdure.stores.search.vectors import Floats
from perdure.stores.store_parts import StoreParts
from perdure.stores.values import check_number

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
# A dict that maps each query word to its stem and to a list of synonyms. Each synonym is stored
# with its similarity to the query word.
_QueryWords = dict[str, tuple[str, list[tuple[str, float]]]]
# maximum fraction of messages in which a name may occur; a more frequent word is not treated as a
# name
_MAX_NAME_FREQUENCY: Final = 0.003
# Personal and possessive pronouns. If nearly all searched rows describe the same person, a query
# that contains one of these pronouns counts as a query about this person.
_PERSONAL_PRONOUNS: Final = frozenset(
    (
        *("i", "me", "my", "mine", "myself", "you", "your", "yours"),
        *("he", "him", "his", "she", "her", "hers"),
    )
)
# Maximum number of speakers in a conversation. If the searched rows have more speakers, the search
# ignores speaker names in the query, because the rows are probably not from a conversation.
_MAX_NAMED_ACTORS: Final = 1_000
# Speaker names that are roles rather than names of people. The word "user" in a query, for example,
# seldom refers to the speaker whose name is "user".
_ROLE_NAMES: Final = frozenset(
    {"user", "assistant", "human", "ai", "bot", "agent", "system", "tool", "model", "function"}
)
_ASSISTANT_ROLE_NAMES: Final = _ROLE_NAMES - {"user", "human"}


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """A query with its options."""

    text: str
    mode: Mode = "hybrid"
    # whether a row's score also takes into account its neighbours, its thread, its recency and the
    # period `during`
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
        raise ConfigurationError(f"the argument 'query' is {text!r}; expected a string")
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
        check_number(name, number, "an integer of 0 or more", integer=True)
    return min(limit, _MAX_PAGE_ROWS), min(offset, _MAX_PAGE_ROWS)


class Searcher:
    """Runs the searches of a store."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._indexes, self._embeddings = parts.indexes, parts.preparer.embeddings
        # whether query vectors are computed by a model that may run outside this process
        self.awaits_vectors = self._embeddings.model is not None and not self._embeddings.in_process
        # Whether the index contains keyed hashes instead of words, and the function that returns
        # the form of a word in the index.
        self._hashes_words = parts.preparer.mask_word is not None
        self._mask_word: Callable[[str], str] = parts.preparer.mask_word or str

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
        limit, offset = check_limit_and_offset(limit, offset)
        if query is None:
            items = self._list_items(selection, limit, offset)
        else:
            words, terms = self._analyse_query(query, selection)
            find_items = partial(
                self._find_best_items, selection, query, words, terms, limit, offset
            )
            # If the database snapshot proves to be older than the index in memory, search again on
            # a new snapshot.
            while True:
                with suppress(SnapshotOutdated):
                    items = self._parts.database.read(find_items)
                    break
        if selection.as_of is None:
            self._parts.restart_ttls_of_read_items(items, refresh_ttl)
        return items

    def explain_rank_of_item(
        self, selection: Selection, query: SearchQuery | None, path: bytes, key: str
    ) -> RankExplanation:
        """Return an explanation of an item's rank for a query."""
        if query is None:
            raise ConfigurationError("why_not requires a query; pass a non-blank string as query=")
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
        words, terms = self._analyse_query(query, selection)
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

    def _list_items(self, selection: Selection, limit: int, offset: int) -> list[FoundItem]:
        """Return one page of the selected items, for a search without a query."""
        reader = self._parts.reader
        # One SQL statement normally reads a page of items, so no snapshot is needed. If the filter
        # might use a database index, additional SQL statements are executed to decide whether to
        # use an index. In this case, all statements must read the same snapshot.
        needs_snapshot = selection.filter is not None and reader.values.supports_indexes
        pairs = self._parts.database.read(
            lambda: reader.read_page(selection, limit, offset), snapshot=needs_snapshot
        )
        return [FoundItem(item) for _, item in pairs]

    # -- searches with a query

    def _find_best_items(
        self,
        selection: Selection,
        query: SearchQuery,
        words: _QueryWords,
        terms: QueryTerms,
        limit: int,
        offset: int,
    ) -> Flow[list[FoundItem]]:
        """Return a page of the items that match a query best, best first.

        The items are read in the same snapshot in which they are ranked.
        """
        pool = yield from self._indexes.load_candidate_pool(selection, terms)
        ranked = self._rank_candidates(pool, query, words)
        if ranked is None:
            return []
        may_warn = selection.as_of is None and not self._indexes.warned_lacking
        if may_warn and pool.cosines is not None and np.isnan(pool.cosines).any():
            self._warn_about_missing_vectors(pool.cosines)
        page_rows = _choose_page_rows(ranked, pool.ids, query.min_score, limit, offset)
        results: list[FoundItem] = []
        for begin in range(0, len(page_rows), _ROWS_PER_STATEMENT):
            batch = page_rows[begin : begin + _ROWS_PER_STATEMENT]
            ids = pool.ids[batch].tolist()
            if selection.as_of is None:
                rows = yield self._parts.sql("items_by_ids", json.dumps(ids), selection.now)
            else:
                rows = yield self._parts.sql("versions_by_ids", json.dumps(ids))
            row_by_id = {row[0]: row for row in rows}
            for row_index, number in zip(batch.tolist(), ids, strict=True):
                item = self._parts.reader.records.decode_item(row_by_id[number])
                score_parts = ranked.get_score_parts_of_row(row_index) if query.explain else None
                results.append(FoundItem(item, float(ranked.scores[row_index]), score_parts))
        return results

    # -- words and scores

    def _analyse_query(
        self, query: SearchQuery, selection: Selection
    ) -> tuple[_QueryWords, QueryTerms]:
        """Return the words of a query with their synonyms, and the terms to look up in the indexes.

        The returned `_QueryWords` object maps each word to its stem and its synonyms. If the
        query's vector has not been computed yet, the vector is computed in the caller's OS thread.
        """
        vector = query.vector
        if not query.is_embedded:
            # Open the database before embedding the query, because the database records which model
            # computed its vectors.
            self._parts.database.connect()
            vector = run_operation(self._embed_query(query, selection))
        model, by_words = self._embeddings.model, query.mode != "semantic"
        # Synonyms are used only if the search compares both words and vectors. If the index
        # contains keyed hashes instead of words, synonyms are not used.
        uses_synonyms = by_words and vector is not None and not self._hashes_words
        stems = extract_query_words_with_stems(query.text[:_MAX_QUERY_LENGTH])
        words: _QueryWords = {
            word: (stem, find_synonyms(word) if uses_synonyms else [])
            for word, stem in islice(stems.items(), _MAX_QUERY_WORDS)
        }
        return words, QueryTerms(
            {
                self._mask_word(word): [self._mask_word(stem), *dict(synonyms)]
                for word, (stem, synonyms) in words.items()
                if by_words
            },
            vector,
            None if vector is None or model is None else model.with_dims(len(vector)),
            corrects_words=not self._hashes_words,
            is_personal=by_words and not self._hashes_words,
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
        actor_of_row = pool.candidates.rows["actor"]
        codes = np.flatnonzero(np.bincount(actor_of_row[actor_of_row >= 0])).tolist()
        speakers = {code: pool.actors[code] for code in codes}
        actors, names = _find_mentioned_actor_codes_and_name_words(speakers, words)
        subjects = (
            set[str]()
            if self._hashes_words
            else _find_words_naming_main_person(pool, speakers.values()) - names
        )
        terms = (
            []
            if query.mode == "semantic"
            else self._build_terms(pool, query, words, names, subjects)
        )
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
        is_by_named_actor = np.isin(actor_of_row, actors) if actors else None
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

    def _build_terms(
        self,
        pool: CandidatePool,
        query: SearchQuery,
        words: _QueryWords,
        actor_names: Collection[str],
        subject_names: Collection[str],
    ) -> list[Term]:
        """Build a `Term` for each word of a query, with the candidate rows that contain the word.

        Args:
            pool: The rows.
            query: The query.
            words: The words of the query.
            actor_names: The words in the names of the speakers whom the query mentions.
            subject_names: The words that name the person whom nearly all rows are about.
        """
        terms: list[Term] = []
        language = detect_language(query.text[:_MAX_QUERY_LENGTH])
        for word, (stem, all_synonyms) in words.items():
            others = [] if word in actor_names else all_synonyms
            synonyms = [(pool.terms[other][0], n) for other, n in others if other in pool.terms]
            hits = pool.find_word_hits(self._mask_word(word), self._mask_word(stem))
            frequency = estimate_share_of_messages_with_word(stem, language)
            names_subject = word in subject_names or stem in subject_names
            terms.append(Term(*hits, synonyms, frequency, word in actor_names, names_subject))
        return terms

    def _warn_about_missing_vectors(self, cosines: Floats) -> None:
        """Log a warning that some items have no vectors, so that only keyword search finds them.

        The warning is needed because search results do not show which items lack vectors.

        The warning about missing vectors is logged only once per store.
        """
        self._indexes.warned_lacking = True
        _LOG.warning(
            "%d of %d items can be found only by their words, because they have no vectors "
            "from the store's embedding model. Either the embedder failed, or a reembed() "
            "was interrupted. Unless reembed() is running now, call reembed() or run "
            "'perdure store reembed'",
            int(np.isnan(cosines).sum()),
            len(cosines),
        )

    # -- the vector of a query

    async def add_query_vector(
        self, query: SearchQuery | None, selection: Selection
    ) -> SearchQuery | None:
        """Add the embedding to a query, unless the model is known to run in this process.

        The embedding of a query is computed by the store's embedding model.

        Return a copy of the query whose field `vector` contains the query's embedding. If the
        vector could not be computed, the returned query contains no vector, and the search uses
        keywords only.

        The model is awaited in the caller's event loop, so that no thread in the thread pool
        for reads is blocked.
        """
        if query is None or not self.awaits_vectors:
            return query
        vector = await self._parts.runner.arun(self._embed_query(query, selection))
        return replace(query, vector=vector, is_embedded=True)

    async def _embed_query(self, query: SearchQuery, selection: Selection) -> Floats | None:
        """Return the vector of a query, or None if the search uses keywords only.

        The package's embedder returns a zero vector for a query that is not in English or whose
        words it does not know. For a zero vector, a hybrid search uses keywords only, because a
        zero vector is not similar to any vector.
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
    speakers: Mapping[int, str], words: Collection[str]
) -> tuple[list[int], set[str]]:
    """Return the numbers of the speakers whom the query mentions, and all words in their names.

    `speakers` maps the number of each speaker to the speaker's name. Speakers whose name is only a
    role, such as "user", are never returned. If there are more than `_MAX_NAMED_ACTORS` speakers,
    none are returned.
    """
    query_words, actors, names = set(words), list[int](), set[str]()
    for code, name in speakers.items() if len(speakers) <= _MAX_NAMED_ACTORS else ():
        name_words = () if name.casefold() in _ROLE_NAMES else set(tokenize(name)) - STOP_WORDS
        if not query_words.isdisjoint(name_words):
            actors.append(code)
            names.update(name_words)
    return actors, names


def _find_words_naming_main_person(pool: CandidatePool, speakers: Iterable[str]) -> set[str]:
    """Return the words that refer to the one person whom nearly all memories are about.

    A model that extracts memories may refer to the same person both by name and as the user, as in
    "Ann likes figs" and "The user likes figs". The returned set is empty unless nearly all memories
    are about the same person. A conversation with an assistant covers several subjects and has no
    main person. For messages from a conversation with an assistant, the function therefore returns
    an empty set.
    """
    if not _ASSISTANT_ROLE_NAMES.isdisjoint(map(str.casefold, speakers)):
        return set()
    row_count, user_hits = len(pool), pool.terms.get(USER_WORD)
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


def _choose_page_rows(
    ranked: RankedRows, ids: Ints, min_score: float | None, limit: int, offset: int
) -> Ints:
    """Return the indexes of the rows on one page of the results, best first.

    Rows with equal sort keys are ordered by id, highest first. The results end before the first row
    whose score is below `min_score`, or is 0 in a search without vectors.
    """
    sort_keys, count = ranked.row_sort_keys, offset + limit
    rows = np.arange(len(sort_keys))
    if 0 < count < len(sort_keys):
        # To save time, sort only the best rows, and the rows that tie with the last of them.
        threshold = np.partition(sort_keys, len(sort_keys) - count)[len(sort_keys) - count]
        rows = np.flatnonzero(sort_keys >= threshold)
    best = rows[np.lexsort((-ids[rows], -sort_keys[rows]))][:count]
    scores = ranked.scores[best]
    is_result = scores >= (-math.inf if min_score is None else min_score)
    if "vector" not in ranked.parts:
        is_result &= scores > 0
    return best[offset : len(best) if is_result.all() else int(is_result.argmin())]
