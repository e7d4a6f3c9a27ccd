"""Record the namespace templates used in a store, so that all of a person's data can be found.

The first time that perdure reads or writes memories in a store under a template such as `("notes",
"{user_id}")`, it records the template in that store. A template's record is stored as an item in
the namespace `("perdure", "templates")`. The record contains the template, but no user id.
Templates whose first label is in `PERSONAL_LABELS` and whose second label is `{user_id}` are not
recorded, because their namespaces can be found without a record.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final
from weakref import WeakKeyDictionary

from langgraph.store.base import BaseStore, PutOp

from perdure.effects import call_method
from perdure.errors import PerdureError
from perdure.memory.run_config import Template, Versioned
from perdure.stores import tombstones
from perdure.stores.base import Namespace, PutItem

USER_LABEL: Final = "{user_id}"
"""The label of a template that is replaced by the id of a user."""
PERSONAL_LABELS: Final = ("memories", "profiles", "instructions", "examples")
"""First labels of namespaces whose second label is the id of a user."""
_NAMESPACE: Final = (tombstones.ROOT, tombstones.TEMPLATES)
# Maximum number of recorded templates to read from a store.
_MAX_TEMPLATES: Final = 1_000
_RECORDED: WeakKeyDictionary[Any, set[tuple[bytes, Namespace]]] = WeakKeyDictionary()
"""Cache of recorded templates. The key is a database or a store.

The value contains a pair (scope prefix, template) for each template that this process has recorded
or tried to record.
"""


def is_record_needed_to_find_namespaces(template_labels: Sequence[str]) -> bool:
    """Return whether a template must be recorded so that its namespaces can be found.

    A template must be recorded if it contains `{user_id}`, unless it has the form `(label,
    "{user_id}", ...)` with a label from `PERSONAL_LABELS`.
    """
    return USER_LABEL in template_labels and not (
        template_labels[0] in PERSONAL_LABELS and tuple(template_labels[1:2]) == (USER_LABEL,)
    )


async def record_templates(store: BaseStore, templates: Sequence[Template]) -> None:
    """Record templates in a store, unless they are already recorded there.

    If a perdure store raises an error, for example because the store is read-only or the disk is
    full, the error is ignored.

    Args:
        store: The store in which the templates are used.
        templates: The templates. Templates that need no record are skipped.
    """
    for template in templates:
        labels = template.labels
        if is_record_needed_to_find_namespaces(labels):
            recorded, scope_prefix = _get_cached_recorded_templates_and_scope_prefix(store)
            if (scope_prefix, labels) not in recorded:
                with suppress(PerdureError):
                    await _record_template_if_not_yet_recorded(store, labels)
                recorded.add((scope_prefix, labels))


async def _record_template_if_not_yet_recorded(
    store: BaseStore, template_labels: Namespace
) -> None:
    """Record a template in the store, unless it is already recorded there.

    The record never expires.
    """
    key = blake2b(json.dumps(template_labels).encode(), digest_size=16).hexdigest()
    value = {"labels": [*template_labels]}
    is_perdures = isinstance(store, Versioned)
    options = {"refresh_ttl": False} if is_perdures else {}
    if await call_method(store, "get", _NAMESPACE, key, **options) is None:
        put: Any = PutOp(_NAMESPACE, key, value, index=False)
        if is_perdures:
            put = PutItem(_NAMESPACE, key, value, index=False, ttl=None)
        await call_method(store, "batch", [put])


async def read_recorded_namespace_templates(store: BaseStore) -> list[Namespace]:
    """Return the labels of the templates that are recorded in a store.

    The list also contains templates that this process could not record because of a store error.
    """
    options = {"refresh_ttl": False} if isinstance(store, Versioned) else {}
    items = await call_method(store, "search", _NAMESPACE, limit=_MAX_TEMPLATES, **options)
    recorded, scope_prefix = _get_cached_recorded_templates_and_scope_prefix(store)
    stored = [tuple(map(str, item.value.get("labels", ()))) for item in items]
    return [
        *dict.fromkeys(
            (*stored, *(labels for prefix, labels in sorted(recorded) if prefix == scope_prefix))
        )
    ]


def _get_cached_recorded_templates_and_scope_prefix(
    store: Any,
) -> tuple[set[tuple[bytes, Namespace]], bytes]:
    """Return the cache of recorded templates for a store's database, and the store's scope prefix.

    The scope prefix is the namespace prefix to which the store is restricted. If the store is not
    restricted to a prefix, the scope prefix is b"".
    """
    parts = getattr(store, "_parts", None)
    database = getattr(store, "database", None) or store
    return _RECORDED.setdefault(database, set()), getattr(parts, "root", b"")
