"""LangChain4j's chat memory: each sentence of its page, over a list, a protocol and a thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError, InvalidConfig, InvalidMessages
from perdure.graphs import chat_graph
from perdure.memory.adapters import (
    CheckpointerChatMemoryRepository,
    CheckpointerChatMemoryStore,
    InMemoryChatMemoryStore,
    MessageWindowChatMemory,
    ThreadMessageHistory,
    TokenWindowChatMemory,
)
from perdure.memory.chat_history import select_messages_for_provider
from perdure.memory.tool_calls import NO_RESULT, list_call_ids
from tests.memory.conversations import conversations
from tests.memory.providers import find_refusals


class PersistentChatMemoryStore:
    """A user's own store, which has the three methods of the protocol; it notes the calls."""

    def __init__(self) -> None:
        self.kept: dict[Any, list[BaseMessage]] = {}
        self.calls: list[tuple[str, Any, list[str]]] = []

    def get_messages(self, memory_id: Any) -> list[BaseMessage]:
        return self.kept.get(memory_id, [])

    def update_messages(self, memory_id: Any, messages: Sequence[BaseMessage]) -> None:
        self.calls.append(("update", memory_id, texts(messages)))
        self.kept[memory_id] = list(messages)

    def delete_messages(self, memory_id: Any) -> None:
        self.calls.append(("delete", memory_id, []))
        self.kept.pop(memory_id, None)


@pytest.fixture(params=["memory", "own", "checkpointer"])
def store(request: pytest.FixtureRequest, file_saver: SQLiteCheckpointer) -> Any:
    if request.param == "checkpointer":
        return CheckpointerChatMemoryStore(file_saver)
    return InMemoryChatMemoryStore() if request.param == "memory" else PersistentChatMemoryStore()


def texts(messages: Sequence[BaseMessage]) -> list[str]:
    return [message.text for message in messages]


def words(messages: Sequence[BaseMessage]) -> int:
    return sum(len(message.text.split()) for message in messages)


def calls(*ids: str) -> AIMessage:
    named = [{"name": "f", "args": {}, "id": id, "type": "tool_call"} for id in ids]
    return AIMessage("", tool_calls=named)


def result(id: str) -> ToolMessage:
    return ToolMessage(f"result {id}", tool_call_id=id)


def told(memory: Any, *messages: BaseMessage) -> list[str]:
    for message in messages:
        memory.add(message)
    return texts(memory.messages())


# -- eviction


def test_the_oldest_messages_are_evicted_from_the_store_too(store: Any) -> None:
    """A sliding window keeps the newest; the store holds no more than the memory."""
    memory = MessageWindowChatMemory(3, id="12345", store=store)

    assert memory.id == "12345"
    assert told(memory, *(HumanMessage(str(n)) for n in range(5))) == ["2", "3", "4"]
    assert texts(store.get_messages("12345")) == ["2", "3", "4"]


def test_evicted_messages_stay_in_history(file_saver: SQLiteCheckpointer) -> None:
    """ "Memory vs history": over a checkpointer there are both, until the memory is cleared."""
    keeping = CheckpointerChatMemoryStore(file_saver, keep_history=True)
    for store in (keeping, CheckpointerChatMemoryStore(file_saver)):
        memory = MessageWindowChatMemory(2, id="t", store=store)
        told(memory, *(HumanMessage(str(n)) for n in range(5)))
        assert [item.value.text for item in file_saver.history("t")][:5] == list("01234")
        memory.clear()
        assert memory.messages() == []
        assert [thread.thread_id for thread in file_saver.threads()] == ["t"][: store is keeping]


@pytest.mark.parametrize("clear", ["memory", "store", "repository", "history"])
def test_deleted_messages_leave_the_file(clear: str, tmp_path: Path) -> None:
    """Also evicted ones, and what a graph on the same thread made of them."""
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        store = CheckpointerChatMemoryStore(saver)
        memory = MessageWindowChatMemory(2, id="t", store=store)
        told(memory, *(HumanMessage(f"my secret lagoon {n}") for n in range(4)))
        asked: Any = {"messages": [HumanMessage("Where is the lagoon?")]}
        thread: Any = {"configurable": {"thread_id": "t"}}
        chat_graph(checkpointer=saver).invoke(asked, thread)
        others = MessageWindowChatMemory(2, id="other", store=store)
        others.add(HumanMessage("hi"))
        if clear == "memory":
            memory.clear()
        elif clear == "store":
            store.delete_messages("t")
        elif clear == "repository":
            CheckpointerChatMemoryRepository(saver).delete("t")
        else:
            ThreadMessageHistory(saver, "t").clear()
        memory.add(HumanMessage("again"))

        assert texts(memory.messages()) == ["again"]
        assert texts(others.messages()) == ["hi"]
        assert [item.value.text for item in saver.history("t")] == ["again"]
        assert not any(b"lagoon" in file.read_bytes() for file in tmp_path.iterdir())
    assert not any(b"lagoon" in file.read_bytes() for file in tmp_path.iterdir())


def test_tokens_are_what_a_token_window_counts(store: Any) -> None:
    """Messages are indivisible: one that does not fit goes whole."""
    memory = TokenWindowChatMemory(5, words, store=store)

    assert told(memory, HumanMessage("a b c"), AIMessage("d e")) == ["a b c", "d e"]
    assert told(memory, HumanMessage("f")) == ["d e", "f"]
    assert told(memory, AIMessage("g h i j")) == ["f", "g h i j"]


def test_a_call_is_evicted_with_its_results(store: Any) -> None:
    """Also several calls of one message, and the results leave the store."""
    memory = MessageWindowChatMemory(5, store=store)
    told(memory, HumanMessage("q"), calls("1", "2"), result("1"), result("2"), AIMessage("a"))

    assert told(memory, HumanMessage("r")) == ["", "result 1", "result 2", "a", "r"]
    assert told(memory, AIMessage("b")) == ["a", "r", "b"]
    assert texts(store.get_messages("default")) == ["a", "r", "b"]


# -- persistence


def test_the_store_is_told_of_each_message_that_is_added() -> None:
    """Update is called for each, without what was evicted; delete when the memory is cleared."""
    store = PersistentChatMemoryStore()
    memory = MessageWindowChatMemory(2, id=7, store=store)
    told(memory, HumanMessage("a"), AIMessage("b"), HumanMessage("c"))
    memory.clear()

    assert store.calls == [
        ("update", 7, ["a"]),
        ("update", 7, ["a", "b"]),
        ("update", 7, ["b", "c"]),
        ("delete", 7, []),
    ]


def test_ids_tell_users_apart(store: Any) -> None:
    """Two memories of one store see only their own messages."""
    ann, bo = (MessageWindowChatMemory(9, id=who, store=store) for who in ("ann", "bo"))
    ann.add(HumanMessage("I am Ann"))
    bo.add(HumanMessage("I am Bo"))
    ann.clear()

    assert ann.messages() == []
    assert texts(bo.messages()) == ["I am Bo"]


def test_a_memory_goes_on_in_a_reopened_file_and_in_a_graph(tmp_path: Path) -> None:
    """The id is the thread_id of any chat graph with the same checkpointer."""
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        memory = MessageWindowChatMemory(9, id="t", store=CheckpointerChatMemoryStore(saver))
        memory.add(HumanMessage("My canoe is called Nutshell"))
    with SQLiteCheckpointer.open(path) as saver:
        memory = MessageWindowChatMemory(9, id="t", store=CheckpointerChatMemoryStore(saver))
        asked: Any = {"messages": [HumanMessage("What is my canoe called?")]}
        thread: Any = {"configurable": {"thread_id": "t"}}
        out = chat_graph(checkpointer=saver).invoke(asked, thread)

        assert "Nutshell" in out["messages"][-1].text
        assert texts(memory.messages()) == texts(out["messages"])


def test_two_who_add_at_once_lose_nothing(tmp_path: Path) -> None:
    """Connections of their own, one memory: each message is there."""
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path):
        pass  # made once

    def add(who: int) -> None:
        with SQLiteCheckpointer.open(path) as saver:
            memory = MessageWindowChatMemory(99, id="t", store=CheckpointerChatMemoryStore(saver))
            for n in range(4):
                memory.add(HumanMessage(f"{who}-{n}"))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(add, range(3)))
    with SQLiteCheckpointer.open(path) as saver:
        found = CheckpointerChatMemoryStore(saver).get_messages("t")

    assert sorted(texts(found)) == [f"{who}-{n}" for who in range(3) for n in range(4)]


# -- the system message


def test_a_system_message_is_always_retained(store: Any) -> None:
    """Whatever is evicted."""
    memory = MessageWindowChatMemory(2, store=store)
    memory.add(SystemMessage("be brief"))

    assert told(memory, *(HumanMessage(str(n)) for n in range(5))) == ["be brief", "4"]


def test_an_equal_one_is_ignored() -> None:
    """Nothing moves, and the store is not even told."""
    store = PersistentChatMemoryStore()
    memory = MessageWindowChatMemory(5, store=store)
    told(memory, SystemMessage("be brief"), HumanMessage("a"), SystemMessage("be brief"))

    assert texts(memory.messages()) == ["be brief", "a"]
    assert len(store.calls) == 2


@pytest.mark.parametrize("first", [False, True])
def test_a_different_one_takes_its_place(first: bool, store: Any) -> None:
    """At the end, or first if so configured."""
    memory = MessageWindowChatMemory(5, store=store, always_keep_system_message_first=first)
    shown = told(memory, SystemMessage("be brief"), HumanMessage("a"), SystemMessage("be kind"))

    assert shown == (["be kind", "a"] if first else ["a", "be kind"])
    assert told(memory, *(HumanMessage(str(n)) for n in range(6))) == ["be kind", *"2345"]


# -- windows that are too small


def test_a_message_that_does_not_fit_is_evicted_completely(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With all before it, but the system message, and a warning; the memory goes on."""
    memory = TokenWindowChatMemory(4, words, store=store)
    told(memory, SystemMessage("a b"), HumanMessage("c"))

    assert told(memory, HumanMessage("d e f")) == ["a b"]
    assert texts(store.get_messages("default")) == ["a b"]
    assert "does not fit" in caplog.text
    assert told(memory, HumanMessage("g h")) == ["a b", "g h"]
    assert told(memory, SystemMessage("x x x x x")) == ["x x x x x"]


def test_a_window_shorter_than_an_exchange_evicts_it(store: Any) -> None:
    """A result never stays without its call."""
    memory = MessageWindowChatMemory(2, store=store)

    assert told(memory, HumanMessage("q"), calls("1", "2"), result("1")) == ["", "result 1"]
    assert told(memory, result("2")) == []
    assert told(memory, AIMessage("a")) == ["a"]


def test_results_without_a_call_are_not_shown(store: Any) -> None:
    """Whoever put them there; a call without its result is shown with a message that says so."""
    store.update_messages("default", [result("1"), HumanMessage("a"), calls("2"), AIMessage("b")])
    memory = MessageWindowChatMemory(9, store=store)

    assert texts(memory.messages()) == ["a", "", NO_RESULT, "b"]
    if isinstance(store, InMemoryChatMemoryStore):  # what is only shown is not stored
        store.update_messages("default", memory.messages())
        assert texts(store.get_messages("default")) == ["a", "", "b"]


def test_what_says_nothing_is_not_shown_and_replaces_nothing(store: Any) -> None:
    """Neither an empty answer, which providers refuse, nor instructions without text."""
    memory = MessageWindowChatMemory(9, store=store)
    memory.add(SystemMessage("be brief"))

    assert told(memory, HumanMessage("a"), AIMessage(" ")) == ["be brief", "a"]
    assert told(memory, SystemMessage(" "), HumanMessage("b")) == ["be brief", "a", "b"]


@given(conversations())
def test_a_window_shows_what_providers_take(talk: list[BaseMessage]) -> None:
    """After a question that it may have evicted; besides, the system messages, in their order."""
    shown = select_messages_for_provider(talk)
    said = [m for m in shown if not isinstance(m, SystemMessage)]
    newest = len(said) - len(pending(said))

    assert find_refusals([HumanMessage("evicted"), *said[:newest]], to_answer=False) == []
    assert {m.id for m in said} <= {m.id for m in talk} | {None}
    assert all(NO_RESULT in str(m.content) for m in said if m.id is None)
    assert [m for m in shown if isinstance(m, SystemMessage)] == [
        m for m in talk if isinstance(m, SystemMessage) and m.text.strip()
    ]


def pending(said: list[BaseMessage]) -> list[BaseMessage]:
    """A call at the end with fewer results than it waits for."""
    results = list(takewhile(lambda m: isinstance(m, ToolMessage), reversed(said)))
    caller = said[-len(results) - 1 :][:1]
    called = sum(len(list_call_ids(m)) for m in caller if isinstance(m, AIMessage))
    return [*caller, *results] if called > len(results) else []


MESSAGES = st.sampled_from(
    [
        *(HumanMessage("h"), AIMessage("a"), SystemMessage("s"), SystemMessage("t")),
        *(calls("1"), calls("2", "3"), result("1"), result("2"), result("3")),
    ]
)


@given(st.lists(MESSAGES, max_size=25), st.integers(1, 6), st.booleans())
def test_whatever_is_added(added: list[BaseMessage], size: int, first: bool) -> None:
    """The window holds, one system message stays, the newest fits or goes, no result is alone."""
    memory = MessageWindowChatMemory(size, id="m", always_keep_system_message_first=first)
    system = None
    for message in added:
        memory.add(message)
        kept = memory.store.get_messages("m")
        system = message if isinstance(message, SystemMessage) else system
        assert len(kept) <= size
        assert [m for m in kept if isinstance(m, SystemMessage)] == ([system] if system else [])
        alone = len(kept) == (system is not None)
        assert message in kept or alone
        assert not alone or size == 1 or isinstance(message, ToolMessage | SystemMessage)
        open_calls: set[str | None] = set()
        for shown in memory.messages():
            if isinstance(shown, ToolMessage):
                assert shown.tool_call_id in open_calls
                open_calls.discard(shown.tool_call_id)
            else:
                assert not open_calls
                open_calls = {c["id"] for c in getattr(shown, "tool_calls", [])}


# -- bad input


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, None])
def test_sizes_are_whole_numbers(wrong: Any) -> None:
    """The value is named."""
    with pytest.raises(ConfigurationError, match="max_messages is"):
        MessageWindowChatMemory(wrong)
    with pytest.raises(ConfigurationError, match="max_tokens is"):
        TokenWindowChatMemory(wrong, words)


def test_other_arguments_are_checked(file_saver: SQLiteCheckpointer) -> None:
    """A checkpointer in the place of a store, no counter, no message, an empty id."""
    with pytest.raises(ConfigurationError, match="CheckpointerChatMemoryStore"):
        MessageWindowChatMemory(3, store=file_saver)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        TokenWindowChatMemory(3, object())  # type: ignore[arg-type]
    with pytest.raises(InvalidMessages, match="expected"):
        MessageWindowChatMemory(3).add("hello")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig):
        MessageWindowChatMemory(3, id="", store=CheckpointerChatMemoryStore(file_saver)).messages()
    with pytest.raises(InvalidConfig):
        MessageWindowChatMemory(
            3, id=None, store=CheckpointerChatMemoryStore(file_saver)
        ).messages()
