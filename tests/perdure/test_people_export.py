"""The archive of a person is complete, has nothing of others, and can be imported."""

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
from perdure.errors import ConfigurationError, UnknownPerson
from perdure.memory import Collection, Instructions, Profile, memories
from perdure.memory.long_term.records import RESERVED_LABEL
from perdure.memory.thread_export import build_thread_export
from perdure.run_tables.crons import CronTable
from perdure.run_tables.runs import RunTable
from tests.cli.commands import invoke, run
from tests.contracts.puts import put
from tests.people import (
    FactsProfile,
    People,
    accept_run,
    build_cron_row,
    empty_database,
    list_markers,
    make_marker,
    open_people,
    store_all_kinds,
)
from tests.server_tables import open_table
from tests.stores.erasing import read_all_bytes

ANN: Any = {"configurable": {"user_id": "ann"}}
BOB: Any = {"configurable": {"user_id": "bob"}}


@pytest.fixture(params=["file", "postgres"])
def backend(request: pytest.FixtureRequest) -> str:
    """Return the kind of database."""
    return str(request.param)


@pytest.fixture
def two_people(backend: str, tmp_path: Path) -> Iterator[People]:
    """Yield a database with all kinds of rows of two people."""
    with empty_database(backend, tmp_path) as db, open_people(db) as both:
        store_all_kinds(both, "ann", "anns")
        store_all_kinds(both, "bob", "bobs")
        both.store.put(("cities", "ann"), "home", {"text": make_marker("ann", "city")})
        yield both


def read_item_versions(people_in_db: People, user: str) -> list[dict[str, Any]]:
    """Return all versions of the items of a person, with notes."""
    lines = [*people_in_db.store.export()]
    own = [line for line in lines if user in line["namespace"] or f"{user}s" in line["namespace"]]
    return [line for line in own if line["namespace"][0] != "cities"]


def test_imported_archive_equals_threads_and_items_of_person(
    two_people: People, backend: str, tmp_path: Path
) -> None:
    """All branches and versions are equal; runs and crons are counted, and not imported."""
    archive = tmp_path / "ann.jsonl"
    archive.write_text(run("export", "--user", "ann", "--db", two_people.db))
    with empty_database(backend, tmp_path, "copy") as db:
        output = run("import", str(archive), "--db", db)
        second_output = run("import", str(archive), "--db", db)
        with open_people(db) as copy:
            threads = [thread.thread_id for thread in copy.saver.threads()]
            exported = [
                build_thread_export(copy.saver, thread_id) for thread_id in ("anns", "anns-2")
            ]
            original = [
                build_thread_export(two_people.saver, thread_id) for thread_id in ("anns", "anns-2")
            ]
            item_versions = read_item_versions(copy, "ann"), read_item_versions(two_people, "ann")
            instructions = Instructions(copy.store, ("instructions", "{user_id}")).current(ANN)
            profile = Profile(FactsProfile, copy.store).get(ANN)
            texts = [memory.text for memory in memories(store=copy.store, config=ANN, limit=50)]
            runs = asyncio.run(open_table(RunTable, copy.saver).list_live_runs())
            crons = asyncio.run(open_table(CronTable, copy.saver).list_crons())
            owners = {copy.saver.head(thread_id).owner for thread_id in threads}  # type: ignore[union-attr]

    assert sorted(threads) == ["anns", "anns-2"]
    assert exported == original
    assert all(len(line["branches"]) == 1 for line in exported)
    assert item_versions[0] == item_versions[1]
    assert {line["version"] for line in item_versions[0] if line["key"] == "taste"} >= {1, 2}
    assert instructions.text == f"Say {make_marker('ann', 'style')}"
    assert profile.nickname == make_marker("ann", "profile")
    assert f"likes {make_marker('ann', 'correction')}" in texts
    assert (runs, crons, owners) == ([], [], {"ann"})
    assert "3 records of runs and crons, which are not executed" in output
    assert "2 conversations (2 of ann): 2 unchanged" in second_output
    assert "new" not in second_output


def test_archived_thread_without_user_is_not_reported_for_extraction(
    two_people: People, backend: str, tmp_path: Path
) -> None:
    """No memories are extracted from an archive, so the report does not recommend an extraction."""
    archive = tmp_path / "ann.jsonl"
    lines = [*people.export("ann", two_people.saver, two_people.store)]
    for line in lines:
        if "messages" in line:
            line.pop("user_id", None)
            line.pop("owner", None)
    archive.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with empty_database(backend, tmp_path, "copy") as db:
        result = invoke("import", str(archive), "--db", db)

    assert result.exit_code == 0
    assert result.stdout.startswith("2 conversations: ")
    assert "without a user" not in result.stderr


def test_archive_has_everything_of_one_person_and_nothing_of_others(two_people: People) -> None:
    """Every kind of text is included; a namespace that only has the name is listed."""
    lines = [*people.export("ann", two_people.saver, two_people.store)]
    awaited = asyncio.run(read_archive_async(two_people))
    text = json.dumps(lines).encode()
    own_marks = [
        text_mark
        for text_mark in list_markers("ann")
        if text_mark not in (b"zqanneventqz", b"zqanncityqz", b"zqannhookqz")
    ]
    runs = [line["run"] for line in lines if "run" in line]

    assert [text_mark for text_mark in own_marks if text_mark not in text] == []
    assert [text_mark for text_mark in (*list_markers("bob"), b"bob") if text_mark in text] == []
    assert lines[0]["perdure_archive"] == 1
    assert lines[0]["user"] == "ann"
    assert lines[0]["other_namespaces"] == [["cities", "ann"]]
    assert [(run_line["status"], run_line["thread_id"]) for run_line in runs] == [
        ("running", "anns")
    ]
    assert len([line for line in lines if "cron" in line]) == 2
    assert awaited[1:] == lines[1:]


async def read_archive_async(people_in_db: People) -> list[dict[str, Any]]:
    """Return the lines that the coroutine yields."""
    return [line async for line in people.aexport("ann", people_in_db.saver, people_in_db.store)]


def test_export_of_unknown_person_exits_with_1(two_people: People) -> None:
    """Nothing is printed to stdout."""
    result = invoke("export", "--user", "nobody", "--db", two_people.db)
    with pytest.raises(UnknownPerson, match="nobody of this name"):
        people.export("Ann", two_people.saver, two_people.store)
    with pytest.raises(ConfigurationError, match="not blank"):
        people.export(" ", two_people.saver, two_people.store)

    assert (result.exit_code, result.stdout) == (1, "")
    assert "nobody of this name" in result.stderr


def test_archive_names_thread_that_cannot_be_exported(tmp_path: Path) -> None:
    """All other lines are written."""
    with open_people(str(tmp_path / "m.db")) as own:
        store_all_kinds(own, "ann", "anns")
        put(own.saver, {"messages": [1.5, {"a": 1}]}, thread="odd", metadata={"user_id": "ann"})
        lines = [*people.export("ann", own.saver, own.store)]
    threads = {line["thread_id"]: line for line in lines if "thread_id" in line}

    assert sorted(threads) == ["anns", "anns-2", "odd"]
    assert "items of type float" in threads["odd"]["problem"]


def test_items_are_imported_only_from_file_with_archive_header(tmp_path: Path) -> None:
    """Without the header, a line that looks like an item is refused."""
    lines = tmp_path / "lines.jsonl"
    item = {"namespace": ["memories", "ann"], "key": "k", "value": {"text": "figs"}}
    lines.write_text(json.dumps(item) + "\n")
    result = invoke("import", str(lines), "--db", str(tmp_path / "m.db"))

    assert result.exit_code != 0
    assert not (tmp_path / "m.db").exists()


def test_import_of_archive_skips_items_of_other_people(tmp_path: Path) -> None:
    """Items of others, and without the person's name, are left out and counted by kind."""
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
    with open_people(str(tmp_path / "m.db")) as copy:
        namespaces = copy.store.list_namespaces()

    assert result.exit_code == 0
    for kind in ("another person (3)", "a team (2)"):
        assert f"item of {kind}" in result.stderr
    assert "item without the person's name (2)" in result.stderr
    assert namespaces == sorted(map(tuple, own))


def test_imported_items_of_own_templates_are_exported_and_forgotten(
    two_people: People, backend: str, tmp_path: Path
) -> None:
    """The archive names the templates of its items, and an import records them."""
    config: Any = {"configurable": {"user_id": "ann", "project": "boat", "team": "red"}}
    projects = Collection(two_people.store, ("projects", "{project}", "{user_id}"))
    projects.insert("zqanntillerqz", config=config)
    Collection(two_people.store, ("diary", "{user_id}")).insert("one", config=BOB)
    Collection(two_people.store, ("teams", "{team}")).insert("two", config=config)
    archive = tmp_path / "ann.jsonl"
    archive.write_text(run("export", "--user", "ann", "--db", two_people.db))
    copy_folder = tmp_path / "copy"
    copy_folder.mkdir()
    with empty_database(backend, copy_folder) as db:
        imported = invoke("import", str(archive), "--db", db, "--trust-templates")
        second_archive = run("export", "--user", "ann", "--db", db)
        bytes_before = read_all_bytes(copy_folder)
        run("forget", "--user", "ann", "--yes", "--db", db)
        with open_people(db) as copy:
            namespaces = copy.store.find_namespaces("ann")
    file_bytes = read_all_bytes(copy_folder)
    headers = [json.loads(text.splitlines()[0]) for text in (archive.read_text(), second_archive)]
    markers = [
        marker for marker in (*list_markers("ann"), b"zqanntillerqz") if marker in file_bytes
    ]

    assert headers[0]["templates"] == [
        ["notes", "{user_id}"],
        ["projects", "{project}", "{user_id}"],
    ]
    assert headers[1]["templates"] == headers[0]["templates"]
    assert headers[1]["namespaces"] == headers[0]["namespaces"]
    assert "left out: item of a team (1)\n" in imported.stderr
    assert namespaces == []
    assert (b"zqanntillerqz" in bytes_before) == (backend == "file")
    assert markers == []


@pytest.mark.parametrize(
    "refused",
    [
        *(["notes"], ["notes", "ann"], ["notes", "x{user_id}"], ["{team}", "{user_id}"]),
        *(["diary", "{user_id}"], ["notes", "{user_id}", "deep"]),
        *(["memories", "{x}", "{user_id}"], ["chat_memory", "{user_id}"], ["teams", "{user_id}"]),
        *(["perdure", "{x}", "{user_id}"], ["langgraph", "{user_id}"]),
        *(["notes", "{user_id}", "{" + "x" * 4096 + "}"], ["notes", "{a}{b}", "{user_id}"]),
        *([], "notes", None, ["notes", 1, "{user_id}"], ["notes", "{user_id}", ""]),
    ],
)
def test_import_does_not_record_forged_template(refused: Any, tmp_path: Path) -> None:
    """Only a valid template that matches an imported item is recorded."""
    namespaces = (
        *(["notes", "ann"], ["memories", "ann"], ["chat_memory", "ann"], ["teams", "ann"]),
        *(["perdure", "quarantine", "memories", "ann"], ["chat_memory", "x", "ann"]),
    )
    items = [{"namespace": name, "key": "k", "value": {"text": "figs"}} for name in namespaces]
    templates = [refused, ["{kind}", "x", "{user_id}"], ["notes", "{user_id}"]]
    header = {"perdure_archive": 1, "user": "ann", "templates": templates}
    archive, db = tmp_path / "ann.jsonl", str(tmp_path / "m.db")
    archive.write_text("".join(json.dumps(line) + "\n" for line in (header, *items)))
    result = invoke("import", str(archive), "--db", db, "--trust-templates")
    with open_people(db) as copy:
        recorded = copy.store.search((RESERVED_LABEL, "templates"))

    assert result.exit_code == 0
    assert "namespace template (2)" in result.stderr
    assert [item.value["labels"] for item in recorded] == [["notes", "{user_id}"]]


def test_forged_template_does_not_change_what_is_forgotten(tmp_path: Path) -> None:
    """Without `--trust-templates`, an archive cannot choose which namespaces belong to people."""
    item = {"namespace": ["reviews", "bob"], "key": "k", "value": {"text": "figs"}}
    header = {"perdure_archive": 1, "user": "bob", "templates": [["reviews", "{user_id}"]]}
    archive, db = tmp_path / "bob.jsonl", str(tmp_path / "m.db")
    with open_people(db) as own:
        store_all_kinds(own, "ann", "anns")
        own.store.put(("reviews", "ann"), "k", {"text": "Carl's review of Ann"})
    archive.write_text("".join(json.dumps(line) + "\n" for line in (header, item)))
    result = invoke("import", str(archive), "--db", db)
    run("forget", "--user", "ann", "--yes", "--db", db)
    with open_people(db) as own:
        kept = own.store.get(("reviews", "ann"), "k")

    assert "namespace template, see --trust-templates (1)" in result.stderr
    assert kept is not None


def test_file_with_two_archives_records_templates_of_both(tmp_path: Path) -> None:
    archive, db = tmp_path / "both.jsonl", str(tmp_path / "m.db")
    lines: list[Any] = []
    for user, label in (("ann", "notes"), ("bob", "diary")):
        templates = [[label, "{user_id}"]]
        lines += [{"perdure_archive": 1, "user": user, "templates": templates}]
        lines += [{"namespace": [label, user], "key": "k", "value": {"text": "figs"}}]
    archive.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run("import", str(archive), "--db", db, "--trust-templates")
    with open_people(db) as copy:
        recorded = copy.store.search((RESERVED_LABEL, "templates"))

    expected = [["diary", "{user_id}"], ["notes", "{user_id}"]]
    assert sorted(item.value["labels"] for item in recorded) == expected


def test_templates_that_are_no_list_are_ignored(tmp_path: Path) -> None:
    item = {"namespace": ["notes", "ann"], "key": "k", "value": {"text": "figs"}}
    header = {"perdure_archive": 1, "user": "ann", "templates": "notes"}
    archive = tmp_path / "ann.jsonl"
    archive.write_text("".join(json.dumps(line) + "\n" for line in (header, item)))
    output = run("import", str(archive), "--db", str(tmp_path / "m.db"))

    assert "1 new item" in output


def test_people_module_needs_no_packages_of_the_server() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(('fastapi', 'starlette', 'dbos', 'typer'));"
        "import perdure.people; print(sorted(n for n in sys.modules if n.startswith('perdure.s')))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert "perdure.server" not in process.stdout


def test_archive_names_no_other_person(backend: str, tmp_path: Path) -> None:
    """Senders of runs, makers of crons, and namespaces of others are left out."""
    with empty_database(backend, tmp_path) as db, open_people(db) as own:
        store_all_kinds(own, "ann", "anns")
        for sender in ({"user": "boss"}, {"user": "desk", "acting_for": "ann"}):
            fields = {**sender, "metadata": {"owner": sender["user"]}}
            accept_run(own.saver, "ann", "anns", sender=fields)
            cron = build_cron_row("ann", "anns")
            cron.content.update(sender, metadata={"owner": sender["user"]})
            cron.content["payload"]["context"] = sender
            asyncio.run(open_table(CronTable, own.saver).create(cron))
        metadata = {"user_id": "ann", "owner": "boss", "perdure_caller": "boss"}
        put(own.saver, {"messages": [HumanMessage("hello")]}, thread="odd", metadata=metadata)
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
    assert all(
        make_marker("ann", "request") in str(run["request"]["input"]) for run in runs.values()
    )
    assert all(
        make_marker("ann", "cron") in str(cron["payload"]["input"]) for cron in crons.values()
    )
    assert (odd["user_id"], odd["messages"][0]["content"]) == ("ann", "hello")
    assert lines[0]["other_namespaces"] == [["cities", "ann"]]
    assert len(kept["namespaces"]) == 3
