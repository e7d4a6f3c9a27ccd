"""What is sensitive in a candidate, secrets, cards, contacts, and what is done about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from perdure.memory.gate.detectors import (
    CARDS,
    CONTACTS,
    DETECTORS,
    Detector,
    Span,
    redacted,
    spans_of,
)
from perdure.memory.gate.number_detectors import cards, ibans
from perdure.memory.gate.secret_detectors import known_secrets, secrets
from perdure.memory.records import KEEP, Candidate, Verdict

Way = Literal["keep", "redact", "quarantine", "refuse"]
WAYS: Final = ("keep", "redact", "quarantine", "refuse")
_WORDS: Final = {
    "secret": "a password, key or other secret",
    "card": "the number of a payment card",
    "iban": "the number of a bank account",
    "e-mail": "an e-mail address",
    "phone": "a telephone number",
}
# ids are no sentences: they look drawn by lot, and nobody is called by one
_IN_IDS: Final[dict[Detector, Detector]] = {secrets: known_secrets, cards: cards, ibans: ibans}


@dataclass(frozen=True, slots=True)
class Sensitive:
    """What is done about sensitive parts.

    Attributes:
        secrets: About secrets, and kinds of the user's own.
        cards: About numbers of cards and accounts.
        contacts: About addresses and telephone numbers; `"redact"` where nobody asked for them to
            be kept.
        detectors: What finds them.
    """

    secrets: Way
    cards: Way
    contacts: Way
    detectors: Sequence[Detector]

    def judged(self, candidate: Candidate) -> Verdict:
        """What the sensitive parts of a candidate make of it.

        Raises:
            Exception: A detector of the user's does.
        """
        spans = spans_of(candidate.text, self.detectors)
        kinds = self._kinds(candidate, spans)
        if not kinds:
            return KEEP
        ways = {kind: self.way(kind, candidate.explicit) for kind in kinds}
        for worst in ("refuse", "quarantine"):
            found = [kind for kind, way in ways.items() if way == worst]
            if found:
                return Verdict(worst, f"it holds {_named(found)}", _check(found[0]))
        gone = [kind for kind, way in ways.items() if way == "redact"]
        if not gone:
            return KEEP
        blotted = [span for span in spans if span[0] in gone]
        text = redacted(candidate.text, blotted) if blotted else None
        return Verdict("keep", f"{_named(gone)} is blotted out", _check(gone[0]), text)

    def blotted_kinds(self, candidate: Candidate) -> list[str]:
        """What is blotted out in a candidate that is kept."""
        kinds = self._kinds(candidate, spans_of(candidate.text, self.detectors))
        return [kind for kind in kinds if self.way(kind, candidate.explicit) == "redact"]

    def cleaned(self, candidate: Candidate) -> dict[str, Any]:
        """The fields of a candidate that is kept, blotted out as its text is."""
        return {
            name: self._cleaned(part, candidate.explicit) for name, part in candidate.fields.items()
        }

    def blotted(self, text: str) -> str:
        """A text without anything sensitive, to be shown."""
        return redacted(text, spans_of(text, self.detectors))

    def way(self, kind: str, explicit: bool) -> Way:
        """What is done about a kind."""
        if kind in CONTACTS:
            return "keep" if explicit and self.contacts == "redact" else self.contacts
        return self.cards if kind in CARDS else self.secrets

    def _kinds(self, candidate: Candidate, spans: Sequence[Span]) -> list[str]:
        kinds = dict.fromkeys(kind for kind, _, _ in spans)
        for name, text in _leaves(candidate.fields) if candidate.fields else ():
            kinds.update(dict.fromkeys(kind for kind, _, _ in self._spans_in_field(text, name)))
        return list(kinds)

    def _cleaned(self, part: Any, explicit: bool, name: str = "") -> Any:
        if isinstance(part, str):
            spans = self._spans_in_field(part, name)
            return redacted(part, [s for s in spans if self.way(s[0], explicit) == "redact"])
        if isinstance(part, Mapping):
            return {key: self._cleaned(each, explicit, str(key)) for key, each in part.items()}
        if isinstance(part, list | tuple):
            return [self._cleaned(each, explicit, name) for each in part]
        return part

    def _spans_in_field(self, text: str, name: str) -> list[Span]:
        if len(text.split(maxsplit=1)) > 1:
            spans = spans_of(text, self.detectors)
        else:
            own = [_IN_IDS.get(d, d) for d in self.detectors if d in _IN_IDS or d not in DETECTORS]
            spans = spans_of(text, own)
        if spans or not text.strip():
            return spans
        # what is no secret by itself may be one by its name, like a password
        told = f"{name.replace('_', ' ')}: "
        own = [detector for detector in self.detectors if detector is secrets]
        named = [] if spans_of(text, own) else spans_of(told + text, own)
        at = len(told)
        return [(kind, start - at, end - at) for kind, start, end in named if start >= at]


def _leaves(value: Any) -> Iterator[tuple[str, str]]:
    """The texts within a JSON value, each with the name of the field that it is in."""
    left = [("", value)]
    while left:
        name, part = left.pop()
        if isinstance(part, str):
            yield name, part
        elif isinstance(part, Mapping):
            left += [(str(key), each) for key, each in part.items()]
        elif isinstance(part, list | tuple):
            left += [(name, each) for each in part]


def texts_in(value: Any) -> Iterator[tuple[str, int]]:
    """The texts within a JSON value, each with how deep it is; an empty one for a container."""
    left = [(value, 0)]
    while left:
        part, depth = left.pop()
        if isinstance(part, str):
            yield part, depth
        elif isinstance(part, Mapping | list | tuple):
            yield "", depth
            parts = part.values() if isinstance(part, Mapping) else part
            left += [(each, depth + 1) for each in parts]


def _named(kinds: Sequence[str]) -> str:
    said = [_WORDS.get(kind, f"what a detector calls {kind!r}") for kind in kinds]
    return " and ".join(said)


def _check(kind: str) -> str:
    if kind in CONTACTS:
        return "contacts"
    return "cards" if kind in CARDS else "secrets"
