"""Objects of classes that only another process has."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ForbiddenType
from tests.contracts.plain_classes import (
    CODEC,
    Colour,
    Fixed,
    Inner,
    Open,
    Place,
    store_and_read_back,
)
from tests.contracts.test_types import put

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

    back = store_and_read_back([Local(1)])

    assert back == [{"n": 1}]
    assert CODEC.encode([Local(1)], lambda: "") == CODEC.encode(back, lambda: "")
