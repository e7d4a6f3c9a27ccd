"""Instructions: versions by hand, read by runs, put in front of what the model is shown."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.store.memory import InMemoryStore

from perdure.errors import ConfigurationError, InvalidConfig, InvalidMessages, InvalidNamespace
from perdure.memory.instructions import Instructions, InstructionsVersion, use_instructions
from perdure.memory.nodes import view
from perdure.memory.reducers import ChatState
from perdure.memory.summary import HEADING, Summary
from perdure.memory.trim import trim
from perdure.stores import SQLiteStore
from tests.memory.conversations import conversations, find_newest_question
from tests.memory.providers import awaits_answer, find_refusals
from tests.memory.summaries import present_messages
from tests.user_names import has_letter_or_digit

PER_USER = ("instructions", "{user_id}")
ASK = HumanMessage("hello", id="h")


def run_of(**configurable: Any) -> Any:
    return {"configurable": configurable}


@pytest.fixture
def store() -> Iterator[SQLiteStore]:
    with SQLiteStore.open(":memory:", index=None) as opened:
        yield opened


def texts(versions: list[InstructionsVersion]) -> list[str]:
    return [version.text for version in versions]


# -- versions


def test_the_default_holds_until_something_is_set(store: SQLiteStore) -> None:
    """Reading writes nothing."""
    instructions = Instructions(store, default="Be brief.")

    assert instructions.current() == InstructionsVersion("Be brief.", version=0)
    assert instructions.history() == []
    assert store.list_namespaces() == []


def test_versions_have_their_text_diff_time_and_thread(store: SQLiteStore) -> None:
    """Who looks at the history sees what changed, when, and which thread caused it."""
    instructions = Instructions(store, default="Be kind.")
    first = instructions.set("Be kind.\nBe brief.", run_of(thread_id="one"))
    second = instructions.set("Be very kind.\nBe brief.", run_of(thread_id="two"))

    assert first.valid_to is None
    assert [first.version, second.version] == [1, 2]
    assert instructions.current() == second
    old, new = instructions.history()
    assert (old.thread_id, new.thread_id) == ("one", "two")
    assert old.diff == "@@ -1 +1,2 @@\n Be kind.\n+Be brief."
    assert new.diff == "@@ -1,2 +1,2 @@\n-Be kind.\n+Be very kind.\n Be brief."
    assert old.valid_to == new.valid_from
    assert (old.change, new) == ("set", second)


def test_the_same_text_is_not_written_again(store: SQLiteStore) -> None:
    instructions = Instructions(store)
    first = instructions.set("Be brief.")

    assert instructions.set("Be brief.") == first
    assert instructions.set("Be brief.") == instructions.history()[0]
    assert Instructions(store, key="other").set("You are a helpful assistant.").version == 0


def test_a_rollback_is_a_new_version_and_destroys_nothing(store: SQLiteStore) -> None:
    """Also to the default, which is version 0; and rolling back twice changes nothing."""
    instructions = Instructions(store, default="zero")
    for text in ("one", "two"):
        instructions.set(text)

    back = instructions.rollback(1, run_of(thread_id="t"))

    assert (back.text, back.version, back.change, back.thread_id) == ("one", 3, "rollback", "t")
    assert instructions.rollback(3) == instructions.rollback(1) == back
    assert instructions.rollback(0).text == "zero"
    assert texts(instructions.history()) == ["one", "two", "one", "zero"]


@pytest.mark.parametrize("version", [3, -1, "1", True, None])
def test_a_rollback_to_no_version_is_refused(store: SQLiteStore, version: Any) -> None:
    instructions = Instructions(store)
    instructions.set("one")
    instructions.set("two")

    with pytest.raises(
        ConfigurationError, match=r"version is .*; expected (one of '0', '1', '2'|a whole)"
    ):
        instructions.rollback(version)
    assert instructions.current().version == 2


def test_after_a_delete_the_default_holds_and_versions_go_on(store: SQLiteStore) -> None:
    instructions = Instructions(store, default="zero")
    instructions.set("one")
    store.delete(("instructions",), "agent")

    assert instructions.current() == InstructionsVersion("zero")
    assert instructions.set("two").version == 2
    assert instructions.rollback(1).version == 3


def test_instructions_do_not_expire_and_are_found_by_what_they_say() -> None:
    """They stay whatever the store's default is; what changed in them is not searched."""
    with SQLiteStore.open(":memory:", ttl={"default_ttl": 1e-9}) as store:
        instructions = Instructions(store)
        instructions.set("Answer in prose.")
        instructions.set("Answer in verse.")

        assert instructions.current().text == "Answer in verse."
        assert [found.key for found in store.search((), query="verse", mode="text")] == ["agent"]
        assert store.why_not(("instructions",), "agent", query="prose", mode="text").rank is None
        item = store.get(("instructions",), "agent")
        assert item is not None
        assert item.expires_at is None


def test_the_async_methods_do_the_same(store: SQLiteStore) -> None:
    instructions = Instructions(store)

    async def use() -> list[Any]:
        return [
            await instructions.aset("one"),
            await instructions.aset("two"),
            await instructions.arollback(1),
            await instructions.acurrent(),
            await instructions.ahistory(),
        ]

    one, two, back, current, history = asyncio.run(use())
    assert history == instructions.history()
    assert texts(history) == ["one", "two", "one"]
    assert current == back == instructions.current()
    assert (one.version, two.version, back.version) == (1, 2, 3)


def test_no_writer_is_lost_among_threads(tmp_path: Path) -> None:
    """Eight write at once: each has its own version, each diff is against the version before."""
    with SQLiteStore.open(tmp_path / "s.db", index=None) as store:
        instructions = Instructions(store, default="0")
        ready = threading.Barrier(8)

        def write(number: int) -> None:
            ready.wait()
            instructions.set(f"from {number}")

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        history = instructions.history()
    assert sorted(texts(history)) == [f"from {number}" for number in range(8)]
    previous_texts = ["0", *texts(history)]
    for previous, version in zip(previous_texts, history, strict=False):
        assert f"-{previous}\n+{version.text}" in version.diff


# -- where


@given(st.lists(st.text(min_size=1, max_size=20), min_size=2, max_size=5, unique=True))
def test_users_never_mix(users: list[str]) -> None:
    """Whatever characters their ids have: each reads what was set for it, or is refused."""
    with SQLiteStore.open(":memory:", index=None) as store:
        instructions = Instructions(store, PER_USER, default="nobody's")
        told: dict[str, str] = {}
        for user in users:
            try:
                instructions.set(f"{len(told)}", run_of(user_id=user))
                told[user] = f"{len(told)}"
            except (InvalidConfig, InvalidNamespace):
                has_surrogate = any("\ud800" <= char <= "\udfff" for char in user)
                assert has_surrogate or "\0" in user or not has_letter_or_digit(user)

        for user, text in told.items():
            assert instructions.current(run_of(user_id=user)).text == text
            assert len(instructions.history(run_of(user_id=user))) == 1


@pytest.mark.parametrize("user", [None, "", 3])
def test_a_run_without_a_user_is_refused(store: SQLiteStore, user: Any) -> None:
    """By every method, and nothing is written."""
    instructions = Instructions(store, PER_USER)
    for config in (run_of(user_id=user), run_of(), None):
        with pytest.raises(InvalidConfig):
            instructions.current(config)
        with pytest.raises(InvalidConfig):
            instructions.set("x", config)
        with pytest.raises(InvalidConfig):
            instructions.rollback(0, config)
        with pytest.raises(InvalidConfig):
            use_instructions(instructions).invoke({"messages": [ASK]}, config)

    assert store.list_namespaces() == []


def test_the_key_is_a_template_too(store: SQLiteStore) -> None:
    instructions = Instructions(store, key="{agent}")
    instructions.set("for a", run_of(agent="a"))

    assert instructions.current(run_of(agent="a")).text == "for a"
    assert instructions.current(run_of(agent="b")).version == 0


def test_a_scope_of_a_store_serves_as_well(store: SQLiteStore) -> None:
    instructions = Instructions(store.scoped(("tenant",)))

    assert instructions.set("Be brief.").version == 1
    assert store.list_namespaces() == [("tenant", "instructions")]


@pytest.mark.parametrize(
    "arguments",
    [
        {"store": InMemoryStore()},
        {"store": "memory.db"},
        {"namespace": ()},
        {"namespace": ("{}",)},
        {"key": ""},
        {"key": "{a}{b}"},
        {"default": ""},
        {"default": " \n"},
        {"default": None},
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(arguments: dict[str, Any]) -> None:
    """A store without versions too: there, two runs would lose each other's change."""
    with pytest.raises(ConfigurationError):
        Instructions(**arguments)


@pytest.mark.parametrize("text", ["", " \n\t", None, 3])
def test_a_text_that_says_nothing_is_refused(store: SQLiteStore, text: Any) -> None:
    with pytest.raises(ConfigurationError, match="text"):
        Instructions(store).set(text)
    assert store.list_namespaces() == []


def test_an_item_of_somebody_else_is_not_taken_for_instructions(store: SQLiteStore) -> None:
    store.put(("instructions",), "agent", {"text": "a note"})

    with pytest.raises(ConfigurationError, match="pass another key or namespace"):
        Instructions(store).current()


def test_what_langgraphs_example_stores_is_read(store: SQLiteStore) -> None:
    """Its concepts of memory put the text under `instructions`."""
    store.put(("agent_instructions",), "agent_a", {"instructions": "Tweet."})

    assert Instructions(store, ("agent_instructions",), "agent_a").current().text == "Tweet."


# -- using them


def shown(state: Any) -> list[tuple[str, Any]]:
    return [(message.type, message.content) for message in state["llm_input_messages"]]


def graph_of(*nodes: tuple[str, Any], **compiled: Any) -> Any:
    builder = StateGraph(ChatState)
    names = [START, *(name for name, _ in nodes), END]
    for name, node in nodes:
        builder.add_node(name, node)
    for one, other in itertools.pairwise(names):
        builder.add_edge(one, other)
    return builder.compile(**compiled)


def test_as_a_node_with_the_graphs_store(store: SQLiteStore) -> None:
    """The store is the graph's, the user the run's; the state keeps what it had. Sync, async."""
    instructions = Instructions(namespace=PER_USER)
    Instructions(store, PER_USER).set("Call her Ann.", run_of(user_id="ann"))
    graph = graph_of(("use", use_instructions(instructions)), store=store)

    for user, text in (("ann", "Call her Ann."), ("bo", "You are a helpful assistant.")):
        out = graph.invoke({"messages": [ASK]}, run_of(user_id=user))
        assert shown(out) == [("system", text), ("human", "hello")]
        assert out["messages"] == [ASK]
        assert asyncio.run(graph.ainvoke({"messages": [ASK]}, run_of(user_id=user))) == out


def test_a_function_node_needs_no_config(store: SQLiteStore) -> None:
    """Within a run, `current()` finds its store and its user."""
    instructions = Instructions(namespace=PER_USER)
    Instructions(store, PER_USER).set("Call her Ann.", run_of(user_id="ann"))
    found: list[str] = []

    def node(state: Any) -> dict[str, Any]:
        found.append(instructions.current().text)
        return {}

    graph_of(("node", node), store=store).invoke({"messages": [ASK]}, run_of(user_id="ann"))
    assert found == ["Call her Ann."]


@pytest.mark.parametrize("nested", [False, True])
def test_a_version_names_the_checkpoint_of_its_run(store: SQLiteStore, nested: bool) -> None:
    """The one that the node began with; another thread's config names none of this run's."""
    instructions = Instructions(store)
    saver = InMemorySaver()
    made: list[InstructionsVersion] = []

    def node(state: Any) -> dict[str, Any]:
        made.append(instructions.set(f"Be kind {len(made)}."))
        made.append(instructions.set(f"Be kind {len(made)}.", run_of(thread_id="other")))
        return {}

    inner: Any = graph_of(("node", node)) if nested else node
    graph = graph_of(("node", inner), checkpointer=saver)
    for _ in range(2):
        graph.invoke({"messages": [ASK]}, run_of(thread_id="t"))
    saved = {
        tup.config["configurable"]["checkpoint_id"] for tup in saver.list(run_of(thread_id="t"))
    }

    assert [version.thread_id for version in made] == ["t", "other"] * 2
    mine, other = made[::2], made[1::2]
    assert len({version.checkpoint_id for version in mine}) == 2
    assert {version.checkpoint_id for version in mine} <= saved
    assert [version.checkpoint_id for version in other] == [None, None]


def test_a_chain_outside_a_graph_names_its_thread(store: SQLiteStore) -> None:
    """And the checkpoint that its config names."""
    instructions = Instructions(store)
    chain: Any = RunnableLambda(lambda text: instructions.set(text))
    made = chain.invoke("Be kind.", run_of(thread_id="t", checkpoint_id="c"))
    assert (made.thread_id, made.checkpoint_id) == ("t", "c")
    assert chain.invoke("Be brief.").thread_id is None


def test_without_a_store_there_is_a_named_error() -> None:
    """Outside a graph, in a graph without one, and in a graph whose store keeps no versions."""
    instructions = Instructions()
    node = use_instructions(instructions)

    with pytest.raises(ConfigurationError, match="pass store="):
        instructions.current()
    with pytest.raises(ConfigurationError, match="pass store="):
        graph_of(("use", node)).invoke({"messages": [ASK]})
    with pytest.raises(ConfigurationError, match="expected a store that keeps versions"):
        graph_of(("use", node), store=InMemoryStore()).invoke({"messages": [ASK]})


def test_one_system_message_an_equal_one_stays_a_different_one_goes(store: SQLiteStore) -> None:
    """And what is shown a second time is the same."""
    node = use_instructions(Instructions(store, default="Be brief."))
    equal, other = SystemMessage("Be brief.", id="s"), SystemMessage("Be long.", id="o")

    assert node([other, ASK, equal]) == [equal, ASK]
    assert node([ASK, other]) == [SystemMessage("Be brief."), ASK]
    assert node(node([other, ASK])) == node([ASK])
    assert node.invoke([other, ASK]) == asyncio.run(node.ainvoke([other, ASK])) == node([ASK])


def test_the_summary_in_a_view_stays(store: SQLiteStore) -> None:
    """Whichever node comes first."""
    node = use_instructions(Instructions(store, default="Be brief."))
    summary = Summary(text="Ann came.", last="h0", count=3)

    there = node(present_messages([SystemMessage("Old."), ASK], summary))

    assert there == present_messages([SystemMessage("Be brief."), ASK], summary)
    assert HEADING in "".join(str(message.content) for message in there)
    assert node(there) == there


def test_in_a_view_the_budget_counts_the_instructions(store: SQLiteStore) -> None:
    """With the part that cuts behind them; sync and async, as a node of a graph."""
    node = view(
        use_instructions(Instructions(store, default="Be brief.")),
        trim(max_tokens=3, token_counter=len),
    )
    said = [HumanMessage(text, id=text) for text in ("one", "two", "three")]
    graph = graph_of(("show", node))

    out = graph.invoke({"messages": said})

    assert shown(out) == [("system", "Be brief."), ("human", "two"), ("human", "three")]
    assert asyncio.run(graph.ainvoke({"messages": said})) == out


@given(conversations())
def test_what_is_shown_is_valid_and_the_instructions_are_in_front(talk: list[Any]) -> None:
    """For any conversation, the newest human message included; a second time nothing changes."""
    with SQLiteStore.open(":memory:", index=None) as store:
        node = use_instructions(Instructions(store, default="Be brief."))
        state = {"messages": talk}

        out = node.invoke(state)["llm_input_messages"]

        assert out[0].text == "Be brief."
        assert find_refusals(out, to_answer=awaits_answer(talk)) == []
        newest = find_newest_question(talk)
        assert newest is None or newest in out
        assert node.invoke({**state, "llm_input_messages": out})["llm_input_messages"] == out
        assert asyncio.run(node.ainvoke(state)) == node.invoke(state)


def test_bad_input_is_refused(store: SQLiteStore) -> None:
    node = use_instructions(Instructions(store))

    for state in ({}, {"messages": "hi"}, {"messages": ["hi"]}, ["hi"]):
        with pytest.raises(InvalidMessages):
            node.invoke(state)
    with pytest.raises(ConfigurationError, match="Instructions"):
        use_instructions(store)  # type: ignore[arg-type]


def test_instructions_as_they_were(store: SQLiteStore) -> None:
    """A run that is to remember as of a moment is given what held then; before all, the default."""
    instructions = Instructions(store, default="Answer.")
    before = datetime.now(UTC)
    first = instructions.set("Answer in verse.")
    instructions.set("Answer in prose.")
    shown = use_instructions(instructions, as_of="as_of")

    def told(moment: Any) -> str:
        config: Any = {"configurable": {"as_of": moment} if moment else {}}
        return shown([HumanMessage("hi")], config)[0].text

    assert first.valid_from is not None
    assert told(first.valid_from.isoformat()) == "Answer in verse."
    assert [told(before), told(None)] == ["Answer.", "Answer in prose."]
    with pytest.raises(InvalidConfig, match="as_of"):
        told("yesterday")
