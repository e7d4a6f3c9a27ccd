"""Pydantic models, dataclasses, enums and named tuples: taken apart and put together again.

No code of the class runs: no constructor, `__setattr__`, property, validator or `_missing_`. Only a
default that the class declares is computed, for a field that the stored data lacks.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType, UnionType
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

Kind = Literal["model", "dataclass", "enum", "namedtuple"]

_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was made by a class statement
_module_dict: Final[Callable[[Any], dict[str, Any]]] = vars(ModuleType)["__dict__"].__get__
_class_dict: Final[Callable[[Any], dict[str, Any]]] = vars(type)["__dict__"].__get__
_INSTANCE_HOOKS: Final = ("__setattr__", "__getattr__", "__getattribute__", "__del__")


class AttributeMismatch(ValueError):
    """The stored attributes are not those of the class as it is now."""


@functools.lru_cache(maxsize=1024)
def kind_of(cls: type) -> Kind | None:
    """Which kind of plain data class it is, if it is one."""
    bases = cls.__mro__
    if enum.Enum in bases:
        return "enum"
    if BaseModel in bases:
        return "model"
    own = [base for base in bases if base is not object]
    if tuple in bases and any("_fields" in _class_dict(base) for base in own):
        return "namedtuple"
    if all(base.__flags__ & _HEAP_TYPE for base in own) and any(
        "__dataclass_fields__" in _class_dict(base) for base in own
    ):
        return "dataclass"
    return None


def name_of(cls: type) -> tuple[str, str]:
    """The module and the name by which `find_class` finds a class."""
    name = cls.__qualname__
    if "[" in name and BaseModel in cls.__mro__:  # pydantic names no outer class before `Box[int]`
        origin = cls.__pydantic_generic_metadata__["origin"]  # type: ignore[attr-defined]
        if origin is not None:
            name = origin.__qualname__ + name[name.index("[") :]
    return cls.__module__, name


def find_class(module: str, name: str, *, load: bool) -> type | None:
    """A class by its module and `__qualname__`, or None; with `load` the module may be imported.

    Neither a module's `__getattr__` nor a lazy module is asked: only what is there is found, of a
    parametrised pydantic model, `Box[int]`, only what the process has made.
    """
    if load and module not in sys.modules:
        try:
            importlib.import_module(module)
        except Exception:  # whatever its code raises
            return None
    imported = sys.modules.get(module)
    if not issubclass(type(imported), ModuleType):
        return None
    generic, bracket, parameters = name.partition("[")
    names = _module_dict(imported)
    part: Any = None
    for step in generic.split("."):
        part = names.get(step)
        if not issubclass(type(part), type):
            return None
        names = _class_dict(part)
    if bracket:
        whole = part.__name__ + bracket + parameters
        made = [cls for cls in type.__subclasses__(part) if cls.__name__ == whole]
        part = made[0] if len(made) == 1 else None
    return cast("type | None", part)


def explain_missing_class(module: str, name: str) -> str:
    """Return a clause that says why `find_class` does not find a class."""
    imported = sys.modules.get(module)
    if not issubclass(type(imported), ModuleType):
        return f"this process has not imported the module {module!r}"
    names, path = _module_dict(imported), module
    for step in name.partition("[")[0].split("."):
        part = names.get(step)
        if not issubclass(type(part), type):
            return f"{path!r} has no class {step!r}"
        names, path = _class_dict(part), f"{path}.{step}"
    return "it is not found in its module"


# -- taking apart


def read_attributes(value: Any) -> dict[str, Any]:
    """The attributes that an instance holds: fields in the order of the class, then the others.

    Not among them are private attributes of models, values of `functools.cached_property`, which
    are computed again when asked for, and what `typing` notes on an instance of a generic class.
    """
    cls: Any = type(value)
    kind = kind_of(cls)
    if kind == "namedtuple":
        return dict(zip(cls._fields, value, strict=True))
    if kind == "enum":
        return {"value": value._value_}
    if kind == "model":
        fields = {n: value.__dict__[n] for n in cls.__pydantic_fields__ if n in value.__dict__}
        return fields | _sort_by_name(value.__pydantic_extra__)
    slots, own = _find_slots(cls)
    held = dict(own.__get__(value)) if own else {}
    for name in [*held]:
        declared = inspect.getattr_static(cls, name, None)
        if name == "__orig_class__" or isinstance(declared, functools.cached_property):
            del held[name]
    for name, slot in slots.items():
        try:
            held[name] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    fields = {f.name: held.pop(f.name) for f in dataclasses.fields(cls) if f.name in held}
    return fields | _sort_by_name(held)


def read_private_attributes(model: BaseModel) -> dict[str, Any]:
    """The private attributes of a pydantic model that are set."""
    private = _sort_by_name(model.__pydantic_private__)
    return {name: part for name, part in private.items() if part is not PydanticUndefined}


def _sort_by_name(held: Mapping[str, Any] | None) -> dict[str, Any]:
    """In the same order for equal contents, so that equal values give equal bytes."""
    return {name: held[name] for name in sorted(held)} if held else {}


@functools.lru_cache(maxsize=1024)
def _find_slots(cls: type) -> tuple[dict[str, MemberDescriptorType], GetSetDescriptorType | None]:
    """Where the instances of a class hold attributes: its slots, and their `__dict__`."""
    slots: dict[str, MemberDescriptorType] = {}
    own = None
    for base in reversed(cls.__mro__):
        for name, attribute in _class_dict(base).items():
            if type(attribute) is MemberDescriptorType:
                slots[name] = attribute
            elif name == "__dict__" and type(attribute) is GetSetDescriptorType:
                own = attribute
    return slots, own


# -- putting together


def rebuild_object(
    cls: Any,
    payload: Any,
    private: Mapping[str, Any] | None = None,
    fields_set: list[str] | None = None,
    *,
    dumped: bool = False,
) -> Any:
    """An instance of a plain data class, of its attributes by name, or an enum's value.

    Args:
        cls: The class.
        payload: The attributes.
        private: The private attributes of a pydantic model.
        fields_set: Its `model_fields_set`; None: all fields in the payload.
        dumped: Whether `model_dump()` gave the payload: models and dataclasses in it are dicts.

    Raises:
        Misfit: The class takes no such attributes.
    """
    kind = kind_of(cls)
    if kind == "enum":
        return _find_enum_member(cls, payload)
    if type(payload) is not dict or not all(type(name) is str for name in payload):
        raise AttributeMismatch(
            f"its attributes are a {type(payload).__name__}; expected a dict by name"
        )
    if kind == "model":
        return _rebuild_model(cls, payload, private or {}, fields_set, dumped)
    if kind == "namedtuple":
        fields = {**cls._field_defaults, **payload}
        if lacking := set(cls._fields) - fields.keys():
            raise AttributeMismatch(f"it lacks {sorted(lacking)}")
        return tuple.__new__(cls, [fields[name] for name in cls._fields])
    return _rebuild_dataclass(cls, payload)


def _find_enum_member(cls: Any, value: Any) -> Any:
    for like in (value, tuple(value)) if type(value) is list else (value,):
        for member in cls.__members__.values():
            own = object.__getattribute__(member, "_value_")
            if type(own) is type(like) and own == like:
                return member
    if enum.Flag in cls.__mro__ and type(value) is int and _is_safe_flag(cls):
        # what Flag itself does for a combination of members, even where a class overrides it
        return enum.Flag.__dict__["_missing_"].__func__(cls, value)
    raise AttributeMismatch(f"it has no member with the value {value!r}")


def _is_safe_flag(cls: Any) -> bool:
    """Whether `enum` makes a combination of a flag's members without code of the class."""
    own = [base for base in cls.__mro__ if base.__module__ not in ("enum", "builtins")]
    return cls._member_type_ in (object, int) and not any(
        hook in _class_dict(base) for base in own for hook in _INSTANCE_HOOKS
    )


def _rebuild_model(
    cls: Any,
    payload: dict[str, Any],
    private: Mapping[str, Any],
    fields_set: list[str] | None,
    dumped: bool,
) -> Any:
    fields: dict[str, Any] = {}
    rest = dict(payload)
    for name in cls.model_computed_fields if dumped else ():
        rest.pop(name, None)
    present = set()
    for name, info in cls.__pydantic_fields__.items():
        key = name if name in payload or not dumped else info.serialization_alias or info.alias
        if key in payload:
            part = rest.pop(key)
            fields[name] = _rebuild_dumped(info.annotation, part) if dumped else part
            present.add(name)
        elif not info.is_required():
            fields[name] = info.get_default(call_default_factory=True, validated_data=fields)
    extra = rest if cls.model_config.get("extra") == "allow" else None
    hidden = {
        name: private[name] if name in private else attribute.get_default()
        for name, attribute in cls.__private_attributes__.items()
    }
    hidden = {name: part for name, part in hidden.items() if part is not PydanticUndefined}
    made = object.__new__(cls)
    for slot, part in {
        "__dict__": fields,
        "__pydantic_extra__": extra,
        "__pydantic_fields_set__": present | {*(extra or ())}
        if fields_set is None
        else {*fields_set},
        "__pydantic_private__": hidden if cls.__private_attributes__ else None,
    }.items():
        BaseModel.__dict__[slot].__set__(made, part)
    return made


def _rebuild_dataclass(cls: Any, payload: dict[str, Any]) -> Any:
    slots, own = _find_slots(cls)
    held = dict(payload)
    for field in dataclasses.fields(cls):
        if field.name in held:
            continue
        if field.default_factory is not dataclasses.MISSING:
            held[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            if field.name in slots:  # elsewhere the class has it
                held[field.name] = field.default
        elif field.init:
            raise AttributeMismatch(f"it lacks {field.name!r}")
    made = object.__new__(cls)
    names = own.__get__(made) if own else {}
    for name, part in held.items():
        if name in slots:
            slots[name].__set__(made, part)
        else:
            names[name] = part
    return made


# -- what `model_dump()` took apart


def _rebuild_dumped(annotation: Any, value: Any) -> Any:
    """A field's value, with models and dataclasses put together as its annotation says."""
    if type(value) not in (dict, list):
        return value
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _rebuild_dumped(args[0], value)
    if origin in (Union, UnionType):
        tried = (_rebuild_dumped(arg, value) for arg in args)
        return next((made for made in tried if made is not value), value)
    if type(value) is dict:
        return _rebuild_dumped_dict(annotation, args, value)
    item = args[0] if args else Any
    if origin is tuple or annotation is tuple:
        kinds = args if len(args) == len(value) and args[-1] is not ... else [item] * len(value)
        return tuple(map(_rebuild_dumped, kinds, value))
    made = [_rebuild_dumped(item, part) for part in value]
    return made if any(a is not b for a, b in zip(made, value, strict=True)) else value


def _rebuild_dumped_dict(annotation: Any, args: tuple[Any, ...], value: dict[Any, Any]) -> Any:
    kind = kind_of(annotation) if isinstance(annotation, type) else None
    if kind == "model" and value.keys() == annotation.__pydantic_fields__.keys():
        return rebuild_object(annotation, value, dumped=True)
    if kind == "dataclass":
        hints = get_type_hints(annotation)
        names = [field.name for field in dataclasses.fields(annotation)]
        if value.keys() == set(names):
            return rebuild_object(
                annotation, {n: _rebuild_dumped(hints.get(n), value[n]) for n in names}
            )
    elif kind is None and len(args) == 2:
        made = {key: _rebuild_dumped(args[1], part) for key, part in value.items()}
        return made if any(made[key] is not value[key] for key in value) else value
    return value
