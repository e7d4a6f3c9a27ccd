"""`erase()`: messages are gone from every read and from the raw bytes, and all else stays."""

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


def chat(saver: Saver) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("answer", lambda state: {"messages": [AIMessage(f"{len(state['messages'])}")]})
    builder.add_edge(START, "answer")
    return builder.compile(checkpointer=saver)


# -- what goes and what stays


@both_erase_methods
@pytest.mark.parametrize(
    "said",
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
def test_a_conversation_without_a_message(saver: Saver, erase: Erase, said: Any) -> None:
    """However it was put in, it is gone from every checkpoint, and the graph goes on."""
    graph = chat(saver)
    for word in ("hello", said, "bye"):
        given_: Any = word if isinstance(word, list) else [word]
        state = graph.invoke({"messages": given_}, config_at())
    before = state["messages"]
    report = erase(saver, "t", [before[2].id])
    left = graph.get_state(config_at()).values["messages"]
    history = saver.history("t")
    after = graph.invoke({"messages": ["more"]}, config_at())["messages"]

    assert SECRET not in render_thread(saver)
    assert SECRET.encode() not in read_raw_bytes(saver)
    assert [*before[:2], *before[3:]] == left == [item.value for item in history]
    assert left == after[:-2]
    # Postgres overwrites no bytes of a page
    assert (len(report.hashes), report.scrubbed) == (1, isinstance(saver, SQLiteCheckpointer))


def test_what_it_says_elsewhere_stays(saver: Saver) -> None:
    """Without an id, only what is put in goes for saying the same; other messages, texts, stay."""
    same = [human_message("a", "yes"), human_message("b", "yes"), HumanMessage("yes")]
    config = put(saver, {"messages": same, "answer": "yes", "words": ["user", "yes"]})
    saver.put_writes(config, [("answer", "yes"), ("words", ["user", "yes"])], "one")
    saver.put_writes(
        config, [("messages", [human_message("b", "yes"), {"content": "yes", "role": "ai"}])], "two"
    )
    saver.erase("t", ["a"])
    found = saver.get_tuple(config)

    assert found is not None
    assert {"messages": same[1:], "answer": "yes", "words": ["user", "yes"]} == found.checkpoint[
        "channel_values"
    ]
    assert found.pending_writes == [
        ("one", "answer", "yes"),
        ("one", "words", ["user", "yes"]),
        ("two", "messages", [human_message("b", "yes")]),
    ]


@both_erase_methods
def test_every_version_goes(saver: Saver, erase: Erase) -> None:
    """What was said under the id before and after an edit, on every branch."""
    first = put(saver, {"messages": [human_message("a", f"{SECRET} one"), human_message("b")]})
    second = put(
        saver, {"messages": [human_message("a", f"{SECRET} two"), human_message("b")]}, first
    )
    fork = put(
        saver, {"messages": [human_message("b"), human_message("a", f"{SECRET} three")]}, first
    )
    put(saver, {"messages": [human_message("b")]}, second)
    report = erase(saver, "t", ["a"])

    assert (report.checkpoints, report.items) == (4, 3)  # the last one only in its history
    assert len(report.hashes) == 3
    assert SECRET not in render_thread(saver)
    assert SECRET.encode() not in read_raw_bytes(saver)
    for config in (first, second, fork):
        assert {"messages": [human_message("b")]} == read_channel_values(saver, config)
        assert read_history_texts(saver, checkpoint_id=checkpoint_id_of(config)) == ["says b"]


tool = ToolMessage("done", id="b", tool_call_id="c", artifact=[doomed_message, human_message("c")])
clean = ToolMessage("done", id="b", tool_call_id="c", artifact=[human_message("c")])
VALUES = {
    "one": (doomed_message, None),
    "dict": ({"role": "user", "content": SECRET, "id": "a"}, None),
    "dumped": (message_to_dict(doomed_message), None),
    "constructor": (doomed_message.to_json(), None),
    "list": ([doomed_message, human_message("b")], [human_message("b")]),
    "mapping": ({"last": doomed_message, "n": 1}, {"n": 1}),
    "deep": (
        {"x": [{"y": (doomed_message, human_message("b"))}]},
        {"x": [{"y": [human_message("b")]}]},
    ),
    "artifact": ([tool], [clean]),
    "kwargs": (
        AIMessage("x", id="b", additional_kwargs={"read": [message_to_dict(doomed_message)]}),
        AIMessage("x", id="b", additional_kwargs={"read": []}),
    ),
    "send": ([Send("n", {"of": [doomed_message]}), Send("n", {"of": []})], [Send("n", {"of": []})]),
    "send it": ([Send("n", doomed_message)], []),
    "content": ({"topic": SECRET, "of": [SECRET, "x"]}, {"topic": "", "of": ["", "x"]}),
    "interrupt": ([Interrupt({"ask": doomed_message}, id="i")], [Interrupt({}, id="i")]),
    "removal": ([RemoveMessage("a"), human_message("b")], [human_message("b")]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_hold_it(saver: Saver, name: str) -> None:
    """Wherever within a value it is, it goes, and the rest of the value is what it was."""
    value, left = VALUES[name]
    config = put(
        saver, {"x": value, "messages": [doomed_message]}, metadata={"writes": {"n": {"x": value}}}
    )
    saver.put_writes(config, [("x", value), ("y", 1)], "task")
    put(saver, {"x": "another", "messages": []}, config)
    saver.erase("t", ["a"])
    found = saver.get_tuple(config)

    assert SECRET not in render_thread(saver)
    assert SECRET.encode() not in read_raw_bytes(saver)
    assert found is not None
    values = {"messages": []} if left is None else {"x": left, "messages": []}
    writes = [("task", "y", 1)] if left is None else [("task", "x", left), ("task", "y", 1)]
    same = put(saver, values, thread="like", metadata={"writes": {"n": {"x": left}}})
    saver.put_writes(same, [(channel, value) for _, channel, value in writes], "task")
    like = saver.get_tuple(same)
    assert like is not None
    for part in values:
        assert render_with_types(like.checkpoint["channel_values"][part]) == render_with_types(
            found.checkpoint["channel_values"][part]
        )
    assert values.keys() == found.checkpoint["channel_values"].keys()
    assert render_with_types(like.pending_writes) == render_with_types(found.pending_writes)
    expected: Any = {} if left is None else like.metadata["writes"]["n"]  # type: ignore[typeddict-item]
    assert render_with_types(expected) == render_with_types(found.metadata["writes"]["n"])  # type: ignore[typeddict-item]


def test_a_task_that_wrote_nothing_else_has_run(saver: Saver) -> None:
    """A task whose only write goes is not run again, nor one whose answer quoted the message."""
    config = put(saver, {"messages": [doomed_message]})
    saver.put_writes(config, [("messages", doomed_message)], "one")
    saver.put_writes(config, [("__resume__", [doomed_message, "yes"])], "two")
    saver.put_writes(config, [("__resume__", doomed_message)], "three")
    saver.erase("t", ["a"])
    found = saver.get_tuple(config)

    assert found is not None
    assert sorted(found.pending_writes or [], key=lambda write: write[0]) == [
        ("one", "__no_writes__", None),
        ("three", "__no_writes__", None),
        ("two", "__no_writes__", None),
    ]


def test_every_namespace(saver: Saver) -> None:
    """A subgraph's checkpoints are the thread's too; other threads are not."""
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
def test_delta_channels(saver: Saver, every: int) -> None:
    """A channel rebuilt from writes is rebuilt without it."""

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


def test_long_manifests(saver: Saver) -> None:
    """Values in more pieces than stand in a checkpoint lose just their message."""
    every = [human_message(str(i)) for i in range(600)]
    first = put(saver, {"messages": every})
    second = put(saver, {"messages": every[::3]}, first)
    third = put(saver, {"messages": [*every[::-3], human_message("new")]}, second)
    report = saver.erase("t", [str(i) for i in range(0, 600, 7)])

    def left(messages: list[HumanMessage]) -> list[HumanMessage]:
        return [m for m in messages if m.id == "new" or int(m.id or 0) % 7]

    assert left(every) == read_channel_values(saver, first)["messages"]
    assert left(every[::3]) == read_channel_values(saver, second)["messages"]
    assert (
        left([*every[::-3], human_message("new")]) == read_channel_values(saver, third)["messages"]
    )
    assert len(left(every)) + 1 == len(saver.history("t"))
    assert 86 == report.items == len(report.hashes)


def test_a_dict_that_was_a_message(saver: Saver) -> None:
    """Of a channel that held message after message as dicts, one goes, from its history too."""
    talk = [{"role": "user", "content": f"{SECRET} {i} " * 9, "id": str(i)} for i in range(3)]
    config = None
    for value in talk:
        config = put(saver, {"last": value}, config)
    saver.erase("t", ["0", "1"])
    told = [item.value for item in saver.history("t", channel="last")]

    assert {"last": talk[2]} == read_channel_values(saver, config_at())
    assert talk[2] == dict(told)
    for gone in (0, 1):
        assert f"{SECRET} {gone}".encode() not in read_raw_bytes(saver)
        assert f"{SECRET} {gone}" not in render_thread(saver)


class Own(JsonPlusSerializer):
    """A serializer whose bytes perdure knows nothing of."""


def test_another_serializer(tmp_path: Path) -> None:
    """Under a serializer of one's own, messages are found by reading every item."""
    with Saver.open(tmp_path / "x.db", serde=Own()) as saver:
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
