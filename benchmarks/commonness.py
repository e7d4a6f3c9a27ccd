"""Build the table of word frequencies from the lists of wordfreq. This takes 5 seconds.

    pip install wordfreq && python benchmarks/commonness.py   # writes stores/weights/common.npz

A token's share is the sum of those of its words; of other languages than English the commonest
words count. All numbers with the same number of digits are one token, which consists of zeros.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from wordfreq import get_frequency_dict

from perdure.stores.search.text import (
    ENGLISH,
    FREQUENCY_FILE,
    NON_LATIN,
    STEPS_PER_NAT,
    extract_query_words_with_stems,
    iter_stems,
    tokenize,
)

WEIGHTS = Path(__file__).parent.parent / "stores" / "weights"
CODES = {
    ENGLISH: ["en"],
    "german": ["de"],
    "spanish": ["es"],
    "french": ["fr"],
    "italian": ["it"],
    "portuguese": ["pt"],
    "dutch": ["nl"],
    "swedish": ["sv"],
    "danish": ["da"],
    "norwegian": ["nb"],
    "finnish": ["fi"],
    "hungarian": ["hu"],
    NON_LATIN: ["ru", "ar", "zh", "ja"],
}
MOST = 1500  # words of another language than English


def tokens_of(word: str, language: str) -> Iterable[str]:
    """Return the tokens into which a search splits a word."""
    if language == ENGLISH:
        return tokenize(word)
    return (
        extract_query_words_with_stems(word)
        if language == NON_LATIN
        else [stem for _, stem in iter_stems(word, language)]
    )


def main() -> None:
    arrays = {}
    for language, codes in CODES.items():
        shares: dict[str, float] = defaultdict(float)
        for code in codes:
            words = get_frequency_dict(code, wordlist="small")
            commonest = sorted(words, key=lambda word: -words[word])
            for word in commonest if language == ENGLISH else commonest[:MOST]:
                for token in set(tokens_of(word, language)):
                    shares[token] += words[word]
        in_order = sorted(shares, key=str.encode)
        rare = -np.log([shares[token] for token in in_order])
        arrays[f"{language} tokens"] = np.frombuffer("\n".join(in_order).encode(), np.uint8)
        arrays[f"{language} rare"] = np.rint(rare * STEPS_PER_NAT).astype(np.uint8)
        print(f"{language}: {len(in_order):,} tokens")
    np.savez_compressed(WEIGHTS / FREQUENCY_FILE, **arrays)
    print(f"{(WEIGHTS / FREQUENCY_FILE).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
