"""Who sends a request, and what of the database they may reach.

Each route, page and tool names the action that it is, in langgraph's words (`threads:read`,
`store:put`), or `admin` for what concerns the whole database. What is not allowed is denied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Final, Literal, Protocol, TypeVar, get_args

from starlette.requests import HTTPConnection

from perdure.errors import InvalidFilter, PerdureError

ADMIN_PERMISSION: Final = "perdure:admin"
"""The permission of an identity that may see and change the whole database."""
ACT_PERMISSION: Final = "perdure:act"
"""The permission of an identity that may act for other users of its tenant."""
Action = Literal[
    "admin",
    "assistants:create",
    "assistants:read",
    "assistants:update",
    "assistants:delete",
    "assistants:search",
    "crons:create",
    "crons:update",
    "crons:delete",
    "crons:search",
    "threads:create",
    "threads:read",
    "threads:update",
    "threads:delete",
    "threads:search",
    "threads:create_run",
    "store:put",
    "store:get",
    "store:search",
    "store:delete",
    "store:list_namespaces",
]
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Filter = Mapping[str, Any]
"""What metadata of threads, crons and assistants must meet: equal values, `$eq`, `$contains`."""
_SCALAR_TYPES: Final = (str, int, float, NoneType)
_MAX_NESTED_IN_LISTS: Final = 10


class Refused(PerdureError):
    """A request is refused.

    Attributes:
        status: The HTTP status of the reply.
        headers: HTTP headers of the reply.
    """

    status = 403

    def __init__(
        self, detail: str, status: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.headers = status or self.status, dict(headers or {})


class Unauthenticated(Refused):
    """A request has no credentials, or none that are valid."""

    status = 401


class Forbidden(Refused):
    """The user who sends a request may not do this."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The user who sends a request.

    Attributes:
        user: The id of the user, who owns threads and memories.
        tenant: The tenant of the database; None: it has none.
        permissions: As the keys file or the authentication handler lists them.
        raw: The user as an authentication handler returned it, for other handlers.
        acting_for: The person for whom the user acts, or None. What may be reached is the person's
            then, and not the whole database.
        teams: The teams whose member the user is.
    """

    user: str
    tenant: str | None = None
    permissions: frozenset[str] = frozenset()
    raw_user: Any = field(default=None, repr=False, compare=False)
    acting_for: str | None = None
    teams: frozenset[str] = field(default=frozenset(), kw_only=True)

    @property
    def person(self) -> str:
        """The user whose threads and memories the request is about."""
        return self.user if self.acting_for is None else self.acting_for

    @property
    def is_admin(self) -> bool:
        """Whether the whole database may be seen and changed."""
        return ADMIN_PERMISSION in self.permissions and self.acting_for is None

    @property
    def may_act_for_others(self) -> bool:
        """Whether the user may act for others."""
        return bool({ACT_PERMISSION, ADMIN_PERMISSION} & self.permissions)


class Access(Protocol):
    """Authentication and authorization of requests.

    An optional attribute `owners_are_people` is False if the `owner` of a thread may be another
    than the user of an API key, such as an organisation. An optional method `check_person` takes
    an identity and a name, and raises `Forbidden` if the identity may not act for this person. An
    optional attribute `identities_list_teams` is False if identities list no teams, so that the
    config of a run names them. An optional method `find_teams` returns the teams of
    a user in a tenant.
    """

    async def identify(self, connection: HTTPConnection) -> Identity:
        """The user who sends a request.

        Raises:
            Unauthenticated: It has no valid credentials.
        """

    async def permit(self, identity: Identity, action: Action, value: dict[str, Any]) -> Filter:
        """Check that an action is allowed; returns a filter for its threads or assistants.

        `value` says what the action is about, as langgraph's handlers are given it: a thread_id,
        metadata, a namespace. A handler may change it.

        Raises:
            Forbidden: The action is not allowed.
        """


class LocalAccess:
    """Access without authentication: every request is the local user's, who may do everything.

    An owner that a client names is no person, since no key vouches for it.
    """

    owners_are_people: Final = False
    identities_list_teams: Final = False

    def __init__(self, user: str) -> None:
        self._identity = Identity(user, permissions=frozenset({ADMIN_PERMISSION}))

    async def identify(self, connection: HTTPConnection) -> Identity:
        """The local user."""
        return self._identity

    async def permit(self, identity: Identity, action: Action, value: dict[str, Any]) -> Filter:
        """Allow everything; of a user who acts for a person, what is the person's."""
        person = identity.acting_for
        return {} if person is None else permit_own_data(person, action, value)


def permit_own_data(user: str, action: Action, value: dict[str, Any]) -> Filter:
    """Allow what belongs to a user, and return the filter for it. See `Access.permit`.

    The threads, crons and assistants of a user name the user as `owner`, and the namespaces have
    the user's name as second label.

    Raises:
        Forbidden: The action is about something else.
    """
    if action.startswith(("threads:", "assistants:", "crons:")):
        if action.partition(":")[2].startswith("create") or value.get("metadata"):
            value["metadata"] = {**(value.get("metadata") or {}), "owner": user}
        return {"owner": user}
    namespace = tuple(value.get("namespace") or ())
    if action == "store:list_namespaces" and len(namespace) < 2:
        namespace = (*(namespace or ("*",)), user)
    if len(namespace) < 2 or namespace[1] != user:
        raise Forbidden(
            f"{user!r} may not reach the namespace {namespace!r}; expected a label and the "
            f"user, like ('memories', {user!r})"
        )
    value["namespace"] = namespace
    return {}


def action(name: Action | None) -> Callable[[Endpoint], Endpoint]:
    """Name the action of an endpoint; `create_app` refuses an endpoint without one."""

    def set_action(endpoint: Endpoint) -> Endpoint:
        endpoint.action = name  # type: ignore[attr-defined]
        return endpoint

    return set_action


public: Final = action(None)
"""Marks an endpoint that everybody may call, and that reaches no database."""


def build_containment_check(expected: Any) -> Callable[[Any], bool]:
    """Tells of a value, in linear time, whether it has all that is wanted.

    Dicts may have more, lists more and in any order.

    Raises:
        InvalidFilter: Lists have more than 10 lists and dicts within; each of them is compared
            with all that a value's list has.
    """
    if (count := _count_nested_in_lists(expected)) > _MAX_NESTED_IN_LISTS:
        raise InvalidFilter(
            f"the lists in the metadata {expected!r:.80} contain {count} lists and objects; "
            f"expected at most {_MAX_NESTED_IN_LISTS}"
        )
    return _build_containment_check(expected)


def _build_containment_check(expected: Any) -> Callable[[Any], bool]:
    if isinstance(expected, Mapping):
        field_checks = {name: _build_containment_check(value) for name, value in expected.items()}
        return lambda value: (
            isinstance(value, Mapping)
            and all(name in value and holds(value[name]) for name, holds in field_checks.items())
        )
    if isinstance(expected, list):
        expected_keys = _build_scalar_keys(expected)
        part_checks = [
            _build_containment_check(value)
            for value in expected
            if not isinstance(value, _SCALAR_TYPES)
        ]
        return lambda value: (
            isinstance(value, list)
            and expected_keys <= _build_scalar_keys(value)
            and all(any(map(holds, value)) for holds in part_checks)
        )
    return lambda value: bool(value == expected)


def _build_scalar_keys(values: list[Any]) -> set[Any]:
    """The texts, numbers and nulls of a list, as keys that are equal where they are.

    Hashes of numbers are no secret: of some with the same hash a set takes quadratic time.
    """
    return {_build_scalar_key(value) for value in values if isinstance(value, _SCALAR_TYPES)}


def _build_scalar_key(value: str | float | None) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) or value.is_integer():
        return (hex(int(value)),)  # of any size in linear time
    return (repr(value),)


def _count_nested_in_lists(value: Any, is_in_list: bool = False) -> int:
    """How many lists and dicts are within lists."""
    if isinstance(value, Mapping):
        return is_in_list + sum(_count_nested_in_lists(part, is_in_list) for part in value.values())
    if isinstance(value, list):
        return is_in_list + sum(_count_nested_in_lists(part, True) for part in value)
    return 0


def matches_filter(metadata: Mapping[str, Any], filter: Filter) -> bool:
    """Whether the metadata of a thread or an assistant meets a filter."""
    return all(_matches_condition(metadata.get(name), wanted) for name, wanted in filter.items())


def require_filter_match(noun: str, metadata: Mapping[str, Any], filter: Filter) -> None:
    """Refuse to make or to change what whoever asks could not reach then.

    Raises:
        Forbidden: Its metadata does not meet the filter.
    """
    if not matches_filter(metadata, filter):
        raise Forbidden(f"{noun} with the metadata {dict(metadata)!r:.200} is not yours")


def _matches_condition(value: Any, condition: Any) -> bool:
    match condition:
        case {"$eq": equal, **others} if not others:
            return bool(value == equal)
        case {"$contains": contained, **others} if not others and isinstance(value, list | tuple):
            return all(
                one in value
                for one in (contained if isinstance(contained, list | tuple) else [contained])
            )
    return not isinstance(condition, Mapping) and bool(value == condition)
