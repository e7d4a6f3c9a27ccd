"""Objects of classes that only another process can import."""

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


class OtherProcess:
    """A module that only other processes can import, and a database shared with those processes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "x.db"
        self.folder = folder
        (folder / "other_process.py").write_text(textwrap.dedent(MODULE))

    def run(self, code: str) -> None:
        preamble = f"""
            import sys
            sys.path.insert(0, {str(self.folder)!r})
            from perdure.checkpointers import SQLiteCheckpointer
            from tests.contracts.test_types import put
            config = {{"configurable": {{"thread_id": "t", "checkpoint_ns": ""}}}}
            saver = SQLiteCheckpointer.open({str(self.path)!r})
        """
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(preamble) + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr


@pytest.fixture
def other_process(tmp_path: Path) -> OtherProcess:
    """A process that has stored objects of classes that are unknown in this process."""
    process = OtherProcess(tmp_path)
    process.run("""
        import other_process
        put(saver, other_process.values())
    """)
    return process


CONFIG: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}


def test_object_of_unknown_class_is_read_as_dict_and_stored_back_unchanged(
    other_process: OtherProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning is logged per class, and no module is imported. The other process reads the
    original objects after this process has put the dicts again.
    """
    with SQLiteCheckpointer.open(other_process.path) as saver:
        with caplog.at_level(logging.WARNING, "perdure"):
            loaded = saver.get_tuple(CONFIG)
            assert loaded is not None
            values = loaded.checkpoint["channel_values"]
            saver.get_tuple(CONFIG)
        assert {name: values[name] for name in FIELDS} == FIELDS
        assert all(isinstance(values[name], dict) for name in FIELDS)
        assert list(values["kinds"]) == [{"value": "a"}]
        assert "other_process" not in sys.modules
        log_messages = [record.getMessage() for record in caplog.records]
        assert len(log_messages) == len({text.split(",")[0] for text in log_messages}) <= 4
        put(saver, values, loaded.config)

    other_process.run("""
        import other_process
        values = saver.get_tuple(config).checkpoint["channel_values"]
        assert values == other_process.values(), values
        assert values["model"]._private == 3
        assert len(list(saver.list(config))) == 2
    """)


@pytest.mark.slow
def test_dict_of_unknown_class_can_be_changed_and_stored_as_its_class(
    other_process: OtherProcess,
) -> None:
    """Changes of the dict by a process without the class become changes of the object."""
    with SQLiteCheckpointer.open(other_process.path) as saver:
        record = saver.get_tuple(CONFIG)
        assert record is not None
        values = record.checkpoint["channel_values"]
        values["model"]["n"] = 7
        values["record"]["model"]["n"] = 8
        put(saver, values, record.config)

    other_process.run("""
        from other_process import Model, Record
        values = saver.get_tuple(config).checkpoint["channel_values"]
        assert values["model"] == Model(n=7)
        assert values["record"] == Record(Model(n=8), ("x",)), values
    """)


@pytest.mark.slow
def test_allow_imports_only_the_classes_that_it_names(other_process: OtherProcess) -> None:
    """A named class is imported when a value needs it. Other classes are not imported."""
    other_process.run(f"""
        saver.close()
        saver = SQLiteCheckpointer.open(
            {str(other_process.path)!r}, allow=[("other_process", "Model"), ("not_there", "X")]
        )
        assert "other_process" not in sys.modules
        values = saver.get_tuple(config).checkpoint["channel_values"]
        assert type(values["model"]).__name__ == "Model"
        assert values["model"].n == 1
    """)


@pytest.mark.slow
def test_strict_refuses_unnamed_classes_at_put_and_read(other_process: OtherProcess) -> None:
    """With `strict=True`, a class that is loaded but not named by `allow` is refused."""
    with SQLiteCheckpointer.open(other_process.path, strict=True) as saver:
        with pytest.raises(ForbiddenType, match="other_process"):
            saver.get_tuple(CONFIG)
        for value in (Inner(n=1), Fixed(1), Place(1), Colour.RED, Open.Nested(n=1)):
            with pytest.raises(ForbiddenType, match=rf"\['v'\]\[0\] .*{type(value).__name__}"):
                put(saver, {"v": [value]}, thread="u")
    allowed = [Inner, Fixed, Place, Colour, Open.Nested]
    with SQLiteCheckpointer.open(other_process.path, strict=True, allow=allowed) as saver:
        values = {"v": [Inner(n=1), Fixed(1), Place(1), Colour.RED, Open.Nested(n=1)]}
        config = put(saver, values, thread="u")
        record = saver.get_tuple(config)

        assert record is not None
        assert values == record.checkpoint["channel_values"]


def test_object_of_local_class_is_stored_and_read_as_dict() -> None:
    """A class within a function cannot be found by its name."""

    @dataclasses.dataclass
    class Local:
        n: int

    decoded = store_and_read_back([Local(1)])

    assert decoded == [{"n": 1}]
    assert CODEC.encode([Local(1)], lambda: "") == CODEC.encode(decoded, lambda: "")
