"""Threads by langgraph's SDK, against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from langgraph.graph import START, StateGraph
from langgraph_sdk import get_client, get_sync_client
from langgraph_sdk.errors import (
    ConflictError,
    NotFoundError,
    PermissionDeniedError,
    UnprocessableEntityError,
)

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs import chat_graph
from perdure.server import create_app
from perdure.server.http.access import Access, Filter, Identity
from perdure.settings import Settings
from tests.contracts.puts import put
from tests.server.graphs import Chats, asking_graph, run_asking_graph, run_chat_turns
from tests.server.running import run_server

Sdk = Any  # a SyncLangGraphClient; its annotations are narrower than what it returns
SharedClients = tuple[Sdk, httpx.Client]
ODD_IDS = ["a/b", "..", ".", "ünï ¢ode 💬", "a?b#c", "%2F", 'q"<script>', "a b", "a%00b"]


@pytest.fixture
def url(settings: Settings) -> Iterator[str]:
    """The address of a server with graphs."""
    graphs: Any = Chats()
    app = create_app(settings, graphs=graphs)
    with run_server(app) as address:
        yield address


@pytest.fixture(scope="module")
def shared_clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedClients]:
    """Clients of a server with a thread, shared by tests that do not change its data."""
    settings = Settings(db=str(tmp_path_factory.mktemp("server") / "memory.db"), user="ann")
    run_chat_turns(settings, "t", "one", graph_id="chat")
    graphs: Any = Chats()
    app = create_app(settings, graphs=graphs)
    with (
        run_server(app) as address,
        get_sync_client(url=address, api_key=None) as sdk,
        httpx.Client(base_url=address) as client,
    ):
        yield sdk, client


@pytest.fixture
def sdk(url: str) -> Iterator[Sdk]:
    """The SDK's client of the server."""
    with get_sync_client(url=url, api_key=None) as client:
        yield client


def list_message_texts(state: Any) -> list[str]:
    return [message["content"] for message in state["values"].get("messages", ())]


def list_thread_ids(threads: Any) -> list[str]:
    return [thread["thread_id"] for thread in threads]


# -- threads


def test_thread_is_created_read_and_deleted(sdk: Sdk) -> None:
    made = sdk.threads.create(metadata={"label": "one"}, graph_id="chat")
    found = sdk.threads.get(made["thread_id"])

    assert found == made
    assert found["metadata"] == {"label": "one", "graph_id": "chat"}
    assert (found["status"], found["values"], found["interrupts"]) == ("idle", None, {})
    assert found["created_at"] <= found["updated_at"]

    sdk.threads.delete(made["thread_id"])

    with pytest.raises(NotFoundError, match="no thread"):
        sdk.threads.get(made["thread_id"])
    assert sdk.threads.search() == []


def test_creating_thread_with_taken_id_conflicts_or_returns_it(sdk: Sdk) -> None:
    sdk.threads.create(thread_id="mine", metadata={"n": 1})

    again = sdk.threads.create(thread_id="mine", metadata={"n": 2}, if_exists="do_nothing")

    assert again["metadata"] == {"n": 1}
    with pytest.raises(ConflictError):
        sdk.threads.create(thread_id="mine")


async def create_thread_concurrently(url: str, times: int) -> list[Any]:
    async with get_client(url=url, api_key=None) as client:
        making = [client.threads.create(thread_id="t", metadata={"n": n}) for n in range(times)]
        return list(await asyncio.gather(*making, return_exceptions=True))


def test_only_one_of_concurrent_creations_of_thread_succeeds(url: str) -> None:
    found = asyncio.run(create_thread_concurrently(url, 12))

    assert sum(not isinstance(each, Exception) for each in found) == 1
    assert {type(each) for each in found if isinstance(each, Exception)} == {ConflictError}


LARGE_METADATA = {"text": "x" * 64_000}
DEEP_METADATA: dict[str, Any] = {"a": [[[[[[[{}]]]]]]]}
LARGEST_METADATA = {"a": [[[[[[[1]]]]]]], "text": "x" * 63_000}


@pytest.mark.parametrize(
    ("metadata", "limit"),
    [
        (LARGE_METADATA, "at most 64000 bytes are allowed"),
        (DEEP_METADATA, "at most 8 levels"),
        ({"a": [{"b": 2**64}]}, "integer of 65 bits"),
    ],
)
def test_requests_with_too_large_or_deep_metadata_are_refused(
    metadata: Any, limit: str, shared_clients: SharedClients
) -> None:
    """Thread creations, updates, runs, run configs and searches are refused; nothing is written."""
    sdk, client = shared_clients
    run = {"assistant_id": "chat", "input": {"messages": []}, "if_not_exists": "create"}
    before = sdk.threads.get("t")
    for method, path, body in (
        ("POST", "/threads", {"thread_id": "new", "metadata": metadata}),
        ("PATCH", "/threads/t", {"metadata": metadata}),
        ("POST", "/threads/new/runs", {**run, "metadata": metadata}),
        ("POST", "/threads/new/runs/wait", {**run, "config": {"metadata": metadata}}),
        ("POST", "/threads/search", {"metadata": metadata}),
    ):
        refused = client.request(method, path, json=body)
        assert (refused.status_code, limit in refused.text) == (422, True), (path, refused.text)

    assert sdk.threads.get("t") == before
    assert client.get("/threads/new").status_code == 404


def test_run_with_too_large_configurable_is_refused(shared_clients: SharedClients) -> None:
    """langgraph stores the strings of `configurable` in the metadata of checkpoints."""
    body = {"assistant_id": "chat", "input": {}, "config": {"configurable": LARGE_METADATA}}
    refused = shared_clients[1].post("/threads/t/runs", json=body)

    assert (refused.status_code, "at most 64000" in refused.text) == (422, True)


def test_thread_update_is_refused_if_merged_metadata_is_too_large(sdk: Sdk) -> None:
    """The limit applies to the stored and the added metadata together."""
    sdk.threads.create(thread_id="t", metadata=LARGEST_METADATA)
    with pytest.raises(UnprocessableEntityError, match="at most 64000"):
        sdk.threads.update("t", metadata={"more": "x" * 2_000})

    assert sdk.threads.get("t")["metadata"] == LARGEST_METADATA
    assert sdk.threads.update("t", metadata={"text": "x"})["metadata"]["text"] == "x"


def test_search_filter_with_too_many_nested_lists_is_refused(shared_clients: SharedClients) -> None:
    """Each nested list may have to be compared with every element of a stored list."""
    sdk, client = shared_clients
    asked: Any = {"a": [[n] for n in range(11)]}
    refused = client.post("/threads/search", json={"metadata": asked})

    assert (refused.status_code, "at most 10 are allowed" in refused.text) == (422, True)
    assert sdk.threads.search(metadata={"a": [[n] for n in range(10)]}) == []
    assert sdk.threads.search(metadata={"a": list(range(10_000))}) == []


def test_thread_update_merges_metadata_at_top_level(sdk: Sdk) -> None:
    sdk.threads.create(thread_id="t", metadata={"a": 1, "b": {"c": 2}})

    changed = sdk.threads.update("t", metadata={"b": 3, "d": [4]})

    assert changed["metadata"] == {"a": 1, "b": 3, "d": [4]}
    assert sdk.threads.update("t", metadata={"a": 5}, return_minimal=True) is None
    assert sdk.threads.get("t")["metadata"]["a"] == 5


async def update_thread_concurrently(url: str, times: int) -> None:
    async with get_client(url=url, api_key=None) as client:
        await client.threads.create(thread_id="t")
        changes = [client.threads.update("t", metadata={f"k{n}": n}) for n in range(times)]
        await asyncio.gather(*changes)


def test_concurrent_metadata_updates_are_all_kept(url: str, sdk: Sdk) -> None:
    asyncio.run(update_thread_concurrently(url, 6))

    assert sdk.threads.get("t")["metadata"] == {f"k{n}": n for n in range(6)}


@pytest.mark.parametrize("thread_id", ODD_IDS)
def test_thread_id_may_be_any_text(shared_clients: SharedClients, thread_id: str) -> None:
    threads = shared_clients[0].threads
    threads.create(thread_id=thread_id, metadata={"x": 1}, graph_id="chat")
    threads.update_state(thread_id, {"messages": [{"role": "user", "content": "hi"}]})

    assert threads.get(thread_id)["thread_id"] == thread_id
    assert list_message_texts(threads.get_state(thread_id)) == ["hi"]
    assert len(threads.get_history(thread_id)) == 1
    assert list_thread_ids(threads.search(metadata={"x": 1})) == [thread_id]
    threads.delete(thread_id)
    assert list_thread_ids(threads.search()) == ["t"]


@pytest.mark.parametrize("thread_id", ["a\0b", "\ud800", "x" * 5000])
def test_thread_id_that_cannot_be_stored_is_refused(
    shared_clients: SharedClients, thread_id: str
) -> None:
    body, headers = json.dumps({"thread_id": thread_id}), {"content-type": "application/json"}

    answer = shared_clients[1].post("/threads", content=body.encode(), headers=headers)

    assert answer.status_code == 422, answer.text
    assert "key" in answer.json()["detail"] or "thread_id" in answer.json()["detail"]


# -- threads that another program made


def test_thread_written_by_another_program_is_read_updated_and_deleted(
    settings: Settings, sdk: Sdk
) -> None:
    run_chat_turns(settings, "chat-1", "hello", title="Greetings", graph_id="chat")

    thread = sdk.threads.get("chat-1")

    known = {"owner": "ann", "user_id": "ann", "title": "Greetings", "graph_id": "chat"}
    assert thread["metadata"] == known
    assert list_message_texts(thread)[0] == "hello"
    assert [each["thread_id"] for each in sdk.threads.search(metadata={"owner": "ann"})] == [
        "chat-1"
    ]
    assert sdk.threads.update("chat-1", metadata={"x": 1})["metadata"] == {**known, "x": 1}
    sdk.threads.delete("chat-1")
    assert sdk.threads.count() == 0


def test_thread_without_graph_has_state_and_history_but_refuses_updates(
    settings: Settings, sdk: Sdk
) -> None:
    run_chat_turns(settings, "chat-1", "one", "two")

    state, states = sdk.threads.get_state("chat-1"), sdk.threads.get_history("chat-1", limit=3)

    assert list_message_texts(state)[::2] == ["one", "two"]
    assert state["checkpoint"]["thread_id"] == "chat-1"
    assert state["checkpoint"] == states[0]["checkpoint"]
    assert state["parent_checkpoint"] == states[1]["checkpoint"]
    assert state["next"] == []
    with pytest.raises(UnprocessableEntityError, match="names no graph"):
        sdk.threads.update_state("chat-1", {"messages": []})


# -- many


def test_thread_search_supports_metadata_ids_sorting_and_paging(
    settings: Settings, sdk: Sdk
) -> None:
    for number in range(5):
        sdk.threads.create(
            thread_id=f"t{number}", metadata={"n": number, "even": not number % 2, "in": {"a": 1}}
        )
    run_chat_turns(settings, "t1", "hello")

    assert list_thread_ids(sdk.threads.search(limit=2)) == ["t1", "t4"]
    assert list_thread_ids(sdk.threads.search(limit=3, offset=2)) == ["t3", "t2", "t0"]
    assert list_thread_ids(sdk.threads.search(metadata={"even": True})) == ["t4", "t2", "t0"]
    assert list_thread_ids(sdk.threads.search(metadata={"even": True}, limit=1, offset=1)) == ["t2"]
    assert list_thread_ids(sdk.threads.search(metadata={"in": {"a": 1}, "n": 3})) == ["t3"]
    assert list_thread_ids(sdk.threads.search(ids=["t2", "no", "t0"])) == ["t2", "t0"]
    assert list_thread_ids(sdk.threads.search(sort_by="thread_id", sort_order="asc", limit=2)) == [
        "t0",
        "t1",
    ]
    assert list_thread_ids(sdk.threads.search(status="busy")) == []
    assert sdk.threads.count() == 5
    assert sdk.threads.count(metadata={"even": True}) == 3


def test_thread_search_returns_selected_fields(settings: Settings, sdk: Sdk) -> None:
    run_chat_turns(settings, "t1", "hello", "you")

    [plain] = sdk.threads.search(select=["thread_id", "status"])
    [whole] = sdk.threads.search(values={})

    assert plain == {"thread_id": "t1", "status": "idle"}
    assert list_message_texts(whole)[0] == "hello"


def test_pages_of_thread_search_contain_each_thread_once(settings: Settings, sdk: Sdk) -> None:
    for number in range(30):
        if number % 3:
            sdk.threads.create(thread_id=f"t{number:02}")
        if number % 2:
            run_chat_turns(settings, f"t{number:02}", "hello")

    pages = [
        list_thread_ids(sdk.threads.search(limit=7, offset=start)) for start in range(0, 42, 7)
    ]

    found = [each for page in pages for each in page]
    assert sorted(found) == [f"t{n:02}" for n in range(30) if n % 3 or n % 2]
    assert len(found) == sdk.threads.count()


def test_copied_thread_has_states_and_metadata_of_original(settings: Settings, sdk: Sdk) -> None:
    run_chat_turns(settings, "chat-1", "hello", graph_id="chat")
    sdk.threads.update("chat-1", metadata={"x": 1})

    copied: Any = sdk.threads.copy("chat-1")

    assert copied["thread_id"] != "chat-1"
    assert copied["metadata"] == sdk.threads.get("chat-1")["metadata"]
    assert copied["values"] == sdk.threads.get("chat-1")["values"]
    assert len(sdk.threads.get_history(copied["thread_id"])) == len(
        sdk.threads.get_history("chat-1")
    )


def test_prune_is_refused_while_thread_is_locked(settings: Settings, sdk: Sdk) -> None:
    run_chat_turns(settings, "t", "one", "two")
    before = len(sdk.threads.get_history("t"))

    with (
        SQLiteCheckpointer.open(settings.db) as saver,
        saver.lock("t"),
        pytest.raises(ConflictError, match="still active"),
    ):
        sdk.threads.prune(["t"], strategy="keep_latest")

    assert len(sdk.threads.get_history("t")) == before > 1


def test_prune_deletes_threads_or_keeps_latest_checkpoint(settings: Settings, sdk: Sdk) -> None:
    run_chat_turns(settings, "kept", "one", "two")
    run_chat_turns(settings, "gone", "one")

    assert sdk.threads.prune(["gone", "unknown"]) == {"pruned_count": 1}
    assert sdk.threads.prune(["kept"], strategy="keep_latest") == {"pruned_count": 1}

    assert list_thread_ids(sdk.threads.search()) == ["kept"]
    assert len(sdk.threads.get_history("kept")) == 1
    assert list_message_texts(sdk.threads.get_state("kept"))[::2] == ["one", "two"]


# -- states


def test_state_update_applies_to_latest_or_older_checkpoint(settings: Settings, sdk: Sdk) -> None:
    run_chat_turns(settings, "t", "one", "two", title="Numbers", graph_id="chat")
    older = sdk.threads.get_history("t", limit=20)[-1]["checkpoint"]
    new = {"messages": [{"role": "user", "content": "three"}]}

    made = sdk.threads.update_state("t", new, as_node="respond")
    assert list_message_texts(sdk.threads.get_state("t"))[-1] == "three"
    assert sdk.threads.get_state("t")["checkpoint"] == made["checkpoint"]

    fork = sdk.threads.update_state("t", new, checkpoint=older, as_node="__start__")
    state = sdk.threads.get_state("t")

    assert list_message_texts(state) == ["three"]
    assert state["checkpoint"] == fork["checkpoint"]
    assert state["next"] == ["respond"]
    assert state["parent_checkpoint"]["checkpoint_id"] == older["checkpoint_id"]
    assert len(list_message_texts(sdk.threads.get_state("t", checkpoint=made["checkpoint"]))) == 5
    by_id = sdk.threads.get_state("t", checkpoint_id=older["checkpoint_id"])
    assert by_id["checkpoint"] == older
    known = sdk.threads.get("t")["metadata"]
    assert (known["title"], known["graph_id"], known["owner"]) == ("Numbers", "chat", "ann")


def test_history_is_paged_before_checkpoint_and_filtered_by_metadata(
    settings: Settings, sdk: Sdk
) -> None:
    run_chat_turns(settings, "t", "one", "two", "three", graph_id="chat")

    whole = sdk.threads.get_history("t", limit=100)
    first = sdk.threads.get_history("t", limit=2)
    second = sdk.threads.get_history("t", limit=2, before=first[-1]["checkpoint"])
    by_id = sdk.threads.get_history("t", limit=2, before=first[-1]["checkpoint"]["checkpoint_id"])
    inputs = sdk.threads.get_history("t", metadata={"source": "input"})

    assert [*first, *second] == whole[:4]
    assert by_id == second
    assert [each["metadata"]["source"] for each in inputs] == ["input"] * 3
    assert sdk.threads.get_history("t", limit=1, select=["next"]) == [{"next": []}]


def test_state_read_returns_selected_values_only(settings: Settings, sdk: Sdk) -> None:
    run_chat_turns(settings, "t", "one")

    state = sdk.threads.get_state("t", select=["values.messages", "next"])

    assert sorted(state) == ["next", "values"]
    assert list(state["values"]) == ["messages"]


def test_state_update_is_refused_while_thread_is_locked(settings: Settings, sdk: Sdk) -> None:
    run_chat_turns(settings, "t", "one", graph_id="chat")

    with (
        SQLiteCheckpointer.open(settings.db) as saver,
        saver.lock("t"),
        pytest.raises(ConflictError, match="still active"),
    ):
        sdk.threads.update_state("t", {"messages": []})


def test_client_metadata_cannot_change_user_of_thread(settings: Settings, sdk: Sdk) -> None:
    run_chat_turns(settings, "t", "one", graph_id="chat")
    theirs = {"user_id": "eve", "owner": "eve", "source": "x", "step": 99}
    sdk.threads.create(thread_id="new", metadata=theirs, graph_id="chat")

    sdk.threads.update("t", metadata=theirs)
    for thread_id in ("t", "new"):
        sdk.threads.update_state(thread_id, {"messages": []})

        found = sdk.threads.get_state(thread_id)["metadata"]
        assert (found["user_id"], found["source"]) == ("ann", "update")
        assert sdk.threads.get(thread_id)["metadata"]["user_id"] == "ann"
    assert sdk.threads.get("t")["metadata"]["owner"] == "ann"


def test_state_update_keeps_user_of_thread(settings: Settings, sdk: Sdk) -> None:
    """A thread without a user stays without one, so it adds no memories for the client."""
    for thread_id, user in (("anns", "ann"), ("nobodys", "")):
        with SQLiteCheckpointer.open(settings.db) as saver:
            config: Any = {"configurable": {"thread_id": thread_id, "user_id": user}}
            config["metadata"] = {"graph_id": "chat"}
            chat_graph(checkpointer=saver).invoke({"messages": [("human", "hello")]}, config)

        sdk.threads.update_state(thread_id, {"messages": []})

        assert sdk.threads.get_state(thread_id)["metadata"]["user_id"] == user


def test_state_update_that_graph_cannot_apply_is_refused(settings: Settings, sdk: Sdk) -> None:
    run_chat_turns(settings, "t", "one", graph_id="chat")

    for node, values in (("nobody", {"messages": []}), (None, {"messages": [{"role": "?"}]})):
        with pytest.raises(UnprocessableEntityError, match="cannot be applied"):
            sdk.threads.update_state("t", values, as_node=node)


@pytest.mark.parametrize("served", [True, False])
def test_thread_and_state_show_pending_interrupt(
    settings: Settings, sdk: Sdk, *, served: bool
) -> None:
    with SQLiteCheckpointer.open(settings.db) as saver:
        config: Any = {"configurable": {"thread_id": "t"}, "metadata": {}}
        config["metadata"] |= {"graph_id": "asks"} if served else {}
        asking_graph(checkpointer=saver).invoke({"said": "hello"}, config)

    thread, state = sdk.threads.get("t"), sdk.threads.get_state("t", subgraphs=True)

    [waiting] = [each for some in thread["interrupts"].values() for each in some]
    assert waiting["value"] == "Sure?"
    assert state["interrupts"] == [waiting]
    assert state["values"] == thread["values"] == {"said": "hello"}
    [task] = state["tasks"]
    assert (state["next"], task["name"], task["interrupts"]) == (["part"], "part", [waiting])
    assert task["path"] == ["__pregel_pull", "part"]
    assert list(thread["interrupts"]) == [task["id"]]
    if served:
        inner: Any = task["state"]
        assert inner["next"] == ["ask"]
        at = inner["checkpoint"]
        assert sdk.threads.get_state("t", checkpoint=at)["values"] == {"said": "hello"}
        assert sdk.threads.get_history("t", checkpoint=at)[0]["checkpoint"] == at


def test_thread_interrupted_by_another_program_has_status_interrupted(
    settings: Settings, sdk: Sdk
) -> None:
    """The thread is found by its status, and is idle after the program received the answer."""
    run_asking_graph(settings, "theirs")
    run_chat_turns(settings, "chat", "hello")
    waiting = sdk.threads.search(status="interrupted")
    before = {each["thread_id"]: each["status"] for each in sdk.threads.search()}
    history = sdk.threads.get_history("theirs")
    run_asking_graph(settings, "theirs", "yes")
    state = sdk.threads.get_state("theirs")

    assert [each["thread_id"] for each in waiting] == ["theirs"]
    assert [one["value"] for some in waiting[0]["interrupts"].values() for one in some] == ["Sure?"]
    assert before == {"theirs": "interrupted", "chat": "idle"}
    assert [each["next"] for each in history] == [["part"], ["__start__"]]
    assert sdk.threads.count(status="interrupted") == 0
    assert (sdk.threads.get("theirs")["status"], state["next"], state["tasks"]) == ("idle", [], [])


def test_state_after_failed_node_names_next_node_and_error(settings: Settings, sdk: Sdk) -> None:
    """The thread of a program that failed is idle, and its state names the node to run next."""
    with SQLiteCheckpointer.open(settings.db) as saver:
        builder: Any = StateGraph(dict)
        builder.add_node("fails", lambda state: 1 / 0)
        builder.add_edge(START, "fails")
        with pytest.raises(ZeroDivisionError):
            builder.compile(checkpointer=saver).invoke(
                {"said": "hello"}, {"configurable": {"thread_id": "t", "user_id": settings.user}}
            )
    [task], state = sdk.threads.get_state("t")["tasks"], sdk.threads.get_state("t")

    assert (sdk.threads.get("t")["status"], state["next"]) == ("idle", ["fails"])
    assert (task["name"], "division by zero" in str(task["error"])) == ("fails", True)


def test_values_without_json_form_are_converted(settings: Settings, sdk: Sdk) -> None:
    odd: dict[str, Any] = {
        "bytes": b"\xff\x00",
        "set": {1},
        "nan": float("nan"),
        "day": date(2026, 1, 2),
        "keys": {1: "one", None: "none"},
        "path": Path("a/b"),
    }
    with SQLiteCheckpointer.open(settings.db) as saver:
        put(saver, odd)

    values = sdk.threads.get("t")["values"]

    assert values["bytes"] == "ff00"
    assert (values["set"], values["nan"], values["day"]) == ([1], None, "2026-01-02")
    assert sdk.threads.get_state("t")["values"] == values
    assert sdk.threads.get_history("t")[0]["values"] == values
    assert sdk.threads.search()[0]["values"] == values


# -- bad input

BAD: list[tuple[str, str, Any]] = [
    ("GET", "/threads/unknown", None),
    ("GET", "/threads/unknown/state", None),
    ("GET", "/threads/t/state/unknown", None),
    ("GET", "/threads/unknown/history", None),
    ("GET", "/threads/t/history?limit=0", None),
    ("GET", "/threads/t/history?limit=x", None),
    ("GET", "/threads/t/history?limit=100000", None),
    ("GET", "/threads/a%00b/state", None),
    ("GET", "/threads/%FF%FE", None),
    ("PATCH", "/threads/unknown", {"metadata": {}}),
    ("PATCH", "/threads/t", {"metadata": []}),
    ("PATCH", "/threads/t", {"metadata": {}, "ttl": -5}),
    ("DELETE", "/threads/unknown", None),
    ("POST", "/threads", b"{"),
    ("POST", "/threads", b"[]"),
    ("POST", "/threads", b'"\xff"'),
    ("POST", "/threads", b"[" * 100_000),
    ("POST", "/threads", {"metadata": {"a": float("nan")}}),
    ("POST", "/threads", b'{"metadata": {"a": "\\ud800"}}'),
    ("POST", "/threads", {"thread_id": 5}),
    ("POST", "/threads", {"thread_id": ""}),
    ("POST", "/threads", {"if_exists": "perhaps"}),
    ("POST", "/threads", {"ttl": -5}),
    ("POST", "/threads", {"supersteps": [{}]}),
    ("POST", "/threads", {"supersteps": [{"updates": [{"values": {}}]}]}),
    ("POST", "/threads/search", {"limit": -1}),
    ("POST", "/threads/search", {"limit": 10**30}),
    ("POST", "/threads/search", {"status": "asleep"}),
    ("POST", "/threads/search", {"sort_by": "colour"}),
    ("POST", "/threads/search", {"ids": ["\ud800"]}),
    ("POST", "/threads/search", {"extract": {"a": "values..b"}}),
    ("POST", "/threads/search", {"values": [1]}),
    ("POST", "/threads/search", {"ids": ["x"] * 1001}),
    ("POST", "/threads/count", {"metadata": 5}),
    ("POST", "/threads/prune", {}),
    ("POST", "/threads/prune", {"thread_ids": ["t"], "strategy": "some"}),
    ("POST", "/threads/unknown/copy", None),
    ("POST", "/threads/t/state", {"values": 5}),
    ("POST", "/threads/t/state", {"values": {}, "checkpoint_id": "unknown"}),
    ("POST", "/threads/t/state", {"values": {}, "checkpoint": {"checkpoint_id": 7}}),
    ("POST", "/threads/t/state", {"values": {}, "as_node": "nobody"}),
    ("POST", "/threads/t/state/checkpoint", {"checkpoint": {"checkpoint_id": "unknown"}}),
    ("POST", "/threads/t/state/checkpoint", {"checkpoint": {"checkpoint_ns": 5}}),
    ("POST", "/threads/t/history", {"before": 5}),
    ("POST", "/threads/t/history", {"limit": "many"}),
]


@pytest.mark.parametrize(("method", "path", "body"), BAD)
def test_thread_requests_with_invalid_input_are_refused_with_detail(
    shared_clients: SharedClients, method: str, path: str, body: Any
) -> None:
    sent = json.dumps(body).encode() if isinstance(body, dict) else body
    headers = {"content-type": "application/json"}

    answer = shared_clients[1].request(method, path, headers=headers, content=sent)

    assert 400 <= answer.status_code < 500, answer.text
    assert isinstance(answer.json()["detail"], str), answer.text
    assert shared_clients[1].get("/threads/t").status_code == 200


def test_refused_thread_creation_creates_no_thread(shared_clients: SharedClients) -> None:
    steps = [{"updates": [{"values": {"heard": ["x"]}, "as_node": "hear"}]}]
    asked = {"thread_id": "new", "metadata": {"graph_id": "chat"}, "supersteps": steps}

    assert shared_clients[1].post("/threads", json=asked).status_code == 422
    assert shared_clients[1].get("/threads/new").status_code == 404


def test_refused_prune_deletes_no_thread(shared_clients: SharedClients) -> None:
    for thread_ids in (["t", ""], ["t", *["x"] * 1000]):
        answer = shared_clients[1].post("/threads/prune", json={"thread_ids": thread_ids})

        assert answer.status_code == 422
        assert shared_clients[1].get("/threads/t").status_code == 200


# -- who may


class OwnerAccess(Access):
    """Access of users to their own threads; a header names the user."""

    async def identify(self, connection: Any) -> Identity:
        """Identify the user whom the header names."""
        return Identity(connection.headers.get("x-user", "nobody"))

    async def authorize_and_build_filter(
        self, identity: Identity, action: str, value: dict[str, Any]
    ) -> Filter:
        """Set the owner of new threads, and restrict other requests to own threads."""
        if action == "threads:create":
            value["metadata"] = {**value.get("metadata", {}), "owner": identity.user}
            return {}
        return {"owner": identity.user}


def test_users_reach_only_threads_that_they_own(settings: Settings) -> None:
    run_chat_turns(settings, "of-ann", "secret", graph_id="chat")
    with (
        run_server(create_app(settings, access=OwnerAccess())) as url,
        get_sync_client(url=url, api_key=None, headers={"x-user": "ann"}) as of_ann,
        get_sync_client(url=url, api_key=None, headers={"x-user": "bob"}) as of_bob,
    ):
        ann, bob = cast(Any, of_ann).threads, of_bob.threads
        thread_of_bob = bob.create(thread_id="of-bob")

        assert thread_of_bob["metadata"] == {"owner": "bob"}
        assert (list_thread_ids(ann.search()), list_thread_ids(bob.search())) == (
            ["of-ann"],
            ["of-bob"],
        )
        assert (ann.count(), bob.count()) == (1, 1)
        assert bob.search(ids=["of-ann"]) == []
        assert bob.prune(["of-ann"]) == {"pruned_count": 0}
        denied: list[Any] = [
            lambda: bob.get("of-ann"),
            lambda: bob.get_state("of-ann"),
            lambda: bob.get_history("of-ann"),
            lambda: bob.update("of-ann", metadata={"owner": "bob"}),
            lambda: bob.update_state("of-ann", {}),
            lambda: bob.copy("of-ann"),
            lambda: bob.delete("of-ann"),
            lambda: bob.create(thread_id="of-ann", if_exists="do_nothing"),
        ]
        for each in denied:
            with pytest.raises(NotFoundError):
                each()
        with pytest.raises(PermissionDeniedError, match="would deny you access to"):
            ann.update("of-ann", metadata={"owner": "bob"})
        assert ann.copy("of-ann")["metadata"]["owner"] == "ann"
        assert list_message_texts(ann.get("of-ann"))[0] == "secret"


def test_openapi_document_describes_paths_and_schemas(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()

    assert {"/threads", "/threads/{thread_id}/state", "/store/items", "/memories"} <= {
        *described["paths"]
    }
    assert "thread_ids" in described["components"]["schemas"]["Prune"]["properties"]
