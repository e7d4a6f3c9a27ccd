"""`import_from` copies files that langgraph-checkpoint-sqlite wrote."""

from __future__ import annotations

import asyncio
import math
import operator
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph, add_messages
from langgraph.types import Command, Send, interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError, ForbiddenType, ImportFailed, NotADatabase
from tests.contracts.puts import put
from tests.contracts.test_types import Profile


class ReversingCipher:
    """A cipher that reverses the bytes."""

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "swapped", plaintext[::-1]

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        return ciphertext[::-1]


class CustomSerializer(JsonPlusSerializer):
    """A custom serializer of a user."""


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    notes: Annotated[list[dict[str, Any]], operator.add]


def compile_graph(saver: BaseCheckpointSaver[Any]) -> Any:
    inner = StateGraph(State)
    inner.add_node("think", lambda state: {"notes": [{"seen": len(state["messages"])}]})
    inner.add_edge(START, "think")

    def ask(state: State) -> dict[str, Any]:
        if state["messages"][-1].text.endswith("?"):
            return {"messages": [("ai", str(interrupt("which?")))]}
        return {"messages": [("ai", "ok")]}

    graph = StateGraph(State)
    graph.add_node("sub", inner.compile(checkpointer=True))
    graph.add_node("ask", ask)
    graph.add_node("fan", lambda state: {"notes": [{"fan": len(state["notes"])}]})
    graph.add_edge(START, "sub")
    graph.add_edge("sub", "ask")
    graph.add_conditional_edges("ask", lambda _: [Send("fan", {"notes": []})] * 2, ["fan"])
    return graph.compile(checkpointer=saver)


@pytest.fixture
def langgraph_file(tmp_path: Path) -> Path:
    """A file of langgraph's saver with subgraphs, sends, forks, and an interrupted thread."""
    path = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as saver:
        graph = compile_graph(saver)
        for thread in ("a", "b%_é"):
            config: Any = {"configurable": {"thread_id": thread}, "metadata": {"user": "u1"}}
            for text in ("one", "two", "three"):
                graph.invoke({"messages": [("human", text)]}, config)
            early = list(graph.get_state_history(config))[4].config
            graph.update_state(early, {"messages": [("human", "a fork")]}, as_node="sub")
        graph.invoke({"messages": [("human", "well?")]}, {"configurable": {"thread_id": "c"}})
    return path


def read_all_checkpoints(
    saver: BaseCheckpointSaver[Any],
) -> dict[tuple[str, str, str], CheckpointTuple]:
    return {
        tuple(
            found.config["configurable"][k] for k in ("thread_id", "checkpoint_ns", "checkpoint_id")
        ): found
        for found in saver.list(None)
    }


@pytest.fixture
def expected(langgraph_file: Path) -> Iterator[dict[tuple[str, str, str], CheckpointTuple]]:
    with SqliteSaver.from_conn_string(str(langgraph_file)) as saver:
        yield read_all_checkpoints(saver)


def test_import_copies_every_checkpoint_unchanged(
    saver: SQLiteCheckpointer, langgraph_file: Path, expected: dict[Any, CheckpointTuple]
) -> None:
    """Every checkpoint of every thread and namespace equals that of langgraph's saver."""
    before = langgraph_file.read_bytes()

    report = saver.import_from(langgraph_file)

    assert expected == read_all_checkpoints(saver)
    assert (3, len(expected), 0) == (report.threads, report.checkpoints, report.skipped)
    assert sum(len(t.pending_writes or ()) for t in expected.values()) == report.writes
    assert before == langgraph_file.read_bytes()


def test_imported_threads_continue_as_in_langgraph_saver(
    saver: SQLiteCheckpointer, langgraph_file: Path
) -> None:
    """An interrupted run is resumed, and a finished thread continues."""
    saver.import_from(langgraph_file)
    texts = []
    with SqliteSaver.from_conn_string(str(langgraph_file)) as langgraph_saver:
        for checkpointer in (langgraph_saver, saver):
            graph = compile_graph(checkpointer)
            resumed = graph.invoke(Command(resume="this"), {"configurable": {"thread_id": "c"}})
            state = graph.invoke({"messages": ["x"]}, {"configurable": {"thread_id": "a"}})
            texts.append([[m.text for m in s["messages"]] for s in (resumed, state)])

    assert texts[0][0] == ["well?", "this"]
    assert texts[0] == texts[1]
    assert "a fork" in [item.value.text for item in saver.history("a")]


def test_repeated_import_adds_only_new_checkpoints(
    file_saver: SQLiteCheckpointer, langgraph_file: Path, expected: dict[Any, CheckpointTuple]
) -> None:
    """A second import without changes of the source adds nothing."""
    file_saver.import_from(langgraph_file)
    second_report = asyncio.run(file_saver.aimport_from(langgraph_file))
    with SqliteSaver.from_conn_string(str(langgraph_file)) as langgraph_saver:
        compile_graph(langgraph_saver).invoke(
            {"messages": [("human", "more")]}, {"configurable": {"thread_id": "a"}}
        )
        grown_checkpoints = read_all_checkpoints(langgraph_saver)

    third_report = file_saver.import_from(langgraph_file)

    assert (0, len(expected)) == (second_report.checkpoints, second_report.skipped)
    assert (len(grown_checkpoints) - len(expected), len(expected)) == (
        third_report.checkpoints,
        third_report.skipped,
    )
    assert grown_checkpoints == read_all_checkpoints(file_saver)


def test_import_stopped_by_damaged_row_continues_after_repair(
    tmp_path: Path, langgraph_file: Path, expected: dict[Any, CheckpointTuple]
) -> None:
    """The error names the thread and the checkpoint.

    After the repair, a second import adds the rest.
    """
    with closing(sqlite3.connect(langgraph_file)) as db:
        uid, original_body = db.execute(
            "SELECT checkpoint_id, checkpoint FROM checkpoints WHERE thread_id = 'c' LIMIT 1"
        ).fetchone()
        db.execute("UPDATE checkpoints SET checkpoint = x'c1' WHERE checkpoint_id = ?", (uid,))
        db.commit()
        with SQLiteCheckpointer.open(tmp_path / "new.db") as saver:
            with pytest.raises(Exception, match=f"thread 'c', checkpoint '{uid}'"):
                saver.import_from(langgraph_file)
            imported = read_all_checkpoints(saver)
            db.execute(
                "UPDATE checkpoints SET checkpoint = ? WHERE checkpoint_id = ?",
                (original_body, uid),
            )
            db.commit()
            report = saver.import_from(langgraph_file)

            assert {k: v for k, v in expected.items() if k in imported} == imported
            assert {"a", "b%_é"} <= {thread for thread, _, _ in imported}
            assert len(imported) == report.skipped
            assert expected == read_all_checkpoints(saver)


def test_import_refuses_thread_that_continued_in_both_databases(
    file_saver: SQLiteCheckpointer, langgraph_file: Path
) -> None:
    """Two histories are not mixed into one thread, and nothing is written."""
    file_saver.import_from(langgraph_file)
    config: Any = {"configurable": {"thread_id": "a"}}
    compile_graph(file_saver).invoke({"messages": [("human", "here")]}, config)
    with SqliteSaver.from_conn_string(str(langgraph_file)) as langgraph_saver:
        compile_graph(langgraph_saver).invoke({"messages": [("human", "there")]}, config)
    before = read_all_checkpoints(file_saver)

    with pytest.raises(ImportFailed, match="thread 'a' has"):
        file_saver.import_from(langgraph_file)

    assert before == read_all_checkpoints(file_saver)


def test_strict_import_refuses_types_that_are_not_allowed(tmp_path: Path) -> None:
    """The error names the type, the thread and the checkpoint."""
    path = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as langgraph_saver:
        checkpoint: Any = {
            "v": 4,
            "id": "1",
            "ts": "t",
            "channel_values": {"x": {1.5, 2.5}},
            "channel_versions": {"x": 1},
            "versions_seen": {},
            "updated_channels": None,
        }
        checkpoint["channel_values"]["p"] = Profile(fullName="n")
        checkpoint["channel_values"]["d"] = Decimal("1.1")
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        langgraph_saver.put(config, checkpoint, {"source": "input"}, {"x": 1})

    with SQLiteCheckpointer.open(tmp_path / "strict.db", strict=True) as saver:
        with pytest.raises(ForbiddenType, match=r"thread 't', checkpoint '1'.*Profile"):
            saver.import_from(path)

        assert saver.threads() == []
    with SQLiteCheckpointer.open(tmp_path / "open.db") as saver:
        saver.import_from(path)
        imported = saver.get_tuple(config)

        assert imported is not None
        assert checkpoint == imported.checkpoint


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_import_with_custom_serializer_refuses_types_that_are_not_allowed(
    tmp_path: Path, is_encrypted: bool
) -> None:
    """langgraph's serializers return a dict in place of a refused value.

    Such a dict is never stored.
    """

    def make_serde(allowed: Any) -> Any:
        serializer = CustomSerializer(allowed_msgpack_modules=allowed)
        return EncryptedSerializer(ReversingCipher(), serializer) if is_encrypted else serializer

    path = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as langgraph_saver:
        langgraph_saver.serde = make_serde(True)
        put(langgraph_saver, {"p": Profile(fullName="n")}, uid="1")

    with SQLiteCheckpointer.open(tmp_path / "new.db") as saver:
        with pytest.raises(ForbiddenType, match=r"thread 't', checkpoint '1'.*Profile"):
            saver.import_from(path, serde=make_serde([("a", "b")]))

        assert saver.threads() == []


def test_cancelled_import_stops_after_current_checkpoint(
    tmp_path: Path, langgraph_file: Path
) -> None:
    """A second import copies the rest."""
    write_started, may_continue = threading.Event(), threading.Event()

    async def cancel_import(saver: SQLiteCheckpointer) -> None:
        importing = asyncio.create_task(saver.aimport_from(langgraph_file))
        await asyncio.to_thread(write_started.wait, 30)
        importing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await importing
        may_continue.set()  # the loop's threads are joined at its end

    with SQLiteCheckpointer.open(tmp_path / "new.db") as saver:
        write = saver._execute_write

        def write_slowly(*args: Any) -> None:
            write_started.set()
            assert may_continue.wait(30)
            write(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saver, "_execute_write", write_slowly)
            asyncio.run(cancel_import(saver))

        assert saver.stats()["checkpoints"] == 1
        assert saver.import_from(langgraph_file).skipped == 1


def test_import_accepts_old_files_without_task_paths(tmp_path: Path, langgraph_file: Path) -> None:
    with closing(sqlite3.connect(langgraph_file)) as db:
        db.execute("ALTER TABLE writes DROP COLUMN task_path")
        db.commit()
    with SQLiteCheckpointer.open(tmp_path / "new.db") as saver:
        saver.import_from(langgraph_file)
        graph = compile_graph(saver)

        resumed = graph.invoke(Command(resume="this"), {"configurable": {"thread_id": "c"}})

        assert resumed["messages"][-1].text == "this"


def test_import_refuses_missing_and_foreign_files(
    file_saver: SQLiteCheckpointer, tmp_path: Path
) -> None:
    """A foreign file is another application's database or no database."""
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as db:
        db.execute("CREATE TABLE t (x)")
    text = tmp_path / "text.db"
    text.write_text("no database, but long enough to be taken for one " * 20)

    with pytest.raises(ConfigurationError, match="does not exist"):
        file_saver.import_from(tmp_path / "nowhere.db")
    with pytest.raises(NotADatabase, match="not contain the tables of langgraph-checkpoint-sqlite"):
        file_saver.import_from(other)
    with pytest.raises(NotADatabase, match="not an SQLite database"):
        file_saver.import_from(text)


@pytest.mark.parametrize("value", [math.nan, [1.0, {"x": math.nan}], Send("ask", math.nan)])
def test_repeated_import_recognises_values_with_nan(
    saver: SQLiteCheckpointer, tmp_path: Path, value: Any
) -> None:
    """NaN may be at any depth, and channels may be in another order."""
    path = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as langgraph_saver:
        config = put(langgraph_saver, {"x": value, "a": 1}, uid="1")
        langgraph_saver.put_writes(config, [("x", value)], "task")

    first, second = saver.import_from(path), saver.import_from(path)

    assert (first.checkpoints, first.writes) == (1, 1)
    assert (second.checkpoints, second.writes, second.unchanged) == (0, 0, 1)
    assert str(value) == str(saver.get_tuple(config).checkpoint["channel_values"]["x"])  # type: ignore[union-attr]
