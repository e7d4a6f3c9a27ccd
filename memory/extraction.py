"""Extraction: memories of the messages of a thread, exactly once in effect.

Messages → extractor → gate → one transaction with the watermark, which is swapped by its version.
A batch that was cut off before its transaction is read again; of two that extract one thread at the
same time the slower is refused, reads again, and goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.store.base import BaseStore

from perdure.checkpointers.address import check_thread_id
from perdure.errors import VersionConflict
from perdure.memory.effects import Effect, Effects, awaiting, blocking, in_thread
from perdure.memory.gate import Gate
from perdure.memory.options import instance, text, whole
from perdure.memory.plan import planned
from perdure.memory.proposals import Batch, Extractor, Planned, Proposal, Scope, Usage
from perdure.memory.store_adapter import RESERVED, StoreAdapter, adapter_of, namespace_of
from perdure.memory.templates import Template
from perdure.memory.thread_messages import (
    ThreadHistory,
    ThreadMessage,
    read_history,
)
from perdure.memory.turns import TurnExtractor
from perdure.memory.watermarks import Watermark, watermark
from perdure.stores.base import Namespace, PutItem, VersionRetention

_BEFORE: Final = 4  # messages before a batch that its extractor is shown
_CONFLICTS: Final = 50  # times that others may change the same memories while a batch is planned
_TIDY: Final = 64  # versions of a watermark's note that are dropped together
Reads = Callable[[Watermark], Effects[ThreadHistory]]


@dataclass(frozen=True, slots=True)
class ExtractionReport:
    """What an extraction did.

    Attributes:
        thread_id: The thread.
        messages: How many messages were read that had not been before.
        added: How many memories are new. So for the other changes, see `Outcome`.
        refused: How many were not kept, by the check that refused them, or the reason.
        usage: What a model was asked for it.
        batches: In how many transactions it was written.
    """

    thread_id: str
    messages: int = 0
    added: int = 0
    updated: int = 0
    superseded: int = 0
    deleted: int = 0
    unchanged: int = 0
    quarantined: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    batches: int = 0

    def __str__(self) -> str:
        parts = [f"{self.thread_id}: {self.messages} messages read"]
        parts += [f"{count} {name}" for name, count in self.changes.items() if count]
        if self.refused:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.items())
            parts.append(f"{sum(self.refused.values())} refused ({reasons})")
        if self.usage.calls:
            tokens = f"{self.usage.input_tokens} + {self.usage.output_tokens} tokens"
            times = "once" if self.usage.calls == 1 else f"{self.usage.calls} times"
            parts.append(f"model asked {times}, {tokens}")
        return " ".join(", ".join(parts).split())

    @property
    def changes(self) -> Mapping[str, int]:
        """How many memories were changed, by the kind of change."""
        names = ("added", "updated", "superseded", "deleted", "unchanged", "quarantined")
        return {name: getattr(self, name) for name in names}

    def counting(self, batch: Batch, plan: Planned, usage: Usage) -> ExtractionReport:
        """The report with another batch."""
        counts = Counter[str](each.change for each in plan.outcomes)
        refused = [each.check or each.reason for each in plan.outcomes if each.change == "refused"]
        changes: dict[str, Any] = {name: n + counts[name] for name, n in self.changes.items()}
        return replace(
            self,
            messages=self.messages + len(batch.messages),
            refused=dict(Counter(self.refused) + Counter(refused)),
            usage=self.usage + usage,
            batches=self.batches + 1,
            **changes,
        )

    def noted(self) -> dict[str, Any]:
        """What a note keeps of it."""
        return asdict(self)


class Extraction:
    """Extracts long-term memories of threads.

    Methods that begin with `a` are the async forms. `config` is that of a run; what fills in the
    namespace is taken from it.

    Args:
        saver: The checkpointer that has the threads. perdure's have what was trimmed as well.
        store: Where memories are kept; on perdure's, each batch is one transaction. None: within a
            graph, the store it was compiled with.
        extractor: Proposes what to keep; None: `TurnExtractor()`, which needs no model.
        namespace: Labels; see `Template`.
        gate: Decides what is kept; None: `Gate()`.
        messages_key: The channel of the messages.
        batch: How many messages are read together, at most.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        saver: BaseCheckpointSaver[Any],
        store: BaseStore | None = None,
        extractor: Extractor | None = None,
        *,
        namespace: Sequence[str] = ("memories", "{user_id}"),
        gate: Gate | None = None,
        messages_key: str = "messages",
        batch: int = 50,
    ) -> None:
        expected = "a BaseCheckpointSaver, like SQLiteCheckpointer.open(path)"
        self.saver = instance("saver", saver, BaseCheckpointSaver, expected)
        self.store = store
        self._adapter = None if store is None else StoreAdapter(store)
        given = TurnExtractor() if extractor is None else extractor
        expected = "TurnExtractor(…) or ModelExtractor(model, …)"
        self.extractor: Extractor = instance("extractor", given, Extractor, expected)
        self.gate: Gate = instance("gate", gate or Gate(), Gate, "a Gate")
        self.namespace = Template(namespace)
        self.messages_key = text("messages_key", messages_key, "a channel's name")
        self.batch = whole("batch", batch, 1)

    def _extract(
        self, thread_id: str, config: RunnableConfig | None = None, *, anew: bool = False
    ) -> Effects[ExtractionReport]:
        """Extract memories of the messages of a thread that this extractor has not read yet.

        Args:
            thread_id: The thread.
            config: Of a run.
            anew: Read the whole thread again. No memory is made twice: turns and episodes of the
                same messages and facts that say the same stay one; and nothing that was deleted
                comes back.

        Raises:
            UnknownThread: There is no such thread.
            InvalidConfig: The config does not fill in the namespace.
            LimitExceeded: There is no room for more memories; the messages are read again the next
                time.
            ModelFailed: The model gave no usable answer; the messages are read again the next time.
            VersionConflict: Others changed the same memories, again and again.
            StorageError: The store refuses.
        """
        scope = Scope(self.adapter(), namespace_of(self.namespace, config), config)
        pipeline = Pipeline(self.extractor, self.gate, self.batch, scope)
        thread_id = check_thread_id(thread_id)

        def reads(mark: Watermark) -> Effects[ThreadHistory]:
            return read_history(self.saver, thread_id, self.messages_key, mark.ids)

        if anew:
            yield from pipeline.setting_back(thread_id)
        return (yield from in_thread(pipeline.extracting(thread_id, reads)))

    extract = blocking(_extract)
    aextract = awaiting(_extract)

    def _tidy(self) -> Effects[int]:
        """Drop past versions of perdure's own notes, which nobody asks for; returns how many.

        A store that keeps no versions, or is a part of one, is left as it is.
        """
        return (yield from _tidied(self.adapter(), (RESERVED,)))

    tidy = blocking(_tidy)
    atidy = awaiting(_tidy)

    def adapter(self) -> StoreAdapter:
        """The store.

        Raises:
            ConfigurationError: There is none.
        """
        return self._adapter or adapter_of(None)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Messages → extractor → gate → one transaction with the watermark.

    Attributes:
        extractor: Proposes what to keep.
        gate: Decides.
        batch: How many messages are read together, at most.
        scope: Where memories are written.
    """

    extractor: Extractor
    gate: Gate
    batch: int
    scope: Scope

    def extracting(self, thread_id: str, reads: Reads) -> Effects[ExtractionReport]:
        """Extract memories of what is not yet read; `reads` reads the messages of the thread."""
        report = ExtractionReport(thread_id)
        while True:  # again when another was quicker
            mark = yield from self._mark(thread_id)
            history = yield from reads(mark)
            new = yield from self._unread(mark, history)
            if not new and (mark.checkpoint_id != history.checkpoint_id or mark.attempts):
                after = mark.advanced((), history.checkpoint_id)  # it is no longer due
                with suppress(VersionConflict):
                    yield from self.scope.adapter.written([self._put(after, thread_id)])
            while new:
                size = max(1, self.extractor.taking(new[: self.batch]))
                batch, new = _batch_of(new[:size], mark, history), new[size:]
                proposal = yield from self.extractor.proposing(batch, self.scope)
                # the thread stays due until its last batch is written
                at = mark.checkpoint_id if new else history.checkpoint_id
                written = yield from self._written(batch, proposal, mark, at, report)
                if written is None:
                    break
                report, after = written
                if new:
                    mark = yield from self._mark(thread_id)
                    if not mark.same_as(after):
                        break
            else:
                return report

    def setting_back(self, thread_id: str) -> Effects[None]:
        """Have the whole thread read again."""
        for tries in range(_CONFLICTS, -1, -1):
            mark = yield from self._mark(thread_id)
            try:
                back = [self._put(mark.set_back(), thread_id)] if mark.count else []
                return (yield from self.scope.adapter.written(back))
            except VersionConflict:  # it was extracted meanwhile
                if not tries:
                    raise

    def _mark(self, thread_id: str) -> Effects[Watermark]:
        scope = self.scope
        return watermark(scope.adapter, scope.namespace, thread_id, self.extractor.name)

    def _put(self, mark: Watermark, thread_id: str) -> PutItem:
        return mark.put(self.scope.namespace, thread_id)

    def _unread(self, mark: Watermark, history: ThreadHistory) -> Effects[list[ThreadMessage]]:
        new = mark.beyond(history)
        if new is not None:
            return new
        new = []  # no known message is left, say after a fork far back: the memories tell
        for each in mark.placed(history.messages):
            key = self.extractor.key(history.thread_id, each)
            found = key and (yield from self.scope.adapter.got(self.scope.namespace, key))
            new += [] if found else [each]
        return new

    def _written(
        self,
        batch: Batch,
        proposal: Proposal,
        mark: Watermark,
        checkpoint_id: str | None,
        report: ExtractionReport,
    ) -> Effects[tuple[ExtractionReport, Watermark] | None]:
        """Write what is proposed of a batch, with the watermark; None: another was quicker."""
        adapter = self.scope.adapter
        for tries in range(_CONFLICTS, -1, -1):
            # a store without versions refuses nothing, so it is asked before
            if not adapter.versioned and (yield from self._is_overtaken(mark, batch.thread_id)):
                return None
            plan = yield from planned(proposal, self.gate, self.scope)
            now = report.counting(batch, plan, proposal.usage)
            after = mark.advanced(batch.messages, checkpoint_id, plan.outcomes)
            put = self._put(replace(after, report=now.noted()), batch.thread_id)
            try:
                yield from adapter.written([*plan.puts, put])
            except VersionConflict:
                if (yield from self._is_overtaken(mark, batch.thread_id)):
                    return None
                if not tries:
                    raise
                continue
            if mark.version and mark.version % _TIDY == 0:
                yield from _tidied(adapter, put.namespace)
            return now, after
        return None

    def _is_overtaken(self, mark: Watermark, thread_id: str) -> Effects[bool]:
        now = yield from self._mark(thread_id)
        return now.version != mark.version or not now.same_as(mark)


def _batch_of(messages: Sequence[ThreadMessage], mark: Watermark, history: ThreadHistory) -> Batch:
    first = next(i for i, each in enumerate(history.messages) if each.id == messages[0].id)
    return Batch(
        history.thread_id,
        history.checkpoint_id,
        messages,
        history.messages[max(0, first - _BEFORE) : first],
        mark.ids & {each.id for each in messages},
    )


def _tidied(adapter: StoreAdapter, prefix: Namespace) -> Effects[int]:
    """Drop past versions under a prefix, where the store can."""
    store: Any = adapter.store
    if not (hasattr(store, "retain") and hasattr(store, "aretain")):
        return 0
    rule = VersionRetention(last=0)
    dropped: int = yield Effect(
        lambda: store.retain(rule, prefix=prefix), lambda: store.aretain(rule, prefix=prefix)
    )
    return dropped
