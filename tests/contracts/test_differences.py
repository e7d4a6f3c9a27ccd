"""`differences()` returns the changes between checkpoints; history and checkpoints have pages."""

from __future__ import annotations

import operator
from typing import Annotated, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.errors import UnknownCheckpoint, UnknownThread
from perdure.memory import ChatState
from tests.contracts.puts import checkpoint_id_of, config_at, put


def test_differences_list_nodes_and_messages_of_each_superstep(saver: SQLiteCheckpointer) -> None:
    """Each superstep has the nodes that ran and the messages that were added and removed."""

    def respond(state: ChatState) -> dict[str, list[AIMessage | RemoveMessage]]:
        gone = [RemoveMessage(str(state["messages"][0].id))] if len(state["messages"]) > 2 else []
        return {"messages": [*gone, AIMessage("hello", id=f"a{len(state['messages'])}")]}

    builder = StateGraph(ChatState)
    builder.add_node("respond", respond)
    builder.add_edge(START, "respond")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"messages": [HumanMessage("one", id="h1")]}, config_at())
    graph.invoke({"messages": [HumanMessage("two", id="h2")]}, config_at())

    steps = saver.checkpoints("t")[::-1]
    differences = saver.differences(
        "t", [(change.parent_id, change.checkpoint_id) for change in steps]
    )
    message_changes = [change.channels.get("messages") for change in differences]
    assert [change.ran for change in differences][2::3] == [("respond",), ("respond",)]
    assert [[m.id for m in change.added.values()] for change in message_changes if change] == [
        ["h1"], ["a1"], ["h2"], ["a3"]
    ]  # fmt: skip
    (with_removal,) = [change for change in message_changes if change and change.removed_count]
    assert {at: message.id for at, message in with_removal.removed.items()} == {0: "h1"}


class LogState(TypedDict, total=False):
    """The state of a graph whose nodes append to a log."""

    log: Annotated[list[str], operator.add]


def test_differences_list_nodes_that_ran_between_checkpoints(saver: SQLiteCheckpointer) -> None:
    """A node is listed once for each `Send`. An input does not list the nodes before it."""

    def check(state: LogState) -> LogState:
        if state["log"][-1] == "dies":
            raise KeyboardInterrupt
        return {"log": ["checked"]}

    builder: StateGraph[LogState, None, LogState, LogState] = StateGraph(LogState)
    builder.add_node("plan", lambda state: Command(goto=[Send("tools", state) for _ in range(3)]))
    builder.add_node("tools", lambda state: {"log": state["log"][-1:]})
    builder.add_node("check", check)
    builder.add_edge(START, "plan").add_edge("tools", "check")
    graph = builder.compile(checkpointer=saver)
    for word in ("one", "two"):
        graph.invoke({"log": [word]}, config_at())
    with pytest.raises(KeyboardInterrupt):
        graph.invoke({"log": ["dies"]}, config_at())
    graph.invoke({"log": ["three"]}, config_at())
    steps = saver.checkpoints("t")[::-1]
    pairs = [(info.parent_id, info.checkpoint_id) for info in steps]
    ran = [info.ran for info in saver.differences("t", pairs)]

    ran_in_complete_run = [(), (), ("plan",), ("tools",), ("check",)]
    assert ran == [
        *ran_in_complete_run,
        *ran_in_complete_run,
        *ran_in_complete_run[:4],
        *ran_in_complete_run,
    ]
    assert [info.next for info in steps][:5] == [
        ("__start__",), ("plan",), ("tools", "tools", "tools"), ("check",), ()
    ]  # fmt: skip
    uids = [info.checkpoint_id for info in steps]
    distant_pairs = [(uids[5], uids[8]), (uids[12], uids[15]), (uids[4], uids[4]), (None, uids[3])]
    assert [info.ran for info in saver.differences("t", distant_pairs)] == [
        ("plan", "tools"), ("tools",), (), ("plan", "tools")
    ]  # fmt: skip
    saver.retain(Retention(last=1))
    assert saver.differences("t", pairs[-1:])[0].ran == ()


def test_differences_show_whole_values_and_last_parts_of_lists(saver: SQLiteCheckpointer) -> None:
    """A value that is not a list has its old and new value.

    A list has only its last added parts.
    """
    first = put(saver, {"n": 1, "list": ["a"], "same": "s", "gone": 5})
    second = put(saver, {"n": 2, "list": [*"abcdef"], "same": "s", "new": {}}, first)

    (difference,) = saver.differences(
        "t", [(checkpoint_id_of(first), checkpoint_id_of(second))], limit=2
    )
    assert difference.channels.keys() == {"n", "list", "gone", "new"}
    n, items = difference.channels["n"], difference.channels["list"]
    assert (n.whole, *n.removed.values(), *n.added.values()) == (True, 1, 2)
    assert (items.added, items.added_count, items.removed) == ({4: "e", 5: "f"}, 5, {})
    assert not difference.channels["gone"].added


def test_reordered_list_has_no_added_or_removed_parts(saver: SQLiteCheckpointer) -> None:
    first = put(saver, {"list": [*"abc"]})
    second = put(saver, {"list": [*"cab"]}, first)

    (difference,) = saver.differences("t", [(checkpoint_id_of(first), checkpoint_id_of(second))])
    assert difference.channels["list"].added_count == difference.channels["list"].removed_count == 0


def test_differences_without_earlier_checkpoint_add_everything(saver: SQLiteCheckpointer) -> None:
    uid = checkpoint_id_of(put(saver, {"list": [*"abc"]}))

    assert saver.differences("t", [(None, uid)]) == saver.differences("t", [("gone", uid)])
    with pytest.raises(UnknownCheckpoint, match="no checkpoint 'no'"):
        saver.differences("t", [(None, "no")])
    with pytest.raises(UnknownThread):
        saver.differences("other", [])


def test_pages_end_before_given_item_or_checkpoint(saver: SQLiteCheckpointer) -> None:
    """A page of the history or of checkpoints contains only entries before the given position."""
    config = None
    for n in range(1, 6):
        config = put(saver, {"messages": [f"says {i}" for i in range(n)]}, config)

    whole = saver.history("t")
    assert saver.history("t", ends=(0, 2), before=whole[3].position) == whole[1:3]
    assert saver.history("t", before=99) == []
    listed = saver.checkpoints("t")
    assert saver.checkpoints("t", limit=2, before=listed[1].order) == listed[2:4]
    assert saver.checkpoints("t", before=(1 << 63) - 1) == listed
