"""Search with a query: the steps from a text to ranked items."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from perdure.errors import ConfigurationError, EmbeddingFailed
from perdure.storage.flow import Flow, NamedSQL, Row
from perdure.stores.base import FoundItem, Mode, StoredItem, WhyNot
from perdure.stores.bm25 import Term
from perdure.stores.cues import named_actors, names_of, said_when
from perdure.stores.index_cache import Indexes, Overtaken
from perdure.stores.kinship import kin_of
from perdure.stores.models import Embeddings, Model
from perdure.stores.ranking import Cues, Ranked, rank
from perdure.stores.reading import Reader, Wanted
from perdure.stores.runner import Effects, Embed, Read
from perdure.stores.scopes import Scope, Sought
from perdure.stores.text import is_misspellable, query_tokens, without
from perdure.stores.vectors import Floats
from perdure.stores.weighting import Weights

_LOG = logging.getLogger("perdure")
MODES: Final = ("hybrid", "text", "semantic")
_Past = dict[int, StoredItem]  # the items of a scope of the past, by id
_NO_VECTOR: Final = -1.0  # a row without a vector comes after all that have one
_LONGEST: Final = 20_000  # characters of a query that are looked for
_MOST_WORDS: Final = 512  # of them, each counted once
_MOST_GUESSED: Final = 16  # words of a query that may be misspelt: 1 ms each
_TOGETHER: Final = 256  # rows read by one statement
_MANY_ACTORS: Final = 1_000  # a scope with more is no conversation: nobody is named in it


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


@dataclass(slots=True)
class Searcher:
    """Runs queries."""

    sql: NamedSQL
    reader: Reader
    indexes: Indexes
    embeddings: Embeddings
    masked: Any  # turns tokens into keyed hashes, if the index holds those
    now: Callable[[], int]  # in microseconds

    @property
    def model(self) -> Model | None:
        """The model that embeds the query; None: there is no embedder."""
        return self.embeddings.model

    def search(
        self, wanted: Wanted, query: Query, limit: int, offset: int
    ) -> Effects[list[FoundItem]]:
        """The best items, best first; ties by age, newest first."""
        scope, past, ranked = yield from self._ranked(query, wanted)
        if ranked is None:
            return []
        found: list[FoundItem] = yield Read(
            self._fetch(wanted, query, scope, ranked, past, limit, offset)
        )
        return found

    def why_not(self, wanted: Wanted, query: Query, row: Row | None) -> Effects[WhyNot]:
        """The place of an item in the answers to a query, and the reason."""
        if row is None:
            return WhyNot("there is no such item")
        if self.reader.checked(row, wanted) is None:
            return WhyNot("the filter leaves it out")
        scope, _, ranked = yield from self._ranked(query, wanted)
        place = np.flatnonzero(scope.ids == row[0])
        if not len(place):
            return WhyNot("it was put with index=False, or has no text to search")
        if ranked is None:
            return WhyNot("the query has no words and there is no embedder")
        score = ranked.scores[place[0]]
        better = int((ranked.scores > score).sum())
        parts = {name: float(part[place[0]]) for name, part in ranked.parts.items()}
        return WhyNot(f"{better} of {len(scope)} items score higher", better + 1, parts)

    # -- the rows in question

    def _scoped(self, wanted: Wanted, sought: Sought) -> Effects[tuple[Scope, _Past]]:
        while True:
            try:
                found: tuple[Scope, _Past] = yield Read(self._scope(wanted, sought))
            except Overtaken:
                continue
            return found

    def _scope(self, wanted: Wanted, sought: Sought) -> Flow[tuple[Scope, _Past]]:
        if wanted.as_of is not None:
            found = yield from self.reader.rows(wanted)
            scope = yield from self.indexes.past([row for row, _ in found])
            return scope, {row[0]: item for row, item in found}
        ids = None
        if wanted.filter is not None or wanted.provenance is not None:
            ids = yield from self.reader.ids(wanted)
        return (yield from self.indexes.scope(wanted.prefix, wanted.now, sought, ids)), {}

    # -- their scores

    def _ranked(self, query: Query, wanted: Wanted) -> Effects[tuple[Scope, _Past, Ranked | None]]:
        said = query_tokens(query.text[:_LONGEST])[:_MOST_WORDS]
        words = [] if query.mode == "semantic" else said
        needed = [self._kept(other) for word in words for other in self._meant(word)]
        # names that the query's vector leaves out are looked for in all of the scope
        scope, past = yield from self._scoped(wanted, Sought(needed, some=query.context))
        if not len(scope):
            return scope, past, None
        named = self._named(scope, said)
        vector = yield from self._vector(scope, query, named)
        sought = Sought(needed, vector=vector, model=None if vector is None else scope.model)
        if not scope.held:
            scope, past = yield from self._scoped(wanted, sought)
            named = self._named(scope, said)
        guesses = yield from self._guesses(scope, words, named, vector is not None, wanted)
        if guesses and not scope.held:
            sought = sought._replace(words=[*needed, *guesses.values()])
            scope, past = yield from self._scoped(wanted, sought)
            named = self._named(scope, said)
        cosines = None if vector is None else scope.cosines(vector)
        if cosines is not None and wanted.as_of is None:
            self._tell_lacking(cosines)
        terms = self._terms(scope, words, named, guesses, cosines is not None)
        known = any(len(term.rows) or term.kin for term in terms)
        if not len(scope) or (cosines is None and not known):
            return scope, past, None
        arrangement = scope.arrangement() if query.context else None
        cues = self._cues(scope, query, named)
        bare = not terms or (not known and len(scope) == 1)
        if cosines is not None and bare and arrangement is None and cues.silent:
            scores = np.nan_to_num(cosines, nan=_NO_VECTOR)  # nothing to weigh it with
            return scope, past, Ranked(scores, {"vector": scores})
        ranked = rank(
            len(scope),
            terms=terms,
            lengths=scope.lengths,
            cosines=cosines,
            arrangement=arrangement,
            cues=cues,
            weights=query.weights,
        ).comparable()
        if cosines is not None and not terms:
            ranked = _with_vectors_first(ranked, cosines)
        return scope, past, ranked

    def _tell_lacking(self, cosines: Floats) -> None:
        """Say once that a search by vectors cannot see all: nothing else would show it."""
        lacking = 0 if self.indexes.told_lacking else int(np.isnan(cosines).sum())
        if lacking:
            self.indexes.told_lacking = True
            _LOG.warning(
                "%d of %d items are found by their words only, for they have no vectors of the "
                "store's model: unless a reembed() is at work it was cut off, or their embedder "
                "failed; call reembed() (in the shell: perdure store reembed) to go on",
                lacking,
                len(cosines),
            )

    def _vector(
        self, scope: Scope, query: Query, named: dict[int, frozenset[str]]
    ) -> Effects[Floats | None]:
        """The vector of a query; None if there is none, or nothing to compare it with."""
        if query.mode == "text":
            return None
        if self.model is None:
            if query.mode == "semantic":
                raise ConfigurationError(
                    "mode='semantic' needs an embedder; open the store with index=, or use 'text'"
                )
            return None
        # with context, the speaker's own rows are lifted anyway, and the name costs nothing
        names = frozenset() if query.context else _all(named)
        try:
            vector = yield Embed(without(query.text[:_LONGEST], names))
        except EmbeddingFailed as exc:
            if query.mode == "semantic":
                raise
            _LOG.warning("the query is answered by words alone: %s", exc)
            return None
        if scope.model is None:
            return None
        if scope.model != self.model.of(len(vector)):
            raise scope.model.mismatch(self.model.of(len(vector)))
        found: Floats = vector
        return found

    def _named(self, scope: Scope, words: Sequence[str]) -> dict[int, frozenset[str]]:
        """The actors of the scope that a query names, with the tokens of their names."""
        codes = np.flatnonzero(np.bincount(scope.actor[scope.actor >= 0])).tolist()
        if not codes or len(codes) > _MANY_ACTORS:
            return {}
        names = [scope.actors[code] for code in codes]
        said = named_actors(words, names)
        return {
            code: names_of(name)
            for code, name, is_named in zip(codes, names, said, strict=True)
            if is_named
        }

    def _terms(
        self,
        scope: Scope,
        words: Sequence[str],
        named: dict[int, frozenset[str]],
        guesses: dict[str, str],
        by_meaning: bool,
    ) -> list[Term]:
        """The query's words in the scope; by meaning, also with words that say nearly the same."""
        names = _all(named)
        out = []
        for word in words:
            rows, counts = scope.term(self._kept(guesses.get(word, word)))
            kin = self._kin(scope, word) if by_meaning and word not in names else ()
            out.append(Term(rows, counts, kin))
        return out

    def _kin(self, scope: Scope, word: str) -> tuple[tuple[Any, float], ...]:
        """Rows that have words near in meaning; those of keyed hashes cannot be told."""
        if self.masked is not None:
            return ()
        found = ((scope.term(other)[0], near) for other, near in kin_of(word))
        return tuple((rows, near) for rows, near in found if len(rows))

    def _meant(self, word: str) -> Iterator[str]:
        """A word, and those near in meaning."""
        yield word
        yield from (other for other, _ in kin_of(word))

    def _kept(self, word: str) -> str:
        """A word as the index has it."""
        return word if self.masked is None else str(self.masked(word))

    def _guesses(
        self,
        scope: Scope,
        words: Sequence[str],
        named: dict[int, frozenset[str]],
        by_meaning: bool,
        wanted: Wanted,
    ) -> Effects[dict[str, str]]:
        """The nearest known words of unknown words."""
        if self.masked is not None:
            return {}
        names = _all(named)
        unknown = [
            word
            for word in words
            if is_misspellable(word)
            and not len(scope.term(word)[0])
            and not (by_meaning and word not in names and self._kin(scope, word))
        ][:_MOST_GUESSED]
        if unknown and not scope.held:
            scope, _ = yield from self._scoped(wanted, Sought(vocabulary=True))
        found = ((word, scope.similar(word)) for word in unknown)
        return {word: other for word, other in found if other is not None}

    def _cues(self, scope: Scope, query: Query, named: dict[int, frozenset[str]]) -> Cues:
        return Cues(
            actor=np.isin(scope.actor, list(named)) if named else None,
            date=said_when(query.text, query.during, scope.at) if query.context else None,
        )

    # -- the items

    def _fetch(
        self,
        wanted: Wanted,
        query: Query,
        scope: Scope,
        ranked: Ranked,
        past: _Past,
        limit: int,
        offset: int,
    ) -> Flow[list[FoundItem]]:
        """The best rows' items; what was deleted or expired meanwhile is passed over."""
        out: list[FoundItem] = []
        reach = offset + limit
        taken = 0
        least = -math.inf if query.min_score is None else query.min_score
        seen: set[tuple[tuple[str, ...], str]] = set()
        rows: dict[int, Row | None] = {}  # read some at a time
        order = _best(ranked.scores, scope, reach)
        while len(out) < reach:
            if taken == len(order):
                if len(order) == len(scope):
                    break
                order = _best(ranked.scores, scope, 4 * len(order))
            place = order[taken]
            taken += 1
            score = float(ranked.scores[place])
            if score < least or (score <= 0 and "vector" not in ranked.parts):
                break
            number = int(scope.ids[place])
            if number not in rows:
                some = order[taken - 1 : taken - 1 + min(reach - len(out), _TOGETHER)]
                rows.update((yield from self._rows(scope.ids[some].tolist(), wanted)))
            if wanted.as_of is None:
                item = yield from self._present(number, rows[number], wanted)
            else:
                item = None if rows[number] is None else past[number]
            if item is not None and (item.namespace, item.key) not in seen:
                seen.add((item.namespace, item.key))
                parts = (
                    {name: float(part[place]) for name, part in ranked.parts.items()}
                    if query.explain
                    else None
                )
                out.append(FoundItem(item, score, parts))
        return out[offset:]

    def _rows(self, numbers: list[int], wanted: Wanted) -> Flow[dict[int, Row | None]]:
        """The rows of versions that are present; of the past, of those that were not erased."""
        asked = json.dumps(numbers)
        if wanted.as_of is None:
            found = yield self.sql("by_ids", asked, self.now())
        else:
            found = yield self.sql("ids_left", asked)
        return {**dict.fromkeys(numbers), **{row[0]: row for row in found}}

    def _present(self, number: int, row: Row | None, wanted: Wanted) -> Flow[StoredItem | None]:
        """The item of a version, or of the one that replaced it while the query was thought of."""
        if row is not None:
            return self.reader.records.item(row)
        for row in (yield self.sql("successor", number, self.now())):
            found = self.reader.checked(row, wanted)
            return None if found is None else found[1]
        return None


def _all(named: dict[int, frozenset[str]]) -> frozenset[str]:
    return frozenset(name for names in named.values() for name in names)


def _with_vectors_first(ranked: Ranked, cosines: Floats) -> Ranked:
    """The scores of a search by vectors alone, with rows that have none after all that have one."""
    lowered = np.where(np.isnan(cosines), np.float32(_NO_VECTOR), np.float32(0))
    parts = {**ranked.parts, "vector": ranked.parts["vector"] + lowered}
    return Ranked(ranked.scores + lowered, parts)


def _best(scores: Floats, scope: Scope, count: int) -> Any:
    """The rows with the highest scores, highest first."""
    count = min(max(count, 1), len(scores))
    if count < len(scores):
        edge = np.partition(scores, len(scores) - count)[len(scores) - count]
        above = np.flatnonzero(scores > edge)
        level = np.flatnonzero(scores == edge)
        level = level[np.argsort(-scope.ids[level], kind="stable")][: count - len(above)]
        rows = np.concatenate([above, level])
    else:
        rows = np.arange(len(scores))
    return rows[np.lexsort((-scope.ids[rows], -scores[rows]))]
