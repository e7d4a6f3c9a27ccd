"""Every route names an action, refuses strangers, and changes nothing for them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.run_tables.assistants import AssistantTable
from perdure.run_tables.crons import CronTable
from perdure.run_tables.runs import RunTable
from perdure.run_tables.thread_list import ThreadList
from perdure.server import create_app
from perdure.server.http.access import ACTIONS
from perdure.server.http.auth_file import AuthFileAccess
from perdure.server.http.keys import KeysFileAccess
from perdure.server.http.limits import Limits
from perdure.settings import Settings
from perdure.stores import open_store
from perdure.stores.whole_store import WholeStore
from tests.server.examples import (
    ASSISTANT,
    BODIES,
    CANARY,
    CRON,
    FORK,
    FORMS,
    KEPT,
    KEY,
    NAMED,
    OWN,
    PLACE,
    THREAD,
    UNPROVEN,
)
from tests.server.http.test_auth_file import write_auth_file
from tests.server.http.test_keys import ANN, BOB, render_key_entry
from tests.server.running import run_server
from tests.server_tables import open_table
from tests.talks import store_conversation

PUBLIC = {
    "GET /",
    "GET /ok",
    "GET /info",
    "GET /docs",
    "GET /ui",
    "GET /ui/login",
    "POST /ui/login",
    "POST /ui/logout",
    "DELETE /mcp",
    "GET /mcp",
    "POST /mcp",  # its tools are asked in tests/server/test_mcp.py
}
AUTH_WITHOUT_HANDLERS = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def user(headers): return headers.get(b"x-api-key", b"nobody").decode()
"""
GUIDE = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def user(headers):
    return {"identity": headers[b"x-api-key"].decode().removeprefix("key-of-")}

@auth.on
async def deny(ctx, value):
    return False

@auth.on.assistants
async def assistants(ctx, value):
    value.setdefault("metadata", {})["owner"] = ctx.user.identity
    return {"owner": ctx.user.identity}

@auth.on.threads
async def threads(ctx, value):
    value.setdefault("metadata", {})["owner"] = ctx.user.identity
    return {"owner": ctx.user.identity}

@auth.on.threads.create
async def create(ctx, value):
    value.setdefault("metadata", {})["owner"] = ctx.user.identity

@auth.on.store
async def store(ctx, value):
    value["namespace"] = (ctx.user.identity, *(value.get("namespace") or ()))
"""
"""Handlers of langgraph's guide. The handler of threads.create returns no filter."""
MEMORY = (tuple(PLACE), KEY)
REFUSED_STATUSES = (401, 403, 404, 409)  # 409: the id is taken


class Route(NamedTuple):
    """A route and one of its methods."""

    name: str
    method: str
    path: str
    of: APIRoute

    @property
    def action(self) -> str | None:
        """The action that the route requires, or None if the route is public."""
        return getattr(self.of.endpoint, "action", None)


def list_routes() -> list[Route]:
    """Return all routes of the application that FastAPI has built."""
    routes = []
    for context in iter_route_contexts(create_app(Settings(db=":memory:")).routes):
        if isinstance(context.original_route, APIRoute):
            for method in sorted(context.methods or ()):
                path = str(context.path)
                routes.append(Route(f"{method} {path}", method, path, context.original_route))
    return routes


ROUTES = list_routes()
PROTECTED_ROUTES = [each for each in ROUTES if each.action is not None]


def test_every_route_names_its_action_or_is_public() -> None:
    assert {each.action for each in PROTECTED_ROUTES} <= set(ACTIONS)
    assert {each.name for each in ROUTES if each.action is None} <= PUBLIC
    others = {
        each.path: getattr(each.endpoint, "action", None)
        for each in iter_route_contexts(create_app(Settings(db=":memory:")).routes)
        if not isinstance(each.original_route, APIRoute)
    }
    socket = {"/threads/{thread_id}/stream/events": "threads:read"}
    assert others == {"/openapi.json": None, "/assets": None, **socket}


class SeededServers(NamedTuple):
    """A database with data of Ann, and the servers that use it."""

    saver: Checkpointer
    store: WholeStore
    keys: str
    nothing: str
    guide: str
    named: dict[str, Any]
    client: httpx.Client


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeededServers]:
    """Servers with keys, with handlers that allow nothing, and with the handlers of the guide."""
    folder: Path = tmp_path_factory.mktemp("access")
    keys, db = folder / "keys.toml", str(folder / "memory.db")
    keys.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob"))
    settings, limits = Settings(db=db), Limits(requests_per_s=1e6, burst=10**6)
    denying = AuthFileAccess(write_auth_file(folder, AUTH_WITHOUT_HANDLERS, "nothing.py"))
    guide = AuthFileAccess(write_auth_file(folder, GUIDE, "guide.py"))
    with (
        open_checkpointer(db) as saver,
        open_store(db) as store,
        httpx.Client(timeout=30) as client,
        run_server(create_app(settings, access=KeysFileAccess(keys), limits=limits)) as one,
        run_server(create_app(settings, access=denying, limits=limits)) as two,
        run_server(create_app(settings, access=guide, limits=limits)) as three,
    ):
        place = SeededServers(saver, store, one, two, three, dict(NAMED), client)
        restore_data_of_ann(place)
        yield place


def restore_data_of_ann(servers: SeededServers) -> None:
    """Write those data of Ann that are missing."""
    servers.saver.delete_thread(FORK)
    with servers.saver.lock(THREAD, timeout_s=30):  # a run that Ann began may still be under way
        if missing := not servers.saver.heads(prefix=THREAD):
            store_conversation(
                servers.saver, THREAD, texts=[CANARY, "yes"], user_id="ann", graph_id="chat"
            )
    run_id = servers.named.get("run_id", "none")
    if missing or not asyncio.run(
        open_table(RunTable, servers.saver).list_runs(THREAD, run_id)
    ):  # it was deleted
        runs, headers = f"{servers.keys}/threads/{THREAD}/runs", {"x-api-key": ANN}
        reply = servers.client.post(runs, json=BODIES["POST /runs"], headers=headers)
        servers.named["run_id"] = run = reply.json()["run_id"]
        servers.client.get(f"{runs}/{run}/join", headers=headers)
    if servers.store.get(*MEMORY) is None:
        servers.store.put(*MEMORY, {"text": CANARY, "kind": "fact"})
    thread = {"thread_id": KEPT, "metadata": {"of": CANARY}, "if_exists": "do_nothing"}
    servers.client.post(f"{servers.keys}/threads", json=thread, headers={"x-api-key": ANN})
    made = BODIES["POST /assistants"]
    servers.client.post(f"{servers.keys}/assistants", json=made, headers={"x-api-key": ANN})
    crons = f"{servers.keys}/runs/crons", {"x-api-key": ANN}
    found_crons = servers.client.post(f"{crons[0]}/search", json={}, headers=crons[1]).json()
    made = found_crons or [servers.client.post(crons[0], json=CRON, headers=crons[1]).json()]
    servers.named["cron_id"] = made[0]["cron_id"]
    ids = [each.checkpoint_id for each in servers.saver.checkpoints(THREAD, checkpoint_ns="")]
    servers.named.update(checkpoint_id=ids[0], checkpoint=ids[0], a=ids[0], b=ids[-1])


def read_data_of_ann(servers: SeededServers) -> Any:
    """Return all data of Ann, for comparison."""
    return (
        [each.checkpoint_id for each in servers.saver.checkpoints(THREAD)],
        [each.value.content for each in servers.saver.history(THREAD)],
        (item := servers.store.get(*MEMORY)) and item.dict(),
        ThreadList(servers.saver).get(KEPT),
        sorted(asyncio.run(open_table(CronTable, servers.saver).list_crons())),
        [
            row.live.run_id
            for row in asyncio.run(open_table(RunTable, servers.saver).list_runs(THREAD))
        ],
        asyncio.run(open_table(AssistantTable, servers.saver).list_versions(ASSISTANT)),
    )


def iter_query_parameters(dependant: Dependant) -> Iterator[Any]:
    """Yield the query parameters of an endpoint and of its dependencies, except models."""
    for parameter in dependant.query_params:
        if not hasattr(parameter.field_info.annotation, "model_fields"):
            yield parameter
    for dependency in dependant.dependencies:
        yield from iter_query_parameters(dependency)


def send_example(servers: SeededServers, url: str, route: Route, key: str = "") -> httpx.Response:
    """Send the example request of a route and return the reply."""
    named, queried = dict(servers.named), [*iter_query_parameters(route.of.dependant)]
    if any(
        parameter.name == "ns" and parameter.field_info.annotation is str for parameter in queried
    ):
        del named["ns"]  # it is a namespace of checkpoints
    missing = {parameter.name for parameter in route.of.dependant.path_params} - named.keys()
    missing |= {
        parameter.name
        for parameter in queried
        if parameter.field_info.is_required() and parameter.name not in named
    }
    has_body = route.of.body_field is not None and not route.path.startswith("/ui/")
    assert not missing, f"{route.name} has {missing}: add them to NAMED in tests/server/examples.py"
    assert not has_body or route.name in BODIES, f"{route.name}: add a body to BODIES"
    request_body: dict[str, Any] = {}
    if route.path.startswith("/ui/") and route.method == "POST":
        request_body["data"] = named | FORMS.get(route.name, {})
    elif route.name in BODIES:
        request_body["json"] = BODIES[route.name]
    path = re.sub(r"\{(\w+)(:\w+)?\}", lambda found: str(named[found[1]]), route.path)
    headers = {"x-api-key": key, "accept": "*/*"} if key else {}
    with servers.client.stream(
        route.method, url + path, params=named, headers=headers, **request_body
    ) as reply:
        if "event-stream" not in reply.headers.get("content-type", "") or reply.status_code >= 400:
            reply.read()
    return reply


@pytest.mark.parametrize("route", PROTECTED_ROUTES, ids=lambda route: route.name)
def test_routes_refuse_strangers_and_change_nothing(servers: SeededServers, route: Route) -> None:
    restore_data_of_ann(servers)
    before = read_data_of_ann(servers)
    nobody = send_example(servers, servers.keys, route)
    bob = send_example(servers, servers.keys, route, BOB)
    denied = send_example(servers, servers.nothing, route, ANN)
    guided = send_example(servers, servers.guide, route, BOB)
    after = read_data_of_ann(servers)

    assert nobody.status_code == 401
    assert denied.status_code == 403, denied.text
    assert guided.status_code < 500
    assert after == before
    assert not [each for each in (nobody, bob, denied, guided) if CANARY in read_body(each)]
    assert not servers.saver.heads(prefix=FORK)
    if route.name in OWN:
        assert bob.status_code < 500
    else:
        assert bob.status_code in REFUSED_STATUSES, bob.text


def read_body(reply: httpx.Response) -> str:
    """Return the text of the reply, or an empty string for a stream that was not read."""
    return reply.text if reply.is_stream_consumed else ""


@pytest.mark.parametrize(
    "route",
    [each for each in PROTECTED_ROUTES if each.action != "admin"],
    ids=lambda route: route.name,
)
def test_routes_answer_their_examples_for_owner(servers: SeededServers, route: Route) -> None:
    """Ann is not refused, so the refusals of strangers do not come from invalid examples."""
    restore_data_of_ann(servers)
    reply = send_example(servers, servers.keys, route, ANN)
    unproven = (404, 422) if route.name in UNPROVEN else ()

    assert reply.status_code < 400 or reply.status_code in (405, 409, *unproven), read_body(reply)
