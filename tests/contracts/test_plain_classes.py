"""Pydantic models, dataclasses, enums and named tuples in the state, without any option."""

from __future__ import annotations

from datetime import UTC
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Command, Interrupt, Send
from pydantic import BaseModel, HttpUrl, SecretStr

from perdure.checkpointers import SQLiteCheckpointer
from tests.contracts.plain_classes import (
    CODEC,
    INT_BOX,
    Aliased,
    Bit,
    Checked,
    Colour,
    Counted,
    Fixed,
    FixedChild,
    Holding,
    Inner,
    Level,
    Mood,
    Open,
    Outer,
    Place,
    Point,
    Right,
    Tags,
    Web,
    store_and_read_back,
)
from tests.contracts.test_types import describe_with_types
from tests.openai_server import Answer, OpenAIServer

VALUES = {
    "enum": [Colour.RED, Colour.PAIR, Colour.ONE, Colour.TRUE, Mood.FINE, Level.LOW],
    "flags": [Right.READ | Right.WRITE, Right(0), Bit.A | Bit.B, Bit(8)],
    "namedtuple": Place(1),
    "namedtuple of others": Place(1, Place(2)),  # type: ignore[arg-type]
    "dataclass": Point(1, {"p": [Colour.RED, Place(3)]}),
    "frozen": Fixed(1, ("a", "b")),
    "slots of a base": FixedChild(1, ("a",), 2),
    "pydantic dataclass": Checked(1),
    "model": Outer(inner=Inner(n=1), many=[Inner(n=2)], by_name={"a": Inner(n=3)}, pair=(1, "x")),
    "model in any": Outer(inner=Inner(n=1), raw=[Inner(n=2), (1, (2,)), bytearray(b"x")]),
    "keys": Outer(inner=Inner(n=1), by_mood={Mood.FINE: 1}, raw={UUID(int=1): {(1, Mood.FINE): 2}}),
    "kinds": Outer(inner=Inner(n=1), kinds={Mood.FINE}),
    "nested class": Open.Nested(n=1),
    "generic": INT_BOX(x=1),
    "generic dataclass": Holding[int](1),
    "computed": Counted.model_validate({"n": 1, "other": 2}),
    "root": Tags(["a"]),
    "url and secret": Web(url=HttpUrl("http://x.example/a?b=1"), key=SecretStr("s")),
    "sets": [{(1, 2), (3,)}, frozenset({Fixed(1), Fixed(2)}), {Colour.RED}],
    "keyed by a frozen dataclass": Point(1, {Fixed(1): Fixed(2)}),
    "array in a dataclass": Fixed(1, ("a",)),
    "send": Send("node", {"p": Point(1), "m": Inner(n=1)}),
    "interrupt": Interrupt(value=Inner(n=1), id="1"),
    "command": Command(update={"p": Fixed(1)}, goto=["n"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_value_round_trips_with_equal_types_and_bytes(name: str) -> None:
    """The decoded value is equal in all types, and is encoded to the same bytes again."""
    value = VALUES[name]
    stored = CODEC.encode(value, lambda: "value")
    decoded = CODEC.decode(stored)

    assert value == decoded
    assert describe_with_types(value) == describe_with_types(decoded)
    assert stored == CODEC.encode(decoded, lambda: "value")


def test_pydantic_model_keeps_private_extra_and_unset_fields() -> None:
    """Private attributes, extra fields and the set of assigned fields are restored."""
    value = Open(other={"a": Inner(n=1)})  # type: ignore[call-arg]
    value._note = "mine"
    decoded = store_and_read_back(value)

    assert value == decoded
    assert {"other"} == decoded.model_fields_set
    assert decoded._note == "mine"
    assert {"other": {"a": Inner(n=1)}} == decoded.model_extra
    with pytest.raises(AttributeError):
        _ = decoded._unset
    decoded._unset = 2
    assert decoded._unset == 2
    assert decoded.model_copy(update={"n": 2}).n == 2
    assert Open.model_validate(decoded.model_dump()) == Open.model_validate(value.model_dump())


def test_dataclass_keeps_attributes_but_not_cached_properties() -> None:
    """Attributes that are not fields are stored. Cached properties are computed again."""
    value = Point(2)
    value.doubled = 5
    _ = value.slow
    decoded = store_and_read_back(value)

    assert decoded.doubled == 5
    assert "slow" not in vars(decoded)


def test_lossless_values_have_the_same_bytes_as_in_langgraph() -> None:
    """Enums, dataclasses and named tuples of plain data are stored as langgraph stores them."""
    serde = JsonPlusSerializer()
    values = (Colour.RED, Checked(1), Place(1), {"a": [Place(2)]}, [{1, 2}], Interrupt(1, id="a"))
    for value in values:
        assert serde.dumps_typed(value)[1] == CODEC.encode(value, lambda: "value")[1:]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
SUPPORTED = st.recursive(
    PLAIN
    | st.datetimes(timezones=st.just(UTC))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.uuids()
    | st.decimals(allow_nan=False)
    | st.ip_addresses()
    # of two elements: langgraph's bytes have the order in which a set gives them, ours one order
    | st.sets(st.integers(0, 9) | st.text(max_size=2), max_size=1)
    | st.builds(HumanMessage, st.text(max_size=3), id=st.text(max_size=2))
    | st.builds(Path, st.sampled_from(["a", "a/b", "/c"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Send, st.just("n"), inner)
        | st.builds(Interrupt, inner, id=st.just("i"))
    ),
    max_leaves=6,
)


@given(SUPPORTED)
def test_random_values_are_rebuilt_as_langgraphs_serializer_does(value: Any) -> None:
    """A value that langgraph's strict serializer rebuilds is rebuilt equally from equal bytes."""
    serde = JsonPlusSerializer(allowed_msgpack_modules=None)
    name, data = serde.dumps_typed(value)

    assert describe_with_types(serde.loads_typed((name, data))) == describe_with_types(
        store_and_read_back(value)
    )
    if not isinstance(value, HumanMessage):  # these have a form of their own
        assert data == CODEC.encode(value, lambda: "value")[1:]


OBJECTS = st.recursive(
    PLAIN | st.sampled_from([*Colour, *Mood, Right.READ | Right.WRITE]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(Point, st.integers(0, 9), inner)
        | st.builds(Place, st.integers(0, 9), inner)
        | st.builds(Outer, inner=st.builds(Inner, n=st.integers(0, 9)), raw=inner)
        | st.builds(lambda n, x: Open.model_validate({"n": n, "x": x}), st.integers(0, 9), inner)
    ),
    max_leaves=6,
)


@given(OBJECTS)
def test_random_nested_objects_round_trip(value: Any) -> None:
    """Nested models, dataclasses and enums keep their types and are encoded to the same bytes."""
    decoded = store_and_read_back(value)

    assert describe_with_types(value) == describe_with_types(decoded)
    assert CODEC.encode(value, lambda: "") == CODEC.encode(decoded, lambda: "")


# -- values that langgraph's own savers wrote, and rows of version 1

WRITTEN = {
    "model": Outer(
        inner=Inner(n=1),
        many=[Inner(n=2)],
        by_name={"a": Inner(n=3)},
        maybe=Inner(n=4),
        point=Point(1),
        pair=(1, "x"),
    ),
    "computed": Counted.model_validate({"n": 1, "other": 2}),
    "alias": Aliased(fullName="Ann"),
    "private": Open(n=2),
    "dataclass": Point(1, [Inner(n=1)]),
    "enum": [Colour.RED, Colour.PAIR, Right.READ | Right.WRITE],
    "namedtuple": Place(1),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_values_written_by_langgraph_are_read(name: str) -> None:
    """Rows of version 1, which have langgraph's format, are read as the original objects."""
    data = JsonPlusSerializer().dumps_typed(WRITTEN[name])[1]

    assert WRITTEN[name] == CODEC.decode(b"\x10" + data)
    assert WRITTEN[name] == CODEC.load_with_serializer("msgpack", data)


class Weather(BaseModel):
    city: str
    days: list[Inner]


def test_structured_response_of_an_agent_stays_a_model_after_reopening(tmp_path: Path) -> None:
    """A thread of `create_agent(response_format=Model)` is resumed without any option."""
    path = tmp_path / "x.db"
    config: Any = {"configurable": {"thread_id": "t"}}
    expected = Weather(city="Oslo", days=[Inner(n=1)])
    call = {"name": "Weather", "arguments": expected.model_dump_json()}
    answer = Answer(
        {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": call}]},
        "tool_calls",
    )
    with OpenAIServer(lambda body: answer) as server:
        model = ChatOpenAI(base_url=server.base_url, model="scripted", api_key=SecretStr("any"))
        for turn in range(2):
            with SQLiteCheckpointer.open(path) as saver:
                agent = create_agent(
                    model, [], response_format=ToolStrategy(Weather), checkpointer=saver
                )
                before = agent.get_state(config).values.get("structured_response")
                output = agent.invoke({"messages": [HumanMessage(f"{turn}?")]}, config)
                after = agent.get_state(config).values["structured_response"]

                assert before == (expected if turn else None)
                assert expected == output["structured_response"] == after
                assert type(after) is Weather
                assert type(after.days[0]) is Inner
