"""What a profile may hold: the gate judges what a change sets, before anything is written.

The gate's rules for secrets, cards and contacts apply, and checks of the user's own. Its other
rules are for memories: a profile says each thing in one place, so nothing in it is said twice, and
its schema has decided what is worth knowing next month; "tired" is a legitimate mood.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from perdure.errors import InvalidPatch
from perdure.memory.detectors import CONTACTS, spans_of
from perdure.memory.effects import Effects
from perdure.memory.gate import Gate
from perdure.memory.profile.documents import Document, Edit, escaped, plain, tokens_of
from perdure.memory.profile.items import KIND, ProfilePlace
from perdure.memory.records import Candidate, Verdict
from perdure.stores.base import Provenance

Where = tuple[str | int, ...]
_ITSELF: Final = "a field's name"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value in a document that has none within it.

    Attributes:
        where: The names and indices that lead to it.
        value: Text, a number, a truth or null.
    """

    where: Where
    value: Any

    @property
    def path(self) -> str:
        """Its place, as a JSON pointer."""
        return "".join(f"/{escaped(str(part))}" for part in self.where)

    @property
    def label(self) -> str:
        """What stands before it where it is read: `4711` is none, and `pin: 4711` is a secret."""
        names = (part for part in reversed(self.where) if isinstance(part, str))
        return f"{next(names, '')}: "

    @property
    def text(self) -> str:
        """It as text; of a truth or null, none."""
        return "" if self.value is None or isinstance(self.value, bool) else str(self.value)


@dataclass(frozen=True, slots=True)
class Screen:
    """Has changes judged.

    Attributes:
        gate: Judges.
    """

    gate: Gate

    def check_names(self, names: Iterable[str], former: Document, place: ProfilePlace) -> None:
        """Refuse names of fields that hold what is not to be kept; they cannot be blotted out.

        Raises:
            InvalidPatch: One does.
        """
        for name in sorted(set(names).difference(names_in(former))):
            verdict = self._judged(self._candidate(name, name, place), _ITSELF)
            if verdict.text is not None:
                raise _refused(_ITSELF, verdict)

    def noted(
        self, edits: Sequence[Edit], former: Document, place: ProfilePlace
    ) -> tuple[Edit, ...]:
        """Edits as they may be noted: reasons are kept with a change, and so are paths.

        Raises:
            InvalidPatch: One holds what is not to be kept.
        """
        self.check_names((n for each in edits for n in tokens_of(each.path)), former, place)
        return tuple(self._reasoned(each, place) for each in edits)

    def passed(
        self, leaves: Sequence[Leaf], new: Document, place: ProfilePlace
    ) -> Effects[Document]:
        """A document as it may be kept, with parts of what a change sets blotted out.

        Args:
            leaves: What it sets; see `changed`.
            new: What the profile would be.
            place: Where, on whose words.

        Raises:
            InvalidPatch: A leaf holds what is not to be kept; what it is, is not quoted.
        """
        judged = [leaf for leaf in leaves if leaf.text]
        candidates = [self._candidate(f"{x.label}{x.text}", x.text, place) for x in judged]
        verdicts = [
            self._judged(each, repr(leaf.path))
            for leaf, each in zip(judged, candidates, strict=True)
        ]
        if self.gate.checks:
            verdicts = yield from self.gate.examine(candidates, verdicts)
        instead = {
            leaf.where: _instead(leaf, verdict)
            for leaf, verdict in zip(judged, verdicts, strict=True)
            if verdict.action != "keep" or verdict.text is not None
        }
        if instead:
            new = plain(new, "the document")
            for where, text in instead.items():
                _put(new, where, text)
        return new

    def _reasoned(self, edit: Edit, place: ProfilePlace) -> Edit:
        if not edit.reason:
            return edit
        what = f"the reason given for {edit.path!r:.200}"
        verdict = self._judged(self._candidate(edit.reason, edit.reason, place), what)
        return edit if verdict.text is None else replace(edit, reason=verdict.text)

    def _candidate(self, text: str, value: str, place: ProfilePlace) -> Candidate:
        """What would be kept: asked for, if by hand, or if what contacts it has a user told."""
        explicit = place.users is None or all(
            place.users.have(text[start:end])
            for kind, start, end in self._spans(text)
            if kind in CONTACTS
        )
        role: Any = place.provenance.trust if place.provenance else None
        if place.users is None or place.users.have(value):
            role = "user"
        return Candidate(text, KIND, {}, place.provenance, role or "user", explicit)

    def _spans(self, text: str) -> list[tuple[str, int, int]]:
        try:
            return spans_of(text, self.gate.sensitive.detectors)
        except Exception:  # a detector of the user's: see `_judged`
            return []

    def _judged(self, candidate: Candidate, what: str) -> Verdict:
        try:
            verdict = self.gate.sensitive.judged(candidate)
        except Exception as exc:  # a detector of the user's; what it says may be a secret
            fault = f"a detector raised {type(exc).__name__}, so nobody knows what it holds"
            raise InvalidPatch(f"{what} cannot be kept: {fault}") from exc
        if verdict.action != "keep":
            raise _refused(what, verdict)
        return verdict


def changed(former: Document, new: Document) -> list[Leaf]:
    """What a change sets.

    What the profile says already, under the same name, is not judged again: an element of a list
    may have moved, and what was let in once does not stand in the way of other changes.
    """
    known = {(leaf.label, repr(leaf.value)) for leaf in _leaves(former)}
    return [leaf for leaf in _leaves(new) if (leaf.label, repr(leaf.value)) not in known]


def sourced(leaves: Sequence[Leaf], place: ProfilePlace) -> Provenance | None:
    """Where a change comes from: from users, if all that it sets stands in their words."""
    users, given = place.users, place.provenance
    if users is None or given is None or not leaves:
        return given
    if not all(users.have(leaf.text) for leaf in leaves):
        return given
    return replace(given, actor=users.actor, trust="user")


def names_in(value: Any) -> Iterator[str]:
    """The names of all fields within a value."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from names_in(part)


def _leaves(value: Any, where: Where = ()) -> Iterator[Leaf]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, (*where, name))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _leaves(part, (*where, number))
    else:
        yield Leaf(where, value)


def _instead(leaf: Leaf, verdict: Verdict) -> str:
    """The text that is kept in the place of a leaf's.

    Raises:
        InvalidPatch: It is refused, or is a number, of which no part can be blotted out.
    """
    if verdict.action != "keep" or verdict.text is None or not isinstance(leaf.value, str):
        raise _refused(repr(leaf.path), verdict)
    return verdict.text.removeprefix(leaf.label)


def _put(document: Document, where: Where, text: str) -> None:
    within: Any = document
    for part in where[:-1]:
        within = within[part]
    within[where[-1]] = text


def _refused(what: str, verdict: Verdict) -> InvalidPatch:
    return InvalidPatch(
        f"{what:.200} cannot be kept: {verdict.reason}; leave it out (the gate's {verdict.check})"
    )
