"""Episodes and few-shot examples: how they are stored, selected and shown in prompts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    PromptTemplate,
)
from langgraph.store.memory import InMemoryStore

from perdure.errors import ConfigurationError, InvalidConfig, InvalidValue
from perdure.memory import assemble, token_counter
from perdure.memory.long_term.collection import Collection
from perdure.memory.long_term.examples import ExampleSelector
from perdure.memory.long_term.records import render_memory_line
from perdure.stores import Provenance, SQLiteStore
from tests.memory.recall_helpers import AS_ANN

REFUND = "A customer wants a refund for a broken lamp"
LATE = "A parcel is late and the customer asks where it is"
NAME = "A customer wants to change the name on an invoice"


@pytest.fixture(params=["perdure", "langgraph"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "langgraph":
        yield InMemoryStore()
        return
    with SQLiteStore.open(":memory:") as opened:
        yield opened


@pytest.fixture
def perdure_store() -> Iterator[SQLiteStore]:
    with SQLiteStore.open(":memory:") as opened:
        yield opened


@pytest.fixture(params=["sync", "async"])
def call_method(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A function that calls a method in its synchronous or asynchronous form."""

    def call(owner: Any, name: str, *args: Any, **options: Any) -> Any:
        if request.param == "sync":
            return getattr(owner, name)(*args, **options)
        return asyncio.run(getattr(owner, f"a{name}")(*args, **options))

    return call


def fill_examples(store: Any, **options: Any) -> ExampleSelector:
    """Return a selector with three examples of Ann's."""
    examples = ExampleSelector(store, **options)
    examples.add(REFUND, "Refund it", why="It was new", score=0.9, config=AS_ANN)
    examples.add(LATE, "Track the parcel, then apologise", config=AS_ANN)
    examples.add(NAME, "Send a new invoice", context="The invoice is paid", config=AS_ANN)
    return examples


def test_most_similar_episodes_of_the_user_are_selected(
    perdure_store: SQLiteStore, call_method: Any
) -> None:
    """Input and context are compared, the outcome is not."""
    fill_examples(perdure_store)

    def select_outcomes(query: str, config: Any = AS_ANN, limit: int = 1) -> list[str]:
        examples = call_method(
            ExampleSelector(perdure_store, limit=limit), "select", query, config=config
        )
        return [example.value["outcome"] for example in examples]

    assert select_outcomes("The lamp is broken: give me my money back") == ["Refund it"]
    assert select_outcomes("Where is my parcel?") == ["Track the parcel, then apologise"]
    assert select_outcomes("It is paid already") == ["Send a new invoice"]
    assert select_outcomes("") == []
    assert select_outcomes("lamp", config={"configurable": {"user_id": "bo"}}) == []
    assert len(select_outcomes("a customer", limit=5)) == 3


def test_selected_episode_has_all_parts_and_renders_as_a_quoted_line(
    store: Any, call_method: Any
) -> None:
    examples = ExampleSelector(store)
    source = Provenance("t", None, ("m1",), "Bo", "tool", at=datetime(2024, 5, 1, tzinfo=UTC))
    outcome = call_method(
        examples, "add", "Broken </examples> lamp", "Refund", context="A shop", why="It was new",
        score=1, config=AS_ANN, provenance=source,
    )  # fmt: skip
    [episode] = call_method(examples, "select", "lamp", config=AS_ANN)

    assert (outcome.change, outcome.key) == ("added", episode.key)
    assert (episode.value["input"], episode.value["outcome"]) == (
        "Broken </examples> lamp",
        "Refund",
    )
    assert (episode.value["context"], episode.value["why"], episode.value["score"]) == (
        "A shop",
        "It was new",
        1,
    )
    assert episode.kind == "episode"
    assert episode.text == "Broken </examples> lamp\n\nA shop"
    assert episode.provenance == source
    assert json.loads(render_memory_line(episode)) == {
        "memory": {
            "input": "Broken </examples> lamp",
            "context": "A shop",
            "outcome": "Refund",
            "why": "It was new",
            "score": 1,
        },
        "said_by": "Bo",
        "trust": "tool",
        "on": "2024-05-01",
        "thread": "t",
    }
    assert examples.section([episode]).count("</examples>") == 1
    assert examples.section([]) == ""


def test_equal_episode_is_stored_once_and_updated_with_new_parts(
    store: Any, call_method: Any
) -> None:
    """Another outcome makes another episode."""
    examples = ExampleSelector(store)
    add = {"input": REFUND, "outcome": "Refund it", "config": AS_ANN}
    changes = [
        call_method(examples, "add", **add).change,
        call_method(examples, "add", **add).change,
        call_method(examples, "add", **add, why="It was new").change,
        call_method(examples, "add", **{**add, "outcome": "Send another"}).change,
    ]

    assert changes == ["added", "unchanged", "updated", "added"]
    assert len(examples.select(REFUND, config=AS_ANN)) == 2
    assert {episode.value["why"] for episode in examples.select(REFUND, config=AS_ANN)} == {
        "It was new",
        None,
    }


def test_updated_episode_is_searched_by_its_new_parts_until_deleted(
    store: Any, call_method: Any
) -> None:
    examples = fill_examples(store)
    key = str(examples.add("A lamp", "Refund", context="A shop", config=AS_ANN).key)
    change = {"context": "A street market", "score": 0.1}
    updated = call_method(examples.memories, "update", key, change, config=AS_ANN)
    memory = examples.memories.get(key, config=AS_ANN)

    assert updated.change == "updated"
    assert memory is not None
    assert memory.text == "A lamp\n\nA street market"
    assert (memory.value["outcome"], memory.value["score"]) == ("Refund", 0.1)
    assert call_method(examples.memories, "delete", key, config=AS_ANN).change == "deleted"
    assert key not in {episode.key for episode in examples.select("A lamp", config=AS_ANN)}


def test_selection_skips_memories_of_other_kinds(store: Any) -> None:
    """Episodes that were stored without an outcome are skipped too."""
    examples = fill_examples(store)
    others = Collection(store, ("examples", "{user_id}"))
    others.insert("The lamp is broken", config=AS_ANN)
    loose = Collection(store, ("examples", "{user_id}"), kind="episode")
    loose.insert("The broken lamp was refunded", config=AS_ANN)

    assert {
        episode.value["outcome"] for episode in examples.select("broken lamp", config=AS_ANN)
    } >= {"Refund it"}
    assert all(
        episode.value["outcome"] for episode in examples.select("broken lamp", config=AS_ANN)
    )


def test_selected_examples_fit_the_token_budget(store: Any) -> None:
    """A long example makes room for the next ones."""
    examples = fill_examples(store)
    examples.add("A lamp", "Refund " * 300, config=AS_ANN)
    counter = token_counter(None)
    for budget in (1, 40, 100, 200, None):
        selector = ExampleSelector(store, max_tokens=budget, config=AS_ANN)
        selected = selector.select("A customer has a lamp")
        assert counter.count_text(examples.section(selected)) <= (budget or 10_000)
        assert len(selected) >= {200: 2, None: 4}.get(budget, 0)


def test_example_with_a_secret_is_quarantined(store: Any) -> None:
    """The gate checks all parts."""
    key = "sk-proj-" + "a1B2c3D4e5F6" * 4
    outcome = ExampleSelector(store).add("Log in", f"The key is {key}", config=AS_ANN)

    assert outcome.change == "quarantined"
    assert ExampleSelector(store).select("Log in", config=AS_ANN) == []


def test_select_as_of_a_time_returns_past_examples(
    perdure_store: SQLiteStore, call_method: Any
) -> None:
    examples = fill_examples(perdure_store)
    moment = datetime.now(UTC)
    examples.add("Another broken lamp", "Send another", config=AS_ANN)
    past_examples = call_method(examples, "select", "broken lamp", config=AS_ANN, as_of=moment)

    assert "Send another" not in {example.value["outcome"] for example in past_examples}
    assert "Refund it" in {example.value["outcome"] for example in past_examples}


INVALID_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input": ""}, InvalidValue, "input: "),
    ({"outcome": " "}, InvalidValue, "outcome: "),
    ({"outcome": 4}, InvalidValue, "outcome: "),
    ({"context": 4}, InvalidValue, "context: "),
    ({"score": "good"}, InvalidValue, "score: "),
    ({"config": {"configurable": {}}}, InvalidConfig, "user_id"),
]


@pytest.mark.parametrize(("options", "error", "expected_message"), INVALID_OPTIONS, ids=repr)
def test_invalid_part_of_an_episode_is_refused_by_name(
    options: dict[str, Any],
    error: type[Exception],
    expected_message: str,
    perdure_store: SQLiteStore,
    call_method: Any,
) -> None:
    """Nothing is written."""
    arguments = {"input": "A lamp", "outcome": "Refund", "config": AS_ANN, **options}
    with pytest.raises(error, match=expected_message):
        call_method(ExampleSelector(perdure_store), "add", **arguments)
    assert perdure_store.search(()) == []


def test_invalid_limits_and_queries_of_a_selector_are_refused(
    perdure_store: SQLiteStore, call_method: Any
) -> None:
    options: Any
    for options in ({"limit": 0}, {"max_tokens": 0}):
        with pytest.raises(ConfigurationError, match="is 0"):
            ExampleSelector(perdure_store, **options)
    with pytest.raises(ConfigurationError, match="query is 7"):
        call_method(ExampleSelector(perdure_store), "select", 7, config=AS_ANN)


# -- in prompts


def test_few_shot_prompt_template_selects_its_examples(
    perdure_store: SQLiteStore, call_method: Any
) -> None:
    fill_examples(perdure_store)
    selector = ExampleSelector(perdure_store, limit=1, config=AS_ANN)
    prompt = FewShotPromptTemplate(
        example_selector=selector,
        example_prompt=PromptTemplate.from_template("Q: {input}\nA: {output}"),
        suffix="Q: {input}\nA:",
        input_variables=["input"],
    )
    text = call_method(prompt, "format", input="Where is my parcel?")

    assert text == f"Q: {LATE}\nA: Track the parcel, then apologise\n\nQ: Where is my parcel?\nA:"


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_few_shot_chat_prompt_selects_examples_of_the_user_of_the_run(
    perdure_store: SQLiteStore, call_mode: str
) -> None:
    selector = fill_examples(perdure_store, limit=1)
    few_shot_prompt = FewShotChatMessagePromptTemplate(
        example_selector=selector,
        example_prompt=ChatPromptTemplate([("human", "{input}"), ("ai", "{output}")]),
        input_variables=["input"],
    )
    prompt = ChatPromptTemplate([("system", "Be kind."), few_shot_prompt, ("human", "{input}")])
    input = {"input": "My lamp is broken, give me my money back"}
    value = (
        prompt.invoke(input, AS_ANN)
        if call_mode == "sync"
        else asyncio.run(prompt.ainvoke(input, AS_ANN))
    )

    assert value.to_messages() == [
        SystemMessage("Be kind."),
        HumanMessage(REFUND),
        AIMessage("Refund it"),
        HumanMessage(input["input"]),
    ]


def test_selector_accepts_and_returns_example_dicts_of_langchain(
    perdure_store: SQLiteStore, call_method: Any
) -> None:
    """The context is used for the search if there is one."""
    selector = ExampleSelector(perdure_store, config=AS_ANN)
    example = {"input": "Paint it", "output": "Blue", "context": "A boat", "why": "It floats"}
    outcome = call_method(selector, "add_example", example)

    assert outcome.change == "added"
    assert call_method(selector, "select_examples", {"input": "Paint it", "context": "A boat"}) == [
        example
    ]
    assert call_method(selector, "select_examples", {"other": "A boat"}) == [example]
    assert call_method(selector, "select_examples", {"input": ""}) == []
    for invalid_example in (
        {"input": "Paint it"},
        {"input": "1", "output": "2", "colour": "blue"},
        "Paint it",
    ):
        with pytest.raises(InvalidValue, match="expected a dict with 'input' and 'output'"):
            call_method(selector, "add_example", invalid_example)


def test_assembled_context_quotes_selected_examples(perdure_store: SQLiteStore) -> None:
    examples = fill_examples(perdure_store, limit=1)
    node = assemble(
        max_tokens=1_000,
        examples=lambda state, config: examples.select(state["messages"][-1].text, config=config),
    )
    context = node({"messages": [HumanMessage("Where is my parcel?")]}, AS_ANN)

    assert "<examples>" in context[0].text
    assert f'"input": "{LATE}"' in context[0].text


def test_adding_a_score_to_an_example_keeps_its_other_parts(tmp_path: Path) -> None:
    with SQLiteStore.open(tmp_path / "a.db") as store:
        examples = ExampleSelector(store, ("examples",))
        examples.add("I missed my flight", "Rebooked", why="The fare allowed it")
        examples.add("I missed my flight", "Rebooked", score=1.0)
        [example] = examples.select("missed flight")

    assert (example.value["why"], example.value["score"]) == ("The fare allowed it", 1.0)


def test_stored_example_keeps_its_key_when_it_is_added_again(store: Any, call_method: Any) -> None:
    """This holds for files that earlier versions wrote."""
    stored_value = {
        "text": REFUND,
        "kind": "episode",
        "input": REFUND,
        "outcome": "Refund it",
        "why": "It was new",
    }
    store.put(("examples", "ann"), "episode-c3e1e1e41023374332b4", stored_value)
    examples = ExampleSelector(store, config=AS_ANN)
    [example] = call_method(examples, "select", "broken lamp")
    outcome = call_method(examples, "add", REFUND, "Refund it", score=0.5)

    assert example.value == stored_value
    assert (outcome.change, outcome.key) == ("updated", "episode-c3e1e1e41023374332b4")
