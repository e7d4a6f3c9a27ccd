"""Record the namespace templates used in a store, so that all of a person's data can be found.

The first time that perdure reads or writes memories in a store under a template such as `("notes",
"{user_id}")`, it records the template in that store. A template's record is stored as an item in
the namespace `("perdure", "templates")`. The record of a template contains the template with its
placeholders, but no user id. Templates whose first label is in `PERSONAL_LABELS` and whose second
label is `{user_id}` are not recorded, because their namespaces can be found without a record.
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
from perdure.memory.namespace_templates import Template
from perdure.memory.run_config import Versioned
from perdure.stores import tombstones
from perdure.stores.base import Namespace, PutItem

_NAMESPACE: Final = (tombstones.ROOT, tombstones.TEMPLATES)
# Maximum number of recorded templates to read from a store.
_MAX_TEMPLATES: Final = 1_000
_RECORDED: WeakKeyDictionary[Any, set[tuple[bytes, Namespace]]] = WeakKeyDictionary()
"""Cache of recorded templates. The key is a database or a store.

The value contains a pair (store prefix, template) for each template that this process has recorded
or tried to record.
"""


async def record_templates(store: BaseStore, templates: Sequence[Template]) -> None:
    """Record namespace templates in a store, unless they are already recorded there.

    If a perdure store raises an error when a template is recorded, for example because the store is
    read-only or the disk is full, the error is ignored.

    Args:
        store: The store in which the templates are used.
        templates: The templates. Templates that need no record are skipped.
    """
    for template in templates:
        if template.needs_record:
            labels = template.labels
            recorded, store_prefix = _get_recorded_template_cache_and_store_prefix(store)
            if (store_prefix, labels) not in recorded:
                with suppress(PerdureError):
                    await _record_template_if_not_yet_recorded(store, labels)
                recorded.add((store_prefix, labels))


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
    """Return the labels of the namespace templates that are recorded in a store.

    The returned list includes a template even if the store raised an error when this process tried
    to record the template.
    """
    options = {"refresh_ttl": False} if isinstance(store, Versioned) else {}
    items = await call_method(store, "search", _NAMESPACE, limit=_MAX_TEMPLATES, **options)
    recorded, store_prefix = _get_recorded_template_cache_and_store_prefix(store)
    stored = [tuple(map(str, item.value.get("labels", ()))) for item in items]
    return [
        *dict.fromkeys(
            (*stored, *(labels for prefix, labels in sorted(recorded) if prefix == store_prefix))
        )
    ]


def _get_recorded_template_cache_and_store_prefix(
    store: Any,
) -> tuple[set[tuple[bytes, Namespace]], bytes]:
    """Return the templates cached for a store's database, and the store's namespace prefix.

    The store prefix is the namespace prefix to which the store is restricted. If the store is not
    restricted to a prefix, the store prefix is b"".
    """
    parts = getattr(store, "_parts", None)
    database = getattr(store, "database", None) or store
    return _RECORDED.setdefault(database, set()), getattr(parts, "root", b"")
