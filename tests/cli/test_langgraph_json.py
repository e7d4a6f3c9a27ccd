"""Sections of a langgraph.json that apply to `perdure serve --graphs` and to other commands."""

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
from tests.cli.test_serve import start_server
from tests.server.http.test_keys import ANN, render_key_entry

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
def app_folder(tmp_path: Path) -> Path:
    """Return a folder with a module that has a graph, an embedder and an application."""
    (tmp_path / "shop_app.py").write_text(textwrap.dedent(MODULE))
    return tmp_path


def write_langgraph_json(folder: Path, **sections: Any) -> str:
    """Write a langgraph.json with these sections, and return its path."""
    file = folder / "langgraph.json"
    file.write_text(json.dumps({"graphs": {"shop": "./shop_app.py:graph"}, **sections}))
    return str(file)


@pytest.mark.slow
def test_ttl_sections_apply_to_new_threads_and_items(app_folder: Path) -> None:
    """Rows that were stored before the start do not expire, and the start prints their number."""
    db = app_folder / "memory.db"
    old: Any = {"configurable": {"thread_id": "old", "checkpoint_ns": ""}}
    with SQLiteCheckpointer.open(db) as saver, SQLiteStore.open(db) as store:
        saver.put(old, empty_checkpoint(), {}, {})
        store.put(("notes",), "old", {"text": "an old note"})
    graphs = write_langgraph_json(
        app_folder,
        checkpointer={"ttl": {"strategy": "keep_latest", "default_ttl": 60}},
        store={"ttl": {"default_ttl": 30, "refresh_on_read": False}},
    )
    with (
        start_server("--graphs", graphs, db=db) as (url, output, _),
        get_sync_client(url=url) as sdk,
    ):
        created = sdk.threads.create()["thread_id"]
        sdk.runs.wait("by-run", "shop", input={"messages": []}, if_not_exists="create")
        own = sdk.threads.create(ttl={"strategy": "delete", "ttl": 5})["thread_id"]
        copied = httpx.post(f"{url}/threads/old/copy", json={}).json()
        sdk.store.put_item(["notes"], key="new", value={"text": "a new note"})
        ttls = [
            httpx.get(f"{url}/threads/{thread_id}?include=ttl").json().get("ttl")
            for thread_id in (created, "by-run", own, copied["thread_id"], "old")
        ]

    assert [ttl and (ttl["strategy"], ttl["ttl_minutes"]) for ttl in ttls] == [
        ("keep_latest", 60), ("keep_latest", 60), ("delete", 5), ("keep_latest", 60), None,
    ]  # fmt: skip
    assert "checkpointer.ttl does not apply to 1 thread stored earlier" in output
    assert "store.ttl does not apply to 1 item stored earlier" in output
    with SQLiteStore.open(db) as store:
        assert store.count_without_ttl() == 1


@pytest.mark.slow
def test_index_section_sets_embedder_of_server_and_commands(
    app_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server refuses to start with other vectors, and `reembed --graphs` replaces them."""
    db = str(app_folder / "memory.db")
    with SQLiteStore.open(db) as store:
        store.put(("notes",), "a", {"text": "a banana"})
    index = {"embed": "./shop_app.py:embed", "dims": 3, "fields": ["text"]}
    graphs = write_langgraph_json(app_folder, store={"index": index})
    message = run_and_read_error(
        "serve", "--port", "0", "--graphs", graphs, "--db", db, capsys=capsys
    )
    assert f"perdure store reembed --graphs {graphs}" in message

    assert run_json("store", "reembed", "--graphs", graphs, "--db", db) == {"items": 1}
    monkeypatch.setenv("PERDURE_GRAPHS", graphs)
    run("store", "put", "notes", "b", "--text", "a plum", "--db", db)
    assert run_json("store", "reembed", "--db", db) == {"items": 0}
    monkeypatch.delenv("PERDURE_GRAPHS")
    with (
        start_server("--graphs", graphs, db=Path(db)) as (url, output, _),
        get_sync_client(url=url) as sdk,
    ):
        results = sdk.store.search_items(["notes"], query="a plum")
    assert {item["key"] for item in results["items"]} == {"a", "b"}
    assert "have no effect" not in output


@pytest.mark.slow
def test_embedder_is_imported_before_graphs(app_folder: Path) -> None:
    """With an Auth file too, a graph may rely on what the embedder's module sets at its import."""
    (app_folder / "embedder.py").write_text(
        "import os\nos.environ['SHOP_KEY'] = 'set'\n"
        "def embed(texts): return [[1.0, 2.0, 3.0] for _ in texts]\n"
    )
    (app_folder / "auth.py").write_text(
        "from langgraph_sdk import Auth\nauth = Auth()\n"
        "@auth.authenticate\nasync def authenticate(headers): return 'ann'\n"
    )
    graph_module = app_folder / "shop_app.py"
    graph_module.write_text("import os\nkey = os.environ['SHOP_KEY']\n" + graph_module.read_text())
    graphs = write_langgraph_json(
        app_folder,
        store={"index": {"embed": "./embedder.py:embed", "dims": 3}},
        auth={"path": "./auth.py:auth"},
    )
    with start_server("--graphs", graphs, db=app_folder / "memory.db") as (url, _, _):
        assert httpx.get(f"{url}/ok").json() == {"ok": True}


@pytest.mark.parametrize(
    ("cors", "field"),
    [
        ({"allow_origins": ["*"]}, "allow_origins"),
        ({"allow_origins": ["https://*.example.com"]}, "allow_origins"),
        ({"allow_origins": [], "allow_origin_regex": ".*"}, "allow_origin_regex"),
        ({"allow_origins": ["https://a.example"], "allow_credentials": True}, "allow_credentials"),
    ],
)
def test_cors_section_with_inexact_site_is_refused(app_folder: Path, cors: Any, field: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"http\.cors\.{field} .*not allowed, because every site"
    ):
        LanggraphFile.read(write_langgraph_json(app_folder, http={"cors": cors}))


@pytest.mark.slow
def test_cors_section_allows_requests_of_an_exact_site(app_folder: Path) -> None:
    cors = {"allow_origins": ["https://app.example"], "max_age": 5}
    graphs = write_langgraph_json(app_folder, http={"cors": cors})
    with start_server("--graphs", graphs, db=app_folder / "memory.db") as (url, output, _):
        replies = [
            httpx.post(f"{url}/threads", json={}, headers={"origin": f"https://{site}.example"})
            for site in ("app", "other")
        ]

    assert [reply.status_code for reply in replies] == [200, 403]
    assert replies[0].headers["access-control-allow-origin"] == "https://app.example"
    assert "these sections have no effect: http.cors.max_age" in output


def test_http_app_is_protected_and_replaces_no_path_of_perdure(app_folder: Path) -> None:
    """The application is behind keys, host names, sites and limits."""
    keys = app_folder / "keys.toml"
    keys.write_text(render_key_entry(ANN, "ann"))
    graphs = write_langgraph_json(app_folder, http={"app": "./shop_app.py:app"})
    options = ("--graphs", graphs, "--keys", str(keys))
    with (
        start_server(*options, db=app_folder / "memory.db") as (url, _, _),
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


@pytest.mark.slow
def test_request_target_without_slash_gets_404(app_folder: Path) -> None:
    """`*` is a valid request target, and not an error of the server."""
    graphs = write_langgraph_json(app_folder, http={"app": "./shop_app.py:app"})
    with start_server("--graphs", graphs, db=app_folder / "memory.db") as (url, _, _):
        host, port = url.removeprefix("http://").split(":")
        httpx.get(f"{url}/ok")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            head = f"POST * HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\n\r\n"
            client.sendall(f"{head}{{}}".encode())
            status = client.recv(4096).split()[1]

    assert status == b"404"


def test_sections_without_effect_are_reported_as_ignored(app_folder: Path) -> None:
    """This includes sections that would protect something, such as one that disables a path."""
    file = LanggraphFile.read(
        write_langgraph_json(
            app_folder,
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
    ("sections", "expected_error"),
    [
        ({"store": {"ttl": {"default_ttl": 0}}}, r"store\.ttl\.default_ttl .* is 0"),
        ({"store": {"index": {"dims": 3}}}, r"store\.index\.embed"),
        ({"checkpointer": {"ttl": {"strategy": "keep"}}}, r"checkpointer\.ttl\.strategy .*'keep'"),
        ({"http": {"cors": {"allow_origins": "https://a"}}}, r"http\.cors\.allow_origins"),
        ({"http": []}, "http"),
        ({"graphs": ["shop"]}, "contains no graphs"),
    ],
)
def test_invalid_section_is_refused_by_name(
    app_folder: Path, sections: Any, expected_error: str
) -> None:
    with pytest.raises(ConfigurationError, match=expected_error):
        LanggraphFile.read(write_langgraph_json(app_folder, **sections))


def test_http_app_that_is_not_an_application_is_refused(
    app_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs = write_langgraph_json(app_folder, http={"app": "./shop_app.py:embed"})
    message = run_and_read_error(
        "serve", "--port", "0", "--graphs", graphs, "--db", str(app_folder / "m.db"), capsys=capsys
    )
    assert "expected a Starlette or FastAPI application" in message


def test_settings_file_of_current_folder_may_not_name_graphs(
    app_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a cloned folder could make any command run its code."""
    write_langgraph_json(app_folder)
    (app_folder / "perdure.toml").write_text('graphs = "langgraph.json"\n')
    monkeypatch.chdir(app_folder)
    assert "determines which code is run" in run_and_read_error(
        "store", "search", "notes", capsys=capsys
    )
    monkeypatch.setenv("PERDURE_CONFIG", str(app_folder / "perdure.toml"))
    run("store", "put", "notes", "a", "--text", "tea", "--db", str(app_folder / "m.db"))
