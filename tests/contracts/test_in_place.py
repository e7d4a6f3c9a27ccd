"""Changes that a node makes to the state in place and does not return."""

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


class CountedState(MessagesState):
    count: int


@pytest.mark.parametrize("is_cached", [True, False])
def test_change_in_place_that_node_does_not_return_is_not_stored(is_cached: bool) -> None:
    """For langgraph, the channel did not change.

    The result is the same with and without the cache.
    """

    def redact_in_place(state: CountedState) -> dict[str, Any]:
        state["messages"][0].content = "redacted"
        return {"count": 1}

    def run_and_read_texts(saver: Any) -> list[str]:
        builder = StateGraph(CountedState).add_node("redacts", redact_in_place)
        builder.add_node("counts", lambda state: {"count": 2})
        builder.add_edge(START, "redacts").add_edge("redacts", "counts")
        graph: Any = builder.compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}}
        for _ in graph.stream({"messages": [HumanMessage("secret")]}, config, durability="sync"):
            if not is_cached and isinstance(saver, SQLiteCheckpointer):
                saver._cache.drop_thread("t")
        return [m.text for m in graph.get_state(config).values["messages"]]

    with SQLiteCheckpointer.open(":memory:") as saver:
        assert run_and_read_texts(InMemorySaver()) == run_and_read_texts(saver) == ["secret"]


def make_messages() -> list[BaseMessage]:
    """Return messages with every kind of part that can be changed in place."""
    call: Any = {"name": "f", "args": {"x": 1, "deep": {"a": [1, 2], "b": "two"}}, "id": "c1"}
    return [
        HumanMessage("hi", id="h1", additional_kwargs={"n": 1, "order": {"a": 1, "b": 2}}),
        HumanMessage([{"type": "text", "text": "one"}, "two"], id="h2"),
        AIMessage("yes", id="a1", tool_calls=[call], response_metadata={"model": "m", "n": 1}),
        ToolMessage("done", id="t1", tool_call_id="c1", artifact=[1, [2.0, None]]),
        *(HumanMessage(f"more {i}", id=f"m{i}") for i in range(80)),
    ]


def describe_messages(messages: list[BaseMessage]) -> list[str]:
    """Return each message as text that shows types and order of all its parts."""
    return [render_with_types([message, message.model_extra]) for message in messages]


class StringSubclass(str):
    """A subclass of `str`, which equals a `str` of the same text."""

    __slots__ = ()


def move_key_to_end(parts: dict[str, Any]) -> None:
    parts["a"] = parts.pop("a")


CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "1 to True": lambda m: m[0].additional_kwargs.update(n=True),
    "1 to 1.0": lambda m: m[0].additional_kwargs.update(n=1.0),
    "a nested dict reordered": lambda m: move_key_to_end(m[0].additional_kwargs["order"]),
    "a block of the content": lambda m: m[1].content[0].update(text="another"),
    "an element of the content": lambda m: m[1].content.__setitem__(1, "another"),
    "the arguments of a tool call": lambda m: m[2].tool_calls[0]["args"].update(x=True),
    "deep within the arguments": lambda m: m[2].tool_calls[0]["args"]["deep"]["a"].append(3),
    "an additional tool call": lambda m: m[2].tool_calls.append(m[2].tool_calls[0]),
    "metadata": lambda m: m[2].response_metadata.pop("model"),
    "an artifact": lambda m: m[3].artifact[1].__setitem__(0, 2),
    "zero's sign": lambda m: m[3].artifact[1].__setitem__(0, -0.0),
    "a field": lambda m: setattr(m[40], "content", "another"),
    "an extra field": lambda m: setattr(m[40], "mood", "good"),
    "a field of the last message": lambda m: setattr(m[-1], "name", "ann"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_message_changed_in_place_before_put_is_stored_again(change: str) -> None:
    """The new checkpoint has the change. The one before stays unchanged."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        first = put(saver, {"messages": make_messages()})
        messages = read_channel_values(saver, first)["messages"]
        CHANGES[change](messages)
        second = put(saver, {"messages": messages}, first)
        saver._cache.drop_thread("t")

        assert (
            describe_messages(read_channel_values(saver, second)["messages"])
            == describe_messages(messages)
            != describe_messages(make_messages())
        )
        assert describe_messages(
            read_channel_values(saver, first)["messages"]
        ) == describe_messages(make_messages())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0], "content", StringSubclass("hi")),
        lambda m: m[0].additional_kwargs.update(order=DictSubclass(a=1, b=2)),
        lambda m: setattr(m[3], "artifact", (1, [2.0, None])),
    ],
    ids=["a subclass of str", "a subclass of dict", "a list to a tuple"],
)
def test_change_of_type_is_read_back_as_by_langgraph_memory_saver(
    change: Callable[[list[Any]], None],
) -> None:
    """The serializer does not preserve such types."""
    results = []
    with SQLiteCheckpointer.open(":memory:") as saver:
        for checkpointer in (saver, InMemorySaver()):
            first = put(checkpointer, {"messages": make_messages()})
            messages = read_channel_values(checkpointer, first)["messages"]
            change(messages)
            results.append(
                render_with_types(
                    read_channel_values(
                        checkpointer, put(checkpointer, {"messages": messages}, first)
                    )["messages"]
                )
            )

    assert results[0] == results[1]


class DictSubclass(dict[str, Any]):
    """A subclass of `dict`, which equals a `dict` of the same content."""


def iter_mutable_parts(value: Any) -> Iterator[Any]:
    """Yield the value and all parts of it that can be changed."""
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
        yield from iter_mutable_parts(part)


def test_readers_and_writers_share_no_mutable_part() -> None:
    """Neither two readers nor a reader and the caller of the put share a part."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        put_messages = make_messages()
        put(saver, {"messages": put_messages})
        lists = [
            put_messages,
            *(read_channel_values(saver, config_at())["messages"] for _ in range(3)),
        ]
    ids = [{id(part) for part in iter_mutable_parts(messages)} for messages in lists]

    assert all(not one & other for i, one in enumerate(ids) for other in ids[:i])


def list_free_dicts(messages: list[Any]) -> list[dict[str, Any]]:
    """Return the dicts within the messages that may have any content."""
    human, _, ai, tool = messages[:4]
    roots = [human.additional_kwargs, ai.response_metadata, ai.tool_calls[0]["args"], tool.artifact]
    return [part for part in iter_mutable_parts(roots) if isinstance(part, dict)]


PARTS = st.recursive(
    st.sampled_from([0, 1, True, False, None, 1.0, 0.0, -0.0, "", "1", b"1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)


CHANGE = st.tuples(st.integers(0, 99), st.sampled_from("abcnx"), PARTS)


@given(st.lists(CHANGE, min_size=1, max_size=4))
def test_random_changes_in_place_are_stored_as_by_langgraph_memory_saver(
    changes: list[tuple[int, str, Any]],
) -> None:
    """After each change and put, both checkpointers read the same messages."""

    def change_and_read(saver: Any) -> list[str]:
        descriptions = []
        config = put(saver, {"messages": make_messages()})
        for index, key, part in changes:
            messages = read_channel_values(saver, config)["messages"]
            dicts = list_free_dicts(messages)
            changed = dicts[index % len(dicts)]
            changed.pop(key, None)
            changed[key] = part
            config = put(saver, {"messages": messages}, config)
            descriptions += describe_messages(read_channel_values(saver, config)["messages"])
        return descriptions

    with SQLiteCheckpointer.open(":memory:") as saver:
        assert change_and_read(saver) == change_and_read(InMemorySaver())
