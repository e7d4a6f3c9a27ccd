"""The application: routes, who may call them, what surrounds each request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.responses import RedirectResponse
from starlette.staticfiles import StaticFiles

from perdure import __version__, settings
from perdure.server import (
    api_memories,
    api_store,
    api_threads,
    pages_checkpoints,
    pages_items,
    pages_memories,
    pages_storage,
    pages_threads,
)
from perdure.server.access import Access, Local, public
from perdure.server.call import Databases
from perdure.server.guard import LOOPBACK, Guard
from perdure.server.limits import AtOnce, Limits, Rate
from perdure.server.pages import ASSETS
from perdure.server.paths import EncodedSlashes
from perdure.server.reply import JSON, add_error_replies
from perdure.server.sessions import Sessions
from perdure.server.sessions import routes as login_routes

routes = APIRouter()


@routes.get("/", include_in_schema=False)
@public
async def root() -> RedirectResponse:
    """The first page."""
    return RedirectResponse("/ui/threads")


@routes.get("/ok")
@public
async def ok() -> dict[str, bool]:
    """Health: whether the server answers."""
    return {"ok": True}


def create_app(
    chosen: settings.Settings | None = None,
    *,
    access: Access | None = None,
    hosts: Collection[str] | None = LOOPBACK,
    limits: Limits | None = None,
) -> FastAPI:
    """Make the application.

    Args:
        chosen: The settings; None: those of perdure.toml and the environment.
        access: Who may do what; None: everybody everything, as the settings' user. Serve that on
            a loopback address only.
        hosts: The names by which this server may be called; None: any.
        limits: How much a client may ask for; None: the usual.
    """
    chosen, limits = chosen or settings.load(), limits or Limits()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.databases = Databases(chosen)
        try:
            yield
        finally:
            await app.state.databases.aclose()

    app = FastAPI(
        title="perdure",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        default_response_class=JSON,
        max_body_size=limits.body_bytes,
    )
    app.state.access = access or Local(chosen.user)
    app.state.settings = chosen
    app.state.sessions = sessions = Sessions()
    app.state.rate, app.state.at_once = Rate(limits.per_s, limits.burst), AtOnce(limits.at_once)
    add_error_replies(app)
    app.add_middleware(EncodedSlashes)
    for each in (
        routes,
        login_routes,
        api_threads.routes,
        api_store.routes,
        api_memories.routes,
        pages_threads.routes,
        pages_checkpoints.routes,
        pages_memories.routes,
        pages_items.routes,
        pages_storage.routes,
    ):
        app.include_router(each)
    app.mount("/assets", StaticFiles(directory=ASSETS), name="assets")
    _check_actions(app)
    app.add_middleware(Guard, hosts=hosts, sessions=sessions, limits=limits)
    return app


def _check_actions(app: FastAPI) -> None:
    for each in iter_route_contexts(app.routes):
        if isinstance(each.original_route, APIRoute) and not hasattr(each.endpoint, "action"):
            raise TypeError(f"{each.path} names no action; see perdure.server.access")
