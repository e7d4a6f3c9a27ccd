"""Events of the mode `events` contain prompts, and reach only those who may see the memories."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.http.auth_file import AuthFileAccess
from perdure.settings import Settings
from tests.server.http.test_auth_file import write_auth_file
from tests.server.running import run_server
from tests.server.test_person import (
    FOLLOW_UP,
    TEAM_AUTH_FILE,
    YES_COMMAND,
    Desk,
    Model,
    answer_by_sdk,
    build_agent,
    desk,
    model,
    serve_desk,
    start_thread_awaiting_approval,
    team,
)

__all__ = ["desk", "model", "team"]
MODES: Any = ["events", "values"]


def start_run_with_events(desk: Desk, user: str) -> tuple[str, str]:
    """Run the agent on a new thread, and return the ids of the thread and the run."""
    client = desk.client(user)
    thread_id = client.threads.create()["thread_id"]
    run = client.runs.create(thread_id, "desk", input=FOLLOW_UP, stream_mode=MODES)
    client.runs.join(thread_id, run["run_id"])
    return thread_id, run["run_id"]


def join_run(desk: Desk, user: str, thread_id: str, run_id: str) -> list[Any]:
    return [*desk.client(user).runs.join_stream(thread_id, run_id)]


def join_run_for_events(desk: Desk, user: str, thread_id: str, run_id: str) -> list[Any]:
    stream = desk.client(user).runs.join_stream(thread_id, run_id, stream_mode=MODES)
    return [*stream]


def join_thread(desk: Desk, user: str, thread_id: str, run_id: str) -> list[Any]:
    """Read the stream of the thread from its first run to the end of that run."""
    parts: list[Any] = []
    for part in desk.client(user).threads.join_stream(thread_id, last_event_id="0"):
        parts.append(part)
        if isinstance(part.data, dict) and part.data.get("status") == "run_done":
            break
    return parts


Join = Callable[[Desk, str, str, str], list[Any]]
JOIN_METHODS = [join_run, join_run_for_events, join_thread]


def describe(parts: list[Any]) -> tuple[bool, bool, bool]:
    """Return whether there are events of `events`, those of `values`, and Mia's memory."""
    names = {part.event for part in parts}
    text = json.dumps([part.data for part in parts])
    return "events" in names, "values" in names, "Magpie" in text


@pytest.mark.parametrize("join", JOIN_METHODS)
def test_colleague_who_joins_run_does_not_read_prompts(team: Desk, join: Join) -> None:
    thread_id, run_id = start_run_with_events(team, "mia")

    assert describe(join(team, "mia", thread_id, run_id)) == (True, True, True)
    assert describe(join(team, "tom", thread_id, run_id)) == (False, True, False)


def test_colleague_who_answers_does_not_read_prompts(team: Desk) -> None:
    """The run goes on with the memories of the person, and the colleague requests its events."""
    thread_id = start_thread_awaiting_approval(team, "mia")
    before = len(team.model.requests)
    options: Any = {"command": YES_COMMAND, "stream_mode": MODES, "stream_resumable": True}

    parts = [*team.client("tom").runs.stream(thread_id, "desk", **options)]
    [newest, *_] = team.client("mia").runs.list(thread_id)

    assert "Magpie" in team.prompts(before)
    assert describe(parts) == (False, True, False)
    run_ids = thread_id, newest["run_id"]
    assert describe(join_run(team, "mia", *run_ids)) == (True, True, True)


def test_colleague_reads_events_of_own_message(team: Desk) -> None:
    """A run with a colleague's message uses no memories, so its events contain none."""
    thread_id = start_thread_awaiting_approval(team, "mia")
    answer_by_sdk(team, "mia", thread_id)

    parts = [*team.client("tom").runs.stream(thread_id, "desk", input=FOLLOW_UP, stream_mode=MODES)]

    assert describe(parts) == (True, True, False)


@pytest.mark.parametrize("join", JOIN_METHODS)
def test_prompts_stay_private_on_another_server(
    db: Settings, tmp_path: Path, model: Model, join: Join
) -> None:
    """The events are read from the database after the server that stored them has ended."""
    access = AuthFileAccess(write_auth_file(tmp_path, TEAM_AUTH_FILE))
    with serve_desk(db, access, model) as first:
        thread_id, run_id = start_run_with_events(first, "mia")
    app = create_app(db, graphs=Graphs({"desk": build_agent(model)}), access=access)
    with ExitStack() as stack:
        second = Desk(stack.enter_context(run_server(app)), db, model)
        stack.enter_context(second.clients)

        assert describe(join(second, "tom", thread_id, run_id)) == (False, True, False)
        assert describe(join(second, "mia", thread_id, run_id)) == (True, True, True)


def test_caller_who_may_act_for_person_reads_prompts(desk: Desk) -> None:
    thread_id, run_id = start_run_with_events(desk, "dora")

    text = json.dumps([part.data for part in join_run(desk, "boss", thread_id, run_id)])

    assert "Heron" in text
