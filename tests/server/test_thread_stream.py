"""One stream with the events of all runs of a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from perdure.server import create_app, thread_stream
from perdure.server.graphs import Graphs
from perdure.server.runs import run_queue
from perdure.server.runs.event_log import OWN_PAGES_BYTES
from perdure.settings import Settings
from tests.server.running import run_server
from tests.server.talking import Gate, build_failing_graph, build_input, build_talk_graph

Sdk = Any  # a SyncLangGraphClient; its annotations are narrower than what it returns
MODES = ["values", "updates"]


@pytest.fixture
def url(settings: Settings, gate: Gate) -> Iterator[str]:
    graphs = Graphs({"talk": build_talk_graph(gate), "fail": build_failing_graph()})
    with run_server(create_app(settings, graphs=graphs)) as address:
        yield address


def is_end_of_run(part: Any) -> bool:
    return isinstance(part.data, dict) and part.data.get("status") == "run_done"


def read_until_runs_ended(stream: Iterator[Any], runs: int) -> list[Any]:
    """Return the parts of a stream up to the end of `runs` runs."""
    parts: list[Any] = []
    while sum(map(is_end_of_run, parts)) < runs:
        parts.append(next(stream))
    return parts


def start_run(sdk: Sdk, text: str, graph: str = "talk", **more: Any) -> str:
    run = sdk.runs.create("t", graph, input=build_input(text), stream_mode=MODES, **more)
    return str(run["run_id"])


def test_stream_delivers_events_of_all_runs_of_thread(sdk: Sdk, gate: Gate) -> None:
    first = start_run(sdk, "one")
    assert gate.reached.wait(60)
    stream = sdk.threads.join_stream("t")
    seen = [next(stream)]
    second, third = start_run(sdk, "two"), start_run(sdk, "three", "fail")
    gate.open.set()

    parts = seen + read_until_runs_ended(stream, 3)

    begun = [part.data["run_id"] for part in parts if part.data and "attempt" in part.data]
    assert [*dict.fromkeys(begun)] == [first, second, third]
    assert [part.data["run_id"] for part in parts if is_end_of_run(part)] == [first, second, third]
    one = list(sdk.runs.join_stream("t", first))
    told = [part.event for part in parts[: parts.index(next(filter(is_end_of_run, parts)))]]
    assert [each for each in told if each != "metadata"] == [
        part.event for part in one if part.event != "metadata"
    ]
    assert [part.data["error"] for part in parts if part.event == "error"] == ["ZeroDivisionError"]


@pytest.mark.parametrize("size", [3, OWN_PAGES_BYTES])
def test_stream_resumes_after_last_event_id(sdk: Sdk, gate: Gate, size: int) -> None:
    gate.open.set()
    for text in ("one", "two"):
        sdk.runs.join("t", start_run(sdk, text.ljust(size)))
    whole = read_until_runs_ended(sdk.threads.join_stream("t", last_event_id="0"), 2)
    ids = [part.id for part in whole]
    assert len({*ids}) == len(ids)

    for at in (
        0,
        2,
        ids.index(next(part.id for part in whole if is_end_of_run(part))),
        len(ids) - 2,
    ):
        left = sum(map(is_end_of_run, whole[at + 1 :]))
        again = read_until_runs_ended(sdk.threads.join_stream("t", last_event_id=ids[at]), left)
        assert [(part.id, part.event) for part in again] == [
            (part.id, part.event) for part in whole[at + 1 :]
        ]


def test_stream_mode_selects_lifecycle_or_state_updates(sdk: Sdk, gate: Gate) -> None:
    gate.open.set()
    run = start_run(sdk, "one")
    sdk.runs.join("t", run)
    modes: Any = {"last_event_id": "0", "stream_mode": "lifecycle"}
    begun, done = read_until_runs_ended(sdk.threads.join_stream("t", **modes), 1)
    assert (begun.data["run_id"], done.data) == (run, {"run_id": run, "status": "run_done"})

    states = sdk.threads.join_stream("t", stream_mode="state_update")
    told: list[Any] = []
    reader = threading.Thread(target=lambda: told.append(next(states)), daemon=True)
    reader.start()
    while not told:  # the stream may begin after the first of them
        made = sdk.threads.update_state("t", {"heard": ["x"]}, as_node="hear")["checkpoint"]
        reader.join(3 * run_queue.SWEEP_S)
    assert told[0].event == "state_update"
    assert told[0].data["checkpoint"]["thread_id"] == made["thread_id"]


def test_stream_of_unknown_thread_or_mode_is_refused(url: str, sdk: Sdk) -> None:
    assert httpx.get(f"{url}/threads/none/stream").status_code == 404
    reply = httpx.get(f"{url}/threads/t/stream", params={"stream_mode": "nope"})
    assert reply.status_code == 422


def test_stream_ends_when_its_thread_is_deleted(
    sdk: Sdk, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_stream, "ACCESS_CHECK_S", 0.1)
    stream = sdk.threads.join_stream("t", last_event_id="0")
    gate.open.set()
    sdk.runs.join("t", start_run(sdk, "one"))
    read_until_runs_ended(stream, 1)
    sdk.threads.delete("t")

    [error] = list(stream)
    assert (error.event, error.data["error"]) == ("error", "StreamLost")
