"""Find a user's teams, and decide who can access a team's memory and which runs use it.

A team's memory is stored in the namespaces under `("teams", NAME)`. A user's teams are determined
by the user's API key or by the authentication handler. On a server without authentication, a run's
config specifies the teams to which the run's user belongs. See docs/people.md for the rules.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

from perdure.memory.namespace_templates import TEAMS
from perdure.server.http.access import Access, Forbidden, Identity
from perdure.server.http.keys_file import is_valid_name_in_keys_file
from perdure.server.thread_person import Person, Sender

_LOG: Final = logging.getLogger("perdure.server")


def extract_teams_of_user(user: Any) -> frozenset[str]:
    """Return the `teams` attribute of a user object that an authentication handler returned.

    If `teams` is not a list of names, log an error and return an empty set.
    """
    teams = getattr(user, "teams", None) or ()
    is_list = not isinstance(teams, str) and isinstance(teams, Iterable)
    names = [*teams] if is_list else []
    if not is_list or not all(map(is_valid_name_in_keys_file, names)):
        _LOG.error(
            "the authentication handler returned a user whose teams are not a list of names; the "
            "user is treated as a member of no team"
        )
        return frozenset()
    return frozenset(names)


def find_teams_of_user(access: Access, user: str, tenant: str | None) -> frozenset[str] | None:
    """Return the current teams of a user.

    Args:
        access: The authentication and authorization of the server.
        user: The id of the user.
        tenant: The tenant of the user, or None.

    Returns:
        The names of the teams, or None if the server learns a user's teams only from that user's
        requests.
    """
    find = getattr(access, "find_teams", None)
    teams: frozenset[str] | None = None if find is None else find(user, tenant)
    return teams


def is_team_namespace(namespace: Sequence[str]) -> bool:
    """Return whether a namespace starts with `"teams"`, the prefix of all team namespaces."""
    return tuple(namespace[:1]) == (TEAMS,)


def may_see_namespace(identity: Identity, namespace: Sequence[str]) -> bool:
    """Return whether a user is allowed to see a team's namespace.

    Administrators see all namespaces. The common prefix of all team namespaces, `("teams",)`, is
    visible to every user who belongs to a team. For a namespace that does not belong to a team,
    return True.
    """
    if identity.is_admin or not is_team_namespace(namespace):
        return True
    return bool(identity.teams) if len(namespace) < 2 else namespace[1] in identity.teams


def check_team_access(identity: Identity, action: str, namespace: Sequence[str]) -> None:
    """Raise an error if a user who is not a member of a team accesses the team's memory.

    No error is raised for administrators, who may access the memory of all teams. Every user may
    list the namespaces under `("teams",)`. The list shows only namespaces for which
    `may_see_namespace` returns True.

    Args:
        identity: The user.
        action: The action that the user requests.
        namespace: The namespace of the action. A namespace that does not belong to a team is not
            checked.

    Raises:
        Forbidden: The user is not a member, or the namespace is `("teams",)` and the action is not
            a list of namespaces.
    """
    is_list = action == "store:list_namespaces" and len(namespace) < 2
    if is_list or identity.is_admin or not is_team_namespace(namespace):
        return
    if len(namespace) < 2 or namespace[1] not in identity.teams:
        own_namespaces = ", ".join(repr((TEAMS, team)) for team in sorted(identity.teams))
        expected = (
            f"expected the namespace of one of the user's teams: {own_namespaces}"
            if own_namespaces
            else "the user is in no team"
        )
        raise Forbidden(
            f"the user {identity.person!r} is not allowed to access the namespace "
            f"{tuple(namespace)!r}; {expected}"
        )


def check_requested_teams(identity: Identity, names: Iterable[str]) -> None:
    """Reject a run that names a team to which `identity.person` does not belong.

    The config or the context of a run can specify teams.

    Args:
        identity: The user who sends the run, with the person for whom the user acts.
        names: The teams that the run names.

    Raises:
        Forbidden: The person is not a member of one of the teams.
    """
    foreign_teams = sorted({*names} - identity.teams)
    if foreign_teams:
        raise Forbidden(
            f"the user {identity.person!r} is not in the team {foreign_teams[0]!r:.80}, but the "
            "run's config or context names this team; remove the team from the config or context"
        )


class RunTeams:
    """Determines the teams whose memory a run uses. Each server has one such object.

    Attributes:
        identities_list_teams: Whether identities list the teams of users. If not, as on a server
            without authentication, the config of a run names the teams.

    Args:
        access: The authentication and authorization of the server.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self.identities_list_teams: bool = getattr(access, "identities_list_teams", True)

    def find_teams_whose_memory_run_uses(
        self, tenant: str | None, sender: Sender, person: Person
    ) -> list[str] | None:
        """Return the teams whose memory a run uses, sorted by name.

        A run uses a team's memory only if both the sender and the person whose memories the run
        uses are members of the team. For a sender who acts for another user, the other user's team
        membership is checked in place of the sender's. A sender with the permission to act for
        other users may send a request that names no other user. The sender's team membership is
        then checked only if the run uses the sender's own memories. A run that does not use a
        person's memories does not use any team's memory either.

        Args:
            tenant: The tenant of the run, or None.
            sender: The sender of the run.
            person: The person whose memories the run uses.

        Returns:
            The names of the teams, or None if the config of the run names them.
        """
        if not self.identities_list_teams:
            return None
        if not person.uses_memory:
            return []
        sender_teams, current_teams = (
            frozenset(sender.teams),
            find_teams_of_user(self._access, person.user, tenant),
        )
        if person.user == (sender.acting_for or sender.caller):
            return sorted(sender_teams if current_teams is None else sender_teams & current_teams)
        if sender.acting_for is None and sender.may_act:
            return sorted(current_teams or ())
        return sorted(sender_teams & (current_teams or frozenset()))
