"""Ids of a wrong type, or that no database can hold, are refused before anything is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.errors import ConfigurationError, InvalidConfig, StorageError

LONE = "lone \ud800 surrogate"
ODD = [
    "a_b",
    "a%b",
    "a*b",
    "a\0b",
    "a'b",
    'a"b',
    "a\\b",
    "ä\N{COMBINING DIAERESIS}",
    "\U0001f600",
    " ",
]


def at(**parts: Any) -> Any:
    return {"configurable": {"thread_id": "t", "checkpoint_ns": "", **parts}}


def checkpoint(uid: Any) -> Any:
    return {
        "v": 4,
        "id": uid,
        "ts": "2026-01-01T00:00:00+00:00",
        "channel_values": {"x": [1]},
        "channel_versions": {"x": 1},
        "versions_seen": {},
        "updated_channels": None,
    }


def written(saver: SQLiteCheckpointer, config: Any, uid: Any = "2", task: Any = "task") -> None:
    saver.put_writes(config, [("x", 1)], task)
    saver.put(config, checkpoint(uid), {}, {"x": 1})


METHODS: dict[str, Callable[[SQLiteCheckpointer, Any], Any]] = {
    "get_tuple thread_id": lambda s, x: s.get_tuple(at(thread_id=x)),
    "get_tuple checkpoint_ns": lambda s, x: s.get_tuple(at(checkpoint_ns=x)),
    "get_tuple checkpoint_id": lambda s, x: s.get_tuple(at(checkpoint_id=x)),
    "list thread_id": lambda s, x: list(s.list(at(thread_id=x))),
    "list checkpoint_ns": lambda s, x: list(s.list(at(checkpoint_ns=x))),
    "list checkpoint_id": lambda s, x: list(s.list(at(checkpoint_id=x))),
    "list before": lambda s, x: list(s.list(at(), before=at(checkpoint_id=x))),
    "list before, of all": lambda s, x: list(s.list(None, before=at(checkpoint_id=x))),
    "put thread_id": lambda s, x: written(s, at(thread_id=x, checkpoint_id="1")),
    "put checkpoint_ns": lambda s, x: written(s, at(checkpoint_ns=x, checkpoint_id="1")),
    "put checkpoint_id": lambda s, x: s.put(at(checkpoint_id=x), checkpoint("2"), {}, {"x": 1}),
    "put id": lambda s, x: s.put(at(), checkpoint(x), {}, {"x": 1}),
    "put_writes checkpoint_id": lambda s, x: written(s, at(checkpoint_id=x)),
    "put_writes task_id": lambda s, x: written(s, at(checkpoint_id="1"), task=x),
    "put_writes task_path": lambda s, x: s.put_writes(at(checkpoint_id="1"), [("x", 1)], "task", x),
    "get_delta_channel_history": lambda s, x: s.get_delta_channel_history(
        config=at(thread_id=x), channels=["x"]
    ),
    "history thread_id": lambda s, x: s.history(x),
    "history checkpoint_id": lambda s, x: s.history("t", checkpoint_id=x),
    "history checkpoint_ns": lambda s, x: s.history("t", checkpoint_ns=x),
    "history channel": lambda s, x: s.history("t", channel=x),
    "threads after": lambda s, x: s.threads(after=x),
    "threads prefix": lambda s, x: s.threads(prefix=x),
    "thread": lambda s, x: s.thread(x),
    "checkpoints thread_id": lambda s, x: s.checkpoints(x),
    "checkpoints checkpoint_ns": lambda s, x: s.checkpoints("t", checkpoint_ns=x),
    "delete_thread": lambda s, x: s.delete_thread(x),
    "delete_for_runs": lambda s, x: s.delete_for_runs(["run", x]),
    "erase thread_id": lambda s, x: s.erase(x),
    "erase message_ids": lambda s, x: s.erase("t", ["m", x]),
    "copy_thread source": lambda s, x: s.copy_thread(x, "new"),
    "copy_thread target": lambda s, x: s.copy_thread("t", x),
    "copy_thread checkpoint_id": lambda s, x: s.copy_thread("t", "new", checkpoint_id=x),
    "prune": lambda s, x: s.prune(["t", x], strategy="delete"),
    "retain": lambda s, x: s.retain(Retention(last=1), thread_ids=["t", x]),
    "rewind thread_id": lambda s, x: s.rewind(x, "1"),
    "rewind checkpoint_id": lambda s, x: s.rewind("t", x),
    "rewind checkpoint_ns": lambda s, x: s.rewind("t", "1", checkpoint_ns=x),
    "lock": lambda s, x: s.lock(x),
}
SEVERAL: dict[str, Callable[[SQLiteCheckpointer, Any], Any]] = {
    "delete_for_runs": lambda s, x: s.delete_for_runs(x),
    "erase": lambda s, x: s.erase("t", x),
    "prune": lambda s, x: s.prune(x, strategy="delete"),
    "retain": lambda s, x: s.retain(Retention(last=1), thread_ids=x),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_id_is_refused(file_saver: SQLiteCheckpointer, method: str) -> None:
    """Every method that takes an id names it, and nothing is changed."""
    file_saver.put(at(), checkpoint("1"), {"run_id": "run"}, {"x": 1})
    before = repr((file_saver.threads(), list(file_saver.list(None))))
    for given in (b"1", 1.5, ["1"], True, LONE):
        with pytest.raises(InvalidConfig, match=r"expected|needs text"):
            METHODS[method](file_saver, given)

    assert before == repr((file_saver.threads(), list(file_saver.list(None))))


@pytest.mark.parametrize("given", ["t", b"t", 5])
@pytest.mark.parametrize("method", SEVERAL)
def test_one_id_where_several_are_expected(
    file_saver: SQLiteCheckpointer, method: str, given: Any
) -> None:
    """A single text is not taken for the letters it consists of."""
    file_saver.put(at(), checkpoint("1"), {"run_id": "t"}, {"x": 1})
    with pytest.raises(InvalidConfig, match="expected a list of"):
        SEVERAL[method](file_saver, given)

    assert len(list(file_saver.list(None))) == 1


def test_ids_from_a_generator(saver: SQLiteCheckpointer) -> None:
    """Ids may come from a generator, which can be read only once."""
    said = {"messages": [HumanMessage("hello", id="m")]}
    new = checkpoint("1") | {"channel_values": said, "channel_versions": {"messages": 1}}
    saver.put(at(), new, {}, {"messages": 1})
    saver.erase("t", (uid for uid in ["m"]))  # type: ignore[arg-type]

    assert saver.history("t") == []


def test_prefixes_with_odd_characters(saver: SQLiteCheckpointer) -> None:
    """A prefix is taken letter by letter: nothing in it is a wildcard or an end."""
    names = [f"{odd}{n}" for odd in [*ODD, "a", "axb"] for n in range(2)]
    if not isinstance(saver, SQLiteCheckpointer):  # Postgres has no text with NUL
        with pytest.raises(StorageError, match="NUL"):
            saver.put(at(thread_id="a\0b"), checkpoint("1"), {}, {"x": 1})
        names = [name for name in names if "\0" not in name]
    for name in names:
        saver.put(at(thread_id=name), checkpoint("1"), {}, {"x": 1})

    for prefix in [*ODD, "a", "a\0", "\0", "A", "", "ä"]:
        expected = {name for name in names if name.startswith(prefix)}
        assert expected == {info.thread_id for info in saver.threads(prefix=prefix)}


@pytest.mark.parametrize("path", [5, None, "\0", "x\0.db", "\ud800.db"])
def test_paths_that_are_none(path: Any) -> None:
    """A path of another type, with a NUL or a lone surrogate, is refused by all that take one."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        for take in (SQLiteCheckpointer.open, saver.import_from):
            with pytest.raises(ConfigurationError, match="expected a file name"):
                take(path)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    """A loop of links, a folder that is one, and a name that is too long are typed errors."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "a" / "x.db", tmp_path / ("n" * 300)):
        for read_only in (False, True):
            with pytest.raises((ConfigurationError, StorageError)):
                SQLiteCheckpointer.open(path, read_only=read_only)
