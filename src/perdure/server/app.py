"""The application: routes, who may call them, what surrounds each request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, MutableMapping
from contextlib import asynccontextmanager, nullcontext
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute, iter_route_contexts
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from perdure import __version__, settings
from perdure.server import (
    api_crons,
    api_memories,
    api_people,
    api_runs,
    api_states,
    api_store,
    api_threads,
    assistants,
    event_streams,
    mcp,
    pages_checkpoints,
    pages_items,
    pages_memories,
    pages_people,
    pages_runs,
    pages_storage,
    pages_threads,
    thread_stream,
)
from perdure.server.access import Access, LocalAccess, action, public
from perdure.server.call import CurrentCall
from perdure.server.custom_app import CustomApp
from perdure.server.databases import DatabaseOptions, Databases
from perdure.server.graphs import Graphs
from perdure.server.guard import (
    EXPOSED_HEADERS,
    LOOPBACK_HOSTS,
    METHODS,
    EncodedSlashes,
    Guard,
    add_error_replies,
    validate_origins,
)
from perdure.server.limits import Limits, RequestLimiter
from perdure.server.logs import Audit
from perdure.server.pages import ASSETS, render_page
from perdure.server.reply import JSONReply
from perdure.server.runs import Players, Runs
from perdure.server.schedule import Schedule
from perdure.server.sessions import Sessions
from perdure.server.sessions import routes as login_routes
from perdure.server.teams import RunTeams
from perdure.server.telemetry import Telemetry
from perdure.server.webhooks import Webhooks
from perdure.storage.host_names import ascii_host

routes, metrics_routes = APIRouter(), APIRouter()


@routes.get("/", include_in_schema=False)
@routes.get("/ui", include_in_schema=False)
@public
async def redirect_to_first_page() -> RedirectResponse:
    """The first page."""
    return RedirectResponse("/ui/threads")


@routes.get("/ok")
@public
async def report_health() -> dict[str, bool]:
    """Health: whether the server answers."""
    return {"ok": True}


@routes.get("/info")
@public
async def describe_server(request: Request) -> dict[str, Any]:
    """What this server is and has, as clients of langgraph's ask."""
    paths = request.app.openapi()["paths"]
    return {
        "version": __version__,
        "langgraph_py_version": version("langgraph"),
        "flags": {
            "assistants": True,
            "crons": "/runs/crons" in paths,
            "langsmith": False,
            "langsmith_tracing_replicas": False,
        },
        "host": {"kind": "self-hosted"},
    }


@routes.get("/docs", include_in_schema=False)
@public
async def show_api_docs(request: Request) -> Response:
    """The paths for programs, as `/openapi.json` describes them."""
    openapi = request.app.openapi()
    schemas = openapi["components"]["schemas"]
    return render_page(request, "docs.html", paths=openapi["paths"], schemas=schemas)


@metrics_routes.get("/metrics", include_in_schema=False)
@action("admin")
async def export_metrics(call: CurrentCall, request: Request) -> Response:
    """The metrics as Prometheus reads them."""
    await call.permit()
    text = await request.app.state.telemetry.render_metrics(
        await request.app.state.databases.get_or_open(None)
    )
    return Response(text, media_type="text/plain; version=0.0.4")


def create_app(
    server_settings: settings.Settings | None = None,
    *,
    access: Access | None = None,
    graphs: Graphs | None = None,
    hosts: Collection[str] | None = LOOPBACK_HOSTS,
    origins: Collection[str] = (),
    limits: Limits | None = None,
    audit: Audit | None = None,
    telemetry: Telemetry | None = None,
    webhook_hosts: Collection[str] = (),
    sessions: MutableMapping[str, Any] | None = None,
    database_options: DatabaseOptions | None = None,
    custom_app: Any = None,
) -> FastAPI:
    """Make the application.

    Args:
        server_settings: The settings, or None for those of perdure.toml and the environment.
        access: Who may do what; None: everybody everything, as the settings' user. Serve that on
            a loopback address only.
        graphs: What is run; None: perdure's own chat and agent.
        hosts: The names by which this server may be called; None: any.
        origins: Sites whose scripts may call it, such as `http://localhost:3000`; with a key of
            their own, as cookies are not taken from them.
        limits: How much a client may ask for; None: the usual.
        audit: Where edits and erasures are recorded; None: the logger `perdure.audit`.
        telemetry: Metrics and spans; None: neither.
        webhook_hosts: Who may be told of the ends of runs: `"hooks.example.com"`, by https, or
            `"http://10.0.0.7:8080"`.
        sessions: Where those of browsers are, if several processes share them; None: in memory.
        database_options: The options of the store and of new threads, or None for the defaults.
        custom_app: A Starlette or FastAPI application, or None. It serves paths that perdure does
            not have, for users who have been identified.

    Raises:
        ConfigurationError: An origin, or the custom application, is none.
    """
    chosen, limits, audit = server_settings or settings.load(), limits or Limits(), audit or Audit()
    served_graphs = graphs or Graphs.load_built_in(chosen)
    webhooks = Webhooks(webhook_hosts, chosen.webhook_secret)
    custom_application = None if custom_app is None else CustomApp(custom_app)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        options: dict[str, Any] = {"saver_options": getattr(served_graphs, "saver_options", {})}
        options["options"] = database_options or DatabaseOptions()
        if telemetry is not None:
            options["instrument"] = telemetry.build_measured_class
        people = getattr(app.state.access, "owners_are_people", True)
        # without authentication, a client may name an owner, which says nothing about other threads
        options["has_organisations"] = not people and not isinstance(app.state.access, LocalAccess)
        app.state.databases = Databases(chosen, **options)
        players: Players = {"run": api_runs.RunEvents, "thread": event_streams.ThreadEvents}
        parts = served_graphs, limits, app.state.databases, players, telemetry, webhooks
        teams = RunTeams(app.state.access)
        runs = Runs(*parts, owners_are_people=people, teams=teams)
        runs.schedule = Schedule(app.state.access, app.state.databases, runs)
        app.state.runs = runs
        try:
            # those of other kinds of access are known when somebody asks
            await app.state.runs.open_tenants(getattr(app.state.access, "tenants", (None,)))
            async with (
                nullcontext()
                if custom_application is None
                else custom_application.run_lifespan() as state
            ):
                if custom_application is not None:
                    custom_application.set_state(state)
                yield
        finally:
            await app.state.runs.aclose()
            await app.state.databases.aclose()
            audit.close()

    app = FastAPI(
        title="perdure",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        default_response_class=JSONReply,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # it has paths and queries
        max_body_size=limits.body_bytes,
    )
    app.state.access = access or LocalAccess(chosen.user)
    app.state.settings, app.state.audit, app.state.telemetry = chosen, audit, telemetry
    app.state.sessions, app.state.clients, app.state.limits = (
        Sessions(sessions),
        RequestLimiter(limits),
        limits,
    )
    app.state.hosts = None if hosts is None else {ascii_host(each) for each in hosts}
    app.state.origins = validate_origins(origins)
    add_error_replies(app)
    app.add_middleware(EncodedSlashes)
    for each in (
        api_runs.routes,  # what is asked for most often is found first
        event_streams.routes,
        routes,
        login_routes,
        api_threads.routes,
        api_states.routes,
        thread_stream.routes,
        assistants.routes,
        api_crons.routes,
        api_store.routes,
        api_memories.routes,
        api_people.routes,
        mcp.routes,
        *([metrics_routes] if telemetry is not None and telemetry.has_metrics else []),
        pages_threads.routes,
        pages_runs.routes,
        pages_checkpoints.routes,
        pages_memories.routes,
        pages_people.routes,
        pages_items.routes,
        pages_storage.routes,
    ):
        app.include_router(each)
    app.mount("/assets", StaticFiles(directory=ASSETS), name="assets")
    _require_actions(app)
    app.state.first_segments = None
    if custom_application is not None:
        app.state.first_segments = _collect_first_segments(app)
        app.router.default = custom_application
    app.add_middleware(Guard)  # the last is the outermost
    if origins:  # their scripts can read refusals, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=app.state.origins,
            allow_methods=METHODS,
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
            allow_private_network=True,
        )
    return app


def _collect_first_segments(app: FastAPI) -> frozenset[str]:
    """Return the first segments of perdure's paths, such as `threads` of `/threads/{thread_id}`."""
    paths = (getattr(each.original_route, "path", "/") for each in iter_route_contexts(app.routes))
    return frozenset(path.split("/")[1] for path in paths)


def _require_actions(app: FastAPI) -> None:
    for each in iter_route_contexts(app.routes):
        is_api_route = isinstance(each.original_route, APIRoute | APIWebSocketRoute)
        if is_api_route and not hasattr(each.endpoint, "action"):
            raise TypeError(f"{each.path} names no action; see perdure.server.access")
