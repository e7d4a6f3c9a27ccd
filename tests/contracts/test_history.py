"""`history()`: everything that was said on the way, and what of it the model is still shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    ToolMessage,
)
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from pydantic import BaseModel

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.errors import UnknownCheckpoint, UnknownThread
from perdure.memory import ChatState, Keep
from tests.contracts.puts import (
    checkpoint_id_of,
    config_at,
    put,
    read_channel_values,
    read_history_texts,
    texts_and_seen,
)


class Facts(TypedDict):
    facts: Annotated[dict[str, Any], lambda old, new: {**old, **new}]


def chat(saver: SQLiteCheckpointer) -> Any:
    builder = StateGraph(ChatState)
    builder.add_node("idle", lambda state: {})
    builder.add_edge(START, "idle")
    builder.add_edge("idle", END)
    return builder.compile(checkpointer=saver)


def say(*ids: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(f"says {i}", id=i) for i in ids]}


def test_removed_messages_stay_readable(saver: SQLiteCheckpointer) -> None:
    """What RemoveMessage took out is told, in its place, as no longer seen."""
    graph = chat(saver)
    graph.invoke(say("a", "b", "c"), config_at())
    graph.invoke({"messages": [RemoveMessage("b"), HumanMessage("says d", id="d")]}, config_at())

    assert texts_and_seen(saver.history("t")) == [
        ("says a", True),
        ("says b", False),
        ("says c", True),
        ("says d", True),
    ]


def test_removing_all_leaves_everything_to_read(saver: SQLiteCheckpointer) -> None:
    """An emptied channel has its history, all of it unseen."""
    graph = chat(saver)
    graph.invoke(say("a", "b"), config_at())
    graph.invoke({"messages": [RemoveMessage(REMOVE_ALL_MESSAGES)]}, config_at())

    assert texts_and_seen(saver.history("t")) == [("says a", False), ("says b", False)]


def test_trimmed_messages_stay_readable(saver: SQLiteCheckpointer) -> None:
    """What a Keep cut off is told, and so is what later keeps cut off."""
    graph = chat(saver)
    graph.invoke(say("a", "b", "c"), config_at())
    graph.invoke({"messages": Keep(start=-1)}, config_at())
    graph.invoke({"messages": [HumanMessage("says d", id="d"), Keep(start=-1)]}, config_at())

    assert texts_and_seen(saver.history("t")) == [
        ("says a", False),
        ("says b", False),
        ("says c", False),
        ("says d", True),
    ]


def test_both_versions_of_a_replaced_message(saver: SQLiteCheckpointer) -> None:
    """A message replaced under its id is told as it was and as it is."""
    graph = chat(saver)
    graph.invoke(say("a", "b"), config_at())
    graph.invoke({"messages": [HumanMessage("says otherwise", id="a")]}, config_at())

    assert texts_and_seen(saver.history("t")) == [
        ("says a", False),
        ("says b", True),
        ("says otherwise", True),
    ]


def test_a_message_that_comes_back_is_seen_again(saver: SQLiteCheckpointer) -> None:
    """The same content is one item, wherever and however often it stands."""
    first = put(saver, say("a", "b", "c"))
    second = put(saver, say("c"), first)
    third = put(saver, say("c", "a"), second)

    assert texts_and_seen(saver.history("t", checkpoint_id=checkpoint_id_of(third))) == [
        ("says a", True),
        ("says b", False),
        ("says c", True),
    ]


def test_a_message_said_twice_at_once_is_one_item(saver: SQLiteCheckpointer) -> None:
    """Equal elements of one value are one item, at one position."""
    put(saver, {"messages": [HumanMessage("yes"), AIMessage("no"), HumanMessage("yes")]})
    found = saver.history("t")

    assert texts_and_seen(found) == [("yes", True), ("no", True)]
    assert len({item.position for item in found}) == len(found)


def test_positions_grow(saver: SQLiteCheckpointer) -> None:
    """Positions follow the order in which things were said, also past removals and prunes."""
    first = put(saver, say("a", "b"))
    before = saver.history("t")
    second = put(saver, say("b", "c"), first)
    saver.prune(["t"])
    put(saver, say("d"), second)
    after = saver.history("t")

    assert before[0].position < before[1].position < after[2].position < after[3].position
    assert [item.position for item in before] == [item.position for item in after[:2]]


def test_dict_channels(saver: SQLiteCheckpointer) -> None:
    """A dict's pairs are told, the replaced and the removed as no longer seen."""
    long = "x" * 200
    first = put(saver, {"facts": {"name": "Ann", "story": long}})
    second = put(saver, {"facts": {"name": "Bea", "story": long}}, first)
    put(saver, {"facts": {"story": long}}, second)

    assert [(["name", "Ann"], False), (["story", long], True), (["name", "Bea"], False)] == [
        (list(item.value), item.seen) for item in saver.history("t", channel="facts")
    ]


def test_dict_items_are_pairs(saver: SQLiteCheckpointer) -> None:
    """An item of a dict is `(key, value)`, as `HistoryItem` says."""
    put(saver, {"facts": {"story": "x" * 200}})

    assert [item.value for item in saver.history("t", channel="facts")] == [("story", "x" * 200)]


@pytest.mark.parametrize(
    ("channel", "values", "expected"),
    [
        ("notes", [["a"], ["a", "b"], ["b"]], [("a", False), ("b", True)]),
        ("notes", [["a"], []], [("a", False)]),
        ("notes", [["a"], ["a", "x" * 200]], [("a", True), ("x" * 200, True)]),
        ("notes", [["x" * 200], ["a"]], [("x" * 200, False), ("a", True)]),
    ],
)
def test_short_lists_have_a_history_too(
    saver: SQLiteCheckpointer, channel: str, values: list[Any], expected: list[Any]
) -> None:
    """How much a list holds makes no difference to what is told of it."""
    last = None
    for value in values:
        last = put(saver, {channel: value}, last)

    assert expected == [(item.value, item.seen) for item in saver.history("t", channel=channel)]


def test_counts_of_short_lists(saver: SQLiteCheckpointer) -> None:
    """`checkpoints()` counts the items of each list or dict, whatever they take."""
    put(saver, {"notes": ["a", "b"], "facts": {"k": 1}, "n": 3, **say("a")})

    assert saver.checkpoints("t")[0].counts == {"notes": 2, "facts": 1, "messages": 1}


def test_history_at_an_old_checkpoint(saver: SQLiteCheckpointer) -> None:
    """The way to a checkpoint ends there: nothing said later is told."""
    first = put(saver, say("a", "b"))
    second = put(saver, say("b"), first)
    put(saver, say("b", "c"), second)

    assert texts_and_seen(saver.history("t", checkpoint_id=checkpoint_id_of(first))) == [
        ("says a", True),
        ("says b", True),
    ]
    assert texts_and_seen(saver.history("t", checkpoint_id=checkpoint_id_of(second))) == [
        ("says a", False),
        ("says b", True),
    ]


def test_history_of_a_fork(saver: SQLiteCheckpointer) -> None:
    """Each branch tells what was said on its own way; without an id the other one's is marked."""
    root = put(saver, say("a"))
    left = put(saver, say("a", "b"), root)
    right = put(saver, say("c"), root)

    assert read_history_texts(saver, checkpoint_id=checkpoint_id_of(left)) == ["says a", "says b"]
    assert read_history_texts(saver, checkpoint_id=checkpoint_id_of(right)) == ["says a", "says c"]
    assert [(i.value.content, i.seen, i.branch) for i in saver.history("t")] == [
        ("says a", False, False),
        ("says b", False, True),
        ("says c", True, False),
    ]
    assert [i.branch for i in saver.history("t", checkpoint_id=checkpoint_id_of(left))] == [
        False,
        False,
    ]


def test_history_outlives_its_checkpoints(saver: SQLiteCheckpointer) -> None:
    """Pruning takes checkpoints, not what was said; retention without history takes both."""
    first = put(saver, say("a"))
    second = put(saver, say("b"), first)
    put(saver, say("c"), second)
    saver.prune(["t"])
    pruned = texts_and_seen(saver.history("t"))
    report = saver.retain(Retention(last=1, history=False))

    assert pruned == [("says a", False), ("says b", False), ("says c", True)]
    assert texts_and_seen(saver.history("t")) == [("says c", True)]
    assert report.items == 2
    assert say("c") == read_channel_values(saver, config_at())


def test_history_of_a_channel_that_went_away(saver: SQLiteCheckpointer) -> None:
    """A channel without a value keeps its history; one that never was has none."""
    first = put(saver, say("a"))
    put(saver, {"n": 1}, first)

    assert texts_and_seen(saver.history("t")) == [("says a", False)]
    assert texts_and_seen(saver.history("t", channel="never")) == []


def test_history_by_namespace(saver: SQLiteCheckpointer) -> None:
    """Namespaces of one thread tell their own, also of what both hold."""
    put(saver, say("a", "b"))
    put(saver, say("b", "c"), ns="sub")

    assert read_history_texts(saver) == ["says a", "says b"]
    assert read_history_texts(saver, checkpoint_ns="sub") == ["says b", "says c"]


def test_history_of_a_long_broken_list(saver: SQLiteCheckpointer) -> None:
    """A value in hundreds of pieces, past what a manifest holds in place, is told in order."""
    everything = [str(i) for i in range(600)]
    first = put(saver, say(*everything))
    put(saver, say(*everything[::2]), first)
    found = saver.history("t")

    assert [(f"says {i}", i % 2 == 0) for i in range(600)] == texts_and_seen(found)
    assert say(*everything[::2]) == read_channel_values(saver, config_at())


class Note(BaseModel):
    text: str


ODD: dict[str, Callable[[Any], list[BaseMessage]]] = {
    "text in a call": lambda text: [
        AIMessage("", tool_calls=[{"name": "f", "args": {"q": text}, "id": "c1"}]),
        ToolMessage("found", tool_call_id="c1"),
    ],
    "text as content": lambda text: [AIMessage(text), AIMessage([{"type": "text", "text": text}])],
    "text in metadata": lambda text: [
        AIMessage("yes", response_metadata={"m": text}, additional_kwargs={"k": text})
    ],
    "an artifact": lambda text: [
        ToolMessage("found", tool_call_id="c1", artifact=defaultdict(list, {"a": [text]}))
    ],
    "a model": lambda text: [AIMessage("yes", additional_kwargs={"k": Note(text=text)})],
    "a lone surrogate": lambda text: [AIMessage(f"{text}\ud83d"), AIMessage([f"{text}\ud83d"])],
}


@pytest.mark.parametrize("name", ODD)
def test_what_comes_back_plainer_is_told_once(saver: SQLiteCheckpointer, name: str) -> None:
    """A message that is stored as what comes back is no other message in the next turn."""

    def answer(state: Any) -> dict[str, Any]:
        return {"messages": ODD[name](state["messages"][-1].text)}

    builder = StateGraph(ChatState).add_node("answer", answer).add_node("idle", lambda _: {})
    builder.add_edge(START, "answer").add_edge("answer", "idle")
    graph: Any = builder.compile(checkpointer=saver)
    for i in ("a", "b"):
        graph.invoke(say(i), config_at())
    (thread,) = saver.threads()
    history = saver.history("t")

    assert graph.get_state(config_at()).values["messages"] == [item.value for item in history]
    assert all(item.seen for item in history)
    assert thread.items == len(history) == 2 + 2 * len(ODD[name]("x"))


def test_unknown_threads_and_checkpoints(saver: SQLiteCheckpointer) -> None:
    """What is not there is named."""
    put(saver, say("a"))

    with pytest.raises(UnknownThread, match="nobody"):
        saver.history("nobody")
    with pytest.raises(UnknownThread, match="sub"):
        saver.history("t", checkpoint_ns="sub")
    with pytest.raises(UnknownCheckpoint, match="no-such"):
        saver.history("t", checkpoint_id="no-such")


def test_history_shares_nothing(saver: SQLiteCheckpointer) -> None:
    """Changing what was told changes neither the history nor the state."""
    put(saver, {"messages": [HumanMessage("says a", id="a", additional_kwargs={"k": [1]})]})
    found = saver.history("t")[0].value
    found.content = "changed"
    found.additional_kwargs["k"].append(2)

    assert texts_and_seen(saver.history("t")) == [("says a", True)]
    assert read_channel_values(saver, config_at())["messages"][0].additional_kwargs == {"k": [1]}
