"""Types that a program registers with `types=`, and stores and loads by its own functions."""

from __future__ import annotations

import dataclasses
import logging
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypedDict

import ormsgpack
import pandas  # type: ignore[import-untyped]
import pytest
from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, StateGraph, add_messages
from langgraph.types import Send, interrupt
from pydantic import BaseModel, ConfigDict

from perdure.checkpointers import SQLiteCheckpointer, StoredType, open_checkpointer, values
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.postgres import PostgresCheckpointer
from perdure.checkpointers.stored_types import StoredTypes
from perdure.checkpointers.values import Allowlist
from perdure.errors import ConfigurationError, ForbiddenType, SerializationError, Unstorable
from tests.backends import KEY, Place, places
from tests.contracts.plain_classes import CODEC, STRICT, Fixed, Point
from tests.contracts.test_types import put

CONFIG: Any = {"configurable": {"thread_id": "t"}}
MESSAGE_TEXT = "Ann's telephone number is 0470 12 34 56"


class Sheet:
    """A table that perdure refuses, stored compressed."""

    def __init__(self, cells: list[str]) -> None:
        self.cells = cells

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def dumped(self) -> bytes:
        return zlib.compress("\0".join(self.cells).encode())

    @classmethod
    def loaded(cls, data: bytes) -> Sheet:
        return cls(zlib.decompress(data).decode().split("\0"))


class WideSheet(Sheet):
    pass


class Tree:
    """A class whose values contain values of the same class."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return type(other) is Tree and other.parts == self.parts

    def __hash__(self) -> int:
        return hash(self.parts)


@dataclasses.dataclass
class Holding:
    share: Fraction
    more: Any = None


class Report(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    sheet: Sheet


FRACTION = StoredType(Fraction, str, Fraction)
SHEET = StoredType(Sheet, Sheet.dumped, Sheet.loaded)
SEARCHED = dataclasses.replace(SHEET, texts=lambda sheet: sheet.cells)
TREE = StoredType(Tree, lambda tree: tree.parts, lambda parts: Tree(*parts))
TYPES = [FRACTION, SHEET, TREE]


def codec_with(*types: Any, aliases: Any = ()) -> Codec:
    serde = JsonPlusSerializer(allowed_msgpack_modules=[Allowlist.LOADED])
    return Codec(serde, StoredTypes(types, aliases))


def encode(codec: Codec, value: Any) -> bytes:
    return codec.encode(value, lambda: "value")


REGISTERED = codec_with(*TYPES)
HALF = Fraction(1, 2)
VALUES: dict[str, Any] = {
    "alone": HALF,
    "bytes": Sheet(["a", "b"]),
    "in a list and a dict": [{"x": HALF}, [HALF]],
    "in a set": {HALF, Fraction(1, 3)},
    "in a dataclass": Holding(HALF, (Sheet(["a"]), {"k": HALF})),
    "in a model": Report(sheet=Sheet(["a"])),
    "in a Send": Send("n", {"x": HALF}),
    "in each other": Tree(Tree(HALF, Sheet(["a"])), Tree(), 1),
    "deep": Tree(Tree(Tree(Tree(Tree(Tree(Tree(Tree(Tree(Tree(Tree(HALF))))))))))),
}


@pytest.mark.parametrize("name", VALUES)
def test_value_of_registered_type_round_trips(name: str) -> None:
    """Reading returns an equal value of the same type, which is encoded to the same bytes again."""
    stored = encode(REGISTERED, VALUES[name])
    decoded = REGISTERED.decode(stored)

    assert VALUES[name] == decoded
    assert type(VALUES[name]) is type(decoded)
    assert stored == encode(REGISTERED, decoded)


def test_value_of_registered_type_round_trips_within_messages() -> None:
    """`additional_kwargs` and `artifact` of a message may contain the value."""
    human = HumanMessage("x", id="1", additional_kwargs={"share": HALF, "deep": [{"s": HALF}]})
    result = ToolMessage("x", id="2", tool_call_id="c", artifact=Sheet(["a"]))
    for message in (human, result):
        stored = encode(REGISTERED, message)
        decoded = REGISTERED.decode(stored)
        assert message == decoded
        assert stored == encode(REGISTERED, decoded)
        # a process that does not know the types puts the same message again
        assert stored == encode(CODEC, CODEC.decode(stored))


@pytest.mark.parametrize("name", VALUES)
def test_process_without_the_registration_stores_the_same_bytes_again(name: str) -> None:
    """The process reads the result of `dump` in a dict, and stores the dict as the same bytes."""
    stored = encode(REGISTERED, VALUES[name])
    decoded = CODEC.decode(stored)

    assert stored == encode(CODEC, decoded)
    assert VALUES[name] == REGISTERED.decode(encode(CODEC, decoded))
    with pytest.raises(ForbiddenType):
        STRICT.decode(stored)


def test_reading_an_unregistered_type_logs_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning names the option that is missing."""
    monkeypatch.setattr(values, "_noted", set())
    with caplog.at_level(logging.WARNING, "perdure"):
        for _ in range(2):
            assert CODEC.decode(encode(REGISTERED, HALF)) == {"value": "1/2"}
    [line] = [record.getMessage() for record in caplog.records]
    assert "fractions.Fraction" in line
    assert "types=[StoredType(cls, dump, load)]" in line


def test_refusal_suggests_registering_the_type_before_pickle() -> None:
    """The error also says that pickle runs code from the database."""
    with pytest.raises(Unstorable) as refused:
        encode(CODEC, {"a": [Sheet(["a"])]})
    text = str(refused.value)

    assert "value['a'][0] is a Sheet" in text
    assert "types=[StoredType(Sheet, dump, load)]" in text
    assert text.index("StoredType") < text.index("pickle_fallback=True")
    assert "runs code from the database" in text


# -- pairs of functions that are wrong


def fail(*_: Any) -> Any:
    raise ValueError("no such sheet")


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "dump raises": (
        fail,
        Sheet.loaded,
        "the dump function of the registered type raised ValueError: no such",
    ),
    "load raises": (
        Sheet.dumped,
        fail,
        "the load function of the registered type raised ValueError: no such",
    ),
    "load returns another type": (Sheet.dumped, lambda data: data, "returned a bytes; expected a"),
    "load returns a subclass": (
        Sheet.dumped,
        WideSheet.loaded,
        "returned a WideSheet; expected a Sheet",
    ),
    "dump returns an object": (lambda sheet: object(), Sheet.loaded, "not msgpack serializable"),
    "dump returns the value": (lambda sheet: sheet, lambda sheet: sheet, "nested deeper"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_put_refuses_value_whose_dump_or_load_is_wrong(name: str) -> None:
    """The error names the path of the value, and nothing is written."""
    dump, load, expected = PAIRS[name]
    with SQLiteCheckpointer.open(":memory:", types=[StoredType(Sheet, dump, load)]) as saver:
        with pytest.raises(Unstorable, match=expected) as refused:
            put(saver, {"v": {"sheets": [Sheet(["a"])]}})
        assert "channel_values['v']" in str(refused.value)
        assert list(saver.list(None)) == []


def test_value_whose_load_fails_is_read_as_dict_and_stored_unchanged() -> None:
    """The rest of the state is read as usual."""
    stored = encode(REGISTERED, [1, Sheet(["a"])])
    broken = codec_with(StoredType(Sheet, Sheet.dumped, fail))
    decoded = broken.decode(stored)

    assert decoded[0] == 1
    assert isinstance(decoded[1], dict)
    assert stored == encode(broken, decoded)


def test_subclass_of_registered_type_is_refused_unless_registered_itself() -> None:
    """A subclass that was stored as its base class would be read as another value."""
    with pytest.raises(Unstorable, match="WideSheet"):
        encode(REGISTERED, WideSheet(["a"]))
    load: Any = WideSheet.loaded
    wide = StoredType(WideSheet, WideSheet.dumped, load)
    both = codec_with(SHEET, wide)
    for value in (Sheet(["a"]), WideSheet(["a"])):
        assert type(both.decode(encode(both, value))) is type(value)


CALLABLES = [("os", "system", "touch /nowhere"), ("builtins", "eval", "1/0"), ("", "", None)]


@pytest.mark.parametrize(("module", "name", "payload"), CALLABLES)
def test_row_that_names_an_unregistered_callable_calls_nothing(
    module: str, name: str, payload: Any
) -> None:
    """The payload of the row is returned as data, whichever name the row contains."""
    inner = ormsgpack.packb([module, name, payload])
    row = b"\x10" + ormsgpack.packb(ormsgpack.Ext(66, inner))

    assert REGISTERED.decode(row) == {"value": payload}


# -- options


class Count(int):
    pass


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "one type twice": (lambda: [SHEET, SHEET], "'types' registers the class"),
    "one name twice": (
        lambda: [SHEET, dataclasses.replace(FRACTION, name=SHEET.stored_name)],
        "'types' registers the class Fraction or the name .* twice",
    ),
    "no list": (lambda: SHEET, "'types' is .*; expected a list"),
    "no StoredType": (lambda: [Sheet], "'types' contains .*; expected instances of StoredType"),
    "a dataclass": (
        lambda: [StoredType(Point, str, Point)],
        "the class Point does not need a StoredType",
    ),
    "a builtin": (
        lambda: [StoredType(str, str, str)],
        "the class str does not need a StoredType",
    ),
    "a message": (lambda: [StoredType(HumanMessage, str, HumanMessage)], "without registration"),
    "no class": (lambda: [StoredType("Sheet", str, str)], "expected a class"),  # type: ignore[arg-type]
    "no function": (lambda: [StoredType(Sheet, None, str)], "'dump' of the StoredType for Sheet"),  # type: ignore[arg-type]
    "a bad name": (lambda: [dataclasses.replace(SHEET, name="Sheet")], "'name' is 'Sheet'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_opening_a_checkpointer_refuses_wrong_types(name: str, tmp_path: Path) -> None:
    """Every class and function that opens a checkpointer refuses the same types."""
    make, expected = FAULTS[name]
    open_functions: list[Callable[[], Any]] = [
        lambda: SQLiteCheckpointer(tmp_path / "x.db", types=make()),
        lambda: SQLiteCheckpointer.open(tmp_path / "x.db", types=make()),
        lambda: PostgresCheckpointer("postgresql://nobody@127.0.0.1:1/none", types=make()),
        lambda: open_checkpointer(str(tmp_path / "x.db"), types=make()),
    ]
    for open_checkpointer_somehow in open_functions:
        with pytest.raises(ConfigurationError, match=expected):
            open_checkpointer_somehow()


def test_registered_subclass_of_builtin_round_trips() -> None:
    """A subclass of a builtin that is not registered is read as the builtin."""
    codec = codec_with(StoredType(Count, int, Count))
    assert type(codec.decode(encode(codec, [Count(3)]))[0]) is Count
    assert type(codec.decode(encode(codec, [3]))[0]) is int


def test_renamed_type_is_read_by_alias_or_stored_name() -> None:
    """The type is read by an alias of its stored name, or by a stored name that it always had."""
    stored = encode(REGISTERED, Sheet(["a"]))
    renamed = codec_with(
        dataclasses.replace(SHEET, name="shop:Sheet"), aliases={(__name__, "Sheet"): Sheet}
    )
    assert renamed.decode(stored) == Sheet(["a"])
    moved = encode(renamed, Sheet(["a"]))
    assert b"shop" in moved
    assert renamed.decode(moved) == Sheet(["a"])
    assert list(renamed.iter_encodings_with_former_class_names(Sheet(["a"]), moved)) == [stored]


def test_by_serializer_stores_and_rebuilds_only_its_type() -> None:
    """Pickle is used only if `pickle_fallback` asks for it. No other class is rebuilt."""
    pickled = StoredType.by_serializer(Sheet, JsonPlusSerializer(pickle_fallback=True))
    codec = codec_with(pickled)
    stored = encode(codec, [Sheet(["a"])])
    assert codec.decode(stored) == [Sheet(["a"])]
    unpickled = codec_with(StoredType.by_serializer(Sheet, JsonPlusSerializer()))
    with pytest.raises(Unstorable, match="dump function of the registered type raised"):
        encode(unpickled, Sheet(["a"]))
    assert isinstance(unpickled.decode(stored)[0], dict)  # a row cannot ask for pickle

    other = JsonPlusSerializer().dumps_typed(Fixed(1))
    inner = ormsgpack.packb([__name__, "Sheet", [*other]])
    row = b"\x10" + ormsgpack.packb(ormsgpack.Ext(66, inner))
    assert isinstance(codec.decode(row), dict)


@pytest.mark.parametrize("wrong", [None, "jsonplus", object()], ids=type)
def test_by_serializer_refuses_object_that_is_no_serializer(wrong: Any) -> None:
    """A wrong serializer is refused when the type is registered, not at the first put."""
    with pytest.raises(ConfigurationError, match="expected a langgraph serializer"):
        StoredType.by_serializer(Sheet, wrong)


def test_pandas_data_frame_round_trips() -> None:
    """The frame can be stored by a pair of functions, or by langgraph's serializer."""
    frame = pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]})

    def dump(frame: Any) -> Any:
        return frame.to_dict("split")

    def load(parts: Any) -> Any:
        return pandas.DataFrame(**parts)

    pairs = [
        StoredType(pandas.DataFrame, dump, load),
        StoredType.by_serializer(pandas.DataFrame, JsonPlusSerializer(pickle_fallback=True)),
    ]
    for pair in pairs:
        codec = codec_with(pair)
        assert frame.equals(codec.decode(encode(codec, [frame]))[0])


# -- in graphs


@pytest.fixture(params=["file", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return places(tmp_path)[request.param]()


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    share: Any
    sheets: list[Any]


def build_graph(saver: Any) -> Any:
    def add_sheet(state: State) -> State:
        sheets = [*(state.get("sheets") or []), Sheet([f"{len(state['messages'])}"])]
        return {"share": HALF, "sheets": sheets}

    def ask(state: State) -> State:
        return {"share": interrupt(state.get("share"))}

    builder = StateGraph(State).add_node("turn", add_sheet).add_node("ask", ask)
    builder.add_edge(START, "turn").add_edge("turn", "ask")
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("key", [None, KEY], ids=["clear", "encrypted"])
def test_thread_with_registered_types_is_resumed_copied_and_imported(
    place: Place, key: Any, tmp_path: Path
) -> None:
    """Values are restored in state, history, interrupts, copies and imports."""
    with place.saver(types=TYPES, key=key) as saver:
        graph = build_graph(saver)
        graph.invoke({"messages": [("human", "hi")]}, CONFIG)
    with place.saver(types=TYPES, key=key) as saver:
        graph = build_graph(saver)
        assert saver.status("t").interrupts[0].value == HALF
        graph.invoke({"messages": [("human", "again")]}, CONFIG)
        state = graph.get_state(CONFIG).values
        assert state["sheets"] == [Sheet(["1"]), Sheet(["2"])]
        assert [item.value for item in saver.history("t", channel="sheets")] == state["sheets"]
    with place.saver(key=key) as saver:  # without types, like the command line
        saver.copy_thread("t", "copy")
        with SQLiteCheckpointer.open(tmp_path / "merged.db") as merged:
            merged.import_from(saver)
    with SQLiteCheckpointer.open(tmp_path / "merged.db", types=TYPES) as merged:
        for thread in ("t", "copy"):
            values = build_graph(merged).get_state({"configurable": {"thread_id": thread}}).values
            assert values["sheets"] == [Sheet(["1"]), Sheet(["2"])]
            assert values["share"] == HALF


# -- erasure


def run_turn_with_sheets(saver: Any, *sheets: Sheet, **more: Any) -> Any:
    builder = StateGraph(State).add_node("turn", lambda state: {"sheets": [*sheets], **more})
    graph: Any = builder.add_edge(START, "turn").compile(checkpointer=saver)
    messages = [HumanMessage(MESSAGE_TEXT, id="m1"), HumanMessage("and another", id="m2")]
    graph.invoke({"messages": messages}, CONFIG)
    return graph


def test_erase_removes_registered_values_whose_texts_quote_the_message(place: Place) -> None:
    """A value that quotes the erased message is removed. Other values of its type stay."""
    with place.saver(types=[SEARCHED]) as saver:
        graph = run_turn_with_sheets(
            saver, Sheet(["x", f"note: {MESSAGE_TEXT}!"]), Sheet(["y"]), share=Sheet([MESSAGE_TEXT])
        )
        saver.erase("t", ["m1"])
        state = graph.get_state(CONFIG).values

        assert state["sheets"] == [Sheet(["y"])]
        assert state.get("share") is None
        assert [item.value for item in saver.history("t", channel="sheets")] == [Sheet(["y"])]


def test_erase_keeps_registered_values_of_types_without_texts(place: Place) -> None:
    """The documentation describes this limit."""
    with place.saver(types=[SHEET]) as saver:
        graph = run_turn_with_sheets(saver, Sheet([MESSAGE_TEXT]))
        saver.erase("t", ["m1"])
        assert graph.get_state(CONFIG).values["sheets"] == [Sheet([MESSAGE_TEXT])]


@pytest.mark.parametrize(
    "texts", [fail, lambda sheet: [1], lambda sheet: None, lambda sheet: "a text"]
)
def test_erase_fails_without_changes_if_texts_function_fails(texts: Any) -> None:
    """The error tells the caller that nothing was erased."""
    types = [dataclasses.replace(SHEET, texts=texts)]
    with SQLiteCheckpointer.open(":memory:", types=types) as saver:
        run_turn_with_sheets(saver, Sheet(["x"]))
        with pytest.raises(
            SerializationError,
            match=r"the function passed as texts= .* values of the registered type",
        ):
            saver.erase("t", ["m1"])
        assert [item.value.text for item in saver.history("t")] == [MESSAGE_TEXT, "and another"]
