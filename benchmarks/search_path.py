"""List the functions of perdure that `asearch(query)` calls on a loaded index until its SQL runs.

    python -m benchmarks.search_path          # the way; --all adds every function that is entered

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
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.put_path import Function, functions

from perdure.stores import SQLiteStore

ASKED: frozenset[Function] = frozenset(  # entered where a search asks for a thread, a read, a row
    {
        ("stores.parts", "CallBatcher.submit"),
        ("effects", "Effect.__init__"),
        ("storage.flow", "NamedSQL.__call__"),
    }
)


class Trace:
    """Notes functions that are entered, in all threads, and those on the way to SQL."""

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


def traced(folder: Path) -> Trace:
    """Return the functions that the fourth search for the same words calls."""
    trace, before = Trace(), threading.getprofile()
    threading.setprofile(trace)  # of the reading threads, which are yet to start

    async def search() -> None:
        async with SQLiteStore.open(folder / "x.db") as store:
            for number in range(20):
                await store.aput(("notes",), str(number), {"text": f"the lake, part {number}"})
            for _ in range(3):
                await store.asearch(("notes",), query="the lake")
            profile = sys.getprofile()
            sys.setprofile(trace)
            trace.on = True
            try:
                await store.asearch(("notes",), query="the lake")
            finally:
                trace.on = False
                sys.setprofile(profile)

    try:
        asyncio.run(search())
    finally:
        threading.setprofile(before)
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every function that is entered")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = traced(Path(folder))
    shown = list(trace.entered if args.all else trace.way)
    for module, name in shown:
        print(f"{module:36} {name}")
    print(f"{len(shown)} functions, {len({module for module, _ in shown})} modules")


if __name__ == "__main__":
    main()
