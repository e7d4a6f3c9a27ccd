"""An embedder with a small transformer on onnxruntime, from files of the user (extra `[onnx]`).

Meant for bge-small-en-v1.5 and all-MiniLM-L6-v2 as int8: on conversations better than the static
table, and a hundred times slower. Nothing is fetched.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from perdure.errors import ConfigurationError, MissingDependency
from perdure.stores.vectors import Floats, unit

Pooling = Literal["mean", "cls"]

_WINDOWS_AT_ONCE = 32


class OnnxEmbedder:
    """A sentence encoder in ONNX's format.

    A text longer than the model's window is embedded window by window, and its vector is their
    mean, weighted by their tokens: nothing is cut.

    Args:
        folder: The `.onnx` file, or the folder that holds it, there or in `onnx/`: `model.onnx`,
            or the only one. `tokenizer.json` is beside it or one folder up.
        sha256: What the `.onnx` file must hash to; None: not checked. Its hash is in the name.
        pooling: `"mean"` of the tokens (all-MiniLM), or the first one's, `"cls"` (bge).
        max_tokens: The model's window.
        query_prefix: Put before a query; bge: `"Represent this sentence for searching relevant
            passages: "`.

    Raises:
        ConfigurationError: A file is missing, is not what it should be, or has another hash.
        MissingDependency: The extra `[onnx]` is not installed.

    Source: https://arxiv.org/abs/1908.10084 (pooling), https://github.com/FlagOpen/FlagEmbedding
    """

    in_process = True

    def __init__(
        self,
        folder: str | Path,
        *,
        sha256: str | None = None,
        pooling: Pooling = "mean",
        max_tokens: int = 512,
        query_prefix: str = "",
    ) -> None:
        if pooling not in ("mean", "cls") or max_tokens < 8:
            raise ConfigurationError(
                f"pooling={pooling!r}, max_tokens={max_tokens!r}: expected 'mean' or 'cls', and at "
                "least 8"
            )
        try:
            import onnxruntime  # type: ignore[import-untyped]
            import tokenizers
        except ImportError as exc:
            raise MissingDependency(
                f"embedding with ONNX models needs {exc.name!r}, which is not installed: "
                "pip install '.[onnx]' in a checkout"
            ) from exc
        model, tokenizer = _files(Path(folder))
        content = model.read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if sha256 is not None and found != sha256.lower():
            raise ConfigurationError(
                f"{str(model)!r} has sha256 {found}, expected {sha256}: it is another model, or "
                "damaged; embed with the right one, or pin this one"
            )
        self.name = f"onnx/{model.stem}@{found[:12]}+{pooling}{max_tokens}"
        self._pooling, self._query_prefix = pooling, query_prefix
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(tokenizer))
            providers = ["CPUExecutionProvider"]
            self._session: Any = onnxruntime.InferenceSession(content, providers=providers)
        except Exception as exc:  # both raise plain Exception or their own kinds
            raise ConfigurationError(f"{str(model.parent)!r} cannot be loaded: {exc}") from exc
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)
        self._inputs = {given.name for given in self._session.get_inputs()}
        dims = self._session.get_outputs()[0].shape[-1]
        self.dims = dims if isinstance(dims, int) else None

    def embed(self, texts: Sequence[str]) -> Floats:
        """The texts' vectors, float32[len(texts), dims], each row of length 1."""
        if not texts:
            return np.empty((0, self.dims or 0), np.float32)
        encodings = self._tokenizer.encode_batch(list(texts))
        windows = [
            (row, part.ids) for row, e in enumerate(encodings) for part in (e, *e.overflowing)
        ]
        windows.sort(key=lambda window: len(window[1]))  # alike together: little padding
        rows, ids = zip(*windows, strict=True)
        vectors = np.concatenate(
            [
                self._pooled(ids[start : start + _WINDOWS_AT_ONCE])
                for start in range(0, len(ids), _WINDOWS_AT_ONCE)
            ]
        )
        sums = np.zeros((len(texts), vectors.shape[1]))
        np.add.at(sums, list(rows), vectors * np.array([[len(window)] for window in ids]))
        return unit(sums)

    async def aembed(self, texts: Sequence[str]) -> Floats:
        """The same, in a thread."""
        return await asyncio.to_thread(self.embed, texts)

    def embed_query(self, text: str) -> Floats:
        """A query's vector, float32[dims]."""
        vector: Floats = self.embed([self._query_prefix + text])[0]
        return vector

    def _pooled(self, windows: Sequence[Sequence[int]]) -> Floats:
        """float32[len(windows), dims] of token ids, padded to the longest."""
        shape = (len(windows), max(map(len, windows)))
        ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, window in enumerate(windows):
            ids[row, : len(window)] = window
            mask[row, : len(window)] = 1
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        taken = {name: array for name, array in given.items() if name in self._inputs}
        states: Floats = self._session.run(None, taken)[0]
        if states.ndim == 2:  # the model pools by itself
            return states
        if self._pooling == "cls":
            return states[:, 0]
        weights = mask[:, :, None].astype(np.float32)
        pooled: Floats = (states * weights).sum(axis=1) / weights.sum(axis=1)
        return pooled


def _files(path: Path) -> tuple[Path, Path]:
    """The model's file and the tokenizer's."""
    found = [path] if path.suffix == ".onnx" else [*path.glob("*.onnx"), *path.glob("onnx/*.onnx")]
    models = [file for file in found if file.name == "model.onnx"] or found
    if not models or (len(models) > 1 and models is found):
        raise ConfigurationError(
            f"{str(path)!r} holds {len(models)} .onnx files: expected model.onnx or a single one; "
            "give the path of the file"
        )
    model = models[0]
    for folder in (model.parent, model.parent.parent):
        if (folder / "tokenizer.json").is_file() and model.is_file():
            return model, folder / "tokenizer.json"
    raise ConfigurationError(
        f"{str(model)!r} or the tokenizer.json beside it, or in the folder above, does not exist"
    )
