"""Settings of a file for search: JSON in a row, which may have been damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from perdure.errors import ConfigurationError, CorruptRecord
from perdure.storage.flow import Flow, NamedSQL
from perdure.stores.text import ANALYZER
from perdure.stores.values import WHOLE

_NAME = "words"
_KEPT = ("clear", "sealed", "keyed")


def recorded(name: str, stored: Any, is_sound: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """A setting that is an object."""
    try:
        found = json.loads(stored)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not is_sound(found):
        raise CorruptRecord(
            f"the store's setting {name!r} is {_cut(stored)}; expected what perdure wrote there: "
            "the file is damaged; restore it from a backup"
        )
    return found


def _cut(stored: Any) -> str:
    shown = repr(stored)
    return shown if len(shown) <= 80 else f"{shown[:79]}…"


def agreed_fields(
    sql: NamedSQL, given: Sequence[str] | None, kept: str, *, read_only: bool
) -> Flow[list[str]]:
    """The paths that items of a file are searched by, unless a put names others.

    Those given count, else those recorded. If words were made in another way they are dropped, and
    the next search makes them anew.
    """
    rows = yield sql("get_setting", _NAME)
    found = recorded(_NAME, rows[0][0], _is_sound) if rows else None
    if found is not None and found["kept"] != kept:
        raise ConfigurationError(
            f"this file keeps words {found['kept']!r}, not {kept!r}: open it with "
            f"text_index={found['kept']!r}"
        )
    fields = list(given or (found["fields"] if found else (WHOLE,)))
    wanted = {"analyzer": ANALYZER, "fields": fields, "kept": kept}
    if found != wanted and not read_only:
        yield sql("set_setting", _NAME, json.dumps(wanted))
        if found is not None:
            yield sql("drop_indexes")
            yield sql("bump_setting", "erasures")
    return fields


def _is_sound(found: dict[str, Any]) -> bool:
    """Whether a setting says how words are kept, and of which paths."""
    fields = found.get("fields")
    return (
        found.get("kept") in _KEPT
        and isinstance(fields, list)
        and bool(fields)
        and all(isinstance(path, str) and path for path in fields)
    )
