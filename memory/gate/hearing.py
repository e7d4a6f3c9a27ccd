"""A hearing: the candidates of one call before the gate, judged together where that is cheaper.

First by themselves, then beside what the store holds, then by models and checks of the user's,
which are asked only about what would be kept; in the end beside each other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from perdure.memory.effects import Effects
from perdure.memory.gate.flood import Room
from perdure.memory.gate.novelty import SAID, Facts
from perdure.memory.gate.sensitive import Sensitive
from perdure.memory.gate.user_checks import asking, name_of
from perdure.memory.likeness import Wording, digest
from perdure.memory.records import FACT, TURN, Candidate, Verdict
from perdure.memory.store_adapter import StoreAdapter
from perdure.memory.tombstones import entombed, sources
from perdure.stores.base import Namespace

Check = Callable[[Candidate], Verdict | Awaitable[Verdict | None] | None]
"""A check of your own: a verdict, or None if it has nothing to say."""
Rule = Callable[[str], str | Awaitable[str | None] | None]
"""Why what a text says will not be true next month; None: it may be."""


@runtime_checkable
class JudgesDurability(Protocol):
    """What judges the durability of many texts together, like `durable_by`."""

    def judging(self, texts: Sequence[str]) -> Effects[list[str | None]]:
        """Why each is not durable; None: it is."""


class Hearing:
    """The candidates of one call, and what is thought of them so far.

    Args:
        candidates: They.
        verdicts: At sight.
        adapter: The store.
        namespace: Where they are to be kept.
        keys: The key that each is to be kept under, where that is known.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        verdicts: list[Verdict],
        adapter: StoreAdapter,
        namespace: Namespace,
        keys: Sequence[str | None],
    ) -> None:
        self.candidates, self.verdicts = candidates, verdicts
        self.adapter, self.namespace, self.keys = adapter, namespace, keys
        self._wordings: dict[str, Wording] = {}

    def exhuming(self) -> Effects[None]:
        """Refuse what was deleted, unless somebody asks for it."""
        marks: dict[int, list[str]] = {}
        for i in self._open():
            candidate = self.candidates[i]
            if not candidate.explicit:
                marks[i] = [digest(text) for text in {candidate.text, self._text(i)}]
                marks[i] += sources(candidate.provenance) if candidate.kind == TURN else []
        gone = yield from entombed(self.adapter, self.namespace, set().union(*marks.values()))
        for i, keys in marks.items() if gone else ():
            if not gone.isdisjoint(keys):
                self._refuse(i, "buried", "it was deleted or forgotten, and nobody asks for it")

    def comparing(self, near: float) -> Effects[None]:
        """Refuse facts that a memory states already, and unasked what it stated before."""
        facts = Facts(self.adapter, self.namespace, near)
        for i in self._open():
            candidate = self.candidates[i]
            if candidate.kind in SAID:
                continue
            text = self._text(i)
            wording = self._wording(text)
            memory = yield from facts.like(wording, text, self.keys[i])
            if memory is not None:
                self._refuse(i, "novelty", "a memory says the same already", memory.key)
            elif not candidate.explicit:
                at = candidate.provenance.at if candidate.provenance else None
                former = yield from facts.outdone(wording, text, at)
                if former is not None:
                    day = former.until.date().isoformat()
                    self._refuse(i, "novelty", f"it was {former.change} on {day}, and said before")

    def weighing(self, durable: Rule | JudgesDurability) -> Effects[None]:
        """Refuse facts, formed unasked, that will not last."""
        judged = [
            i
            for i in self._open()
            if self.candidates[i].kind == FACT and not self.candidates[i].explicit
        ]
        if not judged:
            return
        texts = [self._text(i) for i in judged]
        if isinstance(durable, JudgesDurability):
            answers: Sequence[Any] = yield from durable.judging(texts)
        else:
            answers = yield asking(durable, texts)
        for i, answer in zip(judged, answers, strict=True):
            if answer is None:
                continue
            if isinstance(answer, str):
                self._refuse(i, "durability", f"it will not matter next month: {answer}")
            else:
                self._doubt(i, "durability", f"the rule of durability {_failed(answer)}")

    def examining(self, checks: Iterable[Check], sensitive: Sensitive) -> Effects[None]:
        """Ask checks of the user's about what would be kept."""
        for check in checks:
            asked = self._open()
            if not asked:
                return
            shown = [replace(self.candidates[i], text=self._text(i)) for i in asked]
            answers = yield asking(check, shown)
            for i, answer in zip(asked, answers, strict=True):
                if isinstance(answer, Verdict):
                    self._follow(i, answer, name_of(check))
                elif answer is not None:
                    fault = sensitive.blotted(_failed(answer))
                    self._doubt(i, name_of(check), f"the check {name_of(check)} {fault}")

    def joining(self, near: float) -> None:
        """Refuse facts that an earlier one of the same call states."""
        kept: list[tuple[int, Wording]] = []
        for i in self._open():
            if self.candidates[i].kind in SAID:
                continue
            wording = self._wording(self._text(i))
            for earlier, known in kept:
                if wording.bound(known) >= near and wording.alike(known) >= near:
                    reason = "another that came with it says the same"
                    self._refuse(i, "novelty", reason, self.keys[earlier])
                    break
            else:
                kept.append((i, wording))

    def making_room(self, room: Room) -> Effects[None]:
        """Refuse what there is no room for."""
        kept = self._open()
        if not kept:
            return
        keys = [self.keys[i] for i in kept]
        for place in (yield from room.taking(self.adapter, self.namespace, keys)):
            reason = f"the namespace is full: max_items is {room.most:,}"
            self._refuse(kept[place], "flood", reason)

    def _open(self) -> list[int]:
        return [i for i, verdict in enumerate(self.verdicts) if verdict.action == "keep"]

    def _text(self, i: int) -> str:
        blotted = self.verdicts[i].text
        return self.candidates[i].text if blotted is None else blotted

    def _wording(self, text: str) -> Wording:
        if text not in self._wordings:
            self._wordings[text] = Wording(text)
        return self._wordings[text]

    def _refuse(self, i: int, check: str, reason: str, same_as: str | None = None) -> None:
        self.verdicts[i] = Verdict("refuse", reason, check, same_as=same_as)

    def _doubt(self, i: int, check: str, reason: str) -> None:
        self.verdicts[i] = Verdict("quarantine", reason, check)

    def _follow(self, i: int, answer: Verdict, name: str) -> None:
        """Take a verdict over; one that keeps undoes nothing that was blotted out."""
        if answer.action != "keep":
            reason = answer.reason or f"the check {name} says so"
            self.verdicts[i] = replace(answer, reason=reason, check=answer.check or name)
        elif answer.text is not None:
            former = self.verdicts[i]
            reason = "; ".join(
                filter(None, (former.reason, answer.reason or "it is put otherwise"))
            )
            check = former.check or answer.check or name
            self.verdicts[i] = Verdict("keep", reason, check, answer.text)


def _failed(answer: Any) -> str:
    if isinstance(answer, Exception):
        return f"raised {type(answer).__name__}: {answer!s:.200}"
    return f"returned {answer!r:.80}, which is no answer"
