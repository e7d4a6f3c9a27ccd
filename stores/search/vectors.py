"""Embedding vectors for search: their model, validation, encoding and similarity scores.

Only vectors from the same model can be compared. Similarity scores are exact unless the number of
vectors exceeds the store's option `approximate_above`. With more than `approximate_above` vectors,
a search first compares sketches, which are short bit strings that approximate the vectors. After
comparing the sketches, the search computes exact scores only for the rows whose sketches are most
similar to the query's sketch.

A sketch has one bit per dimension, the sign of the vector's component in this dimension
(random-hyperplane hashing: Charikar, STOC 2002). Two sketches are compared by their Hamming
distance, the number of bits in which they differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from perdure.errors import EmbedderMismatch, EmbeddingFailed
from perdure.stores.values import parse_stored_setting

Kind = Literal["float32", "float16", "int8"]
Floats = NDArray[np.float32]

# number of rows that are converted or compared at a time, chosen so that they fit into the CPU
# cache
_BLOCK_ROWS: Final = 1024
# number of rows whose sketches are compared at a time, to limit memory use
_SKETCH_BLOCK_ROWS: Final = 1 << 14
# Minimum fraction of the rows for which an approximate search computes exact scores. The search
# chooses the rows whose sketches are nearest to the query's sketch.
_RESCORED_SHARE: Final = 0.01
# minimum number of rows that get exact scores in an approximate search; with fewer rows, all scores
# are exact
_MIN_RESCORED_ROWS: Final = 4_000
_WORD_BITS: Final = 64  # number of bits in one word of a sketch


@dataclass(frozen=True, slots=True)
class Model:
    """The name and dimension of an embedding model, and the data type of its stored vectors.

    Attributes:
        name: The name of the model.
        dims: The length of a vector, or 0 while it is unknown.
        kind: The type in which the numbers of a vector are stored.
        number: The number that stands for this model in the rows of vectors. 0 means that the store
            has not recorded the model yet.
    """

    name: str
    dims: int
    kind: Kind
    number: int = field(default=0, compare=False)

    @classmethod
    @lru_cache(maxsize=16)
    def from_setting(cls, text: str) -> Self:
        """Parse the JSON that describes the embedding model recorded in the database.

        Parsed models are cached, because otherwise every search would parse the same JSON text
        again.
        """
        return cls(**parse_stored_setting("model", text, _is_valid_model_setting))

    def to_setting(self) -> str:
        """Serialize the model to JSON, to be recorded as a setting in the store."""
        return json.dumps(asdict(self))

    def with_dims(self, dims: int) -> Self:
        """Return this model description with `dims` as its embedding dimension."""
        return self if self.dims == dims else replace(self, dims=dims)

    @property
    def vector_bytes(self) -> int:
        """The size of one stored vector in bytes."""
        return self.dims * np.dtype(self.kind).itemsize + (4 if self.kind == "int8" else 0)

    def build_mismatch_error(self, opened_with: Model) -> EmbedderMismatch:
        """Build the error raised when the embedder differs from the recorded embedding model.

        The error message says whether the embedder's model differs from the recorded model, or only
        the encoding of the vectors differs.
        """
        if (self.name, self.dims) == (opened_with.name, opened_with.dims):
            return EmbedderMismatch(
                f"the store's vectors are stored as {self.kind}, but the store was opened with "
                f"vectors={opened_with.kind!r}; open it with vectors={self.kind!r}, or call "
                "reembed() to compute all vectors again"
            )
        return EmbedderMismatch(
            f"the store's vectors come from {self.name!r} ({self.dims} dimensions, {self.kind}), "
            f"but this embedder is {opened_with.name!r} ({opened_with.dims} dimensions, "
            f"{opened_with.kind}); search with mode='text', open the store with the previous "
            "embedder, or call reembed() to compute all vectors again"
        )


def _is_valid_model_setting(setting: dict[str, Any]) -> bool:
    """Return whether a recorded setting is a valid description of an embedding model."""
    return (
        setting.keys() == {"name", "dims", "kind", "number"}
        and isinstance(setting["name"], str)
        and setting["kind"] in get_args(Kind)
        and all(type(setting[name]) is int and setting[name] > 0 for name in ("dims", "number"))
    )


def check_and_normalize_vectors(
    answer: Any, text_count: int, dims: int | None, model_name: str
) -> Floats:
    """Validate an embedding model's response, and return its vectors.

    Args:
        answer: The response of the model, which should be one vector for each text.
        text_count: The number of texts.
        dims: The expected vector length, or None if it is not known.
        model_name: The name of the model, for error messages.

    Returns:
        float32[text_count, dims], each row normalised to length 1. A zero vector stays zero.

    Raises:
        EmbeddingFailed: The response does not consist of one vector for each text, the vectors have
            a wrong length, or they contain something other than finite numbers. The message
            describes the fault.
    """
    try:
        rows = np.asarray(answer)
    # An embedder can return any object, and converting the object to an array can raise any
    # exception.
    except Exception as exc:
        problem = (
            f"the embedder returned {answer!r:.80}, which cannot be converted to an array ({exc}); "
            "expected a list of vectors"
        )
        # numpy cannot convert a list of vectors with different lengths.
        items = answer if isinstance(answer, list | tuple) else ()
        lengths = [len(row) for row in items if isinstance(row, list | tuple | np.ndarray)]
        if len(lengths) == text_count and len(set(lengths)) > 1:
            problem = (
                f"the embedder returned vectors with {min(lengths)} to {max(lengths)} dimensions; "
                "expected all vectors to have the same number of dimensions"
            )
        raise _build_invalid_vectors_error(model_name, problem) from exc
    if rows.ndim and len(rows) != text_count:
        raise _build_invalid_vectors_error(
            model_name,
            f"the embedder returned {len(rows)} vectors for {text_count} texts; "
            "expected one vector per text, in the order of the texts",
        )
    if rows.ndim != 2 or rows.dtype.kind not in "fiu" or rows.shape[1] == 0:
        raise _build_invalid_vectors_error(
            model_name,
            f"the embedder returned {answer!r:.80}; "
            "expected a list of vectors, where each vector is a list of numbers",
        )
    if dims is not None and rows.shape[1] != dims:
        raise _build_invalid_vectors_error(
            model_name,
            f"the embedder returned vectors with {rows.shape[1]} dimensions; "
            f"expected {dims} dimensions",
        )
    if not np.isfinite(rows).all():
        row, column = np.argwhere(~np.isfinite(rows))[0].tolist()
        problem = (
            f"the embedder returned the value {rows[row, column]!s} at position {column} of vector "
            f"{row}; expected finite numbers"
        )
        raise _build_invalid_vectors_error(model_name, problem)
    return scale_rows_to_unit_length(rows.astype(np.float64))


def _build_invalid_vectors_error(model_name: str, problem: str) -> EmbeddingFailed:
    """Build the error for an invalid response from an embedding model."""
    return EmbeddingFailed(
        f"{problem}. Correct the embedder {model_name!r}, or open the store with another embedder"
    )


def scale_rows_to_unit_length(rows: NDArray[np.float64]) -> Floats:
    """Return the rows scaled to length 1. Zero rows stay zero.

    Each row is first divided by its largest absolute value, so that the squares of its elements
    neither overflow nor underflow.
    """
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    scaled = rows / np.where(largest == 0, 1.0, largest)
    lengths = np.sqrt(np.einsum("ij,ij->i", scaled, scaled))[:, None]
    return (scaled / np.where(lengths == 0, 1.0, lengths)).astype(np.float32)


def encode_vectors(vectors: Floats, kind: Kind) -> bytes:
    """Encode vectors, an array of shape `[n, dims]`, as bytes.

    If `kind` is `int8`, each encoded row starts with the row's scale factor, as a float32.
    """
    if kind == "int8":
        scale = np.abs(vectors).max(axis=1, keepdims=True).astype(np.float32) / np.float32(127)
        whole = np.round(vectors / np.where(scale > 0, scale, 1)).astype(np.int8)
        return np.hstack([scale.view(np.int8), whole]).tobytes()
    return vectors.astype(kind).tobytes()


def encode_vectors_by_item(
    vectors: Floats, chunks_of_items: Sequence[Sequence[str]], model: Model
) -> list[bytes | None]:
    """Encode each item's vectors as one byte string, or as None if the item has no chunks.

    Args:
        vectors: The vectors of all chunks, in the order of the items; float32[n, dims].
        chunks_of_items: The chunks of each item.
        model: The model, which determines the encoding.
    """
    body = encode_vectors(vectors, model.kind) if len(vectors) else b""
    width, begin = model.vector_bytes, 0
    encoded: list[bytes | None] = []
    for chunks in chunks_of_items:
        end = begin + len(chunks) * width
        encoded.append(body[begin:end] if chunks else None)
        begin = end
    return encoded


def compute_share_of_rows_to_score_exactly(row_count: int) -> float:
    """Return the fraction of rows for which an approximate search computes exact scores.

    Rows whose sketches are nearest to the query's sketch get exact scores, and the remaining rows
    get estimated scores.
    """
    return max(_RESCORED_SHARE, min(1.0, _MIN_RESCORED_ROWS / max(row_count, 1)))


@dataclass(frozen=True, slots=True)
class VectorMatrix:
    """Vectors in an array, one in each row."""

    # The vectors, in an array of shape `[n, dims]`. Each row multiplied by its factor in `scale`
    # has length 1.
    rows: NDArray[Any]
    # Scale factor of each row of `rows`, used only for `int8` vectors. None means that rows need no
    # scaling.
    scale: Floats | None = None
    # The sketches of all rows as 64-bit words, in an array of shape `[words, n]` with one column
    # per row. The field is None if there are too few rows for approximate scoring.
    sketch: NDArray[np.uint64] | None = None

    @classmethod
    def from_bytes(cls, body: bytes, dims: int, kind: Kind) -> VectorMatrix:
        """Build a matrix from encoded vectors."""
        if kind == "int8":
            raw = np.frombuffer(body, np.int8).reshape(-1, dims + 4)
            scale = np.ascontiguousarray(raw[:, :4]).view(np.float32)[:, 0]
            return cls(np.ascontiguousarray(raw[:, 4:]), scale)
        return cls(np.frombuffer(body, kind).reshape(-1, dims))

    @classmethod
    def concatenate(cls, parts: list[VectorMatrix]) -> VectorMatrix:
        """Concatenate the rows of several matrices, in order."""
        scale = None
        if parts[0].scale is not None:
            scale = np.concatenate([part.scale for part in parts if part.scale is not None])
        return cls(np.concatenate([part.rows for part in parts]), scale)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the arrays."""
        parts = (self.rows, self.scale, self.sketch)
        return sum(part.nbytes for part in parts if part is not None)

    def take_rows(self, order: NDArray[Any]) -> VectorMatrix:
        """Return a new matrix that contains the rows at the indexes in `order`, in that order.

        The new matrix has no sketches.
        """
        return VectorMatrix(self.rows[order], None if self.scale is None else self.scale[order])

    def to_float32(self) -> Floats:
        """Return all rows as float32."""
        rows = self.rows.astype(np.float32)
        return rows if self.scale is None else rows * self.scale[:, None]

    def copy_with_sign_bit_sketches(self) -> VectorMatrix:
        """Return a copy of the matrix that also contains sketches for approximate scoring.

        Vectors of type float32 are copied as float16.
        """
        rows = self.rows.astype(np.float16) if self.rows.dtype == np.float32 else self.rows
        return VectorMatrix(rows, self.scale, _compute_sign_bit_sketches(self.rows))

    def compute_exact_cosine_similarities(self, query: Floats, start: int, stop: int) -> Floats:
        """Return the exact cosine similarity between a unit vector and each row of a range."""
        rows = self.rows[start:stop]
        if rows.dtype == np.float32:
            return np.asarray(rows @ query)
        out = np.empty(len(rows), np.float32)
        for begin in range(0, len(rows), _BLOCK_ROWS):
            out[begin : begin + _BLOCK_ROWS] = (
                rows[begin : begin + _BLOCK_ROWS].astype(np.float32) @ query
            )
        if self.scale is not None:
            out *= self.scale[start:stop]
        return out

    def estimate_cosine_similarities(
        self, query: Floats, start: int, stop: int, exactly_scored_share: float
    ) -> Floats:
        """Return approximate cosine similarities for rows `start` to `stop`.

        The similarities are computed exactly for the rows whose sketches are nearest to the query's
        sketch, and estimated for all other rows. `exactly_scored_share` is the fraction of rows
        whose similarities are computed exactly.
        """
        assert self.sketch is not None
        distance = self._compute_hamming_distances(
            _compute_sign_bit_sketches(query[None, :])[:, 0], start, stop
        )
        bit_count = len(query)
        counts = np.bincount(distance, minlength=bit_count + 1)
        min_count = max(int(exactly_scored_share * len(distance)), 1)
        nearest = int(np.searchsorted(np.cumsum(counts), min(min_count, len(distance))))
        table = np.cos(np.pi * np.arange(bit_count + 1) / bit_count).astype(np.float32)
        # Lower the estimated similarities so that none of them is higher than an exact similarity.
        # Subtracting the estimate for the farthest of the chosen rows makes the estimates for all
        # rows that are not chosen negative. They are added to the lowest exact similarity below.
        table -= table[nearest]
        chosen = np.flatnonzero(distance <= nearest)
        exact = self.take_rows(chosen + start).compute_exact_cosine_similarities(
            query, 0, len(chosen)
        )
        out = np.minimum(table[distance], 0.0) + exact.min(initial=1.0)
        out[chosen] = exact
        return np.asarray(out, np.float32)

    def _compute_hamming_distances(
        self, query_sketch: NDArray[np.uint64], start: int, stop: int
    ) -> NDArray[np.uint16]:
        """Return the Hamming distance between each row's sketch and the query's sketch."""
        assert self.sketch is not None
        out = np.zeros(stop - start, np.uint16)
        differ = np.empty(_SKETCH_BLOCK_ROWS, np.uint64)
        count = np.empty(_SKETCH_BLOCK_ROWS, np.uint8)
        for begin in range(0, len(out), _SKETCH_BLOCK_ROWS):
            part = out[begin : begin + _SKETCH_BLOCK_ROWS]
            for word, bits in zip(self.sketch, query_sketch, strict=True):
                words_of_rows = word[start + begin : start + begin + len(part)]
                np.bitwise_xor(words_of_rows, bits, out=differ[: len(part)])
                np.bitwise_count(differ[: len(part)], out=count[: len(part)])
                part += count[: len(part)]
        return out


def _compute_sign_bit_sketches(vectors: NDArray[Any]) -> NDArray[np.uint64]:
    """Return sketches, `uint64[words, n]`.

    A sketch has one bit per vector dimension. The sketch's bit for a dimension is 1 if the vector's
    component in that dimension is positive.
    """
    count, dims = vectors.shape
    words = -(-dims // _WORD_BITS)
    packed = np.zeros((count, words * 8), np.uint8)
    for begin in range(0, count, _BLOCK_ROWS):
        bits = np.packbits(vectors[begin : begin + _BLOCK_ROWS] > 0, axis=1)
        packed[begin : begin + _BLOCK_ROWS, : bits.shape[1]] = bits
    return np.ascontiguousarray(packed.view(np.uint64).T)
