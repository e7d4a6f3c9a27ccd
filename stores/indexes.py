"""Load, update, cache and merge the search indexes of a store's namespaces.

Each namespace has a change counter, which is incremented on every change to its items. A search
first compares a namespace's change counter with the value recorded in the namespace's index. If the
counter has increased since the index was last updated, the search adds newer items to the index,
and removes items that have since been replaced or deleted. An index that is not in memory is read
from the database, where indexes are stored in encoded form. If the stored index lacks many items,
the search stores the updated index in the background. If the indexes in memory exceed a limit on
their total size, the least recently searched ones are evicted.
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
    NO_HITS,
    ROW_DTYPE,
    Candidates,
    Coverage,
    IndexedItem,
    IndexView,
    Ints,
    NamespaceIndex,
    WordHits,
    build_position_of_each_row,
    decode_index_or_none_if_outdated,
    encode_index_or_none_if_too_large,
    sort_rows_by_thread_and_position,
)
from perdure.stores.namespaces import prefix_range
from perdure.stores.puts import PutPreparer
from perdure.stores.reading import ItemReader, Selection
from perdure.stores.separation import VectorSeparation
from perdure.stores.text import STOP_WORDS, find_nearest_words, is_eligible_for_spelling_correction
from perdure.stores.vectors import Floats, Model

# the word that extracted facts use to refer to the person, as in "The user likes figs"
USER_WORD: Final = "user"
# Minimum fraction of a namespace's rows in which a word must occur to be considered a possible name
# of the person whom the rows are about
MIN_NAME_SHARE: Final = 0.3
# Maximum number of rows in a namespace for which a search tries to find the name of the person whom
# the rows are about.
_MAX_PERSONAL_ROWS: Final = 2_000
_PAGE_ROWS: Final = 1 << 12  # number of rows that are read at a time
# maximum number of query words to correct; correcting one word takes about 1 ms
_MAX_CORRECTED_WORDS: Final = 16
# maximum number of candidate corrections to try for a misspelt word; one is not enough, because a
# candidate may occur only in rows that the filter excludes
_MAX_CORRECTIONS: Final = 64
# search data of a version that is excluded from search
_UNSEARCHED_ITEM: Final = IndexedItem(0, (), False, b"", None, 0.0, None, math.nan, FOREVER, 0)
_MIN_UNSAVED, _MAX_UNSAVED_QUARTER, _UNSAVED_DIVISOR = 16, 256, 16  # limits; see `_is_worth_saving`
# cache key of an index: the namespace's path, and whether the index contains closed versions
# instead of current items
_Key = tuple[bytes, bool]
# a tuple of a namespace's path and a function that loads an index view of the namespace
_ViewSource = tuple[bytes, Callable[..., Flow[IndexView]]]
# a function that receives a namespace's path and an index view of the namespace
_ReadView = Callable[[bytes, IndexView], Any]


# -- candidates of a search


class QueryTerms(NamedTuple):
    """A query's words and embedding."""

    # the query's words, normalised in the same way as words in the index, with the synonyms of each
    words: Mapping[str, Sequence[str]]
    vector: Floats | None = None
    model: Model | None = None  # the model that computed the vector
    # Whether to correct query words that occur in no row, by replacing each of them with the most
    # similar word that occurs in a row
    corrects_words: bool = True
    # Whether the search has to find out which person a namespace's rows are about. If so, the
    # search also looks up the namespace's most frequent words, because one of them may be the
    # person's name.
    is_personal: bool = False

    def compute_cosines(
        self, view: IndexView, file_model: Model | None, approximate_above: int
    ) -> Floats | None:
        """Return each row's cosine to the query, or None if the query or the rows have no vectors.

        Raises:
            EmbedderMismatch: The vectors of the query and of the rows come from different models.
        """
        if self.vector is None or self.model is None or file_model is None:
            return None
        if self.model != file_model:
            raise file_model.build_mismatch_error(self.model)
        return view.compute_cosines(self.vector, approximate_above)


@dataclass
class CandidatePool:
    """The rows that a search ranks, with the data needed to score them."""

    candidates: Candidates
    actors: Sequence[str]  # name of each actor, by number
    thread_count: int  # number of threads
    # Maps query words to the rows that contain them. Words that occur in no row are omitted.
    terms: dict[str, WordHits]
    # cosine similarity of each row to the query (NaN if the row has no vectors), or None if no
    # vectors can be compared
    cosines: Floats | None
    # statistics that show how well vectors separate related rows from random rows
    separation: VectorSeparation

    def __len__(self) -> int:
        return len(self.candidates.rows)

    @property
    def ids(self) -> Ints:
        """The id of each row."""
        return np.asarray(self.candidates.rows["id"])

    def find_word_hits(self, word: str, stem: str) -> WordHits:
        """Return the rows that contain a word or its stem, with the term frequency in each row."""
        hits, stem_hits = self.terms.get(word), self.terms.get(stem)
        if hits is None or stem_hits is None or word == stem:
            return hits or stem_hits or NO_HITS
        rows, positions = np.unique(np.concatenate([hits[0], stem_hits[0]]), return_inverse=True)
        counts = np.zeros(len(rows), np.float32)
        np.maximum.at(counts, positions, np.concatenate([hits[1], stem_hits[1]]))
        return rows, counts

    def merge_threads_with_equal_names(self, thread_names: Sequence[Hashable]) -> CandidatePool:
        """Return a copy of the pool in which conversations with the same name have the same number.

        Renumbering is necessary because current items and closed versions come from different
        indexes, which may assign different numbers to the same conversation thread.

        Args:
            thread_names: The name of each thread, by its number.
        """
        numbers = dict[Hashable, int]()
        new_numbers = [numbers.setdefault(name, len(numbers)) for name in thread_names]
        rows = self.candidates.rows.copy()
        rows["thread"] = np.array([*new_numbers, -1])[rows["thread"]]
        order = sort_rows_by_thread_and_position(rows, np.arange(len(rows)))
        positions = build_position_of_each_row(order, len(rows)).astype(np.int64)
        terms = {
            word: (positions[rows_of_word], counts)
            for word, (rows_of_word, counts) in self.terms.items()
        }
        cosines = None if self.cosines is None else self.cosines[order]
        candidates = Candidates(rows[order])
        return CandidatePool(candidates, self.actors, len(numbers), terms, cosines, self.separation)


# -- the indexes


class SnapshotOutdated(Exception):
    """Raised if a read uses a database snapshot that is older than the search index in memory.

    The read must be retried on a newer snapshot of the database.
    """


class _State(NamedTuple):
    """The counters and the embedding model that all search indexes of a store depend on."""

    erasures: int  # counter of erasures
    # counter that is incremented whenever vectors are stored for items that had none
    embedded: int
    # sequence number of the latest closing of a version (by replacement, deletion or expiry)
    closed: int
    model: Model | None  # the embedding model recorded in the database

    @property
    def model_number(self) -> int:
        """The number assigned to the store's embedding model, or 0 if the store has no model."""
        return 0 if self.model is None else self.model.number


class _NamespaceRow(NamedTuple):
    """The row of a namespace in the database."""

    namespace_key: int
    path: bytes
    changes: int  # the change counter
    items: int  # number of current items


class _CachedIndex:
    """The cached search index of a namespace, and the database state that the index reflects.

    Attributes:
        lock: Held while the index is used or updated.
        erasures: The store's counter of erasures when erased data was last removed from the index.
        nbytes: The size of the index in bytes, as counted in the total size of the cache.
        index: The index, or None if it must be loaded.
        coverage: How far the index covers the namespace.
        changes: The change counter of the namespace at the last update, or -1.
        model_number: The number of the model of the vectors, or -1 if there is no index.
        unsaved: The number of items whose words or vectors are missing from the stored index.
        expired_until: The time up to which expiry times in the index were compared with the
            database, in microseconds.
    """

    def __init__(self, erasures: int) -> None:
        self.lock = threading.Lock()
        self.erasures = erasures
        self.nbytes = 0
        self.clear()

    def clear(self) -> None:
        """Discard the index."""
        self.index: NamespaceIndex | None = None
        self.coverage = Coverage(0, 0, -1, 0)
        self.changes = self.model_number = -1
        self.unsaved = 0
        self.expired_until = 0


@dataclass(eq=False)
class Indexes:
    """The indexes of a store's namespaces. Instances are thread-safe."""

    reader: ItemReader
    preparer: PutPreparer
    # maximum total size of the cached indexes in bytes; the most recently searched index is never
    # evicted
    budget: int
    approximate_above: int  # number of vectors in a namespace above which search is approximate
    # function that performs a database write in the background, or None if the store is read-only
    write_in_background: Callable[[Callable[[], Flow[object]]], None] | None
    # callback that runs when an erasure by this process or by another process is noticed
    on_erasure: Callable[[], None]
    # whether the warning about missing vectors has been logged
    warned_lacking: bool = False
    # guards the cache; do not read from the database while holding the lock
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # the cached indexes, the least recently searched first
    _cached: OrderedDict[_Key, _CachedIndex] = field(default_factory=OrderedDict)
    _nbytes: int = 0  # total size of the cached indexes in bytes
    # value of the store's erasure counter when erased data was last removed from the cached indexes
    _erasures: int = 0

    def __post_init__(self) -> None:
        self.sql, self.records = self.reader.sql, self.reader.records

    # -- loading

    def load_candidate_pool(self, selection: Selection, query: QueryTerms) -> Flow[CandidatePool]:
        """Load the selected rows, with the data used to rank them for a query.

        A search as of a past time ranks the versions that were current at that time, both those
        that are still current and those that were closed since. If some of the query's words may be
        misspelt, the indexes are read a second time to find similar words.

        Raises:
            SnapshotOutdated: Another OS thread has read a newer state.
        """
        now, as_of, closed = selection.now, selection.as_of, list[Row]()
        current_selection = selection
        if as_of is not None:
            closed = yield from self.reader.read_closed_versions(selection)
            current_selection = replace(selection, now=as_of, as_of=None)
        chosen_ids = None
        if selection.filter is not None or selection.provenance is not None:
            ids = yield from self.reader.read_matching_ids(current_selection)
            chosen_ids = np.array([*ids, *(number for _, number in closed)], np.int64)
        namespaces_statement = self.sql("namespaces_under", *prefix_range(selection.prefix))
        marks, rows = yield [self.sql("store_state"), namespaces_statement]
        state = yield from self._parse_store_state_and_remove_erased_items(marks[0])
        closed_by_path = defaultdict[bytes, list[int]](list)
        for path, number in closed:
            closed_by_path[path].append(number)
        sources: list[_ViewSource] = [
            (row[1], partial(self._load_index_view, _NamespaceRow(*row), state, now, as_of))
            for row in rows
        ]
        sources += [
            (path, partial(self._load_view_of_closed_versions, path, ids_of_path, state))
            for path, ids_of_path in closed_by_path.items()
        ]
        read_views = partial(self._apply_function_to_nonempty_index_views, sources, chosen_ids)
        words = {form for word, synonyms in query.words.items() for form in (word, *synonyms)}
        threads: list[tuple[bytes, str]] = []

        def build_part(path: bytes, view: IndexView) -> CandidatePool:
            """Build the pool of one view."""
            threads.extend((path, name) for name in view.threads if closed_by_path)
            cosines = query.compute_cosines(view, state.model, self.approximate_above)
            subjects = set[str]()
            if query.is_personal and len(view.rows) <= _MAX_PERSONAL_ROWS:
                subjects = {USER_WORD, *view.frequent_words(MIN_NAME_SHARE)} - STOP_WORDS
            terms = _find_hits_by_word(view, words | subjects)
            threads_count = len(view.threads)
            return CandidatePool(
                view.candidates, view.actors, threads_count, terms, cosines, view.separation
            )

        pool = _merge_candidate_pools((yield from read_views(build_part)))
        if unknown := _find_possibly_misspelt_words(pool, query):
            pool.terms.update((yield from _find_rows_of_most_similar_words(read_views, unknown)))
        return pool.merge_threads_with_equal_names(threads) if closed_by_path else pool

    def _apply_function_to_nonempty_index_views(
        self,
        sources: Sequence[_ViewSource],
        chosen_ids: Ints | None,
        read_view: _ReadView,
    ) -> Flow[list[Any]]:
        """Call a function on each non-empty index view, and return the results.

        Args:
            sources: The path of each namespace, and a function that loads its view.
            chosen_ids: The ids of the rows to keep, or None for all.
            read_view: The function.
        """
        results = []
        total = 0
        for path, load_view in sources:
            # Stop caching indexes once the loaded ones exceed the memory budget.
            view = yield from load_view(may_cache=total <= self.budget)
            total += view.nbytes
            if chosen_ids is not None:
                view = view.select_ids(chosen_ids)
            if len(view.order):
                results.append(read_view(path, view))
        return results

    def remove_erased_items_from_cached_indexes(self) -> Flow[None]:
        """Drop all erased data from the indexes in memory. Each search does this as well."""
        # Ignore `SnapshotOutdated`. It means that another OS thread has already dropped the erased
        # data from the indexes in memory.
        with suppress(SnapshotOutdated):
            yield from self._parse_store_state_and_remove_erased_items(
                (yield self.sql("store_state"))[0]
            )

    # -- the cache

    def _parse_store_state_and_remove_erased_items(self, state_row: Row) -> Flow[_State]:
        """Return the state of the store.

        If items have been erased since the last call, their data is also removed from the indexes
        in memory.
        """
        erasures, embedded, closed, model = state_row
        state = _State(
            erasures, embedded, closed, None if model is None else Model.from_setting(model)
        )
        with self._lock:
            if erasures < self._erasures:
                raise SnapshotOutdated
            is_outdated = erasures > self._erasures
        if is_outdated:
            self.on_erasure()
            rows = yield self.sql("namespaces_under", *prefix_range(b""))
            existing = {(row[1], False): _NamespaceRow(*row) for row in rows}
            with self._lock:
                entries = list(self._cached.items())
            for key, cached in entries:
                yield from self._update_index_after_erasure(cached, key, existing.get(key), state)
            with self._lock:
                self._erasures = max(self._erasures, erasures)
        return state

    def _update_index_after_erasure(
        self, cached: _CachedIndex, key: _Key, namespace: _NamespaceRow | None, state: _State
    ) -> Flow[None]:
        """Update an index after an erasure, and drop the words that no longer occur in any item."""
        with cached.lock:
            if cached.erasures >= state.erasures:
                return
            if namespace is None or cached.index is None or cached.changes > namespace.changes:
                cached.clear()
                self._record_index_size_and_evict_others(key, cached, 0)
            elif cached.changes != namespace.changes:
                index = yield from self._bring_index_up_to_date(cached, namespace, state)
                index.compact()
                # An erasure deletes the stored index, so the index must be saved again in full.
                cached.unsaved = namespace.items
            cached.erasures = state.erasures

    def _get_cached_index(self, key: _Key, state: _State, *, may_cache: bool) -> _CachedIndex:
        """Return a namespace's cached index, or create a new one.

        A newly created index is cached only if `may_cache` is true.
        """
        with self._lock:
            cached = self._cached.get(key)
            if cached is not None and cached.erasures == state.erasures:
                self._cached.move_to_end(key)
                return cached
            if cached is not None and cached.erasures > state.erasures:
                raise SnapshotOutdated
            cached = _CachedIndex(state.erasures)
            if may_cache:
                self._nbytes -= self._cached[key].nbytes if key in self._cached else 0
                self._cached[key] = cached
            return cached

    def _record_index_size_and_evict_others(
        self, key: _Key, cached: _CachedIndex, nbytes: int
    ) -> None:
        """Record an index's size, and evict others if the total exceeds the memory budget."""
        with self._lock:
            if self._cached.get(key) is not cached:
                return
            self._nbytes += nbytes - cached.nbytes
            cached.nbytes = nbytes
            while self._nbytes > self.budget and len(self._cached) > 1:
                _, dropped = self._cached.popitem(last=False)
                self._nbytes -= dropped.nbytes

    def _load_index_view(
        self,
        namespace: _NamespaceRow,
        state: _State,
        now: int,
        as_of: int | None,
        *,
        may_cache: bool,
    ) -> Flow[IndexView]:
        """Load a view of a namespace's items, as they are now or as of a past time."""
        key = (namespace.path, False)
        cached = self._get_cached_index(key, state, may_cache=may_cache)
        with cached.lock:
            if (
                cached.changes > namespace.changes
                or cached.model_number > state.model_number
                or cached.coverage.embedded > state.embedded
            ):
                raise SnapshotOutdated
            index = yield from self._bring_index_up_to_date(cached, namespace, state)
            yield from self._refresh_cached_expiry_times(
                cached, index, now, now if as_of is None else max(now, as_of)
            )
            view = index.get_view_of_unexpired_items(now if as_of is None else as_of)
        self._record_index_size_and_evict_others(key, cached, view.nbytes)
        return view if as_of is None else view.without_later_puts(as_of)

    def _load_view_of_closed_versions(
        self, path: bytes, version_ids: Sequence[int], state: _State, *, may_cache: bool
    ) -> Flow[IndexView]:
        """Return an index view of some closed versions of a namespace.

        Closed versions have an index of their own, which contains every closed version that a
        search in this process has loaded. How well the vectors in this index separate related rows
        from random rows is not measured, because the result would depend on which versions earlier
        searches happened to load.
        """
        cached = self._get_cached_index((path, True), state, may_cache=may_cache)
        closed = np.array(version_ids, np.int64)
        with cached.lock:
            if cached.model_number > state.model_number:
                raise SnapshotOutdated
            if (
                cached.index is None
                or cached.model_number != state.model_number
                or cached.nbytes > self.budget
            ):
                cached.clear()
                cached.index, cached.model_number = (
                    NamespaceIndex(state.model, self.approximate_above),
                    state.model_number,
                )
            new_ids = np.setdiff1d(closed, cached.index.rows["id"])
            for begin in range(0, len(new_ids), _PAGE_ROWS):
                entries = yield from self._load_indexed_items(
                    new_ids[begin : begin + _PAGE_ROWS].tolist(), state
                )
                cached.index.add_items(entries)
            view = cached.index.get_view_of_unexpired_items(0)
        self._record_index_size_and_evict_others((path, True), cached, view.nbytes)
        return replace(view.select_ids(closed), separation=VectorSeparation())

    def _load_indexed_items(
        self, version_ids: Sequence[int], state: _State
    ) -> Flow[list[IndexedItem]]:
        """Load the search data of some versions.

        Versions that are excluded from search are returned without words and vectors.
        """
        rows = yield self.sql("search_data_by_ids", state.model_number, json.dumps(version_ids))
        searched = {number: (vectors, fields) for number, vectors, fields in rows}
        rows = yield self.sql("versions_by_ids", json.dumps([*searched]))
        # The rows are sorted by id, because scores computed in another order could differ in the
        # last bit from one search to the next.
        rows = sorted(rows, key=lambda row: row[0])
        entries = self._build_indexed_items(
            [(*row, *searched[row[0]]) for row in rows], state.model
        )
        return entries + [
            _UNSEARCHED_ITEM._replace(id=id) for id in version_ids if id not in searched
        ]

    # -- updating

    def _bring_index_up_to_date(
        self, cached: _CachedIndex, namespace: _NamespaceRow, state: _State
    ) -> Flow[NamespaceIndex]:
        """Update a namespace's index to match the database, and return the index.

        If the update fails, the index is discarded.
        """
        try:
            if cached.model_number != state.model_number:
                cached.clear()
            if cached.index is None:
                cached.index = yield from self._load_index(cached, namespace, state)
                cached.model_number = state.model_number
            if cached.changes != namespace.changes:
                yield from self._apply_changes_since_last_update(
                    cached, cached.index, namespace, state
                )
            else:
                cached.coverage = cached.coverage._replace(closed=state.closed)
            return cached.index
        except BaseException:
            cached.clear()
            raise

    def _apply_changes_since_last_update(
        self, cached: _CachedIndex, index: NamespaceIndex, namespace: _NamespaceRow, state: _State
    ) -> Flow[None]:
        """Update the index with the changes made to a namespace since the last update."""
        newest, items, embedded, _ = cached.coverage
        added, is_complete = 0, False
        while not is_complete:
            rows = yield self.sql(
                "search_data_since", state.model_number, namespace.namespace_key, newest, _PAGE_ROWS
            )
            # For items that are excluded from search, the row contains no value.
            entries = self._build_indexed_items(
                [row for row in rows if row[8] is not None], state.model
            )
            index.add_items(entries)
            cached.unsaved += len(entries)
            added += len(rows)
            newest = rows[-1][0] if rows else newest
            is_complete = len(rows) < _PAGE_ROWS
        if removed_count := items + added - namespace.items:
            yield from self._remove_replaced_and_deleted_items(
                removed_count, index, cached.coverage, namespace, state
            )
        if state.model is not None and embedded != state.embedded:
            cached.unsaved += yield from self._add_missing_vectors_and_count_items(
                index, state.model_number
            )
        cached.coverage = Coverage(newest, namespace.items, state.embedded, state.closed)
        cached.changes = namespace.changes
        if self.write_in_background is not None and _is_worth_saving(
            cached.unsaved, namespace.items
        ):
            self._save_index_in_background(cached, index, namespace, state)

    def _remove_replaced_and_deleted_items(
        self,
        removed_count: int,
        index: NamespaceIndex,
        coverage: Coverage,
        namespace: _NamespaceRow,
        state: _State,
    ) -> Flow[None]:
        """Remove replaced and deleted items from an index.

        If only a few versions have been closed since the last update, their ids are read from the
        database. If many versions have been closed, or if items have also been erased, the ids of
        all current items are read instead, and all other items are removed from the index.
        """
        if state.closed - coverage.closed <= max(_PAGE_ROWS, namespace.items):
            rows = yield self.sql("closed_since", coverage.closed, namespace.namespace_key)
            closed = np.array([number for (number,) in rows], np.int64)
            # If these versions are not exactly as many as the items to remove, items may also have
            # been erased.
            if np.count_nonzero(closed <= coverage.newest) == removed_count:
                index.remove_items(closed)
                return
        rows = yield self.sql("present_ids", namespace.namespace_key)
        current_ids = np.array([number for (number,) in rows], np.int64)
        index.remove_items(np.setdiff1d(index.rows["id"], current_ids))

    def _load_index(
        self, cached: _CachedIndex, namespace: _NamespaceRow, state: _State
    ) -> Flow[NamespaceIndex]:
        """Load the stored index and record what it covers, or return an empty index.

        An empty index is returned if there is no stored index, or if it is damaged or outdated.
        """
        for (body,) in (yield self.sql("get_search_index", namespace.namespace_key)):
            fingerprint = self.preparer.describe_how_index_is_computed(state.model)
            source = self.records.seal, namespace.path, body
            decoded = decode_index_or_none_if_outdated(
                *source, state.model, self.approximate_above, fingerprint
            )
            if decoded is not None:
                index, cached.coverage = decoded
                return index
        return NamespaceIndex(state.model, self.approximate_above)

    def _add_missing_vectors_and_count_items(
        self, index: NamespaceIndex, model_number: int
    ) -> Flow[int]:
        """Add stored vectors to items that were indexed without vectors, and count these items."""
        ids = index.list_item_ids_without_vectors()
        total = 0
        for begin in range(0, len(ids), _PAGE_ROWS):
            page = json.dumps(ids[begin : begin + _PAGE_ROWS])
            rows = yield self.sql("search_data_by_ids", model_number, page)
            vectors_of = {
                row: self.records.decode_row_vectors(vectors, row)
                for row, vectors, _ in rows
                if vectors is not None
            }
            index.add_vectors_of_items(vectors_of)
            total += len(vectors_of)
        return total

    def _refresh_cached_expiry_times(
        self, cached: _CachedIndex, index: NamespaceIndex, now: int, until: int
    ) -> Flow[None]:
        """Reload the expiry times of the items that the index considers expired by `until`.

        Items that were checked by an earlier call are skipped.

        An index caches each item's expiry time. An item's expiry time in the database may be later
        than the cached one, because reading the item can restart its time to live. If `until` is in
        the future, expiry times between `now` and `until` can still change, so the next search
        refreshes these items again.
        """
        since = min(cached.expired_until, now)  # the clock may have stepped back
        if expiring := index.find_item_ids_expiring_between(since, until):
            index.update_expiries(dict((yield self.sql("expiries", json.dumps(expiring)))))
        cached.expired_until = now

    def _build_indexed_items(self, rows: Sequence[Row], model: Model | None) -> list[IndexedItem]:
        """Build the search data of some versions.

        Vectors that are not stored in the database are computed from the items' values, if the
        store's embedder is fast enough.
        """
        values = [self.records.decode_row_value(row) for row in rows]
        without_vectors = [
            (value, row[11]) for row, value in zip(rows, values, strict=True) if row[10] is None
        ]
        derived_vectors = iter(
            self.preparer.compute_missing_vectors_if_possible(without_vectors, model)
        )
        entries = []
        for row, value in zip(rows, values, strict=True):
            number, path, key, version, _, since, _, expires, _, stored, vectors, fields = row
            words, ends_with_question = self.preparer.tokenize_value_and_detect_question(
                value, fields
            )
            provenance = self.records.decode_provenance(stored, path, key, version)
            position, sent_at = provenance.get("position"), provenance.get("at")
            entry = IndexedItem(
                number,
                words,
                ends_with_question,
                (
                    next(derived_vectors)
                    if vectors is None
                    else self.records.decode_row_vectors(vectors, number)
                )
                or b"",
                provenance.get("thread_id"),
                float(number if position is None else position),
                provenance.get("actor"),
                math.nan if sent_at is None else datetime.fromisoformat(sent_at).timestamp(),
                FOREVER if expires is None else expires,
                since,
            )
            entries.append(entry)
        return entries

    # -- the stored index

    def _save_index_in_background(
        self, cached: _CachedIndex, index: NamespaceIndex, namespace: _NamespaceRow, state: _State
    ) -> None:
        """Write the index to the database in the background, unless an erasure happens first."""
        assert self.write_in_background is not None
        fingerprint, coverage = (
            self.preparer.describe_how_index_is_computed(state.model),
            cached.coverage,
        )
        body = encode_index_or_none_if_too_large(
            self.records.seal, namespace.path, index, coverage, fingerprint
        )
        cached.unsaved = 0
        if body is None:
            return
        covered_rows = (coverage.newest, coverage.closed, body)
        condition = (namespace.namespace_key, namespace.path, state.erasures)

        self.write_in_background(
            lambda: fetch_rows(self.sql["save_search_index"], *covered_rows, *condition)
        )


def _is_worth_saving(unsaved: int, items: int) -> bool:
    """Return whether the stored index lacks so many items that it should be saved again.

    The index is saved again if three conditions hold: it lacks at least 16 items; it lacks at least
    1/16 of all items; and it lacks at least 256 items or a quarter of all items, whichever is less.
    """
    quarter = min(_MAX_UNSAVED_QUARTER, items // 4)
    return unsaved >= max(_MIN_UNSAVED, quarter, items // _UNSAVED_DIVISOR)


# -- combining views


def _find_hits_by_word(view: IndexView, words: Iterable[str]) -> dict[str, WordHits]:
    """Return a dict that maps each of `words` to the rows of an index view that contain the word.

    Words that occur in no row are omitted.
    """
    hits = ((word, view.find_word_hits(word)) for word in words)
    return {word: term for word, term in hits if len(term[0])}


def _find_possibly_misspelt_words(pool: CandidatePool, query: QueryTerms) -> list[str]:
    """Return the query words that could be misspelt.

    A word may be misspelt if neither the word nor one of its synonyms occurs in any row.
    """
    if not (query.corrects_words and len(pool)):
        return []
    unknown = [
        word
        for word, others in query.words.items()
        if is_eligible_for_spelling_correction(word)
        and not any(other in pool.terms for other in (word, *others))
    ]
    return unknown[:_MAX_CORRECTED_WORDS]


def _find_rows_of_most_similar_words(
    read_views: Callable[[_ReadView], Flow[list[Any]]], unknown_words: Sequence[str]
) -> Flow[dict[str, WordHits]]:
    """Map each unknown word to the rows that contain the most similar known word."""
    similar_words = yield from read_views(
        lambda _, view: [view.vocabulary.similar_words(word) for word in unknown_words]
    )
    corrections = {
        word: find_nearest_words(word, chain.from_iterable(candidates), _MAX_CORRECTIONS)
        for word, candidates in zip(unknown_words, zip(*similar_words, strict=True), strict=True)
    }
    others = {other for candidates in corrections.values() for other in candidates}
    terms = _merge_word_hits_of_namespaces(
        (yield from read_views(lambda _, view: (len(view.order), _find_hits_by_word(view, others))))
    )
    return {
        word: next((terms[other] for other in candidates if other in terms), NO_HITS)
        for word, candidates in corrections.items()
    }


def _merge_word_hits_of_namespaces(
    row_counts_and_word_hits: Sequence[tuple[int, dict[str, WordHits]]],
) -> dict[str, WordHits]:
    """Merge the word-to-rows dicts of several namespaces into a single dict.

    Row numbers start at 0 in each namespace. In the merged dict, the rows of all namespaces are
    numbered consecutively, so that each row number is unique.

    Args:
        row_counts_and_word_hits: For each namespace, the number of its rows and the rows of its
            words.
    """
    if len(row_counts_and_word_hits) == 1:
        return row_counts_and_word_hits[0][1]
    hits = defaultdict[str, list[WordHits]](list)
    first = 0
    for size, terms in row_counts_and_word_hits:
        for word, (rows, counts) in terms.items():
            hits[word].append((rows + first, counts))
        first += size
    return {
        word: (
            np.concatenate([rows for rows, _ in parts_of_word]),
            np.concatenate([c for _, c in parts_of_word]),
        )
        for word, parts_of_word in hits.items()
    }


def _merge_candidate_pools(pools: Sequence[CandidatePool]) -> CandidatePool:
    """Merge the candidate pools of several namespaces into one pool."""
    if len(pools) == 1:
        return pools[0]
    row_arrays, cosines = [np.empty(0, ROW_DTYPE)], [np.empty(0, np.float32)]
    numbers = dict[str, int]()
    first_thread, separation = 0, VectorSeparation()
    for pool in pools:
        rows = pool.candidates.rows.copy()
        rows["thread"][rows["thread"] >= 0] += first_thread
        codes = [numbers.setdefault(name, len(numbers)) for name in pool.actors]
        rows["actor"] = np.array([*codes, -1])[rows["actor"]]
        row_arrays.append(rows)
        cosines += [] if pool.cosines is None else [pool.cosines]
        first_thread += pool.thread_count
        separation = separation.combine_with(pool.separation)
    terms = _merge_word_hits_of_namespaces([(len(pool), pool.terms) for pool in pools])
    all_cosines = np.concatenate(cosines) if len(cosines) > 1 else None
    candidates = Candidates(np.concatenate(row_arrays))
    return CandidatePool(candidates, list(numbers), first_thread, terms, all_cosines, separation)
