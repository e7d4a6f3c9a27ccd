"""A second, slow implementation of the documented rules of filters, independent of the product."""

from __future__ import annotations

from fractions import Fraction
from math import isfinite
from typing import Any

NOTHING = object()


def matches_filter(filter: dict[str, Any], document: dict[str, Any]) -> bool:
    """Return whether a document matches a filter."""
    for key, condition in filter.items():
        if key == "$and":
            met = all(matches_filter(part, document) for part in condition)
        elif key == "$or":
            met = any(matches_filter(part, document) for part in condition)
        elif key == "$not":
            met = not matches_filter(condition, document)
        else:
            met = any(meets_condition(value, condition) for value in reached_values(document, key))
        if not met:
            return False
    return True


def reached_values(document: dict[str, Any], key: str) -> list[Any]:
    """Return all values that a key reaches. A missing value is returned as `NOTHING`."""
    if key in document:
        return [document[key]]
    values: list[Any] = [document]
    for step in _parse_path(key):
        values = [after for value in values for after in _follow_step(value, step)]
    return values


def meets_condition(value: Any, condition: Any) -> bool:
    """Return whether a value meets the condition on a field."""
    if isinstance(condition, list):
        return (
            isinstance(value, list)
            and len(value) == len(condition)
            and all(
                meets_condition(element, part)
                for element, part in zip(value, condition, strict=True)
            )
        )
    if isinstance(condition, dict) and any(name.startswith("$") for name in condition):
        return all(_meets_operator(value, name, operand) for name, operand in condition.items())
    if isinstance(condition, dict):
        return isinstance(value, dict) and matches_filter(condition, value)
    return _comparable_form(value) == _comparable_form(condition)


def _meets_operator(value: Any, name: str, operand: Any) -> bool:
    forms = [_comparable_form(element) for element in value] if isinstance(value, list) else []
    match name:
        case "$and":
            return all(meets_condition(value, part) for part in operand)
        case "$or":
            return any(meets_condition(value, part) for part in operand)
        case "$not":
            return not meets_condition(value, operand)
        case "$eq":
            return _comparable_form(value) == _comparable_form(operand)
        case "$ne" | "$nin":
            return not _meets_operator(value, {"$ne": "$eq", "$nin": "$in"}[name], operand)
        case "$in":
            return _comparable_form(value) in [_comparable_form(element) for element in operand]
        case "$exists":
            return bool((value is not NOTHING) == operand)
        case "$contains":
            within = isinstance(value, str) and isinstance(operand, str) and operand in value
            return within or _comparable_form(operand) in forms
    left, right = _comparable_form(value), _comparable_form(operand)
    if left[0] != right[0]:
        return False
    orders = {"$gt": left > right, "$gte": left >= right, "$lt": left < right}
    return bool(orders.get(name, left <= right))


def _comparable_form(value: Any) -> tuple[Any, ...]:
    """Return a value with its kind. Two forms are equal if the values are equal JSON."""
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
        return ("array", [_comparable_form(part) for part in value])
    return ("object", {key: _comparable_form(part) for key, part in value.items()})


def _parse_path(key: str) -> list[Any]:
    """Return the steps of a path, such as `["a", "b", 0]` for `a.b[0]`, or else the whole key."""
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


def _follow_step(value: Any, step: Any) -> list[Any]:
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
