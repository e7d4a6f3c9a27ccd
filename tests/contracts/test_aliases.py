"""Aliases: objects of a class that was renamed or moved are decoded as the new class."""

from __future__ import annotations

import dataclasses
import enum
import logging
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Generic, NamedTuple, TypedDict, TypeVar

import pytest
from langchain_core.messages import AnyMessage, HumanMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph, add_messages
from langgraph.types import Send
from pydantic import BaseModel

from perdure.checkpointers import SQLiteCheckpointer, open_checkpointer, values
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.postgres import PostgresCheckpointer
from perdure.checkpointers.stored_types import StoredTypes
from perdure.checkpointers.values import Allowlist
from perdure.errors import ConfigurationError, ForbiddenType
from tests.backends import Place, places
from tests.contracts.plain_classes import CODEC
from tests.contracts.test_types import put

T = TypeVar("T")
HERE = __name__


class OldModel(BaseModel):
    n: int
    inner: Any = None
    _private: int = 3


class NewModel(BaseModel):
    n: int
    inner: Any = None
    added: str = "default"
    _private: int = 3


@dataclasses.dataclass(frozen=True)
class OldData:
    n: int
    parts: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class NewData:
    n: int
    parts: tuple[Any, ...] = ()


class OldKind(enum.Enum):
    A = "a"


class NewKind(enum.Enum):
    A = "a"


class OldPair(NamedTuple):
    a: int
    b: Any = None


class NewPair(NamedTuple):
    a: int
    b: Any = None


class OldHuman(HumanMessage):
    mood: str = "fine"


class NewHuman(HumanMessage):
    mood: str = "fine"


class OldBox(BaseModel, Generic[T]):
    x: T


class NewBox(BaseModel, Generic[T]):
    x: T


class Outer:
    @dataclasses.dataclass
    class Nested:
        n: int


OLD_INT_BOX, NEW_INT_BOX = OldBox[int], NewBox[int]
ALIASES: dict[Any, Any] = {
    (HERE, "OldModel"): NewModel,
    (HERE, "OldData"): NewData,
    (HERE, "OldKind"): NewKind,
    (HERE, "OldPair"): NewPair,
    (HERE, "OldHuman"): NewHuman,
    (HERE, "OldBox"): NewBox,
    ("gone.module", "Outer.Nested"): (HERE, "Outer.Nested"),
}
CODEC_WITH_ALIASES = Codec(
    JsonPlusSerializer(allowed_msgpack_modules=[Allowlist.LOADED]), StoredTypes((), ALIASES)
)
OLD_AND_NEW_VALUES: dict[str, tuple[Any, Any]] = {
    "model": (OldModel(n=1), NewModel(n=1)),
    "dataclass": (OldData(1, (2,)), NewData(1, (2,))),
    "enum": (OldKind.A, NewKind.A),
    "named tuple": (OldPair(1, 2), NewPair(1, 2)),
    "message": (
        OldHuman(content="hi", id="1", mood="glad"),
        NewHuman(content="hi", id="1", mood="glad"),
    ),
    "generic model": (OLD_INT_BOX(x=1), NEW_INT_BOX(x=1)),
    "nested": (
        OldModel(n=1, inner=OldData(2, (OldKind.A, OldPair(1, [OldKind.A])))),
        NewModel(n=1, inner=NewData(2, (NewKind.A, NewPair(1, [NewKind.A])))),
    ),
    "in a Send": (Send("n", {"x": OldData(1)}), Send("n", {"x": NewData(1)})),
    "in a set": ({OldKind.A, OldPair(1)}, {NewKind.A, NewPair(1)}),
    "as dict key": (OldData(1, ({OldKind.A: 1},)), NewData(1, ({NewKind.A: 1},))),
    "in a list": ([OldKind.A, {"k": OldKind.A}], [NewKind.A, {"k": NewKind.A}]),
}


@pytest.mark.parametrize("name", OLD_AND_NEW_VALUES)
def test_object_of_renamed_class_is_decoded_as_new_class(name: str) -> None:
    """An object is decoded as the new class at any depth, also after it was encoded again."""
    old, new = OLD_AND_NEW_VALUES[name]
    decoded = CODEC_WITH_ALIASES.decode(CODEC.encode(old, lambda: "value"))

    assert new == decoded
    assert type(new) is type(decoded)
    assert new == CODEC.decode(CODEC_WITH_ALIASES.encode(decoded, lambda: "value"))


def test_alias_keeps_private_attributes_and_fills_new_fields_with_defaults() -> None:
    """Private attributes keep their values.

    A field that only the new class has gets its default.
    """
    old = OldModel(n=1)
    old._private = 7
    decoded = CODEC_WITH_ALIASES.decode(CODEC.encode(old, lambda: "value"))

    assert decoded._private == 7
    assert decoded.added == "default"
    assert decoded.model_fields_set == {"n"}


def test_decoding_does_not_import_old_module_of_alias() -> None:
    """Only the target of an alias is imported, when the checkpointer is opened."""
    stored = CODEC.encode(Outer.Nested(1), lambda: "value")
    stored_under_old_module = stored.replace(
        bytes((0xA0 | len(HERE),)) + HERE.encode(), bytes((0xA0 | 11,)) + b"gone.module"
    )
    removed_bytes = len(stored) - len(stored_under_old_module)
    length_index = stored_under_old_module.index(b"\xc7") + 1
    stored_under_old_module = (
        stored_under_old_module[:length_index]
        + bytes((stored_under_old_module[length_index] - removed_bytes,))
        + stored_under_old_module[length_index + 1 :]
    )

    assert CODEC_WITH_ALIASES.decode(stored_under_old_module) == Outer.Nested(1)
    assert "gone.module" not in sys.modules


@pytest.fixture(params=["file", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return places(tmp_path)[request.param]()


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    done: Annotated[list[Any], operator.add]
    by_name: dict[str, Any]


def compile_graph(saver: Any, data_class: Any, message_class: Any) -> Any:
    """Compile a graph with one node, which adds a message and an object to the state."""

    def add_message_and_object(state: State) -> State:
        n = len(state["done"])
        return {
            "messages": [message_class(f"said {n}", id=f"m{n}")],
            "done": [data_class(n)],
            "by_name": {**(state.get("by_name") or {}), f"{n}": data_class(n)},
        }

    builder = StateGraph(State).add_node("turn", add_message_and_object).add_edge(START, "turn")
    return builder.compile(checkpointer=saver)


CONFIG: Any = {"configurable": {"thread_id": "t"}}


@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
def test_thread_continues_after_its_classes_were_renamed(place: Place, is_warm: bool) -> None:
    """The whole state has the new class, and no item is stored a second time."""
    with place.saver() as saver:
        graph = compile_graph(saver, OldData, OldHuman)
        for _ in range(3):
            graph.invoke({"messages": [], "done": []}, CONFIG)
    with place.saver(aliases=ALIASES) as saver:
        graph = compile_graph(saver, NewData, NewHuman)
        if is_warm:
            saver.history("t")
        for _ in range(3):
            state = graph.invoke({"messages": [], "done": []}, CONFIG)
        assert state["done"] == [NewData(n) for n in range(6)]
        assert {type(message) for message in state["messages"]} == {NewHuman}
        assert state["by_name"] == {f"{n}": NewData(n) for n in range(6)}
        for channel in ("messages", "done", "by_name"):
            assert [item.seen for item in saver.history("t", channel=channel)] == [True] * 6
        oldest = saver.checkpoints("t")[-1]
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_id": oldest.checkpoint_id}}
        assert graph.get_state(config).values["done"] == []


def test_object_of_missing_class_is_read_as_dict_and_alias_is_suggested(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fields are read as a dict. The log names the missing class and suggests an alias."""
    monkeypatch.setattr(
        values, "_noted", set()
    )  # values that were logged before are not logged again
    shop_module = ModuleType("renamed_shop")
    order_class = dataclasses.make_dataclass(
        "Order", ["n"], namespace={"__module__": "renamed_shop"}
    )
    shop_module.Order = order_class  # type: ignore[attr-defined]
    sys.modules["renamed_shop"] = shop_module
    try:
        with place.saver() as saver:
            config = put(saver, {"order": order_class(1)})
            del shop_module.Order
        with place.saver() as saver, caplog.at_level(logging.WARNING, "perdure"):
            stored = saver.get_tuple(config)
            assert stored is not None
            assert stored.checkpoint["channel_values"] == {"order": {"n": 1}}
            config = put(saver, stored.checkpoint["channel_values"], config)
    finally:
        del sys.modules["renamed_shop"]
    [line] = [
        record.getMessage() for record in caplog.records if "renamed_shop" in record.getMessage()
    ]
    assert "'renamed_shop' has no class 'Order'" in line
    assert "aliases={('renamed_shop', 'Order'): NewClass}" in line
    with place.saver(aliases={"renamed_shop:Order": NewData}) as saver:
        stored = saver.get_tuple(config)
        assert stored is not None
        assert stored.checkpoint["channel_values"] == {"order": NewData(1)}


def test_alias_target_may_be_another_alias() -> None:
    """A class that was renamed twice has one alias per name.

    The order of the aliases does not matter.
    """
    chain: Any = [((HERE, "OldData"), ("middle", "Data")), (("middle", "Data"), NewData)]
    for pairs in (chain, chain[::-1], dict(chain)):
        codec = Codec(JsonPlusSerializer(allowed_msgpack_modules=None), StoredTypes((), pairs))
        assert codec.types.find_alias_target((HERE, "OldData")) is NewData
        assert codec.types.find_alias_target(("middle", "Data")) is NewData


INVALID_ALIASES: dict[str, tuple[Any, str]] = {
    "alias of itself": ({("m", "A"): ("m", "A")}, "form a cycle: m.A to m.A"),
    "cycle of two": ({("m", "A"): ("m", "B"), ("m", "B"): ("m", "A")}, "form a cycle"),
    "cycle through class": ({("m", "A"): NewData, (HERE, "NewData"): ("m", "A")}, "form a cycle"),
    "missing module": ({("m", "A"): ("no_module_of_that_name", "B")}, "cannot be imported"),
    "missing class": ({("m", "A"): (HERE, "NoSuchClass")}, "but this class does not exist"),
    "target is function": ({("m", "A"): (HERE, "compile_graph")}, "but this class does not exist"),
    "two targets": ([(("m", "A"), NewData), ("m:A", NewPair)], "'aliases' maps m.A to two classes"),
    "unsupported class": (
        {("m", "A"): Path},
        "not a pydantic model, dataclass, enum or named tuple",
    ),
    "langgraph class": ({("langgraph.types", "Send"): NewData}, "only classes of your own"),
    "name without module": ({"A": NewData}, "a name in aliases is 'A'; expected"),
    "class as name": ({OldData: NewData}, "a name in aliases is"),
    "target is number": ({("m", "A"): 5}, "a target in aliases is 5; expected"),
    "number for dict": (5, "'aliases' is 5; expected a dict"),
    "list without pairs": ([5], r"'aliases' contains 5; expected \(old"),
}


@pytest.mark.parametrize("name", INVALID_ALIASES)
def test_invalid_aliases_are_refused_before_database_is_created(name: str, tmp_path: Path) -> None:
    """Every class and function that opens a checkpointer refuses invalid aliases."""
    aliases, expected_message = INVALID_ALIASES[name]
    path = tmp_path / "x.db"
    dsn = "postgresql://nobody@127.0.0.1:1/none"
    open_functions: list[Callable[[], Any]] = [
        lambda: SQLiteCheckpointer(path, aliases=aliases),
        lambda: SQLiteCheckpointer.open(path, aliases=aliases),
        lambda: SQLiteCheckpointer.from_conn_string(str(path), aliases=aliases),
        lambda: PostgresCheckpointer(dsn, aliases=aliases),
        lambda: open_checkpointer(dsn, aliases=aliases),
    ]
    for open_with_invalid_aliases in open_functions:
        with pytest.raises(ConfigurationError, match=expected_message):
            open_with_invalid_aliases()
    assert not path.exists()


def test_strict_checkpointer_allows_targets_of_aliases() -> None:
    """The target can be read and put again. The old class and other classes are still refused."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        stored = saver._codec.encode([OldData(1)], lambda: "value")
    with SQLiteCheckpointer.open(":memory:", strict=True, aliases=ALIASES) as saver:
        assert saver._codec.decode(stored) == [NewData(1)]
        put(saver, {"v": [NewData(1), NewModel(n=1)]})
        with pytest.raises(ForbiddenType, match="OldData"):
            put(saver, {"v": [OldData(1)]})


def test_aliases_are_refused_with_custom_serializer() -> None:
    """A custom serializer chooses how to store classes, so `aliases=` would have no effect."""

    class CustomSerializer:
        dumps_typed = loads_typed = None

    custom_serializer: Any = CustomSerializer()
    with pytest.raises(ConfigurationError, match="require langgraph's JsonPlusSerializer"):
        SQLiteCheckpointer(":memory:", serde=custom_serializer, aliases=ALIASES)
    serde = JsonPlusSerializer(allowed_msgpack_modules=True)
    with SQLiteCheckpointer.open(":memory:", serde=serde, aliases=ALIASES) as saver:
        assert saver._codec.decode(CODEC.encode(OldData(1), lambda: "")) == NewData(1)


def test_clone_with_allowlist_keeps_aliases() -> None:
    """langgraph adds the classes of a graph's schemas to a clone of the checkpointer."""
    with SQLiteCheckpointer.open(":memory:", strict=True, aliases=ALIASES) as saver:
        clone = saver.with_allowlist([(HERE, "OldPair")])
        assert clone is not saver
        assert clone._codec.decode(CODEC.encode(OldData(1), lambda: "")) == NewData(1)


def test_import_from_langgraph_database_applies_aliases(tmp_path: Path) -> None:
    """`import_from` reads the old name in the forms that langgraph's serializer writes."""
    old = {"pair": OldPair(1), "kind": OldKind.A, "model": OldModel(n=1)}
    with SqliteSaver.from_conn_string(str(tmp_path / "langgraph.db")) as langgraphs:
        config = put(langgraphs, old)
    with SQLiteCheckpointer.open(tmp_path / "x.db", aliases=ALIASES) as saver:
        saver.import_from(str(tmp_path / "langgraph.db"))
        imported = saver.get_tuple(config)
    assert imported is not None
    new = {"pair": NewPair(1), "kind": NewKind.A, "model": NewModel(n=1)}
    assert imported.checkpoint["channel_values"] == new
