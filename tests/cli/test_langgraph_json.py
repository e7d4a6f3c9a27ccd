"""The sections of a langgraph.json, under `perdure serve --graphs` and for other commands."""

from __future__ import annotations

import json
import socket
import textwrap
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph.checkpoint.base import empty_checkpoint
from langgraph_sdk import get_sync_client

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.graphs.langgraph_json import LanggraphFile
from perdure.stores import SQLiteStore
from tests.cli.commands import run, run_and_read_error, run_json
from tests.cli.test_serve import served
from tests.server.test_keys import ANN, entry

MODULE = """
from contextlib import asynccontextmanager

from fastapi import FastAPI, Form, Request, WebSocket
from langgraph.graph import START, MessagesState, StateGraph

def embed(texts):
    return [[float(len(text)), 1.0, float(text.count("a"))] for text in texts]

@asynccontextmanager
async def lifespan(app):
    yield {"started": "yes"}

app = FastAPI(lifespan=lifespan)

@app.get("/shop/me")
async def me(request: Request):
    return {"user": request.user.identity, "started": request.state.started}

@app.post("/shop/orders")
async def order(item: str = Form()):
    return {"ordered": item}

@app.get("/threads/{thread_id}")
@app.delete("/ok")
@app.get("/shop/ok")
async def covered():
    return {"covered": True}

@app.websocket("/shop/chat")
async def chat(socket: WebSocket):
    await socket.accept()
    await socket.send_text(socket.user.identity)
    await socket.close()

graph = StateGraph(MessagesState).add_node("answer", lambda state: {}).add_edge(START, "answer")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a module of a graph, an embedder and an application."""
    (tmp_path / "shop_app.py").write_text(textwrap.dedent(MODULE))
    return tmp_path


def write(folder: Path, **sections: Any) -> str:
    """Write a langgraph.json with these sections, and return its path."""
    file = folder / "langgraph.json"
    file.write_text(json.dumps({"graphs": {"shop": "./shop_app.py:graph"}, **sections}))
    return str(file)


def test_new_threads_and_items_expire(folder: Path) -> None:
    """Times to live hold for what is created after the start; the start counts what is older."""
    db = folder / "memory.db"
    old: Any = {"configurable": {"thread_id": "old", "checkpoint_ns": ""}}
    with SQLiteCheckpointer.open(db) as saver, SQLiteStore.open(db) as store:
        saver.put(old, empty_checkpoint(), {}, {})
        store.put(("notes",), "old", {"text": "an old note"})
    graphs = write(
        folder,
        checkpointer={"ttl": {"strategy": "keep_latest", "default_ttl": 60}},
        store={"ttl": {"default_ttl": 30, "refresh_on_read": False}},
    )
    with served("--graphs", graphs, db=db) as (url, said, _), get_sync_client(url=url) as sdk:
        created = sdk.threads.create()["thread_id"]
        sdk.runs.wait("by-run", "shop", input={"messages": []}, if_not_exists="create")
        own = sdk.threads.create(ttl={"strategy": "delete", "ttl": 5})["thread_id"]
        copied = httpx.post(f"{url}/threads/old/copy", json={}).json()
        sdk.store.put_item(["notes"], key="new", value={"text": "a new note"})
        ttls = [
            httpx.get(f"{url}/threads/{each}?include=ttl").json().get("ttl")
            for each in (created, "by-run", own, copied["thread_id"], "old")
        ]

    assert [ttl and (ttl["strategy"], ttl["ttl_minutes"]) for ttl in ttls] == [
        ("keep_latest", 60), ("keep_latest", 60), ("delete", 5), ("keep_latest", 60), None,
    ]  # fmt: skip
    assert "checkpointer.ttl does not apply to 1 thread stored earlier" in said
    assert "store.ttl does not apply to 1 item stored earlier" in said
    with SQLiteStore.open(db) as store:
        assert store.count_without_ttl() == 1


def test_an_embedder_for_the_server_and_the_commands(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other vectors refuse the start, and `reembed --graphs` replaces them."""
    db = str(folder / "memory.db")
    with SQLiteStore.open(db) as store:
        store.put(("notes",), "a", {"text": "a banana"})
    index = {"embed": "./shop_app.py:embed", "dims": 3, "fields": ["text"]}
    graphs = write(folder, store={"index": index})
    refused = run_and_read_error(
        "serve", "--port", "0", "--graphs", graphs, "--db", db, capsys=capsys
    )
    assert f"perdure store reembed --graphs {graphs}" in refused

    assert run_json("store", "reembed", "--graphs", graphs, "--db", db) == {"items": 1}
    monkeypatch.setenv("PERDURE_GRAPHS", graphs)
    run("store", "put", "notes", "b", "--text", "a plum", "--db", db)
    assert run_json("store", "reembed", "--db", db) == {"items": 0}
    monkeypatch.delenv("PERDURE_GRAPHS")
    with served("--graphs", graphs, db=Path(db)) as (url, said, _), get_sync_client(url=url) as sdk:
        found = sdk.store.search_items(["notes"], query="a plum")
    assert {item["key"] for item in found["items"]} == {"a", "b"}
    assert "have no effect" not in said


@pytest.mark.parametrize(
    ("cors", "named"),
    [
        ({"allow_origins": ["*"]}, "allow_origins"),
        ({"allow_origins": ["https://*.example.com"]}, "allow_origins"),
        ({"allow_origins": [], "allow_origin_regex": ".*"}, "allow_origin_regex"),
        ({"allow_origins": ["https://a.example"], "allow_credentials": True}, "allow_credentials"),
    ],
)
def test_sites_that_are_not_exact_are_refused(folder: Path, cors: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"http\.cors\.{named} .*refused: every site"):
        LanggraphFile.read(write(folder, http={"cors": cors}))


def test_an_exact_site_may_call(folder: Path) -> None:
    cors = {"allow_origins": ["https://app.example"], "max_age": 5}
    graphs = write(folder, http={"cors": cors})
    with served("--graphs", graphs, db=folder / "memory.db") as (url, said, _):
        replies = [
            httpx.post(f"{url}/threads", json={}, headers={"origin": f"https://{site}.example"})
            for site in ("app", "other")
        ]

    assert [reply.status_code for reply in replies] == [200, 403]
    assert replies[0].headers["access-control-allow-origin"] == "https://app.example"
    assert "these sections have no effect: http.cors.max_age" in said


def test_an_application_after_the_paths_of_perdure(folder: Path) -> None:
    """It is behind keys, host names, sites and limits, and cannot replace a path of perdure."""
    keys = folder / "keys.toml"
    keys.write_text(entry(ANN, "ann"))
    graphs = write(folder, http={"app": "./shop_app.py:app"})
    options = ("--graphs", graphs, "--keys", str(keys))
    with (
        served(*options, db=folder / "memory.db") as (url, _, _),
        httpx.Client(base_url=url, headers={"x-api-key": ANN}) as client,
    ):
        assert client.get("/shop/me").json() == {"user": "ann", "started": "yes"}
        assert client.post("/shop/orders", data={"item": "tea"}).json() == {"ordered": "tea"}
        statuses = [
            httpx.get(f"{url}/shop/me").status_code,
            client.get("/shop/me", headers={"host": "evil.example"}).status_code,
            client.post("/shop/orders", headers={"sec-fetch-site": "cross-site"}).status_code,
            client.post("/shop/orders", data={"item": "x" * 10_000_001}).status_code,
            client.delete("/ok").status_code,
            client.get("/threads/none").status_code,
            client.get("/shop/none").status_code,
            client.post("/threads", data={"thread_id": "t"}).status_code,
        ]
        assert client.get("/threads/none").json() != {"covered": True}

    assert statuses == [401, 421, 403, 413, 405, 404, 404, 415]


def test_a_target_without_a_slash_is_answered(folder: Path) -> None:
    """`*` is a valid target of a request, and not an error of the server."""
    graphs = write(folder, http={"app": "./shop_app.py:app"})
    with served("--graphs", graphs, db=folder / "memory.db") as (url, _, _):
        host, port = url.removeprefix("http://").split(":")
        httpx.get(f"{url}/ok")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            head = f"POST * HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\n\r\n"
            client.sendall(f"{head}{{}}".encode())
            status = client.recv(4096).split()[1]

    assert status == b"404"


def test_sections_without_effect_are_named(folder: Path) -> None:
    """Also sections that would protect something, such as a path that shall not be there."""
    file = LanggraphFile.read(
        write(
            folder,
            **{"$schema": "https://example.com", "dockerfile_lines": [], "python_version": "3.12"},
            http={"disable_store": True, "app": "./shop_app.py:app"},
            store={"path": "./shop_app.py:store", "ttl": {"default_ttl": 5, "omit_expired": True}},
            checkpointer={"ttl": {"default_ttl": 5, "sweep_limit": 7}},
            auth={"path": "./auth.py:auth", "disable_studio_auth": True},
        )
    )

    assert {*file.ignored} == {
        "dockerfile_lines",
        "python_version",
        "http.disable_store",
        "store.path",
        "store.ttl.omit_expired",
        "checkpointer.ttl.sweep_limit",
        "auth.disable_studio_auth",
    }


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"store": {"ttl": {"default_ttl": 0}}}, r"store\.ttl\.default_ttl .* is 0"),
        ({"store": {"index": {"dims": 3}}}, r"store\.index\.embed"),
        ({"checkpointer": {"ttl": {"strategy": "keep"}}}, r"checkpointer\.ttl\.strategy .*'keep'"),
        ({"http": {"cors": {"allow_origins": "https://a"}}}, r"http\.cors\.allow_origins"),
        ({"http": []}, "http"),
        ({"graphs": ["shop"]}, "names no graphs"),
    ],
)
def test_a_wrong_section_is_named(folder: Path, sections: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        LanggraphFile.read(write(folder, **sections))


def test_an_object_that_is_no_application(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graphs = write(folder, http={"app": "./shop_app.py:embed"})
    said = run_and_read_error(
        "serve", "--port", "0", "--graphs", graphs, "--db", str(folder / "m.db"), capsys=capsys
    )
    assert "expected a Starlette or FastAPI application" in said


def test_a_settings_file_of_a_folder_may_not_name_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that somebody cloned could have any code run by any command."""
    write(folder)
    (folder / "perdure.toml").write_text('graphs = "langgraph.json"\n')
    monkeypatch.chdir(folder)
    assert "whose author chooses the code that would run" in run_and_read_error(
        "store", "search", "notes", capsys=capsys
    )
    monkeypatch.setenv("PERDURE_CONFIG", str(folder / "perdure.toml"))
    run("store", "put", "notes", "a", "--text", "tea", "--db", str(folder / "m.db"))
