"""The stored form of an index: a head in JSON, then arrays.

It is read by whoever searches the namespace next, in place of the texts. It is stored with a
checksum, or encrypted, so one that was damaged does not open; one whose words were made of other
fields of the values, or by another analyzer, is not used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from perdure.stores.index import ROW, Index
from perdure.stores.index_view import Postings
from perdure.stores.models import Model
from perdure.stores.vectors import Matrix

LARGEST: Final = 1 << 29  # bytes; SQLite's own limit is 10^9
_VERSION: Final = 1
_ALIGNED: Final = 8  # bytes
_LENGTH: Final = 8  # bytes of the length of the head


class Covered(NamedTuple):
    """The content of an index."""

    newest: int  # the highest id that was looked at
    items: int  # that were present, those that search does not find included
    embedded: int  # how often items of the store had got their vectors later


def packed(index: Index, covered: Covered, made: Sequence[Any]) -> bytes:
    """The compact form of an index, which is compacted first."""
    index.compact()
    vectors = index.vectors
    arrays = [index.rows.values, *index.postings]
    if vectors is not None:
        arrays += [vectors.owner, vectors.matrix.rows]
        arrays += [] if vectors.matrix.scale is None else [vectors.matrix.scale]
    words = "\n".join(index.vocabulary.numbers).encode()
    head = {
        "version": _VERSION,
        "made": made,
        "covered": covered,
        "model": None if index.model is None else index.model.number,
        "arrays": [(array.dtype.str, array.shape) for array in arrays[1:]],
        "rows": len(index.rows),
        "words": len(words),
        "threads": list(index.threads),
        "actors": list(index.actors),
    }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % _ALIGNED)
    parts = [len(text).to_bytes(_LENGTH, "little"), text]
    for array in arrays:
        body = array.tobytes()
        parts += [body, b"\0" * (-len(body) % _ALIGNED)]
    return b"".join([*parts, words])


def unpacked(
    body: bytes, model: Model | None, approximate_above: int, made: Sequence[Any]
) -> tuple[Index, Covered] | None:
    """The index of a compact form, without vectors if they are of another model.

    Returns:
        None: It was made in another way.
    """
    begin = _LENGTH + int.from_bytes(body[:_LENGTH], "little")
    head = json.loads(body[_LENGTH:begin])
    if head["version"] != _VERSION or head["made"] != list(made):
        return None
    arrays = []
    for kind, shape in [(ROW, (head["rows"],)), *head["arrays"]]:
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(body, kind, count, begin).reshape(shape))
        size = arrays[-1].nbytes
        begin += size + -size % _ALIGNED
    rows, starts, of, counts, *rest = arrays
    words = body[begin : begin + head["words"]].decode()
    vectors = None
    if rest and model is not None and head["model"] == model.number:
        owner, numbers, *scale = rest
        vectors = Matrix(numbers, scale[0] if scale else None), owner
    index = Index.of(
        model,
        approximate_above,
        rows=rows.copy(),
        words=words.split("\n") if words else (),
        threads=head["threads"],
        actors=head["actors"],
        postings=Postings(starts, of, counts),
        vectors=vectors,
    )
    return index, Covered(*head["covered"])
