"""Admission: what the caller is to write, in one transaction, of candidates that were judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final

from perdure.memory.effects import Effects
from perdure.memory.gate import Gate
from perdure.memory.records import Candidate, Change, Outcome, Verdict
from perdure.memory.store_adapter import StoreAdapter, put_of, quarantine_of
from perdure.stores.base import Namespace, Provenance, PutItem

REDACTED: Final = "redacted"
"""The field of a memory's value with the kinds that were redacted in it."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """What is to be written, together, and the outcome of each candidate once it is."""

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

    `keys` has the key of each; under that of a memory, a candidate becomes its new version.
    """
    verdicts = yield from gate.judge(candidates, adapter, namespace, keys=keys)
    admitted = Admitted([], [])
    for candidate, key, verdict in zip(candidates, keys, verdicts, strict=True):
        told = verdict.reason, verdict.check
        if verdict.action == "refuse":
            change: Change = "refused" if verdict.same_as is None else "unchanged"
            admitted.outcomes.append(Outcome(change, verdict.same_as, *told))
        elif verdict.action == "quarantine":
            put = _quarantined(namespace, candidate, key, verdict)
            admitted.puts.append(put)
            admitted.outcomes.append(Outcome("quarantined", put.key, *told))
        else:
            admitted.puts.append(_put(gate, namespace, candidate, key, verdict))
            admitted.outcomes.append(Outcome("added", key, *told))
    return admitted


def _put(
    gate: Gate, namespace: Namespace, candidate: Candidate, key: str, verdict: Verdict
) -> PutItem:
    text = candidate.text if verdict.text is None else verdict.text
    value: dict[str, Any] = {**candidate.fields, "text": text, "kind": candidate.kind}
    if verdict.reason:
        kinds, fields = gate.sensitive.redacted_fields(candidate)
        value |= {**fields, **({REDACTED: kinds} if kinds else {})}
    return put_of(namespace, key, value, provenance=_trusted(candidate))


def _trusted(candidate: Candidate) -> Provenance:
    source = candidate.provenance or Provenance()
    return source if source.trust is not None else replace(source, trust=candidate.role)


def _quarantined(namespace: Namespace, candidate: Candidate, key: str, verdict: Verdict) -> PutItem:
    names = ("text", "kind", "role", "explicit")
    value = {
        **{name: getattr(candidate, name) for name in names},
        "fields": dict(candidate.fields),
        "key": key,
        "reason": verdict.reason,
        "check": verdict.check,
        "at": datetime.now(UTC).isoformat(),
    }
    # the key is a hash of the text: the same again is no second entry
    mark = f"{candidate.kind}\0{candidate.text}".encode("utf-8", "surrogatepass")
    entry = blake2b(mark, digest_size=12).hexdigest()
    place = quarantine_of(namespace)
    return put_of(place, entry, value, provenance=_trusted(candidate), searched=False)
