"""What is given to be kept, as the value of a memory: a sentence, fields, or what a schema says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from perdure.errors import ConfigurationError, InvalidValue
from perdure.memory.admission import REDACTED
from perdure.memory.store_adapter import PREVIOUS, SOURCE

Given = str | Mapping[str, Any] | BaseModel
"""A memory's text; its text and fields, as a dict or as an instance of the schema."""
TEXT: Final = "text"
OWN: Final = ("kind", PREVIOUS, SOURCE, REDACTED)
"""Fields of a value that say something about the memory, and that nobody gives."""
_FAULTS: Final = 5


class MemoryShape:
    """What the memories of a collection look like: a `text`, and fields beside it.

    Args:
        schema: A pydantic model with a field `text: str`; None: any fields.

    Raises:
        ConfigurationError: It is no model, has no such field, or one of the name of a field that
            every memory has.
    """

    def __init__(self, schema: type[BaseModel] | None = None) -> None:
        if schema is not None:
            _check_schema(schema)
        self.schema = schema

    def value(self, given: Given, former: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The text and the fields of a memory, in JSON's types; those of the former are kept.

        Args:
            given: What it is to say. A text leaves the fields as they are, a dict those that are
                not in it.
            former: The value of the memory that it takes the place of.

        Raises:
            InvalidValue: It has no text, or not what the schema asks for.
        """
        kept = {name: part for name, part in (former or {}).items() if name not in OWN}
        fields = self._fields(given)
        value = {**kept, **fields}
        if self.schema is not None:
            value = {**kept, **_fitted(self.schema, kept, fields)}
        text = value.get(TEXT)
        if not isinstance(text, str) or not text.strip():
            raise InvalidValue(f"text is {text!r:.80}; expected a sentence that can stand alone")
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidValue(
                f"the text {text!r:.80} is no Unicode text ({exc.reason}); remove the lone "
                "surrogate"
            ) from exc
        return {**value, TEXT: text.strip()}

    def _fields(self, given: Given) -> dict[str, Any]:
        if isinstance(given, str):
            return {TEXT: given}
        if isinstance(given, BaseModel):
            return given.model_dump(mode="json", exclude_unset=True)
        if not isinstance(given, Mapping):
            raise InvalidValue(
                f"the memory is {given!r:.80}; expected text, a dict with 'text', or a model"
            )
        for name in OWN:
            if name in given:
                raise InvalidValue(
                    f"the memory has a field {name!r}, which is set without being given: leave it "
                    "out, or name it otherwise"
                )
        return _named(self.schema, given)


def faults_of(exc: ValidationError) -> str:
    """What is wrong, by field, without the values: one may be a megabyte, or a secret."""
    found = exc.errors(include_url=False, include_context=False, include_input=False)
    said = [
        ".".join(str(part)[:60] for part in each["loc"]) + f": {each['msg'][:200]}"
        for each in found[:_FAULTS]
    ]
    return "; ".join(said) + ("; …" if len(found) > _FAULTS else "")


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, type) or not issubclass(schema, BaseModel):
        raise ConfigurationError(f"schema is {schema!r:.80}; expected a pydantic model's class")
    text = schema.model_fields.get(TEXT)
    if text is None or text.annotation is not str:
        raise ConfigurationError(
            f"the schema {schema.__name__} has no field 'text: str'; a memory needs one, which "
            "says it in a sentence: that is what is searched and compared"
        )
    for name in OWN:
        if name in schema.model_fields:
            raise ConfigurationError(
                f"the schema {schema.__name__} has a field {name!r}, which every memory has; name "
                "it otherwise"
            )


def _named(schema: type[BaseModel] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields by their names, where a schema gives them an alias."""
    fields = schema.model_fields if schema is not None else {}
    names = {
        alias: name
        for name, field in fields.items()
        for alias in (field.alias, field.validation_alias)
        if isinstance(alias, str)
    }
    return {names.get(name, name): part for name, part in given.items()}


def _fitted(
    schema: type[BaseModel], kept: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields that a schema accepts, as JSON, since that is what will be read back."""
    known = {name: part for name, part in kept.items() if name in schema.model_fields}
    try:
        read = to_json({**known, **fields})
        memory = schema.model_validate_json(read, by_alias=False, by_name=True)
    except ValidationError as exc:
        raise InvalidValue(
            f"the memory does not fit the schema {schema.__name__}: {faults_of(exc)}"
        ) from exc
    except ValueError as exc:
        raise InvalidValue(f"the memory is no JSON: {exc}") from exc
    return memory.model_dump(mode="json")
