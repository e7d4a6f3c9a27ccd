"""Values: JSON objects and nothing else, as they are stored, and the texts to search in them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from langgraph.store.base import get_text_at_path, tokenize_path

from perdure.errors import InvalidValue

MAX_DEPTH = 64
_MAX_BITS = 13_000  # of an integer: Python reads no more than 4,300 digits back
MAX_BYTES = 16 << 20  # of a value's JSON; an option of `open` sets another
WHOLE = "$"  # langgraph's path for the whole value

_WIDE = 1 << 64
_TEXT = frozenset((str,))
_SURE = frozenset((str, bool, type(None)))
_NESTING = frozenset((dict, list, tuple))
_EXACT = _SURE | {int}
_LONG = re.compile(r"\d{19}")  # orjson would make a float of an integer of more than 64 bits
_dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def encode(value: Any, max_bytes: int = MAX_BYTES) -> str:
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
    if not is_plain(value, 0):
        _check(value, WHOLE, 0)
    body = _dumped(value)
    if len(body) > max_bytes:
        raise InvalidValue(
            f"the value takes {len(body):,} bytes as JSON; at most {max_bytes:,} are allowed: "
            "store large contents elsewhere and a reference to them here"
        )
    return body.decode()


def decode(text: str) -> dict[str, Any]:
    """A value from its JSON."""
    value: Any = orjson.loads(text)
    exact = type(value) is dict and _EXACT.issuperset(map(type, value.values()))
    if not exact and _LONG.search(text):
        value = json.loads(text)
    return value  # type: ignore[no-any-return]


def _dumped(value: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, or no Unicode text
        _check(value, WHOLE, 0)
        return _dump(value).encode()


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is JSON; a quick look, which leaves what is rare to `_check`."""
    if depth > MAX_DEPTH:
        return False
    if type(value) is dict:
        if not _TEXT.issuperset(map(type, value)):
            return False
        value = value.values()
    elif type(value) not in _NESTING:
        value = (value,)
    for part in value:
        kind = type(part)
        if kind in _SURE:
            continue
        if kind is int:
            plain = -_WIDE < part < _WIDE
        elif kind is float:
            plain = math.isfinite(part)
        else:
            plain = kind in _NESTING and is_plain(part, depth + 1)
        if not plain:
            return False
    return True


def _check(value: Any, path: str, depth: int) -> None:
    if isinstance(value, str):
        _check_text(value, path)
    elif value is None or isinstance(value, bool):
        return
    elif isinstance(value, int | float):
        _check_number(value, path)
    elif isinstance(value, dict):
        _check_depth(path, depth)
        for key, part in value.items():
            if not isinstance(key, str):
                raise InvalidValue(f"{path} has the key {key!r}; JSON keys are text")
            _check_text(key, path)
            _check(part, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        _check_depth(path, depth)
        for number, part in enumerate(value):
            _check(part, f"{path}[{number}]", depth + 1)
    else:
        raise InvalidValue(
            f"{path} is {_shown(value)}, a {type(value).__name__}; a store holds JSON: text, "
            "numbers, booleans, None, lists and dicts of them (of a pydantic model: "
            "model_dump(mode='json'))"
        )


def _check_text(text: str, path: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidValue(
                f"{path} holds a lone surrogate ({exc.reason}), which is no Unicode text"
            ) from exc


def _check_number(value: int | float, path: str) -> None:
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise InvalidValue(f"{path} is an integer of more than 3,900 digits; store it as text")
    elif not math.isfinite(value):
        raise InvalidValue(f"{path} is {value!r}, which JSON cannot say; use None or text")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # whatever a foreign object raises
        text = object.__repr__(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_depth(path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InvalidValue(f"{path[:60]}… is nested deeper than {MAX_DEPTH} levels")


def texts(value: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    """The texts at some paths of a value, in langgraph's path syntax, without empty ones.

    `"$"` gives all text of the value as one; `"parts[*].text"` gives each part's by itself.
    """
    if type(value) is not dict:
        value = dict(value)
    out: list[str] = []
    for path in fields:
        if path == WHOLE:
            leaves: list[str] = []
            _gather(value, leaves)
            out.append("\n".join(leaves))
        else:
            out += get_text_at_path(value, tokenize_path(path))
    return [text for text in out if text.strip()]


def _gather(value: Any, out: list[str]) -> None:
    kind = type(value)
    if kind is str:
        out.append(value)
    elif kind is dict:
        for part in value.values():
            _gather(part, out)
    elif kind is list or kind is tuple:
        for part in value:
            _gather(part, out)
    elif kind is int or kind is float:
        out.append(str(value))
