"""Keys of filters as paths into JSON documents, for Python and for SQLite's JSON functions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, TypeAlias

from perdure.errors import ConfigurationError


class Mark(Enum):
    """What is no JSON value and no label: nothing there, and every element."""

    MISSING = "missing"
    EACH = "*"


MISSING: Final = Mark.MISSING
EACH: Final = Mark.EACH

Test: TypeAlias = Callable[[Any], bool]  # of a JSON value, or of MISSING
Step: TypeAlias = str | int | Mark  # a label, a position in an array, or EACH

ARRAYS = (list, tuple)

MAX_STEPS = 64
"""The most steps of one path: a filter is walked by recursion at each `[*]`."""

_LABEL = r"[^.\[\]]+"
_INDEX = r"\[(?:-?[0-9]{1,9}|\*)\]"  # SQLite counts positions in 32 bits
_PATH = re.compile(rf"{_LABEL}(?:{_INDEX})*(?:\.{_LABEL}(?:{_INDEX})*)*")
_STEP = re.compile(rf"({_LABEL})|\[(-?[0-9]+|\*)\]")
_UNSURE = re.compile(r'["\\\x00-\x1f\x7f]')  # as labels of a JSON path
_IDENTIFIERS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")


def steps_of(key: str) -> tuple[Step, ...]:
    """The steps a key stands for; a key that is no well-formed path is one label.

    >>> steps_of("items[*].name")
    ('items', <Mark.EACH: '*'>, 'name')
    >>> steps_of("a..b")
    ('a..b',)
    """
    if not _PATH.fullmatch(key):
        return (key,)
    steps: list[Step] = []
    for label, index in _STEP.findall(key):
        steps.append(label or (EACH if index == "*" else int(index)))
    return tuple(steps)


def at_key(key: str, test: Test) -> Test:
    """A test of an object from a test of what `key` reaches in it.

    An object that has the very key, dots and all, is asked for it; otherwise the key is a path.
    """
    steps = steps_of(key)
    if steps == (key,):
        return lambda document: test(document.get(key, MISSING))
    walk = _walk(steps, test)

    def reached(document: dict[str, Any]) -> bool:
        return test(document[key]) if key in document else walk(document)

    return reached


def _walk(steps: tuple[Step, ...], test: Test) -> Test:
    if EACH not in steps:
        return _along(steps, test)
    at = steps.index(EACH)
    return _along(steps[:at], _some_element(_walk(steps[at + 1 :], test)))


def _along(steps: tuple[Step, ...], test: Test) -> Test:
    def walked(value: Any) -> bool:
        for step in steps:
            if isinstance(step, str):
                value = value.get(step, MISSING) if isinstance(value, dict) else MISSING
            elif isinstance(step, int):
                inside = isinstance(value, ARRAYS) and -len(value) <= step < len(value)
                value = value[step] if inside else MISSING
        return test(value)

    return walked if steps else test


def _some_element(test: Test) -> Test:
    def some(value: Any) -> bool:
        if isinstance(value, ARRAYS) and value:
            return any(map(test, value))
        return test(MISSING)

    return some


def json_paths(key: str) -> tuple[str, ...]:
    """The ends of SQLite JSON paths under which the value that `key` reaches can lie.

    The literal key and the path, each as the two ways in which `json.dumps` writes a label that is
    not ASCII: SQLite 3.40 compares labels as they are written, escapes and all. Empty when there is
    no such path: for `[*]`, and for labels with quotes, backslashes or control characters.
    """
    found: list[str] = []
    for way in dict.fromkeys(((key,), steps_of(key))):
        for ascii_only in (False,) if key.isascii() else (False, True):
            ends = [_json_step(step, ascii_only) for step in way]
            if None in ends:
                return ()
            found.append("".join(map(str, ends)))
    return tuple(dict.fromkeys(found))


def _json_step(step: Step, ascii_only: bool) -> str | None:
    if isinstance(step, int):
        return f"[{step}]" if step >= 0 else f"[#{step}]"
    if not isinstance(step, str) or _UNSURE.search(step):
        return None
    if not storable(step):
        return None
    return f".{json.dumps(step, ensure_ascii=ascii_only)}"


def storable(text: str) -> bool:
    """Whether SQLite takes and returns a text whole: no NUL, no half of a surrogate pair."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def may_be_indexed(path: str) -> bool:
    """Whether `index_path` takes the path."""
    return bool(_IDENTIFIERS.fullmatch(path)) and path.count(".") < MAX_STEPS


def index_path(path: object) -> str:
    """Check a path that an index is made on.

    Args:
        path: Labels of ASCII letters, digits and underscores, joined by dots.

    Returns:
        The path as it came. Nothing in it can end an SQL literal.

    Raises:
        ConfigurationError: It is anything else.
    """
    if not isinstance(path, str) or not may_be_indexed(path):
        raise ConfigurationError(
            f"cannot index the path {path!r}; expected labels of letters, digits and underscores"
            " joined by dots, like 'kind' or 'author.name'"
        )
    return path


def index_expression(path: str, column: str) -> str:
    """The SQL expression to index so that filters on `path` can use it.

    Args:
        path: As `index_path` takes it.
        column: The column of JSON text, as SQL.

    Returns:
        `json_extract(…)`; for a path with dots the literal key comes first, as in a filter.
    """
    extracted = f"json_extract({column}, '$.{index_path(path)}')"
    if "." not in path:
        return extracted
    return f"coalesce(json_extract({column}, '$.\"{path}\"'), {extracted})"
