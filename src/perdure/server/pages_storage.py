"""Pages for admins: what takes the space, retention, and the jobs of background extraction."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Form
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perdure import retention
from perdure.errors import ConfigurationError, MissingDependency
from perdure.graphs.configured import configured_model
from perdure.memory import Extraction, ModelExtractor
from perdure.memory.recall import NAMESPACE
from perdure.server.access import action
from perdure.server.call import Call, Caller
from perdure.server.pages import page, query
from perdure.settings import Settings

routes = APIRouter(include_in_schema=False)
PHRASE: Final = "remove"
_LARGEST: Final = 15
_STATES: Final = ("dead", "running", "retrying", "due", "waiting", "done")  # in this order


@routes.get("/ui/storage")
@routes.get("/ui/storage.json")
@action("admin")
async def storage(request: Request, call: Caller) -> Response:
    """Sizes by kind, the largest threads and namespaces, and growth by month."""
    await call.permit()
    of_threads, of_items, threads, items = await asyncio.gather(
        call.saver.astats(),
        call.store.astats(),
        call.saver.ausage(_LARGEST),
        call.store.ausage(_LARGEST),
    )
    months = sorted({*threads.by_month, *items.by_month})
    growth = [(m, threads.by_month.get(m, 0), items.by_month.get(m, 0)) for m in months[-24:]]
    rules = request.app.state.settings.retention
    values = {"threads": threads.largest, "namespaces": items.largest, "growth": growth}
    return page(request, "storage.html", saver=of_threads, store=of_items, **values, rules=rules)


@routes.get("/ui/storage/retention")
@routes.get("/ui/storage/retention.json")
@action("admin")
async def plan(request: Request, call: Caller) -> Response:
    """What the rules of the settings would remove now."""
    await call.permit()
    rules = request.app.state.settings.retention
    report = await retention.aplan(rules, call.saver, call.store)
    return page(request, "retention.html", rules=rules, report=report, phrase=PHRASE, is_done=False)


@routes.post("/ui/storage/retention")
@action("admin")
async def apply(request: Request, call: Caller, typed: Annotated[str, Form()] = "") -> Response:
    """Apply the rules, once the phrase was typed."""
    await call.permit()
    if typed.strip() != PHRASE:
        raise ConfigurationError(f"nothing was removed: {typed!r} was typed, expected {PHRASE!r}")
    rules = request.app.state.settings.retention
    report = await retention.aapply(rules, call.saver, call.store)
    return page(request, "retention.html", rules=rules, report=report, phrase=PHRASE, is_done=True)


# -- jobs


@routes.get("/ui/jobs")
@routes.get("/ui/jobs.json")
@action("admin")
async def jobs(request: Request, call: Caller, queued: str = "") -> Response:
    """The threads that wait to be extracted, were given up, or were extracted within a day."""
    await call.permit()
    settings, missing = request.app.state.settings, ""
    try:
        found = await asyncio.to_thread(_with_queue, call, settings, None)
    except MissingDependency as exc:
        found, missing = [], str(exc)
    found.sort(key=lambda job: _STATES.index(job.state))
    return page(request, "jobs.html", jobs=found, missing=missing, queued=queued, states=_STATES)


@routes.post("/ui/jobs")
@action("admin")
async def retry(request: Request, call: Caller, thread: str) -> Response:
    """Have a thread extracted as soon as a worker is free."""
    await call.permit()
    await asyncio.to_thread(_with_queue, call, request.app.state.settings, thread)
    return RedirectResponse(query("/ui/jobs", queued=thread), 303)


def _with_queue(call: Call, settings: Settings, thread_id: str | None) -> list[Any]:
    """The jobs; or queue a thread. This process never extracts: a worker does."""
    from perdure.memory import Background  # it takes a second, and the extra `background`

    model = configured_model(settings) if settings.worker.facts else None
    extractor = None if model is None else ModelExtractor(model)
    extraction = Extraction(call.saver, call.store, extractor, namespace=NAMESPACE)
    background = Background(extraction, work=False, defaults={"user_id": settings.user})
    try:
        if thread_id is None:
            return background.jobs()
        background.extract_now(thread_id)
        return []
    finally:
        background.stop()
