"""Data classes of every kind, and a codec that rebuilds their objects."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, Generic, NamedTuple, TypeVar

from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    PrivateAttr,
    RootModel,
    SecretStr,
    computed_field,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass

from perdure.checkpointers.codec import Codec
from perdure.checkpointers.values import Allowlist

T = TypeVar("T")


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, "a")
    ONE = 1
    TRUE = 1.5


class Mood(enum.StrEnum):
    FINE = "fine"


class Level(enum.IntEnum):
    LOW = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Bit(enum.IntFlag):
    A = 1
    B = 2


class Place(NamedTuple):
    x: int
    name: str = "here"


@dataclasses.dataclass
class Point:
    x: int
    inner: Any = None
    made: int = dataclasses.field(init=False, default=3)

    def __post_init__(self) -> None:
        self.doubled = self.x * 2

    @functools.cached_property
    def slow(self) -> object:
        return object()


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    x: int
    tags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class FixedChild(Fixed):
    y: int = 0


@pydantic_dataclass
class Checked:
    x: int


class Inner(BaseModel):
    n: int


class Outer(BaseModel):
    inner: Inner
    many: list[Inner] = []
    by_name: dict[str, Inner] = {}
    maybe: Inner | None = None
    point: Point | None = None
    pair: tuple[int, str] = (0, "")
    kinds: set[Mood] = set()
    by_mood: dict[Mood, int] = {}
    raw: Any = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)
    n: int = 1
    _note: str = PrivateAttr(default="none")
    _unset: int = PrivateAttr()

    class Nested(BaseModel):
        n: int


class Aliased(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True)
    name: str = Field(alias="fullName")


class Counted(BaseModel):
    model_config = ConfigDict(extra="allow")
    n: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def more(self) -> int:
        return self.n + 1


@dataclasses.dataclass
class Holding(Generic[T]):
    x: T


class Box(BaseModel, Generic[T]):
    x: T


class Tags(RootModel[list[str]]):
    pass


class Web(BaseModel):
    url: HttpUrl
    key: SecretStr


INT_BOX = Box[int]
CODEC = Codec(JsonPlusSerializer(allowed_msgpack_modules=[Allowlist.LOADED]))
STRICT = Codec(JsonPlusSerializer(allowed_msgpack_modules=None))


def store_and_read_back(value: Any) -> Any:
    """Encode a value and decode the bytes again."""
    return CODEC.decode(CODEC.encode(value, lambda: "value"))
