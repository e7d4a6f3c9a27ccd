"""Checking recall: which questions recall what they should, at which rank, and why others not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langgraph.store.memory import InMemoryStore

from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory.recall import RecallReport, check_recall
from perdure.stores import SQLiteStore
from tests.memory.remembered import ANN, AS_ANN, build_fact_put, open_filled_store

PUTS = (
    build_fact_put("home", "Ann lives in Ghent"),
    build_fact_put("tea", "Ann likes green tea"),
    build_fact_put("cats", "Ann has two cats, Miso and Tofu"),
    *(build_fact_put(f"walk{n}", f"Ann went for a walk of {n} miles with Bo") for n in range(40)),
)


@pytest.fixture
def store() -> Iterator[SQLiteStore]:
    with open_filled_store(*PUTS) as opened:
        yield opened


def checks(pairs: Any, store: Any, **options: Any) -> RecallReport:
    """`check_recall` for Ann, without a floor."""
    return check_recall(pairs, **{"store": store, "config": AS_ANN, "min_score": 0, **options})


def test_keys_and_texts_may_be_expected(store: SQLiteStore) -> None:
    """A key where one is that of a memory; else a text, whatever its capitals and spaces."""
    report = checks(
        [
            ("Where does Ann live?", "home"),
            ("What does Ann like?", "likes  GREEN tea"),
            ("What are the cats called?", "cats"),
            ("What are the cats called?", ["Miso", "Tofu"]),
        ],
        store,
    )

    assert [each.ranks for each in report.questions] == [[1], [1], [1], [1, 1]]
    assert (report.recall, report.mrr, report.missed) == (1.0, 1.0, [])


def test_measures_count_shares_and_ranks(store: SQLiteStore) -> None:
    """Of a list the share that was recalled, of the first its rank."""
    report = checks(
        {
            "Where does Ann live?": ["home", "She moved to Bruges"],
            "Which cats?": "cats",
            "Who went for a walk?": "walk0",  # forty say the same: the newest come first
        },
        store,
        limit=40,
    )

    assert [each.ranks for each in report.questions] == [[1, None], [1], [40]]
    assert report.recall == pytest.approx((0.5 + 1 + 1) / 3)
    assert report.mrr == pytest.approx((1 + 1 + 1 / 40) / 3)
    assert [each.question for each in report.missed] == ["Where does Ann live?"]


def test_the_report_has_a_line_for_each_question(store: SQLiteStore) -> None:
    """With its ranks; then the measures. A key is not looked for in other texts."""
    store.put(ANN, "Ghent", {"text": "Bo's dogs"}, index=False)
    report = checks([("Where does Ann live?", "home"), ("Ghent?", ["cats", "Ghent"])], store)
    lines = str(report).splitlines()

    assert lines[0] == "   1  Where does Ann live? -> home"
    assert lines[1] == "-, -  Ghent? -> cats and Ghent"
    assert lines[2] == "recall@10 0.500, MRR 0.500: 1 of 2 questions recall what they should"


def test_any_store_will_do() -> None:
    """Also one of langgraph's."""
    other = InMemoryStore()
    for number in range(20):
        other.put(ANN, f"k{number}", {"text": f"memory number {number}", "kind": "fact"})
    found = other.search(ANN, query="memory", limit=20)
    report = checks([("memory", found[0].key), ("memory", found[-1].key)], other)

    assert [each.ranks for each in report.questions] == [[1], [None]]


WRONG: list[tuple[Any, str]] = [
    ([], "questions is empty"),
    ({}, "questions is empty"),
    (["Where?"], "questions\\[0\\] is 'Where\\?'"),
    ([("Where?",)], r"questions\[0\]"),
    ([(7, "home")], r"questions\[0\]"),
    ([("Where?", "home"), ("Who?", "")], r"questions\[1\] is \('Who\?', ''\)"),
    ([("Who?", [])], r"questions\[0\] is"),
    ([("Who?", 7)], r"questions\[0\] is"),
]


@pytest.mark.parametrize(("pairs", "named"), WRONG, ids=repr)
def test_what_are_no_pairs_is_refused(pairs: Any, named: str, store: SQLiteStore) -> None:
    """With its number, before anything is asked."""
    with pytest.raises(ConfigurationError, match=named):
        check_recall(pairs, store=store, config=AS_ANN)


def test_wrong_options_are_those_of_recall(store: SQLiteStore) -> None:
    """A limit of none, a run that does not say whose memories."""
    with pytest.raises(ConfigurationError, match="limit is 0"):
        checks([("Who?", "home")], store, limit=0)
    with pytest.raises(InvalidConfig, match="user_id"):
        checks([("Who?", "home")], store, config={"configurable": {}})
