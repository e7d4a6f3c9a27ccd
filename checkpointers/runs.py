"""Runs as rows of the saver's database: accepted, claimed, ended, cancelled.

What a run was asked (`request`, until it has ended, or could be sent again), what is told of it
(`about`), its error and its events are sealed. What it returned is not stored again: its last
checkpoint has it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, Literal, NamedTuple

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.records import (
    DueCron,
    LiveRun,
    RunRow,
    decrypt_events,
    decrypt_run,
    encrypt_events,
    encrypt_run,
)
from perdure.checkpointers.server_table import ServerTable
from perdure.checkpointers.thread_list import ThreadList, ThreadQuery, joined
from perdure.errors import UnknownThread
from perdure.storage.flow import ALL, Flow, Last, Statement, rows_of

RunState = Literal["delayed", "pending", "running", "success", "error", "interrupted"]
LIVE: Final[tuple[RunState, ...]] = ("delayed", "pending", "running")
KEPT: Final = 100
"""How many runs of a thread are known, besides those that are under way."""
ALL_RUNS: Final = (0, ALL)
"""Of a thread, from a `seq` to one."""
EVENTS_S: Final = 3600
"""How long what a run told is stored after its end."""
BEGUN_BITS: Final = 22
"""Of an event's number: each time that a run begins, in another process, leaves so many free."""
_BATCHES: Final = 100  # of events that are read at once
_BATCHES_BYTES: Final = 1_000_000  # of batches that one read returns; a single batch may be larger
_RUNS: Final = 20  # whose events are removed at once


class EventBatch(NamedTuple):
    """Some events of a run.

    Attributes:
        since, until: The numbers of the event before them, and of the last one.
        events: For whom each of them is, and its bytes.
        dropped: Up to which event earlier ones are to be removed.
    """

    since: int
    until: int
    events: Sequence[tuple[Any, bytes]]
    dropped: int = 0


class RunTable(ServerTable):
    """The runs of a checkpointer's threads."""

    def __init__(self, saver: Checkpointer) -> None:
        super().__init__(saver)
        self._threads = ThreadList(saver)

    async def accept(
        self,
        run: RunRow,
        *,
        rejects: bool,
        cancels: str | None,
        events: bool = False,
        due: DueCron | None = None,
    ) -> tuple[LiveRun | None, list[str]]:
        """Store a run; and the ids of all that are live of its thread then.

        It runs at once if no other run of the thread is live, and waits otherwise. One that is
        delayed (`not_before`) counts for nothing until it is due: see `begin_due`.

        Args:
            run: Its ids, owner, graph, and what it is asked.
            rejects: Whether it is none if it had to wait. It is none either if there is no thread.
            cancels: How those before it are cancelled; None: they are not.
            events: Whether what it tells is stored.
            due: The cron that it is of, which moves to its next time; if another process has moved
                it, there is no run.
        """
        live, at = run.live, run.created_at
        about, _, request = encrypt_run(self._seal, live, run[3:6])
        of = at, about, request, live.thread_id, int(rejects), run.not_before, int(events)
        cancel = self._cancelling(live.thread_id, "", cancels) if cancels else []
        accept = self._sql("accept_run", live.run_id, live.owner, live.graph, *of)
        then = self._sql("live_of", live.thread_id)

        def flow() -> Flow[Any]:
            if due is not None:
                cron, next_at = due
                if not (yield self._sql("advance_cron", next_at, cron.cron_id, cron.next_at)):
                    return [], []
            return (yield Last([*cancel, accept, then]))

        *_, made, ids = await self._database.awrite(flow, exclusive=(live.thread_id,))
        if made:
            thread, seq, status = made[0]
            live = live._replace(thread_key=thread, seq=seq, status=status)
        return live if made else None, [run_id for (run_id,) in ids]

    async def end(
        self,
        run: LiveRun,
        status: RunState | Literal["rolled back"],
        error: Any = None,
        request: Any = None,
        last: EventBatch | None = None,
        *,
        known_cancel: str | None = None,
        webhook: Statement | None = None,
    ) -> list[str] | None:
        """End a run, claim the next of its thread, and return the id of the claimed run.

        Nothing is left of a run that was rolled back.

        None is returned, and nothing is stored, if the run belongs to another process by now, if
        its thread was deleted, or if it was cancelled in a way that the caller does not know.

        Args:
            run: The run to end.
            status: How the run ended.
            error: The error with which the run failed, or None.
            request: The request of the run, if a client may send it again. It is not stored if the
                run was cancelled.
            last: The events of the run that are not stored yet.
            known_cancel: The cancellation that the caller has carried out, or None. After a
                `rollback` the run ends, whichever cancellation its row has.
            webhook: The statement that stores the webhook of the run, from
                `WebhookTable.build_insert`.
        """
        now, of = time.time(), (run.thread_key, run.seq)
        _, *sealed = encrypt_run(self._seal, run, (None, error, request))
        if status == "rolled back":
            end = [self._sql("drop_run", *of, run.owner), *self._left(run)]
        else:
            told = [] if last is None else self._told(run, last, known_cancel)
            row = status, *sealed, now, *of, run.owner, known_cancel or ""
            end = [*told, *([] if webhook is None else [webhook]), self._sql("end_run", *row)]
        after = [
            self._sql("claim_next", now, run.owner, run.thread_key),
            self._sql("drop_old_runs", run.thread_key, run.seq - KEPT),
            self._sql("drop_events", run.thread_key, 0, run.seq - KEPT, ALL),
        ]
        results = await self._write([*end, *after], (run.thread_id,))
        place = 0 if status == "rolled back" else len(end) - 1
        ended, claimed = results[place], results[len(end)]
        return [run_id for (run_id,) in claimed] if ended else None

    async def set_person(self, run: LiveRun, person: str) -> None:
        """Store the person whose memories a run uses, which is known once the run starts.

        What else is told of the run is read again, since messages may be erased meanwhile.
        """

        def flow() -> Flow[None]:
            for row in (yield self._sql("runs_of", run.thread_id, run.run_id)):
                stored = decrypt_run(self._seal, row)
                about, *_ = encrypt_run(
                    self._seal, run, ({**stored.about, "person": person}, None, None)
                )
                yield Last([self._sql("set_about", about, run.thread_key, run.seq, run.owner)])

        await self._database.awrite(flow, exclusive=(run.thread_id,))

    async def begin_due(self, run: LiveRun, owner: str, cancels: str | None) -> None:
        """Have a delayed run whose time has come take its turn, unless another process was first.

        It comes after all that are live of its thread then, or cancels them.
        """
        of = run.thread_id, run.thread_key, run.run_id

        def flow() -> Flow[None]:
            for (status,) in (yield self._sql("status_of", *of[1:])):
                if status == "delayed":
                    cancel = self._cancelling(run.thread_id, "", cancels) if cancels else []
                    yield [*cancel, self._sql("begin_due", owner, time.time(), *of[1:])]

        await self._database.awrite(flow, exclusive=(run.thread_id,))

    async def drop(self, run: LiveRun) -> None:
        """Remove a run of a thread, if it has ended."""
        drop = self._sql("drop_ended", run.thread_id, run.run_id)
        await self._write([drop, *self._left(run)], (run.thread_id,))

    def _left(self, run: LiveRun) -> list[Statement]:
        """What is left to do once the row of a run is gone."""
        return [self._sql(name, run.thread_key, run.seq) for name in ("drop_left", "keep_seq")]

    async def claim(self, owner: str, adopted: Sequence[LiveRun] = ()) -> None:
        """Take over runs, of owners that are gone, and claim all that may begin."""
        taken = [
            self._sql("adopt_run", owner, run.thread_key, run.seq, run.owner) for run in adopted
        ]
        await self._write([*taken, self._sql("claim_runs", time.time(), owner)], None)

    async def hand_over(self, owner: str) -> None:
        """Leave all runs of a process to others."""
        await self._write([self._sql("hand_over", owner)], None)

    async def cancel(self, thread_id: str, run_id: str, action: str) -> list[str]:
        """Have a run of a thread stopped, or with `""` all, and return the ids of these runs.

        One that waits, or is delayed, has ended then; with `rollback` there is none any more. A run
        that has ended is not returned.
        """
        stop = self._cancelling(thread_id, run_id, action, delayed=True)
        results = await self._write(stop, (thread_id,))
        return [stopped for (stopped,) in chain.from_iterable(results)]

    def _cancelling(
        self, thread_id: str, run_id: str, action: str, *, delayed: bool = False
    ) -> list[Statement]:
        of = thread_id, run_id, int(delayed)
        gone = [self._sql(name, *of) for name in ("keep_waiting_seq", "drop_waiting")]
        return [
            *(gone if action == "rollback" else []),
            self._sql("cancel_runs", *of, action, time.time()),
        ]

    # -- what runs tell

    async def add_events(self, batches: Sequence[tuple[LiveRun, EventBatch]]) -> None:
        """Store what runs tell, unless they are another process' now, or were erased."""
        told = chain.from_iterable(self._told(*each) for each in batches)
        await self._write([self._sql("relaxed"), *told], ())

    async def begin_events(self, run: LiveRun, first: int) -> tuple[int, int] | None:
        """Have a run tell more, after the process that it was of is gone.

        Returns:
            The number of the last event that is stored, `first` being before all, and the one after
            which the next begin; None: it is another's.
        """
        begin = self._sql("begin_events", run.thread_key, run.seq, first, BEGUN_BITS, run.owner)
        [begun] = await self._write([begin], (run.thread_id,))
        return begun[0] if begun else None

    async def key_of(self, thread_id: str) -> int:
        """The key of a thread: another one that takes its id, once it is deleted, has another.

        Raises:
            UnknownThread: There is none.
        """
        for thread, *_ in await self._rows("find_thread", thread_id):
            return thread  # type: ignore[no-any-return]
        raise UnknownThread(f"there is no thread {thread_id!r}")

    async def count_removals(self, threads: Sequence[int]) -> dict[int, int]:
        """Return the number of erasures from each of some threads, without those that are gone."""
        return dict(await self._rows("removals_of", json.dumps(threads)))

    async def events(self, thread: int, seqs: tuple[int, int], after: int) -> list[EventBatch]:
        """Some of what follows an event, in order, of the runs of a thread from a `seq` to one."""
        return [
            EventBatch(since, until, decrypt_events(self._seal, thread_id, run_id, since, body))
            for thread_id, run_id, since, until, body in await self._rows(
                "events_after", thread, *seqs, after, _BATCHES, _BATCHES_BYTES
            )
        ]

    async def newest_event(
        self, thread: int, seqs: tuple[int, int], after: int
    ) -> tuple[int, int, RunState] | None:
        """The `seq` of its run, its number, and the state of its run; None: nothing follows."""
        rows = await self._rows("newest_event", thread, *seqs, after)
        return rows[0] if rows else None

    async def drop_aged(self) -> None:
        """Remove what runs told that ended long ago."""
        more = True
        while more:
            aged = await self._rows("aged_events", time.time() - EVENTS_S, _RUNS)
            more = len(aged) == _RUNS
            gone = [
                statement
                for thread, seq in aged
                for statement in (
                    self._sql("drop_events", thread, seq, seq, ALL),
                    self._sql("without_events", thread, seq, seq),
                )
            ]
            if gone:
                await self._write(gone, (), removes=True)

    def _told(
        self, run: LiveRun, batch: EventBatch, known_cancel: str | None = "rollback"
    ) -> list[Statement]:
        """Build the statements that store a batch of events.

        They store nothing if the run was cancelled in another way than `known_cancel`.
        """
        since, until, events, dropped = batch
        body, of = encrypt_events(self._seal, run, since, events), (run.thread_key, run.seq)
        add = self._sql("add_events", since, until, body, *of, run.owner, known_cancel or "")
        return [add, self._sql("drop_events", *of, run.seq, dropped)] if dropped else [add]

    # -- reading

    async def live(self) -> list[LiveRun]:
        """All that are under way or wait, and delayed ones that are due; of a thread in order."""
        return [LiveRun(*row) for row in await self._rows("live_runs", time.time())]

    async def live_of(self, thread_id: str) -> list[str]:
        """The ids of those of a thread, in order."""
        return [run_id for (run_id,) in await self._rows("live_of", thread_id)]

    async def since(self, thread_id: str, seq: int) -> list[tuple[int, str, RunState]]:
        """Those of a thread after one, in order: `seq`, the id, the status."""
        return [(row[0], row[1], row[2]) for row in await self._rows("runs_since", seq, thread_id)]

    async def of(self, thread_id: str, run_id: str = "") -> list[RunRow]:
        """Those of a thread that are known, or one, newest first."""
        rows = await self._rows("runs_of", thread_id, run_id)
        return [decrypt_run(self._seal, row) for row in rows]

    async def newest(
        self, query: ThreadQuery, status: str | None, limit: int, offset: int
    ) -> list[tuple[RunRow, bool]]:
        """A page of those of the threads of a query, and perhaps of others, newest first.

        Each with whether it is the last of its thread.
        """
        waits = "r.status IN (?, 'delayed')" if status == "pending" else "r.status = ?"
        of = [(waits, [status])] if status else []
        sql, params = joined(self._sql["newest_runs"], [*self._threads.where(query), *of])
        sql += " ORDER BY r.created_at DESC, r.thread, r.seq DESC LIMIT ? OFFSET ?"
        page = sql, *params, limit, offset
        rows = await self._database.aread(lambda: rows_of(*page))
        return [(decrypt_run(self._seal, row[:-1]), bool(row[-1])) for row in rows]
