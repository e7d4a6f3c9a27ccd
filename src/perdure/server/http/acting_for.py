"""Let a caller with the permission `perdure:act` send a request on behalf of another person.

The caller identifies the person in the `X-Perdure-User` header, which can be sent with any request.
A request that starts a run can also identify the person by the `user_id` in the run's `context`. A
request that is sent on behalf of a person reads and writes that person's data. For a request on
behalf of another person, the caller's rate limits and permissions apply. Graphs receive the user
object of the caller.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeGuard

from starlette.requests import HTTPConnection

from perdure.server.http.access import ACT_PERMISSION, Access, Forbidden, Identity, Unauthenticated
from perdure.server.http.keys_file import is_valid_name_in_keys_file
from perdure.server.teams import find_teams_of_user

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
    person: Any = names
    try:
        if len({*names}) > 1:
            raise Forbidden(
                f"the header {PERSON_HEADER} was sent {len(names)} times with different user "
                "names; send it only once"
            )
        try:
            person = names[0].encode("latin-1").decode()
        except ValueError:
            raise Forbidden(
                f"the header {PERSON_HEADER} is {names[0]!r:.80}; expected a user name encoded in "
                "UTF-8"
            ) from None
        return build_identity_acting_for(access, identity, person)
    except Forbidden:
        connection.state.refused_identity = build_refused_identity(identity, person)
        raise


async def require_valid_credentials_of_same_user(connection: HTTPConnection) -> None:
    """Check that a streaming client's credentials are still valid for the same user.

    Raises:
        Unauthenticated: The key was revoked, belongs to another user now, or has other permissions
            or teams than when the stream began.
    """
    try:
        identity = await identify_caller(connection)
    # A custom authentication handler may raise any exception.
    except Exception as exc:
        raise Unauthenticated(
            f"the key or token is no longer valid ({type(exc).__name__}); log in again"
        ) from exc
    if identity != connection.state.call.identity:
        raise Unauthenticated(
            "the API key or token now belongs to another user, or its permissions or teams have "
            "changed; log in again"
        )


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
    if not _is_valid_person_name(person):
        raise Forbidden(
            f"{person!a:.80} is not a valid user name; expected a name of at most "
            f"{_MAX_NAME_CHARS} characters that has a visible character, contains no NUL "
            "character, and is not '.', '..' or '*'"
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
    return replace(
        caller,
        acting_for=person,
        teams=find_teams_of_user(access, person, caller.tenant) or frozenset(),
    )


def build_refused_identity(caller: Identity, person: Any) -> Identity:
    """Return the identity that the audit log records for a refused attempt to act for a person.

    Args:
        caller: The caller.
        person: The name that the request sent for the person, which may be any value. A value that
            is not a valid name is recorded in quotes, and shortened.
    """
    return replace(
        caller, acting_for=person if _is_valid_person_name(person) else f"{person!a:.80}"
    )


def _is_valid_person_name(value: Any) -> TypeGuard[str]:
    """Return whether `value` is a valid name for the person on whose behalf a caller acts."""
    return is_valid_name_in_keys_file(value) and len(value) <= _MAX_NAME_CHARS
