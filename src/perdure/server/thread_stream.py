"""The events of all runs of a thread in one stream, for `client.threads.join_stream`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from functools import partial
from time import monotonic
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BeforeValidator

from perdure.checkpointers.runs import LIVE_STATES, RunState
from perdure.server.access import Refused, action
from perdure.server.api_runs import ENDS, look
from perdure.server.api_states import checkpoint_of, config_of
from perdure.server.call import Call, Caller, Id
from perdure.server.run_events import ANEW
from perdure.server.run_log import LOOK_S, frame, split_frames, streamed
from perdure.server.run_queue import SWEEP_S
from perdure.server.run_request import expand_arrays
from perdure.server.runs import All, Runs

routes = APIRouter(tags=["runs"])
ThreadMode = Literal["run_modes", "lifecycle", "state_update"]
_PLACE: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,18}))?")  # of an event of a thread


@routes.get("/threads/{thread_id}/stream")
@action("threads:read")
async def join_thread(
    call: Caller,
    runs: All,
    request: Request,
    thread_id: Id,
    stream_mode: Annotated[list[ThreadMode] | None, Query(), BeforeValidator(expand_arrays)] = None,
) -> Response:
    """The events of all runs of a thread as they come, or those after the header Last-Event-ID."""
    await call.permit_thread(thread_id)
    frames = ThreadFrames(call, runs, request, thread_id)
    last = request.headers.get("last-event-id", "")
    return streamed(frames.read({*(stream_mode or ["run_modes"])}, last))


class ThreadFrames:
    """What is told of the runs of a thread, one after the other, to a reader of all of them.

    An event's id names the run by its place in the thread, and the event, if the run goes on.
    """

    def __init__(self, call: Call, runs: Runs, request: Request, thread_id: str) -> None:
        self._call, self._runs, self._request = call, runs, request
        self._thread_id, self._tenant = thread_id, call.identity.tenant
        self._looked = monotonic()

    async def read(self, modes: Collection[str], last: str) -> AsyncGenerator[bytes, None]:
        """What follows an event, as it comes; `""`: the runs that are under way, and the next."""
        try:
            seq, number = await self._place(last)
            head = await self._head() if "state_update" in modes else None
            while True:
                for at, run_id, _ in await self._since(seq):
                    async with aclosing(self._of(run_id, at, number, modes)) as frames:
                        async for part in frames:
                            yield part
                    seq, number = at, None
                if "state_update" in modes and head != (head := await self._head()):
                    yield b"id: %d\n%b" % (seq, frame("state_update", {"checkpoint": head}))
                await asyncio.sleep(SWEEP_S)
                await self._look()
        except (LookupError, Refused) as exc:
            name = "StreamLost" if isinstance(exc, LookupError) else type(exc).__name__
            yield frame("error", {"error": name, "message": str(exc)})

    async def _place(self, last: str) -> tuple[int, int | None]:
        if named := _PLACE.fullmatch(last):
            seq, number = named.groups()
            return (int(seq), None) if number is None else (int(seq) - 1, int(number))
        known = await self._since(0)
        live = [seq - 1 for seq, _, status in known if status in LIVE_STATES]
        return min(live, default=known[-1][0] if known else 0), None

    async def _since(self, seq: int) -> list[tuple[int, str, RunState]]:
        return await (await self._runs.of(self._tenant)).table.list_runs_after(self._thread_id, seq)

    async def _head(self) -> Any:
        head = await self._call.saver.ahead(self._thread_id)
        if head is None:
            return None
        return checkpoint_of(config_of(self._thread_id, {"checkpoint_id": head.checkpoint_id}))

    async def _look(self) -> None:
        """Refuse whoever is no longer known, or may not reach the thread any more."""
        if monotonic() - self._looked >= LOOK_S:
            self._looked = monotonic()
            await look(self._request)
            await self._call.threads.get(self._thread_id)

    async def _of(
        self, run_id: str, seq: int, number: int | None, modes: Collection[str]
    ) -> AsyncGenerator[bytes, None]:
        """The frames of a run."""
        run = await self._runs.get(self._tenant, self._thread_id, run_id)
        await self._runs.recall(run)
        told = not {"run_modes", "lifecycle"}.isdisjoint(modes)
        if told and number is None:
            yield b"id: %d.0\n%b" % (seq, frame(ANEW, {"run_id": run_id, "attempt": 1}))
        if "run_modes" in modes and not run.forgotten and run.protocol == "run":
            reading = number, partial(look, self._request), run.seqs
            identity = self._call.identity
            async for entries in self._runs.told(identity, run.thread, run.log, *reading):
                for part in split_frames(entries, lambda each: b"id: %d.%d\n" % (seq, each.number)):
                    yield part
        while run.task is not None and not run.ended:
            await asyncio.wait([run.task], timeout=LOOK_S)
            await self._look()
        if run.status in LIVE_STATES:
            raise LookupError(ENDS)
        if run.error and told:
            yield frame("error", run.error)
        if told:
            done = {"run_id": run_id, "status": "run_done"}
            yield b"id: %d\n%b" % (seq, frame("metadata", done))
