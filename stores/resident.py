"""The search index in memory, kept in step with the file, whoever writes to it.

Before each search it reads what changed: versions with higher ids, versions that were closed
since. New rows gather in a small segment; segments of like size are merged, so a row is moved a
few times at most (the logarithmic method: Bentley and Saxe, 1980).
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import numpy as np

from perdure.storage.flow import Flow, Row, Statement
from perdure.stores.models import Model
from perdure.stores.records import Records
from perdure.stores.scopes import Known, Scope
from perdure.stores.segments import Entry, Ints, Segment, merged, segment
from perdure.stores.spelling import Trigrams
from perdure.stores.vectors import Matrix

_LOG = logging.getLogger("perdure")

_LARGE: Final = 1 << 16  # rows; a segment of so many is not merged further
_RATIO: Final = 4  # segments are merged when the older is less than so many times the newer
_KEPT_FROM: Final = 1_000  # items whose words are written to the file together
_READ: Final = 1 << 14  # rows read at a time
_SLOW: Final = 50_000  # rows from which loading is worth a line in the log
ASKS: Final = "?"  # stands last among the tokens of a question


def _numbers() -> dict[Any, int]:
    """A dict that gives each new key the next number."""
    out: dict[Any, int] = defaultdict(lambda: len(out))
    return out


Analyse = Callable[[Mapping[str, Any], str | None], str]
Derive = Callable[[Sequence[tuple[Mapping[str, Any], str | None]], Model | None], list[Any]]


class Overtaken(Exception):
    """The snapshot that is read is older than the index: read again, on a newer one."""


class Resident:
    """What search needs of every present item of a store.

    Args:
        sql: The statements, by name.
        records: Opens rows.
        sealed_tokens: Whether tokens are sealed too.
        approximate_above: Vectors from which sketches are kept.
        analyse: Makes the words of a value, given the paths it is searched by.
        derive: Makes the vectors of values, given these paths and the file's model.
        keep: Is handed words that were made, so that they need not be made again.
        erased: Is called when something was erased, here or by another process.

    Attributes:
        told_lacking: Whether it was said that rows lack vectors.
    """

    told_lacking = False

    def __init__(
        self,
        sql: dict[str, str],
        records: Records,
        *,
        sealed_tokens: bool,
        approximate_above: int,
        analyse: Analyse,
        derive: Derive,
        keep: Callable[[list[tuple[int, str]]], None],
        erased: Callable[[], None],
    ) -> None:
        self._sql = sql
        self._records = records
        self._sealed_tokens = sealed_tokens
        self.approximate_above = approximate_above
        self._analyse = analyse
        self._derive = derive
        self._keep = keep
        self._erased = erased
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._segments: list[Segment] = []
        self._recent: list[Entry] = []  # the entries of the newest segment, while it is small
        self._marks: Row = (None, None, None, None, None)
        self._model: Model | None = None
        self._fresh: list[tuple[int, str]] = []  # words that the file does not have yet
        self._expired_to = 0
        self._without: set[int] = set()  # rows that may get vectors later
        self._vectors = 0
        self._spelling = Trigrams()
        self._words = _numbers()
        self._actors = _numbers()
        self._threads = _numbers()

    # -- looking

    def scope(self, prefix: bytes, now: int, ids: Sequence[int] | None = None) -> Flow[Scope]:
        """The rows under a prefix that are alive now, at most those with some ids."""
        with self._lock:
            yield from self._refresh()
            yield from self._expire(now)
            segments, known = list(self._segments), self._known()
        chosen = None if ids is None else np.sort(np.array(ids, np.int64))
        return Scope(segments, known, prefix, chosen)

    def past(self, rows: Sequence[Row]) -> Flow[Scope]:
        """A scope of some versions, present or closed, made for one search."""
        with self._lock:
            yield from self._refresh()
            found = []
            for row in rows:
                for kept in (yield Statement(self._sql["index_of"], (self._number, row[0]))):
                    found.append((*row[:10], *kept))
            entries = []
            for row, vectors in self._with_vectors(found):
                said = self._records.provenance(row[9], *row[1:4])
                words = self._words_of(row, row[10], row[12])
                entries.append(self._entry(row[0], row[1], words, vectors, said))
            return Scope([self._built(entries)] if entries else [], self._known(), b"")

    def similar(self, word: str, among: Callable[[str], bool]) -> list[tuple[str, float]]:
        """The word nearest to one that no item has, of those that some items have."""
        with self._lock:
            if len(self._spelling) < len(self._words):
                self._spelling.extend(list(self._words)[len(self._spelling) :])
            return self._spelling.similar(word, limit=1, among=among)

    def _known(self) -> Known:
        return Known(self._words, list(self._actors), self._model)

    @property
    def _number(self) -> int | None:
        return None if self._model is None else self._model.number

    def forget(self) -> None:
        """Let go of everything; the next search reads it anew."""
        with self._lock:
            self._clear()
        self._erased()

    # -- keeping in step

    def _refresh(self) -> Flow[None]:
        marks = (yield Statement(self._sql["marks"]))[0]
        if self._is_past(marks):
            raise Overtaken
        if marks == self._marks:
            return
        try:
            yield from self._catch_up(marks)
        except BaseException:
            self._clear()  # else what was read would be read again, and stand there twice
            raise
        self._marks = marks

    def _is_past(self, marks: Row) -> bool:
        """Whether the snapshot read is older than the index: a later one overtook it."""
        counts = zip(marks[:4], self._marks[:4], strict=True)
        return any((of or 0) < (here or 0) for of, here in counts)

    def _catch_up(self, marks: Row) -> Flow[None]:
        newest, closed, erasures, embedded, model = marks
        if erasures != self._marks[2]:
            self._erased()
        if erasures != self._marks[2] or model != self._marks[4]:
            self._clear()
            self._model = None if model is None else Model.parsed(model)
        since_id, since_seq = self._marks[0] or 0, self._marks[1] or 0
        first = not self._segments
        if not first and (closed or 0) > since_seq:
            rows = yield Statement(self._sql["closed_since"], (since_seq,))
            gone = [row for (row,) in rows]
            if len(gone) < closed - since_seq:  # some were dropped since
                gone = yield from self._missing()
            self._kill(gone)
        if (newest or 0) > since_id:
            yield from self._load(since_id, newest)
        if not first and embedded != self._marks[3]:
            yield from self._fill()

    def _expire(self, now: int) -> Flow[None]:
        """Let go of what has expired since the last look, though nobody swept it yet."""
        if now < self._expired_to:  # the clock was put back, or a later search was quicker
            if not (yield Statement(self._sql["expired_since"], (now, self._expired_to))):
                return
            self._clear()
            yield from self._refresh()
        rows = yield Statement(self._sql["expired_since"], (self._expired_to, now))
        if rows:
            self._kill([row for (row,) in rows])
        self._expired_to = now

    def _missing(self) -> Flow[list[int]]:
        """The ids in the index that are no longer present."""
        present = yield Statement(self._sql["present_ids"])
        known = np.concatenate([found.ids[found.alive] for found in self._segments])
        gone: list[int] = np.setdiff1d(known, [row for (row,) in present]).tolist()
        return gone

    def _load(self, since: int, newest: int) -> Flow[None]:
        began = time.monotonic()
        total = 0
        entries: list[Entry] = []
        while since < newest:
            params = (self._number, since, newest, _READ, self._model is not None)
            rows = yield Statement(self._sql["index_since"], params)
            if not rows:
                break
            since = rows[-1][0]
            total += len(rows)
            living = [row for row in rows if self._will_live(row)]
            entries += [self._loaded(*found) for found in self._with_vectors(living)]
            if len(entries) >= _LARGE:
                self._add(entries)
                entries = []
            if len(self._fresh) >= _KEPT_FROM:
                self._keep(self._fresh)
                self._fresh = []
        if entries:
            self._add(entries)
        if total >= _SLOW:
            _LOG.info("search index of %d items read in %.1f s", total, time.monotonic() - began)

    def _will_live(self, row: Row) -> bool:
        return row[7] is None or int(row[7]) > self._expired_to

    def _with_vectors(self, rows: Sequence[Row]) -> Iterator[tuple[Row, bytes | None]]:
        """Rows with their vectors: those stored, or made now if the store's are not stored."""
        bare = [row for row in rows if row[11] is None and row[8] is not None]
        made = self._derive([(self._records.value(row), row[12]) for row in bare], self._model)
        derived = {row[0]: vectors for row, vectors in zip(bare, made, strict=True)}
        for row in rows:
            stored = row[11]
            yield (
                row,
                derived.get(row[0]) if stored is None else self._records.vectors(stored, row[0]),
            )

    def _loaded(self, row: Row, vectors: bytes | None) -> Entry:
        number, path, key, version, *_, provenance, tokens, _, fields = row
        if vectors is None:
            self._without.add(number)
        words = self._words_of(row, tokens, fields)
        if tokens is None:
            self._fresh.append((number, words))
        said = self._records.provenance(provenance, path, key, version)
        return self._entry(number, path, words, vectors, said)

    def _words_of(self, row: Row, tokens: Any, fields: str | None) -> str:
        """An item's words: as they are kept, or made now if no search has needed them before."""
        if tokens is None:
            return self._analyse(self._records.value(row), fields)
        if self._sealed_tokens:
            return self._records.text(tokens, ("tokens", row[0]))
        return str(tokens)

    def _entry(
        self, number: int, path: bytes, text: str, vectors: bytes | None, fields: dict[str, Any]
    ) -> Entry:
        words = text.split(" ") if text else []
        asks = bool(words) and words[-1] == ASKS
        if asks:
            words.pop()
        thread, actor, at = fields.get("thread_id"), fields.get("actor"), fields.get("at")
        position = fields.get("position")
        return Entry(
            number,
            path,
            np.array([self._words[word] for word in words], np.int32),
            vectors or b"",
            -1 if thread is None else self._threads[path, thread],
            float(number if position is None else position),
            -1 if actor is None else self._actors[actor],
            math.nan if at is None else datetime.fromisoformat(at).timestamp(),
            asks,
        )

    def _built(self, entries: Sequence[Entry]) -> Segment:
        model = self._model
        body = b"".join(entry.vectors for entry in entries)
        if model is None or not body:
            return segment(entries, 0, None)
        return segment(entries, model.width, Matrix.of(body, model.dims, model.kind))

    def _add(self, entries: list[Entry]) -> None:
        """Take new rows in, merging what has grown alike; one with no text is never found."""
        entries = [entry for entry in entries if len(entry.terms) or entry.vectors]
        if self._recent:
            self._segments.pop()
            entries = [*self._recent, *entries]
        self._recent = entries if len(entries) < _RATIO * 16 else []
        self._segments.append(self._built(entries))
        while len(self._segments) > 1 and self._worth_merging(*self._segments[-2:]):
            self._recent = []
            newer, older = self._segments.pop(), self._segments.pop()
            self._segments.append(merged([older, newer]))
        self._vectors = sum(len(s.matrix) for s in self._segments if s.matrix is not None)
        if self._vectors > self.approximate_above:
            self._sketch()

    def _worth_merging(self, older: Segment, newer: Segment) -> bool:
        return not self._recent and len(older) < _RATIO * len(newer) and len(older) < _LARGE

    def _sketch(self) -> None:
        for found in self._segments:
            if found.matrix is not None and found.matrix.sketch is None:
                found.matrix = found.matrix.sketched()

    def _kill(self, gone: Sequence[int]) -> None:
        ids: Ints = np.array(gone, np.int64)
        kept = []
        for found in self._segments:
            found.kill(ids)
            thinned = found.without_dead() if found.dead * 2 > len(found) else found
            kept += [thinned] if len(thinned) else []
        self._segments = kept
        dead = set(gone)
        self._recent = [entry for entry in self._recent if entry.id not in dead]
        self._without -= dead

    def _fill(self) -> Flow[None]:
        """Take in the vectors of rows that had none."""
        lacking = sorted(self._without)
        filled: list[Entry] = []
        for begin in range(0, len(lacking), _READ):
            page = json.dumps(lacking[begin : begin + _READ])
            rows = yield Statement(self._sql["index_filled"], (self._number, page))
            filled += [self._loaded(*found) for found in self._with_vectors(rows)]
        if filled:
            self._kill([entry.id for entry in filled])
            self._add(filled)
