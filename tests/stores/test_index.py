"""The in-memory indexes of namespaces: kept in step, kept in the file, dropped, never believed."""

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
from perdure.stores import Provenance, SQLiteStore, VersionRetention, index, indexes
from perdure.stores.index import FOREVER, IndexedItem, NamespaceIndex
from perdure.stores.puts import PutPreparer
from perdure.stores.vectors import Model, encode_vectors
from tests.backends import KEY
from tests.rounds import rounds
from tests.store_backends import Clock, Words, keys, of_words, open_store
from tests.stores.erasing import read_all_bytes

A, B = ("a",), ("b",)
MODEL = Model("made", 8, "float32", 1)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of a namespace is written whenever a search found something new."""
    monkeypatch.setattr(indexes, "_is_worth_saving", lambda unsaved, items: unsaved > 0)


@pytest.fixture
def analysed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were analysed."""
    texts = []
    plain = PutPreparer.tokenize_value_and_detect_question

    def noted(self: PutPreparer, value: Any, fields: str | None) -> Any:
        texts.append(value["text"])
        return plain(self, value, fields)

    monkeypatch.setattr(PutPreparer, "tokenize_value_and_detect_question", noted)
    return texts


def opened(folder: Path, **options: Any) -> SQLiteStore:
    return open_store(folder / "x.db", **of_words(**options))


def fill(store: SQLiteStore, namespace: tuple[str, ...], count: int, word: str = "tea") -> None:
    store.batch([PutOp(namespace, f"k{n}", {"text": f"{word} number{n}"}) for n in range(count)])


def forms(path: Path) -> dict[str, bytes]:
    """The compact forms in a file, by namespace."""
    rows = "SELECT path, body FROM store_search_indexes JOIN store_namespaces USING (namespace_key)"
    with closing(sqlite3.connect(path)) as db:
        return {at.decode(): body for at, body in db.execute(rows)}


# -- an index by itself

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


def seen(found: NamespaceIndex, now: int) -> list[Any]:
    """All that a view tells, by item."""
    view = found.get_view(now)
    rows = view.candidates.rows
    cosines = np.nan_to_num(view.compute_cosines(np.ones(8, np.float32), 1 << 30), nan=-9)
    words: list[dict[str, float]] = [{} for _ in range(len(rows))]
    for word in "abcdefghx":
        for row, count in zip(*view.find_word(word), strict=True):
            assert word not in words[row]
            words[row][word] = float(count)
    threads = [list(found.threads)[code] if code >= 0 else None for code in rows["thread"]]
    actors = [view.actors[code] if code >= 0 else None for code in rows["actor"]]
    told = zip(
        rows["id"], threads, actors, words, rows["length"], rows["asks"], cosines, strict=True
    )
    return sorted(told, key=lambda row: int(row[0]))


@settings(max_examples=rounds(100), deadline=None)
@given(steps, st.sampled_from([0, 5, 7, 20]))
def test_an_index_is_what_was_put(course: list[Any], now: int) -> None:
    """After any course it is like one of what is left; threads lie together, in their order."""
    found, left, number = NamespaceIndex(MODEL, 1 << 30), dict[int, IndexedItem](), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_MIN_RECENT", 6)
        for step in course:
            if step is None:
                found.compact()
            elif isinstance(step, set):
                left = {at: entry for at, entry in left.items() if at not in step}
                found.remove_items(np.setdiff1d(found.rows["id"], list(left)))
            else:
                new = [entry._replace(id=number + n) for n, entry in enumerate(step, 1)]
                number += len(new)
                left |= {entry.id: entry for entry in new}
                found.add_items(new)
            found.get_view(now)
    fresh = NamespaceIndex(MODEL, 1 << 30)
    fresh.add_items(list(left.values()))
    alive = [e for e in left.values() if e.expires > now and (e.words or e.vectors)]
    codes = found.get_view(now).candidates.rows["thread"]

    assert seen(fresh, now) == seen(found, now)
    assert sorted(entry.id for entry in alive) == [row[0] for row in seen(found, now)]
    assert codes.tolist() == sorted(codes)


def test_a_view_stays_as_it_is() -> None:
    """What a search looks at does not change with the index."""
    found = NamespaceIndex(MODEL, 1 << 30)
    found.add_items(
        [IndexedItem(n, ["a"], False, b"", None, n, None, 0.0, FOREVER, 0) for n in range(1, 90)]
    )
    view = found.get_view(0)
    before = view.find_word("a"), view.candidates.rows["id"].copy()
    found.add_items([IndexedItem(90, ["a", "b"], False, b"", None, 90, None, 0.0, FOREVER, 0)])
    found.remove_items(np.setdiff1d(found.rows["id"], [5, 90]))
    found.compact()

    assert np.array_equal(before[0], view.find_word("a"))
    assert np.array_equal(before[1], view.candidates.rows["id"])
    assert len(view.find_word("b")[0]) == 0
    assert found.get_view(0).candidates.rows["id"].tolist() == [5, 90]


# -- kept in step

spaces = st.sampled_from([A, B, ("a", "b"), ("ab",)])
names = st.sampled_from([f"k{n}" for n in range(4)])
texts = st.lists(
    st.sampled_from(["zorbax", "quimbo", "vexnor", "my car", "physician?"]), min_size=1, max_size=3
).map(" ".join)


class Handles(RuleBasedStateMachine):
    """Long-lived handles on one file answer as one does that was just opened, scores included."""

    key: ClassVar[bytes | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.embedder = Words()
        self.handles = [
            self.open(),
            self.open(index_bytes=1),
            self.open(read_only=True),
            self.open(read_only=True, index_bytes=0),
        ]

    def open(self, **options: Any) -> SQLiteStore:
        return opened(
            Path(self.folder.name),
            clock=self.clock,
            key=self.key,
            index={"embed": self.embedder, "dims": Words.dims},
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
        """A put, with vectors or, if the embedder fails, without."""
        self.embedder.failing = failing
        said = Provenance(thread, actor="Ann" if failing else "Bo", position=len(text))
        self.handles[by].put(space, name, {"text": text}, searched, ttl=ttl, provenance=said)
        self.embedder.failing = False

    @rule(by=st.integers(0, 1), space=spaces, name=names)
    def delete(self, by: int, space: Any, name: str) -> None:
        """A delete, of what is there or not."""
        self.handles[by].delete(space, name)

    @rule(by=st.integers(0, 1))
    def embed(self, by: int) -> None:
        """What lacks vectors gets them."""
        self.handles[by].embed_pending()

    @rule(by=st.integers(0, 1), word=st.sampled_from(["zorbax", "quimbo"]), prefix=spaces)
    def forget(self, by: int, word: str, prefix: Any) -> None:
        """Something is erased."""
        self.handles[by].forget(prefix, query=word)

    @rule(by=st.integers(0, 1))
    def retain(self, by: int) -> None:
        """Closed versions go."""
        self.handles[by].retain(VersionRetention(last=0))

    @rule(by=st.integers(0, 1), seconds=st.sampled_from([1.0, 59.0, 90.0, -30.0, 400.0]))
    def time(self, by: int, seconds: float) -> None:
        """Time goes on, or back; what has expired may be swept, or read in time."""
        self.clock.forward(seconds)
        if seconds == 90.0:
            self.handles[by].sweep_ttl()
        elif seconds == 1.0:
            self.handles[by].search((), refresh_ttl=True)

    @rule(space=spaces)
    def look(self, space: Any) -> None:
        """A search by one of them, which may write what it has read."""
        self.handles[0].search(space, query="car", limit=99)

    @rule(prefix=spaces | st.just(()), query=texts, filtered=st.booleans())
    def search(self, prefix: Any, query: str, filtered: bool) -> None:
        """All answer alike, also to a word that is misspelt."""
        asked: dict[str, Any] = {"query": f"{query} zorbex", "limit": 99, "context": not filtered}
        if filtered:
            asked["filter"] = {"text": {"$ne": "zorbax"}}
        with self.open(read_only=True) as fresh:
            wanted = fresh.search(prefix, **asked)
        for handle in self.handles:
            found = handle.search(prefix, **asked)
            assert [(i.namespace, i.key, i.value) for i in wanted] == [
                (i.namespace, i.key, i.value) for i in found
            ]
            assert np.allclose(
                [i.score or 0.0 for i in wanted], [i.score or 0.0 for i in found], atol=1e-5
            )


class SealedHandles(Handles):
    """The same in an encrypted file."""

    key = KEY


TestHandles = Handles.TestCase
TestHandles.settings = settings(max_examples=rounds(25), stateful_step_count=25, deadline=None)
pytest.mark.usefixtures("eager")(TestHandles)
TestSealedHandles = SealedHandles.TestCase
TestSealedHandles.settings = settings(max_examples=rounds(8), stateful_step_count=25, deadline=None)


def test_writers_and_searchers_at_once(tmp_path: Path) -> None:
    """What a put wrote is found by any handle's next search, whatever others write meanwhile."""
    missed: list[str] = []
    with opened(tmp_path) as store, opened(tmp_path, read_only=True) as other:

        def work(number: int) -> None:
            for n in range(25):
                name = f"w{number}n{n}"
                store.put(A if n % 2 else (f"own{number}",), name, {"text": f"word{name} tea"})
                for handle in (store, other):
                    found = keys(handle.search((), query=f"word{name}", mode="text", limit=1))
                    if found != [name]:
                        missed.append(name)
                if n % 5 == 4:
                    store.delete(A, f"w{number}n{n - 1}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        every = [len(handle.search((), query="tea", limit=999)) for handle in (store, other)]
        with opened(tmp_path) as fresh:
            every.append(len(fresh.search((), query="tea", limit=999)))

    assert missed == []
    assert len(set(every)) == 1


def test_a_namespace_that_was_there_before(tmp_path: Path) -> None:
    """One that was emptied and is made again is not taken for the former one."""
    with opened(tmp_path) as store, opened(tmp_path, read_only=True) as other:
        for texts in (["tea"], ["milk", "milk"], ["tea", "tea"]):
            for n, text in enumerate(texts):
                store.put(A, f"{text}{n}", {"text": text})
            found = [keys(each.search(A, query="tea milk", mode="text")) for each in (store, other)]
            assert sorted(found[0]) == sorted(found[1]) == sorted(store_keys(store))
            for key in store_keys(store):
                store.delete(A, key)
            store.retain(VersionRetention(last=0))


def store_keys(store: SQLiteStore) -> list[str]:
    return keys(store.search(A))


def test_another_process_writes(tmp_path: Path) -> None:
    """Its puts and deletes are seen by the next search here."""
    script = (
        "import sys; from perdure.stores import SQLiteStore\n"
        "with SQLiteStore.open(sys.argv[1], index=None) as store:\n"
        "    store.put(('a',), 'theirs', {'text': 'quimbo'})\n"
        "    store.delete(('a',), 'k1')\n"
    )
    with opened(tmp_path) as store:
        fill(store, A, 3)
        before = store.search(A, query="tea quimbo", mode="text")
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "x.db")], check=True)
        after = store.search(A, query="tea quimbo", mode="text")

    assert sorted(keys(before)) == ["k0", "k1", "k2"]
    assert sorted(keys(after)) == ["k0", "k2", "theirs"]


# -- kept in the file


def test_the_next_process_analyses_nothing(tmp_path: Path, analysed: list[str]) -> None:
    """It reads the compact form, and analyses what is newer."""
    with opened(tmp_path) as store:
        fill(store, A, 300)
        fill(store, B, 5)
        first = store.search(A, query="number7", explain=True)
    made = len(analysed)
    with opened(tmp_path) as store:
        again = store.search(A, query="number7", explain=True)
        untouched = len(analysed)
        store.put(A, "new", {"text": "tea number7"})
        store.delete(A, "k8")
        found = keys(store.search(A, query="number7", mode="text"))
        gone = store.search(A, query="number8", mode="text")
        few = len(analysed)
    with opened(tmp_path, read_only=True) as store:
        store.search((), query="number7")

    assert (made, untouched, few) == (300, 300, 301)
    assert first == again
    assert set(found) == {"k7", "new"}
    assert gone == []
    assert len(analysed) == 301 + 6  # B was too small to be kept, and `new` too little
    assert set(forms(tmp_path / "x.db")) == {"a\0"}


def flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit flipped": flipped,
    "cut": lambda body: body[: len(body) // 2],
    "empty": lambda body: b"",
    "something else": lambda body: b"\xff" * 100,
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("key", [None, KEY])
def test_a_damaged_form(
    key: bytes | None, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not believed: the texts are analysed, and what was damaged is written anew."""
    with opened(tmp_path, key=key) as store:
        fill(store, A, 40)
        whole = store.search(A, query="number7 tea", limit=99)
    path = tmp_path / "x.db"
    body = DAMAGES[damage](forms(path)["a\0"])
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE store_search_indexes SET body = ?", (body,))
    with opened(tmp_path, key=key) as store:
        found = store.search(A, query="number7 tea", limit=99)
        store.put(A, "more", {"text": "milk"})
        store.search(A, query="milk")

    assert whole == found
    assert "search index of ('a',) is damaged" in caplog.text
    assert forms(path)["a\0"] != body


@pytest.mark.usefixtures("eager")
def test_a_form_of_another_namespace(tmp_path: Path) -> None:
    """One that was moved is not believed either."""
    with opened(tmp_path) as store:
        fill(store, A, 20)
        fill(store, B, 20, "milk")
        store.search((), query="tea")
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE store_search_indexes SET body = ?", (forms(path)["a\0"],))
    with opened(tmp_path) as store:
        assert len(store.search(B, query="milk", limit=99)) == 20


@pytest.mark.usefixtures("eager")
def test_other_fields(tmp_path: Path) -> None:
    """Words that were made of other fields are not used, also by who may not write."""
    options = {name: of_words()["index"] | {"fields": [name]} for name in ("text", "note")}
    with opened(tmp_path, index=options["text"]) as store:
        for n in range(20):
            store.put(A, f"k{n}", {"text": "tea", "note": "milk"})
        by_text = len(store.search(A, query="tea", mode="text", limit=99))
    with opened(tmp_path, index=options["note"], read_only=True) as store:
        by_note = [len(store.search(A, query=q, mode="text", limit=99)) for q in ("tea", "milk")]
    before = forms(tmp_path / "x.db")
    with opened(tmp_path, index=options["note"]) as store:
        dropped = forms(tmp_path / "x.db")

    assert by_text == 20
    assert by_note == [0, 20]
    assert set(before) == {"a\0"}
    assert dropped == {}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("key", [None, KEY])
def test_no_word_survives(key: bytes | None, tmp_path: Path) -> None:
    """Neither forgotten words nor those of dropped versions are in a form; sealed ones none are."""
    path = tmp_path / "x.db"
    with opened(tmp_path, key=key) as store:
        fill(store, A, 30)
        fill(store, B, 30)
        store.put(A, "secret", {"text": "the zorbaxing"})
        store.put(B, "closed", {"text": "a quimboe"})
        store.search((), query="tea")
        store.put(B, "closed", {"text": "milk"})
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    clear = [word in read_all_bytes(tmp_path) for word in (b"zorbax", b"quimbo", b"tea")]
    with opened(tmp_path, key=key) as store:
        store.search((), query="tea")
        store.retain(VersionRetention(last=0), prefix=B)
        retained = [word in b"".join(forms(path).values()) for word in (b"zorbax", b"quimbo")]
        store.forget(A, key="secret")
        left = read_all_bytes(tmp_path)
        found = len(store.search((), query="tea", mode="text", limit=99))

    assert clear == [key is None] * 3
    assert retained == [key is None, False]
    assert b"zorbax" not in left
    assert found == 60


@pytest.mark.parametrize("kept", [False, True])
def test_what_was_closed_is_all_that_is_read_of_what_went(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an index that is in memory, and by one from the file, whoever wrote meanwhile."""
    monkeypatch.setattr(indexes, "_is_worth_saving", lambda unsaved, items: kept and unsaved > 0)
    with opened(tmp_path) as store, opened(tmp_path) as other:
        fill(store, A, 20)
        store.search((), query="tea")
        searcher = other if kept else store
        monkeypatch.setitem(store._parts.sql, "present_ids", "no SQL, of no other's")
        fill(store, B, 20)
        store.delete(A, "k3")
        store.put(A, "k4", {"text": "milk"})
        other.put(A, "k5", {"text": "tea, at last"})
        other.delete(A, "k5")
        found = keys(searcher.search(A, query="tea milk", limit=99))

    assert sorted(found) == sorted({f"k{n}" for n in range(20)} - {"k3", "k5"})


def test_a_version_that_is_dropped_before_it_is_missed(tmp_path: Path) -> None:
    """A closed version whose row is gone tells no search that its item went."""
    with opened(tmp_path) as store:
        fill(store, A, 20)
        store.search(A, query="tea")
        store.delete(A, "k3")
        store.retain(VersionRetention(last=0))
        store.delete(A, "k4")
        found = keys(store.search(A, query="tea", limit=99))

    assert sorted(found) == sorted({f"k{n}" for n in range(20)} - {"k3", "k4"})


@pytest.mark.parametrize("closed", [False, True])
def test_what_is_forgotten_leaves_memory(closed: bool, tmp_path: Path, analysed: list[str]) -> None:
    """Here at once, elsewhere with the next search of anything; nothing else is analysed anew."""

    def known(store: SQLiteStore) -> set[str]:
        every = store._parts.indexes._cached.values()
        return {word for held in every if held.index for word in held.index.vocabulary}

    with opened(tmp_path) as store, opened(tmp_path, read_only=True) as other:
        fill(store, A, 30)
        fill(store, B, 30, "milk")
        store.put(A, "secret", {"text": "zorbaxing"})
        for each in (store, other):
            each.search((), query="tea")
        if closed:
            store.delete(A, "secret")
        before = [known(each) for each in (store, other)]
        store.forget(A, key="secret")
        here, there = known(store), known(other)
        other.search(B, query="milk")
        after = known(other)
        del analysed[:]
        found = [len(each.search((), query="tea", limit=99)) for each in (store, other)]

    assert all("zorbax" in words for words in [*before, there])
    assert "zorbax" not in here | after
    assert {"tea", "milk", "number7"} <= here & after
    assert analysed == []
    assert found[0] == found[1] > 0


def test_two_forget_at_once(tmp_path: Path) -> None:
    """One that another overtakes, before it lets go of what it has in memory, ends as well."""
    with opened(tmp_path) as store:
        store.put(A, "secret", {"text": "zorbaxing"})
        store.search(A, query="tea")
        indexes = store._parts.indexes
        flow = indexes.purge_erased()
        marks = store.database.read(lambda: fetch_rows(indexes.sql["store_state"]))
        next(flow)
        store.forget(A, key="secret")
        with pytest.raises(StopIteration):
            flow.send(marks)


@pytest.mark.usefixtures("eager")
def test_a_form_that_comes_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search read before an erasure is not written after it."""
    path = tmp_path / "x.db"
    with opened(tmp_path) as store:
        fill(store, A, 20)
        store.put(A, "secret", {"text": "zorbaxing"})
        indexes = store._parts.indexes
        late: list[Any] = []
        write_in_background = indexes.write_in_background
        assert write_in_background is not None
        monkeypatch.setattr(indexes, "write_in_background", late.append)
        store.search(A, query="tea")
        store.forget(A, key="secret")
        for make in late:
            store.database.write(make)
        after = forms(path)
        monkeypatch.setattr(indexes, "write_in_background", write_in_background)
        store.put(A, "more", {"text": "milk"})
        store.search(A, query="tea")

    assert len(late) == 1
    assert after == {}
    assert set(forms(path)) == {"a\0"}
    assert b"zorbax" not in read_all_bytes(tmp_path)


# -- dropped


def test_what_was_not_searched_for_longest_is_dropped(tmp_path: Path, analysed: list[str]) -> None:
    """Within the budget, and read again when it is needed, with the same answer."""
    with opened(tmp_path) as store:
        for n in range(4):
            fill(store, (f"n{n}",), 100, f"word{n}")
        one = store._parts.indexes
        store.search(("n0",), query="word0")
        alone = one._nbytes
    with opened(tmp_path, index_bytes=alone * 5 // 2) as store:
        of = store._parts.indexes
        before = {n: store.search((f"n{n}",), query=f"word{n} number7") for n in range(4)}
        held, taken = list(of._cached), of._nbytes
        del analysed[:]
        again = {n: store.search((f"n{n}",), query=f"word{n} number7") for n in (3, 2, 0)}
        read = len(analysed)
        across = store.search((), query="word0 number7", limit=400)
    with opened(tmp_path) as store:
        whole = store.search((), query="word0 number7", limit=400)

    assert held == [(b"n2\0", False), (b"n3\0", False)]
    assert taken <= alone * 5 // 2
    assert all(before[n] == again[n] for n in again)
    assert read == 0  # n0 was read from its compact form
    assert len(across) == 400
    assert keys(whole) == keys(across)
    assert np.allclose([i.score or 0 for i in whole], [i.score or 0 for i in across], atol=1e-5)


def test_a_search_of_all_stays_within_the_budget(tmp_path: Path) -> None:
    """A prefix whose indexes take more than may be held is searched in pieces."""
    with opened(tmp_path, index_bytes=1_000_000) as store:
        for n in range(20):
            fill(store, (f"n{n}",), 100)
        found = store.search((), query="tea", limit=3_000)
        indexes = store._parts.indexes
        held, taken = len(indexes._cached), indexes._nbytes

    assert len(found) == 2_000
    assert 0 < held < 20
    assert taken <= 1_000_000
