"""Ids of a wrong type, or that no database can store, are refused before anything is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.errors import ConfigurationError, InvalidConfig, StorageError

LONE_SURROGATE = "lone \ud800 surrogate"
UNUSUAL_IDS = [
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


def make_config(**parts: Any) -> Any:
    return {"configurable": {"thread_id": "t", "checkpoint_ns": "", **parts}}


def make_checkpoint(uid: Any) -> Any:
    return {
        "v": 4,
        "id": uid,
        "ts": "2026-01-01T00:00:00+00:00",
        "channel_values": {"x": [1]},
        "channel_versions": {"x": 1},
        "versions_seen": {},
        "updated_channels": None,
    }


def put_with_writes(
    saver: SQLiteCheckpointer, config: Any, uid: Any = "2", task: Any = "task"
) -> None:
    saver.put_writes(config, [("x", 1)], task)
    saver.put(config, make_checkpoint(uid), {}, {"x": 1})


METHODS: dict[str, Callable[[SQLiteCheckpointer, Any], Any]] = {
    "get_tuple thread_id": lambda s, x: s.get_tuple(make_config(thread_id=x)),
    "get_tuple checkpoint_ns": lambda s, x: s.get_tuple(make_config(checkpoint_ns=x)),
    "get_tuple checkpoint_id": lambda s, x: s.get_tuple(make_config(checkpoint_id=x)),
    "list thread_id": lambda s, x: list(s.list(make_config(thread_id=x))),
    "list checkpoint_ns": lambda s, x: list(s.list(make_config(checkpoint_ns=x))),
    "list checkpoint_id": lambda s, x: list(s.list(make_config(checkpoint_id=x))),
    "list before": lambda s, x: list(s.list(make_config(), before=make_config(checkpoint_id=x))),
    "list before, of all": lambda s, x: list(s.list(None, before=make_config(checkpoint_id=x))),
    "put thread_id": lambda s, x: put_with_writes(s, make_config(thread_id=x, checkpoint_id="1")),
    "put checkpoint_ns": lambda s, x: put_with_writes(
        s, make_config(checkpoint_ns=x, checkpoint_id="1")
    ),
    "put checkpoint_id": lambda s, x: s.put(
        make_config(checkpoint_id=x), make_checkpoint("2"), {}, {"x": 1}
    ),
    "put id": lambda s, x: s.put(make_config(), make_checkpoint(x), {}, {"x": 1}),
    "put_writes checkpoint_id": lambda s, x: put_with_writes(s, make_config(checkpoint_id=x)),
    "put_writes task_id": lambda s, x: put_with_writes(s, make_config(checkpoint_id="1"), task=x),
    "put_writes task_path": lambda s, x: s.put_writes(
        make_config(checkpoint_id="1"), [("x", 1)], "task", x
    ),
    "get_delta_channel_history": lambda s, x: s.get_delta_channel_history(
        config=make_config(thread_id=x), channels=["x"]
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
METHODS_WITH_ID_LISTS: dict[str, Callable[[SQLiteCheckpointer, Any], Any]] = {
    "delete_for_runs": lambda s, x: s.delete_for_runs(x),
    "erase": lambda s, x: s.erase("t", x),
    "prune": lambda s, x: s.prune(x, strategy="delete"),
    "retain": lambda s, x: s.retain(Retention(last=1), thread_ids=x),
}


@pytest.mark.parametrize("method", METHODS)
def test_id_of_wrong_type_is_refused_by_every_method(
    file_saver: SQLiteCheckpointer, method: str
) -> None:
    """The error says what was expected, and nothing is changed."""
    file_saver.put(make_config(), make_checkpoint("1"), {"run_id": "run"}, {"x": 1})
    before = repr((file_saver.threads(), list(file_saver.list(None))))
    for wrong_id in (b"1", 1.5, ["1"], True, LONE_SURROGATE):
        with pytest.raises(InvalidConfig, match=r"expected|needs text"):
            METHODS[method](file_saver, wrong_id)

    assert before == repr((file_saver.threads(), list(file_saver.list(None))))


@pytest.mark.parametrize("ids", ["t", b"t", 5])
@pytest.mark.parametrize("method", METHODS_WITH_ID_LISTS)
def test_single_id_is_refused_where_list_is_expected(
    file_saver: SQLiteCheckpointer, method: str, ids: Any
) -> None:
    """A string is not treated as a list of its characters."""
    file_saver.put(make_config(), make_checkpoint("1"), {"run_id": "t"}, {"x": 1})
    with pytest.raises(InvalidConfig, match="expected a list of"):
        METHODS_WITH_ID_LISTS[method](file_saver, ids)

    assert len(list(file_saver.list(None))) == 1


def test_erase_accepts_ids_from_generator(saver: SQLiteCheckpointer) -> None:
    """A generator can be read only once."""
    values = {"messages": [HumanMessage("hello", id="m")]}
    with_message = make_checkpoint("1") | {
        "channel_values": values,
        "channel_versions": {"messages": 1},
    }
    saver.put(make_config(), with_message, {}, {"messages": 1})
    saver.erase("t", (uid for uid in ["m"]))  # type: ignore[arg-type]

    assert saver.history("t") == []


def test_prefix_is_matched_literally(saver: SQLiteCheckpointer) -> None:
    """No character of a prefix is a wildcard or ends it."""
    names = [f"{unusual_id}{n}" for unusual_id in [*UNUSUAL_IDS, "a", "axb"] for n in range(2)]
    if not isinstance(saver, SQLiteCheckpointer):  # Postgres has no text with NUL
        with pytest.raises(StorageError, match="NUL"):
            saver.put(make_config(thread_id="a\0b"), make_checkpoint("1"), {}, {"x": 1})
        names = [name for name in names if "\0" not in name]
    for name in names:
        saver.put(make_config(thread_id=name), make_checkpoint("1"), {}, {"x": 1})

    for prefix in [*UNUSUAL_IDS, "a", "a\0", "\0", "A", "", "ä"]:
        expected = {name for name in names if name.startswith(prefix)}
        assert expected == {info.thread_id for info in saver.threads(prefix=prefix)}


@pytest.mark.parametrize("path", [5, None, "\0", "x\0.db", "\ud800.db"])
def test_path_of_wrong_type_or_with_invalid_characters_is_refused(path: Any) -> None:
    """Every method that takes a path refuses it."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        for open_path in (SQLiteCheckpointer.open, saver.import_from):
            with pytest.raises(ConfigurationError, match="expected a file name"):
                open_path(path)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_paths_with_loops_or_too_long_names_raise_perdure_errors(tmp_path: Path) -> None:
    """The path may be a loop of links, be within such a loop, or have a name that is too long."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "a" / "x.db", tmp_path / ("n" * 300)):
        for read_only in (False, True):
            with pytest.raises((ConfigurationError, StorageError)):
                SQLiteCheckpointer.open(path, read_only=read_only)
