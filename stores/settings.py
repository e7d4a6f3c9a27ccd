"""What a file records of how it is searched: JSON in a row, which may have been damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from perdure.errors import CorruptRecord


def recorded(name: str, stored: Any, is_sound: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """A setting that is an object.

    Args:
        name: Which.
        stored: What is in its row.
        is_sound: Whether an object has what is expected of it.

    Raises:
        CorruptRecord: It is no JSON, or another object than was ever written there.
    """
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
