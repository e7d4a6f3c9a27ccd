"""What changed between two values, path by path and word by word, as pages show it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final, Literal

from perdure.server.reply import encoded

Kind = Literal["same", "removed", "added"]
_WORD: Final = re.compile(r"\s+|\w+|[^\w\s]")
_WORDS: Final = 2_000  # texts of more are not compared word by word
_ALL_WORDS: Final = 10_000  # of the texts of a page that are
_CHARS: Final = 2_000  # of a part that is shown
_MOST: Final = 100  # paths that are shown


@dataclass(slots=True)
class WordBudget:
    """How many words may be compared; what changed in further ones is shown whole."""

    left: int = _ALL_WORDS


@dataclass(frozen=True, slots=True)
class Change:
    """What changed at a path of a value: texts that stayed, went and came, in order."""

    path: str
    parts: tuple[tuple[Kind, str], ...]


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], budget: WordBudget | None = None
) -> list[Change]:
    """The paths at which two values differ, at most a hundred of them.

    >>> differences({"text": "likes tea"}, {"text": "likes green tea"})[0].parts
    (('same', 'likes '), ('added', 'green '), ('same', 'tea'))
    """
    old, new, budget = dict(_leaves(before, "")), dict(_leaves(after, "")), budget or WordBudget()
    differ = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    return [Change(path, _parts(old.get(path), new.get(path), budget)) for path in differ[:_MOST]]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Each leaf of a value, as text, by its path; a list is a leaf."""
    if isinstance(value, Mapping) and (value or not path):
        for name, part in value.items():
            yield from _leaves(part, f"{path}.{name}" if path else name)
    elif isinstance(value, str):
        yield path, value
    else:
        yield path, json.dumps(json.loads(encoded(value)), ensure_ascii=False)


def _parts(old: str | None, new: str | None, budget: WordBudget) -> tuple[tuple[Kind, str], ...]:
    if old is None or new is None:
        return (("added", _cut(new or "")),) if old is None else (("removed", _cut(old)),)
    one, other = (
        _WORD.findall(each[: _CHARS * 10]) if budget.left > 0 else [] for each in (old, new)
    )
    budget.left -= len(one) + len(other)
    if max(len(one), len(other)) > _WORDS or budget.left <= 0:
        return ("removed", _cut(old)), ("added", _cut(new))
    parts: list[tuple[Kind, str]] = []
    for kind, a, b, c, d in SequenceMatcher(None, one, other).get_opcodes():
        if kind == "equal":
            parts.append(("same", _cut("".join(one[a:b]))))
            continue
        parts += [("removed", _cut("".join(one[a:b])))] if a < b else []
        parts += [("added", _cut("".join(other[c:d])))] if c < d else []
    return tuple(parts)


def _cut(text: str) -> str:
    return text if len(text) <= _CHARS else f"{text[:_CHARS]}… ({len(text):,} characters)"
