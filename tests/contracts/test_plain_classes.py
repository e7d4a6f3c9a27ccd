"""Pydantic models, dataclasses, enums and named tuples in the state, with no option."""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID

import numpy as np
import ormsgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Command, Interrupt, Send
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, PrivateAttr, RootModel, SecretStr
from pydantic.dataclasses import dataclass as pydantic_dataclass

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.extensions import Allowlist
from perdure.errors import CorruptRecord, ForbiddenType, Unstorable
from tests.contracts.test_types import dump, put

T = TypeVar("T")
CODE_RAN: list[str] = []


def ran(what: str) -> Callable[..., Any]:
    """A function that notes that it was called."""

    def note(*args: Any, **kwargs: Any) -> Any:
        CODE_RAN.append(what)
        raise AssertionError(what)

    return note


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, "a")
    ONE = 1
    TRUE = 1.5


class Mood(enum.StrEnum):
    FINE = "fine"


class Level(enum.IntEnum):
    LOW = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Bit(enum.IntFlag):
    A = 1
    B = 2


class Place(NamedTuple):
    x: int
    name: str = "here"


@dataclasses.dataclass
class Point:
    x: int
    inner: Any = None
    made: int = dataclasses.field(init=False, default=3)

    def __post_init__(self) -> None:
        self.doubled = self.x * 2

    @functools.cached_property
    def slow(self) -> object:
        return object()


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    x: int
    tags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class FixedChild(Fixed):
    y: int = 0


@pydantic_dataclass
class Checked:
    x: int


class Inner(BaseModel):
    n: int


class Outer(BaseModel):
    inner: Inner
    many: list[Inner] = []
    by_name: dict[str, Inner] = {}
    maybe: Inner | None = None
    point: Point | None = None
    pair: tuple[int, str] = (0, "")
    kinds: set[Mood] = set()
    by_mood: dict[Mood, int] = {}
    raw: Any = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)
    n: int = 1
    _note: str = PrivateAttr(default="none")
    _unset: int = PrivateAttr()

    class Nested(BaseModel):
        n: int


class Aliased(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True)
    name: str = Field(alias="fullName")


class Box(BaseModel, Generic[T]):
    x: T


class Tags(RootModel[list[str]]):
    pass


class Web(BaseModel):
    url: HttpUrl
    key: SecretStr


INT_BOX = Box[int]
CODEC = Codec(JsonPlusSerializer(allowed_msgpack_modules=[Allowlist.LOADED]))
STRICT = Codec(JsonPlusSerializer(allowed_msgpack_modules=None))


def again(value: Any) -> Any:
    """A value stored and read back."""
    return CODEC.decode(CODEC.encode(value, lambda: "value"))


@pytest.fixture(autouse=True)
def _no_code_ran() -> Iterator[None]:
    CODE_RAN.clear()
    yield
    assert CODE_RAN == []


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
    back = again(value)

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
    back = again(value)

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
    | st.sets(st.integers(0, 9) | st.text(max_size=2), max_size=3)
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

    assert dump(serde.loads_typed((name, data))) == dump(again(value))
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
    back = again(value)

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
    assert WRITTEN[name] == CODEC.load("msgpack", data)


# -- no code of a class runs


class EvilModel(BaseModel):
    n: int = 1

    def model_post_init(self, context: Any) -> None:
        if CODE_RAN == ["armed"]:
            ran("model_post_init")()


@dataclasses.dataclass
class EvilClass:
    n: int = 1


@dataclasses.dataclass(slots=True)
class EvilSlots:
    n: int = 1


class EvilTuple(NamedTuple):
    n: int = 1


class EvilEnum(enum.Enum):
    A = 1


class EvilFlag(enum.Flag):
    A = 1
    B = 2


EVIL = [EvilModel(), EvilClass(), EvilSlots(), EvilTuple(), EvilEnum.A, EvilFlag.A | EvilFlag.B]
HOOKS = ["__init__", "__new__", "__post_init__", "__setattr__", "__setstate__", "__reduce__"]
HOOKS += ["__reduce_ex__", "model_post_init", "model_validate", "model_construct", "_make"]
HOOKS += ["__del__", "__getattr__", "__getattribute__", "_missing_", "__call__", "n_setter"]


@pytest.mark.parametrize("value", EVIL, ids=lambda v: type(v).__name__)
def test_no_code_of_the_class_runs_when_it_is_read(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a constructor, validator, hook or method of it, and it comes back all the same."""
    stored = CODEC.encode([value, {"deep": (value,)}], lambda: "value")
    cls = type(value)
    hooks = set(HOOKS)
    if issubclass(cls, enum.Enum):
        hooks -= {"__new__"}  # `enum` replaces it
    if issubclass(cls, enum.Flag):
        hooks -= {"__setattr__", "__getattr__", "__getattribute__", "__del__"}  # see below
    with monkeypatch.context() as patch:
        for hook in hooks:
            patch.setattr(cls, hook, ran(hook), raising=False)
        back = CODEC.decode(stored)

    assert [value, {"deep": [value]}] == back or [value, {"deep": (value,)}] == back
    assert type(back[0]) is cls


@pytest.mark.parametrize("hook", ["__setattr__", "__getattr__", "__getattribute__", "__del__"])
def test_a_flag_with_hooks_makes_no_combinations(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`enum` itself would call them; its members come back, of a combination the value."""
    stored = CODEC.encode([EvilFlag.A, EvilFlag.A | EvilFlag.B], lambda: "value")
    with monkeypatch.context() as patch:
        patch.setattr(EvilFlag, hook, ran(hook), raising=False)
        back = CODEC.decode(stored)

    assert back == [EvilFlag.A, {"value": 3}]


def test_a_member_that_no_longer_exists_is_a_dict() -> None:
    """An enum is asked for no member by `_missing_`; its value stays, and its type."""
    data = JsonPlusSerializer().dumps_typed(Colour.RED)[1].replace(b"\xa3red", b"\xa3new")
    back = CODEC.decode(b"\x10" + data)

    assert back == {"value": "new"}
    assert b"\x10" + data == CODEC.encode(back, lambda: "value")


def row(module: str, name: str, payload: Any, code: int = 2, *rest: Any) -> bytes:
    """A stored value that names a class, as whoever can write to the file might make it."""
    inner = ormsgpack.packb([module, name, payload, *rest])
    return b"\x10" + ormsgpack.packb(ormsgpack.Ext(code, inner))


CALLABLES = [
    ("os", "system", "touch /nowhere/hacked"),
    ("builtins", "eval", "1/0"),
    ("builtins", "exec", "raise SystemExit"),
    ("subprocess", "Popen", ["false"]),
    ("tests.contracts.test_plain_classes", "ran", ["row"]),
    ("tests.contracts.test_plain_classes", "Outer.model_validate", {}),
    ("tests.contracts.test_plain_classes", "EvilClass.__init__", {}),
    ("importlib", "import_module", "antigravity"),
    ("this", "s", {}),
    ("a module that is none", "", {}),
    ("", "", None),
]


@pytest.mark.parametrize("code", range(6))
@pytest.mark.parametrize(("module", "name", "payload"), CALLABLES)
def test_nothing_is_called_or_imported_because_a_row_names_it(
    module: str, name: str, payload: Any, code: int
) -> None:
    """The payload comes back as data."""
    before = set(sys.modules)
    back = CODEC.decode(row(module, name, payload, code))

    assert (payload if isinstance(payload, dict) else {"value": payload}) == back
    assert before == set(sys.modules)
    with pytest.raises(ForbiddenType, match=r"allow="):
        STRICT.decode(row(module, name, payload, code))


def test_a_method_is_called_of_no_class() -> None:
    """Of the types that langgraph rebuilds by a method, only `datetime.fromisoformat` is called."""
    assert CODEC.decode(row("datetime", "datetime", "2026", 3, "now")) == "2026"
    when = datetime(2026, 1, 1)
    assert when == CODEC.decode(row("datetime", "datetime", "2026-01-01", 3, "fromisoformat"))


def test_a_lazy_module_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's `__getattr__` may import, so it is not called."""
    module = type(sys)("perdure_lazy_module")
    module.__getattr__ = ran("module getattr")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "perdure_lazy_module", module)

    assert CODEC.decode(row("perdure_lazy_module", "Model", {"n": 1})) == {"n": 1}


@pytest.mark.parametrize(
    ("cls", "payload"),
    [
        (Fixed, {"y": 1}),
        (Fixed, [1]),
        (Place, {"name": "x"}),
        (Colour, {"value": "red"}),
        (Right, "red"),
        (Inner, 5),
    ],
)
def test_attributes_that_do_not_fit_come_back_as_they_are(cls: Any, payload: Any) -> None:
    """A read does not fail for them."""
    found = CODEC.decode(row(cls.__module__, cls.__qualname__, payload))

    assert (payload if type(payload) is dict and cls is not Colour else {"value": payload}) == found


def test_a_new_field_has_its_default_in_old_values() -> None:
    """As langgraph gives them: a class may grow between two runs."""
    name = "tests.contracts.test_plain_classes"

    assert Outer.model_construct(inner=1).pair == CODEC.decode(row(name, "Outer", {}, 5)).pair
    assert Fixed(1) == CODEC.decode(row(name, "Fixed", {"x": 1}))
    assert Place(1) == CODEC.decode(row(name, "Place", {"x": 1}))
    assert Point(1).made == CODEC.decode(row(name, "Point", {"x": 1})).made


def test_rows_nested_without_end_are_corrupt() -> None:
    """A row that would exhaust the stack raises an error of ours."""
    data = ormsgpack.packb(None)
    for _ in range(5000):
        data = ormsgpack.packb(ormsgpack.Ext(64, data))
    for stored in (b"\x10" + data, b"\x10" + b"\x91" * 5000 + b"\xc0", b"\x10\xc7\x01\x63\xc0"):
        with pytest.raises(CorruptRecord):
            CODEC.decode(stored)


# -- classes that another process has

MODULE = """
    import dataclasses, enum, typing
    from pydantic import BaseModel

    class Model(BaseModel):
        n: int
        _private: int = 3

    @dataclasses.dataclass(frozen=True)
    class Record:
        model: Model
        tags: tuple = ()

    class Kind(enum.Enum):
        A = "a"

    class Pair(typing.NamedTuple):
        a: int
        b: typing.Any = None

    def values():
        return {
            "model": Model(n=1),
            "record": Record(Model(n=2), ("x",)),
            "kind": Kind.A,
            "pair": Pair(1, Kind.A),
            "kinds": {Kind.A},
            "keyed": Pair(1, {Kind.A: 1}),
        }
"""
FIELDS = {
    "model": {"n": 1},
    "record": {"model": {"n": 2}, "tags": ("x",)},
    "kind": {"value": "a"},
    "pair": {"a": 1, "b": {"value": "a"}},
}


class Elsewhere:
    """A module that only other processes import, and a file that they share with this one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "x.db"
        self.folder = folder
        (folder / "other_process.py").write_text(textwrap.dedent(MODULE))

    def run(self, code: str) -> None:
        lines = f"""
            import sys
            sys.path.insert(0, {str(self.folder)!r})
            from perdure.checkpointers import SQLiteCheckpointer
            from tests.contracts.test_types import put
            config = {{"configurable": {{"thread_id": "t", "checkpoint_ns": ""}}}}
            saver = SQLiteCheckpointer.open({str(self.path)!r})
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(lines) + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    """A file with objects of classes that this process has not got."""
    found = Elsewhere(tmp_path)
    found.run("""
        import other_process
        put(saver, other_process.values())
    """)
    return found


CONFIG: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}


def test_without_the_class_fields_come_back_as_a_dict(
    elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once a class; nothing is imported; put again, they are objects as before."""
    with SQLiteCheckpointer.open(elsewhere.path) as saver:
        with caplog.at_level(logging.WARNING, "perdure"):
            found = saver.get_tuple(CONFIG)
            assert found is not None
            values = found.checkpoint["channel_values"]
            saver.get_tuple(CONFIG)
        assert {name: values[name] for name in FIELDS} == FIELDS
        assert all(isinstance(values[name], dict) for name in FIELDS)
        assert list(values["kinds"]) == [{"value": "a"}]
        assert "other_process" not in sys.modules
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == len({text.split(",")[0] for text in told}) <= 4
        put(saver, values, found.config)

    elsewhere.run("""
        import other_process
        values = saver.get_tuple(config).checkpoint["channel_values"]
        assert values == other_process.values(), values
        assert values["model"]._private == 3
        assert len(list(saver.list(config))) == 2
    """)


def test_changed_fields_are_stored_under_the_same_class(elsewhere: Elsewhere) -> None:
    """What a process without the class changes in the dict is changed in the object."""
    with SQLiteCheckpointer.open(elsewhere.path) as saver:
        found = saver.get_tuple(CONFIG)
        assert found is not None
        values = found.checkpoint["channel_values"]
        values["model"]["n"] = 7
        values["record"]["model"]["n"] = 8
        put(saver, values, found.config)

    elsewhere.run("""
        from other_process import Model, Record
        values = saver.get_tuple(config).checkpoint["channel_values"]
        assert values["model"] == Model(n=7)
        assert values["record"] == Record(Model(n=8), ("x",)), values
    """)


def test_an_allowlist_imports_what_it_names(elsewhere: Elsewhere) -> None:
    """A named class is imported when a value needs it, and others are not."""
    elsewhere.run(f"""
        saver.close()
        saver = SQLiteCheckpointer.open(
            {str(elsewhere.path)!r}, allow=[("other_process", "Model"), ("not_there", "X")]
        )
        assert "other_process" not in sys.modules
        values = saver.get_tuple(config).checkpoint["channel_values"]
        assert type(values["model"]).__name__ == "Model"
        assert values["model"].n == 1
    """)


def test_strict_rebuilds_only_what_is_named(elsewhere: Elsewhere) -> None:
    """With `strict=True` a class that is loaded but not named is refused at put and at read."""
    with SQLiteCheckpointer.open(elsewhere.path, strict=True) as saver:
        with pytest.raises(ForbiddenType, match="other_process"):
            saver.get_tuple(CONFIG)
        for value in (Inner(n=1), Fixed(1), Place(1), Colour.RED, Open.Nested(n=1)):
            with pytest.raises(ForbiddenType, match=rf"\['v'\]\[0\] .*{type(value).__name__}"):
                put(saver, {"v": [value]}, thread="u")
    allowed = [Inner, Fixed, Place, Colour, Open.Nested]
    with SQLiteCheckpointer.open(elsewhere.path, strict=True, allow=allowed) as saver:
        values = {"v": [Inner(n=1), Fixed(1), Place(1), Colour.RED, Open.Nested(n=1)]}
        config = put(saver, values, thread="u")
        found = saver.get_tuple(config)

        assert found is not None
        assert values == found.checkpoint["channel_values"]


def test_a_class_within_a_function_is_read_as_a_dict() -> None:
    """It can be stored; by its name it cannot be found."""

    @dataclasses.dataclass
    class Local:
        n: int

    back = again([Local(1)])

    assert back == [{"n": 1}]
    assert CODEC.encode([Local(1)], lambda: "") == CODEC.encode(back, lambda: "")


# -- what is refused at put


class Loud(Exception):
    pass


@dataclasses.dataclass
class LoudRecord(Exception):
    n: int = 1


class OldSet(set[int]):
    pass


class Holder:
    def __init__(self) -> None:
        self.x = 1


def nested(levels: int, wrap: Callable[[Any], Any]) -> Any:
    value = None
    for _ in range(levels):
        value = wrap(value)
    return value


class WithPrivate(BaseModel):
    _lock: Any = PrivateAttr(default_factory=object)


REFUSED = {
    "no data class": ({"a": [Holder()]}, r"\['a'\]\[0\] is a Holder"),
    "exception": ({"a": ValueError("x")}, r"\['a'\] is a ValueError.*text"),
    "exception at the top": (Loud("x"), r"\['x'\] is a Loud"),
    "exception dataclass": (LoudRecord(), r"\['x'\] is a LoudRecord"),
    "surrogate": (["ok", "a\ud800b"], r"\['x'\]\[1\].*surrogates"),
    "surrogate key": ({"\ud800": 1}, r"surrogates"),
    "surrogate in a message": (HumanMessage("what?\ud83d"), r"\.content.*surrogates"),
    "surrogate in a model": (Outer(inner=Inner(n=1), raw="\ud800"), r"\.raw.*surrogates"),
    "object array": (np.array([object()]), r"\['x'\] is a ndarray.*object"),
    "structured array": (Point(1, np.zeros(1, dtype=[("a", "i4")])), r"\.inner is a ndarray"),
    "masked array": (np.ma.array([1], mask=[True]), r"MaskedArray"),
    "too deep": (nested(300, lambda v: [v]), r"\['x'\]\[0\] cannot be stored: .*254 levels"),
    "too deep in dicts": (nested(2000, lambda v: {"k": v}), r"254 levels"),
    "too many objects": (nested(300, lambda v: Point(1, v)), r"\.inner.*nested deeper"),
    "far too many objects": (nested(3000, lambda v: Fixed(v)), r"\.x.*nested deeper"),
    "in a dataclass": (Point(1, {"f": [Holder()]}), r"\['x'\]\.inner\['f'\]\[0\] is a Holder"),
    "in slots": (Fixed(1, (Holder(),)), r"\['x'\]\.tags\[0\] is a Holder"),  # type: ignore[arg-type]
    "in a model": (Outer(inner=Inner(n=1), raw=print), r"\['x'\]\.raw is a builtin"),
    "private": (WithPrivate(), r"\['x'\]\._lock is a object"),
    "in a send": (Send("n", {"f": Holder()}), r"\['x'\]\.arg\['f'\] is a Holder"),
    "in a named tuple": (Place(1, Holder()), r"\['x'\]\.name is a Holder"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_silently_is_refused_at_put(name: str) -> None:
    """The error names the path, and nothing is written."""
    value, told = REFUSED[name]
    with SQLiteCheckpointer.open(":memory:") as saver:
        with pytest.raises(Unstorable, match=told) as caught:
            put(saver, {"fine": 1, "x": value})

        assert "channel_values['x']" in str(caught.value)
        assert saver.threads() == []


def test_a_builtin_set_of_another_class_needs_the_allowlist() -> None:
    """What only its constructor can rebuild is refused, until it is named."""
    with pytest.raises(ForbiddenType, match="OldSet"):
        CODEC.encode(OldSet([1]), lambda: "value")
    with SQLiteCheckpointer.open(":memory:", allow=[OldSet]) as saver:
        found = saver.get_tuple(put(saver, {"x": OldSet([1])}))

    assert found is not None
    assert type(found.checkpoint["channel_values"]["x"]) is OldSet


def test_a_value_in_itself_is_refused() -> None:
    """A list or an object that holds itself has no end."""
    endless: list[Any] = []
    endless.append(endless)
    point = Point(1)
    point.inner = point
    for value in (endless, point):
        with pytest.raises(Unstorable, match="nested deeper"):
            CODEC.encode(value, lambda: "value")


def test_what_a_task_raised_is_stored_as_text() -> None:
    """langgraph writes it as an exception, and its savers keep how it looks."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        config = put(saver, {"x": 1})
        saver.put_writes(config, [("__error__", ValueError("no"))], "task")
        found = saver.get_tuple(config)

    assert found is not None
    assert found.pending_writes == [("task", "__error__", "ValueError('no')")]
