"""Provide the class `Call`, which represents a request to the server.

A `Call` identifies the user who sends the request. A `Call` gives access to the database only after
a permission check.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, cast

from fastapi import Depends
from langchain_core.runnables import RunnableConfig
from pydantic import AfterValidator, BaseModel, Field
from starlette.requests import HTTPConnection

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.records import VIEWS_NAMESPACE
from perdure.errors import ConfigurationError
from perdure.memory.long_term.recall import NAMESPACE
from perdure.memory.long_term.records import RESERVED_LABEL
from perdure.memory.namespace_templates import PERSONAL_LABELS, TEAM, TEAMS
from perdure.memory.thread_search import ThreadHits
from perdure.run_tables.thread_list import ListedThread, ThreadQuery
from perdure.server.databases import Databases, OpenDatabase
from perdure.server.http.access import (
    Access,
    Action,
    Filter,
    Forbidden,
    Identity,
    Refused,
    matches_filter,
)
from perdure.server.http.acting_for import identify_caller
from perdure.server.teams import check_team_access, is_team_namespace, may_see_namespace
from perdure.server.threads import Thread, Threads
from perdure.settings import SEARCH_LIMIT, check_user
from perdure.stores.base import Namespace
from perdure.stores.whole_store import WholeStore

if TYPE_CHECKING:
    from perdure.server.runs.run_manager import RunManager

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
# Maximum number of rows that one query reads when the server filters out rows hidden from the
# caller.
_PAGE_SIZE: Final = 1_000


class Call:
    """A user's request for an action.

    A `Call` gives access to the database only after its method `authorize_action_arguments` has
    been awaited.

    Args:
        databases: The databases of the server.
        runs: The run manager of this process, or None if the process executes no runs.

    Attributes:
        identity: The user.
        action: The action that the user requests.
        access: Decides which actions are permitted.
        recorded: The ids that the audit log records for each call of `authorize_action_arguments`.
        audited_identity: The user that the audit log records. It differs from `identity` if the
            body of the request names a person for whom the user acts or tries to act.
    """

    def __init__(
        self,
        identity: Identity,
        action: Action,
        access: Access,
        databases: Databases,
        runs: RunManager | None = None,
    ) -> None:
        self.identity, self.action, self.access = identity, action, access
        self._databases, self._runs = databases, runs
        self._database: OpenDatabase | None = None
        self._filter: Filter = {}
        self.recorded: list[dict[str, Any]] = []
        self.audited_identity = identity

    def record_for_audit(self, **ids: Any) -> None:
        """Add fields to the audit record of this request, such as the ids of changed objects.

        To add the hashes of erased messages and items to the audit record, pass the hashes from the
        erasure receipt as the keyword argument `hashes`.

        The audit record must not contain any message or memory content.
        """
        self.recorded[-1:] = [{**entry, **ids} for entry in self.recorded[-1:] or [{}]]

    async def authorize_action_arguments(
        self, requested_arguments: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Authorize the action, open the database, and return the action's authorized arguments.

        An authorization handler may change an action's arguments. Callers must use the returned
        arguments instead of `requested_arguments`. A returned namespace is a tuple or None.

        Raises:
            Forbidden: The action is not permitted.
            ConfigurationError: The action is about the namespace of a user whose name is blank, `.`
                or `..`.
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
            self._filter = await self.access.authorize_and_build_filter(
                self.identity, self.action, arguments
            )
        namespace = tuple(arguments.get("namespace") or ())
        if arguments.get("namespace") is not None:
            arguments["namespace"] = namespace
        if self.action.startswith("store:"):
            check_team_access(self.identity, self.action, namespace)
            _check_user_in_namespace(namespace)
        is_write = self.action in ("store:put", "store:delete")
        if is_internal_namespace(namespace) and (is_write or not self.identity.is_admin):
            raise Forbidden(
                f"{namespace!r} is a namespace for internal data of perdure; use another namespace"
            )
        self._database = await self._databases.get_or_open_database(self.identity.tenant)
        return arguments

    async def permit_thread(self, thread_id: str, **arguments: Any) -> Thread:
        """Check that the user may perform the action on a thread, and return the thread.

        Raises:
            Forbidden: See `authorize_action_arguments`.
            UnknownThread: The thread does not exist, or the caller has no access to it.
        """
        await self.authorize_action_arguments({"thread_id": thread_id, **arguments})
        return await self.threads.get(thread_id)

    async def permit_thread_row(self, thread_id: str) -> ListedThread:
        """Check that the action on a thread is permitted, and return the thread's row."""
        await self.authorize_action_arguments({"thread_id": thread_id})
        return await self.threads.get_permitted_row(thread_id)

    async def require_model_view_access(
        self, thread_id: str, checkpoint_ns: str = VIEWS_NAMESPACE
    ) -> None:
        """Raise an error if the user has no access to the recorded model inputs of a thread.

        The recorded input of a model call is called a model view. A model view can contain the
        user's memories, because a run can insert memories into the input of a model call. A model
        view is visible to the person to whom the thread belongs, and to callers who are permitted
        to act on that person's behalf. If the thread belongs to nobody, its recorded model inputs
        (model views) are visible to everyone who has access to the thread.

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
                f"only the user of the thread {thread_id!r}, or a caller who may act for this "
                "user, can read the thread's model inputs, because they can contain the user's "
                "memories"
            )

    async def authorize_and_build_memory_namespace_and_config(
        self, team: str | None, **action_arguments: Any
    ) -> dict[str, Any]:
        """Authorize an action on memories, and return the memories' namespace and config.

        The memories are those of a team or, if `team` is None, those of the user. The namespace is
        a template, and the config contains the labels that replace the template's placeholders.
        """
        permitted = await self.authorize_action_arguments(
            {"namespace": self.memories if team is None else (TEAMS, team), **action_arguments}
        )
        template, config = convert_namespace_to_template_and_config(permitted["namespace"])
        return {"namespace": template, "config": config}

    def keep_database_open(self) -> AbstractContextManager[None]:
        """Return a context manager that keeps the tenant's database open.

        Use the returned context manager for work that continues after the response has been sent.
        """
        return self._databases.keep_open(self.identity.tenant)

    def with_action(self, action: Action) -> Call:
        """Return a copy of this call for a different action, which needs its own authorization."""
        return Call(self.identity, action, self.access, self._databases, self._runs)

    def with_identity(self, identity: Identity) -> Call:
        """Return a copy of this call with a different user identity.

        Both calls add ids to the same audit record.
        """
        copy = Call(identity, self.action, self.access, self._databases, self._runs)
        copy.recorded = self.recorded
        return copy

    def without_acting_for(self) -> Call:
        """Return a copy of this call in which the user does not act for another person."""
        return self.with_identity(replace(self.identity, acting_for=None))

    async def may_use_thread(self, action: Action, thread: Mapping[str, Any]) -> bool:
        """Return whether the user may perform an action on a thread.

        Call this method only after checking that the user has access to the thread. `action` may
        differ from the action that was passed to the constructor of this `Call`.
        """
        other_call = self.with_action(action)
        try:
            await other_call.authorize_action_arguments(
                {"thread_id": thread["thread_id"], "metadata": {}}
            )
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

        The returned checkpointer gives access to all threads, without checking permissions. The
        property `threads` gives access only to the threads that the caller may use.
        """
        return self._require_database().saver

    @property
    def store(self) -> WholeStore:
        """Return the store."""
        return self._require_database().store

    def remove_assistant_before_first_run(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metadata to store for a thread that no run has used yet.

        If organisations can own threads, a new thread's `owner` may be an organisation. The person
        to whom the thread will belong is then unknown until the thread's first run starts. The
        method removes `assistant_id` from the metadata if organisations can own threads. The thread
        may later belong to a person other than the sender of the metadata. Removing `assistant_id`
        prevents the sender from choosing which assistant this person's runs use. The first run of
        the thread stores the `assistant_id`.
        """
        removed = {"assistant_id"} if self._databases.has_organisations else set[str]()
        return {name: value for name, value in metadata.items() if name not in removed}

    @property
    def threads(self) -> Threads:
        """Return a `Threads` object that is limited to the threads that the caller may use."""
        runs, tenant = self._runs, self.identity.tenant
        options: dict[str, Any] = {
            "default_ttl": self._databases.options.thread_ttl,
            "owners_are_people": getattr(self.access, "owners_are_people", True),
        }
        if runs is not None:
            options["has_run_in_process"] = partial(runs.shared_state.has_run_of_thread, tenant)
            options["drop_runs_and_events_of_thread"] = partial(
                runs.drop_runs_and_events_of_thread, tenant
            )
        return Threads(self.saver, self._filter, **options)

    async def search_transcripts(
        self, text: str, query: ThreadQuery, limit: int, wait_s: float
    ) -> ThreadHits:
        """Search the transcripts of threads.

        Return no hits if transcript search is disabled.
        """
        if not (self._databases.settings.search_threads and text.strip()):
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
        # see. `authorize_action_arguments` has checked a prefix of two or more labels, unless its
        # first label is a wildcard. A prefix whose first label is neither a wildcard nor `TEAMS`
        # matches no namespaces of teams.
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
                f"the offset {offset} is too large; pass a prefix, or an offset of at most 10,000"
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
        """Return the name to record as the author of an item that the user writes.

        The author of an item is recorded only in team namespaces. For any other namespace, return
        None.
        """
        return self.identity.person if is_team_namespace(namespace) else None

    @property
    def memories(self) -> tuple[str, ...]:
        """Return the namespace of the user's memories."""
        return (NAMESPACE[0], self.identity.person)

    def _require_database(self) -> OpenDatabase:
        """Return the database.

        Raise `RuntimeError` if `authorize_action_arguments` has not been awaited yet.
        """
        if self._database is None:
            raise RuntimeError(
                f"the action {self.action} used the database before `authorize_action_arguments` "
                "was awaited; await `authorize_action_arguments` first"
            )
        return self._database


def is_internal_namespace(namespace: Sequence[str]) -> bool:
    """Return whether a namespace is reserved for perdure's internal data.

    Users cannot write to these namespaces.
    """
    return tuple(namespace[:1]) == (RESERVED_LABEL,)


def _check_user_in_namespace(namespace: Sequence[str]) -> None:
    """Raise an error if the name of the user in a personal namespace is not a valid user name.

    The second label of a personal namespace, such as `("memories", user)`, is the name of a user.

    Raises:
        ConfigurationError: The name is not valid; see `check_user`.
    """
    if len(namespace) > 1 and namespace[0] in PERSONAL_LABELS:
        label = f"the second label of the namespace {tuple(namespace)!a:.80}"
        check_user(label, namespace[1], "pass the name of the user to whom the items belong")


def convert_namespace_to_template_and_config(
    namespace: Namespace,
) -> tuple[Namespace, RunnableConfig]:
    """Convert a namespace to a namespace template and the config that fills in its placeholders.

    The template contains placeholders such as `{label_0}`, and the config contains the labels that
    replace them. Namespace labels are passed in the config, because the template would parse braces
    in a label as placeholders. The template of a team's namespace starts with the label `TEAMS` and
    the placeholder `TEAM`.
    """
    if is_team_namespace(namespace) and len(namespace) > 1:
        template, config = convert_namespace_to_template_and_config(namespace[2:])
        team = {"configurable": {**config["configurable"], "team": namespace[1]}}
        return (TEAMS, TEAM, *template), cast(RunnableConfig, team)
    labels = {f"label_{number}": label for number, label in enumerate(namespace)}
    return tuple(f"{{{name}}}" for name in labels), {"configurable": labels}


async def open_call(connection: HTTPConnection) -> AsyncIterator[Call]:
    """Build the `Call` for a request, and yield it as a FastAPI dependency.

    The request counts as in progress, and the database stays open, until this generator resumes
    after the `yield`. FastAPI resumes this generator after it has sent the response.
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
