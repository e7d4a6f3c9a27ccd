"""What a node changes in place and does not return, which is no update to langgraph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from tests.contracts.puts import config_at, put, read_channel_values, render_with_types


class Counted(MessagesState):
    count: int


@pytest.mark.parametrize("remembered", [True, False])
def test_a_change_in_place_that_no_node_returned(remembered: bool) -> None:
    """langgraph says that the channel did not change: it is as it was, cached or not."""

    def redacts(state: Counted) -> dict[str, Any]:
        state["messages"][0].content = "redacted"
        return {"count": 1}

    def talk(saver: Any) -> list[str]:
        builder = StateGraph(Counted).add_node("redacts", redacts)
        builder.add_node("counts", lambda state: {"count": 2})
        builder.add_edge(START, "redacts").add_edge("redacts", "counts")
        graph: Any = builder.compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}}
        for _ in graph.stream({"messages": [HumanMessage("secret")]}, config, durability="sync"):
            if not remembered and isinstance(saver, SQLiteCheckpointer):
                saver._cache.drop_thread("t")
        return [m.text for m in graph.get_state(config).values["messages"]]

    with SQLiteCheckpointer.open(":memory:") as saver:
        assert talk(InMemorySaver()) == talk(saver) == ["secret"]


def said() -> list[BaseMessage]:
    """Messages with every kind of part that can be changed in place."""
    call: Any = {"name": "f", "args": {"x": 1, "deep": {"a": [1, 2], "b": "two"}}, "id": "c1"}
    return [
        HumanMessage("hi", id="h1", additional_kwargs={"n": 1, "order": {"a": 1, "b": 2}}),
        HumanMessage([{"type": "text", "text": "one"}, "two"], id="h2"),
        AIMessage("yes", id="a1", tool_calls=[call], response_metadata={"model": "m", "n": 1}),
        ToolMessage("done", id="t1", tool_call_id="c1", artifact=[1, [2.0, None]]),
        *(HumanMessage(f"more {i}", id=f"m{i}") for i in range(80)),
    ]


def whole(messages: list[BaseMessage]) -> list[str]:
    """All that messages hold, as text that tells types and orders apart."""
    return [render_with_types([message, message.model_extra]) for message in messages]


class Text(str):
    """Equal to the text it was made from, and not the same."""

    __slots__ = ()


def reordered(parts: dict[str, Any]) -> None:
    parts["a"] = parts.pop("a")


CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "1 to True": lambda m: m[0].additional_kwargs.update(n=True),
    "1 to 1.0": lambda m: m[0].additional_kwargs.update(n=1.0),
    "a nested dict reordered": lambda m: reordered(m[0].additional_kwargs["order"]),
    "a block of the content": lambda m: m[1].content[0].update(text="another"),
    "an element of the content": lambda m: m[1].content.__setitem__(1, "another"),
    "the arguments of a tool call": lambda m: m[2].tool_calls[0]["args"].update(x=True),
    "deep within them": lambda m: m[2].tool_calls[0]["args"]["deep"]["a"].append(3),
    "a tool call more": lambda m: m[2].tool_calls.append(m[2].tool_calls[0]),
    "metadata": lambda m: m[2].response_metadata.pop("model"),
    "an artifact": lambda m: m[3].artifact[1].__setitem__(0, 2),
    "zero's sign": lambda m: m[3].artifact[1].__setitem__(0, -0.0),
    "a field": lambda m: setattr(m[40], "content", "another"),
    "an extra field": lambda m: setattr(m[40], "mood", "good"),
    "the last": lambda m: setattr(m[-1], "name", "ann"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_in_place_is_stored_again(change: str) -> None:
    """In the checkpoint that is put then; the one before stays as it was."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        first = put(saver, {"messages": said()})
        held = read_channel_values(saver, first)["messages"]
        CHANGES[change](held)
        second = put(saver, {"messages": held}, first)
        saver._cache.drop_thread("t")

        assert whole(read_channel_values(saver, second)["messages"]) == whole(held) != whole(said())
        assert whole(read_channel_values(saver, first)["messages"]) == whole(said())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0], "content", Text("hi")),
        lambda m: m[0].additional_kwargs.update(order=Ordered(a=1, b=2)),
        lambda m: setattr(m[3], "artifact", (1, [2.0, None])),
    ],
    ids=["a subclass of str", "a subclass of dict", "a list to a tuple"],
)
def test_a_change_of_type_that_the_serializer_undoes(change: Callable[[list[Any]], None]) -> None:
    """Read back as langgraph's own saver reads it."""
    found = []
    with SQLiteCheckpointer.open(":memory:") as saver:
        for each in (saver, InMemorySaver()):
            first = put(each, {"messages": said()})
            held = read_channel_values(each, first)["messages"]
            change(held)
            found.append(
                render_with_types(
                    read_channel_values(each, put(each, {"messages": held}, first))["messages"]
                )
            )

    assert found[0] == found[1]


class Ordered(dict[str, Any]):
    """Equal to the dict it was made from, and not the same."""


def mutable_parts(value: Any) -> Iterator[Any]:
    """A value and all that can be changed within it."""
    inner: Any = ()
    if isinstance(value, BaseMessage):
        inner = (*value.__dict__.values(), value.model_fields_set, value.model_extra)
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    elif not isinstance(value, set):
        return
    yield value
    for part in inner:
        yield from mutable_parts(part)


def test_no_two_callers_share_a_part_that_can_be_changed() -> None:
    """Neither two readers, nor a reader and who put it."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        given_by_us = said()
        put(saver, {"messages": given_by_us})
        lists = [
            given_by_us,
            *(read_channel_values(saver, config_at())["messages"] for _ in range(3)),
        ]
    ids = [{id(part) for part in mutable_parts(messages)} for messages in lists]

    assert all(not one & other for i, one in enumerate(ids) for other in ids[:i])


def free_dicts(messages: list[Any]) -> list[dict[str, Any]]:
    """The dicts within messages that may hold anything."""
    human, _, ai, tool = messages[:4]
    roots = [human.additional_kwargs, ai.response_metadata, ai.tool_calls[0]["args"], tool.artifact]
    return [part for part in mutable_parts(roots) if isinstance(part, dict)]


PARTS = st.recursive(
    st.sampled_from([0, 1, True, False, None, 1.0, 0.0, -0.0, "", "1", b"1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)


CHANGE = st.tuples(st.integers(0, 99), st.sampled_from("abcnx"), PARTS)


@given(st.lists(CHANGE, min_size=1, max_size=4))
def test_random_changes_in_place(changes: list[tuple[int, str, Any]]) -> None:
    """After any of them, one at each put, both savers read the same."""

    def course(saver: Any) -> list[str]:
        read = []
        config = put(saver, {"messages": said()})
        for place, key, part in changes:
            messages = read_channel_values(saver, config)["messages"]
            dicts = free_dicts(messages)
            changed = dicts[place % len(dicts)]
            changed.pop(key, None)
            changed[key] = part
            config = put(saver, {"messages": messages}, config)
            read += whole(read_channel_values(saver, config)["messages"])
        return read

    with SQLiteCheckpointer.open(":memory:") as saver:
        assert course(saver) == course(InMemorySaver())
