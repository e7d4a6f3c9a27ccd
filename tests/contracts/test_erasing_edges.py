"""Special cases of `erase()`: nothing to erase, reports, sizes, caches, and concurrent readers."""

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
class ObjectWithoutId:
    text: str

    @property
    def id(self) -> str:
        raise RuntimeError("it has none yet")


class Desk(enum.StrEnum):
    HELP = "technical_support_line"


@both_erase_methods
def test_erase_of_unknown_messages_changes_nothing(saver: Saver, erase: Erase) -> None:
    """Unknown ids and threads raise no error."""
    put(saver, {"messages": [human_message("a")], "a": "a", "n": ["x", "a"]})
    before = render_thread(saver)

    for args in (("t", ["b", ""]), ("t", []), ("nobody", ["a"]), ("nobody",)):
        assert ErasureReport() == erase(saver, *args)
    assert before == render_thread(saver)


@both_erase_methods
@pytest.mark.parametrize(
    "tasks", [[{"text": SECRET}, doomed_message], {"one": doomed_message}, doomed_message, "x"]
)
def test_erase_accepts_tasks_that_are_not_sends(saver: Saver, erase: Erase, tasks: Any) -> None:
    """Other programs may store any value in the channel of langgraph's tasks."""
    put(saver, {"messages": [doomed_message, human_message("b")], TASKS: tasks})
    erase(saver, "t", [str(doomed_message.id)])

    assert SECRET.encode() not in read_raw_bytes(saver)
    assert read_channel_values(saver, config_at())["messages"] == [human_message("b")]


@both_erase_methods
def test_erase_without_ids_deletes_thread_and_its_bytes(saver: Saver, erase: Erase) -> None:
    put(saver, {"messages": [doomed_message, human_message("b")], "text": SECRET * 9})
    report = erase(saver, "t")

    assert (report.checkpoints, report.items, len(report.hashes)) == (1, 3, 2)
    assert SECRET.encode() not in read_raw_bytes(saver)
    with pytest.raises(UnknownThread):
        saver.thread("t")


@pytest.mark.parametrize("ids", ["a", [1], [None]])
def test_erase_refuses_ids_that_are_not_list_of_strings(file_saver: Saver, ids: Any) -> None:
    with pytest.raises(ConfigurationError, match="list of message ids"):
        file_saver.erase("t", ids)


def test_hashes_in_reports_are_equal_for_same_message_and_key(tmp_path: Path) -> None:
    """Databases with the same key, or without a key, have the same hash for a message."""
    reports = []
    for name, key in (("a", None), ("b", None), ("c", KEY), ("d", KEY)):
        with Saver.open(tmp_path / name, key=key) as saver:
            put(saver, {"messages": [doomed_message]})
            reports.append(saver.erase("t", ["a"]).hashes)

    assert reports[0] == reports[1]
    assert reports[2] == reports[3]
    assert reports[0] != reports[2]


def test_sizes_of_thread_are_correct_after_erase(tmp_path: Path) -> None:
    """The reported sizes equal the sizes of the rows."""
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


def test_cache_of_another_checkpointer_does_not_return_erased_message(tmp_path: Path) -> None:
    """A checkpointer that has cached the message leaves it out of later reads and puts."""
    path = tmp_path / "x.db"
    with Saver.open(path) as one, Saver.open(path) as two:
        put(one, {"messages": [human_message("b"), doomed_message], "n": 1}, uid="1")
        config = config_at("t", "", "1")
        stored = two.get_tuple(config)
        assert stored is not None
        one.erase("t", ["a"])
        # as put by a run that did not change messages
        checkpoint = {**stored.checkpoint, "id": "2"}
        two.put(config, checkpoint, {"source": "loop"}, {"n": 2})  # type: ignore[arg-type]

        assert {"messages": [human_message("b")], "n": 1} == read_channel_values(two, config_at())
        assert {"messages": [human_message("b")], "n": 1} == read_channel_values(two, config)
        assert SECRET not in render_thread(two)
        assert SECRET.encode() not in read_raw_bytes(one)


# -- the bytes


def test_report_says_if_open_reader_prevents_scrubbing(tmp_path: Path) -> None:
    """The bytes are overwritten by the next erasure after the reader has ended."""
    path = tmp_path / "x.db"
    with Saver.open(path, timeout_s=0.2) as saver:
        put(saver, {"messages": [doomed_message, human_message("b")]})
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT count(*) FROM items").fetchall()
            report_with_reader = saver.erase("t", ["a"])
            assert {"messages": [human_message("b")]} == read_channel_values(saver, config_at())
            other.execute("COMMIT")
        report_without_reader = saver.erase("t", ["a"])
        raw_bytes = read_raw_bytes(saver)

    assert (
        report_with_reader.checkpoints + report_with_reader.items,
        len(report_with_reader.hashes),
        report_with_reader.scrubbed,
    ) == (2, 1, False)
    assert ErasureReport() == report_without_reader
    assert SECRET.encode() not in raw_bytes


class FailingVacuum(sqlite3.Connection):
    """A connection that fails at `VACUUM`, as if the process had been killed there."""

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql == "VACUUM":
            raise sqlite3.OperationalError("no such luck")
        return super().execute(sql, *args)


def test_interrupted_erasure_is_completed_when_file_is_opened(tmp_path: Path) -> None:
    """The message is erased at once. Its bytes are overwritten when the file is next opened."""
    path = tmp_path / "x.db"
    with Saver.open(path, factory=FailingVacuum) as saver:
        put(saver, {"messages": [doomed_message, human_message("b")]})
        saver.database.release_unused_disk_space()  # moves the WAL into the file
        with pytest.raises(StorageError, match="no such luck"):
            saver.erase("t", ["a"])
        assert {"messages": [human_message("b")]} == read_channel_values(saver, config_at())
        put(saver, {"messages": [human_message("b")]}, thread="other")  # the writer still works
    with Saver.open(path) as saver:
        assert SECRET.encode() not in read_raw_bytes(saver)
        with closing(sqlite3.connect(path)) as db:
            names = db.execute("SELECT name FROM settings ORDER BY name").fetchall()
            assert names == [("key check",), ("removals",)]


@pytest.mark.parametrize("value", [Profile(fullName="p"), Profile(fullName="p" * 300)])
def test_strict_erase_keeps_values_of_classes_that_are_not_allowed(
    tmp_path: Path, value: Profile
) -> None:
    """A value of such a class stays as it is if it cannot contain the message."""
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
        stored = saver.get_tuple(config_at())

        assert stored is not None
        channels = stored.checkpoint["channel_values"]
        assert {**values, "messages": [], TASKS: [Send("n", value)]} == channels
        writes = [("task", "v", value), ("task", TASKS, Send("n", value))]
        assert writes == [(*write,) for write in stored.pending_writes or ()]


def test_erase_keeps_objects_whose_properties_raise(file_saver: Saver) -> None:
    """An object whose `id` raises an error is not the message."""
    object_without_id = ObjectWithoutId(f"about {doomed_message.id}")
    put(
        file_saver,
        {
            "messages": [doomed_message],
            "one": object_without_id,
            "more": [object_without_id, {"x": object_without_id}],
        },
    )

    file_saver.erase("t", [doomed_message.id or ""])

    assert {
        "messages": [],
        "one": object_without_id,
        "more": [object_without_id, {"x": object_without_id}],
    } == read_channel_values(file_saver, config_at())


def test_erase_keeps_members_of_string_enums(file_saver: Saver) -> None:
    """Members stay even if they equal the text of the message."""
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
def test_erase_removes_tool_call_from_dict_channels_and_their_history(
    saver: Saver, uid: str
) -> None:
    """The call may be the value of a channel, or its id may be a key. Ids have any length."""
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


def test_erase_does_not_take_list_of_two_for_pair_of_dict(saver: Saver) -> None:
    """A list of two is not a pair of a dict if its first element cannot be a key."""
    config = put(saver, {"messages": [doomed_message], "x": {"k": {"z": 1}}})
    config = put(saver, {"messages": [doomed_message], "x": [[{"p": 1}, doomed_message]]}, config)
    put(saver, {"messages": [doomed_message], "x": None}, config)

    saver.erase("t", [doomed_message.id or ""])

    assert read_channel_values(saver, config) == {"messages": [], "x": [[{"p": 1}]]}
    history = [item.value for item in saver.history("t", channel="x")]
    assert [[*value] for value in history] == [["k", {"z": 1}], [{"p": 1}]]
