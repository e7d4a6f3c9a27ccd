"""Pages of items: the tree of namespaces, a namespace, an item with its versions, editing it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Form, Query
from langgraph.store.base import ListNamespacesOp, MatchCondition
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perdure.errors import ConfigurationError, InvalidFilter, PerdureError, VersionConflict
from perdure.server.access import action
from perdure.server.call import Call, Caller
from perdure.server.changes import changes
from perdure.server.pages import page, query
from perdure.server.pages_memories import (
    Asked,
    Namespace,
    Place,
    collection_of,
    moment,
    record,
    unknown,
)
from perdure.server.reply import status_of
from perdure.stores import Provenance

routes = APIRouter(include_in_schema=False)
Text = Annotated[str, Form()]
_PAGE: Final = 50
_NAMESPACES: Final = 100
_VERSIONS: Final = 20
_DONE: Final = ("updated", "superseded", "unchanged", "deleted", "saved")  # what a page says
_OWN: Final = ("perdure", "perdure.server")
"""First labels of perdure's own notes, which only perdure changes."""


@routes.get("/ui/store")
@routes.get("/ui/store.json")
@action("store:list_namespaces")
async def tree(
    request: Request, call: Caller, place: Asked, start: Annotated[int, Query(ge=0)] = 0
) -> Response:
    """The namespaces right under one, with what is in each."""
    ns = place.ns
    asked = await call.permit({"namespace": ns, "limit": _NAMESPACES, "offset": start})
    prefix = tuple(asked["namespace"] or ())
    depth = len(ns) + 1 if prefix == ns else len(prefix)
    found = await call.store.alist_namespaces(
        prefix=prefix, max_depth=depth, limit=_NAMESPACES + 1, offset=start
    )
    if prefix == ns:  # in which "*" is a label, not any label
        found = [each for each in found if each[: len(ns)] == ns]
    shown = [each for each in found[:_NAMESPACES] if each != ns]
    sizes = await call.store.anamespace_sizes(shown)
    first: list[Any] = [
        ListNamespacesOp((MatchCondition("prefix", each),), None, 2) for each in shown
    ]
    tops: list[Any] = await call.store.abatch(first)
    rows = [
        {"size": size, "has_items": size.namespace in below, "has_more": below != [size.namespace]}
        for size, below in zip(sizes, tops, strict=True)
    ]
    more, own = len(found) > _NAMESPACES, ns in found
    return page(request, "store.html", ns=ns, rows=rows, own=own, start=start, more=more)


@routes.get("/ui/store/items")
@routes.get("/ui/store/items.json")
@action("store:search")
async def items(
    request: Request,
    call: Caller,
    place: Asked,
    q: str = "",
    filter: str = "",
    as_of: str = "",
    start: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """The items under a namespace."""
    values: dict[str, Any] = {"q": q, "filter": filter, "as_of": as_of, "start": start}
    about: dict[str, Any] = {"namespace": place.ns, "query": q.strip() or None, "filter": None}
    found, wrong = [], ""
    try:
        if filter.strip():
            about["filter"] = _json_object(filter, "the filter")
        asked = await call.permit(about)
        options: dict[str, Any] = {"query": asked["query"], "filter": asked["filter"]}
        options |= {"limit": _PAGE + 1, "offset": start, "as_of": moment(as_of)}
        found = await call.store.asearch(tuple(asked["namespace"]), **options, refresh_ttl=False)
    except (ConfigurationError, InvalidFilter) as exc:
        wrong = str(exc)
    rows = [{**record(item), "score": item.score} for item in found[:_PAGE]]
    values |= {"ns": place.ns, "items": rows, "more": len(found) > _PAGE, "wrong": wrong}
    values["may_add"] = _may_change(place.ns)
    return page(request, "items.html", 422 if wrong else 200, **values)


# -- an item


@routes.get("/ui/memory")
@routes.get("/ui/memory.json")
@action("store:get")
async def item(
    request: Request,
    call: Caller,
    place: Asked,
    as_of: str = "",
    start: Annotated[int, Query(ge=0)] = 0,
    done: str = "",
) -> Response:
    """An item with its versions and what changed between them."""
    namespace, key = await _permitted(call, place)
    said = done if done in _DONE else ""
    return await _item(request, call, namespace, key, as_of=as_of, start=start, done=said)


async def _item(
    request: Request,
    call: Call,
    namespace: Namespace,
    key: str,
    *,
    as_of: str = "",
    start: int = 0,
    done: str = "",
    wrong: str = "",
    typed: str | None = None,
    status: int = 200,
) -> Response:
    when, history = moment(as_of), await call.store.ahistory(namespace, key)
    if not history:
        raise unknown(namespace, key)
    last = history[-1]
    if when is not None:
        shown = await call.store.aget(namespace, key, as_of=when, refresh_ttl=False)
    else:
        shown = last
    versions = await asyncio.to_thread(_compared, history, start)
    values: dict[str, Any] = {"ns": namespace, "key": key, "as_of": as_of, "start": start}
    values |= {"item": shown and record(shown), "last": record(last), "versions": versions}
    values |= {"is_memory": _is_memory(call, namespace, last.value), "count": len(history)}
    values |= {"may_change": _may_change(namespace), "more": len(history) > start + _VERSIONS}
    values |= {"done": done, "wrong": wrong, "typed": typed, "is_admin": call.identity.is_admin}
    return page(request, "memory.html", status, **values, to_edit=_escaped(last.value))


def _compared(history: list[Any], start: int) -> list[dict[str, Any]]:
    """A page of versions, newest first, each with what it changed."""
    end = len(history) - start
    return [
        {
            **record(history[number]),
            "changes": changes(_without_past(history[number - 1]), _without_past(history[number]))
            if number
            else [],
        }
        for number in range(end - 1, max(end - 1 - _VERSIONS, -1), -1)
    ]


def _without_past(item: Any) -> dict[str, Any]:
    """The value without the earlier texts that a memory lists: the versions are those."""
    return {name: value for name, value in item.value.items() if name != "formerly"}


# -- changing it


@routes.post("/ui/memory")
@action("store:put")
async def correct(
    request: Request,
    call: Caller,
    place: Asked,
    text: Text = "",
    how: Text = "update",
    version: Annotated[int, Form()] = 0,
) -> Response:
    """Correct a memory, or supersede it from now on."""
    (namespace, key), text = await _permitted(call, place), text.replace("\r\n", "\n")
    _check_changeable(namespace)
    collection, config = collection_of(call, namespace)
    last = await collection.aget(key, config=config)
    if last is not None and last.version != version:
        wrong = f"version {last.version} came meanwhile; look at it before you replace it"
        options: dict[str, Any] = {"wrong": wrong, "typed": text, "status": 409}
        return await _item(request, call, namespace, key, **options)
    change = collection.asupersede if how == "supersede" else collection.aupdate
    outcome = await change(key, text, provenance=_by_hand(call), config=config)
    if outcome.change in ("refused", "quarantined"):
        options = {"wrong": str(outcome), "typed": text, "status": 422}
        return await _item(request, call, namespace, key, **options)
    return _to_item(namespace, key, outcome.change)


@routes.post("/ui/item")
@action("store:put")
async def put(
    request: Request,
    call: Caller,
    place: Asked,
    value: Text,
    new_key: Text = "",
    version: Annotated[int, Form()] = 0,
    searched: Text = "",
) -> Response:
    """Add an item (version 0), or replace the version that was shown."""
    namespace, key = await _permitted(call, Place(place.ns, place.key or new_key))
    _check_changeable(namespace)
    present = await call.store.aget(namespace, key, refresh_ttl=False)
    try:
        options: dict[str, Any] = {"if_version": version, "provenance": _by_hand(call)}
        options |= _lifetime(present) if present is not None else {}
        options |= {} if searched else {"index": False}
        await call.store.aput(namespace, key, _json_object(value, "the value"), **options)
    except PerdureError as exc:
        if present is None:
            raise
        wrong = str(exc)
        if isinstance(exc, VersionConflict):
            wrong = f"version {present.version} came meanwhile; below is what you typed"
        shown: dict[str, Any] = {"wrong": wrong, "typed": value, "status": status_of(exc)}
        return await _item(request, call, namespace, key, **shown)
    return _to_item(namespace, key, "saved")


@routes.post("/ui/item/delete")
@action("store:delete")
async def delete(
    request: Request,
    call: Caller,
    place: Asked,
    version: Annotated[int, Form()] = 0,
) -> Response:
    """Delete an item; its versions stay."""
    namespace, key = await _permitted(call, place)
    _check_changeable(namespace)
    present = await call.store.aget(namespace, key, refresh_ttl=False)
    if present is not None and present.version != version:
        wrong = f"version {present.version} came meanwhile; look at it before you delete it"
        return await _item(request, call, namespace, key, wrong=wrong, status=409)
    if present is not None and _is_memory(call, namespace, present.value):
        collection, config = collection_of(call, namespace)
        await collection.adelete(key, config=config)
    else:
        await call.store.adelete(namespace, key, if_version=version)
    return _to_item(namespace, key, "deleted")


@routes.get("/ui/forget")
@routes.get("/ui/forget.json")
@action("store:delete")
async def ask_forget(request: Request, call: Caller, place: Asked) -> Response:
    """What would be erased with an item."""
    namespace, key = await _permitted(call, place)
    history = await call.store.ahistory(namespace, key)
    if not history:
        raise unknown(namespace, key)
    preview = await call.store.aforget(namespace, key=key, dry_run=True)
    values: dict[str, Any] = {
        "ns": namespace,
        "key": key,
        "preview": preview,
        "last": record(history[-1]),
    }
    is_memory = _is_memory(call, namespace, history[-1].value)
    is_admin = call.identity.is_admin
    return page(request, "forget.html", **values, is_memory=is_memory, is_admin=is_admin)


@routes.post("/ui/forget")
@action("store:delete")
async def forget(request: Request, call: Caller, place: Asked, messages: Text = "") -> Response:
    """Erase an item with its versions; an admin also the messages that it comes from."""
    namespace, key = await _permitted(call, place)
    _check_changeable(namespace)
    history = await call.store.ahistory(namespace, key)
    if not history:
        raise unknown(namespace, key)
    if _is_memory(call, namespace, history[-1].value):
        collection, config = collection_of(call, namespace)
        receipt = await collection.aforget(key, config=config)
    else:
        saver = call.saver if messages and call.identity.is_admin else None
        receipt = await call.store.aforget(namespace, key=key, checkpointer=saver)
    return page(request, "forgotten.html", ns=namespace, key=key, receipt=receipt)


async def _permitted(call: Call, place: Place) -> Place:
    if not place.key:
        raise ConfigurationError("no key is given; expected ns=…&key=…")
    asked = await call.permit({"namespace": place.ns or call.memories, "key": place.key})
    return Place(tuple(asked["namespace"]), asked["key"])


def _to_item(namespace: Namespace, key: str, done: str) -> Response:
    return RedirectResponse(query("/ui/memory", ns=namespace, key=key, done=done), 303)


def _is_memory(call: Call, namespace: Namespace, value: Mapping[str, Any]) -> bool:
    return namespace[:1] == call.memories[:1] and isinstance(value.get("text"), str)


def _may_change(namespace: Namespace) -> bool:
    return namespace[:1] not in [(label,) for label in _OWN]


def _check_changeable(namespace: Namespace) -> None:
    if not _may_change(namespace):
        raise ConfigurationError(
            f"in {namespace!r} perdure keeps its own notes, which these pages only show"
        )


def _by_hand(call: Call) -> Provenance:
    return Provenance(actor=call.identity.user, trust="user", at=datetime.now(UTC))


def _lifetime(item: Any) -> dict[str, Any]:
    """The time that is left to an item, in minutes, as `ttl`; None: it does not expire."""
    if item.expires_at is None:
        return {"ttl": None}
    return {"ttl": max((item.expires_at - datetime.now(UTC)).total_seconds() / 60, 0.01)}


def _json_object(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigurationError(f"{what} is no JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ConfigurationError(f'{what} is {text!r:.80}; expected an object, like {{"a": 1}}')
    return found


def _escaped(value: Mapping[str, Any]) -> str:
    """JSON to edit, in which characters that cannot be seen are escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)
