"""List the functions of perdure that a put on a cached thread calls until its SQL is executed.

    python -m benchmarks.put_path               # the way; --all adds every function that is entered
    python -m benchmarks.put_path --remember    # each function that `remember` of a sentence enters

The way are the calls that lead from `put` to the plan, from `put` to where that is handed to the
writing thread, and from there to sqlite3's `execute`; what they call on the side, such as the
codec, is not on it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import empty_checkpoint

from perdure import SQLiteCheckpointer
from perdure.memory import remember
from perdure.stores import SQLiteStore

Function = tuple[str, str]  # module, qualified name
REMEMBERED: tuple[str, ...] = (
    "The user has a daughter called Ida",
    "She works as a gardener in Bremen",
    "Meetings before nine are inconvenient",
    "The user has a dog called Bruno",
)
PLAN: Function = ("checkpointers.writer", "CheckpointWriter._plan_checkpoint")
SUBMIT: Function = ("storage.job_queue", "JobQueue.put")


def functions(frame: FrameType | None) -> list[Function]:
    """Return the functions of perdure on a call stack, outermost first."""
    found = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("perdure."):
            found.append((module.removeprefix("perdure."), frame.f_code.co_qualname))
        frame = frame.f_back
    return found[::-1]


class Trace:
    """Records the functions entered in any OS thread, and the call stacks of `execute`."""

    def __init__(self) -> None:
        self.on = False
        self.entered: dict[Function, None] = {}
        self.planned: list[Function] = []
        self.handed_over: list[Function] = []
        self.executed: list[Function] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """A profile function; see `sys.setprofile`."""
        if not self.on:
            return
        if event == "call" and frame.f_globals.get("__name__", "").startswith("perdure."):
            *callers, entered = functions(frame)
            self.entered[entered] = None
            if entered == PLAN:
                self.planned = [*callers, entered]
            elif entered == SUBMIT:
                self.handed_over = callers
        elif event == "c_call" and getattr(arg, "__name__", "") == "execute":
            self.executed = max(self.executed, functions(frame), key=len)


def put(saver: SQLiteCheckpointer, at: RunnableConfig, number: int) -> RunnableConfig:
    """Put a checkpoint with one more message, and return its config."""
    checkpoint = empty_checkpoint()
    said = [HumanMessage(f"message {i}", id=str(i)) for i in range(number)]
    checkpoint["channel_values"] = {"messages": said}
    checkpoint["channel_versions"] = {"messages": number}
    return saver.put(at, checkpoint, {"source": "loop", "step": number}, {"messages": number})


def traced(folder: Path) -> Trace:
    """Trace the functions that a thread's fourth put calls."""
    trace, before = Trace(), threading.getprofile()
    # Applies to the writer's OS thread, which has not been started yet.
    threading.setprofile(trace)
    try:
        with SQLiteCheckpointer.open(folder / "x.db") as saver:
            at: RunnableConfig = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
            for number in (1, 2, 3):
                at = put(saver, at, number)
            profile = sys.getprofile()
            sys.setprofile(trace)
            trace.on = True
            try:
                put(saver, at, 4)
            finally:
                trace.on = False
                sys.setprofile(profile)
    finally:
        threading.setprofile(before)
    return trace


def traced_remember(folder: Path) -> Trace:
    """Trace the functions that a fourth `remember` in the same namespace calls."""
    trace, before = Trace(), threading.getprofile()
    # Applies to the writer's OS thread, which has not been started yet.
    threading.setprofile(trace)
    try:
        with SQLiteStore.open(folder / "x.db") as store:
            *earlier, sentence = REMEMBERED
            for text in earlier:
                remember(text, store=store, namespace=("notes",))
            profile = sys.getprofile()
            sys.setprofile(trace)
            trace.on = True
            try:
                remember(sentence, store=store, namespace=("notes",))
            finally:
                trace.on = False
                sys.setprofile(profile)
    finally:
        threading.setprofile(before)
    return trace


def way(trace: Trace) -> list[Function]:
    """Return the distinct functions on the call path from `put` to `execute`."""
    stacks = *trace.planned, *trace.handed_over, *trace.executed
    return [*dict.fromkeys(stacks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every function that is entered")
    parser.add_argument("--remember", action="store_true", help="trace `remember`, not `put`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = (traced_remember if args.remember else traced)(Path(folder))
    shown = list(trace.entered) if args.all or args.remember else way(trace)
    for module, name in shown:
        print(f"{module:36} {name}")
    print(f"{len(shown)} functions, {len({module for module, _ in shown})} modules")


if __name__ == "__main__":
    main()
