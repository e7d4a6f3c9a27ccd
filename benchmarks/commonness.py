"""Make the table of how common words are from the lists of wordfreq: 1 second.

    pip install wordfreq && python benchmarks/commonness.py   # writes weights/common-en.npz

A token's share is the sum of those of its words. All numbers of so many digits are one token, of
zeros.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
from wordfreq import get_frequency_dict

from perdure.stores.text import COMMON, STEPS, tokens

WEIGHTS = Path(__file__).parent.parent / "stores" / "weights"


def main() -> None:
    shares: dict[str, float] = defaultdict(float)
    for word, share in get_frequency_dict("en", wordlist="small").items():
        for token in set(tokens(word)):
            shares[token] += share
    words = sorted(shares, key=str.encode)
    rare = -np.log([shares[word] for word in words])
    np.savez_compressed(
        WEIGHTS / COMMON,
        tokens=np.frombuffer("\n".join(words).encode(), np.uint8),
        rare=np.rint(rare * STEPS).astype(np.uint8),
    )
    print(f"{len(words):,} tokens, {(WEIGHTS / COMMON).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
