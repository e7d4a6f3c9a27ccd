"""REST endpoints for the store, compatible with `StoreClient` of langgraph's SDK."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from langgraph.store.base import NOT_PROVIDED
from pydantic import BaseModel, Field
from starlette.responses import Response

from perdure.errors import InvalidValue
from perdure.server.http.access import set_required_action
from perdure.server.http.call import Call, CurrentCall
from perdure.server.http.reply import JSONObject, JSONReply, build_json_reply
from perdure.settings import LIST_LIMIT, SEARCH_LIMIT
from perdure.stores import Provenance

routes = APIRouter(tags=["store"], default_response_class=JSONReply)
Limit = Annotated[int, Field(ge=1, le=1000)]
Offset = Annotated[int, Field(ge=0)]


class ItemKey(BaseModel):
    """The body of `DELETE /store/items`."""

    namespace: list[str]
    key: str


class NewItem(ItemKey):
    """The body of `PUT /store/items`."""

    value: JSONObject
    index: Literal[False] | list[str] | None = None
    ttl: float | None = Field(None, gt=0)


class ItemSearch(BaseModel):
    """The body of `POST /store/items/search`."""

    namespace_prefix: list[str] = []
    filter: JSONObject | None = None
    limit: Limit = SEARCH_LIMIT
    offset: Offset = 0
    query: str | None = None
    refresh_ttl: bool | None = None


class NamespaceSearch(BaseModel):
    """The body of `POST /store/namespaces`."""

    prefix: list[str] | None = None
    suffix: list[str] | None = None
    max_depth: int | None = Field(None, ge=1)
    limit: Limit = LIST_LIMIT
    offset: Offset = 0


@routes.put("/store/items", status_code=204)
@set_required_action("store:put")
async def put_item(call: CurrentCall, body: NewItem) -> None:
    """Store an item. An existing item gets a new version."""
    arguments = await _authorize_and_build_store_arguments(
        call, body.namespace, body.model_dump(include={"key", "value", "index"})
    )
    if arguments["value"] is None:
        raise InvalidValue(
            "the value is null; expected a JSON object; to delete the item, use DELETE /store/items"
        )
    author = call.find_author_to_record_in_team_namespace(arguments["namespace"])
    await call.store.aput(
        arguments["namespace"],
        arguments["key"],
        arguments["value"],
        arguments["index"],
        ttl=NOT_PROVIDED if body.ttl is None else body.ttl,
        provenance=None if author is None else Provenance(author=author, at=datetime.now(UTC)),
    )


@routes.get("/store/items")
@set_required_action("store:get")
async def get_item(
    call: CurrentCall,
    namespace: Annotated[list[str], Query()],
    key: str,
    refresh_ttl: bool | None = None,
) -> Response:
    """Return an item, or null if it does not exist.

    The client sends the namespace as labels separated by dots. If a label of the namespace itself
    contains a dot, the client must send one `namespace` parameter per label instead.
    """
    labels = namespace[0].split(".") if len(namespace) == 1 else namespace
    arguments = await _authorize_and_build_store_arguments(call, labels, {"key": key})
    item = await call.store.aget(arguments["namespace"], arguments["key"], refresh_ttl=refresh_ttl)
    return await build_json_reply(None if item is None else item.dict())


@routes.delete("/store/items", status_code=204)
@set_required_action("store:delete")
async def delete_item(call: CurrentCall, body: ItemKey) -> None:
    """Delete an item. Its old versions stay in the history."""
    arguments = await _authorize_and_build_store_arguments(call, body.namespace, {"key": body.key})
    await call.store.adelete(arguments["namespace"], arguments["key"])


@routes.post("/store/items/search")
@set_required_action("store:search")
async def search_items(call: CurrentCall, body: ItemSearch) -> Response:
    """Search for items under a namespace prefix that match a filter.

    With a query, the items are sorted by relevance.
    """
    field_names = {"filter", "limit", "offset", "query"}
    arguments = await _authorize_and_build_store_arguments(
        call, body.namespace_prefix, body.model_dump(include=field_names)
    )
    items = await call.list_visible_store_rows(
        call.store.asearch,
        arguments["namespace"],
        **{name: arguments[name] for name in field_names},
        refresh_ttl=body.refresh_ttl,
    )
    return await build_json_reply({"items": [item.dict() for item in items]})


@routes.post("/store/namespaces")
@set_required_action("store:list_namespaces")
async def list_namespaces(call: CurrentCall, body: NamespaceSearch) -> Response:
    """List the namespaces that have items."""
    requested = body.model_dump(exclude={"prefix", "suffix"})
    requested["suffix"] = None if body.suffix is None else tuple(body.suffix)
    arguments = await _authorize_and_build_store_arguments(call, body.prefix, requested)
    prefix = arguments.pop("namespace")
    visible = await call.list_visible_store_rows(
        call.store.alist_namespaces, prefix=prefix, **arguments
    )
    return await build_json_reply({"namespaces": visible})


async def _authorize_and_build_store_arguments(
    call: Call, namespace: list[str] | None, other_arguments: JSONObject
) -> JSONObject:
    """Check that the caller may perform a store action, and return the action's arguments.

    An authorization handler may change the arguments of a store action, so the returned arguments
    can differ from those passed to this function.

    Args:
        call: The request.
        namespace: The requested namespace, or None for all namespaces.
        other_arguments: The other arguments of the action.
    """
    return await call.authorize_action_arguments(
        {"namespace": None if namespace is None else tuple(namespace), **other_arguments}
    )
