"""Crons by langgraph's SDK: due times, access, and exactly one run for each due time."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient
from langgraph_sdk.errors import (
    NotFoundError,
    PermissionDeniedError,
    UnprocessableEntityError,
)

from perdure.checkpointers import SQLiteCheckpointer, open_checkpointer
from perdure.run_tables.crons import CronTable
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.http.access import LocalAccess
from perdure.server.http.auth_file import AuthFileAccess
from perdure.server.http.keys import KeysFileAccess
from perdure.server.runs import schedule
from perdure.server.runs.schedule import CronRequest
from perdure.settings import Settings
from tests.rounds import rounds
from tests.server.http.test_auth_file import write_auth_file
from tests.server.http.test_keys import ANN, BOB, render_key_entry
from tests.server.running import run_server, wait_until
from tests.server.runs.test_runs import GRAPH_SOURCE, read_message_texts
from tests.server.runs.test_runs import serve_in_process as in_a_process
from tests.server.talking import (
    Gate,
    build_failing_graph,
    build_identity_graph,
    build_input,
    build_talk_graph,
)
from tests.server_tables import open_table

YEARLY = "0 0 1 1 *"


@pytest.fixture
def gate() -> Gate:
    gate = Gate()
    gate.open.set()
    return gate


@pytest.fixture
def graphs(gate: Gate) -> Graphs:
    return Graphs(
        {
            "talk": build_talk_graph(gate),
            "who": build_identity_graph(),
            "fail": build_failing_graph(),
        }
    )


@contextmanager
def serve_and_connect(
    settings: Settings, graphs: Graphs, access: Any = None, key: str | None = None
) -> Iterator[SyncLangGraphClient]:
    with (
        run_server(create_app(settings, graphs=graphs, access=access)) as url,
        get_sync_client(url=url, api_key=key) as client,
    ):
        yield client


@pytest.fixture
def sdk(settings: Settings, graphs: Graphs) -> Iterator[SyncLangGraphClient]:
    with serve_and_connect(settings, graphs) as client:
        client.threads.create(thread_id="t")
        yield client


def make_due(settings: Settings, cron_id: str, at: float | None = None) -> None:
    """Set the next time of a cron, to one second ago unless `at` is given."""
    with open_checkpointer(settings.db) as saver:
        table = open_table(CronTable, saver)
        cron = asyncio.run(table.get(cron_id))
        assert cron is not None
        asyncio.run(table.advance_next_time(cron, at or time.time() - 1))


def list_runs_oldest_first(sdk: SyncLangGraphClient, thread_id: str = "t") -> list[Any]:
    return sdk.runs.list(thread_id)[::-1]


# -- when one is due; the times are those of the zones' own rules, reckoned by hand


@pytest.mark.parametrize(
    ("schedule", "zone", "after", "expected_times"),
    [
        ("0 9 * * *", None, "2026-01-01T00:00Z", ["2026-01-01T09:00Z", "2026-01-02T09:00Z"]),
        ("@daily", None, "2026-01-01T00:00Z", ["2026-01-02T00:00Z"]),
        ("0 9 * * mon-fri", None, "2026-11-28T00:00Z", ["2026-11-30T09:00Z"]),
        # 9:00 is 8:00 UTC until the clocks go forward on 29 March, and 7:00 from then on
        (
            "0 9 * * *",
            "Europe/Berlin",
            "2026-03-28T00:00Z",
            ["2026-03-28T08:00Z", "2026-03-29T07:00Z"],
        ),
        # 2:30 is skipped on 29 March: 3:00 is the first moment after it
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2026-03-28T12:00Z",
            ["2026-03-29T01:00Z", "2026-03-30T00:30Z"],
        ),
        # 2:30 comes twice on 25 October
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2026-10-24T12:00Z",
            ["2026-10-25T00:30Z", "2026-10-26T01:30Z"],
        ),
        # and each half hour is one
        (
            "*/30 * * * *",
            "Europe/Berlin",
            "2026-10-25T00:10Z",
            ["2026-10-25T00:30Z", "2026-10-25T01:00Z", "2026-10-25T01:30Z", "2026-10-25T02:00Z"],
        ),
        (
            "0 9 * * *",
            "America/New_York",
            "2026-10-31T14:00Z",
            ["2026-11-01T14:00Z", "2026-11-02T14:00Z"],
        ),
        ("0 0 29 2 *", None, "2026-01-01T00:00Z", ["2028-02-29T00:00Z"]),
    ],
)
def test_next_times_follow_schedule_and_time_zone(
    schedule: str, zone: str | None, after: str, expected_times: list[str]
) -> None:
    cron = CronRequest(assistant_id="talk", schedule=schedule, timezone=zone)
    at, next_times = datetime.fromisoformat(after).timestamp(), []
    for _ in expected_times:
        at = cron.next_time(at) or 0
        next_times.append(datetime.fromtimestamp(at, UTC))

    assert next_times == [*map(datetime.fromisoformat, expected_times)]


def test_cron_has_no_next_time_after_its_end_or_when_disabled() -> None:
    options: Any = {"assistant_id": "talk", "schedule": "0 9 * * *"}
    now = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    last = CronRequest(**options, end_time=datetime(2026, 1, 1, 9))

    assert last.next_time(now) == now + 9 * 3600
    assert last.next_time(now + 9 * 3600) is None
    assert CronRequest(**options, enabled=False).next_time(now) is None


@pytest.mark.parametrize(
    ("options", "expected_message"),
    [
        ({"schedule": "* * * * * *"}, "it has 6 fields; expected five fields"),
        ({"schedule": "0 0 30 2 *"}, "failed to find next date"),
        ({"schedule": "61 * * * *"}, "out of range"),
        ({"schedule": "daily"}, "it has 1 fields"),
        ({"schedule": "0," * 100 + "0 * * * *"}, "at most 200 characters"),
        ({"timezone": "Europe/Atlantis"}, "the timezone 'Europe/Atlantis' is unknown"),
        ({"timezone": "../../etc/passwd"}, "expected an IANA name"),
        ({"context": {"owner": "bob"}}, "'owner' is 'bob'"),
        ({"webhook": "http://127.0.0.1/"}, "webhook"),
    ],
)
def test_invalid_cron_is_refused_with_reason(
    sdk: SyncLangGraphClient, options: dict[str, Any], expected_message: str
) -> None:
    with pytest.raises(UnprocessableEntityError) as refused:
        sdk.crons.create("talk", **{"schedule": YEARLY, **options})

    assert expected_message in str(refused.value)
    assert sdk.crons.count() == 0


# -- what it does


def test_due_cron_runs_on_its_thread_once_and_gets_next_time(
    sdk: SyncLangGraphClient, settings: Settings
) -> None:
    """Several missed times cause a single run."""
    options: Any = {
        "schedule": "* * * * *",
        "input": build_input("wake"),
        "metadata": {"why": "alarm"},
    }
    cron: Any = sdk.crons.create_for_thread("t", "talk", **options)
    make_due(settings, cron["cron_id"], time.time() - 3600)
    wait_until(lambda: list_texts_if_any(sdk) == ["wake", "heard 1"])
    cron_after_run: Any = sdk.crons.search()[0]
    [run] = list_runs_oldest_first(sdk)

    assert cron_after_run["next_run_date"] > datetime.now(UTC).isoformat()
    assert run["metadata"]["why"] == "alarm"


def list_texts_if_any(sdk: SyncLangGraphClient) -> list[str]:
    values: Any = sdk.threads.get_state("t")["values"] or {}
    return read_message_texts(sdk) if values.get("messages") else []


@pytest.mark.parametrize(("completed", "expected_threads"), [(None, 0), ("keep", 1)])
def test_cron_without_thread_creates_new_thread_for_each_run(
    sdk: SyncLangGraphClient, settings: Settings, completed: Any, expected_threads: int
) -> None:
    sdk.threads.delete("t")
    cron: Any = sdk.crons.create(
        "talk", schedule=YEARLY, input=build_input("wake"), on_run_completed=completed
    )
    make_due(settings, cron["cron_id"])

    def is_over() -> bool:
        due: Any = sdk.crons.search()[0]["next_run_date"]
        done = [thread["status"] for thread in sdk.threads.search()] == ["idle"] * expected_threads
        return due is not None and due > datetime.now(UTC).isoformat() and done

    wait_until(is_over)
    wait_until(lambda: len(sdk.threads.search()) == expected_threads)
    for thread in sdk.threads.search():
        assert [run["status"] for run in list_runs_oldest_first(sdk, thread["thread_id"])] == [
            "success"
        ]


def test_rejecting_cron_skips_run_while_its_thread_is_busy(
    sdk: SyncLangGraphClient, settings: Settings, gate: Gate
) -> None:
    gate.open.clear()
    sdk.runs.create("t", "talk", input=build_input("a"))
    cron: Any = sdk.crons.create_for_thread(
        "t", "talk", schedule=YEARLY, input=build_input("b"), multitask_strategy="reject"
    )
    make_due(settings, cron["cron_id"])
    year = str(datetime.now(UTC).year + 1)
    wait_until(lambda: str(sdk.crons.search()[0]["next_run_date"]).startswith(year))
    gate.open.set()

    assert len(list_runs_oldest_first(sdk)) == 1


def test_disabled_cron_has_no_next_time_until_enabled(sdk: SyncLangGraphClient) -> None:
    cron: Any = sdk.crons.create("talk", schedule="* * * * *", enabled=False)
    enabled = sdk.crons.update(cron["cron_id"], enabled=True)

    assert cron["next_run_date"] is None
    assert enabled["next_run_date"] is not None


def test_deleting_thread_deletes_its_crons(sdk: SyncLangGraphClient) -> None:
    sdk.crons.create_for_thread("t", "talk", schedule=YEARLY)
    sdk.threads.delete("t")

    assert sdk.crons.search() == []


# -- the client's methods


def test_cron_search_supports_filters_sorting_and_paging(sdk: SyncLangGraphClient) -> None:
    first: Any = sdk.crons.create("talk", schedule=YEARLY, metadata={"of": "a", "n": 1})
    second: Any = sdk.crons.create_for_thread("t", "who", schedule="0 9 * * *", enabled=False)
    ids = [first["cron_id"], second["cron_id"]]

    def search_ids(**query: Any) -> list[str]:
        return [cron["cron_id"] for cron in sdk.crons.search(**query)]

    assert search_ids() == ids[::-1]
    assert (
        search_ids(assistant_id="talk") == search_ids(assistant_id=first["assistant_id"]) == ids[:1]
    )
    assert search_ids(thread_id="t") == search_ids(enabled=False) == ids[1:]
    assert search_ids(metadata={"of": "a"}) == ids[:1]
    assert search_ids(sort_by="created_at", sort_order="asc", limit=1) == ids[:1]
    assert search_ids(sort_by="next_run_date", sort_order="asc", offset=1) == ids[:1]
    selected: Any = sdk.crons.search(select=["schedule", "thread_id"], limit=1)
    assert selected == [{"schedule": "0 9 * * *", "thread_id": "t"}]
    assert sdk.crons.count() == 2
    assert sdk.crons.count(assistant_id="who") == 1
    assert sdk.crons.count(metadata={"of": "b"}) == 0


def test_cron_update_changes_given_fields_only(sdk: SyncLangGraphClient) -> None:
    end = datetime(2090, 1, 1, tzinfo=UTC)
    created: Any = sdk.crons.create(
        "talk", schedule=YEARLY, input=build_input("a"), metadata={"n": 1}, end_time=end
    )
    key = created["cron_id"]
    renamed = sdk.crons.update(key, metadata={"m": 2})
    timed = sdk.crons.update(key, schedule="0 10 * * *", timezone="Europe/Berlin", end_time=None)

    assert renamed["metadata"] == {"n": 1, "m": 2}
    assert renamed["next_run_date"] == created["next_run_date"]
    assert renamed["end_time"] == created["end_time"]
    assert timed["end_time"] is None
    assert timed["payload"]["input"] == build_input("a")
    assert timed["next_run_date"] != created["next_run_date"]
    with pytest.raises(UnprocessableEntityError, match="the schedule 'no' is invalid"):
        sdk.crons.update(key, schedule="no")
    sdk.crons.delete(key)
    for call in (sdk.crons.delete, sdk.crons.update):
        with pytest.raises(NotFoundError):
            call(key)


def test_cron_of_thread_refuses_on_run_completed(sdk: SyncLangGraphClient) -> None:
    cron: Any = sdk.crons.create_for_thread("t", "talk", schedule=YEARLY)
    with pytest.raises(UnprocessableEntityError, match="applies only to crons without a thread_id"):
        sdk.crons.update(cron["cron_id"], on_run_completed="keep")
    new = {"assistant_id": "talk", "schedule": YEARLY, "on_run_completed": "keep"}
    with pytest.raises(UnprocessableEntityError, match="applies only to crons without a thread_id"):
        sdk.http.post("/threads/t/runs/crons", json=new)
    with pytest.raises(NotFoundError):
        sdk.crons.create_for_thread("none", "talk", schedule=YEARLY)


# -- whose it is


def test_cron_is_reachable_by_its_user_only_and_runs_while_key_is_valid(
    settings: Settings, graphs: Graphs, tmp_path: Path
) -> None:
    """The cron runs as its user, on threads of the user, while the user has a key."""
    file = tmp_path / "keys.toml"
    file.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob"))
    with (
        serve_and_connect(settings, graphs, KeysFileAccess(file), ANN) as ann,
        get_sync_client(url=str(ann.http.client.base_url), api_key=BOB) as bob,
    ):
        ann.threads.create(thread_id="t")
        cron: Any = ann.crons.create_for_thread("t", "who", schedule=YEARLY, input={})
        key = cron["cron_id"]
        for call in (
            lambda: bob.crons.create_for_thread("t", "who", schedule=YEARLY),
            lambda: bob.crons.update(key, input={}),
            lambda: bob.crons.delete(key),
        ):
            with pytest.raises(NotFoundError):
                call()
        make_due(settings, key)
        wait_until(lambda: [run["status"] for run in list_runs_oldest_first(ann)] == ["success"])
        values: Any = ann.threads.get_state("t")["values"]
        file.write_text(render_key_entry(BOB, "bob"))
        time.sleep(1.1)  # keys are read once in a second
        make_due(settings, key)
        wait_until(lambda: not is_cron_due(settings, key))

        assert values["heard"][0] == "ann"
        assert bob.crons.search() == []
        assert bob.crons.count() == 0
        with SQLiteCheckpointer.open(settings.db) as saver:
            assert len(list_stored_runs(saver)) == 1


def is_cron_due(settings: Settings, cron_id: str) -> bool:
    with SQLiteCheckpointer.open(settings.db) as saver:
        return cron_id in asyncio.run(open_table(CronTable, saver).list_due_ids())


def list_stored_runs(saver: Any) -> list[Any]:
    from perdure.run_tables.runs import RunTable

    return asyncio.run(open_table(RunTable, saver).list_runs("t"))


def test_auth_handlers_authorize_creation_and_runs_of_crons(
    settings: Settings, graphs: Graphs, tmp_path: Path
) -> None:
    """The handlers run when a cron is created and when it runs."""
    auth = AuthFileAccess(
        write_auth_file(
            tmp_path,
            cleandoc("""
            from langgraph_sdk import Auth

            auth = Auth()
            may_run = [True]

            @auth.authenticate
            async def who(headers: dict) -> dict:
                return {"identity": headers[b"x-api-key"].decode(), "team": "red"}

            @auth.on.crons.create
            async def create(ctx, value):
                assert value["schedule"] != "* * * * *", "not each minute"
                value["metadata"]["team"] = ctx.user["team"]
                return {"team": ctx.user["team"]}

            @auth.on.crons
            async def crons(ctx, value):
                return {"team": ctx.user["team"]}

            @auth.on.threads
            async def threads(ctx, value):
                if ctx.action == "create_run" and value["metadata"].get("late"):
                    return ctx.user["team"] == "blue"
                return True
            """),
        )
    )
    with serve_and_connect(settings, graphs, auth, "ann") as ann:
        ann.threads.create(thread_id="t")
        with pytest.raises(PermissionDeniedError, match="not each minute"):
            ann.crons.create_for_thread("t", "talk", schedule="* * * * *")
        cron: Any = ann.crons.create_for_thread("t", "who", schedule=YEARLY, input={})
        make_due(settings, cron["cron_id"])
        wait_until(lambda: [run["status"] for run in list_runs_oldest_first(ann)] == ["success"])

        assert cron["metadata"] == {"team": "red"}
        with pytest.raises(PermissionDeniedError):
            ann.crons.create_for_thread("t", "who", schedule=YEARLY, metadata={"late": True})


# -- several servers, and kills


def test_only_one_of_several_servers_starts_run_of_due_cron(
    settings: Settings, graphs: Graphs, gate: Gate
) -> None:
    with ExitStack() as stack:
        here, *_ = [stack.enter_context(serve_and_connect(settings, graphs)) for _ in range(3)]
        here.threads.create(thread_id="t")
        crons: list[Any] = [
            here.crons.create_for_thread("t", "talk", schedule=YEARLY, input=build_input(f"{n}"))
            for n in range(8)
        ]
        for cron in crons:
            make_due(settings, cron["cron_id"])
        wait_until(
            lambda: [run["status"] for run in list_runs_oldest_first(here)] == ["success"] * 8
        )
        time.sleep(1)  # another sweep

        assert len(list_runs_oldest_first(here)) == 8
        assert sorted(read_message_texts(here)[::2]) == [str(n) for n in range(8)]


def test_cron_locked_by_another_server_is_not_logged(
    settings: Settings, sdk: SyncLangGraphClient, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is logged while another server holds the lock of the cron."""
    caplog.set_level("INFO", "perdure.server.runs.schedule")
    cron: Any = sdk.crons.create_for_thread("t", "talk", schedule=YEARLY, input=build_input("a"))
    with SQLiteCheckpointer.open(settings.db) as other:
        with other.lock(f"perdure.cron/{cron['cron_id']}"):
            make_due(settings, cron["cron_id"])
            time.sleep(1)  # a sweep, which finds it due
            assert list_runs_oldest_first(sdk) == []
        wait_until(lambda: [run["status"] for run in list_runs_oldest_first(sdk)] == ["success"])

    reported = [entry.message for entry in caplog.records if "is due" in entry.message]
    assert reported == []


def test_cron_with_slow_authorization_does_not_delay_other_runs(
    settings: Settings, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "HANDLER_TIMEOUT_S", 600)
    authorization_started = threading.Event()
    permit = LocalAccess.authorize_and_build_filter

    async def authorize_slowly(self: LocalAccess, identity: Any, action: Any, value: Any) -> Any:
        if "cron" in value.get("metadata", {}):
            authorization_started.set()
            await asyncio.sleep(600)
        return await permit(self, identity, action, value)

    with serve_and_connect(settings, graphs) as client:
        client.threads.create(thread_id="t")
        cron: Any = client.crons.create("talk", schedule=YEARLY, metadata={"cron": 1})
        monkeypatch.setattr(LocalAccess, "authorize_and_build_filter", authorize_slowly)
        make_due(settings, cron["cron_id"])
        assert authorization_started.wait(60)
        client.runs.create("t", "talk", input=build_input("later"), after_seconds=1)
        wait_until(lambda: [run["status"] for run in list_runs_oldest_first(client)] == ["success"])
        crons: Any = client.crons.search()

    assert crons[0]["next_run_date"] < crons[0]["created_at"]  # it asks still


@pytest.mark.repeats
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("round_", range(rounds(8)))
@pytest.mark.slow
def test_due_crons_and_delayed_runs_run_once_after_server_is_killed(
    tmp_path: Path, round_: int
) -> None:
    """Each thread has a cron and a delayed run. The server is killed when they become due."""
    (tmp_path / "made.py").write_text(GRAPH_SOURCE)
    (tmp_path / "langgraph.json").write_text(json.dumps({"graphs": {"made": "./made.py:make"}}))
    threads, settings = [f"t{n}" for n in range(6)], Settings(db=str(tmp_path / "m.db"))
    with in_a_process(tmp_path) as (process, url), get_sync_client(url=url) as client:
        crons: list[Any] = []
        for thread in threads:
            client.threads.create(thread_id=thread)
            crons.append(
                client.crons.create_for_thread(
                    thread, "made", schedule=YEARLY, input=build_input("cron")
                )
            )
            client.runs.create(thread, "made", input=build_input("later"), after_seconds=1)
        for cron in crons:
            make_due(settings, cron["cron_id"])
        time.sleep(random.uniform(0, 1.5))
        process.kill()
        process.wait(20)
    with in_a_process(tmp_path) as (_, url), get_sync_client(url=url) as client:

        def has_ended(thread: str) -> bool:
            return [run["status"] for run in client.runs.list(thread)] == ["success"] * 2

        for thread in threads:
            wait_until(partial(has_ended, thread))
            values: Any = client.threads.get_state(thread)["values"]
            inputs = [each["content"] for each in values["messages"] if each["type"] == "human"]

            assert sorted(inputs) == ["cron", "later"]
            assert client.threads.get(thread)["status"] == "idle"


@pytest.mark.parametrize("ahead", ["years", "past its end"])
def test_cron_with_due_time_of_fast_clock_gets_correct_time(
    sdk: SyncLangGraphClient, settings: Settings, ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The due time was computed with a wrong clock, and is computed again."""
    monkeypatch.setattr("perdure.server.runs.schedule.DUE_CHECK_S", 0)
    end = datetime.now(UTC) + timedelta(days=30)
    options: Any = {"schedule": "* * * * *", "input": build_input("wake"), "end_time": end}
    cron: Any = sdk.crons.create_for_thread("t", "talk", **options)
    if ahead == "years":
        make_due(settings, cron["cron_id"], time.time() + 10 * 365 * 86400)
    else:
        with closing(sqlite3.connect(settings.db, isolation_level=None)) as conn:
            conn.execute("UPDATE crons SET next_at = NULL")

    def read_next_time() -> Any:
        crons: Any = sdk.crons.search()
        return crons[0]["next_run_date"]

    soon = (datetime.now(UTC) + timedelta(minutes=2)).isoformat()
    wait_until(lambda: read_next_time() is not None and read_next_time() < soon)


def test_due_time_check_keeps_correct_due_times(
    sdk: SyncLangGraphClient, settings: Settings
) -> None:
    """Disabled crons stay without a due time."""
    sdk.crons.create_for_thread("t", "talk", schedule=YEARLY)
    sdk.crons.create_for_thread("t", "talk", schedule=YEARLY, enabled=False)
    before: Any = sdk.crons.search()
    time.sleep(1.2)  # two sweeps, the first of which checks all crons
    after: Any = sdk.crons.search()

    assert [each["next_run_date"] for each in after] == [each["next_run_date"] for each in before]
