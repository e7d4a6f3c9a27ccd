"""The ONNX embedder, with a model small enough to compute by hand."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tokenizers

from perdure.errors import ConfigurationError, MissingDependency
from perdure.stores.embedders import embedder_from
from perdure.stores.onnx import OnnxEmbedder, Pooling

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "lake", "violin", "sun"]
ROWS = np.array(
    [[9, 9], [0, 0], [1, 0], [0, 1], [5, 1], [3, 0], [0, 3], [2, 2]],
    np.float32,  # what padding has would show
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose states are rows of a table, and its tokeniser."""
    helper, kinds = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"])],
        "table",
        [
            helper.make_tensor_value_info(name, kinds.INT64, ["batch", "tokens"])
            for name in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info("last_hidden_state", kinds.FLOAT, ["batch", "tokens", 2])],
        [onnx.numpy_helper.from_array(ROWS, "table")],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="tests"
    )
    (tmp_path / "onnx").mkdir()
    onnx.save(model, str(tmp_path / "onnx" / "model.onnx"))
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def unit(*numbers: float) -> Any:
    return pytest.approx(list(np.array(numbers) / np.linalg.norm(numbers)), abs=1e-6)


@pytest.mark.parametrize(
    ("pooling", "lake", "both"), [("mean", (4, 1), (6, 6)), ("cls", (1, 0), (1, 0))]
)
def test_pooling(
    pooling: Pooling, lake: tuple[float, float], both: tuple[float, float], folder: Path
) -> None:
    """The mean over the text's own tokens, padding left out, or the first token's state."""
    embedder = OnnxEmbedder(folder, pooling=pooling)
    vectors = embedder.embed(["lake", "lake sun violin", ""])

    assert unit(*lake) == vectors[0].tolist()
    assert unit(*both) == vectors[1].tolist()
    assert embedder.dims == 2
    assert embedder.embed([]).shape == (0, 2)
    assert (vectors == asyncio.run(embedder.aembed(["lake", "lake sun violin", ""]))).all()


def test_no_text_is_cut(folder: Path) -> None:
    """What lies beyond the model's window counts as much as what lies within it."""
    vectors = OnnxEmbedder(folder, max_tokens=8).embed(["lake " * 60 + "violin " * 60, "sun"])

    assert unit(1, 1) == vectors[0].tolist()


def test_queries_are_prefixed(folder: Path) -> None:
    """Through the store's own door as well, in both colours; documents are not."""
    embedder = embedder_from(OnnxEmbedder(folder, query_prefix="query "))

    assert unit(9, 2) == embedder.embed_query("lake").tolist()
    assert unit(9, 2) == asyncio.run(embedder.aembed_query("lake")).tolist()
    assert unit(4, 1) == embedder.embed(["lake"])[0].tolist()


def test_the_model_is_pinned_and_named_by_its_hash(folder: Path) -> None:
    """A model with another hash is refused, both hashes told; the name changes with the model."""
    file = folder / "onnx" / "model.onnx"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()

    assert f"onnx/model@{digest[:12]}+mean512" == OnnxEmbedder(file, sha256=digest.upper()).name
    with pytest.raises(ConfigurationError, match=digest) as caught:
        OnnxEmbedder(folder, sha256="ab" * 32)
    assert "ab" * 32 in str(caught.value)


def test_what_is_no_model_is_refused(folder: Path) -> None:
    """An empty folder, two models of any name, no tokeniser, bytes that are nothing."""
    with pytest.raises(ConfigurationError, match="expected 'mean' or 'cls'"):
        OnnxEmbedder(folder, pooling="max")  # type: ignore[arg-type]
    (folder / "onnx" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        OnnxEmbedder(folder)
    (folder / "onnx" / "model.onnx").rename(folder / "a.onnx")
    (folder / "b.onnx").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"holds 2 \.onnx files"):
        OnnxEmbedder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        OnnxEmbedder(folder / "a.onnx")


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without onnxruntime the message is the line that installs it."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)

    with pytest.raises(MissingDependency, match=r"pip install '\.\[onnx\]'"):
        OnnxEmbedder(tmp_path)
