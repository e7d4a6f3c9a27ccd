"""Instructions: versions written by hand, read by runs, shown in front of the messages."""

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
from perdure.memory.long_term.instructions import (
    Instructions,
    InstructionsVersion,
    use_instructions,
)
from perdure.memory.nodes import view
from perdure.memory.short_term.reducers import ChatState
from perdure.memory.short_term.summary import HEADING, Summary
from perdure.memory.short_term.trim import trim
from perdure.stores import SQLiteStore
from tests.memory.conversations import conversations, find_newest_question
from tests.memory.provider_rules import awaits_answer, find_refusals
from tests.memory.summaries import present_messages
from tests.user_names import has_letter_or_digit

PER_USER = ("instructions", "{user_id}")
ASK = HumanMessage("hello", id="h")


def make_config(**configurable: Any) -> Any:
    return {"configurable": configurable}


@pytest.fixture
def store() -> Iterator[SQLiteStore]:
    with SQLiteStore.open(":memory:", index=None) as opened:
        yield opened


def list_texts(versions: list[InstructionsVersion]) -> list[str]:
    return [version.text for version in versions]


# -- versions


def test_default_is_current_until_instructions_are_set(store: SQLiteStore) -> None:
    """Reading writes nothing."""
    instructions = Instructions(store, default="Be brief.")

    assert instructions.current() == InstructionsVersion("Be brief.", version=0)
    assert instructions.history() == []
    assert store.list_namespaces() == []


def test_history_has_text_diff_time_and_thread_of_each_version(store: SQLiteStore) -> None:
    instructions = Instructions(store, default="Be kind.")
    first = instructions.set("Be kind.\nBe brief.", make_config(thread_id="one"))
    second = instructions.set("Be very kind.\nBe brief.", make_config(thread_id="two"))

    assert first.valid_to is None
    assert [first.version, second.version] == [1, 2]
    assert instructions.current() == second
    old, new = instructions.history()
    assert (old.thread_id, new.thread_id) == ("one", "two")
    assert old.diff == "@@ -1 +1,2 @@\n Be kind.\n+Be brief."
    assert new.diff == "@@ -1,2 +1,2 @@\n-Be kind.\n+Be very kind.\n Be brief."
    assert old.valid_to == new.valid_from
    assert (old.change, new) == ("set", second)


def test_setting_the_current_text_again_writes_nothing(store: SQLiteStore) -> None:
    instructions = Instructions(store)
    first = instructions.set("Be brief.")

    assert instructions.set("Be brief.") == first
    assert instructions.set("Be brief.") == instructions.history()[0]
    assert Instructions(store, key="other").set("You are a helpful assistant.").version == 0


def test_rollback_adds_a_version_and_keeps_the_others(store: SQLiteStore) -> None:
    """The default is version 0. A second rollback to the same text changes nothing."""
    instructions = Instructions(store, default="zero")
    for text in ("one", "two"):
        instructions.set(text)

    back = instructions.rollback(1, make_config(thread_id="t"))

    assert (back.text, back.version, back.change, back.thread_id) == ("one", 3, "rollback", "t")
    assert instructions.rollback(3) == instructions.rollback(1) == back
    assert instructions.rollback(0).text == "zero"
    assert list_texts(instructions.history()) == ["one", "two", "one", "zero"]


@pytest.mark.parametrize("version", [3, -1, "1", True, None])
def test_rollback_to_an_unknown_version_is_refused(store: SQLiteStore, version: Any) -> None:
    instructions = Instructions(store)
    instructions.set("one")
    instructions.set("two")

    with pytest.raises(
        ConfigurationError, match=r"version is .*; expected (one of '0', '1', '2'|an integer)"
    ):
        instructions.rollback(version)
    assert instructions.current().version == 2


def test_default_is_current_after_a_delete_and_versions_continue(store: SQLiteStore) -> None:
    instructions = Instructions(store, default="zero")
    instructions.set("one")
    store.delete(("instructions",), "agent")

    assert instructions.current() == InstructionsVersion("zero")
    assert instructions.set("two").version == 2
    assert instructions.rollback(1).version == 3


def test_instructions_do_not_expire_and_are_searchable_by_their_current_text() -> None:
    """The default time to live of the store does not apply. Diffs are not searched."""
    with SQLiteStore.open(":memory:", ttl={"default_ttl": 1e-9}) as store:
        instructions = Instructions(store)
        instructions.set("Answer in prose.")
        instructions.set("Answer in verse.")

        assert instructions.current().text == "Answer in verse."
        assert [match.key for match in store.search((), query="verse", mode="text")] == ["agent"]
        assert store.why_not(("instructions",), "agent", query="prose", mode="text").rank is None
        item = store.get(("instructions",), "agent")
        assert item is not None
        assert item.expires_at is None


def test_async_methods_of_instructions_do_the_same(store: SQLiteStore) -> None:
    instructions = Instructions(store)

    async def use_instructions_async() -> list[Any]:
        return [
            await instructions.aset("one"),
            await instructions.aset("two"),
            await instructions.arollback(1),
            await instructions.acurrent(),
            await instructions.ahistory(),
        ]

    one, two, back, current, history = asyncio.run(use_instructions_async())
    assert history == instructions.history()
    assert list_texts(history) == ["one", "two", "one"]
    assert current == back == instructions.current()
    assert (one.version, two.version, back.version) == (1, 2, 3)


def test_concurrent_writers_of_instructions_all_get_a_version(tmp_path: Path) -> None:
    """Each diff is against the version before."""
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
    assert sorted(list_texts(history)) == [f"from {number}" for number in range(8)]
    previous_texts = ["0", *list_texts(history)]
    for previous, version in zip(previous_texts, history, strict=False):
        assert f"-{previous}\n+{version.text}" in version.diff


# -- namespaces and keys


@given(st.lists(st.text(min_size=1, max_size=20), min_size=2, max_size=5, unique=True))
def test_instructions_of_users_with_any_ids_are_separate(users: list[str]) -> None:
    """Each user ID reads what was set for it, or is refused."""
    with SQLiteStore.open(":memory:", index=None) as store:
        instructions = Instructions(store, PER_USER, default="nobody's")
        texts: dict[str, str] = {}
        for user in users:
            try:
                instructions.set(f"{len(texts)}", make_config(user_id=user))
                texts[user] = f"{len(texts)}"
            except (InvalidConfig, InvalidNamespace):
                has_surrogate = any("\ud800" <= char <= "\udfff" for char in user)
                assert has_surrogate or "\0" in user or not has_letter_or_digit(user)

        for user, text in texts.items():
            assert instructions.current(make_config(user_id=user)).text == text
            assert len(instructions.history(make_config(user_id=user))) == 1


@pytest.mark.parametrize("user", [None, "", 3])
def test_methods_refuse_a_run_without_a_user_and_write_nothing(
    store: SQLiteStore, user: Any
) -> None:
    instructions = Instructions(store, PER_USER)
    for config in (make_config(user_id=user), make_config(), None):
        with pytest.raises(InvalidConfig):
            instructions.current(config)
        with pytest.raises(InvalidConfig):
            instructions.set("x", config)
        with pytest.raises(InvalidConfig):
            instructions.rollback(0, config)
        with pytest.raises(InvalidConfig):
            use_instructions(instructions).invoke({"messages": [ASK]}, config)

    assert store.list_namespaces() == []


def test_key_of_instructions_is_a_template(store: SQLiteStore) -> None:
    instructions = Instructions(store, key="{agent}")
    instructions.set("for a", make_config(agent="a"))

    assert instructions.current(make_config(agent="a")).text == "for a"
    assert instructions.current(make_config(agent="b")).version == 0


def test_instructions_work_in_a_scope_of_a_store(store: SQLiteStore) -> None:
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
def test_invalid_arguments_of_instructions_are_refused(arguments: dict[str, Any]) -> None:
    """In a store without versions, two runs would lose each other's change."""
    with pytest.raises(ConfigurationError):
        Instructions(**arguments)


@pytest.mark.parametrize("text", ["", " \n\t", None, 3])
def test_blank_instructions_are_refused(store: SQLiteStore, text: Any) -> None:
    with pytest.raises(ConfigurationError, match="text"):
        Instructions(store).set(text)
    assert store.list_namespaces() == []


def test_foreign_item_under_the_key_is_not_read_as_instructions(store: SQLiteStore) -> None:
    store.put(("instructions",), "agent", {"text": "a note"})

    with pytest.raises(ConfigurationError, match="pass another key or namespace"):
        Instructions(store).current()


def test_instructions_stored_by_langgraph_example_are_read(store: SQLiteStore) -> None:
    """The example puts the text under the key `instructions`."""
    store.put(("agent_instructions",), "agent_a", {"instructions": "Tweet."})

    assert Instructions(store, ("agent_instructions",), "agent_a").current().text == "Tweet."


# -- using instructions


def list_shown_messages(state: Any) -> list[tuple[str, Any]]:
    return [(message.type, message.content) for message in state["llm_input_messages"]]


def build_graph(*nodes: tuple[str, Any], **compiled: Any) -> Any:
    builder = StateGraph(ChatState)
    names = [START, *(name for name, _ in nodes), END]
    for name, node in nodes:
        builder.add_node(name, node)
    for previous, following in itertools.pairwise(names):
        builder.add_edge(previous, following)
    return builder.compile(**compiled)


def test_use_instructions_node_reads_the_store_and_user_of_the_run(store: SQLiteStore) -> None:
    """The messages of the state stay unchanged."""
    instructions = Instructions(namespace=PER_USER)
    Instructions(store, PER_USER).set("Call her Ann.", make_config(user_id="ann"))
    graph = build_graph(("use", use_instructions(instructions)), store=store)

    for user, text in (("ann", "Call her Ann."), ("bo", "You are a helpful assistant.")):
        output = graph.invoke({"messages": [ASK]}, make_config(user_id=user))
        assert list_shown_messages(output) == [("system", text), ("human", "hello")]
        assert output["messages"] == [ASK]
        assert asyncio.run(graph.ainvoke({"messages": [ASK]}, make_config(user_id=user))) == output


def test_current_in_a_function_node_finds_store_and_user_of_the_run(store: SQLiteStore) -> None:
    instructions = Instructions(namespace=PER_USER)
    Instructions(store, PER_USER).set("Call her Ann.", make_config(user_id="ann"))
    read_texts: list[str] = []

    def node(state: Any) -> dict[str, Any]:
        read_texts.append(instructions.current().text)
        return {}

    build_graph(("node", node), store=store).invoke({"messages": [ASK]}, make_config(user_id="ann"))
    assert read_texts == ["Call her Ann."]


@pytest.mark.parametrize("nested", [False, True])
def test_version_names_the_checkpoint_at_which_its_node_started(
    store: SQLiteStore, nested: bool
) -> None:
    """A version that names another thread has no checkpoint of this run."""
    instructions = Instructions(store)
    saver = InMemorySaver()
    versions: list[InstructionsVersion] = []

    def node(state: Any) -> dict[str, Any]:
        versions.append(instructions.set(f"Be kind {len(versions)}."))
        versions.append(
            instructions.set(f"Be kind {len(versions)}.", make_config(thread_id="other"))
        )
        return {}

    inner: Any = build_graph(("node", node)) if nested else node
    graph = build_graph(("node", inner), checkpointer=saver)
    for _ in range(2):
        graph.invoke({"messages": [ASK]}, make_config(thread_id="t"))
    checkpoint_ids = {
        tup.config["configurable"]["checkpoint_id"]
        for tup in saver.list(make_config(thread_id="t"))
    }

    assert [version.thread_id for version in versions] == ["t", "other"] * 2
    own_versions, other_versions = versions[::2], versions[1::2]
    assert len({version.checkpoint_id for version in own_versions}) == 2
    assert {version.checkpoint_id for version in own_versions} <= checkpoint_ids
    assert [version.checkpoint_id for version in other_versions] == [None, None]


def test_version_set_by_a_chain_names_thread_and_checkpoint_of_its_config(
    store: SQLiteStore,
) -> None:
    instructions = Instructions(store)
    chain: Any = RunnableLambda(lambda text: instructions.set(text))
    version = chain.invoke("Be kind.", make_config(thread_id="t", checkpoint_id="c"))
    assert (version.thread_id, version.checkpoint_id) == ("t", "c")
    assert chain.invoke("Be brief.").thread_id is None


def test_missing_or_unsuitable_store_raises_configuration_error() -> None:
    """The store is missing, inside or outside of a graph, or keeps no versions."""
    instructions = Instructions()
    node = use_instructions(instructions)

    with pytest.raises(ConfigurationError, match="pass store="):
        instructions.current()
    with pytest.raises(ConfigurationError, match="pass store="):
        build_graph(("use", node)).invoke({"messages": [ASK]})
    with pytest.raises(ConfigurationError, match="expected a store that keeps versions"):
        build_graph(("use", node), store=InMemoryStore()).invoke({"messages": [ASK]})


def test_instructions_replace_a_different_system_message_and_keep_an_equal_one(
    store: SQLiteStore,
) -> None:
    """A second application changes nothing."""
    node = use_instructions(Instructions(store, default="Be brief."))
    equal, other = SystemMessage("Be brief.", id="s"), SystemMessage("Be long.", id="o")

    assert node([other, ASK, equal]) == [equal, ASK]
    assert node([ASK, other]) == [SystemMessage("Be brief."), ASK]
    assert node(node([other, ASK])) == node([ASK])
    assert node.invoke([other, ASK]) == asyncio.run(node.ainvoke([other, ASK])) == node([ASK])


def test_instructions_keep_the_summary_in_a_view(store: SQLiteStore) -> None:
    node = use_instructions(Instructions(store, default="Be brief."))
    summary = Summary(text="Ann came.", last="h0", count=3)

    messages = node(present_messages([SystemMessage("Old."), ASK], summary))

    assert messages == present_messages([SystemMessage("Be brief."), ASK], summary)
    assert HEADING in "".join(str(message.content) for message in messages)
    assert node(messages) == messages


def test_trim_in_a_view_counts_the_instructions(store: SQLiteStore) -> None:
    node = view(
        use_instructions(Instructions(store, default="Be brief.")),
        trim(max_tokens=3, token_counter=len),
    )
    messages = [HumanMessage(text, id=text) for text in ("one", "two", "three")]
    graph = build_graph(("show", node))

    output = graph.invoke({"messages": messages})

    assert list_shown_messages(output) == [
        ("system", "Be brief."),
        ("human", "two"),
        ("human", "three"),
    ]
    assert asyncio.run(graph.ainvoke({"messages": messages})) == output


@given(conversations())
def test_instructions_are_in_front_of_a_valid_request(conversation: list[Any]) -> None:
    """The newest user message is included. A second application changes nothing."""
    with SQLiteStore.open(":memory:", index=None) as store:
        node = use_instructions(Instructions(store, default="Be brief."))
        state = {"messages": conversation}

        shown_messages = node.invoke(state)["llm_input_messages"]

        assert shown_messages[0].text == "Be brief."
        assert find_refusals(shown_messages, to_answer=awaits_answer(conversation)) == []
        newest = find_newest_question(conversation)
        assert newest is None or newest in shown_messages
        assert (
            node.invoke({**state, "llm_input_messages": shown_messages})["llm_input_messages"]
            == shown_messages
        )
        assert asyncio.run(node.ainvoke(state)) == node.invoke(state)


def test_use_instructions_refuses_invalid_states_and_arguments(store: SQLiteStore) -> None:
    node = use_instructions(Instructions(store))

    for state in ({}, {"messages": "hi"}, {"messages": ["hi"]}, ["hi"]):
        with pytest.raises(InvalidMessages):
            node.invoke(state)
    with pytest.raises(ConfigurationError, match="Instructions"):
        use_instructions(store)  # type: ignore[arg-type]


def test_use_instructions_as_of_a_time_shows_the_version_of_that_time(store: SQLiteStore) -> None:
    """Before the first version, the default is shown."""
    instructions = Instructions(store, default="Answer.")
    time_before = datetime.now(UTC)
    first = instructions.set("Answer in verse.")
    instructions.set("Answer in prose.")
    node = use_instructions(instructions, as_of="as_of")

    def show_instructions(moment: Any) -> str:
        config: Any = {"configurable": {"as_of": moment} if moment else {}}
        return node([HumanMessage("hi")], config)[0].text

    assert first.valid_from is not None
    assert show_instructions(first.valid_from.isoformat()) == "Answer in verse."
    assert [show_instructions(time_before), show_instructions(None)] == [
        "Answer.",
        "Answer in prose.",
    ]
    with pytest.raises(InvalidConfig, match="as_of"):
        show_instructions("yesterday")
