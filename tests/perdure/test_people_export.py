"""The archive of a person: complete, nobody else's, and read back by `perdure import`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure import people
from perdure.checkpointers.crons import CronTable
from perdure.checkpointers.runs import RunTable
from perdure.errors import ConfigurationError, UnknownPerson
from perdure.memory import Instructions, Profile, memories
from perdure.memory.thread_export import build_thread_export
from tests.cli.commands import invoke, run
from tests.contracts.puts import put
from tests.people import (
    Facts,
    People,
    accept_run,
    cron_row,
    empty_database,
    fill,
    mark,
    marks,
    opened,
)

ANN: Any = {"configurable": {"user_id": "ann"}}


@pytest.fixture(params=["file", "postgres"])
def backend(request: pytest.FixtureRequest) -> str:
    """The kind of database."""
    return str(request.param)


@pytest.fixture
def filled(backend: str, tmp_path: Path) -> Iterator[People]:
    """A database with everything of two people."""
    with empty_database(backend, tmp_path) as db, opened(db) as both:
        fill(both, "ann", "anns")
        fill(both, "bob", "bobs")
        both.store.put(("cities", "ann"), "home", {"text": mark("ann", "city")})
        yield both


def items(opened_people: People, user: str) -> list[dict[str, Any]]:
    """Return all versions of the items of a person, with notes."""
    lines = [*opened_people.store.export()]
    own = [line for line in lines if user in line["namespace"] or f"{user}s" in line["namespace"]]
    return [line for line in own if line["namespace"][0] != "cities"]


def test_an_archive_is_read_back(filled: People, backend: str, tmp_path: Path) -> None:
    """Threads with all branches and items with all versions are equal; no run and no cron is."""
    archive = tmp_path / "ann.jsonl"
    archive.write_text(run("export", "--user", "ann", "--db", filled.db))
    with empty_database(backend, tmp_path, "copy") as db:
        said = run("import", str(archive), "--db", db)
        again = run("import", str(archive), "--db", db)
        with opened(db) as copy:
            threads = [thread.thread_id for thread in copy.saver.threads()]
            exported = [build_thread_export(copy.saver, each) for each in ("anns", "anns-2")]
            original = [build_thread_export(filled.saver, each) for each in ("anns", "anns-2")]
            same = items(copy, "ann"), items(filled, "ann")
            instructions = Instructions(copy.store, ("instructions", "{user_id}")).current(ANN)
            profile = Profile(Facts, copy.store).get(ANN)
            texts = [memory.text for memory in memories(store=copy.store, config=ANN, limit=50)]
            runs = asyncio.run(RunTable(copy.saver).list_live_runs())
            crons = asyncio.run(CronTable(copy.saver).list_crons())
            owners = {copy.saver.head(each).owner for each in threads}  # type: ignore[union-attr]

    assert sorted(threads) == ["anns", "anns-2"]
    assert exported == original
    assert all(len(line["branches"]) == 1 for line in exported)
    assert same[0] == same[1]
    assert {line["version"] for line in same[0] if line["key"] == "taste"} >= {1, 2}
    assert instructions.text == f"Say {mark('ann', 'style')}"
    assert profile.nickname == mark("ann", "profile")
    assert f"likes {mark('ann', 'correction')}" in texts
    assert (runs, crons, owners) == ([], [], {"ann"})
    assert "3 recorded runs and crons, which are not run" in said
    assert "2 conversations (2 of ann): 2 unchanged" in again
    assert "new" not in again


def test_an_archive_has_all_of_one_person_and_nothing_of_others(filled: People) -> None:
    """Every kind of content is in it; a namespace that only has the name is listed."""
    lines = [*people.export("ann", filled.saver, filled.store)]
    awaited = asyncio.run(collect(filled))
    text = json.dumps(lines).encode()
    own = [
        each
        for each in marks("ann")
        if each not in (b"zqanneventqz", b"zqanncityqz", b"zqannhookqz")
    ]
    record = [line["run"] for line in lines if "run" in line]

    assert [each for each in own if each not in text] == []
    assert [each for each in (*marks("bob"), b"bob") if each in text] == []
    assert lines[0]["perdure_archive"] == 1
    assert lines[0]["user"] == "ann"
    assert lines[0]["other_namespaces"] == [["cities", "ann"]]
    assert [(each["status"], each["thread_id"]) for each in record] == [("running", "anns")]
    assert len([line for line in lines if "cron" in line]) == 2
    assert awaited[1:] == lines[1:]


async def collect(filled: People) -> list[dict[str, Any]]:
    """Return the lines of the form for coroutines."""
    return [line async for line in people.aexport("ann", filled.saver, filled.store)]


def test_an_unknown_person(filled: People) -> None:
    """Nobody has this name: exit code 1, and nothing is printed."""
    result = invoke("export", "--user", "nobody", "--db", filled.db)
    with pytest.raises(UnknownPerson, match="nobody of this name"):
        people.export("Ann", filled.saver, filled.store)
    with pytest.raises(ConfigurationError, match="not blank"):
        people.export(" ", filled.saver, filled.store)

    assert (result.exit_code, result.stdout) == (1, "")
    assert "nobody of this name" in result.stderr


def test_a_thread_that_cannot_be_exported_is_named(tmp_path: Path) -> None:
    """The other lines are written."""
    with opened(str(tmp_path / "m.db")) as own:
        fill(own, "ann", "anns")
        put(own.saver, {"messages": [1.5, {"a": 1}]}, thread="odd", metadata={"user_id": "ann"})
        lines = [*people.export("ann", own.saver, own.store)]
    named = {line["thread_id"]: line for line in lines if "thread_id" in line}

    assert sorted(named) == ["anns", "anns-2", "odd"]
    assert "items of type float" in named["odd"]["problem"]


def test_only_the_archive_may_contain_items(tmp_path: Path) -> None:
    """Without the header, a line that looks like an item is none."""
    lines = tmp_path / "lines.jsonl"
    item = {"namespace": ["memories", "ann"], "key": "k", "value": {"text": "figs"}}
    lines.write_text(json.dumps(item) + "\n")
    result = invoke("import", str(lines), "--db", str(tmp_path / "m.db"))

    assert result.exit_code != 0
    assert not (tmp_path / "m.db").exists()


def test_an_archive_writes_nothing_for_another_person(tmp_path: Path) -> None:
    """An item in a namespace without the person's name is left out and counted."""
    lines = tmp_path / "ann.jsonl"
    own = (["memories", "ann"], ["chat_memory", "t"], ["notes", "of", "ann"])
    others = (
        *(["memories", "bob"], ["memories", "bob", "ann"], ["teams", "red", "ann"]),
        *(["teams", "ann"], ["perdure", "quarantine", "memories", "bob", "ann"]),
        *(["perdure", "ann"], ["annex", "memories"]),
    )
    items = [{"namespace": name, "key": "k", "value": {"text": "figs"}} for name in (*own, *others)]
    header = {"perdure_archive": 1, "user": "ann"}
    lines.write_text("".join(json.dumps(line) + "\n" for line in (header, *items)))
    result = invoke("import", str(lines), "--db", str(tmp_path / "m.db"))
    with opened(str(tmp_path / "m.db")) as copy:
        namespaces = copy.store.list_namespaces()

    assert result.exit_code == 0
    assert "left out: item of another person (7)" in result.stderr
    assert namespaces == sorted(map(tuple, own))


def test_the_module_needs_no_extra() -> None:
    """It is imported without the packages of the server."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('fastapi', 'starlette', 'dbos', 'typer'));"
        "import perdure.people; print(sorted(n for n in sys.modules if n.startswith('perdure.s')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "perdure.server" not in done.stdout


def test_an_archive_names_nobody_else(backend: str, tmp_path: Path) -> None:
    """Neither who sent runs and made crons, nor whose namespaces have the person's name."""
    with empty_database(backend, tmp_path) as db, opened(db) as own:
        fill(own, "ann", "anns")
        for sender in ({"user": "boss"}, {"user": "desk", "acting_for": "ann"}):
            about = {**sender, "metadata": {"owner": sender["user"]}}
            accept_run(own.saver, "ann", "anns", sender=about)
            cron = cron_row("ann", "anns")
            cron.content.update(sender, metadata={"owner": sender["user"]})
            cron.content["payload"]["context"] = sender
            asyncio.run(CronTable(own.saver).create(cron))
        named = {"user_id": "ann", "owner": "boss", "perdure_caller": "boss"}
        put(own.saver, {"messages": [HumanMessage("hello")]}, thread="odd", metadata=named)
        for namespace in (("cities", "ann"), ("notes", "boss", "ann"), ("memories", "boss", "ann")):
            own.store.put(namespace, "k", {"text": "figs"})
        lines = [*people.export("ann", own.saver, own.store)]
        planned = people.plan("ann", own.saver, own.store)
        kept = {part.what: part.ids for part in planned.kept}
    runs = {line["run"]["sent_by"]: line["run"] for line in lines if "run" in line}
    crons = {line["cron"]["made_by"]: line["cron"] for line in lines if "cron" in line}
    [odd] = [line for line in lines if line.get("thread_id") == "odd"]

    assert not [name for name in ("boss", "desk") if name in json.dumps(lines)]
    assert set(runs) == set(crons) == {"self", "a backend", "somebody else"}
    assert all(mark("ann", "request") in str(run["request"]["input"]) for run in runs.values())
    assert all(mark("ann", "cron") in str(cron["payload"]["input"]) for cron in crons.values())
    assert (odd["user_id"], odd["messages"][0]["content"]) == ("ann", "hello")
    assert lines[0]["other_namespaces"] == [["cities", "ann"]]
    assert len(kept["namespaces"]) == 3
