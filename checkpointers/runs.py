"""Runs as rows of the saver's database: accepted, claimed, ended, cancelled.

What a run was asked (`request`, until it has ended, or could be sent again), what is told of it
(`about`) and its error are sealed. What it returned is not stored again: its last checkpoint has
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, Literal

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.records import LiveRun, RunRow, open_run, seal_run
from perdure.checkpointers.thread_list import ThreadList, ThreadQuery, joined
from perdure.storage.flow import Flow, Last, Row, Statement, rows_of

RunState = Literal["delayed", "pending", "running", "success", "error", "interrupted"]
LIVE: Final[tuple[RunState, ...]] = ("delayed", "pending", "running")
KEPT: Final = 100
"""How many runs of a thread are known, besides those that are under way."""


class RunTable:
    """The runs of a checkpointer's threads."""

    def __init__(self, saver: Checkpointer) -> None:
        self._database, self._sql, self._seal = saver.database, saver._sql, saver._seal
        self._threads = ThreadList(saver)

    async def accept(
        self, run: RunRow, *, rejects: bool, cancels: str | None
    ) -> tuple[LiveRun | None, list[str]]:
        """Store a run; and the ids of all that are live of its thread then.

        It runs at once if no other run of the thread is live, and waits otherwise. One that is
        delayed (`not_before`) counts for nothing until it is due: see `begin_due`.

        Args:
            run: Its ids, owner, graph, and what it is asked.
            rejects: Whether it is none if it had to wait. It is none either if there is no thread.
            cancels: How those before it are cancelled; None: they are not.
        """
        live, at = run.live, run.created_at
        about, _, request = seal_run(self._seal, live, run[3:6])
        of = at, about, request, live.thread_id, int(rejects), run.not_before
        cancel = self._cancelling(live.thread_id, "", cancels) if cancels else []
        accept = self._sql("accept_run", live.run_id, live.owner, live.graph, *of)
        then = self._sql("live_of", live.thread_id)
        *_, made, ids = await self._write([*cancel, accept, then], live.thread_id)
        if made:
            thread, seq, status = made[0]
            live = live._replace(thread=thread, seq=seq, status=status)
        return live if made else None, [run_id for (run_id,) in ids]

    async def end(
        self,
        run: LiveRun,
        status: RunState | Literal["rolled back"],
        error: Any = None,
        request: Any = None,
    ) -> list[int] | None:
        """End a run, and claim the next of its thread, which is returned by its `seq`.

        Nothing is left of one that was rolled back.

        None: it is another process' by now, or its thread was deleted.

        Args:
            run: Which one.
            status: How it ended.
            error: Why it failed.
            request: What it was asked, if that may be sent again; it stays unless it was stopped.
        """
        now, of = time.time(), (run.thread, run.seq)
        _, *sealed = seal_run(self._seal, run, (None, error, request))
        ended, claimed, _ = await self._write(
            [
                self._sql("drop_run", *of, run.owner)
                if status == "rolled back"
                else self._sql("end_run", status, *sealed, now, *of, run.owner),
                self._sql("claim_next", now, run.owner, run.thread),
                self._sql("drop_old_runs", run.thread, run.seq - KEPT),
            ],
            run.thread_id,
        )
        return [seq for (seq,) in claimed] if ended else None

    async def begin_due(self, run: LiveRun, owner: str, cancels: str | None) -> None:
        """Have a delayed run whose time has come take its turn, unless another process was first.

        It comes after all that are live of its thread then, or cancels them.
        """
        of = run.thread_id, run.thread, run.run_id

        def flow() -> Flow[None]:
            for (status,) in (yield self._sql("status_of", *of[1:])):
                if status == "delayed":
                    cancel = self._cancelling(run.thread_id, "", cancels) if cancels else []
                    yield [*cancel, self._sql("begin_due", owner, time.time(), *of[1:])]

        await self._database.awrite(flow, exclusive=(run.thread_id,))

    async def drop(self, thread_id: str, run_id: str) -> None:
        """Remove a run of a thread, if it has ended."""
        await self._write([self._sql("drop_ended", thread_id, run_id)], thread_id)

    async def claim(self, owner: str, adopted: Sequence[LiveRun] = ()) -> None:
        """Take over runs, of owners that are gone, and claim all that may begin."""
        taken = [self._sql("adopt_run", owner, run.thread, run.seq, run.owner) for run in adopted]
        await self._write([*taken, self._sql("claim_runs", time.time(), owner)], None)

    async def hand_over(self, owner: str) -> None:
        """Leave all runs of a process to others."""
        await self._write([self._sql("hand_over", owner)], None)

    async def cancel(self, thread_id: str, run_id: str, action: str) -> None:
        """Have a run of a thread stopped, or with `""` all.

        One that waits, or is delayed, has ended then; with `rollback` there is none any more.
        """
        await self._write(self._cancelling(thread_id, run_id, action, delayed=True), thread_id)

    def _cancelling(
        self, thread_id: str, run_id: str, action: str, *, delayed: bool = False
    ) -> list[Statement]:
        of = thread_id, run_id, int(delayed)
        gone = [self._sql("drop_waiting", *of)] if action == "rollback" else []
        return [*gone, self._sql("cancel_runs", *of, action, time.time())]

    async def live(self) -> list[LiveRun]:
        """All that are under way or wait, and delayed ones that are due; of a thread in order."""
        return [LiveRun(*row) for row in await self._rows("live_runs", time.time())]

    async def live_of(self, thread_id: str) -> list[str]:
        """The ids of those of a thread, in order."""
        return [run_id for (run_id,) in await self._rows("live_of", thread_id)]

    async def of(self, thread_id: str, run_id: str = "") -> list[RunRow]:
        """Those of a thread that are known, or one, newest first."""
        return await self._opened("runs_of", thread_id, run_id)

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
        return [(open_run(self._seal, row[:-1]), bool(row[-1])) for row in rows]

    async def _opened(self, name: str, *params: Any) -> list[RunRow]:
        return [open_run(self._seal, row) for row in await self._rows(name, *params)]

    async def _rows(self, name: str, *params: Any) -> list[Row]:
        return await self._database.aread(lambda: rows_of(self._sql[name], *params), snapshot=False)

    async def _write(self, statements: list[Statement], thread_id: str | None) -> Any:
        exclusive = None if thread_id is None else (thread_id,)
        return await self._database.awrite(lambda: _asked(statements), exclusive=exclusive)


def _asked(statements: list[Statement]) -> Flow[Any]:
    return (yield Last(statements))
