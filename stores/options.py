"""The options of a store: checked before any file is opened, and agreed upon with the file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Required

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError, with_config
from typing_extensions import TypedDict

from perdure.errors import ConfigurationError
from perdure.storage.flow import Flow, NamedSQL
from perdure.stores.text import ANALYZER
from perdure.stores.values import WHOLE, meant, recorded
from perdure.stores.vectors import Kind

TextIndex = Literal["sealed", "keyed"]
_WORDS: Final = "words"  # the setting that says how words are kept
_KEPT: Final = ("clear", "sealed", "keyed")

_Number = int | InstanceOf[float]  # `float` alone takes fractions and decimals too
_Minutes = Annotated[_Number, Field(gt=0, lt=math.inf)]
_Natural = Annotated[int, Field(ge=0)]
_Path = Annotated[str, Field(min_length=1)]
_Paths = list[_Path] | tuple[_Path, ...]
_STRICT: Final = ConfigDict(strict=True, extra="forbid")
_MINUTES: Final = "minutes, more than zero, or None"
_PATHS: Final = "a list of paths like ['text'], or None"
_TRUTH: Final = "True or False"
_EXPECTED: Final = {
    "index": "'offline', None, or a dict with 'embed'",
    "key": "16, 24 or 32 bytes, as many in hexadecimal, or None",
    "ttl": "a dict like {'default_ttl': 60}, in minutes, or None",
    "default_ttl": _MINUTES,
    "sweep_interval_minutes": _MINUTES,
    "refresh_on_read": _TRUTH,
    "omit_expired": _TRUTH,
    "read_only": _TRUTH,
    "fields": _PATHS,
    "text_fields": _PATHS,
    "vectors": "'float32', 'float16', 'int8' or None",
    "approximate_above": "a whole number of vectors, zero or more",
    "index_bytes": "a whole number of bytes, zero or more",
    "max_value_bytes": "a whole number of bytes, 1 or more",
    "timeout_s": "seconds, 0 to 2,000,000",
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
    timeout_s: Annotated[_Number, Field(ge=0, le=2_000_000)]  # SQLite: milliseconds in 32 bits


def options_of(**given: Any) -> Options:
    """The options, checked.

    Raises:
        ConfigurationError: One of them is wrong.
    """
    given = {name: dict(v) if isinstance(v, Mapping) else v for name, v in given.items()}
    try:
        return Options(**given)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
    option, *within = error["loc"]
    name, value = str(option), given[str(option)]
    if error["type"] in ("extra_forbidden", "invalid_key"):
        known = {"ttl": TTLOptions, "index": IndexOptions}[name].__annotations__
        raise ConfigurationError(
            f"{name} has the unknown setting {within[0]!r}; {meant(within[0], known)}"
        )
    setting = name
    if name in ("index", "ttl") and within and within[0] in value:
        setting = str(within[0])
        name, value = f"{name} {setting}", value[setting]
    shown = f"of type {type(value).__name__}" if name == "key" else f"{value!r:.80}"
    expected = _EXPECTED.get(setting, error["msg"].removeprefix("Input should be "))
    raise ConfigurationError(f"{name} is {shown}; expected {expected}")


# -- what a file records


def agreed_fields(
    sql: NamedSQL, chosen: Sequence[str] | None, kept: str, *, read_only: bool
) -> Flow[list[str]]:
    """The paths that items of a file are searched by, unless a put names others.

    Those given count, else those recorded. If words were made in another way they are dropped, and
    the next search makes them anew.
    """
    rows = yield sql("get_setting", _WORDS)
    recorded_words = recorded(_WORDS, rows[0][0], _says_how_words_are_kept) if rows else None
    if recorded_words is not None and recorded_words["kept"] != kept:
        raise ConfigurationError(
            f"this file keeps words {recorded_words['kept']!r}, not {kept!r}: open it with "
            f"text_index={recorded_words['kept']!r}"
        )
    fields = list(chosen or (recorded_words["fields"] if recorded_words else (WHOLE,)))
    words = {"analyzer": ANALYZER, "fields": fields, "kept": kept}
    if recorded_words != words and not read_only:
        yield sql("set_setting", _WORDS, json.dumps(words))
        if recorded_words is not None:
            yield sql("drop_indexes")
            yield sql("bump_setting", "erasures")
    return fields


def _says_how_words_are_kept(words: dict[str, Any]) -> bool:
    fields = words.get("fields")
    return (
        words.get("kept") in _KEPT
        and isinstance(fields, list)
        and bool(fields)
        and all(isinstance(path, str) and path for path in fields)
    )
