"""Runs that are delayed, started in batches, cancelled by status, and deleted, by the SDK."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient
from langgraph_sdk.errors import (
    APIStatusError,
    ConflictError,
    NotFoundError,
    UnprocessableEntityError,
)

from perdure import SQLiteCheckpointer
from perdure.run_tables.runs import RunTable
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.http.access import Action, Filter, Identity, LocalAccess
from perdure.server.runs import run_queue
from perdure.settings import Settings
from perdure.storage.flow import fetch_rows
from tests.server.running import run_server, wait_until
from tests.server.runs.test_runs import read_message_texts
from tests.server.talking import Gate, build_input, build_talk_graph


@pytest.fixture
def graphs(gate: Gate) -> Graphs:
    return Graphs({"talk": build_talk_graph(gate)})


def list_run_statuses(sdk: SyncLangGraphClient, thread_id: str = "t") -> list[Any]:
    return [run["status"] for run in sdk.runs.list(thread_id)][::-1]


def test_delayed_run_does_not_block_later_runs(
    settings: Settings, sdk: SyncLangGraphClient, gate: Gate
) -> None:
    gate.open.set()
    delayed = sdk.runs.create("t", "talk", input=build_input("later"), after_seconds=3600)
    initial_statuses = sdk.threads.get("t")["status"], delayed["status"]
    sdk.runs.wait("t", "talk", input=build_input("now"))
    before = read_message_texts(sdk)
    with SQLiteCheckpointer(settings.db) as saver:
        saver.database.write(lambda: fetch_rows("UPDATE runs SET not_before = 0"))
    sdk.runs.join("t", delayed["run_id"])

    assert initial_statuses == ("idle", "pending")
    assert before == ["now", "heard 1"]
    assert read_message_texts(sdk) == ["now", "heard 1", "later", "heard 2"]
    assert list_run_statuses(sdk) == ["success", "success"]


def test_delayed_run_is_streamed_once_it_is_due(sdk: SyncLangGraphClient, gate: Gate) -> None:
    gate.open.set()
    parts = list(sdk.runs.stream("t", "talk", input=build_input("later"), after_seconds=1))

    assert parts[0].event == "metadata"
    assert parts[-1].data["heard"] == ["later"]


def test_many_due_runs_do_not_delay_check_of_live_runs(
    sdk: SyncLangGraphClient, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_queue, "DUE_PER_SWEEP", 2)
    gate.open.set()
    done: list[str] = []
    live, begin_due = RunTable.list_live_runs, RunTable.queue_delayed_run_that_is_due

    async def looking(self: RunTable) -> Any:
        done.append("look")
        return await live(self)

    async def beginning(self: RunTable, *given: Any) -> None:
        done.append("begin")
        await begin_due(self, *given)

    monkeypatch.setattr(RunTable, "list_live_runs", looking)
    monkeypatch.setattr(RunTable, "queue_delayed_run_that_is_due", beginning)
    delayed: Any = {"assistant_id": "talk", "input": build_input("later"), "after_seconds": 1}
    delayed["thread_id"] = "t"
    for run in sdk.runs.create_batch([delayed] * 5):
        sdk.runs.join("t", run["run_id"])

    assert done.count("begin") == 5
    assert ["begin"] * 3 not in [done[at : at + 3] for at in range(len(done))]


def test_delayed_run_survives_restart_of_server(
    settings: Settings, graphs: Graphs, gate: Gate
) -> None:
    gate.open.set()
    app = create_app(settings, graphs=graphs)
    with run_server(app) as url, get_sync_client(url=url) as sdk:
        sdk.threads.create(thread_id="t")
        run = sdk.runs.create("t", "talk", input=build_input("later"), after_seconds=3)["run_id"]
        left = list_run_statuses(sdk)
    with run_server(create_app(settings, graphs=graphs)) as url, get_sync_client(url=url) as sdk:
        values: Any = sdk.runs.join("t", run)

        assert left == ["pending"]
        assert values["heard"] == ["later"]


def test_delayed_run_can_be_cancelled_while_it_is_streamed(sdk: SyncLangGraphClient) -> None:
    run = sdk.runs.create("t", "talk", input=build_input("never"), after_seconds=3600)["run_id"]
    path = f"/threads/t/runs/{run}/stream"
    with sdk.http.client.stream("GET", path) as stream:
        lines = stream.iter_lines()
        next(lines)
        sdk.runs.cancel("t", run)
        assert not any(line.startswith("event: values") for line in lines)
    assert list_run_statuses(sdk) == ["interrupted"]


def test_runs_page_shows_start_time_of_delayed_run(sdk: SyncLangGraphClient, url: str) -> None:
    sdk.runs.create("t", "talk", input=build_input("later"), after_seconds=86_400)
    day = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 86_400))
    shown = httpx.get(f"{url}/ui/runs").text

    assert f'starts <time datetime="{day}' in shown
    assert "so far" not in shown
    assert 'name="text" required' in httpx.get(f"{url}/ui/thread", params={"id": "t"}).text


# -- batches


def test_batch_starts_each_of_its_runs(sdk: SyncLangGraphClient, gate: Gate) -> None:
    gate.open.set()
    asked: Any = [
        {"assistant_id": "talk", "input": build_input(text), "on_completion": "keep"}
        for text in "ab"
    ]
    asked.append({"assistant_id": "talk", "thread_id": "t", "input": build_input("c")})
    made = sdk.runs.create_batch(asked)
    values: Any = [sdk.runs.join(run["thread_id"], run["run_id"]) for run in made]

    assert [each["heard"] for each in values] == [["a"], ["b"], ["c"]]
    assert made[2]["thread_id"] == "t"


@pytest.mark.parametrize(
    "invalid_fields",
    [{"assistant_id": "none"}, {"thread_id": "none"}, {"context": {"user_id": ""}}],
)
def test_batch_with_one_refused_run_writes_nothing(
    sdk: SyncLangGraphClient, invalid_fields: dict[str, Any]
) -> None:
    right = {"assistant_id": "talk", "thread_id": "t", "input": build_input("a")}
    asked: Any = [right, right | invalid_fields]
    with pytest.raises(APIStatusError):
        sdk.runs.create_batch(asked)

    assert list_run_statuses(sdk) == []
    assert sdk.threads.count() == 1


# -- cancelling


def test_runs_of_thread_can_be_cancelled_by_their_ids(sdk: SyncLangGraphClient, gate: Gate) -> None:
    runs = [sdk.runs.create("t", "talk", input=build_input(text))["run_id"] for text in "abc"]
    assert gate.reached.wait(60)
    sdk.runs.cancel_many(thread_id="t", run_ids=runs[:2])
    gate.open.set()
    sdk.runs.join("t", runs[2])
    with pytest.raises(NotFoundError, match="have all ended already"):
        sdk.runs.cancel_many(thread_id="t", run_ids=runs)
    with pytest.raises(NotFoundError, match="has no run 'none'"):
        sdk.runs.cancel_many(thread_id="t", run_ids=["none"])

    assert list_run_statuses(sdk) == ["interrupted", "interrupted", "success"]


@pytest.mark.parametrize(
    ("status", "expected_statuses"),
    [
        ("pending", ["running", "interrupted", "interrupted"]),
        ("running", ["interrupted", "running", "pending"]),
        ("all", ["interrupted"] * 3),
    ],
)
def test_runs_can_be_cancelled_by_status(
    sdk: SyncLangGraphClient, gate: Gate, status: Any, expected_statuses: list[str]
) -> None:
    for text in "ab":
        sdk.runs.create("t", "talk", input=build_input(text))
    sdk.runs.create("t", "talk", input=build_input("c"), after_seconds=3600)
    assert gate.reached.wait(60)
    sdk.runs.cancel_many(status=status)
    wait_until(lambda: list_run_statuses(sdk) == expected_statuses)

    gate.open.set()


class OwnThreadsAccess(LocalAccess):
    """Access of each user to the threads whose metadata has the user's name."""

    async def authorize_and_build_filter(
        self, identity: Identity, action: Action, value: dict[str, Any]
    ) -> Filter:
        return {"owner": identity.user}


def test_cancellation_of_all_runs_leaves_runs_of_others(
    settings: Settings, graphs: Graphs, gate: Gate
) -> None:
    with run_server(create_app(settings, graphs=graphs)) as url, get_sync_client(url=url) as sdk:
        for owner in ("ann", "bob"):
            sdk.threads.create(thread_id=owner, metadata={"owner": owner})
            sdk.runs.create(owner, "talk", input=build_input("hi"), after_seconds=3600)
        with (
            run_server(create_app(settings, access=OwnThreadsAccess("ann"), graphs=graphs)) as hers,
            get_sync_client(url=hers) as ann,
        ):
            ann.runs.cancel_many(status="all")

        assert (list_run_statuses(sdk, "ann"), list_run_statuses(sdk, "bob")) == (
            ["interrupted"],
            ["pending"],
        )


@pytest.mark.parametrize(
    "options", [{}, {"thread_id": "t"}, {"run_ids": ["a"]}, {"thread_id": "t", "status": "all"}]
)
def test_cancellation_without_run_ids_or_status_is_refused(
    sdk: SyncLangGraphClient, options: dict[str, Any]
) -> None:
    with pytest.raises(
        UnprocessableEntityError,
        match="'thread_id' together with 'run_ids', or pass 'status' alone",
    ):
        sdk.runs.cancel_many(**options)


@pytest.mark.parametrize(
    ("body", "expected_message"),
    [
        (
            {"assistant_id": "talk", "feedback_keys": ["k"]},
            "the field 'feedback_keys' is ['k'], but this server",
        ),
        ({"input": build_input("a" * 100)}, "body.assistant_id is missing"),
        ({"assistant_id": "talk", "after_seconds": -1}, "body.after_seconds is -1: Input should"),
    ],
)
def test_refusal_names_invalid_field_without_rest_of_request(
    sdk: SyncLangGraphClient, url: str, body: dict[str, Any], expected_message: str
) -> None:
    """The message begins with the field, and quotes its value, not the body."""
    refused = httpx.post(f"{url}/threads/t/runs", json=body)

    assert refused.status_code == 422
    assert refused.json()["detail"].startswith(expected_message)


def test_cancellation_of_ended_run_is_refused(sdk: SyncLangGraphClient, gate: Gate) -> None:
    gate.open.set()
    run = sdk.runs.create("t", "talk", input=build_input("a"))["run_id"]
    sdk.runs.join("t", run)
    with pytest.raises(NotFoundError, match="its status is 'success'"):
        sdk.runs.cancel("t", run)

    assert list_run_statuses(sdk) == ["success"]


# -- deleting, and lists


def test_run_can_be_deleted_only_after_its_end(sdk: SyncLangGraphClient, gate: Gate) -> None:
    """The messages of the run stay in the thread."""
    run = sdk.runs.create("t", "talk", input=build_input("a"))["run_id"]
    assert gate.reached.wait(60)
    with pytest.raises(ConflictError, match="has not ended"):
        sdk.runs.delete("t", run)
    gate.open.set()
    sdk.runs.join("t", run)
    sdk.runs.delete("t", run)
    for read in (sdk.runs.get, sdk.runs.join, sdk.runs.delete, sdk.runs.cancel):
        with pytest.raises((NotFoundError, httpx.HTTPStatusError), match=r"404|has no run"):
            read("t", run)

    assert list_run_statuses(sdk) == []
    assert read_message_texts(sdk) == ["a", "heard 1"]


def test_run_list_returns_only_selected_fields(sdk: SyncLangGraphClient, gate: Gate) -> None:
    gate.open.set()
    run = sdk.runs.create("t", "talk", input=build_input("a"))["run_id"]
    sdk.runs.join("t", run)

    listed: Any = sdk.runs.list("t", select=["run_id", "status"])

    assert listed == [{"run_id": run, "status": "success"}]
    with pytest.raises(UnprocessableEntityError, match="kwargs"):
        sdk.runs.list("t", select=["kwargs"])
