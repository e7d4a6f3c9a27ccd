"""Teams: which a user is in, who reaches the memory of one, and which runs use it.

The namespaces under `("teams", NAME)` are those of a team. Only an API key or an
authentication handler lists the teams of a user. docs/people.md has the rules.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

from perdure.memory.run_config import TEAMS
from perdure.server.access import Access, Forbidden, Identity
from perdure.server.person import Person, Sender
from perdure.settings import is_name

_LOG: Final = logging.getLogger("perdure.server")


def read_teams(user: Any) -> frozenset[str]:
    """Return the teams of a user whom an authentication handler returned, in its field `teams`."""
    teams = getattr(user, "teams", None) or ()
    is_list = not isinstance(teams, str) and isinstance(teams, Iterable)
    names = [*teams] if is_list else []
    if not is_list or not all(map(_is_team_name, names)):
        _LOG.error("a user is in no team: the handler returned teams that are no list of names")
        return frozenset()
    return frozenset(names)


def _is_team_name(name: Any) -> bool:
    return is_name(name) and name != "*" and "\0" not in name


def find_teams(access: Access, user: str, tenant: str | None) -> frozenset[str] | None:
    """Return the teams of a user now, or None if only a request of the user would tell them."""
    find = getattr(access, "find_teams", None)
    teams: frozenset[str] | None = None if find is None else find(user, tenant)
    return teams


def is_team_namespace(namespace: Sequence[str]) -> bool:
    """Return whether a namespace is that of a team, or of all."""
    return tuple(namespace[:1]) == (TEAMS,)


def build_team_argument(team: str | None) -> dict[str, Any]:
    """Return the namespace of a team's memory as an argument, or none for the user's own."""
    return {} if team is None else {"namespace": (TEAMS, team)}


def may_see_namespace(identity: Identity, namespace: Sequence[str]) -> bool:
    """Return whether a user may see a namespace, as far as it is that of a team."""
    if identity.is_admin or not is_team_namespace(namespace):
        return True
    return bool(identity.teams) if len(namespace) < 2 else namespace[1] in identity.teams


def check_team_access(identity: Identity, action: str, namespace: Sequence[str]) -> None:
    """Refuse an action on the memory of a team whose member the user is not.

    The list of namespaces under `("teams",)` is allowed; see `may_see_namespace` for what it shows.

    Raises:
        Forbidden: The user is not a member, or the namespace is that of all teams.
    """
    is_list = action == "store:list_namespaces" and len(namespace) < 2
    if is_list or identity.is_admin or not is_team_namespace(namespace):
        return
    if len(namespace) < 2 or namespace[1] not in identity.teams:
        own_namespaces = ", ".join(repr((TEAMS, team)) for team in sorted(identity.teams)) or "none"
        raise Forbidden(
            f"{identity.person!r} may not reach the namespace {tuple(namespace)!r}; those of the "
            f"user's teams are: {own_namespaces}"
        )


def check_requested_teams(identity: Identity, names: Iterable[str]) -> None:
    """Refuse a run that names a team of which the person is no member.

    Raises:
        Forbidden: There is such a team.
    """
    others = sorted({*names} - identity.teams)
    if others:
        raise Forbidden(
            f"{identity.person!r} is not in the team {others[0]!r:.80}, which the config or the "
            "context of the run names; leave it out"
        )


class RunTeams:
    """Chooses the teams whose memory runs use.

    Attributes:
        are_known: Whether identities list teams. Without, as on a server without authentication,
            the config of a run decides.

    Args:
        access: Who may do what.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self.identities_list_teams: bool = getattr(access, "identities_list_teams", True)

    def choose_teams(self, tenant: str | None, sender: Sender, person: Person) -> list[str] | None:
        """Choose the teams whose memory a run uses, or None if its config decides.

        They are those of which both the person and the caller are members. A caller who may act
        for the person uses all teams of the person.
        """
        if not self.identities_list_teams:
            return None
        if not person.uses_memory:
            return []
        sender_teams, current_teams = (
            frozenset(sender.teams),
            find_teams(self._access, person.user, tenant),
        )
        if person.user == (sender.acting_for or sender.caller):
            return sorted(sender_teams if current_teams is None else sender_teams & current_teams)
        if sender.acting_for is None and sender.may_act:
            return sorted(current_teams or ())
        return sorted(sender_teams & (current_teams or frozenset()))
