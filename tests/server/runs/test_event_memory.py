"""How much memory the events of runs take while their readers do not read, and afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph.config import get_stream_writer
from langgraph.graph import START, StateGraph
from websockets.sync.client import connect

from perdure.checkpointers import open_checkpointer
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.http.keys import KeysFileAccess
from perdure.server.http.limits import Limits
from perdure.server.runs import event_log, event_memory, run_events
from perdure.server.runs.event_log import EventLog
from perdure.server.runs.event_memory import EventMemory
from perdure.settings import Settings
from tests.server.http.test_keys import ANN, BOB, render_key_entry
from tests.server.running import erase_messages_with_text, run_server, wait_until
from tests.server.talking import Gate, State, build_input, build_talk_graph

pytestmark = pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
SIZE, COUNT = 50_000, 600  # of messages; all of them are more than the buffers of a connection
USER_BYTES, ALL_BYTES = 1_000_000, 1_500_000
SECRET = "the harbour safe opens at nine"


def build_flood_graph(
    size: int = SIZE, count: int = COUNT, pause_s: float = 0
) -> StateGraph[State]:
    """Build a graph that streams large numbered messages."""

    async def tell(state: State) -> dict[str, Any]:
        for number in range(count):
            get_stream_writer()(f"{number:06}".ljust(size, "x"))
            await asyncio.sleep(pause_s)
        return {"heard": ["all"]}

    return StateGraph(State).add_node(tell).add_edge(START, "tell")


LARGE = build_flood_graph(3_000_000, 12)


def build_paced_graph(applications: dict[str, Any]) -> StateGraph[State]:
    """Build a graph that streams large messages, each after the previous one was stored."""

    async def tell(state: State) -> dict[str, Any]:
        for number in range(60):
            get_stream_writer()(f"{number:06}".ljust(SIZE, "x"))
            await asyncio.sleep(0)  # it is added to the log
            runs = [
                run
                for run in applications["app"].state.runs.shared_state.players_by_run
                if run.is_executing
            ]
            while any(run.log.last > run.last_stored for run in runs):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        return {"heard": ["all"]}

    return StateGraph(State).add_node(tell).add_edge(START, "tell")


@pytest.fixture
def app(settings: Settings, gate: Gate, tmp_path: Path) -> Any:
    """An application of two users with small limits."""
    keys = tmp_path / "keys.toml"
    keys.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob"))
    keys.chmod(0o600)
    huge = build_flood_graph(12_000_000, 4, 0.1)
    applications: dict[str, Any] = {}
    graphs = {
        "huge": huge,
        "flood": build_flood_graph(),
        "paced": build_paced_graph(applications),
        "paused": build_flood_graph(SIZE, 60, 0.02),
        "talk": build_talk_graph(gate),
    }
    limits = Limits(user_event_bytes=USER_BYTES, all_event_bytes=ALL_BYTES)
    applications["app"] = create_app(
        settings, access=KeysFileAccess(keys), graphs=Graphs(graphs), limits=limits
    )
    return applications["app"]


@pytest.fixture
def url(app: Any) -> Iterator[str]:
    with run_server(app) as address:
        yield address


@pytest.fixture
def ann(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"x-api-key": ANN}, timeout=60) as client:
        client.post("/threads", json={"thread_id": "t"})
        yield client


def build_run_request(graph: str = "flood", **options: Any) -> dict[str, Any]:
    return {
        "assistant_id": graph,
        "input": build_input("hello"),
        "stream_mode": ["custom"],
        **options,
    }


class SlowClient:
    """A client that requests a stream and reads it only when a test calls `read`."""

    def __init__(self, url: str, path: str, body: Any = None, key: str = ANN, **headers: str):
        address = httpx.URL(url)
        content = b"" if body is None else json.dumps(body).encode()
        of = {"Host": address.host, "x-api-key": key, "Content-Type": "application/json", **headers}
        of["Content-Length"] = str(len(content))
        lines = [
            f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
            *map(": ".join, of.items()),
        ]
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(60)
        self._socket.connect((address.host, address.port))
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        self._read = b""

    def peek(self) -> None:
        """Wait until the reply has begun."""
        self._socket.recv(1, socket.MSG_PEEK)

    def read(self) -> tuple[list[tuple[str, str, Any]], bool]:
        """Return the id, name and data of all events, and whether the stream came to its end."""
        raw = bytearray()
        while not raw.endswith(b"\r\n0\r\n\r\n") and (part := self._socket.recv(1 << 20)):
            raw += part
        self.close()
        text, body = b"", bytes(raw).partition(b"\r\n\r\n")[2]
        while body and body != b"0\r\n\r\n":
            size, _, rest = body.partition(b"\r\n")
            text += rest[: int(size, 16)]
            body = rest[int(size, 16) + 2 :]
        *whole, _ = text.split(b"\n\n")
        events = []
        for each in whole:
            fields = dict(line.split(": ", 1) for line in each.decode().split("\n"))
            if "data" in fields:
                data = json.loads(fields["data"])
                events.append((fields.get("id", ""), fields["event"], data))
        return events, raw.endswith(b"\r\n0\r\n\r\n")

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def list_message_numbers(events: list[tuple[str, str, Any]]) -> list[int]:
    return [int(data[:6]) for _, event, data in events if event == "custom"]


def wait_for_end_of_runs(client: httpx.Client, thread: str = "t") -> None:
    for run in client.get(f"/threads/{thread}/runs").json():
        client.get(f"/threads/{thread}/runs/{run['run_id']}/join")


# -- the process


@contextmanager
def start_server_process(folder: Path) -> Iterator[tuple[str, int]]:
    """Start `perdure serve`; yield its address and the id of its process."""
    graphs = folder / "langgraph.json"
    graphs.write_text(json.dumps({"graphs": {"large": f"{__file__}:LARGE"}}))
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    options = ["--graphs", str(graphs), "--db", str(folder / "m.db"), "--port", str(port)]
    command = [sys.executable, "-c", "from perdure.cli import main; main()", "serve", *options]
    root = str(Path(__file__).parents[3])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), root])}
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"

            def is_ready() -> bool:
                assert process.poll() is None
                try:
                    return httpx.get(f"{url}/ok").is_success
                except httpx.TransportError:
                    return False

            wait_until(is_ready)
            yield url, process.pid
        finally:
            process.kill()


def read_resident_bytes(process: int) -> int:
    """Return the resident memory of a process, in bytes."""
    pages = Path(f"/proc/{process}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is measured on Linux")
@pytest.mark.parametrize(
    "kind",
    [
        "run",
        pytest.param("stored", marks=pytest.mark.slow),
        pytest.param("thread", marks=pytest.mark.slow),
    ],
)
def test_process_memory_is_freed_after_unread_streams_close(tmp_path: Path, kind: str) -> None:
    """There are ten streams of 36 MB each; one user may keep 64 MB."""
    with (
        start_server_process(tmp_path) as (url, process),
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        client.post("/runs/wait", json=build_run_request("large"))  # imports modules
        before, streams = read_resident_bytes(process), []
        for number in range(10):
            client.post("/threads", json={"thread_id": str(number)})
            if kind == "thread":
                subscription = {"channels": ["custom"], "since": 0}
                streams.append(SlowClient(url, f"/threads/{number}/stream/events", subscription))
                order = {"id": 1, "method": "run.start", "params": build_run_request("large")}
                client.post(f"/threads/{number}/commands", json=order)
            else:
                body = build_run_request("large", stream_resumable=kind == "stored")
                streams.append(SlowClient(url, f"/threads/{number}/runs/stream", body))
        for number, stream in enumerate(streams):
            stream.peek()
            wait_for_end_of_runs(client, str(number))
        while_open = read_resident_bytes(process)
        for stream in streams:
            stream.close()
        wait_until(lambda: read_resident_bytes(process) < before + 200e6)

    assert while_open < before + 250e6


# -- readers


def test_slow_reader_receives_stream_lost_error(url: str, ann: httpx.Client, app: Any) -> None:
    stream = SlowClient(url, "/threads/t/runs/stream", build_run_request(on_disconnect="cancel"))
    stream.peek()
    wait_for_end_of_runs(ann)
    kept_bytes = app.state.runs.shared_state.memory.size
    events, ended = stream.read()

    received = list_message_numbers(events)
    assert ended
    assert received == [*range(len(received))]
    assert len(received) < COUNT
    assert events[-1][1] == "error"
    assert events[-1][2]["error"] == "StreamLost"
    assert 0 < kept_bytes <= USER_BYTES
    assert ann.get("/threads/t/runs").json()[0]["status"] == "success"


def test_slow_reader_continues_with_stored_events(
    url: str, ann: httpx.Client, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_events, "STORE_INTERVAL_S", 0.01)
    bodies = [build_run_request("paced", stream_resumable=True) for _ in range(3)]
    streams = []
    for number, body in enumerate(bodies):
        ann.post("/threads", json={"thread_id": f"{number}"})
        streams.append(SlowClient(url, f"/threads/{number}/runs/stream", body))
    for number, stream in enumerate(streams):
        stream.peek()
        wait_for_end_of_runs(ann, f"{number}")
    results = [stream.read() for stream in streams]
    resumed_results = []
    for number in range(3):
        [run] = ann.get(f"/threads/{number}/runs").json()
        path = f"/threads/{number}/runs/{run['run_id']}/stream"
        resumed_results.append(SlowClient(url, path, **{"Last-Event-ID": "20"}).read())

    assert app.state.runs.shared_state.memory.total_added > USER_BYTES
    for events, ended in results:
        assert ended
        assert list_message_numbers(events) == [*range(60)]
    for events, _ in resumed_results:
        assert list_message_numbers(events) == [*range(20, 60)]


def test_reader_is_told_about_dropped_events_that_were_not_stored(
    url: str, ann: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader gets an error, because the stored events are not complete."""
    monkeypatch.setattr(run_events, "STORE_INTERVAL_S", 0.001)
    monkeypatch.setattr(event_log, "RETAINED_BYTES", 1 << 30)
    run = ann.post("/threads/t/runs", json=build_run_request()).json()["run_id"]
    wait_for_end_of_runs(ann)
    monkeypatch.setattr(event_memory, "MAX_ENDED_BYTES", 0)
    events, ended = SlowClient(
        url, f"/threads/t/runs/{run}/stream", **{"Last-Event-ID": "1"}
    ).read()

    received = list_message_numbers(events)
    assert ended
    assert received == [*range(1, len(received) + 1)]
    assert len(received) == COUNT - 1 or events[-1][2]["error"] == "StreamLost"


def test_slow_reader_is_disconnected_in_the_middle_of_large_event(
    url: str, ann: httpx.Client, app: Any
) -> None:
    """The rest of the event was dropped, so no other event may follow its beginning."""
    stream = SlowClient(
        url, "/threads/t/runs/stream", build_run_request("huge", on_disconnect="cancel")
    )
    stream.peek()
    wait_for_end_of_runs(ann)
    events, ended = stream.read()

    received = list_message_numbers(events)
    assert not ended
    assert received == [*range(len(received))]
    assert "error" not in {event for _, event, _ in events}
    assert ann.get("/threads/t/runs").json()[0]["status"] == "success"


def test_ping_comments_do_not_split_events(
    url: str, ann: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "PING_S", 0.0001)
    monkeypatch.setattr(event_log, "CHUNK_BYTES", 1000)
    stream = SlowClient(url, "/threads/t/runs/stream", build_run_request("paused"))
    events, ended = stream.read()

    assert ended
    assert [data for _, event, data in events if event == "custom"] == [
        f"{number:06}".ljust(SIZE, "x") for number in range(60)
    ]


def test_slow_readers_of_one_user_do_not_lose_stream_of_another(
    url: str, ann: httpx.Client, app: Any
) -> None:
    with httpx.Client(base_url=url, headers={"x-api-key": BOB}, timeout=60) as bob:
        bob.post("/threads", json={"thread_id": "of-bob"})
        results: list[Any] = []

        def read() -> None:
            body = build_run_request("paused", if_not_exists="create")
            results.append(SlowClient(url, "/threads/of-bob/runs/stream", body, BOB).read())

        reader = threading.Thread(target=read)
        reader.start()
        streams = [SlowClient(url, "/threads/t/runs/stream", build_run_request()) for _ in range(3)]
        reader.join(60)
    wait_for_end_of_runs(ann)
    for stream in streams:
        stream.close()
    [(events, ended)] = results

    assert ended
    assert list_message_numbers(events) == [*range(60)]


def test_unread_websockets_stay_within_event_memory_limit(
    url: str, ann: httpx.Client, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, max_bytes = app.state.runs.shared_state.memory, 0
    with ExitStack() as stack:
        for number in range(4):
            ann.post("/threads", json={"thread_id": f"{number}"})
            path = f"{url.replace('http', 'ws')}/threads/{number}/stream/events"
            options: Any = {"max_queue": 1, "close_timeout": 0.1, "compression": None}
            connection = connect(path, additional_headers={"x-api-key": ANN}, **options)
            sock = stack.enter_context(connection)
            subscription = {"channels": ["custom"], "since": 0}
            order = {"id": 1, "method": "subscription.subscribe", "params": subscription}
            sock.send(json.dumps(order))
            begin = {"id": 2, "method": "run.start", "params": build_run_request()}
            ann.post(f"/threads/{number}/commands", json=begin)
        for number in range(4):
            wait_for_end_of_runs(ann, f"{number}")
            max_bytes = max(max_bytes, memory.size)
        # a client that is behind is sent away
        wait_until(lambda: not sum(app.state.clients._open_requests.values()))

    assert max_bytes <= USER_BYTES


# -- what is kept of runs that have ended


def test_few_events_of_ended_runs_are_kept(
    url: str, ann: httpx.Client, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_memory, "MAX_ENDED_BYTES", 100_000)
    plain = SlowClient(url, "/threads/t/runs/stream", build_run_request("paused")).read()
    stored = SlowClient(
        url, "/threads/t/runs/stream", build_run_request("paused", stream_resumable=True)
    ).read()
    wait_until(lambda: app.state.runs.shared_state.memory.size <= 100_000)
    newest, oldest = ann.get("/threads/t/runs").json()
    again = SlowClient(url, f"/threads/t/runs/{newest['run_id']}/stream").read()
    gone = ann.get(f"/threads/t/runs/{oldest['run_id']}/stream")

    assert (
        list_message_numbers(plain[0])
        == list_message_numbers(stored[0])
        == list_message_numbers(again[0])
        == [*range(60)]
    )
    assert gone.status_code == 410
    assert ann.get(f"/threads/t/runs/{oldest['run_id']}/join").json()["heard"] == ["all"]
    runs = [run for of in app.state.runs._by_tenant.values() for run in of.runs_by_id.values()]
    assert [(run.output, run.request.input) for run in runs] == [(None, None)] * 2


def test_thread_stream_works_after_events_were_dropped_and_erased(
    url: str, ann: httpx.Client, settings: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_memory, "MAX_ENDED_BYTES", 0)
    gate.open.set()

    def run_turn_and_read_events(text: str) -> str:
        params = {"assistant_id": "talk", "input": build_input(text)}
        order = {"id": 1, "method": "run.start", "params": params}
        ann.post("/threads/t/commands", json=order)
        wait_for_end_of_runs(ann)
        wanted, text = {"channels": ["values", "lifecycle"], "since": 0}, ""
        with ann.stream("POST", "/threads/t/stream/events", json=wanted) as stream:
            for line in stream.iter_lines():
                text += line
                if '"completed"' in line and text != "another":
                    break
                if text.count('"completed"') and "another" in text and '"completed"' in line:
                    break
        return text

    first = run_turn_and_read_events(SECRET)
    with open_checkpointer(settings.db) as saver:
        erase_messages_with_text(saver, SECRET)
    second = run_turn_and_read_events("another")

    assert SECRET in first
    assert "another" in second
    assert SECRET not in second


# -- which events are dropped


def build_filled_log(memory: EventMemory, user: str, *sizes: int) -> EventLog:
    log = EventLog(1, memory.get_account(None, user))
    log.increment_writer_count()
    for size in sizes:
        log.add("values", "x" * size)
    return log


async def fail_if_called() -> None:
    raise AssertionError("it is not yet time")


def test_received_events_are_dropped_first() -> None:
    async def add_events() -> None:
        memory = EventMemory(Limits(user_event_bytes=10_000))
        unread, read = (
            build_filled_log(memory, "ann", 2000, 2000),
            build_filled_log(memory, "ann", 3000),
        )
        reader = unread.iter_events_after(0, fail_if_called)
        await anext(reader)
        build_filled_log(memory, "ann", 4000)

        assert (unread.last_dropped, read.last_dropped) == (0, 1)

    asyncio.run(add_events())


def test_slowest_reader_loses_its_events_first() -> None:
    async def read_and_add_events() -> None:
        memory = EventMemory(Limits(user_event_bytes=10_000))
        logs = [build_filled_log(memory, "ann", *[1000] * count) for count in (6, 1, 2)]
        readers = [log.iter_events_after(0, fail_if_called) for log in logs]
        [slowest, *_] = [await anext(reader) for reader in readers]
        logs[2].add("values", "x" * 1000)

        assert [log.last_dropped > 0 for log in logs] == [True, False, False]
        with pytest.raises(LookupError, match="no longer available"):
            slowest[0].sse_frame  # noqa: B018 - it is read when it is sent
        assert [each.number for each in await anext(readers[2])] == [3]

    asyncio.run(read_and_add_events())


def test_events_of_user_with_most_events_are_dropped_first() -> None:
    memory = EventMemory(Limits(user_event_bytes=10_000, all_event_bytes=14_000))
    ann, bob = (
        build_filled_log(memory, "ann", *[1000] * 9),
        build_filled_log(memory, "bob", *[1000] * 3),
    )
    carol = build_filled_log(memory, "carol", *[1000] * 4)

    assert memory.size <= 14_000
    assert ann.last_dropped > 0
    assert (bob.last_dropped, carol.last_dropped) == (0, 0)


def test_event_larger_than_limit_is_kept_alone() -> None:
    memory = EventMemory(Limits(user_event_bytes=1000))
    logs = [build_filled_log(memory, "ann", 500), build_filled_log(memory, "ann", 5000)]

    assert [log.is_empty for log in logs] == [True, False]
    logs[1].add("values", "x")
    assert memory.size < 1000


def test_events_of_garbage_collected_log_are_not_counted() -> None:
    memory = EventMemory(Limits())
    build_filled_log(memory, "ann", 1000)
    assert memory.size > 1000

    log = build_filled_log(memory, "bob", 10)
    assert memory.size == log.size < 1000


def test_events_of_log_move_to_account_of_another_user() -> None:
    memory = EventMemory(Limits())
    log = build_filled_log(memory, "ann", 1000)
    log.charge_memory_to_account(memory.get_account(None, "bob"))

    assert memory.get_account(None, "ann").size == 0
    assert memory.get_account(None, "bob").size == memory.size == log.size
    log.drop_all()
    assert memory.size == 0
