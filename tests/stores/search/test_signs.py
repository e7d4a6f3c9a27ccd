"""Emoji, currency symbols and symbols in names are words in searches and recalls."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.memory import recall, remember
from perdure.stores import SQLiteStore
from tests.backends import KEY

TEXTS = {
    "pizza": "🍕 is her favourite",
    "flag": "She moved to 🇳🇴 last year",
    "heart": "The letter ended with ❤️ and nothing else",
    "wave": "👋🏽 was all that he wrote",
    "coder": "Her avatar is 👩‍💻 at work",
    "sharp": "The C# course starts in May",
    "plus": "A C++ build takes an hour",
    "plain": "C is taught in the first year",
    "net": "The shop runs on .NET now",
    "nets": "He mends nets by the harbour",
    "euro": "The ticket was 12 €",
    "dollar": "The ticket was $14",
    "handle": "Write to @ottilie about the boat",
    "tag": "Photos are under #harbour2026",
    "arrow": "Bergen → Oslo takes seven hours",
}
FILLERS = [f"Note {number}: the {word} was mended" for number, word in enumerate("abcdefghij")]
QUERIES = [
    ("🍕", "pizza"),
    ("who likes 🍕?", "pizza"),
    ("🇳🇴", "flag"),
    ("❤", "heart"),
    ("👋", "wave"),
    ("💻", "coder"),
    ("C#", "sharp"),
    ("the C++ thing", "plus"),
    (".NET", "net"),
    ("€", "euro"),
    ("how many $", "dollar"),
    ("@ottilie", "handle"),
    ("#harbour2026", "tag"),
    ("→", "arrow"),
]


@pytest.mark.parametrize("sealed", [False, True])
def test_item_with_symbol_of_query_ranks_first(sealed: bool) -> None:
    """The store has no embedder, so that words alone decide."""
    options: Any = {"key": KEY, "text_index": "keyed"} if sealed else {}
    with SQLiteStore.open(":memory:", index=None, **options) as store:
        for key, text in TEXTS.items():
            store.put(("notes",), key, {"text": text})
        for number, text in enumerate(FILLERS):
            store.put(("notes",), f"filler{number}", {"text": text})
        for query, expected in QUERIES:
            found_keys = [item.key for item in store.search(("notes",), query=query)]
            assert found_keys[:1] == [expected], query


def test_recall_finds_memory_by_its_emoji() -> None:
    """The symbol alone is enough evidence, and a symbol that no memory has finds nothing."""
    with SQLiteStore.open(":memory:") as store:
        options: Any = {"store": store, "config": {"configurable": {"user_id": "ann"}}}
        for text in [*TEXTS.values(), *FILLERS]:
            remember(text, **options)

        assert recall("🍕", **options).memories[0].text == TEXTS["pizza"]
        assert recall("C#", **options).memories[0].text == TEXTS["sharp"]
        assert not recall("🚲", **options).memories
