"""What a store's vectors come from, and whether they are stored or made by the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from perdure.stores.chunking import chunks
from perdure.stores.embedders import CheckedEmbedder
from perdure.stores.models import Model
from perdure.stores.vectors import Floats, stored


@dataclass(slots=True)
class Embeddings:
    """The embedder of a store, if it has one.

    Attributes:
        embedder: Makes vectors; None: nothing is ever embedded.
        model: What it is recorded as.
        in_process: Whether it computes in this process, so that there is nothing to await.
        quick: Makes vectors so quickly that none are stored with an item: the search makes them
            when it reads the item, as it does with words; None: vectors are stored.
        any_kind: Whether vectors are stored in the way that the file has already.
    """

    embedder: CheckedEmbedder | None = None
    model: Model | None = None
    in_process: bool = False
    quick: Callable[[Sequence[str]], Floats] | None = None
    any_kind: bool = False

    @property
    def stores(self) -> bool:
        """Whether vectors are stored with an item."""
        return self.model is not None and self.quick is None

    def adopt(self, found: Model) -> None:
        """Go on in the way in which vectors are stored in the file."""
        if self.any_kind and self.model is not None and self.model.name == found.name:
            self.model = replace(self.model, kind=found.kind)

    def pieces(self, texts: Sequence[str]) -> list[str]:
        """The pieces of texts that are embedded, each by itself."""
        return [piece for text in texts for piece in chunks(text)]

    def derives(self, file: Model) -> bool:
        """Whether the vectors of a file's model are made by the search."""
        return self.quick is not None and self.model == file

    def derive(self, rows: Sequence[Sequence[str]], file: Model | None) -> list[bytes | None]:
        """The vectors of some rows, given the texts of each; None where there is nothing to embed.

        Args:
            rows: The texts of each row.
            file: What the file's vectors come from: if that is another model, there are none.
        """
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
