"""Runs by langgraph's SDK: what is streamed, who waits for whom, what a left run leaves."""

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
from perdure.checkpointers.records import LiveRun
from perdure.checkpointers.runs import RunTable
from perdure.graphs import chat_graph
from perdure.memory import views
from perdure.server import create_app, run_queue, runs
from perdure.server.access import Action, Filter, Identity, LocalAccess
from perdure.server.call import Call
from perdure.server.databases import Databases
from perdure.server.graphs import Graphs
from perdure.server.limits import Limits, TooManyRequests
from perdure.server.run_request import RunRequest
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
from tests.talks import store_conversation as conversation


@pytest.fixture
def graphs(gate: Gate) -> Graphs:
    made = {
        "ask": build_asking_graph().compile(),
        "fail": build_failing_graph(),
        "model": build_model_graph(),
        "who": lambda: build_identity_graph(),
    }
    return Graphs({"talk": build_talk_graph(gate), "chat": chat_graph(), **made})


def texts(sdk: SyncLangGraphClient, thread_id: str = "t") -> list[str]:
    values: Any = sdk.threads.get_state(thread_id)["values"]
    return [message["content"] for message in values["messages"]]


def body(text: str = "hello", **options: Any) -> dict[str, Any]:
    return {"assistant_id": "talk", "input": build_input(text), **options}


# -- what is streamed


def test_a_stream_begins_with_its_run_and_ends_with_its_values(
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
    assert texts(sdk) == ["hello", "heard 1"]


def test_messages_are_streamed_as_they_grow(sdk: SyncLangGraphClient) -> None:
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


def test_events_of_langchain_are_streamed_beside_other_modes(
    sdk: SyncLangGraphClient, gate: Gate
) -> None:
    """The others are the same with them and without."""
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


def test_a_run_that_streams_events_is_cancelled(sdk: SyncLangGraphClient, gate: Gate) -> None:
    run = sdk.runs.create("t", "talk", input=build_input("go"), stream_mode="events")["run_id"]
    assert gate.reached.wait(60)

    sdk.runs.cancel("t", run, wait=True)

    assert sdk.runs.get("t", run)["status"] == "interrupted"
    assert sdk.threads.get_state("t")["values"]["heard"] == ["go"]  # type: ignore[call-overload]


@pytest.mark.parametrize(("during", "stored"), [(True, 4), (False, 1)])
def test_the_former_name_of_durability_counts(
    sdk: SyncLangGraphClient, gate: Gate, during: bool, stored: int
) -> None:
    gate.open.set()
    with pytest.warns(DeprecationWarning, match="checkpoint_during"):
        sdk.runs.wait("t", "talk", input=build_input("go"), checkpoint_during=during)

    assert len(sdk.threads.get_history("t")) == stored


def test_what_the_model_saw_is_recorded(sdk: SyncLangGraphClient, settings: Settings) -> None:
    sdk.runs.wait("t", "chat", input=build_input("I like figs"))

    with SQLiteCheckpointer.open(settings.db) as saver:
        [view] = views(saver, "t")
    assert [message.text for message in view.messages][-1] == "I like figs"


@pytest.mark.parametrize("more", [[], ["events"]])
def test_streams_tell_nothing_of_the_login(
    settings: Settings, graphs: Graphs, more: list[Any]
) -> None:
    with (
        run_server(create_app(settings, graphs=graphs, access=Named())) as url,
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


def test_a_graph_that_fails_says_what_and_not_where(sdk: SyncLangGraphClient, gate: Gate) -> None:
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


def test_an_interrupt_is_answered_by_a_command(sdk: SyncLangGraphClient) -> None:
    waiting: Any = sdk.runs.wait("t", "ask", input=build_input("buy"))

    assert [each["value"] for each in waiting["__interrupt__"]] == ["Are you sure?"]
    assert [run["status"] for run in sdk.runs.list("t")] == ["interrupted"]
    assert sdk.threads.get("t")["status"] == "interrupted"
    assert sdk.runs.wait("t", "ask", command={"resume": "yes"})["heard"] == ["yes"]  # type: ignore[call-overload]
    assert sdk.threads.get("t")["status"] == "idle"


def test_a_thread_whose_question_an_update_answers_is_idle(sdk: SyncLangGraphClient) -> None:
    sdk.runs.wait("t", "ask", input={})
    sdk.threads.update_state("t", {"heard": ["yes"]}, as_node="hear")

    assert sdk.threads.get_state("t")["next"] == []
    assert sdk.threads.get("t")["status"] == "idle"


def test_a_run_that_stops_before_a_node_is_interrupted(
    sdk: SyncLangGraphClient, gate: Gate
) -> None:
    gate.open.set()
    stopped: Any = sdk.runs.wait(
        "t", "talk", input=build_input("hello"), interrupt_before=["answer"]
    )

    assert stopped["heard"] == ["hello"]
    assert sdk.threads.get("t")["status"] == "interrupted"
    sdk.runs.wait("t", "talk")
    assert texts(sdk) == ["hello", "heard 1"]


def test_a_run_goes_on_from_a_checkpoint(sdk: SyncLangGraphClient, gate: Gate) -> None:
    gate.open.set()
    for text in ("one", "two"):
        sdk.runs.wait("t", "talk", input=build_input(text))
    after_one = next(s for s in sdk.threads.get_history("t") if len(s["values"]["messages"]) == 2)  # type: ignore[call-overload]

    sdk.runs.wait("t", "talk", input=build_input("other"), checkpoint=after_one["checkpoint"])

    assert texts(sdk) == ["one", "heard 1", "other", "heard 2"]


def test_the_user_is_whoever_asks(sdk: SyncLangGraphClient) -> None:
    config: Any = {"configurable": {"colour": 0, "user_id": "ann"}}

    values: Any = sdk.runs.wait("t", "who", input={}, config=config)

    assert values["heard"] == ["ann", "t", "0"]


def test_a_run_without_a_thread_leaves_none(sdk: SyncLangGraphClient, gate: Gate) -> None:
    gate.open.set()
    parts = list(sdk.runs.stream(None, "talk", input=build_input("hello")))
    values: Any = sdk.runs.wait(None, "talk", input=build_input("hello"))

    assert parts[-1].data["heard"] == values["heard"] == ["hello"]
    assert [thread["thread_id"] for thread in sdk.threads.search()] == ["t"]


@pytest.mark.parametrize(
    "place",
    [
        {"checkpoint_id": "1f1e71fc-53de-6a0e-8005-e771d5265d49"},
        {"config": {"configurable": {"checkpoint_id": "1f1e71fc-53de-6a0e-8005-e771d5265d49"}}},
        {"checkpoint": {"checkpoint_map": {"": "1f1e71fc-53de-6a0e-8005-e771d5265d49"}}},
    ],
    ids=["checkpoint_id", "configurable", "checkpoint_map"],
)
def test_a_run_at_an_unknown_checkpoint_is_refused(
    sdk: SyncLangGraphClient, client: httpx.Client, gate: Gate, place: dict[str, Any]
) -> None:
    gate.open.set()
    sdk.runs.wait("t", "talk", input=build_input("one"))

    answer = client.post("/threads/t/runs/wait", json=body("two", **place))

    assert texts(sdk) == ["one", "heard 1"]
    assert answer.status_code == 404


def test_a_served_graph_is_a_node_of_another(sdk: SyncLangGraphClient, gate: Gate) -> None:
    gate.open.set()
    remote = RemoteGraph("talk", sync_client=sdk)
    outer = StateGraph(MessagesState).add_node("remote", remote).add_edge(START, "remote").compile()

    given: Any = build_input("hello")
    found = outer.invoke(given)

    assert [message.text for message in found["messages"]][-1] == "heard 1"


def test_a_client_does_not_say_what_the_server_does(sdk: SyncLangGraphClient, gate: Gate) -> None:
    """What it has in its metadata of that, as a graph that calls this one has, is left out."""
    gate.open.set()
    said: Any = {"user_id": "bob", "owner": "bob", "run_id": "r", "langgraph_step": 1, "n": 1}
    config: Any = {"metadata": said | {"m": 2}}

    sdk.runs.wait("t", "talk", input=build_input("hello"), metadata=said, config=config)

    stored: Any = sdk.threads.get_state("t")["metadata"]
    run: Any = sdk.runs.list("t")[0]
    assert (stored["user_id"], stored["run_id"]) == ("ann", run["run_id"])
    assert (stored["n"], stored["m"], "owner" in stored) == (1, 2, False)
    assert run["metadata"] == {"n": 1, "graph_id": "talk"}


def test_null_is_as_good_as_nothing(client: httpx.Client, gate: Gate) -> None:
    gate.open.set()
    names = [name for name in RunRequest.model_fields if name not in ("assistant_id", "input")]
    config = {"tags": None, "configurable": {"checkpoint_map": None}, "metadata": None}
    for nulls in (dict.fromkeys(names), {"config": config}):
        assert client.post("/runs/wait", json={**body(), **nulls}).json()["heard"] == ["hello"]


# -- runs that overlap


def test_two_turns_at_once_are_one_after_the_other(sdk: SyncLangGraphClient, gate: Gate) -> None:
    made = [
        sdk.runs.create("t", "talk", input=build_input(text)) for text in ("one", "two", "three")
    ]
    assert gate.reached.wait(60)
    with pytest.raises(ConflictError, match="under way"):
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
    ("strategy", "left"),
    [("interrupt", ["one", "two", "heard 2"]), ("rollback", ["two", "heard 1"])],
)
def test_a_turn_may_stop_the_one_before(
    sdk: SyncLangGraphClient, gate: Gate, strategy: Any, left: list[str]
) -> None:
    first = sdk.runs.create("t", "talk", input=build_input("one"))
    assert gate.reached.wait(60)
    second = sdk.runs.create("t", "talk", input=build_input("two"), multitask_strategy=strategy)
    kept = {first["run_id"]: "interrupted"} if strategy == "interrupt" else {}
    known = {second["run_id"]: "running"}
    wait_until(lambda: {run["run_id"]: run["status"] for run in sdk.runs.list("t")} == kept | known)
    gate.open.set()
    sdk.runs.join("t", second["run_id"])

    assert texts(sdk) == left
    if strategy == "rollback":
        with pytest.raises(NotFoundError):
            sdk.runs.get("t", first["run_id"])


def test_a_cancelled_run_leaves_what_it_had_stored(sdk: SyncLangGraphClient, gate: Gate) -> None:
    run = sdk.runs.create("t", "talk", input=build_input("one"))
    waiting = sdk.runs.create("t", "talk", input=build_input("never"))
    assert gate.reached.wait(60)
    sdk.runs.cancel("t", waiting["run_id"])
    sdk.runs.cancel("t", run["run_id"], wait=True)

    assert sdk.runs.get("t", run["run_id"])["status"] == "interrupted"
    gate.open.set()
    sdk.runs.wait("t", "talk", input=build_input("two"))
    assert texts(sdk) == ["one", "two", "heard 2"]


def test_a_thread_that_is_deleted_in_a_run_stays_deleted(
    sdk: SyncLangGraphClient, gate: Gate
) -> None:
    sdk.runs.create("t", "talk", input=build_input("one"))
    assert gate.reached.wait(60)
    sdk.threads.delete("t")
    gate.open.set()

    with pytest.raises(NotFoundError):
        sdk.threads.get("t")
    assert sdk.threads.search() == []


def test_a_page_deletes_a_thread_in_a_run_as_rest_does(
    sdk: SyncLangGraphClient, client: httpx.Client, gate: Gate
) -> None:
    run = sdk.runs.create("t", "talk", input=build_input("one"))
    assert gate.reached.wait(60)
    deleted = client.post("/ui/delete?id=t")

    assert (deleted.status_code, deleted.headers["location"]) == (303, "/ui/threads")
    with pytest.raises(NotFoundError):
        sdk.runs.get("t", run["run_id"])
    assert sdk.threads.search() == []


def test_half_an_emoji_ends_no_run(client: httpx.Client) -> None:
    """A lone surrogate in a client's JSON is a question mark in the thread."""
    headers = {"content-type": "application/json"}
    asked = json.dumps({**body("half \ud83d"), "assistant_id": "chat"})
    client.post("/threads", json={"thread_id": "t"})
    for _ in range(2):
        ran = client.post("/threads/t/runs/wait", content=asked, headers=headers)
        said = client.get("/threads/t/state").json()["values"]["messages"]

        assert ran.status_code == 200
        assert [message["content"] for message in said][0::2] == ["half ?"] * (len(said) // 2)
        assert client.get("/ui/thread?id=t").status_code == 200


def test_a_thread_that_is_pruned_in_a_run_stays_deleted(client: httpx.Client, gate: Gate) -> None:
    client.post("/threads", json={"thread_id": "t"})
    with client.stream("POST", "/threads/t/runs/stream", json=body("one")) as events:
        assert gate.reached.wait(60)
        pruned = client.post("/threads/prune", json={"thread_ids": ["t"]})
        gate.open.set()
        events.read()  # to the end of the run

    assert pruned.status_code == 409 or client.get("/threads/t").status_code == 404


def test_a_thread_that_another_server_runs_is_not_deleted_under_it(
    client: httpx.Client, settings: Settings, graphs: Graphs, gate: Gate
) -> None:
    client.post("/threads", json={"thread_id": "t"})
    with (
        client.stream("POST", "/threads/t/runs/stream", json=body("one")) as events,
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


def test_a_run_that_is_sent_during_a_deletion_does_not_bring_the_thread_back(
    settings: Settings, gate: Gate
) -> None:
    second, told = Gate(), threading.Event()
    served = Graphs({"stubborn": build_uncancellable_graph(gate, second, told)})
    asked = {"assistant_id": "stubborn", "input": {}}
    with (
        run_server(create_app(settings, graphs=served)) as url,
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


def test_a_run_that_waits_does_not_bring_a_deleted_thread_back(
    sdk: SyncLangGraphClient, client: httpx.Client, settings: Settings, gate: Gate
) -> None:
    gate.open.set()
    with SQLiteCheckpointer.open(settings.db) as saver, ExitStack() as streaming:
        conversation(saver, "agent")
        with saver.lock("agent"):
            asked = client.stream("POST", "/threads/agent/runs/stream", json=body())
            events = streaming.enter_context(asked)
            saver.delete_thread("agent")
        told = events.read().decode()

    assert "UnknownThread" in told
    assert [thread["thread_id"] for thread in sdk.threads.search()] == ["t"]


def test_an_update_does_not_bring_a_deleted_thread_back(settings: Settings) -> None:
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


def test_rows_that_were_read_before_a_run_began_do_not_stop_it(
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
    served = Graphs({"stubborn": build_uncancellable_graph(gate, second, told)})
    asked = {"assistant_id": "stubborn", "input": {}}
    with (
        run_server(create_app(settings, graphs=served)) as url,
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


def test_a_thread_whose_run_does_not_end_is_not_deleted(
    settings: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "END_TIMEOUT_S", 0.05)
    served = Graphs({"stubborn": build_uncancellable_graph(gate, Gate(), threading.Event())})
    with (
        run_server(create_app(settings, graphs=served)) as url,
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


def test_a_thread_that_is_rewound_asks_no_more(
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
    ("mode", "left"),
    [
        ("cancel", ["one", "two", "heard 2"]),
        ("continue", ["one", "heard 1", "two", "heard 2"]),
    ],
)
def test_the_turn_after_a_left_one_has_everything(
    sdk: SyncLangGraphClient, url: str, gate: Gate, path: str, mode: str, left: list[str]
) -> None:
    with httpx.Client(base_url=url) as client:
        asked = body("one", on_disconnect=mode)
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

    assert texts(sdk) == left


def test_a_head_of_a_stream_leaves_its_run(
    sdk: SyncLangGraphClient, client: httpx.Client, gate: Gate
) -> None:
    """It is answered while the run is under way, and cancels nothing."""
    run = sdk.runs.create("t", "talk", input=build_input("hello"))["run_id"]
    assert gate.reached.wait(60)
    path = f"/threads/t/runs/{run}/stream"
    reply = client.head(path, params={"cancel_on_disconnect": True})
    gate.open.set()

    assert reply.headers["content-type"].startswith("text/event-stream")
    sdk.runs.join("t", run)
    assert sdk.runs.get("t", run)["status"] == "success"


def test_a_stream_is_read_again_after_an_event(sdk: SyncLangGraphClient, gate: Gate) -> None:
    run = sdk.runs.create("t", "talk", input=build_input("hello"), stream_resumable=True)
    assert gate.reached.wait(60)
    first = next(part for part in sdk.runs.join_stream("t", run["run_id"]) if part.id)
    gate.open.set()
    rest = list(sdk.runs.join_stream("t", run["run_id"], last_event_id=first.id))
    again = list(sdk.runs.join_stream("t", run["run_id"], stream_mode="values"))

    assert [part.event for part in rest] == ["values", "values"]
    assert [part.event for part in again] == ["metadata", "values", "values", "values"]
    assert [part.id for part in again if part.event == "values"] == ["1", "2", "3"]


def test_the_oldest_runs_are_forgotten(
    sdk: SyncLangGraphClient, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_queue, "RETAINED_ENDED_RUNS", 1)
    monkeypatch.setattr("perdure.checkpointers.runs.MAX_ENDED_RUNS", 2)
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
    for each, why in ((made[1], "no longer kept"), (made[0], "only the last 2 ended")):
        with pytest.raises(APIStatusError, match=why):
            list(sdk.runs.join_stream("t", each))


# -- what is refused


REFUSED: list[tuple[Any, int, str]] = [
    ({"config": {"configurable": {"user_id": "bob"}}}, 422, "'user_id' is 'bob'"),
    ({"config": {"configurable": {"owner": "bob"}}}, 422, "'owner' is 'bob'"),
    ({"context": {"user_id": " "}}, 403, "the person is ' '"),
    ({"context": {"owner": "bob", "user_id": "ann"}}, 422, "'owner' is 'bob'"),
    ({"config": {"configurable": {"run_id": "r"}}}, 422, "'run_id' is 'r'"),
    ({"config": {"configurable": {"checkpoint_id": 5}}}, 422, "checkpoint_id is 5"),
    ({"checkpoint": {"checkpoint_map": "x"}}, 422, "checkpoint_map is 'x'"),
    ({"config": {"configurable": {"thread_id": "other"}}}, 422, "'thread_id' is 'other'"),
    ({"config": {"configurable": {"__pregel_store": 1}}}, 422, "'__pregel_store' is 1"),
    ({"config": {"configurable": {"langgraph_auth_user": {}}}}, 422, "'langgraph_auth_user'"),
    ({"checkpoint": {"thread_id": "other"}}, 422, "'thread_id' is 'other'"),
    ({"config": {"recursion_limit": 100_000}}, 422, "recursion_limit"),
    ({"webhook": "http://a.b"}, 422, "webhook is 'http://a.b', but this server calls no host"),
    ({"after_seconds": -5}, 422, "after_seconds"),
    ({"after_seconds": 1e12}, 422, "after_seconds"),
    ({"after_seconds": 5, "multitask_strategy": "reject"}, 422, "cannot be combined"),
    ({"command": {"update": "x"}}, 422, "command.update"),
    ({"command": [1]}, 422, "command is [1]"),
    ({"stream_mode": "nope"}, 422, "stream_mode"),
    ({"feedback_keys": ["like"]}, 422, "feedback_keys is ['like']"),
    ({"langsmith_tracer": {"project_name": "p"}}, 422, "langsmith_tracer is"),
    ({"assistant_id": "none"}, 422, "the graphs are talk, chat"),
    ({"assistant_id": 5}, 422, "assistant_id"),
]


def test_a_run_is_refused_with_a_sentence(sdk: SyncLangGraphClient, client: httpx.Client) -> None:
    for asked, status, why in REFUSED:
        reply = client.post("/threads/t/runs/wait", json={**body(), **asked})

        assert (reply.status_code, why in reply.text) == (status, True), reply.text
    assert sdk.runs.list("t") == []


@pytest.mark.parametrize("path", ["/runs/wait", "/threads/new/runs/wait"])
def test_a_run_that_is_refused_writes_nothing(client: httpx.Client, path: str) -> None:
    asked = body(assistant_id="nope") | ({"if_not_exists": "create"} if "new" in path else {})
    lost = asked | {"assistant_id": "talk", "checkpoint_id": "1f1e71fc-53de-6a0e-8005-e771d5265d49"}

    answer = client.post(path, json=asked)

    assert answer.status_code == 422
    assert client.post(path, json=lost).status_code == 404
    assert client.post("/threads/count", json={}).json() == 0


def test_an_unknown_choice_in_a_query_is_refused(
    sdk: SyncLangGraphClient, client: httpx.Client, gate: Gate
) -> None:
    gate.open.set()
    run = sdk.runs.create("t", "talk", input=build_input("one"))

    path = f"/threads/t/runs/{run['run_id']}/stream"
    assert client.get(path, params={"stream_mode": "nope"}).status_code == 422
    assert client.get("/threads/t/runs", params={"status": "nope"}).status_code == 422


def test_what_is_unknown_is_not_found(sdk: SyncLangGraphClient, gate: Gate) -> None:
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
    assert texts(sdk, "a/b") == ["hello", "heard 1"]


class Named(LocalAccess):
    """Believes a header, and shows everybody their own threads."""

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


def test_runs_of_others_are_unknown(settings: Settings, graphs: Graphs, gate: Gate) -> None:
    with (
        run_server(create_app(settings, graphs=graphs, access=Named())) as url,
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
                client.post("/threads/t/runs", json=body()),
                client.post("/threads/t/stream/events", json={"channels": ["values"]}),
                client.post(
                    "/threads/t/commands",
                    json={"id": 1, "method": "run.start", "params": {**body()}},
                ),
            ]
        gate.open.set()
        ann.runs.join("t", run["run_id"])
        assert [each.status_code for each in tries][:-1] == [404] * 7
        assert tries[-1].status_code in (404, 409)
        assert texts(ann) == ["secret", "heard 1"]
        assert bob.threads.search() == []


class Team(Named):
    """Shows root everything; the threads that others make are their team's."""

    async def authorize_and_build_filter(
        self, identity: Identity, action: Action, value: dict[str, Any]
    ) -> Filter:
        if identity.user == "root":
            return {}
        if action == "threads:create":
            value["metadata"]["owner"] = f"the team of {identity.user}"
        return {}


def test_a_run_leaves_a_thread_to_its_owner(settings: Settings, graphs: Graphs, gate: Gate) -> None:
    """Whoever runs it: an admin on the thread of an agent, a user on that of a team."""
    gate.open.set()
    with SQLiteCheckpointer.open(settings.db) as saver:
        conversation(saver, "agent", user_id="ann")
    with (
        run_server(create_app(settings, graphs=graphs, access=Team())) as url,
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
def test_a_thread_is_streamed_by_channels(url: str) -> None:
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
def test_a_second_session_is_not_told_of_the_first_ones_end(url: str, gate: Gate) -> None:
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


COMMANDS: list[tuple[str, Any, str]] = [
    ("run.start", {"assistant_id": "none"}, "invalid_argument"),
    ("run.start", {"assistant_id": "none", "if_not_exists": "create"}, "invalid_argument"),
    ("run.start", {}, "invalid_argument"),
    ("input.respond", {"response": 1}, "invalid_argument"),
    ("input.respond", {"interrupt_id": "i", "response": 1}, "invalid_argument"),
    ("state.get", {}, "not_supported"),
]


def test_a_command_is_refused_by_its_code(sdk: SyncLangGraphClient, client: httpx.Client) -> None:
    for method, params, code in COMMANDS:
        order = {"id": 7, "method": method, "params": params}
        reply = client.post("/threads/t/commands", json=order).json()

        assert (reply["type"], reply["id"], reply["error"]) == ("error", 7, code)


# -- the end of the server


def test_a_server_that_stops_leaves_its_runs_to_the_next(
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
        assert texts(client) == ["one", "heard 1", "two", "heard 2"]


def test_runs_that_are_forgotten_are_waited_for(settings: Settings) -> None:
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

        def build_closing_events(self, *_: Any) -> list[Any]:
            return []

    async def use() -> None:
        databases = Databases(settings)
        limits = Limits(max_concurrent_requests=1)
        known = runs.Runs(Graphs({"ask": build_asking_graph()}), limits, databases, {"run": Slow})
        call = Call(Identity("ann"), "threads:create_run", LocalAccess("ann"), databases)
        await call.authorize_arguments()
        await call.threads.create("t")
        request = RunRequest(assistant_id="ask")
        run = await known.start_run(call, request, "ask", "t", temporary=False)
        with pytest.raises(TooManyRequests):  # the requests of both were checked before
            await known.start_run(call, request, "ask", "t", temporary=False)
        await began.wait()
        known.drop_runs_and_events_of_thread(None, "t")
        await known.aclose()

        assert (run.has_ended, told) == (True, ["tidied up"])
        await databases.aclose()

    asyncio.run(use())


GRAPH = """
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
def test_a_thread_goes_on_after_kill_9(tmp_path: Path) -> None:
    """`perdure serve` with a langgraph.json, killed in a run; then started again."""
    (tmp_path / "made.py").write_text(GRAPH)
    (tmp_path / "langgraph.json").write_text(json.dumps({"graphs": {"made": "./made.py:make"}}))
    with served(tmp_path) as (process, url), get_sync_client(url=url) as client:
        client.threads.create(thread_id="t")
        client.runs.create("t", "made", input=build_input("wait"))
        wait_until(lambda: len(client.threads.get_state("t")["values"].get("messages", ())) == 2)  # type: ignore[union-attr]
        assert client.threads.get("t")["status"] == "busy"
        process.kill()
        process.wait(20)
    with served(tmp_path) as (process, url), get_sync_client(url=url) as client:
        assert texts(client) == ["wait", "heard 1"]
        assert client.threads.get("t")["status"] == "busy"
        (tmp_path / "go on").touch()
        client.runs.wait("t", "made", input=build_input("go on"))
        assert texts(client) == ["wait", "heard 1", "done", "go on", "heard 4", "done"]
        assert [run["status"] for run in client.runs.list("t")] == ["success"] * 2


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`perdure serve` in a process of its own, and its address."""
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
