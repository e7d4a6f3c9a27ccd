"""Build the server's ASGI application from its routes, access rules and middleware."""

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
    thread_stream,
)
from perdure.server.databases import DatabaseOptions, Databases
from perdure.server.graphs import Graphs
from perdure.server.http.access import Access, LocalAccess, public, set_required_action
from perdure.server.http.call import CurrentCall
from perdure.server.http.custom_app import CustomApp
from perdure.server.http.guard import (
    LOOPBACK_HOSTS,
    METHODS,
    EncodedSlashes,
    Guard,
    register_error_handlers,
    validate_origins,
)
from perdure.server.http.headers import EXPOSED_HEADERS
from perdure.server.http.health import HEALTH_PATH, DatabaseCheck
from perdure.server.http.limits import Limits, RequestLimiter
from perdure.server.http.logs import Audit
from perdure.server.http.reply import JSONReply
from perdure.server.http.sessions import Sessions
from perdure.server.http.sessions import routes as login_routes
from perdure.server.pages import (
    checkpoint_pages,
    item_pages,
    memory_pages,
    people_pages,
    run_pages,
    storage_pages,
    thread_pages,
    waiting_pages,
)
from perdure.server.pages.rendering import ASSETS, render_page
from perdure.server.runs.graph_events import RunEvents
from perdure.server.runs.run_manager import RunManager
from perdure.server.runs.schedule import Schedule
from perdure.server.runs.shared_run_state import SharedRunState
from perdure.server.runs.webhooks import Webhooks
from perdure.server.teams import RunTeams
from perdure.server.telemetry import Telemetry
from perdure.storage.host_names import ascii_host

routes = APIRouter(default_response_class=JSONReply)
metrics_routes = APIRouter(default_response_class=JSONReply)


@routes.get("/", include_in_schema=False)
@routes.get("/ui", include_in_schema=False)
@public
async def redirect_to_first_page() -> RedirectResponse:
    """Redirect to the list of threads, which is the start page."""
    return RedirectResponse("/ui/threads")


@routes.get(HEALTH_PATH)
@public
async def report_health(request: Request, check_db: bool = False) -> JSONReply:
    """Respond to a health check with `{"ok": true}`.

    With `check_db=1`, the status is 503 if the database cannot be written. The server's log has the
    reason.
    """
    is_ok = not check_db or await request.app.state.database_check.find_problem() is None
    return JSONReply({"ok": is_ok}, 200 if is_ok else 503)


@routes.get("/info")
@public
async def describe_server(request: Request) -> dict[str, Any]:
    """Return the server's versions and features, in the format of the LangGraph server."""
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
    """Show the REST paths that `/openapi.json` documents."""
    openapi = request.app.openapi()
    return render_page(
        request, "docs.html", paths=openapi["paths"], schemas=openapi["components"]["schemas"]
    )


@metrics_routes.get("/metrics", include_in_schema=False)
@set_required_action("admin")
async def export_metrics(call: CurrentCall, request: Request) -> Response:
    """Return the metrics in the Prometheus text format."""
    await call.authorize_action_arguments()
    text = await request.app.state.telemetry.render_metrics(
        await request.app.state.databases.get_or_open_database(None)
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
    """Build the application.

    Args:
        server_settings: The settings, or None for those of perdure.toml and the environment.
        access: The rules for authentication and authorization. With None, there is no
            authentication. Every request then has all permissions and acts as the `user` in the
            settings. Serve such an application only on a loopback address.
        graphs: The graphs that the server runs, or None for perdure's chat and agent.
        hosts: The host names under which clients may call this server, or None for any name.
        origins: Sites whose scripts may call the server, such as `http://localhost:3000`. Requests
            from these sites need an API key, because cookies from other origins are ignored.
        limits: The limits of requests, or None for the defaults.
        audit: The log of edits and erasures, or None for the logger `perdure.audit`.
        telemetry: Records metrics and spans. With None, nothing is recorded.
        webhook_hosts: Hosts to which webhooks may be sent: `"hooks.example.com"` for https, or a
            whole origin such as `"http://10.0.0.7:8080"`.
        sessions: The mapping that stores browser sessions, if several processes share them. With
            None, sessions are in the memory of this process.
        database_options: The options with which stores are opened and the time to live of new
            threads, or None for the defaults.
        custom_app: A Starlette or FastAPI application, or None. The custom application serves the
            paths that perdure does not have, after the server has identified the user.

    Raises:
        ConfigurationError: An origin is not valid, or `custom_app` is neither a Starlette nor a
            FastAPI application.
    """
    loaded_settings, limits, audit = (
        server_settings or settings.load(),
        limits or Limits(),
        audit or Audit(),
    )
    served_graphs = graphs or Graphs.load_built_in(loaded_settings)
    webhooks = Webhooks(webhook_hosts, loaded_settings.webhook_secret)
    custom = None if custom_app is None else CustomApp(custom_app)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        owners_are_people = getattr(app.state.access, "owners_are_people", True)
        # If owners need not be people, a thread's `owner` may be an organisation, and each database
        # gets a mark that says so. With `LocalAccess`, no mark is stored. It does not authenticate
        # clients, so `owner` can be any text and does not show that organisations own threads.
        has_organisations = not owners_are_people and not isinstance(app.state.access, LocalAccess)
        app.state.databases = Databases(
            loaded_settings,
            telemetry.build_measured_class if telemetry else None,
            getattr(served_graphs, "saver_options", {}),
            database_options,
            has_organisations=has_organisations,
        )
        tenants = getattr(app.state.access, "tenants", (None,))
        app.state.database_check = DatabaseCheck(app.state.databases, next(iter(tenants), None))
        shared_run_state = SharedRunState(
            served_graphs,
            limits,
            app.state.databases,
            {"run": RunEvents, "thread": event_streams.ThreadEvents},
            webhooks,
            measure_run=telemetry.measure_run if telemetry else nullcontext,
            owners_are_people=owners_are_people,
            teams=RunTeams(app.state.access),
        )
        app.state.runs = RunManager(shared_run_state)
        shared_run_state.start_due_crons = Schedule(
            app.state.access, app.state.databases, app.state.runs
        ).start_due_runs
        try:
            # Open the databases of the tenants that are known in advance. The database of any other
            # tenant is opened on that tenant's first request.
            await app.state.runs.open_tenant_databases(tenants)
            async with nullcontext() if custom is None else custom.run_lifespan():
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
        # Disable FastAPI's own telemetry, because it would record paths and query strings.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        max_body_size=limits.body_bytes,
    )
    app.state.access = access or LocalAccess(loaded_settings.user)
    app.state.settings, app.state.audit, app.state.telemetry = loaded_settings, audit, telemetry
    app.state.sessions, app.state.clients, app.state.limits = (
        Sessions(sessions),
        RequestLimiter(limits),
        limits,
    )
    app.state.hosts = None if hosts is None else {ascii_host(host) for host in hosts}
    app.state.origins = validate_origins(origins)
    register_error_handlers(app)
    app.add_middleware(EncodedSlashes)
    for router in (
        # Routes are matched in the order of this tuple, so the most frequently requested routes
        # come first.
        api_runs.routes,
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
        thread_pages.routes,
        run_pages.routes,
        waiting_pages.routes,
        checkpoint_pages.routes,
        memory_pages.routes,
        people_pages.routes,
        item_pages.routes,
        storage_pages.routes,
    ):
        # All applications share the routes of a router. `include_router` would make a copy of each
        # route for this application, with its prefix and dependencies, which takes 0.1 s of CPU
        # time. perdure's routers need neither.
        app.router.routes.extend(router.routes)
    app.mount("/assets", StaticFiles(directory=ASSETS), name="assets")
    _check_endpoints_declare_actions(app)
    # The first path segments of perdure's own routes, or None if the server has no custom
    # application; see `guard._is_perdure_path`.
    app.state.first_segments = None
    if custom is not None:
        app.state.first_segments = _collect_first_path_segments(app)
        app.router.default = custom
    # Starlette calls middleware in reverse order of registration.
    app.add_middleware(Guard)
    if origins:
        # Wrap `Guard` in the CORS middleware, so that its error responses also get CORS headers and
        # can be read by scripts from allowed origins.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=app.state.origins,
            allow_methods=METHODS,
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
            allow_private_network=True,
        )
    return app


def _collect_first_path_segments(app: FastAPI) -> frozenset[str]:
    """Return the first path segment of each route.

    For example, the first segment of `/threads/{thread_id}` is `threads`.
    """
    return frozenset(
        getattr(context.original_route, "path", "/").split("/")[1]
        for context in iter_route_contexts(app.routes)
    )


def _check_endpoints_declare_actions(app: FastAPI) -> None:
    """Raise TypeError if an endpoint does not declare the action that it performs."""
    for context in iter_route_contexts(app.routes):
        # In older versions of FastAPI, the context of a websocket route has no endpoint.
        route = context.original_route
        if not isinstance(route, APIRoute | APIWebSocketRoute) or hasattr(route.endpoint, "action"):
            continue
        raise TypeError(
            f"the endpoint {route.path} declares no required action; decorate it with "
            "perdure.server.http.access.set_required_action"
        )
