"""Assistants by REST: a graph with what is configured, in versions, for langgraph's SDK.

Each graph that is served has one of its own, which nobody changes. Others are rows of the database.
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

from perdure.checkpointers.assistants import AssistantRow, AssistantTable
from perdure.checkpointers.thread_list import ThreadQuery
from perdure.errors import ConfigurationError, UnknownThread
from perdure.server import api_threads
from perdure.server.access import Forbidden, Refused, action, check_reach, containing, meets
from perdure.server.call import Call, CurrentCall, Page, PathId, SortedPage
from perdure.server.graphs import Graph, Graphs, UnknownGraph, default_assistant_id
from perdure.server.reply import build_json_reply, encode_json
from perdure.server.run_request import CheckpointRef, ClientConfig, WithoutNulls, is_reserved_name
from perdure.server.runs import Runs, ServerRuns
from perdure.server.threads import already_exists_error, validate_metadata, validate_owners

Assistant = dict[str, Any]
"""An assistant as langgraph's clients know it."""
# of the graphs' own: when the server was installed, which is the same for each of its processes
_INSTALLED_AT: Final = datetime.fromtimestamp(Path(__file__).stat().st_mtime, UTC)
_DEFAULT_FIELDS: Final[Assistant] = {
    "name": "Untitled",
    "description": None,
    "config": {},
    "context": {},
    "metadata": {},
}
"""What an assistant has that is given nothing."""
_NO_LIMIT: Final = 1 << 31
MAX_ASSISTANT_BYTES: Final = 256_000
"""How many bytes of JSON an assistant may have: each search reads all of them."""


class UnknownAssistant(Refused):
    """There is no such assistant, or it may not be reached."""

    status = 404


class Assistants:
    """The assistants that may be reached; any other is unknown.

    Args:
        call: Who asks, which is permitted; the graphs' own count as theirs.
        graphs: What is served.
    """

    def __init__(self, call: Call, graphs: Graphs) -> None:
        self._graphs, self._table = graphs, AssistantTable(call.saver)
        self._filter, self._user = call.filter, call.identity.person

    async def get(self, assistant_id: str) -> Assistant:
        """An assistant, by its id; that of a graph also by the graph's name.

        Raises:
            UnknownAssistant: There is none, or it may not be reached.
        """
        found = find_default_assistant(self._graphs, assistant_id)
        if found is None and (row := await self._table.get(_canonical_id(assistant_id))):
            found = _build_assistant(row)
        if found is None or not self._is_reachable(found):
            raise unknown_assistant_error(self._graphs, assistant_id)
        return found

    async def create(
        self, assistant_id: str, content: Mapping[str, Any], *, if_exists: str = "raise"
    ) -> Assistant:
        """Create an assistant.

        Raises:
            VersionConflict: There is one of this id; with `do_nothing` it is returned instead, if
                it may be reached.
            Forbidden: It could not be reached with this metadata.
            UnknownGraph: Its graph is not served.
        """
        content = self._validate_content(content)
        is_free = find_default_assistant(self._graphs, assistant_id) is None
        if not (is_free and await self._table.create(assistant_id, content)):
            with suppress(UnknownAssistant):
                if if_exists == "do_nothing":
                    return await self.get(assistant_id)
            raise already_exists_error(f"an assistant {assistant_id!r}")
        return await self.get(assistant_id)

    async def update(self, assistant_id: str, changes: Mapping[str, Any]) -> Assistant:
        """Make a new version, with what is given in place of what it had; metadata is added.

        Raises:
            UnknownAssistant: See `get`.
            Forbidden: It is that of a graph, or could not be reached any more.
            UnknownGraph: Its graph is not served.
        """
        key = self._check_changeable(assistant_id)

        def changed(row: AssistantRow) -> dict[str, Any]:
            if not meets(row.content["metadata"], self._filter):
                raise unknown_assistant_error(self._graphs, assistant_id)
            metadata = {**row.content["metadata"], **changes["metadata"]}
            return self._validate_content({**row.content, **changes, "metadata": metadata})

        row = await self._table.add_version(key, changed)
        if row is None:
            raise unknown_assistant_error(self._graphs, assistant_id)
        return _build_assistant(row)

    async def list_versions(self, assistant_id: str) -> list[Assistant]:
        """All versions of an assistant, newest first; see `get`."""
        found = await self.get(assistant_id)
        stored = await self._table.list_versions(found["assistant_id"])
        rows = [*map(_build_assistant, stored)] or [found]  # that of a graph
        return [
            {name: value for name, value in row.items() if name != "updated_at"}
            for row in rows
            if self._is_reachable(row)
        ]

    async def set_latest(self, assistant_id: str, version: int) -> Assistant:
        """Have another version be the latest; see `update`."""
        key = self._check_changeable(assistant_id)
        if version not in [row["version"] for row in await self.list_versions(assistant_id)]:
            raise UnknownAssistant(f"assistant {assistant_id!r} has no version {version}")
        await self._table.set_latest_version(key, version)
        return await self.get(key)

    async def delete(self, assistant_id: str) -> None:
        """Delete an assistant with all its versions; see `update`."""
        key = self._check_changeable(assistant_id)
        await self.get(assistant_id)
        await self._table.delete(key)

    async def search(self, filters: AssistantFilters) -> list[Assistant]:
        """All that match, the newest first."""
        rows = [
            *map(_build_assistant, await self._table.list_assistants()),
            *map(_build_default_assistant, self._graphs),
        ]
        has_wanted, name = containing(filters.metadata), filters.name.casefold()
        return [
            row
            for row in rows
            if meets(seen := self._build_visible_metadata(row), self._filter)
            and has_wanted(seen)
            and filters.graph_id in (None, row["graph_id"])
            and name in row["name"].casefold()
        ]

    def _is_reachable(self, assistant: Assistant) -> bool:
        return meets(self._build_visible_metadata(assistant), self._filter)

    def _build_visible_metadata(self, assistant: Assistant) -> dict[str, Any]:
        """The metadata that is asked for; who asks owns what belongs to a graph."""
        is_own = find_default_assistant(self._graphs, assistant["assistant_id"]) is not None
        return {**assistant["metadata"], **({"owner": self._user} if is_own else {})}

    def _check_changeable(self, assistant_id: str) -> str:
        if found := find_default_assistant(self._graphs, assistant_id):
            raise Forbidden(
                f"assistant {assistant_id!r} is that of the graph {found['graph_id']!r} and cannot "
                "be changed or deleted: create another one of the graph"
            )
        return _canonical_id(assistant_id)

    def _validate_content(self, content: Mapping[str, Any]) -> dict[str, Any]:
        if content["graph_id"] not in self._graphs:
            raise UnknownGraph(
                f"graph_id is {content['graph_id']!r}, which is not served; the graphs are "
                f"{', '.join(self._graphs)}",
                422,
            )
        validate_owners(validate_metadata(content["metadata"]))
        if (size := len(encode_json(content))) > MAX_ASSISTANT_BYTES:
            raise ConfigurationError(
                f"the assistant has {size} bytes; expected at most {MAX_ASSISTANT_BYTES}; keep "
                "larger values in the store or in the code of the graph"
            )
        check_reach("an assistant", content["metadata"], self._filter)
        return dict(content)


def find_default_assistant(graphs: Graphs, assistant_id: str) -> Assistant | None:
    """The assistant of a graph, by the graph's name or by its id; None: it is none."""
    return next(
        (
            _build_default_assistant(name)
            for name in graphs
            if assistant_id in (name, default_assistant_id(name))
        ),
        None,
    )


def unknown_assistant_error(
    graphs: Graphs, assistant_id: str, status: int = 404
) -> UnknownAssistant:
    """The error of an assistant that cannot be reached."""
    return UnknownAssistant(
        f"there is no assistant {assistant_id!r}; the graphs are {', '.join(graphs)}", status
    )


async def get_run_assistant(call: Call, graphs: Graphs, assistant_id: str) -> Assistant:
    """The assistant that a run is to be of, as it is now; see `RunRequest.of_assistant`.

    A graph's own needs no permission but that of the run; who made it is no matter of the run.

    Raises:
        UnknownAssistant: There is none that may be read, or its graph is not served.
    """
    if found := find_default_assistant(graphs, assistant_id):
        return {**found, "metadata": {}}
    reading = call.with_action("assistants:read")
    try:
        await reading.permit({"assistant_id": assistant_id, "metadata": {}})
        found = await Assistants(reading, graphs).get(assistant_id)
    except Refused as exc:
        raise unknown_assistant_error(graphs, assistant_id, 422) from exc
    if found["graph_id"] not in graphs:
        raise UnknownAssistant(
            f"assistant {assistant_id!r} is of the graph {found['graph_id']!r}, which is not "
            f"served; the graphs are {', '.join(graphs)}",
            422,
        )
    return found


async def choose_thread_assistant(call: Call, graphs: Graphs, thread: Mapping[str, Any]) -> str:
    """Who goes on with a thread: the assistant of its last run, else the own one of its graph.

    That has no more if the assistant may not be read, is deleted, or is of another graph now.
    """
    graph: str = thread["metadata"].get("graph_id") or ""
    last = thread["metadata"].get("assistant_id")
    with suppress(UnknownAssistant):
        if isinstance(last, str):
            found = await get_run_assistant(call, graphs, last)
            return last if found["graph_id"] == graph else graph
    return graph


def _canonical_id(assistant_id: str) -> str:
    """An id as it is stored; `""`, which no assistant has, of what is none."""
    try:
        return str(UUID(assistant_id))
    except ValueError:
        return ""


def _build_assistant(row: AssistantRow) -> Assistant:
    since = row.latest_since or row.created_at
    return {
        "assistant_id": row.assistant_id,
        **row.content,
        "version": row.version,
        "created_at": datetime.fromtimestamp(row.created_at, UTC),
        "updated_at": datetime.fromtimestamp(since, UTC),
    }


def _build_default_assistant(name: str) -> Assistant:
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


# -- by REST

routes = APIRouter(prefix="/assistants", tags=["assistants"])


def _refuse_reserved_names(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if is_reserved_name(name) or name in CheckpointRef.model_fields:
            raise ConfigurationError(
                f"{name!r} is {value!r:.80}, and it is a run's own: leave it out"
            )
    return values


Configurable = Annotated[dict[str, Any], AfterValidator(_refuse_reserved_names)]


class AssistantConfig(ClientConfig):
    """What runs of an assistant are configured with."""

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
        """What is given of what is stored."""
        return self.model_dump(include={"graph_id", *_DEFAULT_FIELDS}, exclude_unset=True)


class NewAssistant(AssistantChange):
    """The body of `POST /assistants`."""

    graph_id: str
    assistant_id: UUID = Field(default_factory=uuid4)
    if_exists: Literal["raise", "do_nothing"] = "raise"


class AssistantFilters(WithoutNulls):
    """The body of `POST /assistants/count`; `name` is a part of it, in any case."""

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
    """The assistants that may be reached, for what is asked of one of them."""
    await call.permit({"assistant_id": assistant_id})
    return Assistants(call, runs.graphs)


PermittedAssistants = Annotated[Assistants, Depends(permit_assistant)]


async def open_assistant_graph(
    call: CurrentCall, runs: ServerRuns, reached: PermittedAssistants, assistant_id: PathId
) -> AsyncIterator[tuple[str, Graph]]:
    """The graph of an assistant, with its name."""
    found = await reached.get(assistant_id)
    parts, user = (found["graph_id"], call.saver, call.store, found["config"]), call.identity.raw
    async with runs.graphs.open_graph(*parts, access="assistants.read", user=user) as graph:
        yield found["graph_id"], graph


OpenedGraph = Annotated[tuple[str, Graph], Depends(open_assistant_graph)]


@routes.post("")
@action("assistants:create")
async def create_assistant(call: CurrentCall, runs: ServerRuns, body: NewAssistant) -> Response:
    """Create an assistant of a graph; this is its version 1."""
    content, assistant_id = (
        {**deepcopy(_DEFAULT_FIELDS), **body.stored_fields()},
        str(body.assistant_id),
    )
    about = {"assistant_id": assistant_id, "if_exists": body.if_exists}
    content["metadata"] = (await call.permit({**content, **about}))["metadata"]
    created = Assistants(call, runs.graphs).create(assistant_id, content, if_exists=body.if_exists)
    return await build_json_reply(await created)


@routes.post("/search")
@action("assistants:search")
async def search_assistants(call: CurrentCall, runs: ServerRuns, body: AssistantSearch) -> Response:
    """The assistants that a search finds; `X-Pagination-Next` is the offset of the next ones."""
    found = await _search_permitted(call, runs, body)
    answer = await build_json_reply(body.select_rows(found))
    if len(found) > (end := body.offset + body.limit):
        answer.headers["X-Pagination-Next"] = str(end)
    return answer


@routes.post("/count")
@action("assistants:search")
async def count_assistants(call: CurrentCall, runs: ServerRuns, body: AssistantFilters) -> int:
    """How many assistants a search finds."""
    return len(await _search_permitted(call, runs, body))


async def _search_permitted(call: Call, runs: Runs, wanted: AssistantFilters) -> list[Assistant]:
    wanted.metadata = (await call.permit(wanted.model_dump()))["metadata"]
    return await Assistants(call, runs.graphs).search(wanted)


@routes.get("/{assistant_id}")
@action("assistants:read")
async def get_assistant(reached: PermittedAssistants, assistant_id: PathId) -> Response:
    """An assistant, by its id or by its graph's name."""
    return await build_json_reply(await reached.get(assistant_id))


@routes.patch("/{assistant_id}")
@action("assistants:update")
async def update_assistant(
    call: CurrentCall, runs: ServerRuns, assistant_id: PathId, body: AssistantChange
) -> Response:
    """Make a new version of an assistant, which is the latest then."""
    changes = {"metadata": {}, **body.stored_fields()}
    asked = await call.permit({**changes, "assistant_id": assistant_id})
    changes["metadata"] = asked["metadata"]
    return await build_json_reply(await Assistants(call, runs.graphs).update(assistant_id, changes))


@routes.delete("/{assistant_id}", status_code=204)
@action("assistants:delete")
async def delete_assistant(
    call: CurrentCall,
    runs: ServerRuns,
    reached: PermittedAssistants,
    assistant_id: PathId,
    delete_threads: bool = False,
) -> None:
    """Delete an assistant with all its versions; its threads stay, or are deleted before."""
    found = await reached.get(assistant_id)
    if delete_threads:
        searching = call.with_action("threads:search")
        asked = {"metadata": {"assistant_id": found["assistant_id"]}}
        wanted = ThreadQuery(metadata=(await searching.permit(asked))["metadata"])
        for thread in await searching.threads.search(wanted, _NO_LIMIT):
            with suppress(UnknownThread):
                deleting = call.with_action("threads:delete")
                await api_threads.delete_thread(deleting, runs, thread["thread_id"])
    await reached.delete(assistant_id)


@routes.post("/{assistant_id}/versions")
@action("assistants:read")
async def list_assistant_versions(
    reached: PermittedAssistants, assistant_id: PathId, body: VersionSearch
) -> Response:
    """The versions of an assistant, newest first."""
    has_wanted = containing(body.metadata)
    found = [
        each for each in await reached.list_versions(assistant_id) if has_wanted(each["metadata"])
    ]
    return await build_json_reply(body.slice_rows(found))


@routes.post("/{assistant_id}/latest")
@action("assistants:update")
async def set_latest_version(
    reached: PermittedAssistants, assistant_id: PathId, body: Version
) -> Response:
    """Go back to a version, or forward again."""
    return await build_json_reply(await reached.set_latest(assistant_id, body.version))


@routes.get("/{assistant_id}/graph")
@action("assistants:read")
async def get_assistant_graph(named: OpenedGraph, xray: bool | int = False) -> dict[str, Any]:
    """Its nodes and edges."""
    return (await named[1].aget_graph(xray=xray)).to_json()


@routes.get("/{assistant_id}/schemas")
@action("assistants:read")
async def get_assistant_schemas(named: OpenedGraph) -> dict[str, Any]:
    """The schemas of its input, output and context; null where its types have none in JSON."""
    return _build_schemas(*named)


@routes.get("/{assistant_id}/subgraphs")
@routes.get("/{assistant_id}/subgraphs/{namespace}")
@action("assistants:read")
async def get_assistant_subgraphs(
    named: OpenedGraph, namespace: PathId | None = None, recurse: bool = False
) -> dict[str, Any]:
    """The schemas of its subgraphs by their namespaces, of one if it is named."""
    graph_id, whole = named
    found = whole.aget_subgraphs(namespace=namespace, recurse=recurse)
    return {name: _build_schemas(graph_id, each) async for name, each in found}


def _build_schemas(graph_id: str, made: Any) -> dict[str, Any]:
    output = _schema_or_none(made.get_output_jsonschema)
    return {
        "graph_id": graph_id,
        "input_schema": _schema_or_none(made.get_input_jsonschema),
        "output_schema": output,
        "state_schema": output,
        "config_schema": None,
        "context_schema": _schema_or_none(made.get_context_jsonschema),
    }


def _schema_or_none(make: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    with suppress(PydanticUserError, PydanticInvalidForJsonSchema):
        return make()
    return None
