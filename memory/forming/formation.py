"""Formation: memories made of what was said on a thread, exactly once in effect.

Each batch is one transaction: the memories, and the thread's watermark, which is swapped by its
version. Whatever is cut off before it never happened, whatever comes after finds it done; of two
that form one thread at the same time the slower one is refused, reads again, and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, runtime_checkable

from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.store.base import BaseStore

from perdure.checkpointers.base import check_thread_id
from perdure.errors import ConfigurationError, VersionConflict
from perdure.memory.checking import whole
from perdure.memory.drivers import Steps, arun, run
from perdure.memory.forming import reading
from perdure.memory.forming.planning import planned
from perdure.memory.forming.proposals import Batch, Proposal, Proposer, Surroundings
from perdure.memory.forming.reports import FormationReport
from perdure.memory.forming.said import Said, Spoken
from perdure.memory.forming.turns import TurnFormer
from perdure.memory.forming.waiting import Waiting, noting, waiting_of, waiting_under
from perdure.memory.forming.waiting import place_of as waiting_place
from perdure.memory.forming.watermarks import Watermark, watermark
from perdure.memory.gate.gate import Gate
from perdure.memory.longterm.backing import (
    RESERVED,
    Backing,
    backing_of,
    namespace_of,
    removal_of,
)
from perdure.memory.templates import Template
from perdure.stores.base import Namespace, PutItem, VersionRetention

_BEFORE: Final = 4  # messages that a batch is shown of what came before it
_CONFLICTS: Final = 50  # times that others may change the same memories while a batch is planned


@runtime_checkable
class Retains(Protocol):
    """A store that can drop old versions, as a whole one of perdure's can."""

    def retain(self, rule: VersionRetention, *, prefix: Namespace = ()) -> int:
        """Drop closed versions that a rule does not keep."""


class Formation:
    """Forms long-term memories of threads.

    Methods that begin with `a` are the async forms. `config` is that of a run; what fills in the
    namespace is taken from it.

    Args:
        saver: The checkpointer that has the threads. perdure's remember what was trimmed as well.
        store: Where memories are kept; on perdure's, each batch is one transaction. None: within a
            graph, the store it was compiled with.
        former: Proposes what to keep; None: `TurnFormer()`, which needs no model.
        namespace: Labels; see `Template`.
        gate: What decides on what is kept; None: `Gate()`.
        messages_key: The channel of the messages.
        batch: How many messages are formed from at once, at most.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        saver: BaseCheckpointSaver[Any],
        store: BaseStore | None = None,
        former: Proposer | None = None,
        *,
        namespace: Sequence[str] = ("memories", "{user_id}"),
        gate: Gate | None = None,
        messages_key: str = "messages",
        batch: int = 50,
    ) -> None:
        if former is not None and not isinstance(former, Proposer):
            raise ConfigurationError(
                f"former is {former!r:.80}; expected TurnFormer(…) or ModelFormer(model, …)"
            )
        if gate is not None and not isinstance(gate, Gate):
            raise ConfigurationError(f"gate is {gate!r:.80}; expected a Gate")
        if not isinstance(messages_key, str) or not messages_key:
            raise ConfigurationError(f"messages_key is {messages_key!r}; expected a channel's name")
        self.saver, self.store = reading.check_saver(saver), store
        self._backing = None if store is None else Backing(store)
        self.former: Proposer = TurnFormer() if former is None else former
        self.namespace, self.gate = Template(namespace), gate or Gate()
        self.messages_key, self.batch = messages_key, whole("batch", batch, 1)

    # -- forming

    def form(self, thread_id: str, config: RunnableConfig | None = None) -> FormationReport:
        """Form memories of what was said on a thread since that was done last.

        Raises:
            UnknownThread: There is no such thread.
            InvalidConfig: The config does not fill in the namespace.
            ModelFailed: The model gave no usable answer; what was not formed will be the next time.
            VersionConflict: Others changed the same memories, again and again.
            StorageError: The store refuses.
        """
        return run(self.forming(thread_id, config))

    async def aform(self, thread_id: str, config: RunnableConfig | None = None) -> FormationReport:
        """See `form`."""
        return await arun(self.forming(thread_id, config))

    # -- threads that wait

    def note(self, thread_id: str, config: RunnableConfig | None = None) -> Waiting:
        """Note durably that a thread waits for memories to be formed of it; forming it ends that.

        Raises:
            InvalidConfig: The config does not fill in the namespace.
            StorageError: The store refuses.
        """
        return run(self.noting(thread_id, config))

    async def anote(self, thread_id: str, config: RunnableConfig | None = None) -> Waiting:
        """See `note`."""
        return await arun(self.noting(thread_id, config))

    def pending(self, prefix: Namespace = ()) -> list[Waiting]:
        """The threads that wait whose memories belong under a prefix, the longest wait first."""
        return run(waiting_under(self.backing(), tuple(prefix)))

    async def apending(self, prefix: Namespace = ()) -> list[Waiting]:
        """See `pending`."""
        return await arun(waiting_under(self.backing(), tuple(prefix)))

    def tidy(self) -> int:
        """Drop what perdure's own notes said before, which nobody asks for; returns how much.

        A store that keeps no versions, or is a part of one, is left as it is.
        """
        store = self.backing().store
        if not isinstance(store, Retains):
            return 0
        return store.retain(VersionRetention(last=0), prefix=(RESERVED,))

    # -- steps, which other parts take too

    def backing(self) -> Backing:
        """The store.

        Raises:
            ConfigurationError: There is none.
        """
        return self._backing or backing_of(None)

    def noting(self, thread_id: str, config: RunnableConfig | None) -> Steps[Waiting]:
        """See `note`."""
        namespace = namespace_of(self.namespace, config)
        configurable = ensure_config(config)["configurable"]
        given = {name: str.__str__(configurable[name]) for name in self.namespace.names}
        thread_id = check_thread_id(thread_id)
        return (yield from noting(self.backing(), namespace, thread_id, given))

    def forming(self, thread_id: str, config: RunnableConfig | None) -> Steps[FormationReport]:
        """See `form`."""
        around = Surroundings(self.backing(), namespace_of(self.namespace, config), config)
        thread_id = check_thread_id(thread_id)
        report = FormationReport(thread_id)
        while True:
            # the note is read before the thread: what is said after that touches it again
            note = yield from waiting_of(around.backing, around.namespace, thread_id)
            mark = yield from watermark(around.backing, around.namespace, thread_id)
            said = yield from reading.reading(self.saver, thread_id, self.messages_key, mark.ids)
            new = yield from self.unformed(mark, said, around)
            work = _Work(self, around, said, mark, note, report)
            overtaken = yield from work.through(new)
            report = work.report
            if not overtaken:
                return report

    def unformed(self, mark: Watermark, said: Said, around: Surroundings) -> Steps[list[Spoken]]:
        """The messages of a thread that no memories were formed of yet."""
        new = mark.beyond(said)
        if new is not None:
            return new
        lacking: list[Spoken] = []  # the thread was forked far back: the memories themselves tell
        for spoken in mark.placed(said.messages):
            key = self.former.key(said.thread_id, spoken)
            found = key and (yield from around.backing.got(around.namespace, key))
            lacking += [] if found else [spoken]
        return lacking


@dataclass(slots=True)
class _Work:
    """Forming of what is new on a thread, as it was read."""

    formation: Formation
    around: Surroundings
    said: Said
    mark: Watermark
    note: Waiting | None
    report: FormationReport

    def through(self, new: Sequence[Spoken]) -> Steps[bool]:
        """Form memories of messages. Returns whether another was quicker, so they are read anew."""
        if not new:
            yield from self._put_down()
        while new:
            size = self.formation.former.taking(new[: self.formation.batch])
            batch, new = self._batch(new[: max(1, size)]), new[max(1, size) :]
            proposal = yield from self.formation.former.proposing(batch, self.around)
            if not (yield from self._kept(batch, proposal, last=not new)):
                return True
        return False

    def _batch(self, messages: Sequence[Spoken]) -> Batch:
        said = self.said
        first = next(i for i, each in enumerate(said.messages) if each.id == messages[0].id)
        return Batch(
            said.thread_id,
            said.checkpoint_id,
            messages,
            said.messages[max(0, first - _BEFORE) : first],
            said.shown,
            self.mark.ids & {each.id for each in messages},
        )

    def _kept(self, batch: Batch, proposal: Proposal, last: bool) -> Steps[bool]:
        """Write what is proposed. Returns False if another has formed of these messages."""
        tries = _CONFLICTS
        while True:
            if not self.around.backing.versioned:  # nothing else would tell
                if (yield from self._is_overtaken()):
                    return False
                yield from self._look_at_note()
            plan = yield from planned(proposal, self.formation.gate, self.around)
            report = self.report.counting(len(batch.messages), plan.outcomes, proposal.usage)
            mark = self.mark.advanced(batch.messages, batch.checkpoint_id, plan.outcomes)
            mark = replace(mark, report=report.noted())
            puts = [*plan.puts, mark.put(self.around.namespace, batch.thread_id)]
            try:
                yield from self.around.backing.written([*puts, *(self._removal() if last else [])])
            except VersionConflict:
                if (yield from self._is_overtaken()):
                    return False
                if tries == 0:
                    raise
                tries -= 1
                yield from self._look_at_note()
                continue
            self.report = report
            return (yield from self._is_first(mark))

    def _is_first(self, written: Watermark) -> Steps[bool]:
        """Whether nobody has written since; then it is gone on from there."""
        self.mark = yield from watermark(self.around.backing, *self._place)
        return self.mark.same_as(written)

    def _is_overtaken(self) -> Steps[bool]:
        now = yield from watermark(self.around.backing, *self._place)
        return now.version != self.mark.version or not now.same_as(self.mark)

    def _look_at_note(self) -> Steps[None]:
        """Leave the note that the thread waits if it was touched: there is more to be formed."""
        now = yield from waiting_of(self.around.backing, *self._place)
        if now is None or self.note is None or now.stamp != self.note.stamp:
            self.note = None

    def _removal(self) -> list[PutItem]:
        if self.note is None:
            return []
        place = waiting_place(self.around.namespace)
        return [removal_of(place, self.said.thread_id, self.note.version)]

    def _put_down(self) -> Steps[None]:
        """Remove the note that the thread waits, for there is nothing to wait for."""
        if not self.around.backing.versioned:
            yield from self._look_at_note()
        with suppress(VersionConflict):
            yield from self.around.backing.written(self._removal())

    @property
    def _place(self) -> tuple[Namespace, str]:
        return self.around.namespace, self.said.thread_id
