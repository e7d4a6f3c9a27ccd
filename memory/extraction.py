"""Extraction: memories of the messages of a thread, exactly once in effect.

Messages → extractor → gate → one transaction with the watermark, which is compared and swapped:
of two extractions of one thread the slower is refused, and reads it again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.store.base import BaseStore

from perdure.checkpointers.address import check_thread_id
from perdure.effects import Operation, awaiting, blocking, in_thread
from perdure.errors import ConfigurationError, InvalidConfig, InvalidNamespace, VersionConflict
from perdure.memory import thread_messages
from perdure.memory.changes import planned, written_in_turn
from perdure.memory.conversation import Messages, role
from perdure.memory.gate import Gate
from perdure.memory.model_call import times
from perdure.memory.nodes import Learner
from perdure.memory.options import instance, text, whole
from perdure.memory.proposals import Batch, Extractor, Planned, Proposal, Scope, Usage
from perdure.memory.run_config import Template, source
from perdure.memory.store_adapter import StoreAdapter, adapter_of, namespace_of
from perdure.memory.thread_messages import ThreadHistory, ThreadMessage
from perdure.memory.turns import TurnExtractor
from perdure.memory.watermarks import Watermark, watermark
from perdure.stores.base import PutItem, VersionRetention

_BEFORE: Final = 4  # messages before a batch that its extractor is shown
_LOG = logging.getLogger("perdure")
_RUN: Final = 200  # messages of a run in one transaction
_KEPT: Final = 64  # past versions of a watermark's note are dropped when there are so many
_CHANGES: Final = ("added", "updated", "superseded", "deleted", "unchanged", "quarantined")
Reads = Callable[[Watermark], Operation[ThreadHistory]]


@dataclass(frozen=True, slots=True)
class ExtractionReport:
    """How many messages an extraction read, and how many memories it changed."""

    thread_id: str
    messages: int = 0
    added: int = 0
    updated: int = 0
    superseded: int = 0
    deleted: int = 0
    unchanged: int = 0
    quarantined: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)  # by check, else by reason
    usage: Usage = field(default_factory=Usage)
    batches: int = 0  # transactions that were written

    def __str__(self) -> str:
        changes = [f"{count} {name}" for name, count in self.changes.items() if count]
        parts = [f"{self.thread_id}: {self.messages} messages read", *changes]
        if self.refused:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.items())
            parts.append(f"{sum(self.refused.values())} refused ({reasons})")
        if self.usage.calls:
            tokens = f"{self.usage.input_tokens} + {self.usage.output_tokens} tokens"
            parts.append(f"model asked {times(self.usage.calls)}, {tokens}")
        return " ".join(", ".join(parts).split())

    @property
    def changes(self) -> Mapping[str, int]:
        """How many memories were changed, by kind."""
        return {name: getattr(self, name) for name in _CHANGES}

    def counting(self, messages: int, plan: Planned, usage: Usage) -> ExtractionReport:
        """The report with another batch."""
        counts = Counter[str](each.change for each in plan.outcomes)
        refused = [each.check or each.reason for each in plan.outcomes if each.change == "refused"]
        added: dict[str, Any] = {name: n + counts[name] for name, n in self.changes.items()}
        added |= {"messages": self.messages + messages, "batches": self.batches + 1}
        total = dict(Counter(self.refused) + Counter(refused))
        return replace(self, refused=total, usage=self.usage + usage, **added)


class Extraction:
    """Extracts long-term memories of threads.

    Args:
        saver: The checkpointer of the threads. perdure's have removed messages as well.
        store: Where memories are kept; None: within a graph, the graph's store.
        extractor: Proposes memories; None: `TurnExtractor()`, which needs no model.
        namespace: Labels; see `Template`.
        batch: How many messages are read together, at most.
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
        self._adapter = None if store is None else StoreAdapter(store)
        given = TurnExtractor() if extractor is None else extractor
        expected = "TurnExtractor(…) or ModelExtractor(model, …)"
        self.extractor: Extractor = instance("extractor", given, Extractor, expected)
        self.gate: Gate = instance("gate", gate or Gate(), Gate, "a Gate")
        self.namespace = Template(namespace)
        self.messages_key = text("messages_key", messages_key, "a channel's name")
        self.batch = whole("batch", batch, 1)

    async def _extract(
        self, thread_id: str, config: RunnableConfig | None = None, *, anew: bool = False
    ) -> ExtractionReport:
        """Extract memories of the messages of a thread that this extractor has not read yet.

        The config of a run fills in the namespace. With `anew`, the whole thread is read again: no
        memory is made twice, and no deleted memory comes back. After an error, say `ModelFailed`,
        the next extraction reads the same messages.
        """
        scope = _scope(self.adapter(), self.namespace, config)
        pipeline = Pipeline(self.extractor, self.gate, self.batch, scope)
        thread_id = check_thread_id(thread_id)

        async def reads(mark: Watermark) -> ThreadHistory:
            return await thread_messages.read_history(
                self.saver, thread_id, self.messages_key, mark.ids
            )

        if anew:
            await pipeline.setting_back(thread_id)
        return await in_thread(pipeline.extracting(thread_id, reads))

    extract, aextract = blocking(_extract), awaiting(_extract)

    def adapter(self) -> StoreAdapter:
        """The store; a `ConfigurationError` if there is none."""
        return self._adapter or adapter_of(None)


def _scope(adapter: StoreAdapter, template: Template, config: RunnableConfig | None) -> Scope:
    namespace = namespace_of(template, config)
    if not adapter.versioned and any("." in label for label in namespace):
        raise InvalidNamespace(
            f"{type(adapter.store).__name__} refuses dots, as in {namespace!r} of "
            f"{template.labels!r}: pass values without dots, or use perdure.stores.SQLiteStore"
        )
    return Scope(adapter, namespace, config)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Messages → extractor → gate → one transaction with the watermark."""

    extractor: Extractor
    gate: Gate
    batch: int
    scope: Scope
    guards: bool = True  # whether to write a watermark before the first messages are read

    async def extracting(self, thread_id: str, reads: Reads) -> ExtractionReport:
        """Extract memories of unread messages; `reads` reads the messages of the thread."""
        report = ExtractionReport(thread_id)
        while True:  # again if another was quicker
            mark = await self._mark(thread_id)
            history = await reads(mark)
            new = mark.beyond(history)
            if not new and (mark.checkpoint_id != history.checkpoint_id or mark.attempts):
                after = mark.advanced((), history.checkpoint_id)  # it is no longer due
                with suppress(VersionConflict):
                    await self.scope.adapter.written([self._put(after, thread_id)])
            if new and mark.version == 0 and self.guards:
                with suppress(VersionConflict):
                    await self.scope.adapter.written([self._put(mark, thread_id)])
                continue  # who erases the note from now on stops this extraction
            while new:
                size = max(1, self.extractor.taking(new[: self.batch]))
                batch, new = _batch_of(new[:size], mark, history), new[size:]
                proposal = await self.extractor.proposing(batch, self.scope)
                # the thread stays due until its last batch is written
                at = mark.checkpoint_id if new else history.checkpoint_id
                after = mark.advanced(batch.messages, at)
                plan = await self._written(thread_id, proposal, mark, after)
                if plan is None:
                    break
                report = report.counting(len(batch.messages), plan, proposal.usage)
                if new:
                    mark = await self._mark(thread_id)
                    if not mark.same_as(after):
                        break
            else:
                return report

    async def setting_back(self, thread_id: str) -> None:
        """Set the watermark back, so that the whole thread is read again."""

        async def plan() -> Planned:
            mark = await self._mark(thread_id)
            return Planned([self._put(mark.set_back(), thread_id)] if mark.count else [])

        await written_in_turn(self.scope.adapter, self.scope.namespace, plan)

    async def _mark(self, thread_id: str) -> Watermark:
        return await watermark(
            self.scope.adapter, self.scope.namespace, thread_id, self.extractor.name
        )

    def _put(self, mark: Watermark, thread_id: str) -> PutItem:
        return mark.put(self.scope.namespace, thread_id)

    async def _written(
        self, thread_id: str, proposal: Proposal, mark: Watermark, after: Watermark
    ) -> Planned | None:
        """Write a proposal with the watermark; None: another extraction was quicker."""
        adapter, put, tries = self.scope.adapter, self._put(after, thread_id), count()

        async def plan() -> Planned:
            if next(tries):  # another change was written: if it was this watermark's, that is it
                now = await self._mark(thread_id)
                if now.version != mark.version or not now.same_as(mark):
                    return Planned()
            made = await planned(proposal, self.gate, self.scope)
            return made._replace(puts=[*made.puts, put])

        made = await written_in_turn(adapter, self.scope.namespace, plan)
        if not made.puts:
            return None
        if mark.version and mark.version % _KEPT == 0:
            await adapter.call("retain", VersionRetention(last=0), prefix=put.namespace)
        return made


def _batch_of(messages: Sequence[ThreadMessage], mark: Watermark, history: ThreadHistory) -> Batch:
    first = next(i for i, each in enumerate(history.messages) if each.id == messages[0].id)
    before = history.messages[max(0, first - _BEFORE) : first]
    edited = mark.ids & {each.id for each in messages}
    return Batch(history.thread_id, history.checkpoint_id, messages, before, edited)


class RememberTurns(Learner):
    """A node that remembers the messages of a run, at the end of a graph or in MemoryMiddleware.

    Each message becomes a memory, in about a millisecond. If the store fails, that is logged, and
    the next run or a background extraction remembers them. Put it before nodes that remove
    messages. The options are those of `Extraction`.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        *,
        namespace: Sequence[str] = ("memories", "{user_id}"),
        gate: Gate | None = None,
        messages_key: str = "messages",
    ) -> None:
        super().__init__(messages_key)
        self._adapter = None if store is None else StoreAdapter(store)
        self.namespace = Template(namespace)
        self.gate: Gate = instance("gate", gate or Gate(), Gate, "a Gate")

    async def learning(
        self, messages: Messages, state: object, config: RunnableConfig | None
    ) -> ExtractionReport | None:
        """Remember messages; None: that failed, and is logged."""
        thread_id, checkpoint_id = source(config)
        if not thread_id:
            raise InvalidConfig(
                "the run has no thread_id, so its turns cannot be remembered; pass "
                'config={"configurable": {"thread_id": "…"}}'
            )
        adapter, thread_id = self._adapter or adapter_of(None), check_thread_id(thread_id)

        async def reads(mark: Watermark) -> ThreadHistory:
            unread = _from_known(mark, messages)
            history = thread_messages.history_of_state(thread_id, checkpoint_id, unread)
            # since the user's newest message they are of now; the times of earlier ones are unknown
            newest = [*map(role, (each.message for each in reversed(history.messages)))]
            now = newest.index("human") + 1 if "human" in newest else len(newest)
            return history.timed([datetime.now(UTC)] * now)

        try:
            scope = _scope(adapter, self.namespace, config)
            pipeline = Pipeline(TurnExtractor(), self.gate, _RUN, scope, guards=False)
            return await in_thread(pipeline.extracting(thread_id, reads))
        except ConfigurationError:
            raise
        except Exception as exc:
            _LOG.warning("the turns of %r are not remembered yet: %s", thread_id, exc)
            return None


def _from_known(mark: Watermark, messages: Messages) -> Messages:
    """Without what is certainly read: a turn must not cost what the thread is long."""
    if mark.count == len(mark.known) or not all(message.id for message in messages):
        return messages
    known = mark.ids
    first = next((i for i, each in enumerate(messages) if each.id in known), 0)
    return messages[max(0, first - _BEFORE) :]


remember_turns = RememberTurns
