"""Reading a row runs no code of classes, and imports or calls nothing that the row names."""

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


def fail_when_called(label: str) -> Callable[..., Any]:
    """Return a function that records its call in `CODE_RAN` and fails."""

    def record_call(*args: Any, **kwargs: Any) -> Any:
        CODE_RAN.append(label)
        raise AssertionError(label)

    return record_call


@pytest.fixture(autouse=True)
def _no_code_ran() -> Iterator[None]:
    CODE_RAN.clear()
    yield
    assert CODE_RAN == []


class EvilModel(BaseModel):
    n: int = 1

    def model_post_init(self, context: Any) -> None:
        if CODE_RAN == ["armed"]:
            fail_when_called("model_post_init")()


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
def test_reading_an_object_runs_no_code_of_its_class(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No constructor, validator, hook or method runs, and the object is restored."""
    stored = CODEC.encode([value, {"deep": (value,)}], lambda: "value")
    cls = type(value)
    hooks = set(HOOKS)
    if issubclass(cls, enum.Enum):
        hooks -= {"__new__"}  # `enum` replaces it
    if issubclass(cls, enum.Flag):
        hooks -= {"__setattr__", "__getattr__", "__getattribute__", "__del__"}  # see below
    with monkeypatch.context() as patch:
        for hook in hooks:
            patch.setattr(cls, hook, fail_when_called(hook), raising=False)
        decoded = CODEC.decode(stored)

    assert [value, {"deep": [value]}] == decoded or [value, {"deep": (value,)}] == decoded
    assert type(decoded[0]) is cls


@pytest.mark.parametrize("hook", ["__setattr__", "__getattr__", "__getattribute__", "__del__"])
def test_combined_flag_of_class_with_hooks_is_read_as_dict(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`enum` would call the hooks. Single members are restored, and combinations become dicts."""
    stored = CODEC.encode([EvilFlag.A, EvilFlag.A | EvilFlag.B], lambda: "value")
    with monkeypatch.context() as patch:
        patch.setattr(EvilFlag, hook, fail_when_called(hook), raising=False)
        decoded = CODEC.decode(stored)

    assert decoded == [EvilFlag.A, {"value": 3}]


def test_missing_enum_member_is_read_as_dict() -> None:
    """`_missing_` is not called. The dict has the value, and is stored with the type again."""
    data = JsonPlusSerializer().dumps_typed(Colour.RED)[1].replace(b"\xa3red", b"\xa3new")
    decoded = CODEC.decode(b"\x10" + data)

    assert decoded == {"value": "new"}
    assert b"\x10" + data == CODEC.encode(decoded, lambda: "value")


def make_row(module: str, name: str, payload: Any, code: int = 2, *rest: Any) -> bytes:
    """Build a stored value that names a class, as an attacker could write it to the file."""
    inner = ormsgpack.packb([module, name, payload, *rest])
    return b"\x10" + ormsgpack.packb(ormsgpack.Ext(code, inner))


CALLABLES = [
    ("os", "system", "touch /nowhere/hacked"),
    ("builtins", "eval", "1/0"),
    ("builtins", "exec", "raise SystemExit"),
    ("subprocess", "Popen", ["false"]),
    ("tests.contracts.test_untrusted_rows", "fail_when_called", ["row"]),
    ("tests.contracts.plain_classes", "Outer.model_validate", {}),
    ("tests.contracts.test_untrusted_rows", "EvilClass.__init__", {}),
    ("importlib", "import_module", "antigravity"),
    ("this", "s", {}),
    ("a module that is none", "", {}),
    ("", "", None),
]


@pytest.mark.parametrize("code", range(6))
@pytest.mark.parametrize(("module", "name", "payload"), CALLABLES)
def test_row_that_names_a_callable_calls_and_imports_nothing(
    module: str, name: str, payload: Any, code: int
) -> None:
    """The payload of the row is returned as data."""
    before = set(sys.modules)
    decoded = CODEC.decode(make_row(module, name, payload, code))

    assert (payload if isinstance(payload, dict) else {"value": payload}) == decoded
    assert before == set(sys.modules)
    with pytest.raises(ForbiddenType, match=r"allow="):
        STRICT.decode(make_row(module, name, payload, code))


def test_row_that_names_a_method_calls_only_fromisoformat() -> None:
    """langgraph rebuilds some types by a method. Only `datetime.fromisoformat` is called."""
    assert CODEC.decode(make_row("datetime", "datetime", "2026", 3, "now")) == "2026"
    when = datetime(2026, 1, 1)
    assert when == CODEC.decode(make_row("datetime", "datetime", "2026-01-01", 3, "fromisoformat"))


def test_row_does_not_trigger_getattr_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's `__getattr__` may import other modules, so it is not called."""
    module = type(sys)("perdure_lazy_module")
    module.__getattr__ = fail_when_called("module getattr")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "perdure_lazy_module", module)

    assert CODEC.decode(make_row("perdure_lazy_module", "Model", {"n": 1})) == {"n": 1}


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
def test_attributes_that_do_not_fit_the_class_are_read_as_data(cls: Any, payload: Any) -> None:
    """Such attributes do not make a read fail."""
    decoded = CODEC.decode(make_row(cls.__module__, cls.__qualname__, payload))

    assert (
        payload if type(payload) is dict and cls is not Colour else {"value": payload}
    ) == decoded


def test_new_field_has_its_default_in_old_values() -> None:
    """A class may get new fields between two runs. langgraph's savers do the same."""
    name = "tests.contracts.plain_classes"

    assert Outer.model_construct(inner=1).pair == CODEC.decode(make_row(name, "Outer", {}, 5)).pair
    assert Fixed(1) == CODEC.decode(make_row(name, "Fixed", {"x": 1}))
    assert Place(1) == CODEC.decode(make_row(name, "Place", {"x": 1}))
    assert Point(1).made == CODEC.decode(make_row(name, "Point", {"x": 1})).made


def test_row_that_is_nested_too_deeply_is_corrupt() -> None:
    """The row raises `CorruptRecord` instead of exhausting the stack."""
    data = ormsgpack.packb(None)
    for _ in range(5000):
        data = ormsgpack.packb(ormsgpack.Ext(64, data))
    for stored in (b"\x10" + data, b"\x10" + b"\x91" * 5000 + b"\xc0", b"\x10\xc7\x01\x63\xc0"):
        with pytest.raises(CorruptRecord):
            CODEC.decode(stored)
