"""A request: who asks, and, once it is permitted, what of the database it may reach."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar, cast

from fastapi import Depends
from langchain_core.runnables import RunnableConfig
from pydantic import AfterValidator, BaseModel, Field
from starlette.requests import HTTPConnection

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.thread_list import ListedThread, ThreadQuery
from perdure.errors import ConfigurationError
from perdure.memory.recall import NAMESPACE
from perdure.memory.records import RESERVED_LABEL
from perdure.memory.run_config import TEAM, TEAMS
from perdure.memory.thread_search import ThreadHits
from perdure.server.access import Access, Action, Filter, Forbidden, Identity, Refused, meets
from perdure.server.acting import identify
from perdure.server.databases import Databases, OpenDatabase
from perdure.server.teams import check_team, is_of_team, may_reach
from perdure.server.threads import Thread, Threads
from perdure.settings import SEARCH_LIMIT
from perdure.stores.base import Namespace
from perdure.stores.whole_store import WholeStore

AUDITED_NAMES: Final = (
    "thread_id",
    "checkpoint_id",
    "run_id",
    "cron_id",
    "assistant_id",
    "namespace",
    "key",
)
"""What an action is about, as the values of `permit` name it; the audit log keeps it."""
Row = TypeVar("Row")
_PAGE_SIZE: Final = 1_000  # read at once, where such are left out


class LiveRuns(Protocol):
    """The runs of this process, as far as threads need to know them."""

    def is_thread_busy(self, tenant: str | None, thread_id: str) -> bool:
        """Whether one of a thread has not ended, be it of one that was deleted."""

    def forget_thread(self, tenant: str | None, thread_id: str) -> None:
        """Forget what is known of a thread that is no more."""


class Call:
    """A request for an action. The database is out of reach until `permit` was awaited.

    Args:
        identity: Who asks.
        action: What for.
        access: What is allowed.
        databases: What is out of reach before.
        runs: What runs in this process; None: nothing does.
    """

    def __init__(
        self,
        identity: Identity,
        action: Action,
        access: Access,
        databases: Databases,
        runs: LiveRuns | None = None,
    ) -> None:
        self.identity, self.action = identity, action
        self._access, self._databases, self._runs = access, databases, runs
        self._database: OpenDatabase | None = None
        self._filter: Filter = {}
        self.recorded: list[dict[str, Any]] = []  # for each `permit`

    def record_for_audit(self, **ids: Any) -> None:
        """Add to the record of the audit log: ids, or `hashes` of a receipt; never content."""
        self.recorded[-1:] = [{**each, **ids} for each in self.recorded[-1:] or [{}]]

    async def permit(self, value: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask whether the action is allowed; returns its value as a handler left it.

        Raises:
            Forbidden: It is not.
        """
        asked = dict(value or {})
        self.recorded.append(
            {name: asked[name] for name in AUDITED_NAMES if asked.get(name) is not None}
        )
        if self.action == "admin" and not self.identity.is_admin:
            raise Forbidden(f"{self.identity.user!r} may not see or change the whole database")
        if self.action != "admin":
            self._filter = await self._access.permit(self.identity, self.action, asked)
        if self.action.startswith("store:"):
            check_team(self.identity, self.action, asked.get("namespace") or ())
        writes = self.action in ("store:put", "store:delete")
        if is_internal_namespace(asked.get("namespace") or ()) and (
            writes or not self.identity.is_admin
        ):
            raise Forbidden(f"{asked['namespace']!r} is one of perdure's own namespaces")
        self._database = await self._databases.get_or_open(self.identity.tenant)
        return asked

    async def permit_thread(self, thread_id: str, **about: Any) -> Thread:
        """A thread that the action is about, if that is allowed, and the thread may be reached.

        Raises:
            Forbidden: See `permit`.
            UnknownThread: There is none, or it may not be reached.
        """
        await self.permit({"thread_id": thread_id, **about})
        return await self.threads.get(thread_id)

    async def permit_thread_row(self, thread_id: str) -> ListedThread:
        """Return the row of a thread that the action is about; see `permit_thread`."""
        await self.permit({"thread_id": thread_id})
        return await self.threads.get_permitted_row(thread_id)

    async def permit_memories(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that say where the user's memories are, if the action is allowed."""
        allowed = await self.permit({"namespace": self.memories, **value})
        template, config = build_literal_template(tuple(allowed["namespace"]))
        return {"namespace": template, "config": config}

    def keep_database_open(self) -> AbstractContextManager[None]:
        """While it lasts, the database stays open; for what goes on after the reply."""
        return self._databases.keep_open(self.identity.tenant)

    def with_action(self, action: Action) -> Call:
        """The same request for what it needs to be permitted as well, such as to read a source."""
        return Call(self.identity, action, self._access, self._databases, self._runs)

    def with_identity(self, identity: Identity) -> Call:
        """The same request of a caller who acts for somebody, or no longer does."""
        return Call(identity, self.action, self._access, self._databases, self._runs)

    def without_acting_for(self) -> Call:
        """The same request of a caller who acts for nobody."""
        return self.with_identity(replace(self.identity, acting_for=None))

    @property
    def access(self) -> Access:
        """What is allowed."""
        return self._access

    async def may_use_thread(self, action: Action, thread: Mapping[str, Any]) -> bool:
        """Whether the user may do something else with a thread that they have reached."""
        asking = self.with_action(action)
        try:
            await asking.permit({"thread_id": thread["thread_id"], "metadata": {}})
        except Refused:
            return False
        return meets(thread["metadata"], asking._filter)

    @property
    def filter(self) -> Filter:
        """What the metadata of a thread or an assistant must meet that is reached."""
        self._require_database()
        return self._filter

    @property
    def saver(self) -> Checkpointer:
        """The checkpointer; which threads may be seen, `threads` tells."""
        return self._require_database().saver

    @property
    def store(self) -> WholeStore:
        """The store."""
        return self._require_database().store

    @property
    def threads(self) -> Threads:
        """The threads that may be reached."""
        runs, tenant, database = self._runs, self.identity.tenant, self._require_database()
        people = getattr(self._access, "owners_are_people", True)
        options: Any = {"default_ttl": self._databases.thread_ttl, "owners_are_people": people}
        if runs is None:
            return Threads(database.saver, self._filter, **options)
        about = partial(runs.is_thread_busy, tenant), partial(runs.forget_thread, tenant)
        return Threads(database.saver, self._filter, *about, **options)

    async def search_transcripts(
        self, text: str, query: ThreadQuery, limit: int, wait_s: float
    ) -> ThreadHits:
        """What was said in the threads of a search; nothing, if that is turned off."""
        if not (self._databases.search_threads and text.strip()):
            return ThreadHits()
        return await self.threads.search_transcripts(self.store, text, query, limit, wait_s)

    async def list_visible(
        self,
        read: Callable[..., Awaitable[list[Any]]],
        *args: Any,
        hides_own: bool = False,
        **options: Any,
    ) -> list[Any]:
        """Return a list or a search of the store, perdure's own namespaces only to an admin.

        The namespaces of a team are shown to its members and admins.

        With `hides_own`, an admin gets perdure's own namespaces only if the prefix names them.
        """
        prefix = args[0] if args else options["prefix"]
        shows_own = self.identity.is_admin and not hides_own
        is_checked = len(prefix or ()) > 1 and prefix[0] != "*"
        if shows_own or is_checked or (prefix or "*")[0] not in ("*", TEAMS):
            return await read(*args, **options)
        found: list[Any] = []
        start, at = options.pop("offset"), 0
        if start > 10 * _PAGE_SIZE:  # to leave out perdure's own, all that is before it is read
            raise ConfigurationError(f"offset is {start}; expected at most 10,000, or a prefix")
        end = start + options.pop("limit")
        size = min(end, _PAGE_SIZE)
        while len(found) < end:
            page = await read(*args, **options, limit=size, offset=at)
            found += [each for each in page if self._is_visible(getattr(each, "namespace", each))]
            if len(page) < size:
                break
            at, size = at + size, _PAGE_SIZE
        return found[start:end]

    def _is_visible(self, namespace: Sequence[str]) -> bool:
        """Return whether a namespace is shown in a list of all."""
        return not is_internal_namespace(namespace) and may_reach(self.identity, namespace)

    def find_team_author(self, namespace: Sequence[str]) -> str | None:
        """Return the author of what the user writes into a namespace, if it is that of a team."""
        return self.identity.person if is_of_team(namespace) else None

    @property
    def memories(self) -> tuple[str, ...]:
        """The namespace of the user's memories."""
        return (NAMESPACE[0], self.identity.person)

    def _require_database(self) -> OpenDatabase:
        if self._database is None:
            raise RuntimeError(f"{self.action} reaches for the database before it is permitted")
        return self._database


def is_internal_namespace(namespace: Sequence[str]) -> bool:
    """Whether a namespace is one of perdure's own, which nobody writes to by hand."""
    return tuple(namespace[:1]) == (RESERVED_LABEL,)


def build_literal_template(namespace: Namespace) -> tuple[Namespace, RunnableConfig]:
    """A template that is filled in to be a namespace, whatever its labels hold; what fills it."""
    if is_of_team(namespace) and len(namespace) > 1:
        template, config = build_literal_template(namespace[2:])
        team = {"configurable": {**config["configurable"], "team": namespace[1]}}
        return (TEAMS, TEAM, *template), cast(RunnableConfig, team)
    labels = {f"label_{number}": label for number, label in enumerate(namespace)}
    return tuple(f"{{{name}}}" for name in labels), {"configurable": labels}


async def open_call(connection: HTTPConnection) -> AsyncIterator[Call]:
    """The call that a request is, until its reply was sent."""
    state, access = connection.app.state, connection.app.state.access
    known = getattr(connection.state, "identity", None)
    identity: Identity = known or await identify(connection)
    connection.state.user = identity.user
    endpoint = connection.scope["route"].endpoint
    call = Call(identity, endpoint.action, access, state.databases, state.runs)
    connection.state.call = call
    await state.audit.check_room(endpoint.action, connection.scope["method"])
    with state.clients.one((identity.tenant, identity.user)), call.keep_database_open():
        yield call


class Page(BaseModel):
    """Which of the rows that a search finds are shown, as its body says."""

    limit: int = Field(SEARCH_LIMIT, ge=0, le=1000)
    offset: int = Field(0, ge=0)

    def slice_rows(self, rows: list[Row]) -> list[Row]:
        """These rows."""
        return rows[self.offset :][: self.limit]


class SortedPage(Page):
    """The same, with their order and the fields that are shown."""

    sort_by: str
    sort_order: Literal["asc", "desc"] = "desc"
    select: Sequence[str] = ()

    def select_rows(self, rows: list[dict[str, Any]], **also: Any) -> list[dict[str, Any]]:
        """What is shown of rows, in their order; `also` is shown if it is selected."""
        by = self.sort_by
        rows.sort(key=lambda row: (row[by] is not None, row[by]), reverse=self.sort_order == "desc")
        return [
            {name: (row | also)[name] for name in self.select or row}
            for row in self.slice_rows(rows)
        ]


CurrentCall = Annotated[Call, Depends(open_call)]
"""An endpoint's argument."""
PathId = Annotated[str, AfterValidator(lambda text: text.replace("\0", "/"))]
"""An argument of an endpoint that is a part of its path, and may be any text."""
