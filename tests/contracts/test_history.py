"""`history()` returns every item on the way to a checkpoint, and whether the state still has it."""

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


class FactsState(TypedDict):
    facts: Annotated[dict[str, Any], lambda old, new: {**old, **new}]


def compile_chat_graph(saver: SQLiteCheckpointer) -> Any:
    builder = StateGraph(ChatState)
    builder.add_node("idle", lambda state: {})
    builder.add_edge(START, "idle")
    builder.add_edge("idle", END)
    return builder.compile(checkpointer=saver)


def make_messages(*ids: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(f"says {i}", id=i) for i in ids]}


def test_removed_message_stays_in_history_as_unseen(saver: SQLiteCheckpointer) -> None:
    graph = compile_chat_graph(saver)
    graph.invoke(make_messages("a", "b", "c"), config_at())
    graph.invoke({"messages": [RemoveMessage("b"), HumanMessage("says d", id="d")]}, config_at())

    assert texts_and_seen(saver.history("t")) == [
        ("says a", True),
        ("says b", False),
        ("says c", True),
        ("says d", True),
    ]


def test_history_has_all_messages_after_all_were_removed(saver: SQLiteCheckpointer) -> None:
    graph = compile_chat_graph(saver)
    graph.invoke(make_messages("a", "b"), config_at())
    graph.invoke({"messages": [RemoveMessage(REMOVE_ALL_MESSAGES)]}, config_at())

    assert texts_and_seen(saver.history("t")) == [("says a", False), ("says b", False)]


def test_trimmed_messages_stay_in_history_as_unseen(saver: SQLiteCheckpointer) -> None:
    """Messages that one or several `Keep` updates cut off stay in the history."""
    graph = compile_chat_graph(saver)
    graph.invoke(make_messages("a", "b", "c"), config_at())
    graph.invoke({"messages": Keep(start=-1)}, config_at())
    graph.invoke({"messages": [HumanMessage("says d", id="d"), Keep(start=-1)]}, config_at())

    assert texts_and_seen(saver.history("t")) == [
        ("says a", False),
        ("says b", False),
        ("says c", False),
        ("says d", True),
    ]


def test_history_has_both_versions_of_replaced_message(saver: SQLiteCheckpointer) -> None:
    graph = compile_chat_graph(saver)
    graph.invoke(make_messages("a", "b"), config_at())
    graph.invoke({"messages": [HumanMessage("says otherwise", id="a")]}, config_at())

    assert texts_and_seen(saver.history("t")) == [
        ("says a", False),
        ("says b", True),
        ("says otherwise", True),
    ]


def test_message_that_is_put_again_is_one_item_and_seen(saver: SQLiteCheckpointer) -> None:
    """Equal content is one item, at any place and any number of times."""
    first = put(saver, make_messages("a", "b", "c"))
    second = put(saver, make_messages("c"), first)
    third = put(saver, make_messages("c", "a"), second)

    assert texts_and_seen(saver.history("t", checkpoint_id=checkpoint_id_of(third))) == [
        ("says a", True),
        ("says b", False),
        ("says c", True),
    ]


def test_equal_messages_in_one_value_are_one_item(saver: SQLiteCheckpointer) -> None:
    put(saver, {"messages": [HumanMessage("yes"), AIMessage("no"), HumanMessage("yes")]})
    items = saver.history("t")

    assert texts_and_seen(items) == [("yes", True), ("no", True)]
    assert len({item.position for item in items}) == len(items)


def test_positions_increase_across_removals_and_prunes(saver: SQLiteCheckpointer) -> None:
    """Positions have the order in which items were stored, and do not change."""
    first = put(saver, make_messages("a", "b"))
    before = saver.history("t")
    second = put(saver, make_messages("b", "c"), first)
    saver.prune(["t"])
    put(saver, make_messages("d"), second)
    after = saver.history("t")

    assert before[0].position < before[1].position < after[2].position < after[3].position
    assert [item.position for item in before] == [item.position for item in after[:2]]


def test_history_of_dict_has_replaced_and_removed_pairs_as_unseen(
    saver: SQLiteCheckpointer,
) -> None:
    long = "x" * 200
    first = put(saver, {"facts": {"name": "Ann", "story": long}})
    second = put(saver, {"facts": {"name": "Bea", "story": long}}, first)
    put(saver, {"facts": {"story": long}}, second)

    assert [(["name", "Ann"], False), (["story", long], True), (["name", "Bea"], False)] == [
        (list(item.value), item.seen) for item in saver.history("t", channel="facts")
    ]


def test_history_items_of_dict_are_key_value_tuples(saver: SQLiteCheckpointer) -> None:
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
def test_history_of_short_list_has_all_items(
    saver: SQLiteCheckpointer, channel: str, values: list[Any], expected: list[Any]
) -> None:
    """The size of a list makes no difference to its history."""
    config = None
    for value in values:
        config = put(saver, {channel: value}, config)

    assert expected == [(item.value, item.seen) for item in saver.history("t", channel=channel)]


def test_checkpoint_counts_items_of_short_lists_and_dicts(saver: SQLiteCheckpointer) -> None:
    put(saver, {"notes": ["a", "b"], "facts": {"k": 1}, "n": 3, **make_messages("a")})

    assert saver.checkpoints("t")[0].counts == {"notes": 2, "facts": 1, "messages": 1}


def test_history_at_old_checkpoint_has_no_later_items(saver: SQLiteCheckpointer) -> None:
    first = put(saver, make_messages("a", "b"))
    second = put(saver, make_messages("b"), first)
    put(saver, make_messages("b", "c"), second)

    assert texts_and_seen(saver.history("t", checkpoint_id=checkpoint_id_of(first))) == [
        ("says a", True),
        ("says b", True),
    ]
    assert texts_and_seen(saver.history("t", checkpoint_id=checkpoint_id_of(second))) == [
        ("says a", False),
        ("says b", True),
    ]


def test_history_of_fork_has_own_branch_and_marks_the_other(saver: SQLiteCheckpointer) -> None:
    """Without a checkpoint id, items of the other branch are included and marked."""
    root = put(saver, make_messages("a"))
    left = put(saver, make_messages("a", "b"), root)
    right = put(saver, make_messages("c"), root)

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


def test_history_survives_prune_but_not_retain_without_history(saver: SQLiteCheckpointer) -> None:
    first = put(saver, make_messages("a"))
    second = put(saver, make_messages("b"), first)
    put(saver, make_messages("c"), second)
    saver.prune(["t"])
    history_after_prune = texts_and_seen(saver.history("t"))
    report = saver.retain(Retention(last=1, history=False))

    assert history_after_prune == [("says a", False), ("says b", False), ("says c", True)]
    assert texts_and_seen(saver.history("t")) == [("says c", True)]
    assert report.items == 2
    assert make_messages("c") == read_channel_values(saver, config_at())


def test_channel_without_value_keeps_its_history(saver: SQLiteCheckpointer) -> None:
    """A channel that never had a value has an empty history."""
    first = put(saver, make_messages("a"))
    put(saver, {"n": 1}, first)

    assert texts_and_seen(saver.history("t")) == [("says a", False)]
    assert texts_and_seen(saver.history("t", channel="never")) == []


def test_each_namespace_has_its_own_history(saver: SQLiteCheckpointer) -> None:
    """A message that two namespaces share is in both histories."""
    put(saver, make_messages("a", "b"))
    put(saver, make_messages("b", "c"), ns="sub")

    assert read_history_texts(saver) == ["says a", "says b"]
    assert read_history_texts(saver, checkpoint_ns="sub") == ["says b", "says c"]


def test_history_of_list_with_many_ranges_is_in_order(saver: SQLiteCheckpointer) -> None:
    """The value has more ranges than a checkpoint stores in its own row."""
    all_ids = [str(i) for i in range(600)]
    first = put(saver, make_messages(*all_ids))
    put(saver, make_messages(*all_ids[::2]), first)
    history = saver.history("t")

    assert [(f"says {i}", i % 2 == 0) for i in range(600)] == texts_and_seen(history)
    assert make_messages(*all_ids[::2]) == read_channel_values(saver, config_at())


class Note(BaseModel):
    text: str


UNUSUAL_MESSAGES: dict[str, Callable[[Any], list[BaseMessage]]] = {
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


@pytest.mark.parametrize("kind", UNUSUAL_MESSAGES)
def test_message_that_is_decoded_differently_is_stored_once(
    saver: SQLiteCheckpointer, kind: str
) -> None:
    """A message that differs from its decoded form is not stored again in the next run."""

    def answer(state: Any) -> dict[str, Any]:
        return {"messages": UNUSUAL_MESSAGES[kind](state["messages"][-1].text)}

    builder = StateGraph(ChatState).add_node("answer", answer).add_node("idle", lambda _: {})
    builder.add_edge(START, "answer").add_edge("answer", "idle")
    graph: Any = builder.compile(checkpointer=saver)
    for i in ("a", "b"):
        graph.invoke(make_messages(i), config_at())
    (thread,) = saver.threads()
    history = saver.history("t")

    assert graph.get_state(config_at()).values["messages"] == [item.value for item in history]
    assert all(item.seen for item in history)
    assert thread.items == len(history) == 2 + 2 * len(UNUSUAL_MESSAGES[kind]("x"))


def test_history_of_unknown_thread_or_checkpoint_raises_error_with_its_id(
    saver: SQLiteCheckpointer,
) -> None:
    put(saver, make_messages("a"))

    with pytest.raises(UnknownThread, match="nobody"):
        saver.history("nobody")
    with pytest.raises(UnknownThread, match="sub"):
        saver.history("t", checkpoint_ns="sub")
    with pytest.raises(UnknownCheckpoint, match="no-such"):
        saver.history("t", checkpoint_id="no-such")


def test_changing_returned_item_does_not_change_history_or_state(saver: SQLiteCheckpointer) -> None:
    put(saver, {"messages": [HumanMessage("says a", id="a", additional_kwargs={"k": [1]})]})
    message = saver.history("t")[0].value
    message.content = "changed"
    message.additional_kwargs["k"].append(2)

    assert texts_and_seen(saver.history("t")) == [("says a", True)]
    assert read_channel_values(saver, config_at())["messages"][0].additional_kwargs == {"k": [1]}
