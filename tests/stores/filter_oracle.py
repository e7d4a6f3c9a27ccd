"""The documented rules of filters, read off once more, slowly, and sharing no code with them."""

from __future__ import annotations

from fractions import Fraction
from math import isfinite
from typing import Any

NOTHING = object()


def holds(filter: dict[str, Any], document: dict[str, Any]) -> bool:
    """Whether a document meets a filter."""
    for key, asked in filter.items():
        if key == "$and":
            met = all(holds(part, document) for part in asked)
        elif key == "$or":
            met = any(holds(part, document) for part in asked)
        elif key == "$not":
            met = not holds(asked, document)
        else:
            met = any(meets(value, asked) for value in reached(document, key))
        if not met:
            return False
    return True


def reached(document: dict[str, Any], key: str) -> list[Any]:
    """All values a key reaches; what is not there counts as one."""
    if key in document:
        return [document[key]]
    values: list[Any] = [document]
    for step in _steps(key):
        values = [after for value in values for after in _after(value, step)]
    return values


def meets(value: Any, asked: Any) -> bool:
    """Whether a value meets what is asked of a field."""
    if isinstance(asked, list):
        return (
            isinstance(value, list)
            and len(value) == len(asked)
            and all(meets(one, part) for one, part in zip(value, asked, strict=True))
        )
    if isinstance(asked, dict) and any(name.startswith("$") for name in asked):
        return all(_operator(value, name, operand) for name, operand in asked.items())
    if isinstance(asked, dict):
        return isinstance(value, dict) and holds(asked, value)
    return _form(value) == _form(asked)


def _operator(value: Any, name: str, operand: Any) -> bool:
    forms = [_form(one) for one in value] if isinstance(value, list) else []
    match name:
        case "$and":
            return all(meets(value, part) for part in operand)
        case "$or":
            return any(meets(value, part) for part in operand)
        case "$not":
            return not meets(value, operand)
        case "$eq":
            return _form(value) == _form(operand)
        case "$ne" | "$nin":
            return not _operator(value, {"$ne": "$eq", "$nin": "$in"}[name], operand)
        case "$in":
            return _form(value) in [_form(one) for one in operand]
        case "$exists":
            return bool((value is not NOTHING) == operand)
        case "$contains":
            within = isinstance(value, str) and isinstance(operand, str) and operand in value
            return within or _form(operand) in forms
    left, right = _form(value), _form(operand)
    if left[0] != right[0]:
        return False
    orders = {"$gt": left > right, "$gte": left >= right, "$lt": left < right}
    return bool(orders.get(name, left <= right))


def _form(value: Any) -> tuple[Any, ...]:
    """A value with its kind, so that equal forms are equal JSON."""
    if value is NOTHING:
        return ("nothing",)
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("truth", value)
    if isinstance(value, int | float):
        finite = isinstance(value, int) or isfinite(value)
        return ("number", Fraction(value) if finite else value)
    if isinstance(value, str):
        return ("string", [ord(sign) for sign in value])
    if isinstance(value, list):
        return ("array", [_form(part) for part in value])
    return ("object", {key: _form(part) for key, part in value.items()})


def _steps(key: str) -> list[Any]:
    """`a.b[0]` as `["a", "b", 0]`; a key that is no path as itself."""
    steps: list[Any] = []
    for part in key.split("."):
        label, *indexes = part.split("[")
        steps.append(label)
        for index in indexes:
            inner = index[:-1]
            digits = inner.removeprefix("-")
            number = digits.isascii() and digits.isdigit() and len(digits) < 10
            if index[-1:] != "]" or not (number or inner == "*"):
                return [key]
            steps.append(inner if inner == "*" else int(inner))
            if inner == "*":
                steps[-1] = NOTHING
        if not label or "]" in label:
            return [key]
    return steps


def _after(value: Any, step: Any) -> list[Any]:
    if isinstance(step, str):
        return [value.get(step, NOTHING) if isinstance(value, dict) else NOTHING]
    if not isinstance(value, list):
        return [NOTHING]
    if step is NOTHING:
        return value or [NOTHING]
    try:
        return [value[step]]
    except IndexError:
        return [NOTHING]
