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
from perdure.server.pages import Number, Pages, Text, Values, go_to, moment, page, plain
from perdure.server.pages_items import PAGE, Asked, PageItem, collection_of, permitted, record
from perdure.settings import MIN_SCORE, SHOWN_LIMIT, check_user

routes = Pages()
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
_USERS: Final = 500  # in a list to choose from; of more, one is typed
_BESIDE: Final = (
    "profiles",
    "instructions",
    "examples",
)  # first labels of what else is known of a user


async def _own(call: CurrentCall, asked: Asked, q: str = "", user: str | None = None) -> PageItem:
    """The place of the user's memories, or for an admin of others: of a `user`, or any."""
    if user is not None:
        check_user("user", user, "leave it out for your own memories")
    wanted = (NAMESPACE[0], user) if user else asked.ns or call.memories
    if wanted != call.memories and not call.identity.is_admin:
        raise Forbidden(f"{call.identity.user!r} may not see the memories in {wanted!r}")
    about = {name: value for name, value in (("query", q), ("key", asked.key)) if value}
    return PageItem((await permitted(call, wanted, **about))["namespace"], asked.key)


Own = Annotated[PageItem, Depends(_own)]


@routes.page("/ui/memories", "store:search")
async def memories(
    request: Request,
    call: CurrentCall,
    of: Own,
    q: str = "",
    kind: Annotated[tuple[str, ...], Query()] = (),
    limit: Annotated[int, Query(ge=1, le=200)] = SHOWN_LIMIT,
    tokens: Number = 1_000,
    min_score: Annotated[float, Query(ge=0, le=1)] = MIN_SCORE,
    as_of: str = "",
    why: str = "",
    start: Number = 0,
) -> Response:
    """A user's memories: those that answer a query, as an agent is given them, or the newest."""
    ns, why, when, kind = of.ns, why or of.key, moment(as_of), tuple(filter(None, kind))
    values: Values = {
        "ns": ns,
        "is_own": ns == call.memories,
        "users": await _users(call, ns),
        "most_users": _USERS,
        "given": {
            **{"q": q, "kind": kind, "limit": limit, "tokens": tokens},
            **{"min_score": min_score, "as_of": as_of},
        },
        "kinds": tuple(dict.fromkeys((*KINDS, *kind))),
        "parts": PARTS,
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
        recalled = await arecall(q, **options, as_of=when)
        values["recalled"] = {"tokens": recalled.tokens, "left_out": recalled.left_out}
        values["below"] = recalled.below_min_score
        if why:
            values["why_not"] = await call.store.awhy_not(ns, why, query=q, as_of=when)
        return page(request, "memories.html", **values, found=recalled.memories)
    options = {"filter": {"kind": {"$in": list(kind)}} if kind else None, "as_of": when}
    options |= {"limit": PAGE + 1, "offset": start, "newest_first": True, "refresh_ttl": False}
    items = await call.store.asearch(ns, **options)
    values["more"] = len(items) > PAGE
    return page(request, "memories.html", **values, found=[*map(record, items[:PAGE])])


async def _users(call: Call, ns: tuple[str, ...]) -> list[str]:
    """The users whose memories an admin may choose; empty: there is no choice.

    A form would send what `plain` leaves of a name.
    """
    if not call.identity.is_admin or ns[:-1] != call.memories[:1] or ns[-1] != plain(ns[-1]):
        return []
    users, listing = {ns[-1], call.identity.person}, call.with_action("store:list_namespaces")
    with suppress(Forbidden):
        prefix = (await permitted(listing, ns[:-1]))["namespace"]
        options: dict[str, Any] = {"max_depth": len(prefix) + 1, "limit": _USERS + 1}
        named = await listing.store.alist_namespaces(prefix=prefix, **options)
        users |= {labels[-1] for labels in named if len(labels) > len(prefix)}
    return sorted(user for user in users if user == plain(user)) if len(users) > 1 else []


# -- quarantine


@routes.page("/ui/quarantine", "store:search")
async def quarantine(request: Request, of: Own, call: CurrentCall) -> Response:
    """What the gate held back; secrets are redacted, but of the entry that is asked for."""
    held, config = _quarantine(call, of)
    entries = reversed(await held.alist(config))
    shown = [
        asdict(entry) if entry.key == of.key else entry.to_redacted_dict() for entry in entries
    ]
    return page(request, "quarantine.html", ns=of.ns, key=of.key, entries=shown)


@routes.post("/ui/quarantine/release")
@action("store:put")
async def release(call: CurrentCall, of: Own) -> Response:
    """Make an entry a memory."""
    held, config = _quarantine(call, of)
    outcome = await held.arelease(of.key, config)
    return go_to("/ui/memory", ns=of.ns, key=outcome.key)


@routes.post("/ui/quarantine/discard")
@action("store:delete")
async def discard(call: CurrentCall, of: Own) -> Response:
    """Erase an entry."""
    held, config = _quarantine(call, of)
    await held.adiscard(of.key, config)
    return go_to("/ui/quarantine", ns=of.ns)


def _quarantine(call: Call, of: PageItem) -> tuple[Quarantine, RunnableConfig]:
    template, config = build_literal_template(of.ns)
    return Quarantine(call.store, template), config


# -- forgetting all


@routes.page("/ui/forget-all", "store:delete")
async def ask_forget_all(request: Request, call: CurrentCall, of: Own) -> Response:
    """What would be erased of a user."""
    found = [await call.store.aforget(ns, dry_run=True) for ns in await _all_of(call, of)]
    return page(request, "forget_all.html", ns=of.ns, preview=reduce(add, found), phrase=PHRASE)


@routes.post("/ui/forget-all")
@action("store:delete")
async def forget_all(request: Request, call: CurrentCall, of: Own, typed: Text = "") -> Response:
    """Erase all memories of a user, once the phrase was typed."""
    if typed.strip() != PHRASE:
        raise ConfigurationError(f"nothing was erased: {typed!r} was typed, expected {PHRASE!r}")
    receipts = []
    for ns in await _all_of(call, of):
        collection, config = collection_of(call, ns)
        receipts.append(await collection.aforget_all(config=config))
    receipt = reduce(add, receipts)
    call.record_for_audit(hashes=receipt.hashes)
    return page(request, "forgotten.html", ns=of.ns, key=None, receipt=receipt)


async def _all_of(call: Call, of: PageItem) -> list[tuple[str, ...]]:
    """The namespaces of what is known of a user."""
    beside = [(label, *of.ns[1:]) for label in _BESIDE if of.ns[0] == call.memories[0]]
    return [(await permitted(call, ns))["namespace"] for ns in (of.ns, *beside)]
