"""Pages of memories: search with why and why not, what is in quarantine, forgetting all."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from functools import reduce
from operator import add
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Form, Query
from langchain_core.runnables import RunnableConfig
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perdure.errors import ConfigurationError
from perdure.memory import Collection, Quarantine, arecall
from perdure.server.access import Forbidden, action
from perdure.server.call import Call, Caller, verbatim
from perdure.server.pages import page, query

routes = APIRouter(include_in_schema=False)
Namespace = tuple[str, ...]


class Place(NamedTuple):
    """The place that a request is about: a namespace, and maybe a key in it."""

    ns: Namespace
    key: str


def _place(ns: Annotated[tuple[str, ...], Query()] = (), key: str = "", within: str = "") -> Place:
    """The place in a query; a form has it as `within`, percent-encoded once more."""
    given = parse_qsl(within)
    labels = ns or tuple(value for name, value in given if name == "ns")
    return Place(tuple(filter(None, labels)), key or dict(given).get("key", ""))


Asked = Annotated[Place, Depends(_place)]
KINDS: Final = ("fact", "turn", "episode", "profile")
PARTS: Final = {
    "text": "words in common",
    "vector": "similar meaning",
    "thread": "its conversation answers",
    "neighbours": "messages around it answer",
    "actor": "the query names the speaker",
    "date": "said at the time in question",
    "recency": "recent",
    "question": "it is a short question",
}
"""What the parts of a score stand for."""
PHRASE: Final = "forget everything"
_PAGE: Final = 50
_BESIDE: Final = ("profiles", "examples")  # first labels of what else is known of a user


@routes.get("/ui/memories")
@routes.get("/ui/memories.json")
@action("store:search")
async def memories(
    request: Request,
    call: Caller,
    place: Asked,
    q: str = "",
    kind: Annotated[tuple[str, ...], Query()] = (),
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
    tokens: Annotated[int, Query(ge=0)] = 1_000,
    as_of: str = "",
    why: str = "",
    start: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """A user's memories: those that answer a query, as an agent is given them, or a list."""
    namespace, why = await _own(call, place.ns, query=q or None), why or place.key
    when, kinds = moment(as_of), tuple(filter(None, kind))
    values: dict[str, Any] = {"ns": namespace, "is_own": namespace == call.memories}
    values |= {"q": q, "kind": kinds, "limit": limit, "tokens": tokens, "as_of": as_of}
    values |= {"why": why, "start": start, "why_not": None, "recalled": None, "more": False}
    if q.strip():
        template, config = verbatim(namespace)
        options: dict[str, Any] = {"store": call.store, "config": config, "namespace": template}
        options |= {"kinds": kinds or None, "limit": limit, "max_tokens": tokens or None}
        recalled = await arecall(q, **options, as_of=when)
        counts = {"tokens": recalled.tokens, "left_out": recalled.left_out}
        values |= {"found": recalled.memories, "recalled": counts}
        if why:
            values["why_not"] = await call.store.awhy_not(namespace, why, query=q, as_of=when)
    else:
        values |= await _listed(call, namespace, kinds, when, start)
    values |= {"parts": PARTS, "kinds": tuple(dict.fromkeys((*KINDS, *kinds)))}
    return page(request, "memories.html", **values)


async def _listed(
    call: Call, namespace: Namespace, kinds: tuple[str, ...], when: datetime | None, start: int
) -> dict[str, Any]:
    """A page of memories, the newest first if it is known how many match: a store lists the oldest.

    Expired ones that were not swept are counted and not listed: of too many of them there is none.
    """
    options: dict[str, Any] = {"as_of": when, "refresh_ttl": False}
    options |= {"filter": {"kind": {"$in": list(kinds)}}} if kinds else {}
    items: list[Any] = []
    if not kinds and when is None:
        [size] = await call.store.anamespace_sizes([namespace])
        count = min(_PAGE, size.items - start)
        offset = size.items - start - count
        if count > 0:
            items = await call.store.asearch(namespace, limit=count, offset=offset, **options)
        if len(items) == max(count, 0):
            return {"found": [*map(record, items[::-1])], "more": offset > 0, "newest": True}
    items = await call.store.asearch(namespace, limit=_PAGE + 1, offset=start, **options)
    found = [*map(record, items[:_PAGE])]
    return {"found": found, "more": len(items) > _PAGE, "newest": False}


# -- quarantine


@routes.get("/ui/quarantine")
@routes.get("/ui/quarantine.json")
@action("store:search")
async def quarantine(request: Request, call: Caller, place: Asked) -> Response:
    """What the gate held back; secrets are redacted, but of the entry that is asked for."""
    namespace, key = await _own(call, place.ns), place.key
    held, config = _quarantine(call, namespace)
    entries = await held.alist(config)
    shown = [
        {n: v for n, v in asdict(e).items() if e.key == key or n not in ("text", "fields")}
        for e in reversed(entries)
    ]
    return page(request, "quarantine.html", ns=namespace, key=key, entries=shown)


@routes.post("/ui/quarantine/release")
@action("store:put")
async def release(call: Caller, place: Asked) -> Response:
    """Make an entry a memory."""
    namespace = await _own(call, place.ns, key=place.key)
    held, config = _quarantine(call, namespace)
    outcome = await held.arelease(place.key, config)
    return RedirectResponse(query("/ui/memory", ns=namespace, key=outcome.key), 303)


@routes.post("/ui/quarantine/discard")
@action("store:delete")
async def discard(call: Caller, place: Asked) -> Response:
    """Erase an entry."""
    namespace = await _own(call, place.ns, key=place.key)
    held, config = _quarantine(call, namespace)
    await held.adiscard(place.key, config)
    return RedirectResponse(query("/ui/quarantine", ns=namespace), 303)


def _quarantine(call: Call, namespace: Namespace) -> tuple[Quarantine, RunnableConfig]:
    template, config = verbatim(namespace)
    return Quarantine(call.store, template), config


# -- forgetting all


@routes.get("/ui/forget-all")
@routes.get("/ui/forget-all.json")
@action("store:delete")
async def ask_forget_all(request: Request, call: Caller, place: Asked) -> Response:
    """What would be erased of a user."""
    receipt, namespace = None, await _own(call, place.ns)
    for each in await _all_of(call, namespace):
        found = await call.store.aforget(each, dry_run=True)
        receipt = found if receipt is None else receipt + found
    return page(request, "forget_all.html", ns=namespace, preview=receipt, phrase=PHRASE)


@routes.post("/ui/forget-all")
@action("store:delete")
async def forget_all(
    request: Request, call: Caller, place: Asked, typed: Annotated[str, Form()] = ""
) -> Response:
    """Erase all memories of a user, once the phrase was typed."""
    namespace = await _own(call, place.ns)
    if typed.strip() != PHRASE:
        raise ConfigurationError(f"nothing was erased: {typed!r} was typed, expected {PHRASE!r}")
    receipts = []
    for each in await _all_of(call, namespace):
        collection, config = collection_of(call, each)
        receipts.append(await collection.aforget_all(config=config))
    receipt = reduce(add, receipts)
    call.record(hashes=receipt.hashes)
    return page(request, "forgotten.html", ns=namespace, key=None, receipt=receipt)


async def _all_of(call: Call, namespace: Namespace) -> list[Namespace]:
    """The namespaces of what is known of a user."""
    beside = [(label, *namespace[1:]) for label in _BESIDE if namespace[0] == call.memories[0]]
    return [(await permitted(call, each))["namespace"] for each in (namespace, *beside)]


# -- what pages of memories and items share


async def _own(call: Call, labels: Namespace, **about: Any) -> Namespace:
    """The namespace of the user's memories, or for an admin another one."""
    wanted = labels or call.memories
    if wanted != call.memories and not call.identity.is_admin:
        raise Forbidden(f"{call.identity.user!r} may not see the memories in {wanted!r}")
    namespace: Namespace = (await permitted(call, wanted, **about))["namespace"]
    return namespace


async def permitted(call: Call, namespace: Namespace, **about: Any) -> dict[str, Any]:
    """What is permitted of a request about a namespace.

    A handler may begin each namespace with a label, as those of langgraph's guide do. A link of a
    page has it already; then it is the namespace that the handler makes of the rest.
    """
    value = await call.permit({"namespace": namespace, **about})
    got = tuple(value["namespace"] or ())
    added = len(got) - len(namespace)
    if added > 0 and (got[:added], got[added:]) == (namespace[:added], namespace):
        again = await call.permit({"namespace": namespace[added:], **about})
        if tuple(again["namespace"]) == namespace:
            value, got = again, namespace
    return {**value, "namespace": got}


def collection_of(call: Call, namespace: Namespace) -> tuple[Collection, RunnableConfig]:
    """The memories of a namespace, and the config to call its methods with."""
    template, config = verbatim(namespace)
    return Collection(call.store, template), config


def moment(text: str) -> datetime | None:
    """A moment as a form has it, in UTC if it does not say; None: now."""
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError as exc:
        raise ConfigurationError(
            f"the moment is {text!r:.80}; expected one like 2026-01-31T12:00"
        ) from exc
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def record(item: Any) -> dict[str, Any]:
    """An item of the store by its fields, with the text and kind that a memory has."""
    names = ("namespace", "key", "value", "version", "created_at", "valid_from", "valid_to")
    fields = {name: getattr(item, name) for name in (*names, "expires_at", "provenance")}
    text = item.value.get("text")
    return {
        **fields,
        "text": text if isinstance(text, str) else None,
        "kind": item.value.get("kind"),
    }
