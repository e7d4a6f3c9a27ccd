"""Which model a store's vectors come from; only vectors of one model can be compared."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Self, get_args

from perdure.errors import EmbedderMismatch
from perdure.stores.settings import recorded
from perdure.stores.vectors import Kind, width


@dataclass(frozen=True, slots=True)
class Model:
    """An embedding model, and how its vectors are stored.

    Attributes:
        name: Which model.
        dims: Length of a vector.
        kind: How its numbers are stored.
        number: Stands for all this in each row; 0: not in the store yet.
    """

    name: str
    dims: int
    kind: Kind
    number: int = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Model):
            return NotImplemented
        return (self.name, self.dims, self.kind) == (other.name, other.dims, other.kind)

    def __hash__(self) -> int:
        return hash((self.name, self.dims, self.kind))

    @classmethod
    def parsed(cls, text: str) -> Self:
        """A model from its setting.

        Raises:
            CorruptRecord: It was damaged.
        """
        return cls(**recorded("model", text, _is_model))

    def text(self) -> str:
        """The model as a setting."""
        return json.dumps(
            {"name": self.name, "dims": self.dims, "kind": self.kind, "number": self.number}
        )

    def numbered(self, number: int) -> Self:
        """The same with a number."""
        return replace(self, number=number)

    def of(self, dims: int) -> Self:
        """The same, once it is known how long its vectors are."""
        return replace(self, dims=dims)

    @property
    def width(self) -> int:
        """Bytes of a vector."""
        return width(self.dims, self.kind)

    def mismatch(self, given: Model) -> EmbedderMismatch:
        """The error for vectors of another model than the store's, or stored in another way."""
        if (self.name, self.dims) == (given.name, given.dims):
            return EmbedderMismatch(
                f"the store's vectors are stored as {self.kind}, and it was opened with "
                f"vectors={given.kind!r}: open it with vectors={self.kind!r}, or call reembed() to "
                "make all vectors anew"
            )
        return EmbedderMismatch(
            f"the store's vectors come from {self.name!r} ({self.dims} dimensions, {self.kind}), "
            f"this embedder is {given.name!r} ({given.dims} dimensions, {given.kind}): open the "
            "store with that embedder, or call reembed() to make all vectors anew"
        )


def _is_model(found: dict[str, Any]) -> bool:
    """Whether a setting says all of a model, and nothing else."""
    return (
        found.keys() == {"name", "dims", "kind", "number"}
        and isinstance(found["name"], str)
        and found["kind"] in get_args(Kind)
        and all(type(found[name]) is int and found[name] > 0 for name in ("dims", "number"))
    )
