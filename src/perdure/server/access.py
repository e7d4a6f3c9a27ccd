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

ADMIN: Final = "perdure:admin"
"""The permission of an identity that may see and change the whole database."""
ACT: Final = "perdure:act"
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
_PLAIN: Final = (str, int, float, NoneType)
_WITHIN_LISTS: Final = 10


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
    raw: Any = field(default=None, repr=False, compare=False)
    acting_for: str | None = None
    teams: frozenset[str] = field(default=frozenset(), kw_only=True)

    @property
    def person(self) -> str:
        """The user whose threads and memories the request is about."""
        return self.user if self.acting_for is None else self.acting_for

    @property
    def is_admin(self) -> bool:
        """Whether the whole database may be seen and changed."""
        return ADMIN in self.permissions and self.acting_for is None

    @property
    def may_act(self) -> bool:
        """Whether the user may act for others."""
        return bool({ACT, ADMIN} & self.permissions)


class Access(Protocol):
    """Authentication and authorization of requests.

    An optional attribute `owners_are_people` is False if the `owner` of a thread may be another
    than the user of an API key, such as an organisation. An optional method `check_person` takes
    an identity and a name, and raises `Forbidden` if the identity may not act for this person. An
    optional attribute `teams_are_known` is False if identities list no teams, so that the config of
    a run names them. An optional method `teams_of` returns the teams of a user in a tenant.
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


class Local:
    """Access without authentication: every request is the local user's, who may do everything.

    An owner that a client names is no person, since no key vouches for it.
    """

    owners_are_people: Final = False
    teams_are_known: Final = False

    def __init__(self, user: str) -> None:
        self._identity = Identity(user, permissions=frozenset({ADMIN}))

    async def identify(self, connection: HTTPConnection) -> Identity:
        """The local user."""
        return self._identity

    async def permit(self, identity: Identity, action: Action, value: dict[str, Any]) -> Filter:
        """Allow everything; of a user who acts for a person, what is the person's."""
        person = identity.acting_for
        return {} if person is None else permit_own(person, action, value)


def permit_own(user: str, action: Action, value: dict[str, Any]) -> Filter:
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

    def named(endpoint: Endpoint) -> Endpoint:
        endpoint.action = name  # type: ignore[attr-defined]
        return endpoint

    return named


public: Final = action(None)
"""Marks an endpoint that everybody may call, and that reaches no database."""


def containing(wanted: Any) -> Callable[[Any], bool]:
    """Tells of a value, in linear time, whether it has all that is wanted.

    Dicts may have more, lists more and in any order.

    Raises:
        InvalidFilter: Lists have more than 10 lists and dicts within; each of them is compared
            with all that a value's list has.
    """
    if (count := _within_lists(wanted)) > _WITHIN_LISTS:
        raise InvalidFilter(
            f"lists of the metadata {wanted!r:.80} have {count} lists and objects within; expected "
            f"at most {_WITHIN_LISTS}"
        )
    return _containing(wanted)


def _containing(wanted: Any) -> Callable[[Any], bool]:
    if isinstance(wanted, Mapping):
        fields = {name: _containing(value) for name, value in wanted.items()}
        return lambda value: (
            isinstance(value, Mapping)
            and all(name in value and holds(value[name]) for name, holds in fields.items())
        )
    if isinstance(wanted, list):
        plain = _plain_keys(wanted)
        parts = [_containing(value) for value in wanted if not isinstance(value, _PLAIN)]
        return lambda value: (
            isinstance(value, list)
            and plain <= _plain_keys(value)
            and all(any(map(holds, value)) for holds in parts)
        )
    return lambda value: bool(value == wanted)


def _plain_keys(values: list[Any]) -> set[Any]:
    """The texts, numbers and nulls of a list, as keys that are equal where they are.

    Hashes of numbers are no secret: of some with the same hash a set takes quadratic time.
    """
    return {_plain_key(value) for value in values if isinstance(value, _PLAIN)}


def _plain_key(value: str | float | None) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) or value.is_integer():
        return (hex(int(value)),)  # of any size in linear time
    return (repr(value),)


def _within_lists(value: Any, inside: bool = False) -> int:
    """How many lists and dicts are within lists."""
    if isinstance(value, Mapping):
        return inside + sum(_within_lists(part, inside) for part in value.values())
    if isinstance(value, list):
        return inside + sum(_within_lists(part, True) for part in value)
    return 0


def meets(metadata: Mapping[str, Any], filter: Filter) -> bool:
    """Whether the metadata of a thread or an assistant meets a filter."""
    return all(_meets(metadata.get(name), wanted) for name, wanted in filter.items())


def check_reach(what: str, metadata: Mapping[str, Any], filter: Filter) -> None:
    """Refuse to make or to change what whoever asks could not reach then.

    Raises:
        Forbidden: Its metadata does not meet the filter.
    """
    if not meets(metadata, filter):
        raise Forbidden(f"{what} with the metadata {dict(metadata)!r:.200} is not yours")


def _meets(value: Any, wanted: Any) -> bool:
    match wanted:
        case {"$eq": equal, **others} if not others:
            return bool(value == equal)
        case {"$contains": each, **others} if not others and isinstance(value, list | tuple):
            return all(one in value for one in (each if isinstance(each, list | tuple) else [each]))
    return not isinstance(wanted, Mapping) and bool(value == wanted)
