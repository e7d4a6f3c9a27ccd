"""JSON documents: what one is, merges (RFC 7386), what differs between two, places in one.

https://www.rfc-editor.org/rfc/rfc7386; places are JSON pointers, RFC 6901.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from perdure.errors import InvalidPatch, InvalidValue
from perdure.memory.quotation import quoted
from perdure.stores.values import decode, encode

Document = dict[str, Any]

_BAD_ESCAPE: Final = re.compile("~(?![01])")
_INDEX: Final = re.compile("0|[1-9][0-9]{0,8}")
_SHOWN: Final = 80  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Edit:
    """What a change did at one place.

    Attributes:
        op: Of RFC 6902: `"add"`, `"replace"`, `"remove"`, `"move"`, `"copy"` or `"test"`.
        path: The place, a JSON pointer like `/home/city`.
        reason: Why, if that was said.
    """

    op: str
    path: str
    reason: str = ""

    def noted(self) -> dict[str, str]:
        """It as JSON."""
        reason = {"reason": self.reason} if self.reason else {}
        return {"op": self.op, "path": self.path, **reason}


def plain(value: Any, what: str) -> Any:
    """A copy of a value, as what JSON it is.

    Raises:
        InvalidPatch: It is none.
    """
    try:
        return decode(encode({"value": value}))["value"]
    except InvalidValue as exc:
        raise InvalidPatch(f"{what} is no JSON: {exc}") from exc


def check_size(document: Document, max_bytes: int) -> None:
    """Refuse a document that is too large, or too deep for a store.

    Raises:
        InvalidPatch: It is.
    """
    try:
        size = len(encode({"document": document}).encode()) - len('{"document":}')
    except InvalidValue as exc:
        raise InvalidPatch(f"the profile would be no JSON that a store takes: {exc}") from exc
    if size > max_bytes:
        raise InvalidPatch(
            f"the profile would take {size:,} bytes as JSON; at most {max_bytes:,} are allowed "
            "(max_bytes)"
        )


def merged(document: Document, partial: Any) -> Document:
    """What a document becomes by a merge: the fields named in `partial` change, a null removes.

    >>> merged({"name": "Ann", "home": {"city": "Ghent"}}, {"home": {"zip": "9000"}})
    {'name': 'Ann', 'home': {'city': 'Ghent', 'zip': '9000'}}

    Raises:
        InvalidPatch: `partial` is no JSON object.
    """
    if not isinstance(partial, Mapping):
        raise InvalidPatch(
            f"the merge is {partial!r:.80}, a {type(partial).__name__}; expected a dict of the "
            "fields that change"
        )
    return _merged(document, plain(dict(partial), "the merge"))  # type: ignore[no-any-return]


def _merged(target: Any, partial: Any) -> Any:
    if not isinstance(partial, dict):
        return partial
    out = dict(target) if isinstance(target, dict) else {}
    for name, value in partial.items():
        if value is None:
            out.pop(name, None)
        else:
            out[name] = _merged(out.get(name), value)
    return out


def differences(former: Any, new: Any, path: str = "") -> Iterator[Edit]:
    """What is not the same in two documents; a list is one thing.

    >>> list(differences({"a": 1, "b": {"c": 2}}, {"b": {"c": 3}}))
    [Edit(op='remove', path='/a', reason=''), Edit(op='replace', path='/b/c', reason='')]
    """
    if not (isinstance(former, dict) and isinstance(new, dict)):
        if not same(former, new):
            yield Edit("replace", path)
        return
    for name in {**former, **new}:
        at = f"{path}/{escaped(name)}"
        if name not in new:
            yield Edit("remove", at)
        elif name not in former:
            yield Edit("add", at)
        else:
            yield from differences(former[name], new[name], at)


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1 is 1.0, and neither is true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


# -- places


def tokens_of(pointer: str) -> list[str]:
    """The names and indices that a JSON pointer goes through.

    >>> tokens_of("/home/a~1b/0")
    ['home', 'a/b', '0']

    Raises:
        InvalidPatch: It is no JSON pointer.
    """
    if pointer and not pointer.startswith("/"):
        raise InvalidPatch(f"{pointer!r:.200} is no JSON pointer; expected one like '/home/city'")
    if _BAD_ESCAPE.search(pointer):
        raise InvalidPatch(
            f"{pointer!r:.200} is no JSON pointer: in a name '~' is written '~0', and '/' '~1'"
        )
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def escaped(name: str) -> str:
    """A name as it stands in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def value_at(document: Any, pointer: str) -> Any:
    """What is at a place.

    Raises:
        InvalidPatch: Nothing is; what is there instead is named.
    """
    within, path = document, ""
    for token in tokens_of(pointer):
        if isinstance(within, dict):
            if token not in within:
                raise InvalidPatch(f"{_named(path)} has no {token!r:.80}; {_has(within)}")
            within = within[token]
        elif isinstance(within, list):
            index = index_of(token, path)
            if index >= len(within):
                raise InvalidPatch(f"{_named(path)} has {len(within)} elements, none at {index}")
            within = within[index]
        else:
            raise InvalidPatch(f"{_named(path)} is {shown(within)}, which has no {token!r:.80}")
        path += f"/{escaped(token)}"
    return within


def index_of(token: str, path: str) -> int:
    """The index that a name stands for in the array at `path`.

    Raises:
        InvalidPatch: It stands for none.
    """
    if not _INDEX.fullmatch(token):
        raise InvalidPatch(
            f"{_named(path)} is an array and {token!r:.80} no index of it; expected a number from "
            "0 on, or '-' to add at its end"
        )
    return int(token)


def shown(value: Any) -> str:
    """A value as JSON, not all of a long one."""
    text = quoted(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _named(path: str) -> str:
    return repr(path) if path else "the profile"


def _has(fields: Document) -> str:
    return "it has " + (", ".join(map(repr, list(fields)[:20])) or "no fields")
