"""Pydantic models, dataclasses, enums and named tuples in the state, with no option."""

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
from tests.contracts.test_types import dump
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
def test_they_come_back_the_same(name: str) -> None:
    """Equal, of the same types all through, and with the same bytes when they are put again."""
    value = VALUES[name]
    stored = CODEC.encode(value, lambda: "value")
    back = CODEC.decode(stored)

    assert value == back
    assert dump(value) == dump(back)
    assert stored == CODEC.encode(back, lambda: "value")


def test_all_of_a_model_comes_back() -> None:
    """Private attributes, extras, which fields were set; what was not set stays unset."""
    value = Open(other={"a": Inner(n=1)})  # type: ignore[call-arg]
    value._note = "mine"
    back = store_and_read_back(value)

    assert value == back
    assert {"other"} == back.model_fields_set
    assert back._note == "mine"
    assert {"other": {"a": Inner(n=1)}} == back.model_extra
    with pytest.raises(AttributeError):
        _ = back._unset
    back._unset = 2
    assert back._unset == 2
    assert back.model_copy(update={"n": 2}).n == 2
    assert Open.model_validate(back.model_dump()) == Open.model_validate(value.model_dump())


def test_what_a_dataclass_computed_comes_back() -> None:
    """Attributes that are no fields are kept; cached properties are computed again."""
    value = Point(2)
    value.doubled = 5
    _ = value.slow
    back = store_and_read_back(value)

    assert back.doubled == 5
    assert "slow" not in vars(back)


def test_the_bytes_are_langgraphs_where_that_loses_nothing() -> None:
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
def test_any_value_equals_langgraphs(value: Any) -> None:
    """What langgraph's strict serializer rebuilds is rebuilt the same, from the same bytes."""
    serde = JsonPlusSerializer(allowed_msgpack_modules=None)
    name, data = serde.dumps_typed(value)

    assert dump(serde.loads_typed((name, data))) == dump(store_and_read_back(value))
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
def test_any_nesting_comes_back(value: Any) -> None:
    """Plain data classes within each other come back type for type, and so do their bytes."""
    back = store_and_read_back(value)

    assert dump(value) == dump(back)
    assert CODEC.encode(value, lambda: "") == CODEC.encode(back, lambda: "")


# -- what langgraph's own savers wrote, and version 1

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
def test_what_langgraph_wrote_is_read(name: str) -> None:
    """Rows of version 1, which are langgraph's, come back as the objects they were."""
    data = JsonPlusSerializer().dumps_typed(WRITTEN[name])[1]

    assert WRITTEN[name] == CODEC.decode(b"\x10" + data)
    assert WRITTEN[name] == CODEC.load_with_serializer("msgpack", data)


class Weather(BaseModel):
    city: str
    days: list[Inner]


def test_an_agents_structured_response_stays_a_model(tmp_path: Path) -> None:
    """`create_agent(response_format=Model)` resumes in a new checkpointer, with no option."""
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
                told = agent.invoke({"messages": [HumanMessage(f"{turn}?")]}, config)
                after = agent.get_state(config).values["structured_response"]

                assert before == (expected if turn else None)
                assert expected == told["structured_response"] == after
                assert type(after) is Weather
                assert type(after.days[0]) is Inner
