"""Find and erase all of a person's data in a store.

The namespaces of a person are:

- namespaces whose first label is `memories`, `profiles`, `instructions` or `examples` and whose
  second label is the person's name,
- namespaces that match a template with the label `{user_id}`, if the store has recorded the
  template or the caller names it,
- namespaces of the person's conversations under `chat_memory`,
- and the namespaces in which perdure keeps its own records about these namespaces, such as
  watermarks, tombstones and quarantined candidates.

A person's conversation can by chance have an id that equals another person's name. If `("memories",
NAME)` exists, the conversation NAME is assumed to belong to a person and is not erased. Some
namespaces contain the person's name as a label but do not belong to the person. Such a namespace is
not erased. The erasure receipt lists the namespaces that were not erased although they may concern
the person.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from langgraph.store.base import Item

from perdure.memory.long_term.recorded_templates import read_recorded_namespace_templates
from perdure.memory.long_term.records import (
    AUTHOR,
    QUARANTINE,
    RESERVED_LABEL,
    SOURCE,
    WATERMARKS,
    WITHOUT_AUTHOR,
    StoreAdapter,
    build_namespace_of_notes_about_memories,
    build_removal,
)
from perdure.memory.namespace_templates import (
    PERSONAL_LABELS,
    TEAMS,
    USER_LABEL,
    Template,
    must_record_template_to_find_its_namespaces,
)
from perdure.memory.options import check_instance
from perdure.settings import check_user
from perdure.stores.base import Namespace, PutItem, Receipt

CHAT_LABEL: Final = "chat_memory"
"""The first label of namespaces whose second label is the id of a conversation."""
_RESERVED_FIRST_LABELS: Final = (*PERSONAL_LABELS, CHAT_LABEL, RESERVED_LABEL, TEAMS)
"""First labels that perdure reserves. perdure decides to whom these namespaces belong."""
_PLACEHOLDER: Final = re.compile(r"\{\w+\}")


class PersonNamespaces(NamedTuple):
    """The namespaces that concern a person.

    Attributes:
        own: Prefixes under which everything belongs to the person, in the order of erasure.
        others: Namespaces that were found but do not belong to the person. They either contain the
            person's name as a label, or belong to one of the person's conversations whose id is the
            name of another person.
        authored_items: Namespace and key of each item that the person wrote into the memory of a
            team, or into a conversation that is not under `own`.
        owned_by_others: The namespaces among `others` that identify another person or a
            conversation. They are under `chat_memory` or match the template of a person's
            namespaces. The person's archive omits them.
        templates: The templates by which some namespaces in `own` were found, and which another
            store must record to find these namespaces there; see `select_templates_to_record`.
    """

    own: tuple[Namespace, ...]
    others: tuple[Namespace, ...]
    authored_items: tuple[tuple[Namespace, str], ...] = ()
    owned_by_others: frozenset[Namespace] = frozenset()
    templates: tuple[Namespace, ...] = ()


async def find_person_namespaces(
    adapter: StoreAdapter,
    user: str,
    templates: Iterable[Sequence[str]] = (),
    conversations: Iterable[str] | None = (),
) -> PersonNamespaces:
    """Find all namespaces that belong to a person, within the store's scope.

    Args:
        adapter: The adapter of the store that contains the item.
        user: The name of the person.
        templates: Templates in addition to the templates that the store has recorded.
        conversations: Ids of further conversations of the person. A conversation whose id is the
            person's name is always included. Unless `conversations` is None, the threads from which
            the person's memories were extracted are included, too.
    """
    check_user("the argument 'user'", user, "pass the person's user name")
    all_templates = dict.fromkeys(
        (
            *((label, USER_LABEL) for label in PERSONAL_LABELS),
            *(Template(labels).labels for labels in templates),
            *await read_recorded_namespace_templates(adapter.store),
        )
    )
    person_templates = [
        labels
        for labels in all_templates
        if USER_LABEL in labels and _is_template_specific_to_person(labels)
    ]
    conversation_ids = {user}
    if conversations is not None:
        conversation_ids |= {*conversations, *await _list_extracted_thread_ids(adapter, user)}
    owned: dict[Namespace, None] = {}
    note_prefixes, own_prefixes, others = list[Namespace](), list[Namespace](), list[Namespace]()
    for namespace in await adapter.list_namespaces_under((CHAT_LABEL,)):
        if namespace[1:2] and namespace[1] in conversation_ids:
            # The namespace contains the id of a thread. Any user can create a thread whose id is
            # the name of another user. If a user with the name `namespace[1]` has personal
            # namespaces, the namespace belongs to the user with that name, and not to the creator
            # of the thread.
            if namespace[1] != user and await _has_personal_namespace(adapter, namespace[1]):
                others.append(namespace)
            else:
                owned[namespace[:2]] = None
    for namespace in await adapter.list_namespaces_with_label(user):
        label_offset = 2 if namespace[0] == RESERVED_LABEL else 0
        prefix = _find_shortest_personal_prefix(namespace[label_offset:], person_templates, user)
        if prefix is not None:
            (note_prefixes if label_offset else own_prefixes).append(
                (*namespace[:label_offset], *prefix)
            )
        elif namespace[:2] not in owned and user in _list_possible_person_names(
            namespace[label_offset:]
        ):
            others.append(namespace)
    # Erase perdure's internal items about memories, such as tombstones and watermarks, before the
    # memories themselves. Otherwise, an interrupted erasure could leave internal items about
    # memories that no longer exist.
    own = tuple(dict.fromkeys((*owned, *note_prefixes, *own_prefixes)))
    return PersonNamespaces(
        own,
        tuple(dict.fromkeys(others)),
        await _find_items_written_by_user(adapter, user, owned),
        frozenset(
            other for other in others if _belongs_to_conversation_or_person(other, person_templates)
        ),
        tuple(select_templates_to_record(person_templates, own, user)),
    )


def select_templates_to_record(
    templates: Iterable[Namespace], namespaces: Collection[Namespace], user: str
) -> list[Namespace]:
    """Return the namespace templates to record, so that a person's namespaces can be found later.

    A template is returned if it matches at least one of the namespaces, contains the label
    `{user_id}`, and does not begin with a label that perdure reserves.

    Args:
        templates: The labels of the templates.
        namespaces: Namespaces of the person, or perdure's internal namespaces about them.
        user: The name of the person.
    """
    candidates = [_remove_labels_of_internal_notes(namespace) for namespace in namespaces]
    return [
        labels
        for labels in templates
        if must_record_template_to_find_its_namespaces(labels)
        and labels[0] not in _RESERVED_FIRST_LABELS
        and _is_template_specific_to_person(labels)
        and any(_find_shortest_personal_prefix(name, [labels], user) for name in candidates)
    ]


async def forget_person(
    adapter: StoreAdapter,
    user: str,
    *,
    templates: Iterable[Sequence[str]] = (),
    conversations: Iterable[str] | None = (),
    dry_run: bool = False,
    hand_over: bool = False,
) -> Receipt:
    """Erase all of a person's data in a store.

    In addition to what was erased, the receipt lists the namespaces that were not erased although
    they may concern the person (see `PersonNamespaces.others`). The call is idempotent.

    Args:
        adapter: The adapter of the store that contains the item.
        user: The name of the person.
        templates: See `find_person_namespaces`.
        conversations: See `find_person_namespaces`.
        dry_run: Whether to return the receipt without erasing.
        hand_over: See `forget_author`.
    """
    namespaces = await find_person_namespaces(adapter, user, templates, conversations)
    receipt = Receipt(0, 0, 0, (), (), (), datetime.now(UTC), clean=not dry_run)
    for namespace in namespaces.own:
        if adapter.versioned:
            receipt += await adapter.call("forget", namespace, dry_run=dry_run)
        else:
            receipt += await _delete_items_under_prefix(adapter, namespace, dry_run=dry_run)
    receipt += await forget_author(adapter, user, hand_over=hand_over, dry_run=dry_run)
    chats = [namespace for namespace, _ in namespaces.authored_items if namespace[0] == CHAT_LABEL]
    for namespace in dict.fromkeys(chats):
        receipt += await adapter.call(
            "forget_author", namespace, user, hand_over=False, dry_run=dry_run
        )
    return replace(receipt, others=namespaces.others)


async def forget_author(
    adapter: StoreAdapter, user: str, *, hand_over: bool = False, dry_run: bool = False
) -> Receipt:
    """Erase the memories and quarantine entries that a user wrote in team namespaces.

    In a store without versioning, the function erases the user's memories, but does not erase the
    user's quarantine entries.

    Args:
        adapter: The adapter of the store that contains the item.
        user: The name of the user.
        hand_over: Whether to keep the memories and entries without the name of the user, instead of
            erasing them.
        dry_run: Whether to return the receipt without erasing.
    """
    receipt = Receipt(0, 0, 0, (), (), (), datetime.now(UTC), clean=not dry_run)
    if adapter.versioned:
        for prefix in ((TEAMS,), build_namespace_of_notes_about_memories(QUARANTINE, (TEAMS,))):
            receipt += await adapter.call(
                "forget_author", prefix, user, hand_over=hand_over, dry_run=dry_run
            )
        return receipt
    items = await adapter.list_items_under((TEAMS,))
    authored = [item for item in items if (item.value.get(SOURCE) or {}).get(AUTHOR) == user]
    if not dry_run:
        await adapter.write(
            [_build_put_that_removes_item_or_author(item, hand_over=hand_over) for item in authored]
        )
    keys = () if hand_over else tuple((tuple(item.namespace), item.key) for item in authored)
    return replace(
        receipt, items=len(keys), keys=keys, clean=False, handed_over=len(authored) - len(keys)
    )


async def _find_items_written_by_user(
    adapter: StoreAdapter, user: str, own_conversations: Collection[Namespace]
) -> tuple[tuple[Namespace, str], ...]:
    """Return the namespace and key of each item that a user wrote to shared memory.

    Memory counts as shared if it belongs to a team, or if it belongs to another person's
    conversation. If the store does not keep versions, items that the user wrote to other people's
    conversations are not found.
    """
    teams = (await forget_author(adapter, user, dry_run=True)).keys
    if not adapter.versioned:
        return teams
    chats: Receipt = await adapter.call("forget_author", (CHAT_LABEL,), user, dry_run=True)
    return (*teams, *(place for place in chats.keys if place[0][:2] not in own_conversations))


def _build_put_that_removes_item_or_author(item: Item, *, hand_over: bool) -> PutItem:
    """Build the put operation that deletes an item or removes its author's name.

    If `hand_over` is True, the returned operation stores the item again without the name of its
    author. If `hand_over` is False, the returned operation deletes the item.
    """
    item_key = tuple(item.namespace), item.key
    if not hand_over:
        return build_removal(*item_key)
    source = {name: part for name, part in item.value[SOURCE].items() if name in WITHOUT_AUTHOR}
    return PutItem(*item_key, {**item.value, SOURCE: source})


async def _delete_items_under_prefix(
    adapter: StoreAdapter, prefix: Namespace, *, dry_run: bool
) -> Receipt:
    """Delete the items under a namespace prefix.

    This function is used for stores without versions, because they have no method `forget`.
    """
    keys = [(item.namespace, item.key) for item in await adapter.list_items_under(prefix)]
    if not dry_run:
        await adapter.write([build_removal(*namespace_and_key) for namespace_and_key in keys])
    return Receipt(len(keys), 0, 0, tuple(keys), (), (), datetime.now(UTC), clean=False)


async def _list_extracted_thread_ids(adapter: StoreAdapter, user: str) -> list[str]:
    """Return the ids of the threads from which memories of a person were extracted."""
    watermarks = await adapter.list_items_under(
        build_namespace_of_notes_about_memories(WATERMARKS, ("memories", user))
    )
    return [
        str(watermark.value["thread_id"])
        for watermark in watermarks
        if "thread_id" in watermark.value
    ]


async def _has_personal_namespace(adapter: StoreAdapter, person_name: str) -> bool:
    """Return whether the store contains a namespace that belongs to the person `person_name`."""
    return any(
        namespace[0] in PERSONAL_LABELS and namespace[1:2] == (person_name,)
        for namespace in await adapter.list_namespaces_with_label(person_name)
    )


def _list_possible_person_names(namespace: Namespace) -> tuple[str, ...]:
    """Return the labels in a namespace that could be names of people.

    The first label of a namespace such as `("memories", "alice")` is not returned, because it is a
    fixed word and not a person's name. The labels of a team's namespace never identify a person.
    """
    if namespace[:1] == (TEAMS,):
        return ()
    return (
        namespace[1:]
        if namespace[:1] and namespace[0] in (*PERSONAL_LABELS, CHAT_LABEL)
        else namespace
    )


def _belongs_to_conversation_or_person(
    namespace: Namespace, person_templates: Iterable[Sequence[str]]
) -> bool:
    """Return whether a namespace belongs to a specific conversation or person.

    A namespace belongs to a person if it matches one of the templates. Templates whose first label
    is `{user_id}` are ignored, because `{user_id}` would match any first label.
    """
    labels = _remove_labels_of_internal_notes(namespace)
    if labels[:1] == (CHAT_LABEL,):
        return True
    return any(
        len(labels) >= len(pattern)
        and pattern[0] != USER_LABEL
        and all(map(_label_matches_any_person, pattern, labels))
        for pattern in person_templates
    )


def _remove_labels_of_internal_notes(namespace: Namespace) -> Namespace:
    """Remove the first two labels from a namespace that contains perdure's internal records.

    In a namespace of internal records, the first two labels mark the records as internal. The
    remaining labels are the namespace of the memories to which the records belong.

    Any other namespace is returned unchanged.
    """
    return namespace[2:] if namespace[0] == RESERVED_LABEL else namespace


def _label_matches_any_person(template_label: str, label: str) -> bool:
    """Return whether `label` matches a template label, where `{user_id}` matches any name."""
    return template_label == USER_LABEL or _label_matches_template(template_label, label, "")


def _is_template_specific_to_person(template_labels: Sequence[str]) -> bool:
    """Return whether a template is specific enough to identify a person's namespaces.

    Two kinds of templates can identify a person's namespaces: templates with at least one fixed
    label, and templates whose labels are all `{user_id}`. For example, the template `("{team}",
    "{user_id}")` is not specific enough, because it would match every namespace whose second label
    is the person's name.
    """
    return all(label == USER_LABEL for label in template_labels) or any(
        not _PLACEHOLDER.search(label) for label in template_labels
    )


def _find_shortest_personal_prefix(
    namespace: Namespace, templates: Iterable[Sequence[str]], user: str
) -> Namespace | None:
    """Return the shortest prefix of `namespace` that matches a template, or None if there is none.

    In the templates, the label `{user_id}` matches only the name of the given user. If the first
    label of a template contains a placeholder, the template never matches namespaces that begin
    with perdure's own labels, such as `memories`.
    """
    sizes = [
        len(labels)
        for labels in templates
        if len(namespace) >= len(labels)
        and all(
            _label_matches_template(*pair, user) for pair in zip(labels, namespace, strict=False)
        )
        and (not _PLACEHOLDER.search(labels[0]) or namespace[0] not in _RESERVED_FIRST_LABELS)
    ]
    return namespace[: min(sizes)] if sizes else None


def _label_matches_template(template_label: str, label: str, user: str) -> bool:
    """Return whether `label` matches a template label in which `{user_id}` stands for `user`.

    A template's label can contain placeholders such as `{team}`. Each placeholder matches any text
    of at least one character.
    """
    if template_label == USER_LABEL:
        return label == user
    parts = _PLACEHOLDER.split(template_label)
    return re.fullmatch(".+".join(map(re.escape, parts)), label, re.DOTALL) is not None


def check_templates(namespaces: Any) -> list[tuple[str, ...]]:
    """Validate the namespace templates passed by a caller, and return their labels.

    Raises:
        ConfigurationError: The value is not a list of templates, or a template has no label that is
            exactly `{user_id}`.
    """
    expected = "a list of templates with the label '{user_id}', like [('notes', '{user_id}')]"
    templates = [
        Template(labels).labels
        for labels in check_instance("namespaces", namespaces, (list, tuple), expected)
    ]
    for labels in templates:
        check_instance(
            "namespaces", namespaces, (list, tuple) if USER_LABEL in labels else (), expected
        )
    return templates
