"""Other processes: many that begin together, and one that is killed while it works."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from perdure.storage.flow import Flow, Row, fetch_rows

# imported once, in the server that forks: fresh interpreters would import for a minute
WARM = [
    *("pytest", "perdure.checkpointers", "langgraph.graph", "langgraph.checkpoint.memory"),
    *(
        "perdure.stores",
        "tests.store_backends",
        "perdure.checkpointers.postgres",
        "perdure.memory.background.runtime",
        "langchain.agents.middleware",
    ),
]
PATIENCE_S = 120.0


def warm() -> Any:
    context = get_context("forkserver")
    context.set_forkserver_preload(WARM)
    return context


def in_processes(count: int, work: Callable[[Any, Connection, int], None], place: Any) -> None:
    """The work in processes that begin together: each says ready, is told to go, and says done."""
    context = warm()
    children = []
    for number in range(count):
        ours, theirs = context.Pipe()
        child = context.Process(target=work, args=(place, theirs, number), daemon=True)
        child.start()
        theirs.close()
        children.append((child, ours))
    said = [pipe.recv() for _, pipe in children]
    for _, pipe in children:
        pipe.send("go")
    for child, pipe in children:
        child.join(PATIENCE_S)
        said += [pipe.recv()] if pipe.poll() else []
        pipe.close()

    assert ["ready"] * count + ["done"] * count == said
    assert [0] * count == [child.exitcode for child, _ in children]


def received(acks: Connection, timeout_s: float | None) -> Iterator[Any]:
    """What comes within a time, or until the sender is dead."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while end is None or acks.poll(max(0.0, end - time.monotonic())):
        try:
            yield acks.recv()
        except (EOFError, OSError):  # it died between two acknowledgements, or within one
            return


def killed(
    victim: Callable[..., None],
    args: tuple[Any, ...],
    chance: random.Random,
    *,
    early: float,
    most: int,
) -> list[Any]:
    """Run a victim, kill it somewhere, and return what it had acknowledged.

    Args:
        victim: Takes the path, the end of a pipe and the other arguments; says `"ready"` first.
        args: The path, and the other arguments.
        chance: Decides when.
        early: How often it is killed while the file is made, recovered, or first written to.
        most: After how many acknowledgements at most, otherwise.
    """
    context = warm()
    ours, theirs = context.Pipe(duplex=False)
    path, *others = args
    process = context.Process(target=victim, args=(path, theirs, *others), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "ready"
        if chance.random() < early:
            acks = list(received(ours, chance.uniform(0, 0.08)))
        else:
            wanted = chance.randint(1, most)
            acks = [ack for _, ack in zip(range(wanted), received(ours, None), strict=False)]
            time.sleep(chance.uniform(0, 0.004))
    finally:
        process.kill()
        process.join()
    acks += received(ours, None)
    ours.close()
    assert process.exitcode == -signal.SIGKILL
    process.close()
    return acks


def integrity() -> Flow[list[Row]]:
    return (yield from fetch_rows("PRAGMA integrity_check"))
