"""Check the options with which a store is opened, and the settings that its database records.

The options are checked before the database is opened. When the database is opened, the options are
compared with the recorded settings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Required

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError, with_config
from typing_extensions import TypedDict

from perdure.errors import ConfigurationError
from perdure.storage.flow import Flow, NamedSQL
from perdure.stores.search.text import ANALYZER
from perdure.stores.search.vectors import Kind
from perdure.stores.values import WHOLE, build_unknown_name_hint, parse_stored_setting

# How an encrypted store protects the words in its stored search indexes: by encrypting the indexes
# only, or by also replacing each word with a keyed hash.
TextIndex = Literal["sealed", "keyed"]
# name of the setting that records how words are stored ("clear", "sealed" or "keyed")
_WORDS_SETTING: Final = "words"
_WORD_STORAGE: Final = ("clear", "sealed", "keyed")

# Number type for pydantic models. Plain `float` is not used, because pydantic would also accept
# Fraction and Decimal objects for it.
_Number = int | InstanceOf[float]
_Minutes = Annotated[_Number, Field(gt=0, lt=math.inf)]
_Natural = Annotated[int, Field(ge=0)]
_Path = Annotated[str, Field(min_length=1)]
_Paths = list[_Path] | tuple[_Path, ...]
_STRICT: Final = ConfigDict(strict=True, extra="forbid")
_MINUTES: Final = "minutes, more than zero, or None"
_PATHS: Final = "a list of paths like ['text'], or None"
_BOOLEAN: Final = "True or False"
_EXPECTED: Final = {
    "index": "'offline', None, or a dict with 'embed'",
    "key": "16, 24 or 32 bytes, as bytes or as hexadecimal text, or None",
    "ttl": "a dict like {'default_ttl': 60}, in minutes, or None",
    "default_ttl": _MINUTES,
    "sweep_interval_minutes": _MINUTES,
    "refresh_on_read": _BOOLEAN,
    "omit_expired": _BOOLEAN,
    "read_only": _BOOLEAN,
    "fields": _PATHS,
    "text_fields": _PATHS,
    "vectors": "'float32', 'float16', 'int8' or None",
    "approximate_above": "a number of vectors, 0 or more",
    "index_bytes": "a number of bytes, 0 or more",
    "max_value_bytes": "a number of bytes, 1 or more",
    "timeout_s": "seconds, 0 to 2,000,000",
}


@with_config(_STRICT)
class TTLOptions(TypedDict, total=False):
    """TTL options, as in langgraph's `TTLConfig`."""

    default_ttl: _Minutes | None
    refresh_on_read: bool
    # accepted for compatibility but ignored, because perdure never returns expired items
    omit_expired: bool
    sweep_interval_minutes: _Minutes | None


@with_config(_STRICT)
class IndexOptions(TypedDict, total=False):
    """The options of the search index.

    The options are those of langgraph's `IndexConfig` and the arguments of `embedder_from`.
    """

    embed: Required[Any]
    dims: Any
    fields: _Paths | None
    name: Any
    text_fields: _Paths | None
    distance_type: Literal["cosine"]


class Options(BaseModel):
    """The validated options of a store, including those of its database."""

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
    # SQLite stores the timeout in milliseconds as a 32-bit integer
    timeout_s: Annotated[_Number, Field(ge=0, le=2_000_000)]


def check_store_options(**options: Any) -> Options:
    """Check the options of a store.

    Raises:
        ConfigurationError: An option has a wrong value.
    """
    options = {name: dict(v) if isinstance(v, Mapping) else v for name, v in options.items()}
    try:
        return Options(**options)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
    option, *subkeys = error["loc"]
    name, value = str(option), options[str(option)]
    if error["type"] in ("extra_forbidden", "invalid_key"):
        allowed = {"ttl": TTLOptions, "index": IndexOptions}[name].__annotations__
        raise ConfigurationError(
            f"the argument {name!r} has the unknown setting {subkeys[0]!r}; "
            f"{build_unknown_name_hint(subkeys[0], allowed)}"
        )
    setting = name
    if name in ("index", "ttl") and subkeys and subkeys[0] in value:
        setting = str(subkeys[0])
        name, value = f"{name} {setting}", value[setting]
    description = f"of type {type(value).__name__}" if name == "key" else f"{value!r:.80}"
    expected = _EXPECTED.get(setting, error["msg"].removeprefix("Input should be "))
    raise ConfigurationError(f"the option {name!r} is {description}; expected {expected}")


# -- recorded settings


def resolve_and_record_searched_json_paths(
    sql: NamedSQL, chosen_paths: Sequence[str] | None, word_storage: str, *, read_only: bool
) -> Flow[list[str]]:
    """Return the JSON paths whose text is searched, and record them in the database.

    JSON paths passed by the caller override the paths recorded in the database. If the stored
    search indexes were built with JSON paths or an analyzer different from the current ones, the
    indexes are dropped, and the next search builds them again.

    Args:
        sql: The statements of the store.
        chosen_paths: The paths passed by the caller, or None.
        word_storage: How words are stored: "clear", "sealed" or "keyed".
        read_only: Whether the database is read-only, so that nothing is recorded.

    Raises:
        ConfigurationError: The file stores words in another way.
    """
    rows = yield sql("get_setting", _WORDS_SETTING)
    recorded_words = (
        parse_stored_setting(_WORDS_SETTING, rows[0][0], _is_valid_word_storage_setting)
        if rows
        else None
    )
    if recorded_words is not None and recorded_words["kept"] != word_storage:
        raise ConfigurationError(
            f"this file was created with text_index={recorded_words['kept']!r}, but was opened "
            f"with text_index={word_storage!r}; open it with text_index={recorded_words['kept']!r}"
        )
    fields = list(chosen_paths or (recorded_words["fields"] if recorded_words else (WHOLE,)))
    wanted_words = {"analyzer": ANALYZER, "fields": fields, "kept": word_storage}
    if recorded_words != wanted_words and not read_only:
        yield sql("set_setting", _WORDS_SETTING, json.dumps(wanted_words))
        if recorded_words is not None:
            yield sql("drop_search_indexes")
            yield sql("increment_setting", "erasures")
    return fields


def _is_valid_word_storage_setting(setting: dict[str, Any]) -> bool:
    """Return whether the text index settings stored in the database have valid values."""
    fields = setting.get("fields")
    return (
        setting.get("kept") in _WORD_STORAGE
        and isinstance(fields, list)
        and bool(fields)
        and all(isinstance(path, str) and path for path in fields)
    )
