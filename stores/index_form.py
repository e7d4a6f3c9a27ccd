"""The compact form of an index, as it is in the file: a head in JSON, then arrays, then words."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from perdure.errors import CorruptRecord
from perdure.storage.encryption import Place, Seal
from perdure.stores.expansion import Vocabulary
from perdure.stores.index import Covered, Index, numbered
from perdure.stores.index_view import ROW, Postings
from perdure.stores.models import Model
from perdure.stores.namespaces import labels
from perdure.stores.vectors import Matrix

_LOG = logging.getLogger("perdure")
_FORM: Final = 2  # its version
_ALIGNED: Final = 8  # bytes
_LENGTH: Final = 8  # bytes of the length of the head
_LARGEST: Final = 1 << 29  # bytes that are written; SQLite's own limit is 10^9


def sealed(
    seal: Seal, path: bytes, index: Index, covered: Covered, made: Sequence[Any]
) -> bytes | None:
    """The compact form of a namespace's index, encrypted if the file is; None: it is too large."""
    body = packed(index, covered, made)
    return seal.seal(body, _place(path)) if len(body) <= _LARGEST else None


def opened(
    seal: Seal,
    path: bytes,
    body: bytes,
    model: Model | None,
    approximate_above: int,
    made: Sequence[Any],
) -> tuple[Index, Covered] | None:
    """The index of a compact form; None: it is damaged, or was made in another way."""
    try:
        return unpacked(seal.open(body, _place(path)), model, approximate_above, made)
    except (CorruptRecord, LookupError, TypeError, ValueError) as exc:
        of = labels(path)
        _LOG.warning("the search index of %r is damaged, and is made anew: %s", of, exc)
        return None


def _place(path: bytes) -> Place:
    """The data that binds a compact form to its namespace."""
    return ("index", path.decode())


def packed(index: Index, covered: Covered, made: Sequence[Any]) -> bytes:
    """The compact form of an index, which is compacted first."""
    index.compact()
    vectors = index.vectors
    arrays: list[NDArray[Any]] = [index.rows, *index.postings]
    if vectors is not None:
        arrays += [vectors.owner, vectors.matrix.rows]
        arrays += [] if vectors.matrix.scale is None else [vectors.matrix.scale]
    words = "\n".join(index.vocabulary).encode()
    head = {
        "version": _FORM,
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
        None: Its words or vectors were made in another way.
    """
    begin = _LENGTH + int.from_bytes(body[:_LENGTH], "little")
    head = json.loads(body[_LENGTH:begin])
    if head["version"] != _FORM or head["made"] != list(made):
        return None
    arrays = []
    for kind, shape in [(ROW, (head["rows"],)), *head["arrays"]]:
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(body, kind, count, begin).reshape(shape))
        size = arrays[-1].nbytes
        begin += size + -size % _ALIGNED
    rows, starts, of, counts, *rest = arrays
    words = body[begin : begin + head["words"]].decode()
    index = Index(model, approximate_above)
    index.rows = rows.copy()
    index.postings = Postings(starts, of, counts)
    index.vocabulary = Vocabulary(words.split("\n") if words else ())
    index.threads, index.actors = numbered(head["threads"]), numbered(head["actors"])
    if rest and model is not None and head["model"] == model.number:
        owner, numbers, *scale = rest
        index.vectors = index.sketched(Matrix(numbers, *scale), owner)
    return index, Covered(*head["covered"])
