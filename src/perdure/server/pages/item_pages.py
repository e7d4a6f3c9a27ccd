"""Serve the store's web pages: the namespace tree, a namespace's items, and an item's versions."""

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
from perdure.memory.namespace_templates import TEAMS
from perdure.server.http.access import Forbidden, set_required_action
from perdure.server.http.call import (
    Call,
    CurrentCall,
    convert_namespace_to_template_and_config,
    is_internal_namespace,
)
from perdure.server.http.reply import encode_json, escape_unprintable, http_status
from perdure.server.pages.rendering import (
    FormText,
    NonNegativeNumber,
    Pages,
    PageValues,
    parse_form_datetime,
    redirect_to,
    render_page,
)
from perdure.server.teams import is_team_namespace
from perdure.stores import Provenance
from perdure.stores.base import Namespace
from perdure.stores.values import parse_json_object

routes = Pages()
ITEMS_PER_PAGE: Final = 50
_NAMESPACES_PER_PAGE: Final = 100
_VERSIONS_PER_PAGE: Final = 20
_ITEM_FIELDS: Final = (
    *("namespace", "key", "value", "version", "created_at"),
    *("valid_from", "valid_to", "expires_at", "provenance"),
)
# Actor recorded in a memory's provenance when an admin changes another person's memory.
_ADMIN_ACTOR: Final = "an admin"
# Possible results of saving an item. After an item was saved, its page shows a message that depends
# on the result, for example on whether a memory was updated or superseded.
_EDIT_RESULTS: Final = ("updated", "superseded", "unchanged", "saved")


class ItemTarget(NamedTuple):
    """The namespace and item key given in a request. The key may be empty."""

    ns: Namespace
    key: str


def _parse_item_namespace_and_key_from_query(
    ns: Annotated[Namespace, Query()] = (), key: str = "", within: str = ""
) -> ItemTarget:
    """Read the namespace and the item key from the query string of a request.

    An HTML form sends the namespace and the key in a single field, `within`. In the HTML form's
    field `within`, the namespace and the key are percent-encoded, because both can contain any
    character.
    """
    form_fields = parse_qsl(within)
    labels = ns or tuple(value for name, value in form_fields if name == "ns")
    return ItemTarget(tuple(filter(None, labels)), key or dict(form_fields).get("key", ""))


RequestedItem = Annotated[ItemTarget, Depends(_parse_item_namespace_and_key_from_query)]
"""The namespace and the key that a request names.

An endpoint with a parameter of this type must check the permission itself.
"""


async def authorize_namespace_and_get_permitted_fields(
    call: Call, namespace: Namespace, **request_fields: Any
) -> dict[str, Any]:
    """Check that the caller may use a namespace, and return the authorized request fields.

    An authorization handler may prepend a label, such as the user's id, to each namespace, as shown
    in langgraph's guide. The links on the server's HTML pages contain namespaces as they are
    stored. A stored namespace already begins with the label that the authorization handler
    prepended. For a namespace such as `("ada", "notes")`, the authorization handler may add the
    label `"ada"` a second time. If the result is `("ada", "ada", "notes")`, the handler is called
    again with `("notes",)`.

    Args:
        call: The call that is checked.
        namespace: The requested namespace.
        **request_fields: Further fields of the request, such as `key` or `query`.

    Returns:
        The permitted fields, with `namespace` as a tuple.
    """
    permitted = await call.authorize_action_arguments({"namespace": namespace, **request_fields})
    permitted_namespace = permitted["namespace"] or ()
    added_count = len(permitted_namespace) - len(namespace)
    if added_count > 0 and (
        permitted_namespace[:added_count],
        permitted_namespace[added_count:],
    ) == (namespace[:added_count], namespace):
        permitted_rest = await call.authorize_action_arguments(
            {"namespace": namespace[added_count:], **request_fields}
        )
        if permitted_rest["namespace"] == namespace:
            return permitted_rest
    return {**permitted, "namespace": permitted_namespace}


async def _permit_item(call: CurrentCall, requested: RequestedItem) -> ItemTarget:
    """Check that the caller is permitted to access an item, and return its namespace and key."""
    if not requested.key:
        raise ConfigurationError("the request does not name an item; add ns=…&key=… to the URL")
    permitted = await authorize_namespace_and_get_permitted_fields(
        call, requested.ns or call.memories, key=requested.key
    )
    return ItemTarget(permitted["namespace"], permitted["key"])


async def _permit_item_change(
    call: CurrentCall, requested: RequestedItem, new_key: FormText = ""
) -> ItemTarget:
    """Check that the caller is permitted to change an item, and return its namespace and key.

    For a new item, the key is the one that the user entered in the HTML form.
    """
    return await _permit_item(call, ItemTarget(requested.ns, requested.key or new_key))


PermittedItem = Annotated[ItemTarget, Depends(_permit_item)]
"""The namespace and key of an item that the caller may use."""
ChangeableItem = Annotated[ItemTarget, Depends(_permit_item_change)]
"""The namespace and key of an item that the caller may change."""


# -- namespaces and their items


@routes.add_page_and_json_routes("/ui/store", "store:list_namespaces")
async def show_namespaces(
    request: Request, call: CurrentCall, requested: RequestedItem, start: NonNegativeNumber = 0
) -> Response:
    """Show the child namespaces of a namespace, with the number and size of their items."""
    ns = requested.ns
    prefix = (
        await authorize_namespace_and_get_permitted_fields(
            call, ns, limit=_NAMESPACES_PER_PAGE, offset=start
        )
    )["namespace"]
    # If the authorization handler changed the requested namespace, list only the changed namespace,
    # without its children.
    visible_namespaces = await call.list_visible_store_rows(
        call.store.alist_namespaces,
        prefix=prefix,
        hides_perdure_namespaces=True,
        max_depth=len(ns) + 1 if prefix == ns else len(prefix),
        limit=_NAMESPACES_PER_PAGE + 1,
        offset=start,
    )
    if prefix == ns:
        # The store treats "*" in a prefix as a wildcard. Keep only the namespaces that start with
        # the literal prefix.
        visible_namespaces = [
            namespace for namespace in visible_namespaces if namespace[: len(ns)] == ns
        ]
    page_namespaces = [
        namespace for namespace in visible_namespaces[:_NAMESPACES_PER_PAGE] if namespace != ns
    ]
    # Add the namespaces of the user's teams to the top-level list. The user is allowed to read
    # these namespaces, but the access rules for listing namespaces can omit them.
    if not (ns or start or call.identity.is_admin):
        page_namespaces = [
            namespace for namespace in page_namespaces if not is_team_namespace(namespace)
        ] + await _list_readable_team_namespaces(call)
    sizes = await call.store.anamespace_sizes(page_namespaces)
    # For each listed namespace, request at most two namespaces that have the listed namespace as a
    # prefix. Two results are enough to find out whether the listed namespace has items and whether
    # it has child namespaces.
    operations: list[Any] = [
        ListNamespacesOp((MatchCondition("prefix", namespace),), None, 2)
        for namespace in page_namespaces
    ]
    first_namespaces: list[Any] = await call.store.abatch(operations)
    rows = [
        {
            "size": size,
            "has_items": size.namespace in found_namespaces,
            "has_more": found_namespaces != [size.namespace],
        }
        for size, found_namespaces in zip(sizes, first_namespaces, strict=True)
    ]
    return render_page(
        request,
        "store.html",
        ns=ns,
        rows=rows,
        own=ns in visible_namespaces,
        start=start,
        more=len(visible_namespaces) > _NAMESPACES_PER_PAGE,
    )


async def _list_readable_team_namespaces(call: Call) -> list[Namespace]:
    """Return the non-empty namespaces of the user's teams that the user is permitted to read."""
    permitted_namespaces = list[Namespace]()
    for team in sorted(call.identity.teams):
        with suppress(Forbidden):
            permitted_namespaces.append(
                (
                    await authorize_namespace_and_get_permitted_fields(
                        call.with_action("store:search"), (TEAMS, team)
                    )
                )["namespace"]
            )
    sizes = await call.store.anamespace_sizes(permitted_namespaces) if permitted_namespaces else []
    return [size.namespace for size in sizes if size.namespaces]


@routes.add_page_and_json_routes("/ui/store/items", "store:search")
async def show_items(
    request: Request,
    call: CurrentCall,
    requested: RequestedItem,
    q: str = "",
    filter: str = "",
    as_of: str = "",
    start: NonNegativeNumber = 0,
) -> Response:
    """Show the items whose namespaces begin with the requested namespace.

    Args:
        request: The request.
        call: The permitted call.
        requested: The namespace.
        q: Text to search for; empty lists all items.
        filter: A filter of values as a JSON object; empty applies none.
        as_of: The moment whose items are shown; empty shows the current items.
        start: The number of items to skip.
    """
    value_filter = parse_json_object(filter, "the filter") if filter.strip() else None
    permitted = await authorize_namespace_and_get_permitted_fields(
        call, requested.ns, query=q.strip() or None, filter=value_filter
    )
    ns = permitted["namespace"]
    found_items = await call.list_visible_store_rows(
        call.store.asearch,
        ns,
        hides_perdure_namespaces=True,
        query=permitted["query"],
        filter=permitted["filter"],
        limit=ITEMS_PER_PAGE + 1,
        offset=start,
        as_of=parse_form_datetime(as_of),
        refresh_ttl=False,
    )
    return render_page(
        request,
        "items.html",
        ns=ns,
        given={"q": q, "filter": filter, "as_of": as_of},
        start=start,
        items=[build_item_template_values(item) for item in found_items[:ITEMS_PER_PAGE]],
        more=len(found_items) > ITEMS_PER_PAGE,
        may_add=_may_edit_items_of_namespace(ns),
    )


def build_item_template_values(item: Any) -> PageValues:
    """Build the template data for a store item: its fields and, for a memory, its text and kind."""
    text = item.value.get("text")
    return {
        **{name: getattr(item, name) for name in _ITEM_FIELDS},
        "text": text if isinstance(text, str) else None,
        "kind": item.value.get("kind"),
    }


# -- one item


@routes.add_page_and_json_routes("/ui/memory", "store:get")
async def show_item(
    request: Request,
    call: CurrentCall,
    target: PermittedItem,
    as_of: str = "",
    start: NonNegativeNumber = 0,
    done: str = "",
) -> Response:
    """Show an item with its versions and the changes between them."""
    return render_page(
        request,
        "memory.html",
        **await _load_item_page(
            call, target, as_of=as_of, start=start, done=done if done in _EDIT_RESULTS else ""
        ),
    )


async def _load_item_page(
    call: Call, target: ItemTarget, *, as_of: str = "", start: int = 0, **page_fields: str
) -> PageValues:
    """Load the values of an item's page.

    Args:
        call: The permitted call.
        target: The namespace and key of the item.
        as_of: The moment whose version is shown; empty shows the latest.
        start: The number of versions to skip.
        **page_fields: Fields that replace defaults: `done` (the result of a change), `wrong` (an
            error message) and `typed` (the text that was entered).
    """
    history = await _load_item_versions(call, target)
    last_version = shown_version = history[-1]
    if as_of_moment := parse_form_datetime(as_of):
        shown_version = await call.store.aget(*target, as_of=as_of_moment, refresh_ttl=False)
    versions = await asyncio.to_thread(
        _build_version_rows, history[::-1][start : start + _VERSIONS_PER_PAGE + 1]
    )
    return {
        **target._asdict(),
        "as_of": as_of,
        "start": start,
        "item": shown_version and build_item_template_values(shown_version),
        "last": build_item_template_values(last_version),
        "count": len(history),
        "versions": versions[:_VERSIONS_PER_PAGE],
        "more": len(history) > start + _VERSIONS_PER_PAGE,
        "is_memory": _is_item_memory_of_user_or_team(call, last_version),
        "may_change": _may_edit_items_of_namespace(target.ns),
        "to_edit": escape_unprintable(json.dumps(last_version.value, indent=2, ensure_ascii=False)),
        "done": "",
        "wrong": "",
        "typed": None,
        **page_fields,
    }


async def _load_item_versions(call: Call, target: ItemTarget) -> list[Any]:
    """Load an item's versions, oldest first.

    Raises:
        UnknownMemory: There is no such item.
    """
    history: list[Any] = await call.store.ahistory(*target)
    if not history:
        raise UnknownMemory(
            f"there is no item {target.key!r:.80} in {target.ns!r}; the item might have been erased"
        )
    return history


def _build_version_rows(versions: list[Any]) -> list[PageValues]:
    """Build the template data for the versions of an item.

    The data for each version includes a diff against the previous version.

    Args:
        versions: The versions, newest first.

    Returns:
        One row for each version, newest first. The last row contains no diff, because no earlier
            version is given. Changes of the field `formerly` are left out, because this field
            repeats the texts of earlier versions.
    """
    values = [
        {name: part for name, part in row.value.items() if name != "formerly"} for row in versions
    ]
    budget = WordBudget()
    return [
        {
            **build_item_template_values(version),
            "changes": find_value_changes(before, value, budget) if before is not None else [],
        }
        for version, value, before in zip(versions, values, [*values, None][1:], strict=True)
    ]


def _is_item_memory_of_user_or_team(call: Call, item: Any) -> bool:
    """Return whether a store item is a memory of a user or of a team."""
    is_text = isinstance(item.value.get("text"), str)
    return is_text and (
        is_team_namespace(item.namespace) or item.namespace[:1] == call.memories[:1]
    )


def _may_edit_items_of_namespace(namespace: Namespace) -> bool:
    """Return whether users may edit the items of a namespace on the web pages under `/ui/`.

    Namespaces that hold perdure's internal data are read-only.
    """
    return bool(namespace) and not is_internal_namespace(namespace)


# -- changes of an item


@routes.post("/ui/memory")
@set_required_action("store:put")
async def edit_item(
    request: Request,
    call: CurrentCall,
    target: ChangeableItem,
    text: FormText = "",
    how: FormText = "update",
    value: FormText = "",
    searched: FormText = "",
    version: Annotated[NonNegativeNumber, Form()] = 0,
) -> Response:
    """Save the change that a user made in the HTML form of an item.

    For a memory, the user enters a new text and chooses whether it corrects the old text or
    supersedes it. For any other item, the user enters a JSON object, which replaces the item's
    value.

    Args:
        request: The request.
        call: The permitted call.
        target: The namespace and key of the item.
        text: The new text of a memory; empty for other items.
        how: "update" corrects a wrong text, "supersede" replaces a text that is no longer true.
        value: The new value of an item, as a JSON object.
        searched: Whether searches find the item; any text means yes.
        version: The version that the page showed, or 0 for a new item.
    """
    text, provenance = text.replace("\r\n", "\n"), _build_edit_provenance(call, target.ns)
    current_item = await call.store.aget(*target, refresh_ttl=False)
    try:
        if current_item is not None and current_item.version != version:
            raise VersionConflict(
                f"another change was saved as version {current_item.version} while you were "
                "editing; check your text below and save it again"
            )
        if text:
            collection, config = build_collection(call, target.ns)
            change_text = collection.asupersede if how == "supersede" else collection.aupdate
            outcome = await change_text(
                target.key, text, config=config, if_version=version, provenance=provenance
            )
            if outcome.change in ("refused", "quarantined"):
                raise ConfigurationError(str(outcome))
            return redirect_to("/ui/memory", **target._asdict(), done=outcome.change)
        options: dict[str, Any] = {} if searched else {"index": False}
        if current_item is not None:
            # Save the changed item with its remaining time to live (TTL), so that the time at which
            # the item expires does not change.
            remaining_time = current_item.expires_at and current_item.expires_at - datetime.now(UTC)
            options["ttl"] = remaining_time and max(remaining_time.total_seconds() / 60, 0.01)
        await call.store.aput(
            *target,
            parse_json_object(value, "the value"),
            if_version=version,
            provenance=provenance,
            **options,
        )
        return redirect_to("/ui/memory", **target._asdict(), done="saved")
    except PerdureError as exc:
        if current_item is None:
            raise
        return render_page(
            request,
            "memory.html",
            http_status(exc),
            **await _load_item_page(call, target, wrong=str(exc), typed=text or value),
        )


@routes.add_page_and_json_routes("/ui/forget", "store:delete")
async def show_forget_form(request: Request, call: CurrentCall, target: PermittedItem) -> Response:
    """Show a preview of the erasure of an item, with a button that erases the item."""
    last_version = (await _load_item_versions(call, target))[-1]
    return render_page(
        request,
        "forget.html",
        **target._asdict(),
        preview=await call.store.aforget(target.ns, key=target.key, dry_run=True),
        last=build_item_template_values(last_version),
        is_memory=_is_item_memory_of_user_or_team(call, last_version),
    )


@routes.post("/ui/forget")
@set_required_action("store:delete")
async def forget_item(request: Request, call: CurrentCall, target: ChangeableItem) -> Response:
    """Erase an item with all its versions."""
    if _is_item_memory_of_user_or_team(call, (await _load_item_versions(call, target))[-1]):
        collection, config = build_collection(call, target.ns)
        receipt = await collection.aforget(target.key, config=config)
    else:
        receipt = await call.store.aforget(target.ns, key=target.key)
    call.record_for_audit(hashes=receipt.hashes)
    return render_page(request, "forgotten.html", **target._asdict(), receipt=receipt)


def build_collection(call: Call, namespace: Namespace) -> tuple[Collection, RunnableConfig]:
    """Return the `Collection` for a namespace's memories, and the config to pass to its methods."""
    template, config = convert_namespace_to_template_and_config(namespace)
    return Collection(call.store, template), config


def _build_edit_provenance(call: Call, namespace: Namespace) -> Provenance:
    """Return the provenance to store with a change that was made through the web pages.

    If an admin changes another person's memory, the provenance contains "an admin" instead of the
    admin's user id. The admin's user id is recorded in the audit log.
    """
    person, author = call.identity.person, call.find_author_to_record_in_team_namespace(namespace)
    is_own_change = author is not None or person in namespace[1:2]
    return Provenance(
        actor=person if is_own_change else _ADMIN_ACTOR,
        trust="user",
        at=datetime.now(UTC),
        author=author,
    )


# -- differences between two values, path by path and word by word


PartKind = Literal["same", "removed", "added"]
# Splits a text into tokens for a word-level diff. A token is a word, a run of whitespace, or any
# other single character. The limits on the length of a diff count each token as a word.
_WORD_PATTERN: Final = re.compile(r"\s+|\w+|[^\w\s]")
# Maximum length, in words, of a text that is compared word by word. Longer texts are shown without
# a diff.
_MAX_TEXT_WORDS: Final = 2_000
# Maximum length, in characters, of a text that is compared word by word.
_MAX_TEXT_CHARS: Final = 20_000
# Maximum total number of words compared for the text diffs on one page. Once this limit is reached,
# further changed texts are shown without a diff.
_MAX_PAGE_WORDS: Final = 10_000
# Maximum number of characters shown for each removed, added or unchanged part of a text diff.
_MAX_PART_CHARS: Final = 2_000
# Maximum number of changed paths shown when two versions of a value are compared.
_MAX_PATHS: Final = 100


@dataclass(slots=True)
class WordBudget:
    """Limits the number of words that are compared for the text diffs on one page.

    Computing a diff reduces `remaining_words` by the combined word count of both texts. Once
    `remaining_words` is 0 or less, further changed texts on the page are shown without a diff.
    """

    remaining_words: int = _MAX_PAGE_WORDS


@dataclass(frozen=True, slots=True)
class Change:
    """A change at one path in a value, shown as a word-level diff.

    Attributes:
        path: The path in the value, such as `address.city`.
        parts: The parts of the old and the new text. Each part is a pair of a kind (`same`,
            `removed` or `added`) and its text.
    """

    path: str
    parts: tuple[tuple[PartKind, str], ...]


def find_value_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], word_budget: WordBudget | None = None
) -> list[Change]:
    """Compare two values path by path, and return at most `_MAX_PATHS` changes.

    Args:
        before: The old value.
        after: The new value.
        word_budget: The number of words that may be compared; None starts a new budget.

    Returns:
        One change for each changed path. The paths of the old value come first, and the new paths
            follow.

    >>> find_value_changes({"text": "likes tea"}, {"text": "likes green tea"})[0].parts
    (('same', 'likes '), ('added', 'green '), ('same', 'tea'))
    """
    old_leaves, new_leaves, word_budget = (
        dict(_iter_leaf_paths_and_texts(before, "")),
        dict(_iter_leaf_paths_and_texts(after, "")),
        word_budget or WordBudget(),
    )
    changed_paths = [
        path
        for path in {**old_leaves, **new_leaves}
        if old_leaves.get(path) != new_leaves.get(path)
    ]
    return [
        Change(path, _diff_texts_by_word(old_leaves.get(path), new_leaves.get(path), word_budget))
        for path in changed_paths[:_MAX_PATHS]
    ]


def _iter_leaf_paths_and_texts(value: Any, parent_path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and text of each leaf in a nested value. A list counts as a leaf."""
    if isinstance(value, Mapping) and (value or not parent_path):
        for name, part in value.items():
            yield from _iter_leaf_paths_and_texts(
                part, f"{parent_path}.{name}" if parent_path else name
            )
    elif isinstance(value, str):
        yield parent_path, value
    else:
        yield parent_path, json.dumps(json.loads(encode_json(value)), ensure_ascii=False)


def _diff_texts_by_word(
    old: str | None, new: str | None, budget: WordBudget
) -> tuple[tuple[PartKind, str], ...]:
    """Compare two texts word by word, and return the unchanged, removed and added parts in order.

    No diff is computed if a text is too long or the page's limit of compared words is reached. If
    no diff is computed, the whole old text is returned as one removed part, and the whole new text
    as one added part.
    """
    if old is None or new is None:
        return (
            (("added", _truncate_change_text(new or "")),)
            if old is None
            else (("removed", _truncate_change_text(old)),)
        )
    is_too_long = max(len(old), len(new)) > _MAX_TEXT_CHARS
    old_words, new_words = (
        _WORD_PATTERN.findall(text) if budget.remaining_words > 0 and not is_too_long else []
        for text in (old, new)
    )
    budget.remaining_words -= len(old_words) + len(new_words)
    is_too_long |= max(len(old_words), len(new_words)) > _MAX_TEXT_WORDS
    if is_too_long or budget.remaining_words <= 0:
        return ("removed", _truncate_change_text(old)), ("added", _truncate_change_text(new))
    parts: list[tuple[PartKind, str]] = []
    for kind, old_start, old_end, new_start, new_end in SequenceMatcher(
        None, old_words, new_words
    ).get_opcodes():
        removed, added = (
            "".join(old_words[old_start:old_end]),
            "".join(new_words[new_start:new_end]),
        )
        changes: list[tuple[PartKind, str]] = (
            [("same", removed)] if kind == "equal" else [("removed", removed), ("added", added)]
        )
        parts += [(part, _truncate_change_text(text)) for part, text in changes if text]
    return tuple(parts)


def _truncate_change_text(text: str) -> str:
    """Truncate text to `_MAX_PART_CHARS` characters, and append a note with its full length."""
    return (
        text
        if len(text) <= _MAX_PART_CHARS
        else f"{text[:_MAX_PART_CHARS]}… ({len(text):,} characters)"
    )
