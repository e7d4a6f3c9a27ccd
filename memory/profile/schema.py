"""The schema of a profile: what it accepts, its defaults, and how a model is told of it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from pydantic import BaseModel, RootModel, ValidationError

from perdure.errors import ConfigurationError, InvalidPatch
from perdure.memory.profile.documents import Document, escaped, shown

M = TypeVar("M", bound=BaseModel)
_MOST_FAULTS: Final = 5  # that a message tells of


@dataclass(frozen=True, slots=True)
class Section:
    """A field of a profile, without what it holds.

    Attributes:
        name: The field's.
        about: What the schema says of it.
        chars: Characters of its JSON.
    """

    name: str
    about: str
    chars: int


class Shape(Generic[M]):
    """A pydantic model, as the schema of documents.

    Args:
        schema: A model, whose fields are written under the names that they are read by.
        default: What holds while nothing is known; None: what the schema's own defaults make.

    Raises:
        ConfigurationError: It is no such model, or the default is none of it.
    """

    def __init__(self, schema: type[M], default: M | None = None) -> None:
        if not isinstance(schema, type) or not issubclass(schema, BaseModel):
            raise ConfigurationError(
                f"the schema is {schema!r:.80}; expected a pydantic model: a class of BaseModel"
            )
        if issubclass(schema, RootModel):
            raise ConfigurationError(
                f"the schema {schema.__name__} is a RootModel; expected one with fields"
            )
        if default is not None and not isinstance(default, schema):
            raise ConfigurationError(
                f"default is {default!r:.80}; expected a {schema.__name__}, or None"
            )
        self.schema = schema
        self.json_schema: Document = _json_schema(schema, "validation")
        _check_names(schema.__name__, self.json_schema, _json_schema(schema, "serialization"))
        self._default = default
        self._check_default()

    @property
    def name(self) -> str:
        """The schema's."""
        return self.schema.__name__

    def default(self) -> M | None:
        """What holds while nothing is known; None: the schema asks for what nobody said."""
        if self._default is not None:
            return self._default.model_copy(deep=True)
        try:
            return self.schema()
        except ValidationError:
            return None

    def _check_default(self) -> None:
        default = self.default()
        try:
            if default is not None:
                self.validated(self.dumped(default))
        except InvalidPatch as exc:
            raise ConfigurationError(f"the default of a profile is {exc}") from exc

    def blank(self) -> Document:
        """The document from which the first change starts: all defaults that there are."""
        default = self.default()
        return self.dumped(self.schema.model_construct() if default is None else default)

    def dumped(self, profile: BaseModel) -> Document:
        """A profile as a document.

        Raises:
            ConfigurationError: The schema cannot write it.
        """
        try:
            return profile.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)
        except Exception as exc:  # whatever a serializer of its own raises
            raise ConfigurationError(
                f"the schema {self.name} cannot write a profile as JSON: {exc!s:.300}"
            ) from exc

    def validated(self, document: Document) -> M:
        """The profile that a document is: strictly, no text for a number and no unknown field.

        Raises:
            InvalidPatch: It is none; the fields that are wrong are named.
        """
        try:
            profile = self.schema.model_validate_json(json.dumps(document), strict=True)
        except ValidationError as exc:
            raise InvalidPatch(f"not as {self.name} asks for: {_faults(exc)}") from exc
        except Exception as exc:  # whatever a validator of its own raises
            raise InvalidPatch(
                f"a validator of {self.name} raised {type(exc).__name__}: {exc!s:.300}"
            ) from exc
        unknown = list(_unknown(document, self.dumped(profile), ""))
        if unknown:
            raise InvalidPatch(f"not as {self.name} asks for: {'; '.join(unknown[:_MOST_FAULTS])}")
        return profile

    def filled(self, document: Document) -> tuple[M, Document]:
        """The profile that a document is, and the document with the defaults of what it lacks.

        Raises:
            InvalidPatch: It is none.
        """
        profile = self.validated(document)
        filled: Document = _filled(document, self.dumped(profile))
        return profile, filled

    def _about(self, name: str) -> str:
        field = self.json_schema.get("properties", {}).get(name, {})
        named = str(field.get("$ref", "")).rpartition("/")[2]
        definition = self.json_schema.get("$defs", {}).get(named, {})
        return str(field.get("description") or definition.get("description", ""))

    def outline(self, document: Mapping[str, Any]) -> list[Section]:
        """The fields of a document, and those of the schema that it lacks."""
        names = dict.fromkeys((*self.json_schema.get("properties", {}), *document))
        values = ((name, document.get(name)) for name in names)
        return [Section(name, self._about(name), _chars(value)) for name, value in values]

    def shown(self, names: Collection[str] | None = None) -> Document:
        """The JSON schema; with names, of these fields only."""
        if names is None:
            return self.json_schema
        properties = self.json_schema.get("properties", {})
        out = {
            **self.json_schema,
            "properties": {name: properties[name] for name in properties if name in names},
            "required": [name for name in self.json_schema.get("required", ()) if name in names],
        }
        definitions = out.pop("$defs", {})
        used: dict[str, Any] = {}
        _gather(out, definitions, used)
        return {**out, "$defs": used} if used else out


def _chars(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False))


def _json_schema(schema: type[BaseModel], mode: Any) -> Document:
    try:
        out: Document = schema.model_json_schema(mode=mode)
    except Exception as exc:  # PydanticInvalidForJsonSchema, or a name that is not defined
        raise ConfigurationError(
            f"the schema {schema.__name__} has no JSON schema, which it needs: {exc!s:.300}"
        ) from exc
    if "$ref" in out:  # of a schema with itself within it
        named = out.pop("$ref").rpartition("/")[2]
        out = {**out["$defs"][named], **out}
    return out


def _check_names(name: str, read: Document, written: Document) -> None:
    """Refuse fields that are left out of what is written, or written under another name."""
    for inner, fields in {name: read, **read.get("$defs", {})}.items():
        kept = written if fields is read else written.get("$defs", {}).get(inner, {})
        lost = fields.get("properties", {}).keys() - kept.get("properties", {}).keys()
        if lost:
            raise ConfigurationError(
                f"the schema {name} would lose the fields {sorted(lost)} of {inner}: they are "
                "excluded, or written under another name than they are read by; use one alias"
            )


def _faults(exc: ValidationError) -> str:
    faults = exc.errors(include_url=False, include_context=False)
    told = [_fault(each) for each in faults[:_MOST_FAULTS]]
    if len(faults) > _MOST_FAULTS:
        told.append(f"and {len(faults) - _MOST_FAULTS} more")
    return "; ".join(told)


def _fault(fault: Any) -> str:
    path = "".join(f"/{escaped(str(part))}" for part in fault["loc"])
    said = f"{path or 'the profile'!r}: {fault['msg']}"
    if fault["type"] == "missing":
        return said
    return f"{said} (it is {shown(fault['input'])})"


def _unknown(given: Any, taken: Any, path: str) -> Iterator[str]:
    """The fields of a document of which nothing is left in the profile that was made of it."""
    if isinstance(given, dict) and isinstance(taken, dict):
        for name, part in given.items():
            at = f"{path}/{escaped(name)}"
            if name not in taken:
                known = ", ".join(map(repr, list(taken)[:20])) or "none"
                yield f"{at!r:.200} is an unknown field; expected one of {known}"
            else:
                yield from _unknown(part, taken[name], at)
    elif isinstance(given, list) and isinstance(taken, list) and len(given) == len(taken):
        for number, (part, other) in enumerate(zip(given, taken, strict=True)):
            yield from _unknown(part, other, f"{path}/{number}")


def _filled(given: Any, full: Any) -> Any:
    if isinstance(given, dict) and isinstance(full, dict):
        both = {name: _filled(part, full[name]) for name, part in given.items()}
        return {name: both.get(name, part) for name, part in full.items()}
    if isinstance(given, list) and isinstance(full, list) and len(given) == len(full):
        return list(map(_filled, given, full))
    return given


def _gather(schema: Any, definitions: Document, used: Document) -> None:
    """Note the definitions that a part of a JSON schema refers to, and those refer to."""
    if isinstance(schema, list):
        for part in schema:
            _gather(part, definitions, used)
    elif isinstance(schema, dict):
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        if name in definitions and name not in used:
            used[name] = definitions[name]
            _gather(definitions[name], definitions, used)
        for part in schema.values():
            _gather(part, definitions, used)
