"""Serve assistants over HTTP to clients that use the LangGraph SDK.

An assistant is a graph with a versioned configuration. Each served graph has a default assistant,
which cannot be changed. User-created assistants are stored in the database.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from uuid import UUID, uuid4

from fastapi import APIRouter, Depends, Response
from langgraph_sdk.schema import AssistantSelectField, AssistantSortBy
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError

from perdure.errors import ConfigurationError, UnknownThread
from perdure.run_tables.assistants import AssistantRow, AssistantTable
from perdure.run_tables.thread_list import ThreadQuery
from perdure.server import api_threads
from perdure.server.graphs import Graph, Graphs, UnknownGraph, default_assistant_id
from perdure.server.http.access import (
    Forbidden,
    Refused,
    build_json_containment_predicate,
    matches_filter,
    require_filter_match,
    set_required_action,
)
from perdure.server.http.call import Call, CurrentCall, Page, PathId, SortedPage
from perdure.server.http.reply import JSONReply, build_json_reply, encode_json
from perdure.server.runs.run_manager import RunManager, ServerRuns
from perdure.server.runs.run_request import (
    CheckpointRef,
    ClientConfig,
    WithoutNulls,
    is_reserved_name,
)
from perdure.server.threads import (
    already_exists_error,
    validate_metadata,
    validate_user_names_in_metadata,
)
from perdure.storage.flow import NO_LIMIT

Assistant = dict[str, Any]
"""An assistant in the format of LangGraph's API."""
# The creation time reported for default assistants. It is the modification time of this file, so
# that all processes of a server report the same time.
_INSTALLED_AT: Final = datetime.fromtimestamp(Path(__file__).stat().st_mtime, UTC)
_DEFAULT_FIELDS: Final[Assistant] = {
    "name": "Untitled",
    "description": None,
    "config": {},
    "context": {},
    "metadata": {},
}
"""The default values of the fields of an assistant."""
MAX_ASSISTANT_BYTES: Final = 256_000
"""The maximum size in bytes of an assistant as JSON.

The size is limited because each search reads all assistants.
"""


class UnknownAssistant(Refused):
    """Raised if an assistant does not exist, or if the caller has no access to it."""

    status = 404


class Assistants:
    """The assistants that a caller may access.

    An assistant that the caller may not access is treated as if it did not exist.

    Args:
        call: The authorized call. Default assistants count as owned by the person of the call; see
            `Identity.person`.
        graphs: The graphs that the server serves.
    """

    def __init__(self, call: Call, graphs: Graphs) -> None:
        self._graphs, self._table = graphs, AssistantTable(call.saver)
        self._filter, self._user = call.filter, call.identity.person

    async def get(self, assistant_id: str) -> Assistant:
        """Return an assistant by its id.

        The assistant id can also be the name of a graph, which stands for the graph's default
        assistant.

        Raises:
            UnknownAssistant: The assistant does not exist, or the caller has no access to it.
        """
        assistant = find_default_assistant(self._graphs, assistant_id)
        if assistant is None and (
            row := await self._table.get(_canonicalize_assistant_id(assistant_id))
        ):
            assistant = _build_assistant(row)
        if assistant is None or not self._is_reachable(assistant):
            raise build_unknown_assistant_error(self._graphs, assistant_id)
        return assistant

    async def create(
        self, assistant_id: str, content: Mapping[str, Any], *, if_exists: str = "raise"
    ) -> Assistant:
        """Create an assistant.

        Args:
            assistant_id: The id of the assistant.
            content: The fields of the assistant.
            if_exists: With `do_nothing`, an existing assistant is returned if the caller has access
                to it.

        Raises:
            VersionConflict: An assistant with this id exists, and it is not returned because of
                `if_exists`.
            Forbidden: The caller would have no access to an assistant with this metadata.
            UnknownGraph: The graph is not served.
        """
        content = self._validate_content(content)
        is_not_default = find_default_assistant(self._graphs, assistant_id) is None
        if not (is_not_default and await self._table.create(assistant_id, content)):
            with suppress(UnknownAssistant):
                if if_exists == "do_nothing":
                    return await self.get(assistant_id)
            raise already_exists_error(f"an assistant {assistant_id!r}")
        return await self.get(assistant_id)

    async def update(self, assistant_id: str, changes: Mapping[str, Any]) -> Assistant:
        """Create a new version of an assistant.

        The fields in `changes` replace the assistant's old fields, and the metadata in `changes` is
        merged into the existing metadata.

        Raises:
            UnknownAssistant: See `get`.
            Forbidden: The assistant is a default assistant, or the caller would lose access to the
                assistant by the change.
            UnknownGraph: The graph is not served.
        """
        key = self._require_changeable_and_canonicalize_assistant_id(assistant_id)

        def apply_changes(row: AssistantRow) -> dict[str, Any]:
            if not matches_filter(row.content["metadata"], self._filter):
                raise build_unknown_assistant_error(self._graphs, assistant_id)
            metadata = {**row.content["metadata"], **changes["metadata"]}
            return self._validate_content({**row.content, **changes, "metadata": metadata})

        row = await self._table.add_version(key, apply_changes)
        if row is None:
            raise build_unknown_assistant_error(self._graphs, assistant_id)
        return _build_assistant(row)

    async def list_versions(self, assistant_id: str) -> list[Assistant]:
        """Return all versions of an assistant, newest first.

        See `get` for the exceptions.
        """
        assistant = await self.get(assistant_id)
        stored = await self._table.list_versions(assistant["assistant_id"])
        # `stored` is empty for a default assistant, because only user-created assistants are stored
        # in the database. A default assistant has only one version.
        rows = [*map(_build_assistant, stored)] or [assistant]
        return [
            {name: value for name, value in row.items() if name != "updated_at"}
            for row in rows
            if self._is_reachable(row)
        ]

    async def set_latest(self, assistant_id: str, version: int) -> Assistant:
        """Make the given version of an assistant its latest version.

        See `update` for the exceptions. UnknownAssistant is also raised if the assistant has no
        version with the given number.
        """
        key = self._require_changeable_and_canonicalize_assistant_id(assistant_id)
        if version not in [row["version"] for row in await self.list_versions(assistant_id)]:
            raise UnknownAssistant(f"assistant {assistant_id!r} has no version {version}")
        await self._table.set_latest_version(key, version)
        return await self.get(key)

    async def delete(self, assistant_id: str) -> None:
        """Delete an assistant and all its versions.

        See `update` for the exceptions.
        """
        key = self._require_changeable_and_canonicalize_assistant_id(assistant_id)
        await self.get(assistant_id)
        await self._table.delete(key)

    async def search(self, filters: AssistantFilters) -> list[Assistant]:
        """Return all assistants that match the filters.

        The stored assistants come first, most recently created first, and the default assistants
        last.
        """
        rows = [
            *map(_build_assistant, await self._table.list_assistants()),
            *map(_build_default_assistant, self._graphs),
        ]
        matches_metadata, name_part = (
            build_json_containment_predicate(filters.metadata),
            filters.name.casefold(),
        )
        return [
            row
            for row in rows
            if matches_filter(visible := self._build_metadata_matched_by_filters(row), self._filter)
            and matches_metadata(visible)
            and filters.graph_id in (None, row["graph_id"])
            and name_part in row["name"].casefold()
        ]

    def _is_reachable(self, assistant: Assistant) -> bool:
        """Return whether the caller has access to an assistant."""
        return matches_filter(self._build_metadata_matched_by_filters(assistant), self._filter)

    def _build_metadata_matched_by_filters(self, assistant: Assistant) -> dict[str, Any]:
        """Return the assistant metadata that search and access filters are matched against.

        In the metadata that is returned for a default assistant, `owner` is the current caller.
        Every caller counts as the owner of the default assistants. A filter that requires the
        caller as `owner` therefore also matches default assistants.
        """
        is_default = find_default_assistant(self._graphs, assistant["assistant_id"]) is not None
        return {**assistant["metadata"], **({"owner": self._user} if is_default else {})}

    def _require_changeable_and_canonicalize_assistant_id(self, assistant_id: str) -> str:
        """Check that an assistant may be changed, and return its id in canonical form.

        Raises:
            Forbidden: The assistant is the default assistant of a graph.
        """
        if default := find_default_assistant(self._graphs, assistant_id):
            raise Forbidden(
                f"assistant {assistant_id!r} is the default assistant for the graph "
                f"{default['graph_id']!r} and cannot be changed or deleted; create another "
                "assistant for the graph"
            )
        return _canonicalize_assistant_id(assistant_id)

    def _validate_content(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Check an assistant's fields, and return a copy of them."""
        if content["graph_id"] not in self._graphs:
            raise UnknownGraph(
                f"the graph {content['graph_id']!r} is not served; the served graphs "
                f"are {', '.join(self._graphs)}",
                422,
            )
        validate_user_names_in_metadata(validate_metadata(content["metadata"]))
        if (size := len(encode_json(content))) > MAX_ASSISTANT_BYTES:
            raise ConfigurationError(
                f"the assistant's JSON has {size} bytes; at most {MAX_ASSISTANT_BYTES} bytes are "
                "allowed. Keep large values in the store or in the graph's code"
            )
        require_filter_match("an assistant", content["metadata"], self._filter)
        return dict(content)


def find_default_assistant(graphs: Graphs, assistant_id: str) -> Assistant | None:
    """Find a default assistant by its id or by the name of its graph."""
    return next(
        (
            _build_default_assistant(name)
            for name in graphs
            if assistant_id in (name, default_assistant_id(name))
        ),
        None,
    )


def build_unknown_assistant_error(
    graphs: Graphs, assistant_id: str, status: int = 404
) -> UnknownAssistant:
    """Return the error for an assistant that does not exist or that the caller may not access."""
    return UnknownAssistant(
        f"there is no assistant {assistant_id!r}; the served graphs are {', '.join(graphs)}", status
    )


async def get_run_assistant(call: Call, graphs: Graphs, assistant_id: str) -> Assistant:
    """Return the latest version of the assistant for a new run.

    `RunRequest.merge_with_assistant` merges the assistant with the request.

    To use a default assistant, the caller needs only the permission to create the run. A default
    assistant is returned without its metadata, because its metadata records the assistant's creator
    and must not be copied to the run.

    Raises:
        UnknownAssistant: The caller may not read the assistant, it does not exist, or its graph is
            not served.
    """
    if assistant := find_default_assistant(graphs, assistant_id):
        return {**assistant, "metadata": {}}
    read_call = call.with_action("assistants:read")
    try:
        await read_call.authorize_action_arguments({"assistant_id": assistant_id, "metadata": {}})
        assistant = await Assistants(read_call, graphs).get(assistant_id)
    except Refused as exc:
        raise build_unknown_assistant_error(graphs, assistant_id, 422) from exc
    if assistant["graph_id"] not in graphs:
        raise UnknownAssistant(
            f"assistant {assistant_id!r} belongs to the graph {assistant['graph_id']!r}, which is "
            f"not served; the served graphs are {', '.join(graphs)}",
            422,
        )
    return assistant


async def choose_thread_assistant(call: Call, graphs: Graphs, thread: Mapping[str, Any]) -> str:
    """Return the id of the thread's last-used assistant, falling back to the thread's graph name.

    The name of a graph serves as the id of the graph's default assistant. Return the thread's graph
    name if the last-used assistant is unknown, inaccessible, deleted or belongs to another graph.
    Return `""` if the thread's metadata does not contain the key `graph_id`.
    """
    graph_id: str = thread["metadata"].get("graph_id") or ""
    last_assistant_id = thread["metadata"].get("assistant_id")
    with suppress(UnknownAssistant):
        if isinstance(last_assistant_id, str):
            assistant = await get_run_assistant(call, graphs, last_assistant_id)
            return last_assistant_id if assistant["graph_id"] == graph_id else graph_id
    return graph_id


def _canonicalize_assistant_id(assistant_id: str) -> str:
    """Convert an assistant's id to the canonical form in which ids are stored.

    If the id is invalid, return `""`, which is not the id of any assistant.
    """
    try:
        return str(UUID(assistant_id))
    except ValueError:
        return ""


def _build_assistant(row: AssistantRow) -> Assistant:
    """Return a stored assistant in the format of LangGraph's API."""
    return {
        "assistant_id": row.assistant_id,
        **row.content,
        "version": row.version,
        "created_at": datetime.fromtimestamp(row.created_at, UTC),
        "updated_at": datetime.fromtimestamp(row.latest_since or row.created_at, UTC),
    }


def _build_default_assistant(name: str) -> Assistant:
    """Return a graph's default assistant in the format of LangGraph's API."""
    return {
        **_DEFAULT_FIELDS,
        "assistant_id": default_assistant_id(name),
        "graph_id": name,
        "name": name,
        "metadata": {"created_by": "system"},
        "version": 1,
        "created_at": _INSTALLED_AT,
        "updated_at": _INSTALLED_AT,
    }


# -- endpoints

routes = APIRouter(prefix="/assistants", tags=["assistants"], default_response_class=JSONReply)


def _refuse_reserved_config_names(config_values: dict[str, Any]) -> dict[str, Any]:
    """Check that an assistant's `configurable` or context contains no reserved names.

    A reserved name such as `checkpoint_id` can be set only by a run, not by an assistant.
    """
    for name, value in config_values.items():
        if is_reserved_name(name) or name in CheckpointRef.model_fields:
            raise ConfigurationError(
                f"the assistant sets the key {name!r} to {value!r:.80}, but only a run can set "
                "this key; remove the key from the assistant"
            )
    return config_values


Configurable = Annotated[dict[str, Any], AfterValidator(_refuse_reserved_config_names)]


class AssistantConfig(ClientConfig):
    """The config of the runs of an assistant."""

    model_config = ConfigDict(extra="forbid")

    configurable: Configurable = Field(default={})  # type: ignore[assignment]


class AssistantChange(WithoutNulls):
    """The body of `PATCH /assistants/{assistant_id}`."""

    graph_id: str = ""
    config: AssistantConfig = AssistantConfig()
    context: Configurable = Field({})
    metadata: api_threads.Metadata = Field({})
    name: str = ""
    description: str = ""

    def stored_fields(self) -> dict[str, Any]:
        """Return the fields of this request that are stored in the assistant's row."""
        return self.model_dump(include={"graph_id", *_DEFAULT_FIELDS}, exclude_unset=True)


class NewAssistant(AssistantChange):
    """The body of `POST /assistants`."""

    graph_id: str
    assistant_id: UUID = Field(default_factory=uuid4)
    if_exists: Literal["raise", "do_nothing"] = "raise"


class AssistantFilters(WithoutNulls):
    """The body of `POST /assistants/count`.

    The `name` filter matches any part of an assistant's name, ignoring case.
    """

    graph_id: str | None = None
    name: str = ""
    metadata: dict[str, Any] = Field({})


class AssistantSearch(AssistantFilters, SortedPage):
    """The body of `POST /assistants/search`."""

    sort_by: AssistantSortBy = "created_at"
    select: list[AssistantSelectField] = Field([])


class VersionSearch(WithoutNulls, Page):
    """The body of `POST /assistants/{assistant_id}/versions`."""

    metadata: dict[str, Any] = Field({})


class Version(BaseModel):
    """The body of `POST /assistants/{assistant_id}/latest`."""

    version: int


async def permit_assistant(call: CurrentCall, runs: ServerRuns, assistant_id: PathId) -> Assistants:
    """Check that the call is permitted, and return the assistants that the caller may access."""
    await call.authorize_action_arguments({"assistant_id": assistant_id})
    return Assistants(call, runs.graphs)


PermittedAssistants = Annotated[Assistants, Depends(permit_assistant)]


async def open_assistant_graph(
    call: CurrentCall, runs: ServerRuns, assistants: PermittedAssistants, assistant_id: PathId
) -> AsyncIterator[tuple[str, Graph]]:
    """Yield the name of an assistant's graph and the graph itself."""
    assistant = await assistants.get(assistant_id)
    graph_args, user = (
        (assistant["graph_id"], call.saver, call.store, assistant["config"]),
        call.identity.raw_user,
    )
    async with runs.graphs.open_graph(*graph_args, access="assistants.read", user=user) as graph:
        yield assistant["graph_id"], graph


OpenedGraph = Annotated[tuple[str, Graph], Depends(open_assistant_graph)]


@routes.post("")
@set_required_action("assistants:create")
async def create_assistant(call: CurrentCall, runs: ServerRuns, body: NewAssistant) -> Response:
    """Create an assistant for a graph, as version 1."""
    content, assistant_id = (
        {**deepcopy(_DEFAULT_FIELDS), **body.stored_fields()},
        str(body.assistant_id),
    )
    permitted = await call.authorize_action_arguments(
        {**content, "assistant_id": assistant_id, "if_exists": body.if_exists}
    )
    content["metadata"] = permitted["metadata"]
    assistants = Assistants(call, runs.graphs)
    return await build_json_reply(
        await assistants.create(assistant_id, content, if_exists=body.if_exists)
    )


@routes.post("/search")
@set_required_action("assistants:search")
async def search_assistants(call: CurrentCall, runs: ServerRuns, body: AssistantSearch) -> Response:
    """List the assistants that match the filters.

    The `X-Pagination-Next` response header contains the offset of the next page.
    """
    assistants = await _search_permitted_assistants(call, runs, body)
    response = await build_json_reply(body.sort_and_select_page_rows(assistants))
    if len(assistants) > (end := body.offset + body.limit):
        response.headers["X-Pagination-Next"] = str(end)
    return response


@routes.post("/count")
@set_required_action("assistants:search")
async def count_assistants(call: CurrentCall, runs: ServerRuns, body: AssistantFilters) -> int:
    """Count the assistants that match the filters."""
    return len(await _search_permitted_assistants(call, runs, body))


async def _search_permitted_assistants(
    call: Call, runs: RunManager, filters: AssistantFilters
) -> list[Assistant]:
    """Return the assistants that match the filters and that the caller may access."""
    filters.metadata = (await call.authorize_action_arguments(filters.model_dump()))["metadata"]
    return await Assistants(call, runs.graphs).search(filters)


@routes.get("/{assistant_id}")
@set_required_action("assistants:read")
async def get_assistant(assistants: PermittedAssistants, assistant_id: PathId) -> Response:
    """Return an assistant by its id.

    The assistant id may also be the name of a graph, which selects that graph's default assistant.
    """
    return await build_json_reply(await assistants.get(assistant_id))


@routes.patch("/{assistant_id}")
@set_required_action("assistants:update")
async def update_assistant(
    call: CurrentCall, runs: ServerRuns, assistant_id: PathId, body: AssistantChange
) -> Response:
    """Create a new version of an assistant, which becomes the latest one."""
    changes = {"metadata": {}, **body.stored_fields()}
    permitted = await call.authorize_action_arguments({**changes, "assistant_id": assistant_id})
    changes["metadata"] = permitted["metadata"]
    return await build_json_reply(await Assistants(call, runs.graphs).update(assistant_id, changes))


@routes.delete("/{assistant_id}", status_code=204)
@set_required_action("assistants:delete")
async def delete_assistant(
    call: CurrentCall,
    runs: ServerRuns,
    assistants: PermittedAssistants,
    assistant_id: PathId,
    delete_threads: bool = False,
) -> None:
    """Delete an assistant and all its versions.

    With `delete_threads`, the assistant's threads that the caller can access are deleted, too.
    """
    assistant = await assistants.get(assistant_id)
    if delete_threads:
        search_call = call.with_action("threads:search")
        permitted = await search_call.authorize_action_arguments(
            {"metadata": {"assistant_id": assistant["assistant_id"]}}
        )
        query = ThreadQuery(metadata=permitted["metadata"])
        for thread in await search_call.threads.search(query, NO_LIMIT):
            with suppress(UnknownThread):
                await api_threads.delete_thread(
                    call.with_action("threads:delete"), runs, thread["thread_id"]
                )
    await assistants.delete(assistant_id)


@routes.post("/{assistant_id}/versions")
@set_required_action("assistants:read")
async def list_assistant_versions(
    assistants: PermittedAssistants, assistant_id: PathId, body: VersionSearch
) -> Response:
    """List the versions of an assistant, newest first."""
    matches_metadata = build_json_containment_predicate(body.metadata)
    matching = [
        version
        for version in await assistants.list_versions(assistant_id)
        if matches_metadata(version["metadata"])
    ]
    return await build_json_reply(body.slice_rows(matching))


@routes.post("/{assistant_id}/latest")
@set_required_action("assistants:update")
async def set_latest_version(
    assistants: PermittedAssistants, assistant_id: PathId, body: Version
) -> Response:
    """Make the given version of an assistant its latest version."""
    return await build_json_reply(await assistants.set_latest(assistant_id, body.version))


@routes.get("/{assistant_id}/graph")
@set_required_action("assistants:read")
async def get_assistant_graph(opened: OpenedGraph, xray: bool | int = False) -> dict[str, Any]:
    """Return the graph's nodes and edges."""
    return (await opened[1].aget_graph(xray=xray)).to_json()


@routes.get("/{assistant_id}/schemas")
@set_required_action("assistants:read")
async def get_assistant_schemas(opened: OpenedGraph) -> dict[str, Any]:
    """Return the JSON schemas of the input, the output and the context of an assistant's graph.

    If a type cannot be expressed as a JSON schema, null is returned in place of its schema.
    """
    return _build_graph_schemas_for_api(*opened)


@routes.get("/{assistant_id}/subgraphs")
@routes.get("/{assistant_id}/subgraphs/{namespace}")
@set_required_action("assistants:read")
async def get_assistant_subgraphs(
    opened: OpenedGraph, namespace: PathId | None = None, recurse: bool = False
) -> dict[str, Any]:
    """Return a dict with the schemas of all subgraphs, or of the subgraphs in one namespace."""
    graph_id, graph = opened
    subgraphs = graph.aget_subgraphs(namespace=namespace, recurse=recurse)
    return {
        name: _build_graph_schemas_for_api(graph_id, subgraph) async for name, subgraph in subgraphs
    }


def _build_graph_schemas_for_api(graph_id: str, graph: Any) -> dict[str, Any]:
    """Return a graph's schemas in the format of LangGraph's API."""
    output = _build_schema_or_none_if_unsupported(graph.get_output_jsonschema)
    return {
        "graph_id": graph_id,
        "input_schema": _build_schema_or_none_if_unsupported(graph.get_input_jsonschema),
        "output_schema": output,
        "state_schema": output,
        "config_schema": None,
        "context_schema": _build_schema_or_none_if_unsupported(graph.get_context_jsonschema),
    }


def _build_schema_or_none_if_unsupported(
    build_schema: Callable[[], dict[str, Any] | None],
) -> dict[str, Any] | None:
    """Build a JSON schema, or return None if a type cannot be expressed as a JSON schema."""
    with suppress(PydanticUserError, PydanticInvalidForJsonSchema):
        return build_schema()
    return None
