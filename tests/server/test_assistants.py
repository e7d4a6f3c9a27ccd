"""Assistants by langgraph's SDK: their versions, their owners, and their runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient
from langgraph_sdk.errors import (
    APIStatusError,
    ConflictError,
    NotFoundError,
    PermissionDeniedError,
    UnprocessableEntityError,
)
from typing_extensions import TypedDict  # that of typing has no schema before Python 3.12

from perdure.server import create_app
from perdure.server.graphs import Graphs, default_assistant_id
from perdure.server.http.auth_file import AuthFileAccess
from perdure.server.http.keys import KeysFileAccess
from perdure.settings import Settings
from tests.server.http.test_auth_file import write_auth_file
from tests.server.http.test_keys import ANN, BOB, ROOT, render_key_entry
from tests.server.running import run_server
from tests.server.talking import Gate, build_asking_graph, build_input, build_talk_graph
from tests.server.test_api_postgres import create_database


class _State(TypedDict, total=False):
    seen: dict[str, Any]


class _Context(TypedDict, total=False):
    tone: str
    prompt: str


def build_config_recording_graph() -> Any:
    """Build a graph that records the config and the context that it received."""

    def tell(state: _State, config: RunnableConfig, runtime: Runtime[_Context]) -> _State:
        metadata = config["metadata"]
        return {
            "seen": {
                "context": runtime.context,
                "model": config["configurable"].get("model"),
                "speed": config["configurable"].get("speed"),
                "of": metadata.get("of"),
                "by": metadata.get("by"),
                "tags": sorted(tag for tag in config.get("tags", []) if ":" not in tag),
                "limit": config["recursion_limit"],
                "assistant_id": config["configurable"]["assistant_id"],
                "user_id": config["configurable"]["user_id"],
            }
        }

    outer: Any = StateGraph(_State, context_schema=_Context)
    inner: Any = StateGraph(_State, context_schema=_Context)
    outer.add_node("part", inner.add_node(tell).add_edge(START, "tell").compile())
    return outer.add_edge(START, "part").compile()


@pytest.fixture(params=["file", "postgres"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Settings]:
    """Settings of a new database of each kind."""
    with ExitStack() as stack:
        is_file = request.param == "file"
        db = str(tmp_path / "memory.db") if is_file else stack.enter_context(create_database())
        yield Settings(db=db, user="ann")


def build_graphs(gate: Gate) -> Graphs:
    nested = (
        StateGraph(_State).add_node("part", build_config_recording_graph()).add_edge(START, "part")
    )
    return Graphs(
        {
            "tells": build_config_recording_graph(),
            "talk": build_talk_graph(gate),
            "ask": build_asking_graph(),
            "nested": nested,
        }
    )


@pytest.fixture
def url(settings: Settings, gate: Gate) -> Iterator[str]:
    with run_server(create_app(settings, graphs=build_graphs(gate))) as address:
        yield address


@pytest.fixture
def sdk(url: str) -> Iterator[SyncLangGraphClient]:
    with get_sync_client(url=url) as client:
        yield client


def list_assistant_ids(assistants: Any) -> list[str]:
    return [each["assistant_id"] for each in assistants]


def create_configured_assistant(sdk: SyncLangGraphClient, **options: Any) -> Any:
    """Create an assistant with a config, a context, metadata and a name."""
    config: Any = {
        "configurable": {"model": "large", "speed": 1},
        "tags": ["house"],
        "recursion_limit": 7,
        "metadata": {"by": "us"},
    }
    context = {"tone": "dry", "prompt": "Be short"}
    defaults = {"config": config, "context": context, "metadata": {"of": "ops"}, "name": "Dry"}
    return sdk.assistants.create("tells", **{**defaults, **options})


# -- one assistant


def test_assistant_has_fields_it_was_created_with(sdk: SyncLangGraphClient) -> None:
    made = create_configured_assistant(sdk, description="For notes")
    plain = sdk.assistants.create("tells")

    assert sdk.assistants.get(made["assistant_id"]) == made
    assert sdk.assistants.get(made["assistant_id"].upper()) == made
    assert made["config"]["configurable"] == {"model": "large", "speed": 1}
    assert (made["graph_id"], made["name"], made["version"]) == ("tells", "Dry", 1)
    assert (made["description"], made["metadata"]) == ("For notes", {"of": "ops"})
    assert made["created_at"] == made["updated_at"]
    assert (plain["name"], plain["config"], plain["context"]) == ("Untitled", {}, {})


def test_assistant_update_creates_version_and_keeps_omitted_fields(
    sdk: SyncLangGraphClient,
) -> None:
    at: str = create_configured_assistant(sdk)["assistant_id"]
    second = sdk.assistants.update(at, context={"tone": "warm"}, metadata={"n": 2})
    third = sdk.assistants.update(at, graph_id="talk", name="Other", config={})
    back = sdk.assistants.set_latest(at, 2)
    fourth = sdk.assistants.update(at, description="again")

    assert (second["version"], second["context"]) == (2, {"tone": "warm"})  # no part of the old
    assert second["metadata"] == {"of": "ops", "n": 2}
    assert second["config"]["recursion_limit"] == 7
    assert (third["graph_id"], third["name"], third["config"]) == ("talk", "Other", {})
    assert third["context"] == {"tone": "warm"}
    assert (back["version"], back["graph_id"], back["name"]) == (2, "tells", "Dry")
    assert back["created_at"] == second["created_at"] < back["updated_at"]
    assert (fourth["version"], fourth["graph_id"]) == (4, "tells")  # upon the one in force
    found = sdk.assistants.get_versions(at)
    assert [each["version"] for each in found] == [4, 3, 2, 1]
    assert [each["version"] for each in sdk.assistants.get_versions(at, limit=2, offset=1)] == [
        3,
        2,
    ]
    named = sdk.assistants.get_versions(at, metadata={"n": 2})
    assert [each["version"] for each in named] == [4, 3, 2]
    with pytest.raises(NotFoundError, match="has no version 9"):
        sdk.assistants.set_latest(at, 9)


def test_concurrent_assistant_updates_create_separate_versions(
    settings: Settings, gate: Gate, url: str, sdk: SyncLangGraphClient
) -> None:
    """Two servers take part. Of creations with the same id, the first one counts."""
    at: str = create_configured_assistant(sdk)["assistant_id"]
    body = {"assistant_id": str(uuid4()), "graph_id": "tells", "if_exists": "do_nothing"}

    def update_metadata(n: int) -> int:
        of = urls[n % 2]
        return httpx.patch(f"{of}/assistants/{at}", json={"metadata": {f"n{n}": n}}).status_code

    def create_with_same_id(n: int) -> Any:
        made = httpx.post(f"{urls[n % 2]}/assistants", json={**body, "name": f"n{n}"})
        return made.json()["name"]

    other = run_server(create_app(settings, graphs=build_graphs(gate)))
    with other as second, ThreadPoolExecutor(8) as pool:
        urls = [url, second]
        assert {*pool.map(update_metadata, range(8))} == {200}
        assert len({*pool.map(create_with_same_id, range(8))}) == 1

    latest: Any = sdk.assistants.get(at)
    assert (latest["version"], len(latest["metadata"])) == (9, 9)
    assert len(sdk.assistants.get_versions(at, limit=100)) == 9


def test_creating_assistant_with_taken_id_conflicts_or_returns_it(sdk: SyncLangGraphClient) -> None:
    at: str = create_configured_assistant(sdk)["assistant_id"]

    assert sdk.assistants.create("talk", assistant_id=at, if_exists="do_nothing")["name"] == "Dry"
    for taken in (at, default_assistant_id("talk")):
        with pytest.raises(ConflictError, match="already"):
            sdk.assistants.create("talk", assistant_id=taken)
    own = sdk.assistants.create(
        "tells", assistant_id=default_assistant_id("talk"), if_exists="do_nothing"
    )
    assert own["graph_id"] == "talk"


def test_deleted_assistant_is_not_found_and_can_delete_its_threads(
    sdk: SyncLangGraphClient,
) -> None:
    at: str = create_configured_assistant(sdk)["assistant_id"]
    runs: Any = sdk.runs
    for thread in ("kept", "other"):
        sdk.threads.create(thread_id=thread)
    runs.wait("kept", at, input={})
    runs.wait("other", "tells", input={})
    sdk.assistants.delete(at)

    for call in (
        lambda: sdk.assistants.get(at),
        lambda: sdk.assistants.update(at, name="x"),
        lambda: sdk.assistants.get_versions(at),
        lambda: sdk.assistants.set_latest(at, 1),
        lambda: sdk.assistants.delete(at),
        lambda: sdk.assistants.get_graph(at),
        lambda: sdk.assistants.get("none"),
    ):
        with pytest.raises(NotFoundError, match="no assistant"):
            call()
    assert {each["thread_id"] for each in sdk.threads.search()} == {"kept", "other"}

    again: str = create_configured_assistant(sdk)["assistant_id"]
    runs.wait("kept", again, input={})
    sdk.assistants.delete(again, delete_threads=True)
    assert [each["thread_id"] for each in sdk.threads.search()] == ["other"]


def test_default_assistants_of_graphs_cannot_be_changed(sdk: SyncLangGraphClient) -> None:
    for at in ("talk", default_assistant_id("talk")):
        own = sdk.assistants.get(at)
        assert (own["assistant_id"], own["version"]) == (default_assistant_id("talk"), 1)
        assert own["metadata"] == {"created_by": "system"}
        assert [each["version"] for each in sdk.assistants.get_versions(at)] == [1]
        for call in (
            lambda at=at: sdk.assistants.delete(at),
            lambda at=at: sdk.assistants.update(at, name="x"),
            lambda at=at: sdk.assistants.set_latest(at, 1),
        ):
            with pytest.raises(
                PermissionDeniedError, match="create another assistant for the graph"
            ):
                call()


# -- many


def test_assistant_search_supports_name_metadata_sorting_and_paging(
    sdk: SyncLangGraphClient,
) -> None:
    made = [
        create_configured_assistant(sdk, name=name, metadata={"team": team, "n": n})["assistant_id"]
        for n, (name, team) in enumerate([("Blue fox", "a"), ("red FOX", "b"), ("hen", "b")])
    ]
    search = sdk.assistants.search

    assert set(list_assistant_ids(search())) == {
        *made,
        *map(default_assistant_id, ("tells", "talk", "ask", "nested")),
    }
    assert list_assistant_ids(search(graph_id="tells"))[:3] == made[::-1]  # the newest first
    assert list_assistant_ids(search(name="fox")) == [made[1], made[0]]
    assert list_assistant_ids(search(metadata={"team": "b"})) == [made[2], made[1]]
    assert list_assistant_ids(search(metadata={"team": "b", "n": 1})) == [made[1]]
    assert list_assistant_ids(search(metadata={"created_by": "system"}, graph_id="talk")) == [
        default_assistant_id("talk")
    ]
    team: Any = {"metadata": {"team": "b"}}
    assert list_assistant_ids(search(**team, sort_by="created_at", sort_order="asc")) == made[1:]
    named = search(name="o", graph_id="tells", sort_by="name", sort_order="asc")
    assert [each["name"] for each in named] == ["Blue fox", "red FOX"]
    assert search(**team, select=["name", "version"])[0] == {"name": "hen", "version": 1}
    assert sdk.assistants.count() == 7
    assert sdk.assistants.count(name="FOX", metadata={"team": "a"}) == 1

    page = search(graph_id="tells", limit=2, response_format="object")
    rest = search(graph_id="tells", offset=int(page["next"] or 0), response_format="object")
    assert (len(page["assistants"]), len(rest["assistants"]), rest["next"]) == (2, 2, None)


INVALID_INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"assistant_id": "my-id"}, "assistant_id is 'my-id'"),
    ({"graph_id": "none"}, "the graph 'none' is not served"),
    ({"graph_id": None}, "graph_id"),
    ({"name": 5}, "name is 5"),
    ({"if_exists": "maybe"}, "if_exists is 'maybe'"),
    ({"config": {"recursion_limit": 0}}, "recursion_limit is 0"),
    ({"config": {"callbacks": []}}, "config.callbacks is []"),
    ({"config": {"configurable": {"user_id": "bob"}}}, "'user_id' to 'bob'"),
    ({"config": {"configurable": {"thread_id": "t"}}}, "'thread_id' to 't'"),
    ({"config": {"configurable": {"checkpoint_id": "c"}}}, "'checkpoint_id' to 'c'"),
    ({"config": {"configurable": {"__pregel_store": 1}}}, "'__pregel_store' to 1"),
    ({"context": {"owner": "bob"}}, "'owner' to 'bob'"),
    ({"metadata": {"n": 1 << 70}}, "71 bits"),
    ({"metadata": {"n": "x" * 70_000}}, "64000"),
    ({"context": {"n": "x" * 256_000}}, "at most 256000 bytes are allowed"),
]


def test_assistant_requests_with_invalid_input_are_refused_with_value(
    url: str, sdk: SyncLangGraphClient
) -> None:
    at: str = create_configured_assistant(sdk)["assistant_id"]
    for body, expected_message in INVALID_INPUTS:
        created = httpx.post(f"{url}/assistants", json={"graph_id": "tells", **body})
        assert (created.status_code, expected_message in created.text) == (422, True), created.text
        if {*body} & {"assistant_id", "if_exists"} or None in body.values():
            continue
        changed = httpx.patch(f"{url}/assistants/{at}", json=body)
        assert (changed.status_code, expected_message in changed.text) == (422, True), changed.text
    for body, expected_message in (
        ({"sort_by": "size"}, "sort_by is 'size'"),
        ({"select": ["secret"]}, "is 'secret'"),
        ({"limit": -1}, "limit is -1"),
    ):
        searched = httpx.post(f"{url}/assistants/search", json=body)
        assert (searched.status_code, expected_message in searched.text) == (422, True), (
            searched.text
        )
    assert sdk.assistants.get(at)["version"] == 1
    assert sdk.assistants.count(graph_id="tells") == 2


# -- graphs


def test_assistant_returns_schemas_nodes_and_subgraphs_of_graph(sdk: SyncLangGraphClient) -> None:
    made: Any = sdk.assistants.create("nested")
    at = made["assistant_id"]
    for assistant in ("nested", at):
        schemas = sdk.assistants.get_schemas(assistant)
        assert (schemas["graph_id"], "seen" in str(schemas["state_schema"])) == ("nested", True)
        nodes = sdk.assistants.get_graph(assistant)["nodes"]
        assert [each["id"] for each in nodes] == ["__start__", "part", "__end__"]
        assert {*sdk.assistants.get_subgraphs(assistant)} == {"part"}
        deep = sdk.assistants.get_subgraphs(assistant, recurse=True)
        assert {*deep} == {"part", "part|part"}
        assert deep["part"]["context_schema"] is not None
        assert {*sdk.assistants.get_subgraphs(assistant, "part")} == {"part"}
        assert sdk.assistants.get_subgraphs(assistant, "none") == {}


# -- runs


def run_and_read_seen(
    sdk: SyncLangGraphClient, at: str, thread: str | None = None, **options: Any
) -> Any:
    runs: Any = sdk.runs
    return runs.wait(thread, at, input={}, **options)["seen"]


def test_run_receives_config_context_and_metadata_of_assistant(sdk: SyncLangGraphClient) -> None:
    at: str = create_configured_assistant(sdk)["assistant_id"]

    assert run_and_read_seen(sdk, at) == {
        "context": {"tone": "dry", "prompt": "Be short"},
        "model": "large",
        "speed": 1,
        "of": "ops",
        "by": "us",
        "tags": ["house"],
        "limit": 7,
        "assistant_id": at,
        "user_id": "ann",
    }


def test_run_request_overrides_settings_of_assistant(sdk: SyncLangGraphClient) -> None:
    at: str = create_configured_assistant(sdk)["assistant_id"]
    config = {"configurable": {"speed": 2}, "tags": ["mine"], "recursion_limit": 9}
    config |= {"metadata": {"by": "me"}}
    seen = run_and_read_seen(
        sdk, at, config=config, context={"tone": "wry"}, metadata={"of": "dev"}
    )

    assert seen["context"] == {"tone": "wry", "prompt": "Be short"}
    assert (seen["model"], seen["speed"], seen["limit"]) == ("large", 2, 9)
    assert (seen["of"], seen["by"], seen["tags"]) == ("dev", "me", ["house", "mine"])
    plain = run_and_read_seen(sdk, "tells")
    assert (plain["context"] or {}, plain["model"], plain["tags"], plain["limit"]) == (
        {},
        None,
        [],
        25,
    )
    assert (plain["assistant_id"], plain["of"]) == (default_assistant_id("tells"), None)


def test_thread_and_its_runs_name_their_assistant(sdk: SyncLangGraphClient) -> None:
    at: str = create_configured_assistant(sdk)["assistant_id"]
    sdk.threads.create(thread_id="t")
    run_and_read_seen(sdk, at, "t")
    metadata: Any = sdk.threads.get("t")["metadata"]
    run: Any = sdk.runs.list("t")[0]

    assert (metadata["assistant_id"], metadata["graph_id"]) == (at, "tells")
    assert (run["assistant_id"], run["metadata"]["graph_id"]) == (at, "tells")
    assert run["metadata"]["of"] == "ops"
    sdk.threads.update_state("t", {"seen": {}})
    assert sdk.threads.get("t")["metadata"]["assistant_id"] == at  # type: ignore[index]


def test_queued_run_keeps_assistant_version_after_update_and_delete(
    settings: Settings, gate: Gate
) -> None:
    """The run waits while its assistant is changed and deleted, and continues on another server."""
    runs: Any
    graphs = build_graphs(gate)
    with run_server(create_app(settings, graphs=graphs)) as url, get_sync_client(url=url) as sdk:
        at: str = create_configured_assistant(sdk)["assistant_id"]
        sdk.threads.create(thread_id="t")
        runs = sdk.runs
        runs.create("t", "talk", input=build_input("first"))
        assert gate.reached.wait(60)
        queued_run = runs.create("t", at, input={}, context={"tone": "wry"})
        sdk.assistants.update(at, context={"prompt": "other"}, config={}, graph_id="talk")
        sdk.assistants.delete(at)
    gate.open.set()
    with run_server(create_app(settings, graphs=graphs)) as url, get_sync_client(url=url) as sdk:
        runs = sdk.runs
        seen = runs.join("t", queued_run["run_id"])["seen"]
        run = runs.get("t", queued_run["run_id"])

    assert seen["context"] == {"tone": "wry", "prompt": "Be short"}
    assert (seen["model"], seen["of"], seen["assistant_id"]) == ("large", "ops", at)
    assert run["assistant_id"] == at


@pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
def test_run_started_by_command_uses_settings_of_assistant(
    url: str, sdk: SyncLangGraphClient
) -> None:
    """Other options of the command, such as a breakpoint, apply too."""
    at, runs = create_configured_assistant(sdk)["assistant_id"], sdk.runs

    def start_run_and_read_values(thread: str, **options: Any) -> Any:
        params = {"assistant_id": at, "input": {}, "context": {"tone": "wry"}, **options}
        body = {"id": 1, "method": "run.start", "params": params}
        made = httpx.post(f"{url}/threads/{thread}/commands", json=body).json()["result"]
        return runs.join(thread, made["run_id"])

    assert start_run_and_read_values("t")["seen"]["context"] == {
        "tone": "wry",
        "prompt": "Be short",
    }
    assert not start_run_and_read_values("u", interrupt_before=["part"])
    assert sdk.threads.get_state("u")["next"] == ["part"]
    assert sdk.threads.get("u")["status"] == "interrupted"


@pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
def test_answer_to_interrupt_runs_with_assistant_of_thread(
    url: str, sdk: SyncLangGraphClient
) -> None:
    """Answers by command and by page use the default assistant if the own one was deleted."""
    runs: Any = sdk.runs

    def send_command(method: str, **params: Any) -> Any:
        body = {"id": 1, "method": method, "params": params}
        return httpx.post(f"{url}/threads/{thread}/commands", json=body).json()["result"]["run_id"]

    at = ""
    for thread in ("kept", "gone", "kept-page", "gone-page"):
        at = at or sdk.assistants.create("ask", metadata={"of": "ops"})["assistant_id"]
        runs.join(thread, send_command("run.start", assistant_id=at, input={"messages": []}))
        [[interrupt]] = sdk.threads.get(thread)["interrupts"].values()
        expected_assistant = at
        if thread.startswith("gone"):
            sdk.assistants.delete(at)
            expected_assistant, at = default_assistant_id("ask"), ""
        if thread.endswith("page"):
            form = {"assistant": "ask", "of": interrupt["id"], "answer": "yes", "how": "text"}
            assert httpx.post(f"{url}/ui/answer?id={thread}", data=form).status_code == 303
        else:
            send_command("input.respond", interrupt_id=interrupt["id"], response="yes")
        newest: Any = runs.list(thread)[0]
        runs.join(thread, newest["run_id"])
        assert len(runs.list(thread)) == 2
        assert newest["assistant_id"] == expected_assistant


def test_assistant_of_unserved_graph_is_read_and_moved_but_not_run(
    settings: Settings, gate: Gate
) -> None:
    with (
        run_server(create_app(settings, graphs=build_graphs(gate))) as url,
        get_sync_client(url=url) as sdk,
    ):
        at: str = create_configured_assistant(sdk)["assistant_id"]
    others = Graphs({"talk": build_talk_graph(gate)})
    with run_server(create_app(settings, graphs=others)) as url, get_sync_client(url=url) as sdk:
        assert sdk.assistants.get(at)["graph_id"] == "tells"
        assert list_assistant_ids(sdk.assistants.search(graph_id="tells")) == [at]
        with pytest.raises(httpx.HTTPStatusError, match="422"):
            run_and_read_seen(sdk, at)
        with pytest.raises(NotFoundError, match="'tells' is not served"):
            sdk.assistants.get_graph(at)
        with pytest.raises(UnprocessableEntityError, match="'tells'"):
            sdk.assistants.update(at, name="x")
        assert sdk.assistants.update(at, graph_id="talk")["version"] == 2
        sdk.assistants.delete(at)


# -- whose they are


@pytest.fixture
def url_with_keys(settings: Settings, tmp_path: Path, gate: Gate) -> Iterator[str]:
    file = tmp_path / "keys.toml"
    admin = render_key_entry(ROOT, "root", 'permissions = ["perdure:admin"]')
    file.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob") + admin)
    with run_server(
        create_app(settings, graphs=build_graphs(gate), access=KeysFileAccess(file))
    ) as url:
        yield url


def test_other_users_cannot_see_change_or_run_assistant(url_with_keys: str) -> None:
    with (
        get_sync_client(url=url_with_keys, api_key=ANN) as ann,
        get_sync_client(url=url_with_keys, api_key=BOB) as bob,
        get_sync_client(url=url_with_keys, api_key=ROOT) as root,
    ):
        made = create_configured_assistant(ann, metadata={"owner": "bob", "of": "ann"})
        at: str = made["assistant_id"]
        assert made["metadata"] == {"owner": "ann", "of": "ann"}
        assert run_and_read_seen(ann, at)["of"] == "ann"
        unknown = str(uuid4())
        for call in (
            lambda at: bob.assistants.get(at),
            lambda at: bob.assistants.update(at, name="x"),
            lambda at: bob.assistants.get_versions(at),
            lambda at: bob.assistants.set_latest(at, 1),
            lambda at: bob.assistants.delete(at, delete_threads=True),
            lambda at: bob.assistants.get_schemas(at),
            lambda at: run_and_read_seen(bob, at),
        ):
            why = []
            for asked in (at, unknown):
                with pytest.raises((APIStatusError, httpx.HTTPStatusError)) as caught:
                    call(asked)
                reply = caught.value.response
                why.append((reply.status_code, reply.text.replace(asked, "ID")))
            assert why[0] == why[1]
        with pytest.raises(ConflictError):
            bob.assistants.create("tells", assistant_id=at, if_exists="do_nothing")
        assert at not in list_assistant_ids(bob.assistants.search(limit=100))
        assert bob.assistants.search(metadata={"of": "ann"}) == []
        assert bob.assistants.count() == 4
        own = bob.assistants.search(metadata={"created_by": "system"})
        assert len(own) == 4  # those of the graphs are everybody's
        assert run_and_read_seen(bob, "tells")["user_id"] == "bob"

        assert ann.assistants.update(at, metadata={"owner": "bob"})["metadata"] == made["metadata"]
        assert root.assistants.update(at, metadata={"owner": "bob"})["version"] == 3
        assert [each["version"] for each in bob.assistants.get_versions(at)] == [3]
        with pytest.raises(NotFoundError, match="has no version 1"):
            bob.assistants.set_latest(at, 1)
        with pytest.raises(NotFoundError):
            ann.assistants.get(at)


TEAM_HANDLERS = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def user(headers):
    return headers[b"x-api-key"].decode()

@auth.on.threads
async def threads(ctx, value):
    return True

@auth.on.assistants
async def assistants(ctx, value):
    return {"team": ctx.user.identity}

@auth.on.assistants.create
async def create(ctx, value):
    value["metadata"]["team"] = ctx.user.identity
    value["metadata"][f"by-{ctx.user.identity}"] = True
    return {"team": ctx.user.identity}

@auth.on.assistants.delete
async def delete(ctx, value):
    return False
"""


def test_auth_handler_filters_limit_assistants(
    settings: Settings, tmp_path: Path, gate: Gate
) -> None:
    access = AuthFileAccess(write_auth_file(tmp_path, TEAM_HANDLERS))
    with (
        run_server(create_app(settings, graphs=build_graphs(gate), access=access)) as url,
        get_sync_client(url=url, api_key="a") as a,
        get_sync_client(url=url, api_key="b") as b,
    ):
        at: str = create_configured_assistant(a)["assistant_id"]
        assert list_assistant_ids(a.assistants.search()) == [at]  # those of the graphs have no team
        assert b.assistants.search() == []
        made = [client.assistants.create("tells")["metadata"] for client in (a, b)]
        assert made == [{"team": name, f"by-{name}": True} for name in "ab"]
        assert run_and_read_seen(a, at)["model"] == "large"
        with pytest.raises(httpx.HTTPStatusError, match="422"):
            run_and_read_seen(b, at)
        assert run_and_read_seen(b, "tells")["model"] is None
        with pytest.raises(PermissionDeniedError, match="would deny you access to"):
            a.assistants.update(at, metadata={"team": "b"})
        with pytest.raises(PermissionDeniedError, match="is not allowed to perform the action"):
            a.assistants.delete(at)


def test_auth_file_without_assistants_handler_allows_only_default_assistants(
    settings: Settings, tmp_path: Path, gate: Gate
) -> None:
    text = TEAM_HANDLERS.partition("@auth.on.assistants\n")[0]
    with (
        run_server(create_app(settings, graphs=build_graphs(gate))) as url,
        get_sync_client(url=url) as sdk,
    ):
        at: str = create_configured_assistant(sdk)["assistant_id"]
    access = AuthFileAccess(write_auth_file(tmp_path, text))
    with (
        run_server(create_app(settings, graphs=build_graphs(gate), access=access)) as url,
        get_sync_client(url=url, api_key="a") as sdk,
    ):
        assert run_and_read_seen(sdk, "tells")["model"] is None
        with pytest.raises(httpx.HTTPStatusError, match="422"):
            run_and_read_seen(sdk, at)
        with pytest.raises(PermissionDeniedError, match="no handler is registered for it"):
            sdk.assistants.get(at)
