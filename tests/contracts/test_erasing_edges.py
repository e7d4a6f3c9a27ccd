"""`erase()` at its edges: nothing to erase, receipts, sizes, others who remember or read."""

from __future__ import annotations

import enum
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.serde.types import TASKS
from langgraph.types import Send

from perdure.checkpointers import ErasureReport
from perdure.errors import ConfigurationError, StorageError, UnknownThread
from tests.backends import KEY
from tests.contracts.erased import (
    SECRET,
    Erase,
    Saver,
    both_erase_methods,
    doomed_message,
    human_message,
    read_raw_bytes,
    render_thread,
)
from tests.contracts.puts import config_at, put, read_channel_values
from tests.contracts.test_types import Profile


@dataclass
class Unsaved:
    text: str

    @property
    def id(self) -> str:
        raise RuntimeError("it has none yet")


class Desk(enum.StrEnum):
    HELP = "technical_support_line"


@both_erase_methods
def test_nothing_to_erase(saver: Saver, erase: Erase) -> None:
    """Unknown ids and threads are no error, and nothing that can be read changes."""
    put(saver, {"messages": [human_message("a")], "a": "a", "n": ["x", "a"]})
    before = render_thread(saver)

    for args in (("t", ["b", ""]), ("t", []), ("nobody", ["a"]), ("nobody",)):
        assert ErasureReport() == erase(saver, *args)
    assert before == render_thread(saver)


@both_erase_methods
@pytest.mark.parametrize(
    "tasks", [[{"text": SECRET}, doomed_message], {"one": doomed_message}, doomed_message, "x"]
)
def test_tasks_that_are_no_sends(saver: Saver, erase: Erase, tasks: Any) -> None:
    """A program of one's own may keep other things where langgraph keeps its tasks."""
    put(saver, {"messages": [doomed_message, human_message("b")], TASKS: tasks})
    erase(saver, "t", [str(doomed_message.id)])

    assert SECRET.encode() not in read_raw_bytes(saver)
    assert read_channel_values(saver, config_at())["messages"] == [human_message("b")]


@both_erase_methods
def test_a_whole_thread(saver: Saver, erase: Erase) -> None:
    """Without ids, the thread is deleted and its bytes with it."""
    put(saver, {"messages": [doomed_message, human_message("b")], "text": SECRET * 9})
    report = erase(saver, "t")

    assert (report.checkpoints, report.items, len(report.hashes)) == (1, 3, 2)
    assert SECRET.encode() not in read_raw_bytes(saver)
    with pytest.raises(UnknownThread):
        saver.thread("t")


@pytest.mark.parametrize("ids", ["a", [1], [None]])
def test_ids_that_are_none(file_saver: Saver, ids: Any) -> None:
    """A single text, or what is no text, is refused."""
    with pytest.raises(ConfigurationError, match="list of message ids"):
        file_saver.erase("t", ids)


def test_the_same_message_has_the_same_hash(tmp_path: Path) -> None:
    """Receipts can be compared: per database key, and in clear without one."""
    reports = []
    for name, key in (("a", None), ("b", None), ("c", KEY), ("d", KEY)):
        with Saver.open(tmp_path / name, key=key) as saver:
            put(saver, {"messages": [doomed_message]})
            reports.append(saver.erase("t", ["a"]).hashes)

    assert reports[0] == reports[1]
    assert reports[2] == reports[3]
    assert reports[0] != reports[2]


def test_sizes_are_true(tmp_path: Path) -> None:
    """What a thread is said to hold is what its rows hold."""
    with Saver.open(tmp_path / "x.db") as saver:
        config = put(
            saver,
            {"messages": [human_message(str(i)) for i in range(9)], "x": {"k": [doomed_message]}},
        )
        put(
            saver,
            {"messages": [human_message("1"), doomed_message], "x": {"k": [doomed_message]}},
            config,
        )
        saver.put_writes(config, [("messages", [doomed_message, human_message("1")])], "task")
        saver.erase("t", ["a", "3"])
        info = saver.thread("t")
    with closing(sqlite3.connect(tmp_path / "x.db")) as db:
        ((items, size),) = db.execute("SELECT count(*), sum(length(body)) FROM items")
        for table in ("checkpoints", "writes"):
            size += db.execute(f"SELECT coalesce(sum(length(body)), 0) FROM {table}").fetchone()[0]
        checks = db.execute("PRAGMA integrity_check").fetchall()
        ((auto_vacuum,),) = db.execute("PRAGMA auto_vacuum")

    assert (items, size) == (info.items, info.size_bytes)
    assert checks == [("ok",)]
    assert auto_vacuum == 2


def test_another_saver_that_remembers_it(tmp_path: Path) -> None:
    """What another has read before is not what it reads, or puts on, afterwards."""
    path = tmp_path / "x.db"
    with Saver.open(path) as one, Saver.open(path) as two:
        put(one, {"messages": [human_message("b"), doomed_message], "n": 1}, uid="1")
        config = config_at("t", "", "1")
        found = two.get_tuple(config)
        assert found is not None
        one.erase("t", ["a"])
        checkpoint = {**found.checkpoint, "id": "2"}  # as a run puts it that did not touch messages
        two.put(config, checkpoint, {"source": "loop"}, {"n": 2})  # type: ignore[arg-type]

        assert {"messages": [human_message("b")], "n": 1} == read_channel_values(two, config_at())
        assert {"messages": [human_message("b")], "n": 1} == read_channel_values(two, config)
        assert SECRET not in render_thread(two)
        assert SECRET.encode() not in read_raw_bytes(one)


# -- the bytes


def test_a_reader_that_holds_on(tmp_path: Path) -> None:
    """While another process reads the former state the report says so; later it is finished."""
    path = tmp_path / "x.db"
    with Saver.open(path, timeout_s=0.2) as saver:
        put(saver, {"messages": [doomed_message, human_message("b")]})
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT count(*) FROM items").fetchall()
            held = saver.erase("t", ["a"])
            assert {"messages": [human_message("b")]} == read_channel_values(saver, config_at())
            other.execute("COMMIT")
        again = saver.erase("t", ["a"])
        bytes_ = read_raw_bytes(saver)

    assert (held.checkpoints + held.items, len(held.hashes), held.scrubbed) == (2, 1, False)
    assert ErasureReport() == again
    assert SECRET.encode() not in bytes_


class NoVacuum(sqlite3.Connection):
    """A connection that fails before it vacuums, as if the process had been killed there."""

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql == "VACUUM":
            raise sqlite3.OperationalError("no such luck")
        return super().execute(sql, *args)


def test_an_erasure_that_was_cut_off(tmp_path: Path) -> None:
    """Erased is erased; the bytes are seen to by who opens the file next."""
    path = tmp_path / "x.db"
    with Saver.open(path, factory=NoVacuum) as saver:
        put(saver, {"messages": [doomed_message, human_message("b")]})
        saver.database.release_unused_disk_space()  # moves the WAL into the file
        with pytest.raises(StorageError, match="no such luck"):
            saver.erase("t", ["a"])
        assert {"messages": [human_message("b")]} == read_channel_values(saver, config_at())
        put(
            saver, {"messages": [human_message("b")]}, thread="other"
        )  # the writer is none the worse
    with Saver.open(path) as saver:
        assert SECRET.encode() not in read_raw_bytes(saver)
        with closing(sqlite3.connect(path)) as db:
            names = db.execute("SELECT name FROM settings ORDER BY name").fetchall()
            assert names == [("key check",), ("removals",)]


@pytest.mark.parametrize("value", [Profile(fullName="p"), Profile(fullName="p" * 300)])
def test_values_that_may_not_be_rebuilt(tmp_path: Path, value: Profile) -> None:
    """They stay as they are where nothing in them can be the message's."""
    message = human_message("m-4711", SECRET)
    values = {
        "messages": [message],
        "v": value,
        "m": {"v": value},
        "l": [value, [human_message("b")]],
    }
    with Saver.open(tmp_path / "x.db") as saver:
        config = put(saver, {**values, TASKS: [Send("n", value)]})
        saver.put_writes(config, [("v", value), (TASKS, Send("n", value))], "task")
    with Saver.open(tmp_path / "x.db", strict=True) as saver:
        assert ErasureReport() == saver.erase("t", ["nobody's"])
        report = saver.erase("t", ["m-4711"])
        assert (report.checkpoints, report.items) == (1, 1)
    with Saver.open(tmp_path / "x.db") as saver:
        found = saver.get_tuple(config_at())

        assert found is not None
        channels = found.checkpoint["channel_values"]
        assert {**values, "messages": [], TASKS: [Send("n", value)]} == channels
        writes = [("task", "v", value), ("task", TASKS, Send("n", value))]
        assert writes == [(*write,) for write in found.pending_writes or ()]


def test_objects_whose_properties_raise(file_saver: Saver) -> None:
    """What a message is known by is looked for; what raises instead is not it."""
    kept = Unsaved(f"about {doomed_message.id}")
    put(file_saver, {"messages": [doomed_message], "one": kept, "more": [kept, {"x": kept}]})

    file_saver.erase("t", [doomed_message.id or ""])

    assert {"messages": [], "one": kept, "more": [kept, {"x": kept}]} == read_channel_values(
        file_saver, config_at()
    )


def test_members_of_enums_stay(file_saver: Saver) -> None:
    """Also those that are texts, and equal to what a message says."""
    put(
        file_saver,
        {
            "messages": [human_message("a", Desk.HELP.value)],
            "desk": Desk.HELP,
            "all": [[Desk.HELP]],
        },
    )

    file_saver.erase("t", ["a"])

    assert read_channel_values(file_saver, config_at()) == {
        "messages": [],
        "desk": Desk.HELP,
        "all": [[Desk.HELP]],
    }
    assert type(read_channel_values(file_saver, config_at())["desk"]) is Desk


@pytest.mark.parametrize("uid", ["call-1", "call_0123456789abcdef"])
def test_calls_in_dicts_that_were_split(saver: Saver, uid: str) -> None:
    """With ids of any length: as a value, under their ids, and in history after they went."""
    call = {"name": "mail", "args": {"to": "Ann"}, "id": uid, "type": "tool_call"}
    states = {uid: {"state": "sent"}, "k": {"z": 1}}
    config = put(
        saver,
        {"messages": [AIMessage("", id="a", tool_calls=[call])], "call": call, "by_id": states},
    )
    put(saver, {"messages": [human_message("b")], "call": {}, "by_id": {}}, config)

    saver.erase("t", ["a"])

    assert read_channel_values(saver, config) == {"messages": [], "by_id": {"k": {"z": 1}}}
    assert [item.value for item in saver.history("t", channel="call")] == []
    assert [item.value for item in saver.history("t", channel="by_id")] == [("k", {"z": 1})]
    assert uid.encode() not in read_raw_bytes(saver)


def test_a_channel_of_dicts_then_of_lists(saver: Saver) -> None:
    """A list of two is no pair of a dict if its first element can be no key."""
    config = put(saver, {"messages": [doomed_message], "x": {"k": {"z": 1}}})
    config = put(saver, {"messages": [doomed_message], "x": [[{"p": 1}, doomed_message]]}, config)
    put(saver, {"messages": [doomed_message], "x": None}, config)

    saver.erase("t", [doomed_message.id or ""])

    assert read_channel_values(saver, config) == {"messages": [], "x": [[{"p": 1}]]}
    history = [item.value for item in saver.history("t", channel="x")]
    assert [[*each] for each in history] == [["k", {"z": 1}], [{"p": 1}]]
