"""Search with a query: the steps from a text to ranked items."""

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

from perdure.effects import Effect, run
from perdure.errors import ConfigurationError, EmbeddingFailed
from perdure.storage.flow import Flow, fetch_rows
from perdure.stores.base import FoundItem, Mode, Span, WhyNot
from perdure.stores.index import Ints
from perdure.stores.indexes import NAMING, USER, Overtaken, Pool, Sought
from perdure.stores.namespaces import prefix_range
from perdure.stores.parts import StoreParts
from perdure.stores.ranking import Ranked, Term, Weights, is_everywhere, rank
from perdure.stores.reading import Selection, micros
from perdure.stores.text import (
    STOP_WORDS,
    detect_language,
    extract_query_words,
    find_synonyms,
    message_frequency,
    split_words,
    tokenize,
)
from perdure.stores.values import check_number
from perdure.stores.vectors import Floats

_LOG = logging.getLogger("perdure")
MODES: Final = ("hybrid", "text", "semantic")
_MOST: Final = 1 << 60  # rows: SQLite counts in 64 bits
_HUGE: Final = sys.float_info.max
_LONGEST: Final = 20_000  # characters of a query that are looked for
_MOST_WORDS: Final = 512  # of them, each counted once
_TOGETHER: Final = 256  # rows read by one statement
# the words of a query, each with its stem, and its synonyms with their weights
_Words = dict[str, tuple[str, list[tuple[str, float]]]]
_COMMON: Final = 0.003  # share of messages; a more common word is not a name
# words of a question that refer to the person whom the rows are about
_PERSONS: Final = frozenset(
    (
        *("i", "me", "my", "mine", "myself", "you", "your", "yours"),
        *("he", "him", "his", "she", "her", "hers"),
    )
)
_MANY_ACTORS: Final = 1_000  # a pool with more is no conversation: nobody is named in it
# actors that are parts in a conversation: a query with such a word seldom means the speaker
_ROLES: Final = frozenset(
    {"user", "assistant", "human", "ai", "bot", "agent", "system", "tool", "model", "function"}
)


@dataclass(frozen=True, slots=True)
class Query:
    """A query with its options."""

    text: str
    mode: Mode = "hybrid"
    context: bool = True  # whether neighbours in the thread, speaker and date count
    explain: bool = False
    weights: Weights = field(default_factory=Weights)
    during: tuple[float, float] | None = None  # in seconds since 1970; half-open
    min_score: float | None = None  # of what is returned
    vector: Floats | None = None  # None: it is searched by words alone, once it `is_embedded`
    is_embedded: bool = False


def query_of(
    text: Any,
    mode: Any = "hybrid",
    context: bool = True,
    explain: bool = False,
    weights: Weights | None = None,
    during: Span | None = None,
    min_score: float | None = None,
) -> Query | None:
    """Build the query of a search, or return None if there is no text or it is blank."""
    if mode not in MODES:
        raise ConfigurationError(f"mode is {mode!r}; expected one of {MODES}")
    span = None if during is None else _period(during)
    if min_score is not None:
        check_number("min_score", min_score, "a number, or None", least=-_HUGE, most=_HUGE)
    if text is None:
        return None
    if not isinstance(text, str):
        raise ConfigurationError(f"query is {text!r}; expected text")
    if not text.strip():
        return None
    words = text.encode("utf-8", "replace").decode()
    return Query(words, mode, context, explain, weights or Weights(), span, min_score)


def _period(during: Any) -> tuple[float, float]:
    """A period in seconds since 1970."""
    if not isinstance(during, tuple | list) or len(during) != 2:
        raise ConfigurationError(
            f"during is {during!r:.80}; expected two datetimes, from when and up to when"
        )
    start, end = map(micros, during)
    if start >= end:
        raise ConfigurationError(
            f"during ends at {during[1]}, not after it starts at {during[0]}; expected the earlier "
            "moment first"
        )
    return start / 1e6, end / 1e6


def page_of(limit: Any, offset: Any) -> tuple[int, int]:
    """How many rows, and how many to skip before."""
    for name, number in (("limit", limit), ("offset", offset)):
        check_number(name, number, "a whole number, zero or more", whole=True)
    return min(limit, _MOST), min(offset, _MOST)


class Searcher:
    """Runs searches."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._indexes, self._embeddings = parts.indexes, parts.preparer.embeddings
        self._masked = parts.preparer.masked  # makes keyed hashes of words, if the index has those

    def search(
        self,
        selection: Selection,
        query: Query | None,
        limit: int,
        offset: int,
        refresh_ttl: bool | None,
    ) -> list[FoundItem]:
        """The best answers to a query, ties by age, newest first; or a page of what is wanted."""
        parts, page = self._parts, page_of(limit, offset)
        if query is None:  # all of it is read by one statement, or by an index
            by_index = selection.filter is not None and parts.reader.values.takes_indexes
            pairs = parts.database.read(
                lambda: parts.reader.search(selection, *page), snapshot=by_index
            )
            items = [FoundItem(item) for _, item in pairs]
        else:
            query = self._embedded(query, selection)
            words, sought = self._sought(query)
            while True:
                with suppress(Overtaken):
                    items = parts.database.read(
                        lambda: self._found(selection, query, words, sought, *page)
                    )
                    break
        if selection.as_of is None:
            parts.restart_ttl(items, refresh_ttl)
        return items

    def why_not(self, selection: Selection, query: Query | None, path: bytes, key: str) -> WhyNot:
        """The place of an item in the answers to a query, and the reason."""
        if query is None:
            raise ConfigurationError("why_not needs a query")
        read, reader = self._parts.database.read, self._parts.reader
        if not path.startswith(selection.prefix):
            return WhyNot("it is not under the prefix")
        row = read(lambda: reader.get(path, key, selection.now, selection.as_of), snapshot=False)
        if row is None:
            return WhyNot("there is no such item")
        if reader.checked(row, selection) is None:
            return WhyNot("the filter leaves it out")
        query = self._embedded(query, selection)
        words, sought = self._sought(query)
        while True:
            with suppress(Overtaken):
                pool = read(lambda: self._indexes.pool(selection, sought))
                break
        ranked = self._ranked(pool, query, words)
        place = np.flatnonzero(pool.ids == row[0])
        if not len(place):
            return WhyNot("it was put with index=False, or has no text to search")
        if ranked is None:
            return WhyNot("no item has a word of the query, and it has no vector to compare")
        better = int((ranked.places > ranked.places[place[0]]).sum())
        reason = f"{better} of {len(pool)} items score higher"
        return WhyNot(reason, better + 1, ranked.parts_of(place[0]))

    def _found(
        self,
        selection: Selection,
        query: Query,
        words: _Words,
        sought: Sought,
        limit: int,
        offset: int,
    ) -> Flow[list[FoundItem]]:
        """The best rows' items, all of one snapshot."""
        pool = yield from self._indexes.pool(selection, sought)
        ranked = self._ranked(pool, query, words)
        if ranked is None:
            return []
        if pool.cosines is not None and selection.as_of is None:
            self._tell_lacking(pool.cosines)
        least = -math.inf if query.min_score is None else query.min_score
        by_meaning = "vector" in ranked.parts

        def counts(place: int) -> bool:
            score = ranked.scores[place]
            return bool(score >= least and (score > 0 or by_meaning))

        best = takewhile(counts, _best_first(ranked.places, pool.ids, offset + limit))
        places = islice(best, offset, offset + limit)
        out: list[FoundItem] = []
        while some := list(islice(places, _TOGETHER)):
            ids = pool.ids[some].tolist()
            if selection.as_of is None:
                rows = yield self._parts.sql("by_ids", json.dumps(ids), selection.now)
            else:
                rows = yield self._parts.sql("versions_by_ids", json.dumps(ids))
            items = {row[0]: self._parts.reader.records.item(row) for row in rows}
            for place, number in zip(some, ids, strict=True):
                parts = ranked.parts_of(place) if query.explain else None
                out.append(FoundItem(items[number], float(ranked.scores[place]), parts))
        return out

    # -- the words and the scores

    def _sought(self, query: Query) -> tuple[_Words, Sought]:
        """The words of a query with their synonyms, and what the indexes are asked for."""
        model, vector = self._embeddings.model, query.vector
        by_words = query.mode != "semantic"
        # of hashes nothing is known
        by_meaning = by_words and vector is not None and self._masked is None
        said = islice(extract_query_words(query.text[:_LONGEST]).items(), _MOST_WORDS)
        words: _Words = {
            word: (stem, find_synonyms(word) if by_meaning else []) for word, stem in said
        }
        return words, Sought(
            {
                self._kept(word): [self._kept(stem), *(other for other, _ in near)]
                for word, (stem, near) in words.items()
                if by_words
            },
            vector,
            None if vector is None or model is None else model.with_dims(len(vector)),
            corrected=self._masked is None,
            is_personal=by_words and self._masked is None,
        )

    def _ranked(self, pool: Pool, query: Query, words: _Words) -> Ranked | None:
        """The scores of the rows; None: nothing in the query can be compared."""
        if not len(pool):
            return None
        cosines = pool.cosines
        actors, names = _named(pool, words)
        subjects = set[str]() if self._masked else _subjects_of(pool) - names
        terms, name = [], detect_language(query.text[:_LONGEST])
        for word, (stem, near) in words.items() if query.mode != "semantic" else ():
            others = [] if word in names else near
            kin = [(pool.terms[other][0], n) for other, n in others if other in pool.terms]
            hits = pool.term(self._kept(word), self._kept(stem))
            common, is_subject = (
                message_frequency(stem, name),
                not subjects.isdisjoint({word, stem}),
            )
            terms.append(Term(*hits, kin, common, word in names, is_subject))
        known = any(len(term.rows) or term.kin for term in terms)
        if cosines is None and not known:
            return None
        candidates = pool.candidates
        arrangement, date = None, None
        if query.context:
            arrangement = candidates.arrangement
            if query.during is not None:
                at = candidates.rows["at"]
                date = (at >= query.during[0]) & (at < query.during[1])
        actor = np.isin(candidates.rows["actor"], actors) if actors else None
        lone = not terms or (not known and len(pool) == 1)
        if cosines is not None and lone and arrangement is None and actor is None and date is None:
            return Ranked.by_cosine(cosines)  # nothing to weigh it with
        is_about = any(term.subject for term in terms) or not _PERSONS.isdisjoint(
            split_words(query.text[:_LONGEST])
        )
        ranked = rank(
            candidates.lengths,
            is_personal=bool(subjects) and is_about,
            terms=terms,
            cosines=cosines,
            arrangement=arrangement,
            actor=actor,
            date=date,
            weights=query.weights,
            calibration=pool.separation.calibration,
        ).comparable()
        if cosines is not None and not terms:
            ranked = ranked.with_vectors_first(cosines)
        return ranked

    def _kept(self, word: str) -> str:
        """A word as the index has it."""
        return word if self._masked is None else str(self._masked(word))

    def _tell_lacking(self, cosines: Floats) -> None:
        """Say once that a search by vectors cannot see all: nothing else would show it."""
        lacking = 0 if self._indexes.warned_lacking else int(np.isnan(cosines).sum())
        if lacking:
            self._indexes.warned_lacking = True
            _LOG.warning(
                "%d of %d items are found by their words only, for they have no vectors of the "
                "store's model: unless a reembed() is at work it was cut off, or their embedder "
                "failed; call reembed() (in the shell: perdure store reembed) to go on",
                lacking,
                len(cosines),
            )

    # -- the vector of a query

    @property
    def awaits(self) -> bool:
        """Whether a model elsewhere makes the vectors of queries."""
        return self._embeddings.model is not None and not self._embeddings.in_process

    async def awaited(self, query: Query | None, selection: Selection) -> Query | None:
        """The query with its vector, if a model elsewhere makes it: no reading thread waits."""
        if query is None or not self.awaits:
            return query
        vector = await self._parts.runner.arun(self._vector(query, selection))
        return replace(query, vector=vector, is_embedded=True)

    def _embedded(self, query: Query, selection: Selection) -> Query:
        if query.is_embedded:
            return query
        self._parts.database.connect()  # which vectors there are is for the file to say
        return replace(query, vector=run(self._vector(query, selection)), is_embedded=True)

    async def _vector(self, query: Query, selection: Selection) -> Floats | None:
        """The vector of a query, as an operation; None: it is searched by words alone.

        A model in this process that knows none of its words gives a zero vector, like nothing.
        """
        if query.mode == "text":
            return None
        embedder, runner = self._embeddings.embedder, self._parts.runner
        if embedder is None:
            if query.mode == "semantic":
                raise ConfigurationError(
                    "mode='semantic' needs an embedder; open the store with index=, or use 'text'"
                )
            return None
        text = query.text[:_LONGEST]
        try:
            if self._embeddings.in_process:
                vector = embedder.embed_query(text)
                return vector if query.mode == "semantic" or vector.any() else None
            if selection.as_of is None:  # a call that may cost money
                sql, under = self._parts.sql["namespaces_under"], prefix_range(selection.prefix)
                if not await runner.read(lambda: fetch_rows(sql, *under)):
                    return None
            return await Effect(
                lambda: embedder.embed_query(text), lambda: embedder.aembed_query(text)
            )
        except EmbeddingFailed as exc:
            if query.mode == "semantic":
                raise
            _LOG.warning("the query is answered by words alone: %s", exc)
            return None


def _named(pool: Pool, words: Collection[str]) -> tuple[list[int], set[str]]:
    """The actors of the pool whom a query's words name, and the words of their names.

    A mere role such as "user" names nobody.
    """
    actor = pool.candidates.rows["actor"]
    codes = np.flatnonzero(np.bincount(actor[actor >= 0])).tolist()
    said, actors, names = set(words), list[int](), set[str]()
    for code in codes if len(codes) <= _MANY_ACTORS else ():
        name = pool.actors[code]
        of = () if name.casefold() in _ROLES else set(tokenize(name)) - STOP_WORDS
        if not said.isdisjoint(of):
            actors.append(code)
            names.update(of)
    return actors, names


def _subjects_of(pool: Pool) -> set[str]:
    """Return the words that name the person whom nearly all rows are about, or an empty set.

    Extracting models write "Ann likes figs" and "The user likes figs" of the same person. The rows
    of a conversation with an assistant are about nobody.
    """
    n, user = len(pool), pool.terms.get(USER)
    actor = pool.candidates.rows["actor"]
    speakers = {pool.actors[code].casefold() for code in np.unique(actor[actor >= 0]).tolist()}
    if not speakers.isdisjoint(_ROLES - {"user", "human"}):
        return set()
    by_user = np.empty(0, np.int64) if user is None else user[0]
    if is_everywhere(len(by_user), n):
        return {USER}
    subjects = set[str]()
    for word, (rows, _) in pool.terms.items():
        if len(rows) < NAMING * n or word == USER or message_frequency(word) > _COMMON:
            continue
        if is_everywhere(len(np.union1d(rows, by_user)), n):
            subjects |= {word, USER}
    return subjects


def _best_first(scores: Floats, ids: Ints, first: int) -> Iterator[int]:
    """All rows by score, highest first; so many, and those that score alike, are sorted at once."""
    groups = [np.arange(len(scores))]
    if 0 < first < len(scores):
        edge = np.partition(scores, len(scores) - first)[len(scores) - first]
        groups = [np.flatnonzero(scores >= edge), np.flatnonzero(scores < edge)]
    for rows in groups:
        yield from rows[np.lexsort((-ids[rows], -scores[rows]))].tolist()
