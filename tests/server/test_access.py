"""Every route, asked by strangers: it names an action, answers no, and changes nothing."""

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
from perdure.checkpointers.assistants import AssistantTable
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.crons import CronTable
from perdure.checkpointers.runs import RunTable
from perdure.checkpointers.thread_list import ThreadList
from perdure.server import create_app
from perdure.server.access import ACTIONS
from perdure.server.auth_file import AuthFileAccess
from perdure.server.keys import KeysFileAccess
from perdure.server.limits import Limits
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
from tests.server.running import run_server
from tests.server.test_auth_file import written
from tests.server.test_keys import ANN, BOB, entry
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
NOTHING = """
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
"""As in langgraph's guide. A handler of threads.create gives no filter, so it must not suffice."""
MEMORY = (tuple(PLACE), KEY)
REFUSED = (401, 403, 404, 409)  # 409: the id is taken


class Route(NamedTuple):
    """A route with one method."""

    name: str
    method: str
    path: str
    of: APIRoute

    @property
    def action(self) -> str | None:
        """What it is; None: it is public."""
        return getattr(self.of.endpoint, "action", None)


def routes() -> list[Route]:
    """All routes of the application that FastAPI has made."""
    found = []
    for each in iter_route_contexts(create_app(Settings(db=":memory:")).routes):
        if isinstance(each.original_route, APIRoute):
            for method in sorted(each.methods or ()):
                path = str(each.path)
                found.append(Route(f"{method} {path}", method, path, each.original_route))
    return found


ROUTES = routes()
ASKED = [each for each in ROUTES if each.action is not None]


def test_every_route_names_its_action_or_is_public() -> None:
    assert {each.action for each in ASKED} <= set(ACTIONS)
    assert {each.name for each in ROUTES if each.action is None} <= PUBLIC
    others = {
        each.path: getattr(each.endpoint, "action", None)
        for each in iter_route_contexts(create_app(Settings(db=":memory:")).routes)
        if not isinstance(each.original_route, APIRoute)
    }
    socket = {"/threads/{thread_id}/stream/events": "threads:read"}
    assert others == {"/openapi.json": None, "/assets": None, **socket}


class Place(NamedTuple):
    """A database with Ann's things, and servers over it."""

    saver: Checkpointer
    store: WholeStore
    keys: str
    nothing: str
    guide: str
    named: dict[str, Any]
    client: httpx.Client


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server with keys of Ann and Bob, one whose handlers allow nothing, one with the guide's."""
    folder: Path = tmp_path_factory.mktemp("access")
    keys, db = folder / "keys.toml", str(folder / "memory.db")
    keys.write_text(entry(ANN, "ann") + entry(BOB, "bob"))
    settings, limits = Settings(db=db), Limits(requests_per_s=1e6, burst=10**6)
    denying = AuthFileAccess(written(folder, NOTHING, "nothing.py"))
    guide = AuthFileAccess(written(folder, GUIDE, "guide.py"))
    with (
        open_checkpointer(db) as saver,
        open_store(db) as store,
        httpx.Client(timeout=30) as client,
        run_server(create_app(settings, access=KeysFileAccess(keys), limits=limits)) as one,
        run_server(create_app(settings, access=denying, limits=limits)) as two,
        run_server(create_app(settings, access=guide, limits=limits)) as three,
    ):
        place = Place(saver, store, one, two, three, dict(NAMED), client)
        seed(place)
        yield place


def seed(place: Place) -> None:
    """Write what belongs to Ann, what is missing of it."""
    place.saver.delete_thread(FORK)
    with place.saver.lock(THREAD, timeout_s=30):  # a run that Ann began may still be under way
        if missing := not place.saver.heads(prefix=THREAD):
            store_conversation(
                place.saver, THREAD, texts=[CANARY, "yes"], user_id="ann", graph_id="chat"
            )
    run_id = place.named.get("run_id", "none")
    if missing or not asyncio.run(
        RunTable(place.saver).list_runs(THREAD, run_id)
    ):  # it was deleted
        runs, headers = f"{place.keys}/threads/{THREAD}/runs", {"x-api-key": ANN}
        began = place.client.post(runs, json=BODIES["POST /runs"], headers=headers)
        place.named["run_id"] = run = began.json()["run_id"]
        place.client.get(f"{runs}/{run}/join", headers=headers)
    if place.store.get(*MEMORY) is None:
        place.store.put(*MEMORY, {"text": CANARY, "kind": "fact"})
    kept = {"thread_id": KEPT, "metadata": {"of": CANARY}, "if_exists": "do_nothing"}
    place.client.post(f"{place.keys}/threads", json=kept, headers={"x-api-key": ANN})
    made = BODIES["POST /assistants"]
    place.client.post(f"{place.keys}/assistants", json=made, headers={"x-api-key": ANN})
    crons = f"{place.keys}/runs/crons", {"x-api-key": ANN}
    known = place.client.post(f"{crons[0]}/search", json={}, headers=crons[1]).json()
    made = known or [place.client.post(crons[0], json=CRON, headers=crons[1]).json()]
    place.named["cron_id"] = made[0]["cron_id"]
    ids = [each.checkpoint_id for each in place.saver.checkpoints(THREAD, checkpoint_ns="")]
    place.named.update(checkpoint_id=ids[0], checkpoint=ids[0], a=ids[0], b=ids[-1])


def of_ann(place: Place) -> Any:
    """What belongs to Ann."""
    return (
        [each.checkpoint_id for each in place.saver.checkpoints(THREAD)],
        [each.value.content for each in place.saver.history(THREAD)],
        (item := place.store.get(*MEMORY)) and item.dict(),
        ThreadList(place.saver).get(KEPT),
        sorted(asyncio.run(CronTable(place.saver).list_crons())),
        [row.live.run_id for row in asyncio.run(RunTable(place.saver).list_runs(THREAD))],
        asyncio.run(AssistantTable(place.saver).list_versions(ASSISTANT)),
    )


def in_query(dependant: Dependant) -> Iterator[Any]:
    """The parameters of an endpoint's query, and of what it depends on; models have defaults."""
    for each in dependant.query_params:
        if not hasattr(each.field_info.annotation, "model_fields"):
            yield each
    for inner in dependant.dependencies:
        yield from in_query(inner)


def ask(place: Place, url: str, route: Route, key: str = "") -> httpx.Response:
    """The answer to the example of a route."""
    named, queried = dict(place.named), [*in_query(route.of.dependant)]
    if any(each.name == "ns" and each.field_info.annotation is str for each in queried):
        del named["ns"]  # it is a namespace of checkpoints
    missing = {each.name for each in route.of.dependant.path_params} - named.keys()
    missing |= {
        each.name for each in queried if each.field_info.is_required() and each.name not in named
    }
    has_body = route.of.body_field is not None and not route.path.startswith("/ui/")
    assert not missing, f"{route.name} has {missing}: add them to NAMED in tests/server/examples.py"
    assert not has_body or route.name in BODIES, f"{route.name}: add a body to BODIES"
    sent: dict[str, Any] = {}
    if route.path.startswith("/ui/") and route.method == "POST":
        sent["data"] = named | FORMS.get(route.name, {})
    elif route.name in BODIES:
        sent["json"] = BODIES[route.name]
    path = re.sub(r"\{(\w+)(:\w+)?\}", lambda found: str(named[found[1]]), route.path)
    headers = {"x-api-key": key, "accept": "*/*"} if key else {}
    with place.client.stream(
        route.method, url + path, params=named, headers=headers, **sent
    ) as reply:
        if "event-stream" not in reply.headers.get("content-type", "") or reply.status_code >= 400:
            reply.read()
    return reply


@pytest.mark.parametrize("route", ASKED, ids=lambda route: route.name)
def test_routes_refuse_strangers_and_change_nothing(place: Place, route: Route) -> None:
    seed(place)
    before = of_ann(place)
    nobody = ask(place, place.keys, route)
    bob = ask(place, place.keys, route, BOB)
    denied = ask(place, place.nothing, route, ANN)
    guided = ask(place, place.guide, route, BOB)
    after = of_ann(place)

    assert nobody.status_code == 401
    assert denied.status_code == 403, denied.text
    assert guided.status_code < 500
    assert after == before
    assert not [each for each in (nobody, bob, denied, guided) if CANARY in body(each)]
    assert not place.saver.heads(prefix=FORK)
    if route.name in OWN:
        assert bob.status_code < 500
    else:
        assert bob.status_code in REFUSED, bob.text


def body(reply: httpx.Response) -> str:
    """What was read of an answer; of a stream nothing."""
    return reply.text if reply.is_stream_consumed else ""


@pytest.mark.parametrize(
    "route", [each for each in ASKED if each.action != "admin"], ids=lambda route: route.name
)
def test_routes_answer_their_examples_for_owner(place: Place, route: Route) -> None:
    """Ann, whose things they are about, is not refused: so the strangers were."""
    seed(place)
    reply = ask(place, place.keys, route, ANN)
    unproven = (404, 422) if route.name in UNPROVEN else ()

    assert reply.status_code < 400 or reply.status_code in (405, 409, *unproven), body(reply)
