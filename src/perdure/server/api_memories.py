"""REST endpoints for a user's memories.

If a request has the query parameter `team`, the endpoint uses the memories of one of the user's
teams instead of the user's own memories.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query
from langchain_core.runnables import RunnableConfig
from pydantic import AwareDatetime, BaseModel, Field
from starlette.responses import Response

from perdure.memory import Collection, arecall
from perdure.server.http.access import set_required_action
from perdure.server.http.call import Call, CurrentCall, PathId
from perdure.server.http.reply import JSONObject, JSONReply, build_json_reply
from perdure.settings import LIST_LIMIT, SHOWN_LIMIT
from perdure.stores import Provenance

routes = APIRouter(tags=["memories"], default_response_class=JSONReply)
TeamName = Annotated[str | None, Query(min_length=1)]
"""The query parameter that selects the memories of a team instead of the user's own memories."""


class MemorySearch(BaseModel):
    """The body of `POST /memories/search`."""

    query: str
    kinds: list[str] | None = None
    limit: int = Field(SHOWN_LIMIT, ge=1, le=1000)
    max_tokens: int | None = Field(None, ge=1)
    min_score: float | None = None
    as_of: AwareDatetime | None = None
    during: tuple[AwareDatetime, AwareDatetime] | None = None
    explain: bool = False


class NewMemory(BaseModel):
    """The body of `POST /memories`.

    The field `memory` is a string, or an object with the field `text` and optional other fields.
    """

    memory: str | JSONObject
    key: str | None = None
    kind: str = "fact"


class MemoryChange(BaseModel):
    """The body of `PATCH /memories/{key}`."""

    memory: str | JSONObject
    supersede: bool = False
    at: AwareDatetime | None = None
    if_version: int | None = None


@routes.get("/memories")
@set_required_action("store:search")
async def list_memories(
    call: CurrentCall,
    kind: str | None = None,
    as_of: AwareDatetime | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = LIST_LIMIT,
    offset: Annotated[int, Query(ge=0)] = 0,
    team: TeamName = None,
) -> Response:
    """List the memories of one kind or of all kinds, oldest first.

    With `as_of`, list the memories that were valid at that time.
    """
    memories, config = await _authorize_and_build_memory_collection(
        call, {"filter": None, "query": None, "limit": limit, "offset": offset}, team
    )
    return await build_json_reply(
        await memories.alist(kind=kind, limit=limit, offset=offset, as_of=as_of, config=config)
    )


@routes.post("/memories/search")
@set_required_action("store:search")
async def search_memories(call: CurrentCall, body: MemorySearch, team: TeamName = None) -> Response:
    """Search for memories, and return them with a breakdown of their scores, best match first.

    The search finds the memories that an agent would recall with the same options. The response
    field `text` contains the found memories as a single text. `text` is the text that an agent
    would pass to its model if the agent recalled these memories. Memories are returned only if
    their score is at least `floor`. If the request sets `explain`, the response also lists the
    memories that scored less than `floor`, in the field `below`.
    """
    selection = await call.authorize_and_build_memory_namespace_and_config(
        team, filter=None, query=body.query, limit=body.limit, offset=0
    )
    recalled = await arecall(store=call.store, **body.model_dump(), **selection)
    return await build_json_reply(
        {
            "memories": recalled.memories,
            "tokens": recalled.tokens,
            "left_out": recalled.left_out,
            "floor": recalled.min_score,
            "below": recalled.below_min_score,
            "text": str(recalled),
        }
    )


@routes.post("/memories")
@set_required_action("store:put")
async def add_memory(call: CurrentCall, body: NewMemory, team: TeamName = None) -> Response:
    """Add a memory if the gate admits it.

    The response says whether the memory was added and, if not, why.
    """
    arguments = {
        "key": body.key,
        "value": {"memory": body.memory, "kind": body.kind},
        "index": None,
    }
    memories, config = await _authorize_and_build_memory_collection(
        call, arguments, team, kind=body.kind
    )
    outcome = await memories.ainsert(
        body.memory,
        key=body.key,
        provenance=_build_provenance_of_team_memory(call, team),
        config=config,
    )
    call.record_for_audit(key=outcome.key)
    return await build_json_reply(outcome)


@routes.patch("/memories/{key}")
@set_required_action("store:put")
async def change_memory(
    call: CurrentCall, key: PathId, body: MemoryChange, team: TeamName = None
) -> Response:
    """Correct a memory whose text is wrong, or replace a memory that is no longer true.

    Without `supersede`, the old text is assumed to have been wrong from the start. With
    `supersede`, the old text is assumed to have been true until the time `at` (default: now). With
    or without `supersede`, the old text is kept as an earlier version of the memory.
    """
    memories, config = await _authorize_and_build_memory_collection(
        call, {"key": key, "value": {"memory": body.memory}, "index": None}, team
    )
    options: JSONObject = {
        "if_version": body.if_version,
        "config": config,
        "provenance": _build_provenance_of_team_memory(call, team),
    }
    if body.supersede:
        return await build_json_reply(
            await memories.asupersede(key, body.memory, at=body.at, **options)
        )
    return await build_json_reply(await memories.aupdate(key, body.memory, **options))


@routes.delete("/memories/{key}")
@set_required_action("store:delete")
async def forget_memory(call: CurrentCall, key: PathId, team: TeamName = None) -> Response:
    """Erase a memory with all its versions, and return the receipt."""
    memories, config = await _authorize_and_build_memory_collection(call, {"key": key}, team)
    receipt = await memories.aforget(key, config=config)
    call.record_for_audit(hashes=receipt.hashes)
    return await build_json_reply(receipt)


async def _authorize_and_build_memory_collection(
    call: Call, arguments: JSONObject, team: str | None, *, kind: str = "fact"
) -> tuple[Collection, RunnableConfig]:
    """Check that the caller may perform an action on memories, and return these memories.

    Args:
        call: The request.
        arguments: The arguments of the action, for the permission check.
        team: The team that the memories belong to, or None for the memories of the user.
        kind: The kind of memories that are added.

    Returns:
        The collection, and the config for its methods.
    """
    selection = await call.authorize_and_build_memory_namespace_and_config(team, **arguments)
    return Collection(call.store, selection["namespace"], kind=kind), selection["config"]


def _build_provenance_of_team_memory(call: Call, team: str | None) -> Provenance | None:
    """Return the provenance of a new team memory, which identifies its author.

    If `team` is None, the memory is the user's own. Return None, which means that the memory gets
    the default provenance.
    """
    if team is None:
        return None
    return Provenance(actor="user", trust="user", at=datetime.now(UTC), author=call.identity.person)
