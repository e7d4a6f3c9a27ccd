"""The work of forming: batches of what is new on a thread, each written as one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from perdure.errors import VersionConflict
from perdure.memory.effects import Effects
from perdure.memory.extraction_report import ExtractionReport
from perdure.memory.forming.planning import planned
from perdure.memory.forming.waiting import Waiting, place_of, waiting_of
from perdure.memory.gate import Gate
from perdure.memory.proposals import Batch, Proposal, Proposer, Scope
from perdure.memory.store_adapter import removal_of
from perdure.memory.thread_messages import ThreadHistory, ThreadMessage
from perdure.memory.watermarks import Watermark, watermark
from perdure.stores.base import Namespace, PutItem

_BEFORE: Final = 4  # messages that a batch is shown of what came before it
CONFLICTS: Final = 50
"""Times that others may change the same memories while a batch is planned."""


@dataclass(slots=True)
class Work:
    """Forming of what is new on a thread, as it was read.

    Attributes:
        former: Proposes what to keep.
        gate: Decides.
        most: How many messages make a batch, at most.
        around: Where.
        said: What was said.
        mark: The thread's watermark.
        note: That it waits; None: it does not, or has begun to anew.
        report: What came of it, and of what was formed before.
    """

    former: Proposer
    gate: Gate
    most: int
    around: Scope
    said: ThreadHistory
    mark: Watermark
    note: Waiting | None
    report: ExtractionReport

    def through(self, new: Sequence[ThreadMessage]) -> Effects[bool]:
        """Form memories of messages. Returns whether another was quicker, so they are read anew."""
        if not new:
            yield from self._put_down()
        while new:
            size = self.former.taking(new[: self.most])
            batch, new = self._batch(new[: max(1, size)]), new[max(1, size) :]
            proposal = yield from self.former.proposing(batch, self.around)
            if not (yield from self._kept(batch, proposal, last=not new)):
                return True
        return False

    def _batch(self, messages: Sequence[ThreadMessage]) -> Batch:
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

    def _kept(self, batch: Batch, proposal: Proposal, last: bool) -> Effects[bool]:
        """Write what is proposed. Returns False if another has formed of these messages.

        Raises:
            LimitExceeded: There is no room; nothing is written.
        """
        tries = CONFLICTS
        while True:
            if not self.around.adapter.versioned:  # nothing else would tell
                if (yield from self._is_overtaken()):
                    return False
                yield from self._look_at_note()
            plan = yield from planned(proposal, self.gate, self.around)
            report = self.report.counting(len(batch.messages), plan.outcomes, proposal.usage)
            mark = self.mark.advanced(batch.messages, batch.checkpoint_id, plan.outcomes)
            mark = replace(mark, report=report.noted())
            puts = [*plan.puts, mark.put(self.around.namespace, batch.thread_id)]
            try:
                yield from self.around.adapter.written([*puts, *(self._removal() if last else [])])
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

    def _is_first(self, written: Watermark) -> Effects[bool]:
        """Whether nobody has written since; then it is gone on from there."""
        self.mark = yield from watermark(self.around.adapter, *self._place)
        return self.mark.same_as(written)

    def _is_overtaken(self) -> Effects[bool]:
        now = yield from watermark(self.around.adapter, *self._place)
        return now.version != self.mark.version or not now.same_as(self.mark)

    def _look_at_note(self) -> Effects[None]:
        """Leave the note that the thread waits if it was touched: there is more to be formed."""
        now = yield from waiting_of(self.around.adapter, *self._place)
        if now is None or self.note is None or now.stamp != self.note.stamp:
            self.note = None

    def _removal(self) -> list[PutItem]:
        if self.note is None:
            return []
        place = place_of(self.around.namespace)
        return [removal_of(place, self.said.thread_id, self.note.version)]

    def _put_down(self) -> Effects[None]:
        """Remove the note that the thread waits, for there is nothing to wait for."""
        if not self.around.adapter.versioned:
            yield from self._look_at_note()
        with suppress(VersionConflict):
            yield from self.around.adapter.written(self._removal())

    @property
    def _place(self) -> tuple[Namespace, str]:
        return self.around.namespace, self.said.thread_id
