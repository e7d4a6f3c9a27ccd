"""Provide the class `Call`, which represents a request to the server.

A `Call` identifies the user who sends the request. A `Call` gives access to the database only after
a permission check.
"""

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
from perdure.checkpointers.records import VIEWS_NAMESPACE
from perdure.checkpointers.thread_list import ListedThread, ThreadQuery
from perdure.errors import ConfigurationError
from perdure.memory.recall import NAMESPACE
from perdure.memory.records import RESERVED_LABEL
from perdure.memory.run_config import TEAM, TEAMS
from perdure.memory.thread_search import ThreadHits
from perdure.server.access import (
    Access,
    Action,
    Filter,
    Forbidden,
    Identity,
    Refused,
    matches_filter,
)
from perdure.server.acting import identify_caller
from perdure.server.databases import Databases, OpenDatabase
from perdure.server.teams import check_team_access, is_team_namespace, may_see_namespace
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
"""The names of arguments that identify the object of an action.

The values of these arguments are recorded in the audit log.
"""
Row = TypeVar("Row")
# Maximum number of store rows to read at a time while rows that are hidden from the caller are
# being filtered out.
_PAGE_SIZE: Final = 1_000


class LiveRuns(Protocol):
    """The interface through which `Threads` accesses the runs in this process."""

    def is_thread_busy(self, tenant: str | None, thread_id: str) -> bool:
        """Return whether this process has an unfinished run of a thread.

        The thread itself may already have been deleted.
        """

    def drop_runs_and_events_of_thread(self, tenant: str | None, thread_id: str) -> None:
        """Discard a deleted thread's runs and events from the server's memory."""


class Call:
    """A user's request for an action.

    A `Call` gives access to the database only after its method `authorize_arguments` has been
    awaited.

    Args:
        identity: The user.
        action: The action that the user requests.
        access: Decides which actions are permitted.
        databases: The databases of the server.
        runs: The runs of this process, or None if it has none.

    Attributes:
        recorded: The ids that the audit log records for each call of `authorize_arguments`.
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
        self.recorded: list[dict[str, Any]] = []

    def record_for_audit(self, **ids: Any) -> None:
        """Add fields to the audit record of this request, such as the ids of changed objects.

        After an erasure, pass the hashes from the erasure receipt as the keyword argument `hashes`.

        The audit record must not contain any message or memory content.
        """
        self.recorded[-1:] = [{**entry, **ids} for entry in self.recorded[-1:] or [{}]]

    async def authorize_arguments(
        self, requested_arguments: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Authorize the action, open the database, and return the arguments to use.

        An authorization handler may change an action's arguments. Code that awaits this method must
        therefore use the returned arguments instead of those that it passed in.

        Raises:
            Forbidden: The action is not permitted.
        """
        arguments = dict(requested_arguments or {})
        self.recorded.append(
            {name: arguments[name] for name in AUDITED_NAMES if arguments.get(name) is not None}
        )
        if self.action == "admin" and not self.identity.is_admin:
            raise Forbidden(
                f"the user {self.identity.user!r} is not allowed to see or change the whole "
                "database; only an admin can do this"
            )
        if self.action != "admin":
            self._filter = await self._access.authorize_and_build_filter(
                self.identity, self.action, arguments
            )
        if self.action.startswith("store:"):
            check_team_access(self.identity, self.action, arguments.get("namespace") or ())
        is_write = self.action in ("store:put", "store:delete")
        if is_internal_namespace(arguments.get("namespace") or ()) and (
            is_write or not self.identity.is_admin
        ):
            raise Forbidden(
                f"{arguments['namespace']!r} is a namespace for internal data of perdure; use "
                "another namespace"
            )
        self._database = await self._databases.get_or_open_database(self.identity.tenant)
        return arguments

    async def permit_thread(self, thread_id: str, **arguments: Any) -> Thread:
        """Check that the user may perform the action on a thread, and return the thread.

        Raises:
            Forbidden: See `authorize_arguments`.
            UnknownThread: The thread does not exist, or the caller has no access to it.
        """
        await self.authorize_arguments({"thread_id": thread_id, **arguments})
        return await self.threads.get(thread_id)

    async def permit_thread_row(self, thread_id: str) -> ListedThread:
        """Check that the action on a thread is permitted, and return the thread's row."""
        await self.authorize_arguments({"thread_id": thread_id})
        return await self.threads.get_permitted_row(thread_id)

    async def require_model_view_access(
        self, thread_id: str, checkpoint_ns: str = VIEWS_NAMESPACE
    ) -> None:
        """Raise an error if the user may not see the memories in a thread's model views.

        A model view is the recorded input of a model call. It can contain memories that the run
        recalled. A model view is visible to the person to whom the thread belongs, and to callers
        who are permitted to act on that person's behalf. If the thread does not belong to anyone,
        its model views are visible to everyone who has access to the thread.

        Args:
            thread_id: The thread, to which the caller has access.
            checkpoint_ns: The namespace of the checkpoints to show. A namespace other than that of
                model views is not checked.

        Raises:
            Forbidden: The caller may not see the model views.
        """
        if checkpoint_ns != VIEWS_NAMESPACE:
            return
        person = self.threads.find_person_of_thread(await self.threads.get_permitted_row(thread_id))
        if not self.identity.may_see_memories_of(person):
            raise Forbidden(
                f"the recorded model inputs of the thread {thread_id!r} can contain memories of "
                "the thread's user, so only this user and callers who are allowed to act for this "
                "user can read the inputs"
            )

    async def authorize_and_build_memory_selection(
        self, action_arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Authorize an action on memories, and return the arguments that select these memories."""
        permitted = await self.authorize_arguments({"namespace": self.memories, **action_arguments})
        template, config = convert_namespace_to_template_and_config(tuple(permitted["namespace"]))
        return {"namespace": template, "config": config}

    def keep_database_open(self) -> AbstractContextManager[None]:
        """Return a context manager that keeps the tenant's database open.

        Use this context manager for work that continues after the response has been sent.
        """
        return self._databases.keep_open(self.identity.tenant)

    def with_action(self, action: Action) -> Call:
        """Return a copy of this call for a different action, which needs its own authorization."""
        return Call(self.identity, action, self._access, self._databases, self._runs)

    def with_identity(self, identity: Identity) -> Call:
        """Return a copy of this call with a different user identity."""
        return Call(identity, self.action, self._access, self._databases, self._runs)

    def without_acting_for(self) -> Call:
        """Return a copy of this call in which the user acts only on their own behalf."""
        return self.with_identity(replace(self.identity, acting_for=None))

    @property
    def access(self) -> Access:
        """Return the authorization rules."""
        return self._access

    async def may_use_thread(self, action: Action, thread: Mapping[str, Any]) -> bool:
        """Return whether the user may perform an action on a thread.

        Call this method only after checking that the user has access to the thread. `action` need
        not be the action of this call.
        """
        other_call = self.with_action(action)
        try:
            await other_call.authorize_arguments({"thread_id": thread["thread_id"], "metadata": {}})
        except Refused:
            return False
        return matches_filter(thread["metadata"], other_call._filter)

    @property
    def filter(self) -> Filter:
        """Return the metadata filter for threads, crons and assistants that the caller may use."""
        self._require_database()
        return self._filter

    @property
    def saver(self) -> Checkpointer:
        """Return the checkpointer.

        The checkpointer does not check permissions. `threads` gives access only to the threads that
        the caller may use.
        """
        return self._require_database().saver

    @property
    def store(self) -> WholeStore:
        """Return the store."""
        return self._require_database().store

    @property
    def threads(self) -> Threads:
        """Return a `Threads` object that is limited to the threads that the caller may use."""
        runs, tenant, database = self._runs, self.identity.tenant, self._require_database()
        owners_are_people = getattr(self._access, "owners_are_people", True)
        options: Any = {
            "default_ttl": self._databases.thread_ttl,
            "owners_are_people": owners_are_people,
        }
        if runs is None:
            return Threads(database.saver, self._filter, **options)
        run_callbacks = (
            partial(runs.is_thread_busy, tenant),
            partial(runs.drop_runs_and_events_of_thread, tenant),
        )
        return Threads(database.saver, self._filter, *run_callbacks, **options)

    async def search_transcripts(
        self, text: str, query: ThreadQuery, limit: int, wait_s: float
    ) -> ThreadHits:
        """Search the transcripts of threads.

        Return no hits if transcript search is disabled.
        """
        if not (self._databases.search_threads and text.strip()):
            return ThreadHits()
        return await self.threads.search_transcripts(self.store, text, query, limit, wait_s)

    async def list_visible_store_rows(
        self,
        read_store: Callable[..., Awaitable[list[Any]]],
        *args: Any,
        hides_perdure_namespaces: bool = False,
        **options: Any,
    ) -> list[Any]:
        """List or search the store, omitting namespaces that the caller is not permitted to see.

        The namespaces of perdure's internal data are visible only to admins. A team's namespaces
        are visible to its members and to admins.

        Args:
            read_store: The method of the store.
            args: The positional arguments of the store method.
            hides_perdure_namespaces: Whether an admin sees namespaces of perdure only if the prefix
                names them.
            options: The keyword arguments of the store method.

        Raises:
            ConfigurationError: The offset is too large for a list from which rows are left out.
        """
        # The rows must be filtered only if the prefix may match namespaces that the caller may not
        # see. `authorize_arguments` has checked a prefix of two or more labels, unless its first
        # label is a wildcard. A prefix whose first label is neither a wildcard nor `TEAMS` matches
        # no namespaces of teams.
        prefix = args[0] if args else options["prefix"]
        shows_internal = self.identity.is_admin and not hides_perdure_namespaces
        is_permission_checked = len(prefix or ()) > 1 and prefix[0] != "*"
        if shows_internal or is_permission_checked or (prefix or "*")[0] not in ("*", TEAMS):
            return await read_store(*args, **options)
        visible: list[Any] = []
        offset, read_count = options.pop("offset"), 0
        if offset > 10 * _PAGE_SIZE:
            # Refuse large offsets. They would be slow, because the caller's access to each row
            # before the offset would have to be checked.
            raise ConfigurationError(
                f"the offset {offset} is greater than 10,000, the maximum for a list without a "
                "prefix; pass a prefix"
            )
        visible_limit = offset + options.pop("limit")
        page_size = min(visible_limit, _PAGE_SIZE)
        while len(visible) < visible_limit:
            page = await read_store(*args, **options, limit=page_size, offset=read_count)
            visible += [row for row in page if self._is_visible(getattr(row, "namespace", row))]
            if len(page) < page_size:
                break
            read_count, page_size = read_count + page_size, _PAGE_SIZE
        return visible[offset:visible_limit]

    def _is_visible(self, namespace: Sequence[str]) -> bool:
        """Return whether the given namespace is shown to the caller in a list of all namespaces."""
        return not is_internal_namespace(namespace) and may_see_namespace(self.identity, namespace)

    def find_author_to_record_in_team_namespace(self, namespace: Sequence[str]) -> str | None:
        """Return the author to record for an item that the user writes.

        An author is recorded only in team namespaces. For any other namespace, return None.
        """
        return self.identity.person if is_team_namespace(namespace) else None

    @property
    def memories(self) -> tuple[str, ...]:
        """Return the namespace of the user's memories."""
        return (NAMESPACE[0], self.identity.person)

    def _require_database(self) -> OpenDatabase:
        """Return the database.

        Raise `RuntimeError` if `authorize_arguments` has not been awaited yet.
        """
        if self._database is None:
            raise RuntimeError(
                f"the action {self.action} used the database before `authorize_arguments` was "
                "awaited; await `authorize_arguments` first"
            )
        return self._database


def is_internal_namespace(namespace: Sequence[str]) -> bool:
    """Return whether a namespace is reserved for perdure's internal data.

    Users cannot write to these namespaces.
    """
    return tuple(namespace[:1]) == (RESERVED_LABEL,)


def convert_namespace_to_template_and_config(
    namespace: Namespace,
) -> tuple[Namespace, RunnableConfig]:
    """Return a namespace template, and a config with which the template resolves to `namespace`.

    The template contains placeholders such as `{label_0}`, and the config contains the labels that
    replace them. Labels are passed as values, so that braces in a label are not parsed as
    placeholders. In the namespace of a team, the first two labels are replaced by `TEAMS` and the
    placeholder `TEAM`.
    """
    if is_team_namespace(namespace) and len(namespace) > 1:
        template, config = convert_namespace_to_template_and_config(namespace[2:])
        team = {"configurable": {**config["configurable"], "team": namespace[1]}}
        return (TEAMS, TEAM, *template), cast(RunnableConfig, team)
    labels = {f"label_{number}": label for number, label in enumerate(namespace)}
    return tuple(f"{{{name}}}" for name in labels), {"configurable": labels}


async def open_call(connection: HTTPConnection) -> AsyncIterator[Call]:
    """Build the `Call` for a request, and yield it as a FastAPI dependency.

    Until this generator resumes after the `yield`, the request counts as in progress, and the
    database stays open. FastAPI resumes the generator after the response has been sent.
    """
    state, access = connection.app.state, connection.app.state.access
    known_identity = getattr(connection.state, "identity", None)
    identity: Identity = known_identity or await identify_caller(connection)
    connection.state.user = identity.user
    endpoint = connection.scope["route"].endpoint
    call = Call(identity, endpoint.action, access, state.databases, state.runs)
    connection.state.call = call
    await state.audit.check_free_space(endpoint.action, connection.scope["method"])
    with state.clients.track_request((identity.tenant, identity.user)), call.keep_database_open():
        yield call


class Page(BaseModel):
    """The `limit` and `offset` fields in the body of a search request."""

    limit: int = Field(SEARCH_LIMIT, ge=0, le=1000)
    offset: int = Field(0, ge=0)

    def slice_rows(self, rows: list[Row]) -> list[Row]:
        """Return the rows on the page that `offset` and `limit` select."""
        return rows[self.offset :][: self.limit]


class SortedPage(Page):
    """The fields of a search request that set the limit, offset, sort order and returned fields."""

    sort_by: str
    sort_order: Literal["asc", "desc"] = "desc"
    select: Sequence[str] = ()

    def sort_and_select_page_rows(
        self, all_rows: list[dict[str, Any]], **extra_fields: Any
    ) -> list[dict[str, Any]]:
        """Sort the rows found by a search, and return the selected fields of the rows on one page.

        `offset` and `limit` select the page.

        Args:
            all_rows: All rows that the search finds.
            extra_fields: Fields that are added to each row if they are selected.
        """
        sort_field = self.sort_by
        all_rows.sort(
            key=lambda row: (row[sort_field] is not None, row[sort_field]),
            reverse=self.sort_order == "desc",
        )
        return [
            {name: (row | extra_fields)[name] for name in self.select or row}
            for row in self.slice_rows(all_rows)
        ]


CurrentCall = Annotated[Call, Depends(open_call)]
"""The type of an endpoint's parameter that receives the `Call` of the request."""
PathId = Annotated[str, AfterValidator(lambda text: text.replace("\0", "/"))]
"""The type of an endpoint's parameter that receives an id from the path of the URL.

The class `guard.EncodedSlashes` has replaced slashes in the id by NUL characters, which are
converted back.
"""
