"""`check_recall`: which questions recall the expected memories, and at which rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langgraph.store.memory import InMemoryStore

from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory.long_term.recall import RecallReport, check_recall
from perdure.stores import SQLiteStore
from tests.memory.recall_helpers import ANN, AS_ANN, build_fact_put, open_filled_store

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


def check_recall_as_ann(questions: Any, store: Any, **options: Any) -> RecallReport:
    """Call `check_recall` for Ann, without a `min_score`."""
    return check_recall(questions, **{"store": store, "config": AS_ANN, "min_score": 0, **options})


def test_expected_memories_may_be_keys_or_texts(store: SQLiteStore) -> None:
    """A string that is the key of a memory is a key.

    Any other string is a text, compared without case and spaces.
    """
    report = check_recall_as_ann(
        [
            ("Where does Ann live?", "home"),
            ("What does Ann like?", "likes  GREEN tea"),
            ("What are the cats called?", "cats"),
            ("What are the cats called?", ["Miso", "Tofu"]),
        ],
        store,
    )

    assert [result.ranks for result in report.questions] == [[1], [1], [1], [1, 1]]
    assert (report.recall, report.mrr, report.missed) == (1.0, 1.0, [])


def test_report_has_recall_and_mean_reciprocal_rank(store: SQLiteStore) -> None:
    """For a list of expected memories, recall is the share that was found.

    The first one counts for the rank.
    """
    report = check_recall_as_ann(
        {
            "Where does Ann live?": ["home", "She moved to Bruges"],
            "Which cats?": "cats",
            "Who went for a walk?": "walk0",  # forty say the same: the newest come first
        },
        store,
        limit=40,
    )

    assert [result.ranks for result in report.questions] == [[1, None], [1], [40]]
    assert report.recall == pytest.approx((0.5 + 1 + 1) / 3)
    assert report.mrr == pytest.approx((1 + 1 + 1 / 40) / 3)
    assert [result.question for result in report.missed] == ["Where does Ann live?"]


def test_report_prints_line_per_question_and_measures(store: SQLiteStore) -> None:
    """A key is not searched in the texts of other memories."""
    store.put(ANN, "Ghent", {"text": "Bo's dogs"}, index=False)
    report = check_recall_as_ann(
        [("Where does Ann live?", "home"), ("Ghent?", ["cats", "Ghent"])], store
    )
    lines = str(report).splitlines()

    assert lines[0] == "   1  Where does Ann live? -> home"
    assert lines[1] == "-, -  Ghent? -> cats and Ghent"
    assert lines[2] == "recall@10 0.500, MRR 0.500: expected memories recalled for 1 of 2 questions"


def test_check_recall_works_with_langgraph_store() -> None:
    langgraph_store = InMemoryStore()
    for number in range(20):
        langgraph_store.put(ANN, f"k{number}", {"text": f"memory number {number}", "kind": "fact"})
    found = langgraph_store.search(ANN, query="memory", limit=20)
    report = check_recall_as_ann(
        [("memory", found[0].key), ("memory", found[-1].key)], langgraph_store
    )

    assert [result.ranks for result in report.questions] == [[1], [None]]


INVALID_QUESTIONS: list[tuple[Any, str]] = [
    ([], "'questions' is empty"),
    ({}, "'questions' is empty"),
    (["Where?"], "questions\\[0\\] is 'Where\\?'"),
    ([("Where?",)], r"questions\[0\]"),
    ([(7, "home")], r"questions\[0\]"),
    ([("Where?", "home"), ("Who?", "")], r"questions\[1\] is \('Who\?', ''\)"),
    ([("Who?", [])], r"questions\[0\] is"),
    ([("Who?", 7)], r"questions\[0\] is"),
]


@pytest.mark.parametrize(("questions", "expected_message"), INVALID_QUESTIONS, ids=repr)
def test_invalid_questions_are_refused_by_number(
    questions: Any, expected_message: str, store: SQLiteStore
) -> None:
    with pytest.raises(ConfigurationError, match=expected_message):
        check_recall(questions, store=store, config=AS_ANN)


def test_invalid_options_of_recall_are_refused(store: SQLiteStore) -> None:
    with pytest.raises(ConfigurationError, match="limit is 0"):
        check_recall_as_ann([("Who?", "home")], store, limit=0)
    with pytest.raises(InvalidConfig, match="user_id"):
        check_recall_as_ann([("Who?", "home")], store, config={"configurable": {}})
