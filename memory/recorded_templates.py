"""Templates of namespaces that a store records, so that everything about a person can be found.

A part of perdure that reads or writes memories under a template such as `("notes", "{user_id}")`
records the template in the store when it uses it there for the first time. The record is an item
under `("perdure", "templates")` and contains no name. Templates that begin with a label of
`PERSONAL` are known without a record.
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
"""The label of a template that stands for the name of a person."""
PERSONAL_LABELS: Final = ("memories", "profiles", "instructions", "examples")
"""First labels of namespaces whose second label is the name of a person."""
_NAMESPACE: Final = (tombstones.ROOT, tombstones.TEMPLATES)
_MAX_TEMPLATES: Final = 1_000  # templates that are read from a store
_RECORDED: WeakKeyDictionary[Any, set[tuple[bytes, Namespace]]] = WeakKeyDictionary()
"""Templates that this process has recorded or found, by database, with the prefix of the scope."""


def needs_record(labels: Sequence[str]) -> bool:
    """Return whether a template names a person and is not one of those that are always known."""
    return USER_LABEL in labels and not (
        labels[0] in PERSONAL_LABELS and tuple(labels[1:2]) == (USER_LABEL,)
    )


async def record_templates(store: BaseStore, templates: Sequence[Template]) -> None:
    """Record the templates in a store, unless they are recorded there or need no record.

    A store that cannot be written, or has no room, is left as it is.
    """
    for template in templates:
        labels = template.labels
        if needs_record(labels):
            recorded, scope_prefix = _get_cache(store)
            if (scope_prefix, labels) not in recorded:
                with suppress(PerdureError):
                    await _write_record(store, labels)
                recorded.add((scope_prefix, labels))


async def _write_record(store: BaseStore, labels: Namespace) -> None:
    key = blake2b(json.dumps(labels).encode(), digest_size=16).hexdigest()
    value = {"labels": [*labels]}
    is_perdures = isinstance(store, Versioned)
    options = {"refresh_ttl": False} if is_perdures else {}
    if await call_method(store, "get", _NAMESPACE, key, **options) is None:
        put: Any = PutOp(_NAMESPACE, key, value, index=False)
        if is_perdures:
            put = PutItem(_NAMESPACE, key, value, index=False, ttl=None)
        await call_method(store, "batch", [put])


async def read_templates(store: BaseStore) -> list[Namespace]:
    """Return the labels of the templates that are recorded in a store."""
    options = {"refresh_ttl": False} if isinstance(store, Versioned) else {}
    items = await call_method(store, "search", _NAMESPACE, limit=_MAX_TEMPLATES, **options)
    recorded, scope_prefix = _get_cache(store)
    stored = [tuple(map(str, item.value.get("labels", ()))) for item in items]
    return [
        *dict.fromkeys(
            (*stored, *(labels for prefix, labels in sorted(recorded) if prefix == scope_prefix))
        )
    ]


def _get_cache(store: Any) -> tuple[set[tuple[bytes, Namespace]], bytes]:
    """Return the cache of the database of a store, and the prefix of a scoped store."""
    parts = getattr(store, "_parts", None)
    database = getattr(store, "database", None) or store
    return _RECORDED.setdefault(database, set()), getattr(parts, "root", b"")
