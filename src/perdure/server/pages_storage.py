"""Pages for admins: sizes, retention, and the jobs of background extraction."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from perdure import retention
from perdure.errors import ConfigurationError, MissingDependency
from perdure.graphs.configured import build_configured_model
from perdure.memory import Extraction, ModelExtractor
from perdure.memory.recall import NAMESPACE
from perdure.server.access import action
from perdure.server.call import Call, CurrentCall
from perdure.server.pages import Pages, Text, go_to, page
from perdure.server.pages_threads import titles
from perdure.settings import Rules, Settings

routes = Pages()
PHRASE: Final = "remove"
_LARGEST: Final = 15
_SHOWN: Final = 500  # jobs; the JSON twin lists all
_STATES: Final = ("dead", "running", "retrying", "due", "waiting", "done")  # in this order


async def _permitted(call: CurrentCall) -> Call:
    await call.permit()
    return call


def _settings(request: Request) -> Settings:
    return request.app.state.settings  # type: ignore[no-any-return]


Admin = Annotated[Call, Depends(_permitted)]
Known = Annotated[Settings, Depends(_settings)]


@routes.page("/ui/storage", "admin")
async def storage(request: Request, call: Admin, settings: Known) -> Response:
    """Sizes by kind, the largest threads and namespaces, and growth by month."""
    of_threads, of_items, threads, items = await asyncio.gather(
        call.saver.astats(),
        call.store.astats(),
        call.saver.ausage(_LARGEST),
        call.store.ausage(_LARGEST),
    )
    months = sorted({*threads.by_month, *items.by_month})[-24:]
    return page(
        request,
        "storage.html",
        saver=of_threads,
        store=of_items,
        threads=threads.largest,
        titles=await titles(call.saver, (info.thread_id for info in threads.largest)),
        namespaces=items.largest,
        growth=[(m, threads.by_month.get(m, 0), items.by_month.get(m, 0)) for m in months],
        rules=_given(settings.retention),
    )


@routes.page("/ui/storage/retention", "admin")
async def plan(request: Request, call: Admin, settings: Known) -> Response:
    """What the rules of the settings would remove now."""
    report = await retention.aplan(settings.retention, call.saver, call.store)
    about = {"phrase": PHRASE, "is_done": False}
    return page(request, "retention.html", rules=_given(settings.retention), report=report, **about)


@routes.post("/ui/storage/retention")
@action("admin")
async def apply(request: Request, call: Admin, settings: Known, typed: Text = "") -> Response:
    """Apply the rules, once the phrase was typed."""
    if typed.strip() != PHRASE:
        raise ConfigurationError(f"nothing was removed: {typed!r} was typed, expected {PHRASE!r}")
    report = await retention.aapply(settings.retention, call.saver, call.store)
    about = {"rules": _given(settings.retention), "phrase": PHRASE, "is_done": True}
    return page(request, "retention.html", report=report, **about)


def _given(rules: Rules) -> dict[str, Any]:
    """The rules of retention that are set."""
    return {name: value for name, value in asdict(rules).items() if value != getattr(Rules(), name)}


# -- jobs


@routes.page("/ui/jobs", "admin")
async def jobs(request: Request, call: Admin, settings: Known, queued: str = "") -> Response:
    """The threads that wait for extraction, failed for good, or were extracted within a day."""
    found, missing = [], ""
    try:
        found = await asyncio.to_thread(_with_queue, call, settings, None)
    except MissingDependency as exc:
        missing = str(exc)
    found.sort(key=lambda job: _STATES.index(job.state))
    return page(
        request,
        "jobs.html",
        jobs=found,
        titles=await titles(call.saver, (job.thread_id for job in found[:_SHOWN])),
        shown=_SHOWN,
        missing=missing,
        queued=queued,
        states=_STATES,
    )


@routes.post("/ui/jobs")
@action("admin")
async def retry(call: Admin, settings: Known, thread: str) -> Response:
    """Have a thread extracted as soon as a worker is free."""
    await asyncio.to_thread(_with_queue, call, settings, thread)
    return go_to("/ui/jobs", queued=thread)


def _with_queue(call: Call, settings: Settings, thread_id: str | None) -> list[Any]:
    """The jobs; or queue a thread. This process never extracts: a worker does."""
    from perdure.memory import Background  # it takes half a second, and the extra `background`

    model = build_configured_model(settings) if settings.worker.facts else None
    extractor = None if model is None else ModelExtractor(model)
    extraction = Extraction(call.saver, call.store, extractor, namespace=NAMESPACE)
    background = Background(extraction, work=False)
    try:
        if thread_id is None:
            return background.jobs()
        background.extract_now(thread_id)
        return []
    finally:
        background.stop()
