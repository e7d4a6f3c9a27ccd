"""Serve HTML pages to search memories, view the quarantine and erase a user's memories."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from functools import reduce
from operator import add
from typing import Annotated, Final

from fastapi import Depends, Query
from langchain_core.runnables import RunnableConfig
from starlette.requests import Request
from starlette.responses import Response

from perdure.errors import ConfigurationError
from perdure.memory import Quarantine, arecall
from perdure.memory.long_term.recall import NAMESPACE
from perdure.server.http.access import Forbidden, set_required_action
from perdure.server.http.call import Call, CurrentCall, convert_namespace_to_template_and_config
from perdure.server.pages.item_pages import (
    ITEMS_PER_PAGE,
    ItemTarget,
    RequestedItem,
    authorize_namespace_and_get_permitted_fields,
    build_collection,
    build_item_template_values,
)
from perdure.server.pages.rendering import (
    FormText,
    NonNegativeNumber,
    Pages,
    PageValues,
    parse_form_datetime,
    redirect_to,
    remove_hidden_characters,
    render_page,
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
"""The explanation that pages show for each part of a score."""
CONFIRMATION_PHRASE: Final = "forget everything"
# Maximum number of users in the list from which an admin chooses a user. If there are more users,
# the admin types the user's name instead.
_MAX_USERS: Final = 500
# The first labels of the namespaces that contain user data other than memories.
_USER_DATA_LABELS: Final = ("profiles", "instructions", "examples")


async def _permit_access_to_memory_namespace(
    call: CurrentCall, requested: RequestedItem, q: str = "", user: str | None = None
) -> ItemTarget:
    """Check that the caller may use a namespace of memories, and return the namespace.

    If a request contains neither a `user` nor a namespace, it applies to the caller's own memories,
    and their namespace is returned. Only an admin may request memories that belong to another user
    or that are stored outside the caller's own namespace.

    Raises:
        Forbidden: The caller is no admin and asks for memories of another user.
    """
    if user is not None:
        check_user("the parameter 'user'", user, "omit the parameter to see your own memories")
    namespace = (NAMESPACE[0], user) if user else requested.ns or call.memories
    if namespace != call.memories and not call.identity.is_admin:
        raise Forbidden(
            f"the user {call.identity.user!r} is not allowed to see the memories in "
            f"{namespace!r}; only an admin can see them"
        )
    request_fields = {
        name: value for name, value in (("query", q), ("key", requested.key)) if value
    }
    return ItemTarget(
        (await authorize_namespace_and_get_permitted_fields(call, namespace, **request_fields))[
            "namespace"
        ],
        requested.key,
    )


PermittedMemories = Annotated[ItemTarget, Depends(_permit_access_to_memory_namespace)]


@routes.add_page_and_json_routes("/ui/memories", "store:search")
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
    """Show the memories that an agent would recall for a query.

    If there is no query, the newest memories are shown.

    Args:
        request: The request.
        call: The permitted call.
        target: The namespace, and the key of a memory to explain.
        q: The query; empty lists the newest memories.
        kind: The kinds of memories to show; empty shows all.
        limit: The maximum number of memories that answer the query.
        tokens: The token budget of the answers; 0 means no limit.
        min_score: The lowest score of an answer, from 0 to 1.
        as_of: The moment whose memories are searched; empty searches the current memories.
        why: The key of a memory whose rank is explained.
        start: The number of memories to skip when there is no query.
    """
    ns, why, as_of_moment, kind = (
        target.ns,
        why or target.key,
        parse_form_datetime(as_of),
        tuple(filter(None, kind)),
    )
    values: PageValues = {
        "ns": ns,
        "is_own": ns == call.memories,
        "users": await _list_selectable_users(call, ns),
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
        template, config = convert_namespace_to_template_and_config(ns)
        recalled = await arecall(
            q,
            store=call.store.without_refresh(),
            config=config,
            namespace=template,
            kinds=kind or None,
            limit=limit,
            max_tokens=tokens or None,
            min_score=min_score,
            explain=True,
            as_of=as_of_moment,
        )
        values["recalled"] = {"tokens": recalled.tokens, "left_out": recalled.left_out}
        values["below"] = recalled.below_min_score
        if why:
            values["why_not"] = await call.store.awhy_not(ns, why, query=q, as_of=as_of_moment)
        return render_page(request, "memories.html", **values, found=recalled.memories)
    items = await call.store.asearch(
        ns,
        filter={"kind": {"$in": list(kind)}} if kind else None,
        as_of=as_of_moment,
        limit=ITEMS_PER_PAGE + 1,
        offset=start,
        newest_first=True,
        refresh_ttl=False,
    )
    values["more"] = len(items) > ITEMS_PER_PAGE
    return render_page(
        request,
        "memories.html",
        **values,
        found=[*map(build_item_template_values, items[:ITEMS_PER_PAGE])],
    )


async def _list_selectable_users(call: Call, ns: tuple[str, ...]) -> list[str]:
    """Return the users whose memories the caller can select on the page.

    The list is empty if the caller is not an admin, or if there is only one user.

    A user id that contains hidden characters is left out, because an HTML form would submit it
    without them.
    """
    if (
        not call.identity.is_admin
        or ns[:-1] != call.memories[:1]
        or ns[-1] != remove_hidden_characters(ns[-1])
    ):
        return []
    users, list_call = {ns[-1], call.identity.person}, call.with_action("store:list_namespaces")
    with suppress(Forbidden):
        prefix = (await authorize_namespace_and_get_permitted_fields(list_call, ns[:-1]))[
            "namespace"
        ]
        user_namespaces = await list_call.store.alist_namespaces(
            prefix=prefix, max_depth=len(prefix) + 1, limit=_MAX_USERS + 1
        )
        users |= {labels[-1] for labels in user_namespaces if len(labels) > len(prefix)}
    return (
        sorted(user for user in users if user == remove_hidden_characters(user))
        if len(users) > 1
        else []
    )


# -- quarantine


@routes.add_page_and_json_routes("/ui/quarantine", "store:search")
async def show_quarantine(
    request: Request, target: PermittedMemories, call: CurrentCall
) -> Response:
    """Show the entries in quarantine.

    Secrets are redacted in all quarantine entries except the entry that the query parameter `key`
    selects.
    """
    quarantine, config = _build_quarantine(call, target)
    entry_rows = [
        asdict(entry) if entry.key == target.key else entry.to_redacted_dict()
        for entry in reversed(await quarantine.alist(config))
    ]
    return render_page(request, "quarantine.html", ns=target.ns, key=target.key, entries=entry_rows)


@routes.post("/ui/quarantine/release")
@set_required_action("store:put")
async def release_quarantined_memory(call: CurrentCall, target: PermittedMemories) -> Response:
    """Release a quarantined candidate, storing it as a memory."""
    quarantine, config = _build_quarantine(call, target)
    outcome = await quarantine.arelease(target.key, config)
    return redirect_to("/ui/memory", ns=target.ns, key=outcome.key)


@routes.post("/ui/quarantine/discard")
@set_required_action("store:delete")
async def discard_quarantined_memory(call: CurrentCall, target: PermittedMemories) -> Response:
    """Erase a quarantined candidate."""
    quarantine, config = _build_quarantine(call, target)
    await quarantine.adiscard(target.key, config)
    return redirect_to("/ui/quarantine", ns=target.ns)


def _build_quarantine(call: Call, target: ItemTarget) -> tuple[Quarantine, RunnableConfig]:
    """Return a memory namespace's `Quarantine`, and the config to pass to `Quarantine` methods."""
    template, config = convert_namespace_to_template_and_config(target.ns)
    return Quarantine(call.store, template), config


# -- erasing all memories


@routes.add_page_and_json_routes("/ui/forget-all", "store:delete")
async def show_forget_all_form(
    request: Request, call: CurrentCall, target: PermittedMemories
) -> Response:
    """Preview what erasing all of a user's memories would delete."""
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
@set_required_action("store:delete")
async def forget_all_memories(
    request: Request, call: CurrentCall, target: PermittedMemories, typed: FormText = ""
) -> Response:
    """Erase all of a user's memories after checking the confirmation phrase."""
    if typed.strip() != CONFIRMATION_PHRASE:
        raise ConfigurationError(
            f"nothing was erased, because you typed {typed!r}; type {CONFIRMATION_PHRASE!r} to "
            "confirm"
        )
    receipts = []
    for ns in await _list_user_namespaces(call, target):
        collection, config = build_collection(call, ns)
        receipts.append(await collection.aforget_all(config=config))
    receipt = reduce(add, receipts)
    call.record_for_audit(hashes=receipt.hashes)
    return render_page(request, "forgotten.html", ns=target.ns, key=None, receipt=receipt)


async def _list_user_namespaces(call: Call, target: ItemTarget) -> list[tuple[str, ...]]:
    """Return the namespaces of a user's data, after checking that the caller may use them.

    The first returned namespace contains the user's memories, and any others contain the user's
    profiles, instructions and examples.
    """
    related_namespaces = [
        (label, *target.ns[1:]) for label in _USER_DATA_LABELS if target.ns[0] == call.memories[0]
    ]
    return [
        (await authorize_namespace_and_get_permitted_fields(call, ns))["namespace"]
        for ns in (target.ns, *related_namespaces)
    ]
