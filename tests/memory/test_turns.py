"""Reading the messages of a thread, and the memories that are made of its turns."""

from __future__ import annotations

import asyncio
import operator
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.store.memory import InMemoryStore

from perdure.checkpointers import SQLiteCheckpointer
from perdure.effects import arun_operation, run_operation
from perdure.errors import ConfigurationError, UnknownThread
from perdure.memory.conversation import SHORTENED
from perdure.memory.long_term.extractors import (
    Batch,
    Proposal,
    Scope,
    TurnExtractor,
    build_turn_key,
)
from perdure.memory.long_term.records import StoreAdapter
from perdure.memory.thread_messages import (
    ThreadHistory,
    ThreadMessage,
    Watermark,
    parse_time,
    read_history,
)
from perdure.stores.search.text import split_into_chunks
from tests.memory.extraction_threads import build_graph, send_messages, thread_config

MAY = datetime(2024, 5, 1, 10, tzinfo=UTC)


def make_thread_messages(*messages: BaseMessage) -> list[ThreadMessage]:
    return [
        ThreadMessage(message, message.id or "", place, MAY)
        for place, message in enumerate(messages)
    ]


def propose_changes(batch: Batch, **options: Any) -> Proposal:
    scope = Scope(StoreAdapter(InMemoryStore()), ("memories",))
    return run_operation(TurnExtractor(**options).propose_changes(batch, scope))


def extract_texts(*messages: BaseMessage, **options: Any) -> list[str]:
    batch = Batch("t", "c", make_thread_messages(*messages))
    return [message.candidate.text for message in propose_changes(batch, **options).additions]


def message_texts(history: ThreadHistory) -> list[str]:
    return [message.text for message in history.messages]


# -- reading


def test_removed_messages_are_read_at_their_original_position(
    file_saver: SQLiteCheckpointer,
) -> None:
    graph = build_graph(file_saver, answers=False)
    send_messages(graph, "t", "one", "two", RemoveMessage(id="one"), "three")

    history = run_operation(read_history(file_saver, "t"))

    assert message_texts(history) == ["one", "two", "three"]


def test_edited_message_is_read_once_at_first_position_with_new_text(
    file_saver: SQLiteCheckpointer,
) -> None:
    graph = build_graph(file_saver, answers=False)
    send_messages(graph, "t", "one", "two", HumanMessage("ONE", id="one"))

    assert message_texts(run_operation(read_history(file_saver, "t"))) == ["ONE", "two"]


def test_shortened_message_is_read_in_full_length(file_saver: SQLiteCheckpointer) -> None:
    cut = HumanMessage("o", id="one", additional_kwargs={SHORTENED: "cut"})
    send_messages(build_graph(file_saver, answers=False), "t", "one", cut)

    assert message_texts(run_operation(read_history(file_saver, "t"))) == ["one"]


@pytest.mark.parametrize("library", ["perdure", "langgraph"])
def test_read_history_is_same_sync_and_async(library: str, tmp_path: Path) -> None:
    saver: Any = InMemorySaver()
    if library == "perdure":
        saver = SQLiteCheckpointer.open(tmp_path / "a.db")
    graph = build_graph(saver)
    send_messages(graph, "t", "one", "two")

    blocking, awaiting = (
        run_operation(read_history(saver, "t")),
        asyncio.run(arun_operation(read_history(saver, "t"))),
    )

    assert blocking == awaiting
    assert [m.text for m in awaiting.messages] == ["one", "You said one", "two", "You said two"]
    if library == "perdure":
        saver.close()


@pytest.mark.parametrize("library", ["perdure", "langgraph"])
def test_reading_unknown_thread_is_refused_by_name(
    library: str, file_saver: SQLiteCheckpointer
) -> None:
    saver: Any = file_saver if library == "perdure" else InMemorySaver()

    with pytest.raises(UnknownThread, match="'nobody'"):
        run_operation(read_history(saver, "nobody"))


def test_thread_without_messages_channel_is_read_as_empty(file_saver: SQLiteCheckpointer) -> None:
    send_messages(build_graph(file_saver), "t", "one")

    assert message_texts(run_operation(read_history(file_saver, "t", "notes"))) == []


# -- times


def test_message_without_time_has_time_of_its_first_checkpoint(
    file_saver: SQLiteCheckpointer,
) -> None:
    graph = build_graph(file_saver, answers=False)
    names = [f"m{number}" for number in range(40)]  # more checkpoints than are looked at first
    send_messages(graph, "t", *names)
    send_messages(graph, "t", RemoveMessage(id="m3"), "last")
    expected_times: dict[str, datetime | None] = {}
    for info in reversed(file_saver.checkpoints("t")):
        for item in file_saver.history("t", checkpoint_id=info.checkpoint_id):
            expected_times.setdefault(item.value.id, parse_time(info.ts))

    history = run_operation(read_history(file_saver, "t"))

    assert expected_times == {message.id: message.at for message in history.messages}


def test_create_time_of_message_is_used_in_seconds_or_iso_8601() -> None:
    saver = InMemorySaver()
    times = [MAY.timestamp(), "2024-05-01T12:00:00+02:00"]
    for number, at in enumerate(times):
        message = HumanMessage("hi", id=str(number), response_metadata={"create_time": at})
        send_messages(build_graph(saver, answers=False), "t", message)

    assert [message.at for message in run_operation(read_history(saver, "t")).messages] == [
        MAY,
        MAY,
    ]


@pytest.mark.parametrize("value", [None, True, "soon", float("nan"), 1e300, [], {}])
def test_invalid_create_time_is_ignored(value: Any) -> None:
    assert parse_time(value) is None


# -- memories of turns


def test_turn_text_is_speaker_and_words_without_tools_and_blanks() -> None:
    call = {"name": "look", "args": {}, "id": "1"}
    turn_texts = extract_texts(
        SystemMessage("Be brief.", id="s"),
        HumanMessage("I like tea.", id="a", name="Ann"),
        AIMessage("", id="b", tool_calls=[call]),
        ToolMessage("Tea: 3 kinds", id="c", tool_call_id="1"),
        AIMessage("So do I.", id="d"),
        HumanMessage(" ", id="e"),
        HumanMessage("Good.", id="f"),
    )

    assert turn_texts == ["Ann: I like tea.", "assistant: So do I.", "user: Good."]


def test_turn_has_provenance_of_its_message() -> None:
    batch = Batch("t", "c", make_thread_messages(AIMessage("Hello.", id="a", name="Bo")))
    [addition] = propose_changes(batch).additions
    source = addition.candidate.provenance
    assert source is not None

    assert (
        source.thread_id,
        source.checkpoint_id,
        source.message_ids,
        source.actor,
        source.trust,
        source.position,
        source.at,
    ) == ("t", "c", ("a",), "Bo", "assistant", 0, MAY)
    assert (addition.candidate.kind, addition.candidate.role) == ("turn", "assistant")


def test_long_message_becomes_at_most_40_chunks() -> None:
    """The rest is refused."""
    history = HumanMessage(" ".join(f"Thing {number}." for number in range(50)), id="a")
    proposal = propose_changes(Batch("t", "c", make_thread_messages(history)), max_words=2)

    assert [message.candidate.text for message in proposal.additions] == [
        f"user: {text}" for text in split_into_chunks(history.text, 2, 0)[:40]
    ]
    assert len({message.key for message in proposal.additions}) == 40
    assert [(message.change, message.check) for message in proposal.outcomes] == [
        ("refused", "length")
    ]


def test_turn_keys_are_deterministic_and_unique() -> None:
    """A key depends on the thread, the message and the number of the chunk."""
    keys = {
        build_turn_key(*message) for message in [("a", "bc", 0), ("ab", "c", 0), ("a", "bc", 1)]
    }

    assert len(keys) == 3
    assert build_turn_key("a", "bc", 0) in keys
    assert all(re.fullmatch("turn-[0-9a-f]{20}", key) for key in keys)


@pytest.mark.parametrize("max_words", [0, "2"])
def test_invalid_max_words_is_refused(max_words: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected an integer"):
        TurnExtractor(max_words=max_words)


def test_unknown_role_is_trusted_like_assistant() -> None:
    roles = [
        ThreadMessage(ChatMessage(content="hi", role=role), "a").role
        for role in ("critic", "user", "human")
    ]

    assert roles == ["assistant", "user", "user"]


# -- unread messages


@given(st.data())
def test_each_message_of_random_thread_is_unread_exactly_once(data: st.DataObject) -> None:
    """The thread grows, is trimmed and is read at random."""
    mark, count = Watermark(), 0
    read_messages: list[ThreadMessage] = []
    for _ in range(data.draw(st.integers(1, 6))):
        count += data.draw(st.integers(0, 70))
        first_kept = data.draw(st.integers(0, count))  # as many as are not yet read are always left
        first_kept = min(first_kept, len(read_messages))
        messages = [
            ThreadMessage(HumanMessage(str(i), id=str(i)), str(i)) for i in range(first_kept, count)
        ]
        new = mark.find_unread(ThreadHistory("t", None, messages))
        mark = mark.advance(new, None)
        read_messages += new

    assert list(range(count)) == [int(message.id) for message in read_messages]
    assert list(range(count)) == [message.position for message in read_messages]
    assert count == mark.count


def advance_watermark(messages: Sequence[ThreadMessage]) -> Watermark:
    return Watermark().advance(Watermark().assign_thread_positions(messages), None)


def test_edited_message_is_unread_again_at_its_position() -> None:
    """A message that was only shortened is not read again."""
    mark = advance_watermark(make_thread_messages(*(HumanMessage(name, id=name) for name in "abc")))
    cut = HumanMessage("", id="c", additional_kwargs={SHORTENED: "cleared"})
    now = [HumanMessage("a", id="a"), HumanMessage("B", id="b"), cut, HumanMessage("d", id="d")]

    new = mark.find_unread(
        ThreadHistory("t", None, [ThreadMessage(message, message.id or "") for message in now])
    )

    assert [(message.text, message.position) for message in new] == [("B", 1), ("d", 3)]


class StateWithoutIds(TypedDict):
    """A state whose messages no reducer gives ids."""

    messages: Annotated[list[BaseMessage], operator.add]


def test_messages_without_ids_get_stable_distinct_ids() -> None:
    builder: StateGraph[Any, None, Any, Any] = StateGraph(StateWithoutIds)
    builder.add_node("listen", lambda state: {})
    builder.add_edge(START, "listen")
    saver = InMemorySaver()
    history = [HumanMessage("yes"), AIMessage("yes"), HumanMessage("yes")]
    builder.compile(checkpointer=saver).invoke({"messages": history}, thread_config("t"))
    ids = [message.id for message in run_operation(read_history(saver, "t")).messages]

    assert ids == [message.id for message in run_operation(read_history(saver, "t")).messages]
    assert len(set(ids)) == 3
