"""Identify the user who sends a request, and decide which actions the user may perform.

The access rules also decide which rows of the database the user may see.

Each route, page and tool names its action in langgraph's notation, such as `threads:read` or
`store:put`. The action `admin` covers operations on the whole database. On a server with
authentication, an action is denied unless a rule allows it. Without authentication, every action is
allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Final, Literal, Protocol, TypeVar, get_args

from starlette.requests import HTTPConnection

from perdure.errors import InvalidFilter, PerdureError

ADMIN_PERMISSION: Final = "perdure:admin"
"""The permission of an identity that may see and change the whole database."""
ACT_PERMISSION: Final = "perdure:act"
"""The permission to act on behalf of other users of the same tenant."""
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
"""The conditions that the metadata of a thread, cron or assistant must meet.

Each key is the name of a metadata field. Its value is the value that the field must have, or a dict
with the operator `$eq` or `$contains`.
"""
_SCALAR_TYPES: Final = (str, int, float, NoneType)
# A metadata filter may contain at most this many lists and dicts that are nested inside a list,
# directly or indirectly. Such lists and dicts make a filter slow, because each of them is compared
# with every element of a list in the metadata.
_MAX_NESTED_IN_LISTS: Final = 10


class Refused(PerdureError):
    """Raised when the server refuses a request.

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
    """Raised when a request has no valid credentials."""

    status = 401


class Forbidden(Refused):
    """Raised when the user who sends a request is not permitted to perform the requested action."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The user who sends a request.

    Attributes:
        user: The id of the user. The owner of a thread or memory is stored as such an id.
        tenant: The tenant of the user, or None on a server without tenants.
        permissions: The permissions that the keys file or the authentication handler lists.
        raw_user: The user object that the authentication handler returned. The user object is
            passed to the authorization handlers.
        acting_for: The person for whom the user acts, or None. If a person is set, the request has
            access only to the data of this person, even if the user is an admin.
        teams: The teams of the person in `acting_for` or, if `acting_for` is None, of the user.
    """

    user: str
    tenant: str | None = None
    permissions: frozenset[str] = frozenset()
    raw_user: Any = field(default=None, repr=False, compare=False)
    acting_for: str | None = None
    teams: frozenset[str] = field(default=frozenset(), kw_only=True)

    @property
    def person(self) -> str:
        """Return the user whose threads and memories the request may access."""
        return self.user if self.acting_for is None else self.acting_for

    @property
    def is_admin(self) -> bool:
        """Return whether the user may see and change the whole database."""
        return ADMIN_PERMISSION in self.permissions and self.acting_for is None

    @property
    def may_act_for_others(self) -> bool:
        """Return whether the user is permitted to act on behalf of other users."""
        return bool({ACT_PERMISSION, ADMIN_PERMISSION} & self.permissions)

    def may_see_memories_of(self, person: str | None) -> bool:
        """Return whether the request is permitted to read data that contains a person's memories.

        Args:
            person: The person. None or `""` means that the data contains nobody's memories.
        """
        may_act = self.may_act_for_others and self.acting_for is None
        return person in (None, "", self.person) or may_act


class Access(Protocol):
    """Interface for authenticating the users who send requests, and for authorizing their actions.

    An implementation may also have optional attributes and methods. If a boolean attribute is
    missing, the server uses True. The optional attributes and methods are:

    - `owners_are_people`: False if the `owner` of a thread is not always the id of an authenticated
      user. For example, it may be an organisation, or any text that a client sets.
    - `identities_list_teams`: False if `Identity` objects do not list the user's teams, so that the
      config of each run must name the teams whose memories the run uses.
    - `keys_file`: The path of the file that lists the API keys.
    - `tenants`: The tenants that are known when the server starts. The server then opens the
      databases of these tenants. It opens the database of any other tenant on the first request of
      that tenant.
    - `check_person(identity, person)`: Raise `Forbidden` if the identity may not act for a person.
    - `find_teams(user, tenant)`: Return the teams of a user.
    - `refresh_identity(identity)`: Return the identity with its current permissions and teams.
    """

    async def identify(self, connection: HTTPConnection) -> Identity:
        """Return the user who sends a request.

        Raises:
            Unauthenticated: The request has no valid credentials.
        """

    async def authorize_and_build_filter(
        self, identity: Identity, action: Action, value: dict[str, Any]
    ) -> Filter:
        """Check that an action is allowed, and return the filter that selects the accessible rows.

        Args:
            identity: The user.
            action: The action that the user requests.
            value: The arguments of the action, for example a thread_id, metadata or a namespace.
                They have the form in which langgraph passes them to authorization handlers. The
                method may change the arguments in place.

        Returns:
            The conditions for the metadata of threads, crons and assistants. An empty filter allows
            all threads, crons and assistants.

        Raises:
            Forbidden: The action is not allowed.
        """


class LocalAccess:
    """Access without authentication.

    Treat every request as coming from the local user, who is an admin.

    A client can set a thread's `owner` to any text, because clients are not authenticated.
    Therefore, `owners_are_people` is False: the server does not rely on `owner` to find the person
    to whom a thread belongs.
    """

    owners_are_people: Final = False
    identities_list_teams: Final = False

    def __init__(self, user: str) -> None:
        self._identity = Identity(user, permissions=frozenset({ADMIN_PERMISSION}))

    async def identify(self, connection: HTTPConnection) -> Identity:
        """Return the local user."""
        return self._identity

    async def authorize_and_build_filter(
        self, identity: Identity, action: Action, value: dict[str, Any]
    ) -> Filter:
        """Allow every action, unless the request is sent on behalf of another person.

        A request that is sent on behalf of another person can access only that person's data. For
        such a request, an action on anything else, such as `admin`, raises `Forbidden`.
        """
        person = identity.acting_for
        return {} if person is None else permit_and_build_filter_for_own_data(person, action, value)


def permit_and_build_filter_for_own_data(
    user: str, action: Action, action_arguments: dict[str, Any]
) -> Filter:
    """Restrict an action to a user's own data, and return the filter that selects this data.

    A user's threads, crons and assistants have the user's id as `owner` in their metadata. In each
    of a user's namespaces, the second label is the user's id, as in `("memories", user)`. The
    arguments of each action are described at `Access.authorize_and_build_filter`.

    Args:
        user: The owner of the data.
        action: The action that is requested.
        action_arguments: The arguments of the action. The function changes the arguments in place.
            If the action creates something, or if its `metadata` is not empty, the function sets
            `owner` in `metadata`. If the namespace of `store:list_namespaces` has fewer
            than two labels, the function adds the user's id as the second label.

    Raises:
        Forbidden: The action accesses a namespace whose second label is not the user's id. Also
            raised for an action that accesses neither threads, assistants, crons nor a namespace,
            such as `admin`.
    """
    if action.startswith(("threads:", "assistants:", "crons:")):
        if action.partition(":")[2].startswith("create") or action_arguments.get("metadata"):
            action_arguments["metadata"] = {
                **(action_arguments.get("metadata") or {}),
                "owner": user,
            }
        return {"owner": user}
    namespace = tuple(action_arguments.get("namespace") or ())
    if action == "store:list_namespaces" and len(namespace) < 2:
        namespace = (*(namespace or ("*",)), user)
    if len(namespace) < 2 or namespace[1] != user:
        raise Forbidden(
            f"the user {user!r} is not allowed to access the namespace {namespace!r}; expected a "
            f"namespace that consists of a label and the user name, such as ('memories', {user!r})"
        )
    action_arguments["namespace"] = namespace
    return {}


def set_required_action(action: Action | None) -> Callable[[Endpoint], Endpoint]:
    """Return a decorator that declares the action for which an endpoint requires permission.

    Every endpoint must be decorated with `@set_required_action(...)`. `create_app` raises TypeError
    for an endpoint without the decorator `@set_required_action(...)`.

    Args:
        action: The action, or None for an endpoint that requires no permission.
    """

    def set_action(endpoint: Endpoint) -> Endpoint:
        endpoint.action = action  # type: ignore[attr-defined]
        return endpoint

    return set_action


public: Final = set_required_action(None)
"""A decorator for endpoints that require no permission.

The request object (`Call`) that such an endpoint receives gives no access to a database. To access
the database, the endpoint must make a copy of the `Call` for a specific action with
`Call.with_action`.
"""


def build_json_containment_predicate(expected: Any) -> Callable[[Any], bool]:
    """Return a function that checks whether a JSON value contains the expected value.

    A dict matches if it has every expected key and the value of each of these keys matches the
    expected value. It may have other keys too. A list matches if it contains every element of the
    expected list, in any order. This means that each string, number, boolean or null in the
    expected list must also occur in the actual list. Each dict or list in the expected list must be
    contained in some element of the actual list. A value that is neither a dict nor a list must
    equal the expected value. As in Python, true equals 1 and false equals 0. The time that the
    returned function takes is linear in the size of the JSON value that it checks.

    Args:
        expected: The JSON value that must be contained.

    Raises:
        InvalidFilter: More than 10 lists and dicts in `expected` are nested inside a list, directly
            or indirectly.
    """
    if (count := _count_containers_nested_in_lists(expected)) > _MAX_NESTED_IN_LISTS:
        raise InvalidFilter(
            f"the filter {expected!r:.80} contains {count} lists and objects that are elements "
            f"of lists; at most {_MAX_NESTED_IN_LISTS} are allowed"
        )
    return _build_json_containment_predicate_without_limit(expected)


def _build_json_containment_predicate_without_limit(expected: Any) -> Callable[[Any], bool]:
    """Build the predicate that `build_json_containment_predicate` returns.

    In this function, the lists in `expected` may contain any number of nested lists and dicts.

    The function is recursive: it calls itself for each part of the expected value.
    """
    if isinstance(expected, Mapping):
        field_checks = {
            name: _build_json_containment_predicate_without_limit(value)
            for name, value in expected.items()
        }
        return lambda value: (
            isinstance(value, Mapping)
            and all(name in value and holds(value[name]) for name, holds in field_checks.items())
        )
    if isinstance(expected, list):
        expected_keys = _build_hashable_keys_of_scalars(expected)
        part_checks = [
            _build_json_containment_predicate_without_limit(value)
            for value in expected
            if not isinstance(value, _SCALAR_TYPES)
        ]
        return lambda value: (
            isinstance(value, list)
            and expected_keys <= _build_hashable_keys_of_scalars(value)
            and all(any(map(holds, value)) for holds in part_checks)
        )
    return lambda value: bool(value == expected)


def _build_hashable_keys_of_scalars(values: list[Any]) -> set[Hashable]:
    """Return a hashable key for each string, number, boolean or null in a list.

    Equal values have equal keys. The key for a number is a tuple that contains the number as a
    string. A boolean has the key of the number 1 or 0. Python randomises the hashes of strings, but
    not of numbers. If numbers were used as keys, a client could send many numbers with the same
    hash, and building a set of them would take quadratic time.
    """
    return {
        _build_hashable_key_of_scalar(value) for value in values if isinstance(value, _SCALAR_TYPES)
    }


def _build_hashable_key_of_scalar(value: str | float | None) -> Hashable:
    """Return the hashable key for a single value; see `_build_hashable_keys_of_scalars`."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) or value.is_integer():
        # Convert the number to a string with `hex` instead of `str`, because only `hex` takes
        # linear time for large integers.
        return (hex(int(value)),)
    return (repr(value),)


def _count_containers_nested_in_lists(value: Any, is_in_list: bool = False) -> int:
    """Count the lists and dicts that are nested inside lists, at any depth."""
    if isinstance(value, Mapping):
        return is_in_list + sum(
            _count_containers_nested_in_lists(part, is_in_list) for part in value.values()
        )
    if isinstance(value, list):
        return is_in_list + sum(_count_containers_nested_in_lists(part, True) for part in value)
    return 0


def matches_filter(metadata: Mapping[str, Any], filter: Filter) -> bool:
    """Return whether the metadata of a thread, cron or assistant matches a filter."""
    return all(
        _meets_filter_condition(metadata.get(name), condition) for name, condition in filter.items()
    )


def require_filter_match(object_noun: str, metadata: Mapping[str, Any], filter: Filter) -> None:
    """Raise Forbidden if an object with this metadata would not be accessible to the user.

    Args:
        object_noun: The kind of the object for the error message, such as `a thread`.
        metadata: The new metadata of the object.
        filter: The conditions that the metadata must meet.

    Raises:
        Forbidden: The metadata does not meet the filter.
    """
    if not matches_filter(metadata, filter):
        raise Forbidden(
            f"the request was refused, because the metadata {dict(metadata)!r:.200} would deny you "
            f"access to {object_noun}; change the metadata"
        )


def _meets_filter_condition(metadata_value: Any, condition: Any) -> bool:
    """Return whether a metadata value satisfies a filter condition."""
    match condition:
        case {"$eq": equal, **others} if not others:
            return bool(metadata_value == equal)
        case {"$contains": contained, **others} if not others and isinstance(
            metadata_value, list | tuple
        ):
            return all(
                element in metadata_value
                for element in (contained if isinstance(contained, list | tuple) else [contained])
            )
    return not isinstance(condition, Mapping) and bool(metadata_value == condition)
