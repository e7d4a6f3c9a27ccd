"""Parameters of new threads, and search of threads by their values."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from langgraph.graph import START, StateGraph
from langgraph_sdk import get_sync_client
from langgraph_sdk.errors import APIStatusError

from perdure.checkpointers import SQLiteCheckpointer
from perdure.server import api_threads, create_app
from perdure.server.graphs import Graphs
from perdure.server.runs import run_queue
from perdure.settings import Settings
from tests.server.running import run_server
from tests.server.talking import Gate, State, build_input, build_talk_graph

Sdk = Any  # a SyncLangGraphClient; its annotations are narrower than what it returns


@pytest.fixture
def url(settings: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(run_queue, "CLEANUP_INTERVAL_S", 0.2)
    two = StateGraph(State).add_node("one", lambda _: {}).add_node("two", lambda _: {})
    two.add_edge(START, "one").add_edge("one", "two")
    with run_server(
        create_app(settings, graphs=Graphs({"talk": build_talk_graph(gate), "two": two}))
    ) as address:
        yield address


@pytest.fixture
def sdk(url: str) -> Iterator[Sdk]:
    with get_sync_client(url=url) as client:
        yield client


def expect_refusal(why: str) -> Any:
    return pytest.raises(APIStatusError, match=why)


def is_deleted(sdk: Sdk, thread_id: str) -> bool:
    return not sdk.threads.search(ids=[thread_id])


# -- supersteps


def test_create_applies_supersteps_to_new_thread(sdk: Sdk) -> None:
    given = [{"role": "user", "content": "hello", "id": "m1"}]
    steps: list[Any] = [
        {"updates": [{"values": {"messages": given}, "as_node": "__start__"}]},
        {"updates": [{"values": {"heard": ["one"]}, "as_node": "one"}]},
    ]

    made = sdk.threads.create(graph_id="two", metadata={"topic": "figs"}, supersteps=steps)

    state = sdk.threads.get_state(made["thread_id"])
    assert made["values"]["heard"] == state["values"]["heard"] == ["one"]
    assert [each["content"] for each in state["values"]["messages"]] == ["hello"]
    assert state["next"] == ["two"]
    assert made["metadata"]["topic"] == "figs"
    assert len(sdk.threads.get_history(made["thread_id"])) == 2
    assert sdk.runs.wait(made["thread_id"], "two", input=None)["heard"] == ["one"]


def test_superstep_accepts_command_instead_of_values(sdk: Sdk) -> None:
    command = {"update": {"heard": ["by command"]}}
    steps: list[Any] = [{"updates": [{"values": None, "command": command, "as_node": "one"}]}]

    made = sdk.threads.create(graph_id="two", supersteps=steps)

    assert made["values"]["heard"] == ["by command"]


def test_invalid_supersteps_create_no_thread(sdk: Sdk) -> None:
    bad: list[Any] = [{"updates": [{"values": {"heard": ["x"]}, "as_node": "nope"}]}]
    graphs = (("two", "nope"), ("unknown", "names the graph"), (None, "names no graph"))
    for graph, why in graphs:
        with expect_refusal(why) as error:
            sdk.threads.create(thread_id="t", graph_id=graph, supersteps=bad)
        assert error.value.status_code == 422
    assert sdk.threads.count() == 0


# -- time to live


def test_thread_is_deleted_after_its_time_to_live(sdk: Sdk, settings: Settings) -> None:
    shown = sdk.threads.create(thread_id="t", ttl=0.001)["ttl"]
    sdk.threads.create(thread_id="stays", ttl={"ttl": 60, "strategy": "delete"})

    deadline = time.monotonic() + 60
    while not is_deleted(sdk, "t"):
        assert time.monotonic() < deadline
        time.sleep(0.05)

    assert (shown["strategy"], shown["ttl_minutes"]) == ("delete", 0.001)
    assert sdk.threads.get("stays", include=["ttl"])["ttl"]["ttl_minutes"] == 60
    with SQLiteCheckpointer.open(settings.db) as saver:
        assert [each.thread_id for each in saver.threads()] == []


def test_thread_with_run_is_kept_beyond_its_time_to_live(sdk: Sdk, gate: Gate) -> None:
    sdk.threads.create(thread_id="t")
    run = sdk.runs.create("t", "talk", input=build_input("hello"))["run_id"]
    assert gate.reached.wait(60)
    changed = sdk.threads.update("t", metadata={}, ttl=0.001)
    assert changed["ttl"]["ttl_minutes"] == 0.001
    sdk.threads.create(thread_id="witness", ttl=0.001)
    deadline = time.monotonic() + 60
    while not is_deleted(sdk, "witness"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert sdk.runs.get("t", run)["status"] == "running"

    gate.open.set()
    while not is_deleted(sdk, "t"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_keep_latest_strategy_keeps_newest_state(sdk: Sdk, gate: Gate) -> None:
    gate.open.set()
    sdk.threads.create(thread_id="t")
    sdk.runs.wait("t", "talk", input=build_input("hello"))
    assert len(sdk.threads.get_history("t")) > 1

    sdk.threads.update("t", metadata={"a": 1}, ttl={"ttl": 0.001, "strategy": "keep_latest"})

    deadline = time.monotonic() + 60
    while len(sdk.threads.get_history("t")) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert sdk.threads.get_state("t")["values"]["heard"] == ["hello"]
    assert sdk.threads.get("t")["ttl"]["strategy"] == "keep_latest"


@pytest.mark.parametrize(
    "ttl", [0, -1, {"ttl": 0}, {"strategy": "delete"}, {"ttl": 1, "strategy": "none"}, 1e300, "x"]
)
def test_invalid_time_to_live_is_refused(sdk: Sdk, url: str, ttl: Any) -> None:
    sdk.threads.create(thread_id="t")
    body = {"thread_id": "new", "ttl": ttl}

    assert httpx.post(f"{url}/threads", json=body).status_code == 422
    assert httpx.patch(f"{url}/threads/t", json={"ttl": ttl}).status_code == 422
    assert httpx.get(f"{url}/threads/t", params={"include": "nope"}).status_code == 422
    assert sdk.threads.count() == 1


# -- values


@pytest.fixture
def sdk_with_threads(sdk: Sdk, gate: Gate) -> Sdk:
    """A client of a server with three threads, one of them without a run."""
    gate.open.set()
    for thread_id, text in (("a", "apples"), ("b", "bears")):
        sdk.threads.create(thread_id=thread_id)
        sdk.runs.wait(thread_id, "talk", input=build_input(text))
    sdk.threads.create(thread_id="empty")
    return sdk


def thread_ids(found: list[Any]) -> list[str]:
    return [thread["thread_id"] for thread in found]


def test_threads_are_found_and_counted_by_values(sdk_with_threads: Sdk) -> None:
    search, count = sdk_with_threads.threads.search, sdk_with_threads.threads.count

    assert thread_ids(search(values={"heard": ["apples"]})) == ["a"]
    assert thread_ids(search(values={"messages": [{"type": "human", "content": "bears"}]})) == ["b"]
    both = {"messages": [{"type": "ai"}]}
    assert thread_ids(search(values=both, sort_by="thread_id", sort_order="asc")) == ["a", "b"]
    assert thread_ids(
        search(values=both, sort_by="thread_id", sort_order="asc", limit=1, offset=1)
    ) == ["b"]
    assert thread_ids(search(values={"heard": ["cats"]})) == []
    assert [count(values=each) for each in (both, {"heard": ["apples"]}, {"x": 1}, None)] == [
        *(2, 1, 0, 3)
    ]
    [row] = search(values={"heard": ["apples"]}, select=["thread_id"])
    assert row == {"thread_id": "a"}


def test_search_by_values_is_refused_beyond_thread_limit(
    sdk_with_threads: Sdk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_threads, "MAX_THREADS_READ", 2)

    with expect_refusal("a search by 'values' can scan at most 2 threads"):
        sdk_with_threads.threads.search(values={"heard": ["cats"]})
    with expect_refusal("a search by 'values' can scan at most 2 threads"):
        sdk_with_threads.threads.count(values={"heard": ["cats"]})
    assert thread_ids(
        sdk_with_threads.threads.search(values={"heard": ["apples"]}, ids=["a", "b"])
    ) == ["a"]


def test_search_extracts_values_at_paths(sdk_with_threads: Sdk) -> None:
    paths = {
        "last": "values.messages[-1].content",
        "first": "values.messages[0].type",
        "heard": "values.heard",
        "graph": "metadata.graph_id",
        "nothing": "values.messages[9].content",
        "no_list": "status[0]",
    }
    [row] = sdk_with_threads.threads.search(ids=["a"], select=["thread_id"], extract=paths)
    [empty] = sdk_with_threads.threads.search(ids=["empty"], extract=paths)

    assert row == {
        "thread_id": "a",
        "extracted": {
            "last": "heard 1",
            "first": "human",
            "heard": ["apples"],
            "graph": "talk",
            "nothing": None,
            "no_list": None,
        },
    }
    assert {*empty["extracted"].values()} == {None}


@pytest.mark.parametrize("path", ["", "a..b", "a[x]", "[0]", "a[0", ".a"])
def test_invalid_extract_path_is_refused(sdk: Sdk, path: str) -> None:
    with expect_refusal("extract"):
        sdk.threads.search(extract={"x": path})
    with expect_refusal("extract"):
        sdk.threads.search(extract={str(number): "values" for number in range(11)})
    with expect_refusal("select"):
        sdk.threads.search(select=["nope"])
