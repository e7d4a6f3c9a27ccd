"""Measure how many paraphrases are recognised as equal, and how many changes as different.

    python benchmarks/paraphrases.py

`data/paraphrases.jsonl` has pairs of texts: paraphrases, and changes of a name, place, number,
date, negation, role, tense or another word. No model is involved in the table; a model that
extracts memories sees similar memories and decides about them itself.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from perdure.stores.search.text_equivalence import (
    is_same_normalized_text,
    is_text_stating_same_fact,
)

PAIRS = Path(__file__).parent / "data" / "paraphrases.jsonl"


class Pair(NamedTuple):
    kind: str
    a: str
    b: str


def pairs() -> list[Pair]:
    return [Pair(**json.loads(line)) for line in PAIRS.read_text("utf-8").splitlines()]


def main() -> None:
    total: Counter[str] = Counter()
    by_form: Counter[str] = Counter()
    by_both: Counter[str] = Counter()
    for kind, a, b in pairs():
        for group in (kind, *(["all changes"] if kind != "paraphrase" else [])):
            total[group] += 1
            by_form[group] += is_same_normalized_text(a, b)
            by_both[group] += is_text_stating_same_fact(a, b)
    print(f"{'':12} {'pairs':>5} {'the same by normal form':>24} {'and by vectors':>15}")
    for group, count in total.items():
        print(f"{group:12} {count:5} {by_form[group]:24} {by_both[group]:15}")
    apart = 1 - by_both["all changes"] / total["all changes"]
    found = by_both["paraphrase"] / total["paraphrase"]
    print(f"\n{apart:.1%} of changes kept apart, {found:.1%} of paraphrases found")


if __name__ == "__main__":
    main()
