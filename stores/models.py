"""The model of a store's vectors, and whether they are stored or made by the search.

Only vectors of one model can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, get_args

import numpy as np

from perdure.errors import EmbedderMismatch
from perdure.stores.chunking import chunks
from perdure.stores.embedders import CheckedEmbedder
from perdure.stores.options import recorded
from perdure.stores.vectors import Floats, Kind, stored


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
    number: int = field(default=0, compare=False)

    @classmethod
    def parsed(cls, text: str) -> Self:
        """A model from its setting."""
        return cls(**recorded("model", text, _is_model))

    def text(self) -> str:
        """The model as a setting."""
        return json.dumps(asdict(self))

    def of(self, dims: int) -> Self:
        """The same, once it is known how long its vectors are."""
        return replace(self, dims=dims)

    @property
    def width(self) -> int:
        """Bytes of a vector."""
        return self.dims * np.dtype(self.kind).itemsize + (4 if self.kind == "int8" else 0)

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
            f"this embedder is {given.name!r} ({given.dims} dimensions, {given.kind}): search "
            "by text, open the store with that embedder, or make all vectors anew (reembed)"
        )


def _is_model(found: dict[str, Any]) -> bool:
    """Whether a setting says all of a model, and nothing else."""
    return (
        found.keys() == {"name", "dims", "kind", "number"}
        and isinstance(found["name"], str)
        and found["kind"] in get_args(Kind)
        and all(type(found[name]) is int and found[name] > 0 for name in ("dims", "number"))
    )


@dataclass(slots=True)
class Embeddings:
    """The embedder of a store, if it has one."""

    embedder: CheckedEmbedder | None = None
    model: Model | None = None  # what the embedder is recorded as
    in_process: bool = False  # there is nothing to await
    # so quick that no vectors are stored with an item: the search makes them when it reads it
    quick: Callable[[Sequence[str]], Floats] | None = None
    any_kind: bool = False  # vectors are stored as the file has them already

    @property
    def stores(self) -> bool:
        """Whether vectors are stored with an item."""
        return self.model is not None and self.quick is None

    def adopt(self, found: Model) -> None:
        """Go on in the way in which vectors are stored in the file."""
        if self.any_kind and self.model is not None and self.model.name == found.name:
            self.model = replace(self.model, kind=found.kind)

    def pieces(self, texts: Sequence[str]) -> list[str]:
        """The chunks of texts that are embedded, each by itself."""
        return [piece for text in texts for piece in chunks(text)]

    def derives(self, file: Model) -> bool:
        """Whether the vectors of a file's model are made by the search."""
        return self.quick is not None and self.model == file

    def derive(self, rows: Sequence[Sequence[str]], file: Model | None) -> list[bytes | None]:
        """The vectors of rows, given the texts of each; None where nothing is to be embedded."""
        if self.quick is None or file is None or not self.derives(file):
            return [None] * len(rows)
        groups = [self.pieces(texts) for texts in rows]
        return divided(self.quick([piece for group in groups for piece in group]), groups, file)


def divided(vectors: Floats, groups: Sequence[Sequence[str]], model: Model) -> list[bytes | None]:
    """The vectors of each group of pieces as they are stored; None for an empty group."""
    body = stored(vectors, model.kind) if len(vectors) else b""
    width, begin = model.width, 0
    out: list[bytes | None] = []
    for group in groups:
        end = begin + len(group) * width
        out.append(body[begin:end] if group else None)
        begin = end
    return out
