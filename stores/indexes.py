"""The indexes of a store's namespaces: each is loaded when it is first searched, extended, evicted.

A namespace has a counter that every change of its items raises, and a search first compares the
counters. An index whose counter is behind reads the items that are newer than those it knows, and
drops those that were closed since. An index that is not in memory is read from its compact form in
the file, which is written by a search that had many texts to analyse. The indexes that were not
searched for longest are dropped when all of them take more than a number of bytes.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from perdure.storage.flow import Flow, Row, fetch_rows
from perdure.stores.index import (
    FOREVER,
    NOWHERE,
    ROW,
    Candidates,
    Covered,
    Hits,
    Index,
    IndexedItem,
    IndexView,
    Ints,
    opened,
    ordered,
    places,
    sealed,
)
from perdure.stores.namespaces import prefix_range
from perdure.stores.puts import Preparer
from perdure.stores.reading import ItemReader, Selection
from perdure.stores.separation import Separation
from perdure.stores.text import STOP_WORDS, find_nearest_words, is_misspellable
from perdure.stores.vectors import Floats, Model

USER: Final = "user"  # the word by which facts refer to the person whom they are about
NAMING: Final = 0.3  # share of the rows from which on a word may name their person
_MOST_FACTS: Final = 2_000  # rows; in a larger namespace this name is not searched for
_READ: Final = 1 << 12  # rows read at a time
_MOST_MISSPELT: Final = 16  # words of a query: 1 ms each
_CANDIDATES: Final = 64  # for one of them: some are only words of rows that are not searched
_UNSEARCHED: Final = IndexedItem(0, (), False, b"", None, 0.0, None, math.nan, FOREVER, 0)
_LEAST_KEPT, _MOST_FRESH, _FRESH_SHARE = 16, 256, 16  # see `_is_worth_keeping`
_Key = tuple[bytes, bool]  # a path, and whether of its closed versions
_Source = tuple[bytes, Callable[..., Flow[IndexView]]]  # a path, and what reads its view
_Take = Callable[[bytes, IndexView], Any]


# -- the rows of a search


class Sought(NamedTuple):
    """The words and the vector of a query."""

    words: Mapping[str, Sequence[str]]  # as the index has them, with their synonyms
    vector: Floats | None = None
    model: Model | None = None  # of the vector
    corrected: bool = True  # whether a word that no row has stands for the nearest one
    is_personal: bool = False  # whether the rows with the name of their person were read

    def cosines(self, view: IndexView, file: Model | None, approximate_above: int) -> Floats | None:
        """Similarity of a view's rows to the vector; None: there is nothing to compare."""
        if self.vector is None or self.model is None or file is None:
            return None
        if self.model != file:
            raise file.build_mismatch_error(self.model)
        return view.cosines(self.vector, approximate_above)


@dataclass
class Pool:
    """The rows that a search ranks, with what its query needs of them."""

    candidates: Candidates
    actors: Sequence[str]  # by number
    threads: int  # how many have a number
    terms: dict[str, Hits]  # of the words that some rows have
    cosines: Floats | None  # NaN for a row without a vector; None: nothing to compare
    separation: Separation  # how well the vectors of the namespaces separate

    def __len__(self) -> int:
        return len(self.candidates.rows)

    @property
    def ids(self) -> Ints:
        """The id of each row."""
        return np.asarray(self.candidates.rows["id"])

    def term(self, word: str, stem: str) -> Hits:
        """The rows that have a word or its stem, each once, and how often."""
        hits, others = self.terms.get(word), self.terms.get(stem)
        if hits is None or others is None or word == stem:
            return hits or others or NOWHERE
        rows, places = np.unique(np.concatenate([hits[0], others[0]]), return_inverse=True)
        counts = np.zeros(len(rows), np.float32)
        np.maximum.at(counts, places, np.concatenate([hits[1], others[1]]))
        return rows, counts

    def rethreaded(self, names: Sequence[Hashable]) -> Pool:
        """The same with threads of one name made one; a name for each number of a thread."""
        numbers = dict[Hashable, int]()
        codes = [numbers.setdefault(name, len(numbers)) for name in names]
        rows = self.candidates.rows.copy()
        rows["thread"] = np.array([*codes, -1])[rows["thread"]]
        order = ordered(rows, np.arange(len(rows)))
        place = places(order, len(rows)).astype(np.int64)
        terms = {word: (place[of], counts) for word, (of, counts) in self.terms.items()}
        cosines = None if self.cosines is None else self.cosines[order]
        candidates = Candidates(rows[order])
        return Pool(candidates, self.actors, len(numbers), terms, cosines, self.separation)


# -- the indexes


class Overtaken(Exception):
    """The snapshot that is read is older than the index: read again, on a newer one."""


class _State(NamedTuple):
    """State of all namespaces."""

    erasures: int  # how often something was erased
    embedded: int  # how often items got their vectors later
    closed: int  # the newest closing of a version
    model: Model | None

    @property
    def number(self) -> int:
        """Of the model; 0: there is none."""
        return 0 if self.model is None else self.model.number


class _Namespace(NamedTuple):
    """The row of a namespace."""

    ns: int
    path: bytes
    changes: int
    items: int


class _Held:
    """The index of a namespace, and how far it has read."""

    def __init__(self, erasures: int) -> None:
        self.lock = threading.Lock()
        self.erasures = erasures
        self.nbytes = 0
        self.clear()

    def clear(self) -> None:
        """Forget what was read."""
        self.index: Index | None = None
        self.covered = Covered(0, 0, -1, 0)
        self.changes = self.number = -1
        self.fresh = 0  # items that the compact form does not have, or not with their vectors
        self.expired_to = 0


@dataclass(eq=False)
class Indexes:
    """The indexes of a store's namespaces, for several threads at once."""

    reader: ItemReader
    preparer: Preparer
    budget: int  # bytes of all indexes; the one searched last stays whatever it takes
    approximate_above: int
    # writes a flow that nobody waits for; None: nothing is written
    post: Callable[[Callable[[], Flow[object]]], None] | None
    erased: Callable[[], None]  # called on an erasure, here or by another process
    warned_lacking: bool = False  # whether a warning says already that items lack vectors
    _lock: threading.Lock = field(default_factory=threading.Lock)  # nothing is read under it
    _held: OrderedDict[_Key, _Held] = field(default_factory=OrderedDict)
    _nbytes: int = 0
    _erasures: int = 0

    def __post_init__(self) -> None:
        self.sql, self.records = self.reader.sql, self.reader.records

    # -- looking

    def pool(self, selection: Selection, sought: Sought) -> Flow[Pool]:
        """The items of a selection.

        At a moment of the past: of the present ones, and of versions that were closed since. All
        are looked at again if words of the query may be misspelt.

        Raises:
            Overtaken: Another thread has read a newer state.
        """
        now, as_of, closed = selection.now, selection.as_of, list[Row]()
        present = selection
        if as_of is not None:
            closed = yield from self.reader.closed(selection)
            present = replace(selection, now=as_of, as_of=None)
        chosen = None
        if selection.filter is not None or selection.provenance is not None:
            ids = yield from self.reader.ids(present)
            chosen = np.array([*ids, *(number for _, number in closed)], np.int64)
        under = self.sql("namespaces_under", *prefix_range(selection.prefix))
        marks, rows = yield [self.sql("marks"), under]
        state = yield from self._entered(marks[0])
        ended = defaultdict[bytes, list[int]](list)
        for path, number in closed:
            ended[path].append(number)
        sources: list[_Source] = [
            (row[1], partial(self._view, _Namespace(*row), state, now, as_of)) for row in rows
        ]
        sources += [
            (path, partial(self._closed, path, some, state)) for path, some in ended.items()
        ]
        each = partial(self._each, sources, chosen)
        words = {other for word, some in sought.words.items() for other in (word, *some)}
        threads: list[tuple[bytes, str]] = []

        def part(path: bytes, view: IndexView) -> Pool:
            threads.extend((path, name) for name in view.threads if ended)
            cosines = sought.cosines(view, state.model, self.approximate_above)
            subjects = set[str]()
            if sought.is_personal and len(view.rows) <= _MOST_FACTS:
                subjects = {USER, *view.frequent_words(NAMING)} - STOP_WORDS
            terms = _terms_of(view, words | subjects)
            threads_count = len(view.threads)
            return Pool(
                view.candidates, view.actors, threads_count, terms, cosines, view.separation
            )

        pool = _joined((yield from each(part)))
        if unknown := _unknown(pool, sought):
            pool.terms.update((yield from _nearest(each, unknown)))
        return pool.rethreaded(threads) if ended else pool

    def _each(
        self,
        sources: Sequence[_Source],
        chosen: Ints | None,
        take: _Take,
    ) -> Flow[list[Any]]:
        """What a function takes of each view that has rows; only chosen ids are in, if any are."""
        out = []
        total = 0
        for path, read in sources:
            view = yield from read(admit=total <= self.budget)  # else it is read anew each time
            total += view.nbytes
            if chosen is not None:
                view = view.narrowed(chosen)
            if len(view.order):
                out.append(take(path, view))
        return out

    def purge(self) -> Flow[None]:
        """Let go of what was erased; a search does so too."""
        with suppress(Overtaken):  # by one that has let go of it
            yield from self._entered((yield self.sql("marks"))[0])

    # -- what is held

    def _entered(self, marks: Row) -> Flow[_State]:
        erasures, embedded, closed, model = marks
        state = _State(
            erasures, embedded, closed, None if model is None else Model.from_setting(model)
        )
        with self._lock:
            if erasures < self._erasures:
                raise Overtaken
            outdated = erasures > self._erasures
        if outdated:
            self.erased()
            rows = yield self.sql("namespaces_under", *prefix_range(b""))
            there = {(row[1], False): _Namespace(*row) for row in rows}
            with self._lock:
                every = list(self._held.items())
            for key, held in every:
                yield from self._purge(held, key, there.get(key), state)
            with self._lock:
                self._erasures = max(self._erasures, erasures)
        return state

    def _purge(
        self, held: _Held, key: _Key, namespace: _Namespace | None, state: _State
    ) -> Flow[None]:
        """Bring an index into step and drop the words that none of its items has any more."""
        with held.lock:
            if held.erasures >= state.erasures:
                return
            if namespace is None or held.index is None or held.changes > namespace.changes:
                held.clear()
                self._weigh(key, held, 0)
            elif held.changes != namespace.changes:
                index = yield from self._in_step(held, namespace, state)
                index.compact()
                held.fresh = namespace.items  # the compact form is gone
            held.erasures = state.erasures

    def _of(self, key: _Key, state: _State, *, admit: bool) -> _Held:
        with self._lock:
            held = self._held.get(key)
            if held is not None and held.erasures == state.erasures:
                self._held.move_to_end(key)
                return held
            if held is not None and held.erasures > state.erasures:
                raise Overtaken
            held = _Held(state.erasures)
            if admit:
                self._nbytes -= self._held[key].nbytes if key in self._held else 0
                self._held[key] = held
            return held

    def _weigh(self, key: _Key, held: _Held, nbytes: int) -> None:
        """Note what an index takes, and let go of others if it is too much."""
        with self._lock:
            if self._held.get(key) is not held:
                return
            self._nbytes += nbytes - held.nbytes
            held.nbytes = nbytes
            while self._nbytes > self.budget and len(self._held) > 1:
                _, dropped = self._held.popitem(last=False)
                self._nbytes -= dropped.nbytes

    def _view(
        self, namespace: _Namespace, state: _State, now: int, as_of: int | None, *, admit: bool
    ) -> Flow[IndexView]:
        key = (namespace.path, False)
        held = self._of(key, state, admit=admit)
        with held.lock:
            if (
                held.changes > namespace.changes
                or held.number > state.number
                or held.covered.embedded > state.embedded
            ):
                raise Overtaken
            index = yield from self._in_step(held, namespace, state)
            yield from self._expire(held, index, now, now if as_of is None else max(now, as_of))
            view = index.view(now if as_of is None else as_of)
        self._weigh(key, held, view.nbytes)
        return view if as_of is None else view.until(as_of)

    def _closed(
        self, path: bytes, ids: Sequence[int], state: _State, *, admit: bool
    ) -> Flow[IndexView]:
        """Return a view of some closed versions of a namespace.

        Their index has all closed versions that any search has loaded. The separation of their
        vectors is therefore left out of the view, because it would depend on earlier searches.
        """
        held = self._of((path, True), state, admit=admit)
        closed = np.array(ids, np.int64)
        with held.lock:
            if held.number > state.number:
                raise Overtaken
            if held.index is None or held.number != state.number or held.nbytes > self.budget:
                held.clear()
                held.index, held.number = Index(state.model, self.approximate_above), state.number
            new = np.setdiff1d(closed, held.index.rows["id"])
            for begin in range(0, len(new), _READ):
                entries = yield from self._versions(new[begin : begin + _READ].tolist(), state)
                held.index.add(entries)
            view = held.index.view(0)
        self._weigh((path, True), held, view.nbytes)
        return replace(view.narrowed(closed), separation=Separation())

    def _versions(self, ids: Sequence[int], state: _State) -> Flow[list[IndexedItem]]:
        """The search data of some versions; nothing of those that search does not find."""
        rows = yield self.sql("index_of", state.number, json.dumps(ids))
        searched = {number: (vectors, fields) for number, vectors, fields in rows}
        rows = yield self.sql("versions_by_ids", json.dumps([*searched]))
        rows = sorted(rows, key=lambda row: row[0])  # the last bit of a score depends on the order
        entries = self._entries([(*row, *searched[row[0]]) for row in rows], state.model)
        return entries + [_UNSEARCHED._replace(id=id) for id in ids if id not in searched]

    # -- keeping in step

    def _in_step(self, held: _Held, namespace: _Namespace, state: _State) -> Flow[Index]:
        """The index of a namespace as it is now; if that fails, what was read is dropped."""
        try:
            if held.number != state.number:
                held.clear()
            if held.index is None:
                held.index = yield from self._load(held, namespace, state)
                held.number = state.number
            if held.changes != namespace.changes:
                yield from self._update(held, held.index, namespace, state)
            else:
                held.covered = held.covered._replace(closed=state.closed)
            return held.index
        except BaseException:
            held.clear()
            raise

    def _update(
        self, held: _Held, index: Index, namespace: _Namespace, state: _State
    ) -> Flow[None]:
        newest, items, embedded, _ = held.covered
        added, complete = 0, False
        while not complete:
            rows = yield self.sql("index_since", state.number, namespace.ns, newest, _READ)
            # of an item that is not searched only the id is there
            entries = self._entries([row for row in rows if row[8] is not None], state.model)
            index.add(entries)
            held.fresh += len(entries)
            added += len(rows)
            newest = rows[-1][0] if rows else newest
            complete = len(rows) < _READ
        if gone := items + added - namespace.items:
            yield from self._let_go(gone, index, held.covered, namespace, state)
        if state.model is not None and embedded != state.embedded:
            held.fresh += yield from self._fill(index, state.number)
        held.covered = Covered(newest, namespace.items, state.embedded, state.closed)
        held.changes = namespace.changes
        if self.post is not None and _is_worth_keeping(held.fresh, namespace.items):
            self._keep(held, index, namespace, state)

    def _let_go(
        self, gone: int, index: Index, covered: Covered, namespace: _Namespace, state: _State
    ) -> Flow[None]:
        """Drop the items that went: those that were closed, unless that is not so many."""
        if state.closed - covered.closed <= max(_READ, namespace.items):
            rows = yield self.sql("closed_since", covered.closed, namespace.ns)
            closed = np.array([number for (number,) in rows], np.int64)
            if np.count_nonzero(closed <= covered.newest) == gone:
                index.drop(closed)
                return
        rows = yield self.sql("present_ids", namespace.ns)
        present = np.array([number for (number,) in rows], np.int64)
        index.drop(np.setdiff1d(index.rows["id"], present))

    def _load(self, held: _Held, namespace: _Namespace, state: _State) -> Flow[Index]:
        """The index that is in the file; an empty one if there is none that can be used."""
        for (body,) in (yield self.sql("get_index", namespace.ns)):
            made = self.preparer.made(state.model)
            form = self.records.seal, namespace.path, body
            kept = opened(*form, state.model, self.approximate_above, made)
            if kept is not None:
                index, held.covered = kept
                return index
        return Index(state.model, self.approximate_above)

    def _fill(self, index: Index, number: int) -> Flow[int]:
        """Take in the vectors of items that had none. Returns how many there are."""
        bare = index.bare()
        total = 0
        for begin in range(0, len(bare), _READ):
            page = json.dumps(bare[begin : begin + _READ])
            rows = yield self.sql("index_of", number, page)
            vectors_of = {
                row: self.records.vectors(vectors, row)
                for row, vectors, _ in rows
                if vectors is not None
            }
            index.fill(vectors_of)
            total += len(vectors_of)
        return total

    def _expire(self, held: _Held, index: Index, now: int, until: int) -> Flow[None]:
        """Ask when items expire whose time seems to be over: reading them may have prolonged it.

        Until a moment in the future they may be prolonged still, and are asked for again.
        """
        since = min(held.expired_to, now)  # the clock may have been put back
        if due := index.due(since, until):
            index.prolong(dict((yield self.sql("expiries", json.dumps(due)))))
        held.expired_to = now

    def _entries(self, rows: Sequence[Row], model: Model | None) -> list[IndexedItem]:
        """The search data of some versions; vectors that are not stored are made now."""
        values = [self.records.value(row) for row in rows]
        bare = [
            (value, row[11]) for row, value in zip(rows, values, strict=True) if row[10] is None
        ]
        derived = iter(self.preparer.derived(bare, model))
        out = []
        for row, value in zip(rows, values, strict=True):
            number, path, key, version, _, since, _, expires, _, stored, vectors, fields = row
            words, asks = self.preparer.analysed(value, fields)
            source = self.records.provenance(stored, path, key, version)
            position, at = source.get("position"), source.get("at")
            entry = IndexedItem(
                number,
                words,
                asks,
                (next(derived) if vectors is None else self.records.vectors(vectors, number))
                or b"",
                source.get("thread_id"),
                float(number if position is None else position),
                source.get("actor"),
                math.nan if at is None else datetime.fromisoformat(at).timestamp(),
                FOREVER if expires is None else expires,
                since,
            )
            out.append(entry)
        return out

    # -- the compact form

    def _keep(self, held: _Held, index: Index, namespace: _Namespace, state: _State) -> None:
        """Write the index to the file, unless something is erased before that."""
        assert self.post is not None
        made, covered = self.preparer.made(state.model), held.covered
        body = sealed(self.records.seal, namespace.path, index, covered, made)
        held.fresh = 0
        if body is None:
            return
        bound = (covered.newest, covered.closed, body)
        which = (namespace.ns, namespace.path, state.erasures)

        self.post(lambda: fetch_rows(self.sql["keep_index"], *bound, *which))


def _is_worth_keeping(fresh: int, items: int) -> bool:
    """Whether so many items were analysed that the next to load should not have to."""
    few = min(_MOST_FRESH, items // 4)
    return fresh >= max(_LEAST_KEPT, few, items // _FRESH_SHARE)


# -- the rows of several views


def _terms_of(view: IndexView, words: Iterable[str]) -> dict[str, Hits]:
    """The rows of a view that have each of some words, for those that any has."""
    hits = ((word, view.term(word)) for word in words)
    return {word: term for word, term in hits if len(term[0])}


def _unknown(pool: Pool, sought: Sought) -> list[str]:
    """The words of a query that may be misspelt: no row has them or a synonym."""
    if not (sought.corrected and len(pool)):
        return []
    unknown = [
        word
        for word, others in sought.words.items()
        if is_misspellable(word) and not any(other in pool.terms for other in (word, *others))
    ]
    return unknown[:_MOST_MISSPELT]


def _nearest(
    each: Callable[[_Take], Flow[list[Any]]], words: Sequence[str]
) -> Flow[dict[str, Hits]]:
    """The rows of the nearest word that some have, for each word that none has."""
    like = yield from each(lambda _, view: [view.vocabulary.near(word) for word in words])
    nearby = {
        word: find_nearest_words(word, chain.from_iterable(some), _CANDIDATES)
        for word, some in zip(words, zip(*like, strict=True), strict=True)
    }
    others = {other for some in nearby.values() for other in some}
    terms = _terms((yield from each(lambda _, view: (len(view.order), _terms_of(view, others)))))
    return {
        word: next((terms[other] for other in some if other in terms), NOWHERE)
        for word, some in nearby.items()
    }


def _terms(parts: Sequence[tuple[int, dict[str, Hits]]]) -> dict[str, Hits]:
    """The terms of several namespaces, each with how many rows it has, one after another."""
    if len(parts) == 1:
        return parts[0][1]
    hits = defaultdict[str, list[Hits]](list)
    first = 0
    for size, terms in parts:
        for word, (rows, counts) in terms.items():
            hits[word].append((rows + first, counts))
        first += size
    return {
        word: (np.concatenate([rows for rows, _ in some]), np.concatenate([c for _, c in some]))
        for word, some in hits.items()
    }


def _joined(parts: Sequence[Pool]) -> Pool:
    """The rows of several namespaces, one after another."""
    if len(parts) == 1:
        return parts[0]
    every, cosines = [np.empty(0, ROW)], [np.empty(0, np.float32)]
    numbers = dict[str, int]()
    first_thread, separation = 0, Separation()
    for part in parts:
        own = part.candidates.rows.copy()
        own["thread"][own["thread"] >= 0] += first_thread
        codes = [numbers.setdefault(name, len(numbers)) for name in part.actors]
        own["actor"] = np.array([*codes, -1])[own["actor"]]
        every.append(own)
        cosines += [] if part.cosines is None else [part.cosines]
        first_thread += part.threads
        separation = separation.joined(part.separation)
    terms = _terms([(len(part), part.terms) for part in parts])
    together = np.concatenate(cosines) if len(cosines) > 1 else None
    candidates = Candidates(np.concatenate(every))
    return Pool(candidates, list(numbers), first_thread, terms, together, separation)
