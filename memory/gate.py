"""The gate: decides what may become a memory, what waits in quarantine, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from langgraph.store.base import GetOp

from perdure.effects import Effect, run_computation
from perdure.memory.detectors import DETECTORS, Detector, SensitiveDataRules, Treatment
from perdure.memory.options import check_choice, check_instance
from perdure.memory.records import (
    EVENT_KINDS,
    HASHED_ID_PREFIX,
    QUARANTINE,
    RESERVED_LABEL,
    TOMBSTONES,
    TURN,
    Candidate,
    Change,
    ChangePlan,
    Memory,
    Outcome,
    StoreAdapter,
    Verdict,
    build_note_put,
    build_notes_namespace,
    build_previous_text_filter,
    build_put,
)
from perdure.memory.sameness import is_equivalent_text
from perdure.stores.base import Namespace, Provenance, PutItem
from perdure.stores.normal_form import hash_normal_form
from perdure.stores.tombstones import hash_message

if TYPE_CHECKING:
    from perdure.memory.loaded_thread import LoadedThread

RemovalKind = Literal["deleted", "forgotten"]
"""`"deleted"` if the memory's past is kept, else `"forgotten"`."""
_PAGE_SIZE: Final = 1_000  # notes read at once; fewer are read whole
TOMBSTONE_CHECK: Final = "tombstone"
"""The check that refuses what was deleted or forgotten."""
_MESSAGE_IDS: Final = "message_ids"  # of a tombstone: the messages of the memory


def build_tombstones(memory: Memory, removal: RemovalKind) -> list[PutItem]:
    """Tombstones of a memory's text, of its previous texts and, for a turn, of its message.

    Call this with each version whose text is not among `previous`.
    """
    source = memory.provenance
    keys = [
        hash_normal_form(text)
        for text in (memory.text, *(previous.text for previous in memory.previous))
    ]
    keys += hash_source_messages(source) if memory.kind == TURN else []
    ids = source.message_ids if source else ()
    return [build_tombstone(memory.namespace, key, removal, ids) for key in dict.fromkeys(keys)]


def hash_source_messages(provenance: Provenance | None) -> list[str]:
    """The keys of the tombstones of the messages that something comes from."""
    if provenance is None:
        return []
    return [hash_message(provenance.thread_id, id) for id in provenance.message_ids]


async def find_tombstones(
    adapter: StoreAdapter, namespace: Namespace, digests: Collection[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the tombstones of texts and messages, by key, in one or two reads of the store."""
    tombstones_namespace = build_notes_namespace(TOMBSTONES, namespace)
    if not digests:
        return {}
    notes = await adapter.search(tombstones_namespace, limit=_PAGE_SIZE)
    if len(notes) == _PAGE_SIZE:
        items = await adapter.call(
            "batch", [GetOp(tombstones_namespace, key) for key in dict.fromkeys(digests)]
        )
        return {item.key: item.value for item in items if item is not None}
    own = (note for note in notes if note.namespace == tombstones_namespace)
    return {note.key: note.value for note in own if note.key in digests}


async def is_forgotten(adapter: StoreAdapter, namespace: Namespace, text: str) -> bool:
    """Return whether a memory with this text was deleted or forgotten."""
    return bool(await find_tombstones(adapter, namespace, [hash_normal_form(text)]))


async def add_former_ids(adapter: StoreAdapter, puts: Sequence[PutItem]) -> list[PutItem]:
    """Add to each tombstone the message ids of the tombstone that it replaces."""
    tombstones = [put for put in puts if put.namespace[:2] == (RESERVED_LABEL, TOMBSTONES)]
    ops = [GetOp(put.namespace, put.key) for put in tombstones]
    items = (await adapter.call("batch", ops)) if ops else []
    former_ids = {
        (tuple(item.namespace), item.key): item.value.get(_MESSAGE_IDS)
        for item in items
        if item is not None
    }
    completed = list[PutItem]()
    for put in puts:
        ids_before = former_ids.get((put.namespace, put.key))
        if isinstance(ids_before, list) and put.value is not None:
            ids = [*dict.fromkeys([*ids_before, *put.value[_MESSAGE_IDS]])]
            put = replace(put, value={**put.value, _MESSAGE_IDS: ids})
        completed.append(put)
    return completed


def build_tombstone(
    namespace: Namespace, key: str, removal: RemovalKind, message_ids: Collection[str] = ()
) -> PutItem:
    """The tombstone under a key: the digest of a text, or one of `sources`."""
    removed_at = datetime.now(UTC).isoformat()
    value = {"change": removal, "at": removed_at, _MESSAGE_IDS: list(message_ids)}
    return build_note_put(build_notes_namespace(TOMBSTONES, namespace), key, value)


Check = Callable[[Candidate], Verdict | None]
"""A check of your own: a verdict, or None if it has nothing to say."""

_MAX_CHARS: Final = 2_000  # of a memory's text; turns and episodes may be longer
_MAX_VALUE_CHARS: Final = 100_000  # of a memory's text and fields
_MAX_FIELD_DEPTH: Final = 32  # levels of fields
_COMPARED_MEMORIES: Final = 16  # memories that a candidate is compared with


class Gate:
    """Judges candidates for memories.

    It refuses a text without words or that is too long, words of a system message, a fact that a
    memory states already, and a text that was deleted or forgotten, unless somebody asks for it or
    a later run says it again. Secrets go into quarantine, and so does a text that only a tool
    stated, unless your code asks for it.

    Args:
        checks: Your own checks, asked in order about what would be kept. The first verdict other
            than to keep decides; one to keep may give another `text`. If a check raises, the
            candidate goes into quarantine.
        secrets: The treatment of passwords, keys, cards, and the kinds of your own detectors.
        contacts: The treatment of e-mail addresses and telephone numbers; `"redact"` keeps them
            where somebody asks for the memory.
    """

    def __init__(
        self,
        checks: Sequence[Check] = (),
        *,
        secrets: Treatment = "quarantine",
        contacts: Treatment = "redact",
        detectors: Sequence[Detector] = DETECTORS,
    ) -> None:
        for name, treatment in (("secrets", secrets), ("contacts", contacts)):
            check_choice(name, treatment, get_args(Treatment))
        self.checks: Sequence[Check] = _check_functions("checks", checks)
        self.sensitive = SensitiveDataRules(
            secrets, contacts, _check_functions("detectors", detectors)
        )

    async def judge(
        self,
        candidates: Sequence[Candidate],
        adapter: StoreAdapter,
        namespace: Namespace,
        *,
        keys: Sequence[str | None] | None = None,
        thread: LoadedThread | None = None,
    ) -> list[Verdict]:
        """A verdict on each candidate, in order; `same_as` may name another of the `keys`.

        A candidate is not compared with the memory of its own key. The `thread` tells which
        messages later runs have brought.
        """
        verdicts = await run_computation(
            lambda: [self._judge_by_rules(candidate) for candidate in candidates]
        )
        keys = [None] * len(candidates) if keys is None else keys
        judgement = _Judgement(candidates, verdicts, keys)
        await _refuse_deleted(judgement, adapter, namespace, thread)
        await _refuse_stored(judgement, adapter, namespace)
        judgement.verdicts = await self.apply_checks(candidates, judgement.verdicts)
        _refuse_repeated(judgement)
        return judgement.verdicts

    async def apply_checks(
        self, candidates: Sequence[Candidate], verdicts: Sequence[Verdict]
    ) -> list[Verdict]:
        """The verdicts after your checks, which are asked about the candidates that are kept."""
        verdicts = list(verdicts)
        for check in self.checks:
            indices = [i for i, verdict in enumerate(verdicts) if verdict.action == "keep"]
            admitted = [
                replace(candidates[i], text=_get_admitted_text(candidates[i], verdicts[i]))
                for i in indices
            ]
            answers = await _run_check(check, admitted)
            name = str(getattr(check, "__name__", type(check).__name__))
            for i, answer in zip(indices, answers, strict=True):
                if isinstance(answer, Verdict):
                    verdicts[i] = _combine_verdicts(verdicts[i], answer, name)
                elif answer is not None:
                    fault = f"the check {name} {self.sensitive.redact(answer)}"
                    verdicts[i] = Verdict("quarantine", fault, name)
        return verdicts

    def _judge_by_rules(self, candidate: Candidate) -> Verdict:
        if (fault := _find_content_fault(candidate) or _find_size_fault(candidate)) is not None:
            return Verdict("refuse", fault[1], fault[0])
        verdict = self.sensitive.judge(candidate)
        is_requested_by_code = candidate.explicit and not candidate.by_model
        if verdict.action == "keep" and candidate.role == "tool" and not is_requested_by_code:
            return Verdict("quarantine", "it rests on a tool's words alone", "role")
        return verdict


@dataclass(slots=True)
class _Judgement:
    candidates: Sequence[Candidate]
    verdicts: list[Verdict]
    keys: Sequence[str | None]

    def kept_indices(self, *, include_events: bool = True) -> list[int]:
        indices = [i for i, verdict in enumerate(self.verdicts) if verdict.action == "keep"]
        return [i for i in indices if include_events or self.candidates[i].kind not in EVENT_KINDS]

    def get_text(self, i: int) -> str:
        return _get_admitted_text(self.candidates[i], self.verdicts[i])

    def refuse(self, i: int, check: str, reason: str, same_as: str | None = None) -> None:
        self.verdicts[i] = Verdict("refuse", reason, check, None, same_as)


async def plan_admission(
    gate: Gate,
    adapter: StoreAdapter,
    namespace: Namespace,
    candidates: Sequence[Candidate],
    keys: Sequence[str],
    generated_keys: Sequence[str] = (),
    thread: LoadedThread | None = None,
) -> ChangePlan:
    """What is to be written of candidates under `keys`; `made` are those that are made up."""
    verdicts = await gate.judge(candidates, adapter, namespace, keys=keys, thread=thread)
    puts, outcomes = list[PutItem](), list[Outcome]()
    for candidate, key, verdict in zip(candidates, keys, verdicts, strict=True):
        change: Change = "refused" if verdict.same_as is None else "unchanged"
        outcome_key = verdict.same_as
        if verdict.action == "keep":
            fields = candidate.fields if verdict.fields is None else verdict.fields
            value = {
                **fields,
                "text": _get_admitted_text(candidate, verdict),
                "kind": candidate.kind,
            }
            change, outcome_key = "added", key
            puts.append(
                build_put(namespace, key, value, provenance=_complete_provenance(candidate))
            )
        elif verdict.action == "quarantine":
            redacted_text = gate.sensitive.redact(candidate.text)
            put = _build_quarantine_put(
                namespace, candidate, key, verdict, redacted_text, generated_keys
            )
            change, outcome_key = "quarantined", put.key
            puts.append(put)
        outcomes.append(Outcome(change, outcome_key, verdict.reason, verdict.check))
    return ChangePlan(puts, outcomes)


def _complete_provenance(candidate: Candidate) -> Provenance:
    source = candidate.provenance or Provenance()
    return source if source.trust is not None else replace(source, trust=candidate.role)


def _build_quarantine_put(
    namespace: Namespace,
    candidate: Candidate,
    key: str,
    verdict: Verdict,
    redacted_text: str,
    generated_keys: Sequence[str],
) -> PutItem:
    names = ("text", "kind", "role", "explicit")
    value = {name: getattr(candidate, name) for name in names} | {"shown": redacted_text}
    value |= {"reason": verdict.reason, "check": verdict.check, "at": datetime.now(UTC).isoformat()}
    value |= {"key": key, "fields": dict(candidate.fields)}
    # the key is a hash of the text and its origin: the same again is no second entry
    source = _complete_provenance(candidate)
    origin = ("thread", source.thread_id), ("key", None if key in generated_keys else key)
    parts = [f"{name}:{part}" for name, part in origin if part is not None]
    entry_identity = "\0".join([candidate.kind, candidate.text, *parts]).encode(
        "utf-8", "surrogatepass"
    )
    entry_key = blake2b(entry_identity, digest_size=12).hexdigest()
    entries_namespace = build_notes_namespace(QUARANTINE, namespace)
    return build_put(entries_namespace, entry_key, value, provenance=source, is_searched=False)


async def _refuse_deleted(
    judgement: _Judgement,
    adapter: StoreAdapter,
    namespace: Namespace,
    thread: LoadedThread | None,
) -> None:
    hashes: dict[int, list[str]] = {}
    for i in judgement.kept_indices():
        candidate = judgement.candidates[i]
        if not candidate.explicit:
            hashes[i] = [hash_normal_form(text) for text in {candidate.text, judgement.get_text(i)}]
            hashes[i] += (
                hash_source_messages(candidate.provenance) if candidate.kind == TURN else []
            )
    stored_tombstones = await find_tombstones(adapter, namespace, set().union(*hashes.values()))
    reason = "it was deleted or forgotten, and nobody asks for it"
    for i in (i for i, keys in hashes.items() if not stored_tombstones.keys().isdisjoint(keys)):
        source = judgement.candidates[i].provenance
        tombstones = [stored_tombstones[key] for key in hashes[i] if key in stored_tombstones]
        source_tombstones = await find_tombstones(adapter, namespace, hash_source_messages(source))
        if source_tombstones or not await _is_repeated_later(source, tombstones, thread):
            judgement.refuse(i, TOMBSTONE_CHECK, reason)


async def _is_repeated_later(
    source: Provenance | None,
    tombstones: Sequence[Mapping[str, Any]],
    thread: LoadedThread | None,
) -> bool:
    """Return whether all messages of a candidate are of runs that began after the deletions."""
    if thread is None or source is None or source.thread_id != thread.thread_id:
        return False
    if not source.message_ids or any(id.startswith(HASHED_ID_PREFIX) for id in source.message_ids):
        return False
    removal_times = list[datetime]()
    for value in tombstones:
        removed_at, ids = value.get("at"), value.get(_MESSAGE_IDS)
        try:
            moment = datetime.fromisoformat(removed_at) if isinstance(removed_at, str) else None
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None or not isinstance(ids, list):
            return False
        if not set(source.message_ids).isdisjoint(map(str, ids)):
            return False
        removal_times.append(moment)
    return await thread.is_added_after(source.message_ids, max(removal_times))


async def _refuse_stored(
    judgement: _Judgement, adapter: StoreAdapter, namespace: Namespace
) -> None:
    for i in judgement.kept_indices(include_events=False):
        candidate, text = judgement.candidates[i], judgement.get_text(i)
        similar_facts = await _find_similar_facts(
            adapter, namespace, text, include_past=not candidate.explicit
        )
        memory = _find_equivalent_fact(similar_facts, text, judgement.keys[i])
        if memory is not None:
            judgement.refuse(i, "duplicate", "a memory says the same already", memory.key)
        elif not candidate.explicit and (
            reason := _explain_outdated(similar_facts, text, candidate.provenance)
        ):
            judgement.refuse(i, "duplicate", reason)


def _find_equivalent_fact(facts: Sequence[Memory], text: str, key: str | None) -> Memory | None:
    others = (memory for memory in facts if memory.key != key)
    return next((memory for memory in others if is_equivalent_text(memory.text, text)), None)


def _explain_outdated(facts: Sequence[Memory], text: str, source: Provenance | None) -> str:
    """Why a text is past, if a previous one said the same and held when this was said."""
    said_at = source.at if source else None
    for previous in (previous for memory in facts for previous in memory.previous):
        if (said_at is None or said_at < previous.until) and is_equivalent_text(
            previous.text, text
        ):
            return f"it was {previous.change} on {previous.until.date()}, and said before"
    return ""


async def _find_similar_facts(
    adapter: StoreAdapter, namespace: Namespace, text: str, *, include_past: bool
) -> list[Memory]:
    memories = await adapter.search(namespace, query=text, limit=_COMPARED_MEMORIES, context=False)
    if memories and memories[0].score is None:  # the store does not rank
        memories = await adapter.list_memories(namespace)
    elif include_past and adapter.versioned:
        memories += await adapter.search(
            namespace, filter=build_previous_text_filter(text), limit=_COMPARED_MEMORIES
        )
    own = [memory for memory in memories if memory.namespace == namespace]
    return [memory for memory in own if memory.kind not in EVENT_KINDS]


def _refuse_repeated(judgement: _Judgement) -> None:
    distinct: list[int] = []
    for i in judgement.kept_indices(include_events=False):
        text = judgement.get_text(i)
        first = next(
            (
                earlier
                for earlier in distinct
                if is_equivalent_text(judgement.get_text(earlier), text)
            ),
            None,
        )
        if first is None:
            distinct.append(i)
        else:
            key = judgement.keys[first]
            judgement.refuse(i, "duplicate", "another candidate says the same", key)


def _find_content_fault(candidate: Candidate) -> tuple[str, str] | None:
    text = candidate.text
    if not isinstance(text, str):
        return "content", "it is no text"
    words = (
        text.split(": ", 1)[-1] if candidate.kind in EVENT_KINDS else text
    )  # without the speaker
    if not any(map(str.isalnum, words)):
        return "content", "it has no words"
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        return "content", f"it is no Unicode text: {exc.reason}"
    if candidate.role == "system":
        return "role", "the words of a system message are settings, and no memory"
    return None


def _find_size_fault(candidate: Candidate) -> tuple[str, str] | None:
    chars = len(candidate.text)
    if chars > _MAX_CHARS and candidate.kind not in EVENT_KINDS:
        return "size", f"it has {chars:,} characters; {_MAX_CHARS:,} are allowed"
    for part, depth in iter_json_parts(candidate.fields):
        if depth > _MAX_FIELD_DEPTH:
            return "size", f"its fields are more than {_MAX_FIELD_DEPTH} levels deep"
        chars += len(part) if isinstance(part, str) else 0
    if chars > _MAX_VALUE_CHARS:
        return "size", f"it has {chars:,} characters; {_MAX_VALUE_CHARS:,} are allowed with fields"
    return None


def iter_json_parts(value: Any) -> Iterator[tuple[Any, int]]:
    """The parts of a JSON value, and how deep each is."""
    stack = [(value, 0)]
    while stack:
        part, depth = stack.pop()
        yield part, depth
        if isinstance(part, Mapping):
            stack += [(inner, depth + 1) for inner in part.values()]
        elif isinstance(part, list | tuple):
            stack += [(inner, depth + 1) for inner in part]


def _get_admitted_text(candidate: Candidate, verdict: Verdict) -> str:
    return candidate.text if verdict.text is None else verdict.text


def _combine_verdicts(previous: Verdict, answer: Verdict, name: str) -> Verdict:
    """The verdict after a check's; one that keeps undoes no redaction."""
    if answer.action != "keep":
        reason = answer.reason or f"the check {name} says so"
        return replace(answer, reason=reason, check=answer.check or name)
    if answer.text is None:
        return previous
    reason = "; ".join(filter(None, (previous.reason, answer.reason or "it is put otherwise")))
    check = previous.check or answer.check or name
    return replace(previous, reason=reason, check=check, text=answer.text)


def _run_check(check: Check, candidates: Sequence[Candidate]) -> Effect[list[Verdict | str | None]]:
    """The check's verdicts; a text says why there is none."""

    def judge_candidate(candidate: Candidate) -> Verdict | str | None:
        try:
            verdict: Any = check(candidate)
        except Exception as exc:
            return f"raised {type(exc).__name__}: {exc!s:.200}"
        valid = verdict is None or isinstance(verdict, Verdict)
        return verdict if valid else f"returned {verdict!r:.80}, which is no answer"

    return run_computation(lambda: [judge_candidate(candidate) for candidate in candidates])


def _check_functions(name: str, functions: Any) -> tuple[Any, ...]:
    for function in check_instance(name, functions, (list, tuple), "a list of functions"):
        check_instance(name, function, Callable, "a function")  # type: ignore[arg-type]
    return tuple(functions)
