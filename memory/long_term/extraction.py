"""Extract long-term memories from threads, and list the threads that are due for extraction.

The extractor proposes memories based on the messages, and the gate judges the proposals. The
memories and the thread's watermark are written in one transaction. The watermark records how far
the thread has been read. A store that keeps versions updates the watermark by compare-and-set. If
two extractions of a thread run concurrently, the slower extraction fails to write, and then reads
the thread again. The compare-and-set ensures that each message is extracted exactly once.

Nothing records which threads are due. Due threads are found by a query over threads and watermarks;
see docs/decisions/0010-due-threads-are-a-query.md.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import count
from typing import Any, Final, Literal, NamedTuple

import orjson
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.store.base import BaseStore

from perdure.checkpointers.address import Address, check_thread_id
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.head_records import HeadRecord, iter_head_pages
from perdure.checkpointers.thread_reader import build_not_found_error
from perdure.effects import (
    Operation,
    build_async_function,
    build_blocking_function,
    build_effect_that_runs_operation_in_thread,
    run_operation,
)
from perdure.errors import (
    ConfigurationError,
    InvalidConfig,
    InvalidNamespace,
    UnknownThread,
    VersionConflict,
)
from perdure.memory import thread_messages
from perdure.memory.conversation import Messages, get_role
from perdure.memory.loaded_thread import (
    LoadedThread,
    find_run_thread,
    has_erased_message,
    remove_erased_messages,
    start_tracking_erasures_in_thread,
)
from perdure.memory.long_term.extractors import (
    Batch,
    Extractor,
    Proposal,
    Scope,
    TurnExtractor,
    Usage,
)
from perdure.memory.long_term.gate import TOMBSTONE_CHECK, Gate
from perdure.memory.long_term.memory_changes import (
    plan_and_write_with_namespace_lock,
    plan_proposed_changes,
)
from perdure.memory.long_term.records import (
    WATERMARKS,
    ChangePlan,
    StoreAdapter,
    build_namespace_of_notes_about_memories,
    fill_namespace,
    get_adapter,
)
from perdure.memory.namespace_templates import Template
from perdure.memory.nodes import Learner
from perdure.memory.options import check_instance, check_seconds, check_text, check_whole_number
from perdure.memory.run_config import read_thread_and_checkpoint_id_of_run
from perdure.memory.thread_messages import (
    ThreadHistory,
    ThreadMessage,
    Watermark,
    find_read_heads,
    read_watermark,
    read_watermarks,
)
from perdure.stores.base import Namespace, VersionRetention
from perdure.stores.namespaces import check_item_key, check_namespace_and_build_path

# maximum number of preceding messages that are passed to the extractor as context for a batch
_CONTEXT_MESSAGES: Final = 4
_LOG = logging.getLogger("perdure")
# maximum number of messages from one run that are processed in one transaction
_RUN_BATCH_SIZE: Final = 200
# Old watermark versions are deleted whenever a watermark's version number reaches a multiple of
# `_MAX_WATERMARK_VERSIONS`.
_MAX_WATERMARK_VERSIONS: Final = 64
_CHANGE_NAMES: Final = ("added", "updated", "superseded", "deleted", "unchanged", "quarantined")
HistoryReader = Callable[[Watermark], Operation[ThreadHistory]]
"""A function that reads the messages of a thread.

Its argument is the thread's watermark. The function need not read the times of messages that the
watermark lists as read.
"""
_DUE_LOG: Final = logging.getLogger("perdure.background")
State = Literal["waiting", "due", "running", "retrying", "dead", "done"]
_ACTIVITY_MARGIN: Final = timedelta(seconds=2)
"""Overlap between two successive queries for active threads.

The overlap is needed because last-activity times are rounded to 0.1 s, and because the clocks of
different machines differ.
"""
# maximum delay, in seconds, between retries of an extraction that keeps failing
_LONGEST_PAUSE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class ExtractionReport:
    """Reports how many messages an extraction read and how many memories it changed.

    Attributes:
        thread_id: The thread.
        messages: The number of messages that were read.
        added: The number of memories that were added. The fields `updated` to `quarantined` are the
            numbers of memories that were changed in other ways.
        refused: The numbers of refused candidates, by the name of the check that refused them. If
            the outcome of a refusal names no check, the refusal is counted under its reason.
        usage: The number of model calls, and their token counts.
        batches: The number of transactions that were written.
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
        changes = [f"{count} {name}" for name, count in self.changes.items() if count]
        parts = [f"{self.thread_id}: {self.messages} messages read", *changes]
        if self.refused:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.items())
            parts.append(f"{sum(self.refused.values())} refused ({reasons})")
        if self.usage.calls:
            tokens = f"{self.usage.input_tokens} + {self.usage.output_tokens} tokens"
            calls = "once" if self.usage.calls == 1 else f"{self.usage.calls} times"
            parts.append(f"model asked {calls}, {tokens}")
        return " ".join(", ".join(parts).split())

    @property
    def changes(self) -> Mapping[str, int]:
        """The number of memories changed, by kind of change, such as `"added"` or `"deleted"`."""
        return {name: getattr(self, name) for name in _CHANGE_NAMES}

    @property
    def forgotten(self) -> int:
        """The number of candidates refused because their text had been deleted or forgotten."""
        return self.refused.get(TOMBSTONE_CHECK, 0)

    def add_batch(self, message_count: int, plan: ChangePlan, usage: Usage) -> ExtractionReport:
        """Return a copy of the report with the counts of a further batch of messages added.

        Args:
            message_count: The number of messages of the batch.
            plan: The changes that were written.
            usage: The model calls for the batch.
        """
        counts = Counter[str](outcome.change for outcome in plan.outcomes)
        refused = [
            outcome.check or outcome.reason
            for outcome in plan.outcomes
            if outcome.change == "refused"
        ]
        added: dict[str, Any] = {name: n + counts[name] for name, n in self.changes.items()}
        added |= {"messages": self.messages + message_count, "batches": self.batches + 1}
        return replace(
            self,
            refused=dict(Counter(self.refused) + Counter(refused)),
            usage=self.usage + usage,
            **added,
        )


class Extraction:
    """Extracts long-term memories from the messages of threads.

    Args:
        saver: The checkpointer of the threads. With a checkpointer of perdure, messages that were
            removed from the state are extracted, too.
        store: The store of the memories. None means, within a graph, the graph's store.
        extractor: Proposes memories. None means `TurnExtractor()`, which needs no model.
        namespace: Labels of the namespace of the memories; see `Template`.
        gate: The gate, or None for `Gate()`.
        messages_key: The channel of the messages.
        batch: The maximum number of messages that the extractor receives at once.
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
        self.saver = check_instance(
            "saver",
            saver,
            BaseCheckpointSaver,
            "a BaseCheckpointSaver, like SQLiteCheckpointer.open(path)",
        )
        self.namespace = Template(namespace)
        self._adapter = None if store is None else StoreAdapter(store, self.namespace)
        self.extractor: Extractor = check_instance(
            "extractor",
            TurnExtractor() if extractor is None else extractor,
            Extractor,
            "TurnExtractor(…) or ModelExtractor(model, …)",
        )
        self.gate: Gate = check_instance("gate", gate or Gate(), Gate, "a Gate")
        self.messages_key = check_text("messages_key", messages_key, "a channel's name")
        self.batch = check_whole_number("batch", batch, 1)

    async def _extract(
        self, thread_id: str, config: RunnableConfig | None = None, *, anew: bool = False
    ) -> ExtractionReport:
        """Extract memories from the unread messages of a thread.

        If extraction fails with an error such as `ModelFailed`, the next extraction reads the same
        messages again.

        Args:
            thread_id: The thread.
            config: The config of a run, whose values fill in the namespace.
            anew: Whether to read the whole thread again. No memory is added twice, and no deleted
                memory comes back.

        Returns:
            The numbers of messages and changes.
        """
        pipeline = Pipeline(
            self.extractor,
            self.gate,
            self.batch,
            _build_scope(self.get_adapter(), self.namespace, config),
        )
        thread_id = check_thread_id(thread_id)

        async def read_thread(watermark: Watermark) -> ThreadHistory:
            pipeline.loaded = await start_tracking_erasures_in_thread(
                self.saver, thread_id, self.messages_key
            )
            return await thread_messages.read_history(
                self.saver, thread_id, self.messages_key, watermark.recently_read_message_ids
            )

        if anew:
            await pipeline.reset_watermark(thread_id)
        return await build_effect_that_runs_operation_in_thread(
            pipeline.extract_memories_from_unread_messages(thread_id, read_thread)
        )

    extract, aextract = build_blocking_function(_extract), build_async_function(_extract)

    def get_adapter(self) -> StoreAdapter:
        """Return the adapter of the store.

        Raises:
            ConfigurationError: No store was given, and no graph is running.
        """
        return self._adapter or get_adapter(None, self.namespace)


def _build_scope(adapter: StoreAdapter, template: Template, config: RunnableConfig | None) -> Scope:
    """Build the `Scope` of a run, and check that the store accepts the run's namespace.

    Raises:
        InvalidNamespace: A label has a dot, and the store is not perdure's.
    """
    namespace = fill_namespace(template, config)
    if not adapter.versioned and any("." in label for label in namespace):
        raise InvalidNamespace(
            f"{type(adapter.store).__name__} does not allow dots in the labels of a namespace, but "
            f"the template {template.labels!r} produces {namespace!r}; pass values without dots, "
            "or use perdure.stores.SQLiteStore"
        )
    return Scope(adapter, namespace, config)


@dataclass(slots=True)
class Pipeline:
    """Extracts memories from a thread's unprocessed messages, and writes the memories to a store.

    A message counts as unprocessed if it is new, or if it was edited after the extractor last read
    it.

    The extractor proposes memories, and the gate decides which of the proposed memories are
    admitted. The memories and the watermark are written in one transaction. If a source message is
    erased before the proposed memories are written, the proposal is dropped and the thread is read
    again.

    Attributes:
        extractor: The extractor.
        gate: The gate.
        batch: The maximum number of messages that the extractor receives at once.
        scope: The namespace of the memories, and the run.
        creates_watermark_first: Whether to write an empty watermark before the first extraction of
            a thread. If the watermark is then erased during the extraction, the extraction discards
            the memories that it has not written yet, and reads the thread again.
        loaded: The thread, with the reference point for finding messages that were erased after
            they were read, or None if perdure does not store the thread.
    """

    extractor: Extractor
    gate: Gate
    batch: int
    scope: Scope
    creates_watermark_first: bool = True
    loaded: LoadedThread | None = None

    async def extract_memories_from_unread_messages(
        self, thread_id: str, read_thread: HistoryReader
    ) -> ExtractionReport:
        """Extract memories from the unread messages of a thread.

        Args:
            thread_id: The thread.
            read_thread: Reads the messages of the thread.
        """
        report = ExtractionReport(thread_id)
        # Read the thread again and retry if its watermark has changed or a source message has been
        # erased.
        while True:
            watermark = await self._read_watermark(thread_id)
            history = await read_thread(watermark)
            unread = watermark.find_unread(history)
            if not unread and (
                watermark.checkpoint_id != history.checkpoint_id or watermark.attempts
            ):
                # Advance the watermark, so that the thread is no longer due for extraction.
                advanced = watermark.advance((), history.checkpoint_id)
                with suppress(VersionConflict):
                    await self.scope.adapter.write(
                        [advanced.build_put(self.scope.namespace, thread_id)]
                    )
            if unread and watermark.version == 0 and self.creates_watermark_first:
                with suppress(VersionConflict):
                    await self.scope.adapter.write(
                        [watermark.build_put(self.scope.namespace, thread_id)]
                    )
                # Storing the thread's first watermark has changed the watermark's version number,
                # so read the watermark and the thread again. With the current version number, the
                # extraction can notice whether the watermark is erased while memories are being
                # extracted. In this case, the extraction discards the memories that it has not
                # written yet.
                continue
            while unread:
                size = max(
                    1,
                    self.extractor.count_leading_messages_that_fit_in_one_call(
                        unread[: self.batch]
                    ),
                )
                batch, unread = _build_batch(unread[:size], watermark, history), unread[size:]
                proposal = await self.extractor.propose_changes(batch, self.scope)
                # The thread stays due for extraction until its last batch has been written.
                checkpoint_id = watermark.checkpoint_id if unread else history.checkpoint_id
                advanced = watermark.advance(batch.messages, checkpoint_id)
                plan = await self._write_proposal(batch, proposal, watermark, advanced)
                if plan is None:
                    break
                report = report.add_batch(len(batch.messages), plan, proposal.usage)
                if unread:
                    watermark = await self._read_watermark(thread_id)
                    if not watermark.has_same_progress(advanced):
                        break
            else:
                return report

    async def reset_watermark(self, thread_id: str) -> None:
        """Reset the watermark of a thread, so that the next extraction reads the whole thread."""

        async def plan() -> ChangePlan:
            watermark = await self._read_watermark(thread_id)
            return ChangePlan(
                [watermark.reset_to_unread().build_put(self.scope.namespace, thread_id)]
                if watermark.count
                else []
            )

        await plan_and_write_with_namespace_lock(self.scope.adapter, self.scope.namespace, plan)

    async def _read_watermark(self, thread_id: str) -> Watermark:
        return await read_watermark(
            self.scope.adapter, self.scope.namespace, thread_id, self.extractor.name
        )

    async def _write_proposal(
        self, batch: Batch, proposal: Proposal, watermark: Watermark, new_watermark: Watermark
    ) -> ChangePlan | None:
        """Write the proposed changes and the thread's new watermark in one transaction.

        Returns:
            The changes that were written, or None if another extraction wrote first or a source
            message was erased while the proposal was made.
        """
        thread_id, source_messages = batch.thread_id, [*batch.before, *batch.messages]
        adapter, put, tries = (
            self.scope.adapter,
            new_watermark.build_put(self.scope.namespace, thread_id),
            count(),
        )

        async def plan() -> ChangePlan:
            """Build a write plan with the proposed changes and the watermark update."""
            # After a conflict with a concurrent write, `plan` is called again. Return an empty plan
            # if another extraction has changed the watermark.
            if next(tries):
                current = await self._read_watermark(thread_id)
                if current.version != watermark.version or not current.has_same_progress(watermark):
                    return ChangePlan()
            change_plan = await plan_proposed_changes(
                proposal, self.gate, self.scope._replace(thread=self.loaded)
            )
            if await has_erased_message(
                self.loaded, [message.message for message in source_messages]
            ):
                return ChangePlan()
            return change_plan._replace(puts=[*change_plan.puts, put])

        change_plan = await plan_and_write_with_namespace_lock(adapter, self.scope.namespace, plan)
        if not change_plan.puts:
            return None
        if watermark.version and watermark.version % _MAX_WATERMARK_VERSIONS == 0:
            await adapter.call("retain", VersionRetention(last=0), prefix=put.namespace)
        return change_plan


def _build_batch(
    messages: Sequence[ThreadMessage], watermark: Watermark, history: ThreadHistory
) -> Batch:
    """Build a batch of messages for an extractor, including earlier messages as context."""
    first = next(i for i, message in enumerate(history.messages) if message.id == messages[0].id)
    context = history.messages[max(0, first - _CONTEXT_MESSAGES) : first]
    edited = watermark.recently_read_message_ids & {message.id for message in messages}
    return Batch(history.thread_id, history.checkpoint_id, messages, context, edited)


class RememberTurns(Learner):
    """A node that stores each new user or assistant message of a run as a memory.

    Use `RememberTurns` as the last node of a graph, or as a part of `MemoryMiddleware`.

    Storing a message as a memory takes about a millisecond. If the store fails, a warning is
    logged, and the memories are stored later, by the next run or by a background extraction. In a
    graph, place `remember_turns` before nodes that remove messages.

    Args:
        store: The store of the memories. None means, within a graph, the graph's store.
        namespace: Labels of the namespace of the memories; see `Template`.
        gate: The gate, or None for `Gate()`.
        messages_key: The channel of the messages.
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
        self.namespace = Template(namespace)
        self._adapter = None if store is None else StoreAdapter(store, self.namespace)
        self.gate: Gate = check_instance("gate", gate or Gate(), Gate, "a Gate")

    async def learn_from_messages(
        self, messages: Messages, state: object, config: RunnableConfig | None
    ) -> ExtractionReport | None:
        """Store messages as memories.

        Returns:
            The report, or None if the store failed or memory is disabled for the run. A failure is
            logged.

        Raises:
            InvalidConfig: The run has no thread_id.
        """
        thread_id, checkpoint_id = read_thread_and_checkpoint_id_of_run(config)
        if not thread_id:
            raise InvalidConfig(
                "the run has no thread_id, so its messages cannot be stored as memories; pass "
                'config={"configurable": {"thread_id": "…"}}'
            )
        if self.namespace.is_memory_disabled_for_run(config):
            return None
        adapter = self._adapter or get_adapter(None, self.namespace)
        thread_id = check_thread_id(thread_id)
        loaded, read_count = find_run_thread(config, self.messages_key), count()
        messages = thread_messages.mark_messages_not_written_by_person_of_run(messages)

        async def read_thread(watermark: Watermark) -> ThreadHistory:
            """Return the messages that may be unread.

            Messages added during the current run are timestamped with the current time.
            """
            unread = _skip_read_messages(watermark, messages)
            # On a repeated call of `read_thread`, omit messages that were erased after the run
            # loaded the thread.
            if next(read_count):
                unread = await remove_erased_messages(loaded, unread)
            history = thread_messages.build_history_from_state(thread_id, checkpoint_id, unread)
            # The latest human message and all messages after it were added during the current run,
            # so they are timestamped with the current time. The times of messages from earlier runs
            # are unknown.
            newest_first = enumerate(reversed(history.messages), 1)
            current_count = next(
                (count for count, part in newest_first if get_role(part.message) == "human"),
                len(history.messages),
            )
            return history.with_times([datetime.now(UTC)] * current_count)

        try:
            pipeline = Pipeline(
                TurnExtractor(),
                self.gate,
                _RUN_BATCH_SIZE,
                _build_scope(adapter, self.namespace, config),
                creates_watermark_first=False,
                loaded=loaded,
            )
            return await build_effect_that_runs_operation_in_thread(
                pipeline.extract_memories_from_unread_messages(thread_id, read_thread)
            )
        except ConfigurationError:
            raise
        except Exception as exc:
            _LOG.warning(
                "the messages of thread %r are not stored as memories yet: %s", thread_id, exc
            )
            return None


def _skip_read_messages(watermark: Watermark, messages: Messages) -> Messages:
    """Skip old messages that an earlier extraction has definitely read.

    Because old messages are skipped, the cost of a turn does not grow with the length of the
    thread.
    """
    # If the watermark lists every message that was ever read, any unlisted message is unread, even
    # one that precedes the listed messages. Return all messages in this case; see
    # `Watermark.find_unread`. Also return all messages if one of them has no id, because the
    # watermark identifies messages by id.
    if watermark.count == len(watermark.known) or not all(message.id for message in messages):
        return messages
    read_ids = watermark.recently_read_message_ids
    first_read = next((i for i, message in enumerate(messages) if message.id in read_ids), 0)
    return messages[max(0, first_read - _CONTEXT_MESSAGES) :]


remember_turns = RememberTurns


@dataclass(frozen=True, slots=True)
class Pace:
    """Settings that control when memories are extracted and how failed extractions are retried.

    Attributes:
        delay_s: Seconds without activity after which a thread is extracted. None means that threads
            are only extracted on a schedule or on request.
        max_wait_s: Seconds after which a thread is extracted even if its conversation goes on.
        retries: How often a failed extraction is retried.
        backoff_s: The pause after the first failure, in seconds. Each further failure doubles the
            pause, up to one hour.
        limit_s: The timeout of an extraction, in seconds.
    """

    delay_s: float | None = 30.0
    max_wait_s: float = 600.0
    retries: int = 5
    backoff_s: float = 2.0
    limit_s: float = 600.0

    def __post_init__(self) -> None:
        if self.delay_s is not None:
            check_seconds("delay_s", self.delay_s)
        check_seconds("max_wait_s", self.max_wait_s)
        check_whole_number("retries", self.retries, 0)
        check_seconds("backoff_s", self.backoff_s)
        check_seconds("limit_s", self.limit_s, above_zero=True)


@dataclass(frozen=True, slots=True)
class ExtractionJob:
    """The extraction of one thread.

    Attributes:
        thread_id: The thread.
        namespace: The namespace of the thread's memories.
        state: The state. A `"dead"` job is not repeated until the thread has a new head.
        attempts: The number of consecutive failed extractions while the thread had its present
            head.
        error: The error of the last failed extraction.
        at: When the job is due, or when it was done. None if the job is dead, or if it only runs on
            a schedule or on request.
        configurable: Values of the run's config that fill in the namespace.
        report: The `ExtractionReport` as a dict, if the job is done.
    """

    thread_id: str
    namespace: Namespace
    state: State
    attempts: int = 0
    error: str = ""
    at: datetime | None = None
    configurable: Mapping[str, str] = field(default_factory=dict, repr=False)
    report: Mapping[str, Any] | None = None

    @property
    def key(self) -> str:
        """A hash of the thread and the namespace."""
        return sha256(orjson.dumps([*self.namespace, self.thread_id])).hexdigest()[:24]

    @property
    def config(self) -> RunnableConfig:
        """The config of a run on the thread."""
        return {"configurable": {**self.configurable, "thread_id": self.thread_id}}

    def __str__(self) -> str:
        names = ("added", "updated", "superseded", "deleted", "quarantined")
        report = self.report or {}
        counts = [f"{count} {name}" for name in names if (count := report.get(name))]
        if forgotten := report.get("refused", {}).get(TOMBSTONE_CHECK):
            counts.append(f"{forgotten} forgotten before")
        attempt = f"attempt {self.attempts}" if self.attempts else ""
        head = f"{self.thread_id} in {'/'.join(self.namespace)}: {self.state}"
        return " ".join(", ".join(filter(None, [head, *counts, attempt, self.error])).split())


class UnreadHead(NamedTuple):
    """The head of a thread that may have messages that no extraction has read yet.

    Attributes:
        thread_id: The id of the thread.
        checkpoint_id: The id of the head.
        updated_at: The time (UTC) at which the thread was last written to.
    """

    thread_id: str
    checkpoint_id: str
    updated_at: datetime


class DueThreads:
    """Lists the threads that may have messages that no extraction has read yet.

    A thread may have unread messages if its current head differs from the head recorded in its
    watermark. The list of threads is cached. Each call of `list_jobs` queries the checkpointer only
    for the threads that were active since the previous call of `list_jobs`.

    Args:
        extraction: The extraction, with a checkpointer of perdure's.
        pace: When threads are extracted.
    """

    def __init__(self, extraction: Extraction, pace: Pace) -> None:
        self._saver: Checkpointer = check_instance(
            "the extraction's checkpointer",
            extraction.saver,
            Checkpointer,
            "a checkpointer of perdure, like SQLiteCheckpointer.open(path)",
        )
        self._extraction, self._pace = extraction, pace
        # Maps the id of each thread that may have unread messages to a tuple. Its elements are the
        # thread's head, the time at which the thread was first seen with unread messages, the
        # memory namespace, and the values of the placeholders in the namespace template.
        self._unread: dict[str, tuple[UnreadHead, datetime, Namespace, dict[str, str]]] = {}
        # maps the id of each thread whose user is unknown to the time of the last write to the
        # thread
        self._unassigned: dict[str, datetime] = {}
        # Cached results of `_is_fully_read`, by thread id. Each value is a tuple (state, result).
        # The state identifies the head and the watermark that were checked.
        self._read_states: dict[str, tuple[Any, bool]] = {}
        # `list_jobs` queries only threads that were active after `_since`, or all threads if
        # `_since` is None.
        self._since: datetime | None = None
        # A worker and the application can call `list_jobs` concurrently.
        self._lock = threading.RLock()

    def list_jobs(
        self, *, exclude_deleted: bool = True, exclude_read: bool = False
    ) -> list[ExtractionJob]:
        """Return an extraction job for each thread that may have unread messages.

        The state of a returned job is never `"running"` or `"done"`.

        Args:
            exclude_deleted: Whether to leave out threads that were deleted since the previous call.
                To find deleted threads, each thread is queried.
            exclude_read: Whether to leave out threads whose messages were all read during a run, as
                `remember_turns` does. To find out whether all messages were read, the newest
                messages of each thread are read, once for each head. A worker does not set
                `exclude_read`, because the worker finds nothing to extract in a thread without
                unread messages.
        """
        with self._lock:
            self._update_cached_unread_threads()
            for thread_id in [*self._unread] if exclude_deleted else ():
                try:
                    self._saver.checkpoints(thread_id, checkpoint_ns="", limit=1)
                except UnknownThread:
                    self.remove_thread_from_cache(thread_id)
            adapter, name = self._extraction.get_adapter(), self._extraction.extractor.name
            unread = [*self._unread.items()]
            watermark_keys = [(namespace, thread_id) for thread_id, (_, _, namespace, _) in unread]
            watermarks, jobs = run_operation(read_watermarks(adapter, watermark_keys, name)), []
            for (thread_id, unread_thread), watermark in zip(unread, watermarks, strict=True):
                head, first_seen, namespace, labels = unread_thread
                if watermark.checkpoint_id == head.checkpoint_id:
                    self.remove_thread_from_cache(thread_id)
                    continue
                state, due_at = compute_job_state_and_due_time(
                    self._pace, head, watermark, first_seen, datetime.now(UTC)
                )
                if (
                    exclude_read
                    and state in ("waiting", "due")
                    and self._is_fully_read(head, watermark)
                ):
                    continue
                failure = (
                    (watermark.attempts, watermark.error)
                    if watermark.failed_head == head.checkpoint_id
                    else (0, "")
                )
                jobs.append(ExtractionJob(thread_id, namespace, state, *failure, due_at, labels))
            return jobs

    def _is_fully_read(self, head: UnreadHead, watermark: Watermark) -> bool:
        """Return whether an extraction has read all messages of a thread.

        A thread's head can be newer than the head recorded in the watermark although all messages
        have been read, because not every checkpoint adds messages.
        """
        state = head.checkpoint_id, watermark.count, watermark.known
        cached = self._read_states.get(head.thread_id)
        if cached is None or cached[0] != state:
            is_read = run_operation(
                thread_messages.is_thread_read_in_full(
                    self._saver,
                    head.thread_id,
                    head.checkpoint_id,
                    self._extraction.messages_key,
                    watermark,
                )
            )
            cached = self._read_states[head.thread_id] = state, is_read
        return cached[1]

    def build_job(self, thread_id: str, config: RunnableConfig | None) -> ExtractionJob:
        """Build the job of one thread.

        Args:
            thread_id: The thread.
            config: The config whose values fill in the namespace, or None for the values of the
                thread's head.

        Raises:
            UnknownThread: `config` is None, and the thread has no head.
        """
        values = dict((config or {}).get("configurable", {}))
        if config is None:
            head = self._saver.head(thread_id)
            if head is None or head.checkpoint_id is None:
                raise build_not_found_error(Address(thread_id, "", None))
            values = dict(head.metadata)
        labels = read_label_values(values, self._extraction.namespace.placeholder_names)
        return ExtractionJob(
            thread_id,
            fill_namespace(self._extraction.namespace, {"configurable": labels}),
            "due",
            configurable=labels,
        )

    def list_threads_without_user(self, quiet_s: float = 0.0) -> list[str]:
        """Return the ids of the threads that `list_jobs` omits because their users are unknown.

        `list_jobs` omits a thread if the thread's head lacks a value that the namespace template
        requires, such as `user_id`. A thread that has been deleted since the last `list_jobs` call
        may still be returned.

        Args:
            quiet_s: A thread is returned only if it has had no activity for `quiet_s` seconds.
        """
        latest = datetime.now(UTC) - timedelta(seconds=quiet_s)
        with self._lock:
            return [
                thread_id
                for thread_id, updated_at in self._unassigned.items()
                if updated_at <= latest
            ]

    def remove_thread_from_cache(self, thread_id: str) -> None:
        """Remove a deleted thread from the cache."""
        with self._lock:
            self._unread.pop(thread_id, None)
            self._read_states.pop(thread_id, None)
            self._unassigned.pop(thread_id, None)

    def _update_cached_unread_threads(self) -> None:
        """Update the cache with the threads that were active since the previous call.

        Only threads whose watermark does not record the head as read are added to the cache.
        """
        started_at = datetime.now(UTC)
        adapter, name = self._extraction.get_adapter(), self._extraction.extractor.name
        namespaces = dict[tuple[str, ...], Namespace | None]()
        for page in iter_head_pages(
            self._saver.database,
            self._saver.parts.reader,
            self._since,
            self._extraction.namespace.placeholder_names,
        ):
            candidates = list[tuple[HeadRecord, datetime, Namespace, dict[str, str]]]()
            for head in page:
                previous = self._unread.pop(head.thread_id, None)
                first_seen = previous[1] if previous else min(started_at, head.updated_at)
                self._unassigned.pop(head.thread_id, None)
                if head.checkpoint_id is not None and (
                    namespace_and_labels := self._find_memory_namespace_and_label_values(
                        head, namespaces
                    )
                ):
                    candidates.append((head, first_seen, *namespace_and_labels))
            heads = [
                (namespace, head.thread_id, head.checkpoint_id or "")
                for head, _, namespace, _ in candidates
            ]
            are_read = run_operation(find_read_heads(adapter, heads, name))
            for (head, first_seen, namespace, labels), (*_, checkpoint_id), is_read in zip(
                candidates, heads, are_read, strict=True
            ):
                if is_read:
                    self._read_states.pop(head.thread_id, None)
                else:
                    unread_head = UnreadHead(head.thread_id, checkpoint_id, head.updated_at)
                    self._unread[head.thread_id] = unread_head, first_seen, namespace, labels
        self._since = started_at - _ACTIVITY_MARGIN

    def _find_memory_namespace_and_label_values(
        self, head: HeadRecord, namespaces: dict[tuple[str, ...], Namespace | None]
    ) -> tuple[Namespace, dict[str, str]] | None:
        """Find the namespace of a thread's memories.

        If a value for the namespace template is missing, the thread is added to `_unassigned`.

        Args:
            head: The head of the thread.
            namespaces: The namespaces that were already built, by the values that fill them in.
                None marks values for which no namespace can be built. The method adds each
                namespace that it builds to this dict.

        Returns:
            The namespace and the values that fill it in, or None if a value is missing or not
            allowed in a namespace.
        """
        names = self._extraction.namespace.placeholder_names
        labels = read_label_values(head.metadata, names)
        if len(labels) < len(names):
            self._unassigned[head.thread_id] = head.updated_at
            return None
        values = tuple(labels.values())
        # An invalid value in one thread must not prevent the extraction of memories from other
        # threads.
        try:
            if values not in namespaces:
                namespaces[values] = self._build_memory_namespace(labels)
            check_item_key(head.thread_id)
        except InvalidNamespace as exc:
            _DUE_LOG.warning("thread %.80r cannot be extracted: %s", head.thread_id, exc)
            return None
        namespace = namespaces[values]
        return None if namespace is None else (namespace, labels)

    def _build_memory_namespace(self, labels: dict[str, str]) -> Namespace | None:
        """Build the namespace of memories from the values that fill it in.

        Return None if the values do not fill in the template.

        Raises:
            InvalidNamespace: A value is not allowed in a namespace.
        """
        try:
            namespace = fill_namespace(self._extraction.namespace, {"configurable": labels})
            check_namespace_and_build_path(
                build_namespace_of_notes_about_memories(WATERMARKS, namespace)
            )
        except ConfigurationError:
            return None
        return namespace


def read_label_values(metadata: Mapping[str, Any], label_names: Iterable[str]) -> dict[str, str]:
    """Return the values from a thread's metadata for the placeholders in a namespace template.

    LangGraph copies a run's `configurable` values to the thread's metadata, and perdure's nodes
    also copy the values of the run's `context`. Integers are converted to strings, because some
    applications use integers as user ids.

    Args:
        metadata: The metadata of the thread's head.
        label_names: The names in the namespace's template.
    """
    values = {name: metadata.get(name) for name in label_names}
    return {
        name: value if isinstance(value, str) else str(value)
        for name, value in values.items()
        if type(value) is int or isinstance(value, str)
    }


def compute_job_state_and_due_time(
    pace: Pace, head: UnreadHead, watermark: Watermark, first_seen_at: datetime, now: datetime
) -> tuple[State, datetime | None]:
    """Return the state of a thread's extraction job, and the time at which the job is due.

    The thread has messages from which no memories have been extracted yet.

    Args:
        pace: When threads are extracted.
        head: The head of the thread.
        watermark: The watermark of the thread.
        first_seen_at: When the thread was first seen with unread messages.
        now: The current time.
    """
    if watermark.failed_at is not None and watermark.failed_head == head.checkpoint_id:
        if watermark.final or watermark.attempts > pace.retries:
            return "dead", None
        pause = min(pace.backoff_s * 2.0 ** min(watermark.attempts - 1, 60), _LONGEST_PAUSE_S)
        due_at = watermark.failed_at + timedelta(seconds=pause)
        return ("due" if due_at <= now else "retrying"), due_at
    if pace.delay_s is None:
        return "waiting", None
    quiet_at = head.updated_at + timedelta(seconds=pace.delay_s)
    due_at = min(quiet_at, first_seen_at + timedelta(seconds=pace.max_wait_s))
    return ("due" if due_at <= now else "waiting"), due_at
