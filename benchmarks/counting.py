"""Measure the time of counting tokens, first and again, and the error of the estimate.

    python benchmarks/counting.py --data ../shared/data ../shared/concepts

Texts are the turns of conversations in LoCoMo's form, the paragraphs of Markdown files, the
functions of this package, and one sentence in fourteen languages (Article 1 of the Universal
Declaration of Human Rights).
"""

# ruff: noqa: RUF001 - letters of other alphabets are meant
from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import bpe_openai
import numpy as np
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.messages.utils import count_tokens_approximately

from perdure.memory.short_term.tokens import token_counter

ROOT = Path(__file__).parents[1]
ARTICLE = {
    "Arabic": "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.",
    "Finnish": "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan.",
    "French": "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
    "German": "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "Greek": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "Hebrew": "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "Japanese": "すべての人間は、生まれながらにして自由であり、尊厳と権利とについて平等である。",
    "Korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "Chinese": "人人生而自由,在尊严和权利上一律平等。",
    "Russian": "Все люди рождаются свободными и равными в своем достоинстве и правах.",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "Turkish": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar.",
    "Vietnamese": "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi.",
}


def texts(folders: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each sample."""
    for folder in folders:
        for file in sorted(folder.glob("*.json")):
            for sample in json.loads(file.read_text(encoding="utf-8")):
                for session in sample["conversation"].values():
                    if isinstance(session, list):
                        yield from (("chat", turn["text"]) for turn in session)
        for file in sorted(folder.glob("*.md")):
            kind = "docs, Chinese" if ".zh." in file.name else "docs"
            yield from ((kind, part) for part in parts(file, r"\n\s*\n"))
    for file in sorted((ROOT / "checkpointers").glob("*.py")):
        yield from (("code", part) for part in parts(file, r"\n\n\n"))
    yield from ARTICLE.items()


def parts(file: Path, between: str) -> list[str]:
    return [part for part in re.split(between, file.read_text(encoding="utf-8")) if part.strip()]


def speed() -> None:
    words = "so we moved the appointment to Tuesday, half past three, and told the others. " * 7
    for name in ("gpt-4o", "approximate"):
        counter = token_counter(name)
        talk: list[BaseMessage] = [
            (HumanMessage, AIMessage)[i % 2](f"{i}: {words}", id=str(i)) for i in range(5_000)
        ]
        fresh = [m.model_copy(update={"content": bytes_of(m)}) for m in talk]
        tokens = 0
        for label, messages in (("first", talk), ("next", fresh)):
            took = float("inf")
            for _ in range(1 if label == "first" else 5):  # the best of five: machines are noisy
                start = time.perf_counter()
                tokens = sum(map(counter.count_message_tokens, messages))
                took = min(took, time.perf_counter() - start)
            print(
                f"{name:11} {label:5} pass over 5,000 messages: {took * 1e3:7.1f} ms, "
                f"{took * 200:6.2f} us a message, {tokens / took / 1e6:7.1f} million tokens/s"
            )
        start = time.perf_counter()
        count_tokens_approximately(talk)
    print(f"langchain's count_tokens_approximately: {(time.perf_counter() - start) * 1e3:.1f} ms\n")


def bytes_of(message: BaseMessage) -> str:
    """Return a copy of the content, because a checkpointer also returns new objects."""
    return str(str(message.content).encode(), "utf-8")


def errors(rows: list[tuple[str, str]], counted: np.ndarray) -> None:
    kinds = np.array([kind for kind, _ in rows])
    estimate = token_counter("approximate").count_text
    ratios = np.array([estimate(text) for _, text in rows]) / counted
    print(f"{'estimate : o200k_base':22} {'texts':>6} {'all':>6} {'p5':>6} {'p50':>6} {'p95':>6}")
    for kind in [*dict.fromkeys(kinds), "every text", "20 tokens or more"]:
        chosen = kinds == kind if kind in kinds else counted >= (20 if "20" in kind else 0)
        share = (ratios * counted)[chosen].sum() / counted[chosen].sum()
        low, middle, high = np.quantile(ratios[chosen], [0.05, 0.5, 0.95])
        print(f"{kind:22} {chosen.sum():6} {share:6.2f} {low:6.2f} {middle:6.2f} {high:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    rows = list(texts(args.data))
    encode = bpe_openai.get_encoding("o200k_base").encode_ordinary
    counted = np.array([len(encode(text)) for _, text in rows], float)
    speed()
    errors(rows, counted)


if __name__ == "__main__":
    main()
