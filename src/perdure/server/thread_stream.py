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
from perdure.server.api_runs import SERVER_CLOSING, check_identity
from perdure.server.api_states import build_checkpoint_config, build_checkpoint_ref
from perdure.server.call import Call, CurrentCall, PathId
from perdure.server.run_events import METADATA_EVENT
from perdure.server.run_log import ACCESS_CHECK_S, build_event_stream, build_frame, split_frames
from perdure.server.run_queue import SWEEP_S
from perdure.server.run_request import expand_arrays
from perdure.server.runs import Runs, ServerRuns

routes = APIRouter(tags=["runs"])
ThreadMode = Literal["run_modes", "lifecycle", "state_update"]
_EVENT_ID: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,18}))?")  # of an event of a thread


@routes.get("/threads/{thread_id}/stream")
@action("threads:read")
async def join_thread(
    call: CurrentCall,
    runs: ServerRuns,
    request: Request,
    thread_id: PathId,
    stream_mode: Annotated[list[ThreadMode] | None, Query(), BeforeValidator(expand_arrays)] = None,
) -> Response:
    """The events of all runs of a thread as they come, or those after the header Last-Event-ID."""
    await call.permit_thread(thread_id)
    frames = ThreadFrames(call, runs, request, thread_id)
    last = request.headers.get("last-event-id", "")
    return build_event_stream(frames.iter_frames({*(stream_mode or ["run_modes"])}, last))


class ThreadFrames:
    """What is told of the runs of a thread, one after the other, to a reader of all of them.

    An event's id names the run by its place in the thread, and the event, if the run goes on.
    """

    def __init__(self, call: Call, runs: Runs, request: Request, thread_id: str) -> None:
        self._call, self._runs, self._request = call, runs, request
        self._thread_id, self._tenant = thread_id, call.identity.tenant
        self._looked = monotonic()

    async def iter_frames(self, modes: Collection[str], last: str) -> AsyncGenerator[bytes, None]:
        """What follows an event, as it comes; `""`: the runs that are under way, and the next."""
        try:
            seq, number = await self._find_start(last)
            head = await self._read_head() if "state_update" in modes else None
            while True:
                for at, run_id, _ in await self._list_runs_after(seq):
                    async with aclosing(self._iter_run_frames(run_id, at, number, modes)) as frames:
                        async for part in frames:
                            yield part
                    seq, number = at, None
                if "state_update" in modes and head != (head := await self._read_head()):
                    yield b"id: %d\n%b" % (seq, build_frame("state_update", {"checkpoint": head}))
                await asyncio.sleep(SWEEP_S)
                await self._check_access()
        except (LookupError, Refused) as exc:
            name = "StreamLost" if isinstance(exc, LookupError) else type(exc).__name__
            yield build_frame("error", {"error": name, "message": str(exc)})

    async def _find_start(self, last: str) -> tuple[int, int | None]:
        if named := _EVENT_ID.fullmatch(last):
            seq, number = named.groups()
            return (int(seq), None) if number is None else (int(seq) - 1, int(number))
        known = await self._list_runs_after(0)
        live = [seq - 1 for seq, _, status in known if status in LIVE_STATES]
        return min(live, default=known[-1][0] if known else 0), None

    async def _list_runs_after(self, seq: int) -> list[tuple[int, str, RunState]]:
        return await (await self._runs.for_tenant(self._tenant)).table.list_runs_after(
            self._thread_id, seq
        )

    async def _read_head(self) -> Any:
        head = await self._call.saver.ahead(self._thread_id)
        if head is None:
            return None
        return build_checkpoint_ref(
            build_checkpoint_config(self._thread_id, {"checkpoint_id": head.checkpoint_id})
        )

    async def _check_access(self) -> None:
        """Refuse whoever is no longer known, or may not reach the thread any more."""
        if monotonic() - self._looked >= ACCESS_CHECK_S:
            self._looked = monotonic()
            await check_identity(self._request)
            await self._call.threads.get(self._thread_id)

    async def _iter_run_frames(
        self, run_id: str, seq: int, number: int | None, modes: Collection[str]
    ) -> AsyncGenerator[bytes, None]:
        """The frames of a run."""
        run = await self._runs.get(self._tenant, self._thread_id, run_id)
        await self._runs.load_events(run)
        told = not {"run_modes", "lifecycle"}.isdisjoint(modes)
        if told and number is None:
            yield b"id: %d.0\n%b" % (
                seq,
                build_frame(METADATA_EVENT, {"run_id": run_id, "attempt": 1}),
            )
        if "run_modes" in modes and not run.events_dropped and run.protocol == "run":
            reading = number, partial(check_identity, self._request), run.seq_range
            identity = self._call.identity
            async for entries in self._runs.read_events(
                identity, run.thread_key, run.log, *reading
            ):
                for part in split_frames(entries, lambda each: b"id: %d.%d\n" % (seq, each.number)):
                    yield part
        while run.task is not None and not run.has_ended:
            await asyncio.wait([run.task], timeout=ACCESS_CHECK_S)
            await self._check_access()
        if run.status in LIVE_STATES:
            raise LookupError(SERVER_CLOSING)
        if run.error and told:
            yield build_frame("error", run.error)
        if told:
            done = {"run_id": run_id, "status": "run_done"}
            yield b"id: %d\n%b" % (seq, build_frame("metadata", done))
