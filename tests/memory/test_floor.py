"""The floor of a recall: what hardly answers a question is not recalled, and `explain` shows it."""

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
from perdure.memory.recall import RecallResult, check_recall
from perdure.settings import MIN_SCORE
from perdure.stores import PostgresStore, SQLiteStore
from tests import postgres_server
from tests.memory.remembered import ANN, AS_ANN, build_fact_put, iter_turn_puts, open_filled_store

NOTHING = "quantum chromodynamics"  # of which nobody spoke
TEAM = ("memories", "team")
AT = datetime(2024, 5, 8, tzinfo=UTC)
SAID = (
    build_fact_put("home", "Ann lives in Ghent"),
    build_fact_put("drink", "Ann drinks green tea"),
    build_fact_put("boat", "The canoe of Ann is called Nutshell", kind="thing"),
    *iter_turn_puts(
        "t", AT, "It rains in Oslo", "My canoe is called Nutshell", "The museum is shut"
    ),
)
QUERIES = (NOTHING, "Where does Ann live?", "canoe", "Ann", "tea in Oslo", "the museum")


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    options: dict[str, Any] = {"index": "offline"}
    if request.param == "postgres":
        schema = postgres_server.schema(tmp_path_factory.mktemp("floor"))
        opened: Any = PostgresStore.open(postgres_server.dsn(), schema=schema, **options)
    else:
        opened = SQLiteStore.open(":memory:", **options)
    with opened:
        opened.batch(SAID)
        opened.put(TEAM, "shared", {"text": "The canoe lies in the harbour", "kind": "fact"})
        opened.put(TEAM, "same", {"text": "ann lives in GHENT", "kind": "fact"})
        yield opened


def cosines(texts: Sequence[str]) -> list[list[float]]:
    """Vectors whose cosines with the query's are what the texts say."""
    numbers = [float(text) if text[:1] in "-01" else 1.0 for text in texts]
    return [[number, (1 - number**2) ** 0.5] for number in numbers]


@pytest.fixture
def foreign() -> InMemoryStore:
    """A store of langgraph's, whose scores are cosines."""
    other = InMemoryStore(index={"dims": 2, "embed": cosines, "fields": ["text"]})
    for number in ("0.9", "0.15", "-0.1"):
        other.put(ANN, number, {"text": number, "kind": "fact"})
    return other


def recalled(query: str, store: Any, **options: Any) -> RecallResult:
    return recall(query, store=store, config=AS_ANN, **options)


def texts(memories: Any) -> list[str]:
    return [memory.text for memory in memories]


@pytest.mark.parametrize("least", [None, 0])
def test_where_nothing_fits_nothing_is_recalled(store: Any, least: float | None) -> None:
    """Unless the floor is turned off: by the functions, in a view, by the tool, in a check."""
    asked: dict[str, Any] = {"store": store, "config": AS_ANN, "min_score": least}
    tool = search_memory(store=store, min_score=least)
    by_tool = tool.invoke({"query": NOTHING, "limit": 10}, AS_ANN)
    shown = use_memories(store, min_score=least)([HumanMessage(NOTHING)], AS_ANN)
    is_found = least == 0

    assert bool(recall(NOTHING, **asked).memories) is is_found
    assert bool(asyncio.run(arecall(NOTHING, **asked)).memories) is is_found
    assert ("Ann lives in Ghent" in by_tool) is is_found
    assert (len(shown) == 2) is is_found
    assert (check_recall({NOTHING: "home"}, **asked).recall == 1) is is_found
    assert texts(recall("Where does Ann live?", **asked).memories)[0] == "Ann lives in Ghent"


def test_the_search_of_a_store_has_no_floor(store: Any) -> None:
    """It is langgraph's, and its scores are those of a recall."""
    items = {item.key: item.score for item in store.search(ANN, query=NOTHING)}
    found = recalled(NOTHING, store, explain=True)

    assert len(items) == len(SAID)
    assert {memory.key: memory.score for memory in found.below_min_score} == items


@given(
    query=st.sampled_from(QUERIES),
    limit=st.integers(1, 8),
    kinds=st.sampled_from([None, ["fact"], ["thing", "turn"]]),
    namespace=st.sampled_from([ANN, [ANN, TEAM], ("memories",)]),
    least=st.sampled_from([None, 0, 0.05, 0.5, 0.9]),
)
def test_explaining_changes_nothing(store: Any, query: str, **asked: Any) -> None:
    """The same is recalled; the rest is below the floor, each text once, `limit` at most."""
    options = {"min_score": asked.pop("least"), **asked}
    plain, why = (recalled(query, store, **options, explain=explain) for explain in (False, True))
    above, below = set(texts(why.memories)), texts(why.below_min_score)

    assert (plain.memories, plain.lines) == (why.memories, why.lines)
    assert (plain.below_min_score, plain.min_score) == ([], why.min_score)
    assert all(memory.score is None or memory.score >= why.min_score for memory in why.memories)
    assert all(0 <= (memory.score or 0) < why.min_score for memory in why.below_min_score)
    assert len(below) == len(set(below)) <= asked["limit"]
    assert above.isdisjoint(below)
    assert {memory.kind for memory in why.below_min_score} <= {
        *(asked["kinds"] or ("fact", "thing", "turn"))
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
def test_an_answer_brings_no_other_memories_along(size: int) -> None:
    """Of facts without threads, the one that answers is first, and others stay below the floor."""
    others = 0
    for question, answer in FARM_QUESTIONS.items():
        right = [text for text in FARM if answer in text]
        rest = [text for text in FARM if answer not in text]
        facts = [build_fact_put(str(key), text) for key, text in enumerate([*right, *rest][:size])]
        with open_filled_store(*facts, index="offline") as store:
            found = texts(recalled(question, store, limit=10).memories)
        assert found[:1] == right
        others += len(found) - 1

    assert others <= len(FARM_QUESTIONS) // 2


def test_what_is_recalled_with_an_answer_is_recalled_without_it() -> None:
    """A memory without evidence of its own does not pass the floor because another answers."""
    lifted = 0
    for question, answer in FARM_QUESTIONS.items():
        recalls = []
        for present in (True, False):
            kept = [text for text in FARM if present or answer not in text]
            facts = [build_fact_put(str(key), text) for key, text in enumerate(kept)]
            with open_filled_store(*facts, index="offline") as store:
                recalls.append(set(texts(recalled(question, store, limit=10).memories)))
        lifted += sum(answer not in text for text in recalls[0] - recalls[1])

    assert lifted <= 2


def test_a_name_in_every_fact_is_no_evidence() -> None:
    """A question that names the person of all facts finds the fact that it is about, or none."""
    said = ("lives in Ghent", "likes figs", "plays the oboe", "has two sisters", "works by night")
    with open_filled_store(
        *(build_fact_put(text, f"Ann {text}") for text in said), index="offline"
    ) as store:
        oboe = texts(recalled("Does Ann play the oboe?", store).memories)
        flies = texts(recalled("When did Ann renew her passport?", store).memories)
        about = texts(recalled("Ann", store).memories)

    assert oboe == ["Ann plays the oboe"]
    assert flies == []
    assert len(about) == len(said)


def test_a_rare_word_of_several_facts_is_evidence() -> None:
    """A name that no list of words has is found also if two or three facts have it."""
    pets = ("Pompe is a grey cat", "Pompe sleeps in the loft", "The vet has seen Pompe twice")
    facts = [*pets, *(text for text in FARM if "Pompe" not in text)]
    with open_filled_store(
        *(build_fact_put(text, text) for text in facts), index="offline"
    ) as store:
        found = set(texts(recalled("Who is Pompe?", store).memories))

    assert found == set(pets)


def test_another_store_has_no_floor_but_a_given_one(foreign: InMemoryStore) -> None:
    """What its scores mean is not known."""
    assert texts(recalled("what", foreign).memories) == ["0.9", "0.15", "-0.1"]
    assert recalled("what", foreign).min_score == 0
    assert texts(recalled("what", foreign, min_score=0).memories) == ["0.9", "0.15", "-0.1"]
    found = recalled("what", foreign, min_score=0.5, explain=True)
    assert (texts(found.memories), texts(found.below_min_score)) == (["0.9"], ["0.15", "-0.1"])
    assert texts(recalled("what", foreign, min_score=0.5).memories) == ["0.9"]
    tool = search_memory(store=foreign, min_score=0.5)
    assert tool.invoke({"query": "what"}, AS_ANN).count('"memory"') == 1


def test_what_has_no_score_is_not_below_a_floor() -> None:
    """A store without an index scores nothing."""
    other = InMemoryStore()
    other.put(ANN, "home", {"text": "Ann lives in Ghent", "kind": "fact"})

    assert texts(recalled(NOTHING, other, min_score=0.5).memories) == ["Ann lives in Ghent"]
    assert "     -  home: Ann lives in Ghent" in recalled(NOTHING, other).explain()


def test_an_explanation_tells_scores_and_parts(store: Any) -> None:
    """What was recalled comes first, then what was not, each with the floor and why."""
    found = recalled("Where does Ann live?", store, explain=True, max_tokens=60)
    nothing = recalled(NOTHING, store, explain=True, limit=2)
    lines = found.explain().splitlines()
    home = found.memories[0]

    assert lines[0] == f"recalled, best first (minimum score {MIN_SCORE:.2f}):"
    assert lines[1] == f"  {home.score:.2f}  home: Ann lives in Ghent"
    assert all(name in lines[2] for name, part in (home.parts or {}).items() if part > 0.01)
    assert f"{found.left_out} more memories did not fit into the token budget" in lines or not (
        found.left_out
    )
    assert nothing.explain().startswith(f"nothing was recalled (minimum score {MIN_SCORE:.2f})\n")
    assert nothing.explain().splitlines()[1] == "below the minimum score, best first:"
    assert (
        nothing.describe_memories_below_min_score()
        == f"the nearest 2 memories are below the minimum score {MIN_SCORE:.2f}"
    )
    assert (
        recalled(NOTHING, store, explain=True, limit=1)
        .describe_memories_below_min_score()
        .startswith("the nearest memory")
    )
    assert (
        recalled(NOTHING, store, min_score=0, explain=True).describe_memories_below_min_score()
        == ""
    )
    assert (
        recalled("tea", store, min_score=0)
        .explain()
        .startswith("recalled, best first (no minimum score)")
    )


def test_a_long_memory_is_cut_in_an_explanation() -> None:
    """It stays on one line."""
    with open_filled_store(build_fact_put("long", "canoe\nof words " * 100)) as store:
        line = recalled("canoe", store, min_score=0).explain().splitlines()[1]

    assert line.endswith("…")
    assert len(line) < 200


@pytest.mark.parametrize(
    "wrong", ["0.3", True, float("nan"), float("inf"), pytest.param(10**400, id="huge"), [0.3]]
)
def test_a_floor_is_a_number(store: Any, wrong: Any) -> None:
    """Anything else is refused where it is given, for any store."""
    for uses in (
        lambda: recalled("tea", InMemoryStore(), min_score=wrong),
        lambda: use_memories(store, min_score=wrong),
        lambda: search_memory(store=store, min_score=wrong),
        lambda: check_recall({"tea": "drink"}, store=store, min_score=wrong),
    ):
        with pytest.raises(ConfigurationError, match=r"min_score is .*; expected a number"):
            uses()
