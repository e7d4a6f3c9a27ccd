"""Whatever a row names, no code of a class runs, and nothing is imported or called."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

import ormsgpack
import pytest
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel

from perdure.errors import CorruptRecord, ForbiddenType
from tests.contracts.plain_classes import (
    CODEC,
    STRICT,
    Colour,
    Fixed,
    Inner,
    Outer,
    Place,
    Point,
    Right,
)

CODE_RAN: list[str] = []


def ran(what: str) -> Callable[..., Any]:
    """A function that notes that it was called."""

    def note(*args: Any, **kwargs: Any) -> Any:
        CODE_RAN.append(what)
        raise AssertionError(what)

    return note


@pytest.fixture(autouse=True)
def _no_code_ran() -> Iterator[None]:
    CODE_RAN.clear()
    yield
    assert CODE_RAN == []


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
    ("tests.contracts.test_untrusted_rows", "ran", ["row"]),
    ("tests.contracts.plain_classes", "Outer.model_validate", {}),
    ("tests.contracts.test_untrusted_rows", "EvilClass.__init__", {}),
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
    name = "tests.contracts.plain_classes"

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
