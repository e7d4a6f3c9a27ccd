"""What an embedding model answers, checked and brought to length 1."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.errors import EmbeddingFailed

Vectors = NDArray[np.float32]


def vectors_of(answer: Any, count: int, dims: int | None, model: str) -> Vectors:
    """The vectors of a model's answer.

    Args:
        answer: Rows of numbers: lists, tuples, or what numpy takes for an array.
        count: How many texts were given.
        dims: How long a vector must be; None: of any length, all the same.
        model: Its name, for messages.

    Returns:
        float32[count, dims], each row of length 1; a zero vector stays zero.

    Raises:
        EmbeddingFailed: The answer is not that; the message names what came.
    """
    rows = _numbers(answer, count, model)
    if rows.shape[0] != count:
        raise _unfit(model, f"{rows.shape[0]} vectors for {count} texts", "one a text, in order")
    if dims is not None and rows.shape[1] != dims:
        raise _unfit(model, f"vectors of {rows.shape[1]} dimensions", f"{dims}")
    if not np.isfinite(rows).all():
        row, column = np.argwhere(~np.isfinite(rows))[0].tolist()
        found = f"{rows[row, column]!s} in vector {row} at place {column}"
        raise _unfit(model, found, "finite numbers")
    return unit(rows)


def _numbers(answer: Any, count: int, model: str) -> NDArray[np.float64]:
    """As float64[rows, dims]."""
    lengths = _lengths(answer)
    if lengths is not None and len(lengths) == count and len(set(lengths)) > 1:
        expected = "all of the same number of dimensions"
        raise _unfit(model, f"vectors of {min(lengths)} to {max(lengths)} dimensions", expected)
    try:
        array = np.asarray(answer)
    except Exception as exc:  # whatever the answer's own conversion raises
        raise _unfit(model, f"{_shown(answer)} ({exc})", "a list of vectors") from exc
    if array.ndim != 2 and len(array.shape) and array.shape[0] != count:
        raise _unfit(model, f"{array.shape[0]} vectors for {count} texts", "one a text, in order")
    if array.ndim != 2 or array.dtype.kind not in "fiu" or array.shape[1] == 0:
        raise _unfit(model, _shown(answer), "a list of vectors, each a list of numbers")
    return array.astype(np.float64)


def _lengths(answer: Any) -> list[int] | None:
    """The lengths of the rows of a list of lists."""
    if not isinstance(answer, list | tuple):
        return None
    return [len(row) for row in answer if isinstance(row, list | tuple | np.ndarray)]


def unit(rows: NDArray[np.float64]) -> Vectors:
    """Rows of length 1, zero ones left as they are.

    They are divided by their largest number first, so that no square is too large or too small.
    """
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    largest[largest == 0] = 1.0
    scaled = rows / largest
    lengths = np.sqrt(np.einsum("ij,ij->i", scaled, scaled))
    lengths[lengths == 0] = 1.0
    vectors: Vectors = (scaled / lengths[:, None]).astype(np.float32)
    return vectors


def _shown(answer: Any) -> str:
    text = repr(answer)
    return f"{text[:80]}..." if len(text) > 80 else text


def _unfit(model: str, found: str, expected: str) -> EmbeddingFailed:
    return EmbeddingFailed(
        f"the embedder {model!r} returned {found}; expected {expected}. Mend the embedder, or give "
        "the store another"
    )
