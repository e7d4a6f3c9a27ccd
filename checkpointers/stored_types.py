"""What a program tells a checkpointer of its classes: types to store, and names of renamed classes.

Only functions and classes that the program names here are used for a stored value. A stored row
never decides what is imported or called.
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
from perdure.checkpointers.objects import find_class, kind_of, name_of
from perdure.errors import ConfigurationError, SerializationError

T = TypeVar("T")
Target = type | tuple[str, str] | str
Aliases = Mapping[Any, Target] | Sequence[tuple[Any, Target]]
_BUILTIN: Final = (str, int, float, bool, bytes, bytearray, list, tuple, dict, set, frozenset)
_NAME: Final = "(module, qualified name), or text like 'module:Name'"


@dataclass(frozen=True, slots=True)
class StoredType(Generic[T]):
    """A way to store the values of a class that perdure does not store by itself.

    `StoredType(Fraction, str, Fraction)` stores the text of a `Fraction`. A value whose type is a
    subclass is refused, since it would come back as the base class; register the subclass as well.

    Attributes:
        cls: The class.
        dump: Returns bytes, or any value that perdure stores, for a value of the class. Values
            that are equal have to give equal bytes, else each step stores the value again.
        load: Returns the value for what `dump` returned. Each put calls it once for each value, so
            that a value that would not come back is refused.
        texts: Returns the texts in a value, in which `erase` then looks for what a message said;
            the whole value is removed if one of them quotes it. None: `erase` does not look into
            such values.
        name: The name under which values are stored, `(module, qualified name)` or text like
            `"shop:Sheet"`; by default that of the class.
        stored_name: This name as a pair.
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
                    f"{option} of the stored type {self.cls.__qualname__} is {function!r:.80}; "
                    "expected a function of one value"
                )
        name = parse_name("name", self.name) if self.name else name_of(self.cls)
        object.__setattr__(self, "stored_name", name)
        _check_is_unknown(self.cls)

    @classmethod
    def by_serializer(
        cls,
        stored: type[T],
        serde: SerializerProtocol,
        texts: Callable[[T], Iterable[str]] | None = None,
    ) -> StoredType[T]:
        """Return a way to store a class with a serializer of langgraph, for that class alone.

        A `JsonPlusSerializer` may rebuild only this class, whatever its own allowlist says. With
        `pickle_fallback=True` a value is stored by pickle: reading it runs code from the file.
        """
        for method in ("dumps_typed", "loads_typed"):
            if not callable(getattr(serde, method, None)):
                raise ConfigurationError(
                    f"the serializer is {serde!r:.80}, without {method}(); expected one of "
                    "langgraph, such as JsonPlusSerializer()"
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
                raise ValueError(f"it was stored in the form {form!r}")
            return serde.loads_typed((form, data))

        return cls(stored, dump, load, texts)

    def dump_value(self, value: T) -> Any:
        """Return what `dump` returns; a TypeError says how it failed."""
        try:
            return self.dump(value)
        except Exception as exc:
            raise TypeError(f"dump of the registered type raised {_told(exc)}") from exc

    def load_value(self, payload: Any) -> T:
        """Return what `load` returns, of the class itself; a TypeError says how it failed."""
        try:
            value: Any = self.load(payload)
        except Exception as exc:
            raise TypeError(f"load of the registered type raised {_told(exc)}") from exc
        if type(value) is not self.cls:
            raise TypeError(
                f"load of the registered type returned a {type(value).__qualname__}; expected a "
                f"{self.cls.__qualname__}"
            )
        return value


class StoredTypes:
    """The types that a program registered, and the classes that it gives for stored names.

    Attributes:
        by_class: The registered types, by class.
        former: For classes that an alias leads to, the names under which they were stored before.
    """

    def __init__(self, types: Sequence[StoredType[Any]] = (), aliases: Aliases = ()) -> None:
        self.by_class: dict[type, StoredType[Any]] = {}
        self._by_name: dict[Name, StoredType[Any]] = {}
        if not isinstance(types, list | tuple):
            raise ConfigurationError(f"types is {types!r:.80}; expected a list of StoredType")
        for each in types:
            if not isinstance(each, StoredType):
                raise ConfigurationError(
                    f"types has {each!r:.80}; expected StoredType(cls, dump, load)"
                )
            if each.cls in self.by_class or each.stored_name in self._by_name:
                raise ConfigurationError(
                    f"types registers {_dotted(each.stored_name)} twice, for "
                    f"{each.cls.__qualname__}; register each class once, under a name of its own"
                )
            self.by_class[each.cls] = self._by_name[each.stored_name] = each
        self._targets = _resolve_aliases(aliases, self._stored_name)
        self.former: dict[Name, list[Name]] = {}
        for old, target in self._targets.items():
            if target not in self.by_class and kind_of(target) is None:
                raise ConfigurationError(
                    f"aliases leads from {_dotted(old)} to {target.__qualname__}, which is no "
                    "pydantic model, dataclass, enum or named tuple; register it with types=[...]"
                )
            if old in self._by_name:
                raise ConfigurationError(
                    f"aliases has {_dotted(old)}, which types registers; leave one of both out"
                )
            self.former.setdefault(self._stored_name(target), []).append(old)

    def _stored_name(self, cls: type) -> Name:
        """Return the name under which values of a class are stored now."""
        registered = self.by_class.get(cls)
        return name_of(cls) if registered is None else registered.stored_name

    @property
    def classes(self) -> list[type]:
        """The plain data classes to which aliases lead, which may be rebuilt."""
        return [cls for cls in self._targets.values() if cls not in self.by_class]

    @property
    def is_used(self) -> bool:
        """Whether the program registered a type or gave an alias."""
        return bool(self.by_class or self._targets)

    @property
    def names_with_texts(self) -> list[bytes]:
        """The stored names of the types that give the texts in their values, encoded."""
        names = [each.stored_name[1] for each in self.by_class.values() if each.texts is not None]
        names += [old[1] for old, cls in self._targets.items() if self._gives_texts(cls)]
        return [name.encode() for name in names]

    def _gives_texts(self, cls: type) -> bool:
        return cls in self.by_class and self.by_class[cls].texts is not None

    def find_alias(self, name: Name) -> type | None:
        """Return the class that the program gives for a stored name."""
        module, whole = name
        target = self._targets.get(name)
        if target is None and "[" in whole:  # a parametrised pydantic model
            generic, bracket, parameters = whole.partition("[")
            target = self._targets.get((module, generic))
            if target is not None:
                new_module, new_name = name_of(target)
                found = find_class(new_module, f"{new_name}{bracket}{parameters}", load=False)
                return found or target
        return target

    def find_registered(self, name: Name) -> StoredType[Any] | None:
        """Return the registered type whose values are stored under a name, or were."""
        found = self._by_name.get(name)
        if found is None and (target := self._targets.get(name)) is not None:
            found = self.by_class.get(target)
        return found

    def former_names(self) -> list[dict[Name, Name]]:
        """Return tables from present names to earlier ones, one table for each earlier name."""
        depth = max(map(len, self.former.values()), default=0)
        return [
            {new: olds[min(i, len(olds) - 1)] for new, olds in self.former.items()}
            for i in range(depth)
        ]

    def texts_of(self, value: Any) -> Iterable[str] | None:
        """Return the texts in a value of a registered type; None: its type is not registered.

        Raises:
            SerializationError: The `texts` of the type raised, or returned something else.
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
            raise _texts_error(registered, f"raised {_told(exc)}") from exc
        if isinstance(returned, str):  # its characters are texts too, and quote nothing
            raise _texts_error(registered, "returned one text and not a list of texts")
        if not all(isinstance(text, str) for text in texts):
            raise _texts_error(registered, "returned something that is no text")
        return texts


def parse_name(what: str, name: Any) -> Name:
    """Return the module and the qualified name that a pair or a text like 'module:Name' gives.

    Raises:
        ConfigurationError: It is something else.
    """
    pair = name.split(":") if isinstance(name, str) else name
    if isinstance(pair, tuple | list) and len(pair) == 2:
        module, qualified = pair
        if all(isinstance(part, str) and part.strip() for part in (module, qualified)):
            return module, qualified
    raise ConfigurationError(f"{what} is {name!r:.80}; expected {_NAME}")


def renamed(name: Name, table: Mapping[Name, Name]) -> Name:
    """Return the name that a table has for a class, or for the generic class of a model."""
    found = table.get(name)
    if found is None and "[" in name[1]:
        generic, bracket, parameters = name[1].partition("[")
        base = table.get((name[0], generic))
        found = None if base is None else (base[0], f"{base[1]}{bracket}{parameters}")
    return found or name


def _resolve_aliases(aliases: Aliases, stored_name: Callable[[type], Name]) -> dict[Name, type]:
    """Return the class at the end of each alias.

    Raises:
        ConfigurationError: Aliases lead in a circle, one name leads to two targets, or a target is
            no class that can be imported.
    """
    pairs = aliases.items() if isinstance(aliases, Mapping) else aliases
    if not isinstance(aliases, Mapping | list | tuple):
        raise ConfigurationError(f"aliases is {aliases!r:.80}; expected a dict of old and new")
    steps: dict[Name, type | Name] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigurationError(f"aliases has {pair!r:.80}; expected pairs of old and new")
        old, new = parse_name("a name in aliases", pair[0]), pair[1]
        target = new if isinstance(new, type) else parse_name("a target in aliases", new)
        if steps.setdefault(old, target) != target:
            raise ConfigurationError(
                f"aliases has two targets for {_dotted(old)}: {_shown(steps[old])} and "
                f"{_shown(target)}; expected one"
            )
        if old in KNOWN:
            raise ConfigurationError(f"aliases has {_dotted(old)}, which is no class of yours")
    return {old: _end_of(old, steps, stored_name) for old in steps}


def _end_of(
    old: Name, steps: Mapping[Name, type | Name], stored_name: Callable[[type], Name]
) -> type:
    """Return the class to which a name leads, over other aliases."""
    way: list[Name] = [old]
    while True:
        target = steps[way[-1]]
        name = stored_name(target) if isinstance(target, type) else target
        if name in way:
            circle = " to ".join(map(_dotted, [*way, name]))
            raise ConfigurationError(f"aliases leads in a circle, from {circle}")
        if name in steps:
            way.append(name)
        elif isinstance(target, type):
            return target
        else:
            return _import_class(old, name)


def _import_class(old: Name, name: Name) -> type:
    try:
        importlib.import_module(name[0])
    except Exception as exc:
        raise ConfigurationError(
            f"aliases leads from {_dotted(old)} to {_dotted(name)}, whose module cannot be "
            f"imported: {_told(exc)}"
        ) from exc
    found = find_class(*name, load=False)
    if found is None:
        raise ConfigurationError(
            f"aliases leads from {_dotted(old)} to {_dotted(name)}, and there is no such class"
        )
    return found


def _check_is_unknown(cls: Any) -> None:
    """Raise ConfigurationError for a class that perdure stores by itself."""
    if (
        cls in _BUILTIN
        or cls is type(None)
        or name_of(cls) in KNOWN
        or issubclass(cls, BaseMessage)
        or kind_of(cls) is not None
    ):
        raise ConfigurationError(
            f"perdure stores values of {cls.__qualname__} by itself; register other types only"
        )


def _texts_error(registered: StoredType[Any], what: str) -> SerializationError:
    return SerializationError(
        f"texts of the registered type {_dotted(registered.stored_name)} {what}, so it is not "
        "known what its values quote; nothing was erased. Correct the function and erase again"
    )


def _dotted(name: Name) -> str:
    return ".".join(name)


def _shown(target: type | Name) -> str:
    return _dotted(name_of(target) if isinstance(target, type) else target)


def _told(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


NO_TYPES: Final = StoredTypes()
