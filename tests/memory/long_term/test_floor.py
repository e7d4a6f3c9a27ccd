"""The minimum score of a recall: weak matches are not recalled, and `explain` lists them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage
from langgraph.store.memory import InMemoryStore

from perdure.errors import ConfigurationError
from perdure.memory import arecall, recall, search_memory, use_memories
from perdure.memory.long_term.recall import RecallResult, check_recall
from perdure.settings import MIN_SCORE
from perdure.stores import PostgresStore, SQLiteStore
from tests import postgres_server
from tests.memory.recall_helpers import (
    ANN,
    AS_ANN,
    build_fact_put,
    iter_turn_puts,
    open_filled_store,
)

UNRELATED_QUERY = "quantum chromodynamics"  # no memory is about it
TEAM = ("memories", "team")
AT = datetime(2024, 5, 8, tzinfo=UTC)
MEMORIES = (
    build_fact_put("home", "Ann lives in Ghent"),
    build_fact_put("drink", "Ann drinks green tea"),
    build_fact_put("boat", "The canoe of Ann is called Nutshell", kind="thing"),
    *iter_turn_puts(
        "t", AT, "It rains in Oslo", "My canoe is called Nutshell", "The museum is shut"
    ),
)
QUERIES = (UNRELATED_QUERY, "Where does Ann live?", "canoe", "Ann", "tea in Oslo", "the museum")


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    options: dict[str, Any] = {"index": "offline"}
    if request.param == "postgres":
        schema = postgres_server.schema_name(tmp_path_factory.mktemp("floor"))
        opened: Any = PostgresStore.open(postgres_server.dsn(), schema=schema, **options)
    else:
        opened = SQLiteStore.open(":memory:", **options)
    with opened:
        opened.batch(MEMORIES)
        opened.put(TEAM, "shared", {"text": "The canoe lies in the harbour", "kind": "fact"})
        opened.put(TEAM, "same", {"text": "ann lives in GHENT", "kind": "fact"})
        yield opened


def embed_as_cosines(texts: Sequence[str]) -> list[list[float]]:
    """Return vectors whose cosines with the query's vector are the numbers in the texts."""
    numbers = [float(text) if text[:1] in "-01" else 1.0 for text in texts]
    return [[number, (1 - number**2) ** 0.5] for number in numbers]


@pytest.fixture
def langgraph_store() -> InMemoryStore:
    """A store of langgraph whose scores are cosines."""
    opened = InMemoryStore(index={"dims": 2, "embed": embed_as_cosines, "fields": ["text"]})
    for number in ("0.9", "0.15", "-0.1"):
        opened.put(ANN, number, {"text": number, "kind": "fact"})
    return opened


def recall_for_ann(query: str, store: Any, **options: Any) -> RecallResult:
    return recall(query, store=store, config=AS_ANN, **options)


def list_texts(memories: Any) -> list[str]:
    return [memory.text for memory in memories]


@pytest.mark.parametrize("min_score", [None, 0])
def test_unrelated_query_recalls_nothing_unless_min_score_is_zero(
    store: Any, min_score: float | None
) -> None:
    """The functions, a view, the tool and a check agree."""
    options: dict[str, Any] = {"store": store, "config": AS_ANN, "min_score": min_score}
    tool = search_memory(store=store, min_score=min_score)
    by_tool = tool.invoke({"query": UNRELATED_QUERY, "limit": 10}, AS_ANN)
    context = use_memories(store, min_score=min_score)([HumanMessage(UNRELATED_QUERY)], AS_ANN)
    is_found = min_score == 0

    assert bool(recall(UNRELATED_QUERY, **options).memories) is is_found
    assert bool(asyncio.run(arecall(UNRELATED_QUERY, **options)).memories) is is_found
    assert ("Ann lives in Ghent" in by_tool) is is_found
    assert (len(context) == 2) is is_found
    assert (check_recall({UNRELATED_QUERY: "home"}, **options).recall == 1) is is_found
    assert list_texts(recall("Where does Ann live?", **options).memories)[0] == "Ann lives in Ghent"


def test_store_search_has_no_minimum_score_and_the_scores_of_a_recall(store: Any) -> None:
    items = {item.key: item.score for item in store.search(ANN, query=UNRELATED_QUERY)}
    result = recall_for_ann(UNRELATED_QUERY, store, explain=True)

    assert len(items) == len(MEMORIES)
    assert {memory.key: memory.score for memory in result.below_min_score} == items


@given(
    query=st.sampled_from(QUERIES),
    limit=st.integers(1, 8),
    kinds=st.sampled_from([None, ["fact"], ["thing", "turn"]]),
    namespace=st.sampled_from([ANN, [ANN, TEAM], ("memories",)]),
    least=st.sampled_from([None, 0, 0.05, 0.5, 0.9]),
)
def test_explain_does_not_change_what_is_recalled(
    store: Any, query: str, **search_options: Any
) -> None:
    """The rest is below the minimum score, each text once, at most `limit`."""
    options = {"min_score": search_options.pop("least"), **search_options}
    result, explained = (
        recall_for_ann(query, store, **options, explain=explain) for explain in (False, True)
    )
    above, below = set(list_texts(explained.memories)), list_texts(explained.below_min_score)

    assert (result.memories, result.lines) == (explained.memories, explained.lines)
    assert (result.below_min_score, result.min_score) == ([], explained.min_score)
    assert all(
        memory.score is None or memory.score >= explained.min_score for memory in explained.memories
    )
    assert all(
        0 <= (memory.score or 0) < explained.min_score for memory in explained.below_min_score
    )
    assert len(below) == len(set(below)) <= search_options["limit"]
    assert above.isdisjoint(below)
    assert {memory.kind for memory in explained.below_min_score} <= {
        *(search_options["kinds"] or ("fact", "thing", "turn"))
    }


FARM = (
    "She keeps geese behind the mill",
    "The combine is a green Claas Lexion",
    "Her husband Arvid is a surveyor",
    "The piano tuner comes every third Friday",
    "The loft leaks when snow melts",
    "Her eldest son studies chemistry in Turku",
    "She is allergic to walnuts",
    "The oats are sown in the middle of May",
    "The drill is lent to Karin Lindqvist",
    "She was baptised in Visby",
    "The post van passes around noon",
    "The cistern holds four thousand litres",
    "The dairy settles its bills on the first",
    "The cat answers to Pompe",
    "Her aunt lives above the bakery in Falun",
    "She owes Ragnar six hundred crowns",
    "The bridge to the islet closes in March",
    "The spare fuses lie in the drawer",
    "Her grandfather carved the cradle",
    "The cows are insured with Agria",
)
FARM_QUESTIONS = {
    "What does she keep behind the mill?": "geese",
    "Which combine does she have?": "Claas",
    "When does the piano tuner come?": "Friday",
    "Which nuts is she allergic to?": "walnuts",
    "When are the oats sown?": "May",
    "Who borrowed the drill?": "Lindqvist",
    "How much does the cistern hold?": "litres",
    "What is the cat called?": "Pompe",
    "How much does she owe Ragnar?": "crowns",
    "Where are the spare fuses?": "drawer",
    "Who carved the cradle?": "grandfather",
}


@pytest.mark.parametrize("size", [8, 20])
def test_answering_fact_is_recalled_first_and_mostly_alone(size: int) -> None:
    others = 0
    for question, answer in FARM_QUESTIONS.items():
        answering_texts = [text for text in FARM if answer in text]
        other_texts = [text for text in FARM if answer not in text]
        facts = [
            build_fact_put(str(key), text)
            for key, text in enumerate([*answering_texts, *other_texts][:size])
        ]
        with open_filled_store(*facts, index="offline") as store:
            recalled = list_texts(recall_for_ann(question, store, limit=10).memories)
        assert recalled[:1] == answering_texts
        others += len(recalled) - 1

    assert others <= len(FARM_QUESTIONS) // 2


def test_presence_of_an_answer_lifts_hardly_any_other_memory() -> None:
    """A memory needs evidence of its own to reach the minimum score."""
    lifted = 0
    for question, answer in FARM_QUESTIONS.items():
        recalls = []
        for present in (True, False):
            texts = [text for text in FARM if present or answer not in text]
            facts = [build_fact_put(str(key), text) for key, text in enumerate(texts)]
            with open_filled_store(*facts, index="offline") as store:
                recalls.append(set(list_texts(recall_for_ann(question, store, limit=10).memories)))
        lifted += sum(answer not in text for text in recalls[0] - recalls[1])

    assert lifted <= 2


def test_name_in_every_fact_is_no_evidence() -> None:
    predicates = (
        "lives in Ghent",
        "likes figs",
        "plays the oboe",
        "has two sisters",
        "works by night",
    )
    with open_filled_store(
        *(build_fact_put(text, f"Ann {text}") for text in predicates), index="offline"
    ) as store:
        about_oboe = list_texts(recall_for_ann("Does Ann play the oboe?", store).memories)
        about_passport = list_texts(
            recall_for_ann("When did Ann renew her passport?", store).memories
        )
        about_ann = list_texts(recall_for_ann("Ann", store).memories)

    assert about_oboe == ["Ann plays the oboe"]
    assert about_passport == []
    assert len(about_ann) == len(predicates)


def test_rare_name_in_several_facts_is_evidence() -> None:
    pets = ("Pompe is a grey cat", "Pompe sleeps in the loft", "The vet has seen Pompe twice")
    facts = [*pets, *(text for text in FARM if "Pompe" not in text)]
    with open_filled_store(
        *(build_fact_put(text, text) for text in facts), index="offline"
    ) as store:
        recalled = set(list_texts(recall_for_ann("Who is Pompe?", store).memories))

    assert recalled == set(pets)


def test_langgraph_store_has_no_minimum_score_by_default(langgraph_store: InMemoryStore) -> None:
    """The meaning of its scores is unknown."""
    assert list_texts(recall_for_ann("what", langgraph_store).memories) == ["0.9", "0.15", "-0.1"]
    assert recall_for_ann("what", langgraph_store).min_score == 0
    assert list_texts(recall_for_ann("what", langgraph_store, min_score=0).memories) == [
        "0.9",
        "0.15",
        "-0.1",
    ]
    result = recall_for_ann("what", langgraph_store, min_score=0.5, explain=True)
    assert (list_texts(result.memories), list_texts(result.below_min_score)) == (
        ["0.9"],
        ["0.15", "-0.1"],
    )
    assert list_texts(recall_for_ann("what", langgraph_store, min_score=0.5).memories) == ["0.9"]
    tool = search_memory(store=langgraph_store, min_score=0.5)
    assert tool.invoke({"query": "what"}, AS_ANN).count('"memory"') == 1


def test_memory_without_a_score_is_not_below_a_minimum_score() -> None:
    """A store without an index has no scores."""
    unindexed_store = InMemoryStore()
    unindexed_store.put(ANN, "home", {"text": "Ann lives in Ghent", "kind": "fact"})

    assert list_texts(recall_for_ann(UNRELATED_QUERY, unindexed_store, min_score=0.5).memories) == [
        "Ann lives in Ghent"
    ]
    assert (
        "     -  home: Ann lives in Ghent"
        in recall_for_ann(UNRELATED_QUERY, unindexed_store).explain()
    )


def test_explanation_lists_scores_parts_and_memories_below_the_minimum(store: Any) -> None:
    result = recall_for_ann("Where does Ann live?", store, explain=True, max_tokens=60)
    empty_result = recall_for_ann(UNRELATED_QUERY, store, explain=True, limit=2)
    lines = result.explain().splitlines()
    home = result.memories[0]

    assert lines[0] == f"recalled, best first (minimum score {MIN_SCORE:.2f}):"
    assert lines[1] == f"  {home.score:.2f}  home: Ann lives in Ghent"
    assert all(name in lines[2] for name, part in (home.parts or {}).items() if part > 0.01)
    assert f"{result.left_out} more memories did not fit into the token budget" in lines or not (
        result.left_out
    )
    assert empty_result.explain().startswith(
        f"nothing was recalled (minimum score {MIN_SCORE:.2f})\n"
    )
    assert empty_result.explain().splitlines()[1] == "below the minimum score, best first:"
    assert (
        empty_result.describe_memories_below_min_score()
        == f"the nearest 2 memories are below the minimum score {MIN_SCORE:.2f}"
    )
    assert (
        recall_for_ann(UNRELATED_QUERY, store, explain=True, limit=1)
        .describe_memories_below_min_score()
        .startswith("the nearest memory")
    )
    assert (
        recall_for_ann(
            UNRELATED_QUERY, store, min_score=0, explain=True
        ).describe_memories_below_min_score()
        == ""
    )
    assert (
        recall_for_ann("tea", store, min_score=0)
        .explain()
        .startswith("recalled, best first (no minimum score)")
    )


def test_explanation_cuts_a_long_memory_to_one_line() -> None:
    with open_filled_store(build_fact_put("long", "canoe\nof words " * 100)) as store:
        line = recall_for_ann("canoe", store, min_score=0).explain().splitlines()[1]

    assert line.endswith("…")
    assert len(line) < 200


@pytest.mark.parametrize(
    "invalid_score",
    ["0.3", True, float("nan"), float("inf"), pytest.param(10**400, id="huge"), [0.3]],
)
def test_min_score_must_be_a_finite_number(store: Any, invalid_score: Any) -> None:
    """Other values are refused where they are given, for any store."""
    for use_invalid_score in (
        lambda: recall_for_ann("tea", InMemoryStore(), min_score=invalid_score),
        lambda: use_memories(store, min_score=invalid_score),
        lambda: search_memory(store=store, min_score=invalid_score),
        lambda: check_recall({"tea": "drink"}, store=store, min_score=invalid_score),
    ):
        with pytest.raises(ConfigurationError, match=r"min_score is .*; expected a number"):
            use_invalid_score()
