"""An export as ChatGPT gives it, with made-up conversations of a year.

For the notebook that explores one's own export, so that it also runs without one.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

_TALKS = {  # title: the days on which it was talked of, and what was said
    "Sourdough bread": (
        (3, 17, 24, 31, 66, 94, 150, 206, 290, 345),
        (
            "My sourdough bread is flat.",
            "Let the dough rise until it doubles, and feed the starter.",
        ),
        ("Which flour does the starter like?", "Rye flour: it ferments fastest."),
        ("How hot must the oven be?", "240 degrees, with steam for the first quarter of an hour."),
    ),
    "Herbs on the balcony": (
        (70, 80, 92, 101, 112, 118, 140, 161),
        ("Which herbs grow in the shade?", "Mint, parsley and chives grow well there."),
        ("How often do I water the mint?", "Every day in summer; the pot should never dry out."),
    ),
    "Learning Dutch": (
        (205, 212, 219, 226, 233, 240, 247, 261, 268, 275, 282, 296, 310, 324, 338, 352),
        ("Where does the verb go in Dutch?", "In a main clause it is the second part."),
        ("And in a subordinate clause?", "At the end, after the object."),
        ("A sentence to practise, please.", "Ik denk dat ze morgen een boek koopt."),
        ("Is it de or het?", "Two of three Dutch nouns have de; learn the article with the noun."),
    ),
    "Trains to Lisbon": (
        (122, 125, 128, 131),
        ("Is there a night train to Lisbon?", "Not from Paris; change trains in Irun and Madrid."),
        ("How long does the journey take?", "Two days by train, with a night in San Sebastián."),
    ),
    "The heating is broken": (
        (12, 14, 20, 330, 334, 341),
        (
            "The heating in my flat is broken.",
            "Write to the landlord, and set a date for the repair.",
        ),
        (
            "May I pay less rent meanwhile?",
            "Often yes, from the day on which you told the landlord.",
        ),
    ),
}
_DETAILS = " Here is how, step by step, and what may go wrong at each step." * 4


def example_export(folder: Path) -> Path:
    """Write `conversations.json` into a folder."""
    days = sorted((day, title) for title, (days, *_) in _TALKS.items() for day in days)
    path = folder / "conversations.json"
    path.write_text(json.dumps([_talk(*of) for of in days], ensure_ascii=False), encoding="utf-8")
    return path


def _talk(day: int, title: str) -> dict[str, Any]:
    start = datetime(2025, 1, 1, 9, tzinfo=UTC) + timedelta(days=day)
    _, *exchanges = _TALKS[title]
    parent, mapping = "root", {"root": dict[str, Any](id="root", parent=None, children=[])}
    texts = [text for said, told in exchanges for text in (said, told + _DETAILS * (day % 3))]
    for number, text in enumerate(texts[: 2 + day % 7]):
        id = f"{day}-{number}"
        message = {
            "id": id,
            "author": {"role": "assistant" if number % 2 else "user"},
            "create_time": (start + timedelta(minutes=number)).timestamp(),
            "content": {"content_type": "text", "parts": [text]},
        }
        mapping[parent]["children"].append(id)
        mapping[id] = {"id": id, "message": message, "parent": parent, "children": []}
        parent = id
    talk = {"conversation_id": f"talk-{day}", "title": title, "create_time": start.timestamp()}
    return {**talk, "mapping": mapping, "current_node": parent}
