"""Serve HTML pages to show, export and erase all data of a person."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from perdure.errors import ConfigurationError
from perdure.memory.namespace_templates import TEAMS
from perdure.server.api_people import (
    ServerFiles,
    authorize_export_or_erasure_of_person,
    build_report_json,
    erase_person,
    plan_person_erasure,
)
from perdure.server.http.access import set_required_action
from perdure.server.http.call import CurrentCall
from perdure.server.pages.rendering import FormText, Pages, render_page
from perdure.server.runs.run_manager import ServerRuns

routes = Pages()


@routes.add_page_and_json_routes("/ui/person", "threads:read")
async def show_person(
    request: Request, call: CurrentCall, files: ServerFiles, user: str = ""
) -> Response:
    """Show the data stored for a person, by default for the user who sends the request.

    An admin may specify any person.
    """
    person_name = user or call.identity.person
    report = await plan_person_erasure(
        call, files, await authorize_export_or_erasure_of_person(call, person_name)
    )
    ids = [id for part in report.erased if part.what == "items" for id in part.ids]
    return render_page(
        request,
        "person.html",
        **build_report_json(report),
        writes_for_teams=any(id.startswith(f"{TEAMS}/") for id in ids),
    )


@routes.post("/ui/person")
@set_required_action("threads:delete")
async def erase_confirmed_person(
    request: Request,
    call: CurrentCall,
    runs: ServerRuns,
    files: ServerFiles,
    user: str = "",
    typed: FormText = "",
    hand_over: FormText = "",
) -> Response:
    """Erase all of a person's data after checking that the person's name was typed to confirm.

    If the form field `hand_over` is not empty, the items that the person added to team memories are
    kept. The person's name is removed from the kept items.
    """
    person_name = user or call.identity.person
    permitted = await authorize_export_or_erasure_of_person(call, person_name, "store:delete")
    if typed != person_name:
        raise ConfigurationError(
            f"nothing was erased, because you typed {typed!r}; type {person_name!r} to confirm"
        )
    permitted.options["hand_over"] = bool(hand_over)
    return render_page(
        request,
        "person.html",
        **build_report_json(await erase_person(call, runs, files, permitted)),
    )
