"""The application: health, HEAD requests, and integers that no database can store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts

from perdure import __version__
from perdure.server import create_app
from perdure.server.http.reply import JSONReply
from perdure.settings import Settings
from tests.server.graphs import run_chat_turns
from tests.server.running import run_server

NUMBERS = [-(1 << 63) - 1, 1 << 32, (1 << 63) - 1, 10**30]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """The application over a file with a thread."""
    settings = Settings(db=str(tmp_path_factory.mktemp("app") / "memory.db"), user="ann")
    run_chat_turns(settings, "t", "one", "two")
    return create_app(settings)


@pytest.fixture(scope="module")
def client(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of the application."""
    with run_server(app) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def iter_query_parameters(dependant: Dependant) -> Iterator[Any]:
    """Yield the query parameters of an endpoint and of its dependencies."""
    yield from dependant.query_params
    for dependency in dependant.dependencies:
        yield from iter_query_parameters(dependency)


def iter_route_queries(app: FastAPI, method: str) -> Iterator[tuple[str, dict[str, str], set[str]]]:
    """Yield each route's path, its required query, and the names of its integer parameters."""
    for route in iter_route_contexts(app.routes):
        if isinstance(original_route := route.original_route, APIRoute) and method in (
            original_route.methods or ()
        ):
            parameters = [*iter_query_parameters(original_route.dependant)]
            required_values = {
                each.alias: "t" for each in parameters if each.field_info.is_required()
            }
            integer_names = {
                each.alias
                for each in parameters
                if "int" in re.findall(r"\w+", str(each.field_info.annotation))
            }
            yield re.sub(r"{\w+}", "t", str(route.path)), required_values, integer_names


def test_health_route_answers_ok(client: httpx.Client) -> None:
    assert client.get("/ok").json() == {"ok": True}


def test_head_request_has_status_and_headers_of_get_without_body(
    app: FastAPI, client: httpx.Client
) -> None:
    """The rule holds for every route, also for replies with an error."""
    paths = [(path, needed) for path, needed, _ in iter_route_queries(app, "GET")]
    assert len(paths) > 40
    for path, needed in [*paths, ("/assets/style.css", {}), ("/nonsense", {})]:
        with client.stream("GET", path, params=needed) as got:  # one of a thread does not end
            pass
        head = client.head(path, params=needed)
        assert head.status_code == got.status_code, path
        assert head.headers.get("content-type") == got.headers.get("content-type"), path
        assert head.headers.get("content-length") == got.headers.get("content-length"), path
        assert head.content == b"", path
    assert client.head("/runs/wait").status_code == 405


def test_integer_query_parameters_of_any_size_cause_no_server_error(
    app: FastAPI, client: httpx.Client
) -> None:
    """Every query is accepted or refused, never answered with a status of 500 or more."""
    queries = [
        query for query in iter_route_queries(app, "GET") if query[2] and ".json" not in query[0]
    ]
    assert {"/ui/thread", "/ui/checkpoints", "/threads/t/history", "/memories"} <= {
        path for path, _, _ in queries
    }
    for path, needed, whole in queries:
        for number in NUMBERS:
            query = {**needed, **dict.fromkeys(whole, str(number))}
            assert client.get(path, params=query).status_code < 500, (path, query)


def test_info_route_reports_versions_and_flags(client: httpx.Client) -> None:
    info = client.get("/info").json()

    assert (info["version"], info["langgraph_py_version"]) == (__version__, version("langgraph"))
    assert (info["flags"]["assistants"], info["flags"]["langsmith"]) == (True, False)
    assert info["host"]["kind"] == "self-hosted"


def test_every_route_encodes_its_values_with_json_reply(app: FastAPI) -> None:
    """Routes take the encoder from their router, because the application's is not used for them."""
    classes = {
        getattr(route.response_class, "value", route.response_class)
        for route in app.routes
        if isinstance(route, APIRoute)
    }

    assert classes == {JSONReply}
