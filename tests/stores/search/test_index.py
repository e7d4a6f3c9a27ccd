"""In-memory search indexes of namespaces: synchronised, saved in the file, evicted, verified."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from langgraph.store.base import PutOp

from perdure.storage.flow import fetch_rows
from perdure.stores import Provenance, SQLiteStore, VersionRetention
from perdure.stores.item_writer import PutPreparer
from perdure.stores.search import index_cache, namespace_index
from perdure.stores.search.namespace_index import FOREVER, IndexedItem, NamespaceIndex
from perdure.stores.search.vectors import Model, encode_vectors
from tests.backends import KEY
from tests.rounds import rounds
from tests.store_backends import Clock, WordEmbedder, list_item_keys, make_options, open_store
from tests.stores.erasing import read_all_bytes

A, B = ("a",), ("b",)
MODEL = Model("made", 8, "float32", 1)


@pytest.fixture
def eager_index_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the index of a namespace whenever a search has read something new."""
    monkeypatch.setattr(index_cache, "_should_save_index_again", lambda unsaved, items: unsaved > 0)


@pytest.fixture
def analysed_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the texts that are analysed."""
    texts = []
    analyse_words = PutPreparer.tokenize_value_and_detect_question

    def record_and_analyse(self: PutPreparer, value: Any, fields: str | None) -> Any:
        texts.append(value["text"])
        return analyse_words(self, value, fields)

    monkeypatch.setattr(PutPreparer, "tokenize_value_and_detect_question", record_and_analyse)
    return texts


def open_store_in_folder(folder: Path, **options: Any) -> SQLiteStore:
    return open_store(folder / "x.db", **make_options(**options))


def put_texts(
    store: SQLiteStore, namespace: tuple[str, ...], count: int, word: str = "tea"
) -> None:
    store.batch([PutOp(namespace, f"k{n}", {"text": f"{word} number{n}"}) for n in range(count)])


def read_saved_indexes(path: Path) -> dict[str, bytes]:
    """Return the saved indexes in a file, by namespace."""
    rows = "SELECT path, body FROM store_search_indexes JOIN store_namespaces USING (namespace_key)"
    with closing(sqlite3.connect(path)) as db:
        return {namespace.decode(): body for namespace, body in db.execute(rows)}


# -- an index alone

entries = st.builds(
    IndexedItem,
    id=st.just(0),
    words=st.lists(st.sampled_from("abcdefgh"), max_size=6),
    ends_with_question=st.booleans(),
    vectors=st.integers(0, 2).map(
        lambda n: encode_vectors(
            np.random.default_rng(n).integers(0, 9, (n, 8)).astype(np.float32), "float32"
        )
    ),
    thread=st.none() | st.sampled_from(["t", "u"]),
    position=st.integers(0, 3).map(float),
    actor=st.none() | st.sampled_from(["Ann", "Bo"]),
    sent_at=st.just(0.0),
    expires=st.sampled_from([FOREVER, 5, 10]),
    put_at=st.just(0),
)
steps = st.lists(
    st.lists(entries, max_size=4)  # put
    | st.sets(st.integers(0, 20))  # deleted
    | st.none(),  # compacted
    max_size=12,
)


def describe_view(index: NamespaceIndex, now: int) -> list[Any]:
    """Return everything that a view of an index contains, sorted by item."""
    view = index.get_view_of_unexpired_items(now)
    rows = view.candidates.rows
    cosines = np.nan_to_num(view.compute_cosines(np.ones(8, np.float32), 1 << 30), nan=-9)
    words: list[dict[str, float]] = [{} for _ in range(len(rows))]
    for word, hits in view.find_hits_by_word("abcdefghx").items():
        for row, count in zip(*hits, strict=True):
            assert word not in words[row]
            words[row][word] = float(count)
    threads = [list(index.threads)[code] if code >= 0 else None for code in rows["thread"]]
    actors = [view.actors[code] if code >= 0 else None for code in rows["actor"]]
    described_rows = zip(
        rows["id"], threads, actors, words, rows["length"], rows["asks"], cosines, strict=True
    )
    return sorted(described_rows, key=lambda row: int(row[0]))


@settings(max_examples=rounds(100), deadline=None)
@given(steps, st.sampled_from([0, 5, 7, 20]))
def test_changed_index_equals_fresh_index_of_remaining_items(steps: list[Any], now: int) -> None:
    """After any steps, rows of a thread lie together, in their order."""
    changed, remaining, number = NamespaceIndex(MODEL, 1 << 30), dict[int, IndexedItem](), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(namespace_index, "_MIN_UNSORTED", 6)
        for step in steps:
            if step is None:
                changed.compact()
            elif isinstance(step, set):
                remaining = {
                    item_id: entry for item_id, entry in remaining.items() if item_id not in step
                }
                changed.remove_items(np.setdiff1d(changed.rows["id"], list(remaining)))
            else:
                new = [entry._replace(id=number + n) for n, entry in enumerate(step, 1)]
                number += len(new)
                remaining |= {entry.id: entry for entry in new}
                changed.add_items(new)
            changed.get_view_of_unexpired_items(now)
    fresh = NamespaceIndex(MODEL, 1 << 30)
    fresh.add_items(list(remaining.values()))
    alive = [e for e in remaining.values() if e.expires > now and (e.words or e.vectors)]
    codes = changed.get_view_of_unexpired_items(now).candidates.rows["thread"]

    assert describe_view(fresh, now) == describe_view(changed, now)
    assert sorted(entry.id for entry in alive) == [row[0] for row in describe_view(changed, now)]
    assert codes.tolist() == sorted(codes)


def test_view_is_not_changed_by_later_changes_of_index() -> None:
    index = NamespaceIndex(MODEL, 1 << 30)
    index.add_items(
        [IndexedItem(n, ["a"], False, b"", None, n, None, 0.0, FOREVER, 0) for n in range(1, 90)]
    )
    view = index.get_view_of_unexpired_items(0)
    before = view.find_hits_by_word("a")["a"], view.candidates.rows["id"].copy()
    index.add_items([IndexedItem(90, ["a", "b"], False, b"", None, 90, None, 0.0, FOREVER, 0)])
    index.remove_items(np.setdiff1d(index.rows["id"], [5, 90]))
    index.compact()

    assert np.array_equal(before[0], view.find_hits_by_word("a")["a"])
    assert np.array_equal(before[1], view.candidates.rows["id"])
    assert "b" not in view.find_hits_by_word("b")
    assert index.get_view_of_unexpired_items(0).candidates.rows["id"].tolist() == [5, 90]


# -- synchronised

spaces = st.sampled_from([A, B, ("a", "b"), ("ab",)])
names = st.sampled_from([f"k{n}" for n in range(4)])
texts = st.lists(
    st.sampled_from(["zorbax", "quimbo", "vexnor", "my car", "physician?"]), min_size=1, max_size=3
).map(" ".join)


class Handles(RuleBasedStateMachine):
    """Handles that stay open return the same results and scores as one that was just opened."""

    key: ClassVar[bytes | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.embedder = WordEmbedder()
        self.handles = [
            self.open(),
            self.open(index_bytes=1),
            self.open(read_only=True),
            self.open(read_only=True, index_bytes=0),
        ]

    def open(self, **options: Any) -> SQLiteStore:
        return open_store_in_folder(
            Path(self.folder.name),
            clock=self.clock,
            key=self.key,
            index={"embed": self.embedder, "dims": WordEmbedder.dims},
            **options,
        )

    def teardown(self) -> None:
        for handle in self.handles:
            handle.close()
        self.folder.cleanup()

    @rule(
        by=st.integers(0, 1),
        space=spaces,
        name=names,
        text=texts,
        ttl=st.sampled_from([None, None, 1.0, 5.0]),
        thread=st.none() | st.sampled_from(["t", "u"]),
        failing=st.booleans(),
        searched=st.sampled_from([None, None, None, False]),
    )
    def put(
        self,
        by: int,
        space: Any,
        name: str,
        text: str,
        ttl: float | None,
        thread: str | None,
        failing: bool,
        searched: Any,
    ) -> None:
        """Put an item, with vectors or, if the embedder fails, without."""
        self.embedder.failing = failing
        provenance = Provenance(thread, actor="Ann" if failing else "Bo", position=len(text))
        self.handles[by].put(space, name, {"text": text}, searched, ttl=ttl, provenance=provenance)
        self.embedder.failing = False

    @rule(by=st.integers(0, 1), space=spaces, name=names)
    def delete(self, by: int, space: Any, name: str) -> None:
        """Delete an item that may not exist."""
        self.handles[by].delete(space, name)

    @rule(by=st.integers(0, 1))
    def embed_pending(self, by: int) -> None:
        """Embed pending items."""
        self.handles[by].embed_pending()

    @rule(by=st.integers(0, 1), word=st.sampled_from(["zorbax", "quimbo"]), prefix=spaces)
    def forget(self, by: int, word: str, prefix: Any) -> None:
        """Erase items."""
        self.handles[by].forget(prefix, query=word)

    @rule(by=st.integers(0, 1))
    def retain(self, by: int) -> None:
        """Drop all closed versions."""
        self.handles[by].retain(VersionRetention(last=0))

    @rule(by=st.integers(0, 1), seconds=st.sampled_from([1.0, 59.0, 90.0, -30.0, 400.0]))
    def move_clock(self, by: int, seconds: float) -> None:
        """Move the clock; then sometimes sweep expired items, or refresh their TTL by a read."""
        self.clock.forward(seconds)
        if seconds == 90.0:
            self.handles[by].sweep_ttl()
        elif seconds == 1.0:
            self.handles[by].search((), refresh_ttl=True)

    @rule(space=spaces)
    def search_with_first_handle(self, space: Any) -> None:
        """Search with one handle, which may save its index."""
        self.handles[0].search(space, query="car", limit=99)

    @rule(prefix=spaces | st.just(()), query=texts, filtered=st.booleans())
    def search(self, prefix: Any, query: str, filtered: bool) -> None:
        """Compare the results of all handles with those of a fresh one, also for a misspelling."""
        arguments: dict[str, Any] = {
            "query": f"{query} zorbex",
            "limit": 99,
            "context": not filtered,
        }
        if filtered:
            arguments["filter"] = {"text": {"$ne": "zorbax"}}
        with self.open(read_only=True) as fresh:
            expected = fresh.search(prefix, **arguments)
        for handle in self.handles:
            results = handle.search(prefix, **arguments)
            assert [(i.namespace, i.key, i.value) for i in expected] == [
                (i.namespace, i.key, i.value) for i in results
            ]
            assert np.allclose(
                [i.score or 0.0 for i in expected], [i.score or 0.0 for i in results], atol=1e-5
            )


class SealedHandles(Handles):
    """The same rules in an encrypted file."""

    key = KEY


TestHandles = Handles.TestCase
TestHandles.settings = settings(max_examples=rounds(25), stateful_step_count=25, deadline=None)
pytest.mark.usefixtures("eager_index_saving")(TestHandles)
TestSealedHandles = SealedHandles.TestCase
TestSealedHandles.settings = settings(max_examples=rounds(8), stateful_step_count=25, deadline=None)


def test_search_finds_each_put_during_concurrent_writes(tmp_path: Path) -> None:
    """The next search of any handle finds an item as soon as its put has returned."""
    missed: list[str] = []
    with (
        open_store_in_folder(tmp_path) as store,
        open_store_in_folder(tmp_path, read_only=True) as other,
    ):

        def put_and_search(number: int) -> None:
            for n in range(25):
                name = f"w{number}n{n}"
                store.put(A if n % 2 else (f"own{number}",), name, {"text": f"word{name} tea"})
                for handle in (store, other):
                    found_keys = list_item_keys(
                        handle.search((), query=f"word{name}", mode="text", limit=1)
                    )
                    if found_keys != [name]:
                        missed.append(name)
                if n % 5 == 4:
                    store.delete(A, f"w{number}n{n - 1}")

        threads = [threading.Thread(target=put_and_search, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = [len(handle.search((), query="tea", limit=999)) for handle in (store, other)]
        with open_store_in_folder(tmp_path) as fresh:
            counts.append(len(fresh.search((), query="tea", limit=999)))

    assert missed == []
    assert len(set(counts)) == 1


def test_recreated_namespace_is_not_confused_with_deleted_one(tmp_path: Path) -> None:
    """A store drops its index of a namespace that was emptied and created again elsewhere."""
    with (
        open_store_in_folder(tmp_path) as store,
        open_store_in_folder(tmp_path, read_only=True) as other,
    ):
        for texts in (["tea"], ["milk", "milk"], ["tea", "tea"]):
            for n, text in enumerate(texts):
                store.put(A, f"{text}{n}", {"text": text})
            found_keys = [
                list_item_keys(handle.search(A, query="tea milk", mode="text"))
                for handle in (store, other)
            ]
            assert sorted(found_keys[0]) == sorted(found_keys[1]) == sorted(list_keys(store))
            for key in list_keys(store):
                store.delete(A, key)
            store.retain(VersionRetention(last=0))


def list_keys(store: SQLiteStore) -> list[str]:
    return list_item_keys(store.search(A))


def test_search_sees_writes_of_another_process(tmp_path: Path) -> None:
    """The next search here reflects puts and deletes of another process."""
    script = (
        "import sys; from perdure.stores import SQLiteStore\n"
        "with SQLiteStore.open(sys.argv[1], index=None) as store:\n"
        "    store.put(('a',), 'theirs', {'text': 'quimbo'})\n"
        "    store.delete(('a',), 'k1')\n"
    )
    with open_store_in_folder(tmp_path) as store:
        put_texts(store, A, 3)
        before = store.search(A, query="tea quimbo", mode="text")
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "x.db")], check=True)
        after = store.search(A, query="tea quimbo", mode="text")

    assert sorted(list_item_keys(before)) == ["k0", "k1", "k2"]
    assert sorted(list_item_keys(after)) == ["k0", "k2", "theirs"]


# -- saved in the file


def test_reopened_store_loads_saved_index_and_analyses_only_newer_items(
    tmp_path: Path, analysed_texts: list[str]
) -> None:
    with open_store_in_folder(tmp_path) as store:
        put_texts(store, A, 300)
        put_texts(store, B, 5)
        first = store.search(A, query="number7", explain=True)
    count_of_first_store = len(analysed_texts)
    with open_store_in_folder(tmp_path) as store:
        again = store.search(A, query="number7", explain=True)
        count_after_reopening = len(analysed_texts)
        store.put(A, "new", {"text": "tea number7"})
        store.delete(A, "k8")
        found_keys = list_item_keys(store.search(A, query="number7", mode="text"))
        results_of_deleted = store.search(A, query="number8", mode="text")
        count_after_put = len(analysed_texts)
    with open_store_in_folder(tmp_path, read_only=True) as store:
        store.search((), query="number7")

    assert (count_of_first_store, count_after_reopening, count_after_put) == (300, 300, 301)
    assert first == again
    assert set(found_keys) == {"k7", "new"}
    assert results_of_deleted == []
    assert (
        len(analysed_texts) == 301 + 6
    )  # the index of B was too small to be saved, and `new` too small a change
    assert set(read_saved_indexes(tmp_path / "x.db")) == {"a\0"}


def flip_one_bit(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit flipped": flip_one_bit,
    "cut": lambda body: body[: len(body) // 2],
    "empty": lambda body: b"",
    "something else": lambda body: b"\xff" * 100,
}


@pytest.mark.usefixtures("eager_index_saving")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("key", [None, KEY])
def test_damaged_saved_index_is_rebuilt_and_rewritten(
    key: bytes | None, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The texts are analysed again, and the index is saved again."""
    with open_store_in_folder(tmp_path, key=key) as store:
        put_texts(store, A, 40)
        expected = store.search(A, query="number7 tea", limit=99)
    path = tmp_path / "x.db"
    body = DAMAGES[damage](read_saved_indexes(path)["a\0"])
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE store_search_indexes SET body = ?", (body,))
    with open_store_in_folder(tmp_path, key=key) as store:
        results = store.search(A, query="number7 tea", limit=99)
        store.put(A, "more", {"text": "milk"})
        store.search(A, query="milk")

    assert expected == results
    assert "search index of ('a',) is damaged" in caplog.text
    assert read_saved_indexes(path)["a\0"] != body


@pytest.mark.usefixtures("eager_index_saving")
def test_saved_index_of_another_namespace_is_not_used(tmp_path: Path) -> None:
    """A saved index that was copied to another namespace's row is ignored."""
    with open_store_in_folder(tmp_path) as store:
        put_texts(store, A, 20)
        put_texts(store, B, 20, "milk")
        store.search((), query="tea")
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE store_search_indexes SET body = ?", (read_saved_indexes(path)["a\0"],))
    with open_store_in_folder(tmp_path) as store:
        assert len(store.search(B, query="milk", limit=99)) == 20


@pytest.mark.usefixtures("eager_index_saving")
def test_saved_index_is_not_used_with_other_index_fields(tmp_path: Path) -> None:
    """A store with other `fields` does not use the saved words, also if it is read-only."""
    options = {name: make_options()["index"] | {"fields": [name]} for name in ("text", "note")}
    with open_store_in_folder(tmp_path, index=options["text"]) as store:
        for n in range(20):
            store.put(A, f"k{n}", {"text": "tea", "note": "milk"})
        by_text = len(store.search(A, query="tea", mode="text", limit=99))
    with open_store_in_folder(tmp_path, index=options["note"], read_only=True) as store:
        by_note = [len(store.search(A, query=q, mode="text", limit=99)) for q in ("tea", "milk")]
    before = read_saved_indexes(tmp_path / "x.db")
    with open_store_in_folder(tmp_path, index=options["note"]) as store:
        dropped = read_saved_indexes(tmp_path / "x.db")

    assert by_text == 20
    assert by_note == [0, 20]
    assert set(before) == {"a\0"}
    assert dropped == {}


@pytest.mark.usefixtures("eager_index_saving")
@pytest.mark.parametrize("key", [None, KEY])
def test_saved_index_contains_no_forgotten_or_dropped_words(
    key: bytes | None, tmp_path: Path
) -> None:
    """Saved indexes of an encrypted file contain no readable words at all."""
    path = tmp_path / "x.db"
    with open_store_in_folder(tmp_path, key=key) as store:
        put_texts(store, A, 30)
        put_texts(store, B, 30)
        store.put(A, "secret", {"text": "the zorbaxing"})
        store.put(B, "closed", {"text": "a quimboe"})
        store.search((), query="tea")
        store.put(B, "closed", {"text": "milk"})
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    in_clear_text = [word in read_all_bytes(tmp_path) for word in (b"zorbax", b"quimbo", b"tea")]
    with open_store_in_folder(tmp_path, key=key) as store:
        store.search((), query="tea")
        store.retain(VersionRetention(last=0), prefix=B)
        words_after_retain = [
            word in b"".join(read_saved_indexes(path).values()) for word in (b"zorbax", b"quimbo")
        ]
        store.forget(A, key="secret")
        remaining_bytes = read_all_bytes(tmp_path)
        result_count = len(store.search((), query="tea", mode="text", limit=99))

    assert in_clear_text == [key is None] * 3
    assert words_after_retain == [key is None, False]
    assert b"zorbax" not in remaining_bytes
    assert result_count == 60


@pytest.mark.parametrize("index_saved", [False, True])
def test_index_reads_only_closed_versions_to_find_removed_items(
    index_saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a cached nor a loaded index reads the list of all present ids."""
    monkeypatch.setattr(
        index_cache, "_should_save_index_again", lambda unsaved, items: index_saved and unsaved > 0
    )
    with open_store_in_folder(tmp_path) as store, open_store_in_folder(tmp_path) as other:
        put_texts(store, A, 20)
        store.search((), query="tea")
        searcher = other if index_saved else store
        monkeypatch.setitem(store._parts.sql, "present_ids", "no SQL, of no other's")
        put_texts(store, B, 20)
        store.delete(A, "k3")
        store.put(A, "k4", {"text": "milk"})
        other.put(A, "k5", {"text": "tea, at last"})
        other.delete(A, "k5")
        found_keys = list_item_keys(searcher.search(A, query="tea milk", limit=99))

    assert sorted(found_keys) == sorted({f"k{n}" for n in range(20)} - {"k3", "k5"})


def test_search_omits_deleted_item_whose_closed_version_was_dropped(tmp_path: Path) -> None:
    """Retention removes the row that would tell the next search about the deletion."""
    with open_store_in_folder(tmp_path) as store:
        put_texts(store, A, 20)
        store.search(A, query="tea")
        store.delete(A, "k3")
        store.retain(VersionRetention(last=0))
        store.delete(A, "k4")
        found_keys = list_item_keys(store.search(A, query="tea", limit=99))

    assert sorted(found_keys) == sorted({f"k{n}" for n in range(20)} - {"k3", "k4"})


@pytest.mark.parametrize("closed", [False, True])
def test_forgotten_words_are_removed_from_cached_indexes(
    closed: bool, tmp_path: Path, analysed_texts: list[str]
) -> None:
    """Erased words leave memory at once here, and after the next search elsewhere.

    Nothing else is analysed again.
    """

    def list_cached_words(store: SQLiteStore) -> set[str]:
        cached_indexes = store._parts.indexes._cached.values()
        return {
            word for cached in cached_indexes if cached.index for word in cached.index.vocabulary
        }

    with (
        open_store_in_folder(tmp_path) as store,
        open_store_in_folder(tmp_path, read_only=True) as other,
    ):
        put_texts(store, A, 30)
        put_texts(store, B, 30, "milk")
        store.put(A, "secret", {"text": "zorbaxing"})
        for handle in (store, other):
            handle.search((), query="tea")
        if closed:
            store.delete(A, "secret")
        before = [list_cached_words(handle) for handle in (store, other)]
        store.forget(A, key="secret")
        own_words, other_words = list_cached_words(store), list_cached_words(other)
        other.search(B, query="milk")
        after = list_cached_words(other)
        del analysed_texts[:]
        result_counts = [len(handle.search((), query="tea", limit=99)) for handle in (store, other)]

    assert all("zorbax" in words for words in [*before, other_words])
    assert "zorbax" not in own_words | after
    assert {"tea", "milk", "number7"} <= own_words & after
    assert analysed_texts == []
    assert result_counts[0] == result_counts[1] > 0


def test_purge_of_erased_words_ends_when_another_forget_overtakes_it(tmp_path: Path) -> None:
    with open_store_in_folder(tmp_path) as store:
        store.put(A, "secret", {"text": "zorbaxing"})
        store.search(A, query="tea")
        indexes = store._parts.indexes
        flow = indexes.remove_erased_items_from_cached_indexes()
        marks = store.database.read(lambda: fetch_rows(indexes.sql["store_state"]))
        next(flow)
        store.forget(A, key="secret")
        with pytest.raises(StopIteration):
            flow.send(marks)


@pytest.mark.usefixtures("eager_index_saving")
def test_index_read_before_forget_is_not_saved_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.db"
    with open_store_in_folder(tmp_path) as store:
        put_texts(store, A, 20)
        store.put(A, "secret", {"text": "zorbaxing"})
        indexes = store._parts.indexes
        delayed_writes: list[Any] = []
        write_in_background = indexes.write_in_background
        assert write_in_background is not None
        monkeypatch.setattr(indexes, "write_in_background", delayed_writes.append)
        store.search(A, query="tea")
        store.forget(A, key="secret")
        for make in delayed_writes:
            store.database.write(make)
        after = read_saved_indexes(path)
        monkeypatch.setattr(indexes, "write_in_background", write_in_background)
        store.put(A, "more", {"text": "milk"})
        store.search(A, query="tea")

    assert len(delayed_writes) == 1
    assert after == {}
    assert set(read_saved_indexes(path)) == {"a\0"}
    assert b"zorbax" not in read_all_bytes(tmp_path)


# -- evicted


def test_least_recently_searched_indexes_are_evicted_over_budget(
    tmp_path: Path, analysed_texts: list[str]
) -> None:
    """An evicted index is loaded again when it is needed, and the search has the same result."""
    with open_store_in_folder(tmp_path) as store:
        for n in range(4):
            put_texts(store, (f"n{n}",), 100, f"word{n}")
        single = store._parts.indexes
        store.search(("n0",), query="word0")
        single_bytes = single._nbytes
    with open_store_in_folder(tmp_path, index_bytes=single_bytes * 5 // 2) as store:
        indexes = store._parts.indexes
        before = {n: store.search((f"n{n}",), query=f"word{n} number7") for n in range(4)}
        cached_keys, cached_bytes = list(indexes._cached), indexes._nbytes
        del analysed_texts[:]
        again = {n: store.search((f"n{n}",), query=f"word{n} number7") for n in (3, 2, 0)}
        analysed_count = len(analysed_texts)
        across = store.search((), query="word0 number7", limit=400)
    with open_store_in_folder(tmp_path) as store:
        whole = store.search((), query="word0 number7", limit=400)

    assert cached_keys == [(b"n2\0", False), (b"n3\0", False)]
    assert cached_bytes <= single_bytes * 5 // 2
    assert all(before[n] == again[n] for n in again)
    assert analysed_count == 0  # the index of n0 was loaded from its saved form
    assert len(across) == 400
    assert list_item_keys(whole) == list_item_keys(across)
    assert np.allclose([i.score or 0 for i in whole], [i.score or 0 for i in across], atol=1e-5)


def test_search_of_all_namespaces_stays_within_index_budget(tmp_path: Path) -> None:
    """A prefix whose indexes exceed the budget is searched in parts."""
    with open_store_in_folder(tmp_path, index_bytes=1_000_000) as store:
        for n in range(20):
            put_texts(store, (f"n{n}",), 100)
        results = store.search((), query="tea", limit=3_000)
        indexes = store._parts.indexes
        cached_count, cached_bytes = len(indexes._cached), indexes._nbytes

    assert len(results) == 2_000
    assert 0 < cached_count < 20
    assert cached_bytes <= 1_000_000
