"""`import_from`: files that langgraph-checkpoint-sqlite wrote, with real graphs."""

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


class Swapped:
    """A cipher, for what it is worth."""

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "swapped", plaintext[::-1]

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        return ciphertext[::-1]


class Own(JsonPlusSerializer):
    """A serializer of a user's."""


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    notes: Annotated[list[dict[str, Any]], operator.add]


def build(saver: BaseCheckpointSaver[Any]) -> Any:
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
def old(tmp_path: Path) -> Path:
    """A file of the peer: subgraphs, sends, forks, and a thread that waits in an interrupt."""
    path = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as saver:
        graph = build(saver)
        for thread in ("a", "b%_é"):
            config: Any = {"configurable": {"thread_id": thread}, "metadata": {"user": "u1"}}
            for text in ("one", "two", "three"):
                graph.invoke({"messages": [("human", text)]}, config)
            early = list(graph.get_state_history(config))[4].config
            graph.update_state(early, {"messages": [("human", "a fork")]}, as_node="sub")
        graph.invoke({"messages": [("human", "well?")]}, {"configurable": {"thread_id": "c"}})
    return path


def everything(saver: BaseCheckpointSaver[Any]) -> dict[tuple[str, str, str], CheckpointTuple]:
    return {
        tuple(
            found.config["configurable"][k] for k in ("thread_id", "checkpoint_ns", "checkpoint_id")
        ): found
        for found in saver.list(None)
    }


@pytest.fixture
def expected(old: Path) -> Iterator[dict[tuple[str, str, str], CheckpointTuple]]:
    with SqliteSaver.from_conn_string(str(old)) as saver:
        yield everything(saver)


def test_everything_is_taken_over(
    saver: SQLiteCheckpointer, old: Path, expected: dict[Any, CheckpointTuple]
) -> None:
    """Every checkpoint of every thread and namespace reads back as the peer gives it."""
    before = old.read_bytes()

    report = saver.import_from(old)

    assert expected == everything(saver)
    assert (3, len(expected), 0) == (report.threads, report.checkpoints, report.skipped)
    assert sum(len(t.pending_writes or ()) for t in expected.values()) == report.writes
    assert before == old.read_bytes()


def test_threads_go_on_where_the_peer_left_them(saver: SQLiteCheckpointer, old: Path) -> None:
    """An interrupted run is resumed and a finished thread goes on, just as under the peer."""
    saver.import_from(old)
    texts = []
    with SqliteSaver.from_conn_string(str(old)) as peer:
        for which in (peer, saver):
            graph = build(which)
            resumed = graph.invoke(Command(resume="this"), {"configurable": {"thread_id": "c"}})
            state = graph.invoke({"messages": ["x"]}, {"configurable": {"thread_id": "a"}})
            texts.append([[m.text for m in s["messages"]] for s in (resumed, state)])

    assert texts[0][0] == ["well?", "this"]
    assert texts[0] == texts[1]
    assert "a fork" in [item.value.text for item in saver.history("a")]


def test_an_import_may_be_repeated(
    file_saver: SQLiteCheckpointer, old: Path, expected: dict[Any, CheckpointTuple]
) -> None:
    """The second time nothing changes; what the source gained since is added."""
    file_saver.import_from(old)
    again = asyncio.run(file_saver.aimport_from(old))
    with SqliteSaver.from_conn_string(str(old)) as peer:
        build(peer).invoke({"messages": [("human", "more")]}, {"configurable": {"thread_id": "a"}})
        later = everything(peer)

    grown = file_saver.import_from(old)

    assert (0, len(expected)) == (again.checkpoints, again.skipped)
    assert (len(later) - len(expected), len(expected)) == (grown.checkpoints, grown.skipped)
    assert later == everything(file_saver)


def test_a_cut_off_import_goes_on(
    tmp_path: Path, old: Path, expected: dict[Any, CheckpointTuple]
) -> None:
    """A damaged row stops it with its place named; once mended, the rest follows."""
    with closing(sqlite3.connect(old)) as db:
        uid, good = db.execute(
            "SELECT checkpoint_id, checkpoint FROM checkpoints WHERE thread_id = 'c' LIMIT 1"
        ).fetchone()
        db.execute("UPDATE checkpoints SET checkpoint = x'c1' WHERE checkpoint_id = ?", (uid,))
        db.commit()
        with SQLiteCheckpointer.open(tmp_path / "new.db") as saver:
            with pytest.raises(Exception, match=f"thread 'c', checkpoint '{uid}'"):
                saver.import_from(old)
            kept = everything(saver)
            db.execute("UPDATE checkpoints SET checkpoint = ? WHERE checkpoint_id = ?", (good, uid))
            db.commit()
            report = saver.import_from(old)

            assert {k: v for k, v in expected.items() if k in kept} == kept
            assert {"a", "b%_é"} <= {thread for thread, _, _ in kept}
            assert len(kept) == report.skipped
            assert expected == everything(saver)


def test_a_thread_that_went_on_in_both_is_refused(
    file_saver: SQLiteCheckpointer, old: Path
) -> None:
    """Two histories are not mixed into one thread; nothing is written."""
    file_saver.import_from(old)
    config: Any = {"configurable": {"thread_id": "a"}}
    build(file_saver).invoke({"messages": [("human", "here")]}, config)
    with SqliteSaver.from_conn_string(str(old)) as peer:
        build(peer).invoke({"messages": [("human", "there")]}, config)
    before = everything(file_saver)

    with pytest.raises(ImportFailed, match="thread 'a' has"):
        file_saver.import_from(old)

    assert before == everything(file_saver)


def test_types_that_are_not_allowed_are_refused(tmp_path: Path) -> None:
    """The allowlist holds for what others wrote too; the type and its place are named."""
    path = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as peer:
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
        peer.put(config, checkpoint, {"source": "input"}, {"x": 1})

    with SQLiteCheckpointer.open(tmp_path / "strict.db", strict=True) as saver:
        with pytest.raises(ForbiddenType, match=r"thread 't', checkpoint '1'.*Profile"):
            saver.import_from(path)

        assert saver.threads() == []
    with SQLiteCheckpointer.open(tmp_path / "open.db") as saver:
        saver.import_from(path)
        found = saver.get_tuple(config)

        assert found is not None
        assert checkpoint == found.checkpoint


@pytest.mark.parametrize("encrypted", [False, True])
def test_other_serializers_refuse_types_too(tmp_path: Path, encrypted: bool) -> None:
    """langgraph's hand out a dict in the place of a refused value; that is never stored."""

    def serde(allowed: Any) -> Any:
        own = Own(allowed_msgpack_modules=allowed)
        return EncryptedSerializer(Swapped(), own) if encrypted else own

    path = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as peer:
        peer.serde = serde(True)
        put(peer, {"p": Profile(fullName="n")}, uid="1")

    with SQLiteCheckpointer.open(tmp_path / "new.db") as saver:
        with pytest.raises(ForbiddenType, match=r"thread 't', checkpoint '1'.*Profile"):
            saver.import_from(path, serde=serde([("a", "b")]))

        assert saver.threads() == []


def test_a_cancelled_import_stops(tmp_path: Path, old: Path) -> None:
    """No checkpoint is taken over after the one under way; a repetition does the rest."""
    under_way, go_on = threading.Event(), threading.Event()

    async def course(saver: SQLiteCheckpointer) -> None:
        importing = asyncio.create_task(saver.aimport_from(old))
        await asyncio.to_thread(under_way.wait, 30)
        importing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await importing
        go_on.set()  # the loop's threads are joined at its end

    with SQLiteCheckpointer.open(tmp_path / "new.db") as saver:
        write = saver._write

        def slow(*args: Any) -> None:
            under_way.set()
            assert go_on.wait(30)
            write(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saver, "_write", slow)
            asyncio.run(course(saver))

        assert saver.stats()["checkpoints"] == 1
        assert saver.import_from(old).skipped == 1


def test_files_from_before_task_paths(tmp_path: Path, old: Path) -> None:
    """Old files of the peer lack a column; they are taken over all the same."""
    with closing(sqlite3.connect(old)) as db:
        db.execute("ALTER TABLE writes DROP COLUMN task_path")
        db.commit()
    with SQLiteCheckpointer.open(tmp_path / "new.db") as saver:
        saver.import_from(old)
        graph = build(saver)

        resumed = graph.invoke(Command(resume="this"), {"configurable": {"thread_id": "c"}})

        assert resumed["messages"][-1].text == "this"


def test_other_files_are_refused(file_saver: SQLiteCheckpointer, tmp_path: Path) -> None:
    """A missing file, another application's, and no database at all."""
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as db:
        db.execute("CREATE TABLE t (x)")
    text = tmp_path / "text.db"
    text.write_text("no database, but long enough to be taken for one " * 20)

    with pytest.raises(ConfigurationError, match="does not exist"):
        file_saver.import_from(tmp_path / "nowhere.db")
    with pytest.raises(NotADatabase, match="no tables of langgraph-checkpoint-sqlite"):
        file_saver.import_from(other)
    with pytest.raises(NotADatabase, match="not an SQLite database"):
        file_saver.import_from(text)


@pytest.mark.parametrize("value", [math.nan, [1.0, {"x": math.nan}], Send("ask", math.nan)])
def test_values_that_equal_nothing_are_compared_too(
    saver: SQLiteCheckpointer, tmp_path: Path, value: Any
) -> None:
    """NaN, wherever it is, also beside channels in another order."""
    path = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as peer:
        config = put(peer, {"x": value, "a": 1}, uid="1")
        peer.put_writes(config, [("x", value)], "task")

    first, second = saver.import_from(path), saver.import_from(path)

    assert (first.checkpoints, first.writes) == (1, 1)
    assert (second.checkpoints, second.writes, second.unchanged) == (0, 0, 1)
    assert str(value) == str(saver.get_tuple(config).checkpoint["channel_values"]["x"])  # type: ignore[union-attr]
