"""Helpers for other processes: several that start together, and one that is killed at work."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from perdure.storage.flow import Flow, Row, fetch_rows

# imported once, in the fork server, because fresh interpreters would import for a minute
PRELOADED_MODULES = [
    *("pytest", "perdure.checkpointers", "langgraph.graph", "langgraph.checkpoint.memory"),
    *(
        "perdure.stores",
        "tests.store_backends",
        "perdure.checkpointers.postgres",
        "perdure.memory.long_term.background.runtime",
        "langchain.agents.middleware",
    ),
]
PATIENCE_S = 120.0


def forkserver_context() -> Any:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    return context


def run_in_processes(count: int, work: Callable[[Any, Connection, int], None], place: Any) -> None:
    """Run `work` in processes that start together.

    Each process sends "ready", waits for "go", and sends "done".
    """
    context = forkserver_context()
    children = []
    for number in range(count):
        ours, theirs = context.Pipe()
        child = context.Process(target=work, args=(place, theirs, number), daemon=True)
        child.start()
        theirs.close()
        children.append((child, ours))
    replies = [pipe.recv() for _, pipe in children]
    for _, pipe in children:
        pipe.send("go")
    for child, pipe in children:
        child.join(PATIENCE_S)
        replies += [pipe.recv()] if pipe.poll() else []
        pipe.close()

    assert ["ready"] * count + ["done"] * count == replies
    assert [0] * count == [child.exitcode for child, _ in children]


def iter_received(acks: Connection, timeout_s: float | None) -> Iterator[Any]:
    """Yield what is received within a time, or until the sender has died."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while end is None or acks.poll(max(0.0, end - time.monotonic())):
        try:
            yield acks.recv()
        except (EOFError, OSError):  # the sender died between two acknowledgements, or during one
            return


def run_and_kill(
    victim: Callable[..., None],
    args: tuple[Any, ...],
    random_source: random.Random,
    *,
    early_share: float,
    max_acks: int,
) -> list[Any]:
    """Run a function in a process, kill it at a random time, and return what it acknowledged.

    Args:
        victim: Takes the path, the end of a pipe and the other arguments; first sends `"ready"`.
        args: The path, and the other arguments.
        random_source: Decides when the process is killed.
        early_share: Share of kills while the file is created, recovered, or first written to.
        max_acks: Otherwise, the maximum number of acknowledgements before the kill.
    """
    context = forkserver_context()
    ours, theirs = context.Pipe(duplex=False)
    path, *others = args
    process = context.Process(target=victim, args=(path, theirs, *others), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "ready"
        if random_source.random() < early_share:
            acks = list(iter_received(ours, random_source.uniform(0, 0.08)))
        else:
            ack_count = random_source.randint(1, max_acks)
            acks = [
                ack for _, ack in zip(range(ack_count), iter_received(ours, None), strict=False)
            ]
            time.sleep(random_source.uniform(0, 0.004))
    finally:
        process.kill()
        process.join()
    acks += iter_received(ours, None)
    ours.close()
    assert process.exitcode == -signal.SIGKILL
    process.close()
    return acks


def run_integrity_check() -> Flow[list[Row]]:
    return (yield from fetch_rows("PRAGMA integrity_check"))
