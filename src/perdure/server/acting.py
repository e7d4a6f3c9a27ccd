"""Let a caller with the permission `perdure:act` send a request on behalf of another person.

The caller identifies the person in the `X-Perdure-User` header, which can be sent with any request.
A request that starts a run can also identify the person by the `user_id` in the run's `context`. A
request that is sent on behalf of a person reads and writes that person's data. The caller's rate
limits and permissions still apply, and graphs receive the caller's user object.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from starlette.requests import HTTPConnection

from perdure.server.access import ACT_PERMISSION, Access, Forbidden, Identity
from perdure.server.teams import find_teams_of_user
from perdure.settings import is_valid_user_or_team_name

PERSON_HEADER: Final = "X-Perdure-User"
"""The header that names the person for whom a request is sent, in UTF-8."""
# Maximum length of a person's name, in characters. Namespace labels have the same maximum.
_MAX_NAME_CHARS: Final = 4096


async def identify_caller(connection: HTTPConnection) -> Identity:
    """Return the identity of the user who sent a request.

    If the request has the `X-Perdure-User` header, the user acts on behalf of the person named in
    the header.

    Args:
        connection: The HTTP request or the websocket.

    Raises:
        Unauthenticated: The request has no valid credentials.
        Forbidden: The header does not name exactly one person in UTF-8; see also
            `build_identity_acting_for`.
    """
    access: Access = connection.app.state.access
    identity = await access.identify(connection)
    names = connection.headers.getlist(PERSON_HEADER)
    if not names:
        return identity
    if len({*names}) > 1:
        raise Forbidden(
            f"the header {PERSON_HEADER} was sent {len(names)} times with different user names; "
            "send it only once"
        )
    try:
        person = names[0].encode("latin-1").decode()
    except ValueError:
        raise Forbidden(
            f"the header {PERSON_HEADER} is {names[0]!r:.80}; expected a user name encoded in UTF-8"
        ) from None
    return build_identity_acting_for(access, identity, person)


def build_identity_acting_for(access: Access, caller: Identity, person: Any) -> Identity:
    """Return the identity of a caller who acts on behalf of a person.

    To act on behalf of anyone else, a caller needs the permission `perdure:act` or `perdure:admin`.

    Args:
        access: The rules of the server.
        caller: The caller.
        person: The name of the person, which may be any value from a request.

    Raises:
        Forbidden: The name is blank or not valid, the caller may not act for others, the caller
            already acts for another person, or the person has keys in other tenants only.
    """
    if (
        not is_valid_user_or_team_name(person)
        or len(person) > _MAX_NAME_CHARS
        or person == "*"
        or "\0" in person
    ):
        raise Forbidden(
            f"{person!a:.80} is not a valid user name; expected the name of a single user, with at "
            f"most {_MAX_NAME_CHARS} characters"
        )
    if person == caller.person:
        return caller
    if caller.acting_for is not None:
        raise Forbidden(
            f"the header {PERSON_HEADER} names the user {caller.acting_for!r}, but the run's "
            f"context names {person!r:.80}; send only one of the two"
        )
    if not caller.may_act_for_others:
        raise Forbidden(
            f"the user {caller.user!r} is not allowed to act for the user {person!r:.80}; this "
            f"requires the permission {ACT_PERMISSION!r}"
        )
    check_person = getattr(access, "check_person", None)
    if check_person is not None:
        check_person(caller, person)
    teams = find_teams_of_user(access, person, caller.tenant) or frozenset()
    return replace(caller, acting_for=person, teams=teams)
