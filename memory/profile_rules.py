"""What a profile may hold: what its schema accepts, and what the gate lets pass of a change.

What it may not hold raises `InvalidPatch`, which names the places and quotes no secret.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from perdure.errors import InvalidPatch
from perdure.memory.detectors import emails, phones, spans_of
from perdure.memory.effects import Effects
from perdure.memory.gate import Gate
from perdure.memory.profile_patch import Document, escaped, missing, plain
from perdure.memory.quotation import quoted
from perdure.memory.records import Candidate
from perdure.stores.base import Provenance

M = TypeVar("M", bound=BaseModel)
KIND: Final = "profile"


# -- the schema


def dumped(profile: BaseModel) -> Document:
    """A profile as a document."""
    return profile.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)


def default_of(schema: type[M]) -> M | None:
    """The profile while nothing is stored; None: the schema has required fields."""
    try:
        return schema()
    except ValidationError:
        return None


def validated(schema: type[M], document: Document) -> M:
    """The profile of a document: strictly, no text for a number and no unknown field."""
    try:
        profile = schema.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as exc:
        faults = [_fault(each) for each in exc.errors(include_url=False, include_context=False)]
    except Exception as exc:  # whatever a validator of the user's raises
        fault = f"a validator of {schema.__name__} raised {type(exc).__name__}: {exc!s:.300}"
        raise InvalidPatch(fault) from exc
    else:
        written = dumped(profile)
        faults = [f"{path!r:.200} is an unknown field" for path, _ in missing(document, written)]
        if not faults:
            return profile
    raise InvalidPatch(f"not as {schema.__name__} asks for: {'; '.join(faults)[:800]}")


def _fault(fault: Any) -> str:
    path = "".join(f"/{escaped(str(part))}" for part in fault["loc"]) or "the profile"
    given = "" if fault["type"] == "missing" else f" (it is {quoted(fault['input'])[:80]})"
    return f"{path!r}: {fault['msg']}{given}"


# -- the gate


class Origin(NamedTuple):
    """Where a change comes from.

    Attributes:
        provenance: What it is noted with.
        told: The messages of users that a model's change rests on; None: a change by hand.
    """

    provenance: Provenance | None = None
    told: tuple[str, ...] | None = None


class Leaf(NamedTuple):
    """A value of a document that holds no other, with the names and indices that lead to it."""

    path: tuple[str | int, ...]
    value: Any

    @property
    def label(self) -> str:
        """The names before the value: `4711` is no secret by itself, and `pin: 4711` is one."""
        names = (part for part in self.path if isinstance(part, str))
        return f"{' '.join(names).replace('_', ' ')}: "

    @property
    def text(self) -> str:
        """The value in words."""
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        return "" if self.value in (None, [], {}) else str(self.value)


def leaves_of(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[Leaf]:
    """The leaves of a document, an empty list or object too."""
    if isinstance(value, dict | list) and value:
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves_of(part, (*path, name))
    else:
        yield Leaf(path, value)


def replaced(document: Document, leaves: Sequence[Leaf], values: Sequence[Any]) -> Document:
    """A copy of a document with other values in some leaves."""
    out: Document = plain(document, "the profile")
    for leaf, value in zip(leaves, values, strict=True):
        within: Any = out
        for part in leaf.path[:-1]:
            within = within[part]
        if leaf.path:
            within[leaf.path[-1]] = value
    return out


def text_of(document: Document) -> str:
    r"""A document in words, a line a field, to be searched.

    >>> text_of({"home": {"city": "Ghent", "zip": None}, "likes": ["tea", "figs"]})
    'home city: Ghent\nlikes: tea, figs'
    """
    lines: dict[str, list[str]] = {}
    for leaf in leaves_of(document):
        if leaf.text:
            lines.setdefault(leaf.label, []).append(leaf.text)
    return "\n".join(label + ", ".join(texts) for label, texts in lines.items())


def screened(gate: Gate, leaves: Sequence[Leaf], origin: Origin) -> Effects[list[Any]]:
    """The values of leaves as they may be kept, parts of them redacted.

    The gate's detectors and checks see each value after its names. Its rules for duplicates and
    tombstones are for memories.
    """
    candidates = [_candidate(each, origin) for each in leaves]
    static = [gate.sensitive.judged(each) for each in candidates]
    asked = [i for i, leaf in enumerate(leaves) if leaf.text]
    answers = yield from gate.examine([candidates[i] for i in asked], [static[i] for i in asked])
    verdicts = {**dict(enumerate(static)), **dict(zip(asked, answers, strict=True))}
    kept = []
    for leaf, verdict in zip(leaves, verdicts.values(), strict=True):
        text = leaf.label + leaf.text if verdict.text is None else verdict.text
        changes = verdict.text is not None
        redacts = isinstance(leaf.value, str) and text.startswith(leaf.label)
        if verdict.action != "keep" or (changes and not redacts):
            names = leaf.path if verdict.check != "detectors" else ()  # a name may be the secret
            path = "".join(f"/{gate.sensitive.redacted(str(part))}" for part in names)
            raise InvalidPatch(
                f"{path or 'the change'!r:.200} cannot be kept: {verdict.reason}; leave it out "
                f"(the gate's {verdict.check})"
            )
        kept.append(text.removeprefix(leaf.label) if changes else leaf.value)
    return kept


def _candidate(leaf: Leaf, origin: Origin) -> Candidate:
    # an address is kept where somebody writes it by hand, or a user told it
    text, explicit = leaf.label + leaf.text, origin.told is None
    if origin.told is not None:
        told = [_letters(each) for each in origin.told]
        contacts = (_letters(text[a:b]) for _, a, b in spans_of(text, (emails, phones)))
        explicit = all(any(each in one for one in told) for each in contacts)
    return Candidate(text, KIND, {}, origin.provenance, "user", explicit)


def _letters(text: str) -> str:
    """The letters and digits of a text, however it is spaced and written."""
    return "".join(filter(str.isalnum, text.casefold()))
