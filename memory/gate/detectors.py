"""Detectors: where a text holds what should not be kept as it is.

A detector takes a text and tells spans of it. Those built in know common forms, and cannot know
all; each goes over a text once, however hostile that is, and sees it in its plain form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from perdure.memory.gate.contact_detectors import EMAIL, PHONE, emails, phones
from perdure.memory.gate.number_detectors import CARD, IBAN, cards, ibans
from perdure.memory.gate.plain_text import OnPlain, PlainText
from perdure.memory.gate.secret_detectors import secrets

Span = tuple[str, int, int]
"""What it is, and from where to where: `text[start:end]`."""
CONTACTS: Final = frozenset({EMAIL, PHONE})
CARDS: Final = frozenset({CARD, IBAN})


class Detector(Protocol):
    """Finds something of a kind in texts. A function is one."""

    def __call__(self, text: str, /) -> Iterable[Span]:
        """Where it is; its kind is `"secret"`, `"card"`, `"iban"`, `"e-mail"`, `"phone"` or yours.

        What is of a kind of your own is treated as a secret.
        """


DETECTORS: Final[tuple[Detector, ...]] = (secrets, cards, ibans, emails, phones)
"""What is built in."""


def spans_of(text: str, detectors: Iterable[Detector]) -> list[Span]:
    """What detectors find in a text, from left to right; of spans that overlap, one is made.

    It has the kind of that which begins first, and where several do, of the first detector's.
    """
    plain = PlainText(text)  # once for all that go on it
    found = [
        span
        for detector in detectors
        for span in (
            plain.found(detector.find) if isinstance(detector, OnPlain) else detector(text)
        )
    ]
    if len(found) < 2:
        return found
    found.sort(key=lambda span: span[1])
    merged = [found[0]]
    for kind, start, end in found[1:]:
        last_kind, last_start, last_end = merged[-1]
        if start < last_end:
            merged[-1] = last_kind, last_start, max(end, last_end)
        else:
            merged.append((kind, start, end))
    return merged


def redacted(text: str, spans: Sequence[Span]) -> str:
    """A text with what was found in it blotted out.

    >>> redacted("Ask ann@example.com.", spans_of("Ask ann@example.com.", DETECTORS))
    'Ask [e-mail].'

    Args:
        text: The text.
        spans: From left to right, as of `spans_of`.
    """
    if not spans:
        return text
    ends = [0, *(end for _, _, end in spans)]
    starts = [*(start for _, start, _ in spans), len(text)]
    kept = [text[end:start] for end, start in zip(ends, starts, strict=True)]
    marks = [*(f"[{kind}]" for kind, _, _ in spans), ""]
    return "".join(part + mark for part, mark in zip(kept, marks, strict=True))
