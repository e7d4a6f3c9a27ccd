"""Assistants as langgraph's clients know them: one for each graph that is served."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import BaseModel, Field
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError

from perdure.server.access import action
from perdure.server.call import Caller
from perdure.server.graphs import Graphs

routes = APIRouter(prefix="/assistants", tags=["assistants"])
_SINCE: Final = datetime.now(UTC).isoformat()


async def graphs_of(request: Request) -> Graphs:
    """The graphs that are served."""
    graphs: Graphs = request.app.state.graphs
    return graphs


Served = Annotated[Graphs, Depends(graphs_of)]


class Search(BaseModel):
    """Which assistants."""

    graph_id: str | None = None
    name: str | None = None
    metadata: dict[str, Any] | None = None
    limit: int = Field(10, ge=0)
    offset: int = Field(0, ge=0)


@routes.post("/search")
@action("assistants:search")
async def search(call: Caller, graphs: Served, wanted: Search) -> list[dict[str, Any]]:
    """The assistants that a search finds."""
    return _found(graphs, wanted, await call.permit(wanted.model_dump()))


@routes.post("/count")
@action("assistants:search")
async def count(call: Caller, graphs: Served, wanted: Search) -> int:
    """How many a search finds."""
    whole = wanted.model_copy(update={"limit": len(list(graphs)), "offset": 0})
    return len(_found(graphs, whole, await call.permit(wanted.model_dump())))


@routes.get("/{assistant_id}")
@action("assistants:read")
async def get(call: Caller, graphs: Served, assistant_id: str) -> dict[str, Any]:
    """An assistant, by its id or by its graph's name."""
    await call.permit({"assistant_id": assistant_id})
    return _assistant(graphs, graphs.name(assistant_id))


@routes.get("/{assistant_id}/graph")
@action("assistants:read")
async def graph(
    call: Caller, graphs: Served, assistant_id: str, xray: bool | int = False
) -> dict[str, Any]:
    """Its nodes and edges."""
    await call.permit({"assistant_id": assistant_id})
    opened = graphs.opened(
        assistant_id, call.saver, call.store, access="assistants.read", user=call.identity.raw
    )
    async with opened as made:
        return (await made.aget_graph(xray=xray)).to_json()


@routes.get("/{assistant_id}/schemas")
@action("assistants:read")
async def schemas(call: Caller, graphs: Served, assistant_id: str) -> dict[str, Any]:
    """The schemas of its input, output and context; null where its types have none in JSON."""
    await call.permit({"assistant_id": assistant_id})
    opened = graphs.opened(
        assistant_id, call.saver, call.store, access="assistants.read", user=call.identity.raw
    )
    async with opened as made:
        output = _schema(made.get_output_jsonschema)
        return {
            "graph_id": graphs.name(assistant_id),
            "input_schema": _schema(made.get_input_jsonschema),
            "output_schema": output,
            "state_schema": output,
            "config_schema": None,
            "context_schema": _schema(made.get_context_jsonschema),
        }


@routes.post("", include_in_schema=False)
@routes.patch("/{assistant_id}", include_in_schema=False)
@routes.delete("/{assistant_id}", include_in_schema=False)
@action("assistants:read")
async def change(call: Caller) -> None:
    """Refused."""
    await call.permit()
    raise HTTPException(
        405, "assistants are the graphs that the server was started with; it adds no others"
    )


def _schema(make: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    with suppress(PydanticUserError, PydanticInvalidForJsonSchema):
        return make()
    return None


def _found(graphs: Graphs, wanted: Search, permitted: dict[str, Any]) -> list[dict[str, Any]]:
    metadata = (permitted.get("metadata") or {}).items()
    assistants = (_assistant(graphs, name) for name in graphs)
    found = [
        each
        for each in assistants
        if wanted.graph_id in (None, each["graph_id"])
        and wanted.name in (None, each["name"])
        and metadata <= each["metadata"].items()
    ]
    return found[wanted.offset : wanted.offset + wanted.limit]


def _assistant(graphs: Graphs, name: str) -> dict[str, Any]:
    return {
        "assistant_id": graphs.assistant_id(name),
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
