"""The options of a store: checked before any file is opened, and agreed upon with the file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, Required

from pydantic import BaseModel, ConfigDict, Field, ValidationError, with_config
from typing_extensions import TypedDict

from perdure.errors import ConfigurationError, CorruptRecord
from perdure.storage.flow import Flow, NamedSQL
from perdure.stores.text import ANALYZER
from perdure.stores.values import WHOLE
from perdure.stores.vectors import Kind

TextIndex = Literal["sealed", "keyed"]
_ALIKE: Final = 0.75  # of 1; below it, `$regex` is taken for `$gte`
_WORDS: Final = "words"  # the setting that says how words are kept
_KEPT: Final = ("clear", "sealed", "keyed")

_Minutes = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Natural = Annotated[int, Field(ge=0)]
_Paths = Annotated[list[Annotated[str, Field(min_length=1)]], Field(strict=False)]
_STRICT: Final = ConfigDict(strict=True, extra="forbid")
_EXPECTED: Final = {
    "index": "'offline', None, or a dict with 'embed'",
    "key": "16, 24 or 32 bytes, as many in hexadecimal, or None",
    "ttl": "a dict like {'default_ttl': 60}, in minutes, or None",
}


@with_config(_STRICT)
class TTLOptions(TypedDict, total=False):
    """Langgraph's `TTLConfig`."""

    default_ttl: _Minutes | None
    refresh_on_read: bool
    omit_expired: bool  # what has expired is never returned here
    sweep_interval_minutes: _Minutes | None


@with_config(_STRICT)
class IndexOptions(TypedDict, total=False):
    """Langgraph's `IndexConfig`, with what its SQLite store and `embedder_from` take."""

    embed: Required[Any]
    dims: Any
    fields: _Paths | None
    name: Any
    text_fields: _Paths | None
    distance_type: Literal["cosine"]


class Options(BaseModel):
    """The options of a store, and those of its database that it needs to know."""

    model_config = _STRICT

    index: IndexOptions | None
    ttl: TTLOptions | None
    key: bytes | str | None
    text_index: TextIndex
    vectors: Kind | None
    approximate_above: _Natural
    index_bytes: _Natural
    max_value_bytes: Annotated[int, Field(ge=1)]
    read_only: bool
    timeout_s: Annotated[float, Field(ge=0, le=2_000_000)]  # SQLite: milliseconds in 32 bits


def options_of(**given: Any) -> Options:
    """The options, checked.

    Raises:
        ConfigurationError: One of them is wrong.
    """
    try:
        return Options(**given)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
    option, *within = error["loc"]
    if error["type"] in ("extra_forbidden", "invalid_key"):
        known = {"ttl": TTLOptions, "index": IndexOptions}[str(option)].__annotations__
        raise ConfigurationError(
            f"{option} has the unknown setting {within[0]!r}; {meant(within[0], known)}"
        )
    if option == "key" or error["type"] == "missing":
        within = []
    kind = type(error["input"]).__name__
    shown = f"of type {kind}" if option == "key" else f"{error['input']!r:.80}"
    expected = error["msg"].removeprefix("Input should be ")
    if not within:
        expected = _EXPECTED.get(str(option), expected)
    name = " ".join(map(str, (option, *within)))
    raise ConfigurationError(f"{name} is {shown}; expected {expected}")


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
    kinds = int if whole else int | float
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not least <= value < most:
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


# -- what a file records


def recorded(name: str, stored: Any, is_sound: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """A setting of a file, an object in JSON, unless it was damaged."""
    try:
        found = json.loads(stored)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not is_sound(found):
        raise CorruptRecord(
            f"the store's setting {name!r} is {stored!r:.80}; expected what perdure wrote there: "
            "the file is damaged; restore it from a backup"
        )
    return found


def agreed_fields(
    sql: NamedSQL, given: Sequence[str] | None, kept: str, *, read_only: bool
) -> Flow[list[str]]:
    """The paths that items of a file are searched by, unless a put names others.

    Those given count, else those recorded. If words were made in another way they are dropped, and
    the next search makes them anew.
    """
    rows = yield sql("get_setting", _WORDS)
    found = recorded(_WORDS, rows[0][0], _says_how_words_are_kept) if rows else None
    if found is not None and found["kept"] != kept:
        raise ConfigurationError(
            f"this file keeps words {found['kept']!r}, not {kept!r}: open it with "
            f"text_index={found['kept']!r}"
        )
    fields = list(given or (found["fields"] if found else (WHOLE,)))
    wanted = {"analyzer": ANALYZER, "fields": fields, "kept": kept}
    if found != wanted and not read_only:
        yield sql("set_setting", _WORDS, json.dumps(wanted))
        if found is not None:
            yield sql("drop_indexes")
            yield sql("bump_setting", "erasures")
    return fields


def _says_how_words_are_kept(found: dict[str, Any]) -> bool:
    fields = found.get("fields")
    return (
        found.get("kept") in _KEPT
        and isinstance(fields, list)
        and bool(fields)
        and all(isinstance(path, str) and path for path in fields)
    )
