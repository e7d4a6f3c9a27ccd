"""Decide whether a candidate becomes a memory, is quarantined, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from langgraph.store.base import GetOp

from perdure.effects import Effect, build_effect_that_calls_function_in_thread
from perdure.memory.long_term.detectors import DETECTORS, Detector, SensitiveDataRules, Treatment
from perdure.memory.long_term.records import (
    EVENT_KINDS,
    HASHED_ID_PREFIX,
    QUARANTINE,
    RESERVED_LABEL,
    TOMBSTONES,
    TURN,
    Candidate,
    ChangePlan,
    Memory,
    Outcome,
    OutcomeChange,
    StoreAdapter,
    Verdict,
    build_filter_for_memories_with_previous_text,
    build_namespace_of_notes_about_memories,
    build_put,
    build_unsearched_permanent_note_put,
)
from perdure.memory.options import check_choice, check_instance
from perdure.stores.base import Namespace, Provenance, PutItem
from perdure.stores.search.text_equivalence import hash_normal_form, is_text_stating_same_fact
from perdure.stores.tombstones import hash_thread_and_message_id

if TYPE_CHECKING:
    from perdure.memory.loaded_thread import LoadedThread

RemovalKind = Literal["deleted", "forgotten"]
"""`"deleted"` if past versions of the memory are kept, else `"forgotten"`."""
_PAGE_SIZE: Final = 1_000
"""Maximum number of tombstones that are read at once.

If a namespace has more tombstones, only the tombstones with the requested keys are read.
"""
TOMBSTONE_CHECK: Final = "tombstone"
"""The name of the check that refuses texts that were deleted or forgotten."""
# name of the tombstone field that lists the ids of the removed memory's source messages
_MESSAGE_IDS: Final = "message_ids"


def build_tombstones(memory: Memory, removal: RemovalKind) -> list[PutItem]:
    """Build tombstones for a memory's current and previous texts and for a turn's source message.

    A memory's `previous` attribute contains at most its ten most recent previous texts. To build
    tombstones for every text that a memory has ever had, call `build_tombstones` once for each
    version of the memory.

    Args:
        memory: A version of the memory.
        removal: How the memory was removed.
    """
    source = memory.provenance
    keys = [
        hash_normal_form(text)
        for text in (memory.text, *(previous.text for previous in memory.previous))
    ]
    keys += build_tombstone_keys_of_source_messages(source) if memory.kind == TURN else []
    ids = source.message_ids if source else ()
    return [build_tombstone(memory.namespace, key, removal, ids) for key in dict.fromkeys(keys)]


def build_tombstone_keys_of_source_messages(provenance: Provenance | None) -> list[str]:
    """Return the keys under which tombstones for a memory's source messages are stored.

    A tombstone is a record of a deletion. `provenance` lists the source messages, from which the
    memory was extracted.
    """
    if provenance is None:
        return []
    return [hash_thread_and_message_id(provenance.thread_id, id) for id in provenance.message_ids]


async def find_tombstones(
    adapter: StoreAdapter, namespace: Namespace, digests: Collection[str]
) -> dict[str, Mapping[str, Any]]:
    """Return a dict of the stored tombstones whose keys are in `digests`.

    The store is queried at most twice, regardless of the number of keys.

    Args:
        adapter: The adapter of the store that contains the item.
        namespace: The namespace of the memories.
        digests: The keys. Each is the hash of a text's normal form, or of the ids of a message and
            its thread.
    """
    tombstones_namespace = build_namespace_of_notes_about_memories(TOMBSTONES, namespace)
    if not digests:
        return {}
    notes = await adapter.search(tombstones_namespace, limit=_PAGE_SIZE)
    if len(notes) == _PAGE_SIZE:
        items = await adapter.call(
            "batch", [GetOp(tombstones_namespace, key) for key in dict.fromkeys(digests)]
        )
        return {item.key: item.value for item in items if item is not None}
    own_notes = (note for note in notes if note.namespace == tombstones_namespace)
    return {note.key: note.value for note in own_notes if note.key in digests}


async def is_forgotten(adapter: StoreAdapter, namespace: Namespace, text: str) -> bool:
    """Return whether a memory with the given text was ever removed from a namespace.

    The memory may have been deleted, which keeps its past versions, or forgotten, which erases
    them.
    """
    return bool(await find_tombstones(adapter, namespace, [hash_normal_form(text)]))


async def add_message_ids_of_replaced_tombstones(
    adapter: StoreAdapter, puts: Sequence[PutItem]
) -> list[PutItem]:
    """Copy the message ids from stored tombstones to the tombstones that will replace them.

    Items in `puts` that are not tombstones are returned unchanged.
    """
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
    """Build the put of a tombstone.

    Args:
        namespace: The namespace of the memories.
        key: The hash of a text's normal form, or of the ids of a message and its thread.
        removal: How the memory was removed.
        message_ids: The ids of the memory's source messages.
    """
    value = {
        "change": removal,
        "at": datetime.now(UTC).isoformat(),
        _MESSAGE_IDS: list(message_ids),
    }
    return build_unsearched_permanent_note_put(
        build_namespace_of_notes_about_memories(TOMBSTONES, namespace), key, value
    )


Check = Callable[[Candidate], Verdict | None]
"""A check that an application adds.

The check returns a verdict, or None to leave the decision to other checks.
"""

# Maximum length of a memory's text, in characters. The limit does not apply to memories of the
# kinds "turn" and "episode".
_MAX_CHARS: Final = 2_000
# maximum total length of a memory's text and fields, in characters
_MAX_VALUE_CHARS: Final = 100_000
_MAX_FIELD_DEPTH: Final = 32  # maximum nesting depth of a memory's fields
# Maximum number of results per search for stored facts that are similar to a candidate. Only these
# facts are compared with the candidate. If the store does not rank search results, all facts in the
# namespace are compared instead.
_COMPARED_MEMORIES: Final = 16


class Gate:
    """Decides which candidates become memories.

    The gate refuses texts that contain no words or are too long, texts taken from a system message,
    and facts that a stored memory already states. If a text was deleted or forgotten, the gate
    refuses to store it again. As an exception, the gate does not refuse the text if storing it is
    explicitly requested, or if the text appears in a message from a run that began after the
    deletion. By default, texts that contain secrets are quarantined until a person reviews them. If
    a memory's only source is tool output, the memory is quarantined unless the application's code
    asked to store it.

    Args:
        checks: Checks that you add. The checks are called in order for candidates that would be
            kept. The first verdict other than `"keep"` decides. A `"keep"` verdict can change the
            `text`. If a check raises an error, the candidate is quarantined.
        secrets: The treatment of passwords, keys, cards, and of the kinds that your own detectors
            find.
        contacts: The treatment of e-mail addresses and telephone numbers. With `"redact"`, e-mail
            addresses and telephone numbers are still kept if the memory is requested explicitly.
        detectors: The functions that find sensitive data.
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
        self.checks: Sequence[Check] = _check_list_of_functions("checks", checks)
        self.sensitive = SensitiveDataRules(
            secrets, contacts, _check_list_of_functions("detectors", detectors)
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
        """Decide for each candidate memory whether to store it, and return the verdicts in order.

        Args:
            candidates: The candidates.
            adapter: The store of the memories.
            namespace: The namespace of the memories.
            keys: The keys under which the candidates would be stored. A candidate is not compared
                with the memory under its own key. `Verdict.same_as` may be the key of a different
                candidate in `keys`.
            thread: The thread of the candidates, if it is known. With the thread, the gate can find
                out which messages were added by runs after a deletion.
        """
        verdicts = await build_effect_that_calls_function_in_thread(
            partial(self._judge_by_rules, candidates)
        )
        keys = [None] * len(candidates) if keys is None else keys
        judgement = _Judgement(candidates, verdicts, keys)
        await _refuse_previously_deleted_candidates(judgement, adapter, namespace, thread)
        await _refuse_facts_already_stored_or_outdated(judgement, adapter, namespace)
        if self.checks:
            judgement.verdicts = await self.apply_custom_checks(candidates, judgement.verdicts)
        if len(candidates) > 1:
            _refuse_facts_that_repeat_earlier_candidate(judgement)
        return judgement.verdicts

    async def apply_custom_checks(
        self, candidates: Sequence[Candidate], verdicts: Sequence[Verdict]
    ) -> list[Verdict]:
        """Run the application-defined checks on admitted candidates, and return all verdicts."""
        verdicts = list(verdicts)
        for check in self.checks:
            indices = [i for i, verdict in enumerate(verdicts) if verdict.action == "keep"]
            admitted = [
                candidates[i]
                if (text := verdicts[i].text) is None
                else replace(candidates[i], text=text)
                for i in indices
            ]
            answers = await _run_custom_check(check, admitted)
            name = str(getattr(check, "__name__", type(check).__name__))
            for i, answer in zip(indices, answers, strict=True):
                if isinstance(answer, Verdict):
                    verdicts[i] = _combine_with_custom_verdict(verdicts[i], answer, name)
                elif answer is not None:
                    fault = f"the check {name} {self.sensitive.redact(answer)}"
                    verdicts[i] = Verdict("quarantine", fault, name)
        return verdicts

    def _judge_by_rules(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        """Judge candidates only by their texts and fields, without reading from the store."""
        verdicts: list[Verdict] = []
        for candidate in candidates:
            verdict = (
                _refuse_candidate_if_text_invalid(candidate)
                or _refuse_candidate_if_too_large(candidate)
                or self.sensitive.judge(candidate)
            )
            is_requested_by_code = candidate.explicit and not candidate.by_model
            if verdict.action == "keep" and candidate.role == "tool" and not is_requested_by_code:
                reason = "the text comes only from the output of a tool"
                verdict = Verdict("quarantine", reason, "role")
            verdicts.append(verdict)
        return verdicts


@dataclass(slots=True)
class _Judgement:
    """Candidate memories that a gate is checking, with the current verdict on each candidate.

    `keys` contains, for each candidate memory, the key under which the memory would be stored.
    """

    candidates: Sequence[Candidate]
    verdicts: list[Verdict]
    keys: Sequence[str | None]

    def iter_kept_indices(self, *, include_events: bool = True) -> Iterator[int]:
        """Yield the indices of the candidates whose current verdict is `"keep"`."""
        for i, candidate in enumerate(self.candidates):
            if self.verdicts[i].action == "keep" and (
                include_events or candidate.kind not in EVENT_KINDS
            ):
                yield i

    def get_text(self, i: int) -> str:
        """Return the text that would be stored for a candidate, which may have been redacted."""
        text = self.verdicts[i].text
        return self.candidates[i].text if text is None else text

    def refuse(self, i: int, check: str, reason: str, same_as: str | None = None) -> None:
        """Set the verdict on a candidate memory to "refuse", replacing its current verdict."""
        self.verdicts[i] = Verdict("refuse", reason, check, None, same_as)


async def judge_candidates_and_plan_puts(
    gate: Gate,
    adapter: StoreAdapter,
    namespace: Namespace,
    candidates: Sequence[Candidate],
    candidate_keys: Sequence[str],
    generated_keys: Sequence[str] = (),
    thread: LoadedThread | None = None,
) -> ChangePlan:
    """Judge candidates, and build the put operations for memories and quarantine entries.

    Args:
        gate: The gate.
        adapter: The store of the memories.
        namespace: The namespace of the memories.
        candidates: The candidates.
        candidate_keys: The key of each candidate.
        generated_keys: The keys of new memories that were requested explicitly. Such a key is
            usually random, and different if the same memory is requested again. The key of a
            quarantine entry therefore does not depend on it.
        thread: The thread of the candidates, if it is known.

    Returns:
        The puts, and an outcome for each candidate in order.
    """
    verdicts = await gate.judge(candidates, adapter, namespace, keys=candidate_keys, thread=thread)
    puts, outcomes = list[PutItem](), list[Outcome]()
    for candidate, key, verdict in zip(candidates, candidate_keys, verdicts, strict=True):
        change: OutcomeChange = "refused" if verdict.same_as is None else "unchanged"
        outcome_key = verdict.same_as
        if verdict.action == "keep":
            fields = candidate.fields if verdict.fields is None else verdict.fields
            text = candidate.text if verdict.text is None else verdict.text
            value = {**fields, "text": text, "kind": candidate.kind}
            change, outcome_key = "added", key
            puts.append(
                build_put(
                    namespace,
                    key,
                    value,
                    provenance=_get_provenance_with_role_as_default_trust(candidate),
                )
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


def _get_provenance_with_role_as_default_trust(candidate: Candidate) -> Provenance:
    """Return the provenance of a candidate.

    If the provenance has no trust class, the candidate's role is used as the trust class.
    """
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
    """Build the put of a quarantine entry."""
    names = ("text", "kind", "role", "explicit")
    value = {name: getattr(candidate, name) for name in names} | {"shown": redacted_text}
    value |= {"reason": verdict.reason, "check": verdict.check, "at": datetime.now(UTC).isoformat()}
    value |= {"key": key, "fields": dict(candidate.fields)}
    # The key of a quarantine entry is a hash of the candidate's text and origin, so quarantining
    # the same candidate again replaces its entry.
    source = _get_provenance_with_role_as_default_trust(candidate)
    origin = ("thread", source.thread_id), ("key", None if key in generated_keys else key)
    parts = [f"{name}:{part}" for name, part in origin if part is not None]
    entry_identity = "\0".join([candidate.kind, candidate.text, *parts]).encode(
        "utf-8", "surrogatepass"
    )
    entry_key = blake2b(entry_identity, digest_size=12).hexdigest()
    entries_namespace = build_namespace_of_notes_about_memories(QUARANTINE, namespace)
    return build_put(entries_namespace, entry_key, value, provenance=source, is_searched=False)


async def _refuse_previously_deleted_candidates(
    judgement: _Judgement,
    adapter: StoreAdapter,
    namespace: Namespace,
    thread: LoadedThread | None,
) -> None:
    """Refuse candidate memories whose texts were previously deleted or forgotten.

    A candidate that was explicitly requested is kept, even if a memory with the same text was
    deleted. A candidate is kept if its text appears again in a message that was added after the
    deletion. If the candidate's source message was stored as a turn, and this turn was deleted or
    forgotten, the candidate is refused. The candidate is refused even if a newer message contains
    the same text. Here, a turn is a memory of the kind `TURN`, which contains the text of one
    message.
    """
    hashes: dict[int, list[str]] = {}
    for i in judgement.iter_kept_indices():
        candidate = judgement.candidates[i]
        if not candidate.explicit:
            hashes[i] = [hash_normal_form(text) for text in {candidate.text, judgement.get_text(i)}]
            hashes[i] += (
                build_tombstone_keys_of_source_messages(candidate.provenance)
                if candidate.kind == TURN
                else []
            )
    if not hashes:
        return
    stored_tombstones = await find_tombstones(adapter, namespace, set().union(*hashes.values()))
    reason = "the text was deleted or forgotten before, and nobody asked for it again"
    for i in (i for i, keys in hashes.items() if not stored_tombstones.keys().isdisjoint(keys)):
        source = judgement.candidates[i].provenance
        tombstones = [stored_tombstones[key] for key in hashes[i] if key in stored_tombstones]
        source_tombstones = await find_tombstones(
            adapter, namespace, build_tombstone_keys_of_source_messages(source)
        )
        if source_tombstones or not await _were_source_messages_added_after_deletions(
            source, tombstones, thread
        ):
            judgement.refuse(i, TOMBSTONE_CHECK, reason)


async def _were_source_messages_added_after_deletions(
    source: Provenance | None,
    tombstones: Sequence[Mapping[str, Any]],
    thread: LoadedThread | None,
) -> bool:
    """Return whether a text was extracted only from messages newer than the text's deletion.

    If the text was deleted several times, the latest deletion counts.

    The source messages are the messages from which the text was extracted.

    `tombstones` contains the stored deletion records of the text, which state when the text was
    deleted. A message counts as added after a deletion only if the run that added it began after
    the deletion. Return False if one of the text's source messages was also a source of a deleted
    memory with the same text. Return False if the time of a deletion or of a source message is
    unknown.
    """
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
    return await thread.were_all_messages_added_after(source.message_ids, max(removal_times))


async def _refuse_facts_already_stored_or_outdated(
    judgement: _Judgement, adapter: StoreAdapter, namespace: Namespace
) -> None:
    """Refuse facts that a stored memory already states, and facts that are outdated.

    See `_explain_why_text_is_outdated`. If a user, a model or the application explicitly asked to
    store a fact, the fact is never refused as outdated.
    """
    for i in judgement.iter_kept_indices(include_events=False):
        candidate, text = judgement.candidates[i], judgement.get_text(i)
        similar_facts = await _find_similar_facts(
            adapter, namespace, text, include_past=not candidate.explicit
        )
        for memory in similar_facts:
            # Do not compare a candidate with the stored memory that the candidate would replace.
            if memory.key != judgement.keys[i] and is_text_stating_same_fact(memory.text, text):
                reason = "an existing memory already states this"
                judgement.refuse(i, "duplicate", reason, memory.key)
                break
        else:
            if not candidate.explicit and (
                reason := _explain_why_text_is_outdated(similar_facts, text, candidate.provenance)
            ):
                judgement.refuse(i, "duplicate", reason)


def _explain_why_text_is_outdated(
    facts: Sequence[Memory], text: str, source: Provenance | None
) -> str:
    """Return the reason why a text is outdated, or "" if it is up to date.

    A text is outdated if it states the former content of a stored fact and is older than the fact's
    update. If it is unknown when a text was stated, the text is assumed to be older than the update
    of the stored fact.
    """
    said_at = source.at if source else None
    for previous in (previous for memory in facts for previous in memory.previous):
        if (said_at is None or said_at < previous.until) and is_text_stating_same_fact(
            previous.text, text
        ):
            return (
                f"the same text was {previous.change} on {previous.until.date()}, and this "
                "statement is older"
            )
    return ""


async def _find_similar_facts(
    adapter: StoreAdapter, namespace: Namespace, text: str, *, include_past: bool
) -> list[Memory]:
    """Return stored facts that may be equivalent to a text.

    Args:
        adapter: The store of the memories.
        namespace: The namespace of the memories.
        text: The text.
        include_past: Whether to include facts that have `text` as one of their previous texts. Only
            perdure's stores support it.
    """
    memories = await adapter.search(namespace, query=text, limit=_COMPARED_MEMORIES, context=False)
    if memories and memories[0].score is None:  # the store does not rank its results
        memories = await adapter.list_memories(namespace)
    elif include_past and adapter.versioned:
        memories += await adapter.search(
            namespace,
            filter=build_filter_for_memories_with_previous_text(text),
            limit=_COMPARED_MEMORIES,
        )
    return [
        memory
        for memory in memories
        if memory.namespace == namespace and memory.kind not in EVENT_KINDS
    ]


def _refuse_facts_that_repeat_earlier_candidate(judgement: _Judgement) -> None:
    """Refuse each fact that is already stated by an earlier candidate in the same batch."""
    distinct: list[int] = []
    for i in judgement.iter_kept_indices(include_events=False):
        text = judgement.get_text(i)
        first = next(
            (
                earlier
                for earlier in distinct
                if is_text_stating_same_fact(judgement.get_text(earlier), text)
            ),
            None,
        )
        if first is None:
            distinct.append(i)
        else:
            key = judgement.keys[first]
            judgement.refuse(i, "duplicate", "another candidate already states this", key)


def _refuse_candidate_if_text_invalid(candidate: Candidate) -> Verdict | None:
    """Return a verdict that refuses the candidate if its text is invalid, otherwise None.

    A text is refused if it contains no words, is not valid Unicode, or is from a system message.
    """
    text = candidate.text
    if not isinstance(text, str):
        return Verdict(
            "refuse", f"the text is of type {type(text).__name__}; expected str", "content"
        )
    # The text of an event begins with the speaker's name. If the text contains no other word, it is
    # refused.
    words = text.split(": ", 1)[-1] if candidate.kind in EVENT_KINDS else text
    if not any(map(str.isalnum, words)):
        return Verdict("refuse", "the text contains no words", "content")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        return Verdict("refuse", f"the text is not valid Unicode: {exc.reason}", "content")
    if candidate.role == "system":
        return Verdict(
            "refuse",
            "the text comes from a system message, which cannot become a memory",
            "role",
        )
    return None


def _refuse_candidate_if_too_large(candidate: Candidate) -> Verdict | None:
    """Return a verdict that refuses the candidate if it is too large, otherwise None."""
    chars = len(candidate.text)
    if chars > _MAX_CHARS and candidate.kind not in EVENT_KINDS:
        return Verdict(
            "refuse",
            f"the text has {chars:,} characters; at most {_MAX_CHARS:,} are allowed",
            "size",
        )
    for part, depth in iter_json_values_with_depth(candidate.fields):
        if depth > _MAX_FIELD_DEPTH:
            return Verdict(
                "refuse", f"the fields are more than {_MAX_FIELD_DEPTH} levels deep", "size"
            )
        chars += len(part) if isinstance(part, str) else 0
    if chars > _MAX_VALUE_CHARS:
        limit = f"at most {_MAX_VALUE_CHARS:,} are allowed"
        return Verdict(
            "refuse", f"the text and the fields have {chars:,} characters; {limit}", "size"
        )
    return None


def iter_json_values_with_depth(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield a JSON value and all values nested in it, each with its depth."""
    stack = [(value, 0)]
    while stack:
        part, depth = stack.pop()
        yield part, depth
        if isinstance(part, Mapping):
            stack += zip(part.values(), repeat(depth + 1))
        elif isinstance(part, list | tuple):
            stack += zip(part, repeat(depth + 1))


def _combine_with_custom_verdict(
    previous: Verdict, custom_verdict: Verdict, check_name: str
) -> Verdict:
    """Combine the previous verdict on a candidate with the verdict of an application-defined check.

    If the custom check keeps a candidate and returns no new text, the text from the previous
    verdict is kept. The previous verdict may contain a redacted text, for example without
    passwords.
    """
    if custom_verdict.action != "keep":
        reason = custom_verdict.reason or f"the check {check_name} gave no reason"
        return replace(custom_verdict, reason=reason, check=custom_verdict.check or check_name)
    if custom_verdict.text is None:
        return previous
    reason = "; ".join(
        filter(None, (previous.reason, custom_verdict.reason or "the text was reworded"))
    )
    check = previous.check or custom_verdict.check or check_name
    return replace(previous, reason=reason, check=check, text=custom_verdict.text)


def _run_custom_check(
    check: Check, candidates: Sequence[Candidate]
) -> Effect[list[Verdict | str | None]]:
    """Return an `Effect` that runs an application-defined check on each candidate.

    An effect is an operation that is executed differently for blocking and for async callers.
    Running the returned `Effect` produces a list with one element for each candidate. Each list
    element is the verdict that the check returned, None if the check returned None, or an error
    message. The list element is an error message if the check raised an exception, or if the check
    returned an object other than a `Verdict` or None.
    """

    def judge_candidate(candidate: Candidate) -> Verdict | str | None:
        """Return the check's verdict on a candidate, or an error message if the check failed."""
        try:
            verdict: Any = check(candidate)
        except Exception as exc:
            return f"raised {type(exc).__name__}: {exc!s:.200}"
        valid = verdict is None or isinstance(verdict, Verdict)
        return verdict if valid else f"returned {verdict!r:.80}, which is not a Verdict or None"

    return build_effect_that_calls_function_in_thread(
        lambda: [judge_candidate(candidate) for candidate in candidates]
    )


def _check_list_of_functions(option_name: str, functions: Any) -> tuple[Any, ...]:
    """Check that the value of an option is a list of functions, and return it as a tuple."""
    for function in check_instance(option_name, functions, (list, tuple), "a list of functions"):
        check_instance(option_name, function, Callable, "a function")  # type: ignore[arg-type]
    return tuple(functions)
