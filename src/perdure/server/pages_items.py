"""Pages of items: the tree of namespaces, a namespace, an item with its versions, editing it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import SequenceMatcher
from typing import Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import parse_qsl

from fastapi import Depends, Form, Query
from langchain_core.runnables import RunnableConfig
from langgraph.store.base import ListNamespacesOp, MatchCondition
from starlette.requests import Request
from starlette.responses import Response

from perdure.errors import ConfigurationError, PerdureError, UnknownMemory, VersionConflict
from perdure.memory import Collection
from perdure.memory.run_config import TEAMS
from perdure.server.access import Forbidden, action
from perdure.server.call import Call, CurrentCall, build_literal_template, is_internal_namespace
from perdure.server.pages import Number, Pages, Text, Values, go_to, moment, page
from perdure.server.reply import encode_json, escape_unprintable, http_status
from perdure.server.teams import is_team_namespace
from perdure.stores import Provenance
from perdure.stores.values import parse_json_object

routes = Pages()
Namespace = tuple[str, ...]
PAGE: Final = 50
_NAMESPACES: Final = 100
_VERSIONS: Final = 20
_FIELDS: Final = ("namespace", "key", "value", "version", "created_at")
_TIMES: Final = ("valid_from", "valid_to", "expires_at", "provenance")
_ADMIN: Final = "an admin"  # the actor of what an admin changes among the memories of others
_DONE: Final = ("updated", "superseded", "unchanged", "saved")  # what a page says


class PageItem(NamedTuple):
    """The place that a request is about: a namespace, and maybe a key in it."""

    ns: Namespace
    key: str


def _asked(ns: Annotated[Namespace, Query()] = (), key: str = "", within: str = "") -> PageItem:
    """The place in a query; a form has it as `within`, percent-encoded once more."""
    given = parse_qsl(within)
    labels = ns or tuple(value for name, value in given if name == "ns")
    return PageItem(tuple(filter(None, labels)), key or dict(given).get("key", ""))


Asked = Annotated[PageItem, Depends(_asked)]
"""An endpoint's argument, which is not permitted yet."""


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


async def _one(call: CurrentCall, asked: Asked) -> PageItem:
    if not asked.key:
        raise ConfigurationError("no key is given; expected ns=…&key=…")
    found = await permitted(call, asked.ns or call.memories, key=asked.key)
    return PageItem(found["namespace"], found["key"])


async def _to_change(call: CurrentCall, asked: Asked, new_key: Text = "") -> PageItem:
    return await _one(call, PageItem(asked.ns, asked.key or new_key))


One = Annotated[PageItem, Depends(_one)]
"""The place of an item, once it is permitted."""
Changed = Annotated[PageItem, Depends(_to_change)]
"""The place of an item that may be changed."""


# -- namespaces and their items


@routes.page("/ui/store", "store:list_namespaces")
async def tree(request: Request, call: CurrentCall, asked: Asked, start: Number = 0) -> Response:
    """The namespaces right under one, with what is in each."""
    ns = asked.ns
    prefix = (await permitted(call, ns, limit=_NAMESPACES, offset=start))["namespace"]
    depth = len(ns) + 1 if prefix == ns else len(prefix)
    options: dict[str, Any] = {"max_depth": depth, "limit": _NAMESPACES + 1, "offset": start}
    found = await call.list_visible(
        call.store.alist_namespaces, prefix=prefix, hides_own=True, **options
    )
    if prefix == ns:  # in which "*" is a label, not any label
        found = [each for each in found if each[: len(ns)] == ns]
    shown = [each for each in found[:_NAMESPACES] if each != ns]
    if not (ns or start or call.identity.is_admin):
        shown = [each for each in shown if not is_team_namespace(each)] + await _find_teams(call)
    sizes = await call.store.anamespace_sizes(shown)
    first: list[Any] = [
        ListNamespacesOp((MatchCondition("prefix", each),), None, 2) for each in shown
    ]
    tops: list[Any] = await call.store.abatch(first)
    rows = [
        {"size": size, "has_items": size.namespace in below, "has_more": below != [size.namespace]}
        for size, below in zip(sizes, tops, strict=True)
    ]
    more = len(found) > _NAMESPACES
    return page(request, "store.html", ns=ns, rows=rows, own=ns in found, start=start, more=more)


async def _find_teams(call: Call) -> list[Namespace]:
    """Return the namespaces of the user's teams that hold something and may be read."""
    found = list[Namespace]()
    for team in sorted(call.identity.teams):
        with suppress(Forbidden):
            found.append(
                (await permitted(call.with_action("store:search"), (TEAMS, team)))["namespace"]
            )
    sizes = await call.store.anamespace_sizes(found) if found else []
    return [size.namespace for size in sizes if size.namespaces]


@routes.page("/ui/store/items", "store:search")
async def items(
    request: Request,
    call: CurrentCall,
    asked: Asked,
    q: str = "",
    filter: str = "",
    as_of: str = "",
    start: Number = 0,
) -> Response:
    """The items under a namespace."""
    chosen = parse_json_object(filter, "the filter") if filter.strip() else None
    about = await permitted(call, asked.ns, query=q.strip() or None, filter=chosen)
    ns, options = about["namespace"], {name: about[name] for name in ("query", "filter")}
    options |= {"limit": PAGE + 1, "offset": start, "as_of": moment(as_of), "refresh_ttl": False}
    found = await call.list_visible(call.store.asearch, ns, hides_own=True, **options)
    return page(
        request,
        "items.html",
        ns=ns,
        given={"q": q, "filter": filter, "as_of": as_of},
        start=start,
        items=[record(item) for item in found[:PAGE]],
        more=len(found) > PAGE,
        may_add=_may_change(ns),
    )


def record(item: Any) -> Values:
    """An item of the store by its fields, with the text and kind that a memory has."""
    text = item.value.get("text")
    return {
        **{name: getattr(item, name) for name in (*_FIELDS, *_TIMES)},
        "text": text if isinstance(text, str) else None,
        "kind": item.value.get("kind"),
    }


# -- an item


@routes.page("/ui/memory", "store:get")
async def item(
    request: Request,
    call: CurrentCall,
    place: One,
    as_of: str = "",
    start: Number = 0,
    done: str = "",
) -> Response:
    """An item with its versions and what changed between them."""
    said = done if done in _DONE else ""
    values = await _shown(call, place, as_of=as_of, start=start, done=said)
    return page(request, "memory.html", **values)


async def _shown(
    call: Call, place: PageItem, *, as_of: str = "", start: int = 0, **result: str
) -> Values:
    """The values of its page; `result` says what was done or is wrong, and what was typed."""
    history = await _history(call, place)
    last = shown = history[-1]
    if when := moment(as_of):
        shown = await call.store.aget(*place, as_of=when, refresh_ttl=False)
    versions = await asyncio.to_thread(_compared, history[::-1][start : start + _VERSIONS + 1])
    return {
        **place._asdict(),
        "as_of": as_of,
        "start": start,
        "item": shown and record(shown),
        "last": record(last),
        "count": len(history),
        "versions": versions[:_VERSIONS],
        "more": len(history) > start + _VERSIONS,
        "is_memory": _is_memory(call, last),
        "may_change": _may_change(place.ns),
        "to_edit": escape_unprintable(json.dumps(last.value, indent=2, ensure_ascii=False)),
        "done": "",
        "wrong": "",
        "typed": None,
        **result,
    }


async def _history(call: Call, place: PageItem) -> list[Any]:
    """The versions of an item, oldest first."""
    history: list[Any] = await call.store.ahistory(*place)
    if not history:
        raise UnknownMemory(f"there is no item {place.key!r:.80} in {place.ns!r}")
    return history


def _compared(versions: list[Any]) -> list[Values]:
    """Versions, newest first, each with what it changed; without the texts of earlier ones."""
    values = [{n: v for n, v in each.value.items() if n != "formerly"} for each in versions]
    budget = WordBudget()
    return [
        {
            **record(version),
            "changes": differences(before, value, budget) if before is not None else [],
        }
        for version, value, before in zip(versions, values, [*values, None][1:], strict=True)
    ]


def _is_memory(call: Call, item: Any) -> bool:
    is_text = isinstance(item.value.get("text"), str)
    return is_text and (
        is_team_namespace(item.namespace) or item.namespace[:1] == call.memories[:1]
    )


def _may_change(namespace: Namespace) -> bool:
    return bool(namespace) and not is_internal_namespace(namespace)


# -- changing it


@routes.post("/ui/memory")
@action("store:put")
async def edit(
    request: Request,
    call: CurrentCall,
    place: Changed,
    text: Text = "",
    how: Text = "update",
    value: Text = "",
    searched: Text = "",
    version: Annotated[Number, Form()] = 0,
) -> Response:
    """Correct the text of a memory, or supersede it; or put the value of an item, maybe a new one.

    The version is the one that was shown; of a new item it is 0.
    """
    text, by_hand = text.replace("\r\n", "\n"), _by_hand(call, place.ns)
    present = await call.store.aget(*place, refresh_ttl=False)
    try:
        if present is not None and present.version != version:
            raise VersionConflict(f"version {present.version} came meanwhile; below is your text")
        if text:
            collection, config = collection_of(call, place.ns)
            change = collection.asupersede if how == "supersede" else collection.aupdate
            options: dict[str, Any] = {"if_version": version, "provenance": by_hand}
            outcome = await change(place.key, text, config=config, **options)
            if outcome.change in ("refused", "quarantined"):
                raise ConfigurationError(str(outcome))
            return go_to("/ui/memory", **place._asdict(), done=outcome.change)
        options = {} if searched else {"index": False}
        if present is not None:  # it expires when it would have
            left = present.expires_at and present.expires_at - datetime.now(UTC)
            options["ttl"] = left and max(left.total_seconds() / 60, 0.01)
        new = parse_json_object(value, "the value")
        await call.store.aput(*place, new, if_version=version, provenance=by_hand, **options)
        return go_to("/ui/memory", **place._asdict(), done="saved")
    except PerdureError as exc:
        if present is None:
            raise
        values = await _shown(call, place, wrong=str(exc), typed=text or value)
        return page(request, "memory.html", http_status(exc), **values)


@routes.page("/ui/forget", "store:delete")
async def ask_forget(request: Request, call: CurrentCall, place: One) -> Response:
    """What would be erased with an item."""
    last = (await _history(call, place))[-1]
    preview = await call.store.aforget(place.ns, key=place.key, dry_run=True)
    about = {"last": record(last), "is_memory": _is_memory(call, last)}
    return page(request, "forget.html", **place._asdict(), preview=preview, **about)


@routes.post("/ui/forget")
@action("store:delete")
async def forget(request: Request, call: CurrentCall, place: Changed) -> Response:
    """Erase an item with its versions."""
    if _is_memory(call, (await _history(call, place))[-1]):
        collection, config = collection_of(call, place.ns)
        receipt = await collection.aforget(place.key, config=config)
    else:
        receipt = await call.store.aforget(place.ns, key=place.key)
    call.record_for_audit(hashes=receipt.hashes)
    return page(request, "forgotten.html", **place._asdict(), receipt=receipt)


def collection_of(call: Call, namespace: Namespace) -> tuple[Collection, RunnableConfig]:
    """The memories of a namespace, and the config to call its methods with."""
    template, config = build_literal_template(namespace)
    return Collection(call.store, template), config


def _by_hand(call: Call, namespace: Namespace) -> Provenance:
    """Return the provenance of a change on a page.

    A memory does not name an admin who changes it for its person. The audit log does.
    """
    person, author = call.identity.person, call.find_team_author(namespace)
    is_own = author is not None or person in namespace[1:2]
    actor = person if is_own else _ADMIN
    return Provenance(actor=actor, trust="user", at=datetime.now(UTC), author=author)


# -- what changed between two values, path by path and word by word


Kind = Literal["same", "removed", "added"]
_WORD: Final = re.compile(r"\s+|\w+|[^\w\s]")
_WORDS: Final = 2_000  # texts of more are not compared word by word
_ALL_WORDS: Final = 10_000  # of the texts of a page that are
_CHARS: Final = 2_000  # of a part that is shown
_PATHS: Final = 100  # paths that are shown


@dataclass(slots=True)
class WordBudget:
    """How many words may be compared; what changed in further ones is shown whole."""

    left: int = _ALL_WORDS


@dataclass(frozen=True, slots=True)
class Change:
    """What changed at a path of a value: texts that stayed, went and came, in order."""

    path: str
    parts: tuple[tuple[Kind, str], ...]


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], budget: WordBudget | None = None
) -> list[Change]:
    """The paths at which two values differ, at most a hundred of them.

    >>> differences({"text": "likes tea"}, {"text": "likes green tea"})[0].parts
    (('same', 'likes '), ('added', 'green '), ('same', 'tea'))
    """
    old, new, budget = dict(_leaves(before, "")), dict(_leaves(after, "")), budget or WordBudget()
    differ = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    return [Change(path, _parts(old.get(path), new.get(path), budget)) for path in differ[:_PATHS]]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Each leaf of a value, as text, by its path; a list is a leaf."""
    if isinstance(value, Mapping) and (value or not path):
        for name, part in value.items():
            yield from _leaves(part, f"{path}.{name}" if path else name)
    elif isinstance(value, str):
        yield path, value
    else:
        yield path, json.dumps(json.loads(encode_json(value)), ensure_ascii=False)


def _parts(old: str | None, new: str | None, budget: WordBudget) -> tuple[tuple[Kind, str], ...]:
    if old is None or new is None:
        return (("added", _cut(new or "")),) if old is None else (("removed", _cut(old)),)
    one, other = (
        _WORD.findall(each[: _CHARS * 10]) if budget.left > 0 else [] for each in (old, new)
    )
    budget.left -= len(one) + len(other)
    if max(len(one), len(other)) > _WORDS or budget.left <= 0:
        return ("removed", _cut(old)), ("added", _cut(new))
    parts: list[tuple[Kind, str]] = []
    for kind, a, b, c, d in SequenceMatcher(None, one, other).get_opcodes():
        if kind == "equal":
            parts.append(("same", _cut("".join(one[a:b]))))
            continue
        parts += [("removed", _cut("".join(one[a:b])))] if a < b else []
        parts += [("added", _cut("".join(other[c:d])))] if c < d else []
    return tuple(parts)


def _cut(text: str) -> str:
    return text if len(text) <= _CHARS else f"{text[:_CHARS]}… ({len(text):,} characters)"
