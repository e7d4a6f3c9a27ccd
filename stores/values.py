"""Values: JSON objects and nothing else, as they are stored, and the texts to search in them."""

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

MAX_DEPTH = 64
_MAX_INTEGER_BITS = 13_000  # of an integer: Python reads no more than 4,300 digits back
MAX_BYTES = 16 << 20  # of a value's JSON; an option of `open` sets another
_MIN_SIMILARITY: Final = 0.75  # of 1; below it, `$regex` is taken for `$gte`
WHOLE = "$"  # langgraph's path for the whole value

_EXACT_TYPES = frozenset((str, bool, int, type(None)))
_CONTAINERS = (dict, list, tuple)
_LONG_INTEGER = re.compile(
    r"\d{19}"
)  # orjson would make a float of an integer of more than 64 bits
_encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def encode_value(value: Any, max_bytes: int = MAX_BYTES) -> str:
    """A value as JSON.

    Raises:
        InvalidValue: It is no mapping, holds something that JSON cannot say, or is too large; the
            path to the offending part is named.
    """
    if not isinstance(value, Mapping):
        raise InvalidValue(
            f"the value is a {type(value).__name__}; expected a dict, like {{'text': 'likes tea'}}"
        )
    if type(value) is not dict:
        value = dict(value)
    if problem := describe_invalid_part(value):
        raise InvalidValue(f"{WHOLE}{problem}")
    try:
        body = orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, or no Unicode text
        if problem := describe_invalid_part(value, thorough=True):
            raise InvalidValue(f"{WHOLE}{problem}") from None
        body = _encode_json(value).encode()
    check_size(len(body), max_bytes)
    return body.decode()


def check_size(size: int, max_bytes: int) -> None:
    """Refuse a value of more bytes than are allowed."""
    if size > max_bytes:
        raise InvalidValue(
            f"the value takes {size:,} bytes as JSON; at most {max_bytes:,} are allowed: "
            "store large contents elsewhere and a reference to them here"
        )


def decode_value(text: str) -> dict[str, Any]:
    """A value from its JSON."""
    try:
        value: Any = orjson.loads(text)
    except orjson.JSONDecodeError:  # also of an integer that is larger than any float
        value = json.loads(text)
    exact = type(value) is dict and _EXACT_TYPES.issuperset(map(type, value.values()))
    if not exact and _LONG_INTEGER.search(text):
        value = json.loads(text)
    return value  # type: ignore[no-any-return]


def parse_json_object(text: str, name: str) -> dict[str, Any]:
    """The JSON object that somebody typed; `name` names it in the error.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        value, problem = json.loads(text), ""
    except (ValueError, RecursionError) as exc:
        value, problem = None, f", which is no JSON ({exc})"
    if not isinstance(value, dict):
        raise ConfigurationError(
            f'{name} is {text!r:.80}{problem}; expected a JSON object, like \'{{"kind": "note"}}\''
        )
    return value


def describe_invalid_part(value: Any, depth: int = 0, *, thorough: bool = False) -> str:
    """The first part of a value that is no JSON, as its path and what it is; empty: it is JSON.

    Only if thorough it looks at text and at integers, which orjson refuses by itself.
    """
    if not isinstance(value, _CONTAINERS):
        return _describe_invalid_leaf(value, thorough)
    if depth > MAX_DEPTH:
        return f" is nested deeper than {MAX_DEPTH} levels"
    is_mapping = isinstance(value, dict)
    parts: Any = value.items() if is_mapping else enumerate(value)  # type: ignore[union-attr]
    for name, part in parts:
        if (
            is_mapping
            and (type(name) is not str or thorough)
            and (problem := _describe_invalid_key(name))
        ):
            return problem
        kind = type(part)
        if not thorough and (kind in _EXACT_TYPES or (kind is float and math.isfinite(part))):
            continue
        if problem := describe_invalid_part(part, depth + 1, thorough=thorough):
            return f".{name}{problem}" if is_mapping else f"[{name}]{problem}"
    return ""


def _describe_invalid_leaf(value: Any, thorough: bool) -> str:
    if isinstance(value, str):
        return _describe_invalid_text(value) if thorough else ""
    if isinstance(value, int):  # a bool, too
        is_too_long = value.bit_length() > _MAX_INTEGER_BITS
        return " is an integer of more than 3,900 digits; store it as text" if is_too_long else ""
    if isinstance(value, float):
        return (
            ""
            if math.isfinite(value)
            else f" is {value!r}, which JSON cannot say; use None or text"
        )
    if value is None:
        return ""
    return (
        f" is {_format_value(value)}, a {type(value).__name__}; a store holds JSON: text, numbers, "
        "booleans, None, lists and dicts of them (of a pydantic model: model_dump(mode='json'))"
    )


def _describe_invalid_key(key: Any) -> str:
    return (
        _describe_invalid_text(key)
        if isinstance(key, str)
        else f" has the key {key!r}; JSON keys are text"
    )


def _describe_invalid_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        return f" holds a lone surrogate ({exc.reason}), which is no Unicode text"
    return ""


def _format_value(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # whatever a foreign object raises
        return object.__repr__(value)


def extract_texts(value: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    """The texts at some paths of a value, in langgraph's path syntax, without empty ones.

    `"$"` gives all text of the value as one; `"parts[*].text"` gives each part's by itself.
    """
    if type(value) is not dict:
        value = dict(value)
    out: list[str] = []
    for path in fields:
        if path == WHOLE:
            leaves: list[str] = []
            _collect_texts(value, leaves)
            out.append("\n".join(leaves))
        else:
            out += get_text_at_path(value, tokenize_path(path))
    return [text for text in out if text.strip()]


def _collect_texts(value: Any, out: list[str]) -> None:
    kind = type(value)
    if kind is str:
        out.append(value)
    elif kind is dict:
        for part in value.values():
            _collect_texts(part, out)
    elif kind is list or kind is tuple:
        for part in value:
            _collect_texts(part, out)
    elif kind is int or kind is float:
        out.append(str(value))


# -- options, and what a file records of them


def check_number(
    name: str,
    value: Any,
    expected: str,
    *,
    minimum: float = 0,
    exclusive_maximum: float = math.inf,
    integer: bool = False,
) -> None:
    """Refuse what is no number from `least` on and below `most`."""
    types = int if integer else int | float
    is_number = isinstance(value, types) and not isinstance(value, bool)
    if not is_number or not minimum <= value < exclusive_maximum:
        raise ConfigurationError(f"{name} is {value!r:.80}; expected {expected}")


def suggest_name(name: object, allowed: Iterable[str]) -> str:
    """The end of a message about an unknown name.

    >>> suggest_name("actr", ("actor", "at")), suggest_name("$y", ("$eq", "$ne"))
    ("did you mean 'actor'? There are actor, at", 'there are $eq, $ne')
    """
    names = tuple(allowed)
    ending = f"here are {', '.join(names)}"
    matches = get_close_matches(str(name), names, 1, _MIN_SIMILARITY)
    return f"did you mean {matches[0]!r}? T{ending}" if matches else f"t{ending}"


def parse_setting(
    name: str, stored: Any, is_valid: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """A setting of a file, an object in JSON, unless it was damaged."""
    try:
        setting = json.loads(stored)
    except (TypeError, ValueError, RecursionError):
        setting = None
    if not isinstance(setting, dict) or not is_valid(setting):
        raise CorruptRecord(
            f"the store's setting {name!r} is {stored!r:.80}; expected what perdure wrote there: "
            "the file is damaged; restore it from a backup"
        )
    return setting


def to_prompt_json(value: Any) -> str:
    """Return a value as a JSON literal without tags and line breaks, for prompts."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    for char in "<>\u2028\u2029\x85":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text
