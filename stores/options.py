"""The options of a store, checked before any file is opened."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, Literal, get_args

from perdure.errors import ConfigurationError
from perdure.stores.vectors import Kind

TextIndex = Literal["sealed", "keyed"]
_ALIKE: Final = 0.75  # of 1; below it, `$regex` is taken for `$gte`
_MOST_S: Final = 2_000_000  # seconds: SQLite counts milliseconds in 32 bits


def check_options(**given: Any) -> None:
    """Refuse what an option cannot be."""
    for name, value in given.items():
        is_right, expected = _OPTIONS[name]
        if not is_right(value):
            shown = f"of type {type(value).__name__}" if name == "key" else repr(value)
            raise ConfigurationError(f"{name} is {shown}; expected {expected}")
    ttl = given.get("ttl") or {}
    check_names("ttl", ttl, _TTL)
    for name, value in ttl.items():
        is_right, expected = _TTL[name]
        if not is_right(value):
            raise ConfigurationError(f"ttl[{name!r}] is {value!r}; expected {expected}")


def check_names(option: str, given: Iterable[Any], known: Iterable[str]) -> None:
    """Refuse a setting that nothing reads."""
    for name in given:
        if name not in known:
            raise ConfigurationError(
                f"{option} has the unknown setting {name!r}; {meant(name, known)}"
            )


def check_number(
    name: str,
    value: Any,
    expected: str,
    *,
    least: float = 0,
    most: float = math.inf,
    whole: bool = False,
) -> None:
    """Refuse what is no number from `least` on and below `most`."""
    is_number = _is_whole(value, -math.inf) if whole else _is_number(value)
    if not is_number or not least <= value < most or value == -math.inf:
        raise ConfigurationError(f"{name} is {value!r:.80}; expected {expected}")


def meant(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name.

    >>> meant("actr", ("actor", "at")), meant("$y", ("$eq", "$ne"))
    ("did you mean 'actor'? There are actor, at", 'there are $eq, $ne')
    """
    names = tuple(known)
    listed = f"here are {', '.join(names)}"
    close = get_close_matches(str(name), names, 1, _ALIKE)
    return f"did you mean {close[0]!r}? T{listed}" if close else f"t{listed}"


def _is_whole(value: Any, least: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_minutes(value: Any) -> bool:
    return value is None or (_is_number(value) and 0 < value < math.inf)


def _is_path(value: Any) -> bool:
    try:
        return b"\0" not in os.fsencode(value)
    except (TypeError, UnicodeEncodeError):
        return False


_Rule = tuple[Callable[[Any], bool], str]
_OPTIONS: Final[dict[str, _Rule]] = {
    "path": (_is_path, "the path of a file, without NUL, or ':memory:'"),
    "ttl": (
        lambda value: value is None or isinstance(value, Mapping),
        "a dict like {'default_ttl': 60}, in minutes, or None",
    ),
    "key": (
        lambda value: value is None or isinstance(value, bytes | str),
        "16, 24 or 32 bytes, as many in hexadecimal, or None",
    ),
    "text_index": (lambda value: value in get_args(TextIndex), "'sealed' or 'keyed'"),
    "vectors": (
        lambda value: value is None or value in get_args(Kind),
        f"one of {get_args(Kind)}, or None",
    ),
    "approximate_above": (
        lambda value: _is_whole(value, 0),
        "a whole number of vectors, zero or more",
    ),
    "index_bytes": (lambda value: _is_whole(value, 0), "a whole number of bytes, zero or more"),
    "max_value_bytes": (lambda value: _is_whole(value, 1), "a whole number of bytes, 1 or more"),
    "read_only": (lambda value: isinstance(value, bool), "True or False"),
    "timeout_s": (
        lambda value: _is_number(value) and 0 <= value <= _MOST_S,
        f"seconds, 0 to {_MOST_S:,}",
    ),
}
_TTL: Final[dict[str, _Rule]] = {
    "default_ttl": (_is_minutes, "minutes, more than zero, or None"),
    "refresh_on_read": (lambda value: isinstance(value, bool), "True or False"),
    # langgraph's; what has expired is never returned here
    "omit_expired": (lambda value: isinstance(value, bool), "True or False"),
    "sweep_interval_minutes": (_is_minutes, "minutes, more than zero, or None"),
}
