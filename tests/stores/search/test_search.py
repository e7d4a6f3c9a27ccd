"""Search by words and vectors: which items are found, in which order, and why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.base import PutOp

from perdure.errors import ConfigurationError, InvalidFilter
from perdure.stores import Provenance, SQLiteStore
from tests.store_backends import (
    BACKENDS,
    DIMS,
    ONE_CALL_MODE_PER_BACKEND,
    Clock,
    WordEmbedder,
    list_item_keys,
    make_options,
    put_texts,
)

A = ("a",)
MODES: list[Any] = ["hybrid", "text", "semantic"]
CHINESE = "我们需要一个能够记住用户偏好的聊天机器人"


@pytest.mark.parametrize("mode", MODES)
def test_search_finds_item_as_soon_as_put_returns(mode: Any, store: SQLiteStore) -> None:
    """After a delete or another put has returned, search no longer finds the old version."""
    put_texts(store, A, other="nothing of interest")
    for n in range(40):
        store.put(A, "k", {"text": f"word{n} and more"})
        results = store.search(A, query=f"word{n}", mode=mode, limit=1)
        assert [("k", f"word{n} and more")] == [(i.key, i.value["text"]) for i in results]
    store.delete(A, "k")

    assert "k" not in list_item_keys(store.search(A, query="word39", mode=mode))


def test_text_search_finds_only_items_with_a_word_of_the_query(store: SQLiteStore) -> None:
    """Words match by stem, regardless of case and accents."""
    put_texts(
        store,
        A,
        run="She was running to the café",
        tea="Tea with milk",
        zh=CHINESE,
        no="Something else",
    )

    def search_keys(query: str) -> list[str]:
        return list_item_keys(store.search(A, query=query, mode="text"))

    assert search_keys("runs") == ["run"]
    assert search_keys("CAFE") == ["run"]
    assert search_keys("What did she do with the milk?") == ["tea"]
    assert search_keys("聊天") == ["zh"]
    assert search_keys("偏好") == ["zh"]
    assert search_keys("天机") == ["zh"]
    assert search_keys("偏机") == []
    assert search_keys("unheard") == []
    assert search_keys("") == ["run", "tea", "zh", "no"]  # a blank query lists all items


@pytest.mark.parametrize("query", ["Wie heißt mein Hund?", "東京オリンピック", "Где мой ключ?"])
def test_offline_embedder_finds_nothing_for_query_in_other_language(query: str) -> None:
    """The offline embedder knows English only, so the words of the query decide."""
    with SQLiteStore.open(":memory:") as store:
        put_texts(store, A, bread="Sourdough needs a starter", hello="Привет мир", dog="犬が好き")

        assert list_item_keys(store.search(A, query=query)) == []
        assert list_item_keys(store.search(A, query="baking bread"))[:1] == ["bread"]
        assert len(store.search(A, query=query, mode="semantic")) == 3


@pytest.mark.parametrize("backend", ["memory", "file", "sealed"])
def test_text_search_corrects_misspelt_word(backend: str, tmp_path: Path) -> None:
    """A word that no item has is replaced by a similar one. A word that an item has never is."""
    with BACKENDS[backend](tmp_path) as store:
        put_texts(
            store, A, a="we visited Barcelona", b="the receipt is here", c="the recipe is here"
        )

        def search_keys(query: str) -> list[str]:
            return list_item_keys(store.search(A, query=query, mode="text"))

        assert search_keys("barcelna") == ["a"]
        assert search_keys("reciept") == ["b"]
        assert search_keys("recipe") == ["c"]
        assert search_keys("zzzzzz") == []


def test_semantic_search_finds_item_without_common_word(store: SQLiteStore) -> None:
    """Scores fall with the distance of the vectors."""
    put_texts(store, A, car="my car is red", dog="the dog sleeps", both="the dog in the car")
    results = store.search(A, query="automobile", mode="semantic")

    assert {"car", "both"} == set(list_item_keys(results[:2]))
    assert results[1].score is not None
    assert results[2].score is not None
    assert results[1].score > results[2].score


def test_hybrid_search_finds_matches_by_word_and_by_vector(store: SQLiteStore) -> None:
    """An item may match by its words only or by its vector only."""
    put_texts(store, A, vector="my car", neither="nothing at all here")
    store.put(A, "words", {"text": "automobiles are loud", "n": 1})
    found_keys = list_item_keys(store.search(A, query="automobile", limit=2))

    assert {"vector", "words"} == set(found_keys)


def test_item_put_with_index_false_is_not_found_by_query(store: SQLiteStore) -> None:
    """An item with index=False is returned by get and found by a filter, but not by a query."""
    store.put(A, "shown", {"text": "tea"})
    store.put(A, "hidden", {"text": "tea"}, index=False)
    store.put(A, "none", {"text": "tea"}, index=[])
    store.put(A, "was shown", {"text": "tea"})
    store.put(A, "was shown", {"text": "tea"}, index=False)

    for mode in MODES:
        assert list_item_keys(store.search(A, query="tea", mode=mode)) == ["shown"]
    assert len(store.search(A, filter={"text": "tea"})) == 4
    assert store.get(A, "hidden") is not None


def test_search_covers_only_index_paths_of_the_put(store: SQLiteStore) -> None:
    """A path may name a field, an array, its elements, or the whole value."""
    value = {
        "title": "alpha",
        "body": {"text": "beta"},
        "tags": ["gamma", "delta"],
        "parts": [{"text": "epsilon"}, {"text": "zeta"}],
        "count": 7,
    }
    wanted: dict[str, list[str]] = {
        "title": ["alpha"],
        "body.text": ["beta"],
        "tags[*]": ["gamma", "delta"],
        "tags[0]": ["gamma"],
        "tags[-1]": ["delta"],
        "parts[*].text": ["epsilon", "zeta"],
        "parts[1].text": ["zeta"],
        "$": ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"],
        "missing": [],
    }
    words = wanted["$"]
    for field in wanted:
        store.put(A, field, value, index=[field])

    for field, expected_words in wanted.items():
        for mode in ("text", "semantic"):
            hits = {
                word
                for word in words
                for item in store.search(A, query=word, mode=mode, limit=20)
                if item.key == field and (item.score or 0) > 0
            }
            assert set(expected_words) == hits, (field, mode)


def test_fields_option_applies_to_puts_without_index_paths(tmp_path: Path) -> None:
    """The option applies to words and to vectors."""
    options = make_options()
    options["index"]["fields"] = ["text", "tags[*]"]
    with SQLiteStore.open(tmp_path / "x.db", **options) as store:
        store.put(A, "k", {"text": "alpha", "tags": ["beta", "gamma"], "other": "delta"})
        store.put(A, "own", {"text": "alpha", "other": "delta"}, index=["other"])
        keys_by_word = {
            word: list_item_keys(store.search(A, query=word, mode="text"))
            for word in ("alpha", "beta", "gamma", "delta")
        }
        embedded_calls = options["index"]["embed"].calls

    assert keys_by_word == {"alpha": ["k"], "beta": ["k"], "gamma": ["k"], "delta": ["own"]}
    assert {"alpha", "beta", "gamma", "delta"} == {
        text for call in embedded_calls for text in call[:3]
    } & {*("alpha", "beta", "gamma", "delta", "alpha\nbeta\ngamma\ndelta")}


def test_search_limit_counts_items_that_match_the_filter(store: SQLiteStore) -> None:
    """A matching item is found, however low it ranks without the filter."""
    store.batch(
        [PutOp(A, f"k{n}", {"text": "tea " * (60 - n), "n": n, "odd": n % 2}) for n in range(60)]
    )
    for mode in MODES:
        results = store.search(A, query="tea", mode=mode, filter={"n": {"$gte": 57}}, limit=3)
        assert {"k57", "k58", "k59"} == set(list_item_keys(results)), mode
    assert store.search(A, query="tea", filter={"n": 1000}) == []
    with pytest.raises(InvalidFilter):
        store.search(A, query="tea", filter={"n": {"$near": 1}})


def test_search_without_embedder_uses_words_only(tmp_path: Path) -> None:
    """A semantic search is refused with advice."""
    with SQLiteStore.open(tmp_path / "x.db", index=None) as store:
        put_texts(store, A, a="tea", b="gravel")

        assert list_item_keys(store.search(A, query="tea")) == ["a"]
        assert list_item_keys(store.search(A, query="tea", mode="text")) == ["a"]
        assert store.search(A, query="water") == []
        with pytest.raises(ConfigurationError, match="needs an embedder"):
            store.search(A, query="tea", mode="semantic")
        assert store.pending_embeddings() == []


def test_explained_score_is_the_sum_of_its_parts(store: SQLiteStore) -> None:
    """Without `explain`, results have no parts."""
    put_texts(store, A, a="tea with milk", b="tea", c="my car is red", d="Is it tea?")
    for mode in MODES:
        for item in store.search(A, query="tea and an automobile", mode=mode, explain=True):
            assert item.parts is not None
            assert item.score is not None
            assert math.isclose(item.score, sum(item.parts.values()), abs_tol=1e-5)
    assert all(item.parts is None for item in store.search(A, query="tea"))
    assert all(item.score is None for item in store.search(A))


def test_why_not_returns_rank_or_reason(store: SQLiteStore) -> None:
    """The rank is the item's place in the results; the reason says why the item is not found."""
    put_texts(store, A, a="tea tea", b="tea and much more of other things", c="milk")
    store.put(A, "hidden", {"text": "tea"}, index=False)
    ranks = {key: store.why_not(A, key, query="tea", mode="text") for key in "abc"}
    order = list_item_keys(store.search(A, query="tea", mode="text"))

    assert [ranks[key].rank for key in order] == [1, 2]
    assert ranks["a"].parts
    assert "no such item" in store.why_not(A, "z", query="tea").reason
    assert "index=False" in store.why_not(A, "hidden", query="tea").reason
    assert "filter" in store.why_not(A, "a", query="tea", filter={"text": "x"}).reason
    assert "prefix" in store.why_not(A, "a", query="tea", prefix=("b",)).reason
    assert "filter" in store.why_not(A, "a", query="tea", provenance={"actor": "Bo"}).reason
    with pytest.raises(ConfigurationError, match="query"):
        store.why_not(A, "a", query="")


def test_why_not_as_of_a_moment_uses_items_of_that_moment(store: SQLiteStore, clock: Clock) -> None:
    """The rank is that of a search of the same moment."""
    ann, bo = Provenance(actor="Ann"), Provenance(actor="Bo")
    store.put(A, "a", {"text": "tea tea"}, provenance=ann)
    store.put(A, "b", {"text": "tea and much more of other things"}, provenance=ann)
    past = clock.at()
    clock.forward()
    store.put(A, "a", {"text": "milk"}, provenance=bo)
    store.put(A, "new", {"text": "tea tea tea"}, provenance=bo)
    store.delete(A, "b")

    def why_not_then(key: str, **options: Any) -> Any:
        return store.why_not(A, key, query="tea", mode="text", as_of=past, **options)

    assert [why_not_then("a").rank, why_not_then("b").rank] == [1, 2]
    assert why_not_then("b").reason == "1 of 2 items score higher"
    assert why_not_then("new").reason == "no such item exists"
    assert why_not_then("a", provenance={"actor": "Ann"}).rank == 1
    assert "filter" in why_not_then("a", provenance={"actor": "Bo"}).reason
    assert store.why_not(A, "a", query="tea", mode="text").rank == 2
    assert store.why_not(A, "a", query="tea", provenance={"actor": "Ann"}).rank is None


def test_items_of_equal_score_are_ordered_newest_first(store: SQLiteStore) -> None:
    """The order is the same on every page and in every search."""
    for n in range(30):
        store.put(A, f"k{n:02}", {"text": "tea"})
    expected = [f"k{n:02}" for n in reversed(range(30))]

    for mode in MODES:
        assert expected == list_item_keys(store.search(A, query="tea", mode=mode, limit=30))
        paged = [
            key
            for at in range(0, 30, 4)
            for key in list_item_keys(store.search(A, query="tea", mode=mode, limit=4, offset=at))
        ]
        assert expected == paged


def test_search_is_correct_after_many_changes(store: SQLiteStore, clock: Clock) -> None:
    """The test mixes puts, replacements and deletions, in small and large batches."""
    living: dict[str, int] = {}
    for turn in range(30):
        ops = []
        for n in range(turn * 7 % 40 + 1):
            key = f"k{(turn * 13 + n * 5) % 120}"
            gone = (turn + n) % 4 == 0
            ops.append(PutOp(A, key, None if gone else {"text": f"tea turn{turn}", "n": n}))
            living.pop(key, None)
            if not gone:
                living[key] = turn
        store.batch(ops)
        results = store.search(A, query="tea", limit=1000, mode=MODES[turn % 3])
        assert sorted(living) == sorted(list_item_keys(results))
        here = {key for key, at in living.items() if at == turn}
        fresh = store.search(A, query=f"turn{turn}", mode="text", limit=1000)
        assert here == set(list_item_keys(fresh))


INVALID_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"limit": -1}, "limit"),
    ({"offset": -1}, "offset"),
    ({"limit": "10"}, "limit"),
    ({"limit": 1.5}, "limit"),
    ({"limit": True}, "limit"),
    ({"limit": None}, "limit"),
    ({"query": 7}, "query"),
    ({"query": ["tea"]}, "query"),
    ({"query": "tea", "mode": "magic"}, "mode"),
]


@ONE_CALL_MODE_PER_BACKEND
@pytest.mark.parametrize(("options", "expected_name"), INVALID_OPTIONS, ids=repr)
def test_search_refuses_invalid_argument_by_name(
    options: dict[str, Any], expected_name: str, store: SQLiteStore
) -> None:
    with pytest.raises(ConfigurationError, match=expected_name):
        store.search(A, **options)


@ONE_CALL_MODE_PER_BACKEND
@pytest.mark.parametrize("filter", [0, "", [], "x", 7, [{"a": 1}]], ids=repr)
def test_search_refuses_filter_that_is_not_a_mapping(filter: Any, store: SQLiteStore) -> None:
    """Empty values of other types are refused as well; None and {} mean no filter."""
    for options in ({"filter": filter}, {"provenance": filter}):
        with pytest.raises(InvalidFilter):
            store.search(A, **options)
    assert store.search(A, filter=None) == store.search(A, filter={}) == []


def test_reopened_store_returns_same_results_and_scores(tmp_path: Path) -> None:
    for backend in ("file", "sealed", "keyed"):
        with BACKENDS[backend](tmp_path) as store:
            put_texts(store, A, a="tea with milk", b="my car is red", c="Was it a long trip?")
            before = [store.search(A, query="an automobile, tea", mode=mode) for mode in MODES]
        with BACKENDS[backend](tmp_path) as store:
            after = [store.search(A, query="an automobile, tea", mode=mode) for mode in MODES]

        assert [list_item_keys(results) for results in before] == [
            list_item_keys(results) for results in after
        ]
        assert [[i.score for i in results] for results in before] == [
            [i.score for i in results] for results in after
        ]


def test_misspelt_word_is_corrected_among_filtered_items_only(
    file_store: SQLiteStore,
) -> None:
    for letter in "abcdefghij":
        file_store.put(A, letter, {"text": f"server{letter}", "who": "ann"})
    file_store.put(A, "mine", {"text": "sarver", "who": "bob"})

    results = file_store.search(A, query="server", filter={"who": "bob"}, mode="text")

    assert list_item_keys(results) == ["mine"]


def test_query_is_not_embedded_if_store_is_empty(tmp_path: Path) -> None:
    words = WordEmbedder()
    words.in_process = False
    with BACKENDS["file"](tmp_path, index={"embed": words, "dims": DIMS}) as store:
        assert store.search(A, query="tea") == []
        assert words.calls == []
