"""Pages of memories: search with why and why not, what is in quarantine, forgetting all."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from functools import reduce
from operator import add
from typing import Annotated, Any, Final

from fastapi import Depends, Query
from langchain_core.runnables import RunnableConfig
from starlette.requests import Request
from starlette.responses import Response

from perdure.errors import ConfigurationError
from perdure.memory import Quarantine, arecall
from perdure.memory.recall import NAMESPACE
from perdure.server.access import Forbidden, action
from perdure.server.call import Call, CurrentCall, build_literal_template
from perdure.server.pages import (
    FormText,
    NonNegativeNumber,
    Pages,
    PageValues,
    parse_form_moment,
    redirect_to,
    remove_hidden_characters,
    render_page,
)
from perdure.server.pages_items import (
    ITEMS_PER_PAGE,
    ItemTarget,
    RequestedItem,
    build_collection,
    build_item_record,
    permit_namespace,
)
from perdure.settings import MIN_SCORE, SHOWN_LIMIT, check_user

routes = Pages()
MEMORY_KINDS: Final = ("fact", "turn", "episode", "profile")
SCORE_PART_LABELS: Final = {
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
CONFIRMATION_PHRASE: Final = "forget everything"
_MAX_USERS: Final = 500  # in a list to choose from; of more, one is typed
_USER_DATA_LABELS: Final = (
    "profiles",
    "instructions",
    "examples",
)  # first labels of what else is known of a user


async def _permit_memories(
    call: CurrentCall, requested: RequestedItem, q: str = "", user: str | None = None
) -> ItemTarget:
    """The place of the user's memories, or for an admin of others: of a `user`, or any."""
    if user is not None:
        check_user("user", user, "leave it out for your own memories")
    namespace = (NAMESPACE[0], user) if user else requested.ns or call.memories
    if namespace != call.memories and not call.identity.is_admin:
        raise Forbidden(f"{call.identity.user!r} may not see the memories in {namespace!r}")
    request_fields = {
        name: value for name, value in (("query", q), ("key", requested.key)) if value
    }
    return ItemTarget(
        (await permit_namespace(call, namespace, **request_fields))["namespace"], requested.key
    )


PermittedMemories = Annotated[ItemTarget, Depends(_permit_memories)]


@routes.page("/ui/memories", "store:search")
async def show_memories(
    request: Request,
    call: CurrentCall,
    target: PermittedMemories,
    q: str = "",
    kind: Annotated[tuple[str, ...], Query()] = (),
    limit: Annotated[int, Query(ge=1, le=200)] = SHOWN_LIMIT,
    tokens: NonNegativeNumber = 1_000,
    min_score: Annotated[float, Query(ge=0, le=1)] = MIN_SCORE,
    as_of: str = "",
    why: str = "",
    start: NonNegativeNumber = 0,
) -> Response:
    """A user's memories: those that answer a query, as an agent is given them, or the newest."""
    ns, why, as_of_moment, kind = (
        target.ns,
        why or target.key,
        parse_form_moment(as_of),
        tuple(filter(None, kind)),
    )
    values: PageValues = {
        "ns": ns,
        "is_own": ns == call.memories,
        "users": await _list_users(call, ns),
        "most_users": _MAX_USERS,
        "given": {
            **{"q": q, "kind": kind, "limit": limit, "tokens": tokens},
            **{"min_score": min_score, "as_of": as_of},
        },
        "kinds": tuple(dict.fromkeys((*MEMORY_KINDS, *kind))),
        "parts": SCORE_PART_LABELS,
        "why": why,
        "why_not": None,
        "recalled": None,
        "below": [],
        "start": start,
        "more": False,
    }
    if q.strip():
        template, config = build_literal_template(ns)
        store = call.store.without_refresh()
        options: dict[str, Any] = {"store": store, "config": config, "namespace": template}
        options |= {"kinds": kind or None, "limit": limit, "max_tokens": tokens or None}
        options |= {"min_score": min_score, "explain": True}
        recalled = await arecall(q, **options, as_of=as_of_moment)
        values["recalled"] = {"tokens": recalled.tokens, "left_out": recalled.left_out}
        values["below"] = recalled.below_min_score
        if why:
            values["why_not"] = await call.store.awhy_not(ns, why, query=q, as_of=as_of_moment)
        return render_page(request, "memories.html", **values, found=recalled.memories)
    options = {"filter": {"kind": {"$in": list(kind)}} if kind else None, "as_of": as_of_moment}
    options |= {
        "limit": ITEMS_PER_PAGE + 1,
        "offset": start,
        "newest_first": True,
        "refresh_ttl": False,
    }
    items = await call.store.asearch(ns, **options)
    values["more"] = len(items) > ITEMS_PER_PAGE
    return render_page(
        request, "memories.html", **values, found=[*map(build_item_record, items[:ITEMS_PER_PAGE])]
    )


async def _list_users(call: Call, ns: tuple[str, ...]) -> list[str]:
    """The users whose memories an admin may choose; empty: there is no choice.

    A form would send what `plain` leaves of a name.
    """
    if (
        not call.identity.is_admin
        or ns[:-1] != call.memories[:1]
        or ns[-1] != remove_hidden_characters(ns[-1])
    ):
        return []
    users, list_call = {ns[-1], call.identity.person}, call.with_action("store:list_namespaces")
    with suppress(Forbidden):
        prefix = (await permit_namespace(list_call, ns[:-1]))["namespace"]
        options: dict[str, Any] = {"max_depth": len(prefix) + 1, "limit": _MAX_USERS + 1}
        user_namespaces = await list_call.store.alist_namespaces(prefix=prefix, **options)
        users |= {labels[-1] for labels in user_namespaces if len(labels) > len(prefix)}
    return (
        sorted(user for user in users if user == remove_hidden_characters(user))
        if len(users) > 1
        else []
    )


# -- quarantine


@routes.page("/ui/quarantine", "store:search")
async def show_quarantine(
    request: Request, target: PermittedMemories, call: CurrentCall
) -> Response:
    """What the gate held back; secrets are redacted, but of the entry that is asked for."""
    quarantine, config = _build_quarantine(call, target)
    entries = reversed(await quarantine.alist(config))
    entry_rows = [
        asdict(entry) if entry.key == target.key else entry.to_redacted_dict() for entry in entries
    ]
    return render_page(request, "quarantine.html", ns=target.ns, key=target.key, entries=entry_rows)


@routes.post("/ui/quarantine/release")
@action("store:put")
async def release_entry(call: CurrentCall, target: PermittedMemories) -> Response:
    """Make an entry a memory."""
    quarantine, config = _build_quarantine(call, target)
    outcome = await quarantine.arelease(target.key, config)
    return redirect_to("/ui/memory", ns=target.ns, key=outcome.key)


@routes.post("/ui/quarantine/discard")
@action("store:delete")
async def discard_entry(call: CurrentCall, target: PermittedMemories) -> Response:
    """Erase an entry."""
    quarantine, config = _build_quarantine(call, target)
    await quarantine.adiscard(target.key, config)
    return redirect_to("/ui/quarantine", ns=target.ns)


def _build_quarantine(call: Call, target: ItemTarget) -> tuple[Quarantine, RunnableConfig]:
    template, config = build_literal_template(target.ns)
    return Quarantine(call.store, template), config


# -- forgetting all


@routes.page("/ui/forget-all", "store:delete")
async def show_forget_all_form(
    request: Request, call: CurrentCall, target: PermittedMemories
) -> Response:
    """What would be erased of a user."""
    previews = [
        await call.store.aforget(ns, dry_run=True)
        for ns in await _list_user_namespaces(call, target)
    ]
    return render_page(
        request,
        "forget_all.html",
        ns=target.ns,
        preview=reduce(add, previews),
        phrase=CONFIRMATION_PHRASE,
    )


@routes.post("/ui/forget-all")
@action("store:delete")
async def forget_all_memories(
    request: Request, call: CurrentCall, target: PermittedMemories, typed: FormText = ""
) -> Response:
    """Erase all memories of a user, once the phrase was typed."""
    if typed.strip() != CONFIRMATION_PHRASE:
        raise ConfigurationError(
            f"nothing was erased: {typed!r} was typed, expected {CONFIRMATION_PHRASE!r}"
        )
    receipts = []
    for ns in await _list_user_namespaces(call, target):
        collection, config = build_collection(call, ns)
        receipts.append(await collection.aforget_all(config=config))
    receipt = reduce(add, receipts)
    call.record_for_audit(hashes=receipt.hashes)
    return render_page(request, "forgotten.html", ns=target.ns, key=None, receipt=receipt)


async def _list_user_namespaces(call: Call, target: ItemTarget) -> list[tuple[str, ...]]:
    """The namespaces of what is known of a user."""
    related_namespaces = [
        (label, *target.ns[1:]) for label in _USER_DATA_LABELS if target.ns[0] == call.memories[0]
    ]
    return [
        (await permit_namespace(call, ns))["namespace"] for ns in (target.ns, *related_namespaces)
    ]
