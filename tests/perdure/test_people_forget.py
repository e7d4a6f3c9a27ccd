"""Forgetting a person: everything goes, nobody else's, also after a crash at any moment."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perdure import people
from perdure.checkpointers.crons import CronTable
from perdure.checkpointers.labels import CALLER, DEED
from perdure.checkpointers.owner_record import (
    may_owners_be_organisations,
    record_organisation_owners,
)
from perdure.checkpointers.records import ClientMetadata
from perdure.checkpointers.runs import RunTable
from perdure.checkpointers.thread_list import ThreadList
from perdure.checkpointers.webhooks import WebhookTable
from perdure.errors import ConfigurationError, StorageUnavailable, UnknownPerson
from perdure.memory import Collection, memories, remember
from perdure.storage.flow import fetch_rows
from perdure.stores import Provenance
from tests.people import (
    People,
    accept_run,
    cron_row,
    echo_graph,
    empty_database,
    fill,
    mark,
    marks,
    opened,
    talk,
)
from tests.rounds import rounds
from tests.server.test_tenants import dsn  # noqa: F401 - a fixture
from tests.stores.erasing import read_all_bytes

BOB: Any = {"configurable": {"user_id": "bob"}}
TABLES = (
    "runs",
    "run_events",
    "crons",
    "webhooks",
    "threads",
    "checkpoints",
    "writes",
    "items",
    "transcript_items",
)


@pytest.fixture(params=["file", "postgres"])
def backend(request: pytest.FixtureRequest) -> str:
    """The kind of database."""
    return str(request.param)


@pytest.fixture
def both(backend: str, tmp_path: Path) -> Iterator[People]:
    """A database with everything of two people."""
    with empty_database(backend, tmp_path) as db, opened(db) as filled:
        fill(filled, "ann", "anns")
        fill(filled, "bob", "bobs")
        yield filled


def count_rows(both: People) -> dict[str, int]:
    """Return the number of rows of each table."""
    counts = [
        both.saver.database.read(partial(fetch_rows, f"SELECT count(*) FROM {table}"))
        for table in TABLES
    ]
    return {table: rows[0][0] for table, rows in zip(TABLES, counts, strict=True)}


def test_everything_is_erased_and_only_of_one_person(both: People, backend: str) -> None:
    """The receipt says what, as the plan did; the other person has everything still."""
    before = [*people.export("bob", both.saver, both.store)]
    rows = count_rows(both)
    planned = people.plan("ann", both.saver, both.store)
    assert count_rows(both) == rows
    done = people.forget("ann", both.saver, both.store)
    after = [*people.export("bob", both.saver, both.store)]

    assert planned.erased == done.erased
    assert (planned.dry_run, planned.scrubbed, planned.hashes) == (True, False, ())
    assert (done.dry_run, done.scrubbed) == (False, backend == "file")
    counts = {part.what: part.count for part in done.erased}
    assert counts["threads"] == 2
    assert (counts["runs"], counts["crons"], counts["messages"]) == (1, 2, 12)
    assert "memories/ann" in done.erased[-2].ids
    assert len(done.hashes) > 10
    assert after[1:] == before[1:]
    assert count_rows(both) == {table: count / 2 for table, count in rows.items()}
    with pytest.raises(UnknownPerson):
        people.forget("ann", both.saver, both.store)
    with pytest.raises(UnknownPerson):
        people.plan("ann", both.saver, both.store)


def test_no_byte_of_it_is_left(tmp_path: Path) -> None:
    """Not in the file, its WAL, the reserve, or any index; the other person's texts are there."""
    folder = tmp_path / "db"
    folder.mkdir()
    with opened(str(folder / "m.db")) as both:
        fill(both, "ann", "anns")
        fill(both, "bob", "bobs")
        assert [each for each in marks("ann") if each not in read_all_bytes(folder)] == [
            b"zqanncityqz"
        ]
        report = people.forget("ann", both.saver, both.store)
        during = read_all_bytes(folder)
    left = read_all_bytes(folder)

    assert report.scrubbed
    assert [each for each in (*marks("ann"), b"ann\0", b"anns") if each in during] == []
    assert [each for each in (*marks("ann"), b"ann\0", b"anns") if each in left] == []
    assert [each for each in marks("bob") if each not in left] == [b"zqbobcityqz"]


def test_coroutines(tmp_path: Path) -> None:
    with opened(str(tmp_path / "m.db")) as both:
        fill(both, "ann", "anns")
        planned = asyncio.run(people.aplan("ann", both.saver, both.store))
        done = asyncio.run(people.aforget("ann", both.saver, both.store))

    assert planned.erased == done.erased


def test_what_belongs_to_others_is_listed(both: People) -> None:
    """Quotations, memories of others, runs and crons on their threads, and namespaces."""
    saver, store = both.saver, both.store
    graph_text = f"Ann said: {mark('ann', 'question')} one"
    talk(both, "bob", "quoting")
    named: Any = {"configurable": {"thread_id": "quoting", "user_id": "bob"}}
    echo_graph(saver, "bob").invoke({"messages": [("user", graph_text)]}, named)
    Collection(store).insert("Bob heard it", key="heard", provenance=Provenance("anns"), config=BOB)
    store.put(("cities", "ann"), "home", {"text": "Ghent"})
    accept_run(saver, "ann", "bobs-2")
    asyncio.run(CronTable(saver).create(cron_row("ann", "bobs")))
    named["metadata"] = {CALLER: "ann", DEED: "answered"}
    named["configurable"]["thread_id"] = "bobs"
    echo_graph(saver, "bob").invoke({"messages": [("user", "It may go.")]}, named)
    echo_graph(saver, "bob").invoke(
        {"messages": [("user", "Thanks.")]}, {"configurable": named["configurable"]}
    )
    report = people.forget("ann", saver, store)
    kept = {part.what: part.ids for part in report.kept}
    runs = asyncio.run(RunTable(saver).list_runs("bobs-2"))

    assert kept["namespaces"] == ("cities/ann",)
    assert kept["threads with quotations"] == ("quoting",)
    assert kept["memories of others"] == ("memories/bob/heard",)
    assert kept["runs on threads of others"] == (runs[0].live.run_id,)
    assert kept["threads of others with the name"] == ("bobs",)
    assert len(kept["crons on threads of others"]) == 1
    assert "heard" in [memory.key for memory in memories(store=store, config=BOB, limit=50)]
    assert store.get(("cities", "ann"), "home") is not None
    assert saver.head("quoting") is not None


def test_a_message_of_a_cron_is_no_quotation(both: People) -> None:
    """Nor is a message that an admin sends to several people; what the person says is one."""
    saver = both.saver
    texts = {
        "cron": f"Sum up {mark('ann', 'cron')}",
        "admin": "The refund is on its way.",
        "said": "My number is 12345678901.",
    }
    cron = cron_row("ann", "anns")
    cron.content["payload"]["input"] = {"messages": [{"role": "user", "content": texts["cron"]}]}
    asyncio.run(CronTable(saver).create(cron))
    for user, thread_id in (("ann", "anns"), ("bob", "bobs"), ("bob", "bobs-2")):
        for kind, text in texts.items():
            metadata = {CALLER: "boss", DEED: "said"} if kind == "admin" else {}
            named: Any = {"configurable": {"thread_id": thread_id, "user_id": user}}
            if thread_id == "anns" or (kind == "said") == (thread_id == "bobs-2"):
                messages = {"messages": [("user", text)]}
                echo_graph(saver, user).invoke(messages, {**named, "metadata": metadata})
    kept = {part.what: part.ids for part in people.plan("ann", saver, both.store).kept}

    assert kept["threads with quotations"] == ("bobs-2",)
    assert kept["threads with the message of a cron"] == ("bobs",)


def test_nobody_elses_is_read_if_it_is_not_asked(both: People) -> None:
    """A person who forgets themselves learns nothing about others."""
    accept_run(both.saver, "ann", "bobs-2")
    report = people.plan("ann", both.saver, both.store, looks_elsewhere=False)

    assert report.kept == ()


def test_runs_are_cancelled_and_waited_for(both: People) -> None:
    """A run of a process that lives is waited for; delayed runs and crons begin none meanwhile."""
    saver, store = both.saver, both.store
    table = RunTable(saver)
    with saver.database.lock("perdure.server/alive"):
        asyncio.run(table.end_run(asyncio.run(table.list_live_runs())[0], "success"))
        live = accept_run(saver, "ann", "anns-2", owner="alive")
        accept_run(saver, "ann", "anns", owner="", delay_s=3600)
        with pytest.raises(
            StorageUnavailable, match=r"was cancelled and has not ended after 0\.2 s"
        ):
            people.forget("ann", saver, store, timeout_s=0.2)
        assert saver.head("anns") is not None

        def end_later() -> None:
            while "interrupt" not in [
                run.cancel_action for run in asyncio.run(table.list_live_runs())
            ]:
                time.sleep(0.01)
            asyncio.run(table.end_run(live, "interrupted", known_cancel="interrupt"))

        ending = threading.Thread(target=end_later)
        ending.start()
        report = people.forget("ann", saver, store)
        ending.join()

    assert report.count("runs") == 3
    assert asyncio.run(table.list_runs("anns")) == []


def test_a_locked_thread_is_waited_for(both: People) -> None:
    """A turn of another program ends first, and the call can be repeated."""
    held, released = threading.Event(), threading.Event()

    def hold() -> None:
        with both.saver.lock("anns-2"):
            held.set()
            released.wait(60)

    holding = threading.Thread(target=hold)
    holding.start()
    assert held.wait(60)
    with pytest.raises(StorageUnavailable):
        people.forget("ann", both.saver, both.store, timeout_s=0.2)
    released.set()
    holding.join()
    people.forget("ann", both.saver, both.store)

    assert both.saver.head("anns-2") is None


def test_a_person_without_threads_or_items(both: People) -> None:
    remember("likes figs", store=both.store, config={"configurable": {"user_id": "dora"}})
    asyncio.run(CronTable(both.saver).create(cron_row("emil", None)))
    dora = people.forget("dora", both.saver, both.store)
    emil = people.forget("emil", both.saver, both.store)

    assert (dora.count("items") > 0, dora.count("threads")) == (True, 0)
    assert (emil.count("crons"), emil.count("items")) == (1, 0)
    with pytest.raises(ConfigurationError, match="not blank"):
        people.forget("", both.saver, both.store)


def test_what_a_backend_made_for_a_person_is_the_persons(both: People) -> None:
    """Its crons and webhooks without a thread are erased, and those of its own are not."""
    saver, store = both.saver, both.store
    kept = [*people.export("bob", saver, store)]
    acting = cron_row("desk", None)
    acting.content["acting_for"] = "dora"
    own = cron_row("desk", None)
    asyncio.run(CronTable(saver).create(acting))
    asyncio.run(CronTable(saver).create(own))
    run = accept_run(saver, "bob", "bobs-2")
    told = {"url": "https://example.com", "run": {}, "user": "desk", "person": "dora"}
    asyncio.run(WebhookTable(saver).add(run, told, told, keeps_thread=False))
    [archived] = [line["cron"] for line in people.export("dora", saver, store) if "cron" in line]
    report = people.forget("dora", saver, store)
    desk = people.plan("desk", saver, store)

    assert archived["made_by"] == "a backend"
    assert not {"user", "acting_for"} & archived.keys()
    assert [(part.what, part.ids) for part in report.erased] == [
        ("crons", (acting.cron_id,)), ("webhooks", (run.run_id,)),
    ]  # fmt: skip
    assert [(part.what, part.ids) for part in desk.erased] == [("crons", (own.cron_id,))]
    assert len(kept) == len([*people.export("bob", saver, store)]) - 1  # the run


@pytest.mark.parametrize("number", [0, -5, 7])
def test_a_person_whose_name_is_a_number(both: People, number: int) -> None:
    """The `user_id` of a thread may be a number; its memories have the name as text."""
    for user in (number, -number or 1):
        named: Any = {"configurable": {"thread_id": f"of {user}", "user_id": user}}
        echo_graph(both.saver, "").invoke({"messages": [("user", "hello")]}, named)
    report = people.forget(str(number), both.saver, both.store)

    assert report.erased[0] == people.Part("threads", (f"of {number}",), 1)
    assert both.saver.head(f"of {-number or 1}") is not None


def test_a_thread_whose_run_stored_no_checkpoint(both: People) -> None:
    """It belongs to the person of its run; one that names another owner does not."""
    for name, metadata in (("unbegun", {}), ("owned", {"owner": "bob"})):
        ThreadList(both.saver).create(name, ClientMetadata(metadata))
        accept_run(both.saver, "dora", name)
    report = people.forget("dora", both.saver, both.store)

    assert report.erased[0] == people.Part("threads", ("unbegun",), 1)
    assert ThreadList(both.saver).get("unbegun") is None
    assert ThreadList(both.saver).get("owned") is not None


KILLED = """
import os, signal, sys
from perdure import people
from tests.people import opened
number, left = int(sys.argv[2]), [0]
with opened(sys.argv[1]) as both:
    kind = type(both.saver.database)
    def counted(method):
        def call(*args, **options):
            left[0] += 1
            if left[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **options)
        return call
    kind.write, kind.scrub_deleted_rows = counted(kind.write), counted(kind.scrub_deleted_rows)
    people.forget("ann", both.saver, both.store)
print(left[0])
"""


@pytest.mark.repeats
def test_a_kill_at_any_point_leaves_what_a_repeated_call_erases(
    backend: str, tmp_path: Path
) -> None:
    """However far a killed call came, the same state is left after the next one."""
    points = [1, 2, 4, 7, 10, 14, 18, 22, 26, 30, 34, 38][: rounds(12)]
    for point in points if rounds(12) < 12 else range(1, 60, 3):
        folder = tmp_path / str(point)
        folder.mkdir()
        with empty_database(backend, folder) as db:
            with opened(db) as both:
                fill(both, "ann", "anns")
                fill(both, "bob", "bobs")
                before = [*people.export("bob", both.saver, both.store)]
                rows = count_rows(both)
            command = [sys.executable, "-c", KILLED, db, str(point)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode in (0, -signal.SIGKILL), done.stderr
            with opened(db) as both:
                with suppress(UnknownPerson):  # the call was killed after the last row
                    people.forget("ann", both.saver, both.store)
                after = [*people.export("bob", both.saver, both.store)]
                assert count_rows(both) == {table: count / 2 for table, count in rows.items()}
                assert both.store.find_namespaces("ann") == []
            assert after[1:] == before[1:]
            if backend == "file":
                left = read_all_bytes(folder)
                assert [each for each in (*marks("ann"), b"ann\0", b"anns") if each in left] == []


@pytest.mark.postgres
def test_another_tenant_keeps_its_person_of_the_same_name(dsn: str) -> None:  # noqa: F811
    with opened(dsn, tenant="acme") as acme, opened(dsn, tenant="globex") as globex:
        for tenant, thread_id in ((acme, "acmes"), (globex, "globexs")):
            fill(tenant, "ann", thread_id)
        record_organisation_owners(acme.saver)
        records = [may_owners_be_organisations(each.saver) for each in (acme, globex)]
        before = [*people.export("ann", globex.saver, globex.store)]
        archive = str([*people.export("ann", acme.saver, acme.store)])
        planned = people.plan("ann", acme.saver, acme.store)
        done = people.forget("ann", acme.saver, acme.store)
        after = [*people.export("ann", globex.saver, globex.store)]

    assert records == [True, False]
    assert "globexs" not in archive
    assert planned.erased == done.erased
    assert done.kept == ()
    assert after[1:] == before[1:]
