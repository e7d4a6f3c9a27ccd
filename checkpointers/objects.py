"""Read and restore the attributes of pydantic models, dataclasses, enums and named tuples.

Reading and rebuilding an object never runs code defined by its class, such as a constructor,
`__setattr__`, a property, a validator or `_missing_`. While an object is read or rebuilt, the
class's default factories are the only code of the class that may run. The default factories fill
fields and private attributes that are missing from the stored data.
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

# CPython's type flag `Py_TPFLAGS_HEAPTYPE`, which is set for classes created by Python code.
_HEAP_TYPE: Final = 1 << 9
_module_dict: Final[Callable[[Any], dict[str, Any]]] = vars(ModuleType)["__dict__"].__get__
_class_dict: Final[Callable[[Any], dict[str, Any]]] = vars(type)["__dict__"].__get__
_INSTANCE_HOOKS: Final = ("__setattr__", "__getattr__", "__getattribute__", "__del__")


class AttributeMismatch(ValueError):
    """Raised if stored attributes do not match the current definition of the object's class."""


@functools.lru_cache(maxsize=1024)
def detect_enum_model_dataclass_or_namedtuple(cls: type) -> Kind | None:
    """Return the kind of a class: enum, pydantic model, dataclass or named tuple.

    The result is `"enum"`, `"model"`, `"dataclass"`, `"namedtuple"`, or None for any other class.
    For a dataclass that inherits from a built-in class other than `object`, the result is None,
    because the attributes of an instance do not contain all of its data.
    """
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


def get_module_and_class_name(cls: type) -> tuple[str, str]:
    """Return the module name and the qualified name by which `find_class` can find a class."""
    name = cls.__qualname__
    # Pydantic omits the enclosing classes from the qualified name of a parametrised model such as
    # `Box[int]`. Add the names of the enclosing classes to `name`.
    if "[" in name and BaseModel in cls.__mro__:
        origin = cls.__pydantic_generic_metadata__["origin"]  # type: ignore[attr-defined]
        if origin is not None:
            name = origin.__qualname__ + name[name.index("[") :]
    return cls.__module__, name


def find_class(module: str, name: str, *, load: bool) -> type | None:
    """Find a class by its module and `__qualname__`; return None if there is no such class.

    If the module is already loaded, `find_class` does not run any code of the module. For example,
    `find_class` neither calls the module's `__getattr__` nor triggers lazy loading. A parametrised
    pydantic model such as `Box[int]` is found only if this process has already created the
    parametrised class.

    Args:
        module: The name of the module.
        name: The qualified name of the class.
        load: Whether the module is imported if it is not loaded.
    """
    if load and module not in sys.modules:
        try:
            importlib.import_module(module)
        # Catch all exceptions, because importing a module runs its code, which can raise any error.
        except Exception:
            return None
    imported = sys.modules.get(module)
    if not issubclass(type(imported), ModuleType):
        return None
    generic, bracket, parameters = name.partition("[")
    namespace = _module_dict(imported)
    found_class: Any = None
    for name_part in generic.split("."):
        found_class = namespace.get(name_part)
        if not issubclass(type(found_class), type):
            return None
        namespace = _class_dict(found_class)
    if bracket:
        full_name = found_class.__name__ + bracket + parameters
        created = [cls for cls in type.__subclasses__(found_class) if cls.__name__ == full_name]
        found_class = created[0] if len(created) == 1 else None
    return cast("type | None", found_class)


def explain_missing_class(module: str, name: str) -> str:
    """Return the reason why `find_class` cannot find a class, for use in an error message."""
    imported = sys.modules.get(module)
    if not issubclass(type(imported), ModuleType):
        return f"this process has not imported the module {module!r}"
    namespace, path = _module_dict(imported), module
    for name_part in name.partition("[")[0].split("."):
        found_class = namespace.get(name_part)
        if not issubclass(type(found_class), type):
            return f"{path!r} has no class {name_part!r}"
        namespace, path = _class_dict(found_class), f"{path}.{name_part}"
    return "the class was not found in its module"


# -- reading the attributes of an object


def read_instance_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object as a dict, keyed by attribute name.

    The object is a pydantic model, a dataclass instance, an enum member or a named tuple.

    In the returned dict, the class's fields come first, in definition order, and other attributes
    follow, sorted by name. For a member of an enum, the returned dict has the single key `value`.

    The returned dict does not contain the private attributes of models. Values that
    `functools.cached_property` has cached are left out, because they are recomputed on access. The
    returned dict does not contain the attribute `__orig_class__`, which `typing` sets on instances
    of generic classes.
    """
    cls: Any = type(value)
    kind = detect_enum_model_dataclass_or_namedtuple(cls)
    if kind == "namedtuple":
        return dict(zip(cls._fields, value, strict=True))
    if kind == "enum":
        return {"value": value._value_}
    if kind == "model":
        fields = {n: value.__dict__[n] for n in cls.__pydantic_fields__ if n in value.__dict__}
        return fields | _sort_by_name(value.__pydantic_extra__)
    slots, dict_descriptor = _find_slot_descriptors_and_dict_descriptor(cls)
    attributes = dict(dict_descriptor.__get__(value)) if dict_descriptor else {}
    for name in [*attributes]:
        declared = inspect.getattr_static(cls, name, None)
        if name == "__orig_class__" or isinstance(declared, functools.cached_property):
            del attributes[name]
    for name, slot in slots.items():
        try:
            attributes[name] = slot.__get__(value)
        # The slot has no value.
        except AttributeError:
            continue
    fields = {
        f.name: attributes.pop(f.name) for f in dataclasses.fields(cls) if f.name in attributes
    }
    return fields | _sort_by_name(attributes)


def read_private_attributes(model: BaseModel) -> dict[str, Any]:
    """Return the private attributes of a pydantic model by name, omitting unset attributes."""
    private = _sort_by_name(model.__pydantic_private__)
    return {name: value for name, value in private.items() if value is not PydanticUndefined}


def _sort_by_name(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of a dict with sorted keys, so that equal values have equal encodings."""
    return {name: attributes[name] for name in sorted(attributes)} if attributes else {}


@functools.lru_cache(maxsize=1024)
def _find_slot_descriptors_and_dict_descriptor(
    cls: type,
) -> tuple[dict[str, MemberDescriptorType], GetSetDescriptorType | None]:
    """Return a class's slot descriptors by name, and its `__dict__` descriptor if it has one."""
    slots: dict[str, MemberDescriptorType] = {}
    dict_descriptor = None
    for base in reversed(cls.__mro__):
        for name, attribute in _class_dict(base).items():
            if type(attribute) is MemberDescriptorType:
                slots[name] = attribute
            elif name == "__dict__" and type(attribute) is GetSetDescriptorType:
                dict_descriptor = attribute
    return slots, dict_descriptor


# -- rebuilding an object


def rebuild_object_of_class(
    cls: Any,
    payload: Any,
    private_attributes: Mapping[str, Any] | None = None,
    model_fields_set: list[str] | None = None,
    *,
    is_model_dump: bool = False,
) -> Any:
    """Rebuild a model, dataclass instance or named tuple, or look up an enum member by its value.

    Args:
        cls: The class.
        payload: The attributes by name, or the value of a member of an enum.
        private_attributes: The private attributes of a pydantic model.
        model_fields_set: The `model_fields_set` of a pydantic model; None means all fields in
            `payload`.
        is_model_dump: Whether the payload is the result of `model_dump()`, in which nested models
            and dataclasses are dicts.

    Raises:
        AttributeMismatch: The class does not have these attributes.
    """
    kind = detect_enum_model_dataclass_or_namedtuple(cls)
    if kind == "enum":
        return _find_enum_member(cls, payload)
    if type(payload) is not dict or not all(type(name) is str for name in payload):
        raise AttributeMismatch(
            f"the object's stored attributes are a {type(payload).__name__}; expected a dict of "
            "attribute names and values"
        )
    if kind == "model":
        return _rebuild_pydantic_model(
            cls, payload, private_attributes or {}, model_fields_set, is_model_dump
        )
    if kind == "namedtuple":
        fields = {**cls._field_defaults, **payload}
        if missing_fields := set(cls._fields) - fields.keys():
            raise AttributeMismatch(
                f"the stored value lacks the required fields {sorted(missing_fields)}"
            )
        return tuple.__new__(cls, [fields[name] for name in cls._fields])
    return _rebuild_dataclass(cls, payload)


def _find_enum_member(cls: Any, value: Any) -> Any:
    """Return the enum member with the given value.

    A `Flag` value can combine several members.
    """
    # The tuple value of an enum member may have been stored as a list. Compare a list with the
    # members' values twice, as a list and as a tuple.
    for candidate in (value, tuple(value)) if type(value) is list else (value,):
        for member in cls.__members__.values():
            member_value = object.__getattribute__(member, "_value_")
            if type(member_value) is type(candidate) and member_value == candidate:
                return member
    if (
        enum.Flag in cls.__mro__
        and type(value) is int
        and _can_combine_enum_flags_without_running_class_code(cls)
    ):
        # Call `enum.Flag._missing_` directly, because the class could override `_missing_`.
        return enum.Flag.__dict__["_missing_"].__func__(cls, value)
    raise AttributeMismatch(f"the enum has no member with the value {value!r}")


def _can_combine_enum_flags_without_running_class_code(flag_class: Any) -> bool:
    """Return whether an enum's flags can be combined without running the enum class's own code."""
    own_bases = [base for base in flag_class.__mro__ if base.__module__ not in ("enum", "builtins")]
    return flag_class._member_type_ in (object, int) and not any(
        hook in _class_dict(base) for base in own_bases for hook in _INSTANCE_HOOKS
    )


def _rebuild_pydantic_model(
    cls: Any,
    payload: dict[str, Any],
    private_attributes: Mapping[str, Any],
    model_fields_set: list[str] | None,
    is_model_dump: bool,
) -> Any:
    """Rebuild a pydantic model by setting its attributes, with defaults for missing fields."""
    fields: dict[str, Any] = {}
    unused = dict(payload)
    for name in cls.model_computed_fields if is_model_dump else ():
        unused.pop(name, None)
    set_names = set()
    for name, info in cls.__pydantic_fields__.items():
        key = (
            name if name in payload or not is_model_dump else info.serialization_alias or info.alias
        )
        if key in payload:
            value = unused.pop(key)
            fields[name] = _rebuild_dumped_value(info.annotation, value) if is_model_dump else value
            set_names.add(name)
        elif not info.is_required():
            fields[name] = info.get_default(call_default_factory=True, validated_data=fields)
    extra = unused if cls.model_config.get("extra") == "allow" else None
    private_values = {
        name: private_attributes[name] if name in private_attributes else attribute.get_default()
        for name, attribute in cls.__private_attributes__.items()
    }
    private_values = {
        name: value for name, value in private_values.items() if value is not PydanticUndefined
    }
    instance = object.__new__(cls)
    for slot, value in {
        "__dict__": fields,
        "__pydantic_extra__": extra,
        "__pydantic_fields_set__": set_names | {*(extra or ())}
        if model_fields_set is None
        else {*model_fields_set},
        "__pydantic_private__": private_values if cls.__private_attributes__ else None,
    }.items():
        BaseModel.__dict__[slot].__set__(instance, value)
    return instance


def _rebuild_dataclass(cls: Any, payload: dict[str, Any]) -> Any:
    """Rebuild a dataclass instance from stored attributes, with defaults for missing fields."""
    slots, dict_descriptor = _find_slot_descriptors_and_dict_descriptor(cls)
    attributes = dict(payload)
    for field in dataclasses.fields(cls):
        if field.name in attributes:
            continue
        if field.default_factory is not dataclasses.MISSING:
            attributes[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            # If the field is stored in a slot, the default must be set explicitly. If the field is
            # not stored in a slot, the class attribute provides the default.
            if field.name in slots:
                attributes[field.name] = field.default
        elif field.init:
            raise AttributeMismatch(f"the stored value lacks the required field {field.name!r}")
    instance = object.__new__(cls)
    instance_dict = dict_descriptor.__get__(instance) if dict_descriptor else {}
    for name, value in attributes.items():
        if name in slots:
            slots[name].__set__(instance, value)
        else:
            instance_dict[name] = value
    return instance


# -- rebuilding the result of `model_dump()`


def _rebuild_dumped_value(annotation: Any, value: Any) -> Any:
    """Rebuild models and dataclasses in a value that `model_dump()` has converted to plain data.

    The field's annotation determines the classes of the rebuilt objects.
    """
    if type(value) not in (dict, list):
        return value
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _rebuild_dumped_value(args[0], value)
    if origin in (Union, UnionType):
        candidates = (_rebuild_dumped_value(arg, value) for arg in args)
        return next((rebuilt for rebuilt in candidates if rebuilt is not value), value)
    if type(value) is dict:
        return _rebuild_dumped_dict_as_annotated(annotation, args, value)
    item_type = args[0] if args else Any
    if origin is tuple or annotation is tuple:
        item_types = (
            args if len(args) == len(value) and args[-1] is not ... else [item_type] * len(value)
        )
        return tuple(map(_rebuild_dumped_value, item_types, value))
    rebuilt = [_rebuild_dumped_value(item_type, element) for element in value]
    return rebuilt if any(a is not b for a, b in zip(rebuilt, value, strict=True)) else value


def _rebuild_dumped_dict_as_annotated(
    annotation: Any, args: tuple[Any, ...], value: dict[Any, Any]
) -> Any:
    """Rebuild a model, dataclass or dict from its `model_dump()` output and the field's annotation.

    If nothing in `value` needs to be rebuilt, `value` itself is returned.
    """
    kind = (
        detect_enum_model_dataclass_or_namedtuple(annotation)
        if isinstance(annotation, type)
        else None
    )
    if kind == "model" and value.keys() == annotation.__pydantic_fields__.keys():
        return rebuild_object_of_class(annotation, value, is_model_dump=True)
    if kind == "dataclass":
        hints = get_type_hints(annotation)
        names = [field.name for field in dataclasses.fields(annotation)]
        if value.keys() == set(names):
            return rebuild_object_of_class(
                annotation, {n: _rebuild_dumped_value(hints.get(n), value[n]) for n in names}
            )
    elif kind is None and len(args) == 2:
        rebuilt = {key: _rebuild_dumped_value(args[1], entry) for key, entry in value.items()}
        return rebuilt if any(rebuilt[key] is not value[key] for key in value) else value
    return value
