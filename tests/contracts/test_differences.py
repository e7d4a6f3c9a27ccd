"""`differences()`: what changed between checkpoints; and pages of history and checkpoints."""

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
from tests.contracts.puts import at, put, uid_of


def test_a_step_of_a_graph(saver: SQLiteCheckpointer) -> None:
    """Each superstep tells the nodes that ran and the messages that came and went."""

    def respond(state: ChatState) -> dict[str, list[AIMessage | RemoveMessage]]:
        gone = [RemoveMessage(str(state["messages"][0].id))] if len(state["messages"]) > 2 else []
        return {"messages": [*gone, AIMessage("hello", id=f"a{len(state['messages'])}")]}

    builder = StateGraph(ChatState)
    builder.add_node("respond", respond)
    builder.add_edge(START, "respond")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"messages": [HumanMessage("one", id="h1")]}, at())
    graph.invoke({"messages": [HumanMessage("two", id="h2")]}, at())

    steps = saver.checkpoints("t")[::-1]
    found = saver.differences("t", [(each.parent_id, each.checkpoint_id) for each in steps])
    said = [each.channels.get("messages") for each in found]
    assert [each.ran for each in found][2::3] == [("respond",), ("respond",)]
    assert [[m.id for m in each.added.values()] for each in said if each] == [
        ["h1"], ["a1"], ["h2"], ["a3"]
    ]  # fmt: skip
    (gone,) = [each for each in said if each and each.removed_count]
    assert {at: message.id for at, message in gone.removed.items()} == {0: "h1"}


class Log(TypedDict, total=False):
    """What nodes say."""

    log: Annotated[list[str], operator.add]


def test_what_ran(saver: SQLiteCheckpointer) -> None:
    """`Send`s name their nodes each time; an input does not name what it came before."""

    def check(state: Log) -> Log:
        if state["log"][-1] == "dies":
            raise KeyboardInterrupt
        return {"log": ["checked"]}

    builder: StateGraph[Log, None, Log, Log] = StateGraph(Log)
    builder.add_node("plan", lambda state: Command(goto=[Send("tools", state) for _ in range(3)]))
    builder.add_node("tools", lambda state: {"log": state["log"][-1:]})
    builder.add_node("check", check)
    builder.add_edge(START, "plan").add_edge("tools", "check")
    graph = builder.compile(checkpointer=saver)
    for word in ("one", "two"):
        graph.invoke({"log": [word]}, at())
    with pytest.raises(KeyboardInterrupt):
        graph.invoke({"log": ["dies"]}, at())
    graph.invoke({"log": ["three"]}, at())
    steps = saver.checkpoints("t")[::-1]
    pairs = [(each.parent_id, each.checkpoint_id) for each in steps]
    ran = [each.ran for each in saver.differences("t", pairs)]

    whole = [(), (), ("plan",), ("tools",), ("check",)]
    assert ran == [*whole, *whole, *whole[:4], *whole]
    assert [each.next for each in steps][:5] == [
        ("__start__",), ("plan",), ("tools", "tools", "tools"), ("check",), ()
    ]  # fmt: skip
    uids = [each.checkpoint_id for each in steps]
    between = [(uids[5], uids[8]), (uids[12], uids[15]), (uids[4], uids[4]), (None, uids[3])]
    assert [each.ran for each in saver.differences("t", between)] == [
        ("plan", "tools"), ("tools",), (), ("plan", "tools")
    ]  # fmt: skip
    saver.retain(Retention(last=1))
    assert saver.differences("t", pairs[-1:])[0].ran == ()


def test_values_and_long_lists(saver: SQLiteCheckpointer) -> None:
    """A value stored whole is told as it was and is; of a list only the last parts."""
    first = put(saver, {"n": 1, "list": ["a"], "same": "s", "gone": 5})
    second = put(saver, {"n": 2, "list": [*"abcdef"], "same": "s", "new": {}}, first)

    (found,) = saver.differences("t", [(uid_of(first), uid_of(second))], limit=2)
    assert found.channels.keys() == {"n", "list", "gone", "new"}
    n, items = found.channels["n"], found.channels["list"]
    assert (n.whole, *n.removed.values(), *n.added.values()) == (True, 1, 2)
    assert (items.added, items.added_count, items.removed) == ({4: "e", 5: "f"}, 5, {})
    assert not found.channels["gone"].added


def test_a_new_order(saver: SQLiteCheckpointer) -> None:
    first = put(saver, {"list": [*"abc"]})
    second = put(saver, {"list": [*"cab"]}, first)

    (found,) = saver.differences("t", [(uid_of(first), uid_of(second))])
    assert found.channels["list"].added_count == found.channels["list"].removed_count == 0


def test_without_the_earlier_checkpoint_all_is_new(saver: SQLiteCheckpointer) -> None:
    uid = uid_of(put(saver, {"list": [*"abc"]}))

    assert saver.differences("t", [(None, uid)]) == saver.differences("t", [("gone", uid)])
    with pytest.raises(UnknownCheckpoint, match="no checkpoint 'no'"):
        saver.differences("t", [(None, "no")])
    with pytest.raises(UnknownThread):
        saver.differences("other", [])


def test_pages(saver: SQLiteCheckpointer) -> None:
    """The page before an item or a checkpoint ends where that one begins."""
    config = None
    for n in range(1, 6):
        config = put(saver, {"messages": [f"says {i}" for i in range(n)]}, config)

    whole = saver.history("t")
    assert saver.history("t", ends=(0, 2), before=whole[3].position) == whole[1:3]
    assert saver.history("t", before=99) == []
    listed = saver.checkpoints("t")
    assert saver.checkpoints("t", limit=2, before=listed[1].order) == listed[2:4]
    assert saver.checkpoints("t", before=(1 << 63) - 1) == listed
