"""Reading what was said on a thread, and the memories of turns that are made of it."""

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
from perdure.effects import arun, run
from perdure.errors import ConfigurationError, UnknownThread
from perdure.memory.conversation import SHORTENED
from perdure.memory.extractors import Batch, Proposal, Scope, TurnExtractor, build_turn_key
from perdure.memory.records import StoreAdapter
from perdure.memory.thread_messages import (
    ThreadHistory,
    ThreadMessage,
    Watermark,
    parse_time,
    read_history,
)
from perdure.stores.text import split_into_chunks
from tests.memory.threads import build_graph, send_messages, thread_config

MAY = datetime(2024, 5, 1, 10, tzinfo=UTC)


def placed(*messages: BaseMessage) -> list[ThreadMessage]:
    return [ThreadMessage(each, each.id or "", place, MAY) for place, each in enumerate(messages)]


def proposed(batch: Batch, **options: Any) -> Proposal:
    scope = Scope(StoreAdapter(InMemoryStore()), ("memories",))
    return run(TurnExtractor(**options).propose_changes(batch, scope))


def extracted(*messages: BaseMessage, **options: Any) -> list[str]:
    batch = Batch("t", "c", placed(*messages))
    return [each.candidate.text for each in proposed(batch, **options).additions]


def words(history: ThreadHistory) -> list[str]:
    return [each.text for each in history.messages]


# -- reading


def test_everything_said_is_read_whatever_was_removed(file_saver: SQLiteCheckpointer) -> None:
    """Of perdure's checkpointer what left the state is read too, at the place where it was said."""
    graph = build_graph(file_saver, answers=False)
    send_messages(graph, "t", "one", "two", RemoveMessage(id="one"), "three")

    said = run(read_history(file_saver, "t"))

    assert words(said) == ["one", "two", "three"]


def test_an_edited_message_is_read_once_as_it_is_now(file_saver: SQLiteCheckpointer) -> None:
    """A message that was edited stands where it was said first, and says what it says now."""
    graph = build_graph(file_saver, answers=False)
    send_messages(graph, "t", "one", "two", HumanMessage("ONE", id="one"))

    assert words(run(read_history(file_saver, "t"))) == ["ONE", "two"]


def test_what_a_node_cut_is_read_whole(file_saver: SQLiteCheckpointer) -> None:
    """A message that was shortened to save room is read at the length at which it was said."""
    cut = HumanMessage("o", id="one", additional_kwargs={SHORTENED: "cut"})
    send_messages(build_graph(file_saver, answers=False), "t", "one", cut)

    assert words(run(read_history(file_saver, "t"))) == ["one"]


@pytest.mark.parametrize("kept", ["perdure", "langgraph"])
def test_both_doors_read_the_same(kept: str, tmp_path: Path) -> None:
    """Blocking and awaiting give the same, for perdure's checkpointer and for others."""
    saver: Any = InMemorySaver()
    if kept == "perdure":
        saver = SQLiteCheckpointer.open(tmp_path / "a.db")
    graph = build_graph(saver)
    send_messages(graph, "t", "one", "two")

    blocking, awaiting = run(read_history(saver, "t")), asyncio.run(arun(read_history(saver, "t")))

    assert blocking == awaiting
    assert [m.text for m in awaiting.messages] == ["one", "You said one", "two", "You said two"]
    if kept == "perdure":
        saver.close()


@pytest.mark.parametrize("kept", ["perdure", "langgraph"])
def test_a_thread_that_is_not_there_is_named(kept: str, file_saver: SQLiteCheckpointer) -> None:
    """Reading a thread that nobody began says so."""
    saver: Any = file_saver if kept == "perdure" else InMemorySaver()

    with pytest.raises(UnknownThread, match="'nobody'"):
        run(read_history(saver, "nobody"))


def test_a_thread_without_messages_says_nothing(file_saver: SQLiteCheckpointer) -> None:
    """A thread whose channel is empty, or has another name, is read as one without messages."""
    send_messages(build_graph(file_saver), "t", "one")

    assert words(run(read_history(file_saver, "t", "notes"))) == []


# -- times


def test_a_message_has_the_time_of_the_checkpoint_it_came_with(
    file_saver: SQLiteCheckpointer,
) -> None:
    """Without a time of its own, a message was said when the checkpoint came that first had it."""
    graph = build_graph(file_saver, answers=False)
    names = [f"m{number}" for number in range(40)]  # more checkpoints than are looked at first
    send_messages(graph, "t", *names)
    send_messages(graph, "t", RemoveMessage(id="m3"), "last")
    came: dict[str, datetime | None] = {}
    for info in reversed(file_saver.checkpoints("t")):
        for item in file_saver.history("t", checkpoint_id=info.checkpoint_id):
            came.setdefault(item.value.id, parse_time(info.ts))

    said = run(read_history(file_saver, "t"))

    assert came == {each.id: each.at for each in said.messages}


def test_a_message_with_a_time_of_its_own_keeps_it() -> None:
    """An imported message was said when its `create_time` says, in seconds or as ISO 8601."""
    saver = InMemorySaver()
    given = [MAY.timestamp(), "2024-05-01T12:00:00+02:00"]
    for number, at in enumerate(given):
        message = HumanMessage("hi", id=str(number), response_metadata={"create_time": at})
        send_messages(build_graph(saver, answers=False), "t", message)

    assert [each.at for each in run(read_history(saver, "t")).messages] == [MAY, MAY]


@pytest.mark.parametrize("value", [None, True, "soon", float("nan"), 1e300, [], {}])
def test_what_is_no_time_is_passed_over(value: Any) -> None:
    """A `create_time` that is no time is as good as none."""
    assert parse_time(value) is None


# -- memories of turns


def test_a_turn_says_who_says_what() -> None:
    """A memory's text is the speaker and the words; tools, calls and blanks are left out."""
    call = {"name": "look", "args": {}, "id": "1"}
    found = extracted(
        SystemMessage("Be brief.", id="s"),
        HumanMessage("I like tea.", id="a", name="Ann"),
        AIMessage("", id="b", tool_calls=[call]),
        ToolMessage("Tea: 3 kinds", id="c", tool_call_id="1"),
        AIMessage("So do I.", id="d"),
        HumanMessage(" ", id="e"),
        HumanMessage("Good.", id="f"),
    )

    assert found == ["Ann: I like tea.", "assistant: So do I.", "user: Good."]


def test_a_turn_has_its_provenance() -> None:
    """A memory says where it comes from, and whose words it rests on."""
    batch = Batch("t", "c", placed(AIMessage("Hello.", id="a", name="Bo")))
    [addition] = proposed(batch).additions
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


def test_a_long_message_is_kept_in_chunks() -> None:
    """A long message makes a memory for each of its first 40 chunks; the rest is refused."""
    said = HumanMessage(" ".join(f"Thing {number}." for number in range(50)), id="a")
    proposal = proposed(Batch("t", "c", placed(said)), max_words=2)

    assert [each.candidate.text for each in proposal.additions] == [
        f"user: {text}" for text in split_into_chunks(said.text, 2, 0)[:40]
    ]
    assert len({each.key for each in proposal.additions}) == 40
    assert [(each.change, each.check) for each in proposal.outcomes] == [("refused", "length")]


def test_keys_are_the_same_each_time_and_for_no_other() -> None:
    """A key depends on thread, message and piece, and on how they are told apart."""
    keys = {build_turn_key(*each) for each in [("a", "bc", 0), ("ab", "c", 0), ("a", "bc", 1)]}

    assert len(keys) == 3
    assert build_turn_key("a", "bc", 0) in keys
    assert all(re.fullmatch("turn-[0-9a-f]{20}", key) for key in keys)


@pytest.mark.parametrize("max_words", [0, "2"])
def test_wrong_numbers_are_refused(max_words: Any) -> None:
    """An extractor with a number that makes no sense is not made."""
    with pytest.raises(ConfigurationError, match="expected a whole number"):
        TurnExtractor(max_words=max_words)


def test_a_role_that_nobody_knows_is_no_user_s() -> None:
    """Words of a role of one's own are trusted as an assistant's, and no more."""
    roles = [
        ThreadMessage(ChatMessage(content="hi", role=role), "a").role
        for role in ("critic", "user", "human")
    ]

    assert roles == ["assistant", "user", "user"]


# -- what is new


@given(st.data())
def test_each_message_is_new_once(data: st.DataObject) -> None:
    """However a thread grows, is trimmed and is read, each message is formed from exactly once."""
    mark, count = Watermark(), 0
    formed: list[ThreadMessage] = []
    for _ in range(data.draw(st.integers(1, 6))):
        count += data.draw(st.integers(0, 70))
        kept = data.draw(st.integers(0, count))  # as many as are not yet read are always left
        kept = min(kept, len(formed))
        messages = [
            ThreadMessage(HumanMessage(str(i), id=str(i)), str(i)) for i in range(kept, count)
        ]
        new = mark.find_unread(ThreadHistory("t", None, messages))
        mark = mark.advance(new, None)
        formed += new

    assert list(range(count)) == [int(each.id) for each in formed]
    assert list(range(count)) == [each.position for each in formed]
    assert count == mark.count


def advanced(messages: Sequence[ThreadMessage]) -> Watermark:
    return Watermark().advance(Watermark().assign_thread_positions(messages), None)


def test_an_edited_message_is_new_again_at_its_place() -> None:
    """A message that says something else now is formed from again; one that was cut is not."""
    mark = advanced(placed(*(HumanMessage(name, id=name) for name in "abc")))
    cut = HumanMessage("", id="c", additional_kwargs={SHORTENED: "cleared"})
    now = [HumanMessage("a", id="a"), HumanMessage("B", id="b"), cut, HumanMessage("d", id="d")]

    new = mark.find_unread(
        ThreadHistory("t", None, [ThreadMessage(each, each.id or "") for each in now])
    )

    assert [(each.text, each.position) for each in new] == [("B", 1), ("d", 3)]


class Plain(TypedDict):
    """A state whose messages no reducer gives ids."""

    messages: Annotated[list[BaseMessage], operator.add]


def test_messages_without_ids_are_told_apart_by_what_they_say() -> None:
    """Where nothing gives messages ids, the same thread read twice has the same ones."""
    builder: StateGraph[Any, None, Any, Any] = StateGraph(Plain)
    builder.add_node("listen", lambda state: {})
    builder.add_edge(START, "listen")
    saver = InMemorySaver()
    said = [HumanMessage("yes"), AIMessage("yes"), HumanMessage("yes")]
    builder.compile(checkpointer=saver).invoke({"messages": said}, thread_config("t"))
    ids = [each.id for each in run(read_history(saver, "t")).messages]

    assert ids == [each.id for each in run(read_history(saver, "t")).messages]
    assert len(set(ids)) == 3
