"""List the functions of perdure that `asearch(query)` calls on a loaded index until its SQL runs.

    python -m benchmarks.search_path          # the way; --all adds every function that is entered
    python -m benchmarks.search_path --recall # the way of `recall(query)`; also with --all

The way are the calls that lead from `asearch` to where it asks for a thread, in that to each read
and each statement that is asked for, and to sqlite3's `execute`; what they call on the side, such
as the ranking, is not on it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.put_path import Function, functions

from perdure.memory import recall
from perdure.stores import SQLiteStore

# Functions that a search calls to request an OS thread, a read or a statement.
ASKED: frozenset[Function] = frozenset(
    {
        ("stores.operation_runner", "CallBatcher.submit"),
        ("effects", "Effect.__init__"),
        ("storage.flow", "NamedSQL.__call__"),
    }
)


class Trace:
    """Records the functions entered in any OS thread, and the call stacks that lead to SQL."""

    def __init__(self) -> None:
        self.on = False
        self.entered: dict[Function, None] = {}
        self.way: dict[Function, None] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """A profile function; see `sys.setprofile`."""
        if not self.on:
            return
        if event == "call" and frame.f_globals.get("__name__", "").startswith("perdure."):
            *callers, entered = functions(frame)
            self.entered[entered] = None
            if entered in ASKED:
                self.way |= dict.fromkeys(callers)
        elif event == "c_call" and getattr(arg, "__qualname__", "") in (
            "SimpleQueue.put",
            "Connection.execute",
        ):
            self.way |= dict.fromkeys(functions(frame))


@contextmanager
def tracing_of_new_threads(trace: Trace) -> Iterator[None]:
    """Trace the OS threads that are started in the block, such as the reading threads."""
    before = threading.getprofile()
    threading.setprofile(trace)
    try:
        yield
    finally:
        threading.setprofile(before)


@contextmanager
def recording(trace: Trace) -> Iterator[None]:
    """Record the functions that are entered in the block."""
    profile = sys.getprofile()
    sys.setprofile(trace)
    trace.on = True
    try:
        yield
    finally:
        trace.on = False
        sys.setprofile(profile)


def traced(folder: Path) -> Trace:
    """Trace the functions that the fourth search for the same words calls."""
    trace = Trace()

    async def search() -> None:
        async with SQLiteStore.open(folder / "x.db") as store:
            for number in range(20):
                await store.aput(("notes",), str(number), {"text": f"the lake, part {number}"})
            for _ in range(3):
                await store.asearch(("notes",), query="the lake")
            with recording(trace):
                await store.asearch(("notes",), query="the lake")

    with tracing_of_new_threads(trace):
        asyncio.run(search())
    return trace


def traced_recall(folder: Path) -> Trace:
    """Trace the functions that the fourth recall for the same words calls."""
    trace = Trace()
    with tracing_of_new_threads(trace), SQLiteStore.open(folder / "x.db") as store:
        for number in range(20):
            store.put(("notes",), str(number), {"text": f"the lake, part {number}"})
        for _ in range(3):
            recall("the lake", store=store, namespace=("notes",))
        with recording(trace):
            recall("the lake", store=store, namespace=("notes",))
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every function that is entered")
    parser.add_argument("--recall", action="store_true", help="a recall in place of a search")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = traced_recall(Path(folder)) if args.recall else traced(Path(folder))
    shown = list(trace.entered if args.all else trace.way)
    for module, name in shown:
        print(f"{module:36} {name}")
    print(f"{len(shown)} functions, {len({module for module, _ in shown})} modules")


if __name__ == "__main__":
    main()
