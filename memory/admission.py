"""Keeping: candidates, judged by the gate, as what is to be written, in one transaction.

Nothing is written here: who asks writes it, together with what belongs to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final

from perdure.memory.effects import Effects
from perdure.memory.gate.gate import Gate
from perdure.memory.records import Candidate, Change, Outcome, Verdict
from perdure.memory.store_adapter import StoreAdapter, put_of, quarantine_of
from perdure.stores.base import Namespace, Provenance, PutItem

REDACTED: Final = "redacted"
"""The field of a memory's value that names what was blotted out in it."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """What becomes of candidates.

    Attributes:
        puts: What is to be written, together.
        outcomes: One for each candidate, in order; true once it is written.
    """

    puts: list[PutItem]
    outcomes: list[Outcome]


def admit(
    gate: Gate,
    adapter: StoreAdapter,
    namespace: Namespace,
    candidates: Sequence[Candidate],
    keys: Sequence[str],
) -> Effects[Admitted]:
    """Judge candidates, and plan what is to be written of them.

    Args:
        gate: Judges them.
        adapter: Their store.
        namespace: Where they are to be kept.
        candidates: They.
        keys: The key of each. One that is a memory's already gives that a new version.

    Raises:
        ConfigurationError: There is not a key for each.
        StorageError: The store cannot be read.
    """
    verdicts = yield from gate.judge(candidates, adapter, namespace, keys=keys)
    judged = Admitted([], [])
    for candidate, key, verdict in zip(candidates, keys, verdicts, strict=True):
        if verdict.action == "refuse":
            outcome = _refused(verdict)
        elif verdict.action == "quarantine":
            put = _quarantined(namespace, candidate, key, verdict)
            judged.puts.append(put)
            outcome = Outcome("quarantined", put.key, verdict.reason, verdict.check)
        else:
            judged.puts.append(_put(gate, namespace, candidate, key, verdict))
            outcome = Outcome("added", key, verdict.reason, verdict.check)
        judged.outcomes.append(outcome)
    return judged


def _refused(verdict: Verdict) -> Outcome:
    change: Change = "refused" if verdict.same_as is None else "unchanged"
    return Outcome(change, verdict.same_as, verdict.reason, verdict.check)


def _put(
    gate: Gate, namespace: Namespace, candidate: Candidate, key: str, verdict: Verdict
) -> PutItem:
    text = candidate.text if verdict.text is None else verdict.text
    blotted = gate.sensitive.blotted_kinds(candidate) if verdict.reason else []
    fields = gate.sensitive.cleaned(candidate) if blotted else candidate.fields
    value: dict[str, Any] = {**fields, "text": text, "kind": candidate.kind}
    if blotted:
        value[REDACTED] = blotted
    return put_of(namespace, key, value, provenance=_trusted(candidate))


def _trusted(candidate: Candidate) -> Provenance:
    source = candidate.provenance or Provenance()
    return source if source.trust is not None else replace(source, trust=candidate.role)


def _quarantined(namespace: Namespace, candidate: Candidate, key: str, verdict: Verdict) -> PutItem:
    value = {
        "text": candidate.text,
        "kind": candidate.kind,
        "fields": dict(candidate.fields),
        "role": candidate.role,
        "explicit": candidate.explicit,
        "key": key,
        "reason": verdict.reason,
        "check": verdict.check,
        "at": datetime.now(UTC).isoformat(),
    }
    provenance = _trusted(candidate)
    place, key = quarantine_of(namespace), _entry_key(candidate)
    return put_of(place, key, value, provenance=provenance, searched=False)


def _entry_key(candidate: Candidate) -> str:
    """The key of what it says: what comes again is no second entry."""
    said = f"{candidate.kind}\0{candidate.text}".encode("utf-8", "surrogatepass")
    return blake2b(said, digest_size=12).hexdigest()
