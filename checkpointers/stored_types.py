"""Register a program's own classes, and aliases for renamed classes, with a checkpointer.

A checkpointer uses only the types and aliases that the program passes in the `types` and `aliases`
arguments. The contents of a stored row never determine which module is imported or which function
is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from perdure.checkpointers.known_types import KNOWN, Name
from perdure.checkpointers.objects import (
    detect_enum_model_dataclass_or_namedtuple,
    find_class,
    get_module_and_class_name,
)
from perdure.errors import ConfigurationError, SerializationError

T = TypeVar("T")
Target = type | tuple[str, str] | str
Aliases = Mapping[Any, Target] | Sequence[tuple[Any, Target]]
_BUILTIN: Final = (str, int, float, bool, bytes, bytearray, list, tuple, dict, set, frozenset)
_NAME: Final = "(module, qualified name), or text like 'module:Name'"


@dataclass(frozen=True, slots=True)
class StoredType(Generic[T]):
    """Tells perdure how to convert instances of a class to a storable type, and back.

    `StoredType(Fraction, str, Fraction)` stores a `Fraction` as text. Instances of subclasses are
    rejected, because they would be loaded as instances of the registered class itself. To store
    instances of a subclass, register the subclass as well.

    Attributes:
        cls: The class.
        dump: A function that converts a value of the class to bytes, or to any value that perdure
            stores. Equal values should give equal results. Otherwise, each step stores the value
            again.
        load: A function that converts the result of `dump` back to the value. Each put calls
            `load` once for each value, and refuses a value that cannot be loaded.
        texts: A function that returns the texts in a value. `erase` removes the whole value if one
            of the texts quotes an erased message. If `texts` is None, `erase` does not search
            values of the class.
        name: The name under which values are stored, as a pair `(module, qualified name)` or as
            text like `"shop:Sheet"`. The default is the name of the class.
        stored_name: The name under which values are stored, as a pair `(module, qualified name)`.
    """

    cls: type[T]
    dump: Callable[[T], Any]
    load: Callable[[Any], T]
    texts: Callable[[T], Iterable[str]] | None = None
    name: Name | str = ""
    stored_name: Name = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.cls, type):
            raise ConfigurationError(f"the type to store is {self.cls!r:.80}; expected a class")
        for option in ("dump", "load", "texts"):
            function = getattr(self, option)
            if not callable(function) and (option != "texts" or function is not None):
                raise ConfigurationError(
                    f"the argument {option!r} of the StoredType for {self.cls.__qualname__} is "
                    f"{function!r:.80}; expected a function that accepts one argument, the value"
                )
        name = (
            parse_class_name("the argument 'name'", self.name)
            if self.name
            else get_module_and_class_name(self.cls)
        )
        object.__setattr__(self, "stored_name", name)
        _refuse_natively_storable_class(self.cls)

    @classmethod
    def by_serializer(
        cls,
        stored: type[T],
        serde: SerializerProtocol,
        texts: Callable[[T], Iterable[str]] | None = None,
    ) -> StoredType[T]:
        """Build a `StoredType` that uses a LangGraph serializer to store instances of a class.

        If `serde` is a `JsonPlusSerializer`, a copy of it whose allowlist contains only this class
        is used. With `pickle_fallback=True`, values that msgpack cannot encode are pickled, and
        loading a pickled value can execute arbitrary code from the database.
        """
        for method in ("dumps_typed", "loads_typed"):
            if not callable(getattr(serde, method, None)):
                raise ConfigurationError(
                    f"the serializer is {serde!r:.80}, which has no method {method}(); expected a "
                    "langgraph serializer, such as JsonPlusSerializer()"
                )
        if type(serde) is JsonPlusSerializer and isinstance(stored, type):
            pickles = serde.pickle_fallback
            serde = JsonPlusSerializer(pickle_fallback=pickles, allowed_msgpack_modules=[stored])
            forms = {"msgpack", "pickle"} if pickles else {"msgpack"}
        else:
            forms = set()

        def dump(value: T) -> list[Any]:
            form, data = serde.dumps_typed(value)
            return [form, bytes(data)]

        def load(payload: Any) -> Any:
            form, data = payload
            if forms and form not in forms:
                raise ValueError(
                    f"the stored value has the format {form!r}; expected one of {sorted(forms)}"
                )
            return serde.loads_typed((form, data))

        return cls(stored, dump, load, texts)

    def dump_value(self, value: T) -> Any:
        """Call `dump` and return its result. If `dump` fails, raise TypeError with the reason."""
        try:
            return self.dump(value)
        except Exception as exc:
            raise TypeError(
                f"the dump function of the registered type raised {_format_error(exc)}"
            ) from exc

    def load_value(self, payload: Any) -> T:
        """Call `load` and return its result.

        Raises:
            TypeError: `load` raised an error, or returned a value of another class.
        """
        try:
            value: Any = self.load(payload)
        except Exception as exc:
            raise TypeError(
                f"the load function of the registered type raised {_format_error(exc)}"
            ) from exc
        if type(value) is not self.cls:
            raise TypeError(
                f"the load function of the registered type returned a {type(value).__qualname__}; "
                f"expected a {self.cls.__qualname__}"
            )
        return value


class StoredTypes:
    """Looks up the types that a program has registered, and the aliases of renamed classes.

    Attributes:
        by_class: The registered types, by class.
        former: The old names that aliases give for each class, by the class's stored name.
    """

    def __init__(self, types: Sequence[StoredType[Any]] = (), aliases: Aliases = ()) -> None:
        self.by_class: dict[type, StoredType[Any]] = {}
        self._by_name: dict[Name, StoredType[Any]] = {}
        if not isinstance(types, list | tuple):
            raise ConfigurationError(
                f"the argument 'types' is {types!r:.80}; expected a list of StoredType instances"
            )
        for stored_type in types:
            if not isinstance(stored_type, StoredType):
                raise ConfigurationError(
                    f"the argument 'types' contains {stored_type!r:.80}; expected instances of "
                    "StoredType, like StoredType(cls, dump, load)"
                )
            if stored_type.cls in self.by_class or stored_type.stored_name in self._by_name:
                raise ConfigurationError(
                    f"the argument 'types' registers the class {stored_type.cls.__qualname__} or "
                    f"the name {_format_name(stored_type.stored_name)} twice; register each class "
                    "once, under a unique name"
                )
            self.by_class[stored_type.cls] = self._by_name[stored_type.stored_name] = stored_type
        self._targets = _map_aliases_to_final_classes(aliases, self._stored_name)
        self.former: dict[Name, list[Name]] = {}
        for old, target in self._targets.items():
            if (
                target not in self.by_class
                and detect_enum_model_dataclass_or_namedtuple(target) is None
            ):
                raise ConfigurationError(
                    f"the argument 'aliases' maps {_format_name(old)} to the class "
                    f"{target.__qualname__}, which is not a pydantic model, dataclass, enum or "
                    "named tuple; register the class with types=[...]"
                )
            if old in self._by_name:
                raise ConfigurationError(
                    f"{_format_name(old)} is both in aliases= and in types=; remove it from one of "
                    "them"
                )
            self.former.setdefault(self._stored_name(target), []).append(old)

    def _stored_name(self, cls: type) -> Name:
        """Return the `(module, qualified name)` pair under which a class is stored."""
        registered = self.by_class.get(cls)
        return get_module_and_class_name(cls) if registered is None else registered.stored_name

    @property
    def classes(self) -> list[type]:
        """The target classes of all aliases, except the classes that have their own `StoredType`.

        The checkpointer is allowed to instantiate the target classes when it loads a stored value.
        """
        return [cls for cls in self._targets.values() if cls not in self.by_class]

    @property
    def is_used(self) -> bool:
        """Whether the program has registered any types or aliases."""
        return bool(self.by_class or self._targets)

    @property
    def encoded_names_of_searchable_types(self) -> list[bytes]:
        """The UTF-8 encoded names of the stored classes that have a `texts` function.

        The returned names are qualified class names without the module. Old names from aliases are
        included.
        """
        names = [each.stored_name[1] for each in self.by_class.values() if each.texts is not None]
        names += [old[1] for old, cls in self._targets.items() if self._has_texts_function(cls)]
        return [name.encode() for name in names]

    def _has_texts_function(self, cls: type) -> bool:
        return cls in self.by_class and self.by_class[cls].texts is not None

    def find_alias_target(self, name: Name) -> type | None:
        """Look up a stored class name in the aliases. Return the mapped class, or None."""
        module, qualified_name = name
        target = self._targets.get(name)
        if target is None and "[" in qualified_name:  # a parametrised pydantic model
            generic, bracket, parameters = qualified_name.partition("[")
            target = self._targets.get((module, generic))
            if target is not None:
                new_module, new_name = get_module_and_class_name(target)
                parametrised = find_class(
                    new_module, f"{new_name}{bracket}{parameters}", load=False
                )
                return parametrised or target
        return target

    def find_registered_type(self, name: Name) -> StoredType[Any] | None:
        """Return the registered type whose current or earlier stored name is `name`, or None."""
        registered = self._by_name.get(name)
        if registered is None and (target := self._targets.get(name)) is not None:
            registered = self.by_class.get(target)
        return registered

    def build_former_class_name_maps(self) -> list[dict[Name, Name]]:
        """Return a list of dicts. Each dict maps current class names to former class names.

        Each dict contains every renamed class, with one of its former names.

        The first returned dict maps each class to its first former name, the second returned dict
        maps each class to its second former name, and so on. For example, class A has two former
        names and class B has one. In this example, the function returns two dicts. The first dict
        contains the first former name of class A, and the second dict contains the second former
        name. Both dicts contain the only former name of class B. The dicts are used to find items
        that were stored before a class was renamed. `Codec` encodes an object once for each dict,
        with the former class names from the dict. perdure then compares each encoding with the
        stored items.
        """
        depth = max(map(len, self.former.values()), default=0)
        return [
            {new: old_names[min(i, len(old_names) - 1)] for new, old_names in self.former.items()}
            for i in range(depth)
        ]

    def list_texts_of_registered_value(self, value: Any) -> Iterable[str] | None:
        """Return the texts in a value of a registered type, or None for a value of another type.

        Raises:
            SerializationError: The `texts` function raised an error, or did not return texts.
        """
        registered = self.by_class.get(type(value))
        if registered is None:
            return None
        if registered.texts is None:
            return []
        try:
            returned = registered.texts(value)
            texts = list(returned)
        except Exception as exc:
            raise _build_texts_function_error(
                registered, f"the function passed as texts= raised {_format_error(exc)}"
            ) from exc
        # Reject a single str, because `list()` splits a str into characters.
        if isinstance(returned, str):
            raise _build_texts_function_error(
                registered,
                "the function passed as texts= returned a string instead of a list of strings",
            )
        if not all(isinstance(text, str) for text in texts):
            raise _build_texts_function_error(
                registered,
                "the function passed as texts= returned a list with an element other than a string",
            )
        return texts


def parse_class_name(description_in_error: str, name: Any) -> Name:
    """Convert a class name, given as a pair or as a string such as 'module:Name', to a pair.

    Raises:
        ConfigurationError: The name is neither a pair of two texts nor text like 'module:Name'.
    """
    pair = name.split(":") if isinstance(name, str) else name
    if isinstance(pair, tuple | list) and len(pair) == 2:
        module, qualified = pair
        if all(isinstance(part, str) and part.strip() for part in (module, qualified)):
            return module, qualified
    raise ConfigurationError(f"{description_in_error} is {name!r:.80}; expected {_NAME}")


def replace_renamed_class_name(name: Name, new_names_by_old_name: Mapping[Name, Name]) -> Name:
    """Replace a class name with the name to which `new_names_by_old_name` maps it.

    A class name that is not a key of `new_names_by_old_name` is returned unchanged. The dicts built
    by `StoredTypes.build_former_class_name_maps` map a class's current name to an earlier one. A
    parametrised pydantic model, such as `Box[int]`, is looked up by the name of its generic class
    `Box`.
    """
    new_name = new_names_by_old_name.get(name)
    if new_name is None and "[" in name[1]:
        generic, bracket, parameters = name[1].partition("[")
        base = new_names_by_old_name.get((name[0], generic))
        new_name = None if base is None else (base[0], f"{base[1]}{bracket}{parameters}")
    return new_name or name


def _map_aliases_to_final_classes(
    aliases: Aliases, stored_name: Callable[[type], Name]
) -> dict[Name, type]:
    """Resolve each alias to the class at the end of its alias chain.

    Raises:
        ConfigurationError: The aliases form a cycle, one name has two targets, or a target is not
            a class that can be imported.
    """
    pairs = aliases.items() if isinstance(aliases, Mapping) else aliases
    if not isinstance(aliases, Mapping | list | tuple):
        raise ConfigurationError(
            f"the argument 'aliases' is {aliases!r:.80}; expected a dict that maps old class names "
            "to new classes"
        )
    steps: dict[Name, type | Name] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigurationError(
                f"the argument 'aliases' contains {pair!r:.80}; expected (old name, new class) "
                "pairs"
            )
        old, new = parse_class_name("a name in aliases", pair[0]), pair[1]
        target = new if isinstance(new, type) else parse_class_name("a target in aliases", new)
        if steps.setdefault(old, target) != target:
            raise ConfigurationError(
                f"the argument 'aliases' maps {_format_name(old)} to two classes, "
                f"{_format_target(steps[old])} and {_format_target(target)}; expected one class "
                "for each name"
            )
        if old in KNOWN:
            raise ConfigurationError(
                f"the argument 'aliases' contains {_format_name(old)}, which is defined by Python "
                "or by a library; only classes of your own application can have an alias"
            )
    return {old: _follow_alias_chain(old, steps, stored_name) for old in steps}


def _follow_alias_chain(
    old_name: Name, steps: Mapping[Name, type | Name], stored_name: Callable[[type], Name]
) -> type:
    """Follow the chain of aliases that starts at `old_name`, and return the class at its end."""
    chain: list[Name] = [old_name]
    while True:
        target = steps[chain[-1]]
        name = stored_name(target) if isinstance(target, type) else target
        if name in chain:
            cycle = " to ".join(map(_format_name, [*chain, name]))
            raise ConfigurationError(f"the aliases form a cycle: {cycle}; remove one of them")
        if name in steps:
            chain.append(name)
        elif isinstance(target, type):
            return target
        else:
            return _import_alias_target(old_name, name)


def _import_alias_target(old_name: Name, target_name: Name) -> type:
    """Import the class to which an alias points."""
    try:
        importlib.import_module(target_name[0])
    except Exception as exc:
        raise ConfigurationError(
            f"the argument 'aliases' maps {_format_name(old_name)} to {_format_name(target_name)}, "
            f"whose module cannot be imported: {_format_error(exc)}"
        ) from exc
    cls = find_class(*target_name, load=False)
    if cls is None:
        raise ConfigurationError(
            f"the argument 'aliases' maps {_format_name(old_name)} to {_format_name(target_name)}, "
            "but this class does not exist"
        )
    return cls


def _refuse_natively_storable_class(cls: Any) -> None:
    """Raise ConfigurationError if a class must not be registered.

    A class must not be registered if perdure can store its instances without a `StoredType`.
    """
    if (
        cls in _BUILTIN
        or cls is type(None)
        or get_module_and_class_name(cls) in KNOWN
        or issubclass(cls, BaseMessage)
        or detect_enum_model_dataclass_or_namedtuple(cls) is not None
    ):
        raise ConfigurationError(
            f"the class {cls.__qualname__} does not need a StoredType, because perdure stores its "
            "values without registration; remove the StoredType from types="
        )


def _build_texts_function_error(registered: StoredType[Any], failure: str) -> SerializationError:
    return SerializationError(
        f"{failure}, so erase() cannot find the values of the registered type "
        f"{_format_name(registered.stored_name)} that quote erased messages, and nothing was "
        "erased; correct the function, and erase again"
    )


def _format_name(name: Name) -> str:
    return ".".join(name)


def _format_target(target: type | Name) -> str:
    return _format_name(get_module_and_class_name(target) if isinstance(target, type) else target)


def _format_error(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


NO_TYPES: Final = StoredTypes()
