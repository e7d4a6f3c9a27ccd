"""`erase()` removes messages from every read and from the raw bytes, and leaves everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    HumanMessage,
    RemoveMessage,
    ToolMessage,
    message_to_dict,
)
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Interrupt, Send

from perdure.checkpointers import SQLiteCheckpointer
from tests.contracts.erased import (
    SECRET,
    Erase,
    Saver,
    both_erase_methods,
    doomed_message,
    human_message,
    read_raw_bytes,
    render_thread,
)
from tests.contracts.puts import (
    checkpoint_id_of,
    config_at,
    put,
    read_channel_values,
    read_history_texts,
    render_with_types,
)


def compile_chat_graph(saver: Saver) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("answer", lambda state: {"messages": [AIMessage(f"{len(state['messages'])}")]})
    builder.add_edge(START, "answer")
    return builder.compile(checkpointer=saver)


# -- values that are removed and values that stay


@both_erase_methods
@pytest.mark.parametrize(
    "input",
    [
        SECRET,
        ("user", SECRET),
        HumanMessage(SECRET),
        HumanMessage(SECRET, id="mine"),
        {"role": "user", "content": SECRET},
        {"type": "human", "content": SECRET, "id": "mine"},
        HumanMessage([{"type": "text", "text": SECRET}]),
    ],
    ids=["text", "pair", "message", "with id", "dict", "dict with id", "blocks"],
)
def test_erase_removes_message_that_was_put_in_any_form(
    saver: Saver, erase: Erase, input: Any
) -> None:
    """The message is removed from every checkpoint, and the graph continues."""
    graph = compile_chat_graph(saver)
    for message in ("hello", input, "bye"):
        messages: Any = message if isinstance(message, list) else [message]
        state = graph.invoke({"messages": messages}, config_at())
    before = state["messages"]
    report = erase(saver, "t", [before[2].id])
    remaining = graph.get_state(config_at()).values["messages"]
    history = saver.history("t")
    after = graph.invoke({"messages": ["more"]}, config_at())["messages"]

    assert SECRET not in render_thread(saver)
    assert SECRET.encode() not in read_raw_bytes(saver)
    assert [*before[:2], *before[3:]] == remaining == [item.value for item in history]
    assert remaining == after[:-2]
    # Postgres overwrites no bytes of a page
    assert (len(report.hashes), report.scrubbed) == (1, isinstance(saver, SQLiteCheckpointer))


def test_erase_keeps_equal_texts_of_other_messages_and_channels(saver: Saver) -> None:
    """An equal message without an id is removed only from inputs. Other messages and texts stay."""
    messages = [human_message("a", "yes"), human_message("b", "yes"), HumanMessage("yes")]
    config = put(saver, {"messages": messages, "answer": "yes", "words": ["user", "yes"]})
    saver.put_writes(config, [("answer", "yes"), ("words", ["user", "yes"])], "one")
    saver.put_writes(
        config, [("messages", [human_message("b", "yes"), {"content": "yes", "role": "ai"}])], "two"
    )
    saver.erase("t", ["a"])
    stored = saver.get_tuple(config)

    assert stored is not None
    assert {
        "messages": messages[1:],
        "answer": "yes",
        "words": ["user", "yes"],
    } == stored.checkpoint["channel_values"]
    assert stored.pending_writes == [
        ("one", "answer", "yes"),
        ("one", "words", ["user", "yes"]),
        ("two", "messages", [human_message("b", "yes")]),
    ]


@both_erase_methods
def test_erase_removes_every_version_of_message_on_every_branch(saver: Saver, erase: Erase) -> None:
    """The versions before and after an edit are removed."""
    first = put(saver, {"messages": [human_message("a", f"{SECRET} one"), human_message("b")]})
    second = put(
        saver, {"messages": [human_message("a", f"{SECRET} two"), human_message("b")]}, first
    )
    fork = put(
        saver, {"messages": [human_message("b"), human_message("a", f"{SECRET} three")]}, first
    )
    put(saver, {"messages": [human_message("b")]}, second)
    report = erase(saver, "t", ["a"])

    # the last checkpoint has the message only in its history
    assert (report.checkpoints, report.items) == (4, 3)
    assert len(report.hashes) == 3
    assert SECRET not in render_thread(saver)
    assert SECRET.encode() not in read_raw_bytes(saver)
    for config in (first, second, fork):
        assert {"messages": [human_message("b")]} == read_channel_values(saver, config)
        assert read_history_texts(saver, checkpoint_id=checkpoint_id_of(config)) == ["says b"]


tool_message_with_artifact = ToolMessage(
    "done", id="b", tool_call_id="c", artifact=[doomed_message, human_message("c")]
)
tool_message_without_artifact = ToolMessage(
    "done", id="b", tool_call_id="c", artifact=[human_message("c")]
)
VALUES = {
    "message": (doomed_message, None),
    "dict": ({"role": "user", "content": SECRET, "id": "a"}, None),
    "message_to_dict": (message_to_dict(doomed_message), None),
    "to_json": (doomed_message.to_json(), None),
    "list": ([doomed_message, human_message("b")], [human_message("b")]),
    "dict of messages": ({"last": doomed_message, "n": 1}, {"n": 1}),
    "nested": (
        {"x": [{"y": (doomed_message, human_message("b"))}]},
        {"x": [{"y": [human_message("b")]}]},
    ),
    "artifact": ([tool_message_with_artifact], [tool_message_without_artifact]),
    "additional_kwargs": (
        AIMessage("x", id="b", additional_kwargs={"read": [message_to_dict(doomed_message)]}),
        AIMessage("x", id="b", additional_kwargs={"read": []}),
    ),
    "within send": (
        [Send("n", {"of": [doomed_message]}), Send("n", {"of": []})],
        [Send("n", {"of": []})],
    ),
    "argument of send": ([Send("n", doomed_message)], []),
    "text of message": ({"topic": SECRET, "of": [SECRET, "x"]}, {"topic": "", "of": ["", "x"]}),
    "interrupt": ([Interrupt({"ask": doomed_message}, id="i")], [Interrupt({}, id="i")]),
    "removal": ([RemoveMessage("a"), human_message("b")], [human_message("b")]),
}


@pytest.mark.parametrize("case", VALUES)
def test_erase_removes_message_within_any_value_and_keeps_rest(saver: Saver, case: str) -> None:
    """The rest of a value does not change."""
    value, expected_value = VALUES[case]
    config = put(
        saver, {"x": value, "messages": [doomed_message]}, metadata={"writes": {"n": {"x": value}}}
    )
    saver.put_writes(config, [("x", value), ("y", 1)], "task")
    put(saver, {"x": "another", "messages": []}, config)
    saver.erase("t", ["a"])
    stored = saver.get_tuple(config)

    assert SECRET not in render_thread(saver)
    assert SECRET.encode() not in read_raw_bytes(saver)
    assert stored is not None
    values = {"messages": []} if expected_value is None else {"x": expected_value, "messages": []}
    writes = (
        [("task", "y", 1)]
        if expected_value is None
        else [("task", "x", expected_value), ("task", "y", 1)]
    )
    expected_config = put(
        saver, values, thread="like", metadata={"writes": {"n": {"x": expected_value}}}
    )
    saver.put_writes(expected_config, [(channel, value) for _, channel, value in writes], "task")
    expected_stored = saver.get_tuple(expected_config)
    assert expected_stored is not None
    for part in values:
        assert render_with_types(
            expected_stored.checkpoint["channel_values"][part]
        ) == render_with_types(stored.checkpoint["channel_values"][part])
    assert values.keys() == stored.checkpoint["channel_values"].keys()
    assert render_with_types(expected_stored.pending_writes) == render_with_types(
        stored.pending_writes
    )
    expected: Any = {} if expected_value is None else expected_stored.metadata["writes"]["n"]  # type: ignore[typeddict-item]
    assert render_with_types(expected) == render_with_types(stored.metadata["writes"]["n"])  # type: ignore[typeddict-item]


def test_task_whose_only_write_is_erased_counts_as_run(saver: Saver) -> None:
    """A task without remaining writes, or whose answer quoted the message, is not run again."""
    config = put(saver, {"messages": [doomed_message]})
    saver.put_writes(config, [("messages", doomed_message)], "one")
    saver.put_writes(config, [("__resume__", [doomed_message, "yes"])], "two")
    saver.put_writes(config, [("__resume__", doomed_message)], "three")
    saver.erase("t", ["a"])
    stored = saver.get_tuple(config)

    assert stored is not None
    assert sorted(stored.pending_writes or [], key=lambda write: write[0]) == [
        ("one", "__no_writes__", None),
        ("three", "__no_writes__", None),
        ("two", "__no_writes__", None),
    ]


def test_erase_reaches_subgraphs_and_no_other_threads(saver: Saver) -> None:
    """The checkpoints of a subgraph belong to the thread."""
    for ns, thread in (("", "t"), ("sub:1", "t"), ("", "other")):
        config = put(
            saver, {"messages": [doomed_message, human_message("b")]}, thread=thread, ns=ns
        )
        saver.put_writes(config, [("messages", [doomed_message])], "task")
    saver.erase("t", ["a"])

    assert SECRET not in render_thread(saver)
    assert {"messages": [human_message("b")]} == read_channel_values(saver, config_at("t", "sub:1"))
    assert {"messages": [doomed_message, human_message("b")]} == read_channel_values(
        saver, config_at("other")
    )


@pytest.mark.parametrize("every", [1, 3, 100])
def test_delta_channel_is_rebuilt_without_erased_message(saver: Saver, every: int) -> None:
    def apply(state: list[AnyMessage], updates: Any) -> list[AnyMessage]:
        for update in updates:
            state = add_messages(state, update)  # type: ignore[assignment, arg-type]
        return state

    channel: Any = DeltaChannel(apply, snapshot_frequency=every)
    State = TypedDict("State", {"messages": Annotated[list[AnyMessage], channel]})  # noqa: UP013
    builder = StateGraph(State)
    answers = iter(range(100))
    builder.add_node("n", lambda _: {"messages": [AIMessage("so", id=f"n{next(answers)}")]})
    builder.add_edge(START, "n")
    graph = builder.compile(checkpointer=saver)
    for message in (human_message("x"), doomed_message, human_message("y")):
        state = graph.invoke({"messages": [message]}, config_at())
    saver.erase("t", ["a"])

    assert SECRET not in render_thread(saver)
    assert SECRET.encode() not in read_raw_bytes(saver)
    expected = [message for message in state["messages"] if message.id != "a"]
    assert expected == graph.get_state(config_at()).values["messages"]
    assert [*expected, human_message("z")] == graph.invoke(
        {"messages": [human_message("z")]}, config_at()
    )["messages"][:-1]


def test_erase_removes_only_named_messages_from_values_with_long_manifests(saver: Saver) -> None:
    """The values have more ranges than a checkpoint stores in its own row."""
    all_messages = [human_message(str(i)) for i in range(600)]
    first = put(saver, {"messages": all_messages})
    second = put(saver, {"messages": all_messages[::3]}, first)
    third = put(saver, {"messages": [*all_messages[::-3], human_message("new")]}, second)
    report = saver.erase("t", [str(i) for i in range(0, 600, 7)])

    def without_erased(messages: list[HumanMessage]) -> list[HumanMessage]:
        return [m for m in messages if m.id == "new" or int(m.id or 0) % 7]

    assert without_erased(all_messages) == read_channel_values(saver, first)["messages"]
    assert without_erased(all_messages[::3]) == read_channel_values(saver, second)["messages"]
    assert (
        without_erased([*all_messages[::-3], human_message("new")])
        == read_channel_values(saver, third)["messages"]
    )
    assert len(without_erased(all_messages)) + 1 == len(saver.history("t"))
    assert 86 == report.items == len(report.hashes)


def test_erase_removes_messages_that_were_stored_as_dicts(saver: Saver) -> None:
    """The history of the channel does not contain the message either."""
    messages = [{"role": "user", "content": f"{SECRET} {i} " * 9, "id": str(i)} for i in range(3)]
    config = None
    for value in messages:
        config = put(saver, {"last": value}, config)
    saver.erase("t", ["0", "1"])
    history = [item.value for item in saver.history("t", channel="last")]

    assert {"last": messages[2]} == read_channel_values(saver, config_at())
    assert messages[2] == dict(history)
    for erased in (0, 1):
        assert f"{SECRET} {erased}".encode() not in read_raw_bytes(saver)
        assert f"{SECRET} {erased}" not in render_thread(saver)


class CustomSerializer(JsonPlusSerializer):
    """A serializer whose encoding is unknown to perdure."""


def test_erase_finds_messages_of_custom_serializer(tmp_path: Path) -> None:
    """With a custom serializer, every item is decoded to find the message."""
    with Saver.open(tmp_path / "x.db", serde=CustomSerializer()) as saver:
        config = put(
            saver,
            {
                "messages": [human_message("b"), doomed_message],
                "x": {"k": [doomed_message] * 9, "l": "m" * 99},
            },
        )
        saver.put_writes(config, [("messages", [HumanMessage(SECRET), human_message("c")])], "task")
        saver.erase("t", ["a"])

        assert {
            "messages": [human_message("b")],
            "x": {"k": [], "l": "m" * 99},
        } == read_channel_values(saver, config_at())
        assert SECRET not in render_thread(saver)
        assert SECRET.encode() not in read_raw_bytes(saver)
