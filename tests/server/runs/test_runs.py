"""Runs by LangGraph's SDK: streams, overlapping runs, refused requests, and abandoned runs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel.remote import RemoteGraph
from langgraph_sdk import get_client, get_sync_client
from langgraph_sdk.client import SyncLangGraphClient
from langgraph_sdk.errors import APIStatusError, ConflictError, NotFoundError
from starlette.requests import HTTPConnection

from perdure import SQLiteCheckpointer
from perdure.graphs import chat_graph
from perdure.memory import views
from perdure.run_tables.records import LiveRun
from perdure.run_tables.runs import RunTable
from perdure.server import create_app
from perdure.server.databases import Databases
from perdure.server.graphs import Graphs
from perdure.server.http.access import Action, Filter, Identity, LocalAccess
from perdure.server.http.call import Call
from perdure.server.http.limits import Limits, TooManyRequests
from perdure.server.runs import run_manager as runs
from perdure.server.runs import run_queue
from perdure.server.runs.run_request import RunRequest
from perdure.server.runs.shared_run_state import SharedRunState
from perdure.settings import Settings
from tests.server.running import run_server, wait_until
from tests.server.talking import (
    Gate,
    build_asking_graph,
    build_failing_graph,
    build_identity_graph,
    build_input,
    build_model_graph,
    build_talk_graph,
    build_uncancellable_graph,
)
from tests.talks import store_conversation


@pytest.fixture
def graphs(gate: Gate) -> Graphs:
    made = {
        "ask": build_asking_graph().compile(),
        "fail": build_failing_graph(),
        "model": build_model_graph(),
        "who": lambda: build_identity_graph(),
    }
    return Graphs({"talk": build_talk_graph(gate), "chat": chat_graph(), **made})


def read_message_texts(sdk: SyncLangGraphClient, thread_id: str = "t") -> list[str]:
    values: Any = sdk.threads.get_state(thread_id)["values"]
    return [message["content"] for message in values["messages"]]


def build_run_body(text: str = "hello", **options: Any) -> dict[str, Any]:
    return {"assistant_id": "talk", "input": build_input(text), **options}


# -- content of streams


def test_stream_starts_with_run_metadata_and_ends_with_values(
    sdk: SyncLangGraphClient, gate: Gate
) -> None:
    gate.open.set()

    parts = list(
        sdk.runs.stream("t", "talk", input=build_input("hello"), stream_mode=["values", "custom"])
    )

    events = [part.event for part in parts]
    assert events == ["metadata", "values", "values", "custom", "values"]
    assert sdk.runs.get("t", parts[0].data["run_id"])["status"] == "success"
    assert parts[-1].data["heard"] == ["hello"]
    assert read_message_texts(sdk) == ["hello", "heard 1"]


def test_message_chunks_are_streamed_while_message_grows(sdk: SyncLangGraphClient) -> None:
    def told(*modes: Any) -> list[tuple[str, Any]]:
        parts = [
            *sdk.runs.stream(
                "t", "model", input=build_input("go"), stream_mode=[*modes], stream_subgraphs=True
            )
        ]
        assert all("|inner:" in part.event for part in parts if part.event.startswith("messages"))
        return [(part.event.split("|")[0], part.data) for part in parts]

    chunks = [
        data[0]["content"]
        for event, data in told("messages-tuple", "updates")
        if event == "messages"
    ]
    named = told("messages", "updates")
    partial = [data[0] for event, data in named if event == "messages/partial"]
    [metadata] = [data for event, data in named if event == "messages/metadata"]

    assert "".join(chunks) == "three short words"
    assert [each["content"] for each in partial][-1] == "three short words"
    assert {each["type"] for each in partial} == {"ai"}
    assert metadata[partial[0]["id"]]["metadata"]["langgraph_node"] == "speak"


def test_langchain_events_do_not_change_events_of_other_modes(
    sdk: SyncLangGraphClient, gate: Gate
) -> None:
    """The other modes stream the same events with and without the mode `events`."""
    gate.open.set()
    modes: Any = ["messages", "messages-tuple", "updates", "values", "custom", "tasks"]
    for thread_id, graph in (("t", "talk"), ("u", "model"), ("v", "ask")):
        told = []
        for number, asked in enumerate((modes, [*modes, "events"], "events")):
            sdk.threads.create(thread_id=f"{thread_id}{number}")
            options: Any = {"stream_mode": asked, "stream_subgraphs": True}
            parts = sdk.runs.stream(
                f"{thread_id}{number}", graph, input=build_input("go"), **options
            )
            told.append([part for part in parts if part.event != "metadata"])
        without, both, alone = told

        others = [part.event.split("|")[0] for part in both if part.event != "events"]
        assert others == [part.event.split("|")[0] for part in without]
        events = [[p.data["event"] for p in of if p.event == "events"] for of in (both, alone)]
        assert {part.event for part in alone} == {"events"}
        for kinds in events:
            assert {"on_chain_start", "on_chain_end"} <= {*kinds}
            assert ("on_chain_stream" in kinds) == (graph != "ask")  # of nodes that returned
        assert ("on_chat_model_stream" in events[1]) == (graph == "model")
    assert sdk.threads.get("v2")["status"] == "interrupted"
    waiting: Any = sdk.runs.join("v2", sdk.runs.list("v2")[0]["run_id"])
    assert [each["value"] for each in waiting["__interrupt__"]] == ["Are you sure?"]


def test_run_that_streams_events_can_be_cancelled(sdk: SyncLangGraphClient, gate: Gate) -> None:
    run = sdk.runs.create("t", "talk", input=build_input("go"), stream_mode="events")["run_id"]
    assert gate.reached.wait(60)

    sdk.runs.cancel("t", run, wait=True)

    assert sdk.runs.get("t", run)["status"] == "interrupted"
    assert sdk.threads.get_state("t")["values"]["heard"] == ["go"]  # type: ignore[call-overload]


@pytest.mark.parametrize(("during", "expected_count"), [(True, 4), (False, 1)])
def test_checkpoint_during_still_sets_durability(
    sdk: SyncLangGraphClient, gate: Gate, during: bool, expected_count: int
) -> None:
    gate.open.set()
    with pytest.warns(DeprecationWarning, match="checkpoint_during"):
        sdk.runs.wait("t", "talk", input=build_input("go"), checkpoint_during=during)

    assert len(sdk.threads.get_history("t")) == expected_count


def test_messages_that_model_was_shown_are_recorded(
    sdk: SyncLangGraphClient, settings: Settings
) -> None:
    sdk.runs.wait("t", "chat", input=build_input("I like figs"))

    with SQLiteCheckpointer.open(settings.db) as saver:
        [view] = views(saver, "t")
    assert [message.text for message in view.messages][-1] == "I like figs"


@pytest.mark.parametrize("more", [[], ["events"]])
def test_streams_contain_no_login_data(settings: Settings, graphs: Graphs, more: list[Any]) -> None:
    with (
        run_server(create_app(settings, graphs=graphs, access=HeaderAccess())) as url,
        get_sync_client(url=url, headers={"x-user": "ann"}) as client,
    ):
        parts = client.runs.stream(
            None,
            "who",
            input={},
            stream_mode=["debug", "checkpoints", "tasks", "messages", "values", *more],
        )
        told = str(list(parts))

    assert "'checkpoint_id'" in told
    assert "hunter2" not in told


def test_error_of_failed_graph_has_message_without_location(
    sdk: SyncLangGraphClient, gate: Gate
) -> None:
    parts = list(sdk.runs.stream("t", "fail", input=build_input("hello")))

    error = {"error": "ZeroDivisionError", "message": "one by none"}
    assert [part.data for part in parts if part.event == "error"] == [error]
    assert parts[-1].event == "error"
    assert sdk.runs.get("t", parts[0].data["run_id"])["status"] == "error"
    with pytest.raises(Exception, match=r"^ZeroDivisionError: one by none$"):
        sdk.runs.wait("t", "fail", input=build_input("again"))
    assert sdk.threads.get("t")["status"] == "error"
    gate.open.set()
    values: Any = sdk.runs.wait("t", "talk", input=build_input("and now"))
    assert values["heard"] == ["hello", "again", "and now"]
    assert sdk.threads.get("t")["status"] == "idle"


def test_interrupt_is_answered_by_resume_command(sdk: SyncLangGraphClient) -> None:
    waiting: Any = sdk.runs.wait("t", "ask", input=build_input("buy"))

    assert [each["value"] for each in waiting["__interrupt__"]] == ["Are you sure?"]
    assert [run["status"] for run in sdk.runs.list("t")] == ["interrupted"]
    assert sdk.threads.get("t")["status"] == "interrupted"
    assert sdk.runs.wait("t", "ask", command={"resume": "yes"})["heard"] == ["yes"]  # type: ignore[call-overload]
    assert sdk.threads.get("t")["status"] == "idle"


def test_thread_is_idle_after_update_answers_its_question(sdk: SyncLangGraphClient) -> None:
    sdk.runs.wait("t", "ask", input={})
    sdk.threads.update_state("t", {"heard": ["yes"]}, as_node="hear")

    assert sdk.threads.get_state("t")["next"] == []
    assert sdk.threads.get("t")["status"] == "idle"


def test_run_with_interrupt_before_stops_and_can_continue(
    sdk: SyncLangGraphClient, gate: Gate
) -> None:
    gate.open.set()
    stopped: Any = sdk.runs.wait(
        "t", "talk", input=build_input("hello"), interrupt_before=["answer"]
    )

    assert stopped["heard"] == ["hello"]
    assert sdk.threads.get("t")["status"] == "interrupted"
    sdk.runs.wait("t", "talk")
    assert read_message_texts(sdk) == ["hello", "heard 1"]


def test_run_can_start_from_earlier_checkpoint(sdk: SyncLangGraphClient, gate: Gate) -> None:
    gate.open.set()
    for text in ("one", "two"):
        sdk.runs.wait("t", "talk", input=build_input(text))
    after_one = next(s for s in sdk.threads.get_history("t") if len(s["values"]["messages"]) == 2)  # type: ignore[call-overload]

    sdk.runs.wait("t", "talk", input=build_input("other"), checkpoint=after_one["checkpoint"])

    assert read_message_texts(sdk) == ["one", "heard 1", "other", "heard 2"]


def test_graph_receives_user_thread_and_configurable_values(sdk: SyncLangGraphClient) -> None:
    config: Any = {"configurable": {"colour": 0, "user_id": "ann"}}

    values: Any = sdk.runs.wait("t", "who", input={}, config=config)

    assert values["heard"] == ["ann", "t", "0"]


def test_run_without_thread_leaves_no_thread(sdk: SyncLangGraphClient, gate: Gate) -> None:
    gate.open.set()
    parts = list(sdk.runs.stream(None, "talk", input=build_input("hello")))
    values: Any = sdk.runs.wait(None, "talk", input=build_input("hello"))

    assert parts[-1].data["heard"] == values["heard"] == ["hello"]
    assert [thread["thread_id"] for thread in sdk.threads.search()] == ["t"]


@pytest.mark.parametrize(
    "location",
    [
        {"checkpoint_id": "1f1e71fc-53de-6a0e-8005-e771d5265d49"},
        {"config": {"configurable": {"checkpoint_id": "1f1e71fc-53de-6a0e-8005-e771d5265d49"}}},
        {"checkpoint": {"checkpoint_map": {"": "1f1e71fc-53de-6a0e-8005-e771d5265d49"}}},
    ],
    ids=["checkpoint_id", "configurable", "checkpoint_map"],
)
def test_run_at_unknown_checkpoint_is_refused(
    sdk: SyncLangGraphClient, client: httpx.Client, gate: Gate, location: dict[str, Any]
) -> None:
    gate.open.set()
    sdk.runs.wait("t", "talk", input=build_input("one"))

    answer = client.post("/threads/t/runs/wait", json=build_run_body("two", **location))

    assert read_message_texts(sdk) == ["one", "heard 1"]
    assert answer.status_code == 404


def test_served_graph_can_be_node_of_other_graph(sdk: SyncLangGraphClient, gate: Gate) -> None:
    gate.open.set()
    remote = RemoteGraph("talk", sync_client=sdk)
    outer = StateGraph(MessagesState).add_node("remote", remote).add_edge(START, "remote").compile()

    given: Any = build_input("hello")
    found = outer.invoke(given)

    assert [message.text for message in found["messages"]][-1] == "heard 1"


def test_reserved_metadata_of_client_is_ignored(sdk: SyncLangGraphClient, gate: Gate) -> None:
    """The server sets the reserved keys itself; a graph that calls this one may send them."""
    gate.open.set()
    said: Any = {"user_id": "bob", "owner": "bob", "run_id": "r", "langgraph_step": 1, "n": 1}
    config: Any = {"metadata": said | {"m": 2}}

    sdk.runs.wait("t", "talk", input=build_input("hello"), metadata=said, config=config)

    stored: Any = sdk.threads.get_state("t")["metadata"]
    run: Any = sdk.runs.list("t")[0]
    assert (stored["user_id"], stored["run_id"]) == ("ann", run["run_id"])
    assert (stored["n"], stored["m"], "owner" in stored) == (1, 2, False)
    assert run["metadata"] == {"n": 1, "graph_id": "talk"}


def test_null_is_treated_as_missing_parameter(client: httpx.Client, gate: Gate) -> None:
    gate.open.set()
    names = [name for name in RunRequest.model_fields if name not in ("assistant_id", "input")]
    config = {"tags": None, "configurable": {"checkpoint_map": None}, "metadata": None}
    for nulls in (dict.fromkeys(names), {"config": config}):
        assert client.post("/runs/wait", json={**build_run_body(), **nulls}).json()["heard"] == [
            "hello"
        ]


# -- runs that overlap


def test_concurrent_runs_of_thread_execute_in_order(sdk: SyncLangGraphClient, gate: Gate) -> None:
    made = [
        sdk.runs.create("t", "talk", input=build_input(text)) for text in ("one", "two", "three")
    ]
    assert gate.reached.wait(60)
    with pytest.raises(ConflictError, match="still active"):
        sdk.runs.create("t", "talk", input=build_input("no"), multitask_strategy="reject")
    with pytest.raises(ConflictError):
        sdk.threads.update_state("t", {"heard": ["no"]})
    assert sdk.threads.get("t")["status"] == "busy"
    assert [each["thread_id"] for each in sdk.threads.search(status="busy")] == ["t"]
    assert sdk.threads.search(status="idle") == []
    gate.open.set()
    last: Any = sdk.runs.join("t", made[-1]["run_id"])

    assert sdk.threads.get("t")["status"] == "idle"
    assert last["heard"] == ["one", "two", "three"]
    assert [run["status"] for run in sdk.runs.list("t")] == ["success"] * 3


@pytest.mark.parametrize(
    ("strategy", "expected_texts"),
    [("interrupt", ["one", "two", "heard 2"]), ("rollback", ["two", "heard 1"])],
)
def test_multitask_strategy_stops_previous_run(
    sdk: SyncLangGraphClient, gate: Gate, strategy: Any, expected_texts: list[str]
) -> None:
    first = sdk.runs.create("t", "talk", input=build_input("one"))
    assert gate.reached.wait(60)
    second = sdk.runs.create("t", "talk", input=build_input("two"), multitask_strategy=strategy)
    kept = {first["run_id"]: "interrupted"} if strategy == "interrupt" else {}
    known = {second["run_id"]: "running"}
    wait_until(lambda: {run["run_id"]: run["status"] for run in sdk.runs.list("t")} == kept | known)
    gate.open.set()
    sdk.runs.join("t", second["run_id"])

    assert read_message_texts(sdk) == expected_texts
    if strategy == "rollback":
        with pytest.raises(NotFoundError):
            sdk.runs.get("t", first["run_id"])


def test_cancelled_run_keeps_what_it_has_stored(sdk: SyncLangGraphClient, gate: Gate) -> None:
    run = sdk.runs.create("t", "talk", input=build_input("one"))
    waiting = sdk.runs.create("t", "talk", input=build_input("never"))
    assert gate.reached.wait(60)
    sdk.runs.cancel("t", waiting["run_id"])
    sdk.runs.cancel("t", run["run_id"], wait=True)

    assert sdk.runs.get("t", run["run_id"])["status"] == "interrupted"
    gate.open.set()
    sdk.runs.wait("t", "talk", input=build_input("two"))
    assert read_message_texts(sdk) == ["one", "two", "heard 2"]


def test_thread_deleted_during_run_stays_deleted(sdk: SyncLangGraphClient, gate: Gate) -> None:
    sdk.runs.create("t", "talk", input=build_input("one"))
    assert gate.reached.wait(60)
    sdk.threads.delete("t")
    gate.open.set()

    with pytest.raises(NotFoundError):
        sdk.threads.get("t")
    assert sdk.threads.search() == []


def test_page_can_delete_thread_during_run(
    sdk: SyncLangGraphClient, client: httpx.Client, gate: Gate
) -> None:
    run = sdk.runs.create("t", "talk", input=build_input("one"))
    assert gate.reached.wait(60)
    deleted = client.post("/ui/delete?id=t")

    assert (deleted.status_code, deleted.headers["location"]) == (303, "/ui/threads")
    with pytest.raises(NotFoundError):
        sdk.runs.get("t", run["run_id"])
    assert sdk.threads.search() == []


def test_lone_surrogate_in_input_does_not_fail_run(client: httpx.Client) -> None:
    """A lone surrogate in a client's JSON becomes a question mark in the thread."""
    headers = {"content-type": "application/json"}
    asked = json.dumps({**build_run_body("half \ud83d"), "assistant_id": "chat"})
    client.post("/threads", json={"thread_id": "t"})
    for _ in range(2):
        ran = client.post("/threads/t/runs/wait", content=asked, headers=headers)
        said = client.get("/threads/t/state").json()["values"]["messages"]

        assert ran.status_code == 200
        assert [message["content"] for message in said][0::2] == ["half ?"] * (len(said) // 2)
        assert client.get("/ui/thread?id=t").status_code == 200


def test_prune_during_run_is_refused_or_deletes_thread(client: httpx.Client, gate: Gate) -> None:
    client.post("/threads", json={"thread_id": "t"})
    with client.stream("POST", "/threads/t/runs/stream", json=build_run_body("one")) as events:
        assert gate.reached.wait(60)
        pruned = client.post("/threads/prune", json={"thread_ids": ["t"]})
        gate.open.set()
        events.read()  # to the end of the run

    assert pruned.status_code == 409 or client.get("/threads/t").status_code == 404


def test_deletion_during_run_of_other_server_is_refused_or_waits(
    client: httpx.Client, settings: Settings, graphs: Graphs, gate: Gate
) -> None:
    client.post("/threads", json={"thread_id": "t"})
    with (
        client.stream("POST", "/threads/t/runs/stream", json=build_run_body("one")) as events,
        run_server(create_app(settings, graphs=graphs)) as other,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        assert gate.reached.wait(60)
        deletion = pool.submit(httpx.delete, f"{other}/threads/t", timeout=60)
        concurrent.futures.wait([deletion], 1)  # it is done at once, or waits for the run's end
        gate.open.set()
        events.read()
        status = deletion.result().status_code

    assert status == 409 or client.get("/threads/t").status_code == 404


def test_run_sent_during_deletion_does_not_restore_thread(settings: Settings, gate: Gate) -> None:
    second, told = Gate(), threading.Event()
    serve_in_process = Graphs({"stubborn": build_uncancellable_graph(gate, second, told)})
    asked = {"assistant_id": "stubborn", "input": {}}
    with (
        run_server(create_app(settings, graphs=serve_in_process)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        client.post("/threads", json={"thread_id": "t"})
        client.post("/threads/t/runs", json=asked)
        assert gate.reached.wait(60)
        deletion = pool.submit(httpx.delete, f"{url}/threads/t", timeout=60)
        wait_until(lambda: deletion.done() or told.is_set())  # it waits for the first run
        with client.stream("POST", "/threads/t/runs/stream", json=asked) as events:
            gate.open.set()
            wait_until(lambda: deletion.done() or second.reached.is_set())
            second.open.set()
            events.read()
        status = deletion.result().status_code

        assert status == 409 or client.get("/threads/t").status_code == 404


def test_waiting_run_does_not_restore_deleted_thread(
    sdk: SyncLangGraphClient, client: httpx.Client, settings: Settings, gate: Gate
) -> None:
    gate.open.set()
    with SQLiteCheckpointer.open(settings.db) as saver, ExitStack() as streaming:
        store_conversation(saver, "agent")
        with saver.lock("agent"):
            asked = client.stream("POST", "/threads/agent/runs/stream", json=build_run_body())
            events = streaming.enter_context(asked)
            saver.delete_thread("agent")
        told = events.read().decode()

    assert "UnknownThread" in told
    assert [thread["thread_id"] for thread in sdk.threads.search()] == ["t"]


def test_update_does_not_restore_deleted_thread(settings: Settings) -> None:
    where: list[str] = []

    def make() -> StateGraph[Any]:  # as slow as a deletion
        if where:
            httpx.delete(where[0], timeout=60).raise_for_status()
        return build_asking_graph()

    with (
        run_server(create_app(settings, graphs=Graphs({"ask": make}))) as url,
        get_sync_client(url=url) as sdk,
    ):
        sdk.threads.create(thread_id="t", graph_id="ask")
        where.append(f"{url}/threads/t")
        with pytest.raises(NotFoundError):
            sdk.threads.update_state("t", {"heard": ["late"]}, as_node="hear")
        assert sdk.threads.search() == []


def test_outdated_run_rows_do_not_stop_started_run(
    settings: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, told, live = Gate(), threading.Event(), RunTable.list_live_runs
    are_read, are_told, swept = threading.Event(), threading.Event(), threading.Event()

    async def late(table: RunTable) -> list[LiveRun]:
        rows = await live(table)
        if are_read.is_set():
            swept.set()
        elif [row.status for row in rows] == ["running", "pending"]:
            are_read.set()
            await asyncio.to_thread(are_told.wait, 60)
        return rows

    monkeypatch.setattr(RunTable, "list_live_runs", late)
    serve_in_process = Graphs({"stubborn": build_uncancellable_graph(gate, second, told)})
    asked = {"assistant_id": "stubborn", "input": {}}
    with (
        run_server(create_app(settings, graphs=serve_in_process)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        client.post("/threads", json={"thread_id": "t"})
        client.post("/threads/t/runs", json=asked)
        assert gate.reached.wait(60)
        run_id = client.post("/threads/t/runs", json=asked).json()["run_id"]
        assert are_read.wait(60)
        gate.open.set()
        assert second.reached.wait(60)
        are_told.set()
        assert swept.wait(60)
        second.open.set()
        client.get(f"/threads/t/runs/{run_id}/join")

    assert not told.is_set()


def test_thread_is_not_deleted_while_its_run_does_not_end(
    settings: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "END_TIMEOUT_S", 0.05)
    serve_in_process = Graphs(
        {"stubborn": build_uncancellable_graph(gate, Gate(), threading.Event())}
    )
    with (
        run_server(create_app(settings, graphs=serve_in_process)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        client.post("/threads", json={"thread_id": "t"})
        made = client.post("/threads/t/runs", json={"assistant_id": "stubborn", "input": {}})
        assert gate.reached.wait(60)
        refused = client.delete("/threads/t")
        gate.open.set()
        client.get(f"/threads/t/runs/{made.json()['run_id']}/join")

        assert (refused.status_code, "is still running" in refused.text) == (409, True)
        assert client.delete("/threads/t").status_code == 204


def test_rewound_thread_has_no_open_question(
    sdk: SyncLangGraphClient, client: httpx.Client
) -> None:
    sdk.runs.wait("t", "ask", input=build_input("buy"))
    before = sdk.threads.get("t")["status"]
    first: Any = sdk.threads.get_history("t")[-1]["checkpoint"]
    params = {"id": "t", "checkpoint": first["checkpoint_id"]}

    assert client.post("/ui/rewind", params=params).status_code == 303
    assert (before, sdk.threads.get("t")["status"]) == ("interrupted", "idle")


@pytest.mark.parametrize("path", ["stream", "wait"])
@pytest.mark.parametrize(
    ("mode", "expected_texts"),
    [
        ("cancel", ["one", "two", "heard 2"]),
        ("continue", ["one", "heard 1", "two", "heard 2"]),
    ],
)
def test_run_after_abandoned_run_sees_all_messages(
    sdk: SyncLangGraphClient, url: str, gate: Gate, path: str, mode: str, expected_texts: list[str]
) -> None:
    with httpx.Client(base_url=url) as client:
        asked = build_run_body("one", on_disconnect=mode)
        if path == "stream":
            with client.stream("POST", "/threads/t/runs/stream", json=asked) as response:
                assert gate.reached.wait(60)
                next(response.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/threads/t/runs/wait", json=asked, timeout=0.5)
    if mode == "cancel":
        wait_until(lambda: sdk.runs.list("t")[0]["status"] == "interrupted")
    gate.open.set()
    sdk.runs.wait("t", "talk", input=build_input("two"))

    assert read_message_texts(sdk) == expected_texts


def test_head_request_for_stream_does_not_cancel_run(
    sdk: SyncLangGraphClient, client: httpx.Client, gate: Gate
) -> None:
    """The request is answered while the run is under way."""
    run = sdk.runs.create("t", "talk", input=build_input("hello"))["run_id"]
    assert gate.reached.wait(60)
    path = f"/threads/t/runs/{run}/stream"
    reply = client.head(path, params={"cancel_on_disconnect": True})
    gate.open.set()

    assert reply.headers["content-type"].startswith("text/event-stream")
    sdk.runs.join("t", run)
    assert sdk.runs.get("t", run)["status"] == "success"


def test_stream_can_be_joined_again_after_last_event_id(
    sdk: SyncLangGraphClient, gate: Gate
) -> None:
    run = sdk.runs.create("t", "talk", input=build_input("hello"), stream_resumable=True)
    assert gate.reached.wait(60)
    first = next(part for part in sdk.runs.join_stream("t", run["run_id"]) if part.id)
    gate.open.set()
    rest = list(sdk.runs.join_stream("t", run["run_id"], last_event_id=first.id))
    again = list(sdk.runs.join_stream("t", run["run_id"], stream_mode="values"))

    assert [part.event for part in rest] == ["values", "values"]
    assert [part.event for part in again] == ["metadata", "values", "values", "values"]
    assert [part.id for part in again if part.event == "values"] == ["1", "2", "3"]


def test_only_newest_ended_runs_are_kept(
    sdk: SyncLangGraphClient, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_queue, "RETAINED_ENDED_RUNS", 1)
    monkeypatch.setattr("perdure.run_tables.runs.MAX_ENDED_RUNS", 2)
    monkeypatch.setattr(runs, "MAX_ENDED_RUNS", 2)
    gate.open.set()
    made = []
    for text in ("1", "2", "3"):
        begins, *_ = list(sdk.runs.stream("t", "talk", input=build_input(text)))
        made.append(begins.data["run_id"])
    last: Any = sdk.runs.join("t", made[-1])

    assert last["heard"] == ["1", "2", "3"]
    assert [run["run_id"] for run in sdk.runs.list("t")] == made[:0:-1]
    second: Any = sdk.runs.join("t", made[1])
    assert second["heard"] == ["1", "2"]
    with pytest.raises(httpx.HTTPStatusError, match="only the last 2 ended"):
        sdk.runs.join("t", made[0])
    for each, why in ((made[1], "no longer available"), (made[0], "only the last 2 ended")):
        with pytest.raises(APIStatusError, match=why):
            list(sdk.runs.join_stream("t", each))


# -- refused requests


REFUSED_REQUESTS: list[tuple[Any, int, str]] = [
    ({"config": {"configurable": {"user_id": "bob"}}}, 422, "'user_id' is 'bob'"),
    ({"config": {"configurable": {"owner": "bob"}}}, 422, "'owner' is 'bob'"),
    ({"context": {"user_id": " "}}, 403, "' ' is not a valid user name"),
    ({"context": {"owner": "bob", "user_id": "ann"}}, 422, "'owner' is 'bob'"),
    ({"config": {"configurable": {"run_id": "r"}}}, 422, "'run_id' is 'r'"),
    ({"config": {"configurable": {"checkpoint_id": 5}}}, 422, "checkpoint_id is 5"),
    ({"checkpoint": {"checkpoint_map": "x"}}, 422, "checkpoint_map is 'x'"),
    ({"config": {"configurable": {"thread_id": "other"}}}, 422, "'thread_id' is 'other'"),
    ({"config": {"configurable": {"__pregel_store": 1}}}, 422, "'__pregel_store' is 1"),
    ({"config": {"configurable": {"langgraph_auth_user": {}}}}, 422, "'langgraph_auth_user'"),
    ({"checkpoint": {"thread_id": "other"}}, 422, "'thread_id' is 'other'"),
    ({"config": {"recursion_limit": 100_000}}, 422, "recursion_limit"),
    ({"webhook": "http://a.b"}, 422, "the webhook URL 'http://a.b' is not allowed"),
    ({"after_seconds": -5}, 422, "after_seconds"),
    ({"after_seconds": 1e12}, 422, "after_seconds"),
    ({"after_seconds": 5, "multitask_strategy": "reject"}, 422, "cannot be combined"),
    ({"command": {"update": "x"}}, 422, "command.update"),
    ({"command": [1]}, 422, "command is [1]"),
    ({"stream_mode": "nope"}, 422, "stream_mode"),
    ({"feedback_keys": ["like"]}, 422, "'feedback_keys' is ['like']"),
    ({"langsmith_tracer": {"project_name": "p"}}, 422, "'langsmith_tracer' is"),
    ({"assistant_id": "none"}, 422, "the served graphs are talk, chat"),
    ({"assistant_id": 5}, 422, "assistant_id"),
]


def test_invalid_run_request_is_refused_with_explanation(
    sdk: SyncLangGraphClient, client: httpx.Client
) -> None:
    for asked, status, why in REFUSED_REQUESTS:
        reply = client.post("/threads/t/runs/wait", json={**build_run_body(), **asked})

        assert (reply.status_code, why in reply.text) == (status, True), reply.text
    assert sdk.runs.list("t") == []


@pytest.mark.parametrize("path", ["/runs/wait", "/threads/new/runs/wait"])
def test_refused_run_writes_nothing(client: httpx.Client, path: str) -> None:
    asked = build_run_body(assistant_id="nope") | (
        {"if_not_exists": "create"} if "new" in path else {}
    )
    lost = asked | {"assistant_id": "talk", "checkpoint_id": "1f1e71fc-53de-6a0e-8005-e771d5265d49"}

    answer = client.post(path, json=asked)

    assert answer.status_code == 422
    assert client.post(path, json=lost).status_code == 404
    assert client.post("/threads/count", json={}).json() == 0


def test_unknown_value_in_query_is_refused(
    sdk: SyncLangGraphClient, client: httpx.Client, gate: Gate
) -> None:
    gate.open.set()
    run = sdk.runs.create("t", "talk", input=build_input("one"))

    path = f"/threads/t/runs/{run['run_id']}/stream"
    assert client.get(path, params={"stream_mode": "nope"}).status_code == 422
    assert client.get("/threads/t/runs", params={"status": "nope"}).status_code == 422


def test_unknown_thread_run_and_assistant_are_not_found(
    sdk: SyncLangGraphClient, gate: Gate
) -> None:
    for call in (
        lambda: sdk.runs.wait("none", "talk", input=build_input("hello")),
        lambda: sdk.runs.get("t", "none"),
        lambda: sdk.runs.cancel("t", "none"),
        lambda: list(sdk.runs.join_stream("t", "none")),
        lambda: sdk.assistants.get("none"),
    ):
        with pytest.raises((NotFoundError, httpx.HTTPStatusError), match=r"404|no "):
            call()
    gate.open.set()
    sdk.runs.wait("a/b", "talk", input=build_input("hello"), if_not_exists="create")
    assert read_message_texts(sdk, "a/b") == ["hello", "heard 1"]


class HeaderAccess(LocalAccess):
    """Access that trusts a header, and shows each user their own threads."""

    def __init__(self) -> None:
        super().__init__("nobody")

    async def identify(self, connection: HTTPConnection) -> Identity:
        return Identity(connection.headers["x-user"], raw_user={"password": "hunter2"})

    async def authorize_and_build_filter(
        self, identity: Identity, action: Action, value: dict[str, Any]
    ) -> Filter:
        if action in ("threads:create", "threads:create_run"):
            value.setdefault("metadata", {})["owner"] = identity.user
        return {"owner": identity.user}


def test_runs_of_other_users_are_not_found(settings: Settings, graphs: Graphs, gate: Gate) -> None:
    with (
        run_server(create_app(settings, graphs=graphs, access=HeaderAccess())) as url,
        get_sync_client(url=url, headers={"x-user": "ann"}) as ann,
        get_sync_client(url=url, headers={"x-user": "bob"}) as bob,
    ):
        ann.threads.create(thread_id="t")
        run = ann.runs.create("t", "talk", input=build_input("secret"), stream_resumable=True)
        path = f"/threads/t/runs/{run['run_id']}"
        with httpx.Client(base_url=url, headers={"x-user": "bob"}) as client:
            tries = [
                client.get(path),
                client.get(f"{path}/join"),
                client.get(f"{path}/stream"),
                client.post(f"{path}/cancel"),
                client.get("/threads/t/runs"),
                client.post("/threads/t/runs", json=build_run_body()),
                client.post("/threads/t/stream/events", json={"channels": ["values"]}),
                client.post(
                    "/threads/t/commands",
                    json={"id": 1, "method": "run.start", "params": {**build_run_body()}},
                ),
            ]
        gate.open.set()
        ann.runs.join("t", run["run_id"])
        assert [each.status_code for each in tries][:-1] == [404] * 7
        assert tries[-1].status_code in (404, 409)
        assert read_message_texts(ann) == ["secret", "heard 1"]
        assert bob.threads.search() == []


class TeamAccess(HeaderAccess):
    """Access that shows everything; threads of users other than root belong to their team."""

    async def authorize_and_build_filter(
        self, identity: Identity, action: Action, value: dict[str, Any]
    ) -> Filter:
        if identity.user == "root":
            return {}
        if action == "threads:create":
            value["metadata"]["owner"] = f"the team of {identity.user}"
        return {}


def test_run_by_other_user_does_not_change_owner_of_thread(
    settings: Settings, graphs: Graphs, gate: Gate
) -> None:
    """An admin runs a graph on a user's thread, and a user on the thread of a team."""
    gate.open.set()
    with SQLiteCheckpointer.open(settings.db) as saver:
        store_conversation(saver, "agent", user_id="ann")
    with (
        run_server(create_app(settings, graphs=graphs, access=TeamAccess())) as url,
        get_sync_client(url=url, headers={"x-user": "root"}) as root,
        get_sync_client(url=url, headers={"x-user": "bob"}) as bob,
    ):

        def owner(thread_id: str) -> Any:
            found: Any = root.threads.get(thread_id)["metadata"]
            return found["owner"]

        bob.threads.create(thread_id="t", graph_id="talk")
        root.runs.wait("agent", "talk", input=build_input("look"))
        threads: Any = bob.threads  # of which the annotations say that a copy returns nothing
        copied = threads.copy("agent")["thread_id"]
        again = threads.copy(copied)["thread_id"]
        for change in (
            lambda: bob.threads.update_state("t", {"heard": ["x"]}, as_node="hear"),
            lambda: bob.runs.wait("t", "talk", input=build_input("hi")),
            lambda: root.runs.wait("t", "talk", input=build_input("look")),
            lambda: root.threads.update_state("t", {"heard": ["x"]}, as_node="hear"),
        ):
            change()

            assert owner("t") == "the team of bob"
        assert owner("agent") == "ann"
        assert owner(copied) == owner(again) == "the team of bob"


# -- the newer protocol

v3 = pytest.mark.filterwarnings("ignore:The v3 streaming protocol")


@v3
def test_thread_stream_has_channels_for_values_and_interrupts(url: str) -> None:
    async def talk() -> None:
        async with (
            get_client(url=url) as client,
            client.threads.stream(assistant_id="ask") as thread,
        ):
            await thread.run.start(input=build_input("buy"))
            shown = [values async for values in thread.values]
            assert shown
            assert thread.interrupted
            assert [each["value"] for each in thread.interrupts] == ["Are you sure?"]
            await thread.run.respond("yes")
            assert (await thread.output)["heard"] == ["yes"]

    asyncio.run(talk())


@v3
def test_new_stream_session_does_not_receive_end_of_earlier_run(url: str, gate: Gate) -> None:
    gate.open.set()

    async def talk(text: str) -> Any:
        async with (
            get_client(url=url) as client,
            client.threads.stream("t", assistant_id="talk") as thread,
        ):
            await thread.run.start(input=build_input(text))
            return (await thread.output)["heard"]

    assert asyncio.run(talk("one")) == ["one"]
    assert asyncio.run(talk("two")) == ["one", "two"]
    assert asyncio.run(talk("three")) == ["one", "two", "three"]


REFUSED_COMMANDS: list[tuple[str, Any, str]] = [
    ("run.start", {"assistant_id": "none"}, "invalid_argument"),
    ("run.start", {"assistant_id": "none", "if_not_exists": "create"}, "invalid_argument"),
    ("run.start", {}, "invalid_argument"),
    ("input.respond", {"response": 1}, "invalid_argument"),
    ("input.respond", {"interrupt_id": "i", "response": 1}, "invalid_argument"),
    ("state.get", {}, "not_supported"),
]


def test_invalid_command_is_refused_with_error_code(
    sdk: SyncLangGraphClient, client: httpx.Client
) -> None:
    for method, params, code in REFUSED_COMMANDS:
        order = {"id": 7, "method": method, "params": params}
        reply = client.post("/threads/t/commands", json=order).json()

        assert (reply["type"], reply["id"], reply["error"]) == ("error", 7, code)


# -- the end of the server


def test_next_server_continues_runs_of_stopped_server(
    settings: Settings, graphs: Graphs, gate: Gate
) -> None:
    with run_server(create_app(settings, graphs=graphs)) as url, get_sync_client(url=url) as client:
        client.threads.create(thread_id="t")
        client.runs.create("t", "talk", input=build_input("one"))
        assert gate.reached.wait(60)
    with SQLiteCheckpointer.open(settings.db) as saver:
        assert [item.value.text for item in saver.history("t")] == ["one"]
    gate.open.set()
    with run_server(create_app(settings, graphs=graphs)) as url, get_sync_client(url=url) as client:
        client.runs.wait("t", "talk", input=build_input("two"))
        assert read_message_texts(client) == ["one", "heard 1", "two", "heard 2"]


def test_closing_waits_for_runs_that_were_dropped(settings: Settings) -> None:
    began, told = asyncio.Event(), []

    class Slow:
        def __init__(self, *_: Any) -> None:
            pass

        async def run_graph(self, *_: Any) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)
                told.append("tidied up")

        def build_run_end_events(self, *_: Any) -> list[Any]:
            return []

    async def use() -> None:
        databases = Databases(settings)
        limits = Limits(max_concurrent_requests=1)
        graphs = Graphs({"ask": build_asking_graph()})
        known = runs.RunManager(SharedRunState(graphs, limits, databases, {"run": Slow}))
        call = Call(Identity("ann"), "threads:create_run", LocalAccess("ann"), databases)
        await call.authorize_action_arguments()
        await call.threads.create("t")
        request = RunRequest(assistant_id="ask")
        run = await known.start_run(call.identity, request, "ask", "t", temporary=False)
        with pytest.raises(TooManyRequests):  # the requests of both were checked before
            await known.start_run(call.identity, request, "ask", "t", temporary=False)
        await began.wait()
        known.drop_runs_and_events_of_thread(None, "t")
        await known.aclose()

        assert (run.is_task_done, told) == (True, ["tidied up"])
        await databases.aclose()

    asyncio.run(use())


GRAPH_SOURCE = """
import asyncio
from pathlib import Path
from langgraph.graph import START, MessagesState, StateGraph

async def hear(state):
    return {"messages": [("ai", f"heard {len(state['messages'])}")]}

async def answer(state):
    while state["messages"][-2].text == "wait" and not Path("go on").exists():
        await asyncio.sleep(0.01)
    return {"messages": [("ai", "done")]}

def make():
    made = StateGraph(MessagesState).add_node(hear).add_node(answer)
    return made.add_edge(START, "hear").add_edge("hear", "answer")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_run_continues_after_server_process_was_killed(tmp_path: Path) -> None:
    """`perdure serve` with a langgraph.json is killed during a run and then started again."""
    (tmp_path / "made.py").write_text(GRAPH_SOURCE)
    (tmp_path / "langgraph.json").write_text(json.dumps({"graphs": {"made": "./made.py:make"}}))
    with serve_in_process(tmp_path) as (process, url), get_sync_client(url=url) as client:
        client.threads.create(thread_id="t")
        client.runs.create("t", "made", input=build_input("wait"))
        wait_until(lambda: len(client.threads.get_state("t")["values"].get("messages", ())) == 2)  # type: ignore[union-attr]
        assert client.threads.get("t")["status"] == "busy"
        process.kill()
        process.wait(20)
    with serve_in_process(tmp_path) as (process, url), get_sync_client(url=url) as client:
        assert read_message_texts(client) == ["wait", "heard 1"]
        assert client.threads.get("t")["status"] == "busy"
        (tmp_path / "go on").touch()
        client.runs.wait("t", "made", input=build_input("go on"))
        assert read_message_texts(client) == ["wait", "heard 1", "done", "go on", "heard 4", "done"]
        assert [run["status"] for run in client.runs.list("t")] == ["success"] * 2


@contextmanager
def serve_in_process(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start `perdure serve` in a new process, and yield the process and its address."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    options = {"--port": port, "--db": folder / "m.db", "--graphs": folder / "langgraph.json"}
    pairs = [str(part) for pair in options.items() for part in pair]
    command = [sys.executable, "-c", "from perdure.cli import main; main()", "serve", *pairs]
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"{url}/ok").is_success
        except httpx.TransportError:
            return False

    with subprocess.Popen(command, cwd=folder) as process:
        try:
            wait_until(answers)
            yield process, url
        finally:
            process.kill()
