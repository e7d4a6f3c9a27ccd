"""Serve HTML pages to show, export and erase all data of a person."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from perdure.errors import ConfigurationError
from perdure.memory.run_config import TEAMS
from perdure.server.access import set_required_action
from perdure.server.api_people import (
    authorize_export_or_erasure_of_person,
    build_report_json,
    erase_person,
    plan_person_erasure,
)
from perdure.server.call import CurrentCall
from perdure.server.pages import FormText, Pages, render_page
from perdure.server.runs import ServerRuns

routes = Pages()


@routes.add_page_and_json_routes("/ui/person", "threads:read")
async def show_person(request: Request, call: CurrentCall, user: str = "") -> Response:
    """Show the data stored for a person, by default for the user who sends the request.

    An admin may specify any person.
    """
    person_name = user or call.identity.person
    report = await plan_person_erasure(
        call, await authorize_export_or_erasure_of_person(call, person_name)
    )
    ids = [id for part in report.erased if part.what == "items" for id in part.ids]
    writes_for_teams = any(id.startswith(f"{TEAMS}/") for id in ids)
    return render_page(
        request, "person.html", **build_report_json(report), writes_for_teams=writes_for_teams
    )


@routes.post("/ui/person")
@set_required_action("threads:delete")
async def erase_confirmed_person(
    request: Request,
    call: CurrentCall,
    runs: ServerRuns,
    user: str = "",
    typed: FormText = "",
    hand_over: FormText = "",
) -> Response:
    """Erase all of a person's data after checking that the person's name was typed to confirm.

    If the form field `hand_over` is set, items that the person added to team memories are kept, but
    the person's name is removed from them.
    """
    person_name = user or call.identity.person
    permitted = await authorize_export_or_erasure_of_person(call, person_name, "store:delete")
    if typed != person_name:
        raise ConfigurationError(
            f"nothing was erased, because you typed {typed!r}; type {person_name!r} to confirm"
        )
    permitted.options["hand_over"] = bool(hand_over)
    return render_page(
        request, "person.html", **build_report_json(await erase_person(call, runs, permitted))
    )
