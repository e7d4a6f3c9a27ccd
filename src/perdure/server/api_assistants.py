"""Assistants, as in langgraph's server: one for each graph that is served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError

from perdure.server.access import action
from perdure.server.call import Caller
from perdure.server.graphs import Graph, Graphs, id_of
from perdure.settings import SEARCH_LIMIT

routes = APIRouter(prefix="/assistants", tags=["assistants"])
_SINCE: Final = datetime.now(UTC).isoformat()


async def graphs_of(request: Request) -> Graphs:
    """The graphs that are served."""
    graphs: Graphs = request.app.state.runs.graphs
    return graphs


Served = Annotated[Graphs, Depends(graphs_of)]


async def opened(call: Caller, graphs: Served, assistant_id: str) -> AsyncIterator[Graph]:
    """The graph of an assistant."""
    await call.permit({"assistant_id": assistant_id})
    parts = assistant_id, call.saver, call.store
    async with graphs.opened(*parts, access="assistants.read", user=call.identity.raw) as graph:
        yield graph


Opened = Annotated[Graph, Depends(opened)]


class AssistantSearch(BaseModel):
    """The body of `POST /assistants/search`."""

    graph_id: str | None = None
    name: str | None = None
    metadata: dict[str, Any] | None = None
    limit: int = Field(SEARCH_LIMIT, ge=0)
    offset: int = Field(0, ge=0)


@routes.post("/search")
@action("assistants:search")
async def search(call: Caller, graphs: Served, wanted: AssistantSearch) -> list[dict[str, Any]]:
    """The assistants that a search finds."""
    permitted = await call.permit(wanted.model_dump())
    metadata = (permitted.get("metadata") or {}).items()
    found = [
        each
        for each in map(_assistant, graphs)
        if {wanted.graph_id, wanted.name} <= {None, each["name"]}
        and metadata <= each["metadata"].items()
    ]
    return found[wanted.offset : wanted.offset + wanted.limit]


@routes.get("/{assistant_id}")
@action("assistants:read")
async def get(call: Caller, graphs: Served, assistant_id: str) -> dict[str, Any]:
    """An assistant, by its id or by its graph's name."""
    await call.permit({"assistant_id": assistant_id})
    return _assistant(graphs.name(assistant_id))


@routes.get("/{assistant_id}/graph")
@action("assistants:read")
async def graph(made: Opened, xray: bool | int = False) -> dict[str, Any]:
    """Its nodes and edges."""
    return (await made.aget_graph(xray=xray)).to_json()


@routes.get("/{assistant_id}/schemas")
@action("assistants:read")
async def schemas(made: Opened, graphs: Served, assistant_id: str) -> dict[str, Any]:
    """The schemas of its input, output and context; null where its types have none in JSON."""
    output = _schema(made.get_output_jsonschema)
    return {
        "graph_id": graphs.name(assistant_id),
        "input_schema": _schema(made.get_input_jsonschema),
        "output_schema": output,
        "state_schema": output,
        "config_schema": None,
        "context_schema": _schema(made.get_context_jsonschema),
    }


def _schema(make: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    with suppress(PydanticUserError, PydanticInvalidForJsonSchema):
        return make()
    return None


def _assistant(name: str) -> dict[str, Any]:
    return {
        "assistant_id": id_of(name),
        "graph_id": name,
        "name": name,
        "description": None,
        "config": {},
        "context": {},
        "metadata": {"created_by": "system"},
        "version": 1,
        "created_at": _SINCE,
        "updated_at": _SINCE,
    }
