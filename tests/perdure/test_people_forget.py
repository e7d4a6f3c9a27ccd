"""Forgetting a person erases everything of this person only, also after a crash."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from perdure import people
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.labels import CALLER, CALLER_ACTION
from perdure.checkpointers.owner_record import (
    may_owners_be_organisations,
    record_that_owners_may_be_organisations,
)
from perdure.checkpointers.records import ClientMetadata
from perdure.errors import ConfigurationError, StorageUnavailable, UnknownPerson
from perdure.memory import Collection, memories, remember
from perdure.run_tables.crons import CronTable
from perdure.run_tables.runs import RunTable
from perdure.run_tables.thread_list import ThreadList
from perdure.run_tables.webhooks import WebhookTable
from perdure.storage.flow import Flow, fetch_rows
from perdure.stores import Provenance
from tests.people import (
    People,
    accept_run,
    build_cron_row,
    build_echo_graph,
    empty_database,
    hold_conversation,
    list_markers,
    make_marker,
    open_people,
    store_all_kinds,
)
from tests.rounds import rounds
from tests.server.test_tenants import dsn  # noqa: F401 - a fixture
from tests.server_tables import open_table
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
    """Return the kind of database."""
    return str(request.param)


@pytest.fixture
def two_people(backend: str, tmp_path: Path) -> Iterator[People]:
    """Yield a database with all kinds of rows of two people."""
    with empty_database(backend, tmp_path) as db, open_people(db) as both:
        store_all_kinds(both, "ann", "anns")
        store_all_kinds(both, "bob", "bobs")
        yield both


def count_rows(both: People) -> dict[str, int]:
    """Return the number of rows of each table."""
    counts = [
        both.saver.database.read(partial(fetch_rows, f"SELECT count(*) FROM {table}"))
        for table in TABLES
    ]
    return {table: rows[0][0] for table, rows in zip(TABLES, counts, strict=True)}


def test_forget_erases_everything_of_one_person_only(two_people: People, backend: str) -> None:
    """The receipt equals the plan, and the other person's rows are unchanged."""
    before = [*people.export("bob", two_people.saver, two_people.store)]
    rows = count_rows(two_people)
    planned = people.plan("ann", two_people.saver, two_people.store)
    assert count_rows(two_people) == rows
    receipt = people.forget("ann", two_people.saver, two_people.store)
    after = [*people.export("bob", two_people.saver, two_people.store)]

    assert planned.erased == receipt.erased
    assert (planned.dry_run, planned.scrubbed, planned.hashes) == (True, False, ())
    assert (receipt.dry_run, receipt.scrubbed) == (False, backend == "file")
    counts = {part.what: part.count for part in receipt.erased}
    assert counts["threads"] == 2
    assert (counts["runs"], counts["crons"], counts["messages"]) == (1, 2, 12)
    assert "memories/ann" in receipt.erased[-2].ids
    assert len(receipt.hashes) > 10
    assert after[1:] == before[1:]
    assert count_rows(two_people) == {table: count / 2 for table, count in rows.items()}
    with pytest.raises(UnknownPerson):
        people.forget("ann", two_people.saver, two_people.store)
    with pytest.raises(UnknownPerson):
        people.plan("ann", two_people.saver, two_people.store)


def test_forget_leaves_no_byte_in_the_files(tmp_path: Path) -> None:
    """The file, its WAL, the reserve and the indexes have only texts of the other person."""
    folder = tmp_path / "db"
    folder.mkdir()
    with open_people(str(folder / "m.db")) as both:
        store_all_kinds(both, "ann", "anns")
        store_all_kinds(both, "bob", "bobs")
        assert [text for text in list_markers("ann") if text not in read_all_bytes(folder)] == [
            b"zqanncityqz"
        ]
        report = people.forget("ann", both.saver, both.store)
        bytes_while_open = read_all_bytes(folder)
    bytes_after = read_all_bytes(folder)

    assert report.scrubbed
    assert [
        text for text in (*list_markers("ann"), b"ann\0", b"anns") if text in bytes_while_open
    ] == []
    assert [text for text in (*list_markers("ann"), b"ann\0", b"anns") if text in bytes_after] == []
    assert [text for text in list_markers("bob") if text not in bytes_after] == [b"zqbobcityqz"]


def test_awaited_forget_erases_what_awaited_plan_names(tmp_path: Path) -> None:
    with open_people(str(tmp_path / "m.db")) as both:
        store_all_kinds(both, "ann", "anns")
        planned = asyncio.run(people.aplan("ann", both.saver, both.store))
        receipt = asyncio.run(people.aforget("ann", both.saver, both.store))

    assert planned.erased == receipt.erased


def test_forget_lists_and_keeps_what_belongs_to_others(two_people: People) -> None:
    """This includes quotations, memories of others, runs and crons on their threads."""
    saver, store = two_people.saver, two_people.store
    graph_text = f"Ann said: {make_marker('ann', 'question')} one"
    hold_conversation(two_people, "bob", "quoting")
    config: Any = {"configurable": {"thread_id": "quoting", "user_id": "bob"}}
    build_echo_graph(saver, "bob").invoke({"messages": [("user", graph_text)]}, config)
    Collection(store).insert("Bob heard it", key="heard", provenance=Provenance("anns"), config=BOB)
    store.put(("cities", "ann"), "home", {"text": "Ghent"})
    accept_run(saver, "ann", "bobs-2")
    asyncio.run(open_table(CronTable, saver).create(build_cron_row("ann", "bobs")))
    config["metadata"] = {CALLER: "ann", CALLER_ACTION: "answered"}
    config["configurable"]["thread_id"] = "bobs"
    build_echo_graph(saver, "bob").invoke({"messages": [("user", "It may go.")]}, config)
    build_echo_graph(saver, "bob").invoke(
        {"messages": [("user", "Thanks.")]}, {"configurable": config["configurable"]}
    )
    report = people.forget("ann", saver, store)
    kept = {part.what: part.ids for part in report.kept}
    runs = asyncio.run(open_table(RunTable, saver).list_runs("bobs-2"))

    assert kept["namespaces"] == ("cities/ann",)
    assert kept["threads with quotations"] == ("quoting",)
    assert kept["memories of others"] == ("memories/bob/heard",)
    assert kept["runs on threads of others"] == (runs[0].live.run_id,)
    assert kept["threads of others with the name"] == ("bobs",)
    assert len(kept["crons on threads of others"]) == 1
    assert "heard" in [memory.key for memory in memories(store=store, config=BOB, limit=50)]
    assert store.get(("cities", "ann"), "home") is not None
    assert saver.head("quoting") is not None


def test_message_of_cron_or_admin_is_not_a_quotation(two_people: People) -> None:
    """A message that the person has written counts as a quotation."""
    saver = two_people.saver
    texts = {
        "cron": f"Sum up {make_marker('ann', 'cron')}",
        "admin": "The refund is on its way.",
        "said": "My number is 12345678901.",
    }
    cron = build_cron_row("ann", "anns")
    cron.content["payload"]["input"] = {"messages": [{"role": "user", "content": texts["cron"]}]}
    asyncio.run(open_table(CronTable, saver).create(cron))
    for user, thread_id in (("ann", "anns"), ("bob", "bobs"), ("bob", "bobs-2")):
        for kind, text in texts.items():
            metadata = {CALLER: "boss", CALLER_ACTION: "said"} if kind == "admin" else {}
            config: Any = {"configurable": {"thread_id": thread_id, "user_id": user}}
            if thread_id == "anns" or (kind == "said") == (thread_id == "bobs-2"):
                messages = {"messages": [("user", text)]}
                build_echo_graph(saver, user).invoke(messages, {**config, "metadata": metadata})
    kept = {part.what: part.ids for part in people.plan("ann", saver, two_people.store).kept}

    assert kept["threads with quotations"] == ("bobs-2",)
    assert kept["threads with the message of a cron"] == ("bobs",)


def test_plan_without_looks_elsewhere_reports_nothing_of_others(two_people: People) -> None:
    """A person who forgets themselves learns nothing about others."""
    accept_run(two_people.saver, "ann", "bobs-2")
    report = people.plan("ann", two_people.saver, two_people.store, looks_elsewhere=False)

    assert report.kept == ()


def test_forget_cancels_runs_and_waits_for_their_end(two_people: People) -> None:
    """A run of a live process is waited for; delayed runs and crons start none meanwhile."""
    saver, store = two_people.saver, two_people.store
    table = open_table(RunTable, saver)
    with saver.database.lock("perdure.server/alive"):
        asyncio.run(table.end_run(asyncio.run(table.list_live_runs())[0], "success"))
        live = accept_run(saver, "ann", "anns-2", owner="alive")
        accept_run(saver, "ann", "anns", owner="", delay_s=3600)
        with pytest.raises(
            StorageUnavailable, match=r"was cancelled but has not ended after 0\.2 s"
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


def test_forget_waits_for_locked_thread(two_people: People) -> None:
    """After a timeout, the call can be repeated."""
    lock_is_held, released = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with two_people.saver.lock("anns-2"):
            lock_is_held.set()
            released.wait(60)

    holder = threading.Thread(target=hold_lock)
    holder.start()
    assert lock_is_held.wait(60)
    with pytest.raises(StorageUnavailable):
        people.forget("ann", two_people.saver, two_people.store, timeout_s=0.2)
    released.set()
    holder.join()
    people.forget("ann", two_people.saver, two_people.store)

    assert two_people.saver.head("anns-2") is None


def test_person_with_only_items_or_only_crons_is_forgotten(two_people: People) -> None:
    remember("likes figs", store=two_people.store, config={"configurable": {"user_id": "dora"}})
    asyncio.run(open_table(CronTable, two_people.saver).create(build_cron_row("emil", None)))
    dora = people.forget("dora", two_people.saver, two_people.store)
    emil = people.forget("emil", two_people.saver, two_people.store)

    assert (dora.count("items") > 0, dora.count("threads")) == (True, 0)
    assert (emil.count("crons"), emil.count("items")) == (1, 0)
    with pytest.raises(ConfigurationError, match="not blank"):
        people.forget("", two_people.saver, two_people.store)


def test_crons_and_webhooks_made_for_a_person_are_forgotten(two_people: People) -> None:
    """Crons and webhooks that the backend made for itself are kept."""
    saver, store = two_people.saver, two_people.store
    lines_before = [*people.export("bob", saver, store)]
    acting = build_cron_row("desk", None)
    acting.content["acting_for"] = "dora"
    own = build_cron_row("desk", None)
    asyncio.run(open_table(CronTable, saver).create(acting))
    asyncio.run(open_table(CronTable, saver).create(own))
    run = accept_run(saver, "bob", "bobs-2")
    payload = {"url": "https://example.com", "run": {}, "user": "desk", "person": "dora"}
    asyncio.run(
        open_table(WebhookTable, saver).add_webhook(run, payload, payload, keeps_thread=False)
    )
    [archived] = [line["cron"] for line in people.export("dora", saver, store) if "cron" in line]
    report = people.forget("dora", saver, store)
    desk = people.plan("desk", saver, store)

    assert archived["made_by"] == "a backend"
    assert not {"user", "acting_for"} & archived.keys()
    assert [(part.what, part.ids) for part in report.erased] == [
        ("crons", (acting.cron_id,)), ("webhooks", (run.run_id,)),
    ]  # fmt: skip
    assert [(part.what, part.ids) for part in desk.erased] == [("crons", (own.cron_id,))]
    assert len(lines_before) == len([*people.export("bob", saver, store)]) - 1  # the run


def test_person_with_only_a_webhook_is_forgotten(two_people: People) -> None:
    """The webhook of a stateless run is kept after the thread of the run was deleted."""
    saver, store = two_people.saver, two_people.store
    run = accept_run(saver, "bob", "bobs-2")
    payload = {"url": "https://example.com", "run": {}, "user": "dora"}
    asyncio.run(
        open_table(WebhookTable, saver).add_webhook(run, payload, payload, keeps_thread=False)
    )
    archive = [*people.export("dora", saver, store)]
    report = people.forget("dora", saver, store)

    assert (len(archive), archive[0]["user"]) == (1, "dora")
    assert [(part.what, part.ids) for part in report.erased] == [("webhooks", (run.run_id,))]
    with pytest.raises(UnknownPerson):
        people.plan("dora", saver, store)


@pytest.mark.parametrize("number", [0, -5, 7])
def test_person_whose_name_is_a_number_is_forgotten(two_people: People, number: int) -> None:
    """The `user_id` of a thread may be a number; its memories have the name as text."""
    for user in (number, -number or 1):
        config: Any = {"configurable": {"thread_id": f"of {user}", "user_id": user}}
        build_echo_graph(two_people.saver, "").invoke({"messages": [("user", "hello")]}, config)
    report = people.forget(str(number), two_people.saver, two_people.store)

    assert report.erased[0] == people.Part("threads", (f"of {number}",), 1)
    assert two_people.saver.head(f"of {-number or 1}") is not None


def test_thread_without_checkpoint_belongs_to_person_of_its_run(two_people: People) -> None:
    """A thread that names another owner is kept."""
    for name, metadata in (("unbegun", {}), ("owned", {"owner": "bob"})):
        ThreadList(two_people.saver).create_thread_if_absent(name, ClientMetadata(metadata))
        accept_run(two_people.saver, "dora", name)
    report = people.forget("dora", two_people.saver, two_people.store)

    assert report.erased[0] == people.Part("threads", ("unbegun",), 1)
    assert ThreadList(two_people.saver).get("unbegun") is None
    assert ThreadList(two_people.saver).get("owned") is not None


@contextmanager
def call_before_statement(
    monkeypatch: pytest.MonkeyPatch, saver: Checkpointer, number: int, act: Callable[[], object]
) -> Iterator[list[int]]:
    """Call `act` just before one of the statements that read the database in the `with` block.

    Args:
        monkeypatch: Replaces the database's method `read` during the block.
        saver: The checkpointer of the database.
        number: The number of the statement, starting at 1.
        act: The function to call. The statements that it executes are not counted.

    Yields:
        A list that receives the number of each statement.
    """
    kind, statements = type(saver.database), list[int]()
    read = kind.read

    def read_and_act(database: Any, make_flow: Callable[[], Flow[Any]], **options: Any) -> Any:
        def flow() -> Flow[Any]:
            inner, rows = make_flow(), None
            while True:
                try:
                    request = inner.send(rows)
                except StopIteration as end:
                    return end.value
                statements.append(len(statements) + 1)
                if statements[-1] == number:
                    with monkeypatch.context() as unpatched:
                        unpatched.setattr(kind, "read", read)
                        act()
                rows = yield request

        return read(database, flow, **options)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "read", read_and_act)
        yield statements


def test_person_is_found_while_first_checkpoint_of_only_thread_is_stored(
    two_people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan finds the thread, before whichever of its statements the checkpoint is committed."""
    saver, store = two_people.saver, two_people.store
    for number in count(1):
        user, thread_id = f"dora {number}", f"t{number}"
        ThreadList(saver).create_thread_if_absent(thread_id, ClientMetadata({}))
        accept_run(saver, user, thread_id)
        config: Any = {"configurable": {"thread_id": thread_id, "user_id": user}}
        store_checkpoints = partial(build_echo_graph(saver, user).invoke, {"messages": []}, config)
        with call_before_statement(monkeypatch, saver, number, store_checkpoints) as statements:
            report = people.plan(user, saver, store, looks_elsewhere=False)
        assert report.erased[0] == people.Part("threads", (thread_id,), 1)
        if number > len(statements):
            break

    assert number > 5


def test_thread_whose_checkpoints_were_rolled_back_belongs_to_person_of_its_run(
    two_people: People,
) -> None:
    """The thread's first run was rolled back, and a delayed run on the thread is due later."""
    saver, store = two_people.saver, two_people.store
    config: Any = {
        "configurable": {"thread_id": "t", "user_id": "dora"},
        "metadata": {"run_id": "r"},
    }
    build_echo_graph(saver, "dora").invoke({"messages": [("user", "hello")]}, config)
    accept_run(saver, "dora", "t", owner="", delay_s=3600)
    saver.delete_for_runs(["r"], thread_id="t")
    listed = ThreadList(saver).get("t")
    exported = [*people.export("dora", saver, store)]
    report = people.forget("dora", saver, store)

    assert listed is not None
    assert listed.head_metadata is None
    assert sum("run" in line for line in exported) == 1
    assert (report.count("threads"), report.count("runs")) == (1, 1)
    assert ThreadList(saver).get("t") is None


KILLED_FORGET = """
import os, signal, sys
from perdure import people
from tests.people import open_people
number, left = int(sys.argv[2]), [0]
with open_people(sys.argv[1]) as both:
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
@pytest.mark.slow
def test_killed_forget_is_completed_by_repeating_it(backend: str, tmp_path: Path) -> None:
    """The final state is the same, however far the killed call came."""
    points = [1, 2, 4, 7, 10, 14, 18, 22, 26, 30, 34, 38][: rounds(12)]
    for point in points if rounds(12) < 12 else range(1, 60, 3):
        folder = tmp_path / str(point)
        folder.mkdir()
        with empty_database(backend, folder) as db:
            with open_people(db) as people_in_db:
                store_all_kinds(people_in_db, "ann", "anns")
                store_all_kinds(people_in_db, "bob", "bobs")
                before = [*people.export("bob", people_in_db.saver, people_in_db.store)]
                rows = count_rows(people_in_db)
            command = [sys.executable, "-c", KILLED_FORGET, db, str(point)]
            process = subprocess.run(command, capture_output=True, text=True, check=False)
            assert process.returncode in (0, -signal.SIGKILL), process.stderr
            with open_people(db) as people_in_db:
                with suppress(UnknownPerson):  # the call was killed after the last row
                    people.forget("ann", people_in_db.saver, people_in_db.store)
                after = [*people.export("bob", people_in_db.saver, people_in_db.store)]
                assert count_rows(people_in_db) == {
                    table: count / 2 for table, count in rows.items()
                }
                assert people_in_db.store.find_namespaces("ann") == []
            assert after[1:] == before[1:]
            if backend == "file":
                remaining = read_all_bytes(folder)
                assert [
                    text for text in (*list_markers("ann"), b"ann\0", b"anns") if text in remaining
                ] == []


@pytest.mark.postgres
def test_forget_keeps_person_of_same_name_in_another_tenant(dsn: str) -> None:  # noqa: F811
    with open_people(dsn, tenant="acme") as acme, open_people(dsn, tenant="globex") as globex:
        for tenant, thread_id in ((acme, "acmes"), (globex, "globexs")):
            store_all_kinds(tenant, "ann", thread_id)
        record_that_owners_may_be_organisations(acme.saver.database)
        records = [
            may_owners_be_organisations(tenant_people.saver.database)
            for tenant_people in (acme, globex)
        ]
        before = [*people.export("ann", globex.saver, globex.store)]
        archive = str([*people.export("ann", acme.saver, acme.store)])
        planned = people.plan("ann", acme.saver, acme.store)
        receipt = people.forget("ann", acme.saver, acme.store)
        after = [*people.export("ann", globex.saver, globex.store)]

    assert records == [True, False]
    assert "globexs" not in archive
    assert planned.erased == receipt.erased
    assert receipt.kept == ()
    assert after[1:] == before[1:]
