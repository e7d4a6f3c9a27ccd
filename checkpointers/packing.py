"""The msgpack format of stored values, with langgraph's own options."""

from __future__ import annotations

from typing import Any, Final

import ormsgpack

# langgraph replaces lone surrogates, and takes subclasses for their base; see `values`
PACK: Final = (
    ormsgpack.OPT_NON_STR_KEYS
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_UUID
)
UNPACK: Final = ormsgpack.OPT_NON_STR_KEYS


def pack(value: Any) -> bytes:
    """Plain data as bytes.

    Raises:
        TypeError: Something in it is not plain data.
    """
    return ormsgpack.packb(value, option=PACK)


def unpack(data: bytes | memoryview) -> Any:
    """Plain data from bytes.

    Raises:
        ValueError: They are no msgpack, or hold a type that only the serializer knows.
    """
    return ormsgpack.unpackb(data, option=UNPACK)


def is_plain(value: Any) -> bool:
    """Whether a value is data that msgpack knows by itself."""
    try:
        pack(value)
    except TypeError:
        return False
    return True


def array_header(n: int) -> bytes:
    """The header of an array of `n` elements (https://msgpack.org, `array`)."""
    if n < 16:
        return bytes((0x90 | n,))
    return b"\xdc" + n.to_bytes(2, "big") if n < 1 << 16 else b"\xdd" + n.to_bytes(4, "big")
