"""LangChain4j's chat memory: each sentence of its documentation, over each kind of store."""

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
from perdure.memory.chat_history import convert_messages_to_form_providers_accept
from perdure.memory.tool_calls import NO_RESULT, list_call_ids
from tests.memory.conversations import conversations
from tests.memory.provider_rules import find_refusals


class PersistentChatMemoryStore:
    """A user's own store with the three methods of the protocol. It records the calls."""

    def __init__(self) -> None:
        self.messages_by_id: dict[Any, list[BaseMessage]] = {}
        self.calls: list[tuple[str, Any, list[str]]] = []

    def get_messages(self, memory_id: Any) -> list[BaseMessage]:
        return self.messages_by_id.get(memory_id, [])

    def update_messages(self, memory_id: Any, messages: Sequence[BaseMessage]) -> None:
        self.calls.append(("update", memory_id, list_texts(messages)))
        self.messages_by_id[memory_id] = list(messages)

    def delete_messages(self, memory_id: Any) -> None:
        self.calls.append(("delete", memory_id, []))
        self.messages_by_id.pop(memory_id, None)


@pytest.fixture(params=["memory", "own", "checkpointer"])
def store(request: pytest.FixtureRequest, file_saver: SQLiteCheckpointer) -> Any:
    if request.param == "checkpointer":
        return CheckpointerChatMemoryStore(file_saver)
    return InMemoryChatMemoryStore() if request.param == "memory" else PersistentChatMemoryStore()


def list_texts(messages: Sequence[BaseMessage]) -> list[str]:
    return [message.text for message in messages]


def count_words(messages: Sequence[BaseMessage]) -> int:
    return sum(len(message.text.split()) for message in messages)


def build_calling_message(*ids: str) -> AIMessage:
    tool_calls = [{"name": "f", "args": {}, "id": id, "type": "tool_call"} for id in ids]
    return AIMessage("", tool_calls=tool_calls)


def build_result(id: str) -> ToolMessage:
    return ToolMessage(f"result {id}", tool_call_id=id)


def add_and_list_texts(memory: Any, *messages: BaseMessage) -> list[str]:
    for message in messages:
        memory.add(message)
    return list_texts(memory.messages())


# -- eviction


def test_window_evicts_the_oldest_messages_from_the_store(store: Any) -> None:
    memory = MessageWindowChatMemory(3, id="12345", store=store)

    assert memory.id == "12345"
    assert add_and_list_texts(memory, *(HumanMessage(str(n)) for n in range(5))) == ["2", "3", "4"]
    assert list_texts(store.get_messages("12345")) == ["2", "3", "4"]


def test_evicted_messages_stay_in_the_history_until_the_memory_is_cleared(
    file_saver: SQLiteCheckpointer,
) -> None:
    """With `keep_history`, evicted messages stay even then."""
    history_store = CheckpointerChatMemoryStore(file_saver, keep_history=True)
    for store in (history_store, CheckpointerChatMemoryStore(file_saver)):
        memory = MessageWindowChatMemory(2, id="t", store=store)
        add_and_list_texts(memory, *(HumanMessage(str(n)) for n in range(5)))
        assert [item.value.text for item in file_saver.history("t")][:5] == list("01234")
        memory.clear()
        assert memory.messages() == []
        assert [thread.thread_id for thread in file_saver.threads()] == ["t"][
            : store is history_store
        ]


@pytest.mark.parametrize("clear_method", ["memory", "store", "repository", "history"])
def test_cleared_messages_leave_no_bytes_in_the_file(clear_method: str, tmp_path: Path) -> None:
    """Evicted messages, and what a graph on the same thread wrote, are erased too."""
    with SQLiteCheckpointer.open(tmp_path / "x.db") as saver:
        store = CheckpointerChatMemoryStore(saver)
        memory = MessageWindowChatMemory(2, id="t", store=store)
        add_and_list_texts(memory, *(HumanMessage(f"my secret lagoon {n}") for n in range(4)))
        input: Any = {"messages": [HumanMessage("Where is the lagoon?")]}
        thread: Any = {"configurable": {"thread_id": "t"}}
        chat_graph(checkpointer=saver).invoke(input, thread)
        other_memory = MessageWindowChatMemory(2, id="other", store=store)
        other_memory.add(HumanMessage("hi"))
        if clear_method == "memory":
            memory.clear()
        elif clear_method == "store":
            store.delete_messages("t")
        elif clear_method == "repository":
            CheckpointerChatMemoryRepository(saver).delete("t")
        else:
            ThreadMessageHistory(saver, "t").clear()
        memory.add(HumanMessage("again"))

        assert list_texts(memory.messages()) == ["again"]
        assert list_texts(other_memory.messages()) == ["hi"]
        assert [item.value.text for item in saver.history("t")] == ["again"]
        assert not any(b"lagoon" in file.read_bytes() for file in tmp_path.iterdir())
    assert not any(b"lagoon" in file.read_bytes() for file in tmp_path.iterdir())


def test_token_window_evicts_whole_messages_over_its_size(store: Any) -> None:
    memory = TokenWindowChatMemory(5, count_words, store=store)

    assert add_and_list_texts(memory, HumanMessage("a b c"), AIMessage("d e")) == ["a b c", "d e"]
    assert add_and_list_texts(memory, HumanMessage("f")) == ["d e", "f"]
    assert add_and_list_texts(memory, AIMessage("g h i j")) == ["f", "g h i j"]


def test_calls_are_evicted_with_their_results(store: Any) -> None:
    """The results leave the store too."""
    memory = MessageWindowChatMemory(5, store=store)
    add_and_list_texts(
        memory,
        HumanMessage("q"),
        build_calling_message("1", "2"),
        build_result("1"),
        build_result("2"),
        AIMessage("a"),
    )

    assert add_and_list_texts(memory, HumanMessage("r")) == ["", "result 1", "result 2", "a", "r"]
    assert add_and_list_texts(memory, AIMessage("b")) == ["a", "r", "b"]
    assert list_texts(store.get_messages("default")) == ["a", "r", "b"]


# -- persistence


def test_own_store_gets_an_update_for_each_message_and_a_delete() -> None:
    store = PersistentChatMemoryStore()
    memory = MessageWindowChatMemory(2, id=7, store=store)
    add_and_list_texts(memory, HumanMessage("a"), AIMessage("b"), HumanMessage("c"))
    memory.clear()

    assert store.calls == [
        ("update", 7, ["a"]),
        ("update", 7, ["a", "b"]),
        ("update", 7, ["b", "c"]),
        ("delete", 7, []),
    ]


def test_memories_of_different_ids_are_separate(store: Any) -> None:
    ann, bo = (MessageWindowChatMemory(9, id=who, store=store) for who in ("ann", "bo"))
    ann.add(HumanMessage("I am Ann"))
    bo.add(HumanMessage("I am Bo"))
    ann.clear()

    assert ann.messages() == []
    assert list_texts(bo.messages()) == ["I am Bo"]


def test_memory_continues_in_a_reopened_file_and_in_a_graph(tmp_path: Path) -> None:
    """The ID is the `thread_id` of any chat graph with the same checkpointer."""
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path) as saver:
        memory = MessageWindowChatMemory(9, id="t", store=CheckpointerChatMemoryStore(saver))
        memory.add(HumanMessage("My canoe is called Nutshell"))
    with SQLiteCheckpointer.open(path) as saver:
        memory = MessageWindowChatMemory(9, id="t", store=CheckpointerChatMemoryStore(saver))
        input: Any = {"messages": [HumanMessage("What is my canoe called?")]}
        thread: Any = {"configurable": {"thread_id": "t"}}
        output = chat_graph(checkpointer=saver).invoke(input, thread)

        assert "Nutshell" in output["messages"][-1].text
        assert list_texts(memory.messages()) == list_texts(output["messages"])


def test_concurrent_adds_over_own_connections_lose_no_message(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path):
        pass  # create the tables once

    def add_messages(who: int) -> None:
        with SQLiteCheckpointer.open(path) as saver:
            memory = MessageWindowChatMemory(99, id="t", store=CheckpointerChatMemoryStore(saver))
            for n in range(4):
                memory.add(HumanMessage(f"{who}-{n}"))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(add_messages, range(3)))
    with SQLiteCheckpointer.open(path) as saver:
        messages = CheckpointerChatMemoryStore(saver).get_messages("t")

    assert sorted(list_texts(messages)) == [
        f"{writer}-{n}" for writer in range(3) for n in range(4)
    ]


# -- the system message


def test_system_message_is_never_evicted(store: Any) -> None:
    memory = MessageWindowChatMemory(2, store=store)
    memory.add(SystemMessage("be brief"))

    assert add_and_list_texts(memory, *(HumanMessage(str(n)) for n in range(5))) == [
        "be brief",
        "4",
    ]


def test_equal_system_message_is_ignored() -> None:
    """The store gets no update."""
    store = PersistentChatMemoryStore()
    memory = MessageWindowChatMemory(5, store=store)
    add_and_list_texts(
        memory, SystemMessage("be brief"), HumanMessage("a"), SystemMessage("be brief")
    )

    assert list_texts(memory.messages()) == ["be brief", "a"]
    assert len(store.calls) == 2


@pytest.mark.parametrize("first", [False, True])
def test_different_system_message_replaces_the_former_one(first: bool, store: Any) -> None:
    """The new message stands last, or first with `always_keep_system_message_first`."""
    memory = MessageWindowChatMemory(5, store=store, always_keep_system_message_first=first)
    memory_texts = add_and_list_texts(
        memory, SystemMessage("be brief"), HumanMessage("a"), SystemMessage("be kind")
    )

    assert memory_texts == (["be kind", "a"] if first else ["a", "be kind"])
    assert add_and_list_texts(memory, *(HumanMessage(str(n)) for n in range(6))) == [
        "be kind",
        *"2345",
    ]


# -- windows that are too small


def test_message_larger_than_the_window_is_evicted_with_a_warning(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """All messages before it are evicted too, except the system message."""
    memory = TokenWindowChatMemory(4, count_words, store=store)
    add_and_list_texts(memory, SystemMessage("a b"), HumanMessage("c"))

    assert add_and_list_texts(memory, HumanMessage("d e f")) == ["a b"]
    assert list_texts(store.get_messages("default")) == ["a b"]
    assert "does not fit" in caplog.text
    assert add_and_list_texts(memory, HumanMessage("g h")) == ["a b", "g h"]
    assert add_and_list_texts(memory, SystemMessage("x x x x x")) == ["x x x x x"]


def test_window_smaller_than_an_exchange_evicts_the_whole_exchange(store: Any) -> None:
    """A result never stays without its call."""
    memory = MessageWindowChatMemory(2, store=store)

    assert add_and_list_texts(
        memory, HumanMessage("q"), build_calling_message("1", "2"), build_result("1")
    ) == ["", "result 1"]
    assert add_and_list_texts(memory, build_result("2")) == []
    assert add_and_list_texts(memory, AIMessage("a")) == ["a"]


def test_results_without_a_call_are_hidden_and_missing_results_stated(store: Any) -> None:
    """A stated result is only shown, not stored."""
    store.update_messages(
        "default",
        [build_result("1"), HumanMessage("a"), build_calling_message("2"), AIMessage("b")],
    )
    memory = MessageWindowChatMemory(9, store=store)

    assert list_texts(memory.messages()) == ["a", "", NO_RESULT, "b"]
    if isinstance(store, InMemoryChatMemoryStore):  # a stated result is not stored
        store.update_messages("default", memory.messages())
        assert list_texts(store.get_messages("default")) == ["a", "", "b"]


def test_blank_answers_and_blank_system_messages_are_left_out(store: Any) -> None:
    """Providers refuse an empty answer."""
    memory = MessageWindowChatMemory(9, store=store)
    memory.add(SystemMessage("be brief"))

    assert add_and_list_texts(memory, HumanMessage("a"), AIMessage(" ")) == ["be brief", "a"]
    assert add_and_list_texts(memory, SystemMessage(" "), HumanMessage("b")) == [
        "be brief",
        "a",
        "b",
    ]


@given(conversations())
def test_selected_messages_are_accepted_by_providers(talk: list[BaseMessage]) -> None:
    """The system messages stay, in their order."""
    selected = convert_messages_to_form_providers_accept(talk)
    without_system = [m for m in selected if not isinstance(m, SystemMessage)]
    newest = len(without_system) - len(list_pending_exchange(without_system))

    assert find_refusals([HumanMessage("evicted"), *without_system[:newest]], to_answer=False) == []
    assert {m.id for m in without_system} <= {m.id for m in talk} | {None}
    assert all(NO_RESULT in str(m.content) for m in without_system if m.id is None)
    assert [m for m in selected if isinstance(m, SystemMessage)] == [
        m for m in talk if isinstance(m, SystemMessage) and m.text.strip()
    ]


def list_pending_exchange(messages: list[BaseMessage]) -> list[BaseMessage]:
    """Return the call at the end and its results, if some results are missing."""
    results = list(takewhile(lambda m: isinstance(m, ToolMessage), reversed(messages)))
    caller = messages[-len(results) - 1 :][:1]
    called = sum(len(list_call_ids(m)) for m in caller if isinstance(m, AIMessage))
    return [*caller, *results] if called > len(results) else []


MESSAGES = st.sampled_from(
    [
        *(HumanMessage("h"), AIMessage("a"), SystemMessage("s"), SystemMessage("t")),
        *(
            build_calling_message("1"),
            build_calling_message("2", "3"),
            build_result("1"),
            build_result("2"),
            build_result("3"),
        ),
    ]
)


@given(st.lists(MESSAGES, max_size=25), st.integers(1, 6), st.booleans())
def test_window_invariants_hold_for_random_messages(
    added: list[BaseMessage], size: int, first: bool
) -> None:
    """Size, one system message, the newest message, and no result without its call."""
    memory = MessageWindowChatMemory(size, id="m", always_keep_system_message_first=first)
    system = None
    for message in added:
        memory.add(message)
        stored = memory.store.get_messages("m")
        system = message if isinstance(message, SystemMessage) else system
        assert len(stored) <= size
        assert [m for m in stored if isinstance(m, SystemMessage)] == ([system] if system else [])
        is_empty = len(stored) == (system is not None)
        assert message in stored or is_empty
        assert not is_empty or size == 1 or isinstance(message, ToolMessage | SystemMessage)
        open_calls: set[str | None] = set()
        for shown_message in memory.messages():
            if isinstance(shown_message, ToolMessage):
                assert shown_message.tool_call_id in open_calls
                open_calls.discard(shown_message.tool_call_id)
            else:
                assert not open_calls
                open_calls = {c["id"] for c in getattr(shown_message, "tool_calls", [])}


# -- bad input


@pytest.mark.parametrize("invalid_size", [0, -1, True, 1.5, None])
def test_window_size_must_be_a_positive_integer(invalid_size: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_messages is"):
        MessageWindowChatMemory(invalid_size)
    with pytest.raises(ConfigurationError, match="max_tokens is"):
        TokenWindowChatMemory(invalid_size, count_words)


def test_invalid_stores_counters_messages_and_ids_are_refused(
    file_saver: SQLiteCheckpointer,
) -> None:
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
