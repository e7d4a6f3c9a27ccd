"""Load, update, cache and merge the search indexes of a store's namespaces.

Each namespace has a change counter, which is incremented on every change to its items. A search
first compares a namespace's change counter with the value recorded in the namespace's index. If the
namespace's change counter has increased since the index was last updated, the search adds newer
items to the index, and removes items that have since been replaced or deleted. An index that is not
in memory is read from the database, where indexes are stored in encoded form. If the stored index
lacks many items, the search stores the updated index in the background. If the indexes in memory
exceed a limit on their total size, the least recently searched ones are evicted.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from perdure.storage.flow import Flow, Row, fetch_rows
from perdure.stores.item_reader import ItemReader, Selection
from perdure.stores.item_writer import PutPreparer
from perdure.stores.namespaces import prefix_range
from perdure.stores.search.namespace_index import (
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
from perdure.stores.search.separation import UNMEASURED, VectorSeparation
from perdure.stores.search.text import (
    STOP_WORDS,
    find_nearest_words,
    is_eligible_for_spelling_correction,
)
from perdure.stores.search.vectors import Floats, Model

# the word that extracted facts use to refer to the person, as in "The user likes figs"
USER_WORD: Final = "user"
# A search tries to find the name of the user whom nearly all memories in a namespace describe. A
# word can count as this name only if at least this fraction of the rows contain the word.
MIN_NAME_SHARE: Final = 0.3
# Maximum number of rows in a namespace for which a search detects the name of the main person. The
# main person is the user whom the memories in the namespace describe. In larger namespaces, the
# search skips this detection.
_MAX_PERSONAL_ROWS: Final = 2_000
_PAGE_ROWS: Final = 1 << 12  # number of rows that are read at a time
# maximum number of query words to correct; correcting one word takes about 1 ms
_MAX_CORRECTED_WORDS: Final = 16
# maximum number of candidate corrections to try for a misspelt word; one is not enough, because a
# candidate may occur only in rows that the filter excludes
_MAX_CORRECTIONS: Final = 64
# placeholder for the search data of a version that is excluded from search
_UNSEARCHED_ITEM: Final = IndexedItem(0, (), False, b"", None, 0.0, None, math.nan, FOREVER, 0)
# limits; see `_should_save_index_again`
_MIN_UNSAVED: Final = 16
_MAX_UNSAVED_QUARTER: Final = 256
_UNSAVED_DIVISOR: Final = 16
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
    # Whether to correct the spelling of query words that occur in no row. Each such query word is
    # replaced with the most similar word that occurs in a row.
    corrects_words: bool = True
    # Whether to look up the most frequent words of each namespace. One of these words may be the
    # name of the person whom the memories describe.
    is_personal: bool = False


@dataclass
class CandidatePool:
    """The rows that a search ranks, with the data needed to score them."""

    candidates: Candidates
    actors: Sequence[str]  # name of each actor, by number
    # For each namespace, its path and the names of its threads. Threads are numbered in this order.
    threads: Sequence[tuple[bytes, Sequence[str]]]
    # Maps query words to the rows that contain them. Words that occur in no row are omitted.
    terms: dict[str, WordHits]
    # cosine similarity of each row to the query (NaN if the row has no vectors), or None if no
    # vectors can be compared
    cosines: Floats | None
    # statistics that show how well the vectors distinguish related rows from unrelated rows
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

    def renumber_threads_by_name(self) -> CandidatePool:
        """Return a copy in which all rows of a conversation thread have the same thread number.

        Renumbering is necessary because current items and closed versions come from different
        indexes, which may assign different numbers to the same conversation thread.
        """
        numbers = dict[tuple[bytes, str], int]()
        new_numbers = [
            numbers.setdefault((path, name), len(numbers))
            for path, names in self.threads
            for name in names
        ]
        rows = self.candidates.rows.copy()
        rows["thread"] = np.array([*new_numbers, -1])[rows["thread"]]
        order = sort_rows_by_thread_and_position(rows, np.arange(len(rows)))
        positions = build_position_of_each_row(order, len(rows)).astype(np.int64)
        terms = {
            word: (positions[rows_of_word], counts)
            for word, (rows_of_word, counts) in self.terms.items()
        }
        cosines = None if self.cosines is None else self.cosines[order]
        threads = [(path, (name,)) for path, name in numbers]
        candidates = Candidates(rows[order])
        return CandidatePool(candidates, self.actors, threads, terms, cosines, self.separation)


# -- the indexes


class SnapshotOutdated(Exception):
    """Raised if a read uses a database snapshot that is older than the search index in memory.

    Callers must catch `SnapshotOutdated` and repeat the read on a newer snapshot of the database.
    """


class _State(NamedTuple):
    """Store-wide state used by all search indexes: the change counters and the embedding model."""

    erasures: int  # counter of erasures
    # counter that is incremented whenever vectors are stored for items that had none
    embedded: int
    # sequence number of the latest change that closed a version (by replacement, deletion or
    # expiry)
    closed: int
    model: Model | None  # the embedding model recorded in the database
    model_number: int  # the number of the embedding model, or 0 if there is no model


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
    # protects the cached indexes from concurrent changes; do not read from the database while
    # holding this lock
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

        With `selection.as_of`, the search ranks the versions that were current at that past time,
        including versions that were replaced or deleted later. If some of the query's words may be
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
        pools = yield from read_views(partial(self._build_pool_of_view, query, state.model))
        pool = pools[0] if len(pools) == 1 else _merge_candidate_pools(pools)
        if query.corrects_words and pools:
            pool.terms.update((yield from _find_rows_of_misspelt_words(read_views, pool, query)))
        return pool.renumber_threads_by_name() if closed_by_path else pool

    def _build_pool_of_view(
        self, query: QueryTerms, file_model: Model | None, path: bytes, view: IndexView
    ) -> CandidatePool:
        """Build the candidate pool of one namespace.

        Raises:
            EmbedderMismatch: The vectors of the query and of the rows come from different models.
        """
        cosines = None
        if query.vector is not None and query.model is not None and file_model is not None:
            if query.model != file_model:
                raise file_model.build_mismatch_error(query.model)
            cosines = view.compute_cosines(query.vector, self.approximate_above)
        words = set(query.words).union(*query.words.values())
        if query.is_personal and len(view.rows) <= _MAX_PERSONAL_ROWS:
            words |= {USER_WORD, *view.frequent_words(MIN_NAME_SHARE)} - STOP_WORDS
        terms, threads = view.find_hits_by_word(words), [(path, view.threads)]
        return CandidatePool(view.candidates, view.actors, threads, terms, cosines, view.separation)

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
        erasures, embedded, closed, model_setting = state_row
        model = None if model_setting is None else Model.from_setting(model_setting)
        state = _State(erasures, embedded, closed, model, 0 if model is None else model.number)
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
                # An erasure deletes the stored index, so all items in the new index count as
                # unsaved.
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
        """Record an index's size, and evict other indexes if the memory budget is exceeded."""
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
            # Reload the index's expiry times between `since` and `until` from the database. Reading
            # an item can restart its time to live, so the database may contain a later expiry time
            # than the index. `since` is not later than `now`, even if the clock was set back after
            # the last reload.
            since, until = min(cached.expired_until, now), now if as_of is None else max(now, as_of)
            if expiring := index.find_item_ids_expiring_between(since, until):
                index.update_expiries(dict((yield self.sql("expiries", json.dumps(expiring)))))
            # Expiry times after `now` can still change, so a later search reloads them again.
            cached.expired_until = now
            view = index.get_view_of_unexpired_items(now if as_of is None else as_of)
        self._record_index_size_and_evict_others(key, cached, view.nbytes)
        return view if as_of is None else view.without_later_puts(as_of)

    def _load_view_of_closed_versions(
        self, path: bytes, version_ids: Sequence[int], state: _State, *, may_cache: bool
    ) -> Flow[IndexView]:
        """Return a search index snapshot with only the given closed (non-current) item versions.

        A closed version is an item version that was replaced or deleted, or that has expired.

        Closed versions have an index of their own, which contains every closed version that a
        search in this process has loaded. The vector separation describes how well vectors
        distinguish related rows from unrelated rows (see `perdure.stores.search.separation`). The
        vector separation is measured only from current item versions. The set of loaded closed
        versions depends on earlier searches, so a measurement that included closed versions would
        vary.
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
        return replace(view.select_ids(closed), separation=UNMEASURED)

    def _load_indexed_items(
        self, version_ids: Sequence[int], state: _State
    ) -> Flow[list[IndexedItem]]:
        """Load the search data of some versions.

        An item version that is excluded from search is returned with an empty word list and no
        vectors.
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
            entries = self._build_indexed_items(rows, state.model)
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
        if self.write_in_background is not None and _should_save_index_again(
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

        If only a few versions have been closed since the index was last updated, the ids of these
        versions are read from the database. If any items were erased, or if many versions were
        replaced or deleted, the ids of all current items are read. All other items are then removed
        from the index.
        """
        if state.closed - coverage.closed <= max(_PAGE_ROWS, namespace.items):
            rows = yield self.sql("closed_since", coverage.closed, namespace.namespace_key)
            closed = np.array([number for (number,) in rows], np.int64)
            # When an item is replaced or deleted, its last version is kept as a closed version.
            # When an item is erased, no version is kept. After an erasure, the database therefore
            # contains fewer closed (replaced or deleted) versions than the `removed_count` versions
            # that the index must remove.
            if np.count_nonzero(closed <= coverage.newest) == removed_count:
                index.remove_items(closed)
                return
        rows = yield self.sql("present_ids", namespace.namespace_key)
        current_ids = np.array([number for (number,) in rows], np.int64)
        index.remove_items(np.setdiff1d(index.rows["id"], current_ids))

    def _load_index(
        self, cached: _CachedIndex, namespace: _NamespaceRow, state: _State
    ) -> Flow[NamespaceIndex]:
        """Load the namespace's search index from the database, or return an empty index.

        If the stored index is used, its `Coverage` object is assigned to `cached.coverage`. The
        `Coverage` object records which versions and changes of the namespace's items the index
        includes.

        An empty index is returned if there is no stored index, or if it is damaged or outdated.
        """
        for (body,) in (yield self.sql("get_search_index", namespace.namespace_key)):
            fingerprint = self.preparer.build_index_computation_fingerprint(state.model)
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
        """Load the stored vectors of the items whose vectors are missing from the index.

        Return the number of items whose vectors were added to the index.
        """
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

    def _build_indexed_items(self, rows: Sequence[Row], model: Model | None) -> list[IndexedItem]:
        """Build the search data of some versions, except those that are excluded from search.

        Vectors that are not stored in the database are computed from the items' values, if the
        store's embedder is fast enough.
        """
        # If an item is excluded from search, its row contains no value.
        rows = [row for row in rows if row[8] is not None]
        values = list(map(self.records.decode_row_value, rows))
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
            self.preparer.build_index_computation_fingerprint(state.model),
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


def _should_save_index_again(unsaved_item_count: int, item_count: int) -> bool:
    """Return whether the stored index lacks so many items that it should be saved again.

    The index is saved again when the number of unsaved items reaches the largest of three
    thresholds. The first threshold is 16 unsaved items. The second threshold is 1/16 of all items.
    The third threshold is a quarter of all items, but at most 256 items.
    """
    quarter = min(_MAX_UNSAVED_QUARTER, item_count // 4)
    return unsaved_item_count >= max(_MIN_UNSAVED, quarter, item_count // _UNSAVED_DIVISOR)


# -- combining views


def _find_rows_of_misspelt_words(
    read_views: Callable[[_ReadView], Flow[list[Any]]], pool: CandidatePool, query: QueryTerms
) -> Flow[dict[str, WordHits]]:
    """Map each possibly misspelt query word to the rows that contain the most similar known word.

    A word may be misspelt if neither the word nor one of its synonyms occurs in any row.
    """
    unknown = [
        word
        for word, others in query.words.items()
        if word not in pool.terms
        and pool.terms.keys().isdisjoint(others)
        and is_eligible_for_spelling_correction(word)
    ][:_MAX_CORRECTED_WORDS]
    hits_by_word = dict.fromkeys(unknown, NO_HITS)
    if not unknown:
        return hits_by_word
    similar_words = yield from read_views(
        lambda _, view: list(map(view.vocabulary.similar_words, unknown))
    )
    corrections = dict[str, list[str]]()
    for word, candidates in zip(unknown, zip(*similar_words, strict=True), strict=True):
        if nearest := find_nearest_words(word, chain.from_iterable(candidates), _MAX_CORRECTIONS):
            corrections[word] = nearest
    if corrections:
        others = set(chain.from_iterable(corrections.values()))
        terms = _merge_word_hits_of_namespaces(
            (yield from read_views(lambda _, v: (len(v.order), v.find_hits_by_word(others))))
        )
        for word, nearest in corrections.items():
            hits_by_word[word] = next((terms[w] for w in nearest if w in terms), NO_HITS)
    return hits_by_word


def _merge_word_hits_of_namespaces(
    row_counts_and_word_hits: Sequence[tuple[int, dict[str, WordHits]]],
) -> dict[str, WordHits]:
    """Merge the word-to-rows dicts of several namespaces into a single dict.

    Row numbers start at 0 in each namespace. The merged dict numbers the rows of all namespaces
    consecutively, so that row numbers are unique.

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
    row_arrays, cosines = [np.empty(0, ROW_DTYPE)], [np.empty(0, np.float32)]
    numbers = dict[str, int]()
    threads = list[tuple[bytes, Sequence[str]]]()
    first_thread, separation = 0, UNMEASURED
    for pool in pools:
        rows = pool.candidates.rows.copy()
        rows["thread"][rows["thread"] >= 0] += first_thread
        codes = [numbers.setdefault(name, len(numbers)) for name in pool.actors]
        rows["actor"] = np.array([*codes, -1])[rows["actor"]]
        row_arrays.append(rows)
        cosines += [] if pool.cosines is None else [pool.cosines]
        threads += pool.threads
        first_thread += sum(len(names) for _, names in pool.threads)
        separation = separation.combine_with(pool.separation)
    terms = _merge_word_hits_of_namespaces([(len(pool), pool.terms) for pool in pools])
    all_cosines = np.concatenate(cosines) if len(cosines) > 1 else None
    candidates = Candidates(np.concatenate(row_arrays))
    return CandidatePool(candidates, list(numbers), threads, terms, all_cosines, separation)
