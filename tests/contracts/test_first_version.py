"""Files of the first version open, read as they did there, and go on in the new form."""

from __future__ import annotations

import copy
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.types import Command

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.address import Address
from perdure.checkpointers.manifest import count, limit
from perdure.errors import StorageError, WrongKey
from tests.contracts.puts import listed, put
from tests.first_version import FILES, agent, asking, at, chat, contents, described

DATA = Path(__file__).parents[1] / "data" / "v1"
THREADS = [
    *(("plain", thread) for thread in ("agent", "blocks", "forked", "rewound", "asking")),
    *(("sealed", thread) for thread in ("agent", "blocks")),
]
each_thread = pytest.mark.parametrize(("file", "thread"), THREADS)


def expected(file: str, thread: str) -> Any:
    return json.loads((DATA / f"{file}.json").read_text(encoding="utf-8"))[thread]


@pytest.fixture
def path(tmp_path: Path, file: str) -> Path:
    return Path(shutil.copy(DATA / f"{file}.db", tmp_path / "x.db"))


@pytest.fixture
def old(path: Path, file: str) -> Iterator[SQLiteCheckpointer]:
    """A copy of a file, open."""
    with SQLiteCheckpointer.open(path, key=FILES[file]) as saver:
        yield saver


def head_of(told: Any) -> Any:
    return next(each for each in told["checkpoints"] if each["head"] and each["ns"] == "")


@each_thread
def test_every_checkpoint_reads_as_it_did(old: SQLiteCheckpointer, file: str, thread: str) -> None:
    """Values, writes, metadata, versions, order, heads, counts and history of each."""
    assert expected(file, thread) == json.loads(json.dumps(contents(old, thread)))


@each_thread
def test_lists_and_history_of_the_head(old: SQLiteCheckpointer, file: str, thread: str) -> None:
    """`list` gives the head and then the last put; without an id history also tells of branches.

    In the first version the list was in the order of putting alone, and branches were left out.
    """
    told = expected(file, thread)
    head = head_of(told)
    items = old.history(thread)
    others = [c["id"] for c in told["checkpoints"] if c["ns"] == "" and c is not head]
    on_branches = {p for c in told["checkpoints"] if c["ns"] == "" for p, *_ in c["history"]}

    assert [head["id"], *others] == listed(old, at(thread))
    assert head["history"] == [
        [i.position, i.seen, described(i.value)] for i in items if not i.branch
    ]
    assert [i.position for i in items if i.branch] == sorted(
        on_branches - {position for position, *_ in head["history"]}
    )


@each_thread
def test_the_next_put_has_a_small_manifest(
    old: SQLiteCheckpointer, path: Path, file: str, thread: str
) -> None:
    """What follows an old checkpoint is stored in the new form, history goes on, and all stays."""
    told = expected(file, thread)
    found = old.get_tuple(at(thread))
    assert found is not None
    values = copy.deepcopy(found.checkpoint["channel_values"])
    values["messages"].append(HumanMessage("and on", id="new"))
    put(old, values, found.config, thread=thread, uid="next")
    old.close()
    with SQLiteCheckpointer.open(path, key=FILES[file]) as saver:
        again = saver.database.read(lambda: saver._reader.find(Address(thread, "", None)))
        history = saver.history(thread, checkpoint_id="next")
        after = contents(saver, thread)

    assert again is not None
    for ranges in (again.snapshot.ranges, again.snapshot.said):
        for _, parts in ranges.values():
            assert len(parts) <= limit(count(parts))
    assert [*head_of(told)["history"], ["and on", True]] == [
        *([i.position, i.seen, described(i.value)] for i in history[:-1]),
        [history[-1].value.content, history[-1].seen],
    ]
    for each in after["checkpoints"][1:]:
        each["head"] = each["id"] == head_of(told)["id"] or (each["ns"] != "" and each["head"])
    assert told["checkpoints"] == json.loads(json.dumps(after["checkpoints"][1:]))


@each_thread
def test_an_old_thread_takes_its_next_turn(old: SQLiteCheckpointer, file: str, thread: str) -> None:
    """The same program goes on where it was, also with a question that was open."""
    before = [m["id"] for m in head_of(expected(file, thread))["values"]["messages"]]
    if thread == "asking":
        out = asking(old).invoke(Command(resume="yes"), at(thread))
    else:
        graph = agent(old) if thread == "agent" else chat(old)
        out = graph.invoke({"messages": [("human", "3")]}, at(thread))
    ids = [message.id for message in out["messages"]]

    assert before == ids[: len(before)]
    assert len(ids) == len(before) + {"agent": 6, "asking": 1}.get(thread, 2)
    assert ids == [m.id for m in old.get_tuple(at(thread)).checkpoint["channel_values"]["messages"]]  # type: ignore[union-attr]


@each_thread
def test_an_old_thread_is_copied_pruned_and_swept(
    old: SQLiteCheckpointer, file: str, thread: str
) -> None:
    """Old manifests, also those of blocks, keep what they refer to; nothing else stays."""
    told = expected(file, thread)
    old.copy_thread(thread, "copy")
    copied = contents(old, "copy")
    old.delete_thread(thread)
    old.retain(Retention(last=0), thread_ids=["copy"])
    pruned = contents(old, "copy")
    old.retain(Retention(last=0, history=False), thread_ids=["copy"])
    head = head_of(contents(old, "copy"))

    assert json.loads(json.dumps(copied)) == told
    assert [c for c in told["checkpoints"] if c["head"]] == json.loads(
        json.dumps(pruned["checkpoints"])
    )
    assert head["values"] == head_of(told)["values"]
    assert all(seen for _, seen, _ in head["history"])


@pytest.mark.parametrize("file", ["sealed"])
def test_an_encrypted_file_opens_with_its_key_alone(path: Path) -> None:
    """Neither without a key nor with another one; after that it reads as it did."""
    for key in (None, bytes(32)):
        with pytest.raises(WrongKey):
            SQLiteCheckpointer.open(path, key=key)

    with SQLiteCheckpointer.open(path, key=FILES["sealed"]) as saver:
        found = json.loads(json.dumps(contents(saver, "agent")))
    assert expected("sealed", "agent") == found


@pytest.mark.parametrize("file", ["plain"])
def test_read_only_asks_for_the_migration(path: Path) -> None:
    """A file of the first version cannot be read before it was opened for writing once."""
    with pytest.raises(StorageError, match=r"version 1 of the checkpointers schema.*for writing"):
        SQLiteCheckpointer.open(path, read_only=True)


@pytest.mark.parametrize("file", ["plain"])
def test_a_process_of_the_first_version_refuses_what_was_migrated(path: Path) -> None:
    """It says which version the file has and that perdure is to be upgraded.

    On open, that version (7b4dfdf, `storage/migrations.py`) ran this query, and raised a
    `SchemaMismatch` with these words `if found > len(migration.steps)`, of which it had one.
    """

    def refusal() -> str:
        sql = "SELECT max(version) FROM migrations WHERE component = ?"
        with closing(sqlite3.connect(path)) as conn:
            found = conn.execute(sql, ("checkpointers",)).fetchall()[0][0] or 0
        return f"has version {found} of the checkpointers schema" if found > 1 else ""

    assert refusal() == ""
    SQLiteCheckpointer.open(path).close()

    assert refusal() == "has version 2 of the checkpointers schema"
