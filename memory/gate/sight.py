"""What the gate sees of a candidate by itself, without a store, a model or the other candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perdure.memory.gate.durability import hollow, passing
from perdure.memory.gate.echoes import Echoes
from perdure.memory.gate.novelty import SAID
from perdure.memory.gate.poisoning import commands
from perdure.memory.gate.sensitive import Sensitive, texts_in
from perdure.memory.records import FACT, Candidate, Verdict

_DEEPEST: Final = 32  # levels of fields


@dataclass(frozen=True, slots=True)
class Sight:
    """Judges candidates by what they are.

    Attributes:
        max_chars: Of a text that is no turn and no episode.
        max_value_chars: Of a text with all fields.
        sensitive: What is done about secrets and contacts.
        lasting: Whether the rule of durability applies.
    """

    max_chars: int
    max_value_chars: int
    sensitive: Sensitive
    lasting: bool

    def judged(self, candidate: Candidate, echoes: Echoes) -> Verdict:
        """A verdict; one that keeps may blot something out."""
        refusal = _unfit(candidate) or self._too_large(candidate)
        if refusal is not None:
            return refusal
        said = spoken(candidate)
        if candidate.role == "assistant" and echoes.repeats(said, candidate.shown):
            return Verdict("refuse", "the assistant only repeats what it had been shown", "echo")
        try:
            verdict = self.sensitive.judged(candidate)
        except Exception as exc:  # a detector of the user's
            fault = f"a detector raised {type(exc).__name__}, so nobody knows what it holds"
            return Verdict("quarantine", fault, "detectors")
        if verdict.action != "keep" or (candidate.explicit and not candidate.by_model):
            return verdict
        return _ordering(candidate, said) or self._unasked(candidate, said) or verdict

    def _too_large(self, candidate: Candidate) -> Verdict | None:
        chars = len(candidate.text)
        if chars > self.max_chars and candidate.kind not in SAID:
            return _refused("size", f"it has {chars:,} characters; max_chars is {self.max_chars:,}")
        for text, depth in texts_in(candidate.fields) if candidate.fields else ():
            if depth > _DEEPEST:
                return _refused("size", f"its fields are more than {_DEEPEST} levels deep")
            chars += len(text)
        if chars > self.max_value_chars:
            reason = f"it has {chars:,} characters with its fields; max_value_chars is "
            return _refused("size", f"{reason}{self.max_value_chars:,}")
        return None

    def _unasked(self, candidate: Candidate, said: str) -> Verdict | None:
        """What is formed unasked: it has to say something that lasts."""
        if candidate.explicit:
            return None
        if candidate.kind in SAID and (why := hollow(said)):
            return _refused("content", f"it says nothing: {why}")
        if self.lasting and candidate.kind == FACT and (why := passing(said)):
            return _refused("durability", f"it will not matter next month: {why}")
        return None


def _ordering(candidate: Candidate, said: str) -> Verdict | None:
    """What others than the user say: not to the assistant."""
    if candidate.role not in ("tool", "assistant"):
        return None
    texts = [said, *(text for text, _ in texts_in(candidate.fields))]
    if not any(map(commands, texts)):
        return None
    reason = f"it reads as an order to an assistant, and comes from the role {candidate.role}"
    return Verdict("quarantine", reason, "poisoning")


def spoken(candidate: Candidate) -> str:
    """What was said, without the speaker's name in front of it."""
    speaker = candidate.provenance.actor if candidate.provenance else None
    if candidate.kind in SAID:
        for name in (speaker, candidate.role):
            if name and candidate.text.startswith(f"{name}: "):
                return candidate.text[len(name) + 2 :]
    return candidate.text


def _unfit(candidate: Candidate) -> Verdict | None:
    text = candidate.text
    if not isinstance(text, str) or not any(map(str.isalnum, spoken(candidate))):
        return _refused("content", "it has no words")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        return _refused("content", f"it is no Unicode text: {exc.reason}")
    if candidate.role == "system":
        return _refused("role", "what a system message says is a setting, and no memory")
    return None


def _refused(check: str, reason: str) -> Verdict:
    return Verdict("refuse", reason, check)
