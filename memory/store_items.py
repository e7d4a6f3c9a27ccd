"""Items of any store as memories, and what becomes of them in one that is not perdure's.

Such a store keeps provenance in a field of the value.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from langgraph.store.base import Item, PutOp

from perdure.memory.instructions import TEXT
from perdure.memory.quoting import quoted
from perdure.memory.records import Memory, Previous
from perdure.stores.base import Provenance, PutItem

SOURCE: Final = "provenance"
FORMERLY: Final = "formerly"


def memory_of(item: Item) -> Memory:
    """The memory that an item of any store is."""
    value = dict(item.value)
    source = getattr(item, "provenance", None) or _provenance(value.pop(SOURCE, None))
    text, kind = value.get("text"), value.get("kind", "")
    if not isinstance(text, str) and isinstance(value.get(TEXT), str):  # see `Instructions`
        text, kind = value[TEXT], "instructions"
    return Memory(
        tuple(item.namespace),
        item.key,
        text if isinstance(text, str) else quoted(value),
        str(kind),
        value,
        source,
        getattr(item, "version", None),
        getattr(item, "valid_from", item.updated_at),
        getattr(item, "valid_to", None),
        tuple(_former(value.get(FORMERLY))),
        getattr(item, "score", None),
        getattr(item, "parts", None),
    )


def plain(put: PutItem) -> PutOp:
    """The operation that any store knows."""
    value = put.value
    if value is not None and put.provenance is not None:
        value = {**value, SOURCE: _noted(put.provenance)}
    return PutOp(put.namespace, put.key, None if value is None else dict(value), put.index)


def _noted(source: Provenance) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(source).items() if value not in (None, ())}
    if source.message_ids:
        fields["message_ids"] = list(source.message_ids)
    if source.at is not None:
        fields["at"] = source.at.isoformat()
    return fields


def _provenance(fields: Any) -> Provenance | None:
    if not fields:
        return None
    known = dict(fields)
    known["message_ids"] = tuple(known.get("message_ids", ()))
    if "at" in known:
        known["at"] = datetime.fromisoformat(known["at"])
    return Provenance(**known)


def _former(entries: Any) -> list[Previous]:
    return [
        Previous(each["text"], datetime.fromisoformat(each["until"]), each["change"])
        for each in entries or ()
    ]
