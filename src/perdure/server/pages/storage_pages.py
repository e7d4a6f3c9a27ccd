"""Admin pages: storage sizes, retention and background extraction jobs."""

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
from perdure.memory.long_term.recall import NAMESPACE
from perdure.server.http.access import set_required_action
from perdure.server.http.call import Call, CurrentCall
from perdure.server.pages.rendering import FormText, Pages, redirect_to, render_page
from perdure.server.pages.thread_pages import load_thread_titles
from perdure.settings import Rules, Settings

routes = Pages()
CONFIRMATION_PHRASE: Final = "remove"
# The storage page lists at most this many threads and at most this many namespaces, largest first.
_LARGEST_COUNT: Final = 15
# Maximum number of extraction jobs listed on the HTML page. The JSON version of the page lists all
# jobs.
_MAX_JOBS: Final = 500
# Possible states of an extraction job, in the order in which the page lists the jobs.
_JOB_STATES: Final = ("dead", "running", "retrying", "due", "waiting", "done")


async def _permit_admin(call: CurrentCall) -> Call:
    """Check that the caller is an admin."""
    await call.authorize_action_arguments()
    return call


def _get_settings(request: Request) -> Settings:
    """Return the settings of the server."""
    return request.app.state.settings  # type: ignore[no-any-return]


AdminCall = Annotated[Call, Depends(_permit_admin)]
ServerSettings = Annotated[Settings, Depends(_get_settings)]


@routes.add_page_and_json_routes("/ui/storage", "admin")
async def show_storage(request: Request, call: AdminCall, settings: ServerSettings) -> Response:
    """Show storage sizes by kind, the largest threads and namespaces, and monthly growth."""
    thread_stats, item_stats, thread_usage, item_usage = await asyncio.gather(
        call.saver.astats(),
        call.store.astats(),
        call.saver.ausage(_LARGEST_COUNT),
        call.store.ausage(_LARGEST_COUNT),
    )
    months = sorted({*thread_usage.by_month, *item_usage.by_month})[-24:]
    return render_page(
        request,
        "storage.html",
        saver=thread_stats,
        store=item_stats,
        threads=thread_usage.largest,
        titles=await load_thread_titles(
            call.saver, (info.thread_id for info in thread_usage.largest)
        ),
        namespaces=item_usage.largest,
        growth=[
            (month, thread_usage.by_month.get(month, 0), item_usage.by_month.get(month, 0))
            for month in months
        ],
        rules=_list_set_rules(settings.retention),
    )


@routes.add_page_and_json_routes("/ui/storage/retention", "admin")
async def show_retention_plan(
    request: Request, call: AdminCall, settings: ServerSettings
) -> Response:
    """Preview what the configured retention rules would delete now."""
    report = await retention.aplan(settings.retention, call.saver, call.store)
    return _render_retention_page(request, settings, report, is_done=False)


@routes.post("/ui/storage/retention")
@set_required_action("admin")
async def apply_retention(
    request: Request, call: AdminCall, settings: ServerSettings, typed: FormText = ""
) -> Response:
    """Delete everything that the retention rules select, after checking the confirmation phrase."""
    if typed.strip() != CONFIRMATION_PHRASE:
        raise ConfigurationError(
            f"nothing was removed, because you typed {typed!r}; type {CONFIRMATION_PHRASE!r} to "
            "confirm"
        )
    report = await retention.aapply(settings.retention, call.saver, call.store)
    return _render_retention_page(request, settings, report, is_done=True)


def _render_retention_page(
    request: Request, settings: Settings, report: retention.Report, *, is_done: bool
) -> Response:
    """Render the data that the retention rules select, or that was deleted if `is_done` is True."""
    return render_page(
        request,
        "retention.html",
        rules=_list_set_rules(settings.retention),
        report=report,
        phrase=CONFIRMATION_PHRASE,
        is_done=is_done,
    )


def _list_set_rules(rules: Rules) -> dict[str, Any]:
    """Return the retention rules whose settings differ from the defaults."""
    return {name: value for name, value in asdict(rules).items() if value != getattr(Rules(), name)}


# -- jobs


@routes.add_page_and_json_routes("/ui/jobs", "admin")
async def show_jobs(
    request: Request, call: AdminCall, settings: ServerSettings, queued: str = ""
) -> Response:
    """Show the extraction jobs that are unfinished, have failed, or ended within the last day."""
    found_jobs, missing_dependency = [], ""
    try:
        found_jobs = await asyncio.to_thread(
            _queue_thread_extraction_or_list_jobs, call, settings, None
        )
    except MissingDependency as exc:
        missing_dependency = str(exc)
    found_jobs.sort(key=lambda job: _JOB_STATES.index(job.state))
    return render_page(
        request,
        "jobs.html",
        jobs=found_jobs,
        titles=await load_thread_titles(
            call.saver, (job.thread_id for job in found_jobs[:_MAX_JOBS])
        ),
        shown=_MAX_JOBS,
        missing=missing_dependency,
        queued=queued,
        states=_JOB_STATES,
    )


@routes.post("/ui/jobs")
@set_required_action("admin")
async def retry_extraction(call: AdminCall, settings: ServerSettings, thread: str) -> Response:
    """Queue a thread for memory extraction by the next available worker."""
    await asyncio.to_thread(_queue_thread_extraction_or_list_jobs, call, settings, thread)
    return redirect_to("/ui/jobs", queued=thread)


def _queue_thread_extraction_or_list_jobs(
    call: Call, settings: Settings, thread_id: str | None
) -> list[Any]:
    """List the extraction jobs, or queue a job for the thread if `thread_id` is given.

    The server itself extracts no memories. A worker process executes the queued jobs.

    Returns:
        The jobs, or an empty list if a thread was queued.
    """
    # Import `Background` only when it is used, because the import takes half a second and needs
    # the optional extra `background`.
    from perdure.memory import Background

    model = build_configured_model(settings) if settings.worker.facts else None
    extractor = None if model is None else ModelExtractor(model)
    background = Background(
        Extraction(call.saver, call.store, extractor, namespace=NAMESPACE), work=False
    )
    try:
        if thread_id is None:
            return background.jobs()
        background.extract_now(thread_id)
        return []
    finally:
        background.stop()
