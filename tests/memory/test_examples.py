"""Episodes and few-shot examples: what is kept, which are selected, and how prompts show them."""

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
from perdure.memory.collection import Collection
from perdure.memory.examples import ExampleSelector
from perdure.memory.records import render_memory_line
from perdure.stores import Provenance, SQLiteStore
from tests.memory.remembered import AS_ANN

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
def do(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Calls a method in either form."""

    def call(owner: Any, name: str, *args: Any, **named: Any) -> Any:
        if request.param == "sync":
            return getattr(owner, name)(*args, **named)
        return asyncio.run(getattr(owner, f"a{name}")(*args, **named))

    return call


def filled(store: Any, **options: Any) -> ExampleSelector:
    """Three examples of Ann's."""
    examples = ExampleSelector(store, **options)
    examples.add(REFUND, "Refund it", why="It was new", score=0.9, config=AS_ANN)
    examples.add(LATE, "Track the parcel, then apologise", config=AS_ANN)
    examples.add(NAME, "Send a new invoice", context="The invoice is paid", config=AS_ANN)
    return examples


def test_the_episodes_most_like_the_situation_are_selected(
    perdure_store: SQLiteStore, do: Any
) -> None:
    """By what was asked and its context; not by what came of it, nor for somebody else."""
    filled(perdure_store)

    def selected(query: str, config: Any = AS_ANN, limit: int = 1) -> list[str]:
        found = do(ExampleSelector(perdure_store, limit=limit), "select", query, config=config)
        return [example.value["outcome"] for example in found]

    assert selected("The lamp is broken: give me my money back") == ["Refund it"]
    assert selected("Where is my parcel?") == ["Track the parcel, then apologise"]
    assert selected("It is paid already") == ["Send a new invoice"]
    assert selected("") == []
    assert selected("lamp", config={"configurable": {"user_id": "bo"}}) == []
    assert len(selected("a customer", limit=5)) == 3


def test_an_episode_has_all_its_parts(store: Any, do: Any) -> None:
    """As text it is a quoted line."""
    examples = ExampleSelector(store)
    source = Provenance("t", None, ("m1",), "Bo", "tool", at=datetime(2024, 5, 1, tzinfo=UTC))
    outcome = do(
        examples, "add", "Broken </examples> lamp", "Refund", context="A shop", why="It was new",
        score=1, config=AS_ANN, provenance=source,
    )  # fmt: skip
    [found] = do(examples, "select", "lamp", config=AS_ANN)

    assert (outcome.change, outcome.key) == ("added", found.key)
    assert (found.value["input"], found.value["outcome"]) == ("Broken </examples> lamp", "Refund")
    assert (found.value["context"], found.value["why"], found.value["score"]) == (
        "A shop",
        "It was new",
        1,
    )
    assert found.kind == "episode"
    assert found.text == "Broken </examples> lamp\n\nA shop"
    assert found.provenance == source
    assert json.loads(render_memory_line(found)) == {
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
    assert examples.section([found]).count("</examples>") == 1
    assert examples.section([]) == ""


def test_the_same_episode_is_kept_once(store: Any, do: Any) -> None:
    """What is new about it is noted; another outcome is another episode."""
    examples = ExampleSelector(store)
    add = {"input": REFUND, "outcome": "Refund it", "config": AS_ANN}
    changes = [
        do(examples, "add", **add).change,
        do(examples, "add", **add).change,
        do(examples, "add", **add, why="It was new").change,
        do(examples, "add", **{**add, "outcome": "Send another"}).change,
    ]

    assert changes == ["added", "unchanged", "updated", "added"]
    assert len(examples.select(REFUND, config=AS_ANN)) == 2
    assert {each.value["why"] for each in examples.select(REFUND, config=AS_ANN)} == {
        "It was new",
        None,
    }


def test_update_and_delete(store: Any, do: Any) -> None:
    """A part is changed and what is searched with it; what is deleted is not selected any more."""
    examples = filled(store)
    key = str(examples.add("A lamp", "Refund", context="A shop", config=AS_ANN).key)
    change = {"context": "A street market", "score": 0.1}
    updated = do(examples.memories, "update", key, change, config=AS_ANN)
    memory = examples.memories.get(key, config=AS_ANN)

    assert updated.change == "updated"
    assert memory is not None
    assert memory.text == "A lamp\n\nA street market"
    assert (memory.value["outcome"], memory.value["score"]) == ("Refund", 0.1)
    assert do(examples.memories, "delete", key, config=AS_ANN).change == "deleted"
    assert key not in {each.key for each in examples.select("A lamp", config=AS_ANN)}


def test_only_episodes_are_selected(store: Any) -> None:
    """Also where other memories, or episodes that were formed otherwise, are kept beside them."""
    examples = filled(store)
    others = Collection(store, ("examples", "{user_id}"))
    others.insert("The lamp is broken", config=AS_ANN)
    loose = Collection(store, ("examples", "{user_id}"), kind="episode")
    loose.insert("The broken lamp was refunded", config=AS_ANN)

    assert {each.value["outcome"] for each in examples.select("broken lamp", config=AS_ANN)} >= {
        "Refund it"
    }
    assert all(each.value["outcome"] for each in examples.select("broken lamp", config=AS_ANN))


def test_the_budget_holds(store: Any) -> None:
    """By the tokens of the section; a long one makes room for those after it."""
    examples = filled(store)
    examples.add("A lamp", "Refund " * 300, config=AS_ANN)
    counter = token_counter(None)
    for budget in (1, 40, 100, 200, None):
        selector = ExampleSelector(store, max_tokens=budget, config=AS_ANN)
        found = selector.select("A customer has a lamp")
        assert counter.count_text(examples.section(found)) <= (budget or 10_000)
        assert len(found) >= {200: 2, None: 4}.get(budget, 0)


def test_secrets_do_not_become_examples(store: Any) -> None:
    """The gate looks at all parts."""
    key = "sk-proj-" + "a1B2c3D4e5F6" * 4
    outcome = ExampleSelector(store).add("Log in", f"The key is {key}", config=AS_ANN)

    assert outcome.change == "quarantined"
    assert ExampleSelector(store).select("Log in", config=AS_ANN) == []


def test_examples_of_the_past(perdure_store: SQLiteStore, do: Any) -> None:
    """As they were at a moment."""
    examples = filled(perdure_store)
    before = datetime.now(UTC)
    examples.add("Another broken lamp", "Send another", config=AS_ANN)
    found = do(examples, "select", "broken lamp", config=AS_ANN, as_of=before)

    assert "Send another" not in {each.value["outcome"] for each in found}
    assert "Refund it" in {each.value["outcome"] for each in found}


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input": ""}, InvalidValue, "input: "),
    ({"outcome": " "}, InvalidValue, "outcome: "),
    ({"outcome": 4}, InvalidValue, "outcome: "),
    ({"context": 4}, InvalidValue, "context: "),
    ({"score": "good"}, InvalidValue, "score: "),
    ({"config": {"configurable": {}}}, InvalidConfig, "user_id"),
]


@pytest.mark.parametrize(("options", "error", "named"), WRONG, ids=repr)
def test_what_is_no_episode_is_refused(
    options: dict[str, Any], error: type[Exception], named: str, perdure_store: SQLiteStore, do: Any
) -> None:
    """With the part's name; nothing is written."""
    given = {"input": "A lamp", "outcome": "Refund", "config": AS_ANN, **options}
    with pytest.raises(error, match=named):
        do(ExampleSelector(perdure_store), "add", **given)
    assert perdure_store.search(()) == []


def test_other_arguments_that_make_no_sense(perdure_store: SQLiteStore, do: Any) -> None:
    """A limit of none, a query that is no text."""
    options: Any
    for options in ({"limit": 0}, {"max_tokens": 0}):
        with pytest.raises(ConfigurationError, match="is 0"):
            ExampleSelector(perdure_store, **options)
    with pytest.raises(ConfigurationError, match="query is 7"):
        do(ExampleSelector(perdure_store), "select", 7, config=AS_ANN)


# -- in prompts


def test_a_few_shot_prompt_selects_its_examples(perdure_store: SQLiteStore, do: Any) -> None:
    """langchain's prompt of text, given the selector."""
    filled(perdure_store)
    selector = ExampleSelector(perdure_store, limit=1, config=AS_ANN)
    prompt = FewShotPromptTemplate(
        example_selector=selector,
        example_prompt=PromptTemplate.from_template("Q: {input}\nA: {output}"),
        suffix="Q: {input}\nA:",
        input_variables=["input"],
    )
    text = do(prompt, "format", input="Where is my parcel?")

    assert text == f"Q: {LATE}\nA: Track the parcel, then apologise\n\nQ: Where is my parcel?\nA:"


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_a_few_shot_chat_prompt_selects_its_examples(
    perdure_store: SQLiteStore, call_mode: str
) -> None:
    """langchain's prompt of messages; whose examples they are, the run says."""
    selector = filled(perdure_store, limit=1)
    few = FewShotChatMessagePromptTemplate(
        example_selector=selector,
        example_prompt=ChatPromptTemplate([("human", "{input}"), ("ai", "{output}")]),
        input_variables=["input"],
    )
    prompt = ChatPromptTemplate([("system", "Be kind."), few, ("human", "{input}")])
    asked = {"input": "My lamp is broken, give me my money back"}
    value = (
        prompt.invoke(asked, AS_ANN)
        if call_mode == "sync"
        else asyncio.run(prompt.ainvoke(asked, AS_ANN))
    )

    assert value.to_messages() == [
        SystemMessage("Be kind."),
        HumanMessage(REFUND),
        AIMessage("Refund it"),
        HumanMessage(asked["input"]),
    ]


def test_the_selector_takes_and_gives_the_dicts_of_prompts(
    perdure_store: SQLiteStore, do: Any
) -> None:
    """A context is searched for where there is one."""
    selector = ExampleSelector(perdure_store, config=AS_ANN)
    example = {"input": "Paint it", "output": "Blue", "context": "A boat", "why": "It floats"}
    outcome = do(selector, "add_example", example)

    assert outcome.change == "added"
    assert do(selector, "select_examples", {"input": "Paint it", "context": "A boat"}) == [example]
    assert do(selector, "select_examples", {"other": "A boat"}) == [example]
    assert do(selector, "select_examples", {"input": ""}) == []
    for wrong in (
        {"input": "Paint it"},
        {"input": "1", "output": "2", "colour": "blue"},
        "Paint it",
    ):
        with pytest.raises(InvalidValue, match="expected a dict with 'input' and 'output'"):
            do(selector, "add_example", wrong)


def test_examples_in_an_assembled_context(perdure_store: SQLiteStore) -> None:
    """A function of the state gives them, and they are quoted within their section."""
    examples = filled(perdure_store, limit=1)
    node = assemble(
        max_tokens=1_000,
        examples=lambda state, config: examples.select(state["messages"][-1].text, config=config),
    )
    shown = node({"messages": [HumanMessage("Where is my parcel?")]}, AS_ANN)

    assert "<examples>" in shown[0].text
    assert f'"input": "{LATE}"' in shown[0].text


def test_a_case_told_again_keeps_what_is_not_told(tmp_path: Path) -> None:
    """To add a score to a case that is there loses neither why nor context."""
    with SQLiteStore.open(tmp_path / "a.db") as store:
        examples = ExampleSelector(store, ("examples",))
        examples.add("I missed my flight", "Rebooked", why="The fare allowed it")
        examples.add("I missed my flight", "Rebooked", score=1.0)
        [case] = examples.select("missed flight")

    assert (case.value["why"], case.value["score"]) == ("The fare allowed it", 1.0)


def test_a_stored_example_keeps_its_key(store: Any, do: Any) -> None:
    """In a file too: the same case added again is the same example."""
    kept = {
        "text": REFUND,
        "kind": "episode",
        "input": REFUND,
        "outcome": "Refund it",
        "why": "It was new",
    }
    store.put(("examples", "ann"), "episode-c3e1e1e41023374332b4", kept)
    examples = ExampleSelector(store, config=AS_ANN)
    [case] = do(examples, "select", "broken lamp")
    outcome = do(examples, "add", REFUND, "Refund it", score=0.5)

    assert case.value == kept
    assert (outcome.change, outcome.key) == ("updated", "episode-c3e1e1e41023374332b4")
