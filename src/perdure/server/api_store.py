"""The store by REST: the paths and shapes of langgraph's server, for its SDK's `StoreClient`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from langgraph.store.base import NOT_PROVIDED
from pydantic import BaseModel, Field
from starlette.responses import Response

from perdure.errors import InvalidValue
from perdure.server.access import action
from perdure.server.call import Call, CurrentCall
from perdure.server.reply import JSONObject, build_json_reply
from perdure.settings import LIST_LIMIT, SEARCH_LIMIT
from perdure.stores import Provenance

routes = APIRouter(tags=["store"])
Limit = Annotated[int, Field(ge=1, le=1000)]
Offset = Annotated[int, Field(ge=0)]


class ItemNamed(BaseModel):
    """The body of `DELETE /store/items`."""

    namespace: list[str]
    key: str


class NewItem(ItemNamed):
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


class Namespaces(BaseModel):
    """The body of `POST /store/namespaces`."""

    prefix: list[str] | None = None
    suffix: list[str] | None = None
    max_depth: int | None = Field(None, ge=1)
    limit: Limit = LIST_LIMIT
    offset: Offset = 0


@routes.put("/store/items", status_code=204)
@action("store:put")
async def put(call: CurrentCall, body: NewItem) -> None:
    """Store an item, or the next version of one."""
    names = {"key", "value", "index"}
    given = await _permitted(call, body.namespace, body.model_dump(include=names))
    if given["value"] is None:
        raise InvalidValue("the value is None; expected an object: to remove an item, delete it")
    ttl = NOT_PROVIDED if body.ttl is None else body.ttl
    place = given["namespace"], given["key"]
    author = call.find_team_author(given["namespace"])
    source = None if author is None else Provenance(author=author, at=datetime.now(UTC))
    await call.store.aput(*place, given["value"], given["index"], ttl=ttl, provenance=source)


@routes.get("/store/items")
@action("store:get")
async def get(
    call: CurrentCall,
    namespace: Annotated[list[str], Query()],
    key: str,
    refresh_ttl: bool | None = None,
) -> Response:
    """An item; null: there is none.

    Labels of the namespace are joined by dots, or given one by one if they have dots themselves.
    """
    labels = namespace[0].split(".") if len(namespace) == 1 else namespace
    given = await _permitted(call, labels, {"key": key})
    item = await call.store.aget(given["namespace"], given["key"], refresh_ttl=refresh_ttl)
    return await build_json_reply(None if item is None else item.dict())


@routes.delete("/store/items", status_code=204)
@action("store:delete")
async def delete(call: CurrentCall, body: ItemNamed) -> None:
    """Delete an item; its versions stay in its history."""
    given = await _permitted(call, body.namespace, {"key": body.key})
    await call.store.adelete(given["namespace"], given["key"])


@routes.post("/store/items/search")
@action("store:search")
async def search(call: CurrentCall, body: ItemSearch) -> Response:
    """Items under a prefix that match a filter; with a query, the best matches first."""
    names = {"filter", "limit", "offset", "query"}
    given = await _permitted(call, body.namespace_prefix, body.model_dump(include=names))
    options = {name: given[name] for name in names}
    options["refresh_ttl"] = body.refresh_ttl
    found = await call.list_visible(call.store.asearch, given["namespace"], **options)
    return await build_json_reply({"items": [item.dict() for item in found]})


@routes.post("/store/namespaces")
@action("store:list_namespaces")
async def namespaces(call: CurrentCall, body: Namespaces) -> Response:
    """Namespaces that hold something."""
    asked = body.model_dump(exclude={"prefix", "suffix"})
    asked["suffix"] = None if body.suffix is None else tuple(body.suffix)
    given = await _permitted(call, body.prefix, asked)
    prefix = given.pop("namespace")
    found = await call.list_visible(call.store.alist_namespaces, prefix=prefix, **given)
    return await build_json_reply({"namespaces": found})


async def _permitted(call: Call, namespace: list[str] | None, asked: JSONObject) -> JSONObject:
    """The arguments of a call, as access left them."""
    labels = None if namespace is None else tuple(namespace)
    given = await call.permit({"namespace": labels, **asked})
    if given["namespace"] is not None:
        given["namespace"] = tuple(given["namespace"])
    return given
