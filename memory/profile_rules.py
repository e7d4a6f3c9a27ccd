"""What a profile may hold: what its schema accepts, and what the gate lets pass of a change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, RootModel, ValidationError

from perdure.errors import ConfigurationError, InvalidPatch
from perdure.memory.effects import Effects
from perdure.memory.gate.gate import Gate
from perdure.memory.gate.hearing import Hearing
from perdure.memory.profile_patch import Document, escaped, plain, tokens_of
from perdure.memory.quoting import quoted
from perdure.memory.records import Candidate, Verdict
from perdure.memory.store_adapter import StoreAdapter
from perdure.stores.base import Namespace, Provenance

M = TypeVar("M", bound=BaseModel)
KIND: Final = "profile"
_FAULTS: Final = 5  # that a message tells of
_NAME: Final = "a field's name"


class Schema(Generic[M]):
    """A pydantic model as the schema of documents.

    Raises:
        ConfigurationError: It is no model, has no JSON schema, or loses fields when it is written.
    """

    def __init__(self, model: type[M]) -> None:
        if not isinstance(model, type) or not issubclass(model, BaseModel):
            raise ConfigurationError(f"the schema is {model!r:.80}; expected a class of BaseModel")
        self.model, self.name = model, model.__name__
        try:
            read, written = (model.model_json_schema(mode=m) for m in ("validation", "serialization"))
        except Exception as exc:  # PydanticInvalidForJsonSchema, or a name that is not defined
            raise ConfigurationError(f"{self.name} has no JSON schema: {exc!s:.300}") from exc
        lost = sorted(set(_fields(read)) - set(_fields(written)))
        if lost or issubclass(model, RootModel):
            raise ConfigurationError(
                f"the schema {self.name} would lose {lost or 'its root'}; expected a model of "
                "fields, none of them excluded or written under another name than it is read by"
            )
        self.json_schema: Document = read
        default = self.default()
        try:
            if default is not None:
                self.validated(self.dumped(default))
        except InvalidPatch as exc:
            raise ConfigurationError(f"the default of a profile is {exc}") from exc

    def default(self) -> M | None:
        """The profile while nothing is stored; None: the schema has required fields."""
        try:
            return self.model()
        except ValidationError:
            return None

    def blank(self) -> Document:
        """The document that the first change starts from: all defaults."""
        return self.dumped(self.default() or self.model.model_construct())

    def dumped(self, profile: M) -> Document:
        """A profile as a document."""
        return profile.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)

    def validated(self, document: Document) -> M:
        """The profile of a document: strictly, no text for a number and no unknown field.

        Raises:
            InvalidPatch: There is none; the fields that are wrong are named.
        """
        try:
            profile = self.model.model_validate_json(json.dumps(document), strict=True)
        except ValidationError as exc:
            errors = exc.errors(include_url=False, include_context=False)
            faults = [_fault(each) for each in errors]
        except Exception as exc:  # whatever a validator of the user's raises
            raise InvalidPatch(
                f"a validator of {self.name} raised {type(exc).__name__}: {exc!s:.300}"
            ) from exc
        else:
            faults = list(_unknown(document, self.dumped(profile), ""))
            if not faults:
                return profile
        more = f"; and {len(faults) - _FAULTS} more" if len(faults) > _FAULTS else ""
        raise InvalidPatch(f"not as {self.name} asks for: {'; '.join(faults[:_FAULTS])}{more}")


def _fields(schema: Document) -> Iterator[str]:
    for name, part in ((schema.get("title", ""), schema), *schema.get("$defs", {}).items()):
        yield from (f"{name}.{field}" for field in part.get("properties", ()))


def _fault(fault: Any) -> str:
    path = "".join(f"/{escaped(str(part))}" for part in fault["loc"]) or "the profile"
    given = "" if fault["type"] == "missing" else f" (it is {quoted(fault['input'])[:80]})"
    return f"{path!r}: {fault['msg']}{given}"


def _unknown(given: Any, taken: Any, path: str) -> Iterator[str]:
    """The fields of a document that are not in the profile made of it."""
    if isinstance(given, dict) and isinstance(taken, dict):
        for name, part in given.items():
            at = f"{path}/{escaped(name)}"
            if name in taken:
                yield from _unknown(part, taken[name], at)
            else:
                known = ", ".join(map(repr, list(taken)[:20])) or "none"
                yield f"{at!r:.200} is an unknown field; expected one of {known}"
    elif isinstance(given, list) and isinstance(taken, list):
        for number, (part, other) in enumerate(zip(given, taken, strict=False)):
            yield from _unknown(part, other, f"{path}/{number}")


class _Text(NamedTuple):
    """A text that a change writes: what it is, what stands before it, and the value."""

    what: str
    label: str
    value: Any


@dataclass(frozen=True, slots=True)
class Screen:
    """The gate in front of a profile: its detectors and checks see each value that a change sets.

    Its rules for duplicates and tombstones are for memories.

    Args:
        gate: Judges.
        adapter: The store of the profile.
        namespace: Of the profile.
        provenance: Of the change.
        told: The messages of users that a model's change rests on; None: a change by hand.
    """

    gate: Gate
    adapter: StoreAdapter
    namespace: Namespace
    provenance: Provenance | None
    told: tuple[str, ...] | None = None

    def edits(
        self, edits: Sequence[dict[str, str]], previous: Document
    ) -> Effects[list[dict[str, str]]]:
        """The edits of a change as they may be noted: their reasons are kept, and their paths.

        Raises:
            InvalidPatch: One holds what is not to be kept; it is not quoted.
        """
        yield from self._names((name for e in edits for name in tokens_of(e["path"])), previous)
        given = [each for each in edits if "reason" in each]
        texts = [_Text(f"the reason for {e['path']!r:.200}", "", e["reason"]) for e in given]
        for each, instead in zip(given, (yield from self._judged(texts)), strict=True):
            each["reason"] = each["reason"] if instead is None else instead
        return list(edits)

    def document(self, previous: Document, new: Document) -> Effects[Document]:
        """The new document as it may be kept, with parts of what is set redacted.

        What the profile says already under the same name is not judged again: it does not stand in
        the way of other changes, and an element of a list may have moved.

        Raises:
            InvalidPatch: A value or a name holds what is not to be kept; it is not quoted.
        """
        yield from self._names(_names_in(new), previous)
        known = {(_label(path), repr(value)) for path, value in _leaves(previous)}
        leaves = [(p, v) for p, v in _leaves(new) if (_label(p), repr(v)) not in known]
        leaves = [(p, v) for p, v in leaves if v not in (None, "") and not isinstance(v, bool)]
        texts = [_Text(repr(_pointer(path)), _label(path), value) for path, value in leaves]
        found = yield from self._judged(texts)
        out: Document = plain(new, "the profile")
        for (path, _), instead in zip(leaves, found, strict=True):
            within: Any = out
            for part in path[:-1]:
                within = within[part]
            within[path[-1]] = within[path[-1]] if instead is None else instead
        return out

    def _names(self, names: Iterable[str], previous: Document) -> Effects[None]:
        new = sorted(set(names).difference(_names_in(previous)))
        for instead in (yield from self._judged([_Text(_NAME, "", name) for name in new])):
            if instead is not None:
                raise InvalidPatch(f"{_NAME} cannot be kept: a part of it would be redacted")

    def _judged(self, texts: Sequence[_Text]) -> Effects[list[str | None]]:
        """What is to be kept instead of each value; None: the value."""
        candidates = [self._candidate(each) for each in texts]
        try:
            verdicts = [self.gate.sensitive.judged(each) for each in candidates]
        except Exception as exc:  # a detector of the user's; what it says may be a secret
            raise InvalidPatch(
                f"the change cannot be kept: a detector raised {type(exc).__name__}"
            ) from exc
        if self.gate.checks:
            keys = [None] * len(texts)
            hearing = Hearing(candidates, verdicts, self.adapter, self.namespace, keys)
            yield from hearing.examining(self.gate.checks, self.gate.sensitive)
            verdicts = hearing.verdicts
        return [_instead(text, verdict) for text, verdict in zip(texts, verdicts, strict=True)]

    def _candidate(self, text: _Text) -> Candidate:
        value = str(text.value)
        # an address is kept where somebody writes it by hand, or a user told it
        said = _letters(value)
        explicit = self.told is None or bool(said and any(said in _letters(t) for t in self.told))
        return Candidate(text.label + value, KIND, {}, self.provenance, "user", explicit)


def _instead(text: _Text, verdict: Verdict) -> str | None:
    if verdict.action == "keep" and verdict.text is None:
        return None
    if verdict.action != "keep" or verdict.text is None or not isinstance(text.value, str):
        why = f"{verdict.reason}; leave it out (the gate's {verdict.check})"
        raise InvalidPatch(f"{text.what} cannot be kept: {why}")
    return verdict.text.removeprefix(text.label)


def _letters(text: str) -> str:
    """The letters and digits of a text, however it is spaced and written."""
    return "".join(filter(str.isalnum, text.casefold()))


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values in a document that hold no others, each with its names and indices."""
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(part, (*path, name))
    else:
        yield path, value


def _pointer(path: Iterable[Any]) -> str:
    return "".join(f"/{escaped(str(part))}" for part in path)


def _label(path: Sequence[Any]) -> str:
    """The name before a value: `4711` is no secret by itself, and `pin: 4711` is one."""
    return f"{next((part for part in reversed(path) if isinstance(part, str)), '')}: "


def _names_in(value: Any) -> Iterator[str]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    yield from value if isinstance(value, dict) else ()
    for part in parts:
        yield from _names_in(part)
