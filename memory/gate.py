"""The gate: decides what may become a memory, what waits in quarantine, and what is refused.

It does not judge what a text means, or whether that will matter: the model that extracts memories
does. Candidates that nobody asked for are judged more strictly than those that somebody asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from perdure.memory.detectors import DETECTORS, Detector, Sensitive, Treatment, texts_in
from perdure.memory.effects import Effect, Effects
from perdure.memory.options import choice, instance, whole
from perdure.memory.records import TURN, Action, Candidate, Verdict
from perdure.memory.sameness import EVENTS, Known, digest, equivalent
from perdure.memory.store_adapter import StoreAdapter
from perdure.memory.tombstones import entombed, sources
from perdure.stores.base import Namespace

Check = Callable[[Candidate], Verdict | None]
"""A check of your own: a verdict, or None if it has nothing to say."""

MAX_CHARS: Final = 2_000
"""Characters of a memory's text. Turns and episodes may be longer."""
MAX_VALUE_CHARS: Final = 100_000
"""Characters of a memory's text and fields."""
_DEEPEST: Final = 32  # levels of fields
_COUNTED: Final = 1_000  # memories that may be added before the store is asked again
_NAMESPACES: Final = 10_000  # whose room is remembered


class Gate:
    """Judges candidates for memories.

    It refuses a text without words or that is too long, words of a system message, a fact that a
    memory states, what was deleted before unless somebody asks for it, and more than `max_items`.
    Secrets, and what rests on a tool's words alone, go into quarantine.

    Args:
        checks: Your own checks, asked in order about what would be kept. The first verdict other
            than to keep decides; one to keep may give another `text`. If a check raises, the
            candidate goes into quarantine.
        secrets: The treatment of passwords, keys and the kinds of your detectors.
        cards: The treatment of numbers of payment cards and bank accounts.
        contacts: The treatment of e-mail addresses and telephone numbers; `"redact"` keeps them
            where somebody asks for the memory.
        tools: The treatment of what rests on a tool's words alone, unless your code asks for it.
        detectors: Functions that find secrets and contacts.
        max_items: The memories that a namespace may hold, with those below it, about.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        checks: Sequence[Check] = (),
        *,
        secrets: Treatment = "quarantine",
        cards: Treatment = "quarantine",
        contacts: Treatment = "redact",
        tools: Action = "quarantine",
        detectors: Sequence[Detector] = DETECTORS,
        max_items: int = 100_000,
    ) -> None:
        for name, given in (("secrets", secrets), ("cards", cards), ("contacts", contacts)):
            choice(name, given, get_args(Treatment))
        choice("tools", tools, get_args(Action))
        self.checks: Sequence[Check] = _functions("checks", checks)
        self.sensitive = Sensitive(secrets, cards, contacts, _functions("detectors", detectors))
        self._tools: Action = tools
        self._max_items = whole("max_items", max_items, 0)
        self._room: dict[Namespace, int] = {}  # that is left, as last counted

    def judge(
        self,
        candidates: Sequence[Candidate],
        adapter: StoreAdapter,
        namespace: Namespace,
        *,
        keys: Sequence[str | None] | None = None,
    ) -> Effects[list[Verdict]]:
        """A verdict on each candidate, in order.

        `keys` are those that the candidates would be kept under: a memory may be put in other words
        under its own key, and `same_as` may name another candidate.
        """
        keys = [None] * len(candidates) if keys is None else keys
        verdicts = [self._static(candidate) for candidate in candidates]
        judgement = _Judgement(candidates, verdicts, keys)
        yield from _refuse_deleted(judgement, adapter, namespace)
        yield from _refuse_known(judgement, adapter, namespace)
        judgement.verdicts = yield from self.examine(candidates, judgement.verdicts)
        _refuse_repeated(judgement)
        yield from self._refuse_excess(judgement, adapter, namespace)
        return judgement.verdicts

    def examine(
        self, candidates: Sequence[Candidate], verdicts: Sequence[Verdict]
    ) -> Effects[list[Verdict]]:
        """The verdicts after your checks, which are asked about the candidates that are kept."""
        judgement = _Judgement(candidates, list(verdicts), [None] * len(candidates))
        for check in self.checks:
            asked = judgement.open()
            shown = [replace(candidates[i], text=judgement.text(i)) for i in asked]
            answers = yield _answers(check, shown)
            name = str(getattr(check, "__name__", type(check).__name__))
            for i, answer in zip(asked, answers, strict=True):
                if isinstance(answer, Verdict):
                    judgement.verdicts[i] = _combined(judgement.verdicts[i], answer, name)
                elif answer is not None:
                    fault = f"the check {name} {self.sensitive.redacted(_failure(answer))}"
                    judgement.verdicts[i] = Verdict("quarantine", fault, name)
        return judgement.verdicts

    def _refuse_excess(
        self, judgement: _Judgement, adapter: StoreAdapter, namespace: Namespace
    ) -> Effects[None]:
        """Refuse new memories that the namespace has no room for."""
        kept = judgement.open()
        room = self._room.pop(namespace, 0)
        if room < len(kept):
            room = min(self._max_items, max(len(kept), _COUNTED))
            offset = self._max_items - room
            page = yield from adapter.found(namespace, limit=max(room, 1), offset=offset)
            room = max(0, room - len(page))
        new = kept
        if room < len(kept):  # a memory that is there takes no more room
            new = []
            for i in kept:
                key = judgement.keys[i]
                if key is None or (yield from adapter.got(namespace, key)) is None:
                    new.append(i)
        for i in new[room:]:
            reason = f"the namespace is full: max_items is {self._max_items:,}"
            judgement.refuse(i, "flood", reason)
        if len(self._room) < _NAMESPACES:
            self._room[namespace] = max(0, room - len(new))

    def _static(self, candidate: Candidate) -> Verdict:
        """A verdict that needs no store."""
        refusal = _unfit(candidate) or _too_large(candidate)
        if refusal is not None:
            return refusal
        verdict = self.sensitive.judged(candidate)
        asked_by_code = candidate.explicit and not candidate.by_model
        trusted = candidate.role != "tool" or asked_by_code or self._tools == "keep"
        if verdict.action != "keep" or trusted:
            return verdict
        return Verdict(self._tools, "it rests on a tool's words alone", "role")


@dataclass(slots=True)
class _Judgement:
    """The candidates of one call, with their keys and the verdicts so far."""

    candidates: Sequence[Candidate]
    verdicts: list[Verdict]
    keys: Sequence[str | None]

    def open(self, *, events: bool = True) -> list[int]:
        """The places of the candidates that are kept so far."""
        places = range(len(self.candidates))
        kept = [i for i in places if self.verdicts[i].action == "keep"]
        return [i for i in kept if events or self.candidates[i].kind not in EVENTS]

    def text(self, i: int) -> str:
        """A candidate's text as it would be kept."""
        text = self.verdicts[i].text
        return self.candidates[i].text if text is None else text

    def refuse(self, i: int, check: str, reason: str, same_as: str | None = None) -> None:
        self.verdicts[i] = Verdict("refuse", reason, check, None, same_as)


def _refuse_deleted(
    judgement: _Judgement, adapter: StoreAdapter, namespace: Namespace
) -> Effects[None]:
    """Refuse what was deleted, unless somebody asks for it."""
    marks: dict[int, list[str]] = {}
    for i in judgement.open():
        candidate = judgement.candidates[i]
        if not candidate.explicit:
            marks[i] = [digest(text) for text in {candidate.text, judgement.text(i)}]
            marks[i] += sources(candidate.provenance) if candidate.kind == TURN else []
    gone = yield from entombed(adapter, namespace, set().union(*marks.values()))
    for i, keys in marks.items():
        if not gone.isdisjoint(keys):
            reason = "it was deleted or forgotten, and nobody asks for it"
            judgement.refuse(i, "tombstone", reason)


def _refuse_known(
    judgement: _Judgement, adapter: StoreAdapter, namespace: Namespace
) -> Effects[None]:
    """Refuse facts that a memory states, and unasked those that it stated before."""
    known = Known(adapter, namespace)
    for i in judgement.open(events=False):
        candidate, text = judgement.candidates[i], judgement.text(i)
        memory = yield from known.stating(text, judgement.keys[i])
        if memory is not None:
            judgement.refuse(i, "duplicate", "a memory says the same already", memory.key)
        elif not candidate.explicit:
            at = candidate.provenance.at if candidate.provenance else None
            previous = yield from known.outdated(text, at)
            if previous is not None:
                day = previous.until.date().isoformat()
                reason = f"it was {previous.change} on {day}, and said before"
                judgement.refuse(i, "duplicate", reason)


def _refuse_repeated(judgement: _Judgement) -> None:
    """Refuse facts that an earlier candidate of the same call states."""
    kept: list[int] = []
    for i in judgement.open(events=False):
        text = judgement.text(i)
        first = next((each for each in kept if equivalent(judgement.text(each), text)), None)
        if first is None:
            kept.append(i)
        else:
            reason = "another candidate says the same"
            judgement.refuse(i, "duplicate", reason, judgement.keys[first])


def _unfit(candidate: Candidate) -> Verdict | None:
    text = candidate.text
    if not isinstance(text, str) or not any(map(str.isalnum, _statement(candidate))):
        return _refused("content", "it has no words")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        return _refused("content", f"it is no Unicode text: {exc.reason}")
    if candidate.role == "system":
        return _refused("role", "the words of a system message are settings, and no memory")
    return None


def _too_large(candidate: Candidate) -> Verdict | None:
    chars = len(candidate.text)
    if chars > MAX_CHARS and candidate.kind not in EVENTS:
        return _refused("size", f"it has {chars:,} characters; {MAX_CHARS:,} are allowed")
    for _, text, depth in texts_in(candidate.fields):
        if depth > _DEEPEST:
            return _refused("size", f"its fields are more than {_DEEPEST} levels deep")
        chars += len(text)
    if chars > MAX_VALUE_CHARS:
        reason = f"it has {chars:,} characters with its fields; {MAX_VALUE_CHARS:,} are allowed"
        return _refused("size", reason)
    return None


def _statement(candidate: Candidate) -> str:
    """The text of a candidate, without the speaker's name in front of it."""
    speaker = candidate.provenance.actor if candidate.provenance else None
    if candidate.kind in EVENTS:
        for name in (speaker, candidate.role):
            if name and candidate.text.startswith(f"{name}: "):
                return candidate.text[len(name) + 2 :]
    return candidate.text


def _combined(before: Verdict, answer: Verdict, name: str) -> Verdict:
    """The verdict after a check's; one that keeps undoes no redaction."""
    if answer.action != "keep":
        reason = answer.reason or f"the check {name} says so"
        return replace(answer, reason=reason, check=answer.check or name)
    if answer.text is None:
        return before
    reasons = (before.reason, answer.reason or "it is put otherwise")
    check = before.check or answer.check or name
    return Verdict("keep", "; ".join(filter(None, reasons)), check, answer.text)


def _answers(check: Check, shown: Sequence[Candidate]) -> Effect:
    """The answers of a check, or what it raised instead; an async caller has it run in a thread."""

    def called() -> list[Any]:
        return [_answer(check, each) for each in shown]

    return Effect(called, lambda: asyncio.to_thread(called))


def _answer(check: Check, candidate: Candidate) -> Any:
    try:
        return check(candidate)
    except Exception as exc:
        return exc


def _failure(answer: Any) -> str:
    if isinstance(answer, Exception):
        return f"raised {type(answer).__name__}: {answer!s:.200}"
    return f"returned {answer!r:.80}, which is no answer"


def _functions(name: str, given: Any) -> tuple[Any, ...]:
    for each in instance(name, given, (list, tuple), "a list of functions"):
        instance(name, each, Callable, "a function")  # type: ignore[arg-type]
    return tuple(given)


def _refused(check: str, reason: str) -> Verdict:
    return Verdict("refuse", reason, check)
