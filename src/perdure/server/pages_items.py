"""Pages of items: the tree of namespaces, a namespace, an item with its versions, editing it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from fastapi import APIRouter, Form, Query
from langgraph.store.base import ListNamespacesOp, MatchCondition
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perdure.errors import (
    ConfigurationError,
    InvalidFilter,
    PerdureError,
    UnknownMemory,
    VersionConflict,
)
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
    permitted,
    record,
)
from perdure.server.reply import status_of
from perdure.stores import Provenance

routes = APIRouter(include_in_schema=False)
Text = Annotated[str, Form()]
Number = Annotated[int, Form()]
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
    prefix = (await permitted(call, ns, limit=_NAMESPACES, offset=start))["namespace"]
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
    about: dict[str, Any] = {"query": q.strip() or None, "filter": None}
    ns, found, wrong = place.ns, [], ""
    try:
        if filter.strip():
            about["filter"] = _json_object(filter, "the filter")
        asked = await permitted(call, place.ns, **about)
        ns = asked["namespace"]
        options: dict[str, Any] = {"query": asked["query"], "filter": asked["filter"]}
        options |= {"limit": _PAGE + 1, "offset": start, "as_of": moment(as_of)}
        found = await call.store.asearch(ns, **options, refresh_ttl=False)
    except (ConfigurationError, InvalidFilter) as exc:
        wrong = str(exc)
    rows = [record(item) for item in found[:_PAGE]]
    values |= {"ns": ns, "items": rows, "more": len(found) > _PAGE, "wrong": wrong}
    values["may_add"] = _may_change(ns)
    made = page(request, "items.html", **values)
    made.status_code = 422 if wrong else 200
    return made


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
    place, said = await _permitted(call, place), done if done in _DONE else ""
    return await _item(request, call, place, as_of=as_of, start=start, done=said)


async def _item(
    request: Request,
    call: Call,
    place: Place,
    status: int = 200,
    *,
    as_of: str = "",
    start: int = 0,
    **told: Any,
) -> Response:
    """The page of an item; `told` says what was done or is wrong, and what was typed."""
    history = await _history(call, place)
    last = shown = history[-1]
    if when := moment(as_of):
        shown = await call.store.aget(*place, as_of=when, refresh_ttl=False)
    versions = await asyncio.to_thread(_compared, history[::-1][start : start + _VERSIONS + 1])
    values: dict[str, Any] = {**place._asdict(), "as_of": as_of, "start": start}
    values |= {"item": shown and record(shown), "last": record(last), "count": len(history)}
    values |= {"versions": versions[:_VERSIONS], "more": len(history) > start + _VERSIONS}
    values |= {"is_memory": _is_memory(call, last), "may_change": _may_change(place.ns)}
    values |= {"to_edit": _escaped(last.value), "done": "", "wrong": "", "typed": None, **told}
    made = page(request, "memory.html", **values)
    made.status_code = status
    return made


def _compared(versions: list[Any]) -> list[dict[str, Any]]:
    """Versions, newest first, each with what it changed; without the texts of earlier ones."""
    values = [{n: v for n, v in each.value.items() if n != "formerly"} for each in versions]
    return [
        {**record(version), "changes": [] if before is None else changes(before, value)}
        for version, value, before in zip(versions, values, [*values[1:], None], strict=True)
    ]


# -- changing it


@routes.post("/ui/memory")
@action("store:put")
async def correct(
    request: Request,
    call: Caller,
    place: Asked,
    text: Text = "",
    how: Text = "update",
    version: Number = 0,
) -> Response:
    """Correct a memory, or supersede it from now on."""
    place, text = await _to_change(call, place), text.replace("\r\n", "\n")
    collection, config = collection_of(call, place.ns)
    last = await collection.aget(place.key, config=config)
    if last is not None and last.version != version:
        wrong = f"version {last.version} came meanwhile; look at it before you replace it"
        return await _item(request, call, place, 409, wrong=wrong, typed=text)
    change = collection.asupersede if how == "supersede" else collection.aupdate
    options: dict[str, Any] = {"if_version": version, "provenance": _by_hand(call)}
    outcome = await change(place.key, text, config=config, **options)
    if outcome.change in ("refused", "quarantined"):
        return await _item(request, call, place, 422, wrong=str(outcome), typed=text)
    return _to_item(place, outcome.change)


@routes.post("/ui/item")
@action("store:put")
async def put(
    request: Request,
    call: Caller,
    place: Asked,
    value: Text,
    new_key: Text = "",
    version: Number = 0,
    searched: Text = "",
) -> Response:
    """Add an item (version 0), or replace the version that was shown."""
    place = await _to_change(call, Place(place.ns, place.key or new_key))
    present = await call.store.aget(*place, refresh_ttl=False)
    options: dict[str, Any] = {"if_version": version, "provenance": _by_hand(call)}
    options |= {} if searched else {"index": False}
    options |= {} if present is None else {"ttl": _minutes_left(present)}
    try:
        await call.store.aput(*place, _json_object(value, "the value"), **options)
    except PerdureError as exc:
        if present is None:
            raise
        wrong, status = str(exc), status_of(exc)
        if isinstance(exc, VersionConflict):
            wrong = f"version {present.version} came meanwhile; below is what you typed"
        return await _item(request, call, place, status, wrong=wrong, typed=value)
    return _to_item(place, "saved")


@routes.post("/ui/item/delete")
@action("store:delete")
async def delete(request: Request, call: Caller, place: Asked, version: Number = 0) -> Response:
    """Delete an item; its versions stay."""
    place = await _to_change(call, place)
    present = await call.store.aget(*place, refresh_ttl=False)
    if present is not None and present.version != version:
        wrong = f"version {present.version} came meanwhile; look at it before you delete it"
        return await _item(request, call, place, 409, wrong=wrong)
    if present is not None and _is_memory(call, present):
        collection, config = collection_of(call, place.ns)
        await collection.adelete(place.key, config=config)
    else:
        await call.store.adelete(*place, if_version=version)
    return _to_item(place, "deleted")


@routes.get("/ui/forget")
@routes.get("/ui/forget.json")
@action("store:delete")
async def ask_forget(request: Request, call: Caller, place: Asked) -> Response:
    """What would be erased with an item."""
    place = await _permitted(call, place)
    last = (await _history(call, place))[-1]
    preview = await call.store.aforget(place.ns, key=place.key, dry_run=True)
    values: dict[str, Any] = {**place._asdict(), "preview": preview, "last": record(last)}
    values |= {"is_memory": _is_memory(call, last), "is_admin": call.identity.is_admin}
    return page(request, "forget.html", **values)


@routes.post("/ui/forget")
@action("store:delete")
async def forget(request: Request, call: Caller, place: Asked, messages: Text = "") -> Response:
    """Erase an item with its versions; an admin also the messages that it comes from."""
    place = await _to_change(call, place)
    if _is_memory(call, (await _history(call, place))[-1]):
        collection, config = collection_of(call, place.ns)
        receipt = await collection.aforget(place.key, config=config)
    else:
        saver = call.saver if messages and call.identity.is_admin else None
        receipt = await call.store.aforget(place.ns, key=place.key, checkpointer=saver)
    call.record(hashes=receipt.hashes)
    return page(request, "forgotten.html", **place._asdict(), receipt=receipt)


async def _permitted(call: Call, place: Place) -> Place:
    if not place.key:
        raise ConfigurationError("no key is given; expected ns=…&key=…")
    asked = await permitted(call, place.ns or call.memories, key=place.key)
    return Place(asked["namespace"], asked["key"])


async def _to_change(call: Call, place: Place) -> Place:
    place = await _permitted(call, place)
    if not _may_change(place.ns):
        raise ConfigurationError(
            f"in {place.ns!r} perdure keeps its own notes, which these pages only show"
        )
    return place


async def _history(call: Call, place: Place) -> list[Any]:
    """The versions of an item, oldest first."""
    history: list[Any] = await call.store.ahistory(*place)
    if not history:
        raise UnknownMemory(f"there is no item {place.key!r:.80} in {place.ns!r}")
    return history


def _to_item(place: Place, done: str) -> Response:
    return RedirectResponse(query("/ui/memory", **place._asdict(), done=done), 303)


def _is_memory(call: Call, item: Any) -> bool:
    is_text = isinstance(item.value.get("text"), str)
    return is_text and bool(item.namespace[:1] == call.memories[:1])


def _may_change(namespace: Namespace) -> bool:
    return bool(namespace) and namespace[0] not in _OWN


def _by_hand(call: Call) -> Provenance:
    return Provenance(actor=call.identity.user, trust="user", at=datetime.now(UTC))


def _minutes_left(item: Any) -> float | None:
    """The time that is left to an item; None: it does not expire."""
    if item.expires_at is None:
        return None
    left: timedelta = item.expires_at - datetime.now(UTC)
    return max(left.total_seconds() / 60, 0.01)


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
