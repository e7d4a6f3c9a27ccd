"""The gate: decides what may become a memory, what waits in quarantine, and what is refused.

It does not judge what a text means, or whether that will matter: the model that extracts memories
does. Candidates that nobody asked for are judged more strictly than those that somebody asked for.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from perdure.errors import ConfigurationError
from perdure.memory.detectors import (
    CARDS,
    CONTACTS,
    DETECTORS,
    OF_SENTENCES,
    Detector,
    Finding,
    redacted,
    secrets,
    spans_of,
)
from perdure.memory.effects import Effect, Effects
from perdure.memory.limits import Rates, Room
from perdure.memory.normal_form import normal
from perdure.memory.options import choice, whole
from perdure.memory.records import KEEP, TURN, Action, Candidate, Verdict
from perdure.memory.sameness import EVENTS, Known, digest, equivalent
from perdure.memory.store_adapter import StoreAdapter
from perdure.memory.tombstones import entombed, sources
from perdure.stores.base import Namespace

Treatment = Literal["keep", "redact", "quarantine", "refuse"]
"""What is done about a secret or a contact."""
Check = Callable[[Candidate], Verdict | Awaitable[Verdict | None] | None]
"""A check of your own: a verdict, or None if it has nothing to say."""

MAX_CHARS: Final = 2_000
"""Characters of a memory's text. Turns and episodes may be longer."""
MAX_VALUE_CHARS: Final = 100_000
"""Characters of a memory's text and fields."""
_DEEPEST: Final = 32  # levels of fields
_SHINGLE: Final = 4  # words
_REPEATED: Final = 0.8  # of an assistant's text, from which on it is a repetition
_KINDS: Final = {
    "secret": "a password, key or other secret",
    "card": "the number of a payment card",
    "iban": "the number of a bank account",
    "e-mail": "an e-mail address",
    "phone": "a telephone number",
}


class Gate:
    """Judges candidates for memories.

    It refuses: a text without words, or that is too long; words of a system message; an
    assistant's repetition of what it was shown; a fact that a memory states; what was deleted
    before, unless somebody asks for it; more than the limits allow. Into quarantine go secrets,
    and what rests on a tool's words alone. A gate serves any number of namespaces and threads.

    Args:
        checks: Your own checks, asked in order about what would be kept. The first verdict that is
            not to keep decides. A verdict to keep may give another `text`. What a check raises on
            goes into quarantine.
        secrets: What is done about passwords, keys and the kinds of your detectors: `"keep"`,
            `"redact"`, `"quarantine"` or `"refuse"`.
        cards: The same for numbers of payment cards and bank accounts.
        contacts: The same for e-mail addresses and telephone numbers. `"redact"` keeps them where
            somebody asks for the memory.
        tools: What is done with a candidate that rests on a tool's words alone, unless your code
            asks for it: `"keep"`, `"quarantine"` or `"refuse"`.
        detectors: Functions that find secrets and contacts.
        per_minute: How many different memories a model may ask for within a minute in a
            namespace, counted in this process.
        max_items: How many memories a namespace may hold, with those below it, about.

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
        per_minute: int = 60,
        max_items: int = 100_000,
    ) -> None:
        for name, given in (("secrets", secrets), ("cards", cards), ("contacts", contacts)):
            choice(name, given, get_args(Treatment))
        choice("tools", tools, get_args(Action))
        self.checks: Sequence[Check] = _functions("checks", checks)
        self.sensitive = Sensitive(secrets, cards, contacts, _functions("detectors", detectors))
        self._tools: Action = tools
        self._rates = Rates(whole("per_minute", per_minute, 0))
        self._room = Room(whole("max_items", max_items, 0))

    def judge(
        self,
        candidates: Sequence[Candidate],
        adapter: StoreAdapter,
        namespace: Namespace,
        *,
        keys: Sequence[str | None] | None = None,
    ) -> Effects[list[Verdict]]:
        """A verdict on each candidate, in order.

        Args:
            candidates: Any number; many at once cost less.
            adapter: The store they would be kept in.
            namespace: Where.
            keys: The key that each would be kept under, or None. With it a memory may be put in
                other words, and `same_as` may name another candidate.

        Raises:
            ConfigurationError: There is not a key, or None, for each.
            StorageError: The store cannot be read.
        """
        keys = [None] * len(candidates) if keys is None else keys
        if len(keys) != len(candidates):
            raise ConfigurationError(
                f"there are {len(candidates)} candidates and {len(keys)} keys; expected a key, or "
                "None, for each"
            )
        verdicts = [self._static(candidate, namespace) for candidate in candidates]
        docket = _Docket(candidates, verdicts, keys)
        yield from _refuse_deleted(docket, adapter, namespace)
        yield from _refuse_known(docket, adapter, namespace)
        docket.verdicts = yield from self.examine(candidates, docket.verdicts)
        _refuse_repeated(docket)
        kept = docket.open()
        for place in (yield from self._room.taking(adapter, namespace, [keys[i] for i in kept])):
            reason = f"the namespace is full: max_items is {self._room.max_items:,}"
            docket.refuse(kept[place], "flood", reason)
        return docket.verdicts

    def examine(
        self, candidates: Sequence[Candidate], verdicts: Sequence[Verdict]
    ) -> Effects[list[Verdict]]:
        """The verdicts after your checks, which are asked about the candidates that are kept."""
        docket = _Docket(candidates, list(verdicts), [None] * len(candidates))
        for check in self.checks:
            asked = docket.open()
            shown = [replace(candidates[i], text=docket.text(i)) for i in asked]
            answers = yield _asking(check, shown)
            name = str(getattr(check, "__name__", type(check).__name__))
            for i, answer in zip(asked, answers, strict=True):
                if isinstance(answer, Verdict):
                    docket.verdicts[i] = _followed(docket.verdicts[i], answer, name)
                elif answer is not None:
                    fault = f"the check {name} {self.sensitive.redacted(_failure(answer))}"
                    docket.verdicts[i] = Verdict("quarantine", fault, name)
        return docket.verdicts

    def _static(self, candidate: Candidate, namespace: Namespace) -> Verdict:
        """A verdict that needs no store; one that keeps may redact something."""
        if candidate.by_model and not self._rates.allows(namespace, candidate.text):
            most = self._rates.per_minute
            return _refused(
                "flood", f"there are too many at once: per_minute is {most:,}; wait a minute"
            )
        refusal = _unfit(candidate) or _too_large(candidate)
        if refusal is not None:
            return refusal
        if candidate.role == "assistant" and _repeats(_statement(candidate), candidate.shown):
            return _refused("echo", "the assistant only repeats what it had been shown")
        verdict = self.sensitive.judged(candidate)
        asked_by_code = candidate.explicit and not candidate.by_model
        if verdict.action != "keep" or candidate.role != "tool" or asked_by_code:
            return verdict
        if self._tools == "keep":
            return verdict
        return Verdict(self._tools, "it rests on a tool's words alone", "role")


@dataclass(frozen=True, slots=True)
class Sensitive:
    """What is done about secrets and contacts.

    Attributes:
        secrets: About secrets, and the kinds of a user's detectors.
        cards: About numbers of cards and accounts.
        contacts: About addresses and telephone numbers.
        detectors: The functions that find them.
    """

    secrets: Treatment
    cards: Treatment
    contacts: Treatment
    detectors: Sequence[Detector]

    def judged(self, candidate: Candidate) -> Verdict:
        """A verdict on a candidate's secrets and contacts; if a detector raises, quarantine."""
        try:
            spans = spans_of(candidate.text, self.detectors)
            kinds = self._kinds(candidate, spans)
        except Exception as exc:  # a detector of the user's, whose message may quote the secret
            fault = f"a detector raised {type(exc).__name__}, so nobody knows what it holds"
            return Verdict("quarantine", fault, "detectors")
        done = {kind: self.treatment(kind, candidate.explicit) for kind in kinds}
        worst: Sequence[Action] = ("refuse", "quarantine")
        for action in worst:
            if found := [kind for kind in kinds if done[kind] == action]:
                return Verdict(action, f"it holds {_named(found)}", _check(found[0]))
        gone = [kind for kind in kinds if done[kind] == "redact"]
        if not gone:
            return KEEP
        hidden = [span for span in spans if span[0] in gone]
        text = redacted(candidate.text, hidden) if hidden else None
        return Verdict("keep", f"{_named(gone)} is redacted", _check(gone[0]), text)

    def redacted_kinds(self, candidate: Candidate) -> list[str]:
        """The kinds that are redacted in a candidate that is kept."""
        kinds = self._kinds(candidate, spans_of(candidate.text, self.detectors))
        return [kind for kind in kinds if self.treatment(kind, candidate.explicit) == "redact"]

    def redacted_fields(self, candidate: Candidate) -> dict[str, Any]:
        """The fields of a candidate that is kept, redacted as its text is."""
        fields = candidate.fields.items()
        return {name: self._redacted(part, candidate.explicit, name) for name, part in fields}

    def redacted(self, text: str) -> str:
        """A text without anything sensitive, to be shown."""
        return redacted(text, spans_of(text, self.detectors))

    def treatment(self, kind: str, explicit: bool) -> Treatment:
        """What is done about a kind."""
        if kind in CONTACTS:
            return "keep" if explicit and self.contacts == "redact" else self.contacts
        return self.cards if kind in CARDS else self.secrets

    def _kinds(self, candidate: Candidate, spans: Sequence[Finding]) -> list[str]:
        found = [*spans]
        for name, text, _ in texts_in(candidate.fields) if candidate.fields else ():
            found += self._spans_in_field(text, name)
        return list(dict.fromkeys(kind for kind, _, _ in found))

    def _redacted(self, part: Any, explicit: bool, name: str) -> Any:
        if isinstance(part, str):
            spans = self._spans_in_field(part, name)
            return redacted(part, [s for s in spans if self.treatment(s[0], explicit) == "redact"])
        if isinstance(part, Mapping):
            return {key: self._redacted(each, explicit, str(key)) for key, each in part.items()}
        if isinstance(part, list | tuple):
            return [self._redacted(each, explicit, name) for each in part]
        return part

    def _spans_in_field(self, text: str, name: str) -> list[Finding]:
        """The findings in a field. One word may be an id, and by the field's name a password."""
        if len(text.split(maxsplit=1)) > 1:
            return spans_of(text, self.detectors)
        spans = spans_of(text, [each for each in self.detectors if each not in OF_SENTENCES])
        if spans or not text.strip() or secrets not in self.detectors:
            return spans
        label = f"{name.replace('_', ' ')}: "
        named = spans_of(label + text, [secrets])
        at = len(label)
        return [(kind, start - at, end - at) for kind, start, end in named if start >= at]


class _Docket:
    """The candidates of one call, with their keys and the verdicts so far."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        verdicts: list[Verdict],
        keys: Sequence[str | None],
    ) -> None:
        self.candidates, self.verdicts, self.keys = candidates, verdicts, keys

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
        self.verdicts[i] = Verdict("refuse", reason, check, same_as=same_as)


def _refuse_deleted(docket: _Docket, adapter: StoreAdapter, namespace: Namespace) -> Effects[None]:
    """Refuse what was deleted, unless somebody asks for it."""
    marks: dict[int, list[str]] = {}
    for i in docket.open():
        candidate = docket.candidates[i]
        if not candidate.explicit:
            marks[i] = [digest(text) for text in {candidate.text, docket.text(i)}]
            marks[i] += sources(candidate.provenance) if candidate.kind == TURN else []
    gone = yield from entombed(adapter, namespace, set().union(*marks.values()))
    for i, keys in marks.items():
        if not gone.isdisjoint(keys):
            reason = "it was deleted or forgotten, and nobody asks for it"
            docket.refuse(i, "tombstone", reason)


def _refuse_known(docket: _Docket, adapter: StoreAdapter, namespace: Namespace) -> Effects[None]:
    """Refuse facts that a memory states, and unasked those that it stated before."""
    known = Known(adapter, namespace)
    for i in docket.open(events=False):
        candidate, text = docket.candidates[i], docket.text(i)
        memory = yield from known.stating(text, docket.keys[i])
        if memory is not None:
            docket.refuse(i, "duplicate", "a memory says the same already", memory.key)
        elif not candidate.explicit:
            at = candidate.provenance.at if candidate.provenance else None
            previous = yield from known.outdated(text, at)
            if previous is not None:
                day = previous.until.date().isoformat()
                reason = f"it was {previous.change} on {day}, and said before"
                docket.refuse(i, "duplicate", reason)


def _refuse_repeated(docket: _Docket) -> None:
    """Refuse facts that an earlier candidate of the same call states."""
    kept: list[int] = []
    for i in docket.open(events=False):
        text = docket.text(i)
        first = next((each for each in kept if equivalent(docket.text(each), text)), None)
        if first is None:
            kept.append(i)
        else:
            reason = "another candidate says the same"
            docket.refuse(i, "duplicate", reason, docket.keys[first])


def texts_in(value: Any) -> Iterator[tuple[str, str, int]]:
    """The texts in a JSON value: the name of the field, the text, and how deep it is.

    A container counts as an empty text.
    """
    left = [("", value, 0)]
    while left:
        name, part, depth = left.pop()
        if isinstance(part, str):
            yield name, part, depth
        elif isinstance(part, Mapping):
            yield name, "", depth
            left += [(str(key), each, depth + 1) for key, each in part.items()]
        elif isinstance(part, list | tuple):
            yield name, "", depth
            left += [(name, each, depth + 1) for each in part]


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
    for _, text, depth in texts_in(candidate.fields) if candidate.fields else ():
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


def _repeats(text: str, shown: Sequence[str]) -> bool:
    """Whether most runs of four words of a text are in what was shown.

    Source: Broder, "On the resemblance and containment of documents" (1997).
    """
    words = normal(text).split() if shown else []
    size = min(_SHINGLE, len(words))
    if not size:
        return False
    known = [f" {' '.join(normal(each).split())} " for each in shown]
    runs = [f" {' '.join(words[i : i + size])} " for i in range(len(words) - size + 1)]
    most = (1 - _REPEATED) * len(runs)
    missing = 0
    for run in runs:
        missing += not any(run in each for each in known)
        if missing > most:
            return False
    return True


def _followed(before: Verdict, answer: Verdict, name: str) -> Verdict:
    """The verdict after a check's; one that keeps undoes no redaction."""
    if answer.action != "keep":
        reason = answer.reason or f"the check {name} says so"
        return replace(answer, reason=reason, check=answer.check or name)
    if answer.text is None:
        return before
    reasons = (before.reason, answer.reason or "it is put otherwise")
    check = before.check or answer.check or name
    return Verdict("keep", "; ".join(filter(None, reasons)), check, answer.text)


def _asking(check: Check, shown: Sequence[Candidate]) -> Effect:
    """The answers of a check, which may be async, or what it raised instead.

    A check that blocks is called in a thread by who awaits. One that is async runs in an event
    loop of its own for who blocks.
    """

    def called() -> list[Any]:
        return [_answer(check, each) for each in shown]

    def blocking() -> list[Any]:
        answers = called()
        if not any(map(inspect.isawaitable, answers)):
            return answers
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1) as threads:  # this thread may be running a loop
            return threads.submit(context.run, asyncio.run, _awaited(answers)).result()

    async def awaiting() -> list[Any]:
        is_async = inspect.iscoroutinefunction(check)
        return await _awaited(called() if is_async else await asyncio.to_thread(called))

    return Effect(blocking, awaiting)


def _answer(check: Check, candidate: Candidate) -> Any:
    try:
        return check(candidate)
    except Exception as exc:
        return exc


async def _awaited(answers: Sequence[Any]) -> list[Any]:
    given = [each for each in answers if inspect.isawaitable(each)]
    done = iter(await asyncio.gather(*given, return_exceptions=True))
    return [next(done) if inspect.isawaitable(each) else each for each in answers]


def _failure(answer: Any) -> str:
    if isinstance(answer, Exception):
        return f"raised {type(answer).__name__}: {answer!s:.200}"
    return f"returned {answer!r:.80}, which is no answer"


def _functions(name: str, given: Any) -> tuple[Any, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(map(callable, given)):
        raise ConfigurationError(f"{name} is {given!r:.80}; expected a list of functions")
    return tuple(given)


def _refused(check: str, reason: str) -> Verdict:
    return Verdict("refuse", reason, check)


def _named(kinds: Sequence[str]) -> str:
    return " and ".join(_KINDS.get(kind, f"what a detector calls {kind!r}") for kind in kinds)


def _check(kind: str) -> str:
    if kind in CONTACTS:
        return "contacts"
    return "cards" if kind in CARDS else "secrets"
