"""Aliases: stored objects of a class that was renamed or moved come back as the new class."""

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
RENAMED = Codec(
    JsonPlusSerializer(allowed_msgpack_modules=[Allowlist.LOADED]), StoredTypes((), ALIASES)
)
VALUES: dict[str, tuple[Any, Any]] = {
    "model": (OldModel(n=1), NewModel(n=1)),
    "dataclass": (OldData(1, (2,)), NewData(1, (2,))),
    "enum": (OldKind.A, NewKind.A),
    "named tuple": (OldPair(1, 2), NewPair(1, 2)),
    "message": (
        OldHuman(content="hi", id="1", mood="glad"),
        NewHuman(content="hi", id="1", mood="glad"),
    ),
    "generic model": (OLD_INT_BOX(x=1), NEW_INT_BOX(x=1)),
    "within each other": (
        OldModel(n=1, inner=OldData(2, (OldKind.A, OldPair(1, [OldKind.A])))),
        NewModel(n=1, inner=NewData(2, (NewKind.A, NewPair(1, [NewKind.A])))),
    ),
    "in a Send": (Send("n", {"x": OldData(1)}), Send("n", {"x": NewData(1)})),
    "in a set": ({OldKind.A, OldPair(1)}, {NewKind.A, NewPair(1)}),
    "as a key": (OldData(1, ({OldKind.A: 1},)), NewData(1, ({NewKind.A: 1},))),
    "in a list": ([OldKind.A, {"k": OldKind.A}], [NewKind.A, {"k": NewKind.A}]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_stored_object_comes_back_as_the_new_class(name: str) -> None:
    """At any depth; put again it is stored under the new name, and comes back the same."""
    old, new = VALUES[name]
    back = RENAMED.decode(CODEC.encode(old, lambda: "value"))

    assert new == back
    assert type(new) is type(back)
    assert new == CODEC.decode(RENAMED.encode(back, lambda: "value"))


def test_what_a_model_holds_comes_back() -> None:
    """Private attributes as they were, and a field that the new class added with its default."""
    old = OldModel(n=1)
    old._private = 7
    back = RENAMED.decode(CODEC.encode(old, lambda: "value"))

    assert back._private == 7
    assert back.added == "default"
    assert back.model_fields_set == {"n"}


def test_a_module_that_is_gone_is_not_imported() -> None:
    """Only the target of an alias is imported, when the checkpointer is opened."""
    stored = CODEC.encode(Outer.Nested(1), lambda: "value")
    moved = stored.replace(
        bytes((0xA0 | len(HERE),)) + HERE.encode(), bytes((0xA0 | 11,)) + b"gone.module"
    )
    shorter = len(stored) - len(moved)
    at = moved.index(b"\xc7") + 1
    moved = moved[:at] + bytes((moved[at] - shorter,)) + moved[at + 1 :]

    assert RENAMED.decode(moved) == Outer.Nested(1)
    assert "gone.module" not in sys.modules


@pytest.fixture(params=["file", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return places(tmp_path)[request.param]()


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    done: Annotated[list[Any], operator.add]
    by_name: dict[str, Any]


def graph_with(saver: Any, kind: Any, human: Any) -> Any:
    """A turn says something with a message of its own class, and notes what was done."""

    def turn(state: State) -> State:
        n = len(state["done"])
        return {
            "messages": [human(f"said {n}", id=f"m{n}")],
            "done": [kind(n)],
            "by_name": {**(state.get("by_name") or {}), f"{n}": kind(n)},
        }

    builder = StateGraph(State).add_node("turn", turn).add_edge(START, "turn")
    return builder.compile(checkpointer=saver)


CONFIG: Any = {"configurable": {"thread_id": "t"}}


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_a_thread_goes_on_after_a_class_was_renamed(place: Place, warm: bool) -> None:
    """The state has the new class throughout, and nothing that was stored is stored again."""
    with place.saver() as saver:
        graph = graph_with(saver, OldData, OldHuman)
        for _ in range(3):
            graph.invoke({"messages": [], "done": []}, CONFIG)
    with place.saver(aliases=ALIASES) as saver:
        graph = graph_with(saver, NewData, NewHuman)
        if warm:
            saver.history("t")
        for _ in range(3):
            out = graph.invoke({"messages": [], "done": []}, CONFIG)
        assert out["done"] == [NewData(n) for n in range(6)]
        assert {type(message) for message in out["messages"]} == {NewHuman}
        assert out["by_name"] == {f"{n}": NewData(n) for n in range(6)}
        for channel in ("messages", "done", "by_name"):
            assert [item.seen for item in saver.history("t", channel=channel)] == [True] * 6
        forked = saver.checkpoints("t")[-1]
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_id": forked.checkpoint_id}}
        assert graph.get_state(config).values["done"] == []


def test_without_the_alias_nothing_is_lost(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fields come back as a dict, and the log names what is missing, and an alias."""
    monkeypatch.setattr(values, "_noted", set())  # what was logged is not logged again
    renamed = ModuleType("renamed_shop")
    cls = dataclasses.make_dataclass("Order", ["n"], namespace={"__module__": "renamed_shop"})
    renamed.Order = cls  # type: ignore[attr-defined]
    sys.modules["renamed_shop"] = renamed
    try:
        with place.saver() as saver:
            config = put(saver, {"order": cls(1)})
            del renamed.Order
        with place.saver() as saver, caplog.at_level(logging.WARNING, "perdure"):
            found = saver.get_tuple(config)
            assert found is not None
            assert found.checkpoint["channel_values"] == {"order": {"n": 1}}
            config = put(saver, found.checkpoint["channel_values"], config)
    finally:
        del sys.modules["renamed_shop"]
    [line] = [each.getMessage() for each in caplog.records if "renamed_shop" in each.getMessage()]
    assert "'renamed_shop' has no class 'Order'" in line
    assert "aliases={('renamed_shop', 'Order'): NewClass}" in line
    with place.saver(aliases={"renamed_shop:Order": NewData}) as saver:
        found = saver.get_tuple(config)
        assert found is not None
        assert found.checkpoint["channel_values"] == {"order": NewData(1)}


def test_aliases_lead_on_to_other_aliases() -> None:
    """A class that was renamed twice has one alias for each name, whatever their order."""
    chain: Any = [((HERE, "OldData"), ("middle", "Data")), (("middle", "Data"), NewData)]
    for pairs in (chain, chain[::-1], dict(chain)):
        codec = Codec(JsonPlusSerializer(allowed_msgpack_modules=None), StoredTypes((), pairs))
        assert codec.types.find_alias_target((HERE, "OldData")) is NewData
        assert codec.types.find_alias_target(("middle", "Data")) is NewData


FAULTS: dict[str, tuple[Any, str]] = {
    "itself": ({("m", "A"): ("m", "A")}, "form a cycle: m.A to m.A"),
    "two": ({("m", "A"): ("m", "B"), ("m", "B"): ("m", "A")}, "form a cycle"),
    "over the class": ({("m", "A"): NewData, (HERE, "NewData"): ("m", "A")}, "form a cycle"),
    "no module": ({("m", "A"): ("no_module_of_that_name", "B")}, "cannot be imported"),
    "no class": ({("m", "A"): (HERE, "NoSuchClass")}, "there is no such class"),
    "a function": ({("m", "A"): (HERE, "graph_with")}, "there is no such class"),
    "two targets": ([(("m", "A"), NewData), ("m:A", NewPair)], "two targets for m.A"),
    "another kind": ({("m", "A"): Path}, "not a pydantic model, dataclass, enum or named tuple"),
    "langgraph's": ({("langgraph.types", "Send"): NewData}, "only classes of your own"),
    "no name": ({"A": NewData}, "a name in aliases is 'A'; expected"),
    "a class as a name": ({OldData: NewData}, "a name in aliases is"),
    "no target": ({("m", "A"): 5}, "a target in aliases is 5; expected"),
    "no dict": (5, "aliases is 5; expected a dict"),
    "no pairs": ([5], r"aliases contains 5; expected \(old"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_aliases_that_lead_nowhere_are_refused_when_it_is_opened(name: str, tmp_path: Path) -> None:
    """By every class and function that opens a checkpointer, before anything is created."""
    aliases, expected = FAULTS[name]
    path = tmp_path / "x.db"
    dsn = "postgresql://nobody@127.0.0.1:1/none"
    opening: list[Callable[[], Any]] = [
        lambda: SQLiteCheckpointer(path, aliases=aliases),
        lambda: SQLiteCheckpointer.open(path, aliases=aliases),
        lambda: SQLiteCheckpointer.from_conn_string(str(path), aliases=aliases),
        lambda: PostgresCheckpointer(dsn, aliases=aliases),
        lambda: open_checkpointer(dsn, aliases=aliases),
    ]
    for fails in opening:
        with pytest.raises(ConfigurationError, match=expected):
            fails()
    assert not path.exists()


def test_the_target_of_an_alias_is_allowed_under_the_strict_rule() -> None:
    """The target can be read and put again; the old class and other classes are still refused."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        stored = saver._codec.encode([OldData(1)], lambda: "value")
    with SQLiteCheckpointer.open(":memory:", strict=True, aliases=ALIASES) as saver:
        assert saver._codec.decode(stored) == [NewData(1)]
        put(saver, {"v": [NewData(1), NewModel(n=1)]})
        with pytest.raises(ForbiddenType, match="OldData"):
            put(saver, {"v": [OldData(1)]})


def test_a_serializer_of_ones_own_takes_no_aliases() -> None:
    """A serializer of the user chooses how to store classes, so `aliases=` would have no effect."""

    class Own:
        dumps_typed = loads_typed = None

    own: Any = Own()
    with pytest.raises(ConfigurationError, match="require langgraph's JsonPlusSerializer"):
        SQLiteCheckpointer(":memory:", serde=own, aliases=ALIASES)
    serde = JsonPlusSerializer(allowed_msgpack_modules=True)
    with SQLiteCheckpointer.open(":memory:", serde=serde, aliases=ALIASES) as saver:
        assert saver._codec.decode(CODEC.encode(OldData(1), lambda: "")) == NewData(1)


def test_the_clone_that_langgraph_makes_has_the_aliases() -> None:
    """langgraph adds the classes of a graph's schemas to a clone of the checkpointer."""
    with SQLiteCheckpointer.open(":memory:", strict=True, aliases=ALIASES) as saver:
        clone = saver.with_allowlist([(HERE, "OldPair")])
        assert clone is not saver
        assert clone._codec.decode(CODEC.encode(OldData(1), lambda: "")) == NewData(1)


def test_what_langgraphs_savers_wrote_is_imported_as_the_new_class(tmp_path: Path) -> None:
    """`import_from` reads the old name in the forms that langgraph's serializer writes."""
    old = {"pair": OldPair(1), "kind": OldKind.A, "model": OldModel(n=1)}
    with SqliteSaver.from_conn_string(str(tmp_path / "langgraph.db")) as langgraphs:
        config = put(langgraphs, old)
    with SQLiteCheckpointer.open(tmp_path / "x.db", aliases=ALIASES) as saver:
        saver.import_from(str(tmp_path / "langgraph.db"))
        found = saver.get_tuple(config)
    assert found is not None
    new = {"pair": NewPair(1), "kind": NewKind.A, "model": NewModel(n=1)}
    assert found.checkpoint["channel_values"] == new
