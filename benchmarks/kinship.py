"""Build the table of words with similar meanings from the static embedder. This takes 20 seconds.

    python benchmarks/kinship.py     # writes stores/weights/kin-en.npz

A stem's vector is the mean of the whole words of the embedder's vocabulary that have it. Related
stems have a cosine similarity above 0.5, and each stem has at most 16 of them; both limits were
chosen with benchmarks/recall.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from perdure.stores.search.text import STOP_WORDS, SYNONYM_FILE, tokenize_query

WEIGHTS = Path(__file__).parent.parent / "stores" / "weights"
MOST, LEAST = 16, 0.5
_WORD = re.compile("[a-z]{3,}")


def stem_vectors() -> tuple[list[str], np.ndarray]:
    """Return the sorted stems of the vocabulary's whole words, and their normalised vectors."""
    words = (WEIGHTS / "static-en-256.vocab").read_text("utf-8").splitlines()
    table = np.load(WEIGHTS / "static-en-256.npy")
    rows: dict[str, list[int]] = defaultdict(list)
    for number, word in enumerate(words):
        if _WORD.fullmatch(word) and word not in STOP_WORDS:
            rows[tokenize_query(word)[0]].append(number)
    stems = sorted(rows)
    vectors = np.stack([table[rows[stem]].mean(axis=0, dtype=np.float32) for stem in stems])
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return stems, vectors / np.maximum(lengths, 1e-9)


def main() -> None:
    stems, vectors = stem_vectors()
    starts, kin, near = [0], [], []
    for number, vector in enumerate(vectors):
        cosines = vectors @ vector
        cosines[number] = -1
        best = np.argsort(-cosines, kind="stable")[:MOST]
        best = best[cosines[best] > LEAST]
        kin.append(best.astype(np.uint16))
        near.append(np.minimum(np.rint(cosines[best] * 255), 255).astype(np.uint8))
        starts.append(starts[-1] + len(best))
    np.savez_compressed(
        WEIGHTS / SYNONYM_FILE,
        stems=np.frombuffer("\n".join(stems).encode("ascii"), np.uint8),
        starts=np.array(starts, np.uint32),
        kin=np.concatenate(kin),
        near=np.concatenate(near),
    )
    size = (WEIGHTS / SYNONYM_FILE).stat().st_size
    print(f"{len(stems):,} stems, {starts[-1]:,} pairs, {size:,} bytes")


if __name__ == "__main__":
    main()
