"""Validate and encode item values, and extract the texts from a value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

import orjson
from langgraph.store.base import get_text_at_path, tokenize_path

from perdure.errors import ConfigurationError, CorruptRecord, InvalidValue

# maximum nesting depth of objects and arrays in a value
MAX_DEPTH = 64
# Maximum size of an integer in bits. By default, Python parses at most 4,300 decimal digits, and a
# 13,000-bit integer has fewer.
_MAX_INTEGER_BITS = 13_000
# default maximum size of a value's JSON, in bytes; the option `max_value_bytes` overrides it
MAX_BYTES = 16 << 20
# Minimum similarity, from 0 to 1, between an unknown name and the known name that the error message
# suggests. A lower minimum would suggest `$gte` for `$regex`.
_MIN_SIMILARITY: Final = 0.75
WHOLE = "$"  # langgraph's path of the whole value

# types of JSON values other than floats, objects and arrays
_EXACT_TYPES = frozenset((str, bool, int, type(None)))
_CONTAINERS = (dict, list, tuple)
# matches 19 consecutive digits, which occur in every JSON text that contains an integer of more
# than 64 bits
_LONG_INTEGER = re.compile(r"\d{19}")
_encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def encode_value_as_json(value: Any, max_bytes: int = MAX_BYTES) -> str:
    """Encode a value as JSON text.

    Args:
        value: The value, a mapping.
        max_bytes: The maximum size of the JSON.

    Raises:
        InvalidValue: The value is not a mapping, contains something that JSON cannot represent,
            or is too large. The message names the path of the offending part.
    """
    if not isinstance(value, Mapping):
        raise InvalidValue(
            f"the value is a {type(value).__name__}; expected a dict, like {{'text': 'likes tea'}}"
        )
    if type(value) is not dict:
        value = dict(value)
    if problem := describe_part_that_is_not_json(value):
        raise InvalidValue(f"{WHOLE}{problem}")
    try:
        body = orjson.dumps(value)
    # `orjson` raises TypeError if the value contains lone surrogates, or an integer that needs more
    # than 64 bits.
    except TypeError:
        if problem := describe_part_that_is_not_json(value, thorough=True):
            raise InvalidValue(f"{WHOLE}{problem}") from None
        body = _encode_json(value).encode()
    check_value_size(len(body), max_bytes)
    return body.decode()


def check_value_size(byte_count: int, max_bytes: int) -> None:
    """Raise `InvalidValue` if a value exceeds the maximum size in bytes."""
    if byte_count > max_bytes:
        raise InvalidValue(
            f"the value is {byte_count:,} bytes long as JSON; at most {max_bytes:,} bytes are "
            "allowed. Store large contents elsewhere, and put a reference to them here"
        )


def decode_json_object(text: str) -> dict[str, Any]:
    """Decode the JSON text of a value."""
    try:
        value: Any = orjson.loads(text)
    # orjson rejects integers that exceed the range of floats, but `json` reads them.
    except orjson.JSONDecodeError:
        value = json.loads(text)
    # orjson converts integers that need more than 64 bits to floats, but `json` keeps them.
    has_no_float = type(value) is dict and _EXACT_TYPES.issuperset(map(type, value.values()))
    if not has_no_float and _LONG_INTEGER.search(text):
        value = json.loads(text)
    return value  # type: ignore[no-any-return]


def parse_json_object(text: str, name: str) -> dict[str, Any]:
    """Parse a JSON object that a user typed.

    Args:
        text: The JSON text.
        name: The name of the argument, for the error message.

    Raises:
        ConfigurationError: The text is not valid JSON, or its value is not an object.
    """
    try:
        value, problem = json.loads(text), ""
    except (ValueError, RecursionError) as exc:
        value, problem = None, f", which is not valid JSON ({exc})"
    if not isinstance(value, dict):
        raise ConfigurationError(
            f'{name} is {text!r:.80}{problem}; expected a JSON object, like \'{{"kind": "note"}}\''
        )
    return value


def describe_part_that_is_not_json(value: Any, depth: int = 0, *, thorough: bool = False) -> str:
    """Find the first part of a value that is not valid JSON, and return its path and the problem.

    Args:
        value: The value to check.
        depth: The nesting depth of `value`.
        thorough: Whether to check text and integers too. This is needed only after orjson has
            refused the value, because orjson checks text and integers by itself.

    Returns:
        The description, or an empty string if the whole value is JSON.
    """
    if not isinstance(value, _CONTAINERS):
        return _describe_non_json_leaf(value, thorough)
    if depth > MAX_DEPTH:
        return f" is nested deeper than {MAX_DEPTH} levels"
    is_mapping = isinstance(value, dict)
    parts: Any = value.items() if is_mapping else enumerate(value)  # type: ignore[union-attr]
    for name, part in parts:
        if (
            is_mapping
            and (type(name) is not str or thorough)
            and (problem := _describe_non_json_key(name))
        ):
            return problem
        kind = type(part)
        if not thorough and (kind in _EXACT_TYPES or (kind is float and math.isfinite(part))):
            continue
        if problem := describe_part_that_is_not_json(part, depth + 1, thorough=thorough):
            return f".{name}{problem}" if is_mapping else f"[{name}]{problem}"
    return ""


def _describe_non_json_leaf(value: Any, thorough: bool) -> str:
    """Explain why a scalar value is not valid JSON, or return an empty string if it is valid."""
    if isinstance(value, str):
        return _describe_lone_surrogate(value) if thorough else ""
    if isinstance(value, int):  # includes bool
        is_too_long = value.bit_length() > _MAX_INTEGER_BITS
        return " is an integer of more than 3,900 digits; store it as text" if is_too_long else ""
    if isinstance(value, float):
        return (
            ""
            if math.isfinite(value)
            else f" is {value!r}, which JSON cannot represent; use None or text"
        )
    if value is None:
        return ""
    return (
        f" is {_format_short_repr(value)}, a {type(value).__name__}; a store accepts only JSON: "
        "text, numbers, booleans, None, and lists and dicts of these (for a pydantic model, use "
        "model_dump(mode='json'))"
    )


def _describe_non_json_key(key: Any) -> str:
    return (
        _describe_lone_surrogate(key)
        if isinstance(key, str)
        else f" has the key {key!r}; the keys of JSON objects must be text"
    )


def _describe_lone_surrogate(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        return f" contains a lone surrogate ({exc.reason}), so it is not valid Unicode"
    return ""


def _format_short_repr(value: Any) -> str:
    """Return a value's truncated `repr`, falling back to `object.__repr__` if `repr` fails."""
    try:
        return f"{value!r:.80}"
    # The `__repr__` of a user-defined class can raise any exception.
    except Exception:
        return object.__repr__(value)


def extract_texts(value: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    """Return the non-empty texts at the given paths of a value.

    The paths have langgraph's syntax. `"$"` selects all text and all numbers in the value as one
    string, and `"parts[*].text"` selects one string per part.

    Args:
        value: The JSON object.
        fields: The paths.
    """
    if type(value) is not dict:
        value = dict(value)
    found_texts: list[str] = []
    for path in fields:
        if path == WHOLE:
            leaves: list[str] = []
            _append_strings_and_numbers(value, leaves)
            found_texts.append("\n".join(leaves))
        else:
            found_texts += get_text_at_path(value, tokenize_path(path))
    return [text for text in found_texts if text.strip()]


def _append_strings_and_numbers(value: Any, texts: list[str]) -> None:
    """Append all strings and numbers in a nested value to `texts`, in order."""
    kind = type(value)
    if kind is str:
        texts.append(value)
    elif kind is dict:
        for part in value.values():
            _append_strings_and_numbers(part, texts)
    elif kind is list or kind is tuple:
        for part in value:
            _append_strings_and_numbers(part, texts)
    elif kind is int or kind is float:
        texts.append(str(value))


# -- options and recorded settings


def check_number(
    name: str,
    value: Any,
    expected: str,
    *,
    minimum: float = 0,
    exclusive_maximum: float = math.inf,
    integer: bool = False,
) -> None:
    """Raise `ConfigurationError` unless a value is a number in the given range.

    Args:
        name: The name of the option, for the message.
        value: The value to check.
        expected: A description of valid values, for the message.
        minimum: The lowest valid value.
        exclusive_maximum: The value must be below this number.
        integer: Whether the value must be an `int`.
    """
    types = int if integer else int | float
    is_number = isinstance(value, types) and not isinstance(value, bool)
    if not is_number or not minimum <= value < exclusive_maximum:
        raise ConfigurationError(f"{name} is {value!r:.80}; expected {expected}")


def build_unknown_name_hint(name: object, allowed: Iterable[str]) -> str:
    """Return the hint that ends an error message about an unknown name.

    The hint suggests the most similar known name, if any is similar enough, and lists all known
    names.

    >>> build_unknown_name_hint("actr", ("actor", "at"))
    "did you mean 'actor'? Expected one of actor, at"
    >>> build_unknown_name_hint("$y", ("$eq", "$ne"))
    'expected one of $eq, $ne'
    """
    names = tuple(allowed)
    known_names = f"one of {', '.join(names)}"
    matches = get_close_matches(str(name), names, 1, _MIN_SIMILARITY)
    return (
        f"did you mean {matches[0]!r}? Expected {known_names}"
        if matches
        else f"expected {known_names}"
    )


def parse_stored_setting(
    setting_name: str, json_text: Any, is_valid: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Parse a JSON object that is recorded as a setting in a store's database.

    Args:
        setting_name: The name of the setting.
        json_text: The recorded text.
        is_valid: Returns whether the object has the expected fields.

    Raises:
        CorruptRecord: The text is not such an object, so the file is damaged.
    """
    try:
        setting = json.loads(json_text)
    except (TypeError, ValueError, RecursionError):
        setting = None
    if not isinstance(setting, dict) or not is_valid(setting):
        raise CorruptRecord(
            f"the database is damaged: its stored setting {setting_name!r} has the invalid value "
            f"{json_text!r:.80}; restore the database from a backup"
        )
    return setting


def to_prompt_json(value: Any) -> str:
    """Return a value as a JSON literal for a prompt, with `<`, `>` and line breaks escaped."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    for char in "<>\u2028\u2029\x85":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text
