"""Values are read back like by langgraph's own saver, with equal types."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import OrderedDict, defaultdict
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Send
from pydantic import BaseModel, Field

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.codec import Codec
from perdure.errors import ForbiddenType, Unstorable
from tests.contracts.plain_classes import Level, Mood, Place


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    inner: dict[str, Any]


class Profile(BaseModel):
    name: str = Field(alias="fullName")
    tags: set[str] = set()
    model_config = {"populate_by_name": True}


class Word(str):
    pass


class Count(int):
    pass


class Many(list[Any]):
    pass


class Row(tuple[Any, ...]):
    pass


ALLOW = [Colour, Point, Profile, Mood, Level, Place]
SERDE = JsonPlusSerializer(allowed_msgpack_modules=ALLOW)


def put(saver: Any, values: dict[str, Any], parent: Any = None, thread: str = "t") -> Any:
    checkpoint = empty_checkpoint()
    checkpoint["id"] = str(uuid6())
    checkpoint["channel_values"] = values
    checkpoint["channel_versions"] = dict.fromkeys(values, checkpoint["id"])
    config = parent or {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
    return saver.put(config, checkpoint, {"source": "loop"}, checkpoint["channel_versions"])


def describe_with_types(value: Any) -> Any:
    """Return nested tuples of a value and its types, so that 1, 1.0 and True differ."""
    if hasattr(value, "model_dump"):
        return (
            type(value),
            describe_with_types(value.__dict__),
            describe_with_types(getattr(value, "model_extra", None) or {}),
        )
    if isinstance(value, dict):
        return (
            type(value),
            [(describe_with_types(k), describe_with_types(v)) for k, v in value.items()],
        )
    if isinstance(value, list | tuple):
        return (type(value), [describe_with_types(part) for part in value])
    if isinstance(value, set | frozenset):
        return (type(value), sorted(map(repr, value)))
    return (type(value), repr(value))


def read_back_from_both_savers(values: dict[str, Any]) -> tuple[Any, Any]:
    """Return the values that langgraph's InMemorySaver reads back, and those that perdure does."""
    memory = InMemorySaver(serde=SERDE)
    expected = memory.get_tuple(put(memory, values))
    with SQLiteCheckpointer.open(":memory:", allow=ALLOW) as saver:
        config = put(saver, values)
        first, second = saver.get_tuple(config), saver.get_tuple(config)
    assert expected is not None
    assert first is not None
    assert second is not None
    assert describe_with_types(first.checkpoint["channel_values"]) == describe_with_types(
        second.checkpoint["channel_values"]
    )
    return expected.checkpoint["channel_values"], first.checkpoint["channel_values"]


USAGE = {
    "input_tokens": 3,
    "output_tokens": 4,
    "total_tokens": 7,
    "input_token_details": {"cache_read": 1},
}
CALL = {"name": "f", "args": {"a": [1, {"b": None}]}, "id": "c1", "type": "tool_call"}
BAD_CALL = {"name": "f", "args": "{", "id": "c2", "error": "no", "type": "invalid_tool_call"}
BLOCKS: list[str | dict[Any, Any]] = [
    {"type": "text", "text": "héllo"},
    "plain",
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
]
MESSAGES = [
    HumanMessage("hi", id="1", name="ann"),
    HumanMessage(BLOCKS, id="2"),
    HumanMessage("extra", id="3", mood="fine"),
    SystemMessage("be brief"),
    AIMessage("", id="4", tool_calls=[CALL], usage_metadata=USAGE),
    AIMessage("x", id="5", invalid_tool_calls=[BAD_CALL], response_metadata={"n": 1.0, "t": True}),
    AIMessage(BLOCKS, id="6", additional_kwargs={"deep": {"er": [{"x": (1, 2)}]}}),
    AIMessage(
        "old", additional_kwargs={"tool_calls": []}, response_metadata={"output_version": "v1"}
    ),
    ToolMessage("r", tool_call_id="c1", id="7", artifact={"k": [1]}, status="error"),
    ToolMessage(BLOCKS, tool_call_id="c1", id="8"),
    AIMessageChunk(content="chunk", id="9"),
    ChatMessage(content="c", role="critic"),
    FunctionMessage(content="f", name="g"),
    RemoveMessage(id="1"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: f"{type(m).__name__}-{m.id}")
def test_message_of_every_kind_is_read_back_like_in_langgraph(message: Any) -> None:
    """Every kind of message is read back like by langgraph's saver."""
    expected, actual = read_back_from_both_savers({"messages": [message], "one": message})

    assert describe_with_types(expected) == describe_with_types(actual)
    assert expected == actual
    for theirs, ours in (
        (expected["one"], actual["one"]),
        (expected["messages"][0], actual["messages"][0]),
    ):
        assert theirs.model_fields_set == ours.model_fields_set
        assert theirs.model_dump_json() == ours.model_dump_json()


VALUES = {
    "plain": {"a": [1, 2.5, None, True, "x"], "b": {"c": b"bytes"}},
    "numbers": [0, -1, 2**63, 1.0, float("inf"), True],
    "sets": {"s": {1, 2}, "f": frozenset({"a"}), "t": (1, "two")},
    "times": [datetime(2026, 1, 1, tzinfo=UTC), date(2026, 1, 1), timedelta(seconds=3)],
    "uuid": UUID(int=7),
    "decimal": Decimal("1.10"),
    "path": Path("a/b"),
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"x"),
    "none": None,
    "empty": [],
    "emptydict": {},
    "enum": Colour.RED,
    "dataclass": Point(1, {"p": [Colour.RED]}),
    "model": Profile(fullName="Ann", tags={"x"}),
    "models": [Profile(fullName=str(i)) for i in range(40)],
    "long": list(range(1000)),
    "strings": [f"item {i}" for i in range(500)],
    "dicts": [{"i": i, "text": "x" * i} for i in range(40)],
    "bigdict": {f"k{i}": {"v": i} for i in range(200)},
    "intkeys": dict.fromkeys(range(50), "v" * 9),
    "tuplekeys": {(1, 2): "v" * 200},
    "mixed": [HumanMessage("m", id="1"), {"not": "a message"}, 3],
    "send": [Send("node", {"x": 1})],
    "nested": {"messages": [HumanMessage("m", id="1")], "n": 1},
}


@pytest.mark.parametrize("name", VALUES)
def test_value_of_every_kind_is_read_back_like_in_langgraph(name: str) -> None:
    """Plain data, models, dataclasses and enums are read back like by langgraph's saver."""
    expected, actual = read_back_from_both_savers({name: VALUES[name]})

    assert describe_with_types(expected) == describe_with_types(actual)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False)
texts = st.text(st.characters(), max_size=6)
data = st.recursive(
    scalars | texts | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
pairs = st.dictionaries(texts, data, max_size=3)
subclasses = st.one_of(
    texts.map(Word),
    texts.map(lambda text: AIMessage(text).text),  # langchain-core's own subclass of str
    st.integers(0, 9).map(Count),
    st.lists(data, max_size=3).map(Many),
    st.lists(data, max_size=3).map(Row),
    pairs.map(OrderedDict),
    pairs.map(lambda items: defaultdict(list, items)),
    st.sets(st.integers(0, 40), max_size=9),
    st.sampled_from([Mood.FINE, Level.LOW, Colour.RED]),
    st.builds(Place, data, texts),
    st.builds(Profile, fullName=texts),
    st.builds(Point, st.just(1), pairs),
    st.sampled_from(["\ud83d", "half \udc00 of a pair", {"k": ["\ud83d"]}]),
)
data = st.recursive(
    data | subclasses,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)
contents = texts | st.lists(texts | st.dictionaries(texts, data, max_size=2), max_size=3)
metadata = st.dictionaries(texts, data, max_size=3)
calls = st.lists(
    st.builds(
        lambda name, args, i: {"name": name, "args": args, "id": i, "type": "tool_call"},
        texts,
        st.dictionaries(texts, data, max_size=2),
        texts | st.none(),
    ),
    max_size=2,
)
random_messages = st.one_of(
    st.builds(HumanMessage, contents, id=texts | st.none(), additional_kwargs=metadata),
    st.builds(SystemMessage, contents, response_metadata=metadata),
    st.builds(AIMessage, contents, id=texts, tool_calls=calls, response_metadata=metadata),
    st.builds(ToolMessage, contents, tool_call_id=texts, artifact=data),
)
tampering = st.tuples(
    st.sampled_from(["content", "name", "id", "tool_calls", "usage_metadata", "type"]), data
)


@given(st.lists(random_messages, max_size=4), st.none() | tampering)
@example([HumanMessage("")], ("tool_calls", []))  # a field of another class
def test_random_messages_are_read_back_like_in_langgraph(
    messages: list[Any], tampered: Any
) -> None:
    """One of the random messages may have been changed in place to an invalid value."""
    if tampered is not None and messages:
        messages[0].__dict__[tampered[0]] = tampered[1]
    try:
        expected, actual = read_back_from_both_savers({"messages": messages})
    except (Unstorable, TypeError):
        return  # integers over 64 bits: both refuse

    assert describe_with_types(expected) == describe_with_types(actual)


@given(random_messages, st.none() | tampering)
def test_decoded_message_is_encoded_to_the_same_bytes(message: Any, tampered: Any) -> None:
    """Therefore the next put recognises the message as unchanged."""
    codec = Codec(SERDE)
    if tampered is not None:
        message.__dict__[tampered[0]] = tampered[1]
    try:
        stored = codec.encode(message, lambda: "message")
    except Unstorable:
        return

    assert stored == codec.encode(codec.decode(stored), lambda: "message")


def test_equal_sets_are_encoded_to_the_same_bytes() -> None:
    """Two equal sets may iterate in different orders, which are not stored."""
    codec = Codec(SERDE)
    one, other = (HumanMessage("m", additional_kwargs={"s": set(s)}) for s in ([0, 8], [8, 0]))

    assert [*one.additional_kwargs["s"]] != [*other.additional_kwargs["s"]]
    assert codec.encode(one, lambda: "one") == codec.encode(other, lambda: "other")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"deep": [1, threading.Lock()]}, r"channel_values\['x'\]\['deep'\]\[1\]"),
        ([HumanMessage("ok"), lambda: 1], r"channel_values\['x'\]\[1\]"),
        (2**70, r"channel_values\['x'\]"),
        (
            HumanMessage("m", additional_kwargs={"f": {"g": object()}}),
            r"additional_kwargs\['f'\]\['g'\]",
        ),
    ],
)
def test_put_refuses_values_that_cannot_be_stored(value: Any, path: str) -> None:
    """The error names the path of the value, and nothing is written."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        with pytest.raises(Unstorable, match=path):
            put(saver, {"fine": "x" * 500, "x": value})

        assert saver.threads() == []


def test_put_refuses_types_that_allow_does_not_name() -> None:
    """The error names the type and the option `allow=`, and nothing is written."""
    with SQLiteCheckpointer.open(":memory:", strict=True) as saver:
        with pytest.raises(ForbiddenType, match=r"tests\.contracts\.test_types.*Point.*allow="):
            put(saver, {"p": [{"in": Point(1, {})}]})

        assert saver.threads() == []


def test_read_refuses_types_that_allow_does_not_name(tmp_path: Path) -> None:
    """The database was written with a wider allowlist."""
    with SQLiteCheckpointer.open(tmp_path / "x.db", allow=ALLOW, strict=True) as saver:
        config = put(saver, {"p": Point(1, {})})
    with SQLiteCheckpointer.open(tmp_path / "x.db", strict=True) as saver:
        with pytest.raises(ForbiddenType, match="Point"):
            saver.get_tuple(config)
        clone = saver.with_allowlist([("tests.contracts.test_types", "Point")])
        record = clone.get_tuple(config)

    assert record is not None
    assert record.checkpoint["channel_values"]["p"] == Point(1, {})


def test_two_reads_share_no_mutable_objects() -> None:
    """Changing the result of one read does not change the result of the next."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        config = put(saver, {"messages": list(MESSAGES), "d": {"k": [1] * 300}})
        for _ in range(3):
            record = saver.get_tuple(config)
            assert record is not None
            values = record.checkpoint["channel_values"]
            for message in values["messages"]:
                message.additional_kwargs["seen"] = True
                message.response_metadata["seen"] = True
                message.content = "changed"
            values["d"]["k"].append(2)
        last_record = saver.get_tuple(config)

    assert last_record is not None
    assert describe_with_types(
        last_record.checkpoint["channel_values"]["messages"][0]
    ) == describe_with_types(MESSAGES[0])
    assert last_record.checkpoint["channel_values"]["d"] == {"k": [1] * 300}
    assert last_record.checkpoint["channel_values"]["messages"][4].tool_calls == [CALL]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "content", "other"),
        lambda m: m.additional_kwargs.update(n=True),
        lambda m: m.response_metadata.update(n=1.0),
        lambda m: m.tool_calls[0]["args"].update(a=2),
        lambda m: m.usage_metadata.update(input_tokens=9),
        lambda m: setattr(m, "mood", "fine"),
    ],
)
@pytest.mark.parametrize("index", [0, 300])
def test_message_changed_in_place_is_stored_again(change: Any, index: int) -> None:
    """This also holds if only the type of a number has changed."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        messages = [
            AIMessage(
                str(i),
                id=str(i),
                tool_calls=[CALL],
                usage_metadata=USAGE,
                additional_kwargs={"n": 1},
                response_metadata={"n": 1},
            )
            for i in range(400)
        ]
        first = put(saver, {"messages": messages})
        record = saver.get_tuple(first)
        assert record is not None
        loaded_messages = record.checkpoint["channel_values"]["messages"]
        change(loaded_messages[index])
        second = put(saver, {"messages": loaded_messages}, record.config)
        after, before = saver.get_tuple(second), saver.get_tuple(first)

    assert after is not None
    assert before is not None
    assert describe_with_types(
        after.checkpoint["channel_values"]["messages"]
    ) == describe_with_types(loaded_messages)
    assert describe_with_types(
        before.checkpoint["channel_values"]["messages"]
    ) == describe_with_types(messages)
