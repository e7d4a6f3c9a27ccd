"""Stream the events of all runs of a thread, for `client.threads.join_stream`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from time import monotonic
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BeforeValidator

from perdure.run_tables.runs import LIVE_STATES, RunSummary
from perdure.server.api_runs import SERVER_CLOSING
from perdure.server.api_states import build_checkpoint_config, build_checkpoint_ref
from perdure.server.http.access import Refused, set_required_action
from perdure.server.http.acting_for import require_valid_credentials_of_same_user
from perdure.server.http.call import Call, CurrentCall, PathId
from perdure.server.http.reply import JSONReply
from perdure.server.runs.event_log import (
    ACCESS_CHECK_S,
    build_event_stream,
    build_frame,
    iter_sse_chunks,
)
from perdure.server.runs.run_events import METADATA_EVENT
from perdure.server.runs.run_manager import RunManager, ServerRuns
from perdure.server.runs.run_queue import SWEEP_S
from perdure.server.runs.run_request import parse_repeated_or_json_array_parameter

routes = APIRouter(tags=["runs"], default_response_class=JSONReply)
ThreadMode = Literal["run_modes", "lifecycle", "state_update"]
"""The kinds of events that a reader can request. `run_modes` selects all events of the thread's
runs. `lifecycle` selects only the start, the error and the end of each run. `state_update` adds an
event if the thread's head has changed, which is checked while no run is in progress."""
# Pattern of an event id, which consists of a run's `seq` and the event's number
_EVENT_ID: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,18}))?")


@routes.get("/threads/{thread_id}/stream")
@set_required_action("threads:read")
async def join_thread(
    call: CurrentCall,
    runs: ServerRuns,
    request: Request,
    thread_id: PathId,
    stream_mode: Annotated[
        list[ThreadMode] | None, Query(), BeforeValidator(parse_repeated_or_json_array_parameter)
    ] = None,
) -> Response:
    """Stream the events of a thread's runs, starting after Last-Event-ID if the client sent one."""
    await call.permit_thread(thread_id)
    frames = ThreadFrames(call, runs, request, thread_id)
    last = request.headers.get("last-event-id", "")
    return build_event_stream(frames.iter_frames({*(stream_mode or ["run_modes"])}, last))


class ThreadFrames:
    """Produces a thread's stream of server-sent events for one reader.

    The stream contains the events of all runs, one run after the other.

    An event's id consists of its run's `seq` and the event's own number. The id of a run's last
    event consists only of the run's `seq`.
    """

    def __init__(self, call: Call, runs: RunManager, request: Request, thread_id: str) -> None:
        self._call, self._runs, self._request = call, runs, request
        self._thread_id, self._tenant = thread_id, call.identity.tenant
        self._access_checked_at = monotonic()

    async def iter_frames(
        self, modes: Collection[str], last_event_id: str
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events after `last_event_id` as SSE frames, then new events as they arrive.

        Args:
            modes: The kinds of events that the reader wants.
            last_event_id: The id of the last event that the reader has received. If it is `""`, or
                does not have the form of an event id, the reader begins with the runs that are
                under way.
        """
        try:
            seq, number = await self._find_seq_and_event_number_to_resume_after(last_event_id)
            head = await self._read_head_checkpoint_ref() if "state_update" in modes else None
            while True:
                for run_seq, run_id, _ in await self._list_runs_after(seq):
                    async with aclosing(
                        self._iter_event_frames_of_run(run_id, run_seq, number, modes)
                    ) as frames:
                        async for part in frames:
                            yield part
                    seq, number = run_seq, None
                if "state_update" in modes and head != (
                    head := await self._read_head_checkpoint_ref()
                ):
                    yield b"id: %d\n%b" % (seq, build_frame("state_update", {"checkpoint": head}))
                await asyncio.sleep(SWEEP_S)
                await self._check_access_to_thread()
        except (LookupError, Refused) as exc:
            name = "StreamLost" if isinstance(exc, LookupError) else type(exc).__name__
            yield build_frame("error", {"error": name, "message": str(exc)})

    async def _find_seq_and_event_number_to_resume_after(
        self, last_event_id: str
    ) -> tuple[int, int | None]:
        """Find the position from which a reader resumes, given the last event id it received.

        Returns:
            A sequence number and an event number. The reader continues with the first run whose
            `seq` is greater than the sequence number. The event number is that of the last event of
            this run that the reader has received, or None if the reader has received none of them.
        """
        if match := _EVENT_ID.fullmatch(last_event_id):
            seq, number = match.groups()
            return (int(seq), None) if number is None else (int(seq) - 1, int(number))
        runs = await self._list_runs_after(0)
        seqs_before_live_runs = [seq - 1 for seq, _, status in runs if status in LIVE_STATES]
        return min(seqs_before_live_runs, default=runs[-1][0] if runs else 0), None

    async def _list_runs_after(self, seq: int) -> list[RunSummary]:
        """List the runs with a sequence number greater than `seq`."""
        return await (
            await self._runs.get_run_queue(self._tenant)
        ).table.list_summaries_of_runs_after(self._thread_id, seq)

    async def _read_head_checkpoint_ref(self) -> dict[str, Any] | None:
        """Return the thread id, namespace and checkpoint id of the thread's head.

        The checkpoint id is left out if the thread has no checkpoint in the root namespace. Return
        None if there is no such thread.
        """
        head = await self._call.saver.ahead(self._thread_id)
        if head is None:
            return None
        return build_checkpoint_ref(
            build_checkpoint_config(self._thread_id, {"checkpoint_id": head.checkpoint_id})
        )

    async def _check_access_to_thread(self) -> None:
        """Check that the reader is still logged in and still has access to the thread.

        The reader's access is not checked again if it was checked less than `ACCESS_CHECK_S`
        seconds ago.

        Raises:
            Refused: The reader no longer has access to the thread.
        """
        if monotonic() - self._access_checked_at >= ACCESS_CHECK_S:
            self._access_checked_at = monotonic()
            await require_valid_credentials_of_same_user(self._request)
            await self._call.threads.get(self._thread_id)

    async def _iter_event_frames_of_run(
        self, run_id: str, seq: int, last_event_number: int | None, modes: Collection[str]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of one run, encoded as server-sent events.

        If the run's `protocol` is `"thread"`, only its start, error and end events are sent. If the
        run's events are no longer kept, only start, error and end events are sent.

        Args:
            run_id: The run.
            seq: The `seq` of the run.
            last_event_number: The number of the last event that the reader has received, or None.
            modes: The kinds of events that the reader wants.
        """
        run = await self._runs.get(self._tenant, self._thread_id, run_id)
        await self._runs.load_stored_events_that_process_lacks(run)
        has_lifecycle = not {"run_modes", "lifecycle"}.isdisjoint(modes)
        if has_lifecycle and last_event_number is None:
            yield b"id: %d.0\n%b" % (
                seq,
                build_frame(METADATA_EVENT, {"run_id": run_id, "attempt": 1}),
            )
        if "run_modes" in modes and not run.events_dropped and run.protocol == "run":
            async for entries in self._runs.read_events(
                self._request, run.thread_key, run.log, last_event_number, run.seq_range
            ):
                for part in iter_sse_chunks(
                    entries, lambda event: b"id: %d.%d\n" % (seq, event.number)
                ):
                    yield part
        while run.task is not None and not run.is_task_done:
            await asyncio.wait([run.task], timeout=ACCESS_CHECK_S)
            await self._check_access_to_thread()
        if run.status in LIVE_STATES:
            raise LookupError(SERVER_CLOSING)
        if run.error and has_lifecycle:
            yield build_frame("error", run.error)
        if has_lifecycle:
            yield b"id: %d\n%b" % (
                seq,
                build_frame(METADATA_EVENT, {"run_id": run_id, "status": "run_done"}),
            )
